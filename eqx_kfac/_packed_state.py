"""The state of an optimizer with its symmetric matrices in half of the memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ._block import AbstractFactors
from ._devices import zeros_as_from
from ._operator import pack
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
    return _map_symmetric(pack, state)


def init_packed(state: Any) -> Any:
    """As `packed`, where all symmetric matrices still are zero."""

    def trees(state):
        state = _map_symmetric(pack, state)
        return state.curvature, state.inverse

    curvature, inverse = zeros_as_from(trees, state)
    return dataclasses.replace(state, curvature=curvature, inverse=inverse)


def _map_symmetric(fn: Callable, tree: Any) -> Any:
    """`fn` of all symmetric matrices in the states that are found in a tree."""

    def convert(node):
        if not _is_state(node):
            return node
        trees = lambda node: [node.curvature, node.inverse]
        new = [
            jtu.tree_map(of_layer, node.curvature, tree, is_leaf=_is_factors)
            for tree in trees(node)
        ]
        return eqx.tree_at(trees, node, new, is_leaf=lambda x: x is None)

    def of_layer(factors, node):
        return _map_fields(fn, node, factors.l2.ndim)

    return jtu.tree_map(convert, tree, is_leaf=_is_state)


def _map_fields(fn: Callable, node: Any, stack: int) -> Any:
    """`fn` of those fields of a layer's factors, or of their factorisation, that are
    symmetric matrices (not diagonals of such): their types say which."""

    def is_matrix(name):
        return getattr(getattr(node, name), "ndim", 0) == stack + 2

    names = list(filter(is_matrix, getattr(node, "symmetric", ())))
    fields = lambda node: [getattr(node, name) for name in names]
    return eqx.tree_at(fields, node, list(map(fn, fields(node)))) if names else node


def _is_factors(node: Any) -> bool:
    return isinstance(node, AbstractFactors)


def _is_state(node: Any) -> bool:
    return isinstance(node, (KFACState, ScaleByKFACState))
