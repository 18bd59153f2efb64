"""The tag primitive: statistics as cotangents.

`tag(y, x)` is `y`. Its JVP binds a linear twin in which the *slots* are inputs that do
not touch the value, and whose transpose passes the cotangent of `y` through and *defines*
the cotangent of the slots as the layer's statistics. One `jax.vjp` of any function of a
model then returns the gradient in its weights and the statistics in its tags; whatever
JAX can differentiate, it can collect curvature from.

This folder, and `_program/`, which reads jaxprs, are the only ones that touch JAX's
extension points.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._block import AbstractBlock
from .._devices import cast_varying
from ..form import AbstractForm
from ._rows import Raw
from ._weights import row_weights


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
        """Of the zeros, behind the layer's stack."""
        return *self.examples, len(self.examples) + 1, self.number + 1


class Layout(NamedTuple):
    """What the operands `y, x, *shared, *slots` of a tag are. `shared` arrays belong to
    the layer and not to an example; like the slots, they are mapped over stacks only."""

    form: AbstractForm
    block: AbstractBlock
    swapped: bool
    slots: Any  # treedef of the slots
    shared: Any  # and of weights and basis

    def split(self, operands):
        k = 2 + self.shared.num_leaves
        return operands[0], operands[1], operands[2:k], operands[k:]

    def note(self, operands) -> Note | None:
        """That of a tag with these operands, or abstract values of them."""
        _, _, shared, _ = self.split(operands)
        *_, note = jtu.tree_unflatten(self.shared, shared)
        return None if note is None else Note.read(note.shape)


tag_p = Primitive("kfac_tag")


tag_linear_p = Primitive("kfac_tag_linear")


statistic_p = Primitive("kfac_statistic")  # Marks what came from a transpose.


def _value(y, *_, **__):
    return y


def _batch_tag(primitive, axis, operands, dims, *, layout, **params):
    """As `_batch`. What is the same for all examples gets their axis nevertheless: else
    the gradients at it would be added up before they are squared."""
    if all(d is None for d in dims):
        note = layout.note(operands)
        if note is None or axis.size not in note.examples:
            return primitive.bind(*operands, layout=layout, **params), None
        y, *others = operands
        operands = [jnp.broadcast_to(y, (axis.size, *y.shape)), *others]
        dims = [0, *dims[1:]]
    return _batch(primitive, operands, dims, layout=layout, **params)


def _batch(primitive, operands, dims, *, layout, stack, examples):
    """Every operand's mapped axis moves to the front of its kind: stacked layers first,
    then examples. Only a mapped slot means a stack: separate layers, separate statistics;
    otherwise the new axis is an example axis, outside the earlier ones."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    stacked = any(d is not None for d in dims[2:])
    axis = 0 if stacked else stack

    def place(x, d):
        if d is not None:
            return jnp.moveaxis(x, d, axis)
        shape = x.shape[:axis] + (size,) + x.shape[axis:]
        return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)

    num_placed = len(operands) if stacked else 2
    placed = list(map(place, operands[:num_placed], dims[:num_placed]))
    out = primitive.bind(
        *placed,
        *operands[num_placed:],
        layout=layout,
        stack=stack + stacked,
        examples=examples + (not stacked),
    )
    return out, axis


def _linear_tangent(y_dot, operands, slot_dots, layout, **params):
    if all(type(s) is ad.Zero for s in slot_dots):
        return y_dot
    _, x, shared, _ = layout.split(operands)
    y_dot, *slot_dots = map(ad.instantiate_zeros, (y_dot, *slot_dots))
    return tag_linear_p.bind(y_dot, x, *shared, *slot_dots, layout=layout, **params)


def _jvp(primitive, primals, tangents, *, layout, **params):
    """Neither tag depends on anything but its first operand, and linearly on that."""
    out = primitive.bind(*primals, layout=layout, **params)
    y_dot, _, _, slot_dots = layout.split(tangents)
    return out, _linear_tangent(y_dot, primals, slot_dots, layout, **params)


def _transpose(ct, *operands, layout, stack, examples):
    _, x, shared, slots = layout.split(operands)
    nothing = [None] * (1 + len(shared))
    if type(ct) is ad.Zero:
        return [ct, *nothing, *[None] * len(slots)]
    avals = [s.aval if ad.is_undefined_primal(s) else jax.typeof(s) for s in slots]
    like = jtu.tree_unflatten(layout.slots, avals)

    def statistics(x, ct, *shared):
        axes = stack + examples
        weights, basis, *_ = jtu.tree_unflatten(layout.shared, shared)
        weights = row_weights(weights, x, stack, axes)
        rows = layout.block.rows(layout.form, x, ct, weights, stack, axes)
        rows = rows._replace(swapped=layout.swapped, basis=basis)
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


for _p in (tag_p, tag_linear_p, statistic_p):
    _p.def_impl(_value)
    _p.def_abstract_eval(_value)
    mlir.register_lowering(_p, mlir.lower_fun(_value, multiple_results=False))


for _p in (tag_p, tag_linear_p):
    ad.primitive_jvps[_p] = jtu.Partial(_jvp, _p)
    batching.fancy_primitive_batchers[_p] = jtu.Partial(_batch_tag, _p)


ad.primitive_transposes[tag_linear_p] = _transpose


batching.defvectorized(statistic_p)


ad.primitive_jvps[statistic_p] = _no_derivative
