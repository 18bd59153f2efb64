"""However a batch is laid out over devices, the results are those of one device."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import eqx_kfac as kfac

from .helpers import (
    arrays,
    assert_differs,
    assert_near,
    assert_near_where_finite,
    make_mesh,
    member,
    normal,
    only_arrays,
    put,
    scanned,
    stack,
)
from .plain import plain_kfac


DEVICES = 8
BATCH, D_IN, HIDDEN, D_OUT = 16, 4, 5, 3
# Devices (two examples each) differ in their total weight; the third has none at all.
WEIGHTS = jax.device_put(np.array([1.0, 2, 0, 1, 0, 0, 3, 1, 1, 0, 0.5, 1, 1, 1, 2, 5]))


@ft.cache
def make_model(seed=0, hidden=HIDDEN):
    make = eqx.filter_jit(eqx.nn.MLP)
    return kfac.convert(make(D_IN, D_OUT, hidden, 1, jnp.tanh, key=jr.key(seed)))


def data(*leading, seed=1):
    y = np.random.default_rng(seed).integers(D_OUT, size=leading)
    return normal(*leading, D_IN, seed=seed), jnp.asarray(y)


def loss_fn(model, x, y, weights=None):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights)


def penalised_loss(model, x, y, weights=None):
    """With a curved penalty, one on the parameters, and one on the examples."""
    logits = jax.vmap(model)(x)
    loss = kfac.SoftmaxCrossEntropy(logits, y, weights)
    norms = sum(jnp.sum(layer.weight**2) for layer in model.layers)
    return loss + kfac.L2(model, 0.1) + 0.1 * norms + 0.1 * jnp.mean(logits**2)


#
# What is run: the three results, or steps of an optimizer
#


def collect(loss_fn, model, key, *args, fisher=kfac.Exact()):
    return kfac.value_grad_and_curvature(loss_fn, fisher=fisher)(model, *args, key=key)


def train(loss_fn, model, key, *args, fisher=kfac.Exact(), solver=kfac.Cholesky()):
    optimizer = plain_kfac(
        0.1, 0.9, 1e-2, fisher=fisher, solver=solver, norm_constraint=1e-2
    )
    state = optimizer.init(model)
    model, state, info = optimizer.step(loss_fn, model, state, *args, key=key)
    # (But for eigenvectors, which are only determined up to their sign.)
    return model, state.curvature, state.velocity, info


def several_steps(loss_fn, model, key, *args):
    """A `scan` of steps, with work that is not due at every step."""
    optimizer = plain_kfac(
        0.1, 0.9, 1e-2, fisher=kfac.Exact(), inverse_period=3, curvature_period=2
    )
    state, keys = optimizer.init(model), jr.split(key, 4)
    params, state, infos = scanned(optimizer, loss_fn, model, state, *args, keys=keys)
    return (params, state), infos


RUNS = {
    "collect": collect,
    "Cholesky": train,
    "Eigh": ft.partial(train, solver=kfac.Eigh()),
    "steps": several_steps,
}


# Weights are all about what is collected: of two solvers, one has them.
CASES = [("collect", False), ("collect", True), ("Cholesky", True), ("Eigh", False)]


@eqx.filter_jit
def jitted(run, loss_fn, model, key, *args, **choices):
    return RUNS[run](loss_fn, model, key, *args, **choices)


@ft.cache
def unsharded(run, weighted=False, penalised=False, seed=0, fisher=kfac.Exact()):
    fn = penalised_loss if penalised else loss_fn
    args = arguments(weighted)
    return jitted(run, fn, make_model(seed), jr.key(0), *args, fisher=fisher)


def arguments(weighted):
    return (*data(BATCH), WEIGHTS) if weighted else data(BATCH)


def test_weights_matter():
    assert_differs(unsharded("collect", True)[2], unsharded("collect")[2])


#
# Automatic and explicit meshes
#


def tensor_parallel(model, mesh):
    """The first layer's output axis, and the second one's input axis, over devices."""

    def split(where, model, spec):
        return eqx.tree_at(where, model, put(where(model), mesh, spec))

    model = put(model, mesh, P())
    model = split(lambda m: m.layers[0].weight, model, P("batch", None))
    return split(lambda m: m.layers[1].weight, model, P(None, "batch"))


@pytest.mark.parametrize("run, weighted", CASES)
def test_auto_mesh(run, weighted):
    mesh = make_mesh()
    args = put(arguments(weighted), mesh, P("batch"))
    model = put(make_model(), mesh, P())
    got = jitted(run, loss_fn, model, jr.key(0), *args)
    assert_near(got, unsharded(run, weighted))


def test_auto_mesh_reduces_over_devices():
    """The factors are replicated sums, from shards that stay where they are."""
    mesh = make_mesh()
    params, static = eqx.partition(make_model(), eqx.is_array)
    params = put(params, mesh, P())
    args = put(data(BATCH), mesh, P("batch"))

    @jax.jit
    def run(params, *args):
        return only_arrays(collect(loss_fn, eqx.combine(params, static), None, *args))

    compiled = run.lower(params, *args).compile()
    assert "all-reduce" in compiled.as_text()
    assert "all-gather" not in compiled.as_text()
    _, _, curvature = compiled(params, *args)
    assert curvature.layers[0].input_factor.sharding.is_fully_replicated


def test_auto_mesh_with_a_split_model():
    mesh = make_mesh()
    model = make_model(hidden=8)
    run = ft.partial(jitted, "collect", loss_fn)
    want = run(model, None, *data(BATCH))
    split = tensor_parallel(model, mesh)
    assert not split.layers[0].weight.sharding.is_fully_replicated
    for spec in (P(), P("batch")):
        got = run(split, None, *put(data(BATCH), mesh, spec))
        assert_near(got, want)


@pytest.mark.parametrize("run", ["collect", "Cholesky"])
def test_auto_mesh_monte_carlo(run):
    """The same key draws the same samples, wherever they live."""
    mesh = make_mesh()
    fisher = kfac.MonteCarlo(2)
    args = put(data(BATCH), mesh, P("batch"))
    fn = ft.partial(jitted, run, loss_fn, fisher=fisher)
    got = fn(put(make_model(), mesh, P()), jr.key(0), *args)
    assert_near(got, unsharded(run, fisher=fisher))
    other = fn(put(make_model(), mesh, P()), jr.key(1), *args)
    assert_differs(got, other)


@pytest.mark.parametrize("run, weighted", CASES)
def test_explicit_mesh(run, weighted):
    mesh, model = make_mesh(kind=AxisType.Explicit), make_model()
    with jax.set_mesh(mesh):
        args = put(arguments(weighted), mesh, P("batch"))
        model = put(model, mesh, P())
        assert jax.typeof(args[0]).sharding.spec == P("batch", None)
        got = jitted(run, loss_fn, model, jr.key(0), *args)
    assert_near(got, unsharded(run, weighted))


def test_explicit_mesh_penalised():
    mesh, model = make_mesh(kind=AxisType.Explicit), make_model()
    with jax.set_mesh(mesh):
        args = put(arguments(True), mesh, P("batch"))
        model = put(model, mesh, P())
        got = jitted("collect", penalised_loss, model, None, *args)
    assert_near(got, unsharded("collect", True, True))


def test_explicit_mesh_monte_carlo():
    mesh, model = make_mesh(kind=AxisType.Explicit), make_model()
    fisher = kfac.MonteCarlo(2)
    with jax.set_mesh(mesh):
        args = put(data(BATCH), mesh, P("batch"))
        model = put(model, mesh, P())
        got = jitted("collect", loss_fn, model, jr.key(0), *args, fisher=fisher)
    assert_near(got, unsharded("collect", fisher=fisher))


def token_loss(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(jax.vmap(model))(x), y)


@pytest.mark.parametrize("tokens", [2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_mesh_axes(kind, tokens):
    """Examples over one axis of the mesh, tokens over the other."""
    mesh = make_mesh((4, 2), ("batch", "tokens"), kind)
    model, args = make_model(), data(BATCH, tokens)
    want = jitted("collect", token_loss, model, None, *args)
    with jax.set_mesh(mesh):
        args = put(args, mesh, P("batch", "tokens"))
        got = jitted("collect", token_loss, put(model, mesh, P()), None, *args)
    assert_near(got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_ensemble_over_a_mesh_axis(kind):
    """Stacked members, each on a device of its own."""
    mesh = make_mesh(names=("members",), kind=kind)
    x, y = data(DEVICES, BATCH)
    model = make_ensemble()
    run = eqx.filter_vmap(lambda m, x, y: collect(loss_fn, m, None, x, y))
    with jax.set_mesh(mesh):
        args = put((model, x, y), mesh, P("members"))
        got = eqx.filter_jit(run)(*args)
        factor = got[2].layers[0].input_factor
        assert not factor.sharding.is_fully_replicated
    assert_near(got, separate_members())


@eqx.filter_jit
def three_steps(optimizer, loss_fn, model, args):
    """The model's arrays, the state, and what is said of every step."""
    return scanned(optimizer, loss_fn, model, optimizer.init(model), *args, length=3)


def ensemble_loss(model, x, y):
    one = lambda model, x: jax.vmap(model)(x)
    logits = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 0))(model, x)
    return kfac.SoftmaxCrossEntropy(logits, y)


@pytest.mark.parametrize(
    "block, choices",
    [
        (
            kfac.Kronecker(),
            dict(
                solver=kfac.Eigh(),
                damping=kfac.LayerDamping(),
                norm_constraint=kfac.TrustRegion(1e-4),
            ),
        ),
        (kfac.Kronecker(), dict(solver=kfac.NewtonSchulz(), packed=True)),
        (
            kfac.Kronecker(),
            dict(solver=kfac.SubspaceIteration(), inverse_period=kfac.Staggered(2)),
        ),
        (kfac.EKFAC(), {}),
        (kfac.Full(), dict(damping=kfac.LevenbergMarquardt(1.0), averaging=0.9)),
        (kfac.Diagonal(), {}),
    ],
)
def test_steps_over_an_explicit_mesh_axis(block, choices):
    """Members on devices of their own; so are the factorisations."""
    choices = dict(inverse_period=2) | choices
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), **choices)
    model = kfac.convert(kfac.revert(make_ensemble()), blocks=block)
    args = data(DEVICES, BATCH)
    run = ft.partial(three_steps, optimizer, ensemble_loss)
    if isinstance(optimizer.inverse_period, kfac.Staggered):
        # Members that are split over an explicit mesh have one turn.
        one = make_mesh((1,), ("members",), AxisType.Explicit)
        with jax.set_mesh(one):
            want, _, want_info = run(*put((model, args), one, P("members")))
    else:
        want, _, want_info = run(model, args)
    mesh = make_mesh(names=("members",), kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        got, state, info = run(*put((model, args), mesh, P("members")))
    for leaf in jtu.tree_leaves((state.curvature, state.inverse)):
        assert jax.typeof(leaf).sharding.spec[0] == "members"
    # (What is not looked at after a step is NaN.)
    assert_near_where_finite((got, info), (want, want_info))
    assert_differs(got, model)


@pytest.mark.parametrize(
    "block",
    [
        kfac.Kronecker(),
        kfac.Kronecker(kfac.TensorNormal()),
        kfac.EKFAC(),
        kfac.Full(),
        kfac.Diagonal(),
    ],
    ids=repr,
)
def test_members_with_the_same_inputs(block):
    """What all members of an ensemble are given is split with them."""
    model = kfac.convert(kfac.revert(make_ensemble()), blocks=block)
    x, y = normal(BATCH, D_IN), data(DEVICES, BATCH)[1]

    def shared_loss(model, x, y):
        logits = eqx.filter_vmap(lambda member: jax.vmap(member)(x))(model)
        return kfac.SoftmaxCrossEntropy(logits, y)

    estimate = kfac.value_grad_and_curvature(shared_loss, fisher=kfac.Exact())
    want = eqx.filter_jit(estimate)(model, x, y)
    mesh = make_mesh(names=("members",), kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = put((model, y), mesh, P("members"))
        got = eqx.filter_jit(estimate)(placed[0], put(x, mesh, P()), placed[1])
    for leaf in jtu.tree_leaves(got[2]):
        assert jax.typeof(leaf).sharding.spec[0] == "members"
    assert_near(got, want)


class Scanned(eqx.Module):
    layers: kfac.Linear

    def __init__(self):
        make = lambda key: kfac.Linear(D_IN, D_IN, key=key)
        self.layers = eqx.filter_vmap(make)(jr.split(jr.key(5), DEVICES))

    def __call__(self, x):
        leaves, static = eqx.partition(self.layers, eqx.is_array)
        body = lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None)
        return jax.lax.scan(body, x, leaves)[0][:D_OUT]


@eqx.filter_jit
def in_turn(model, args):
    choices = dict(norm_constraint=1e-2, inverse_period=kfac.Staggered(4))
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), **choices)
    params, state, _ = three_steps(optimizer, loss_fn, model, args)
    return params, state.inverse


make_scanned = ft.cache(eqx.filter_jit(Scanned))


@ft.cache
def in_turn_on_one_device():
    return in_turn(make_scanned(), data(BATCH))


@pytest.mark.parametrize("where", ["members", "explicit batch", "shard_map"])
def test_stacked_layers_in_turn(where):
    """Some at every step, wherever they are."""
    model, args = make_scanned(), data(BATCH)
    want = in_turn_on_one_device()
    if where == "members":
        got = in_turn(put(model, make_mesh(), P("batch")), args)
    elif where == "explicit batch":
        mesh = make_mesh(kind=AxisType.Explicit)
        with jax.set_mesh(mesh):
            got = in_turn(model, put(args, mesh, P("batch")))
    else:
        params, static = eqx.partition(model, eqx.is_array)
        local = lambda params, *args: in_turn(eqx.combine(params, static), args)
        specs = dict(in_specs=(P(), P("batch"), P("batch")), out_specs=P())
        got = jax.jit(jax.shard_map(local, mesh=make_mesh(), **specs))(params, *args)
    assert_near(got, want)
    assert_differs(got[0], model)


#
# `shard_map` inside the loss
#


def sharded_loss(model, x, y, weights=None):
    params, static = eqx.partition(model, eqx.is_array)
    specs = dict(in_specs=(P(), P("batch")), out_specs=P("batch"))

    @ft.partial(jax.shard_map, mesh=make_mesh(), **specs)
    def forward(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return kfac.SoftmaxCrossEntropy(forward(params, x), y, weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_shard_map_inside_the_loss(weighted):
    got = jitted("collect", sharded_loss, make_model(), None, *arguments(weighted))
    assert_near(got, unsharded("collect", weighted))


def test_shard_map_inside_the_loss_without_jit():
    model = kfac.Linear(D_IN, D_OUT, key=jr.key(0))
    got = collect(sharded_loss, model, None, *arguments(True))
    assert_near(got, jitted("collect", loss_fn, model, None, *arguments(True)))


def positions_loss(model, x, spec):
    """Positions see each other, after a layer that each device applies to its part."""
    params, static = eqx.partition(model, eqx.is_array)

    @ft.partial(jax.shard_map, mesh=make_mesh(), in_specs=(P(), spec), out_specs=spec)
    def forward(params, x):
        return jax.vmap(jax.vmap(eqx.combine(params, static)))(x)

    outputs = jnp.sum(jnp.tanh(forward(params, x)), axis=1)
    return kfac.SquaredError(outputs, jnp.zeros_like(outputs))


def test_shard_map_that_splits_positions():
    """A device that has parts of all examples cannot add up what belongs to one example:
    `Joint` takes positions one by one there, and blocks that cannot are refused."""
    x = jnp.asarray(normal(BATCH, 24, D_IN, seed=3))
    run = lambda model, spec: jitted(
        "collect", lambda m, x: positions_loss(m, x, spec), model, None, x
    )
    joint, expand, full = (
        kfac.Linear(D_IN, D_OUT, key=jr.key(0), block=block)
        for block in (kfac.Kronecker(), kfac.Kronecker(kfac.Expand()), kfac.Full())
    )
    assert_near(run(joint, P(None, "batch")), run(expand, P(None, "batch")))
    assert_near(run(joint, P("batch")), run(joint, P()))
    assert_near(run(full, P("batch")), run(full, P()))
    with pytest.raises(ValueError, match="on each of .* devices.*not positions"):
        run(full, P(None, "batch"))
    assert_differs(run(joint, P("batch")), run(expand, P("batch")))


#
# Everything inside `shard_map`
#


@eqx.filter_jit
def in_shard_map(run, loss_fn, mesh, model, args, spec=P("batch"), key=None, **choices):
    """A run on every device, for its part of `args`; the result has to be the same on all
    of them."""
    params, static = eqx.partition(model, eqx.is_array)

    @ft.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), spec), out_specs=P())
    def local(params, key, args):
        model = eqx.combine(params, static)
        return only_arrays(RUNS[run](loss_fn, model, key, *args, **choices))

    return local(params, jr.key(0) if key is None else key, args)


@pytest.mark.parametrize("run, weighted", CASES)
def test_inside_shard_map(run, weighted):
    """The loss is that of the examples of one device; the results are those of all."""
    got = in_shard_map(run, loss_fn, make_mesh(), make_model(), arguments(weighted))
    assert_near(got, unsharded(run, weighted))


@pytest.mark.parametrize("run", ["collect", "Cholesky"])
def test_inside_shard_map_penalised(run):
    got = in_shard_map(run, penalised_loss, make_mesh(), make_model(), arguments(True))
    assert_near(got, unsharded(run, True, True))


def test_scan_of_steps_inside_shard_map():
    got = in_shard_map("steps", loss_fn, make_mesh(), make_model(), arguments(True))
    want = jitted("steps", loss_fn, make_model(), jr.key(0), *arguments(True))
    assert_near(got, want)


def test_inside_shard_map_over_two_axes():
    mesh = make_mesh((4, 2), ("a", "b"))
    run = ft.partial(in_shard_map, "collect", loss_fn, mesh, make_model())
    got = run(arguments(True), spec=P(("a", "b")))
    assert_near(got, unsharded("collect", True))
    # Split over one of the axes only: twice the same examples count once.
    got = run(arguments(True), spec=P("a"))
    assert_near(got, unsharded("collect", True))


def test_inside_shard_map_explicit_mesh():
    mesh, model = make_mesh(kind=AxisType.Explicit), make_model()
    with jax.set_mesh(mesh):
        args = put(arguments(True), mesh, P("batch"))
        model = put(model, mesh, P())
        got = in_shard_map("collect", loss_fn, mesh, model, args)
    assert_near(got, unsharded("collect", True))


def test_local_results_are_not_the_answer():
    """What a device would compute by itself is something else."""
    args = [np.asarray(a)[:2] for a in arguments(True)]
    alone = jitted("collect", loss_fn, make_model(), None, *args)
    for got, want in zip(alone, unsharded("collect", True)):
        assert_differs(got, want)


def test_mean_of_local_results_is_not_the_answer():
    """With unequal weights the mean over devices is not the mean over examples."""
    args = arrays(arguments(True))
    run = ft.partial(jitted, "collect", loss_fn, make_model(), None)
    halves = [arrays(run(*[a[i] for a in args])) for i in (np.s_[:4], np.s_[4:])]
    mean = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
    assert_differs(mean, unsharded("collect", True))


def chain_loss(model, x, weights):
    params, static = eqx.partition(model, eqx.is_array)

    def one(x):
        step = lambda x, p: (jnp.tanh(eqx.combine(p, static)(x)), None)
        return jax.lax.scan(step, x, params)[0]

    return kfac.SquaredError(jax.vmap(one)(x), x, weights)


def test_scan_inside_shard_map():
    """Stacked layers, scanned, with examples split over devices."""
    model, (x, _) = make_scanned().layers, data(BATCH)
    got = in_shard_map("collect", chain_loss, make_mesh(), model, (x, WEIGHTS))
    assert_near(got, jitted("collect", chain_loss, model, None, x, WEIGHTS))


class Rounds(eqx.Module):
    """One layer that is used three times, two of these in a loop."""

    first: eqx.nn.Linear
    again: eqx.nn.Linear

    def __call__(self, x):
        h = jnp.tanh(self.first(x))
        step = lambda h, _: (jnp.tanh(self.again(h)), None)
        return self.again(jax.lax.scan(step, h, None, length=2)[0])


@pytest.mark.parametrize("layout", ["auto mesh", "explicit mesh", "shard_map", "loss"])
def test_gradients_of_several_uses(layout):
    """An example's are added up on the device that has the example; but not in a
    `shard_map` inside of the loss, where `Joint` takes uses one by one."""
    keys = jr.split(jr.key(0))
    linears = eqx.nn.Linear(D_IN, D_OUT, key=keys[0]), eqx.nn.Linear(3, 3, key=keys[1])
    model, args = kfac.convert(Rounds(*linears)), arguments(True)
    want = jitted("collect", loss_fn, model, None, *args)
    expanded = kfac.convert(Rounds(*linears), kfac.Kronecker(kfac.Expand()))
    assert_differs(
        want[2].again, jitted("collect", loss_fn, expanded, None, *args)[2].again
    )
    if layout == "shard_map":
        got = in_shard_map("collect", loss_fn, make_mesh(), model, args)
    elif layout == "loss":
        got = jitted("collect", sharded_loss, model, None, *args)
        want = jitted("collect", loss_fn, expanded, None, *args)
    else:
        kind = AxisType.Auto if layout == "auto mesh" else AxisType.Explicit
        mesh = make_mesh(kind=kind)
        with jax.set_mesh(mesh):
            split, whole = put(args, mesh, P("batch")), put(model, mesh, P())
            got = jitted("collect", loss_fn, whole, None, *split)
    assert_near(got, want)


def test_several_uses_on_parts_of_the_examples_are_refused():
    """By blocks that would be wrong without all of these uses."""
    make = lambda block: kfac.convert(
        Rounds(eqx.nn.Linear(D_IN, 3, key=jr.key(0)), eqx.nn.Linear(3, 3, key=jr.key(1))),
        block,
    )
    with pytest.raises(
        ValueError, match=r"`\.again` is used several times in a `shard_m"
    ):
        collect(sharded_loss, make(kfac.TNT()), None, *arguments(True))
    assert_near(
        in_shard_map("collect", loss_fn, make_mesh(), make(kfac.TNT()), arguments(True)),
        jitted("collect", loss_fn, make(kfac.TNT()), None, *arguments(True)),
    )


def test_devices_draw_different_samples():
    """One and the same example everywhere: if all devices drew one target, the output
    factor of the last layer would have rank one."""
    one = arrays(data(1))
    args = tuple(jax.device_put(np.repeat(a, DEVICES, axis=0)) for a in one)
    fisher = kfac.MonteCarlo()
    rank = lambda result: np.linalg.matrix_rank(result[2].layers[-1].output_factor)
    alone = jitted("collect", loss_fn, make_model(), jr.key(0), *one, fisher=fisher)
    assert rank(alone) == 1
    run = ft.partial(in_shard_map, "collect", loss_fn, make_mesh(), make_model(), args)
    got, again = (run(fisher=fisher, key=jr.key(0)) for _ in range(2))
    assert rank(got) > 1
    assert_near(got, again, tolerance=0)
    other = run(fisher=fisher, key=jr.key(1))
    assert_differs(got[2], other[2])


def test_monte_carlo_inside_shard_map_is_unbiased():
    fisher = kfac.MonteCarlo(2000)
    run = ft.partial(in_shard_map, "collect", loss_fn, make_mesh(), make_model())
    _, _, got = run(arguments(True), fisher=fisher)
    _, _, want = unsharded("collect", True)
    assert_near(got, want, tolerance=5e-2)
    assert_differs(got, want, 1e-6)


#
# Different models on different devices
#


def make_ensemble(members=DEVICES):
    params = stack([make_model(seed) for seed in range(members)])
    return eqx.combine(params, make_model())


@ft.cache
def separate_members(run="collect", weighted=False):
    """Every member by itself, on the examples of its own device."""
    x, y = arrays(data(DEVICES, BATCH))
    weights = (WEIGHTS,) if weighted else ()
    alone = lambda i: jitted(run, loss_fn, make_model(i), jr.key(0), x[i], y[i], *weights)
    return stack(map(alone, range(DEVICES)))


def one_member_per_device(run, params, *args):
    """`run(params, *args)` on every device, for its part of both. (Fetched: looking at
    one member of a sharded array is a program with a collective for every array, and
    many of them on their way at once can wait for each other for ever.)"""

    @jax.jit
    @ft.partial(
        jax.shard_map, mesh=make_mesh(), in_specs=P("batch"), out_specs=P("batch")
    )
    def local(params, args):
        params, args = member((params, args), 0)
        return jtu.tree_map(lambda x: x[None], only_arrays(run(params, *args)))

    return jax.device_get(local(params, args))


@pytest.mark.parametrize("run, weighted", CASES)
def test_ensemble_in_shard_map(run, weighted):
    """Models that differ from device to device are not one model: nothing is added up
    over devices."""
    x, y = data(DEVICES, BATCH)
    weights = jax.device_put(np.tile(WEIGHTS, (DEVICES, 1))) if weighted else None
    params, static = eqx.partition(make_ensemble(), eqx.is_array)

    def local(params, *args):
        return RUNS[run](loss_fn, eqx.combine(params, static), jr.key(0), *args)

    got = one_member_per_device(local, params, x, y, weights)
    assert_near(got, separate_members(run, weighted))


def test_ensemble_of_scans_in_shard_map():
    x, y = arrays(data(DEVICES, BATCH))
    params, static = eqx.partition(make_ensemble(), eqx.is_array)

    def local(params, *args):
        return several_steps(loss_fn, eqx.combine(params, static), jr.key(0), *args)

    got = one_member_per_device(local, params, x, y)
    for i in (0, DEVICES - 1):
        want = jitted("steps", loss_fn, make_model(i), jr.key(0), x[i], y[i])
        assert_near(member(got, i), want)


def test_ensemble_with_a_state_from_outside():
    """Made for all members before they are handed out."""
    x, y = arrays(data(DEVICES, BATCH))
    params, static = eqx.partition(make_ensemble(), eqx.is_array)
    optimizer = plain_kfac(0.1, 0.9, 1e-2, fisher=kfac.Exact(), inverse_period=3)
    states = eqx.filter_jit(eqx.filter_vmap(optimizer.init))(make_ensemble())

    def step(params, state, x, y):
        model = eqx.combine(params, static)
        return only_arrays(optimizer.step(loss_fn, model, state, x, y))

    got = one_member_per_device(step, params, states, x, y)
    state = optimizer.init(make_model(3))
    want = jax.jit(step)(only_arrays(make_model(3)), state, x[3], y[3])
    assert_near(member(got, 3), want)


def test_ensemble_of_several_members_per_device():
    mesh = make_mesh((4,))
    x, y = data(DEVICES, BATCH)
    params, static = eqx.partition(make_ensemble(), eqx.is_array)

    @jax.jit
    @ft.partial(jax.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    def local(params, x, y):
        def one(params, x, y):
            return only_arrays(collect(loss_fn, eqx.combine(params, static), None, x, y))

        return jax.vmap(one)(params, x, y)

    assert_near(local(params, x, y), separate_members())


@pytest.mark.parametrize("weighted", [False, True])
def test_members_and_examples_on_two_axes(weighted):
    """Sums go over the axis that splits examples, and not over that of the members."""
    mesh = make_mesh((2, 4), ("members", "batch"))
    params, static = eqx.partition(make_ensemble(2), eqx.is_array)
    args = arguments(weighted)

    @jax.jit
    @ft.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("members"), P("batch")),
        out_specs=P("members"),
    )
    def local(params, args):
        model = eqx.combine(member(params, 0), static)
        out = collect(loss_fn, model, None, *args)
        return jtu.tree_map(lambda x: x[None], only_arrays(out))

    want = [unsharded("collect", weighted, seed=seed) for seed in range(2)]
    got = jax.device_get(local(params, args))
    assert_near(got, stack(want))
    assert_differs(member(got, 0), member(got, 1))
