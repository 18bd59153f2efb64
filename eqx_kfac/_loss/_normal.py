import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._custom_types import Key
from .._devices import cast_varying, varying_axes
from .._misc import accumulator, draw
from ._base import (
    AbstractLoss,
    at_least_float32,
    check_outputs,
    check_targets,
    check_weights,
)


class NormalNLL(AbstractLoss):
    r"""Independent Gaussians along the last axis, whose variances are predicted too:

    $$\ell = \tfrac12 \sum_k (t_k - \mu_k)^2 e^{-s_k} + s_k, \qquad
    s_k = \log \sigma_k^2,$$

    without the constant $\tfrac12 \log 2 \pi$. Its Fisher with respect to $(\mu, s)$ is
    $\operatorname{diag}(1 / \sigma^2, 1/2)$. Its Hessian depends on the targets and may
    be indefinite, so it has no Gauss-Newton matrix: curvature is the Fisher.
    """

    means: Inexact[Array, "*leading k"]
    log_variances: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, means, log_variances, targets=None, weights=None):
        """**Arguments:**

        - `means`: `[*leading, k]`, at least one leading axis. The loss sums over the
            last axis, and is the mean over the others.
        - `log_variances`: $\\log \\sigma^2$, `[*leading, k]`.
        - `targets`: `[*leading, k]`. May be left out when only curvature is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for means that have no leading axis or no examples, for
        targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for means that are not floating, and for targets that are
        not real.
        """
        name = "NormalNLL"
        self.means = check_outputs(name, "means", means)
        self.log_variances = check_outputs(name, "log_variances", log_variances)
        shape = self.means.shape
        if self.log_variances.shape != shape:
            raise ValueError(
                f"{name}: means and log_variances must have one shape, but have shapes "
                f"{shape} and {self.log_variances.shape}. For one variance of all, "
                "`jnp.broadcast_to(log_variance, means.shape)`."
            )
        # A variance that devices share, beside means that they do not.
        axes = varying_axes((self.means, self.log_variances))
        self.means = cast_varying(self.means, axes)
        self.log_variances = cast_varying(self.log_variances, axes)
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])

    @property
    def outputs(self):
        return self.means, self.log_variances

    @property
    def root_shape(self) -> tuple[int, ...]:
        return *self.means.shape[:-1], 2 * self.means.shape[-1]

    def _wide(self, outputs) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        mean, s = map(at_least_float32, outputs)
        dtype = accumulator(mean.dtype, s.dtype)
        return mean.astype(dtype), s.astype(dtype)

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        mean, s = self._wide(outputs)
        standardised = (targets.astype(mean.dtype) - mean) * jnp.exp(-s / 2)
        return 0.5 * jnp.sum(standardised**2 + s, axis=-1)

    def sample(self, key: Key):
        mean, s = self._wide(self.outputs)
        noise = draw(jax.random.normal, key, mean.shape, mean.dtype)
        return mean + jnp.exp(s / 2) * noise

    def fisher_root(self, v):
        mean, s = self._wide(self.outputs)
        v_mean, v_s = jnp.split(v.astype(mean.dtype), 2, axis=-1)
        return (
            (jnp.exp(-s / 2) * v_mean).astype(self.means.dtype),
            (0.5**0.5 * v_s).astype(self.log_variances.dtype),
        )
