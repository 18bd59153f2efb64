"""Operators by their eigenvectors and eigenvalues, and functions of them.

`spectral`, `eigenvalues`, `trace` and `squared_norm` take the operator of one layer. They
are generic functions: an operator with a structure of its own registers a faster way.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float

from . import _decompositions as decompositions
from ._factor import outer
from ._products import applied, matmul
from ._symmetric import AbstractSymmetricOperator, sum_of_logs


class KroneckerBasis(eqx.Module):
    r"""The orthogonal matrix $Q_G \otimes Q_A$; `None` for an identity. Stacked ones
    have leading axes."""

    output_vectors: Float[Array, "*stack d_out d_out"] | None
    input_vectors: Float[Array, "*stack d_in d_in"] | None

    def coordinates(self, vector: Float[Array, "d_out d_in"]) -> Array:
        """$Q_G^T V Q_A$."""
        left, right = self.output_vectors, self.input_vectors
        v = vector if left is None else applied(left.T, vector)
        return v if right is None else applied(v, right)

    def coordinates_outer(
        self, g: Float[Array, "rows d_out"], x: Float[Array, "rows d_in"]
    ) -> Array:
        r"""Coordinates in this basis of $\sum g x^\top$."""
        left, right = self.output_vectors, self.input_vectors
        g = g if left is None else applied(g, left)
        return outer(g, x if right is None else applied(x, right))

    def combination(self, coordinates: Float[Array, "d_out d_in"]) -> Array:
        """$Q_G V Q_A^T$."""
        left, right = self.output_vectors, self.input_vectors
        v = coordinates if left is None else applied(left, coordinates)
        return v if right is None else applied(v, right.T)


class DenseBasis(eqx.Module):
    """An orthogonal matrix that acts on flattened matrices."""

    vectors: Float[Array, "size size"]

    def coordinates(self, vector: Float[Array, "d_out d_in"]) -> Array:
        return matmul(self.vectors.T, vector.reshape(-1)).reshape(vector.shape)

    def combination(self, coordinates: Float[Array, "d_out d_in"]) -> Array:
        product = matmul(self.vectors, coordinates.reshape(-1))
        return product.reshape(coordinates.shape)


class SpectralOperator(AbstractSymmetricOperator):
    r"""A symmetric positive semidefinite operator $Q \operatorname{diag}(\lambda) Q^\top$
    on matrices $V \in \mathbb{R}^{d_\text{out} \times d_\text{in}}$, with an orthogonal
    $Q$: any function of it is a function of its eigenvalues. It is what
    [`eqx_kfac.operators.KroneckerOperator`][] returns for its damped inverse and powers.

    **Fields:**

    - `basis`: $Q$: a Kronecker product of two orthogonal matrices, or a dense one.
    - `values`: $\lambda$, `[d_out, d_in]`: one eigenvalue for each column of $Q$.
    """

    basis: Any
    values: Float[Array, "d_out d_in"]

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return self.basis.combination(self.values * self.basis.coordinates(vector))

    def mv_outer(
        self, g: Float[Array, "rows d_out"], x: Float[Array, "rows d_in"]
    ) -> Float[Array, "d_out d_in"]:
        r"""The product with $\sum g x^\top$, given its rows. Not for a `DenseBasis`."""
        return self.basis.combination(self.values * self.basis.coordinates_outer(g, x))

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.values.shape, self.values.dtype)

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def diagonal(self) -> Float[Array, " size"]:
        """The diagonal in a `KroneckerBasis`, by the squares of its vectors' entries."""
        if not isinstance(self.basis, KroneckerBasis):
            return super().diagonal()
        vectors = self.basis.output_vectors, self.basis.input_vectors
        squared = KroneckerBasis(*(None if q is None else q**2 for q in vectors))
        return squared.combination(self.values).reshape(-1)

    def trace(self) -> Float[Array, ""]:
        """The sum of all eigenvalues."""
        return jnp.sum(self.values)

    def logdet(self, damping: ArrayLike = 0.0) -> Float[Array, ""]:
        r"""$\log\det(C + \lambda I)$, with `damping` $\lambda$."""
        return sum_of_logs(self.values, damping)

    def map(self, fn: Callable) -> "SpectralOperator":
        """The operator with the eigenvalues `fn(eigenvalues)`."""
        return SpectralOperator(self.basis, fn(self.values))

    def power(
        self, exponent: float | int, damping: ArrayLike = 0.0
    ) -> "SpectralOperator":
        r"""$(C + \lambda I)^p$, with `damping` $\lambda$."""
        return self.map(lambda x: (x + jnp.asarray(damping, x.dtype)) ** exponent)


@ft.singledispatch
def spectral(operator: lx.AbstractLinearOperator) -> SpectralOperator:
    """The eigenvectors and eigenvalues of a positive semidefinite operator on matrices.
    Eigenvalues are clipped at zero: rounding alone can make one negative."""
    values, vectors = decompositions.eigh_dense(operator.as_matrix())
    values = jnp.maximum(values, 0).reshape(operator.in_structure().shape)
    return SpectralOperator(DenseBasis(vectors), values)


@spectral.register
def _(operator: SpectralOperator) -> SpectralOperator:
    return operator


@spectral.register
def _(operator: lx.DiagonalLinearOperator) -> SpectralOperator:
    basis = KroneckerBasis(None, None)
    return SpectralOperator(basis, jnp.maximum(operator.diagonal, 0))


@ft.singledispatch
def eigenvalues(operator: lx.AbstractLinearOperator) -> Float[Array, "d_out d_in"]:
    """All eigenvalues, clipped at zero, in some order."""
    values = decompositions.eigvalsh(operator.as_matrix())
    return jnp.maximum(values, 0).reshape(operator.in_structure().shape)


@eigenvalues.register(SpectralOperator)
@eigenvalues.register(lx.DiagonalLinearOperator)
def _(operator: Any) -> Float[Array, "d_out d_in"]:
    return spectral(operator).values


@ft.singledispatch
def trace(operator: lx.AbstractLinearOperator) -> Float[Array, ""]:
    """The sum of the diagonal."""
    return jnp.sum(lx.diagonal(operator))


@ft.singledispatch
def squared_norm(operator: lx.AbstractLinearOperator) -> Float[Array, ""]:
    """The sum of the squares of all entries."""
    return jnp.sum(operator.as_matrix() ** 2)


@squared_norm.register(SpectralOperator)
@squared_norm.register(lx.DiagonalLinearOperator)
def _(operator: Any) -> Float[Array, ""]:
    return jnp.sum(spectral(operator).values ** 2)


trace.register(SpectralOperator, SpectralOperator.trace)
