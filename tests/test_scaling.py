"""One convention for every mean: repeating, splitting, masking and weighting examples,
and adding losses up, do what the mean over loss terms says they do."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import arrays
from .plain import plain_kfac


TOLERANCE = 1e-10
N, T, K = 6, 4, 3
FISHERS = pytest.mark.parametrize(
    "fisher", [kfac.Exact(), kfac.Empirical()], ids=["exact", "empirical"]
)


class Net(eqx.Module):
    layers: list

    def __init__(self, key, sharing=kfac.Expand()):
        block = kfac.Kronecker(sharing)
        sizes = [(5, 4, True), (4, 4, False), (4, K, True)]
        self.layers = [
            kfac.Linear(i, o, bias, key=k, block=block)
            for (i, o, bias), k in zip(sizes, jax.random.split(key, 3), strict=True)
        ]

    def __call__(self, x):
        first, second, third = self.layers
        return third(jax.nn.relu(second(jnp.tanh(first(x)))))


def examples(model, x, y, w=None):
    """A term per example."""
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, w)


def tokens(model, x, y, w=None):
    """A term per token."""
    return kfac.SoftmaxCrossEntropy(jax.vmap(jax.vmap(model))(x), y, w)


def batch(loss_fn, seed=1):
    """In NumPy."""
    rng = np.random.default_rng(seed)
    leading = (N, T) if loss_fn is tokens else (N,)
    return rng.normal(size=leading + (5,)), rng.integers(K, size=leading)


@eqx.filter_jit
def net(sharing=kfac.Expand()):
    return Net(jax.random.key(0), sharing)


LOSS_FNS = pytest.mark.parametrize(
    "loss_fn", [examples, tokens], ids=["examples", "tokens"]
)
# (Sharing makes no difference where there is a term per example.)
CASES = pytest.mark.parametrize(
    "loss_fn, sharing",
    [(examples, kfac.Expand()), (tokens, kfac.Expand()), (tokens, kfac.Reduce())],
    ids=["examples", "expand", "reduce"],
)


@eqx.filter_jit
def compiled(loss_fn, fisher, model, *args):
    return kfac.value_grad_and_curvature(loss_fn, fisher)(model, *args)


def collect(loss_fn, fisher, model, *args):
    """`(value, grads, curvature)`; compiled once for all tests that ask for the same."""
    args = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    return compiled(loss_fn, fisher, model, *args)


def check_same(a, b):
    a, b = arrays(a), arrays(b)
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=TOLERANCE)


def check_different(a, b):
    """All of value, gradient and curvature differ somewhere."""
    for left, right in zip(a, b, strict=True):
        pairs = zip(arrays(left), arrays(right), strict=True)
        assert max(np.abs(x - y).max() for x, y in pairs) > 1e-3


def times(number, tree):
    """(In NumPy.)"""
    return [jnp.asarray(number * a) for a in arrays(tree)]


#
# Repeating and splitting
#


@FISHERS
@CASES
def test_repeated_batch(fisher, loss_fn, sharing):
    model, (x, y) = net(sharing), batch(loss_fn)
    once = collect(loss_fn, fisher, model, x, y)
    twice = collect(
        loss_fn, fisher, model, np.concatenate([x] * 2), np.concatenate([y] * 2)
    )
    check_same(twice, once)
    check_different(collect(loss_fn, fisher, model, 2 * x, y), once)


@FISHERS
@LOSS_FNS
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
def test_micro_batches(fisher, loss_fn, sizes):
    model, (x, y) = net(), batch(loss_fn)
    cuts = np.cumsum(sizes)[:-1]
    parts = [
        collect(loss_fn, fisher, model, *part)
        for part in zip(np.split(x, cuts), np.split(y, cuts), strict=True)
    ]
    mean = [
        jnp.asarray(sum(s * leaf for s, leaf in zip(sizes, leaves, strict=True)) / N)
        for leaves in zip(*map(arrays, parts), strict=True)
    ]
    check_same(mean, collect(loss_fn, fisher, model, x, y))


#
# Masks and weights
#


MASK = np.array([1, 0, 1, 1, 0, 1])
DTYPES = pytest.mark.parametrize("dtype", [bool, int, float, jnp.float32])


@FISHERS
@CASES
def test_masked_examples_are_removed(fisher, loss_fn, sharing):
    model, (x, y) = net(sharing), batch(loss_fn)
    kept = np.flatnonzero(MASK)
    masked = collect(loss_fn, fisher, model, x, y, MASK.astype(bool))
    check_same(masked, collect(loss_fn, fisher, model, x[kept], y[kept]))
    check_different(masked, collect(loss_fn, fisher, model, x, y))


@DTYPES
def test_types_of_masks(dtype):
    model, (x, y) = net(), batch(examples)
    kept = np.flatnonzero(MASK)
    masked = collect(examples, kfac.Exact(), model, x, y, MASK.astype(dtype))
    check_same(masked, collect(examples, kfac.Exact(), model, x[kept], y[kept]))


TOKEN_MASK = np.arange(T) < np.array([4, 1, 3, 2, 4, 2])[:, None]


@FISHERS
def test_masked_tokens_are_removed(fisher):
    model, (x, y) = net(), batch(tokens)
    masked = collect(tokens, fisher, model, x, y, TOKEN_MASK)
    # Expanded, every token is a row of its own.
    kept = collect(examples, fisher, model, x[TOKEN_MASK], y[TOKEN_MASK])
    check_same(masked, kept)
    check_different(masked, collect(tokens, fisher, model, x, y))


def test_masked_tokens_are_removed_when_reduced():
    fisher = kfac.Exact()
    model, (x, y) = net(kfac.Reduce()), batch(tokens)
    mask = np.broadcast_to(np.arange(T) < 2, (N, T))
    masked = collect(tokens, fisher, model, x, y, mask)
    check_same(masked, collect(tokens, fisher, model, x[:, :2], y[:, :2]))
    check_different(masked, collect(tokens, fisher, model, x, y))


def test_garbage_in_masked_rows():
    fisher = kfac.Exact()
    model, (x, y) = net(), batch(tokens)
    padded = np.where(TOKEN_MASK[..., None], x, 1e3)
    check_same(
        collect(tokens, fisher, model, padded, y, TOKEN_MASK),
        collect(tokens, fisher, model, x, y, TOKEN_MASK),
    )


COUNTS = np.array([2, 1, 0, 3, 4, 2])  # Of a sum (12) for which all is compiled.


@FISHERS
@CASES
def test_integer_weights_repeat(fisher, loss_fn, sharing):
    model, (x, y) = net(sharing), batch(loss_fn)
    repeated = [np.repeat(v, COUNTS, axis=0) for v in (x, y)]
    weighted = collect(loss_fn, fisher, model, x, y, COUNTS.astype(float))
    check_same(weighted, collect(loss_fn, fisher, model, *repeated))
    check_different(weighted, collect(loss_fn, fisher, model, x, y))


@pytest.mark.parametrize("dtype", [int, jnp.float32])
def test_types_of_weights(dtype):
    # The type of the weights must not limit the precision of the model.
    model, (x, y) = net(), batch(examples)
    weighted, repeated = (
        collect(examples, kfac.Exact(), model, *args)
        for args in [
            (x, y, COUNTS.astype(dtype)),
            (np.repeat(x, COUNTS, axis=0), np.repeat(y, COUNTS, axis=0)),
        ]
    )
    check_same(weighted, repeated)


def test_integer_token_weights_repeat():
    fisher = kfac.Exact()
    model, (x, y) = net(), batch(tokens)
    counts = np.random.default_rng(1).integers(4, size=(N, T))
    flat = [v.reshape((N * T,) + v.shape[2:]) for v in (x, y)]
    repeated = [np.repeat(v, counts.ravel(), axis=0) for v in flat]
    weighted = collect(tokens, fisher, model, x, y, counts.astype(float))
    check_same(weighted, collect(examples, fisher, model, *repeated))


@FISHERS
@LOSS_FNS
def test_only_ratios_of_weights_matter(fisher, loss_fn):
    model, (x, y) = net(), batch(loss_fn)
    w = np.array([0.1, 2.0, 0.7, 0.0, 1.0, 3.0])
    weighted = collect(loss_fn, fisher, model, x, y, w)
    check_same(collect(loss_fn, fisher, model, x, y, 5 * w), weighted)
    ones = collect(loss_fn, fisher, model, x, y, np.full(N, 3.0))
    check_same(ones, collect(loss_fn, fisher, model, x, y))


def test_weighted_factors_are_dense():
    # A deep linear network with squared error: weighted or not, the last layer is exact.
    rng = np.random.default_rng(0)
    model = eqx.nn.Linear(5, K, key=jax.random.key(0))
    x, t = (
        jax.device_put(rng.normal(size=(N, 5))),
        jax.device_put(rng.normal(size=(N, K))),
    )
    w = np.array([0.1, 2.0, 0.7, 0.0, 1.0, 3.0])

    def loss_fn(model):
        return kfac.SquaredError(jax.vmap(model)(x), t, jnp.asarray(w))

    _, grads, factors = collect(loss_fn, kfac.Exact(), kfac.convert(model))
    # Of squared errors: `I ⊗ A`, with the weighted mean of the homogeneous inputs.
    block, unweighted = (
        np.kron(np.eye(K), rows.T @ (v[:, None] * rows) / v.sum())
        for rows in [np.column_stack([x, np.ones(N)])]
        for v in (w, np.ones(N))
    )
    assert reference.error(reference.kron(factors), block) < TOLERANCE
    assert reference.error(reference.kron(factors), unweighted) > 0.1
    outputs = np.asarray(x) @ np.asarray(model.weight).T + np.asarray(model.bias)
    error = w[:, None] * (outputs - np.asarray(t)) / np.sum(w)
    assert reference.error(grads.weight, error.T @ np.asarray(x)) < TOLERANCE


def test_pooled_layers_see_masked_examples():
    fisher = kfac.Exact()
    # A head after pooling has fewer axes than the model's first layers; masked examples
    # are removed from both.
    model, (x, y) = net(), batch(tokens)
    y, kept = y[:, 0], np.flatnonzero(MASK)

    def loss_fn(model, x, y, w=None):
        first, _, third = model.layers
        hidden = jnp.mean(jnp.tanh(jax.vmap(jax.vmap(first))(x)), axis=1)
        return kfac.SoftmaxCrossEntropy(jax.vmap(third)(hidden), y, w)

    masked = collect(loss_fn, fisher, model, x, y, MASK)
    check_same(masked, collect(loss_fn, fisher, model, x[kept], y[kept]))


@LOSS_FNS
@pytest.mark.parametrize("solver", [kfac.Eigh(), kfac.Cholesky()], ids=["eigh", "chol"])
def test_all_masked(loss_fn, solver):
    model = kfac.Linear(5, K, key=jax.random.key(0))
    x, y = map(jnp.asarray, batch(loss_fn))
    optimizer = plain_kfac(0.1, 0.9, 1e-2, fisher=kfac.Exact(), solver=solver)
    step = eqx.filter_jit(optimizer.step)
    state = eqx.filter_jit(optimizer.init)(model)
    ones, none = jax.device_put(np.ones(N)), jax.device_put(np.zeros(N))
    model, state, info = step(loss_fn, model, state, x, y, ones)
    assert not info.rejected
    new, after, info = step(loss_fn, model, state, x, y, none)
    assert info.rejected and after.rejected == 1
    assert not np.isfinite(info.loss)
    check_same(new, model)
    for name in ("curvature", "inverse", "weight", "velocity"):
        check_same(getattr(after, name), getattr(state, name))
    # And the next batch is as if the empty one had not been.
    _, _, info = step(loss_fn, new, after, x, y, ones)
    assert not info.rejected


#
# Sums
#


@FISHERS
def test_coefficient(fisher):
    model, args = net(), tuple(map(jnp.asarray, batch(examples)))
    value, grads, curvature = collect(examples, fisher, model, *args)

    def scaled(model, coefficient):
        return coefficient * examples(model, *args)

    for coefficient in (2, 2.0, jnp.array(2.0)):
        new_value, new_grads, new = collect(scaled, fisher, model, coefficient)
        check_same([new_value, new_grads], times(2, [value, grads]))
        for factors, old in zip(new.layers, curvature.layers, strict=True):
            check_same(factors.output_factor, times(2, old.output_factor))
            check_same(factors.input_factor, old.input_factor)


@pytest.mark.parametrize("dtype", [bool, int, float, jnp.float32])
def test_array_coefficient_and_weights(dtype):
    x, y = map(jnp.asarray, batch(examples))
    w = jnp.asarray(MASK, dtype)

    def loss_fn(model, c):
        return c * examples(model, x, y, w)

    @eqx.filter_jit
    def run(model, c):
        estimate = kfac.curvature(loss_fn, kfac.Exact())
        return estimate(model, c), estimate(model, 2.0)

    check_same(*run(net(), jnp.array(2.0)))


class TwoHeads(eqx.Module):
    trunk: eqx.nn.Linear
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.trunk = eqx.nn.Linear(5, 4, key=keys[0])
        self.a = eqx.nn.Linear(4, 3, key=keys[1])
        self.b = eqx.nn.Linear(4, 2, key=keys[2])


def heads(model):
    return [model.a, model.b]


def run_head(head, model, x):
    return jax.vmap(lambda x: getattr(model, head)(jnp.tanh(model.trunk(x))))(x)


def two_heads():
    return eqx.filter_jit(TwoHeads)(jax.random.key(0))


def some(*shape):
    return jax.device_put(np.random.default_rng(shape[0]).normal(size=shape))


@ft.cache
def sum_of_losses(numbers):
    """What the library says, as a function of the second coefficient; and the blocks and
    losses of both heads."""
    xs = [some(n, 5) for n in numbers]
    ts = [some(n, d) for n, d in zip(numbers, (3, 2), strict=True)]

    def loss_fn(model, c):
        a = kfac.SquaredError(run_head("a", model, xs[0]), ts[0])
        return a + c * kfac.SquaredError(run_head("b", model, xs[1]), ts[1])

    model = two_heads()
    blocks, losses = [], []
    for i, head in enumerate(("a", "b")):
        run = eqx.filter_jit(lambda model, head=head, i=i: run_head(head, model, xs[i]))
        blocks.append(reference.ggn(run, model, heads, reference.squared, ts[i])[i])
        away = np.asarray(run(model)) - np.asarray(ts[i])
        losses.append(np.mean(np.sum(away**2, axis=1)) / 2)
    model = kfac.convert(model)
    return lambda c: collect(loss_fn, kfac.Exact(), model, c), blocks, losses


@pytest.mark.parametrize("numbers", [(6, 6), (4, 7)], ids=["same-n", "different-n"])
@pytest.mark.parametrize("c", [0.5, 3.0])
def test_sum_of_losses(numbers, c):
    run, blocks, losses = sum_of_losses(numbers)
    value, _, tree = run(jnp.array(c))
    # Last layers with squared error are exact, each in its own loss.
    assert reference.error(reference.kron(tree.a), blocks[0]) < TOLERANCE
    assert reference.error(reference.kron(tree.b), c * blocks[1]) < TOLERANCE
    assert reference.error(value, losses[0] + c * losses[1]) < TOLERANCE


@pytest.mark.parametrize("numbers", [(6, 6), (4, 7)], ids=["same-n", "different-n"])
def test_output_factors_of_a_sum_add_up(numbers):
    xs = [some(n, 5) for n in numbers]

    def part(i):
        head = ("a", "b")[i]
        return lambda model: kfac.SoftmaxCrossEntropy(run_head(head, model, xs[i]))

    def both(model):
        return part(0)(model) + 0.5 * part(1)(model)

    @eqx.filter_jit
    def run(model):
        losses = part(0), part(1), both
        trees = [kfac.curvature(loss, kfac.Exact())(model) for loss in losses]
        return [(t.trunk.output_factor, t.trunk.input_factor) for t in trees]

    expand = kfac.Kronecker(kfac.Expand())
    found = jax.tree.map(np.asarray, run(kfac.convert(two_heads(), expand)))
    (G_a, A_a), (G_b, A_b), (G, A) = found
    assert reference.error(G, G_a + 0.5 * G_b) < TOLERANCE
    # The rows of both calls of the trunk are pooled.
    n, m = numbers
    assert reference.error(A, (n * A_a + m * A_b) / (n + m)) < TOLERANCE


@pytest.mark.parametrize("dtype", [bool, float])
@pytest.mark.parametrize("number", [6, 7], ids=["same-n", "different-n"])
def test_mask_of_one_loss_among_others(dtype, number):
    # A layer cannot tell which loss it serves: over the same examples the mean of their
    # weights counts for its inputs, and over different ones it is an error.
    model = kfac.convert(two_heads())
    x, other = np.asarray(some(6, 5)), some(number, 5)
    kept = np.flatnonzero(MASK)
    t, u = np.zeros((6, 3)), jax.device_put(np.zeros((number, 2)))

    def loss_fn(model, x, t, w):
        a = kfac.SquaredError(run_head("a", model, x), t, w)
        return a + kfac.SquaredError(run_head("b", model, other), u)

    mask = MASK.astype(dtype)
    if number == 7:
        with pytest.raises(ValueError, match="weights of shape"):
            collect(loss_fn, kfac.Exact(), model, x, t, mask)
        return
    masked = collect(loss_fn, kfac.Exact(), model, x, t, mask)
    removed = collect(loss_fn, kfac.Exact(), model, x[kept], t[kept], None)
    check_same(masked[:2], removed[:2])
    for a, b in zip(heads(masked[2]), heads(removed[2]), strict=True):
        check_same(a.output_factor, b.output_factor)
    w = (MASK + 1) / 2
    trunk = model.trunk
    h = np.tanh(x @ np.asarray(trunk.weight).T + np.asarray(trunk.bias))
    h = np.concatenate([h, np.ones((6, 1))], axis=-1)
    A = (w[:, None] * h).T @ h / np.sum(w)
    check_same(masked[2].a.input_factor, jnp.asarray(A))


@FISHERS
@pytest.mark.parametrize("array", [False, True], ids=["constant", "of-the-model"])
def test_penalties(fisher, array):
    model, args = net(), tuple(map(jnp.asarray, batch(examples)))

    def penalty(model):
        return 0.3 * jnp.sum(model.layers[0].weight ** 4) if array else 1.5

    def loss_fn(model, x, y):
        return examples(model, x, y) + penalty(model)

    value, grads, curvature = collect(examples, fisher, model, *args)
    new_value, new_grads, new = collect(loss_fn, fisher, model, *args)
    check_same(new, curvature)
    first = np.asarray(model.layers[0].weight)
    more = 0.3 * np.sum(first**4) if array else 1.5
    check_same(new_value, jax.device_put(np.asarray(value) + more))
    if array:
        weight = lambda m: m.layers[0].weight
        slope = np.asarray(weight(grads)) + 1.2 * first**3
        grads = eqx.tree_at(weight, grads, jnp.asarray(slope))
    check_same(new_grads, grads)


#
# L2
#


@FISHERS
@pytest.mark.parametrize("outer", [1, 2.0])
def test_l2(fisher, outer):
    model, args = net(), tuple(map(jnp.asarray, batch(examples)))

    def loss_fn(model, x, y):
        return outer * (examples(model, x, y) + kfac.L2(model, 0.1))

    value, grads, curvature = collect(examples, fisher, model, *args)
    new_value, new_grads, new = collect(loss_fn, fisher, model, *args)
    params = arrays(model)
    norm = sum(np.sum(p**2) for p in params)
    check_same(new_value, jnp.asarray(outer * (np.asarray(value) + 0.05 * norm)))
    slopes = [g + 0.1 * p for g, p in zip(arrays(grads), params, strict=True)]
    check_same(new_grads, [jnp.asarray(outer * slope) for slope in slopes])
    for factors, old in zip(new.layers, curvature.layers, strict=True):
        assert abs(factors.l2 - 0.1 * outer) < TOLERANCE
        assert old.l2 == 0
        # It is kept apart from the factors.
        check_same(factors.output_factor, times(outer, old.output_factor))
        check_same(factors.input_factor, old.input_factor)


def test_l2_of_a_part():
    model, args = net(), tuple(map(jnp.asarray, batch(examples)))

    def loss_fn(model, x, y):
        penalty = kfac.L2(model.layers[0].weight, 0.1) + kfac.L2(model.layers[2], 0.2)
        return examples(model, x, y) + penalty + kfac.L2(model.layers[2], 0.3)

    _, _, tree = collect(loss_fn, kfac.Exact(), model, *args)
    # One number a layer: the mean over its parameters, here 20 of 20 + 4.
    expected = [0.1 * 20 / 24, 0.0, 0.5]
    for factors, l2 in zip(tree.layers, expected, strict=True):
        assert abs(factors.l2 - l2) < TOLERANCE


@pytest.mark.parametrize("solver", [kfac.Eigh(), kfac.Cholesky()], ids=["eigh", "chol"])
def test_l2_is_damping(solver):
    # A step with L2 is a step with that much more damping, on the sum's gradient.
    model = kfac.Linear(5, K, key=jax.random.key(0))
    x, y = map(jnp.asarray, batch(examples))

    def l2(model, x, y):
        return examples(model, x, y) + kfac.L2(model, 0.1)

    def penalty(model, x, y):
        params = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        return examples(model, x, y) + 0.05 * sum(jnp.sum(p**2) for p in params)

    def stepped(loss_fn, damping):
        optimizer = plain_kfac(0.1, 0.0, damping, fisher=kfac.Exact(), solver=solver)
        step = eqx.filter_jit(optimizer.step)
        model_, _, info = step(loss_fn, model, optimizer.init(model), x, y)
        assert not info.rejected
        return model_

    found = stepped(l2, 0.2)
    check_same(found, stepped(penalty, 0.3))
    check_different([found], [stepped(penalty, 0.2)])


#
# Rows
#


def test_row_counts():
    # The corner of a factor with bias is the mean of 1 · 1 over its rows, however many.
    model, (x, y) = net(), batch(tokens)
    _, _, plain = collect(tokens, kfac.Exact(), model, x, y)
    _, _, masked = collect(tokens, kfac.Exact(), model, x, y, TOKEN_MASK)
    for tree in (plain, masked):
        assert abs(np.asarray(tree.layers[0].input_factor)[-1, -1] - 1) < TOLERANCE
        assert abs(np.asarray(tree.layers[2].input_factor)[-1, -1] - 1) < TOLERANCE


def test_unused_layer():
    model, (x, y) = net(), batch(examples)

    def loss_fn(model, x, y):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model.layers[0])(x)[:, :K], y)

    _, grads, tree = collect(loss_fn, kfac.Exact(), model, x, y)
    for factors in tree.layers[1:]:
        assert all(np.all(leaf == 0) for leaf in arrays(factors))
    assert all(np.all(g == 0) for g in arrays(grads.layers[1:]))
    assert np.all(np.diag(tree.layers[0].input_factor) > 0)
