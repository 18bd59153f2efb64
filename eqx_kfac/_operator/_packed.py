"""Symmetric matrices in half of the memory."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh
from jaxtyping import Array, Bool, PyTree, Shaped

from .._devices import split_rows
from ._factor import Factor, trace_of_factor


class Packed(eqx.Module):
    r"""Symmetric matrices in half of the memory: $n (n + 1) / 2$ numbers each. With $M$
    split after its first $r = \lceil n / 2 \rceil$ rows and columns,

    $$M = \begin{pmatrix} A & B \\ B^\top & C \end{pmatrix},$$

    the `rectangle` has the lower triangle of $A$ and the upper triangle of $C$ side by
    side, followed by $B$. Its shape determines $n$. Everything is copied: a matrix that
    is symmetric bit for bit comes back bit for bit. Stacked layers have leading axes.

    ??? cite "Reference"

        F. Gustavson, J. Waśniewski, J. Dongarra, J. Langou, *Rectangular Full Packed
        Format for Cholesky's Algorithm*, ACM TOMS 37(2), 2010.
    """

    rectangle: Shaped[Array, "*stack rows columns"]

    @property
    def size(self) -> int:
        """$n$"""
        rows, columns = self.rectangle.shape[-2:]
        return rows + columns // 2

    def diagonal(self) -> Shaped[Array, "*stack n"]:
        """The diagonals of the matrices."""
        rows, columns = self.rectangle.shape[-2:]
        flat = self.rectangle.reshape(*self.rectangle.shape[:-2], -1)
        first = flat[..., :: columns + 1]
        last = flat[..., 1 :: columns + 1][..., : self.size - rows]
        return jnp.concatenate([first, last], axis=-1)

    def matrix(self) -> Shaped[Array, "*stack n n"]:
        """The matrices."""
        a, rows = self.rectangle, self.rectangle.shape[-2]
        rest = self.size - rows
        lower, upper = a[..., :rows], a[..., :rest, 1 : rest + 1]
        beside = a[..., rest + 1 :]
        first = _where(jnp.tri(rows, dtype=bool), lower, lower.mT)
        last = _where(jnp.tri(rest, dtype=bool), upper.mT, upper)
        # Selected, not concatenated: one pass over the memory, and none in between.
        is_first = jnp.arange(self.size)[None, :] < rows
        above = _where(is_first, _pad(first, 0, 0, rest), _pad(beside, 0, rows, 0))
        below = _where(is_first, _pad(beside.mT, 0, 0, rest), _pad(last, 0, rows, 0))
        return jnp.concatenate([above, below], axis=-2)


@jax.jit  # Otherwise five programs for every size, of a state that is not traced.
def pack(matrix: Shaped[Array, "*stack n n"]) -> Packed:
    """Symmetric matrices, packed. (Of others, part of each triangle is lost.)"""
    size = matrix.shape[-1]
    rest = size // 2
    rows = size - rest
    first = _pad(matrix[..., :rows, :rows], 0, 0, rest + 1 - rows)
    last = _pad(matrix[..., rows:, rows:], rows - rest, 1, 0)
    triangles = _where(jnp.tri(rows, rest + 1, dtype=bool), first, last)
    return Packed(jnp.concatenate([triangles, matrix[..., :rows, rows:]], axis=-1))


class ShardedPacked(eqx.Module):
    """[`eqx_kfac.operators.Packed`][] matrices of which every device along the axes
    `over` of a mesh has only some rows; of small matrices, all rows. Rows are padded with
    zeros to a number that does not depend on the devices, so a checkpoint restores onto
    any number of them.

    **Fields:**

    - `rectangle`: that of `Packed`, with rows of zeros below: `[*stack, padded,
        columns]`.
    - `rows`: how many rows there are without the padding.
    - `over`: the names of the axes of the mesh that the rows are split over.
    - `mesh`: the shape of the mesh of devices, and the names of its axes.
    """

    rectangle: Shaped[Array, "*stack padded columns"]
    rows: int = eqx.field(static=True)
    over: tuple[str, ...] = eqx.field(static=True)
    # (What comes out of a `lax.cond` may not know its own.)
    mesh: AbstractMesh = eqx.field(static=True, repr=False)

    @classmethod
    def of(
        cls, packed: Packed, over: tuple[str, ...], mesh: AbstractMesh
    ) -> "ShardedPacked":
        """Splits what all devices of `mesh` have."""
        rows = packed.rectangle.shape[-2]
        block = 2 ** int(math.log2(min(max(rows // 4, 1), 512)))
        # In full up to here: a compiler would split what comes before, too.
        whole = split_rows(packed.rectangle, (), mesh)
        padded = _pad(whole, -rows % block, 0, 0)
        return cls(split_rows(padded, over, mesh), rows, over, mesh)

    def packed(self) -> Packed:
        """The packed matrices, in full on every device."""
        return Packed(split_rows(self.rectangle, (), self.mesh)[..., : self.rows, :])

    def diagonal(self) -> Shaped[Array, "*stack n"]:
        """The diagonals of the matrices."""
        return self.packed().diagonal()

    def matrix(self) -> Shaped[Array, "*stack n n"]:
        """The matrices."""
        return self.packed().matrix()


def is_packed(node: PyTree) -> bool:
    return isinstance(node, Packed | ShardedPacked)


def has_sharded(tree: PyTree) -> bool:
    """Whether devices have different parts of any matrix."""
    nodes = jtu.tree_leaves(tree, is_leaf=is_packed)
    return any(isinstance(node, ShardedPacked) for node in nodes)


def vanishes(factor: Factor | Packed | ShardedPacked) -> Bool[Array, ""]:
    """Whether a positive semidefinite matrix (or diagonal, or `Packed`) is zero."""
    is_packed = isinstance(factor, Packed | ShardedPacked)
    return trace_of_factor(factor.diagonal() if is_packed else factor) == 0


def unpacked(tree: PyTree) -> PyTree:
    """Any tree, such as the state of an optimizer, or part of one, with whole matrices in
    place of packed ones.

    **Arguments:**

    - `tree`: has [`eqx_kfac.operators.Packed`][] or
        [`eqx_kfac.operators.ShardedPacked`][] nodes, or none.

    **Returns:** a tree that is otherwise the same; see [`eqx_kfac.packed`][] for the
    inverse.

    !!! Example

        ```python
        state = kfac.packed(kfac.KFAC().init(model))
        kfac.operators.unpacked(state).curvature.layers[0].input_factor
        state.curvature.layers[0].input_factor.matrix()  # The same.
        ```
    """

    def leaf(node):
        return node.matrix() if is_packed(node) else node

    return jtu.tree_map(leaf, tree, is_leaf=is_packed)


def still_sharded(tree: PyTree) -> PyTree:
    """Any tree, with split matrices where they belong: of what a program returns, the
    compiler would decide."""

    def leaf(node):
        if not isinstance(node, ShardedPacked):
            return node
        return dataclasses.replace(
            node, rectangle=split_rows(node.rectangle, node.over, node.mesh)
        )

    return jtu.tree_map(leaf, tree, is_leaf=is_packed)


def packed_like(tree: PyTree, like: PyTree) -> PyTree:
    """`tree`, packed where `like` is."""

    def leaf(like, node):
        if isinstance(like, ShardedPacked):
            return ShardedPacked.of(pack(node), like.over, like.mesh)
        return pack(node) if isinstance(like, Packed) else node

    return jtu.tree_map(leaf, like, unpacked(tree), is_leaf=is_packed)


def _pad(a: Array, below: int, left: int, right: int) -> Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, below), (left, right)])


def _where(mask: Array, a: Array, b: Array) -> Array:
    stack = (1,) * (a.ndim - 2)
    return jnp.where(mask.reshape(stack + mask.shape), a, b)
