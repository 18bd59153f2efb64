"""Sums over rows, and means of what there may be none of."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._custom_types import Like, Weights
from .._misc import trailing
from ..form import Rows


def inverse_or_zero(number: Float[Array, "*stack"]) -> Float[Array, "*stack"]:
    """Zero for zero: a layer that nothing passed through has no curvature."""
    nothing = (number == 0).astype(number.dtype)
    return (1 - nothing) / (number + nothing)


def total_weight(
    weights: Weights, g: Array, stack: int, like: Like
) -> Float[Array, "*stack"]:
    """The sum of the weights of all rows, or their number."""
    if weights is None:
        # As a function of the data: under `vmap`, the backward pass of a `custom_vjp`
        # runs for single examples, and what is constant would not be added up.
        number = math.prod(g.shape[stack:-1])
        probe = jnp.sum(g, axis=tuple(range(stack, g.ndim)))
        return number + 0 * (probe == 0).astype(like.dtype)
    w = jnp.broadcast_to(trailing(weights, g)[..., 0], g.shape[:-1])
    axes = tuple(range(stack, w.ndim))
    return jnp.sum(w, axis=axes, dtype=like.dtype)


def squared_norms(
    rows: Rows, weight: bool, bias: bool, dtype: DTypeLike
) -> Float[Array, "*rows"]:
    r"""$\lVert \bar x \rVert^2$ of every row, where the ones of $\bar x$ count if there
    is a `bias`, and $x$ if there is a `weight`."""
    ones = jnp.ones_like(rows.g[..., 0], dtype)
    if not weight:
        return ones
    squares = rows.x.sizes().astype(dtype)
    return squares + ones if bias and not rows.derivative else squares


def bordered(
    second: Float[Array, "*stack d d"],
    first: Float[Array, "*stack d"],
    ones: Float[Array, "*stack"],
) -> Float[Array, "*stack d+1 d+1"]:
    r"""The moments of $[x; 1]$, given those of $x$: the matrix with the blocks `second`
    and `ones` on its diagonal, and `first` beside these."""
    # XLA fuses a padding and two selections with what comes next, while blocks written
    # side by side are copied.
    last = jnp.concatenate([first, ones[..., None]], axis=-1)
    stack, size = last.ndim - 1, last.shape[-1]
    second = jnp.pad(second, [(0, 0)] * stack + [(0, 1), (0, 1)])
    is_last = (jnp.arange(size) == size - 1).reshape(*[1] * stack, size)
    rows = jnp.where(is_last[..., None, :], last[..., :, None], second)
    return jnp.where(is_last[..., :, None], last[..., None, :], rows)
