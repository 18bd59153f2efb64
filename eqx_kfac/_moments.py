"""Sums over rows: moments, and what is summed in parts to need little memory."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, PyTree

from ._custom_types import Like
from ._devices import explicit_sharding, sharding_along, zeros_of
from ._misc import accumulator


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
