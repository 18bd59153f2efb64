"""The rows themselves, instead of sums over them: what `capture` asks of a tag.

Cotangents add up, and rows that were added up would be nonsense. So before any row is
collected, the backward pass is traced once with a *use* in the place of each layer's
rows, and what arrives in the slots is evaluated: all ones, if nothing is added to
anything.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr, Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval
from jaxtyping import Array

from ._block import AbstractBlock, Columns, columns_of, Statistics
from ._devices import explicit_sharding, zeros_of
from ._form import AbstractForm, Rows
from ._misc import moment


class RawRows(NamedTuple):
    """A layer's input `x` and the gradient `g` at its output, as the tag sees them: the
    first `stack` axes separate layers, the others of the first `axes` are examples."""

    x: Array
    g: Array
    stack: int
    axes: int
    swapped: bool = False
    basis: Any = None


class Use(NamedTuple):
    """What is known of rows before they are there."""

    x: jax.ShapeDtypeStruct
    g: jax.ShapeDtypeStruct
    stack: int
    axes: int


class Raw(AbstractBlock):
    """Collects rows; or, if there is no slot for gradients, uses."""

    weighted = False
    mixes_positions = False

    def __init__(self):
        pass

    def empty(self) -> Statistics:
        return Statistics(inputs=None, outputs=None)

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        return self.empty()

    def rows(
        self, form: AbstractForm, x: Array, g: Array, weights: Any, stack: int, axes: int
    ) -> RawRows:
        return RawRows(x, g, stack, axes)

    def statistics(self, rows: Any, slots: Statistics) -> Statistics:
        if slots.outputs is None:
            return Statistics(inputs=_use(rows, slots.inputs.dtype), outputs=None)
        inputs = None if slots.inputs is None else rows.x.astype(slots.inputs.dtype)
        return Statistics(inputs, rows.g.astype(slots.outputs.dtype))

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> Any:
        return statistics

    def operator(self, factors: Any) -> Any:
        raise NotImplementedError


class Seen(NamedTuple):
    """The sum of $g x^T$ over rows: the gradient of whatever is pulled back, if all of a
    layer's uses pass through its tag. And the number of rows."""

    gradient: Any = None
    rows: Any = None


class Sight(AbstractBlock):
    """Collects the gradient that a tag sees."""

    weighted = False
    mixes_positions = False

    def __init__(self):
        pass

    def empty(self) -> Statistics:
        return Statistics(inputs=Columns(), outputs=Seen())

    def slots(self, form: AbstractForm, layer: Any) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        return Statistics(inputs=columns, outputs=Seen(zeros(*shape), zeros()))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        x, g, like = slots.inputs.inputs(rows), rows.g, slots.outputs
        x, g = (g, x) if rows.swapped else (x, g)
        x, g = (a.astype(like.gradient.dtype) for a in (x, g))
        # The number as a function of the data, so that it is added up wherever these are.
        zero = 0 * jnp.sum(g, axis=tuple(range(rows.stack, g.ndim)))
        number = zero + math.prod(g.shape[rows.stack : -1])
        seen = Seen(moment(g, x, rows.stack, like.gradient), number)
        return Statistics(zeros_of(slots.inputs), seen)

    def factors(self, statistics: Statistics, count: Any, l2: Any) -> Any:
        return statistics

    def operator(self, factors: Any) -> Any:
        raise NotImplementedError


#
# A use is 1 for every layer of a stack. It hangs on the data, so that `vmap` maps it, but
# does not need any, so that it can be evaluated without.
#


use_p = Primitive("kfac_use")


def _use(rows: RawRows, dtype: Any) -> Array:
    probe = jnp.sum(rows.g, axis=tuple(range(rows.stack, rows.g.ndim))).astype(dtype)
    x, g = map(_struct, (rows.x, rows.g))
    return use_p.bind(probe, aval=None, use=Use(x, g, rows.stack, rows.axes))


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


class Uses(NamedTuple):
    """How a layer is used: `number` for each one of a stack, `None` if that depends on
    data; the `Use`s that all those are; and whether there are several devices."""

    number: np.ndarray | None
    kinds: frozenset
    devices: bool


def uses(fn: Callable, *args: Any) -> list[Uses]:
    """What is in the slots of uses that `fn(*args)` returns."""
    params, static = eqx.partition(args, eqx.is_array)
    closed = jax.make_jaxpr(lambda p: fn(*eqx.combine(p, static)))(params)
    everything = [True] * len(closed.out_avals)
    jaxpr, consts, _ = _needed(_silent(closed.jaxpr), closed.consts, everything)
    found, without_data = [], []
    for i in range(len(jaxpr.outvars)):
        wanted = [i == j for j in range(len(jaxpr.outvars))]
        own, _, known = _needed(jaxpr, consts, wanted)
        devices = contains(own, "shard_map")
        without_data.append(known and not devices)
        kinds = [e.params["use"] for e in _equations(own) if e.primitive is use_p]
        found.append(Uses(None, frozenset(kinds), devices))
    own, own_consts, _ = _needed(jaxpr, consts, without_data)
    with jax.ensure_compile_time_eval():
        numbers = iter(jax.jit(eval_jaxpr, static_argnums=0)(own, own_consts))
    return [
        use._replace(number=np.asarray(next(numbers))) if known else use
        for use, known in zip(found, without_data, strict=True)
    ]


def depends(fn: Callable, *args: Any) -> bool:
    """Whether anything that `fn(*args)` returns depends on its arguments."""
    closed = jax.make_jaxpr(fn)(*args)
    everything = [True] * len(closed.out_avals)
    return any(part_of(closed.jaxpr, everything)[2])


def part_of(jaxpr: Any, wanted: Sequence[bool]) -> tuple[Any, list[bool], list[bool]]:
    """The part of a jaxpr that some of its outputs need; and which constants and inputs
    it has."""
    return partial_eval.dce_jaxpr_consts(jaxpr, wanted)


def _needed(jaxpr: Any, consts: Sequence[Any], wanted: list[bool]) -> Any:
    """The part of a jaxpr that some of its outputs need, and whether it needs no data."""
    jaxpr, used_consts, used_inputs = part_of(jaxpr, wanted)
    consts = [c for c, used in zip(consts, used_consts, strict=True) if used]
    traced = any(isinstance(c, Tracer) for c in consts)
    return jaxpr, consts, not (any(used_inputs) or traced)


def _silent(value):
    """A jaxpr without its side effects: what is only printed is not needed."""
    if type(value) in (tuple, list):
        return type(value)(map(_silent, value))
    if getattr(value, "jaxpr", value) is not value:  # One with constants.
        return value.replace(jaxpr=_silent(value.jaxpr))
    if not hasattr(value, "eqns"):
        return value
    eqns = [
        eqn.replace(
            params={name: _silent(p) for name, p in eqn.params.items()}, effects=set()
        )
        for eqn in value.eqns
    ]
    return value.replace(eqns=eqns, effects=set())


def contains(jaxpr: Any, name: str) -> bool:
    return any(eqn.primitive.name == name for eqn in _equations(jaxpr))


def _equations(value: Any) -> Iterator[Any]:
    """Those of a jaxpr, and of all inside them."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _equations(item)
    for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
        yield eqn
        yield from _equations(list(eqn.params.values()))
