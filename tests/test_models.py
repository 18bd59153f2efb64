"""Whole models: the architectures of Equinox's documentation, tiny, written with the
layers of `equinox.nn` as anybody would, converted and trained."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import assert_same, filled, normal
from .plain import plain_kfac
from .reference import error, from_partial_traces, kron


N = 3


#
# The models. Each acts on one example
#


def over(layer, xs):
    """A layer on every row of `xs`; or what stands in its place, on all of them."""
    return layer.over(xs) if isinstance(layer, Probe) else jax.vmap(layer)(xs)


class CNN(eqx.Module):
    layers: list

    def __init__(self, keys):
        self.layers = [
            eqx.nn.Conv2d(1, 2, 3, key=keys[0]),
            eqx.nn.MaxPool2d(2, 2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(8, 5, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(5, 3, key=keys[2]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class AttentionBlock(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    linears: list
    dropout: eqx.nn.Dropout

    def __init__(self, size, keys, p=0.0):
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]
        self.attention = eqx.nn.MultiheadAttention(
            2, size, use_output_bias=True, dropout_p=p, key=keys[0]
        )
        self.linears = [
            eqx.nn.Linear(size, 5, key=keys[1]),
            eqx.nn.Linear(5, size, key=keys[2]),
        ]
        self.dropout = eqx.nn.Dropout(p)

    def __call__(self, x, key=None):
        keys = [None, None] if key is None else jr.split(key)
        y = over(self.norms[0], x)
        x = x + self.attention(y, y, y, key=keys[0])
        y = jax.nn.gelu(over(self.linears[0], over(self.norms[1], x)))
        return x + self.dropout(over(self.linears[1], y), key=keys[1])


class ViT(eqx.Module):
    patches: eqx.nn.Linear
    positions: Any
    token: Any
    block: AttentionBlock
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, keys, wrap=lambda array: array):
        self.patches = eqx.nn.Linear(4, 4, key=keys[0])
        self.positions = wrap(0.1 * jr.normal(keys[1], (5, 4)))
        self.token = wrap(0.1 * jr.normal(keys[2], (1, 4)))
        self.block = AttentionBlock(4, keys[3:6])
        self.norm = eqx.nn.LayerNorm(4)
        self.head = eqx.nn.Linear(4, 3, key=keys[6])

    def __call__(self, image):
        positions, token = self.positions, self.token
        if isinstance(token, kfac.Parameter):
            positions, token = positions(image), token(image)
        patches = image.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
        x = jnp.concatenate([token, over(self.patches, patches)]) + positions
        x = over(self.norm, self.block(x))
        return self.head(x[0])


class UNet(eqx.Module):
    down: list
    up: list
    merge: list

    def __init__(self, keys):
        conv, transposed = eqx.nn.Conv2d, eqx.nn.ConvTranspose2d
        self.down = [
            conv(1, 2, 3, padding=1, key=keys[0]),
            conv(2, 3, 2, stride=2, key=keys[1]),
            conv(3, 3, 2, stride=2, key=keys[2]),
        ]
        self.up = [
            transposed(3, 3, 2, stride=2, key=keys[3]),
            transposed(3, 2, 2, stride=2, key=keys[4]),
        ]
        self.merge = [
            conv(6, 3, 3, padding=1, use_bias=False, key=keys[5]),
            conv(4, 2, 1, key=keys[6]),
        ]

    def __call__(self, image):
        """Two logits for every pixel, `[4, 4, 2]`."""
        a = jnp.tanh(self.down[0](image))
        b = jnp.tanh(self.down[1](a))
        c = jnp.tanh(self.down[2](b))
        b = jnp.concatenate([b, jnp.tanh(self.up[0](c))])
        a = jnp.concatenate([a, jnp.tanh(self.up[1](jnp.tanh(self.merge[0](b))))])
        return jnp.moveaxis(self.merge[1](a), 0, -1)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: Any

    def __init__(self, keys, wrap=lambda array: array):
        self.cell = eqx.nn.GRUCell(2, 3, key=keys[0])
        self.linear = eqx.nn.Linear(3, 1, use_bias=False, key=keys[1])
        self.bias = wrap(jnp.full(1, 0.1))

    def __call__(self, x):
        bias = self.bias(x) if isinstance(self.bias, kfac.Parameter) else self.bias
        step = lambda h, x: (self.cell(x, h), None)
        h, _ = jax.lax.scan(step, jnp.zeros(3), x)
        return self.linear(h) + bias


class Encoder(eqx.Module):
    embeddings: dict
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    block: AttentionBlock
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, keys):
        sizes = dict(token=6, position=4, segment=2)
        self.embeddings = {
            name: eqx.nn.Embedding(number, 4, key=key)
            for (name, number), key in zip(sizes.items(), keys)
        }
        self.norm = eqx.nn.LayerNorm(4)
        self.dropout = eqx.nn.Dropout(0.3)
        self.block = AttentionBlock(4, keys[3:6], p=0.3)
        self.pooler = eqx.nn.Linear(4, 4, key=keys[6])
        self.head = eqx.nn.Linear(4, 3, key=keys[7])

    def __call__(self, inputs):
        keys = jr.split(inputs["key"])
        parts = [over(e, inputs[name]) for name, e in self.embeddings.items()]
        x = self.dropout(over(self.norm, sum(parts)), key=keys[0])
        x = self.block(x, keys[1])
        return self.head(jnp.tanh(self.pooler(x[0])))


class Mixer(eqx.Module):
    into: eqx.nn.Conv2d
    out: eqx.nn.ConvTranspose2d
    across_patches: eqx.nn.MLP
    across_channels: eqx.nn.MLP
    norms: list

    def __init__(self, keys):
        self.into = eqx.nn.Conv2d(2, 3, 2, stride=2, key=keys[0])
        self.out = eqx.nn.ConvTranspose2d(3, 1, 2, stride=2, key=keys[1])
        gelu = jax.nn.gelu
        self.across_patches = eqx.nn.MLP(4, 4, 5, 1, gelu, key=keys[2])
        self.across_channels = eqx.nn.MLP(3, 3, 5, 1, gelu, key=keys[3])
        shapes = (3, 4), (4, 3), (3, 4)
        self.norms = [eqx.nn.LayerNorm(shape) for shape in shapes]

    def __call__(self, inputs):
        """A score for every pixel, `[16]`."""
        image, time = inputs
        time = jnp.broadcast_to(time.reshape(1, 1, 1), image.shape)
        y = self.into(jnp.concatenate([image, time])).reshape(3, 4)
        y = y + over(self.across_patches, self.norms[0](y))
        y = y.T
        y = y + over(self.across_channels, self.norms[1](y))
        return self.out(self.norms[2](y.T).reshape(3, 2, 2)).ravel()


#
# What is asked about each
#


def softmax(z, y, weights):
    return kfac.SoftmaxCrossEntropy(z, y, weights)


def sigmoid(z, y, weights):
    return kfac.SigmoidCrossEntropy(z, y, weights)


def squared(z, y, weights):
    return kfac.SquaredError(z, y, weights)


def softmax_hessian(z):
    p = jax.nn.softmax(z)
    return jnp.diag(p) - jnp.outer(p, p)


def sigmoid_hessian(z):
    p = jax.nn.sigmoid(z)
    return jnp.diag(p * (1 - p))


def squared_hessian(z):
    return jnp.eye(len(z))


class Spec(NamedTuple):
    make: Callable  # keys -> model
    data: Callable  # key -> (inputs, targets)
    once: Callable  # model -> the layers that are used once in an example
    several: Callable  # model -> some that are used several times
    scales: Callable = lambda m: []  # model -> layers with a diagonal block
    loss: Callable = softmax
    hessian: Callable = softmax_hessian


def image_and_class(size):
    def data(key):
        return normal(N, 1, size, size), np.arange(N) % 3

    return data


def image_and_pixels(key):
    x = normal(N, 1, 4, 4)
    return x, (np.asarray(x)[:, 0] > 0).astype(np.int32)


def sequence_and_label(key):
    return normal(N, 4, 2), jnp.array([[0], [1], [1]])


def text_and_class(key):
    inputs = dict(
        token=jnp.array([[0, 1, 1, 2], [3, 3, 3, 0], [2, 4, 1, 5]]),
        position=jax.device_put(np.tile(np.arange(4), (N, 1))),
        segment=jnp.array([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]]),
        key=jr.split(key, N),
    )
    return inputs, np.arange(N) % 3


def image_and_score(key):
    x = normal(N, 1, 4, 4), jnp.array([0.1, 0.5, 0.9])
    return x, normal(N, 16, seed=1)


def block_norms(m):
    return [*m.block.norms, m.norm]


specs = {
    "cnn": Spec(
        CNN,
        image_and_class(6),
        once=lambda m: [m.layers[4], m.layers[6]],
        several=lambda m: [m.layers[0]],
    ),
    "vit": Spec(
        ft.partial(ViT, wrap=kfac.Parameter),
        image_and_class(4),
        once=lambda m: [m.head],
        several=lambda m: [m.patches, *m.block.linears],
        scales=lambda m: [*block_norms(m), m.positions, m.token],
    ),
    "unet": Spec(
        UNet,
        image_and_pixels,
        once=lambda m: [m.down[2]],
        several=lambda m: [m.down[1], m.up[1], m.merge[0]],
    ),
    "rnn": Spec(
        ft.partial(RNN, wrap=kfac.Parameter),
        sequence_and_label,
        once=lambda m: [m.linear],
        several=lambda m: [],
        scales=lambda m: [m.bias],
        loss=sigmoid,
        hessian=sigmoid_hessian,
    ),
    "encoder": Spec(
        Encoder,
        text_and_class,
        once=lambda m: [m.pooler, m.head],
        several=lambda m: [*m.embeddings.values(), m.block.linears[0]],
        scales=block_norms,
    ),
    "mixer": Spec(
        Mixer,
        image_and_score,
        once=lambda m: [],
        several=lambda m: [m.into, m.out],
        scales=lambda m: m.norms,
        loss=squared,
        hessian=squared_hessian,
    ),
}
each_model = pytest.mark.parametrize("name", specs)


@ft.cache
def make(name):
    """A model and a batch."""
    model = filled(lambda: specs[name].make(jr.split(jr.key(0), 8)), scale=0.4)
    return model, *specs[name].data(jr.key(1))


def loss_of(name, model, x, y, weights):
    return specs[name].loss(jax.vmap(model)(x), y, weights)


@ft.cache
def trainer(name):
    """A converted model, its first state, and the compiled step. The curvature of a
    step's batch is in the state that comes from it."""
    optimizer = plain_kfac(0.05, 0.0, 0.1, fisher=kfac.Exact(), inverse_period=1, ema=0.0)
    model = kfac.convert(make(name)[0])
    step = eqx.filter_jit(ft.partial(optimizer.step, ft.partial(loss_of, name)))
    return model, eqx.filter_jit(optimizer.init)(model), step


@ft.cache
def curvature(name, example=None):
    """Of the batch, or of one of its examples."""
    model, state, step = trainer(name)
    _, x, y = make(name)
    weights = np.ones(N) if example is None else np.eye(N)[example]
    _, state, info = step(model, state, x, y, weights)
    assert not info.rejected
    return state.curvature


#
# Conversion
#


@each_model
def test_outputs_are_unchanged(name):
    model, x, _ = make(name)
    converted = kfac.convert(model)
    both = eqx.filter_jit(lambda *models: [jax.vmap(m)(x) for m in models])
    np.testing.assert_array_equal(*both(converted, model))
    assert_same(kfac.revert(converted), kfac.revert(model))
    for a, b in zip(jtu.tree_leaves(converted), jtu.tree_leaves(model), strict=True):
        assert a is b


def uncovered(model):
    """The paths that `init` complains about."""
    with pytest.raises(ValueError, match="No tagged layer covers") as raised:
        plain_kfac(0.1).init(model)
    (listed,) = [line for line in str(raised.value).split(". ")[:1]]
    return set(listed.split("`")[1::2])


@each_model
def test_conversion_covers_every_parameter(name):
    model, state, _ = trainer(name)
    moved = jtu.tree_leaves(state.velocity)
    assert len(moved) == len(jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array)))
    assert state.fallback is None


def test_what_conversion_does_not_cover_is_named():
    keys = jr.split(jr.key(0), 8)
    vit, rnn = (filled(lambda make=make: make(keys), scale=0.4) for make in (ViT, RNN))
    assert uncovered(kfac.convert(vit)) == {".positions", ".token"}
    assert uncovered(kfac.convert(rnn)) == {".bias"}
    some = kfac.convert(rnn, {".cell": None})
    names = ("weight_ih", "weight_hh", "bias", "bias_n")
    assert uncovered(some) == {".bias", *(f".cell.{name}" for name in names)}


#
# Training
#


@each_model
def test_steps_lower_the_loss(name):
    model, state, step = trainer(name)
    _, x, y = make(name)
    losses = []
    for _ in range(5):
        model, state, info = step(model, state, x, y, np.ones(N))
        assert not info.rejected
        losses.append(float(info.loss))
    assert max(losses[1:]) < losses[0] and losses[-1] < 0.98 * losses[0]


#
# Dense references, without the library
#


class Probe:
    """In the place of a layer: keeps its input, and adds to its output."""

    def __init__(self, layer, delta):
        self.layer, self.delta, self.input, self.shape = layer, delta, None, None

    def __call__(self, x, *, key=None):
        return self._probed(x, self.layer(x))

    def over(self, xs):
        return self._probed(xs, jax.vmap(self.layer)(xs))

    def _probed(self, x, y):
        assert self.input is None  # In one place of the model.
        self.input, self.shape = x, y.shape
        return y if self.delta is None else y + self.delta


def rows_of(layer, x):
    """What one example puts into the layer, `[rows, d_in(+1)]`."""
    if isinstance(layer, eqx.nn.Embedding):
        return jax.nn.one_hot(x, layer.num_embeddings, dtype=layer.weight.dtype)
    if not isinstance(layer, eqx.nn.Linear):
        x = _patches(layer, x)
    x = x.reshape(-1, x.shape[-1])
    if layer.bias is None:
        return x
    return jnp.concatenate([x, jnp.ones((len(x), 1))], axis=1)


def _patches(layer, x):
    options = dict(window_strides=layer.stride, padding=layer.padding)
    if isinstance(layer, eqx.nn.ConvTranspose):
        padding = [(k - 1, k - 1) for k in layer.kernel_size]  # Nothing is cut off.
        ones = len(layer.stride) * (1,)
        options = dict(window_strides=ones, padding=padding, lhs_dilation=layer.stride)
    out = jax.lax.conv_general_dilated_patches(x[None], layer.kernel_size, **options)
    return jnp.moveaxis(out[0], 0, -1)


def columns_of(layer, z):
    """Changes of outputs with what came out of a layer, `[..., rows, d_out]`."""
    lead = z.shape[:2]
    if isinstance(layer, (eqx.nn.Linear, eqx.nn.Embedding)):
        return z.reshape(*lead, -1, z.shape[-1])
    return jnp.moveaxis(z.reshape(*lead, z.shape[2], -1), 2, -1)


def matrix_of(layer, leaves):
    """Changes with the canonical matrix, `[terms, k, size]`."""
    lead = leaves[0].shape[:2]
    rows = (-1,) if isinstance(layer, kfac.Parameter) else (len(_weight(layer)), -1)
    if isinstance(layer, eqx.nn.LayerNorm):
        rows = (-1,)
    matrix = jnp.concatenate([a.reshape(*lead, *rows) for a in leaves], axis=-1)
    return matrix.reshape(*lead, -1)


def leaves_of(layer):
    leaves = [getattr(layer, name, None) for name in ("value", "weight", "bias")]
    return [leaf for leaf in leaves if leaf is not None]


def _weight(layer):
    return layer.value if isinstance(layer, kfac.Parameter) else layer.weight


class Reading(NamedTuple):
    """Of every example."""

    hessian: Any  # `[N, terms, k, k]`
    parameters: list  # Of `once` and `scales`: `[N, terms, k, size]`
    inputs: list  # Of `once` and `several`: `[N, rows, d_in(+1)]`
    outputs: list  # `[N, terms, k, rows, d_out]`


@ft.cache
def read(name):
    spec = specs[name]
    model, x, _ = make(name)
    differentiated = lambda m: [*spec.once(m), *spec.scales(m)]
    probed = lambda m: [*spec.once(m), *spec.several(m)]
    layers = probed(model)

    def one(values, deltas, x):
        model = make(name)[0]
        flat = lambda m: jtu.tree_leaves(list(map(leaves_of, differentiated(m))))
        model = eqx.tree_at(flat, model, jtu.tree_leaves(values))
        probes = list(map(Probe, probed(model), deltas))
        z = eqx.tree_at(probed, model, probes)(x) if probes else model(x)
        z = z.reshape(-1, z.shape[-1])
        return z, (z, probes)

    def shapes(x):
        _, (_, probes) = one(values, [None for _ in layers], x)
        found.extend(probe.shape for probe in probes)

    def example(x):
        def run(values, deltas):
            z, (_, probes) = one(values, deltas, x)
            return z, (z, [probe.input for probe in probes])

        jacobian = jax.jacrev(run, argnums=(0, 1), has_aux=True)
        (of_values, of_deltas), (z, inputs) = jacobian(values, deltas)
        return Reading(
            jax.vmap(spec.hessian)(z),
            list(map(matrix_of, differentiated(model), of_values)),
            list(map(rows_of, layers, inputs)),
            list(map(columns_of, layers, of_deltas)),
        )

    values, found = list(map(leaves_of, differentiated(model))), []
    jax.eval_shape(jax.vmap(shapes), x)
    deltas = [np.zeros(shape) for shape in found]
    return jtu.tree_map(np.asarray, jax.jit(jax.vmap(example))(x))


def gauss_newton(reading, J, examples=slice(None)):
    J, H = J[examples], reading.hessian[examples]
    total = np.einsum("ntki,ntkl,ntlj->ij", J, H, J, optimize=True)
    return total / (len(H) * H.shape[1])


def kronecker(reading, i):
    """`(output_factor, input_factor)` of one of the probed layers."""
    x, J, H = reading.inputs[i], reading.outputs[i], reading.hessian
    x = x.reshape(-1, x.shape[-1])
    G = np.einsum("ntksi,ntkl,ntlsj->ij", J, H, J, optimize=True)
    return G / (len(H) * H.shape[1]), x.T @ x / len(x)


@pytest.mark.parametrize("name", [name for name in specs if name != "mixer"])
def test_one_example_and_layers_used_once(name):
    """Their blocks are those of the Gauss-Newton matrix."""
    reading = read(name)
    for found, J in zip(specs[name].once(curvature(name, 1)), reading.parameters):
        assert error(kron(found), gauss_newton(reading, J, slice(1, 2))) <= 1e-10
        # One example is another matter than three.
        assert error(kron(found), gauss_newton(reading, J)) > 1e-2


@each_model
def test_factors_of_a_batch(name):
    reading, spec = read(name), specs[name]
    found = curvature(name)
    layers = [*spec.once(found), *spec.several(found)]
    assert len(layers) == len(reading.inputs) > 0
    for i, factors in enumerate(layers):
        # An example passes through the layer in several rows, all at once.
        if (
            name != "rnn"
            and reading.inputs[i].shape[1] > 1
            and factors.input_factor.ndim == 2
        ):
            d_out = len(factors.output_factor)
            product = from_partial_traces(exact_block(reading, i), d_out)
            assert error(kron(factors), product) <= 1e-10
            # (With one output, and a loss for every row of it, rows are independent.)
            other = error(kron(factors), np.kron(*kronecker(reading, i)))
            assert other > 1e-3 or d_out == 1
            continue
        G, A = kronecker(reading, i)
        if factors.input_factor.ndim == 1:
            assert np.all(A == np.diag(np.diag(A)))
            A = np.diag(A)
        assert error(factors.output_factor, G) <= 1e-10
        assert error(factors.input_factor, A) <= 1e-10
    other = curvature(name, 1)
    for factors, one in zip(layers, [*spec.once(other), *spec.several(other)]):
        assert error(kron_of(factors), kron_of(one)) > 1e-2


def exact_block(reading, i):
    """Of one of the probed layers: its gradients are sums over rows."""
    J = np.einsum("ntkso,nsi->ntkoi", reading.outputs[i], reading.inputs[i])
    return gauss_newton(reading, J.reshape(*J.shape[:3], -1))


def kron_of(factors):
    """Also with a diagonal input factor."""
    if factors.input_factor.ndim == 2:
        return kron(factors)
    return np.kron(np.asarray(factors.output_factor), np.diag(factors.input_factor))


@pytest.mark.parametrize("name", ["vit", "rnn", "encoder", "mixer"])
def test_diagonals_are_exact(name):
    """Of any number of examples, however often the parameters are used."""
    reading, spec = read(name), specs[name]
    number = len(spec.once(make(name)[0]))
    for example in (None, 1):
        which = slice(None) if example is None else slice(example, example + 1)
        found = spec.scales(curvature(name, example))
        pairs = list(zip(found, reading.parameters[number:], strict=True))
        for factors, J in pairs:
            block = gauss_newton(reading, J, which)
            assert error(factors.diagonal.ravel(), np.diag(block)) <= 1e-10
            if len(block) > 1:  # Which is not diagonal.
                assert error(np.diag(np.diag(block)), block) > 1e-2


#
# Expand and Reduce
#


class TokenBlock(eqx.Module):
    """Layers vmapped over tokens; the mean over tokens is classified."""

    norm: eqx.nn.LayerNorm
    linears: list

    def __init__(self, keys):
        self.norm = eqx.nn.LayerNorm(3)
        self.linears = [
            eqx.nn.Linear(3, 3, key=keys[0]),
            eqx.nn.Linear(3, 3, key=keys[1]),
        ]

    def __call__(self, x):
        y = jax.vmap(self.linears[0])(jax.vmap(self.norm)(x))
        return jnp.mean(x + jax.vmap(self.linears[1])(jnp.tanh(y)), axis=0)


def test_expand_and_reduce_differ():
    x = normal(N, 4, 3, seed=1)

    @eqx.filter_jit
    def run(model):
        loss_fn = lambda model: kfac.SoftmaxCrossEntropy(jax.vmap(model)(x))
        collect = kfac.curvature(loss_fn, kfac.Exact())
        blocks = [kfac.Kronecker(sharing) for sharing in (kfac.Expand(), kfac.Reduce())]
        H = jax.vmap(softmax_hessian)(jax.vmap(model)(x))
        return jnp.mean(H, axis=0), [collect(kfac.convert(model, b)) for b in blocks]

    H, (expand, reduce) = run(filled(lambda: TokenBlock(jr.split(jr.key(0))), scale=1.0))
    assert error(reduce.norm.diagonal, expand.norm.diagonal) <= 1e-12
    for a, b in zip(expand.linears, reduce.linears, strict=True):
        assert error(b.input_factor, a.input_factor) > 1e-2
        assert error(b.output_factor, a.output_factor) > 1e-2
    # The last layer's outputs are averaged: what reduce assumes. Per token, the gradient
    # is a quarter of that of the mean, and the Hessian at the mean is H.
    assert error(reduce.linears[1].output_factor, H) <= 1e-12
    assert error(expand.linears[1].output_factor, np.asarray(H) / 4) <= 1e-12


#
# A generator, with batch normalisation and its state
#


class Generator(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm

    def __init__(self, keys):
        self.layers = [
            eqx.nn.ConvTranspose2d(3, 4, 2, use_bias=False, key=keys[0]),
            eqx.nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1, key=keys[1]),
        ]
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.hidden(x, state)
        return jnp.tanh(self.layers[1](x)), state

    def hidden(self, x, state):
        x, state = self.norm(self.layers[0](x), state)
        return jax.nn.relu(x), state


def batched(model, x, state):
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return apply(x, jtu.tree_map(lambda leaf: leaf, state))


def generator_loss(model, x, state):
    images, state = batched(model, x, state)
    images = images.reshape(len(x), -1)
    return kfac.SquaredError(images, jnp.full_like(images, 0.5)), state


def patches_of(h):
    options = dict(lhs_dilation=(2, 2))
    args = (4, 4), (1, 1), [(2, 2), (2, 2)]
    one = lambda h: jax.lax.conv_general_dilated_patches(h[None], *args, **options)[0]
    return jax.vmap(one)(h)


def test_generator():
    made = lambda: eqx.nn.make_with_state(Generator)(jr.split(jr.key(0)))
    model, state = eqx.filter_jit(made)()
    x = normal(N, 3, 1, 1, seed=1)
    converted = kfac.convert(model)

    @eqx.filter_jit
    def run(model, converted, state):
        h, _ = batched(model.hidden, x, state)
        return [batched(m, x, state) for m in (model, converted)], patches_of(h)

    ((want, want_state), (got, got_state)), patches = run(model, converted, state)
    np.testing.assert_array_equal(got, want)
    assert_same(got_state, want_state)

    optimizer = plain_kfac(0.1, 0.0, 0.1, fisher=kfac.Exact(), inverse_period=1, ema=0.0)
    step = eqx.filter_jit(ft.partial(optimizer.step, generator_loss))
    memory, losses = eqx.filter_jit(optimizer.init)(converted), []
    for i in range(4):
        converted, memory, info = step(converted, memory, x, state)
        losses.append(float(info.loss))
        if i == 0:
            found, new_state = memory.curvature, info.aux
        state = info.aux
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0]
    for a, b in zip(jtu.tree_leaves(new_state), jtu.tree_leaves(want_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert int(state.get(converted.norm.batch_counter)) == 4

    # After the normalisation, examples are on their own.
    last = model.layers[1]
    # Only pixels have a loss each, so that their gradients are independent.
    rows = np.moveaxis(np.asarray(patches), 1, -1).reshape(-1, 64)
    rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    slopes = 1 - np.asarray(want).reshape(-1, 1) ** 2
    F = (slopes * rows).T @ (slopes * rows) / N
    assert error(kron(found.layers[1]), F) <= 1e-12
    assert found.layers[1].input_factor.shape == (last.weight.size + 1,) * 2


#
# A neural ODE
#


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self):
        self.mlp = eqx.nn.MLP(2, 2, 3, 1, jnp.tanh, key=jr.key(0))

    def __call__(self, t, y, args):
        return self.mlp(y)


STEPS = 4


def unrolled(model, y):
    for _ in range(STEPS):
        y = y + model(None, y, None) / STEPS
    return y


def solved(adjoint, model, y):
    diffrax = pytest.importorskip("diffrax")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(model),
        diffrax.Euler(),
        t0=0.0,
        t1=1.0,
        dt0=1 / STEPS,
        y0=y,
        saveat=diffrax.SaveAt(t1=True),
        adjoint=getattr(diffrax, adjoint)(),
        max_steps=STEPS,
    )
    return solution.ys[-1]


@ft.cache
def ode_results(solve, sharing=kfac.Expand()):
    x = normal(N, 2, seed=1)
    loss_fn = lambda model, x: kfac.SoftmaxCrossEntropy(
        jax.vmap(ft.partial(solve, model))(x), jnp.arange(N) % 2
    )
    collect = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    model = kfac.convert(filled(Field, scale=0.4), kfac.Kronecker(sharing))
    return eqx.filter_jit(collect)(model, x)


def one_step_of(model, y):
    return y + model(None, y, None)


@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "DirectAdjoint"])
def test_neural_ode(adjoint):
    pytest.importorskip("diffrax")
    loss, grads, found = ode_results(ft.partial(solved, adjoint))
    want_loss, want_grads, want = ode_results(unrolled)
    assert abs(loss - want_loss) <= 1e-12
    for a, b in zip(jtu.tree_leaves((grads, found)), jtu.tree_leaves((want_grads, want))):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= 1e-10 * max(1, np.linalg.norm(b))
    # Only a loop shows what becomes of its rounds, and not a derivative of its own.
    joint = jtu.tree_leaves(ode_results(ft.partial(solved, adjoint), kfac.Joint())[2])
    name = "joint" if adjoint == "DirectAdjoint" else "expanded"
    wants = dict(joint=ode_results(unrolled, kfac.Joint())[2], expanded=want)
    pairs = {key: zip(joint, jtu.tree_leaves(value)) for key, value in wants.items()}
    off = {
        key: max(error(a, b) for a, b in both if np.any(b)) for key, both in pairs.items()
    }
    assert off.pop(name) <= 1e-10 and min(off.values()) > 1e-3
    one_step = ode_results(one_step_of)[2]
    assert (
        error(found.mlp.layers[0].input_factor, one_step.mlp.layers[0].input_factor)
        > 1e-3
    )


def by_heun(model, y):
    for _ in range(STEPS):
        first = model(None, y, None)
        second = model(None, y + first / STEPS, None)
        y = y + (first + second) / (2 * STEPS)
    return y


@pytest.mark.parametrize("batch", ["mapped", "within"])
def test_stages_of_a_solver(batch):
    """Their results are written into a buffer, which shows where they go."""
    diffrax = pytest.importorskip("diffrax")

    def solved(term, y):
        term = diffrax.ODETerm(term)
        options = dict(t0=0.0, t1=1.0, dt0=1 / STEPS, max_steps=STEPS)
        adjoint = diffrax.DirectAdjoint()
        return diffrax.diffeqsolve(
            term, diffrax.Heun(), y0=y, adjoint=adjoint, **options
        ).ys[-1]

    def outputs(model, x):
        if batch == "mapped":
            return jax.vmap(ft.partial(solved, model))(x)
        return solved(lambda t, y, _: jax.vmap(lambda y: model(t, y, None))(y), x)

    def loss_of(outputs):
        return lambda model, x: kfac.SoftmaxCrossEntropy(
            outputs(model, x), jnp.arange(N) % 2
        )

    x, model = normal(N, 2, seed=1), kfac.convert(filled(Field, scale=0.4))
    collect = lambda f: eqx.filter_jit(kfac.curvature(loss_of(f), kfac.Exact()))(model, x)
    got = collect(outputs)
    want = collect(lambda model, x: jax.vmap(ft.partial(by_heun, model))(x))
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-10 * max(1, np.linalg.norm(b))
    model = kfac.convert(filled(Field, scale=0.4), kfac.Kronecker(kfac.Expand()))
    apart = collect(outputs)
    assert error(apart.mlp.layers[0].output_factor, got.mlp.layers[0].output_factor) > 0.1
