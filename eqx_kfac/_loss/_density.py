import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._custom_types import Key
from .._misc import draw
from ._base import AbstractLoss, at_least_float32, check_outputs, check_weights


class NegativeLogLikelihood(AbstractLoss):
    r"""Minus the log-density of every example, $\ell_n = -\log p_\theta(x_n)$, for models
    that compute nothing else: normalizing flows, autoregressive models, mixtures,
    energy-based models whose norm is known, and a likelihood that some other function
    computes (CTC, a Kalman filter).

    The curvature is the second moment of the scores,

    $$F = \frac1N \sum_n w_n s_n s_n^\top, \qquad s_n = \nabla \log p_\theta(x_n).$$

    If the examples are drawn from the model itself, its expectation is the Fisher, and
    it is their covariance, because scores then have mean zero. If they are data, it is
    the *empirical* Fisher, and the same only as far as the model has learnt their
    distribution. In early training the two may differ by any factor. Losses of
    distributions that are predicted (`kfac.SoftmaxCrossEntropy` of every letter of an
    autoregressive model of text, `kfac.NormalNLL`) have the Fisher itself: use this
    loss where there is no such object.

    A log-density is its own score but for the sign, so that all Fisher estimators are of
    the same matrix: `Exact` and `Empirical` compute it with one backward pass and without
    noise, and the random targets of `MonteCarlo` are signs, as those of `CurvatureProp`.
    `Centred` takes the mean of the scores away. A norm that the model does not compute
    ($\log p$ up to a constant that depends on $\theta$) has a gradient, too, which has
    to be added as a penalty: see "Which loss is yours".

    The value may be negative: a density, unlike a probability, is not bounded by one.

    ??? cite "Reference"

        S. Amari, *Natural Gradient Works Efficiently in Learning*, Neural Computation
        1998. F. Kunstner, L. Balles, P. Hennig, *Limitations of the Empirical Fisher
        Approximation for Natural Gradient Descent*, NeurIPS 2019, for the difference.
    """

    # The logarithm f of the density, as a function, is its natural parameter: the Hessian
    # of -f(x) + log ∫exp f is the covariance under the model, whatever the data.
    natural = True
    log_probs: Inexact[Array, "*leading 1"]
    targets: Float[Array, "*leading"]
    weights: Shaped[Array, "..."] | None

    def __init__(self, log_probs, weights=None):
        """**Arguments:**

        - `log_probs`: $\\log p(x_n)$, an array `[*leading]` with at least one axis:
            `jax.vmap(model.log_prob)(x)`. The loss is the mean over all axes. (Kept with
            one axis more, as outputs of size one.)
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Fields:** `targets` are ones, the signs of the terms.

        **Raises:** `ValueError` for a single number, which would be a mean: of that, no
        example's gradient is known.
        """
        name = "NegativeLogLikelihood"
        if eqx.is_array_like(log_probs):
            if jnp.ndim(log_probs) == 0:
                raise ValueError(
                    f"{name}: log_probs must be the log-densities of single examples, "
                    "[batch, ...], but are one number. Leave out the mean or the sum "
                    f"over the examples: `kfac.{name}(jax.vmap(model.log_prob)(x))`."
                )
            log_probs = jnp.asarray(log_probs)[..., None]
        self.log_probs = check_outputs(name, "log_probs", log_probs)
        log_probs = at_least_float32(self.log_probs)[..., 0]
        self.targets = jnp.ones_like(log_probs)
        self.weights = check_weights(name, weights, log_probs.shape)

    @property
    def outputs(self):
        return self.log_probs

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.log_probs.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        log_p = at_least_float32(outputs)[..., 0]
        return -targets.astype(log_p.dtype) * log_p

    def sample(self, key: Key):
        # No example can be drawn from its log-density. With random signs, scores have
        # mean zero, and the second moment that they have with their own sign. (Times
        # ones, which are where the terms are.)
        ones = self.targets
        return ones * draw(jax.random.rademacher, key, ones.shape, ones.dtype)

    def fisher_root(self, v):
        return v.astype(self.log_probs.dtype)

    def hessian_product(self, v):
        # Not by autodiff: -f(x) alone is linear in f.
        return self.fisher_product(v)
