# %% [markdown]
# # Reinforcement learning: K-FAC and Adam
#
# A policy and a critic learn to balance a pole on a cart (two actions), or to swing up a
# pendulum (a torque, any real number), by advantage actor-critic (one step on each batch
# of experience) or proximal policy optimisation (several). Both minimise a *surrogate*:
# a scalar whose gradient is the policy's, and whose value means nothing. So it is added
# to what does have a curvature: the loss of the policy's own predictions, without
# targets. `KFAC()` then takes natural-gradient steps, each of which changes the policy
# by about as much, in whatever units the critic's returns are.
#
# The dynamics are those of everybody's benchmarks, written in JAX: A. Barto, R. Sutton,
# C. Anderson, 1983, for the cart. K-FAC has its defaults, Adam (with its gradients
# clipped, as is usual) the best of several learning rates.
#
#     python tests/benchmarks/studies/cartpole.py  # a minute
#     python tests/benchmarks/studies/cartpole.py --task pendulum --algorithm ppo
#     python tests/benchmarks/studies/cartpole.py --toy  # does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from harness import make_parser, parsed, save_picture, without_frame
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## The tasks


# %%
class Task(NamedTuple):
    features: int
    actions: int  # How many there are, or how many real numbers one is.
    is_continuous: bool
    limit: int  # Steps of an episode.
    scale: float  # Rewards are multiplied by this: returns should be of the order of 1.
    discount: float
    reset: Callable[[PRNGKeyArray], Array]
    move: Callable[[Array, Array], tuple]  # (state, action) -> state, reward, fallen
    observe: Callable[[Array], Array] = lambda state: state


def push_cart(state: Array, action: Array) -> tuple:
    x, velocity, angle, spin = state
    force = jnp.where(action == 1, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    shove = (force + 0.05 * spin**2 * sin) / 1.1
    angular = (9.8 * sin - cos * shove) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    linear = shove - 0.05 * angular * cos / 1.1
    rates = jnp.stack([velocity, linear, spin, angular])
    state = state + 0.02 * rates
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * jnp.pi / 180)
    return state, jnp.ones(()), fallen


def turn_pendulum(state: Array, action: Array) -> tuple:
    angle, spin = state
    torque = 2 * jnp.clip(action[0], -1, 1)
    away = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(away**2 + 0.1 * spin**2 + 0.001 * torque**2)
    spin = jnp.clip(spin + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * spin, spin]), reward, jnp.zeros((), bool)


def look_at_pendulum(state: Array) -> Array:
    return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1] / 4])


TASKS = {
    "cartpole": Task(
        *(4, 2, False, 500, 0.05, 0.99),
        reset=lambda key: jr.uniform(key, (4,), minval=-0.05, maxval=0.05),
        move=push_cart,
    ),
    "pendulum": Task(
        *(3, 1, True, 200, 0.1, 0.95),
        reset=lambda key: (
            jr.uniform(key, (2,), minval=-1, maxval=1) * jnp.array([jnp.pi, 1.0])
        ),
        move=turn_pendulum,
        observe=look_at_pendulum,
    ),
}


# %% [markdown]
# ## The agent
#
# The distribution over actions *is* a loss object without targets: it samples, knows the
# log-probability of an action, and its Fisher is the policy's curvature.


# %%
class Agent(eqx.Module):
    policy: eqx.nn.MLP
    critic: eqx.nn.MLP
    log_variance: kfac.Parameter | None

    def __init__(self, task: Task, width: int, key: PRNGKeyArray):
        keys = jr.split(key)
        mlp = lambda out, key: eqx.nn.MLP(
            task.features, out, width, 2, activation=jnp.tanh, key=key
        )
        policy = mlp(task.actions, keys[0])
        # At first, no action is preferred.
        last = lambda policy: policy.layers[-1].weight
        self.policy = eqx.tree_at(last, policy, replace_fn=lambda w: 0.01 * w)
        self.critic = mlp(1, keys[1])
        spread = kfac.Parameter(jnp.full(task.actions, -1.0))
        self.log_variance = spread if task.is_continuous else None

    def over_actions(self, x: Float[Array, "n features"]) -> kfac.AbstractLoss:
        outputs = jax.vmap(self.policy)(x)
        if self.log_variance is None:
            return kfac.SoftmaxCrossEntropy(outputs)
        return kfac.NormalNLL(outputs, jax.vmap(self.log_variance)(x))

    def values(self, x: Float[Array, "n features"]) -> Float[Array, " n"]:
        return jax.vmap(self.critic)(x)[:, 0]


def log_probability(over_actions: kfac.AbstractLoss, actions: Array) -> Array:
    return -over_actions.losses(over_actions.outputs, actions)


# %% [markdown]
# ## The objective
#
# Three terms: what the policy gains, the curvature of the policy, and the critic's error.


# %%
class Algorithm(NamedTuple):
    horizon: int  # Steps of every environment between two updates.
    epochs: int
    parts: int  # Of the experience, for one step each.
    clip: float | None
    updates: int


ALGORITHMS = {
    "a2c": Algorithm(horizon=32, epochs=1, parts=1, clip=None, updates=400),
    "ppo": Algorithm(horizon=128, epochs=4, parts=4, clip=0.2, updates=100),
}
ENVIRONMENTS = 16


class Experience(NamedTuple):
    x: Float[Array, "n features"]
    actions: Array
    log_p: Float[Array, " n"]  # When they were chosen.
    advantages: Float[Array, " n"]
    returns: Float[Array, " n"]


def make_loss(clip: float | None) -> Callable:
    def loss_fn(agent: Agent, data: Experience) -> Any:
        over_actions = agent.over_actions(data.x)
        ratio = jnp.exp(log_probability(over_actions, data.actions) - data.log_p)
        a = (data.advantages - jnp.mean(data.advantages)) / jnp.std(data.advantages)
        gains = ratio * a
        if clip is not None:
            gains = jnp.minimum(gains, jnp.clip(ratio, 1 - clip, 1 + clip) * a)
        critic = kfac.SquaredError(agent.values(data.x)[:, None], data.returns[:, None])
        return -jnp.mean(gains) + over_actions + 0.5 * critic

    return loss_fn


# %% [markdown]
# ## Experience
#
# Advantages are discounted sums of one-step errors of the critic (J. Schulman et al.,
# *High-Dimensional Continuous Control Using Generalized Advantage Estimation*, 2016).


# %%
class Worlds(NamedTuple):
    state: Float[Array, "worlds k"]
    age: Array
    total: Float[Array, " worlds"]  # Of the rewards of this episode.


def begin(task: Task, key: PRNGKeyArray) -> Worlds:
    state = jax.vmap(task.reset)(jr.split(key, ENVIRONMENTS))
    nothing = jnp.zeros(ENVIRONMENTS)
    return Worlds(state, nothing.astype(int), nothing)


def explore(
    task: Task, agent: Agent, worlds: Worlds, horizon: int, key: PRNGKeyArray
) -> tuple[Worlds, Experience, tuple]:
    """What happens in `horizon` steps; and the totals of the episodes that ended."""

    def act(worlds, key):
        keys = jr.split(key)
        x = jax.vmap(task.observe)(worlds.state)
        over_actions = agent.over_actions(x)
        actions = over_actions.sample(keys[0])
        state, reward, fallen = jax.vmap(task.move)(worlds.state, actions)
        age, total = worlds.age + 1, worlds.total + reward
        ended = fallen | (age >= task.limit)
        after = agent.values(jax.vmap(task.observe)(state))
        target = task.scale * reward + jnp.where(fallen, 0, task.discount * after)
        log_p = log_probability(over_actions, actions)
        step = x, actions, log_p, target - agent.values(x), agent.values(x), ended, total
        fresh = begin(task, keys[1])
        now = Worlds(state, age, total)
        choose = lambda new, old: jnp.where(
            ended[:, None] if new.ndim > 1 else ended, new, old
        )
        return jax.tree.map(choose, fresh, now), step

    def add(later, step):
        error, ended = step
        advantage = error + jnp.where(ended, 0, 0.95 * task.discount * later)
        return advantage, advantage

    worlds, steps = jax.lax.scan(act, worlds, jr.split(key, horizon))
    x, actions, log_p, errors, values, ended, totals = steps
    nothing = jnp.zeros(ENVIRONMENTS)
    _, advantages = jax.lax.scan(add, nothing, (errors, ended), reverse=True)
    data = Experience(x, actions, log_p, advantages, advantages + values)
    data = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), data)
    return worlds, data, (jnp.sum(jnp.where(ended, totals, 0)), jnp.sum(ended))


# %% [markdown]
# ## Optimizers


# %%
class Method(NamedTuple):
    name: str
    init: Callable[[Agent], Any]
    step: Callable[..., tuple[Agent, Any]]  # (agent, state, data, key, rate)
    rate: float = 0.0


def with_kfac(loss_fn: Callable) -> Method:
    optimizer = kfac.KFAC()

    def step(agent, state, data, key, rate):
        del rate
        agent, state, _ = optimizer.step(loss_fn, agent, state, data, key=key)
        return agent, state

    return Method("K-FAC", optimizer.init, step)


def with_adam(loss_fn: Callable) -> Method:
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam())

    def init(agent):
        return adam.init(eqx.filter(agent, eqx.is_inexact_array))

    def step(agent, state, data, key, rate):
        del key
        grads = eqx.filter_grad(lambda agent: loss_fn(agent, data).value)(agent)
        updates, state = adam.update(grads, state)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        return eqx.apply_updates(agent, updates), state

    return Method("Adam", init, step)


# %% [markdown]
# ## Runs


# %%
class Run(NamedTuple):
    method: str
    seed: int
    seconds: float
    returns: np.ndarray  # The mean of the episodes that ended, in twenty parts of a run.

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def end(self) -> float:
        return float(np.mean(self.returns[-2:]))


def make_update(task: Task, algorithm: Algorithm, method: Method) -> Callable:
    """Experience, and all steps on it, in one program."""

    @eqx.filter_jit
    def update(agent, state, worlds, key, rate):
        keys = jr.split(key, 3)
        worlds, data, ended = explore(task, agent, worlds, algorithm.horizon, keys[0])
        number = len(data.returns)
        shuffled = [
            jr.permutation(k, number).reshape(algorithm.parts, -1)
            for k in jr.split(keys[1], algorithm.epochs)
        ]
        static = eqx.filter(agent, eqx.is_array, inverse=True)

        def one(carry, chosen):
            params, state = carry
            indices, key = chosen
            own = jax.tree.map(lambda a: a[indices], data)
            agent = eqx.combine(params, static)
            agent, state = method.step(agent, state, own, key, rate)
            return (eqx.filter(agent, eqx.is_array), state), None

        steps = jnp.concatenate(shuffled)
        carry = eqx.filter(agent, eqx.is_array), state
        each = jr.split(keys[2], len(steps))
        (params, state), _ = jax.lax.scan(one, carry, (steps, each))
        return eqx.combine(params, static), state, worlds, ended

    return update


def train(
    task: Task, update: Callable, method: Method, options: argparse.Namespace, seed: int
) -> Run:
    keys = jr.split(jr.key(seed), 3)
    rate = jnp.asarray(method.rate)

    @eqx.filter_jit
    def start(keys):
        agent = kfac.convert(Agent(task, options.width, keys[0]))
        return agent, method.init(agent), begin(task, keys[1])

    agent, state, worlds = start(keys)
    update(agent, state, worlds, keys[2], rate)  # Compiled.
    began, ended = time.perf_counter(), []
    for i in tqdm(range(options.steps), desc=f"{method.name}, seed {seed}", disable=None):
        key = jr.fold_in(keys[2], i)
        agent, state, worlds, episodes = update(agent, state, worlds, key, rate)
        ended.append(episodes)
    totals, numbers = np.asarray(ended, float).T
    seconds = time.perf_counter() - began
    pieces = zip(np.array_split(totals, 20), np.array_split(numbers, 20), strict=True)
    returns, last = [], np.nan
    for total, number in pieces:
        last = total.sum() / number.sum() if number.sum() else last
        returns.append(last)
    known = np.asarray(returns)
    first = known[np.isfinite(known)][0]  # Of the first episodes that ended.
    known = np.where(np.isnan(known), first, known)
    name = f"{method.name}, {method.rate:g}" if method.rate else method.name
    return Run(name, seed, seconds, known)


def compete(options: argparse.Namespace) -> dict[str, list[Run]]:
    """Every method, with all seeds."""
    task, algorithm = TASKS[options.task], ALGORITHMS[options.algorithm]
    if options.toy:
        algorithm = algorithm._replace(horizon=16)
    if options.steps * algorithm.horizon < task.limit:
        raise SystemExit("No episode may end: more --steps, please.")
    loss_fn = make_loss(algorithm.clip)
    seeds = range(options.seed, options.seed + options.seeds)
    results = {}
    for method, rates in [
        (with_kfac(loss_fn), [0.0]),
        (with_adam(loss_fn), options.rates),
    ]:
        update = make_update(task, algorithm, method)
        for rate in rates:
            own = method._replace(rate=rate)
            runs = [train(task, update, own, options, i) for i in seeds]
            results[runs[0].method] = runs
    return results


# %% [markdown]
# ## What came out


# %%
def spread(numbers: list[float]) -> str:
    """The mean and its standard error."""
    error = np.std(numbers, ddof=1) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0
    return f"{np.mean(numbers):.0f} ± {error:.0f}"


def table(results: dict[str, list[Run]]) -> str:
    lines = [f"{'method':<13} {'over the run':>14} {'at the end':>14} {'seconds':>8}"]
    for name, runs in results.items():
        over, end = (spread([getattr(r, what) for r in runs]) for what in ("mean", "end"))
        seconds = np.mean([run.seconds for run in runs])
        lines.append(f"{name:<13} {over:>14} {end:>14} {seconds:>8.1f}")
    return "\n".join(lines)


def best_of(results: dict[str, list[Run]], kind: str) -> str:
    """The name of the best method whose name begins with this."""
    names = [name for name in results if name.startswith(kind)]
    return max(names, key=lambda name: np.mean([run.mean for run in results[name]]))


def plot(results: dict[str, list[Run]], title: str, path: Path) -> None:
    """Means over the seeds, and all of them, thin."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    for kind, colour in {"K-FAC": "#d1495b", "Adam": "#30638e"}.items():
        name = best_of(results, kind)
        curves = np.stack([run.returns for run in results[name]])
        at = (np.arange(curves.shape[1]) + 1) / curves.shape[1]
        axis.plot(at, curves.mean(0), color=colour, linewidth=2.4, label=name)
        axis.plot(at, curves.T, color=colour, linewidth=0.7, alpha=0.5)
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xlabel("part of the run")
    axis.set_ylabel("mean return of an episode")
    axis.legend(frameon=False)
    without_frame(axis)
    save_picture(figure, path)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("K-FAC and Adam learn policies.", "cartpole", seeds=2)
    add = parser.add_argument
    add("--task", choices=TASKS, default="cartpole", help="which")
    add("--algorithm", choices=ALGORITHMS, default="a2c", help="which")
    add("--steps", type=int, help="batches of experience; 400 (a2c) or 100 (ppo)")
    add("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="of Adam")
    add("--width", type=int, default=64, help="of the hidden layers")
    toy = dict(steps=40, width=8, seeds=1, rates=[1e-3])
    options = parsed(parser, argv, ["steps", "seeds"], toy)
    if options.steps is None:
        options.steps = ALGORITHMS[options.algorithm].updates
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    results = compete(options)
    print(table(results))
    kinds = [best_of(results, kind) for kind in ("K-FAC", "Adam")]
    over = [np.mean([run.mean for run in results[name]]) for name in kinds]
    order = np.argsort(over)[::-1]
    first, second = (f"{kinds[i]} ({over[i]:.0f})" for i in order)
    title = f"{options.task}, {options.algorithm}"
    print(f"{title}: over the run, {first} is ahead of {second}.")
    plot(results, title, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
