from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._inputs import Vectors


class Dense(AbstractForm):
    r"""$z = W x + b$: a layer with a `weight` of shape `[*stack, d_out, d_in]` and a
    `bias` of shape `[*stack, d_out]` or `None`, applied to a vector `x`.

    Scalar inputs and outputs (shape `()`) count as vectors of length one.
    """

    linear = True

    @property
    def names(self) -> tuple[str, ...]:
        return "weight", "bias"

    def sizes(self, layer: Layer) -> Sizes:
        weight, bias = self.parameters(layer)
        *stack, d_out, d_in = (*bias.shape, 0) if weight is None else weight.shape
        return Sizes(tuple(stack), d_out, d_in, bias is not None)

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> Vectors:
        return Vectors(x[..., None] if x.ndim == axes else x)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return z[..., None] if z.ndim == axes else z

    def gradient(
        self,
        x: Inexact[Array, "*rows d_in"],
        g: Inexact[Array, "*rows d_out"],
        stack: int,
        sharding: Any = None,
    ) -> tuple[Array, Array]:
        r"""$\sum g x^\top$ and $\sum g$ over rows: the gradients with respect to `weight`
        and `bias`, in the types of the rows. (As JAX writes them, so that XLA recognises
        them.)"""
        rows = tuple(range(stack, x.ndim - 1))
        batch = tuple(range(stack))
        dims = ((rows, rows), (batch, batch))
        weight = jax.lax.dot_general(g, x, dims, out_sharding=sharding)
        return weight, jax.lax.reduce_sum(g, rows)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        weight, bias = self.parameters(layer)
        return join(weight, None if bias is None else bias[..., None])

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        weight, bias = split(matrix, *self.parameters(layer))
        return self.replace(layer, (weight, bias))


def join(weight: Any, bias: Any) -> Inexact[Array, "*stack d_out d_in"]:
    """The canonical matrix, of a `weight` `[*stack, d_out, d_in]` and a `bias` `[*stack,
    d_out, 1]`. Either may be `None`."""
    columns = [a for a in (weight, bias) if a is not None]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)


def split(matrix: Inexact[Array, "*stack d_out d_in"], weight: Any, bias: Any) -> Any:
    """The inverse of `join`, in the shapes and types of a layer's leaves."""
    if bias is not None:
        matrix, column = matrix[..., :-1], matrix[..., -1]
        bias = column.reshape(bias.shape).astype(bias.dtype)
    if weight is not None:
        weight = matrix.reshape(weight.shape).astype(weight.dtype)
    return weight, bias
