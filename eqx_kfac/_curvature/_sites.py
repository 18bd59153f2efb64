"""The sites of a model where rows pass, one for every tag, and how often they do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from .._block import Statistics
from .._custom_types import Args, Kwargs, Layer, Model
from .._devices import split_as, zeros_beside
from .._misc import accumulator
from .._program import count_uses, Program, SlotUses
from .._tag import fill_rows, flatten_tags, RowCollector, RowShapes, Tag
from ..form import Parameters
from ._linearise import Linearisation, linearise


class TagSite:
    """A tag of a model, as a place for slots."""

    def __init__(self, tag: Tag, layer: Layer):
        self.form = tag.form
        self.block = tag.block
        self.sizes = tag.form.sizes(layer)
        self.stack = self.sizes.stack[: len(self.sizes.stack) - tag.form.groups]
        self.leaf = tag.form.some_parameter(layer)

    def counter(self) -> Statistics:
        """The slot for the number of uses."""
        return Statistics(inputs=self._zeros((), self.leaf.dtype), outputs=None)

    def slots(self, rows: RowShapes | None) -> Statistics:
        """The slots for rows of these shapes."""
        if rows is None:
            return RowCollector().empty()
        inputs = None if isinstance(self.form, Parameters) else rows.x
        zeros = lambda shape: self._zeros_like(shape, rows.stack)
        return jtu.tree_map(zeros, Statistics(inputs, rows.g))

    def _zeros_like(self, rows: jax.ShapeDtypeStruct, stack: int) -> Array:
        zeros = self._zeros(rows.shape[stack:], rows.dtype)
        return split_as(zeros, len(self.stack), rows, stack)

    def _zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        shape = (*self.stack, *shape)
        return zeros_beside(self.leaf, shape, accumulator(dtype), len(self.stack))


class UsedSite(NamedTuple):
    """A site, and what passes there."""

    path: str
    site: TagSite
    uses: SlotUses

    @property
    def once(self) -> RowShapes | None:
        """The rows of its use, if there is exactly one."""
        number, shapes, devices = self.uses
        alone = number is not None and np.all(number == 1) and len(shapes) == 1
        return next(iter(shapes)) if alone and not devices else None


def used_sites(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program | None = None,
) -> tuple[list[UsedSite], Any]:
    """All sites of a model, and the structure of a model-shaped tree that has one leaf
    for each. `program` is what is known of the loss function already."""
    found, treedef = flatten_tags(TagSite, model)

    def counted(model, args, kwargs):
        slots = treedef.unflatten([site.counter() for _, site in found])
        fill = lambda model, weights=None: fill_rows(model, slots)
        lin = linearise(loss_fn, model, args, kwargs, fill=fill, program=program)
        return _counted(lin)

    uses = count_uses(counted, model, args, kwargs)
    sites = [UsedSite(*at, n) for at, n in zip(found, uses, strict=True)]
    return sites, treedef


def collected_rows(model: Model) -> list[Statistics]:
    """The contents of all slots for rows, in the order of the sites."""
    slots, _ = flatten_tags(lambda tag, _: tag.contents.row_slots, model)
    return [rows for _, rows in slots]


def _counted(linearisation: Linearisation) -> list[Array]:
    """What is in the slots for the number of uses, whatever is pulled back."""
    losses = linearisation.curved.losses
    ones = [jtu.tree_map(jnp.ones_like, loss.outputs) for loss in losses]
    return [slots.inputs for slots in collected_rows(linearisation.pull(ones))]
