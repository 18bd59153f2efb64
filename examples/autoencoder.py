# %% [markdown]
# # A deep autoencoder
#
# The problem on which K-FAC was first shown (J. Martens and R. Grosse, *Optimizing Neural
# Networks with Kronecker-factored Approximate Curvature*, ICML 2015, section 13): ten
# layers with a code of 30 numbers in the middle, no normalisation, no skip connections.
# The images are the 1,797 digits that come with scikit-learn, of 28x28 pixels.
#
#     python examples/autoencoder.py        # three minutes on two CPU cores
#     python examples/autoencoder.py --toy  # does everything run?

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


optimizer = kfac.KFAC()


def loss_fn(model, x):
    logits = jax.vmap(model)(x)
    return kfac.SigmoidCrossEntropy(logits, x) + kfac.L2(model, 1e-5)


@eqx.filter_jit
def train_step(model, state, x, key):
    return optimizer.step(loss_fn, model, state, x, key=key)


# %%
def load():
    """Images in [0, 1]."""
    small = load_digits(return_X_y=True)[0].reshape(-1, 8, 8).astype(np.float32) / 16
    return jax.image.resize(small, (len(small), 28, 28), "linear").reshape(-1, 784)


def network(widths, key):
    """The encoder through `widths`, and its mirror image. Weights have variance 1 over
    fan-in, biases are zero."""
    sizes = [784, *widths, *widths[-2::-1], 784]
    linear = (len(widths) - 1, len(sizes) - 2)  # The code and the output.
    lecun = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    layers = []
    for i, key in enumerate(jax.random.split(key, len(sizes) - 1)):
        layer = eqx.nn.Linear(sizes[i], sizes[i + 1], key=key)
        new = lecun(key, layer.weight.shape), jnp.zeros(sizes[i + 1])
        layers.append(eqx.tree_at(lambda m: (m.weight, m.bias), layer, new))
        if i not in linear:
            layers.append(eqx.nn.Lambda(jnp.tanh))
    return eqx.nn.Sequential(layers)


# %%
def train(widths, steps, seed):
    images, keys = load(), jax.random.split(jax.random.key(seed))
    model = kfac.convert(network(widths, keys[0]))
    state, losses = optimizer.init(model), []
    for i in tqdm(range(steps), unit=" steps", disable=None):
        key = jax.random.fold_in(keys[1], i)
        x = images[jax.random.randint(key, (500,), 0, len(images))]
        model, state, info = train_step(model, state, x, key)
        losses.append(float(info.loss))
    return kfac.averaged(model, state), losses, images


def draw(model, losses, images, path):
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axis, *small = figure.subplot_mosaic("aaaabcdefgh;aaaaijklmno").values()
    axis.semilogy(losses, color="#d1495b")
    axis.set(title="loss of a batch, nats per image", xlabel="steps")
    again = jax.nn.sigmoid(jax.vmap(model)(images[:7]))
    for axis, picture in zip(small, [*images[:7], *again]):
        axis.imshow(picture.reshape(28, 28), cmap="gray_r")
        axis.set_axis_off()
    small[3].set_title("images, and what is left of them after 30 numbers")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of training")
    add("--seed", type=int, default=0, help="of initialisation and batches")
    add("--out", type=Path, default=Path("runs/autoencoder.png"), help="picture")
    add("--toy", action="store_true", help="five steps of a small network")
    options = parser.parse_args()
    small, large = ((32, 16, 30), 5), ((1000, 500, 250, 30), options.steps)
    widths, steps = small if options.toy else large
    model, losses, images = train(widths, steps, options.seed)
    print(f"The loss fell from {losses[0]:.1f} to {losses[-1]:.1f} nats per image.")
    draw(model, losses, images, options.out)
    print(f"Picture: {options.out}")
