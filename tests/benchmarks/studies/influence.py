# %% [markdown]
# # Which training examples made it so? Influence functions on mislabelled digits
#
# A small classifier is trained on the 8x8 digits of scikit-learn, a tenth of whose labels
# are wrong. Two questions:
#
# - How well does the inverse curvature foretell what training on another part of the data
#   would have given? The *linear datamodelling score* is the rank correlation, over many
#   random halves of the data, between the loss on a test example after training on a half
#   and the sum of that half's influences on it; the mean over test examples.
# - Are the wrong labels found, by how much an example has to be learnt by heart?
#
#     python tests/benchmarks/studies/influence.py  # some two minutes on two CPU cores
#     python tests/benchmarks/studies/influence.py --toy  # does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from harness import make_parser, over_seeds, parsed, save_picture
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## The data, and the training
#
# Training is deterministic: all examples at every step, from one initialisation, with a
# penalty so that there is something to converge to. `mask` says which examples are there.


# %%
class Data(NamedTuple):
    x: Float[np.ndarray, "examples 64"]
    y: Int[np.ndarray, " examples"]  # As given.
    truth: Int[np.ndarray, " examples"]


def load(number: int, tests: int, seed: int) -> tuple[Data, Data]:
    """Training data with a tenth of wrong labels, and test data with none."""
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))[: number + tests]
    x, truth = (images[order] / 16).astype(np.float32), digits[order].astype(np.int32)
    y = truth.copy()
    wrong = rng.choice(number, number // 10, replace=False)
    y[wrong] = (y[wrong] + rng.integers(1, 10, len(wrong))) % 10
    cut = slice(None, number), slice(number, None)
    train, test = (Data(x[c], y[c], truth[c]) for c in cut)
    return train, test


L2 = 1e-2


def loss_fn(model, x, y, mask=None):
    loss = kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights=mask)
    return loss + kfac.L2(model, L2)


def losses(model, data: Data) -> Float[Array, " examples"]:
    logits = jax.vmap(model)(data.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, data.y)


def make_train(data: Data, steps: int) -> Callable:
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def train(model, mask):
        parameters, static = eqx.partition(model, eqx.is_inexact_array)

        def step(carry, _):
            parameters, state = carry

            def value(parameters):
                return loss_fn(
                    eqx.combine(parameters, static), data.x, data.y, mask
                ).value

            updates, state = optimizer.update(jax.grad(value)(parameters), state)
            return (optax.apply_updates(parameters, updates), state), None

        start = parameters, optimizer.init(parameters)
        (parameters, _), _ = jax.lax.scan(step, start, None, length=steps)
        return eqx.combine(parameters, static)

    return train


# %% [markdown]
# ## What training on halves gives


# %%
def retrained(
    model: Any, data: Data, test: Data, halves: np.ndarray, steps: int, bar: tqdm
) -> Float[np.ndarray, "halves tests"]:
    """The losses on the test data, of a model trained on each half."""
    train = make_train(data, steps)

    @eqx.filter_jit
    def several(masks):
        models = eqx.filter_vmap(train, in_axes=(None, 0))(model, masks)
        return eqx.filter_vmap(losses, in_axes=(eqx.if_array(0), None))(models, test)

    found = []
    for masks in np.split(halves, max(1, len(halves) // 10)):
        found.append(np.asarray(several(masks.astype(np.float32))))
        bar.update(len(masks))
    return np.concatenate(found)


def datamodelling_score(
    scores: np.ndarray, halves: np.ndarray, actual: np.ndarray
) -> float:
    """The mean over tests of the rank correlation, over halves. An example that helps
    lowers the loss."""
    foretold = halves @ -scores.T  # [halves, tests]

    def correlation(a, b):
        return np.corrcoef(rankdata(a), rankdata(b))[0, 1]

    return float(np.mean([correlation(*pair) for pair in zip(foretold.T, actual.T)]))


# %% [markdown]
# ## Four curvatures
#
# `kfac.analysis.influence` takes curvature of any blocks; the damping is small, for the
# penalty is curvature already. The exact Gauss-Newton matrix of so small a network can be
# written out, and inverted.


# %%
class Method(NamedTuple):
    name: str
    scores: Callable[..., Array]  # (model, test, train) -> [tests, train]
    own: Callable[..., Array]  # (model, train) -> [train]


DAMPING = 1e-4


def by_blocks(name: str, model: Any, data: Data, blocks: Any) -> Method:
    blocked = kfac.convert(kfac.revert(model), blocks=blocks)
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    influence = kfac.analysis.influence(
        loss_fn, collect(blocked, data.x, data.y), DAMPING
    )

    def scores(model, test, train):
        batches = list(zip(np.array_split(train.x, 4), np.array_split(train.y, 4)))
        found = influence.in_batches(blocked, (test.x, test.y), batches)
        return jnp.concatenate(list(found), axis=1)

    def own(model, train):
        return eqx.filter_jit(influence.of_itself)(blocked, (train.x, train.y))

    return Method(name, scores, own)


def gradients(model: Any, data: Data) -> Float[Array, "examples parameters"]:
    """The gradient of every single example, written out."""

    def one(x, y):
        value = lambda m: kfac.SoftmaxCrossEntropy(m(x)[None], y[None]).value
        grads = jax.tree.leaves(eqx.filter_grad(value)(model))
        return jnp.concatenate([g.ravel() for g in grads])

    return jax.vmap(one)(data.x, data.y)


def by_matrix(name: str, inverse: Callable) -> Method:
    """`inverse(model, vectors)`: a product with the vectors `[number, parameters]`."""

    @eqx.filter_jit
    def scores(model, test, train):
        return inverse(model, gradients(model, test)) @ gradients(model, train).T

    @eqx.filter_jit
    def own(model, train):
        g = gradients(model, train)
        return jnp.sum(inverse(model, g) * g, axis=1)

    return Method(name, scores, own)


def methods(model: Any, data: Data) -> list[Method]:
    def exact(model, vectors):
        operator = kfac.analysis.GaussNewtonOperator(
            loss_fn, model, data.x, data.y
        ).damped(DAMPING)
        factor = jax.scipy.linalg.cho_factor(operator.as_matrix())
        return jax.scipy.linalg.cho_solve(factor, vectors.T).T

    return [
        by_matrix("identity", lambda model, vectors: vectors),
        by_blocks("K-FAC", model, data, kfac.Kronecker()),
        by_blocks("EKFAC", model, data, kfac.EKFAC()),
        by_matrix("Gauss-Newton", exact),
    ]


# %% [markdown]
# ## What came out
#
# Of the tenth of all examples that score highest, how many have wrong labels? The loss
# itself is a score to beat.


# %%
class Result(NamedTuple):
    name: str
    score: float  # `nan` for what says nothing about test examples.
    own: np.ndarray
    seconds: float


class Run(NamedTuple):
    """What came out with one seed."""

    seed: int
    data: Data
    results: list[Result]
    accuracy: float

    @property
    def wrong(self) -> np.ndarray:
        return self.data.y != self.data.truth

    def precision(self, result: Result) -> float:
        """The share of wrong labels among the highest, as many as are wrong in all."""
        highest = np.argsort(-result.own)[: self.wrong.sum()]
        return float(self.wrong[highest].mean())


def run(options: argparse.Namespace, seed: int, bar: tqdm) -> Run:
    width, tests = (8, 20) if options.toy else (32, 100)
    train, test = load(options.examples, tests, seed)
    mlp = eqx.nn.MLP(64, 10, width, 1, activation=jnp.tanh, key=jr.key(seed))
    start = kfac.convert(mlp)
    rng, number = np.random.default_rng(seed), len(train.x)
    orders = [rng.permutation(number) for _ in range(options.halves)]
    halves = np.stack([order < number // 2 for order in orders])
    model = eqx.filter_jit(make_train(train, options.steps))(start, None)
    bar.set_description(f"retraining on halves, seed {seed}")
    actual, results = retrained(start, train, test, halves, options.steps, bar), []
    for method in methods(model, train):
        bar.set_description(f"{method.name}, seed {seed}")
        began = time.perf_counter()
        scores = np.asarray(method.scores(model, test, train))
        seconds = time.perf_counter() - began
        score = datamodelling_score(scores, halves, actual)
        own = np.asarray(method.own(model, train))
        results.append(Result(method.name, score, own, seconds))
        bar.update()
    results.append(Result("(loss)", np.nan, np.asarray(losses(model, train)), 0.0))
    right = np.argmax(jax.vmap(model)(test.x), axis=1) == test.truth
    return Run(seed, train, results, float(np.mean(right)))


def table(runs: list[Run]) -> str:
    lines = [
        f"{'curvature':<14} {'seed':>4} {'LDS':>6} {'wrong labels found':>19} "
        f"{'seconds':>8}"
    ]
    for results in zip(*(run.results for run in runs)):
        for run, result in zip(runs, results):
            lines.append(
                f"{result.name:<14} {run.seed:>4} {result.score:>6.3f} "
                f"{run.precision(result):>19.3f} {result.seconds:>8.2f}"
            )
    return "\n".join(lines)


def verdict(runs: list[Run]) -> str:
    scores = np.array([[r.score for r in run.results] for run in runs])
    found = np.array([[run.precision(r) for r in run.results] for run in runs])
    names = [result.name for result in runs[0].results]

    def best(numbers):
        medians = np.median(numbers, axis=0)
        tied = np.flatnonzero(medians == np.nanmax(medians))
        highest = numbers[:, tied] == np.nanmax(numbers, axis=1, keepdims=True)
        wins = int(np.sum(np.any(highest, axis=1)))
        seeds = over_seeds(len(runs), wins, "median", "highest")
        text = " and ".join(names[i] for i in tied)
        return f"{text}, {np.nanmax(medians):.3f} ({seeds})"

    accuracy = np.median([run.accuracy for run in runs])
    return (
        f"The highest LDS is that of {best(scores)}; most wrong labels are found by "
        f"{best(found)}. The network's test accuracy is {accuracy:.3f}."
    )


COLOURS = {
    "identity": "#8d99ae",
    "K-FAC": "#d1495b",
    "EKFAC": "#edae49",
    "Gauss-Newton": "#00798c",
    "(loss)": "0.2",
}


def plot(runs: list[Run], path: Path) -> None:
    """Bars and thick lines are medians over seeds; digits are those of the first."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    parts: Any = figure.subfigures(1, 3, width_ratios=[1, 1.1, 1.1])
    left, middle = parts[0].subplots(), parts[1].subplots()
    for i, name in enumerate(COLOURS):
        results, colour = [run.results[i] for run in runs], COLOURS[name]
        scores = [result.score for result in results]
        if np.isfinite(scores).all():
            left.bar(name, np.median(scores), color=colour)
            left.scatter([name] * len(scores), scores, s=12, color="0.2", zorder=2)
        curves = [
            100 * np.cumsum(run.wrong[np.argsort(-result.own)]) / run.wrong.sum()
            for run, result in zip(runs, results)
        ]
        looked = 100 * np.arange(1, len(curves[0]) + 1) / len(curves[0])
        for curve in curves:
            middle.plot(looked, curve, color=colour, linewidth=0.8, alpha=0.6)
        thick = np.median(curves, axis=0)
        middle.plot(looked, thick, color=colour, linewidth=1.8, label=name)
    left.tick_params(axis="x", labelsize=8)
    left.set_ylabel("LDS (rank correlation)")
    left.set_title("foretelling retraining", loc="left", fontweight="bold")
    middle.plot([0, 100], [0, 100], color="0.8", label="random order", zorder=0)
    middle.set_xlim(0, 30)
    middle.set_xlabel("examples looked at, %")
    middle.set_ylabel("wrong labels found, %")
    middle.set_title("finding wrong labels", loc="left", fontweight="bold")
    for axis in (left, middle):
        axis.grid(True, axis="y", color="0.92", zorder=0)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = middle.get_legend_handles_labels()
    how: Any = dict(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    parts[1].legend(handles, labels, **how)

    best = next(r for r in runs[0].results if r.name == "EKFAC")
    data, wrong = runs[0].data, runs[0].wrong
    for axis, i in zip(parts[2].subplots(2, 4).flat, np.argsort(-best.own)):
        axis.imshow(data.x[i].reshape(8, 8), cmap="gray_r")
        axis.set_axis_off()
        axis.set_title(f"“{data.y[i]}”", color="#d1495b" if wrong[i] else "k")
    parts[2].suptitle("highest of EKFAC, by their labels", fontweight="bold")
    save_picture(figure, path)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Influence functions on digits.", "influence")
    add = parser.add_argument
    add("--examples", type=int, default=1000, help="to train on, all at every step")
    add("--halves", type=int, default=100, help="retrainings")
    add("--steps", type=int, default=400, help="of every training")
    toy = dict(examples=100, halves=10, steps=30)
    options = parsed(parser, argv, ["steps", "halves", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    total = options.seeds * (options.halves + 4)
    with tqdm(total=total, unit=" models", disable=None) as bar:
        seeds = range(options.seed, options.seed + options.seeds)
        runs = [run(options, seed, bar) for seed in seeds]
    print(table(runs))
    print(verdict(runs))
    plot(runs, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
