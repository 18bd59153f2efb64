"""The curvature and its factorisation, renewed at those steps at which any of it is due:
one decision for all, because a GPU stops for every single one."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._block import AbstractFactors
from .._curvature import any_of, missing, unseen
from .._custom_types import Model
from .._inverse import for_each
from ._collect import Average
from ._factors import Factorising
from ._schedule import Due
from ._trial import is_penalised, Trial


class Renewed(NamedTuple):
    """What is to be preconditioned with."""

    averaged: Average
    # Which layers have no curvature, so that nothing says how far they may go, and
    # whether any of them has a gradient. `None`: there is a penalty, of which there is no
    # curvature anyway.
    still: Model | None
    without: Bool[Array, ""]
    damping: Float[Array, ""]
    layer_damping: Model | None
    inverse: Model
    factorised: Bool[Array, ""]

    @property
    def waiting(self) -> Bool[Array, ""]:
        """Whether any layer has no curvature."""
        return any_of(self.still)


def renew(
    trial: Trial,
    estimate: Callable[[Average], Average],
    due: Due,
    due_inverse: Callable[[Bool[Array, ""]], Due],
) -> Renewed:
    """The curvature with another `estimate`, and its factorisation, each if it is due.
    That may be because the curvature is the first one: `due_inverse(first)`."""
    unchanged = _unchanged(trial)

    def anew():
        averaged = estimate(unchanged.averaged)
        return _factorised(trial, averaged, due_inverse(averaged.first))

    when = due, due_inverse(unchanged.averaged.first)
    if any(due.always for due in when):
        return anew()
    now = ft.reduce(operator.or_, [due.now for due in when], trial.state.waiting)
    return jax.lax.cond(now, anew, lambda: unchanged)


def _unchanged(trial: Trial) -> Renewed:
    """At a step at which nothing is due; then every layer has some curvature."""
    state, averaged = trial.state, trial.averaged
    no = jnp.zeros_like(averaged.fine)
    none = lambda factors: jnp.zeros_like(factors.l2, bool)
    is_factors = lambda node: isinstance(node, AbstractFactors)
    return Renewed(
        averaged=averaged._replace(fresh=no, first=no),
        still=_unless_penalised(
            trial, lambda: jtu.tree_map(none, state.curvature, is_leaf=is_factors)
        ),
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
    still = _unless_penalised(trial, lambda: missing(curvature))
    trial = dataclasses.replace(trial, averaged=averaged, still=still)
    damping = trial.calibrated(factorising.anew)
    each = trial.layer_damping(due)
    strength = for_each(trial.strength(damping, each), grads, curvature)
    inverse, factorised = factorising(state.inverse, curvature, strength)
    without = jnp.zeros_like(averaged.fine) if still is None else unseen(grads, still)
    return Renewed(averaged, still, without, damping, each, inverse, factorised)


def _unless_penalised(trial: Trial, still: Callable[[], Model]) -> Model | None:
    linearised = trial.linearised
    return None if linearised is not None and is_penalised(linearised) else still()
