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


class SigmoidCrossEntropy(AbstractLoss):
    r"""Independent Bernoulli variables along the last axis:
    $\ell = -\sum_k t_k \log p_k + (1 - t_k) \log(1 - p_k)$, $p = \sigma(\text{logits})$.
    Its Fisher (and GGN) at the logits is $\operatorname{diag}(p (1 - p))$.
    """

    natural = True
    logits: Inexact[Array, "*leading k"]
    targets: Shaped[Array, "*leading k"] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, logits, targets=None, weights=None):
        """**Arguments:**

        - `logits`: `[*leading, k]`, at least one leading axis. The loss sums over the
            last axis, and is the mean over the others.
        - `targets`: `[*leading, k]`: booleans, zeros and ones, or probabilities. May be
            left out when only curvature is wanted.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for logits that have no leading axis or no examples, for
        targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for logits that are not floating, and for targets that are
        not real.
        """
        name = "SigmoidCrossEntropy"
        self.logits = check_outputs(name, "logits", logits)
        shape = self.logits.shape
        self.targets = check_targets(name, targets, shape)
        self.weights = check_weights(name, weights, shape[:-1])

    @property
    def outputs(self):
        return self.logits

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.logits.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        logits = at_least_float32(outputs)
        # -log σ(z) = softplus(-z) = softplus(z) - z
        return jnp.sum(
            jax.nn.softplus(logits) - targets.astype(logits.dtype) * logits, axis=-1
        )

    def sample(self, key: Key):
        p = jax.nn.sigmoid(at_least_float32(self.logits))
        return draw(jax.random.uniform, key, p.shape, p.dtype) < p

    def fisher_root(self, v):
        z = at_least_float32(self.logits)
        # √(p (1 - p)), which does not cancel for large |z|.
        deviation = jnp.exp(-0.5 * (jax.nn.softplus(z) + jax.nn.softplus(-z)))
        return (deviation * v.astype(z.dtype)).astype(self.logits.dtype)
