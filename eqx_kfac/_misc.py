"""Small functions of arrays and trees, for which several files have a use."""

import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Inexact, PyTree, Shaped

from ._complex import as_real
from ._custom_types import Key, Like
from ._devices import explicit_sharding, sharding_along, zeros_of


def accumulator(*dtypes: Any) -> Any:
    """The real type to add things up in: at least float32, and no narrower than any
    input."""
    doubles = jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)
    is_double = any(double in dtypes for double in doubles)
    return doubles[0] if is_double else jnp.dtype(jnp.float32)


def moment(
    a: Inexact[Array, "*rows m"], b: Inexact[Array, "*rows n"], stack: int, like: Like
) -> Float[Array, "*stack m n"]:
    r"""$\sum_\text{rows} a b^\top$, in one contraction over all axes but the first
    `stack` ones, accumulated in at least float32; `like` is the result's type."""
    sharding = explicit_sharding(like)
    if sharding is None:  # Made outside of the context of an explicit mesh.
        sharding = sharding_along(a, stack)

    def contract(a, b):
        batch, rows = tuple(range(stack)), tuple(range(stack, a.ndim - 1))
        return jax.lax.dot_general(
            a,
            b,
            ((rows, rows), (batch, batch)),
            preferred_element_type=accumulator(a.dtype),
            out_sharding=sharding,
        )

    def merged(a, b):
        rows = lambda x: x.reshape(*x.shape[:stack], -1, x.shape[-1])
        return contract(rows(a), rows(b))

    if a.ndim - 1 - stack > 1 and sharding is None:
        # XLA for CPU would first transpose a copy, to have one axis of rows. Elsewhere,
        # merging could undo how rows are split over devices.
        out = jax.lax.platform_dependent(a, b, cpu=merged, default=contract)
    else:
        out = contract(a, b)
    return out.astype(like.dtype)


def summed_in_parts(
    fn: Callable,
    rows: PyTree[Array],
    stack: int,
    size: int,
    most: tuple[int, int],
    like: PyTree[Like],
) -> PyTree[Array]:
    """`fn(*rows)`, which is a sum over examples, and writes out `size` numbers for all of
    these: from parts of the examples, one after the other, so that there are no more than
    `most` numbers at a time (on a CPU, elsewhere), or nearly so. Examples on an
    explicit mesh, whose axes are not reshaped, are not divided."""
    leaves = jtu.tree_leaves(rows)
    if any(explicit_sharding(jax.typeof(leaf)) is not None for leaf in leaves):
        return fn(*rows)
    examples = leaves[0].shape[stack]
    cpu, elsewhere = (_number_of_parts(examples, size, limit) for limit in most)
    of = lambda number: lambda rows: _summed(fn, rows, stack, number, like)
    if cpu == elsewhere:
        return of(cpu)(rows)
    return jax.lax.platform_dependent(rows, cpu=of(cpu), default=of(elsewhere))


def _number_of_parts(examples: int, size: int, most: int) -> int:
    """In how many parts examples are taken: equal ones if there is such a number near the
    one that is wanted. (127 examples one by one would take longer than all at once.)"""
    wanted = min(max(1, -(-size // most)), examples)
    near = range(wanted, min(4 * wanted, examples + 1))
    return next((n for n in near if examples % n == 0), wanted)


def _summed(
    fn: Callable, rows: PyTree[Array], stack: int, number: int, like: PyTree[Like]
) -> PyTree[Array]:
    """`fn(*rows)` from so many parts, and one of what is left over. Every n-th example is
    in a part, so that an axis that is split over devices stays split."""
    left_over = jtu.tree_leaves(rows)[0].shape[stack] % number
    if left_over > 0:
        take = ft.partial(jax.lax.slice_in_dim, axis=stack)
        most = jtu.tree_map(lambda a: take(a, 0, a.shape[stack] - left_over), rows)
        rest = jtu.tree_map(lambda a: take(a, -left_over, a.shape[stack]), rows)
        total = _summed(fn, most, stack, number, like)
        return jtu.tree_map(jnp.add, total, fn(*rest))
    if number == 1:
        return fn(*rows)
    axis = stack + 1
    split = lambda a: a.reshape(*a.shape[:stack], -1, number, *a.shape[axis:])
    rows = jtu.tree_map(split, rows)

    def add(total, i):
        # Taken where they are: a loop over a first axis would move that axis first.
        one = lambda a: jax.lax.dynamic_index_in_dim(a, i, axis, keepdims=False)
        return jtu.tree_map(jnp.add, total, fn(*jtu.tree_map(one, rows))), None

    return jax.lax.scan(add, zeros_of(like), jnp.arange(number))[0]


def draw(
    distribution: Callable, key: Key, shape: Sequence[int], dtype: DTypeLike
) -> Shaped[Array, "..."]:
    """Random numbers, drawn in one row. (A last axis that fills no vector register is
    unrolled by LLVM, which takes seconds to compile.)"""
    return distribution(key, (math.prod(shape),), dtype).reshape(shape)


def is_none(node: Any) -> bool:
    """For trees of which `None` is a leaf."""
    return node is None


def common_prefix(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The lengths, from the first axis on, in which all `shapes` agree."""
    agree = itertools.takewhile(lambda sizes: len(set(sizes)) == 1, zip(*shapes))
    return tuple(sizes[0] for sizes in agree)


def trailing(a: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`a` with axes of length one behind its own, up to the rank of `like`."""
    return a.reshape(a.shape + (1,) * (like.ndim - a.ndim))


def parameters_of(tree: PyTree) -> PyTree:
    """The parameters of a model: its inexact arrays, but not those in which the state of
    a layer like `BatchNorm` is to begin with."""

    def parameters(node):
        if isinstance(node, eqx.nn.StateIndex):
            return jtu.tree_map(lambda _: None, node)
        return node if eqx.is_inexact_array(node) else None

    is_state = lambda node: isinstance(node, eqx.nn.StateIndex)
    return jtu.tree_map(parameters, tree, is_leaf=is_state)


def by_path(model: PyTree) -> dict[str, Inexact[Array, "..."]]:
    """The inexact arrays of a model. It is a dictionary by their paths, because Python
    takes a tree shaped like the model apart node by node at every step."""
    leaves, _ = jtu.tree_flatten_with_path(model)
    return {jtu.keystr(p): leaf for p, leaf in leaves if eqx.is_inexact_array(leaf)}


def masked(tree: PyTree, mask: Any) -> PyTree:
    """The parameters of `tree` that `mask` wants: a function of a leaf, a tree of
    booleans, or `None` for all."""
    parameters = parameters_of(tree)
    return parameters if mask is None else eqx.filter(parameters, mask)


def difference(tree: PyTree, expected: PyTree) -> tuple[str, str, str] | None:
    """The first array whose shape is not as `expected`, or that is there in one tree
    only: its path, what it is, and what it should be."""

    def shapes(tree):
        leaves, _ = jtu.tree_flatten_with_path(tree)
        return {jtu.keystr(path): jnp.shape(leaf) for path, leaf in leaves}

    def described(shapes):
        return f"an array of shape {shapes[path]}" if path in shapes else "missing"

    have, want = shapes(tree), shapes(expected)
    for path in [*want, *have]:
        if have.get(path) != want.get(path):
            return path, described(have), described(want)
    return None


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether every number in `tree` is finite."""
    leaves = [x for x in jtu.tree_leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    small, large = _by_size(leaves, _SMALL)
    flags = [jnp.all(jnp.isfinite(x))[None] for x in large]
    flags += [jnp.isfinite(x) for x in small]
    return jnp.all(_in_a_row(flags)) if flags else jnp.ones((), bool)


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


def later(tree: PyTree, known: Array) -> PyTree:
    """`tree`, of which a compiler computes nothing before it has what is `known`: all
    numbers are multiplied by a one that it believes to depend on that. (If the numbers
    themselves did, a GPU would copy them. A CPU stores the product, and is left alone.)
    """

    def multiplied(leaves):
        one, _ = jax.lax.optimization_barrier((jnp.ones(()), known))
        return [x * one.astype(x.dtype) for x in leaves]

    leaves, treedef = jtu.tree_flatten(tree)
    same = lambda leaves: leaves
    leaves = jax.lax.platform_dependent(leaves, cpu=same, default=multiplied)
    return treedef.unflatten(leaves)


def tree_where(pred: Bool[Array, ""], true: PyTree, false: PyTree) -> PyTree:
    """`jnp.where` over two trees of arrays of one structure."""

    def where(t, f):
        alike = jnp.shape(t) == jnp.shape(f) and jnp.result_type(t) == jnp.result_type(f)
        # One operation instead of three, for every array in the state.
        return jax.lax.select(pred, t, f) if alike else jnp.where(pred, t, f)

    return jtu.tree_map(where, true, false)


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


def inner(x: Array, y: Array) -> Shaped[Array, ""]:
    """The inner product of two real arrays. (As one contraction, for which a CPU has a
    routine: a product and its sum are two or three loops to compile.)"""
    if explicit_sharding(jax.typeof(x)) is not None:
        return jnp.sum(x * y)
    return _contracted(x, y, tuple(range(x.ndim)))


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


def total(x: Array) -> Shaped[Array, ""]:
    """The sum of all numbers in a real array, as a contraction."""
    return inner(x, jnp.ones_like(x))


# Arrays of fewer numbers are better looked at together: for a CPU, every single one is
# something to compile; elsewhere, something to launch, which takes longer than a copy.
_SMALL, _SMALL_ELSEWHERE = 2**14, 2**22
# Between these sizes, a CPU takes an inner product as one of matrices.
_FOR_MATRICES, _FOR_ALL_CORES = 2**10, 2**18


def symmetric(inner: Callable, vectors: Sequence[Any]) -> Shaped[Array, "n n"]:
    """The matrix of all inner products of `vectors`, each computed once."""
    n = len(vectors)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    upper = {(i, j): inner(vectors[i], vectors[j]) for i, j in pairs}
    rows = [[upper[min(i, j), max(i, j)] for j in range(n)] for i in range(n)]
    return jnp.stack([jnp.stack(row) for row in rows])


def tree_norm(tree: PyTree) -> Shaped[Array, ""]:
    """The Euclidean norm of a tree of arrays."""
    return jnp.sqrt(tree_dot(tree, tree))


def names(paths: Sequence[str], limit: int = 8) -> str:
    """A readable list of leaf or layer paths, for error messages."""
    shown = ", ".join(f"`{path}`" for path in paths[:limit])
    more = len(paths) - limit
    return shown if more <= 0 else f"{shown} and {more} more"
