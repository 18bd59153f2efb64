r"""How far a step may go: learning rate and momentum, made smaller until a norm
constraint or a trust region allows the step.

Squared lengths are $\langle \delta, \hat F \delta \rangle$, with $\hat F$ the damped
curvature with which the gradient was preconditioned, unless they are said to be those of
the exact Fisher."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._curvature import check_pushes_forward, LinearisedBatch
from .._custom_types import Model
from .._inner_products import tree_dot
from .._misc import at_paths, tree_where
from .._module import PlainModule
from ._extent import Extent
from ._schedule_free import Dealing, Lengths
from ._start import Start
from ._state import KFACState
from ._trust import AbstractTrustRegion


class Bounded(NamedTuple):
    """What the natural gradient and the previous velocity are multiplied by."""

    step: Lengths
    velocity: Lengths | None = None  # `None`: the velocity is the step.
    extent: Extent | None = None  # If there is a trust region.


class Bounds(PlainModule):
    """What bounds a step: nothing (the state has no `norm_constraint`), a number, or a
    trust region."""

    region: AbstractTrustRegion | None
    state: KFACState
    start: Start
    linearised: LinearisedBatch | None
    dealing: Dealing | None  # `None`: a gradient's part of the velocity decays.

    @property
    def are_measured(self) -> bool:
        """Whether the whole step is bounded by the exact Fisher of its own batch, as for
        surrogates: the averaged curvature of a policy is that of earlier policies, and
        has no unit in common with the losses beside it."""
        return self.start.kind.is_surrogate and self.region is not None

    @property
    def by_gradients(self) -> Bool[Array, ""]:
        """Whether the whole step is bounded as gradients measure it."""
        most = self._most_as_measured(self.start.remaining)
        return jnp.zeros((), bool) if most is None else jnp.isfinite(most)

    def _most_as_measured(self, remaining: Float[Array, ""]) -> Float[Array, ""] | None:
        """The bound on the length of the whole step as gradients measure it, given what
        is left to be gained; `None` if they say nothing of that length. They measure the
        Hessian, which is near the Fisher only if all outputs are natural parameters. (Of
        a surrogate, any part of what remains is infinite.)"""
        if self.region is None or not self.start.kind.is_natural:
            return None
        return self.region.of_measured(remaining)

    def lengths(self, natural: Model, gradient: Model) -> Bounded:
        r"""Learning rate $\alpha$ and momentum $\mu$ as the bounds allow them for
        $\delta = \mu \delta_\text{prev} - \alpha \hat F^{-1} \nabla h$, given
        $\hat F^{-1} \nabla h$ and $\nabla h$; and the extent of $\delta$ if there is a
        trust region. Bounds that are measured come afterwards: see `measured_part`."""
        state, rate = self.state, self.state.learning_rate
        one = jnp.ones_like(rate)
        if state.norm_constraint is None:
            return Bounded(*self._dealt(rate, one, one))
        norm = tree_dot(natural, gradient).astype(rate.dtype)
        if self.region is None:
            return Bounded(*self._dealt(self._within_number(norm), one, one))
        if self.are_measured:
            return Bounded(*self._dealt(rate, one, one), state.extent)
        return self._within_region(self.region, norm, gradient)

    def _dealt(
        self, rate: Float[Array, ""], kept: Float[Array, ""], scale: Float[Array, ""]
    ) -> tuple[Lengths, Lengths | None]:
        """The lengths of the step and of the next velocity, given the learning rate, the
        part of the momentum that is kept, and by which factor the step is shorter."""
        if self.dealing is None:
            momentum = self.state.momentum
            momentum *= kept.astype(momentum.dtype)
            return (scale * rate, scale * momentum), None
        first, second = self.dealing.of_step(rate, kept)
        velocity = self.dealing.of_velocity(rate, kept, scale)
        return (scale * first, scale * second), velocity

    def measured_part(self, velocity: Model) -> Float[Array, ""]:
        r"""The part of a step that may be taken, such that
        $\langle \delta, F \delta \rangle$, with the exact Fisher of this batch, is within
        both bounds for a surrogate: the first one is for the losses without targets, the
        second one for the other losses."""
        assert self.region is not None and self.linearised is not None
        lengths = self.linearised.surrogate_lengths
        check_pushes_forward(
            "Give a number for `norm_constraint`: a trust region of a loss without "
            "targets needs",
            lengths,
            velocity,
        )
        without_targets, with_targets, value = lengths(velocity)
        constraint = self.state.norm_constraint
        bounds = self.region.of_surrogate(constraint, value)  # pyright: ignore
        pairs = zip(bounds, (without_targets, with_targets), strict=True)
        parts = [
            jnp.where(length > 0, _at_most(bound, length.astype(bound.dtype)), 1)
            for bound, length in pairs
        ]
        return jnp.minimum(*parts)

    def _within_number(self, norm: Float[Array, ""]) -> Float[Array, ""]:
        r"""The learning rate such that $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h
        \rangle$ is at most the norm constraint, given the inner product."""
        state, rate = self.state, self.state.learning_rate
        most = state.rollback.narrowed(state.norm_constraint)
        return _at_most(most, rate**2 * norm) * rate

    def _within_region(
        self, region: AbstractTrustRegion, norm: Float[Array, ""], gradient: Model
    ) -> Bounded:
        r"""Lengths within all bounds of a region, given
        $\langle \hat F^{-1} \nabla h, \nabla h \rangle$; and the extent of the step."""
        state, start = self.state, self.start
        assert state.extent is not None  # A state has one if there is a region.
        rate, one = state.learning_rate, jnp.ones_like(state.learning_rate)
        # The slope of the loss along the previous velocity.
        slope = tree_dot(at_paths(state.velocity, gradient), gradient).astype(rate.dtype)
        # The curvature may have changed since the previous velocity was measured; but the
        # inequality of Cauchy and Schwarz holds in every metric.
        previous = jnp.maximum(state.extent.squared_length, slope**2 / _positive(norm))
        metric = _Metric(norm, slope, previous)
        kept = _kept(slope, previous, norm)
        # What a single gradient says clearly is done at once, and need not persist.
        extent = self._learnt(region, slope, jnp.where(kept < 1, 0, slope))
        kept = kept * region.kept(extent.uphill).astype(kept.dtype)
        constraint = extent.growth.astype(state.norm_constraint.dtype)
        constraint *= state.norm_constraint
        wider = region.widening(extent.lasting).astype(start.remaining.dtype)
        remaining = wider * start.remaining
        bounds = region(constraint, remaining, start.kind.terms)
        most, most_of_velocity = map(state.rollback.narrowed, bounds)
        rate = _at_most(most, rate**2 * norm) * rate
        part = region.of_promised(extent.learnt).astype(rate.dtype)
        rate = jnp.minimum(rate, _promising(part, remaining, norm))
        whole, _ = self._dealt(rate, kept, one)
        length = metric.inner(whole, whole)
        scale = _at_most(most_of_velocity, length)
        most = self._most_as_measured(remaining)
        if most is not None:
            measured = _at_most(most.astype(length.dtype), extent.coupling * length)
            scale = jnp.minimum(scale, measured)
        step, velocity = self._dealt(rate, kept, scale)
        if velocity is None:
            return Bounded(step, None, metric.extent(extent, whole, whole).scaled(scale))
        return Bounded(step, velocity, metric.extent_of_both(extent, step, velocity))

    def _learnt(
        self,
        region: AbstractTrustRegion,
        slope: Float[Array, ""],
        unclear: Float[Array, ""],
    ) -> Extent:
        """The extent of the previous update, with what this batch says of it, given its
        slope, and the same or zero if that is clear by itself. A batch that is unlike all
        others says nothing."""
        start, extent = self.start, self.state.extent
        assert extent is not None
        growth, remaining = extent.growth, start.remaining
        # Only squared errors are as large as the unit of the targets makes them.
        if start.kind.squares > 0:
            growth = region.growth(growth, remaining, start.kind.squares)
        learnt = dataclasses.replace(
            extent.between(self.state.rollback.loss, remaining).after(remaining),
            coupling=extent.coupling_given(slope),
            uphill=extent.uphill_given(unclear, remaining),
            growth=growth,
        )
        return tree_where(start.teaches, learnt, extent)


class _Metric(NamedTuple):
    """Inner products in the metric of the curvature, of vectors that consist of the
    natural gradient and the previous velocity."""

    norm: Float[Array, ""]  # Of the natural gradient with itself: with the gradient.
    slope: Float[Array, ""]  # Of the natural gradient with the velocity.
    previous: Float[Array, ""]  # Of the velocity with itself.

    def inner(self, first: Lengths, second: Lengths) -> Float[Array, ""]:
        r"""The inner product of two vectors, given what they consist of. No product with
        $\hat F$ is needed, because $\hat F (\hat F^{-1} \nabla h) = \nabla h$."""
        (rate, momentum), (other_rate, other_momentum) = first, second
        mixed = momentum * other_rate + other_momentum * rate
        squares = rate * other_rate * self.norm
        return momentum * other_momentum * self.previous - mixed * self.slope + squares

    def extent(self, extent: Extent, step: Lengths, velocity: Lengths) -> Extent:
        """The extent of a step, and of the velocity after it."""
        return dataclasses.replace(
            extent,
            squared_length=self.inner(velocity, velocity),
            slope=velocity[1] * self.slope,
            descent=step[0] * self.norm - step[1] * self.slope,
        )

    def extent_of_both(self, extent: Extent, step: Lengths, velocity: Lengths) -> Extent:
        """The same, if the velocity after a step is not that step."""
        return dataclasses.replace(
            self.extent(extent, step, velocity),
            step_length=self.inner(step, step),
            along=self.inner(velocity, step),
        )


def _at_most(most: Float[Array, ""], length: Float[Array, ""]) -> Float[Array, ""]:
    """The factor in (0, 1] by which a vector is to be scaled such that its squared length
    is at most `most`."""
    return jnp.minimum(1, jnp.sqrt(most / _positive(length)))


def _promising(
    part: Float[Array, ""], remaining: Float[Array, ""], norm: Float[Array, ""]
) -> Float[Array, ""]:
    r"""The learning rate with which the new part of a step promises its own batch a part
    of the loss that remains, given $\langle \hat F^{-1} \nabla h, \nabla h \rangle$; any,
    if the part is infinite."""
    promised = part * jnp.abs(remaining).astype(part.dtype)
    return jnp.where(jnp.isinf(part), part, promised / _positive(norm))


def _kept(
    slope: Float[Array, ""], previous: Float[Array, ""], norm: Float[Array, ""]
) -> Float[Array, ""]:
    r"""The part of the previous update $\delta$ that is kept, given
    $\langle \delta, \nabla h \rangle$ and the squared lengths of $\delta$ and of
    $\hat F^{-1} \nabla h$: all of it up to a cosine of one half between these, and
    nothing if $\delta$ leads straight uphill."""
    cosine = slope / jnp.sqrt(_positive(previous * norm))
    return jnp.clip(2 - 2 * cosine, 0, 1)


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.maximum(x, 1e-30)
