"""The rows of a gradient, of those layers where they are less work than features."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool

from .._custom_types import Args, Kwargs, Model
from .._devices import explicit_sharding, varying_axes
from .._module import PlainModule
from .._program import Program
from .._tag import empty_tags, map_tags, RowShapes, trained_layers
from ..form import Dense
from ._sites import TagSite, used_sites, UsedSite


class GradientRows(PlainModule):
    """The `Rows` of those layers where preconditioning through them is less work (`None`
    for others), and whether the gradient of these layers is their product."""

    layers: Model
    whole: Bool[Array, ""]


class RowSlots(NamedTuple):
    """Where the rows of a batch are to arrive, and what is known of them: trees shaped
    like the model."""

    slots: Model
    uses: Model

    def rows(self, pulled: Model) -> GradientRows:
        """What arrived, with the gradient `pulled`."""

        def layer_rows(tag, layer, use):
            if use is None:
                return None
            # In the types that the layer has seen. (A scan's body sees no stack.)
            x, g = tag.contents.row_slots
            x, g = x.astype(use.x.dtype), g.astype(use.g.dtype)
            stack = len(tag.form.sizes(layer).stack)
            return tag.form.rows(x, g, None, stack, stack + use.axes - use.stack)

        layers = map_tags(layer_rows, pulled, self.uses)
        return GradientRows(layers, _are_whole(layers, empty_tags(pulled)))


def row_slots(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program,
) -> RowSlots | None:
    """Slots for the rows of those layers where they are less work than features; `None`
    if there is no such layer. (A layer that is used more than once has no rows: its slots
    would add them up.)"""
    within_shard_map = varying_axes((args, kwargs))  # Every device has rows of its own.
    if within_shard_map or program.regularised or not _any_few(model, program):
        return None
    found, treedef = used_sites(loss_fn, model, args, kwargs, program)
    uses = list(map(_use_with_few_rows, found))
    if not any(uses):
        return None
    slots = [
        None if use is None else used.site.slots(use)
        for used, use in zip(found, uses, strict=True)
    ]
    return RowSlots(treedef.unflatten(slots), treedef.unflatten(uses))


def _any_few(model: Model, program: Program) -> bool:
    """Whether any layer may have such rows: else, it is not looked at how often each of
    them is used, which takes one more trace."""
    sites = [TagSite(tag, layer) for _, tag, layer in trained_layers(model)]
    return any(
        _are_few(n, site)
        for site, numbers in zip(sites, program.rows, strict=True)
        for n in numbers
    )


def _use_with_few_rows(used: UsedSite) -> RowShapes | None:
    """The use of a layer that is made for this, if rows are less work."""
    site, use = used.site, used.once
    if use is None or use.derivative:
        return None
    rows = math.prod(use.x.shape[use.stack : use.axes])
    return use if _are_few(rows, site) else None


def _are_few(rows: int, site: TagSite) -> bool:
    """Whether so many rows are less work than the features of a layer."""
    if not (isinstance(site.form, Dense) and site.block.two_sided):
        return False
    d_out, d_in = site.sizes.d_out, site.sizes.d_in + site.sizes.bias
    through_rows = rows * (d_out**2 + d_in**2 + d_out * d_in)
    return through_rows < d_out * d_in * (d_out + d_in)


def _are_whole(layers: Model, grads: Model) -> Bool[Array, ""]:
    """Whether the gradient is the rows' product: the same numbers, not nearly so."""

    def same(tag, layer, rows):
        if rows is None:
            return None
        parameters = tag.form.parameters(layer)
        weight, _ = parameters
        sharding = None if weight is None else explicit_sharding(jax.typeof(weight))
        x = rows.x.vectors()
        products = tag.form.gradient(x, rows.g, rows.stack, sharding)
        return [
            jnp.all(p == product.reshape(p.shape).astype(p.dtype))
            for p, product in zip(parameters, products, strict=True)
            if p is not None
        ]

    return jnp.all(jnp.stack(jtu.tree_leaves(map_tags(same, grads, layers))))
