"""Operations in which an array of parameters multiplies data, as forms: how the array,
the data and the result are to be arranged so that the form fits."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import Equation
from ..form import AbstractForm, Convolution, Dense, Einsum, Leaf, Lookup, Mask
from ._axes import Axes, Axis, Factor, merged


# A form of groups of matrices side by side.
GROUPED = Einsum("goi,gpi->gpo")


class Arrangement(NamedTuple):
    """An array is reshaped to `shape`, its axes are brought into another `order`, and
    then it is reshaped to `seen`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    seen: tuple[int, ...]

    def __call__(self, a: Array) -> Array:
        return a.reshape(self.shape).transpose(self.order).reshape(self.seen)

    def undo(self, a: Array, shape: Sequence[int]) -> Array:
        """The inverse, for an array that had this `shape`."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        a = a.reshape([self.shape[i] for i in self.order])
        return a.transpose(back).reshape(shape)


class Use(NamedTuple):
    """What an array is used as: in terms of its own axes, so that two uses with the same
    `weight` and `form` have the same canonical matrix.

    `groups`, `out` and `into` are the factors of its axes by the part they play. The form
    is that of one use; only the strides and paddings of convolutions are not the same in
    all uses of one array.
    """

    form: AbstractForm
    weight: Leaf
    groups: tuple[Factor, ...]
    out: tuple[Factor, ...]
    into: tuple[Factor, ...]

    @property
    def kind(self) -> Any:
        """What two uses must have in common to be of the same matrix."""
        if isinstance(self.form, Convolution):
            return self.form.kernel, self.form.channel_groups, self.weight
        return self.groups, self.out, self.into, self.weight.window

    @property
    def transposed(self) -> Any:
        """The `kind` of a use of the transposed matrix."""
        return self.groups, self.into, self.out, self.weight.window


class Site(NamedTuple):
    """A place in a program where an array of parameters multiplies data."""

    parameter: int
    stack: int  # How many leading axes of the array loops have gone along.
    use: Use
    x: Array  # Arranged for the form.
    outputs: Arrangement
    channels: frozenset  # Which axes of `outputs.shape` belong to the array.
    # Over how many of the first axes of `x`, and of the arranged outputs, there is a map.
    mapped: int = 0
    constant: bool = False  # Whether `x` is the same for all data.
    mask: Mask | None = None  # Which entries of the array are not zero.


def contraction(eqn: Equation, side: int, axes: Axes, x: Array) -> tuple | None:
    """A `dot_general` of which operand `side` is an array with these `axes`, and the
    other one is `x`: the use, the arranged `x`, how the result is arranged, which of its
    axes belong to the array, and over how many axes the form is mapped. `None` if no form
    fits."""
    contracting, batch = eqn.params["dimension_numbers"]
    own, other = contracting[side], contracting[1 - side]
    own_batch, other_batch = batch[side], batch[1 - side]
    if axes.flips:
        return None
    free = [i for i in range(len(axes.axes)) if i not in (*own, *own_batch)]
    free_x = [i for i in range(x.ndim) if i not in (*other, *other_batch)]
    if any(axes.axes[i] is None for i in (*own, *free)):  # Sums, or copies, of results.
        return None
    of_batch = [axes.axes[i] for i in own_batch]
    # An axis that is not the array's is a position, known by where it is in `x`.
    inputs: list[Axis | int] = list(range(x.ndim))
    for i, j in zip((*own, *own_batch), (*other, *other_batch), strict=True):
        inputs[j] = j if axes.axes[i] is None else axes.axes[i]  # pyright: ignore
    frees: list[list] = [[axes.axes[i] for i in free], free_x]
    results = [*(inputs[j] for j in other_batch), *frees[side], *frees[1 - side]]
    roles = Roles.of(of_batch, [axes.axes[i] for i in free], [axes.axes[i] for i in own])
    form = GROUPED if roles.groups else Dense()
    use = Use(form, roles.leaf(axes, (roles.groups, roles.out, roles.into)), *roles)
    x_arranged, _ = roles.arranged(inputs, x.shape, roles.into)
    aval: Any = eqn.outvars[0].aval
    outputs, channels = roles.arranged(results, aval.shape, roles.out)
    return use, x_arranged(x), outputs, channels, _positions(use, outputs)


def _positions(use: Use, outputs: Arrangement) -> int:
    """How many positions there are before the axes of outputs (and groups)."""
    return len(outputs.seen) - (3 if use.groups else 1)


class Roles(NamedTuple):
    """The factors of an array's axes, by the part they play in an operation."""

    groups: tuple[Factor, ...]  # Maps side by side.
    out: tuple[Factor, ...]
    into: tuple[Factor, ...]

    @classmethod
    def of(cls, *parts: Sequence[Axis | None]) -> "Roles":
        """The factors of some axes each."""
        return cls(*(merged([f for axis in part for f in axis or ()]) for part in parts))

    def leaf(self, axes: Axes, order: Sequence[Sequence[Factor]]) -> Leaf:
        """The array as a matrix, or several: an axis for each sequence in `order` (for
        groups, if there are any)."""
        wanted = [f for part in order for f in part]
        sizes = [math.prod(f.size for f in part) for part in order]
        seen = tuple(sizes if self.groups or len(order) < 3 else sizes[1:])
        return leaf_of(axes, wanted, seen)

    def arranged(
        self, axes: Sequence[Axis | int], shape: Sequence[int], features: Sequence[Factor]
    ) -> tuple[Arrangement, frozenset]:
        """How data (or results) with these axes are arranged as `[*positions, groups, 1,
        features]`, or `[*positions, features]` if there are no groups; and which of the
        axes that they are first reshaped to belong to the array. (A number stands for an
        axis that does not, a position: these are in the order of their numbers.)"""
        pieces: list[Any] = []
        sizes: list[int] = []
        for axis, length in zip(axes, shape, strict=True):
            for piece in (axis,) if isinstance(axis, int) else axis:
                pieces.append(piece)
                sizes.append(length if isinstance(piece, int) else piece.size)
        key = lambda i: (pieces[i].axis, -pieces[i].stride)
        there = [i for i, piece in enumerate(pieces) if not isinstance(piece, int)]
        is_feature = {i: _within(pieces[i], features) for i in there}
        last = sorted([i for i in there if is_feature[i]], key=key)
        first = sorted([i for i in there if not is_feature[i]], key=key)
        positions = [i for i, piece in enumerate(pieces) if isinstance(piece, int)]
        positions.sort(key=pieces.__getitem__)
        product = lambda places: math.prod(sizes[i] for i in places)
        seen = (product(first), 1, product(last)) if self.groups else (product(last),)
        seen = (*[sizes[i] for i in positions], *seen)
        arrangement = Arrangement(tuple(sizes), (*positions, *first, *last), seen)
        return arrangement, frozenset(there)


def _within(piece: Any, factors: Sequence[Factor]) -> bool:
    """Whether a factor is part of one of these, which neighbours may have joined."""
    return any(
        f.axis == piece.axis and f.stride <= piece.stride < f.stride * f.size
        for f in factors
    )


def leaf_of(axes: Axes, order: Sequence[Factor], seen: tuple[int, ...]) -> Leaf:
    """The window of an array that `axes` are of, with these factors in this order."""
    stored = sorted(order, key=lambda f: (f.axis, -f.stride))
    shape = tuple(f.size for f in stored)
    places = tuple(stored.index(f) for f in order)
    return Leaf("", axes.window, shape, places, seen)


def lookup(eqn: Equation, axes: Axes, index: Array) -> tuple | None:
    """A `gather` of whole rows, or columns, of an array, as `contraction`."""
    params, shape = eqn.params, axes.shape
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    mapped, collapsed = tuple(numbers.start_index_map), numbers.collapsed_slice_dims
    clamps = params["mode"] == jax.lax.GatherScatterMode.CLIP
    cut = [i for i, n in enumerate(sizes) if n != shape[i]]
    if (
        len(cut) != 1
        or sizes[cut[0]] != 1
        or cut[0] not in mapped
        or tuple(collapsed) not in ((), tuple(cut))
        or numbers.operand_batching_dims
        or (len(mapped) > 1 and not clamps)  # Indices of whole axes would matter.
    ):
        return None
    (along,) = cut
    others = [axis for i, axis in enumerate(axes.axes) if i != along]
    there = [i for i in range(len(shape)) if i not in collapsed]
    aval: Any = eqn.outvars[0].aval
    results: list[Any] = list(range(len(aval.shape)))
    for place, i in zip(numbers.offset_dims, there, strict=True):
        results[place] = () if i == along else axes.axes[i]
    index = index[..., mapped.index(along)]
    return _looked_up(axes, along, others, results, aval.shape, index, clamps)


def row(eqn: Equation, axes: Axes, along: int, index: Array) -> tuple | None:
    """A `dynamic_slice` of one row, as `contraction`."""
    others = [axis for i, axis in enumerate(axes.axes) if i != along]
    results = [() if i == along else axis for i, axis in enumerate(axes.axes)]
    aval: Any = eqn.outvars[0].aval
    return _looked_up(axes, along, others, results, aval.shape, index, True)


def _looked_up(
    axes: Axes,
    along: int,
    others: list,
    results: list,
    shape: tuple,
    index: Array,
    clamps: bool,
) -> tuple | None:
    rows = axes.axes[along]
    if axes.flips or axes.copied or not rows:
        return None
    # Roles have the factors of rows in the order of the array, and an index must have it,
    # too.
    if [*rows] != sorted(rows, key=lambda f: (f.axis, -f.stride)):
        return None
    roles = Roles.of([], others, [rows])
    number, index = axes.shape[along], index.astype(int)
    # Here, negative indices do not count from the end any more.
    if clamps:
        index = jnp.clip(index, 0, number - 1)
    else:
        index = jnp.where((index >= 0) & (index < number), index, number)
    form = Lookup(number, clamps)
    use = Use(form, roles.leaf(axes, (roles.into, roles.out)), *roles)
    outputs, channels = roles.arranged(results, shape, roles.out)
    return use, index, outputs, channels, _positions(use, outputs)


def convolution(eqn: Equation, axes: Axes, x: Array) -> tuple | None:
    """A convolution with an array as its kernel, as `contraction`."""
    p = eqn.params
    x_spec, kernel_spec, y_spec = p["dimension_numbers"]
    arranged = axes.transpose(kernel_spec)
    parts = arranged.axes
    flipped = tuple(
        i for i, axis in enumerate(parts) if axis and axis[0].axis in axes.flips
    )
    if (
        p["batch_group_count"] != 1
        or axes.copied
        or not {*flipped} <= {*range(2, x.ndim)}
    ):
        return None
    if any(len(axis or ()) > 1 for axis in parts) and flipped:
        return None
    groups = p["feature_group_count"]
    form = Convolution(
        arranged.shape[2:],
        p["window_strides"],
        p["rhs_dilation"],
        groups,
        tuple((int(low), int(high)) for low, high in p["padding"]),
        input_dilation=p["lhs_dilation"],
    )
    weight = leaf_of(axes, arranged.factors, arranged.shape)
    if flipped:
        places = [i for i, axis in enumerate(a for a in parts if a) if _is_in(axis, axes)]
        weight = Leaf(*_fields(weight), flips=tuple(places))
    roles = Roles.of([], [parts[0]], parts[1:])
    aval: Any = eqn.outvars[0].aval
    y_shape = tuple(aval.shape[i] for i in y_spec)
    x = x.transpose(x_spec)
    mapped = x.shape[0] > 1
    seen = y_shape if mapped else y_shape[1:]
    # The axis of channels is in one piece: a bias is added along it.
    outputs = Arrangement(tuple(aval.shape), tuple(y_spec), seen)
    use = Use(form, weight, *roles)
    return use, x if mapped else x[0], outputs, frozenset({y_spec[1]}), int(mapped)


def _is_in(axis: Axis, axes: Axes) -> bool:
    return axis[0].axis in axes.flips


def _fields(leaf: Leaf) -> tuple:
    return leaf.name, leaf.window, leaf.shape, leaf.order, leaf.seen


def matrix_key(form: AbstractForm, leaf: Leaf) -> tuple:
    """A key that two uses of an array have in common if they make the same matrix of it.

    For a convolution, the key is all that says how the kernel is arranged. Otherwise, it
    is the window of the array, the shape to which the window is first reshaped, and which
    axes of that shape are groups, outputs and inputs. These are always in this order,
    whatever the order is in which the form wants the axes.
    """
    if isinstance(form, Convolution):
        kernel = form.kernel, form.channel_groups
        return kernel, leaf.window, leaf.shape, leaf.order, leaf.flips, leaf.seen
    # The form sees axes of the lengths `leaf.seen`. Each of them consists of one or more
    # axes of `leaf.shape`, which are taken in `leaf.order` until their lengths multiply
    # to its length.
    joined_axes, remaining = [], list(leaf.order)
    for size in leaf.seen:
        taken, product = [], 1
        while product < size:
            taken.append(remaining.pop(0))
            product *= leaf.shape[taken[-1]]
        joined_axes.append(tuple(taken))
    if isinstance(form, Lookup):  # The weight of a lookup has its inputs first.
        joined_axes = joined_axes[::-1]
    groups = joined_axes[0] if form == GROUPED else ()
    return leaf.window, leaf.shape, groups, joined_axes[-2], joined_axes[-1]


def transposed_key(key: tuple) -> tuple:
    """The key of the transpose of a matrix, if `key` is not that of a convolution."""
    *others, outputs, inputs = key
    return *others, inputs, outputs
