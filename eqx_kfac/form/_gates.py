from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._dense import join
from ._inputs import Vectors


class Part(NamedTuple):
    """Some rows of a leaf, which is divided into parts of equal size.

    **Fields:**

    - `name`: the name of the leaf.
    - `start`, `stop`: which parts, as in a slice.
    - `of`: how many parts there are.
    """

    name: str
    start: int = 0
    stop: int = 1
    of: int = 1

    def rows(self, leaf: Array, axis: int) -> tuple[Any, ...]:
        """The index of these rows of `leaf`, along `axis` (counted from the end)."""
        number = leaf.shape[axis] // self.of
        window = slice(self.start * number, self.stop * number)
        return (..., window) + (slice(None),) * (-axis - 1)


class Gates(AbstractForm):
    r"""$z = W_1 x_1 + W_2 x_2 + \dots + b$: a linear map of several inputs. Their
    weights, each of shape `[*stack, d_out, d_i]`, are separate leaves, or rows of leaves
    that hold several maps. The tag's `x` is $[x_1; x_2; \dots]$.

    **Fields:**

    - `weights`: the rows of a leaf that are the weight of each input.
    - `bias`: the rows of a leaf that are the bias.
    """

    linear = True
    weights: tuple[Part, ...] = eqx.field(static=True)
    bias: Part = eqx.field(static=True)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in (*self.weights, self.bias))

    def sizes(self, layer: Layer) -> Sizes:
        weights, bias = self._pieces(layer)
        if not weights and bias is not None:
            return Sizes(bias.shape[:-1], bias.shape[-1], 0, bias=True)
        *stack, d_out, _ = weights[0].shape
        d_in = sum(w.shape[-1] for w in weights)
        return Sizes(tuple(stack), d_out, d_in, bias is not None)

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> Vectors:
        return Vectors(x)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return z

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        weights, bias = self._pieces(layer)
        weight = jnp.concatenate(weights, axis=-1) if weights else None
        return join(weight, None if bias is None else bias[..., None])

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        new, start = [], 0
        for part, leaf in zip(self.weights, self.parameters(layer), strict=False):
            if leaf is not None:
                piece = matrix[..., start : start + leaf.shape[-1]].astype(leaf.dtype)
                start += leaf.shape[-1]
                leaf = leaf.at[part.rows(leaf, -2)].set(piece)
            new.append(leaf)
        bias = getattr(layer, self.bias.name)
        if bias is not None:
            rows = self.bias.rows(bias, -1)
            bias = bias.at[rows].set(matrix[..., -1].astype(bias.dtype))
        return self.replace(layer, (*new, bias))

    def _pieces(self, layer: Layer) -> tuple[list[Array], Array | None]:
        leaves = [getattr(layer, part.name) for part in self.weights]
        if len({leaf is None for leaf in leaves}) == 2:
            names = " and ".join(f"`{part.name}`" for part in self.weights)
            raise ValueError(
                f"{names} act together: freeze all of them, or none. (One block is kept "
                "of their curvature.)"
            )
        bias = getattr(layer, self.bias.name)
        weights = [
            leaf[part.rows(leaf, -2)]
            for part, leaf in zip(self.weights, leaves, strict=True)
            if leaf is not None
        ]
        return weights, None if bias is None else bias[self.bias.rows(bias, -1)]
