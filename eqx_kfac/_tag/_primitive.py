"""The tag primitive: statistics as cotangents.

`tag(y, x)` is `y`. Its JVP binds a linear twin in which the *slots* are inputs that do
not touch the value, and whose transpose passes the cotangent of `y` through and *defines*
the cotangent of the slots as the layer's statistics. One `jax.vjp` of any function of a
model then returns the gradient in its weights and the statistics in its tags; whatever
JAX can differentiate, it can collect curvature from.

This folder, and `_program/`, which reads jaxprs, are the only ones that touch JAX's
extension points.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._block import AbstractBlock
from .._devices import cast_varying
from ..form import AbstractForm
from ._rows import Raw
from ._weights import row_weights, with_influence


class Note(NamedTuple):
    """What a tag should know while a loss function is traced: its number among the tags
    of the model, and how many examples the losses have. No operation may change it, so it
    is the *shape* of zeros: `[*stack, *examples, len(examples) + 1, number + 1]`."""

    stack: int  # How many axes of stacked layers there still are.
    number: int
    examples: tuple[int, ...]

    @classmethod
    def read(cls, shape: tuple[int, ...]) -> "Note":
        *rest, several, number = shape
        stack = len(rest) - (several - 1)
        return cls(stack, number - 1, tuple(rest[stack:]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the zeros, behind the layer's stack."""
        return *self.examples, len(self.examples) + 1, self.number + 1


class Layout(NamedTuple):
    """What the operands `y, x, *beside, *shared, *slots` of a tag are. `shared` arrays
    belong to the layer and not to an example; like the slots, they are mapped over stacks
    only. Of a layer's derivative in its inputs, the input itself is `beside`: a
    derivative that is the same for all examples belongs to each of them nevertheless."""

    form: AbstractForm
    block: AbstractBlock
    swapped: bool
    slots: Any  # treedef of the slots
    shared: Any  # and of weights and basis
    derivative: bool = False

    @property
    def own(self) -> int:
        """How many operands belong to examples."""
        return 2 + self.derivative

    def split(self, operands):
        k = self.own + self.shared.num_leaves
        return operands[0], operands[1], operands[self.own : k], operands[k:]

    def note(self, operands) -> Note | None:
        """The note of a tag with these operands, or abstract values of them."""
        _, _, shared, _ = self.split(operands)
        *_, note = jtu.tree_unflatten(self.shared, shared)
        return None if note is None else Note.read(note.shape)


tag_p = Primitive("kfac_tag")


tag_linear_p = Primitive("kfac_tag_linear")


statistic_p = Primitive("kfac_statistic")  # Marks what came from a transpose.


unseen_p = Primitive("kfac_unseen")


def _value(y, *_, **__):
    return y


def _batch_tag(primitive, axis, operands, dims, *, layout, **params):
    """Batches a tag as `_batch` does. What is the same for all examples gets their axis
    nevertheless: else the gradients at it would be added up before they are squared."""
    if all(d is None for d in dims):
        note = layout.note(operands)
        if note is None or axis.size not in note.examples:
            return primitive.bind(*operands, layout=layout, **params), None
        y, *others = operands
        y = batching.broadcast(y, axis.size, 0, axis.explicit_mesh_axis)
        operands, dims = [y, *others], [0, *dims[1:]]
    return _batch(primitive, axis, operands, dims, layout=layout, **params)


def _batch(primitive, mapped, operands, dims, *, layout, stack, examples):
    """Every operand's mapped axis moves to the front of its kind: stacked layers first,
    then examples. Only a mapped slot means a stack: separate layers, separate statistics;
    otherwise the new axis is an example axis, outside the earlier ones. (Unless it is one
    of directions, of which the layer's input itself knows nothing: then inside.)"""
    stacked = any(d is not None for d in dims[layout.own :])
    directions = layout.derivative and dims[2] is None
    axis = 0 if stacked else stack + examples * directions

    def place(x, d):
        if d is not None:
            return jnp.moveaxis(x, d, axis)
        # All examples have the same, or all members of an ensemble; on an explicit mesh,
        # split over devices as these are.
        return batching.broadcast(x, mapped.size, axis, mapped.explicit_mesh_axis)

    num_placed = len(operands) if stacked else layout.own
    placed = list(map(place, operands[:num_placed], dims[:num_placed]))
    out = primitive.bind(
        *placed,
        *operands[num_placed:],
        layout=layout,
        stack=stack + stacked,
        examples=examples + (not stacked),
    )
    return out, axis


def _jvp(primitive, primals, tangents, *, layout, **params):
    """Neither tag depends on anything but its first operand, and linearly on that."""
    out = primitive.bind(*primals, layout=layout, **params)
    y_dot, x_dot, _, slot_dots = layout.split(tangents)
    if not all(type(s) is ad.Zero for s in slot_dots):
        y_dot, *slot_dots = map(ad.instantiate_zeros, (y_dot, *slot_dots))
        between = primals[1 : len(primals) - len(slot_dots)]
        y_dot = tag_linear_p.bind(y_dot, *between, *slot_dots, layout=layout, **params)
    elif primitive is tag_p:
        y_dot = _derivative(y_dot, x_dot, primals, layout, **params)
    return out, y_dot


def _derivative(y_dot, x_dot, primals, layout, **params):
    r"""The derivative of $z = W x + b$ along $\dot x$: $\dot z = W \dot x$ is one more
    row of the same weight."""
    if type(x_dot) is ad.Zero:
        return y_dot
    # A layer that is tagged at a zero has more derivatives than this one.
    y_dot = ad.instantiate_zeros(y_dot)
    if not (layout.form.linear and layout.block.derivatives):
        return _unseen(y_dot, layout.note(primals))
    _, _, shared, slots = layout.split(primals)
    operands = y_dot, x_dot, primals[layout.own - 1], *shared, *slots
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


def _transpose_derivative(ct, *operands, layout, **_):
    """The rule for a derivative in reverse mode, in which weights act transposed."""
    if type(ct) is not ad.Zero:
        ct = _unseen(ct, layout.note(operands))
    return [ct, *[None] * (len(operands) - 1)]


def _unseen(a, note):
    """A derivative of a layer that its tag does not see: a program that is trained
    through it is refused, when it is looked at."""
    return a if note is None else unseen_p.bind(a, number=note.number)


def _transpose(ct, *operands, layout, stack, examples):
    _, x, shared, slots = layout.split(operands)
    nothing = [None] * (layout.own - 1 + len(shared))
    if type(ct) is ad.Zero or not any(map(ad.is_undefined_primal, slots)):
        return [ct, *nothing, *[None] * len(slots)]
    avals = [s.aval if ad.is_undefined_primal(s) else jax.typeof(s) for s in slots]
    like = jtu.tree_unflatten(layout.slots, avals)

    def statistics(x, ct, *shared):
        axes = stack + examples
        if examples == 0 and not isinstance(layout.block, Raw):
            # One example by itself, in a loop: its positions are none.
            x, ct, axes = jnp.expand_dims(x, stack), jnp.expand_dims(ct, stack), axes + 1
        weights, basis, *_ = jtu.tree_unflatten(layout.shared, shared)
        weights = row_weights(weights, x, stack, axes)
        if weights is not None:
            weights = with_influence(weights, ct, stack)
        rows = layout.block.rows(layout.form, x, ct, weights, stack, axes)
        rows = rows._replace(
            swapped=layout.swapped, derivative=layout.derivative, basis=basis
        )
        return jtu.tree_leaves(layout.block.statistics(rows, like))

    stats = statistics(x, ct, *shared)
    if not isinstance(layout.block, Raw):  # Rows have a derivative, sums do not.
        stats = list(map(statistic_p.bind, stats))
    stats = [
        cast_varying(s, a.manual_axis_type.varying)
        for s, a in zip(stats, avals, strict=True)
    ]
    wanted = [s if ad.is_undefined_primal(t) else None for s, t in zip(stats, slots)]
    return [ct, *nothing, *wanted]


def _no_derivative(primals, tangents):
    (statistic,), (tangent,) = primals, tangents
    if type(tangent) is ad.Zero:
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


for _p in (tag_p, tag_linear_p, statistic_p, unseen_p):
    _p.def_impl(_value)
    _p.def_abstract_eval(_value)
    mlir.register_lowering(_p, mlir.lower_fun(_value, multiple_results=False))


for _p in (tag_p, tag_linear_p):
    ad.primitive_jvps[_p] = jtu.Partial(_jvp, _p)
    batching.fancy_primitive_batchers[_p] = jtu.Partial(_batch_tag, _p)


ad.primitive_transposes[tag_linear_p] = _transpose


ad.primitive_transposes[tag_p] = _transpose_derivative


jet.jet_rules[tag_p] = _taylor


batching.defvectorized(statistic_p)


batching.defvectorized(unseen_p)


ad.deflinear2(unseen_p, lambda ct, *_, **__: [ct])


ad.primitive_jvps[statistic_p] = _no_derivative
