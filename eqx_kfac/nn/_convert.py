import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu

from .._block import AbstractBlock, Kronecker
from .._form import Dense
from .._tag import is_tagged, Tag
from ._linear import Linear


_T = TypeVar("_T")

# These compute a layer's weight from other parameters: the layer inside is not linear in
# what is trained.
_reparametrised = (eqx.nn.WeightNorm, eqx.nn.SpectralNorm)


def convert(model: _T, block: AbstractBlock = Kronecker()) -> _T:
    """Tags every `equinox.nn.Linear` of a model, so that curvature can be collected.

    Finds layers anywhere in the PyTree: in `eqx.nn.MLP`, `Sequential`,
    `MultiheadAttention`, in your own modules, in tuples, lists and dicts, and stacked by
    `eqx.filter_vmap`. Everything else is left alone: subclasses of `Linear`, which may
    compute anything; layers inside `eqx.nn.WeightNorm` and `eqx.nn.SpectralNorm`, whose
    weight is not a parameter; layers that are tagged already.

    **Arguments:**

    - `model`: any PyTree with Equinox layers.
    - `block`: how the layers' curvature is approximated.

    **Returns:**

    The model with the same leaves, the same outputs and the same files
    (`eqx.tree_serialise_leaves`).

    !!! Example

        ```python
        model = kfac.convert(eqx.nn.MLP(784, 10, 256, 2, key=key))
        ```
    """

    def swap(node):
        if type(node) is eqx.nn.Linear:
            return _with_fields_of(Linear, node, tag=Tag(Dense(), block))
        return node

    def is_leaf(node):
        return (
            type(node) is eqx.nn.Linear
            or is_tagged(node)
            or isinstance(node, _reparametrised)
        )

    return jtu.tree_map(swap, model, is_leaf=is_leaf)


def revert(model: _T) -> _T:
    """The inverse of [`eqx_kfac.convert`][]: every `kfac.Linear` becomes the
    `equinox.nn.Linear` that it was."""

    def swap(node):
        return _with_fields_of(eqx.nn.Linear, node) if type(node) is Linear else node

    return jtu.tree_map(swap, model, is_leaf=lambda node: type(node) is Linear)


def cast(model: _T, dtype: Any) -> _T:
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


def _with_fields_of(cls: type, layer: Any, **extra: Any) -> Any:
    """An instance of `cls` with the fields of `layer`, without running an `__init__`."""
    new = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = extra[field.name] if field.name in extra else getattr(layer, field.name)
        object.__setattr__(new, field.name, value)
    return new
