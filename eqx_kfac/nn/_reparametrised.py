"""Layers whose weight is computed from other parameters, by a normalisation: $W = s v$
with a scale $s$ that depends on $v$. The curvature kept is that of $v$ with $s$ held
fixed: the tag is at a zero that is added to the output, times $s$."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._block import AbstractBlock, Diagonal, Kronecker
from .._custom_types import Layer
from .._misc import trailing
from .._module import replaced
from .._tag import Tag
from ..form import Parameters, Within
from ._base import AbstractTagged, form_of
from ._inputs import check_input


class WeightNorm(AbstractTagged, eqx.nn.WeightNorm):
    """`equinox.nn.WeightNorm` around a linear or convolutional layer, with two tags: at
    the weight of the layer inside, as if the norm that divides it were fixed, and at the
    scale `g` and the bias."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    tag: dict[str, Tag]
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> dict[str, Tag]:
        return _tags(layer, block, g=_rank(layer.layer))

    @staticmethod
    def supports(layer: Layer) -> bool:
        return _supports(layer) and layer.axis in (0, None)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        check_input(self, x, self.layer)
        layer = _covered(self, self.tag["others"].parameters(self, x))
        y = super(WeightNorm, layer).__call__(x, key=key)  # pyright: ignore
        if not self.tag["weight"].collecting:
            return y
        norm = self._norm(self.layer.weight)
        if self.tag["weight"].collects_gradient:
            y = _with_fixed(layer.layer, layer.g / jax.lax.stop_gradient(norm), x)
        return _tagged(self.tag["weight"], y, x, (self.g / norm).reshape(-1))


class SpectralNorm(AbstractTagged, eqx.nn.SpectralNorm):
    """`equinox.nn.SpectralNorm` around a linear or convolutional layer, with two tags: at
    the weight of the layer inside, as if the norm that divides it were fixed, and at the
    bias."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    tag: dict[str, Tag]
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> dict[str, Tag]:
        return _tags(layer, block)

    @staticmethod
    def supports(layer: Layer) -> bool:
        return _supports(layer)

    def __call__(self, x: Any, state: Any, **kwargs: Any) -> tuple[Array, Any]:
        check_input(self, x, self.layer)
        layer = self.tag["others"].parameters(self, x) if "others" in self.tag else self
        layer = _covered(self, layer)
        y, state = super(SpectralNorm, layer).__call__(  # pyright: ignore
            x, state, **kwargs
        )
        if not self.tag["weight"].collecting:
            return y, state
        u, v = state.get(self.uv_index)
        matrix = self.layer.weight.reshape(len(u), len(v))
        scale = 1 / jnp.einsum("i,ij,j->", u, matrix, v)
        if self.tag["weight"].collects_gradient:
            y = _with_fixed(layer.layer, jax.lax.stop_gradient(scale), x)
        return _tagged(self.tag["weight"], y, x, scale[None]), state


def _tags(layer: Layer, block: AbstractBlock, **ranks: int) -> dict[str, Tag]:
    inner = layer.layer
    if inner.bias is not None:
        ranks["layer.bias"] = _rank(inner) - 1
    form = form_of(inner)
    assert form is not None
    tags = dict(weight=Tag(Within(form, "layer"), block))
    if ranks:
        tags["others"] = Tag(Parameters(**ranks), Diagonal())
    return tags


def _rank(inner: Any) -> int:
    """How many axes the weight of one layer has; stacked ones have more."""
    return 2 + getattr(inner, "num_spatial_dims", 0)


def _supports(layer: Layer) -> bool:
    kinds = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)
    return layer.weight_name == "weight" and isinstance(layer.layer, kinds)


def _covered(layer: Any, used: Any) -> Any:
    """`used`, which computes the result of `layer`, with a weight for which the tag at a
    zero answers."""
    weight = layer.tag["weight"].cover(used.layer.weight)
    return replaced(used, "layer", replaced(used.layer, "weight", weight))


def _with_fixed(layer: Layer, scale: Array, x: Any) -> Array:
    """The layer inside, its weight times a scale that does not depend on it."""
    return replaced(layer, "weight", layer.weight * scale)(x)


def _tagged(tag: Tag, y: Array, x: Any, scale: Array) -> Array:
    """`y` plus `scale` (of every output channel) times a tagged zero."""
    return y + trailing(scale, y) * tag(jnp.zeros_like(y), x)
