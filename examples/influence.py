# %% [markdown]
# # Which training examples made it so?
#
# A classifier of 1,000 digits, of which a tenth has wrong labels. The influence of a
# training example on a prediction is how much that prediction's loss would fall if the
# example counted more: a product of two gradients with the inverse curvature between
# them. An example whose influence on itself is large has to be learnt by heart: it is
# often a mistake.
#
#     python examples/influence.py        # half a minute on two CPU cores
#     python examples/influence.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


def loss_fn(model, x, y):
    loss = kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)
    return loss + kfac.L2(model, 1e-2)


@eqx.filter_jit
def influences(model, train, test):
    """Influences of all training examples on all test examples, and of each on itself."""
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *train)
    influence = kfac.analysis.influence(loss_fn, curvature, damping=1e-4)
    return influence(model, test, train), influence.of_itself(model, train)


# %%
def load(seed):
    """Training data with a tenth of wrong labels, their true labels, and test data."""
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    x, truth = (images[order] / 16).astype(np.float32), digits[order].astype(np.int32)
    y = truth.copy()
    y[:100] = (y[:100] + rng.integers(1, 10, 100)) % 10
    return (x[:1000], y[:1000]), truth[:1000], (x[1000:1010], truth[1000:1010])


def trained(x, y, steps, seed):
    mlp = eqx.nn.MLP(64, 10, 32, 1, activation=jnp.tanh, key=jax.random.key(seed))
    model, optimizer = kfac.convert(mlp, blocks=kfac.EKFAC()), kfac.KFAC()
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    for i in tqdm(range(steps), unit=" steps", disable=None):
        model, state, _ = step(loss_fn, model, state, x, y, key=jax.random.key(i))
    return kfac.averaged(model, state)


def draw(train, truth, test, scores, own, path):
    """Test images, and the training images that helped most; the strangest ones."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    rows = figure.subplots(3, 11, width_ratios=[1] * 5 + [0.5] + [1] * 5)
    for i, row in enumerate(rows):
        show(row[0], test[0][i], f"test: {test[1][i]}", "#30638e")
        for axis, j in zip(row[1:5], np.argsort(-scores[i])):
            show(axis, train[0][j], train[1][j], colour(j, train, truth))
        row[5].set_axis_off()
    for axis, j in zip(rows[:, 6:].flat, np.argsort(-own)):
        show(axis, train[0][j], train[1][j], colour(j, train, truth))
    titles = "what helped to read three test images", "most influence on themselves"
    figure.suptitle(f"{titles[0]}; {titles[1]} (red: the label is wrong)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def colour(j, train, truth):
    return "black" if train[1][j] == truth[j] else "#d1495b"


def show(axis, image, title, colour):
    axis.imshow(image.reshape(8, 8), cmap="gray_r")
    axis.set_axis_off()
    axis.set_title(str(title), color=colour, fontsize=9)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of training, on all data")
    add("--seed", type=int, default=0, help="of data and initialisation")
    add("--out", type=Path, default=Path("runs/influence.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    train, truth, test = load(options.seed)
    steps = 5 if options.toy else options.steps
    model = trained(*train, steps, options.seed)
    scores, own = map(np.asarray, influences(model, train, test))
    highest = np.argsort(-own)[:100]
    found = np.mean(train[1][highest] != truth[highest])
    print(
        f"Of the 100 examples with most influence on themselves, {found:.0%} are wrong."
    )
    draw(train, truth, test, scores, own, options.out)
    print(f"Picture: {options.out}")
