"""Decompositions are shared out over the devices of a mesh, and a state begins where its
model is."""

import contextlib
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_kfac as kfac
from eqx_kfac._jobs import deal

from .benchmarks.devices import decompositions, transfers
from .helpers import (
    assert_differs,
    assert_near,
    leaves,
    make_mesh,
    normal,
    only_arrays,
    put,
    scanned,
    softmax as loss_fn,
    squared,
    stepped,
    velocity_of,
)
from .plain import plain_kfac


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Twelve layers, of eight different shapes.
WIDTHS = [6, 9, 9, 7, 7, 9, 12, 12, 7, 7, 6, 6, 3]
X = normal(48, WIDTHS[0], seed=1)
Y = jax.device_put(np.random.default_rng(2).integers(WIDTHS[-1], size=48))


class Deep(eqx.Module):
    layers: list[kfac.Linear]

    def __init__(self, widths):
        sizes = list(zip(widths[:-1], widths[1:], strict=True))
        keys = jr.split(jr.key(0), len(sizes))
        self.layers = [kfac.Linear(*s, key=k) for s, k in zip(sizes, keys, strict=True)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(jnp.tanh(x)) + 0.1
        return x


class Scanned(eqx.Module):
    """Three alike, as one stack."""

    stack: kfac.Linear

    def __init__(self):
        make = lambda key: kfac.Linear(WIDTHS[0], WIDTHS[0], key=key)
        self.stack = eqx.filter_vmap(make)(jr.split(jr.key(5), 3))

    def __call__(self, x):
        leaves, static = eqx.partition(self.stack, eqx.is_array)
        body = lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None)
        return jax.lax.scan(body, x, leaves)[0][: WIDTHS[-1]]


class Net(eqx.Module):
    """A convolution with a normalisation of groups."""

    conv: kfac.Conv1d
    norm: kfac.GroupNorm

    def __init__(self):
        self.conv = kfac.Conv1d(1, WIDTHS[-1], 3, key=jr.key(7))
        self.norm = kfac.GroupNorm(1, WIDTHS[-1])

    def __call__(self, x):
        return jnp.mean(jnp.tanh(self.norm(self.conv(x[None]))), axis=1)


@ft.cache
def deep(*widths):
    return eqx.filter_jit(Deep)(list(widths))


SMALL = [6, 6, 3]
MODELS = {
    "deep": ft.partial(deep, *SMALL),
    "scanned": ft.cache(eqx.filter_jit(Scanned)),
    "convnet": ft.cache(eqx.filter_jit(Net)),
}
EXACT = kfac.Exact()
OPTIMIZERS = {
    "default": kfac.KFAC(),
    "schedule-free": kfac.KFAC(averaging=kfac.ScheduleFree()),
    "eigh": plain_kfac(0.1, 0.9, 0.1, solver=kfac.Eigh(), inverse_period=1, fisher=EXACT),
    "iterated": plain_kfac(
        0.1, solver=kfac.NewtonSchulz(1e-14), inverse_period=1, fisher=EXACT
    ),
    "in-turn": plain_kfac(0.1, inverse_period=kfac.Staggered(3), fisher=EXACT),
    "adaptive": kfac.KFAC(
        kfac.QuadraticModel(), kfac.QuadraticModel(), kfac.LevenbergMarquardt(1.0)
    ),
}


def context(mesh):
    is_explicit = EXPLICIT in mesh.axis_types
    return jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext()


@eqx.filter_jit
def several_steps(optimizer, loss_fn, model, state, args, number):
    """The model, and the state."""
    keys = jr.split(jr.key(0), number)
    return scanned(optimizer, loss_fn, model, state, *args, keys=keys)[:2]


def train(optimizer, model, mesh=None, loss_fn=loss_fn, args=(X, Y), number=8):
    if mesh is not None:
        model, args = put(model, mesh, P()), put(args, mesh, P("batch"))
    state = optimizer.init(model)
    return several_steps(optimizer, loss_fn, model, state, args, number)[0]


@ft.cache
def alone(name, model):
    return train(OPTIMIZERS[name], MODELS[model]())


# More devices than there are matrices; fewer, on an explicit mesh; along two axes.
MESHES = {
    "deep": make_mesh((6,)),
    "scanned": make_mesh((2,), kind=EXPLICIT),
    "convnet": make_mesh((2, 2), ("batch", "other")),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_one_device(name, model):
    mesh, start = MESHES[model], MODELS[model]()
    with context(mesh):
        got = train(OPTIMIZERS[name], start, mesh)
    assert_near(got, alone(name, model), 1e-9)
    assert_differs(got, start, 1e-3)


@ft.cache
def in_eigenbases(kind=None):
    """The model before and after some steps."""
    mlp = kfac.convert(eqx.filter_jit(eqx.nn.MLP)(6, 3, 5, 1, jnp.tanh, key=jr.key(3)))
    model = kfac.convert(kfac.revert(mlp), blocks=kfac.EKFAC())
    data = dict(loss_fn=squared, args=(X, jax.device_put(np.eye(3)[Y])), number=3)
    mesh = None if kind is None else make_mesh((4,), kind=kind)
    with contextlib.nullcontext() if kind is None else context(mesh):
        return model, train(OPTIMIZERS["eigh"], model, mesh, **data)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_steps_in_eigenbases(kind):
    """The factors have full rank, for else rounding chooses some of the bases."""
    start, got = in_eigenbases(kind)
    assert_near(got, in_eigenbases()[1], 1e-9)
    assert_differs(got, start, 1e-3)


def two_steps(static, params, x, y):
    model, optimizer = eqx.combine(params, static), OPTIMIZERS["eigh"]
    state = optimizer.init(model)
    return several_steps(optimizer, loss_fn, model, state, (x, y), 2)[0]


def on_every_device(fn, *in_specs, **options):
    """`fn` on four devices, which return the same."""
    specs = dict(mesh=make_mesh((4,)), in_specs=in_specs, out_specs=P())
    return jax.jit(jax.shard_map(fn, **specs, **options))


def test_steps_in_shard_map():
    params, static = eqx.partition(deep(*SMALL), eqx.is_array)
    steps = ft.partial(two_steps, static)
    split = P(), P("batch"), P("batch")
    traced = on_every_device(steps, *split).trace(params, X, Y)
    assert "psum" in str(traced.jaxpr)
    got = traced.lower().compile()(params, X, Y)
    assert_near(got, train(OPTIMIZERS["eigh"], deep(*SMALL), number=2), 1e-9)
    # Where JAX does not know what devices share, their gradients would stay apart.
    with pytest.raises(ValueError, match="`check_vma=False`, or a `pmap` .over .'b"):
        on_every_device(steps, *split, check_vma=False).trace(params, X, Y)
    with pytest.raises(ValueError, match="or a `pmap`"):
        several = X.reshape(4, -1, X.shape[-1]), Y.reshape(4, -1)
        jax.pmap(steps, in_axes=(None, 0, 0))(params, *several)


def test_updates_where_nothing_is_tracked():
    """There, work is not shared out, for devices may differ."""
    model, optimizer = deep(*SMALL), OPTIMIZERS["eigh"]
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(loss_fn, fisher=EXACT))
    _, grads, curvature = estimate(model, X, Y)
    given = eqx.filter((grads, optimizer.init(model), model, curvature), eqx.is_array)

    def updated(given):
        grads, state, model, curvature = given
        return optimizer.update(grads, state, model, curvature=curvature)[0]

    traced = {v: on_every_device(updated, P(), check_vma=v).trace(given) for v in (0, 1)}
    assert ["psum" in str(traced[v].jaxpr) for v in (0, 1)] == [False, True]
    want = eqx.filter_jit(updated)(given)
    for v in (0, 1):
        assert_near(traced[v].lower().compile()(given), want, 1e-9)


def gathered_loss(model, x, y):
    """The loss on an explicit mesh, where every layer needs its weights in full."""
    whole = lambda a: jax.sharding.reshard(a, P(*[None] * a.ndim))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return loss_fn(eqx.combine(jtu.tree_map(whole, params), static), x, y)


SPLITS = {  # The weights of two layers; whether the loss function gathers them.
    "rows": (P("data"), P("data"), AUTO, loss_fn),
    "columns": (P(None, "data"), P(None, "data"), AUTO, loss_fn),
    "tensor": (P("model", None), P(None, "model"), AUTO, loss_fn),
    "both": (P("model", "data"), P("data", "model"), AUTO, loss_fn),
    "explicit columns": (P(None, "data"), P(None, "data"), EXPLICIT, loss_fn),
    "explicit, gathered": (P("data"), P("data", "model"), EXPLICIT, gathered_loss),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_weights(name):
    """The parameters stay where they are, the steps what they are."""
    *specs, kind, loss = SPLITS[name]
    mesh = make_mesh((2, 2), ("data", "model"), kind)
    widths = [6, 8, 4]
    x, y = X, jax.device_put(np.asarray(Y) % widths[-1])
    optimizer = kfac.KFAC(fisher=EXACT, curvature_period=1, inverse_period=2)
    start = deep(*widths)
    want = train(optimizer, start, args=(x, y), number=3)
    with context(mesh):
        model, args = put(start, mesh, P()), put((x, y), mesh, P("data"))
        for i, spec in enumerate(specs):
            where = lambda m, i=i: m.layers[i].weight
            model = eqx.tree_at(where, model, put(where(model), mesh, spec))
        state = optimizer.init(model)
        got, state = several_steps(optimizer, loss, model, state, args, 3)
    assert_near(got, want, 1e-9)
    assert_differs(got, start, 1e-3)
    for part in (got, velocity_of(state, got)):
        for i, spec in enumerate(specs):
            weight = part.layers[i].weight
            assert weight.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("data", "model")])
def test_a_matrix_is_split_as_its_layer(spec):
    """Written into a layer of which devices have parts, it becomes such parts."""
    mesh = make_mesh((2, 2), ("data", "model"), EXPLICIT)
    with context(mesh):
        layer = put(deep(6, 8).layers[0], mesh, P())
        where = lambda m: m.weight
        layer = eqx.tree_at(where, layer, put(where(layer), mesh, spec))
        tag = layer.tag

        @eqx.filter_jit
        def there_and_back(layer):
            matrix = tag.to_matrix(layer)
            return matrix, tag.from_matrix(2 * matrix, layer)

        matrix, back = there_and_back(layer)
    assert matrix.sharding.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(back.weight), 2 * np.asarray(layer.weight))
    assert back.weight.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_members_in_shard_map():
    """Devices along one axis have members of their own, and share along the other one."""
    mesh = make_mesh((2, 3), ("members", "batch"))
    make = eqx.filter_vmap(lambda key: kfac.Linear(6, 3, key=key))
    members = eqx.filter_jit(lambda: make(jr.split(jr.key(8))))()
    params, static = eqx.partition(members, eqx.is_array)

    def own_steps(params, x, y):
        own = jtu.tree_map(lambda a: a[0], params)
        return jtu.tree_map(lambda a: a[None], two_steps(static, own, x, y))

    specs = dict(in_specs=(P("members"), P("batch"), P("batch")), out_specs=P("members"))
    got = jax.jit(jax.shard_map(own_steps, mesh=mesh, **specs))(params, X, Y)
    got, params = jax.device_get((got, params))
    own_steps = jax.jit(own_steps)
    for i in range(2):
        own = lambda tree, i=i: jtu.tree_map(lambda a: a[i : i + 1], tree)
        assert_near(own(got), own_steps(own(params), X, Y), 1e-9)


#
# What a device does
#


# Inputs, outputs, and how many there are: twelve layers again, some as stacks.
SHAPES = [(6, 9, 1), (9, 9, 3), (8, 7, 5), (6, 3, 3)]


@ft.cache
@eqx.filter_jit
def make_layers():
    stack = lambda i, o: eqx.filter_vmap(lambda key: kfac.Linear(i, o, key=key))
    return [stack(i, o)(jr.split(jr.key(0), n)) for i, o, n in SHAPES]


def decompositions_in_an_update(mesh, name):
    layers = make_layers()
    layers = layers if mesh is None else put(layers, mesh, P())
    params, static = eqx.partition(layers, eqx.is_array)
    optimizer = OPTIMIZERS[name]

    def update(params, state):
        new = dict(curvature=state.curvature, value=state.weight)
        return optimizer.update(params, state, eqx.combine(params, static), **new)

    traced = jax.jit(update).trace(params, optimizer.init(layers))
    number, _ = decompositions(traced.jaxpr.jaxpr)
    return number


@pytest.mark.parametrize("name", ["default", "eigh"])
def test_each_device_decomposes_its_part(name):
    total = 2 * sum(number for *_, number in SHAPES)
    assert decompositions_in_an_update(None, name) == total
    for devices in (1, 2, 4, 8):
        number = decompositions_in_an_update(make_mesh((devices,)), name)
        assert total / devices <= number <= -(-total // devices) + (devices > 1)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_work_is_dealt_out_evenly(devices):
    sides = [64 * w for pair in zip(WIDTHS[:-1], WIDTHS[1:], strict=True) for w in pair]
    kinds = sorted(set(sides))
    work, numbers = [k**3 for k in kinds], [sides.count(k) % devices for k in kinds]
    hands = deal(work, numbers, devices)
    totals_of = lambda hands: [sum(work[i] for i, _ in hand) for hand in hands]
    totals = totals_of(hands)
    jobs = sorted(job for hand in hands for job in hand)
    assert jobs == [(i, j) for i, n in enumerate(numbers) for j in range(n)]
    assert max(map(len, hands)) <= -(-len(jobs) // devices) + 1
    every = sum(k**3 * (sides.count(k) // devices) for k in kinds)
    even = sum(side**3 for side in sides) / devices
    assert max(totals) + every <= 1.3 * even
    as_if_alike = totals_of(deal([1.0 for _ in kinds], numbers, devices))
    assert max(as_if_alike) >= max(totals) + (devices == 8)


def test_what_is_gathered():
    """The statistics, the inverses, the gradient: nothing twice, nothing padded."""
    mesh = make_mesh()
    model, args = put(deep(*WIDTHS[:8]), mesh, P()), put((X, Y), mesh, P("batch"))
    optimizer = OPTIMIZERS["default"]
    state = optimizer.init(model)
    params, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def step(params, state, args):
        model = eqx.combine(params, static)
        out = optimizer.step(loss_fn, model, state, *args, key=jr.key(0))
        return only_arrays(out)

    traced = step.trace(params, state, args)
    number, _ = decompositions(traced.jaxpr.jaxpr)
    assert number in (2, 3)  # Of 14 on 8 devices.
    sizes = transfers(traced.lower().compile().as_text())
    inverses = sum(leaf.size for leaf in jtu.tree_leaves(state.inverse))
    assert sum(sum(several) == inverses for several in sizes) == 1
    parameters = sum(leaf.size for leaf in leaves(model))
    moments = sum(leaf.size for leaf in jtu.tree_leaves(state.curvature))
    assert sum(map(sum, sizes)) <= 1.01 * (inverses + parameters + moments)


#
# Where a state is
#


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_state_begins_on_the_mesh(kind, jit):
    """So that a step is compiled once."""
    mesh, start = make_mesh(kind=kind), deep(6, 3)
    compiled = []

    def listen(event, duration, fun_name="", **_):
        if event.endswith("backend_compile_duration") and "_one_step" in fun_name:
            compiled.append(fun_name)

    with context(mesh):
        model, args = put(start, mesh, P()), put((X, Y), mesh, P("batch"))
        init = OPTIMIZERS["default"].init
        state = (eqx.filter_jit(init) if jit else init)(model)
        for leaf in jtu.tree_leaves(state):
            assert leaf.sharding.device_set == set(jax.devices())

        @eqx.filter_jit
        def _one_step(model, state, key):
            step = OPTIMIZERS["default"].step
            return step(loss_fn, model, state, *args, key=key)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            for i in range(3):
                model, state, _ = _one_step(model, state, jr.key(i))
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_velocity_is_split_as_the_parameters(jit):
    mesh = make_mesh()
    model = put(deep(8, 16, 8), mesh, P("batch"))
    init = OPTIMIZERS["default"].init
    state = (eqx.filter_jit(init) if jit else init)(model)
    for part in (state.velocity, state.averaged_parameters.mean):
        for leaf in jtu.tree_leaves(part):
            assert not np.any(leaf)
            assert leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0] // 8
    replicated = OPTIMIZERS["default"].init(put(model, mesh, P()))
    assert all(a.sharding.is_fully_replicated for a in jtu.tree_leaves(replicated))


def test_of_a_model_that_is_not_finite_it_is_zero():
    mesh = make_mesh()
    model = put(deep(8, 16, 8), mesh, P("batch"))
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, replace_fn=lambda w: w / 0)
    state = eqx.filter_jit(OPTIMIZERS["default"].init)(model)
    assert not any(np.any(leaf) for leaf in jtu.tree_leaves(state.velocity))


#
# A state of which each device has a part
#


WIDE = [72, 72, 8]
WIDE_X = normal(32, WIDE[0], seed=3)
WIDE_Y = jax.device_put(np.random.default_rng(4).integers(WIDE[-1], size=32))


def three_steps(optimizer, mesh=None):
    """(The first one factorises, the second does not.)"""
    model, args = deep(*WIDE), (WIDE_X, WIDE_Y)
    if mesh is not None:
        model, args = put(model, mesh, P()), put(args, mesh, P("batch"))
    state = optimizer.init(model)
    if mesh is not None:
        state = eqx.filter_jit(kfac.packed)(state, over="batch")
    for _ in range(3):
        model, state, _ = stepped(optimizer, loss_fn, model, state, *args)
    return model, state


@ft.cache
def whole_states(solver):
    return three_steps(halving(solver))


def halving(solver):
    return plain_kfac(0.1, solver=solver, fisher=EXACT, inverse_period=2)


def bytes_here(tree):
    """On the first device."""
    return sum(a.addressable_shards[0].data.nbytes for a in jtu.tree_leaves(tree))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.NewtonSchulz(1e-14)])
def test_split_states(kind, solver):
    want, whole = whole_states(solver)
    mesh = make_mesh((4,), kind=kind)
    with context(mesh):
        got, state = three_steps(halving(solver), mesh)
    assert_near(got, want, 1e-9)
    split = (state.curvature, state.inverse)
    total = bytes_here((whole.curvature, whole.inverse))
    # Half of it, a quarter of that, and some padding.
    assert total / 8 < bytes_here(split) <= 1.3 * total / 8
    unpacked = eqx.filter_jit(kfac.operators.unpacked)(state)
    assert_near(unpacked.curvature, whole.curvature, 1e-9)
    assert_near(unpacked.inverse, whole.inverse, 1e-9)
    repacked = eqx.filter_jit(kfac.packed)(unpacked)
    assert bytes_here((repacked.curvature, repacked.inverse)) > 3 * bytes_here(split)


def test_split_states_have_the_same_shapes_on_any_number_of_devices():
    """So that a checkpoint of one restores into the other."""
    optimizer, shapes = OPTIMIZERS["default"], []
    for devices in (2, 6, 8):
        mesh = make_mesh((devices,))
        state = optimizer.init(put(deep(*WIDE), mesh, P()))
        split = ft.partial(kfac.packed, over=mesh.axis_names)
        state = eqx.filter_eval_shape(split, state)
        shapes.append([leaf.shape for leaf in jtu.tree_leaves(state)])
    assert shapes[0] == shapes[1] == shapes[2]


def test_split_states_of_optax():
    mesh = make_mesh((4,))
    optimizer = kfac.scale_by_kfac(0.1)
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(loss_fn, fisher=EXACT))
    update, results = eqx.filter_jit(optimizer.update), []
    for over in ((), ("batch",)):
        model, args = (
            put(deep(72, 73), mesh, P()),
            put((WIDE_X, WIDE_Y), mesh, P("batch")),
        )
        state = kfac.packed(optimizer.init(model), over=over)
        for _ in range(2):
            _, grads, curvature = estimate(model, *args)
            updates, state = update(grads, state, model, curvature=curvature)
        results.append((updates, bytes_here((state.curvature, state.inverse))))
    (want, all_of_it), (got, part) = results
    assert_near(got, want, 1e-9)
    assert part < all_of_it / 3


def test_products_with_split_inverses_are_dealt_out():
    """Each device multiplies with some of them: those of eight equal layers, one."""
    mesh, optimizer = make_mesh(), kfac.scale_by_kfac(0.1)
    update = eqx.filter_jit(optimizer.update)
    one = lambda key: kfac.Linear(64, 64, key=key)
    stack = lambda: eqx.filter_vmap(one)(jr.split(jr.key(0), 6))
    model = eqx.filter_jit(lambda: [stack(), one(jr.key(1)), one(jr.key(2))])()
    model = put(model, mesh, P())
    flops = []
    for over in ((), ("batch",)):
        state = eqx.filter_jit(kfac.packed)(optimizer.init(model), over=over)
        lowered = update.lower(model, state, model, curvature=None)
        flops.append(lowered.compile().compiled.cost_analysis()["flops"])
    products = 8 * 2 * 2 * 64**2 * 65
    assert flops[0] - flops[1] >= products * 7 / 8


def test_split_states_need_a_mesh():
    optimizer, model = OPTIMIZERS["default"], deep(2, 3)
    with pytest.raises(ValueError, match="Put the model on a mesh with the axis 'batch'"):
        kfac.packed(optimizer.init(model), over="batch")
    mesh = make_mesh((2,))
    with pytest.raises(ValueError, match=r"on a mesh with the axes \('batch',\)"):
        kfac.packed(optimizer.init(put(model, mesh, P())), over="data")
