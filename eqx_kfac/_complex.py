"""Complex parameters, each of which is a pair of real ones."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree


_T = TypeVar("_T")


class ComplexParts(eqx.Module):
    """What stands in the place of a complex array, wherever numbers are to be real.

    **Fields:**

    - `real`, `imag`: its two parts, each of its shape.
    """

    real: Float[Array, "..."]
    imag: Float[Array, "..."]


def as_real(tree: _T) -> _T:
    """Any tree, with [`eqx_kfac.ComplexParts`][] in the place of complex arrays: of a
    model, as many real parameters as it really has. A real loss is a function of these,
    and any method for real numbers applies.

    **Arguments:**

    - `tree`: any PyTree, such as a model, or a direction in the space of its parameters.
        (What JAX returns as a gradient in complex parameters is the conjugate of such a
        direction.)

    **Returns:** a tree that is otherwise the same; see [`eqx_kfac.as_complex`][] for the
    inverse.

    !!! Example

        ```python
        def value(parts):
            return loss_fn(kfac.as_complex(parts), x, y).value

        grads = eqx.filter_grad(value)(kfac.as_real(model))
        operator = kfac.analysis.GaussNewtonOperator(loss_fn, model, x, y).damped(0.1)
        step = lx.linear_solve(operator, grads, lx.CG(rtol=1e-5, atol=1e-5)).value
        ```
    """

    def parts(leaf):
        return ComplexParts(jnp.real(leaf), jnp.imag(leaf)) if is_complex(leaf) else leaf

    return jtu.tree_map(parts, tree)


def as_complex(tree: _T) -> _T:
    """The inverse of [`eqx_kfac.as_real`][].

    **Arguments:**

    - `tree`: has [`eqx_kfac.ComplexParts`][] nodes, or none.

    **Returns:** the same, with complex arrays in their place. (Parts that are not there,
    as in a tree that was filtered, stay as they are.)
    """

    def joined(node):
        there = isinstance(node, ComplexParts) and eqx.is_array(node.real)
        return jax.lax.complex(node.real, node.imag) if there else node

    return jtu.tree_map(joined, tree, is_leaf=lambda node: isinstance(node, ComplexParts))


def is_complex(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array of complex numbers."""
    return eqx.is_inexact_array(leaf) and jnp.iscomplexobj(leaf)


def on_parts(fn: Callable, vector: PyTree) -> PyTree:
    """`fn(vector)`, of a linear function of real numbers: a vector with complex arrays
    goes through it as their parts, and comes back with complex arrays."""
    if any(map(is_complex, jtu.tree_leaves(vector))):
        return as_complex(fn(as_real(vector)))
    return fn(vector)


def steepest(grads: _T) -> _T:
    r"""The direction of steepest ascent, given what JAX returns as a gradient. For a
    complex $z = x + i y$, that is $\partial_x h - i \partial_y h$: its conjugate is the
    one."""
    return jtu.tree_map(lambda g: jnp.conj(g) if is_complex(g) else g, grads)
