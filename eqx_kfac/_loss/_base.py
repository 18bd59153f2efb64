import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, PyTree, Shaped

from .._checks import is_number, plain
from .._custom_types import Key, Weights
from .._devices import placed_like, zeros_beside
from .._jax import Tracer
from .._misc import accumulator, trailing
from ._no_number import NoNumber


class AbstractObjective(NoNumber):
    """Something to minimise. Objectives add up, and scale by numbers:
    `a + 0.5 * b + kfac.L2(model, 1e-4) + penalty`."""

    @property
    @abc.abstractmethod
    def value(self) -> Float[Array, ""]:
        """The scalar."""

    def __add__(self, other: Any) -> "Sum":
        return Sum((*terms_of(self), *terms_of(other)))

    def __radd__(self, other: Any) -> "Sum":
        return Sum((*terms_of(other), *terms_of(self)))

    def __sub__(self, other: Any) -> "Sum":
        if isinstance(other, AbstractObjective):
            raise TypeError(
                "Losses cannot be subtracted: the curvature of the difference would not "
                "be positive semidefinite. Only scalars can: `loss - bonus`."
            )
        return self + -other

    def __mul__(self, coefficient: ArrayLike) -> "Sum":
        coefficient = _checked_coefficient(coefficient)
        return Sum(tuple((coefficient * c, o) for c, o in terms_of(self)))

    def __rmul__(self, coefficient: ArrayLike) -> "Sum":
        return self * coefficient

    def __truediv__(self, divisor: ArrayLike) -> "Sum":
        return self * (1 / plain(divisor))


class Sum(AbstractObjective):
    """A linear combination of objectives. Made by `+` and `*`. Beside anything else that
    is minimised, a loss without targets has a curvature and no value: it says what the
    model predicts, and the rest says what is wanted of it."""

    terms: tuple[tuple[Any, AbstractObjective], ...]

    @property
    def weighted_losses(self) -> "list[tuple[Any, AbstractLoss]]":
        """`(coefficient, loss)` for the terms that have a predictive distribution."""
        return [(c, o) for c, o in self.terms if isinstance(o, AbstractLoss)]

    @property
    def curved(self) -> tuple[tuple[Any, AbstractObjective], ...]:
        """The terms that have a curvature."""
        return tuple(t for t in self.terms if not isinstance(t[1], Penalty))

    @property
    def losses(self) -> "list[AbstractLoss]":
        """The terms that have a predictive distribution."""
        return [loss for _, loss in self.weighted_losses]

    @property
    def is_surrogate(self) -> bool:
        """Whether a loss without targets stands for the curvature of something else. Then
        the value is no negative log-likelihood, and does not say how much is left to be
        gained."""
        kinds = (AbstractLoss, Penalty)
        minimised = [_has_targets(o) for _, o in self.terms if isinstance(o, kinds)]
        return any(minimised) and not all(minimised)

    @property
    def is_penalised(self) -> bool:
        """Whether there are terms with a gradient, but no curvature."""
        return len(self.curved) < len(self.terms)

    @property
    def is_natural(self) -> bool:
        """Whether the outputs of all losses are natural parameters, so that the Fisher is
        the Gauss-Newton matrix, whatever the targets."""
        return all(loss.natural for loss in self.losses)

    @property
    def squares(self) -> int:
        """How many squares one example's loss is the sum of, if the value is a mean of
        such (and L2 terms) alone; otherwise 0."""
        alone = len(self.curved) == len(self.terms)
        if not alone or not all(loss.sum_of_squares for loss in self.losses):
            return 0
        return sum(loss.root_shape[-1] for loss in self.losses)

    def has_value(self, objective: AbstractObjective) -> bool:
        """Whether a term is minimised. (If there is nothing that could be, all are said
        to be, and whoever asks for their value is told.)"""
        return _has_targets(objective) or not self.is_surrogate

    @property
    def value(self) -> Float[Array, ""]:
        valued = [(c, o.value) for c, o in self.terms if self.has_value(o)]
        return linear_combination([c for c, _ in valued], [v for _, v in valued])


def linear_combination(
    coefficients: Sequence[Any], values: Sequence[Float[Array, ""]]
) -> Float[Array, ""]:
    """`sum(c * v)`, in the widest type of the values."""
    dtype = accumulator(*[v.dtype for v in values])
    total = jnp.zeros((), dtype)
    for c, v in zip(coefficients, values, strict=True):
        total = total + jnp.asarray(c, dtype) * v.astype(dtype)
    return total


class Penalty(AbstractObjective):
    """A scalar whose gradient counts and whose curvature does not."""

    penalty: Any

    @property
    def value(self) -> Float[Array, ""]:
        penalty = jnp.asarray(self.penalty)
        return penalty.astype(accumulator(penalty.dtype))


def _has_targets(objective: AbstractObjective) -> bool:
    return not isinstance(objective, AbstractLoss) or objective.targets is not None


def terms_of(objective: Any) -> tuple[tuple[Any, AbstractObjective], ...]:
    """Any objective, or number, as `(coefficient, objective)` pairs."""
    if isinstance(objective, Sum):
        return objective.terms
    if isinstance(objective, AbstractObjective):
        return ((1.0, objective),)
    objective = plain(objective)
    if not (is_number(objective) or isinstance(objective, (jax.Array, np.ndarray))):
        raise TypeError(
            "Only other losses and scalars can be added to a loss, but got "
            f"{objective!r}."
        )
    if jnp.ndim(objective) != 0:
        raise ValueError(
            "Only scalars can be added to a loss, but got an array of shape "
            f"{jnp.shape(objective)}. Reduce it first, e.g. with `jnp.mean`."
        )
    if jnp.iscomplexobj(objective):
        raise TypeError(
            "Only real scalars can be added to a loss, but got one of type "
            f"{objective.dtype}. Take its `jnp.real`, or `jnp.abs` of what it is made of."
        )
    if is_number(objective) and objective == 0:
        return ()  # So that `sum(losses)` works.
    return ((1.0, Penalty(objective)),)


def _checked_coefficient(value: Any) -> Any:
    """A number that losses can be multiplied by, or an error."""
    value = plain(value)
    if is_number(value) and value < 0:
        raise ValueError(
            f"Losses scale by coefficients that are not negative, got {value}: the "
            "curvature would not be positive semidefinite."
        )
    scalar = isinstance(value, jax.Array) and value.ndim == 0
    if not (is_number(value) or scalar):
        raise TypeError(f"Losses scale by numbers, but got {value!r}.")
    return value


class AbstractLoss(AbstractObjective):
    r"""A negative log-likelihood that knows its predictive distribution.

    The value is the weighted mean $\frac1N \sum_n w_n \ell_n$, $N = \sum_n w_n$, over all
    leading axes of the outputs (batch, tokens, ...); the last axis of the outputs belongs
    to one distribution.

    A term of weight zero counts for nothing. Its target may be anything: a NaN, or the
    -1 that pads labels. What the model computes from its inputs has to be finite, because
    zero times NaN is NaN in a backward pass: pad inputs with zeros.

    Weights may depend on the model, as those of a focal loss do: value and gradient are
    those of the quotient above. Curvature treats the weights as constants.

    A new loss is a subclass with the three arrays below and the four methods; everything
    else follows. If `outputs` are natural parameters of an exponential family, say so
    with `natural = True`: then the Fisher is the Hessian, whatever the targets. Which
    targets are `valid` (by default, those that are finite) only matters for terms of
    weight zero.

    **Fields:**

    - `natural`: whether `outputs` are natural parameters of an exponential family.
    - `sum_of_squares`: whether the values are squares of differences to the targets, and
        nothing else, so that they are as large as the targets' unit makes them.
    - `joint`: whether a term depends on the others, so micro-batches would change it.
    - `targets`: what was observed, for every term: arrays `[*leading, ...]`; `None` if
        only curvature is wanted, which may be that of a scalar (a policy's objective, a
        surrogate) beside it: `scalar + loss`.
    - `weights`: one for every term, `[*leading]` or its first axes; `None`: all are 1.
    """

    natural: ClassVar[bool] = False
    sum_of_squares: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    targets: eqx.AbstractVar[PyTree]
    weights: eqx.AbstractVar[Array | None]

    @property
    @abc.abstractmethod
    def outputs(self) -> PyTree[Inexact[Array, "*leading k"]]:
        """The distribution's parameters, as the model computed them: an array of the
        loss, or a tuple of several."""

    @abc.abstractmethod
    def losses(self, outputs: PyTree, targets: PyTree) -> Float[Array, "*leading"]:
        """The negative log-likelihood of every term, up to a constant."""

    @abc.abstractmethod
    def sample(self, key: Key) -> PyTree:
        """Targets drawn from the predictive distribution."""

    @abc.abstractmethod
    def fisher_root(self, v: Float[Array, "*leading r"]) -> PyTree:
        r"""$S v$ with $S S^\top$ the Fisher of each term with respect to `outputs`."""

    @property
    @abc.abstractmethod
    def root_shape(self) -> tuple[int, ...]:
        """The shape of the `v` of `fisher_root`."""

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of the loss terms."""
        return self.root_shape[:-1]

    @property
    def term_weights(self) -> Float[Array, "*leading"]:
        """The weights of all terms, one where none were given."""
        dtype = accumulator(*[leaf.dtype for leaf in jtu.tree_leaves(self.outputs)])
        if self.weights is None:
            return jnp.ones(self.leading, dtype)
        w = self.weights.astype(dtype)
        w = w.reshape(w.shape + (1,) * (len(self.leading) - w.ndim))
        return jnp.broadcast_to(w, self.leading)

    @property
    def total(self) -> Float[Array, ""]:
        r"""$\sum_n w_n \ell_n$."""
        if self.targets is None:
            raise ValueError(
                f"This {type(self).__name__} has no targets, so it has no value. Pass "
                "targets to train; or add what is minimised instead, of which this is "
                "the curvature: `surrogate + loss`."
            )
        losses = self._term_losses(self.outputs, self.present(self.targets))
        weights = self.term_weights.astype(losses.dtype)
        if self.weights is not None:
            losses = jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)
        return jnp.sum(losses * weights)

    def _term_losses(self, outputs: PyTree, targets: PyTree) -> Float[Array, "*leading"]:
        """The losses of all terms, whose shape is checked: the sum of losses of any other
        shape would be a wrong number without a word."""
        losses = self.losses(outputs, targets)
        if losses.shape != self.leading:
            name = type(self).__name__
            shapes = jtu.tree_map(jnp.shape, targets)
            raise ValueError(
                f"`{name}.losses` must return one number for every term, of shape "
                f"{self.leading}, but returned an array of shape {losses.shape}, given "
                f"targets of shape {shapes}. Sum over the axes of what belongs to one "
                f"term; and see that `{name}.sample` returns targets of the shape that "
                "is passed to train."
            )
        return losses

    def valid(self, targets: Shaped[Array, "..."]) -> Bool[Array, "..."]:
        """Which of some targets (an array of them) are possible at all."""
        return jnp.isfinite(targets)

    def present(self, targets: PyTree) -> PyTree:
        """Targets of all terms, with zeros in place of those that are not valid and whose
        weight is zero."""
        if self.weights is None:
            return targets
        absent = self.term_weights == 0

        def fill(t):
            unused = trailing(absent, t) & ~self.valid(t)
            return jnp.where(unused, jnp.zeros_like(t), t)

        return jtu.tree_map(fill, targets)

    @property
    def observed(self) -> PyTree:
        """The targets of all terms that count, for a Hessian that depends on them."""
        if self.targets is None:
            raise ValueError(
                f"This {type(self).__name__} has no targets, which its Hessian depends "
                "on. Pass targets to the loss, or use the Fisher (`fisher_product`)."
            )
        return self.present(self.targets)

    @property
    def count(self) -> Float[Array, ""]:
        r"""$N = \sum_n w_n$."""
        return jnp.sum(self.term_weights)

    @property
    def value(self) -> Float[Array, ""]:
        total = self.total
        return total / self.count.astype(total.dtype)

    def score(self, targets: PyTree) -> PyTree[Inexact[Array, "*leading k"]]:
        """The gradient at the outputs of the sum of the losses at `targets`."""
        targets = self.present(targets)
        total = lambda outputs: jnp.sum(self._term_losses(outputs, targets))
        return jax.grad(total)(self.outputs)

    def fisher_product(self, v: PyTree) -> PyTree:
        r"""$S S^\top v$: every term's Fisher with respect to `outputs` times a
        vector."""
        return self.fisher_root(self.transposed(self.fisher_root, v))

    def check_cotangent(self, cotangent: PyTree) -> None:
        """Raises if what a root, or a score, returned is not shaped like the outputs."""
        both = cotangent, self.outputs
        got, wanted = ([jnp.shape(a) for a in jtu.tree_leaves(tree)] for tree in both)
        if got != wanted:
            name = type(self).__name__
            shown = lambda shapes: " and ".join(map(str, shapes)) or "nothing"
            raise ValueError(
                f"`{name}.fisher_root` (or `hessian_root`) must return what is shaped "
                f"like `outputs`, {shown(wanted)}, given an array of shape `root_shape`, "
                f"{self.root_shape}, but returned {shown(got)}."
            )

    def transposed(self, root: Callable, v: PyTree) -> Float[Array, "*leading r"]:
        r"""$S^\top v$, with `root` (`fisher_root` or `hessian_root`) the product with
        $S$."""
        leaf, *_ = leaves = jtu.tree_leaves(self.outputs)
        dtype = accumulator(*[a.dtype for a in leaves])
        # The transpose of what is different on every device stays on that device.
        zeros = zeros_beside(leaf, self.root_shape, dtype, len(self.leading))
        like, transpose = jax.vjp(root, zeros)
        self.check_cotangent(like)
        (out,) = transpose(jtu.tree_map(_like, v, like))
        return out

    def hessian_root(self, v: Float[Array, "*leading r"]) -> PyTree:
        r"""$S v$ with $S S^\top$ the Hessian of each term with respect to `outputs`, for
        the Gauss-Newton matrix. For natural parameters, this is the Fisher's root; a loss
        that is convex in other outputs may have a root of its own (of the same shape)."""
        if not self.natural:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no root of its Hessian at the outputs: they are not natural "
                "parameters, so the Hessian depends on targets and may be indefinite. "
                "Use the Fisher (`kfac.Exact()` instead of `kfac.ExactGGN()`), or, for a "
                f"loss of your own that is convex, define `{name}.hessian_root`."
            )
        return self.fisher_root(v)

    def hessian_product(self, v: PyTree) -> PyTree:
        r"""Every term's Hessian $\nabla^2 \ell_n$ with respect to `outputs`, at the
        targets, times a vector, by autodiff. Targets may be left out of a loss with
        natural parameters. Like `fisher_product`, it ignores weights."""
        if self.targets is None and self.natural:
            return self.fisher_product(v)
        targets = self.observed
        score = jax.grad(lambda outputs: jnp.sum(self.losses(outputs, targets)))
        v = jtu.tree_map(_like, v, self.outputs)
        return jax.jvp(score, (self.outputs,), (v,))[1]


def _like(a: Array, z: Array) -> Array:
    return placed_like(a.astype(z.dtype), z)


def at_least_float32(x: Inexact[Array, "*s"]) -> Float[Array, "*s"]:
    """Losses are computed in at least float32, whatever the model computes in."""
    return x.astype(accumulator(x.dtype))


def check_outputs(name: str, what: str, outputs: object) -> Array:
    """The model's outputs as an array `[*leading, k]`, or an error."""
    leaves = jtu.tree_leaves(outputs)
    if isinstance(outputs, tuple) and not all(map(is_number, leaves)):
        raise TypeError(
            f"{name}: {what} must be one array, but are a tuple. If the model returns "
            f"several things, such as `(out, state)`, take them apart first: `{what}, "
            "state = jax.vmap(...)(x, state)`, and return `(loss, state)`."
        )
    if not leaves or not all(map(eqx.is_array_like, leaves)):
        raise TypeError(f"{name}: {what} must be an array, but are {outputs!r}.")
    outputs = jnp.asarray(outputs)
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise TypeError(f"{name}: {what} must be floating, but are {outputs.dtype}.")
    if outputs.ndim < 2:
        raise ValueError(
            f"{name}: {what} must have shape [batch, ..., k], but have shape "
            f"{outputs.shape}. The last axis belongs to one prediction. For one number "
            f"per example write `{what}[:, None]`; for a single example "
            f"`{what}[None, :]`."
        )
    if outputs.size == 0:
        raise ValueError(f"{name}: got an empty batch ({what} of shape {outputs.shape}).")
    return outputs


def check_weights(name: str, weights: Weights, leading: tuple[int, ...]) -> Array | None:
    """Weights whose shape is `leading` or its beginning, or an error."""
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.ndim == 0 or weights.shape != leading[: weights.ndim]:
        raise ValueError(
            f"{name}: weights must have the shape of the loss terms {leading}, or of "
            f"its first axes, but have shape {weights.shape}."
        )
    if not isinstance(weights, Tracer) and _any_negative(weights):
        raise ValueError(
            f"{name}: weights must not be negative: the curvature would not be positive "
            "semidefinite. For an objective that is no weighted likelihood (a policy "
            "gradient, with its advantages), add the scalar that is minimised to a loss "
            f"without targets and weights: `surrogate + kfac.{name}(...)`."
        )
    return weights


def _any_negative(weights: Shaped[Array, "..."]) -> bool:
    """Whether a known weight is negative, also while something else is traced."""
    with jax.ensure_compile_time_eval():
        return bool(jnp.any(is_negative(weights)))


def is_negative(weights: Shaped[Array, "..."]) -> Bool[Array, "..."]:
    """Which weights, or entries of a mask, are below zero."""
    return weights < jnp.zeros((), weights.dtype)


def check_targets(name: str, targets: object, shape: tuple[int, ...]) -> Array | None:
    """Targets of exactly `shape`, or an error."""
    if targets is None:
        return None
    targets = jnp.asarray(targets)
    if targets.shape != shape:
        raise ValueError(
            f"{name}: targets must have shape {shape} to match the model's outputs, "
            f"but have shape {targets.shape}."
        )
    if jnp.iscomplexobj(targets):
        raise TypeError(f"{name}: targets must be real, but are {targets.dtype}.")
    return targets
