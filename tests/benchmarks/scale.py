"""What `KFAC()` costs at the size of GPT-2 small (12 layers, width 768, 50,257 tokens):
the bytes of its state, part by part, and the operations of a step, beside Adam's.

    python tests/benchmarks/scale.py
    python tests/benchmarks/scale.py --depth 24 --width 1024 --heads 16     # medium

Nothing is allocated: all of it follows from shapes.
"""

import argparse
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqx_kfac as kfac


class Block(eqx.Module):
    """Attention and a network of two layers, each normalised before."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: Any):
        first, second = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        projections = "query", "key", "value", "output"
        biases = {f"use_{name}_bias": True for name in projections}
        self.attention = eqx.nn.MultiheadAttention(heads, width, **biases, key=first)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norms[0])(x)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(h, h, h, mask=causal)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT(eqx.Module):
    """A language model whose head has weights of its own."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, key: Any):
        first, second, third, *keys = jax.random.split(key, depth + 3)
        self.tokens = eqx.nn.Embedding(vocabulary, width, key=first)
        self.positions = eqx.nn.Embedding(1024, width, key=second)
        self.blocks = [Block(width, heads, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=third)

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.tokens)(tokens)
        x = x + jax.vmap(self.positions)(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class Operations(NamedTuple):
    """Operations of the parts of a step, when each of these is due."""

    gradient: float
    preconditioning: float
    statistics: float
    decompositions: float

    def mean(self, curvature_period: int, inverse_period: int) -> float:
        periodic = (
            self.statistics / curvature_period,
            self.decompositions / inverse_period,
        )
        return self.gradient + self.preconditioning + sum(periodic)


def size(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    arrays = [a for a in jtu.tree_leaves(tree) if isinstance(a, jax.ShapeDtypeStruct)]
    return sum(a.size * a.dtype.itemsize for a in arrays)


def operations(model: Any, state: kfac.KFACState, tokens: int) -> Operations:
    """Multiplications and additions, given the number of tokens of a batch.

    Statistics are $x x^\\top$ and $g g^\\top$ of every token, and one more pullback,
    which needs no gradient of the weights; a decomposition, with the inverse that is made
    of it, is taken as $2 d^3$; lookups, diagonal factors, norms and the products of
    queries with keys as nothing."""
    gradient = preconditioning = statistics = decompositions = 0.0
    for layer in kfac.summary(model).layers:
        if layer.form != "Lookup":
            gradient += 6 * tokens * layer.parameters
            statistics += 2 * tokens * layer.parameters
    is_factors = lambda node: isinstance(node, kfac.factors.KroneckerFactors)
    for node in jtu.tree_leaves(state.curvature, is_leaf=is_factors):
        if not is_factors(node):
            continue
        full = [
            a.shape[-1] for a in (node.output_factor, node.input_factor) if is_matrix(a)
        ]
        every = [a.shape[-1] for a in (node.output_factor, node.input_factor)]
        statistics += sum(2 * tokens * d**2 for d in full)
        decompositions += sum(2 * d**3 for d in full)
        preconditioning += sum(2 * d * every[0] * every[1] for d in full)
    return Operations(gradient, preconditioning, statistics, decompositions)


def is_matrix(factor: Any) -> bool:
    return factor.ndim > 1 and factor.shape[-1] == factor.shape[-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--tokens", type=int, default=8 * 1024, help="of a batch")
    options = parser.parse_args()
    optimizer = kfac.KFAC()

    def make(key: Any) -> Any:
        shape = options.depth, options.width, options.heads, options.vocabulary
        return kfac.convert(GPT(*shape, key=key))

    key = jax.random.key(0)
    model = eqx.filter_eval_shape(make, key)
    state = eqx.filter_eval_shape(lambda key: optimizer.init(make(key)), key)
    packed = eqx.filter_eval_shape(lambda s: kfac.packed(s), state)
    print(kfac.summary(model))
    print_bytes(model, dict(full=state, packed=packed))
    print_operations(operations(model, state, options.tokens))


def print_bytes(model: Any, states: dict[str, kfac.KFACState]) -> None:
    print("\n| MB | " + " | ".join(states) + " |\n|---|" + "---:|" * len(states))
    names = "curvature", "inverse", "velocity", "averaged_parameters", "rollback"
    for name in names:
        cells = [f"{size(getattr(s, name)) / 1e6:,.0f}" for s in states.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    cells = [f"{size(s) / 1e6:,.0f}" for s in states.values()]
    print("| all of the state | " + " | ".join(cells) + " |")
    parameters = size(model)
    print(f"Parameters: {parameters / 1e6:,.0f} MB; Adam's state: twice as much.")


def print_operations(found: Operations) -> None:
    print("\n| TFLOP, when due | |\n|---|---:|")
    for name, number in found._asdict().items():
        print(f"| {name} | {number / 1e12:.3g} |")
    periods = 10, 50  # Of `KFAC()`.
    mean = found.mean(*periods)
    part = mean / found.gradient
    print(f"With periods of {periods}: {mean / 1e12:.3g} a step, {part:.3g} gradients.")


if __name__ == "__main__":
    main()
