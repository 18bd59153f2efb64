from typing import Any

import equinox as eqx

from .. import _form
from ._base import TaggedOutputs


class Embedding(TaggedOutputs, eqx.nn.Embedding):
    """`equinox.nn.Embedding`, with a tag. Of the input factor only the diagonal exists:
    how often each row was looked up."""

    @staticmethod
    def form(layer: Any) -> _form.Lookup:
        return _form.Lookup(layer.num_embeddings)
