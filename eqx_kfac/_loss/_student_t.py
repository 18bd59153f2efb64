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


class StudentTNLL(AbstractLoss):
    r"""Regression with gross outliers: independent Student's t variables along the last
    axis, with a given scale $s$ and $\nu$ degrees of freedom,

    $$\ell = \sum_k \frac{\nu + 1}2 \log\left(1 + \frac{(t_k - \mu_k)^2}{\nu s^2}\right)
    + \log s,$$

    up to a constant that depends on $\nu$. The gradient of a residual falls again beyond
    $\sqrt \nu s$: the further away, the less an outlier counts. Its Fisher at the
    locations is

    $$\frac{\nu + 1}{(\nu + 3) s^2},$$

    a constant; for $\nu \to \infty$, that of a Gaussian. The Hessian depends on the
    targets and is negative for outliers, so there is no Gauss-Newton matrix.

    ??? cite "Reference"

        K. Lange, R. Little, J. Taylor, *Robust Statistical Modeling Using the t
        Distribution*, Journal of the American Statistical Association 1989.
    """

    locations: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None
    degrees_of_freedom: Scalar
    scale: Scalar

    def __init__(
        self,
        locations,
        targets=None,
        weights=None,
        degrees_of_freedom: Scalar = 4.0,
        scale: Scalar = 1.0,
    ):
        """**Arguments:**

        - `locations`: $\\mu$, `[*leading, k]`, at least one leading axis. The loss sums
            over the last axis, and is the mean over the others.
        - `targets`: `[*leading, k]`. May be left out when only curvature is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.
        - `degrees_of_freedom`: $\\nu > 0$; 1 is a Cauchy distribution.
        - `scale`: $s > 0$, a typical residual. Curvature takes it for a constant.

        **Raises:** `ValueError` for numbers that are not positive.
        """
        name = "StudentTNLL"
        self.locations = check_outputs(name, "locations", locations)
        shape = self.locations.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])
        self.degrees_of_freedom = check_number(
            "degrees_of_freedom", degrees_of_freedom, POSITIVE
        )
        self.scale = check_number("scale", scale, POSITIVE)

    @property
    def outputs(self):
        return self.locations

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.locations.shape

    def _numbers(self, dtype) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return (
            jnp.asarray(self.degrees_of_freedom, dtype),
            jnp.asarray(self.scale, dtype),
        )

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        y = at_least_float32(outputs)
        nu, s = self._numbers(y.dtype)
        r = (targets.astype(y.dtype) - y) / s
        each = (nu + 1) / 2 * jnp.log1p(r**2 / nu) + jnp.log(s)
        return jnp.sum(each, axis=-1)

    def sample(self, key: Key):
        y = at_least_float32(self.locations)
        nu, s = self._numbers(y.dtype)
        # A coordinate of a point of the plane, whose squared radius r² has the
        # distribution function 1 - (1 + r² / ν)^(-ν / 2).
        keys = jax.random.split(key)
        u, angle = (draw(jax.random.uniform, k, y.shape, y.dtype) for k in keys)
        radius = jnp.sqrt(nu * jnp.expm1(-2 / nu * jnp.log1p(-u)))
        return y + s * radius * jnp.cos(2 * jnp.pi * angle)

    def fisher_root(self, v):
        nu, s = self._numbers(at_least_float32(self.locations).dtype)
        root = jnp.sqrt((nu + 1) / (nu + 3)) / s
        return (root * v.astype(root.dtype)).astype(self.locations.dtype)
