"""Whether what a layer is called with is one input of it."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._custom_types import Layer
from .._tag import LayerError


def check_input(layer: Layer, x: Any, of: Any = None) -> None:
    """Raises a `LayerError` of `layer` unless `x` has the shape of one input (of the
    layer `of` inside it, if given)."""
    inner = layer if of is None else of
    name, shape = _described(inner)
    name = name if of is None else f"{type(layer).__name__}({name})"
    if not eqx.is_array_like(x):
        raise LayerError(
            layer,
            f"`kfac.{name}` acts on one input of shape {_shown(shape)}, but got a "
            f"{type(x).__name__}. A layer that returns `(out, state)` has to be taken "
            "apart first.",
        )
    if not _fits(jnp.shape(x), shape):
        raise LayerError(
            layer,
            f"`kfac.{name}` acts on one input of shape {_shown(shape)}, but got an array "
            f"of shape {jnp.shape(x)}. {_remedy(jnp.ndim(x), shape)}",
        )


def _remedy(ndim: int, wanted: tuple) -> str:
    """What is to be done with an array of another shape than is `wanted`."""
    if ndim < len(wanted) - (wanted[-1:] == (...,)):
        return "It has too few axes: that of channels or features may be missing."
    return "For batched inputs use `jax.vmap(layer)(x)`."


def check_floating(layer: Layer, x: Any) -> None:
    """Raises a `LayerError` unless `x` has moments of the second order."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise LayerError(
            layer,
            f"`kfac.{_described(layer)[0]}` got an input of type {jnp.result_type(x)}. "
            "Curvature needs floating-point inputs: convert them first, e.g. with "
            "`x.astype(jnp.float32)`.",
        )


def check_integer(layer: Layer, x: Any) -> None:
    """Raises a `LayerError` unless `x` is an index."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise LayerError(
            layer,
            f"`kfac.{_described(layer)[0]}` looks up an integer, but got an input of "
            f"type {jnp.result_type(x)}. Convert it first, e.g. with "
            "`x.astype(jnp.int32)`.",
        )


def _described(layer: Layer) -> tuple[str, tuple]:
    """A layer of Equinox's as it is constructed, and the shape of its input: `None` for
    an axis of any length, `...` for any more axes."""
    name = type(layer).__name__
    match layer:
        case eqx.nn.Linear(in_features=size, out_features=out):
            shape = () if size == "scalar" else (size,)
            return f"{name}({size!r}, {out!r})", shape
        case eqx.nn.Conv() | eqx.nn.ConvTranspose():
            channels = layer.in_channels, layer.out_channels
            shape = (channels[0], *[None] * layer.num_spatial_dims)
            return f"{name}({channels[0]}, {channels[1]}, ...)", shape
        case eqx.nn.Embedding(num_embeddings=number, embedding_size=size):
            return f"{name}({number}, {size})", ()
        case eqx.nn.LayerNorm(shape=shape) | eqx.nn.RMSNorm(shape=shape):
            return f"{name}({shape})", shape
        case eqx.nn.GroupNorm(groups=groups, channels=channels):
            affine = layer.channelwise_affine
            return f"{name}({groups}, {channels})", (channels if affine else None, ...)
        case eqx.nn.BatchNorm(input_size=size):
            return f"{name}({size})", (size, ...)
        case eqx.nn.GRUCell() | eqx.nn.LSTMCell():
            sizes = layer.input_size, layer.hidden_size
            return f"{name}({sizes[0]}, {sizes[1]})", sizes[:1]
    return name, (...,)


def _fits(shape: tuple, wanted: tuple) -> bool:
    if wanted[-1:] == (...,):
        wanted = wanted[:-1]
        shape = shape[: len(wanted)]
    return len(shape) == len(wanted) and all(
        w is None or s == w for s, w in zip(shape, wanted)
    )


def _shown(shape: tuple) -> str:
    sizes = ["any" if s is None else "..." if s is ... else str(s) for s in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
