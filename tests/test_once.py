"""Cotangents of residual sums are computed once, and are the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._curvature import _linearise
from eqx_kfac._curvature._once import _never, once_p, with_sums_once

from .helpers import normal


WIDTH = 64
KEY = jax.random.key(0)


class Residual(eqx.Module):
    """A sum behind every block, in which all blocks before it are."""

    norms: list
    layers: list

    def __init__(self, depth, width=WIDTH, dtype=float):
        keys = jax.random.split(jax.random.key(0), depth)
        self.norms = [eqx.nn.LayerNorm(width, dtype=dtype) for _ in keys]
        self.layers = [eqx.nn.Linear(width, width, key=k, dtype=dtype) for k in keys]

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(jnp.tanh(norm(x)))
        return x


def backwards(depth, once, dtype=jnp.float64, examples=128):
    """The gradient of a sum of sines, as a function of parameters and inputs; and
    these."""
    params, static = eqx.partition(Residual(depth, dtype=dtype), eqx.is_array)

    def gradient(params, x):
        run = lambda params: jax.vmap(eqx.combine(params, static))(x)
        out, pushforward = jax.linearize(run, params)
        if once:
            pushforward = with_sums_once(pushforward, params)
        return jax.linear_transpose(pushforward, params)(jnp.cos(out))[0]

    return gradient, params, normal(examples, WIDTH, seed=0).astype(dtype)


def number(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("kfac_once")


def near(a, b, rtol=1e-12):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(p, q, rtol=rtol, atol=rtol) for p, q in pairs)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_the_same(dtype):
    plain, params, x = backwards(4, False, dtype)
    ours, *_ = backwards(4, True, dtype)
    assert (number(plain, params, x), number(ours, params, x)) == (0, 2)
    got, want = jax.jit(ours)(params, x), jax.jit(plain)(params, x)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, got, want))
    as_numbers = lambda tree: jax.tree.map(lambda a: np.asarray(a, float), tree)
    precision = {jnp.float64: 1e-12, jnp.float32: 1e-4, jnp.bfloat16: 0.05}[dtype]
    assert near(as_numbers(got), as_numbers(want), precision)
    other = jax.jit(ours)(params, 1.5 * x)
    assert not near(as_numbers(other), as_numbers(want), precision)


def test_work_grows_with_depth():
    """By the operations that XLA counts, work is proportional to depth; without us it is
    not. (If the last line fails, XLA computes such sums once, and we need not.)"""

    def growth(once):
        operations = []
        for depth in (3, 6, 12):
            fn, *args = backwards(depth, once, jnp.float32)
            cost = jax.jit(fn).lower(*args).compile().cost_analysis()
            operations.append((cost[0] if isinstance(cost, list) else cost)["flops"])
        first, second, third = operations
        return (third - second) / (second - first)

    assert abs(growth(once=True) - 2) < 0.05
    assert growth(once=False) > 2.1


def test_where_there_is_nothing_to_do():
    """Without sums that are read several times, of few numbers, or on explicit meshes,
    the function is used as it is."""

    def unchanged(fn, x):
        _, pushforward = jax.linearize(fn, x)
        return with_sums_once(pushforward, x) is pushforward

    residual = lambda x: (y := jnp.sin(x) + jnp.cos(x)) + jnp.sin(y)
    reads_once = lambda x: jnp.exp(jnp.sin(x) + jnp.cos(x))
    twice = lambda x: (jnp.tanh(y := jnp.sin(x) + jnp.cos(x)), y**2)
    large = normal(100, 100, seed=0)
    assert unchanged(reads_once, large)
    assert not unchanged(twice, large)
    assert unchanged(twice, large[0])
    assert unchanged(residual, jnp.zeros(()))
    # A bias is no residual sum.
    biased = lambda b: (jnp.tanh(y := large * jnp.sum(b) + b[None]), y**2)
    assert unchanged(biased, large[0])
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(large, jax.P("d", None))
        assert unchanged(twice, placed)


@pytest.mark.parametrize("first", [0.0, -0.0, 1.0, -2.5, 3e38, 1e-45, np.inf, np.nan])
def test_never_is_false(first):
    leaves = [jnp.zeros(3), jnp.array([], jnp.float32), jnp.array([first], jnp.float32)]
    assert not jax.jit(_never)(leaves)


def test_rules():
    x, never = normal(3, 5, seed=0), jnp.array(False)
    once = lambda x: once_p.bind(x, never)
    for fn in (once, jax.jit(once), jax.vmap(once), jax.jit(jax.vmap(once, 1, 1))):
        np.testing.assert_array_equal(fn(x), x)
    # Where both operands are mapped, there is no loop.
    both, several = jax.vmap(once_p.bind), jnp.zeros(3, bool)
    np.testing.assert_array_equal(jax.jit(both)(x, several), x)
    assert number(both, x, several) == 0 < number(jax.vmap(once), x)
    primal, tangent = jax.jvp(once, (x,), (2 * x,))
    np.testing.assert_array_equal((primal, tangent), (x, 2 * x))
    loss = lambda x: jnp.sum(once(x) ** 3)
    np.testing.assert_allclose(jax.grad(loss)(x), 3 * x**2, rtol=1e-15)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x), 6 * x)
    # On a CPU, there is a loop, which would double what goes through it.
    np.testing.assert_array_equal(jax.jit(once_p.bind)(x, jnp.array(True)), 2 * x)


def loss_fn(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


def trained(number_of_steps=5, **choices):
    model = kfac.convert(Residual(4))
    optimizer = kfac.KFAC()
    state = optimizer.init(model)
    x = normal(128, WIDTH, seed=1)
    y = jnp.roll(x, 1, axis=1)

    @eqx.filter_jit
    def step(model, state, key):
        return optimizer.step(loss_fn, model, state, x, y, key=key, **choices)

    for i in range(number_of_steps):
        model, state, info = step(model, state, jax.random.key(i))
    return eqx.filter(kfac.averaged(model, state), eqx.is_array), step, model, state


@pytest.mark.parametrize("choices", [{}, dict(micro_batches=2)])
def test_steps(choices, monkeypatch):
    """Steps are those without us, with statistics and gradients in one pass or two."""
    got, step, *args = trained(**choices)
    inside = number(lambda key: eqx.filter(step(*args, key), eqx.is_array), KEY)
    assert inside >= 4  # In a gradient, and in a statistic.
    monkeypatch.setattr(_linearise, "with_sums_once", lambda fn, tangents: fn)
    want, step, *args = trained(**choices)
    assert number(lambda key: eqx.filter(step(*args, key), eqx.is_array), KEY) == 0
    assert near(got, want, 1e-9)
    assert not near(got, trained(4, **choices)[0], 1e-9)


def test_ensembles():
    """Over models, nothing goes through a loop."""
    x = normal(128, WIDTH, seed=1)
    scales = jnp.array([1.0, 0.5])
    models = eqx.filter_vmap(scaled)(scales)

    def gradient(model):
        return kfac.value_grad_and_curvature(loss_fn)(model, x, x, key=KEY)[1]

    got = eqx.filter_jit(eqx.filter_vmap(gradient))(models)
    for i, scale in enumerate(scales):
        want = gradient(scaled(scale))
        member = jax.tree.map(lambda a, i=i: a[i], got)
        assert near(*(eqx.filter(t, eqx.is_inexact_array) for t in (member, want)), 1e-9)


def test_complex():
    """Complex numbers go through the loop as others do."""
    x = jax.lax.complex(normal(70, 70, seed=0), normal(70, 70, seed=1))
    fn = lambda x: (jnp.sin(y := jnp.cos(x) + x**2), y * x)
    out, pushforward = jax.linearize(fn, x)
    ours = with_sums_once(pushforward, x)
    back = lambda push: jax.jit(jax.linear_transpose(push, x))(out)
    assert ours is not pushforward and near(back(ours), back(pushforward))


def scaled(scale):
    return jax.tree.map(lambda p: scale * p, kfac.convert(Residual(3)))
