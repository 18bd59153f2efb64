"""What makes a layer of Equinox a tagged one. Two ways: the tag ends the layer's forward
pass, which is linear in its parameters; or it begins it, at the parameters themselves."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import numpy as np

from .._block import AbstractBlock, check_block, Diagonal, Kronecker
from .._custom_types import Layer
from .._jax import transposed_padding
from .._tag import Tag
from ..form import AbstractForm, Convolution, Dense, Lookup, Parameters
from ._inputs import check_floating, check_input


class AbstractTagged(eqx.Module):
    """A layer with a tag, made as the layer of Equinox that it is a subclass of.

    **Fields:**

    - `tag`: an [`eqx_kfac.Tag`][], or a dictionary of several by name.
    - `default`: the block of a layer of this class, unless another one is given.
    """

    tag: eqx.AbstractVar[Any]
    default: ClassVar[AbstractBlock]

    # Subclasses have a constructor, too: else, type checkers make one from the fields.
    def __init__(self, *args: Any, block: AbstractBlock | None = None, **kwargs: Any):
        """**Arguments:**

        - `args`, `kwargs`: as for the layer of Equinox.
        - `block`: how its curvature is approximated. `None`: by `default`.

        **Raises:** `TypeError` for something of another kind.
        """
        super().__init__(*args, **kwargs)
        if block is not None:
            check_block("block", block)
        self.tag = type(self).tags(self, self.default if block is None else block)

    @classmethod
    @abc.abstractmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> Tag | dict[str, Tag]:
        """The tag of a layer of the Equinox type."""

    @staticmethod
    def supports(layer: Layer) -> bool:
        """Whether this layer of the Equinox type can have one."""
        return True


class TaggedOutputs(AbstractTagged):
    """A layer that is linear in its parameters: the tag is at its outputs."""

    tag: Tag
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> Tag:
        form = form_of(layer)
        assert form is not None
        return Tag(form, block)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        check_input(self, x)
        if self.tag.collecting:
            self.check_dtype(x)
        layer = self.tag.covered(self)
        y = super(TaggedOutputs, layer).__call__(x, key=key)  # pyright: ignore
        return self.tag(y, x)

    def check_dtype(self, x: Any) -> None:
        """Raises if there is no curvature of inputs of this type."""
        check_floating(self, x)


class TaggedParameters(AbstractTagged):
    """Any other layer: the tag is at its parameters, once for every example."""

    tag: Tag
    default = Diagonal()

    @staticmethod
    @abc.abstractmethod
    def ranks(layer: Layer) -> dict[str, int]:
        """The names of the layer's parameters, and how many axes they have (in one layer;
        stacked ones have more)."""

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> Tag:
        return Tag(Parameters(**cls.ranks(layer)), block)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        check_input(self, x)
        layer = self.tag.parameters(self, x)
        return super(TaggedParameters, layer).__call__(x, *args, **kwargs)  # pyright: ignore


def with_fields_of(cls: type, layer: Layer, **extra: Any) -> Any:
    """An instance of `cls` with the fields of `layer`, without running an `__init__`."""
    new = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = extra[field.name] if field.name in extra else getattr(layer, field.name)
        object.__setattr__(new, field.name, value)
    return new


def form_of(layer: Layer) -> AbstractForm | None:
    """How a layer of `equinox.nn` is linear in its parameters, if it is."""
    if isinstance(layer, eqx.nn.Linear):
        return Dense()
    if isinstance(layer, eqx.nn.Embedding):
        return Lookup(layer.num_embeddings)
    if isinstance(layer, eqx.nn.Conv):
        return _convolution(layer)
    if isinstance(layer, eqx.nn.ConvTranspose):
        return _transposed_convolution(layer)
    return None


def _convolution(layer: eqx.nn.Conv) -> Convolution:
    extended = layer.padding_mode != "ZEROS"
    return Convolution(
        layer.kernel_size,
        layer.stride,
        layer.dilation,
        layer.groups,
        "VALID" if extended else layer.padding,
        mode=layer.padding_mode,
        extension=layer.padding if extended else "VALID",
    )


def _transposed_convolution(layer: eqx.nn.ConvTranspose) -> Convolution:
    padding, extension = transposed_padding(layer), "VALID"
    if layer.padding_mode == "CIRCULAR":  # Whole strides of it, before any zeros.
        widths, strides = np.asarray(padding), np.asarray(layer.stride)[:, None]
        extension, padding = _pads(widths // strides), _pads(widths % strides)
    return Convolution(
        layer.kernel_size,
        (1,) * layer.num_spatial_dims,
        layer.dilation,
        layer.groups,
        padding,
        mode=layer.padding_mode,
        extension=extension,
        input_dilation=layer.stride,
    )


def _pads(widths: np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in widths)
