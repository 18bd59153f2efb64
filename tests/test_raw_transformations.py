"""Models with arrays of their own under what JAX and Equinox do with a model."""

import copy
import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array

import eqx_kfac as kfac

from .helpers import (
    assert_differs,
    assert_near,
    assert_same,
    assert_same_leaves,
    collect,
    expanded,
    filled,
    leaves,
    make_mesh,
    normal,
    put,
    stepped,
)
from .plain import plain_kfac
from .raw import check, module, shown, squared


class Attention(eqx.Module):
    """Of many kinds of arrays."""

    qkv: Array
    bias: Array
    positions: Array
    scale: Array
    out: Array

    def __init__(self):
        shapes = dict(qkv=(4, 12), bias=(12,), positions=(3, 4), scale=(4,), out=(2, 4))
        for name, shape in shapes.items():
            setattr(self, name, jnp.zeros(shape))

    def __call__(self, x):
        x = (x + self.positions) * self.scale[None]
        h = (x @ self.qkv + self.bias[None]).reshape(3, 3, 4)
        q, k, v = h[:, 0], h[:, 1], h[:, 2]
        return self.out @ jnp.mean(jax.nn.softmax(q @ k.T) @ v, axis=0)


class Block(eqx.Module):
    w: Array
    b: Array
    g: Array

    def __init__(self):
        self.w, self.b, self.g = jnp.zeros((3, 3)), jnp.zeros(3), jnp.zeros(3)

    def __call__(self, x):
        return x + jnp.tanh(x * self.g @ self.w + self.b)


class Stack(eqx.Module):
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self):
        self.blocks = eqx.filter_vmap(lambda _: Block())(jnp.arange(2))
        self.head = eqx.nn.Linear(3, 2, key=jr.key(0))

    def __call__(self, x):
        return self.head(self.features(x))

    def features(self, x):
        dynamic, static = eqx.partition(self.blocks, eqx.is_array)
        step = lambda x, own: (eqx.combine(own, static)(x), None)
        return jax.lax.scan(step, x, dynamic)[0]


X = normal(8, 3, 4)
MODEL = filled(Attention)
RAW = kfac.convert(MODEL, example=X[0])
ROWS = normal(8, 3)
STACK = filled(Stack)
CONVERTED = kfac.convert(STACK, example=ROWS[0])


@pytest.fixture(scope="module")
def base():
    return collect(squared, kfac.Exact(), RAW, X)


@pytest.fixture(scope="module")
def of_stack():
    return collect(squared, kfac.Exact(), CONVERTED, ROWS)


def of_outputs(outputs):
    return kfac.SquaredError(outputs, jnp.zeros_like(outputs))


def stored_last(model, x):
    return of_outputs(jax.vmap(model, in_axes=2)(jnp.moveaxis(x, 0, 2)))


def mapped_last(model, x):
    return of_outputs(jax.vmap(model, out_axes=1)(x).T)


def recomputed(model, x):
    return of_outputs(jax.vmap(jax.checkpoint(lambda x: model(x)))(x))


def recomputed_with_arrays(model, x):
    call = eqx.filter_checkpoint(lambda model, x: model(x))
    return of_outputs(jax.vmap(lambda x: call(model, x))(x))


def jitted(model, x):
    return of_outputs(eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(model, x))


def linearised(model, x):
    return of_outputs(jax.vmap(lambda x: jax.linearize(model, x)[0])(x))


def cast_back(model, x):
    return of_outputs(jax.vmap(kfac.cast(kfac.cast(model, jnp.float64), float))(x))


def constrained(model, x):
    """Arrays that are somewhere, or have a name."""
    spec = jax.sharding.NamedSharding(make_mesh(), P())
    model = eqx.tree_at(lambda m: m.out, model, replace_fn=lambda a: a)
    place = lambda a: jax.lax.with_sharding_constraint(a, spec)
    return of_outputs(jax.vmap(lambda x: place(model(x)))(x))


@pytest.mark.parametrize(
    "loss_fn",
    [
        *(stored_last, mapped_last, recomputed, recomputed_with_arrays),
        *(jitted, linearised, cast_back, constrained),
    ],
)
def test_same_factors(loss_fn, base):
    assert_near(collect(loss_fn, kfac.Exact(), RAW, X), base)


def test_other_arrays_have_other_factors(base):
    other = eqx.tree_at(lambda m: m.out, RAW, 2 * RAW.out)
    found = collect(squared, kfac.Exact(), other, X)
    assert_differs(found, base)
    assert_near(found, collect(squared, kfac.Exact(), convert_like(other), X))


def convert_like(model):
    return kfac.convert(kfac.revert(model), example=X[0])


def test_examples_one_by_one(base):
    loss_fn = lambda model, x: of_outputs(jax.lax.map(model, x))
    model = expanded(RAW)  # As it is in a loop, where positions look like examples.
    want = collect(squared, kfac.Exact(), model, X)
    for model in (RAW, model):
        found = collect(loss_fn, kfac.Exact(), model, X)
        assert_near([found["qkv"], found["out"]], [want["qkv"], want["out"]])
    assert_differs(want["qkv"], base["qkv"])
    with pytest.raises(ValueError, match="others"):
        loss_fn = lambda model, x: of_outputs(jnp.stack([model(own) for own in x]))
        collect(loss_fn, kfac.Exact(), RAW, X)


def unrolled(model, x):
    def one(x):
        for i in range(2):
            own = jtu.tree_map(lambda a: a[i] if eqx.is_array(a) else a, model.blocks)
            x = own(x)
        return model.head(x)

    return of_outputs(jax.vmap(one)(x))


def users_scan(model, x):
    dynamic, static = eqx.partition(model.blocks, eqx.is_array)
    step = lambda x, own: (eqx.combine(own, static)(x), None)
    one = lambda x: model.head(jax.lax.scan(step, x, dynamic)[0])
    return of_outputs(jax.vmap(one)(x))


def by_methods(model, x):
    return of_outputs(jax.vmap(lambda x: model.head(model.features(x)))(x))


@pytest.mark.parametrize("loss_fn", [unrolled, users_scan, by_methods])
def test_stacked_modules(loss_fn, of_stack):
    assert shown(CONVERTED) == {
        ".blocks['others, stacked 1']": "Parameters[2] 3",
        ".blocks['w']": "Dense[2] 3x3+1",
        ".head": "Dense 2x3+1",
    }
    # If slices are not taken by a loop, nobody knows that each layer is used once.
    model = expanded(CONVERTED) if loss_fn is unrolled else CONVERTED
    assert_near(collect(loss_fn, kfac.Exact(), model, ROWS), of_stack)


def test_stack_beside_the_dense_blocks():
    check(STACK, ROWS[:3], shown(CONVERTED))


def test_ensemble():
    """An ensemble computes what each of its members computes."""
    make = lambda key: kfac.convert(with_noise(key), example=ROWS[0])

    def with_noise(key):
        return jtu.tree_map(
            lambda a: jr.normal(key, a.shape) if eqx.is_array(a) else a, filled(Block)
        )

    def loss_fn(models, x):
        run = lambda model, x: jax.vmap(model)(x)
        out = eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None), out_axes=1)
        return of_outputs(out(models, x).reshape(len(x), -1))

    models = eqx.filter_vmap(make)(jr.split(jr.key(0), 2))
    whole = collect(loss_fn, kfac.Exact(), models, ROWS)
    for i in range(2):
        member = lambda tree, i=i: jtu.tree_map(
            lambda a: a[i] if eqx.is_array(a) else a, tree
        )
        assert_near(member(whole), collect(squared, kfac.Exact(), member(models), ROWS))


#
# Parts of a model
#


def test_frozen_arrays(base):
    """A weight that is frozen takes its bias with it only if that is frozen too."""
    trained = lambda m: (m.out, m.bias, m.scale)
    model = expanded(RAW)
    mask = jtu.tree_map(eqx.is_inexact_array, model)
    mask = eqx.tree_at(trained, mask, replace_fn=lambda _: False)
    params, rest = eqx.partition(model, mask)
    loss_fn = lambda params, rest, x: squared(eqx.combine(params, rest), x)
    found = collect(loss_fn, kfac.Exact(), params, rest, X)
    assert found["out"] is None
    whole = collect(squared, kfac.Exact(), model, X)["qkv"].input_factor
    np.testing.assert_allclose(found["qkv"].input_factor, whole[:-1, :-1], rtol=1e-12)
    whole, static = eqx.partition(RAW, eqx.is_inexact_array)
    assert_near(collect(loss_fn, kfac.Exact(), whole, static, X), base)
    optimizer = plain_kfac(0.1)
    new, _, _ = stepped(
        optimizer, loss_fn, params, optimizer.init(params), rest, X, key=jr.key(0)
    )
    assert new.out is None and new.bias is None
    assert_differs([new.qkv, new.positions], [RAW.qkv, RAW.positions], 1e-4)


@pytest.mark.parametrize(
    "copying", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies(copying):
    for model in (RAW, CONVERTED):
        copied = copying(model)
        assert type(copied) is type(model)
        assert_same(copied, model)


def test_files_load_both_ways():
    for trained, like in ((MODEL, RAW), (RAW, MODEL)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, trained)
        file.seek(0)
        assert_same_leaves(eqx.tree_deserialise_leaves(file, like), trained)


def test_there_and_back():
    for model, converted, x in ((MODEL, RAW, X), (STACK, CONVERTED, ROWS)):
        assert isinstance(converted, type(model))
        assert type(converted).__name__ == type(model).__name__
        assert_same(kfac.revert(converted), model)
        assert type(kfac.revert(converted)) is type(model)
        assert_same(kfac.convert(converted, example=x[0]), converted)
        abstract = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        assert_same(kfac.convert(model, example=abstract), converted)


def test_is_the_same_program():
    texts = [str(jax.make_jaxpr(lambda x, m=m: m(x))(X[0])) for m in (MODEL, RAW)]
    assert texts[0] == texts[1]


#
# Whatever is collected
#


class Written(eqx.Module):
    """The same, written with layers."""

    qkv: kfac.Linear
    out: kfac.Linear
    positions: kfac.Parameter
    scale: kfac.Parameter

    def __call__(self, x):
        x = (x + self.positions(x)) * self.scale(x)[None]
        h = jax.vmap(self.qkv)(x).reshape(3, 3, 4)
        q, k, v = h[:, 0], h[:, 1], h[:, 2]
        return self.out(jnp.mean(jax.nn.softmax(q @ k.T) @ v, axis=0))


def written(model, block):
    layer = lambda weight, bias: eqx.tree_at(
        lambda m: (m.weight, m.bias),
        eqx.nn.Linear(4, len(weight), key=jr.key(0)),
        (weight, bias),
        is_leaf=lambda n: n is None,
    )
    layers = layer(model.qkv.T, model.bias), layer(model.out, None)
    qkv, out = kfac.convert(layers, blocks=block)
    return Written(qkv, out, kfac.Parameter(model.positions), kfac.Parameter(model.scale))


def targets(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


Y = normal(8, 2, seed=3)
BLOCKS = [
    *map(kfac.Kronecker, (kfac.Expand(), kfac.Reduce(), kfac.TensorNormal())),
    *(kfac.EKFAC(), kfac.Full(), kfac.Diagonal(), kfac.TNT(), kfac.Identity()),
]
FISHERS = [kfac.Empirical(), kfac.MonteCarlo(), kfac.CurvatureProp(), kfac.ExactGGN()]
CASES = [(b, kfac.Exact()) for b in BLOCKS] + [(kfac.Kronecker(), f) for f in FISHERS]


@pytest.mark.parametrize("block, fisher", CASES)
def test_as_written_with_layers(block, fisher):
    """Rows, gradients and random numbers are the same."""
    raw = kfac.convert(MODEL, blocks=block, example=X[0])
    layers = written(MODEL, block)
    found, wanted = (
        collect(targets, fisher, model, X, Y, key=jr.key(0)) for model in (raw, layers)
    )
    for name in ("qkv", "out"):
        same = assert_near if not isinstance(block, kfac.EKFAC) else near_without_signs
        same(found[name], getattr(wanted, name))
    both = [wanted.positions.diagonal, wanted.scale.diagonal]
    both = np.concatenate([np.ravel(np.asarray(a)) for a in both])
    np.testing.assert_allclose(np.ravel(found["others"].diagonal), both, rtol=1e-9)


def near_without_signs(got, want):
    """(Eigenvectors are only determined up to their sign.)"""
    factors = lambda f: (f.output_factor, f.input_factor, f.eigenvalues)
    assert_near(factors(got), factors(want))


def test_steps_are_those_of_layers():
    block, ends = kfac.Kronecker(kfac.Reduce()), []
    optimizer = plain_kfac(0.1, damping=1e-2)
    for model in (kfac.convert(MODEL, blocks=block, example=X[0]), written(MODEL, block)):
        state = optimizer.init(model)
        for i in range(6):
            model, state, _ = stepped(
                optimizer, targets, model, state, X, Y, key=jr.key(i)
            )
        ends.append(model)
    raw, layers = ends
    assert_near(raw.qkv.T, layers.qkv.weight)
    assert_near([raw.bias, raw.out], [layers.qkv.bias, layers.out.weight])
    assert_differs(raw.qkv, MODEL.qkv, 1e-3)


class MLP(eqx.Module):
    w0: Array
    b0: Array
    w1: Array
    b1: Array

    def __init__(self):
        self.w0, self.b0 = jnp.zeros((3, 4)), jnp.zeros(4)
        self.w1, self.b1 = jnp.zeros((2, 4)), jnp.zeros(2)

    def __call__(self, x):
        return self.w1 @ jnp.tanh(x @ self.w0 + self.b0) + self.b1


RAW_MLP = kfac.convert(filled(MLP), example=ROWS[0])


def mlp_of(model):
    arrays = model.w0.T, model.b0, model.w1, model.b1
    get = lambda m: [getattr(own, n) for own in m.layers for n in ("weight", "bias")]
    return eqx.tree_at(get, kfac.MLP(3, 2, 4, 1, jnp.tanh, key=jr.key(0)), list(arrays))


def test_trajectory_of_an_mlp():
    optimizer = kfac.KFAC()
    ends = []
    for model in (RAW_MLP, mlp_of(RAW_MLP)):
        state = optimizer.init(model)
        for i in range(10):
            model, state, _ = stepped(
                optimizer, targets, model, state, ROWS, Y, key=jr.key(i)
            )
        ends.append(model)
    assert_near(leaves(mlp_of(ends[0])), leaves(ends[1]), 1e-12)
    assert_differs(leaves(ends[0]), leaves(RAW_MLP), 1e-2)


#
# Batches
#


def weighted(model, x, weights):
    loss = squared(model, x)
    return kfac.SquaredError(loss.predictions, loss.targets, weights)


def test_example_weights():
    weights = jnp.array([1.0, 0, 2, 1, 0, 1, 1, 2])
    repeated = np.repeat(np.arange(8), np.asarray(weights).astype(int))
    found = collect(weighted, kfac.Exact(), RAW, X, weights)
    assert_near(found, collect(squared, kfac.Exact(), RAW, X[repeated]))


def test_micro_batches(base):
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    state = optimizer.init(RAW)
    _, state, _ = stepped(
        optimizer, squared, RAW, state, X, key=jr.key(0), micro_batches=4
    )
    assert_near(state.curvature, base)


def test_donated():
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    copied = jtu.tree_map(lambda a: jnp.array(a) if eqx.is_array(a) else a, RAW)
    step = eqx.filter_jit(
        lambda model, state, x: optimizer.step(squared, model, state, x, key=jr.key(0))[
            :2
        ],
        donate="all-except-first",
    )
    model, state = step(copied, optimizer.init(copied), X + 0)
    again, _ = step(copied, optimizer.init(copied), X + 0)
    assert_same(again, model)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind, base):
    mesh = make_mesh(kind=kind)
    with jax.set_mesh(mesh):
        model = put(RAW, mesh, P())
        x = put(X, mesh, P("batch"))
        assert_near(collect(squared, kfac.Exact(), model, x), base)


def test_shard_map(base):
    mesh = make_mesh()
    params, static = eqx.partition(RAW, eqx.is_array)

    def loss_fn(params, x):
        run = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
        specs = dict(mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch"))
        out = jax.shard_map(run, **specs)(params, x)
        return of_outputs(out)

    assert_near(collect(loss_fn, kfac.Exact(), params, put(X, mesh, P("batch"))), base)


#
# Derivatives in the inputs
#


def second_derivatives(model, x):
    slope = lambda x: jax.jvp(model, (x,), (jnp.ones(3),))[1]
    return of_outputs(jax.vmap(lambda x: jax.jvp(slope, (x,), (jnp.ones(3),))[1])(x))


def test_derivatives_in_inputs():
    found = collect(second_derivatives, kfac.Exact(), RAW_MLP, ROWS)
    wanted = collect(second_derivatives, kfac.Exact(), mlp_of(RAW_MLP), ROWS)
    assert_near(found["w0"], wanted.layers[0])
    assert_near(found["w1"], wanted.layers[1])


def test_reverse_mode():
    def loss_fn(model, x):
        slope = lambda x: jnp.append(*jax.value_and_grad(lambda x: model(x)[0])(x)[::-1])
        return of_outputs(jax.vmap(slope)(x))

    found = collect(loss_fn, kfac.Exact(), RAW_MLP, ROWS)
    wanted = collect(loss_fn, kfac.Exact(), mlp_of(RAW_MLP), ROWS)
    assert_near(found["w0"], wanted.layers[0])
    assert_near(found["w1"], wanted.layers[1])


class LeftOut(eqx.Module):
    """A product to which the bias is added, and the same one without it."""

    w: Array
    b: Array

    def __init__(self):
        self.w, self.b = jnp.zeros((3, 3)), jnp.zeros(3)

    def __call__(self, x):
        return jnp.tanh(x @ self.w + self.b), x @ self.w


@pytest.mark.parametrize("which", [0, 1])
def test_reverse_mode_of_products_without_their_bias(which):
    model = kfac.convert(filled(LeftOut), example=ROWS[0], method=only_the_first)

    def loss_fn(model, x):
        slope = jax.grad(lambda x: jnp.sum(model(x)[which]))
        return of_outputs(jax.vmap(lambda x: slope(x) + model(x)[0])(x))

    if which == 0:
        collect(loss_fn, kfac.Exact(), model, ROWS)
    else:
        with pytest.raises(ValueError, match="in a way that no tag follows"):
            collect(loss_fn, kfac.Exact(), model, ROWS)


def only_the_first(model, x):
    return model(x)[0]


#
# States and keys
#


class Stateful(eqx.Module):
    w: Array
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    v: Array

    def __init__(self):
        self.w, self.v = normal(5, 3), normal(2, 5, seed=1)
        self.norm = eqx.nn.BatchNorm(5, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key=None):
        h, state = self.norm(self.w @ x, state)
        return self.v @ self.dropout(jnp.tanh(h), key=key), state


def test_states_and_keys():
    model, state = eqx.nn.make_with_state(Stateful)()
    model = kfac.convert(model, example=(ROWS[0], state, jr.key(0)))
    assert shown(model) == {
        ".norm": "Parameters 10",
        ".tag['v']": "Dense 2x5",
        ".tag['w']": "Dense 5x3",
    }

    def loss_fn(model, x, keys, state):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        out, state = run(x, state, keys)
        return of_outputs(out), state

    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    keys = jr.split(jr.key(1), 8)
    new, *_ = stepped(
        optimizer,
        loss_fn,
        model,
        optimizer.init(model),
        ROWS,
        keys,
        state,
        key=jr.key(0),
    )
    assert_differs(leaves(new), leaves(model), 1e-4)
    still = eqx.nn.inference_mode(model)
    run = jax.vmap(still, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    jax.eval_shape(lambda: run(ROWS, state))


#
# What cannot be converted
#


def test_errors_of_convert():
    x = ROWS[0]
    block = filled(Block)
    with pytest.raises(TypeError, match="has no method `__call__`.*method="):
        kfac.convert([block], example=x)
    with pytest.raises(TypeError, match="no method `decode`"):
        kfac.convert(block, example=x, method="decode")
    with pytest.raises((TypeError, ValueError)) as info:
        kfac.convert(block, example=ROWS)
    assert "without the batch's axis" in "".join(info.value.__notes__)
    with pytest.raises(ValueError, match="no array of floating-point numbers"):
        kfac.convert(
            module(lambda m, x: x + m.n.astype(float), n=lambda: jnp.arange(3)), example=x
        )
    with pytest.raises(ValueError, match="no layer of the class `Linear`"):
        kfac.convert(block, layers={eqx.nn.Linear: kfac.form.Dense()})
    with pytest.raises(TypeError, match="layers"):
        kfac.convert(block, layers={Block: kfac.Kronecker()})  # pyright: ignore
    with pytest.raises(ValueError, match=r"No layer.*\.v"):
        kfac.convert(block, {".v": kfac.Full()}, example=x)
    with pytest.raises(TypeError, match="rest"):
        kfac.convert(block, rest=kfac.form.Dense())  # pyright: ignore


def test_a_field_called_tag():
    """Would be lost."""
    other = module(lambda m, x: m.w @ x, w=(2, 3), tag=(2,))
    for options in (dict(example=ROWS[0]), dict(layers={type(other): kfac.form.Dense()})):
        with pytest.raises(TypeError, match="A Raw has a field `tag` of its own"):
            kfac.convert(other, **options)


def test_blocks_by_path():
    blocks = {".w0": kfac.Full(), ".w1": kfac.EKFAC()}
    model = kfac.convert(filled(MLP), blocks=blocks, example=ROWS[0])
    kinds = [type(tag.block).__name__ for _, tag, _ in kfac._tag.trained_layers(model)]
    assert kinds == ["Full", "EKFAC"]
    untagged = kfac.convert(filled(MLP), blocks={".w0": None}, example=ROWS[0])
    assert set(kfac.summary(untagged).untagged) == {".w0", ".b0"}
    with pytest.raises(ValueError, match=r"`\.w0`"):
        plain_kfac(0.1).init(untagged)
    with pytest.raises(ValueError, match=r"has `\.b1`"):  # It goes with its weight.
        kfac.convert(filled(MLP), blocks={".b1": kfac.Diagonal()}, example=ROWS[0])


def test_all_layers_are_named():
    def loss_fn(model, x):
        return of_outputs(jax.vmap(lambda x: model.w1 @ jnp.tanh(x @ model.w0))(x))

    with pytest.raises(ValueError, match=r"`\['w0'\]`, `\['w1'\]` reach the losses"):
        collect(loss_fn, kfac.Exact(), RAW_MLP, ROWS)


def test_rest():
    """Without an example: at the value of everything."""
    model = kfac.convert(filled(MLP), rest=kfac.Diagonal())
    assert shown(model) == {"['others']": "Parameters 26"}
    found = collect(squared, kfac.Exact(), model, ROWS)["others"].diagonal
    wanted = collect(
        squared,
        kfac.Exact(),
        kfac.convert(filled(MLP), kfac.Diagonal(), example=ROWS[0]),
        ROWS,
    )
    total = sum(np.sum(np.asarray(f.diagonal)) for f in wanted.values())
    np.testing.assert_allclose(np.sum(np.asarray(found)), total, rtol=1e-12)


class Theirs(eqx.Module):
    weight: Array
    bias: Array

    def __init__(self):
        self.weight, self.bias = jnp.zeros((4, 3)), jnp.zeros(4)

    def __call__(self, x):
        return self.weight @ x + self.bias


def test_layers_of_other_classes():
    model = module(lambda m, x: m.head @ jnp.tanh(m.layer(x)), layer=Theirs, head=(2, 4))
    told = kfac.convert(model, layers={Theirs: kfac.form.Dense()}, rest=kfac.Diagonal())
    found = kfac.convert(model, example=ROWS[0])
    assert shown(told)[".layer"] == shown(found)[".layer['weight']"] == "Dense 4x3+1"
    ours, wanted = (collect(squared, kfac.Exact(), m, ROWS) for m in (told, found))
    assert_near(ours.layer, wanted.layer["weight"])
    assert type(kfac.revert(told).layer) is Theirs
    assert_same(kfac.revert(told), model)
    assert_same(pickle.loads(pickle.dumps(told.layer)), told.layer)
