import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._dense import join, split
from ._inputs import Patches, Window


Pads = tuple[tuple[int, int], ...]

_modes = {"REFLECT": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


class Convolution(AbstractForm):
    r"""A convolution, as a dense map of patches: a layer with a `weight` of shape
    `[*stack, c_out, c_in / groups, *kernel]` and a `bias` of shape
    `[*stack, c_out, 1, ...]` or `None`, applied to `[c_in, *spatial]`.

    $d_\text{in}$ is the size of a patch, `c_in / groups * prod(kernel)`. Every position
    of the kernel is a shared position of the example. The groups of a grouped convolution
    are layers side by side, $d_\text{out}$ being `c_out / groups`.

    Before the kernel slides over it, the input is extended by `extension` in one of
    NumPy's ways (`mode`), then `input_dilation - 1` zeros are put between its entries
    (for a transposed convolution), then `padding` zeros around it.
    """

    linear = True
    stride: tuple[int, ...] = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    channel_groups: int = eqx.field(static=True)
    padding: str | Pads = eqx.field(static=True)
    mode: str = eqx.field(static=True)
    extension: str | Pads = eqx.field(static=True)
    input_dilation: tuple[int, ...] = eqx.field(static=True)
    kernel: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        channel_groups: int = 1,
        padding: str | Pads = "VALID",
        *,
        mode: str = "ZEROS",
        extension: str | Pads = "VALID",
        input_dilation: tuple[int, ...] | None = None,
    ):
        """**Arguments:**

        - `kernel`, `stride`, `dilation`: one number per spatial axis.
        - `channel_groups`: the number of groups of channels; groups do not interact.
        - `padding`: zeros around the input: `(before, after)` per spatial axis,
            `"VALID"`, `"SAME"` or `"SAME_LOWER"`.
        - `mode`, `extension`: what else is put around the input, and how much:
            `"REFLECT"`, `"REPLICATE"`, `"CIRCULAR"`, or `"ZEROS"` for nothing.
        - `input_dilation`: for a transposed convolution, its stride.
        """
        self.kernel = kernel
        self.stride = stride
        self.dilation = dilation
        self.channel_groups = channel_groups
        self.padding = padding
        self.mode = mode
        self.extension = extension
        self.input_dilation = input_dilation or (1,) * len(kernel)

    @property
    def names(self) -> tuple[str, ...]:
        return "weight", "bias"

    @property
    def groups(self) -> int:
        return int(self.channel_groups > 1)

    def sizes(self, layer: Layer) -> Sizes:
        rank, groups = len(self.kernel), self.channel_groups
        weight, bias = self.parameters(layer)
        if weight is not None:
            shape = weight.shape
            stack, c_out = shape[: -rank - 2], shape[-rank - 2]
            d_in = shape[-rank - 1] * math.prod(self.kernel)
        else:
            stack, c_out = bias.shape[: -rank - 1], bias.shape[-rank - 1]
            d_in = 0
        own = (groups,) if groups > 1 else ()
        return Sizes(stack + own, c_out // groups, d_in, bias is not None)

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> Patches:
        x = self._grouped(self._padded(x), stack, axes)
        return Patches(x, Window(self.kernel, self.stride, self.dilation))

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        z = self._grouped(z, stack, axes)
        return jnp.moveaxis(z, z.ndim - 1 - len(self.kernel), -1)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        sizes = self.sizes(layer)
        weight, bias = self.parameters(layer)
        shape = (*sizes.stack, sizes.d_out)
        return join(
            None if weight is None else weight.reshape(*shape, sizes.d_in),
            None if bias is None else bias.reshape(*shape, 1),
        )

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        weight, bias = split(matrix, *self.parameters(layer))
        return self.replace(layer, (weight, bias))

    def _grouped(self, x: Array, stack: int, axes: int) -> Array:
        """The groups of channels as one more axis of stacked layers."""
        groups = self.channel_groups
        if groups == 1:
            return x
        lead, channels, rest = x.shape[:axes], x.shape[axes], x.shape[axes + 1 :]
        x = x.reshape(*lead, groups, channels // groups, *rest)
        return jnp.moveaxis(x, axes, stack)

    def _padded(self, x: Array) -> Array:
        rank = len(self.kernel)
        none = [(0, 0)] * (x.ndim - rank)
        if self.mode != "ZEROS":
            widths = self._widths(self.extension, x)
            x = jnp.pad(x, [*none, *widths], _modes[self.mode])
        widths = self._widths(self.padding, x)
        zeros = zip(widths, self.input_dilation, strict=True)
        config = [(0, 0, 0)] * len(none) + [(lo, hi, d - 1) for (lo, hi), d in zeros]
        return jax.lax.pad(x, jnp.zeros((), x.dtype), config)

    def _widths(self, padding: str | Pads, x: Array) -> Pads:
        if not isinstance(padding, str):
            return padding
        reach = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation)]
        spatial = x.shape[x.ndim - len(self.kernel) :]
        return tuple(jax.lax.padtype_to_pads(spatial, reach, self.stride, padding))
