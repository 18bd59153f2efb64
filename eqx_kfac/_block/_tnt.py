from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._form import AbstractForm, Rows
from .._misc import check_count, moment, zeros_of
from .._operator import KroneckerOperator
from ._base import AbstractBlock, Statistics
from ._gradients import Columns, columns_of, example_gradients, has_positions
from ._kronecker import KroneckerFactors


class Covariances(eqx.Module):
    r"""$\sum \nabla \nabla^\top$ and $\sum \nabla^\top \nabla$ over single examples'
    gradients."""

    rows: Any = None
    columns: Any = None


class TNT(AbstractBlock):
    r"""The covariance of a tensor normal distribution of single examples' gradients
    $\nabla_n = \sum_s g_{ns} \bar x_{ns}^\top \in \mathbb{R}^{d_\text{out} \times
    d_\text{in}(+1)}$: $G \otimes A$ with

    $$G = \frac1N \sum_n \nabla_n \nabla_n^\top, \qquad
    A = \frac{1}{\operatorname{tr} G} \frac1N \sum_n \nabla_n^\top \nabla_n$$

    Its trace is that of the exact block, with any sharing of weights. (The two axes are
    those of the canonical matrix: of a convolution, output channels and patches.)

    ??? cite "Reference"

        Y. Ren and D. Goldfarb, *Tensor Normal Training for Deep Learning Models*,
        NeurIPS 2021.
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
        return Statistics(inputs=Columns(), outputs=Covariances())

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        columns, zeros = columns_of(form, layer)
        if columns is None:
            return self.empty()
        d_out, d_in = columns.shape
        outputs = Covariances(rows=zeros(d_out, d_out), columns=zeros(d_in, d_in))
        return Statistics(inputs=columns, outputs=outputs)

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        like, stack = slots.outputs, rows.stack
        x, g = slots.inputs.inputs(rows), rows.g.astype(like.rows.dtype)
        if has_positions(g, stack, self.batch_axes):
            gradients = example_gradients(g, x, stack, self.batch_axes)
            covariances = Covariances(
                rows=moment(gradients.mT, gradients.mT, stack, like.rows),
                columns=moment(gradients, gradients, stack, like.columns),
            )
        else:  # (g x^T) (g x^T)^T = |x|^2 g g^T
            x_norm = jnp.sum(x**2, axis=-1, keepdims=True)
            g_norm = jnp.sum(g**2, axis=-1, keepdims=True)
            covariances = Covariances(
                rows=moment(g * x_norm, g, stack, like.rows),
                columns=moment(x * g_norm, x, stack, like.columns),
            )
        return Statistics(zeros_of(slots.inputs), covariances)

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> KroneckerFactors:
        columns, rows = statistics.outputs.columns, statistics.outputs.rows
        trace = jnp.trace(rows, axis1=-2, axis2=-1)[..., None, None]
        output_factor = rows / count.astype(rows.dtype)
        return KroneckerFactors(
            input_factor=jnp.where(
                trace == 0, 0, columns / jnp.where(trace == 0, 1, trace)
            ),
            output_factor=output_factor,
            l2=l2.astype(output_factor.dtype),
        )

    def operator(self, factors: KroneckerFactors) -> KroneckerOperator:
        return KroneckerOperator(factors.output_factor, factors.input_factor)
