from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._block import Kronecker
from .._tag import LayerError, Tag
from ..form import Dense
from ._base import TaggedOutputs
from ._inputs import check_integer


class Embedding(TaggedOutputs, eqx.nn.Embedding):
    """`equinox.nn.Embedding`, with a tag. Only the diagonal of the input factor exists:
    how often each row was looked up."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    def check_dtype(self, x: Any) -> None:
        check_integer(self, x)

    def attend(
        self, x: Inexact[Array, " embedding_size"]
    ) -> Inexact[Array, " num_embeddings"]:
        """The inner products of `x` with all rows: an output projection that is tied to
        the embedding. The block then adds up both uses.

        **Raises:** while curvature is being collected, `ValueError` unless the layer was
        made with `block=kfac.Kronecker(tied=True)`.
        """
        y = jnp.matmul(self.weight, x)
        if not self.tag.collecting:
            return y
        block = self.tag.block
        if not (isinstance(block, Kronecker) and block.tied):
            raise LayerError(
                self,
                "`attend` uses the embedding's transposed weight, which its block does "
                "not account for: make it with `block=kfac.Kronecker(tied=True)`.",
            )
        return Tag(Dense(), block, swapped=True).with_slots_of(self.tag)(y, x)
