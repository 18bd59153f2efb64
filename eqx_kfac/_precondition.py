"""What every K-FAC optimizer does to the tagged layers of a model: average their
curvature, precondition gradients with it. (`_factorise.py` factorises it.) Pure functions
over trees that are shaped like the model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float

from ._block import AbstractFactors, no_l2
from ._custom_types import Model
from ._devices import decomposed_over_stack, over_stack
from ._factorise import damping_of, for_each
from ._misc import all_finite, difference, names, parameters_of, tree_where
from ._operator import packed_like, unpacked
from ._solver import AbstractDampedSolver, Eigh
from ._tag import is_trainable, Tag
from ._tagged import check_tagged, map_tags, tagged_layers, update_layers


def partition_tagged(model: Model) -> tuple[Model, Model]:
    """Splits a model (or gradients of it) into the parameters that tags cover and the
    others. `eqx.combine` joins them again."""

    covered = object()

    def mark(tag, layer, new):
        parameters = tag.form.parameters(layer)
        marks = tuple(None if p is None else covered for p in parameters)
        return tag.form.replace(new, marks)

    mask = jtu.tree_map(lambda leaf: leaf is covered, update_layers(mark, model))
    tagged, rest = eqx.partition(model, mask)
    return tagged, parameters_of(rest)


def check_covered(model: Model, fallback: Any) -> None:
    """Raises if there are parameters that neither a tag nor a fallback looks after."""
    check_tagged(model)
    _, rest = partition_tagged(model)
    leaves, _ = jtu.tree_flatten_with_path(rest)
    if leaves and fallback is None:
        paths = [jtu.keystr(path) for path, _ in leaves]
        raise ValueError(
            f"No tagged layer covers the parameters {names(paths)}. Either convert their "
            "layers (`kfac.convert(model)`, or write them with `kfac.Linear` and the "
            "like; a raw array as a `kfac.Parameter`), or freeze them (`eqx.partition` "
            "them out of the model that is trained), or pass `fallback=` with any optax "
            "transformation for them, such as `fallback=optax.adam(1e-3)`."
        )


def init_curvature(model: Model) -> Model:
    """The factors of every tagged layer before anything has passed through it."""

    def factors(tag, layer):
        if not is_trainable(tag, layer):
            return None
        slots = tag.block.slots(tag.form, layer)
        return tag.block.factors(slots, jnp.ones(()), no_l2(tag.form, layer))

    return map_tags(factors, model)


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
    is_factors = lambda node: isinstance(node, AbstractFactors)
    layers = jtu.tree_leaves(curvature, is_leaf=is_factors)
    bounds = [over_stack(type(f).bounds, f.l2.ndim)(f) for f in layers if is_factors(f)]
    return all_finite(bounds)


def unseen(grads: Model, curvature: Model) -> Bool[Array, ""]:
    """Whether any layer, or one of a stack, has a gradient but no curvature at all."""

    def is_zero(tag, _, factors):
        if factors is None:
            return None
        axes = factors.l2.ndim
        return over_stack(type(factors).is_zero, axes)(factors) & (factors.l2 == 0)

    def is_missed(tag, layer, zero):
        if zero is None:
            return None
        return zero & jnp.any(tag.form.to_matrix(layer) != 0, axis=(-2, -1))

    def any_of(flags):
        return jnp.any(jnp.concatenate([f.reshape(-1) for f in jtu.tree_leaves(flags)]))

    zeros = map_tags(is_zero, grads, curvature)
    missed = lambda: any_of(map_tags(is_missed, grads, zeros))
    # Gradients are only looked at where there is any reason to.
    return jax.lax.cond(any_of(zeros), missed, lambda: any_of(zeros))


def has_bases(model: Model) -> bool:
    """Whether the statistics of any block are taken in a basis of its factors."""
    return any(tag.block.has_basis for _, tag, _ in tagged_layers(model))


def refresh(
    curvature: Model, model: Model, solver: AbstractDampedSolver = Eigh()
) -> Model:
    """The curvature in the bases that now are its own. That of most blocks stays what it
    is."""

    def layer_factors(tag, _, factors):
        if factors is None or not tag.block.has_basis:
            return factors

        def refreshed(factors):
            new = tag.block.refreshed(unpacked(factors), solver.eigenbasis)
            return packed_like(new, factors)

        return decomposed_over_stack(refreshed, factors.l2.ndim)(factors)

    return map_tags(layer_factors, model, curvature)


def refreshed(
    curvature: Model, model: Model, solver: AbstractDampedSolver
) -> tuple[Model, Bool[Array, ""]]:
    """As `refresh`, and whether it is finite; what was there, if it is not."""
    new = refresh(curvature, model, solver)
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
    """As `average`, with an estimate from elsewhere, if that is finite and to `take`; and
    whether it was taken."""
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
        if old is None or not tag.block.has_basis:
            return new

        def expressed(old, new):
            return tag.block.expressed(new, tag.block.basis(old))

        return tree_where(first, new, over_stack(expressed, old.l2.ndim)(old, new))

    return map_tags(layer_factors, model, curvature, new)


def precondition(
    grads: Model,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: Any,
) -> Model:
    r"""$\hat F^{-1} \nabla h$ for the tagged layers; other leaves stay what they are."""
    return with_matrices(grads, solutions(grads, curvature, inverse, solver, damping))


def solutions(
    grads: Model,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: Any,
) -> Model:
    r"""The canonical matrix of $\hat F^{-1} \nabla h$ for every layer with factors."""

    def layer_solution(tag, layer, factors, state, damping):
        if factors is None:
            return None

        def solve(matrix, factors, state, damping):
            # What `lx.linear_solve` computes, without its derivatives, which nothing here
            # needs, and without its checks, which do not know explicit meshes.
            operator, state, options = solvable(tag, factors, state, solver, damping)
            # Reshaped by way of a vector: explicit meshes know no other way.
            vector = matrix.reshape(-1).reshape(operator.in_structure().shape)
            solution, _, _ = solver.compute(state, vector, options)
            return solution.reshape(-1).reshape(matrix.shape)

        matrix = tag.form.to_matrix(layer).astype(factors.l2.dtype)
        each = matrix, factors, state, damping_of(factors, damping)
        return over_stack(solve, factors.l2.ndim)(*each)

    each = curvature, inverse, for_each(damping, grads, curvature)
    return map_tags(layer_solution, grads, *each)


def with_matrices(tree: Model, matrices: Model) -> Model:
    """A model-shaped tree with its layers' parameters taken from canonical matrices,
    where there are any."""

    def layer_with_matrix(tag, layer, new, matrix):
        return new if matrix is None else tag.form.from_matrix(matrix, new)

    return update_layers(layer_with_matrix, tree, matrices)


def solvable(
    tag: Tag, factors: Any, state: Any, solver: AbstractDampedSolver, damping: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """The operator of one layer, and the solver's state and options for it."""
    options = {"damping": damping}
    factors, state = unpacked((factors, state))
    operator = tag.block.operator(factors)
    return operator, solver.init(operator, options) if state is None else state, options


def init_fallback(model: Model, fallback: optax.GradientTransformation | None) -> Any:
    """The fallback's state for the parameters that no tag covers."""
    _, rest = partition_tagged(model)
    return None if fallback is None else fallback.init(rest)


def update_fallback(grads: Model, state: Any, model: Model, fallback: Any) -> Any:
    """The fallback's updates (`None` at covered leaves) and its new state."""
    _, grads = partition_tagged(grads)
    if fallback is None:
        return grads, state
    _, params = partition_tagged(model)
    return fallback.update(grads, state, params)
