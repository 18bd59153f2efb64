"""What guards a step."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._checks import AT_LEAST_0, check_number
from .._custom_types import Scalar


class AbstractGuard(eqx.Module):
    """A rule for which steps are not taken, given the loss before and after them. See
    "Writing your own"."""

    def due(self, step: Int[Array, ""]) -> Bool[Array, ""] | bool:
        """Whether the loss after the step is checked, which takes a forward pass: at
        every step, unless a subclass says otherwise."""
        return True

    @abc.abstractmethod
    def __call__(
        self, value: Float[Array, ""], new_value: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether the step is rejected, given the loss before and after it, on the same
        batch. If the latter is not finite, the step is rejected anyway."""


class MaxIncrease(AbstractGuard):
    """Rejects a step after which the loss, on the same batch, is not finite or has risen
    by more than `tolerance`. Pass it to [`eqx_kfac.KFAC`][] as `guard`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(guard=kfac.MaxIncrease(0.1))
        ```
    """

    tolerance: Scalar

    def __init__(self, tolerance: Scalar = 0.0):
        """**Arguments:**

        - `tolerance`: at least 0, in nats. `jnp.inf` rejects only steps to where the loss
            is not finite.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.tolerance = check_number("tolerance", tolerance, AT_LEAST_0)

    def __call__(
        self, value: Float[Array, ""], new_value: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether the loss has risen by more than `tolerance`."""
        tolerance = jnp.asarray(self.tolerance)
        return (new_value - value).astype(tolerance.dtype) > tolerance
