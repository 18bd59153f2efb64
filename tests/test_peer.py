"""Step by step the same as kfac-jax, an implementation by others, where the two do the
same mathematics. Skipped where kfac-jax is not installed. Its releases up to 0.0.8 do not
run on the JAX that this library needs, only its development version does.

Where the two differ by convention, and what makes them agree:

- Squared error: theirs is twice ours, unless a normal distribution of variance 1 is
  registered.
- Reduction ratio: ours is measured against the quadratic model with damping; theirs
  without, unless `include_damping_in_quad_change`. Where learning rate and momentum are
  both given, theirs measures against the factors, ours against the exact matrix, as
  theirs with `always_use_exact_qmodel_for_damping_adjustment`.
- Where the model promises no descent (a given momentum can go uphill), that is a failure
  for us, and the damping grows; they divide the two increases, and may call it success.
- Damping decays by 0.95 in every step, theirs by 0.9; theirs has no upper bound.
- Burn-in: theirs takes further batches for it, 10 by default, and lets their total weight
  decay once before the first step's own estimate. So here there is none.
- The empirical Fisher: theirs is divided by the number of examples twice.

The rest is the same: the order of estimate, average, factorisation, step and damping
rule, and what is due when; the average without bias; the scale of the factors, with the
bias as the last input; the split of the damping; the L2 coefficient, which is halved in
the loss and added to the damping of preconditioner and quadratic model.
"""

import functools as ft
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from .plain import plain_kfac


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    kfac_jax = pytest.importorskip("kfac_jax")


number_of_steps = 20


def make_model():
    key = jax.random.key(0)
    return kfac.convert(eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=key))


def make_data(loss, step):
    """Another batch at every step, of the same distribution, so that there is something
    to learn."""
    keys = jax.random.split(jax.random.key(step + 1))
    x = jax.random.normal(keys[0], (8, 3))
    signal = jnp.stack([jnp.sin(x[:, 0]), x[:, 1] * x[:, 2]], axis=-1)
    y = signal + 0.1 * jax.random.normal(keys[1], (8, 2))
    return (x, y) if loss == "squared" else (x, jnp.argmax(y, axis=-1))


class Run(NamedTuple):
    """One row for every step."""

    parameters: np.ndarray
    loss: np.ndarray
    learning_rate: np.ndarray
    momentum: np.ndarray
    damping: np.ndarray
    reduction_ratio: np.ndarray  # NaN where it was not measured.


def run_of(rows):
    return Run(*(np.array(column) for column in zip(*rows)))


#
# Ours
#


losses = {"squared": kfac.SquaredError, "softmax": kfac.SoftmaxCrossEntropy}


@ft.cache  # So that equal choices are compiled once.
def objective(loss, l2):
    def loss_fn(model, x, y):
        return losses[loss](jax.vmap(model)(x), y) + kfac.L2(model, l2)

    return loss_fn


def flat(pairs):
    """Weights as `[out, in]`, biases, layer by layer, in one vector."""
    return np.concatenate([np.ravel(array) for pair in pairs for array in pair])


@eqx.filter_jit
def ours_step(optimizer, loss_fn, model, state, x, y):
    return optimizer.step(loss_fn, model, state, x, y)


def run_ours(loss, l2, options):
    optimizer = plain_kfac(**options, fisher=kfac.Exact())
    loss_fn = objective(loss, l2)
    model = make_model()
    state = optimizer.init(model)
    rows = []
    for index in range(number_of_steps):
        batch = make_data(loss, index)
        model, state, info = ours_step(optimizer, loss_fn, model, state, *batch)
        parameters = flat((layer.weight, layer.bias) for layer in model.layers)
        numbers = info.loss, info.learning_rate, info.momentum, info.damping
        measured = (index + 1) % interval_of(optimizer.damping) == 0
        ratio = info.reduction_ratio if measured else np.nan
        rows.append((parameters, *numbers, ratio))
        assert not bool(info.rejected)
    return run_of(rows)


def interval_of(rule):
    return getattr(rule, "interval", number_of_steps + 1)


#
# Theirs
#


def peer_parameters(model):
    return [(layer.weight.T, layer.bias) for layer in model.layers]


def peer_objective(loss, l2):
    def fn(parameters, batch):
        x, y = batch
        for index, (w, b) in enumerate(parameters):
            x = jnp.tanh(x) if index else x
            x = kfac_jax.register_dense(x @ w + b, x, w, b)
        if loss == "squared":
            kfac_jax.register_normal_predictive_distribution(x, y, variance=1.0)
            value = 0.5 * jnp.sum((x - y) ** 2) / len(x)
        else:
            kfac_jax.register_softmax_cross_entropy_loss(x, y)
            value = -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(x)), y])
        squares = sum(jnp.sum(w**2) + jnp.sum(b**2) for w, b in parameters)
        return value + 0.5 * l2 * squares

    return fn


def as_they_like_it(fn):
    """Peers rely on implicit promotion of types and ranks, and may warn."""

    @ft.wraps(fn)
    def wrapper(*args):
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return fn(*args)

    return wrapper


@as_they_like_it
def run_theirs(loss, l2, options):
    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(peer_objective(loss, l2)),
        l2_reg=l2,
        estimation_mode="ggn_exact",
        num_burnin_steps=0,
        **options,
    )
    parameters = peer_parameters(make_model())
    key = jax.random.PRNGKey(0)
    state = optimizer.init(parameters, key, make_data(loss, 0))
    rows = []
    for index in range(number_of_steps):
        batch = make_data(loss, index)
        parameters, state, stats = optimizer.step(parameters, state, key, batch=batch)
        names = "loss", "learning_rate", "momentum", "damping", "rho"
        now = flat((w.T, b) for w, b in parameters)
        rows.append((now, *(float(stats[name]) for name in names)))
    return run_of(rows)


#
# Both
#


def given(value):
    return lambda step: jnp.asarray(value)


class Setting(NamedTuple):
    l2: float
    ours: dict
    theirs: dict


both = dict(use_adaptive_learning_rate=True, use_adaptive_momentum=True)


def marquardt(initial, interval):
    return dict(
        use_adaptive_damping=True,
        include_damping_in_quad_change=True,
        initial_damping=initial,
        damping_adaptation_interval=interval,
        damping_adaptation_decay=0.9,
        max_damping=1e8,
    )


settings = {
    "adaptive": Setting(
        1e-3,
        dict(
            learning_rate=kfac.QuadraticModel(),
            momentum=kfac.QuadraticModel(),
            damping=kfac.LevenbergMarquardt(0.1, decay=0.9, interval=5),
        ),
        dict(**both, **marquardt(0.1, 5)),
    ),
    "adaptive, exact damping": Setting(
        0.0,
        dict(
            learning_rate=kfac.QuadraticModel(damping_ratio=2.0),
            momentum=kfac.QuadraticModel(damping_ratio=2.0),
            damping=kfac.LevenbergMarquardt(0.03, decay=0.9, interval=2),
            solver=kfac.Eigh(),
            inverse_period=3,
            ema=0.8,
        ),
        dict(
            **both,
            **marquardt(0.03, 2),
            use_exact_inverses=True,
            precon_damping_mult=2.0,
            inverse_update_period=3,
            curvature_ema=0.8,
        ),
    ),
    "adaptive learning rate": Setting(
        1e-2,
        dict(
            learning_rate=kfac.QuadraticModel(),
            momentum=0.3,
            damping=kfac.LevenbergMarquardt(0.1, decay=0.9, interval=3),
            inverse_period=1,
        ),
        dict(
            **marquardt(0.1, 3),
            use_adaptive_learning_rate=True,
            momentum_schedule=given(0.3),
            inverse_update_period=1,
        ),
    ),
    "adaptive damping": Setting(
        0.0,
        dict(
            learning_rate=0.1,
            momentum=0.5,
            damping=kfac.LevenbergMarquardt(0.1, decay=0.9, interval=3),
        ),
        dict(
            **marquardt(0.1, 3),
            always_use_exact_qmodel_for_damping_adjustment=True,
            learning_rate_schedule=given(0.1),
            momentum_schedule=given(0.5),
        ),
    ),
    "fixed": Setting(
        1e-2,
        dict(
            learning_rate=0.2,
            momentum=0.7,
            damping=1e-2,
            norm_constraint=1e-3,
            curvature_period=2,
            inverse_period=4,
            ema=0.9,
        ),
        dict(
            learning_rate_schedule=given(0.2),
            momentum_schedule=given(0.7),
            damping_schedule=given(1e-2),
            norm_constraint=1e-3,
            curvature_update_period=2,
            inverse_update_period=4,
            curvature_ema=0.9,
        ),
    ),
}


@ft.cache
def ours(loss, name):
    return run_ours(loss, settings[name].l2, settings[name].ours)


@ft.cache
def theirs(loss, name):
    return run_theirs(loss, settings[name].l2, settings[name].theirs)


def distances(a, b):
    """Of the parameters, relative, step by step."""
    difference = np.linalg.norm(a.parameters - b.parameters, axis=-1)
    return difference / np.linalg.norm(b.parameters, axis=-1)


@pytest.mark.parametrize("name", settings)
@pytest.mark.parametrize("loss", losses)
def test_every_step(loss, name):
    a, b = ours(loss, name), theirs(loss, name)
    assert np.max(distances(a, b)) <= 1e-9
    for field in Run._fields[1:]:
        x, y = getattr(a, field), getattr(b, field)
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10, err_msg=field)


def test_the_runs_are_worth_comparing():
    """Coefficients and damping change, and the damping in both directions; no run comes
    to rest; no two runs are the same."""
    runs = [theirs(loss, name) for loss in losses for name in settings]
    adaptive = theirs("squared", "adaptive")
    change = np.sign(np.diff(adaptive.damping))
    assert set(change) == {-1, 0, 1}
    assert adaptive.learning_rate[0] > 0 and adaptive.momentum[0] == 0
    assert np.std(adaptive.learning_rate) > 0.1 and np.std(adaptive.momentum) > 0.1
    for index, a in enumerate(runs):
        moved = np.linalg.norm(np.diff(a.parameters, axis=0), axis=-1)
        assert np.min(moved) > 1e-3
        for b in runs[:index]:
            assert distances(a, b)[-1] > 1e-3


changes = {
    "average": dict(ema=jnp.array(0.9)),
    "split of the damping": dict(solver=kfac.Eigh()),
    "damping of the preconditioner": dict.fromkeys(
        ("learning_rate", "momentum"), kfac.QuadraticModel(damping_ratio=1.1)
    ),
    "period": dict(inverse_period=4),
    "damping rule": dict(damping=kfac.LevenbergMarquardt(0.1, decay=0.95)),
}


@pytest.mark.parametrize("name", changes)
def test_another_choice_differs(name):
    setting = settings["adaptive"]
    changed = run_ours("squared", setting.l2, setting.ours | changes[name])
    assert distances(changed, theirs("squared", "adaptive"))[-1] > 1e-3


def test_reduction_ratio_without_damping_differs():
    setting = settings["adaptive"]
    options = setting.theirs | dict(include_damping_in_quad_change=False)
    changed = run_theirs("squared", setting.l2, options)
    a, b = changed.reduction_ratio[4], ours("squared", "adaptive").reduction_ratio[4]
    assert abs(a - b) > 1e-2 * abs(b)


def test_uphill():
    """With much momentum, on batches this small, the model promises an increase at some
    step: up to there all is the same, then we raise the damping, and they lower it."""
    setting = settings["adaptive damping"]
    a = run_ours("squared", setting.l2, setting.ours | dict(momentum=0.9))
    options = setting.theirs | dict(momentum_schedule=given(0.9))
    b = run_theirs("squared", setting.l2, options)
    (uphill,) = np.flatnonzero(np.isneginf(a.reduction_ratio))[:1]
    assert np.max(distances(a, b)[: uphill + 1]) <= 1e-9
    np.testing.assert_allclose(a.damping[: uphill + 1], b.damping[: uphill + 1])
    assert b.reduction_ratio[uphill] > 0.75
    before, after = a.damping[uphill], a.damping[uphill + 1]
    assert b.damping[uphill + 1] < before < after


#
# Factors
#


modes = {
    "ggn_exact": kfac.Exact(),
    "fisher_exact": kfac.Exact(),
    "fisher_empirical": kfac.Empirical(),
}


@ft.cache
def our_factors(loss, fisher):
    """(A, G) of every layer."""
    factors = eqx.filter_jit(kfac.curvature(objective(loss, 0.0), fisher))(
        make_model(), *make_data(loss, 0)
    )
    return [(f.input_factor, f.output_factor) for f in factors.layers]


@as_they_like_it
def their_factors(loss, mode):
    estimator = kfac_jax.BlockDiagonalCurvature(peer_objective(loss, 0.0))
    key, batch = jax.random.PRNGKey(0), make_data(loss, 0)
    arguments = peer_parameters(make_model()), batch
    state = estimator.init(key, arguments, None, None, False)
    state = estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, 0.0, len(batch[0]), key, arguments, estimation_mode=mode
    )
    factors = [[f.value for f in block.factors] for block in state.blocks_states]
    more = len(batch[0]) if mode == "fisher_empirical" else 1
    return [(a, g * more) for a, g in factors]


def factor_distances(a, b):
    return [
        np.linalg.norm(x - y) / np.linalg.norm(y)
        for layer_a, layer_b in zip(a, b, strict=True)
        for x, y in zip(layer_a, layer_b, strict=True)
    ]


@pytest.mark.parametrize("mode", modes)
@pytest.mark.parametrize("loss", losses)
def test_factors(loss, mode):
    got, expected = our_factors(loss, modes[mode]), their_factors(loss, mode)
    assert [f.shape for layer in got for f in layer] == [(4, 4), (4, 4), (5, 5), (2, 2)]
    assert np.max(factor_distances(got, expected)) <= 1e-12


@pytest.mark.parametrize("loss", losses)
def test_factors_of_another_kind_differ(loss):
    exact, empirical = (our_factors(loss, f) for f in (kfac.Exact(), kfac.Empirical()))
    inputs, outputs = np.reshape(factor_distances(exact, empirical), (2, 2)).T
    assert np.max(inputs) == 0 and np.min(outputs) > 1e-2


@pytest.mark.parametrize("loss", losses)
def test_factors_of_the_first_step(loss):
    """The optimizer averages the very same factors: after one step, they are the
    average."""
    optimizer = plain_kfac(**settings["adaptive"].ours, fisher=kfac.Exact())
    model = make_model()
    loss_fn, batch = objective(loss, settings["adaptive"].l2), make_data(loss, 0)
    _, state, _ = ours_step(optimizer, loss_fn, model, optimizer.init(model), *batch)
    got = [(f.input_factor, f.output_factor) for f in state.curvature.layers]
    assert np.max(factor_distances(got, their_factors(loss, "ggn_exact"))) <= 1e-12
