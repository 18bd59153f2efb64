"""Whether what a user passes is of the right kind, and in its range."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._jax import Tracer


class Range(NamedTuple):
    """The numbers between two bounds. Printed as what is said of a number: that it must
    be `in [0, 1)`.

    **Fields:**

    - `includes_lowest`, `includes_highest`: whether the bound itself is one of them.
    """

    lowest: float
    highest: float = math.inf
    includes_lowest: bool = True
    includes_highest: bool = True

    def has(self, value: Any) -> Any:
        """Whether a number is one of them; of an array, each of its numbers."""
        above = value >= self.lowest if self.includes_lowest else value > self.lowest
        below = value <= self.highest if self.includes_highest else value < self.highest
        return above & below

    def __str__(self) -> str:
        if self.highest == math.inf:
            return f"at least {self.lowest}" if self.includes_lowest else "positive"
        left, right = "(["[self.includes_lowest], ")]"[self.includes_highest]
        return f"in {left}{self.lowest}, {self.highest}{right}"


POSITIVE = Range(0, includes_lowest=False)
AT_LEAST_0 = Range(0)
BETWEEN_0_AND_1 = Range(0, 1, includes_lowest=False, includes_highest=False)
FRACTION = Range(0, 1)
FRACTION_BELOW_1 = Range(0, 1, includes_highest=False)


def plain(value: Any) -> Any:
    """A number of numpy's, or an array of it without axes, as one of Python's; anything
    else as it is."""
    is_scalar = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
    return value.item() if is_scalar else value


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python's. (Truth values are none.)"""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """Whether `value` is an array of JAX's with one real number in it."""
    kinds = (jnp.floating, jnp.integer)
    is_array = isinstance(value, jax.Array) and value.ndim == 0
    return is_array and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def check_number(name: str, value: Any, range_: Range, schedule: bool = False) -> Any:
    """`value`, one of numpy's as one of Python's. Raises unless it is a number in its
    range, a scalar array, or (where there may be one) a `schedule`."""
    value = plain(value)
    if is_number(value) and not range_.has(value):
        raise ValueError(f"`{name}` must be {range_}, but is {value}.")
    scheduled = schedule and callable(value) and not isinstance(value, type)
    if not (is_number(value) or is_scalar(value) or scheduled):
        kinds = "a number or a schedule (of scalars)" if schedule else "a number"
        is_rule = isinstance(value, type) and issubclass(value, eqx.Module)
        end = f": did you mean `{value.__name__}()`?" if is_rule else "."
        raise TypeError(f"`{name}` must be {kinds}, but is {value!r}{end}")
    return value


def check_array(name: str, value: object, range_: Range) -> None:
    """Raises unless all of `value`, a number or an array, is positive or at least 0: of
    an array that is being traced, nothing is known."""
    if not (is_number(plain(value)) or isinstance(value, (jax.Array, np.ndarray))):
        raise TypeError(f"`{name}` must be a number, but is {value!r}.")
    if isinstance(value, Tracer):
        return
    if not np.all(range_.has(np.asarray(value))):
        raise ValueError(f"`{name}` must be {range_}, but is {value}.")


def check_count(name: str, value: object, least: int) -> int:
    """`value`, one of numpy's as one of Python's. Raises unless it is an integer that is
    at least `least`."""
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, but is {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {value}.")
    return value


def check_examples(examples: int | None) -> int | None:
    """How many examples of a batch, at least one, or `None`: all of them."""
    return None if examples is None else check_count("examples", examples, 1)


def check_key(key: object) -> None:
    """Raises unless `key` is a single PRNG key, or `None`."""
    if key is None:
        return
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(
            f"`key` must be a PRNG key, such as `jax.random.key(0)`, but is {key!r}."
        )
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
        raise TypeError(
            "`key` must be a PRNG key, such as `jax.random.key(0)`, but is an array of "
            f"type {key.dtype} and shape {key.shape}."
        )
    if key.ndim != (0 if typed else 1):
        raise ValueError(
            f"`key` must be one PRNG key, but is an array of keys, of shape {key.shape}. "
            "Pass one of them, such as `jax.random.fold_in(key, step)`."
        )


def check_flag(name: str, value: object) -> None:
    """Raises unless `value` is a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be `True` or `False`, but is {value!r}.")


def check_instance(name: str, value: object, cls: type, example: str) -> None:
    """Raises unless `value` is an instance of `cls`."""
    if isinstance(value, cls):
        return
    if isinstance(value, type) and issubclass(value, cls):
        raise TypeError(
            f"`{name}` must be an object, not its class: did you mean "
            f"`kfac.{value.__name__}()`?"
        )
    raise TypeError(f"`{name}` must be an object such as `{example}`, but is {value!r}.")
