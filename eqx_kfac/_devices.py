"""Arrays that live on several devices: axes that vary within a `shard_map`, explicit
meshes, and what is made beside arrays that are there."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ._custom_types import Like


def varying_axes(tree: PyTree) -> frozenset:
    """The `shard_map` axes over which any array of `tree` varies."""
    axes = frozenset()
    for leaf in jtu.tree_leaves(tree):
        if isinstance(leaf, jax.Array):
            axes |= jax.typeof(leaf).manual_axis_type.varying
    return axes


def cast_varying(tree: PyTree, axes: frozenset) -> PyTree:
    """Marks every array of `tree` as varying over (at least) the `shard_map` `axes`.

    The transpose of this is a `psum`: what is collected on each device is added up.
    """

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jtu.tree_map(cast, tree)


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding of an abstract value if it lives on an explicit mesh, else `None`:
    there, a contraction over a sharded axis has to be told where its result goes."""
    sharding = getattr(aval, "sharding", None)
    if isinstance(sharding, NamedSharding):
        if AxisType.Explicit in sharding.mesh.axis_types:
            return sharding
    return None


def placed_like(a: Array, like: Like) -> Array:
    """`a`, split over devices as `like` (an array of the same shape) is."""
    sharding = explicit_sharding(jax.typeof(like))
    if sharding is not None:
        a = jax.sharding.reshard(a, sharding)
    return cast_varying(a, varying_axes(like))


def split_as(a: Array, axes: int, like: Like, like_axes: int) -> Array:
    """`a`, split over the devices of an explicit mesh as it is along its first `axes`
    axes, and along the others as `like` behind its first `like_axes` ones."""
    sharding, own = explicit_sharding(like), explicit_sharding(jax.typeof(a))
    if sharding is None:
        return a
    first = (None,) * axes if own is None else own.spec[:axes]
    spec = PartitionSpec(*first, *sharding.spec[like_axes:])
    return jax.sharding.reshard(a, NamedSharding(sharding.mesh, spec))


def gathered(a: Array, axes: int) -> Array:
    """`a`, split over the devices of an explicit mesh along its first `axes` only."""
    sharding = explicit_sharding(jax.typeof(a))
    if sharding is None:
        return a
    spec = PartitionSpec(*sharding.spec[:axes])
    return jax.sharding.reshard(a, NamedSharding(sharding.mesh, spec))


def zeros_beside(
    leaf: Array, shape: Sequence[int], dtype: DTypeLike, stack: int
) -> Array:
    """Zeros that are sharded like `leaf` along their first `stack` axes, and replicated
    along the others; within `shard_map` they vary as `leaf` does."""
    zeros = jnp.zeros(shape, dtype)
    sharding = explicit_sharding(jax.typeof(leaf)) if stack > 0 else None
    if sharding is not None:
        spec = PartitionSpec(*sharding.spec[:stack])
        zeros = jax.sharding.reshard(zeros, NamedSharding(sharding.mesh, spec))
    return cast_varying(zeros, varying_axes(leaf))


def zeros_of(structs: PyTree) -> PyTree:
    """Zeros of the shapes, types and shardings of abstract arrays."""

    def zeros(struct):
        sharding = explicit_sharding(struct)
        array = jnp.zeros(struct.shape, struct.dtype, out_sharding=sharding)
        manual = getattr(struct, "manual_axis_type", None)
        return array if manual is None else cast_varying(array, manual.varying)

    return jtu.tree_map(zeros, structs)


def zeros_as_from(fn: Callable, *args: Any) -> PyTree:
    """Zeros of the shapes, types and shardings of what `fn(*args)` returns; in one
    program, for outside of `jit` every other shape would be one to compile."""
    structs, treedef = jtu.tree_flatten(eqx.filter_eval_shape(fn, *args))
    return treedef.unflatten(_zeros(tuple(structs)))


_zeros = jax.jit(zeros_of, static_argnums=0)


def over_stack(fn: Callable, axes: int) -> Callable:
    """`fn`, mapped over the axes along which layers are stacked."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


def decomposed_over_stack(fn: Callable, axes: int) -> Callable:
    """As `over_stack`, for what JAX cannot split over the devices of an explicit mesh by
    itself: there, `fn` (which must not close over arrays) only sees a device's own."""
    mapped = over_stack(fn, axes)

    def apply(*args):
        kinds = map(jax.typeof, jtu.tree_leaves(args))
        sharding = next(filter(None, map(explicit_sharding, kinds)), None)
        if axes == 0 or sharding is None or any(sharding.spec[axes:]):
            return mapped(*args)
        spec = PartitionSpec(*sharding.spec[:axes])
        local = jax.shard_map(mapped, in_specs=spec, out_specs=spec, check_vma=False)
        return local(*args)

    return apply
