from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._operator import chain_gain, eigh_dense, matmul, power, SeriesOperator
from ._damped import damped_factors


class SeriesState(NamedTuple):
    r"""The inverse of a [`eqx_kfac.operators.SeriesOperator`][] whose factors $G_0$,
    $A_0$ are damped: `left` and `right` take a vector to coordinates in which it is
    divided by `gains`; with `psi`, that is between a factor $I - \Psi$ and its
    transpose."""

    left: Float[Array, "*stack d_out d_out"]
    right: Float[Array, "*stack d_in d_in"]
    gains: Float[Array, "*stack d_out d_in"]
    psi: Any  # `None`, or both parts of it.


def factorise_series(operator: SeriesOperator, damping: Float[Array, ""]) -> SeriesState:
    """The state, with the damping split between the two factors."""
    damped = damped_factors(operator.output_factor, operator.input_factor, damping)
    roots = [power(factor, -0.5) for factor in damped]
    crosses = operator.output_cross, operator.input_cross
    psi = [matmul(r, matmul(c, r)) for r, c in zip(roots, crosses, strict=True)]
    if operator.kind == "symmetric":
        values, bases = zip(*(eigh_dense((p + p.T) / 2) for p in psi))
        left, right = (matmul(q.T, r) for q, r in zip(bases, roots, strict=True))
        return SeriesState(
            left, right, chain_gain(jnp.outer(*values), operator.length), None
        )
    squares, bases = zip(*(eigh_dense(matmul(p, p.T)) for p in psi))
    left, right = (matmul(q.T, r) for q, r in zip(bases, roots, strict=True))
    # In the bases of Psi Psi^T, which is diagonal there.
    psi = [matmul(q.T, matmul(p, q)) for q, p in zip(bases, psi, strict=True)]
    gains = jnp.maximum(1 - jnp.outer(*squares), 1e-6)
    return SeriesState(left, right, gains, tuple(psi))


def apply_series(
    state: SeriesState, vector: Float[Array, "d_out d_in"]
) -> Float[Array, "d_out d_in"]:
    v = matmul(state.left, matmul(vector, state.right.T))
    if state.psi is None:
        v = v / state.gains
    else:
        psi_out, psi_in = state.psi
        v = v - matmul(psi_out, matmul(v, psi_in.T))
        v = v / state.gains
        v = v - matmul(psi_out.T, matmul(v, psi_in))
    return matmul(state.left.T, matmul(v, state.right))
