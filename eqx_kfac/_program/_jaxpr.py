"""Programs as data: what is in a jaxpr, which part of it some results need, and how often
that uses a layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._jax import AnyJaxpr, Equation, eval_jaxpr, Jaxpr, part_of, Tracer
from .._tag import row_shapes_p


# Primitives that add updates, their third operand, to entries of the first one. How a
# single number is added is a jaxpr, which is no program of its own.
SCATTERS = frozenset("scatter scatter-add scatter_add".split())


class SlotUses(NamedTuple):
    """How a layer is used.

    **Fields:**

    - `number`: how often, for each one of a stack; `None` if that depends on data.
    - `shapes`: the `RowShapes` of all uses.
    - `devices`: whether there are several devices, each with uses of its own.
    """

    number: np.ndarray | None
    shapes: frozenset
    devices: bool


def count_uses(fn: Callable, *args: Any) -> list[SlotUses]:
    """What is in the slots for uses that `fn(*args)` returns: the program without data,
    of which only the ones of `row_shapes_p` are left, is evaluated."""
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
        counters = [e for e in equations(own) if e.primitive is row_shapes_p]
        shapes = frozenset(e.params["shapes"] for e in counters)
        found.append(SlotUses(None, shapes, devices))
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


def _needed(
    jaxpr: Jaxpr, consts: Sequence[Any], wanted: list[bool]
) -> tuple[Jaxpr, list[Any], bool]:
    """The part of a jaxpr that some of its outputs need, and whether it needs no data."""
    jaxpr, used_consts, used_inputs = part_of(jaxpr, wanted)
    consts = [c for c, used in zip(consts, used_consts, strict=True) if used]
    traced = any(isinstance(c, Tracer) for c in consts)
    return jaxpr, consts, not (any(used_inputs) or traced)


def _silent(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without its side effects: what is only printed is not needed."""
    return replaced(jaxpr, lambda eqn: eqn.replace(effects=set()), effects=set())


def replaced(value: Any, of: Callable[[Equation], Equation], **changes: Any) -> Any:
    """A jaxpr, and all jaxprs inside, with other equations, `of(eqn)`, and other
    changes."""
    again = lambda inner: replaced(inner, of, **changes)
    if type(value) in (tuple, list):
        return type(value)(map(again, value))
    if getattr(value, "jaxpr", value) is not value:  # One with constants.
        return value.replace(jaxpr=again(value.jaxpr))
    if not hasattr(value, "eqns"):
        return value
    eqns = [
        of(eqn.replace(params={name: again(p) for name, p in eqn.params.items()}))
        for eqn in value.eqns
    ]
    return value.replace(eqns=eqns, **changes)


def contains(jaxpr: Jaxpr, name: str) -> bool:
    return any(eqn.primitive.name == name for eqn in equations(jaxpr))


def equations(value: Any) -> Iterator[Equation]:
    """The equations of a jaxpr, and of all jaxprs inside them."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from equations(item)
    for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
        yield eqn
        yield from equations(list(eqn.params.values()))


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """The numbers of constants and of carries of a `scan`, inferred from shapes: JAX's
    own parameters for them change from version to version, but whatever a scan slices or
    stacks has one axis more outside of its body than inside."""
    body, _ = opened(eqn.params["jaxpr"])

    def unsliced(outer, inner):
        return sum(o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True))

    carried = unsliced(eqn.outvars, body.outvars)
    return unsliced(eqn.invars, body.invars) - carried, carried


def is_call(eqn: Equation, inner: list[AnyJaxpr]) -> bool:
    """Whether an operation calls the only one of its `jaxprs`: a `jit`, a `checkpoint`, a
    function with a derivative of its own. An operation with a single jaxpr that has as
    many inputs as the operation has operands is taken for a call."""
    return len(inner) == 1 and len(opened(inner[0])[0].invars) == len(eqn.invars)


def jaxprs(eqn: Equation) -> list[AnyJaxpr]:
    """The jaxprs among the parameters of an operation, with their constants if they have
    any."""
    if eqn.primitive.name in SCATTERS:
        return []
    return list(_jaxprs(list(eqn.params.values())))


def _jaxprs(value: Any) -> Iterator[AnyJaxpr]:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)


def written_out(eqn: Equation) -> Jaxpr:
    """An operation of which there is a function for its values, as the operations that
    this consists of."""
    operands = [v.aval for v in eqn.invars]
    run = lambda *operands: eqn.primitive.impl(*operands, **eqn.params)
    return jax.make_jaxpr(run)(*operands).jaxpr


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, with constants or without, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_program(value: Any) -> bool:
    """Whether a parameter of an operation is a function, or may contain one. (Equinox's
    primitives have their functions in a tree, whose structure is a parameter.)"""
    return isinstance(value, jtu.PyTreeDef) or (
        callable(value) and not isinstance(value, (type, np.dtype, jnp.dtype))
    )
