"""Flows that learn a density: `KFAC()`, with nothing tuned, beside Adam at the best of
three learning rates, in the same seconds. Both stop early: what counts is the likelihood
of test data where that of validation data was best.

    python tests/benchmarks/densities.py --seconds 8 --seeds 3
    python tests/benchmarks/densities.py --data moons --out densities.md
    python tests/benchmarks/densities.py --toy          # does everything run?

Seconds are those of the processor in steps, so that other work on the machine matters
little; compiling is not counted, nor looking at validation data.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from zoo_problems import moons

import eqx_kfac as kfac


# Models.


def affine(x: Any, numbers: Any) -> tuple[Any, Any]:
    """Each coordinate scaled and shifted, and the logarithm of the derivative. `numbers`:
    `[coordinates, 2]`."""
    shift, log_scale = numbers[:, 0], jnp.tanh(numbers[:, 1])
    return (x - shift) * jnp.exp(-log_scale), -log_scale


def spline(x: Any, numbers: Any, bound: float = 4.0) -> tuple[Any, Any]:
    """A monotonic rational quadratic spline (C. Durkan et al., *Neural Spline Flows*,
    NeurIPS 2019) in [-bound, bound], the identity outside. `numbers`:
    `[coordinates, 3 bins - 1]`."""

    def one(x, numbers):
        bins = (len(numbers) + 1) // 3
        knots = []
        for part in (numbers[:bins], numbers[bins : 2 * bins]):
            widths = 1e-3 + (1 - 1e-3 * bins) * jax.nn.softmax(part)
            ends = jnp.concatenate([jnp.zeros(1), jnp.cumsum(widths)])
            knots.append(bound * (2 * ends - 1))
        inner = 1e-3 + jax.nn.softplus(numbers[2 * bins :] + np.log(np.e - 1))
        slopes = jnp.concatenate([jnp.ones(1), inner, jnp.ones(1)])
        inside = jnp.clip(x, -bound, bound)
        i = jnp.clip(jnp.searchsorted(knots[0], inside) - 1, 0, bins - 1)
        (x0, x1), (y0, y1), (d0, d1) = ((k[i], k[i + 1]) for k in (*knots, slopes))
        slope, t = (y1 - y0) / (x1 - x0), (inside - x0) / (x1 - x0)
        below = slope + (d1 + d0 - 2 * slope) * t * (1 - t)
        y = y0 + (y1 - y0) * (slope * t**2 + d0 * t * (1 - t)) / below
        above = d1 * t**2 + 2 * slope * t * (1 - t) + d0 * (1 - t) ** 2
        log_slope = jnp.log(slope**2 * above / below**2)
        outside = jnp.abs(x) >= bound
        return jnp.where(outside, x, y), jnp.where(outside, 0.0, log_slope)

    return jax.vmap(one)(x, numbers)


def log_normal(z: Any) -> Any:
    return jnp.sum(jax.scipy.stats.norm.logpdf(z))


class Coupling(eqx.Module):
    """Half of the coordinates are changed, given the others, in turn."""

    conditioners: list[eqx.nn.MLP]
    change: Callable = eqx.field(static=True)

    def __init__(self, size: int, change: Callable, numbers: int, key: Any):
        half, keys = size // 2, jax.random.split(key, 6)
        make = lambda key: eqx.nn.MLP(half, half * numbers, 64, 2, key=key)
        self.conditioners, self.change = [make(k) for k in keys], change

    def log_prob(self, x: Any) -> Any:
        first, second = jnp.split(x, 2)
        total = 0.0
        for conditioner in self.conditioners:
            numbers = 0.1 * conditioner(first).reshape(len(second), -1)
            second, log_slopes = self.change(second, numbers)
            first, second = second, first
            total = total + jnp.sum(log_slopes)
        return log_normal(jnp.concatenate([first, second])) + total


class Autoregressive(eqx.Module):
    """Every coordinate is scaled and shifted, given those before it."""

    conditioners: list[list[eqx.nn.MLP]]

    def __init__(self, size: int, key: Any):
        keys = jax.random.split(key, (3, size))
        make = lambda key: eqx.nn.MLP(size, 2, 32, 2, key=key)
        self.conditioners = [[make(k) for k in row] for row in keys]

    def log_prob(self, x: Any) -> Any:
        total, places = 0.0, np.arange(len(x))
        for row in self.conditioners:
            before = [jnp.where(places < i, x, 0) for i in range(len(row))]
            pairs = zip(row, before, strict=True)
            x, log_slopes = affine(x, jnp.stack([mlp(b) for mlp, b in pairs]))
            x, total = x[::-1], total + jnp.sum(log_slopes)
        return log_normal(x) + total


class Masked(eqx.Module):
    """One layer of a network whose outputs depend on earlier coordinates only, by a mask:
    an output of a rank sees the inputs of ranks that are lower, or equal, too (M. Germain
    et al., *MADE*, ICML 2015)."""

    weight: Any
    bias: Any
    mask: Any

    def __init__(self, ranks: np.ndarray, of_outputs: np.ndarray, equal: bool, key: Any):
        linear = eqx.nn.Linear(len(ranks), len(of_outputs), key=key)
        compare = np.greater_equal if equal else np.greater
        self.weight, self.bias = linear.weight, linear.bias
        self.mask = jnp.asarray(compare(of_outputs[:, None], ranks))

    def __call__(self, x: Any) -> Any:
        return jnp.where(self.mask, self.weight, 0) @ x + self.bias


class MaskedAutoregressive(eqx.Module):
    """One masked network for all coordinates in turn (G. Papamakarios
    et al., *Masked Autoregressive Flow*, NeurIPS 2017)."""

    conditioners: list[list[Masked]]

    def __init__(self, size: int, key: Any, width: int = 64):
        inputs, hidden = np.arange(size), np.arange(width) % (size - 1)
        ranks = [inputs, hidden, hidden, np.repeat(inputs, 2)]
        keys = jax.random.split(key, (3, 3))
        self.conditioners = [
            [Masked(*ranks[i : i + 2], i < 2, own[i]) for i in range(3)] for own in keys
        ]

    def log_prob(self, x: Any) -> Any:
        total = 0.0
        for first, second, last in self.conditioners:
            h = jax.nn.relu(second(jax.nn.relu(first(x))))
            x, log_slopes = affine(x, last(h).reshape(len(x), 2))
            x, total = x[::-1], total + jnp.sum(log_slopes)
        return log_normal(x) + total


MODELS = {
    "affine coupling": lambda size, key: Coupling(size, affine, 2, key),
    "spline coupling": lambda size, key: Coupling(size, spline, 23, key),
    "autoregressive": Autoregressive,
    "masked autoregressive": MaskedAutoregressive,
}


# Data.


def chain(number: int = 4096, size: int = 8) -> tuple:
    """Every coordinate is a noisy sine of the one before."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=number)]
    for _ in range(size - 1):
        x.append(np.sin(2 * x[-1]) + 0.2 * rng.normal(size=number))
    x = np.stack(x, axis=1)
    return (((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32),)


DATA = {"moons": moons, "chain": chain}


# Methods.


def density(model: Any, x: Any) -> Any:
    return kfac.NegativeLogLikelihood(jax.vmap(model.log_prob)(x))


def by_kfac(model: Any, x: Any) -> tuple[Any, Callable, Callable]:
    optimizer = kfac.KFAC()
    model = kfac.convert(model, example=x[0], method="log_prob")

    def step(carry, x, key):
        model, state = carry
        return optimizer.step(density, model, state, x, key=key)[:2]

    state = eqx.filter_jit(optimizer.init)(model)
    return (model, state), step, lambda carry: kfac.averaged(*carry)


def by_adam(rate: float) -> Callable:
    def make(model, _):
        adam = optax.adam(rate)

        def step(carry, x, key):
            model, state = carry
            grads = eqx.filter_grad(lambda m: density(m, x).value)(model)
            updates, state = adam.update(grads, state)
            return eqx.apply_updates(model, updates), state

        return (
            (model, adam.init(eqx.filter(model, eqx.is_inexact_array))),
            step,
            lambda carry: carry[0],
        )

    return make


METHODS = {"KFAC()": {None: by_kfac}}
METHODS["Adam"] = {rate: by_adam(rate) for rate in (1e-3, 3e-3, 1e-2)}


class Run(NamedTuple):
    validation: float
    test: float  # Where the validation is best,
    seconds: float  # and when that was.
    steps: int


def run(model: Any, x: np.ndarray, make: Callable, seed: int, seconds: float) -> Run:
    x, valid, test = np.split(x, [len(x) // 2, 3 * len(x) // 4])
    begin, one, final = make(model, x)
    step = eqx.filter_jit(one)
    look = eqx.filter_jit(lambda carry, x: density(final(carry), x).value)
    rng, keys = np.random.default_rng(seed), jax.random.key(seed)
    carry, spent, number = begin, 0.0, 0
    jax.block_until_ready(eqx.filter(step(carry, x[:128], keys), eqx.is_array))
    best = Run(float(look(carry, valid)), float(look(carry, test)), 0.0, 0)
    while spent < seconds:
        start = time.process_time()
        for _ in range(20):
            batch = x[rng.integers(len(x), size=128)]
            carry = step(carry, batch, jax.random.fold_in(keys, number))
            number += 1
        jax.block_until_ready(eqx.filter(carry, eqx.is_array))
        spent += time.process_time() - start
        found = float(look(carry, valid))
        if found < best.validation:
            best = Run(found, float(look(carry, test)), spent, number)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=list(DATA))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps, a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.data, options.seconds, options.seeds = ["moons"], 0.1, 1
    lines = ["| data | model | " + " | ".join(METHODS) + " |", "|---" * 4 + "|"]
    for data in options.data:
        (x,) = DATA[data]()
        for name in options.models:
            build, cells = MODELS[name], []
            for makes in METHODS.values():
                model = lambda seed: build(x.shape[1], jax.random.key(seed))
                grid = {
                    rate: run(model(0), x, make, 0, options.seconds)
                    for rate, make in makes.items()
                }
                rate = min(grid, key=lambda rate: grid[rate].validation)
                runs = [grid[rate]]
                for seed in range(1, options.seeds):
                    runs.append(run(model(seed), x, makes[rate], seed, options.seconds))
                median = lambda field: statistics.median(getattr(r, field) for r in runs)
                told = f"{median('test'):.3f} ({median('seconds'):.1f} s, "
                told += f"{median('steps'):.0f} steps"
                cells.append(told + (")" if rate is None else f", {rate:g})"))
            lines.append(f"| {data} | {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
