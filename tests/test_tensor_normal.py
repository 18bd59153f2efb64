"""Rows that count by how large their other side is."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import assert_differs, assert_entries_near, normal


BLOCK, EXPAND = kfac.Kronecker(kfac.TensorNormal()), kfac.Kronecker()
KEY = jr.key(3)
N, D, H, K = 6, 4, 5, 3
X, Y = normal(N, D, seed=0), normal(N, K, seed=1)


def rows_of(array, index):
    """(Through NumPy, which needs no compilation.)"""
    return jax.device_put(np.asarray(array)[index])


@eqx.filter_jit
def collect(loss_fn, model, *args, fisher=kfac.Exact()):
    return kfac.curvature(loss_fn, fisher)(model, *args)


def dense(factors):
    return np.kron(np.asarray(factors.output_factor), np.asarray(factors.input_factor))


#
# The formula, from captured rows
#


class Einsum(eqx.Module):
    weight: jax.Array
    tag: kfac.Tag

    def __init__(self, block):
        self.weight = normal(2, 3, 4)
        self.tag = kfac.Tag(kfac.form.Einsum("boi,bi->bo", bias=None), block)

    def __call__(self, x):
        return self.tag(jnp.einsum("boi,bi->bo", self.weight, x), x)


LAYERS = {
    "linear": (lambda b: kfac.Linear(D, K, key=KEY, block=b), (D,)),
    "no bias": (lambda b: kfac.Linear(D, K, False, key=KEY, block=b), (D,)),
    "conv": (
        lambda b: kfac.Conv2d(2, 3, (2, 3), 2, 1, (1, 2), key=KEY, block=b),
        (2, 6, 7),
    ),
    "groups": (lambda b: kfac.Conv1d(4, 6, 3, groups=2, key=KEY, block=b), (4, 7)),
    "transposed": (
        lambda b: kfac.ConvTranspose1d(2, 3, 3, 2, key=KEY, block=b),
        (2, 5),
    ),  # fmt: skip
    "einsum": (Einsum, (2, 4)),
}


def squared(layer, x):
    z = jnp.tanh(jax.vmap(layer)(x)).reshape(len(x), -1)
    return kfac.SquaredError(z, jnp.zeros_like(z))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("number", [1, 3])
def test_formula(name, number):
    make, shape = LAYERS[name]
    fisher = kfac.MonteCarlo(number)

    @eqx.filter_jit
    def run(x):
        rows = kfac.analysis.capture(squared, fisher)(make(BLOCK), x, key=KEY).rows()
        estimate = ft.partial(kfac.curvature(squared, fisher), key=KEY)
        return rows, *(estimate(make(block), x) for block in (BLOCK, EXPAND))

    (row, g), got, expanded = run(normal(N, *shape, seed=3))
    # [*groups, examples, *positions, d]; g: cotangents first.
    groups = got.output_factor.ndim - 2
    flat = lambda a, lead: np.asarray(a).reshape(*a.shape[:lead], -1, a.shape[-1])
    row, g = flat(row, groups), flat(g, groups + 1)
    for group in np.ndindex(row.shape[:groups]):
        a, b, total = 0.0, 0.0, 0.0
        for cotangent in range(len(g)):
            for v, u in zip(row[group], g[cotangent][group], strict=True):
                a = a + u @ u * np.outer(v, v)
                b = b + v @ v * np.outer(u, u)
                total = total + (u @ u) * (v @ v)
        A, G = np.asarray(got.input_factor), np.asarray(got.output_factor)
        np.testing.assert_allclose(A[group], a / total, atol=1e-12)
        np.testing.assert_allclose(G[group], b / N, atol=1e-12)
    assert_differs(expanded, got, 0.1)


def test_embeddings():
    layer = kfac.Embedding(5, K, key=KEY, block=BLOCK)
    index = jnp.array([0, 3, 3, 1, 4, 0])
    found = eqx.filter_jit(kfac.analysis.capture(squared, kfac.Exact()))(layer, index)
    sizes = np.sum(np.asarray(found.output_gradients) ** 2, axis=(0, 2))
    counts = np.bincount(np.asarray(index), sizes, minlength=5)
    got = np.asarray(collect(squared, layer, index).input_factor)
    np.testing.assert_allclose(got, counts / counts.sum(), atol=1e-12)
    assert got[2] == 0


def test_stacked_layers():
    make = eqx.filter_vmap(lambda key: kfac.Linear(D, D, key=key, block=BLOCK))
    stack = eqx.filter_jit(lambda key: make(jr.split(key, 2)))(KEY)

    def scanned(layers, x):
        leaves, static = eqx.partition(layers, eqx.is_array)
        body = lambda h, own: (jnp.tanh(jax.vmap(eqx.combine(own, static))(h)), None)
        z, _ = jax.lax.scan(body, x, leaves)
        return kfac.SquaredError(z, jnp.zeros_like(z))

    def one_by_one(layers, x):
        for layer in layers:
            x = jnp.tanh(jax.vmap(layer)(x))
        return kfac.SquaredError(x, jnp.zeros_like(x))

    def alone(tree, i):
        leaves, static = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jtu.tree_map(lambda a: rows_of(a, i), leaves), static)

    apart = [alone(stack, i) for i in (0, 1)]
    got, want = collect(scanned, stack, X), collect(one_by_one, apart, X)
    for i in (0, 1):
        assert_entries_near(alone(got, i), want[i])


def test_a_bias_alone():
    layer = kfac.Linear(D, K, key=KEY, block=BLOCK)
    bias = eqx.tree_at(lambda m: m.weight, layer, None)
    got = collect(lambda m, x: squared(eqx.combine(m, layer), x), bias, X)
    full = collect(squared, kfac.Linear(D, K, key=KEY, block=kfac.Full()), X)
    corner = np.asarray(full.matrix).reshape(K, D + 1, K, D + 1)[:, -1, :, -1]
    corner = jnp.asarray(corner)
    assert_entries_near((got.input_factor, got.output_factor), (jnp.ones((1, 1)), corner))


#
# What it is for
#


@eqx.filter_jit
def mlp(block, activation=jnp.tanh):
    return kfac.convert(eqx.nn.MLP(D, K, H, 2, activation, key=KEY), block)


def identity(x):
    return x


def regression(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


@eqx.filter_jit
def exact_blocks(loss_fn, model, *args):
    """Of squared errors: every layer's block of the Gauss-Newton matrix."""
    params, static = eqx.partition(kfac.revert(model), eqx.is_inexact_array)

    def outputs(params):
        terms = (loss_fn(eqx.combine(params, static), *args) + 0).terms
        scales = [jnp.sqrt(c / len(loss.outputs)) for c, loss in terms]
        pairs = zip(scales, terms, strict=True)
        return jnp.concatenate([(s * loss.outputs).ravel() for s, (_, loss) in pairs])

    found = []
    for layer in jax.jacobian(outputs)(params).layers:
        matrix = jnp.concatenate([layer.weight, layer.bias[..., None]], axis=-1)
        flat = matrix.reshape(len(matrix), -1)
        found.append(flat.T @ flat)
    return found


def test_traces_are_exact():
    got = collect(regression, mlp(BLOCK), X, Y)
    want = exact_blocks(regression, mlp(BLOCK), X, Y)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(np.trace(dense(factors)), np.trace(block), rtol=1e-12)
    expanded = collect(regression, mlp(EXPAND), X, Y)
    first = expanded.layers[0], want[0]
    assert abs(np.trace(dense(first[0])) / np.trace(first[1]) - 1) > 0.01


def test_one_row_is_exact():
    args = rows_of(X, slice(1)), rows_of(Y, slice(1))
    got = collect(regression, mlp(BLOCK), *args)
    want = exact_blocks(regression, mlp(BLOCK), *args)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-12)


FEW, TARGET = rows_of(3 * np.asarray(X), slice(2)), rows_of(Y, slice(2))


def two_losses(model, a, b, x, y, few, target):
    return a * regression(model, x, y) + b * regression(model, few, target)


@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (1.0, 100.0), (0.3, 2.0)])
def test_several_losses(coefficients):
    """Of a deep linear network, exact for all coefficients and numbers of examples."""
    args = *map(jnp.asarray, coefficients), X, Y, FEW, TARGET
    want = exact_blocks(two_losses, mlp(BLOCK, identity), *args)
    got = collect(two_losses, mlp(BLOCK, identity), *args)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-10)
    expanded = collect(two_losses, mlp(EXPAND, identity), *args)
    wrong = [
        np.linalg.norm(dense(f) - b) / np.linalg.norm(b)
        for f, b in zip(expanded.layers, want, strict=True)
    ]
    assert min(wrong) > 0.05


def test_a_loss_of_coefficient_zero_changes_nothing():
    loss_fn = lambda m, x, y: regression(m, x, y) + 0.0 * regression(m, 9 * x[:2], y[:2])
    want = collect(regression, mlp(BLOCK), X, Y)
    assert_entries_near(collect(loss_fn, mlp(BLOCK), X, Y), want)
    changed = collect(loss_fn, mlp(EXPAND), X, Y)
    assert_differs(changed, collect(regression, mlp(EXPAND), X, Y), 0.1)


def test_weights_are_repetitions():
    weights = jnp.array([1, 0, 2, 0, 1, 0])
    few = np.array([0, 2, 2, 4])
    weighted = lambda m, x, y: kfac.SquaredError(jax.vmap(m)(x), y, weights)
    want = collect(regression, mlp(BLOCK), rows_of(X, few), rows_of(Y, few))
    assert_entries_near(collect(weighted, mlp(BLOCK), X, Y), want)


def slope(scale):
    """Values, and derivatives in another unit."""

    def loss_fn(model, x):
        v = scale * jnp.ones(D)
        values, slopes = jax.vmap(lambda x: jax.jvp(model, (x,), (v,)))(x)
        slopes = slopes / scale
        return kfac.SquaredError(
            jnp.concatenate([values, slopes], -1), jnp.zeros((len(x), 2 * K))
        )

    return loss_fn


def test_derivatives_may_have_any_unit():
    want = collect(slope(1.0), mlp(BLOCK), X)
    assert_entries_near(collect(slope(100.0), mlp(BLOCK), X), want)
    expanded = [collect(slope(s), mlp(EXPAND), X) for s in (1.0, 100.0)]
    assert_differs(*expanded, 0.5)


def values_and_slopes(model, x, coefficient):
    run = lambda x: jax.jvp(model, (x,), (jnp.ones(D),))
    values, slopes = jax.vmap(run)(x)
    zeros = jnp.zeros_like(values)
    both = kfac.SquaredError(values, zeros), kfac.SquaredError(slopes, zeros)
    return both[0] + coefficient * both[1]


@pytest.mark.parametrize("coefficient", [0.0, 0.1, 10.0])
def test_values_and_derivatives_of_a_deep_linear_network(coefficient):
    args = values_and_slopes, mlp(BLOCK, identity), X, jnp.asarray(coefficient)
    got, want = collect(*args), exact_blocks(*args)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-10)


def test_a_data_set():
    accumulator = kfac.analysis.Accumulator(regression, kfac.Exact())

    @eqx.filter_jit
    def run(model, x, y):
        total = accumulator.init(model, x[:2], y[:2])
        for part in (slice(0, 2), slice(2, 6)):
            total = accumulator.add(total, model, x[part], y[part])
        return accumulator.finish(total, model)

    model = mlp(BLOCK)
    assert_entries_near(run(model, X, Y), collect(regression, model, X, Y))


def test_tied_weights():
    """Both uses of a weight, one of them transposed: a row is one from either side."""
    weight = normal(H, D, seed=6)
    pair = tuple(eqx.nn.Linear(*sizes, False, key=KEY) for sizes in ((D, H), (H, D)))
    pair = eqx.tree_at(lambda p: p[0].weight, pair, weight)
    shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight.T)

    def loss_fn(model, x):
        first, second = model()
        z = jax.vmap(lambda x: second(jnp.tanh(first(x))))(x)
        return kfac.SquaredError(z, jnp.zeros_like(z))

    got = collect(loss_fn, kfac.convert(shared, BLOCK), X).pytree[0]
    a, b, total = 0.0, 0.0, 0.0
    for x in np.asarray(X):
        h = np.tanh(np.asarray(weight) @ x)
        for g in np.eye(D):
            back = (np.asarray(weight) @ g) * (1 - h**2)
            for left, right in ((back, x), (h, g)):
                a = a + left @ left * np.outer(right, right)
                b = b + right @ right * np.outer(left, left)
                total = total + (left @ left) * (right @ right)
    want = jnp.asarray(a / total), jnp.asarray(b / N)
    assert_entries_near((got.input_factor, got.output_factor), want)


@pytest.mark.parametrize("block", [BLOCK, kfac.EKFAC(kfac.TensorNormal())])
def test_an_optimizer_trains(block):
    optimizer, model = kfac.KFAC(), mlp(block)
    state, step = eqx.filter_jit(optimizer.init)(model), eqx.filter_jit(optimizer.step)
    for i in range(20):
        model, state, info = step(regression, model, state, X, Y, key=jr.key(i))
    before = eqx.filter_jit(lambda model: regression(model, X, Y).value)(mlp(block))
    assert float(info.loss) < 0.5 * float(before)
