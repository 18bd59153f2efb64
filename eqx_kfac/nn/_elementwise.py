from typing import Any

import equinox as eqx
from jaxtyping import Array, Inexact

from .._block import AbstractBlock, Diagonal
from .._form import Parameters
from .._tag import Tag
from ._base import TaggedParameters


class LayerNorm(TaggedParameters, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, with a tag at its weight and bias."""

    @staticmethod
    def ranks(layer: Any) -> dict[str, int]:
        return dict(weight=len(layer.shape), bias=len(layer.shape))


class RMSNorm(TaggedParameters, eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm`, with a tag at its weight and bias."""

    @staticmethod
    def ranks(layer: Any) -> dict[str, int]:
        return dict(weight=len(layer.shape), bias=len(layer.shape))


class GroupNorm(TaggedParameters, eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm`, with a tag at its weight and bias."""

    @staticmethod
    def ranks(layer: Any) -> dict[str, int]:
        return dict(weight=1, bias=1)


class BatchNorm(TaggedParameters, eqx.nn.BatchNorm):
    """`equinox.nn.BatchNorm`, with a tag at its weight and bias; its running statistics
    are where they were. (What one example's normalisation owes to the others is in the
    gradient, but not in the curvature of one example.)"""

    @staticmethod
    def ranks(layer: Any) -> dict[str, int]:
        return dict(weight=1, bias=1)


class PReLU(TaggedParameters, eqx.nn.PReLU):
    """`equinox.nn.PReLU`, with a tag at its slope."""

    @staticmethod
    def ranks(layer: Any) -> dict[str, int]:
        return dict(negative_slope=layer.negative_slope.ndim)


class Parameter(eqx.Module):
    """An array to be trained that belongs to no layer: a positional embedding, a scale,
    an initial state. In a module's `__call__`, `self.position(x)` is its value.

    !!! Example

        ```python
        class Model(eqx.Module):
            position: kfac.Parameter
            ...

            def __call__(self, x):
                x = x + self.position(x)
        ```
    """

    value: Inexact[Array, "..."]
    tag: Tag

    def __init__(self, value: Inexact[Array, "..."], block: AbstractBlock = Diagonal()):
        """**Arguments:**

        - `value`: what it is to begin with.
        - `block`: how its curvature is approximated.
        """
        self.value = value
        self.tag = Tag(Parameters(value=value.ndim), block)

    def __call__(self, x: Any) -> Inexact[Array, "..."]:
        """**Arguments:**

        - `x`: anything with arrays that belong to the example: the gradient with respect
            to the value is wanted for each one.

        **Returns:** the value.
        """
        return self.tag.parameters(self, x).value
