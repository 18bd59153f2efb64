"""Functions that have no forward-mode derivative."""

from collections.abc import Callable
from typing import Any

import jax

from .._program import contains as contains


def check_pushes_forward(what: str, fn: Callable, *args: Any) -> None:
    """Raises if a linear function cannot be evaluated, but only transposed. (JAX does,
    once it compiles, but does not say why anybody should want to.)"""
    if contains(jax.make_jaxpr(fn)(*args).jaxpr, "custom_lin"):
        raise TypeError(
            f"{what} a forward-mode derivative of the loss function, which a "
            "`jax.custom_vjp` (or `eqx.filter_custom_vjp`) in it does not have. Use "
            "`jax.custom_jvp` instead, from which the other mode follows."
        )
