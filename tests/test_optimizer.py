"""The optimizer: `KFAC.init`, `KFAC.step`, `KFAC.update`."""

import functools as ft
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import (
    arrays,
    assert_same,
    normal,
    params_of,
    set_number,
    softmax,
    squared,
    stepped,
    velocity_of,
)
from .models import fresh_regressor, make_targets, regressor
from .plain import plain_kfac


solvers = [kfac.Cholesky(), kfac.Eigh()]


def vector(tree):
    """All inexact leaves in one vector."""
    return np.concatenate([a.ravel() for a in arrays(params_of(tree))])


def relative(got, want):
    got, want = vector(got), vector(want)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


#
# Transformations
#


def test_eager_jit_scan_donation_agree():
    optimizer = plain_kfac(
        0.1, 0.9, 1e-2, inverse_period=2, ema=kfac.MovingAverage(burn_in=1)
    )
    x, y = make_targets()
    keys = jr.split(jr.key(0), 2)
    model = kfac.Linear(3, 2, key=jr.key(1))
    state = optimizer.init(model)

    def fresh():
        return jtu.tree_map(lambda a: a.copy() if eqx.is_array(a) else a, (model, state))

    def run(step):
        carry, losses = fresh(), []
        for key in keys:
            *carry, loss = step(*carry, key)
            losses.append(loss)
        return *carry, jnp.stack(losses)

    def step(model, state, key):
        model, state, info = optimizer.step(squared, model, state, x, y, key=key)
        return model, state, info.loss

    @eqx.filter_jit
    def scan(model, state, keys):
        params, static = eqx.partition(model, eqx.is_array)

        def body(carry, key):
            model, state, loss = step(eqx.combine(carry[0], static), carry[1], key)
            return (eqx.filter(model, eqx.is_array), state), loss

        (params, state), losses = jax.lax.scan(body, (params, state), keys)
        return eqx.combine(params, static), state, losses

    @eqx.filter_jit(donate="all-except-first")
    def donating(key, model, state):
        return step(model, state, key)

    @eqx.filter_jit(donate="all")
    def donating_all(model, state):
        return step(model, state, keys[state.step])

    eager = run(step)
    assert_same(run(eqx.filter_jit(step)), eager, tolerance=1e-11)
    assert_same(scan(*fresh(), keys), eager, tolerance=1e-11)
    assert_same(run(lambda m, s, key: donating(key, m, s)), eager, tolerance=1e-11)
    assert_same(run(lambda m, s, _: donating_all(m, s)), eager, tolerance=1e-11)

    # Donation did take place.
    m, s = fresh()
    donating_all(m, s)
    assert s.damping.is_deleted() and s.velocity[".weight"].is_deleted()


def test_hyperparameter_arrays_survive_donation():
    """Numbers may be arrays, even one array for two of them; the state is a copy."""
    number = jnp.array(0.5, float)
    optimizer = plain_kfac(number, number, number, fisher=kfac.Exact())
    x, y = make_targets()

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        return optimizer.step(squared, model, state, *batch)

    for _ in range(2):
        model = fresh_regressor(jr.key(0))
        step((x, y), model, optimizer.init(model))
    assert not number.is_deleted()


hyperparameters = {
    "learning_rate": 0.2,
    "momentum": 0.5,
    "damping": 0.5,
    "norm_constraint": 1e-4,
    "ema": 0.25,
}
base = dict(
    learning_rate=0.1,
    momentum=0.9,
    damping=1e-2,
    norm_constraint=1.0,
    ema=0.95,
    inverse_period=1,
    fisher=kfac.Exact(),
)


def run_steps(optimizer, number=3, step=stepped, change=lambda state, index: state):
    """Trains on another batch every step."""
    model = regressor()
    state = optimizer.init(model)
    for index in range(number):
        state = change(state, index)
        batch = make_targets(index)
        model, state, info = step(optimizer, squared, model, state, *batch)
    return model, state, info


base_optimizer = plain_kfac(**base)


@eqx.filter_jit
@eqx.debug.assert_max_traces(max_traces=1)
def traced_once(model, state, x, y):
    return base_optimizer.step(squared, model, state, x, y)


@pytest.mark.parametrize("name", hyperparameters)
def test_changing_a_number(name):
    """... has its effect, from the next step on, and does not retrace."""
    step = lambda optimizer, loss_fn, *args: traced_once(*args)
    value = hyperparameters[name]

    def change(state, index):
        return set_number(state, name, value) if index == 1 else state

    unchanged = run_steps(base_optimizer, step=step)
    changed = run_steps(base_optimizer, step=step, change=change)
    assert relative(changed[0], unchanged[0]) > 1e-5
    assert float(getattr(changed[1], name)) == value


def test_changing_a_number_as_documented():
    """The spelling of `KFAC`'s docstring does not retrace either."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def identity(state):
        return state

    state = identity(base_optimizer.init(regressor()))
    identity(eqx.tree_at(lambda s: s.damping, state, jnp.array(1e-2)))


@pytest.mark.parametrize("name", hyperparameters)
def test_changing_a_number_equals_constructing_with_it(name):
    def run(optimizer, change=lambda state, index: state):
        return run_steps(optimizer, change=change)

    def construct(numbers):  # Arrays: one compilation for all.
        numbers = {k: jnp.array(v) for k, v in numbers.items()}
        return plain_kfac(**(base | numbers))

    numbers = {k: base[k] for k in hyperparameters}
    value = hyperparameters[name]
    constructed = run(construct(numbers | {name: value}))
    changed = run(construct(numbers), lambda state, _: set_number(state, name, value))
    assert_same(changed, constructed, tolerance=1e-11)
    assert relative(changed[0], run(construct(numbers))[0]) > 1e-4


def test_schedules():
    schedules = {
        name: optax.linear_schedule(base[name], value, 2)
        for name, value in hyperparameters.items()
    }

    numbers_at = jax.jit(lambda i: {name: s(i) for name, s in schedules.items()})

    def change(state, index):
        for name, value in numbers_at(jnp.asarray(index, jnp.int32)).items():
            state = set_number(state, name, float(value))
        return state

    scheduled = run_steps(plain_kfac(**(base | schedules)))
    assert_same(scheduled, run_steps(base_optimizer, change=change), tolerance=1e-11)
    for name, value in hyperparameters.items():
        assert float(getattr(scheduled[1], name)) == pytest.approx(value)


def test_info_reports_the_numbers_of_its_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    optimizer = plain_kfac(
        schedule, 0.5, lambda step: 0.1 * (step.astype(float) + 1), fisher=kfac.Exact()
    )
    _, state, info = run_steps(optimizer)
    assert float(info.learning_rate) == pytest.approx(0.5)
    assert float(info.momentum) == 0.5
    assert float(info.damping) == pytest.approx(0.3)
    assert not bool(info.rejected) and int(state.step) == 3


#
# An independent implementation
#


def dense_factors(weights, x, example_grad=None):
    """The factors of a one-hidden-layer tanh network with squared error, by jacobians
    with respect to what is added to each layer's output, example by example."""
    (w1, b1), (w2, b2) = weights

    def forward(x, e1, e2):
        hidden = jnp.tanh(w1 @ x + b1 + e1)
        return w2 @ hidden + b2 + e2, hidden

    zeros = jnp.zeros_like(b1), jnp.zeros_like(b2)
    factors = [[0, 0], [0, 0]]
    for xn in x:
        jacobians = jax.jacobian(lambda *e: forward(xn, *e)[0], (0, 1))(*zeros)
        inputs = xn, forward(xn, *zeros)[1]
        for layer, j, h in zip(factors, jacobians, inputs, strict=True):
            bar = jnp.append(h, 1.0)
            layer[0] = layer[0] + jnp.outer(bar, bar) / len(x)
            layer[1] = layer[1] + j.T @ j / len(x)
    return factors


@jax.jit
def dense_gradient(weights, x, y):
    def objective(weights):
        (w1, b1), (w2, b2) = weights
        out = jnp.tanh(x @ w1.T + b1[None]) @ w2.T + b2[None]
        return 0.5 * jnp.sum((out - y) ** 2) / len(x)

    return jax.value_and_grad(objective)(weights)


dense_factors = jax.jit(dense_factors)


def dense_inverse(a, g, damping, split):
    """The dense damped curvature of one layer, ready to be solved with."""
    if not split:
        return np.kron(g, a) + damping * np.eye(len(a) * len(g))
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    return np.kron(
        g + np.sqrt(damping) / pi * np.eye(len(g)),
        a + np.sqrt(damping) * pi * np.eye(len(a)),
    )


def dense_run(weights, batches, split, options, l2):
    """K-FAC as the textbook has it, with dense matrices throughout."""
    lr, mu, lam, rho = (
        options[k] for k in ("learning_rate", "momentum", "damping", "ema")
    )
    average, weight, cached = [[0, 0], [0, 0]], 0.0, None
    velocity = [np.zeros((w.shape[0], w.shape[1] + 1)) for w, _ in weights]
    losses = []
    for step, (x, y) in enumerate(batches):
        loss, grads = dense_gradient(weights, x, y)
        bars = [np.column_stack(layer) for layer in weights]
        grads = [np.column_stack(g) + l2 * w for g, w in zip(grads, bars)]
        losses.append(loss + l2 / 2 * sum(np.sum(w**2) for w in bars))
        if step % options["curvature_period"] == 0:
            new = jtu.tree_map(np.asarray, dense_factors(weights, x))
            for _ in range(1 + options["burn_in"] if step == 0 else 1):
                weight = (1.0 if step == 0 else rho) * weight + 1
                average = [
                    [v + (n - v) / weight for v, n in zip(*pair)]
                    for pair in zip(average, new)
                ]
        if step % options["inverse_period"] == 0:
            cached = [dense_inverse(a, g, lam + l2, split) for a, g in average]
        natural = [
            np.linalg.solve(c, g.ravel()).reshape(g.shape) for c, g in zip(cached, grads)
        ]
        scale = lr
        if options["norm_constraint"] is not None:
            norm = lr**2 * sum(np.sum(d * g) for d, g in zip(natural, grads))
            scale = lr * min(1.0, np.sqrt(options["norm_constraint"] / norm))
        velocity = [mu * v - scale * d for v, d in zip(velocity, natural)]
        bars = [w + v for w, v in zip(bars, velocity)]
        weights = [(jnp.asarray(w[:, :-1]), jnp.asarray(w[:, -1])) for w in bars]
    return bars, losses


plain = dict(
    learning_rate=0.2,
    momentum=0.9,
    damping=1e-2,
    ema=0.9,
    norm_constraint=None,
    curvature_period=1,
    inverse_period=1,
    burn_in=0,
)
variants = [
    (dict(), 0.0),
    (dict(curvature_period=2, inverse_period=3, burn_in=3, learning_rate=0.02), 0.0),
    (dict(norm_constraint=1e-2, ema=0.5, inverse_period=2), 0.1),
]


@ft.cache
def kfac_run(solver, variant):
    changes, l2 = variants[variant]

    def loss_fn(model, x, y):
        loss = squared(model, x, y)
        return loss + kfac.L2(model, l2) if l2 else loss

    choices = plain | changes
    choices["ema"] = kfac.MovingAverage(choices["ema"], choices.pop("burn_in"))
    optimizer = plain_kfac(**choices, solver=solver, fisher=kfac.Exact())
    model = regressor()
    state = optimizer.init(model)
    losses = []
    for index in range(10):
        batch = make_targets(index)
        model, state, info = stepped(optimizer, loss_fn, model, state, *batch)
        losses.append(info.loss)
    bars = [np.column_stack((layer.weight, layer.bias)) for layer in model.layers]
    return bars, losses


def weights_of(model):
    return [(layer.weight, layer.bias) for layer in model.layers]


@pytest.mark.parametrize("variant", range(len(variants)))
@pytest.mark.parametrize("solver", solvers)
def test_trajectory_equals_a_dense_implementation(solver, variant):
    changes, l2 = variants[variant]
    batches = [make_targets(index) for index in range(10)]
    split = isinstance(solver, kfac.Cholesky)
    expected, losses = dense_run(
        weights_of(regressor()), batches, split, plain | changes, l2
    )
    got, got_losses = kfac_run(solver, variant)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-8)
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-8 * np.linalg.norm(b)


def test_the_two_solvers_and_all_variants_differ():
    runs = [
        np.concatenate([w.ravel() for w in kfac_run(solver, variant)[0]])
        for solver in solvers
        for variant in range(len(variants))
    ]
    for i, a in enumerate(runs):
        for b in runs[:i]:
            assert np.linalg.norm(a - b) > 1e-4 * np.linalg.norm(b)


def test_inverse_is_stale_between_its_periods():
    """... and the moving average between those of the curvature."""
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), curvature_period=2, inverse_period=3)
    model = regressor()
    state = optimizer.init(model)
    averages, inverses = [], []
    for index in range(7):
        model, state, _ = stepped(optimizer, squared, model, state, *make_targets(index))
        averages.append(vector(state.curvature))
        inverses.append(vector(state.inverse))
    changed = [bool(np.any(a != b)) for a, b in zip(averages, averages[1:])]
    assert changed == [False, True, False, True, False, True]
    changed = [bool(np.any(a != b)) for a, b in zip(inverses, inverses[1:])]
    assert changed == [False, False, True, False, False, True]


def test_least_squares_in_one_step():
    x, y = make_targets(number=12)
    model = kfac.Linear(3, 2, key=jr.key(0))
    optimizer = plain_kfac(1.0, 0.0, 0.0, fisher=kfac.Exact())
    model, _, _ = stepped(optimizer, squared, model, optimizer.init(model), x, y)
    bar = np.column_stack((x, np.ones(12)))
    expected = np.linalg.lstsq(bar, y, rcond=None)[0].T
    got = np.column_stack((model.weight, model.bias))
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected)


#
# Hand-made curvature
#


def hand_made(model, make):
    """Factors `make(layer_index, size)` for every layer of an MLP."""

    def factors(index, layer):
        d_out, d_in = layer.weight.shape
        return kfac.factors.KroneckerFactors(
            jnp.asarray(make(2 * index, d_in + 1)),
            jnp.asarray(make(2 * index + 1, d_out)),
            jnp.zeros(()),
        )

    template = plain_kfac(0.1).init(model).curvature
    layers = tuple(factors(i, layer) for i, layer in enumerate(model.layers))
    return eqx.tree_at(lambda c: c.layers, template, layers)


def random_factors(model, seed):
    def make(index, size):
        root = np.asarray(normal(size, size, seed=10 * seed + index))
        return root @ root.T / size

    return hand_made(model, make)


@eqx.filter_jit
def update(optimizer, grads, state, model, **kwargs):
    return optimizer.update(grads, state, model, **kwargs)


@pytest.mark.parametrize("ema", [0.0, 0.5, 0.95, 1.0])
def test_moving_average_has_no_bias(ema):
    model = regressor()
    state = plain_kfac(0.1, ema=ema).init(model)
    new = [random_factors(model, seed) for seed in range(5)]
    for curvature in new:
        _, state = update(plain_kfac(0.1), model, state, model, curvature=curvature)
    weights = [ema ** (4 - i) for i in range(5)]
    expected = sum(w * vector(c) for w, c in zip(weights, new)) / sum(weights)
    np.testing.assert_allclose(vector(state.curvature), expected, rtol=1e-12, atol=1e-13)
    assert float(state.weight) == pytest.approx(sum(weights), rel=1e-12)

    # No curvature this time: the average stays.
    _, after = update(plain_kfac(0.1), model, state, model, curvature=None)
    assert_same(after.curvature, state.curvature)
    assert float(after.weight) == float(state.weight)


@pytest.mark.parametrize("solver", solvers)
def test_identity_factors_give_sgd_with_momentum(solver):
    model = regressor()
    optimizer = plain_kfac(0.1, 0.8, 0.0, solver=solver)
    sgd = optax.sgd(0.1, momentum=0.8)
    curvature = hand_made(model, lambda _, size: np.eye(size))
    doubled = hand_made(model, lambda _, size: 2.0 * np.eye(size))
    sgd_update, apply = jax.jit(sgd.update), eqx.filter_jit(eqx.apply_updates)

    def run(curvature):
        a = b = model
        state, sgd_state = optimizer.init(model), sgd.init(params_of(model))
        for index in range(4):
            grads = gradient(a, *make_targets(index))
            updates, state = update(optimizer, grads, state, a, curvature=curvature)
            a = apply(a, updates)
            grads = gradient(b, *make_targets(index))
            updates, sgd_state = sgd_update(params_of(grads), sgd_state)
            b = apply(b, updates)
        return a, b

    a, b = run(curvature)
    assert relative(a, b) <= 1e-13
    a, b = run(doubled)
    assert relative(a, b) > 1e-3


@eqx.filter_jit
@eqx.filter_grad
def gradient(model, x, y):
    return squared(model, x, y).value


#
# Burn-in
#


def sampled(burn_in, fisher=kfac.MonteCarlo(), seed=0):
    optimizer = plain_kfac(1e-3, fisher=fisher, ema=kfac.MovingAverage(burn_in=burn_in))
    model = regressor()
    state = optimizer.init(model)
    first = stepped(optimizer, squared, model, state, *make_targets(), key=jr.key(seed))
    second = stepped(optimizer, squared, *first[:2], *make_targets(), key=jr.key(-1))
    return first, second


def test_burn_in_averages_on_the_first_batch():
    x, y = make_targets()
    collect = eqx.filter_jit(kfac.curvature(squared, kfac.Exact()))
    exact = collect(regressor(), x, y)
    errors = {}
    for burn_in in (0, 99):
        (_, first, info), (_, second, _) = sampled(burn_in)
        assert float(first.weight) == 1 + burn_in
        assert float(second.weight) == pytest.approx(0.95 * (1 + burn_in) + 1)
        assert int(first.step) == 1
        others = [sampled(burn_in, seed=seed)[0][1] for seed in (1, 2, 3)]
        each = [relative(state.curvature, exact) for state in (first, *others)]
        errors[burn_in] = np.mean(each)
    # Independent samples: a tenth of the error of one, give or take.
    assert errors[99] < 0.25 * errors[0]
    assert errors[0] > 0.05


def test_burn_in_waits_for_a_finite_batch():
    """The estimates of a first batch that is NaN are lost; the next one takes its
    place."""
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), ema=kfac.MovingAverage(burn_in=4))
    model = regressor()
    state = optimizer.init(model)
    x, y = make_targets()
    _, state, info = stepped(
        optimizer, squared, model, state, np.full(x.shape, np.nan), y
    )
    assert bool(info.rejected) and float(state.weight) == 0
    _, state, info = stepped(optimizer, squared, model, state, x, y)
    assert not bool(info.rejected) and float(state.weight) == 5


#
# Norm constraint
#


def test_norm_constraint():
    x, y = make_targets()
    model = regressor()
    grads = gradient(model, x, y)

    def first_update(constraint):  # An array: compiled once.
        optimizer = plain_kfac(
            0.5, 0.9, 1e-2, fisher=kfac.Exact(), norm_constraint=constraint
        )
        state = optimizer.init(model)
        _, state, info = stepped(optimizer, squared, model, state, x, y)
        return vector(velocity_of(state, model))

    free = first_update(None)
    # Without momentum yet, the update is -α d: α² <d, g> = -α <update, g>.
    norm = -0.5 * float(free @ vector(grads))
    assert norm > 0

    np.testing.assert_allclose(first_update(jnp.array(norm * 1.01)), free, rtol=1e-12)

    limit = 0.1 * norm
    constrained = first_update(jnp.array(limit))
    # Active: the direction is the same, and α² <d, g> is the limit.
    factor = float(constrained @ free) / float(free @ free)
    np.testing.assert_allclose(constrained, factor * free, rtol=1e-12)
    alpha = 0.5 * factor
    assert alpha**2 * (norm / 0.5**2) == pytest.approx(limit, rel=1e-12)


#
# Invariance
#


@pytest.mark.parametrize("solver", solvers)
def test_step_is_invariant_to_affine_inputs(solver):
    """The function after a step at damping 0 does not depend on the affine coordinates
    of its inputs."""
    model = regressor()
    x, y = arrays(make_targets(number=20))
    matrix = np.eye(3) + 0.5 * np.asarray(normal(3, 3, seed=7))
    shift = np.asarray(normal(3, seed=8))
    x2 = x @ matrix.T + shift
    first = model.layers[0]
    weight = np.asarray(first.weight) @ np.linalg.inv(matrix)
    transformed = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias),
        model,
        (jnp.asarray(weight), jax.device_put(np.asarray(first.bias) - weight @ shift)),
    )
    predict = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    before = np.asarray(predict(model, x))
    np.testing.assert_allclose(predict(transformed, x2), before, atol=1e-13)

    def outputs(damping, solver):
        optimizer = plain_kfac(
            0.5, 0.9, jnp.asarray(damping), solver=solver, fisher=kfac.Exact()
        )
        results = []
        for net, inputs in ((model, x), (transformed, x2)):
            state = optimizer.init(net)
            for _ in range(2):
                net, state, info = stepped(optimizer, squared, net, state, inputs, y)
                assert not bool(info.rejected)
            results.append(np.asarray(predict(net, inputs)))
        change = np.linalg.norm(results[0] - before)
        return np.linalg.norm(results[0] - results[1]) / change

    assert outputs(0.0, solver) <= 1e-9
    assert outputs(10.0, solver) > 1e-2


#
# Rejected steps
#


def assert_nothing_changed(before, after):
    """All arrays, bit for bit, but for the counters."""
    (model, state), (new_model, new_state) = before, after
    assert_same(new_model, model)
    counters = lambda s: (s.step, s.rejected, s.faults, s.rollback.bad)
    assert_same(eqx.tree_at(counters, new_state, counters(state)), state)


@pytest.mark.parametrize("fisher", [kfac.MonteCarlo(), kfac.Empirical()])
@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_rejected_step(fisher, where, value, good_steps):
    optimizer = plain_kfac(
        0.1, 0.0, 0.1, fisher=fisher, inverse_period=2, norm_constraint=1.0
    )
    model = regressor()
    state = optimizer.init(model)
    for index in range(good_steps):
        model, state, info = stepped(
            optimizer, squared, model, state, *make_targets(index), key=jr.key(index)
        )
        assert not bool(info.rejected)

    x, y = make_targets(9)
    bad = [np.array(x), np.array(y)]
    bad[where == "targets"][0, 0] = value
    if where == "inputs" and value == jnp.inf:
        bad[0] *= jnp.inf  # tanh of a single infinity is finite.
    new_model, new_state, info = stepped(
        optimizer, squared, model, state, *bad, key=jr.key(9)
    )
    assert bool(info.rejected) and int(new_state.rejected) == 1
    assert int(new_state.step) == good_steps + 1
    assert not np.isfinite(float(info.loss))
    assert_nothing_changed((model, state), (new_model, new_state))

    # Training continues.
    losses = []
    for _ in range(4):
        new_model, new_state, info = stepped(
            optimizer, squared, new_model, new_state, x, y, key=jr.key(3)
        )
        assert not bool(info.rejected)
        losses.append(float(info.loss))
    assert losses[-1] < losses[0]
    assert int(new_state.rejected) == 1


def test_training_after_a_rejected_first_step_is_unharmed():
    """The state after a NaN in the very first batch trains as a new one does."""
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), inverse_period=3)
    x, y = make_targets()
    bad_y = np.full(y.shape, np.nan)
    runs = []
    for bad in (False, True):
        model = regressor()
        state = optimizer.init(model)
        if bad:
            model, state, _ = stepped(optimizer, squared, model, state, x, bad_y)
        model, state, info = stepped(optimizer, squared, model, state, x, y)
        runs.append((model, state.curvature, state.inverse, state.velocity))
    assert_same(*runs)


def nan_like(a):
    return jax.device_put(np.full(a.shape, np.nan, a.dtype)) if eqx.is_array(a) else a


def test_update_rejects_what_is_not_finite():
    optimizer = plain_kfac(0.1)
    model = regressor()
    state = optimizer.init(model)
    curvature = random_factors(model, 0)
    grads = gradient(model, *make_targets())
    bad = jtu.tree_map(nan_like, grads)
    for args in (
        (bad, dict(curvature=curvature)),
        (grads, dict(curvature=curvature, value=jax.device_put(np.nan))),
    ):
        updates, new_state = update(optimizer, args[0], state, model, **args[1])
        assert int(new_state.rejected) == 1
        assert not np.any(vector(updates))
        assert_nothing_changed((model, state), (model, new_state))
    updates, new_state = update(optimizer, grads, state, model, curvature=curvature)
    assert int(new_state.rejected) == 0
    assert np.any(vector(updates))


def test_nan_curvature_alone_is_rejected():
    """The gradient is fine, but the statistics are not: nothing moves, and it counts."""
    optimizer = plain_kfac(0.1, inverse_period=1)
    model = regressor()
    grads = gradient(model, *make_targets())
    curvature = random_factors(model, 0)
    state = optimizer.init(model)
    _, state = update(optimizer, grads, state, model, curvature=curvature)
    bad = jtu.tree_map(nan_like, curvature)
    updates, new_state = update(optimizer, grads, state, model, curvature=bad)
    assert all(np.all(u == 0) for u in arrays(updates))
    assert int(new_state.rejected) == int(state.rejected) + 1
    assert_same(new_state.curvature, state.curvature)
    assert_same(new_state.velocity, state.velocity)
    # And training goes on.
    updates, _ = update(optimizer, grads, new_state, model, curvature=curvature)
    assert all(np.any(u != 0) for u in arrays(updates))


#
# Checkpoints
#


@pytest.mark.parametrize("solver", solvers)
def test_checkpoint_and_resume(solver):
    optimizer = plain_kfac(
        optax.linear_schedule(0.1, 0.01, 6), solver=solver, inverse_period=3
    )

    def train(model, state, steps):
        for index in steps:
            model, state, info = stepped(
                optimizer, squared, model, state, *make_targets(index), key=jr.key(index)
            )
        return model, state, info

    start = regressor()
    straight = train(start, optimizer.init(start), range(6))

    model, state, _ = train(start, optimizer.init(start), range(4))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, state))
    file.seek(0)
    like = regressor(seed=5)
    model, state = eqx.tree_deserialise_leaves(file, (like, optimizer.init(like)))
    assert_same(train(model, state, range(4, 6)), straight)


#
# Models
#


class Net(eqx.Module):
    """With parameters that no tag covers, and some that are no parameters."""

    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    linears: list
    table: jax.Array  # Integers: never trained.
    activation: object

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(5, 3, key=keys[0])
        self.norm = eqx.nn.LayerNorm(3)
        self.linears = [
            kfac.Linear(3, 4, key=keys[1]),
            kfac.Linear(4, 2, use_bias=False, key=keys[2]),
        ]
        self.table = jnp.arange(5)[::-1]
        self.activation = jax.nn.gelu

    def __call__(self, token):
        h = self.norm(self.embedding(self.table[token]))
        return self.linears[1](self.activation(self.linears[0](h)))


ADAM = optax.adam(1e-2)  # Functions, which are equal only to themselves.
make_net = ft.cache(eqx.filter_jit(lambda: Net(jr.key(0))))


def tokens():
    return jax.device_put(np.arange(10) % 5), jax.device_put(np.arange(10) % 2)


def test_fallback_updates_are_applied_unchanged(standard_promotion):
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), fallback=ADAM)
    model = make_net()
    state = optimizer.init(model)
    x, y = tokens()

    def untagged(tree):
        return tree.embedding, tree.norm

    @eqx.filter_jit
    def expected_step(model, adam_state):
        grad = eqx.filter_grad(lambda m: softmax(m, x, y).value)(model)
        updates, adam_state = ADAM.update(untagged(grad), adam_state)
        return eqx.apply_updates(untagged(model), updates), adam_state

    adam_state = ADAM.init(eqx.filter(untagged(model), eqx.is_inexact_array))
    for _ in range(3):
        expected, adam_state = expected_step(model, adam_state)
        before = model
        model, state, info = stepped(optimizer, softmax, model, state, x, y)
        assert_same(untagged(model), expected, tolerance=1e-12)
        assert relative(model.linears, before.linears) > 1e-3
        assert not bool(info.rejected)
    assert_same(model.table, before.table)


def test_a_fallback_whose_state_changes_its_type(standard_promotion):
    """A state like that of Adam whose moments of half precision end as float32."""
    half = lambda params: jtu.tree_map(lambda p: jnp.zeros(p.shape, jnp.float16), params)
    wider = lambda g, s, _=None: (g, jtu.tree_map(lambda s, g: s + g, s, g))
    fallback = optax.GradientTransformation(half, wider)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), fallback=fallback)
    model, args = make_net(), tokens()
    _, state, info = stepped(optimizer, softmax, model, optimizer.init(model), *args)
    grad = eqx.filter_jit(eqx.filter_grad(lambda m: softmax(m, *args).value))(model)
    assert not bool(info.rejected)
    assert state.fallback.norm.weight.dtype == grad.norm.weight.dtype == float
    assert_same(state.fallback.norm.weight, grad.norm.weight, tolerance=1e-12)


def test_fallback_state_is_kept_on_rejection(standard_promotion):
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), fallback=ADAM)
    model = make_net()
    x, y = tokens()
    model, state, _ = stepped(optimizer, softmax, model, optimizer.init(model), x, y)

    def bad(model, x, y):
        return softmax(model, x, y) * jnp.nan

    after = stepped(optimizer, bad, model, state, x, y)
    assert_nothing_changed((model, state), after[:2])


def test_structure_and_types_do_not_change(standard_promotion):
    optimizer = plain_kfac(0.1, fallback=ADAM, norm_constraint=1.0)
    model = make_net()
    state = optimizer.init(model)
    x, y = tokens()
    new_model, new_state, _ = stepped(
        optimizer, softmax, model, state, x, y, key=jr.key(0)
    )
    for old, new in ((model, new_model), (state, new_state)):
        assert jtu.tree_structure(new) == jtu.tree_structure(old)
        old, new = (jtu.tree_leaves(eqx.filter(t, eqx.is_array)) for t in (old, new))
        for a, b in zip(old, new, strict=True):
            assert jax.typeof(a) == jax.typeof(b)  # Shape, type and weakness.
    assert new_model.activation is model.activation


def test_state_is_shaped_like_the_model_and_printable():
    optimizer = plain_kfac(0.1, fallback=ADAM)
    state = optimizer.init(make_net())
    assert state.curvature.linears[0].input_factor.shape == (4, 4)
    assert state.curvature.linears[0].output_factor.shape == (4, 4)
    assert state.curvature.linears[1].input_factor.shape == (4, 4)
    assert state.curvature.linears[1].output_factor.shape == (2, 2)
    assert state.curvature.embedding.weight is None
    assert state.velocity[".linears[1].weight"].shape == (2, 4)
    assert ".norm.weight" not in state.velocity
    assert all(eqx.is_array(leaf) for leaf in jtu.tree_leaves(state))
    for tree in (optimizer, state):
        assert len(repr(tree)) > 100
    assert "input_factor=f64[4,4]" in eqx.tree_pformat(state)
    assert "KroneckerFactors" in repr(state.curvature)


def test_state_needs_no_batch():
    """`init` works on abstract models too."""
    optimizer = plain_kfac(0.1)
    model = regressor()
    abstract = eqx.filter_eval_shape(optimizer.init, model)
    state = optimizer.init(model)
    assert jtu.tree_structure(abstract) == jtu.tree_structure(state)
    assert [x.shape for x in jtu.tree_leaves(abstract)] == [
        x.shape for x in jtu.tree_leaves(state)
    ]


@pytest.mark.parametrize("frozen", ["layer", "bias", "weight"])
def test_frozen_parameters(frozen):
    """Training a part equals, for that part, an optimizer that never sees the rest."""
    model = regressor()
    spec = jtu.tree_map(eqx.is_inexact_array, model)
    where = dict(
        layer=lambda m: (m.layers[0].weight, m.layers[0].bias),
        bias=lambda m: (m.layers[0].bias,),
        weight=lambda m: (m.layers[0].weight,),
    )[frozen]
    spec = eqx.tree_at(where, spec, replace_fn=lambda _: False)
    trained, static = eqx.partition(model, spec)

    def loss_fn(trained, static, x, y):
        return squared(eqx.combine(trained, static), x, y)

    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), damping=1e-2)
    state = optimizer.init(trained)
    x, y = make_targets()
    losses = []
    for _ in range(3):
        trained, state, info = stepped(optimizer, loss_fn, trained, state, static, x, y)
        losses.append(float(info.loss))
        assert not bool(info.rejected)
    assert losses[-1] < losses[0]
    after = eqx.combine(trained, static)
    assert_same(where(after), where(model))
    assert relative(after.layers[1], model.layers[1]) > 1e-3
    factors = state.curvature.layers[0]
    if frozen == "layer":
        assert factors is None
    else:
        assert factors.input_factor.shape == ((3, 3) if frozen == "bias" else (1, 1))


def test_frozen_layer_is_as_if_it_were_a_preprocessing():
    model = regressor()
    x, y = make_targets()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())

    spec = jtu.tree_map(lambda _: False, model)
    spec = eqx.tree_at(
        lambda m: (m.layers[1].weight, m.layers[1].bias), spec, (True, True)
    )
    trained, static = eqx.partition(model, spec)

    def partly(trained, x, y):
        return squared(eqx.combine(trained, static), x, y)

    trained, _, _ = stepped(optimizer, partly, trained, optimizer.init(trained), x, y)

    last = model.layers[1]
    hidden = eqx.filter_jit(lambda layer, x: jnp.tanh(jax.vmap(layer)(x)))
    hidden = hidden(model.layers[0], x)
    last, _, _ = stepped(optimizer, squared, last, optimizer.init(last), hidden, y)
    assert relative(trained.layers[1], last) <= 1e-12


def test_aux():
    def loss_fn(model, x, y):
        out = jax.vmap(model)(x)
        return kfac.SquaredError(out, y), {"out": out, "name": "squared"}

    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    model = regressor()
    x, y = make_targets()
    new, _, info = stepped(optimizer, loss_fn, model, optimizer.init(model), x, y)
    loss, aux = eqx.filter_jit(loss_fn)(model, x, y)
    np.testing.assert_allclose(info.aux["out"], aux["out"], rtol=1e-12)
    assert info.aux["name"] == "squared"
    assert float(info.loss) == pytest.approx(float(loss.value))
    plain, _, info = stepped(optimizer, squared, model, optimizer.init(model), x, y)
    assert info.aux is None
    assert_same(new, plain, tolerance=1e-12)


class Normed(eqx.Module):
    linears: list
    norm: eqx.nn.BatchNorm
    count: eqx.nn.StateIndex

    def __init__(self, key):
        keys = jr.split(key)
        self.linears = [kfac.Linear(3, 4, key=keys[0]), kfac.Linear(4, 2, key=keys[1])]
        self.norm = eqx.nn.BatchNorm(
            4, "batch", channelwise_affine=False, mode="batch", dtype=jnp.float64
        )
        self.count = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        h, state = self.norm(jnp.tanh(self.linears[0](x)), state)
        return self.linears[1](h), state


@pytest.mark.parametrize("weighted", [False, True])
def test_equinox_state_through_aux(weighted):
    model, stats = eqx.filter_jit(eqx.nn.make_with_state(Normed))(jr.key(0))

    def loss_fn(model, stats, x, y):
        # Used outside of any transformation as well.
        stats = stats.set(model.count, stats.get(model.count) + 1)
        out, stats = jax.vmap(
            model, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )(x, stats)
        weights = jnp.ones(len(x)) if weighted else None
        return kfac.SquaredError(out, y, weights), stats

    params, static = eqx.partition(model, trained_part(model))

    def on_params(params, stats, x, y):
        return loss_fn(eqx.combine(params, static), stats, x, y)

    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    state = optimizer.init(params)
    losses = []
    for index in range(3):
        params, state, info = stepped(
            optimizer, on_params, params, state, stats, *make_targets(index)
        )
        stats = info.aux
        losses.append(info.loss)
        assert int(stats.get(model.count)) == index + 1
    assert np.all(np.isfinite(losses))


def trained_part(model):
    """The linear layers' arrays."""
    spec = jtu.tree_map(lambda _: False, model)
    arrays = jtu.tree_map(eqx.is_inexact_array, model.linears)
    return eqx.tree_at(lambda m: m.linears, spec, arrays)


def test_dropout_keys_are_arguments():
    class Dropped(eqx.Module):
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.mlp(self.dropout(x, key=key))

    def loss_fn(model, x, y, key):
        keys = jr.split(key, len(x))
        return kfac.SquaredError(jax.vmap(model)(x, keys), y)

    model = Dropped(regressor(), eqx.nn.Dropout(0.5))
    optimizer = plain_kfac(0.1)
    x, y = make_targets()

    def step(dropout_key, key):
        state = optimizer.init(model)
        return stepped(optimizer, loss_fn, model, state, x, y, dropout_key, key=key)

    _, state, info = step(jr.key(0), jr.key(1))
    assert_same(step(jr.key(0), jr.key(1))[1], state)
    # Another dropout mask: another loss. Another Fisher sample: the same loss, another
    # output factor.
    assert float(step(jr.key(2), jr.key(1))[2].loss) != float(info.loss)
    _, other, other_info = step(jr.key(0), jr.key(2))
    assert float(other_info.loss) == float(info.loss)
    factors, others = (s.curvature.mlp.layers[0] for s in (state, other))
    np.testing.assert_array_equal(factors.input_factor, others.input_factor)
    assert np.any(factors.output_factor != others.output_factor)


@pytest.mark.parametrize("solver", solvers)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_low_precision_models(solver, dtype):
    """The same steps as in double precision, but for rounding."""
    optimizer = plain_kfac(0.1, 0.9, 1e-1, solver=solver, fisher=kfac.Exact())
    x, y = make_targets()

    def run(dtype):
        cast = lambda a: a.astype(dtype) if eqx.is_array(a) else a
        model = jtu.tree_map(cast, regressor())
        state = optimizer.init(model)
        losses = []
        for _ in range(4):
            model, state, info = stepped(
                optimizer, squared, model, state, cast(x), cast(y)
            )
            losses.append(float(info.loss))
            assert not bool(info.rejected)
        return model, state, info, losses

    model, state, info, losses = run(dtype)
    *_, expected = run(jnp.float64)
    rtol = 100 * float(jnp.finfo(dtype).eps) if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert losses[-1] < 0.95 * losses[0]
    assert info.loss.dtype == jnp.float32
    assert {a.dtype for a in jtu.tree_leaves(params_of(model))} == {jnp.dtype(dtype)}
    factors = jtu.tree_leaves((state.curvature, state.inverse))
    assert {a.dtype for a in factors} == {jnp.dtype(jnp.float32)}


class Residual(eqx.Module):
    """Layers of one shape, stacked and scanned over, or in a list."""

    layers: object

    def __call__(self, x):
        if isinstance(self.layers, list):
            for layer in self.layers:
                x = x + jnp.tanh(layer(x))
            return x
        params, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, params):
            return x + jnp.tanh(eqx.combine(params, static)(x)), None

        return jax.lax.scan(body, x, params)[0]


@pytest.mark.parametrize("solver", solvers)
def test_stacked_layers(solver):
    separate = [kfac.Linear(2, 2, key=jr.key(i)) for i in range(2)]
    stack = lambda *a: jax.device_put(np.stack(a))
    stacked = jtu.tree_map(stack, *separate)
    optimizer = plain_kfac(
        0.1, 0.9, 1e-2, solver=solver, fisher=kfac.Exact(), norm_constraint=1e-2
    )
    x, y = make_targets(d_in=2)
    results = []
    for layers in (stacked, separate):
        model = Residual(layers)
        state = optimizer.init(model)
        for _ in range(3):
            model, state, info = stepped(optimizer, squared, model, state, x, y)
        results.append((model, state, info))
    (model, state, info), (other, other_state, other_info) = results
    assert state.curvature.layers.input_factor.shape == (2, 3, 3)
    restacked = jtu.tree_map(stack, *other.layers)
    assert_same(model.layers, restacked, tolerance=1e-11)
    restacked = jtu.tree_map(stack, *other_state.curvature.layers)
    assert_same(state.curvature.layers, restacked, tolerance=1e-11)
    assert float(info.update_norm) == pytest.approx(float(other_info.update_norm))


def test_info_norms():
    x, y = make_targets()
    model = regressor()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    new, _, info = stepped(optimizer, squared, model, optimizer.init(model), x, y)
    norm = np.linalg.norm(vector(gradient(model, x, y)))
    assert float(info.gradient_norm) == pytest.approx(norm, rel=1e-12)
    norm = np.linalg.norm(vector(new) - vector(model))
    assert float(info.update_norm) == pytest.approx(norm, rel=1e-12)
    loss = eqx.filter_jit(squared)(model, x, y)
    assert float(info.loss) == pytest.approx(float(loss.value))


def test_keyword_arguments_reach_the_loss():
    def loss_fn(model, x, *, y, scale=1.0):
        return scale * squared(model, x, y)

    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    model = regressor()
    x, y = make_targets()
    state = optimizer.init(model)
    step = ft.partial(stepped, optimizer, loss_fn, model, state, x, y=y)
    (_, _, one), (_, _, three) = (step(scale=jnp.asarray(s)) for s in (1.0, 3.0))
    assert float(three.loss) == pytest.approx(3 * float(one.loss))
