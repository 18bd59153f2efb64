"""One forward pass, pulled back (to gradients, to statistics) and pushed forward."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Int, PyTree

from .._block import AbstractCentredBlock, is_statistics, no_l2, Statistics
from .._custom_types import Args, Key, Kwargs, Layer, Model
from .._devices import cast_varying, placed_like, sum_over, varying_axes
from .._fisher import AbstractFisher
from .._inner_products import symmetric, tree_dot
from .._loss import AbstractLoss, is_negative, L2, linear_combination, Sum
from .._misc import accumulator
from .._module import PlainModule
from .._program import (
    analyse,
    contains,
    depends,
    example_weights,
    Program,
    run,
    with_labels,
)
from .._tag import fill_tags, is_trainable, map_tags, only_rows, Tag, trained_layers
from ._channels import channels_last
from ._once import with_sums_once


class BatchPart(PlainModule):
    r"""Which part of a batch is looked at: the whole, or a micro-batch. Everything that a
    [`Linearisation`][] returns is the summand of that part in a sum over all parts."""

    # N_i, how many terms loss i has in the whole batch.
    counts: list[Float[Array, ""]]
    # One over the number of parts: each adds so much of what is not a mean over examples.
    fraction: float = eqx.field(static=True)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.fraction == 1.0

    @property
    def count(self) -> Float[Array, ""]:
        """$N$, what the statistics of all losses are divided by: the number of terms of
        the loss with most of them. (Any number would do, for the other losses are scaled
        to it.)"""
        dtype = accumulator(*[n.dtype for n in self.counts])
        return jnp.max(jnp.stack([n.astype(dtype) for n in self.counts]))


class Kind(NamedTuple):
    """What is known of an objective while it is traced."""

    # Whether the curvature is that of losses without targets, beside the scalars that are
    # minimised.
    is_surrogate: bool = False
    # Whether the objective has terms with a gradient, but no curvature.
    is_penalised: bool = False
    # Whether the Fisher is the Gauss-Newton matrix, because the outputs of all losses are
    # natural parameters.
    is_natural: bool = False
    # How many squared errors an example's loss is the sum of, in the unit of its targets;
    # 0 if the objective has any other kind of term.
    squares: int = 0
    # The number of terms of the loss that has most of them.
    terms: int | None = None


class Linearisation(PlainModule):
    """A loss function linearised at a model, to be pulled back and pushed forward."""

    objective: Sum
    aux: Any
    model: Model  # With filled tags.
    pushforward: Callable  # From tangents of the model to those of the objective.
    pullback: Callable  # From cotangents of the objective to those of the model.
    # The terms of the objective that have curvature (losses and `L2`), from a run in
    # which the tags know the weights of the examples; and the pullback of that run, from
    # which statistics are collected: `collect(cotangent, part)`, where `part(curved)`
    # are the outputs that the cotangent belongs to.
    curved: Sum
    collect: Callable
    share: BatchPart
    axes: frozenset = eqx.field(static=True)  # Of `shard_map`; they split the examples.

    def value(self) -> Float[Array, ""]:
        """The objective, as a mean over the examples of all devices."""
        return _value(self.objective, self.share, self.axes)

    @property
    def kind(self) -> Kind:
        """The objective's kind, with the terms on all devices."""
        objective = self.objective
        devices = math.prod(jax.lax.axis_size(axis) for axis in self.axes)
        return Kind(
            objective.is_surrogate,
            objective.is_penalised,
            objective.is_natural,
            objective.squares,
            devices * max(math.prod(o.leading) for o in objective.losses),
        )

    def gradient(self) -> Model:
        """The gradient of `value`, shaped like the model; its tags hold rows, if any were
        asked for, and no statistics."""
        cotangent = eqx.filter_grad(_value)(self.objective, self.share, self.axes)
        return self.pullback(cotangent, wanted=only_rows(self.model))

    def statistics(self, fisher: AbstractFisher, key: Key | None) -> Model:
        """The statistics of every tagged layer, summed over all cotangents of the
        Fisher."""
        pulled, number = self.pulled(fisher, key)

        def pull(index):
            back = pulled(index)
            statistics = map_tags(_statistics, back)
            return self._centred(statistics, back) if fisher.centred else statistics

        statistics = pull(0)
        if number == 1:
            return statistics

        # What depends on inputs alone is the same in every pullback; the rest adds up.
        # There is one exception: a row whose own term has weight zero, but which
        # influences others, counts if its gradient is not zero. This is asked of a single
        # cotangent of which every output has a part: the probe.
        probe = self._probe(fisher)
        inputs = statistics if probe is None else map_tags(_statistics, probe)
        zeros = _outputs(map_tags(_statistics, self.model))  # The slots, still empty.
        outputs = _sum(lambda i: _outputs(pull(i)), number, fisher.batch_size, zeros)
        return jtu.tree_map(
            lambda s, o: Statistics(s.inputs, o),
            inputs,
            outputs,
            is_leaf=is_statistics,
        )

    def _centred(self, statistics: Model, pulled: Model) -> Model:
        """Statistics less those of the mean of the examples' gradients. Their sum is in
        `pulled`, what came back from the cotangent beside the statistics."""
        if not self.share.is_whole:
            raise ValueError(
                "`kfac.Centred` takes the mean over the whole batch, of which a "
                "micro-batch only knows a part. Use `micro_batches=1`."
            )

        def layer_statistics(tag, layer, statistics):
            if not is_trainable(tag, layer):
                return statistics
            total = tag.to_matrix(layer)
            count = jnp.asarray(self.share.count, total.dtype)
            assert isinstance(tag.block, AbstractCentredBlock)  # Checked by `Centred`.
            return tag.block.minus_mean(statistics, total / count, count)

        return map_tags(layer_statistics, pulled, statistics)

    def pulled(self, fisher: AbstractFisher, key: Key | None) -> tuple[Callable, int]:
        """What comes back from the Fisher's cotangent `index`, shaped like the model, as
        a function of `index`; and how many of them there are."""
        fisher.check(self.model)
        scales, key = self._scales(), self._device_key(key)

        def pull(index):
            cotangents = fisher.cotangents(self.objective.losses, index, key)
            return self.pull(_scaled(scales, cotangents))

        return pull, fisher.number(self.objective.losses)

    def _probe(self, fisher: AbstractFisher) -> Model | None:
        """What comes back from a cotangent of which every output has a part; `None` if
        no loss has weights, or the Fisher's own cotangents are like that."""
        losses = self.objective.losses
        if all(loss.weights is None for loss in losses):
            return None
        probe = fisher.probe(losses)
        return None if probe is None else self.pull(_scaled(self._scales(), probe))

    def l2(self) -> Model:
        """The curvature of all `L2` terms: the mean of its diagonal over every layer."""

        def parameters(objective):
            return [o.parameters for _, o in objective.terms if isinstance(o, L2)]

        diagonals = [
            o.diagonal(c * self.share.fraction)
            for c, o in self.objective.terms
            if isinstance(o, L2)
        ]
        if not diagonals:
            return map_tags(lambda tag, layer: no_l2(tag.form, layer), self.model)
        # The parameters that a term has are entries of the model, so that a pullback puts
        # the diagonal where these entries are, and adds up several terms.
        return map_tags(_mean_over_layer, self.collect(diagonals, parameters))

    def gram(self, directions: Sequence[Model]) -> Float[Array, "n n"]:
        r"""$d_a^\top C d_b$ for all pairs of `directions`, with $C$ the Gauss-Newton
        matrix of the objective, its `L2` terms included. Each direction is pushed forward
        once."""
        tangents = [self._push(d).terms for d in directions]

        def inner(a, b):
            coefficients, products, counts = [], [], iter(self.share.counts)
            for (c, o), (_, u), (_, v) in zip(self.objective.terms, a, b, strict=True):
                if isinstance(o, AbstractLoss):
                    product = _weighted_dot(u.outputs, o.fisher_product(v.outputs), o)
                    products.append(sum_over(product, self.axes))
                    coefficients.append(c / next(counts))
                elif isinstance(o, L2):
                    products.append(tree_dot(u.parameters, v.parameters))
                    coefficients.append(c * o.coefficient * self.share.fraction)
            return linear_combination(coefficients, products)

        return symmetric(inner, tangents)

    @property
    def negative_weights(self) -> Int[Array, ""]:
        """How many terms of the losses have a weight below zero."""
        weights = [o.weights for o in self.objective.losses if o.weights is not None]
        found = [
            sum_over(jnp.sum(is_negative(w), dtype=jnp.int32), self.axes) for w in weights
        ]
        return sum(found, jnp.zeros((), jnp.int32))

    def surrogate_lengths(self, direction: Model) -> Float[Array, "3"]:
        r"""$d^\top F d$ with the Fisher of the losses without targets; the same with the
        Fisher of the losses that have targets; and the value of the latter."""
        lengths, values = {False: [], True: []}, []
        pairs = self.objective.weighted_losses, self._push(direction).losses
        zipped = zip(*pairs, self.share.counts, strict=True)
        for (c, loss), tangent, count in zipped:
            product = loss.fisher_product(tangent.outputs)
            length = _weighted_dot(tangent.outputs, product, loss)
            has_value = self.objective.has_value(loss)
            lengths[has_value].append((c / count, sum_over(length, self.axes)))
            if has_value:
                values.append((c / count, sum_over(loss.total, self.axes)))

        def total(pairs):
            return linear_combination(*zip(*pairs)).astype(float) if pairs else 0.0

        return jnp.stack([total(lengths[False]), total(lengths[True]), total(values)])

    def _push(self, direction: Model) -> Sum:
        """Pushes a direction (`None` where it is zero) forward to the objective."""
        zeros = jtu.tree_map(jnp.zeros_like, eqx.filter(self.model, eqx.is_inexact_array))
        tangent = eqx.combine(direction, zeros)
        return self.pushforward(
            jtu.tree_map(lambda t, z: t.astype(z.dtype), tangent, zeros)
        )

    def pull(self, cotangents: list[PyTree]) -> Model:
        """Pulls cotangents of all losses' outputs back to the model and its tags."""

        def outputs(objective):
            return jtu.tree_leaves([loss.outputs for loss in objective.losses])

        for loss, cotangent in zip(self.curved.losses, cotangents, strict=True):
            loss.check_cotangent(cotangent)
        placed = map(placed_like, jtu.tree_leaves(cotangents), outputs(self.curved))
        return self.collect(list(placed), outputs)

    def _scales(self) -> list[Callable]:
        r"""Multiplication by $\sqrt{c_i w N / N_i}$ for the cotangents of every loss $i$:
        squares of what is pulled back, divided by $N$, are then the curvature of
        $\sum_i c_i h_i$."""
        terms = self.objective.weighted_losses
        total = self.share.count

        def scale(coefficient, loss, count):
            ratio = 1.0 if len(terms) == 1 else total / count.astype(total.dtype)
            if loss.weights is None:
                squared = jnp.asarray(coefficient * ratio)
            else:
                squared = coefficient * ratio * loss.term_weights[..., None]
            return lambda ct: ct * jnp.sqrt(squared).astype(ct.dtype)

        counts = self.share.counts
        return [scale(c, loss, n) for (c, loss), n in zip(terms, counts, strict=True)]

    def _device_key(self, key: Key | None) -> Key | None:
        if key is not None:
            for axis in sorted(self.axes):  # Devices hold different examples.
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return key


def _scaled(scales: list[Callable], cotangents: list[PyTree]) -> list[PyTree]:
    return [jtu.tree_map(s, c) for s, c in zip(scales, cotangents, strict=True)]


def whole(objective: Sum, model: Model) -> BatchPart:
    """The whole batch, which several devices may have parts of."""
    axes = example_axes(objective, model)
    return BatchPart([sum_over(loss.count, axes) for loss in objective.losses], 1.0)


def example_axes(objective: Sum, model: Model) -> frozenset:
    """The `shard_map` axes that split the examples."""
    return varying_axes(objective) - varying_axes(model)


def evaluate(objective: Sum, model: Model, share: BatchPart) -> Float[Array, ""]:
    """The objective, as a mean over the examples of all devices."""
    return _value(objective, share, example_axes(objective, model))


def linearise(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    share: BatchPart | None = None,
    fill: Callable = fill_tags,
    program: Program | None = None,
    collects: bool = True,
) -> Linearisation:
    """Runs `loss_fn` once, at a model whose tags are ready to collect: `fill(model,
    weights)`. `program` is what is known of the loss function already. If nothing
    `collects`, only the loss, its gradient and products with directions are asked for."""
    program = analyse(loss_fn, model, args, kwargs) if program is None else program
    filled = with_labels(fill(model), program)
    objective, pushforward, pullback, aux = filter_linearize(
        lambda model: run(loss_fn, model, args, kwargs), filled, program.convolves
    )
    axes = example_axes(objective, model)
    if share is not None and not share.is_whole:
        _check_apart(objective)
        _check_constant_weights(pushforward, filled)
    share = whole(objective, model) if share is None else share
    weights = example_weights(objective.losses, trained_layers(model))
    curved, collect = objective, pullback
    if collects and (weights is not None or len(objective.curved) < len(objective.terms)):
        # Another run for the statistics: moments of a layer's inputs need the weights,
        # which are only known once the loss is there; and rows that only penalties see
        # must not be in them. XLA computes once what both runs share.
        if weights is not None:
            weights = jax.lax.stop_gradient(weights)
            weights = cast_varying(weights, varying_axes(model))
        curved, _, collect, _ = filter_linearize(
            lambda model: (Sum(run(loss_fn, model, args, kwargs)[0].curved), None),
            with_labels(fill(model, weights), program),
            program.convolves,
        )
    return Linearisation(
        objective, aux, filled, pushforward, pullback, curved, collect, share, axes
    )


def filter_linearize(
    fn: Callable, model: Model, convolves: bool | None = None
) -> tuple[Sum, Callable, Callable, Any]:
    """`fn(model) -> (out, aux)` as `(out, pushforward, pullback, aux)`. One jaxpr serves
    both directions. `convolves` says whether there are convolutions in it; with `None`,
    this is found out, and if there are any, the function is traced once more."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    rest = []

    def dynamic(params):
        out, aux = fn(eqx.combine(params, static))
        out, out_rest = eqx.partition(out, eqx.is_inexact_array)
        arrays, others = eqx.partition((out_rest, aux), eqx.is_array)
        rest[:] = [others]  # A traced function can only return arrays.
        return out, arrays

    run_once = channels_last(dynamic) if convolves else dynamic
    out, pushforward, arrays = jax.linearize(run_once, params, has_aux=True)
    out_rest, aux = eqx.combine(arrays, rest[0])
    if convolves is None:
        linear = jax.make_jaxpr(pushforward)(params).jaxpr
        if contains(linear, "conv_general_dilated"):
            return filter_linearize(fn, model, convolves=True)
    evaluated = channels_last if convolves else lambda fn: fn
    transposable = with_sums_once(pushforward, params)

    def pullback(cotangent, part=lambda out: out, wanted=params):
        """Pulls a cotangent of `part` of the output back to the `wanted` part of the
        model; what leads to the rest is not gone through at all."""
        wanted = eqx.filter(wanted, eqx.is_inexact_array)
        # Tangents of the other parameters are constants here, which a transpose does not
        # go through: any will do, and their own values are arrays that are there.
        pushed = lambda wanted: part(transposable(eqx.combine(wanted, params)))
        (transposed,) = evaluated(jax.linear_transpose(pushed, wanted))(cotangent)
        return transposed

    return eqx.combine(out, out_rest), evaluated(pushforward), pullback, aux


def _value(objective: Sum, share: BatchPart, axes: frozenset) -> Float[Array, ""]:
    counts = iter(share.counts)

    def value(term):
        if not isinstance(term, AbstractLoss):
            value, split = term.value * share.fraction, varying_axes(term) & axes
            return jax.lax.pmean(value, tuple(sorted(split))) if split else value
        count = next(counts)
        if not objective.has_value(term):
            return jnp.zeros((), jnp.float32)
        total = sum_over(term.total, axes)
        if share.is_whole:
            # Not a number from before: weights may depend on the model, so that the
            # count has a gradient, too.
            count = sum_over(term.count, axes)
        return total / count.astype(total.dtype)

    coefficients = [c for c, _ in objective.terms]
    return linear_combination(coefficients, [value(o) for _, o in objective.terms])


def _check_apart(objective: Sum) -> None:
    """Raises if the terms of a loss depend on each other."""
    for loss in objective.losses:
        if loss.joint:
            raise ValueError(
                f"The terms of `kfac.{type(loss).__name__}` depend on all examples of "
                "the batch, of which a micro-batch only knows a part. Use "
                "`micro_batches=1`."
            )


def _check_constant_weights(pushforward: Callable, model: Model) -> None:
    """Raises if weights depend on the model: with a part of the examples, the gradient of
    how much all of them count is not known."""

    def weights(params):
        # (The tangents of weights that are no floating numbers are empty.)
        return [loss.weights for loss in pushforward(params).losses]

    if depends(weights, eqx.filter(model, eqx.is_inexact_array)):
        raise ValueError(
            "The weights of a loss depend on the model, so their sum has a gradient too, "
            "of which a micro-batch only knows a part. Use `micro_batches=1`, or take "
            "them for constants: `weights=jax.lax.stop_gradient(weights)`."
        )


def _weighted_dot(u: PyTree, v: PyTree, loss: AbstractLoss) -> Float[Array, ""]:
    r"""$\sum_n w_n u_n^\top v_n$ over the terms of a loss."""
    if loss.weights is not None:
        w = loss.term_weights[..., None]
        v = jtu.tree_map(lambda a: a * w.astype(a.dtype), v)
    return tree_dot(u, v)


def _mean_over_layer(tag: Tag, diagonal: Any) -> Any:
    """The mean over each layer's parameters of a diagonal."""
    if not is_trainable(tag, diagonal):
        return None
    # Weights and bias as two matrices. Joined to one, they would be written down, while
    # XLA sums diagonals that it knows to be constant without that.
    *weights, bias = tag.form.parameters(diagonal)
    parts = (*weights, None), (*[None] * len(weights), bias)
    matrices = [
        tag.form.to_matrix(tag.form.only(diagonal, part))
        for part in parts
        if any(p is not None for p in part)
    ]
    size = sum(math.prod(m.shape[-2:]) for m in matrices)
    return sum(jnp.sum(m, axis=(-2, -1)) for m in matrices) / size


def _sum(fn: Callable, number: int, at_once: int, zeros: PyTree) -> PyTree:
    """`fn(0) + ... + fn(number - 1)`, by a loop over calls that are vmapped over
    `at_once` indices each."""
    at_once = min(at_once, number)
    steps = math.ceil(number / at_once)

    def masked(index):
        # The last step may have fewer to add.
        return jtu.tree_map(lambda a: jnp.where(index < number, a, 0), fn(index))

    def body(step, total):
        if at_once == 1:
            return jtu.tree_map(jnp.add, total, fn(step))
        one = fn if number % at_once == 0 else masked
        several = jax.vmap(one)(step * at_once + jnp.arange(at_once))
        return jtu.tree_map(lambda t, a: t + jnp.sum(a, axis=0), total, several)

    return jax.lax.fori_loop(0, steps, body, zeros)


def _statistics(tag: Tag, layer: Layer) -> Statistics:
    """The statistics of one layer, of the examples of all devices."""
    axes_of_layer = varying_axes(tag.form.parameters(layer))

    def total(a):
        return sum_over(a, varying_axes(a) - axes_of_layer)

    return jtu.tree_map(total, tag.statistics)


def _outputs(statistics: Model) -> Model:
    return jtu.tree_map(lambda s: s.outputs, statistics, is_leaf=is_statistics)
