"""Sums of losses over different numbers of examples: each counts by its own mean."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac


MANY, FEW, D, K = 12, 3, 4, 2
KEYS = jax.random.split(jax.random.key(0), 6)
X, Y = jax.random.normal(KEYS[0], (MANY, D)), jax.random.normal(KEYS[1], (MANY, K))
Z, W = jax.random.normal(KEYS[2], (FEW, D)), jax.random.normal(KEYS[3], (FEW, K))
BLOCKS = {"kronecker": kfac.Kronecker(), "full": kfac.Full(), "diagonal": kfac.Diagonal()}


class Pair(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear


def make(block):
    layers = [eqx.nn.Linear(D, K, key=key) for key in KEYS[4:]]
    return kfac.convert(Pair(*layers), blocks=block)


def loss_fn(model, x, y, z, w):
    one = kfac.SquaredError(jax.vmap(model.first)(x), y)
    return one + 2.0 * kfac.SquaredError(jax.vmap(model.second)(z), w)


def diagonals(curvature, model):
    operator = kfac.BlockDiagonalOperator(curvature, model)
    return np.diag(operator.as_matrix())


@pytest.mark.parametrize("name", BLOCKS)
def test_each_has_a_mean_of_its_own(name):
    """Of a linear layer with squared error, every block is exact."""
    model, args = make(BLOCKS[name]), (X, Y, Z, W)
    operator = kfac.GaussNewton(loss_fn, model, *args)
    exact = eqx.filter_jit(lx.diagonal)(operator)
    collect = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))
    got = diagonals(collect(model, *args), model)
    np.testing.assert_allclose(np.sort(got), np.sort(exact), rtol=1e-10)
    # By one mean of all, the second layer's would be a quarter.
    by_one = exact.reshape(2, -1) * np.array([[1.0], [FEW / MANY]])
    assert not np.allclose(np.sort(got), np.sort(by_one.ravel()), rtol=1e-2)


@pytest.mark.parametrize("name", BLOCKS)
def test_over_a_data_set(name):
    """Their numbers are known at its end only."""
    model, args = make(BLOCKS[name]), (X, Y, Z, W)
    accumulator = kfac.Accumulator(loss_fn, kfac.Exact())
    parts = [(X[:8], Y[:8], Z[:1], W[:1]), (X[8:], Y[8:], Z[1:], W[1:])]
    total = eqx.filter_jit(accumulator.init)(model, *parts[0])
    for part in parts:
        total = eqx.filter_jit(accumulator.add)(total, model, *part)
    got = accumulator.finish(total, model)
    want = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))(model, *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
    assert jnp.any(jax.tree.leaves(got)[0] != 0)


def test_weights_of_more_than_a_layer_sees():
    """Of a layer that acts on whole sequences, an example counts by the mean weight of
    its tokens."""
    layer = kfac.Linear(D, 3 * K, key=KEYS[4])
    weights = jax.random.uniform(KEYS[5], (MANY, 3))

    def loss_fn(layer, x):
        out = jax.vmap(layer)(x).reshape(MANY, 3, K)
        return kfac.SquaredError(out, jnp.zeros_like(out), weights)

    collect = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))
    got = collect(layer, X).input_factor
    rows = np.column_stack((X, np.ones(MANY)))

    def moment(w):
        w = np.asarray(w)[None]
        return (rows.T * w) @ rows / np.sum(w)

    np.testing.assert_allclose(got, moment(np.mean(weights, axis=1)), rtol=1e-10)
    assert not np.allclose(got, moment(np.max(weights, axis=1)), rtol=1e-2)
