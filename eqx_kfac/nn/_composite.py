"""Modules of Equinox that consist of linear layers, with tagged ones."""

from typing import Any

import equinox as eqx

from .._block import AbstractBlock, check_block
from ._base import with_fields_of
from ._linear import Linear


class MLP(eqx.nn.MLP):
    """`equinox.nn.MLP`, made of tagged layers (which have `block`, if it is given)."""

    def __init__(self, *args: Any, block: AbstractBlock | None = None, **kwargs: Any):
        """**Arguments:**

        - `args`, `kwargs`: as for `equinox.nn.MLP`.
        - `block`: how the curvature of every layer is approximated. `None`: by
            [`eqx_kfac.Kronecker`][]`()`.
        """
        super().__init__(*args, **kwargs)
        self.layers = tuple(_tagged(layer, block) for layer in self.layers)


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention`, with its four projections tagged. Every token is a
    shared position: see [`eqx_kfac.Joint`][]."""

    def __init__(self, *args: Any, block: AbstractBlock | None = None, **kwargs: Any):
        """**Arguments:**

        - `args`, `kwargs`: as for `equinox.nn.MultiheadAttention`.
        - `block`: as for [`eqx_kfac.MLP`][].
        """
        super().__init__(*args, **kwargs)
        self.query_proj = _tagged(self.query_proj, block)
        self.key_proj = _tagged(self.key_proj, block)
        self.value_proj = _tagged(self.value_proj, block)
        self.output_proj = _tagged(self.output_proj, block)


def _tagged(layer: eqx.nn.Linear, block: AbstractBlock | None) -> Linear:
    if block is not None:
        check_block("block", block)
    tag = Linear.tags(layer, Linear.default if block is None else block)
    return with_fields_of(Linear, layer, tag=tag)
