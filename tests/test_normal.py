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
from .helpers import normal as random_normal
from .plain import plain_kfac
from .scripts import blocks


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


def arrays_of(tree):
    return jax.tree.map(np.asarray, tree)


def join(tree):
    """Means and log-variances, one after the other."""
    return jnp.concatenate(jax.tree.leaves(tree), axis=-1)


def normal_of(z, targets=None, weights=None):
    return kfac.NormalNLL(*jnp.split(z, 2, axis=-1), targets, weights)


def student_of(z, targets=None, weights=None):
    return kfac.StudentTNLL(z, targets, weights, 3.0, 0.7)


def huber_of(z, targets=None, weights=None):
    return kfac.HuberLoss(z, targets, weights, 0.8)


def exponential(z, t):
    return jnp.sum(t * jnp.exp(z) - z)


def normal_fisher(z):
    mean, s = jnp.split(z, 2)
    return jnp.diag(jnp.concatenate([jnp.exp(-s), jnp.full_like(s, 0.5)]))


def student_fisher(z):
    return 4 / 6 / 0.7**2 * jnp.eye(len(z))


def huber_fisher(z):
    """The probability of the centre, by quadrature."""
    points, weights = np.polynomial.legendre.leggauss(100)
    over = lambda f, a, b: (b - a) / 2 * weights @ f((a + b + (b - a) * points) / 2)
    centre = over(lambda r: np.exp(-(r**2) / 2), 0, 0.8)
    tail = over(lambda r: np.exp(-0.8 * (r - 0.4)), 0.8, 60)
    return centre / (centre + tail) * jnp.eye(len(z))


def normal_targets(rng, leading):
    return jax.device_put(rng.normal(size=leading + (K,)))


def waiting_times(rng, leading):
    return jax.device_put(rng.exponential(size=leading + (K,)))


# The loss, of how many outputs; its targets; one term's loss, and its Fisher.
CASES = {
    "normal": (normal_of, 2 * K, normal_targets, reference.normal, normal_fisher),
    "exponential": (Convex, K, waiting_times, exponential, lambda z: jnp.eye(K)),
    "student": (student_of, K, normal_targets, reference.student, student_fisher),
    "huber": (huber_of, K, normal_targets, reference.huber, huber_fisher),
}
LOSSES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def data(case, leading):
    """Outputs and targets."""
    rng = np.random.default_rng(0)
    z = jax.device_put(rng.normal(size=leading + (case[1],)))
    return z, case[2](rng, leading)


def terms(case, z, loss):
    rows = z.reshape(-1, case[1]), loss.targets.reshape(-1, K)
    return jax.vmap(case[3])(*rows).reshape(loss.leading)


def hessians(case, z, loss):
    targets = loss.targets.reshape(-1, K)
    return reference.hessians(case[3], z.reshape(-1, case[1]), targets)


def fishers(case, z):
    return jax.vmap(case[4])(z.reshape(-1, case[1]))


def dense_root(root, loss):
    """`[terms, k, r]`."""
    r = loss.root_shape[-1]
    columns = jax.vmap(lambda e: join(root(jnp.broadcast_to(e, loss.root_shape))))
    found = columns(jnp.eye(r))
    return jnp.moveaxis(found.reshape(r, -1, found.shape[-1]), 0, -1)


def dense_product(product, case, loss):
    """`[terms, k, k]`."""

    def column(e):
        v = jnp.broadcast_to(e, loss.leading + e.shape)
        v = tuple(jnp.split(v, 2, axis=-1)) if isinstance(loss.outputs, tuple) else v
        return join(product(v))

    columns = jax.vmap(column)(jnp.eye(case[1]))
    return jnp.moveaxis(columns.reshape(case[1], -1, case[1]), 0, -1)


#
# Values, gradients, Fishers, Hessians
#


@LOSSES
@LEADING
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_value_and_gradient(case, leading, weighted):
    w = np.array([0.5, 0.0, 2.0, 1.0, 3.0])[: leading[0]] if weighted else None
    full = np.ones(leading[:1]) if w is None else w
    full = np.broadcast_to(full.reshape((-1,) + (1,) * (len(leading) - 1)), leading)

    @jax.jit
    def run(z, targets, w):
        loss = case[0](z, targets, w)
        assert loss.leading == leading
        ours = lambda z: case[0](z, targets, w).value
        value = lambda z: jnp.sum(full * terms(case, z, loss)) / jnp.sum(full)
        total = lambda z: jnp.sum(terms(case, z, loss))
        return (
            [loss.losses(loss.outputs, targets), terms(case, z, loss)],
            [loss.value, value(z)],
            [jax.grad(ours)(z), jax.grad(value)(z)],
            [join(loss.score(targets)), jax.grad(total)(z)],
        )

    for got, want in run(*data(case, leading), w):
        assert reference.error(got, want) < TOLERANCE


@LOSSES
@LEADING
def test_fisher(case, leading):
    @jax.jit
    def run(z):
        loss = case[0](z)
        product = dense_product(loss.fisher_product, case, loss)
        return fishers(case, z), dense_root(loss.fisher_root, loss), product

    F, S, product = arrays_of(run(data(case, leading)[0]))
    assert reference.error(S @ S.swapaxes(1, 2), F) < TOLERANCE
    assert reference.error(product, F) < TOLERANCE


@LOSSES
@LEADING
def test_hessian(case, leading):
    @jax.jit
    def run(z, targets):
        loss = case[0](z, targets)
        weighted = case[0](z, targets, jnp.arange(float(leading[0])))
        both = [dense_product(one.hessian_product, case, one) for one in (loss, weighted)]
        return hessians(case, z, loss), fishers(case, z), both

    H, F, products = arrays_of(run(*data(case, leading)))
    for product in products:
        assert reference.error(product, H) < TOLERANCE
    # It is not the Fisher.
    assert reference.error(H, F) > 0.1


def test_root_of_the_hessian():
    case = CASES["exponential"]

    @jax.jit
    def run(z, targets):
        loss = case[0](z, targets)
        return dense_root(loss.hessian_root, loss), hessians(case, z, loss)

    S, H = arrays_of(run(*data(case, (5,))))
    assert reference.error(S @ S.swapaxes(1, 2), H) < TOLERANCE


def test_hessian_of_a_normal_is_indefinite():
    case = CASES["normal"]
    z, targets = data(case, (50,))
    loss = normal_of(z, targets)
    assert np.linalg.eigvalsh(np.asarray(hessians(case, z, loss))).min() < -0.1
    with pytest.raises(ValueError, match=r"NormalNLL has no root.*`kfac.Exact\(\)`"):
        loss.hessian_root(jnp.ones(loss.root_shape))

    def loss_fn(model):
        return normal_of(jax.vmap(model)(jnp.ones((2, 3))))

    with pytest.raises(ValueError, match="NormalNLL has no root"):
        eqx.filter_eval_shape(
            kfac.curvature(loss_fn, kfac.ExactGGN()), kfac.convert(net(4))
        )


@LOSSES
def test_hessian_needs_targets(case):
    loss = case[0](data(case, (3,))[0])
    with pytest.raises(ValueError, match="no targets.*`fisher_product`"):
        loss.hessian_product(loss.outputs)
    with pytest.raises(ValueError, match="no targets"):
        loss.value


@LOSSES
def test_expectation_of_the_hessian_is_the_fisher(case):
    # And so is the second moment of the score, whose mean is zero.
    number = 20_000

    @jax.jit
    def run(z):
        loss = case[0](z)

        def draw(key):
            sample = loss.sample(key)
            H = jax.vmap(jax.hessian(case[3]))(z, sample)
            return join(loss.score(sample)), H

        keys = jax.random.split(jax.random.key(0), number)
        return *jax.vmap(draw)(keys), fishers(case, z)

    g, H, F = arrays_of(run(data(case, (2,))[0]))
    assert np.abs(g.mean(axis=0)).max() < 5 * np.sqrt(F.max() / number)
    assert reference.error(np.einsum("sni,snj->nij", g, g) / number, F) < 0.05
    assert reference.error(H.mean(axis=0), F) < 0.05


def test_samples_of_a_normal():
    s = jax.device_put(np.log([[0.01, 4.0]]))

    @jax.jit
    def run(key):
        loss = kfac.NormalNLL(jnp.array([[3.0, -1.0]]), s)
        return jax.vmap(loss.sample)(jax.random.split(key, 20_000))

    samples = np.asarray(run(jax.random.key(0)))[:, 0]
    assert np.allclose(samples.mean(axis=0), [3.0, -1.0], atol=0.05)
    assert np.allclose(samples.std(axis=0), [0.1, 2.0], rtol=0.02)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.03


#
# Curvature of a model
#


@eqx.filter_jit
def net(outputs):
    return eqx.nn.MLP(3, outputs, 4, 1, jnp.tanh, key=jax.random.key(0))


def layers(model):
    return list(model.layers)


def outputs_and_jacobians(model, x):
    """Of every layer's canonical matrix: `[terms, k, size]`."""
    run = lambda model: jax.vmap(model)(x)
    leaves = lambda m: [a for layer in m.layers for a in (layer.weight, layer.bias)]
    outputs = lambda values: run(eqx.tree_at(leaves, model, values))
    flat = iter(jax.jacobian(outputs)(leaves(model)))
    found = [
        reference.to_matrix(dict(weight=w, bias=b))
        for w, b in zip(flat, flat, strict=True)
    ]
    return run(model), [J.reshape(J.shape[:2] + (-1,)) for J in found]


def dense_blocks(jacobians, matrices):
    """The mean over the examples of `J H Jᵀ`, for every layer."""
    number = len(matrices)
    return [np.einsum("nka,nkl,nlb->ab", J, matrices, J) / number for J in jacobians]


@pytest.mark.parametrize(
    "name, ggn",
    [
        ("normal", False),
        ("exponential", False),
        ("exponential", True),
        ("student", False),
        ("huber", False),
        ("huber", True),
    ],
)
def test_curvature_of_one_example(name, ggn):
    case = CASES[name]
    fisher = kfac.ExactGGN(batch_size=3) if ggn else kfac.Exact(batch_size=3)

    @eqx.filter_jit
    def run(model, x, targets):
        loss_fn = lambda model: case[0](jax.vmap(model)(x), targets)
        tree = kfac.curvature(loss_fn, fisher)(kfac.convert(model))
        z, jacobians = outputs_and_jacobians(model, x)
        return tree, jacobians, fishers(case, z), hessians(case, z, case[0](z, targets))

    targets = data(case, (1,))[1]
    found = run(net(case[1]), random_normal(1, 3, seed=1), targets)
    tree, jacobians, F, H = arrays_of(found)
    right, wrong = (H, F) if ggn else (F, H)
    expected, other = dense_blocks(jacobians, right), dense_blocks(jacobians, wrong)
    for factors, block, not_block in zip(layers(tree), expected, other, strict=True):
        assert reference.error(reference.kron(factors), block) < TOLERANCE
        assert reference.error(reference.kron(factors), not_block) > 0.01


@LOSSES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_diagonal_of_a_batch(case, weighted):
    w = np.array([1.0, 2.0, 0.0, 0.5, 1.0, 3.0]) if weighted else None

    @eqx.filter_jit
    def run(model, x, targets):
        loss_fn = lambda model: case[0](jax.vmap(model)(x), targets, w)
        tree = kfac.curvature(loss_fn, kfac.Exact())(kfac.convert(model, kfac.Diagonal()))
        z, jacobians = outputs_and_jacobians(model, x)
        return tree, jacobians, fishers(case, z)

    targets = data(case, (6,))[1]
    found = run(net(case[1]), random_normal(6, 3, seed=1), targets)
    tree, jacobians, F = arrays_of(found)
    F = F if w is None else F * (w / np.mean(w))[:, None, None]
    for factors, block in zip(layers(tree), dense_blocks(jacobians, F), strict=True):
        assert reference.error(factors.diagonal.ravel(), np.diag(block)) < TOLERANCE


@LOSSES
def test_training(case):
    # With the exact model, and through `step`: everything that a loss is asked for.
    model, x = kfac.convert(net(case[1])), random_normal(32, 3, seed=1)
    targets = data(case, (32,))[1]

    def loss_fn(model, x, targets):
        return case[0](jax.vmap(model)(x), targets)

    quadratic = kfac.QuadraticModel()
    damping = kfac.LevenbergMarquardt(initial=1.0)
    optimizer = plain_kfac(quadratic, quadratic, damping)
    state = eqx.filter_jit(optimizer.init)(model)
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
    mean = np.array([[1.0, 2.0]], dtype)
    value, *numbers = extreme(mean, np.full_like(mean, s), mean + dtype(0.5))
    expected = np.exp(-s) * 0.25 + s
    assert reference.error(value, expected) < 200 * jnp.finfo(dtype).eps
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(arrays_of(numbers)))


@jax.jit
def extreme(mean, s, targets):
    loss = kfac.NormalNLL(mean, s, targets)
    return (
        loss.value,
        loss.score(loss.targets),
        loss.fisher_root(jnp.ones(loss.root_shape, mean.dtype)),
        loss.fisher_product((mean, mean)),
        loss.hessian_product((mean, mean)),
        loss.sample(jax.random.key(0)),
    )


@pytest.mark.parametrize("mean", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("variance", [jnp.float32, jnp.bfloat16])
def test_low_precision(mean, variance):
    wide_of = lambda tree: jax.tree.map(lambda a: a.astype(float), tree)

    @jax.jit
    def run(z, targets):
        means, s = z[0].astype(mean), z[1].astype(variance)
        loss = kfac.NormalNLL(means, s, targets)
        wide = kfac.NormalNLL(*wide_of((means, s, targets)))
        v = jnp.ones(loss.root_shape, jnp.float32)
        args = dict(score=targets, fisher_root=v)
        args |= dict(fisher_product=(means, s), hessian_product=(means, s))
        pairs = []
        for name, arg in args.items():
            out = getattr(loss, name)(arg)
            assert [a.dtype for a in out] == [mean, variance]
            pairs.append((join(wide_of(out)), join(getattr(wide, name)(wide_of(arg)))))
        return [loss.value, wide.value], pairs

    targets = random_normal(5, K, seed=1, dtype=jnp.float32)
    (value, exact), pairs = run(random_normal(2, 5, K), targets)
    assert value.dtype == jnp.float32
    assert reference.error(value, exact) < 1e-5
    assert len(pairs) == 4
    for out, want in pairs:
        assert reference.error(out, want) < 0.02


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


def test_a_loss_without_a_root_of_its_own():
    z, targets = data(CASES["exponential"], (3,))
    with pytest.raises(ValueError, match="define `Exponential.hessian_root`"):
        jax.jit(lambda z: Exponential(z, targets).hessian_root(z))(z)
