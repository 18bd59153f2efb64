from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from ._base import AbstractForm


def _is_none(x: Any) -> bool:
    return x is None


class Dense(AbstractForm):
    r"""$z = W x + b$: a layer with a `weight` of shape `[*stack, d_out, d_in]` and a
    `bias` of shape `[*stack, d_out]` or `None`, applied to a vector `x`.

    Scalar inputs and outputs (shape `()`) count as vectors of length one.
    """

    def parameters(self, layer: Any) -> tuple[Any, Any]:
        return layer.weight, layer.bias

    def replace(self, layer: Any, weight: Any, bias: Any) -> Any:
        return eqx.tree_at(self.parameters, layer, (weight, bias), is_leaf=_is_none)

    def sizes(self, layer: Any) -> tuple[tuple[int, ...], int, int]:
        if layer.weight is not None:
            *stack, d_out, d_in = layer.weight.shape
            return tuple(stack), d_in, d_out
        *stack, d_out = layer.bias.shape
        return tuple(stack), 0, d_out

    def inputs(self, x: Shaped[Array, "..."], axes: int) -> Shaped[Array, "*axes d_in"]:
        return x[..., None] if x.ndim == axes else x

    def outputs(
        self, z: Inexact[Array, "..."], axes: int
    ) -> Inexact[Array, "*axes d_out"]:
        return z[..., None] if z.ndim == axes else z

    def to_matrix(self, layer: Any) -> Inexact[Array, "*stack d_out d_in"]:
        weight, bias = self.parameters(layer)
        columns = [] if weight is None else [weight]
        columns += [] if bias is None else [bias[..., None]]
        return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)

    def from_matrix(self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Any) -> Any:
        weight, bias = self.parameters(layer)
        if weight is not None:
            d_in = weight.shape[-1]
            weight, matrix = matrix[..., :d_in].astype(weight.dtype), matrix[..., d_in:]
        if bias is not None:
            bias = jnp.squeeze(matrix, axis=-1).astype(bias.dtype)
        return self.replace(layer, weight, bias)
