r"""Preconditioning through the rows: of $\nabla = \sum g \bar x^\top$, it is

$$G^{-1} \nabla A^{-1} = \sum (G^{-1} g) (A^{-1} \bar x)^\top,$$

which is less work where there are fewer rows than features. Not every gradient is such a
sum: a penalty on the weights adds to it, a mask takes away from it. So the sum is
computed too (mostly, XLA finds it is the gradient's own product), and compared."""

import jax
import jax.numpy as jnp

from .._curvature import GradientRows
from .._custom_types import Model, PerLayer
from .._devices import gathered, over_stack
from .._solver import AbstractDampedSolver
from .._tag import blank, map_tags
from ..form import join
from ._factorise import damping_of, for_each
from ._precondition import moving, precondition, solutions, solvable, with_matrices


def precondition_through_rows(
    grads: Model,
    rows: GradientRows,
    curvature: Model,
    inverse: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
    still: Model | None = None,
) -> Model:
    """Preconditions the gradient through its rows where these are whole; a layer without
    rows is preconditioned as it is by `precondition`."""

    def layer_solution(tag, layer, rows, factors, state, damping, still):
        if rows is None:
            return None

        def solve(x, g, factors, state, damping, still):
            _, state, options = solvable(tag, factors, state, solver, damping)
            x, g = (a.reshape(-1, a.shape[-1]).astype(factors.l2.dtype) for a in (x, g))
            weight, bias = tag.form.parameters(layer)
            ones = None if bias is None else jnp.ones_like(x[:, :1])
            x = join(None if weight is None else x, ones)
            return moving(solver.compute_outer(state, g, x, options), still)

        x, g = (gathered(a, rows.stack) for a in (rows.x.vectors(), rows.g))
        damping = damping_of(factors, damping)
        return over_stack(solve, rows.stack)(x, g, factors, state, damping, still)

    def only(wanted):
        def layer_factors(_, __, factors, rows):
            return factors if wanted == (rows is not None) else None

        return map_tags(layer_factors, grads, curvature, rows.layers)

    own = for_each(damping, grads, curvature)
    each = rows.layers, curvature, inverse, own, blank(grads) if still is None else still
    matrices = jax.lax.cond(
        rows.whole,
        lambda: map_tags(layer_solution, grads, *each),
        lambda: solutions(grads, only(True), inverse, solver, damping, still),
    )
    natural = precondition(grads, only(False), inverse, solver, damping, still)
    return with_matrices(natural, matrices)
