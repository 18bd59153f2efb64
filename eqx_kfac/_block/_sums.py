"""Sums over rows, and means of what there may be none of."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._custom_types import Like, Weights
from .._misc import trailing


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
