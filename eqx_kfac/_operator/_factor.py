"""A Kronecker factor is a symmetric positive semidefinite matrix `[d, d]`, or the
diagonal `[d]` of one."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jaxtyping import Array, Float


Factor = Float[Array, "..."]  # One or two axes, of the same length.

_highest = jax.lax.Precision.HIGHEST
_WHOLE = 512  # Smaller triangles are not split: more to compile, little to gain.


def matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_highest)


def left(factor: Factor, matrix: Float[Array, "d n"]) -> Float[Array, "d n"]:
    """`factor @ matrix`."""
    return factor[:, None] * matrix if factor.ndim == 1 else matmul(factor, matrix)


def right(matrix: Float[Array, "n d"], factor: Factor) -> Float[Array, "n d"]:
    """`matrix @ factor`."""
    return matrix * factor[None, :] if factor.ndim == 1 else matmul(matrix, factor)


def dense(factor: Factor) -> Float[Array, "d d"]:
    return jnp.diag(factor) if factor.ndim == 1 else factor


def diagonal(factor: Factor) -> Float[Array, " d"]:
    return factor if factor.ndim == 1 else jnp.diag(factor)


def identity(factor: Factor) -> Factor:
    """The identity, in the shape of `factor`."""
    size, dtype = factor.shape[0], factor.dtype
    return jnp.ones(size, dtype) if factor.ndim == 1 else jnp.eye(size, dtype=dtype)


def inverse(factor: Factor) -> Factor:
    """The inverse of a positive definite factor."""
    if factor.ndim == 1:
        return 1 / factor
    return _inverse_and_gram(jnp.linalg.cholesky(factor))[1]


def _inverse_and_gram(root: Array) -> tuple[Array, Array]:
    r"""$X = L^{-1}$ of a lower triangular matrix, and $X^\top X$. By halves, where it is
    large: then most of the work is products of full matrices, which are faster than
    triangular solves, and what is known to be zero or symmetric is not computed."""
    size = root.shape[0]
    if size <= _WHOLE:
        inverse = jsl.solve_triangular(root, identity(root), lower=True)
        return inverse, matmul(inverse.T, inverse)
    half = size // 2
    first, first_gram = _inverse_and_gram(root[:half, :half])
    last, last_gram = _inverse_and_gram(root[half:, half:])
    below = -matmul(last, matmul(root[half:, :half], first))
    beside = matmul(below.T, last)
    zeros = jnp.zeros_like(below.T)
    inverse = jnp.block([[first, zeros], [below, last]])
    gram = first_gram + matmul(below.T, below)
    return inverse, jnp.block([[gram, beside], [beside.T, last_gram]])


def eigh(factor: Factor) -> tuple[Float[Array, " d"], Any]:
    """Eigenvalues, clipped at zero (rounding alone can make one negative), and
    eigenvectors; `None` for those of a diagonal factor, whose eigenvalues stay in
    place."""
    if factor.ndim == 1:
        return jnp.maximum(factor, 0), None
    values, vectors = jnp.linalg.eigh(factor)
    return jnp.maximum(values, 0), vectors


def power(factor: Factor, exponent: float | int) -> Factor:
    values, vectors = eigh(factor)
    powers = values**exponent
    return powers if vectors is None else matmul(vectors * powers[None, :], vectors.T)
