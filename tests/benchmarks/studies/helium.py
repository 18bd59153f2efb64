# %% [markdown]
# # Atoms: variational Monte Carlo with K-FAC and Adam
#
# A small neural network is the wavefunction of an atom; walkers are drawn from its square
# by Metropolis' algorithm, and the mean of their local energies is lowered. The loss is
# `kfac.Energy`: gradient and curvature of $\log \lvert \psi \rvert$ from one pass. K-FAC
# is `KFAC.vmc()`, Adam has the best of three rates, which fall along a cosine to zero.
#
#     python tests/benchmarks/studies/helium.py  # some minutes on one CPU core
#     python tests/benchmarks/studies/helium.py --atom beryllium --steps 600
#     python tests/benchmarks/studies/helium.py --toy  # does everything run?

# %%
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from harness import make_parser, over_seeds, parsed, save_picture, without_frame
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


def loss_fn(psi, r, energies):
    return kfac.Energy(jax.vmap(psi)(r), energies)


def with_kfac():
    optimizer = kfac.KFAC.vmc()

    def step(psi, state, r, energies, key, part):
        psi, state, _ = optimizer.step(loss_fn, psi, state, r, energies, key=key)
        return psi, state

    return "K-FAC", optimizer.init, step, kfac.averaged


def with_adam(rate):
    adam = optax.scale_by_adam()

    def step(psi, state, r, energies, key, part):  # `part` of the run is over.
        grads = eqx.filter_grad(lambda psi: loss_fn(psi, r, energies).value)(psi)
        updates, state = adam.update(grads, state)
        scale = -rate * (1 + jnp.cos(jnp.pi * part)) / 2
        return eqx.apply_updates(psi, jax.tree.map(lambda u: scale * u, updates)), state

    init = lambda psi: adam.init(eqx.filter(psi, eqx.is_inexact_array))
    return f"Adam, {rate:g}", init, step, lambda psi, _: psi


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
class Atom(NamedTuple):
    charge: int
    up: int  # How many electrons have this spin, and how many there are.
    electrons: int
    exact: float  # The energy in Hartree, of a fixed nucleus, without relativity.
    width: int  # Of the layers.


ATOMS = {
    "helium": Atom(2, 1, 2, -2.903724, 64),
    "beryllium": Atom(4, 2, 4, -14.66736, 32),
}


class Wavefunction(eqx.Module):
    layers: list[eqx.nn.Linear]
    orbitals: eqx.nn.Linear
    envelopes: kfac.Parameter  # How fast every orbital falls off.
    widths: kfac.Parameter  # Of the cusps: parallel spins, others, the nucleus.
    atom: Atom = eqx.field(static=True)

    def __init__(self, atom, width, key):
        keys = jr.split(key, 3)
        self.layers = [
            eqx.nn.Linear(3 * old + 8, width, key=key)  # 8: means of vectors, lengths.
            for old, key in zip((4, width), keys[1:], strict=True)
        ]
        self.orbitals = eqx.nn.Linear(width, atom.up, key=keys[0])
        self.envelopes = kfac.Parameter(jnp.ones(atom.up))
        self.widths = kfac.Parameter(jnp.ones(3))
        self.atom = atom

    def __call__(self, r):
        r"""$\log \lvert \psi \rvert$ of electrons at `r`, `[electrons, 3]`."""
        up, one = self.atom.up, jnp.eye(len(r))
        away, apart = length(r), r[:, None] - r[None]
        distance = length(apart + one[..., None]) * (1 - one)
        pair = jnp.concatenate([apart, smooth(distance)[..., None]], axis=-1)
        pairs = [jnp.mean(pair[:, :up], axis=1), jnp.mean(pair[:, up:], axis=1)]
        h = jnp.concatenate([r, smooth(away)[:, None]], axis=-1)
        for layer in self.layers:
            means = [jnp.broadcast_to(jnp.mean(m, 0), h.shape) for m in (h[:up], h[up:])]
            new = jnp.tanh(jax.vmap(layer)(jnp.concatenate([h, *means, *pairs], axis=-1)))
            h = new + h if new.shape == h.shape else new
        decay = jax.nn.softplus(self.envelopes(r))
        orbitals = jax.vmap(self.orbitals)(h) * jnp.exp(-smooth(away)[:, None] * decay)
        determinants = jnp.linalg.slogdet(orbitals.reshape(2, up, up))[1]
        return jnp.sum(determinants) + self.cusps(r, away, distance)

    def cusps(self, r, away, distance):
        spin, widths = jnp.arange(len(r)) < self.atom.up, jax.nn.softplus(self.widths(r))
        parallel = spin[:, None] == spin[None, :]
        slope = jnp.where(parallel, 0.25, 0.5)
        width = jnp.where(parallel, widths[0], widths[1])
        pairs = jnp.triu(slope * distance / (1 + width * distance), 1)
        return jnp.sum(pairs) - jnp.sum(self.atom.charge * away / (1 + widths[2] * away))


def length(a):
    return jnp.sqrt(jnp.sum(a**2, axis=-1))


def smooth(length):  # Far away the same, and without the cusp at zero.
    return length**2 / (1 + length)


# %% [markdown]
# ## Local energies and walkers
#
# $E_L = -\frac12 \sum_i (\partial_i^2 \log \psi + (\partial_i \log \psi)^2) + V$, forward
# over forward. All electrons move at a time; about half of the moves are accepted.


# %%
def local_energy(psi, r):
    def along(v):
        first = lambda x: jax.jvp(lambda x: psi(x.reshape(r.shape)), (x,), (v,))[1]
        slope, curved = jax.jvp(first, (r.reshape(-1),), (v,))
        return curved + slope**2

    kinetic = -0.5 * jnp.sum(jax.vmap(along)(jnp.eye(r.size)))
    i, j = np.triu_indices(len(r), 1)
    attraction = -psi.atom.charge * jnp.sum(1 / length(r))
    return kinetic + attraction + jnp.sum(1 / length(r[i] - r[j]))


class Walkers(NamedTuple):
    positions: Any  # [walkers, electrons, 3]
    width: Any  # Of the moves.


def moved(psi, walkers, key, moves):
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


def walked(psi, walkers, key, moves=10):
    walkers = moved(psi, walkers, key, moves)
    return walkers, jax.vmap(lambda r: local_energy(psi, r))(walkers.positions)


# %% [markdown]
# ## Training
#
# A step moves the walkers, computes their local energies, and changes the parameters:
# so many steps, or as many as fit into `seconds`, those of the processor. Compiling is
# not counted. At the end, the energy is measured on many more walkers. That costs more
# than the training, so of Adam's rates, only the best one's is measured: the one whose
# energies are lowest in the last quarter of the steps, where its rate is small.


# %%
class Run(NamedTuple):
    method: str
    seed: int
    steps: Any  # Of each: seconds so far, mean and spread of the local energies.
    psi: Wavefunction  # To be measured,
    walkers: Walkers  # on these.
    energy: float = np.nan
    error: float = np.nan  # Walkers are independent; a walker at several times is not.
    spread: float = np.nan

    @property
    def late(self):
        """The energy in the last quarter of the steps."""
        return float(np.mean(self.steps[-len(self.steps) // 4 :, 1]))


@eqx.filter_jit
def walk(psi, *args):
    return walked(psi, *args)


def train(method, options, seed, seconds=None):
    name, init, change, final = method
    atom, keys = ATOMS[options.atom], jr.split(jr.key(seed), 4)
    wave = Wavefunction(atom, options.width or atom.width, keys[0])
    start = jr.normal(keys[1], (options.batch, atom.electrons, 3))
    walkers, _ = walk(wave, Walkers(start, jnp.asarray(0.3)), keys[2], 200)
    model = kfac.convert(wave, kfac.TNT())

    @eqx.filter_jit
    def step(model, state, walkers, key, part):
        moving, sampling = jr.split(key)
        walkers, energies = walked(kfac.revert(model), walkers, moving)
        given = walkers.positions, energies, sampling, part
        model, state = change(model, state, *given)
        return model, state, walkers, jnp.mean(energies), jnp.std(energies)

    state, steps, total = init(model), [], 0.0
    zero = jnp.asarray(0.0, float)  # Not a weak type: compiled for this step alone.
    jax.block_until_ready(step(model, state, walkers, keys[3], zero))
    with tqdm(desc=f"{name}, seed {seed}", unit=" steps", disable=None) as bar:
        while (part := total / seconds if seconds else len(steps) / options.steps) < 1:
            key, begun = jr.fold_in(keys[3], len(steps)), time.process_time()
            model, state, walkers, *found = step(
                model, state, walkers, key, jnp.asarray(part, float)
            )
            found = [float(a) for a in found]
            total += time.process_time() - begun
            steps.append((total, *found))
            bar.update()
    psi = kfac.revert(final(model, state))
    return Run(name, seed, np.asarray(steps), psi, walkers)


def measured(run, options):
    walkers, many, key = run.walkers, [], jr.split(jr.key(run.seed), 5)[4]
    for i in range(4 if options.toy else 400):
        walkers, energies = walk(run.psi, walkers, jr.fold_in(key, i))
        many.append(np.asarray(energies, np.float64))
    each = np.stack(many)
    error = float(each.mean(axis=0).std() / np.sqrt(each.shape[1]))
    return run._replace(energy=each.mean(), error=error, spread=each.std())


def median(runs, energy=lambda run: run.energy):
    return sorted(runs, key=energy)[len(runs) // 2]


# %% [markdown]
# ## What came out


# %%
def table(atom, runs):
    lines = [
        f"{'method':<12} {'seed':>4} {'energy':>11} {'above exact, mHa':>20} "
        f"{'spread of E_L':>14} {'steps':>6} {'seconds':>8}"
    ]
    for run in runs:
        above = f"{1e3 * (run.energy - atom.exact):.2f} +- {1e3 * run.error:.2f}"
        lines.append(
            f"{run.method:<12} {run.seed:>4} {run.energy:>11.5f} {above:>20} "
            f"{run.spread:>14.4f} {len(run.steps):>6} {run.steps[-1, 0]:>8.1f}"
        )
    return "\n".join(lines)


def verdict(methods):
    lower, higher = sorted(methods, key=lambda runs: median(runs).energy)
    low, high, number = median(lower), median(higher), len(lower)
    wins = sum(a.energy < b.energy for a, b in zip(lower, higher, strict=True))
    by, error = 1e3 * (high.energy - low.energy), 1e3 * np.hypot(low.error, high.error)
    return (
        f"{low.method} has the lower energy, by {by:.2f} +- {error:.2f} mHa "
        f"({over_seeds(number, wins, best='lower')})."
    )


def plot(name, methods, path):
    """The median run of either method is thick, those of its other seeds are thin."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    both = figure.subplots(1, 2)
    for runs, colour in zip(methods, ["#d1495b", "#30638e"], strict=True):
        for run in runs:
            seconds, energies, spreads = run.steps.T
            width = max(1, len(seconds) // 30)
            mean = np.convolve(energies, np.ones(width) / width, mode="valid")
            thick = run is median(runs)
            style = dict(color=colour, linewidth=1.8 if thick else 0.6)
            style |= dict(label=run.method) if thick else {}
            both[0].plot(seconds[width - 1 :], abs(mean - ATOMS[name].exact), **style)
            both[1].plot(seconds, spreads, **style)
    what = f"{name}: distance from the exact energy, Ha", "spread of local energies, Ha"
    for axes, title in zip(both, what, strict=True):
        axes.set(yscale="log", xlabel="seconds, without compiling", title=title)
        without_frame(axes)
    both[1].legend(frameon=False)
    save_picture(figure, path)


# %%
def parse(argv=None):
    parser = make_parser("Variational Monte Carlo of an atom.", "helium")
    add = parser.add_argument
    add("--atom", choices=ATOMS, default="helium", help="which")
    add("--steps", type=int, default=300, help="steps of K-FAC; Adam has its seconds")
    add("--batch", type=int, default=512, help="walkers")
    add("--width", type=int, help="of the layers; none: what suits the atom")
    add("--rates", type=float, nargs="*", default=[1e-3, 3e-3, 1e-2], help="of Adam")
    toy = dict(steps=4, batch=16, width=8, rates=[1e-2])
    return parsed(parser, argv, ["steps", "batch", "seeds"], toy)


def main(argv=None):
    options = parse(argv)
    seeds = range(options.seed, options.seed + options.seeds)
    ours = [train(with_kfac(), options, seed) for seed in seeds]
    adams = [
        [
            train(with_adam(rate), options, s, run.steps[-1, 0])
            for s, run in zip(seeds, ours)
        ]
        for rate in options.rates
    ]
    late = lambda run: run.late
    best = min(adams, key=lambda runs: median(runs, late).late)
    methods = [[measured(run, options) for run in runs] for runs in (ours, best)]
    print(table(ATOMS[options.atom], sum(methods, [])))
    print(verdict(methods))
    for runs in adams:
        print(
            f"{runs[0].method}, late in the training:", *[f"{r.late:.4f}" for r in runs]
        )
    plot(options.atom, methods, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
