import equinox as eqx

from .._checks import check_flag
from .._operator import diagonal, Factor, inverse
from ._factored import AbstractFactoredSolver, InverseState


class Cholesky(AbstractFactoredSolver):
    r"""Factored Tikhonov damping: the inverse of

    $$\left(G + \frac{\sqrt\lambda}{\pi} I\right) \otimes
    \left(A + \pi \sqrt\lambda I\right), \qquad
    \pi = \sqrt{\frac{\operatorname{tr} A / d_A}{\operatorname{tr} G / d_G}}$$

    through two Cholesky decompositions. The state holds the inverses themselves, so
    applying them takes two matrix products. The inverses contain the damping, so a new
    damping takes effect when the operator is factorised again.

    Where $\pi$ has no meaning, the exact inverse is cheap, and is used instead: a
    $1 \times 1$ factor $b$ leaves $A + (\lambda/b) I$; a zero factor leaves
    $\lambda I$.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 6.3.
    """

    scaled_bias: bool = eqx.field(static=True)

    def __init__(self, scaled_bias: bool = False):
        r"""**Arguments:**

        - `scaled_bias`: for a layer with weights and a bias, damp the bias in the units
            of the data. Its coordinate is one whatever these are. With $m > 0$ the mean
            of the other diagonal entries of $A$,
            $\operatorname{diag}(1, \dots, 1, 1 / \min(1, 3 m))$ takes the place of the
            identity that is added to $A$; and $m$ that of
            $\operatorname{tr} A / d_A$ in $\pi$ if the bias has more than 97 % of
            $\operatorname{tr} A$. Where data are small, as behind layers in which a
            signal fades, biases would otherwise take steps of many times the size of
            what they are added to, and the weights would be damped according to the bias
            alone.
        """
        check_flag("scaled_bias", scaled_bias)
        self.scaled_bias = scaled_bias

    def invert(self, factor: Factor, previous: Factor | None) -> Factor:
        return inverse(factor)

    def bounds(self, state: InverseState) -> tuple:
        return tuple(map(diagonal, state))  # Of positive definite matrices.
