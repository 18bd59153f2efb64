"""Products of matrices, each as precise as its use needs on every device."""

import functools as ft

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from .._devices import explicit_sharding
from .._jax import default_precision


# The pair of contracted axes, one of each operand, and no others.
Axes = tuple[int, int]

_ALIGNED = 8  # Numbers in bfloat16 that are read at once.
# What `jax.default_matmul_precision` is, for who wants full products in float32.
_FULL = {"highest", "float32", "F32_F32_F32"}


def matmul(a: Array, b: Array) -> Array:
    """`a @ b` in full precision: for factors, and all that decomposes or inverts them."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def contraction(
    a: Array,
    b: Array,
    axes: Axes,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
    dtype: DTypeLike | None = None,
) -> Array:
    """The product of two matrices along any axis of each, in full precision unless said
    otherwise, and with no transposition before it."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=dtype
    )


def applied(a: Array, b: Array, axes: Axes = (1, 0)) -> Array:
    r"""The product of two matrices of which one *applies* an inverse, or a basis, to a
    gradient. In float32 it is exact to about $10^{-5}$ of its norm: training was the same
    as with full precision, and up to a third worse with TensorFloat-32 ($3 \cdot
    10^{-4}$). On NVIDIA's GPUs these are three products of halves in bfloat16, which
    together take a third of the time of a full one; on TPUs, `HIGH` is the same.

    Products are full in float64, on explicit meshes, and for users who ask for them by
    `jax.default_matmul_precision("highest")`."""
    a, b = (x.astype(jnp.result_type(a, b)) for x in (a, b))
    single = a.dtype == jnp.float32
    placed = any(explicit_sharding(jax.typeof(x)) is not None for x in (a, b))
    if not single or placed or default_precision() in _FULL:
        return contraction(a, b, axes)
    return _applied(a, b, axes)


@ft.partial(jax.jit, static_argnums=2)  # Equal layers are traced once.
def _applied(a: Array, b: Array, axes: Axes) -> Array:
    def product(precision):
        return lambda a, b: contraction(a, b, axes, precision)

    return jax.lax.platform_dependent(
        a,
        b,
        cuda=lambda a, b: in_three_passes(a, b, axes),
        tpu=product(jax.lax.Precision.HIGH),
        default=product(jax.lax.Precision.HIGHEST),
    )


def in_three_passes(a: Array, b: Array, axes: Axes) -> Array:
    r"""A product in float32 as products in bfloat16. With $a = a_1 + a_2$, where $a_1$ is
    the nearest number of 8 significant bits, and $a_2$ the next 8,

    $$a b \approx a_1 b_1 + a_1 b_2 + a_2 b_1$$

    which leaves out what is below $2^{-16}$. The three sums are one, along an axis that
    is three times as long: one kernel."""
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    first = jnp.concatenate([a1, a1, a2], axes[0])
    second = jnp.concatenate([b1, b2, b1], axes[1])
    default = jax.lax.Precision.DEFAULT  # Whatever a user has chosen for float32.
    whole = contraction(first, second, axes, default, jnp.float32)
    return whole[: a.shape[1 - axes[0]], : b.shape[1 - axes[1]]]


def _halves(x: Array) -> tuple[Array, Array]:
    # The bias makes odd sizes, of which tensor cores can read only one number at a time.
    x = jnp.pad(x, [(0, -size % _ALIGNED) for size in x.shape])
    # A compiler may leave out a cast there and back, but not this.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
