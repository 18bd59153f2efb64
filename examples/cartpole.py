# %% [markdown]
# # Reinforcement learning
#
# A policy learns to balance a pole on a cart, by advantage actor-critic. It minimises a
# *surrogate*: a scalar whose gradient is the policy's, and whose value means nothing. So
# it is added to what has a curvature, the loss of the policy's own predictions.
#
#     python examples/cartpole.py        # a minute on two CPU cores
#     python examples/cartpole.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


optimizer = kfac.KFAC()


def loss_fn(agent, x, actions, advantages, returns):
    actor, critic = agent
    policy = kfac.SoftmaxCrossEntropy(jax.vmap(actor)(x))  # No targets.
    log_p = -policy.losses(policy.outputs, actions)
    error = kfac.SquaredError(jax.vmap(critic)(x), returns[:, None])
    return -jnp.mean(log_p * advantages) + policy + 0.5 * error


@eqx.filter_jit
def update(agent, state, carts, key):
    carts, data, ended = explore(agent, carts, jr.fold_in(key, 0))
    agent, state, _ = optimizer.step(loss_fn, agent, state, *data, key=key)
    return agent, state, carts, ended


def begin(key):
    """Sixteen carts (position, velocity, angle of the pole, spin) and their ages."""
    return jr.uniform(key, (16, 4), minval=-0.05, maxval=0.05), jnp.zeros(16)


def push(state, action):
    """The next state, and whether the pole has fallen, or the cart has left."""
    x, velocity, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    shove = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    angular = (9.8 * sin - cos * shove) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    rates = jnp.stack([velocity, shove - 0.05 * angular * cos / 1.1, spin, angular])
    state = state + 0.02 * rates
    return state, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * jnp.pi / 180)


def explore(agent, carts, key):
    """What is learnt from; how many episodes ended, and how long they were in all."""
    actor, critic = map(jax.vmap, agent)

    def act(carts, key):
        (x, age), keys = carts, jr.split(key)
        actions = jr.categorical(keys[0], actor(x))
        new, fallen = jax.vmap(push)(x, actions)
        age, fresh, values = age + 1, begin(keys[1]), critic(x)[:, 0]
        ended = fallen | (age >= 500)
        # Every step has a reward, of .05, so that returns are of the order of 1.
        error = 0.05 + 0.99 * jnp.where(fallen, 0, critic(new)[:, 0]) - values
        carts = jnp.where(ended[:, None], fresh[0], new), jnp.where(ended, 0, age)
        return carts, (x, actions, values, error, ended, age)

    def add(later, step):  # Generalised advantages (J. Schulman et al., 2016).
        advantage = step[0] + jnp.where(step[1], 0, 0.95 * 0.99 * later)
        return advantage, advantage

    carts, steps = jax.lax.scan(act, carts, jr.split(key, 32))
    x, actions, values, errors, ended, ages = steps
    _, advantages = jax.lax.scan(add, jnp.zeros(16), (errors, ended), reverse=True)
    scaled = (advantages - jnp.mean(advantages)) / jnp.std(advantages)
    flat = [a.reshape(-1) for a in (actions, scaled, advantages + values)]
    return carts, (x.reshape(-1, 4), *flat), (jnp.sum(ended), jnp.sum(ended * ages))


def train(steps, seed):
    """The mean length of the episodes that ended, in twenty parts of the run."""
    keys, ended = jr.split(jr.key(seed), 4), []
    mlp = lambda size, key: eqx.nn.MLP(4, size, 64, 2, jnp.tanh, key=key)
    agent = kfac.convert((mlp(2, keys[0]), mlp(1, keys[1])))
    state, carts = optimizer.init(agent), begin(keys[2])
    for key in tqdm(jr.split(keys[3], steps), unit=" steps", disable=None):
        agent, state, carts, found = update(agent, state, carts, key)
        ended.append(np.array(found))
    numbers, totals = np.array([np.sum(e, 0) for e in np.array_split(ended, 20)]).T
    return totals / np.maximum(numbers, 1)


def draw(lengths, path):
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    figure.subplots().plot(np.linspace(0.05, 1, 20), lengths, color="#d1495b")
    figure.suptitle("steps until the pole falls (at most 500), by part of the run")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=400, help="of training, each after 512 actions")
    add("--seed", type=int, default=0, help="of everything")
    add("--out", type=Path, default=Path("runs/cartpole.png"), help="picture")
    add("--toy", action="store_true", help="twenty steps, to see whether all runs")
    options = parser.parse_args()
    lengths = train(20 if options.toy else options.steps, options.seed)
    print(f"Steps until it falls: {lengths[0]:.0f} at first, {lengths[-1]:.0f} at last.")
    draw(lengths, options.out)
    print(f"Picture: {options.out}")
