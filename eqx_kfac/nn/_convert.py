from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._block import AbstractBlock, AbstractSharing, check_block, Kronecker
from .._custom_types import Layer
from .._misc import names
from .._tag import is_tagged, Tag
from ._base import AbstractTagged, with_fields_of
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


def convert(model: _T, blocks: Blocks = None) -> _T:
    """Tags the layers of a model, so that curvature can be collected: all of
    `equinox.nn`'s linear, convolutional, embedding, normalisation and recurrent ones.

    It finds layers anywhere in the PyTree: in `eqx.nn.MLP`, `Sequential`,
    `MultiheadAttention`, in your own modules, in tuples, lists and dicts, and stacked by
    `eqx.filter_vmap`. Everything else is left alone: subclasses of these layers, which
    may compute anything, and layers that are tagged already. (For stacked `PReLU`s, the
    slopes cannot be distinguished from those of channels: convert inside the
    `eqx.filter_vmap` that creates them.)

    **Arguments:**

    - `model`: any PyTree with Equinox layers.
    - `blocks`: how the layers' curvature is approximated. `None`: every layer's default,
        which is [`eqx_kfac.Kronecker`][] if the layer is linear in its parameters, and
        [`eqx_kfac.Diagonal`][] if it scales and shifts. A block: for all layers of the
        former kind. A dictionary: blocks by layer type (`eqx.nn.Conv2d`) or by path
        (`".layers[0]"`, for all layers there and below; the longest path counts, and any
        path before a type). A function: `blocks(path, layer)` returns a block, or
        `"default"`. A block of `None` leaves the layers untagged.

    **Returns:**

    The model with the same leaves, the same outputs and the same files
    (`eqx.tree_serialise_leaves`).

    **Raises:** `ValueError` for a type or a path in `blocks` that matches no layer.

    !!! Example

        ```python
        model = kfac.convert(eqx.nn.MLP(784, 10, 256, 2, key=key))
        model = kfac.convert(vit, blocks={".patches": kfac.Kronecker(kfac.Reduce())})
        ```
    """
    choice = _Choice(blocks)

    def swap(path, node):
        tagged = _tagged.get(type(node))
        if tagged is None or not tagged.supports(node):
            return node
        block = choice(jtu.keystr(path), node, tagged)
        if block is None:
            return node
        return with_fields_of(tagged, node, tag=tagged.tags(node, block))

    def is_leaf(node):
        return type(node) in _tagged or is_tagged(node) or isinstance(node, _closed)

    model = jtu.tree_map_with_path(swap, model, is_leaf=is_leaf)
    choice.check()
    return jtu.tree_map(_with_ties, model, is_leaf=_is_shared)


def _is_shared(node: PyTree) -> bool:
    return type(node) is eqx.nn.Shared


def _with_ties(node: PyTree) -> Any:
    if not _is_shared(node):
        return node
    ties = find_ties(node)
    pytree = with_tied_blocks(node.pytree, ties)
    return with_fields_of(Shared, node, pytree=pytree, ties=ties)


class _Choice:
    """Which block a layer gets; and which of the choices that were given nobody got."""

    def __init__(self, blocks: Blocks):
        _check_blocks(blocks)
        self.blocks = blocks
        self.unused = set(blocks) if isinstance(blocks, Mapping) else set()

    def __call__(self, path: str, layer: Layer, tagged: type[AbstractTagged]) -> Any:
        blocks, default = self.blocks, tagged.default
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
        paths = [k for k in blocks if isinstance(k, str) and _is_below(path, k)]
        keys = sorted(paths, key=len)[-1:] or [k for k in blocks if k is type(layer)]
        self.unused -= {*paths, type(layer)}
        return blocks[keys[0]] if keys else default

    def check(self) -> None:
        if self.unused:
            raise ValueError(
                f"No layer that can be tagged has {names(list(map(str, self.unused)))}, "
                "given in `blocks`. Paths are as in `kfac.convert(model)`'s state, such "
                "as `.layers[0]`; types are those of `equinox.nn`."
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


def revert(model: _T) -> _T:
    """The inverse of [`eqx_kfac.convert`][]: every tagged layer becomes the layer of
    `equinox.nn` that it was; so do `kfac.MLP` and the like.

    **Arguments:**

    - `model`: any PyTree; layers that are not tagged stay as they are.
    """
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
    collect stay in (at least) float32.

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
        return node.astype(dtype) if eqx.is_inexact_array(node) else node

    return jtu.tree_map(to_dtype, model, is_leaf=lambda node: isinstance(node, Tag))
