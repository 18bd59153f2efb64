from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Inexact

from .._block import AbstractBlock, check_block, Diagonal
from .._custom_types import Layer
from .._tag import LayerError, Tag
from ..form import Parameters
from ._base import TaggedParameters


class LayerNorm(TaggedParameters, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, with a tag at its weight and bias."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @staticmethod
    def ranks(layer: Layer) -> dict[str, int]:
        return dict(weight=len(layer.shape), bias=len(layer.shape))


class RMSNorm(TaggedParameters, eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm`, with a tag at its weight and bias."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @staticmethod
    def ranks(layer: Layer) -> dict[str, int]:
        return dict(weight=len(layer.shape), bias=len(layer.shape))


class GroupNorm(TaggedParameters, eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm`, with a tag at its weight and bias."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @staticmethod
    def ranks(layer: Layer) -> dict[str, int]:
        return dict(weight=1, bias=1)


class BatchNorm(TaggedParameters, eqx.nn.BatchNorm):
    """`equinox.nn.BatchNorm`, with a tag at its weight and bias; its running statistics
    are unchanged. (The effect of other examples on one example's normalisation is in the
    gradient, but not in the curvature of one example.)"""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @staticmethod
    def ranks(layer: Layer) -> dict[str, int]:
        return dict(weight=1, bias=1)

    def __call__(self, x: Any, state: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(x, state, **kwargs)
        except NameError as error:
            raise LayerError(
                self,
                f"`kfac.BatchNorm` takes means over the axis {self.axis_name!r}, but "
                "there is no such axis. Name it: `jax.vmap(model, axis_name="
                f"{self.axis_name!r}, in_axes=(0, None), out_axes=(0, None))(x, state)`.",
            ) from error


class PReLU(TaggedParameters, eqx.nn.PReLU):
    """`equinox.nn.PReLU`, with a tag at its slope."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    @staticmethod
    def ranks(layer: Layer) -> dict[str, int]:
        return dict(negative_slope=layer.negative_slope.ndim)


class Parameter(eqx.Module):
    """A trained array that belongs to no layer: a positional embedding, a scale,
    an initial state. In a module's `__call__`, `self.position(x)` is its value.

    **Fields:**

    - `tag`: an [`eqx_kfac.Tag`][] at the value.

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

    def __init__(
        self, value: Inexact[ArrayLike, "..."], block: AbstractBlock = Diagonal()
    ):
        """**Arguments:**

        - `value`: its initial value, floating-point numbers of any shape.
        - `block`: how its curvature is approximated.

        **Raises:** `TypeError` for anything else.
        """
        check_block("block", block)
        self.value = _floating(value)
        self.tag = Tag(Parameters(value=self.value.ndim), block)

    def __call__(self, x: Any) -> Inexact[Array, "..."]:
        """**Arguments:**

        - `x`: anything with arrays that belong to the example, because the gradient with
            respect to the value is needed for each example.

        **Returns:** the value.

        **Raises:** `ValueError` if there is no JAX array in `x`, while curvature is
        being collected.
        """
        arrays = [a for a in jtu.tree_leaves(x) if isinstance(a, jax.Array)]
        if self.tag.collecting and not arrays:
            raise LayerError(
                self,
                "`kfac.Parameter` is called with something that belongs to the example, "
                f"such as the model's input, but got {x!r}: curvature needs to know for "
                "which example it is used.",
            )
        return self.tag.parameters(self, x).value


def _floating(value: Any) -> Array:
    array = jnp.asarray(value) if eqx.is_array_like(value) else None
    if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
        got = repr(value) if array is None else f"numbers of type {array.dtype}"
        raise TypeError(
            "`kfac.Parameter` is an array of floating-point numbers, such as "
            f"`kfac.Parameter(jnp.zeros(3))`, but got {got}."
        )
    return array.astype(array.dtype)  # Whose type is not weak, as Python's numbers'.
