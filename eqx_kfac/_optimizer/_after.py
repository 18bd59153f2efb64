"""What a step leaves behind: the updates, and the state after it."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float

from .._custom_types import Model, Numeric
from .._misc import by_path, is_none, masked, tree_where
from .._tag import partition_tagged
from ._choices import Rules
from ._hyperparameters import WeightDecay
from ._proposal import Proposal
from ._state import AveragedParameters, count, Info, KFACState


def after(
    model: Model,
    state: KFACState,
    proposal: Proposal,
    fallback: optax.OptState | None,
    info: Info,
    share: Float[Array, ""] | None,
    rules: Rules,
    weight_decay: Numeric | WeightDecay | None,
    watched: bool,
) -> tuple[Model, KFACState]:
    """The updates, and the state after a step; if that is rejected, nothing moves, and
    the state remembers why. `share`: that of the damping, for its rule."""
    rollback, back = state.rollback, jnp.zeros_like(info.rejected)
    if watched:
        bad = info.faults.loss | info.faults.gradient | rollback.diverged(info.loss)
        rollback = rollback.after(model, info.loss, bad, info.rejected)
        back = rollback.back
    # A velocity that led uphill starts again from zero: it would lead there for ever.
    uphill = info.faults.update | info.faults.increase | back
    velocity = proposal.velocity_after(info.rejected, uphill)
    step = proposal.taken(info.rejected, velocity)
    updates = _decayed_updates(step, proposal, model, state, info.rejected, weight_decay)
    iterates, numbers = state.averaged_parameters, state.hyperparameters
    if isinstance(iterates, AveragedParameters) and numbers.averaging is not None:
        new = eqx.apply_updates(model, updates)
        iterates = iterates.add(new, numbers.averaging, ~info.rejected)
        iterates = tree_where(back, iterates.at(rollback.params), iterates)
    extent = None if state.extent is None else state.extent.stopped(uphill)
    extent, fallback, rate, momentum = tree_where(
        info.rejected,
        (extent, state.fallback, numbers.learning_rate, numbers.momentum),
        (proposal.extent, fallback, proposal.learning_rate, proposal.momentum),
    )
    damping = _next_damping(state, info, share, rules)
    chosen = dict(learning_rate=rate, momentum=momentum, damping=damping)
    state = state._replace(
        step=state.step + 1,
        velocity=by_path(velocity),
        extent=extent,
        fallback=fallback,
        averaged_parameters=iterates,
        hyperparameters=numbers._replace(**chosen),
        rollback=rollback,
        # Where the parameters go back, curvature was that of where they should not be.
        weight=jnp.where(back, 0, state.weight),
        refactorise=info.rejected & (state.refactorise | (rules.damping is not None)),
        rejected=state.rejected + info.rejected.astype(jnp.int32),
        faults=count(state.faults, info.faults),
    )
    return updates, state


def _decayed_updates(
    step: Model,
    proposal: Proposal,
    model: Model,
    state: KFACState,
    rejected: Bool[Array, ""],
    choice: Numeric | WeightDecay | None,
) -> Model:
    """The updates, with decoupled weight decay of the tagged parameters; zeros if the
    step is `rejected`."""
    nothing = jtu.tree_map(jnp.zeros_like, proposal.others)
    updates = eqx.combine(step, tree_where(rejected, nothing, proposal.others))
    weight_decay = state.hyperparameters.weight_decay
    if weight_decay is None:
        return updates
    params, _ = partition_tagged(model)
    params = masked(params, choice.mask if isinstance(choice, WeightDecay) else None)
    scale = jnp.where(rejected, 0, proposal.learning_rate * weight_decay)

    def decay(update, p):
        return update if p is None else update - scale.astype(p.dtype) * p

    return jtu.tree_map(decay, updates, params, is_leaf=is_none)


def _next_damping(
    state: KFACState, info: Info, share: Float[Array, ""] | None, rules: Rules
) -> Any:
    rule, ratio = rules.damping, info.reduction_ratio
    if rule is None:
        return info.damping
    ratio = jnp.zeros_like(info.loss) if ratio is None else ratio  # Never due.
    share = jnp.ones_like(info.damping) if share is None else share
    ratio = jnp.where(info.rejected, -jnp.inf, ratio)
    due = rule.due(state.step) | info.rejected
    new = rule.given_share(info.damping, ratio, share)
    return jnp.where(due, new, info.damping)
