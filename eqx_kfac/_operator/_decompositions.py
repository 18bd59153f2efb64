"""Decompositions of one matrix, to be mapped over several."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from .._devices import explicit_sharding


def one_by_one(
    fn: Callable[[Array], Any], elsewhere: Callable[[Array], Any] | None = None
) -> Callable[[Array], Any]:
    """`fn(matrix)`; on CPU, `vmap` takes one matrix after the other. Batched calls of
    LAPACK wait for threads there (JAX 0.10 to 0.12), and two of them at the same time,
    each holding one, wait for ever. `elsewhere(matrix)` is the same on other devices."""
    fn = jax.jit(fn)
    elsewhere = fn if elsewhere is None else elsewhere

    @custom_vmap
    def alone(matrix):
        return fn(matrix)

    @alone.def_vmap
    def _(_, __, matrices):
        if explicit_sharding(jax.typeof(matrices)) is not None:  # Not along one axis.
            out = jax.vmap(fn)(matrices)
        else:
            out = jax.lax.map(alone, matrices)
        return out, jtu.tree_map(lambda _: True, out)

    @jax.custom_jvp  # For `custom_vmap` has no reverse mode.
    def on_any_platform(matrix):
        return jax.lax.platform_dependent(matrix, cpu=alone, default=elsewhere)

    @on_any_platform.defjvp
    def _(primals, tangents):
        return jax.jvp(fn, primals, tangents)

    return ft.wraps(fn)(on_any_platform)


eigh_dense = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)))
eigvalsh = one_by_one(jnp.linalg.eigvalsh)
qr = one_by_one(lambda matrix: tuple(jnp.linalg.qr(matrix)))
inv = one_by_one(jnp.linalg.inv)
