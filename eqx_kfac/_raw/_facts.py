"""What is known of the values of a program while it is evaluated: which of them depend on
data, and which are arrays of parameters in other clothes."""

import abc
import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from .._jax import Atom, Equation, Jaxpr, Literal
from ..form import Mask
from ._axes import Axes, Factor
from ._sites import Site


# In which order the entries of a bias are: the sizes to which it is reshaped, and which
# axis of these comes first, second, ... then.
Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Term(NamedTuple):
    """An array of parameters, as one summand of a value."""

    parameter: int
    axes: Axes
    stack: int = 0  # How many of its leading axes loops go along.
    scale: ArrayLike | None = None  # A number by which it is multiplied.
    mask: Mask | None = None  # Which entries are not zero, along its own axes.


class Pending(NamedTuple):
    """Results of forms that nobody has seen yet: a bias may still be added."""

    sites: tuple[Site, ...]
    axes: Axes  # In terms of the axes that the results are first reshaped to.

    @property
    def constant(self) -> bool:
        """Whether the results are the same for all data."""
        return all(site.constant for site in self.sites)


class Fact(NamedTuple):
    """What is known of a value."""

    data: bool = False  # It depends on data.
    terms: tuple[Term, ...] = ()
    pending: Pending | None = None
    uniform: ArrayLike | None = None  # All its entries are this number.


class AbstractVisitor(abc.ABC):
    """Is told what happens to arrays of parameters."""

    @abc.abstractmethod
    def site(self, site: Site, z: Array, bias: Term | None, order: Order | None) -> Array:
        """An array multiplies data: `z`, arranged for the form, with its bias added if
        there is one (whose entries are in this `order`). Returns `z`, tagged perhaps."""

    @abc.abstractmethod
    def accepts(self, site: Site, bias: Term) -> bool:
        """Whether the array's block has this bias."""

    def covered(self, site: Site, array: Array) -> Array:
        """What an operation gets that multiplies data by an array, which `site` follows.
        By default, the array."""
        return array

    @abc.abstractmethod
    def otherwise(self, terms: Sequence[Term], value: Any, matters: bool) -> Any:
        """Arrays are used in another way: the `value` that is the sum of these `terms`;
        `matters`: whether the result has derivatives. Returns the value, maybe tagged."""

    @abc.abstractmethod
    def masked(
        self, term: Term, mask: Any, kept: int, elsewhere: Sequence[Any]
    ) -> Term | None:
        """An array is multiplied by `mask`, or kept where that is `kept` and otherwise
        replaced by what is `elsewhere`; these do not depend on data. Returns what the
        term is then; `None` if `mask` is none of zeros and ones."""

    def evaluated(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an operation that depend on no data."""
        return evaluated(eqn, values)

    def same_in_rounds(self, values: Any) -> Any:
        """What a loop gets of `values` in each round, if that is the same in all and is
        to be known; by default, `None`."""
        return None

    def computed(self, eqn: Equation, inputs: Sequence[tuple[Any, Fact]]) -> Fact | None:
        """An operation on arrays and constants alone. Returns what is to be known of its
        result; by default, `None`: then it is an operation like any other."""
        return None

    def returned(self, terms: Sequence[Term], value: Any) -> Any:
        """The `value` that is the sum of `terms` is a result of the program. Returns it,
        tagged perhaps."""
        return value

    @abc.abstractmethod
    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        """What a loop along these arrays has to slice beside them; and a function of the
        slices that returns the visitor within the loop."""


class Frame:
    """The values of one jaxpr's variables, and what is known of them."""

    def __init__(self, visitor: AbstractVisitor, jaxpr: Jaxpr):
        self.visitor = visitor
        self.known = {}
        atoms = [a for eqn in jaxpr.eqns for a in eqn.invars] + list(jaxpr.outvars)
        self.counts = collections.Counter(a for a in atoms if not isinstance(a, Literal))

    def read(self, atom: Atom) -> tuple[Any, Fact]:
        if isinstance(atom, Literal):
            return atom.val, Fact(uniform=atom.val if np.ndim(atom.val) == 0 else None)
        return self.known[atom]

    def write(self, names: Sequence[Atom], values: Sequence, facts: Sequence) -> None:
        self.known.update(zip(names, zip(values, facts, strict=True), strict=True))

    def used_once(self, atom: Atom) -> bool:
        """Whether a variable is used only once."""
        return isinstance(atom, Literal) or self.counts[atom] == 1

    def settle(self, atoms: Sequence[Atom]) -> None:
        """Nothing will be added to these results any more."""
        for atom in atoms:
            value, fact = self.read(atom)
            if fact.pending is not None:
                tagged = self.tagged(value, fact.pending)
                self.known[atom] = tagged, Fact(not fact.pending.constant)

    def tagged(
        self,
        z: Array,
        pending: Pending,
        bias: Term | None = None,
        order: Order | None = None,
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
    order = sorted(range(len(factors)), key=lambda i: place(factors[i]))
    z = z.reshape([f.size for f in factors]).transpose(order)
    return z.reshape(pending.sites[0].outputs.shape)


def _as_now(z: Array, pending: Pending) -> Array:
    """The inverse."""
    factors = pending.axes.factors
    order = sorted(range(len(factors)), key=lambda i: place(factors[i]))
    back = sorted(range(len(order)), key=order.__getitem__)
    z = z.reshape([factors[i].size for i in order]).transpose(back)
    return z.reshape(pending.axes.shape)


def place(factor: Factor) -> tuple[int, int]:
    """Where a factor is in its array: a key to sort by."""
    return factor.axis, -factor.stride


def bias_order(pending: Pending, bias: Term) -> Order | None:
    """What is added along exactly those axes of a result that belong to the array: in
    which order its entries are, as `(sizes, order)`: reshaped to these sizes, its axes in
    this order are those of the arranged result. `None` if it is no bias."""
    (site, *_), axes = pending
    if bias.scale is not None or bias.axes.flips or site.stack != bias.stack:
        return None
    if bias.mask is not None:
        return None
    if len(bias.axes.shape) != len(axes.shape) or not bias.axes.is_whole:
        return None
    entries = bias.axes.factors
    if entries != sorted(entries, key=place):
        return None
    channels = []
    for axis, own in zip(axes.axes, bias.axes.axes, strict=True):
        assert axis is not None
        belong = [f for f in axis if f.axis in site.channels]
        wanted = product(belong) if len(belong) == len(axis) else None
        if belong and (own is None or product(own) != wanted):
            return None
        if not belong and own:
            return None
        channels += belong
    rank = lambda i: (site.outputs.order.index(channels[i].axis), -channels[i].stride)
    order = tuple(sorted(range(len(channels)), key=rank))
    return tuple(f.size for f in channels), order


def evaluated(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """What an equation gives."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def product(factors: Sequence[Factor]) -> int:
    return int(np.prod([f.size for f in factors], dtype=int))


def added(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms of a sum: one for every array and what is seen of it."""
    found: dict[Term, Term] = {}
    for term in terms:
        key = term._replace(scale=None)
        if key in found:
            scales = [1.0 if t.scale is None else t.scale for t in (found[key], term)]
            term = term._replace(scale=sum(scales))
        found[key] = term
    return tuple(found.values())


def sliced_fact(fact: Fact) -> Fact | None:
    """What is known of the entries along the first axis; `None` if that axis is none of a
    stack of arrays."""
    terms = []
    for term in fact.terms:
        first, *_ = term.axes.axes
        size = term.axes.shape[0]
        stacked = (Factor(term.stack, 1, size),) if size != 1 else ()
        # All layers of the stack, in their order.
        is_whole = term.axes.lengths[term.stack] == size
        if first != stacked or not is_whole or term.stack in term.axes.flips:
            return None
        if term.mask is not None and not term.mask.is_repeated:
            return None  # Each layer has a mask of its own.
        axes = term.axes.without([0])
        if any(f.axis <= term.stack for f in axes.factors):
            return None
        window = list(axes.window)
        window[term.stack] = 0, 1  # One layer of the stack.
        axes = axes._replace(window=tuple(window))
        mask = None if term.mask is None else Mask(term.mask.entries[0])
        terms.append(term._replace(axes=axes, stack=term.stack + 1, mask=mask))
    return Fact(fact.data, tuple(terms))
