"""The networks of `speed.py`: each as a tagged Equinox model, as the matrix products that
a step cannot do without, and, for kfac-jax, in plain JAX."""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import eqx_kfac as kfac


ROOT = Path(__file__).parents[2]


class Layer(NamedTuple):
    """`copies` linear maps that each see `rows` inputs."""

    rows: int
    d_in: int
    d_out: int
    bias: bool = True
    first: bool = False  # Whether nothing before it has parameters.
    copies: int = 1


class Product(NamedTuple):
    """`[m, k] @ [k, n]`, `count` times."""

    m: int
    k: int
    n: int
    count: float = 1


class Plain(NamedTuple):
    """A network in plain JAX, whose loss kfac-jax understands."""

    params: Any
    # (params, batch, kfac_jax) -> loss; registers with kfac-jax what there is.
    loss: Callable[..., Any]


class Problem(NamedTuple):
    name: str
    examples: int
    model: Any  # Tagged.
    loss_fn: Callable[..., Any]
    args: tuple  # What `loss_fn` takes after the model.
    layers: list[Layer]
    others: list[Product]  # Of the forward pass, without parameters (attention).
    plain: Plain | None
    l2: float = 0.0


def study(name: str) -> Any:
    """One of the scripts in `studies/`, as a module."""
    studies = ROOT / "tests/benchmarks/studies"
    sys.path.insert(0, str(studies))  # They import their harness from there.
    spec = importlib.util.spec_from_file_location(name, studies / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def copied(tree: Any) -> Any:
    """Steps donate what they get; every contender has arrays of its own."""
    return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, tree)


#
# Fully connected
#


def _dense_layers(sizes: list[int], rows: int) -> list[Layer]:
    pairs = enumerate(zip(sizes, sizes[1:]))
    return [Layer(rows, i, o, first=n == 0) for n, (i, o) in pairs]


def _dense_params(linears: list[Any]) -> list[tuple]:
    return [(layer.weight.T.copy(), layer.bias.copy()) for layer in linears]


def _linears(model: Any) -> list[Any]:
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    nodes = jax.tree.leaves(model, is_leaf=is_linear)
    return [node for node in nodes if is_linear(node)]


def _dense_forward(params, x, activations, kfac_jax):
    for (w, b), activation in zip(params, activations):
        z = x @ w + b
        if kfac_jax is not None:
            z = kfac_jax.register_dense(z, x, w, b)
        x = activation(z)
    return x


def _softmax_loss(logits, y, kfac_jax):
    if kfac_jax is not None:
        kfac_jax.register_softmax_cross_entropy_loss(logits, y)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])


def autoencoder(batch: int, toy: bool = False, l2: float = 1e-5) -> Problem:
    ae = study("autoencoder")
    widths = (16, 4) if toy else (1000, 500, 250, 30)
    model = ae.network(widths, jax.random.key(0))
    sizes = [784, *widths, *widths[-2::-1], 784]
    identity = lambda z: z
    activations = [jnp.tanh] * (len(sizes) - 1)
    activations[len(widths) - 1] = activations[-1] = identity
    x = jax.random.uniform(jax.random.key(1), (batch, 784))

    def loss_fn(model, x):
        loss = kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)
        return loss if l2 == 0 else loss + kfac.L2(model, l2)

    def plain_loss(params, batch, kfac_jax=None):
        (x,) = batch
        logits = _dense_forward(params, x, activations, kfac_jax)
        if kfac_jax is not None:
            kfac_jax.register_sigmoid_cross_entropy_loss(logits, x)
        losses = jnp.sum(jax.nn.softplus(logits) - x * logits, axis=-1)
        if l2 == 0:
            return jnp.mean(losses)
        squares = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return jnp.mean(losses) + 0.5 * l2 * squares

    return Problem(
        "autoencoder" if l2 > 0 else "autoencoder without L2",
        batch,
        kfac.convert(model),
        loss_fn,
        (x,),
        _dense_layers(sizes, batch),
        [],
        Plain(_dense_params(_linears(model)), plain_loss),
        l2,
    )


def classify(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


def mlp(
    batch: int = 64,
    width: int = 64,
    depth: int = 3,
    classes: int = 10,
    inputs: int = 16,
    name: str | None = None,
) -> Problem:
    """`depth` hidden layers."""
    keys = jax.random.split(jax.random.key(0), 3)
    net = eqx.nn.MLP(inputs, classes, width, depth, jnp.tanh, key=keys[0])
    x = jax.random.normal(keys[1], (batch, inputs))
    y = jax.random.randint(keys[2], (batch,), 0, classes)
    activations = [jnp.tanh] * depth + [lambda z: z]

    def plain_loss(params, batch, kfac_jax=None):
        x, y = batch
        return _softmax_loss(
            _dense_forward(params, x, activations, kfac_jax), y, kfac_jax
        )

    sizes = [inputs, *[width] * depth, classes]
    return Problem(
        name or f"MLP {depth}x{width}",
        batch,
        kfac.convert(net),
        classify,
        (x, y),
        _dense_layers(sizes, batch),
        [],
        Plain(_dense_params(_linears(net)), plain_loss),
    )


class Stacked(eqx.Module):
    """Layers along the first axis of one, scanned over."""

    hidden: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, width, depth, classes, key):
        keys = jax.random.split(key)
        make = lambda key: eqx.nn.Linear(width, width, key=key)
        self.hidden = eqx.filter_vmap(make)(jax.random.split(keys[0], depth))
        self.readout = eqx.nn.Linear(width, classes, key=keys[1])

    def __call__(self, x):
        arrays, static = eqx.partition(self.hidden, eqx.is_array)

        def step(x, arrays):
            return x + jnp.tanh(eqx.combine(arrays, static)(x)), None

        return self.readout(jax.lax.scan(step, x, arrays)[0])


def stacked(depth: int, batch: int = 128, width: int = 128) -> Problem:
    classes, keys = 10, jax.random.split(jax.random.key(0), 3)
    net = Stacked(width, depth, classes, keys[0])
    x = jax.random.normal(keys[1], (batch, width))
    y = jax.random.randint(keys[2], (batch,), 0, classes)
    hidden = [(w.T.copy(), b) for w, b in zip(net.hidden.weight, net.hidden.bias)]
    params = [*hidden, *_dense_params([net.readout])]

    def plain_loss(params, batch, kfac_jax=None):
        (x, y), residual = batch, lambda z: z
        *hidden, readout = params
        for layer in hidden:
            x = x + _dense_forward([layer], x, [jnp.tanh], kfac_jax)
        return _softmax_loss(
            _dense_forward([readout], x, [residual], kfac_jax), y, kfac_jax
        )

    return Problem(
        f"stacked MLP, {depth} layers",
        batch,
        kfac.convert(net),
        classify,
        (x, y),
        [Layer(batch, width, width, copies=depth), Layer(batch, width, classes)],
        [],
        Plain(params, plain_loss),
    )


#
# Convolutions and attention
#


def convnet(
    batch: int = 128,
    toy: bool = False,
    widths: tuple[int, ...] = (32, 64, 64),
    size: int = 16,
) -> Problem:
    if toy:
        widths, size = (4, 4), 8
    keys = jax.random.split(jax.random.key(0), len(widths) + 3)
    layers, counts, channels, params = [], [], 1, []
    for i, (width, key) in enumerate(zip(widths, keys)):
        stride = 1 if i == 0 else 2
        conv = eqx.nn.Conv2d(channels, width, 3, stride, padding=1, key=key)
        size = size // stride
        assert conv.bias is not None
        params.append((conv.weight.transpose(2, 3, 1, 0), conv.bias[:, 0, 0]))
        counts.append(Layer(batch * size**2, 9 * channels, width, first=i == 0))
        layers += [conv, eqx.nn.Lambda(jax.nn.relu)]
        channels = width
    head = eqx.nn.Linear(channels * size**2, 10, key=keys[-3])
    counts.append(Layer(batch, channels * size**2, 10))
    net = eqx.nn.Sequential([*layers, eqx.nn.Lambda(jnp.ravel), head])
    ((w_head, b_head),) = _dense_params([head])
    w_head = w_head.reshape(channels, size, size, -1).transpose(1, 2, 0, 3)
    params.append((w_head.reshape(-1, 10), b_head))  # Channels last, as images are there.
    side = size * 2 ** (len(widths) - 1)
    x = jax.random.normal(keys[-2], (batch, 1, side, side))
    y = jax.random.randint(keys[-1], (batch,), 0, 10)

    def plain_loss(params, batch, kfac_jax=None):
        x, y = batch
        x = jnp.moveaxis(x, 1, -1)
        *convs, (w_head, b_head) = params
        for i, (w, b) in enumerate(convs):
            stride = 1 if i == 0 else 2
            z = jax.lax.conv_general_dilated(
                x,
                w,
                (stride, stride),
                [(1, 1), (1, 1)],
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(z + b)
        logits = x.reshape(len(x), -1) @ w_head + b_head
        return _softmax_loss(logits, y, kfac_jax)

    return Problem(
        "ConvNet",
        batch,
        kfac.convert(net),
        classify,
        (x, y),
        counts,
        [],
        Plain(params, plain_loss),
    )


def _normalised(x, scale, shift, kfac_jax):
    x = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(x, -1, keepdims=True) + 1e-5
    )
    y = x * scale + shift
    if kfac_jax is not None:
        y = kfac_jax.register_scale_and_shift(y, x, scale, shift)
    return y


def _repeated_dense(x, w, b, kfac_jax):
    """A linear layer of sequences."""
    y = x @ w if b is None else x @ w + b
    if kfac_jax is not None:
        y = kfac_jax.register_dense(y, x, w, b, variant="repeated_dense")
    return y


def _attention(x, projections, heads, kfac_jax):
    *qkv, output = projections
    batch, length, width = x.shape
    q, k, v = (
        _repeated_dense(x, w, None, kfac_jax).reshape(batch, length, heads, -1)
        for w in qkv
    )
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.einsum("bshd,bthd->bhst", q / jnp.sqrt(width // heads), k)
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(x.dtype).min))
    attended = jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape)
    return _repeated_dense(attended, output, None, kfac_jax)


def _plain_transformer(net: Any, heads: int) -> Plain:
    def block(b):
        a = b.attention
        projections = (a.query_proj, a.key_proj, a.value_proj, a.output_proj)
        return dict(
            attention=[p.weight.T.copy() for p in projections],
            mlp=_dense_params(b.mlp.layers),
            norms=[(n.weight, n.bias) for n in (b.attention_norm, b.mlp_norm)],
        )

    params = dict(
        embedding=net.embedding.weight,
        positions=net.positions.value,
        blocks=[block(b) for b in net.blocks],
        norm=(net.norm.weight, net.norm.bias),
        output=_dense_params([net.output])[0],
    )

    def loss(params, batch, kfac_jax=None):
        (text,) = batch
        dense = lambda x, wb: _repeated_dense(x, *wb, kfac_jax)
        x = params["embedding"][text[:, :-1]] + params["positions"]
        for b in params["blocks"]:
            first, second = b["norms"]
            h = _normalised(x, *first, kfac_jax)
            x = x + _attention(h, b["attention"], heads, kfac_jax)
            h = _normalised(x, *second, kfac_jax)
            x = x + dense(jax.nn.gelu(dense(h, b["mlp"][0])), b["mlp"][1])
        logits = dense(_normalised(x, *params["norm"], kfac_jax), params["output"])
        y = text[:, 1:]
        if kfac_jax is not None:
            kfac_jax.register_softmax_cross_entropy_loss(logits, y, weight=1 / y.shape[1])
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
        )

    return Plain(params, loss)


def transformer(
    batch: int = 32, toy: bool = False, width: int = 64, depth: int = 4, length: int = 40
) -> Problem:
    module, heads = study("transformer"), 4
    if toy:
        width, depth, length = 8, 1, 10
    net = module.Transformer(length, width, depth, jax.random.key(0))
    size, rows = len(module.CHARACTERS), batch * length
    text = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, size)
    each, own = batch * heads * depth, width // heads
    layers = [
        Layer(rows, width, width, bias=False, copies=4 * depth),
        Layer(rows, width, 4 * width, copies=depth),
        Layer(rows, 4 * width, width, copies=depth),
        Layer(rows, width, size),
    ]
    attention = [Product(length, own, length, each), Product(length, length, own, each)]
    return Problem(
        "transformer",
        batch,
        kfac.convert(net),
        module.loss_fn,
        (text,),
        layers,
        attention,
        _plain_transformer(net, heads),
    )


def parameters(problem: Problem) -> int:
    arrays = eqx.filter(problem.model, eqx.is_inexact_array)
    return sum(math.prod(p.shape) for p in jax.tree.leaves(arrays))
