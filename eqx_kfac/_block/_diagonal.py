import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from .._form import AbstractForm, join, Rows
from .._misc import accumulator, check_count, moment, zeros_beside
from ._base import AbstractBlock, AbstractFactors, Statistics


class Squares(eqx.Module):
    """Sums of the squares of single examples' gradients."""

    weight: Any = None
    bias: Any = None


class DiagonalFactors(AbstractFactors):
    r"""The diagonal of a layer's curvature, shaped like its canonical matrix, and the
    multiple of the identity that an [`eqx_kfac.L2`][] term adds to it. Stacked layers
    have leading axes."""

    diagonal: Float[Array, "*stack d_out d_in"]
    l2: Float[Array, "*stack"]


class Diagonal(AbstractBlock):
    r"""The exact diagonal of the estimated curvature of a layer:

    $$D = \frac1N \sum_n \left(\sum_s g_{ns} \bar x_{ns}^\top\right)^{\circ 2} \in
    \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)},$$

    the mean over the loss terms of the squares of single examples' gradients. The right
    choice for parameters that scale or shift, and the only one of which no factors are
    needed. (Of a layer whose weight is shared over positions $s$, every example's
    gradient is written out.)

    ??? cite "Reference"

        S. Becker and Y. LeCun, *Improving the Convergence of Back-Propagation Learning
        with Second-Order Methods*, 1988 Connectionist Models Summer School.
    """

    batch_axes: int = eqx.field(static=True)
    weighted = False  # The cotangents are, and nothing else enters.
    mixes_positions = True

    def __init__(self, batch_axes: int = 1):
        """**Arguments:**

        - `batch_axes`: as for [`eqx_kfac.Reduce`][].
        """
        check_count("batch_axes", batch_axes, 1)
        self.batch_axes = batch_axes

    def empty(self) -> Statistics:
        return Statistics(inputs=None, outputs=Squares())

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        leaves = [p for p in form.parameters(layer) if p is not None]
        if not leaves:
            return self.empty()
        stack, d_out, d_in, bias, _ = form.sizes(layer)
        dtype = accumulator(leaves[0].dtype)

        def zeros(*shape):
            return zeros_beside(leaves[0], stack + shape, dtype, len(stack) - form.groups)

        squares = Squares(
            weight=zeros(d_out, d_in) if d_in > 0 else None,
            bias=zeros(d_out, 1) if bias else None,
        )
        return Statistics(inputs=None, outputs=squares)

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        like = slots.outputs
        weight = bias = None
        if like.weight is not None:
            weight = self._squares(rows, rows.x.vectors(), like.weight)
        if like.bias is not None:
            ones = jnp.ones((*rows.g.shape[:-1], 1), rows.g.dtype)
            bias = self._squares(rows, ones, like.bias)
        return Statistics(inputs=None, outputs=Squares(weight, bias))

    def _squares(self, rows: Rows, x: Array, like: Any) -> Array:
        g, x, stack = rows.g.astype(like.dtype), x.astype(like.dtype), rows.stack
        axes = min(stack + self.batch_axes, g.ndim - 1)
        if math.prod(g.shape[axes:-1]) == 1:
            return moment(g**2, x**2, stack, like)
        examples = jnp.matmul(_flat(g, axes).mT, _flat(x, axes), precision="highest")
        return jnp.sum(examples**2, axis=tuple(range(stack, axes)))

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> DiagonalFactors:
        squares = statistics.outputs
        diagonal = join(squares.weight, squares.bias)
        diagonal = diagonal / count.astype(diagonal.dtype)
        return DiagonalFactors(diagonal, l2.astype(diagonal.dtype))

    def operator(self, factors: DiagonalFactors) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(factors.diagonal)


def _flat(a: Array, axes: int) -> Array:
    """`[*examples, positions, d]`, of rows with any number of axes."""
    return a.reshape(*a.shape[:axes], -1, a.shape[-1])
