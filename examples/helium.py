# %% [markdown]
# # An atom: variational Monte Carlo
#
# A network is the wavefunction of helium; walkers are drawn from its square, and the
# mean of their local energies is lowered. The loss is `kfac.Energy`, the optimizer
# `KFAC.vmc()`, with nothing to choose.
#
#     python examples/helium.py        # a minute on two CPU cores
#     python examples/helium.py --toy  # does everything run?

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


EXACT = -2.903724  # Hartree, of a fixed nucleus, without relativity.
length = jnp.linalg.norm
optimizer = kfac.KFAC.vmc()


def loss_fn(psi, walkers, energies):
    return kfac.Energy(jax.vmap(psi)(walkers), energies)


@eqx.filter_jit
def train_step(psi, state, walkers, key):
    walkers = moved(psi, walkers, key)
    energies = jax.vmap(lambda r: local_energy(psi, r))(walkers)
    psi, state, _ = optimizer.step(loss_fn, psi, state, walkers, energies)
    return psi, state, walkers, jnp.mean(energies)


class Wavefunction(eqx.Module):
    """A smooth part, and one with the cusps at the nucleus and where electrons meet."""

    mlp: eqx.nn.MLP

    def __call__(self, r):
        """The logarithm for electrons at `r`, `[2, 3]`."""
        first, second, between = length(r[0]), length(r[1]), length(r[0] - r[1])
        smooth = lambda d: d**2 / (1 + d)  # Far away the same, and without a cusp.
        a, b, c = map(smooth, (first, second, between))
        features = jnp.stack([a + b, (a - b) ** 2, c])  # Symmetric in the electrons.
        cusps = -2 * (first + second) + 0.5 * between / (1 + between)
        return cusps + self.mlp(features)


def local_energy(psi, r):
    """Kinetic, forward over forward, and potential."""

    def along(v):
        first = lambda x: jax.jvp(psi, (x,), (v,))[1]
        slope, curved = jax.jvp(first, (r,), (v,))
        return curved + slope**2

    kinetic = -0.5 * jnp.sum(jax.vmap(along)(jnp.eye(6).reshape(6, 2, 3)))
    return kinetic - 2 / length(r[0]) - 2 / length(r[1]) + 1 / length(r[0] - r[1])


def moved(psi, walkers, key, moves=10):
    """After some moves of all electrons, of which about a half are accepted."""
    log_density = lambda r: 2 * jax.vmap(psi)(r)

    def move(state, key):
        (r, log_p), keys = state, jr.split(key)
        new = r + 0.4 * jr.normal(keys[0], r.shape)
        log_new = log_density(new)
        accept = jnp.log(jr.uniform(keys[1], log_p.shape)) < log_new - log_p
        new = jnp.where(accept[:, None, None], new, r)
        return (new, jnp.where(accept, log_new, log_p)), None

    start, keys = (walkers, log_density(walkers)), jr.split(key, moves)
    return jax.lax.scan(move, start, keys)[0][0]


def train(steps, seed):
    """The mean of the local energies at every step."""
    keys, energies = jr.split(jr.key(seed), 3), []
    mlp = eqx.nn.MLP(3, "scalar", 32, 2, jnp.tanh, key=keys[0])
    psi = kfac.convert(Wavefunction(mlp), kfac.TNT())
    walkers = moved(psi, jr.normal(keys[1], (1024, 2, 3)), keys[1], 200)
    state = optimizer.init(psi)
    for key in tqdm(jr.split(keys[2], steps), unit=" steps", disable=None):
        psi, state, walkers, energy = train_step(psi, state, walkers, key)
        energies.append(float(energy))
    return np.array(energies)


def draw(energies, path):
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    figure.subplots().semilogy(abs(energies - EXACT), color="#d1495b")
    figure.suptitle("distance from the exact energy, Hartree, after so many steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of training")
    add("--seed", type=int, default=0, help="of everything")
    add("--out", type=Path, default=Path("runs/helium.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    energies = train(5 if options.toy else options.steps, options.seed)
    last = np.mean(energies[-len(energies) // 3 :])  # The last third.
    print(f"Energy of the last steps: {last:.4f} Ha; exact: {EXACT}.")
    draw(energies, options.out)
    print(f"Picture: {options.out}")
