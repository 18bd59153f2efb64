# %% [markdown]
# # A convolutional network
#
# Convolutions, group normalisations and a linear layer read the 1,797 digits of 8x8
# pixels that come with scikit-learn. `kfac.convert` tags every layer that has parameters;
# `KFAC()` has nothing to choose; its averaged model is the one to use.
#
#     python examples/convnet.py        # half a minute on two CPU cores
#     python examples/convnet.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import eqx_kfac as kfac


optimizer = kfac.KFAC()


def loss_fn(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


@eqx.filter_jit
def train_step(model, state, x, y, key):
    return optimizer.step(loss_fn, model, state, x, y, key=key)


# %%
def network(widths, key):
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


def load():
    """Images in [0, 1] and digits, for training and for testing."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = digits.astype(np.int32)
    split = train_test_split(images, digits, test_size=297, random_state=0)
    x, x_test, y, y_test = map(jnp.asarray, split)
    return (x, y), (x_test, y_test)


# %%
def train(steps, seed):
    (x, y), test = load()
    keys = jax.random.split(jax.random.key(seed))
    model = kfac.convert(network((16, 32, 32), keys[0]))
    state, losses = optimizer.init(model), []
    for i in tqdm(range(steps), unit=" steps", disable=None):
        key = jax.random.fold_in(keys[1], i)
        batch = jax.random.randint(key, (256,), 0, len(x))
        model, state, info = train_step(model, state, x[batch], y[batch], key)
        losses.append(float(info.loss))
    return kfac.averaged(model, state), losses, test


def draw(losses, images, digits, guesses, path):
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis, *small = figure.subplot_mosaic("aaaabcdef;aaaaghijk").values()
    axis.semilogy(losses, color="#d1495b")
    axis.set(xlabel="steps", title="training loss of each batch")
    wrong = np.argsort(guesses == digits, stable=True)[:10]
    for i, axis in zip(wrong, small):
        axis.imshow(images[i, 0], cmap="gray_r")
        axis.set_axis_off()
        axis.set_title(f"{digits[i]}, read as {guesses[i]}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of training")
    add("--seed", type=int, default=0, help="of initialisation and batches")
    add("--out", type=Path, default=Path("runs/convnet.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    model, losses, test = train(5 if options.toy else options.steps, options.seed)
    guesses = np.argmax(jax.vmap(model)(test[0]), axis=-1)
    print(f"The loss of the last batch is {losses[-1]:.2g};")
    print(f"{np.mean(guesses == test[1]):.3f} of the unseen digits are read right.")
    draw(losses, *test, guesses, options.out)
    print(f"Picture: {options.out}")
