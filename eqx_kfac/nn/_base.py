"""What makes a layer of Equinox a tagged one. Two ways: the tag ends the layer's forward
pass, which is linear in its parameters; or it begins it, at the parameters themselves."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx

from .._block import AbstractBlock, Diagonal, Kronecker
from .._form import AbstractForm, Parameters
from .._tag import Tag


class AbstractTagged(eqx.Module):
    """A layer with a tag, made as the layer of Equinox that it is a subclass of."""

    tag: eqx.AbstractVar[Tag | dict[str, Tag]]
    default: ClassVar[AbstractBlock]

    def __init__(self, *args: Any, block: AbstractBlock | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tag = type(self).tags(self, block or self.default)

    @staticmethod
    @abc.abstractmethod
    def tags(layer: Any, block: AbstractBlock) -> Tag | dict[str, Tag]:
        """The tag of a layer of the Equinox type."""


class TaggedOutputs(AbstractTagged):
    """A layer that is linear in its parameters: the tag is at its outputs."""

    tag: Tag
    default = Kronecker()

    @staticmethod
    @abc.abstractmethod
    def form(layer: Any) -> AbstractForm:
        """How it is linear."""

    @classmethod
    def tags(cls, layer: Any, block: AbstractBlock) -> Tag:
        return Tag(cls.form(layer), block)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.tag(super().__call__(x, key=key), x)


class TaggedParameters(AbstractTagged):
    """Any other layer: the tag is at its parameters, once for every example."""

    tag: Tag
    default = Diagonal()

    @staticmethod
    @abc.abstractmethod
    def ranks(layer: Any) -> dict[str, int]:
        """The names of the layer's parameters, and how many axes they have (in one layer;
        stacked ones have more)."""

    @classmethod
    def tags(cls, layer: Any, block: AbstractBlock) -> Tag:
        return Tag(Parameters(**cls.ranks(layer)), block)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self.tag.parameters(self, x)
        return super(TaggedParameters, layer).__call__(x, *args, **kwargs)


def with_fields_of(cls: type, layer: Any, **extra: Any) -> Any:
    """An instance of `cls` with the fields of `layer`, without running an `__init__`."""
    new = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = extra[field.name] if field.name in extra else getattr(layer, field.name)
        object.__setattr__(new, field.name, value)
    return new
