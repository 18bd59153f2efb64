"""Which axes of a layer's output become axes of the losses' terms.

That an axis counts the examples does not follow from its length: a grid of points may
have as many. So the losses' outputs are followed backwards through the program. Every
array has the axes of the terms (the first of which counts the examples) that its own axes
*become*: entry $n$ along the one is used for the terms at $n$ along the other, whatever
other entries are used there, too.

Where an operation is not understood, what happens to an axis is *unknown*, and nothing is
claimed of it. Nor is anything claimed of an axis over which a sum is taken: each entry
may still be used for a single one of the terms, if the other factors of a product, such
as the edges of a graph, are zero elsewhere.

An array may be used in several ways. What is said of its axes is so in one of them. If
the others say something else, the axes of terms are *mixed*.
"""

import functools as ft
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Reach(NamedTuple):
    """Which axes of the losses' terms the axes of an array become. Axes of terms are the
    bits of an integer: those of the first loss the lowest, then those of the others.
    Above these, at `SUMMED`, are the axes of terms that an axis may become although sums
    are taken over it; then, at `POOLED`, those all along which such a sum is used (a mean
    over the batch, say); at `LACKING` those that an axis does not become in one way to
    the losses, but in another; and at `JOINED` those of which it becomes a part: every
    place along these has an entry of it, whichever. It may be joined to them with others
    (all points of a grid in a row), or its entries are looked up.

    **Fields:**

    - `axes`: for every axis of the array, the axes of terms that it becomes.
    - `loops`: for every loop around the operation that makes the array, from the
        outermost, the axes of terms that the rounds of the loop become.
    - `unknown`: the axes of terms of which it is not known which axis or loop becomes
        them.
    - `terms`: all axes of the terms of the losses that depend on the array.
    - `mixed`: the axes of terms that in one way to the losses something else becomes
        than in another, or along which entries are used for other places than their own.
    """

    axes: tuple[int, ...]
    loops: tuple[int, ...] = ()
    unknown: int = 0
    terms: int = 0
    mixed: int = 0

    def moved(self, axes: Sequence[int], lost: int = 0) -> "Reach":
        """The reach of an operand with these `axes`, if `lost` are axes of terms that
        became unknown."""
        return self._replace(axes=tuple(axes)).doubting(lost)

    def keeping(self, axes: Sequence[int], parts: int = 0) -> "Reach":
        """The reach of an operand with these `axes`: of what the result's axes become and
        none of these does, nothing is known; but for those of which some became `parts`.
        """
        lost = _union(self.axes) & ~_union(axes) & ~parts
        return self.moved(axes, lost | _fewer_parts(self.axes, axes))

    def doubting(self, lost: int) -> "Reach":
        """This reach, with the axes of terms that are `lost` unknown."""
        return self._replace(unknown=self.unknown | terms_of(lost) | parts_of(lost))

    def mixing(self, bits: int) -> "Reach":
        """This reach, with the axes of terms in `bits` mixed."""
        return self._replace(mixed=self.mixed | terms_of(bits))

    @property
    def known(self) -> int:
        """All axes of terms that an axis of the array becomes, or may become, or becomes
        a part of."""
        return terms_of(_union(self.axes)) | parts_of(_union(self.axes))

    @property
    def joined(self) -> int:
        """The axes of terms of which an axis of the array, or a loop, becomes a part."""
        return parts_of(_union(self.axes) | _union(self.loops))

    @property
    def summed(self) -> int:
        """What is known of an axis over which a sum is taken, whose result has this
        reach."""
        return self.known << SUMMED | self.served << POOLED

    @property
    def served(self) -> int:
        """The axes of terms all along which every entry of the array is used."""
        looped = terms_of(_union(self.loops)) | self.joined
        return self.terms & ~(self.known | looped | self.unknown)


SUMMED = 1024  # Terms that are told apart have no more axes.
POOLED = 2 * SUMMED
LACKING = 3 * SUMMED
JOINED = 4 * SUMMED
_ALL = (1 << SUMMED) - 1


def terms_of(bits: int) -> int:
    """The axes of terms that an axis becomes, or may become."""
    return (bits | bits >> SUMMED) & _ALL


def parts_of(bits: int) -> int:
    """The axes of terms of which an axis becomes a part."""
    return bits >> JOINED & _ALL


# `None`, if no output depends on the array, or none with a gradient.
Reached = Reach | None


def either(a: Reached, b: Reached) -> Reached:
    """The reach of an array that is used twice."""
    if a is None or b is None:
        return a if b is None else b
    axes = tuple(map(operator.or_, a.axes, b.axes))
    loops = tuple(map(operator.or_, a.loops, b.loops))
    unknown, terms, mixed = a.unknown | b.unknown, a.terms | b.terms, a.mixed | b.mixed
    both = a.terms & b.terms  # Of other losses, only one of the ways can say anything.
    pairs = [*zip(a.axes, b.axes, strict=True), *zip(a.loops, b.loops, strict=True)]
    for x, y in pairs:
        mixed |= both & (x ^ y)
    sure = both & ~(unknown | a.joined | b.joined)
    lacking = [sure & (terms_of(x) ^ terms_of(y)) for x, y in pairs]
    axes = tuple(bits | new << LACKING for bits, new in zip(axes, lacking))
    return Reach(axes, loops, unknown, terms, mixed)


def _union(bits: Sequence[int]) -> int:
    return ft.reduce(operator.or_, bits, 0)


def _fewer_parts(before: Sequence[int], after: Sequence[int]) -> int:
    """The axes of terms of which not as many axes become a part as `before`. (Several
    become a part of the same one, so that it is not enough if any does.)"""
    lost, left = 0, parts_of(_union(before))
    while left:
        first = left & -left
        left ^= first
        numbers = [sum(parts_of(a) & first > 0 for a in axes) for axes in (before, after)]
        lost |= first if numbers[1] < numbers[0] else 0
    return lost


class Call(NamedTuple):
    """An operation: its name, its parameters, the shapes of its operands, and that of the
    result whose reach is known."""

    name: str
    params: dict[str, Any]
    operands: list[tuple[int, ...]]
    result: tuple[int, ...]


#
# Rules: the reach of an operation's operands, given one of its results
#


def aligned(call: Call, out: Reach) -> list[Reached]:
    """For operations whose operands have the axes of the result: operations on every
    entry, and others that change lengths, such as slices and windows. A number, which all
    entries use, becomes no axis."""

    def operand(shape):
        if shape == ():
            return out.moved(())
        if len(shape) != len(call.result):
            return _lost(shape, out)
        axes, lost = [], 0
        for length, result, bits in zip(shape, call.result, out.axes, strict=True):
            if length == result:
                axes.append(bits)
            elif length == 1 and call.name in _REPEATING:
                axes.append(0)
            else:  # Entries have other places in the result, or none.
                axes.append(terms_of(bits) << SUMMED)
                lost |= parts_of(bits)
        return out.moved(axes, lost)

    return list(map(operand, call.operands))


def unknown(call: Call, out: Reach) -> list[Reached]:
    return [_lost(shape, out) for shape in call.operands]


def _lost(shape: Sequence[int], out: Reach) -> Reach:
    """The reach of an operand of which nothing is known."""
    return out.keeping([0] * len(shape))


def _stopped(call: Call, out: Reach) -> list[Reached]:
    """No gradient flows."""
    return [None] * len(call.operands)


def _transpose(call: Call, out: Reach) -> list[Reached]:
    axes = [0] * len(out.axes)
    for place, axis in enumerate(call.params["permutation"]):
        axes[axis] = out.axes[place]
    return [out.moved(axes)]


def _broadcast(call: Call, out: Reach) -> list[Reached]:
    x, *others = call.operands
    places = call.params["broadcast_dimensions"]
    pairs = zip(x, places, strict=True)
    axes = [out.axes[p] if n == call.result[p] else 0 for n, p in pairs]
    return [out.moved(axes), *[None] * len(others)]


def _squeeze(call: Call, out: Reach) -> list[Reached]:
    (x,) = call.operands
    rest = iter(out.axes)
    gone = call.params["dimensions"]
    return [out.moved([0 if i in gone else next(rest) for i in range(len(x))])]


def _reshape(call: Call, out: Reach) -> list[Reached]:
    """An axis stays one if it is as long as before, and so is all that is behind it; and
    several may be joined to one. (Column by column, `order="F"`, axes are permuted before
    they are.)"""
    x, *others = call.operands
    order = call.params["dimensions"]
    order = range(len(x)) if order is None else order
    ends = {axis: _ends([x[a] for a in order], i) for i, axis in enumerate(order)}
    axes, lost = [0] * len(x), 0
    for i, bits in enumerate(out.axes):
        first, last = _ends(call.result, i)
        inside = [a for a in order if x[a] > 1 and _within(ends[a], (first, last))]
        if not inside or math.prod(x[a] for a in inside) != call.result[i]:
            lost |= bits
        elif len(inside) == 1:
            axes[inside[0]] = bits
        else:
            part, uncertain = _part(bits)
            lost |= uncertain
            for axis in inside:
                axes[axis] = part
    lost = lost & ~_union(axes) | parts_of(lost)
    return [out.moved(axes, lost), *[None] * len(others)]


def _ends(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """How many entries of an array, in a row, one step along an axis goes past, and how
    many all of its steps do."""
    step = math.prod(shape[axis + 1 :])
    return step * shape[axis], step


def _within(part: tuple[int, int], whole: tuple[int, int]) -> bool:
    return part[0] <= whole[0] and part[1] >= whole[1]


def _part(bits: int) -> tuple[int, int]:
    """What is known of an axis that becomes a part of one of which `bits` are known; and
    what of these is not known any more."""
    return (bits & _ALL | parts_of(bits)) << JOINED, bits & ~(_ALL | _ALL << JOINED)


def _tile(call: Call, out: Reach) -> list[Reached]:
    """An axis that is repeated is joined with one that counts the repetitions."""
    (x,) = call.operands
    axes, lost = [], 0
    for length, repetitions, bits in zip(x, call.params["reps"], out.axes, strict=True):
        part, uncertain = _part(bits) if repetitions > 1 else (bits, 0)
        axes.append(0 if length == 1 and repetitions > 1 else part)
        lost |= uncertain
    return [out.moved(axes, lost)]


def _reordered(call: Call, out: Reach) -> list[Reached]:
    """Along some axes, entries change their places: all that is known is that each place
    has one of them."""
    moved = call.params.get("dimensions", (call.params.get("dimension"),))
    axes, lost = list(out.axes), 0
    for axis in moved:
        axes[axis], uncertain = _part(out.axes[axis])
        lost |= uncertain
    return [out.moved(axes, lost) for _ in call.operands]


def _pad(call: Call, out: Reach) -> list[Reached]:
    """An axis of which as much is taken away as is added is as long, but shifted."""
    config = call.params["padding_config"]
    axes = [0 if any(c) else bits for c, bits in zip(config, out.axes, strict=True)]
    return [out.keeping(axes), out.moved(())]


def _reduce(call: Call, out: Reach) -> list[Reached]:
    x, *others = call.operands
    summed = list(map(int, call.params["axes"]))
    return [_before_sum(x, summed, out), *[None] * len(others)]


def _collective(call: Call, out: Reach) -> list[Reached]:
    """Sums over devices, and over the axes of `vmap` with a name."""
    summed = [int(a) for a in call.params["axes"] if isinstance(a, int | np.integer)]
    fits = lambda shape: len(shape) == len(out.axes) + len(summed)
    return [
        _before_sum(shape, summed, out) if fits(shape) else _lost(shape, out)
        for shape in call.operands
    ]


def _before_sum(shape: Sequence[int], summed: Sequence[int], out: Reach) -> Reach:
    """The reach of what is summed (or the like) over some of its axes."""
    rest = iter(out.axes)
    axes = [out.summed if i in summed else next(rest) for i in range(len(shape))]
    return out.moved(axes)


def _dot_general(call: Call, out: Reach) -> list[Reached]:
    contracted, batch = call.params["dimension_numbers"]
    place, operands = len(batch[0]), []
    for shape, summed, shared in zip(call.operands, contracted, batch, strict=True):
        axes = [0] * len(shape)
        for i, axis in enumerate(shared):
            axes[axis] = out.axes[i]
        for axis in range(len(shape)):
            if axis not in summed and axis not in shared:
                axes[axis] = out.axes[place]
                place += 1
        for axis in summed:
            axes[axis] = out.summed
        operands.append(out.moved(axes))
    return operands


def _accumulated(call: Call, out: Reach) -> list[Reached]:
    """Along an axis, entries are used for their own place, and for others."""
    axis = call.params["axis"]
    return aligned(call, out.mixing(out.axes[axis]))


def _windows(call: Call, out: Reach) -> list[Reached]:
    """Windows of several entries may begin at any of them: nothing is known of an axis
    along which there are such windows."""
    lengths = call.params["window_dimensions"]
    axes = [bits if n == 1 else 0 for n, bits in zip(lengths, out.axes, strict=True)]
    return aligned(call, out.keeping(axes))


def _sliced_somewhere(call: Call, out: Reach) -> list[Reached]:
    """Where a slice begins may be another place in every round of a loop."""
    return aligned(call, out.doubting(_union(out.loops)))


def _convolution(call: Call, out: Reach) -> list[Reached]:
    x, kernel = call.operands
    numbers = call.params["dimension_numbers"]
    if call.params["batch_group_count"] > 1:
        return unknown(call, out)
    axes, lost = [0] * len(x), 0
    # The second axis of a specification is that of the features.
    for i, (own, place) in enumerate(zip(numbers.lhs_spec, numbers.out_spec)):
        if i != 1 and x[own] == call.result[place]:
            axes[own] = out.axes[place]
        else:
            lost |= out.axes[place]
    return [out.moved(axes, lost), _lost(kernel, out)]


def _gather(call: Call, out: Reach) -> list[Reached]:
    x, indices = call.operands
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    batch = [i for i in range(len(out.axes)) if i not in numbers.offset_dims]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = [i for i in range(len(x)) if i not in gone]
    axes = [0] * len(x)
    for axis, place in zip(whole, sorted(numbers.offset_dims), strict=True):
        if sizes[axis] == x[axis]:
            axes[axis] = out.axes[place]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    for axis, place in pairs:
        axes[axis] = out.axes[batch[place]]
    # Each place has one of the entries that are looked up, whichever.
    of_indices = set(range(len(batch))) - {*numbers.start_indices_batching_dims}
    part, _ = _part(_union([out.axes[batch[i]] for i in of_indices]))
    for axis in numbers.collapsed_slice_dims:
        axes[axis] = part
    found = out.keeping(axes, parts_of(_union(axes)))
    # In every round of a loop, other entries may be looked up.
    return [found.doubting(_union(out.loops)), _lost(indices, out)]


def _scatter(call: Call, out: Reach) -> list[Reached]:
    x, indices, updates = call.operands
    numbers = call.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    whole = [i for i in range(len(out.axes)) if i not in gone]
    axes = [0] * len(updates)
    for axis, place in zip(sorted(numbers.update_window_dims), whole, strict=True):
        if updates[axis] == call.result[place]:
            axes[axis] = out.axes[place]
    batch = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    for axis, place in pairs:
        axes[batch[place]] = out.axes[axis]
    return [out, _lost(indices, out), out.keeping(axes)]


# Operations that repeat an operand along an axis of length one.
_REPEATING = frozenset(
    "add add_any and atan2 div eq ge gt le lt max min mul ne or pow rem select_n sub "
    "xor".split()
)
# The names are names of JAX's primitives; a test asks whether JAX still has them.
RULES: dict[str, Callable] = {
    "stop_gradient": _stopped,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "tile": _tile,
    **dict.fromkeys(("rev", "sort"), _reordered),
    "pad": _pad,
    **dict.fromkeys(("top_k", "ppermute", "all_to_all"), unknown),
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _accumulated
    ),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        _windows,
    ),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _sliced_somewhere),
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
        "argmin".split(),
        _reduce,
    ),
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _collective),
}
