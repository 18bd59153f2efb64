"""Losses: values, scores, Fishers and samples, against formulas and autodiff."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import normal as random_normal, stack


TOLERANCE = 1e-10
K = 3


def classes(rng, leading):
    return jax.device_put(rng.integers(K, size=leading))


def probabilities(rng, leading):
    p = np.exp(rng.normal(size=leading + (K,)))
    return jnp.asarray(p / p.sum(axis=-1, keepdims=True))


def bits(rng, leading):
    return jax.device_put(rng.random(leading + (K,)) < 0.4)


def unit_interval(rng, leading):
    return jax.device_put(rng.random(leading + (K,)))


def vectors(rng, leading):
    return jax.device_put(rng.normal(size=leading + (K,)))


def counts(rng, leading):
    return jax.device_put(rng.poisson(1.5, leading + (K,)))


def amounts(rng, leading):
    return jnp.asarray(3 * rng.random(leading + (K,)))


def squared(z, t):
    return jnp.sum(optax.l2_loss(z, t), axis=-1)


def bernoulli(z, t):
    return jnp.sum(optax.sigmoid_binary_cross_entropy(z, t.astype(z.dtype)), axis=-1)


def poisson(z, t):
    return jnp.sum(jnp.exp(z) - t.astype(z.dtype) * z, axis=-1)


# The loss, its targets, an independent formula for every term, and another for one term.
CASES = {
    "classes": (
        kfac.SoftmaxCrossEntropy,
        classes,
        optax.softmax_cross_entropy_with_integer_labels,
        reference.softmax,
    ),
    "probabilities": (
        kfac.SoftmaxCrossEntropy,
        probabilities,
        optax.softmax_cross_entropy,
        reference.softmax_probabilities,
    ),
    "bits": (kfac.SigmoidCrossEntropy, bits, bernoulli, reference.sigmoid),
    "unit-interval": (
        kfac.SigmoidCrossEntropy,
        unit_interval,
        bernoulli,
        reference.sigmoid,
    ),
    "squared": (kfac.SquaredError, vectors, squared, reference.squared),
    "counts": (kfac.PoissonNLL, counts, poisson, reference.poisson),
    "amounts": (kfac.PoissonNLL, amounts, poisson, reference.poisson),
}
LOSSES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
NATURAL = pytest.mark.parametrize(
    "case",
    [CASES["classes"], CASES["bits"], CASES["squared"], CASES["counts"]],
    ids=["softmax", "sigmoid", "squared", "poisson"],
)
BOUNDED = pytest.mark.parametrize(
    "case",
    [CASES["classes"], CASES["bits"], CASES["squared"]],
    ids=["softmax", "sigmoid", "squared"],
)
LEADING = pytest.mark.parametrize("leading", [(5,), (4, 2)])


def data(case, leading, scale=2):
    """Outputs, and twice targets."""
    rng = np.random.default_rng(0)
    outputs = jnp.asarray(scale * rng.normal(size=leading + (K,)))
    return outputs, case[1](rng, leading), case[1](rng, leading)


def make(case, leading, weights=None):
    return case[0](*data(case, leading)[:2], weights)


def hessians(case, loss):
    """`[terms, k, k]`, by autodiff of one term at a time."""
    z = loss.outputs.reshape(-1, K)
    targets = loss.targets.reshape((len(z),) + loss.targets.shape[len(loss.leading) :])
    return reference.hessians(case[3], z, targets)


def dense(product, loss):
    """`[terms, k, r]`: what `product` does to every unit vector."""
    r = loss.root_shape[-1]
    columns = jax.vmap(lambda e: product(jnp.broadcast_to(e, loss.root_shape)))(
        jnp.eye(r)
    )
    return jnp.moveaxis(columns.reshape(r, -1, K), 0, -1)


@ft.cache
def facts(case, leading):
    """What a loss says of itself, and what is expected of it."""

    @jax.jit
    def run(outputs, targets, other):
        loss, untargeted = case[0](outputs, targets), case[0](outputs)
        weighted = case[0](outputs, targets, jnp.full(leading[:1], 7.0))
        assert loss.leading == leading
        total = lambda targets: lambda z: jnp.sum(case[2](z, targets))
        names = "fisher_root", "fisher_product", "hessian_root", "hessian_product"
        return dict(
            terms=case[2](outputs, targets),
            losses=loss.losses(outputs, targets),
            value=loss.value,
            total=loss.total,
            count=loss.count,
            slopes=[jax.grad(total(t))(outputs) for t in (targets, other)],
            scores=[loss.score(targets), untargeted.score(other)],
            weighted_score=weighted.score(targets),
            hessians=hessians(case, loss),
            untargeted=dense(untargeted.hessian_product, untargeted),
            **{name: dense(getattr(loss, name), loss) for name in names},
        )

    return jax.tree.map(np.asarray, run(*data(case, leading)))


#
# Values and gradients
#


@LOSSES
@LEADING
def test_value(case, leading):
    found = facts(case, leading)
    terms = found["terms"]
    assert terms.shape == leading
    assert reference.error(found["losses"], terms) < TOLERANCE
    assert reference.error(found["value"], np.mean(terms)) < TOLERANCE
    assert reference.error(found["total"], np.sum(terms)) < TOLERANCE
    assert found["count"] == terms.size


@LOSSES
@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=["examples", "terms"])
@pytest.mark.parametrize("dtype", [bool, int, float])
def test_weighted_value(case, shape, dtype):
    weights = np.random.default_rng(1).integers(1, 4, size=shape)
    weights[1] = 0
    weights = weights.astype(dtype)
    loss = make(case, (4, 2), jnp.asarray(weights))
    terms = facts(case, (4, 2))["terms"]
    w = np.asarray(weights, float).reshape(shape + (1,) * (2 - len(shape)))
    w = np.broadcast_to(w, (4, 2))
    assert float(loss.count) == w.sum()
    expected = (w * terms).sum() / w.sum()
    assert reference.error(loss.value, expected) < TOLERANCE
    assert reference.error(terms.mean(), expected) > 1e-3


@LOSSES
@LEADING
def test_score(case, leading):
    found = facts(case, leading)
    # Of the sum: never divided by the number of terms, nor weighted.
    (score, other), (slope, at_other) = found["scores"], found["slopes"]
    assert reference.error(score, slope) < TOLERANCE
    assert reference.error(found["weighted_score"], score) < TOLERANCE
    # At any targets, and without any of its own.
    assert reference.error(other, at_other) < TOLERANCE


@LOSSES
def test_gradient_of_value(case):
    @jax.jit
    def run(outputs, targets, weights):
        ours = lambda z: case[0](z, targets, weights).value
        terms = lambda z: jnp.sum(weights * case[2](z, targets)) / jnp.sum(weights)
        return jax.grad(ours)(outputs), jax.grad(terms)(outputs)

    outputs, targets, _ = data(case, (4,))
    weights = jax.device_put(np.array([1.0, 0.0, 2.5, 0.5]))
    assert reference.error(*run(outputs, targets, weights)) < TOLERANCE


#
# The output Fisher
#


@LOSSES
@LEADING
def test_fisher_is_the_hessian(case, leading):
    found = facts(case, leading)
    H, S = found["hessians"], found["fisher_root"]
    assert reference.error(found["fisher_product"], H) < TOLERANCE
    assert reference.error(S @ S.swapaxes(1, 2), H) < TOLERANCE
    # Natural parameters: the Hessian does not depend on the targets.
    assert reference.error(found["hessian_product"], H) < TOLERANCE
    assert reference.error(found["hessian_root"], S) < TOLERANCE
    assert reference.error(found["untargeted"], H) < TOLERANCE


@NATURAL
def test_fisher_needs_no_targets_and_knows_no_weights(case):
    names = "fisher_root", "fisher_product", "hessian_root", "hessian_product"

    @jax.jit
    def run(outputs, targets, weights):
        both = case[0](outputs, weights=weights), case[0](outputs, targets)
        v = jax.device_put(np.random.default_rng(1).normal(size=both[0].root_shape))
        return [[getattr(loss, name)(v) for loss in both] for name in names]

    outputs, targets, _ = data(case, (4,))
    for out, expected in run(outputs, targets, jax.device_put(np.arange(4.0))):
        assert reference.error(out, expected) < TOLERANCE


@NATURAL
def test_sampled_scores_have_the_moments(case):
    # E[g] = 0 and E[g gᵀ] = H: the targets really are samples of the distribution.
    number = 20_000

    @jax.jit
    def run(outputs, targets):
        loss = case[0](outputs, targets)
        scores = jax.vmap(lambda key: loss.score(loss.sample(key)))
        keys = jax.random.split(jax.random.key(0), number)
        return scores(keys), hessians(case, loss)

    g, H = map(np.asarray, run(*data(case, (2,))[:2]))
    second = np.einsum("sni,snj->nij", g, g) / number
    assert np.abs(g.mean(axis=0)).max() < 5 * np.sqrt(H.max() / number)
    assert reference.error(second, H) < 0.05


@NATURAL
def test_samples(case):
    draw = eqx.filter_jit(lambda loss, key: loss.sample(key))
    loss, key = make(case, (4, 2)), jax.random.key(0)
    sample = np.asarray(draw(loss, key))
    assert sample.shape == loss.targets.shape
    assert np.all(sample == draw(loss, key))
    assert not np.all(sample == draw(loss, jax.random.key(1)))
    # Terms are independent: with equal outputs everywhere, samples still differ.
    same = draw(case[0](jax.device_put(np.zeros((64, K)))), key)
    assert len(np.unique(np.asarray(same), axis=0)) > 1


#
# Terms that count for nothing
#


def normal(outputs, targets=None, weights=None):
    return kfac.NormalNLL(*jnp.split(outputs, [K], axis=-1), targets, weights)


def ordered(z, targets=None, weights=None):
    """Any outputs, made to increase."""
    z = jnp.cumsum(jnp.exp(z), axis=-1)
    return kfac.OrdinalCrossEntropy(z, targets, weights)


def levels(rng, leading):
    return jax.device_put(rng.integers(K + 1, size=leading))


class Waiting(kfac.AbstractLoss):
    """Exponentially distributed times, by the logarithm of their rate."""

    log_rates: jax.Array
    targets: jax.Array
    weights: jax.Array

    outputs = property(lambda self: self.log_rates)
    root_shape = property(lambda self: self.log_rates.shape)

    def losses(self, outputs, targets):
        return jnp.sum(jnp.exp(outputs) * targets - outputs, axis=-1)

    def sample(self, key):
        return jax.random.exponential(key, self.root_shape) * jnp.exp(-self.log_rates)

    def fisher_root(self, v):
        return v


class Summed(Waiting):
    def losses(self, outputs, targets):
        return jnp.sum(jnp.exp(outputs) * targets - outputs)


class Flat(Waiting):
    """Draws one time for every term, which broadcasts to all of the outputs."""

    def sample(self, key):
        return super().sample(key).mean(-1)[:, None, None]


class Short(Waiting):
    def fisher_root(self, v):
        return v[..., :1]


class Several(Waiting):
    def fisher_root(self, v):
        return v, v


@pytest.mark.parametrize(
    "loss, fisher, method",
    [
        (Summed, kfac.Exact(), "`Summed.losses` must"),
        (Summed, kfac.MonteCarlo(), "`Summed.losses` must"),
        (Flat, kfac.MonteCarlo(), "see that `Flat.sample` returns"),
        (Short, kfac.Exact(), "`Short.fisher_root` .* must .* returned \\(6, 1\\)"),
        (Short, kfac.CurvatureProp(), "`Short.fisher_root` .* must"),
        (Several, kfac.Exact(), "returned \\(6, 3\\) and \\(6, 3\\)"),
    ],
)
def test_a_loss_of_ones_own_of_the_wrong_shape(loss, fisher, method):
    model = kfac.convert(eqx.nn.Linear(2, K, key=jax.random.key(0)))
    x, key = jnp.ones((6, 2)), jax.random.key(1)
    times = jnp.ones((6, K))

    def loss_fn(model, times):
        return loss(jax.vmap(model)(x), times, jnp.ones(6))

    optimizer = kfac.KFAC(fisher=fisher)
    state = optimizer.init(model)
    allowed = jax.numpy_rank_promotion("allow")  # As it is, unless one forbids it.
    with allowed, pytest.raises(ValueError, match=method):
        optimizer.step(loss_fn, model, state, times, key=key)


# The loss, of how many outputs, its targets, and those that are none.
absent = {
    "classes": (kfac.SoftmaxCrossEntropy, K, classes, [-1, -100, K, 255]),
    "probabilities": (kfac.SoftmaxCrossEntropy, K, probabilities, [jnp.nan, jnp.inf]),
    "bits": (kfac.SigmoidCrossEntropy, K, unit_interval, [jnp.nan]),
    "squared": (kfac.SquaredError, K, vectors, [jnp.nan, -jnp.inf]),
    "amounts": (kfac.PoissonNLL, K, amounts, [jnp.nan]),
    "normal": (normal, 2 * K, vectors, [jnp.nan]),
    "huber": (kfac.HuberLoss, K, vectors, [jnp.nan]),
    "student": (kfac.StudentTNLL, K, vectors, [jnp.nan, jnp.inf]),
    "ordered": (ordered, K, levels, [-1, -100, K + 1, 255]),
    "a loss of one's own": (Waiting, K, amounts, [jnp.nan]),
}


def absent_cases():
    for name, (make_loss, size, targets, bad) in absent.items():
        for value in bad:
            yield pytest.param(make_loss, size, targets, value, id=f"{name} {value}")


@eqx.filter_jit
def everything(make_loss, z, targets, weights):
    """What is asked of a loss, times the weights where that is for its user to do."""

    def value(z):
        return make_loss(z, targets, weights).value

    loss = make_loss(z, targets, weights)
    ones = jax.tree.map(jnp.ones_like, loss.outputs)
    per_term = [loss.score(loss.targets), loss.hessian_product(ones)]
    per_term += [loss.fisher_root(jnp.ones(loss.root_shape))]
    w = loss.term_weights[..., None]
    weighted = jax.tree.map(lambda a: w * a, per_term)
    return [value(z), jax.grad(value)(z), jax.hessian(value)(z), *weighted]


@pytest.mark.parametrize("make_loss, size, targets, bad", list(absent_cases()))
@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=["examples", "terms"])
def test_targets_of_weight_zero_may_be_anything(make_loss, size, targets, bad, shape):
    rng = np.random.default_rng(0)
    z, good = jax.device_put(rng.normal(size=(4, 2, size))), targets(rng, (4, 2))
    other, weights = np.array(good), rng.uniform(size=shape)
    other[1], weights[1] = bad, 0.0
    other, some = jnp.asarray(other), np.where(weights == 0, 0.1, weights)
    want = everything(make_loss, z, good, jnp.asarray(weights))
    got = everything(make_loss, z, other, jnp.asarray(weights))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert reference.error(a, b) < TOLERANCE
    # Those that have a weight may not.
    for weights in (jnp.asarray(some), None):
        value, slope, *_ = everything(make_loss, z, other, weights)
        assert not np.isfinite(value)
        assert not np.all(np.isfinite(slope))


def test_classes_that_there_are_not():
    @jax.jit
    def run(z, labels):
        losses = kfac.SoftmaxCrossEntropy(z).losses(z, labels)
        return losses, optax.softmax_cross_entropy_with_integer_labels(z, labels)

    losses, expected = map(np.asarray, run(random_normal(4, K), np.array([0, 1, 2, -1])))
    assert np.array_equal(np.isnan(losses), [False, False, False, True])
    assert reference.error(losses[:3], expected[:3]) < TOLERANCE


#
# Several draws
#


@LEADING
def test_probabilities_that_do_not_add_up_to_one(leading):
    number = 20_000

    @jax.jit
    def run(z, targets):
        loss = kfac.SoftmaxCrossEntropy(z, targets)
        one = kfac.SoftmaxCrossEntropy(z, targets / targets.sum(-1, keepdims=True))
        scores = jax.vmap(lambda key: loss.score(loss.sample(key)))
        keys = jax.random.split(jax.random.key(0), number)
        products = loss.fisher_product, loss.hessian_product
        return (
            hessians(CASES["probabilities"], loss),
            dense(loss.fisher_root, loss),
            [dense(product, loss) for product in products],
            dense(one.fisher_product, one),
            scores(keys).reshape(number, -1, K),
            loss.sample(keys[0]),
        )

    rng = np.random.default_rng(0)
    z, targets = rng.normal(size=leading + (K,)), 4 * rng.random(leading + (K,))
    H, S, products, of_one, g, sample = jax.tree.map(np.asarray, run(z, targets))
    for matrix in (S @ S.swapaxes(1, 2), *products):
        assert reference.error(matrix, H) < TOLERANCE
    assert reference.error(of_one, H) > 0.1
    # Samples have as many draws as the targets, and their scores the right covariance.
    assert np.abs(g.mean(axis=0)).max() < 0.05
    assert reference.error(np.einsum("sni,snj->nij", g, g) / number, H) < 0.05
    assert reference.error(sample.sum(-1), targets.sum(-1)) < TOLERANCE


#
# Numbers that are hard
#


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_extreme_rates(dtype):
    @jax.jit
    def run(eta, targets):
        loss = kfac.PoissonNLL(eta, targets)
        keys = jax.random.split(jax.random.key(0), 4000)
        root = loss.fisher_root(jnp.ones_like(eta))
        samples = jax.vmap(loss.sample)(keys)
        return loss.value, root, loss.hessian_product(eta), samples[:, 0]

    eta = np.array([[-80.0, 80.0, 14.0]], dtype)
    found = run(eta, np.array([[0, 3, 1_000_000]]))
    value, root, product, samples = map(np.asarray, found)
    rate = np.exp(np.asarray(eta, np.float64))
    epsilon = 200 * jnp.finfo(dtype).eps
    expected = np.sum(rate - np.array([0.0, 3.0, 1e6]) * eta)
    assert reference.error(value, expected) < epsilon
    np.testing.assert_allclose(root, np.sqrt(rate), rtol=epsilon)
    np.testing.assert_allclose(product, rate * eta, rtol=epsilon)
    # Large counts: the mean, and the variance that the Fisher is.
    assert samples.dtype == dtype and np.all(np.isfinite(samples))
    z = (samples.astype(np.float64)[:, 2] - rate[0, 2]) / np.sqrt(rate[0, 2])
    assert abs(z.mean()) < 0.1 and abs(z.std() - 1) < 0.05
    assert np.all(samples[:, 0] == 0)


def test_a_rate_of_zero():
    @jax.jit
    def run(outputs, targets):
        loss = kfac.PoissonNLL(outputs, targets)
        sample, product = loss.sample(jax.random.key(0)), loss.fisher_product
        return loss.value, loss.score(targets), sample, product(jnp.ones((1, K)))

    found = run(np.array([[-np.inf, 0.0, 1.0]]), np.array([[0, 1, 2]]))
    value, score, sample, product = map(np.asarray, found)
    assert reference.error(value, 1 + np.e - 2) < TOLERANCE
    assert reference.error(score, np.array([[0, 0, np.e - 2]])) < TOLERANCE
    assert np.all(sample[:, 0] == 0)
    assert reference.error(product, np.exp([[-np.inf, 0, 1]])) < TOLERANCE


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_poisson_samples_with_any_key(impl):
    # Near the change from counting to a Gaussian, too.
    eta = np.log([[3.0, 9_990.0, 10_010.0]])
    loss = kfac.PoissonNLL(jax.device_put(np.broadcast_to(eta, (4000, 3))))
    samples = np.asarray(eqx.filter_jit(loss.sample)(jax.random.key(0, impl=impl)))
    z = (samples - np.exp(eta)) / np.exp(eta / 2)
    assert np.abs(z.mean(axis=0)).max() < 0.1
    assert np.abs(z.std(axis=0) - 1).max() < 0.05


@BOUNDED
@pytest.mark.parametrize("size", [40.0, 1e3])
def test_extreme_outputs(case, size):
    outputs = size * np.array([[1.0, -1.0, 0.5], [-1.0, 0.0, 1.0]])
    *numbers, expected = extreme(case, jnp.asarray(outputs), data(case, (2,))[1])
    assert all(np.all(np.isfinite(x)) for x in numbers)
    np.testing.assert_allclose(numbers[0], expected, rtol=1e-10, atol=1e-10)


@eqx.filter_jit
def extreme(case, outputs, targets):
    loss = case[0](outputs, targets)
    numbers = loss.value, loss.score(targets), loss.fisher_product(jnp.ones((2, K)))
    return *numbers, jnp.mean(case[2](outputs, targets))


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_impossible_classes(soft):
    # A logit of -inf takes a class away (an illegal action, say).
    @jax.jit
    def run(logits, targets):
        loss = kfac.SoftmaxCrossEntropy(logits, targets)
        return loss.value, loss.score(targets), dense(loss.fisher_product, loss)

    logits = np.array([[1.0, -np.inf, 0.5], [-np.inf, 2.0, 1.0]])
    t = np.array([[1.0, 0.0, 0.0], [0.0, 0.3, 0.7]])
    t = t if soft else np.eye(K)[np.argmax(t, axis=-1)]
    value, score, product = run(logits, t if soft else np.argmax(t, axis=-1))
    p = np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    expected = -np.sum(t[t > 0] * np.log(p[t > 0])) / 2
    assert reference.error(score, p - t) < TOLERANCE
    assert reference.error(value, expected) < TOLERANCE
    H = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    assert reference.error(product, H) < TOLERANCE


def test_sigmoid_fisher_does_not_cancel():
    # p (1 - p) of a logit of 40 is e^-40, although 1 - p rounds to zero.
    z = np.array([[40.0, -40.0, 700.0]])
    root = kfac.SigmoidCrossEntropy(jnp.asarray(z)).fisher_root(jnp.ones((1, 3)))
    assert reference.error(root, np.exp(-np.abs(z) / 2)) < TOLERANCE


@NATURAL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_low_precision(case, dtype):
    @jax.jit
    def run(outputs, targets):
        outputs = outputs.astype(dtype)
        targets = targets.astype(dtype) if targets.dtype == jnp.float64 else targets
        wide = targets.astype(float) if targets.dtype == dtype else targets
        loss, exact = case[0](outputs, targets), case[0](outputs.astype(float), wide)
        v = jnp.ones((5, K))
        return (
            [loss.value, exact.value],
            [loss.fisher_root(v.astype(jnp.float32)), exact.fisher_root(v)],
            [loss.score(targets), exact.score(wide)],
        )

    (value, exact), *pairs = run(*data(case, (5,), scale=1)[:2])
    # Computed in at least float32, handed back in the type of the outputs.
    assert value.dtype == jnp.float32
    assert reference.error(value, exact) < 1e-5
    for got, want in pairs:
        assert got.dtype == dtype
        epsilon = 4 * float(jnp.finfo(dtype).eps)
        assert reference.error(np.asarray(got, float), want) < epsilon


@NATURAL
def test_low_precision_fisher_product(case):
    @jax.jit
    def run(outputs, v):
        outputs, v = outputs.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
        exact = case[0](outputs.astype(float)).fisher_product(v.astype(float))
        return case[0](outputs).fisher_product(v), exact

    product, exact = run(random_normal(5, K, seed=1), random_normal(5, K, seed=2))
    assert product.dtype == jnp.bfloat16
    assert reference.error(np.asarray(product, float), exact) < 0.03


#
# Sums
#


def test_sums_of_objectives():
    a, b = make(CASES["classes"], (4,)), make(CASES["squared"], (6,))
    value = a.value + 0.5 * b.value
    l2 = kfac.L2({"w": jnp.arange(4.0), "n": 3, "none": None}, 0.1)
    assert reference.error((a + 0.5 * b).value, value) < TOLERANCE
    assert reference.error((a + b / 2).value, value) < TOLERANCE
    assert reference.error(sum([a, b * 0.5]).value, value) < TOLERANCE
    assert reference.error((2 * (a + 0.5 * b)).value, 2 * value) < TOLERANCE
    assert reference.error((jnp.array(2.0) + a + 0.5 * b).value, 2 + value) < TOLERANCE
    assert reference.error((1 + a + 0.5 * b).value, 1 + value) < TOLERANCE
    assert reference.error(l2.value, 0.05 * 14.0) < TOLERANCE
    assert reference.error((a + 0.5 * b + l2).value, value + 0.7) < TOLERANCE
    assert reference.error((a * jnp.array(3.0)).value, 3 * a.value) < TOLERANCE
    assert reference.error((jnp.array(3.0) * a).value, 3 * a.value) < TOLERANCE


def test_difference_of_penalties():
    # Entropy bonuses are subtracted.
    a = make(CASES["classes"], (4,))
    assert reference.error((a - 0.25).value, a.value - 0.25) < TOLERANCE
    assert reference.error((a - jnp.array(0.25)).value, a.value - 0.25) < TOLERANCE


@pytest.mark.parametrize("coefficient", [-1, -0.5])
def test_negative_coefficient(coefficient):
    loss = make(CASES["classes"], (4,))
    with pytest.raises(ValueError, match="not negative"):
        coefficient * loss


def test_only_scalars_add():
    loss = make(CASES["classes"], (4,))
    with pytest.raises(ValueError, match="jnp.mean"):
        loss + jnp.ones(3)


#
# Misuse
#


@NATURAL
def test_value_needs_targets(case):
    with pytest.raises(ValueError, match="no targets"):
        case[0](jnp.ones((4, K))).value


@NATURAL
@pytest.mark.parametrize(
    "outputs, error, match",
    [
        (jnp.ones((4, K), int), TypeError, "floating"),
        (jnp.ones(4), ValueError, r"\[:, None\]"),
        (jnp.ones(()), ValueError, "batch"),
        (jnp.ones((0, K)), ValueError, "empty batch"),
    ],
    ids=["integer", "vector", "scalar", "empty"],
)
def test_wrong_outputs(case, outputs, error, match):
    with pytest.raises(error, match=match):
        case[0](outputs)


@NATURAL
@pytest.mark.parametrize("shape", [(5, K), (4, K + 1), (4, 1, K), (K,)])
def test_wrong_targets(case, shape):
    # Nothing broadcasts: `[batch]` against `[batch, 1]` is everybody's bug.
    with pytest.raises(ValueError, match="targets must have shape"):
        case[0](jnp.ones((4, K)), jnp.ones(shape))


def test_wrong_types_of_targets():
    with pytest.raises(ValueError, match="targets must have shape"):
        kfac.SoftmaxCrossEntropy(jnp.ones((4, K)), jnp.ones((4, 1), int))
    with pytest.raises(TypeError, match="integer classes or floating"):
        kfac.SoftmaxCrossEntropy(jnp.ones((4, K)), jnp.ones((4, K), bool))


class NotSummed(kfac.SquaredError):
    """A mistake in a loss of one's own: one number for each output, not for each term."""

    def losses(self, outputs, targets):
        return 0.5 * (outputs - targets) ** 2


@pytest.mark.parametrize("weights", [None, np.ones(K)])
def test_losses_that_are_not_summed(weights):
    with pytest.raises(ValueError, match=r"NotSummed.losses.*\(3,\).*\(3, 3\).*Sum"):
        NotSummed(jnp.ones((K, K)), jnp.zeros((K, K)), weights=weights).value


@NATURAL
@pytest.mark.parametrize("shape", [(), (5,), (2,), (4, K), (4, 2, 1)])
def test_wrong_weights(case, shape):
    with pytest.raises(ValueError, match="weights must have the shape"):
        case[0](jnp.ones((4, 2, K)), weights=jnp.ones(shape))


@NATURAL
def test_a_loss_is_a_pytree(case):
    loss = make(case, (4,), jax.device_put(np.array([1.0, 2.0, 0.0, 1.0])))

    @eqx.filter_jit
    def run(given, stacked):
        return given.value, eqx.filter_vmap(lambda m: m.value)(stacked), loss.value

    value, values, expected = run(loss, stack([loss, loss]))
    assert reference.error(value, expected) < 1e-12
    assert reference.error(values, np.stack([expected] * 2)) < TOLERANCE
