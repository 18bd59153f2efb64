"""What `KFAC()` stands for: a trust region, a growing window, periods, short at first."""

import dataclasses
import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._optimizer._extent import init_extent

from .helpers import leaves, make_mesh, normal, velocity_of, with_velocity
from .plain import AsMatrices, plain_kfac


N, D, K = 6, 4, 3
X, Y = normal(N, D, seed=0), normal(N, K, seed=1)
KEY = jax.random.key(0)
EXACT = kfac.Exact()


@ft.cache
@eqx.filter_jit
def make_model(width=5, depth=1):
    return kfac.convert(eqx.nn.MLP(D, K, width, depth, activation=jnp.tanh, key=KEY))


@ft.cache
def loss_of(scale):
    """A loss whose gradient is large against any of these constraints."""

    def loss_fn(model, x, y):
        return scale * kfac.SquaredError(jax.vmap(model)(x), y)

    return loss_fn


def same(a, b):
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(np.allclose(p, q, rtol=1e-10, atol=1e-13) for p, q in pairs)


@eqx.filter_jit
def stepped(optimizer, loss_fn, model, state, **kwargs):
    """One program for all optimizers of which only arrays differ."""
    return optimizer.step(loss_fn, model, state, X, Y, **kwargs)


def from_the_start(constraint):
    """An optimizer, the model, and the state."""
    optimizer = plain_kfac(10.0, norm_constraint=constraint, fisher=EXACT)
    return optimizer, make_model(), optimizer.init(make_model())


def one_step(region, **kwargs):
    optimizer, *start = from_the_start(region)
    return stepped(optimizer, loss_of(1.0), *start, **kwargs)


@eqx.filter_jit
def scaled_step(optimizer, model, state, scale):
    def loss_fn(model, x, y):
        return scale * kfac.SquaredError(jax.vmap(model)(x), y)

    return optimizer.step(loss_fn, model, state, X, Y)[0]


@ft.cache
def loss_at_the_start():
    y = jax.jit(jax.vmap(make_model()))(X)
    return 0.5 * np.sum((np.asarray(y) - np.asarray(Y)) ** 2) / N


@pytest.mark.parametrize("scale", [0.01, 1e3])
@pytest.mark.parametrize("share", [np.inf, 5e-3, 1e-4])
@pytest.mark.parametrize("terms", [1, N - 2, N, 4 * N])
def test_a_trust_region_is_a_norm_constraint(scale, share, terms):
    loss = scale * loss_at_the_start()
    size = 1e-3
    part = share * np.clip(N / terms, 1, 2)
    constraint = min(size, part * loss) * min(1, N / terms)
    assert (constraint < size) == ((scale < 1 and share < 1) or terms > N)
    others = "velocity_factor", "measured_fraction", "promised_fraction", "large_loss"
    free = dict.fromkeys(others, jnp.inf)
    region = kfac.TrustRegion(size, share, terms, **free)
    optimizer, *start = from_the_start(jtu.tree_map(jnp.asarray, region))
    got = scaled_step(optimizer, *start, jnp.asarray(scale))
    optimizer, model, state = from_the_start(1.0)

    def constrained(number):
        own = eqx.tree_at(lambda s: s.norm_constraint, state, jnp.asarray(number))
        return scaled_step(optimizer, model, own, jnp.asarray(scale))

    assert same(got, constrained(constraint))
    assert not same(got, constrained(2 * constraint))


class Plain(kfac.SquaredError):
    """A squared error that does not say so."""

    sum_of_squares = False


SQUARES = {
    "squares": (lambda y, t: 1e3 * kfac.SquaredError(y, t), True),
    "and others": (lambda y, t: kfac.SquaredError(y, t) + 1e3 * Plain(y, t), False),
    "not alone": (lambda y, t: 1e3 * kfac.SquaredError(y, t) + jnp.mean(y**2), False),
    "no squares": (lambda y, t: 1e3 * Plain(y, t), False),
}


@pytest.mark.parametrize("large, grows", [(50.0, True), (1e6, False), (np.inf, False)])
@pytest.mark.parametrize("name", SQUARES)
def test_a_large_squared_error_has_a_larger_region(name, large, grows):
    """By 6 % at the first step, and at most by that at every later one."""
    make, is_square = SQUARES[name]

    def loss_fn(model, x, y):
        return make(jax.vmap(model)(x), y)

    def stepped_by(constraint):
        optimizer, *start = from_the_start(constraint)
        return stepped(optimizer, loss_fn, *start)

    grows = grows and is_square
    only = dict(full_terms=1, velocity_factor=jnp.inf)
    got, state, _ = stepped_by(kfac.TrustRegion(1e-3, **only, large_loss=large))
    assert state.extent.growth == (1.06 if grows else 1.0)
    assert same(got, stepped_by(1.06e-3 if grows else 1e-3)[0])
    assert not same(got, stepped_by(1e-3 if grows else 1.06e-3)[0])


def test_how_a_region_grows():
    region = kfac.TrustRegion(large_loss=300.0)
    before = jnp.asarray([1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    values = jnp.asarray([315.0, 1e9, 1e9, 900.0, 299.0, -1e9, jnp.nan, jnp.inf])
    got = jax.vmap(lambda g, h: region.growth(g, h, 100))(before, values)
    np.testing.assert_allclose(
        got, [1.05, 1.06, 4.24, 3.0, 1.0, 1.0, 1.0, 4.24], rtol=1e-12
    )


@pytest.mark.parametrize("outputs, growth", [(100, 1.06), (500, 1.0)])
def test_a_loss_is_large_if_that_of_each_output_is(outputs, growth):
    """1,000 nats are large for a hundred outputs, and not for five hundred."""

    def loss_fn(model, x, y):
        out = jax.vmap(model)(x)
        wide = jnp.repeat(out[:, :1], outputs // 2, axis=1)
        return kfac.SquaredError(wide, y) + kfac.SquaredError(wide, y)

    y = np.full((N, outputs // 2), np.sqrt(2000 / outputs))
    model, optimizer = make_model(), kfac.KFAC(fisher=EXACT)
    step = eqx.filter_jit(optimizer.step)
    _, state, info = step(loss_fn, model, optimizer.init(model), X, y)
    assert 800 < info.loss < 1400 and state.extent.growth == growth


def test_a_batch_that_is_unlike_all_others_does_not_enlarge_the_region():
    model, optimizer = make_model(), kfac.KFAC()

    @eqx.filter_jit
    def step(model, state, y):
        return optimizer.step(
            loss_of(1.0), model, state, X, y, key=jax.random.fold_in(KEY, state.step)
        )

    state = optimizer.init(model)
    for factor in (1.0, 1.0, 1e3, 1.0):
        model, state, info = step(model, state, factor * Y)
        assert not info.rejected and state.extent.growth == 1
        assert (info.loss > 300) == (factor > 1)


def test_terms_of_micro_batches_and_of_several_losses():
    region = kfac.TrustRegion(1e-3, full_terms=100)
    whole, _, _ = one_step(region)
    parts, _, _ = one_step(region, micro_batches=3)
    assert same(whole, parts)

    def several(model, x, y):
        out = jax.vmap(model)(x)
        return kfac.SquaredError(out, y) + kfac.SquaredError(out[:2], y[:2])

    model = make_model()
    results = []
    for constraint in (region, kfac.TrustRegion(1e-3 * N / 100, full_terms=1)):
        optimizer = plain_kfac(10.0, norm_constraint=constraint, fisher=EXACT)
        state = optimizer.init(model)
        results.append(stepped(optimizer, several, model, state)[0])
    assert same(*results)


def test_terms_over_devices():
    """Each of two devices has half of the examples, but all count."""
    mesh = make_mesh((2,))
    region = kfac.TrustRegion(1e-3, full_terms=100)
    numbers = dict(curvature_period=1, averaging=None)
    optimizer = kfac.KFAC(
        10.0, 0.9, 1e-3, norm_constraint=region, fisher=EXACT, **numbers
    )
    params, static = eqx.partition(make_model(), eqx.is_array)

    def local(params, x, y):
        model = eqx.combine(params, static)
        state = optimizer.init(model)
        new, _, _ = optimizer.step(loss_of(1.0), model, state, x, y)
        return eqx.filter(new, eqx.is_array)

    specs = dict(in_specs=(jax.P(), jax.P("batch"), jax.P("batch")), out_specs=jax.P())
    new = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(params, X, Y)
    assert same(new, one_step(region)[0])


def test_the_size_may_be_changed():
    optimizer = plain_kfac(10.0, norm_constraint=kfac.TrustRegion(1e-3), fisher=EXACT)
    model = make_model()
    state = optimizer.init(model)
    larger = eqx.tree_at(lambda s: s.norm_constraint, state, jnp.asarray(4e-3))
    updates = []
    for own in (state, larger):
        new, _, _ = stepped(optimizer, loss_of(10.0), model, own)
        updates.append(jtu.tree_map(np.subtract, leaves(new), leaves(model)))
    assert same(jtu.tree_map(lambda u: 2 * u, updates[0]), updates[1])


def extents(velocity, steps=8):
    """Of a linear model, whose curvature stays what it is: what the state says of the
    velocity's length, and what it is."""
    region = kfac.TrustRegion(1e-3, full_terms=1, velocity_factor=velocity)
    choices = dict(fisher=EXACT, solver=kfac.Eigh(), norm_constraint=region)
    optimizer = plain_kfac(0.1, damping=0.1, **choices)
    model = kfac.Linear(D, K, key=KEY)
    state = optimizer.init(model)

    @eqx.filter_jit
    def step(model, state):
        model, state, info = optimizer.step(loss_of(10.0), model, state, X, Y)
        operator = kfac.analysis.BlockDiagonalOperator(state.curvature, model)
        velocity = velocity_of(state, model)
        pairs = zip(leaves(velocity), leaves(operator.mv(velocity)), strict=True)
        true = sum(jnp.sum(v * (p + 0.1 * v)) for v, p in pairs)
        return model, state, info, true

    said, true = [], []
    for _ in range(steps):
        model, state, info, extent = step(model, state)
        true.append(extent)
        said.append(state.extent.squared_length)
        assert info.momentum == 0.9 and info.learning_rate == 0.1  # As they were given.
    return np.array(said), np.array(true), float(info.loss)


def test_the_velocity_is_bounded():
    said, true, loss = extents(jnp.inf)
    assert loss > 1
    np.testing.assert_allclose(said, true, rtol=1e-10)
    assert np.all(np.diff(said) > 0) and said[-1] > 2e-2 and said[0] <= 1.001e-3
    bounded, true, _ = extents(8.0)
    np.testing.assert_allclose(bounded, true, rtol=1e-10)
    free = said < 8e-3
    np.testing.assert_allclose(bounded[free], said[free], rtol=1e-10)
    np.testing.assert_allclose(bounded[~free], 8e-3, rtol=1e-10)
    assert 0 < free.sum() < len(free)


@jax.jit
def damped_product(curvature, model, a, b):
    product = kfac.analysis.BlockDiagonalOperator(curvature, model).mv(b)
    damped = zip(leaves(a), leaves(product), leaves(b), strict=True)
    return sum(jnp.sum(u * (p + 0.1 * v)) for u, p, v in damped)


def moving_uphill(cosine, fraction):
    """An optimizer, a linear model, the state after one step, and the same state with a
    velocity as long as the natural gradient step, but uphill, with this cosine between
    it and the natural gradient."""
    region = kfac.TrustRegion(
        1e-3,
        full_terms=1,
        velocity_factor=1e6,
        measured_fraction=jnp.inf,
        promised_fraction=jnp.inf,
        uphill_fraction=fraction,
    )
    choices = dict(fisher=EXACT, solver=kfac.Eigh(), norm_constraint=region)
    optimizer = plain_kfac(0.1, damping=0.1, **choices)
    model = kfac.Linear(D, K, key=KEY)
    _, state, _ = stepped(optimizer, loss_of(1.0), model, optimizer.init(model))
    product = ft.partial(damped_product, state.curvature, model)

    # A multiple of the natural gradient, and something at right angles to it.
    uphill = jtu.tree_map(np.negative, velocity_of(state, model))
    other = jtu.tree_map(np.cos, uphill)
    part = product(other, uphill) / product(uphill, uphill)
    aside = jtu.tree_map(lambda o, u: o - part * u, other, uphill)
    aside_length = np.sqrt(product(uphill, uphill) / product(aside, aside))
    sine = aside_length * np.sqrt(1 - cosine**2)
    velocity = jtu.tree_map(lambda u, a: cosine * u + sine * a, uphill, aside)
    extent = product(velocity, velocity)
    lasting = dataclasses.replace(state.extent, squared_length=extent)
    moving = with_velocity(state, velocity)._replace(extent=lasting)
    return optimizer, model, state, moving


@pytest.mark.parametrize("before", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("cosine", [-0.4, 0.3, 0.75])
def test_a_velocity_that_keeps_leading_uphill_is_slowed_down(cosine, before):
    """The part of the loss by which it does is averaged over steps, with zero where the
    cosine is clear: of the momentum, as much is kept as 0.1 is of that."""
    optimizer, model, state, moving = moving_uphill(cosine, 0.1)
    moving = eqx.tree_at(lambda s: s.extent.uphill, moving, jnp.asarray(before))
    _, after, info = stepped(optimizer, loss_of(1.0), model, moving)
    gradient = eqx.filter_grad(lambda m: loss_of(1.0)(m, X, Y).value)(model)
    pairs = zip(leaves(velocity_of(moving, model)), leaves(gradient), strict=True)
    slope = sum(np.sum(v * g) for v, g in pairs)
    assert np.sign(slope) == np.sign(cosine)
    part = 0.0 if cosine > 0.5 else slope / info.loss
    average = 0.8 * before + 0.2 * part
    np.testing.assert_allclose(after.extent.uphill, average, rtol=1e-9)
    kept = min(1.0, 2 - 2 * cosine) * min(1.0, 0.1 / max(average, 1e-9))
    want = jtu.tree_map(lambda v, n: 0.9 * kept * v + n, moving.velocity, state.velocity)
    assert same(after.velocity, want)
    assert (average > 0.1) == (before > 0.2)


def test_by_how_much_a_velocity_leads_uphill():
    extent = dataclasses.replace(init_extent(), uphill=jnp.asarray(0.5))
    given = lambda *numbers: extent.uphill_given(*map(jnp.asarray, numbers))
    for slope, value, part in [
        (0.1, 0.5, 0.2),
        (0.1, -0.5, 0.2),
        (-0.1, 0.5, -0.2),
        (3.0, 0.5, 1.0),
        (-3.0, 0.5, -1.0),
        (0.1, 0.0, 0.0),  # A loss of zero says nothing of what is much.
        (0.1, np.inf, 0.0),
        (np.nan, 0.5, 0.5),
        (np.inf, 0.5, 0.5),
        (0.1, np.nan, 0.5),
    ]:
        np.testing.assert_allclose(given(slope, value), 0.4 + 0.2 * part)


@pytest.mark.parametrize("cosine", [-1.0, 0.3, 0.75, 1.0])
def test_a_velocity_that_leads_uphill_is_slowed_down(cosine):
    """All of it is kept up to a cosine of one half between it and the natural gradient,
    in the metric of the curvature; nothing of what leads straight uphill."""
    optimizer, model, state, moving = moving_uphill(cosine, jnp.inf)
    step = ft.partial(stepped, optimizer, loss_of(1.0), model)
    product = ft.partial(damped_product, state.curvature, model)
    uphill = jtu.tree_map(np.negative, velocity_of(state, model))
    velocity = velocity_of(moving, model)
    lasting, extent = moving.extent, moving.extent.squared_length
    _, after, _ = step(moving)
    kept = min(1.0, 2 - 2 * cosine)
    want = jtu.tree_map(lambda v, u: 0.9 * kept * v - u, velocity, uphill)
    assert same(velocity_of(after, model), want)
    length = after.extent.squared_length
    np.testing.assert_allclose(length, product(want, want), rtol=1e-9)
    # A length that is too short to be true, for the curvature has changed since.
    lasting = dataclasses.replace(lasting, squared_length=jnp.asarray(1e-6 * extent))
    shorter = moving._replace(extent=lasting)
    _, after, _ = step(shorter)
    if cosine > 0:
        assert same(after.velocity, state.velocity)
    if cosine == -1:  # There, the inequality of Cauchy and Schwarz is an equation.
        length = after.extent.squared_length
        np.testing.assert_allclose(length, product(want, want), rtol=1e-9)
    free = plain_kfac(
        0.1, damping=0.1, fisher=EXACT, solver=kfac.Eigh(), norm_constraint=1e-3
    )
    start = with_velocity(free.init(model), velocity)
    start = start._replace(curvature=state.curvature, weight=state.weight)
    _, after, _ = stepped(free, loss_of(1.0), model, start)
    want = jtu.tree_map(lambda v, u: 0.9 * v - u, velocity, uphill)
    assert same(velocity_of(after, model), want)  # Without a trust region, all of it is.


def test_the_velocity_of_a_step_uphill_is_forgotten():
    bounds = dict(velocity_factor=jnp.inf, measured_fraction=jnp.inf)
    region = kfac.TrustRegion(1.0, full_terms=1, **bounds)
    optimizer = plain_kfac(0.1, norm_constraint=region, fisher=EXACT, max_increase=0.0)
    model = make_model()
    state = optimizer.init(model)
    _, state, _ = stepped(optimizer, loss_of(1.0), model, state)
    assert state.extent.squared_length > 0
    away = jtu.tree_map(lambda v: 1e4 * np.asarray(v), state.velocity)
    moving = state._replace(velocity=away)
    _, state, info = stepped(optimizer, loss_of(1.0), model, moving)
    assert info.faults.increase and state.extent.squared_length == 0
    assert state.extent.descent == 0


class AddedUp(eqx.Module):
    """Layers of the same input whose outputs are added, as to a residual stream."""

    layers: list

    def __init__(self, number):
        keys = jax.random.split(KEY, number)
        self.layers = [kfac.Linear(D, K, key=key) for key in keys]

    def __call__(self, x):
        return sum(layer(x) for layer in self.layers)


def nothing_but(measured=jnp.inf, promised=jnp.inf, lasting=1.0):
    """A trust region whose other bounds are never reached."""
    free = dict(loss_fraction=jnp.inf, velocity_factor=jnp.inf, full_terms=1)
    given = dict(measured_fraction=measured, lasting_factor=lasting)
    given |= dict(promised_fraction=promised)
    return kfac.TrustRegion(1e6, **free, **given)


def couplings(number, measured=jnp.inf, steps=6):
    """Of steps that are all of one batch: what the state says of the velocity, and the
    loss before each, and the velocity's slope there."""
    region = nothing_but(measured)
    choices = dict(fisher=EXACT, solver=kfac.Eigh(), norm_constraint=region)
    optimizer = plain_kfac(0.1, damping=1e-9, **choices)
    model = AddedUp(number)
    state = optimizer.init(model)
    found, values, slopes = [], [], []
    for _ in range(steps):
        before = eqx.filter_grad(lambda m: loss_of(10.0)(m, X, Y).value)(model)
        model, state, info = stepped(optimizer, loss_of(10.0), model, state)
        found.append(jtu.tree_map(float, state.extent))
        values.append(float(info.loss))
        pairs = zip(leaves(velocity_of(state, model)), leaves(before), strict=True)
        slopes.append(float(sum(jnp.sum(v * g) for v, g in pairs)))
    return found, values, slopes


@pytest.mark.parametrize("fraction", [jnp.inf, 0.2, 0.1])
@pytest.mark.parametrize("number", [1, 3])
def test_gradients_measure_what_blocks_do_not_know(number, fraction):
    """Each of some layers that are added up does the same: a step of all of them is as
    many times as long as blocks say. The loss is quadratic, the batch always the same:
    gradients say so exactly, but for the slope of what is new in a step. A step that is
    shortened is measured like any other."""
    found, _, slopes = couplings(number, fraction, steps=12)
    want, new, most = 1.0, [], 1.0
    for before, slope, extent in zip(found, slopes, found[1:]):
        new.append((before.slope - slope) / before.squared_length)
        want = (want + max(1.0, number - new[-1])) / 2
        np.testing.assert_allclose(extent.coupling, want, rtol=1e-5)
        most = max(most, want)
    assert found[0].coupling == 1
    assert min(new) > 0 and (most > 1.5) == (number > 1)


def test_the_measured_length_is_bounded():
    length = lambda extent: extent.coupling * extent.squared_length
    free, _, _ = couplings(3, jnp.inf)
    for fraction in (0.2, 0.1):
        found, losses, _ = couplings(3, fraction)
        lengths = np.array([length(e) for e in found]) / (fraction * np.array(losses))
        assert np.all(lengths <= 1 + 1e-9)
        assert 0 < np.sum(lengths > 1 - 1e-9) < len(lengths)
    assert max(map(length, free)) > 2 * max(map(length, found))


def test_the_bound_of_a_measured_length():
    region = kfac.TrustRegion(measured_fraction=0.5)
    values = jnp.asarray([0.1, -0.1, 4.0, -20.0])
    got = jax.vmap(region.of_measured)(values)
    np.testing.assert_allclose(got, [0.05, 0.05, 2.0, 10.0])
    free = kfac.TrustRegion(measured_fraction=jnp.inf)
    assert jnp.isinf(free.of_measured(values[0]))


def batches(repeated):
    """Inputs and targets; the same at every step, or new noise."""
    for t in range(30):
        yield (
            (X, Y) if repeated else (normal(N, D, seed=t), 3 * normal(N, K, seed=99 + t))
        )


@pytest.mark.parametrize("repeated", [True, False])
def test_how_much_of_a_descent_lasts(repeated):
    """What steps promise their own batches is compared with what losses fall by. With one
    batch, all of it lasts, and the measured length may become four times as large a part
    of the loss; with batches of noise, nothing lasts."""
    region = nothing_but(0.01, lasting=4.0)
    choices = dict(fisher=EXACT, solver=kfac.Eigh(), norm_constraint=region)
    optimizer = plain_kfac(0.1, damping=1e-2, **choices)
    model, loss_fn = AddedUp(2), loss_of(1.0)
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m, x, y: loss_fn(m, x, y).value))
    fallen, square, promised, before, promise = 0.0, 0.0, 1.0, None, 0.0
    widenings, parts = [], []
    for x, y in batches(repeated):
        slopes = gradient(model, x, y)
        model, state, info = step(loss_fn, model, state, x, y)
        loss = float(info.loss)
        if before is not None:
            fall = (before - loss) / max(before, loss)
            fallen = 0.9 * fallen + 0.1 * fall
            square = 0.9 * square + 0.1 * fall**2
            promised = 0.9 * promised + 0.1 * min(max(promise / before, 0), 1)
        extent = jtu.tree_map(float, state.extent)
        np.testing.assert_allclose(extent.fallen, fallen, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(extent.fallen_square, square, rtol=1e-9)
        np.testing.assert_allclose(extent.promised, promised, rtol=1e-9)
        lasting = (fallen - 2 * np.sqrt((square - fallen**2) / 19)) / promised
        np.testing.assert_allclose(state.extent.lasting, lasting, rtol=1e-9, atol=1e-12)
        pairs = zip(leaves(velocity_of(state, model)), leaves(slopes), strict=True)
        promise = -float(sum(jnp.sum(v * g) for v, g in pairs))
        promise -= 0.5 * extent.squared_length
        part = min(max((lasting - 0.2) / 0.3, 0), 1)
        widenings.append(1 + 3 * part)
        length = extent.coupling * extent.squared_length
        parts.append(length / (0.01 * widenings[-1] * loss))
        before = loss
    assert max(parts) <= 1 + 1e-9 and sum(p > 1 - 1e-9 for p in parts) >= 2
    assert (max(widenings) > 2) if repeated else (max(widenings) == 1)


def test_by_how_much_the_loss_counts_more_where_descent_lasts():
    region = kfac.TrustRegion(lasting_factor=7.0)
    lasting = jnp.asarray([-3.0, 0.2, 0.35, 0.5, 9.0])
    np.testing.assert_allclose(jax.vmap(region.widening)(lasting), [1, 1, 4, 7, 7])
    assert kfac.TrustRegion(lasting_factor=1).widening(lasting[-1]) == 1
    with pytest.raises(ValueError, match="lasting_factor.*at least 1"):
        kfac.TrustRegion(lasting_factor=0.5)


def test_what_is_told_by_two_losses():
    given = dict(fallen=0.4, fallen_square=0.3, promised=0.5)
    given |= dict(descent=0.3, squared_length=0.2)
    extent = dataclasses.replace(
        init_extent(), **{name: jnp.asarray(value) for name, value in given.items()}
    )
    averages = operator.attrgetter("fallen", "fallen_square", "promised")
    for before, value, fall, promise in [
        (1.0, 0.5, 0.5, 0.2),  # Of the averages, a tenth is new.
        (0.5, 1.0, -0.5, 0.4),
        (-0.5, -1.0, 0.5, 0.4),  # Of densities.
        (0.1, -0.1, 2.0, 1.0),
        (0.5, 0.0, 1.0, 0.4),
    ]:
        got = averages(extent.between(jnp.asarray(before), jnp.asarray(value)))
        new = np.array([fall, fall**2, promise])
        want = 0.9 * np.array([0.4, 0.3, 0.5]) + 0.1 * new
        np.testing.assert_allclose(got, want, err_msg=f"{before}, {value}")
    overflown = dataclasses.replace(extent, descent=jnp.asarray(jnp.inf))
    for extent, before, value in [
        (extent, 0.0, 0.5),  # There has been no loss before.
        (extent, jnp.inf, 0.5),
        (extent, 0.5, jnp.nan),
        (overflown, 1.0, 0.5),
    ]:
        got = averages(extent.between(jnp.asarray(before), jnp.asarray(value)))
        np.testing.assert_allclose(got, (0.4, 0.3, 0.5))


@pytest.mark.parametrize("rate, noise", [(0.3, 0.0), (0.0, 0.0), (0.1, 1.5)])
def test_a_fall_within_the_noise_of_losses_does_not_last(rate, noise):
    """Losses of small batches vary by orders of magnitude, and more than they fall."""
    falls = np.random.default_rng(0).normal(size=400) * noise
    losses = np.exp(-rate * np.arange(400) + falls)
    found, extent = [], init_extent()
    for before, value in zip(losses, losses[1:]):
        extent = dataclasses.replace(extent, descent=jnp.asarray(0.5 * before))
        extent = extent.between(jnp.asarray(before), jnp.asarray(value))
        found.append(float(extent.lasting))
    if noise == 0:
        np.testing.assert_allclose(found[-1], (1 - np.exp(-rate)) / 0.5, atol=1e-7)
    else:
        assert max(found) < 0.2 and extent.fallen_square > 0.1


def test_all_data_in_every_batch_are_fitted_sooner():
    x = normal(64, D, seed=2)
    y = np.argmax(np.sin(x[:, :3] + x[:, 1:]), 1)

    def loss_fn(model, x, y):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)

    params, static = eqx.partition(make_model(32, 2), eqx.is_array)

    @eqx.filter_jit
    def train(factor):
        optimizer = kfac.KFAC(norm_constraint=kfac.TrustRegion(lasting_factor=factor))

        def body(carry, key):
            model = eqx.combine(carry[0], static)
            model, state, info = optimizer.step(loss_fn, model, carry[1], x, y, key=key)
            return (eqx.filter(model, eqx.is_array), state), info.loss

        start = params, optimizer.init(eqx.combine(params, static))
        return jax.lax.scan(body, start, jax.random.split(KEY, 60))[1]

    narrow, wide = map(np.asarray, (train(1.0), train(10.0)))
    assert np.all(np.diff(wide[20:]) < 0) and wide[-1] < 0.5 * narrow[-1]


def test_what_is_kept_of_a_momentum_that_leads_uphill():
    uphill = jnp.asarray([-1.0, 0.0, 0.05, 0.3])
    region = kfac.TrustRegion(uphill_fraction=0.15, measured_fraction=1e-3)
    np.testing.assert_allclose(jax.vmap(region.kept)(uphill), [1, 1, 1, 0.5])
    assert kfac.TrustRegion(uphill_fraction=jnp.inf).kept(uphill[-1]) == 1


@pytest.mark.parametrize("large, learnt", [(300.0, True), (jnp.inf, False)])
def test_targets_in_any_unit(large, learnt):
    """Temperatures in kelvins, or prices."""
    x, y = normal(128, D, seed=2), 1e4 * np.sin(normal(128, D, seed=2)[:, :1])

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y)

    optimizer = kfac.KFAC(norm_constraint=kfac.TrustRegion(large_loss=large))
    model = kfac.convert(eqx.nn.MLP(D, 1, 16, 1, jnp.tanh, key=KEY))
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    for t in range(250):
        model, state, info = step(loss_fn, model, state, x, y, key=jax.random.key(t))
    part = float(info.loss) / (0.5 * np.mean(y**2))
    assert part < 0.3 if learnt else part > 0.9


def test_a_length_that_overflows_is_forgotten():
    """Otherwise, zero times infinity would be the length of a velocity of zero, and no
    step would be taken any more."""
    optimizer = kfac.KFAC()
    step = ft.partial(stepped, optimizer, loss_of(1.0))
    model, state, _ = step(make_model(), optimizer.init(make_model()), key=KEY)
    huge = jtu.tree_map(lambda v: 1e200 * v, state.velocity)
    state = state._replace(velocity=huge)
    rejected = []
    for t in range(8):
        model, state, info = step(model, state, key=jax.random.fold_in(KEY, t))
        rejected.append(bool(info.rejected))
        assert all(map(jnp.isfinite, leaves(state.extent)))
    assert not any(rejected[2:]) and state.extent.squared_length > 0


class Unnatural(kfac.SquaredError):
    natural = False


@pytest.mark.parametrize(
    "terms, bounded",
    [
        ([kfac.SquaredError], True),
        ([Unnatural], False),
        ([kfac.SquaredError, Unnatural], False),
    ],
)
def test_a_length_is_bounded_as_measured_if_outputs_are_natural(terms, bounded):
    """Gradients measure the Hessian, which is the Fisher only there."""

    def loss_fn(model, x, y):
        return sum(10 * term(jax.vmap(model)(x), y) for term in terms)

    model, after = AddedUp(3), {}
    for fraction in (1e-3, 1e9):
        region = nothing_but(fraction)
        optimizer = plain_kfac(0.1, norm_constraint=region, fisher=EXACT)
        carry = model, optimizer.init(model)
        for _ in range(5):
            *carry, _ = stepped(optimizer, loss_fn, *carry)
        after[fraction] = carry[0]
    assert same(after[1e-3], after[1e9]) is not bounded


@pytest.mark.parametrize("slope", [np.inf, np.nan, 1e300])
def test_nothing_is_learnt_from_numbers_that_overflow(slope):
    extent = kfac.KFAC().init(make_model()).extent
    moving = dataclasses.replace(extent, squared_length=jnp.asarray(1e-30))
    assert moving.coupling_given(jnp.asarray(slope)) == 1
    assert extent.coupling_given(jnp.asarray(1.0)) == 1  # There was no velocity.
    assert moving.coupling_given(jnp.asarray(-1.0)) == 1
    np.testing.assert_allclose(moving.coupling_given(jnp.asarray(3e-30)), 2.0)


def test_a_window_averages_the_last_part():
    optimizer = plain_kfac(0.1, averaging=kfac.Window(0.5), fisher=EXACT)
    model = make_model()
    state = optimizer.init(model)
    mean, weight = None, 0.0
    for t in range(12):
        model, state, _ = stepped(optimizer, loss_of(1.0), model, state)
        decay = 0.5 * t / (1 + 0.5 * t)
        weight = decay * weight + 1
        arrays = list(map(np.asarray, leaves(model)))
        if mean is None:
            mean = arrays
        mean = [m + (a - m) / weight for m, a in zip(mean, arrays, strict=True)]
    assert same(kfac.averaged(model, state), mean)
    assert not same(model, mean)
    assert 0.5 * 12 / 2 < weight < 0.5 * 12


def test_periods_begin_short():
    optimizer = kfac.KFAC(1e-3, fisher=EXACT)
    model = make_model()
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.step)
    estimated, factorised = [], []
    for t in range(52):
        x = np.asarray(X) + 0.01 * t  # Another curvature at every step.
        model, new, _ = step(loss_of(1.0), model, state, x, Y)
        if not same(new.curvature, state.curvature):
            estimated.append(t)
        if not same(new.inverse, state.inverse):
            factorised.append(t)
        state = new
    first = [0, 1, 2, 3, 4, 6, 8]
    assert estimated == [*first, 10, 12, 16, 20, 30, 40, 50]
    assert factorised == [*first, 12, 16, 24, 32, 48, 50]


def test_periods_that_are_given_do_not():
    optimizer = kfac.KFAC(1e-3, fisher=EXACT, curvature_period=3, inverse_period=4)
    model = make_model()
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.step)
    estimated, factorised = [], []
    for t in range(10):
        model, new, _ = step(loss_of(1.0), model, state, np.asarray(X) + 0.01 * t, Y)
        if not same(new.curvature, state.curvature):
            estimated.append(t)
        if not same(new.inverse, state.inverse):
            factorised.append(t)
        state = new
    assert estimated == [0, 3, 6, 9] and factorised == [0, 4, 8]


def test_what_auto_stands_for():
    chosen = kfac.KFAC()
    assert isinstance(chosen.norm_constraint, kfac.TrustRegion)
    assert isinstance(chosen.averaging, kfac.Window)
    assert isinstance(chosen.damping, kfac.LayerDamping)
    assert (chosen.curvature_period, chosen.inverse_period) == (10, 50)
    assert chosen.solver == kfac.Cholesky(scaled_bias=True)
    assert kfac.KFAC(damping=0.1).solver == kfac.Cholesky()
    assert kfac.KFAC(solver=kfac.Eigh()).solver == kfac.Eigh()
    quadratic = kfac.QuadraticModel()
    rules = (quadratic, quadratic, 1.0), (0.1, 0.9, kfac.LevenbergMarquardt(1.0))
    for lengths in rules:
        ruled = kfac.KFAC(*lengths)
        assert ruled.norm_constraint is None and ruled.averaging is None
        assert not isinstance(ruled.damping, kfac.LayerDamping)
        assert ruled.solver == kfac.Cholesky()
        assert (ruled.curvature_period, ruled.inverse_period) == (1, 5)
    with pytest.raises(TypeError, match="`averaging` must be a number"):
        kfac.KFAC(averaging="often")


def test_rows_are_used_where_they_can_be():
    model = make_model(40, 2)  # Wider than the batch.
    results = []
    for by_rows in (True, False):
        optimizer = (kfac.KFAC if by_rows else AsMatrices)(fisher=EXACT)
        state = optimizer.init(model)
        new, _, info = stepped(optimizer, loss_of(1.0), model, state)
        assert info.through_rows is None or bool(info.through_rows)
        assert (info.through_rows is None) == (not by_rows)
        results.append(new)
    assert same(results[0], results[1])
    optimizer = kfac.KFAC(fisher=EXACT)
    state = optimizer.init(model)
    assert optimizer._by_rows
    new, _, info = stepped(optimizer, loss_of(1.0), model, state, micro_batches=2)
    assert info.through_rows is None and same(new, results[0])


def test_update_is_the_same_step():
    region = kfac.TrustRegion(full_terms=N, measured_fraction=jnp.inf)
    optimizer = kfac.KFAC(10.0, fisher=EXACT, norm_constraint=region)
    model = make_model()
    state = optimizer.init(model)
    want, _, _ = stepped(optimizer, loss_of(1e-2), model, state)
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(loss_of(1e-2), EXACT))
    value, grads, curvature = estimate(model, X, Y)
    given = dict(curvature=curvature, value=value)
    updates, new = eqx.filter_jit(optimizer.update)(grads, state, model, **given)
    assert same(eqx.filter_jit(eqx.apply_updates)(model, updates), want)
    assert same(kfac.averaged(model, new), want)
    with pytest.raises(ValueError, match="needs the `value`"):
        optimizer.update(grads, state, model, curvature=curvature)
    with pytest.raises(ValueError, match="needs the `model`"):
        optimizer.update(grads, state, None, **given)


@pytest.mark.parametrize(
    "name",
    [
        "squared_radius",
        "full_terms",
        "measured_fraction",
        "uphill_fraction",
        "promised_fraction",
        "large_loss",
    ],
)
def test_numbers_out_of_range(name):
    with pytest.raises(ValueError, match=name):
        kfac.TrustRegion(**{name: 0})
    with pytest.raises(ValueError, match="`fraction`"):
        kfac.Window(0.0)
    with pytest.raises(TypeError, match="learning_rate"):
        kfac.KFAC(kfac.TrustRegion())


def test_a_network_that_fits_its_data():
    """Where the Fisher vanishes, the loss goes on falling."""
    y = jax.device_put(np.arange(N) % K)

    def loss_fn(model, x, y):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)

    optimizer = kfac.KFAC()
    model = make_model()
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.step)
    losses = []
    for t in range(400):
        key = jax.random.key(t)
        model, state, info = step(loss_fn, model, state, X, y, key=key)
        losses.append(float(info.loss))
    assert losses[-1] < 0.05 * losses[0]
    assert max(losses[100:]) < 1.1 * losses[100]
    assert state.rejected == 0


def promises(fraction, steps=12):
    """What steps without momentum promise their batch, as parts of the loss, and the
    losses."""
    region = nothing_but(promised=fraction)
    choices = dict(fisher=EXACT, solver=kfac.Eigh(), norm_constraint=region)
    optimizer = plain_kfac(0.3, 0.0, damping=1e-3, **choices)
    model = make_model()
    state = optimizer.init(model)
    parts, losses = [], []
    for _ in range(steps):
        slopes = eqx.filter_grad(lambda m: loss_of(10.0)(m, X, Y).value)(model)
        before = model
        model, state, info = stepped(optimizer, loss_of(10.0), model, state)
        three = zip(leaves(model), leaves(before), leaves(slopes), strict=True)
        descent = -float(sum(jnp.sum((new - old) * g) for new, old, g in three))
        losses.append(float(info.loss))
        parts.append(descent / losses[-1])
    return np.array(parts), np.array(losses)


def test_the_more_has_been_learnt_the_more_may_a_step_promise():
    parts, losses = promises(0.03)
    recent, bounds = losses[0], []
    for loss in losses:
        recent = recent if not bounds else 0.9 * recent + 0.1 * loss
        bounds.append(0.03 * max(1, losses[0] / recent) ** 6)
    bounds = np.array(bounds)
    assert np.all(parts <= bounds * (1 + 1e-9))
    reached = parts > bounds * (1 - 1e-9)
    assert reached[0] and reached[4] and bounds[4] > 1.1 * bounds[0]
    assert np.all(promises(jnp.inf)[0][:3] > 5 * 0.03)


def test_what_a_step_may_promise():
    learnt = jnp.asarray([1.0, 2.0, 1000.0])
    got = jax.vmap(kfac.TrustRegion(promised_fraction=0.5).of_promised)(learnt)
    np.testing.assert_allclose(got, [0.5, 32.0, 0.5e18])
    assert kfac.TrustRegion(promised_fraction=jnp.inf).of_promised(learnt[0]) == jnp.inf
    for first, recent, want in [
        (3.0, 2.0, 1.5),
        (2.0, 3.0, 1.0),  # It has not become any smaller,
        (3.0, 1e-9, 1000.0),
        (3.0, -1.0, 1000.0),  # and densities may be of any sign.
        (-1.0, -1.0, 1000.0),
        (0.0, 0.0, 1000.0),
    ]:
        numbers = dict(first_loss=jnp.asarray(first), recent_loss=jnp.asarray(recent))
        extent = dataclasses.replace(init_extent(), **numbers)
        np.testing.assert_allclose(extent.learnt, want)


@pytest.mark.parametrize("fraction", [0.03, jnp.inf])
def test_nothing_is_left_to_be_promised(fraction):
    """Any part of a loss of zero."""
    optimizer, model, state = from_the_start(kfac.TrustRegion(promised_fraction=fraction))
    model, state, _ = stepped(optimizer, loss_of(1.0), model, state)
    after, state, info = stepped(optimizer, loss_of(0.0), model, state)
    assert info.loss == 0 and not info.rejected
    assert all(map(np.all, map(np.isfinite, leaves(after))))


@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_loss_of_any_sign_may_promise(sign):
    """The logarithm of a density may be positive."""

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y) + offset

    offset = 0.0 if sign > 0 else -2 * loss_at_the_start()
    region = nothing_but(promised=1e-20 if sign < 0 else 0.03)
    optimizer, *start = from_the_start(region)
    _, state, info = stepped(optimizer, loss_fn, *start)
    assert info.loss * sign > 0 and state.extent.descent > 0
    part = state.extent.descent / abs(info.loss)
    np.testing.assert_allclose(part, 0.03 if sign > 0 else 1e-2, rtol=1e-6)


def test_the_first_and_the_last_losses():
    """What is zero or not finite at first is no first loss."""
    extent, found = init_extent(), []
    for loss in (0.0, jnp.nan, jnp.inf, 4.0, jnp.nan, 2.0, 0.0, 2.0):
        extent = extent.after(jnp.asarray(loss))
        found.append((float(extent.first_loss), float(extent.recent_loss)))
    want = [0, 0, 0, 4, 4, 3.8, 3.42, 3.278]
    np.testing.assert_allclose([recent for _, recent in found], want)
    assert [first for first, _ in found] == [0, 0, 0, 4, 4, 4, 4, 4]


class Recommender(eqx.Module):
    """Products of two embeddings: an example says little of many parameters."""

    users: eqx.nn.Embedding
    items: eqx.nn.Embedding

    def __init__(self, users, items, size):
        keys = jax.random.split(KEY)
        make = lambda n, key: eqx.nn.Embedding(weight=0.1 * jax.random.normal(key, n))
        self.users = make((users, size), keys[0])
        self.items = make((items, size), keys[1])

    def __call__(self, user, item):
        return jnp.sum(self.users(user) * self.items(item))[None]


def test_batches_that_say_little_of_many_parameters():
    """Unless steps promise less, their noise is larger than the loss."""
    params, static = eqx.partition(kfac.convert(Recommender(500, 250, 8)), eqx.is_array)
    tastes, traits = normal(500, 3, seed=4), normal(250, 3, seed=5)

    def loss_fn(model, users, items, liked):
        return kfac.SigmoidCrossEntropy(jax.vmap(model)(users, items), liked)

    @eqx.filter_jit
    def train(fraction):
        region = kfac.TrustRegion(promised_fraction=fraction)
        optimizer = kfac.KFAC(norm_constraint=region)

        def body(carry, key):
            model = eqx.combine(carry[0], static)
            keys = jax.random.split(key, 4)
            users = jax.random.randint(keys[0], (128,), 0, 500)
            items = jax.random.randint(keys[1], (128,), 0, 250)
            logits = jnp.sum(tastes[users] * traits[items], axis=1, keepdims=True)
            liked = jax.random.bernoulli(keys[2], jax.nn.sigmoid(logits)).astype(float)
            batch = users, items, liked
            model, state, info = optimizer.step(
                loss_fn, model, carry[1], *batch, key=keys[3]
            )
            return (eqx.filter(model, eqx.is_array), state), info.loss

        start = params, optimizer.init(eqx.combine(params, static))
        return jax.lax.scan(body, start, jax.random.split(KEY, 300))[1]

    bounded, free = map(np.asarray, (train(jnp.asarray(p)) for p in (0.03, jnp.inf)))
    np.testing.assert_allclose(bounded[0], np.log(2), rtol=0.05)
    assert np.mean(bounded[-50:]) < 0.66 and np.max(bounded) < 0.8
    assert np.mean(free[-50:]) > 0.8
