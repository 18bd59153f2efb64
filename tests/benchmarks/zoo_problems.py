"""What the models of `zoo_models.py` are trained on: data that are generated, and losses
as a user writes them."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import eqx_kfac as kfac


class Problem(NamedTuple):
    """`loss_fn(model, memory, *batch) -> (loss, memory)`, with a memory of batch norm or
    `None`. `example`: the arguments of one call of the model."""

    model: Any
    example: Any
    data: tuple[np.ndarray, ...]
    loss_fn: Callable
    batch: int = 64
    memory: Any = None
    method: str | Callable = "__call__"  # What is called with the example.
    blocks: Any = None
    after: Callable = lambda model: model  # What the package does after a step.
    written: tuple = ()  # Classes that are here because of K-FAC: lines of work.


def lines_of(written: tuple) -> int:
    """Lines of code, without blank ones and documentation."""
    total = 0
    for thing in written:
        text = inspect.getsource(thing)
        if thing.__doc__:
            text = text.replace(f'"""{thing.__doc__}"""', "")
        total += sum(bool(line.strip()) for line in text.splitlines())
    return total


KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 8)


# Losses.


def classes(model, memory, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y), memory


def fields(model, memory, x, y):
    """The squared error at all points of a grid."""
    predictions = jax.vmap(model)(x)
    flat = (len(x), -1)
    return kfac.SquaredError(predictions.reshape(flat), y.reshape(flat)), memory


def density(model, memory, x):
    return kfac.NegativeLogLikelihood(jax.vmap(model.log_prob)(x)), memory


# Data.


def digits(shape: tuple[int, ...] = (64,), scale: int = 1) -> tuple:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 8 - 1).reshape(-1, 1, 8, 8)
    x = np.kron(x, np.ones((scale, scale)))
    channels = shape[0] if len(shape) == 3 else 1
    x = np.broadcast_to(x, (len(x), channels, *x.shape[2:]))
    return x.reshape(-1, *shape).astype(np.float32), y.astype(np.int32)


def characters(length: int = 24, vocabulary: int = 64) -> tuple:
    """Characters of a module of Python, and the next ones."""
    codes = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
    frequent = np.argsort(-np.bincount(codes, minlength=256))[: vocabulary - 1]
    number = np.full(256, vocabulary - 1)
    number[frequent] = np.arange(vocabulary - 1)
    tokens = number[codes].astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, 4096)
    windows = tokens[starts[:, None] + np.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


def proteins(letters: np.ndarray, mask: int, length: int = 24) -> tuple:
    """Chains in which a letter depends on the one before, with letters left out:
    `(masked, complete, which)`."""
    rng = np.random.default_rng(0)
    number = len(letters)
    chances = rng.dirichlet(np.full(number, 0.1), size=number)
    chain = [rng.integers(0, number, 2048)]
    for _ in range(length - 1):
        cumulative = np.cumsum(chances[chain[-1]], axis=1)
        drawn = (rng.random((2048, 1)) > cumulative).sum(axis=1)
        chain.append(np.minimum(drawn, number - 1))
    complete = letters[np.stack(chain, axis=1)].astype(np.int32)
    which = rng.random(complete.shape) < 0.2
    masked = np.where(which, mask, complete).astype(np.int32)
    return masked, complete, which.astype(np.float32)


def moons(number: int = 4096) -> tuple:
    rng = np.random.default_rng(0)
    angle, side = rng.random(number) * np.pi, rng.integers(0, 2, number)
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (1 - 2 * side)[:, None]
    x = x + np.stack([side, 0.5 * side], axis=1) + 0.1 * rng.normal(size=(number, 2))
    return (((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32),)


def burgers(points: int = 32, number: int = 1024) -> tuple:
    """Burgers' equation on a circle: where it starts, and where it is after 0.5."""
    rng = np.random.default_rng(0)
    grid = 2 * np.pi * np.arange(points) / points
    u = 0
    for wave in range(1, 4):
        phase = rng.random((number, 1)) * 2 * np.pi
        u = u + rng.normal(size=(number, 1)) * np.sin(wave * grid + phase) / wave
    start, waves = u, 1j * np.fft.rfftfreq(points, 1 / points)
    kept = np.abs(waves) < points / 3
    for _ in range(500):
        slope = np.fft.irfft(waves * kept * np.fft.rfft(u**2 / 2))
        u = u - 1e-3 * slope
        u = np.fft.irfft(np.fft.rfft(u) * np.exp(0.05 * 1e-3 * (waves**2).real))
    together = lambda u: u[:, None].astype(np.float32)  # One channel.
    return together(start), together(u)


def rows_of_pixels() -> tuple:
    return digits((8, 8))


def points(number: int, *sizes: int, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(number, size)).astype(np.float32) for size in sizes)


def balancing() -> tuple:
    """States of a cart with a pole, what a good controller does, and what is to come."""
    (x,) = points(2048, 4)
    force = x @ np.array([0.3, 0.5, 2.0, 1.0], np.float32)
    return x, (force > 0).astype(np.int32), np.tanh(-np.abs(force))[:, None]
