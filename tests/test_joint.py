"""Positions of an example that are taken jointly: `kfac.Joint`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._program import _joint
from eqx_kfac.factors import KroneckerFactors

from .helpers import close, equations_of, filled, normal, relative
from .reference import from_partial_traces, kron


N, T, D = 3, 4, 3
EXPAND, JOINT = kfac.Kronecker(kfac.Expand()), kfac.Kronecker()
KEY = jax.random.key(0)
PLACES = np.cos(np.arange(1.0 * T * D)).reshape(T, D)


class Attending(eqx.Module):
    """Tokens that look at each other, are looked at one by one, and pooled."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    out: eqx.nn.Linear

    def __init__(self, width=D, hidden=5):
        keys = jax.random.split(KEY, 3)
        self.attention = eqx.nn.MultiheadAttention(1, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, hidden, 1, jnp.tanh, key=keys[1])
        self.out = eqx.nn.Linear(width, 2, key=keys[2])

    def __call__(self, x):
        x = x + self.attention(x, x, x)
        return self.out(jnp.mean(x + jax.vmap(self.mlp)(x), axis=0))


class Each(eqx.Module):
    """One layer, and how it is called for an example."""

    layer: eqx.Module
    call: object = eqx.field(static=True)

    def __call__(self, x):
        # All outputs together, so that positions depend on each other.
        mixing = jnp.cos(jnp.arange(2 * D * T).reshape(D * T, 2))
        return jnp.tanh(self.call(self.layer, x)).reshape(-1) @ mixing


def squared(model, x):
    return kfac.SquaredError(jax.vmap(model)(x), jnp.zeros((len(x), 2)))


def softmax(model, x):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), jnp.zeros(len(x), int))


def factors_of(loss_fn, model, *args, fisher=kfac.Exact()):
    """Of all layers, in order."""
    found = eqx.filter_jit(kfac.curvature(loss_fn, fisher))(model, *args)
    is_factors = lambda node: isinstance(node, KroneckerFactors)
    return jtu.tree_leaves(found, is_leaf=is_factors)


def exact_block(loss_fn, model, where, x):
    """The Gauss-Newton matrix of one layer's canonical matrix, from JAX's derivatives."""
    model = kfac.revert(model)
    layer = where(model)
    parts = [a for a in (layer.weight, layer.bias) if a is not None]

    def outputs(parts):
        new = dict(zip(("weight", "bias"), parts))
        swapped = model
        for name, value in new.items():
            at = lambda m, name=name: getattr(where(m), name)
            swapped = eqx.tree_at(at, swapped, value)
        return loss_fn(swapped, x).outputs

    J = jax.jacobian(outputs)(parts)
    rows = [a.reshape(*a.shape[:2], len(layer.weight), -1) for a in J]
    J = np.concatenate(rows, axis=-1)
    J = J.reshape(*J.shape[:2], -1)
    z = outputs(parts)
    H = jnp.broadcast_to(jnp.eye(z.shape[1]), (*z.shape, z.shape[1]))
    if loss_fn is softmax:
        p = jax.nn.softmax(z)
        H = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
    return np.einsum("nki,nkl,nlj->ij", J, H, J) / len(x)


WHERE = [
    lambda m: m.attention.query_proj,
    lambda m: m.attention.key_proj,
    lambda m: m.attention.value_proj,
    lambda m: m.attention.output_proj,
    lambda m: m.mlp.layers[0],
    lambda m: m.mlp.layers[1],
]


def tokens(number=N, positions=T, width=D):
    return normal(number, positions, width, seed=1)


@pytest.mark.parametrize("width, hidden", [(3, 5), (9, 20)], ids=["written", "pairs"])
def test_factors_are_partial_traces_of_the_exact_block(width, hidden):
    """However they are computed."""
    x = tokens(width=width)
    make = lambda block: kfac.convert(filled(Attending, width, hidden), block)
    found = factors_of(softmax, make(JOINT), x)
    expanded = factors_of(softmax, make(EXPAND), x)
    for factors, other, where in zip(found, expanded, WHERE):
        F = exact_block(softmax, make(JOINT), where, x)
        want = from_partial_traces(F, len(factors.output_factor))
        close(kron(factors), want)
        assert relative(kron(other), want) > 1e-2
        np.testing.assert_allclose(np.trace(kron(factors)), np.trace(F), rtol=1e-10)
        # The trace of the input factor is a squared length, as it is of the other kind.
        sizes = np.trace(factors.input_factor) / np.trace(other.input_factor)
        assert 0.3 < sizes < 3
    # The last layer has no positions.
    for a, b in zip(jtu.tree_leaves(found[6]), jtu.tree_leaves(expanded[6])):
        np.testing.assert_array_equal(a, b)


def test_both_ways_are_taken():
    """Writing gradients out needs arrays of their shape; products of pairs do not."""
    for width, hidden, written in ((3, 5, True), (9, 20, False)):
        model = kfac.convert(Attending(width, hidden), JOINT)
        collect = kfac.curvature(softmax, kfac.Empirical())
        arrays, static = eqx.partition(model, eqx.is_array)
        program = equations_of(
            lambda a, x: collect(eqx.combine(a, static), x),  # noqa: B023
            arrays,
            tokens(width=width),
        )
        shapes = {v.aval.shape for eqn in program for v in eqn.outvars}
        assert ((N, hidden, width + 1) in shapes) == written


CALLS = {
    "vmap": lambda layer, x: jax.vmap(layer)(x),
    "twice mapped": lambda layer, x: jax.vmap(jax.vmap(layer))(x.reshape(2, T // 2, D)),
    "checkpoint": lambda layer, x: jax.checkpoint(lambda x: jax.vmap(layer)(x))(x),
    "jit": lambda layer, x: jax.jit(lambda x: jax.vmap(layer)(x))(x),
    "the same for all examples": lambda layer, x: x * jax.vmap(layer)(PLACES),
    "one example in a vmap": lambda layer, x: jax.vmap(jax.vmap(layer))(x[None])[0],
}


def linear(bias=True):
    return eqx.nn.Linear(D, D, use_bias=bias, key=KEY)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_however_positions_are_mapped(name, bias):
    model = kfac.convert(Each(linear(bias), CALLS[name]))
    (found,) = factors_of(squared, model, tokens())
    F = exact_block(squared, model, lambda m: m.layer, tokens())
    close(kron(found), from_partial_traces(F, D))


def assert_as_expanded(loss_fn, make, expand=EXPAND, joint=JOINT):
    """`Joint` is `Expand` there, bit for bit."""
    both = [factors_of(loss_fn, make(block), tokens()) for block in (joint, expand)]
    for a, b in zip(*map(jtu.tree_leaves, both), strict=True):
        np.testing.assert_array_equal(a, b)


def two_calls(layer, x):
    return jax.vmap(layer)(jnp.tanh(jax.vmap(layer)(x)))


def in_a_scan(layer, x):
    return jax.lax.scan(lambda _, row: (None, layer(row)), None, x)[1]


def again_and_again(layer, x):
    """The same weight at every depth."""
    step = lambda x, _: (jnp.tanh(jax.vmap(layer)(x)), None)
    return jax.lax.scan(step, x, None, length=2)[0]


def in_a_scan_of_depths(layer, x):
    """Rounds within rounds, and a call more."""
    depth = lambda x, _: (jnp.tanh(in_a_scan(layer, x)), None)
    return jnp.tanh(jax.vmap(layer)(jax.lax.scan(depth, x, None, length=2)[0]))


def if_positive(layer, x):
    """Twice, but the second time only for some examples: nobody knows for which."""
    y = jnp.tanh(jax.vmap(layer)(x))
    again = lambda y: jax.vmap(layer)(y)
    return jax.lax.cond(jnp.sum(x) > 0, again, lambda y: y, y)


USES = {
    "every depth": again_and_again,
    "two calls": two_calls,
    "scan": in_a_scan,
    "scan of depths": in_a_scan_of_depths,
    "checkpoint": lambda layer, x: jax.checkpoint(lambda x: two_calls(layer, x))(x),
    "one row, twice": lambda layer, x: jnp.tile(layer(jnp.tanh(layer(x[0]))), T),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", USES)
def test_gradients_of_all_uses_are_added_up(name, bias):
    make = lambda block: kfac.convert(Each(linear(bias), USES[name]), block)
    (found,) = factors_of(squared, make(JOINT), tokens())
    (other,) = factors_of(squared, make(EXPAND), tokens())
    F = exact_block(squared, make(JOINT), lambda m: m.layer, tokens())
    close(kron(found), from_partial_traces(F, D))
    assert relative(kron(other), kron(found)) > 1e-2
    # The trace of the input factor is a squared length, a mean weighted by gradients.
    block = kfac.Kronecker(kfac.TensorNormal())
    (weighted,) = factors_of(squared, make(block), tokens())
    length = np.trace(weighted.output_factor) / np.trace(other.output_factor)
    np.testing.assert_allclose(np.trace(found.input_factor), length, rtol=1e-9)
    report = kfac.verify(squared, make(JOINT), tokens())
    assert report.layers[0].block == "Kronecker(Joint)"


@pytest.mark.parametrize("most, written", [(N * T * (D + 1), True), (1, False)])
def test_what_is_too_much_to_be_written_out_is_expanded(most, written, monkeypatch):
    monkeypatch.setattr(_joint, "_MOST", most)
    make = lambda block: kfac.convert(Each(linear(), two_calls), block)
    if not written:
        assert_as_expanded(squared, make)
    else:
        with pytest.raises(AssertionError):
            assert_as_expanded(squared, make)


def test_uses_by_other_examples_are_expanded():
    """What the second call returns is for examples in another order."""

    def loss_fn(model, x):
        first = jax.vmap(model)(x)
        second = jax.vmap(model)(x)[::-1]
        outputs = jnp.tanh(first) @ jnp.cos(jnp.arange(9.0).reshape(3, 3)) + second
        return kfac.SquaredError(outputs, jnp.zeros_like(outputs))

    rows = tokens()[:, 0]
    found = [
        factors_of(loss_fn, kfac.convert(linear(), b), rows) for b in (JOINT, EXPAND)
    ]
    for a, b in zip(*map(jtu.tree_leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


SEPARATE = {
    "condition": (EXPAND, JOINT, if_positive),
    "wide inputs": (
        kfac.Kronecker(kfac.Expand(), widest=D - 1),
        kfac.Kronecker(widest=D - 1),
        CALLS["vmap"],
    ),
    "diagonal outputs": (
        kfac.Kronecker(kfac.Expand(), diagonal_output=True),
        kfac.Kronecker(diagonal_output=True),
        CALLS["vmap"],
    ),
    "one position": (EXPAND, JOINT, lambda layer, x: jnp.tile(layer(x[0]), T)),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_where_positions_are_taken_one_by_one(name):
    """Where they cannot be told, or need not be: as by `Expand`, bit for bit."""
    expand, joint, call = SEPARATE[name]
    make = lambda block: kfac.convert(Each(linear(), call), block)
    assert_as_expanded(squared, make, expand, joint)
    report = kfac.verify(squared, make(joint), tokens())
    assert report.layers[0].block.startswith("Kronecker(Expand)")


def test_loops_over_examples():
    """The axis that a layer then sees are the positions."""

    def looped(model, x):
        return kfac.SquaredError(jax.lax.map(model, x), jnp.zeros((len(x), 2)))

    make = lambda block: kfac.convert(Each(linear(), CALLS["vmap"]), block)
    assert_as_expanded(looped, make)


@pytest.mark.parametrize(
    "joined, positions, separate",
    [(False, N, False), (True, N, True), (True, N + 1, False)],
)
def test_as_many_positions_as_examples(joined, positions, separate):
    """Behind a reshape that joins axes, nobody knows which of two equal axes counts the
    examples: then positions are taken one by one."""

    def loss_fn(model, x):
        h = jnp.tanh(jax.vmap(jax.vmap(model))(x))
        h = h.reshape(-1, D).reshape(x.shape) if joined else h
        outputs = jnp.sum(h, axis=1)
        return kfac.SquaredError(outputs, jnp.zeros_like(outputs))

    joint, expanded = (
        factors_of(loss_fn, kfac.convert(linear(), block), tokens(N, positions))
        for block in (JOINT, EXPAND)
    )
    equal = map(np.array_equal, *map(jtu.tree_leaves, (joint, expanded)))
    assert all(equal) == separate


class Tokenwise(eqx.Module):
    layer: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(lambda row: self.last(jnp.tanh(self.layer(row))))(x)


def tokenwise(block):
    return kfac.convert(filled(lambda: Tokenwise(linear(), linear())), block)


def test_cotangents_that_are_of_several_positions():
    """One backward pass for all tokens does not say which gradients belong together."""
    loss_fn = lambda m, x: kfac.SquaredError(jax.vmap(m)(x), jnp.zeros((N, T, D)))
    found = {
        (block, axes): factors_of(
            loss_fn, tokenwise(block), tokens(), fisher=kfac.Exact(axes)
        )
        for block in (JOINT, EXPAND)
        for axes in (1, 2)
    }
    for axes in (1, 2):
        first, last = zip(found[JOINT, axes], found[EXPAND, axes], strict=True)
        assert (relative(*map(kron, first)) < 1e-12) == (axes == 2)
        assert relative(*map(kron, last)) < 1e-12  # Of which a row has one output.


def test_cotangents_that_are_of_several_positions_and_uses():
    def loss_fn(model, x):
        twice = lambda row: model(jnp.tanh(model(row)))
        return kfac.SquaredError(jax.vmap(jax.vmap(twice))(x), jnp.zeros((N, T, D)))

    for axes in (1, 2):
        both = [
            factors_of(
                loss_fn, kfac.convert(linear(), b), tokens(), fisher=kfac.Exact(axes)
            )
            for b in (JOINT, EXPAND)
        ]
        off = relative(*[kron(found[0]) for found in both])
        assert off < 1e-12 if axes == 2 else off > 1e-2


def test_derivatives_of_a_layer():
    """Directions are no positions."""

    def loss_fn(model, x):
        u = lambda row: jnp.sum(model.last(jnp.tanh(model.layer(row))))
        slopes = jax.vmap(jax.jacfwd(u))(x[:, 0])
        return kfac.SquaredError(slopes, jnp.zeros_like(slopes))

    assert_as_expanded(loss_fn, tokenwise)


def test_verify_says_which():
    report = kfac.verify(softmax, kfac.convert(Attending()), tokens())
    shown = [check.block for check in report.layers]
    assert shown == ["Kronecker(Joint)"] * 6 + ["Kronecker(Expand)"]
    ratios = [check.ratio for check in report.layers[:6]]
    np.testing.assert_allclose(ratios, 1, rtol=1e-10)


class Stacked(eqx.Module):
    layers: eqx.Module

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, arrays):
            layer = eqx.combine(arrays, static)
            return jnp.tanh(jax.vmap(layer)(x)) + jnp.mean(x, axis=0, keepdims=True), None

        return jnp.mean(jax.lax.scan(body, x, arrays)[0], axis=0)[:2]


def test_stacked_layers():
    """Every one has its own, as if they were not stacked."""
    keys = jax.random.split(KEY, 2)
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(D, D, key=key))
    stacked = kfac.convert(Stacked(make(keys)))

    class Unrolled(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(jax.vmap(layer)(x)) + jnp.mean(x, axis=0, keepdims=True)
            return jnp.mean(x, axis=0)[:2]

    unrolled = Unrolled([eqx.nn.Linear(D, D, key=key) for key in keys])
    (found,) = factors_of(squared, stacked, tokens())
    for i, want in enumerate(factors_of(squared, kfac.convert(unrolled), tokens())):
        close(found.input_factor[i], want.input_factor)
        close(found.output_factor[i], want.output_factor)


def test_ensembles():
    x = jnp.stack([tokens(), 2 * tokens()])
    keys = jax.random.split(KEY, 2)
    make = lambda key: kfac.convert(Each(eqx.nn.Linear(D, D, key=key), CALLS["vmap"]))
    both = eqx.filter_vmap(kfac.curvature(squared, kfac.Exact()))(
        eqx.filter_vmap(make)(keys), x
    )
    for i, key in enumerate(keys):
        (want,) = factors_of(squared, make(key), x[i])
        close(both.layer.input_factor[i], want.input_factor)
        close(both.layer.output_factor[i], want.output_factor)


def optimizer(**choices):
    return kfac.KFAC(0.05, 0.0, 0.1, fisher=kfac.Exact(), **choices)


@pytest.mark.parametrize("loss_fn", [softmax, squared])
def test_micro_batches(loss_fn):
    """The same step in less memory."""
    model, x = kfac.convert(filled(Attending)), tokens(6)
    state = optimizer().init(model)
    found = [
        eqx.filter_jit(ft.partial(optimizer().step, loss_fn, micro_batches=k))(
            model, state, x
        )
        for k in (1, 3)
    ]
    for a, b in zip(*(jtu.tree_leaves(s.curvature) for _, s, _ in found), strict=True):
        close(a, b)


def masked(model, x, w):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), jnp.zeros(len(x), int), w)


def test_padding_counts_for_nothing():
    """Examples without weight are not there: no factor knows of them."""
    x, model = tokens(), kfac.convert(filled(Attending))
    more, w = jnp.concatenate([x, 7 * x]), jnp.repeat(jnp.array([1.0, 0.0]), N)
    padded = factors_of(masked, model, more, w)
    for a, b in zip(padded, factors_of(softmax, model, x), strict=True):
        close(a.input_factor, b.input_factor)
        close(a.output_factor, b.output_factor)


def test_means_are_subtracted():
    """The covariance is that of `TNT` blocks."""

    def energy(model, x):
        log_psi = jax.vmap(lambda x: jnp.sum(model(x)))(x)
        return kfac.Energy(log_psi, jnp.sum(x, axis=(1, 2)))

    x, fisher = tokens(5), kfac.Centred()
    both = [
        factors_of(energy, kfac.convert(filled(Attending), block), x, fisher=fisher)
        for block in (JOINT, kfac.TNT())
    ]
    for a, b in list(zip(*both, strict=True))[:6]:
        close(kron(a), kron(b))


def test_samples_have_the_right_mean():
    """`MonteCarlo`, in the mean over many keys, has the trace of the exact block."""
    model = kfac.convert(filled(Attending))
    collect = eqx.filter_jit(
        jax.vmap(
            lambda key: kfac.curvature(softmax)(model, tokens(), key=key).mlp.layers[0]
        )
    )
    found = collect(jax.random.split(KEY, 4000))
    (want,) = factors_of(softmax, model, tokens())[4:5]
    trace = lambda a: np.trace(a, axis1=-2, axis2=-1)
    traces = trace(np.asarray(found.output_factor)) * trace(found.input_factor)
    exact = np.trace(kron(want))
    assert abs(np.mean(traces) - exact) < 5 * np.std(traces) / len(traces) ** 0.5


def convolved(layer, x):
    return layer(x.T).T


CONVOLUTIONS = {
    "plain": dict(padding=1),
    "strided": dict(stride=2),
    "grouped": dict(groups=3),
    "dilated": dict(dilation=2, padding=2, use_bias=False),
}


def convolution(name):
    return eqx.nn.Conv1d(D, D, 3, key=KEY, **CONVOLUTIONS[name])


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    """Positions are where the kernel is; groups are layers side by side."""
    x = tokens(positions=7)
    model = kfac.convert(Each(convolution(name), convolved))
    (found,) = factors_of(pooled, model, x)
    F = exact_block(pooled, model, lambda m: m.layer, x)
    if name != "grouped":
        close(kron(found), from_partial_traces(F, D))
        return
    size = len(F) // D
    for i in range(D):
        own = slice(i * size, (i + 1) * size)
        member = jtu.tree_map(lambda a: a[i], found)  # noqa: B023
        close(kron(member), from_partial_traces(F[own, own], 1))


def pooled(model, x):
    """A loss on means over positions, of which each sees all."""
    h = jax.vmap(lambda x: jnp.tanh(model.call(model.layer, x)))(x)
    h = jnp.mean(h, axis=1) @ jnp.cos(jnp.arange(3 * D).reshape(D, 3))
    return kfac.SquaredError(h, jnp.zeros_like(h))


@pytest.mark.parametrize("name", ["plain", "strided"])
def test_examples_one_after_the_other(name, monkeypatch):
    """What is written out at once has a bound; the sums are the same."""
    models = [
        kfac.convert(Each(convolution(name), convolved)),
        kfac.convert(Each(linear(), CALLS["vmap"])),
    ]
    x = tokens(6, 7)
    want = [factors_of(pooled, model, x) for model in models]
    for most in (1, 150):
        monkeypatch.setattr("eqx_kfac._block._joint.MOST", (most, most))
        jax.clear_caches()
        for model, (other,) in zip(models, want, strict=True):
            (found,) = factors_of(pooled, model, x)
            close(found.input_factor, other.input_factor)
            close(found.output_factor, other.output_factor)


def test_less_at_once_on_a_cpu():
    """What stays in its cache; on an accelerator, every part is several kernels."""
    model = kfac.convert(eqx.nn.Conv2d(8, 16, 3, padding=1, key=KEY))

    def loss_fn(model, x):
        outputs = jnp.mean(jax.vmap(model)(x), axis=(2, 3))
        return kfac.SquaredError(outputs, jnp.zeros_like(outputs))

    def factors(model, x):  # Without random numbers, which are drawn in a loop.
        return kfac.curvature(loss_fn, kfac.Empirical())(model, x)

    traced = jax.jit(factors).trace(model, jnp.ones((64, 8, 32, 32)))
    loops = lambda name: "while" in traced.lower(lowering_platforms=(name,)).as_text()
    assert loops("cpu") and not loops("cuda") and not loops("tpu")
