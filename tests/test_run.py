"""Whole runs: what may go wrong in them is refused, or named."""

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


BATCH, D_IN, D_OUT = 16, 4, 3
TOLERANCE = 1e-10


def make_model(seed=0):
    return kfac.convert(eqx.nn.MLP(D_IN, D_OUT, 5, 1, jnp.tanh, key=jr.key(seed)))


def data(seed=1, batch=BATCH):
    keys = jr.split(jr.key(seed))
    return jr.normal(keys[0], (batch, D_IN)), jr.randint(keys[1], (batch,), 0, D_OUT)


def assert_same(got, want, tolerance=TOLERANCE):
    got, want = map(lambda t: jtu.tree_leaves(eqx.filter(t, eqx.is_array)), (got, want))
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w)


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
    value, slope = eqx.filter_value_and_grad(plain)(model, x, y)
    estimate = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    got_value, got, curvature = estimate(model, x, y)
    assert reference.error(got_value, value) < TOLERANCE
    assert_same(got, slope)
    hessian = kfac.Hessian(loss_fn, model, x, y)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    plain_slope = jax.grad(lambda p: plain(eqx.combine(p, static), x, y))
    assert_same(hessian.mv(params), jax.jvp(plain_slope, (params,), (params,))[1])
    # Curvature takes them for constants.
    _, other, same = kfac.value_grad_and_curvature(constant, kfac.Exact())(model, x, y)
    assert reference.error(other.layers[0].weight, slope.layers[0].weight) > 0.1
    if loss_fn is focal:
        assert_same(curvature, same)


def test_loss_after_a_step_with_weights_that_depend_on_the_model():
    model, (x, y) = make_model(), data()
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact(), max_increase=jnp.inf)
    new, _, info = optimizer.step(focal, model, optimizer.init(model), x, y)
    assert reference.error(info.loss, quotient(model, x, y)) < TOLERANCE
    assert reference.error(info.new_loss, quotient(new, x, y)) < TOLERANCE


def test_weights_that_depend_on_the_model_on_several_devices():
    model, (x, y) = make_model(), data()
    mesh = jax.make_mesh((8,), ("batch",), (jax.sharding.AxisType.Auto,))
    estimate = kfac.value_grad_and_curvature(focal, kfac.Exact())

    params, static = eqx.partition(model, eqx.is_array)

    def gradient(params, x, y):
        value, grads, _ = estimate(eqx.combine(params, static), x, y)
        return value, eqx.filter(grads, eqx.is_array)

    specs = dict(in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    got = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(params, x, y)
    assert_same(got, eqx.filter_value_and_grad(quotient)(model, x, y))


def test_weights_that_depend_on_the_model_in_micro_batches():
    model, (x, y) = make_model(), data()
    optimizer = kfac.KFAC(0.1, fisher=kfac.Exact())
    state = optimizer.init(model)
    with pytest.raises(ValueError, match="micro_batches=1"):
        optimizer.step(focal, model, state, x, y, micro_batches=2)
    split, *_ = optimizer.step(constant, model, state, x, y, micro_batches=2)
    assert_same(split, optimizer.step(constant, model, state, x, y)[0])
