"""Convolutions whose channels are last, where XLA needs this to be fast.

XLA for CPU has a fast kernel for convolutions with the channels last, and brings others
into this form, but only in the outermost program: inside of a loop or a branch, a
convolution with the channels first takes ten times as long. Curvature is collected in a
branch, and operators are applied in loops. So convolutions are replaced there by a
primitive of our own, which is the same convolution, and which is lowered for CPUs with
its channels last."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._jax import (
    Aval,
    Equation,
    eval_jaxpr,
    instantiated,
    Primitive,
    set_jvp,
    set_lowering,
    set_simple_batching,
    set_values,
    Tangent,
)
from .._program import replaced


convolution_p = Primitive("kfac_convolution")


def channels_last(fn: Callable) -> Callable:
    """A function of arrays, each convolution of which has its channels last on CPUs."""

    def wrapped(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr = replaced(closed.jaxpr, _ours)
        results = eval_jaxpr(jaxpr, closed.consts, *jtu.tree_leaves(args))
        # A result that does not depend on anything is written into the jaxpr as a number.
        arrays = [r if isinstance(r, jax.Array) else jnp.asarray(r) for r in results]
        return jtu.tree_structure(shapes).unflatten(arrays)

    return wrapped


_theirs = jax.lax.conv_general_dilated_p


def _ours(eqn: Equation) -> Equation:
    """An operation, or our primitive in its place."""
    params = eqn.params
    if eqn.primitive is not _theirs or params["batch_group_count"] != 1:
        return eqn
    if params["out_sharding"] is not None:
        return eqn
    return eqn.replace(primitive=convolution_p)


def _convolution(x: Array, kernel: Array, **params: Any) -> Array:
    return _theirs.bind(x, kernel, **params)


def _with_channels_last(x: Array, kernel: Array, **params: Any) -> Array:
    """A convolution computed with channels last; the axes of a specification are those of
    examples and features (of a kernel: of features that go out and that come in), and
    space."""
    inputs, weights, outputs = params["dimension_numbers"]
    spatial = range(1, x.ndim - 1)
    last = (0, x.ndim - 1, *spatial)
    numbers = type(params["dimension_numbers"])(
        lhs_spec=last,
        rhs_spec=(x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)),
        out_spec=last,
    )
    out = _theirs.bind(
        _transposed(x, inputs, last),
        _transposed(kernel, weights, numbers.rhs_spec),
        **{**params, "dimension_numbers": numbers},
    )
    return _transposed(out, last, outputs)


def _transposed(x: Array, old: tuple[int, ...], new: tuple[int, ...]) -> Array:
    """An array whose axes have the places `new`, given that they have the places
    `old`."""
    axes = [0] * x.ndim
    for here, there in zip(old, new, strict=True):
        axes[there] = here
    return jnp.transpose(x, axes)


def _abstract(x: Aval, kernel: Aval, **params: Any) -> Aval:
    aval, _ = _theirs.abstract_eval(x, kernel, **params)
    return aval


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Tangent], **params: Any
) -> tuple[Array, Array]:
    theirs = ft.partial(_convolution, **params)
    tangents = tuple(map(instantiated, tangents))
    _, tangent = jax.jvp(theirs, tuple(primals), tangents)
    return convolution_p.bind(*primals, **params), tangent


def _batched(
    operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    theirs = ft.partial(_convolution, **params)
    return jax.vmap(theirs, tuple(dims))(*operands), 0


set_values(convolution_p, _convolution, _abstract)
set_lowering(convolution_p, _with_channels_last, "cpu")
set_jvp(convolution_p, _jvp)
set_simple_batching(convolution_p, _batched)
