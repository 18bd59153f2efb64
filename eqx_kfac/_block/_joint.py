import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._devices import gathered, zeros_of
from .._misc import accumulator, trailing
from .._moments import moment, summed_in_parts
from .._operator import matmul
from ..form import Rows
from ._collector import Statistics
from ._gradients import by_example, Columns, Squares
from ._kronecker_factors import KroneckerFactors
from ._sums import bordered, inverse_or_zero, squared_norms
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
        columns, like = slots.inputs, slots.outputs.squares
        if slots.outputs.gradients is not None:
            return self._of_one_use(rows, slots)

        def of(x, g):
            return Examples.of(rows._replace(x=x, g=g), columns).sums(like)

        # Patches and gradients, written out, may take many times the memory of the rows.
        parts = (rows.x, rows.g), rows.stack, _size(rows), MOST, like
        return Statistics(
            zeros_of(slots.inputs), Squares(None, summed_in_parts(of, *parts))
        )

    def _of_one_use(self, rows: Rows, slots: Statistics) -> Statistics:
        """The gradients of examples, which add up over the uses of the layer, and sums
        over the rows, which add up, too."""
        found = super().statistics(rows, slots)
        weight, bias = (column is not None for column in slots.inputs)
        g = rows.g.astype(accumulator(rows.g.dtype))
        squares_g = jnp.sum(g**2, axis=-1)
        squares = squares_g * squared_norms(rows, weight, bias, g.dtype)
        axes = tuple(range(rows.stack, squares.ndim))
        of_rows, like = dict(g_norms=squares_g, norms=squares), slots.outputs.squares
        sums = {n: jnp.sum(a, axes).astype(like[n].dtype) for n, a in of_rows.items()}
        gradients, zeros = found.outputs
        return found._replace(outputs=Squares(gradients, {**zeros, **sums}))

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


# How many numbers are written out at the same time, on a CPU (whose allocator, moreover,
# keeps no more than 32 megabytes for the next step), and elsewhere.
MOST = 2**20, 2**24


def _size(rows: Rows) -> int:
    """How many numbers are written out of all examples, at least."""
    stack = rows.stack
    x = jax.eval_shape(lambda x: x.vectors(), rows.x)
    positions = math.prod(rows.g.shape[stack + 1 : -1])
    d_out, d_in = rows.g.shape[-1], x.shape[-1] + 1
    if _is_less_by_pairs(positions, d_out, d_in):
        most = positions * max(d_in, d_out, positions)
    else:
        most = d_in * max(d_out, positions)
    return math.prod(rows.g.shape[: stack + 1]) * most


def _is_less_by_pairs(positions: int, d_out: int, d_in: int) -> bool:
    """Whether products between all pairs of an example's positions are less work than
    its gradient, written out, and the squares of that."""
    pairs = 2 * positions**2 * (d_out + d_in) + positions * (d_out**2 + d_in**2)
    return pairs < d_out * d_in * (positions + d_out + d_in)


class Examples(NamedTuple):
    r"""The rows of examples, as matrices $g_n$ and $\bar x_n$. (None of them is a
    derivative: these are never taken jointly.)

    **Fields:**

    - `ones`: how many columns of ones $\bar x_n$ has beside `x`: none, or one, which is
        never written down.
    - `squares`: $\lVert \bar x \rVert^2$ of every row.
    """

    g: Float[Array, "*stack examples positions d_out"]
    x: Float[Array, "*stack examples positions d_in"]
    ones: int
    squares: Float[Array, "*stack examples positions"]

    @classmethod
    def of(cls, rows: Rows, columns: Columns) -> "Examples":
        dtype = accumulator(rows.g.dtype)
        weight, bias = columns.weight is not None, columns.bias is not None

        def matrices(a):
            # All of an example's positions are where the example is.
            whole = gathered(a.astype(dtype), rows.stack + 1)
            return by_example(whole, rows.stack, 1)

        g = matrices(rows.g)
        x = matrices(rows.x.vectors()) if weight else jnp.ones_like(g[..., :1])
        squares = squared_norms(rows, weight, bias, dtype)
        return cls(g, x, int(weight and bias), matrices(squares[..., None])[..., 0])

    @property
    def stack(self) -> int:
        """How many axes there are before the examples."""
        return self.g.ndim - 3

    def sums(self, like: dict[str, Any]) -> dict[str, Any]:
        """What is collected of them, of the shapes `like`."""
        positions, d_out = self.g.shape[-2:]
        d_in = self.x.shape[-1] + self.ones
        if _is_less_by_pairs(positions, d_out, d_in):
            sums = self._by_pairs(like)
        else:
            sums = self._by_gradients(like)
        return {name: a.astype(like[name].dtype) for name, a in sums.items()}

    def _by_gradients(self, like: dict[str, Any]) -> dict[str, Any]:
        g, x, ones, squares = self
        gradients = matmul(g.mT, x)
        if ones:
            bias = jnp.sum(g, axis=-2)[..., None]
            gradients = jnp.concatenate([gradients, bias], axis=-1)
        moments = TNT().moments(gradients, self.stack, like)
        squares_g = jnp.sum(g**2, axis=-1)
        of_rows = dict(g_norms=squares_g, norms=squares_g * squares)
        norms = {name: jnp.sum(a, axis=(-2, -1)) for name, a in of_rows.items()}
        return {**moments, **norms}

    def _by_pairs(self, like: dict[str, Any]) -> dict[str, Any]:
        r"""$\sum_n \nabla_n \nabla_n^\top = \sum_n g_n^\top (\bar x_n \bar
        x_n^\top) g_n$, and the same with both exchanged. (Where positions cancel,
        rounding is relative to what cancels.)"""
        g, x, ones, _ = self
        gg, xx = matmul(g, g.mT), matmul(x, x.mT) + ones

        def of(weighted, a, like):
            found = moment(weighted, a, self.stack, like)
            return (found + found.mT) / 2

        left = of(matmul(xx, g), g, like["left"])
        weighted = matmul(gg, x)
        right = of(weighted, x, like["right"])
        if ones:
            first, last = jnp.sum(weighted, axis=(-3, -2)), jnp.sum(gg, axis=(-3, -2, -1))
            right = bordered(right, first, last)
        squares = dict(g_norms=gg, norms=gg * xx)
        norms = {
            name: jnp.sum(jnp.trace(a, axis1=-2, axis2=-1), axis=-1)
            for name, a in squares.items()
        }
        return dict(left=left, right=right, **norms)
