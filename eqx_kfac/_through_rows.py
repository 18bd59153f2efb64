r"""Preconditioning through the rows: of $\nabla = \sum g \bar x^\top$, it is

$$G^{-1} \nabla A^{-1} = \sum (G^{-1} g) (A^{-1} \bar x)^\top,$$

which is less work where there are fewer rows than features. Not every gradient is such a
sum: a penalty on the weights adds to it, a mask takes away from it. So the sum is
computed too (mostly, XLA finds it is the gradient's own product), and compared."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool

from ._custom_types import Model
from ._devices import explicit_sharding, gathered, over_stack, varying_axes
from ._factorise import damping_of, for_each
from ._form import Dense, join
from ._places import Used, used_places
from ._precondition import precondition, solutions, solvable, with_matrices
from ._program import Program
from ._rows import Use
from ._solver import AbstractDampedSolver
from ._tagged import empty_tags, map_tags


class GradientRows(eqx.Module):
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
            x, g = tag.held.raw
            x, g = x.astype(use.x.dtype), g.astype(use.g.dtype)
            stack = len(tag.form.sizes(layer).stack)
            return tag.form.rows(x, g, None, stack, stack + use.axes - use.stack)

        layers = map_tags(layer_rows, pulled, self.uses)
        return GradientRows(layers, _are_whole(layers, empty_tags(pulled)))


def row_slots(
    loss_fn: Callable,
    model: Model,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    program: Program | None = None,
) -> RowSlots | None:
    """Slots for the rows of those layers where they are less work than features; `None`
    if there is no such layer. (A layer that is used more than once has no rows: its slots
    would add them up.)"""
    if varying_axes((args, kwargs)):
        raise ValueError(
            "`through_rows=True` needs the rows of the whole batch, but within a "
            "`shard_map` every device has its own. Leave it out, or call `KFAC.step` "
            "outside of the `shard_map`, on sharded arrays."
        )
    found, treedef = used_places(loss_fn, model, args, kwargs, program)
    uses = list(map(_use_with_few_rows, found))
    if not any(uses):
        return None
    slots = [
        None if use is None else used.place.slots(use)
        for used, use in zip(found, uses, strict=True)
    ]
    return RowSlots(treedef.unflatten(slots), treedef.unflatten(uses))


def precondition_through_rows(
    grads: Model,
    rows: GradientRows,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: Any,
) -> Model:
    """As `precondition`, through the rows where there are any and they are whole."""

    def layer_solution(tag, layer, rows, factors, state, damping):
        if rows is None:
            return None

        def solve(x, g, factors, state, damping):
            _, state, options = solvable(tag, factors, state, solver, damping)
            x, g = (a.reshape(-1, a.shape[-1]).astype(factors.l2.dtype) for a in (x, g))
            weight, bias = tag.form.parameters(layer)
            ones = None if bias is None else jnp.ones_like(x[:, :1])
            x = join(None if weight is None else x, ones)
            return solver.compute_outer(state, g, x, options)

        x, g = (gathered(a, rows.stack) for a in (rows.x.vectors(), rows.g))
        damping = damping_of(factors, damping)
        return over_stack(solve, rows.stack)(x, g, factors, state, damping)

    def only(wanted):
        def layer_factors(_, __, factors, rows):
            return factors if wanted == (rows is not None) else None

        return map_tags(layer_factors, grads, curvature, rows.layers)

    each = rows.layers, curvature, inverse, for_each(damping, grads, curvature)
    matrices = jax.lax.cond(
        rows.whole,
        lambda: map_tags(layer_solution, grads, *each),
        lambda: solutions(grads, only(True), inverse, solver, damping),
    )
    natural = precondition(grads, only(False), inverse, solver, damping)
    return with_matrices(natural, matrices)


def _use_with_few_rows(used: Used) -> Use | None:
    """The use of a layer that is made for this, if rows are less work."""
    place, use = used.place, used.once
    if use is None or not (isinstance(place.form, Dense) and place.block.two_sided):
        return None
    rows = math.prod(use.x.shape[use.stack : use.axes])
    d_out, d_in = place.sizes.d_out, place.sizes.d_in + place.sizes.bias
    through_rows = rows * (d_out**2 + d_in**2 + d_out * d_in)
    return use if through_rows < d_out * d_in * (d_out + d_in) else None


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
