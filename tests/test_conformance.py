"""The optax faces, point by point as optax tests its contributed optimizers."""

import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import arrays, assert_same, params_of, squared


D_IN, D_OUT, EXAMPLES = 3, 2, 16


def chained(*args, **kwargs):
    scale = kfac.scale_by_kfac(*args, **kwargs)
    return optax.chain(scale, optax.trace(0.9), optax.scale(-0.1))


# The factory, and its hyper-parameters.
FACES = {
    "kfac": (kfac.optax_kfac, dict(learning_rate=0.1)),
    "constrained": (kfac.optax_kfac, dict(learning_rate=0.1, norm_constraint=0.1)),
    "fallback": (kfac.optax_kfac, dict(learning_rate=0.1, fallback=optax.adam(1e-2))),
    "scale_by_kfac": (kfac.scale_by_kfac, {}),
    "chain": (chained, {}),
}
faces = pytest.mark.parametrize("name", FACES)
pytestmark = pytest.mark.usefixtures("standard_promotion")


class Net(eqx.Module):
    """All parameters are tagged, or all but the last ones."""

    layers: tuple
    scale: jax.Array | None

    def __init__(self, untagged):
        keys = jr.split(jr.key(0))
        self.layers = (kfac.Linear(D_IN, 4, key=keys[0]), kfac.Linear(4, 2, key=keys[1]))
        self.scale = jnp.ones(D_OUT) if untagged else None

    def __call__(self, x):
        x = self.layers[1](jnp.tanh(self.layers[0](x)))
        return x if self.scale is None else x * self.scale


@ft.cache
def make(name):
    """(One of each, of which every function is compiled once.)"""
    factory, hyperparameters = FACES[name]
    return factory(**hyperparameters)


@ft.cache
def make_model(untagged, dtype=jnp.float32):
    model = kfac.cast(jax.device_get(eqx.filter_jit(Net)(untagged)), dtype)
    return jax.device_put(model)


def data(dtype=jnp.float32):
    """A linear teacher: the loss can become zero."""
    rng = np.random.default_rng(0)
    x, teacher = rng.normal(size=(EXAMPLES, D_IN)), rng.normal(size=(D_IN, D_OUT))
    return x.astype(dtype), (0.1 * x @ teacher).astype(dtype)


def estimate(params, model, *batch):
    model = eqx.combine(params, model)
    return kfac.value_grad_and_curvature(squared, kfac.Exact())(model, *batch)


def estimated(name, dtype=jnp.float32):
    return estimates(name == "fallback", dtype)


@ft.cache
def estimates(untagged, dtype):
    model = make_model(untagged, dtype)
    value, grads, curvature = eqx.filter_jit(estimate)(
        params_of(model), model, *data(dtype)
    )
    return params_of(model), value, params_of(grads), curvature


def types(tree):
    leaves, treedef = jtu.tree_flatten(tree)
    return treedef, [(a.shape, a.dtype, a.weak_type) for a in map(jax.typeof, leaves)]


@faces
def test_unexpected_arguments_and_one_trace(name):
    optimizer = make(name)
    params, value, grads, curvature = estimated(name)

    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(params, state, grads, curvature, value):
        extra = dict(curvature=curvature, value=value, unexpected=1)
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    start = params
    for _ in range(3):
        params, state = step(params, state, grads, curvature, value)
    step(start, optimizer.init(start), grads, curvature, value)
    step(start, jax.jit(optimizer.init)(start), grads, curvature, value)


@pytest.mark.parametrize("name", [name for name in FACES if name != "scale_by_kfac"])
def test_converges_within_scan(name):
    optimizer, model = make(name), make_model(name == "fallback")

    def step(carry, _):
        params, state = carry
        value, grads, curvature = estimate(params, model, *data())
        grads = params_of(grads)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return (optax.apply_updates(params, updates), state), value

    start = params_of(model), optimizer.init(params_of(model))
    _, losses = jax.jit(lambda s: jax.lax.scan(step, s, length=400))(start)
    losses = np.asarray(losses)
    assert losses[-1] < 1e-3 * losses[0]


@faces
def test_tree_map_params(name):
    optimizer = make(name)
    params, _, grads, curvature = estimated(name)
    state = optimizer.init(params)
    _, state = jax.jit(optimizer.update)(grads, state, params, curvature=curvature)
    assert_same(optax.tree.map_params(optimizer, lambda v: v, state), state)
    doubled = optax.tree.map_params(optimizer, lambda v: 2 * v, state)
    assert_same(optax.tree.get(doubled, "curvature"), optax.tree.get(state, "curvature"))
    if name == "chain":
        trace = optax.tree.get(state, "trace")
        twice = jtu.tree_map(lambda v: 2 * np.asarray(v), trace)
        assert_same(optax.tree.get(doubled, "trace"), twice)
        assert any(map(np.any, arrays(trace)))
    elif name != "fallback":
        assert_same(doubled, state)
    if name == "fallback":
        (mu,) = jtu.tree_leaves(optax.tree.get(state, "mu"))
        assert_same(jtu.tree_leaves(optax.tree.get(doubled, "mu")), [2 * mu])
    # With the parameters beside them, and something else for all others.
    if name == "chain":
        marked = optax.tree.map_params(
            optimizer, lambda v, p: p, state, params, transform_non_params=lambda _: 0
        )
        assert_same(optax.tree.get(marked, "trace"), params)


@pytest.mark.parametrize("averaging", ["auto", 0.9, kfac.ScheduleFree()], ids=str)
def test_tree_map_params_of_a_state_with_all_parts(averaging):
    """Velocity and average are dictionaries by paths, and so no trees like the
    parameters."""
    optimizer = kfac.optax_kfac(
        damping="auto", norm_constraint="auto", averaging=averaging
    )
    params, value, grads, curvature = estimated("kfac")
    extra = dict(curvature=curvature, value=value)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(2):  # Schedule-free, the first step leaves no velocity.
        _, state = update(grads, state, params, **extra)
    doubled = optax.tree.map_params(optimizer, lambda v: 2 * v, state)
    assert any(map(np.any, arrays(state.velocity)))
    assert_same(doubled, state)


@faces
def test_tree_get_and_set(name):
    optimizer = make(name)
    params, *_ = estimated(name)
    state = optimizer.init(params)
    inner = state[0] if name == "chain" else state
    got = optax.tree.get(state, "curvature")
    assert jtu.tree_structure(got) == jtu.tree_structure(inner.curvature)
    assert optax.tree.get(state, "nothing of the kind") is None
    later = optax.tree.set(state, step=jnp.array(7, jnp.int32))
    assert int(optax.tree.get(later, "step")) == 7
    assert types(later) == types(state)
    if name not in ("chain", "scale_by_kfac"):
        assert float(optax.tree.get(state, "damping")) == np.float32(0.03)
        changed = optax.tree.set(state, damping=jnp.array(0.5, float))
        assert float(changed.damping) == 0.5


@faces
def test_inject_hyperparams(name):
    factory, hyperparameters = FACES[name]
    fixed = ("inverse_period",)
    if factory is chained:
        pytest.skip("Of a chain, every part is injected by itself.")
    assert set(fixed) < set(inspect.signature(factory).parameters)
    params, _, grads, curvature = estimated(name)
    plain = make(name)
    injected = optax.inject_hyperparams(factory, fixed)(**hyperparameters)
    states = [jax.jit(o.init)(params) for o in (plain, injected)]
    for _ in range(2):
        results = [
            jax.jit(o.update)(grads, s, params, curvature=curvature)
            for o, s in zip((plain, injected), states, strict=True)
        ]
        (updates, state), (updates_injected, state_injected) = results
        assert_same(updates_injected, updates, 1e-5)
        states = [state, state_injected]
    others = lambda s: jtu.tree_leaves((s.curvature, s.inverse, s.weight))
    assert_same(others(states[1].inner_state), others(states[0]), 1e-5)


@faces
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_types_are_kept(name, dtype):
    optimizer = make(name)
    params, value, grads, curvature = estimated(name, dtype)
    state = jax.jit(optimizer.init)(params)
    # Values of another type than all others, as users have them.
    extra = dict(curvature=curvature, value=value.astype(jnp.float16))
    updates, new = jax.jit(optimizer.update)(grads, state, params, **extra)
    assert [u.dtype for u in jtu.tree_leaves(updates)] == [dtype] * (
        len(jtu.tree_leaves(params))
    )
    assert jtu.tree_structure(updates) == jtu.tree_structure(params)
    assert types(new) == types(state)
    assert types(jax.eval_shape(optimizer.init, params)) == types(state)


@faces
def test_branches_of_cond(name):
    optimizer = make(name)
    params, _, grads, curvature = estimated(name)

    @jax.jit
    def step(params, state, take):
        update = ft.partial(optimizer.update, curvature=curvature)
        zeros = jtu.tree_map(jnp.zeros_like, params)
        updates, new = jax.lax.cond(
            take, lambda: update(grads, state, params), lambda: (zeros, state)
        )
        return updates, jax.lax.cond(take, lambda: new, lambda: state)

    state = optimizer.init(params)
    updates, kept = step(params, state, False)
    assert_same(kept, state)
    assert not any(map(np.any, arrays(updates)))
    updates, _ = step(params, state, True)
    want, _ = jax.jit(optimizer.update)(grads, state, params, curvature=curvature)
    assert_same(updates, want, 1e-5)


@faces
def test_gradient_accumulation(name, dtype=jnp.bfloat16):
    optimizer = optax.MultiSteps(make(name), every_k_schedule=3)
    params, _, grads, curvature = estimated(name, dtype)
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for step in range(3):
        updates, state = update(grads, state, params, curvature=curvature)
        assert any(map(np.any, arrays(updates))) == (step == 2)
    assert all(u.dtype == dtype for u in jtu.tree_leaves(updates))


@faces
def test_apply_if_finite(name):
    optimizer = optax.apply_if_finite(make(name), 2)
    params, _, grads, curvature = estimated(name)
    state = optimizer.init(params)
    bad = jtu.tree_map(lambda g: np.full_like(g, np.nan), grads)
    update = jax.jit(optimizer.update)
    updates, after = update(bad, state, params, curvature=curvature)
    assert not any(map(np.any, arrays(updates)))
    updates, _ = update(grads, after, params, curvature=curvature)
    assert all(map(np.any, arrays(updates)))


@pytest.mark.parametrize("number", ["learning_rate", "momentum", "damping", "ema"])
def test_schedules(number):
    """A schedule that is constant is that constant."""
    params, _, grads, curvature = estimated("kfac")
    of_value = lambda v: kfac.optax_kfac(**(dict(learning_rate=0.1) | {number: v}))
    constant, schedule = of_value(0.5), of_value(optax.constant_schedule(0.5))

    def last_updates(optimizer, state):
        new = curvature
        for _ in range(6):
            updates, state = jax.jit(optimizer.update)(
                grads, state, params, curvature=new
            )
            new = jtu.tree_map(lambda c: 2 * np.asarray(c), new)
        return updates

    start = constant.init(params)
    want = last_updates(constant, start)
    assert_same(last_updates(schedule, schedule.init(params)), want, 1e-6)
    # Another one is not: like all of an optimizer's numbers, it is in the state.
    other = optax.tree.set(start, **{number: 0.8 * optax.tree.get(start, number)})
    with pytest.raises(AssertionError):
        assert_same(last_updates(constant, other), want, 1e-5)
