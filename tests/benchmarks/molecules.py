"""Variational Monte Carlo of atoms and a molecule: `KFAC.vmc()` beside the settings that
the FermiNet has for kfac-jax, here with the same optimizer, `KFAC()`, and Adam at the
best of two rates. All take the same number of steps, from the same walkers.

    python tests/benchmarks/molecules.py --seeds 2
    python tests/benchmarks/molecules.py --molecules LiH --steps 2000
    python tests/benchmarks/molecules.py --toy        # does everything run?

In the table: by how much the energy is above the exact one, in mHa, with the standard
error over independent walkers; and the processor seconds of the steps.
"""

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
from problems import study

import eqx_kfac as kfac


helium = study("helium")


class Molecule(NamedTuple):
    """Fixed nuclei. Energies in Hartree, lengths in Bohr radii."""

    charges: tuple[int, ...]
    places: tuple[tuple[float, float, float], ...]
    up: int  # How many electrons have either spin.
    down: int
    exact: float

    @property
    def electrons(self) -> int:
        return self.up + self.down


ORIGIN = (0.0, 0.0, 0.0)
MOLECULES = {
    "He": Molecule((2,), (ORIGIN,), 1, 1, -2.903724),
    "Be": Molecule((4,), (ORIGIN,), 2, 2, -14.66736),
    "LiH": Molecule((3, 1), (ORIGIN, (3.015, 0.0, 0.0)), 2, 2, -8.07055),
}


def length(a: Any) -> Any:
    return jnp.sqrt(jnp.sum(a**2, axis=-1))


def smooth(length: Any) -> Any:
    return length**2 / (1 + length)


class Wavefunction(eqx.Module):
    """The wavefunction of `studies/helium.py`, with several nuclei."""

    layers: list[eqx.nn.Linear]
    orbitals: eqx.nn.Linear
    envelopes: kfac.Parameter
    widths: kfac.Parameter
    molecule: Molecule = eqx.field(static=True)

    def __init__(self, molecule: Molecule, width: int, key: Any):
        keys = jr.split(key, 3)
        nuclei, orbitals = len(molecule.charges), max(molecule.up, molecule.down)
        sizes = [4 * nuclei, width, width]
        self.layers = [
            eqx.nn.Linear(3 * old + 8, new, key=key)
            for old, new, key in zip(sizes[:-1], sizes[1:], keys[1:], strict=True)
        ]
        self.orbitals = eqx.nn.Linear(width, orbitals, key=keys[0])
        self.envelopes = kfac.Parameter(jnp.ones((nuclei, orbitals)))
        self.widths = kfac.Parameter(jnp.ones(2 + nuclei))
        self.molecule = molecule

    def __call__(self, r: Any) -> Any:
        r"""$\log \lvert \psi \rvert$"""
        up = self.molecule.up
        from_nuclei = r[:, None] - jnp.asarray(self.molecule.places)[None]
        away, apart = length(from_nuclei), r[:, None] - r[None]
        one = jnp.eye(len(r))
        distance = length(apart + one[..., None]) * (1 - one)
        pair = jnp.concatenate([apart, smooth(distance)[..., None]], axis=-1)
        pairs = [jnp.mean(pair[:, :up], axis=1), jnp.mean(pair[:, up:], axis=1)]
        h = jnp.concatenate([from_nuclei, smooth(away)[..., None]], axis=-1)
        h = h.reshape(len(r), -1)
        for layer in self.layers:
            means = [jnp.broadcast_to(jnp.mean(m, 0), h.shape) for m in (h[:up], h[up:])]
            new = jnp.tanh(jax.vmap(layer)(jnp.concatenate([h, *means, *pairs], -1)))
            h = new + h if new.shape == h.shape else new
        decay = jax.nn.softplus(self.envelopes(r))
        envelopes = jnp.sum(jnp.exp(-smooth(away)[..., None] * decay), axis=1)
        orbitals = jax.vmap(self.orbitals)(h) * envelopes
        determinants = [
            jnp.linalg.slogdet(own[:, : own.shape[0]])[1]
            for own in (orbitals[:up], orbitals[up:])
        ]
        return sum(determinants, self._cusps(r, away, distance))

    def _cusps(self, r: Any, away: Any, distance: Any) -> Any:
        spin = jnp.arange(len(r)) < self.molecule.up
        parallel = spin[:, None] == spin[None, :]
        widths = jax.nn.softplus(self.widths(r))
        slope = jnp.where(parallel, 0.25, 0.5)
        width = jnp.where(parallel, widths[0], widths[1])
        pairs = jnp.triu(slope * distance / (1 + width * distance), 1)
        charges = jnp.asarray(self.molecule.charges)
        return jnp.sum(pairs) - jnp.sum(charges * away / (1 + widths[2:] * away))


def local_energy(psi: Any, r: Any) -> Any:
    places = np.asarray(psi.molecule.places)
    charges, flat = np.asarray(psi.molecule.charges), r.reshape(-1)

    def along(v):
        first = lambda x: jax.jvp(lambda x: psi(x.reshape(-1, 3)), (x,), (v,))[1]
        slope, curved = jax.jvp(first, (flat,), (v,))
        return curved + slope**2

    def repulsion(charges, places):
        i, j = np.triu_indices(len(charges), 1)
        return jnp.sum(charges[i] * charges[j] / length(places[i] - places[j]))

    kinetic = -0.5 * jnp.sum(jax.vmap(along)(jnp.eye(flat.size)))
    attraction = -jnp.sum(charges / length(r[:, None] - places[None]))
    electrons = repulsion(np.ones(len(r)), r)
    nuclei = repulsion(charges, places) if len(charges) > 1 else 0.0
    return kinetic + attraction + electrons + nuclei


# Optimizers.


class Method(NamedTuple):
    block: kfac.AbstractBlock | None  # None: without tags.
    init: Callable
    step: Callable  # (model, state, positions, energies, key, part) -> (model, state)
    final: Callable = lambda model, state: model


def with_kfac(block: kfac.AbstractBlock, optimizer: kfac.KFAC) -> Method:
    def step(model, state, r, energies, key, part):
        del part
        args = r, energies
        model, state, _ = optimizer.step(helium.loss_fn, model, state, *args, key=key)
        return model, state

    final = (lambda model, _: model) if optimizer.averaging is None else kfac.averaged
    return Method(block, optimizer.init, step, final)


def with_adam(rate: float) -> Method:
    """Adam, whose rate falls to zero as a cosine."""
    adam = optax.scale_by_adam()

    def step(model, state, r, energies, key, part):
        del key
        loss_fn = lambda m: helium.loss_fn(m, r, energies).value
        updates, state = adam.update(eqx.filter_grad(loss_fn)(model), state)
        scale = -rate * 0.5 * (1 + jnp.cos(jnp.pi * part))
        updates = jax.tree.map(lambda u: scale * u, updates)
        return eqx.apply_updates(model, updates), state

    init = lambda model: adam.init(eqx.filter(model, eqx.is_inexact_array))
    return Method(None, init, step)


def ferminet() -> kfac.KFAC:
    """The settings of D. Pfau et al. (2020), in the units of `kfac.Energy`."""
    return kfac.KFAC(
        lambda step: 0.05 / (1 + step / 10_000),
        momentum=0.0,
        damping=2e-3,
        fisher=kfac.Exact(),
        norm_constraint=2e-3,
        averaging=None,
        curvature_period=1,
        inverse_period=1,
    )


METHODS: dict[str, list[Callable[[], Method]]] = {
    "`KFAC.vmc()`": [lambda: with_kfac(kfac.TNT(), kfac.KFAC.vmc())],
    "FermiNet's settings": [lambda: with_kfac(kfac.Kronecker(kfac.Expand()), ferminet())],
    "`KFAC()`": [lambda: with_kfac(kfac.TNT(), kfac.KFAC(fisher=kfac.Centred()))],
    "Adam": [lambda: with_adam(3e-3), lambda: with_adam(1e-2)],
}


class Found(NamedTuple):
    above: float  # The exact energy, in mHa.
    error: float
    seconds: float


def train(
    molecule: Molecule, method: Method, options: argparse.Namespace, seed: int
) -> Found:
    keys = jr.split(jr.key(seed), 4)
    model = Wavefunction(molecule, options.width, keys[0])
    if method.block is not None:
        model = kfac.convert(model, method.block)
    own = np.arange(molecule.electrons) % len(molecule.charges)
    start = jr.normal(keys[1], (options.walkers, molecule.electrons, 3))
    start = start + np.asarray(molecule.places)[own]
    walkers = helium.Walkers(start, jnp.asarray(0.3))
    warm_up = eqx.filter_jit(lambda m, w, k: helium.moved(kfac.revert(m), w, k, 200))
    walkers = warm_up(model, walkers, keys[2])

    @eqx.filter_jit
    def step(model, state, walkers, key, part):
        moving, sampling = jr.split(key)
        psi = kfac.revert(model)
        walkers = helium.moved(psi, walkers, moving, 10)
        energies = jax.vmap(lambda r: local_energy(psi, r))(walkers.positions)
        given = walkers.positions, energies, sampling, part
        return *method.step(model, state, *given), walkers

    state, seconds = method.init(model), 0.0
    for i in range(options.steps):
        begun = time.process_time()
        key, part = jr.fold_in(keys[3], i), jnp.asarray(i / options.steps)
        model, state, walkers = step(model, state, walkers, key, part)
        jax.block_until_ready(walkers)
        seconds += (time.process_time() - begun) * (i > 0)  # Compiled in the first.
    psi = kfac.revert(method.final(model, state))

    @eqx.filter_jit
    def look(walkers, key):
        walkers = helium.moved(psi, walkers, key, 20)
        return walkers, jax.vmap(lambda r: local_energy(psi, r))(walkers.positions)

    many = []
    for i in range(2 if options.toy else 150):
        walkers, energies = look(walkers, jr.fold_in(keys[2], i))
        many.append(np.asarray(energies, np.float64))
    each = np.stack(many)
    error = each.mean(axis=0).std() / np.sqrt(each.shape[1])
    return Found(1e3 * float(each.mean() - molecule.exact), 1e3 * float(error), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--molecules", nargs="*", default=list(MOLECULES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--walkers", type=int, default=256)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.walkers, options.width, options.seeds = 3, 16, 8, 1
    lines = [f"| molecule | {' | '.join(options.methods)} |"]
    lines.append("|---" * (1 + len(options.methods)) + "|")
    for name in options.molecules:
        cells = []
        for makes in (METHODS[method] for method in options.methods):
            runs = [
                [train(MOLECULES[name], make(), options, s) for s in range(options.seeds)]
                for make in makes
            ]
            best = min(runs, key=lambda found: sum(run.above for run in found))
            shown = [f"{run.above:.1f} ± {run.error:.1f}" for run in best]
            cells.append(f"{', '.join(shown)} ({best[0].seconds:.0f} s)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
