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
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import race_problems
from race_problems import Race

import eqx_kfac as kfac


class Outcome(NamedTuple):
    loss: float
    couplings: list[float]


PROBLEMS = ["dense", "small_batch", "many_classes", "curves", "mixer", "gru"]


def problem(name: str, data: Path | None) -> Race:
    if name.startswith("zoo:"):
        import zoo
        import zoo_models

        own = getattr(zoo_models, name.removeprefix("zoo:"))()
        model, data = zoo.converted(own, False), own.data
        return Race(name, own.batch, model, own.memory, own.loss_fn, data, data)
    return race_problems.race(getattr(race_problems, name), 0, data)


def trainer(race: Race) -> Callable[[float, int, int], Outcome]:
    """`train(radius, steps, seed)`: one program for all radii."""

    def loss_fn(model, *batch, memory):
        return race.loss_fn(model, memory, *batch)

    def optimizer(radius):
        return kfac.KFAC(norm_constraint=kfac.TrustRegion(measured_radius=radius))

    @eqx.filter_jit
    def step(radius, model, state, memory, batch, key):
        model, state, info = optimizer(radius).step(
            loss_fn, model, state, *batch, key=key, memory=memory
        )
        return model, state, info.select(info.aux, memory)

    @eqx.filter_jit
    def value(model, state, memory, batch):
        loss, _ = loss_fn(kfac.averaged(model, state), *batch, memory=memory)
        return loss.value

    start = race.model, eqx.filter_jit(optimizer(1.0).init)(race.model), race.memory

    def train(radius, steps, seed):
        rng, size = np.random.default_rng(seed), len(race.train[0])

        def draw(number):
            drawn = rng.choice(size, min(number, size), replace=False)
            return tuple(jnp.asarray(a[drawn]) for a in race.train)

        carry, couplings = start, []
        for i in range(steps):
            batch, key = draw(race.batch), jax.random.key(1000 * seed + i)
            carry = step(jnp.asarray(radius), *carry, batch, key)
            couplings.append(float(carry[1].extent.coupling))
        return Outcome(float(value(*carry, draw(1000))), couplings)

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=PROBLEMS)
    parser.add_argument("--data", type=Path, help="MNIST; else smaller digits")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=2)
    default = kfac.TrustRegion().measured_radius
    parser.add_argument("--radius", type=float, default=default, help="of the bound")
    options = parser.parse_args()
    print("| problem | seed | without | with | times longer, median | largest |")
    print("|---|---|---|---|---|---|")
    for name in options.problems:
        train = trainer(problem(name, options.data))
        for seed in range(options.seeds):
            radii = jnp.inf, options.radius
            free, bounded = (train(radius, options.steps, seed) for radius in radii)
            middle, largest = statistics.median(free.couplings), max(free.couplings)
            losses = f"{free.loss:.4g} | {bounded.loss:.4g}"
            cells = f"{name} | {seed} | {losses} | {middle:.3g} | {largest:.3g}"
            print(f"| {cells} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
