"""A game of two networks: a generator and a discriminator (I. Goodfellow et al.,
*Generative Adversarial Nets*, NeurIPS 2014), each with a K-FAC of its own: `KFAC()`, and
`KFAC(momentum=0.0)`, beside Adam with the best of five learning rates, and a momentum of
0.5 or 0.9.

    python tests/benchmarks/adversarial.py --data folder/of/mnist
    python tests/benchmarks/adversarial.py --toy    # does everything run?

Printed, for each seed: of a ring of eight narrow normal distributions, how many are
found, and which part of the samples is in one of them; of digits, the Frechet distance
between the features that a classifier has of samples and of test images. Of K-FAC, the
averaged generator is looked at; Adam's rates fall along a cosine.
"""

import argparse
import functools as ft
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import race_problems
import races
from race_problems import plainly, Race
from scipy.linalg import sqrtm

import eqx_kfac as kfac


BATCH = 256
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


class Game(NamedTuple):
    name: str
    generator: Any
    discriminator: Any
    latent: int
    data: np.ndarray
    # Numbers, the first of which is the better the smaller it is, and words for them.
    judge: Callable[[np.ndarray], tuple[tuple[float, ...], str]]


# Losses.


def discriminate(discriminator, generator, x, z):
    drawn = jax.lax.stop_gradient(jax.vmap(generator)(z))
    logits = jax.vmap(discriminator)(jnp.concatenate([x, drawn]))
    is_data = jnp.arange(len(logits)) < len(x)
    return kfac.SigmoidCrossEntropy(logits, is_data[:, None].astype(logits.dtype))


def generate(generator, discriminator, z):
    """What is drawn is to be taken for data."""
    logits = jax.vmap(lambda z: discriminator(generator(z)))(z)
    return kfac.SigmoidCrossEntropy(logits, jnp.ones_like(logits))


# Games.


def ring(seed: int, data: Path | None) -> Game:
    angles = np.arange(8) * np.pi / 4
    centres = 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(seed))
    x = centres[rng.integers(8, size=20_000)] + 0.05 * rng.normal(size=(20_000, 2))

    def judge(drawn):
        distances = np.linalg.norm(drawn[:, None] - centres, axis=-1)
        near = distances.min(axis=1) < 0.25
        shares = np.bincount(distances.argmin(axis=1)[near], minlength=8) / len(drawn)
        found, part = int(np.sum(shares > 0.01)), float(near.mean())
        return (-found, -part), f"{found} ({100 * part:.0f} %)"

    make = lambda d_out, key: eqx.nn.MLP(2, d_out, 64, 2, jnp.tanh, key=key)
    x = x.astype(np.float32)
    return Game("ring", make(2, keys[0]), make(1, keys[1]), 2, x, judge)


@ft.cache
def classifier(data: Path | None) -> tuple[Callable, np.ndarray, np.ndarray]:
    """What gives the features of images; images to learn from, and test images."""
    x, y = race_problems.pictures(data)
    x = x.reshape(len(x), -1)
    number = int(0.8 * len(x))
    model = kfac.convert(eqx.nn.MLP(x.shape[1], 10, 64, 2, key=jax.random.key(0)))
    optimizer, rng = kfac.KFAC(), np.random.default_rng(0)
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    loss_fn = lambda m, x, y: kfac.SoftmaxCrossEntropy(jax.vmap(m)(x), y)
    for i in range(200):
        at = rng.integers(number, size=BATCH)
        key = jax.random.key(i)
        model, state, _ = step(loss_fn, model, state, x[at], y[at], key=key)
    first, second, _ = model.layers
    features = lambda x: jax.nn.relu(second(jax.nn.relu(first(x))))
    return eqx.filter_jit(jax.vmap(features)), x[:number], x[number:]


def digits(seed: int, data: Path | None) -> Game:
    features, x, test = classifier(data)
    keys = jax.random.split(jax.random.key(seed))
    d_in, moments = x.shape[1], lambda f: (f.mean(axis=0), np.cov(f.T))

    def judge(drawn):
        (a, a_cov), (b, b_cov) = (moments(np.asarray(features(x))) for x in (drawn, test))
        root = np.real(sqrtm(a_cov @ b_cov))
        distance = float(np.sum((a - b) ** 2) + np.trace(a_cov + b_cov - 2 * root))
        return (distance,), f"{distance:.2f}"

    generator = eqx.nn.MLP(32, d_in, 256, 2, final_activation=jax.nn.sigmoid, key=keys[0])
    discriminator = eqx.nn.MLP(d_in, 1, 256, 2, jax.nn.leaky_relu, key=keys[1])
    return Game("digits", generator, discriminator, 32, x, judge)


METHODS = {
    "`KFAC()`": {None: races.with_kfac(kfac.KFAC)},
    "`KFAC(momentum=0.0)`": {None: races.with_kfac(lambda: kfac.KFAC(momentum=0.0))},
    "Adam": {
        (rate, momentum): races.with_optax(ft.partial(optax.adam, 1.0, b1=momentum))
        for rate in RATES
        for momentum in (0.5, 0.9)
    },
}


def play(
    game: Game, make: Callable, rate: float, seed: int, steps: int
) -> tuple[Any, str, float]:
    """The verdict at the end, in numbers and words, and the seconds of all steps. The
    `rate`, if the method has one, falls along a cosine."""
    networks = game.generator, game.discriminator
    players, both = [], []
    for network, loss_fn in zip(networks, (generate, discriminate), strict=True):
        loss_fn, model = plainly(loss_fn), kfac.convert(network)
        race = Race(game.name, BATCH, model, None, loss_fn, (game.data,), ())
        init, one, final = make(race, rate)
        players.append((one, final))
        both.append(init(model))
    (improve_generator, final), (improve_discriminator, _) = players
    both = tuple(both)  # As it comes out of a step, which is compiled only once.
    falling = optax.cosine_decay_schedule(rate, steps)

    @eqx.filter_jit
    def step(both, x, rate, key):
        generator, discriminator = both
        keys = jax.random.split(key, 4)
        draw = lambda key: jax.random.normal(key, (len(x), game.latent))
        batch = generator[0], x, draw(keys[1])
        discriminator, *_ = improve_discriminator(
            batch, discriminator, None, rate, keys[0]
        )
        batch = discriminator[0], draw(keys[3])
        generator, *_ = improve_generator(batch, generator, None, rate, keys[2])
        return generator, discriminator

    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    first = step(both, game.data[:BATCH], falling(0), key)
    jax.block_until_ready(eqx.filter(first, eqx.is_array))
    start = time.perf_counter()
    for i in range(steps):
        x = game.data[rng.integers(len(game.data), size=BATCH)]
        both = step(both, x, falling(i), jax.random.fold_in(key, i))
    jax.block_until_ready(eqx.filter(both, eqx.is_array))
    seconds = time.perf_counter() - start
    z = jax.random.normal(jax.random.key(1), (2000, game.latent))
    drawn = eqx.filter_jit(jax.vmap(final(both[0])))(z)
    return *game.judge(np.asarray(drawn)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of MNIST's files")
    parser.add_argument("--games", nargs="*", default=["ring", "digits"])
    parser.add_argument("--steps", type=int, nargs="*", default=[250, 1000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.seeds = [3], 1
    print("| game | steps | method | each seed |\n|---|---|---|---|")
    for name in options.games:
        make_game = {"ring": ring, "digits": digits}[name]
        for steps in options.steps:
            for method, grid in METHODS.items():
                found = {}
                for choice, make in grid.items():
                    rate = 0.0 if choice is None else choice[0]
                    runs = [
                        play(make_game(seed, options.data), make, rate, seed, steps)
                        for seed in range(options.seeds)
                    ]
                    found[choice] = runs
                median = lambda choice: sorted(run[0] for run in found[choice])
                best = min(found, key=lambda c: median(c)[len(found[c]) // 2])
                words = ", ".join(run[1] for run in found[best])
                told = "" if best is None else " (rate {:g}, momentum {:g})".format(*best)
                seconds = f"{found[best][0][2]:.1f} s"
                print(f"| {name} | {steps} | {method} | {words}{told}; {seconds} |")


if __name__ == "__main__":
    main()
