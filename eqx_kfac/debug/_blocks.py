"""Blocks of layers as dense matrices: the approximate ones, and the exact ones, from
derivatives of the model that know nothing of tags."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .._curvature import Batch
from .._custom_types import Args, Key, Kwargs, Layer, Model
from .._devices import over_stack
from .._fisher import AbstractFisher, check_whole, Empirical
from .._loss import AbstractLoss
from .._misc import names, trailing
from .._program import run
from .._tag import is_trainable, map_tags, Tag, trained_layers, update_layers


def dense_blocks(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    fisher: AbstractFisher,
    key: Key | None,
    layer: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The approximate block of a layer and the exact one, `[stacked, size, size]`.

    **Arguments:**

    - `loss_fn`, `model`, `args`, `kwargs`, `fisher`, `key`: as for [`eqx_kfac.verify`][].
    - `layer`: the path of the layer.
    """
    check_whole(fisher, "A picture of a block")
    layers = {path: (tag, layer) for path, tag, layer in trained_layers(model)}
    if layer not in layers:
        there = names(list(layers))
        raise ValueError(f"There is no tagged layer at {layer!r}, but at {there}.")
    tag, of_path = layers[layer]
    limit = size_of(tag, of_path)

    def both(model, args, key, kwargs):
        batch = Batch(loss_fn, args, kwargs).linearise(model)
        guesses = approximate_blocks(model, batch.curvature(fisher, key), limit)
        empirical = isinstance(fisher, Empirical)
        rows = exact_rows(model, loss_fn, args, kwargs, empirical, limit)
        return jtu.tree_leaves(guesses), rows

    small = [path for path, pair in layers.items() if size_of(*pair) <= limit]
    found = zip(*eqx.filter_jit(both)(model, args, key, kwargs), strict=True)
    matrix, rows = dict(zip(small, found, strict=True))[layer]
    return dense_pair(tag, of_path, matrix, rows)


def size_of(tag: Tag, layer: Layer) -> int:
    """How many rows its block has."""
    sizes = tag.form.sizes(layer)
    return sizes.d_out * (sizes.d_in + sizes.bias)


def approximate_blocks(model: Model, factors: Model, limit: int) -> Model:
    """`[*stack, size, size]` for every tag of a layer that is not too large."""

    def dense(tag, layer, factors):
        if factors is None or size_of(tag, layer) > limit:
            return None
        as_matrix = lambda factors: tag.block.operator(factors).as_matrix()
        return over_stack(as_matrix, factors.l2.ndim)(factors)

    return map_tags(dense, model, factors)


def exact_rows(
    model: Model, loss_fn: Callable, args: Any, kwargs: Any, empirical: bool, limit: int
) -> list[Float[Array, "rows ..."]]:
    r"""For every tag of a layer that is not too large, matrices `[rows, *stack, d_out,
    d_in]` whose outer products add up to the exact block."""

    def canonical(tag, layer):
        if not is_trainable(tag, layer) or size_of(tag, layer) > limit:
            return None
        return tag.to_matrix(layer)

    def replace(tag, layer, new, matrix):
        return new if matrix is None else tag.from_matrix(matrix, new)

    def outputs(matrices):
        changed = update_layers(replace, model, matrices)
        objective, _ = run(loss_fn, changed, args, kwargs)
        return [loss.outputs for loss in objective.losses], objective

    matrices = map_tags(canonical, model)
    _, pullback, objective = eqx.filter_vjp(outputs, matrices, has_aux=True)
    terms = objective.weighted_losses
    scales = [
        jnp.sqrt(coefficient * loss.term_weights / loss.count)[..., None]
        for coefficient, loss in terms
    ]

    def pull(cotangents):
        pairs = zip(cotangents, scales, strict=True)
        scaled = [jtu.tree_map(lambda a: a * s.astype(a.dtype), c) for c, s in pairs]
        return jtu.tree_leaves(pullback(scaled)[0])

    losses = [loss for _, loss in terms]
    return (_of_examples if empirical else _of_outputs)(losses, pull)


def dense_pair(
    tag: Tag, layer: Layer, matrix: Array, rows: Array
) -> tuple[np.ndarray, np.ndarray]:
    """The approximate block of a layer and the exact one, `[stacked, size, size]`, from
    what the two functions above return of it."""
    size = size_of(tag, layer)
    each = np.asarray(rows, float).reshape(len(rows), -1, size).swapaxes(0, 1)
    return np.asarray(matrix, float).reshape(-1, size, size), each.swapaxes(1, 2) @ each


def _of_examples(losses: list[AbstractLoss], pull: Callable) -> list[Array]:
    """What is pulled back of the score of every example."""
    scores = [loss.score(loss.targets) for loss in losses]

    def one(i):
        return pull([jtu.tree_map(lambda a: _only(a, i), s) for s in scores])

    return jax.vmap(one)(jnp.arange(max(loss.leading[0] for loss in losses)))


def _of_outputs(losses: list[AbstractLoss], pull: Callable) -> list[Array]:
    """What is pulled back of a root of the Fisher at the outputs, column by column."""
    zeros = [jtu.tree_map(jnp.zeros_like, loss.outputs) for loss in losses]
    rows = []
    for i, loss in enumerate(losses):

        def along(v, i=i, loss=loss):
            return pull([*zeros[:i], loss.fisher_root(v), *zeros[i + 1 :]])

        size = int(np.prod(loss.root_shape))
        basis = jnp.eye(size, dtype=loss.term_weights.dtype)
        rows.append(jax.vmap(along)(basis.reshape(size, *loss.root_shape)))
    return [jnp.concatenate(of_tag) for of_tag in zip(*rows, strict=True)]


def _only(a: Array, i: Any) -> Array:
    """`a`, zero but for example `i`."""
    is_i = (jnp.arange(len(a)) == i).astype(a.dtype)
    return a * trailing(is_i, a)
