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


class SoftmaxCrossEntropy(AbstractLoss):
    r"""A categorical distribution over classes: $\ell = -\sum_c t_c \log p_c$ with
    $p = \operatorname{softmax}(\text{logits})$. Its Fisher (and GGN) at the logits is
    $\operatorname{diag}(p) - p p^\top$.

    Floating targets need not add up to one: with $s = \sum_c t_c$, the curvature is that
    of $s$ draws, $s \, (\operatorname{diag}(p) - p p^\top)$.
    """

    natural = True
    logits: Inexact[Array, "*leading classes"]
    targets: Shaped[Array, "..."] | None
    weights: Shaped[Array, "..."] | None

    def __init__(self, logits, targets=None, weights=None):
        """**Arguments:**

        - `logits`: `[*leading, classes]`, at least one leading axis.
        - `targets`: integer classes `[*leading]`, or probabilities
            `[*leading, classes]`. May be left out when only curvature is wanted. The loss
            at a class that does not exist (such as -1) is NaN, unless its weight is zero.
        - `weights`: a weight (or a mask) for every term, `[*leading]` or its first axes.

        **Raises:** `ValueError` for logits that have no leading axis or no examples, for
        targets and weights of other shapes, and for weights that are known to be
        negative; `TypeError` for logits that are not floating, and for targets that are
        neither integer classes nor floating probabilities.
        """
        name = "SoftmaxCrossEntropy"
        self.logits = check_outputs(name, "logits", logits)
        shape = self.logits.shape
        if targets is not None:
            targets = jnp.asarray(targets)
            integer = jnp.issubdtype(targets.dtype, jnp.integer)
            if not (integer or jnp.issubdtype(targets.dtype, jnp.floating)):
                raise TypeError(
                    f"{name}: targets must be integer classes or floating "
                    f"probabilities, but are {targets.dtype}."
                )
            if not integer and targets.shape == shape[:-1]:
                raise TypeError(
                    f"{name}: floating targets are probabilities and must have shape "
                    f"{shape}, but have shape {targets.shape}. If they are classes, make "
                    "them integers: `targets.astype(jnp.int32)`."
                )
            targets = check_targets(name, targets, shape[:-1] if integer else shape)
        self.targets = targets
        self.weights = check_weights(name, weights, shape[:-1])

    @property
    def outputs(self):
        return self.logits

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.logits.shape

    def losses(self, outputs, targets) -> Float[Array, "*leading"]:
        log_p = jax.nn.log_softmax(at_least_float32(outputs), axis=-1)
        if _are_classes(targets):
            known = self.valid(targets)[..., None]
            targets = jax.nn.one_hot(targets, log_p.shape[-1], dtype=log_p.dtype)
            targets = jnp.where(known, targets, jnp.nan)
        # An impossible class (a logit of minus infinity) that is not asked for is free.
        log_p = jnp.where(targets == 0, 0, log_p)
        return -jnp.sum(targets.astype(log_p.dtype) * log_p, axis=-1)

    def valid(self, targets):
        if _are_classes(targets):
            return (targets >= 0) & (targets < self.logits.shape[-1])
        return jnp.isfinite(targets)

    def sample(self, key: Key):
        logits, draws = at_least_float32(self.logits), self._draws
        # The largest of the logits with Gumbel noise is at a class drawn from them.
        noise = draw(jax.random.gumbel, key, logits.shape, logits.dtype)
        classes = jnp.argmax(logits + noise, axis=-1)
        if draws is None:
            return classes
        # What has the mean and the covariance of so many draws.
        p = jax.nn.softmax(logits, axis=-1)
        drawn = jax.nn.one_hot(classes, p.shape[-1], dtype=p.dtype)
        return draws * p + jnp.sqrt(draws) * (drawn - p)

    def fisher_root(self, v):
        # S = √s (I - p 1ᵀ) diag(√p)
        p, draws = jax.nn.softmax(at_least_float32(self.logits), axis=-1), self._draws
        sv = jnp.sqrt(p if draws is None else draws * p) * v.astype(p.dtype)
        out = sv - p * jnp.sum(sv, axis=-1, keepdims=True)
        return out.astype(self.logits.dtype)

    @property
    def _draws(self) -> Float[Array, "*leading 1"] | None:
        """The sums of floating targets."""
        if self.targets is None or _are_classes(self.targets):
            return None
        targets = self.present(self.targets)
        dtype = at_least_float32(self.logits).dtype
        return jnp.sum(targets.astype(dtype), axis=-1, keepdims=True)


def _are_classes(targets: Shaped[Array, "..."]) -> bool:
    return jnp.issubdtype(targets.dtype, jnp.integer)
