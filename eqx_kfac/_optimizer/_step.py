"""One step, from its beginning to the next state."""

import dataclasses
from collections.abc import Callable

import optax
from jaxtyping import Array, Bool

from .._custom_types import Model, Numeric
from .._inverse import for_each
from .._misc import later
from .._operator import still_sharded
from ._after import after
from ._collect import Average
from ._fallback import update_fallback
from ._hyperparameters import WeightDecay
from ._renew import renew
from ._schedule import Due
from ._state import Info, KFACState
from ._trial import Trial


def take_step(
    trial: Trial,
    estimate: Callable[[Average], Average],
    due: Due,
    due_inverse: Callable[[Bool[Array, ""]], Due],
    fallback: optax.GradientTransformation | None,
    weight_decay: Numeric | WeightDecay | None,
) -> tuple[Model, KFACState, Info]:
    """Renews the curvature and its factorisation (if due), preconditions, chooses the
    length, evaluates the loss there (if due), and takes the step or rejects it. `trial`
    has the curvature of before; `estimate` and `due_inverse` are as in `renew`.

    **Returns:** the updates, the next state, and what is to be said of the step.
    """
    state, model, grads = trial.state, trial.model, trial.grads
    new = renew(trial, estimate, due, due_inverse)
    # A compiler might prepare what the step does with the velocity beforehand, and hold
    # that in memory while the curvature is renewed.
    state = state._replace(velocity=later(state.velocity, new.factorised))
    trial = dataclasses.replace(trial, averaged=new.averaged, state=state)
    trial = trial.with_still(new.waiting)
    curvature = new.averaged.curvature
    strength = trial.strength(new.damping, new.layer_damping)
    strength = for_each(strength, grads, curvature)
    others, fallback_state = update_fallback(grads, state.fallback, model, fallback)
    proposal = trial.propose(new.damping, new.inverse, strength, others)
    found = trial.evaluate(proposal)
    info = trial.judge(proposal, found, new.factorised, new.without)
    state = state._replace(
        curvature=still_sharded(curvature),
        inverse=still_sharded(new.inverse),
        layer_damping=new.layer_damping,
        weight=new.averaged.weight,
        known=new.averaged.known,
    )
    updates, state = after(
        model,
        state,
        proposal,
        fallback_state,
        info,
        share=found.share,
        rules=trial.rules,
        weight_decay=weight_decay,
        watched=trial.start.watched,
    )
    return updates, state, info
