"""The way back, if steps have led to where the loss is many times what it was."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Int

from .._custom_types import Model
from .._devices import zeros_split_as
from .._misc import at_paths, by_path, is_none, tree_where


class Rollback(eqx.Module):
    r"""The last good parameters, and what the loss has been. A loss that is above
    $10 \max(L, 0.3)$ nats has diverged: $L$ is what about nine of ten other losses were
    below,

    $$L \leftarrow \min(\max(|h|, 0.99 L), 1.1 L).$$

    A single batch may be to blame: a rare class, or a mistake in the data. Its step is
    taken if a norm constraint or a trust region bounds it, and otherwise not; $L$ is
    doubled, so that without a bound, too, batches that always are so large are learnt
    from after some of them, if they are more than one in seventy. After four such losses
    in a row (or losses or gradients that are not finite), the parameters are to blame:
    they go back to the last ones at which the loss was below $L$, and $L$ to what it was;
    damping is ten times what it was, the bounds of a norm constraint a tenth, and both
    recover by 2 % at every step that is taken. If the loss there is as
    large, the data are to blame: damping and bounds are as they were before, and after
    four more such losses the new level is what the loss now is.

    **Fields:**

    - `params`: the last good parameters, by their paths in the model.
    - `loss`: the last loss that was finite and had not diverged.
    - `level`: $L$; 0 before there has been any loss.
    - `bad`: how many losses in a row, up to now, have diverged or were not finite.
    - `raises`: how many of these, finite ones, have doubled `level`.
    - `caution`: what all damping is multiplied by, unless a rule adapts it, and what the
        bounds of a norm constraint are divided by.
    """

    params: dict[str, Array]
    loss: Float[Array, ""]
    level: Float[Array, ""]
    bad: Int[Array, ""]
    raises: Int[Array, ""]
    caution: Float[Array, ""]

    @property
    def usual(self) -> Float[Array, ""]:
        """$L$ before the losses in a row that have diverged so far."""
        return self.level / _RAISED ** self.raises.astype(self.level.dtype)

    def diverged(self, value: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether a loss, which may be anything, is many times what it has been."""
        most = _MANY * jnp.maximum(self.usual, _LEAST)
        return (self.level > 0) & (value.astype(most.dtype) > most)

    def refuses(self, is_bounded: bool) -> Bool[Array, ""]:
        """Whether no step is taken from a loss that has diverged: because the parameters
        go back, or because nothing bounds the step."""
        return self.due | (not is_bounded)

    @property
    def due(self) -> Bool[Array, ""]:
        """Whether the parameters go back if one more loss is bad."""
        return (self.bad == _PATIENCE - 1) & (self.level > 0)

    @property
    def back(self) -> Bool[Array, ""]:
        """Whether the parameters went back in the last step."""
        return (self.bad == _PATIENCE) & (self.level > 0)

    def after(
        self,
        model: Model,
        value: Float[Array, ""],
        bad: Bool[Array, ""],
        rejected: Bool[Array, ""],
    ) -> "Rollback":
        """The record after a step from `model`, where the loss was `value`, and whether
        that was `bad`, the step `rejected`."""
        finite, began = jnp.isfinite(value), self.level > 0
        number = jnp.where(bad, self.bad + 1, 0).astype(self.bad.dtype)
        back = (number == _PATIENCE) & began
        accepted = (number >= 2 * _PATIENCE) & finite
        size = jnp.abs(value).astype(self.level.dtype)
        # If losses diverge again while steps are cautious, the data are to blame.
        again = jnp.where(self.caution > 1, _RAISED, 1.0).astype(size.dtype)
        level = jnp.clip(size, 0.99 * self.level, 1.1 * self.level)
        level = jnp.where(bad, _RAISED * self.level, level)
        level = jnp.where(back, again * self.usual, level)
        level = jnp.where(accepted | ~began, size, level)
        level = jnp.where(finite | back, level, self.level)
        raises = jnp.where(finite, self.raises + 1, self.raises)
        raises = jnp.where(bad & began & ~(back | accepted), raises, 0)
        good = ~bad & finite & (value.astype(level.dtype) <= level)
        less = jnp.where(rejected, self.caution, 0.98 * self.caution)
        less = jnp.where(number == _PATIENCE + 1, self.caution / _MORE, less)
        caution = jnp.where(back, self.caution * _MORE, jnp.maximum(less, 1))
        # Until anything has been good, the first parameters are the best that is known.
        return Rollback(
            params=tree_where(good | (finite & ~began), by_path(model), self.params),
            loss=jnp.where(bad | ~finite, self.loss, value.astype(self.loss.dtype)),
            level=level,
            bad=jnp.where(accepted, 0, number),
            raises=raises.astype(self.raises.dtype),
            caution=jnp.minimum(caution, _MOST),
        )

    def damped(self, strength: Any) -> Any:
        """The damping, larger for some steps after the parameters went back."""
        return jtu.tree_map(lambda d: d * self.caution.astype(d.dtype), strength)

    def narrowed(self, bound: Float[Array, ""]) -> Float[Array, ""]:
        """A bound on a squared length, smaller for some steps after the parameters went
        back."""
        return bound / self.caution.astype(bound.dtype)

    def restored(self, model: Model) -> Model:
        """`model`, with the last good parameters if they went back in the last step."""

        def choose(p, good):
            return tree_where(self.back, good, p) if eqx.is_inexact_array(p) else p

        return jtu.tree_map(choose, model, at_paths(self.params, model))

    def restoring(self, updates: Model, model: Model) -> Model:
        """The updates, or what leads from `model` to the last good parameters if they are
        to go back."""
        model = eqx.filter(model, eqx.is_inexact_array)

        def lead(update, p, old):
            return None if p is None else tree_where(self.back, old - p, update)

        return jtu.tree_map(lead, updates, model, self.restored(model), is_leaf=is_none)


def init_rollback(model: Model) -> Rollback:
    """A record of nothing. (Its parameters are zeros, and not those of the model, whose
    arrays may be donated.)"""
    return Rollback(  # Of distinct arrays, so that each may be donated.
        params=jtu.tree_map(zeros_split_as, by_path(model)),
        loss=jnp.zeros((), float),
        level=jnp.zeros((), float),
        bad=jnp.zeros((), jnp.int32),
        raises=jnp.zeros((), jnp.int32),
        caution=jnp.ones((), float),
    )


_MANY = 10.0  # A loss that is so many times larger is no noise,
_LEAST = 0.3  # unless losses are nearly zero: below so many nats.
_PATIENCE = 4  # After so many bad losses in a row, the parameters go back.
_RAISED = 2.0  # Each bad loss raises the level by this factor, until they go back.
_MORE, _MOST = 10.0, 1e6  # How much more damping there is then, and the most.
