"""What does a step of `KFAC()` cost, in gradients: averaged over its periods, and when
nothing is due? Over kinds of layers, widths, depths and batches; on whatever device JAX
has.

    python tests/benchmarks/steps.py                 # ten minutes on two CPU cores
    python tests/benchmarks/steps.py --large         # sizes for an accelerator
    python tests/benchmarks/steps.py --toy           # does everything run?

Steps are called as in training, one after the other without waiting for the last one's
result. Contenders take turns; medians over rounds.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import problems
from contenders import Contender
from problems import Problem

import eqx_kfac as kfac


CYCLE = 50  # Steps, in which all that `KFAC()` does now and then is done once or more.
IDLE = 9  # Steps after the first of a cycle, at which nothing is due.


def dense(width: int, depth: int, batch: int) -> Callable[[], Problem]:
    return lambda: problems.mlp(batch, width, depth, inputs=width)


def convnet(width: int, batch: int, size: int = 16) -> Callable[[], Problem]:
    widths = (width // 2, width, width)
    return lambda: problems.convnet(batch, widths=widths, size=size)


def transformer(width: int, depth: int, length: int, batch: int) -> Callable[[], Problem]:
    return lambda: problems.transformer(batch, False, width, depth, length)


TOY = {"dense 8x1, batch 8": dense(8, 1, 8)}
SMALL = {
    "dense 64x4, batch 128": dense(64, 4, 128),
    "dense 256x4, batch 128": dense(256, 4, 128),
    "dense 256x4, batch 512": dense(256, 4, 512),
    "dense 256x4, batch 2048": dense(256, 4, 2048),
    "dense 256x12, batch 512": dense(256, 12, 512),
    "dense 1024x4, batch 512": dense(1024, 4, 512),
    "ConvNet of 64 channels, batch 128": convnet(64, 128),
    "transformer 64x4, 32 x 40 characters": transformer(64, 4, 40, 32),
    "transformer 128x2, 16 x 64 characters": transformer(128, 2, 64, 16),
}
LARGE = {
    "dense 256x4, batch 512": dense(256, 4, 512),
    "dense 1024x4, batch 1024": dense(1024, 4, 1024),
    "dense 4096x4, batch 4096": dense(4096, 4, 4096),
    "ConvNet of 128 channels, 32x32, batch 512": convnet(128, 512, 32),
    "transformer 512x8, 64 x 256 characters": transformer(512, 8, 256, 64),
    "transformer 1024x8, 32 x 512 characters": transformer(1024, 8, 512, 32),
}


class Runner:
    def __init__(self, contender: Contender):
        self.contender = contender
        self.carry = jax.block_until_ready(contender.init())
        leaves = jax.tree.leaves(contender.state(self.carry))
        self.state_bytes = sum(x.nbytes for x in leaves if eqx.is_array(x))
        start = time.perf_counter()
        self.take(1)
        self.compiling = time.perf_counter() - start
        self.take(2)

    def take(self, number: int, first: int | None = None) -> float:
        """Seconds a step; of K-FAC, from step `first` on."""
        if first is not None and isinstance(self.carry, tuple):
            model, state = self.carry
            if hasattr(state, "refactorise"):
                state = state._replace(step=jnp.array(first, state.step.dtype))
                self.carry = jax.block_until_ready((model, state))
        calls = max(1, number // self.contender.steps_per_call)
        start = time.perf_counter()
        for i in range(calls):
            out = self.contender.step(self.carry, i)
            if self.carry is not None:
                self.carry = out
        jax.block_until_ready(out)
        took = time.perf_counter() - start
        return took / (calls * self.contender.steps_per_call)


def measure(name: str, make: Callable[[], Problem], seconds: float) -> dict[str, Any]:
    problem = make()
    racers = {
        "gradient": contenders.gradient(problem),
        "Adam": contenders.from_optax("Adam", lambda: optax.adam(1e-3), problem),
        "KFAC()": contenders.ours("KFAC()", problem, kfac.KFAC()),
    }
    runners = {key: Runner(racer) for key, racer in racers.items()}
    rounds: dict[str, list[float]] = {key: [] for key in (*runners, "idle")}
    began = time.perf_counter()
    while len(rounds["idle"]) < 3 or time.perf_counter() - began < seconds:
        for key, runner in runners.items():
            rounds[key].append(runner.take(CYCLE, CYCLE * 20))
        rounds["idle"].append(runners["KFAC()"].take(IDLE, CYCLE * 20 + 1))
    found = {key: statistics.median(times) for key, times in rounds.items()}
    return dict(
        name=name,
        parameters=problems.parameters(problem),
        seconds=found,
        compiling={key: runner.compiling for key, runner in runners.items()},
        state_bytes=runners["KFAC()"].state_bytes,
    )


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| | parameters | gradient ms | Adam | `KFAC()`, mean | nothing due "
        "| compiling s: Adam | `KFAC()` | state MB |",
        "|---" * 9 + "|",
    ]
    for result in results:
        seconds, compiling = result["seconds"], result["compiling"]
        parts = [seconds[key] / seconds["gradient"] for key in ("Adam", "KFAC()", "idle")]
        cells = [
            result["name"],
            f"{result['parameters']:.2g}",
            f"{1e3 * seconds['gradient']:.3g}",
            *[f"{part:.2f}" for part in parts],
            *[f"{compiling[key]:.1f}" for key in ("Adam", "KFAC()")],
            f"{result['state_bytes'] / 1e6:.3g}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="for an accelerator")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=20, help="of steps, a case")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    cases = TOY if options.toy else LARGE if options.large else SMALL
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, Python {platform.python_version()}")
    results = []
    for name, make in cases.items():
        if options.only in name:
            results.append(measure(name, make, 0.0 if options.toy else options.seconds))
            print(table(results).splitlines()[-1], flush=True)
            jax.clear_caches()
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
