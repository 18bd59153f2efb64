"""Numbers that may be schedules, and work that is not due at every step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def at(value: Any, step: Int[Array, ""]) -> Any:
    """A number, or a schedule at `step`, as an array of the default float type."""
    if value is None:
        return None
    value = value(step) if callable(value) else value
    return jnp.asarray(value, float)


def when_due(
    step: Int[Array, ""],
    weight: Float[Array, ""],
    period: int,
    compute: Callable,
    otherwise: Any,
) -> Any:
    """`compute()` every `period` steps, else `otherwise`. Until there is any curvature
    (its `weight` is zero), every step."""
    if period == 1:
        return compute()
    due = (step % period == 0) | (weight == 0)
    return jax.lax.cond(due, compute, lambda: otherwise)


def check_number(name: str, value: Any, valid: Callable, range_: str) -> None:
    """Raises unless `value` is a number in its range, an array, or a schedule."""
    number = isinstance(value, (int, float))
    if number and not valid(value):
        raise ValueError(f"`{name}` must be {range_}, but is {value}.")
    if not (number or callable(value) or eqx.is_array(value)):
        raise TypeError(f"`{name}` must be a number or a schedule, but is {value!r}.")
