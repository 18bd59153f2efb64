import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from .._form import AbstractForm, Rows
from .._misc import check_count, zeros_of
from ._base import AbstractBlock, AbstractFactors, Statistics
from ._gradients import Columns, columns_of, example_gradients, has_positions


class IdentityFactors(AbstractFactors):
    """A multiple of the identity, for a canonical matrix of a `shape`, and what an
    [`eqx_kfac.L2`][] term adds to it. Stacked layers have leading axes."""

    scale: Float[Array, "*stack"]
    l2: Float[Array, "*stack"]
    shape: tuple[int, int] = eqx.field(static=True)


class Identity(AbstractBlock):
    r"""A multiple of the identity that has the trace of the exact block of a layer with
    $P$ parameters:

    $$\frac1P \frac1N \sum_n \left\lVert \sum_s g_{ns} \bar x_{ns}^\top
    \right\rVert^2 I$$

    Gradient descent within the layer, at a scale that fits the other layers' steps. One
    number to keep.
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
        return Statistics(inputs=Columns(), outputs=None)

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        columns, zeros = columns_of(form, layer)
        if columns is None:
            return self.empty()
        return Statistics(inputs=columns, outputs=zeros())

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        like, stack = slots.outputs, rows.stack
        x, g = slots.inputs.inputs(rows), rows.g.astype(like.dtype)
        if has_positions(g, stack, self.batch_axes):
            norms = example_gradients(g, x, stack, self.batch_axes) ** 2
        else:
            norms = jnp.sum(g**2, axis=-1) * jnp.sum(x**2, axis=-1)
        norm = jnp.sum(norms, axis=tuple(range(stack, norms.ndim)))
        return Statistics(zeros_of(slots.inputs), norm)

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> IdentityFactors:
        shape, norm = statistics.inputs.shape, statistics.outputs
        scale = norm / count.astype(norm.dtype) / math.prod(shape)
        return IdentityFactors(scale, l2.astype(scale.dtype), shape)

    def operator(self, factors: IdentityFactors) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(jnp.full(factors.shape, factors.scale))
