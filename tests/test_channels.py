"""Convolutions have their channels last on CPUs, and are the same."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_kfac as kfac
from eqx_kfac._curvature._channels import channels_last

from .helpers import normal


N = 4
KEY = jax.random.key(0)
# Spatial axes, stride, padding, dilation of the input and of the kernel, groups.
CASES = {
    "1d": (1, 1, "SAME", 1, 1, 1),
    "2d": (2, 1, "SAME", 1, 1, 1),
    "3d": (3, 1, "VALID", 1, 1, 1),
    "stride": (2, 2, "VALID", 1, 1, 1),
    "dilated kernel": (2, 1, [(2, 1), (0, 2)], 1, 2, 1),
    "transposed": (2, 1, [(1, 2), (1, 2)], 2, 1, 1),
    "groups": (2, 1, "SAME", 1, 1, 2),
}


def convolution(name):
    axes, stride, padding, dilation, kernel_dilation, groups = CASES[name]
    x = normal(N, 4, *[6, 5, 7][:axes], seed=0)
    kernel = normal(6, 4 // groups, *[3, 2, 3][:axes], seed=1)

    def fn(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride,) * axes,
            padding,
            (dilation,) * axes,
            (kernel_dilation,) * axes,
            feature_group_count=groups,
        )

    return fn, x, kernel


def near(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(p, q, rtol=1e-12, atol=1e-12) for p, q in pairs)


@pytest.mark.parametrize("name", CASES)
def test_the_same(name):
    fn, *args = convolution(name)
    ours = channels_last(fn)
    assert near(jax.jit(ours)(*args), fn(*args))
    assert near(ours(*args), fn(*args))
    # Forward and backward derivatives, whose kernels and examples change their places.
    value = lambda fn: lambda *args: jnp.sum(jnp.sin(fn(*args)))
    assert near(
        jax.jit(jax.grad(value(ours), (0, 1)))(*args), jax.grad(value(fn), (0, 1))(*args)
    )
    back = channels_last(jax.grad(value(fn), (0, 1)))
    assert near(jax.jit(back)(*args), jax.grad(value(fn), (0, 1))(*args))
    tangents = [jnp.cos(a) for a in args]
    along = lambda fn: jax.jit(lambda: jax.jvp(fn, args, tangents))()
    assert near(along(ours), along(fn))


def test_vectorised():
    """Over inputs, over kernels, and over both."""
    fn, x, kernel = convolution("2d")
    xs, kernels = jnp.stack([x, 2 * x]), jnp.stack([kernel, kernel + 1])
    for axes in ((0, None), (None, 0), (0, 0)):
        args = xs if axes[0] == 0 else x, kernels if axes[1] == 0 else kernel
        ours = jax.vmap(channels_last(fn), axes)(*args)
        assert near(ours, jax.vmap(fn, axes)(*args))


def test_what_is_no_array_stays():
    """A function may return trees, constants, and keys."""

    def fn(x):
        return {"y": [x + 1, None]}, jnp.array(True), jax.random.key(3)

    tree, flag, key = channels_last(fn)(jnp.ones(3))
    assert tree["y"][1] is None and bool(flag) and isinstance(flag, jax.Array)
    assert jax.random.key_data(key)[1] == 3


def layouts(compiled):
    """Where each convolution of a compiled program has its channels, and whether it is in
    the outermost computation."""
    found, outermost = [], False
    for line in compiled.as_text().splitlines():
        if line.startswith(("%", "ENTRY")):
            outermost = line.startswith("ENTRY")
        labels = re.search(r" convolution\(.*dim_labels=(\w+)_", line)
        if labels:
            found.append((labels[1].index("f") == len(labels[1]) - 1, outermost))
    return found


class Net(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(KEY, 3)
        self.first = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0])
        self.second = eqx.nn.Conv2d(8, 8, 3, 2, padding=1, key=keys[1])
        self.head = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, x):
        h = jax.nn.relu(self.second(jax.nn.relu(self.first(x))))
        return self.head(jnp.mean(h, (1, 2)))


IMAGES = normal(N, 1, 8, 8, seed=2).astype(jnp.float32)
LABELS = jnp.array([0, 1, 2, 0])


def loss_fn(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="layouts of CPUs")
def test_channels_are_last_in_branches():
    """In float32, for which XLA has the fast kernel. The convolutions of the curvature,
    forward and back, are in a branch of the step."""
    net = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_array(a) else a, Net())
    model, optimizer = kfac.convert(net), kfac.KFAC()
    arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)

    def step(arrays, x, y):
        model, state = eqx.combine(arrays, static)
        model, state, _ = optimizer.step(loss_fn, model, state, x, y, key=KEY)
        return eqx.filter((model, state), eqx.is_array)

    found = layouts(jax.jit(step).lower(arrays, IMAGES, LABELS).compile())
    inside = [last for last, outermost in found if not outermost]
    assert len(inside) >= 3 and all(inside)

    # Without ours, they are where the model has them: the test sees a difference.
    branch = lambda x, c: lax.cond(
        c, jax.vmap(net), lambda x: jnp.zeros((N, 3), x.dtype), x
    )
    plain = layouts(jax.jit(branch).lower(IMAGES, True).compile())
    assert not any(last for last, _ in plain)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="layouts of CPUs")
def test_operators_in_loops():
    """Products with the Gauss-Newton matrix, as conjugate gradients take them."""
    net = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_array(a) else a, Net())
    model = kfac.convert(net)
    operator = kfac.analysis.GaussNewtonOperator(loss_fn, model, IMAGES, LABELS)
    vector = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), operator.in_structure())
    loop = jax.jit(lambda v: lax.fori_loop(0, 3, lambda _, v: operator.mv(v), v))
    found = layouts(loop.lower(vector).compile())
    inside = [last for last, outermost in found if not outermost]
    assert len(inside) >= 2 and all(inside)
