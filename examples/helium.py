# %% [markdown]
# # Atoms: variational Monte Carlo with K-FAC and Adam
#
# A small neural network is the wavefunction of an atom; walkers are drawn from its square
# by Metropolis' algorithm, and the energy, the mean of the walkers' local energies, is
# lowered. The loss is `kfac.Energy`: gradient and curvature of $\log \lvert \psi \rvert$
# from one pass. The local energies have second derivatives in the electrons' positions,
# but nothing is trained through these.
#
#     python examples/helium.py                    # helium: two or three minutes
#     python examples/helium.py --atom beryllium --steps 600   # as many again
#     python examples/helium.py --toy              # does everything run?

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
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## The atoms
#
# In Hartree; the energies of fixed nuclei, without relativity.


# %%
class Atom(NamedTuple):
    charge: int
    up: int  # How many electrons have either spin.
    down: int
    exact: float
    width: int  # Of the layers, unless another one is given.

    @property
    def electrons(self) -> int:
        return self.up + self.down


ATOMS = {
    "helium": Atom(2, 1, 1, -2.903724, 64),
    "beryllium": Atom(4, 2, 2, -14.66736, 32),
}

Positions = Float[Array, "electrons 3"]


# %% [markdown]
# ## The wavefunction
#
# Each electron sees itself and means over the others, layer by layer, with the same
# weights; orbitals are linear in what comes out, times envelopes that fall off; their
# determinants change sign where two electrons of one spin are exchanged. All that is
# smooth; factors for every electron and every pair have the right cusps at the nucleus
# and where two electrons meet. (A small relative of the FermiNet of Pfau et al., Physical
# Review Research 2, 2020.)


# %%
class Wavefunction(eqx.Module):
    layers: list[eqx.nn.Linear]
    orbitals: eqx.nn.Linear
    envelopes: kfac.Parameter  # How fast every orbital falls off.
    widths: kfac.Parameter  # Of the cusps: parallel spins, others, the nucleus.
    atom: Atom = eqx.field(static=True)

    def __init__(self, atom: Atom, width: int, depth: int, key: PRNGKeyArray):
        keys = jr.split(key, depth + 1)
        pairs = 2 * 4  # Means over electrons of either spin: of 3 coordinates, 1 length.
        sizes = [4, *[width] * depth]
        self.layers = [
            eqx.nn.Linear(3 * old + pairs, new, key=key)
            for old, new, key in zip(sizes[:-1], sizes[1:], keys[1:], strict=True)
        ]
        orbitals = max(atom.up, atom.down)
        self.orbitals = eqx.nn.Linear(width, orbitals, key=keys[0])
        self.envelopes = kfac.Parameter(jnp.ones(orbitals))
        self.widths = kfac.Parameter(jnp.ones(3))
        self.atom = atom

    def __call__(self, r: Positions) -> Float[Array, ""]:
        r"""$\log \lvert \psi \rvert$"""
        up = self.atom.up
        away = _length(r)
        apart = r[:, None] - r[None]
        distance = _length(apart + jnp.eye(len(r))[..., None]) * (1 - jnp.eye(len(r)))
        pair = jnp.concatenate([apart, _smooth(distance)[..., None]], axis=-1)
        pairs = [jnp.mean(pair[:, :up], axis=1), jnp.mean(pair[:, up:], axis=1)]
        h = jnp.concatenate([r, _smooth(away)[:, None]], axis=-1)
        for layer in self.layers:
            means = jnp.mean(h[:up], axis=0), jnp.mean(h[up:], axis=0)
            means = [jnp.broadcast_to(m, h.shape) for m in means]
            seen = jnp.concatenate([h, *means, *pairs], axis=-1)
            new = jnp.tanh(jax.vmap(layer)(seen))
            h = new + h if new.shape == h.shape else new
        decay = jax.nn.softplus(self.envelopes(r))[None, :]
        envelopes = jnp.exp(-_smooth(away)[:, None] * decay)
        orbitals = jax.vmap(self.orbitals)(h) * envelopes
        determinants = [
            jnp.linalg.slogdet(orbitals[spin][:, : orbitals[spin].shape[0]])[1]
            for spin in (slice(None, up), slice(up, None))
        ]
        return sum(determinants, self._cusps(r, away, distance))

    def _cusps(self, r: Positions, away: Array, distance: Array) -> Float[Array, ""]:
        spin = jnp.arange(len(r)) < self.atom.up
        parallel = spin[:, None] == spin[None, :]
        widths = jax.nn.softplus(self.widths(r))
        slope = jnp.where(parallel, 0.25, 0.5)
        width = jnp.where(parallel, widths[0], widths[1])
        pairs = jnp.triu(slope * distance / (1 + width * distance), 1)
        nucleus = -self.atom.charge * away / (1 + widths[2] * away)
        return jnp.sum(pairs) + jnp.sum(nucleus)


def _smooth(length: Array) -> Array:
    """As a length far away, without its cusp at zero."""
    return length**2 / (1 + length)


def _length(a: Array) -> Array:
    return jnp.sqrt(jnp.sum(a**2, axis=-1))


# %% [markdown]
# ## Local energies and walkers
#
# $E_L = -\frac12 \sum_i (\partial_i^2 \log \psi + (\partial_i \log \psi)^2) + V$,
# forward over forward, direction by direction.


# %%
def local_energy(psi: Wavefunction, r: Positions) -> Float[Array, ""]:
    atom, flat = psi.atom, r.reshape(-1)

    def along(v):
        first = lambda x: jax.jvp(lambda x: psi(x.reshape(-1, 3)), (x,), (v,))[1]
        slope, curved = jax.jvp(first, (flat,), (v,))
        return curved + slope**2

    kinetic = -0.5 * jnp.sum(jax.vmap(along)(jnp.eye(flat.size)))
    attraction = -atom.charge * jnp.sum(1 / _length(r))
    i, j = np.triu_indices(len(r), 1)
    return kinetic + attraction + jnp.sum(1 / _length(r[i] - r[j]))


class Walkers(NamedTuple):
    positions: Float[Array, "walkers electrons 3"]
    width: Float[Array, ""]  # Of the moves.


def moved(psi: Callable, walkers: Walkers, key: PRNGKeyArray, moves: int) -> Walkers:
    """Metropolis moves of all electrons at a time; about half of them are accepted."""
    log_density = lambda r: 2 * jax.vmap(psi)(r)

    def move(state, key):
        r, log_p, width = state
        noise, chance = jr.split(key)
        new = r + width * jr.normal(noise, r.shape)
        log_new = log_density(new)
        accept = jnp.log(jr.uniform(chance, log_p.shape)) < log_new - log_p
        r = jnp.where(accept[:, None, None], new, r)
        width = width * jnp.exp(0.1 * (jnp.mean(accept) - 0.5))
        return (r, jnp.where(accept, log_new, log_p), width), None

    start = walkers.positions, log_density(walkers.positions), walkers.width
    (r, _, width), _ = jax.lax.scan(move, start, jr.split(key, moves))
    return Walkers(r, width)


# %% [markdown]
# ## Training
#
# A step moves the walkers, computes local energies, and then the parameters' step. The
# loss function itself has no more than $\log \lvert \psi \rvert$.
#
# The Fisher of $\psi^2$ is a covariance, for its norm is not known: `kfac.Centred`, of
# blocks that are made of single walkers' gradients.


# %%
def loss_fn(psi: Callable, r: Array, energies: Array) -> kfac.Energy:
    return kfac.Energy(jax.vmap(psi)(r), energies)


class Method(NamedTuple):
    name: str
    init: Callable
    step: Callable  # (model, state, positions, energies, key, part) -> (model, state)
    final: Callable = lambda model, state: model


def with_kfac() -> Method:
    optimizer = kfac.KFAC.vmc()

    def step(model, state, r, energies, key, part):
        del part
        model, state, _ = optimizer.step(loss_fn, model, state, r, energies, key=key)
        return model, state

    return Method("K-FAC", optimizer.init, step, kfac.averaged)


def with_adam(rate: float) -> Method:
    """Its rate falls to zero as a cosine; `part` is that of the run that is over."""
    adam = optax.scale_by_adam()

    def init(model):
        return adam.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, r, energies, key, part):
        del key
        grads = eqx.filter_grad(lambda m: loss_fn(m, r, energies).value)(model)
        updates, state = adam.update(grads, state)
        scale = -rate * 0.5 * (1 + jnp.cos(jnp.pi * part))
        updates = jax.tree.map(lambda u: scale * u, updates)
        return eqx.apply_updates(model, updates), state

    return Method(f"Adam, {rate:g}", init, step)


class Run(NamedTuple):
    method: str
    seed: int
    energies: list[float]  # Of the walkers, step by step.
    deviations: list[float]  # Of their local energies.
    seconds: list[float]
    energy: float  # At the end, from many more walkers,
    error: float  # and its standard error.
    spread: float


def train(
    method: Method, options: argparse.Namespace, seed: int, seconds: float | None = None
) -> Run:
    """So many steps, or as many as fit into `seconds`. Compiling is not counted."""
    atom = ATOMS[options.atom]
    keys = jr.split(jr.key(seed), 4)
    width = options.width or atom.width
    network = Wavefunction(atom, width, options.depth, keys[0])
    model = kfac.convert(network, kfac.TNT())
    shape = options.batch, atom.electrons, 3
    walkers = Walkers(jr.normal(keys[1], shape), jnp.asarray(0.3))
    warm_up = eqx.filter_jit(lambda m, w, k: moved(kfac.revert(m), w, k, 200))
    walkers = warm_up(model, walkers, keys[2])

    @eqx.filter_jit
    def step(model, state, walkers, key, part):
        moving, sampling = jr.split(key)
        psi = kfac.revert(model)
        walkers = moved(psi, walkers, moving, options.moves)
        energies = jax.vmap(lambda r: local_energy(psi, r))(walkers.positions)
        given = walkers.positions, energies, sampling, part
        model, state = method.step(model, state, *given)
        return model, state, walkers, jnp.mean(energies), jnp.std(energies)

    state = method.init(model)
    jax.block_until_ready(step(model, state, walkers, keys[3], jnp.asarray(0.0)))
    run: tuple[list[float], ...] = [], [], []
    steps, total = options.steps, 0.0
    name, bound = f"{method.name}, seed {seed}", steps if seconds is None else None
    with tqdm(total=bound, desc=name, unit=" steps", disable=None) as bar:
        while len(run[0]) < steps if seconds is None else total < seconds:
            number = len(run[0])
            part = jnp.asarray(number / steps if seconds is None else total / seconds)
            key, start = jr.fold_in(keys[3], number), time.process_time()
            model, state, walkers, *found = step(model, state, walkers, key, part)
            found = [float(a) for a in found]
            total += time.process_time() - start
            for numbers, new in zip(run, [*found, total], strict=True):
                numbers.append(new)
            bar.update()
            bar.set_postfix(energy=f"{found[0]:.4f}")

    @eqx.filter_jit
    def look(psi, walkers, key):
        walkers = moved(psi, walkers, key, 3 * options.moves)
        return walkers, jax.vmap(lambda r: local_energy(psi, r))(walkers.positions)

    psi, many = kfac.revert(method.final(model, state)), []
    for i in range(4 if options.toy else 400):
        walkers, energies = look(psi, walkers, jr.fold_in(keys[2], i))
        many.append(np.asarray(energies, np.float64))
    each = np.stack(many)
    # Walkers are independent; a walker at several times is not.
    error = each.mean(axis=0).std() / np.sqrt(each.shape[1])
    energy, spread = float(each.mean()), float(each.std())
    return Run(method.name, seed, *run, energy, float(error), spread)


# %% [markdown]
# ## What came out


# %%
def table(atom: Atom, runs: list[Run]) -> str:
    lines = [
        f"{'method':<12} {'seed':>4} {'energy':>11} {'above exact, mHa':>20} "
        f"{'spread of E_L':>14} {'steps':>6} {'seconds':>8}"
    ]
    for run in runs:
        above = f"{1e3 * (run.energy - atom.exact):.2f} +- {1e3 * run.error:.2f}"
        lines.append(
            f"{run.method:<12} {run.seed:>4} {run.energy:>11.5f} {above:>20} "
            f"{run.spread:>14.4f} {len(run.energies):>6} {run.seconds[-1]:>8.1f}"
        )
    return "\n".join(lines)


def median(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.energy)[len(runs) // 2]


def verdict(ours: list[Run], adams: list[Run]) -> str:
    lower, higher = sorted([ours, adams], key=lambda runs: median(runs).energy)
    low, high, number = median(lower), median(higher), len(ours)
    wins = sum(a.energy < b.energy for a, b in zip(lower, higher, strict=True))
    several = f"medians of {number} seeds, lower with {wins} of them"
    by, error = high.energy - low.energy, np.hypot(low.error, high.error)
    return (
        f"{low.method} has the lower energy, by {1e3 * by:.2f} +- {1e3 * error:.2f} mHa, "
        f"and a spread of "
        f"{low.spread:.3f} Ha against {high.spread:.3f} of {high.method} "
        f"({'one seed' if number == 1 else several})."
    )


COLOURS = ["#d1495b", "#30638e"]


def plot(name: str, methods: list[list[Run]], path: Path) -> None:
    """The median run of either method is thick, those of its other seeds are thin."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes: Any = figure.subplots(1, 2)

    def draw(run, **style):
        above = np.abs(np.asarray(run.energies) - ATOMS[name].exact)
        width = max(1, len(above) // 30)
        smooth = np.convolve(above, np.ones(width) / width, mode="valid")
        axes[0].plot(run.seconds[width - 1 :], smooth, **style)
        axes[1].plot(run.seconds, run.deviations, **style)

    for runs, colour in zip(methods, COLOURS, strict=True):
        thick = median(runs)
        for run in runs:
            if run is not thick:
                draw(run, color=colour, linewidth=0.8, alpha=0.6)
        draw(thick, color=colour, linewidth=1.8, label=thick.method)
    labels = "distance from the exact energy, Ha", "spread of the local energies, Ha"
    for axis, label in zip(axes, labels, strict=True):
        axis.set_yscale("log")
        axis.set_xlim(left=0)
        axis.set_ylabel(label)
        axis.set_xlabel("seconds (without compiling)")
        axis.grid(True, color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(name, loc="left", fontweight="bold")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Variational Monte Carlo of an atom.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--atom", choices=ATOMS, default="helium", help="which")
    add("--steps", type=int, default=300, help="steps of K-FAC")
    add("--batch", type=int, default=512, help="walkers")
    add("--width", type=int, help="of the layers; none: what suits the atom")
    add("--depth", type=int, default=2, help="how many layers")
    add("--moves", type=int, default=10, help="of the walkers, between two steps")
    add("--seed", type=int, default=0, help="of everything, the first")
    add("--seeds", type=int, default=1, help="how many")
    add("--times", type=float, default=1.0, help="Adam's seconds, in K-FAC's")
    add("--out", type=Path, default=Path("runs/helium.png"), help="picture")
    add("--toy", action="store_true", help="small and quick, unless options say else")
    if parser.parse_known_args(argv)[0].toy:
        parser.set_defaults(steps=4, batch=16, width=8)
    options = parser.parse_args(argv)
    if min(options.steps, options.batch, options.seeds) < 1:
        parser.error("--steps, --batch and --seeds must be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    seeds = range(options.seed, options.seed + options.seeds)
    ours = [train(with_kfac(), options, seed) for seed in seeds]
    times = [options.times * run.seconds[-1] for run in ours]
    adams = []
    for rate in (1e-2,) if options.toy else (1e-3, 3e-3, 1e-2):
        each = zip(seeds, times)
        adams.append([train(with_adam(rate), options, *pair) for pair in each])
    adam = min(adams, key=lambda runs: median(runs).energy)
    print(table(ATOMS[options.atom], ours + adam))
    print(verdict(ours, adam))
    plot(options.atom, [ours, adam], options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
