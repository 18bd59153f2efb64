"""Rows that count by how large their other side is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import assert_differs, assert_entries_near


BLOCK, EXPAND = kfac.Kronecker(kfac.TensorNormal()), kfac.Kronecker()
KEYS = jr.split(jr.key(3), 8)
N, D, H, K = 6, 4, 5, 3
X, Y = jr.normal(KEYS[0], (N, D)), jr.normal(KEYS[1], (N, K))


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

    def __init__(self, key, block):
        self.weight = jr.normal(key, (2, 3, 4))
        self.tag = kfac.Tag(kfac.form.Einsum("boi,bi->bo", bias=None), block)

    def __call__(self, x):
        return self.tag(jnp.einsum("boi,bi->bo", self.weight, x), x)


LAYERS = {
    "linear": (lambda b: kfac.Linear(D, K, key=KEYS[2], block=b), (D,)),
    "no bias": (lambda b: kfac.Linear(D, K, False, key=KEYS[2], block=b), (D,)),
    "conv": (
        lambda b: kfac.Conv2d(2, 3, (2, 3), 2, 1, (1, 2), key=KEYS[2], block=b),
        (2, 6, 7),
    ),
    "groups": (lambda b: kfac.Conv1d(4, 6, 3, groups=2, key=KEYS[2], block=b), (4, 7)),
    "transposed": (
        lambda b: kfac.ConvTranspose1d(2, 3, 3, 2, key=KEYS[2], block=b),
        (2, 5),
    ),  # fmt: skip
    "einsum": (lambda b: Einsum(KEYS[2], b), (2, 4)),
}


def squared(layer, x):
    z = jnp.tanh(jax.vmap(layer)(x)).reshape(len(x), -1)
    return kfac.SquaredError(z, jnp.zeros_like(z))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("number", [1, 3])
def test_formula(name, number):
    make, shape = LAYERS[name]
    layer, x = make(BLOCK), jr.normal(KEYS[3], (N, *shape))
    fisher = kfac.MonteCarlo(number)
    found = kfac.capture(squared, fisher)(layer, x, key=KEYS[4])
    row, g = found.rows()  # [*groups, examples, *positions, d]; g: cotangents first.
    groups = layer.tag.form.groups
    got = kfac.curvature(squared, fisher)(layer, x, key=KEYS[4])
    flat = lambda a, lead: np.asarray(a).reshape(*a.shape[:lead], -1, a.shape[-1])
    row, g = flat(row, groups), flat(g, groups + 1)
    for group in np.ndindex(row.shape[:groups]):
        a, b, total = 0.0, 0.0, 0.0
        for cotangent in range(len(g)):
            for v, u in zip(row[group], g[cotangent][group], strict=True):
                a = a + u @ u * np.outer(v, v)
                b = b + v @ v * np.outer(u, u)
                total = total + (u @ u) * (v @ v)
        np.testing.assert_allclose(got.input_factor[group], a / total, atol=1e-12)
        np.testing.assert_allclose(got.output_factor[group], b / N, atol=1e-12)
    expanded = kfac.curvature(squared, fisher)(make(EXPAND), x, key=KEYS[4])
    assert_differs(expanded, got, 0.1)


def test_embeddings():
    layer = kfac.Embedding(5, K, key=KEYS[2], block=BLOCK)
    index = jnp.array([0, 3, 3, 1, 4, 0])
    found = kfac.capture(squared, kfac.Exact())(layer, index)
    sizes = jnp.sum(found.output_gradients**2, axis=(0, 2))
    counts = jnp.zeros(5).at[index].add(sizes)
    got = collect(squared, layer, index)
    np.testing.assert_allclose(got.input_factor, counts / counts.sum(), atol=1e-12)
    assert got.input_factor[2] == 0


def test_stacked_layers():
    make = eqx.filter_vmap(lambda key: kfac.Linear(D, D, key=key, block=BLOCK))
    stack = make(jr.split(KEYS[2], 2))

    def scanned(layers, x):
        leaves, static = eqx.partition(layers, eqx.is_array)
        body = lambda h, own: (jnp.tanh(jax.vmap(eqx.combine(own, static))(h)), None)
        z, _ = jax.lax.scan(body, x, leaves)
        return kfac.SquaredError(z, jnp.zeros_like(z))

    def one_by_one(layers, x):
        for layer in layers:
            x = jnp.tanh(jax.vmap(layer)(x))
        return kfac.SquaredError(x, jnp.zeros_like(x))

    leaves, static = eqx.partition(stack, eqx.is_array)
    apart = [
        eqx.combine(jtu.tree_map(lambda a, i=i: a[i], leaves), static) for i in (0, 1)
    ]
    got, want = collect(scanned, stack, X), collect(one_by_one, apart, X)
    for i in (0, 1):
        assert_entries_near(jtu.tree_map(lambda a, i=i: a[i], got), want[i])


def test_a_bias_alone():
    layer = kfac.Linear(D, K, key=KEYS[2], block=BLOCK)
    bias = eqx.tree_at(lambda m: m.weight, layer, None)
    got = collect(lambda m, x: squared(eqx.combine(m, layer), x), bias, X)
    full = collect(squared, kfac.Linear(D, K, key=KEYS[2], block=kfac.Full()), X)
    corner = full.matrix.reshape(K, D + 1, K, D + 1)[:, -1, :, -1]
    assert_entries_near((got.input_factor, got.output_factor), (np.ones((1, 1)), corner))


#
# What it is for
#


def mlp(block, activation=jnp.tanh, **kwargs):
    model = eqx.nn.MLP(D, K, H, 2, activation, key=KEYS[5], **kwargs)
    return kfac.convert(model, block)


def regression(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


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
        flat = np.asarray(matrix).reshape(len(matrix), -1)
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
    got = collect(regression, mlp(BLOCK), X[:1], Y[:1])
    want = exact_blocks(regression, mlp(BLOCK), X[:1], Y[:1])
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-12)


@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (1.0, 100.0), (0.3, 2.0)])
def test_several_losses(coefficients):
    """Of a deep linear network, exact for all coefficients and numbers of examples."""
    a, b = coefficients
    few, target = 3 * X[:2], Y[:2]

    def loss_fn(model, x, y, few, target):
        return a * regression(model, x, y) + b * regression(model, few, target)

    args = X, Y, few, target
    linear = lambda block: mlp(block, activation=lambda x: x)
    want = exact_blocks(loss_fn, linear(BLOCK), *args)
    got = collect(loss_fn, linear(BLOCK), *args)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-10)
    expanded = collect(loss_fn, linear(EXPAND), *args)
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
    few = jnp.array([0, 2, 2, 4])
    weighted = lambda m, x, y: kfac.SquaredError(jax.vmap(m)(x), y, weights)
    want = collect(regression, mlp(BLOCK), X[few], Y[few])
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


@pytest.mark.parametrize("coefficient", [0.0, 0.1, 10.0])
def test_values_and_derivatives_of_a_deep_linear_network(coefficient):
    def loss_fn(model, x):
        run = lambda x: jax.jvp(model, (x,), (jnp.ones(D),))
        values, slopes = jax.vmap(run)(x)
        zeros = jnp.zeros_like(values)
        both = kfac.SquaredError(values, zeros), kfac.SquaredError(slopes, zeros)
        return both[0] + coefficient * both[1]

    linear = lambda block: mlp(block, activation=lambda x: x)
    want = exact_blocks(loss_fn, linear(BLOCK), X)
    got = collect(loss_fn, linear(BLOCK), X)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(dense(factors), block, atol=1e-10)


def test_a_data_set():
    accumulator = kfac.Accumulator(regression, kfac.Exact())
    model = mlp(BLOCK)
    total = accumulator.init(model, X[:2], Y[:2])
    for part in (slice(0, 2), slice(2, 6)):
        total = accumulator.add(total, model, X[part], Y[part])
    assert_entries_near(
        accumulator.finish(total, model), collect(regression, model, X, Y)
    )


def test_tied_weights():
    """Both uses of a weight, one of them transposed: a row is one from either side."""
    weight = jr.normal(KEYS[6], (H, D))
    pair = (
        eqx.nn.Linear(D, H, False, key=KEYS[6]),
        eqx.nn.Linear(H, D, False, key=KEYS[7]),
    )
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
    assert_entries_near((got.input_factor, got.output_factor), (a / total, b / N))


@pytest.mark.parametrize("block", [BLOCK, kfac.EKFAC(kfac.TensorNormal())])
def test_an_optimizer_trains(block):
    optimizer, model = kfac.KFAC(), mlp(block)
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    for i in range(20):
        model, state, info = step(regression, model, state, X, Y, key=jr.key(i))
    assert info.loss < 0.5 * regression(mlp(block), X, Y).value
