"""Arrays on several devices: how they are split, how new arrays are placed like them, and
what devices that have the same arrays tell each other.

JAX has three ways to use several devices, and most functions here serve all of them:

- Within a `shard_map`, the program is that of one device. An array *varies* over an axis
  of the mesh if devices along that axis may have different arrays in its place.
- On an *explicit* mesh, the type of every array says how it is split over the devices,
  and some operations have to be told how their results are.
- On any other mesh, the compiler of `jax.jit` decides that.

A mesh is *concrete* if it has devices. While JAX traces, meshes are *abstract*: there are
names and lengths of axes alone.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, cast, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree, Shaped

from ._custom_types import Like
from ._jax import Tracer, varying


_Function = TypeVar("_Function", bound=Callable)


def putting(fn: _Function) -> _Function:
    """`fn`, which may put numbers of the host on a device, even under a
    `jax.transfer_guard`. (The guard is there to find transfers that nobody has intended,
    and the arrays of a new state are intended.)"""

    @ft.wraps(fn)
    def wrapped(*args, **kwargs):
        with jax.transfer_guard_host_to_device("allow"):
            return fn(*args, **kwargs)

    return cast(_Function, wrapped)


def varying_axes(tree: PyTree) -> frozenset:
    """The `shard_map` axes over which any array of `tree` varies."""
    axes = frozenset()
    for leaf in jtu.tree_leaves(tree):
        if isinstance(leaf, jax.Array):
            axes |= varying(jax.typeof(leaf))
    return axes


def cast_varying(tree: PyTree, axes: frozenset) -> PyTree:
    """Marks every array of `tree` as varying over (at least) the `shard_map` `axes`.

    The transpose of this is a `psum`: what is collected on each device is added up.
    """

    def mark(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jtu.tree_map(mark, tree) if axes else tree


def sum_over(x: Array, axes: frozenset) -> Array:
    """The sum over the devices along `shard_map` axes. Every device contributes its `x`,
    also where all have the same one: a count of the examples on one device becomes the
    count of all examples."""
    if not axes:
        return x
    return jax.lax.psum(cast_varying(x, axes), tuple(sorted(axes)))


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding of an abstract array on an explicit mesh, where a contraction over a
    split axis has to be told how its result is split; `None` on any other mesh."""
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


def split_as(a: Array, axes: int, like: jax.ShapeDtypeStruct, like_axes: int) -> Array:
    """`a`, whose later axes are split over the devices of an explicit mesh like the later
    axes of the abstract array `like`. The first `axes` axes of `a` stay split as they
    are; the first `like_axes` axes of `like` do not count."""
    wanted, present = explicit_sharding(like), explicit_sharding(jax.typeof(a))
    if wanted is None:
        return a
    first = (None,) * axes if present is None else present.spec[:axes]
    spec = PartitionSpec(*first, *wanted.spec[like_axes:])
    return jax.sharding.reshard(a, NamedSharding(wanted.mesh, spec))


def sharding_along(a: Array, axes: int) -> NamedSharding | None:
    """The sharding of arrays that are split over the devices of an explicit mesh as `a`
    is along its first `axes` axes, and along no other axis."""
    sharding = explicit_sharding(jax.typeof(a))
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))


def gathered(a: Array, axes: int) -> Array:
    """`a`, whose later axes are not split over the devices of an explicit mesh any more:
    every device gets the whole of them. Its first `axes` axes stay split."""
    sharding = sharding_along(a, axes)
    return a if sharding is None else jax.sharding.reshard(a, sharding)


def zeros_beside(
    leaf: Array, shape: Sequence[int], dtype: DTypeLike, stack: int
) -> Array:
    """Zeros on the devices of `leaf`. Their first `stack` axes are split like those of
    `leaf`, and their other axes are not split; within a `shard_map` they vary as `leaf`
    does."""
    zeros = jnp.zeros(shape, dtype)
    sharding = sharding_along(leaf, stack)
    if sharding is not None:
        zeros = jax.sharding.reshard(zeros, sharding)
    return cast_varying(zeros, varying_axes(leaf))


def zeros_of(structs: PyTree) -> PyTree:
    """Zeros of the shapes, types and shardings of abstract arrays."""

    def zeros(struct):
        sharding = explicit_sharding(struct)
        array = jnp.zeros(struct.shape, struct.dtype, out_sharding=sharding)
        return cast_varying(array, varying(struct))

    return jtu.tree_map(zeros, structs)


def zeros_as_from(fn: Callable, *args: Any) -> PyTree:
    """Zeros of the shapes, types and shardings of what `fn(*args)` returns.

    One program makes all of them: outside of `jit`, JAX would compile a program for each
    shape."""
    structs, treedef = jtu.tree_flatten(eqx.filter_eval_shape(_traced_once, fn, *args))
    mesh = _concrete_mesh(args)
    if mesh is None:
        return treedef.unflatten(_zeros(tuple(structs)))
    # A program without arguments runs on one device. What it returns is put on the mesh.
    zeros = _zeros(tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in structs))

    def place(zeros, struct):
        sharding = explicit_sharding(struct)
        spec = PartitionSpec() if sharding is None else sharding.spec
        return jax.device_put(zeros, NamedSharding(mesh, spec))

    return treedef.unflatten(map(place, zeros, structs))


# Abstract arrays are no arguments of a program, but part of what JAX compiles it for.
_zeros = jax.jit(zeros_of, static_argnums=0)


@eqx.filter_jit
def _traced_once(fn: Callable, *args: Any) -> Any:
    """`fn(*args)`. `jit` is there because JAX remembers what it has traced: whenever a
    step is traced, it asks for the shapes that its state should have."""
    return fn(*args)


def _concrete_mesh(tree: PyTree) -> Mesh | None:
    """The first concrete mesh on which an array is. (Arrays that one program uses are on
    the same mesh.) `None` while tracing, or if no array is on a mesh."""
    return next((m for m in meshes_of(tree) if isinstance(m, Mesh)), None)


def beside(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` on the mesh of `like`: every array that is on no mesh, or on another one,
    is copied to all devices. (Nothing is to be done while tracing, since the compiler
    places the arrays of a program.)"""
    mesh = _concrete_mesh(like)
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(a):
        return a if mesh_of(a) == mesh else jax.device_put(a, everywhere)

    return jtu.tree_map(place, tree)


def mesh_of(a: Any) -> Mesh | AbstractMesh | None:
    """The mesh on which an array is, if it is on any; an abstract one while tracing."""
    if not eqx.is_array(a):
        return None
    # An array of NumPy has no sharding.
    sharding = getattr(jax.typeof(a) if isinstance(a, Tracer) else a, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def meshes_of(tree: PyTree) -> list[Mesh | AbstractMesh]:
    """The meshes of all arrays that are on one, in the order of the arrays."""
    meshes = map(mesh_of, jtu.tree_leaves(tree))
    return [mesh for mesh in meshes if mesh is not None and not mesh.empty]


def zeros_split_as(a: Array, dtype: DTypeLike | None = None) -> Array:
    """Zeros of the shape of `a`, which are split over devices as `a` is."""
    zeros, mesh = jnp.zeros_like(a, dtype=dtype), mesh_of(a)
    if isinstance(mesh, AbstractMesh) and mesh.size > 1 and not mesh.manual_axes:
        # How `jit` splits `a`, only the compiler knows. It splits a product with `a` in
        # the same way, so the zeros are computed as such a product. Zero times infinity
        # would not be zero; and zero times a negative number is -0, of which `abs` is 0.
        finite = jnp.where(jnp.isfinite(a), a, 0).astype(zeros.dtype)
        zeros = jnp.abs(zeros * finite)
    return zeros


def split_rows(
    a: Shaped[Array, "... rows columns"], over: tuple[str, ...], mesh: AbstractMesh
) -> Shaped[Array, "... rows columns"]:
    """Matrices whose rows are split over the devices along the axes `over` of a mesh. If
    the number of devices does not divide the number of rows, each device has all rows.
    The axes before those of the matrices stay as they are."""
    explicit, stack = explicit_sharding(jax.typeof(a)), a.ndim - 2
    first = (None,) * stack if explicit is None else explicit.spec[:stack]
    number = math.prod(mesh.shape[axis] for axis in over)
    of_rows = over if over and a.shape[-2] % number == 0 else None
    spec = PartitionSpec(*first, of_rows, None)
    if not isinstance(a, Tracer):
        # `mesh` is abstract. The devices are those of the mesh on which the array is.
        concrete = mesh_of(a)
        return a if concrete is None else jax.device_put(a, NamedSharding(concrete, spec))
    if explicit is not None:
        return jax.sharding.reshard(a, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))


def over_stack(fn: Callable, axes: int) -> Callable:
    """`fn`, mapped over the axes along which layers are stacked."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


def split_over_stack(fn: Callable, axes: int) -> Callable:
    """`over_stack` of an `fn` that JAX cannot split over devices by itself, such as a
    decomposition of matrices. If the stack is split over the devices of an explicit mesh,
    each device maps `fn` over its own layers; `fn` must not close over arrays."""
    mapped = over_stack(fn, axes)

    def apply(*args):
        avals = map(jax.typeof, jtu.tree_leaves(args))
        sharding = next(filter(None, map(explicit_sharding, avals)), None)
        # Where layers themselves are split, no device has a whole one.
        if axes == 0 or sharding is None or any(sharding.spec[axes:]):
            return mapped(*args)
        spec = PartitionSpec(*sharding.spec[:axes])
        local = jax.shard_map(mapped, in_specs=spec, out_specs=spec, check_vma=False)
        return local(*args)

    return apply


def is_split(tree: PyTree) -> bool:
    """Whether devices of an explicit mesh have different parts of any array."""
    leaves = [leaf for leaf in jtu.tree_leaves(tree) if eqx.is_array(leaf)]
    shardings = map(explicit_sharding, map(jax.typeof, leaves))
    return any(sharding is not None and any(sharding.spec) for sharding in shardings)


class Devices(NamedTuple):
    """Several devices that have the same arrays, so that each can do a part of what is to
    be done with them: the devices along some `axes` of a mesh."""

    mesh: AbstractMesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, *trees: PyTree) -> "Devices | None":
        """All devices of the mesh on which arrays are; `None` if there is no more than
        one. Within a `shard_map`, only devices along such axes count over which no array
        varies. If JAX does not keep account of what varies over an axis
        (`check_vma=False`), devices along it may differ, and do not count."""
        meshes = [mesh.abstract_mesh for mesh in meshes_of(trees)]
        meshes = [m for m in (jax.sharding.get_abstract_mesh(), *meshes) if m.size > 1]
        if not meshes:
            return None
        mesh, axes = meshes[0], meshes[0].axis_names
        if mesh.manual_axes:
            varying = varying_axes(trees)
            axes = [a for a in mesh.manual_axes if a not in varying and _is_tracked(a)]
        axes = tuple(a for a in axes if mesh.shape[a] > 1)
        return cls(mesh, axes) if axes else None

    @property
    def number(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def everywhere(self, fn: Callable, args: PyTree) -> PyTree:
        """`fn(args)`, run on every device by itself. All devices have the same arguments,
        and `fn` has to return the same on all of them."""
        if self.mesh.manual_axes:  # A `shard_map` runs the whole program like that.
            return fn(args)
        every = PartitionSpec()
        fn = jax.shard_map(
            fn, mesh=self.mesh, in_specs=every, out_specs=every, check_vma=False
        )
        return fn(args)

    def this_one(self) -> Int[Array, ""]:
        """Within `everywhere`, the number of the device."""
        return jax.lax.axis_index(self.axes)

    def all_gathered(self, tree: PyTree) -> PyTree:
        """Within `everywhere`, the arrays of all devices, one after the other along the
        first axis. (JAX gathers no arrays without entries: they stay what they are.)"""
        # In a user's `shard_map`, JAX has to know that all devices get the same: that the
        # result is "invarying". The `shard_map` of `everywhere` does not keep account.
        to = "invarying" if self.mesh.manual_axes else "varying"
        gather = lambda a: jax.lax.all_gather(a, self.axes, tiled=True, to=to)
        return jtu.tree_map(lambda a: gather(a) if a.size > 0 else a, tree)

    def summed(self, tree: PyTree) -> PyTree:
        """Within `everywhere`, the sums of the arrays of all devices."""
        add = lambda a: jax.lax.psum(a, self.axes)
        return jtu.tree_map(lambda a: add(a) if a.size > 0 else a, tree)


def check_tracked() -> None:
    """Raises within a `shard_map` if JAX does not keep account of which arrays are the
    same on all devices."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [a for a in mesh.manual_axes if mesh.shape[a] > 1 and not _is_tracked(a)]
    if axes:
        raise ValueError(
            f"In a `shard_map` with `check_vma=False`, or a `pmap` (over {axes}), JAX "
            "does not say which arrays are the same on all devices, so that each would "
            "take its own examples for the whole batch. Use `jax.shard_map` with "
            "`check_vma` as it is (also if every device trains a model of its own), or "
            "`jax.jit` with a batch that is split over devices."
        )


def _is_tracked(axis: str) -> bool:
    """Whether JAX knows which arrays vary over an axis of a `shard_map` (`check_vma`). If
    it does, it knows that the number of a device along the axis varies over it."""
    return axis in varying_axes(jax.lax.axis_index(axis))
