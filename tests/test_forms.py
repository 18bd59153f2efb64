"""Every form of layer with every block, against dense computations: the curvature of the
plain layer by `jax.jacobian`, and K-FAC's factors by loops over its rows in NumPy."""

import functools as ft
import inspect
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac import _moments

from .helpers import assert_near, expanded, normal, pairs, params_of, stack
from .plain import plain_kfac
from .reference import error


TOLERANCE = 1e-10
DIFFERENT = 0.1
BLOCKS = dict(
    expand=kfac.Kronecker(kfac.Expand()),
    reduce=kfac.Kronecker(kfac.Reduce()),
    diagonal=kfac.Diagonal(),
)
BATCH = 4
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5])  # The second example is not there.


#
# One layer, three blocks
#


class Case(NamedTuple):
    """A plain layer, its inputs (mapped over `axes` axes), the names of its parameters,
    and how those are written as canonical matrices: from a dictionary of arrays with one
    more axis in front to `[rows, groups, d_out, d_in]`."""

    layer: Any
    x: np.ndarray
    axes: int
    names: tuple[str, ...]
    canonical: Any


def apply(layer, x, axes):
    for _ in range(axes):
        layer = jax.vmap(layer)
    return layer(x)


def collect(layers, x, axes, head, linear, weights):
    # (Traced, so that nothing is compiled twice.)
    return _collect(layers, x, axes, head, np.array(linear), weights)


@eqx.filter_jit
def _collect(layers, x, axes, head, linear, weights):
    """The factors of copies of a layer that have different blocks. What is added up has
    squared error, so none of the copies sees the others. The loss's outputs are `head`
    times all outputs of one example, behind a tanh unless `linear`."""

    def loss_fn(layers):
        y = jnp.zeros((len(x), len(head)))
        for layer in layers.values():
            z = apply(layer, x, axes).reshape(len(x), -1)
            y = y + jnp.where(linear, z, jnp.tanh(z)) @ head.T
        return kfac.SquaredError(y, weights=weights)

    return kfac.curvature(loss_fn, kfac.Exact())(layers)


def with_blocks(layer):
    return {k: kfac.convert(layer, {type(layer): b}) for k, b in BLOCKS.items()}


def factors_of(tree):
    """The only factors in a tree."""
    types = (kfac.factors.KroneckerFactors, kfac.factors.DiagonalFactors)
    is_factors = lambda node: isinstance(node, types)
    (factors,) = jtu.tree_leaves(tree, is_leaf=is_factors)
    return factors


def dense(factors):
    """`[groups, size, size]`: the matrices that one layer's factors denote."""
    if isinstance(factors, kfac.factors.DiagonalFactors):
        d = np.asarray(factors.diagonal)
        return np.stack([np.diag(m.ravel()) for m in d.reshape(-1, *d.shape[-2:])])
    G, A = np.asarray(factors.output_factor), np.asarray(factors.input_factor)
    A = A if A.ndim == G.ndim else A[..., None] * np.eye(A.shape[-1])
    pairs = zip(G.reshape(-1, *G.shape[-2:]), A.reshape(-1, *A.shape[-2:]), strict=True)
    return np.stack([np.kron(g, a) for g, a in pairs])


def diagonal_of(matrices):
    return np.stack([np.diag(np.diag(m)) for m in matrices])


class Dense(NamedTuple):
    """What `jax.jacobian` says about a plain layer: its outputs `[examples, m]`, and how
    they change with the canonical matrices `[examples, m, groups, d_out, d_in]`."""

    z: np.ndarray
    jacobian: np.ndarray

    def slopes(self, linear):
        return np.ones_like(self.z) if linear else 1 - np.tanh(self.z) ** 2

    def gradients(self, head, linear):
        """`[examples, k, groups, size]`, of the loss's outputs."""
        J = self.jacobian.reshape(*self.jacobian.shape[:3], -1)
        return np.einsum("km,nm,nmgp->nkgp", head, self.slopes(linear), J)

    def ggn(self, head, linear, weights):
        """The exact blocks `[groups, size, size]`."""
        J = self.gradients(head, linear)
        return np.einsum("n,nkgp,nkgq->gpq", weights, J, J) / weights.sum()


def differentiate(case):
    where = lambda m: [getattr_path(m, name) for name in case.names]

    def outputs(leaves):
        layer = eqx.tree_at(where, case.layer, leaves)
        return apply(layer, case.x, case.axes).reshape(-1)

    both = lambda leaves: (outputs(leaves), jax.jacobian(outputs)(leaves))
    z, J = jax.jit(both)(where(case.layer))
    J = case.canonical(dict(zip(case.names, map(np.asarray, J), strict=True)))
    z = np.asarray(z).reshape(len(case.x), -1)
    return Dense(z, J.reshape(*z.shape, *J.shape[1:]))


def getattr_path(node, path):
    return ft.reduce(getattr, path.split("."), node)


def matrices(weight, bias):
    """Canonical matrices of a weight `[..., d_out, d_in]`, a bias `[..., d_out]`."""
    return weight if bias is None else np.concatenate([weight, bias[..., None]], -1)


def random_head(size, seed=0):
    return np.random.default_rng(seed).normal(size=(size, size)) / size


def pooling_head(channels, positions):
    """A matrix with as many rows as outputs, of which the first `channels` pool."""
    head = np.zeros((channels * positions,) * 2)
    for c in range(channels):
        head[c, c * positions : (c + 1) * positions] = 1 / positions
    return head


def made(cls, *args, **kwargs):
    """A layer with parameters that are not ones or zeros. (From NumPy: the initial ones
    would have to be compiled.)"""
    new = ft.partial(cls, *args, **kwargs)
    if cls is not eqx.nn.WeightNorm and "key" in inspect.signature(cls).parameters:
        new = ft.partial(new, key=jax.random.key(0))
    return randomised(eqx.filter_eval_shape(new))


def randomised(layer, seed=0):
    rng = np.random.default_rng(seed)
    new = lambda p: jax.device_put(rng.normal(size=p.shape))
    is_parameter = lambda p: hasattr(p, "dtype")
    return jtu.tree_map(lambda p: new(p) if is_parameter(p) else p, layer)


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=(BATCH, *shape))


def by_formula(x, g, weights, sharing):
    """`kron(G, A)` for every group, by loops: inputs `[examples, positions, groups,
    d_in]`, gradients `[examples, k, positions, groups, d_out]`. Examples without weight
    are dropped."""
    kept = [(x[n], g[n], w) for n, w in enumerate(weights) if w > 0]
    total, groups, blocks = sum(w for _, _, w in kept), x.shape[2], []
    for group in range(groups):
        A = G = 0.0
        for x_n, g_n, w in kept:
            rows, grads = x_n[:, group], g_n[:, :, group]
            if sharing == "reduce":
                rows, grads = rows.mean(0)[None], grads.sum(1)[:, None]
            A = A + w * sum(np.outer(row, row) for row in rows) / len(rows)
            G = G + w * sum(np.outer(v, v) for v in grads.reshape(-1, g.shape[-1]))
        blocks.append(np.kron(G / total, A / total))
    return np.stack(blocks)


#
# Convolutions, as dense layers on patches
#


def total_padding(layer, n, axis):
    """Zeros (or whatever `padding_mode` says) before and after a convolution's input."""
    k, s, d = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
    if not isinstance(layer.padding, str):
        return layer.padding[axis]
    if layer.padding == "VALID":
        return 0, 0
    total = max((math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
    low = total // 2 if layer.padding == "SAME" else total - total // 2
    return low, total - low


def reflected(t, n):
    t = t % (2 * n - 2)
    return t if t < n else 2 * n - 2 - t


EXTEND = dict(
    ZEROS=lambda t, n: t if 0 <= t < n else None,
    CIRCULAR=lambda t, n: t % n,
    REPLICATE=lambda t, n: min(max(t, 0), n - 1),
    REFLECT=reflected,
)


def sources(layer, n, axis):
    """Along one axis, for every position and every entry of the kernel, the index of the
    input that it sees; `None` for zero."""
    k, s, d = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
    low, high = total_padding(layer, n, axis)
    positions = (n + low + high - d * (k - 1) - 1) // s + 1
    extend = EXTEND[layer.padding_mode]
    return [[extend(o * s + e * d - low, n) for e in range(k)] for o in range(positions)]


def transposed_sources(layer, n, axis):
    """Of a transposed convolution: output `o` sees input `j` through entry `e` if the
    convolution's output `j` sees input `o` through the entry opposite to `e`, at
    `j * stride + (k - 1 - e) * dilation - low`."""
    k, s, d = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
    more = layer.output_padding[axis]
    if layer.padding == "VALID":
        low, positions = 0, (n - 1) * s + 1 + d * (k - 1) + more
    elif isinstance(layer.padding, str):
        total = d * (k - 1) + 1 - s + more
        low = (total + (layer.padding == "SAME_LOWER")) // 2
        positions = n * s - more
    else:
        low, high = layer.padding[axis]
        positions = (n - 1) * s + 1 + d * (k - 1) - low - high + more
    extend = EXTEND[layer.padding_mode]

    def source(o, e):
        at = o + low - (k - 1 - e) * d
        return extend(at // s, n) if at % s == 0 else None

    return [[source(o, e) for e in range(k)] for o in range(positions)]


def patches(layer, x):
    """`[examples, positions, groups, d_in]`: what the layer's kernel sees."""
    transposed = isinstance(layer, eqx.nn.ConvTranspose)
    along = transposed_sources if transposed else sources
    tables = [along(layer, n, axis) for axis, n in enumerate(x.shape[2:])]
    channels, kernel = x.shape[1], layer.kernel_size
    out = np.zeros((len(x), *map(len, tables), channels, *kernel))
    for position in np.ndindex(*map(len, tables)):
        for entry in np.ndindex(*kernel):
            source = [t[o][e] for t, o, e in zip(tables, position, entry, strict=True)]
            if None not in source:
                seen = x[(slice(None), slice(None), *source)]
                out[(slice(None), *position, slice(None), *entry)] = seen
    positions = math.prod(map(len, tables))
    return out.reshape(len(x), positions, layer.groups, -1)


def conv_matrices(layer):
    def canonical(leaves):
        weight, bias = leaves["weight"], leaves.get("bias")
        shape = (len(weight), layer.groups, layer.out_channels // layer.groups)
        weight = weight.reshape(*shape, -1)
        return matrices(weight, None if bias is None else bias.reshape(shape))

    return canonical


C1, C2, C3 = eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d
T1, T2 = eqx.nn.ConvTranspose1d, eqx.nn.ConvTranspose2d

CONVOLUTIONS = {
    # The layer, its channels, its kernel, the size of its input, and more.
    "1d-stride": (C1, 3, 2, 3, (8,), dict(stride=2)),
    "1d-same-lower-dilation": (C1, 2, 2, 2, (5,), dict(padding="SAME_LOWER", dilation=3)),
    "1d-replicate-asymmetric-stride": (
        C1,
        2,
        3,
        3,
        (6,),
        dict(padding=((3, 1),), padding_mode="REPLICATE", stride=2),
    ),
    "2d-same-strides": (C2, 2, 2, (3, 2), (5, 4), dict(padding="SAME", stride=(2, 1))),
    "2d-asymmetric-dilation": (
        C2,
        2,
        2,
        (2, 3),
        (5, 4),
        dict(padding=((1, 2), (0, 3)), dilation=2, stride=2),
    ),
    "2d-groups": (C2, 4, 6, 2, (3, 3), dict(groups=2, padding=(0, 1))),
    "2d-depthwise": (
        C2,
        3,
        3,
        2,
        (4, 3),
        dict(groups=3, padding="SAME_LOWER", stride=2, use_bias=False),
    ),
    "2d-multiplier": (C2, 2, 4, 2, (3, 3), dict(groups=2)),
    "2d-circular": (C2, 2, 2, (3, 2), (3, 4), dict(padding=1, padding_mode="CIRCULAR")),
    "2d-circular-same-lower": (
        C2,
        1,
        2,
        (2, 3),
        (4, 3),
        dict(padding="SAME_LOWER", padding_mode="CIRCULAR", groups=1),
    ),
    "2d-reflect": (C2, 2, 2, 3, (4, 3), dict(padding="SAME", padding_mode="REFLECT")),
    "3d": (C3, 2, 2, (2, 1, 2), (3, 2, 2), dict(padding="VALID", use_bias=False)),
    "transposed-1d": (T1, 3, 2, 3, (4,), dict(stride=3, padding=1, output_padding=2)),
    "transposed-1d-dilation": (T1, 2, 2, 3, (3,), dict(stride=2, dilation=2)),
    "transposed-1d-asymmetric": (T1, 2, 2, 3, (4,), dict(padding=((0, 2),), stride=2)),
    "transposed-1d-circular": (
        T1,
        2,
        2,
        4,
        (3,),
        dict(stride=2, padding="SAME_LOWER", padding_mode="CIRCULAR"),
    ),
    "transposed-2d-groups": (
        T2,
        4,
        2,
        (3, 2),
        (2, 3),
        dict(stride=(2, 1), padding="SAME", groups=2, use_bias=False),
    ),
    "transposed-2d-circular": (
        T2,
        2,
        2,
        (3, 2),
        (2, 3),
        dict(stride=2, padding="SAME", padding_mode="CIRCULAR", dilation=2),
    ),
}


def convolution(name):
    cls, c_in, c_out, kernel, spatial, more = CONVOLUTIONS[name]
    layer = made(cls, c_in, c_out, kernel, **more)
    names = ("weight",) if layer.bias is None else ("weight", "bias")
    return Case(layer, inputs(c_in, *spatial), 1, names, conv_matrices(layer))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    case = convolution(name)
    layer, reference = case.layer, differentiate(case)
    x, size = patches(layer, case.x), reference.z.shape[1]
    if layer.bias is not None:
        x = np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1)
    leaves = {name: np.asarray(getattr(layer, name))[None] for name in case.names}
    z = np.einsum("goi,nsgi->ngos", case.canonical(leaves)[0], x)
    assert error(z.reshape(BATCH, -1), reference.z) < TOLERANCE  # These are the patches.

    layers, ones = with_blocks(layer), np.ones(BATCH)
    head = random_head(size)
    got = collect(layers, case.x, 1, head, False, WEIGHTS)
    g = head * reference.slopes(linear=False)[:, None]
    g = g.reshape(BATCH, size, layer.groups, -1, x.shape[1])
    g = np.moveaxis(g, -1, 2)
    for sharing in ("expand", "reduce"):
        want = by_formula(x, g, WEIGHTS, sharing)
        assert error(dense(factors_of(got[sharing])), want) < TOLERANCE
    blocks = reference.ggn(head, False, WEIGHTS)
    assert error(dense(factors_of(got["diagonal"])), diagonal_of(blocks)) < TOLERANCE

    pool = pooling_head(layer.out_channels, x.shape[1])
    for head, exact, other in (
        (np.eye(size), "expand", "reduce"),
        (
            pool,
            "reduce",
            "expand",
        ),
    ):
        got = collect(layers, case.x, 1, head, True, ones)
        blocks = reference.ggn(head, True, ones)
        assert error(dense(factors_of(got[exact])), blocks) < TOLERANCE
        assert error(dense(factors_of(got[other])), blocks) > DIFFERENT


@pytest.mark.parametrize("most", [1, 100])
@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_patches_in_several_parts(platform, most, monkeypatch):
    """However few patches may be written out at once, none is forgotten."""
    case = convolution("2d-groups")
    x = np.concatenate([case.x, -2 * case.x[:2]])  # (Of another length: not compiled.)
    x = x[: 6 if most == 1 else 5]
    weights = np.arange(len(x), dtype=float)
    rows = patches(case.layer, x)
    head = random_head(case.layer.out_channels * rows.shape[1])
    most = (most, 2**24) if platform == "cpu" else (2**18, most)
    monkeypatch.setattr(kfac.form._inputs, "MOST_PATCHES", most)
    take = lambda *args, **ways: ways[platform](*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", take)
    layers = {"expand": kfac.convert(case.layer, BLOCKS["expand"])}
    got = collect(layers, x, 1, head, False, weights)
    rows = np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], -1)
    want = np.einsum("n,nsgi,nsgj->gij", weights, rows, rows)
    want = want / weights.sum() / rows.shape[1]
    got = factors_of(got["expand"]).input_factor
    assert error(got, want) < TOLERANCE
    assert error(got, want[::-1]) > DIFFERENT


def test_more_patches_at_once_on_accelerators():
    """A loop over parts that fit into a CPU's cache would be hundreds of kernels."""
    window = kfac.form.Window((3, 3), (1, 1), (1, 1))
    like = jax.ShapeDtypeStruct((72, 72), jnp.float64)

    def loops(platform, examples=64):
        inputs = kfac.form.Patches(jnp.ones((examples, 8, 32, 32)), window)
        traced = jax.jit(lambda: inputs.second(None, 0, like)).trace()
        return "while" in traced.lower(lowering_platforms=(platform,)).as_text()

    assert loops("cpu") and not loops("cuda") and not loops("tpu")


@pytest.mark.parametrize("examples, largest", [(12, 4), (127, 42), (13, 4), (3, 3)])
def test_parts_of_any_number_of_examples(examples, largest):
    """A prime number of examples is taken in parts, too, and not one by one."""
    x, sizes = normal(2, examples, 3), set()

    def moments(x):
        sizes.add(x.shape[1])
        return jnp.einsum("sni,snj->sij", x, x)

    like = jax.ShapeDtypeStruct((2, 3, 3), x.dtype)
    size = 1 if examples == 3 else 3 * 12  # In three parts, or all at once.
    got = _moments.summed_in_parts(moments, (jnp.asarray(x),), 1, size, (12, 12), like)
    want = np.einsum("sni,snj->sij", x, x)
    assert error(got, want) < TOLERANCE
    assert error(got, want - x[:, -1, :, None] * x[:, -1, None]) > 1e-3
    assert sizes == {largest, examples % largest} - {0}


#
# Embeddings
#


NUMBER, WIDTH = 5, 3
TOKENS = np.array([3, 0, 3, 3])
SEQUENCES = np.array([[3, 0, 3], [1, 1, 2], [2, 2, 2], [0, 4, 3]])


def embedding(tokens):
    layer = made(eqx.nn.Embedding, NUMBER, WIDTH)
    canonical = lambda leaves: leaves["weight"].swapaxes(1, 2)[:, None]
    return Case(layer, tokens, tokens.ndim, ("weight",), canonical)


def counts(tokens, weights=None):
    weights = np.ones(len(tokens)) if weights is None else weights
    weights = np.broadcast_to(weights.reshape(-1, *[1] * (tokens.ndim - 1)), tokens.shape)
    return np.bincount(tokens.ravel(), weights.ravel(), minlength=NUMBER)


@pytest.mark.parametrize("weights", [np.ones(BATCH), WEIGHTS], ids=["ones", "weights"])
@pytest.mark.parametrize("tokens", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_embedding_counts(tokens, weights):
    case = embedding(tokens)
    size = WIDTH * tokens[0].size
    got = collect(with_blocks(case.layer), tokens, case.axes, np.eye(size), True, weights)
    rows = weights.sum() * tokens[0].size
    A = np.asarray(factors_of(got["expand"]).input_factor)
    assert A.shape == (NUMBER,)  # The diagonal: the rest is zero.
    np.testing.assert_allclose(A, counts(tokens, weights) / rows, rtol=1e-14)
    shares = np.stack([counts(t.reshape(1, -1)[0]) for t in tokens]) / tokens[0].size
    A = np.asarray(factors_of(got["reduce"]).input_factor)
    want = np.einsum("n,ni->i", weights, shares**2) / weights.sum()
    np.testing.assert_allclose(A, want, rtol=1e-14)
    blocks = differentiate(case).ggn(np.eye(size), True, weights)
    assert error(dense(factors_of(got["expand"])), blocks) < TOLERANCE
    assert error(dense(factors_of(got["diagonal"])), blocks) < TOLERANCE
    if tokens is SEQUENCES:
        assert error(dense(factors_of(got["reduce"])), blocks) > DIFFERENT


def test_embedding_pooled():
    """Reduce keeps the diagonal of what would be exact."""
    case = embedding(SEQUENCES)
    positions = SEQUENCES.shape[1]
    head = pooling_head(WIDTH, positions).reshape(-1, WIDTH, positions)
    head = head.swapaxes(1, 2).reshape(-1, WIDTH * positions)
    got = collect(with_blocks(case.layer), case.x, 2, head, True, WEIGHTS)
    blocks = differentiate(case).ggn(head, True, WEIGHTS)
    assert error(dense(factors_of(got["reduce"])), diagonal_of(blocks)) < TOLERANCE
    assert error(dense(factors_of(got["diagonal"])), diagonal_of(blocks)) < TOLERANCE
    assert error(dense(factors_of(got["reduce"])), blocks) > DIFFERENT
    assert error(dense(factors_of(got["expand"])), blocks) > DIFFERENT


@pytest.mark.parametrize("tokens", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_embedding_diagonal(tokens):
    case = embedding(tokens)
    head = random_head(WIDTH * tokens[0].size)
    got = collect(with_blocks(case.layer), tokens, case.axes, head, False, WEIGHTS)
    blocks = differentiate(case).ggn(head, False, WEIGHTS)
    assert error(dense(factors_of(got["diagonal"])), diagonal_of(blocks)) < TOLERANCE
    assert error(dense(factors_of(got["expand"])), diagonal_of(blocks)) > DIFFERENT


@pytest.mark.parametrize("first", [-1, -NUMBER, NUMBER, 100, -NUMBER - 1, -100])
def test_embedding_of_any_integer(first):
    """Rows are found (and get gradients) as by indexing."""
    case = embedding(np.array([first, 3, 1, 3]))
    got = collect(with_blocks(case.layer), case.x, 1, np.eye(WIDTH), True, WEIGHTS)
    blocks = differentiate(case).ggn(np.eye(WIDTH), True, WEIGHTS)
    for factors in got.values():
        assert error(dense(factors_of(factors)), blocks) < TOLERANCE


#
# Any parameters
#


class Shifted(eqx.Module):
    """A user's layer with a parameter of its own."""

    shift: kfac.Parameter

    def __call__(self, x):
        return jnp.sin(x + self.shift(x))


def columns(*names):
    def canonical(leaves):
        rows = [leaves[name].reshape(len(leaves[name]), -1) for name in names]
        return np.concatenate(rows, axis=-1)[:, None, :, None]

    return canonical


PARAMETERS = {
    "layer-norm": (eqx.nn.LayerNorm((2, 3)), ("weight", "bias"), (2, 3)),
    "layer-norm-no-bias": (eqx.nn.LayerNorm(4, use_bias=False), ("weight",), (4,)),
    "rms-norm": (eqx.nn.RMSNorm(4), ("weight", "bias"), (4,)),
    "group-norm": (eqx.nn.GroupNorm(2, 4), ("weight", "bias"), (4, 2)),
    "prelu": (eqx.nn.PReLU(), ("negative_slope",), (4,)),
    "prelu-channels": (
        eqx.nn.PReLU(jax.device_put(np.ones((3, 1)))),
        ("negative_slope",),
        (3, 2),
    ),
    "parameter": (Shifted(kfac.Parameter(np.ones((2, 3)))), ("shift.value",), (2, 3)),
}


def parameters(name, *tokens):
    layer, names, shape = PARAMETERS[name]
    x = inputs(*tokens, *shape)
    return Case(randomised(layer), x, 1 + len(tokens), names, columns(*names))


def with_parameter_blocks(layer):
    if isinstance(layer, Shifted):
        value = layer.shift.value
        return {k: Shifted(kfac.Parameter(value, b)) for k, b in BLOCKS.items()}
    return with_blocks(layer)


@pytest.mark.parametrize(
    "name, tokens",
    [(name, (3,)) for name in PARAMETERS] + [("layer-norm", ()), ("parameter", ())],
)
def test_parameters(name, tokens):
    case = parameters(name, *tokens)
    reference = differentiate(case)
    head = np.abs(random_head(reference.z.shape[1]))  # Tokens do not cancel.
    layers = with_parameter_blocks(case.layer)
    got = collect(layers, case.x, case.axes, head, False, WEIGHTS)
    got = {k: dense(factors_of(v)) for k, v in got.items()}
    blocks = reference.ggn(head, False, WEIGHTS)
    assert error(got["diagonal"], diagonal_of(blocks)) < TOLERANCE
    assert error(got["reduce"], blocks) < TOLERANCE
    if tokens:
        assert error(got["expand"], blocks) > DIFFERENT
    else:
        assert error(got["expand"], blocks) < TOLERANCE


#
# Contractions
#


class Contraction(eqx.Module):
    """A user's layer with its own tag."""

    weight: jax.Array
    bias: jax.Array | None
    tag: kfac.Tag
    subscripts: str = eqx.field(static=True)

    def __init__(self, subscripts, weight, bias, block=BLOCKS["expand"]):
        self.weight, self.bias, self.subscripts = weight, bias, subscripts
        name = None if bias is None else "bias"
        self.tag = kfac.Tag(kfac.form.Einsum(subscripts, bias=name), block)

    def __call__(self, x):
        z = jnp.einsum(self.subscripts, self.weight, x)
        if self.bias is not None:
            operands, letters = self.subscripts.split("->")
            weight = operands.split(",")[0]
            shared = [i for i, a in enumerate(letters) if a not in weight]
            z = z + jnp.broadcast_to(jnp.expand_dims(self.bias, shared), z.shape)
        return self.tag(z, x)


def test_a_form_without_a_bias_puts_its_weight_back():
    layer = Contraction("oi,i->o", normal(3, 2), None)
    form = layer.tag.form
    got = form.from_matrix(2 * form.to_matrix(layer), layer)
    assert np.array_equal(got.weight, 2 * layer.weight) and got.bias is None


def transposed(*axes, groups=0, outputs=1):
    """Brings a weight's axes into the order groups, outputs, inputs, and flattens each
    kind. (Their first axis is of rows.)"""

    def flat(w):
        w = np.transpose(w, (0, *(a + 1 for a in axes)))
        ends = (1, 1 + groups, 1 + groups + outputs, w.ndim)
        kinds = [math.prod(w.shape[a:b]) for a, b in zip(ends, ends[1:])]
        return w.reshape(len(w), *kinds)

    return flat


CONTRACTIONS = {
    # Sizes of the letters, and how the weight and the bias become canonical.
    "oi,i->o": (dict(o=3, i=2), transposed(0, 1), (0,)),
    "hdi,i->hd": (dict(h=2, d=3, i=2), transposed(0, 1, 2, outputs=2), (0, 1)),
    "boi,bi->bo": (dict(b=2, o=3, i=4), transposed(0, 1, 2, groups=1), (0, 1)),
    "oi,ti->to": (dict(o=3, i=2, t=4), transposed(0, 1), (0,)),
    "c,chw->chw": (dict(c=3, h=2, w=2), transposed(0, groups=1, outputs=0), (0,)),
    # Nothing is in its place: letters in the orders of the weight and of z.
    "ioj,jti->ot": (dict(i=2, o=3, j=2, t=2), transposed(1, 0, 2), (0,)),
    "ibop,tib->ptbo": (
        dict(i=3, b=2, o=2, p=3, t=2),
        transposed(1, 2, 3, 0, groups=1, outputs=2),
        (1, 2, 0),
    ),
}
FEW = ("oi,i->o", "boi,bi->bo", "c,chw->chw", "ibop,tib->ptbo")


def contraction(subscripts, use_bias=True):
    size, flat, order = CONTRACTIONS[subscripts]
    w, x, z = subscripts.replace("->", ",").split(",")
    b = [size[a] for a in z if a in w]
    layer = Contraction(
        subscripts,
        np.ones([size[a] for a in w]),
        np.ones(b) if use_bias else None,
    )

    def canonical(leaves):
        weight, bias = flat(leaves["weight"]), leaves.get("bias")
        if bias is not None:
            bias = np.transpose(bias, (0, *(a + 1 for a in order)))
            bias = bias.reshape(weight.shape[:-1])
        return matrices(weight, bias)

    names = ("weight", "bias") if use_bias else ("weight",)
    shape = [size[a] for a in x]
    return Case(randomised(layer), inputs(*shape), 1, names, canonical)


def with_contraction_blocks(layer):
    args = layer.subscripts, layer.weight, layer.bias
    return {k: Contraction(*args, block=b) for k, b in BLOCKS.items()}


def shared_pooling_head(subscripts):
    """Sums over what is shared: the axes of z that the weight does not have."""
    size, _, _ = CONTRACTIONS[subscripts]
    w, _, z = subscripts.replace("->", ",").split(",")
    axes = [np.eye(size[a]) if a in w else np.ones((size[a],) * 2) for a in z]
    return ft.reduce(np.kron, axes)


@pytest.mark.parametrize(
    "subscripts, use_bias",
    [(s, True) for s in CONTRACTIONS if s != "oi,i->o"] + [("boi,bi->bo", False)],
)
def test_contraction(subscripts, use_bias):
    case = contraction(subscripts, use_bias)
    reference, layers = differentiate(case), with_contraction_blocks(case.layer)

    def blocks(head, linear):
        got = collect(layers, case.x, 1, head, linear, WEIGHTS)
        got = {k: dense(factors_of(v)) for k, v in got.items()}
        return got, reference.ggn(head, linear, WEIGHTS)

    size = reference.z.shape[1]
    got, want = blocks(random_head(size), False)
    assert error(got["diagonal"], diagonal_of(want)) < TOLERANCE
    got, want = blocks(np.eye(size), True)
    assert error(got["expand"], want) < TOLERANCE
    pool = shared_pooling_head(subscripts)
    if np.array_equal(pool, np.eye(size)):  # Nothing is shared.
        assert error(got["reduce"], want) < TOLERANCE
        return
    assert error(got["reduce"], want) > DIFFERENT
    got, want = blocks(pool, True)
    assert error(got["reduce"], want) < TOLERANCE
    assert error(got["expand"], want) > DIFFERENT


@pytest.mark.parametrize("subscripts", ["oi,i->o", "oi,ti->to"])
def test_contraction_that_is_dense(subscripts):
    case = contraction(subscripts)
    linear = made(eqx.nn.Linear, 2, 3)
    leaves = lambda m: (m.weight, m.bias)
    linear = eqx.tree_at(leaves, linear, leaves(case.layer))
    head = random_head(case.x[0].size // 2 * 3)
    args = head, False, WEIGHTS
    got = collect(with_contraction_blocks(case.layer), case.x, 1, *args)
    want = collect(with_blocks(linear), case.x, case.x.ndim - 1, *args)
    for block in BLOCKS:
        assert_near(factors_of(got[block]), factors_of(want[block]), TOLERANCE)


@pytest.mark.parametrize(
    "subscripts, message",
    [
        ("oi,i", "is not of the form"),
        ("oi->o", "is not of the form"),
        ("oii,i->o", "is not of the form"),
        ("oi,ii->o", "is not of the form"),
        ("oi,i->oo", "is not of the form"),
        ("o i,i->o", "is not of the form"),
        ("...oi,...i->...o", "is not of the form"),
        ("oi,...i->...o", "is not of the form"),
        ("oi, i->o", "is not of the form"),
        ("oi,i ->o ", "is not of the form"),
        ("oi,i.->o.", "is not of the form"),
        ("oi,i,j->oj", "is not of the form"),
        (",i->i", "is not of the form"),
        ("oik,i->o", r"\['k'\] are in one place only"),
        ("oi,ij->o", r"\['j'\] are in one place only"),
        ("oi,i->ojk", r"\['j', 'k'\] are in one place only"),
    ],
)
def test_malformed_contraction(subscripts, message):
    with pytest.raises(ValueError, match=message):
        kfac.form.Einsum(subscripts)


#
# Canonical matrices
#


def gates(cls):
    cell = made(cls, 3, 2)
    tags = kfac.convert(cell).tag
    tags = [tags] if isinstance(tags, kfac.Tag) else list(tags.values())
    return cell, [tag.form for tag in tags]


def weight_norm(inner):
    layer = made(eqx.nn.WeightNorm, inner)
    tags = kfac.convert(layer).tag
    return layer, [tag.form for tag in tags.values()]


def tagged(layer):
    return layer, [kfac.convert(layer).tag.form]


def contracted(subscripts):
    layer = contraction(subscripts).layer
    return layer, [layer.tag.form]


FORMS = {
    # A plain layer, and the forms that its parameters have together.
    "dense": lambda: tagged(made(eqx.nn.Linear, 3, 2)),
    "convolution": lambda: tagged(convolution("2d-asymmetric-dilation").layer),
    "grouped": lambda: tagged(convolution("2d-groups").layer),
    "transposed": lambda: tagged(convolution("transposed-1d").layer),
    "lookup": lambda: tagged(embedding(TOKENS).layer),
    **{subscripts: ft.partial(contracted, subscripts) for subscripts in FEW},
    "parameters": lambda: tagged(parameters("layer-norm").layer),
    "group-norm": lambda: tagged(parameters("group-norm").layer),
    "gru": lambda: gates(eqx.nn.GRUCell),
    "lstm": lambda: gates(eqx.nn.LSTMCell),
    "weight-norm": lambda: weight_norm(made(eqx.nn.Linear, 3, 2)),
    "weight-norm-grouped": lambda: weight_norm(convolution("2d-groups").layer),
}
FREEZE = {
    "nothing": lambda name: False,
    "weights": lambda name: "weight" in name,
    "biases": lambda name: "bias" in name,
}


def stacked(layer, stack):
    """Different layers along leading axes."""
    for size in reversed(stack):
        new = [jtu.tree_map(lambda p, i=i: p * (i + 1.5), layer) for i in range(size)]
        layer = jtu.tree_map(lambda *p: np.stack(p), *new)
    return layer


def freeze(layer, frozen):
    def keep(path, p):
        return None if frozen(jtu.keystr(path)) else p

    return jtu.tree_map_with_path(keep, layer)


def is_covered(form, layer):
    return any(p is not None for p in form.parameters(layer))


def there_and_back(forms, layer):
    """Every form's matrix; the same after one was added to it; and the layer that is made
    of all matrices."""
    new, matrices, added = jtu.tree_map(jnp.zeros_like, layer), [], []
    for form in forms:
        matrices.append(form.to_matrix(layer))
        new = form.from_matrix(matrices[-1], new)
        other = form.from_matrix(matrices[-1] + 1.0, layer)
        added.append(form.to_matrix(other))
    return new, matrices, added


STACKS = {"one": (), "stacked": (2, 3)}


@ft.cache
def canonical_matrices(name):
    """Of one form, or of several together: by what is frozen and by stack, those that
    cover what is left, the layer, and `there_and_back`."""
    plain, forms = FORMS[name]()
    plain = jtu.tree_map(np.asarray, eqx.filter(plain, eqx.is_inexact_array))
    layers = {
        (frozen, size): freeze(stacked(plain, stack), FREEZE[frozen])
        for frozen in FREEZE
        for size, stack in STACKS.items()
    }
    covering = {
        key: [form for form in forms if is_covered(form, layer)]
        for key, layer in layers.items()
    }
    together = lambda layers: {
        key: there_and_back(covering[key], layer) for key, layer in layers.items()
    }
    found = jax.jit(together)(layers)
    return {key: (covering[key], layers[key], *found[key]) for key in layers}


@pytest.mark.parametrize("size", STACKS)
@pytest.mark.parametrize("frozen", FREEZE)
@pytest.mark.parametrize("name", FORMS)
def test_canonical_matrix(name, frozen, size):
    stack = STACKS[size]
    forms, layer, *found = canonical_matrices(name)[frozen, size]
    new, matrices, added = found
    for form, matrix, more in zip(forms, matrices, added, strict=True):
        sizes = form.sizes(layer)
        assert matrix.shape == (*sizes.stack, sizes.d_out, sizes.d_in + sizes.bias)
        assert sizes.stack[: len(stack)] == stack
        assert len(sizes.stack) == len(stack) + form.groups
        np.testing.assert_array_equal(more, np.asarray(matrix) + 1.0)
    # All parameters are in one form, and in one place of its matrix.
    leaves = jtu.tree_leaves(layer)
    if forms:
        assert sum(m.size for m in matrices) == sum(p.size for p in leaves)
        assert jtu.tree_structure(new) == jtu.tree_structure(layer)
        for a, b in zip(jtu.tree_leaves(new), leaves, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    else:
        assert frozen != "nothing" and leaves == []


@pytest.mark.parametrize(
    "case",
    [convolution("2d-groups"), embedding(TOKENS), parameters("layer-norm")]
    + [contraction(subscripts) for subscripts in CONTRACTIONS],
    ids=["convolution", "lookup", "parameters", *CONTRACTIONS],
)
def test_canonical_order(case):
    layer = kfac.convert(case.layer)
    leaves = {name: np.asarray(getattr(layer, name))[None] for name in case.names}
    want = case.canonical(leaves)[0]
    got = np.asarray(eqx.filter_jit(layer.tag.form.to_matrix)(layer))
    np.testing.assert_array_equal(got if got.ndim == 3 else got[None], want)


#
# Recurrent cells
#


HIDDEN, CELL_IN = 2, 3
CELLS = dict(gru=eqx.nn.GRUCell, lstm=eqx.nn.LSTMCell)
CELL_NAMES = ("weight_ih", "weight_hh", "bias", "bias_n")


def recurrent(name, use_bias=True):
    return made(CELLS[name], CELL_IN, HIDDEN, use_bias)


def initial(name):
    h = 0.3 * np.ones(HIDDEN)
    return h if name == "gru" else (h, 2 * h)


def hidden_state(h):
    return h[0] if isinstance(h, tuple) else h


def unrolled(name, cell, xs):
    """The last hidden state of one sequence."""
    h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), initial(name), xs)
    return hidden_state(h)


def cell_leaves(cell):
    return [n for n in CELL_NAMES if getattr(cell, n, None) is not None]


def cell_matrices(name, leaves):
    """Canonical matrices `[..., d_out, d_in]` by tag, from arrays with leading axes."""

    def matrix(weights, bias, rows, bias_rows):
        there = [leaves[n][..., rows, :] for n in weights if n in leaves]
        there += [leaves[bias][..., bias_rows, None]] if bias in leaves else []
        return np.concatenate(there, axis=-1)

    both, d, whole = ("weight_ih", "weight_hh"), HIDDEN, slice(None)
    if name == "lstm":
        return dict(all=matrix(both, "bias", whole, whole))
    first, last = slice(0, 2 * d), slice(2 * d, 3 * d)
    return dict(
        gates=matrix(both, "bias", first, first),
        input=matrix(("weight_ih",), "bias", last, last),
        hidden=matrix(("weight_hh",), "bias_n", last, whole),
    )


def cell_ggn(name, cell, xs, head, train):
    """The exact block of every tag, for one sequence and squared error."""
    leaves = {n: getattr(cell, n) for n in cell_leaves(cell) if train(n)}

    def outputs(leaves):
        where = lambda c: [getattr(c, n) for n in leaves]
        changed = eqx.tree_at(where, cell, list(leaves.values()))
        return head @ unrolled(name, changed, xs)

    J = jtu.tree_map(np.asarray, jax.jit(jax.jacobian(outputs))(leaves))
    flat = {k: m.reshape(len(head), -1) for k, m in cell_matrices(name, J).items()}
    return {k: m.T @ m for k, m in flat.items()}


def cell_blocks(name, cell, xs, head, train, change=lambda model: model):
    """The factors of every tag, after a change of the model."""
    model = change(kfac.convert(cell))
    spec = jtu.tree_map_with_path(lambda path, _: train(jtu.keystr(path)[1:]), model)
    trained, frozen = eqx.partition(model, spec)

    @eqx.filter_jit
    def run(trained, frozen, xs):
        def loss_fn(trained):
            model = eqx.combine(trained, frozen)
            y = jax.vmap(ft.partial(unrolled, name, model))(xs[None])
            return kfac.SquaredError(y @ head.T)

        return kfac.curvature(loss_fn, kfac.Exact())(trained)

    got = run(trained, frozen, xs)
    got = got if isinstance(got, dict) else dict(all=got)
    return {k: dense(f)[0] for k, f in got.items()}


def sequence(length):
    return np.random.default_rng(3).normal(size=(length, CELL_IN))


CELL_HEAD = np.random.default_rng(4).normal(size=(3, HIDDEN))
EVERYTHING = lambda name: True
TRAIN = {
    "everything": (True, EVERYTHING),
    "no-bias": (False, EVERYTHING),
    "weights": (True, lambda name: "weight" in name),
    "biases": (True, lambda name: "bias" in name),
}


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", CELLS)
def test_cell_of_one_example(name, train):
    use_bias, train = TRAIN[train]
    cell, xs = recurrent(name, use_bias), sequence(1)
    got = cell_blocks(name, cell, xs, CELL_HEAD, train)
    want = cell_ggn(name, cell, xs, CELL_HEAD, train)
    assert got.keys() == want.keys()
    for tag in want:
        assert error(got[tag], want[tag]) < TOLERANCE


def gru_by_hand(cell, x, h, delta):
    d = HIDDEN
    z, u = cell.weight_ih @ x + cell.bias, cell.weight_hh @ h
    both = jax.nn.sigmoid(z[: 2 * d] + u[: 2 * d] + delta["gates"])
    hidden = u[2 * d :] + cell.bias_n + delta["hidden"]
    new = jnp.tanh(z[2 * d :] + delta["input"] + both[:d] * hidden)
    inputs = dict(gates=jnp.concatenate([x, h]), input=x, hidden=h)
    return new + both[d:] * (h - new), inputs


def lstm_by_hand(cell, x, state, delta):
    h, c = state
    z = cell.weight_ih @ x + cell.weight_hh @ h + cell.bias + delta["all"]
    i, f, g, o = jnp.split(z, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h_new = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h_new, c), dict(all=jnp.concatenate([x, h]))


def through_time(name, cell, xs, head):
    """The blocks of every tag by the expand formula, and exact ones, from a loop over
    time with a perturbation of every linear map's output."""
    step = dict(gru=gru_by_hand, lstm=lstm_by_hand)[name]
    widths = dict(gates=2 * HIDDEN, input=HIDDEN, hidden=HIDDEN)
    widths = widths if name == "gru" else dict(all=4 * HIDDEN)

    def outputs(deltas):
        h, seen = initial(name), []
        for x, delta in zip(xs, deltas, strict=True):
            h, inputs = step(cell, x, h, delta)
            seen.append(inputs)
        ends = head @ hidden_state(h), head @ unrolled(name, cell, xs)
        return ends[0], (*ends, seen)

    zeros = [{k: np.zeros(d) for k, d in widths.items()} for _ in xs]
    J, (y, want, seen) = jax.jit(jax.jacobian(outputs, has_aux=True))(zeros)
    assert error(y, want) < TOLERANCE
    expand, exact = {}, {}
    for tag in widths:
        x = [np.append(inputs[tag], 1.0) for inputs in seen]
        g = [np.asarray(J_t[tag]) for J_t in J]
        A = sum(np.outer(row, row) for row in x) / len(x)
        G = sum(np.outer(v, v) for g_t in g for v in g_t)
        expand[tag] = np.kron(G, A)
        full = [np.kron(g_t, x_t) for g_t, x_t in zip(g, x, strict=True)]
        exact[tag] = sum(full).T @ sum(full)
    return expand, exact


@pytest.mark.parametrize("name", CELLS)
def test_cell_through_time(name):
    cell, xs = recurrent(name), sequence(3)
    got = cell_blocks(name, cell, xs, CELL_HEAD, EVERYTHING, expanded)
    expand, exact = through_time(name, cell, xs, CELL_HEAD)
    want = cell_ggn(name, cell, xs, CELL_HEAD, EVERYTHING)
    for tag in expand:
        assert error(got[tag], expand[tag]) < TOLERANCE
        assert error(exact[tag], want[tag]) < TOLERANCE
        assert error(got[tag], exact[tag]) > DIFFERENT


@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh"])
@pytest.mark.parametrize("name", CELLS)
def test_half_frozen_cell(name, frozen):
    cell, train = recurrent(name), lambda n: n != frozen
    with pytest.raises(ValueError, match="freeze all of them, or none"):
        cell_blocks(name, cell, sequence(1), CELL_HEAD, train)


#
# Transformations
#


SIZE = 6


def square_contraction(key):
    weight = jax.random.normal(key, (2, 3, 3))
    return Contraction("boi,bi->bo", weight, weight[..., 0])


# A layer, and what it does to a state `[SIZE]` of an example `(vector, token)`.
STEPS = {
    "convolution": (
        lambda key: C1(2, 2, 3, padding="SAME", groups=2, key=key),
        lambda layer, h, x, t: layer(h.reshape(2, 3)).reshape(-1),
    ),
    "lookup": (
        lambda key: eqx.nn.Embedding(NUMBER, SIZE, key=key),
        lambda layer, h, x, t: h + layer(t),
    ),
    "einsum": (
        square_contraction,
        lambda layer, h, x, t: layer(h.reshape(2, 3)).reshape(-1),
    ),
    "parameters": (
        lambda key: eqx.nn.LayerNorm(SIZE),
        lambda layer, h, x, t: layer(h),
    ),
    "gates": (
        lambda key: eqx.nn.GRUCell(CELL_IN, SIZE, key=key),
        lambda layer, h, x, t: layer(x[:CELL_IN], h),
    ),
    "within": (
        lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(SIZE, SIZE, key=key)),
        lambda layer, h, x, t: layer(h),
    ),
}


def steps(name):
    """What one layer does, behind a tanh."""
    return lambda layer, h, x, t: jnp.tanh(STEPS[name][1](layer, h, x, t))


@ft.cache
def _stacked(seed):
    @eqx.filter_eval_shape
    def made():
        keys = jax.random.split(jax.random.key(0))
        return {name: eqx.filter_vmap(new)(keys) for name, (new, _) in STEPS.items()}

    return randomised(made, seed)


def stacked_zoo(seed=0):
    """Two layers of every form, made and stacked by `filter_vmap`."""
    return expanded(kfac.convert(_stacked(seed)))


def zoo(seed=0):
    """The same layers in lists, converted one by one."""
    stacked = _stacked(seed)

    def member(layer, i):
        take = lambda p: jax.device_put(np.asarray(p)[i]) if eqx.is_array(p) else p
        return expanded(kfac.convert(jtu.tree_map(take, layer)))

    return {name: [member(layer, i) for i in (0, 1)] for name, layer in stacked.items()}


def in_turn(step, layers, h, x, t):
    for layer in layers:
        h = step(layer, h, x, t)
    return h


def scanned(step, layers, h, x, t):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def body(h, arrays):
        return step(eqx.combine(arrays, static), h, x, t), None

    return jax.lax.scan(body, h, arrays)[0]


def wrapped(transform):
    return lambda step, *args: scanned(transform(step), *args)


def twice(step, layer, h, x, t):
    body = lambda h, _: (step(layer, h, x, t), None)
    return jax.lax.scan(body, h, None, length=2)[0]


def one_example(model, walk, x, t):
    """Two outputs that all layers contribute to."""
    ends = [walk(steps(name), model[name], x, x, t) for name in STEPS if name in model]
    head = np.random.default_rng(0).normal(size=(2, SIZE * len(ends)))
    return head @ jnp.concatenate(ends)


def batched(model, walk, x, t):
    return jax.vmap(ft.partial(one_example, model, walk))(x, t)


def nested(model, walk, x, t):
    split = lambda a: a.reshape(2, BATCH // 2, *a.shape[1:])
    return jax.vmap(ft.partial(batched, model, walk))(split(x), split(t))


def ensemble(models, walk, x, t):
    """The members' outputs are outputs of one example."""
    y = eqx.filter_vmap(batched, in_axes=(eqx.if_array(0), None, None, None))(
        models, walk, x, t
    )
    return y.swapaxes(0, 1).reshape(BATCH, -1)


def loss_of(model, forward, walk, x, t, weights):
    y = forward(model, walk, x, t)
    return kfac.SquaredError(y, weights=weights.reshape(y.shape[:-1]))


@eqx.filter_jit
def curvature_of(model, *args):
    return kfac.curvature(loss_of, kfac.Exact())(model, *args)


def arguments():
    x = normal(BATCH, SIZE, seed=1)
    return x, jnp.asarray(TOKENS), WEIGHTS


def transformed(model, forward=batched, walk=in_turn):
    found = curvature_of(model, forward, walk, *arguments())
    return jtu.tree_map(np.asarray, found)


@ft.cache
def plain():
    return transformed(zoo())


def plain_stacked():
    return {name: stack(layers) for name, layers in plain().items()}


def assert_layers_near(got, want):
    for name in STEPS:
        assert got[name] is not None
        pairs = zip(jtu.tree_leaves(got[name]), jtu.tree_leaves(want[name]), strict=True)
        for a, b in pairs:
            assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b), name


def test_layers_differ():
    first, second = ({n: layers[i] for n, layers in plain().items()} for i in (0, 1))
    for name in STEPS:
        with pytest.raises(AssertionError, match=name):
            assert_layers_near(
                {**second, name: first[name]}, {**second, name: second[name]}
            )


@pytest.mark.parametrize(
    "walk",
    [scanned, wrapped(lambda step: eqx.filter_checkpoint(eqx.filter_jit(step)))],
    ids=["plain", "checkpoint-of-jit"],
)
def test_scan_over_stacked_layers(walk):
    assert_layers_near(transformed(stacked_zoo(), walk=walk), plain_stacked())


def test_nested_vmap():
    assert_layers_near(transformed(stacked_zoo(), nested, scanned), plain_stacked())


def test_ensemble():
    members = [stacked_zoo(0), stacked_zoo(1)]
    models = eqx.combine(stack(members), members[0])
    want = stack([transformed(member, walk=scanned) for member in members])
    assert_layers_near(transformed(models, ensemble, scanned), want)


def sum_of_uses(first, second):
    """Every use of a layer adds its rows."""
    A = (first.input_factor + second.input_factor) / 2
    G = first.output_factor + second.output_factor
    return A, G, first.l2


def test_layers_that_are_used_twice():
    layers = {name: first for name, (first, _) in zoo().items()}
    copies = transformed({name: [m, m] for name, m in layers.items()})
    got = transformed(layers, walk=twice)
    diagonal = {name: layers[name] for name in ("parameters", "within")}
    report = kfac.verify(loss_of, diagonal, batched, twice, *arguments())
    exact = {check.path: check.diagonal_error for check in report.layers}
    is_factors = lambda node: isinstance(node, kfac.factors.AbstractFactors)
    for name, pair in copies.items():
        found, _ = jtu.tree_flatten_with_path(got[name], is_leaf=is_factors)
        uses = zip(*(jtu.tree_leaves(m, is_leaf=is_factors) for m in pair), strict=True)
        for (path, factors), both in zip(found, uses, strict=True):
            if isinstance(factors, kfac.factors.KroneckerFactors):
                want = sum_of_uses(*both)
                for a, b in zip(jtu.tree_leaves(factors), want, strict=True):
                    assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b), name
            else:  # Squares of examples' gradients, which are sums over uses.
                at = f"['{name}']" if path == () else f"['{name}']{jtu.keystr(path)}"
                assert np.all(exact[at] < 1e-10), at
                apart = both[0].diagonal + both[1].diagonal
                assert np.linalg.norm(factors.diagonal - apart) > 1e-3, at


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm

    def __init__(self):
        self.conv = made(C1, 2, 3, 2)
        self.norm = made(eqx.nn.LayerNorm, (3, 3))

    def __call__(self, x):
        return jnp.mean(jnp.tanh(self.norm(self.conv(x))), axis=1)


def test_micro_batches():
    model = kfac.convert(ConvNet(), {".conv": kfac.Kronecker(kfac.Reduce())})
    x, y = normal(BATCH, 2, 4), normal(BATCH, 3, seed=1)
    optimizer = plain_kfac(0.1, damping=0.1, fisher=kfac.Exact())

    @eqx.filter_jit
    def step(model, x, y, micro_batches):
        loss_fn = lambda model, x, y: kfac.SquaredError(jax.vmap(model)(x), y)
        state = optimizer.init(model)
        args = loss_fn, model, state, x, y
        model, state, _ = optimizer.step(*args, micro_batches=micro_batches)
        return eqx.filter((model, state), eqx.is_inexact_array)

    whole, parts = step(model, x, y, 1), step(model, x, y, 2)
    assert_near(parts, whole, TOLERANCE)
    for a, b in pairs(params_of(model), whole[0]):
        assert np.linalg.norm(a - b) > 1e-6
