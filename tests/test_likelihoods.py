"""Losses of residuals and of ordered classes, against quadrature and enumeration; and the
losses that need no object of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import collect, normal


TOLERANCE = 1e-10
K = 3
LEADING = pytest.mark.parametrize("leading", [(5,), (4, 2)])
QUANTILES = 0.1, 0.5, 0.8

# One residual's loss, and where its derivative jumps.
RESIDUALS = {
    "huber": (
        lambda y, t, w=None: kfac.HuberLoss(y, t, w, 0.8),
        lambda r: np.where(abs(r) <= 0.8, r**2 / 2, 0.8 * abs(r) - 0.32),
        [-0.8, 0.8],
    ),
    "absolute": (
        lambda y, t, w=None: kfac.QuantileLoss(y, t, w),
        lambda r: abs(r) / 2,
        [0.0],
    ),
    "quantile": (
        lambda y, t, w=None: kfac.QuantileLoss(y, t, w, 0.2),
        lambda r: np.where(r > 0, 0.2 * r, -0.8 * r),
        [0.0],
    ),
    "student": (
        lambda y, t, w=None: kfac.StudentTNLL(y, t, w, 3.0, 0.7),
        lambda r: 2 * np.log1p((r / 0.7) ** 2 / 3) + np.log(0.7),
        [0.0],
    ),
    "cauchy": (
        lambda y, t, w=None: kfac.StudentTNLL(y, t, w, 1.0, 2.0),
        lambda r: np.log1p((r / 2) ** 2) + np.log(2),
        [0.0],
    ),
}
LOSSES = pytest.mark.parametrize("case", RESIDUALS.values(), ids=RESIDUALS.keys())


def quadrature(kinks):
    """Points and weights over all numbers; the substitution r = tan(angle) leaves an
    integrand that ends, even of a Cauchy distribution."""
    x, w = np.polynomial.legendre.leggauss(400)
    angles, steps = [], []
    edges = [-np.pi / 2, *np.arctan(kinks), np.pi / 2]
    for a, b in zip(edges[:-1], edges[1:]):
        angles.append((a + b + (b - a) * x) / 2)
        steps.append((b - a) / 2 * w)
    angle, step = np.concatenate(angles), np.concatenate(steps)
    return np.tan(angle), step / np.cos(angle) ** 2


def data(leading):
    return normal(*leading, K, seed=1), normal(*leading, K, seed=2)


#
# Of residuals
#


@LOSSES
@LEADING
def test_values_and_weights(case, leading):
    weights = np.array([0.5, 0.0, 2.0, 1.0, 3.0])[: leading[0]]

    @jax.jit
    def run(y, t, w):
        return case[0](y, t).losses(y, t), case[0](y, t).value, case[0](y, t, w).value

    y, t = data(leading)
    losses, mean, weighted = run(y, t, weights)
    each = case[1](np.asarray(t) - np.asarray(y)).sum(axis=-1)
    assert reference.error(losses, each) < TOLERANCE
    assert reference.error(mean, each.mean()) < TOLERANCE
    means = each.reshape(len(each), -1).mean(axis=1)
    want = (weights * means).sum() / weights.sum()
    assert reference.error(weighted, want) < TOLERANCE
    assert reference.error(mean, want) > 1e-3


@LOSSES
def test_fisher_by_quadrature(case):
    """The second moment of the score, and half of what two densities that are near are
    apart; all of it is a property of the values alone."""
    r, step = quadrature(case[2])
    density = step * np.exp(-case[1](r))
    density = density / density.sum()

    @jax.jit
    def run(r):
        loss = case[0](jnp.zeros((len(r), 1)), r[:, None])
        one = case[0](jnp.ones((1, 1)), None)
        ones = jnp.ones((1, 1))
        return (
            loss.score(r[:, None])[:, 0],
            one.fisher_root(ones),
            one.fisher_product(ones),
        )

    score, root, product = map(np.asarray, run(r))
    assert abs(density @ score) < 1e-6
    fisher = density @ score**2
    assert reference.error(root.item() ** 2, fisher) < 1e-6
    assert reference.error(product.item(), fisher) < 1e-6
    assert reference.error(1.0, fisher) > 0.1


@LOSSES
def test_samples_have_the_distribution(case):
    """By the distribution function; far less would be seen of moments of a Cauchy."""
    r, step = quadrature(case[2])
    order = np.argsort(r)
    density = (step * np.exp(-case[1](r)))[order]
    below = (np.cumsum(density) - density / 2) / density.sum()
    loss = case[0](jnp.full((40_000, 1), 3.0), None)
    sample = np.sort(np.asarray(eqx.filter_jit(loss.sample)(jax.random.key(0))).ravel())
    expected = np.interp(sample - 3, r[order], below)
    apart = np.abs(expected - (np.arange(len(sample)) + 0.5) / len(sample)).max()
    assert apart < 1.95 / len(sample) ** 0.5  # Kolmogorov's, once in a thousand.
    assert np.abs(np.interp(sample, r[order], below) - expected).max() > 0.1


def test_several_quantiles():
    targets = np.random.default_rng(0).exponential(size=4001)

    @jax.jit
    def run(y):
        tiled = jnp.broadcast_to(jax.device_put(targets)[:, None], (4001, K))
        tile = lambda y: jnp.broadcast_to(y[None], (4001, K))
        loss = kfac.QuantileLoss(tile(y), tiled, quantiles=QUANTILES)
        slope = jax.grad(
            lambda y: kfac.QuantileLoss(tile(y), tiled, quantiles=QUANTILES).value
        )
        return slope(y), loss.fisher_product(jnp.ones((4001, K)))[0]

    # Least at the quantiles of the data, and nowhere else.
    best = np.quantile(targets, QUANTILES)
    slope, fisher = map(np.asarray, run(best))
    q = np.array(QUANTILES)
    assert np.abs(slope).max() < 1e-3
    assert np.all(np.asarray(run(best + 0.1)[0]) > 0.01)
    assert np.all(np.asarray(run(best - 0.05)[0]) < -0.003)
    assert reference.error(fisher, q * (1 - q)) < TOLERANCE


def test_of_small_and_of_large_delta():
    """The squared error, and a multiple of the absolute one."""

    @jax.jit
    def run(y, t):
        squared, absolute = kfac.SquaredError(y, t), kfac.QuantileLoss(y, t)
        large, small = (kfac.HuberLoss(y, t, delta=d) for d in (50.0, 1e-5))
        ones = jnp.ones_like(y)
        pairs = [(large, squared, 1.0), (small, absolute, 2e-5)]
        found = []
        for one, other, factor in pairs:
            found += [(one.value, factor * other.value)]
            found += [(one.score(t), factor * other.score(t))]
        found += [(large.fisher_product(ones), ones)]
        found += [(small.fisher_product(ones), 1e-10 * ones)]
        return found

    for got, want in run(*data((5,))):
        assert reference.error(got, want) < 1e-4


def test_outliers():
    """Their gradient is bounded by one, and vanishes in the end by the other."""
    t = np.array([[0.1], [10.0], [1e6]])
    zeros = jnp.zeros((3, 1))
    huber = -np.asarray(kfac.HuberLoss(zeros, t).score(jnp.asarray(t)))
    student = -np.asarray(kfac.StudentTNLL(zeros, t).score(jnp.asarray(t)))
    np.testing.assert_allclose(huber, [[0.1], [1], [1]])
    np.testing.assert_allclose(student, 5 * t / (4 + t**2))
    assert student[2] < 1e-5 < student[0] < student[1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [*RESIDUALS, "ordered"])
def test_low_precision(name, dtype):
    make = ordered_of if name == "ordered" else RESIDUALS[name][0]

    @jax.jit
    def run(y, t):
        y = y.astype(dtype)
        loss, exact = make(y, t), make(y.astype(float), t)
        v = jnp.ones(loss.root_shape)
        both = (
            [loss.fisher_root(v.astype(jnp.float32)), exact.fisher_root(v)],
            [loss.score(loss.targets), exact.score(exact.targets)],
        )
        return loss.value, exact.value, both, loss.sample(jax.random.key(0))

    y = np.sort(np.asarray(normal(5, K)), axis=-1)
    t = np.arange(5) % 4 if name == "ordered" else np.asarray(normal(5, K, seed=1))
    value, exact, both, sample = run(y, t)
    assert value.dtype == jnp.float32
    assert reference.error(value, exact) < 1e-5
    assert np.all(np.isfinite(np.asarray(sample)))
    for got, want in both:
        assert got.dtype == dtype
        epsilon = 8 * float(jnp.finfo(dtype).eps)
        assert reference.error(np.asarray(got, float), want) < epsilon


#
# Of ordered classes
#


def ordered_of(z, t=None, w=None):
    return kfac.OrdinalCrossEntropy(z, t, w)


def probabilities(z):
    """Of one term."""
    below = jnp.concatenate([jnp.zeros(1), jax.nn.sigmoid(z), jnp.ones(1)])
    return below[1:] - below[:-1]


def ordinal(z, t):
    return -jnp.log(probabilities(z)[t])


def increasing(leading, k=K):
    return np.sort(2 * np.asarray(normal(*leading, k, seed=3)), axis=-1)


def matrix(product, loss, size):
    """`[terms, k, size]`: what `product` does to every unit vector of such a size."""
    shape = *loss.leading, size
    columns = jax.vmap(lambda e: product(jnp.broadcast_to(e, shape)))(jnp.eye(size))
    return jnp.moveaxis(columns.reshape(size, -1, columns.shape[-1]), 0, -1)


@LEADING
@pytest.mark.parametrize("k", [1, 2, K])
def test_ordered_classes(leading, k):
    targets = np.random.default_rng(0).integers(k + 1, size=leading)

    @jax.jit
    def run(z, targets):
        loss, untargeted = ordered_of(z, targets), ordered_of(z)
        assert loss.leading == leading
        rows, t = z.reshape(-1, k), targets.reshape(-1)
        p = jax.vmap(probabilities)(rows)
        # Every class's score, and how probable it is.
        each = jax.vmap(jax.jacobian(lambda z: -jnp.log(probabilities(z))))(rows)
        return dict(
            losses=[loss.losses(z, targets).ravel(), jax.vmap(ordinal)(rows, t)],
            scores=[
                loss.score(targets).reshape(-1, k),
                jax.vmap(jax.grad(ordinal))(rows, t),
            ],
            fisher=jnp.einsum("nc,nci,ncj->nij", p, each, each),
            hessian=jax.vmap(jax.hessian(ordinal))(rows, t),
            mean_hessian=jnp.einsum(
                "nc,ncij->nij",
                p,
                jax.vmap(jax.hessian(lambda z: -jnp.log(probabilities(z))))(rows),
            ),
            products=[
                matrix(untargeted.fisher_product, loss, k),
                matrix(loss.hessian_product, loss, k),
            ],
            roots=[
                matrix(untargeted.fisher_root, loss, k + 1),
                matrix(loss.hessian_root, loss, k + 1),
            ],
        )

    found = jax.tree.map(np.asarray, run(increasing(leading, k), targets))
    for got, want in (found["losses"], found["scores"]):
        assert reference.error(got, want) < TOLERANCE
    F, H = found["fisher"], found["hessian"]
    assert reference.error(found["mean_hessian"], F) < TOLERANCE
    for want, product, S in zip((F, H), found["products"], found["roots"]):
        assert reference.error(product, want) < TOLERANCE
        assert reference.error(S @ S.swapaxes(1, 2), want) < TOLERANCE
    # Of two classes, the Hessian does not depend on the one that was seen.
    assert (reference.error(H, F) > 0.1) == (k > 1)


def test_two_ordered_classes_are_logistic():
    @jax.jit
    def run(z, t):
        ours = ordered_of(z, t)
        # The output is the log-odds of the class below.
        logistic = kfac.SigmoidCrossEntropy(z, (1 - t)[:, None])
        ones = jnp.ones_like(z)
        return [
            (ours.value, logistic.value),
            (ours.score(t), logistic.score(logistic.targets)),
            (ours.fisher_product(ones), logistic.fisher_product(ones)),
        ]

    for got, want in run(np.asarray(normal(6, 1)), np.arange(6) % 2):
        assert reference.error(got, want) < TOLERANCE


def test_samples_of_ordered_classes():
    z = increasing((1,))
    loss = ordered_of(jnp.broadcast_to(jnp.asarray(z), (40_000, K)))
    sample = np.asarray(eqx.filter_jit(loss.sample)(jax.random.key(0)))
    found = np.bincount(sample, minlength=K + 1) / len(sample)
    np.testing.assert_allclose(found, probabilities(z[0]), atol=0.01)


def test_hard_numbers_of_ordered_classes():
    """A middle class of probability e^-40, and one between thresholds that are near."""
    z = jnp.asarray([[40.0, 41.0], [-700.0, 700.0], [0.0, 1e-9]])
    loss = ordered_of(z, jnp.array([1, 1, 1]))
    want = [40 - np.log(1 - np.exp(-1)), 0.0, np.log(4e9)]
    np.testing.assert_allclose(loss.losses(z, loss.targets), want, rtol=1e-7, atol=1e-12)
    for root in (loss.fisher_root, loss.hessian_root):
        assert np.all(np.isfinite(np.asarray(root(jnp.ones((3, 3))))))
    assert np.isnan(ordered_of(z[:, ::-1], loss.targets).value)


#
# Of a model
#


def of_model(name):
    """Every output is a prediction, or they are made to increase."""

    def loss_fn(model, x, t):
        z = jax.vmap(model)(x)
        if name == "ordered":
            z = jnp.cumsum(jnp.exp(z), axis=-1)
            return ordered_of(z, jnp.clip(jnp.round(2 * t[:, 0] + 1), 0, K).astype(int))
        return RESIDUALS[name][0](z, t)

    return loss_fn


@pytest.mark.parametrize("name", [*RESIDUALS, "ordered"])
def test_blocks_of_one_example(name):
    """Of one example, a Kronecker block is exact; of several, a full one."""
    model = eqx.nn.MLP(3, K, 4, 1, jnp.tanh, key=jax.random.key(0))

    def run(model, x, t):
        tree = kfac.curvature(of_model(name), kfac.Exact())(model, x, t)
        pairs = zip(model.layers, tree.layers, strict=True)
        matrices = [layer.tag.block.operator(f).as_matrix() for layer, f in pairs]
        operator = kfac.analysis.FisherOperator(of_model(name), kfac.revert(model), x, t)
        return matrices, operator.as_matrix()

    for block, number in ((kfac.Kronecker(), 1), (kfac.Full(), 5)):
        x, t = normal(number, 3, seed=1), normal(number, K, seed=2)
        matrices, exact = eqx.filter_jit(run)(kfac.convert(model, block), x, t)
        exact = np.asarray(exact)
        # In another order of the parameters, the eigenvalues are the same.
        for found, want in zip(matrices, (exact[:16, :16], exact[16:, 16:]), strict=True):
            spectrum = np.linalg.eigvalsh(np.asarray(found))
            assert reference.error(spectrum, np.linalg.eigvalsh(want)) < TOLERANCE


@pytest.mark.parametrize("name", [*RESIDUALS, "ordered"])
def test_training(name):
    x, t = normal(64, 3, seed=1), normal(64, K, seed=2)
    model = kfac.convert(eqx.nn.MLP(3, K, 8, 1, jnp.tanh, key=jax.random.key(0)))
    optimizer, loss_fn = kfac.KFAC(), of_model(name)
    state = eqx.filter_jit(optimizer.init)(model)
    step = eqx.filter_jit(optimizer.step)
    losses = []
    for i in range(60):
        model, state, info = step(loss_fn, model, state, x, t, key=jax.random.key(i))
        losses.append(float(info.loss))
    assert not any(state.faults.as_dict().values())
    assert losses[-1] < losses[0] - 0.1


#
# Those that need no object
#


def test_smooth_labels_are_probabilities():
    """The curvature does not know of them; the gradient does."""

    @jax.jit
    def run(z, classes):
        soft = optax.smooth_labels(jax.nn.one_hot(classes, K), 0.1)
        smooth, hard = (kfac.SoftmaxCrossEntropy(z, t) for t in (soft, classes))
        log_p = jax.nn.log_softmax(z)
        picked = jnp.take_along_axis(log_p, classes[:, None], axis=1)[:, 0]
        want = -0.9 * jnp.mean(picked) - 0.1 * jnp.mean(log_p)
        products = [loss.fisher_product(z) for loss in (smooth, hard)]
        return smooth.value, want, hard.value, products

    value, want, hard, products = run(np.asarray(normal(5, K)), np.arange(5) % K)
    assert reference.error(value, want) < TOLERANCE
    assert reference.error(hard, want) > 1e-3
    assert reference.error(*products) < TOLERANCE


def test_heads_are_an_axis_or_a_sum():
    heads, x = 2, normal(4, 3)
    classes = np.arange(8).reshape(4, heads) % K
    mlp = eqx.nn.MLP(3, heads * K, 4, 1, jnp.tanh, key=jax.random.key(0))
    model = kfac.convert(mlp)

    def logits(model):
        return jax.vmap(model)(x).reshape(4, heads, K)

    def as_axis(model):
        return heads * kfac.SoftmaxCrossEntropy(logits(model), classes)

    def as_sum(model):
        z = logits(model)
        each = [kfac.SoftmaxCrossEntropy(z[:, i], classes[:, i]) for i in range(heads)]
        return sum(each[1:], each[0])

    def mean(model):
        return kfac.SoftmaxCrossEntropy(logits(model), classes)

    one, other, third = (collect(f, kfac.Exact(), model) for f in (as_axis, as_sum, mean))
    for a, b, c in zip(one.layers, other.layers, third.layers, strict=True):
        assert reference.error(reference.kron(a), reference.kron(b)) < TOLERANCE
        assert reference.error(reference.kron(c), reference.kron(b)) > 0.1
    value = eqx.filter_jit(lambda f: f(model).value)
    assert reference.error(value(as_axis), value(as_sum)) < TOLERANCE


class Noisy(eqx.Module):
    """A mean, and one log-variance for all outputs of all examples."""

    mlp: eqx.nn.MLP
    log_variance: kfac.Parameter

    def __call__(self, x):
        mean = self.mlp(x)
        return mean, jnp.broadcast_to(self.log_variance(x), mean.shape)


def noisy(model, x, t):
    return kfac.NormalNLL(*jax.vmap(model)(x), t)


def test_a_shared_variance_is_learnt():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 3))
    t = x @ rng.normal(size=(3, 2)) + 0.2 * rng.normal(size=(512, 2))
    mlp = eqx.nn.MLP(3, 2, 8, 1, jnp.tanh, key=jax.random.key(0))
    model = kfac.convert(Noisy(mlp, kfac.Parameter(jnp.zeros(()))))
    x, t = jnp.asarray(x), jnp.asarray(t)
    curvature = collect(noisy, kfac.Exact(), model, x, t)
    # Two outputs, each of which has the Fisher one half.
    np.testing.assert_allclose(np.ravel(curvature.log_variance.diagonal), [1.0])
    optimizer = kfac.KFAC()
    state = eqx.filter_jit(optimizer.init)(model)
    step = eqx.filter_jit(optimizer.step)
    for i in range(200):
        model, state, info = step(noisy, model, state, x, t, key=jax.random.key(i))
    residual = np.asarray(jax.vmap(model)(x)[0] - t)
    variance = np.exp(float(model.log_variance.value))
    np.testing.assert_allclose(variance, np.mean(residual**2), rtol=0.2)
    assert variance < 0.1


def test_contrasts_are_classes():
    """The logits of an example depend on all of them: random targets are right in the
    mean, the columns of single examples are not, nor the gradients of one row."""
    x = normal(6, 3)
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    def loss_fn(model):
        z = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(z @ jnp.sin(z).T, jnp.arange(6))

    tagged = kfac.convert(model)
    found = collect(loss_fn, kfac.Exact(0), tagged)
    drawn = kfac.MonteCarlo(4000, batch_size=500)
    mean = collect(loss_fn, drawn, tagged, key=jax.random.key(1))
    assert reference.error(reference.kron(mean), reference.kron(found)) < 0.1
    with pytest.raises(ValueError, match="return serves several examples"):
        collect(loss_fn, kfac.Exact(), tagged)
    with pytest.raises(ValueError, match="which axis of the layer .* counts"):
        collect(loss_fn, drawn, kfac.convert(model, kfac.Full()), key=jax.random.key(1))


#
# What is refused
#


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda y: kfac.HuberLoss(y, delta=0.0), "`delta` must be positive"),
        (lambda y: kfac.StudentTNLL(y, scale=-1.0), "`scale` must be positive"),
        (
            lambda y: kfac.StudentTNLL(y, degrees_of_freedom=0),
            "`degrees_of_freedom` must be positive",
        ),
        (lambda y: kfac.QuantileLoss(y, quantiles=1.0), r"must be in \(0, 1\)"),
        (lambda y: kfac.QuantileLoss(y, quantiles=(0.1, 0.9)), "3 outputs, but are 2"),
        (lambda y: kfac.HuberLoss(y).hessian_root(y), "no targets.*Hessian"),
        (lambda y: ordered_of(y).hessian_root(y), "no targets.*Hessian"),
        (lambda y: kfac.StudentTNLL(y, y).hessian_root(y), "has no root"),
        (lambda y: kfac.QuantileLoss(y, y).hessian_root(y), "has no root"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make(jnp.ones((4, K)))


def test_ordered_classes_are_integers():
    with pytest.raises(TypeError, match="integer classes"):
        ordered_of(jnp.ones((4, K)), jnp.ones(4))
