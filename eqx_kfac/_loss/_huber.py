import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._checks import check_number, POSITIVE
from .._custom_types import Key, Scalar
from .._misc import draw
from ._base import (
    AbstractLoss,
    at_least_float32,
    check_outputs,
    check_targets,
    check_weights,
)


class HuberLoss(AbstractLoss):
    r"""Regression with outliers: with $r = t - y$, summed over the last axis,

    $$\ell = \tfrac12 r^2 \text{ for } |r| \le \delta, \qquad
    \delta |r| - \tfrac12 \delta^2 \text{ else.}$$

    $e^{-\ell}$ is a density, up to a factor: normal in the centre, exponential in the
    tails. Its Fisher at the predictions is the probability of the centre,

    $$P(|r| \le \delta) = \frac{c}{c + 2 e^{-\delta^2 / 2} / \delta}, \qquad
    c = \sqrt{2 \pi} \operatorname{erf}(\delta / \sqrt 2),$$

    a constant. The Hessian at the targets is one for $|r| \le \delta$ and zero else:
    convex, so there is a Gauss-Newton matrix too ([`eqx_kfac.ExactGGN`][]), in which
    outliers do not count. The Fisher is the default.

    For residuals of a typical size $s$, divide predictions and targets by $s$.

    ??? cite "Reference"

        P. Huber, *Robust Estimation of a Location Parameter*, Annals of Mathematical
        Statistics 1964.
    """

    predictions: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None
    delta: Scalar

    def __init__(self, predictions, targets=None, weights=None, delta: Scalar = 1.0):
        """**Arguments:**

        - `predictions`: `[*leading, k]`, at least one leading axis. The loss sums over
            the last axis, and is the mean over the others.
        - `targets`: `[*leading, k]`. May be left out when only the Fisher is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.
        - `delta`: $\\delta > 0$: the residual from which on the loss is linear.

        **Raises:** `ValueError` for a `delta` that is not positive.
        """
        name = "HuberLoss"
        self.predictions = check_outputs(name, "predictions", predictions)
        shape = self.predictions.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])
        self.delta = check_number("delta", delta, POSITIVE)

    @property
    def outputs(self):
        return self.predictions

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.predictions.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        y = at_least_float32(outputs)
        delta = jnp.asarray(self.delta, y.dtype)
        size = jnp.abs(targets.astype(y.dtype) - y)
        near = jnp.minimum(size, delta)
        return jnp.sum(near * (size - near / 2), axis=-1)

    def sample(self, key: Key):
        y = at_least_float32(self.predictions)
        delta, central = jnp.asarray(self.delta, y.dtype), self._central(y.dtype)
        keys = jax.random.split(key)
        u = draw(jax.random.uniform, keys[0], y.shape, y.dtype)
        sign = draw(jax.random.rademacher, keys[1], y.shape, y.dtype)
        # The inverse of the distribution function of |r|.
        part = jnp.minimum(u / central, 1) * jax.lax.erf(delta / 2**0.5)
        near = 2**0.5 * jax.lax.erf_inv(part)
        far = delta - jnp.log((1 - u) / (1 - central)) / delta
        return y + sign * jnp.where(u < central, near, far)

    def fisher_root(self, v):
        dtype = at_least_float32(self.predictions).dtype
        root = jnp.sqrt(self._central(dtype))
        return (root * v.astype(dtype)).astype(self.predictions.dtype)

    def hessian_root(self, v):
        y = at_least_float32(self.predictions)
        size = jnp.abs(self.observed.astype(y.dtype) - y)
        near = size <= jnp.asarray(self.delta, y.dtype)
        return jnp.where(near, v.astype(y.dtype), 0).astype(self.predictions.dtype)

    def _central(self, dtype) -> Float[Array, ""]:
        """The probability of a residual that is at most delta."""
        delta = jnp.asarray(self.delta, dtype)
        centre = jnp.asarray((2 * jnp.pi) ** 0.5, dtype) * jax.lax.erf(delta / 2**0.5)
        return centre / (centre + 2 * jnp.exp(-(delta**2) / 2) / delta)
