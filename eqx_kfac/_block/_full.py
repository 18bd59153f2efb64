from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._custom_types import Like
from .._moments import moment
from .._operator import KroneckerOperator, vanishes
from ._base import AbstractFactors
from ._collector import Statistics
from ._gradients import AbstractGradientBlock


class FullFactors(AbstractFactors):
    r"""A layer's whole curvature matrix, for row-major $\operatorname{vec}$ of its
    canonical matrix, and the multiple of the identity that an [`eqx_kfac.L2`][] term adds
    to it. Stacked layers have leading axes.

    **Fields:**

    - `matrix`: `[*stack, P, P]`, with $P$ the entries of one canonical matrix.
    """

    matrix: Float[Array, "*stack size size"]
    l2: Float[Array, "*stack"]
    symmetric = ("matrix",)

    def is_zero(self) -> Bool[Array, ""]:
        return vanishes(self.matrix)


class Full(AbstractGradientBlock):
    r"""The whole block of the estimated curvature of a layer with $P$ parameters:

    $$F = \frac1N \sum_n \nabla_n \nabla_n^\top \in \mathbb{R}^{P \times P}, \qquad
    \nabla_n = \operatorname{vec} \sum_s g_{ns} \bar x_{ns}^\top$$

    It has no approximation but that of the Fisher estimate; it keeps $P^2$ numbers, and
    inverting takes $P^3$ operations. For small layers, and to compare other blocks with.
    """

    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        return dict(second=(d_out * d_in, d_out * d_in))

    def moments(self, gradients: Array, stack: int, like: Like) -> Any:
        vectors = gradients.reshape(*gradients.shape[: stack + 1], -1)
        return dict(second=moment(vectors, vectors, stack, like["second"]))

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> FullFactors:
        total = statistics.outputs.squares["second"]
        matrix = total / count.astype(total.dtype)
        return FullFactors(matrix, l2.astype(matrix.dtype))

    def operator(self, factors: FullFactors) -> KroneckerOperator:
        # A Kronecker product whose first factor is 1, on vectors `[1, size]`: every
        # solver is exact for it.
        return KroneckerOperator(jnp.ones((1, 1), factors.matrix.dtype), factors.matrix)
