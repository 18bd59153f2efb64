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
from .helpers import (
    arrays,
    assert_near,
    close,
    leaves,
    make_mesh,
    normal,
    softmax,
    squared,
    stepped,
)
from .plain import plain_kfac


BATCH, D_IN, D_OUT = 16, 4, 3
TOLERANCE = 1e-10


@ft.cache
def make_model(seed=0):
    make = eqx.filter_jit(eqx.nn.MLP)
    return kfac.convert(make(D_IN, D_OUT, 5, 1, jnp.tanh, key=jr.key(seed)))


def data(seed=1, batch=BATCH):
    y = np.random.default_rng(seed).integers(D_OUT, size=batch)
    return normal(batch, D_IN, seed=seed), jnp.asarray(y)


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


@eqx.filter_jit
def derivatives(loss_fn, plain, model, x, y):
    """Value, gradient and a Hessian-vector product, of both; curvature."""
    estimate = lambda fn: kfac.value_grad_and_curvature(fn, kfac.Exact())(model, x, y)
    value, grads, curvature = estimate(loss_fn)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    curved = kfac.analysis.HessianOperator(loss_fn, model, x, y).mv(params)
    slope = jax.value_and_grad(lambda p: plain(eqx.combine(p, static), x, y))
    (want, slope), (_, want_curved) = jax.jvp(slope, (params,), (params,))
    _, *others = estimate(constant)
    return (value, grads, curved), (want, slope, want_curved), curvature, others


@pytest.mark.parametrize(
    "loss_fn, plain", [(focal, quotient), (with_others, quotient_and_others)]
)
def test_gradient_of_weights_that_depend_on_the_model(loss_fn, plain):
    got, want, curvature, others = derivatives(loss_fn, plain, make_model(), *data())
    assert reference.error(got[0], want[0]) < TOLERANCE
    assert_near(got[1], want[1])
    assert_near(got[2], want[2])
    # Curvature takes them for constants.
    other, same = others
    assert reference.error(other.layers[0].weight, want[1].layers[0].weight) > 0.1
    if loss_fn is focal:
        assert_near(curvature, same)


def test_loss_after_a_step_with_weights_that_depend_on_the_model():
    model, (x, y) = make_model(), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), max_increase=jnp.inf)
    new, _, info = stepped(optimizer, focal, model, optimizer.init(model), x, y)
    loss = eqx.filter_jit(quotient)
    assert reference.error(info.loss, loss(model, x, y)) < TOLERANCE
    assert reference.error(info.new_loss, loss(new, x, y)) < TOLERANCE


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
    assert_near(got, eqx.filter_jit(eqx.filter_value_and_grad(quotient))(model, x, y))


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
    state, loss = optimizer.init(model), eqx.filter_jit(loss_fn)
    for parts in (1, 2):
        parts = dict(micro_batches=parts)
        new, _, info = stepped(optimizer, loss_fn, model, state, x, y, **parts)
        after = loss(new, x, y)
        assert after.count != loss(model, x, y).count
        assert reference.error(info.new_loss, after.value) < TOLERANCE


#
# What was led uphill by momentum
#


def valley(model, x, y):
    y_model = jax.vmap(model)(x)
    return kfac.SquaredError(y_model**2, y)


def test_momentum_that_leads_uphill_is_not_tried_again():
    model = kfac.Linear(2, 2, use_bias=False, key=jr.key(0))
    x, y = normal(8, 2, seed=4), normal(8, 2, seed=5)
    optimizer = plain_kfac(0.1, 0.99, 1e-3, fisher=kfac.Exact(), max_increase=0.0)

    def body(carry, _):
        model, state = carry
        model, state, info = optimizer.step(valley, model, state, x, y**2)
        return (model, state), (info.rejected, state.velocity[".weight"], info.loss)

    scan = jax.jit(lambda *start: jax.lax.scan(body, start, length=100)[1])
    rejected, velocity, loss = map(np.asarray, scan(model, optimizer.init(model)))
    in_a_row = "".join("01"[int(r)] for r in rejected)
    assert "1" in in_a_row and "11" not in in_a_row
    assert not np.any(velocity[rejected])
    assert np.all(np.diff(loss) <= 0)


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


@eqx.filter_jit
def normed_step(optimizer, model, state, bn_state, x, y):
    """With the state of the batch, as it is returned and as it is chosen."""
    model, state, info = optimizer.step(normed_loss, model, state, bn_state, x, y)
    return model, state, info.aux, info.select(info.aux, bn_state), info.rejected


@pytest.mark.parametrize("choosing", [True, False])
def test_state_of_a_batch_that_was_rejected(choosing):
    model, bn_state = eqx.filter_jit(eqx.nn.make_with_state(Normed))(jr.key(0))
    inference = eqx.filter_jit(eqx.nn.inference_mode(model))
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    state = optimizer.init(model)
    for index in range(6):
        x, y = arrays(data(index))
        x = x.copy()
        x[0, 0] = np.nan if index == 2 else x[0, 0]
        before = arrays(bn_state)
        out = normed_step(optimizer, model, state, bn_state, x, y)
        model, state, returned, chosen, rejected = out
        bn_state = chosen if choosing else returned
        assert bool(rejected) == (index == 2)
        pairs = zip(arrays(bn_state), before, strict=True)
        assert any(not np.array_equal(*pair) for pair in pairs) == (
            index != 2 or not choosing
        )
    finite = all(np.all(np.isfinite(a)) for a in arrays(bn_state))
    out, _ = inference(arrays(data())[0][0], bn_state)
    assert finite == bool(np.all(np.isfinite(out))) == choosing


def test_choosing():
    model, (x, y) = make_model(), data()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    new = dict(a=np.array([1, 2]), b=np.full(2, np.nan), c="new", d=None, e=3)
    new = {k: jnp.asarray(v) if k in "ab" else v for k, v in new.items()}
    old = dict(a=np.array([3, 4]), b=jax.device_put(np.ones(2)), c="old", d=None, e=4)
    for scale, want in ((1.0, new), (np.nan, old)):
        state = optimizer.init(model)
        _, _, info = stepped(optimizer, softmax, model, state, x * scale, y)
        got = info.select(new, old)
        assert (got["c"], got["d"], got["e"]) == ("old", None, 4)
        for name in "ab":
            assert got[name].dtype == new[name].dtype
            np.testing.assert_array_equal(got[name], want[name])


#
# Gradients without curvature
#


class Stack(eqx.Module):
    stack: kfac.Linear
    head: kfac.Linear

    def __init__(self, stacked):
        keys = jr.split(jr.key(0))
        make = lambda key: kfac.Linear(D_IN, 5, key=key)
        self.stack = eqx.filter_vmap(make)(jr.split(keys[0], 2 if stacked else 1))
        self.head = kfac.Linear(5, D_OUT, key=keys[1])

    def __call__(self, x):
        use = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return self.head(jnp.tanh(jnp.sum(use(self.stack, x), axis=0)))


make_stack = ft.cache(eqx.filter_jit(Stack))


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


def without_last_member(tree, happens):
    """What is there of the last layer of the stack becomes zero, if it happens."""
    zero = lambda a: a.at[-1].multiply(1 - happens) if eqx.is_inexact_array(a) else a
    return eqx.tree_at(lambda t: t.stack, tree, jtu.tree_map(zero, tree.stack))


@eqx.filter_jit
def update(optimizer, model, x, y, still, zeroed, l2):
    """Whether nothing is moved, and what is said."""
    estimate = kfac.value_grad_and_curvature(certain_loss, kfac.Exact())
    _, grads, curvature = estimate(model, x, y)
    grads = without_last_member(grads, still)
    curvature = without_last_member(curvature, zeroed)
    curvature = eqx.tree_at(lambda c: c.stack.l2, curvature, replace_fn=lambda a: a + l2)
    state = optimizer.init(model)
    updates, state = optimizer.update(grads, state, model, curvature=curvature)
    moves = jnp.stack([jnp.any(u) for u in leaves(updates)])
    return jnp.any(moves), state.faults.unseen, state.rejected


@pytest.mark.parametrize("packed", [False, True], ids=["one", "stacked and packed"])
@pytest.mark.parametrize("name", blocks)
def test_gradients_without_curvature(name, packed):
    model, convert = make_stack(packed), ft.partial(kfac.convert, blocks=blocks[name])
    stack = convert(kfac.revert(model.stack))
    model = eqx.tree_at(lambda m: m.stack, model, stack)
    optimizer = plain_kfac(0.1, packed=packed, inverse_period=1)
    cases = [  # No gradient, no curvature, a penalty; whether that is a fault.
        (0.0, 0.0, 0.0, False),
        (0.0, 1.0, 0.0, True),
        (0.0, 1.0, 0.1, False),
        (1.0, 1.0, 0.0, False),
        (1.0, 0.0, 0.0, False),
    ]
    for *numbers, fault in cases:
        moves, unseen, rejected = update(
            optimizer, model, *data(), *map(jnp.asarray, numbers)
        )
        assert int(unseen) == int(rejected) == fault
        assert bool(moves) != fault


def test_curvature_that_is_given_may_not_be_zero():
    """Nobody has seen the loss function, so it may be the curvature of something else."""
    model, (x, y) = make_model(), data()
    optimizer, step = plain_kfac(0.1, inverse_period=1), eqx.filter_jit(plain_update)
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(certain_loss, kfac.Exact()))
    _, grads, curvature = estimate(model, x, y)
    nothing = jtu.tree_map(jnp.zeros_like, curvature)
    for given, unseen in ((curvature, False), (nothing, True)):
        updates, state = step(optimizer, grads, optimizer.init(model), model, given)
        assert bool(state.faults.unseen) == bool(state.rejected) == unseen
        assert any(map(np.any, leaves(updates))) != unseen


def plain_update(optimizer, grads, state, model, curvature):
    return optimizer.update(grads, state, model, curvature=curvature)


def test_recurrent_curvature_of_nothing():
    @jax.jit
    def is_zero(scale):
        eyes = (scale * jnp.eye(3) for _ in range(4))
        return kfac.factors.SeriesFactors(*eyes, jnp.ones(()), jnp.zeros(())).is_zero()

    assert [bool(is_zero(scale)) for scale in (0.0, 1.0)] == [True, False]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_outputs_without_curvature(micro_batches):
    """The Fisher of outputs that are certain is zero, and the damping is all there is."""
    model, (x, y) = make_stack(True), data()
    optimizer = plain_kfac(0.1, 0.0, 0.02, fisher=kfac.Exact(), inverse_period=1)
    value = lambda model, x, y, scale: certain_loss(model, x, y, scale).value
    for number, certain in ((1.0, False), (1e6, True)):
        state, scale = optimizer.init(model), jnp.asarray(number)
        new, state, info = stepped(
            optimizer,
            certain_loss,
            model,
            state,
            x,
            y,
            scale=scale,
            micro_batches=micro_batches,
        )
        assert not info.rejected and not info.faults.each.any()
        assert bool(jnp.any(state.known)) != certain
        grads = eqx.filter_jit(eqx.filter_grad(value))(model, x, y, scale)
        by_damping = [
            np.allclose(new - old, -0.1 / 0.02 * g, rtol=1e-8, atol=0)
            for new, old, g in zip(*map(leaves, (new, model, grads)), strict=True)
        ]
        assert all(by_damping) if certain else not any(by_damping)


def test_a_classifier_of_large_inputs():
    """The first logits are thousands apart, and most predictions are wrong."""
    model, (x, y), optimizer = make_model(), data(), kfac.KFAC()
    losses, state = [], optimizer.init(model)
    for key in jr.split(jr.key(0), 100):
        model, state, info = stepped(
            optimizer, certain_loss, model, state, x, y, scale=1e4, key=key
        )
        losses.append(float(info.loss))
    assert int(state.rejected) == 0
    assert losses[0] > 1000 and losses[-1] < 0.01 * losses[0]


def test_certain_outputs_are_no_curvature():
    """The next step estimates it anew, whatever the period, and factorises it."""
    model, (x, y) = make_model(), data()
    choices = dict(fisher=kfac.Exact(), curvature_period=10, inverse_period=10)
    optimizer = plain_kfac(0.1, 0.0, 0.02, **choices)

    def step(model, state, scale):
        scale = jnp.asarray(scale)
        return stepped(optimizer, certain_loss, model, state, x, y, scale=scale)

    _, state, _ = step(model, optimizer.init(model), 1e6)
    assert float(state.weight) == 0
    new, state, _ = step(model, state, 1.0)
    assert float(state.weight) == 1
    expected, _, _ = step(model, optimizer.init(model), 1.0)
    for got, want in zip(leaves(new), leaves(expected), strict=True):
        close(got, want)


def test_certain_outputs_say_nothing_of_other_examples():
    """Only the first examples are looked at."""
    model, (x, y) = make_model(), data()
    fisher = kfac.Exact(examples=BATCH // 2)
    optimizer = plain_kfac(0.1, 0.0, 0.02, fisher=fisher)
    scale = jnp.where(jnp.arange(BATCH)[:, None] < BATCH // 2, 1e6, 1.0)
    loss_fn = lambda model, x, y, scale: certain_loss(model, x, y, scale)
    new, _, info = stepped(optimizer, loss_fn, model, optimizer.init(model), x, y, scale)
    assert info.faults.waiting and not info.rejected
    assert all(map(np.array_equal, leaves(new), leaves(model)))


class Experts(eqx.Module):
    """The last one of the stack is used by examples that say so."""

    stack: kfac.Linear
    head: kfac.Linear

    def __init__(self):
        base = make_stack(True)
        self.stack, self.head = base.stack, base.head

    def __call__(self, x, expert):
        use = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return self.head(jnp.tanh(use(self.stack, x)[expert]))


def routed(model, x, expert, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x, expert), y)


ROUTES = [0, 1, 1, 1]  # At every step; curvature is estimated at each third.


def run_experts(optimizer, micro_batches=1):
    model = kfac.convert(Experts())
    state, trace = optimizer.init(model), []
    for i, most in enumerate(ROUTES):
        x, y = data(seed=i)
        expert = jnp.asarray(np.arange(BATCH) % 2 * most)
        batch = dict(key=jr.key(i), micro_batches=micro_batches)
        new, state, info = stepped(optimizer, routed, model, state, x, expert, y, **batch)
        moved = [np.any(a != b, axis=(1, 2)) for a, b in _weights(new, model)]
        trace.append((moved[0].tolist(), info.faults))
        model = new
    return model, trace


def _weights(new, old):
    return [(np.asarray(new.stack.weight), np.asarray(old.stack.weight))]


@pytest.mark.parametrize("kind", ["matrices", "rows", "packed", "micro-batches", "turns"])
def test_an_expert_without_curvature_waits(kind):
    """The other layers move; and the first curvature of it is used at once."""
    choices = dict(fisher=kfac.Exact(), curvature_period=3)
    choices |= dict(by_rows=kind == "rows", packed=kind == "packed")
    period = kfac.Staggered(100) if kind == "turns" else 100
    parts = 2 if kind == "micro-batches" else 1
    rare = plain_kfac(0.1, inverse_period=period, **choices)
    model, trace = run_experts(rare, parts)
    waits = [False, True, True, False]
    assert [bool(faults.waiting) for _, faults in trace] == waits
    assert not any(bool(faults.rejecting) for _, faults in trace)
    assert [moved for moved, _ in trace] == [[True, False]] * 3 + [[True, True]]
    expected, _ = run_experts(plain_kfac(0.1, inverse_period=3, **choices), parts)
    scale = np.linalg.norm(model.stack.weight[1] - Experts().stack.weight[1])
    error = np.linalg.norm(model.stack.weight[1] - expected.stack.weight[1])
    assert error < 1e-8 * scale


def test_an_expert_that_some_examples_do_not_estimate_waits():
    """Of the first examples, the one of the second expert is none."""
    choices = dict(fisher=kfac.Exact(examples=1), curvature_period=1, inverse_period=1)
    optimizer, model = plain_kfac(0.1, **choices), kfac.convert(Experts())
    x, y = data()
    expert = jnp.asarray(np.arange(BATCH) % 2)
    state = optimizer.init(model)
    new, _, info = stepped(optimizer, routed, model, state, x, expert, y)
    assert bool(info.faults.waiting) and not bool(info.rejected)
    moved = np.any(new.stack.weight != model.stack.weight, axis=(1, 2))
    assert moved.tolist() == [True, False]


@pytest.mark.parametrize("make", [kfac.optax_kfac, kfac.scale_by_kfac])
def test_an_expert_waits_in_optax(make):
    """`kfac.optax_kfac` takes curvature that it gets for that of the same examples."""
    optimizer, model = make(inverse_period=100), kfac.convert(Experts())
    estimate = kfac.value_grad_and_curvature(routed, kfac.Exact())
    x, y = data()

    @eqx.filter_jit
    def update(state, use, known):
        expert = jnp.arange(BATCH) % 2 * use
        _, grads, curvature = estimate(model, x, expert, y)
        given = dict(curvature=curvature if known else None)
        updates, state = optimizer.update(grads, state, leaves_of(model), **given)
        return jnp.linalg.norm(updates.stack.weight, axis=(1, 2)), state

    state = optimizer.init(leaves_of(model))
    sizes = []
    for use, known in ((0, True), (1, False), (1, True)):
        size, state = update(state, jnp.asarray(use), known)
        sizes.append(np.asarray(size))
    assert np.all(sizes[0][:1] > 0) and sizes[1][0] > 0 and sizes[2][1] > 0
    assert sizes[0][1] == sizes[1][1] == 0
    if make is kfac.optax_kfac:
        assert state.faults.waiting == 1 and state.rejected == 0
    else:  # Not the gradient over the damping.
        gradient = eqx.filter_grad(lambda m: routed(m, x, jnp.arange(16) % 2, y).value)
        norm = np.linalg.norm(gradient(model).stack.weight[1])
        assert sizes[2][1] < 0.9 * norm / 0.03


def leaves_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def test_frozen_layers_without_curvature():
    model, (x, y) = make_stack(False), data()
    frozen = jtu.tree_map(eqx.is_array, model)
    frozen = eqx.tree_at(lambda m: m.stack, frozen, False)
    params, static = eqx.partition(model, frozen)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())

    def loss_fn(params, x, y):
        return certain_loss(eqx.combine(params, static), x, y)

    _, _, info = stepped(optimizer, loss_fn, params, optimizer.init(params), x, y)
    assert not bool(info.rejected)


@jax.jit
def faults_on_devices(params, x, y, scale):
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), inverse_period=1)
    static = eqx.filter(make_stack(True), eqx.is_array, inverse=True)
    specs = dict(in_specs=(P(), P("batch"), P("batch"), P()), out_specs=P())

    @ft.partial(jax.shard_map, mesh=make_mesh(), **specs)
    def step(params, x, y, scale):
        model, state = eqx.combine(params, static), optimizer.init(params)
        _, _, info = optimizer.step(certain_loss, model, state, x, y, scale=scale)
        return info.faults

    return step(params, x, y, scale)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_layers_without_curvature_on_several_devices(scale):
    params = eqx.filter(make_stack(True), eqx.is_array)
    faults = faults_on_devices(params, *data(), scale)
    assert not faults.each.any()


def test_penalties_have_no_curvature():
    """A head of zeros: other layers have no gradient yet, but for the penalty."""
    model = make_model()
    head = lambda m: m.layers[-1].weight
    model = eqx.tree_at(head, model, jnp.zeros(head(model).shape))
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


def sized_loss(model, x, y, size):
    return size * softmax(model, x, y)


@eqx.filter_jit
def step_of_size(size):
    model = kfac.cast(make_model(), jnp.float32)
    x, y = data()
    optimizer = plain_kfac(0.1, damping=1e-2 * size, fisher=kfac.Exact())
    state, x = optimizer.init(model), x.astype(jnp.float32)
    return optimizer.step(sized_loss, model, state, x, y, size)


@pytest.mark.parametrize("size", [1e18, 1e30, 1e36])
def test_gradients_whose_squares_overflow(size):
    """Are fine: the step is that of a loss in smaller units."""
    step, size = lambda size: step_of_size(np.asarray(size, np.float32)), np.float32(size)
    (got, _, info), (want, _, small) = step(size), step(1)
    assert not bool(info.rejected)
    norm = np.asarray(info.gradient_norm)
    error = reference.error(norm / size, small.gradient_norm)
    assert error < 1e-5 if size < 1e19 else np.isinf(norm)
    assert_near(got, want, 1e-4)
    _, _, info = step(3e38)
    assert bool(info.rejected) and not bool(info.faults.gradient)


#
# Long runs
#


STEPS = 10_000


def long_run(optimizer, dtype, batches):
    """All steps in one program: what is asked of every one, and the last state."""
    mlp = eqx.filter_jit(eqx.nn.MLP)(2, 1, 2, 1, jnp.tanh, key=jr.key(0))
    params, static = eqx.partition(kfac.cast(kfac.convert(mlp), dtype), eqx.is_array)

    def body(carry, batch):
        params, state = carry
        model, key = eqx.combine(params, static), jr.fold_in(jr.key(1), state.step)
        model, state, info = optimizer.step(squared, model, state, *batch, key=key)
        seen = info.rejected, info.faults, info.loss, state.weight, state.damping
        return (eqx.filter(model, eqx.is_array), state), seen

    start = params, optimizer.init(eqx.combine(params, static))
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
    """The weight of the average after every step: after four bad ones in a row, the
    parameters go back, and the average begins anew."""
    weights, weight, bad = [], 0.0, 0
    for step, fine in enumerate(taken):
        bad = 0 if fine else bad + 1
        if bad == 4:
            weight = 0.0
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
        (
            jnp.float64,
            (0.95, 0),
            dict(curvature_period=2, inverse_period=kfac.Staggered(4)),
        ),
        (
            jnp.float32,
            (1.0, 5),
            dict(curvature_period=7, inverse_period=kfac.Staggered(6)),
        ),
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
    assert all(np.all(np.isfinite(a)) for a in jtu.tree_leaves(end))
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
    assert all(np.all(np.isfinite(a)) for a in jtu.tree_leaves((params, state)))


def test_calibration_waits_for_curvature():
    """Outputs that are certain have none, step after step."""
    model, (x, y) = make_model(), data()
    rule = kfac.LevenbergMarquardt(1.0, interval=5, calibration=20)
    optimizer = kfac.KFAC(1e-9, 0.0, rule, fisher=kfac.Exact())
    state, dampings = optimizer.init(model), []
    for scale in (1e6, 1e6, 1e6, 1.0):
        model, state, info = stepped(
            optimizer, certain_loss, model, state, x, y, scale=jnp.asarray(scale)
        )
        dampings.append(float(info.damping))
    assert dampings[:3] == [1.0] * 3 and dampings[3] < 0.5
