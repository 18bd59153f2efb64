"""Learning rate, momentum and damping that choose themselves, and what else decides over
a step: against dense matrices in NumPy."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from .helpers import (
    assert_near_where_finite,
    assert_same,
    flat,
    leaves,
    make_mesh,
    set_number,
    squared,
    stepped,
    unwatched,
    velocity_of,
)
from .models import make_targets, regressor
from .plain import plain_kfac


QUADRATIC = kfac.QuadraticModel()


def is_weight(leaf):
    return leaf.ndim > 1


def softmax(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), jnp.argmax(y, axis=-1))


def with_l2(loss_fn, eta, mask=None):
    return lambda model, *batch: loss_fn(model, *batch) + kfac.L2(model, eta, mask)


@ft.cache
def many_batches(number, scale=1.0):
    """The batches of a run, stacked, with targets that are `scale` times as large."""
    batches = [make_targets(100 + index) for index in range(number)]
    x, y = map(np.stack, zip(*batches))
    return jax.device_put((x, scale * y))


def parameters(model):
    """All parameters of a network, perhaps of many, in the order of the dense code."""
    layers = model.layers if hasattr(model, "layers") else [model]
    bars = [np.concatenate((a.weight, a.bias[..., None]), axis=-1) for a in layers]
    return np.concatenate([b.reshape(*b.shape[:-2], -1) for b in bars], axis=-1)


@eqx.filter_jit
def scan_steps(optimizer, loss_fn, model, state, batches):
    """A step for every batch; the last model and state, and all models and infos."""
    params, static = eqx.partition(model, eqx.is_array)

    def body(carry, batch):
        model = eqx.combine(carry[0], static)
        model, state, info = optimizer.step(loss_fn, model, carry[1], *batch)
        params = eqx.filter(model, eqx.is_array)
        return (params, state), (params, info)

    (params, state), (all_params, infos) = jax.lax.scan(body, (params, state), batches)
    return eqx.combine(params, static), state, all_params, infos


#
# An independent implementation
#


def bar(x):
    return np.column_stack((x, np.ones(len(x))))


def matrices(theta):
    """Both layers, biases in the last column."""
    return theta[:16].reshape(4, 4), theta[16:].reshape(2, 5)


def forward(theta, x):
    first, second = matrices(theta)
    hidden = np.tanh(bar(x) @ first.T)
    return hidden, bar(hidden) @ second.T


def squared_terms(out, y):
    """Every term's loss, its gradient and its Hessian with respect to the outputs."""
    eye = np.broadcast_to(np.eye(2), (len(out), 2, 2))
    return 0.5 * np.sum((out - y) ** 2, axis=-1), out - y, eye


def softmax_terms(out, y):
    targets = np.eye(2)[np.argmax(y, axis=-1)]
    out = out - np.max(out, axis=-1, keepdims=True)
    p = np.exp(out) / np.sum(np.exp(out), axis=-1, keepdims=True)
    hessian = np.einsum("nk,kl->nkl", p, np.eye(2)) - np.einsum("nk,nl->nkl", p, p)
    value = np.log(np.sum(np.exp(out), axis=-1)) - np.sum(out * targets, axis=-1)
    return value, p - targets, hessian


def objective(terms, theta, x, y, eta):
    values, _, _ = terms(forward(theta, x)[1], y)
    return np.mean(values) + 0.5 * np.sum(eta * theta**2)


def derivatives(terms, theta, x, y, eta):
    """The gradient, the Gauss-Newton matrix without L2, and both layers' factors."""
    _, second = matrices(theta)
    hidden, out = forward(theta, x)
    _, slopes, hessian = terms(out, y)
    # Of the outputs with respect to the outputs of either layer.
    before = [second[:, :-1] * (1 - hidden[:, None] ** 2), np.stack([np.eye(2)] * len(x))]
    inputs = [bar(x), bar(hidden)]
    jacobian = np.concatenate(
        [
            np.einsum("nkj,ni->nkji", b, i).reshape(len(x), 2, -1)
            for b, i in zip(before, inputs)
        ],
        axis=-1,
    )
    gradient = np.einsum("nkp,nk->p", jacobian, slopes) / len(x) + eta * theta
    ggn = np.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian) / len(x)
    factors = [
        (i.T @ i / len(x), np.einsum("nki,nkl,nlj->ij", b, hessian, b) / len(x))
        for b, i in zip(before, inputs)
    ]
    return gradient, ggn, factors


def damped_kronecker(a, g, damping, factored):
    if not factored:
        return np.kron(g, a) + damping * np.eye(len(a) * len(g))
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    root = np.sqrt(damping)
    return np.kron(g + root / pi * np.eye(len(g)), a + root * pi * np.eye(len(a)))


def natural_direction(factors, gradient, dampings, factored):
    parts = np.split(gradient, [16])
    solutions = [
        np.linalg.solve(damped_kronecker(*pair, damping, factored), part)
        for pair, damping, part in zip(factors, dampings, parts)
    ]
    return -np.concatenate(solutions)


def coefficients(matrix, vector, fixed):
    """The minimum over those coefficients that are `None` in `fixed`; a direction without
    length gets zero."""
    chosen = np.array([0.0 if value is None else value for value in fixed])
    free = [i for i, v in enumerate(fixed) if v is None and matrix[i, i] > 0]
    right = (vector + matrix @ chosen)[free]
    chosen[free] = -np.linalg.solve(matrix[np.ix_(free, free)], right)
    return chosen


def marquardt(damping, ratio, lower, upper, factor):
    if not np.isfinite(ratio) or ratio < lower:
        return damping / factor
    return damping * factor if ratio > upper else damping


usual = dict(
    terms=squared_terms,
    factored=True,
    eta=0.0,
    learning_rate=None,
    momentum=None,
    damping=1.0,
    interval=5,
    lower=0.25,
    upper=0.75,
    inverse_period=5,
    ema=0.95,
    damping_ratio=1.0,
    examples=None,
    mistake=None,
)


def dense_trajectory(theta, batches, **choices):
    """All-adaptive K-FAC, and the same with some `mistake`. Every step's parameters,
    learning rate, momentum, damping and reduction ratio."""
    o = usual | choices
    eta = np.broadcast_to(np.asarray(o["eta"], float), theta.shape)
    layer_eta = [np.mean(part) for part in np.split(eta, [16])]
    damping, velocity, weight = o["damping"], np.zeros_like(theta), 0.0
    rows = []
    for step, (x, y) in enumerate(zip(*map(np.asarray, batches))):
        gradient, ggn, new = derivatives(o["terms"], theta, x, y, eta)
        if o["examples"] is not None:
            few = x[: o["examples"]], y[: o["examples"]]
            ggn = derivatives(o["terms"], theta, *few, eta)[1]
        weight = o["ema"] * weight + 1
        if step == 0:
            averaged = new
        averaged = [
            tuple(v + (n - v) / weight for v, n in zip(*pairs))
            for pairs in zip(averaged, new)
        ]
        if step % o["inverse_period"] == 0:
            cached, cached_damping = averaged, damping
        ratio = 1.0 if o["mistake"] == "ratio" else o["damping_ratio"]
        # An eigendecomposition does not depend on the damping, a Cholesky one does.
        stale = o["factored"] != (o["mistake"] == "stale")
        now = ratio * (cached_damping if stale else damping)
        dampings = [now + e for e in layer_eta]
        direction = natural_direction(cached, gradient, dampings, o["factored"])

        quadratic = ggn + np.diag(damping + eta)
        if o["mistake"] == "damping":
            quadratic = ggn + np.diag(eta)
        elif o["mistake"] == "l2":
            quadratic = ggn + damping * np.eye(len(theta))
        elif o["mistake"] == "ratio in model":
            quadratic = ggn + np.diag(o["damping_ratio"] * damping + eta)
        elif o["mistake"] == "factors":
            blocks = np.zeros_like(ggn)
            blocks[:16, :16], blocks[16:, 16:] = (np.kron(g, a) for a, g in averaged)
            quadratic = blocks + np.diag(damping + eta)
        directions = np.stack((direction, velocity), axis=-1)
        matrix, vector = directions.T @ quadratic @ directions, directions.T @ gradient
        fixed = [o["learning_rate"], o["momentum"]]
        if o["mistake"] == "momentum":
            fixed[1] = 0.0
        elif o["mistake"] == "separate":
            matrix = np.diag(np.diag(matrix))
        chosen = coefficients(matrix, vector, fixed)
        velocity = directions @ chosen
        predicted = velocity @ quadratic @ velocity / 2 + gradient @ velocity

        reduction, used = np.inf, damping
        if (step + 1) % o["interval"] == 0:
            before = objective(o["terms"], theta, x, y, eta)
            after = objective(o["terms"], theta + velocity, x, y, eta)
            reduction = (after - before) / predicted if predicted < 0 else -np.inf
            factor = 0.95 ** o["interval"]
            damping = marquardt(damping, reduction, o["lower"], o["upper"], factor)
        theta = theta + velocity
        rows.append((theta, *chosen, used, reduction))
    return [np.array(column) for column in zip(*rows)]


# A weight has a column for the bias, to which a mask does not apply.
MASKED = np.concatenate([np.tile([1] * n + [0], m) for n, m in ((3, 4), (4, 2))])
SCALE = 3.0
trajectories = {
    "cholesky": dict(eta=0.05),
    "eigh": dict(eta=0.05, factored=False, examples=3),
    "numbers": dict(
        learning_rate=0.2, momentum=0.5, damping=0.1, interval=1, factored=False
    ),
    "often": dict(
        interval=2,
        inverse_period=3,
        damping_ratio=0.3,
        damping=0.3,
        lower=1.0,
        upper=1.25,
        terms=softmax_terms,
    ),
    "often eigh": dict(
        interval=2,
        inverse_period=3,
        damping_ratio=0.3,
        lower=1.05,
        upper=1.2,
        eta=0.02 * MASKED,
        factored=False,
    ),
}


@ft.cache
def kfac_trajectory(name, steps=30):
    o = usual | trajectories[name]
    loss_fn = {squared_terms: squared, softmax_terms: softmax}[o["terms"]]
    if np.any(o["eta"]):
        mask = is_weight if np.ndim(o["eta"]) else None
        loss_fn = with_l2(loss_fn, float(np.max(o["eta"])), mask)
    rule = kfac.QuadraticModel(o["examples"], o["damping_ratio"])
    optimizer = plain_kfac(
        rule if o["learning_rate"] is None else o["learning_rate"],
        rule if o["momentum"] is None else o["momentum"],
        kfac.LevenbergMarquardt(
            o["damping"], interval=o["interval"], lower=o["lower"], upper=o["upper"]
        ),
        fisher=kfac.Exact(),
        solver=kfac.Cholesky() if o["factored"] else kfac.Eigh(),
        inverse_period=o["inverse_period"],
        ema=o["ema"],
    )
    model = regressor()
    state = optimizer.init(model)
    batches = many_batches(steps, SCALE)
    _, _, all_params, infos = scan_steps(optimizer, loss_fn, model, state, batches)
    numbers = infos.learning_rate, infos.momentum, infos.damping, infos.reduction_ratio
    return [parameters(all_params), *map(np.asarray, numbers)]


@ft.cache
def expected_trajectory(name, **changes):
    choices = trajectories[name] | changes
    theta, batches = parameters(regressor()), many_batches(30, SCALE)
    with np.errstate(all="ignore"):
        return dense_trajectory(theta, batches, **choices)


def relative_rows(got, want):
    return np.max(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1))


@pytest.mark.parametrize("name", trajectories)
def test_trajectory_equals_a_dense_implementation(name):
    got, want = kfac_trajectory(name), expected_trajectory(name)
    assert got[0].shape == want[0].shape == (30, 26)
    assert relative_rows(got[0], want[0]) <= 1e-8
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)


@pytest.mark.parametrize("name", trajectories)
def test_the_trajectories_are_worth_comparing(name):
    o = usual | trajectories[name]
    _, learning_rate, momentum, damping, ratio = kfac_trajectory(name)
    measured = (np.arange(30) + 1) % o["interval"] == 0
    assert np.array_equal(~np.isposinf(ratio), measured)
    assert len(np.unique(damping)) > 3
    if name in ("often", "often eigh", "numbers"):  # There, it moves both ways.
        assert np.any(np.diff(damping) > 0) and np.any(np.diff(damping) < 0)
    if o["learning_rate"] is None:
        assert np.std(learning_rate) > 1e-2 and np.std(momentum) > 1e-2
        assert momentum[0] == 0  # There is no previous update yet.


wrong = [
    ("cholesky", dict(mistake="damping")),
    ("cholesky", dict(mistake="l2")),
    ("cholesky", dict(mistake="factors")),
    ("cholesky", dict(mistake="momentum")),
    ("cholesky", dict(mistake="separate")),
    ("cholesky", dict(factored=False)),
    ("cholesky", dict(interval=4)),
    ("cholesky", dict(ema=0.9)),
    ("eigh", dict(examples=None)),
    ("eigh", dict(examples=2)),
    ("eigh", dict(factored=True)),
    ("numbers", dict(interval=2)),
    ("often", dict(mistake="ratio")),
    ("often", dict(mistake="ratio in model")),
    ("often", dict(mistake="stale")),
    ("often eigh", dict(mistake="ratio in model")),
    ("often eigh", dict(mistake="stale")),
    ("often eigh", dict(eta=0.02)),
    ("often eigh", dict(inverse_period=2)),
]


@pytest.mark.parametrize("name,change", wrong, ids=str)
def test_another_trajectory_differs(name, change):
    got, other = kfac_trajectory(name), expected_trajectory(name, **change)
    assert not relative_rows(got[0], other[0]) <= 1e-3  # NaN differs too.


#
# The quadratic model
#

# For everything that needs no rule for the damping: compiled once for every model.
explicit = plain_kfac(
    QUADRATIC,
    QUADRATIC,
    0.1,
    fisher=kfac.Exact(),
    inverse_period=1,
    max_increase=float("inf"),
)


def start(optimizer, model, **numbers):
    state = optimizer.init(model)
    for name, value in numbers.items():
        state = set_number(state, name, value)
    return state


def make_linear():
    return kfac.Linear(3, 2, key=jr.key(0))


def ratios(model, damping):
    """Of three steps; and what they were but for the damping in the model."""
    state, found, expected = start(explicit, model, damping=damping), [], []
    for index in range(3):
        batch = make_targets(index)
        model, state, info = stepped(explicit, squared, model, state, *batch)
        found.append(float(info.reduction_ratio))
        change = float(info.new_loss - info.loss)
        norm = float(info.update_norm) ** 2
        expected.append(change / (change + damping * norm / 2))
    return np.array(found), np.array(expected)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_the_model_of_a_quadratic_objective_is_right(damping):
    found, expected = ratios(make_linear(), damping)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    if damping == 0:
        np.testing.assert_allclose(found, 1, rtol=1e-11)
    else:
        assert np.all(found > 1.05)
    found, expected = ratios(regressor(), damping)
    assert np.max(np.abs(found - expected)) > 0.1


@ft.cache
def third_step(choose_learning_rate, choose_momentum):
    """Everything about a step with a previous update: parameters before and after, the
    previous update, and what the step tells."""
    optimizer = eqx.tree_at(
        lambda o: (o.learning_rate, o.momentum),
        explicit,
        (
            QUADRATIC if choose_learning_rate else jnp.array(0.3),
            QUADRATIC if choose_momentum else jnp.array(0.5),
        ),
        is_leaf=lambda x: isinstance(x, kfac.QuadraticModel),
    )
    model = regressor()
    state = optimizer.init(model)
    for index in range(3):
        before, previous = parameters(model), parameters(velocity_of(state, model))
        batch = make_targets(index)
        model, state, info = stepped(optimizer, squared, model, state, *batch)
        if index == 0 and choose_momentum:
            assert float(info.momentum) == 0
        assert not bool(info.rejected)
    return before, parameters(model), previous, info


@pytest.mark.parametrize("choose_learning_rate", [True, False])
@pytest.mark.parametrize("choose_momentum", [True, False])
def test_gradient_of_the_model_is_orthogonal_to_what_is_chosen(
    choose_learning_rate, choose_momentum
):
    chosen = choose_learning_rate, choose_momentum
    before, after, previous, info = third_step(*chosen)
    x, y = map(np.asarray, make_targets(2))
    gradient, ggn, _ = derivatives(squared_terms, before, x, y, 0.0)
    matrix = ggn + 0.1 * np.eye(26)
    update = after - before
    direction = update - float(info.momentum) * previous
    slope = matrix @ update + gradient

    def cosine(vector):
        return abs(slope @ vector) / np.linalg.norm(gradient) / np.linalg.norm(vector)

    for is_chosen, vector in zip(chosen, (direction, previous), strict=True):
        if is_chosen:
            assert cosine(vector) <= 1e-12
        else:
            assert cosine(vector) > 1e-3
    if not choose_learning_rate:
        assert float(info.learning_rate) == 0.3
    if not choose_momentum:
        assert float(info.momentum) == 0.5


def test_momentum_is_chosen_given_the_norm_constraint():
    optimizer = plain_kfac(
        0.3,
        QUADRATIC,
        0.1,
        fisher=kfac.Exact(),
        inverse_period=1,
        ema=0.0,
        norm_constraint=1e-3,
    )
    model = regressor()
    state = optimizer.init(model)
    for index in range(2):
        before, previous = parameters(model), parameters(velocity_of(state, model))
        batch = make_targets(index)
        model, state, info = stepped(optimizer, squared, model, state, *batch)
    x, y = map(np.asarray, make_targets(1))
    gradient, ggn, factors = derivatives(squared_terms, before, x, y, 0.0)
    direction = natural_direction(factors, gradient, [0.1] * 2, factored=True)
    # Active: the norm of the part that is new is the limit.
    scale = np.sqrt(1e-3 / -(direction @ gradient))
    assert scale < 0.9 * 0.3 and float(info.learning_rate) == 0.3
    update = parameters(model) - before
    momentum = float(info.momentum)
    expected = scale * direction + momentum * previous
    assert np.linalg.norm(update - expected) <= 1e-12 * np.linalg.norm(update)
    slope = (ggn + 0.1 * np.eye(26)) @ update + gradient
    for vector, orthogonal in ((previous, True), (direction, False)):
        cosine = slope @ vector / np.linalg.norm(gradient) / np.linalg.norm(vector)
        assert abs(cosine) <= 1e-12 if orthogonal else abs(cosine) > 1e-3
    assert momentum != 0


def test_the_four_choices_differ():
    ends = [third_step(a, b)[1] for a in (True, False) for b in (True, False)]
    for i, a in enumerate(ends):
        for b in ends[:i]:
            assert np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(b)


def test_least_squares_in_one_step():
    x, y = make_targets(number=12)

    def distance(damping):
        model = make_linear()
        state = start(explicit, model, damping=damping)
        model, state, info = stepped(explicit, squared, model, state, x, y)
        expected = np.linalg.lstsq(bar(np.asarray(x)), np.asarray(y), rcond=None)[0].T
        got = parameters(model).reshape(2, 4)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        return error, float(info.learning_rate), float(info.momentum)

    error, learning_rate, momentum = distance(0.0)
    assert error <= 1e-12 and momentum == 0
    assert learning_rate == pytest.approx(1, rel=1e-12)
    error, learning_rate, _ = distance(1.0)
    assert error > 1e-2 and abs(learning_rate - 1) > 1e-2


def changed(function, tree):
    return jtu.tree_map(lambda a: jnp.asarray(function(np.asarray(a))), tree)


def test_parallel_directions():
    """A previous update that adds nothing is not taken again; any other is."""
    x, y = make_targets()
    model = regressor()
    state = explicit.init(model)
    alone, after, info = stepped(explicit, squared, model, state, x, y)

    def with_previous(velocity):
        repeated = eqx.tree_at(lambda s: s.velocity, state, velocity)
        got, _, got_info = stepped(explicit, squared, model, repeated, x, y)
        return parameters(got), float(got_info.momentum)

    for scale in (-3.0, 1e-5, 1e5):
        got, momentum = with_previous(changed(lambda v: scale * v, after.velocity))
        assert momentum == 0
        np.testing.assert_allclose(got, parameters(alone), rtol=1e-10)

    nearly = changed(lambda v: v + 1e-3 * v**2, after.velocity)
    got, momentum = with_previous(nearly)
    assert momentum != 0
    assert np.linalg.norm(got - parameters(alone)) > 1e-6 * np.linalg.norm(got)


def test_steps_are_invariant_to_affine_inputs():
    """... also where learning rate and momentum choose themselves: the function after
    three steps at damping 0 does not depend on the coordinates of its inputs."""
    model = regressor()
    rng = np.random.default_rng(0)
    matrix, shift = np.eye(3) + 0.5 * rng.normal(size=(3, 3)), rng.normal(size=3)
    first = model.layers[0]
    weight = np.asarray(first.weight) @ np.linalg.inv(matrix)
    transformed = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias),
        model,
        (jnp.asarray(weight), jnp.asarray(first.bias - weight @ shift)),
    )

    def run(damping, net, coordinates):
        state, numbers = start(explicit, net, damping=damping), []
        for index in range(3):
            x, y = make_targets(index)
            batch = jnp.asarray(coordinates(np.asarray(x))), y
            state = unwatched(state)  # The loss of the third batch is very large.
            net, state, info = stepped(explicit, squared, net, state, *batch)
            assert not bool(info.rejected)
            numbers.append((float(info.learning_rate), float(info.momentum)))
        x, _ = make_targets(10)
        outputs = eqx.filter_jit(eqx.filter_vmap(net))(coordinates(np.asarray(x)))
        return np.asarray(outputs), np.array(numbers)

    def differences(damping):
        a = run(damping, model, lambda x: x)
        b = run(damping, transformed, lambda x: x @ matrix.T + shift)
        assert np.all(a[1][1:, 1] != 0)  # Momentum takes part.
        return [np.linalg.norm(p - q) / np.linalg.norm(q) for p, q in zip(a, b)]

    assert np.max(differences(0.0)) <= 1e-8
    assert min(differences(1.0)) > 1e-3


#
# The rule for the damping
#

LOWER, UPPER = 0.25, 0.75
decisions = [
    (-1e300, "more"),
    (-1.0, "more"),
    (0.0, "more"),
    (np.nextafter(LOWER, 0), "more"),
    (LOWER, "same"),
    (0.5, "same"),
    (UPPER, "same"),
    (np.nextafter(UPPER, 1), "less"),
    (1.0, "less"),
    (1e300, "less"),
    (float("nan"), "more"),
    (float("inf"), "more"),
    (float("-inf"), "more"),
]


@eqx.filter_jit
def ruled(rule, damping, ratio):
    return rule(damping, ratio)


@pytest.mark.parametrize("decay,interval", [(0.95, 5), (0.5, 1)])
@pytest.mark.parametrize("ratio,decision", decisions)
def test_decision(ratio, decision, decay, interval):
    rule = kfac.LevenbergMarquardt(1.0, decay, interval)
    factor = {"more": decay**-interval, "same": 1.0, "less": decay**interval}[decision]
    for damping in (1e-3, 7.0):
        got = ruled(rule, jnp.array(damping), jnp.array(ratio))
        assert float(got) == pytest.approx(damping * factor, rel=1e-14)
        assert (float(got) == damping) == (decision == "same")


def test_other_thresholds():
    rule = kfac.LevenbergMarquardt(1.0, lower=0.0, upper=0.5)
    one, given = jnp.array(1.0), map(jnp.array, (-0.1, 0.1, 0.6))
    changes = [float(ruled(rule, one, ratio)) for ratio in given]
    assert changes[0] > 1 and changes[1] == 1 and changes[2] < 1


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_bounds(ratio):
    rule = kfac.LevenbergMarquardt(1.0, minimum=0.5, maximum=2.0)
    damping = jnp.array(1.0)
    for _ in range(10):
        new = ruled(rule, damping, jnp.array(ratio))
        assert 0.5 <= float(new) <= 2.0
        assert float(new) != float(damping) or float(new) in (0.5, 2.0)
        damping = new
    assert float(damping) == (2.0 if ratio == 0 else 0.5)


# One after the other, from a damping of 1, halved or doubled: (ratio, share, the next).
NEGLIGIBLE = 0.1
with_share = [
    (1.0, 0.2, 0.5),
    (1.0, NEGLIGIBLE, 0.25),
    (1.0, np.nextafter(NEGLIGIBLE, 0), 0.25),
    (1.0, 0.0, 0.25),
    (0.5, 0.0, 0.25),
    (0.5, 1.0, 0.25),
    (0.1, 0.0, 0.5),
    (0.1, 1.0, 1.0),
    (0.0, 0.0, 2.0),
    (float("nan"), 0.0, 4.0),
    (float("inf"), 0.0, 8.0),
    (float("-inf"), 0.0, 16.0),
    (1.0, float("inf"), 8.0),
    (1.0, float("nan"), 4.0),
    (1.0, 0.09, 4.0),
]


@eqx.filter_jit
def ruled_by_share(rule, damping, ratio, share):
    return rule.given_share(damping, ratio, share)


@pytest.mark.parametrize("negligible", [NEGLIGIBLE, jnp.array(NEGLIGIBLE)])
def test_a_negligible_damping_does_not_fall(negligible):
    rule = kfac.LevenbergMarquardt(1.0, 0.5, 1, negligible=negligible)
    always = kfac.LevenbergMarquardt(1.0, 0.5, 1)
    damping = jnp.array(1.0)
    for ratio, share, expected in with_share:
        numbers = damping, jnp.array(ratio), jnp.array(share)
        assert float(ruled_by_share(always, *numbers)) == ruled(always, *numbers[:2])
        damping = ruled_by_share(rule, *numbers)
        assert float(damping) == expected


@pytest.mark.parametrize("damping,expected", [(0.1, 0.5), (3.0, 2.0), (1.0, 1.0)])
def test_a_negligible_damping_has_bounds(damping, expected):
    """... even if the state was given another number."""
    bounds = dict(minimum=0.5, maximum=2.0)
    rule = kfac.LevenbergMarquardt(1.0, 0.5, 1, **bounds, negligible=NEGLIGIBLE)
    new = ruled_by_share(rule, jnp.array(damping), jnp.array(1.0), jnp.array(0.0))
    assert float(new) == expected


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_due_in_the_last_step_of_every_interval(interval):
    rule = kfac.LevenbergMarquardt(1.0, interval=interval)
    due = list(jax.jit(jax.vmap(rule.due))(np.arange(10)))
    assert due == [step % interval == interval - 1 for step in range(10)]


#
# Calibration
#


def first_measures(damping, x, y):
    """The reduction ratio of a first step and the share of the damping in it, by dense
    matrices."""
    theta = parameters(regressor())
    x, y = np.asarray(x), np.asarray(y)
    gradient, ggn, factors = derivatives(softmax_terms, theta, x, y, 0.0)
    direction = natural_direction(factors, gradient, [damping] * 2, factored=True)
    matrix = ggn + damping * np.eye(26)
    scale = -(gradient @ direction) / (direction @ matrix @ direction)
    update = scale * direction
    before = objective(softmax_terms, theta, x, y, 0.0)
    after = objective(softmax_terms, theta + update, x, y, 0.0)
    predicted = update @ matrix @ update / 2 + gradient @ update
    share = damping * (update @ update) / (update @ matrix @ update)
    return (after - before) / predicted, share


def calibrate(damping, rule, x, y):
    """What repeating the rule before the first step comes to, and how often it was."""
    last, repeated = 0, 0
    lower, upper, decay = map(float, (rule.lower, rule.upper, rule.decay))
    while repeated < rule.calibration:
        ratio, share = first_measures(damping, x, y)
        change = 1 if ratio < lower else -1 if ratio > upper else 0
        if rule.negligible is not None and share < float(rule.negligible):
            change = max(change, 0)
        new = damping * decay**-change
        repeated += 1
        if change == 0:
            break
        if change * last < 0:
            return max(new, damping), repeated, "turned"
        damping, last = new, change
    return damping, repeated, "stopped" if change == 0 else "exhausted"


def calibrating(calibration, **choices):
    """(Arrays: compiled once for every number of repetitions.)"""
    numbers = dict(decay=0.5, lower=0.25, upper=0.75) | choices
    arrays = {k: jnp.array(v) for k, v in numbers.items()}
    rule = kfac.LevenbergMarquardt(1.0, interval=1, calibration=calibration, **arrays)
    optimizer = plain_kfac(QUADRATIC, QUADRATIC, rule, fisher=kfac.Exact())
    return optimizer, rule


calibrations = [
    (40, dict(), 1e6, "stopped"),
    (40, dict(), 1e-6, "stopped"),
    (40, dict(), 1e-1, None),
    (40, dict(lower=0.745, decay=0.1), 1e6, "turned"),
    (40, dict(lower=0.745, decay=0.1), 1e-6, "turned"),
    (40, dict(negligible=0.999), 1e6, "stopped"),
    (40, dict(negligible=0.0), 1e6, "stopped"),
    (3, dict(), 1e6, "exhausted"),
    (3, dict(), 1e-6, "exhausted"),
]


@pytest.mark.parametrize("number,choices,damping,end", calibrations)
def test_calibration_equals_an_explicit_loop(number, choices, damping, end):
    x, y = make_targets(5)
    optimizer, rule = calibrating(number, **choices)
    model = regressor()
    state = start(optimizer, model, damping=damping)
    new, state, info = stepped(optimizer, softmax, model, state, x, y)
    expected, repeated, why = calibrate(damping, rule, x, y)
    assert float(info.damping) == pytest.approx(expected, rel=1e-12)
    assert end in (why, None)
    if abs(np.log10(damping)) > 5:  # It mattered.
        assert abs(np.log(float(info.damping) / damping)) > 1.5
        assert repeated > 2
    # The step itself has the calibrated damping, and later steps have no more of this.
    ratio, share = first_measures(expected, x, y)
    assert float(info.reduction_ratio) == pytest.approx(ratio, rel=1e-6)
    ruled = float(rule.given_share(info.damping, info.reduction_ratio, share))
    _, _, info = stepped(optimizer, softmax, new, state, x, y)
    assert float(info.damping) == ruled


def test_calibration_makes_up_for_a_bad_start():
    """... from either side, up to the width between the thresholds."""
    found = {}
    for damping in (1e6, 1e-6):
        optimizer, _ = calibrating(40)
        model = regressor()
        state = start(optimizer, model, damping=damping)
        _, _, info = stepped(optimizer, softmax, model, state, *make_targets(5))
        assert 0.25 <= float(info.reduction_ratio) <= 0.75
        assert float(info.new_loss) < float(info.loss)
        found[damping] = float(info.damping)
    assert 1 <= found[1e6] / found[1e-6] < 100


def calibrated_with(negligible):
    optimizer, _ = calibrating(40, negligible=negligible)
    model = regressor()
    state = start(optimizer, model, damping=1e6)
    _, _, info = stepped(optimizer, softmax, model, state, *make_targets(5))
    return float(info.damping)


def test_calibration_stops_where_the_damping_is_negligible():
    assert calibrated_with(0.999) > 10 * calibrated_with(0.0)


@pytest.mark.parametrize("rate", [QUADRATIC, 0.01], ids=["ruled", "given"])
def test_the_share_is_that_of_the_promised_descent(rate):
    """... of a first step, by dense matrices: just below it and just above."""
    x, y = make_targets(5)
    theta = parameters(regressor())
    gradient, ggn, _ = derivatives(
        squared_terms, theta, np.asarray(x), np.asarray(y), 0.0
    )

    def run(negligible):
        choices = dict(lower=0.0, upper=0.0, negligible=jnp.array(negligible))
        rule = kfac.LevenbergMarquardt(1.0, 0.5, 1, **choices)
        optimizer = plain_kfac(rate, 0.0, rule, fisher=kfac.Exact())
        model = regressor()
        state = optimizer.init(model)
        return stepped(optimizer, squared, model, state, x, y), theta

    (new, state, info), before = run(0.0)
    update = parameters(new) - before
    damping = float(info.damping)
    assert damping == 1.0 and float(state.damping) == 0.5
    promised = -(gradient @ update + update @ ggn @ update / 2)
    promised -= damping * (update @ update) / 2
    share = damping * (update @ update) / 2 / promised
    assert 1e-6 < share < 0.9
    for factor, expected in ((1 - 1e-6, 0.5), (1 + 1e-6, 1.0)):
        assert float(run(factor * share)[0][1].damping) == expected


def test_a_rejected_step_raises_a_negligible_damping():
    rule = kfac.LevenbergMarquardt(1.0, 0.5, 1, negligible=1.0)
    optimizer = plain_kfac(QUADRATIC, QUADRATIC, rule, fisher=kfac.Exact())
    model = regressor()
    state = optimizer.init(model)
    dampings = []
    for index in range(4):
        x, y = make_targets(index)
        x = x * (jnp.nan if index == 1 else 1)
        model, state, info = stepped(optimizer, squared, model, state, x, y)
        assert bool(info.rejected) == (index == 1)
        dampings.append(float(state.damping))
    assert dampings[0] >= 1.0 and dampings[1] == 2 * dampings[0]
    assert dampings == sorted(dampings)  # Its share is below one.


def test_calibration_waits_for_a_finite_batch():
    optimizer, rule = calibrating(40)
    model, (x, y) = regressor(), make_targets(5)
    state = start(optimizer, model, damping=1e6)
    model, state, info = stepped(optimizer, softmax, model, state, x * jnp.nan, y)
    assert bool(info.rejected) and float(info.damping) == 1e6
    assert float(state.damping) == 2e6
    _, _, info = stepped(optimizer, softmax, model, state, x, y)
    assert float(info.damping) == pytest.approx(calibrate(2e6, rule, x, y)[0], rel=1e-12)


#
# Steps that are not taken
#

# One optimizer, compiled once, whose numbers the tests change.
guarded = plain_kfac(
    0.1,
    0.9,
    kfac.LevenbergMarquardt(1e-2, interval=5),
    fisher=kfac.Exact(),
    inverse_period=1,
    max_increase=jnp.array(jnp.inf),
    weight_decay=kfac.WeightDecay(0.2, is_weight),
    averaging=0.9,
)


def with_cliff(model, x, y, beyond):
    """A loss that is `beyond` where any parameter is large."""
    largest = jnp.max(jnp.abs(jnp.concatenate([p.ravel() for p in leaves(model)])))
    penalty = jax.lax.stop_gradient(jnp.where(largest > 1e3, beyond, 0.0))
    return squared(model, x, y) + penalty


def allowing(most):
    """The guarded optimizer, with another threshold."""
    return eqx.tree_at(lambda o: o.guard.tolerance, guarded, jnp.array(most, float))


def after_two_steps(**numbers):
    model = regressor()
    state = start(guarded, model, **numbers)
    for index in range(2):
        batch = *make_targets(index), jnp.array(0.0)
        model, state, info = stepped(guarded, with_cliff, model, state, *batch)
        assert not bool(info.rejected)
    return model, state


MANY = 1e5  # A learning rate that leads nowhere.
attempts = [
    # max_increase, learning_rate, loss beyond the cliff, whether the step is rejected
    (0.0, 0.01, 0.0, False),
    (0.0, MANY, 0.0, True),
    (0.0, MANY, np.inf, True),
    (0.0, MANY, np.nan, True),
    (0.0, MANY, -1e300, False),
    (1e300, MANY, 0.0, False),
    (1e300, MANY, np.inf, True),
    (np.inf, MANY, 0.0, False),
    (np.inf, MANY, np.inf, True),
    (np.inf, MANY, -np.inf, True),
    (np.inf, MANY, np.nan, True),
]


@pytest.mark.parametrize("most,learning_rate,beyond,rejected", attempts)
def test_step_is_rejected(most, learning_rate, beyond, rejected):
    model, state = after_two_steps()
    state = set_number(state, "momentum", 0.0)
    state = set_number(state, "learning_rate", learning_rate)
    batch = *make_targets(2), jnp.array(beyond)
    new, after, info = stepped(allowing(most), with_cliff, model, state, *batch)
    assert bool(info.rejected) == bool(info.faults.increase) == rejected
    assert int(after.rejected) == int(after.faults.increase) == int(rejected)
    assert int(jnp.sum(after.faults.each)) == int(rejected)
    assert np.isfinite(float(info.loss)) and int(after.step) == 3
    assert (float(info.new_loss) <= float(info.loss) + most) or rejected
    if rejected:
        assert_same(new, model)  # And is not gone for again.
        assert_same(after.velocity, jax.tree.map(jnp.zeros_like, state.velocity))
        assert_same(after.averaged_parameters, state.averaged_parameters)
        assert float(after.learning_rate) == float(state.learning_rate)
        assert float(info.update_norm) == 0
        assert float(after.damping) == pytest.approx(1e-2 / 0.95**5, rel=1e-14)
    else:
        assert np.all(parameters(new) != parameters(model))
        assert np.all(flat(after.velocity) != flat(state.velocity))
        assert float(after.averaged_parameters.weight) > float(
            state.averaged_parameters.weight
        )
        assert float(info.update_norm) > 0
        assert float(after.damping) == 1e-2  # The rule is not due.


def test_the_threshold_is_that_of_the_increase():
    model, state = after_two_steps(momentum=0.0)
    state = set_number(state, "learning_rate", 30.0)
    batch = *make_targets(2), jnp.array(0.0)
    _, _, info = stepped(guarded, with_cliff, model, state, *batch)
    increase = float(info.new_loss - info.loss)
    assert increase > 0
    for factor in (1 + 1e-9, 1 - 1e-9):
        optimizer = allowing(increase * factor)
        _, _, info = stepped(optimizer, with_cliff, model, state, *batch)
        assert bool(info.rejected) == (factor < 1)


def test_training_after_a_rejected_step_goes_on():
    model, state = after_two_steps()
    batch = *make_targets(2), jnp.array(0.0)
    failing = set_number(state, "learning_rate", MANY)
    same, after, _ = stepped(allowing(0.0), with_cliff, model, failing, *batch)
    after = set_number(set_number(after, "learning_rate", 0.01), "momentum", 0.0)
    new, after, info = stepped(allowing(0.0), with_cliff, same, after, *batch)
    assert not bool(info.rejected) and float(info.new_loss) < float(info.loss)
    assert int(after.rejected) == 1


def test_without_a_limit_only_the_rule_looks():
    """... when it is due. Steps to where the loss is not finite are not taken then."""
    optimizer = eqx.tree_at(lambda o: o.guard, guarded, None)
    model = regressor()
    state = optimizer.init(model)
    for index in range(5):
        if index == 4:
            state = set_number(state, "learning_rate", MANY)
        batch = *make_targets(index), jnp.array(jnp.inf)
        before = model
        model, state, info = stepped(optimizer, with_cliff, model, state, *batch)
        # Not looked at, but for the last one, where the cliff is: that is a fault.
        assert np.isposinf(float(info.new_loss))
        assert bool(info.faults.increase) == (index == 4)
        assert bool(info.rejected) == (index == 4)
    assert_same(model, before)
    assert float(state.damping) == pytest.approx(1e-2 / 0.95**5, rel=1e-14)
    # One step earlier, it is not due: the step is taken.
    state = set_number(optimizer.init(before), "learning_rate", MANY)
    batch = *make_targets(0), jnp.array(jnp.inf)
    model, state, info = stepped(optimizer, with_cliff, before, state, *batch)
    assert not bool(info.rejected) and float(state.damping) == 1e-2
    # From there, the loss itself is a reason.
    same, state, info = stepped(optimizer, with_cliff, model, state, *batch)
    assert bool(info.faults.loss) and not bool(info.faults.increase)
    assert_same(same, model)
    assert float(state.damping) == pytest.approx(1e-2 / 0.95**5, rel=1e-14)


#
# Weight decay, averages
#


@eqx.filter_jit
def loss_after(model, update, x, y):
    return squared(eqx.apply_updates(model, update), x, y).value


def test_decoupled_weight_decay():
    """Weights shrink by learning rate times decay, beside the update."""
    model, state = after_two_steps()
    batch = *make_targets(2), jnp.array(0.0)
    ends = []
    for decay in (0.0, 0.2, 0.7):
        state = set_number(state, "weight_decay", decay)
        new, after, info = stepped(guarded, with_cliff, model, state, *batch)
        velocity = velocity_of(after, model)
        expected = parameters(velocity) - 0.1 * decay * MASKED * parameters(model)
        got = parameters(new) - parameters(model)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-15)
        norm = np.linalg.norm(parameters(velocity))
        assert float(info.update_norm) == pytest.approx(norm, rel=1e-12)
        ends.append((parameters(new), parameters(velocity)))
        # The loss is looked at where the update leads, as the model of it is.
        loss = float(loss_after(model, velocity, *make_targets(2)))
        assert float(info.new_loss) == pytest.approx(loss, rel=1e-12)
    for end, velocity in ends[1:]:
        assert np.array_equal(velocity, ends[0][1])  # Momentum does not see it.
        assert np.array_equal(end != ends[0][0], MASKED == 1)


class Scaled(eqx.Module):
    """A network, with a parameter beside it that no tag covers."""

    network: eqx.nn.MLP
    scale: jax.Array

    def __call__(self, x):
        return self.network(x) * self.scale


@ft.cache
def steps_with_fallback():
    """Two steps with another learning rate for what no tag covers."""
    optimizer = plain_kfac(
        QUADRATIC,
        0.9,
        1e-2,
        fisher=kfac.Exact(),
        weight_decay=jnp.array(0.2),
        fallback=optax.sgd(0.1),
        max_increase=float("inf"),
    )
    model = Scaled(regressor(), jnp.array(1.5))
    state, found = optimizer.init(model), []
    for index in range(2):
        before, batch = model, make_targets(index)
        model, state, info = stepped(optimizer, squared, model, state, *batch)
        grads = eqx.filter_jit(
            eqx.filter_grad(lambda model, x, y: squared(model, x, y).value)
        )(before, *batch)
        found.append((before, model, grads, velocity_of(state, model), info))
    return found


def test_decay_of_tagged_parameters_only():
    """... with the learning rate that was chosen, and no mask."""
    for before, after, grads, velocity, info in steps_with_fallback():
        assert not bool(info.rejected) and abs(float(info.learning_rate) - 0.1) > 1e-2
        old = parameters(before.network)
        expected = parameters(velocity.network) - float(info.learning_rate) * 0.2 * old
        got = parameters(after.network) - old
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-15)
        change = float(after.scale - before.scale)
        assert change == pytest.approx(-0.1 * float(grads.scale), rel=1e-11)


def test_prediction_with_a_fallback():
    """Of its update, the gradient alone says what it does."""
    _, _, grads, velocity, info = steps_with_fallback()[0]
    # At the minimum along one direction, the model is half of its linear part.
    inner = float(parameters(grads.network) @ parameters(velocity.network))
    other = -0.1 * float(grads.scale) ** 2
    change = float(info.new_loss - info.loss)
    ratio = float(info.reduction_ratio)
    assert ratio == pytest.approx(change / (inner / 2 + other), rel=1e-10)
    assert ratio != pytest.approx(change / (inner / 2), rel=1e-3)


BAD = 4  # In which of the steps below the batch is not finite.


@ft.cache
def averaged_run(decay):
    model = regressor()
    state = start(guarded, model, averaging=decay)
    iterates, rejected = [], []
    for index in range(8):
        x, y = make_targets(index)
        batch = x * (jnp.nan if index == BAD else 1), y, jnp.array(0.0)
        model, state, info = stepped(guarded, with_cliff, model, state, *batch)
        iterates.append(parameters(model))
        rejected.append(bool(info.rejected))
    return model, state, np.array(iterates), rejected


class AfterRejections(kfac.AbstractDamping):
    """Never looks at a ratio."""

    initial: float = 0.1
    calibration: int = 0

    def due(self, step):
        return False

    def __call__(self, damping, ratio):
        return jnp.where(ratio == -jnp.inf, 2 * damping, -1)


def test_a_rule_that_is_never_due_hears_of_rejections():
    optimizer = plain_kfac(0.05, 0.9, AfterRejections(), fisher=kfac.Exact())
    model = regressor()
    state = optimizer.init(model)
    dampings = []
    for index in range(4):
        x, y = make_targets(index)
        x = x * (jnp.nan if index == 2 else 1)
        model, state, info = stepped(optimizer, squared, model, state, x, y)
        assert bool(info.rejected) == (index == 2)
        dampings.append(float(state.damping))
    assert dampings == [0.1, 0.1, 0.2, 0.2]


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_average_of_the_iterates(decay):
    model, state, theta, rejected = averaged_run(decay)
    assert np.flatnonzero(rejected).tolist() == [BAD]

    def mean(taken):
        weights = decay ** np.arange(len(taken))[::-1]
        return weights @ theta[taken] / np.sum(weights)

    taken = [i for i in range(8) if i != BAD]
    averaged = kfac.averaged(model, state)
    assert jtu.tree_structure(averaged) == jtu.tree_structure(model)
    got = parameters(averaged)
    assert np.linalg.norm(got - mean(taken)) <= 1e-13 * np.linalg.norm(got)
    assert np.linalg.norm(theta[BAD] - theta[BAD - 1]) == 0
    if decay == 0:
        np.testing.assert_allclose(got, parameters(model), rtol=1e-14)
        return
    wrong = [
        mean(range(8)),  # The step that was not taken counts.
        mean(taken) * (1 - decay**7),  # Biased towards zero.
        parameters(model),
    ]
    for other in wrong:
        if np.any(other):
            assert np.linalg.norm(got - other) > 1e-3 * np.linalg.norm(got)


def test_average_before_the_first_step():
    model = regressor()
    state = guarded.init(model)
    assert_same(kfac.averaged(model, state), model)
    # A first step that is not taken is not one.
    x, y = make_targets()
    batch = x * jnp.nan, y, jnp.array(0.0)
    same, state, info = stepped(guarded, with_cliff, model, state, *batch)
    assert bool(info.rejected)
    assert_same(kfac.averaged(same, state), model)


class Masked(eqx.Module):
    """A network beside a constant that is infinite, as those of masks are."""

    network: eqx.Module
    mask: jax.Array

    def __call__(self, x):
        return self.network(x) + jnp.max(jax.lax.stop_gradient(self.mask))


def test_average_of_an_infinite_constant():
    model = Masked(regressor(), jnp.array([0.0, -jnp.inf]))
    numbers = dict(averaging=0.9, fallback=optax.sgd(0.1))
    optimizer = kfac.KFAC(0.05, 0.9, 1e-2, fisher=kfac.Exact(), **numbers)
    state = optimizer.init(model)
    for index in range(4):
        x, y = make_targets(index)
        y = jnp.where(index == 0, jnp.nan, y)  # Nothing is taken into the average yet.
        model, state, info = stepped(optimizer, squared, model, state, x, y)
        assert bool(info.rejected) == (index == 0)
    averaged = kfac.averaged(model, state)
    np.testing.assert_array_equal(averaged.mask, [0, -np.inf])
    assert np.all(np.isfinite(parameters(averaged.network)))
    assert np.any(parameters(averaged.network) != parameters(model.network))


def test_average_is_of_the_parameters_after_decay():
    model, state = after_two_steps(weight_decay=0.0)
    batch = *make_targets(2), jnp.array(0.0)
    state = set_number(set_number(state, "averaging", 0.0), "weight_decay", 0.5)
    new, state, _ = stepped(guarded, with_cliff, model, state, *batch)
    averaged = parameters(kfac.averaged(new, state))
    np.testing.assert_allclose(averaged, parameters(new), rtol=1e-14)


#
# Numbers that change
#

numbers = {
    "learning_rate": (0.1, 0.2),
    "momentum": (0.9, 0.5),
    "damping": (1e-2, 0.5),
    "norm_constraint": (1e-2, 1e-4),
    "ema": (0.95, 0.25),
    "weight_decay": (0.2, 0.5),
    "averaging": (0.9, 0.5),
}
bases = {name: base for name, (base, _) in numbers.items()}


def numbered(**choices):
    return plain_kfac(**(bases | choices), fisher=kfac.Exact(), inverse_period=1)


by_number = numbered()


@eqx.filter_jit
@eqx.debug.assert_max_traces(max_traces=1)
def numbered_step(model, state, x, y):
    return by_number.step(squared, model, state, x, y)


def run_numbers(change, step=numbered_step, optimizer=by_number):
    """Model, average and state after three steps."""
    model = regressor()
    state = optimizer.init(model)
    for index in range(3):
        state = change(state, index)
        model, state, _ = step(model, state, *make_targets(index))
    return model, kfac.averaged(model, state), state


@ft.cache
def unchanged():
    return run_numbers(lambda state, index: state)


@pytest.mark.parametrize("name", numbers)
def test_changing_a_number(name):
    """... has its effect, from the next step on, without another trace."""
    _, value = numbers[name]

    def change(state, index):
        return set_number(state, name, value) if index == 1 else state

    *got, state = run_numbers(change)
    *expected, old = unchanged()
    gaps = [relative_rows(parameters(g), parameters(e)) for g, e in zip(got, expected)]
    assert gaps[1] > 1e-5
    assert (gaps[0] > 1e-5) == (name != "averaging")
    assert int(old.rejected) == int(state.rejected) == 0
    assert float(getattr(state, name)) == value


def test_schedules():
    schedules = {n: optax.linear_schedule(a, b, 2) for n, (a, b) in numbers.items()}
    scheduled = numbered(**schedules)

    def change(state, index):
        for name, schedule in schedules.items():
            value = schedule(jnp.array(index, jnp.int32))
            state = set_number(state, name, float(value))
        return state

    def step(*args):
        return stepped(scheduled, squared, *args)

    got = run_numbers(lambda state, index: state, step, scheduled)
    assert_same(got, run_numbers(change), tolerance=1e-11)
    for name, (_, value) in numbers.items():
        assert float(getattr(got[2], name)) == pytest.approx(value)
    gap = relative_rows(parameters(got[1]), parameters(unchanged()[1]))
    assert gap > 1e-3


def test_changing_the_damping_that_adapts():
    """... does not compile again; nor does what a rule itself has written."""
    step = eqx.filter_jit(eqx.debug.assert_max_traces(max_traces=1)(guarded.step))
    model = regressor()
    state, ends = guarded.init(model), []
    batch = *make_targets(), jnp.array(0.0)
    for damping in (1e-2, 5.0):
        # As documented.
        state = eqx.tree_at(lambda s: s.damping, state, jnp.array(damping))
        new, state, info = step(with_cliff, model, state, *batch)
        assert float(info.damping) == damping
        ends.append(parameters(new))
    assert np.linalg.norm(ends[0] - ends[1]) > 1e-3 * np.linalg.norm(ends[0])


def test_the_second_step_is_the_first_program():
    """What a rule chooses is of the type that the state began with."""
    damping = kfac.LevenbergMarquardt(1.0)
    rules = plain_kfac(QUADRATIC, QUADRATIC, damping, fisher=kfac.Exact())
    step = eqx.filter_jit(eqx.debug.assert_max_traces(max_traces=1)(rules.step))
    model = regressor()
    state, batch = rules.init(model), (*make_targets(), jnp.array(0.0))
    for _ in range(2):
        model, state, _ = step(with_cliff, model, state, *batch)


#
# Transformations
#

adaptive = plain_kfac(
    QUADRATIC,
    QUADRATIC,
    kfac.LevenbergMarquardt(10.0, interval=2, calibration=3),
    fisher=kfac.Exact(),
    inverse_period=2,
    max_increase=float("inf"),
    averaging=0.9,
)


def make_layer():
    return kfac.Linear(3, 2, key=jax.random.key(0))


def run_adaptive(step, batches, number=2):
    """Everything after some steps of one layer, and what all of them tell."""
    model = make_layer()
    state, infos = adaptive.init(model), []
    for index in range(number):
        batch = jtu.tree_map(lambda part: part[index], batches)
        model, state, info = step(model, state, *batch)
        infos.append(info)
    return model, state, jtu.tree_map(lambda *parts: jnp.stack(parts), *infos)


def compiled(model, state, *batch):
    return stepped(adaptive, squared, model, state, *batch)


def test_eager_jit_scan_donation_agree():
    batches = many_batches(2)
    got = run_adaptive(compiled, batches)
    assert float(got[2].damping[0]) < 10  # It was calibrated,
    assert np.isfinite(got[2].reduction_ratio[1])  # the rule applied,
    assert float(got[2].momentum[1]) != 0  # and momentum chosen.

    eager = run_adaptive(ft.partial(adaptive.step, squared), batches)
    assert_near_where_finite(got, eager, 1e-12)

    model = make_layer()
    state = adaptive.init(model)
    model, state, _, infos = scan_steps(adaptive, squared, model, state, batches)
    assert_near_where_finite((model, state, infos), eager, 1e-12)

    @eqx.filter_jit(donate="all-except-first")
    def donating(batch, model, state):
        return adaptive.step(squared, model, state, *batch)

    given = []

    def step(model, state, *batch):
        given.append((model, state))
        return donating(batch, model, state)

    assert_near_where_finite(run_adaptive(step, batches), eager, 1e-12)
    assert all(leaf.is_deleted() for leaf in leaves(given[0][0]))
    assert given[0][1].damping.is_deleted()

    other = run_adaptive(compiled, many_batches(2, 2.0))
    assert relative_rows(parameters(other[0]), parameters(eager[0])) > 1e-3


def test_sharded_batch():
    mesh = make_mesh()
    everywhere, split = (NamedSharding(mesh, spec) for spec in (P(), P("batch")))

    def step(model, state, *batch):
        model, state = eqx.filter_shard((model, state), everywhere)
        return compiled(model, state, *jax.device_put(batch, split))

    got = run_adaptive(step, many_batches(2))
    want = run_adaptive(compiled, many_batches(2))
    assert len(got[0].weight.sharding.device_set) == 8
    assert_near_where_finite(got, want, 1e-13)


#
# Errors
#


def raises(error, *phrases):
    pattern = ".*".join(map(re.escape, phrases))
    return pytest.raises(error, match=f"(?s){pattern}")


def test_what_excludes_each_other():
    with raises(ValueError, "`norm_constraint`", "`kfac.QuadraticModel()`", "Leave one"):
        plain_kfac(QUADRATIC, norm_constraint=1e-3)
    plain_kfac(0.1, QUADRATIC, norm_constraint=1e-3)  # There, it means something.
    few = kfac.QuadraticModel(3)
    with raises(ValueError, "two different ones", "examples=None", "examples=3"):
        plain_kfac(QUADRATIC, few)
    plain_kfac(few, kfac.QuadraticModel(3))


needing = [
    dict(learning_rate=QUADRATIC),
    dict(momentum=QUADRATIC),
    dict(damping=kfac.LevenbergMarquardt(1.0)),
    dict(guard=kfac.MaxIncrease()),
    dict(ema=kfac.MovingAverage(0.9, burn_in=1)),
]


@pytest.mark.parametrize("choice", needing, ids=lambda c: next(iter(c)))
def test_what_needs_the_loss_function(choice):
    ((name, value),) = choice.items()
    optimizer = plain_kfac(**(dict(learning_rate=0.1) | choice))
    model = regressor()
    grads, state = eqx.filter(model, eqx.is_inexact_array), optimizer.init(model)
    hint = "needs the loss function", "`KFAC.step`"
    with raises(ValueError, f"`{name}=", *hint):
        optimizer.update(grads, state, model, curvature=None)
    if name not in ("guard", "ema"):
        with raises(ValueError, f"`{name}=", "`kfac.optax_kfac` does not have"):
            kfac.optax_kfac(**(dict(learning_rate=0.1) | choice))


def test_all_that_needs_the_loss_function_is_named():
    with raises(ValueError, "`learning_rate=", "`momentum=", "`damping="):
        kfac.optax_kfac(QUADRATIC, QUADRATIC, kfac.LevenbergMarquardt(1.0))


out_of_range = [
    (kfac.LevenbergMarquardt, "initial", [0, -1.0], "positive"),
    (kfac.LevenbergMarquardt, "decay", [0, 1, 1.5, -0.1, float("nan")], "in (0, 1)"),
    (kfac.LevenbergMarquardt, "lower", [-0.1], "at least 0"),
    (kfac.LevenbergMarquardt, "upper", [-0.1], "at least 0"),
    (kfac.LevenbergMarquardt, "minimum", [0, -1], "positive"),
    (kfac.LevenbergMarquardt, "maximum", [0, -1], "positive"),
    (kfac.LevenbergMarquardt, "negligible", [-0.1, 1.1, float("nan")], "in [0, 1]"),
    (kfac.LevenbergMarquardt, "interval", [0, -1], "at least 1"),
    (kfac.LevenbergMarquardt, "calibration", [-1], "at least 0"),
    (kfac.QuadraticModel, "examples", [0, -1], "at least 1"),
    (kfac.QuadraticModel, "damping_ratio", [0, -1.0], "positive"),
    (kfac.MaxIncrease, "tolerance", [-1e-9], "at least 0"),
    (kfac.WeightDecay, "rate", [-1e-9], "at least 0"),
    (kfac.MovingAverage, "decay", [-0.1, 1.1], "in [0, 1]"),
    (kfac.MovingAverage, "burn_in", [-1], "at least 0"),
    (kfac.Staggered, "period", [0, -1], "at least 1"),
    (kfac.Exact, "examples", [0, -3], "at least 1"),
    (kfac.MonteCarlo, "examples", [0, -3], "at least 1"),
    (kfac.Empirical, "examples", [0, -3], "at least 1"),
    (kfac.KFAC, "weight_decay", [-1e-9], "at least 0"),
    (kfac.KFAC, "averaging", [-0.1, 1.1], "in [0, 1]"),
]
# Integers: where the tests' type checker would answer first.
COUNTS = "interval", "calibration", "examples", "burn_in", "period"
required = {
    kfac.LevenbergMarquardt: dict(initial=1.0),
    kfac.KFAC: dict(learning_rate=0.1),
    kfac.WeightDecay: dict(rate=0.1),
}


@pytest.mark.parametrize(
    "make,name,value,range_",
    [(make, name, v, range_) for make, name, vs, range_ in out_of_range for v in vs],
)
def test_numbers_out_of_range(make, name, value, range_):
    with raises(ValueError, f"`{name}` must be {range_}", str(value)):
        make(**(required.get(make, {}) | {name: value}))


@pytest.mark.parametrize(
    "make,name",
    [(make, name) for make, name, *_ in out_of_range if name not in COUNTS],
)
def test_numbers_of_the_wrong_type(make, name):
    for value in ("0.1", [0.1], jnp.ones(2)):
        with raises(TypeError, f"`{name}` must be a number"):
            make(**(required.get(make, {}) | {name: value}))


@pytest.mark.parametrize("low,high", [("lower", "upper"), ("minimum", "maximum")])
def test_bounds_in_the_wrong_order(low, high):
    kfac.LevenbergMarquardt(1.0, **{low: 0.5, high: 0.5})
    with raises(ValueError, f"`{low}` (0.6)", "must not be above", f"`{high}` (0.5)"):
        kfac.LevenbergMarquardt(1.0, **{low: 0.6, high: 0.5})


NUMBERS = "decay", "lower", "upper", "minimum", "maximum", "negligible"


@pytest.mark.parametrize("name", NUMBERS)
def test_the_rule_has_no_schedules(name):
    """A rule does not know the step: a schedule would fail in the middle of one."""
    with raises(TypeError, f"`{name}` must be a number"):
        kfac.LevenbergMarquardt(1.0, **{name: lambda step: 0.5})


def test_average_of_a_part():
    """What is frozen stays what it is, in the whole model; another model is refused."""
    model = regressor()
    spec = jtu.tree_map(eqx.is_inexact_array, model)
    spec = eqx.tree_at(lambda m: m.layers[0], spec, replace_fn=lambda _: False)
    trained, frozen = eqx.partition(model, spec)

    def loss_fn(trained, x, y):
        return squared(eqx.combine(trained, frozen), x, y)

    optimizer = plain_kfac(0.1, averaging=0.9, fisher=kfac.Exact())
    state = optimizer.init(trained)
    for _ in range(3):
        trained, state, _ = stepped(optimizer, loss_fn, trained, state, *make_targets())
    mean = kfac.averaged(trained, state)
    weights = mean.layers[1].weight, trained.layers[1].weight
    assert not np.allclose(*weights, rtol=1e-9)
    whole = kfac.averaged(eqx.combine(trained, frozen), state)
    assert_same(whole, eqx.combine(mean, frozen))
    with raises(ValueError, "averages of", "does not have"):
        kfac.averaged(frozen, state)


def test_average_of_an_optimizer_that_has_none():
    model = regressor()
    with raises(ValueError, "does not average", "averaging=0.99"):
        kfac.averaged(model, explicit.init(model))


@jax.custom_vjp
def only_backward(x):
    return jnp.tanh(x)


only_backward.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, g: (g * (1 - y**2),))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_without_forward_derivative(micro_batches):
    model, (x, y) = make_linear(), make_targets()

    def loss_fn(model, x, y):
        h = jax.vmap(model)(x)
        return kfac.SquaredError(only_backward(h), y)

    def step(*numbers):
        optimizer = plain_kfac(*numbers, fisher=kfac.Exact())
        state = optimizer.init(model)
        run = eqx.filter_jit(optimizer.step)
        return run(loss_fn, model, state, x, y, micro_batches=micro_batches)

    _, _, info = step(0.1, 0.9, 0.1)
    assert not bool(info.rejected)
    rule = kfac.LevenbergMarquardt(1.0)
    for numbers in ((QUADRATIC,), (0.1, QUADRATIC), (0.1, 0.9, rule)):
        with raises(TypeError, "numbers", "`jax.custom_vjp`", "`jax.custom_jvp`"):
            step(*numbers)
    with raises(TypeError, "kfac.analysis.GaussNewtonOperator", "`jax.custom_jvp`"):
        kfac.analysis.GaussNewtonOperator(loss_fn, model, x, y).as_matrix()


def after_steps(optimizer, number):
    """The last loss of so many steps that all see the same data."""
    model, (x, y) = regressor(), make_targets(7)
    keys = jr.split(jr.key(0), number)

    @eqx.filter_jit
    def train(model):
        arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)

        def step(arrays, key):
            carry = eqx.combine(arrays, static)
            model, state, info = optimizer.step(squared, *carry, x, y, key=key)
            return eqx.filter((model, state), eqx.is_array), info.loss

        return jax.lax.scan(step, arrays, keys)[1]

    return train(model)[-1]


def test_full_batch_is_for_losses_that_fall_far():
    far, near = [after_steps(o, 60) for o in (kfac.KFAC.full_batch(), kfac.KFAC())]
    assert far < 0.1 * near


@ft.cache
def dampings_on_a_line(negligible):
    """Of a loss that is a quadratic function of the parameters: the ratio is one."""
    model = eqx.nn.Linear(3, 2, key=jr.key(0))
    model = kfac.convert(model)
    x, y = jr.normal(jr.key(1), (8, 3)), jr.normal(jr.key(2), (8, 2))
    loss_fn = lambda model, x, y: kfac.SquaredError(jax.vmap(model)(x), y)
    rule = kfac.LevenbergMarquardt(1.0, 0.5, 1, minimum=1e-12, negligible=negligible)
    optimizer = kfac.KFAC.full_batch(damping=rule, fisher=kfac.Exact())
    state, dampings = optimizer.init(model), []
    for _ in range(8):
        model, state, info = stepped(optimizer, loss_fn, model, state, x, y)
        dampings.append(float(state.damping))
    return dampings


def test_without_a_limit_the_damping_falls_forever():
    falling, held = dampings_on_a_line(None), dampings_on_a_line(0.1)
    assert falling == [0.5**n for n in range(1, 9)]
    assert held[0] == 0.5 and 1e-3 < held[-1] == held[-2] and held[-1] > falling[-1]


def test_full_batch_takes_other_choices():
    optimizer = kfac.KFAC.full_batch()
    assert isinstance(optimizer.learning_rate, kfac.QuadraticModel)
    assert isinstance(optimizer.damping, kfac.LevenbergMarquardt)
    assert optimizer.damping.negligible == 0.03 and optimizer.ema == 0.5
    other = kfac.KFAC.full_batch(fisher=kfac.Exact(), curvature_period=1)
    assert isinstance(other.fisher, kfac.Exact) and other.curvature_period == 1
    assert optimizer.curvature_period == 5
    assert kfac.KFAC.full_batch(ema=0.9).ema == 0.9
    with pytest.raises(TypeError, match="unknown"):
        kfac.KFAC.full_batch(unknown=1)


def test_a_region_bounds_no_momentum_that_a_rule_chooses():
    """A number bounds the gradient alone, so that it may."""
    rule = kfac.QuadraticModel()
    with pytest.raises(ValueError, match="Give a number for `momentum`"):
        kfac.KFAC(0.1, rule, 0.03, norm_constraint=kfac.TrustRegion())
    assert kfac.KFAC(0.1, rule, 0.03, norm_constraint=1e-3).momentum is rule


class Capricious(kfac.AbstractStepRule):
    """Chooses the learning rate, and returns anything in the place of the momentum."""

    examples: int | None = None
    damping_ratio: float = 1.0

    def __call__(self, model, given, value):
        rate, _ = model.minimum(given)
        return jnp.stack([rate, jnp.full_like(rate, 1e3)])


def test_what_a_rule_returns_for_a_given_length_does_not_matter():
    model = make_linear()
    damping = kfac.LevenbergMarquardt(1e-9, interval=1)
    optimizer = kfac.KFAC(Capricious(), 0.0, damping, fisher=kfac.Exact())
    _, _, info = stepped(
        optimizer, squared, model, optimizer.init(model), *make_targets(0)
    )
    np.testing.assert_allclose(info.reduction_ratio, 1, rtol=1e-6)


class Offset(eqx.Module):
    layer: kfac.Linear
    offset: jax.Array

    def __call__(self, x):
        return self.layer(x) + 1e-3 * self.offset


def test_the_share_of_the_damping_is_that_of_the_tagged_parameters():
    """However far the fallback moves the others."""
    model = Offset(make_linear(), jnp.zeros(2))
    rule = kfac.QuadraticModel()
    damping = kfac.LevenbergMarquardt(1e-4, interval=1, negligible=0.03)
    for rate in (0.0, 3e4):
        optimizer = kfac.KFAC(
            rule, rule, damping, fisher=kfac.Exact(), fallback=optax.sgd(rate)
        )
        _, state, _ = stepped(
            optimizer, squared, model, optimizer.init(model), *make_targets(0)
        )
        assert float(state.damping) == 1e-4


def test_equal_numbers_are_no_rule():
    assert "0.5, momentum 0.5" in str(kfac.KFAC(0.5, 0.5))
    rule = kfac.QuadraticModel()
    assert "and momentum by Quadratic" in str(kfac.KFAC(rule, rule, 0.03))
