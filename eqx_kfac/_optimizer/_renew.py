"""The curvature and its factorisation, renewed at those steps at which either is due. The
decision is one for both, because a GPU stops for every decision."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._curvature import for_layers, unseen
from .._custom_types import Model
from .._inverse import for_each
from ._collect import Average
from ._factors import Factorising
from ._schedule import Due
from ._trial import Trial


class Renewed(NamedTuple):
    """What gradients are preconditioned with in this step."""

    averaged: Average  # Its `first` is not kept: nobody needs it afterwards.
    waiting: Model | None  # Which layers have to wait for curvature.
    without: Bool[Array, ""]  # Whether any layer has a gradient, but no curvature.
    damping: Float[Array, ""]
    layer_damping: Model | None
    inverse: Model
    factorised: Bool[Array, ""]

    @property
    def arrays(self) -> tuple:
        """All fields, with the flags in one array, because each array costs a GPU a
        copy."""
        averaged = self.averaged
        flags = averaged.fine, averaged.fresh, averaged.zero
        flags = *flags, self.without, self.factorised
        known = averaged.known
        nothing = dict(fine=None, fresh=None, first=None, zero=None, known=None)
        averaged = averaged._replace(**nothing)
        new = self._replace(averaged=averaged, without=None, factorised=None)
        flags = jnp.stack([jnp.asarray(flag) for flag in flags])
        return new, jnp.concatenate([flags, known])

    @staticmethod
    def of_arrays(arrays: tuple) -> "Renewed":
        new, flags = arrays
        fine, fresh, zero, without, factorised = flags[:5]
        found = dict(fine=fine, fresh=fresh, first=False, zero=zero, known=flags[5:])
        averaged = new.averaged._replace(**found)
        return new._replace(averaged=averaged, without=without, factorised=factorised)


def renew(
    trial: Trial,
    estimate: Callable[[Average], Average],
    due: Due,
    due_inverse: Callable[[Bool[Array, ""]], Due],
) -> Renewed:
    """The curvature with another `estimate`, and its factorisation, each if it is due.
    When the factorisation is, `due_inverse(first)` tells, given whether any layer has
    just got its first curvature."""
    unchanged = _unchanged(trial)

    def anew():
        averaged = estimate(unchanged.averaged)
        return _factorised(trial, averaged, due_inverse(jnp.asarray(averaged.first)))

    when = due, due_inverse(jnp.zeros_like(trial.averaged.fine))
    if any(due.always for due in when):
        return anew()
    # Layers that wait for curvature are a fault only if they have a gradient, which the
    # branch that renews looks at.
    layers = trial.waiting
    waiting = False if layers is None else jnp.any(layers)
    now = ft.reduce(operator.or_, [due.now for due in when], waiting)
    return Renewed.of_arrays(
        jax.lax.cond(now, lambda: anew().arrays, lambda: unchanged.arrays)
    )


def _unchanged(trial: Trial) -> Renewed:
    """What there is at a step at which nothing is due. Then no layer waits for its
    curvature."""
    state, averaged, row = trial.state, trial.averaged, trial.waiting
    no = jnp.zeros_like(averaged.fine)
    return Renewed(
        averaged=averaged._replace(fresh=no, first=no, zero=no),
        waiting=None if row is None else for_layers(jnp.zeros_like(row), trial.curvature),
        without=no,
        damping=state.damping,
        layer_damping=state.layer_damping,
        inverse=state.inverse,
        factorised=jnp.ones_like(no),
    )


def _factorised(trial: Trial, averaged: Average, due: Due) -> Renewed:
    grads, state = trial.grads, trial.state
    factorising = Factorising(grads, trial.solver, due, averaged.fine)
    curvature = factorising.in_own_bases(averaged.curvature)
    averaged = averaged._replace(curvature=curvature)
    trial = dataclasses.replace(trial, averaged=averaged)
    waiting = trial.each_waiting
    trial = trial.with_still(waiting)
    damping = trial.calibrated(factorising.anew)
    each = trial.layer_damping(due)
    strength = for_each(trial.strength(damping, each), grads, curvature)
    inverse, factorised = factorising(state.inverse, curvature, strength)
    still = trial.still
    without = jnp.zeros_like(averaged.fine) if still is None else unseen(grads, still)
    return Renewed(averaged, waiting, without, damping, each, inverse, factorised)
