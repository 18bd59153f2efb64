"""The factorisations of all layers: which factors are decomposed together."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._block import AbstractFactors
from .._checks import is_number, is_scalar
from .._custom_types import Model, PerLayer
from .._devices import Devices, over_stack
from .._jobs import done, Job
from .._misc import all_finite, tree_where
from .._operator import packed_like, unpacked
from .._solver import AbstractDampedSolver, is_factorised, Pair
from .._tag import blank, flatten_tags, map_tags
from ..form import has_bias


def damping_of(factors: AbstractFactors, damping: PerLayer) -> Array:
    """An L2 term is damping that the objective itself asks for."""
    return jnp.asarray(damping, factors.l2.dtype) + factors.l2


def for_each(damping: PerLayer, model: Model, curvature: Model) -> Model:
    """A number for every layer (for each of a stack): one for all, unless there are
    several already."""
    if not (is_number(damping) or is_scalar(damping)):
        return damping

    def of_layer(tag, layer, factors):
        if factors is None:
            return None
        return jnp.asarray(damping, factors.l2.dtype) + jnp.zeros_like(factors.l2)

    return map_tags(of_layer, model, curvature)


def factorise(
    curvature: Model,
    model: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
    previous: Model | None = None,
) -> Model:
    """The solver's state for every layer; `None` where the operator is factorised as it
    is. Solvers that iterate start at the `previous` one. `damping`: a number, or a tree
    with one for every layer."""

    def prepare(tag, layer, factors, before, damping):
        if factors is None:
            return None, None, 0

        def prepare(factors, damping):
            operator = tag.block.operator(factors)
            if is_factorised(operator):
                return None
            return solver.prepare(operator, damping, has_bias(tag.form, layer))

        stack = factors.l2.ndim
        damped = factors, damping_of(factors, damping)
        return over_stack(prepare, stack)(*damped), before, stack

    previous = blank(model) if previous is None else previous
    trees = curvature, previous, for_each(damping, model, curvature)
    found, treedef = flatten_tags(prepare, model, *trees)
    jobs = []
    for _, (prepared, before, stack) in found:
        if isinstance(prepared, Pair):
            halves = (None, None) if before is None else solver.split(before)
            jobs += [
                Job(None, solver.decompose, both, stack, solver.together)
                for both in zip(prepared, halves, strict=True)
            ]
    pieces = iter(done(jobs, Devices.of(trees, model)))

    def state(prepared):
        if isinstance(prepared, Pair):
            return solver.join(next(pieces), next(pieces))
        return prepared

    return treedef.unflatten([state(prepared) for _, (prepared, *_) in found])


def refactorise(
    inverse: Model,
    curvature: Model,
    model: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
) -> tuple[Model, Bool[Array, ""]]:
    """The factorisation of `curvature`, and whether it is finite; if it is not, the
    previous one."""
    curvature, previous = unpacked((curvature, inverse))
    new = factorise(curvature, model, solver, damping, previous)

    def bounds(tag, layer, factors, state):
        if not isinstance(state, solver.state_type):
            return state
        return over_stack(solver.bounds, factors.l2.ndim)(state)

    finite = all_finite(map_tags(bounds, model, curvature, new))
    return tree_where(finite, packed_like(new, inverse), inverse), finite
