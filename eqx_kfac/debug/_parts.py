"""Which layers of a model are compared together, and in which way."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import lineax as lx
import numpy as np

from .._curvature import init_curvature
from .._custom_types import Key, Model
from .._fisher import AbstractFisher
from .._tag import flatten_tags
from ._blocks import chunk, size_of
from ._compare import is_structured, operations, operations_of_sides, PROBES, WIDE
from ._plan import ALL, Costs, random_vectors, Vectors, vectors
from ._rows import Places, Rows


# So many matrices of its size are there while a dense matrix is made of something else.
_STEPS = 8


class Size(NamedTuple):
    """How much there is to compare of a layer, or of a stack of layers."""

    bytes: float  # Of its curvature.
    stack: tuple[int, ...]
    parameters: int  # Of one of the stack.
    itemsize: int
    product: float  # Operations of a product with the approximate block.
    estimate: float  # And if it may be estimated.
    operator: Any  # The approximate block, without its numbers.

    @property
    def number(self) -> int:
        """How many layers there are."""
        return int(np.prod(self.stack))

    @property
    def gradient(self) -> int:
        """The bytes of a gradient."""
        return self.number * self.parameters * self.itemsize


def sizes(model: Model) -> list[Size]:
    """The sizes of all layers."""
    shapes = eqx.filter_eval_shape(init_curvature, model)

    def of_layer(tag, layer, factors):
        leaves, axes = jtu.tree_leaves(factors), factors.l2.ndim
        one = lambda a: jax.ShapeDtypeStruct(a.shape[axes:], a.dtype)
        operator = eqx.filter_eval_shape(tag.block.operator, jtu.tree_map(one, factors))
        size, itemsize = size_of(tag, layer), leaves[0].dtype.itemsize
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        stack = factors.l2.shape
        if not is_structured(operator):  # It makes use of a dense matrix.
            product = estimate = 2 * size**2
            made = 1 if isinstance(operator, lx.MatrixLinearOperator) else _STEPS
            held += made * int(np.prod(stack)) * size**2 * itemsize
        else:
            product = estimate = operations(operator)
        if product > WIDE and is_structured(operator):
            estimate = min(product, 4 * PROBES * (size + product / size))
        return Size(held, stack, size, itemsize, product, estimate, operator)

    return [size for _, size in flatten_tags(of_layer, model, shapes)[0]]


def groups(layers: list[int], sizes: list[Size], memory: float) -> Iterator[list[int]]:
    """Layers whose factors, and whose gradients, fit together, one after the other."""
    group, factors, gradients = [], 0.0, 0.0
    for i in layers:
        size = sizes[i]
        full = factors + size.bytes > memory or gradients + size.gradient > memory
        if group and full:
            yield group
            group, factors, gradients = [], 0.0, 0.0
        group.append(i)
        factors, gradients = factors + size.bytes, gradients + size.gradient
    if group:
        yield group


class Part(NamedTuple):
    """Layers that are compared in the same way."""

    layers: list[int]
    vectors: Vectors
    at_once: int  # How many vectors.


class Plan(NamedTuple):
    """How the layers of a group are compared: as dense matrices, and along vectors, as
    matrices or as the rows of these. And the estimate that approximates them, and its
    key."""

    dense: Part | None
    rest: Part | None
    rows: Part | None
    fisher: AbstractFisher
    key: Key | None


def parts(
    costs: Costs,
    given: AbstractFisher | None,
    key: Key | None,
    limit: int,
    memory: float,
    sizes: list[Size],
    group: list[int],
    places: Places,
) -> Plan:
    """The plan for a group of layers. `given`, `key`, `limit`, `memory`: as for
    `verify`."""
    chosen, fisher, key = vectors(costs, given, key, _numbers(sizes, group), memory)
    dense = [] if chosen.sampled else _dense(chosen, limit, memory, sizes, group)
    rest = [i for i in group if i not in dense]
    of_dense = of_rest = of_rows = None
    if dense:
        at_once = chunk(costs, chosen.number, _numbers(sizes, dense), memory)
        of_dense = Part(dense, chosen, at_once)
    if rest:
        of_rest = _along_all(chosen, memory, sizes, rest)
    if rest and of_rest is None:
        few = {i: rows for i in rest if (rows := places.few(i)) is not None}
        rest = [i for i in rest if i not in few]
        parts = bool(rest) + bool(few)  # Which share what may be spent.
        of_rest = _along(costs, given, memory, sizes, rest, parts) if rest else None
        of_rows = _along_rows(costs, given, memory, sizes, few, parts) if few else None
    return Plan(of_dense, of_rest, of_rows, fisher, key)


def _dense(
    chosen: Vectors, limit: int, memory: float, sizes: list[Size], group: list[int]
) -> list[int]:
    """The layers whose dense blocks fit, from the smallest up."""
    found, held, work = [], 0.0, 0.0
    for i in sorted(group, key=lambda i: sizes[i].parameters):
        size = sizes[i]
        entries = size.number * size.parameters**2
        held += 4 * entries * size.itemsize
        work += 2 * entries * chosen.number
        if size.parameters <= limit and held <= memory and work <= ALL:
            found.append(i)
    return sorted(found)


def _along_all(
    chosen: Vectors, memory: float, sizes: list[Size], layers: list[int]
) -> Part | None:
    """Along all vectors, if these fit."""
    gradient = sum(sizes[i].gradient for i in layers)
    products = sum(sizes[i].number * sizes[i].product for i in layers)
    fits = chosen.number * gradient <= memory / 4 and chosen.number * products <= ALL
    return Part(layers, chosen, chosen.number) if fits and not chosen.sampled else None


def _along(
    costs: Costs,
    given: AbstractFisher | None,
    memory: float,
    sizes: list[Size],
    layers: list[int],
    parts: int,
) -> Part:
    """Along random vectors."""
    gradient = sum(sizes[i].gradient for i in layers)
    products = sum(sizes[i].number * sizes[i].estimate for i in layers)
    pullback = 2 * costs.work.operations + 4 * _numbers(sizes, layers)
    return _random(layers, given, parts * (pullback + products), gradient, memory)


def _along_rows(
    costs: Costs,
    given: AbstractFisher | None,
    memory: float,
    sizes: list[Size],
    layers: dict[int, Rows],
    parts: int,
) -> Part:
    """Along random vectors, whose gradients are rows."""
    products = sum(
        sizes[i].number * operations_of_sides(sizes[i].operator, rows.number)
        for i, rows in layers.items()
    )
    numbers = sum(rows.outputs for rows in layers.values())
    # What comes back to no parameter takes half the operations; but for every few, the
    # outputs are computed again.
    operations = 2 * costs.work.operations + products
    return _random(
        list(layers), given, parts * operations, numbers * costs.itemsize, memory
    )


def _random(
    layers: list[int],
    given: AbstractFisher | None,
    operations: float,
    each: float,
    memory: float,
) -> Part:
    """Along as many random vectors as can be had, and at once as many as fit, if one
    takes so many operations, and `each` so many bytes."""
    random = random_vectors(given, operations)
    at_once = int(np.clip(memory / 3 // each, 2, random.number))
    number = at_once * max(round(random.number / at_once), 1)
    return Part(layers, random._replace(number=number), at_once)


def _numbers(sizes: list[Size], layers: list[int]) -> int:
    return sum(sizes[i].number * sizes[i].parameters for i in layers)
