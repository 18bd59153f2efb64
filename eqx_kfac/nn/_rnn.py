"""Recurrent cells. A cell's parameters are those of linear maps whose outputs are only
ever seen inside it; but each of them has a bias, and what is added to a bias (zero) is
added to the output: that is where the tags are."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._block import AbstractBlock, Kronecker
from .._form import Gates, Part
from .._tag import Tag
from ._base import AbstractTagged, with_fields_of


class LSTMCell(AbstractTagged, eqx.nn.LSTMCell):
    """`equinox.nn.LSTMCell`, with a tag: one linear map of the input and the hidden state
    onto all four gates."""

    tag: Tag
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Any, block: AbstractBlock) -> Tag:
        weights = (Part("weight_ih"), Part("weight_hh"))
        return Tag(Gates(weights, Part("bias")), block)

    def __call__(self, input: Any, hidden: Any, *, key: Any = None) -> Any:
        if not self.tag.collecting:
            return super().__call__(input, hidden, key=key)
        zero = jnp.zeros(4 * self.hidden_size, hidden[0].dtype)
        bias = self.tag(zero, jnp.concatenate([input, hidden[0]]))
        if self.use_bias:
            bias = bias + self.bias
        cell = with_fields_of(eqx.nn.LSTMCell, self, bias=bias, use_bias=True)
        return cell(input, hidden, key=key)


class GRUCell(AbstractTagged, eqx.nn.GRUCell):
    """`equinox.nn.GRUCell`, with three tags: the linear map of the input and the hidden
    state onto the two gates, and those of each of them onto the candidate, which the
    cell keeps apart."""

    tag: dict[str, Tag]
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Any, block: AbstractBlock) -> dict[str, Tag]:
        both = (Part("weight_ih", 0, 2, 3), Part("weight_hh", 0, 2, 3))
        forms = dict(
            gates=Gates(both, Part("bias", 0, 2, 3)),
            input=Gates((Part("weight_ih", 2, 3, 3),), Part("bias", 2, 3, 3)),
            hidden=Gates((Part("weight_hh", 2, 3, 3),), Part("bias_n")),
        )
        return {name: Tag(form, block) for name, form in forms.items()}

    def __call__(self, input: Any, hidden: Any, *, key: Any = None) -> Any:
        if not any(tag.collecting for tag in self.tag.values()):
            return super().__call__(input, hidden, key=key)
        zero = jnp.zeros(self.hidden_size, hidden.dtype)
        both = jnp.concatenate([input, hidden])
        gates = self.tag["gates"](jnp.concatenate([zero, zero]), both)
        bias = jnp.concatenate([gates, self.tag["input"](zero, input)])
        bias_n = self.tag["hidden"](zero, hidden)
        if self.use_bias:
            bias, bias_n = bias + self.bias, bias_n + self.bias_n
        extra = dict(bias=bias, bias_n=bias_n, use_bias=True)
        cell = with_fields_of(eqx.nn.GRUCell, self, **extra)
        return cell(input, hidden, key=key)
