"""What depends on the number of the step: schedules, and work that is not always due."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._checks import is_number, is_scalar, plain


def at(value: Any, step: Int[Array, ""]) -> Any:
    """A number, or a schedule at `step`, as an array.

    A Python number becomes what `jnp.array` makes of it, so that setting it to another
    `jnp.array(number)` is no new type, and no new compilation. Arrays are copied: the
    state may be donated.
    """
    if value is None:
        return None
    value = plain(value)
    if is_number(value):
        return jnp.array(float(value))
    if callable(value):
        return jnp.array(_scheduled(value, step), float)
    integer = jnp.issubdtype(value.dtype, jnp.integer)
    return jnp.array(value, float) if integer else jnp.array(value)


def _scheduled(schedule: Callable, step: Int[Array, ""]) -> Any:
    """The number that a schedule gives."""
    value = plain(schedule(step))
    if is_number(value) or is_scalar(value):
        return value
    if isinstance(value, jax.Array):
        value = f"an array of type {value.dtype} and shape {value.shape}"
    raise TypeError(
        "A schedule must return a number for every step, such as "
        f"`optax.cosine_decay_schedule(...)` does, but {schedule!r} returned {value}."
    )


def early(step: Int[Array, ""], period: int) -> Bool[Array, ""]:
    """Whether a step is one of the first ones at which work that is due every `period`
    steps is worth doing more often: the powers of two below the period."""
    return (step & (step - 1) == 0) & (step < period)


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
