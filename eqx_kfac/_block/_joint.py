import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._custom_types import Like
from .._devices import explicit_sharding, gathered, zeros_of
from .._misc import moment, number_of_parts, summed_in_parts, trailing
from .._operator import matmul
from ..form import Rows
from ._collector import Statistics
from ._gradients import by_example, Squares
from ._kronecker_factors import KroneckerFactors
from ._sums import inverse_or_zero
from ._tnt import TNT


class JointRows(TNT):
    r"""What a [`eqx_kfac.Kronecker`][] block with the sharing [`eqx_kfac.Joint`][]
    collects where positions are taken jointly. The factors are those of
    [`eqx_kfac.TNT`][], but the trace of $A$ is

    $$\frac{\sum \lVert g \rVert^2 \lVert \bar x \rVert^2}{\sum \lVert g \rVert^2}$$

    over all rows, a squared length of inputs like the trace of any other: so averages of
    both kinds have one unit."""

    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        return dict(super().shapes(d_out, d_in), g_norms=(), norms=())

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        def of(x, g):
            return self._sums(rows._replace(x=x, g=g), slots)

        # Patches and gradients, written out, may take many times the memory of the rows.
        number, like = _parts(rows), slots.outputs.squares
        sums = summed_in_parts(of, (rows.x, rows.g), rows.stack, number, like)
        return Statistics(zeros_of(slots.inputs), Squares(None, sums))

    def _sums(self, rows: Rows, slots: Statistics) -> dict[str, Any]:
        like, stack = slots.outputs.squares, rows.stack
        x = slots.inputs.inputs(rows)
        # All of an example's positions are where the example is.
        g, x = (gathered(a, stack + 1) for a in (rows.g.astype(x.dtype), x))
        g, x = by_example(g, stack, 1), by_example(x, stack, 1)
        if _is_less_by_pairs(g.shape[-2], g.shape[-1], x.shape[-1]):
            moments = _by_pairs(g, x, stack, like)
        else:
            moments = self.moments(matmul(g.mT, x), stack, like)
        g_norms, x_norms = jnp.sum(g**2, axis=-1), jnp.sum(x**2, axis=-1)
        norms = dict(g_norms=g_norms, norms=g_norms * x_norms)
        over = lambda name: jnp.sum(norms[name], axis=(-2, -1), dtype=like[name].dtype)
        sums = {name: over(name) for name in norms}
        return {**moments, **sums}

    def factors(
        self, statistics: Statistics, count: Array, l2: Array
    ) -> KroneckerFactors:
        squares = statistics.outputs.squares
        trace = squares["norms"] * inverse_or_zero(squares["g_norms"])
        factors = super().factors(statistics, count, l2)
        a, g = factors.input_factor, factors.output_factor
        return KroneckerFactors(
            input_factor=trailing(trace, a) * a,
            output_factor=trailing(inverse_or_zero(trace), g) * g,
            l2=factors.l2,
        )


MOST = 2**24  # Numbers that are written out at the same time.


def _parts(rows: Rows) -> int:
    """Into how many parts the examples are divided so that what is written out of one
    part has no more than `MOST` numbers, or nearly so."""
    stack = rows.stack
    if explicit_sharding(jax.typeof(rows.g)) is not None:
        return 1
    x = jax.eval_shape(lambda x: x.vectors(), rows.x)
    positions = math.prod(rows.g.shape[stack + 1 : -1])
    d_out, d_in = rows.g.shape[-1], x.shape[-1] + 1
    if _is_less_by_pairs(positions, d_out, d_in):
        most = positions * max(d_in, d_out, positions)
    else:
        most = d_in * max(d_out, positions)
    size = math.prod(rows.g.shape[: stack + 1]) * most
    return number_of_parts(rows.g.shape[stack], size, MOST)


def _is_less_by_pairs(positions: int, d_out: int, d_in: int) -> bool:
    """Whether products between all pairs of an example's positions are less work than
    its gradient, written out, and the squares of that."""
    pairs = 2 * positions**2 * (d_out + d_in) + positions * (d_out**2 + d_in**2)
    return pairs < d_out * d_in * (positions + d_out + d_in)


def _by_pairs(
    g: Float[Array, "*stack examples positions d_out"],
    x: Float[Array, "*stack examples positions d_in"],
    stack: int,
    like: Like,
) -> dict[str, Any]:
    r"""$\sum_n \nabla_n \nabla_n^\top = \sum_n g_n^\top (x_n x_n^\top) g_n$ with the rows
    of an example as matrices $g_n$ and $x_n$, and the same with both exchanged. (Where
    positions cancel, rounding is relative to what cancels.)"""

    def of(a, b, like):
        found = moment(matmul(matmul(b, b.mT), a), a, stack, like)
        return (found + found.mT) / 2

    return dict(left=of(g, x, like["left"]), right=of(x, g, like["right"]))
