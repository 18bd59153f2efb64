"""Does it matter that the end is known, where targets are noisy? Counts, quantiles, and a
mean with its spread, each of a network that cannot fit the noise, and likes, of which a
batch says little about most users and items: `KFAC()`, `KFAC()` with a learning rate that
falls along a cosine, `KFAC()` that needs no such rate because gradients are near the
average, and Adam with the best of five rates, which fall, too.

    python tests/benchmarks/noise.py
    python tests/benchmarks/noise.py --toy    # does everything run?

Printed are the losses in training and of the test at the end, for each seed: of the
averaged model for K-FAC.
"""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import races
from race_problems import plainly, Race

import eqx_kfac as kfac


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LEVELS = (0.05, 0.5, 0.95)


def race(name: str, loss_fn: Callable, make: Callable, *data) -> Callable:
    """What makes the race of one seed: a network, given a key, and data of which the last
    quarter is for the test."""
    number = 3 * len(data[0]) // 4
    train, test = [a[:number] for a in data], [a[number:] for a in data]

    def of(seed: int) -> Race:
        model = kfac.convert(make(jax.random.key(seed)))
        return Race(name, 128, model, None, plainly(loss_fn), tuple(train), tuple(test))

    return of


def mlp(inputs: int, outputs: int) -> Callable:
    """A network of three hidden layers."""
    return lambda key: eqx.nn.MLP(inputs, outputs, 64, 3, jax.nn.silu, key=key)


def floats(*data: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(a, np.float32) for a in data]


def counts() -> Callable:
    """Poisson numbers, with exposures."""
    rng = np.random.default_rng(0)
    x, exposure = rng.normal(size=(8000, 10)), rng.uniform(0.1, 5, 8000)
    rates = np.exp(np.sin(2 * x[:, 0]) + 0.8 * x[:, 1] * np.tanh(x[:, 2]))
    y = rng.poisson(exposure * rates)

    def loss(model, x, exposure, y):
        logarithms = jax.vmap(model)(x)[:, 0] + jnp.log(exposure)
        return kfac.PoissonNLL(logarithms[:, None], y[:, None])

    return race("counts", loss, mlp(10, 1), *floats(x, exposure, y))


def uneven(noise: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and targets whose noise depends on these."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, (6000, 6))
    mean = np.sin(2 * x[:, 0]) * x[:, 1] + np.abs(x[:, 2])
    spread = 0.02 + 0.5 / (1 + np.exp(-4 * x[:, 3]))
    return x, (mean + spread * noise(rng, len(x)))[:, None]


def spread() -> Callable:
    """A mean and its standard deviation."""

    def loss(model, x, y):
        z = jax.vmap(model)(x)
        return kfac.NormalNLL(z[:, :1], z[:, 1:], y)

    data = uneven(lambda rng, number: rng.normal(size=number))
    return race("mean and spread", loss, mlp(6, 2), *floats(*data))


def quantiles() -> Callable:
    """Of heavy-tailed targets."""

    def loss(model, x, y):
        z = jax.vmap(model)(x)
        return kfac.QuantileLoss(z, jnp.broadcast_to(y, z.shape), quantiles=LEVELS)

    data = uneven(lambda rng, number: rng.standard_t(2, size=number))
    return race("quantiles", loss, mlp(6, 3), *floats(*data))


class Likes(eqx.Module):
    """The product of what is known of a user and of an item."""

    users: eqx.nn.Embedding
    items: eqx.nn.Embedding

    def __init__(self, users: int, items: int, size: int, key: Any):
        drawn = lambda number, key: 0.1 * jax.random.normal(key, (number, size))
        keys = jax.random.split(key)
        self.users = eqx.nn.Embedding(weight=drawn(users, keys[0]))
        self.items = eqx.nn.Embedding(weight=drawn(items, keys[1]))

    def __call__(self, user: Any, item: Any) -> Any:
        return jnp.sum(self.users(user) * self.items(item))


def likes() -> Callable:
    """Who likes what: most of 2,000 users are in no batch."""
    rng = np.random.default_rng(2)
    tastes, traits = rng.normal(size=(2000, 4)), rng.normal(size=(1000, 4))
    users = rng.integers(2000, size=200_000, dtype=np.int32)
    items = rng.integers(1000, size=200_000, dtype=np.int32)
    logits = np.sum(tastes[users] * traits[items], axis=1)
    liked = rng.uniform(size=200_000) < 1 / (1 + np.exp(-logits))

    def loss(model, users, items, liked):
        logits = jax.vmap(model)(users, items)
        return kfac.SigmoidCrossEntropy(logits[:, None], liked[:, None])

    make = lambda key: Likes(2000, 1000, 16, key)
    return race("likes", loss, make, users, items, *floats(liked))


def free() -> kfac.KFAC:
    return kfac.KFAC(averaging=kfac.ScheduleFree())


def methods(steps: int) -> list[races.Method]:
    falling = optax.cosine_decay_schedule(0.1, steps)
    adam = races.with_optax(lambda: optax.adam(1.0))
    return [
        races.Method("`KFAC()`", (None,), races.with_kfac(kfac.KFAC)),
        races.Method(
            "`KFAC(cosine)`", (None,), races.with_kfac(lambda: kfac.KFAC(falling))
        ),
        races.Method("`KFAC(averaging=ScheduleFree())`", (None,), races.with_kfac(free)),
        races.Method("Adam", RATES, adam),
    ]


def shown(runs: list[races.Run]) -> str:
    each = lambda losses: ", ".join(f"{loss:.3g}" for loss in losses)
    train, test = ([getattr(r, part)[-1] for r in runs] for part in ("train", "test"))
    rate = "" if runs[0].rate is None else f" (rate {runs[0].rate:g})"
    return f"{each(train)} | {each(test)}{rate}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.seeds = 3, 1
    budget = races.Budget(options.steps, steps=True)
    print("| problem | method | training loss | test loss |\n|---|---|---|---|")
    for make in (counts(), spread(), quantiles(), likes()):
        for method in methods(options.steps):
            by_rate = races.by_rate(make, method, budget, options.seeds)
            best = min(by_rate, key=lambda runs: np.mean([run.last for run in runs]))
            print(f"| {best[0].problem} | {method.name} | {shown(best)} |", flush=True)


if __name__ == "__main__":
    main()
