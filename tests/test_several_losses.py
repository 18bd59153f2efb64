"""Sums of losses over different numbers of examples: each counts by its own mean."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import close, normal


MANY, FEW, D, K = 12, 3, 4, 2
X, Y, Z, W = (
    normal(n, d, seed=n + d) for n, d in ((MANY, D), (MANY, K), (FEW, D), (FEW, K))
)
BLOCKS = {"kronecker": kfac.Kronecker(), "full": kfac.Full(), "diagonal": kfac.Diagonal()}


class Pair(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear


def make(block):
    keys = jax.random.split(jax.random.key(0))
    return kfac.convert(Pair(*(eqx.nn.Linear(D, K, key=k) for k in keys)), blocks=block)


def loss_fn(model, x, y, z, w):
    one = kfac.SquaredError(jax.vmap(model.first)(x), y)
    return one + 2.0 * kfac.SquaredError(jax.vmap(model.second)(z), w)


@pytest.mark.parametrize("name", BLOCKS)
def test_each_has_a_mean_of_its_own(name):
    """Of a linear layer with squared error, every block is exact."""

    @eqx.filter_jit
    def run(*args):
        model = make(BLOCKS[name])
        curvature = kfac.curvature(loss_fn, kfac.Exact())(model, *args)
        operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
        exact = kfac.analysis.GaussNewtonOperator(loss_fn, model, *args)
        return lx.diagonal(operator), lx.diagonal(exact)

    got, exact = map(np.asarray, run(X, Y, Z, W))
    np.testing.assert_allclose(np.sort(got), np.sort(exact), rtol=1e-10)
    # By one mean of all, the second layer's would be a quarter.
    by_one = exact.reshape(2, -1) * np.array([[1.0], [FEW / MANY]])
    assert not np.allclose(np.sort(got), np.sort(by_one.ravel()), rtol=1e-2)


@pytest.mark.parametrize("name", BLOCKS)
def test_over_a_data_set(name):
    """Their numbers are known at its end only."""
    accumulator = kfac.analysis.Accumulator(loss_fn, kfac.Exact())

    @eqx.filter_jit
    def run(x, y, z, w):
        model = make(BLOCKS[name])
        parts = [(x[:8], y[:8], z[:1], w[:1]), (x[8:], y[8:], z[1:], w[1:])]
        total = accumulator.init(model, *parts[0])
        for part in parts:
            total = accumulator.add(total, model, *part)
        whole = kfac.curvature(loss_fn, kfac.Exact())(model, x, y, z, w)
        return accumulator.finish(total, model), whole

    got, want = run(X, Y, Z, W)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
    assert np.any(np.asarray(jax.tree.leaves(got)[0]))


UNWEIGHTED = {
    "kronecker": kfac.Kronecker(weighted=False),
    "ekfac": kfac.EKFAC(weighted=False),
    "tensor normal": kfac.Kronecker(kfac.TensorNormal()),
    "full": kfac.Full(),
    "diagonal": kfac.Diagonal(),
    "tnt": kfac.TNT(),
}
first_weights = np.linspace(0.5, 2.0, MANY)
second_weights = np.array([1.0, 0.0, 3.0])


def weighted_fn(model, x, y, z, w):
    one = kfac.SquaredError(jax.vmap(model.first)(x), y, first_weights)
    return one + 2.0 * kfac.SquaredError(jax.vmap(model.second)(z), w, second_weights)


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_weights_over_two_batches(name):
    """The same as each loss by itself, whose layers see nothing of the other one."""

    @eqx.filter_jit
    def run(model):
        whole = kfac.curvature(weighted_fn, kfac.Exact())(model, X, Y, Z, W)
        parts = []
        for i, layer in enumerate((model.first, model.second)):
            x, y = ((X, Y), (Z, W))[i]
            weights, scale = ((first_weights, 1.0), (second_weights, 2.0))[i]

            def alone(layer, x, y, weights=weights, scale=scale):
                return scale * kfac.SquaredError(jax.vmap(layer)(x), y, weights)

            parts.append(kfac.curvature(alone, kfac.Exact())(layer, x, y))
        matrices = []
        layers = 2 * [model.first, model.second]
        for factors, layer in zip((whole.first, whole.second, *parts), layers):
            matrices.append(
                kfac.analysis.BlockDiagonalOperator(factors, layer).as_matrix()
            )
        return matrices

    first, second, *alone = run(make(UNWEIGHTED[name]))
    close(first, alone[0])
    close(second, alone[1])


def test_weights_over_two_batches_of_which_one_is_asked_for():
    """By one layer of two: then, nobody knows which one it is."""
    model = make({".first": kfac.Kronecker(), ".second": kfac.Full()})
    with pytest.raises(ValueError, match="over different examples.*weighted=False"):
        kfac.curvature(weighted_fn, kfac.Exact())(model, X, Y, Z, W)


def test_weights_of_more_than_a_layer_sees():
    """Of a layer that acts on whole sequences, an example counts by the mean weight of
    its tokens."""
    layer = kfac.Linear(D, 3 * K, key=jax.random.key(0))
    weights = jax.device_put(np.random.default_rng(0).uniform(size=(MANY, 3)))

    def loss_fn(layer, x):
        out = jax.vmap(layer)(x).reshape(MANY, 3, K)
        return kfac.SquaredError(out, jnp.zeros_like(out), weights)

    collect = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))
    got = collect(layer, X).input_factor
    rows, w = np.column_stack((X, np.ones(MANY))), np.asarray(weights)

    def moment(w):
        w = np.asarray(w)[None]
        return (rows.T * w) @ rows / np.sum(w)

    np.testing.assert_allclose(got, moment(np.mean(w, axis=1)), rtol=1e-10)
    assert not np.allclose(got, moment(np.max(w, axis=1)), rtol=1e-2)
