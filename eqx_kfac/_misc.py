"""Small functions of arrays and trees, for which several files have a use."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Inexact, PyTree, Shaped

from ._custom_types import Key


def accumulator(*dtypes: Any) -> Any:
    """The real type to add things up in: at least float32, and no narrower than any
    input."""
    doubles = jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)
    is_double = any(double in dtypes for double in doubles)
    return doubles[0] if is_double else jnp.dtype(jnp.float32)


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


def at_paths(arrays: dict[str, Array], tree: PyTree) -> PyTree:
    """`tree`, with `arrays` in the place of those leaves that have their paths: the
    inverse of `by_path`."""
    leaves, treedef = jtu.tree_flatten_with_path(tree)
    new = [arrays.get(jtu.keystr(path), leaf) for path, leaf in leaves]
    return jtu.tree_unflatten(treedef, new)


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


def names(paths: Sequence[str], limit: int = 8) -> str:
    """A readable list of leaf or layer paths, for error messages."""
    shown = ", ".join(f"`{path}`" for path in paths[:limit])
    more = len(paths) - limit
    return shown if more <= 0 else f"{shown} and {more} more"
