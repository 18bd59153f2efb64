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
#     python examples/influence.py            # some two minutes on two CPU cores
#     python examples/influence.py --toy      # seconds: does everything run?

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
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


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
# `kfac.influence` takes curvature of any blocks; the damping is small, for the penalty is
# curvature already. The exact Gauss-Newton matrix of so small a network can be written
# out, and inverted.


# %%
class Method(NamedTuple):
    name: str
    scores: Callable[..., Array]  # (model, test, train) -> [tests, train]
    own: Callable[..., Array]  # (model, train) -> [train]


DAMPING = 1e-4


def by_blocks(name: str, model: Any, data: Data, blocks: Any) -> Method:
    blocked = kfac.convert(kfac.revert(model), blocks=blocks)
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    influence = kfac.influence(loss_fn, collect(blocked, data.x, data.y), DAMPING)

    def scores(model, test, train):
        batches = list(zip(np.array_split(train.x, 4), np.array_split(train.y, 4)))
        found = influence.in_batches(blocked, (test.x, test.y), batches)
        return jnp.concatenate(list(found), axis=1)

    def own(model, train):
        return eqx.filter_jit(influence.of_itself)(blocked, (train.x, train.y))

    return Method(name, scores, own)


def gradients(model: Any, data: Data) -> Float[Array, "examples parameters"]:
    """Of every single example, written out."""

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
        operator = kfac.GaussNewton(loss_fn, model, data.x, data.y).damped(DAMPING)
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
def precision(scores: np.ndarray, data: Data, number: int) -> float:
    """How many of the `number` highest are wrong."""
    highest = np.argsort(-scores)[:number]
    return float(np.mean(data.y[highest] != data.truth[highest]))


class Result(NamedTuple):
    name: str
    score: float  # `nan` for what says nothing about test examples.
    own: np.ndarray
    seconds: float


def table(results: list[Result], data: Data) -> str:
    number = int(np.sum(data.y != data.truth))
    lines = [f"{'curvature':<14} {'LDS':>6} {'wrong labels found':>19} {'seconds':>8}"]
    for name, score, own, seconds in results:
        found = precision(own, data, number)
        lines.append(f"{name:<14} {score:>6.3f} {found:>19.3f} {seconds:>8.2f}")
    return "\n".join(lines)


COLOURS = ["#8d99ae", "#d1495b", "#edae49", "#00798c", "#30638e"]


def plot(results: list[Result], data: Data, path: Path) -> None:
    figure = plt.figure(figsize=(11, 3.8))
    parts: Any = figure.subfigures(1, 3, width_ratios=[1, 1.2, 1.1])
    left, middle, right = parts
    axis = left.subplots()
    scored = [r for r in results if np.isfinite(r.score)]
    axis.bar([r.name for r in scored], [r.score for r in scored], color=COLOURS)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title("foretelling retraining: LDS", loc="left", fontsize=10)

    axis = middle.subplots()
    wrong = data.y != data.truth
    looked = np.arange(1, len(wrong) + 1)
    for result, colour in zip(results, COLOURS):
        found = np.cumsum(wrong[np.argsort(-result.own)]) / wrong.sum()
        axis.plot(looked / len(wrong), found, color=colour, label=result.name)
    axis.plot([0, 1], [0, 1], color="0.8", label="random order", zorder=0)
    axis.set_xlabel("part of the examples looked at")
    axis.set_ylabel("part of the wrong labels found")
    axis.legend(frameon=False, fontsize=7)

    best = next(r for r in results if r.name == "EKFAC")
    axes = right.subplots(2, 4)
    for axis, i in zip(axes.flat, np.argsort(-best.own)):
        axis.imshow(data.x[i].reshape(8, 8), cmap="gray_r")
        axis.set_axis_off()
        colour = "#d1495b" if wrong[i] else "k"
        axis.set_title(f"“{data.y[i]}”", fontsize=9, color=colour)
    right.suptitle("highest of EKFAC, by their labels", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


# %%
class Arguments(argparse.Namespace):
    examples: int
    halves: int
    steps: int
    seed: int
    out: Path
    toy: bool


def parse(argv: list[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description="Influence functions on digits.")
    parser.add_argument("--examples", type=int, default=1000, help="to train on")
    parser.add_argument("--halves", type=int, default=100, help="retrainings")
    parser.add_argument("--steps", type=int, default=400, help="of every training")
    parser.add_argument("--seed", type=int, default=0, help="data and initialisation")
    parser.add_argument("--out", type=Path, default=Path("runs/influence.png"))
    parser.add_argument("--toy", action="store_true", help="small and quick")
    arguments = parser.parse_args(argv, namespace=Arguments())
    if arguments.toy:
        arguments.examples, arguments.halves, arguments.steps = 100, 10, 30
    return arguments


def make_model(width: int, key: PRNGKeyArray) -> Any:
    return kfac.convert(eqx.nn.MLP(64, 10, width, 1, activation=jnp.tanh, key=key))


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    width, tests = (8, 20) if arguments.toy else (32, 100)
    train, test = load(arguments.examples, tests, arguments.seed)
    start = make_model(width, jr.key(arguments.seed))
    rng = np.random.default_rng(arguments.seed)
    number = len(train.x)
    halves = np.stack(
        [rng.permutation(number) < number // 2 for _ in range(arguments.halves)]
    )
    model = eqx.filter_jit(make_train(train, arguments.steps))(start, None)
    results = []
    with tqdm(total=arguments.halves + 4, unit=" models", disable=None) as bar:
        bar.set_description("retraining on halves")
        actual = retrained(start, train, test, halves, arguments.steps, bar)
        for method in methods(model, train):
            bar.set_description(method.name)
            began = time.perf_counter()
            scores = np.asarray(method.scores(model, test, train))
            seconds = time.perf_counter() - began
            score = datamodelling_score(scores, halves, actual)
            own = np.asarray(method.own(model, train))
            results.append(Result(method.name, score, own, seconds))
            bar.update()
    results.append(Result("(loss)", np.nan, np.asarray(losses(model, train)), 0.0))

    right = np.mean(np.argmax(jax.vmap(model)(test.x), axis=1) == test.truth)
    print(
        f"test accuracy {right:.3f}, {np.mean(train.y != train.truth):.3f} wrong labels"
    )
    print(table(results, train))
    plot(results, train, arguments.out)
    print(f"Picture: {arguments.out}")


if __name__ == "__main__":
    main()
