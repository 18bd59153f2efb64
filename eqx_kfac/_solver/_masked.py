r"""Solving where only some of a matrix's entries are there.

The inverse of a part of a matrix is no part of its inverse: $(P C P)^{-1} \ne P C^{-1}
P$, and with half of the entries gone, the latter is hardly better than a diagonal. So a
system $P C_\lambda P u = v$ is solved by a few steps of conjugate gradients, for which
$P C_\lambda^{-1} P$ is the preconditioner. Whatever their number, $\langle u, v \rangle
= \langle u, P C_\lambda P u \rangle$: a step is as long as its curvature says. And
without a mask, the first of them is the solution."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._inner_products import inner
from .._operator import MaskedOperator


# By experiment: with one step, half of what K-FAC gains is lost where half of the entries
# are; with six, nothing more is gained, and what the curvature has of noise is.
STEPS = 3


class MaskedState(NamedTuple):
    """What is kept to solve with a masked operator: the damped operator, and the state of
    the solver for it without the mask."""

    damped: MaskedOperator
    state: Any


def conjugate_gradients(
    damped: MaskedOperator,
    inverse: Callable[[Array], Array],
    vector: Float[Array, "d_out d_in"],
) -> Float[Array, "d_out d_in"]:
    """An approximate solution, given `inverse(v)`, the solution without the mask. (An
    entry that `vector` has is there, whatever the mask says: a program may have another
    mask by now.)"""
    damped = MaskedOperator(damped.operator, damped.mask | (vector != 0))
    solution, residual = jnp.zeros_like(vector), vector
    direction, size = jnp.zeros_like(vector), jnp.ones((), vector.dtype)
    for _ in range(STEPS):
        better = damped.project(inverse(residual))
        before, size = size, inner(residual, better)
        direction = better + _ratio(size, before) * direction
        product = damped.mv(direction)
        length = _ratio(size, inner(direction, product))
        solution = solution + length * direction
        residual = residual - length * product
    return solution


def _ratio(a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, ""]:
    """`a / b`; zero where nothing is left to be solved."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
