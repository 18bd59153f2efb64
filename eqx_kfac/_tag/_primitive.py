"""The tag primitive: statistics as cotangents.

`tag(y, x)` is `y`. Its JVP binds a linear twin in which the *slots* are inputs that do
not touch the value, and whose transpose passes the cotangent of `y` through and *defines*
the cotangent of the slots as the layer's statistics. One `jax.vjp` of any function of a
model then returns the gradient in its weights and the statistics in its tags; whatever
JAX can differentiate, it can collect curvature from.

There are four primitives. `kfac_tag` is what a layer binds, and what programs are
searched for; `kfac_tag_linear` is its derivative in the slots. `kfac_statistic` marks
what a transposition has made of rows, so that its dependence can be followed and it is
not differentiated. `kfac_unseen` marks a derivative of a layer of which its tag sees
nothing. All four are the identity on their first operand.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu

from .._block import AbstractCollector
from .._devices import cast_varying
from .._jax import (
    aval_of,
    broadcast_along,
    Equation,
    instantiated,
    is_linear_operand,
    is_zero,
    Primitive,
    set_batching,
    set_elementwise,
    set_jvp,
    set_linear,
    set_taylor,
    set_transpose,
    set_values,
    varying,
)
from .._misc import difference
from ..form import AbstractForm
from ._collector import RowCollector
from ._weights import row_weights, with_influence


class Label(NamedTuple):
    """What a tag should know while a loss function is traced: its number among the tags
    of the model, and how many examples the losses have. No operation on arrays may change
    it, so it is the *shape* of zeros, which survives any of them:
    `[*stack, *examples, len(examples) + 1, number + 1]`."""

    stack: int  # How many axes of stacked layers no loop or `vmap` has taken away yet.
    number: int
    examples: tuple[int, ...]

    @classmethod
    def read(cls, shape: tuple[int, ...]) -> "Label":
        *rest, several, number = shape
        stack = len(rest) - (several - 1)
        return cls(stack, number - 1, tuple(rest[stack:]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the zeros, behind the layer's stack."""
        return *self.examples, len(self.examples) + 1, self.number + 1


class Layout(NamedTuple):
    """What the operands of a tag are: `y, x, *shared, *slots`, or, of a layer's
    derivative, `y_dot, x_dot, x, *shared, *slots`. The first two or three belong to
    examples. `shared` arrays belong to the layer: like the slots, they are mapped over
    stacks only. (A derivative has `x` as an operand because `x` is different for every
    example, even where `x_dot`, a direction, is the same for all of them.)"""

    form: AbstractForm
    collector: AbstractCollector
    swapped: bool
    slots: Any  # A treedef.
    shared: Any  # The treedef of weights, basis, and label.
    derivative: bool = False

    @property
    def num_rows(self) -> int:
        """How many operands belong to examples."""
        return 2 + self.derivative

    def split(self, operands):
        """`(y, x, shared, slots)`."""
        k = self.num_rows + self.shared.num_leaves
        return operands[0], operands[1], operands[self.num_rows : k], operands[k:]

    def label(self, operands) -> Label | None:
        """The label of a tag with these operands, or abstract values of them."""
        _, _, shared, _ = self.split(operands)
        *_, label = jtu.tree_unflatten(self.shared, shared)
        return None if label is None else Label.read(label.shape)


def label_of(eqn: Equation) -> Label | None:
    """The label of the tag that an equation binds."""
    return eqn.params["layout"].label([atom.aval for atom in eqn.invars])


tag_p = Primitive("kfac_tag")
tag_linear_p = Primitive("kfac_tag_linear")
statistic_p = Primitive("kfac_statistic")
unseen_p = Primitive("kfac_unseen")


#
# Batching
#


def _batch_tag(primitive, axis, operands, dims, *, layout, **params):
    """Batches a tag as `_batch` does. What is the same for all examples gets their axis
    nevertheless: else the gradients at it would be added up before they are squared."""
    if all(d is None for d in dims):
        label = layout.label(operands)
        if label is None or axis.size not in label.examples:
            return primitive.bind(*operands, layout=layout, **params), None
        y, *others = operands
        y = broadcast_along(y, axis, 0)
        operands, dims = [y, *others], [0, *dims[1:]]
    return _batch(primitive, axis, operands, dims, layout=layout, **params)


def _batch(primitive, mapped, operands, dims, *, layout, stack, examples):
    """Every operand's mapped axis moves to the front of its kind: stacked layers first,
    then examples. Only a mapped slot (or weight, or basis) means a stack: separate
    layers, separate statistics. Otherwise the new axis is one of examples, outside the
    earlier ones; but if it is one of directions, along which the layer's input itself
    does not change, it is inside."""
    stacked = any(d is not None for d in dims[layout.num_rows :])
    directions = layout.derivative and dims[2] is None
    axis = 0 if stacked else stack + examples * directions

    def place(x, d):
        if d is not None:
            return jnp.moveaxis(x, d, axis)
        # All examples have the same, or all members of an ensemble.
        return broadcast_along(x, mapped, axis)

    num_placed = len(operands) if stacked else layout.num_rows
    placed = list(map(place, operands[:num_placed], dims[:num_placed]))
    out = primitive.bind(
        *placed,
        *operands[num_placed:],
        layout=layout,
        stack=stack + stacked,
        examples=examples + (not stacked),
    )
    return out, axis


#
# Derivatives forward
#


def _jvp(primitive, primals, tangents, *, layout, **params):
    """A tag, and its linear twin, depend on nothing but their first operand, and linearly
    on that. Slots only have a tangent where somebody asks for statistics."""
    out = primitive.bind(*primals, layout=layout, **params)
    y_dot, x_dot, _, slot_dots = layout.split(tangents)
    if not all(map(is_zero, slot_dots)):
        y_dot, *slot_dots = map(instantiated, (y_dot, *slot_dots))
        between = primals[1 : len(primals) - len(slot_dots)]
        y_dot = tag_linear_p.bind(y_dot, *between, *slot_dots, layout=layout, **params)
    elif primitive is tag_p:
        y_dot = _derivative(y_dot, x_dot, primals, layout, **params)
    return out, y_dot


def _derivative(y_dot, x_dot, primals, layout, **params):
    r"""The derivative of $z = W x + b$ along $\dot x$: $\dot z = W \dot x$ is one more
    row of the same weight."""
    if is_zero(x_dot):
        return y_dot
    # Where a layer is tagged at a zero that is added to its output, the zero has no
    # tangent, but the layer has one all the same.
    y_dot = instantiated(y_dot)
    if not (layout.form.linear and layout.collector.derivatives):
        return _mark_unseen(y_dot, layout.label(primals))
    _, _, shared, slots = layout.split(primals)
    operands = y_dot, x_dot, primals[layout.num_rows - 1], *shared, *slots
    return tag_p.bind(*operands, layout=layout._replace(derivative=True), **params)


def _taylor(primals, series, *, layout, **params):
    """The rule of `_jvp`, for the Taylor coefficients of `jax.experimental.jet`."""
    out = tag_p.bind(*primals, layout=layout, **params)
    coefficients = []
    for k, (y, x) in enumerate(zip(*series[:2], strict=True), 1):
        factorial = math.factorial(k)
        derivatives = y * factorial, x * factorial
        y = _derivative(*derivatives, primals, layout, **params)
        coefficients.append(y / factorial)
    return out, coefficients


def _mark_unseen(a, label):
    """A derivative of a layer that its tag does not see. A program that is trained
    through it is refused when it is analysed."""
    return a if label is None else unseen_p.bind(a, number=label.number)


#
# Derivatives backward
#


def _transpose_derivative(ct, *operands, layout, **_):
    """The transpose of a tag at a derivative of the layer: a gradient in the layer's
    input, in which the weight acts transposed. Its rows are not those of the layer."""
    if not is_zero(ct):
        ct = _mark_unseen(ct, layout.label(operands))
    return [ct, *[None] * (len(operands) - 1)]


def _transpose(ct, *operands, layout, stack, examples):
    """The cotangent of `y` is passed on; that of the slots is what the collector makes of
    the layer's input and this cotangent."""
    _, x, shared, slots = layout.split(operands)
    nothing = [None] * (layout.num_rows - 1 + len(shared))
    if is_zero(ct) or not any(map(is_linear_operand, slots)):
        return [ct, *nothing, *[None] * len(slots)]
    avals = list(map(aval_of, slots))
    like = jtu.tree_unflatten(layout.slots, avals)

    def statistics(x, ct, *shared):
        axes = stack + examples
        if examples == 0 and not isinstance(layout.collector, RowCollector):
            # One example by itself, in a loop over the batch: without an axis of length
            # one, its positions would be taken for examples.
            x, ct, axes = jnp.expand_dims(x, stack), jnp.expand_dims(ct, stack), axes + 1
        weights, basis, *_ = jtu.tree_unflatten(layout.shared, shared)
        weights = row_weights(weights, x, stack, axes)
        if weights is not None:
            weights = with_influence(weights, ct, stack)
        rows = layout.collector.rows(layout.form, x, ct, weights, stack, axes)
        rows = rows._replace(
            swapped=layout.swapped, derivative=layout.derivative, basis=basis
        )
        collected = layout.collector.statistics(rows, like)
        _check_shaped_like(collected, like, layout.collector)
        return jtu.tree_leaves(collected)

    stats = statistics(x, ct, *shared)
    if not isinstance(layout.collector, RowCollector):
        # Sums are no function of the loss; rows are, and may be differentiated.
        stats = list(map(statistic_p.bind, stats))
    stats = [cast_varying(s, varying(a)) for s, a in zip(stats, avals, strict=True)]
    wanted = [s if is_linear_operand(t) else None for s, t in zip(stats, slots)]
    return [ct, *nothing, *wanted]


def _check_shaped_like(statistics, like, collector):
    """Raises if what a collector makes of rows does not fit into its slots."""
    found = difference(statistics, like)
    if found is not None:
        path, got, wanted = found
        raise ValueError(
            f"`{type(collector).__name__}.statistics` must return what is shaped like "
            f"the slots that it is given, but its `{path}` is {got}, and should be "
            f"{wanted}."
        )


def _no_derivative(primals, tangents):
    (statistic,), (tangent,) = primals, tangents
    if is_zero(tangent):
        return statistic_p.bind(statistic), tangent
    raise TypeError(
        "Tried to differentiate curvature statistics. They are defined by a "
        "transpose rule and have no derivative. If the loss function takes gradients "
        "with respect to the model itself, take them with respect to "
        "`kfac.revert(model)`. If curvature is computed inside a function that is "
        "differentiated, apply `jax.lax.stop_gradient` to the model and the batch "
        "that it is computed from. Of diffrax's adjoints, use "
        "`RecursiveCheckpointAdjoint` or `DirectAdjoint`, not `BacksolveAdjoint`."
    )


#
# Registration
#


def _first(y, *_, **__):
    return y


for _p in (tag_p, tag_linear_p, statistic_p, unseen_p):
    set_values(_p, _first, _first)

for _p in (tag_p, tag_linear_p):
    set_jvp(_p, jtu.Partial(_jvp, _p))
    set_batching(_p, jtu.Partial(_batch_tag, _p))

set_transpose(tag_p, _transpose_derivative)
set_transpose(tag_linear_p, _transpose)
set_taylor(tag_p, _taylor)
set_jvp(statistic_p, _no_derivative)
set_linear(unseen_p)
set_elementwise(statistic_p)
set_elementwise(unseen_p)
