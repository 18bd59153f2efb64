from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._custom_types import Layer
from .._misc import trailing
from .._moments import moment
from .._operator import SeriesOperator, vanishes
from ..form import AbstractForm, Rows
from ._base import AbstractBlock, AbstractFactors, sizes_and_zeros
from ._collector import Statistics
from ._sums import inverse_or_zero


class SeriesMoments(NamedTuple):
    """Second moments of rows, and of rows with those of the step before (inputs) or
    after (outputs)."""

    rows: Any = None
    pairs: Any = None
    second: Any = None
    cross: Any = None


class SeriesFactors(AbstractFactors):
    r"""The factors of a recurrent layer's curvature at one time step, their
    cross-moments from one step to the next, the mean number of steps, and the multiple of
    the identity that an [`eqx_kfac.L2`][] term adds.

    **Fields:**

    - `input_factor`: $A_0$, the second moment of the inputs, `[*stack, d_in(+1),
        d_in(+1)]`.
    - `input_cross`: $A_1$, their moment from one step to the next, of the same shape.
    - `output_factor`: $G_0$, the second moment of the gradients at the outputs, `[*stack,
        d_out, d_out]`.
    - `output_cross`: $G_1$, their moment from one step to the next, of the same shape.
    - `length`: `[*stack]`: the mean number of time steps of a sequence.
    """

    input_factor: Float[Array, "*stack d_in d_in"]
    input_cross: Float[Array, "*stack d_in d_in"]
    output_factor: Float[Array, "*stack d_out d_out"]
    output_cross: Float[Array, "*stack d_out d_out"]
    length: Float[Array, "*stack"]
    l2: Float[Array, "*stack"]
    symmetric = ("input_factor", "output_factor")

    def is_zero(self) -> Bool[Array, ""]:
        return vanishes(self.output_factor)


class Series(AbstractBlock):
    r"""The curvature of a recurrent layer $z_t = \bar W \bar x_t$, whose gradients at
    different time steps, $g_t \bar x_t^\top$, are modelled as a chain. The moments

    $$A_0 = \mathbb{E}\, \bar x_t \bar x_t^\top, \quad
    A_1 = \mathbb{E}\, \bar x_{t+1} \bar x_t^\top, \quad
    G_0 = \mathbb{E}\, g_t g_t^\top, \quad G_1 = \mathbb{E}\, g_{t+1} g_t^\top$$

    determine the covariance of the gradients at any two steps, and that of their sum.

    - `"symmetric"`: $A_1$ and $G_1$ are replaced by their symmetric parts; sequences have
        their mean length.
    - `"stationary"`: sequences are long.

    [`eqx_kfac.Expand`][], in contrast, treats time steps as independent. A tag
    with this block has to know which step follows which: see
    [`eqx_kfac.scan_cell`][], and `Tag.remember` for cells of your own.

    ??? cite "Reference"

        J. Martens, J. Ba, M. Johnson, *Kronecker-factored Curvature Approximations for
        Recurrent Neural Networks*, ICLR 2018.
    """

    kind: str = eqx.field(static=True)
    weighted = True
    mixes_positions = True

    def __init__(self, kind: str = "symmetric"):
        """**Arguments:**

        - `kind`: `"symmetric"` or `"stationary"`, as above.

        **Raises:** `ValueError` for any other kind.
        """
        if kind not in ("symmetric", "stationary"):
            raise ValueError(
                f"`kind` must be 'symmetric' or 'stationary', but is {kind!r}."
            )
        self.kind = kind

    def empty(self) -> Statistics:
        return Statistics(inputs=SeriesMoments(), outputs=SeriesMoments())

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = sizes_and_zeros(form, layer)
        if found is None:
            return self.empty()
        (_, d_out, d_in, bias, diagonal), zeros = found
        if diagonal or form.groups or d_in == 0:
            raise ValueError(
                "The block `kfac.Series` is for layers whose input is one vector, and "
                "whose weight is trained."
            )
        d = d_in + bias
        inputs = SeriesMoments(zeros(), zeros(), zeros(d, d), zeros(d, d))
        outputs = SeriesMoments(second=zeros(d_out, d_out), cross=zeros(d_out, d_out))
        return Statistics(inputs=inputs, outputs=outputs)

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        stack, like = rows.stack, slots.inputs
        d, d_out = like.second.shape[-1], slots.outputs.second.shape[-1]
        # Behind the input: the one before, and whether there is one. See `Tag.remember`.
        x = rows.x.vectors().astype(like.second.dtype)
        ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
        d_in = x.shape[-1] // 2
        now = jnp.concatenate([x[..., :d_in], ones], axis=-1)[..., :d]
        before, there = x[..., d_in : d_in + d], x[..., -1:]
        w = ones if rows.weights is None else ones * trailing(rows.weights, ones)
        w_now, axes = w * now, tuple(range(stack, x.ndim))
        inputs = SeriesMoments(
            rows=jnp.sum(w, axis=axes),
            pairs=jnp.sum(w * there, axis=axes),
            second=moment(w_now, now, stack, like.second),
            cross=moment(w_now, before, stack, like.cross),
        )
        g, after = rows.g[..., :d_out], rows.g[..., d_out:]
        outputs = SeriesMoments(
            second=moment(g, g, stack, slots.outputs.second),
            cross=moment(after, g, stack, slots.outputs.cross),
        )
        return Statistics(inputs=inputs, outputs=outputs)

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> SeriesFactors:
        x, g = statistics.inputs, statistics.outputs
        count = count.astype(x.rows.dtype)
        per_row, per_pair = inverse_or_zero(x.rows), inverse_or_zero(x.pairs)
        return SeriesFactors(
            input_factor=trailing(per_row, x.second) * x.second,
            input_cross=trailing(per_pair, x.cross) * x.cross,
            output_factor=g.second / count,
            output_cross=trailing(x.rows * per_pair, g.cross) * g.cross / count,
            length=jnp.where(x.rows == 0, 1, x.rows * inverse_or_zero(x.rows - x.pairs)),
            l2=l2.astype(g.second.dtype),
        )

    def operator(self, factors: SeriesFactors) -> SeriesOperator:
        return SeriesOperator(
            factors.output_factor,
            factors.output_cross,
            factors.input_factor,
            factors.input_cross,
            factors.length,
            self.kind,
        )
