import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float

from .._custom_types import Like
from .._devices import zeros_of
from ._base import AbstractFactors
from ._collector import Statistics
from ._gradients import AbstractGradientBlock


class IdentityFactors(AbstractFactors):
    """A multiple of the identity, for a canonical matrix of a `shape`, and what an
    [`eqx_kfac.L2`][] term adds to it. Stacked layers have leading axes.

    **Fields:**

    - `scale`: `[*stack]`: the multiple of the identity.
    - `shape`: of the canonical matrix, `(d_out, d_in(+1))`.
    """

    scale: Float[Array, "*stack"]
    l2: Float[Array, "*stack"]
    shape: tuple[int, int] = eqx.field(static=True)

    def is_zero(self) -> Bool[Array, ""]:
        return self.scale == 0


class Identity(AbstractGradientBlock):
    r"""A multiple of the identity that has the trace of the exact block of a layer with
    $P$ parameters:

    $$\frac1P \frac1N \sum_n \left\lVert \sum_s g_{ns} \bar x_{ns}^\top
    \right\rVert^2 I$$

    It gives gradient descent within the layer, at a scale that fits the other layers'
    steps. Only one number is kept.
    """

    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        return dict(rows=(d_out,), columns=(d_in,))

    def moments(self, gradients: Array, stack: int, like: Like) -> Any:
        return self._norms(jnp.sum(gradients**2, axis=-1), stack, like)

    def moments_of_rows(self, g: Array, x: Array, stack: int, like: Like) -> Any:
        return self._norms(g**2 * jnp.sum(x**2, axis=-1, keepdims=True), stack, like)

    def _norms(self, norms: Array, stack: int, like: Like) -> Any:
        """The squared norms of all rows; of the columns, only their number counts."""
        rows = jnp.sum(norms, axis=tuple(range(stack, norms.ndim - 1)))
        return dict(rows=rows, columns=zeros_of(like["columns"]))

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> IdentityFactors:
        squares = statistics.outputs.squares
        rows, columns = squares["rows"], squares["columns"]
        shape = rows.shape[-1], columns.shape[-1]
        scale = jnp.sum(rows, axis=-1) / count.astype(rows.dtype) / math.prod(shape)
        return IdentityFactors(scale=scale, l2=l2.astype(scale.dtype), shape=shape)

    def operator(self, factors: IdentityFactors) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(jnp.full(factors.shape, factors.scale))
