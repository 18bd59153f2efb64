"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

N. Vyas, D. Morwani, R. Zhao, I. Shapira, D. Brandfonbrener, L. Janson, S. Kakade, *SOAP:
Improving and Stabilizing Shampoo using Adam*, 2024, algorithm 3."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Leaf(NamedTuple):
    """The state of one array; of those with less than two axes, only the moments."""

    first: Any
    second: Any
    factors: tuple[Any, Any] | None
    bases: tuple[Any, Any] | None


class State(NamedTuple):
    step: Any
    leaves: list[Leaf]


def _matrix(a: Any) -> Any:
    return a.reshape(a.shape[0], -1)


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    period: int = 10,
    largest: int = 2048,
) -> optax.GradientTransformation:
    """Sides longer than `largest` are left as they are."""

    def sides(shape):
        return [n if n <= largest else 0 for n in shape]

    def init_leaf(p):
        if p.ndim < 2:
            return Leaf(jnp.zeros_like(p), jnp.zeros_like(p), None, None)
        matrix = _matrix(p)
        factors = tuple(jnp.zeros((n, n)) for n in sides(matrix.shape))
        bases = tuple(jnp.eye(n) for n in sides(matrix.shape))
        return Leaf(jnp.zeros_like(matrix), jnp.zeros_like(matrix), factors, bases)

    def init(params):
        leaves = [init_leaf(p) for p in jax.tree.leaves(params)]
        return State(jnp.zeros((), jnp.int32), leaves)

    def to(bases, a):
        left, right = bases
        a = left.T @ a if left.size else a
        return a @ right if right.size else a

    def back(bases, a):
        left, right = bases
        a = left @ a if left.size else a
        return a @ right.T if right.size else a

    def refreshed(factor, basis, first):
        """One step of power iteration, by a QR decomposition; at first, all of them."""
        if not factor.size:
            return basis
        exact = lambda: jnp.linalg.eigh(factor)[1]
        return jax.lax.cond(first, exact, lambda: jnp.linalg.qr(factor @ basis)[0])

    def update_leaf(g, leaf, step):
        matrix, factors, bases = g, None, None
        if leaf.factors is not None:
            matrix = _matrix(g)
            outer = matrix @ matrix.T, matrix.T @ matrix
            factors = tuple(
                b2 * f + (1 - b2) * o if f.size else f
                for f, o in zip(leaf.factors, outer, strict=True)
            )
            due = lambda: tuple(
                refreshed(f, b, step == 0)
                for f, b in zip(factors, leaf.bases, strict=True)
            )
            bases = jax.lax.cond(step % period == 0, due, lambda: leaf.bases)
        first = b1 * leaf.first + (1 - b1) * matrix
        turned, mean = matrix, first
        if bases is not None:
            turned, mean = to(bases, matrix), to(bases, first)
        second = b2 * leaf.second + (1 - b2) * turned**2
        t = step + 1
        scaled = (mean / (1 - b1**t)) / (jnp.sqrt(second / (1 - b2**t)) + eps)
        if bases is not None:
            scaled = back(bases, scaled).reshape(g.shape)
        # The paper leaves out the first update, which only makes the bases.
        scaled = jnp.where(step == 0, 0, scaled)
        return scaled, Leaf(first, second, factors, bases)

    def update(updates, state, params=None):
        del params
        grads, treedef = jax.tree.flatten(updates)
        pairs = [
            update_leaf(g, leaf, state.step)
            for g, leaf in zip(grads, state.leaves, strict=True)
        ]
        new = State(state.step + 1, [leaf for _, leaf in pairs])
        return treedef.unflatten([u for u, _ in pairs]), new

    return optax.GradientTransformation(init, update)


def soap(learning_rate: Any, **choices: Any) -> optax.GradientTransformation:
    scale = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(scale_by_soap(**choices), scale)
