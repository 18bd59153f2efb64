"""What is computed in another way on other devices than CPUs takes the same steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac import _inner_products, _jobs

from .helpers import normal


X, Y = normal(16, 6, seed=0), np.arange(16) % 3


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    rest: eqx.nn.MLP

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(6, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        # One matrix is large enough to be looked at by itself on a CPU.
        self.rest = eqx.nn.MLP(8, 3, 130, 2, key=keys[1])

    def __call__(self, x):
        return self.rest(self.norm(jnp.tanh(self.first(x))))


def loss_fn(model, x):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), Y)


def steps(optimizer, number=7):
    """Losses and norms of some steps; one batch is not finite."""
    model = kfac.convert(Net())
    state = optimizer.init(model)
    step = eqx.filter_jit(
        lambda model, state, x, key: optimizer.step(loss_fn, model, state, x, key=key)
    )
    told = []
    for i in range(number):
        x = X * np.nan if i == 4 else X
        model, state, info = step(model, state, x, jax.random.key(i))
        told.append([info.loss, info.update_norm, info.gradient_norm, info.rejected])
    return np.array(told, float)


OPTIMIZERS = {
    "default": lambda **own: kfac.KFAC(**own),
    "periods": lambda **own: kfac.KFAC(0.1, 0.9, 1e-2, inverse_period=3, **own),
    "full_batch": lambda **own: kfac.KFAC.full_batch(**own),
}


@pytest.fixture
def elsewhere(monkeypatch):
    """Takes the way of all devices but CPUs; returns who was asked."""
    asked = []

    def otherwise(*args, default, **platforms):
        asked.append(platforms)
        return default(*args)

    def take():
        monkeypatch.setattr(jax.lax, "platform_dependent", otherwise)
        return asked

    return take


def gated_loss(model, x, y, gate):
    """A loss in which the second layer does not see the first half of the examples."""
    net, extra = model
    outputs = jax.vmap(net)(x) + gate[:, None] * jax.vmap(extra)(x)
    return kfac.SoftmaxCrossEntropy(outputs, y)


def waiting_steps(examples):
    """The model after three steps with curvature of so many examples, what has changed in
    the second layer, and whether it had to wait."""
    optimizer = kfac.KFAC(fisher=kfac.MonteCarlo(examples=examples))
    linear = eqx.nn.Linear(6, 3, key=jax.random.key(1))
    model = kfac.convert((Net(), linear))
    state = optimizer.init(model)
    step = eqx.filter_jit(lambda *a, key: optimizer.step(gated_loss, *a, key=key))
    batch = X, Y, np.repeat([0.0, 1.0], 8)
    for i in range(3):
        model, state, info = step(model, state, *batch, key=jax.random.key(i))
    change = float(jnp.max(jnp.abs(model[1].weight - linear.weight)))
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return arrays, change, bool(info.faults.waiting)


def test_layers_that_wait(elsewhere):
    """Layers without curvature are left where they are, and no others."""
    (want, *waits), (_, *moves) = waiting_steps(8), waiting_steps(16)
    assert waits == [0.0, True] and moves[0] > 1e-4 and not moves[1]
    elsewhere()
    got, *there = waiting_steps(8)
    assert there == waits
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, elsewhere):
    want = steps(OPTIMIZERS[name]())
    asked = elsewhere()
    got = steps(OPTIMIZERS[name]())
    assert len(asked) > 3
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert want[4, -1] == 1 and np.sum(want[:, -1]) == 1
    # Steps that differ do so by more.
    other = steps(OPTIMIZERS[name](weight_decay=1e-6), 3)
    assert not np.allclose(other, want[:3], rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("large", [2, 100, 2**30])
@pytest.mark.parametrize("name", ["default", "periods"])
def test_large_matrices(name, large, elsewhere, monkeypatch):
    """Matrices from some size on are decomposed and multiplied one by one."""
    want = steps(OPTIMIZERS[name](), 4)
    monkeypatch.setattr(_jobs, "_LARGE", large)
    elsewhere()
    np.testing.assert_allclose(steps(OPTIMIZERS[name](), 4), want, rtol=1e-9)


def test_parts_of_a_row(elsewhere):
    """A tree whose small leaves are parts of one row is the same tree."""
    tree = {"a": normal(3, 4, seed=1), "b": [normal(5, seed=2), normal(2, 1, seed=3)]}
    elsewhere()
    got = jax.jit(_inner_products.as_parts)(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, got, tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("sizes", [[3, 50], [2**14], [2**14 + 1], [2**18], [300, 999]])
def test_inner_products(sizes, dtype, elsewhere):
    """In every way in which they are computed: of small arrays, as products of matrices,
    by all cores."""
    shapes = [sizes, *[[n, 7] for n in sizes], [5, 2**14]]
    a = [normal(*shape, seed=i).astype(dtype) for i, shape in enumerate(shapes)]
    b = [normal(*shape, seed=9 + i).astype(dtype) for i, shape in enumerate(shapes)]
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in zip(a, b)]
    product = sum(np.sum(x * y) for x, y in pairs)
    length = np.sqrt(sum(np.sum(x**2) for x, _ in pairs))
    close = 3e-5 if dtype == jnp.float32 else 1e-13
    dot, norm = jax.jit(_inner_products.tree_dot), jax.jit(_inner_products.tree_norm)
    scales = jnp.array([2.0, -1.0], dtype)
    both = jax.jit(_inner_products.squared_norm_of_sum)
    squares = sum(np.sum((2 * x - y) ** 2) for x, y in pairs)
    for way in (lambda: None, elsewhere):
        if way is elsewhere and dtype == jnp.float32:
            continue  # The routine of a CPU adds up one by one there.
        way()
        jax.clear_caches()
        assert abs(float(dot(a, b)) - product) < close * length**2
        np.testing.assert_allclose(norm(a), length, rtol=close)
        got = both(scales[0], a, scales[1], b)
        np.testing.assert_allclose(got, squares, rtol=close)
    for i in range(len(a)):  # Whatever is not finite is noticed.
        bad = [x.at[(-1,) * x.ndim].set(np.nan) if i == j else x for j, x in enumerate(a)]
        assert np.isnan(norm(bad))


def test_jobs_of_one_kind(elsewhere):
    """Equal products are done together, others by themselves; order does not matter."""
    sizes = [3, 2, 3, 3, 2]
    matrices = [normal(n, n, seed=i) for i, n in enumerate(sizes)]
    vectors = [normal(n, seed=10 + i) for i, n in enumerate(sizes)]
    job = lambda a, x: _jobs.Job("product", lambda a, x: a @ x, (a, x), 0)
    elsewhere()
    got = _jobs.products([job(a, x) for a, x in zip(matrices, vectors, strict=True)])
    for product, a, x in zip(got, matrices, vectors, strict=True):
        np.testing.assert_allclose(product, a @ x, rtol=1e-12)
    assert not np.allclose(got[0], got[2])
