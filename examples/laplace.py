# %% [markdown]
# # What a network does not know
#
# A trained network, and the curvature of its loss, make a normal distribution over its
# parameters, a Laplace posterior: nothing is trained anew. Here it is a regression with a
# gap in the data: how wide is the band there? The precisions of the prior, one of every
# layer, and the noise are those with most evidence.
#
#     python examples/laplace.py        # under a minute on two CPU cores
#     python examples/laplace.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


def loss_fn(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


@eqx.filter_jit
def posterior_of(model, x, y):
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
    mean_loss = loss_fn(model, x, y).value

    def at(sigma):
        posterior = kfac.analysis.Laplace(curvature, model, len(x), sigma_noise=sigma)
        posterior = posterior.with_tuned_prior(per_layer=True)
        likelihood = -mean_loss / sigma**2 - 0.5 * jnp.log(2 * jnp.pi * sigma**2)
        return posterior, posterior.log_marginal_likelihood(len(x) * likelihood)

    grid = jnp.geomspace(0.02, 1.0, 60)
    evidence = jax.lax.map(lambda sigma: at(sigma)[1], grid)
    return at(grid[jnp.argmax(evidence)])[0]


# %%
def wave(x):
    return jnp.sin(3 * x) + 0.3 * x


def data(key):
    """Noisy values on both sides of a gap."""
    x = jnp.linspace(0, 1.2, 100)
    x = jnp.where(jnp.arange(100) % 2 == 0, x - 2.0, x + 0.8)
    return x[:, None], (wave(x) + 0.1 * jr.normal(key, (100,)))[:, None]


def train(steps, seed):
    keys = jr.split(jr.key(seed))
    optimizer, (x, y) = kfac.KFAC(), data(keys[1])
    model = kfac.convert(eqx.nn.MLP(1, 1, 50, 2, activation=jnp.tanh, key=keys[0]))
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    for i in tqdm(range(steps), unit=" steps", disable=None):
        model, state, _ = step(loss_fn, model, state, x, y, key=jr.key(i))
    return kfac.averaged(model, state), x, y


@eqx.filter_jit
def predicted(posterior, grid):
    """Means, and standard deviations of new values, noise included."""
    forward = lambda model, x: model(x)
    mean, variance = jax.vmap(lambda x: posterior.predict(forward, x[None]))(grid)
    return mean[:, 0], jnp.sqrt(variance[:, 0, 0])


def draw(bands, x, y, grid, path):
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axis, (name, (mean, deviation)) in zip(figure.subplots(1, 2), bands.items()):
        axis.scatter(x, y, s=4, color="0.5", label="data")
        axis.plot(grid, wave(grid), color="0.6", ls="--", label="their origin")
        axis.plot(grid, mean, color="#d1495b", label="mean")
        low, high = mean - 2 * deviation, mean + 2 * deviation
        style = dict(color="#d1495b", alpha=0.2, linewidth=0)
        axis.fill_between(grid, low, high, label="two standard deviations", **style)
        axis.set(title=name, ylim=(-3, 3))
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of training, on all data")
    add("--seed", type=int, default=0, help="of data and initialisation")
    add("--out", type=Path, default=Path("runs/laplace.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    model, x, y = train(5 if options.toy else options.steps, options.seed)
    posterior, grid = posterior_of(model, x, y), jnp.linspace(-2.6, 2.6, 261)
    mean, deviation = predicted(posterior, grid)
    alone = np.full(len(grid), np.sqrt(2 * loss_fn(model, x, y).value))
    bands = {"the network alone": (mean, alone), "the posterior": (mean, deviation)}
    gap, beside = deviation[np.abs(grid) < 0.4], deviation[np.abs(grid + 1.4) < 0.4]
    print(f"Standard deviations: {jnp.mean(beside):.3f} beside data,")
    print(f"{jnp.mean(gap):.3f} in the gap; of the network alone {alone[0]:.3f}.")
    draw(bands, x, y, grid, options.out)
    print(f"Picture: {options.out}")
