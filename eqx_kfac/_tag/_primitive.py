"""The tag primitive: statistics as cotangents.

`tag(y, x)`, for the output `y` and the input `x` of a layer, is `y`. The primitive has
more operands, the *slots*: zeros that the layer's tag holds while curvature is collected,
and that do not touch the value. Its JVP binds a linear twin, whose transpose passes the
cotangent of `y` through and *defines* the cotangent of the slots as the layer's
statistics. One `jax.vjp` of any function of a model then returns the gradient in its
weights and the statistics in its tags; whatever JAX can differentiate, it can collect
curvature from.

There are five primitives. `kfac_tag` is what a layer binds, and what programs are
searched for; `kfac_tag_linear` is its derivative in the slots. `kfac_statistic` marks
what a transposition has made of rows, so that its dependence can be followed and it is
not differentiated. `kfac_unseen` marks a derivative of a layer that its tag does not see,
and `kfac_covered` a use of a parameter for which a tag at a zero answers. All five are
the identity on their first operand.

*Axes.* A tag is written for one layer and one example; `vmap` adds axes in front, first
those along which whole layers are *stacked*, then those of *examples*. They are told
apart by the slots: a slot that is mapped belongs to a layer of its own, and a slot that
is the same for all adds up their statistics.

*Tags at zeros.* In most layers the tag is at the output: they return `tag(y, x)`. Others
add `s * tag(zeros, x)` to a result that they compute without the tag. One reason is that
the output of the linear map cannot be tagged, because Equinox computes it inside of a
recurrent cell; another that the tag is to see the gradient times a scale $s$, as if the
norm that divides a weight were fixed. The zeros do not change the result, but there is a
gradient at them. The parameters then reach the result without passing through the tag.
So that this is not taken for a mistake, they are marked as *covered* where they do so.

*Derivatives.* The derivative of a layer along a direction in its input is a row of the
same weight, and is tagged as a layer is. Transposed, as in the gradient of an energy, the
weight acts transposed on a gradient. What it gives is computed by JAX, out of reach, so
that it is tagged at a zero beside it; and because JAX uses the parameters for it, those
of layers that are tagged at their output are marked as covered, too.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu

from .._block import AbstractCollector
from .._devices import cast_varying, zeros_of
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
    set_simple_batching,
    set_taylor,
    set_transpose,
    set_values,
    varying,
)
from .._misc import difference
from ..form import AbstractForm
from ._collector import RowCollector, set_no_derivative
from ._weights import row_weights, with_influence


class Label(NamedTuple):
    """What a tag should know while a loss function is traced.

    No operation on arrays may change it, so it is the *shape* of zeros, which survives
    all of them: `[*stack, *examples, len(examples) + 1, copied + 1, number + 1]`. (One is
    added to the last three, so that no axis has length zero.)

    **Fields:**

    - `stack`: the number of stack axes that the zeros have in a program. `shape` does not
        contain them: a tag puts the stack of its layer in front.
    - `number`: the number of the tag among those of the model.
    - `examples`: the numbers of examples that the losses have; empty if the tag need not
        know them.
    - `copied`: whether a tag with the form `Parameters` is to be at copies of arrays,
        because they are used outside of the `vmap` over the examples.
    """

    stack: int
    number: int
    examples: tuple[int, ...] = ()
    copied: bool = False

    @classmethod
    def read(cls, shape: tuple[int, ...]) -> "Label":
        """The label whose zeros have a shape, stack axes included."""
        *axes, number_of_examples, copied, number = shape
        stack = len(axes) - (number_of_examples - 1)
        return cls(stack, number - 1, tuple(axes[stack:]), copied > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the zeros, without stack axes."""
        examples = *self.examples, len(self.examples) + 1
        return *examples, self.copied + 1, self.number + 1


class Layout(NamedTuple):
    """What the operands of a tag are.

    They are `y, x, *shared, *slots`; the linear twin has the tangents of the slots in
    their place, whose cotangents are statistics, or, with a label, behind them. For a
    derivative of the layer, they are `y_dot, x_dot, x, *shared, *slots`: here the layer's
    own input `x` only tells which axes are examples. It differs between examples even if
    `x_dot`, a direction, is the same for all of them, and it does not differ between
    several directions.

    **Fields:**

    - `form`, `collector`, `swapped`: how rows are read from the operands, and what is
        made of them.
    - `slots`: the treedef of the slots.
    - `shared`: the treedef of the weights, the basis, and the label. These belong to the
        layer: like the slots, they are mapped over stacks only.
    - `derivative`: whether this is the tag of a derivative of the layer.
    - `reverse`: whether this is a derivative in reverse mode, so that $y$ and $x$ are
        gradients: $y$ a zero beside that at the layer's input, $x$ that at its output.
    - `inner`: whether this is a derivative that the loss takes with respect to the slots,
        too.
    - `skipped`: the lengths of the axes of `vmap` along which the layer has the same
        input and output everywhere. They are only noted while a program is analysed.
    """

    form: AbstractForm
    collector: AbstractCollector
    swapped: bool
    slots: Any
    shared: Any
    derivative: bool = False
    reverse: bool = False
    inner: bool = False
    skipped: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of operands that belong to examples: the first two or three."""
        return 2 + self.derivative

    def split(self, operands):
        """`(y, x, shared, slots)`, or `(y_dot, x_dot, shared, slots)`. Of the linear
        twin, the last are tangents of the slots, or the slots and their tangents."""
        k = self.num_rows + self.shared.num_leaves
        return operands[0], operands[1], operands[self.num_rows : k], operands[k:]

    def label(self, operands) -> Label | None:
        """The label of a tag with these operands, which may be abstract values."""
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
covered_p = Primitive("kfac_covered")


#
# Batching
#


def _batch_tag(primitive, mapped, operands, dims, *, layout, **params):
    """Batches a tag over a mapped axis. JAX calls this rule for every tag inside of a
    `vmap`, also if no operand is mapped, so that the layer has the same input and output
    everywhere along the axis. If this is an axis of examples, according to the label, the
    output gets it all the same: the gradients of the examples at the output differ, and
    would otherwise be added up before they are squared."""
    if all(d is None for d in dims):
        label = layout.label(operands)
        if label is None or mapped.size not in label.examples:
            if label is not None:
                layout = layout._replace(skipped=(*layout.skipped, mapped.size))
            return primitive.bind(*operands, layout=layout, **params), None
        y, *others = operands
        y = broadcast_along(y, mapped, 0)
        operands, dims = [y, *others], [0, *dims[1:]]
    return _batch(primitive, mapped, operands, dims, layout=layout, **params)


def _batch(primitive, mapped, operands, dims, *, layout, stack, examples):
    """Batches a tag of which some operand is mapped. `stack` and `examples` are the
    numbers of axes of stacked layers and of examples that there are already.

    If a slot, or a shared array, is mapped, the new axis is one of stacked layers, and
    becomes the first of all. Otherwise it is one of examples, and becomes the first of
    these. But if it is an axis of directions of a derivative, for which the layer's own
    input is not mapped, it becomes the last of them: an example has several directions.
    """
    stacked = any(d is not None for d in dims[layout.num_rows :])
    # The third operand of a derivative is the layer's own input.
    directions = layout.derivative and dims[2] is None
    axis = 0 if stacked else stack + examples * directions

    def place(x, d):
        if d is not None:
            return jnp.moveaxis(x, d, axis)
        # The operand is the same for all examples, or for all layers of the stack.
        return broadcast_along(x, mapped, axis)

    # Without a stack, slots and shared arrays stay as they are.
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
    """The derivative of a tag, or of its linear twin. The value of both is their first
    operand, and does not depend on the others. But if the slots have tangents, statistics
    are asked for, and the linear twin is bound, whose transpose makes them. Otherwise the
    tangent of a layer is tagged in turn, as one more row; and so it is if the loss itself
    takes derivatives with respect to the model, slots and all, which a label says. (Or
    with respect to data, along zeros of the model, as in a `custom_jvp` to which that is
    an argument.) The linear twin is not at the output of a layer, so that its derivative
    only passes the tangent on."""
    out = primitive.bind(*primals, layout=layout, **params)
    y_dot, x_dot, *_ = layout.split(tangents)
    number, labelled = layout.slots.num_leaves, layout.label(primals) is not None
    slot_dots = tangents[-number:]
    collects = not all(map(is_zero, slot_dots))
    if primitive is tag_p and (labelled or not collects):
        of_both = layout._replace(inner=layout.inner or collects)
        y_dot = _derivative(y_dot, x_dot, primals, of_both, **params)
    if collects:
        y_dot, *slot_dots = map(instantiated, (y_dot, *slot_dots))
        has_slots = primitive is tag_p and labelled
        others = primals[1:] if has_slots else primals[1:-number]
        y_dot = tag_linear_p.bind(y_dot, *others, *slot_dots, layout=layout, **params)
    return out, y_dot


def _derivative(y_dot, x_dot, primals, layout, **params):
    r"""The derivative of $z = W x + b$ along $\dot x$: $\dot z = W \dot x$ is one more
    row of the same weight."""
    if is_zero(x_dot):
        return y_dot
    # The zero at which some layers are tagged has no tangent, but the layer has one.
    y_dot, label = instantiated(y_dot), layout.label(primals)
    if not (layout.form.linear and layout.collector.derivatives):
        if label is None:
            return y_dot
        return y_dot + _unseen_zero(x_dot, aval_of(y_dot), label)
    _, _, shared, slots = layout.split(primals)
    # The layer's own input is the last of the operands that belong to examples, also if
    # this is the derivative of a derivative.
    operands = y_dot, x_dot, primals[layout.num_rows - 1], *shared, *slots
    return tag_p.bind(*operands, layout=layout._replace(derivative=True), **params)


def _taylor(primals, series, *, layout, **params):
    """The rule of `_jvp` for `jax.experimental.jet`, whose coefficients are derivatives
    divided by factorials: a row of the layer is a derivative itself."""
    out = tag_p.bind(*primals, layout=layout, **params)
    coefficients = []
    for k, (y, x) in enumerate(zip(*series[:2], strict=True), 1):
        factorial = math.factorial(k)
        derivatives = y * factorial, x * factorial
        y = _derivative(*derivatives, primals, layout, **params)
        coefficients.append(y / factorial)
    return out, coefficients


def _unseen_zero(source, like, label):
    """Zeros shaped `like` an abstract array. They depend, by a mark, on `source`, a
    derivative of a layer that its tag does not see. If they are added to a value, a
    program that is trained through it is refused when it is analysed, and so is a program
    that is trained through derivatives of the value, forward or backward."""
    total = jnp.sum(source)
    if not jnp.issubdtype(like.dtype, jnp.complexfloating):
        total = jnp.real(total)
    marked = unseen_p.bind(total.astype(like.dtype), number=label.number)
    return zeros_of(like) + 0 * marked


#
# Derivatives backward
#


def _transpose_derivative(ct, *operands, layout, **params):
    r"""The transpose of a tag at a derivative $\dot z = W \dot x$ of the layer, given the
    cotangent $\bar z$ of $\dot z$: a gradient in the layer's input has the part $W^\top
    \bar z$, which is tagged in turn, at a zero beside it. (Of derivatives that a block
    knows in forward mode only, the tag does not see this part. While a program is
    analysed, both ways to it are marked: the cotangent, and, because that leads nowhere
    in a layer that is tagged at a zero, the gradient in the input itself.)"""
    x_dot, label = operands[1], layout.label(operands)
    nothing = [None] * (len(operands) - 2)
    if is_zero(ct):
        return [ct, None, *nothing]
    has_part = is_linear_operand(x_dot)
    if has_part and layout.derivative and layout.collector.reverse_derivatives:
        layout = layout._replace(reverse=not layout.reverse)
        zeros = zeros_of(aval_of(x_dot))
        return [
            ct,
            tag_p.bind(zeros, ct, *operands[2:], layout=layout, **params),
            *nothing,
        ]
    if label is None:
        return [ct, None, *nothing]
    marks = _unseen_zero(ct, aval_of(x_dot), label) if has_part else None
    return [unseen_p.bind(ct, number=label.number), marks, *nothing]


def _transpose_mark(primitive, ct, _, **params):
    """The transpose of a mark, which is a mark."""
    return [ct if is_zero(ct) else primitive.bind(ct, **params)]


def _jvp_covered(primals, tangents, **params):
    """The derivative of a mark. Only the parameter itself is used rightly, not what a
    derivative is taken along; but what is computed from it is used wrongly in
    derivatives, too, forward and backward."""
    (array,), (tangent,) = primals, tangents
    if not (params["rightly"] or is_zero(tangent)):
        tangent = covered_p.bind(tangent, **params)
    return covered_p.bind(array, **params), tangent


def _transpose(ct, *operands, layout, stack, examples):
    """The transpose of the linear twin. The cotangent of `y` is passed on, and the
    cotangent of the slots is what the collector makes of it and of the layer's input."""
    _, x, shared, slots = layout.split(operands)
    number = layout.slots.num_leaves
    slots, tangents = slots[:-number], slots[-number:]
    nothing = [None] * (layout.num_rows - 1 + len(shared) + len(slots))
    if is_zero(ct) or not any(map(is_linear_operand, tangents)):
        return [ct, *nothing, *[None] * len(tangents)]
    avals = list(map(aval_of, tangents))
    like = jtu.tree_unflatten(layout.slots, avals)

    def statistics(x, ct, *shared):
        axes = stack + examples
        if examples == 0 and not isinstance(layout.collector, RowCollector):
            # One example by itself, in a loop over the batch: without an axis of length
            # one, its positions would be taken for examples. (Rows are handed out with
            # the axes that they have.)
            x, ct, axes = jnp.expand_dims(x, stack), jnp.expand_dims(ct, stack), axes + 1
        weights, basis, *_ = jtu.tree_unflatten(layout.shared, shared)
        weights = row_weights(weights, x, stack, axes)
        if weights is not None:
            # A row that has no weight may influence the loss of a row that has one.
            weights = with_influence(weights, ct, stack)
        # The weight adds the product of both to its gradient, whichever is the input.
        x, ct = (ct, x) if layout.reverse else (x, ct)
        rows = layout.collector.rows(layout.form, x, ct, weights, stack, axes)
        rows = rows._replace(
            swapped=layout.swapped,
            derivative=layout.derivative,
            reverse=layout.reverse,
            basis=basis,
        )
        collected = layout.collector.statistics(rows, like)
        _check_shaped_like(collected, like, layout.collector)
        return jtu.tree_leaves(collected)

    stats = statistics(x, ct, *shared)
    if not isinstance(layout.collector, RowCollector):
        # A loss must not depend on statistics, so they are marked. Rows are handed out to
        # be computed with, and have a derivative as any other values of the program.
        stats = [statistic_p.bind(s, *slots) for s in stats]
    stats = [cast_varying(s, varying(a)) for s, a in zip(stats, avals, strict=True)]
    wanted = [s if is_linear_operand(t) else None for s, t in zip(stats, tangents)]
    return [ct, *nothing, *wanted]


def _is_inner(tangents):
    """Whether a statistic is the gradient in a slot that is itself differentiated: of a
    gradient within the loss with respect to the model, whose tags collect something for a
    gradient around it. A step along the inner one changes no slot."""
    return not all(map(is_zero, tangents[1:]))


def _check_shaped_like(statistics, like, collector):
    """Raises if what a collector makes of rows does not fit into its slots."""
    first_difference = difference(statistics, like)
    if first_difference is not None:
        path, got, wanted = first_difference
        raise ValueError(
            f"`{type(collector).__name__}.statistics` must return what is shaped like "
            f"the slots that it is given, but its `{path}` is {got}, and should be "
            f"{wanted}."
        )


#
# Registration
#


def _first(y, *_, **__):
    return y


for _p in (tag_p, tag_linear_p, statistic_p, unseen_p, covered_p):
    set_values(_p, _first, _first)

for _p in (tag_p, tag_linear_p):
    set_jvp(_p, ft.partial(_jvp, _p))
    set_batching(_p, ft.partial(_batch_tag, _p))

set_transpose(tag_p, _transpose_derivative)
set_transpose(tag_linear_p, _transpose)
set_taylor(tag_p, _taylor)
set_no_derivative(statistic_p, _is_inner)
set_linear(unseen_p)
set_jvp(covered_p, _jvp_covered)
set_transpose(unseen_p, ft.partial(_transpose_mark, unseen_p))
set_transpose(covered_p, ft.partial(_transpose_mark, covered_p))
set_simple_batching(statistic_p, lambda xs, dims: (statistic_p.bind(*xs), dims[0]))
set_elementwise(unseen_p)
set_elementwise(covered_p)
