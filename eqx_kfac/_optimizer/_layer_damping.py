"""Damping for every layer by itself."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from .._checks import AT_LEAST_0, check_count, check_number, POSITIVE
from .._custom_types import Layer, Model, Scalar
from .._devices import over_stack, zeros_as_from
from .._inner_products import inner, total
from .._operator import KroneckerOperator, SeriesOperator, squared_norm, trace, unpacked
from .._tag import flatten_tags, is_trainable, map_tags, Tag
from ..form import has_bias
from ._hyperparameters import AbstractRule


class AbstractLayerDamping(AbstractRule):
    """A rule for the damping of every layer separately, given its curvature. See "Writing
    your own"."""

    @property
    @abc.abstractmethod
    def initial(self) -> Scalar:
        """The value of `damping` in the state; `eqx.tree_at` may change it."""

    @abc.abstractmethod
    def __call__(
        self,
        damping: Float[Array, ""],
        curvature: Model,
        model: Model,
        value: Float[Array, ""],
        grads: Model,
        terms: int | None,
    ) -> Model:
        """The damping of every layer with factors (and of each layer of a stack),
        whenever they are factorised: a tree shaped like the model, with a number for
        every layer. `value` and `grads` are the loss of the batch and its gradient,
        `terms` the number of its terms if that is known."""

    def unmeasured(self, damping: Float[Array, ""]) -> Float[Array, ""]:
        """What takes the place of `damping` at a step whose length gradients do not
        bound: see [`eqx_kfac.AbstractTrustRegion.of_measured`][]. By default, the
        same."""
        return damping


class LayerDamping(AbstractLayerDamping):
    r"""Damping that is chosen for every layer whenever its curvature is factorised:

    $$\lambda_l = \min\Bigl(\lambda \min(1, |h|)^p, \; r \min(1, m / N) \,
    \frac{\sum_k s_k}{\sum_k t_k}, \;
    \kappa \, \frac{\sqrt{t_l}}{\lVert \theta_l \rVert}\Bigr), \qquad
    t_l = \max(\operatorname{tr} \hat F_l, \lVert \nabla_l h \rVert^2), \quad
    s_l = \max(\operatorname{tr} \hat F_l^2, \lVert \nabla_l h \rVert^4)$$

    with $h$ the loss of the batch (in nats) and $N$ the number of its terms. The first
    term lets a regression converge: its Fisher does not depend on the loss, and what is
    left to be learnt in the end lies where there is little of it. The second term is a
    part of the typical curvature of the whole network: if a network fits its data, its
    Fisher vanishes, and a fixed damping would stop it. Damping keeps noise out of a step,
    and the more terms a gradient has, the less noise there is: this part falls as $1 / N$
    from $m$ terms on. The third term bounds, relative to the parameters, a step that is
    determined by damping alone: in a gradient of $N$ terms,
    $\sqrt{\operatorname{tr} \hat F_l / N}$ is noise, and noise then moves a layer by at
    most $\alpha / (\kappa \sqrt N)$ of its norm. If a signal has faded in the depth of a
    network, or because its data are of a small scale, a fixed damping would hold the
    layer back. Curvature does not count as less than the square of the gradient. The
    curvature is smaller than that if a network is sure of what is wrong, or behind
    weights that begin at zero; not only noise would then move a layer by many times its
    norm, before there is any curvature to hold it. A layer without any curvature so far,
    or whose parameters are zero, has $\lambda$; none has less than $10^{-4} \lambda$.
    Pass it to [`eqx_kfac.KFAC`][] as `damping`.

    Less damping mostly makes a step longer than its blocks say, and hardly changes where
    it leads. So $\lambda$ may be small where gradients bound how long a step is: with an
    [`eqx_kfac.TrustRegion`][], and outputs that are natural parameters. Elsewhere, and in
    `update`, it is `unmeasured_factor` times as large.

    In the third term, $\hat F_l$, $\nabla_l h$ and $\theta_l$ are those of the weights
    alone, if a layer has any, because a bias does not tell how large the data are. For an
    [`eqx_kfac.Series`][], $\hat F_l$ is the curvature of one time step.

    !!! Example

        ```python
        optimizer = kfac.KFAC(damping=kfac.LayerDamping(0.001))
        ```

    ??? cite "Reference"

        The idea that the parameters should set the scale of a step: Y. You,
        I. Gitman, B. Ginsburg, *Large Batch Training of Convolutional Networks*, 2017.
        As a rule for damping it was found by experiment: see "How to choose".
    """

    max_damping: Scalar
    curvature_fraction: Scalar
    stiffness: Scalar
    loss_power: Scalar
    unmeasured_factor: Scalar
    few_terms: int = eqx.field(static=True)

    def __init__(
        self,
        max_damping: Scalar = 0.005,
        curvature_fraction: Scalar = 0.1,
        stiffness: Scalar = 0.3,
        loss_power: Scalar = 0.5,
        unmeasured_factor: Scalar = 6.0,
        few_terms: int = 128,
    ):
        r"""**Arguments:**

        - `max_damping`: $\lambda > 0$, in units of the loss per squared parameter.
        - `curvature_fraction`: $r > 0$, a fraction of the typical curvature of the
            network.
        - `stiffness`: $\kappa > 0$: the larger, the less a layer may move.
        - `loss_power`: $p \ge 0$, the power of the loss. 0 leaves the loss out.
        - `unmeasured_factor`: how many times larger $\lambda$ is where gradients do not
            bound the length of a step, $> 0$.
        - `few_terms`: $m$: up to this number of loss terms, their number does not
            matter.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.max_damping = check_number("max_damping", max_damping, POSITIVE)
        self.curvature_fraction = check_number(
            "curvature_fraction", curvature_fraction, POSITIVE
        )
        self.stiffness = check_number("stiffness", stiffness, POSITIVE)
        self.loss_power = check_number("loss_power", loss_power, AT_LEAST_0)
        self.unmeasured_factor = check_number(
            "unmeasured_factor", unmeasured_factor, POSITIVE
        )
        self.few_terms = check_count("few_terms", few_terms, 1)

    @property
    def initial(self) -> Scalar:
        """The initial value in the state: $\\lambda$."""
        return self.max_damping

    def unmeasured(self, damping: Float[Array, ""]) -> Float[Array, ""]:
        r"""$\lambda$ where gradients do not bound the length of a step."""
        return damping * self.unmeasured_factor

    def __call__(
        self,
        damping: Float[Array, ""],
        curvature: Model,
        model: Model,
        value: Float[Array, ""],
        grads: Model,
        terms: int | None,
    ) -> Model:
        r"""$\lambda_l$ for every layer with factors (and for each of a stack), given
        $\lambda$, the loss, its gradient, and the number of its terms if that is
        known."""

        matrices = map_tags(_matrix, grads)
        found, treedef = flatten_tags(_measured, model, curvature, matrices)
        measures = [of_layer for _, of_layer in found]
        each = [m for m in measures if m is not None]
        traces = sum(jnp.sum(m.trace) for m in each)
        squares = sum(jnp.sum(m.squares) for m in each)
        few = self.few_terms
        part = 1.0 if terms is None else few / max(few, terms)
        fraction = self.curvature_fraction * part
        share = fraction * squares / jnp.where(traces > 0, traces, 1)
        share = jnp.where(jnp.isnan(share), jnp.inf, share)  # Both have overflowed.

        size = jnp.minimum(1, jnp.abs(value)).astype(damping.dtype) ** self.loss_power
        most_of_all = jnp.minimum(damping * size, share.astype(damping.dtype))

        def damping_of(m):
            if m is None:
                return None
            most, first = (a.astype(m.norm.dtype) for a in (damping, most_of_all))
            norm = jnp.maximum(m.norm, jnp.finfo(m.norm.dtype).tiny)
            lower = jnp.minimum(first, self.stiffness * jnp.sqrt(m.weights) / norm)
            known = (m.weights > 0) & (m.norm > 0)
            return jnp.where(known, jnp.maximum(lower, _LEAST * most), most)

        return treedef.unflatten(map(damping_of, measures))


def init_layer_damping(
    rule: AbstractLayerDamping | None, curvature: Model, model: Model
) -> Model | None:
    """Zeros in the place of every layer's damping, if there is a rule for these."""
    if rule is None:
        return None
    number = jnp.zeros((), float)
    return zeros_as_from(rule, number, curvature, model, number, model, None)


def _matrix(tag: Tag, layer: Layer) -> Array | None:
    return tag.to_matrix(layer) if is_trainable(tag, layer) else None


def _measured(tag: Tag, layer: Layer, factors: Any, gradient: Array) -> Any:
    """What the damping of a layer (of each, in a stack) is made of, given its gradient as
    a matrix; `None` if it has no factors."""
    if factors is None:
        return None

    number = -1 if has_bias(tag.form, layer) else None  # Of columns.

    def of_one(factors, matrix, gradient):
        operator = _of_one_step(tag.operator(unpacked(factors)))
        diagonal = lx.diagonal(operator).reshape(matrix.shape)
        weights, matrix, weight_gradient = (
            a[:, :number] for a in (diagonal, matrix, gradient)
        )
        whole, part = (inner(a, a) for a in (gradient, weight_gradient))
        return _Measures(
            trace=jnp.maximum(trace(operator), whole),
            weights=jnp.maximum(total(weights), part),
            squares=jnp.maximum(squared_norm(operator), whole**2),
            norm=jnp.sqrt(inner(matrix, matrix)),
        )

    dtype = factors.l2.dtype
    matrices = [a.astype(dtype) for a in (tag.to_matrix(layer), gradient)]
    return over_stack(of_one, factors.l2.ndim)(factors, *matrices)


def _of_one_step(operator: Any) -> Any:
    """The curvature of one time step of a chain: a dense matrix of all would be as
    large as the square of the parameters."""
    if not isinstance(operator, SeriesOperator):
        return operator
    return KroneckerOperator(operator.output_factor, operator.input_factor)


class _Measures(NamedTuple):
    r"""How large the curvature of a layer is, and its weights. It counts as at least that
    of the gradient alone, $\nabla \nabla^\top$."""

    trace: Array
    weights: Array  # The part of the trace that belongs to the weights.
    squares: Array  # The sum of the squares of all entries.
    norm: Array


# No layer is damped by less than this part of the most, for numbers are not exact.
_LEAST = 1e-4
