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
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402


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
    model: eqx.Module
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


def classifier(widths: tuple[int, ...], key: PRNGKeyArray) -> Task:
    mlp = eqx.nn.MLP(64, 10, widths[0], len(widths) - 1, activation=jnp.tanh, key=key)

    def loss_fn(model, x, y):
        logits = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y)

    def accuracy(model, x, y):
        return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=-1) == y)

    return Task("classifier", kfac.convert(mlp), loss_fn, accuracy, "accuracy", 0.0)


def autoencoder(widths: tuple[int, ...], train: Data, key: PRNGKeyArray) -> Task:
    sizes = [64, *widths, *widths[-2::-1], 64]
    keys = jax.random.split(key, len(sizes) - 1)
    linear = (len(widths) - 1, len(sizes) - 2)  # The code and the output.
    layers = []
    for i, key in enumerate(keys):
        layers.append(eqx.nn.Linear(sizes[i], sizes[i + 1], key=key))
        if i not in linear:
            layers.append(eqx.nn.Lambda(jnp.tanh))

    def loss_fn(model, x, y):
        return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)

    def squared_error(model, x, y):
        return jnp.mean((jax.nn.sigmoid(jax.vmap(model)(x)) - x) ** 2)

    # Pixels are shades of grey: even a perfect reconstruction has a loss, their entropy.
    p = np.clip(train.x.astype(np.float64), 1e-12, 1 - 1e-12)
    entropy = -np.mean(np.sum(p * np.log(p) + (1 - p) * np.log1p(-p), axis=-1))
    model = kfac.convert(eqx.nn.Sequential(layers))
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
    trainer: str
    rate: float | None
    model: eqx.Module
    steps: list[int]
    losses: list[float]  # Over all training data.
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1] if np.isfinite(self.losses[-1]) else np.inf


class Result(NamedTuple):
    """All runs of one optimizer on one task."""

    runs: list[Run]
    compile_seconds: float

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.final_loss)


def compile_step(trainer: Trainer, task: Task, x: np.ndarray, y: np.ndarray) -> float:
    """The time of the very first step, whose result is thrown away."""
    start = time.perf_counter()
    state = trainer.init(task.model, trainer.rates[0])
    jax.block_until_ready(trainer.step(task.model, state, x, y, jax.random.key(0)))
    return time.perf_counter() - start


def train(
    trainer: Trainer,
    rate: float | None,
    task: Task,
    data: Data,
    batches: Int[np.ndarray, "steps batch"],
    loss_over_all: Callable[[Any], Float[Array, ""]],
    bar: tqdm,
) -> Run:
    model, state = task.model, trainer.init(task.model, rate)
    final = eqx.filter_jit(trainer.final)
    keys = jax.random.split(jax.random.key(1), len(batches))
    look_every = max(1, len(batches) // 60)
    seconds = 0.0
    run = Run(trainer.name, rate, model, [0], [float(loss_over_all(model))], [0.0])
    for start in range(0, len(batches), look_every):
        chunk = range(start, min(start + look_every, len(batches)))
        began = time.perf_counter()
        for i in chunk:
            x, y = data.x[batches[i]], data.y[batches[i]]
            model, state = trainer.step(model, state, x, y, keys[i])
        jax.block_until_ready(model)
        seconds += time.perf_counter() - began
        run.steps.append(chunk.stop)
        run.losses.append(float(loss_over_all(final(model, state))))
        run.seconds.append(seconds)
        bar.update(len(chunk))
    return run._replace(model=final(model, state))


def compare(
    task: Task, trainers: list[Trainer], data: Data, batches: np.ndarray, bar: tqdm
) -> list[Result]:
    @eqx.filter_jit
    def loss_over_all(model):
        return task.loss_fn(model, data.x, data.y).value

    results = []
    for trainer in trainers:
        bar.set_description(f"{task.name}, {trainer.name}")
        first = batches[0]
        compile_seconds = compile_step(trainer, task, data.x[first], data.y[first])
        runs = [
            train(trainer, rate, task, data, batches, loss_over_all, bar)
            for rate in trainer.rates
        ]
        results.append(Result(runs, compile_seconds))
    return results


# %% [markdown]
# ## What came out


# %%
def table(task: Task, results: list[Result], test_data: Data) -> str:
    lines = []
    for result in results:
        best = result.best
        score = f"{task.test_name} {float(task.test(best.model, *test_data)):.4f}"
        rate = "-" if best.rate is None else f"{best.rate:g}"
        lines.append(
            f"{task.name:<12} {best.trainer:<6} {rate:>9} {best.losses[-1]:>14.4e}"
            f" {score:>16} {best.steps[-1]:>6} {best.seconds[-1]:>8.3f}"
            f" {result.compile_seconds:>9.2f}"
        )
    return "\n".join(lines)


HEADER = (
    f"{'task':<12} {'method':<6} {'rate':>9} {'training loss':>14} {'test':>16}"
    f" {'steps':>6} {'seconds':>8} {'compile s':>9}"
)


def verdict(task: Task, results: list[Result]) -> str:
    lower, higher = sorted((r.best for r in results), key=lambda run: run.final_loss)
    return (
        f"{task.name}: after {lower.steps[-1]} steps {lower.trainer} reached the lower "
        f"training loss, {lower.losses[-1]:.4e} in {lower.seconds[-1]:.2f} s; "
        f"{higher.trainer} reached {higher.losses[-1]:.4e} in {higher.seconds[-1]:.2f} s."
    )


COLOURS = {"K-FAC": "#d1495b", "Adam": "#30638e"}


def draw_curves(axis: Any, results: list[Result], task: Task, against: str) -> None:
    for result in results:
        for run in result.runs:
            best = run is result.best
            rate = "" if run.rate is None else f", learning rate {run.rate:g}"
            label = f"{run.trainer}{rate}" if best else None
            axis.plot(
                getattr(run, against),
                np.asarray(run.losses) - task.lowest_loss,
                color=COLOURS[run.trainer],
                linewidth=2.2 if best else 0.9,
                alpha=1.0 if best else 0.3,
                label=label,
                zorder=3 if best else 2,
            )
    best_runs = [result.best for result in results]
    start = max(run.losses[0] for run in best_runs) - task.lowest_loss
    axis.set_yscale("log")
    axis.set_ylim(top=2 * start)
    bottom, top = axis.get_ylim()
    subs = (1, 2, 5) if top < 100 * bottom else (1,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(0, 1.03 * max(getattr(run, against)[-1] for run in best_runs))
    axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
    axis.grid(True, which="major", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)


def plot(tasks: list[Task], all_results: list[list[Result]], path: Path) -> None:
    figure, axes = plt.subplots(len(tasks), 2, figsize=(10, 7.2), sharey="row")
    for row, task, results in zip(axes, tasks, all_results):
        for axis, against in zip(row, ("steps", "seconds")):
            draw_curves(axis, results, task, against)
        above = " above the pixels' entropy" if task.lowest_loss else ""
        row[0].set_ylabel(f"training loss{above}")
        row[0].set_title(task.name, loc="left", fontweight="bold")
        row[0].plot([], [], color="0.7", linewidth=0.9, label="other learning rates")
        row[0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# %%
class Arguments(argparse.Namespace):
    steps: int
    batch: int
    seed: int
    out: Path
    toy: bool


def parse(argv: list[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description="K-FAC and Adam on handwritten digits.")
    parser.add_argument("--steps", type=int, default=300, help="steps of every run")
    parser.add_argument("--batch", type=int, default=256, help="examples in a batch")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and batches")
    parser.add_argument("--out", type=Path, default=Path("runs/digits.png"), help="plot")
    parser.add_argument("--toy", action="store_true", help="tiny networks and few steps")
    arguments = parser.parse_args(argv, namespace=Arguments())
    if arguments.steps < 1 or arguments.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    if arguments.toy:
        arguments.steps = min(arguments.steps, 20)
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    data, test_data = load()
    key_c, key_a = jax.random.split(jax.random.key(arguments.seed))
    if arguments.toy:
        tasks = [classifier((16,), key_c), autoencoder((16, 4), data, key_a)]
        adam_rates = 1e-2, 3e-2
    else:
        tasks = [classifier((128, 128), key_c), autoencoder((128, 64, 16), data, key_a)]
        adam_rates = 1e-3, 3e-3, 1e-2, 3e-2, 1e-1

    shape = (arguments.steps, arguments.batch)
    batches = np.random.default_rng(arguments.seed).integers(len(data.x), size=shape)
    num_runs = len(tasks) * (len(adam_rates) + 1)
    all_results = []
    with tqdm(total=num_runs * arguments.steps, unit=" steps", disable=None) as bar:
        for task in tasks:
            trainers = [kfac_trainer(task), adam_trainer(task, adam_rates)]
            all_results.append(compare(task, trainers, data, batches, bar))

    print(HEADER)
    for task, results in zip(tasks, all_results):
        print(table(task, results, test_data))
    for task, results in zip(tasks, all_results):
        print(verdict(task, results))
    plot(tasks, all_results, arguments.out)
    print(f"Curves: {arguments.out}")


if __name__ == "__main__":
    main()
