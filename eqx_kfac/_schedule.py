"""What depends on the number of the step: schedules, and work that is not always due."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def at(value: Any, step: Int[Array, ""]) -> Any:
    """A number, or a schedule at `step`, as an array.

    A Python number becomes what `jnp.array` makes of it, so that setting it to another
    `jnp.array(number)` is no new type, and no new compilation. Arrays are copied: the
    state may be donated.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return jnp.array(float(value))
    return jnp.array(value(step), float) if callable(value) else jnp.array(value)


def when_due(
    step: Int[Array, ""],
    weight: Float[Array, ""],
    period: int,
    compute: Callable,
    otherwise: Any,
    finite: Bool[Array, ""] | bool = True,
    again: Bool[Array, ""] | bool = False,
) -> Any:
    """`compute()` every `period` steps, at every step until there is any curvature (its
    `weight` is zero), and if it is due `again`, but only if all is `finite`; else
    `otherwise`."""
    if period == 1 and finite is True:
        return compute()
    due = (step % period == 0) | (weight == 0) | again
    return jax.lax.cond(due & finite, compute, lambda: otherwise)
