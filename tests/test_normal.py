"""Losses whose Fisher is not their Hessian: the Gaussian with a learned variance, and a
loss of one's own, as the documentation writes it."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from . import reference
from .plain import plain_kfac
from .test_readme import blocks


TOLERANCE = 1e-10
K = 2
LEADING = pytest.mark.parametrize("leading", [(5,), (4, 2)])


def documented():
    """The classes of the guide."""
    page = Path(__file__).parent.parent / "docs" / "api" / "losses.md"
    namespace = {"__name__": "documentation"}
    for _, source in blocks(page, "python"):
        if "\nclass " in "\n" + source:
            exec(source, namespace)
    return namespace


namespace = documented()
Exponential, Convex = namespace["Exponential"], namespace["Convex"]


def join(tree):
    """Means and log-variances, one after the other."""
    return jnp.concatenate(jax.tree.leaves(tree), axis=-1)


def normal_of(z, targets=None, weights=None):
    return kfac.NormalNLL(*jnp.split(z, 2, axis=-1), targets, weights)


def exponential(z, t):
    return jnp.sum(t * jnp.exp(z) - z)


def normal_fisher(z):
    mean, s = jnp.split(z, 2)
    return jnp.diag(jnp.concatenate([jnp.exp(-s), jnp.full_like(s, 0.5)]))


def normal_targets(key, leading):
    return jax.random.normal(key, leading + (K,))


def waiting_times(key, leading):
    return jax.random.exponential(key, leading + (K,))


# The loss, of how many outputs; its targets; one term's loss, and its Fisher.
CASES = {
    "normal": (normal_of, 2 * K, normal_targets, reference.normal, normal_fisher),
    "exponential": (Convex, K, waiting_times, exponential, lambda z: jnp.eye(K)),
}
LOSSES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(case, key, leading, weights=None, targets=True):
    keys = jax.random.split(key)
    z = jax.random.normal(keys[0], leading + (case[1],))
    return z, case[0](z, case[2](keys[1], leading) if targets else None, weights)


def terms(case, z, loss):
    rows = z.reshape(-1, case[1]), loss.targets.reshape(-1, K)
    return jax.vmap(case[3])(*rows).reshape(loss.leading)


def hessians(case, z, loss):
    targets = loss.targets.reshape(-1, K)
    return np.asarray(reference.hessians(case[3], z.reshape(-1, case[1]), targets))


def fishers(case, z):
    return np.asarray(jax.vmap(case[4])(z.reshape(-1, case[1])))


def unit_vectors(loss, number):
    return [jnp.broadcast_to(e, loss.leading + (number,)) for e in jnp.eye(number)]


def dense_root(root, loss):
    """`[terms, k, r]`."""
    columns = [join(root(v)) for v in unit_vectors(loss, loss.root_shape[-1])]
    return np.stack([np.asarray(c).reshape(-1, c.shape[-1]) for c in columns], axis=-1)


def dense_product(product, case, loss):
    """`[terms, k, k]`."""
    columns = []
    for v in unit_vectors(loss, case[1]):
        v = tuple(jnp.split(v, 2, axis=-1)) if isinstance(loss.outputs, tuple) else v
        columns.append(np.asarray(join(product(v))).reshape(-1, case[1]))
    return np.stack(columns, axis=-1)


#
# Values, gradients, Fishers, Hessians
#


@LOSSES
@LEADING
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_value_and_gradient(case, leading, weighted, getkey):
    w = jnp.array([0.5, 0.0, 2.0, 1.0, 3.0])[: leading[0]] if weighted else None
    z, loss = make(case, getkey(), leading, w)
    full = jnp.ones(leading[:1]) if w is None else w
    full = jnp.broadcast_to(full.reshape((-1,) + (1,) * (len(leading) - 1)), leading)

    def value(z):
        return jnp.sum(full * terms(case, z, loss)) / jnp.sum(full)

    assert loss.leading == leading
    assert (
        reference.error(loss.losses(loss.outputs, loss.targets), terms(case, z, loss))
        < TOLERANCE
    )
    assert reference.error(loss.value, value(z)) < TOLERANCE
    ours = lambda z: case[0](z, loss.targets, w).value
    total = lambda z: jnp.sum(terms(case, z, loss))
    slopes = jax.jit(lambda z: [jax.grad(fn)(z) for fn in (ours, value, total)])
    gradient, want, score = slopes(z)
    assert reference.error(gradient, want) < TOLERANCE
    assert reference.error(join(loss.score(loss.targets)), score) < TOLERANCE


@LOSSES
@LEADING
def test_fisher(case, leading, getkey):
    z, loss = make(case, getkey(), leading, targets=False)
    F, S = fishers(case, z), dense_root(loss.fisher_root, loss)
    assert reference.error(S @ S.swapaxes(1, 2), F) < TOLERANCE
    assert reference.error(dense_product(loss.fisher_product, case, loss), F) < TOLERANCE


@LOSSES
@LEADING
def test_hessian(case, leading, getkey):
    z, loss = make(case, getkey(), leading)
    H = hessians(case, z, loss)
    assert reference.error(dense_product(loss.hessian_product, case, loss), H) < TOLERANCE
    # It is not the Fisher.
    assert reference.error(H, fishers(case, z)) > 0.1
    weights = jnp.arange(float(leading[0]))
    weighted = case[0](z, loss.targets, weights)
    again = dense_product(weighted.hessian_product, case, loss)
    assert reference.error(again, H) < TOLERANCE


def test_root_of_the_hessian(getkey):
    case = CASES["exponential"]
    z, loss = make(case, getkey(), (5,))
    S = dense_root(loss.hessian_root, loss)
    assert reference.error(S @ S.swapaxes(1, 2), hessians(case, z, loss)) < TOLERANCE


def test_hessian_of_a_normal_is_indefinite(getkey):
    case = CASES["normal"]
    z, loss = make(case, getkey(), (50,))
    assert np.linalg.eigvalsh(hessians(case, z, loss)).min() < -0.1
    with pytest.raises(ValueError, match=r"NormalNLL has no root.*`kfac.Exact\(\)`"):
        loss.hessian_root(jnp.ones(loss.root_shape))
    model = kfac.convert(eqx.nn.Linear(3, 4, key=getkey()))
    with pytest.raises(ValueError, match="NormalNLL has no root"):
        kfac.curvature(
            lambda m: normal_of(jax.vmap(m)(jnp.ones((2, 3)))), kfac.ExactGGN()
        )(model)


@LOSSES
def test_hessian_needs_targets(case, getkey):
    _, loss = make(case, getkey(), (3,), targets=False)
    with pytest.raises(ValueError, match="no targets.*`fisher_product`"):
        loss.hessian_product(loss.outputs)
    with pytest.raises(ValueError, match="no targets"):
        loss.value


@LOSSES
def test_expectation_of_the_hessian_is_the_fisher(case, getkey):
    # And so is the second moment of the score, whose mean is zero.
    z, loss = make(case, getkey(), (2,), targets=False)
    number = 20_000

    @jax.vmap
    def draw(key):
        sample = loss.sample(key)
        H = jax.vmap(jax.hessian(case[3]))(z, sample)
        return join(loss.score(sample)), H

    g, H = map(np.asarray, jax.jit(draw)(jax.random.split(getkey(), number)))
    F = fishers(case, z)
    assert np.abs(g.mean(axis=0)).max() < 5 * np.sqrt(F.max() / number)
    assert reference.error(np.einsum("sni,snj->nij", g, g) / number, F) < 0.05
    assert reference.error(H.mean(axis=0), F) < 0.05


def test_samples_of_a_normal(getkey):
    s = jnp.log(jnp.array([[0.01, 4.0]]))
    loss = kfac.NormalNLL(jnp.array([[3.0, -1.0]]), s)
    keys = jax.random.split(getkey(), 20_000)
    samples = np.asarray(jax.jit(jax.vmap(loss.sample))(keys))[:, 0]
    assert np.allclose(samples.mean(axis=0), [3.0, -1.0], atol=0.05)
    assert np.allclose(samples.std(axis=0), [0.1, 2.0], rtol=0.02)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03


#
# Curvature of a model
#


def net(key, outputs=4):
    return eqx.nn.MLP(3, outputs, 4, 1, jnp.tanh, key=key)


def layers(model):
    return list(model.layers)


def dense_blocks(model, x, matrices):
    """The mean over the examples of `J H Jᵀ`, for every layer."""
    found = []
    for J in reference.jacobians(lambda m: jax.vmap(m)(x), model, layers):
        found.append(np.einsum("nka,nkl,nlb->ab", J, matrices, J) / len(x))
    return found


@pytest.mark.parametrize(
    "name, ggn", [("normal", False), ("exponential", False), ("exponential", True)]
)
def test_curvature_of_one_example(name, ggn, getkey):
    case = CASES[name]
    model, x = net(getkey(), case[1]), jax.random.normal(getkey(), (1, 3))
    targets = case[2](getkey(), (1,))

    def loss_fn(model):
        return case[0](jax.vmap(model)(x), targets)

    fisher = kfac.ExactGGN(batch_size=3) if ggn else kfac.Exact(batch_size=3)
    run = eqx.filter_jit(kfac.curvature(loss_fn, fisher))
    tree, z = run(kfac.convert(model)), jax.vmap(model)(x)
    F, H = fishers(case, z), hessians(case, z, case[0](z, targets))
    right, wrong = (H, F) if ggn else (F, H)
    expected, other = dense_blocks(model, x, right), dense_blocks(model, x, wrong)
    for factors, block, not_block in zip(layers(tree), expected, other, strict=True):
        assert reference.error(reference.kron(factors), block) < TOLERANCE
        assert reference.error(reference.kron(factors), not_block) > 0.01


@LOSSES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_diagonal_of_a_batch(case, weighted, getkey):
    model, x = net(getkey(), case[1]), jax.random.normal(getkey(), (6, 3))
    targets = case[2](getkey(), (6,))
    w = jnp.array([1.0, 2.0, 0.0, 0.5, 1.0, 3.0]) if weighted else None

    def loss_fn(model):
        return case[0](jax.vmap(model)(x), targets, w)

    run = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))
    tree = run(kfac.convert(model, kfac.Diagonal()))
    F = fishers(case, jax.vmap(model)(x))
    F = F if w is None else F * np.asarray(w / jnp.mean(w))[:, None, None]
    expected = dense_blocks(model, x, F)
    for factors, block in zip(layers(tree), expected, strict=True):
        assert reference.error(factors.diagonal.ravel(), np.diag(block)) < TOLERANCE


@LOSSES
def test_training(case, getkey):
    # With the exact model, and through `step`: everything that a loss is asked for.
    model, x = kfac.convert(net(getkey(), case[1])), jax.random.normal(getkey(), (32, 3))
    targets = case[2](getkey(), (32,))

    def loss_fn(model, x, targets):
        return case[0](jax.vmap(model)(x), targets)

    quadratic = kfac.QuadraticModel()
    damping = kfac.LevenbergMarquardt(initial=1.0)
    optimizer = plain_kfac(quadratic, quadratic, damping)
    state = optimizer.init(model)
    step = eqx.filter_jit(lambda *args, key: optimizer.step(loss_fn, *args, key=key))
    losses = []
    for i in range(15):
        model, state, info = step(model, state, x, targets, key=jax.random.key(i))
        losses.append(float(info.loss))
    assert not info.rejected
    assert losses[-1] < losses[0] - 0.1


#
# Numbers that are hard, and misuse
#


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("s", [-80.0, 80.0])
def test_extreme_variances(dtype, s):
    mean = jnp.array([[1.0, 2.0]], dtype)
    loss = kfac.NormalNLL(mean, jnp.full_like(mean, s), mean + 0.5)
    expected = np.exp(-s) * 0.25 + s
    assert reference.error(loss.value, expected) < 200 * jnp.finfo(dtype).eps
    numbers = [
        loss.score(loss.targets),
        loss.fisher_root(jnp.ones(loss.root_shape, dtype)),
        loss.fisher_product((mean, mean)),
        loss.hessian_product((mean, mean)),
        loss.sample(jax.random.key(0)),
    ]
    assert all(bool(jnp.all(jnp.isfinite(a))) for a in jax.tree.leaves(numbers))


@pytest.mark.parametrize("mean", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("variance", [jnp.float32, jnp.bfloat16])
def test_low_precision(mean, variance, getkey):
    z = jax.random.normal(getkey(), (2, 5, K))
    means, s = z[0].astype(mean), z[1].astype(variance)
    targets = jax.random.normal(getkey(), (5, K)).astype(jnp.float32)
    loss = kfac.NormalNLL(means, s, targets)
    wide = kfac.NormalNLL(means.astype(float), s.astype(float), targets.astype(float))
    assert loss.value.dtype == jnp.float32
    assert reference.error(loss.value, wide.value) < 1e-5
    v = jnp.ones(loss.root_shape, jnp.float32)
    for name, arg in [
        ("score", targets),
        ("fisher_root", v),
        ("fisher_product", (means, s)),
        ("hessian_product", (means, s)),
    ]:
        out = getattr(loss, name)(arg)
        exact = getattr(wide, name)(jax.tree.map(lambda a: a.astype(float), arg))
        assert [a.dtype for a in out] == [mean, variance]
        assert (
            reference.error(
                join(jax.tree.map(lambda a: a.astype(float), out)), join(exact)
            )
            < 0.02
        )


@pytest.mark.parametrize(
    "means, log_variances, targets, weights, error, match",
    [
        ((4, 2), (2,), None, None, ValueError, r"log_variances\[:, None\]"),
        ((4, 2), (4, 1), None, None, ValueError, "jnp.broadcast_to"),
        ((4,), (4,), None, None, ValueError, r"means\[:, None\]"),
        ((4, 2), (4, 2), (4,), None, ValueError, "targets must have shape"),
        ((4, 2), (4, 2), (4, 2), (5,), ValueError, "weights must have the shape"),
        ((0, 2), (0, 2), None, None, ValueError, "empty batch"),
    ],
)
def test_wrong_shapes(means, log_variances, targets, weights, error, match):
    arrays = [None if s is None else jnp.ones(s) for s in (targets, weights)]
    with pytest.raises(error, match=match):
        kfac.NormalNLL(jnp.ones(means), jnp.ones(log_variances), *arrays)


def test_wrong_types():
    with pytest.raises(TypeError, match="log_variances must be floating"):
        kfac.NormalNLL(jnp.ones((4, 2)), jnp.ones((4, 2), int))


def test_a_loss_without_a_root_of_its_own(getkey):
    z, loss = make((Exponential, *CASES["exponential"][1:]), getkey(), (3,))
    with pytest.raises(ValueError, match="define `Exponential.hessian_root`"):
        loss.hessian_root(z)
