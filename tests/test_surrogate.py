"""A loss without targets beside what is minimised: the curvature of policies."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import assert_differs, assert_near, params_of


N, D, K = 12, 4, 3


class Agent(eqx.Module):
    """A policy over `K` actions, and a critic."""

    policy: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, key):
        a, b = jr.split(key)
        self.policy = eqx.nn.MLP(D, K, 5, 1, jnp.tanh, key=a)
        self.critic = eqx.nn.MLP(D, 1, 5, 1, jnp.tanh, key=b)


def make_agent(dtype=jnp.float64):
    return kfac.cast(kfac.convert(eqx.filter_jit(Agent)(jr.key(0))), dtype)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    return x, rng.integers(K, size=N), rng.normal(size=N), 20 + 5 * rng.normal(size=N)


def gain(agent, x, actions, advantages):
    """Minus the policy gradient's objective."""
    log_p = jax.nn.log_softmax(jax.vmap(agent.policy)(x))
    return -jnp.mean(log_p[jnp.arange(N), actions] * advantages)


def policy_loss(agent, x, actions, advantages, returns):
    del returns
    logits = jax.vmap(agent.policy)(x)
    return gain(agent, x, actions, advantages) + kfac.SoftmaxCrossEntropy(logits)


def actor_critic(agent, x, actions, advantages, returns):
    values = jax.vmap(agent.critic)(x)
    loss = policy_loss(agent, x, actions, advantages, returns)
    return loss + 0.5 * kfac.SquaredError(values, returns[:, None])


def make_actor(dtype=jnp.float64):
    """An agent without a critic."""
    return eqx.tree_at(lambda a: a.critic, make_agent(dtype), None)


def dense(outputs, agent, direction, root):
    """`sum_n |root_n J_n d|^2 / N` from Jacobians."""
    params, static = eqx.partition(agent, eqx.is_inexact_array)
    run = lambda params: outputs(eqx.combine(params, static))
    _, tangents = jax.jvp(run, (params,), (direction,))
    return np.mean(np.sum(root(run(params), tangents), axis=-1))


def divergence(z, t):
    """Of logits: the variance of a tangent under the softmax, a number in the last
    axis."""
    p = np.asarray(jax.nn.softmax(z))
    t = np.asarray(t)
    mean = np.sum(p * t, axis=-1, keepdims=True)
    return p * (t - mean) ** 2


def lengths(agent, new, x):
    """The squared lengths of a step, of the policy's part and of the critic's."""
    step = jtu.tree_map(jnp.subtract, params_of(new), params_of(agent))
    policy = dense(lambda a: jax.vmap(a.policy)(x), agent, step, divergence)
    square = lambda z, t: np.asarray(t) ** 2
    if agent.critic is None:
        return policy, 0.0
    critic = 0.5 * dense(lambda a: jax.vmap(a.critic)(x), agent, step, square)
    return policy, critic


def one_step(optimizer, loss_fn, agent, *args, **kwargs):
    @eqx.filter_jit
    def step(agent, state):
        return optimizer.step(loss_fn, agent, state, *args, key=jr.key(1), **kwargs)

    return step(agent, optimizer.init(agent))


#
# What a loss without targets is
#


def test_only_the_scalar_has_a_value_and_a_gradient():
    agent, args = make_actor(), batch()
    compute = kfac.value_grad_and_curvature(policy_loss, fisher=kfac.Exact())
    value, grads, _ = eqx.filter_jit(compute)(agent, *args)
    want = eqx.filter_jit(eqx.filter_value_and_grad(gain))(agent, *args[:3])
    assert_near(value, want[0], 1e-12)
    assert_near(params_of(grads), params_of(want[1]), 1e-12)


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_the_curvature_is_that_of_the_loss(coefficient):
    agent, (x, actions, advantages, returns) = make_actor(), batch()

    def with_targets(agent, x):
        logits = jax.vmap(agent.policy)(x)
        return coefficient * kfac.SoftmaxCrossEntropy(logits, actions)

    def surrogate(agent, x):
        logits = jax.vmap(agent.policy)(x)
        scalar = gain(agent, x, actions, advantages)
        return scalar + coefficient * kfac.SoftmaxCrossEntropy(logits)

    got, want = (
        eqx.filter_jit(kfac.curvature(f, kfac.Exact()))(agent, x)
        for f in (surrogate, with_targets)
    )
    assert_near(got, want, 1e-12)
    if coefficient != 1:
        other = eqx.filter_jit(kfac.curvature(policy_loss, kfac.Exact()))
        assert_differs(got, other(agent, x, actions, advantages, returns))


def test_of_nothing_else_it_has_no_value():
    loss = kfac.SoftmaxCrossEntropy(jnp.zeros((N, K)))
    for alone in (loss, loss + loss, 2.0 * loss + kfac.L2(make_agent(), 1e-3)):
        with pytest.raises(ValueError, match=r"no targets.*`surrogate \+ loss`"):
            _ = alone.value
    assert float((loss + 1.5).value) == 1.5
    assert not (loss + loss).is_surrogate and (loss + 1.5).is_surrogate


#
# How far a step goes
#


@pytest.mark.parametrize("loss_fn", [policy_loss, actor_critic])
@pytest.mark.parametrize("size", [1e-4, 3e-3])
def test_a_policy_changes_as_much_in_every_step(loss_fn, size):
    agent = make_actor() if loss_fn is policy_loss else make_agent()
    args, trust = batch(), kfac.TrustRegion(size)
    optimizer = kfac.KFAC(1.0, norm_constraint=trust, damping=1e-3)
    new, _, info = one_step(optimizer, loss_fn, agent, *args)
    assert not info.rejected
    policy, critic = lengths(agent, new, args[0])
    most = np.inf
    if agent.critic is not None:
        value = jax.vmap(agent.critic)(args[0])[:, 0]
        most = 0.5 * 0.5 * 0.5 * np.mean((value - args[3]) ** 2)
    assert policy <= size * (1 + 1e-9) and critic <= most * (1 + 1e-9)
    # One of the two is reached.
    assert abs(max(policy / size, critic / most) - 1) < 1e-6
    free = kfac.KFAC(1.0, damping=1e-3, norm_constraint=None)
    new, _, _ = one_step(free, loss_fn, agent, *args)
    assert lengths(agent, new, args[0])[0] > size


def test_with_momentum_it_is_the_whole_step_that_is_bounded():
    agent, args, size = make_actor(), batch(), 1e-3
    optimizer = kfac.KFAC(1.0, 0.9, 1e-3, norm_constraint=kfac.TrustRegion(size))

    @eqx.filter_jit
    def step(agent, state, key):
        return optimizer.step(policy_loss, agent, state, *args, key=key)

    state = optimizer.init(agent)
    for i in range(5):
        new, state, _ = step(agent, state, jr.key(i))
        assert abs(lengths(agent, new, args[0])[0] / size - 1) < 1e-6
        agent = new


@pytest.mark.parametrize("constant", [-7.0, 1e6])
def test_the_value_says_nothing(constant):
    """Neither how far to go, nor how much to damp, nor that something has diverged."""
    agent, args = make_agent(), batch()

    def shifted(*args):
        return actor_critic(*args) + constant

    steps = [one_step(kfac.KFAC(), f, agent, *args)[0] for f in (actor_critic, shifted)]
    assert_near(*map(params_of, steps), 1e-12)

    def likelihood(agent, x, actions, *rest):
        return kfac.SoftmaxCrossEntropy(jax.vmap(agent.policy)(x), actions)

    smaller = lambda *args: likelihood(*args) - 1.0
    agent = make_actor()
    steps = [one_step(kfac.KFAC(), f, agent, *args)[0] for f in (likelihood, smaller)]
    assert_differs(*map(params_of, steps), 1e-6)


def test_a_surrogate_that_rises_is_no_divergence():
    agent, args, optimizer = make_actor(), batch(), kfac.KFAC()

    @eqx.filter_jit
    def step(agent, state, constant):
        loss_fn = lambda *args: policy_loss(*args) + constant
        return optimizer.step(loss_fn, agent, state, *args, key=jr.key(0))

    state = optimizer.init(agent)
    for constant in [1.0, 1.0, 1e3, 1e6, 1e6, 1e6, 1e6]:
        agent, state, info = step(agent, state, jnp.asarray(constant))
        assert not info.rejected and not info.faults.divergence
    assert int(state.rejected) == 0


def test_micro_batches_take_the_same_step():
    agent, args = make_agent(), batch()

    def mean_gain(agent, x, actions, advantages, returns):
        log_p = jax.nn.log_softmax(jax.vmap(agent.policy)(x))
        own = jnp.take_along_axis(log_p, actions[:, None], 1)[:, 0]
        values = jax.vmap(agent.critic)(x)
        return (
            -jnp.mean(own * advantages)
            + kfac.SoftmaxCrossEntropy(jax.vmap(agent.policy)(x))
            + kfac.SquaredError(values, returns[:, None])
        )

    optimizer = kfac.KFAC(
        1.0, damping=1e-3, fisher=kfac.Exact(), norm_constraint=kfac.TrustRegion()
    )
    whole, parts = (
        one_step(optimizer, mean_gain, agent, *args, micro_batches=n)[0] for n in (1, 3)
    )
    assert_near(*map(params_of, (whole, parts)), 1e-8)


def test_a_model_without_a_forward_derivative_is_refused():
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g,))
    loss_fn = lambda agent, x, *rest: (
        jnp.mean(jax.vmap(agent.policy)(x))
        + kfac.SoftmaxCrossEntropy(same(jax.vmap(agent.policy)(x)))
    )
    agent, args = make_actor(), batch()
    with pytest.raises(TypeError, match="number for `norm_constraint`"):
        one_step(kfac.KFAC(), loss_fn, agent, *args)
    optimizer = kfac.KFAC(norm_constraint=1e-3, damping=1e-3)
    assert not one_step(optimizer, loss_fn, agent, *args)[2].rejected


#
# Weights below zero
#


def weighted(agent, x, actions, weights, returns):
    del returns
    return kfac.SoftmaxCrossEntropy(jax.vmap(agent.policy)(x), actions, weights)


def test_a_negative_weight_is_an_error_at_once():
    x, actions, advantages, _ = batch()
    logits = jnp.zeros((N, K))
    with pytest.raises(ValueError, match="must not be negative.*surrogate"):
        kfac.SoftmaxCrossEntropy(logits, actions, advantages)
    for fine in (np.abs(advantages), advantages > 0, np.arange(N)):
        kfac.SoftmaxCrossEntropy(logits, actions, fine)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_negative_weight_that_is_traced_is_a_fault_of_its_own(micro_batches):
    agent, args = make_actor(), batch()
    optimizer, options = kfac.KFAC(), dict(micro_batches=micro_batches)
    state = optimizer.init(agent)

    @eqx.filter_jit
    def step(weights):
        own = (*args[:2], weights, args[3])
        return optimizer.step(weighted, agent, state, *own, key=jr.key(0), **options)

    new, after, info = step(args[2])
    assert info.rejected and list(k for k, v in info.faults.as_dict().items() if v) == [
        "weights"
    ]
    assert_near(params_of(new), params_of(agent), 0.0)
    assert int(after.weight) == 0
    _, _, info = step(np.abs(args[2]))
    assert not info.rejected and not info.faults.weights


#
# It learns
#


def test_a_bandit_is_learnt():
    """The expected reward of a policy, with advantages of actions that it drew itself."""
    best = lambda x: jnp.argmax(x[:, :K], axis=-1)

    def loss_fn(agent, x, actions, advantages):
        log_p = jax.nn.log_softmax(jax.vmap(agent.policy)(x))
        own = jnp.take_along_axis(log_p, actions[:, None], 1)[:, 0]
        return -jnp.mean(own * advantages) + kfac.SoftmaxCrossEntropy(
            jax.vmap(agent.policy)(x)
        )

    optimizer = kfac.KFAC()

    @eqx.filter_jit
    def step(agent, state, key):
        keys = jr.split(key, 3)
        x = jr.normal(keys[0], (64, D), jnp.float32)
        actions = jr.categorical(keys[1], jax.vmap(agent.policy)(x))
        reward = (actions == best(x)).astype(x.dtype)
        args = x, actions, reward - jnp.mean(reward)
        agent, state, _ = optimizer.step(loss_fn, agent, state, *args, key=keys[2])
        return agent, state, jnp.mean(reward)

    agent = make_actor(jnp.float32)
    state, rewards = optimizer.init(agent), []
    for i in range(120):
        agent, state, reward = step(agent, state, jr.key(i))
        rewards.append(float(reward))
    assert np.mean(rewards[:10]) < 0.45 and np.mean(rewards[-10:]) > 0.7
    assert int(state.rejected) == 0
