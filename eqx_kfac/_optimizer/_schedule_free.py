"""Steps that need no schedule: each is dealt out over a window that grows."""

from typing import NamedTuple, TypeAlias

import equinox as eqx
from jaxtyping import Array, Float

from .._checks import check_number
from .._custom_types import Numeric
from ._hyperparameters import AbstractHyperparameter, RANGES
from ._trust import Window


# What a natural gradient and a velocity are multiplied by.
Lengths: TypeAlias = tuple[Float[Array, ""], Float[Array, ""]]


class ScheduleFree(AbstractHyperparameter):
    r"""Gradients are those of a point between the average of the iterates and the last
    one, so that no learning rate has to fall. Pass it to [`eqx_kfac.KFAC`][] as
    `averaging`.

    Momentum moves the parameters by $\alpha$ times a natural gradient at once, and by
    $\alpha \mu / (1 - \mu)$ times it in about $1 / (1 - \mu)$ later steps. Here, these
    are as many steps as the average has iterates, $1 / c$ with $c = 1 - \xi$:

    $$\delta = r m - (1 + r) \alpha \hat F^{-1} \nabla h, \qquad
    m \leftarrow (1 - c) (m - \alpha \hat F^{-1} \nabla h), \qquad
    r = \frac{\mu c}{1 - \mu}$$

    with $m$ in the place of the velocity in the state. In other words: a base iterate
    $z$ takes steps of $\alpha / (1 - \mu)$, $x$ is its average, $x \leftarrow (1 - c) x +
    c z$, and gradients are those of the model at $\theta = (1 - \mu) z + \mu x$. The
    model to evaluate is that at $x = \theta - m$: see [`eqx_kfac.averaged`][]. It needs
    no memory.

    If a trust region makes a step $s$ times as long, $\delta$ is $s$ times the one above,
    and both $c$ and $\alpha$ are $s$ times as large in the formula of $m$. If it uses
    only a part of the velocity, because that leads uphill, $m$ is that part of itself
    in both formulas. Parameters that no tag covers, of which the `fallback` takes care,
    are not averaged.

    Where data are noise for the most part (counts, heavy tails, variances), steps of a
    constant length never come to rest, and what they average over is curved. Here, it is
    the average that gradients are near. "How to choose" has results.

    !!! Example

        ```python
        optimizer = kfac.KFAC(averaging=kfac.ScheduleFree())
        ```

    ??? cite "Reference"

        A. Defazio, X. Yang, H. Mehta, K. Mishchenko, A. Khaled, A. Cutkosky, *The Road
        Less Scheduled*, NeurIPS 2024. There, the average is of all iterates.
    """

    number: Numeric

    def __init__(self, decay: Numeric = Window()):
        r"""**Arguments:**

        - `decay`: $\xi \in [0, 1]$, or a schedule, such as [`eqx_kfac.Window`][]`()`.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.number = check_number("decay", decay, RANGES.averaging, schedule=True)


class Ahead(eqx.Module):
    """In the place of [`eqx_kfac.AveragedParameters`][] if the model is ahead of its
    average by the velocity: see [`eqx_kfac.ScheduleFree`][]."""


class Dealing(NamedTuple):
    """How what a gradient adds is dealt out."""

    share: Float[Array, ""]  # c
    first: Float[Array, ""]  # r

    @classmethod
    def of(cls, momentum: Float[Array, ""], decay: Float[Array, ""]) -> "Dealing":
        r"""Given $\mu$ and $\xi$."""
        share = 1 - decay.astype(momentum.dtype)
        return cls(share, momentum * share / (1 - momentum))

    def of_step(self, rate: Float[Array, ""], kept: Float[Array, ""]) -> Lengths:
        r"""The lengths of $\delta$, given $\alpha$ and the part of $m$ that is kept."""
        return (1 + self.first) * rate, self.first * kept

    def of_velocity(
        self, rate: Float[Array, ""], kept: Float[Array, ""], scale: Float[Array, ""]
    ) -> Lengths:
        r"""The lengths of the next $m$, given also by which factor the step is
        shorter."""
        rest = 1 - self.share * scale
        return rest * scale * rate, rest * kept
