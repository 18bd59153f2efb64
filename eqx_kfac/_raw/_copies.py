"""Arrays that are tagged at their values, in a call that gets a whole batch.

Such an array is copied along the axis of the examples where it meets data: a scale, a
shift, a table of positions. There, each copy is tagged by itself, so that it is known
which example has which gradient. What is computed of arrays before (a softplus of a
scale) is computed anew for each copy, of copies that are tagged.

(Under `vmap`, an array is tagged once for each example before the call, whatever becomes
of it then.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._custom_types import Layer
from .._jax import Equation
from .._tag import Tag
from ._axes import merged
from ._facts import evaluated, Fact, Term
from ._sites import Arrangement, Roles


class Other(NamedTuple):
    """An array that a tag with the form `Parameters` covers, by its name in a layer."""

    tag: Tag
    layer: Layer
    name: str

    def copy(self, entries: Array) -> Array:
        """The entries of one copy, tagged. Of all other arrays that the tag covers, this
        copy has nothing: their gradients are zero."""
        form: Any = self.tag.form
        place = form.names.index(self.name)
        own = [
            None if p is None else jnp.zeros(p.shape[p.ndim - rank :], p.dtype)
            for p, rank in zip(form.parameters(self.layer), form.ranks, strict=True)
        ]
        own[place] = entries.reshape(own[place].shape)
        layer = form.replace(self.layer, tuple(own))
        layer = self.tag.parameters(layer, entries)
        return form.parameters(layer)[place].reshape(entries.shape)


class Computed(NamedTuple):
    """What an operation makes of arrays like that, and of constants."""

    eqn: Equation
    operands: tuple[Any, ...]
    # What each operand consists of, and how its entries are arranged; `None`: a constant.
    sources: tuple["tuple[Copied, Arrangement] | None", ...]

    @classmethod
    def of(
        cls,
        eqn: Equation,
        inputs: Sequence[tuple[Any, Fact]],
        others: "dict[int, Copied]",
    ) -> "Computed | None":
        """The result of an operation on these values, none of which depends on data;
        `None` if one of them is more than a single array, or an unknown one."""
        sources = []
        for _, fact in inputs:
            if not fact.terms:
                sources.append(None)
                continue
            term, *rest = fact.terms
            arrangement = _arrangement(term)
            other = others.get(term.parameter)
            if rest or other is None or arrangement is None or term.stack:
                return None
            if len(arrangement.seen) > 1:  # There are several copies already.
                return None
            sources.append((other, arrangement))
        if len(eqn.outvars) > 1:
            return None
        return cls(eqn, tuple(value for value, _ in inputs), tuple(sources))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.eqn.outvars[0].aval.shape  # pyright: ignore

    def copy(self, entries: Array) -> Array:
        """The entries of one copy of the result, computed of copies that are tagged.
        (These are the same for all copies of the result: their tags know the number of
        examples.)"""

        def copied(value, source):
            if source is None:
                return value
            other, arrangement = source
            return arrangement.undo(other.copy(arrangement(value)), value.shape)

        values = map(copied, self.operands, self.sources)
        (out,) = evaluated(self.eqn, list(values))
        return out.reshape(entries.shape)


Copied: TypeAlias = Other | Computed


def tagged_copies(other: Copied, term: Term, value: Array) -> Array:
    """The `value` of a term, with all copies that it consists of tagged; as it is if it
    does not consist of whole copies."""
    arrangement = _arrangement(term)
    if arrangement is None:
        return value
    bind = other.copy
    for _ in arrangement.seen[1:]:
        bind = jax.vmap(bind)
    return arrangement.undo(bind(arrangement(value)), value.shape)


def _arrangement(term: Term) -> Arrangement | None:
    """How the value of a term is arranged as `[*copies, entries]`; `None` if it does not
    have all entries of the array as they are."""
    axes = term.axes
    if axes.flips or not axes.is_whole or term.scale is not None:
        return None
    places = [i if axis is None else axis for i, axis in enumerate(axes.axes)]
    entries = merged(axes.factors)
    arrangement, _ = Roles((), entries, ()).arranged(places, axes.shape, entries)
    return arrangement
