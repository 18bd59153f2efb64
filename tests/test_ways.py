"""Rows that reach the losses in several ways, or several losses, and stacked layers that
are repeated, or looked up: what is right there, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqx_kfac as kfac
from eqx_kfac._program import _joint
from eqx_kfac._program._reach import SUMMED
from eqx_kfac._program._trace import axes_of_terms

from .helpers import close, filled, leaves, normal, relative
from .reference import from_partial_traces, kron


N, T, D = 4, 3, 2
KEYS = jax.random.split(jax.random.key(0), 4)
EXPAND, JOINT = kfac.Kronecker(kfac.Expand()), kfac.Kronecker()
EXACT, APART = kfac.Exact(), kfac.Exact(0)
ORDER = np.array([2, 0, 3, 1])
PAIRS = normal(N, 2, D, seed=1)
TOKENS = normal(N, T, D, seed=2)


class Heads(eqx.Module):
    """A layer, and one for each of two losses."""

    layer: eqx.nn.Linear
    one: eqx.nn.Linear
    two: eqx.nn.Linear

    def __init__(self):
        make = lambda key: eqx.nn.Linear(D, D, key=key)
        self.layer, self.one, self.two = map(make, KEYS[:3])

    def embed(self, x):
        return jnp.tanh(jax.vmap(self.layer)(x))


def heads(block):
    """A model whose first layer has a block."""
    chosen = lambda path, _: block if path == ".layer" else EXPAND
    return kfac.convert(filled(Heads), chosen)


def squared(outputs):
    return kfac.SquaredError(outputs, jnp.zeros_like(outputs))


def factors_of(loss_fn, model, x, fisher=EXACT):
    return eqx.filter_jit(kfac.curvature(loss_fn, fisher))(model, x).layer


def exact_block(loss_fn, x, examples):
    """The Gauss-Newton matrix of the first layer, bias last, from JAX's derivatives: of
    squared errors, each a mean over so many `examples`."""
    model = kfac.revert(heads(JOINT))
    layer = model.layer
    matrix = jnp.concatenate([layer.weight, layer.bias[:, None]], axis=1)

    def outputs(matrix):
        at = lambda m: (m.layer.weight, m.layer.bias)
        new = eqx.tree_at(at, model, (matrix[:, :-1], matrix[:, -1]))
        loss = loss_fn(new, x)
        losses = [loss] if isinstance(loss, kfac.SquaredError) else loss.losses
        return [loss.outputs for loss in losses]

    jacobians = [
        a.reshape(-1, matrix.size) / np.sqrt(n)
        for a, n in zip(jax.jacobian(outputs)(matrix), examples, strict=True)
    ]
    return sum(J.T @ J for J in jacobians)


#
# In another order in one of the ways
#


def on_a_coin(model, x):
    """Partners, who are others' on a condition that all examples share."""
    a, b = map(model.embed, (x[:, 0], x[:, 1]))
    b = lax.cond(jnp.sum(x) > 0, lambda b: b[ORDER], lambda b: b, b)
    return squared(jax.vmap(model.one)(a * b))


def in_some_rounds(model, x):
    def body(h, i):
        h = model.embed(h + x[:, 1])
        return lax.cond(i % 2 == 0, lambda h: h[::-1], lambda h: h, h), None

    return squared(jax.vmap(model.one)(lax.scan(body, x[:, 0], jnp.arange(3))[0]))


def selected(model, x):
    a, b = map(model.embed, (x[:, 0], x[:, 1]))
    b = jnp.where(x[:, :1, 0] > 0, b[ORDER], b)
    return squared(jax.vmap(model.one)(a * b))


def added_up(model, x):
    a, b = map(model.embed, (x[:, 0], x[:, 1]))
    return squared(jax.vmap(model.one)(a * jnp.cumsum(b, axis=0)))


def matched_and_not(model, x):
    """Pairs that belong together, and others."""
    a, b = map(model.embed, (x[:, 0], x[:, 1]))
    matched, others = jax.vmap(model.one)(a * b), jax.vmap(model.two)(a * b[ORDER])
    return squared(matched) + squared(others)


def in_order(model, x):
    a, b = map(model.embed, (x[:, 0], x[:, 1]))
    return squared(jax.vmap(model.one)(a * b)) + squared(jax.vmap(model.two)(a + b))


@pytest.mark.parametrize(
    "loss_fn", [on_a_coin, in_some_rounds, selected, added_up, matched_and_not]
)
def test_uses_in_another_order_are_expanded(loss_fn):
    """Gradients that are added up over uses are those of one example only if all ways to
    all losses say so."""
    joint, expanded = (factors_of(loss_fn, heads(b), PAIRS) for b in (JOINT, EXPAND))
    for a, b in zip(*map(leaves, (joint, expanded)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_uses_in_one_order_are_joint():
    joint, expanded = (factors_of(in_order, heads(b), PAIRS) for b in (JOINT, EXPAND))
    F = exact_block(in_order, PAIRS, (N, N))
    close(kron(joint), from_partial_traces(F, D))
    assert relative(kron(expanded), kron(joint)) > 1e-2


#
# Losses with other terms
#


def of_tokens_and_texts(model, x):
    """A loss of all tokens in a row, and one of each text."""
    h = jax.vmap(model.embed)(x)
    of_tokens = jax.vmap(model.one)(h.reshape(-1, D))
    return squared(of_tokens) + squared(jax.vmap(model.two)(jnp.mean(h, axis=1)))


def time_first(model, x):
    """A loss whose terms have the time first, and one of the last state."""

    def body(h, row):
        h = model.embed(h + row)
        return h, h

    last, states = lax.scan(body, jnp.zeros((N, D)), jnp.moveaxis(x, 1, 0))
    return squared(jax.vmap(jax.vmap(model.one))(states)) + squared(
        jax.vmap(model.two)(last)
    )


def test_terms_of_one_loss_are_joined():
    """Which tokens are those of a term, nobody knows: so only if every term has a
    cotangent of its own may the gradients of a text be added up."""
    F = exact_block(of_tokens_and_texts, TOKENS, (N * T, N))
    apart = factors_of(of_tokens_and_texts, heads(JOINT), TOKENS, APART)
    close(kron(apart), from_partial_traces(F, D))
    joint, expanded = (
        factors_of(of_tokens_and_texts, heads(b), TOKENS) for b in (JOINT, EXPAND)
    )
    for a, b in zip(*map(leaves, (joint, expanded)), strict=True):
        np.testing.assert_array_equal(a, b)
    for block in (kfac.TNT(), kfac.Full()):
        factors_of(of_tokens_and_texts, heads(block), TOKENS, APART)
        with pytest.raises(ValueError, match=r"layers `.layer` add up the gradients of"):
            factors_of(of_tokens_and_texts, heads(block), TOKENS)
    report = kfac.verify(of_tokens_and_texts, heads(JOINT), TOKENS)
    assert report.layers[0].block == "Kronecker(Joint)"
    np.testing.assert_allclose(report.layers[0].ratio, 1, rtol=1e-6)


def test_terms_of_one_loss_have_the_time_first():
    joint, expanded = (factors_of(time_first, heads(b), TOKENS) for b in (JOINT, EXPAND))
    for a, b in zip(*map(leaves, (joint, expanded)), strict=True):
        np.testing.assert_array_equal(a, b)
    for block in (kfac.TNT(), kfac.Full()):
        with pytest.raises(ValueError, match="which axis of the layer `.layer` counts"):
            factors_of(time_first, heads(block), TOKENS, APART)


def test_more_losses_than_can_be_told_apart():
    some = axes_of_terms([(N, T), (N,), (N, T)])
    assert some == [range(0, 2), range(2, 3), range(3, 5)]
    assert axes_of_terms([(N, T)] * SUMMED) == [range(2)] * SUMMED


#
# Rows that serve all examples in one of the ways
#


def contrast(model, x):
    """Each example is compared with all others, by the same layer."""
    h = model.embed(x[:, 0])
    return kfac.SoftmaxCrossEntropy(h @ jnp.roll(h, 1, axis=1).T, jnp.arange(N))


def both_ways(model, x):
    """Two layers, one for each side; each side is the classes of the other."""
    scores = model.embed(x[:, 0]) @ jax.vmap(model.one)(x[:, 1]).T
    of = lambda scores: kfac.SoftmaxCrossEntropy(scores, jnp.arange(N))
    return of(scores) + of(scores.T)


def differences(model, x):
    h = model.embed(x[:, 0])
    return squared(jnp.tanh(h[:, None] - h[None]))


@pytest.mark.parametrize("loss_fn", [contrast, both_ways, differences])
def test_rows_that_serve_all_examples_are_refused(loss_fn):
    with pytest.raises(ValueError, match="`.layer`.* return serves? several"):
        factors_of(loss_fn, heads(JOINT), PAIRS)
    factors_of(loss_fn, heads(JOINT), PAIRS, APART)
    for block in (kfac.TNT(), kfac.Full(), kfac.Kronecker(kfac.Reduce())):
        with pytest.raises(ValueError, match="which axis of the layer `.layer` counts"):
            factors_of(loss_fn, heads(block), PAIRS, APART)


def test_a_mean_over_the_batch_is_not():
    """What batch normalisation subtracts serves all examples, too, but is no row."""

    def normalised(model, x):
        h = jax.vmap(model.layer)(x[:, 0])
        return squared(jnp.tanh(h - jnp.mean(h, axis=0)[None]))

    def named(model, x):
        def one(row):
            h = model.layer(row)
            return jnp.tanh(h - lax.pmean(h, "batch"))

        return squared(jax.vmap(one, axis_name="batch")(x[:, 0]))

    for block in (JOINT, kfac.TNT()):
        found = [factors_of(fn, heads(block), PAIRS) for fn in (normalised, named)]
        for a, b in zip(*map(leaves, found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_rounds_over_what_was_made_before_are_not():
    """Every round of a loop looks up the row of its example."""

    def looked_up(model, x):
        h = model.embed(x[:, 0])
        return squared(lax.map(lambda i: model.one(h[i]), jnp.arange(N)))

    def at_once(model, x):
        return squared(jax.vmap(model.one)(model.embed(x[:, 0])))

    both = [factors_of(fn, heads(JOINT), PAIRS) for fn in (looked_up, at_once)]
    for a, b in zip(*map(leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


#
# Layers of a stack
#


STACKED = eqx.filter_vmap(lambda key: eqx.nn.Linear(D, D, key=key))(KEYS[:2])
TWICE = lambda a: jnp.concatenate([a, a])
EACH_TWICE = lambda a: jnp.repeat(a, 2, axis=0)


def one_after_the_other(change):
    """A network whose layers are those of the stack, after a change of it."""

    def outputs(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)

        def body(h, arrays):
            rows = jax.vmap(jax.vmap(eqx.combine(arrays, static)))(h)
            return jnp.tanh(rows + jnp.mean(h, axis=1, keepdims=True)), None

        h, _ = lax.scan(body, x, jtu.tree_map(change, arrays))
        return jnp.mean(h, axis=1)

    return outputs


def side_by_side(stack, x):
    """Each layer gets two of the tokens of an example, whose product is taken."""
    arrays, static = eqx.partition(stack, eqx.is_array)
    member = lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)
    x = jnp.concatenate([x, x[:, :1]], axis=1)
    h = jax.vmap(member)(jtu.tree_map(EACH_TWICE, arrays), jnp.moveaxis(x, 1, 0))
    return jnp.prod(jnp.tanh(h), axis=0)


REPEATED = {
    "as they are": one_after_the_other(lambda a: a),
    "all, and again": one_after_the_other(TWICE),
    "each twice": one_after_the_other(EACH_TWICE),
    "side by side": side_by_side,
}


@pytest.mark.parametrize("name", REPEATED)
def test_layers_of_a_stack_that_is_repeated(name):
    """Gradients are added up over all places of a layer before they are squared."""
    outputs = REPEATED[name]
    loss_fn = lambda stack, x: squared(outputs(stack, x))
    collect = lambda block: eqx.filter_jit(kfac.curvature(loss_fn, EXACT))(
        kfac.convert(STACKED, block), TOKENS
    )
    matrix = jnp.concatenate([STACKED.weight, STACKED.bias[..., None]], axis=2)

    def of_matrix(matrix):
        at = lambda s: (s.weight, s.bias)
        new = eqx.tree_at(at, STACKED, (matrix[..., :-1], matrix[..., -1]))
        return outputs(new, TOKENS)

    J = jax.jacobian(of_matrix)(matrix).reshape(N * D, 2, -1)
    blocks = np.einsum("nki,nkj->kij", J, J) / N
    joint, full = collect(JOINT), collect(kfac.Full())
    for i, F in enumerate(blocks):
        close(full.matrix[i], F)
        factors = jtu.tree_map(lambda a: a[i], joint)  # noqa: B023
        close(kron(factors), from_partial_traces(F, D))


@pytest.mark.parametrize("length", [N, N + 1])
def test_layers_that_examples_look_up(length):
    """A layer of the stack for every example: the axis of `vmap` that is the stack's is
    that of the examples."""
    chosen, x = np.array([0, 1, 1, 0]), normal(N, length, D, seed=3)

    def rows(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)
        arrays = jtu.tree_map(lambda a: a[chosen], arrays)
        call = lambda arrays, x: jnp.tanh(jax.vmap(eqx.combine(arrays, static))(x))
        h = jax.vmap(call)(arrays, x)
        return h + jnp.mean(h, axis=1, keepdims=True)

    pooled = lambda stack, x: squared(jnp.mean(rows(stack, x), axis=1))
    collect = lambda fn, block: kfac.curvature(fn, EXACT)(kfac.convert(STACKED, block), x)
    collect(pooled, EXPAND)
    for fn in (pooled, lambda stack, x: squared(rows(stack, x))):
        for block in (kfac.TNT(), kfac.Full()):
            with pytest.raises(ValueError, match="which axis of .* counts the examples"):
                collect(fn, block)


#
# Micro-batches
#


def called_twice(model, x):
    h = model.embed(model.embed(x[:, 0]))
    return squared(jax.vmap(model.two)(jax.vmap(model.one)(h)))


@pytest.mark.parametrize("most", [2**21, N * D * (D + 1) // 2])
def test_micro_batches_are_as_joint_as_the_batch(most, monkeypatch):
    """Also those of one example, and however many numbers are too many."""
    monkeypatch.setattr(_joint, "_MOST", most)
    jax.clear_caches()  # No program knows of this number.
    model, optimizer = heads(JOINT), kfac.KFAC(0.05, 0.0, 0.1, fisher=EXACT)
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.step)
    found = [
        step(called_twice, model, state, PAIRS, micro_batches=k)[1].curvature
        for k in (1, 2, N)
    ]
    for other in found[1:]:
        for a, b in zip(*map(leaves, (found[0], other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)
    expanded = heads(EXPAND)
    _, other, _ = step(called_twice, expanded, optimizer.init(expanded), PAIRS)
    same = map(np.array_equal, *map(leaves, (found[0], other.curvature)))
    assert all(same) == (most < N * D * (D + 1))
