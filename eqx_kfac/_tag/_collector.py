"""What a tag collects beside its block's statistics: the rows themselves, and the
gradient as far as the tag sees it.

Cotangents add up. The rows of two uses of a layer would add up, too, and their sum is
nothing. So before any row is collected, the backward pass is traced once with only a
counter in each slot: the transposition puts a one there, together with the shapes of the
rows. What arrives, evaluated, is the number of uses, and if it is one, its rows have
these shapes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from .._block import AbstractCollector, Columns, columns_of, Statistics
from .._custom_types import Layer, Weights
from .._devices import explicit_sharding, zeros_of
from .._jax import (
    is_zero,
    Primitive,
    set_dead_code,
    set_jvp,
    set_simple_batching,
    set_values,
)
from .._moments import moment
from ..form import AbstractForm, Rows


#
# Rows
#


class TaggedRows(NamedTuple):
    """A layer's input `x` and the gradient `g` at its output, as the tag sees them: the
    first `stack` axes separate layers, the others of the first `axes` are examples."""

    x: Array
    g: Array
    stack: int
    axes: int
    swapped: bool = False
    derivative: bool = False
    reverse: bool = False
    basis: Any = None


class RowShapes(NamedTuple):
    """The shapes of the rows of one use of a layer: all that is known before they are
    collected."""

    x: jax.ShapeDtypeStruct
    g: jax.ShapeDtypeStruct
    stack: int
    axes: int
    derivative: bool


class RowCollector(AbstractCollector):
    """Collects the rows of a layer; given a slot for its inputs alone, which is a number,
    the number of its uses."""

    derivatives = True
    reverse_derivatives = True

    def empty(self) -> Statistics:
        return Statistics(inputs=None, outputs=None)

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        # The slots' shapes are those of rows, which no layer knows.
        return self.empty()

    def rows(
        self,
        form: AbstractForm,
        x: Array,
        g: Array,
        weights: Weights,
        stack: int,
        axes: int,
    ) -> TaggedRows:
        return TaggedRows(x, g, stack, axes)

    def statistics(self, rows: TaggedRows, slots: Statistics) -> Statistics:
        if slots.outputs is None:
            return Statistics(_one_use(rows, slots.inputs.dtype), outputs=None)
        inputs = None if slots.inputs is None else rows.x.astype(slots.inputs.dtype)
        return Statistics(inputs, rows.g.astype(slots.outputs.dtype))


#
# Gradients
#


class CollectedGradient(NamedTuple):
    r"""The sum of $g x^\top$ over rows, which is the gradient of whatever is pulled back
    if all of a layer's uses pass through its tag; the number of rows; and the sum of
    $\lVert g \rVert \lVert x \rVert$, to which rounding is relative: rows may cancel."""

    gradient: Any = None
    rows: Any = None
    size: Any = None


class GradientCollector(AbstractCollector):
    """Collects the gradient that a tag sees, to be compared with JAX's: the difference is
    what passes by the tag."""

    derivatives = True
    reverse_derivatives = True

    def empty(self) -> Statistics:
        return Statistics(inputs=Columns(), outputs=CollectedGradient())

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        return Statistics(columns, CollectedGradient(zeros(*shape), zeros(), zeros()))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, g, like = slots.inputs.inputs(rows), rows.g, slots.outputs
        x, g = (g, x) if rows.swapped else (x, g)
        x, g = (a.astype(like.gradient.dtype) for a in (x, g))
        # A number that depends on data is added up wherever data are: over the rounds of
        # a loop, and over devices.
        zero = 0 * jnp.sum(g, axis=tuple(range(rows.stack, g.ndim)))
        number = zero + math.prod(g.shape[rows.stack : -1])
        norms = jnp.linalg.norm(g, axis=-1) * jnp.linalg.norm(x, axis=-1)
        size = jnp.sum(norms, axis=tuple(range(rows.stack, norms.ndim)))
        gradient = moment(g, x, rows.stack, like.gradient)
        if rows.mask is not None:
            gradient = rows.mask.project(gradient)
        outputs = CollectedGradient(gradient, number, size)
        return Statistics(zeros_of(slots.inputs), outputs)


def set_no_derivative(primitive: Primitive, is_constant: Callable) -> None:
    """What is collected has no derivative: zero along zero tangents, or if
    `is_constant(tangents)`; otherwise an error."""

    def rule(primals, tangents, **params):
        out = primitive.bind(*primals, **params)
        if is_constant(tangents):
            return out, jnp.zeros_like(out)
        if all(map(is_zero, tangents)):
            return out, tangents[0]
        raise TypeError(
            "Tried to differentiate curvature statistics. They are defined by a "
            "transpose rule and have no derivative. If curvature is computed inside a "
            "function that is differentiated, apply `jax.lax.stop_gradient` to the "
            "model and the batch that it is computed from. Of diffrax's adjoints, use "
            "`RecursiveCheckpointAdjoint` or `DirectAdjoint`, not `BacksolveAdjoint`. "
            "(Of a loss function that takes gradients with respect to the model, rows "
            "cannot be captured.)"
        )

    set_jvp(primitive, rule)


#
# The primitive that counts uses
#


row_shapes_p = Primitive("kfac_row_shapes")
"""A one that knows the shapes of rows. It has an operand only as long as it is being
differentiated and batched, so that it is mapped as the rows are; dead code elimination
takes the operand away (`aval` then says what the one looks like), and what is left of the
program needs no data."""


def _one_use(rows: TaggedRows, dtype: DTypeLike) -> Array:
    probe = jnp.sum(rows.g, axis=tuple(range(rows.stack, rows.g.ndim))).astype(dtype)
    x, g = map(_shape, (rows.x, rows.g))
    shapes = RowShapes(x, g, rows.stack, rows.axes, rows.derivative)
    return row_shapes_p.bind(probe, aval=None, shapes=shapes)


def _shape(a: Array) -> jax.ShapeDtypeStruct:
    sharding = explicit_sharding(jax.typeof(a))
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _one(*_, aval, shapes):
    return jnp.ones(aval.shape, aval.dtype)


def _without_operand(used_outputs, eqn):
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    (out,) = eqn.outvars
    params = dict(eqn.params, aval=out.aval)
    return [False] * len(eqn.invars), eqn.replace(invars=[], params=params)


def _batch(operands, dims, *, aval, shapes):
    return row_shapes_p.bind(*operands, aval=aval, shapes=shapes), dims[0]


def _abstract(*avals, aval, shapes):
    return aval if aval is not None else avals[0]


set_values(row_shapes_p, _one, _abstract)
set_no_derivative(row_shapes_p, lambda tangents: False)
set_simple_batching(row_shapes_p, _batch)
set_dead_code(row_shapes_p, _without_operand)
