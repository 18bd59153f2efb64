"""A program, evaluated equation by equation, in which a visitor is told what becomes of
arrays of parameters, and may put a tag wherever one of them multiplies data.

Nothing here looks for patterns of several equations. Instead, a `Fact` is known of every
value of the program (`_facts.py`):

- whether the value depends on data, the inputs of the program;
- whether it is the sum of some *terms*, each of which is an array of parameters that has
  been transposed, reshaped, sliced, cast, or multiplied by a number (`_moves.py`);
- whether it is *pending*: the product of such terms and data, to which a bias may still
  be added.

A place where a term multiplies data is a *site*, and says what the array is used as there
(`_sites.py`). An operation that adds a bias to a pending value tells the visitor of its
sites, with that bias. An operation that moves or casts the value leaves it pending if
nothing else uses it. All other operations *settle* the value first: the visitor is told
of its sites, without a bias. The visitor returns the value, tagged perhaps, with which
the program goes on. It is also told of terms with which anything else is done, and may
have an operation on arrays and constants alone make another term.

A *frame* has the values of all variables of one jaxpr, and the facts of them.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Atom, Equation
from .._program import opened, scan_counts
from ..form import Dense, Einsum, Lookup
from ._axes import Axes
from ._facts import (
    AbstractVisitor,
    evaluated,
    Fact,
    Frame,
    Pending,
    product,
    sliced_fact,
    Term,
)
from ._moves import has_derivative, MOVES, MOVING
from ._sites import contraction, convolution, lookup, row, Site


# How many numbers an index may choose from an array in a lookup. The numbers are outputs
# of the lookup, and one of its factors is a matrix with a row for each of them: for a row
# of a table, this is no trouble, but for one of several matrices it would be.
WIDE = 8192

# Operations of several operands, of which some may be of length one along an axis.
_ENTRY_BY_ENTRY = {
    *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2"),
    *("complex", "select_n", "clamp", "eq", "ne", "lt", "le", "gt", "ge"),
}

# Forms whose sites may be in complex numbers.
_IN_COMPLEX_NUMBERS = (Dense, Einsum)


class Walk:
    """Evaluates jaxprs, and tells a visitor what becomes of arrays of parameters.

    The methods for single operations get an equation, and the values and facts of its
    operands. They return the values and facts of its results; or `None` if they cannot
    follow the operation, which is then one like any other.
    """

    def __init__(self, visitor: AbstractVisitor):
        self.visitor = visitor

    def results(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        values: Sequence[Any],
        facts: Sequence[Fact],
    ) -> list[Any]:
        """The values that a jaxpr returns, given its inputs and the facts of them."""
        return self._run(jaxpr, consts, values, facts, settle=True)[0]

    def _run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        values: Sequence[Any],
        facts: Sequence[Fact],
        settle: bool = False,
    ) -> tuple[list[Any], list[Fact]]:
        """The results of a jaxpr, and the facts of them. With `settle`, none of them is
        left pending, so that no bias is looked for outside of the jaxpr."""
        frame = Frame(self.visitor, jaxpr)
        constant = [Fact() for _ in consts]
        names = [*jaxpr.constvars, *jaxpr.invars]
        frame.write(names, [*consts, *values], [*constant, *facts])
        for eqn in jaxpr.eqns:
            inputs = [frame.read(atom) for atom in eqn.invars]
            results = self._followed(frame, eqn, inputs)
            frame.write(eqn.outvars, *(results or self._not_followed(frame, eqn)))
        # A result that other equations of the jaxpr use as well is settled here, so that
        # all of them see the same value.
        frame.settle([a for a in jaxpr.outvars if settle or not frame.used_once(a)])
        out = [frame.read(atom) for atom in jaxpr.outvars]
        values, facts = [value for value, _ in out], [fact for _, fact in out]
        if settle:
            values = [
                self.visitor.returned(fact.terms, value) if fact.terms else value
                for value, fact in out
            ]
        return values, facts

    def _followed(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """An operation that may keep a term what it is, or multiply data by it, or that
        has a program within it."""
        name = eqn.primitive.name
        if name not in MOVES and name not in _WITHIN:
            computed = self._computed(eqn, inputs)
            if computed is not None:
                return computed
        if name in MOVING:
            return MOVING[name](frame, eqn, inputs)
        return _FOLLOWED[name](self, frame, eqn, inputs) if name in _FOLLOWED else None

    def _not_followed(self, frame: Frame, eqn: Equation, tell: bool = True) -> tuple:
        """An operation of which is only known whether its results depend on data; `tell`:
        whether the visitor is told of the terms among its operands."""
        inputs = _settled(frame, eqn)
        values = [
            self._otherwise(eqn, value, fact) if tell and fact.terms else value
            for value, fact in inputs
        ]
        data = any(fact.data for _, fact in inputs)
        out = (evaluated if data else self.visitor.evaluated)(eqn, values)
        return out, [Fact(data)] * len(out)

    def _computed(self, eqn: Equation, inputs: list) -> tuple | None:
        """An operation on arrays and constants alone."""
        of_data = any(fact.data for _, fact in inputs)
        if of_data or not any(fact.terms for _, fact in inputs):
            return None
        fact = self.visitor.computed(eqn, inputs)
        if fact is None:
            return None
        return evaluated(eqn, [value for value, _ in inputs]), [fact]

    def _otherwise(self, eqn: Equation, value: Any, fact: Fact) -> Any:
        """Terms as an operand of an operation that is not followed. Where numbers are
        copied by the operation itself, they are copied here."""
        terms, shape = fact.terms, eqn.outvars[0].aval.shape  # pyright: ignore
        if eqn.primitive.name in _ENTRY_BY_ENTRY and value.shape != shape:
            places = range(len(shape) - value.ndim, len(shape))
            broadcast = lambda term: term.axes.broadcast(shape, places)
            terms = [term._replace(axes=broadcast(term)) for term in terms]
            value = jax.lax.broadcast_in_dim(value, shape, tuple(places))
        return self.visitor.otherwise(terms, value, has_derivative(eqn))

    #
    # Products of terms and data
    #

    def _contraction(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A `dot_general` of data, from the left or from the right, and terms. Or of a
        constant and terms: a gradient within the model begins with ones, which the last
        layer transposed multiplies."""
        sides = [i for i, (_, fact) in enumerate(inputs) if fact.terms]
        if len(sides) != 1:
            return None
        (side,) = sides
        x = _settled_value(frame, eqn.invars[1 - side])
        match = lambda term: contraction(eqn, side, term.axes, x)
        constant = not inputs[1 - side][1].data
        return self._pending(frame, eqn, inputs[side][1].terms, match, constant)

    def _convolution(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A convolution of data with a kernel that consists of terms."""
        (_, fact_x), (_, fact) = inputs
        if fact_x.terms or not fact.terms or not fact_x.data:
            return None
        x = _settled_value(frame, eqn.invars[0])
        match = lambda term: convolution(eqn, term.axes, x)
        return self._pending(frame, eqn, fact.terms, match)

    def _lookup(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A `gather` of rows of one array. The array must not have been multiplied by a
        number: the data are indices, which cannot be multiplied by it instead."""
        (_, fact), (index, fact_index) = inputs
        if len(fact.terms) != 1 or not fact_index.data or fact.terms[0].scale is not None:
            return None
        match = lambda term: lookup(eqn, term.axes, index)
        return self._pending(frame, eqn, fact.terms, match)

    def _dynamic_slice(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A slice that begins at an index which depends on data. It is a lookup if its
        length is one along one axis, and all along the others. The array must not have
        been multiplied by a number, as for `_lookup`."""
        (_, fact), *indices = inputs
        if len(fact.terms) != 1:
            return None
        (term,) = fact.terms
        sizes, shape = eqn.params["slice_sizes"], term.axes.shape
        cut = [i for i, n in enumerate(sizes) if n != shape[i]]
        if len(cut) != 1 or sizes[cut[0]] != 1 or term.scale is not None:
            return None
        (along,) = cut
        index, fact_index = indices[along]
        if not fact_index.data:
            return None
        match = lambda term: row(eqn, term.axes, along, jnp.asarray(index))
        return self._pending(frame, eqn, fact.terms, match)

    def _pending(
        self,
        frame: Frame,
        eqn: Equation,
        terms: tuple[Term, ...],
        match: Callable,
        constant: bool = False,
    ) -> tuple | None:
        """The product of data (or of a `constant`) and the sum of `terms`, which is
        pending. `match(term)` is what `contraction` returns for a term: the use of its
        array and all that a site says of it; or `None` if no form fits."""
        matches = [match(term) for term in terms]
        if None in matches or not all(_is_narrow(m) for m in matches):
            return None
        sites = [
            Site(t.parameter, t.stack, *_scaled(_in_one_layer(m, t.stack), t.scale))
            for t, m in zip(terms, matches, strict=True)
        ]
        sites = [
            site._replace(constant=constant, mask=term.mask)
            for site, term in zip(sites, terms, strict=True)
        ]
        values = [
            ft.reduce(lambda a, s: self.visitor.covered(s, a), sites, value)
            if fact.terms
            else value
            for value, fact in _settled(frame, eqn)
        ]
        (y,) = evaluated(eqn, values)
        if jnp.issubdtype(y.dtype, jnp.complexfloating) and any(
            not isinstance(site.use.form, _IN_COMPLEX_NUMBERS) for site in sites
        ):
            return None
        # The axes of `y` are followed in terms of the shape that the first site reshapes
        # `y` to, in which they are divided. What was divided can always be joined again.
        axes = Axes.of(sites[0].outputs.shape).reshape(y.shape)
        assert axes is not None
        return [y], [Fact(True, (), Pending(tuple(sites), axes))]

    #
    # Programs within
    #

    def _inlined(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A `jit`, whose equations are evaluated as if they were part of the program."""
        if not any(fact.terms or fact.pending for _, fact in inputs):
            return None
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner, consts = opened(closed)
        # A bias may be added within the `jit`, unless the value is used outside as well.
        for atom, (_, fact) in zip(eqn.invars, inputs, strict=True):
            if fact.pending is not None and not frame.used_once(atom):
                frame.settle([atom])
        inputs = [frame.read(atom) for atom in eqn.invars]
        values, facts = [list(column) for column in zip(*inputs, strict=True)]
        return self._run(inner, consts, values, facts)

    def _checkpoint(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A `jax.checkpoint`, which becomes another one around the tagged program."""
        if not any(fact.terms for _, fact in inputs):
            return None
        inputs = _settled(frame, eqn)
        inner, consts = opened(eqn.params["jaxpr"])
        facts = [fact for _, fact in inputs]

        def run(*values):
            return self._run(inner, consts, values, facts, settle=True)[0]

        names = "policy", "prevent_cse"
        options = {k: v for k, v in eqn.params.items() if k in names}
        out = jax.checkpoint(run, **options)(*(value for value, _ in inputs))
        return out, _all_alike(inputs, len(out))

    def _cond(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A choice of one of several programs, each of which may be tagged."""
        if not any(fact.terms for _, fact in inputs):
            return None
        (index, fact_index), *operands = _settled(frame, eqn)
        facts = [fact for _, fact in operands]

        def branch(closed):
            inner, consts = opened(closed)
            return lambda *values: self._run(inner, consts, values, facts, settle=True)[0]

        branches = [branch(closed) for closed in eqn.params["branches"]]
        out = jax.lax.switch(index, branches, *(value for value, _ in operands))
        return out, _all_alike([(index, fact_index), *operands], len(out))

    def _while(self, frame: Frame, eqn: Equation, inputs: list) -> tuple:
        """A loop of unknown length. It has no derivative in reverse mode, so it adds
        nothing to the gradient of an array, and the visitor need not be told of it."""
        return self._not_followed(frame, eqn, tell=False)

    def _scan(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """A loop, which may go along the layers of stacked arrays. Within it, an array is
        one layer of the stack, and the visitor has the slices that belong to it."""
        if not any(fact.terms for _, fact in inputs):
            return None
        inputs = _settled(frame, eqn)
        m, n = scan_counts(eqn)
        consts, carry, xs = inputs[:m], inputs[m : m + n], inputs[m + n :]
        facts_xs = [sliced_fact(fact) for _, fact in xs]
        along = {t.parameter for fact in facts_xs if fact for t in fact.terms}
        within = {t.parameter for _, fact in consts for t in fact.terms}
        # The tag of an array cannot be both in slices and whole.
        if None in facts_xs or along & within:
            return None
        carry = [  # In later rounds, it is another value.
            (
                self.visitor.otherwise(fact.terms, value, True) if fact.terms else value,
                fact,
            )
            for value, fact in carry
        ]
        data = any(fact.data for _, fact in inputs)
        inner, constants = opened(eqn.params["jaxpr"])
        facts = [f for _, f in consts] + [Fact(data)] * n + facts_xs
        for_visitor, visitor_within = self.visitor.sliced(along)
        fixed = [value for value, _ in consts]
        same = [
            None if fact.data or fact.terms else self.visitor.same_in_rounds(value)
            for value, fact in xs
        ]

        def body(carry, slices):
            xs, for_visitor = slices
            known = [x if s is None else s for x, s in zip(xs, same, strict=True)]
            values = [*fixed, *carry, *known]
            walk = Walk(visitor_within(for_visitor))
            out, _ = walk._run(inner, constants, values, facts, settle=True)
            return out[:n], out[n:]

        carry, xs = ([value for value, _ in pairs] for pairs in (carry, xs))
        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, carry, (xs, for_visitor), **options)
        out = [*carry, *ys]
        return out, [Fact(data)] * len(out)


def _settled(frame: Frame, eqn: Equation) -> list:
    """The operands of an equation and the facts of them, none of which is pending."""
    frame.settle(eqn.invars)
    return [frame.read(atom) for atom in eqn.invars]


def _settled_value(frame: Frame, atom: Atom) -> Any:
    """The value of a variable that is not pending any more. (Settling may replace it by a
    tagged value.)"""
    frame.settle([atom])
    value, _ = frame.read(atom)
    return value


def _is_narrow(match: tuple) -> bool:
    """Whether a match is no lookup, or one of so few numbers that their second moment is
    of use as a factor."""
    use, *_ = match
    return not isinstance(use.form, Lookup) or product(use.out) <= WIDE


def _in_one_layer(match: tuple, stack: int) -> tuple:
    """A match within loops along the first `stack` axes of an array: the window that the
    form sees is one of a single layer, without these axes."""
    use, *rest = match
    weight = dataclasses.replace(use.weight, window=use.weight.window[stack:])
    return use._replace(weight=weight), *rest


def _scaled(match: tuple, scale: Any) -> tuple:
    """A match, whose input is multiplied by the number by which the array was multiplied:
    the product is the same, and is linear in the array itself."""
    use, x, *rest = match
    if scale is None:
        return match
    scale = jnp.asarray(scale)
    dtype = x.dtype
    if jnp.iscomplexobj(scale) and not jnp.iscomplexobj(x):
        dtype = (jnp.zeros((), dtype) * 1j).dtype  # The complex type of that precision.
    return use, x.astype(dtype) * scale.astype(dtype), *rest


def _all_alike(inputs: list, number: int) -> list[Fact]:
    """The fact of each of so many results, if any of them may depend on any input."""
    return [Fact(any(fact.data for _, fact in inputs))] * number


# Operations that have programs within.
_WITHIN: dict[str, Callable] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), Walk._inlined),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), Walk._checkpoint),
    "cond": Walk._cond,
    "while": Walk._while,
    "scan": Walk._scan,
}

_FOLLOWED: dict[str, Callable] = {
    "dot_general": Walk._contraction,
    "conv_general_dilated": Walk._convolution,
    "gather": Walk._lookup,
    "dynamic_slice": Walk._dynamic_slice,
    **_WITHIN,
}
