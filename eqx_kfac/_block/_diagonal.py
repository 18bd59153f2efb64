from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float

from .._custom_types import Like
from .._moments import moment
from ._base import AbstractFactors
from ._collector import Statistics
from ._gradients import AbstractGradientBlock


class DiagonalFactors(AbstractFactors):
    r"""The diagonal of a layer's curvature, shaped like its canonical matrix, and the
    multiple of the identity that an [`eqx_kfac.L2`][] term adds to it. Stacked layers
    have leading axes.

    **Fields:**

    - `diagonal`: `[*stack, d_out, d_in(+1)]`: the curvature in each entry of the matrix.
    """

    diagonal: Float[Array, "*stack d_out d_in"]
    l2: Float[Array, "*stack"]

    def is_zero(self) -> Bool[Array, ""]:
        return jnp.all(self.diagonal == 0)


class Diagonal(AbstractGradientBlock):
    r"""The exact diagonal of the estimated curvature of a layer:

    $$D = \frac1N \sum_n \left(\sum_s g_{ns} \bar x_{ns}^\top\right)^{\circ 2} \in
    \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)},$$

    the mean over the loss terms of the squares of single examples' gradients. It is the
    right choice for parameters that scale or shift, and the only one for which no factors
    are needed. (If a layer's weight is shared over positions $s$, every example's
    gradient is written out.)

    ??? cite "Reference"

        S. Becker and Y. LeCun, *Improving the Convergence of Back-Propagation Learning
        with Second-Order Methods*, 1988 Connectionist Models Summer School.
    """

    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        return dict(squares=(d_out, d_in))

    def moments(self, gradients: Array, stack: int, like: Like) -> Any:
        return dict(squares=jnp.sum(gradients**2, axis=stack))

    def moments_of_rows(self, g: Array, x: Array, stack: int, like: Like) -> Any:
        return dict(squares=moment(g**2, x**2, stack, like["squares"]))

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> DiagonalFactors:
        total = statistics.outputs.squares["squares"]
        diagonal = total / count.astype(total.dtype)
        return DiagonalFactors(diagonal, l2.astype(diagonal.dtype))

    def operator(self, factors: DiagonalFactors) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(factors.diagonal)
