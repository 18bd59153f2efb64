"""How long the velocity is, as the curvature has it and as gradients say, and how much of
the descent that it promises lasts."""

import dataclasses

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

    up to the difference between Hessian and Fisher. (With [`eqx_kfac.ScheduleFree`][],
    the velocity is another vector, $m$. Then the slopes are those along $m$, over
    $\langle m, \hat F \delta \rangle$.) The new part of the velocity,
    $-\alpha \hat F^{-1} \nabla h$, was made of the gradient before the step, and is in
    line with the noise of its batch. A single step cannot tell how much of that slope is
    noise, so the formula leaves it out. Hence $\kappa$ is rather too small than too
    large, by at most the descent that the new part promised.

    A velocity that leads uphill for several steps is too long as well, although its slope
    is not new: where there are many parameters, most of what would turn it round is the
    noise of batches. So the part of the loss by which it leads uphill is averaged,

    $$u \leftarrow \frac45 u + \frac15 \operatorname{clip}\Bigl(
    \frac{\langle \delta_\text{prev}, \nabla h \rangle}{|h|}, -1, 1\Bigr),$$

    with zero for a slope that is clear by itself: one for which the step uses less of the
    momentum at once (see [`eqx_kfac.TrustRegion`][]).

    A step promises its own batch a descent, as the quadratic model has it. How much of
    that is noise is told by the loss of the next batch, $h'$. With averages of what
    losses fall by from batch to batch, of its square, and of what was promised,

    $$d = \frac{h - h'}{\max(|h|, |h'|)}, \qquad
    f \leftarrow \frac{9}{10} f + \frac{1}{10} d, \qquad
    s \leftarrow \frac{9}{10} s + \frac{1}{10} d^2, \qquad
    p \leftarrow \frac{9}{10} p + \frac{1}{10} \operatorname{clip}\Bigl(
    \frac{-\langle \delta, \nabla h \rangle - \frac12 \langle \delta, \hat F \delta
    \rangle}{|h|}, 0, 1\Bigr),$$

    a part of the descent lasts that is at least (by two standard errors of $f$, if all
    $d$ are independent)

    $$\ell = \frac{1}{p} \Bigl(f - 2 \sqrt{(s - f^2) / 19}\Bigr).$$

    At first, $f = s = 0$ and $p = 1$. Where most of a gradient is noise, $\ell$ is below
    zero; where every batch is all of the data, mostly between a third and one, or above.

    How much has been learnt is told by the first loss, $h_1$, and an average of the last
    ones,

    $$\bar h \leftarrow \frac{9}{10} \bar h + \frac{1}{10} h.$$

    **Fields:**

    - `squared_length`: $\langle \delta, \hat F \delta \rangle$.
    - `slope`: $\langle \mu \delta_\text{prev}, \nabla h \rangle$ before the step.
    - `descent`: $-\langle \delta, \nabla h \rangle$ before the step.
    - `coupling`: $\kappa$.
    - `uphill`: $u$.
    - `fallen`: $f$.
    - `fallen_square`: $s$.
    - `promised`: $p$.
    - `growth`: how many times larger than given the radius of the region is, because of
        the unit of the targets.
    - `first_loss`: $h_1$; 0 before there has been any loss.
    - `recent_loss`: $\bar h$.
    - `step_length`, `along`: $\langle \delta, \hat F \delta \rangle$ and
        $\langle m, \hat F \delta \rangle$ if the velocity is the $m$ of
        [`eqx_kfac.ScheduleFree`][], and not the last step, $\delta$; else `None`.
    """

    squared_length: Float[Array, ""]
    slope: Float[Array, ""]
    descent: Float[Array, ""]
    coupling: Float[Array, ""]
    uphill: Float[Array, ""]
    fallen: Float[Array, ""]
    fallen_square: Float[Array, ""]
    promised: Float[Array, ""]
    growth: Float[Array, ""]
    first_loss: Float[Array, ""]
    recent_loss: Float[Array, ""]
    step_length: Float[Array, ""] | None = None
    along: Float[Array, ""] | None = None

    @property
    def lasting(self) -> Float[Array, ""]:
        r"""$\ell$, the part of the promised descent that lasts at least."""
        # An average with weights that fall by 0.9 has 0.1 / 1.9 of the variance.
        variance = jnp.maximum(self.fallen_square - self.fallen**2, 0) / 19
        least = self.fallen - 2 * jnp.sqrt(variance)
        return least / jnp.maximum(self.promised, 1e-30)

    @property
    def learnt(self) -> Float[Array, ""]:
        r"""How many times smaller than the first loss the last ones are,
        $h_1 / \bar h$: at least 1, and at most 1,000, as where one of them is not
        positive."""
        positive = (self.first_loss > 0) & (self.recent_loss > 0)
        ratio = self.first_loss / jnp.where(positive, self.recent_loss, 1)
        return jnp.where(positive, jnp.clip(ratio, 1, 1_000), jnp.full_like(ratio, 1_000))

    def coupling_given(self, slope: Float[Array, ""]) -> Float[Array, ""]:
        r"""$\kappa$, given the slope along the velocity after the step. (A velocity of
        zero, or numbers that overflow, say nothing.)"""
        length = self.squared_length if self.along is None else self.along
        moving = length > 0
        ratio = (slope - self.slope) / jnp.where(moving, length, 1)
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

    def between(self, before: Float[Array, ""], value: Float[Array, ""]) -> "Extent":
        """The extent with $f$, $s$ and $p$, given the loss before the last step, and the
        one after it, of another batch. (Losses of zero, or numbers that overflow, say
        nothing.)"""
        before, value = (h.astype(self.descent.dtype) for h in (before, value))
        length = self.squared_length if self.step_length is None else self.step_length
        promise = self.descent - 0.5 * length
        larger = jnp.maximum(jnp.abs(before), jnp.abs(value))
        known = (before != 0) & jnp.isfinite(larger) & jnp.isfinite(promise)
        fall = (before - value) / jnp.where(known, larger, 1)
        promise = jnp.clip(promise / jnp.where(known, jnp.abs(before), 1), 0, 1)

        def averaged(average, new):
            return jnp.where(known, 0.9 * average + 0.1 * new, average)

        return dataclasses.replace(
            self,
            fallen=averaged(self.fallen, fall),
            fallen_square=averaged(self.fallen_square, fall**2),
            promised=averaged(self.promised, promise),
        )

    def after(self, value: Float[Array, ""]) -> "Extent":
        r"""The extent with $h_1$ and $\bar h$, given the loss. (A first loss of zero, or
        one that is not finite, says nothing.)"""
        value = value.astype(self.first_loss.dtype)
        finite, began = jnp.isfinite(value), self.first_loss != 0
        recent = jnp.where(began, 0.9 * self.recent_loss + 0.1 * value, value)
        return dataclasses.replace(
            self,
            first_loss=jnp.where(began | ~finite, self.first_loss, value),
            recent_loss=jnp.where(finite, recent, self.recent_loss),
        )

    def scaled(self, factor: Float[Array, ""]) -> "Extent":
        """The extent of `factor` times the velocity. (Zero times a length that has
        overflowed is zero.)"""
        factor = factor.astype(self.slope.dtype)
        times = lambda factor, a: jnp.where(factor > 0, factor * a, 0)
        both = lambda a: None if a is None else times(factor**2, a)
        return dataclasses.replace(
            self,
            squared_length=times(factor**2, self.squared_length),
            slope=times(factor, self.slope),
            descent=times(factor, self.descent),
            step_length=both(self.step_length),
            along=both(self.along),
        )

    def stopped(self, flag: Bool[Array, ""]) -> "Extent":
        """The extent after the velocity was set to zero, if `flag` is true."""
        return self.scaled(jnp.where(flag, 0.0, 1.0))


def init_extent(schedule_free: bool = False) -> Extent:
    """The extent of no velocity. (Of distinct arrays, so that each may be donated.)"""
    number = lambda: jnp.zeros((), float) if schedule_free else None
    return Extent(
        squared_length=jnp.zeros((), float),
        slope=jnp.zeros((), float),
        descent=jnp.zeros((), float),
        coupling=jnp.ones((), float),
        uphill=jnp.zeros((), float),
        fallen=jnp.zeros((), float),
        fallen_square=jnp.zeros((), float),
        promised=jnp.ones((), float),
        growth=jnp.ones((), float),
        first_loss=jnp.zeros((), float),
        recent_loss=jnp.zeros((), float),
        step_length=number(),
        along=number(),
    )
