"""A step that may be taken: what it consists of, and what is left of it if it is not."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._custom_types import Model
from .._misc import tree_dot
from ._extent import Extent


class Proposal(NamedTuple):
    """A step that may be taken, or not."""

    damping: Float[Array, ""]
    learning_rate: Float[Array, ""]  # Without the norm constraint.
    momentum: Float[Array, ""]
    lengths: Float[Array, "2"]  # Both as they are taken: of what follows.
    natural: Model  # The natural gradient of the parameters that tags cover,
    before: Model  # and their update before this one;
    others: Model  # the update of those that the fallback looks after.
    squares: Float[Array, ""]  # The squared Euclidean norm of the velocity.
    extent: Extent | None  # How long it is, if that is bounded.
    # By the quadratic model, for the velocity; `None` if it was not needed so far.
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
        """The velocity after the step: if that is `rejected`, what it was, or, if it is
        to be `stopped`, zero. (The lengths say so, and the numbers that these multiply
        are finite. For a flag that chooses one of two arrays, the compiler of a CPU
        writes a loop for each of its values: for three flags, eight of them.)"""
        finite = lambda a: jnp.where(jnp.isfinite(a), a, 0)
        old = jnp.stack([jnp.zeros_like(stopped), ~stopped]).astype(self.lengths.dtype)
        lengths = jnp.where(rejected, old, self.lengths)
        natural, before = jtu.tree_map(finite, (self.natural, self.before))
        return velocity(lengths, natural, before)


def velocity(lengths: Float[Array, "2"], natural: Model, before: Model) -> Model:
    r"""$\mu \delta_\text{prev} - \alpha \hat F^{-1} \nabla h$, given $\alpha$ and
    $\mu$."""
    scale, momentum = lengths

    def combined(n, v):
        return momentum.astype(v.dtype) * v - scale.astype(n.dtype) * n

    return jtu.tree_map(combined, natural, before)
