import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._block import AbstractBlock, AbstractSharing, check_block, Kronecker
from .._complex import is_complex
from .._custom_types import Layer
from .._jax import SharedNode
from .._misc import names
from .._tag import is_tagged, Tag
from ._base import with_fields_of
from ._composite import MLP, MultiheadAttention
from ._conv import (
    Conv,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from ._elementwise import BatchNorm, GroupNorm, LayerNorm, PReLU, RMSNorm
from ._embedding import Embedding
from ._linear import Linear
from ._reparametrised import SpectralNorm, WeightNorm
from ._rnn import GRUCell, LSTMCell
from ._shared import find_ties, Shared, with_tied_blocks


_T = TypeVar("_T")

_tagged = {
    eqx.nn.Linear: Linear,
    eqx.nn.Conv: Conv,
    eqx.nn.Conv1d: Conv1d,
    eqx.nn.Conv2d: Conv2d,
    eqx.nn.Conv3d: Conv3d,
    eqx.nn.ConvTranspose: ConvTranspose,
    eqx.nn.ConvTranspose1d: ConvTranspose1d,
    eqx.nn.ConvTranspose2d: ConvTranspose2d,
    eqx.nn.ConvTranspose3d: ConvTranspose3d,
    eqx.nn.Embedding: Embedding,
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RMSNorm: RMSNorm,
    eqx.nn.GroupNorm: GroupNorm,
    eqx.nn.BatchNorm: BatchNorm,
    eqx.nn.PReLU: PReLU,
    eqx.nn.LSTMCell: LSTMCell,
    eqx.nn.GRUCell: GRUCell,
    eqx.nn.WeightNorm: WeightNorm,
    eqx.nn.SpectralNorm: SpectralNorm,
}
_untagged = {tagged: plain for plain, tagged in _tagged.items()}
_composite = {
    Shared: eqx.nn.Shared,
    MLP: eqx.nn.MLP,
    MultiheadAttention: eqx.nn.MultiheadAttention,
}

# What is within these is for them to tag, or not linear in what is trained.
_closed = (eqx.nn.WeightNorm, eqx.nn.SpectralNorm)

Blocks = AbstractBlock | Mapping[Any, AbstractBlock | None] | Callable | None


def convert_layers(model: _T, choice: "Choice", lenient: bool = False) -> _T:
    """The `model` with tags in all layers of `equinox.nn` that can have one, with blocks
    by `choice`. `lenient`: where weights are shared in a way that the layers' tags cannot
    account for, there are none, instead of an error."""

    def swap(path, node):
        tagged = _tagged.get(type(node))
        if tagged is None or not tagged.supports(node) or not _has_real_arrays(node):
            return node
        block = choice(jtu.keystr(path), node, tagged.default)
        if block is None:
            return node
        return with_fields_of(tagged, node, tag=tagged.tags(node, block))

    def is_leaf(node):
        return type(node) in _tagged or is_tagged(node) or isinstance(node, _closed)

    model = jtu.tree_map_with_path(swap, model, is_leaf=is_leaf)
    with_ties = ft.partial(_with_ties, lenient=lenient)
    return jtu.tree_map(with_ties, model, is_leaf=_is_shared)


def _has_real_arrays(layer: Layer) -> bool:
    """Whether the parameters of a layer are arrays, and not something that computes
    them; and of real numbers, as tags are."""
    fields = [getattr(layer, name, None) for name in _PARAMETERS]
    arrays = [p for p in fields if p is not None and not isinstance(p, SharedNode)]
    return all(hasattr(p, "shape") and not is_complex(p) for p in arrays)


_PARAMETERS = "weight", "bias", "weight_ih", "weight_hh", "bias_n", "g", "negative_slope"


def _is_shared(node: PyTree) -> bool:
    return type(node) is eqx.nn.Shared


def _with_ties(node: PyTree, lenient: bool) -> Any:
    if not _is_shared(node):
        return node
    try:
        ties = find_ties(node)
        pytree = with_tied_blocks(node.pytree, ties)
    except ValueError:
        if not lenient:
            raise
        return revert_layers(node)
    return with_fields_of(Shared, node, pytree=pytree, ties=ties)


class Choice:
    """Which block a layer gets, given `blocks`; and which of the choices that were given
    nobody got."""

    def __init__(self, blocks: Blocks):
        _check_blocks(blocks)
        self.blocks = blocks
        self.unused = set(blocks) if isinstance(blocks, Mapping) else set()
        self.paths: list[str] = []

    def __call__(
        self,
        path: str,
        layer: Layer,
        default: AbstractBlock,
        aliases: tuple[str, ...] = (),
    ) -> Any:
        """The block of the layer at `path`, or of one of its arrays, which has other
        paths, too, as one of the tags of a module."""
        blocks = self.blocks
        self.paths.append(path)
        if blocks is None:
            return default
        if isinstance(blocks, AbstractBlock):
            return blocks if isinstance(default, Kronecker) else default
        if not isinstance(blocks, Mapping):
            block = blocks(path, layer)
            block = default if isinstance(block, str) and block == "default" else block
            if block is not None:
                check_block(f"blocks({path!r}, ...)", block)
            return block
        is_own = lambda k: any(_is_below(p, k) for p in (path, *aliases))
        paths = [k for k in blocks if isinstance(k, str) and is_own(k)]
        keys = sorted(paths, key=len)[-1:] or [k for k in blocks if k is type(layer)]
        self.unused -= {*paths, type(layer)}
        return blocks[keys[0]] if keys else default

    def check(self) -> None:
        """Raises if a choice is for nothing that is there."""
        if self.unused:
            there = list(dict.fromkeys(self.paths))
            raise ValueError(
                f"No layer that can be tagged has {names(list(map(str, self.unused)))}, "
                f"given in `blocks`. There are: {names(there)}; and types of "
                "`equinox.nn`. Layers that are tagged already stay as they are: convert "
                "`kfac.revert(model)`; a tag that a class was written with stays there, "
                "too."
            )


def _check_blocks(blocks: object) -> None:
    if isinstance(blocks, Mapping):
        for key, block in blocks.items():
            if block is not None:
                check_block(f"blocks[{key!r}]", block)
        return
    # Parts of blocks can be called, too, and so can classes.
    is_function = callable(blocks) and not isinstance(blocks, (type, AbstractSharing))
    if not (blocks is None or is_function):
        check_block("blocks", blocks)


def _is_below(path: str, prefix: str) -> bool:
    rest = path.removeprefix(prefix)
    return path.startswith(prefix) and (rest == "" or rest[0] in ".[")


class Derived:
    """A tagged layer of a class that was made from that of the layer without tags."""


def is_followed(layer: Layer) -> bool:
    """Whether a tagged layer is a module, with tags that follow its arrays."""
    return isinstance(layer, Derived) and isinstance(layer.tag, dict)  # pyright: ignore


def has_own_tag(layer: Layer) -> bool:
    """Whether the tag of a tagged layer is in its class as that was written, where
    `kfac.convert` and `kfac.revert` leave it."""
    return not (isinstance(layer, Derived) or type(layer) in _untagged)


def revert_layers(model: _T) -> _T:
    """The `model` with the layers of `equinox.nn` in the place of tagged ones."""
    for kinds in (_untagged, _composite):  # The inner ones first.

        def swap(node, kinds=kinds):
            plain = kinds.get(type(node))
            return node if plain is None else with_fields_of(plain, node)

        def is_leaf(node, kinds=kinds):
            return type(node) in kinds

        model = jtu.tree_map(swap, model, is_leaf=is_leaf)
    return model


def cast(model: _T, dtype: DTypeLike) -> _T:
    """Casts the floating-point parameters of a model, for mixed precision: to be used
    inside a loss function, on the model or on any part of it. The statistics that tags
    collect stay in (at least) float32, and complex parameters what they are.

    **Arguments:**

    - `model`: any PyTree.
    - `dtype`: a floating-point type, such as `jnp.bfloat16`.

    !!! Example

        ```python
        def loss_fn(model, x, y):
            model = kfac.cast(model, jnp.bfloat16)
            logits = jax.vmap(model)(x.astype(jnp.bfloat16))
            return kfac.SoftmaxCrossEntropy(logits, y)
        ```
    """

    def to_dtype(node):
        is_real = eqx.is_inexact_array(node) and not is_complex(node)
        return node.astype(dtype) if is_real else node

    return jtu.tree_map(to_dtype, model, is_leaf=lambda node: isinstance(node, Tag))
