"""What depends on the number of the step: schedules, and work that is not always due."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_count, is_number, is_scalar, plain


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


class Staggered(eqx.Module):
    """Factorises some layers (or some layers of a stack) at every step, instead of all at
    the same step, so that each has its turn once in `period` steps: the same work, evenly
    spread. Pass it to [`eqx_kfac.KFAC`][] as `inverse_period`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(inverse_period=kfac.Staggered(50))
        ```
    """

    period: int = eqx.field(static=True)

    def __init__(self, period: int = 50):
        """**Arguments:**

        - `period`: the number of steps in which every layer has one turn, at least 1.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.period = check_count("period", period, 1)


class Due(NamedTuple):
    """When work is due: every `period` steps, at every step until there is any curvature
    (its `weight` is zero), and whenever it is due `again`."""

    step: Int[Array, ""]
    weight: Float[Array, ""]
    period: int
    turns: int = 1  # Parts of the work, one after the other within a period.
    again: Bool[Array, ""] | bool = False

    @classmethod
    def of(
        cls, state: Any, period: int | Staggered, again: Bool[Array, ""] | bool = False
    ) -> "Due":
        """The `Due` of work with this period, given the state of an optimizer."""
        in_turn = isinstance(period, Staggered)
        number = period.period if in_turn else period
        turns = number if in_turn else 1
        return cls(state.step, state.weight, number, turns, again)

    @property
    def every_part(self) -> Bool[Array, ""]:
        """Whether all of the work is due, not only the part whose turn it is."""
        return (self.weight == 0) | self.again

    @property
    def now(self) -> Bool[Array, ""]:
        """Whether any of the work is due."""
        return (jnp.fmod(self.step, self.period) == 0) | self.every_part

    @property
    def always(self) -> bool:
        """Whether some of the work is due at every step, and this is known while
        tracing."""
        return self.period == 1 or self.turns > 1

    def when(
        self, compute: Callable, otherwise: Any, finite: Bool[Array, ""] | bool = True
    ) -> Any:
        """`compute()` if it is due and all is `finite`; else `otherwise`."""
        if self.period == 1 and finite is True:
            return compute()
        return jax.lax.cond(self.now & finite, compute, lambda: otherwise)


def early(step: Int[Array, ""], period: int) -> Bool[Array, ""]:
    """Whether a step is one of the first ones at which work that is due every `period`
    steps is worth doing more often: 0, 1, 2, 3, 4, 6, 8, 12, and so on, twice until the
    number of steps has doubled, as long as that is less than two periods."""
    lowest = step & -step  # The largest power of two that divides it.
    return ((step == lowest) | (step == 3 * lowest)) & (step < 2 * period)
