"""Choices: numbers that may be schedules, work that is not due at every step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._misc import check_count
from ._solver import AbstractDampedSolver


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


#
# What a user chose
#


def check_number(
    name: str, value: Any, valid: Callable, range_: str, schedule: bool = True
) -> None:
    """Raises unless `value` is a number in its range, a scalar array, or a schedule."""
    number = isinstance(value, (int, float))
    if number and not valid(value):
        raise ValueError(f"`{name}` must be {range_}, but is {value}.")
    scheduled = schedule and callable(value)
    if not (number or scheduled or (isinstance(value, jax.Array) and value.ndim == 0)):
        kinds = "a number or a schedule (of scalars)" if schedule else "a number"
        raise TypeError(f"`{name}` must be {kinds}, but is {value!r}.")


def check_instance(name: str, value: Any, cls: type, example: str) -> None:
    """Raises unless `value` is an instance of `cls`."""
    if isinstance(value, cls):
        return
    hint = f"such as `{example}`"
    if isinstance(value, type) and issubclass(value, cls):
        hint = f"not its class: did you mean `kfac.{value.__name__}()`?"
    raise TypeError(f"`{name}` must be an object {hint}, but is {value!r}.")


def check_preconditioner(
    damping: Any, solver: Any, inverse_period: Any, ema: Any, fallback: Any
) -> None:
    """Raises for choices that no K-FAC preconditioner can have."""
    check_number("damping", damping, lambda v: v >= 0, "at least 0")
    check_number("ema", ema, lambda v: 0 <= v <= 1, "in [0, 1]")
    check_count("inverse_period", inverse_period, 1)
    check_instance("solver", solver, AbstractDampedSolver, "kfac.Cholesky()")
    if fallback is not None and not all(
        callable(getattr(fallback, name, None)) for name in ("init", "update")
    ):
        raise TypeError(
            "`fallback` must be an optax transformation such as `optax.adam(1e-3)`, but "
            f"is {fallback!r}."
        )
