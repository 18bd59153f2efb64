"""A Kronecker factor is a symmetric positive semidefinite matrix `[d, d]`, or the
diagonal `[d]` of one."""

from typing import Any

import jax.numpy as jnp
from jax.lax.linalg import cholesky, triangular_solve
from jaxtyping import Array, Float

from .._inner_products import total
from . import _decompositions as decompositions
from ._decompositions import one_by_one
from ._products import applied, contraction, matmul


Factor = Float[Array, "..."]  # One or two axes, of the same length.

_WHOLE = 400  # Smaller ones are not split: more to compile, little to gain.


def left(factor: Factor, matrix: Float[Array, "d n"]) -> Float[Array, "d n"]:
    """`factor @ matrix`."""
    return factor[:, None] * matrix if factor.ndim == 1 else applied(factor, matrix)


def right(matrix: Float[Array, "n d"], factor: Factor) -> Float[Array, "n d"]:
    """`matrix @ factor`."""
    return matrix * factor[None, :] if factor.ndim == 1 else applied(matrix, factor)


def outer(a: Float[Array, "rows m"], b: Float[Array, "rows n"]) -> Float[Array, "m n"]:
    r"""$\sum a b^\top$ over rows."""
    return applied(a, b, (0, 0))


def dense(factor: Factor) -> Float[Array, "d d"]:
    return jnp.diag(factor) if factor.ndim == 1 else factor


def diagonal(factor: Factor) -> Float[Array, " d"]:
    # Every (d + 1)-th of a matrix' entries in a row: XLA copies nothing else.
    return factor if factor.ndim == 1 else factor.reshape(-1)[:: len(factor) + 1]


def trace_of_factor(factor: Factor) -> Float[Array, ""]:
    """The sum of the diagonal."""
    return total(diagonal(factor))


def identity(factor: Factor) -> Factor:
    """The identity, in the shape of `factor`."""
    size, dtype = factor.shape[0], factor.dtype
    return jnp.ones(size, dtype) if factor.ndim == 1 else jnp.eye(size, dtype=dtype)


def inverse(factor: Factor) -> Factor:
    """The inverse of a positive definite factor."""
    return 1 / factor if factor.ndim == 1 else _inverse_of_one(factor)


def _inverse(factor: Float[Array, "d d"], root: bool = False) -> tuple[Array, Any]:
    r"""$M^{-1} = X^\top X$ and, if wanted, the inverse $X = L^{-1}$ of the Cholesky
    factor. Where it is large, by halves: then most of the work is products of full
    matrices, which are faster than decompositions on a CPU. The Schur complement is
    computed from the first half's root, not from its inverse: as exact as a Cholesky
    decomposition."""
    size = factor.shape[0]
    if size <= _WHOLE:
        x = _inverse_root(factor)
        return contraction(x, x, (0, 0)), x
    half = size // 2
    first, x = _inverse(factor[:half, :half], root=True)
    below = contraction(factor[half:, :half], x, (1, 1))
    schur = factor[half:, half:] - contraction(below, below, (1, 1))
    last, y = _inverse(schur, root)
    below = matmul(below, x)
    beside = matmul(last, below)
    corner = first + contraction(below, beside, (0, 0))
    inverse = jnp.block([[corner, -beside.T], [-beside, last]])
    if not root:
        return inverse, None
    return inverse, jnp.block([[x, jnp.zeros_like(below.T)], [-matmul(y, below), y]])


def _inverse_whole(factor: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The inverse of a factor by one triangular solve and one product: for GPUs, whose
    decompositions are fast enough, and for which every product of another shape takes
    seconds to compile. Each triangular solve takes longer than a decomposition."""
    x = _inverse_root(factor)
    return applied(x, x, (0, 0))


def _inverse_root(factor: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The inverse of the Cholesky factor."""
    # A transposed symmetric matrix is the same one, in the order that LAPACK reads.
    lower = cholesky(factor.T, symmetrize_input=False)
    return triangular_solve(lower, identity(factor), left_side=True, lower=True)


_inverse_of_one = one_by_one(lambda matrix: _inverse(matrix)[0], _inverse_whole)


def eigh(factor: Factor) -> tuple[Float[Array, " d"], Any]:
    """Eigenvalues, clipped at zero (rounding alone can make one negative), and
    eigenvectors; `None` for those of a diagonal factor, whose eigenvalues stay in
    place."""
    if factor.ndim == 1:
        return jnp.maximum(factor, 0), None
    values, vectors = decompositions.eigh_dense(factor)
    return jnp.maximum(values, 0), vectors


def power(factor: Factor, exponent: float | int) -> Factor:
    values, vectors = eigh(factor)
    powers = values**exponent
    return powers if vectors is None else matmul(vectors * powers[None, :], vectors.T)
