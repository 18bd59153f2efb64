"""Symmetric operators on PyTrees that are known by their products with vectors."""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._checks import AT_LEAST_0, check_array
from .._complex import on_parts
from . import _decompositions as decompositions
from ._products import matmul


# So many columns of a matrix are computed at the same time.
_columns_at_once = 128


class Structure(eqx.Module):
    """The shapes and types of a PyTree, as static data."""

    leaves: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    def __init__(self, tree: PyTree):
        leaves, self.treedef = jtu.tree_flatten(tree)
        self.leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)

    @property
    def tree(self) -> PyTree[jax.ShapeDtypeStruct]:
        return jtu.tree_unflatten(self.treedef, self.leaves)


class AbstractSymmetricOperator(lx.AbstractLinearOperator):
    """A symmetric operator between vectors that are PyTrees; its matrix is computed only
    if it is asked for."""

    @property
    @abc.abstractmethod
    def positive_semidefinite(self) -> bool:
        """Whether all eigenvalues are known to be at least zero."""

    def as_matrix(self) -> Float[Array, "size size"]:
        """The matrix: rows and columns are the leaves of a vector, in their order, each
        flattened. As many products as there are columns."""
        linear, structure = lx.linearise(self), self.in_structure()
        dtype = widest(structure)

        def row(unit):
            return flatten(linear.mv(unflatten(unit, structure)), dtype)

        eye = jnp.eye(self.in_size(), dtype=dtype)
        if self.in_size() <= _columns_at_once:
            return jax.vmap(row)(eye)
        return jax.lax.map(row, eye, batch_size=_columns_at_once)  # Symmetric.

    def transpose(self) -> "AbstractSymmetricOperator":
        return self

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.in_structure()

    def diagonal(self) -> Float[Array, " size"]:
        """The diagonal of the matrix."""
        return jnp.diag(self.as_matrix())

    def trace(self) -> Float[Array, ""]:
        """The sum of the diagonal."""
        return jnp.sum(self.diagonal())

    def logdet(self, damping: ArrayLike = 0.0) -> Float[Array, ""]:
        r"""$\log\det(C + \lambda I)$, with `damping` $\lambda$; `nan` unless all
        eigenvalues of that are positive."""
        return sum_of_logs(decompositions.eigvalsh(self.as_matrix()), damping)

    def damped(self, damping: ArrayLike) -> "AbstractSymmetricOperator":
        r"""This operator plus $\lambda I$, for `damping` $\lambda \ge 0$. Unlike
        `operator + damping * lx.IdentityLinearOperator(...)`, lineax knows it to be
        positive semidefinite (it does not look at the sign of a number)."""
        check_array("damping", damping, AT_LEAST_0)
        if jnp.ndim(damping) != 0:
            raise ValueError(
                f"`damping` must be a number, but has shape {jnp.shape(damping)}."
            )
        return DampedOperator(self, damping)

    def linearise(self) -> "AbstractSymmetricOperator":
        """This operator, with everything done that all products have in common."""
        return self


class DampedOperator(AbstractSymmetricOperator):
    r"""$C + \lambda I$, with $\lambda \ge 0$."""

    operator: lx.AbstractLinearOperator
    damping: Any

    def mv(self, vector: PyTree) -> PyTree:
        def add(product, v):
            return product + jnp.asarray(self.damping, v.dtype) * v

        return jtu.tree_map(add, self.operator.mv(vector), vector)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.operator.in_structure()

    @property
    def positive_semidefinite(self) -> bool:
        return lx.is_positive_semidefinite(self.operator)

    def linearise(self) -> "DampedOperator":
        return DampedOperator(lx.linearise(self.operator), self.damping)


class LinearisedOperator(AbstractSymmetricOperator):
    """A symmetric linear function. The arrays that it closes over are the leaves."""

    fn: Callable
    structure: Structure
    positive: bool = eqx.field(static=True)

    def __init__(self, fn: Callable, structure: PyTree, positive: bool):
        self.fn = eqx.filter_closure_convert(fn, structure)
        self.structure = Structure(structure)
        self.positive = positive

    def mv(self, vector: PyTree) -> PyTree:
        return on_parts(self.fn, vector)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.structure.tree

    @property
    def positive_semidefinite(self) -> bool:
        return self.positive


class MaterialisedOperator(AbstractSymmetricOperator):
    """A symmetric matrix that acts on flattened PyTrees."""

    matrix: Float[Array, "size size"]
    structure: Structure
    positive: bool = eqx.field(static=True)

    def mv(self, vector: PyTree) -> PyTree:
        def product(vector):
            flat = matmul(self.matrix, flatten(vector, self.matrix.dtype))
            return unflatten(flat, self.structure.tree)

        return on_parts(product, vector)

    def as_matrix(self) -> Float[Array, "size size"]:
        return self.matrix

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.structure.tree

    @property
    def positive_semidefinite(self) -> bool:
        return self.positive


def sum_of_logs(values: Float[Array, "..."], damping: ArrayLike) -> Float[Array, ""]:
    """The log-determinant, from eigenvalues."""
    return jnp.sum(jnp.log(values + jnp.asarray(damping, values.dtype)))


def widest(tree: PyTree) -> Any:
    """The narrowest type that holds every leaf."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*[x.dtype for x in jtu.tree_leaves(tree)])


def flatten(tree: PyTree, dtype: DTypeLike) -> Float[Array, " size"]:
    """All leaves behind one another."""
    return jnp.concatenate([x.astype(dtype).ravel() for x in jtu.tree_leaves(tree)])


def unflatten(vector: Float[Array, " size"], structure: PyTree) -> PyTree:
    """The inverse of `flatten`, in the shapes and types of `structure`."""
    leaves, treedef = jtu.tree_flatten(structure)
    new, start = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape)
        piece = jax.lax.slice_in_dim(vector, start, start + size)
        new.append(piece.reshape(leaf.shape).astype(leaf.dtype))
        start += size
    return jtu.tree_unflatten(treedef, new)


@lx.is_symmetric.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> bool:
    return True


@lx.is_positive_semidefinite.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> bool:
    return operator.positive_semidefinite


@lx.is_diagonal.register(AbstractSymmetricOperator)
@lx.is_tridiagonal.register(AbstractSymmetricOperator)
@lx.is_lower_triangular.register(AbstractSymmetricOperator)
@lx.is_upper_triangular.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> bool:
    return operator.in_size() == 1


@lx.has_unit_diagonal.register(AbstractSymmetricOperator)
@lx.is_negative_semidefinite.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> bool:
    return False


@lx.conj.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> AbstractSymmetricOperator:
    return operator


@lx.linearise.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> AbstractSymmetricOperator:
    return operator.linearise()


@lx.materialise.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> MaterialisedOperator:
    structure = Structure(operator.in_structure())
    positive = operator.positive_semidefinite
    return MaterialisedOperator(operator.as_matrix(), structure, positive)


@lx.diagonal.register(AbstractSymmetricOperator)
def _(operator: AbstractSymmetricOperator) -> Float[Array, " size"]:
    return operator.diagonal()
