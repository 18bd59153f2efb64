# %% [markdown]
# # Differential equations: K-FAC and Adam
#
# A small network is trained to solve a differential equation: its loss is the residual of
# the equation, at points inside, and the error at the edge. So the loss has derivatives
# of the network in its inputs; taken forward (`jax.jvp`), they are further rows of the
# same weights for K-FAC.
#
# - `poisson`: $-\Delta u = f$ on a square, $u = \sin(\pi x) \sin(\pi y)$.
# - `heat`: $u_t = u_{xx} / \pi^2$ from $\sin(\pi x)$ on, $u = e^{-t} \sin(\pi x)$.
# - `poisson5`: $-\Delta u = f$ on the cube in five dimensions, $u = \sum \cos(\pi x_i)$.
#
# All points are drawn once; every method sees all of them at every step. The error is
# measured on other points. Adam has a cosine to zero, the best of three learning rates,
# and several times the seconds.
#
#     python tests/benchmarks/studies/poisson.py  # some two minutes
#     python tests/benchmarks/studies/poisson.py --equations heat poisson5 --seeds 3
#     python tests/benchmarks/studies/poisson.py --toy  # does everything run?

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
import lineax as lx
import numpy as np
import optax
from harness import make_parser, over_seeds, parsed, save_picture, without_frame
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## The equations
#
# `along(u, v)` is the derivative of `u` along `v`; a second derivative is a `jvp` of a
# `jvp`. (`jax.hessian` would take one of them backward, in which weights act transposed.)
#
# The Laplacian goes through the network layer by layer: its value, its first derivatives,
# and the *sum* of the second ones. So a layer has one row for the Laplacian, and not one
# for each dimension: less work, and the last layer's curvature is exact. (The forward
# Laplacian of R. Li et al., 2023; collapsed Taylor mode, F. Dangel et al., 2025.)


# %%
Points = Float[Array, "points dims"]


class Equation(NamedTuple):
    name: str
    dims: int
    residual: Callable[[Callable, Array], Array]  # (u, x) -> what should be zero
    solution: Callable[[Array], Array]
    is_open: bool = False  # The end of the last axis, time, is no edge.


def along(u: Callable, v: Array) -> Callable:
    return lambda x: jax.jvp(u, (x,), (v,))[1]


def through(part: Callable, at: tuple) -> tuple:
    """Value, first derivatives `[dims, ...]` and Laplacian, of what `part` is given and
    of what it returns."""
    x, slopes, laplacian = at
    y, push = jax.linearize(part, x)
    bent = jax.vmap(lambda v: along(along(part, v), v)(x))(slopes)
    return y, jax.vmap(push)(slopes), push(laplacian) + jnp.sum(bent, axis=0)


def laplacian(network: eqx.nn.MLP, x: Array) -> Array:
    *hidden, last = network.layers
    at = x, jnp.eye(len(x)), jnp.zeros_like(x)
    for part in [p for layer in hidden for p in (layer, jnp.tanh)] + [last]:
        at = through(part, at)
    return at[-1]


def product_of_sines(x: Array) -> Array:
    return jnp.prod(jnp.sin(jnp.pi * x))


def cooling(x: Array) -> Array:
    return jnp.exp(-x[1]) * jnp.sin(jnp.pi * x[0])


def sum_of_cosines(x: Array) -> Array:
    return jnp.sum(jnp.cos(jnp.pi * x))


def heat(u: Callable, x: Array) -> Array:
    e_x, e_t = jnp.eye(2)
    return along(u, e_t)(x) - along(along(u, e_x), e_x)(x) / jnp.pi**2


def poisson(solution: Callable, factor: float) -> Callable:
    """$-\\Delta u = $ `factor` times the solution."""
    return lambda u, x: laplacian(u, x) + factor * solution(x)


EQUATIONS = {
    "poisson": Equation(
        "poisson", 2, poisson(product_of_sines, 2 * np.pi**2), product_of_sines
    ),
    "heat": Equation("heat", 2, heat, cooling, is_open=True),
    "poisson5": Equation(
        "poisson5", 5, poisson(sum_of_cosines, np.pi**2), sum_of_cosines
    ),
}


def on_the_edge(points: Points, key: PRNGKeyArray, is_open: bool) -> Points:
    """Each moved to one of the faces of the cube."""
    number, dims = points.shape
    faces = 2 * dims - is_open  # The last one is the end of time.
    face = jr.permutation(key, jnp.arange(number) % faces)
    moved = face[:, None] // 2 == jnp.arange(dims)
    return jnp.where(moved, (face % 2)[:, None].astype(points.dtype), points)


class Data(NamedTuple):
    inside: Points
    edge: Points
    unseen: Points


def draw_points(equation: Equation, inside: int, edge: int, key: PRNGKeyArray) -> Data:
    keys = jr.split(key, 4)
    uniform = lambda key, n: jr.uniform(key, (n, equation.dims))
    return Data(
        uniform(keys[0], inside),
        on_the_edge(uniform(keys[1], edge), keys[2], equation.is_open),
        uniform(keys[3], 4000),
    )


# %% [markdown]
# ## The loss
#
# Two losses over different numbers of points, of which the edge counts a hundred times.
# `TensorNormal` lets every row count by what it matters for the losses: values and
# derivatives, inside and edge, have different units.


# %%
BLOCK = kfac.Kronecker(kfac.TensorNormal())
EDGE = 100.0


def make_loss(equation: Equation) -> Callable:
    def squared(values):
        return kfac.SquaredError(values, jnp.zeros_like(values))

    def loss_fn(model, inside, edge):
        residual = lambda x: equation.residual(model, x)
        wrong = jax.vmap(model)(edge) - jax.vmap(equation.solution)(edge)
        return squared(jax.vmap(residual)(inside)[:, None]) + EDGE * squared(
            wrong[:, None]
        )

    return loss_fn


def error_of(equation: Equation, model: Callable, x: Points) -> Float[Array, ""]:
    """The distance from the solution, relative to it."""
    want = jax.vmap(equation.solution)(x)
    return jnp.linalg.norm(jax.vmap(model)(x) - want) / jnp.linalg.norm(want)


# %% [markdown]
# ## The methods
#
# K-FAC with its defaults; and with rules for everything, which is what pays on a loss
# that has to fall by many orders of magnitude. Beside them the step that K-FAC
# approximates, by conjugate gradients on the exact Gauss-Newton matrix.


# %%
class Method(NamedTuple):
    name: str
    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]  # (model, state, points, key, part of the run)
    final: Callable[[Any, Any], Any] = lambda model, state: model


def with_kfac(name: str, optimizer: kfac.KFAC, loss_fn: Callable) -> Method:
    def step(model, state, points, key, part):
        del part
        model, state, _ = optimizer.step(loss_fn, model, state, *points, key=key)
        return model, state

    def final(model, state):
        return model if state.averaged_parameters is None else kfac.averaged(model, state)

    return Method(name, optimizer.init, step, final)


def adaptive() -> kfac.KFAC:
    numbers = kfac.QuadraticModel()
    return kfac.KFAC(numbers, numbers, kfac.LevenbergMarquardt(initial=1.0))


def with_adam(rate: float, loss_fn: Callable) -> Method:
    adam = optax.scale_by_adam()

    def init(model):
        return adam.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, points, key, part):
        del key
        grads = eqx.filter_grad(lambda m: loss_fn(m, *points).value)(model)
        updates, state = adam.update(grads, state)
        scale = -rate * 0.5 * (1 + jnp.cos(jnp.pi * part))
        updates = jax.tree.map(lambda u: scale * u, updates)
        return eqx.apply_updates(model, updates), state

    return Method(f"Adam, {rate:g}", init, step)


def with_gauss_newton(loss_fn: Callable) -> Method:
    """The damped step to an accuracy of 1e-4, or after 300 products; the damping falls by
    a third while the loss does, and is four times as much where it would rise."""
    solver = kfac.analysis.ConjugateGradient(rtol=1e-4, max_steps=300)

    def init(model):
        del model
        return jnp.asarray(1.0)

    def step(model, damping, points, key, part):
        del key, part
        value = lambda m: loss_fn(m, *points).value
        before, grads = eqx.filter_value_and_grad(value)(model)
        operator = kfac.analysis.GaussNewtonOperator(loss_fn, model, *points)
        curvature = kfac.curvature(loss_fn, kfac.Exact())(model, *points)
        blocks = kfac.analysis.BlockDiagonalOperator(curvature, model)
        options = dict(preconditioner=blocks.inverse(damping), damping=damping)
        found = lx.linear_solve(operator, grads, solver, options=options, throw=False)
        moved = eqx.apply_updates(model, jax.tree.map(jnp.negative, found.value))
        better = value(moved) < before
        arrays, static = eqx.partition(model, eqx.is_array)
        new = eqx.filter(moved, eqx.is_array)
        arrays = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, arrays)
        return eqx.combine(arrays, static), damping * jnp.where(better, 2 / 3, 4.0)

    return Method("Gauss-Newton, CG", init, step)


# %% [markdown]
# ## Runs


# %%
class Run(NamedTuple):
    method: str
    kind: str  # Adam, at whatever rate.
    seed: int
    steps: list[int]
    seconds: list[float]
    errors: list[float]

    @property
    def last(self) -> float:
        return self.errors[-1] if np.isfinite(self.errors[-1]) else np.inf


def train(
    method: Method,
    equation: Equation,
    model: Any,
    data: Data,
    seed: int,
    steps: int | None,
    seconds: float,
) -> Run:
    """So many `steps`, or as many as fit into `seconds`. Compiling is not counted, nor
    looking at the error."""
    take = eqx.filter_jit(method.step)
    points = data.inside, data.edge
    look = eqx.filter_jit(
        lambda model, state: error_of(equation, method.final(model, state), data.unseen)
    )

    def block(number, model, state, start, total):
        began = time.perf_counter()
        for i in range(start, start + number):
            part, key = jnp.asarray(i / total), jr.fold_in(jr.key(seed), i)
            model, state = take(model, state, points, key, part)
        jax.block_until_ready(model)
        return model, state, time.perf_counter() - began

    state = method.init(model)
    first = block(1, model, state, 0, 2)
    look(*first[:2])
    if steps is None:
        *_, spent = block(30, model, state, 0, 30)
        steps = max(1, int(30 * seconds / spent))
    kind = method.name.split(", 0")[0]
    run = Run(method.name, kind, seed, [0], [0.0], [float(look(model, state))])
    every = max(1, steps // 50)
    name = f"{equation.name}, {method.name}, seed {seed}"
    with tqdm(total=steps, desc=name, unit=" steps", disable=None) as bar:
        for start in range(0, steps, every):
            number = min(every, steps - start)
            model, state, spent = block(number, model, state, start, steps)
            run.steps.append(start + number)
            run.seconds.append(run.seconds[-1] + spent)
            run.errors.append(float(look(model, state)))
            bar.update(number)
    return run


def compete(equation: Equation, options: argparse.Namespace, seed: int) -> list[Run]:
    """All methods from the same model."""
    keys = jr.split(jr.key(seed))
    inside, edge = (40, 12) if options.toy else (900, 120)
    data = draw_points(equation, inside, edge, keys[0])
    network = eqx.nn.MLP(
        equation.dims, "scalar", options.width, 2, activation=jnp.tanh, key=keys[1]
    )
    model, loss_fn = kfac.convert(network, BLOCK), make_loss(equation)

    def run(method, steps, seconds=0.0):
        return train(method, equation, model, data, seed, steps, seconds)

    runs = [
        run(with_kfac("K-FAC, rules", adaptive(), loss_fn), options.steps),
        run(with_kfac("K-FAC", kfac.KFAC(), loss_fn), options.steps),
    ]
    rates = (1e-2,) if options.toy else (1e-3, 3e-3, 1e-2)
    seconds = options.times * max(run.seconds[-1] for run in runs)
    steps = options.steps if options.toy else None
    adams = [run(with_adam(rate, loss_fn), steps, seconds) for rate in rates]
    runs.append(min(adams, key=lambda run: run.last))
    runs.append(run(with_gauss_newton(loss_fn), options.newton_steps))
    return runs


# %% [markdown]
# ## What came out


# %%
def table(results: dict[str, list[Run]]) -> str:
    lines = [
        f"{'equation':<10} {'method':<18} {'seed':>4} {'relative error':>14} "
        f"{'steps':>7} {'seconds':>8}"
    ]
    for name, runs in results.items():
        for run in runs:
            lines.append(
                f"{name:<10} {run.method:<18} {run.seed:>4} {run.last:>14.2e} "
                f"{run.steps[-1]:>7} {run.seconds[-1]:>8.2f}"
            )
    return "\n".join(lines)


def by_kind(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of every method, from the lowest to the highest error."""
    ranked = sorted(runs, key=lambda run: run.last)
    return {kind: [run for run in ranked if run.kind == kind] for kind in COLOURS}


def median(ranked: list[Run]) -> Run:
    return ranked[len(ranked) // 2]


def verdict(name: str, runs: list[Run]) -> str:
    medians = [median(ranked) for ranked in by_kind(runs).values()]
    first, *others = sorted(medians, key=lambda run: run.last)
    seeds = sorted({run.seed for run in runs})
    lowest = [min((r for r in runs if r.seed == i), key=lambda r: r.last) for i in seeds]
    wins = sum(run.kind == first.kind for run in lowest)
    texts = [f"{run.kind} ({run.last:.2e})" for run in others]
    return (
        f"{name}: {first.kind} has the lowest error, {first.last:.2e}, before "
        f"{', '.join(texts)}: {over_seeds(len(seeds), wins)}."
    )


COLOURS = {
    "K-FAC, rules": "#edae49",
    "K-FAC": "#d1495b",
    "Adam": "#30638e",
    "Gauss-Newton, CG": "#00798c",
}


def plot(results: dict[str, list[Run]], path: Path) -> None:
    """The median run of every method is thick, those of its other seeds are thin."""
    number = len(results)
    figure = Figure(figsize=(max(7, 4.5 * number), 4.4), layout="constrained")
    axes = figure.subplots(1, number, squeeze=False)[0]
    for axis, (name, runs) in zip(axes, results.items(), strict=True):
        for kind, ranked in by_kind(runs).items():
            thick, colour = median(ranked), COLOURS[kind]
            axis.plot(thick.seconds, thick.errors, color=colour, linewidth=2.2)
            for run in ranked:
                axis.plot(run.seconds, run.errors, color=colour, linewidth=0.8, alpha=0.6)
        axis.set_xlim(left=0)
        if axis.get_xlim()[1] > 2:
            axis.set_xscale("symlog", linthresh=0.5)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yscale("log")
        axis.set_title(name, loc="left", fontweight="bold")
        axis.set_xlabel("seconds (without compiling)")
        without_frame(axis)
    axes[0].set_ylabel("relative error on unseen points")
    lines = [axes[0].plot([], [], color=c, label=kind)[0] for kind, c in COLOURS.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False)
    save_picture(figure, path)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("K-FAC and Adam on differential equations.", "poisson")
    add = parser.add_argument
    add("--equations", nargs="+", choices=EQUATIONS, default=["poisson"], help="which")
    add("--steps", type=int, default=500, help="steps of K-FAC")
    add("--newton-steps", type=int, default=30, help="exact steps")
    add("--width", type=int, default=32, help="of the two hidden layers")
    add("--times", type=float, default=4.0, help="Adam's seconds, in K-FAC's")
    toy = dict(steps=5, newton_steps=2, width=8)
    options = parsed(parser, argv, ["steps", "newton_steps", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    seeds = range(options.seed, options.seed + options.seeds)
    results = {
        name: [run for i in seeds for run in compete(EQUATIONS[name], options, i)]
        for name in options.equations
    }
    print(table(results))
    for name, runs in results.items():
        print(verdict(name, runs))
    plot(results, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
