"""Damping that adapts."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._checks import (
    AT_LEAST_0,
    BETWEEN_0_AND_1,
    check_count,
    check_number,
    FRACTION,
    is_number,
    POSITIVE,
)
from .._custom_types import Scalar
from ._hyperparameters import AbstractRule


class AbstractDamping(AbstractRule):
    """A rule for the damping, given how well the quadratic model has predicted the
    loss. Subclasses define its `initial` value, and when a ratio is `due`. See "Writing
    your own".

    **Fields:**

    - `calibration`: the most ratios that are measured before the first step.
    """

    calibration: eqx.AbstractVar[int]

    @abc.abstractmethod
    def due(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether the ratio is measured in this step."""

    @abc.abstractmethod
    def __call__(
        self, damping: Float[Array, ""], ratio: Float[Array, ""]
    ) -> Float[Array, ""]:
        """The next damping, given this one and the reduction ratio. Called whenever that
        is due, and after a rejected step, with a ratio of minus infinity."""

    def given_share(
        self,
        damping: Float[Array, ""],
        ratio: Float[Array, ""],
        share: Float[Array, ""],
    ) -> Float[Array, ""]:
        r"""The next damping, given also which `share` of the curvature along the step is
        damping: $\lambda \lVert \delta \rVert^2 / 2$ over the descent that the quadratic
        model promises. This is what is called, and calls the rule itself, without the
        share, unless a subclass says otherwise."""
        return self(damping, ratio)


class LevenbergMarquardt(AbstractDamping):
    r"""Damping that follows how well the quadratic model predicts the loss. Every
    `interval` steps, on the step's own batch, the *reduction ratio*

    $$\rho = \frac{h(\theta + \delta) - h(\theta)}{q(\delta)}$$

    is measured. Above `upper` (3/4), the model can be trusted and $\lambda \leftarrow
    \omega^T \lambda$. Below `lower` (1/4), or if the ratio is not finite, or if the model
    promised no descent, $\lambda \leftarrow \lambda / \omega^T$. A rejected step
    makes the damping grow too. Pass it to [`eqx_kfac.KFAC`][] as `damping`.

    What the model promises includes the damping. If that is a small share of it,

    $$s = \frac{\lambda \lVert \delta \rVert^2 / 2}{-q(\delta)}$$

    (at the minimum of the model, the share of the damping in the curvature along the
    step), a good ratio is no reason for less damping: the model would hardly change. But
    the preconditioner would, which is damped as well, and whose curvature is only
    approximate. So a damping whose share is `negligible` is left alone instead of
    falling, as a trust region does not grow that has not held a step back.

    !!! Example

        ```python
        damping = kfac.LevenbergMarquardt(initial=1.0, calibration=50)
        optimizer = kfac.KFAC(1e-2, 0.9, damping)
        ```

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 6.5. The trust region that does not
        grow is that of J. Nocedal and S. Wright, *Numerical Optimization*, 2nd edition,
        2006, algorithm 4.1.
    """

    initial: Scalar
    decay: Scalar
    interval: int = eqx.field(static=True)
    lower: Scalar
    upper: Scalar
    minimum: Scalar
    maximum: Scalar
    calibration: int = eqx.field(static=True)
    negligible: Scalar | None

    def __init__(
        self,
        initial: Scalar,
        decay: Scalar = 0.95,
        interval: int = 5,
        lower: Scalar = 0.25,
        upper: Scalar = 0.75,
        minimum: Scalar = 1e-8,
        maximum: Scalar = 1e8,
        calibration: int = 0,
        negligible: Scalar | None = None,
    ):
        r"""**Arguments:**

        - `initial`: the initial damping.
        - `decay`: $\omega \in (0, 1)$, for every step of the interval.
        - `interval`: $T$, the number of steps between two measurements. One measurement
            costs one forward pass (and one forward-mode derivative if neither learning
            rate nor momentum is an [`eqx_kfac.QuadraticModel`][]).
        - `lower`, `upper`: the reduction ratios between which the damping is left alone.
        - `minimum`, `maximum`: the bounds of the damping.
        - `calibration`: before the first step, repeat the rule on the first batch until
            it leaves the damping alone or changes direction, at most so many times. A bad
            guess of `initial` then costs work rather than steps.
        - `negligible`: the share $s$ below which the damping does not fall. `None`: it
            always may.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.initial = check_number("initial", initial, POSITIVE, schedule=True)
        self.decay = check_number("decay", decay, BETWEEN_0_AND_1)
        self.lower = check_number("lower", lower, AT_LEAST_0)
        self.upper = check_number("upper", upper, AT_LEAST_0)
        self.minimum = check_number("minimum", minimum, POSITIVE)
        self.maximum = check_number("maximum", maximum, POSITIVE)
        _check_order("lower", self.lower, "upper", self.upper)
        _check_order("minimum", self.minimum, "maximum", self.maximum)
        self.interval = check_count("interval", interval, 1)
        self.calibration = check_count("calibration", calibration, 0)
        self.negligible = (
            None
            if negligible is None
            else check_number("negligible", negligible, FRACTION)
        )

    def due(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether the ratio is measured in this step: the last one of every interval."""
        return (step + 1) % self.interval == 0

    def __call__(
        self, damping: Float[Array, ""], ratio: Float[Array, ""]
    ) -> Float[Array, ""]:
        """The next damping, given this one and the reduction ratio. A ratio that is not
        finite counts as a failure."""
        factor = self.decay**self.interval
        failed = ~jnp.isfinite(ratio) | (ratio < self.lower)
        trusted = ~failed & (ratio > self.upper)
        new = jnp.where(
            failed, damping / factor, jnp.where(trusted, damping * factor, damping)
        )
        return jnp.clip(new, self.minimum, self.maximum)

    def given_share(
        self,
        damping: Float[Array, ""],
        ratio: Float[Array, ""],
        share: Float[Array, ""],
    ) -> Float[Array, ""]:
        """The next damping: the same one instead of less, if its share is negligible."""
        new = self(damping, ratio)
        if self.negligible is None:
            return new
        same = jnp.minimum(damping, self.maximum)  # The state may have been given more.
        return jnp.where(share < self.negligible, jnp.maximum(new, same), new)


def share_of(
    damping: Float[Array, ""], norm: Float[Array, ""], predicted: Float[Array, ""]
) -> Float[Array, ""]:
    """The share of the damping in what the quadratic model promises of a step of this
    norm; one, if it promises no descent: then a rule has other things to go by."""
    squared = jnp.square(norm.astype(damping.dtype))
    promised = -predicted.astype(damping.dtype)
    descends = promised > 0
    share = damping * squared / (2 * jnp.where(descends, promised, 1))
    return jnp.where(descends, share, 1)


def calibrated(
    rule: AbstractDamping,
    damping: Float[Array, ""],
    measure: Callable[[Float[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]],
    due: Bool[Array, ""],
) -> Float[Array, ""]:
    """The damping after repeating the rule, given the reduction ratio and the share as
    functions of the damping, until it leaves the damping alone or turns round: then the
    larger one is taken."""

    def repeat(carry):
        damping, last, number, _ = carry
        new = rule.given_share(damping, *measure(damping))
        change = jnp.sign(new - damping)
        turned = change * last < 0
        new = jnp.where(turned, jnp.maximum(new, damping), new)
        return new, change, number + 1, turned | (change == 0)

    def again(carry):
        _, _, number, done = carry
        return ~done & (number < rule.calibration)

    def calibrate():
        # Done from the start if it is not due: `vmap` runs both branches of a `cond`.
        start = damping, jnp.zeros_like(damping), jnp.zeros((), jnp.int32), ~due
        return jax.lax.while_loop(again, repeat, start)[0]

    # (A loop alone would do, if XLA did not move work out of it.)
    return jax.lax.cond(due, calibrate, lambda: damping)


def _check_order(low: str, a: Any, high: str, b: Any) -> None:
    if is_number(a) and is_number(b) and a > b:
        raise ValueError(f"`{low}` ({a}) must not be above `{high}` ({b}).")
