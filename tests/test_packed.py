"""Symmetric matrices in half of the memory: the same numbers, and the same steps."""

import functools as ft
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_kfac as kfac
from eqx_kfac._operator import is_packed, pack

from .helpers import (
    arrays,
    assert_alike,
    assert_near,
    assert_same,
    make_mesh,
    only_arrays,
    scanned,
)
from .plain import plain_kfac


# In one program each.
to_packed, to_unpacked = map(eqx.filter_jit, (kfac.packed, kfac.operators.unpacked))
pack_one = jax.jit(pack)


def number_of_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(tree))


def packed_nodes(tree):
    return [n for n in jtu.tree_leaves(tree, is_leaf=is_packed) if is_packed(n)]


#
# One matrix
#


def symmetric_matrix(size, stack=(), dtype=np.float32):
    a = np.random.default_rng(size).normal(size=(*stack, size, size))
    return jnp.asarray((10 * (a + np.swapaxes(a, -1, -2))).astype(dtype))


@jax.jit
def back_and_forth(matrix):
    return kfac.operators.unpacked(pack(matrix))


@pytest.mark.parametrize("stack", [(), (3, 2)])
def test_there_and_back(stack):
    matrices = [symmetric_matrix(size, stack) for size in range(10)]
    packed = jax.jit(lambda matrices: list(map(pack, matrices)))(matrices)
    for size, one in enumerate(packed):
        assert one.size == size
        assert one.rectangle.size == np.prod(stack, dtype=int) * size * (size + 1) // 2
    assert_same(to_unpacked(packed), matrices)


@pytest.mark.parametrize("size", [4, 5])
def test_every_entry_is_kept_once(size):
    """Where the format has it: A below and C above a diagonal, B behind."""
    matrix = np.asarray(symmetric_matrix(size))
    rectangle = np.asarray(pack_one(matrix).rectangle)
    rows, rest = -(-size // 2), size // 2
    want = np.full((rows, 2 * rest + 1), np.nan)
    for i, j in np.ndindex(rows, rows):
        if j <= i:
            want[i, j] = matrix[i, j]
    for i, j in np.ndindex(rest, rest):
        if j >= i:
            want[i, j + 1] = matrix[rows + i, rows + j]
    want[:, rest + 1 :] = matrix[:rows, rows:]
    np.testing.assert_array_equal(rectangle, want)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16, np.int32])
def test_any_type(dtype):
    matrix = symmetric_matrix(5, (2,), dtype)
    assert_same(back_and_forth(matrix), matrix)


def test_not_finite_entries_stay_where_they_are():
    matrix = np.array(symmetric_matrix(5))
    matrix[1, 3] = matrix[3, 1] = np.nan
    assert_same(back_and_forth(jnp.asarray(matrix)), matrix)


@pytest.mark.parametrize("size", [2, 3])
def test_a_matrix_that_is_not_symmetric_is_another_one(size):
    matrix = np.arange(size * size, dtype=float).reshape(size, size)
    back = np.asarray(back_and_forth(matrix))
    np.testing.assert_array_equal(back, back.T)
    assert (back != matrix).any()


def test_vmap_is_a_stack():
    matrix = symmetric_matrix(5, (3,))
    in_turn = jax.jit(
        lambda m: (jax.vmap(pack)(m), jax.vmap(kfac.operators.unpacked)(pack(m)))
    )
    got, back = in_turn(matrix)
    assert_same(got, pack_one(matrix))
    assert_same(back, matrix)


def test_derivatives():
    """Derivatives of a function of the triangle: entries off the diagonal count twice."""
    rectangle = pack_one(symmetric_matrix(4, dtype=np.float64)).rectangle
    total = lambda r: jnp.sum(kfac.operators.Packed(r).matrix())
    twice = pack_one(2 - np.eye(4)).rectangle
    assert_same(jax.jit(jax.grad(total))(rectangle), twice)


#
# Optimizers
#


class Net(eqx.Module):
    """Layers with every kind of factors: diagonal, stacked, whole, in a basis."""

    embedding: kfac.Embedding
    hidden: list
    stacked: kfac.Linear
    last: kfac.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 8)
        self.embedding = kfac.Embedding(5, 3, key=keys[0])
        self.hidden = [
            kfac.convert(eqx.nn.Linear(3, 3, key=key), blocks=block)
            for key, block in zip(keys[1:3], [kfac.EKFAC(), kfac.Full()])
        ]
        make = lambda key: kfac.Linear(3, 3, key=key)
        self.stacked = eqx.filter_vmap(make)(jax.random.split(keys[6], 3))
        self.last = kfac.Linear(3, 2, use_bias=False, key=keys[7])

    def __call__(self, token):
        x = self.embedding(token)
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        stacked, static = eqx.partition(self.stacked, eqx.is_array)

        def step(x, layer):
            return jnp.tanh(eqx.combine(layer, static)(x)), None

        return self.last(jax.lax.scan(step, x, stacked)[0])


make_net = ft.cache(eqx.filter_jit(Net))


@eqx.filter_jit
def fresh_mlp(seed=0):
    mlp = eqx.nn.MLP(3, 2, 4, 1, jnp.tanh, key=jax.random.key(seed))
    return kfac.convert(mlp)


@ft.cache
def make_mlp(block=kfac.Kronecker()):
    return kfac.convert(kfac.revert(fresh_mlp()), blocks=block)


def data():
    rng = np.random.default_rng(1)
    x, tokens, y = (
        rng.normal(size=(8, 3)),
        rng.integers(5, size=8),
        rng.normal(size=(8, 2)),
    )
    return jnp.asarray(x), jnp.asarray(tokens), jnp.asarray(y)


def loss_fn(model, x, y, weights=None):
    return kfac.SquaredError(jax.vmap(model)(x), y, weights)


def choose(packed, **choices):
    choices = dict(damping=1e-2, fisher=kfac.Exact(), inverse_period=2) | choices
    return plain_kfac(0.1, 0.9, packed=packed, **choices)


def train(model, *args, packed, steps=3, **choices):
    optimizer = choose(packed, **choices)
    state = optimizer.init(model)
    return scanned(optimizer, loss_fn, model, state, *args, length=steps)


jitted_train = eqx.filter_jit(train)


def assert_trains_alike(run, tolerance=1e-11):
    """`run(packed=...) -> (model, state, info)`. (The two triangles of a product of
    matrices are not always rounded alike.)"""
    got, want = run(packed=True), run(packed=False)
    assert packed_nodes(got[1]) and not packed_nodes(want[1])
    whole = to_unpacked(got)
    if tolerance == 0:
        assert_same(whole, want)
    else:
        assert_alike(whole, want)
        assert_near(whole, want, tolerance)
    return got


SOLVERS = [kfac.Cholesky(), kfac.Eigh()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_all_blocks(solver):
    model, (_, tokens, y) = make_net(), data()
    run = ft.partial(jitted_train, model, tokens, y, solver=solver)
    # Eigenvalues are near each other.
    _, state, _ = assert_trains_alike(run, tolerance=1e-8)
    layers = state.curvature
    for factor in (
        layers.embedding.output_factor,
        layers.hidden[0].input_factor,
        layers.hidden[1].matrix,
        layers.stacked.input_factor,
    ):
        assert is_packed(factor)
    for other in (
        layers.embedding.input_factor,  # Diagonal.
        layers.hidden[0].input_vectors,
        layers.hidden[0].eigenvalues,
    ):
        assert eqx.is_array(other)
    explicit = isinstance(solver, kfac.Cholesky)
    assert bool(packed_nodes(state.inverse)) == explicit


CHOICES = {
    "Newton-Schulz, adaptive": dict(
        solver=kfac.NewtonSchulz(tolerance=1e-13),
        damping=kfac.LevenbergMarquardt(1.0, interval=1, calibration=3),
        max_increase=10.0,
    ),
    "subspace iteration, in turn, burn-in": dict(
        solver=kfac.SubspaceIteration(),
        inverse_period=kfac.Staggered(2),
        ema=kfac.MovingAverage(burn_in=1),
        averaging=0.9,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    x, _, y = data()
    assert_trains_alike(ft.partial(jitted_train, make_mlp(), x, y, **CHOICES[name]))


def test_bit_for_bit():
    """Where factors and inverses are symmetric bit for bit, so is all that follows."""
    x, _, y = data()
    run = ft.partial(jitted_train, make_mlp(), x, y)
    _, state, _ = assert_trains_alike(run, tolerance=0.0)
    for matrix in arrays(to_unpacked(packed_nodes(state))):
        np.testing.assert_array_equal(matrix, matrix.swapaxes(-1, -2))


def test_two_triangles_that_are_rounded_in_different_ways():
    """Weights are in one of both rows that a factor is the product of; norms are, in
    those of `TNT`."""
    x, _, y = data()
    model, weights = make_mlp(kfac.TNT()), jax.device_put(np.arange(1.0, 9))
    assert_trains_alike(ft.partial(jitted_train, model, x, y, weights))


def test_rejected_steps_leave_it_alone():
    x, _, y = data()
    y = np.array(y)
    y[0] = np.nan
    run = ft.partial(jitted_train, make_mlp(), x, jnp.asarray(y))
    _, state, infos = assert_trains_alike(run, tolerance=0.0)
    assert np.all(infos.rejected)
    assert not any(np.any(node.rectangle) for node in packed_nodes(state.curvature))


def test_ensemble():
    """`init` and steps under `vmap`."""
    x, _, y = data()
    models = eqx.filter_jit(eqx.filter_vmap(fresh_mlp))(np.arange(2))

    @eqx.filter_jit
    def run(packed):
        one = ft.partial(train, packed=packed, steps=2)
        return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None, None))(models, x, y)

    model, state, _ = assert_trains_alike(run)
    weight = np.asarray(model.layers[0].weight)
    assert (weight[0] != weight[1]).any()
    assert state.curvature.layers[0].input_factor.rectangle.shape == (2, 2, 5)


def test_inside_shard_map():
    x, _, y = data()
    params, static = eqx.partition(make_mlp(), eqx.is_array)
    mesh = make_mesh((4,))

    def run(packed):
        def local(params, *args):
            run = ft.partial(train, packed=packed, steps=2)
            return only_arrays(run(eqx.combine(params, static), *args))

        specs = dict(in_specs=(P(), P("batch"), P("batch")), out_specs=P())
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs))(params, x, y)

    assert_trains_alike(run)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_members_on_devices_of_their_own(kind):
    mesh = make_mesh((4,), ("members",), kind)
    sharding = NamedSharding(mesh, P("members"))
    matrix = symmetric_matrix(5, (4,))
    with jax.set_mesh(mesh):
        packed = pack_one(jax.device_put(matrix, sharding))
        back = to_unpacked(packed)
        for array in (packed.rectangle, back):
            assert array.sharding.is_equivalent_to(sharding, 3)
    assert_same(packed, pack_one(matrix))
    assert_same(back, matrix)


def test_donation():
    x, _, y = data()
    optimizer = choose(True)

    @eqx.filter_jit(donate="all-except-first")
    def step(args, model, state):
        return optimizer.step(loss_fn, model, state, *args)

    state = to_packed(choose(False).init(make_mlp()))
    _, new, _ = step((x, y), fresh_mlp(), state)
    assert all(node.rectangle.is_deleted() for node in packed_nodes(state))
    assert all(np.isfinite(leaf).all() for leaf in arrays(new))


#
# Bytes
#


def states(model, **choices):
    """(Shapes.)"""
    inits = [choose(packed, **choices).init for packed in (True, False)]
    return [eqx.filter_eval_shape(init, model) for init in inits]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_bytes(solver):
    """Of every symmetric matrix n (n + 1) / 2 numbers, of all else as many as before."""
    packed, state = states(make_net(), solver=solver)
    saved = 0
    for node in packed_nodes(packed):
        *stack, _, _ = node.rectangle.shape
        saved += np.prod(stack, dtype=int) * node.size * (node.size - 1) // 2
    assert saved > 0
    itemsize = packed_nodes(packed)[0].rectangle.dtype.itemsize
    assert number_of_bytes(packed) == number_of_bytes(state) - itemsize * saved


def test_bytes_of_a_deep_autoencoder():
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]

    def make(key):
        keys = jax.random.split(key, 8)
        return [kfac.Linear(i, o, key=k) for i, o, k in zip(widths, widths[1:], keys)]

    packed, state = states(eqx.filter_eval_shape(make, jax.random.key(0)))
    assert number_of_bytes(packed) < 0.66 * number_of_bytes(state)


def test_nothing_symmetric_nothing_packed():
    model = kfac.Linear(3, 2, key=jax.random.key(0), block=kfac.Diagonal())
    packed, state = states(model)
    assert jtu.tree_structure(packed) == jtu.tree_structure(state)
    x, _, y = data()
    eqx.filter_eval_shape(choose(False).step, loss_fn, model, packed, x, y)


#
# Looking at it, and going on from it
#


@pytest.fixture(scope="module")
def trained():
    """Model and state after some steps, packed and not."""
    x, _, y = data()
    results = {}
    for packed in (True, False):
        model, state, _ = jitted_train(make_mlp(), x, y, packed=packed)
        _, static = eqx.partition(make_mlp(), eqx.is_array)
        results[packed] = eqx.combine(model, static), state
    return results


def test_looking_at_it(trained):
    (model, half), (_, state) = trained[True], trained[False]
    assert "Packed(rectangle=f64[2,5])" in str(half.curvature.layers[0])
    whole, factor = to_unpacked((half.curvature, half.curvature.layers[0].input_factor))
    assert_same(factor, state.curvature.layers[0].input_factor)
    assert_same(whole, state.curvature)
    got = kfac.summary(model, half.curvature)
    assert got == kfac.summary(model, state.curvature)
    operator = eqx.filter_jit(kfac.analysis.BlockDiagonalOperator)
    assert_same(operator(half.curvature, model), operator(state.curvature, model))


def test_conversion(trained):
    (_, half), (_, state) = trained[True], trained[False]
    assert_same(to_packed(state), half)
    assert_same(to_unpacked(half), state)
    assert_same(to_packed(half), half)
    assert_same(to_unpacked(state), state)


def test_only_whole_states_can_be_packed(trained):
    with pytest.raises(ValueError, match="whole state"):
        kfac.packed(trained[False][1].curvature)


@pytest.mark.parametrize("packed", [True, False])
def test_a_checkpoint_of_the_other_kind(trained, packed):
    """... is gone on from as it is, and may be converted."""
    x, _, y = data()
    model, state = trained[not packed]
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    like = eqx.filter_eval_shape(choose(not packed).init, model)
    state = eqx.tree_deserialise_leaves(file, like)
    optimizer = choose(False)
    converted = (to_packed if packed else to_unpacked)(state)
    assert_same(converted, trained[packed][1])
    for one in (state, converted):
        _, after, _ = eqx.filter_eval_shape(optimizer.step, loss_fn, model, one, x, y)
        assert jtu.tree_structure(after) == jtu.tree_structure(one)
        update = ft.partial(optimizer.update, curvature=None)
        _, after = eqx.filter_eval_shape(update, model, one, model)
        assert jtu.tree_structure(after) == jtu.tree_structure(one)


def test_one_that_is_partly_packed(trained):
    (model, half), (_, state) = trained[True], trained[False]
    x, _, y = data()
    mixed = state._replace(curvature=half.curvature)
    step = eqx.filter_jit(choose(False).step)
    got, after, _ = step(loss_fn, model, mixed, x, y)
    want, _, _ = step(loss_fn, model, state, x, y)
    assert_same(only_arrays(got), only_arrays(want))
    structure = lambda tree: jax.tree.structure(only_arrays(tree))
    assert structure(after.curvature) == structure(half.curvature)
    assert structure(after.inverse) == structure(state.inverse)


def test_curvature_from_a_packed_state(trained):
    """`update` takes either kind of curvature."""
    model, half = trained[True]
    grads = only_arrays(model)
    update = eqx.filter_jit(choose(True).update)
    got = update(grads, half, model, curvature=half.curvature)
    whole = to_unpacked(half.curvature)
    assert_same(got, update(grads, half, model, curvature=whole))


def test_of_another_model_still_is_an_error(trained):
    _, packed = trained[True]
    x, _, y = data()
    other = kfac.convert(eqx.filter_jit(eqx.nn.MLP)(3, 2, 5, 1, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="does not belong"):
        choose(True).step(loss_fn, other, packed, x, y)


OPTAX = {
    "kfac": kfac.optax_kfac(0.1),
    "scale_by_kfac": optax.chain(kfac.scale_by_kfac(), optax.scale_by_learning_rate(0.1)),
}


@pytest.mark.parametrize("name", OPTAX)
def test_optax(name):
    x, _, y = data()
    model = make_mlp()
    collect = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())

    def run(packed):
        optimizer = OPTAX[name]
        params, static = eqx.partition(model, eqx.is_inexact_array)
        state = jax.jit(optimizer.init)(params)
        state = to_packed(state) if packed else state

        @eqx.filter_jit
        def step(params, state):
            _, grads, curvature = collect(eqx.combine(params, static), x, y)
            updates, state = optimizer.update(grads, state, params, curvature=curvature)
            return eqx.apply_updates(params, updates), state

        return step(*step(params, state))

    (params, state), (want, whole) = run(True), run(False)
    assert packed_nodes(state) and not packed_nodes(whole)
    assert_same(params, want)
    assert_same(to_unpacked(state), whole)
    assert_same(to_packed(whole), state)


def test_factors_of_ones_own():
    """A type of factors says which of its fields are symmetric; by default, none is."""

    class Silent(kfac.factors.AbstractFactors):
        matrix: jax.Array
        l2: jax.Array

    class Outspoken(Silent):
        symmetric = ("matrix",)

    matrix, l2 = symmetric_matrix(4), jnp.zeros(())
    state = kfac.scale_by_kfac().init(make_mlp())
    state = state._replace(
        curvature=[Silent(matrix, l2), Outspoken(matrix, l2)], inverse=[None, None]
    )
    silent, outspoken = kfac.packed(state).curvature
    assert eqx.is_array(silent.matrix) and is_packed(outspoken.matrix)
