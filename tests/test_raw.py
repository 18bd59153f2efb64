"""Constructs that an array can be part of: where `kfac.convert` puts tags, and that what
they collect is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import normal
from .raw import case, check, module, squared


conv = jax.lax.conv_general_dilated
VECTORS = normal(3, 3)
WORDS = jnp.array([1, 4, 4])
SEQUENCES = normal(2, 3, 4)
HALF = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1]], bool)
OTHERS = 1 - np.eye(3)
KEPT = HALF.astype(float)
IMAGES = normal(2, 2, 4, 4)  # Channels first.


def attention(m, x):
    q, k, v = jnp.moveaxis((x @ m.w + m.b).reshape(len(x), 3, 2, 2), 1, 0)
    a = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) / 2**0.5 + m.mask)
    return jnp.tanh(jnp.einsum("hts,shd->thd", a, v).reshape(len(x), 4) @ m.out.T)


def parts(m, x):
    q, k, v = jnp.split(m.w, 3)
    a, b, c = jnp.split(m.b, 3)
    return jnp.tanh(q @ x + a) * (k @ x + b) + (v @ x + c)


def of_one_kind(m, x):
    h = jnp.tanh(m.w[:2] @ x + m.b)
    return m.w[2:, :2] @ h + m.w[2:, 2]


def there_and_back(m, x):
    """Only Kronecker blocks can be tied."""
    first, second = m.w[:3], m.w[3:]
    return jnp.concatenate([first.T @ jnp.tanh(first @ x), second @ x])


def convolved(x, kernel):
    return jnp.tanh(conv(x[None], kernel, (1,), "SAME")[0]), None


def spectral(m, x):
    f = jnp.fft.rfft(x)[:, :3]
    f = jnp.einsum("if,iof->of", f, jax.lax.complex(m.re, m.im))
    return jnp.tanh(jnp.fft.irfft(jnp.pad(f, ((0, 0), (0, 2))), 8) + m.w @ x)


CASES = {
    "contracted in another order": case(
        lambda m, x: jax.lax.dot_general(m.w, x, (((1, 2), (1, 0)), ((), ()))) + m.b,
        SEQUENCES,
        {"w": "Dense 2x12+1"},
        w=(2, 4, 3),
        b=(2,),
    ),
    "a difference from a constant": case(
        lambda m, x: (np.ones((2, 3)) - m.w) @ x + m.b,
        VECTORS,
        {"w": "Dense 2x3+1"},
        w=(2, 3),
        b=(2,),
    ),
    "a bias added twice": case(
        lambda m, x: (lambda z: jnp.tanh(z + m.b) * jnp.sin(z + m.b))(m.w @ x),
        VECTORS,
        {"others": "Parameters 2", "w": "Dense 2x3"},
        w=(2, 3),
        b=(2,),
    ),
    "from the right": case(
        lambda m, x: m.v @ jnp.tanh(x @ m.w + m.b) + m.c,
        VECTORS,
        {"v": "Dense 2x4+1", "w": "Dense 4x3+1"},
        w=(3, 4),
        b=(4,),
        v=(2, 4),
        c=(2,),
    ),
    "transposed": case(
        lambda m, x: jnp.tanh(x @ m.w.T) @ m.v.reshape(2, 4).T,
        VECTORS,
        {"v": "Dense 2x4", "w": "Dense 4x3"},
        w=(4, 3),
        v=(8,),
    ),
    "column by column": case(
        lambda m, x: jnp.tanh(x @ jnp.ravel(m.w, order="F").reshape(3, 4)),
        VECTORS,
        {"w": "Dense 4x3"},
        w=(4, 3),
    ),
    "a result transposed by a reshape": case(
        lambda m, x: (
            jax.lax.reshape(jnp.einsum("i,ihd->hd", x, m.w), (2, 2), dimensions=(1, 0))
            + m.b
        ),
        VECTORS,
        {"w": "Dense 4x3+1"},
        w=(3, 2, 2),
        b=(2, 2),
    ),
    "mixed column by column": case(
        lambda m, x: jnp.tanh(x @ jnp.reshape(m.w, (3, 4), order="F")),
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "heads": case(
        lambda m, x: (
            jnp.einsum("hd,hdo->o", jnp.tanh(jnp.einsum("i,ihd->hd", x, m.w) + m.b), m.o)
            + m.c
        ),
        VECTORS,
        {"o": "Dense 2x8+1", "w": "Dense 8x3+1"},
        w=(3, 2, 4),
        b=(2, 4),
        o=(2, 4, 2),
        c=(2,),
    ),
    "heads of a matrix": case(
        lambda m, x: jnp.einsum("i,ihd->hd", x, m.w.reshape(3, 2, 2)) + m.b.reshape(2, 2),
        VECTORS,
        {"w": "Dense 4x3+1"},
        w=(3, 4),
        b=(4,),
    ),
    "heads and biases in other orders": case(
        lambda m, x: jnp.tensordot(x, m.w.transpose(1, 2, 0), 1) + m.b.T,
        VECTORS,
        {"others": "Parameters 8", "w": "Dense 8x3"},
        w=(2, 3, 4),
        b=(2, 4),
    ),
    "side by side": case(
        lambda m, x: jnp.einsum("gi,gio->go", x, m.w) + m.b,
        SEQUENCES,
        {"w": "Einsum[3] 2x4+1"},
        w=(3, 4, 2),
        b=(3, 2),
    ),
    "attention": case(
        attention,
        SEQUENCES,
        {"others": "Parameters 18", "out": "Dense 5x4", "w": "Dense 12x4+1"},
        "w",
        "out",
        w=(4, 12),
        b=(12,),
        mask=(2, 3, 3),
        out=(5, 4),
    ),
    "parts": case(
        parts,
        VECTORS,
        {
            "w[0:2, :]": "Dense 2x3+1",
            "w[2:4, :]": "Dense 2x3+1",
            "w[4:6, :]": "Dense 2x3+1",
        },
        w=(6, 3),
        b=(6,),
    ),
    "parts that are not all alike": case(
        of_one_kind,
        VECTORS,
        {"others": "Parameters 11"},
        w=(3, 3),
        b=(2,),
    ),
    "parts of parts": case(
        lambda m, x: m.w[1:][1:] @ x * jnp.tanh(m.w[1:][:1] @ x + m.w[:1] @ x),
        VECTORS,
        {"w[0:1, :]": "Dense 1x3", "w[1:2, :]": "Dense 1x3", "w[2:3, :]": "Dense 1x3"},
        w=(3, 3),
    ),
    "scaled and cast": case(
        lambda m, x: (m.w / 2).astype(float) @ jnp.tanh(-m.v @ x),
        VECTORS,
        {"v": "Dense 3x3", "w": "Dense 2x3"},
        w=(2, 3),
        v=(3, 3),
    ),
    "summed": case(
        lambda m, x: (m.w + np.eye(3)) @ jnp.tanh((m.v - 2 * m.u.T) @ x),
        VECTORS,
        {"u": "Dense 3x3", "v": "Dense 3x3", "w": "Dense 3x3"},
        w=(3, 3),
        v=(3, 3),
        u=(3, 3),
    ),
    "low rank": case(
        lambda m, x: (m.w + 0.5 * m.b @ m.a) @ x,
        VECTORS,
        {"others": "Parameters 12", "w": "Dense 3x3"},
        w=(3, 3),
        a=(2, 3),
        b=(3, 2),
    ),
    "there and back": case(
        lambda m, x: m.w.T @ jnp.tanh(m.w @ x),
        VECTORS,
        {"w": "Dense 2x3, tied"},
        "w",
        w=(2, 3),
    ),
    "lookup and projection": case(
        lambda m, i: m.e @ jnp.tanh(m.w @ m.e[i]) + m.b,
        WORDS,
        {"e": "Lookup 3x5, tied", "others": "Parameters 5", "w": "Dense 3x3"},
        "e",
        e=(5, 3),
        w=(3, 3),
        b=(5,),
    ),
    "lookups": case(
        lambda m, i: jnp.tanh(
            m.e[i] + jnp.take(m.f, i, axis=0) + jax.nn.one_hot(i, 5) @ m.g + m.h[:, i]
        ),
        WORDS,
        {"e": "Lookup 3x5", "f": "Lookup 3x5", "g": "Dense 3x5", "h": "Lookup 3x5"},
        e=(5, 3),
        f=(5, 3),
        g=(5, 3),
        h=(3, 5),
    ),
    "lookups of nothing": case(
        lambda m, i: jnp.tanh(m.e.at[i].get(mode="fill", fill_value=0) + m.f[i]),
        jnp.array([0, 7, -9, -4]),
        {"e": "Lookup 2x3", "f": "Lookup 2x3"},
        e=(3, 2),
        f=(3, 2),
    ),
    "several lookups": case(
        lambda m, i: jnp.tanh(jnp.tanh(m.e[i]) @ m.w),
        jnp.array([[1, 3], [0, 4]]),
        {"e": "Lookup 3x5", "w": "Dense 2x3"},
        "w",
        "e",
        e=(5, 3),
        w=(3, 2),
    ),
    "members of a stack": case(
        lambda m, x: m.w[1] @ jnp.tanh(m.w[0] @ x + m.b[0]) + m.b[1],
        VECTORS,
        {"w[0:1, :, :]": "Dense 3x3+1", "w[1:2, :, :]": "Dense 3x3+1"},
        w=(2, 3, 3),
        b=(2, 3),
    ),
    "containers": case(
        lambda m, x: m.p[1]["v"] @ jnp.tanh(m.p[0] @ x + m.q[0]) + m.q[1],
        VECTORS,
        {"p.0": "Dense 4x3+1", "p.1.v": "Dense 2x4+1"},
        p=[(4, 3), {"v": (2, 4)}],
        q=((4,), (2,)),
    ),
    "channels first": case(
        lambda m, x: jnp.tanh(conv(x[None], m.w, (1, 1), "SAME")[0] + m.b[:, None, None]),
        IMAGES,
        {"w": "Convolution 3x12+1"},
        "w",
        w=(3, 2, 2, 3),
        b=(3,),
    ),
    "channels last": case(
        lambda m, x: jnp.tanh(
            conv(
                x[None],
                m.w,
                (2, 1),
                "VALID",
                rhs_dilation=(1, 2),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )[0]
            + m.b
        ),
        IMAGES,
        {"w": "Convolution 3x16+1"},
        "w",
        w=(2, 2, 4, 3),
        b=(3,),
    ),
    "groups of channels": case(
        lambda m, x: jnp.tanh(
            conv(x[None], m.w, (1, 1), "VALID", feature_group_count=2)[0]
            + m.b.reshape(4, 1, 1)
        ),
        IMAGES,
        {"w": "Convolution[2] 2x6+1"},
        "w",
        w=(4, 1, 3, 2),
        b=(4,),
    ),
    "batches inside": case(
        lambda m, x: jnp.tanh(conv(x, m.w, (1,), "VALID") + m.b[None, :, None]),
        IMAGES,
        {"w": "Convolution 3x8+1"},
        "w",
        w=(3, 4, 2),
        b=(3,),
    ),
    "transposed convolution": case(
        lambda m, x: jnp.tanh(
            jax.lax.conv_transpose(
                x[None],
                m.w,
                (2,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                transpose_kernel=True,
            )[0]
            + m.b
        ),
        SEQUENCES,
        {"w": "Convolution 2x12+1"},
        "w",
        w=(3, 2, 4),
        b=(2,),
    ),
    "reversed kernel": case(
        lambda m, x: (
            jnp.tanh(conv(x[None], m.w[:, :, ::-1], (1,), "SAME")[0])
            + jnp.exp(conv(x[None], m.v[..., None], (1,), "VALID")[0])
        ),
        SEQUENCES,
        {"v": "Convolution 2x3", "w": "Convolution 2x9"},
        "w",
        "v",
        w=(2, 3, 3),
        v=(2, 3),
    ),
    "a bias added to a lookup": case(
        lambda m, i: jnp.tanh(m.e[i] + m.b),
        WORDS,
        {"e": "Lookup 3x5", "others": "Parameters 3"},
        e=(5, 3),
        b=(3,),
    ),
    "as many outputs as there are to look up": case(
        lambda m, i: jnp.tanh(m.e[i] + m.b),
        WORDS % 3,
        {"e": "Lookup 3x3", "others": "Parameters 3"},
        e=(3, 3),
        b=(3,),
    ),
    "a matrix named as other arrays are": case(
        lambda m, x: jnp.tanh(m.others @ x) * m.s,
        VECTORS,
        {"other arrays": "Parameters 2", "others": "Dense 2x3"},
        others=(2, 3),
        s=(2,),
    ),
    "a window there and back, and another one": case(
        there_and_back,
        VECTORS,
        {"w[0:3, :]": "Dense 3x3, tied", "w[3:5, :]": "Dense 2x3"},
        "w[0:3, :]",
        w=(5, 3),
    ),
    "a table whose axes were transposed": case(
        lambda m, i: jnp.tanh(m.e.transpose(1, 0, 2).reshape(6, 2)[i]),
        WORDS,
        {"others": "Parameters 12"},
        e=(2, 3, 2),
    ),
    "a loop along kernels in reverse order": case(
        lambda m, x: jax.lax.scan(convolved, x, jnp.flip(m.k, 0))[0].sum(1),
        SEQUENCES,
        {"others": "Parameters 81"},
        k=(3, 3, 3, 3),
    ),
    "a loop along some of the layers": case(
        lambda m, x: jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, m.w[:2])[0],
        VECTORS,
        {"others": "Parameters 27"},
        w=(3, 3, 3),
    ),
    "solved with": case(
        lambda m, x: m.w @ x + jnp.linalg.solve(m.w @ m.w.T + np.eye(3), x),
        VECTORS,
        {"others": "Parameters 9"},
        w=(3, 3),
    ),
    "one bias for two": case(
        lambda m, x: (m.w @ x + m.b) * (m.v @ x + m.b),
        VECTORS,
        {"others": "Parameters 2", "v": "Dense 2x3", "w": "Dense 2x3"},
        w=(2, 3),
        v=(2, 3),
        b=(2,),
    ),
    "a bias in another place too": case(
        lambda m, x: (m.w @ x + m.b) * m.b,
        VECTORS,
        {"others": "Parameters 2", "w": "Dense 2x3"},
        w=(2, 3),
        b=(2,),
    ),
    "with and without its bias": case(
        lambda m, x: m.w @ jnp.tanh(m.w @ x + m.b),
        VECTORS,
        {"others": "Parameters 3", "w": "Dense 3x3"},
        "w",
        w=(3, 3),
        b=(3,),
    ),
    "a result that is used twice": case(
        lambda m, x: (lambda z: (z + m.b) * z)(m.w @ x),
        VECTORS,
        {"others": "Parameters 3", "w": "Dense 3x3"},
        w=(3, 3),
        b=(3,),
    ),
    "a bias for all outputs": case(
        lambda m, x: m.w @ x + m.b,
        VECTORS,
        {"others": "Parameters 1", "w": "Dense 3x3"},
        w=(3, 3),
        b=(),
    ),
    "scales and tokens": case(
        lambda m, x: jnp.mean(
            jnp.concatenate([m.token, (x + m.positions) * m.scale]) @ m.w, axis=0
        ),
        SEQUENCES,
        # Of a mean over rows, one product is the block of all of them.
        {"others": "Parameters 20", "w": "Dense 2x4"},
        token=(1, 4),
        positions=(3, 4),
        scale=(4,),
        w=(4, 2),
    ),
    "computed": case(
        lambda m, x: (
            (m.g[:, None] * m.v / jnp.linalg.norm(m.v, axis=1, keepdims=True))
            @ jnp.tanh((jax.nn.softplus(m.w) * np.tri(3)) @ x)
        ),
        VECTORS,
        {"others": "Parameters 17"},
        w=(3, 3),
        v=(2, 3),
        g=(2,),
    ),
    "masked": case(
        lambda m, x: (m.w * KEPT) @ x + m.b,
        VECTORS,
        {"w": "Masked(Dense) 4x3+1"},
        w=(4, 3),
        b=(4,),
    ),
    "a mask of ones": case(
        lambda m, x: (m.w * np.ones((4, 3))) @ x + m.b,
        VECTORS,
        {"w": "Dense 4x3+1"},
        w=(4, 3),
        b=(4,),
    ),
    "a bias and ones": case(
        lambda m, x: m.w @ x + m.b * np.ones(4),
        VECTORS,
        {"w": "Dense 4x3+1"},
        w=(4, 3),
        b=(4,),
    ),
    "a masked bias": case(
        lambda m, x: (m.w * KEPT) @ x + m.b * KEPT[:, 0],
        VECTORS,
        {"others": "Parameters 4", "w": "Masked(Dense) 4x3"},
        w=(4, 3),
        b=(4,),
    ),
    "a masked table": case(
        lambda m, i: jnp.tanh((m.w * KEPT)[i]),
        WORDS % 4,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "replaced by zeros": case(
        lambda m, x: jnp.where(HALF, 0.0, 2 * m.w) @ x,
        VECTORS,
        {"w": "Masked(Dense) 4x3"},
        w=(4, 3),
    ),
    "a triangle from the right": case(
        lambda m, x: jnp.tril(m.v) @ jnp.tanh(jnp.where(HALF.T, m.w.T, 0) @ x.T).T,
        normal(3, 3, 4),
        {"v": "Masked(Dense) 3x3", "w": "Masked(Dense) 3x4"},
        "w",
        w=(4, 3),
        v=(3, 3),
    ),
    "masked twice": case(
        lambda m, x: (KEPT * (m.w * np.tri(4, 3)).reshape(2, 6)[::1].reshape(4, 3)) @ x,
        VECTORS,
        {"w": "Masked(Dense) 4x3"},
        w=(4, 3),
    ),
    "a masked kernel": case(
        lambda m, x: jnp.tanh(conv(x[None], m.k * np.tri(3, 3), (1, 1), "SAME")[0] + m.b),
        IMAGES,
        {"k": "Masked(Convolution) 3x18+1"},
        "k",
        k=(3, 2, 3, 3),
        b=(3, 1, 1),
    ),
    "a mask that is computed": case(
        lambda m, x: (m.w * jax.lax.stop_gradient(m.w > 0).astype(float)) @ x,
        VECTORS,
        {"w": "Masked(Dense) 4x3"},
        w=(4, 3),
    ),
    "a mask of other numbers": case(
        lambda m, x: (m.w * (KEPT / 2)) @ x,
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "replaced by other numbers": case(
        lambda m, x: jnp.where(HALF, m.w, 1) @ x,
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "a mask of data": case(
        lambda m, x: (m.w * (x > 0).astype(float)) @ x,
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "two masks": case(
        lambda m, x: (m.w * KEPT) @ x + jnp.tanh((m.w * np.tri(4, 3)) @ x),
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "with and without a mask": case(
        lambda m, x: (m.w * KEPT) @ x + jnp.tanh(m.w @ x),
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "masked there and back": case(
        lambda m, x: (m.w * KEPT).T @ jnp.tanh((m.w * KEPT) @ x),
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "a symmetric mask there and back": case(
        lambda m, x: (m.w * OTHERS).T @ jnp.tanh((m.w * OTHERS) @ x),
        VECTORS,
        {"others": "Parameters 9"},
        w=(3, 3),
    ),
    "a mask for a part": case(
        lambda m, x: (m.w[:2] * KEPT[:2]) @ x + jnp.tanh(m.w[2:] @ x),
        VECTORS,
        {"others": "Parameters 12"},
        w=(4, 3),
    ),
    "masks side by side": case(
        lambda m, x: jnp.einsum("goi,i->go", m.w * np.tri(4, 3), x),
        VECTORS,
        {"w": "Masked(Dense) 8x3"},
        w=(2, 4, 3),
    ),
    "masks of groups": case(
        lambda m, x: jnp.einsum("goi,gi->go", m.w * np.tri(4, 3), jnp.stack([x, -x])),
        VECTORS,
        {"others": "Parameters 24"},
        w=(2, 4, 3),
    ),
    "complex": case(
        spectral,
        normal(2, 2, 8),
        {"im": "Einsum[3] 3x2", "re": "Einsum[3] 3x2", "w": "Dense 3x2"},
        "w",
        "re",
        "im",
        re=(2, 3, 3),
        im=(2, 3, 3),
        w=(3, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_construct(name):
    call, x, want, shared, shapes = CASES[name]
    check(module(call, **shapes), x, want, shared)


def test_a_bias_that_is_left_out():
    """In the loss function, but not in the call that the model was converted with."""
    raw = module(with_or_without, w=(2, 3), b=(2,))
    for block in (kfac.Full(), kfac.Kronecker()):
        tagged = kfac.convert(raw, block, example=VECTORS[0])
        kfac.curvature(squared, kfac.Exact())(tagged, VECTORS)
        with pytest.raises(ValueError, match="in another way"):
            without = lambda m, x: squared(lambda x: m(x, False), x)
            kfac.curvature(without, kfac.Exact())(tagged, VECTORS)


def with_or_without(m, x, bias=True):
    return m.w @ x + m.b if bias else m.w @ x
