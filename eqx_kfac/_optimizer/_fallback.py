"""The optimizer of the parameters that no tag covers."""

from typing import Any

import optax

from .._custom_types import Model
from .._tag import partition_tagged


def init_fallback(
    model: Model, fallback: optax.GradientTransformation | None
) -> optax.OptState | None:
    """The fallback's state for the parameters that no tag covers."""
    _, rest = partition_tagged(model)
    return None if fallback is None else fallback.init(rest)


def update_fallback(
    grads: Model,
    state: Any,  # Whatever `fallback.init` returned.
    model: Model,
    fallback: optax.GradientTransformation | None,
) -> tuple[Model, optax.OptState | None]:
    """The fallback's updates (`None` at covered leaves) and its new state."""
    _, grads = partition_tagged(grads)
    if fallback is None:
        return grads, state
    _, params = partition_tagged(model)
    return fallback.update(grads, state, params)
