"""Preconditioned through the rows, a step is the same step; and where a gradient is not
made of rows alone, it is noticed."""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import eqx_kfac as kfac
from eqx_kfac._curvature._batch import Batch
from eqx_kfac._inverse._factorise import factorise
from eqx_kfac._inverse._precondition import precondition
from eqx_kfac._inverse._through_rows import precondition_through_rows

from . import reference
from .helpers import filled, flat, normal, params_of
from .plain import plain_kfac


N, D, H, K = 3, 7, 9, 4
X, Y = normal(N, D, seed=1), normal(N, K, seed=2)
STEPS = 3


def made(make):
    return filled(make, jr.key(0), scale=0.4)


def mlp(block=kfac.Kronecker(), depth=1, **kwargs):
    net = made(lambda key: eqx.nn.MLP(D, K, H, depth, jnp.tanh, key=key, **kwargs))
    return kfac.convert(net, blocks=block)


class Scanned(eqx.Module):
    hidden: kfac.Linear
    readout: kfac.Linear

    def __init__(self, key):
        make = lambda key: kfac.Linear(D, D, key=key)
        self.hidden = eqx.filter_vmap(make)(jr.split(key, 4))
        self.readout = kfac.Linear(D, K, key=key)

    def __call__(self, x):
        arrays, static = eqx.partition(self.hidden, eqx.is_array)
        body = lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None)
        return self.readout(jax.lax.scan(body, x, arrays)[0])


def loss_fn(model, x, y, weights=None):
    return kfac.SquaredError(jax.vmap(model)(x), y, weights)


def weighted(model, x, y):
    return loss_fn(model, x, y, jnp.array([1.0, 2.0, 0.0]))


def rematerialised(model, x, y):
    return loss_fn(eqx.filter_checkpoint(model), x, y)


def jitted(model, x, y):
    return kfac.SquaredError(jax.vmap(eqx.filter_jit(model))(x), y)


def several_losses(model, x, y):
    outputs = jax.vmap(model)(x)
    labels = jnp.arange(N) % K
    return kfac.SquaredError(outputs, y) + 0.5 * kfac.SoftmaxCrossEntropy(outputs, labels)


def on_positions(model, x, y):
    x, y = (jnp.stack([a, 2 * a]) for a in (x, y))
    return kfac.SquaredError(jax.vmap(jax.vmap(model))(x), y)


@eqx.filter_jit
def both_ways(loss_fn, model, args, choices):
    """By rows and by matrices: the parameters after a few steps, and what is told about
    each."""
    choices = dict(learning_rate=0.1, damping=0.1, fisher=kfac.Exact()) | choices
    params, static = eqx.partition(model, eqx.is_array)

    def run(by_rows):
        optimizer = plain_kfac(by_rows=by_rows, **choices)

        def step(carry, _):
            model, state = eqx.combine(carry[0], static), carry[1]
            model, state, info = optimizer.step(loss_fn, model, state, *args)
            return (eqx.filter(model, eqx.is_array), state), info

        start = params, optimizer.init(model)
        (end, _), infos = jax.lax.scan(step, start, None, length=STEPS)
        return flat(params_of(end)), infos

    return flat(params_of(params)), run(True), run(False)


def check(whole, loss_fn, model, *args, tolerance=1e-12, **choices):
    """Both ways give the same steps, and whether the rows were whole (`None`: there are
    none) is known."""
    start, (got, infos), (want, _) = both_ways(loss_fn, model, args, choices)
    assert (whole is None) == (infos.through_rows is None)
    assert whole is None or set(np.asarray(infos.through_rows)) <= set(whole)
    assert len(infos.rejected) == STEPS and not np.any(infos.rejected)
    start, got, want = map(np.asarray, (start, got, want))
    moved = np.linalg.norm(want - start)
    assert moved > 1e-2
    assert np.linalg.norm(got - want) < tolerance * moved


#
# Whole
#


LOSSES = [loss_fn, weighted, rematerialised, jitted, several_losses]


def test_examples_in_the_middle():
    """There, the gradient may be summed in another order."""

    def loss_fn(model, x, y):
        over_positions = jax.vmap(model)
        return kfac.SquaredError(jax.vmap(over_positions, in_axes=1)(x), y)

    x, y = np.stack([X, 2 * np.array(X)]), np.stack([Y, 2 * np.array(Y)], axis=1)
    check([True, False], loss_fn, mlp(depth=2), x, y)


def test_positions():
    check([True], on_positions, mlp(depth=2), X, Y)  # Deep enough for twice the rows.


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda fn: fn.__name__)
def test_losses(loss_fn):
    check([True], loss_fn, mlp(), X, Y)


MODELS = {
    "no-bias": lambda: mlp(use_bias=False),
    "scanned": lambda: made(Scanned),
    "ekfac": lambda: mlp(kfac.EKFAC()),
    "tnt": lambda: mlp(kfac.TNT()),
    "diagonal-factor": lambda: mlp(kfac.Kronecker(diagonal_input=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    check([True], loss_fn, MODELS[name](), X, Y)


def test_scalar_inputs_of_stacked_layers():
    """In a scan, where a layer sees no stack, and an input has no axis of its own."""

    class Net(eqx.Module):
        layers: kfac.Linear

        def __init__(self, key):
            make = lambda key: kfac.Linear("scalar", 9, key=key)
            self.layers = eqx.filter_vmap(make)(jr.split(key, 4))

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)
            body = lambda x, layer: (jnp.sum(eqx.combine(layer, static)(x)), None)
            return jnp.tanh(jax.lax.scan(body, x, arrays)[0][None])

    x, y = np.array(X)[:1, 0], np.array(Y)[:1, :1]
    check([True], loss_fn, made(Net), x, y, learning_rate=1.0)


CHOICES = {
    "eigh": dict(solver=kfac.Eigh()),
    "newton-schulz": dict(solver=kfac.NewtonSchulz(1e-14)),
    "packed": dict(packed=True, inverse_period=2),
    "in-turn": dict(inverse_period=kfac.Staggered(2)),
    "norm-constraint": dict(norm_constraint=1e-2, weight_decay=0.1, averaging=0.9),
    "schedule-free": dict(norm_constraint=1e-2, averaging=kfac.ScheduleFree()),
    "adaptive": dict(
        learning_rate=kfac.QuadraticModel(),
        momentum=kfac.QuadraticModel(),
        damping=kfac.LevenbergMarquardt(0.1, interval=1, calibration=3),
    ),
    "part": dict(fisher=kfac.Exact(examples=2)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    check([True], loss_fn, mlp(), X, Y, **CHOICES[name])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen(frozen):
    model = mlp()
    spec = jax.tree.map(eqx.is_array, model)
    spec = eqx.tree_at(lambda m: getattr(m.layers[0], frozen), spec, False)
    trained, rest = eqx.partition(model, spec)

    def partitioned(model, x, y):
        return loss_fn(eqx.combine(model, rest), x, y)

    check([True], partitioned, trained, X, Y)


def test_other_parameters():
    """Some have no tag, some layers no rows: a convolution has too many."""

    class Net(eqx.Module):
        conv: kfac.Conv1d
        linear: kfac.Linear
        scale: jax.Array

        def __init__(self, key):
            self.conv = kfac.Conv1d(1, 2, 3, padding=1, key=key)
            self.linear = kfac.Linear(2 * D, K, key=key)
            self.scale = jnp.ones(K)

        def __call__(self, x):
            x = jnp.tanh(self.conv(x[None]))
            return self.linear(x.ravel()) * self.scale

    check([True], loss_fn, made(Net), X, Y, fallback=optax.sgd(0.1))


def test_mixed_precision():
    """What is compared is what was computed in bfloat16; the rows' product is not rounded
    to it."""

    def cast(model, x, y):
        half = jnp.bfloat16
        outputs = jax.vmap(kfac.cast(model, half))(x.astype(half))
        return kfac.SquaredError(outputs.astype(y.dtype), y)

    check([True], cast, mlp(), X, Y, tolerance=2e-2)


def test_ensemble():
    """Every step of its own: both ways are computed, the right one is taken."""
    one = lambda key: eqx.nn.MLP(D, K, H, 1, key=key)
    net = made(lambda key: eqx.filter_vmap(one)(jr.split(key, 2)))
    members, penalties = kfac.convert(net), jnp.array([0.0, 1.0])

    def penalised(model, x, y, penalty):
        weight = model.layers[0].weight
        return loss_fn(model, x, y) + penalty * jnp.sum(weight**2)

    def stepped(by_rows, *args):
        optimizer = plain_kfac(0.1, fisher=kfac.Exact(), by_rows=by_rows)

        @ft.partial(eqx.filter_vmap, in_axes=(eqx.if_array(0), None, None, 0))
        def step(model, x, y, penalty):
            state = optimizer.init(model)
            return optimizer.step(penalised, model, state, x, y, penalty)

        model, _, info = step(*args)
        return params_of(model), info

    both = eqx.filter_jit(lambda *args: [stepped(b, *args) for b in (True, False)])
    (got, info), (want, _) = both(members, X, Y, penalties)
    assert np.asarray(info.through_rows).tolist() == [True, False]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch(kind):
    net = made(lambda key: eqx.nn.MLP(30, K, 40, 1, jnp.tanh, key=key))
    x, y = normal(8, 30, seed=7), normal(8, K, seed=8)
    mesh = Mesh(np.array(jax.devices()[:8]), ("batch",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, P("batch"))
    with jax.set_mesh(mesh):
        args = jax.device_put((x, y), sharding)
        check([True], loss_fn, kfac.convert(net), *args)


#
# Not whole
#


def with_l2(model, x, y):
    return loss_fn(model, x, y) + kfac.L2(model, 0.1)


def with_penalty(model, x, y):
    return loss_fn(model, x, y) + 0.1 * jnp.sum(model.layers[0].bias ** 2)


class Changing(eqx.Module):
    """A layer whose tag does not know what becomes of its weight."""

    weight: jax.Array
    bias: jax.Array
    tag: kfac.Tag
    change: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.tag(self.change(self.weight) @ x + self.bias, x)


def changing(change):
    model = mlp()
    last = model.layers[1]
    tag = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())
    new = Changing(last.weight, last.bias, tag, change)
    return eqx.tree_at(lambda m: m.layers[1], model, new)


def masked(weight):
    return weight * jnp.tri(K, H, dtype=float)


def flipped(weight):
    return weight[::-1]


def seen_by_a_penalty(model, x, y):
    """The layer is used once more, for what has no curvature."""
    return loss_fn(model, x, y) + jnp.sum(jax.vmap(model.layers[0])(x) ** 2)


@pytest.mark.parametrize(
    "loss_fn",
    [with_penalty, seen_by_a_penalty],
    ids=lambda fn: fn.__name__,
)
def test_not_whole(loss_fn):
    check([False], loss_fn, mlp(), X, Y)


@pytest.mark.parametrize("change", [masked, flipped], ids=lambda fn: fn.__name__)
def test_a_layer_that_changes_its_weight(change):
    check([False], loss_fn, changing(change), X, Y)


def test_never_whole():
    """What is known from the start is not looked at."""
    check(None, with_l2, mlp(), X, Y)


@pytest.mark.parametrize("whole", [True, False])
def test_looking_matters(whole):
    """Rows that are not whole, taken all the same, are another step."""
    loss = loss_fn if whole else with_l2

    @eqx.filter_jit
    def preconditioned(model, x, y):
        curvature = kfac.curvature(loss, kfac.Exact())(model, x, y)
        batch = Batch(loss, (x, y), {})
        program = batch.analyse(model)._replace(regularised=False)
        slots = batch.row_slots(model, program)
        _, grads, _, rows, *_ = batch.linearise(model, None, slots).value_and_grads()
        solver = kfac.Cholesky()
        rest = curvature, factorise(curvature, model, solver, 0.1), solver, 0.1
        results = [precondition(grads, *rest)]
        for pretended in (True, False):
            other = eqx.tree_at(lambda r: r.whole, rows, jnp.array(pretended))
            results.append(precondition_through_rows(grads, other, *rest))
        return rows.whole, [result.layers for result in results]

    known, (want, taken, looked) = preconditioned(mlp(), X, Y)
    assert bool(known) == whole
    for a, b, right in zip(taken, looked, want, strict=True):
        error = reference.error(a.weight, right.weight)
        assert error < 1e-12 if whole else error > 1e-2
        assert reference.error(b.weight, right.weight) < 1e-12


#
# Not chosen
#


def twice(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x) + jax.vmap(model)(2 * x), y)


def example_by_example(model, x, y):
    return kfac.SquaredError(jax.lax.map(model, x), y)


def many_rows(model, x, y):
    x, y = (jnp.tile(a, (20, 1)) for a in (x, y))
    return loss_fn(model, x, y)


@pytest.mark.parametrize(
    "loss_fn", [twice, example_by_example, many_rows], ids=lambda fn: fn.__name__
)
def test_not_chosen(loss_fn):
    check(None, loss_fn, mlp(), X, Y)


@pytest.mark.parametrize("block", [kfac.Full(), kfac.Diagonal()])
def test_other_blocks(block):
    check(None, loss_fn, mlp(block), X, Y)


#
# Work
#


def products(jaxpr, found):
    """The shapes of all products that are always computed: not in a condition."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(tuple(v.aval.shape for v in eqn.invars))
        if eqn.primitive.name != "cond":
            for sub in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(sub, "jaxpr"):
                    products(sub.jaxpr, found)
                elif hasattr(sub, "eqns"):
                    products(sub, found)
    return found


def test_no_product_of_an_inverse_and_a_gradient():
    """Only where the rows turn out not to be whole."""

    def always(through_rows):
        optimizer = plain_kfac(0.1, fisher=kfac.Exact(), by_rows=through_rows)
        model = mlp()
        arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)

        def step(arrays):
            model, state = eqx.combine(arrays, static)
            _, _, info = out = optimizer.step(loss_fn, model, state, X, Y)
            return eqx.filter(out, eqx.is_array)

        return products(jax.make_jaxpr(step)(arrays).jaxpr, [])

    gradient_shapes = {(H, D + 1), (K, H + 1)}

    def of_gradients(found):
        return [s for s in found if gradient_shapes & set(s) and (N not in s[0] + s[1])]

    assert len(of_gradients(always(False))) >= 4
    assert not of_gradients(always(True))


SOLVERS = [kfac.Cholesky(), kfac.Eigh(), kfac.SubspaceIteration(), kfac.NewtonSchulz()]


@ft.cache
@eqx.filter_jit
def solutions(kind):
    """Of every solver, what is got and what is wanted; then products."""
    (output_factor, input_factor), (g, x) = (
        [np.random.default_rng(d).normal(size=(n or d, d)) for d in (H, D)]
        for n in (None, N)
    )
    output_factor, input_factor = (a @ a.T for a in (output_factor, input_factor))
    if kind == "diagonal":
        input_factor = np.diag(np.diag(input_factor))
    operator = kfac.operators.KroneckerOperator(
        *map(jnp.asarray, (output_factor, input_factor))
    )
    if kind == "spectral":
        operator = operator.spectral()
    g, x, options = jnp.asarray(g), jnp.asarray(x), dict(damping=0.1)
    found = []
    for solver in SOLVERS:
        want = lx.linear_solve(operator, g.T @ x, solver, options=options).value
        state = solver.init(operator, options)
        found.append((solver.compute_outer(state, g, x, options), want))
    return found, (operator.mv_outer(g, x), operator.mv(g.T @ x))


@pytest.mark.parametrize("index", range(4), ids=[type(s).__name__ for s in SOLVERS])
@pytest.mark.parametrize("kind", ["dense", "diagonal", "spectral"])
def test_solution_for_an_outer_product(index, kind):
    found, products = solutions(kind)
    assert reference.error(*found[index]) < 1e-12
    assert reference.error(*products) < 1e-12


def test_uses_are_counted_only_where_rows_may_be_few():
    """To count them takes a trace of the loss function more."""
    traces = []

    def counting(model, x, y):
        traces.append(len(x))
        return loss_fn(model, x, y)

    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), by_rows=True)
    step = lambda model, x, y: optimizer.step(
        counting, model, optimizer.init(model), x, y
    )
    for times in (1, 40):
        eqx.filter_eval_shape(step, mlp(), *(np.tile(a, (times, 1)) for a in (X, Y)))
    assert traces.count(len(X)) == traces.count(40 * len(X)) + 1
