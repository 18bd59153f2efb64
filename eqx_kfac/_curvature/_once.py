"""Cotangents that are computed once, where a compiler would compute them many times.

Behind every block of a network with residual connections, there is a sum, and going
backward, there is a sum of cotangents in the same place. XLA for CPU makes such a sum a
part of every loop that reads it, instead of storing it: that of the first block consists
of those of all others, each of which is computed again for each of its readers, so that
time grows with the square of the depth. What XLA does store is what goes through a
`while` loop. So these cotangents go through one that is never entered, for a reason that
the compiler does not see."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree

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


# A sum of tangents, `kfac_sum(a, b, never)`, whose transpose is `kfac_once(ct, never)`
# for both: the cotangent itself, which goes through a loop on CPUs.
sum_p = Primitive("kfac_sum")
once_p = Primitive("kfac_once")

_LARGE = 2**12  # Fewer numbers may be computed as often as a compiler likes.


def with_sums_once(pushforward: Callable, tangents: PyTree[Array]) -> Callable:
    """A linear function of trees like `tangents`, to be transposed: the same function,
    but cotangents of sums in it that are used several times are computed once. Sums
    inside of loops and branches are left as they are."""
    leaves = jtu.tree_leaves(tangents)
    if any(explicit_sharding(jax.typeof(leaf)) is not None for leaf in leaves):
        return pushforward
    traced = jax.make_jaxpr(lambda _, tangents: pushforward(tangents), return_shape=True)
    closed, shapes = traced(jnp.zeros((), bool), tangents)
    jaxpr = closed.jaxpr
    sums = _shared_sums(jaxpr)
    if not sums:
        return pushforward

    def ours(eqn):
        if id(eqn) not in sums:
            return eqn
        return eqn.replace(primitive=sum_p, invars=[*eqn.invars, jaxpr.invars[0]])

    changed, never = jaxpr.replace(eqns=list(map(ours, jaxpr.eqns))), _never(leaves)

    def wrapped(tangents):
        found = eval_jaxpr(changed, closed.consts, never, *jtu.tree_leaves(tangents))
        return jtu.tree_structure(shapes).unflatten(found)

    return wrapped


def _shared_sums(jaxpr: Jaxpr) -> set[int]:
    """Which equations are sums of tangents that are read more than once, by their
    `id`."""
    sums = list(filter(_is_sum, jaxpr.eqns))
    readers = Counter(id(atom) for eqn in jaxpr.eqns for atom in eqn.invars)
    return {id(eqn) for eqn in sums if readers[id(eqn.outvars[0])] > 1}


def _is_sum(eqn: Equation) -> bool:
    """Whether an equation adds two large arrays of one shape: not a bias."""
    if eqn.primitive.name not in ("add", "add_any"):
        return False
    aval: Aval = eqn.outvars[0].aval
    avals: list[Aval] = [atom.aval for atom in eqn.invars]
    alike = all(a.shape == aval.shape for a in avals)
    return alike and aval.size >= _LARGE and explicit_sharding(aval) is None


def _never(leaves: Sequence[Array]) -> Bool[Array, ""]:
    """What is false, though a compiler does not know: for all it knows, the product of a
    number and zero may be one."""
    number = jnp.ravel(min(filter(jnp.size, leaves), key=jnp.size))[0]
    return number * 0 == 1


def _add(a: Array, b: Array, never: Array) -> Array:
    return a + b


def _sum_transposed(ct: Tangent, a: Any, b: Any, never: Array) -> list[Tangent]:
    ct = ct if is_zero(ct) else once_p.bind(ct, never)
    return [ct, ct, None]


def _through_loop(x: Array, never: Array) -> Array:
    enters = lambda carry: carry[1]
    leave = lambda carry: (2 * carry[0], jnp.zeros_like(never))
    return jax.lax.while_loop(enters, leave, (x, never))[0]


def _first(x: Any, never: Any) -> Any:
    return x


def _derivative(
    primals: Sequence[Array], tangents: Sequence[Tangent]
) -> tuple[Array, Tangent]:
    (x, never), (tangent, _) = primals, tangents
    tangent = tangent if is_zero(tangent) else once_p.bind(tangent, never)
    return once_p.bind(x, never), tangent


def _batched(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, Any]:
    """Over an axis along which models are different, nothing goes through a loop."""
    (x, never), (axis, of_never) = operands, dims
    return (once_p.bind(x, never) if of_never is None else x), axis


set_values(sum_p, _add, lambda a, b, never: a)
set_transpose(sum_p, _sum_transposed)
set_values(once_p, _first, _first)
set_lowering(once_p, _through_loop, "cpu")
set_jvp(once_p, _derivative)
set_transpose(once_p, lambda ct, x, never: [once_p.bind(ct, never), None])
set_simple_batching(once_p, _batched)
