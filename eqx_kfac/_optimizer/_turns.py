"""Which layers are factorised at which step."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Int

from .._custom_types import Layer, Model
from .._devices import explicit_sharding
from .._misc import trailing
from .._tag import flatten_tags, map_tags
from ._schedule import Due


class Turn(NamedTuple):
    """When it is a layer's turn. One in several `parts` has as many turns, one after the
    other."""

    start: int
    parts: int


class Turns:
    """Layers that are factorised at different steps, in at most `number` turns of about
    equal work. Of stacked layers, if their number has a divisor, some at every turn."""

    def __init__(self, model: Model, number: int):
        work, treedef = flatten_tags(_Work, model)
        work = [of_layer for _, of_layer in work]
        self.model = model
        self.number = number = max(1, min(number, sum(w.members for w in work)))
        turns = _dealt_out(work, number)
        self.different = sorted(set(turns))
        self.turns = treedef.unflatten(turns)

    def only(self, turn: Turn, tree: Model) -> Model:
        """What layers of one turn have in a model-shaped tree."""
        if len(self.different) == 1:
            return tree
        mine = lambda tag, layer, own, node: node if own == turn else None
        return map_tags(mine, self.model, self.turns, tree)

    def join(self, trees: list[Model]) -> Model:
        """The inverse of `only`, given the trees of all different turns."""
        if len(self.different) == 1:
            return trees[0]

        def mine(tag, layer, own, *nodes):
            return None if own is None else nodes[self.different.index(own)]

        return map_tags(mine, self.model, self.turns, *trees)

    def part(self, tree: Model, turn: Turn, index: Int[Array, ""]) -> Model:
        """One layer in `turn.parts` of every stack, from `index` on, as one stack."""

        def pick(a, axes):
            a = a.reshape(-1, turn.parts, *a.shape[axes:])
            return jax.lax.dynamic_index_in_dim(a, index, 1, keepdims=False)

        return self._of_stacks(pick, tree)

    def with_part(
        self, tree: Model, turn: Turn, index: Int[Array, ""], new: Model
    ) -> Model:
        """The inverse of `part`."""

        def put(a, axes, new):
            parts = a.reshape(-1, turn.parts, *a.shape[axes:])
            due = jnp.arange(turn.parts, dtype=index.dtype) == index
            due = trailing(due[None], parts)
            return jnp.where(due, new[:, None], parts).reshape(a.shape)

        return self._of_stacks(put, tree, new)

    def _of_stacks(self, fn: Callable, tree: Model, *rest: Model) -> Model:
        def of_layer(tag, layer, node, *nodes):
            if node is None:
                return None
            axes = len(tag.form.sizes(layer).stack)
            return jtu.tree_map(lambda a, *own: fn(a, axes, *own), node, *nodes)

        return map_tags(of_layer, self.model, tree, *rest)


def _dealt_out(work: list["_Work"], number: int) -> list[Turn]:
    """Turns for all layers: those with most work are dealt out first, each to the step
    that has least to do so far."""
    parts = [w.parts(number) for w in work]
    steps = [w.operations / p for w, p in zip(work, parts, strict=True)]
    totals, turns = np.zeros(number), [Turn(0, 1)] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -steps[i]):
        sums = np.convolve(totals, np.ones(parts[i]), "valid")
        turns[i] = Turn(int(np.argmin(sums)), parts[i])
        totals[turns[i].start :][: parts[i]] += steps[i]
    return turns


class _Work:
    """A measure of what it takes to decompose the factors of a layer, and of how many."""

    def __init__(self, tag: Any, layer: Layer):
        stack, d_out, d_in, bias, diagonal = tag.form.sizes(layer)
        sharding = explicit_sharding(jax.typeof(tag.form.some_parameter(layer)))
        cubes = d_out**3 + (0 if diagonal else (d_in + bias) ** 3)
        self.operations = float(math.prod(stack) * cubes)
        # Devices of an explicit mesh that have parts of a stack invert it together.
        split = sharding is not None and any(sharding.spec[: len(stack)])
        self.members = 1 if split else math.prod(stack)

    def parts(self, most: int) -> int:
        return max(p for p in range(1, most + 1) if self.members % p == 0)


def when_in_turn(
    turns: Turns,
    due: Due,
    finite: Bool[Array, ""] | bool,
    compute: Callable,
    *trees: Model,
) -> tuple[Model, Bool[Array, ""]]:
    """`compute(*trees) -> (tree, flag)` for the layers whose turn it is; the others keep
    what the first of the trees has of them. The flags of all."""
    results = []
    for turn in turns.different:
        own = [turns.only(turn, tree) for tree in trees]
        when = _whole if turn.parts == 1 else _in_parts
        results.append(when(turns, turn, due, finite, compute, own))
    flags = [flag for _, flag in results]
    return turns.join([tree for tree, _ in results]), ft.reduce(jnp.logical_and, flags)


def _whole(turns, turn, due, finite, compute, trees):
    own = due._replace(step=due.step - turn.start * (due.period // turns.number))
    kept = trees[0], due.weight >= 0  # True.
    return own.when(ft.partial(compute, *trees), kept, finite)


def _in_parts(turns, turn, due, finite, compute, trees):
    """One part at a step, or all of them when all layers are due."""
    every = due.period // turns.number
    now, late = jnp.divmod(due.step % due.period, every)
    index = now - turn.start
    all_parts = due.every_part
    one = ((late == 0) & (index >= 0) & (index < turn.parts)).astype(index.dtype)
    number = jnp.where(finite, jnp.where(all_parts, turn.parts, one), 0)
    first = jnp.where(all_parts, 0, index)

    def body(i, kept):
        tree, flag = kept
        parts = [turns.part(t, turn, first + i) for t in (tree, *trees[1:])]
        new, flag_of_part = compute(*parts)
        return turns.with_part(tree, turn, first + i, new), flag & flag_of_part

    return jax.lax.fori_loop(0, number, body, (trees[0], due.weight >= 0))
