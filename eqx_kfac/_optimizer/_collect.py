"""Estimates of the curvature, whenever they are due, and their moving average."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._curvature import average, include, is_finite, known_layers, LinearisedBatch
from .._custom_types import Key, Model
from .._fisher import AbstractFisher
from ._schedule import Due


class Average(NamedTuple):
    """The averaged curvature."""

    curvature: Model
    weight: Float[Array, ""]  # Total weight of the estimates; 0 before the first.
    fine: Bool[Array, ""]  # Whether all is finite so far.
    known: Bool[Array, " layers"]  # Which layers have any curvature, all in one row.
    # Whether this step has added an estimate from all of its examples.
    fresh: Bool[Array, ""] | bool = False
    # Whether this step has added the first curvature of any layer.
    first: Bool[Array, ""] | bool = False
    # Whether this step has estimated from all of its examples that no layer has any.
    zero: Bool[Array, ""] | bool = False

    @property
    def unknown(self) -> Bool[Array, " layers"]:
        """Which layers have none, so that nothing says how far they may go."""
        return ~self.known

    def including(
        self,
        model: Model,
        new: Model | None,
        ema: Array,
        taken: Bool[Array, ""] | bool = True,
    ) -> "Average":
        """The average with an estimate `new`, made elsewhere from this step's examples,
        if it is to be `taken`. Without one (`None`), the average stays as it is, which is
        fine unless it is empty."""
        if new is None:
            return self._replace(fine=self.fine & (self.weight > 0))
        joined = include(*self[:2], model, new, ema, self.fine & taken)
        curvature, weight, took = joined
        fine = took | (self.fine & jnp.logical_not(taken))
        return self._with(curvature, weight, fine, took)

    def _with(
        self,
        curvature: Model,
        weight: Float[Array, ""],
        fine: Bool[Array, ""],
        fresh: Bool[Array, ""],
    ) -> "Average":
        """The next average, and which of its layers have any curvature."""
        known = known_layers(curvature)
        first = self.first | jnp.any(known & ~self.known)
        if known.size == 0:
            return Average(curvature, weight, fine, known, fresh, first)
        # An average of nothing but zeros is none: then the next step estimates anew.
        zero = ~jnp.any(known)
        weight = jnp.where(zero, 0, weight)
        return Average(curvature, weight, fine, known, fresh, first, zero & fresh)


def collect(
    before: Average,
    linearised: LinearisedBatch,
    fisher: AbstractFisher,
    ema: Float[Array, ""],
    burn_in: int,
    key: Key | None,
    due: Due,
    taken: Bool[Array, ""],
) -> Average:
    """The average with one more estimate, if one is due and to be `taken`; if it is the
    first one, with `burn_in` more."""
    first = before.weight == 0
    whole = linearised.batch.first(fisher.examples) is linearised.batch
    fresh, unchanged = jnp.full_like(first, whole), first & ~first
    before = before._replace(fresh=unchanged, first=unchanged, zero=unchanged)

    def estimate(averaged, key, ema):
        new = linearised.curvature(fisher, key)
        take = averaged.fine & is_finite(new)
        joined = average(averaged.curvature, averaged.weight, new, ema, take)
        return averaged._with(*joined, take, fresh)

    def one_of_many(index, averaged):
        index_key = None if key is None else jax.random.fold_in(key, index)
        return estimate(averaged, index_key, jnp.where(first, 1, ema))

    def compute():
        if burn_in == 0:
            return estimate(before, key, ema)
        number = jnp.where(first, 1 + burn_in, 1)
        return jax.lax.fori_loop(0, number, one_of_many, before)

    return due.when(compute, before, taken)
