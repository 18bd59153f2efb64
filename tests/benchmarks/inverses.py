"""How long does it take to factorise a pair of factors, and how far is the inverse from
that in float64? For every solver, and by JAX's own functions; on whatever device JAX has.

    python tests/benchmarks/inverses.py                     # a minute on two CPU cores
    python tests/benchmarks/inverses.py --sizes 1024 4096   # for an accelerator
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import lineax as lx
import numpy as np

import eqx_kfac as kfac


DAMPING = 0.03
SOLVERS = {
    "Cholesky": kfac.Cholesky(),
    "NewtonSchulz": kfac.NewtonSchulz(),
    "Eigh": kfac.Eigh(),
    "SubspaceIteration": kfac.SubspaceIteration(),
}


def pair(size: int) -> tuple[jax.Array, jax.Array]:
    """Two factors of a spectrum as training has it, from 1 to 1e-6."""

    def factor(key):
        x = jax.random.normal(key, (2 * size, size)) * jnp.logspace(0, -3, size)
        mix = jax.random.normal(jax.random.key(9), (size, size)) / size**0.5
        x = jnp.matmul(x, mix, precision="highest")
        x = x / jnp.sqrt(jnp.max(jnp.sum(x**2, axis=0)))
        return jnp.matmul(x.mT, x, precision="highest")

    return factor(jax.random.key(0)), factor(jax.random.key(1))


def solved(solver, factors, v):
    options = dict(damping=jnp.asarray(DAMPING, v.dtype))
    operator = kfac.operators.KroneckerOperator(*factors)
    return lx.linear_solve(operator, v, solver, options=options, throw=False).value


def initial(solver, factors):
    options = dict(damping=jnp.asarray(DAMPING, factors[0].dtype))
    return solver.init(kfac.operators.KroneckerOperator(*factors), options)


def peers(factors):
    def cholesky(a, b):
        eye = DAMPING**0.5 * jnp.eye(len(a))
        return [
            jsp.linalg.cho_solve((jnp.linalg.cholesky(m + eye), True), jnp.eye(len(m)))
            for m in (a, b)
        ]

    return {
        "jax: cholesky, cho_solve": cholesky,
        "jax: eigh": lambda a, b: [jnp.linalg.eigh(m) for m in (a, b)],
    }


def seconds(fn, factors, rounds: int = 5) -> float:
    fn = jax.jit(fn)
    jax.block_until_ready(fn(*factors))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(fn(*factors))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def error(solver, factors, v) -> float:
    """The error of a solution, relative to the same solver's in float64."""
    got = jax.jit(lambda *f: solved(solver, f, v))(*factors)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(f), jnp.float64) for f in factors]
        wide = jnp.asarray(np.asarray(v), jnp.float64)
        kind = (
            kfac.Eigh()
            if solver.state_type is kfac.Eigh().state_type
            else kfac.Cholesky()
        )
        want = jax.jit(lambda *f: solved(kind, f, wide))(*exact)
    got, want = np.asarray(got, float), np.asarray(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024])
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, milliseconds a pair")
    for size in options.sizes:
        factors = pair(size)
        v = jax.random.normal(jax.random.key(2), (size, size))
        for name, solver in SOLVERS.items():
            fn = lambda *f, solver=solver: initial(solver, f)
            took = 1e3 * seconds(fn, factors)
            far = error(solver, factors, v) if size <= 1024 else float("nan")
            print(f"{size:5} {name:26} {took:9.3g}   error {far:.1e}", flush=True)
        for name, fn in peers(factors).items():
            print(f"{size:5} {name:26} {1e3 * seconds(fn, factors):9.3g}", flush=True)


if __name__ == "__main__":
    main()
