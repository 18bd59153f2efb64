"""Contenders on the same machine at the same time: a period of steps of one, then of the
next, round after round. What else the machine does meets all of them, and medians over
rounds forget it."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from contenders import Contender, PERIOD


class Result(NamedTuple):
    """Seconds."""

    init: float  # Making the first state; some compile here.
    first: float  # The first step.
    start: float  # All compiling: the first period, less a later one.
    phases: list[float]  # Every step of a period; medians over rounds.
    worst: float  # The slowest single step, whoever is to blame.
    state_bytes: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.phases)

    @property
    def median(self) -> float:
        return statistics.median(self.phases)

    @property
    def slowest(self) -> float:
        return max(self.phases)


def _timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    out = jax.block_until_ready(fn())
    return out, time.perf_counter() - start


class _Runner:
    def __init__(self, contender: Contender):
        self.contender = contender
        self.carry, self.init = _timed(contender.init)
        leaves = jax.tree.leaves(contender.state(self.carry))
        self.state_bytes = sum(x.nbytes for x in leaves if isinstance(x, jax.Array))
        self.number = 0
        self.first_period = self.period()
        self.rounds: list[list[float]] = []

    def period(self) -> list[float]:
        contender = self.contender
        seconds = []
        calls = PERIOD if contender.steps_per_call == 1 else 1
        for _ in range(calls):
            step = lambda: contender.step(self.carry, self.number)
            self.carry, took = _timed(step)
            self.number += contender.steps_per_call
            seconds.append(took / contender.steps_per_call)
        return seconds

    def result(self) -> Result:
        phases = [statistics.median(phase) for phase in zip(*self.rounds)]
        compiling = (sum(self.first_period) - sum(phases)) * self.contender.steps_per_call
        return Result(
            self.init,
            self.first_period[0] * self.contender.steps_per_call,
            self.init + compiling,
            phases,
            max(map(max, self.rounds)),
            self.state_bytes,
        )


def race(
    contenders: list[Contender],
    seconds: float,
    least: int = 3,
    look: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = print,
) -> dict[str, Result]:
    """Rounds until `seconds` are over, at least `least`; `look` is called in each.
    A contender that fails is left out, and said to be."""
    runners = []
    for contender in contenders:
        try:
            runners.append(_Runner(contender))
        except Exception as error:  # Another library's: the race goes on without it.
            if "kfac-jax" not in contender.name:
                raise
            tell(f"{contender.name} fails: {type(error).__name__}: {error}"[:200])
            continue
        tell(f"{contender.name}: {runners[-1].first_period[0]:.2f} s for the first call")
    began, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - began < seconds:
        look()
        for runner in runners:
            runner.rounds.append(runner.period())
        rounds += 1
    tell(f"{rounds} rounds of {PERIOD} steps")
    return {runner.contender.name: runner.result() for runner in runners}


class Compiled(NamedTuple):
    seconds: float  # Tracing, lowering, compiling.
    temp_bytes: int | None
    flops: float | None


def compiled(contender: Contender) -> Compiled | None:
    if contender.lower is None:
        return None
    start = time.perf_counter()
    program = contender.lower().compile()
    seconds = time.perf_counter() - start
    program = getattr(program, "compiled", program)
    memory, cost = program.memory_analysis(), program.cost_analysis()
    return Compiled(
        seconds,
        getattr(memory, "temp_size_in_bytes", None),
        cost.get("flops") if isinstance(cost, dict) else None,
    )
