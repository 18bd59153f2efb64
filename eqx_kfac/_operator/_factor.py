"""A Kronecker factor is a symmetric positive semidefinite matrix `[d, d]`, or the
diagonal `[d]` of one."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jaxtyping import Array, Float


Factor = Float[Array, "..."]  # One or two axes, of the same length.

_highest = jax.lax.Precision.HIGHEST


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
    root = jnp.linalg.cholesky(factor)
    inverse_root = jsl.solve_triangular(root, identity(factor), lower=True)
    return matmul(inverse_root.T, inverse_root)


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
