"""The factors in an optimizer's state: whole, or symmetric matrices in half of the
memory."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._block import AbstractFactors
from .._curvature import init_curvature
from .._custom_types import Model
from .._devices import zeros_as_from
from .._inverse import factorise
from .._operator import pack
from .._solver import AbstractDampedSolver
from ._state import KFACState, ScaleByKFACState


def packed(state: Any) -> Any:
    """The state of an optimizer, as the same one with `packed=True` has it: to go on from
    a checkpoint that was written without.

    **Arguments:**

    - `state`: that of [`eqx_kfac.KFAC`][], or of an optax optimizer.

    **Returns:** the state, with one triangle of every symmetric matrix that it has; see
    [`eqx_kfac.unpacked`][] for the inverse.

    **Raises:** `ValueError` for part of a state: only the whole tells which matrices are
    symmetric.

    !!! Example

        ```python
        state = kfac.KFAC(1e-2).init(model)
        state = kfac.packed(state)
        model, state, info = kfac.KFAC(1e-2, packed=True).step(
            loss_fn, model, state, x, y, key=key
        )
        ```
    """
    if not any(map(_is_state, jtu.tree_leaves(state, is_leaf=_is_state))):
        raise ValueError(
            "`kfac.packed` takes the whole state of an optimizer, as `optimizer.init` or "
            f"`optimizer.step` returns it, but got {type(state).__name__}."
        )
    return jtu.tree_map(_packed, state, is_leaf=_is_state)


def init_factors(
    model: Model, solver: AbstractDampedSolver, packed: bool
) -> tuple[Model, Model]:
    """Zeros in the place of every layer's factors, and of their factorisation, as a state
    has them."""

    def factors(model):
        curvature = init_curvature(model)
        both = curvature, factorise(curvature, model, solver, jnp.zeros(()))
        return _packed_trees(*both) if packed else both

    return zeros_as_from(factors, model)


def _packed(node: PyTree) -> Any:
    if not _is_state(node):
        return node
    curvature, inverse = _packed_trees(node.curvature, node.inverse)
    return node._replace(curvature=curvature, inverse=inverse)


def _packed_trees(curvature: Model, inverse: Model) -> tuple[Model, Model]:
    """All layers' factors, and their factorisations."""

    def of_layer(factors, node):
        return _packed_fields(node, factors.l2.ndim)

    is_factors = lambda node: isinstance(node, AbstractFactors)
    return tuple(
        jtu.tree_map(of_layer, curvature, tree, is_leaf=is_factors)
        for tree in (curvature, inverse)
    )


def _packed_fields(node: PyTree, stack: int) -> Any:
    """A layer's factors, or their factorisation, with those fields packed that are
    symmetric matrices (not diagonals of such): their types say which."""

    def is_matrix(name):
        return getattr(getattr(node, name), "ndim", 0) == stack + 2

    names = list(filter(is_matrix, getattr(node, "symmetric", ())))
    fields = lambda node: [getattr(node, name) for name in names]
    return eqx.tree_at(fields, node, list(map(pack, fields(node)))) if names else node


def _is_state(node: PyTree) -> bool:
    return isinstance(node, (KFACState, ScaleByKFACState))
