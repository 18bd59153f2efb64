import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer, Weights
from ._base import AbstractForm, Rows, Sizes
from ._inputs import AbstractInputs
from ._mask import Mask


class Leaf(eqx.Module):
    """An array of a layer, seen as the parameter that a form expects: a window of it,
    reshaped, transposed, flipped, and reshaped again. Leading axes of stacked layers stay
    where they are.

    **Fields:**

    - `name`: the name of the array.
    - `window`: `(start, stop)` along each of its own axes.
    - `shape`: what the window is reshaped to.
    - `order`: the order in which the axes of `shape` then are.
    - `flips`: the axes along which the result is reversed.
    - `seen`: the shape that it is given in the end.
    """

    name: str = eqx.field(static=True)
    window: tuple[tuple[int, int], ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    order: tuple[int, ...] = eqx.field(static=True)
    seen: tuple[int, ...] = eqx.field(static=True)
    flips: tuple[int, ...] = eqx.field(static=True, default=())

    @property
    def rank(self) -> int:
        """How many axes the array has in one layer."""
        return len(self.window)

    def read(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The array, as the form sees it."""
        lead = array.ndim - self.rank
        stack = array.shape[:lead]
        part = array[self._index].reshape(*stack, *self.shape)
        part = part.transpose(*range(lead), *(lead + i for i in self.order))
        part = jnp.flip(part, [lead + i for i in self.flips]) if self.flips else part
        return part.reshape(*stack, *self.seen)

    def write(
        self, array: Shaped[Array, "..."], seen: Shaped[Array, "..."]
    ) -> Shaped[Array, "..."]:
        """The inverse of `read`: `array`, whose window is taken from `seen`."""
        lead = array.ndim - self.rank
        stack = array.shape[:lead]
        part = seen.reshape(*stack, *(self.shape[i] for i in self.order))
        part = jnp.flip(part, [lead + i for i in self.flips]) if self.flips else part
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        part = part.transpose(*range(lead), *(lead + i for i in back))
        lengths = tuple(stop - start for start, stop in self.window)
        part = part.reshape(*stack, *lengths).astype(array.dtype)
        if part.shape == array.shape:
            return part
        return array.at[self._index].set(part)

    @property
    def _index(self) -> tuple[Any, ...]:
        return ..., *(slice(start, stop) for start, stop in self.window)


class _Inner(eqx.Module):
    """A layer as the form within expects it."""

    weight: Any
    bias: Any


class View(AbstractForm):
    """Arrays of any layer, in the place of the `weight` and the `bias` of another form: a
    matrix that multiplies from the left or from the right, one that is split into heads
    or into queries, keys and values, the kernel of a convolution in any layout.
    [`eqx_kfac.convert`][] makes it, of what a program does with an array.

    **Fields:**

    - `form`: what the arrays are used as, [`eqx_kfac.form.Dense`][] for instance.
    - `weight`, `bias`: where its two parameters are. The bias may be `None`.
    """

    form: AbstractForm
    weight: Leaf
    bias: Leaf | None = None

    @property
    def label(self) -> str:
        """The name, with that of what the arrays are used as: `View(Dense)`."""
        return f"{type(self).__name__}({self.form.label})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self._leaves)

    @property
    def linear(self) -> bool:  # pyright: ignore
        return self.form.linear

    @property
    def groups(self) -> int:
        return self.form.groups

    @property
    def mask(self) -> Mask | None:
        return self.form.mask

    def sizes(self, layer: Layer) -> Sizes:
        return self.form.sizes(self._inner(layer))

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> AbstractInputs:
        return self.form.inputs(x, stack, axes)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return self.form.outputs(z, stack, axes)

    def rows(self, x: Array, g: Array, weights: Weights, stack: int, axes: int) -> Rows:
        return self.form.rows(x, g, weights, stack, axes)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        return self.form.to_matrix(self._inner(layer))

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        inner = self._inner(layer)
        new = self.form.from_matrix(matrix, inner)
        for leaf, seen in zip(self._leaves, (new.weight, new.bias), strict=False):
            array = self.parameters(layer)[self.names.index(leaf.name)]
            if array is not None:
                layer = self._with(layer, leaf.name, leaf.write(array, seen))
        return layer

    @property
    def _leaves(self) -> tuple[Leaf, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def _inner(self, layer: Layer) -> _Inner:
        arrays = self.parameters(layer)
        seen = [
            None if array is None else leaf.read(array)
            for leaf, array in zip(self._leaves, arrays, strict=True)
        ]
        return _Inner(*seen, *[None] * (2 - len(seen)))

    def _with(self, layer: Layer, name: str, array: Array) -> Any:
        new = tuple(array if name == own else None for own in self.names)
        return self.replace(layer, new)


def size_of(leaf: Leaf) -> int:
    """How many numbers there are in the window of `leaf`."""
    return math.prod(stop - start for start, stop in leaf.window)
