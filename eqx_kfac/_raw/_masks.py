"""Masks of arrays: what a program multiplies an array by before it uses it, where that
consists of zeros and ones and is the same in all steps.

They are looked at once, when a model is converted, and are static data of the forms of
its tags. So they have to be known then: operations on constants are carried out (not just
traced), as far as masks are made by them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Equation, Tracer
from .._program import opened
from ..form import Convolution, Dense, Mask
from ._facts import evaluated, place, Term
from ._sites import Site


def masked_term(
    term: Term, mask: Any, kept: int, elsewhere: Sequence[Any]
) -> Term | None:
    """An array where `mask` is `kept`: see `AbstractVisitor.masked`."""
    if any(isinstance(value, Tracer) for value in (mask, *elsewhere)):
        return None
    entries = np.asarray(mask)
    is_mask = np.all((entries == 0) | (entries == 1))
    if not is_mask or any(np.any(np.asarray(value) != 0) for value in elsewhere):
        return None
    if np.all(entries == kept):
        return term
    own = _along_own_axes(term, entries == kept)
    if own is not None and term.mask is not None:
        own = own & term.mask.entries
    return None if own is None else term._replace(mask=Mask(own))


def _along_own_axes(term: Term, entries: np.ndarray) -> np.ndarray | None:
    """Entries of a value (or one for all of it), as entries of the array that the value
    is in other clothes; `None` if that is not one to one."""
    axes, lengths = term.axes, term.axes.lengths[term.stack :]
    whole = tuple((0, n) for n in lengths)
    is_moved_only = axes.is_whole and not (axes.copied or axes.flips)
    if not (is_moved_only and axes.window[term.stack :] == whole):
        return None
    factors = axes.factors
    order = sorted(range(len(factors)), key=lambda i: place(factors[i]))
    entries = np.broadcast_to(entries, axes.shape)
    entries = entries.reshape([f.size for f in factors]).transpose(order)
    return entries.reshape(lengths)


def canonical_mask(site: Site) -> Mask | None:
    """The mask at a site, of the entries of the canonical matrix; `None` if there is no
    mask, or no such matrix."""
    use, mask = site.use, site.mask
    if mask is None or not isinstance(use.form, (Dense, Convolution)):
        return None
    if isinstance(use.form, Convolution) and use.form.channel_groups > 1:
        return None
    with jax.ensure_compile_time_eval():
        seen = np.asarray(use.weight.read(jnp.asarray(mask.entries)))
    return Mask(seen.reshape(len(seen), -1))


# Operations by which masks are made. (None of them knows the axes of a `vmap` by name.)
_MAKING = {
    *("iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
    *("add", "sub", "mul", "rem", "div", "neg", "sign", "max", "min", "floor"),
    *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze"),
    *("slice", "concatenate", "pad", "rev", "select_n", "stop_gradient", "copy"),
    *("dot_general", "cumsum", "clamp", "abs", "expand_dims", "copy_p", "square"),
}


def concrete(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of an operation on constants, carried out if it may make a mask."""
    is_known = not any(isinstance(value, Tracer) for value in values)
    if not (is_known and _may_make_masks(eqn) and _size(eqn) <= _MOST):
        return evaluated(eqn, values)
    with jax.ensure_compile_time_eval():
        return evaluated(eqn, values)


# So many entries a mask may have.
_MOST = 2**26


def _size(eqn: Equation) -> int:
    shapes = [atom.aval.shape for atom in eqn.outvars]  # pyright: ignore
    return max(map(math.prod, shapes), default=0)


def _may_make_masks(eqn: Equation) -> bool:
    if eqn.primitive.name in ("jit", "pjit"):
        inner, _ = opened(eqn.params["jaxpr"])
        return all(map(_may_make_masks, inner.eqns))
    return eqn.primitive.name in _MAKING


def first_of_equal(values: Any) -> Any:
    """The first of constants that are all equal, along the first axis; `None` if they
    differ, or are not known."""
    if isinstance(values, Tracer) or np.size(values) > _MOST:
        return None
    if jnp.issubdtype(values.dtype, jax.dtypes.extended):  # Keys, for instance.
        return None
    array = np.asarray(values)
    return array[0] if np.all(array == array[:1]) else None
