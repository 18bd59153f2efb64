"""Losses of gradients: networks that are trained through derivatives in reverse mode.
`KFAC()` beside Adam with the best of four learning rates, which fall along a cosine, in
equal steps, and Adam in three times as many.

- forces: energies and forces of clusters of six atoms with a Morse potential, by a
  network of distances (J. Behler, M. Parrinello, *Generalized Neural-Network
  Representation of High-Dimensional Potential-Energy Surfaces*, Physical Review Letters
  2007).
- motion: the time derivatives of three coupled pendulums, by a Hamiltonian (S. Greydanus,
  M. Dzamba, J. Yosinski, *Hamiltonian Neural Networks*, NeurIPS 2019).
- score: the noise that was added to eight points in the plane, by an energy (P. Vincent,
  *A Connection Between Score Matching and Denoising Autoencoders*, Neural Computation
  2011).
- adaptation: sine waves after a step of gradient descent on ten points (C. Finn, P.
  Abbeel, S. Levine, *Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks*,
  ICML 2017).

    python tests/benchmarks/gradients.py
    python tests/benchmarks/gradients.py --toy    # does everything run?

Printed is the loss of data in training and of the test, for each seed: of the averaged
model for K-FAC.
"""

import argparse
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import race_problems
import races

import eqx_kfac as kfac


RATES = (1e-3, 3e-3, 1e-2, 3e-2)
NUMBER = 4000  # Of examples, a tenth of which is for the test.


def pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of different ones among `n`, in both orders."""
    first, second = np.nonzero(~np.eye(n, dtype=bool))
    return first, second


class Potential(eqx.Module):
    """The energy of each atom is that of its surroundings: sums over features of the
    distances to all others."""

    pair: eqx.nn.MLP
    atom: eqx.nn.MLP

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.pair = eqx.nn.MLP(8, 32, 64, 1, jnp.tanh, key=keys[0])
        self.atom = eqx.nn.MLP(32, "scalar", 64, 1, jnp.tanh, key=keys[1])

    def __call__(self, x: Any) -> Any:
        first, second = pairs(len(x))
        distances = jnp.linalg.norm(x[first] - x[second], axis=-1)
        waves = jnp.exp(-4 * (distances[:, None] - jnp.linspace(0.6, 2.7, 8)) ** 2)
        features = jax.vmap(self.pair)(waves)
        surroundings = jax.ops.segment_sum(features, first, len(x))
        return jnp.sum(jax.vmap(self.atom)(surroundings))


def morse(x: np.ndarray) -> Any:
    first, second = pairs(len(x))
    distances = jnp.linalg.norm(x[first] - x[second], axis=-1)
    return 0.5 * jnp.sum((1 - jnp.exp(-2 * (distances - 1))) ** 2 - 1)


def forces(key: Any) -> tuple:
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid([0, 1.1], [0, 1.1, 2.2], [0.0]), -1).reshape(6, 3)
    x = grid + 0.15 * rng.normal(size=(NUMBER, 6, 3))
    energies, slopes = jax.vmap(jax.value_and_grad(morse))(jnp.asarray(x))
    unit = float(jnp.std(slopes))
    energies = (energies - jnp.mean(energies)) / unit

    def loss_fn(model, memory, x, energies, forces):
        found, slopes = jax.vmap(jax.value_and_grad(model))(x)
        of_energies = kfac.SquaredError(found[:, None], energies[:, None])
        of_forces = kfac.SquaredError(-slopes.reshape(len(x), -1), forces)
        return of_energies + of_forces, memory

    data = x, energies, -slopes.reshape(NUMBER, -1) / unit
    return Potential(key), loss_fn, data


def motion(key: Any) -> tuple:
    rng = np.random.default_rng(0)
    state = jnp.asarray(rng.normal(size=(NUMBER, 6)))

    def energy(state):
        q, p = jnp.split(state, 2)
        coupled = jnp.sum((q[1:] - q[:-1]) ** 2)
        return 0.5 * jnp.sum(p**2) - jnp.sum(jnp.cos(2 * q)) + 0.5 * coupled

    def flow(energy, state):
        of_q, of_p = jnp.split(jax.grad(energy)(state), 2)
        return jnp.concatenate([of_p, -of_q])

    def loss_fn(model, memory, state, rates):
        found = jax.vmap(lambda state: flow(model, state))(state)
        return kfac.SquaredError(found, rates), memory

    rates = jax.vmap(lambda state: flow(energy, state))(state)
    model = eqx.nn.MLP(6, "scalar", 64, 3, jnp.tanh, key=key)
    return model, loss_fn, (state, rates)


def score(key: Any) -> tuple:
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * rng.integers(8, size=NUMBER) / 8
    x = 2 * np.stack([np.cos(angles), np.sin(angles)], -1)
    noise = rng.normal(size=x.shape)

    def loss_fn(model, memory, x, noise):
        found = jax.vmap(jax.grad(model))(x + 0.3 * noise)
        return kfac.SquaredError(found, noise), memory

    model = eqx.nn.MLP(2, "scalar", 64, 3, jax.nn.silu, key=key)
    return model, loss_fn, (x, noise)


def adaptation(key: Any) -> tuple:
    rng = np.random.default_rng(0)
    phases = np.pi * rng.random((NUMBER, 1))
    sizes = rng.uniform(0.5, 2, (NUMBER, 1))
    x = rng.uniform(-3, 3, (NUMBER, 20))
    y = sizes * np.sin(x + phases)

    def adapted(model, x, y):
        square = lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
        slopes = eqx.filter_grad(square)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, slopes))

    def of_task(model, x, y):
        return jax.vmap(adapted(model, x[:10], y[:10]))(x[10:])

    def loss_fn(model, memory, x, y):
        found = jax.vmap(lambda x, y: of_task(model, x, y))(x, y)
        return kfac.SquaredError(found, y[:, 10:]), memory

    model = eqx.nn.MLP("scalar", "scalar", 40, 2, jnp.tanh, key=key)
    return model, loss_fn, (x, y)


PROBLEMS: dict[str, Callable] = {
    make.__name__: make for make in (forces, motion, score, adaptation)
}


def make_race(name: str, seed: int) -> race_problems.Race:
    model, loss_fn, data = PROBLEMS[name](jax.random.key(seed))
    data = [np.asarray(a, np.float32) for a in data]
    cut = NUMBER - NUMBER // 10
    train, test = (tuple(a[part] for a in data) for part in np.s_[:cut, cut:])
    return race_problems.Race(
        name, 64, kfac.convert(model), None, loss_fn, train, test, looked_at=400
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.seeds = 3, 1
    ours = races.Method("`KFAC()`", (None,), races.with_kfac(kfac.KFAC))
    rates = RATES[:1] if options.toy else RATES
    adam = races.Method("Adam", rates, races.with_optax(lambda: optax.adam(1.0)))
    print("| problem | steps | method | training | test | seconds |\n" + "|---" * 6 + "|")
    for name in options.problems:
        for method, times in ((ours, 1), (adam, 1), (adam, 3)):
            steps = times * options.steps
            print(
                f"| {name} | {steps} | {row(name, method, steps, options)} |", flush=True
            )


def row(name: str, method: races.Method, steps: int, options: argparse.Namespace) -> str:
    """The cells of a method, with the best of its rates."""
    budget = races.Budget(steps, steps=True)
    make = ft.partial(make_race, name)
    by_rate = races.by_rate(make, method, budget, options.seeds)
    best = min(by_rate, key=lambda runs: np.median([run.last for run in runs]))
    part = lambda losses: ", ".join(f"{loss:.3g}" for loss in losses)
    cells = part(r.train[-1] for r in best), part(r.test[-1] for r in best)
    rate = "" if best[0].rate is None else f" (rate {best[0].rate:g})"
    seconds = f"{np.median([r.seconds[-1] for r in best]):.1f}"
    return f"{method.name}{rate} | {' | '.join(cells)} | {seconds}"


if __name__ == "__main__":
    main()
