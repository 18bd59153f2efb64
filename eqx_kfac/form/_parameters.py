import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._inputs import Nothing


class Parameters(AbstractForm):
    """Any parameters at all, in one long column. The tag is not on the layer's
    output, but on the parameters themselves, once per example
    ([`eqx_kfac.Tag.parameters`][]). The gradients there are those of single examples,
    however the layer uses its parameters.

    **Fields:**

    - `leaves`: the names of the parameters.
    - `ranks`: how many axes each has in one layer.
    """

    leaves: tuple[str, ...] = eqx.field(static=True)
    ranks: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, **ranks: int):
        """**Arguments:**

        - `ranks`: the names of the layer's parameters, and how many axes they have in one
            layer (stacked layers have more): `Parameters(weight=1, bias=1)`. For a layer
            within the layer: `Parameters(**{"layer.bias": 1})`.
        """
        self.leaves = tuple(ranks)
        self.ranks = tuple(ranks.values())

    @property
    def names(self) -> tuple[str, ...]:
        return self.leaves

    def sizes(self, layer: Layer) -> Sizes:
        shapes = [
            (p.shape[: p.ndim - r], p.shape[p.ndim - r :]) for p, r in self._there(layer)
        ]
        stack = shapes[0][0]
        return Sizes(stack, sum(math.prod(own) for _, own in shapes), 0, bias=True)

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> Nothing:
        return Nothing(x.shape[:axes])

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return z

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out 1"]:
        columns = [p.reshape(*p.shape[: p.ndim - r], -1) for p, r in self._there(layer)]
        return jnp.concatenate(columns, axis=-1)[..., None]

    def from_matrix(self, matrix: Inexact[Array, "*stack d_out 1"], layer: Layer) -> Any:
        column, start, new = matrix[..., 0], 0, []
        for parameter, rank in zip(self.parameters(layer), self.ranks, strict=True):
            if parameter is not None:
                size = math.prod(parameter.shape[parameter.ndim - rank :])
                piece = column[..., start : start + size]
                new.append(piece.reshape(parameter.shape).astype(parameter.dtype))
                start += size
            else:
                new.append(None)
        return self.replace(layer, tuple(new))

    def _there(self, layer: Layer) -> list[tuple[Any, int]]:
        pairs = zip(self.parameters(layer), self.ranks, strict=True)
        return [(p, rank) for p, rank in pairs if p is not None]
