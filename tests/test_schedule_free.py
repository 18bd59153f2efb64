"""Steps that are dealt out over a growing window: a base iterate, its average, and the
point between them at which gradients are taken."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac
from eqx_kfac._optimizer._extent import init_extent
from eqx_kfac._optimizer._schedule_free import Dealing

from .helpers import (
    assert_near,
    flat,
    leaves,
    member,
    normal,
    params_of,
    raises,
    relative,
    scanned,
    stepped,
    velocity_of,
)
from .models import mlp, regressor
from .plain import plain_kfac


X, Y = normal(12, 3, seed=1), normal(12, 2, seed=2)
EXACT = dict(damping=0.1, fisher=kfac.Exact(), inverse_period=1)
ALWAYS = optax.constant_schedule


def loss_fn(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


def batch(t):
    return np.asarray(X) + 0.1 * t, np.asarray(Y) * np.cos(t)


def blend(a, b, share):
    """Of the inexact arrays of two models."""
    mixed = lambda p, q: (1 - share) * p + share * q if eqx.is_inexact_array(p) else p
    return jtu.tree_map(mixed, a, b)


def reference(rate, momentum, decay, constraint, number):
    """The points at which gradients are taken, and the averages, from steps without
    momentum and average: each with the curvature of all steps so far."""
    whole = rate / (1 - momentum)
    most = None if constraint is None else constraint / (1 - momentum) ** 2
    optimizer = plain_kfac(whole, 0.0, norm_constraint=most, **EXACT)
    point = base = average = regressor()
    state, found = optimizer.init(point), []
    for t in range(number):
        moved, state, _ = stepped(optimizer, loss_fn, point, state, *batch(t))
        add = lambda z, new, old: z + new - old if eqx.is_inexact_array(z) else z
        base = jtu.tree_map(add, base, moved, point)
        average = blend(average, base, 1 - decay(t))
        point = blend(base, average, momentum)
        found.append((point, average))
    return found


@pytest.mark.parametrize("constraint", [None, 1e-4])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", ["window", 0.8, 0.0])
def test_gradients_are_between_base_and_average(decay, momentum, constraint):
    number = 9
    window = (lambda t: 0.3 * t / (1 + 0.3 * t)) if decay == "window" else ALWAYS(decay)
    chosen = kfac.Window(0.3) if decay == "window" else decay
    optimizer = plain_kfac(
        0.1,
        momentum,
        norm_constraint=constraint,
        averaging=kfac.ScheduleFree(chosen),
        **EXACT,
    )
    model = regressor()
    state = optimizer.init(model)
    for t, (point, average) in enumerate(
        reference(0.1, momentum, window, constraint, number)
    ):
        model, state, _ = stepped(optimizer, loss_fn, model, state, *batch(t))
        assert_near(model, point, 1e-11)
        assert_near(kfac.averaged(model, state), average, 1e-11)
    together = momentum == 0.0 or decay == 0.0
    assert (relative(leaves(model), leaves(base_of(model, state, momentum))) < 1e-9) == (
        together
    )


def base_of(model, state, momentum):
    """z = x + m / (1 - mu)."""
    average = kfac.averaged(model, state)
    return blend(average, model, 1 / (1 - momentum))


def test_momentum_that_decays_is_something_else():
    models = []
    for averaging in (kfac.ScheduleFree(0.9), 0.9):
        optimizer = plain_kfac(0.1, 0.9, averaging=averaging, **EXACT)
        model = regressor()
        state = optimizer.init(model)
        for t in range(4):
            model, state, _ = stepped(optimizer, loss_fn, model, state, *batch(t))
        models.append((model, kfac.averaged(model, state)))
    (ours, our_average), (theirs, their_average) = models
    assert relative(leaves(ours), leaves(theirs)) > 1e-3
    assert relative(leaves(our_average), leaves(their_average)) > 1e-3


def inner(a, b, operator, damping):
    """With the damped curvature, of two trees shaped like the model."""
    trees = operator.mv(b), b
    product = jtu.tree_map(lambda c, d: c + damping * d, *trees)
    return sum(np.vdot(p, q) for p, q in zip(leaves(a), leaves(product), strict=True))


@pytest.mark.parametrize("tight", [False, True])
def test_the_extent_is_that_of_step_and_velocity(tight):
    """The curvature stays the same: one batch, a network that is linear."""
    model = kfac.convert(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    region = kfac.TrustRegion(
        1e9, 1e9, velocity_factor=1e-12 if tight else 1e9, measured_fraction=jnp.inf
    )
    optimizer = plain_kfac(
        0.1,
        0.9,
        norm_constraint=region,
        averaging=kfac.ScheduleFree(kfac.Window(0.5)),
        solver=kfac.Eigh(),
        **EXACT,
    )
    state = optimizer.init(model)
    for _ in range(4):
        before, old = model, velocity_of(state, model)
        model, state, _ = stepped(optimizer, loss_fn, model, state, X, Y)
        operator = kfac.analysis.BlockDiagonalOperator(state.curvature, model)
        product = ft.partial(inner, operator=operator, damping=0.1)
        step = jtu.tree_map(jnp.subtract, params_of(model), params_of(before))
        gradient = eqx.filter_grad(lambda m: loss_fn(m, X, Y).value)(before)
        dot = lambda a: sum(np.vdot(*pair) for pair in zip(leaves(a), leaves(gradient)))
        extent, new = state.extent, velocity_of(state, model)
        assert_near(extent.squared_length, product(new, new), 1e-9)
        assert_near(extent.step_length, product(step, step), 1e-9)
        assert_near(extent.along, product(new, step), 1e-9)
        assert_near(extent.descent, -dot(step), 1e-9)
        kept = extent.slope / dot(old) if dot(old) else 0.0
        assert 0 <= kept < 1
    assert relative(extent.along, extent.step_length) > 1e-3
    assert relative(extent.along, extent.squared_length) > 1e-3


def test_what_gradients_and_losses_say_is_of_the_step():
    given = dict(squared_length=5.0, step_length=3.0, along=2.0, slope=0.5, descent=4.0)
    numbers = {name: jnp.asarray(value) for name, value in given.items()}
    extent = dataclasses.replace(init_extent(schedule_free=True), **numbers)
    found = extent.coupling_given(jnp.asarray(6.5))
    np.testing.assert_allclose(found, (1 + (6.5 - 0.5) / 2) / 2)
    later = extent.between(jnp.asarray(10.0), jnp.asarray(9.0))
    np.testing.assert_allclose(later.promised, 0.9 + 0.1 * (4 - 3 / 2) / 10)
    half = extent.scaled(jnp.asarray(0.5))
    np.testing.assert_allclose([half.step_length, half.along], [3 / 4, 2 / 4])


@pytest.mark.parametrize("number", [1, 6])
def test_a_step_is_as_long_as_the_region_allows(number):
    radius = 1e-6
    region = kfac.TrustRegion(radius, 1e9, velocity_factor=2.0)
    choices = dict(norm_constraint=region, averaging=kfac.ScheduleFree(), **EXACT)
    optimizer = plain_kfac(10.0, 0.9, **choices)
    model, lengths = mlp(jax.random.key(0)), []
    state = optimizer.init(model)
    for _ in range(number):
        model, state, _ = stepped(optimizer, loss_fn, model, state, X, Y)
        lengths.append(float(state.extent.step_length))
    assert np.all(np.array(lengths) <= 2 * radius * (1 + 1e-9))
    np.testing.assert_allclose(lengths[0], 2 * radius)


@pytest.mark.parametrize("scale", [0.3, 1.0])
@pytest.mark.parametrize("kept", [0.0, 0.6, 1.0])
def test_the_average_moves_by_what_is_not_ahead_any_more(scale, kept):
    r"""With all of the velocity and a whole step, the average moves by $c / (1 - \mu)$
    times the new velocity before it decays."""
    momentum, decay, rate = (jnp.asarray(a) for a in (0.8, 0.7, 0.1))
    dealing = Dealing.of(momentum, decay)
    step = [scale * n for n in dealing.of_step(rate, jnp.asarray(kept))]
    velocity = dealing.of_velocity(rate, jnp.asarray(kept), jnp.asarray(scale))
    of_average = step[0] - velocity[0], step[1] - velocity[1] + kept
    whole = 0.3 / 0.2
    np.testing.assert_allclose(velocity[0], (1 - 0.3 * scale) * scale * 0.1)
    if scale == 1:
        np.testing.assert_allclose(of_average[0], whole * 0.1)
    np.testing.assert_allclose(of_average[1], scale * kept * whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("region", ["auto", None])
def test_a_rejected_step_moves_neither_model_nor_average(bad, region):
    optimizer = plain_kfac(
        0.01, norm_constraint=region, averaging=kfac.ScheduleFree(), **EXACT
    )
    model = regressor()
    state = optimizer.init(model)
    for t in range(3):
        model, state, _ = stepped(optimizer, loss_fn, model, state, *batch(t))
    x = np.asarray(X) * bad
    after, later, info = stepped(optimizer, loss_fn, model, state, x, Y)
    assert bool(info.rejected) and bool(info.faults.loss)
    assert_near(after, model, 0)
    assert_near(later.velocity, state.velocity, 0)
    averages = kfac.averaged(after, later), kfac.averaged(model, state)
    assert_near(*averages, 0)
    again, _, info = stepped(optimizer, loss_fn, after, later, *batch(4))
    assert not bool(info.rejected)
    assert relative(leaves(again), leaves(after)) > 1e-6


def test_the_average_before_the_first_step_is_the_model():
    model, optimizer = regressor(), kfac.KFAC(averaging=kfac.ScheduleFree())
    state = optimizer.init(model)
    assert state.averaged_parameters == kfac.Ahead()
    assert not jtu.tree_leaves(state.averaged_parameters)  # It needs no memory.
    assert_near(kfac.averaged(model, state), model, 0)
    assert state.extent.along is not None
    assert kfac.KFAC().init(model).extent.along is None


def surrogate(model, x, y):
    """An objective beside a loss without targets."""
    out = jax.vmap(model)(x)
    return jnp.mean(jnp.sum(out * y, axis=1)) + kfac.SquaredError(out)


def test_a_step_of_a_surrogate_is_a_part_of_one():
    """Bounds that are measured shorten what the gradient adds to the velocity, too."""
    choices = dict(averaging=kfac.ScheduleFree(0.8), **EXACT)
    region = kfac.TrustRegion(1e-6)
    optimizer = plain_kfac(1.0, 0.9, norm_constraint=region, **choices)
    model = regressor()
    state = optimizer.init(model)
    new, state, info = stepped(optimizer, surrogate, model, state, X, Y)
    assert not bool(info.rejected)
    free = plain_kfac(1.0, 0.9, **choices)
    far, other, _ = stepped(free, surrogate, model, free.init(model), X, Y)
    moved = [jtu.tree_map(jnp.subtract, *map(params_of, (m, model))) for m in (new, far)]
    part = np.vdot(*map(flat, moved)) / np.vdot(flat(moved[1]), flat(moved[1]))
    assert 0 < part < 0.1
    assert_near(flat(moved[0]), part * flat(moved[1]), 1e-9)
    velocity = flat(velocity_of(state, model))
    assert_near(velocity, part * flat(velocity_of(other, model)), 1e-9)
    first = 0.9 * 0.2 / 0.1
    assert_near(velocity, 0.8 / (1 + first) * flat(moved[0]), 1e-9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_average_has_the_type_of_the_model(dtype):
    start = model = kfac.cast(regressor(), dtype)
    optimizer = kfac.KFAC(averaging=kfac.ScheduleFree(), fisher=kfac.Exact())
    state = optimizer.init(model)
    x, y = np.asarray(X, dtype), np.asarray(Y, dtype)
    for _ in range(6):
        model, state, info = stepped(optimizer, loss_fn, model, state, x, y)
        assert not bool(info.rejected)
    average = kfac.averaged(model, state)
    assert {leaf.dtype for leaf in leaves(average)} == {jnp.dtype(dtype)}
    after, before = (float(loss_fn(m, x, y).value) for m in (average, start))
    assert after < before


def test_ensembles_and_loops():
    optimizer = kfac.KFAC(averaging=kfac.ScheduleFree(), fisher=kfac.Exact())
    models = [regressor(seed) for seed in (0, 1)]

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
    def of_all(model, number):
        state = optimizer.init(model)
        params, state, _ = scanned(optimizer, loss_fn, model, state, X, Y, length=number)
        model = eqx.combine(params, model)
        return params_of(model), params_of(kfac.averaged(model, state))

    members = jtu.tree_map(
        lambda *a: jnp.stack(a) if eqx.is_array(a[0]) else a[0], *models
    )
    together = of_all(members, 5)
    for index, model in enumerate(models):
        state = optimizer.init(model)
        for _ in range(5):
            model, state, _ = stepped(optimizer, loss_fn, model, state, X, Y)
        alone = params_of(model), params_of(kfac.averaged(model, state))
        assert_near(member(together, index), alone, 1e-9)


def test_where_the_parameters_go_back_they_are_the_average():
    optimizer = plain_kfac(
        0.01, norm_constraint="auto", averaging=kfac.ScheduleFree(), **EXACT
    )
    model = regressor()
    state = optimizer.init(model)
    for t in range(3):
        model, state, _ = stepped(optimizer, loss_fn, model, state, *batch(t))
    for _ in range(4):  # Losses that have diverged.
        model, state, info = stepped(optimizer, loss_fn, model, state, X, 1e4 + Y)
    assert bool(info.faults.divergence)
    assert_near(kfac.averaged(model, state), model, 0)
    assert all(not np.any(leaf) for leaf in leaves(state.velocity))


class Shifted(eqx.Module):
    """A parameter that no tag covers, beside a layer."""

    layer: kfac.Linear
    shift: jax.Array

    def __call__(self, x):
        return self.layer(x) + self.shift


def test_parameters_of_the_fallback_are_not_averaged():
    layer = kfac.Linear(3, 2, key=jax.random.key(0))
    model = Shifted(layer, jnp.zeros(2))
    choices = dict(fallback=optax.sgd(0.1), averaging=kfac.ScheduleFree())
    optimizer = plain_kfac(0.01, **choices, **EXACT)
    state = optimizer.init(model)
    for t in range(3):
        model, state, _ = stepped(optimizer, loss_fn, model, state, *batch(t))
    average = kfac.averaged(model, state)
    assert_near(average.shift, model.shift, 0)
    assert relative(average.layer.weight, model.layer.weight) > 1e-4
    with raises(ValueError, "The state has averages of", "layer.weight"):
        kfac.averaged(dataclasses.replace(model, layer=None), state)


def test_it_is_the_same_in_optax():
    choices = dict(averaging=kfac.ScheduleFree(), damping=0.1, inverse_period=1)
    ours = plain_kfac(0.1, fisher=kfac.Exact(), **choices)
    theirs = kfac.optax_kfac(0.1, 0.9, **choices)
    value_and_all = kfac.value_grad_and_curvature(loss_fn, fisher=kfac.Exact())
    model = other = regressor()
    state = ours.init(model)
    opt_state = theirs.init(params_of(other))
    for t in range(4):
        model, state, _ = stepped(ours, loss_fn, model, state, *batch(t))
        _, grads, curvature = eqx.filter_jit(value_and_all)(other, *batch(t))
        params = params_of(other)
        updates, opt_state = eqx.filter_jit(theirs.update)(
            grads, opt_state, params, curvature=curvature
        )
        other = eqx.apply_updates(other, updates)
    assert_near(other, model, 1e-10)
    assert_near(kfac.averaged(other, opt_state), kfac.averaged(model, state), 1e-10)


def test_what_it_cannot_be():
    rule = kfac.QuadraticModel()
    with raises(ValueError, "`kfac.ScheduleFree` deals out", "Give numbers"):
        kfac.KFAC(rule, rule, averaging=kfac.ScheduleFree())
    with raises(ValueError, "`decay` must be in [0, 1]"):
        kfac.ScheduleFree(1.5)
    with raises(TypeError, "`decay` must be a number or a schedule"):
        kfac.ScheduleFree(kfac.Window)
    with raises(TypeError, "`averaging` must be a number"):
        kfac.KFAC(averaging=kfac.ScheduleFree)
