"""Whether the arguments of the optimizer's methods are what they should be, and in their
order."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._checks import check_key
from .._custom_types import Model
from .._tag import check_order, is_code, tagged_layers
from ._state import KFACState


def check_init(model: Model) -> None:
    """Raises for what is no model at all."""
    if isinstance(model, KFACState) or is_code(model):
        raise TypeError(
            f"`init` takes the model, or the part of it that is trained, but got "
            f"{_shown(model)}."
        )


def check_step(loss_fn: Any, model: Model, state: Any, key: Any) -> None:
    """Raises for arguments of `step` that are in another order, or something else."""
    call = "optimizer.step(loss_fn, model, state, x, y, key=key)"
    order = f"The order is `{call}`."
    if not callable(loss_fn):
        raise TypeError(
            f"`step` takes the loss function first, but got {_shown(loss_fn)}. {order}"
        )
    check_order("step", loss_fn, model, call)
    _check_state("step", model, state, order)
    check_key(key)


def check_update(grads: Any, state: Any, model: Model, value: Any) -> None:
    """Raises for arguments of `update` that are in another order, or something else."""
    order = "The order is `optimizer.update(grads, state, model, curvature=curvature)`."
    _check_state("update", model, state, order)
    if not tagged_layers(grads):
        raise TypeError(
            f"`update` takes gradients that are shaped like the model, but got "
            f"{_shown(grads)}. {order}"
        )
    if value is not None and not eqx.is_array_like(value):
        raise TypeError(
            f"`value` must be a number, but is {_shown(value)}. (That of a loss object "
            "is `loss.value`.)"
        )


def _check_state(method: str, model: Model, state: Any, order: str) -> None:
    if isinstance(model, KFACState):
        raise TypeError(f"`{method}` got a state in the place of the model. {order}")
    if not isinstance(state, KFACState):
        raise TypeError(
            f"`{method}` takes the state that `optimizer.init(model)` made, but got "
            f"{_shown(state)}. {order}"
        )


def _shown(node: PyTree) -> str:
    """A description of a node in a few words."""
    if isinstance(node, jax.Array):
        return f"an array of type {node.dtype} and shape {node.shape}"
    name = getattr(node, "__name__", None)
    return f"`{name}`" if name else f"a `{type(node).__name__}` object"
