"""How the axes of an array come from those of another one: by transposing, reshaping,
slicing and reversing. An axis is a sequence of factors of axes of the original array, the
slowest first; axes of length one have none."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Factor(NamedTuple):
    """A factor of an axis of the original array: the index along that axis is the sum of
    `stride` times the index along the factor."""

    axis: int
    stride: int
    size: int


Axis = tuple[Factor, ...]


class Axes(NamedTuple):
    """The axes of an array, in terms of those of the original one.

    `None` in the place of an axis is one along which copies have been made. `window` is
    `(start, stop)` along every original axis, and `lengths` are the lengths of these.
    `flips` are the original axes that have been reversed, and `shape` are the lengths of
    all axes as they are now.
    """

    axes: tuple[Axis | None, ...]
    window: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    flips: frozenset[int] = frozenset()

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Axes":
        """An array's own axes."""
        axes = tuple((Factor(i, 1, n),) if n != 1 else () for i, n in enumerate(shape))
        return cls(axes, tuple((0, n) for n in shape), tuple(shape), tuple(shape))

    @property
    def factors(self) -> list[Factor]:
        """All factors, in the order in which they are."""
        return [factor for axis in self.axes for factor in axis or ()]

    @property
    def copied(self) -> bool:
        """Whether there are copies of the array."""
        return None in self.axes

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the window is missing, and it is there once."""
        lengths = math.prod(stop - start for start, stop in self.window)
        return math.prod(f.size for f in self.factors) == lengths

    def transpose(self, permutation: Sequence[int]) -> "Axes":
        axes = tuple(self.axes[i] for i in permutation)
        return self._replace(axes=axes, shape=tuple(self.shape[i] for i in permutation))

    def without(self, gone: Sequence[int]) -> "Axes":
        """Without some axes, of length one."""
        kept = [i for i in range(len(self.axes)) if i not in gone]
        return self.transpose(kept)

    def broadcast(self, shape: Sequence[int], places: Sequence[int]) -> "Axes":
        """With new axes; the old ones are at `places`. Those of length one may grow."""
        axes: list[Axis | None] = [() if n == 1 else None for n in shape]
        for axis, length, place in zip(self.axes, self.shape, places, strict=True):
            axes[place] = axis if length == shape[place] else None
        return self._replace(axes=tuple(axes), shape=tuple(shape))

    def reshape(self, shape: Sequence[int]) -> "Axes | None":
        """In another shape; `None` if its axes cannot be written as factors."""
        pieces: list[Factor | int] = []  # The factors; a number for an axis of copies.
        for axis, length in zip(self.axes, self.shape, strict=True):
            pieces += [length] if axis is None else list(axis)
        new: list[Axis | None] = []
        for length in shape:
            taken, missing = [], length
            while missing > 1:
                if not pieces:
                    return None
                piece = pieces.pop(0)
                if isinstance(piece, int):
                    if piece != length or taken:
                        return None
                    taken, missing = None, 1
                    break
                if missing % piece.size == 0:
                    taken.append(piece)
                    missing //= piece.size
                elif piece.size % missing == 0:
                    inner = piece.size // missing
                    outer = Factor(piece.axis, piece.stride * inner, missing)
                    pieces.insert(0, Factor(piece.axis, piece.stride, inner))
                    taken.append(outer)
                    missing = 1
                else:
                    return None
            new.append(None if taken is None else tuple(taken))
        return None if pieces else self._replace(axes=tuple(new), shape=tuple(shape))

    def slice(self, starts: Sequence[int], stops: Sequence[int]) -> "Axes | None":
        """A contiguous part; `None` if it is not one of the original array, too."""
        axes, window = list(self.axes), list(self.window)
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if stop - start == self.shape[i]:
                continue
            axis = axes[i]
            if axis is None:  # Fewer copies.
                axes[i] = () if stop - start == 1 else None
                continue
            if len(axis) != 1 or axis[0].axis in self.flips:
                return None
            ((original, stride, size),) = axis
            first, last = window[original]
            if size * stride != last - first:  # Every so many entries.
                return None
            window[original] = first + start * stride, first + stop * stride
            axes[i] = (
                () if stop - start == 1 else (Factor(original, stride, stop - start),)
            )
        shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
        return self._replace(axes=tuple(axes), window=tuple(window), shape=shape)

    def reverse(self, dimensions: Sequence[int]) -> "Axes | None":
        """Reversed along some axes; `None` if these are no whole axes of the original."""
        flips = set(self.flips)
        for i in dimensions:
            axis = self.axes[i]
            if axis in ((), None):
                continue
            if len(axis) != 1 or axis[0].stride != 1:
                return None
            ((original, _, size),) = axis
            first, last = self.window[original]
            if size != last - first:
                return None
            flips ^= {original}
        return self._replace(flips=frozenset(flips))


def merged(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Factors in the order of the original array, neighbours in one."""
    result: list[Factor] = []
    for axis, stride, size in sorted(factors, key=lambda f: (f.axis, -f.stride)):
        if result and result[-1].axis == axis and result[-1].stride == stride * size:
            size *= result.pop().size
        result.append(Factor(axis, stride, size))
    return tuple(result)
