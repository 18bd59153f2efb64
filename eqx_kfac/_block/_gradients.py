"""The gradients of single examples with respect to a layer's canonical matrix."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._checks import check_count
from .._custom_types import Layer, Like
from .._devices import gathered, zeros_of
from .._misc import accumulator
from .._moments import moment
from .._operator import matmul
from ..form import AbstractForm, Rows
from ._base import AbstractCentredBlock, AbstractPerExampleBlock, sizes_and_zeros
from ._collector import Statistics


class Columns(NamedTuple):
    """Which columns of the canonical matrix are trained, those of the weight or that of
    the bias: zeros (for slots hold arrays), or `None`."""

    weight: Any = None
    bias: Any = None

    def inputs(self, rows: Rows) -> Float[Array, "*rows d_in"]:
        r"""$\bar x$, of the columns that there are."""
        dtype = accumulator(rows.g.dtype)
        constant = 0 if rows.derivative else 1
        ones = jnp.full_like(rows.g[..., :1], constant, dtype)
        if self.weight is None:
            return ones
        x = rows.x.vectors().astype(dtype)
        return x if self.bias is None else jnp.concatenate([x, ones], axis=-1)


def columns_of(
    form: AbstractForm, layer: Layer
) -> tuple[Columns, tuple[int, int], Callable] | None:
    """The columns of a layer that are trained, if any, the shape of its canonical matrix,
    and how to make its slots."""
    found = sizes_and_zeros(form, layer)
    if found is None:
        return None
    (_, d_out, d_in, bias, _), zeros = found
    columns = Columns(zeros() if d_in > 0 else None, zeros() if bias else None)
    return columns, (d_out, d_in + bias), zeros


class AbstractGradientBlock(AbstractPerExampleBlock, AbstractCentredBlock):
    r"""A block that is made of second moments of single examples' gradients
    $\nabla_n = \sum_s g_{ns} \bar x_{ns}^\top$."""

    batch_axes: int = eqx.field(static=True, default=1)
    # The cotangents carry the weights already, and nothing else enters.
    weighted: bool = eqx.field(static=True, default=False, init=False, repr=False)
    mixes_positions: bool = eqx.field(static=True, default=True, init=False, repr=False)
    derivatives = True
    reverse_derivatives = True

    def __init__(self, batch_axes: int = 1):
        """**Arguments:**

        - `batch_axes`: as for [`eqx_kfac.Reduce`][].
        """
        self.batch_axes = check_count("batch_axes", batch_axes, 1)

    @abc.abstractmethod
    def moments(
        self,
        gradients: Float[Array, "*stack examples d_out d_in"],
        stack: int,
        like: Like,
    ) -> Any:
        """Sums over examples, of the shapes `like`."""

    def moments_of_rows(
        self,
        g: Float[Array, "*rows d_out"],
        x: Float[Array, "*rows d_in"],
        stack: int,
        like: Like,
    ) -> Any:
        """The moments of the gradients of examples with one row each. A block overrides
        this if it can do without writing these gradients out."""
        gradients = example_gradients(g, x, stack, self.batch_axes)
        return self.moments(gradients, stack, like)

    @abc.abstractmethod
    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the moments, by name, for a canonical matrix."""

    def empty(self) -> Statistics:
        return Statistics(Columns(), Squares(None, dict.fromkeys(self.shapes(0, 0))))

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        shapes = self.shapes(*shape)
        squares = {name: zeros(*s) for name, s in shapes.items()}
        return Statistics(columns, Squares(None, squares))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, stack = slots.inputs.inputs(rows), rows.stack
        g, (gradients, like) = rows.g.astype(x.dtype), slots.outputs
        if gradients is not None:
            outputs = slots.outputs.filled(g, x, stack, self.batch_axes)
        elif has_positions(g, stack, self.batch_axes):
            found = example_gradients(g, x, stack, self.batch_axes)
            outputs = Squares(None, self.moments(found, stack, like))
        else:
            outputs = Squares(None, self.moments_of_rows(g, x, stack, like))
        return Statistics(zeros_of(slots.inputs), outputs)

    def per_example_slots(
        self, form: AbstractForm, layer: Layer, examples: int
    ) -> Statistics:
        slots = self.slots(form, layer)
        return slots._replace(outputs=slots.outputs.per_example(form, layer, examples))

    def from_per_example(self, statistics: Statistics) -> Statistics:
        gradients, squares = statistics.outputs
        if gradients is None:
            return statistics
        like = jtu.tree_map(jax.typeof, squares)
        moments = self.moments(gradients, gradients.ndim - 3, like)
        # What a block sums up over rows, beside the moments, is there already.
        return statistics._replace(outputs=Squares(None, {**squares, **moments}))

    def minus_mean(
        self,
        statistics: Statistics,
        mean: Float[Array, "*stack d_out d_in"],
        count: Float[Array, ""],
    ) -> Statistics:
        squares = statistics.outputs.squares
        like = jtu.tree_map(jax.typeof, squares)
        # Moments are squares, so one example that is so much larger counts as many.
        one = (jnp.sqrt(count) * mean)[..., None, :, :].astype(accumulator(mean.dtype))
        moments = self.moments(one, mean.ndim - 2, like)
        less = {name: squares[name] - moment for name, moment in moments.items()}
        return statistics._replace(outputs=Squares(None, {**squares, **less}))


class Squares(NamedTuple):
    """Slots for what is made of squares of examples' gradients; these stay empty where
    there are slots for the gradients themselves."""

    gradients: Any
    squares: Any

    def filled(self, g: Array, x: Array, stack: int, batch_axes: int) -> "Squares":
        """The gradients of one use."""
        gradients = example_gradients(g, x, stack, batch_axes)
        gradients = gathered(gradients.astype(self.gradients.dtype), stack)
        return Squares(gradients, zeros_of(self.squares))

    def per_example(self, form: AbstractForm, layer: Layer, examples: int) -> "Squares":
        """Slots for gradients."""
        found = columns_of(form, layer)
        if found is None:
            return self
        _, shape, zeros = found
        return self._replace(gradients=zeros(examples, *shape))


def has_positions(g: Array, stack: int, batch_axes: int) -> bool:
    return math.prod(g.shape[stack + batch_axes : -1]) > 1


def squares(
    g: Float[Array, "*rows d_out"],
    x: Float[Array, "*rows d_in"],
    stack: int,
    batch_axes: int,
    like: Like,
) -> Float[Array, "*stack d_out d_in"]:
    r"""$\sum_n (\sum_s g_{ns} x_{ns}^\top)^{\circ 2}$."""
    g, x = g.astype(like.dtype), x.astype(like.dtype)
    if has_positions(g, stack, batch_axes):
        gradients = example_gradients(g, x, stack, batch_axes)
        return jnp.sum(gradients**2, axis=stack)
    return moment(g**2, x**2, stack, like)


def example_gradients(
    g: Float[Array, "*rows d_out"],
    x: Float[Array, "*rows d_in"],
    stack: int,
    batch_axes: int,
) -> Float[Array, "*stack examples d_out d_in"]:
    r"""$\sum_s g_{ns} x_{ns}^\top$ for every example $n$, written out."""
    g, x = by_example(g, stack, batch_axes), by_example(x, stack, batch_axes)
    return matmul(g.mT, x)


def by_example(
    rows: Float[Array, "*rows d"], stack: int, batch_axes: int
) -> Float[Array, "*stack examples positions d"]:
    """Rows with one axis for the examples, and one for their positions."""
    axes = min(stack + batch_axes, rows.ndim - 1)
    examples = math.prod(rows.shape[stack:axes])
    return rows.reshape(*rows.shape[:stack], examples, -1, rows.shape[-1])
