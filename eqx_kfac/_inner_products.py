"""Inner products, norms and finiteness of trees of arrays, in few operations."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree, Shaped

from ._complex import as_real
from ._devices import explicit_sharding
from ._misc import accumulator


# Arrays of fewer numbers are better looked at together: for a CPU, every single one is
# something to compile; elsewhere, something to launch, which takes longer than a copy.
_SMALL, _SMALL_ELSEWHERE = 2**14, 2**22
# Between these sizes, a CPU takes an inner product as one of matrices.
_FOR_MATRICES, _FOR_ALL_CORES = 2**10, 2**18


def tree_dot(a: PyTree, b: PyTree) -> Shaped[Array, ""]:
    """The inner product of two trees of arrays, accumulated in at least float32. A
    complex number is a pair of real ones: of those, the real part of $a^* b$."""

    return _inner_of_rows(lambda few_rows, a, b: (few_rows(a), few_rows(b)), a, b)


def squared_norm_of_sum(
    scale_a: Shaped[Array, ""], a: PyTree, scale_b: Shaped[Array, ""], b: PyTree
) -> Shaped[Array, ""]:
    """The squared Euclidean norm of a sum of two trees of arrays, each times a number.
    (GPUs have the rows of both from inner products, and need not make those of a third
    tree.)"""

    def twice(few_rows, a, b):
        add = lambda x, y: scale_a.astype(x.dtype) * x + scale_b.astype(y.dtype) * y
        rows = list(map(add, few_rows(a), few_rows(b)))
        return rows, rows

    return _inner_of_rows(twice, a, b)


def tree_norm(tree: PyTree) -> Shaped[Array, ""]:
    """The Euclidean norm of a tree of arrays."""
    return jnp.sqrt(tree_dot(tree, tree))


def _inner_of_rows(fn: Callable, *trees: PyTree) -> Shaped[Array, ""]:
    """The inner product of the two lists of arrays that `fn(few_rows, *trees)` makes of
    the real leaves: few rows have all of their numbers."""
    trees = tuple(jtu.tree_leaves(as_real(tree)) for tree in trees)
    dtype = accumulator(*[x.dtype for x in trees[0]])
    if not trees[0]:
        return jnp.zeros((), dtype)
    trees = jtu.tree_map(lambda x: x.astype(dtype), trees)

    def of(most, dot):
        def few_rows(leaves):
            small, large = _by_size(leaves, most)
            return [*large, _in_a_row(small)] if small else large

        return lambda *trees: dot(*fn(few_rows, *trees))

    if any(explicit_sharding(jax.typeof(x)) is not None for x in trees[0]):
        return of(_SMALL, _added)(*trees)
    few = dict(cpu=of(_SMALL, _added_on_cpu), default=of(_SMALL_ELSEWHERE, _added))
    return jax.lax.platform_dependent(*trees, **few)


def inner(x: Array, y: Array) -> Shaped[Array, ""]:
    """The inner product of two real arrays. (As one contraction, for which a CPU has a
    routine: a product and its sum are two or three loops to compile.)"""
    if explicit_sharding(jax.typeof(x)) is not None:
        return jnp.sum(x * y)
    return _contracted(x, y, tuple(range(x.ndim)))


def total(x: Array) -> Shaped[Array, ""]:
    """The sum of all numbers in a real array, as a contraction."""
    return inner(x, jnp.ones_like(x))


def symmetric(inner: Callable, vectors: Sequence[Any]) -> Shaped[Array, "n n"]:
    """The matrix of all inner products of `vectors`, each computed once."""
    n = len(vectors)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    upper = {(i, j): inner(vectors[i], vectors[j]) for i, j in pairs}
    rows = [[upper[min(i, j), max(i, j)] for j in range(n)] for i in range(n)]
    return jnp.stack([jnp.stack(row) for row in rows])


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether every number in `tree` is finite."""
    leaves = [x for x in jtu.tree_leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    small, large = _by_size(leaves, _SMALL)
    flags = [jnp.all(jnp.isfinite(x))[None] for x in large]
    flags += [jnp.isfinite(x) for x in small]
    return jnp.all(_in_a_row(flags)) if flags else jnp.ones((), bool)


def as_parts(tree: PyTree) -> PyTree:
    """A tree of arrays that, for devices that look at one row of all small ones, are
    parts of this row: then only the row is kept."""
    leaves, treedef = jtu.tree_flatten(tree)
    types = {x.dtype for x in leaves}
    if len(types) != 1 or types != {accumulator(*types)}:
        return tree

    def parts(leaves):
        small, _ = _by_size(leaves, _SMALL_ELSEWHERE)
        row = iter(_apart(_in_a_row(small), small) if small else ())
        return [next(row) if _is_small(x, _SMALL_ELSEWHERE) else x for x in leaves]

    same = lambda leaves: leaves
    leaves = jax.lax.platform_dependent(leaves, cpu=same, default=parts)
    return treedef.unflatten(leaves)


def _apart(row: Array, like: Sequence[Array]) -> list[Array]:
    """The inverse of `_in_a_row`."""
    ends = list(itertools.accumulate(x.size for x in like))
    own = [row[end - x.size : end] for x, end in zip(like, ends, strict=True)]
    return [part.reshape(x.shape) for part, x in zip(own, like, strict=True)]


def _by_size(arrays: Sequence[Array], most: int) -> tuple[list[Array], list[Array]]:
    """Splits arrays into those smaller than `most`, and the others."""
    small, large = [], []
    for x in arrays:
        (small if _is_small(x, most) else large).append(x)
    return small, large


def _is_small(x: Array, most: int) -> bool:
    """Whether an array may become a part of a row: one that is split may not."""
    return x.size < most and explicit_sharding(jax.typeof(x)) is None


def _in_a_row(arrays: Sequence[Array]) -> Array:
    """One vector of all. (The barrier keeps XLA from looking at each by itself.)"""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    row = jnp.concatenate([x.reshape(-1) for x in arrays])
    return jax.lax.optimization_barrier(row)


def _contracted(x: Array, y: Array, axes: tuple[int, ...]) -> Array:
    """The sum of products over the same axes of two arrays."""
    dims, highest = ((axes, axes), ((), ())), jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dims, precision=highest)


def _added(xs: Sequence[Array], ys: Sequence[Array]) -> Shaped[Array, ""]:
    """The sum of the inner products of pairs of real arrays."""
    return jnp.asarray(sum(map(inner, xs, ys)))


def _added_on_cpu(xs: Sequence[Array], ys: Sequence[Array]) -> Shaped[Array, ""]:
    """The sum of inner products for a CPU, whose routine for the product of two vectors
    adds one number at a time. The routine for a product of matrices adds several: of the
    products of four parts with each other, those of each with itself are wanted, and
    still it takes a quarter of the time. Arrays of a megabyte or more are better
    multiplied number by number, by all cores."""
    numbers, products = [], []
    for x, y in zip(xs, ys, strict=True):
        if x.size >= _FOR_ALL_CORES:
            numbers.append(jnp.sum(jnp.sum(x * y, -1)))
        elif x.size < _FOR_MATRICES or x.size % 4 > 0:
            numbers.append(inner(x, y))
        else:
            products.append(_contracted(x.reshape(4, -1), y.reshape(4, -1), (1,)))
    if products:
        numbers.append(jnp.trace(jnp.asarray(sum(products))))
    return jnp.asarray(sum(numbers))
