"""The average of the curvature: what is in it, and in which bases. Pure functions over
trees that are shaped like the model."""

import itertools

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._block import AbstractBasisBlock, AbstractFactors, no_l2
from .._custom_types import Model
from .._devices import Devices, over_stack, placed_like
from .._inner_products import all_finite
from .._jobs import done, Job
from .._misc import difference, tree_where
from .._operator import packed_like, unpacked
from .._solver import AbstractDampedSolver, Eigh
from .._tag import blank, is_trainable, map_at_once, map_tags, tagged_layers


def init_curvature(model: Model) -> Model:
    """The factors of every tagged layer before anything has passed through it."""

    def factors(tag, layer):
        if not is_trainable(tag, layer):
            return None
        slots = tag.block.slots(tag.form, layer)
        return tag.block.factors(slots, jnp.ones(()), no_l2(tag.form, layer))

    return map_tags(factors, model)


def factors(
    model: Model,
    statistics: Model,
    count: Float[Array, ""],
    l2: Model,
    curvature: Model | None,
) -> Model:
    """The factors of every tagged layer, in a tree shaped like the model. The statistics
    were taken in the bases of `curvature`."""

    def layer_factors(tag, layer, statistics, l2, old):
        if not is_trainable(tag, layer):
            return None
        new = tag.block.factors(statistics, count, l2)
        if old is None or not isinstance(tag.block, AbstractBasisBlock):
            return new
        return tag.block.in_basis(new, tag.block.basis(old))

    if curvature is None:
        curvature = blank(model)
    return map_tags(layer_factors, model, statistics, l2, curvature)


def average(
    curvature: Model,
    weight: Float[Array, ""],
    new: Model,
    ema: Float[Array, ""],
    take: Bool[Array, ""],
) -> tuple[Model, Float[Array, ""]]:
    r"""One step of an exponential moving average that is never biased towards its start:
    $w \leftarrow \rho w + 1$, $V \leftarrow V + (X - V) / w$; none if not to `take`."""
    new_weight = ema * weight + 1
    new = packed_like(new, curvature)

    def blend(old, new):
        return old + (new - old) / new_weight.astype(old.dtype)

    blended = jtu.tree_map(blend, curvature, new)
    return tree_where(take, (blended, new_weight), (curvature, weight))


def is_finite(curvature: Model) -> Bool[Array, ""]:
    """Whether curvature that was collected (not made up) is finite."""
    layers = jtu.tree_leaves(curvature, is_leaf=_is_factors)
    bounds = [over_stack(type(f).bounds, f.l2.ndim)(f) for f in layers if _is_factors(f)]
    return all_finite(bounds)


def each_known(curvature: Model) -> Model:
    """Whether each layer (each of a stack) has any curvature, in a tree shaped like the
    model."""

    def is_known(factors):
        axes = factors.l2.ndim
        return ~(over_stack(type(factors).is_zero, axes)(factors) & (factors.l2 == 0))

    return jtu.tree_map(is_known, curvature, is_leaf=_is_factors)


def known_layers(curvature: Model) -> Bool[Array, " layers"]:
    """Whether each layer (each of a stack) has any curvature, all in one row."""
    flags = [flag.reshape(-1) for flag in jtu.tree_leaves(each_known(curvature))]
    return jnp.concatenate(flags) if flags else jnp.zeros((0,), bool)


def for_layers(row: Bool[Array, " layers"], curvature: Model) -> Model:
    """What a row like that of `known_layers` has of each layer (of each of a stack), in
    a tree shaped like the model."""
    layers, treedef = jtu.tree_flatten(curvature, is_leaf=_is_factors)
    ends = itertools.accumulate(f.l2.size for f in layers)
    own = [
        placed_like(row[end - f.l2.size : end].reshape(f.l2.shape), f.l2)
        for f, end in zip(layers, ends, strict=True)
    ]
    return treedef.unflatten(own)


def unseen(grads: Model, without: Model) -> Bool[Array, ""]:
    """Whether any layer (of those `without` curvature) has a gradient."""

    def is_missed(tag, layer, zero):
        if zero is None:
            return None
        return zero & jnp.any(tag.to_matrix(layer) != 0, axis=(-2, -1))

    flags = jtu.tree_leaves(map_tags(is_missed, grads, without))
    return jnp.any(jnp.concatenate([f.reshape(-1) for f in flags]))


def _is_factors(node: object) -> bool:
    return isinstance(node, AbstractFactors)


def has_bases(model: Model) -> bool:
    """Whether the statistics of any block are taken in a basis of its factors."""
    blocks = [tag.block for _, tag, _ in tagged_layers(model)]
    return any(isinstance(block, AbstractBasisBlock) for block in blocks)


def in_new_bases(
    curvature: Model, model: Model, solver: AbstractDampedSolver = Eigh()
) -> Model:
    """The curvature in the bases that now are its own. That of most blocks stays what it
    is."""

    def job(tag, _, factors):
        if factors is None or not isinstance(tag.block, AbstractBasisBlock):
            return None

        def rebased(factors):
            return tag.block.rebased(factors, solver.eigenbasis)

        stack = factors.l2.ndim
        return Job(tag.block, rebased, (unpacked(factors),), stack, solver.together)

    devices = Devices.of(curvature, model)
    new = map_at_once(lambda jobs: done(jobs, devices), job, model, curvature)

    def layer_factors(_, __, new, old):
        return old if new is None else packed_like(new, old)

    return map_tags(layer_factors, model, new, curvature)


def try_in_new_bases(
    curvature: Model, model: Model, solver: AbstractDampedSolver
) -> tuple[Model, Bool[Array, ""]]:
    """The curvature `in_new_bases`, or, if that is not finite, as it was; and whether it
    is finite."""
    new = in_new_bases(curvature, model, solver)
    finite = all_finite(new)
    return tree_where(finite, new, curvature), finite


def include(
    curvature: Model,
    weight: Float[Array, ""],
    model: Model,
    new: Model,
    ema: Float[Array, ""],
    take: Bool[Array, ""] | bool = True,
) -> tuple[Model, Float[Array, ""], Bool[Array, ""]]:
    """The average with an estimate from elsewhere, which is taken if it is finite and
    `take` says so; and whether it was taken."""
    _check_curvature(new, model)
    new = _in_bases_of(curvature, model, new, weight == 0)
    take = take & all_finite(new)
    return *average(curvature, weight, new, ema, take), take


def _check_curvature(curvature: Model, model: Model) -> None:
    """Raises unless curvature is that of exactly the parameters of a model."""
    trees = (unpacked, curvature), (init_curvature, model)
    wrong = difference(*(eqx.filter_eval_shape(*tree) for tree in trees))
    if wrong is not None:
        path, have, want = wrong
        raise ValueError(
            f"The curvature does not belong to these parameters: its `{path}` is {have}, "
            f"but should be {want}. Estimate it for the same part of the model that "
            "`init` got: `kfac.value_grad_and_curvature(loss_fn)(trained, ...)`."
        )


def _in_bases_of(
    curvature: Model, model: Model, new: Model, first: Bool[Array, ""]
) -> Model:
    """`new`, in the bases of `curvature` unless it is the `first` one."""

    def layer_factors(tag, _, old, new):
        if old is None or not isinstance(tag.block, AbstractBasisBlock):
            return new

        def changed(old, new):
            return tag.block.change_basis(new, tag.block.basis(old))

        return tree_where(first, new, over_stack(changed, old.l2.ndim)(old, new))

    return map_tags(layer_factors, model, curvature, new)
