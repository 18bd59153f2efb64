"""Whether what a user passes is of the right kind, and in its range."""

from collections.abc import Callable
from typing import Any

import jax


_RANGES: dict[str, Callable[[Any], bool]] = {
    "positive": lambda v: v > 0,
    "at least 0": lambda v: v >= 0,
    "in (0, 1)": lambda v: 0 < v < 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in [0, 1]": lambda v: 0 <= v <= 1,
}


def check_number(name: str, value: Any, range_: str, schedule: bool = True) -> None:
    """Raises unless `value` is a number in its range, a scalar array, or a schedule."""
    number = isinstance(value, (int, float))
    if number and not _RANGES[range_](value):
        raise ValueError(f"`{name}` must be {range_}, but is {value}.")
    scheduled = schedule and callable(value)
    if not (number or scheduled or (isinstance(value, jax.Array) and value.ndim == 0)):
        kinds = "a number or a schedule (of scalars)" if schedule else "a number"
        raise TypeError(f"`{name}` must be {kinds}, but is {value!r}.")


def check_count(name: str, value: Any, least: int) -> None:
    """Raises unless `value` is an integer that is at least `least`."""
    if not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, but is {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {value}.")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be `True` or `False`, but is {value!r}.")


def check_instance(name: str, value: Any, cls: type, example: str) -> None:
    """Raises unless `value` is an instance of `cls`."""
    if isinstance(value, cls):
        return
    hint = f"such as `{example}`"
    if isinstance(value, type) and issubclass(value, cls):
        hint = f"not its class: did you mean `kfac.{value.__name__}()`?"
    raise TypeError(f"`{name}` must be an object {hint}, but is {value!r}.")
