"""A step that may be taken: what it consists of, and what remains if it is rejected."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._custom_types import Model
from .._inner_products import tree_dot
from ._extent import Extent


class Proposal(NamedTuple):
    """A step that may be taken, or not."""

    # As they were chosen, before any bound makes the step shorter.
    damping: Float[Array, ""]
    learning_rate: Float[Array, ""]
    momentum: Float[Array, ""]
    # What the velocity is made of: learning rate and momentum as they are used, the
    # natural gradient, and the previous update, all of the parameters that tags cover.
    lengths: Float[Array, "2"]
    # The same of the velocity after the step, if that is not the step.
    remembered: Float[Array, "2"] | None
    natural: Model
    before: Model
    others: Model  # The update of all other parameters, from the `fallback`.
    squares: Float[Array, ""]  # The squared Euclidean norm of the velocity.
    extent: Extent | None  # The velocity's length, if a trust region bounds it.
    # The change of the loss that the quadratic model predicts for the velocity; `None` if
    # nothing has asked for it so far.
    predicted: Float[Array, ""] | None

    @property
    def velocity(self) -> Model:
        """The update of the parameters that tags cover."""
        return velocity(self.lengths, self.natural, self.before)

    @property
    def updates(self) -> Model:
        return eqx.combine(self.velocity, self.others)

    @property
    def norm(self) -> Float[Array, ""]:
        """The Euclidean norm of the updates."""
        if not jtu.tree_leaves(self.others):
            return jnp.sqrt(self.squares)
        others = tree_dot(self.others, self.others)
        return jnp.sqrt(self.squares.astype(others.dtype) + others)

    def velocity_after(
        self, rejected: Bool[Array, ""], stopped: Bool[Array, ""]
    ) -> Model:
        """The velocity after the step. If that is `rejected`, it is the previous one, or
        zero if it is to be `stopped`. This is done by other lengths, of arrays that are
        made finite. (Choosing between arrays by a flag, the compiler of a CPU writes a
        loop for each value of the flag, and for three flags eight of them.)"""
        finite = lambda a: jnp.where(jnp.isfinite(a), a, 0)
        old = jnp.stack([jnp.zeros_like(stopped), ~stopped]).astype(self.lengths.dtype)
        new = self.lengths if self.remembered is None else self.remembered
        lengths = jnp.where(rejected, old, new)
        natural, before = jtu.tree_map(finite, (self.natural, self.before))
        return velocity(lengths, natural, before)

    def taken(self, rejected: Bool[Array, ""], after: Model) -> Model:
        """The update of the parameters that tags cover, or zero if the step is
        `rejected`, given the velocity `after` it."""
        if self.remembered is not None:
            step = self._replace(remembered=None)
            return step.velocity_after(rejected, stopped=jnp.ones_like(rejected))
        part = 1 - rejected.astype(self.lengths.dtype)
        return jtu.tree_map(lambda v: part.astype(v.dtype) * v, after)


def velocity(lengths: Float[Array, "2"], natural: Model, before: Model) -> Model:
    r"""$\mu \delta_\text{prev} - \alpha \hat F^{-1} \nabla h$, given $\alpha$ and
    $\mu$."""
    scale, momentum = lengths

    def combined(n, v):
        return momentum.astype(v.dtype) * v - scale.astype(n.dtype) * n

    return jtu.tree_map(combined, natural, before)
