"""The rows themselves, instead of sums over them: what `capture` asks of a tag.

Cotangents add up, and rows that were added up would be nonsense. So before any row is
collected, the backward pass is traced once with a *use* in the place of each layer's
rows, and what arrives in the slots is evaluated: all ones, if nothing is added to
anything.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval
from jax.typing import DTypeLike
from jaxtyping import Array

from .._block import AbstractBlock, Columns, columns_of, Statistics
from .._custom_types import Layer, Weights
from .._devices import explicit_sharding, zeros_of
from .._misc import moment
from ..form import AbstractForm, Rows


class RawRows(NamedTuple):
    """A layer's input `x` and the gradient `g` at its output, as the tag sees them: the
    first `stack` axes separate layers, the others of the first `axes` are examples."""

    x: Array
    g: Array
    stack: int
    axes: int
    swapped: bool = False
    derivative: bool = False
    basis: Any = None


class Use(NamedTuple):
    """What is known of rows before they are there."""

    x: jax.ShapeDtypeStruct
    g: jax.ShapeDtypeStruct
    stack: int
    axes: int
    derivative: bool


class Raw(AbstractBlock):
    """Collects rows; or, if there is no slot for gradients, uses."""

    weighted = False
    mixes_positions = False
    derivatives = True

    def __init__(self):
        pass

    def empty(self) -> Statistics:
        return Statistics(inputs=None, outputs=None)

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        return self.empty()

    def rows(
        self,
        form: AbstractForm,
        x: Array,
        g: Array,
        weights: Weights,
        stack: int,
        axes: int,
    ) -> RawRows:
        return RawRows(x, g, stack, axes)

    def statistics(self, rows: Any, slots: Statistics) -> Statistics:
        if slots.outputs is None:
            return Statistics(inputs=_use(rows, slots.inputs.dtype), outputs=None)
        inputs = None if slots.inputs is None else rows.x.astype(slots.inputs.dtype)
        return Statistics(inputs, rows.g.astype(slots.outputs.dtype))

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> Any:
        return statistics

    def operator(self, factors: Any) -> Any:
        raise NotImplementedError


class Seen(NamedTuple):
    r"""The sum of $g x^\top$ over rows, which is the gradient of whatever is pulled back
    if all of a layer's uses pass through its tag; the number of rows; and the sum of
    $\lVert g \rVert \lVert x \rVert$, to which rounding is relative: rows may cancel."""

    gradient: Any = None
    rows: Any = None
    size: Any = None


class Sight(AbstractBlock):
    """Collects the gradient that a tag sees."""

    weighted = False
    mixes_positions = False
    derivatives = True

    def __init__(self):
        pass

    def empty(self) -> Statistics:
        return Statistics(inputs=Columns(), outputs=Seen())

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        return Statistics(inputs=columns, outputs=Seen(zeros(*shape), zeros(), zeros()))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, g, like = slots.inputs.inputs(rows), rows.g, slots.outputs
        x, g = (g, x) if rows.swapped else (x, g)
        x, g = (a.astype(like.gradient.dtype) for a in (x, g))
        # The number as a function of the data, so that it is added up wherever these are.
        zero = 0 * jnp.sum(g, axis=tuple(range(rows.stack, g.ndim)))
        number = zero + math.prod(g.shape[rows.stack : -1])
        norms = jnp.linalg.norm(g, axis=-1) * jnp.linalg.norm(x, axis=-1)
        size = jnp.sum(norms, axis=tuple(range(rows.stack, norms.ndim)))
        seen = Seen(moment(g, x, rows.stack, like.gradient), number, size)
        return Statistics(zeros_of(slots.inputs), seen)

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> Any:
        return statistics

    def operator(self, factors: Any) -> Any:
        raise NotImplementedError


use_p = Primitive("kfac_use")


def _use(rows: RawRows, dtype: DTypeLike) -> Array:
    probe = jnp.sum(rows.g, axis=tuple(range(rows.stack, rows.g.ndim))).astype(dtype)
    x, g = map(_struct, (rows.x, rows.g))
    use = Use(x, g, rows.stack, rows.axes, rows.derivative)
    return use_p.bind(probe, aval=None, use=use)


def _struct(a: Array) -> jax.ShapeDtypeStruct:
    sharding = explicit_sharding(jax.typeof(a))
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _one(*_, aval, use):
    return jnp.ones(aval.shape, aval.dtype)


def _without_data(used_outputs, *others):
    *_, eqn = others  # From JAX 0.12 on, there is something else before it.
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    (out,) = eqn.outvars
    params = dict(eqn.params, aval=out.aval)
    return [False] * len(eqn.invars), eqn.replace(invars=[], params=params)


def _batch(operands, dims, *, aval, use):
    return use_p.bind(*operands, aval=aval, use=use), dims[0]


use_p.def_impl(_one)


use_p.def_abstract_eval(lambda *avals, aval, use: aval if aval is not None else avals[0])


mlir.register_lowering(use_p, mlir.lower_fun(_one, multiple_results=False))


batching.primitive_batchers[use_p] = _batch


partial_eval.dce_rules[use_p] = _without_data
