"""Arrays that live on several devices: axes that vary within a `shard_map`, explicit
meshes, and what is made beside arrays that are there."""

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
    """`fn`, which makes arrays of numbers, and is meant to: a `jax.transfer_guard`
    against transfers that nobody has asked for lets these pass."""

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

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jtu.tree_map(cast, tree) if axes else tree


def sum_over(x: Array, axes: frozenset) -> Array:
    """The sum over the devices along `shard_map` axes; what is the same on all of them
    (a count of examples) is one per device nevertheless."""
    if not axes:
        return x
    return jax.lax.psum(cast_varying(x, axes), tuple(sorted(axes)))


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


def split_along(a: Array, axes: int) -> NamedSharding | None:
    """How `a` is split over the devices of an explicit mesh along its first `axes`."""
    sharding = explicit_sharding(jax.typeof(a))
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))


def gathered(a: Array, axes: int) -> Array:
    """`a`, split over the devices of an explicit mesh along its first `axes` only."""
    sharding = split_along(a, axes)
    return a if sharding is None else jax.sharding.reshard(a, sharding)


def zeros_beside(
    leaf: Array, shape: Sequence[int], dtype: DTypeLike, stack: int
) -> Array:
    """Zeros that are sharded like `leaf` along their first `stack` axes, and replicated
    along the others; within `shard_map` they vary as `leaf` does."""
    zeros = jnp.zeros(shape, dtype)
    sharding = split_along(leaf, stack)
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
    """Zeros of the shapes, types and shardings of what `fn(*args)` returns; in one
    program, for outside of `jit` every other shape would be one to compile."""
    structs, treedef = jtu.tree_flatten(eqx.filter_eval_shape(_traced_once, fn, *args))
    mesh = _concrete_mesh(args)
    if mesh is None:
        return treedef.unflatten(_zeros(tuple(structs)))
    zeros = _zeros(tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in structs))

    def place(zeros, struct):
        sharding = explicit_sharding(struct)
        spec = PartitionSpec() if sharding is None else sharding.spec
        return jax.device_put(zeros, NamedSharding(mesh, spec))

    return treedef.unflatten(map(place, zeros, structs))


_zeros = jax.jit(zeros_of, static_argnums=0)


@eqx.filter_jit
def _traced_once(fn: Callable, *args: Any) -> Any:
    """`fn(*args)`, which JAX does not trace again for arguments of the same types: every
    step asks for the shapes that its state should have."""
    return fn(*args)


def _concrete_mesh(tree: PyTree) -> Mesh | None:
    """The mesh where arrays are that are no tracers."""
    return next((m for m in meshes_of(tree) if isinstance(m, Mesh)), None)


def beside(tree: PyTree, like: PyTree) -> PyTree:
    """`tree`, with arrays that are on one device only put on all of the mesh where arrays
    of `like` are. (While tracing, the compiler does that.)"""
    mesh = _concrete_mesh(like)
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(a):
        return a if mesh_of(a) == mesh else jax.device_put(a, everywhere)

    return jtu.tree_map(place, tree)


def mesh_of(a: Any) -> Mesh | AbstractMesh | None:
    """The mesh on which an array is, if on any. While tracing, there are no devices."""
    if not eqx.is_array(a):
        return None
    # NumPy's arrays have none.
    sharding = getattr(jax.typeof(a) if isinstance(a, Tracer) else a, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def meshes_of(tree: PyTree) -> list[Mesh | AbstractMesh]:
    """The meshes on which arrays are, in their order."""
    meshes = map(mesh_of, jtu.tree_leaves(tree))
    return [mesh for mesh in meshes if mesh is not None and not mesh.empty]


def zeros_split_as(a: Array, dtype: DTypeLike | None = None) -> Array:
    """Zeros of the same shape, and split over devices alike."""
    zeros, mesh = jnp.zeros_like(a, dtype=dtype), mesh_of(a)
    if isinstance(mesh, AbstractMesh) and mesh.size > 1 and not mesh.manual_axes:
        # How an array is split by `jit` only the compiler knows, and it makes the same of
        # what is computed from it.
        number = jnp.where(jnp.isfinite(a), a, 0).astype(zeros.dtype)
        zeros = jnp.abs(zeros * number)
    return zeros


def split_rows(
    a: Shaped[Array, "... rows columns"], over: tuple[str, ...], mesh: AbstractMesh
) -> Shaped[Array, "... rows columns"]:
    """`a`, its rows split over some axes of a mesh, if they can be divided; with all axes
    before as they are."""
    explicit, stack = explicit_sharding(jax.typeof(a)), a.ndim - 2
    first = (None,) * stack if explicit is None else explicit.spec[:stack]
    number = math.prod(mesh.shape[axis] for axis in over)
    rows = over if over and a.shape[-2] % number == 0 else None
    spec = PartitionSpec(*first, rows, None)
    if not isinstance(a, Tracer):
        own = mesh_of(a)
        return a if own is None else jax.device_put(a, NamedSharding(own, spec))
    if explicit is not None:
        return jax.sharding.reshard(a, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))


def over_stack(fn: Callable, axes: int) -> Callable:
    """`fn`, mapped over the axes along which layers are stacked."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


def decomposed_over_stack(fn: Callable, axes: int) -> Callable:
    """Maps over a stack what JAX cannot split over the devices of an explicit mesh by
    itself: there, `fn` (which must not close over arrays) sees the part of one device.
    Elsewhere this is `over_stack`."""
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


def is_split(tree: PyTree) -> bool:
    """Whether devices of an explicit mesh have different parts of any array."""
    leaves = [leaf for leaf in jtu.tree_leaves(tree) if eqx.is_array(leaf)]
    shardings = map(explicit_sharding, map(jax.typeof, leaves))
    return any(sharding is not None and any(sharding.spec) for sharding in shardings)


class Devices(NamedTuple):
    """Several devices that have the same arrays, and can share what is to be done with
    them: those along some axes of a mesh."""

    mesh: AbstractMesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, *trees: PyTree) -> "Devices | None":
        """The devices on whose mesh arrays are. `None` if there is one device only.
        Within `shard_map`, those along its axes over which no array varies, as far as
        JAX keeps account of that."""
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
        """`fn(args)` on every device by itself. All have the same arguments, and have to
        return the same."""
        if self.mesh.manual_axes:
            return fn(args)
        every = PartitionSpec()
        fn = jax.shard_map(
            fn, mesh=self.mesh, in_specs=every, out_specs=every, check_vma=False
        )
        return fn(args)

    def this_one(self) -> Int[Array, ""]:
        """Within `everywhere`, the number of the device."""
        return jax.lax.axis_index(self.axes)

    def gathered(self, tree: PyTree) -> PyTree:
        """What all devices have, one after the other along the first axis."""
        to = "invarying" if self.mesh.manual_axes else "varying"
        gather = lambda a: jax.lax.all_gather(a, self.axes, tiled=True, to=to)
        return jtu.tree_map(lambda a: gather(a) if a.size > 0 else a, tree)

    def added(self, tree: PyTree) -> PyTree:
        """The sum of what all devices have."""
        add = lambda a: jax.lax.psum(a, self.axes)
        return jtu.tree_map(lambda a: add(a) if a.size > 0 else a, tree)


def check_tracked() -> None:
    """Raises within a `shard_map` of which JAX does not know what its devices share."""
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
    """Whether JAX knows what varies over an axis of `shard_map` (`check_vma`)."""
    return axis in varying_axes(jax.lax.axis_index(axis))
