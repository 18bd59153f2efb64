from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._inputs import OneHot


class Lookup(AbstractForm):
    r"""$z = W^\top e_i$: a layer with a `weight` of shape `[*stack, number, size]`, of
    which it returns the row `i`. Its inputs are unit vectors, so their second moment
    is diagonal: how often each row was looked up.

    **Fields:**

    - `number`: how many rows the weight has.
    - `clamps`: whether an index that is out of range is that of the nearest row, as of
        `weight[i]` for a single `i`; or of none, as for an array of them.
    """

    number: int = eqx.field(static=True)
    clamps: bool = eqx.field(static=True, default=True)

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight",)

    def sizes(self, layer: Layer) -> Sizes:
        *stack, number, size = layer.weight.shape
        return Sizes(tuple(stack), size, number, bias=False, diagonal=True)

    def inputs(self, x: Int[Array, "..."], stack: int, axes: int) -> OneHot:
        # Small types of integers cannot count all rows.
        x = x.astype(int)
        # As indexing does it, negative ones count from the end.
        index = jnp.where(x < 0, x + self.number, x)
        if self.clamps:
            return OneHot(jnp.clip(index, 0, self.number - 1), self.number)
        there = (index >= 0) & (index < self.number)
        return OneHot(jnp.where(there, index, self.number), self.number)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return z

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        return layer.weight.mT

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        return self.replace(layer, (matrix.mT.astype(layer.weight.dtype),))
