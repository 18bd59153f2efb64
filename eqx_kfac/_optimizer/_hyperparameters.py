"""The numbers of a step: given, scheduled, or chosen by rules. The state holds them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .._checks import (
    AT_LEAST_0,
    check_count,
    check_number,
    FRACTION,
    FRACTION_BELOW_1,
    POSITIVE,
)
from .._custom_types import Numeric
from ._schedule import at


class Hyperparameters(NamedTuple):
    r"""One entry for each hyper-parameter: its choice, its range, or its value at a step
    (an array without axes); `None` if it is not used.

    **Fields:**

    - `learning_rate`: $\alpha$, by which the preconditioned gradient is multiplied.
    - `momentum`: $\mu$, by which the previous update is multiplied.
    - `damping`: $\lambda$, which is added to the curvature, in units of the loss per
        squared parameter.
    - `norm_constraint`: the upper bound on the squared length of $\alpha$ times the
        preconditioned gradient, in the metric of the curvature: in nats.
    - `ema`: the decay of the averages of the curvature.
    - `weight_decay`: the rate of decoupled weight decay.
    - `averaging`: the decay of the average of the parameters.
    """

    learning_rate: Any
    momentum: Any
    damping: Any
    norm_constraint: Any
    ema: Any
    weight_decay: Any
    averaging: Any


RANGES = Hyperparameters(
    learning_rate=POSITIVE,
    momentum=FRACTION_BELOW_1,
    damping=AT_LEAST_0,
    norm_constraint=POSITIVE,
    ema=FRACTION,
    weight_decay=AT_LEAST_0,
    averaging=FRACTION,
)


class AbstractRule(eqx.Module):
    """What chooses a number anew, at every step or whenever it is due.

    **Fields:**

    - `initial`: the number that the state holds at first.
    """

    initial: eqx.AbstractVar[Any]


class AbstractHyperparameter(eqx.Module):
    """A number, or a schedule of one, and what goes with it.

    **Fields:**

    - `number`: the number, or a function of the step that returns it.
    """

    number: eqx.AbstractVar[Numeric]


class MovingAverage(AbstractHyperparameter):
    r"""The moving average of the curvature,
    $V \leftarrow V + (X - V) / w$ with $w \leftarrow \rho w + 1$, and how it begins. Pass
    it to [`eqx_kfac.KFAC`][] as `ema`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(ema=kfac.MovingAverage(0.95, burn_in=4))
        ```
    """

    number: Numeric
    burn_in: int = eqx.field(static=True)

    def __init__(self, decay: Numeric = 0.95, burn_in: int = 0):
        r"""**Arguments:**

        - `decay`: $\rho \in [0, 1]$, or a schedule. 1 is the mean over all steps; 0 keeps
            only the latest estimate.
        - `burn_in`: how many more estimates of the curvature are averaged on the first
            (finite) batch, before the first step.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.number = check_number("decay", decay, RANGES.ema, schedule=True)
        self.burn_in = check_count("burn_in", burn_in, 0)


class WeightDecay(AbstractHyperparameter):
    r"""Weight decay that is decoupled from the objective: $\theta \leftarrow \theta +
    \delta - \alpha \beta \theta$ for the parameters that tags cover. Pass it to
    [`eqx_kfac.KFAC`][] as `weight_decay`. (To regularise the objective, add
    [`eqx_kfac.L2`][] to the loss.)

    !!! Example

        ```python
        decay = kfac.WeightDecay(1e-2, mask=lambda p: p.ndim > 1)
        optimizer = kfac.KFAC(weight_decay=decay)
        ```
    """

    number: Numeric
    mask: PyTree[bool] | Callable[[Array], bool] | None

    def __init__(
        self,
        rate: Numeric,
        mask: PyTree[bool] | Callable[[Array], bool] | None = None,
    ):
        r"""**Arguments:**

        - `rate`: $\beta \ge 0$, or a schedule.
        - `mask`: which parameters decay, a filter as in `eqx.filter`: a function of a
            leaf (`lambda p: p.ndim > 1`) or a tree of booleans. `None`: all.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.number = check_number("rate", rate, RANGES.weight_decay, schedule=True)
        self.mask = mask


def chosen_by(optimizer: eqx.Module) -> Hyperparameters:
    """What an optimizer was constructed with: each a number, a schedule, or a rule."""
    return Hyperparameters(*[getattr(optimizer, f) for f in Hyperparameters._fields])


def initial(chosen: Hyperparameters, step: Int[Array, ""]) -> Hyperparameters:
    """What the state holds at first."""

    def first(choice):
        if isinstance(choice, AbstractRule):
            choice = choice.initial
        return at(_source(choice), step)

    return Hyperparameters(*map(first, chosen))


def current(
    chosen: Hyperparameters, values: Hyperparameters, step: Int[Array, ""]
) -> Hyperparameters:
    """The numbers of a step: those that follow a schedule at their value of this step,
    others as they are in the state."""

    def now(choice, value):
        source = _source(choice)
        scheduled = callable(source) and not isinstance(choice, AbstractRule)
        return at(source if scheduled else value, step)

    return Hyperparameters(*map(now, chosen, values))


def in_range(values: Hyperparameters) -> Bool[Array, ""]:
    """Whether numbers lie in their ranges, bounds included, which a schedule may
    reach."""
    given = [(value, r) for value, r in zip(values, RANGES) if value is not None]
    most = [float(r.highest) for _, r in given]
    stacked = jnp.stack([value.astype(float) for value, _ in given])
    return jnp.all((stacked >= 0) & (stacked <= jnp.array(most, float)))


def _source(choice: Any) -> Numeric | None:
    """The number, or the schedule, of a choice."""
    return choice.number if isinstance(choice, AbstractHyperparameter) else choice
