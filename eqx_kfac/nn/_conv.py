from typing import Any

import equinox as eqx
import numpy as np

from .. import _form
from ._base import TaggedOutputs


class _Conv(TaggedOutputs):
    @staticmethod
    def form(layer: Any) -> _form.Convolution:
        extended = layer.padding_mode != "ZEROS"
        return _form.Convolution(
            layer.kernel_size,
            layer.stride,
            layer.dilation,
            layer.groups,
            "VALID" if extended else layer.padding,
            mode=layer.padding_mode,
            extension=layer.padding if extended else "VALID",
        )


class _ConvTranspose(TaggedOutputs):
    @staticmethod
    def form(layer: Any) -> _form.Convolution:
        padding, extension, mode = layer._padding_transpose(), None, layer.padding_mode
        if mode == "CIRCULAR":  # Whole strides of it before zeros are put in between.
            widths, strides = np.asarray(padding), np.asarray(layer.stride)[:, None]
            extension, padding = _pads(widths // strides), _pads(widths % strides)
        return _form.Convolution(
            layer.kernel_size,
            (1,) * layer.num_spatial_dims,
            layer.dilation,
            layer.groups,
            padding,
            mode=mode,
            extension=extension or "VALID",
            input_dilation=layer.stride,
        )


def _pads(widths: np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in widths)


class Conv(_Conv, eqx.nn.Conv):
    """`equinox.nn.Conv`, with a tag."""


class Conv1d(_Conv, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, with a tag."""


class Conv2d(_Conv, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, with a tag."""


class Conv3d(_Conv, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`, with a tag."""


class ConvTranspose(_ConvTranspose, eqx.nn.ConvTranspose):
    """`equinox.nn.ConvTranspose`, with a tag."""


class ConvTranspose1d(_ConvTranspose, eqx.nn.ConvTranspose1d):
    """`equinox.nn.ConvTranspose1d`, with a tag."""


class ConvTranspose2d(_ConvTranspose, eqx.nn.ConvTranspose2d):
    """`equinox.nn.ConvTranspose2d`, with a tag."""


class ConvTranspose3d(_ConvTranspose, eqx.nn.ConvTranspose3d):
    """`equinox.nn.ConvTranspose3d`, with a tag."""
