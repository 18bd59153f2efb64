"""What becomes of the axes of every use of a tag, found by following a program backwards
from the outputs of losses."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._jax import Equation, Literal
from .._tag import label_of, tag_p
from ._jaxpr import is_call, is_program, jaxprs, opened, scan_counts, written_out
from ._reach import aligned, Call, either, Reach, Reached, RULES, unknown


class UseReach(NamedTuple):
    """What is known of the axes of one use of a tag; see `Reach`.

    **Fields:**

    - `number`: the number of the tag.
    - `reach`: of the layer's output, without the axes of the layer itself: first the
        axes of stacked layers, then those of examples.
    """

    number: int
    reach: Reached


def reach_of_uses(jaxpr: Any, term_axes: Sequence[range]) -> list[UseReach]:
    """What is known of every use of a tag in a program, in its order. The program's first
    results are outputs of losses; `term_axes` are the places of the axes of terms that
    each begins with among those of all losses."""
    outs: list[Reached] = [None] * len(jaxpr.outvars)
    for i, (places, var) in enumerate(zip(term_axes, jaxpr.outvars)):
        terms = [1 << place for place in places]
        axes = (*terms, *[0] * (len(_shape(var)) - len(terms)))
        outs[i] = Reach(axes, terms=sum(terms))
    backwards = _Backwards()
    backwards.through(jaxpr, outs)
    return backwards.uses[::-1]


class _Backwards:
    """Follows the results of a jaxpr back to its inputs.

    **Fields:**

    - `uses`: the uses of tags on the way, the last one first.
    """

    def __init__(self):
        self.uses: list[UseReach] = []

    def through(self, jaxpr: Any, outs: Sequence[Reached]) -> list[Reached]:
        """The reach of a jaxpr's inputs, given that of its results."""
        reach: dict[Any, Reached] = {}

        def add(atom, new):
            if new is not None and not isinstance(atom, Literal):
                reach[atom] = either(new, reach.get(atom))

        for atom, out in zip(jaxpr.outvars, outs, strict=True):
            add(atom, out)
        for eqn in reversed(jaxpr.eqns):
            results = [reach.get(var) for var in eqn.outvars]
            for atom, new in zip(eqn.invars, self._operands(eqn, results), strict=True):
                add(atom, new)
        return [reach.get(var) for var in jaxpr.invars]

    def _operands(self, eqn: Equation, outs: list[Reached]) -> list[Reached]:
        """The reach of an operation's operands, given that of its results."""
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is tag_p:
            return self._tag(eqn, outs)
        if name == "scan":
            return self._scan(eqn, outs)
        if name == "while":
            return self._while(eqn, outs)
        if name == "cond":
            branches = [
                self.through(opened(b)[0], outs) for b in reversed(params["branches"])
            ]
            return [None, *[ft.reduce(either, b) for b in zip(*branches, strict=True)]]
        others = jaxprs(eqn)
        if is_call(eqn, others):
            return self.through(opened(others[0])[0], outs)
        # Whatever is in an operation of which nothing is known has tags all the same.
        for other in reversed(others):
            jaxpr, _ = opened(other)
            self.through(jaxpr, [_nothing_known(_shape(v)) for v in jaxpr.outvars])
        if all(out is None for out in outs):
            return [None] * len(eqn.invars)
        if name in _WRITING:
            return self.through(written_out(eqn), outs)
        rule = RULES.get(name, aligned)
        if others or any(map(is_program, params.values())):
            rule = unknown
        shapes = [_shape(atom) for atom in eqn.invars]
        total: list[Reached] = [None] * len(shapes)
        for var, out in zip(eqn.outvars, outs, strict=True):
            if out is not None and _has_gradient(var):
                new = rule(Call(name, params, shapes, _shape(var)), out)
                total = list(map(either, total, new))
        return total

    def _tag(self, eqn: Equation, outs: list[Reached]) -> list[Reached]:
        (out,) = outs
        label = label_of(eqn)
        if label is not None:
            number = eqn.params["stack"] + eqn.params["examples"]
            reach = None if out is None else out.moved(out.axes[:number])
            self.uses.append(UseReach(label.number, reach))
        # The result is the first operand. Statistics are no values of the loss.
        return [out, *[None] * (len(eqn.invars) - 1)]

    def _scan(self, eqn: Equation, outs: list[Reached]) -> list[Reached]:
        m, n = scan_counts(eqn)
        body, _ = opened(eqn.params["jaxpr"])

        def stacked(out):
            # The rounds of the loop are the first axis of what it stacks.
            if out is None:
                return None
            return out._replace(axes=out.axes[1:], loops=(*out.loops, out.axes[0]))

        ys = list(map(stacked, outs[n:]))
        ins = self._carried(lambda carry: self.through(body, [*carry, *ys]), outs[:n], m)
        consts, carry, xs = ins[:m], ins[m : m + n], ins[m + n :]

        def unstacked(x):
            return (
                None if x is None else _outside(x)._replace(axes=(x.loops[-1], *x.axes))
            )

        first = [_after_loop(_other_rounds(reach)) for reach in carry]
        return [*map(_after_loop, consts), *first, *map(unstacked, xs)]

    def _while(self, eqn: Equation, outs: list[Reached]) -> list[Reached]:
        params = eqn.params
        m, n = params["cond_nconsts"], params["body_nconsts"]
        (cond, _), (body, _) = map(opened, (params["cond_jaxpr"], params["body_jaxpr"]))

        def rounds(carry):
            # No gradient flows through a condition.
            self.through(cond, [None] * len(cond.outvars))
            return self.through(body, carry)

        ins = self._carried(rounds, outs, n)
        return [*[None] * m, *map(_after_loop, ins)]

    def _carried(self, body: Callable, outs: list, num_consts: int) -> list[Reached]:
        """The reach of what the body of a loop gets in any round. What it carries is used
        for the loop's results, or for the next round: in the end, for any later one."""
        within = lambda r: None if r is None else r._replace(loops=(*r.loops, 0))
        start, carry = len(self.uses), list(map(within, outs))
        while True:
            del self.uses[start:]
            ins = body(carry)
            carried = ins[num_consts : num_consts + len(carry)]
            later = [_other_rounds(reach) for reach in carried]
            new = list(map(either, carry, later))
            if new == carry:
                return ins
            carry = new


def _outside(reach: Reach) -> Reach:
    """Without the innermost loop."""
    return reach._replace(loops=reach.loops[:-1])


def _after_loop(reach: Reached) -> Reached:
    """The reach of what all rounds of a loop use."""
    return None if reach is None else _outside(reach)


def _other_rounds(reach: Reached) -> Reached:
    """The reach of what a loop carries from one round to others: one of them, or all."""
    if reach is None:
        return None
    *outer, rounds = reach.loops
    return reach._replace(loops=(*outer, 0)).doubting(rounds)


def _nothing_known(shape: tuple[int, ...]) -> Reach:
    """The reach of an array of which nothing is known, in loops of which nothing is."""
    return Reach((0,) * len(shape), unknown=_ALL, terms=_ALL, mixed=_ALL)


def _has_gradient(var: Any) -> bool:
    """Whether a gradient flows through a result: not through integers."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _shape(atom: Any) -> tuple[int, ...]:
    """The shape of an operand or a result; `()` for one that is no array."""
    return getattr(atom.aval, "shape", ())


# What Equinox's loops write into a buffer with, alone and mapped: diffrax's solvers do.
_WRITING = frozenset({"maybe_set", "vprim"})
# All axes of terms.
_ALL = -1
