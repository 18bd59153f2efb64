"""A variational autoencoder (D. Kingma, M. Welling, *Auto-Encoding Variational Bayes*,
ICLR 2014) of digits: `KFAC()`, where the divergence from the prior has a curvature and
where it has none, beside Adam with the best of four learning rates, which fall along a
cosine.

    python tests/benchmarks/variational.py --data folder/of/mnist
    python tests/benchmarks/variational.py --toy    # does everything run?

Printed is minus the evidence lower bound, in nats, of data in training and of the test,
for each seed: of the averaged model for K-FAC.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import race_problems
import races

import eqx_kfac as kfac


RATES = (3e-4, 1e-3, 3e-3, 1e-2)


class Autoencoder(eqx.Module):
    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP

    def __init__(self, d_in: int, latent: int, key: Any):
        keys = jax.random.split(key)
        self.encoder = eqx.nn.MLP(d_in, 2 * latent, 256, 2, jnp.tanh, key=keys[0])
        self.decoder = eqx.nn.MLP(latent, d_in, 256, 2, jnp.tanh, key=keys[1])

    def __call__(self, x: Any, noise: Any) -> tuple[Any, Any, Any]:
        mean, log_deviation = jnp.split(self.encoder(x), 2)
        deviation = jnp.exp(log_deviation)
        logits = self.decoder(mean + deviation * noise)
        return logits, jnp.concatenate([mean, deviation]), log_deviation


def elbo(with_curvature: bool) -> Callable:
    """Minus the evidence lower bound. (What a network remembers, here, is the key of the
    noise to come.)"""

    def loss_fn(model, key, x):
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, (len(x), 8))
        logits, sizes, log_deviations = jax.vmap(model)(x, noise)
        divergence = kfac.SquaredError(sizes, jnp.zeros_like(sizes))
        if not with_curvature:
            divergence = divergence.value
        entropy = jnp.mean(jnp.sum(log_deviations + 0.5, axis=1))
        loss = kfac.SigmoidCrossEntropy(logits, x) + divergence - entropy
        return loss, key

    return loss_fn


def make_race(seed: int, data: Path | None, with_curvature: bool) -> race_problems.Race:
    x, _ = race_problems.pictures(data)
    x = x.reshape(len(x), -1)
    number, key = int(0.85 * len(x)), jax.random.key(seed)
    return race_problems.Race(
        "variational autoencoder",
        128,
        kfac.convert(Autoencoder(x.shape[1], 8, key)),
        key,
        elbo(with_curvature),
        (x[:number],),
        (x[number:],),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of MNIST's files")
    parser.add_argument("--steps", type=int, nargs="*", default=[500, 1500])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.seeds = [3], 1
    ours = races.Method("`KFAC()`", (None,), races.with_kfac(kfac.KFAC))
    adam = races.Method("Adam", RATES, races.with_optax(lambda: optax.adam(1.0)))
    rows = [(ours, True), (ours, False), (adam, False)]
    print(
        "| steps | method | curvature | training | test | seconds |\n" + "|---" * 6 + "|"
    )
    for steps in options.steps:
        budget = races.Budget(steps, steps=True)
        for method, with_curvature in rows:
            make = lambda seed, own=with_curvature: make_race(seed, options.data, own)
            by_rate = races.by_rate(make, method, budget, options.seeds)
            best = min(by_rate, key=lambda runs: np.median([run.last for run in runs]))
            part = lambda losses: ", ".join(f"{loss:.1f}" for loss in losses)
            cells = part(r.train[-1] for r in best), part(r.test[-1] for r in best)
            rate = "" if best[0].rate is None else f" (rate {best[0].rate:g})"
            seconds = f"{np.median([r.seconds[-1] for r in best]):.1f}"
            of = "of both terms" if with_curvature else "of the first term"
            told = f"{method.name}{rate} | {'' if method is adam else of}"
            print(f"| {steps} | {told} | {' | '.join(cells)} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
