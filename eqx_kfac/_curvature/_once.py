"""Cotangents that are computed once, where a compiler would compute them many times.

Behind every block of a network with residual connections, there is a sum, and going
backward, there is a sum of cotangents in the same place. XLA for CPU makes such a sum a
part of every loop that reads it, instead of storing it: that of the first block consists
of those of all others, each of which is computed again for each of its readers, so that
time grows with the square of the depth. But XLA stores what contains a division. So these
cotangents are divided by a number that is one, of which the compiler does not know
that."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._devices import explicit_sharding
from .._jax import (
    Aval,
    Equation,
    eval_jaxpr,
    is_zero,
    Jaxpr,
    Primitive,
    set_jvp,
    set_lowering,
    set_simple_batching,
    set_transpose,
    set_values,
    Tangent,
)


# A sum of tangents, `kfac_sum(a, b, one)`, whose transpose is `kfac_once(ct, one)` for
# both: the cotangent itself, and on a CPU `ct / one`.
sum_p = Primitive("kfac_sum")
once_p = Primitive("kfac_once")

_MANY = 2**12  # Fewer numbers may be computed as often as a compiler likes.


def with_sums_once(pushforward: Callable, tangents: PyTree[Array]) -> Callable:
    """A linear function of trees like `tangents`, to be transposed: the same function,
    but cotangents of sums in it that are used several times are computed once. Sums
    inside of loops and branches are left as they are."""
    leaves, treedef = jtu.tree_flatten(tangents)
    structure = []

    def flat(one, *leaves):
        found, out = jtu.tree_flatten(pushforward(treedef.unflatten(leaves)))
        structure[:] = [out]  # A traced function can only return arrays.
        return found

    if any(explicit_sharding(jax.typeof(leaf)) is not None for leaf in leaves):
        return pushforward
    closed = jax.make_jaxpr(flat)(jnp.ones(()), *leaves)
    jaxpr = closed.jaxpr
    sums = _shared_sums(jaxpr)
    if not sums:
        return pushforward
    one = jaxpr.invars[0]
    eqns = [
        eqn.replace(primitive=sum_p, invars=[*eqn.invars, one]) if eqn in sums else eqn
        for eqn in jaxpr.eqns
    ]
    jaxpr, one = jaxpr.replace(eqns=eqns), _unknown_one(leaves)

    def wrapped(tangents):
        found = eval_jaxpr(jaxpr, closed.consts, one, *jtu.tree_leaves(tangents))
        return jtu.tree_unflatten(structure[0], found)

    return wrapped


def _shared_sums(jaxpr: Jaxpr) -> list[Equation]:
    """The sums of tangents that more than one equation reads."""
    sums = [eqn for eqn in jaxpr.eqns if _is_sum(eqn)]
    if not sums:
        return []
    readers = Counter(id(atom) for eqn in jaxpr.eqns for atom in eqn.invars)
    return [eqn for eqn in sums if readers[id(eqn.outvars[0])] > 1]


def _is_sum(eqn: Equation) -> bool:
    """Whether an equation adds two large arrays of one shape: not a bias."""
    if eqn.primitive.name not in ("add", "add_any"):
        return False
    aval: Aval = eqn.outvars[0].aval
    avals: list[Aval] = [atom.aval for atom in eqn.invars]
    alike = all(a.shape == aval.shape for a in avals)
    is_real = jnp.issubdtype(aval.dtype, jnp.floating)
    return alike and is_real and aval.size >= _MANY and explicit_sharding(aval) is None


def _unknown_one(leaves: Sequence[Array]) -> Float[Array, ""]:
    """A one, of which a compiler does not know: for all it knows, the product of a number
    and zero may be one."""
    number = jnp.ravel(min(filter(jnp.size, leaves), key=jnp.size))[0]
    return 1 + (number * 0 == 1).astype(float)


def _add(a: Array, b: Array, one: Array) -> Array:
    return a + b


def _sum_of(ct: Tangent, a: Any, b: Any, one: Array) -> list[Tangent]:
    """The transpose of a sum."""
    ct = ct if is_zero(ct) else once_p.bind(ct, one)
    return [ct, ct, None]


def _divided(x: Array, one: Array) -> Array:
    return x / one.astype(x.dtype)


def _first(x: Any, one: Any) -> Any:
    return x


def _derivative(
    primals: Sequence[Array], tangents: Sequence[Tangent]
) -> tuple[Array, Tangent]:
    (x, one), (tangent, _) = primals, tangents
    tangent = tangent if is_zero(tangent) else once_p.bind(tangent, one)
    return once_p.bind(x, one), tangent


def _batched(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, Any]:
    """Over an axis along which the one is different, nothing is divided."""
    (x, one), (axis, of_one) = operands, dims
    return (once_p.bind(x, one) if of_one is None else x), axis


set_values(sum_p, _add, lambda a, b, one: a)
set_transpose(sum_p, _sum_of)
set_values(once_p, _first, _first)
set_lowering(once_p, _divided, "cpu")
set_jvp(once_p, _derivative)
set_transpose(once_p, lambda ct, x, one: [once_p.bind(ct, one), None])
set_simple_batching(once_p, _batched)
