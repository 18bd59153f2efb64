"""How long the velocity is: as the curvature has it, and as gradients say."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Extent(eqx.Module):
    r"""How long the velocity $\delta$ is. The blocks $\hat F$ of the curvature know
    nothing of each other: where layers add up, to a residual stream say,
    $\langle \delta, F \delta \rangle$ may be a hundred times
    $\langle \delta, \hat F \delta \rangle$. The gradients before and after a step
    $\delta = \mu \delta_\text{prev} - \alpha \hat F^{-1} \nabla h$, of two batches, tell
    without any computation how many times,

    $$\kappa \leftarrow \frac12 \kappa + \frac12 \max\Bigl(1,
    \frac{\langle \delta, \nabla h' \rangle - \langle \mu \delta_\text{prev}, \nabla h
    \rangle} {\langle \delta, \hat F \delta \rangle}\Bigr),$$

    up to the difference between Hessian and Fisher. The new part of the velocity,
    $-\alpha \hat F^{-1} \nabla h$, was made of the gradient before the step, and is in
    line with the noise of its batch. Nobody knows how much of that slope is noise,
    so the formula leaves it out. Hence $\kappa$ is rather too small than too
    large, by at most the descent that the new part promised.

    A velocity that leads uphill for several steps is too long as well, although its slope
    is not new: where there are many parameters, most of what would turn it round is the
    noise of batches. So the part of the loss by which it leads uphill is averaged,

    $$u \leftarrow \frac45 u + \frac15 \operatorname{clip}\Bigl(
    \frac{\langle \delta_\text{prev}, \nabla h \rangle}{|h|}, -1, 1\Bigr),$$

    with zero for a slope that is clear by itself: one for which the step uses less of the
    momentum at once (see [`eqx_kfac.TrustRegion`][]).

    **Fields:**

    - `squared_length`: $\langle \delta, \hat F \delta \rangle$.
    - `slope`: $\langle \mu \delta_\text{prev}, \nabla h \rangle$ before the step.
    - `coupling`: $\kappa$.
    - `uphill`: $u$.
    - `growth`: how many times larger than given the radius of the region is, because of
        the unit of the targets.
    """

    squared_length: Float[Array, ""]
    slope: Float[Array, ""]
    coupling: Float[Array, ""]
    uphill: Float[Array, ""]
    growth: Float[Array, ""]

    def coupling_given(self, slope: Float[Array, ""]) -> Float[Array, ""]:
        r"""$\kappa$, given the slope along $\delta$ after the step. (Nothing is learnt
        from a velocity of zero, nor from numbers that overflow.)"""
        moving = self.squared_length > 0
        ratio = (slope - self.slope) / jnp.where(moving, self.squared_length, 1)
        known = moving & jnp.isfinite(ratio)
        ratio = jnp.where(known, jnp.maximum(ratio, 1), self.coupling)
        return 0.5 * (self.coupling + ratio)

    def uphill_given(
        self, slope: Float[Array, ""], value: Float[Array, ""]
    ) -> Float[Array, ""]:
        """$u$, given the slope along the velocity before the step, or zero, and the loss.
        (A loss of zero, or numbers that overflow, say nothing.)"""
        value = value.astype(slope.dtype)
        part = slope / jnp.where(value == 0, jnp.inf, jnp.abs(value))
        part = jnp.where(jnp.isfinite(part), jnp.clip(part, -1, 1), self.uphill)
        return 0.8 * self.uphill + 0.2 * part

    def scaled(self, factor: Float[Array, ""]) -> "Extent":
        """The extent of `factor` times the velocity. (Zero times a length that has
        overflowed is zero.)"""
        factor = factor.astype(self.slope.dtype)
        times = lambda factor, a: jnp.where(factor > 0, factor * a, 0)
        squared_length = times(factor**2, self.squared_length)
        slope = times(factor, self.slope)
        same = self.coupling, self.uphill, self.growth
        return Extent(squared_length, slope, *same)

    def stopped(self, flag: Bool[Array, ""]) -> "Extent":
        """The extent after the velocity was set to zero, if `flag` is true."""
        return self.scaled(jnp.where(flag, 0.0, 1.0))


def init_extent() -> Extent:
    """The extent of no velocity. (Of distinct arrays, so that each may be donated.)"""
    return Extent(
        squared_length=jnp.zeros((), float),
        slope=jnp.zeros((), float),
        coupling=jnp.ones((), float),
        uphill=jnp.zeros((), float),
        growth=jnp.ones((), float),
    )
