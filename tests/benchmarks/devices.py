"""What one device does in a step, on meshes of 1 to 8 devices: counted in the compiled
program, for seconds on devices that are made of one CPU say nothing. And, on paper, a
transformer of 1.2 billion parameters on 8 to 512.

    python -m tests.benchmarks.devices
    python -m tests.benchmarks.devices --paper
"""

import argparse
import os
import re
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec as P
from tqdm import tqdm

import eqx_kfac as kfac


# Twelve layers of eight shapes.
WIDTHS = [64, 256, 256, 192, 192, 256, 320, 320, 192, 192, 128, 128, 10]
BATCH = 512


class Deep(eqx.Module):
    layers: list[kfac.Linear]

    def __init__(self) -> None:
        sizes = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
        keys = jr.split(jr.key(0), len(sizes))
        self.layers = [kfac.Linear(*s, key=k) for s, k in zip(sizes, keys, strict=True)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(jax.numpy.tanh(x))
        return x


def loss_fn(model: Deep, x: jax.Array, y: jax.Array) -> Any:
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


def decompositions(jaxpr: Any) -> tuple[int, float]:
    """How many matrices a device decomposes at most, and the sum of their sides cubed."""

    def of(eqn):
        if eqn.primitive.name in ("cholesky", "eigh"):
            *batch, side, _ = eqn.invars[0].aval.shape
            number = int(np.prod(batch))
            return number, float(number * side**3)
        inner = [decompositions(j) for j in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "cond":
            return max(n for n, _ in inner), max(w for _, w in inner)
        times = eqn.params.get("length", 1)
        return times * sum(n for n, _ in inner), times * sum(w for _, w in inner)

    found = [of(eqn) for eqn in jaxpr.eqns]
    return sum(n for n, _ in found), sum(w for _, w in found)


def transfers(text: str) -> list[list[int]]:
    """How many numbers come out of every collective operation of a program, array by
    array."""
    found = re.findall(r"= (.*) (?:all-reduce|all-gather|all-to-all)\(", text)
    shapes = [re.findall(r"f\d\d\[([\d,]*)\]", several) for several in found]
    lengths = lambda shape: [int(n) for n in shape.split(",") if n]
    return [[int(np.prod(lengths(shape))) for shape in several] for several in shapes]


def row(devices: int, split: bool) -> list[Any]:
    """One row of the table."""
    mesh = jax.make_mesh(
        (devices,),
        ("batch",),
        (jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )

    def put(tree, spec):
        return eqx.filter_shard(tree, NamedSharding(mesh, spec))

    x = jr.normal(jr.key(1), (BATCH, WIDTHS[0]))
    y = jr.randint(jr.key(2), (BATCH,), 0, WIDTHS[-1])
    model, (x, y) = put(Deep(), P()), put((x, y), P("batch"))
    optimizer = kfac.KFAC()
    state = optimizer.init(model)
    state = kfac.packed(state, over="batch") if split else state
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, state, x, y, key):
        model = eqx.combine(params, static)
        return eqx.filter(
            optimizer.step(loss_fn, model, state, x, y, key=key), eqx.is_array
        )

    traced = jax.jit(step).trace(params, state, x, y, jr.key(0))
    number, work = decompositions(traced.jaxpr.jaxpr)
    compiled = traced.lower().compile()
    sizes = transfers(compiled.as_text())
    operations, sent = len(sizes), 4.0 * sum(map(sum, sizes))
    here = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jtu.tree_leaves((state.curvature, state.inverse))
    )
    flops = compiled.cost_analysis()["flops"] / 1e9
    kept = "split" if split else "in full"
    return [devices, kept, number, work / 1e6, flops, operations, sent / 1e6, here / 1e6]


def counted() -> None:
    print("| devices | factors, inverses | decompositions | sides³/10⁶ | GFLOP (others) "
          "| collectives | MB out of them | MB of factors, inverses |")  # fmt: skip
    print("|" + "---:|" * 8)
    cases = [(n, False) for n in (1, 2, 4, 8)] + [(n, True) for n in (2, 4, 8)]
    rows = [row(*case) for case in tqdm(cases)]
    for devices, kept, number, *numbers in rows:
        cells = [f"{devices}", kept, f"{number}"] + [f"{n:.3g}" for n in numbers]
        print("| " + " | ".join(cells) + " |")


def on_paper(tokens: int = 8192, layers: int = 24, d: int = 2048) -> None:
    """Every device has so many tokens: the batch grows with their number."""
    sides = [(d, d)] * 4 + [(4 * d, d), (d, 4 * d)]
    parameters = layers * sum(m * n for m, n in sides)
    factors = layers * sum(m**2 + n**2 for m, n in sides)
    gradient = 6 * parameters * tokens
    preconditioned = layers * sum(2 * m * n * (m + n) for m, n in sides)
    statistics = (2 * factors * tokens + 4 * parameters * tokens) / 10
    inverses = layers * sum(2 * (m**3 + n**3) for m, n in sides) / 50
    print(f"{parameters:.3g} parameters, {factors:.3g} numbers in the factors; FLOP of a "
          f"step: gradient {gradient:.2g}, preconditioning {preconditioned:.2g}, "
          f"statistics (every 10 steps) {statistics:.2g}")  # fmt: skip
    print(
        "| devices | PFLOP/step: AdamW | in full | split "
        "| GB sent: AdamW | in full | split | GB of state: AdamW | in full | split |"
    )
    print("|" + "---:|" * 10)
    for devices in (8, 64, 512):
        share = (devices - 1) / devices  # Of a ring: what each device sends.
        adam_sent = 2 * share * 4 * parameters
        regular = adam_sent + 2 * share * 4 * factors / 10 + 2 * share * 4 * factors / 50
        # Solutions are gathered, of those that are no multiple of the devices by a sum.
        kinds = [(4 * layers, d * d), (layers, 4 * d * d), (layers, 4 * d * d)]
        solutions = sum((k + k % devices) * numbers for k, numbers in kinds)
        gathered = share * 4 * (factors / 2 + solutions)
        states = 8 * parameters, 8 * factors, 4.5 * factors / devices
        shared = gradient + statistics + inverses / devices
        cells = gradient, shared + preconditioned, shared + preconditioned / devices
        cells = [f"{c / 1e15:.4f}" for c in cells]
        sent = adam_sent, regular, regular + gathered
        cells += [f"{n / 1e9:.3g}" for n in (*sent, *states)]
        print(f"| {devices} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", action="store_true", help="the large transformer")
    on_paper() if parser.parse_args().paper else counted()
