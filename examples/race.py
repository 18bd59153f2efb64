# %% [markdown]
# # K-FAC beside tuned Adam and Muon, against the clock
#
# A network solves the equation $-\Delta u = f$ on a square, all points at every step.
# Nothing of K-FAC is tuned. The rates of the others are the best of 1e-3, 3e-3, 1e-2,
# 3e-2 and 1e-1 (`--rates`), and fall along a cosine to zero. The clock is that of the
# processor, all cores, compiling included, while nobody looks at errors. Everyone has one
# and a half times as long as K-FAC takes to compile, on machines of any speed.
#
#     python examples/race.py        # one to three minutes on two CPU cores
#     python examples/race.py --toy  # does everything run?

# %%
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


def with_kfac():
    optimizer = kfac.KFAC.full_batch(fisher=kfac.Exact())
    step = lambda model, state, _: optimizer.step(loss_fn, model, state, inside, edge)
    return optimizer.init, step


def with_optax(optimizer, rate):
    def step(model, state, part):  # `part` of the time is over.
        grads = eqx.filter_grad(lambda u: loss_fn(u, inside, edge).value)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        scale = rate * (1 + jnp.cos(jnp.pi * part)) / 2
        return eqx.apply_updates(model, jax.tree.map(lambda u: scale * u, updates)), state

    return lambda model: optimizer.init(eqx.filter(model, eqx.is_inexact_array)), step


# %%
def solution(x):
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(jnp.pi * x[1])


def loss_fn(u, inside, edge):
    along = lambda u, v: lambda x: jax.jvp(u, (x,), (v,))[1]
    laplacian = lambda x: sum(along(along(u, v), v)(x) for v in jnp.eye(2))
    residual = lambda x: laplacian(x) + 2 * jnp.pi**2 * solution(x)
    squared = lambda v: kfac.SquaredError(v[:, None], jnp.zeros((len(v), 1)))
    return squared(jax.vmap(residual)(inside)) + 100 * squared(jax.vmap(u)(edge))


@eqx.filter_jit
def errors_of(model):
    """On a grid; and their norm, relative to that of the solution."""
    want = jax.vmap(jax.vmap(solution))(grid)
    errors = jax.vmap(jax.vmap(model))(grid) - want
    return jnp.abs(errors), jnp.linalg.norm(errors) / jnp.linalg.norm(want)


rng, i = np.random.default_rng(0), np.arange(120)
inside, edge = (rng.uniform(size=(n, 2)).astype(np.float32) for n in (900, 120))
edge[i, i % 2] = i // 2 % 2
grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 61, dtype=np.float32)] * 2), axis=-1)


def race(name, init, step, seed, end):
    """`(seconds, errors)` of two seeds, and the last errors on the grid; `end` is in
    seconds, or 1.5 times as long as the first one takes to compile."""
    step, curves, maps, compiling = eqx.filter_jit(step), [], [], 0.0
    for seed in tqdm((seed, seed + 1), desc=name, unit=" seeds", disable=None):
        mlp = eqx.nn.MLP(2, "scalar", 32, 2, jnp.tanh, key=jax.random.key(seed))
        model = kfac.convert(mlp, blocks=kfac.Kronecker(kfac.TensorNormal()))
        began = time.process_time()
        state = init(model)
        jax.block_until_ready(step(model, state, jnp.asarray(0.0)))
        compiling = compiling or time.process_time() - began
        curve = [(compiling, float(errors_of(model)[1]))]
        end = max(min(end, 1.5 * compiling), compiling + 0.1) if name == "K-FAC" else end
        while curve[-1][0] < end:
            part = jnp.asarray((curve[-1][0] - compiling) / (end - compiling))
            began = time.process_time()
            for _ in range(10):
                model, state, *_ = step(model, state, part)
            jax.block_until_ready(model)
            spent = curve[-1][0] + time.process_time() - began
            curve.append((spent, float(errors_of(model)[1])))
        curves.append(np.array(curve).T)
        maps.append(errors_of(model)[0])
    return (curves, maps), end


def draw(runs, path):
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, *maps = figure.subplots(1, 4, width_ratios=[2, 1, 1, 1])
    colours = "#d1495b", "#30638e", "#edae49"
    for (name, (curves, errors)), axis, colour in zip(runs.items(), maps, colours):
        ends = max(t[0] for t, _ in curves), min(t[-1] for t, _ in curves)
        times = np.linspace(*ends, 200)
        each = np.exp([np.interp(times, t, np.log(e)) for t, e in curves])
        left.fill_between(times, each.min(0), each.max(0), color=colour, alpha=0.2, lw=0)
        left.plot(times, np.median(each, 0), color=colour, lw=2, label=name)
        left.plot([0, ends[0]], 2 * [each[0, 0]], color=colour, ls=":")  # It compiles.
        clipped = np.maximum(errors[0], 1e-6)
        axis.imshow(clipped, cmap="magma", norm="log", vmin=1e-6, vmax=1e-2)
        axis.set_title(name, color=colour, fontweight="bold")
        axis.set(xticks=[], yticks=[])
    left.set(yscale="log", xlabel="processor seconds, with compiling", xlim=(0, None))
    left.set_ylabel("relative error")
    left.grid(color="0.92")
    left.legend(frameon=False)
    figure.colorbar(maps[0].images[0], ax=maps, label="error at the end", shrink=0.7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=np.inf, help="of each run, at most")
    add("--rates", type=float, nargs=2, default=[3e-2, 3e-2], help="of Adam, of Muon")
    add("--seed", type=int, default=0, help="of the network, the first of two")
    add("--out", type=Path, default=Path("runs/race.png"), help="picture")
    add("--toy", action="store_true", help="a few steps, to see whether everything runs")
    options = parser.parse_args()
    adam, muon = options.rates
    runs, end = {}, 0.1 if options.toy else options.seconds
    for name, method in {
        "K-FAC": with_kfac(),
        f"Adam, {adam:g}": with_optax(optax.adam(1.0), adam),
        f"Muon, {muon:g}": with_optax(optax.contrib.muon(1.0), muon),
    }.items():
        runs[name], end = race(name, *method, seed=options.seed, end=end)
    print(f"{'method':<12} {'compiling s':>12} {'seconds':>8}  relative errors")
    for name, (curves, _) in runs.items():
        last = "  ".join(f"{errors[-1]:.2e}" for _, errors in curves)
        print(f"{name:<12} {curves[0][0][0]:>12.1f} {curves[0][0][-1]:>8.1f}  {last}")
    draw(runs, options.out)
    print(f"Picture: {options.out}")
