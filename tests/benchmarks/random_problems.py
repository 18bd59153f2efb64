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
from collections.abc import Callable, Iterator
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
    longer: float  # After more steps, if there were any.
    rejected: int


class Contender(NamedTuple):
    """A carry begins with the model; `final(carry)` is the one to evaluate."""

    init: Callable[[Any], tuple]
    step: Callable[[tuple, tuple, Any], tuple]  # (carry, batch, key) -> carry
    final: Callable[[tuple], Any]


def with_kfac(loss_fn: Callable) -> Contender:
    optimizer = kfac.KFAC()

    def step(carry, batch, key):
        return optimizer.step(loss_fn, *carry, *batch, key=key)[:2]

    return Contender(
        lambda model: (model, optimizer.init(model)),
        step,
        lambda carry: kfac.averaged(*carry),
    )


def with_adam(loss_fn: Callable) -> Contender:
    optimizer = optax.adam(1e-3)

    def init(model):
        model = kfac.revert(model)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def step(carry, batch, key):
        model, state = carry
        grads = eqx.filter_grad(lambda model: loss_fn(model, *batch).value)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state

    return Contender(init, step, lambda carry: carry[0])


def batches(drawn: Drawn, arrays: tuple) -> Iterator[tuple]:
    rng = np.random.default_rng(drawn.seed)
    while True:
        index = rng.integers(0, len(arrays[0]), drawn.batch)
        yield tuple(a[index] for a in arrays)


def train(make_contender: Callable, drawn: Drawn, steps: int, longer: int = 0) -> Outcome:
    """The loss of all examples at the start, after `steps`, and after `longer`."""
    model, loss_fn, arrays = make(drawn)
    contender = make_contender(loss_fn)
    step = eqx.filter_jit(contender.step)
    value = eqx.filter_jit(lambda carry: loss_fn(contender.final(carry), *arrays).value)
    carry = eqx.filter_jit(contender.init)(model)
    looks = {*range(0, steps + 1, max(1, steps // 20)), steps, max(steps, longer)}
    losses = {0: float(value(carry))}
    for i, batch in zip(range(max(looks)), batches(drawn, arrays)):
        carry = step(carry, batch, jax.random.fold_in(jax.random.key(drawn.seed), i))
        if i + 1 in looks:
            losses[i + 1] = float(value(carry))
    lowest = np.nanmin([loss for i, loss in losses.items() if 0 < i <= steps])
    rejected = int(getattr(carry[1], "rejected", 0))
    return Outcome(losses[0], losses[steps], float(lowest), losses[max(looks)], rejected)


def steps_of_adam(drawn: Drawn, steps: int) -> int:
    """How many have as many floating-point operations as `steps` of `KFAC()`, as XLA
    counts them: all but those within LAPACK's decompositions."""
    model, loss_fn, arrays = make(drawn)
    batch = next(batches(drawn, arrays))

    def count(contender: Contender, at: int = 0) -> float:
        carry = eqx.filter_jit(contender.init)(model)
        arrays, static = eqx.partition((carry, batch), eqx.is_array)

        def step(arrays):
            (model, state), batch = eqx.combine(arrays, static)
            if at > 0:  # Constants: what is not due is not in the program.
                state = state._replace(step=jnp.array(at), weight=jnp.array(1.0))
                state = state._replace(refactorise=jnp.array(False))
            out = contender.step((model, state), batch, jax.random.key(0))
            return eqx.filter(out, eqx.is_array)

        return jax.jit(step).lower(arrays).compile().cost_analysis()["flops"]

    ours = with_kfac(loss_fn)
    # Each less than what is due less often has.
    nothing, curvature, inverse = (count(ours, at) for at in (1003, 1010, 1050))
    doubling = {number * 2**n for number in (1, 3) for n in range(9)}  # At first.

    def due(period: int) -> set[int]:
        early = {t for t in doubling if t < 2 * period}
        return (early | {*range(0, steps, period)}) & {*range(steps)}

    inverses = due(50)
    curvatures = due(10) | inverses
    total = steps * nothing + len(curvatures) * (curvature - nothing)
    total += len(inverses) * (inverse - curvature)
    return round(total / count(with_adam(loss_fn)))


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
        longer = steps_of_adam(drawn, options.steps)
        ours = train(with_kfac, drawn, options.steps)
        adam = train(with_adam, drawn, options.steps, longer)
        results.append(dict(problem=str(drawn), longer=longer, kfac=ours, adam=adam))
        sign = lambda theirs: "<" if ours.end < theirs else ">"
        told = [
            f"{drawn}: {ours.start:.4g} -> {ours.end:.4g}",
            f"{sign(adam.end)} {adam.end:.4g} of Adam",
            f"{sign(adam.longer)} {adam.longer:.4g} after {longer} steps",
            f"{ours.rejected} rejected ({time.perf_counter() - begun:.0f} s)",
        ]
        rose = "" if ours.end < ours.start else ", ROSE"
        print(", ".join(told) + rose, flush=True)
        jax.clear_caches()
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))
    report(results)


def report(results: list[dict]) -> None:
    pairs = [(result["kfac"], result["adam"]) for result in results]
    print(f"{len(pairs)} problems:")
    counts = {
        "end below their start": sum(ours.end < ours.start for ours, _ in pairs),
        "end below 1.5 times their lowest loss": sum(
            ours.end <= 1.5 * ours.lowest for ours, _ in pairs
        ),
        "reject a step": sum(ours.rejected > 0 for ours, _ in pairs),
        "end below Adam at 1e-3 after as many steps": sum(
            not ours.end >= adam.end for ours, adam in pairs
        ),
        "after as many operations": sum(
            not ours.end >= adam.longer for ours, adam in pairs
        ),
    }
    for what, number in counts.items():
        print(f"{number:5} {what}")


if __name__ == "__main__":
    main()
