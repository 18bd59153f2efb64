"""What do steps gain, or lose, by what gradients before and after them measure? The same
steps of `KFAC()` with these bounds and without, on an image, on sequences that are to be
sorted, on problems of the races and on other people's models, with as many batches in the
same order.

    python tests/benchmarks/coupling.py --data folder/of/mnist
    python tests/benchmarks/coupling.py --problems gru curves --steps 100 --seeds 1
    pip install -e '.[zoo]'; python tests/benchmarks/coupling.py --problems zoo:equimo_vit

Printed is the loss of the averaged model, on a thousand examples, and how many times
longer than blocks say gradients said that a step is: the median and the largest of a run
without bounds. (Steps that gradients do not bound are damped more.)
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
from race_problems import draw, Race

import eqx_kfac as kfac


class Outcome(NamedTuple):
    loss: float
    couplings: list[float]


class Sines(eqx.Module):
    """An image as a function of the place: sines of thirty times linear functions."""

    layers: list
    last: eqx.nn.Linear

    def __init__(self, key, width=64):
        *keys, key = jax.random.split(key, 4)
        sizes = zip([2, width, width], [1 / 2, *2 * [np.sqrt(6 / width) / 30]])
        self.layers = [_uniform(m, width, b, k) for (m, b), k in zip(sizes, keys)]
        self.last = _uniform(width, 3, np.sqrt(6 / width) / 30, key)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.sin(30 * layer(x))
        return self.last(x)


def _uniform(inputs: int, outputs: int, bound: float, key) -> eqx.nn.Linear:
    weight = jax.random.uniform(key, (outputs, inputs), minval=-bound, maxval=bound)
    layer = eqx.nn.Linear(inputs, outputs, key=key)
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)


def sines(key, data: Path | None) -> Race:
    """A part of a photograph."""
    from sklearn.datasets import load_sample_image

    image = load_sample_image("flower.jpg")[100:356:2, 200:456:2] / np.float32(127.5) - 1
    lines = [np.linspace(-1, 1, n, dtype=np.float32) for n in image.shape[:2]]
    places = np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, 2)
    seen = places, image.reshape(-1, 3)

    return Race("sines", 1024, Sines(key), None, race_problems.regress, seen, seen)


class Sorter(eqx.Module):
    """Reads digits, and writes them in order: two gated cells, and attention between."""

    read: eqx.nn.Embedding
    written: eqx.nn.Embedding
    reader: eqx.nn.GRUCell
    writer: eqx.nn.GRUCell
    question: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key, width=48):
        keys = jax.random.split(key, 6)
        self.read, self.written = (eqx.nn.Embedding(12, width, key=k) for k in keys[:2])
        self.reader = eqx.nn.GRUCell(width, width, key=keys[2])
        self.writer = eqx.nn.GRUCell(2 * width, width, key=keys[3])
        self.question = eqx.nn.Linear(width, width, key=keys[4])
        self.last = eqx.nn.Linear(2 * width, 12, key=keys[5])

    def __call__(self, source, target):
        def read(h, x):
            h = self.reader(x, h)
            return h, h

        def write(carry, token):
            h, seen = carry
            h = self.writer(jnp.concatenate([self.written(token), seen]), h)
            seen = jax.nn.softmax(memory @ self.question(h) / 7) @ memory
            return (h, seen), self.last(jnp.concatenate([h, seen]))

        start = jnp.zeros(self.reader.hidden_size)
        h, memory = jax.lax.scan(read, start, jax.vmap(self.read)(source))
        before = jnp.concatenate([jnp.array([10], target.dtype), target[:-1]])
        return jax.lax.scan(write, (h, start), before)[1]


@race_problems.plainly
def write(model, source, target, there):
    logits = jax.vmap(model)(source, target)
    return kfac.SoftmaxCrossEntropy(logits, target, there)


def sorting(key, data: Path | None) -> Race:
    """Four to eight digits."""
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 10, (5000, 8))
    there = np.arange(8) < rng.integers(4, 9, 5000)[:, None]
    ordered = np.sort(np.where(there, digits, 99))
    arrays = [np.where(there, a, 11).astype(np.int32) for a in (digits, ordered)]
    seen = *arrays, there

    return Race("sorting", 64, Sorter(key), None, write, seen, seen)


OWN = dict(sines=sines, sorting=sorting)
RACES = ["dense", "small_batch", "many_classes", "curves", "mixer", "gru"]


def problem(name: str, data: Path | None) -> Race:
    if name.startswith("zoo:"):
        import zoo
        import zoo_models

        own = getattr(zoo_models, name.removeprefix("zoo:"))()
        model, data = zoo.converted(own, False), own.data
        return Race(name, own.batch, model, own.memory, own.loss_fn, data, data)
    build = OWN[name] if name in OWN else getattr(race_problems, name)
    return race_problems.race(build, 0, data)


def trainer(race: Race) -> Callable[[float, int, int], Outcome]:
    """`train(fraction, steps, seed)`: one program for all fractions."""

    def loss_fn(model, *batch, memory):
        return race.loss_fn(model, memory, *batch)

    def optimizer(fraction):
        region = kfac.TrustRegion(
            measured_fraction=fraction, uphill_fraction=2 * fraction
        )
        return kfac.KFAC(norm_constraint=region)

    @eqx.filter_jit
    def step(fraction, model, state, memory, batch, key):
        model, state, info = optimizer(fraction).step(
            loss_fn, model, state, *batch, key=key, memory=memory
        )
        return model, state, info.select(info.aux, memory)

    @eqx.filter_jit
    def value(model, state, memory, batch):
        loss, _ = loss_fn(kfac.averaged(model, state), *batch, memory=memory)
        return loss.value

    start = race.model, eqx.filter_jit(optimizer(1.0).init)(race.model), race.memory

    def train(fraction, steps, seed):
        rng = np.random.default_rng(seed)
        carry, couplings = start, []
        for i in range(steps):
            batch, key = draw(race, race.batch, rng), jax.random.key(1000 * seed + i)
            carry = step(jnp.asarray(fraction), *carry, batch, key)
            couplings.append(float(carry[1].extent.coupling))
        return Outcome(float(value(*carry, draw(race, 1000, rng))), couplings)

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=[*OWN, *RACES])
    parser.add_argument("--data", type=Path, help="MNIST; else smaller digits")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=2)
    default = kfac.TrustRegion().measured_fraction
    parser.add_argument("--fraction", type=float, default=default, help="of the loss")
    options = parser.parse_args()
    print("| problem | seed | without | with | times longer, median | largest |")
    print("|---|---|---|---|---|---|")
    for name in options.problems:
        train = trainer(problem(name, options.data))
        for seed in range(options.seeds):
            both = jnp.inf, options.fraction
            free, bounded = (train(fraction, options.steps, seed) for fraction in both)
            middle, largest = statistics.median(free.couplings), max(free.couplings)
            losses = f"{free.loss:.4g} | {bounded.loss:.4g}"
            cells = f"{name} | {seed} | {losses} | {middle:.3g} | {largest:.3g}"
            print(f"| {cells} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
