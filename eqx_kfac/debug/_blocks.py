"""Blocks of layers as dense matrices: the approximate ones, and the exact ones, from
derivatives of the model that know nothing of tags."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float

from .._block import AbstractBlock, Statistics
from .._curvature import Batch
from .._custom_types import Args, Key, Kwargs, Layer, Model
from .._devices import over_stack
from .._fisher import AbstractFisher, check_whole
from .._misc import accumulator, names
from .._program import run
from .._tag import flatten_tags, is_trainable, map_tags, Tag, update_layers, with_tags
from ._plan import compiled, Costs, costs, MEMORY, scale, Vectors, vectors


class Nothing(AbstractBlock):
    """Collects nothing: of a layer that is not looked at. It has no factors, and its
    operator is that of no numbers."""

    weighted = False
    mixes_positions = False
    derivatives = True

    def __init__(self):
        pass

    def empty(self) -> Statistics:
        return Statistics(inputs=None, outputs=None)

    def slots(self, form: Any, layer: Layer) -> Statistics:
        return self.empty()

    def statistics(self, rows: Any, slots: Statistics) -> Statistics:
        return slots

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> Any:
        return None

    def operator(self, factors: None) -> lx.IdentityLinearOperator:
        return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((0,), float))


def only(model: Model, kept: frozenset[int]) -> Model:
    """The model, of whose layers only those with these numbers collect anything."""
    found, treedef = flatten_tags(lambda *_: None, model)
    numbers = treedef.unflatten(range(len(found)))

    def replace(tag, layer, number):
        if number is None or number in kept:
            return tag
        return Tag(tag.form, Nothing(), swapped=tag.swapped)

    return with_tags(replace, model, numbers)


def is_looked_at(tag: Tag, layer: Layer) -> bool:
    """Whether `only` has left it."""
    return is_trainable(tag, layer) and not isinstance(tag.block, Nothing)


def dense_blocks(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    fisher: AbstractFisher | None,
    key: Key | None,
    layer: str,
) -> tuple[np.ndarray, np.ndarray, int | None]:
    """The approximate block of a layer and the exact one, `[stacked, size, size]`; and
    from how many samples the latter is estimated, if that had to be.

    **Arguments:**

    - `loss_fn`, `model`, `args`, `kwargs`, `fisher`, `key`: as for [`eqx_kfac.verify`][].
    - `layer`: the path of the layer.
    """
    check_whole(fisher, "A picture of a block")
    found, _ = flatten_tags(lambda tag, layer: (tag, layer), model)
    paths = [path for path, _ in found]
    if layer not in paths:
        raise ValueError(f"There is no tagged layer at {layer!r}, but at {names(paths)}.")
    number = paths.index(layer)
    size = size_of(*found[number][1])
    if 8 * size**2 > 4 * MEMORY:
        raise ValueError(
            f"The layer {layer!r} has {size} parameters, and a picture of its block "
            f"would have the square of that: {8e-9 * size**2:.3g} GB. Draw a smaller "
            "one."
        )
    model, every = only(model, frozenset([number])), costs(loss_fn, model, args, kwargs)
    chosen, fisher, key = vectors(every, fisher, key, size)

    def both(model, args, key, kwargs):
        batch = Batch(loss_fn, args, kwargs).linearise(model, program=every.program)
        (guess,) = operators(model, batch.curvature(fisher, key), _as_matrix)
        pull, losses = pulled(model, loss_fn, args, kwargs)
        along = lambda i: pull(chosen.cotangents(losses, i, key))
        (exact,) = exact_blocks(along, chosen, chunk(every, chosen.number, size))
        return guess, exact

    long = every.takes_long(chosen)
    stacks = compiled(both, model, args, key, kwargs, optimise=long)()
    guess, exact = (np.asarray(a, float).reshape(-1, size, size) for a in stacks)
    return guess, exact, chosen.number if chosen.sampled else None


def _as_matrix(operator: Any) -> Array:
    return operator.as_matrix()


def size_of(tag: Tag, layer: Layer) -> int:
    """How many rows its block has."""
    sizes = tag.form.sizes(layer)
    return sizes.d_out * (sizes.d_in + sizes.bias)


def operators(model: Model, factors: Model, fn: Callable) -> list[Any]:
    """`fn(operator)` for every layer that is looked at: of its block."""

    def of_layer(tag, layer, factors):
        if factors is None:
            return None
        apply = lambda factors: fn(tag.operator(factors))
        return over_stack(apply, factors.l2.ndim)(factors)

    found, _ = flatten_tags(of_layer, model, factors)
    return [own for _, own in found if own is not None]


def pulled(
    model: Model, loss_fn: Callable, args: Args, kwargs: Kwargs
) -> tuple[Callable, list]:
    r"""A function of cotangents of the losses' outputs that pulls them back to the layers
    that are looked at, as matrices `[*stack, d_out, d_in]`: scaled, so that the outer
    products of what comes back from a root of the Fisher at the outputs add up to the
    exact block. And the losses."""

    def canonical(tag, layer):
        return tag.to_matrix(layer) if is_looked_at(tag, layer) else None

    def replace(tag, layer, new, matrix):
        return new if matrix is None else tag.from_matrix(matrix, new)

    def outputs(matrices):
        changed = update_layers(replace, model, matrices)
        objective, _ = run(loss_fn, changed, args, kwargs)
        return [loss.outputs for loss in objective.losses], objective

    matrices = map_tags(canonical, model)
    _, pullback, objective = eqx.filter_vjp(outputs, matrices, has_aux=True)
    terms = objective.weighted_losses
    scales = [scale(*term) for term in terms]

    def pull(cotangents):
        pairs = zip(cotangents, scales, strict=True)
        scaled = [jtu.tree_map(lambda a: a * s.astype(a.dtype), c) for c, s in pairs]
        matrices = jtu.tree_leaves(pullback(scaled)[0])
        return [m.astype(accumulator(m.dtype)) for m in matrices]

    return pull, [loss for _, loss in terms]


def exact_blocks(
    along: Callable, vectors: Vectors, at_once: int
) -> list[Float[Array, "*stack size size"]]:
    """The exact blocks, added up over all vectors `along(index)`, so many at once."""
    steps = math.ceil(vectors.number / at_once)

    def flat(i):
        rows = [m.reshape(*m.shape[:-2], -1) for m in along(i)]
        there = i < vectors.number  # The last step may have fewer.
        return [jnp.where(there, row, 0) for row in rows]

    def add(step, totals):
        rows = jax.vmap(flat)(step * at_once + jnp.arange(at_once))
        highest = jax.lax.Precision.HIGHEST
        products = [
            jnp.einsum("n...i,n...j->...ij", r, r, precision=highest) for r in rows
        ]
        return [t + p for t, p in zip(totals, products, strict=True)]

    like = jax.eval_shape(flat, 0)
    zeros = [jnp.zeros((*s.shape, s.shape[-1]), s.dtype) for s in like]
    totals = jax.lax.fori_loop(0, steps, add, zeros)
    return [t / vectors.number if vectors.sampled else t for t in totals]


def chunk(costs: Costs, number: int, numbers: int, memory: float = MEMORY) -> int:
    """How many vectors to pull back at once, each with so many `numbers`, in a tenth of
    the memory."""
    each = costs.itemsize * (numbers + costs.work.numbers)
    return int(np.clip(0.1 * memory // each, 1, min(number, 256)))
