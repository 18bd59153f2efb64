"""All of JAX, Equinox and optax that the library uses and that these do not promise to
keep, each behind a name of ours. No other file imports `jax.core`, `jax.extend`,
`jax.interpreters` or `jax.experimental`, so that what a new version of JAX changes there
is changed here. (`_program/_interpreter.py` reads programs by the names of primitives,
too: `tests/test_primitives.py` asks whether JAX still has these.)"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
from jax.core import eval_jaxpr as eval_jaxpr, Tracer as Tracer
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr as Jaxpr,
    JaxprEqn,
    Literal as Literal,
    Primitive as Primitive,
    Var,
)
from jax.interpreters import ad, batching, mlir, partial_eval
from jaxtyping import Array, PyTree


Equation = JaxprEqn
# A program, with its constants or without.
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
# A variable of a program, or a number that is written into it.
Atom: TypeAlias = Var | Literal
# An array, or a symbolic zero.
Tangent: TypeAlias = Any
# An array, or what a transposition is to find the cotangent of.
Operand: TypeAlias = Any
# The shape, type and sharding of an array, as JAX has them while it traces.
Aval: TypeAlias = Any
# An axis that `vmap` maps: it has a size, and may be one of an explicit mesh.
MappedAxis: TypeAlias = Any


#
# Primitives
#


def set_values(primitive: Primitive, value: Callable, abstract: Callable) -> None:
    """What a primitive does, in JAX's own operations: `value(*arrays, **params)`; and the
    abstract value of that."""
    primitive.def_impl(value)
    primitive.def_abstract_eval(abstract)
    set_lowering(primitive, value)


def set_lowering(
    primitive: Primitive, value: Callable, platform: str | None = None
) -> None:
    """What a primitive is in a compiled program, on one platform or on all others."""
    lowered = mlir.lower_fun(value, multiple_results=False)
    mlir.register_lowering(primitive, lowered, platform=platform)


def set_jvp(primitive: Primitive, rule: Callable) -> None:
    """`rule(primals, tangents, **params)` returns the result and its tangent."""
    ad.primitive_jvps[primitive] = rule


def set_transpose(primitive: Primitive, rule: Callable) -> None:
    """`rule(cotangent, *operands, **params)` returns a cotangent for every operand."""
    ad.primitive_transposes[primitive] = rule


def set_linear(primitive: Primitive) -> None:
    """A primitive that is the identity, for derivatives."""
    ad.deflinear2(primitive, lambda ct, *_, **__: [ct])


def set_batching(primitive: Primitive, rule: Callable) -> None:
    """`rule(axis, operands, dims, **params)` returns the result and the place of its new
    axis; `axis` has a size, and a mesh axis if it is split explicitly."""
    batching.fancy_primitive_batchers[primitive] = rule


def set_simple_batching(primitive: Primitive, rule: Callable) -> None:
    """`rule(operands, dims, **params)`, where nothing need be known of the axis."""
    batching.primitive_batchers[primitive] = rule


def set_elementwise(primitive: Primitive) -> None:
    """A new axis of the only operand is one of the result."""
    batching.defvectorized(primitive)


def set_dead_code(primitive: Primitive, rule: Callable) -> None:
    """`rule(used_outputs, eqn)` returns which operands are needed, and what is left of
    the equation."""

    def with_equation(used_outputs, *others):
        *_, eqn = others  # From JAX 0.12 on, there is something else before it.
        return rule(used_outputs, eqn)

    partial_eval.dce_rules[primitive] = with_equation


def set_taylor(primitive: Primitive, rule: Callable) -> None:
    """`rule(primals, series, **params)`, for `jax.experimental.jet`, if JAX has it."""
    try:
        from jax.experimental import jet
    except ImportError:
        return
    jet.jet_rules[primitive] = rule


#
# In the rules of primitives
#


def is_zero(tangent: Tangent) -> bool:
    """Whether a tangent or cotangent is a symbolic zero, of which there is no array."""
    return type(tangent) is ad.Zero


def instantiated(tangent: Tangent) -> Array:
    """An array, also of a symbolic zero."""
    return ad.instantiate_zeros(tangent)


def is_linear_operand(operand: Operand) -> bool:
    """Whether an operand of a transposition is one that it transposes in, and not a
    known array."""
    return ad.is_undefined_primal(operand)


def aval_of(operand: Operand) -> Aval:
    """The abstract value of an operand of a transposition."""
    return operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand)


def broadcast_along(x: Array, mapped: MappedAxis, axis: int) -> Array:
    """An array that is the same along a mapped axis, with that axis; on an explicit mesh,
    split as the others are."""
    return batching.broadcast(x, mapped.size, axis, mapped.explicit_mesh_axis)


#
# Programs
#


def part_of(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[Jaxpr, list[bool], list[bool]]:
    """The part of a jaxpr that some of its outputs need; and which constants and inputs
    it has."""
    return partial_eval.dce_jaxpr_consts(jaxpr, wanted)


def varying(aval: Aval) -> frozenset:
    """The axes of a `shard_map` over which an array differs."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def number_of_parts(aval: Aval) -> int:
    """In how many parts an array is split by a `shard_map` within the program that it
    belongs to. (A `shard_map` around all of it is no part of that program.)"""
    axes = varying(aval) - {*jax.sharding.get_abstract_mesh().manual_axes}
    return math.prod(aval.sharding.mesh.shape[axis] for axis in axes)


#
# Equinox and optax
#


# The node in the place of an array that `eqx.nn.Shared` has taken out.
SharedNode = type(eqx.nn.Shared((0, 0), lambda p: p[1], lambda p: p[0]).pytree[1])


def transposed_padding(layer: eqx.nn.ConvTranspose) -> str | tuple[tuple[int, int], ...]:
    """The padding of an Equinox layer that is a transposed convolution, for the
    convolution with a dilated input that it is."""
    return layer._padding_transpose()


def default_precision() -> str | None:
    """What the user said by `jax.default_matmul_precision`, where this is called."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore


def is_placeholder(params: PyTree) -> bool:
    """Whether `optax.tree.map_params` asks where the state has trees like the parameters.
    (It is not told what these are.)"""
    return type(params).__name__ == "_ParamsPlaceholder"
