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


class OrdinalCrossEntropy(AbstractLoss):
    r"""Classes $0 < 1 < \dots < K - 1$ that have an order (grades, stages): the outputs
    $z_1 < \dots < z_{K-1}$ are the log-odds of being *below* class 1, 2, ...,

    $$\ell = -\log p_t, \qquad p_c = \sigma(z_{c+1}) - \sigma(z_c), \qquad
    z_0 = -\infty, \quad z_K = \infty.$$

    In the proportional odds model, $z_c = \theta_c - \eta(x)$ with thresholds $\theta$
    and one output $\eta$ of a network. For two classes, this is the logistic loss.

    With $D$ the Jacobian of $p$ with respect to $z$ (two entries $\pm \sigma'(z)$ in
    every row), the Fisher is $D^\top \operatorname{diag}(1 / p) \, D$. The Hessian
    depends on the targets, but the loss is convex, so there is a Gauss-Newton matrix too
    ([`eqx_kfac.ExactGGN`][]).

    ??? cite "Reference"

        P. McCullagh, *Regression Models for Ordinal Data*, Journal of the Royal
        Statistical Society B 1980. J. Pratt, *Concavity of the Log Likelihood*, Journal
        of the American Statistical Association 1981.
    """

    cumulative_logits: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading"] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, cumulative_logits, targets=None, weights=None):
        """**Arguments:**

        - `cumulative_logits`: $z$, `[*leading, K - 1]`, at least one leading axis;
            increasing along the last axis. (Where they are not, the loss is NaN.)
        - `targets`: integer classes `[*leading]`, from 0 to $K - 1$. May be left out when
            only the Fisher is wanted. The loss at a class that does not exist (such as
            -1) is NaN, unless its weight is zero.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for logits that have no leading axis or no examples, for
        targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for logits that are not floating, and for targets that are
        not integers.
        """
        name = "OrdinalCrossEntropy"
        self.cumulative_logits = check_outputs(
            name, "cumulative_logits", cumulative_logits
        )
        leading = self.cumulative_logits.shape[:-1]
        targets = check_targets(name, targets, leading)
        if targets is not None and not jnp.issubdtype(targets.dtype, jnp.integer):
            raise TypeError(
                f"{name}: targets must be integer classes, but are {targets.dtype}."
            )
        self.targets = targets
        self.weights = check_weights(name, weights, leading)

    @property
    def outputs(self):
        return self.cumulative_logits

    @property
    def root_shape(self) -> tuple[int, ...]:
        *leading, number = self.cumulative_logits.shape
        return *leading, number + 1

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        log_p = _log_probabilities(at_least_float32(outputs))
        known = self.valid(targets)[..., None]
        chosen = jnp.where(known, _one_hot(targets, log_p), jnp.nan)
        return -jnp.sum(jnp.where(chosen == 0, 0, chosen * log_p), axis=-1)

    def valid(self, targets):
        return (targets >= 0) & (targets < self.root_shape[-1])

    def sample(self, key: Key):
        log_p = _log_probabilities(at_least_float32(self.cumulative_logits))
        # The largest with Gumbel noise is at a class drawn from the probabilities.
        noise = draw(jax.random.gumbel, key, log_p.shape, log_p.dtype)
        return jnp.argmax(log_p + noise, axis=-1)

    def fisher_root(self, v):
        # S = Dᵀ diag(1 / √p), of which no factor overflows alone.
        z = at_least_float32(self.cumulative_logits)
        log_p, log_slope, v = _log_probabilities(z), _log_slope(z), v.astype(z.dtype)
        below = jnp.exp(log_slope - log_p[..., :-1] / 2) * v[..., :-1]
        above = jnp.exp(log_slope - log_p[..., 1:] / 2) * v[..., 1:]
        return (below - above).astype(self.cumulative_logits.dtype)

    def hessian_root(self, v):
        # The loss is -log σ(z_{c+1}) - log σ(-z_c) - log(1 - exp(z_c - z_{c+1})). The
        # second derivative of the last term is 1 / (2 sinh(gap / 2))², along the gap.
        z = at_least_float32(self.cumulative_logits)
        v = v.astype(z.dtype)
        gap = z[..., 1:] - z[..., :-1]
        root = _padded(0.5 / jnp.sinh(gap / 2), 1, 1)
        chosen = _one_hot(self.observed, root)
        below, above = chosen[..., :-1], chosen[..., 1:]
        between = jnp.sum(chosen * root, axis=-1, keepdims=True) * v[..., -1:]
        sides = (below + above) * jnp.exp(_log_slope(z) / 2) * v[..., :-1]
        out = sides + (below - above) * between
        return out.astype(self.cumulative_logits.dtype)


def _padded(a: Float[Array, "*leading n"], before: int, after: int) -> Array:
    """With zeros at both ends of the last axis."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(before, after)])


def _log_probabilities(z: Float[Array, "*leading k"]) -> Float[Array, "*leading classes"]:
    """σ(b) - σ(a) = σ(b) σ(-a) (1 - exp(a - b)), which does not cancel."""
    between = jnp.log(-jnp.expm1(z[..., :-1] - z[..., 1:]))
    below, above = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return _padded(below, 0, 1) + _padded(above, 1, 0) + _padded(between, 1, 1)


def _log_slope(z: Float[Array, "*leading k"]) -> Float[Array, "*leading k"]:
    """The logarithm of σ'(z) = σ(z) σ(-z)."""
    return jax.nn.log_sigmoid(z) + jax.nn.log_sigmoid(-z)


def _one_hot(targets: Shaped[Array, "*leading"], like: Array) -> Array:
    return jax.nn.one_hot(targets, like.shape[-1], dtype=like.dtype)
