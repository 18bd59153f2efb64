import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._form import AbstractForm, Rows
from .._misc import check_count, moment, zeros_of
from .._operator import KroneckerOperator
from ._base import AbstractBlock, AbstractFactors, Statistics
from ._gradients import Columns, columns_of, example_gradients


class FullFactors(AbstractFactors):
    r"""A layer's whole curvature matrix, for row-major $\operatorname{vec}$ of its
    canonical matrix, and the multiple of the identity that an [`eqx_kfac.L2`][] term adds
    to it. Stacked layers have leading axes."""

    matrix: Float[Array, "*stack size size"]
    l2: Float[Array, "*stack"]


class Full(AbstractBlock):
    r"""The whole block of the estimated curvature of a layer with $P$ parameters:

    $$F = \frac1N \sum_n \nabla_n \nabla_n^\top \in \mathbb{R}^{P \times P}, \qquad
    \nabla_n = \operatorname{vec} \sum_s g_{ns} \bar x_{ns}^\top$$

    No approximation but that of the Fisher estimate; $P^2$ numbers to keep, and $P^3$
    operations to invert them. For small layers, and to compare other blocks with.
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
        size = math.prod(columns.shape)
        return Statistics(inputs=columns, outputs=zeros(size, size))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        like, stack = slots.outputs, rows.stack
        x, g = slots.inputs.inputs(rows), rows.g.astype(like.dtype)
        gradients = example_gradients(g, x, stack, self.batch_axes)
        vectors = gradients.reshape(*gradients.shape[: stack + 1], -1)
        return Statistics(zeros_of(slots.inputs), moment(vectors, vectors, stack, like))

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> FullFactors:
        matrix = statistics.outputs / count.astype(statistics.outputs.dtype)
        return FullFactors(matrix, l2.astype(matrix.dtype))

    def operator(self, factors: FullFactors) -> KroneckerOperator:
        # A Kronecker product whose first factor is 1, on vectors `[1, size]`: every
        # solver is exact for it.
        return KroneckerOperator(jnp.ones((1, 1), factors.matrix.dtype), factors.matrix)
