"""Layers whose weight is masked: their part of a Kronecker product, and steps with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac.operators import KroneckerOperator, MaskedOperator

from .helpers import (
    assert_differs,
    assert_near,
    close,
    member,
    normal,
    raises,
    softmax,
    stepped,
)


D_IN, WIDTH, CLASSES = 4, 6, 3
MASKS = (
    np.random.default_rng(1).random((WIDTH, D_IN)) < 0.6,
    np.random.default_rng(2).random((CLASSES, WIDTH)) < 0.6,
)
EVERYTHING = tuple(np.ones_like(mask) for mask in MASKS)


class Layer(eqx.Module):
    """A masked layer that was written with a tag."""

    weight: jax.Array
    bias: jax.Array | None
    tag: kfac.Tag
    mask: jax.Array  # Of booleans, which nobody trains.

    def __init__(self, mask, block, bias, told, key):
        d_out, d_in = mask.shape
        self.weight = jr.normal(key, mask.shape)
        self.bias = jnp.zeros(d_out) + 0.1 if bias else None
        form = kfac.form.Dense()
        form = form if told is None else kfac.form.Masked(form, told)
        self.tag = kfac.Tag(form, block)
        self.mask = jnp.asarray(mask, bool)

    def __call__(self, x):
        z = jnp.where(self.mask, self.weight, 0) @ x
        return self.tag(z if self.bias is None else z + self.bias, x)


class Net(eqx.Module):
    layers: list

    def __init__(self, block=kfac.Kronecker(), bias=True, masks=MASKS, told=MASKS):
        keys = jr.split(jr.key(0))
        each = zip(masks, told, keys, strict=True)
        self.layers = [Layer(mask, block, bias, own, key) for mask, own, key in each]

    def __call__(self, x):
        first, last = self.layers
        return last(jnp.tanh(first(x)))


def batch(number=16):
    return normal(number, D_IN), jnp.arange(number) % CLASSES


def used(layer):
    """Which entries of a layer's matrix are used."""
    mask = np.asarray(layer.mask)
    if layer.bias is None:
        return mask
    return np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)


def matrix(layer, like=None):
    layer = layer if like is None else like
    columns = [] if layer.bias is None else [layer.bias[:, None]]
    return np.concatenate([layer.weight, *columns], axis=1)


#
# What a mask is
#


@pytest.mark.parametrize(
    "mask", [np.full((2, 3), 0.5), np.ones(3), np.ones((2, 3, 1)), np.full((2, 2), -1)]
)
def test_masks_are_matrices_of_zeros_and_ones(mask):
    with raises(ValueError, "`mask` must be a matrix [d_out, d_in]", str(mask.shape)):
        kfac.form.Masked(kfac.form.Dense(), mask)


def test_masks_are_of_the_size_of_the_layer():
    model = Net(told=MASKS[::-1])
    with raises(ValueError, "has the shape (3, 6)", "6 x 4"):
        kfac.KFAC().init(model)


def test_forms_with_equal_masks_are_equal():
    dense, copies = kfac.form.Dense(), [np.array(mask) for mask in (MASKS[0], MASKS[0])]
    one, other = (kfac.form.Masked(dense, mask) for mask in copies)
    assert one == other and hash(one) == hash(other)
    copies[0][0, 0] ^= True
    assert kfac.form.Masked(dense, copies[0]) != other
    assert one.label == "Masked(Dense)" and "6 x 4" in repr(one)


#
# Curvature
#


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "block",
    [
        kfac.Kronecker(),
        kfac.Kronecker(kfac.Reduce()),
        kfac.Kronecker(kfac.TensorNormal()),
        kfac.Full(),
        kfac.EKFAC(),
        kfac.TNT(),
    ],
)
def test_the_block_of_one_example_is_exact(block, bias):
    model = Net(block, bias)
    report = kfac.verify(softmax, model, *batch(1))
    assert all(layer.verdict == "exact" for layer in report.layers), report


def test_diagonal_blocks_are_exact():
    model = Net(kfac.Diagonal())
    report = kfac.verify(softmax, model, *batch())
    assert "exact diagonal" in report.layers[0].verdict
    assert np.all([np.isclose(layer.ratio, 1) for layer in report.layers])


def test_verify_compares_large_layers_as_small_ones():
    small, large = (
        kfac.verify(softmax, Net(), *batch(), limit=limit) for limit in (4096, 1)
    )
    for own, other in zip(small.layers, large.layers, strict=True):
        close(other.error, own.error, 1e-6)
        close(other.cosine, own.cosine, 1e-6)


@pytest.mark.parametrize("limit", [4096, 1])
def test_verify_finds_another_mask(limit):
    right = kfac.verify(softmax, Net(), *batch(), limit=limit)
    assert not any("WRONG" in layer.verdict for layer in right.layers)
    wrong = kfac.verify(softmax, Net(told=(None, MASKS[1])), *batch(), limit=limit)
    assert "its tag sees" in wrong.layers[0].verdict.replace("did not see", "sees")
    assert "WRONG" not in wrong.layers[1].verdict


@pytest.mark.parametrize(
    "options", [{}, dict(learning_rate=1e-2, damping=1e-2, momentum=0.9)]
)
def test_a_mask_of_ones_changes_nothing(options):
    x, y = batch()
    x = x.at[:, 0].multiply(1e-2)  # So that biases are damped in units of their own.
    estimate = eqx.filter_jit(kfac.curvature(softmax, kfac.Exact()))
    plain = Net(masks=EVERYTHING, told=(None, None))
    masked = Net(masks=EVERYTHING, told=EVERYTHING)
    optimizer = kfac.KFAC(fisher=kfac.Exact(), **options)
    results = []
    for model in (plain, masked):
        factors = estimate(model, x, y)
        state = optimizer.init(model)
        for _ in range(3):
            model, state, _ = stepped(optimizer, softmax, model, state, x, y)
        results.append((factors, [matrix(layer) for layer in model.layers]))
    assert_near(*results)


def test_means_of_masked_gradients_are_not_subtracted():
    with raises(ValueError, ".layers[0]", "neither masked nor"):
        kfac.curvature(softmax, kfac.Centred())(Net(), *batch())


#
# Operators
#


def factors_of(size, seed):
    a = np.asarray(normal(size + 3, size, seed=seed))
    return jnp.asarray(a.T @ a / size)


def operator_and_mask(diagonal=False):
    mask = jnp.asarray(np.random.default_rng(3).random((5, 4)) < 0.5)
    G, A = factors_of(5, 1), factors_of(4, 2)
    return KroneckerOperator(G, jnp.diag(A) if diagonal else A), mask


@pytest.mark.parametrize("diagonal", [False, True])
def test_operator(diagonal):
    inner, mask = operator_and_mask(diagonal)
    operator = MaskedOperator(inner, mask)
    P = np.diag(np.asarray(mask, float).ravel())
    dense = P @ np.asarray(inner.as_matrix()) @ P
    close(operator.as_matrix(), dense)
    close(lx.diagonal(operator), np.diag(dense))
    close(kfac._operator.trace(operator), np.trace(dense))
    close(kfac._operator.squared_norm(operator), np.sum(dense**2))
    v = normal(5, 4)
    close(operator.mv(v).ravel(), dense @ np.asarray(v).ravel())
    assert lx.is_symmetric(operator) and lx.is_positive_semidefinite(operator)
    values = np.sort(np.linalg.eigvalsh(dense))
    close(np.sort(np.asarray(kfac._operator.eigenvalues(operator)).ravel()), values)


SOLVERS = [kfac.Eigh(), kfac.Cholesky(), kfac.Cholesky(scaled_bias=True)]


def damped_matrix(solver, inner, damping):
    """What the solver inverts where nothing is masked."""
    state = solver.init(inner, {"damping": jnp.asarray(damping), "bias": True})
    inverse = solver.inverse(state, jnp.asarray(damping))
    return np.linalg.inv(np.asarray(inverse.as_matrix()))


@pytest.mark.parametrize("solver", SOLVERS)
def test_solving(solver, monkeypatch):
    inner, mask = operator_and_mask()
    options = {"damping": 1e-2, "bias": True}
    where = np.flatnonzero(np.asarray(mask).ravel())
    v = np.where(mask, normal(5, 4, seed=4), 0)
    dense = damped_matrix(solver, inner, 1e-2)[np.ix_(where, where)]

    def solved():
        operator = MaskedOperator(inner, mask)
        state = solver.init(operator, options)
        return np.asarray(solver.compute(state, jnp.asarray(v), options)[0])

    few = solved()
    assert np.all(few[~np.asarray(mask)] == 0)
    # The step is as long as its curvature says.
    own = few.ravel()[where]
    close(own @ dense @ own, np.sum(few * v), 1e-12)
    exact = np.linalg.solve(dense, v.ravel()[where])
    energy = lambda u: np.sum(u * v.ravel()[where])
    # Better than the part of the inverse; and in the end, the solution.
    part = np.linalg.inv(damped_matrix(solver, inner, 1e-2))[np.ix_(where, where)]
    rough = part @ v.ravel()[where]
    rough = rough * energy(rough) / (rough @ dense @ rough)
    assert energy(rough) < energy(own) < energy(exact)
    monkeypatch.setattr("eqx_kfac._solver._masked.STEPS", 30)
    close(solved().ravel()[where], exact, 1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solving_without_a_mask(solver):
    inner, mask = operator_and_mask()
    options, v = {"damping": 1e-2, "bias": True}, normal(5, 4)
    solve = lambda op: lx.linear_solve(op, v, solver, options=options).value
    want = solve(inner)
    close(solve(MaskedOperator(inner, jnp.ones_like(mask))), want)
    # What has a gradient is there, whatever the mask says.
    close(solve(MaskedOperator(inner, mask)), want)
    zeros = lx.linear_solve(MaskedOperator(inner, mask), 0 * v, solver, options=options)
    assert np.all(np.asarray(zeros.value) == 0)


def test_after_training():
    model, (x, y) = Net(), batch()
    curvature = eqx.filter_jit(kfac.curvature(softmax, kfac.Exact()))(model, x, y)
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    params = eqx.filter(model, eqx.is_inexact_array)
    dense = []
    for layer, factors in zip(model.layers, curvature.layers, strict=True):
        P = np.diag(used(layer).ravel().astype(float))
        dense.append(P @ np.kron(factors.output_factor, factors.input_factor) @ P)
    product = operator.mv(params)
    for layer, own, C in zip(product.layers, params.layers, dense, strict=True):
        close(matrix(layer).ravel(), C @ matrix(own).ravel())
    inverse = operator.inverse(1e-2).mv(params)
    for layer, own, C in zip(inverse.layers, params.layers, dense, strict=True):
        want = np.linalg.solve(C + 1e-2 * np.eye(len(C)), matrix(own).ravel())
        close(matrix(layer).ravel(), want)
    logdets = [np.linalg.slogdet(C + 1e-2 * np.eye(len(C)))[1] for C in dense]
    close(operator.logdet(1e-2), sum(logdets))
    # Gradients of single examples, and what they say of each other.
    captured = kfac.analysis.capture(softmax)(model, x, y)
    one = lambda model, x, y: softmax(model, x[None], y[None]).value
    grads = jax.vmap(eqx.filter_grad(one), in_axes=(None, 0, 0))(model, x, y)
    flat = []
    for layer, own in zip(captured.layers, grads.layers, strict=True):
        want = np.concatenate([own.weight, own.bias[..., None]], axis=-1)
        close(layer.gradients(), want)
        flat.append(want.reshape(len(x), -1))
    influence = kfac.analysis.influence(softmax, curvature, 1e-2)
    pairs = zip(flat, dense, strict=True)
    inverses = [(g, np.linalg.inv(C + 1e-2 * np.eye(len(C)))) for g, C in pairs]
    want = sum(g[:3] @ inverse @ g.T for g, inverse in inverses)
    close(influence(model, (x[:3], y[:3]), (x, y)), want)
    close(influence.of_itself(model, (x[:3], y[:3])), np.diag(want[:, :3]))


#
# Steps
#


@pytest.mark.parametrize(
    "optimizer", [kfac.KFAC(), kfac.KFAC(0.1, fisher=kfac.Exact(), damping=1e-2)]
)
def test_what_is_masked_stays(optimizer):
    model, (x, y) = Net(), batch()
    start, state = model, optimizer.init(model)
    first = softmax(model, x, y).value
    for i in range(10):
        model, state, info = stepped(
            optimizer, softmax, model, state, x, y, key=jr.key(i)
        )
    assert info.loss < first
    for layer, before in zip(model.layers, start.layers, strict=True):
        moved = np.asarray(layer.weight != before.weight)
        assert np.array_equal(moved, np.asarray(layer.mask))


@pytest.mark.parametrize("in_a_batch", [False, True])
def test_layers_of_one_shape_have_their_own_masks(in_a_batch, monkeypatch):
    """Layers of equal shapes are solved for in one batch on an accelerator."""
    if in_a_batch:
        elsewhere = lambda jobs, cpu, elsewhere: elsewhere(jobs)
        monkeypatch.setattr("eqx_kfac._jobs._by_platform", elsewhere)
    masks = [np.tri(4), np.tri(4).T]
    keys = jr.split(jr.key(0))
    layers = [
        Layer(np.asarray(mask, bool), kfac.Kronecker(), False, mask, key)
        for mask, key in zip(masks, keys, strict=True)
    ]
    net = eqx.nn.Sequential([eqx.nn.Lambda(layer) for layer in layers])
    x, y = normal(8, 4), jnp.arange(8) % 4
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact(), damping=1e-2)
    # A function of its own, which nobody has compiled before.
    step = eqx.filter_jit(lambda *args: optimizer.step(softmax, *args))
    new, _, _ = step(net, optimizer.init(net), x, y)
    for old, new in zip(net.layers, new.layers, strict=True):
        moved = np.asarray(old.fn.weight != new.fn.weight)
        assert np.array_equal(moved, np.asarray(old.fn.mask))


def test_half_of_a_mask_is_no_mask_of_a_network_without():
    """A mask has a say in what a step is."""
    x, y = batch()
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact(), damping=1e-2)
    news = []
    for told in (MASKS, EVERYTHING):
        model = Net(told=told)
        new, _, _ = stepped(optimizer, softmax, model, optimizer.init(model), x, y)
        news.append(np.where(MASKS[0], new.layers[0].weight - model.layers[0].weight, 0))
    assert_differs(*news)


#
# Converted models
#


class Plain(eqx.Module):
    weight: jax.Array
    mask: jax.Array

    def __call__(self, x):
        return jnp.where(self.mask, self.weight, 0) @ x


def test_stacked_models():
    """An ensemble of masked networks steps as each of its members."""
    make = lambda key: Plain(
        jr.normal(key, (CLASSES, D_IN)), jnp.asarray(MASKS[1][:, :4])
    )
    members = eqx.filter_vmap(make)(jr.split(jr.key(0), 2))
    converted = kfac.convert(member(members, 0), example=normal(D_IN))
    (path, tag, _), *_ = kfac._tag.trained_layers(converted)
    assert tag.form.mask is not None
    x, y = batch()
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact(), damping=1e-2)

    def step(model):
        converted_again = eqx.tree_at(lambda m: m.weight, converted, model.weight)
        state = optimizer.init(converted_again)
        new, _, _ = optimizer.step(softmax, converted_again, state, x, y)
        return new.weight

    together = eqx.filter_vmap(step)(members)
    for i in range(2):
        close(together[i], eqx.filter_jit(step)(member(members, i)), 1e-9)


def test_a_traced_model_has_no_masks():
    """Nobody knows what is in a mask that is being traced."""
    model = Plain(jr.normal(jr.key(0), (CLASSES, D_IN)), jnp.asarray(MASKS[1][:, :4]))

    @eqx.filter_jit
    def converted(model):
        return kfac.convert(model, example=jnp.zeros(D_IN))

    (_, tag, _), *_ = kfac._tag.trained_layers(converted(model))
    assert isinstance(tag.form, kfac.form.Parameters)


def test_another_mask_later():
    """An entry that was masked when the model was converted is trained from then on."""
    model = Plain(jr.normal(jr.key(0), (CLASSES, D_IN)), jnp.asarray(MASKS[1][:, :4]))
    converted = kfac.convert(model, example=normal(D_IN))
    full = eqx.tree_at(lambda m: m.mask, converted, jnp.ones((CLASSES, D_IN), bool))
    x, y = batch()
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact(), damping=1e-2)
    new, _, info = stepped(optimizer, softmax, full, optimizer.init(full), x, y)
    assert np.all(np.asarray(new.weight != full.weight))
    again = kfac.convert(kfac.revert(full), example=normal(D_IN))
    want, _, _ = stepped(optimizer, softmax, again, optimizer.init(again), x, y)
    close(new.weight, want.weight)
