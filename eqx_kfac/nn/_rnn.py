"""Recurrent cells. A cell's parameters are those of linear maps whose outputs are only
ever seen inside it; but each of them has a bias, and what is added to a bias (zero) is
added to the output: that is where the tags are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._block import AbstractBlock, Kronecker
from .._custom_types import Layer
from .._tag import LayerError, Tag
from ..form import Gates, Part
from ._base import AbstractTagged, with_fields_of
from ._inputs import check_input


class LSTMCell(AbstractTagged, eqx.nn.LSTMCell):
    """`equinox.nn.LSTMCell`, with a tag: one linear map of the input and the hidden state
    onto all four gates."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    tag: Tag
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> Tag:
        weights = (Part("weight_ih"), Part("weight_hh"))
        return Tag(Gates(weights, Part("bias")), block)

    def __call__(self, input: Array, hidden: Any, *, key: Any = None) -> Any:
        _check_cell(self, input, hidden[0])
        if not self.tag.collecting:
            return super().__call__(input, hidden, key=key)
        return self.remember(input, hidden, None)[0]

    def remember(self, input: Array, hidden: Any, memory: Any) -> tuple[Any, Any]:
        """One step of [`eqx_kfac.scan_cell`][]: the hidden state and the memory."""
        zero = jnp.zeros(4 * self.hidden_size, hidden[0].dtype)
        both = jnp.concatenate([input, hidden[0]])
        bias, memory = self.tag.remember(zero, both, memory)
        own = _covered(self, self.tag)
        if self.bias is not None:
            bias = bias + own["bias"]
        extra = {**own, "bias": bias, "use_bias": True}
        cell = with_fields_of(eqx.nn.LSTMCell, self, **extra)
        return cell(input, hidden), memory


class GRUCell(AbstractTagged, eqx.nn.GRUCell):
    """`equinox.nn.GRUCell`, with three tags: one for the linear map of the input and the
    hidden state onto the two gates, and one for the map of each of them onto the
    candidate, which the cell keeps separate."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    tag: dict[str, Tag]
    default = Kronecker()

    @classmethod
    def tags(cls, layer: Layer, block: AbstractBlock) -> dict[str, Tag]:
        both = (Part("weight_ih", 0, 2, 3), Part("weight_hh", 0, 2, 3))
        forms = dict(
            gates=Gates(both, Part("bias", 0, 2, 3)),
            input=Gates((Part("weight_ih", 2, 3, 3),), Part("bias", 2, 3, 3)),
            hidden=Gates((Part("weight_hh", 2, 3, 3),), Part("bias_n")),
        )
        return {name: Tag(form, block) for name, form in forms.items()}

    def __call__(self, input: Array, hidden: Array, *, key: Any = None) -> Array:
        _check_cell(self, input, hidden)
        if not any(tag.collecting for tag in self.tag.values()):
            return super().__call__(input, hidden, key=key)
        return self.remember(input, hidden, dict.fromkeys(self.tag))[0]

    def remember(self, input: Array, hidden: Array, memory: Any) -> tuple[Array, Any]:
        """One step of [`eqx_kfac.scan_cell`][]: the hidden state and the memory."""
        zero = jnp.zeros(self.hidden_size, hidden.dtype)
        both = jnp.concatenate([input, hidden])
        places = dict(
            gates=(jnp.concatenate([zero, zero]), both),
            input=(zero, input),
            hidden=(zero, hidden),
        )
        tagged, new = {}, {}
        for name, (y, x) in places.items():
            tagged[name], new[name] = self.tag[name].remember(y, x, memory[name])
        bias = jnp.concatenate([tagged["gates"], tagged["input"]])
        bias_n = tagged["hidden"]
        own = _covered(self, self.tag["gates"])
        if self.bias is not None and self.bias_n is not None:
            bias, bias_n = bias + own["bias"], bias_n + own["bias_n"]
        extra = {**own, "bias": bias, "bias_n": bias_n, "use_bias": True}
        cell = with_fields_of(eqx.nn.GRUCell, self, **extra)
        return cell(input, hidden), new


def _covered(cell: Any, tag: Tag) -> dict[str, Any]:
    """The parameters of a cell, by name, for which its tags answer. (A mark for one tag
    is one for all that cover parts of the same arrays.)"""
    names = "weight_ih", "weight_hh", "bias", "bias_n"
    return {n: tag.cover(getattr(cell, n)) for n in names if hasattr(cell, n)}


def _check_cell(cell: Any, input: Any, hidden: Any) -> None:
    check_input(cell, input)
    shape = jnp.shape(hidden)
    if shape != (cell.hidden_size,):
        raise LayerError(
            cell,
            f"`kfac.{type(cell).__name__}` has a hidden state of shape "
            f"({cell.hidden_size},), but got one of shape {shape}. For batches use "
            "`jax.vmap(cell)(input, hidden)`.",
        )


def scan_cell(cell: Any, hidden: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
    """Runs a recurrent cell over a sequence, `hidden = cell(input, hidden)`, as
    `jax.lax.scan` would. It tells the blocks of its tags which time step follows
    which, as [`eqx_kfac.Series`][] needs.

    **Arguments:**

    - `cell`: from `kfac` or `equinox.nn`.
    - `hidden`: the initial hidden state.
    - `inputs`: the sequence, time first.

    **Returns:** the last hidden state, and all of them (without the first one).
    """
    if not isinstance(cell, (LSTMCell, GRUCell)) or not _remembers(cell):

        def plain(hidden, input):
            hidden = cell(input, hidden)
            return hidden, hidden

        return jax.lax.scan(plain, hidden, inputs)

    def step(carry, input):
        hidden, memory = cell.remember(input, *carry)
        return (hidden, memory), hidden

    is_tag = lambda node: isinstance(node, Tag)
    memory = jax.tree.map(lambda tag: tag.memory(cell), cell.tag, is_leaf=is_tag)
    (hidden, _), outputs = jax.lax.scan(step, (hidden, memory), inputs)
    return hidden, outputs


def _remembers(cell: Any) -> bool:
    """Whether anything is collected that needs a memory."""
    tags = [cell.tag] if isinstance(cell.tag, Tag) else cell.tag.values()
    return any(tag.collecting for tag in tags)
