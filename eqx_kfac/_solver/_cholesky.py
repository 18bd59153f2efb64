from typing import NamedTuple

from jaxtyping import Array, Float

from .._operator import Factor, inverse, left, right
from ._base import AbstractDampedSolver
from ._damped import damped_factors


class CholeskyState(NamedTuple):
    """The inverses of both damped factors, diagonal where these are."""

    output_inverse: Float[Array, "..."]
    input_inverse: Float[Array, "..."]


class Cholesky(AbstractDampedSolver[CholeskyState]):
    r"""Factored Tikhonov damping: the inverse of

    $$\left(G + \frac{\sqrt\lambda}{\pi} I\right) \otimes
    \left(A + \pi \sqrt\lambda I\right), \qquad
    \pi = \sqrt{\frac{\operatorname{tr} A / d_A}{\operatorname{tr} G / d_G}}$$

    through two Cholesky decompositions. The state holds the inverses themselves, so that
    applying them takes two matrix products. The damping enters them: a new one takes
    effect when the operator is factorised again.

    Where $\pi$ has no meaning the exact inverse is cheap, and is used instead: a
    $1 \times 1$ factor $b$ leaves $A + (\lambda/b) I$; a zero factor leaves
    $\lambda I$.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 6.3.
    """

    def factorise(
        self, output_factor: Factor, input_factor: Factor, damping: Float[Array, ""]
    ) -> CholeskyState:
        damped = damped_factors(output_factor, input_factor, damping)
        return CholeskyState(*map(inverse, damped))

    def apply(
        self,
        state: CholeskyState,
        vector: Float[Array, "d_out d_in"],
        damping: Float[Array, ""],
    ) -> Float[Array, "d_out d_in"]:
        return right(left(state.output_inverse, vector), state.input_inverse)
