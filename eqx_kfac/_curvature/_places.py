"""The tags of a model as places where rows pass, and how often they do."""

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
from .._program import Program, Uses, uses
from .._tag import fill_raw, flatten_tags, Raw, Tag, Use
from ..form import Parameters
from ._linearise import Linearisation, linearise


class Place:
    """A tag of a model."""

    def __init__(self, tag: Tag, layer: Layer):
        self.form = tag.form
        self.block = tag.block
        self.sizes = tag.form.sizes(layer)
        self.stack = self.sizes.stack[: len(self.sizes.stack) - tag.form.groups]
        self.leaf = tag.form.some_parameter(layer)

    def counter(self) -> Statistics:
        """The slot for uses."""
        return Statistics(inputs=self._zeros((), self.leaf.dtype), outputs=None)

    def slots(self, use: Use | None) -> Statistics:
        """The slots for rows."""
        if use is None:
            return Raw().empty()
        inputs = None if isinstance(self.form, Parameters) else use.x
        return jtu.tree_map(
            lambda rows: self._zeros_like(rows, use.stack), Statistics(inputs, use.g)
        )

    def _zeros_like(self, rows: jax.ShapeDtypeStruct, stack: int) -> Array:
        zeros = self._zeros(rows.shape[stack:], rows.dtype)
        return split_as(zeros, len(self.stack), rows, stack)

    def _zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        shape = (*self.stack, *shape)
        return zeros_beside(self.leaf, shape, accumulator(dtype), len(self.stack))


class Used(NamedTuple):
    """A place, and what passes there."""

    path: str
    place: Place
    uses: Uses

    @property
    def once(self) -> Use | None:
        """The use of it, if there is exactly one."""
        number, kinds, devices = self.uses
        alone = number is not None and np.all(number == 1) and len(kinds) == 1
        return next(iter(kinds)) if alone and not devices else None


def used_places(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program | None = None,
) -> tuple[list[Used], Any]:
    """All places of a model, and the structure of a model-shaped tree that has one leaf
    for each. `program` is what is known of the loss function already."""
    found, treedef = flatten_tags(Place, model)

    def counted(model, args, kwargs):
        slots = treedef.unflatten([place.counter() for _, place in found])
        fill = lambda model, weights=None: fill_raw(model, slots)
        lin = linearise(loss_fn, model, args, kwargs, fill=fill, program=program)
        return _counted(lin)

    numbers = uses(counted, model, args, kwargs)
    return [Used(*at, of_it) for at, of_it in zip(found, numbers, strict=True)], treedef


def raw_rows(model: Model) -> list[Statistics]:
    """The contents of all slots for rows, in the order of the places."""
    return [raw for _, raw in flatten_tags(lambda tag, _: tag.held.raw, model)[0]]


def _counted(linearisation: Linearisation) -> list[Array]:
    """What is in the slots for uses, whatever is pulled back."""
    losses = linearisation.curved.losses
    ones = [jtu.tree_map(jnp.ones_like, loss.outputs) for loss in losses]
    return [raw.inputs for raw in raw_rows(linearisation.pull(ones))]
