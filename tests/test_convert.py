"""Tagged layers as drop-ins, `kfac.convert` and `kfac.revert`."""

import copy
import functools as ft
import io
import itertools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import assert_same, assert_same_leaves, squared
from .plain import plain_kfac


def layers(model, cls):
    """All nodes of exactly this class."""
    nodes = jtu.tree_leaves(model, is_leaf=lambda n: type(n) is cls)
    return [node for node in nodes if type(node) is cls]


#
# kfac.Linear
#


WIDTHS, DTYPES = ([3, "scalar"], [2, "scalar"]), [None, jnp.float32, jnp.bfloat16]


@ft.cache
@eqx.filter_jit
def linear_layers():
    """Of all arguments: both layers, their outputs, and that of ours with a key."""

    def both(in_features, *args):
        layers = [
            new(in_features, *args, key=jr.key(0)) for new in (kfac.Linear, eqx.nn.Linear)
        ]
        shape = () if in_features == "scalar" else (3,)
        x = jr.normal(jr.key(1), shape, layers[0].weight.dtype)
        return layers, [layer(x) for layer in layers], layers[0](x, key=jr.key(0))

    all_args = itertools.product(*WIDTHS, [True, False], DTYPES)
    return {str(args): both(*args) for args in all_args}


@pytest.mark.parametrize("in_features", WIDTHS[0])
@pytest.mark.parametrize("out_features", WIDTHS[1])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_equinox_linear(in_features, out_features, use_bias, dtype):
    args = in_features, out_features, use_bias, dtype
    (ours, theirs), (y, want), with_key = linear_layers()[str(args)]
    assert isinstance(ours, eqx.nn.Linear)
    assert_same_leaves(ours, theirs)
    for name in ("in_features", "out_features", "use_bias"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert y.dtype == want.dtype
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(with_key, y)  # Ignored, as in Equinox.
    assert_same(kfac.convert(theirs), ours)
    assert_same(kfac.revert(ours), theirs)


def test_linear_is_the_same_program():
    x = np.ones(3)
    ours = kfac.Linear(3, 2, key=jr.key(0))
    jaxprs = [
        str(jax.make_jaxpr(lambda weight, x: eqx.tree_at(get, m, weight)(x))(get(m), x))
        for get, m in (
            (lambda m: m.weight, ours),
            (lambda m: m.weight, kfac.revert(ours)),
        )
    ]
    assert jaxprs[0] == jaxprs[1]


def test_keyword_arguments_of_the_constructor():
    args = dict(in_features=3, out_features=2, use_bias=False, dtype=jnp.float32)
    ours = kfac.Linear(**args, key=jr.key(0))
    assert_same_leaves(ours, eqx.nn.Linear(**args, key=jr.key(0)))


def test_tree_surgery_by_class():
    """The usual way to find layers finds ours too."""
    model = kfac.convert(model_of("mlp"))
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    weights = lambda m: [
        node.weight for node in jtu.tree_leaves(m, is_leaf=is_linear) if is_linear(node)
    ]
    assert len(weights(model)) == 3
    zeros = lambda w: jax.device_put(np.zeros_like(w))
    zeroed = eqx.tree_at(weights, model, replace_fn=zeros)
    assert not any(np.any(w) for w in weights(zeroed))
    assert jtu.tree_structure(zeroed) == jtu.tree_structure(model)


#
# convert and revert
#


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key)
        self.cell = eqx.nn.GRUCell(3, 4, key=keys[0])
        self.head = eqx.nn.Linear(4, 2, key=keys[1])

    def __call__(self, x):
        step = lambda h, x: (self.cell(x, h), None)
        h, _ = jax.lax.scan(step, jnp.zeros(4), jnp.stack([x, 2 * x]))
        return self.head(h)


class Containers(eqx.Module):
    """Layers in all kinds of containers, and one activation function in many places."""

    mapping: dict
    listed: list
    activation: object
    name: str = eqx.field(static=True)

    def __init__(self, key):
        linear = lambda i: eqx.nn.Linear(3, 3, key=jr.fold_in(key, i))
        self.mapping = {"a": linear(0), "b": (linear(1), jax.nn.gelu)}
        self.listed = [linear(2), [linear(3)], None, jax.nn.gelu, 1.5]
        self.activation = jax.nn.gelu
        self.name = "containers"

    def __call__(self, x):
        nested, activation = self.mapping["b"]
        x = activation(nested(self.mapping["a"](x)))
        return self.activation(self.listed[1][0](self.listed[0](x))) * self.listed[4]


def attend(model, x):
    sequence = jnp.stack([x, 2 * x, -x])
    return model(sequence, sequence, sequence)


models = {
    "mlp": (lambda k: eqx.nn.MLP(3, 2, 4, 2, key=k), 3),
    "mlp of scalars": (lambda k: eqx.nn.MLP("scalar", "scalar", 4, 1, key=k), 2),
    "sequential": (
        lambda k: eqx.nn.Sequential(
            [
                eqx.nn.Linear(3, 4, key=k),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.LayerNorm(4),
                eqx.nn.Linear(4, 2, use_bias=False, key=k),
            ]
        ),
        2,
    ),
    "attention": (lambda k: eqx.nn.MultiheadAttention(1, 3, key=k), 4),
    "recurrent": (Recurrent, 1),
    "containers": (Containers, 4),
    "tuple": (lambda k: (eqx.nn.Linear(3, 2, key=k), eqx.nn.Linear(2, 3, key=k)), 2),
    "list": (lambda k: [eqx.nn.Linear(3, 2, key=k), None, jnp.tanh], 1),
    "dict": (lambda k: {"x": eqx.nn.Linear(3, 2, key=k), "y": 3}, 1),
    "layer": (lambda k: eqx.nn.Linear(3, 2, key=k), 1),
    "stack": (
        lambda k: eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 2, key=k))(jr.split(k, 5)),
        1,
    ),
}


@eqx.filter_jit
def _model(name, seed):
    return models[name][0](jr.key(seed))


@ft.cache
def model_of(name, seed=0):
    return _model(name, jnp.array(seed))


@pytest.mark.parametrize("name", models)
def test_round_trip(name):
    make, number = models[name]
    model = model_of(name)
    converted = kfac.convert(model)
    assert len(layers(converted, kfac.Linear)) == number
    assert len(layers(converted, eqx.nn.Linear)) == 0
    assert type(converted) is type(model) or name in ("layer", "stack")
    assert_same_leaves(converted, model)
    assert_same(kfac.revert(converted), model)
    # Both are idempotent.
    assert_same(kfac.convert(converted), converted)
    assert_same(kfac.revert(model), model)
    # The original is what it was.
    assert len(layers(model, eqx.nn.Linear)) == number
    # And conversion commutes with abstraction.
    abstract = eqx.filter_eval_shape(make, jr.key(0))
    converted_abstract = kfac.convert(abstract)
    assert jtu.tree_structure(converted_abstract) == jtu.tree_structure(converted)
    assert jtu.tree_structure(kfac.revert(converted_abstract)) == jtu.tree_structure(
        abstract
    )


@pytest.mark.parametrize(
    "name",
    ["mlp", "mlp of scalars", "sequential", "recurrent", "containers", "attention"],
)
def test_same_outputs(name):
    model = model_of(name)
    x = jnp.array(0.3) if "scalars" in name else jnp.array([0.3, -0.2, 0.1])
    run = attend if name == "attention" else lambda model, x: model(x)
    both = eqx.filter_jit(lambda *models: [run(model, x) for model in models])
    np.testing.assert_array_equal(*both(kfac.convert(model), model))


@pytest.mark.parametrize("name", models)
@pytest.mark.parametrize("forwards", [True, False])
def test_files_load_both_ways(name, forwards):
    trained, like = model_of(name), model_of(name, 1)
    if forwards:
        like = kfac.convert(like)
    else:
        trained = kfac.convert(trained)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, trained)
    file.seek(0)
    assert_same_leaves(eqx.tree_deserialise_leaves(file, like), trained)


def test_activations_are_shared_still():
    model = kfac.convert(Containers(jr.key(0)))
    assert model.activation is model.listed[3] is model.mapping["b"][1] is jax.nn.gelu
    assert model.name == "containers" and model.listed[4] == 1.5


class Doubled(eqx.nn.Linear):
    """A subclass may compute anything."""

    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x, key=key)


def test_subclasses_are_left_alone():
    model = [Doubled(3, 2, key=jr.key(0)), eqx.nn.Linear(3, 2, key=jr.key(0))]
    converted = kfac.convert(model)
    assert type(converted[0]) is Doubled and type(converted[1]) is kfac.Linear
    assert_same(kfac.revert(converted), model)

    class Tagged(kfac.Linear):
        def __call__(self, x, *, key=None):
            return super().__call__(2 * x, key=key)

    model = [Tagged(3, 2, key=jr.key(0))]
    assert_same(kfac.convert(model), model)
    assert_same(kfac.revert(model), model)


def test_reparametrised_layers():
    def make(key):
        linear = eqx.nn.Linear(3, 2, key=key)
        spectral = eqx.nn.SpectralNorm(linear, "weight", key=key)
        return [eqx.nn.WeightNorm(linear), spectral, linear]

    model, _ = eqx.filter_jit(lambda: eqx.nn.make_with_state(make)(jr.key(0)))()
    converted = kfac.convert(model)
    assert type(converted[0]) is kfac.WeightNorm
    assert type(converted[1]) is kfac.SpectralNorm
    assert type(converted[2]) is kfac.Linear
    # What is inside is for the outer layer's tags.
    assert type(converted[0].layer) is type(converted[1].layer) is eqx.nn.Linear
    eqx.filter_eval_shape(plain_kfac(0.1).init, converted)
    untagged = kfac.convert(model, {eqx.nn.WeightNorm: None})
    assert type(untagged[0]) is eqx.nn.WeightNorm
    assert type(untagged[0].layer) is eqx.nn.Linear
    # Its parameters are not covered: this must not pass silently.
    with pytest.raises(ValueError, match=r"\[0\]\.layer\.weight"):
        plain_kfac(0.1).init(untagged)


def test_tagged_layers_are_left_alone():
    reduce = kfac.Kronecker(kfac.Reduce())
    model = [
        kfac.Linear(3, 2, key=jr.key(0), block=reduce),
        eqx.nn.Linear(3, 2, key=jr.key(0)),
    ]
    converted = kfac.convert(model)
    assert_same(converted[0], model[0])
    assert converted[0].tag.block == reduce
    assert converted[1].tag.block == kfac.Kronecker(kfac.Joint())


def test_block():
    reduce = kfac.Kronecker(kfac.Reduce())
    converted = kfac.convert(model_of("mlp"), blocks=reduce)
    assert all(layer.tag.block == reduce for layer in converted.layers)
    default = kfac.convert(model_of("mlp"))
    assert jtu.tree_structure(default) != jtu.tree_structure(converted)
    assert_same_leaves(default, converted)


def test_converts_a_partition():
    """Halves of a partitioned model convert as the whole does."""
    model = model_of("mlp")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    whole = eqx.combine(kfac.convert(params), kfac.convert(static))
    assert_same(whole, kfac.convert(model))


#
# Tagged models as PyTrees
#


def test_ensembles():
    @eqx.filter_jit
    def both():
        keys = jr.split(jr.key(0), 4)
        make = [
            lambda key, new=new: new(3, 2, key=key)
            for new in (kfac.Linear, eqx.nn.Linear)
        ]
        ours, theirs = (eqx.filter_vmap(new)(keys) for new in make)
        run = lambda layer, x: layer(x)
        run = eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None))
        return ours, theirs, [run(layers, jnp.ones(3)) for layers in (ours, theirs)]

    ours, theirs, outputs = both()
    assert ours.weight.shape == (4, 2, 3)
    assert_same(ours, kfac.convert(theirs))
    np.testing.assert_array_equal(*outputs)

    collect = kfac.curvature(ensemble_loss, kfac.Exact())
    factors = eqx.filter_eval_shape(collect, ours, np.ones((6, 3)))
    assert factors.input_factor.shape == (4, 4, 4)
    assert factors.output_factor.shape == (4, 2, 2)


def ensemble_loss(ensemble, x):
    run = eqx.filter_vmap(
        lambda layer: jax.vmap(layer)(x), in_axes=eqx.if_array(0), out_axes=1
    )
    return kfac.SquaredError(run(ensemble))


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, "pickle", "flatten"])
def test_copies(copying):
    model = kfac.convert([eqx.nn.Linear(3, 2, key=jr.key(0)), None, "text"])
    if copying == "pickle":
        copying = lambda m: pickle.loads(pickle.dumps(m))
    if copying == "flatten":
        copying = lambda m: jtu.tree_unflatten(*reversed(jtu.tree_flatten(m)))
    copied = copying(model)
    assert type(copied[0]) is kfac.Linear
    assert_same(copied, model)
    assert copied[0].tag == model[0].tag


def test_tree_map_over_several():
    a, b = (kfac.convert(model_of("mlp", i)) for i in range(2))
    a_params, b_params = (eqx.filter(m, eqx.is_inexact_array) for m in (a, b))
    half = lambda x, y: jnp.asarray((np.asarray(x) + np.asarray(y)) / 2)
    mean = jax.tree.map(half, a_params, b_params)
    expected = half(a.layers[0].weight, b.layers[0].weight)
    np.testing.assert_array_equal(mean.layers[0].weight, expected)
    mean = eqx.combine(mean, eqx.partition(a, eqx.is_inexact_array)[1])
    assert jax.eval_shape(mean, np.ones(3)).shape == (2,)


def test_tree_at():
    model = kfac.convert(model_of("mlp"))
    bias = jnp.arange(4.0)
    changed = eqx.tree_at(lambda m: m.layers[1].bias, model, bias)
    np.testing.assert_array_equal(changed.layers[1].bias, bias)
    assert jtu.tree_structure(changed) == jtu.tree_structure(model)
    # A tagged layer for another one, and for an untagged one.
    new = kfac.Linear(4, 4, key=jr.key(3))
    assert_same(eqx.tree_at(lambda m: m.layers[1], model, new).layers[1], new)
    back = eqx.tree_at(lambda m: m.layers[1], model, kfac.revert(new))
    assert type(back.layers[1]) is eqx.nn.Linear


def test_readable():
    text = repr(kfac.convert(eqx.nn.Linear(3, 2, key=jr.key(0))))
    assert text.startswith("Linear(")
    for part in ("weight=f64[2,3]", "form=Dense()", "block=Kronecker"):
        assert part in text
    assert "Reduce(" in repr(kfac.Linear(3, 2, key=jr.key(0), block=reduce_block()))


def reduce_block():
    return kfac.Kronecker(kfac.Reduce())


def test_tags_compare_by_value():
    make = lambda: kfac.Tag(kfac.form.Dense(), kfac.Kronecker())
    assert make() == make() and hash(make()) == hash(make())
    other = kfac.Tag(kfac.form.Dense(), reduce_block())
    assert make() != other
    assert reduce_block() == reduce_block()
    assert hash(reduce_block()) == hash(reduce_block())
    assert reduce_block() != kfac.Kronecker(kfac.Expand())


def test_equal_models_share_a_compiled_function():
    traces = []

    @eqx.filter_jit
    def run(model, x):
        traces.append(None)
        return model(x)

    def run_and_collect(model):
        x = jnp.ones(3)
        run(model, x)
        collect(model, x[None])

    @eqx.filter_jit
    def collect(model, x):
        traces.append(None)
        loss_fn = lambda model: kfac.SquaredError(jax.vmap(model)(x))
        return kfac.curvature(loss_fn, kfac.Exact())(model)

    run_and_collect(kfac.convert(model_of("mlp")))
    run_and_collect(kfac.convert(model_of("mlp", 1)))
    assert len(traces) == 2
    run_and_collect(kfac.convert(model_of("mlp", 1), blocks=reduce_block()))
    assert len(traces) == 4


def test_arrays_of_a_weak_type():
    """The update would take it away, and the step would be compiled several times."""

    class Scaled(eqx.Module):
        inner: eqx.nn.Linear
        scale: jax.Array

        def __call__(self, x):
            return self.scale * self.inner(x)

    weak = jnp.full((), 0.5), jnp.full(2, 0.25)
    assert all(a.weak_type for a in weak)
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: m.bias, layer, weak[1])
    model = kfac.convert(Scaled(layer, weak[0]), example=jnp.ones(3))
    assert not any(a.weak_type for a in jtu.tree_leaves(eqx.filter(model, eqx.is_array)))
    assert model.scale == 0.5 and np.all(model.inner.bias == 0.25)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, state):
        return optimizer.step(squared, model, state, jnp.ones((4, 3)), jnp.ones((4, 2)))

    state = optimizer.init(model)
    for _ in range(3):
        model, state, _ = step(model, state)
