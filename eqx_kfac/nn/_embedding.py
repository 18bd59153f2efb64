import equinox as eqx

from ._base import TaggedOutputs


class Embedding(TaggedOutputs, eqx.nn.Embedding):
    """`equinox.nn.Embedding`, with a tag. Of the input factor only the diagonal exists:
    how often each row was looked up."""
