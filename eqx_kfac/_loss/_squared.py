import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._custom_types import Key
from .._misc import draw
from ._base import (
    AbstractLoss,
    at_least_float32,
    check_outputs,
    check_targets,
    check_weights,
)


class SquaredError(AbstractLoss):
    r"""A Gaussian of unit variance: $\ell = \frac12 \lVert y - t \rVert^2$, summed over
    the last axis. Its Fisher (and GGN) at the predictions is the identity.
    """

    natural = True
    sum_of_squares = True
    predictions: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, predictions, targets=None, weights=None):
        """**Arguments:**

        - `predictions`: `[*leading, k]`, at least one leading axis. The loss sums over
            the last axis, and is the mean over the others.
        - `targets`: `[*leading, k]`. May be left out when only curvature is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for predictions that have no leading axis or no examples,
        for targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for predictions that are not floating, and for targets that
        are not real.
        """
        name = "SquaredError"
        self.predictions = check_outputs(name, "predictions", predictions)
        shape = self.predictions.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])

    @property
    def outputs(self):
        return self.predictions

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.predictions.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        y = at_least_float32(outputs)
        return 0.5 * jnp.sum((y - targets.astype(y.dtype)) ** 2, axis=-1)

    def sample(self, key: Key):
        y = at_least_float32(self.predictions)
        return y + draw(jax.random.normal, key, y.shape, y.dtype)

    def fisher_root(self, v):
        return v.astype(self.predictions.dtype)
