"""Operations that leave an array of parameters what it is, in other clothes: that move
its entries, cast or scale them, or add something to them."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._jax import Equation
from ._axes import Axes
from ._facts import added, bias_order, evaluated, Fact, Frame


def _moved(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    """An operation that moves entries of its first operand."""
    (value, fact), *_ = inputs
    move = ft.partial(MOVES[eqn.primitive.name], eqn)
    out = lambda fact: (evaluated(eqn, [value]), [fact])
    if fact.terms:
        axes = [move(term.axes) for term in fact.terms]
        if None in axes:
            return None
        pairs = zip(fact.terms, axes, strict=True)
        moved = [t._replace(axes=a) for t, a in pairs]
        return out(fact._replace(terms=tuple(moved), uniform=None))
    if fact.pending is not None and frame.used_once(eqn.invars[0]):
        there = fact.pending.axes
        axes = move(there)
        # All of a result is seen by its tag, in the order of the array.
        if axes is None or axes.window != there.window or axes.flips or axes.copied:
            return None
        return out(fact._replace(pending=fact.pending._replace(axes=axes)))
    uniform = _number(value, fact)
    if uniform is not None and fact.pending is None:
        return frame.visitor.evaluated(eqn, [value]), [fact._replace(uniform=uniform)]
    return None


def _cast(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    new = eqn.outvars[0].aval.dtype  # pyright: ignore
    if not jnp.issubdtype(new, jnp.inexact):
        return None
    ((value, fact),) = inputs
    if jnp.issubdtype(new, jnp.complexfloating) and fact.pending is not None:
        return None
    keep = fact.terms or fact.uniform is not None
    if fact.pending is not None:
        keep = frame.used_once(eqn.invars[0])
    if not keep:
        return None
    if fact.uniform is None:
        return evaluated(eqn, [value]), [fact]
    out, uniform = (frame.visitor.evaluated(eqn, [v]) for v in (value, fact.uniform))
    return out, [fact._replace(uniform=uniform[0])]


def _split(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    ((value, fact),) = inputs
    if not fact.terms:
        return None
    axis, start, facts = eqn.params["axis"], 0, []
    for size in map(int, eqn.params["sizes"]):
        starts, stops = _along(value.shape, axis, start, start + size)
        axes = [term.axes.slice(starts, stops) for term in fact.terms]
        if None in axes:
            return None
        pairs = zip(fact.terms, axes, strict=True)
        terms = tuple(t._replace(axes=a) for t, a in pairs)
        facts.append(Fact(fact.data, terms))
        start += size
    return evaluated(eqn, [value]), facts


def _multiplied(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    """A product with, or a quotient by, a number; or a change of sign."""
    name = eqn.primitive.name
    side = 0 if inputs[0][1].terms else 1
    if len(inputs) <= side or not inputs[side][1].terms:
        return None
    frame.settle(eqn.invars)  # What it is multiplied by may be a result.
    inputs = [frame.read(atom) for atom in eqn.invars]
    values = [value for value, _ in inputs]
    fact = inputs[side][1]
    if name == "neg":
        number = -1.0
    else:
        if name == "div" and side == 1:
            return None
        number = _number(*inputs[1 - side])
        if inputs[1 - side][1].terms:
            return None
        if number is None:
            return _by_mask(frame, eqn, side, 1 - side) if name == "mul" else None
        number = 1 / number if name == "div" else number
    scale = lambda t: number if t.scale is None else t.scale * number
    terms = tuple(t._replace(scale=scale(t)) for t in fact.terms)
    data = any(f.data for _, f in inputs)
    return evaluated(eqn, values), [Fact(data, terms)]


def _by_mask(
    frame: Frame, eqn: Equation, array: int, mask: int, rest: int | None = None
) -> tuple | None:
    """The operand `array` of an operation where the operand `mask` is one (or is the
    number of the case, if there is a `rest` for elsewhere)."""
    value, fact = frame.read(eqn.invars[array])
    others = [frame.read(eqn.invars[i]) for i in (mask, rest) if i is not None]
    shape = eqn.outvars[0].aval.shape  # pyright: ignore
    unknown = any(other.data or other.terms or other.pending for _, other in others)
    if unknown or fact.data or np.shape(value) != shape:
        return None
    where, *elsewhere = (_entries(*other) for other in others)
    kept = 1 if rest is None else array - 1
    terms = [frame.visitor.masked(t, where, kept, elsewhere) for t in fact.terms]
    if None in terms:
        return None
    out = evaluated(eqn, [frame.read(atom)[0] for atom in eqn.invars])
    return out, [Fact(False, tuple(t for t in terms if t is not None))]


def _selected(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    """An array where a condition holds, and zeros elsewhere."""
    (which, _), *cases = inputs
    sides = [i for i, (_, case) in enumerate(cases) if case.terms]
    if len(cases) != 2 or len(sides) != 1 or np.ndim(which) == 0:
        return None
    (side,) = sides
    return _by_mask(frame, eqn, 1 + side, 0, 2 - side)


def _entries(value: Any, fact: Fact) -> Any:
    """All entries of a value, or the number that they are."""
    return value if fact.uniform is None else fact.uniform


def _sum(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    """A sum (or a difference): of arrays (and constants), or of a result and its bias."""
    joined = _joined(frame, eqn, inputs)
    if joined is not None:
        return joined
    (a, fact_a), (b, fact_b) = inputs
    shape = eqn.outvars[0].aval.shape  # pyright: ignore
    of_terms = [np.shape(v) for v, fact in inputs if fact.terms]
    if not of_terms or fact_a.data or fact_b.data or {*of_terms} != {shape}:
        return None  # Or some entries would be there several times.
    minus = eqn.primitive.name == "sub"
    negative = lambda t: t._replace(scale=-1.0 if t.scale is None else -t.scale)
    terms = fact_b.terms
    terms = tuple(map(negative, terms)) if minus else terms
    return evaluated(eqn, [a, b]), [Fact(False, added((*fact_a.terms, *terms)))]


def _joined(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    """A bias joins the array whose product with data it is added to."""
    if eqn.primitive.name == "sub":
        return None
    for i in (0, 1):
        (_, fact), (_, other) = inputs[i], inputs[1 - i]
        if fact.pending is None or len(other.terms) != 1 or other.data:
            continue
        (bias,) = other.terms
        site, *rest = fact.pending.sites
        order = bias_order(fact.pending, bias)
        if order is None or not frame.used_once(eqn.invars[i]):
            continue
        if rest or not frame.visitor.accepts(site, bias):
            continue
        (z,) = evaluated(eqn, [value for value, _ in inputs])
        return [frame.tagged(z, fact.pending, bias, order)], [Fact(True)]
    return None


def _complex(frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
    (a, fact_a), (b, fact_b) = inputs
    if not (fact_a.terms or fact_b.terms) or fact_a.data or fact_b.data:
        return None
    turned = lambda t: t._replace(scale=1j if t.scale is None else t.scale * 1j)
    terms = (*fact_a.terms, *map(turned, fact_b.terms))
    return evaluated(eqn, [a, b]), [Fact(False, terms)]


def _number(value: Any, fact: Fact) -> Any:
    """The number that all entries of a value are, if it is known to be one."""
    if np.ndim(value) == 0:
        return value
    return fact.uniform


def _along(shape: Sequence[int], axis: int, start: int, stop: int) -> tuple:
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = start, stop
    return starts, stops


def has_derivative(eqn: Equation) -> bool:
    """Whether results of an operation may have derivatives other than zero."""
    dtypes = [v.aval.dtype for v in eqn.outvars]  # pyright: ignore
    stops = eqn.primitive.name == "stop_gradient"
    return not stops and any(jnp.issubdtype(d, jnp.inexact) for d in dtypes)


def _slice(eqn: Equation, axes: Axes) -> Axes | None:
    p = eqn.params
    if p["strides"] is not None and any(s != 1 for s in p["strides"]):
        return None
    return axes.slice(p["start_indices"], p["limit_indices"])


def _reshape(eqn: Equation, axes: Axes) -> Axes | None:
    # Column by column (`order="F"`), the axes are permuted before they are joined.
    order = eqn.params["dimensions"]
    axes = axes if order is None else axes.transpose(order)
    return axes.reshape(eqn.params["new_sizes"])


MOVES: dict[str, Callable] = {
    "transpose": lambda eqn, axes: axes.transpose(eqn.params["permutation"]),
    "reshape": _reshape,
    "squeeze": lambda eqn, axes: axes.without(eqn.params["dimensions"]),
    "broadcast_in_dim": lambda eqn, axes: axes.broadcast(
        eqn.params["shape"], eqn.params["broadcast_dimensions"]
    ),
    "slice": _slice,
    "rev": lambda eqn, axes: axes.reverse(eqn.params["dimensions"]),
    **dict.fromkeys(
        (
            *("copy", "copy_p", "name", "pvary", "pcast"),
            *("sharding_constraint", "mesh_cast"),
        ),
        lambda eqn, axes: axes,
    ),
}


MOVING: dict[str, Callable] = {
    **dict.fromkeys(MOVES, _moved),
    "convert_element_type": _cast,
    "split": _split,
    **dict.fromkeys(("mul", "div", "neg"), _multiplied),
    "select_n": _selected,
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    "complex": _complex,
}
