"""If only the optimizer is changed, is one sooner at a better loss? `KFAC()`, one setting
for all problems, against optimizers whose learning rate is the best of a grid for each
problem, with warm-up and a cosine to zero; all with the same seconds of steps, and then,
each at that rate, with the same number of steps.

    python tests/benchmarks/races.py --data folder/of/mnist --out runs/races --steps 500
    python tests/benchmarks/races.py --problems gru curves --seconds 5 --seeds 1
    python tests/benchmarks/races.py --problems large_transformer   # on an accelerator
    python tests/benchmarks/races.py --toy          # does everything run?

Compiling is not counted, nor looking at the losses. Grids run on the first seed, the best
of each method on all seeds. Every run is kept in a file; a suite that was interrupted
goes on. Nothing else should run on the machine: schedules follow the clock.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import race_problems
from race_problems import Race
from soap import soap

import eqx_kfac as kfac


class Method(NamedTuple):
    """`init(model) -> carry`, `step(batch, carry, memory, rate, key) -> (carry, memory,
    loss)`, `final(carry) -> model`; a carry begins with the model."""

    name: str
    rates: tuple[float | None, ...]  # `None`: chosen by itself.
    make: Callable[[Race, float | None], tuple[Callable, Callable, Callable]]


def with_kfac(make_optimizer: Callable[[], kfac.KFAC]) -> Callable:
    def make(race, rate):
        optimizer = make_optimizer()

        def loss_fn(model, *batch, memory):
            return race.loss_fn(model, memory, *batch)

        def init(model):
            return model, eqx.filter_jit(optimizer.init)(model)

        def step(batch, carry, memory, rate, key):
            model, state = carry
            model, state, info = optimizer.step(
                loss_fn, model, state, *batch, key=key, memory=memory
            )
            return (model, state), info.select(info.aux, memory), info.loss

        def final(carry):
            model, state = carry
            return (
                model
                if state.averaged_parameters is None
                else kfac.averaged(model, state)
            )

        return init, step, final

    return make


def with_optax(transformation: Callable[[], optax.GradientTransformation]) -> Callable:
    """Optimizers at learning rate 1: updates are scaled by the rate of the moment."""

    def make(race, rate):
        optimizer = transformation()

        def init(model):
            model = kfac.revert(model)
            return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

        def step(batch, carry, memory, rate, key):
            model, state = carry

            def objective(model):
                loss, new = race.loss_fn(model, memory, *batch)
                return loss.value, new

            (loss, memory), grads = eqx.filter_value_and_grad(objective, has_aux=True)(
                model
            )
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = optimizer.update(grads, state, params)
            updates = jax.tree.map(lambda u: rate * u, updates)
            return (eqx.apply_updates(model, updates), state), memory, loss

        return init, step, lambda carry: carry[0]

    return make


def fixed() -> kfac.KFAC:
    """What the pages recommended before: numbers, of the last model."""
    numbers = dict(norm_constraint=1e-2, curvature_period=1, inverse_period=5)
    return kfac.KFAC(0.3, 0.9, 1e-3, averaging=None, **numbers)


RATES = (3e-4, 1e-3, 3e-3, 1e-2)
METHODS = [
    Method("KFAC()", (None,), with_kfac(kfac.KFAC)),
    Method("K-FAC, numbers of before", (None,), with_kfac(fixed)),
    Method("Adam", RATES, with_optax(lambda: optax.adam(1.0))),
    Method("AdamW", RATES, with_optax(lambda: optax.adamw(1.0, weight_decay=0.01))),
    Method(
        "SGD",
        (0.01, 0.03, 0.1, 0.3),
        with_optax(lambda: optax.sgd(1.0, momentum=0.9, nesterov=True)),
    ),
    Method("Muon", (1e-3, 3e-3, 1e-2, 3e-2), with_optax(lambda: optax.contrib.muon(1.0))),
    Method("SOAP", RATES, with_optax(lambda: soap(1.0))),
]


class Budget(NamedTuple):
    """What a run may spend: seconds, or steps."""

    amount: float
    steps: bool = False

    def part(self, seconds: float, steps: int) -> float:
        """Which part of it is spent."""
        return (steps if self.steps else seconds) / self.amount


class Run(NamedTuple):
    problem: str
    method: str
    rate: float | None
    seed: int
    seconds: list[float]  # When the losses were looked at,
    train: list[float]
    test: list[float]
    steps: int

    @property
    def last(self) -> float:
        return self.train[-1] if np.isfinite(self.train[-1]) else np.inf


def cosine(part: float, warm_up: float = 0.05) -> float:
    """The learning rate, given which part of the time is over."""
    if part < warm_up:
        return part / warm_up
    return 0.5 * (1 + np.cos(np.pi * min(1.0, (part - warm_up) / (1 - warm_up))))


def batches(race: Race, seed: int) -> Iterator[tuple]:
    rng = np.random.default_rng(seed)
    number = len(race.train[0])
    while True:
        order = rng.permutation(number)
        for i in range(0, number - race.batch + 1, race.batch):
            yield tuple(a[order[i : i + race.batch]] for a in race.train)


def run(race: Race, method: Method, rate: Any, seed: int, budget: Budget) -> Run:
    init, step, final = method.make(race, rate)
    copied = lambda tree: jax.tree.map(
        lambda a: jnp.array(a) if eqx.is_array(a) else a, tree
    )

    @eqx.filter_jit(donate="all-except-first")
    def jitted(fixed, carry, memory):
        batch, rate, key = fixed
        return step(batch, carry, memory, rate, key)

    @eqx.filter_jit
    def losses(carry, memory, train, test):
        value = lambda arrays: race.loss_fn(final(carry), memory, *arrays)[0].value
        return value(train), value(test)

    number, both = race.looked_at, (race.train, race.test)
    some = [tuple(jnp.asarray(a[:number]) for a in arrays) for arrays in both]
    keys = jax.random.key(seed)

    def begin():
        model, memory = copied((race.model, race.memory))
        return init(model), memory, batches(race, seed)

    def take(carry, memory, source, i, part):
        rate_now = jnp.asarray(0.0 if rate is None else rate * cosine(part), jnp.float32)
        fixed = next(source), rate_now, jax.random.fold_in(keys, i)
        carry, memory, loss = jitted(fixed, carry, memory)
        return carry, memory, jax.block_until_ready(loss)

    carry, memory, source = begin()
    for i in range(2):  # Compiles.
        carry, memory, _ = take(carry, memory, source, i, 0.0)
    losses(carry, memory, *some)
    carry, memory, source = begin()
    looks, times, spent, i = [], [], 0.0, 0
    first = losses(carry, memory, *some)
    looks.append(first)
    times.append(0.0)
    while (part := budget.part(spent, i)) < 1:
        start = time.perf_counter()
        carry, memory, _ = take(carry, memory, source, i, part)
        spent += time.perf_counter() - start
        i += 1
        if budget.part(spent, i) >= len(looks) / 30:
            looks.append(losses(carry, memory, *some))
            times.append(spent)
    train, test = zip(*[map(float, look) for look in looks])
    return Run(race.name, method.name, rate, seed, times, [*train], [*test], i)


class Book:
    """All runs so far that may spend the same, in a file."""

    def __init__(self, folder: Path | None, name: str, budget: Budget):
        self.path = None if folder is None else folder / f"{name}.json"
        self.budget, self.runs = budget, {}
        if self.path is not None and self.path.exists():
            found = [Run(*entry) for entry in json.loads(self.path.read_text())]
            self.runs = {self.key(run): run for run in found}

    @staticmethod
    def key(run: Run) -> tuple:
        return run.problem, run.method, run.rate, run.seed

    def get(self, race: Race, method: Method, rate: Any, seed: int) -> Run:
        key = race.name, method.name, rate, seed
        if key not in self.runs:
            made = run(race, method, rate, seed, self.budget)
            self.runs[key] = made
            jax.clear_caches()
            told = f"  {race.name:20} {method.name:26} {rate or '':<8} seed {seed}: "
            told += f"{made.steps} steps, train {made.train[-1]:.4g}"
            print(f"{told}, test {made.test[-1]:.4g}", flush=True)
            if self.path is not None:
                self.path.write_text(json.dumps(list(self.runs.values())))
        return self.runs[key]

    def of_seeds(self, races: list[Race], method: Method, rate: Any) -> list[Run]:
        return [self.get(race, method, rate, seed) for seed, race in enumerate(races)]


def by_rate(
    make: Callable[[int], Race], method: Method, budget: Budget, seeds: int
) -> list[list[Run]]:
    """The runs of each rate of a method: of the race that `make` gives for each seed."""
    return [
        [run(make(seed), method, rate, seed, budget) for seed in range(seeds)]
        for rate in method.rates
    ]


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.last)


def table(finished: dict[str, dict[str, list[Run]]]) -> str:
    """Medians over seeds of the last training loss, test loss below it."""
    methods = list(next(iter(finished.values())))
    lines = ["| problem | " + " | ".join(methods) + " |"]
    lines.append("|---" * (1 + len(methods)) + "|")
    for problem, of_method in finished.items():
        cells = []
        for runs in of_method.values():
            train = statistics.median(run.last for run in runs)
            test = statistics.median(run.test[-1] for run in runs)
            rate = "" if runs[0].rate is None else f", {runs[0].rate:g}"
            cells.append(f"{train:.3g} ({test:.3g}{rate})")
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(finished: dict[str, dict[str, list[Run]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    columns = min(4, len(finished))
    rows = -(-len(finished) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False
    )
    for ax, (problem, of_method) in zip(axes.flat, finished.items()):
        for i, (name, runs) in enumerate(of_method.items()):
            for j, one in enumerate(runs):
                label = name if j == 0 else None
                ax.plot(one.seconds, one.train, color=f"C{i}", alpha=0.8, label=label)
        ax.set(title=problem, yscale="log", xlabel="seconds of steps")
        lowest = [min(run.train) for runs in of_method.values() for run in runs]
        start = max(run.train[0] for runs in of_method.values() for run in runs)
        if min(lowest) > 0:
            ax.set_ylim(0.7 * min(lowest), 2 * start)
        else:
            ax.set_yscale("linear")
    for ax in axes.flat[len(finished) :]:
        ax.axis("off")
    axes.flat[0].set_ylabel("training loss")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", help="some of them, by function name")
    parser.add_argument("--methods", nargs="*", help="some of them, by name")
    parser.add_argument("--seconds", type=float, default=12.0, help="of steps, a run")
    parser.add_argument("--steps", type=int, default=0, help="and so many steps, a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="a folder with MNIST's test set")
    parser.add_argument("--out", type=Path, help="a folder for results and pictures")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.problems, options.seconds, options.seeds = ["regression"], 0.2, 1
        options.steps = 5
    builds = race_problems.ALL
    if options.problems:
        known = [*race_problems.ALL, *race_problems.LARGE]
        builds = [b for b in known if b.__name__ in options.problems]
    methods = [m for m in METHODS if not options.methods or m.name in options.methods]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(options.out / "compiled"))
    in_seconds = Book(options.out, "races", Budget(options.seconds))
    in_steps = None
    if options.steps:
        in_steps = Book(options.out, "steps", Budget(options.steps, steps=True))
    finished, stepped = {}, {}
    for build in builds:
        races = [race_problems.race(build, s, options.data) for s in range(options.seeds)]
        of_method, steps_of_method = {}, {}
        for method in methods:
            rates = method.rates[:2] if options.toy else method.rates
            grid = [in_seconds.get(races[0], method, r, 0) for r in rates]
            rate = best(grid).rate
            of_method[method.name] = in_seconds.of_seeds(races, method, rate)
            if in_steps is not None:  # At the rate that was best in seconds.
                steps_of_method[method.name] = in_steps.of_seeds(races, method, rate)
        finished[races[0].name] = of_method
        stepped[races[0].name] = steps_of_method
    told = table(finished)
    if in_steps is not None:
        told += f"\n\nAfter {options.steps} steps:\n\n{table(stepped)}"
    print(told)
    if options.out is not None:
        (options.out / "races.md").write_text(told + "\n")
        draw(finished, options.out / "races.png")


if __name__ == "__main__":
    main()
