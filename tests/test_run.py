"""Whole runs: what may go wrong in them is refused, or named."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_kfac as kfac

from . import reference
from .helpers import assert_near, make_mesh, stepped
from .plain import plain_kfac


BATCH, D_IN, D_OUT = 16, 4, 3
TOLERANCE = 1e-10


def make_model(seed=0):
    return kfac.convert(eqx.nn.MLP(D_IN, D_OUT, 5, 1, jnp.tanh, key=jr.key(seed)))


def data(seed=1, batch=BATCH):
    keys = jr.split(jr.key(seed))
    return jr.normal(keys[0], (batch, D_IN)), jr.randint(keys[1], (batch,), 0, D_OUT)


#
# Weights of examples that depend on the model
#


def terms(model, x, y):
    log_p = jax.nn.log_softmax(jax.vmap(model)(x))
    return -jnp.take_along_axis(log_p, y[:, None], axis=1)[:, 0]


def focal_weights(model, x, y):
    return (1 - jnp.exp(-terms(model, x, y))) ** 2


def focal(model, x, y):
    weights = focal_weights(model, x, y)
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights)


def constant(model, x, y):
    weights = jax.lax.stop_gradient(focal_weights(model, x, y))
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights)


def with_others(model, x, y):
    logits = jax.vmap(model)(x)
    return 0.5 * focal(model, x, y) + kfac.SquaredError(logits, logits + 1) + 0.3


def quotient(model, x, y):
    weights = focal_weights(model, x, y)
    return jnp.sum(weights * terms(model, x, y)) / jnp.sum(weights)


def quotient_and_others(model, x, y):
    return 0.5 * quotient(model, x, y) + D_OUT / 2 + 0.3


@pytest.mark.parametrize(
    "loss_fn, plain", [(focal, quotient), (with_others, quotient_and_others)]
)
def test_gradient_of_weights_that_depend_on_the_model(loss_fn, plain):
    model, (x, y) = make_model(), data()
    value, slope = eqx.filter_jit(eqx.filter_value_and_grad(plain))(model, x, y)
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(loss_fn, kfac.Exact()))
    got_value, got, curvature = estimate(model, x, y)
    assert reference.error(got_value, value) < TOLERANCE
    assert_near(got, slope)
    hessian = kfac.Hessian(loss_fn, model, x, y)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    plain_slope = jax.grad(lambda p: plain(eqx.combine(p, static), x, y))
    curved = jax.jit(lambda p: jax.jvp(plain_slope, (p,), (p,))[1])
    assert_near(eqx.filter_jit(hessian.mv)(params), curved(params))
    # Curvature takes them for constants.
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(constant, kfac.Exact()))
    _, other, same = estimate(model, x, y)
    assert reference.error(other.layers[0].weight, slope.layers[0].weight) > 0.1
    if loss_fn is focal:
        assert_near(curvature, same)


def test_loss_after_a_step_with_weights_that_depend_on_the_model():
    model, (x, y) = make_model(), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), max_increase=jnp.inf)
    new, _, info = stepped(optimizer, focal, model, optimizer.init(model), x, y)
    assert reference.error(info.loss, quotient(model, x, y)) < TOLERANCE
    assert reference.error(info.new_loss, quotient(new, x, y)) < TOLERANCE


def test_weights_that_depend_on_the_model_on_several_devices():
    model, (x, y) = make_model(), data()
    mesh = make_mesh()
    estimate = kfac.value_grad_and_curvature(focal, kfac.Exact())

    params, static = eqx.partition(model, eqx.is_array)

    def gradient(params, x, y):
        value, grads, _ = estimate(eqx.combine(params, static), x, y)
        return value, eqx.filter(grads, eqx.is_array)

    specs = dict(in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    got = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(params, x, y)
    assert_near(got, eqx.filter_value_and_grad(quotient)(model, x, y))


def test_weights_that_depend_on_the_model_in_micro_batches():
    model, (x, y) = make_model(), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    state = optimizer.init(model)
    with pytest.raises(ValueError, match="micro_batches=1"):
        optimizer.step(focal, model, state, x, y, micro_batches=2)
    step = ft.partial(stepped, optimizer, constant, model, state, x, y)
    assert_near(step(micro_batches=2)[0], step()[0])


def test_masks_that_depend_on_the_model_in_micro_batches():
    """The loss after a step counts the examples that are there then."""
    model = make_model()
    x, y = data()

    def loss_fn(model, x, y):
        logits = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y, jnp.max(logits, axis=1) > 0.5)

    optimizer = plain_kfac(2.0, 0.0, 1e-2, fisher=kfac.Exact(), max_increase=jnp.inf)
    state = optimizer.init(model)
    for parts in (1, 2):
        parts = dict(micro_batches=parts)
        new, _, info = stepped(optimizer, loss_fn, model, state, x, y, **parts)
        after = loss_fn(new, x, y)
        assert after.count != loss_fn(model, x, y).count
        assert reference.error(info.new_loss, after.value) < TOLERANCE


#
# What was led uphill by momentum
#


def valley(model, x, y):
    y_model = jax.vmap(model)(x)
    return kfac.SquaredError(y_model**2, y)


def test_momentum_that_leads_uphill_is_not_tried_again():
    model = kfac.Linear(2, 2, use_bias=False, key=jr.key(0))
    x = jr.normal(jr.key(1), (8, 2))
    y = jr.normal(jr.key(2), (8, 2)) ** 2
    optimizer = plain_kfac(0.1, 0.99, 1e-3, fisher=kfac.Exact(), max_increase=0.0)
    state = optimizer.init(model)

    def body(carry, _):
        model, state = carry
        model, state, info = optimizer.step(valley, model, state, x, y)
        return (model, state), (info.rejected, state.velocity.weight, info.loss)

    _, (rejected, velocity, loss) = jax.lax.scan(body, (model, state), length=100)
    in_a_row = "".join("01"[int(r)] for r in rejected)
    assert "1" in in_a_row and "11" not in in_a_row
    assert not jnp.any(velocity[rejected])
    assert jnp.all(jnp.diff(loss) <= 0)


#
# What else a step leaves behind
#


class Normed(eqx.Module):
    linear: kfac.Linear
    norm: eqx.nn.BatchNorm
    head: kfac.Linear

    def __init__(self, key):
        keys = jr.split(key)
        self.linear = kfac.Linear(D_IN, 5, key=keys[0])
        self.norm = eqx.nn.BatchNorm(5, "batch", channelwise_affine=False, mode="batch")
        self.head = kfac.Linear(5, D_OUT, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.head(jnp.tanh(x)), state


def normed_loss(model, bn_state, x, y):
    axes = dict(axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, bn_state = jax.vmap(model, **axes)(x, bn_state)
    return kfac.SoftmaxCrossEntropy(logits, y), bn_state


@pytest.mark.parametrize("choosing", [True, False])
def test_state_of_a_batch_that_was_rejected(choosing):
    model, bn_state = eqx.nn.make_with_state(Normed)(jr.key(0))
    inference = eqx.nn.inference_mode(model)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    state = optimizer.init(model)

    @eqx.filter_jit
    def step(model, state, bn_state, x, y):
        model, state, info = optimizer.step(normed_loss, model, state, bn_state, x, y)
        new = info.choose(info.aux, bn_state) if choosing else info.aux
        return model, state, new, info

    for index in range(6):
        x, y = data(index)
        x = x.at[0, 0].set(jnp.nan) if index == 2 else x
        before = bn_state
        model, state, bn_state, info = step(model, state, bn_state, x, y)
        assert bool(info.rejected) == (index == 2)
        moved = jtu.tree_map(lambda a, b: not jnp.array_equal(a, b), bn_state, before)
        assert any(jtu.tree_leaves(moved)) == (index != 2 or not choosing)
    finite = [bool(jnp.all(jnp.isfinite(a))) for a in jtu.tree_leaves(bn_state)]
    out, _ = inference(data()[0][0], bn_state)
    assert all(finite) == bool(jnp.all(jnp.isfinite(out))) == choosing


def test_choosing():
    model, (x, y) = make_model(), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    new = dict(a=jnp.array([1, 2]), b=jnp.nan * jnp.ones(2), c="new", d=None, e=3)
    old = dict(a=np.array([3, 4]), b=jnp.ones(2), c="old", d=None, e=4)

    def loss_fn(model, x, y):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)

    for bad, want in ((False, new), (True, old)):
        x = x.at[0].set(jnp.nan) if bad else x
        state = optimizer.init(model)
        _, _, info = stepped(optimizer, loss_fn, model, state, x, y)
        got = info.choose(new, old)
        assert (got["c"], got["d"], got["e"]) == ("old", None, 4)
        for name in "ab":
            assert got[name].dtype == new[name].dtype
            np.testing.assert_array_equal(got[name], want[name])


#
# Gradients without curvature
#


class Stack(eqx.Module):
    first: kfac.Linear
    second: kfac.Linear
    head: kfac.Linear

    def __init__(self, block, stacked):
        keys = jr.split(jr.key(0), 3)
        make = lambda key: kfac.Linear(5, 5, key=key, block=block)
        self.first = kfac.Linear(D_IN, 5, key=keys[0])
        self.second = eqx.filter_vmap(make)(jr.split(keys[1], 2 if stacked else 1))
        self.head = kfac.Linear(5, D_OUT, key=keys[2])

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        use = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return self.head(jnp.tanh(jnp.sum(use(self.second, x), axis=0)))


def certain_loss(model, x, y, scale=1.0):
    """With a large scale, outputs are so certain that they have no curvature."""
    return kfac.SoftmaxCrossEntropy(scale * jax.vmap(model)(x), y)


blocks = {
    "kronecker": kfac.Kronecker(),
    "diagonal input": kfac.Kronecker(diagonal_input=True),
    "diagonals": kfac.Kronecker(diagonal_input=True, diagonal_output=True),
    "ekfac": kfac.EKFAC(),
    "full": kfac.Full(),
    "diagonal": kfac.Diagonal(),
    "identity": kfac.Identity(),
    "tnt": kfac.TNT(),
}


def without_last_member(layer):
    """What is there of the last layer of a stack becomes zero."""
    zero = lambda a: a.at[-1].set(0) if eqx.is_inexact_array(a) else a
    return jtu.tree_map(zero, layer)


@pytest.mark.parametrize("packed", [False, True], ids=["one", "stacked and packed"])
@pytest.mark.parametrize("name", blocks)
def test_gradients_without_curvature(name, packed):
    model = Stack(blocks[name], stacked=packed)
    optimizer = plain_kfac(0.1, packed=packed)
    estimate = kfac.value_grad_and_curvature(certain_loss, kfac.Exact())
    _, grads, curvature = eqx.filter_jit(estimate)(model, *data())
    second = lambda tree: tree.second
    zeroed = eqx.tree_at(second, curvature, without_last_member(curvature.second))
    spared = eqx.tree_at(lambda c: c.second.l2, zeroed, replace_fn=lambda a: a + 0.1)
    still = eqx.tree_at(second, grads, without_last_member(grads.second))

    @eqx.filter_jit
    def update(grads, curvature):
        return optimizer.update(grads, optimizer.init(model), model, curvature=curvature)

    cases = [
        (grads, curvature, False),
        (grads, zeroed, True),
        (grads, spared, False),
        (still, zeroed, False),
        (still, curvature, False),
    ]
    for some_grads, some_curvature, unseen in cases:
        updates, state = update(some_grads, some_curvature)
        assert int(state.faults.unseen) == int(state.rejected) == unseen
        assert any(map(np.any, jtu.tree_leaves(updates))) != unseen


def test_recurrent_curvature_of_nothing():
    make = lambda scale: kfac.SeriesFactors(
        *(scale * jnp.eye(3) for _ in range(4)), jnp.ones(()), jnp.zeros(())
    )
    assert [bool(make(scale).is_zero()) for scale in (0.0, 1.0)] == [True, False]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_outputs_without_curvature(micro_batches):
    model, (x, y) = Stack(kfac.Kronecker(), True), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    step = eqx.filter_jit(optimizer.step)
    for scale, unseen in ((1.0, False), (1e6, True)):
        batch = dict(scale=jnp.array(scale), micro_batches=micro_batches)
        new, _, info = step(certain_loss, model, optimizer.init(model), x, y, **batch)
        assert bool(info.rejected) == bool(info.faults.unseen) == unseen
        assert float(info.gradient_norm) > 0.1
        assert jnp.array_equal(new.head.weight, model.head.weight) == unseen


def test_frozen_layers_without_curvature():
    model, (x, y) = Stack(kfac.Kronecker(), False), data()
    frozen = jtu.tree_map(eqx.is_array, model)
    frozen = eqx.tree_at(lambda m: (m.first, m.second), frozen, (False, False))
    params, static = eqx.partition(model, frozen)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())

    def loss_fn(params, x, y):
        return certain_loss(eqx.combine(params, static), x, y)

    _, _, info = stepped(optimizer, loss_fn, params, optimizer.init(params), x, y)
    assert not bool(info.rejected)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_layers_without_curvature_on_several_devices(scale):
    model = Stack(kfac.Kronecker(), True)
    mesh = make_mesh()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, x, y):
        model, state = eqx.combine(params, static), optimizer.init(params)
        _, _, info = optimizer.step(certain_loss, model, state, x, y, scale=scale)
        return info.faults

    specs = dict(in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    faults = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, *data())
    assert bool(faults.unseen) == (scale > 1)


def test_penalties_have_no_curvature():
    """A head of zeros: other layers have no gradient yet, but for the penalty."""
    model = make_model()
    head = lambda m: m.layers[-1].weight
    model = eqx.tree_at(head, model, jnp.zeros_like(head(model)))
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())

    def loss_fn(model, x, y):
        norm = jnp.sum(model.layers[0].weight ** 2)
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y) + 1e-3 * norm

    for micro_batches in (1, 2):
        state, parts = optimizer.init(model), dict(micro_batches=micro_batches)
        _, _, info = stepped(optimizer, loss_fn, model, state, *data(), **parts)
        assert not bool(info.rejected)


#
# Large numbers
#


@pytest.mark.parametrize("size", [1e18, 1e30, 1e36])
def test_gradients_whose_squares_overflow(size):
    """Are fine: the step is that of a loss in smaller units."""
    model = kfac.cast(make_model(), jnp.float32)
    x, y = data()
    x, size = x.astype(jnp.float32), jnp.float32(size)

    def loss_fn(model, x, y, size):
        return size * kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)

    @eqx.filter_jit
    def step(size):
        optimizer = plain_kfac(0.1, damping=1e-2 * size, fisher=kfac.Exact())
        return optimizer.step(loss_fn, model, optimizer.init(model), x, y, size)

    (got, _, info), (want, _, small) = step(size), step(jnp.float32(1))
    assert not bool(info.rejected)
    norm = info.gradient_norm
    error = reference.error(norm / size, small.gradient_norm)
    assert error < 1e-5 if size < 1e19 else jnp.isinf(norm)
    assert_near(got, want, 1e-4)
    _, _, info = step(jnp.float32(3e38))
    assert bool(info.rejected) and not bool(info.faults.gradient)


#
# Long runs
#


STEPS = 10_000


def long_run(optimizer, dtype, batches):
    """All steps in one program: what is asked of every one, and the last state."""
    model = kfac.cast(
        kfac.convert(eqx.nn.MLP(2, 1, 2, 1, jnp.tanh, key=jr.key(0))), dtype
    )
    params, static = eqx.partition(model, eqx.is_array)

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y)

    def body(carry, batch):
        params, state = carry
        model, key = eqx.combine(params, static), jr.fold_in(jr.key(1), state.step)
        model, state, info = optimizer.step(loss_fn, model, state, *batch, key=key)
        seen = info.rejected, info.faults, info.loss, state.weight, state.damping
        return (eqx.filter(model, eqx.is_array), state), seen

    start = params, optimizer.init(model)
    end, seen = jax.jit(lambda s, b: jax.lax.scan(body, s, b))(start, batches)
    return start, end, jtu.tree_map(np.asarray, seen)


def noisy_batches(dtype, seed=0):
    """A teacher's, one in twenty of them with a NaN; several in a row, and the first."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(STEPS, 4, 2))
    y = np.tanh(x @ rng.normal(size=(2, 1))) + 0.1 * rng.normal(size=(STEPS, 4, 1))
    bad = (rng.uniform(size=STEPS) < 0.04) | (np.arange(STEPS) % 1000 < 10)
    y[bad, 0, 0] = np.nan
    return tuple(map(lambda a: jnp.asarray(a, dtype), (x, y))), bad


def expected_weights(optimizer, taken, ema):
    """The weight of the average after every step."""
    weights, weight = [], 0.0
    for step, fine in enumerate(taken):
        if fine and (step % optimizer.curvature_period == 0 or weight == 0):
            number = 1 + optimizer.ema.burn_in if weight == 0 else 1
            for _ in range(number):
                weight = (ema if number == 1 else 1.0) * weight + 1
        weights.append(weight)
    return np.array(weights)


@pytest.mark.parametrize(
    "dtype, average, periods",
    [
        (jnp.float32, (1.0, 0), dict()),
        (jnp.float64, (0.9, 2), dict(curvature_period=3, inverse_period=1)),
        (jnp.float64, (0.95, 0), dict(curvature_period=2, inverse_period=kfac.InTurn(4))),
        (jnp.float32, (1.0, 5), dict(curvature_period=7, inverse_period=kfac.InTurn(6))),
    ],
    ids=["all", "burn-in", "in turn", "long periods"],
)
def test_ten_thousand_steps(dtype, average, periods):
    periods = periods | dict(ema=kfac.MovingAverage(*average))
    optimizer = plain_kfac(0.02, 0.5, 1e-2, max_increase=0.5, averaging=0.999, **periods)
    batches, bad = noisy_batches(dtype)
    start, end, seen = long_run(optimizer, dtype, batches)
    rejected, faults, loss, weight, _ = seen
    # Counters are those of what happened.
    params, state = end
    assert int(state.step) == STEPS
    assert np.array_equal(faults.loss, bad) and np.array_equal(np.isnan(loss), bad)
    assert int(state.rejected) == rejected.sum()
    for name, happened in faults.as_dict().items():
        assert int(getattr(state.faults, name)) == happened.sum()
    assert not np.any(rejected & ~(faults.loss | faults.increase))
    # So are the weights of averages.
    want = expected_weights(optimizer, ~bad, average[0])
    np.testing.assert_allclose(weight, want, 1e-5)
    every = expected_weights(optimizer, np.ones(STEPS, bool), average[0])
    assert not np.allclose(weight, every, 1e-5)
    # Nothing has grown, or changed its type; everything is finite.
    types = lambda tree: [jax.typeof(a) for a in jtu.tree_leaves(tree)]
    assert jtu.tree_structure(end) == jtu.tree_structure(start)
    assert types(end) == types(start)
    assert all(jnp.all(jnp.isfinite(a)) for a in jtu.tree_leaves(end))
    fine = loss[~bad]
    assert np.mean(fine[-1000:]) < 0.5 * np.mean(fine[:10])


@pytest.mark.parametrize("at", ["least", "most"])
def test_ten_thousand_steps_at_the_limits_of_the_damping(at):
    limits = dict(minimum=1e-3, maximum=1.0, initial=0.1, interval=2)
    # Ratios that are always good, or never good enough.
    bounds = dict(least=dict(lower=0.0, upper=0.0), most=dict(lower=9.0, upper=9.0))
    rule = kfac.LevenbergMarquardt(**limits, **bounds[at])
    quadratic = kfac.QuadraticModel()
    optimizer = plain_kfac(quadratic, quadratic, rule, ema=1.0, curvature_period=3)
    batches, bad = noisy_batches(jnp.float32)
    start, (params, state), seen = long_run(optimizer, jnp.float32, batches)
    rejected, _, _, _, damping = seen
    assert np.array_equal(rejected & bad, bad)
    assert 1e-3 <= damping.min() and damping.max() <= 1 + 1e-6
    extreme = 1e-3 if at == "least" else 1.0
    assert np.mean(np.isclose(damping[1000:], extreme, rtol=1e-5)) > 0.3
    assert int(state.rejected) == rejected.sum() and int(state.step) == STEPS
    assert all(jnp.all(jnp.isfinite(a)) for a in jtu.tree_leaves((params, state)))
