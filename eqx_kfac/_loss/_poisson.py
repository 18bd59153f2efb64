import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._custom_types import Key
from .._devices import explicit_sharding
from .._misc import draw
from ._base import (
    AbstractLoss,
    at_least_float32,
    check_outputs,
    check_targets,
    check_weights,
)


class PoissonNLL(AbstractLoss):
    r"""Independent counts along the last axis: $\ell = \sum_k e^{\eta_k} - t_k \eta_k$
    with $\eta$ the logarithm of the rate, without the constant $\log t_k!$. Its Fisher
    (and GGN) at the log-rates is $\operatorname{diag}(e^\eta)$.
    """

    natural = True
    log_rates: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, log_rates, targets=None, weights=None):
        """**Arguments:**

        - `log_rates`: `[*leading, k]`, at least one leading axis. The loss sums over the
            last axis, and is the mean over the others. For counts over unequal times (or
            areas, or populations), add the logarithm of the time.
        - `targets`: counts `[*leading, k]`, integer or floating. May be left out when
            only curvature is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for log-rates that have no leading axis or no examples,
        for targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for log-rates that are not floating, and for targets that
        are not real.
        """
        name = "PoissonNLL"
        self.log_rates = check_outputs(name, "log_rates", log_rates)
        shape = self.log_rates.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])

    @property
    def outputs(self):
        return self.log_rates

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.log_rates.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        eta = at_least_float32(outputs)
        t = targets.astype(eta.dtype)
        # No count where the rate is zero (a log-rate of minus infinity) costs nothing.
        return jnp.sum(jnp.exp(eta) - jnp.where(t == 0, 0, t * eta), axis=-1)

    def sample(self, key: Key):
        rate = jnp.exp(at_least_float32(self.log_rates))
        counting, normal = jax.random.split(key)
        # JAX counts with one kind of key, in int32 and from float32 rates. From 1e4 on, a
        # Gaussian of the same mean and variance takes over.
        counting = jax.random.bits(counting, (2,), jnp.uint32)
        counting = jax.random.wrap_key_data(counting, impl="threefry2x32")
        many = rate > 1e4
        counts = jax.random.poisson(
            counting,
            jnp.where(many, 1, rate),
            rate.shape,
            out_sharding=explicit_sharding(jax.typeof(rate)),
        )
        noise = draw(jax.random.normal, normal, rate.shape, rate.dtype)
        large = rate + jnp.sqrt(rate) * noise
        return jnp.where(many, large, counts.astype(rate.dtype))

    def fisher_root(self, v):
        deviation = jnp.exp(at_least_float32(self.log_rates) / 2)
        return (deviation * v.astype(deviation.dtype)).astype(self.log_rates.dtype)
