"""Influence scores through the rows of the layers, and by gradients of single examples,
written out: the same scores, in one run, on 64-256-256-10.

    python -m tests.benchmarks.influence
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from tqdm import tqdm

import eqx_kfac as kfac


DAMPING = 1e-2


def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> Any:
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


def gradients(model: Any, data: tuple) -> Any:
    def one(x, y):
        value = lambda model: loss_fn(model, x[None], y[None]).value
        return eqx.filter_grad(value)(model)

    return jax.vmap(one)(*data)


def flat(tree: Any) -> jax.Array:
    leaves = jtu.tree_leaves(tree)
    return jnp.concatenate([a.reshape(len(a), -1) for a in leaves], axis=1)


def by_gradients(curvature: Any, solver: Any) -> Callable:
    def scores(model, test, train):
        blocks = kfac.analysis.BlockDiagonalOperator(curvature, model)
        inverse = blocks.inverse(DAMPING, solver)
        of_test = eqx.filter(gradients(model, test), eqx.is_inexact_array)
        directions = jax.lax.map(inverse.mv, of_test, batch_size=32)
        return flat(directions) @ flat(gradients(model, train)).T

    return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", type=int, default=128)
    parser.add_argument("--train", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    keys = jr.split(jr.key(0), 3)
    model = kfac.convert(eqx.nn.MLP(64, 10, 256, 2, key=keys[0]))
    x = jr.normal(keys[1], (arguments.train, 64))
    train = x, jr.randint(keys[2], (len(x),), 0, 10)
    test = jtu.tree_map(lambda a: a[: arguments.tests], train)
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    curvature = collect(model, *train)
    contenders = {}
    for name, solver in (("Cholesky", kfac.Cholesky()), ("Eigh", kfac.Eigh())):
        rows = kfac.analysis.influence(loss_fn, curvature, DAMPING, solver)
        contenders["rows", name] = eqx.filter_jit(rows)
        contenders["gradients", name] = eqx.filter_jit(by_gradients(curvature, solver))
    best, norms = {}, {}
    for _ in tqdm(range(arguments.rounds + 1), unit=" rounds", disable=None):
        for name, scores in contenders.items():
            start = time.perf_counter()
            norms[name] = float(jnp.linalg.norm(scores(model, test, train)))
            seconds = time.perf_counter() - start
            best[name] = min(best.get(name, seconds), seconds)
    print(f"{'scores':<10} {'solver':<9} {'seconds':>8} {'norm':>10}")
    for (kind, solver), seconds in best.items():
        print(f"{kind:<10} {solver:<9} {seconds:>8.3f} {norms[kind, solver]:>10.1f}")


if __name__ == "__main__":
    main()
