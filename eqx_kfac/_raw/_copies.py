"""Arrays that are tagged at their values, in a call that gets a whole batch.

Such an array is copied along the axis of the examples where it meets data: a scale, a
shift, a table of positions. There, each copy is tagged by itself, so that it is known
which example has which gradient. (Under `vmap`, an array is tagged once for each example
before the call, whatever becomes of it then.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._custom_types import Layer
from .._tag import Tag
from ._axes import Axes, merged
from ._facts import Term
from ._sites import Arrangement, Roles


class Other(NamedTuple):
    """An array that a tag with the form `Parameters` covers, by its name in a layer."""

    tag: Tag
    layer: Layer
    name: str

    def tagged(self, term: Term, value: Array) -> Array:
        """The `value` of a term, with all copies of the array that it consists of tagged;
        as it is if it does not consist of whole copies."""
        arrangement = _copies(term.axes)
        if term.scale is not None or arrangement is None:
            return value
        bind = self._copy
        for _ in arrangement.seen[1:]:
            bind = jax.vmap(bind)
        return arrangement.undo(bind(arrangement(value)), value.shape)

    def _copy(self, entries: Array) -> Array:
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


def _copies(axes: Axes) -> Arrangement | None:
    """How a value with these axes is arranged as `[*copies, entries]`; `None` if it does
    not have all entries of the array."""
    if axes.flips or not axes.is_whole:
        return None
    places = [i if axis is None else axis for i, axis in enumerate(axes.axes)]
    entries = merged(axes.factors)
    arrangement, _ = Roles((), entries, ()).arranged(places, axes.shape, entries)
    return arrangement
