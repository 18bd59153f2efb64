"""A program, evaluated equation by equation: where an array of parameters, on whatever
way it has come there, multiplies data, somebody is told, and may put a tag there.

No pattern of several equations is looked for. Of every value it is known whether it
depends on data, and whether it is such an array in other clothes: transposed, reshaped,
sliced, cast, multiplied by a number, or added to something. What becomes of it otherwise
is told as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Equation
from .._program import opened, scan_counts
from ..form import Dense, Einsum, Lookup
from ._axes import Axes
from ._facts import (
    AbstractVisitor,
    Fact,
    Frame,
    Pending,
    product,
    sliced_fact,
    Term,
)
from ._moves import evaluated, MOVING
from ._sites import contraction, convolution, lookup, row, Site


# An array of which a row is chosen by an index has no rows wider than this: those of a
# whole matrix would have a second moment with the square of its entries.
WIDE = 8192

# Forms that know what to do with a real and an imaginary part.
_IN_COMPLEX_NUMBERS = (Dense, Einsum)


class Walk:
    """Evaluates jaxprs for a visitor."""

    def __init__(self, visitor: AbstractVisitor):
        self.visitor = visitor

    def results(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        values: Sequence[Any],
        facts: Sequence[Fact],
    ) -> list[Any]:
        """The values that a jaxpr returns."""
        return self._run(jaxpr, consts, values, facts, settle=True)[0]

    def _run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        values: Sequence[Any],
        facts: Sequence[Fact],
        settle: bool = False,
    ) -> tuple[list[Any], list[Fact]]:
        """The results of a jaxpr, and what is known of them; `settle`: none of them is
        still pending."""
        frame = Frame(self.visitor, jaxpr)
        constant = [Fact() for _ in consts]
        names = [*jaxpr.constvars, *jaxpr.invars]
        frame.write(names, [*consts, *values], [*constant, *facts])
        for eqn in jaxpr.eqns:
            inputs = [frame.read(atom) for atom in eqn.invars]
            found = self._special(frame, eqn, inputs)
            frame.write(eqn.outvars, *(found or self._anything(frame, eqn)))
        frame.settle([a for a in jaxpr.outvars if settle or not frame.alone(a)])
        out = [frame.read(atom) for atom in jaxpr.outvars]
        return [value for value, _ in out], [fact for _, fact in out]

    def _special(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        """The results of an operation, and what is known of them, if there is anything to
        be known."""
        name = eqn.primitive.name
        if name in MOVING:
            return MOVING[name](frame, eqn, inputs)
        return _SPECIAL[name](self, frame, eqn, inputs) if name in _SPECIAL else None

    def _anything(self, frame: Frame, eqn: Equation, told: bool = True) -> tuple:
        """An operation of which nothing special is known."""
        frame.settle(eqn.invars)
        inputs = [frame.read(atom) for atom in eqn.invars]
        if told:
            for _, fact in inputs:
                for term in fact.terms:
                    self.visitor.otherwise(term)
        out = evaluated(eqn, [value for value, _ in inputs])
        data = any(fact.data for _, fact in inputs)
        return out, [Fact(data)] * len(out)

    #
    # The array meets data
    #

    def _contraction(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        sides = [i for i, (_, fact) in enumerate(inputs) if fact.terms]
        if len(sides) != 1 or not inputs[1 - sides[0]][1].data:
            return None
        (side,) = sides
        frame.settle([eqn.invars[1 - side]])
        x, _ = frame.read(eqn.invars[1 - side])
        match = lambda term: contraction(eqn, side, term.axes, x)
        return self._met(frame, eqn, inputs[side][1].terms, match)

    def _convolution(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        (_, fact_x), (_, fact) = inputs
        if fact_x.terms or not fact.terms or not fact_x.data:
            return None
        frame.settle([eqn.invars[0]])
        x, _ = frame.read(eqn.invars[0])
        return self._met(
            frame, eqn, fact.terms, lambda term: convolution(eqn, term.axes, x)
        )

    def _lookup(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        (_, fact), (index, fact_index) = inputs
        if len(fact.terms) != 1 or not fact_index.data or fact.terms[0].scale is not None:
            return None
        return self._met(
            frame, eqn, fact.terms, lambda term: lookup(eqn, term.axes, index)
        )

    def _dynamic_slice(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        (_, fact), *indices = inputs
        if len(fact.terms) != 1:
            return None
        (term,) = fact.terms
        sizes, shape = eqn.params["slice_sizes"], term.axes.shape
        cut = [i for i, n in enumerate(sizes) if n != shape[i]]
        if len(cut) != 1 or sizes[cut[0]] != 1 or term.scale is not None:
            return None
        index, of_index = indices[cut[0]]
        if not of_index.data:
            return None
        match = lambda term: row(eqn, term.axes, cut[0], jnp.asarray(index))
        return self._met(frame, eqn, fact.terms, match)

    def _met(
        self, frame: Frame, eqn: Equation, terms: tuple[Term, ...], match: Callable
    ) -> tuple | None:
        """The result of an operation on data and the sum of `terms`."""
        matches = [match(term) for term in terms]
        if None in matches or not all(_fits(m) for m in matches):
            return None
        sites = [
            Site(t.parameter, t.stack, *_scaled(_in_one_layer(m, t.stack), t.scale))
            for t, m in zip(terms, matches, strict=True)
        ]
        frame.settle(eqn.invars)
        (y,) = evaluated(eqn, [frame.read(atom)[0] for atom in eqn.invars])
        if jnp.issubdtype(y.dtype, jnp.complexfloating) and any(
            not isinstance(site.use.form, _IN_COMPLEX_NUMBERS) for site in sites
        ):
            return None
        axes = Axes.of(sites[0].outputs.shape).reshape(y.shape)
        assert axes is not None
        return [y], [Fact(True, (), Pending(tuple(sites), axes))]

    #
    # Programs within
    #

    def _inlined(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        concerned = [fact.terms or fact.pending for _, fact in inputs]
        if not any(concerned):
            return None
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner, consts = opened(closed)
        for atom, (_, fact) in zip(eqn.invars, inputs, strict=True):
            if fact.pending is not None and not frame.alone(atom):
                frame.settle([atom])
        inputs = [frame.read(atom) for atom in eqn.invars]
        values, facts = [list(column) for column in zip(*inputs, strict=True)]
        return self._run(inner, consts, values, facts)

    def _checkpoint(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        if not any(fact.terms for _, fact in inputs):
            return None
        frame.settle(eqn.invars)
        inputs = [frame.read(atom) for atom in eqn.invars]
        inner, consts = opened(eqn.params["jaxpr"])
        facts = [fact for _, fact in inputs]

        def run(*values):
            return self._run(inner, consts, values, facts, settle=True)[0]

        names = "policy", "prevent_cse"
        options = {k: v for k, v in eqn.params.items() if k in names}
        out = jax.checkpoint(run, **options)(*(value for value, _ in inputs))
        return out, _all_alike(inputs, len(out))

    def _cond(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        if not any(fact.terms for _, fact in inputs):
            return None
        frame.settle(eqn.invars)
        (index, of_index), *operands = [frame.read(atom) for atom in eqn.invars]
        facts = [fact for _, fact in operands]

        def branch(closed):
            inner, consts = opened(closed)
            return lambda *values: self._run(inner, consts, values, facts, settle=True)[0]

        branches = [branch(closed) for closed in eqn.params["branches"]]
        out = jax.lax.switch(index, branches, *(value for value, _ in operands))
        return out, _all_alike([(index, of_index), *operands], len(out))

    def _while(self, frame: Frame, eqn: Equation, inputs: list) -> tuple:
        """A loop of unknown length has no derivative in reverse mode: whatever is used in
        it is used for something else than training."""
        return self._anything(frame, eqn, told=False)

    def _scan(self, frame: Frame, eqn: Equation, inputs: list) -> tuple | None:
        if not any(fact.terms for _, fact in inputs):
            return None
        frame.settle(eqn.invars)
        inputs = [frame.read(atom) for atom in eqn.invars]
        m, n = scan_counts(eqn)
        consts, carry, xs = inputs[:m], inputs[m : m + n], inputs[m + n :]
        rows = [sliced_fact(fact) for _, fact in xs]
        along = {t.parameter for fact in rows if fact for t in fact.terms}
        within = {t.parameter for _, fact in consts for t in fact.terms}
        if None in rows or along & within:
            return None
        for term in [term for _, fact in carry for term in fact.terms]:
            self.visitor.otherwise(term)  # What it is later, is another value.
        data = any(fact.data for _, fact in inputs)
        inner, constants = opened(eqn.params["jaxpr"])
        facts = [f for _, f in consts] + [Fact(data)] * n + rows
        beside, inside = self.visitor.sliced(along)
        fixed = [value for value, _ in consts]

        def body(carry, slices):
            xs, beside = slices
            values = [*fixed, *carry, *xs]
            walk = Walk(inside(beside))
            out, _ = walk._run(inner, constants, values, facts, settle=True)
            return out[:n], out[n:]

        carry, xs = ([value for value, _ in pairs] for pairs in (carry, xs))
        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, carry, (xs, beside), **options)
        out = [*carry, *ys]
        return out, [Fact(data)] * len(out)


def _fits(match: tuple) -> bool:
    """Whether the factors of an array that is only looked up in would not be too wide (a
    whole matrix that is chosen by an index)."""
    use, *_ = match
    return not isinstance(use.form, Lookup) or product(use.out) <= WIDE


def _in_one_layer(match: tuple, stack: int) -> tuple:
    """A match, in terms of the axes that an array has within loops along the others."""
    use, *rest = match
    weight = dataclasses.replace(use.weight, window=use.weight.window[stack:])
    return use._replace(weight=weight), *rest


def _scaled(match: tuple, scale: Any) -> tuple:
    """A match, whose input is multiplied by what the array was multiplied by."""
    use, x, *rest = match
    if scale is None:
        return match
    scale = jnp.asarray(scale)
    dtype = x.dtype
    if jnp.iscomplexobj(scale) and not jnp.iscomplexobj(x):
        dtype = (jnp.zeros((), dtype) * 1j).dtype
    return use, x.astype(dtype) * scale.astype(dtype), *rest


def _all_alike(inputs: list, number: int) -> list[Fact]:
    return [Fact(any(fact.data for _, fact in inputs))] * number


_SPECIAL: dict[str, Callable] = {
    "dot_general": Walk._contraction,
    "conv_general_dilated": Walk._convolution,
    "gather": Walk._lookup,
    "dynamic_slice": Walk._dynamic_slice,
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), Walk._inlined),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), Walk._checkpoint),
    "cond": Walk._cond,
    "while": Walk._while,
    "scan": Walk._scan,
}
