r"""The rows of a gradient.

The gradient of a dense layer is a sum of products $g_n \bar x_n^\top$ over its rows. If a
layer sees fewer rows than it has features, preconditioning them is less work than
preconditioning a matrix. The tags of these layers have slots for $\bar x_n$ and $g_n$,
which arrive there as cotangents when the gradient is pulled back."""

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
    """The rows of a batch, where preconditioning through them is less work."""

    layers: Model  # Of each layer, its `Rows`, or `None`.
    # Whether the gradients of all these layers are the products of their rows, and
    # nothing else.
    whole: Bool[Array, ""]


class RowSlots(NamedTuple):
    """Where the rows of a batch arrive: trees shaped like the model."""

    slots: Model
    uses: Model  # The shapes and types of the rows, in the use that has them.

    def rows(self, pulled: Model) -> GradientRows:
        """The rows that arrived in `pulled`, what came back from the loss: a gradient
        whose tags hold them."""

        def layer_rows(tag, layer, use):
            if use is None:
                return None
            # In the types that the layer has seen. The axes of its stack come first here,
            # but the body of a scan has not seen them all.
            x, g = tag.contents.row_slots
            x, g = x.astype(use.x.dtype), g.astype(use.g.dtype)
            stack = len(tag.form.sizes(layer).stack)
            axes = stack + use.axes - use.stack
            return tag.form.rows(x, g, None, stack, axes)

        layers = map_tags(layer_rows, pulled, self.uses)
        return GradientRows(layers, _are_whole(layers, empty_tags(pulled)))


def row_slots(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program,
) -> RowSlots | None:
    """Slots for the rows of those layers that have fewer of them than features; `None`
    if there is no such layer. A layer that is used more than once gets no slots, because
    slots would add up the rows of all uses."""
    # Every device of a `shard_map` has rows of its own.
    within_shard_map = varying_axes((args, kwargs))
    # With a regulariser, no gradient is the product of its rows; nor is it where the loss
    # takes gradients itself.
    other = within_shard_map or program.regularised or program.inner
    if other or not _any_few(model, program):
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
    """Whether any layer may have few rows. If none has, there is no need to find out how
    often each layer is used, which takes one more trace of the loss function."""
    sites = [TagSite(tag, layer) for _, tag, layer in trained_layers(model)]
    return any(
        _are_few(n, site)
        for site, numbers in zip(sites, program.rows, strict=True)
        for n in numbers
    )


def _use_with_few_rows(used: UsedSite) -> RowShapes | None:
    """The only use of a layer, if there it has fewer rows than features."""
    site, use = used.site, used.once
    # Rows of a derivative have no bias, so their product is not the whole gradient.
    if use is None or use.derivative:
        return None
    rows = math.prod(use.x.shape[use.stack : use.axes])
    return use if _are_few(rows, site) else None


def _are_few(rows: int, site: TagSite) -> bool:
    """Whether it is less work to multiply so many rows by the inverses of both factors,
    and then with each other, than to multiply the gradient by both inverses."""
    if not (isinstance(site.form, Dense) and site.block.two_sided):
        return False
    d_out, d_in = site.sizes.d_out, site.sizes.d_in + site.sizes.bias
    through_rows = rows * (d_out**2 + d_in**2 + d_out * d_in)
    return through_rows < d_out * d_in * (d_out + d_in)


def _are_whole(layers: Model, grads: Model) -> Bool[Array, ""]:
    """Whether the gradients are the products of the rows, bit for bit. They are, if
    nothing else has a gradient there, for the products are computed as the gradients
    were; a part that is not in the rows would be lost, however small it is. Otherwise
    these layers are preconditioned as matrices."""

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
