"""One forward pass, two pullbacks: the loss, its gradient, and its curvature."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from ._block import Statistics
from ._custom_types import Key, Model
from ._fisher import AbstractFisher, MonteCarlo
from ._loss import AbstractLoss, AbstractObjective, L2, linear_combination, Sum
from ._misc import accumulator, cast_varying, common_prefix, varying_axes
from ._tag import (
    check_tagged,
    empty_tags,
    fill_tags,
    is_trainable,
    map_tagged,
    naming_layers,
)


class Linearisation(eqx.Module):
    """A loss function linearised at a model, ready to be pulled back."""

    objective: Sum
    aux: Any
    model: Model  # With filled tags.
    pullback: Callable  # From cotangents of the objective to those of the model.
    curved: Sum  # The objective without penalties, and its pullback; tags know weights.
    collect: Callable
    axes: frozenset = eqx.field(static=True)  # Of `shard_map`; they split the examples.

    def value(self) -> Float[Array, ""]:
        """The objective, as a mean over the examples of all devices."""
        return _value(self.objective, self.axes)

    def grads(self) -> Model:
        """The gradient of `value`, shaped like the model."""
        (grads,) = self.pullback(eqx.filter_grad(_value)(self.objective, self.axes))
        return empty_tags(grads)

    def curvature(self, fisher: AbstractFisher, key: Key | None) -> Model:
        """The factors of every tagged layer, in a tree shaped like the model."""
        fisher.check(self.model)
        scales, count = self._scales()
        statistics = self._statistics(fisher, scales, self._device_key(key))
        count = count * fisher.average_over(self.objective.losses)

        def factors(layer, statistics, diagonal):
            if not is_trainable(layer):
                return None
            l2 = _mean_over_layer(layer, diagonal)
            return layer.tag.block.factors(statistics, count, l2)

        return _map_layers(factors, self.model, statistics, self._l2_diagonal())

    def _statistics(self, fisher, scales, key):
        """The statistics of every layer, summed over all cotangents."""

        def pull(index):
            cotangents = fisher.cotangents(self.objective.losses, index, key)
            cotangents = [jtu.tree_map(s, c) for s, c in zip(scales, cotangents)]
            return self._pull(cotangents)

        number = fisher.number(self.objective.losses)
        statistics = pull(0)
        if number == 1:
            return statistics

        # What depends on inputs alone is the same in every pullback; the rest adds up.
        def body(index, outputs):
            return jtu.tree_map(jnp.add, outputs, _outputs(pull(index)))

        zeros = _map_layers(lambda layer: layer.tag.slots, self.model)
        outputs = jax.lax.fori_loop(0, number, body, _outputs(zeros))
        return jtu.tree_map(
            lambda s, o: Statistics(s.inputs, o),
            statistics,
            outputs,
            is_leaf=_is_statistics,
        )

    def _pull(self, cotangents: list[PyTree]) -> Model:
        """Pulls cotangents of all losses' outputs back to statistics."""
        cotangent = eqx.tree_at(
            lambda o: [loss.outputs for loss in o.losses],
            _zeros_like(self.curved),
            cotangents,
        )
        (tree,) = self.collect(cotangent)
        return _map_layers(lambda layer: layer.tag.slots, tree)

    def _scales(self) -> tuple[list[Callable], Float[Array, ""]]:
        r"""Multiplication by $\sqrt{c_i w N / N_i}$ for the outputs of every loss $i$,
        and $N$: dividing by $N$ then gives the curvature of $\sum_i c_i h_i$."""
        terms = self.objective.weighted_losses
        counts = [_psum(loss.count, self.axes) for _, loss in terms]
        dtype = accumulator(*[n.dtype for n in counts])
        counts = [n.astype(dtype) for n in counts]
        total = jnp.max(jnp.stack(counts))

        def scale(coefficient, loss, count):
            ratio = 1.0 if len(terms) == 1 else total / count
            if loss.weights is None:
                squared = jnp.asarray(coefficient * ratio)
            else:
                squared = coefficient * ratio * loss.term_weights[..., None]
            return lambda ct: ct * jnp.sqrt(squared).astype(ct.dtype)

        scales = [scale(c, loss, n) for (c, loss), n in zip(terms, counts)]
        return scales, total

    def _device_key(self, key: Key | None) -> Key | None:
        if key is not None:
            for axis in sorted(self.axes):  # Devices hold different examples.
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return key

    def _l2_diagonal(self) -> Model:
        """The diagonal of the curvature of all `L2` terms, shaped like the model."""

        def parameters(objective):
            return [o.parameters for _, o in objective.terms if isinstance(o, L2)]

        diagonals = [o.diagonal(c) for c, o in self.objective.terms if isinstance(o, L2)]
        if not diagonals:
            return jtu.tree_map(lambda _: None, self.model)
        cotangent = eqx.tree_at(parameters, _zeros_like(self.curved), diagonals)
        (diagonal,) = self.collect(cotangent)
        return diagonal


def linearise(
    loss_fn: Callable, model: Model, args: tuple, kwargs: dict[str, Any]
) -> Linearisation:
    """Runs `loss_fn` once, at a model whose tags are ready to collect."""

    def run(model):
        with naming_layers(model):
            # Copies: an `eqx.nn.State` may be used once only.
            args_, kwargs_ = jtu.tree_map(lambda x: x, (args, kwargs))
            out = loss_fn(model, *args_, **kwargs_)
        objective, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        return _check_objective(objective), aux

    check_tagged(model)
    filled = fill_tags(model)
    objective, pullback, aux = eqx.filter_vjp(run, filled, has_aux=True)
    axes = varying_axes(objective) - varying_axes(model)
    weights = _example_weights(objective.losses)
    if weights is None and len(objective.curved) == len(objective.terms):
        return Linearisation(objective, aux, filled, pullback, objective, pullback, axes)
    # The moments of a layer's inputs have to know the weights, which only the loss knew,
    # and nothing of what only penalties see. What the two runs share, XLA computes once.
    if weights is not None:
        weights = jax.lax.stop_gradient(weights)
        weights = cast_varying(weights, varying_axes(model))
    refilled = fill_tags(model, weights)
    curved, collect = eqx.filter_vjp(lambda model: Sum(run(model)[0].curved), refilled)
    return Linearisation(objective, aux, filled, pullback, curved, collect, axes)


def value_grad_and_curvature(
    loss_fn: Callable, fisher: AbstractFisher = MonteCarlo(), has_aux: bool = False
) -> Callable:
    r"""The loss, its gradient and its curvature, from one forward pass.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss (such as
        `kfac.SoftmaxCrossEntropy`) or a sum of losses and scalars, or `(loss, aux)`.
    - `fisher`: which Fisher estimate; see [`eqx_kfac.MonteCarlo`][].
    - `has_aux`: whether `loss_fn` returns `(loss, aux)`.

    **Returns:**

    A function `(model, *args, key=None, **kwargs) -> (value, grads, curvature)`, or
    `((value, aux), grads, curvature)`. `grads` is shaped like the model. `curvature` is
    too, with every tagged layer replaced by its factors (see [`eqx_kfac.curvature`][]).
    `key` is for the Fisher estimate; it is not handed to `loss_fn`.

    **Raises:** `TypeError` if `loss_fn` returns something else than a loss; `ValueError`
    if the Fisher estimate needs a `key` and gets none.

    !!! Example

        ```python
        value_and_all = kfac.value_grad_and_curvature(loss_fn)
        loss, grads, curvature = value_and_all(model, x, y, key=key)
        ```
    """

    def wrapped(model, *args, key=None, **kwargs):
        linearisation = linearise(loss_fn, model, args, kwargs)
        value = linearisation.value()
        value = (value, linearisation.aux) if has_aux else value
        return value, linearisation.grads(), linearisation.curvature(fisher, key)

    return wrapped


def curvature(loss_fn: Callable, fisher: AbstractFisher = MonteCarlo()) -> Callable:
    r"""The curvature of a loss, layer by layer, without an optimizer.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss, a sum of
        losses, or `(loss, aux)`. Targets may be left out of the loss.
    - `fisher`: which Fisher estimate; see [`eqx_kfac.MonteCarlo`][].

    **Returns:**

    A function `(model, *args, key=None, **kwargs) -> curvature`. `curvature` is shaped
    like the model, with every tagged layer replaced by its factors and every other leaf
    by `None`: for a [`eqx_kfac.Kronecker`][] block, `.input_factor`
    `[*stack, d_in(+1), d_in(+1)]` and `.output_factor` `[*stack, d_out, d_out]`, whose
    Kronecker product $G \otimes A$ approximates the curvature of the *mean* loss.

    **Raises:** as [`eqx_kfac.value_grad_and_curvature`][].

    !!! Example

        ```python
        factors = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
        factors.layers[0].input_factor
        ```
    """

    def wrapped(model, *args, key=None, **kwargs):
        return linearise(loss_fn, model, args, kwargs).curvature(fisher, key)

    return wrapped


def _check_objective(objective: Any) -> Sum:
    if not isinstance(objective, AbstractObjective):
        got = type(objective).__name__
        if isinstance(objective, jax.Array):
            got = f"an array of type {objective.dtype} and shape {objective.shape}"
        raise TypeError(
            "`loss_fn` must return a loss that knows its predictive distribution, such "
            "as `kfac.SoftmaxCrossEntropy(logits, targets)`, `kfac.SigmoidCrossEntropy` "
            "or `kfac.SquaredError` (or `(loss, aux)`), but returned "
            f"{got}. A bare number has no curvature to collect; add penalties to the "
            "loss object instead: `loss + penalty`."
        )
    objective = objective + 0
    if not objective.losses:
        raise ValueError(
            "`loss_fn` returned only penalties, which have no curvature to collect. Add "
            "them to a loss such as `kfac.SoftmaxCrossEntropy`."
        )
    return objective


def _value(objective: Sum, axes: frozenset) -> Float[Array, ""]:
    def value(term):
        if isinstance(term, AbstractLoss):
            total = _psum(term.total, axes)
            return total / _psum(term.count, axes).astype(total.dtype)
        value, split = term.value, varying_axes(term) & axes
        return jax.lax.pmean(value, tuple(sorted(split))) if split else value

    coefficients = [c for c, _ in objective.terms]
    return linear_combination(coefficients, [value(o) for _, o in objective.terms])


def _psum(x: Array, axes: frozenset) -> Array:
    """The sum over devices; a count of examples is the same on all of them, but is one
    per device nevertheless."""
    if not axes:
        return x
    return jax.lax.psum(cast_varying(x, axes), tuple(sorted(axes)))


def _example_weights(losses: list[AbstractLoss]) -> Array | None:
    """The weights of examples for the input moments of the layers, on the first axes that
    all weights of the losses have in common. A layer cannot tell which loss it serves: of
    several losses over the same examples, the mean of the weights is taken."""
    shapes = [loss.weights.shape for loss in losses if loss.weights is not None]
    if not shapes:
        return None
    shared = common_prefix(*shapes)
    if not shared:
        raise ValueError(
            "Several losses of a sum have weights, over different examples: the weights "
            f"have shapes {shapes}. Only one batch of examples can be weighted; give the "
            "weights of the others as fewer examples, or as a coefficient."
        )
    axes = len(shared)
    means = [
        jnp.mean(loss.term_weights, axis=tuple(range(axes, len(loss.leading))))
        for loss in losses
        if loss.leading[:axes] == shared
    ]
    dtype = accumulator(*[w.dtype for w in means])
    return jnp.mean(jnp.stack([w.astype(dtype) for w in means]), axis=0)


def _mean_over_layer(layer: Any, diagonal: Any) -> Float[Array, "*stack"]:
    """The mean over each layer's parameters of a diagonal; zero where there is none."""
    form = layer.tag.form
    stack, _, _ = form.sizes(layer)
    if not jtu.tree_leaves(diagonal):
        return jnp.zeros(stack)
    matrix = form.to_matrix(diagonal)
    return jnp.mean(matrix, axis=tuple(range(len(stack), matrix.ndim)))


def _zeros_like(objective: Sum) -> Sum:
    return jtu.tree_map(jnp.zeros_like, eqx.filter(objective, eqx.is_inexact_array))


def _is_statistics(node: Any) -> bool:
    return isinstance(node, Statistics)


def _outputs(statistics: Model) -> Model:
    return jtu.tree_map(lambda s: s.outputs, statistics, is_leaf=_is_statistics)


def _map_layers(fn: Callable, model: Model, *rest: Any) -> Model:
    """Maps over the tagged layers; every other leaf becomes `None`."""
    return map_tagged(fn, model, *rest, others=lambda *_: None)
