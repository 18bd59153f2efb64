"""What do steps gain, or lose, by a bound on their length as gradients measure it? The
same steps of `KFAC()` with that bound and without, on problems of the races and on other
people's models, with as many batches in the same order.

    python tests/benchmarks/coupling.py --data folder/of/mnist
    python tests/benchmarks/coupling.py --problems gru curves --steps 100 --seeds 1
    pip install -e '.[zoo]'; python tests/benchmarks/coupling.py --problems zoo:equimo_vit

Printed is the loss of the averaged model, on a thousand examples, and how many times
longer than blocks say gradients said that a step is: the median and the largest of a run.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import race_problems

import eqx_kfac as kfac


class Trained(NamedTuple):
    """A model, a loss function `(model, memory, *batch) -> (loss, memory)`, and data."""

    model: Any
    memory: Any
    loss_fn: Callable
    data: tuple
    batch: int


class Outcome(NamedTuple):
    loss: float
    couplings: list[float]


PROBLEMS = ["dense", "small_batch", "many_classes", "curves", "mixer", "gru"]


def problem(name: str, data: Path | None) -> Trained:
    if name.startswith("zoo:"):
        import zoo
        import zoo_models

        own = getattr(zoo_models, name.removeprefix("zoo:"))()
        model = zoo.converted(own, False)
        return Trained(model, own.memory, own.loss_fn, own.data, own.batch)
    race = race_problems.race(getattr(race_problems, name), 0, data)
    return Trained(race.model, race.memory, race.loss_fn, race.train, race.batch)


def train(own: Trained, region: kfac.TrustRegion, steps: int, seed: int) -> Outcome:
    optimizer = kfac.KFAC(norm_constraint=region)

    def loss_fn(model, *batch, memory):
        return own.loss_fn(model, memory, *batch)

    @eqx.filter_jit
    def step(model, state, memory, batch, key):
        model, state, info = optimizer.step(
            loss_fn, model, state, *batch, key=key, memory=memory
        )
        return model, state, info.select(info.aux, memory)

    carry = own.model, eqx.filter_jit(optimizer.init)(own.model), own.memory
    rng, size = np.random.default_rng(seed), len(own.data[0])

    def draw(number):
        drawn = rng.choice(size, min(number, size), replace=False)
        return tuple(jnp.asarray(a[drawn]) for a in own.data)

    couplings = []
    for i in range(steps):
        carry = step(*carry, draw(own.batch), jax.random.key(1000 * seed + i))
        couplings.append(float(carry[1].extent.coupling))
    model, state, memory = carry
    value = eqx.filter_jit(lambda m, *batch: loss_fn(m, *batch, memory=memory)[0].value)
    return Outcome(float(value(kfac.averaged(model, state), *draw(1000))), couplings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=PROBLEMS)
    parser.add_argument("--data", type=Path, help="MNIST; else smaller digits")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--radius", type=float, help="of the bound; else the default")
    options = parser.parse_args()
    radius = {} if options.radius is None else dict(measured_radius=options.radius)
    regions = {
        "without": kfac.TrustRegion(measured_radius=jnp.inf),
        "with": kfac.TrustRegion(**radius),
    }
    print("| problem | seed | without | with | times longer, median | largest |")
    print("|---|---|---|---|---|---|")
    for name in options.problems:
        own = problem(name, options.data)
        for seed in range(options.seeds):
            found = {
                which: train(own, region, options.steps, seed)
                for which, region in regions.items()
            }
            couplings = found["without"].couplings
            middle, largest = statistics.median(couplings), max(couplings)
            losses = " | ".join(f"{found[which].loss:.4g}" for which in regions)
            cells = f"{name} | {seed} | {losses} | {middle:.3g} | {largest:.3g}"
            print(f"| {cells} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
