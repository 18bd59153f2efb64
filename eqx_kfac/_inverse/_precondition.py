"""Preconditioning the gradients of tagged layers: pure functions over trees that are
shaped like the model."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._custom_types import Model, PerLayer
from .._devices import Devices
from .._jobs import done, Job, products
from .._operator import has_sharded, MaskedOperator, unpacked
from .._solver import AbstractDampedSolver
from .._tag import blank, map_at_once, Tag, update_layers
from ..form import has_bias
from ._factorise import damping_of, for_each


def precondition(
    grads: Model,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
    still: Model | None = None,
) -> Model:
    r"""$\hat F^{-1} \nabla h$ for the tagged layers, or zero for those that are to be
    left `still` where they are; other leaves stay what they are."""
    factorised = curvature, inverse, solver, damping, still
    return with_matrices(grads, solutions(grads, *factorised))


def solutions(
    grads: Model,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
    still: Model | None = None,
) -> Model:
    r"""The canonical matrix of $\hat F^{-1} \nabla h$ for every layer with factors. If
    the state is split over devices, each of them does a part of the layers."""

    def job(tag, layer, factors, state, damping, still):
        if factors is None:
            return None

        bias = has_bias(tag.form, layer)

        def solve(matrix, factors, state, damping, still):
            # What `lx.linear_solve` computes, without its derivatives, which nothing here
            # needs, and without its checks, which do not know explicit meshes.
            operator, state, options = solvable(
                tag, factors, state, solver, damping, bias
            )
            # Reshaped by way of a vector: explicit meshes know no other way.
            vector = matrix.reshape(-1).reshape(operator.in_structure().shape)
            solution, _, _ = solver.compute(state, vector, options)
            return moving(solution.reshape(-1).reshape(matrix.shape), still)

        matrix = tag.to_matrix(layer).astype(factors.l2.dtype)
        args = matrix, *unpacked((factors, state)), damping_of(factors, damping), still
        key = tag.block if tag.form.mask is None else (tag.block, tag.form.mask, bias)
        return Job(key, solve, args, factors.l2.ndim)

    def do(jobs):
        if has_sharded((curvature, inverse)):
            return done(jobs, Devices.of(curvature, grads))
        return products(jobs)

    still = blank(grads) if still is None else still
    each = curvature, inverse, for_each(damping, grads, curvature), still
    return map_at_once(do, job, grads, *each)


def moving(solution: Array, still: Bool[Array, ""] | None) -> Array:
    """A layer's solution, or zero if it is to be left where it is."""
    return solution if still is None else jnp.where(still, 0, solution)


def with_matrices(tree: Model, matrices: Model) -> Model:
    """A model-shaped tree with its layers' parameters taken from canonical matrices,
    where there are any."""

    def layer_with_matrix(tag, layer, new, matrix):
        return new if matrix is None else tag.from_matrix(matrix, new)

    return update_layers(layer_with_matrix, tree, matrices)


def solvable(
    tag: Tag,
    factors: Any,
    state: Any,
    solver: AbstractDampedSolver,
    damping: Array,
    bias: bool = False,
) -> tuple[Any, Any, dict[str, Any]]:
    """The operator of one layer, which may have a `bias` beside weights, and the solver's
    state and options for it."""
    options = {"damping": damping}
    factors, state = unpacked((factors, state))
    operator = tag.operator(factors)
    if state is None:
        state = solver.init(operator, options)
    elif isinstance(operator, MaskedOperator):
        state = solver.masked(operator, state, damping, bias)
    return operator, state, options
