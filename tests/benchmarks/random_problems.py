"""Problems drawn at random, on which `KFAC()` must do well with nothing tuned: does the
loss fall on all of them, and on how many below that of Adam at 1e-3, after as many steps?

    python tests/benchmarks/random_problems.py                # a hundred, half an hour
    python tests/benchmarks/random_problems.py --number 5 --steps 20

A problem is an architecture, a width and a depth, an activation, a normalisation, a batch
of 16 to 2048, a loss, and data of a scale from 1e-3 to 1e3 that a random network made.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_kfac as kfac


ACTIVATIONS = dict(
    relu=jax.nn.relu,
    tanh=jnp.tanh,
    gelu=jax.nn.gelu,
    silu=jax.nn.silu,
    sigmoid=jax.nn.sigmoid,
)
OUTPUTS = 8


class Drawn(NamedTuple):
    seed: int
    kind: str
    width: int
    depth: int
    activation: str
    norm: bool
    batch: int
    loss: str
    scale: float

    def __str__(self) -> str:
        norm = "normalised " if self.norm else ""
        return (
            f"{self.seed}: {norm}{self.kind} {self.width}x{self.depth} "
            f"{self.activation}, batch {self.batch}, {self.loss}, scale {self.scale:.1e}"
        )


def draw(seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    return Drawn(
        seed,
        kind=str(rng.choice(["dense", "residual", "convolutional", "recurrent"])),
        width=int(2 ** rng.uniform(3, 7)),
        depth=int(rng.integers(1, 7)),
        activation=str(rng.choice(list(ACTIVATIONS))),
        norm=bool(rng.integers(2)),
        batch=int(2 ** rng.uniform(4, 11)),
        loss=str(rng.choice(["softmax", "squared", "sigmoid", "poisson", "normal"])),
        scale=float(10 ** rng.uniform(-3, 3)),
    )


class Network(eqx.Module):
    """`[tokens, 8]` to 8 or 16 outputs."""

    first: Any
    norms: list
    layers: list
    last: eqx.nn.Linear
    kind: str = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(self, drawn: Drawn, outputs: int, key: Any):
        keys = jax.random.split(key, drawn.depth + 2)
        width, kind = drawn.width, drawn.kind
        conv = kind == "convolutional"
        flat = kind in ("dense", "residual")

        def layer(d_in, key):
            if conv:
                return eqx.nn.Conv1d(d_in, width, 3, padding=1, key=key)
            if kind == "recurrent":
                return eqx.nn.GRUCell(d_in, width, key=key)
            return eqx.nn.Linear(d_in, width, key=key)

        def norm():
            if not drawn.norm:
                return eqx.nn.Identity()
            return eqx.nn.GroupNorm(1, width) if conv else eqx.nn.LayerNorm(width)

        depth = min(drawn.depth, 2) if kind == "recurrent" else drawn.depth
        self.first = layer(32 if flat else 8, keys[0])
        self.norms = [norm() for _ in range(depth)]
        self.layers = [layer(width, key) for key in keys[1:depth]]
        self.last = eqx.nn.Linear(width, outputs, key=keys[-1])
        self.kind, self.activation = kind, drawn.activation

    def __call__(self, x):
        act = ACTIVATIONS[self.activation]
        if self.kind == "recurrent":
            h = x
            for cell, norm in zip([self.first, *self.layers], self.norms):
                step = lambda c, row, cell=cell: (cell(row, c),) * 2
                _, h = jax.lax.scan(step, jnp.zeros(cell.hidden_size), h)
                h = jax.vmap(norm)(h)
            return self.last(h[-1])
        h = x.T if self.kind == "convolutional" else x.reshape(-1)
        h = act(self.norms[0](self.first(h)))
        for layer, norm in zip(self.layers, self.norms[1:]):
            new = act(norm(layer(h)))
            h = h + new if self.kind == "residual" else new
        h = jnp.mean(h, axis=1) if self.kind == "convolutional" else h
        return self.last(h)


def make(drawn: Drawn) -> tuple[Any, Any, tuple]:
    """A model, a loss function, and all examples."""
    rng = np.random.default_rng(drawn.seed + 10**6)
    number = 3000
    x = rng.normal(size=(number, 4, 8))
    hidden = np.tanh(x.reshape(number, 32) @ rng.normal(size=(32, 24)) / 4)
    clean = hidden @ rng.normal(size=(24, OUTPUTS)) / 2
    noisy = clean + 0.1 * rng.normal(size=clean.shape)
    scale, outputs = drawn.scale, 2 * OUTPUTS if drawn.loss == "normal" else OUTPUTS
    y, loss_fn = {
        "softmax": (noisy.argmax(1).astype(np.int32), kfac.SoftmaxCrossEntropy),
        "squared": (scale * noisy, kfac.SquaredError),
        "sigmoid": (1.0 * (noisy > 0), kfac.SigmoidCrossEntropy),
        "poisson": (rng.poisson(np.exp(clean)).astype(float), kfac.PoissonNLL),
        "normal": (noisy, None),
    }[drawn.loss]

    def loss(model, x, y):
        out = jax.vmap(model)(x)
        if loss_fn is None:
            return kfac.NormalNLL(out[:, :OUTPUTS], out[:, OUTPUTS:], y)
        return loss_fn(out, y)

    model = kfac.convert(Network(drawn, outputs, jax.random.key(drawn.seed)))
    y = y if y.dtype == np.int32 else y.astype(np.float32)
    return model, loss, ((scale * x).astype(np.float32), y)


class Outcome(NamedTuple):
    start: float
    end: float
    lowest: float
    rejected: int


def batches(drawn: Drawn, arrays: tuple, steps: int) -> Any:
    rng = np.random.default_rng(drawn.seed)
    for _ in range(steps):
        index = rng.integers(0, len(arrays[0]), drawn.batch)
        yield tuple(a[index] for a in arrays)


def outcome(losses: list[float], rejected: int) -> Outcome:
    start, *losses = losses
    return Outcome(start, losses[-1], float(np.nanmin(losses)), rejected)


def train_kfac(drawn: Drawn, steps: int, optimizer: Any = None) -> Outcome:
    model, loss_fn, arrays = make(drawn)
    optimizer = kfac.KFAC() if optimizer is None else optimizer
    state = eqx.filter_jit(optimizer.init)(model)
    step = eqx.filter_jit(optimizer.step)
    value = eqx.filter_jit(
        lambda model, state: loss_fn(_final(model, state), *arrays).value
    )
    losses = [float(value(model, state))]
    for i, batch in enumerate(batches(drawn, arrays, steps)):
        key = jax.random.fold_in(jax.random.key(drawn.seed), i)
        model, state, _ = step(loss_fn, model, state, *batch, key=key)
        if (i + 1) % max(1, steps // 20) == 0:
            losses.append(float(value(model, state)))
    return outcome(losses, int(state.rejected))


def _final(model: Any, state: Any) -> Any:
    return model if state.iterates is None else kfac.averaged(model, state)


def train_adam(drawn: Drawn, steps: int) -> Outcome:
    model, loss_fn, arrays = make(drawn)
    model, optimizer = kfac.revert(model), optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, *batch):
        grads = eqx.filter_grad(lambda model: loss_fn(model, *batch).value)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state

    value = eqx.filter_jit(lambda model: loss_fn(model, *arrays).value)
    losses = [float(value(model))]
    for i, batch in enumerate(batches(drawn, arrays, steps)):
        model, state = step(model, state, *batch)
        if (i + 1) % max(1, steps // 20) == 0:
            losses.append(float(value(model)))
    return outcome(losses, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    results = []
    for seed in range(options.first, options.first + options.number):
        drawn, begun = draw(seed), time.perf_counter()
        ours, adam = train_kfac(drawn, options.steps), train_adam(drawn, options.steps)
        results.append(dict(problem=str(drawn), kfac=ours, adam=adam))
        better = "<" if ours.end < adam.end else ">"
        risen = "" if ours.end < ours.start else "  ROSE"
        print(
            f"{drawn}: {ours.start:.4g} -> {ours.end:.4g} {better} {adam.end:.4g} of Adam"
            f", {ours.rejected} rejected ({time.perf_counter() - begun:.0f} s){risen}",
            flush=True,
        )
        jax.clear_caches()
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))
    trained = sum(r["kfac"].end < r["kfac"].start for r in results)
    steady = sum(r["kfac"].end <= 1.5 * r["kfac"].lowest for r in results)
    better = sum(r["kfac"].end < r["adam"].end for r in results)
    print(f"{len(results)} problems: {trained} end below their start,")
    print(f"{steady} below 1.5 times their lowest loss,")
    print(f"{better} below Adam at 1e-3 after as many steps.")


if __name__ == "__main__":
    main()
