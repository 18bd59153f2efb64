"""Layers of any class whose form somebody has told, for all layers of the class."""

import functools as ft
from typing import Any

import equinox as eqx

from .._block import AbstractBlock
from .._tag import Tag
from ..form import AbstractForm, Parameters
from ..nn import Derived
from ._watched import check_has_no_tag, subclass


class Formed(Derived):
    """A layer whose class was made by `formed_class`: it has one more field, its tag."""


@ft.cache
def formed_class(cls: type) -> type:
    """A subclass of `cls` whose instances tag what they return."""

    def call(self, x, *args, **kwargs):
        if isinstance(self.tag.form, Parameters):
            layer = self.tag.parameters(self, (x, args, kwargs))
            return super(new, layer).__call__(x, *args, **kwargs)
        layer = self.tag.covered(self)
        return self.tag(super(new, layer).__call__(x, *args, **kwargs), x)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {"tag": Tag},
        "__call__": call,
        "__reduce__": lambda self: (_rebuilt, (cls, dict(vars(self)))),
        "tag": eqx.field(default=None),
    }
    new: Any = subclass(cls, Formed, namespace)
    return new


def _rebuilt(cls: type, fields: dict[str, Any]) -> Any:
    new = object.__new__(formed_class(cls))
    vars(new).update(fields)
    return new


def formed(layer: Any, form: AbstractForm, block: AbstractBlock) -> Any:
    """A layer with a tag of this form."""
    check_has_no_tag(layer)
    return _rebuilt(type(layer), {**vars(layer), "tag": Tag(form, block)})


def unformed(layer: Any) -> Any:
    """The layer as it was."""
    new = object.__new__(type(layer).__mro__[1])
    vars(new).update({k: v for k, v in vars(layer).items() if k != "tag"})
    return new
