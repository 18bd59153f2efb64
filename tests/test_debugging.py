"""What JAX has for finding mistakes finds none here: on good data there is no NaN, and
nothing is transferred to a device that is not meant to be."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_kfac as kfac

from .helpers import normal, squared, stepped


x, y = normal(8, 3, seed=1), normal(8, 2, seed=2)
rule = kfac.QuadraticModel()


def marquardt(**choices):
    return kfac.LevenbergMarquardt(1.0, **choices)


OPTIMIZERS = {
    "auto": lambda: kfac.KFAC(),
    "Levenberg-Marquardt": lambda: kfac.KFAC(0.1, 0.9, marquardt(interval=2)),
    "calibrated": lambda: kfac.KFAC(0.1, 0.9, marquardt(calibration=3)),
    "quadratic model": lambda: kfac.KFAC(rule, rule),
    "both": lambda: kfac.KFAC(rule, rule, marquardt(interval=2)),
    "guard": lambda: kfac.KFAC(0.1, 0.9, marquardt(), guard=kfac.MaxIncrease()),
    "rejecting": lambda: kfac.KFAC(1e3, 0.0, marquardt(), guard=kfac.MaxIncrease()),
    "numbers": lambda: kfac.KFAC(0.1, 0.9, 0.1, norm_constraint=0.1, weight_decay=0.1),
    "fallback": lambda: kfac.KFAC(fallback=optax.adam(1e-3)),
    "eigenvectors": lambda: kfac.KFAC(solver=kfac.Eigh()),
    "in turn": lambda: kfac.KFAC(inverse_period=kfac.Staggered(5)),
    "schedule-free": lambda: kfac.KFAC(averaging=kfac.ScheduleFree()),
}


@eqx.filter_jit
def make_model():
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    return kfac.convert(mlp)


def run(optimizer, model, keys, between=None):
    state = optimizer.init(model)
    for key in keys:
        model, state, info = stepped(optimizer, squared, model, state, x, y, key=key)
    return state, info


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_nan_on_good_data(name, standard_promotion):
    keys = [jax.random.key(i) for i in range(3)]
    with jax.debug_nans(True):
        state, info = run(OPTIMIZERS[name](), make_model(), keys)
    assert (int(state.rejected) > 0) == (name == "rejecting")
    assert jnp.isfinite(info.loss)


@pytest.mark.parametrize("name", ["both", "auto"])
def test_no_nan_in_an_eager_step(name):
    """Also between operations."""
    optimizer, model = OPTIMIZERS[name](), make_model()
    with jax.debug_nans(True):
        _, _, info = optimizer.step(
            squared, model, optimizer.init(model), x, y, key=jax.random.key(0)
        )
    assert jnp.isfinite(info.loss) and not info.rejected
    if name == "both":
        assert jnp.isposinf(info.reduction_ratio) and jnp.isposinf(info.new_loss)


def test_no_nan_in_what_is_said():
    model, state = make_model(), kfac.KFAC().init(make_model())
    with jax.debug_nans(True):
        assert kfac.verify(squared, model, x[:1], y[:1]).exact
        assert str(kfac.summary(model)) and str(kfac.summary(model, state.curvature))


def test_nan_is_found():
    """Where there is any."""
    optimizer, model = kfac.KFAC(), make_model()
    state, key = optimizer.init(model), jax.random.key(0)
    bad = jnp.asarray(x).at[0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        stepped(optimizer, squared, model, state, bad, y, key=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_transferred(name, standard_promotion):
    """Neither by `init`, nor by a step that is compiled."""
    optimizer, model = OPTIMIZERS[name](), make_model()
    keys = [jax.random.key(i) for i in range(3)]
    run(optimizer, model, keys[:1])
    with jax.transfer_guard("disallow"):
        run(optimizer, model, keys)


@pytest.mark.parametrize("make", [kfac.optax_kfac, kfac.scale_by_kfac])
def test_nothing_is_transferred_by_optax(make):
    params = eqx.filter(make_model(), eqx.is_inexact_array)
    with jax.transfer_guard("disallow"):
        state = make().init(params)
        with pytest.raises(Exception, match="Disallowed"):
            state.step + 1
