# %% [markdown]
# # A differential equation
#
# A network learns to solve the heat equation, $u_t = u_{xx} / \pi^2$ from $\sin(\pi x)$
# on: its loss is the residual of the equation, at points inside, and the error at the
# edge. Derivatives in the inputs are taken forward (`jax.jvp`); for K-FAC, they are
# further rows of the same weights. All points are seen at every step, so the optimizer is
# `KFAC.full_batch()`: it chooses learning rate, momentum and damping by itself.
#
#     python examples/heat.py        # half a minute on two CPU cores
#     python examples/heat.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


optimizer = kfac.KFAC.full_batch(fisher=kfac.Exact())


def loss_fn(u, inside, edge):
    wrong = jax.vmap(u)(edge) - jax.vmap(solution)(edge)
    return squared(jax.vmap(residual(u))(inside)) + 100 * squared(wrong)


@eqx.filter_jit
def train_step(model, state, inside, edge):
    return optimizer.step(loss_fn, model, state, inside, edge)


# %%
def squared(values):
    return kfac.SquaredError(values[:, None], jnp.zeros((len(values), 1)))


def along(u, v):
    return lambda x: jax.jvp(u, (x,), (v,))[1]


def residual(u):
    e_x, e_t = jnp.eye(2)
    return lambda x: along(u, e_t)(x) - along(along(u, e_x), e_x)(x) / jnp.pi**2


def solution(x):
    return jnp.exp(-x[1]) * jnp.sin(jnp.pi * x[0])


def points(rng):
    """Inside of the square; and on three edges of it, for the end of time is none."""
    inside, edge = (rng.uniform(size=(n, 2)).astype(np.float32) for n in (900, 120))
    edge[:40, 0], edge[40:80, 0], edge[80:, 1] = 0, 1, 0
    return inside, edge


@eqx.filter_jit
def on_a_grid(model):
    """The solution that was found, and its error."""
    axis = jnp.linspace(0, 1, 61)
    grid = jnp.stack(jnp.meshgrid(axis, axis), axis=-1)
    found, want = (jax.vmap(jax.vmap(u))(grid) for u in (model, solution))
    return found, found - want


# %%
def train(steps, seed):
    inside, edge = points(np.random.default_rng(seed))
    mlp = eqx.nn.MLP(2, "scalar", 32, 2, jnp.tanh, key=jax.random.key(seed))
    # Values, derivatives and edges have different units: every row counts by what it
    # matters for the loss.
    model = kfac.convert(mlp, blocks=kfac.Kronecker(kfac.TensorNormal()))
    state, errors = optimizer.init(model), []
    for _ in tqdm(range(steps), unit=" steps", disable=None):
        model, state, _ = train_step(model, state, inside, edge)
        found, error = on_a_grid(model)
        errors.append(float(jnp.linalg.norm(error) / jnp.linalg.norm(found - error)))
    return errors, on_a_grid(model)


def draw(errors, values, path):
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, *maps = figure.subplots(1, 3)
    left.semilogy(errors, color="#d1495b")
    left.set(title="error, relative to the solution", xlabel="steps")
    titles = "the solution that was found", "its error"
    for axis, u, title in zip(maps, values, titles):
        image = axis.imshow(u, origin="lower", extent=(0, 1, 0, 1), cmap="magma")
        axis.set(title=title, xlabel="x", ylabel="t")
        figure.colorbar(image, ax=axis, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=500, help="of training")
    add("--seed", type=int, default=0, help="of initialisation and points")
    add("--out", type=Path, default=Path("runs/heat.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    errors, values = train(5 if options.toy else options.steps, options.seed)
    print(f"The relative error fell from {errors[0]:.2g} to {errors[-1]:.2g}.")
    draw(errors, values, options.out)
    print(f"Picture: {options.out}")
