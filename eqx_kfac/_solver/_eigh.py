from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._operator import Factor, KroneckerBasis, SpectralOperator
from ._base import AbstractDampedSolver


class EighState(NamedTuple):
    """Eigenvalues (clipped at zero) and eigenvectors of both factors. Those of a diagonal
    factor are not kept: it has `None`, and its eigenvalues in place."""

    output_values: Float[Array, "*stack d_out"]
    output_vectors: Float[Array, "*stack d_out d_out"] | None
    input_values: Float[Array, "*stack d_in"]
    input_vectors: Float[Array, "*stack d_in d_in"] | None


class AbstractEigenSolver(AbstractDampedSolver[EighState]):
    """Exact damping, in eigenbases of both factors."""

    state_type = EighState

    def decompose(self, factor: Factor, previous: tuple | None) -> tuple:
        return self.eigenbasis(factor, None if previous is None else previous[1])

    def inverse(self, state: EighState, damping: Float[Array, ""]) -> SpectralOperator:
        eigenvalues = jnp.outer(state.output_values, state.input_values)
        basis = KroneckerBasis(state.output_vectors, state.input_vectors)
        return SpectralOperator(basis, eigenvalues).power(-1, damping)


class Eigh(AbstractEigenSolver):
    r"""Exact damping, through the eigendecompositions of both factors:

    $$(G \otimes A + \lambda I)^{-1} \operatorname{vec}(V) = \operatorname{vec}\left(
    Q_G \left[\frac{Q_G^\top V Q_A}{\lambda_G \lambda_A^\top + \lambda}\right]
    Q_A^\top\right)$$

    The state does not depend on $\lambda$: a new damping costs nothing. Factorising costs
    several times as much as with [`eqx_kfac.Cholesky`][]; applying the inverse takes four
    matrix products instead of two.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, appendix B.
    """
