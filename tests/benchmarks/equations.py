"""Differential equations: `KFAC.full_batch()`, with nothing tuned, beside the rules of
the K-FAC paper, `KFAC()`, L-BFGS, and Adam at three rates, in the same seconds.

    python tests/benchmarks/equations.py --seconds 8 --seeds 2
    python tests/benchmarks/equations.py --equations burgers --out equations.md
    python tests/benchmarks/equations.py --toy          # does everything run?

What counts is the error at other points, relative to the solution (of the inverse
problem: that of the unknown coefficient). Seconds are those of the processor in steps, so
that other work on the machine matters little; compiling is not counted, nor looking at
errors.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from jax.flatten_util import ravel_pytree

import eqx_kfac as kfac


# Equations.

PI = np.pi
X, Y = np.eye(2)


class Problem(NamedTuple):
    """Points, and how far a model is from fitting them."""

    dims: int
    outputs: int | str
    loss: Callable  # (model, *points) -> loss
    points: tuple
    error: Callable  # (model) -> number
    unknown: bool = False  # The model has a coefficient of the equation, too.


def along(u: Callable, v: Any) -> Callable:
    return lambda x: jax.jvp(u, (x,), (jnp.asarray(v, x.dtype),))[1]


def twice(u: Callable, v: Any) -> Callable:
    return along(along(u, v), v)


def laplacian(u: Callable, x: Any) -> Any:
    return sum(twice(u, v)(x) for v in np.eye(len(x)))


def squared(values: Any) -> kfac.SquaredError:
    values = values.reshape(len(values), -1)
    return kfac.SquaredError(values, jnp.zeros_like(values))


def inside(rng: np.random.Generator, number: int, low: Any, high: Any) -> np.ndarray:
    x = rng.uniform(low, high, size=(number, len(low)))
    return x.astype(np.float32)


def edge(rng: np.random.Generator, number: int, low: Any, high: Any, faces: int) -> Any:
    """Points on the first `faces` of the faces of a box."""
    x, face = inside(rng, number, low, high), np.arange(number) % faces
    axis = face // 2
    x[np.arange(number), axis] = np.where(
        face % 2, np.take(high, axis), np.take(low, axis)
    )
    return x


def residual_and_edge(
    rng: np.random.Generator,
    residual: Callable,
    solution: Callable,
    box: tuple,
    numbers: tuple[int, int],
    weight: float,
    outputs: int | str = "scalar",
    is_open: bool = False,
) -> Problem:
    """The residual inside, and the solution on the edge."""
    points = (
        inside(rng, numbers[0], *box),
        edge(rng, numbers[1], *box, 2 * len(box[0]) - is_open),
    )
    other = inside(rng, 4000, *box)
    want = jax.vmap(solution)(other)

    def loss(u, x, at):
        values = jax.vmap(u)(at) - jax.vmap(solution)(at)
        return squared(jax.vmap(lambda x: residual(u, x))(x)) + weight * squared(values)

    def error(u):
        return jnp.linalg.norm(jax.vmap(u)(other) - want) / jnp.linalg.norm(want)

    return Problem(len(box[0]), outputs, loss, points, error)


def poisson(rng: np.random.Generator) -> Problem:
    solution = lambda x: jnp.sin(PI * x[0]) * jnp.sin(PI * x[1])
    residual = lambda u, x: laplacian(u, x) + 2 * PI**2 * solution(x)
    return residual_and_edge(rng, residual, solution, ([0, 0], [1, 1]), (900, 120), 100.0)


def poisson5(rng: np.random.Generator) -> Problem:
    solution = lambda x: jnp.sum(jnp.cos(PI * x))
    residual = lambda u, x: laplacian(u, x) + PI**2 * solution(x)
    box = [0] * 5, [1] * 5
    return residual_and_edge(rng, residual, solution, box, (900, 300), 100.0)


def helmholtz(rng: np.random.Generator) -> Problem:
    solution = lambda x: jnp.sin(PI * x[0]) * jnp.sin(4 * PI * x[1])
    residual = lambda u, x: laplacian(u, x) + u(x) - (1 - 17 * PI**2) * solution(x)
    box = [-1, -1], [1, 1]
    return residual_and_edge(rng, residual, solution, box, (1000, 200), 10.0)


def allen_cahn(rng: np.random.Generator) -> Problem:
    """Allen and Cahn's equation, with a right-hand side made for a known solution."""

    def solution(x):
        wave = 0.3 * jnp.sin(3 * PI * x[0]) * x[1]
        return x[0] ** 2 * jnp.cos(PI * x[0]) * jnp.exp(-x[1]) + wave

    def operator(u, x):
        return along(u, Y)(x) - 1e-2 * twice(u, X)(x) + 5 * (u(x) ** 3 - u(x))

    residual = lambda u, x: operator(u, x) - operator(solution, x)
    box, numbers = ([-1, 0], [1, 1]), (1500, 300)
    return residual_and_edge(rng, residual, solution, box, numbers, 100.0, is_open=True)


def kovasznay(rng: np.random.Generator) -> Problem:
    """A flow behind a grid, at a Reynolds number of 40: two velocities and a pressure."""
    reynolds = 40.0
    rate = reynolds / 2 - np.sqrt(reynolds**2 / 4 + 4 * PI**2)

    def solution(x):
        decay = jnp.exp(rate * x[0])
        u = 1 - decay * jnp.cos(2 * PI * x[1])
        v = rate / (2 * PI) * decay * jnp.sin(2 * PI * x[1])
        return jnp.stack([u, v, (1 - decay**2) / 2])

    def residual(u, x):
        (v, w, _), dx, dy = u(x), along(u, X)(x), along(u, Y)(x)
        viscous = (twice(u, X)(x) + twice(u, Y)(x)) / reynolds
        momentum = v * dx[:2] + w * dy[:2] + jnp.stack([dx[2], dy[2]]) - viscous[:2]
        return jnp.append(momentum, dx[0] + dy[1])

    box, numbers = ([-0.5, -0.5], [1, 1.5]), (1000, 200)
    return residual_and_edge(rng, residual, solution, box, numbers, 10.0, outputs=3)


def burgers(rng: np.random.Generator) -> Problem:
    """A shock from a sine; the solution is an integral (E. Hopf, 1950; J. Cole, 1951)."""
    viscosity = 0.01 / PI
    box = [-1, 0], [1, 1]
    start = inside(rng, 100, *box) * [1, 0]
    ends = edge(rng, 100, *box, 2)
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    other = inside(rng, 2000, [-1, 0.02], [1, 1]).astype(float)
    y = other[:, :1] - np.sqrt(4 * viscosity * other[:, 1:]) * nodes
    exponent = np.cos(PI * other[:, :1]) - np.cos(PI * y)
    mass = weights * np.exp(exponent / (2 * PI * viscosity))
    want = jnp.asarray(-np.sum(np.sin(PI * y) * mass, 1) / np.sum(mass, 1), float)
    other = jnp.asarray(other, float)

    def loss(u, x, start, ends):
        slope = lambda x: along(u, Y)(x) + u(x) * along(u, X)(x)
        residual = lambda x: slope(x) - viscosity * twice(u, X)(x)
        wrong = jax.vmap(u)(start) + jnp.sin(PI * start[:, 0])
        outside = 10.0 * squared(wrong) + 10.0 * squared(jax.vmap(u)(ends))
        return squared(jax.vmap(residual)(x)) + outside

    def error(u):
        return jnp.linalg.norm(jax.vmap(u)(other) - want) / jnp.linalg.norm(want)

    points = inside(rng, 2000, *box), start.astype(np.float32), ends
    return Problem(2, "scalar", loss, points, error)


class WithUnknown(eqx.Module):
    """A network, and a coefficient that is to be found."""

    network: eqx.nn.MLP
    coefficient: kfac.Parameter


def inverse(rng: np.random.Generator) -> Problem:
    r"""$-c \Delta u = f$, of which $u$ is seen at a hundred points, and $c$ is sought."""
    box, true = ([0, 0], [1, 1]), 3.0
    solution = lambda x: jnp.sin(PI * x[0]) * jnp.sin(2 * PI * x[1])
    found = lambda m, x: jax.nn.softplus(m.coefficient(x))

    def loss(m, x, at, seen):
        bent = lambda x: found(m, x) / 5 * laplacian(m.network, x)
        residual = lambda x: bent(x) + true * PI**2 * solution(x)
        wrong = jax.vmap(m.network)(seen) - jax.vmap(solution)(seen)
        outside = 100.0 * squared(jax.vmap(m.network)(at)) + 100.0 * squared(wrong)
        return squared(jax.vmap(residual)(x)) + outside

    points = inside(rng, 800, *box), edge(rng, 100, *box, 4), inside(rng, 100, *box)
    error = lambda m: jnp.abs(found(m, jnp.zeros(2)) - true) / true
    return Problem(2, "scalar", loss, points, error, unknown=True)


EQUATIONS = {
    "Poisson": poisson,
    "Poisson, five dimensions": poisson5,
    "Helmholtz": helmholtz,
    "Allen-Cahn": allen_cahn,
    "Kovasznay": kovasznay,
    "Burgers": burgers,
    "inverse": inverse,
}


def network(problem: Problem, seed: int, width: int) -> Any:
    key = jax.random.key(seed)
    mlp = eqx.nn.MLP(problem.dims, problem.outputs, width, 3, jnp.tanh, key=key)
    return WithUnknown(mlp, kfac.Parameter(jnp.zeros(()))) if problem.unknown else mlp


# Methods: `(problem, network, seconds, seed) -> error`.

STEPS = 10  # In one program, so that Python is not measured.


def timed(
    step: Callable, carry: Any, final: Callable, seconds: float, seed: int
) -> float:
    """The model that so many seconds of `step(carry, key) -> carry` lead to."""
    body = lambda carry, key: (step(carry, key), None)
    many = jax.jit(lambda carry, keys: jax.lax.scan(body, carry, keys)[0])
    keys = jax.random.split(jax.random.key(seed), STEPS)
    jax.block_until_ready(many(carry, keys))
    spent, number = 0.0, 0
    while spent < seconds:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), STEPS)
        start = time.process_time()
        carry = jax.block_until_ready(many(carry, keys))
        spent, number = spent + time.process_time() - start, number + 1
    return final(carry)


def with_kfac(make: Callable[[], kfac.KFAC]) -> Callable:
    def run(problem, network, seconds, seed):
        optimizer, blocks = make(), kfac.Kronecker(kfac.TensorNormal())
        model = kfac.convert(network, blocks=blocks)
        arrays, static = eqx.partition(model, eqx.is_array)

        def step(carry, key):
            model, state = eqx.combine(carry[0], static), carry[1]
            stepped = optimizer.step(problem.loss, model, state, *problem.points, key=key)
            return eqx.filter(stepped[0], eqx.is_array), stepped[1]

        def final(carry):
            model, state = eqx.combine(carry[0], static), carry[1]
            model = (
                model
                if state.averaged_parameters is None
                else kfac.averaged(model, state)
            )
            return float(eqx.filter_jit(problem.error)(model))

        return timed(step, (arrays, optimizer.init(model)), final, seconds, seed)

    return run


def objective(problem: Problem, network: Any) -> tuple[Any, Callable, Callable]:
    """All parameters as a vector, the loss and the error given one."""
    arrays, static = eqx.partition(network, eqx.is_inexact_array)
    vector, unravel = ravel_pytree(arrays)
    model = lambda vector: eqx.combine(unravel(vector), static)
    loss = lambda vector: problem.loss(model(vector), *problem.points).value
    return (
        vector,
        loss,
        lambda vector: float(jax.jit(lambda v: problem.error(model(v)))(vector)),
    )


def with_adam(rate: float) -> Callable:
    def run(problem, network, seconds, seed):
        vector, loss, error = objective(problem, network)
        adam = optax.adam(rate)

        def step(carry, key):
            vector, state = carry
            updates, state = adam.update(jax.grad(loss)(vector), state)
            return optax.apply_updates(vector, updates), state

        final = lambda carry: error(carry[0])
        return timed(step, (vector, adam.init(vector)), final, seconds, seed)

    return run


class _Over(Exception):
    pass


def with_lbfgs(problem: Problem, network: Any, seconds: float, seed: int) -> float:
    """SciPy's, with twenty pairs. It begins again where it finds no further step."""
    vector, loss, error = objective(problem, network)
    both = jax.jit(jax.value_and_grad(loss))
    jax.block_until_ready(both(vector))
    last, start = [vector], time.process_time()

    def evaluate(v):
        value, gradient = both(jnp.asarray(v, vector.dtype))
        return float(value), np.asarray(gradient, float)

    def moved(v):
        last[0] = jnp.asarray(v, vector.dtype)
        if time.process_time() - start > seconds:
            raise _Over

    options = dict(m=20, maxfun=10**7, maxiter=10**7, factr=0, pgtol=0, callback=moved)
    try:
        for _ in range(20):
            scipy.optimize.fmin_l_bfgs_b(evaluate, np.asarray(last[0], float), **options)
    except _Over:
        pass
    return error(last[0])


def rules() -> kfac.KFAC:
    """The rules of the K-FAC paper."""
    rule = kfac.QuadraticModel()
    return kfac.KFAC(rule, rule, kfac.LevenbergMarquardt(initial=1.0))


METHODS: dict[str, list[Callable]] = {
    "`KFAC.full_batch()`": [with_kfac(kfac.KFAC.full_batch)],
    "rules of the paper": [with_kfac(rules)],
    "`KFAC()`": [with_kfac(kfac.KFAC)],
    "L-BFGS": [with_lbfgs],
    "Adam": [with_adam(rate) for rate in (1e-3, 3e-3, 1e-2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--equations", nargs="*", default=list(EQUATIONS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps, a run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="of three hidden layers")
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.seconds, options.seeds, options.width = 0.1, 1, 8
    lines = [f"| equation | {' | '.join(options.methods)} |"]
    lines.append("|---" * (1 + len(options.methods)) + "|")
    for equation in options.equations:
        cells = []
        for runs in (METHODS[name] for name in options.methods):

            def errors(run):
                for seed in range(options.seeds):
                    problem = EQUATIONS[equation](np.random.default_rng(seed))
                    model = network(problem, seed, options.width)
                    yield run(problem, model, options.seconds, seed)

            each = [list(errors(run)) for run in runs]
            best = min(each, key=statistics.fmean)
            cells.append(", ".join(f"{error:.1e}" for error in best))
        lines.append(f"| {equation} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
