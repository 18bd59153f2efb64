"""Where a step begins: the loss and its gradient, and what can be told from them before
anything else is computed."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._complex import steepest
from .._curvature import Kind, ValueAndGrads
from .._custom_types import Model
from .._inner_products import all_finite, tree_norm
from ._choices import Rules
from ._hyperparameters import in_range
from ._state import KFACState


class Start(NamedTuple):
    """Where a step begins, and whether it can."""

    value: Float[Array, ""]  # The loss.
    # What is left to be gained, for rules that depend on it: the loss, or infinity if the
    # value of a surrogate says nothing about that.
    remaining: Float[Array, ""]
    grads: Model
    gradient_norm: Float[Array, ""]
    in_range: Bool[Array, ""]  # Whether the numbers in the state are valid.
    # Whether no step is taken because the loss has diverged: see `Rollback.refuses`.
    refused: Bool[Array, ""]
    # Whether the averages of curvature, damping and coupling learn from this batch. They
    # do not if its loss is unlike all earlier ones, or if loss and gradient are zero.
    teaches: Bool[Array, ""]
    has_negative_weights: Bool[Array, ""]
    # Whether the loss is compared with earlier ones, so that the parameters can go back.
    watched: bool
    kind: Kind  # Of the objective, as far as it is known.

    @property
    def fine(self) -> Bool[Array, ""]:
        """Whether the curvature of this batch is to be trusted."""
        finite = all_finite(self.value) & ~jnp.isnan(self.gradient_norm)
        return self.in_range & finite & ~self.refused & ~self.has_negative_weights


def start(
    found: ValueAndGrads, state: KFACState, rules: Rules, watched: bool = True
) -> Start:
    """Where a step begins, given the gradient as JAX returns it. With `watched`, the loss
    is compared with earlier ones."""
    value, grads, kind = found.value, steepest(found.grads), found.kind
    numbers = state.hyperparameters
    for name in ("learning_rate", "momentum"):
        if getattr(rules, name) is not None:
            # A rule chooses this number anew, so the last one need not be valid.
            numbers = numbers._replace(**{name: None})
    # The value of a surrogate says neither how much is left to be gained, nor whether the
    # loss has diverged.
    watched = watched and not kind.is_surrogate
    is_bounded = state.norm_constraint is not None
    norm = tree_norm(grads)
    diverged = state.rollback.diverged(value) & watched
    empty = (value == 0) & (norm == 0) & watched
    return Start(
        value=value,
        remaining=jnp.full_like(value, jnp.inf) if kind.is_surrogate else value,
        grads=grads,
        gradient_norm=norm,
        in_range=in_range(numbers),
        refused=diverged & state.rollback.refuses(is_bounded),
        teaches=(state.weight == 0) | ~(diverged | empty),
        has_negative_weights=jnp.asarray(found.has_negative_weights),
        watched=watched,
        kind=kind,
    )
