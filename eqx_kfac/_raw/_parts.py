"""Complex arrays of a model, each of which is held as two real ones."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._misc import accumulator


class HeldParts(NamedTuple):
    """What a field of a converted module holds in the place of a complex array: that is
    two real parameters. Whoever reads the field gets the complex array."""

    real: Any
    imag: Any


def parts_of(array: Array) -> HeldParts:
    """The parts of a complex array."""
    return HeldParts(jnp.real(array), jnp.imag(array))


def joined(tree: PyTree) -> Any:
    """A tree with complex arrays in the place of their parts. Parts that are no arrays,
    as in a tree of flags, stay as they are; where there is nothing, there is nothing."""

    def join(node):
        if not _is_held(node):
            return node
        if node.real is None and node.imag is None:
            return None
        if not (eqx.is_array(node.real) and eqx.is_array(node.imag)):
            return node
        # There are no complex numbers of less precision.
        return jax.lax.complex(*(part.astype(accumulator(part.dtype)) for part in node))

    return jtu.tree_map(join, tree, is_leaf=_is_held)


def holds_parts(field: Any) -> bool:
    """Whether there are parts in a field of a module, but not in a module within."""
    is_leaf = lambda node: _is_held(node) or isinstance(node, eqx.Module)
    return any(map(_is_held, jtu.tree_leaves(field, is_leaf=is_leaf)))


class Joined:
    """A field of a module that is read as if it held complex arrays (a descriptor)."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, cls: type | None = None) -> Any:
        if module is None or self.name not in vars(module):
            raise AttributeError(f"There is no `{self.name}`.")
        return joined(vars(module)[self.name])

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value


def _is_held(node: Any) -> bool:
    return isinstance(node, HeldParts)
