from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Shaped

from .._checks import BETWEEN_0_AND_1, check_number
from .._custom_types import Key
from .._misc import draw
from ._base import (
    AbstractLoss,
    at_least_float32,
    check_outputs,
    check_targets,
    check_weights,
)


class QuantileLoss(AbstractLoss):
    r"""Quantiles of a distribution that is not assumed: with $r_k = t_k - y_k$,

    $$\ell = \sum_k \max(q_k r_k, (q_k - 1) r_k),$$

    whose expectation is least where $y_k$ is the $q_k$-quantile of $t_k$. With
    $q = 1/2$, it is half the absolute error, and $y$ the median. $e^{-\ell}$ is the
    density of an asymmetric Laplace distribution, up to a factor. Its Fisher at the
    predictions is $\operatorname{diag}(q_k (1 - q_k))$, a constant. The Hessian is zero
    wherever there is one, so there is no Gauss-Newton matrix.

    The Fisher is of a distribution of scale one: for residuals of a typical size $s$,
    divide predictions and targets by $s$.

    ??? cite "Reference"

        R. Koenker and G. Bassett, *Regression Quantiles*, Econometrica 1978. K. Yu and
        R. Moyeed, *Bayesian Quantile Regression*, Statistics & Probability Letters 2001,
        for the distribution.
    """

    predictions: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None
    quantiles: tuple[float, ...] = eqx.field(static=True)

    def __init__(
        self,
        predictions,
        targets=None,
        weights=None,
        quantiles: float | Sequence[float] = 0.5,
    ):
        """**Arguments:**

        - `predictions`: `[*leading, k]`, at least one leading axis. The loss sums over
            the last axis, and is the mean over the others.
        - `targets`: `[*leading, k]`. May be left out when only curvature is wanted. For
            several quantiles of one number, repeat it: `jnp.broadcast_to(t[:, None],
            predictions.shape)`.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.
        - `quantiles`: $0 < q < 1$, one number for all outputs or `k` of them.

        **Raises:** `ValueError` for a quantile out of its range, or another number of
        them.
        """
        name = "QuantileLoss"
        self.predictions = check_outputs(name, "predictions", predictions)
        shape = self.predictions.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])
        each = np.ravel(quantiles).tolist() * (
            shape[-1] if np.ndim(quantiles) == 0 else 1
        )
        checked = [check_number("quantiles", q, BETWEEN_0_AND_1) for q in each]
        if len(checked) != shape[-1]:
            raise ValueError(
                f"{name}: `quantiles` must be one number, or one for each of the "
                f"{shape[-1]} outputs, but are {len(checked)}."
            )
        self.quantiles = tuple(checked)

    @property
    def outputs(self):
        return self.predictions

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.predictions.shape

    def _levels(self, like: Array) -> Float[Array, "*leading k"]:
        return jnp.broadcast_to(jnp.asarray(self.quantiles, like.dtype), like.shape)

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        y = at_least_float32(outputs)
        q, r = self._levels(y), targets.astype(y.dtype) - y
        return jnp.sum(jnp.maximum(q * r, (q - 1) * r), axis=-1)

    def sample(self, key: Key):
        # The difference of two exponential variables, of rates q and 1 - q.
        y = at_least_float32(self.predictions)
        keys, q = jax.random.split(key), self._levels(y)
        above, below = (draw(jax.random.exponential, k, y.shape, y.dtype) for k in keys)
        return y + above / q - below / (1 - q)

    def fisher_root(self, v):
        q = self._levels(at_least_float32(self.predictions))
        deviation = jnp.sqrt(q * (1 - q))
        return (deviation * v.astype(q.dtype)).astype(self.predictions.dtype)
