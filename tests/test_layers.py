"""Every tagged layer: a drop-in for the layer of Equinox, whose curvature is that of the
parameters that it has, alone or stacked, whole or partly frozen."""

import functools as ft
import io
import re
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
from eqx_kfac._tag import fill_tags, tagged_layers

from .helpers import (
    arrays,
    assert_near,
    assert_same,
    assert_same_leaves,
    expanded,
    filled,
    normal,
    only_arrays,
)
from .plain import plain_kfac
from .reference import error


N = 4


#
# The layers
#


def each(layer, state, x):
    return jax.vmap(layer)(x)


def normalise(layer, state, x):
    apply = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return apply(x, state)[0]


def with_state(layer, state, x):
    return jax.vmap(lambda x: layer(x, state)[0])(x)


def gru(layer, state, x):
    return jax.vmap(lambda x: layer(x[:3], x[3:]))(x)


def lstm(layer, state, x):
    return jax.vmap(lambda x: jnp.concatenate(layer(x[:3], (x[3:5], x[5:]))))(x)


class Case(NamedTuple):
    make: Callable  # (namespace, key) -> layer
    shape: tuple[int, ...]  # Of one input.
    run: Callable = each  # (layer, state, batch) -> outputs
    train: Any = None  # How many parameters (leaves) it has, if not two.


def _linear(key):
    return eqx.nn.Linear(4, 3, key=key)


cases = {
    "Linear": Case(lambda nn, k: nn.Linear(4, 3, key=k), (4,)),
    "Conv": Case(lambda nn, k: nn.Conv(1, 2, 3, 2, dilation=2, key=k), (2, 5)),
    "Conv1d": Case(lambda nn, k: nn.Conv1d(2, 3, 3, 2, key=k), (2, 5)),
    "Conv2d": Case(
        lambda nn, k: nn.Conv2d(2, 4, (3, 2), padding="SAME", groups=2, key=k), (2, 3, 2)
    ),
    "Conv2d circular": Case(
        lambda nn, k: nn.Conv2d(2, 2, 2, padding="SAME", padding_mode="CIRCULAR", key=k),
        (2, 2, 3),
    ),
    "Conv3d": Case(
        lambda nn, k: nn.Conv3d(1, 2, 2, use_bias=False, key=k), (1, 2, 3, 2), train=1
    ),
    "ConvTranspose": Case(lambda nn, k: nn.ConvTranspose(1, 2, 2, 2, key=k), (2, 3)),
    "ConvTranspose1d": Case(
        lambda nn, k: nn.ConvTranspose1d(2, 3, 3, 2, padding=1, key=k), (2, 3)
    ),
    "ConvTranspose2d": Case(
        lambda nn, k: nn.ConvTranspose2d(2, 2, 2, 2, groups=2, key=k), (2, 2, 2)
    ),
    "ConvTranspose3d": Case(
        lambda nn, k: nn.ConvTranspose3d(1, 2, 2, use_bias=False, key=k),
        (1, 2, 1, 2),
        train=1,
    ),
    "Embedding": Case(lambda nn, k: nn.Embedding(5, 3, key=k), (), train=1),
    "LayerNorm": Case(lambda nn, k: nn.LayerNorm(4), (4,)),
    "LayerNorm 2d": Case(
        lambda nn, k: nn.LayerNorm((2, 3), use_bias=False), (2, 3), train=1
    ),
    "RMSNorm": Case(lambda nn, k: nn.RMSNorm(4), (4,)),
    "GroupNorm": Case(lambda nn, k: nn.GroupNorm(2, 4), (4, 3)),
    "BatchNorm": Case(
        lambda nn, k: nn.BatchNorm(3, "batch", mode="batch"), (3, 2), normalise
    ),
    "BatchNorm ema": Case(
        lambda nn, k: nn.BatchNorm(3, "batch", mode="ema", momentum=0.5), (3,), normalise
    ),
    "PReLU": Case(lambda nn, k: nn.PReLU(0.3), (4,), train=1),
    "PReLU vector": Case(lambda nn, k: nn.PReLU(jnp.arange(1.0, 5.0)), (4,), train=1),
    "GRUCell": Case(lambda nn, k: nn.GRUCell(3, 2, key=k), (5,), gru, train=4),
    "LSTMCell": Case(lambda nn, k: nn.LSTMCell(3, 2, key=k), (7,), lstm, train=3),
    "WeightNorm": Case(lambda nn, k: nn.WeightNorm(_linear(k)), (4,), train=3),
    "WeightNorm conv": Case(
        lambda nn, k: nn.WeightNorm(eqx.nn.Conv1d(2, 3, 2, key=k), axis=None),
        (2, 4),
        train=3,
    ),
    "SpectralNorm": Case(
        lambda nn, k: nn.SpectralNorm(_linear(k), "weight", key=k), (4,), with_state
    ),
}
scales = [name for name in cases if "Norm" in name or "PReLU" in name]
maps = [name for name in cases if name not in scales]
stateless = [name for name in cases if cases[name].run not in (normalise, with_state)]
each_case = pytest.mark.parametrize("name", cases)


def make(name, nn=eqx.nn, seed=0):
    """A layer and its state, with parameters that are nowhere zero or one."""
    theirs, ours = all_layers(seed)
    return (ours if nn is kfac else theirs)[name]


@ft.cache
def all_layers(seed):
    made = new_layers(jnp.array(seed))
    change = lambda pair: (perturbed(pair[0], seed), pair[1])
    return [{name: change(pair) for name, pair in layers.items()} for layers in made]


@eqx.filter_jit
def new_layers(seed):
    def new(case, nn):
        return eqx.nn.make_with_state(lambda: case.make(nn, jr.key(seed)))()

    both = eqx.nn, kfac
    return [{name: new(case, nn) for name, case in cases.items()} for nn in both]


def perturbed(layer, seed):
    params, rest = eqx.partition(layer, eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(params)
    rng = np.random.default_rng(seed + 100)
    leaves = [
        jax.device_put(np.asarray(p) + 0.1 * rng.normal(size=p.shape)) for p in leaves
    ]
    return eqx.combine(treedef.unflatten(leaves), rest)


def fresh(state):
    """A state may be used only once; this may be, once more."""
    return jtu.tree_map(lambda leaf: leaf, state)


def inputs_of(name, seed=1):
    if name == "Embedding":
        return jnp.array([0, 3, 3, 1])
    return normal(N, *cases[name].shape, seed=seed)


def run(name, layer, state, x=None):
    return cases[name].run(layer, fresh(state), inputs_of(name) if x is None else x)


#
# Drop-ins
#


@each_case
def test_same_constructor_and_leaves(name):
    ours, theirs = make(name, kfac)[0], make(name)[0]
    assert isinstance(ours, type(theirs)) and type(ours) is not type(theirs)
    assert len(arrays(ours)) == (cases[name].train or 2)
    assert_same_leaves(only_arrays(ours), only_arrays(theirs))
    for field in theirs.__dataclass_fields__:
        if not callable(getattr(theirs, field)) and field not in ("layer", "uv_index"):
            values = (getattr(layer, field) for layer in (theirs, ours))
            values = (eqx.filter(value, eqx.is_array_like) for value in values)
            assert eqx.tree_equal(*(jtu.tree_map(np.asarray, value) for value in values))


@each_case
def test_convert_and_revert(name):
    theirs, _ = make(name)
    converted = kfac.convert(theirs)
    assert type(converted) is type(make(name, kfac)[0])
    assert converted.tag == make(name, kfac)[0].tag
    assert_same(kfac.revert(converted), theirs)
    assert_same(kfac.convert(converted), converted)
    assert not eqx.tree_equal(converted, theirs)
    assert_same_leaves(converted, theirs)


@each_case
def test_same_outputs(name):
    y, of_converted, of_mine, collecting = outputs()[name]
    np.testing.assert_array_equal(of_converted, y)
    np.testing.assert_array_equal(of_mine, y)
    assert collecting.dtype == y.dtype
    np.testing.assert_allclose(collecting, y, rtol=1e-15, atol=1e-15)


@ft.cache
def outputs():
    """Of the layer, the converted one, ours, and the converted one that collects."""
    layers = {name: (*make(name), make(name, kfac)) for name in cases}

    def run_all(name, theirs, state, mine):
        converted = kfac.convert(theirs)
        layers = (theirs, state), (converted, state), mine, (fill_tags(converted), state)
        return [run(name, *layer) for layer in layers]

    together = lambda layers: {name: run_all(name, *of) for name, of in layers.items()}
    return eqx.filter_jit(together)(layers)


def program(name, layer, state, prepare=lambda layer: layer):
    params, static = eqx.partition((layer, fresh(state)), eqx.is_array)

    @jax.make_jaxpr
    def traced(params, x):
        layer, state = eqx.combine(params, static)
        return run(name, prepare(layer), state, x)

    return re.sub("0x[0-9a-f]+", "", str(traced(params, inputs_of(name))))


@each_case
def test_same_program(name):
    theirs, state = make(name)
    converted = kfac.convert(theirs)
    assert program(name, converted, state) == program(name, theirs, state)
    assert "kfac_tag" in program(name, converted, state, fill_tags)


@each_case
def test_same_files(name):
    theirs, _ = make(name)
    other, _ = make(name, seed=1)
    pairs = [(theirs, kfac.convert(other)), (kfac.convert(theirs), other)]
    written = []
    for trained, like in pairs:
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, trained)
        written.append(file.getvalue())
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, like)
        assert_same_leaves(only_arrays(read), only_arrays(theirs))
    assert written[0] == written[1]


def test_parameter():
    value = jnp.array([[1.0, -2.0], [3.0, 0.5]])
    parameter = kfac.Parameter(value)
    assert parameter(jnp.zeros(3)) is value
    assert parameter.tag.block == kfac.Diagonal()
    assert jtu.tree_leaves(parameter) == [value]
    assert_same(kfac.convert(parameter), parameter)
    np.testing.assert_array_equal(fill_tags(parameter)(jnp.zeros(3)), value)
    block = kfac.Kronecker(kfac.Reduce())
    assert kfac.Parameter(value, block).tag.block == block


#
# Curvature. All layers at once, each with a loss of its own: one compilation
#


def objective(layers, states, xs, targets):
    """The sum of all layers' losses; and each of them."""
    losses = {}
    for name, layer in layers.items():
        y = run(name, layer, states[name], xs[name]).reshape(N, -1)
        losses[name] = kfac.SquaredError(jnp.tanh(y), targets[name])
    total = sum(losses.values(), 0)
    return total, {name: loss.value for name, loss in losses.items()}


def data(names):
    xs = {name: inputs_of(name) for name in names}
    targets = {}
    for name in names:
        layer, state = make(name)  # Not while it is traced: what is made is kept.
        y = jax.eval_shape(lambda x: run(name, layer, state, x), xs[name])
        targets[name] = normal(N, y.size // N, seed=len(name))
    return xs, targets


def layers_of(names, seed=0):
    return {name: expanded(kfac.convert(make(name, seed=seed)[0])) for name in names}


def states_of(names):
    return {name: make(name)[1] for name in names}


@eqx.filter_jit
def empirical(params, frozen, states, xs, targets):
    def loss_fn(params):
        return objective(eqx.combine(params, frozen), states, xs, targets)

    return kfac.curvature(loss_fn, kfac.Empirical())(params)


@ft.cache
def factors(name, seed=0, train="all"):
    """Of one layer, computed with those of others."""
    names = scales if name in scales else maps
    layers = layers_of(names, seed)
    params, frozen = eqx.partition(layers, filters[train](layers))
    return empirical(params, frozen, states_of(names), *data(names))[name]


def _is_bias(path):
    return jtu.keystr(path[-1:]) in (".bias", ".bias_n", ".g")


def _where(wanted):
    return lambda tree: jtu.tree_map_with_path(
        lambda path, leaf: eqx.is_inexact_array(leaf) and wanted(path), tree
    )


filters = {
    "all": _where(lambda path: True),
    "biases": _where(_is_bias),
    "weights": _where(lambda path: not _is_bias(path)),
}


def is_factors(node):
    return isinstance(node, (kfac.factors.KroneckerFactors, kfac.factors.DiagonalFactors))


def by_tag(layer, curvature=None):
    """`(tag, factors)` for all tags of a layer."""
    if isinstance(layer.tag, kfac.Tag):
        return [(layer.tag, curvature)]
    return [(tag, curvature and curvature[name]) for name, tag in layer.tag.items()]


def dense(f):
    """The blocks that factors denote, one for every one of the maps side by side."""
    if isinstance(f, kfac.factors.DiagonalFactors):
        return [np.diag(d.ravel()) for d in _each(f.diagonal, 2)]
    A, diagonal = np.asarray(f.input_factor), f.input_factor.ndim < f.output_factor.ndim
    A = [np.diag(a) for a in _each(A, 1)] if diagonal else _each(A, 2)
    return [np.kron(g, a) for g, a in zip(_each(f.output_factor, 2), A, strict=True)]


def _each(a, rank):
    a = np.asarray(a)
    return a.reshape(-1, *a.shape[a.ndim - rank :])


def numbered(layer):
    """The layer with its parameters counted, from 0."""
    params, rest = eqx.partition(layer, eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(params)
    starts = np.cumsum([0] + [p.size for p in leaves])
    leaves = [
        jax.device_put(np.arange(start, start + p.size, dtype=float).reshape(p.shape))
        for start, p in zip(starts, leaves)
    ]
    return eqx.combine(treedef.unflatten(leaves), rest)


@ft.cache
def positions():
    """By what is trained and by layer, for every tag (`None`, if it has none of these):
    where in their blocks parameters are, by number."""

    @eqx.filter_jit
    def matrices(layers, train):
        def of_tag(tag, layer):
            trained = eqx.filter(layer, filters[train](layer))
            if all(p is None for p in tag.form.parameters(trained)):
                return None
            return tag.form.to_matrix(trained)

        return {
            name: [of_tag(tag, layer) for tag, _ in by_tag(layer)]
            for name, layer in layers.items()
        }

    def numbers(matrix):
        return [[int(i) for i in m.ravel()] for m in _each(matrix, 2)]

    layers = {name: numbered(kfac.convert(make(name)[0])) for name in cases}
    found = {train: matrices(layers, train) for train in filters}
    return jtu.tree_map(numbers, found)


@pytest.mark.parametrize("train", ["biases", "weights"])
@each_case
def test_frozen_leaves_leave_out_rows_and_columns(name, train):
    """What is kept of the other parameters is what it is without freezing."""
    layer = kfac.convert(make(name)[0])
    whole, some = factors(name), factors(name, train=train)
    pairs = zip(by_tag(layer, whole), by_tag(layer, some), strict=True)
    where = zip(positions()["all"][name], positions()[train][name], strict=True)
    compared = 0
    for ((_, f), (_, part)), (all_of_them, those) in zip(pairs, where, strict=True):
        if those is None:
            assert part is None
            continue
        for a, b, m, n in zip(dense(f), dense(part), all_of_them, those, strict=True):
            index = [m.index(i) for i in n]
            assert error(b, a[np.ix_(index, index)]) <= 1e-12
            compared += 1
    assert compared > 0 or not any(positions()[train][name])


@pytest.mark.parametrize("name", scales)
def test_diagonals_are_mean_squares_of_examples_gradients(name):
    layer = kfac.convert(make(name)[0])
    compared = 0
    for (_, f), (squares, mean) in zip(
        by_tag(layer, factors(name)), examples_gradients()[name], strict=True
    ):
        if isinstance(f, kfac.factors.DiagonalFactors):
            assert error(f.diagonal, squares) <= 1e-12
            assert error(f.diagonal, mean) > 1e-2
            compared += 1
    assert compared == 1


@ft.cache
def examples_gradients():
    """By layer, for every tag, the mean of squares, and the square of the mean."""

    def of_layer(name, layer, state, x, target):
        params, static = eqx.partition(layer, eqx.is_inexact_array)

        def losses(params):
            y = run(name, eqx.combine(params, static), state, x).reshape(N, -1)
            return 0.5 * jnp.sum((jnp.tanh(y) - target) ** 2, axis=-1)

        found = jax.jacobian(losses)(params)
        squares = jtu.tree_map(lambda g: jnp.mean(g**2, axis=0), found)
        mean = jtu.tree_map(lambda g: jnp.mean(g, axis=0) ** 2, found)
        tags = [tag for tag, _ in by_tag(kfac.convert(layer))]
        return [[tag.form.to_matrix(a) for a in (squares, mean)] for tag in tags]

    made, (xs, targets) = {name: make(name) for name in scales}, data(scales)
    run_all = lambda made, xs, targets: {
        name: of_layer(name, *made[name], xs[name], targets[name]) for name in scales
    }
    return eqx.filter_jit(run_all)(made, xs, targets)


def stacked(members):
    """Two layers as one, with an axis in front."""
    params = [eqx.filter(m, eqx.is_array) for m in members]
    stack = lambda *leaves: jax.device_put(np.stack([np.asarray(a) for a in leaves]))
    together = jtu.tree_map(stack, *params)
    return eqx.combine(together, members[0])


@eqx.filter_jit
def empirical_stacked(layers, xs, targets):
    def loss_fn(layers):
        total = 0
        for name, layer in layers.items():
            axes = (eqx.if_array(0), None, None)
            y = eqx.filter_vmap(ft.partial(run, name), in_axes=axes)(
                layer, None, xs[name]
            )
            y = jnp.concatenate([y[0].reshape(N, -1), y[1].reshape(N, -1)], axis=1)
            target = jnp.concatenate(2 * [targets[name]], axis=1)
            total = kfac.SquaredError(jnp.tanh(y), target) + total
        return total

    return kfac.curvature(loss_fn, kfac.Empirical())(layers)


def two(name):
    return [make(name, seed=seed)[0] for seed in range(2)]


@ft.cache
def stacked_factors(name):
    names = [n for n in (scales if name in scales else maps) if n in stateless]
    make = lambda n: expanded(kfac.convert(stacked(two(n))))
    layers = {n: make(n) for n in names if "PReLU" not in n}
    for n in set(names) - set(layers):  # Stacked slopes look like those of channels.
        layers[n] = stacked(kfac.convert(two(n)))
    return empirical_stacked(layers, *data(names))[name]


@pytest.mark.parametrize("name", stateless)
def test_stacked_layers_are_separate_ones(name):
    got = stacked_factors(name)
    for seed in range(2):
        one = jtu.tree_map(lambda a: np.asarray(a)[seed], got)
        assert_near(one, factors(name, seed), 1e-12)
    differ = [error(a[0], a[1]) for a in arrays(got) if np.linalg.norm(a[1]) > 0]
    assert max(differ) > 1e-2


@pytest.mark.parametrize("name", stateless)
def test_conversion_of_stacked_layers(name):
    theirs = stacked(two(name))
    converted = kfac.convert(theirs)
    assert type(converted) is type(make(name, kfac)[0])
    assert_same(kfac.revert(converted), theirs)
    assert_same_leaves(converted, theirs)


#
# Steps
#


def cast_arrays(tree, dtype):
    cast = lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a
    return jtu.tree_map(cast, tree)


class Scale(eqx.Module):
    scale: kfac.Parameter

    def __call__(self, x):
        return self.scale(x) * x


low_precision = ("Linear", "Embedding", "Conv2d", "LayerNorm", "LSTMCell", "WeightNorm")


@ft.cache
def three_steps(dtype):
    """`(model, losses by layer, states)` of every step."""
    names = tuple(cases) if dtype == jnp.float64 else low_precision
    layers = cast_arrays({**layers_of(names)}, dtype)
    layers["Parameter"] = Scale(kfac.Parameter(jnp.full(4, 0.5, dtype)))
    states = cast_arrays(fresh(states_of(names)), dtype)
    xs, targets = cast_arrays(data(names), dtype)
    xs["Parameter"], targets["Parameter"] = xs["Linear"], xs["LayerNorm"]

    def run(name, layer, state, x):
        if name == "Parameter":
            return jax.vmap(layer)(x), None
        if cases[name].run is normalise:
            apply = ft.partial(jax.vmap, axis_name="batch", in_axes=(0, None))
            return apply(layer, out_axes=(0, None))(x, state)
        return cases[name].run(layer, state, x), None

    def loss_fn(layers, states, xs, targets):
        losses, new = {}, {}
        for name, layer in layers.items():
            y, new[name] = run(name, layer, states.get(name), xs[name])
            losses[name] = kfac.SquaredError(y.reshape(N, -1), 0.1 * targets[name])
        values = {name: loss.value for name, loss in losses.items()}
        return sum(losses.values(), 0), (values, new)

    optimizer = plain_kfac(
        0.02, 0.0, damping=1.0, fisher=kfac.Empirical(), inverse_period=1
    )
    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    state, history = eqx.filter_jit(optimizer.init)(layers), []
    for _ in range(3):
        before = layers
        layers, state, info = step(layers, state, fresh(states), xs, targets)
        assert not info.rejected
        values, new = info.aux
        history.append((before, values, new))
    return history


@pytest.mark.parametrize(
    "name, dtype",
    [(name, jnp.float64) for name in [*cases, "Parameter"]]
    + [(name, jnp.bfloat16) for name in [*low_precision, "Parameter"]],
)
def test_steps_lower_every_layers_loss(name, dtype):
    history = three_steps(dtype)
    losses = [float(values[name]) for _, values, _ in history]
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]
    if dtype == jnp.float64:
        assert losses[0] > losses[1] > losses[2]
    before, after = history[0][0][name], history[-1][0][name]
    assert jtu.tree_structure(before) == jtu.tree_structure(after)
    for a, b in zip(arrays(before), arrays(after), strict=True):
        assert a.dtype == b.dtype == dtype and np.any(a != b)


@pytest.mark.parametrize("name", ["BatchNorm", "BatchNorm ema"])
def test_running_statistics_come_back_from_a_step(name):
    layer, state = make(name)
    apply = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, want = eqx.filter_jit(apply)(inputs_of(name), fresh(state))
    _, _, new = three_steps(jnp.float64)[0]
    assert_near(new[name], want, 1e-12)
    assert any(np.any(a != b) for a, b in zip(arrays(want), arrays(state)))


#
# convert(model, blocks=...)
#


reduce = kfac.Kronecker(kfac.Reduce())
expand = kfac.Kronecker()


class Tower(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm
    mlps: list
    cell: eqx.nn.GRUCell

    def __init__(self, key=jr.key(0)):
        self.conv = eqx.nn.Conv1d(2, 2, 3, key=key)
        self.norm = eqx.nn.LayerNorm(2)
        self.mlps = [eqx.nn.MLP(2, 2, 2, 1, key=key) for _ in range(11)]
        self.cell = eqx.nn.GRUCell(2, 2, key=key)


@ft.cache
def tower():
    return filled(Tower)


def blocks_of(blocks):
    """The blocks of some layers of a tower, by name."""
    model = kfac.convert(tower(), blocks=blocks)
    layers = dict(
        conv=model.conv,
        norm=model.norm,
        cell=model.cell,
        first=model.mlps[1].layers[0],
        second=model.mlps[1].layers[1],
        tenth=model.mlps[10].layers[0],
    )
    return {name: _block(layer) for name, layer in layers.items()}


def _block(layer):
    if not hasattr(layer, "tag"):
        return None
    if isinstance(layer.tag, kfac.Tag):
        return layer.tag.block
    (block,) = {tag.block for tag in layer.tag.values()}
    return block


default = dict(
    conv=expand,
    norm=kfac.Diagonal(),
    cell=expand,
    first=expand,
    second=expand,
    tenth=expand,
)
mlp = dict(first=reduce, second=reduce, tenth=reduce)
choices = {
    "default": (None, {}),
    "one": (reduce, dict(mlp, conv=reduce, cell=reduce)),
    "one diagonal": (
        kfac.Diagonal(),
        {name: kfac.Diagonal() for name in default},
    ),
    "nothing": ({}, {}),
    "type": ({eqx.nn.Linear: reduce}, mlp),
    "types": (
        {eqx.nn.Conv1d: kfac.Diagonal(), eqx.nn.GRUCell: reduce},
        dict(conv=kfac.Diagonal(), cell=reduce),
    ),
    "type of a scale": ({eqx.nn.LayerNorm: reduce}, dict(norm=reduce)),
    "path": ({".conv": reduce}, dict(conv=reduce)),
    "path above": ({".mlps": reduce}, mlp),
    "path of an item": ({".mlps[1]": reduce}, dict(first=reduce, second=reduce)),
    "longest path": (
        {".mlps[1].layers[0]": kfac.Diagonal(), ".mlps": reduce, ".mlps[1]": None},
        dict(first=kfac.Diagonal(), second=None, tenth=reduce),
    ),
    "root": ({"": reduce}, {name: reduce for name in default}),
    "path before type": (
        {eqx.nn.Linear: kfac.Diagonal(), ".mlps[1]": reduce},
        dict(first=reduce, second=reduce, tenth=kfac.Diagonal()),
    ),
    "path everywhere before type": (
        {eqx.nn.Linear: kfac.Diagonal(), ".mlps": reduce},
        mlp,
    ),
    "untagged type": ({eqx.nn.GRUCell: None}, dict(cell=None)),
    "untagged path": ({".norm": None}, dict(norm=None)),
    "function": (
        lambda path, layer: reduce if path.endswith("[0]") else "default",
        dict(first=reduce, tenth=reduce),
    ),
    "function of the layer": (
        lambda path, layer: None if isinstance(layer, eqx.nn.Conv) else reduce,
        dict(mlp, conv=None, norm=reduce, cell=reduce),
    ),
}


@pytest.mark.parametrize("name", choices)
def test_choice_of_blocks(name):
    blocks, chosen = choices[name]
    assert blocks_of(blocks) == {**default, **chosen}
    assert_same(kfac.revert(kfac.convert(tower(), blocks)), tower())


@pytest.mark.parametrize(
    "key, named",
    [
        (eqx.nn.Conv3d, "Conv3d"),
        (eqx.nn.Conv, r"\.Conv'"),  # Of which the tower has a subclass.
        (eqx.nn.MLP, "MLP"),
        (kfac.Linear, "Linear"),
        (".mlps[11]", r"\.mlps\[11\]"),
        (".mlp", r"`\.mlp`"),
        ("mlps", "`mlps`"),
        (".conv.weight", r"\.conv\.weight"),
        (".mlps[1].activation", "activation"),
    ],
)
def test_choices_that_nobody_has(key, named):
    with pytest.raises(ValueError, match=named) as error:
        kfac.convert(tower(), {key: reduce, ".conv": expand})
    unused, there = str(error.value).split("There are: ")
    assert "`.conv`" not in unused and there.startswith("`.conv`, ")


def test_chosen_block_is_in_the_repr():
    make = lambda blocks: repr(kfac.convert(tower(), blocks).conv)
    assert "Reduce(" in make(reduce) and "Reduce(" not in make(None)
    assert "Diagonal(" in make({".conv": kfac.Diagonal()})
    assert "Diagonal(" not in make(None)
    assert "tag=" not in make({".conv": None})


def test_layers_take_a_block():
    layers = [
        kfac.Conv1d(2, 2, 3, key=jr.key(0), block=reduce),
        kfac.LayerNorm(3, block=reduce),
        kfac.GRUCell(2, 2, key=jr.key(0), block=reduce),
        kfac.Embedding(3, 2, key=jr.key(0), block=reduce),
        kfac.PReLU(block=reduce),
    ]
    assert [_block(layer) for layer in layers] == 5 * [reduce]
    assert_same(kfac.convert(layers, kfac.Diagonal()), layers)


#
# Shared weights
#


V, D, S = 5, 3, 2


class Tied(eqx.Module):
    """Tokens to tokens, with one matrix at both ends."""

    shared: eqx.nn.Shared

    def __init__(self, *, bias, owner, key=jr.key(0)):
        keys = jr.split(key)
        pair = (
            eqx.nn.Embedding(V, D, key=keys[0]),
            eqx.nn.Linear(D, V, use_bias=bias, key=keys[1]),
        )
        weights = [lambda p: p[0].weight, lambda p: p[1].weight]
        self.shared = eqx.nn.Shared(pair, weights[1 - owner], weights[owner])

    def __call__(self, tokens):
        embedding, projection = self.shared()
        h = jnp.tanh(jax.vmap(embedding)(tokens))
        return jax.vmap(projection)(h)


class Pair(eqx.Module):
    """Two linear layers, the weight of the second being that of the first."""

    shared: eqx.nn.Shared

    def __init__(self, d_hidden, *, transposed, key=jr.key(0)):
        keys = jr.split(key)
        d_out = D if transposed else d_hidden
        first = eqx.nn.Linear(D, d_hidden, use_bias=False, key=keys[0])
        second = eqx.nn.Linear(d_hidden, d_out, key=keys[1])
        get = lambda p: p[0].weight.T if transposed else p[0].weight
        self.shared = eqx.nn.Shared((first, second), lambda p: p[1].weight, get)

    def __call__(self, x):
        first, second = self.shared()
        return jax.vmap(lambda x: second(jnp.tanh(first(x))))(x)


def cotangents(fisher, loss, key):
    """What is pulled back, `[number, *outputs]`."""
    number = fisher.number([loss])
    return jnp.stack([fisher.cotangents([loss], i, key)[0] for i in range(number)])


fishers = dict(exact=kfac.Exact(), empirical=kfac.Empirical(), sampled=kfac.MonteCarlo(2))


def collect(model, fisher, x, y, key):
    loss_fn = lambda model: kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)
    return kfac.curvature(loss_fn, fisher)(model, key=key)


def second_moment(*rows):
    rows = [np.asarray(r).reshape(-1, r.shape[-1]) for r in rows]
    return sum(r.T @ r for r in rows)


def nearest(*uses):
    """The Kronecker product that has the partial traces of a sum of such: $(G, A)$."""
    G = sum(np.trace(a) * g for g, a in uses)
    A = sum(np.trace(g) * a for g, a in uses)
    return G, A / np.trace(G)


tokens = jnp.array([[0, 3], [3, 1], [3, 3], [2, 0]])


def tied_rows(model, fisher, key):
    """`h`, the embedding's and the projection's `g`, explicitly."""
    embedding, projection = model.shared()
    h = jnp.tanh(embedding.weight[tokens])
    logits = jax.vmap(jax.vmap(projection))(h)
    g = cotangents(fisher, kfac.SoftmaxCrossEntropy(logits, tokens), key)
    g_embedding = jnp.einsum("...v,vd->...d", g, projection.weight) * (1 - h[None] ** 2)
    return h, g_embedding, g


@ft.cache
@eqx.filter_jit
def tied(bias, owner):
    """A model and its outputs, plain and converted; and by Fisher, factors and rows."""
    model, key = Tied(bias=bias, owner=owner), jr.key(3)
    converted = kfac.convert(model)
    found = {
        name: (
            collect(converted, fisher, tokens, tokens, key).shared.pytree,
            tied_rows(model, fisher, key),
        )
        for name, fisher in fishers.items()
    }
    models = model, converted
    return models, [jax.vmap(m)(tokens) for m in models], found


@pytest.mark.parametrize("fisher", fishers)
@pytest.mark.parametrize("bias, owner", [(True, 0), (False, 0), (False, 1)])
def test_embedding_tied_to_the_projection(fisher, bias, owner):
    (model, converted), outputs, by_fisher = tied(bias, owner)
    assert type(converted.shared) is kfac.Shared
    assert_same(kfac.revert(converted), model)
    assert_same_leaves(*outputs)
    found, rows = by_fisher[fisher]
    hh, gg_embedding, gg = map(second_moment, rows)
    counts = np.bincount(tokens.ravel(), minlength=V)
    number = tokens.size  # Of rows, in both uses, and of terms.
    words, hidden = np.diag(counts) / number, hh / number
    if owner == 0:  # W: [d_out, vocabulary], diagonal on the side of the vocabulary.
        words_out = np.diag(np.diag(gg)) / number
        G, A = nearest((gg_embedding / number, words), (hidden, words_out))
        A = np.diag(A)
    else:
        G, A = nearest((gg / number, hidden), (words, gg_embedding / number))
    assert error(found[owner].input_factor, A) <= 1e-12
    assert error(found[owner].output_factor, G) <= 1e-12
    # The trace is that of the sum of both uses, each with a product of its own.
    total = np.trace(gg_embedding) + np.trace(gg) * np.trace(hidden)
    trace = np.trace(G) * (np.sum(A) if A.ndim == 1 else np.trace(A))
    assert error(trace, total / number) <= 1e-12
    if bias:  # The projection's own parameter.
        assert error(found[1].output_factor, gg / number) <= 1e-12
        assert error(found[1].input_factor, np.ones((1, 1))) <= 1e-12
    # Neither use alone.
    alone = counts if owner == 0 else hh
    assert error(A / np.sum(A), alone / np.sum(alone)) > 1e-2


def test_tied_weights_made_by_hand():
    """With tagged layers, as `convert` makes it."""
    converted = kfac.convert(filled(lambda: Tied(bias=False, owner=0)))
    pair = kfac.revert(converted).shared()
    shared = converted.shared
    mine = kfac.Shared(kfac.convert(pair), shared.where, shared.get)
    assert jtu.tree_structure(mine) == jtu.tree_structure(shared)
    assert_same_leaves(only_arrays(mine), only_arrays(shared))
    assert mine.ties == shared.ties != ()


@ft.cache
@eqx.filter_jit
def sharing(d_hidden, transposed):
    """By Fisher, the factors, and all rows, explicitly."""
    model = Pair(d_hidden, transposed=transposed)
    x = normal(N, S, D, seed=1)
    y = np.arange(N * S).reshape(N, S) % D
    first, second = model.shared()
    h = jnp.tanh(x @ first.weight.T)
    logits = h @ second.weight.T + second.bias.reshape(1, 1, -1)
    by_fisher = {}
    for name in ("exact", "empirical"):
        converted = kfac.convert(model, kfac.Kronecker(kfac.Expand()))
        found = collect(converted, fishers[name], x, y, None).shared.pytree
        g = cotangents(fishers[name], kfac.SoftmaxCrossEntropy(logits, y), None)
        g_hidden = jnp.einsum("...o,oh->...h", g, second.weight) * (1 - h[None] ** 2)
        by_fisher[name] = found, (x, h, g_hidden, g)
    return by_fisher


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("d_hidden, transposed", [(3, False), (3, True), (4, True)])
def test_linear_layers_share_a_weight(fisher, d_hidden, transposed):
    found, (x, h, g_hidden, g) = sharing(d_hidden, transposed)[fisher]
    number, alone = N * S, second_moment(x) / (N * S)
    if transposed:
        x, g_hidden, g_last, h = (second_moment(a) / number for a in (x, g_hidden, g, h))
        G, A = nearest((g_hidden, x), (h, g_last))
    else:
        G, A = second_moment(g_hidden, g) / number, second_moment(x, h) / (2 * number)
    assert error(found[0].input_factor, A) <= 1e-12
    assert error(found[0].output_factor, G) <= 1e-12
    assert error(A / np.trace(A), alone / np.trace(alone)) > 1e-2
    # The bias, which is not shared.
    assert error(found[1].output_factor, second_moment(g) / (N * S)) <= 1e-12


class Attending(eqx.Module):
    """Tokens to tokens, with `attend` at the end."""

    embedding: eqx.nn.Embedding

    def __call__(self, tokens):
        h = jnp.tanh(jax.vmap(self.embedding)(tokens))
        return jax.vmap(self.embedding.attend)(h)


def attending(block):
    return filled(lambda: Attending(kfac.Embedding(V, D, key=jr.key(0), block=block)))


@pytest.mark.parametrize("fisher", fishers)
def test_attend_is_a_tied_projection(fisher):
    model = attending(kfac.Kronecker(tied=True))
    tied = kfac.convert(filled(lambda: Tied(bias=False, owner=0)))
    pair = eqx.tree_at(lambda p: p[0].weight, tied.shared.pytree, model.embedding.weight)
    tied = eqx.tree_at(lambda t: t.shared.pytree, tied, pair)

    @eqx.filter_jit
    def run(models):
        args = fishers[fisher], tokens, tokens, jr.key(3)
        outputs = [jax.vmap(model)(tokens) for model in models]
        return outputs, [collect(model, *args) for model in models]

    outputs, (found, want) = run([model, tied])
    assert_same_leaves(*outputs)
    found, want = found.embedding, want.shared.pytree[0]
    assert error(found.input_factor, want.input_factor) <= 1e-12
    assert error(found.output_factor, want.output_factor) <= 1e-12


def test_attend_needs_a_tied_block():
    with pytest.raises(ValueError, match="tied=True") as raised:
        collect(attending(None), kfac.Exact(), tokens, tokens, None)
    assert ".embedding" in "".join(raised.value.__notes__)
    assert jax.eval_shape(attending(None), np.asarray(tokens)[0]).shape == (S, V)


composites = {
    "MLP": lambda nn, **kw: nn.MLP(3, 2, 4, 2, jnp.tanh, key=jr.key(0), **kw),
    "MultiheadAttention": lambda nn, **kw: nn.MultiheadAttention(
        2, 4, use_output_bias=True, key=jr.key(0), **kw
    ),
}


@pytest.mark.parametrize("name", composites)
def test_composites_are_those_of_equinox(name):
    make = composites[name]
    plain, ours = eqx.filter_jit(lambda: [make(nn) for nn in (eqx.nn, kfac)])()
    assert isinstance(ours, type(plain)) and type(ours) is getattr(kfac, name)
    converted = kfac.convert(plain)
    assert_same_leaves(ours, converted)
    for blocks in (None, reduce):
        mine = make(kfac, block=blocks)
        found = [tag for _, tag, _ in tagged_layers(mine)]
        assert found == [tag for _, tag, _ in tagged_layers(kfac.convert(plain, blocks))]
        assert_same(kfac.revert(mine), plain)
        assert jtu.tree_structure(kfac.convert(mine)) == jtu.tree_structure(mine)


class Twice(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key=jr.key(0)):
        pair = 2 * (eqx.nn.Linear(D, D, key=key),)
        self.shared = eqx.nn.Shared(pair, lambda p: p[1], lambda p: p[0])

    def __call__(self, x):
        first, second = self.shared()
        return second(jnp.tanh(first(x)))


def test_whole_layer_is_shared():
    x, y = normal(N, D, seed=1), np.arange(N) % D

    @eqx.filter_jit
    def run(model):
        converted = kfac.convert(model, kfac.Kronecker(kfac.Expand()))
        found = collect(converted, kfac.Exact(), x, y, None).shared.pytree[0]
        layer, _ = model.shared()
        h = jnp.tanh(jax.vmap(layer)(x))
        logits = jax.vmap(layer)(h)
        g = cotangents(kfac.Exact(), kfac.SoftmaxCrossEntropy(logits, y), None)
        g_hidden = jnp.einsum("...o,oh->...h", g, layer.weight) * (1 - h[None] ** 2)
        return found, h, g, g_hidden

    found, h, g, g_hidden = run(filled(Twice))
    bar = np.concatenate([np.concatenate([x, h]), np.ones((2 * N, 1))], axis=1)
    assert error(found.input_factor, second_moment(bar) / (2 * N)) <= 1e-12
    assert error(found.output_factor, second_moment(g, g_hidden) / N) <= 1e-12


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "pair"])
def test_steps_with_shared_weights(tied):
    makes = lambda: Pair(4, transposed=True), lambda: Tied(bias=True, owner=0)
    model, x = filled(makes[tied]), tokens if tied else normal(N, S, D, seed=1)
    loss_fn = lambda model, x: kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), tokens % D)
    optimizer = plain_kfac(0.1, 0.0, 0.1, fisher=kfac.Exact())
    model = kfac.convert(model)
    state = eqx.filter_jit(optimizer.init)(model)
    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    losses = []
    for _ in range(3):
        model, state, info = step(model, state, x)
        losses.append(info.loss)
    assert losses[0] > losses[1] > losses[2]
    assert type(model.shared) is kfac.Shared


def share_weight(first, second, get=lambda p: p[0].weight):
    return eqx.nn.Shared((first, second), lambda p: p[1].weight, get)


def square(nn=eqx.nn, **kwargs):
    return nn.Linear(3, 3, key=jr.key(0), **kwargs)


class Untaggable(eqx.Module):
    weight: jax.Array


def test_shared_with_an_owner_that_has_a_bias():
    with pytest.raises(ValueError, match="bias") as raised:
        kfac.convert(share_weight(square(), square()))
    assert "[0]" in str(raised.value) and "use_bias=False" in str(raised.value)
    kfac.convert(share_weight(square(use_bias=False), square()))


@pytest.mark.parametrize("swap", [False, True])
def test_shared_with_an_untagged_thing(swap):
    pair = [square(use_bias=False), Untaggable(jnp.ones((3, 3)))]
    shared = share_weight(*(pair[::-1] if swap else pair))
    with pytest.raises(ValueError, match="cannot") as raised:
        kfac.convert(shared)
    assert f"[{int(swap)}]" in str(raised.value)
    untagged = kfac.convert(shared, {eqx.nn.Linear: None})
    assert type(untagged.pytree[int(swap)]) is eqx.nn.Linear
    assert_same(kfac.revert(untagged), shared)


def test_shared_weights_that_are_not_linear():
    make = lambda: eqx.nn.Conv1d(2, 2, 3, use_bias=False, key=jr.key(0))
    with pytest.raises(ValueError, match="linear layers or embeddings"):
        kfac.convert(share_weight(make(), make()))


def test_transposed_use_needs_a_kronecker_block():
    transposed = lambda p: p[0].weight.T
    shared = share_weight(square(use_bias=False), square(), transposed)
    with pytest.raises(ValueError, match="kfac.Kronecker"):
        kfac.convert(shared, kfac.Diagonal())


#
# Weights within a normalisation
#


def wrapped(layer, state):
    """A layer that normalises the weight of another one; that layer, with the weight that
    results; and the scale of every output, `[d_out]`."""
    v = layer.layer.weight
    if isinstance(layer, eqx.nn.SpectralNorm):
        y, state = layer(jnp.zeros(4), fresh(state))
        u, w = state.get(layer.uv_index)
        scale = jnp.full(len(v), 1 / (u @ v @ w))
    else:
        norms = jnp.sqrt(jnp.sum(v.reshape(len(v), -1) ** 2, axis=1))
        norms = norms if layer.axis == 0 else jnp.sqrt(jnp.sum(v**2))[None]
        scale = jnp.broadcast_to(layer.g.ravel() / norms, len(v))
    weight = v * scale.reshape((-1,) + (1,) * (v.ndim - 1))
    return eqx.tree_at(lambda m: m.weight, layer.layer, weight), scale


@pytest.mark.parametrize("name", ["WeightNorm", "WeightNorm conv", "SpectralNorm"])
def test_weight_with_its_scale_held_fixed(name):
    """The factors of `v` in `W = s v`: those of `W`, with the gradients times `s`."""
    x, target = inputs_of(name), data([name])[1][name]

    def loss_fn(layer):
        y = jax.vmap(layer)(x).reshape(N, -1)
        return kfac.SquaredError(jnp.tanh(y), target)

    @eqx.filter_jit
    def run(layer, state):
        plain, scale = wrapped(layer, state)
        collect = kfac.curvature(loss_fn, kfac.Empirical())
        return collect(expanded(kfac.convert(plain))), scale

    want, scale = run(*make(name))
    scale = np.asarray(scale)
    found = factors(name)["weight"]
    assert error(found.input_factor, np.asarray(want.input_factor)[:-1, :-1]) <= 1e-12
    scaled = np.asarray(want.output_factor) * np.outer(scale, scale)
    assert error(found.output_factor, scaled) <= 1e-12
    assert error(found.output_factor, want.output_factor) > 1e-2


@pytest.mark.parametrize("wrap", [eqx.nn.WeightNorm, eqx.nn.SpectralNorm])
def test_normalised_embeddings_are_left_alone(wrap):
    embedding = filled(lambda: eqx.nn.Embedding(5, 3, key=jr.key(0)))
    options = dict(key=jr.key(0)) if wrap is eqx.nn.SpectralNorm else {}
    layer = filled(lambda: wrap(embedding, "weight", **options))
    assert type(kfac.convert(layer)) is wrap


def test_weight_norm_by_hand():
    layer, _ = make("WeightNorm")
    x, target = inputs_of("WeightNorm"), data(["WeightNorm"])[1]["WeightNorm"]
    arrays = x, target, layer.layer.weight, layer.g, layer.layer.bias
    x, target, v, g, bias = map(np.asarray, arrays)
    norm = np.linalg.norm(v, axis=1)[None]
    direction = x @ v.T / norm  # How the output changes with g.
    t = np.tanh(direction * g.T + bias[None])
    slope = (t - target) * (1 - t**2)
    found = factors("WeightNorm")
    assert error(found["weight"].input_factor, second_moment(x) / N) <= 1e-12
    scaled = second_moment(slope * g.T / norm) / N
    assert error(found["weight"].output_factor, scaled) <= 1e-12
    squares = np.concatenate([np.mean((slope * direction) ** 2, 0), np.mean(slope**2, 0)])
    diagonal = np.asarray(found["others"].diagonal)
    assert error(diagonal.ravel(), squares) <= 1e-12


#
# Several axes of examples
#


axes_makers = {
    "Linear": (lambda block: kfac.Linear(3, 2, key=jr.key(0), block=block), (3,)),
    "Conv1d": (lambda b: kfac.Conv1d(2, 2, 2, key=jr.key(0), block=b), (2, 4)),
    "LayerNorm": (lambda block: kfac.LayerNorm(3, block=block), (3,)),
}


@pytest.mark.parametrize("weights", [None, np.arange(6.0).reshape(2, 3) / 4])
@pytest.mark.parametrize("name", axes_makers)
@pytest.mark.parametrize(
    "make_block",
    [lambda **kw: kfac.Kronecker(kfac.Reduce(**kw)), kfac.Diagonal],
    ids=["Reduce", "Diagonal"],
)
def test_batch_axes(name, make_block, weights):
    """[2, 3] examples of 4 positions are 6 examples of 4 positions, if that is said."""
    make_layer, shape = axes_makers[name]
    x = normal(2, 3, 4, *shape, seed=1)

    def found(x, weights, block):
        def loss_fn(layer):
            for _ in range(x.ndim - len(shape)):
                layer = jax.vmap(layer)
            y = layer(x)
            y = jnp.tanh(y).reshape(*x.shape[: -len(shape)], -1)
            return kfac.SquaredError(y, jnp.ones(y.shape), weights)

        return kfac.curvature(loss_fn, kfac.Empirical())(make_layer(block))

    @jax.jit
    def compared(x, weights):
        merged = None if weights is None else weights.reshape(6)
        want = found(x.reshape(6, 4, *shape), merged, make_block())
        both = found(x, weights, make_block(batch_axes=2))
        return both, found(x, weights, make_block()), want

    both, outer, want = compared(x, weights)
    assert all(e <= 1e-12 for e in errors(both, want))
    assert any(e > 1e-2 for e in errors(outer, want))


def errors(factors, want):
    pairs = zip(jtu.tree_leaves(factors), jtu.tree_leaves(want), strict=True)
    return [error(a, b) for a, b in pairs if a.ndim > 0]  # Without `l2`.


def test_batch_axes_are_counted():
    with pytest.raises(ValueError, match="batch_axes"):
        kfac.Reduce(0)
    with pytest.raises(TypeError, match="batch_axes"):
        kfac.Diagonal(1.0)


@pytest.mark.parametrize("dtype, rows", [(jnp.uint8, 257), (jnp.int8, 200)])
def test_more_rows_than_a_type_of_integers_can_count(dtype, rows):
    layer = kfac.Embedding(rows, 2, key=jax.random.key(0))
    tokens = np.array([1, 5, 120, 3])

    @eqx.filter_jit
    def collect(layer, tokens):
        loss_fn = lambda m, i: kfac.SquaredError(jax.vmap(m)(i), jnp.zeros((4, 2)))
        return kfac.curvature(loss_fn, kfac.Exact())(layer, tokens)

    want, got = (collect(layer, jnp.asarray(tokens, t)) for t in (jnp.int32, dtype))
    np.testing.assert_array_equal(got.input_factor, want.input_factor)
    assert set(np.flatnonzero(got.input_factor)) == {*tokens.tolist()}


def test_a_norm_of_a_constant():
    """A NumPy array is the same for all examples."""
    norm = kfac.convert(eqx.nn.LayerNorm(3))

    @eqx.filter_jit
    def collect(constant, x):
        loss_fn = lambda m, x: kfac.SquaredError(
            jax.vmap(lambda x: m(constant) * x)(x), x
        )
        return kfac.curvature(loss_fn, kfac.Exact())(norm, x)

    x = normal(4, 3)
    found = [collect(constant, x) for constant in (np.arange(3.0), jnp.arange(3.0))]
    np.testing.assert_allclose(found[0].diagonal, found[1].diagonal, rtol=1e-12)
