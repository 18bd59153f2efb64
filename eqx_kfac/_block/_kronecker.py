import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._form import AbstractForm
from .._misc import accumulator, moment, trailing, zeros_beside
from .._operator import KroneckerOperator
from ._base import AbstractBlock, AbstractFactors, Rows, Statistics
from ._sharing import AbstractSharing, Expand


class InputMoments(eqx.Module):
    r"""$\sum w$, $\sum w x$ and $\sum w x x^\top$ over a layer's rows. The bias column
    $\bar x = [x; 1]$ costs no copy: its moments are the first two."""

    rows: Any = None
    first: Any = None
    second: Any = None


class KroneckerFactors(AbstractFactors):
    r"""The two factors of a layer's curvature $G \otimes A$, and the multiple of the
    identity that an [`eqx_kfac.L2`][] term adds to it. Stacked layers have leading
    axes."""

    input_factor: Float[Array, "*stack d_in d_in"]
    output_factor: Float[Array, "*stack d_out d_out"]
    l2: Float[Array, "*stack"]


class Kronecker(AbstractBlock):
    r"""The Kronecker-factored block $G \otimes A$ of a layer $z = \bar W \bar x$:

    $$A = \frac1R \sum_\text{rows} \bar x \bar x^\top \in
    \mathbb{R}^{d_\text{in}(+1) \times d_\text{in}(+1)}, \qquad
    G = \frac1N \sum_\text{rows} g g^\top \in \mathbb{R}^{d_\text{out} \times
    d_\text{out}}$$

    with $R$ the rows that pass through the layer, $N$ the loss terms, and $g$ the
    gradient at $z$ of the *sum* of the losses. [`eqx_kfac.Expand`][] and
    [`eqx_kfac.Reduce`][] say what a row is when a weight is shared over positions.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015.
    """

    sharing: AbstractSharing
    weighted: bool = eqx.field(static=True)

    def __init__(self, sharing: AbstractSharing = Expand(), weighted: bool = True):
        """**Arguments:**

        - `sharing`: [`eqx_kfac.Expand`][] or [`eqx_kfac.Reduce`][].
        - `weighted`: whether the weights of the loss terms are weights of the layer's
            inputs too. False for a layer whose inputs are not examples.
        """
        self.sharing = sharing
        self.weighted = weighted

    @property
    def mixes_positions(self) -> bool:  # pyright: ignore
        return self.sharing.mixes_positions

    def empty(self) -> Statistics:
        return Statistics(inputs=InputMoments(), outputs=None)

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        weight, bias = form.parameters(layer)
        leaf = bias if weight is None else weight
        if leaf is None:
            return self.empty()
        stack, d_in, d_out = form.sizes(layer)
        dtype = accumulator(leaf.dtype)

        def zeros(*shape):
            return zeros_beside(leaf, stack + shape, dtype, len(stack))

        moments = InputMoments(
            rows=zeros(),
            first=None if weight is None or bias is None else zeros(d_in),
            second=None if weight is None else zeros(d_in, d_in),
        )
        return Statistics(inputs=moments, outputs=zeros(d_out, d_out))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, g, weights, stack = self.sharing(rows)
        like = slots.inputs
        examples = tuple(range(stack, x.ndim - 1))
        wx = x
        if weights is None:
            number = math.prod(x.shape[stack:-1])
            count = jnp.full(x.shape[:stack], number, like.rows.dtype)
        else:
            w = trailing(weights, x).astype(accumulator(x.dtype))
            x = x.astype(w.dtype)
            wx = x * w
            count = jnp.sum(jnp.broadcast_to(w[..., 0], x.shape[:-1]), axis=examples)
        first = second = None
        if like.first is not None:
            first = jnp.sum(wx, axis=examples, dtype=like.first.dtype)
        if like.second is not None:
            second = moment(wx, x, stack, like.second)
        moments = InputMoments(count.astype(like.rows.dtype), first, second)
        return Statistics(inputs=moments, outputs=moment(g, g, stack, slots.outputs))

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> KroneckerFactors:
        # A layer that nothing passed through has no curvature, rather than 0/0.
        rows = statistics.inputs.rows
        scale = jnp.where(rows == 0, 0, 1 / jnp.where(rows == 0, 1, rows))
        second = _homogeneous(statistics.inputs)
        output_factor = statistics.outputs / count.astype(statistics.outputs.dtype)
        return KroneckerFactors(
            input_factor=second * scale[..., None, None],
            output_factor=output_factor,
            l2=l2.astype(output_factor.dtype),
        )

    def operator(self, factors: KroneckerFactors) -> KroneckerOperator:
        return KroneckerOperator(factors.output_factor, factors.input_factor)


def _homogeneous(moments: InputMoments) -> Float[Array, "*stack d_in d_in"]:
    r"""$\sum \bar x \bar x^\top$ of the coordinates that are there: $x$, 1, or both."""
    rows = moments.rows[..., None, None]
    if moments.second is None:
        return rows
    if moments.first is None:
        return moments.second
    column = moments.first[..., None]
    return jnp.concatenate(
        [
            jnp.concatenate([moments.second, column], axis=-1),
            jnp.concatenate([column.mT, rows], axis=-1),
        ],
        axis=-2,
    )
