"""The inputs of a layer, one for every row, in the shape that is cheapest to hold. (The
first `stack` axes separate layers; then come examples, then positions.)"""

import abc
import functools as ft
import math
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from .._custom_types import Like, Weights
from .._devices import over_stack
from .._misc import accumulator, trailing
from .._module import PlainModule
from .._moments import moment, summed_in_parts


# How many numbers of patches are written out at once: what fits into a CPU's cache, and
# what keeps a GPU busy for longer than it takes to start it.
MOST_PATCHES = 2**18, 2**24


class AbstractInputs(PlainModule):
    """Rows of inputs, of which their moments are wanted. `weights` belong to examples:
    they have the first axes of the rows, or are `None`. `like` is the abstract value of
    the result."""

    @abc.abstractmethod
    def first(
        self, weights: Weights, stack: int, like: Like
    ) -> Inexact[Array, "*stack d_in"]:
        r"""$\sum w x$ over rows."""

    @abc.abstractmethod
    def second(self, weights: Weights, stack: int, like: Like) -> Inexact[Array, "..."]:
        r"""$\sum w x x^\top$ over rows; its diagonal if `like` has no more axes."""

    @abc.abstractmethod
    def vectors(self) -> Inexact[Array, "*rows d_in"]:
        """All rows, written out."""

    def sizes(self) -> Inexact[Array, "*rows"]:
        r"""$\lVert x \rVert^2$ of every row."""
        x = self.vectors()
        return jnp.sum(x.astype(accumulator(x.dtype)) ** 2, axis=-1)

    def mean(self, weights: Weights, axes: int) -> "AbstractInputs":
        """The mean over all axes of the rows but the first `axes`: over the positions of
        every example. Positions of zero weight are left out, as if they were not
        there."""
        x = self.vectors()
        shared = tuple(range(axes, x.ndim - 1))
        if weights is None or weights.ndim <= axes:
            return Vectors(jnp.mean(x, axis=shared))
        w = trailing(weights, x).astype(x.dtype)
        total = jnp.sum(jnp.broadcast_to(w, x.shape[:-1] + (1,)), axis=shared)
        return Vectors(jnp.sum(x * w, axis=shared) / jnp.where(total == 0, 1, total))


class Vectors(AbstractInputs):
    """Rows as they are.

    **Fields:**

    - `x`: the rows, `[*rows, d_in]`.
    """

    x: Inexact[Array, "*rows d_in"]

    def first(
        self, weights: Weights, stack: int, like: Like
    ) -> Inexact[Array, "*stack d_in"]:
        axes = tuple(range(stack, self.x.ndim - 1))
        return jnp.sum(weighted(self.x, weights), axis=axes, dtype=like.dtype)

    def second(self, weights: Weights, stack: int, like: Like) -> Inexact[Array, "..."]:
        wx = weighted(self.x, weights)
        x = self.x.astype(wx.dtype)
        if len(like.shape) == stack + 2:
            return moment(wx, x, stack, like)
        axes = tuple(range(stack, x.ndim - 1))
        return jnp.sum(wx.astype(like.dtype) * x.astype(like.dtype), axis=axes)

    def vectors(self) -> Inexact[Array, "*rows d_in"]:
        return self.x


class Nothing(AbstractInputs):
    """A layer that adds a parameter to what does not depend on it: no inputs at all.

    **Fields:**

    - `rows`: the shape of the axes before the (missing) last one.
    """

    rows: tuple[int, ...] = eqx.field(static=True)

    def first(
        self, weights: Weights, stack: int, like: Like
    ) -> Inexact[Array, "*stack d_in"]:
        return jnp.zeros(like.shape, like.dtype)

    def second(self, weights: Weights, stack: int, like: Like) -> Inexact[Array, "..."]:
        return jnp.zeros(like.shape, like.dtype)

    def vectors(self) -> Inexact[Array, "*rows d_in"]:
        return jnp.zeros(self.rows + (0,))

    def mean(self, weights: Weights, axes: int) -> "AbstractInputs":
        return Nothing(self.rows[:axes])


class OneHot(AbstractInputs):
    r"""Unit vectors, given by where they are 1.

    **Fields:**

    - `index`: where the 1 is, `[*rows]`, integers; nowhere, if that is `size`.
    - `size`: $d_\text{in}$, the length of the vectors.
    """

    index: Int[Array, "*rows"]
    size: int = eqx.field(static=True)

    def first(
        self, weights: Weights, stack: int, like: Like
    ) -> Inexact[Array, "*stack d_in"]:
        w = jnp.ones((), like.dtype) if weights is None else trailing(weights, self.index)
        w = jnp.broadcast_to(w, self.index.shape).astype(like.dtype)

        def count(index, w):
            return jnp.zeros(self.size, like.dtype).at[index].add(w, mode="drop")

        return over_stack(count, stack)(self.index, w)

    def second(self, weights: Weights, stack: int, like: Like) -> Inexact[Array, "..."]:
        if len(like.shape) == stack + 2:
            return Vectors(self.vectors()).second(weights, stack, like)
        return self.first(weights, stack, like)

    def sizes(self) -> Inexact[Array, "*rows"]:
        return (self.index < self.size).astype(float)

    def vectors(self) -> Inexact[Array, "*rows d_in"]:
        return jax.nn.one_hot(self.index, self.size, dtype=jnp.result_type(float))


class Window(eqx.Module):
    """Which positions of an input a convolution's kernel looks at.

    **Fields:**

    - `kernel`: its number of entries along every spatial axis.
    - `stride`: how far neighbouring places of the kernel are apart, along every axis.
    - `dilation`: how far its neighbouring entries are apart, along every axis.
    """

    kernel: tuple[int, ...] = eqx.field(static=True)
    stride: tuple[int, ...] = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)

    def positions(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """How many places there are for the kernel along every axis."""
        sizes = zip(spatial, self.kernel, self.stride, self.dilation, strict=True)
        return tuple(1 + (n - d * (k - 1) - 1) // s for n, k, s, d in sizes)

    def unfold(self, x: Array) -> Inexact[Array, "..."]:
        """What every entry of the kernel sees at every place: `[..., *spatial]` becomes
        `[..., *kernel, *positions]`, one axis after the other."""
        rank = len(self.kernel)
        lead = x.ndim - rank
        for i in range(rank):
            x = jnp.stack(list(self._seen(x, lead + 2 * i, i)), axis=lead + i)
        return x

    def sums(self, x: Array) -> Inexact[Array, "..."]:
        """The sums of that over all places, `[..., *kernel]`."""
        rank, dtype = len(self.kernel), accumulator(x.dtype)
        lead = x.ndim - rank
        for i in range(rank):
            seen = self._seen(x, lead + i, i)
            sums = [jnp.sum(a, axis=lead + i, dtype=dtype) for a in seen]
            x = jnp.stack(sums, axis=lead + i)
        return x

    def sums_at(self, x: Array) -> Inexact[Array, "..."]:
        """The sum of what the kernel sees, at every place: `[..., *positions]`."""
        lead = x.ndim - len(self.kernel)
        for i in range(len(self.kernel)):
            x = ft.reduce(jnp.add, self._seen(x, lead + i, i))
        return x

    def _seen(self, x: Array, axis: int, i: int) -> Iterator[Array]:
        """For every entry along axis `i` of the kernel, its part of `axis` of `x`."""
        k, s, d = self.kernel[i], self.stride[i], self.dilation[i]
        span = (x.shape[axis] - d * (k - 1) - 1) // s * s + 1
        for offset in range(0, k * d, d):
            yield jax.lax.slice_in_dim(x, offset, offset + span, s, axis)


class Patches(AbstractInputs):
    """What a convolution multiplies its kernel with. Written out, a row holds `channels *
    prod(kernel)` numbers.

    **Fields:**

    - `x`: the input of the convolution, `[*lead, channels, *spatial]`, padded already.
    - `window`: which positions the kernel looks at.
    """

    x: Inexact[Array, "..."]
    window: Window

    @property
    def lead(self) -> int:
        """How many axes are before the channels."""
        return self.x.ndim - 1 - len(self.window.kernel)

    def first(
        self, weights: Weights, stack: int, like: Like
    ) -> Inexact[Array, "*stack d_in"]:
        if weights is not None and weights.ndim > self.lead:  # Of positions.
            return Vectors(self.vectors()).first(weights, stack, like)
        sums = self._sums()
        axes = tuple(range(stack, sums.ndim - 1))
        return jnp.sum(weighted(sums, weights), axis=axes, dtype=like.dtype)

    def second(self, weights: Weights, stack: int, like: Like) -> Inexact[Array, "..."]:
        # Patches take as many times the memory of the input as the kernel has entries,
        # and are used once.
        def of(x, w):
            return Vectors(Patches(x, self.window).vectors()).second(w, stack, like)

        rows, size = (self.x, weights), self._size(stack)
        return summed_in_parts(of, rows, stack, size, MOST_PATCHES, like)

    def _size(self, stack: int) -> int:
        """How many numbers are written out of all examples; none if there is no axis of
        these, to be divided."""
        if self.lead == stack:
            return 0
        places = self.window.positions(self.x.shape[self.lead + 1 :])
        entries = self.x.shape[self.lead] * math.prod(self.window.kernel)
        return math.prod(self.x.shape[: self.lead] + places) * entries

    def vectors(self) -> Inexact[Array, "*rows d_in"]:
        return jnp.moveaxis(self._flat(self.window.unfold(self.x)), self.lead, -1)

    def mean(self, weights: Weights, axes: int) -> AbstractInputs:
        number = math.prod(self.window.positions(self.x.shape[self.lead + 1 :]))
        means = Vectors(self._sums() / number)
        return means if self.lead <= axes else means.mean(weights, axes)

    def sizes(self) -> Inexact[Array, "*rows"]:
        x = self.x.astype(accumulator(self.x.dtype))
        return self.window.sums_at(jnp.sum(x**2, axis=self.lead))

    def _sums(self) -> Inexact[Array, "*lead d_in"]:
        """The sums of all rows of one example."""
        return self._flat(self.window.sums(self.x))

    def _flat(self, x: Array) -> Array:
        """Channels and kernel, in the kernel's order, as one axis of features."""
        rest = x.shape[self.lead + 1 + len(self.window.kernel) :]
        return x.reshape(*x.shape[: self.lead], -1, *rest)


def weighted(x: Array, weights: Weights) -> Array:
    """Rows times the weights of their examples."""
    if weights is None:
        return x
    w = trailing(weights, x).astype(accumulator(x.dtype))
    return x.astype(w.dtype) * w
