# %% [markdown]
# # What a network does not know: Laplace posteriors
#
# A trained network, and the curvature of its loss, make a normal distribution over its
# parameters: nothing is trained anew. Two problems, each beside the network alone (MAP):
#
# - a regression in one dimension, with a gap in the data: how wide is the band there?
# - the digits 0 to 7 of scikit-learn: are the probabilities of classes right on unseen
#   images (negative log-likelihood, calibration error), and is it told that an 8 or a 9
#   is none of them (area under the ROC curve of the largest probability)?
#
# The precision of the prior has most evidence, one for every layer; so has the noise of
# the regression. Of the digits, there is also a cold posterior: its temperature is the
# best of a grid on validation data.
#
#     python tests/benchmarks/studies/laplace.py  # under a minute on two CPU cores
#     python tests/benchmarks/studies/laplace.py --toy  # does everything run?

# %%
import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from harness import make_parser, over_seeds, parsed, save_picture
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## Training
#
# By K-FAC itself, with its defaults. The curvature of the posterior is that of the
# averaged model, over all training data.


# %%
optimizer = kfac.KFAC()
step = eqx.filter_jit(optimizer.step)  # Compiled once for all seeds.


def train(loss_fn: Callable, model: Any, data: tuple, steps: int, bar: tqdm) -> Any:
    state = optimizer.init(model)
    for i in range(steps):
        model, state, _ = step(loss_fn, model, state, *data, key=jr.key(i))
        bar.update()
    return kfac.averaged(model, state)


@eqx.filter_jit
def curvature_of(loss_fn: Callable, model: Any, *data: Any) -> Any:
    return kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *data)


@eqx.filter_jit
def tuned(curvature: Any, model: Any, number: int, sigma: Any) -> kfac.analysis.Laplace:
    posterior = kfac.analysis.Laplace(curvature, model, number, sigma_noise=sigma)
    return posterior.with_tuned_prior(per_layer=True)


def fit(
    loss_fn: Callable, model: Any, data: tuple, blocks: Any, sigma: Any = 1.0
) -> kfac.analysis.Laplace:
    model = kfac.convert(kfac.revert(model), blocks=blocks)
    return tuned(curvature_of(loss_fn, model, *data), model, len(data[0]), sigma)


def forward(model, x):
    return model(x)


BLOCKS = {
    "Kronecker": kfac.Kronecker(),
    "EKFAC": kfac.EKFAC(),
    "Diagonal": kfac.Diagonal(),
}


# %% [markdown]
# ## A regression with a gap
#
# The noise is chosen by the evidence too: of every value on a grid, with the best prior
# for it.


# %%
NOISE = 0.1


def wave(x: Array) -> Array:
    return jnp.sin(3 * x) + 0.3 * x


def regression_data(number: int, key: PRNGKeyArray) -> tuple[Array, Array]:
    keys = jr.split(key, 2)
    x = jnp.linspace(0, 1.2, number)
    x = jnp.where(jnp.arange(number) % 2 == 0, x - 2.0, x + 0.8)
    return x[:, None], (wave(x) + NOISE * jr.normal(keys[1], (number,)))[:, None]


def regression_loss(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


def with_best_noise(
    posterior: kfac.analysis.Laplace, mean_loss: Array
) -> kfac.analysis.Laplace:
    number = posterior.num_examples

    def at(sigma):
        new = eqx.tree_at(lambda p: p.sigma_noise, posterior, sigma)
        new = new.with_tuned_prior(per_layer=True)
        likelihood = -number * (
            mean_loss / sigma**2 + 0.5 * jnp.log(2 * jnp.pi * sigma**2)
        )
        return new, new.log_marginal_likelihood(likelihood)

    grid = jnp.geomspace(0.02, 1.0, 60)
    evidence = jax.lax.map(lambda sigma: at(sigma)[1], grid)
    return at(grid[jnp.argmax(evidence)])[0]


class Band(NamedTuple):
    name: str
    mean: np.ndarray
    deviation: np.ndarray
    inside: float  # Negative log-likelihood on new data like the old,
    gap: float  # and on data from the gap.


def negative_log_likelihood(mean: Array, variance: Array, y: Array) -> Float[Array, ""]:
    squared = (y - mean) ** 2 / variance
    return 0.5 * jnp.mean(squared + jnp.log(2 * jnp.pi * variance))


def regression(options: argparse.Namespace, bar: tqdm) -> tuple[list[Band], Any, Any]:
    keys = jr.split(jr.key(options.seed), 3)
    width = 8 if options.toy else 50
    model = kfac.convert(eqx.nn.MLP(1, 1, width, 2, activation=jnp.tanh, key=keys[0]))
    data = regression_data(100, keys[1])
    bar.set_description("regression")
    model = train(regression_loss, model, data, options.steps, bar)
    grid = jnp.linspace(-2.6, 2.6, 261)
    gap = jnp.linspace(-0.6, 0.6, 50)
    points = jnp.concatenate([grid, data[0][:, 0], gap])
    fresh = wave(points) + NOISE * jr.normal(keys[2], points.shape)

    def band(name, mean, variance):
        parts = slice(261, 361), slice(361, None)
        scores = [
            float(negative_log_likelihood(mean[p], variance[p], fresh[p])) for p in parts
        ]
        return Band(name, np.asarray(mean[:261]), np.sqrt(variance[:261]), *scores)

    mean_loss = regression_loss(model, *data).value
    mean = jax.vmap(model)(points[:, None])[:, 0]
    bands = [band("MAP", mean, jnp.full_like(mean, 2 * mean_loss))]
    for name, block in BLOCKS.items():
        posterior = fit(regression_loss, model, data, block)
        posterior = eqx.filter_jit(with_best_noise)(posterior, mean_loss)
        predict = lambda x, p: p.predict(forward, x[None])
        mean, variance = eqx.filter_jit(eqx.filter_vmap(predict, in_axes=(0, None)))(
            points, posterior
        )
        bands.append(band(name, mean[:, 0], variance[:, 0, 0]))
    return bands, data, grid


# %% [markdown]
# ## Digits, two of which are unseen
#
# Beside the posterior of all layers, that of the last one: a part of the model, by
# `eqx.partition`, and whatever comes before is known.


# %%
class Digits(NamedTuple):
    train: tuple[Any, Any]  # Images and digits.
    validation: tuple[Any, Any]
    test: tuple[Any, Any]
    unseen: np.ndarray


def load(number: int, seed: int) -> Digits:
    images, digits = load_digits(return_X_y=True)
    x, y = (images / 16).astype(np.float32), digits.astype(np.int32)
    known = y < 8
    x_train, x_test, y_train, y_test = train_test_split(
        x[known], y[known], train_size=number, random_state=seed, stratify=y[known]
    )
    validation, test = (x_test[:200], y_test[:200]), (x_test[200:], y_test[200:])
    return Digits((x_train, y_train), validation, test, x[~known])


def digits_loss(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y) + kfac.L2(model, 3e-3)


class Score(NamedTuple):
    accuracy: float
    nll: float
    calibration: float
    auroc: float


def score(both: list[Array], y: np.ndarray) -> Score:
    """The scores of the probabilities of known digits, and of unseen ones."""
    probabilities, unseen = map(np.asarray, both)
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    nll = -np.mean(np.log(probabilities[np.arange(len(y)), y]))
    bins = np.digitize(sure, np.linspace(0, 1, 16))
    error = sum(
        abs(np.sum(right[bins == b] - sure[bins == b])) for b in np.unique(bins)
    ) / len(y)
    ranks = rankdata(np.concatenate([sure, unseen.max(axis=1)]))[: len(y)]
    auroc = (ranks.sum() / len(y) - (len(y) + 1) / 2) / len(unseen)
    return Score(float(right.mean()), float(nll), float(error), float(auroc))


def last_layer(model: Any) -> tuple[Any, Any]:
    nothing = jax.tree.map(lambda _: False, model)
    everything = jax.tree.map(eqx.is_inexact_array, model.layers[-1])
    return eqx.partition(model, eqx.tree_at(lambda m: m.layers[-1], nothing, everything))


@eqx.filter_jit
def cooled(posterior: kfac.analysis.Laplace, x: Any, y: Any) -> kfac.analysis.Laplace:
    """With the temperature of the highest likelihood."""

    def at(temperature):
        return eqx.tree_at(lambda p: p.temperature, posterior, temperature)

    def log_likelihood(temperature):
        classes = lambda x: at(temperature).predict_classes(forward, x)
        chosen = jnp.take_along_axis(jax.lax.map(classes, x), y[:, None], axis=1)
        return jnp.mean(jnp.log(chosen))

    grid = jnp.geomspace(1e-3, 1.0, 10)
    return at(grid[jnp.argmax(jax.lax.map(log_likelihood, grid))])


@eqx.filter_jit
def of_all(predict: Callable, x: Any) -> Any:
    """The predictions for all images, at the same time of as many as fit into memory."""
    return jax.lax.map(predict, x, batch_size=64)


def softmax_of(model: Any, x: Any) -> Any:
    return jax.nn.softmax(model(x))


def digits(options: argparse.Namespace, seed: int, bar: tqdm) -> dict[str, Score]:
    number, width = (150, 8) if options.toy else (400, 64)
    data = load(number, seed)
    model = kfac.convert(
        eqx.nn.MLP(64, 8, width, 2, activation=jnp.tanh, key=jr.key(seed))
    )
    bar.set_description(f"digits, seed {seed}")
    model = train(digits_loss, model, data.train, options.steps, bar)
    images = data.test[0], data.unseen

    plain = [of_all(eqx.Partial(softmax_of, model), x) for x in images]
    found = {"MAP": score(plain, data.test[1])}
    trained, frozen = last_layer(model)
    whole = lambda part: eqx.combine(part, frozen)
    last = fit(
        lambda part, x, y: digits_loss(whole(part), x, y),
        trained,
        data.train,
        kfac.Kronecker(),
    )
    posteriors: dict[str, tuple[kfac.analysis.Laplace, Callable]] = {
        "last layer": (last, lambda part, x: whole(part)(x))
    }
    for name, block in BLOCKS.items():
        posteriors[name] = fit(digits_loss, model, data.train, block), forward
    posteriors["cold"] = cooled(posteriors["Kronecker"][0], *data.validation), forward
    for name, (posterior, fn) in posteriors.items():
        classes = eqx.Partial(posterior.predict_classes, fn)
        both = [of_all(classes, x) for x in images]
        found[name] = score(both, data.test[1])
    return found


# %% [markdown]
# ## What came out


# %%
def tables(bands: list[Band], scores: list[dict[str, Score]]) -> str:
    """The tables; of the digits, means over seeds and, with several, deviations."""
    lines = [f"{'regression':<12} {'NLL':>9} {'in the gap':>11}"]
    for b in bands:
        lines.append(f"{b.name:<12} {b.inside:>9.3f} {b.gap:>11.3f}")
    names = "accuracy", "NLL", "ECE", "AUROC"
    lines.append(f"{'digits':<12}" + "".join(f"{name:>15}" for name in names))
    for name in scores[0]:
        each = np.array([s[name] for s in scores])
        cells = [f"{mean:.3f}" for mean in each.mean(axis=0)]
        if len(scores) > 1:
            cells = [f"{c} +- {d:.3f}" for c, d in zip(cells, each.std(axis=0, ddof=1))]
        lines.append(f"{name:<12}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def verdict(bands: list[Band], scores: list[dict[str, Score]]) -> str:
    first, second = sorted(bands, key=lambda b: b.gap)[:2]
    means = {name: np.mean([s[name].nll for s in scores]) for name in scores[0]}
    best, other = sorted(means, key=lambda name: means[name])[:2]
    wins = sum(min(s, key=lambda name: s[name].nll) == best for s in scores)
    seeds = over_seeds(len(scores), wins, "means")
    return (
        f"In the gap {first.name} has the lowest NLL, {first.gap:.3f}, before "
        f"{second.name}, {second.gap:.3f} (one seed); of the digits {best}, "
        f"{means[best]:.3f}, before {other}, {means[other]:.3f} "
        f"({seeds})."
    )


def plot(bands: list[Band], data: Any, grid: Any, path: Path) -> None:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes: Any = figure.subplots(1, len(bands), sharey=True)
    for axis, band in zip(axes, bands):
        axis.scatter(*data, s=4, color="0.5", zorder=2, label="data")
        style = dict(color="0.6", linewidth=0.8, linestyle="--")
        axis.plot(grid, wave(grid), label="what they were drawn from", **style)
        axis.plot(grid, band.mean, color="#d1495b", label="mean")
        low, high = (band.mean + s * 2 * band.deviation for s in (-1, 1))
        style = dict(color="#d1495b", alpha=0.2, linewidth=0)
        axis.fill_between(grid, low, high, label="two standard deviations", **style)
        axis.set_title(band.name, loc="left", fontweight="bold")
        axis.set_ylim(-3, 3)
        axis.set_xlabel("input")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("output")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save_picture(figure, path)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Laplace posteriors.", "laplace", seeds=3)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of every training, on all data")
    toy = dict(steps=20, seeds=1)
    options = parsed(parser, argv, ["steps", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    total = options.steps * (1 + options.seeds)
    with tqdm(total=total, unit=" steps", disable=None) as bar:
        bands, data, grid = regression(options, bar)
        seeds = range(options.seed, options.seed + options.seeds)
        scores = [digits(options, seed, bar) for seed in seeds]
    print(tables(bands, scores))
    print(verdict(bands, scores))
    plot(bands, data, grid, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
