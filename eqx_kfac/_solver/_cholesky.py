from typing import Any

from .._operator import diagonal, Factor, inverse
from ._factored import AbstractFactoredSolver, InverseState


class Cholesky(AbstractFactoredSolver):
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

    def invert(self, factor: Factor, previous: Factor | None) -> Factor:
        return inverse(factor)

    def bounds(self, state: InverseState) -> Any:
        return tuple(map(diagonal, state))  # Of positive definite matrices.
