# %% [markdown]
# # K-FAC and Adam, side by side, on handwritten digits
#
# Two small problems on the 1,797 images of 8x8 pixels that come with scikit-learn: a
# classifier, and an autoencoder of the kind on which K-FAC was first shown. Each is
# trained with K-FAC and with Adam: the same initialisation, the same batches, the same
# number of steps. K-FAC is `KFAC()`, with nothing to choose; Adam chooses its learning
# rate from a grid, by the training loss it ends with.
#
#     python examples/digits.py            # under a minute on two CPU cores
#     python examples/digits.py --seeds 3  # as many runs of each
#     python examples/digits.py --toy      # seconds: does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## The two tasks
#
# A model becomes trainable by K-FAC with `kfac.convert`; it stays the same model, and
# Adam trains it too. The loss function returns a loss *object*: it knows the model's
# predictive distribution, which is where curvature comes from.


# %%
class Data(NamedTuple):
    x: np.ndarray  # [examples, 64], in [0, 1].
    y: np.ndarray  # [examples], the digit.


class Task(NamedTuple):
    name: str
    model: Callable[[PRNGKeyArray], eqx.Module]
    loss_fn: Callable[..., kfac.AbstractLoss]
    test: Callable[..., Float[Array, ""]]
    test_name: str
    lowest_loss: float  # No model can do better than this on the training data.


def load() -> tuple[Data, Data]:
    """Training and test data."""
    images, digits = load_digits(return_X_y=True)
    pixels = (images / 16).astype(np.float32)
    digits = digits.astype(np.int32)
    split = train_test_split(
        pixels, digits, test_size=297, random_state=0, stratify=digits
    )
    x, x_test, y, y_test = map(np.asarray, split)
    return Data(x, y), Data(x_test, y_test)


def classifier(widths: tuple[int, ...]) -> Task:
    def model(key):
        width, depth = widths[0], len(widths) - 1
        mlp = eqx.nn.MLP(64, 10, width, depth, activation=jnp.tanh, key=key)
        return kfac.convert(mlp)

    def loss_fn(model, x, y):
        logits = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y)

    def accuracy(model, x, y):
        return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=-1) == y)

    return Task("classifier", model, loss_fn, accuracy, "accuracy", 0.0)


def autoencoder(widths: tuple[int, ...], train: Data) -> Task:
    sizes = [64, *widths, *widths[-2::-1], 64]
    linear = (len(widths) - 1, len(sizes) - 2)  # The code and the output.

    def model(key):
        layers = []
        for i, key in enumerate(jax.random.split(key, len(sizes) - 1)):
            layers.append(eqx.nn.Linear(sizes[i], sizes[i + 1], key=key))
            if i not in linear:
                layers.append(eqx.nn.Lambda(jnp.tanh))
        return kfac.convert(eqx.nn.Sequential(layers))

    def loss_fn(model, x, y):
        return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)

    def squared_error(model, x, y):
        return jnp.mean((jax.nn.sigmoid(jax.vmap(model)(x)) - x) ** 2)

    # Pixels are shades of grey: even a perfect reconstruction has a loss, their entropy.
    p = np.clip(train.x.astype(np.float64), 1e-12, 1 - 1e-12)
    entropy = -np.mean(np.sum(p * np.log(p) + (1 - p) * np.log1p(-p), axis=-1))
    return Task("autoencoder", model, loss_fn, squared_error, "mse", float(entropy))


# %% [markdown]
# ## The two optimizers
#
# The training step of K-FAC is the whole of what there is to learn. The model to look at
# is the averaged one.


# %%
class Trainer(NamedTuple):
    name: str
    rates: tuple[float | None, ...]  # `None`: nothing to choose.
    init: Callable[[Any, float | None], Any]
    step: Callable[..., tuple[Any, Any]]
    final: Callable[[Any, Any], Any]  # (model, state) -> the model to look at


def kfac_trainer(task: Task) -> Trainer:
    optimizer = kfac.KFAC()

    def init(model, rate):
        return optimizer.init(model)

    @eqx.filter_jit
    def step(model, state, x, y, key):
        model, state, info = optimizer.step(task.loss_fn, model, state, x, y, key=key)
        return model, state

    return Trainer("K-FAC", (None,), init, step, kfac.averaged)


def adam_trainer(task: Task, rates: tuple[float, ...]) -> Trainer:
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=rates[0])

    def init(model, rate):
        state: Any = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        state.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
        return state

    @eqx.filter_jit
    def step(model, state, x, y, key):
        del key
        grads = eqx.filter_grad(lambda m: task.loss_fn(m, x, y).value)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state

    return Trainer("Adam", rates, init, step, lambda model, state: model)


# %% [markdown]
# ## Training
#
# The clock counts steps only: neither compiling them, nor looking at the loss over all
# training data, from which the curves are drawn.


# %%
class Run(NamedTuple):
    seed: int
    model: Any
    steps: list[int]
    losses: list[float]  # Over all training data.
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1] if np.isfinite(self.losses[-1]) else np.inf


class Result(NamedTuple):
    """One optimizer with one learning rate, a run from every seed."""

    name: str
    rate: float | None
    runs: list[Run]
    compile_seconds: float

    @property
    def median(self) -> Run:
        return sorted(self.runs, key=lambda run: run.final_loss)[len(self.runs) // 2]


@eqx.filter_jit
def mean_loss(loss_fn, model, data):
    return loss_fn(model, *data).value


def compile_step(trainer: Trainer, model: Any, x: np.ndarray, y: np.ndarray) -> float:
    """The time of the very first step, whose result is thrown away."""
    start = time.perf_counter()
    state = trainer.init(model, trainer.rates[0])
    jax.block_until_ready(trainer.step(model, state, x, y, jax.random.key(0)))
    return time.perf_counter() - start


def train(
    trainer: Trainer,
    rate: float | None,
    task: Task,
    model: Any,
    batches: Int[np.ndarray, "steps batch"],
    seed: int,
    data: Data,
    bar: tqdm,
) -> Run:
    state, final = trainer.init(model, rate), eqx.filter_jit(trainer.final)
    keys = list(jax.random.split(jax.random.key(1 + seed), len(batches)))
    look_every = max(1, len(batches) // 60)
    seconds, first = 0.0, float(mean_loss(task.loss_fn, model, data))
    run = Run(seed, model, [0], [first], [0.0])
    for start in range(0, len(batches), look_every):
        chunk = range(start, min(start + look_every, len(batches)))
        began = time.perf_counter()
        for i in chunk:
            x, y = data.x[batches[i]], data.y[batches[i]]
            model, state = trainer.step(model, state, x, y, keys[i])
        jax.block_until_ready(model)
        seconds += time.perf_counter() - began
        loss = float(mean_loss(task.loss_fn, final(model, state), data))
        run.steps.append(chunk.stop)
        run.losses.append(loss)
        run.seconds.append(seconds)
        bar.update(len(chunk))
    return run._replace(model=final(model, state))


def compare(
    task: Task,
    trainers: list[Trainer],
    models: list[eqx.Module],
    data: Data,
    options: argparse.Namespace,
    bar: tqdm,
) -> list[list[Result]]:
    """For every optimizer the results of its learning rates, the best one first. The
    `models`: one for each seed."""
    found = []
    for trainer in trainers:
        bar.set_description(f"{task.name}, {trainer.name}")
        shape = options.steps, options.batch
        seeds = range(options.seed, options.seed + options.seeds)
        batches = [
            np.random.default_rng(s).integers(len(data.x), size=shape) for s in seeds
        ]
        first = batches[0][0]
        compiling = compile_step(trainer, models[0], data.x[first], data.y[first])
        results = []
        for rate in trainer.rates:
            runs = [
                train(trainer, rate, task, *each, data, bar)
                for each in zip(models, batches, seeds)
            ]
            results.append(Result(trainer.name, rate, runs, compiling))
        found.append(sorted(results, key=lambda result: result.median.final_loss))
    return found


# %% [markdown]
# ## What came out


# %%
HEADER = (
    f"{'task':<12} {'method':<6} {'rate':>6} {'seed':>4} {'training loss':>14} "
    f"{'test':>16} {'steps':>6} {'seconds':>8} {'compile s':>9}"
)


def table(task: Task, results: list[Result], test_data: Data) -> str:
    lines = []
    for result in results:
        rate = "-" if result.rate is None else f"{result.rate:g}"
        for run in result.runs:
            score = f"{task.test_name} {float(task.test(run.model, *test_data)):.4f}"
            lines.append(
                f"{task.name:<12} {result.name:<6} {rate:>6} {run.seed:>4} "
                f"{run.losses[-1]:>14.4e} {score:>16} {run.steps[-1]:>6} "
                f"{run.seconds[-1]:>8.3f} {result.compile_seconds:>9.2f}"
            )
    return "\n".join(lines)


def verdict(task: Task, results: list[Result]) -> str:
    lower, higher = sorted(results, key=lambda result: result.median.final_loss)
    best, other, number = lower.median, higher.median, len(lower.runs)
    pairs = zip(lower.runs, higher.runs)
    wins = sum(a.final_loss < b.final_loss for a, b in pairs)
    several = f"medians of {number} seeds, lower with {wins} of them"
    seeds = "one seed" if number == 1 else several
    return (
        f"{task.name}: after {best.steps[-1]} steps {lower.name} has the lower training "
        f"loss, {best.losses[-1]:.4e} in {best.seconds[-1]:.2f} s, and {higher.name} has "
        f"{other.losses[-1]:.4e} in {other.seconds[-1]:.2f} s ({seeds})."
    )


COLOURS = {"K-FAC": "#d1495b", "Adam": "#30638e"}


def draw_curves(axis: Any, grids: list[list[Result]], task: Task, against: str) -> None:
    """The median run of the best learning rate is thick; its other seeds are thin, other
    learning rates dotted."""

    def draw(result, run, **style):
        above = np.asarray(run.losses) - task.lowest_loss
        axis.plot(getattr(run, against), above, color=COLOURS[result.name], **style)

    for best, *others in grids:
        rate = "" if best.rate is None else f", learning rate {best.rate:g}"
        draw(best, best.median, linewidth=2.2, zorder=3, label=f"{best.name}{rate}")
        for run in best.runs:
            draw(best, run, linewidth=0.8, alpha=0.6)
        for result in others:
            draw(result, result.median, linewidth=1, alpha=0.5, linestyle=":")
    runs = [run for best, *_ in grids for run in best.runs]
    start = max(run.losses[0] for run in runs) - task.lowest_loss
    axis.set_yscale("log")
    axis.set_ylim(top=2 * start)
    bottom, top = axis.get_ylim()
    subs = (1, 2, 5) if top < 100 * bottom else (1,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(0, 1.03 * max(getattr(run, against)[-1] for run in runs))
    axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
    axis.grid(True, color="0.92")
    axis.spines[["top", "right"]].set_visible(False)


def plot(tasks: list[Task], all_grids: list[list[list[Result]]], path: Path) -> None:
    figure = Figure(figsize=(10, 8), layout="constrained")
    parts: Any = figure.subfigures(len(tasks), 1)
    for part, task, grids in zip(parts, tasks, all_grids):
        axes = part.subplots(1, 2, sharey=True)
        for axis, against in zip(axes, ("steps", "seconds")):
            draw_curves(axis, grids, task, against)
        above = "\nabove the pixels' entropy" if task.lowest_loss else ""
        axes[0].set_ylabel(f"training loss, nats{above}")
        axes[0].set_title(task.name, loc="left", fontweight="bold")
        axes[0].plot([], [], "0.5", linestyle=":", label="other learning rates")
        handles, labels = axes[0].get_legend_handles_labels()
        part.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="K-FAC and Adam on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps of every run")
    add("--batch", type=int, default=256, help="images in a batch")
    add("--seed", type=int, default=0, help="of initialisation and batches, the first")
    add("--seeds", type=int, default=1, help="how many")
    add("--out", type=Path, default=Path("runs/digits.png"), help="picture")
    add("--toy", action="store_true", help="small and quick, unless options say else")
    if parser.parse_known_args(argv)[0].toy:
        parser.set_defaults(steps=20)
    options = parser.parse_args(argv)
    if min(options.steps, options.batch, options.seeds) < 1:
        parser.error("--steps, --batch and --seeds must be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    data, test_data = load()
    small, code = ((16,), (16, 4)) if options.toy else ((128, 128), (128, 64, 16))
    rates = (1e-2, 3e-2) if options.toy else (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    tasks = [classifier(small), autoencoder(code, data)]
    seeds = range(options.seed, options.seed + options.seeds)
    keys = jax.vmap(jax.random.split)(jax.vmap(jax.random.key)(jnp.asarray(seeds)))
    total = len(tasks) * (len(rates) + 1) * options.seeds * options.steps
    with tqdm(total=total, unit=" steps", disable=None) as bar:
        all_grids = []
        for i, task in enumerate(tasks):
            trainers = [kfac_trainer(task), adam_trainer(task, rates)]
            models = [task.model(key) for key in keys[:, i]]
            all_grids.append(compare(task, trainers, models, data, options, bar))
    best = [[results[0] for results in grids] for grids in all_grids]
    print(HEADER)
    for task, results in zip(tasks, best):
        print(table(task, results, test_data))
    for task, results in zip(tasks, best):
        print(verdict(task, results))
    plot(tasks, all_grids, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
