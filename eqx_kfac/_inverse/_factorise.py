"""The factorisation of the curvature of all layers by a damped solver.

The *operator* of a layer is its curvature, made of the factors that its block keeps. For
most layers it is the Kronecker product of two factors, each of which the solver has to
decompose (by eigenvalues, or into a Cholesky factor). All of these decompositions are
jobs that are done at once, so that factors of equal shape are decomposed in one batch.
The *state* of the solver for a layer is all that it needs to solve with the damped
operator. The tree of the states of all layers is called the inverse.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._block import AbstractFactors
from .._checks import is_number, is_scalar
from .._custom_types import Model, PerLayer
from .._devices import Devices, over_stack
from .._inner_products import all_finite
from .._jobs import done, Job
from .._misc import tree_where
from .._operator import packed_like, unpacked
from .._solver import AbstractDampedSolver, is_factorised, Pair
from .._tag import blank, flatten_tags, map_tags
from ..form import has_bias


def damping_of(factors: AbstractFactors, damping: PerLayer) -> Array:
    """The damping of a layer, with the coefficient of its L2 term added: the Hessian of
    such a term is that multiple of the identity, as damping is."""
    return jnp.asarray(damping, factors.l2.dtype) + factors.l2


def for_each(damping: PerLayer, model: Model, curvature: Model) -> Model:
    """A model-shaped tree with the damping of every layer, or of each layer of a stack.
    A single number is repeated for all layers; a tree is returned as it is."""
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
    """The solver's state for every layer.

    - `damping`: a number, or a tree with one for every layer.
    - `previous`: earlier states, which are where a solver that iterates starts.

    The state is `None` for a layer without curvature, and for one whose operator can be
    inverted without being decomposed: a diagonal one, in a basis that is known.
    """

    def prepare(tag, layer, factors, previous_state, damping):
        if factors is None:
            return None, None, 0

        def of_one_layer(factors, damping):
            operator = tag.block.operator(factors)
            if is_factorised(operator):
                return None
            return solver.prepare(operator, damping, has_bias(tag.form, layer))

        stack = factors.l2.ndim
        args = factors, damping_of(factors, damping)
        return over_stack(of_one_layer, stack)(*args), previous_state, stack

    previous = blank(model) if previous is None else previous
    trees = curvature, previous, for_each(damping, model, curvature)
    layers, treedef = flatten_tags(prepare, model, *trees)
    # What is prepared for a layer is the `Pair` of factors that are to be decomposed, or
    # else its state.
    jobs = []
    for _, (prepared, previous_state, stack) in layers:
        if isinstance(prepared, Pair):
            starts = (None, None)
            if previous_state is not None:
                starts = solver.split(previous_state)
            # All jobs have the same function, so they need no key to tell them apart.
            jobs += [
                Job(None, solver.decompose, (factor, start), stack, solver.together)
                for factor, start in zip(prepared, starts, strict=True)
            ]
    decomposed = iter(done(jobs, Devices.of(trees, model)))

    def state(prepared):
        if isinstance(prepared, Pair):
            return solver.join(next(decomposed), next(decomposed))
        return prepared

    return treedef.unflatten([state(prepared) for _, (prepared, *_) in layers])


def refactorise(
    inverse: Model,
    curvature: Model,
    model: Model,
    solver: AbstractDampedSolver,
    damping: PerLayer,
) -> tuple[Model, Bool[Array, ""]]:
    """The solver's states for the new `curvature`, and whether they are finite. If any is
    not, the states in `inverse` are returned unchanged."""
    # The matrices of a state may be packed into half of the memory. Then the new ones are
    # packed in the end, like those in `inverse`.
    curvature, previous = unpacked((curvature, inverse))
    new = factorise(curvature, model, solver, damping, previous)

    def to_check(tag, layer, factors, state):
        if not isinstance(state, solver.state_type):
            return state
        # Some solvers know a part of a state that is finite only if all of it is.
        return over_stack(solver.bounds, factors.l2.ndim)(state)

    finite = all_finite(map_tags(to_check, model, curvature, new))
    return tree_where(finite, packed_like(new, inverse), inverse), finite
