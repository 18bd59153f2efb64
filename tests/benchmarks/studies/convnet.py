# %% [markdown]
# # A convolutional network: K-FAC, AdamW and SGD
#
# A small network of convolutions and group normalisations classifies the 1,797 images of
# 8x8 pixels that come with scikit-learn. Three optimizers from the same initialisation,
# on the same batches, for the same number of steps. K-FAC is `KFAC()`, with nothing to
# choose; the others choose their learning rate from a grid, by the training loss they end
# with.
#
#     python tests/benchmarks/studies/convnet.py  # about two minutes on two CPU cores
#     python tests/benchmarks/studies/convnet.py --seeds 3  # as many runs of each
#     python tests/benchmarks/studies/convnet.py --toy  # does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import (
    make_parser,
    named,
    parsed,
    plot_grids,
    Result,
    Run,
    save_picture,
    verdict,
)
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## Data, network and loss
#
# `kfac.convert` tags every layer that has parameters: convolutions and the linear layer
# with Kronecker-factored blocks, the scales and shifts of the normalisations with
# diagonal ones. Nothing is left for a fallback.


# %%
class Data(NamedTuple):
    x: Float[Array, "images 1 8 8"]  # In [0, 1].
    y: Int[Array, " images"]  # The digit.


def load() -> tuple[Data, Data]:
    """Training and test data."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = digits.astype(np.int32)
    split = train_test_split(
        images, digits, test_size=297, random_state=0, stratify=digits
    )
    x, x_test, y, y_test = map(jnp.asarray, split)
    return Data(x, y), Data(x_test, y_test)


def network(widths: tuple[int, ...], key: PRNGKeyArray) -> eqx.nn.Sequential:
    """The first convolution keeps the resolution, all others halve it."""
    *keys, last = jax.random.split(key, len(widths) + 1)
    layers, channels, size = [], 1, 8
    for i, (width, key) in enumerate(zip(widths, keys)):
        stride = 1 if i == 0 else 2
        layers += [
            eqx.nn.Conv2d(channels, width, 3, stride, padding=1, key=key),
            eqx.nn.GroupNorm(4, width),
            eqx.nn.Lambda(jax.nn.relu),
        ]
        channels, size = width, size // stride
    head = eqx.nn.Linear(channels * size**2, 10, key=last)
    return eqx.nn.Sequential([*layers, eqx.nn.Lambda(jnp.ravel), head])


def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    return kfac.SoftmaxCrossEntropy(logits, y)


@eqx.filter_jit
def mean_loss(model, data):
    return loss_fn(model, *data).value


@eqx.filter_jit
def accuracy(model, data):
    return jnp.mean(jnp.argmax(jax.vmap(model)(data.x), axis=-1) == data.y)


# %% [markdown]
# ## The optimizers
#
# K-FAC is `KFAC()`, with nothing to choose, and its averaged model is the one to look at.
# The others' learning rate is an argument of every step: it multiplies the update.


# %%
class Trainer(NamedTuple):
    name: str
    rates: tuple[float | None, ...]  # `None`: nothing to choose.
    init: Callable[[Any], Any]
    # (model, state, learning rate, x, y, key) -> (model, state)
    step: Callable[..., tuple[Any, Any]]
    final: Callable[[Any, Any], Any]  # (model, state) -> the model to look at


def kfac_trainer() -> Trainer:
    optimizer = kfac.KFAC()

    def step(model, state, rate, x, y, key):
        model, state, _ = optimizer.step(loss_fn, model, state, x, y, key=key)
        return model, state

    return Trainer("K-FAC", (None,), optimizer.init, step, kfac.averaged)


def optax_trainer(
    name: str, direction: optax.GradientTransformation, rates: tuple[float, ...]
) -> Trainer:
    """`direction` is all of the optimizer but the learning rate."""

    def init(model):
        return direction.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, rate, x, y, key):
        del key
        grads = eqx.filter_grad(lambda m: loss_fn(m, x, y).value)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = direction.update(grads, state, params)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        return eqx.apply_updates(model, updates), state

    return Trainer(name, rates, init, step, lambda model, state: model)


def adamw(rates: tuple[float, ...]) -> Trainer:
    decay = optax.add_decayed_weights(1e-4)
    return optax_trainer("AdamW", optax.chain(optax.scale_by_adam(), decay), rates)


def sgd(rates: tuple[float, ...]) -> Trainer:
    return optax_trainer("SGD with momentum", optax.trace(0.9), rates)


# %% [markdown]
# ## Training
#
# One compiled step, whatever the optimizer. (It could as well be the body of a
# `lax.scan`; but XLA's convolutions on CPUs are several times slower inside of loops.)
# The clock counts steps only: neither compiling them, nor looking at the loss over all
# training data, from which the curves are drawn.


# %%
def train(
    trainer: Trainer,
    models: list[Any],
    data: Data,
    batches: list[Int[np.ndarray, "looks steps batch"]],
    seeds: range,
    bar: tqdm,
) -> list[Result]:
    """The results of all learning rates, the best one first. Model and batches: for each
    seed."""
    looks, each, _ = batches[0].shape

    @eqx.filter_jit
    def step(model, state, rate, index, key):
        return trainer.step(model, state, rate, data.x[index], data.y[index], key)

    began, model = time.perf_counter(), models[0]
    final = eqx.filter_jit(trainer.final)
    inputs = jnp.float32(trainer.rates[0] or 0), batches[0][0, 0], jax.random.key(1)
    jax.block_until_ready(step(model, trainer.init(model), *inputs))
    results, compiling = [], time.perf_counter() - began
    for rate in trainer.rates:
        result = Result(trainer.name, rate, [], compiling)
        bar.set_description(named(result))
        for model, chosen, seed in zip(models, batches, seeds):
            keys = jax.random.split(jax.random.key(1 + seed), (looks, each))
            state, seconds = trainer.init(model), 0.0
            run = Run(seed, model, [0], [float(mean_loss(model, data))], [0.0])
            for i in range(looks):
                inputs = list(zip(chosen[i], keys[i]))
                began = time.perf_counter()
                for index, key in inputs:
                    model, state = step(model, state, jnp.float32(rate or 0), index, key)
                jax.block_until_ready(model)
                seconds += time.perf_counter() - began
                run.steps.append((i + 1) * each)
                run.losses.append(float(mean_loss(final(model, state), data)))
                run.seconds.append(seconds)
                bar.update(each)
                bar.set_postfix(loss=f"{run.losses[-1]:.3g}")
            result.runs.append(run._replace(model=final(model, state)))
        results.append(result)
    return sorted(results, key=lambda result: result.median.final_loss)


# %% [markdown]
# ## What came out


# %%
def table(results: list[Result], test_data: Data, target: float) -> str:
    lines = [
        f"{'method':<18} {'rate':>7} {'seed':>4} {'training loss':>13} "
        f"{'test accuracy':>13} {'steps':>6} {'seconds':>8} {'ms/step':>8} "
        f"{'compile s':>9}   to {target:g}"
    ]
    for result in results:
        rate = "-" if result.rate is None else f"{result.rate:g}"
        for run in result.runs:
            reached, steps, seconds = run.reached(target), run.steps[-1], run.seconds[-1]
            text = f"{reached[0]} steps, {reached[1]:.2f} s" if reached else "not reached"
            lines.append(
                f"{result.name:<18} {rate:>7} {run.seed:>4} {run.losses[-1]:>13.3e} "
                f"{float(accuracy(run.model, test_data)):>13.4f} {steps:>6} "
                f"{seconds:>8.2f} {1000 * seconds / steps:>8.2f} "
                f"{result.compile_seconds:>9.1f}   {text}"
            )
    return "\n".join(lines)


COLOURS = {"K-FAC": "#d1495b", "AdamW": "#30638e", "SGD with momentum": "#66a182"}


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Three optimizers, one small convolutional network.", "convnet")
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps of every run")
    add("--batch", type=int, default=128, help="images in a batch")
    add("--target", type=float, default=1e-2, help="a loss: when is it reached?")
    toy = dict(steps=20, batch=32)
    options = parsed(parser, argv, ["steps", "batch", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    data, test_data = load()
    seeds = range(options.seed, options.seed + options.seeds)
    widths = (4,) if options.toy else (16, 32, 32)
    models = [kfac.convert(network(widths, jax.random.key(seed))) for seed in seeds]
    each = max(1, options.steps // 60)
    shape = (options.steps // each, each, options.batch)
    draws = [np.random.default_rng(seed) for seed in seeds]
    batches = [draw.integers(len(data.x), size=shape) for draw in draws]
    trainers = [
        kfac_trainer(),
        adamw((3e-3, 1e-2) if options.toy else (3e-3, 1e-2, 3e-2)),
        sgd((0.1,) if options.toy else (0.1, 0.3, 1.0)),
    ]
    number = sum(len(trainer.rates) for trainer in trainers) * options.seeds
    with tqdm(total=number * shape[0] * each, unit=" steps", disable=None) as bar:
        grids = [train(t, models, data, batches, seeds, bar) for t in trainers]
    best = [results[0] for results in grids]
    print(table(best, test_data, options.target))
    print(verdict(best, "training loss", ".3e"))
    figure = plot_grids(grids, COLOURS, "convolutional network", "training loss, nats")
    save_picture(figure, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
