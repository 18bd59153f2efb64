from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._custom_types import Like
from .._devices import explicit_sharding
from .._moments import moment
from .._operator import KroneckerOperator
from ._collector import Statistics
from ._gradients import AbstractGradientBlock
from ._kronecker_factors import KroneckerFactors


class TNT(AbstractGradientBlock):
    r"""The covariance of a tensor normal distribution of single examples' gradients
    $\nabla_n = \sum_s g_{ns} \bar x_{ns}^\top \in \mathbb{R}^{d_\text{out} \times
    d_\text{in}(+1)}$: $G \otimes A$ with

    $$G = \frac1N \sum_n \nabla_n \nabla_n^\top, \qquad
    A = \frac{1}{\operatorname{tr} G} \frac1N \sum_n \nabla_n^\top \nabla_n$$

    Its trace is that of the exact block, with any sharing of weights. (The two axes are
    those of the canonical matrix: for a convolution, output channels and patches.)

    ??? cite "Reference"

        Y. Ren and D. Goldfarb, *Tensor Normal Training for Deep Learning Models*,
        NeurIPS 2021.
    """

    two_sided = True

    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        return dict(left=(d_out, d_out), right=(d_in, d_in))

    def moments(self, gradients: Array, stack: int, like: Like) -> Any:
        a = gradients
        right = moment(a, a, stack, like["right"])
        if a.shape[-2] > a.shape[-1] or explicit_sharding(jax.typeof(a)) is not None:
            return dict(left=moment(a.mT, a.mT, stack, like["left"]), right=right)
        # One product for each example needs no transposed copy of the gradients, and its
        # results are no larger than these.
        squares = jnp.einsum("...ij,...kj->...ik", a, a)
        left = jnp.sum(squares, axis=stack, dtype=like["left"].dtype)
        return dict(left=left, right=right)

    def moments_of_rows(self, g: Array, x: Array, stack: int, like: Like) -> Any:
        # (g x^T) (g x^T)^T = |x|^2 g g^T
        x_norm = jnp.sum(x**2, axis=-1, keepdims=True)
        g_norm = jnp.sum(g**2, axis=-1, keepdims=True)
        return dict(
            left=moment(g * x_norm, g, stack, like["left"]),
            right=moment(x * g_norm, x, stack, like["right"]),
        )

    def factors(
        self, statistics: Statistics, count: Array, l2: Array
    ) -> KroneckerFactors:
        squares = statistics.outputs.squares
        left, right = squares["left"], squares["right"]
        trace = jnp.trace(left, axis1=-2, axis2=-1)[..., None, None]
        output_factor = left / count.astype(left.dtype)
        return KroneckerFactors(
            input_factor=right / jnp.where(trace == 0, 1, trace),  # Both may be zero.
            output_factor=output_factor,
            l2=l2.astype(output_factor.dtype),
        )

    def operator(self, factors: KroneckerFactors) -> KroneckerOperator:
        return KroneckerOperator(factors.output_factor, factors.input_factor)
