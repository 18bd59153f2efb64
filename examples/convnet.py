# %% [markdown]
# # A convolutional network: K-FAC, AdamW and SGD
#
# A small network of convolutions and group normalisations classifies the 1,797 images of
# 8x8 pixels that come with scikit-learn. Three optimizers from the same initialisation,
# on the same batches, for the same number of steps. K-FAC is `KFAC()`, with nothing to
# choose; the others choose their learning rate from a grid, by the training loss they end
# with.
#
#     python examples/convnet.py            # about two minutes on two CPU cores
#     python examples/convnet.py --toy      # seconds: does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import eqx_kfac as kfac


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


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
class Run(NamedTuple):
    trainer: str
    rate: float | None
    model: Any
    steps: list[int]
    losses: list[float]  # Over all training data.
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1] if np.isfinite(self.losses[-1]) else np.inf

    def reached(self, target: float) -> tuple[int, float] | None:
        """Steps and seconds at the first look at or below `target`."""
        for step, seconds, loss in zip(self.steps, self.seconds, self.losses):
            if loss <= target:
                return step, seconds
        return None


class Result(NamedTuple):
    """All runs of one optimizer."""

    runs: list[Run]
    compile_seconds: float

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.final_loss)


def named(trainer: str, rate: float | None) -> str:
    return trainer if rate is None else f"{trainer}, learning rate {rate:g}"


def train(
    trainer: Trainer,
    model: Any,
    data: Data,
    batches: Int[np.ndarray, "looks steps batch"],
    bar: tqdm,
) -> Result:
    looks, each, _ = batches.shape
    keys = jax.random.split(jax.random.key(1), (looks, each))
    first, runs = float(mean_loss(model, data)), []

    @eqx.filter_jit
    def step(model, state, rate, index, key):
        return trainer.step(model, state, rate, data.x[index], data.y[index], key)

    began = time.perf_counter()
    final = eqx.filter_jit(trainer.final)
    inputs = jnp.float32(trainer.rates[0] or 0), batches[0, 0], keys[0, 0]
    jax.block_until_ready(step(model, trainer.init(model), *inputs))
    compile_seconds = time.perf_counter() - began
    for rate in trainer.rates:
        bar.set_description(named(trainer.name, rate))
        now, state, seconds = model, trainer.init(model), 0.0
        run = Run(trainer.name, rate, model, [0], [first], [0.0])
        for i in range(looks):
            began = time.perf_counter()
            for index, key in zip(batches[i], keys[i]):
                now, state = step(now, state, jnp.float32(rate or 0), index, key)
            jax.block_until_ready(now)
            seconds += time.perf_counter() - began
            run.steps.append((i + 1) * each)
            run.losses.append(float(mean_loss(final(now, state), data)))
            run.seconds.append(seconds)
            bar.update(each)
            bar.set_postfix(loss=f"{run.losses[-1]:.3g}")
        runs.append(run._replace(model=final(now, state)))
    return Result(runs, compile_seconds)


# %% [markdown]
# ## What came out


# %%
def table(results: list[Result], test_data: Data, target: float) -> str:
    lines = [
        f"{'method':<18} {'rate':>7} {'training loss':>13} {'test accuracy':>13} "
        f"{'steps':>6} {'seconds':>8} {'ms/step':>8} {'compile s':>9}   to {target:g}"
    ]
    for result in results:
        best, reached = result.best, result.best.reached(target)
        text = f"{reached[0]} steps, {reached[1]:.2f} s" if reached else "not reached"
        steps, seconds = best.steps[-1], best.seconds[-1]
        rate = "-" if best.rate is None else f"{best.rate:g}"
        lines.append(
            f"{best.trainer:<18} {rate:>7} {best.losses[-1]:>13.3e} "
            f"{float(accuracy(best.model, test_data)):>13.4f} {steps:>6} {seconds:>8.2f} "
            f"{1000 * seconds / steps:>8.2f} {result.compile_seconds:>9.1f}   {text}"
        )
    return "\n".join(lines)


COLOURS = ["#d1495b", "#30638e", "#7a9e7e"]


def plot(results: list[Result], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, against in zip(axes, ("steps", "seconds")):
        for result, colour in zip(results, COLOURS):
            for run in result.runs:
                best = run is result.best
                label = named(run.trainer, run.rate) if best else None
                width, alpha = (2.2, 1.0) if best else (0.9, 0.3)
                style = dict(color=colour, linewidth=width, alpha=alpha, zorder=2 + best)
                axis.plot(getattr(run, against), run.losses, label=label, **style)
        axis.set_yscale("log")
        axis.set_ylim(top=2 * results[0].best.losses[0])
        longest = max(getattr(result.best, against)[-1] for result in results)
        axis.set_xlim(0, 1.03 * longest)
        axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
        axis.grid(True, color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("training loss")
    axes[0].plot([], [], color="0.7", linewidth=0.9, label="other learning rates")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# %%
class Arguments(argparse.Namespace):
    steps: int
    batch: int
    target: float
    seed: int
    out: Path
    toy: bool


def parse(argv: list[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description="Three optimizers, one small convnet.")
    parser.add_argument("--steps", type=int, default=300, help="steps of every run")
    parser.add_argument("--batch", type=int, default=128, help="images in a batch")
    parser.add_argument("--target", type=float, default=1e-2, help="when is this reached")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and batches")
    parser.add_argument("--out", type=Path, default=Path("runs/convnet.png"), help="plot")
    parser.add_argument("--toy", action="store_true", help="a tiny network, few steps")
    arguments = parser.parse_args(argv, namespace=Arguments())
    if arguments.steps < 1 or arguments.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    if arguments.toy:
        arguments.steps = min(arguments.steps, 20)
        arguments.batch = min(arguments.batch, 32)
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    data, test_data = load()
    widths = (4,) if arguments.toy else (16, 32, 32)
    model = kfac.convert(network(widths, jax.random.key(arguments.seed)))
    adamw_rates, sgd_rates = (3e-3, 1e-2, 3e-2), (0.1, 0.3, 1.0)
    if arguments.toy:
        adamw_rates, sgd_rates = (3e-3, 1e-2), (0.1,)
    each = max(1, arguments.steps // 60)
    shape = (arguments.steps // each, each, arguments.batch)
    batches = np.random.default_rng(arguments.seed).integers(len(data.x), size=shape)
    trainers = [kfac_trainer(), adamw(adamw_rates), sgd(sgd_rates)]
    num_runs = sum(len(trainer.rates) for trainer in trainers)
    with tqdm(total=num_runs * shape[0] * each, unit=" steps", disable=None) as bar:
        results = [train(trainer, model, data, batches, bar) for trainer in trainers]
    print(table(results, test_data, arguments.target))
    plot(results, arguments.out)
    print(f"Curves: {arguments.out}")


if __name__ == "__main__":
    main()
