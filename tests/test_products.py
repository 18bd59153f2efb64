"""Products of matrices are as precise as their use needs, on every device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._operator import _products, applied, matmul

from .helpers import normal


SIZES = [(1, 1, 1), (3, 5, 2), (8, 16, 24), (33, 65, 17)]
AXES = [(0, 0), (0, 1), (1, 0), (1, 1)]


def operands(sizes, axes, dtype=jnp.float32):
    """Two matrices whose sizes are `rows, contracted, columns`."""
    rows, contracted, columns = sizes
    a, b = normal(rows, contracted, seed=1), normal(contracted, columns, seed=2)
    a = a.T if axes[0] == 0 else a
    b = b.T if axes[1] == 1 else b
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype)


def error(got, a, b, axes):
    """Relative to the norms of both, beside float64."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    want = np.tensordot(a, b, [[axes[0]], [axes[1]]])
    scale = np.linalg.norm(a) * np.linalg.norm(b)
    assert got.shape == want.shape
    return np.linalg.norm(np.asarray(got, float) - want) / scale


def in_one_pass(a, b, axes):
    first = lambda x: jax.lax.reduce_precision(x, 8, 7)
    return _products.contraction(first(a), first(b), axes)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("sizes", SIZES)
def test_three_passes(sizes, axes):
    """Products of halves are the product, to 16 bits; those of the first halves alone
    are not."""
    a, b = operands(sizes, axes)
    for fn in (
        _products.in_three_passes,
        jax.jit(_products.in_three_passes, static_argnums=2),
    ):
        got = fn(a, b, axes)
        assert got.dtype == jnp.float32
        assert error(got, a, b, axes) < 1e-5
    assert error(in_one_pass(a, b, axes), a, b, axes) > 1e-4
    # It is not the whole product, either.
    if max(sizes) > 8:
        with jax.default_matmul_precision("highest"):
            whole = applied(a, b, axes)
        assert error(got, a, b, axes) > 10 * error(whole, a, b, axes)


def test_three_passes_of_any_size():
    """Halves have the range of float32; what is not finite stays so."""
    a, b = operands((8, 16, 24), (1, 0))
    for scale in (1e-30, 1e30):
        got = _products.in_three_passes(scale * a, b, (1, 0))
        assert error(got / scale, a, b, (1, 0)) < 1e-5
    got = _products.in_three_passes(a.at[2, 3].set(jnp.nan), b, (1, 0))
    assert np.isnan(got[2]).all() and np.isfinite(got[3:]).all()
    assert not np.isfinite(
        _products.in_three_passes(a.at[2, 3].set(jnp.inf), b, (1, 0))[2]
    ).any()


def test_batches_and_derivatives():
    """Batches and derivatives are those of any product."""
    a, b = operands((3, 5, 2), (1, 0))
    passes = lambda a, b: _products.in_three_passes(a, b, (1, 0))
    several = jax.vmap(passes, (0, None))(jnp.stack([a, 2 * a]), b)
    np.testing.assert_array_equal(several[0], passes(a, b))
    np.testing.assert_allclose(several[1], 2 * passes(a, b), rtol=1e-6)
    for fn in (passes, applied):
        ones = jnp.ones((3, 2), jnp.float32)
        got = jax.grad(lambda b: jnp.sum(ones * fn(a, b)))(b)  # noqa: B023
        np.testing.assert_allclose(got, a.T @ ones, rtol=1e-2, atol=1e-2)
        moved = jax.jvp(lambda a: fn(a, b), (a,), (ones[:, :1] * a,))[1]  # noqa: B023
        np.testing.assert_allclose(moved, a @ b, rtol=1e-2, atol=1e-2)


def lowered(platform, dtype=jnp.float32, fn=applied):
    a, b = operands((3, 5, 2), (1, 0), dtype)
    return jax.jit(fn).trace(a, b).lower(lowering_platforms=(platform,)).as_text()


def test_platforms():
    """Three passes on CUDA, what is three passes there on TPUs, and full precision
    elsewhere."""
    # Of sizes that a tensor core reads several numbers of at once.
    assert "tensor<8x24xbf16>" in lowered("cuda") and "HIGH" not in lowered("cuda")
    assert "precision = [HIGH, HIGH]" in lowered("tpu")
    for platform in ("cpu", "rocm"):
        assert "precision = [HIGHEST, HIGHEST]" in lowered(platform)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_full_precision(platform):
    """In float64, of what is decomposed, and for those who ask for it."""
    full = "precision = [HIGHEST, HIGHEST]"
    assert full in lowered(platform, jnp.float64)
    assert full in lowered(platform, fn=matmul)
    for asked in ("highest", "float32"):
        with jax.default_matmul_precision(asked):
            assert full in lowered(platform)


@pytest.mark.parametrize("asked", ["bfloat16", "tensorfloat32", "TF32_TF32_F32", "high"])
def test_no_less_than_three_passes(asked):
    """A user who wants faster products in a network does not get a worse inverse."""
    want = lowered("cuda"), lowered("tpu")
    with jax.default_matmul_precision(asked):
        assert (lowered("cuda"), lowered("tpu")) == want


X, Y = normal(64, 7, seed=0), np.arange(64) % 3


def losses(number=12):
    model = kfac.convert(eqx.nn.MLP(7, 3, 20, 2, key=jax.random.key(0)))
    cast = lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x
    model, x = jax.tree.map(cast, model), jnp.asarray(X, jnp.float32)
    optimizer = kfac.KFAC(curvature_period=1, inverse_period=2)
    state = optimizer.init(model)

    def loss_fn(model, x):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), Y)

    @eqx.filter_jit
    def step(model, state, key):
        return optimizer.step(loss_fn, model, state, x, key=key)

    told = []
    for i in range(number):
        model, state, info = step(model, state, jax.random.key(i))
        told.append(float(info.loss))
    return np.array(told)


def test_training(monkeypatch):
    """Steps in three passes are those in full precision; in one pass they are others."""
    want = losses()
    monkeypatch.setattr(_products, "_applied", _products.in_three_passes)
    got = losses()
    monkeypatch.setattr(_products, "_applied", in_one_pass)
    assert want[-1] < 0.8 * want[0]
    assert np.max(np.abs(got / want - 1)) < 1e-4
    assert np.max(np.abs(losses() / want - 1)) > 5e-4
