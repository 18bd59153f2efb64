from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import Array, Float

from .._form import AbstractForm, Rows
from .._misc import check_count, zeros_of
from ._base import AbstractBlock, AbstractFactors, Statistics
from ._gradients import Columns, columns_of, squares


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
        return Statistics(inputs=Columns(), outputs=None)

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        columns, zeros = columns_of(form, layer)
        if columns is None:
            return self.empty()
        return Statistics(inputs=columns, outputs=zeros(*columns.shape))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x = slots.inputs.inputs(rows)
        total = squares(rows.g, x, rows.stack, self.batch_axes, slots.outputs)
        return Statistics(zeros_of(slots.inputs), total)

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> DiagonalFactors:
        diagonal = statistics.outputs / count.astype(statistics.outputs.dtype)
        return DiagonalFactors(diagonal, l2.astype(diagonal.dtype))

    def operator(self, factors: DiagonalFactors) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(factors.diagonal)
