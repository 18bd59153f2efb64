"""The gradients of single examples with respect to a layer's canonical matrix."""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import check_count
from .._devices import zeros_of
from .._form import AbstractForm, Rows
from .._misc import accumulator, moment
from ._base import AbstractBlock, sizes_and_zeros, Statistics


class Columns(NamedTuple):
    """Which columns of the canonical matrix are trained, those of the weight or that of
    the bias: zeros (for slots hold arrays), or `None`."""

    weight: Any = None
    bias: Any = None

    def inputs(self, rows: Rows) -> Float[Array, "*rows d_in"]:
        r"""$\bar x$, of the columns that there are."""
        dtype = accumulator(rows.g.dtype)
        ones = jnp.ones_like(rows.g[..., :1], dtype)
        if self.weight is None:
            return ones
        x = rows.x.vectors().astype(dtype)
        return x if self.bias is None else jnp.concatenate([x, ones], axis=-1)


def columns_of(
    form: AbstractForm, layer: Any
) -> tuple[Columns, tuple[int, int], Callable] | None:
    """The columns of a layer that are trained, if any, the shape of its canonical matrix,
    and how to make its slots."""
    found = sizes_and_zeros(form, layer)
    if found is None:
        return None
    (_, d_out, d_in, bias, _), zeros = found
    columns = Columns(zeros() if d_in > 0 else None, zeros() if bias else None)
    return columns, (d_out, d_in + bias), zeros


class AbstractGradientBlock(AbstractBlock):
    r"""A block that is made of second moments of single examples' gradients
    $\nabla_n = \sum_s g_{ns} \bar x_{ns}^\top$."""

    batch_axes: int = eqx.field(static=True, default=1)
    # The cotangents are, and nothing else enters.
    weighted: bool = eqx.field(static=True, default=False, init=False, repr=False)
    mixes_positions: bool = eqx.field(static=True, default=True, init=False, repr=False)

    def __init__(self, batch_axes: int = 1):
        """**Arguments:**

        - `batch_axes`: as for [`eqx_kfac.Reduce`][].
        """
        check_count("batch_axes", batch_axes, 1)
        self.batch_axes = batch_axes

    @abc.abstractmethod
    def moments(
        self,
        g: Float[Array, "*rows d_out"],
        x: Float[Array, "*rows d_in"],
        stack: int,
        like: Any,
    ) -> Any:
        """Sums over rows, or over `self.gradients(g, x, stack)`, of the shapes `like`."""

    @abc.abstractmethod
    def shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the moments, by name, for a canonical matrix."""

    def empty(self) -> Statistics:
        return Statistics(Columns(), dict.fromkeys(self.shapes(0, 0)))

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        shapes = self.shapes(*shape)
        return Statistics(columns, {name: zeros(*s) for name, s in shapes.items()})

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, like = slots.inputs.inputs(rows), slots.outputs
        g = rows.g.astype(x.dtype)
        return Statistics(zeros_of(slots.inputs), self.moments(g, x, rows.stack, like))

    def has_positions(self, g: Array, stack: int) -> bool:
        """Whether several rows belong to one example."""
        return has_positions(g, stack, self.batch_axes)

    def gradients(
        self, g: Array, x: Array, stack: int
    ) -> Float[Array, "*stack examples d_out d_in"]:
        """Those of single examples, written out."""
        return example_gradients(g, x, stack, self.batch_axes)


def has_positions(g: Array, stack: int, batch_axes: int) -> bool:
    return math.prod(g.shape[stack + batch_axes : -1]) > 1


def squares(
    g: Float[Array, "*rows d_out"],
    x: Float[Array, "*rows d_in"],
    stack: int,
    batch_axes: int,
    like: Any,
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
    axes = min(stack + batch_axes, g.ndim - 1)

    def flat(a):  # [*stack, examples, positions, d]
        examples = math.prod(a.shape[stack:axes])
        return a.reshape(*a.shape[:stack], examples, -1, a.shape[-1])

    highest = jax.lax.Precision.HIGHEST
    return jnp.matmul(flat(g).mT, flat(x), precision=highest)
