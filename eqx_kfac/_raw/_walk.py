"""A program, evaluated equation by equation: where an array of parameters, on whatever
way it has come there, multiplies data, somebody is told, and may put a tag there.

No pattern of several equations is looked for. Of every value it is known whether it
depends on data, and whether it is such an array in other clothes: transposed, reshaped,
sliced, cast, multiplied by a number, or added to something. What becomes of it otherwise
is told as well.
"""

import abc
import collections
import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array, PyTree

from .._program import opened, scan_counts
from ..form import Dense, Einsum, Lookup
from ._axes import Axes, Factor
from ._sites import contraction, convolution, lookup, row, Site


# An array of which a row is chosen by an index has no rows wider than this: those of a
# whole matrix would have a second moment with the square of its entries.
WIDE = 8192

# Forms that know what to do with a real and an imaginary part.
_IN_COMPLEX_NUMBERS = (Dense, Einsum)


class Term(NamedTuple):
    """An array of parameters, as one summand of a value."""

    parameter: int
    axes: Axes
    stack: int = 0  # How many of its leading axes loops go along.
    scale: Any = None  # A number by which it is multiplied.


class Pending(NamedTuple):
    """Results of forms that nobody has seen yet: a bias may still be added."""

    sites: tuple[Site, ...]
    axes: Axes  # In terms of the axes that the results are first reshaped to.


class Fact(NamedTuple):
    """What is known of a value."""

    data: bool = False  # It depends on data.
    terms: tuple[Term, ...] = ()
    pending: Pending | None = None
    uniform: Any = None  # All its entries are this number.


class AbstractVisitor(abc.ABC):
    """Is told what happens to arrays of parameters."""

    @abc.abstractmethod
    def site(self, site: Site, z: Array, bias: Term | None, order: Any) -> Array:
        """An array multiplies data: `z`, arranged for the form, with its bias added if
        there is one (whose entries are in this `order`). Returns `z`, tagged perhaps."""

    @abc.abstractmethod
    def accepts(self, site: Site, bias: Term) -> bool:
        """Whether the array's block has this bias."""

    @abc.abstractmethod
    def otherwise(self, term: Term) -> None:
        """An array is used in another way."""

    @abc.abstractmethod
    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        """What a loop along these arrays has to slice beside them; and a function of the
        slices that returns the visitor within the loop."""


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
        frame = _Frame(self.visitor, jaxpr)
        constant = [Fact() for _ in consts]
        names = [*jaxpr.constvars, *jaxpr.invars]
        frame.write(names, [*consts, *values], [*constant, *facts])
        for eqn in jaxpr.eqns:
            inputs = [frame.read(atom) for atom in eqn.invars]
            special = _SPECIAL.get(eqn.primitive.name)
            found = None if special is None else special(self, frame, eqn, inputs)
            frame.write(eqn.outvars, *(found or self._anything(frame, eqn)))
        frame.settle([a for a in jaxpr.outvars if settle or not frame.alone(a)])
        out = [frame.read(atom) for atom in jaxpr.outvars]
        return [value for value, _ in out], [fact for _, fact in out]

    def _anything(self, frame: "_Frame", eqn: JaxprEqn, told: bool = True) -> tuple:
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
    # The array in other clothes
    #

    def _moved(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        """An operation that moves entries of its first operand."""
        (value, fact), *_ = inputs
        move = ft.partial(_MOVES[eqn.primitive.name], eqn)
        out = lambda fact: (evaluated(eqn, [value]), [fact])
        if fact.terms:
            axes = [move(term.axes) for term in fact.terms]
            if None in axes:
                return None
            pairs = zip(fact.terms, axes, strict=True)
            moved = [t._replace(axes=a) for t, a in pairs]
            return out(fact._replace(terms=tuple(moved), uniform=None))
        if fact.pending is not None and frame.alone(eqn.invars[0]):
            axes = move(fact.pending.axes)
            if axes is None or not axes.is_whole or axes.copied:
                return None
            return out(fact._replace(pending=fact.pending._replace(axes=axes)))
        uniform = _number(value, fact)
        if uniform is not None and fact.pending is None:
            return out(fact._replace(uniform=uniform))
        return None

    def _cast(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        new = eqn.outvars[0].aval.dtype  # pyright: ignore
        if not jnp.issubdtype(new, jnp.inexact):
            return None
        ((value, fact),) = inputs
        if jnp.issubdtype(new, jnp.complexfloating) and fact.pending is not None:
            return None
        keep = fact.terms or fact.uniform is not None
        if fact.pending is not None:
            keep = frame.alone(eqn.invars[0])
        (out,) = evaluated(eqn, [value])
        uniform = None if fact.uniform is None else jnp.asarray(fact.uniform).astype(new)
        return ([out], [fact._replace(uniform=uniform)]) if keep else None

    def _split(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
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

    def _scaled(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        """A product with, or a quotient by, a number; or a change of sign."""
        name = eqn.primitive.name
        side = 0 if inputs[0][1].terms else 1
        if len(inputs) <= side or not inputs[side][1].terms:
            return None
        fact = inputs[side][1]
        frame.settle(eqn.invars)  # What it is multiplied by may be a result.
        inputs = [frame.read(atom) for atom in eqn.invars]
        values = [value for value, _ in inputs]
        if name == "neg":
            number = -1.0
        else:
            if name == "div" and side == 1:
                return None
            number = _number(*inputs[1 - side])
            if number is None or inputs[1 - side][1].terms:
                return None
            number = 1 / number if name == "div" else number
        scale = lambda t: number if t.scale is None else t.scale * number
        terms = tuple(t._replace(scale=scale(t)) for t in fact.terms)
        data = any(f.data for _, f in inputs)
        return evaluated(eqn, values), [Fact(data, terms)]

    def _sum(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        """A sum (or a difference): of arrays, or of a result and its bias."""
        joined = self._joined(frame, eqn, inputs)
        if joined is not None:
            return joined
        (a, fact_a), (b, fact_b) = inputs
        there = fact_a.terms or fact_b.terms
        if not there or fact_a.data or fact_b.data or np.shape(a) != np.shape(b):
            return None
        minus = eqn.primitive.name == "sub"
        negative = lambda t: t._replace(scale=-1.0 if t.scale is None else -t.scale)
        terms = fact_b.terms
        terms = tuple(map(negative, terms)) if minus else terms
        return evaluated(eqn, [a, b]), [Fact(False, _added((*fact_a.terms, *terms)))]

    def _joined(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        """A bias joins the array whose product with data it is added to."""
        if eqn.primitive.name == "sub":
            return None
        for i in (0, 1):
            (_, fact), (_, other) = inputs[i], inputs[1 - i]
            if fact.pending is None or len(other.terms) != 1 or other.data:
                continue
            (bias,) = other.terms
            site, *rest = fact.pending.sites
            order = _bias_order(fact.pending, bias)
            if order is None or not frame.alone(eqn.invars[i]):
                continue
            if rest or not self.visitor.accepts(site, bias):
                continue
            (z,) = evaluated(eqn, [value for value, _ in inputs])
            return [frame.tagged(z, fact.pending, bias, order)], [Fact(True)]
        return None

    def _complex(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        (a, fact_a), (b, fact_b) = inputs
        if not (fact_a.terms or fact_b.terms) or fact_a.data or fact_b.data:
            return None
        turned = lambda t: t._replace(scale=1j if t.scale is None else t.scale * 1j)
        terms = (*fact_a.terms, *map(turned, fact_b.terms))
        return evaluated(eqn, [a, b]), [Fact(False, terms)]

    #
    # The array meets data
    #

    def _contraction(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        sides = [i for i, (_, fact) in enumerate(inputs) if fact.terms]
        if len(sides) != 1 or not inputs[1 - sides[0]][1].data:
            return None
        (side,) = sides
        frame.settle([eqn.invars[1 - side]])
        x, _ = frame.read(eqn.invars[1 - side])
        match = lambda term: contraction(eqn, side, term.axes, x)
        return self._met(frame, eqn, inputs[side][1].terms, match)

    def _convolution(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        (_, fact_x), (_, fact) = inputs
        if fact_x.terms or not fact.terms or not fact_x.data:
            return None
        frame.settle([eqn.invars[0]])
        x, _ = frame.read(eqn.invars[0])
        return self._met(
            frame, eqn, fact.terms, lambda term: convolution(eqn, term.axes, x)
        )

    def _lookup(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        (_, fact), (index, fact_index) = inputs
        if len(fact.terms) != 1 or not fact_index.data or fact.terms[0].scale is not None:
            return None
        return self._met(
            frame, eqn, fact.terms, lambda term: lookup(eqn, term.axes, index)
        )

    def _dynamic_slice(
        self, frame: "_Frame", eqn: JaxprEqn, inputs: list
    ) -> tuple | None:
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
        self, frame: "_Frame", eqn: JaxprEqn, terms: tuple[Term, ...], match: Callable
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

    def _inlined(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
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

    def _checkpoint(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
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

    def _cond(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
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

    def _while(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple:
        """A loop of unknown length has no derivative in reverse mode: whatever is used in
        it is used for something else than training."""
        return self._anything(frame, eqn, told=False)

    def _scan(self, frame: "_Frame", eqn: JaxprEqn, inputs: list) -> tuple | None:
        if not any(fact.terms for _, fact in inputs):
            return None
        frame.settle(eqn.invars)
        inputs = [frame.read(atom) for atom in eqn.invars]
        m, n = scan_counts(eqn)
        consts, carry, xs = inputs[:m], inputs[m : m + n], inputs[m + n :]
        rows = [_sliced(fact) for _, fact in xs]
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


class _Frame:
    """The values of one jaxpr's variables, and what is known of them."""

    def __init__(self, visitor: AbstractVisitor, jaxpr: Any):
        self.visitor = visitor
        self.known = {}
        atoms = [a for eqn in jaxpr.eqns for a in eqn.invars] + list(jaxpr.outvars)
        self.counts = collections.Counter(a for a in atoms if not hasattr(a, "val"))

    def read(self, atom: Any) -> tuple[Any, Fact]:
        if hasattr(atom, "val"):
            return atom.val, Fact(uniform=atom.val if np.ndim(atom.val) == 0 else None)
        return self.known[atom]

    def write(self, names: Sequence[Any], values: Sequence, facts: Sequence) -> None:
        self.known.update(zip(names, zip(values, facts, strict=True), strict=True))

    def alone(self, atom: Any) -> bool:
        """Whether a variable is used only once."""
        return hasattr(atom, "val") or self.counts[atom] == 1

    def settle(self, atoms: Sequence[Any]) -> None:
        """Nothing will be added to these results any more."""
        for atom in atoms:
            value, fact = self.read(atom)
            if fact.pending is not None:
                tagged = self.tagged(value, fact.pending)
                self.known[atom] = tagged, Fact(True)

    def tagged(
        self, z: Array, pending: Pending, bias: Term | None = None, order: Any = None
    ) -> Array:
        """A result, with the bias that was added to it, as the visitor returns it."""
        there = _as_first(z, pending)
        for site in pending.sites:
            shape = there.shape
            seen = site.outputs(there)
            there = site.outputs.undo(self.visitor.site(site, seen, bias, order), shape)
        return _as_now(there, pending)


def _as_first(z: Array, pending: Pending) -> Array:
    """A result in the axes that it had at first."""
    factors = pending.axes.factors
    order = sorted(range(len(factors)), key=lambda i: _place(factors[i]))
    z = z.reshape([f.size for f in factors]).transpose(order)
    return z.reshape(pending.sites[0].outputs.shape)


def _as_now(z: Array, pending: Pending) -> Array:
    """The inverse."""
    factors = pending.axes.factors
    order = sorted(range(len(factors)), key=lambda i: _place(factors[i]))
    back = sorted(range(len(order)), key=order.__getitem__)
    z = z.reshape([factors[i].size for i in order]).transpose(back)
    return z.reshape(pending.axes.shape)


def _place(factor: Factor) -> tuple[int, int]:
    return factor.axis, -factor.stride


def _bias_order(pending: Pending, bias: Term) -> Any:
    """What is added along exactly those axes of a result that belong to the array: in
    which order its entries are, as `(sizes, order)`: reshaped to these sizes, its axes in
    this order are those of the arranged result. `None` if it is no bias."""
    (site, *_), axes = pending
    if bias.scale is not None or bias.axes.flips or site.stack != bias.stack:
        return None
    if len(bias.axes.shape) != len(axes.shape) or not bias.axes.is_whole:
        return None
    entries = bias.axes.factors
    if entries != sorted(entries, key=_place):
        return None
    channels = []
    for axis, own in zip(axes.axes, bias.axes.axes, strict=True):
        assert axis is not None
        belong = [f for f in axis if f.axis in site.channels]
        wanted = _product(belong) if len(belong) == len(axis) else None
        if belong and (own is None or _product(own) != wanted):
            return None
        if not belong and own:
            return None
        channels += belong
    rank = lambda i: (site.outputs.order.index(channels[i].axis), -channels[i].stride)
    order = tuple(sorted(range(len(channels)), key=rank))
    return tuple(f.size for f in channels), order


def _product(factors: Sequence[Factor]) -> int:
    return int(np.prod([f.size for f in factors], dtype=int))


def _fits(match: tuple) -> bool:
    """Whether the factors of an array that is only looked up in would not be too wide (a
    whole matrix that is chosen by an index)."""
    use, *_ = match
    return not isinstance(use.form, Lookup) or _product(use.out) <= WIDE


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


def _added(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms of a sum: one for every array and what is seen of it."""
    found: dict[Any, Term] = {}
    for term in terms:
        key = term._replace(scale=None)
        if key in found:
            scales = [1.0 if t.scale is None else t.scale for t in (found[key], term)]
            term = term._replace(scale=sum(scales))
        found[key] = term
    return tuple(found.values())


def _number(value: Any, fact: Fact) -> Any:
    """The number that all entries of a value are, if it is known to be one."""
    if np.ndim(value) == 0:
        return value
    return fact.uniform


def _sliced(fact: Fact) -> Fact | None:
    """What is known of the entries along the first axis; `None` if that axis is none of a
    stack of arrays."""
    terms = []
    for term in fact.terms:
        first, *_ = term.axes.axes
        size = term.axes.shape[0]
        stacked = (Factor(term.stack, 1, size),) if size != 1 else ()
        if first != stacked or term.axes.window[term.stack] != (0, size):
            return None
        axes = term.axes.without([0])
        if any(f.axis <= term.stack for f in axes.factors):
            return None
        window = list(axes.window)
        window[term.stack] = 0, 1  # One layer of the stack.
        axes = axes._replace(window=tuple(window))
        terms.append(term._replace(axes=axes, stack=term.stack + 1))
    return Fact(fact.data, tuple(terms))


def _all_alike(inputs: list, number: int) -> list[Fact]:
    return [Fact(any(fact.data for _, fact in inputs))] * number


def _along(shape: Sequence[int], axis: int, start: int, stop: int) -> tuple:
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = start, stop
    return starts, stops


def evaluated(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """What an equation gives."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _slice(eqn: JaxprEqn, axes: Axes) -> Axes | None:
    p = eqn.params
    if p["strides"] is not None and any(s != 1 for s in p["strides"]):
        return None
    return axes.slice(p["start_indices"], p["limit_indices"])


_MOVES: dict[str, Callable] = {
    "transpose": lambda eqn, axes: axes.transpose(eqn.params["permutation"]),
    "reshape": lambda eqn, axes: axes.reshape(eqn.params["new_sizes"]),
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
_SPECIAL: dict[str, Callable] = {
    **dict.fromkeys(_MOVES, Walk._moved),
    "convert_element_type": Walk._cast,
    "split": Walk._split,
    **dict.fromkeys(("mul", "div", "neg"), Walk._scaled),
    **dict.fromkeys(("add", "add_any", "sub"), Walk._sum),
    "complex": Walk._complex,
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
