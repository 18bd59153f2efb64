"""What is it worth to add up an example's gradients over all uses of a layer before they
are squared? `KFAC()` with `kfac.Joint`, the default, which does so, and with
`kfac.Expand`, which takes uses for independent: a differential equation that is solved in
120 evaluations of its network, rounds of messages in a graph, a sorting machine with
attention, and a gated cell that reads rows of pixels.

    python tests/benchmarks/uses.py --data folder/of/mnist
    python tests/benchmarks/uses.py --problems flow --steps 100 --seeds 1

Printed is the loss of the averaged model, on a thousand examples, after as many batches
in the same order, and the milliseconds of a step.
"""

import argparse
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from coupling import sorting
from race_problems import draw, gru, Race, regress

import eqx_kfac as kfac


class Flow(eqx.Module):
    """Where a point is at thirty times, by a Runge-Kutta method of fourth order."""

    velocity: eqx.nn.MLP

    def __call__(self, x):
        f, h = self.velocity, 0.1

        def step(x, _):
            a = f(x)
            b = f(x + h / 2 * a)
            c = f(x + h / 2 * b)
            d = f(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
            return x, x

        return jax.lax.scan(step, x, None, length=30)[1]


def flow(key, data: Path | None) -> Race:
    """Van der Pol's oscillator, seen with noise."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (1000, 2))
    start, seen = x.astype(np.float32), []
    slope = lambda x: np.stack([x[:, 1], 1.5 * (1 - x[:, 0] ** 2) * x[:, 1] - x[:, 0]], 1)
    for i in range(300):
        x = x + 0.01 * slope(x + 0.005 * slope(x))
        if i % 10 == 9:
            seen.append(x)
    y = np.stack(seen, 1) + 0.02 * rng.normal(size=(1000, 30, 2))
    examples = start, y.astype(np.float32)
    model = Flow(eqx.nn.MLP(2, 2, 48, 2, jnp.tanh, key=key))
    return Race("flow", 64, model, None, regress, examples, examples)


class Messages(eqx.Module):
    """Nodes of a graph, which send messages along its edges in four rounds."""

    first: eqx.nn.Linear
    message: eqx.nn.MLP
    update: eqx.nn.GRUCell
    last: eqx.nn.MLP

    def __init__(self, key, width=32):
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(3, width, key=keys[0])
        self.message = eqx.nn.MLP(2 * width + 1, width, width, 1, key=keys[1])
        self.update = eqx.nn.GRUCell(width, width, key=keys[2])
        self.last = eqx.nn.MLP(width, 1, width, 1, key=keys[3])

    def __call__(self, nodes, edges, senders, receivers, there):
        h = jax.vmap(self.first)(nodes)
        for _ in range(4):
            ends = jnp.concatenate([h[senders], h[receivers], edges], -1)
            sent = jax.vmap(self.message)(ends) * there[:, None]
            sums = jax.ops.segment_sum(sent, receivers, num_segments=len(nodes))
            h = jax.vmap(self.update)(sums, h)
        return self.last(jnp.mean(h, 0))


def messages(key, data: Path | None) -> Race:
    """A number that two rounds of weighted means of the neighbours tell."""
    rng = np.random.default_rng(0)
    number, nodes, edges = 2000, 12, 48
    x = rng.normal(size=(number, nodes, 3))
    senders, receivers = rng.integers(0, nodes, (2, number, edges))
    there = np.arange(edges) < rng.integers(20, edges + 1, (number, 1))
    weights = rng.uniform(size=(number, edges))
    A = np.zeros((number, nodes, nodes))
    np.add.at(A, (np.arange(number)[:, None], receivers, senders), weights * there)
    A = A / (A.sum(2, keepdims=True) + 1)
    h = np.tanh(x[..., :1] + A @ x[..., 1:2])
    h = np.tanh(2 * A @ h + x[..., 2:])
    y = 3 * h.max((1, 2)) * h.mean((1, 2))
    floats = [a.astype(np.float32) for a in (x, weights[..., None], there, y[:, None])]
    indices = [a.astype(np.int32) for a in (senders, receivers)]
    examples = *floats[:2], *indices, *floats[2:]
    return Race("messages", 64, Messages(key), None, regress, examples, examples)


PROBLEMS = dict(flow=flow, messages=messages, sorting=sorting, gru=gru)


def trained(race: Race, steps: int, seed: int) -> tuple[float, float]:
    """The loss at the end, and the seconds of a step, without the first ones."""
    optimizer = kfac.KFAC()
    loss_fn = lambda model, *batch: race.loss_fn(model, race.memory, *batch)[0]

    @eqx.filter_jit
    def step(model, state, batch, key):
        return optimizer.step(loss_fn, model, state, *batch, key=key)[:2]

    @eqx.filter_jit
    def value(model, state, batch):
        return loss_fn(kfac.averaged(model, state), *batch).value

    rng = np.random.default_rng(seed)
    carry, seconds = (race.model, eqx.filter_jit(optimizer.init)(race.model)), []
    for i in range(steps):
        batch, start = draw(race, race.batch, rng), time.perf_counter()
        carry = step(*carry, batch, jax.random.key(1000 * seed + i))
        jax.block_until_ready(carry[1].step)
        seconds.append(time.perf_counter() - start)
    return float(value(*carry, draw(race, 1000, rng))), float(
        np.mean(seconds[steps // 5 :])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--data", type=Path, help="MNIST; else smaller digits")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    print("| problem | seed | `Expand` | ms | `Joint` | ms |")
    print("|---|---|---|---|---|---|")
    for name in options.problems:
        for seed in range(options.seeds):
            cells = []
            for sharing in (kfac.Expand(), kfac.Joint()):
                race = PROBLEMS[name](jax.random.key(seed), options.data)
                model = kfac.convert(race.model, kfac.Kronecker(sharing))
                loss, mean = trained(race._replace(model=model), options.steps, seed)
                cells.append(f"{loss:.4g} | {1e3 * mean:.3g}")
            print(f"| {name} | {seed} | {' | '.join(cells)} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
