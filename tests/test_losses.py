"""Losses: values, scores, Fishers and samples, against formulas and autodiff."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from . import reference


TOLERANCE = 1e-10
K = 3


def classes(key, leading):
    return jax.random.randint(key, leading, 0, K)


def probabilities(key, leading):
    return jax.nn.softmax(jax.random.normal(key, leading + (K,)))


def bits(key, leading):
    return jax.random.bernoulli(key, 0.4, leading + (K,))


def unit_interval(key, leading):
    return jax.random.uniform(key, leading + (K,))


def vectors(key, leading):
    return jax.random.normal(key, leading + (K,))


def counts(key, leading):
    return jax.random.poisson(key, 1.5, leading + (K,))


def amounts(key, leading):
    return jax.random.uniform(key, leading + (K,), maxval=3.0)


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


def make(case, key, leading, weights=None):
    keys = jax.random.split(key)
    outputs = 2 * jax.random.normal(keys[0], leading + (K,))
    return case[0](outputs, case[1](keys[1], leading), weights)


#
# Values and gradients
#


@LOSSES
@LEADING
def test_value(case, leading, getkey):
    loss = make(case, getkey(), leading)
    terms = case[2](loss.outputs, loss.targets)
    assert terms.shape == leading
    assert reference.error(loss.losses(loss.outputs, loss.targets), terms) < TOLERANCE
    assert reference.error(loss.value, jnp.mean(terms)) < TOLERANCE
    assert reference.error(loss.total, jnp.sum(terms)) < TOLERANCE
    assert loss.count == terms.size


@LOSSES
@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=["examples", "terms"])
@pytest.mark.parametrize("dtype", [bool, int, float])
def test_weighted_value(case, shape, dtype, getkey):
    weights = jax.random.randint(getkey(), shape, 1, 4).at[1].set(0).astype(dtype)
    loss = make(case, getkey(), (4, 2), weights)
    terms = np.asarray(case[2](loss.outputs, loss.targets))
    w = np.asarray(weights, float).reshape(shape + (1,) * (2 - len(shape)))
    w = np.broadcast_to(w, (4, 2))
    assert float(loss.count) == w.sum()
    expected = (w * terms).sum() / w.sum()
    assert reference.error(loss.value, expected) < TOLERANCE
    assert reference.error(terms.mean(), expected) > 1e-3


@LOSSES
@LEADING
def test_score(case, leading, getkey):
    loss = make(case, getkey(), leading)
    total = lambda z: jnp.sum(case[2](z, loss.targets))
    score = loss.score(loss.targets)
    # Of the sum: never divided by the number of terms, nor weighted.
    assert reference.error(score, jax.grad(total)(loss.outputs)) < TOLERANCE
    weighted = case[0](loss.outputs, loss.targets, jnp.full(leading[:1], 7.0))
    assert reference.error(weighted.score(loss.targets), score) < TOLERANCE
    # At any targets, and without any of its own.
    other = case[1](getkey(), leading)
    untargeted = case[0](loss.outputs)
    expected = jax.grad(lambda z: jnp.sum(case[2](z, other)))(loss.outputs)
    assert reference.error(untargeted.score(other), expected) < TOLERANCE


@LOSSES
def test_gradient_of_value(case, getkey):
    weights = jnp.array([1.0, 0.0, 2.5, 0.5])
    loss = make(case, getkey(), (4,), weights)

    def value(outputs):
        return case[0](outputs, loss.targets, weights).value

    terms = lambda z: jnp.sum(weights * case[2](z, loss.targets)) / jnp.sum(weights)
    gradient = jax.grad(value)(loss.outputs)
    assert reference.error(gradient, jax.grad(terms)(loss.outputs)) < TOLERANCE


#
# The output Fisher
#


def hessians(case, loss):
    """`[terms, k, k]`, by autodiff of one term at a time."""
    z = loss.outputs.reshape(-1, K)
    targets = loss.targets.reshape((len(z),) + loss.targets.shape[len(loss.leading) :])
    return np.asarray(reference.hessians(case[3], z, targets))


def dense(product, loss):
    """`[terms, k, r]`: what `product` does to every unit vector."""
    r = loss.root_shape[-1]
    columns = [product(jnp.broadcast_to(e, loss.root_shape)) for e in jnp.eye(r)]
    return np.stack([np.asarray(c).reshape(-1, K) for c in columns], axis=-1)


@LOSSES
@LEADING
def test_fisher_is_the_hessian(case, leading, getkey):
    loss = make(case, getkey(), leading)
    H = hessians(case, loss)
    S = dense(loss.fisher_root, loss)
    assert loss.leading == leading
    assert reference.error(dense(loss.fisher_product, loss), H) < TOLERANCE
    assert reference.error(S @ S.swapaxes(1, 2), H) < TOLERANCE
    # Natural parameters: the Hessian does not depend on the targets.
    assert reference.error(dense(loss.hessian_product, loss), H) < TOLERANCE
    assert reference.error(dense(loss.hessian_root, loss), S) < TOLERANCE
    untargeted = case[0](loss.outputs)
    assert reference.error(dense(untargeted.hessian_product, loss), H) < TOLERANCE


@NATURAL
def test_fisher_needs_no_targets_and_knows_no_weights(case, getkey):
    loss = make(case, getkey(), (4,))
    weighted = case[0](loss.outputs, weights=jnp.array([0.0, 1.0, 2.0, 3.0]))
    v = jax.random.normal(getkey(), loss.root_shape)
    for name in ("fisher_root", "fisher_product", "hessian_root", "hessian_product"):
        out, expected = getattr(weighted, name)(v), getattr(loss, name)(v)
        assert reference.error(out, expected) < TOLERANCE


@NATURAL
def test_sampled_scores_have_the_moments(case, getkey):
    # E[g] = 0 and E[g gᵀ] = H: the targets really are samples of the distribution.
    loss = make(case, getkey(), (2,))
    number = 20_000

    @jax.vmap
    def scores(key):
        return loss.score(loss.sample(key))

    g = np.asarray(jax.jit(scores)(jax.random.split(getkey(), number)))
    H = hessians(case, loss)
    second = np.einsum("sni,snj->nij", g, g) / number
    assert np.abs(g.mean(axis=0)).max() < 5 * np.sqrt(H.max() / number)
    assert reference.error(second, H) < 0.05


@NATURAL
def test_samples(case, getkey):
    loss = make(case, getkey(), (4, 2))
    sample, key = loss.sample(jax.random.key(0)), jax.random.key(1)
    assert sample.shape == case[1](getkey(), (4, 2)).shape
    assert jnp.all(sample == loss.sample(jax.random.key(0)))
    assert not jnp.all(sample == loss.sample(key))
    # Terms are independent: with equal outputs everywhere, samples still differ.
    same = case[0](jnp.zeros((64, K))).sample(key)
    assert len(np.unique(np.asarray(same), axis=0)) > 1


#
# Terms that count for nothing
#


def normal(outputs, targets=None, weights=None):
    return kfac.NormalNLL(*jnp.split(outputs, [K], axis=-1), targets, weights)


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


# The loss, of how many outputs, its targets, and those that are none.
absent = {
    "classes": (kfac.SoftmaxCrossEntropy, K, classes, [-1, -100, K, 255]),
    "probabilities": (kfac.SoftmaxCrossEntropy, K, probabilities, [jnp.nan, jnp.inf]),
    "bits": (kfac.SigmoidCrossEntropy, K, unit_interval, [jnp.nan]),
    "squared": (kfac.SquaredError, K, vectors, [jnp.nan, -jnp.inf]),
    "amounts": (kfac.PoissonNLL, K, amounts, [jnp.nan]),
    "normal": (normal, 2 * K, vectors, [jnp.nan]),
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
def test_targets_of_weight_zero_may_be_anything(
    make_loss, size, targets, bad, shape, getkey
):
    z = jax.random.normal(getkey(), (4, 2, size))
    good = targets(getkey(), (4, 2))
    weights = jax.random.uniform(getkey(), shape).at[1].set(0.0)
    want = everything(make_loss, z, good, weights)
    got = everything(make_loss, z, good.at[1].set(bad), weights)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert reference.error(a, b) < TOLERANCE
    # Those that have a weight may not.
    for weights in (weights.at[1].set(0.1), None):
        value, slope, *_ = everything(make_loss, z, good.at[1].set(bad), weights)
        assert not jnp.isfinite(value)
        assert not jnp.all(jnp.isfinite(slope))


def test_classes_that_there_are_not(getkey):
    z, labels = jax.random.normal(getkey(), (4, K)), jnp.array([0, 1, 2, -1])
    losses = kfac.SoftmaxCrossEntropy(z).losses(z, labels)
    expected = optax.softmax_cross_entropy_with_integer_labels(z, labels)
    assert jnp.array_equal(jnp.isnan(losses), jnp.array([False, False, False, True]))
    assert reference.error(losses[:3], expected[:3]) < TOLERANCE


#
# Several draws
#


@LEADING
def test_probabilities_that_do_not_add_up_to_one(leading, getkey):
    z = jax.random.normal(getkey(), leading + (K,))
    targets = jax.random.uniform(getkey(), leading + (K,), maxval=4.0)
    loss = kfac.SoftmaxCrossEntropy(z, targets)
    H = hessians(CASES["probabilities"], loss)
    S = dense(loss.fisher_root, loss)
    for matrix in (S @ S.swapaxes(1, 2), dense(loss.fisher_product, loss)):
        assert reference.error(matrix, H) < TOLERANCE
    assert reference.error(dense(loss.hessian_product, loss), H) < TOLERANCE
    one = kfac.SoftmaxCrossEntropy(z, targets / targets.sum(-1, keepdims=True))
    assert reference.error(dense(one.fisher_product, one), H) > 0.1
    # Samples have as many draws as the targets, and their scores the right covariance.
    scores = jax.jit(jax.vmap(lambda key: loss.score(loss.sample(key))))
    g = np.asarray(scores(jax.random.split(getkey(), 20_000))).reshape(20_000, -1, K)
    assert np.abs(g.mean(axis=0)).max() < 0.05
    assert reference.error(np.einsum("sni,snj->nij", g, g) / 20_000, H) < 0.05
    assert reference.error(loss.sample(getkey()).sum(-1), targets.sum(-1)) < TOLERANCE


#
# Numbers that are hard
#


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_extreme_rates(dtype, getkey):
    eta = jnp.array([[-80.0, 80.0, 14.0]], dtype)
    loss = kfac.PoissonNLL(eta, jnp.array([[0, 3, 1_000_000]]))
    rate = np.exp(np.asarray(eta, np.float64))
    epsilon = 200 * jnp.finfo(dtype).eps
    expected = np.sum(rate - np.array([0.0, 3.0, 1e6]) * np.asarray(eta))
    assert reference.error(loss.value, expected) < epsilon
    root, product = loss.fisher_root(jnp.ones_like(eta)), loss.hessian_product(eta)
    np.testing.assert_allclose(root, np.sqrt(rate), rtol=epsilon)
    np.testing.assert_allclose(product, rate * np.asarray(eta), rtol=epsilon)
    # Large counts: the mean, and the variance that the Fisher is.
    keys = jax.random.split(getkey(), 4000)
    samples = np.asarray(jax.jit(jax.vmap(loss.sample))(keys))[:, 0]
    assert samples.dtype == dtype and np.all(np.isfinite(samples))
    z = (samples.astype(np.float64)[:, 2] - rate[0, 2]) / np.sqrt(rate[0, 2])
    assert abs(z.mean()) < 0.1 and abs(z.std() - 1) < 0.05
    assert np.all(samples[:, 0] == 0)


def test_a_rate_of_zero():
    loss = kfac.PoissonNLL(jnp.array([[-jnp.inf, 0.0, 1.0]]), jnp.array([[0, 1, 2]]))
    assert reference.error(loss.value, 1 + np.e - 2) < TOLERANCE
    score = loss.score(loss.targets)
    assert reference.error(score, np.array([[0, 0, np.e - 2]])) < TOLERANCE
    assert jnp.all(loss.sample(jax.random.key(0))[:, 0] == 0)
    product = loss.fisher_product(jnp.ones((1, K)))
    assert reference.error(product, np.exp([[-np.inf, 0, 1]])) < TOLERANCE


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_poisson_samples_with_any_key(impl):
    # Near the change from counting to a Gaussian, too.
    eta = jnp.log(jnp.array([[3.0, 9_990.0, 10_010.0]]))
    loss = kfac.PoissonNLL(jnp.broadcast_to(eta, (4000, 3)))
    samples = np.asarray(loss.sample(jax.random.key(0, impl=impl)))
    z = (samples - np.exp(eta)) / np.exp(eta / 2)
    assert np.abs(z.mean(axis=0)).max() < 0.1
    assert np.abs(z.std(axis=0) - 1).max() < 0.05


@BOUNDED
@pytest.mark.parametrize("size", [40.0, 1e3])
def test_extreme_outputs(case, size, getkey):
    outputs = size * jnp.array([[1.0, -1.0, 0.5], [-1.0, 0.0, 1.0]])
    targets = case[1](getkey(), (2,))
    loss = case[0](outputs, targets)
    v = jnp.ones((2, K))
    numbers = [loss.value, loss.score(targets), loss.fisher_product(v)]
    assert all(jnp.all(jnp.isfinite(x)) for x in numbers)
    expected = jnp.mean(case[2](outputs, targets))
    np.testing.assert_allclose(loss.value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_impossible_classes(soft, getkey):
    # A logit of -inf takes a class away (an illegal action, say).
    logits = jnp.array([[1.0, -jnp.inf, 0.5], [-jnp.inf, 2.0, 1.0]])
    targets = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.3, 0.7]])
    targets = targets if soft else jnp.argmax(targets, axis=-1)
    loss = kfac.SoftmaxCrossEntropy(logits, targets)
    p = np.asarray(jax.nn.softmax(logits))
    t = np.asarray(targets if soft else jax.nn.one_hot(targets, K))
    expected = -np.sum(t[t > 0] * np.log(p[t > 0])) / 2
    assert reference.error(loss.score(targets), p - t) < TOLERANCE
    assert reference.error(loss.value, expected) < TOLERANCE
    H = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    assert reference.error(dense(loss.fisher_product, loss), H) < TOLERANCE


def test_sigmoid_fisher_does_not_cancel():
    # p (1 - p) of a logit of 40 is e^-40, although 1 - p rounds to zero.
    z = jnp.array([[40.0, -40.0, 700.0]])
    root = kfac.SigmoidCrossEntropy(z).fisher_root(jnp.ones((1, 3)))
    assert reference.error(root, jnp.exp(-jnp.abs(z) / 2)) < TOLERANCE


@NATURAL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_low_precision(case, dtype, getkey):
    outputs = jax.random.normal(getkey(), (5, K)).astype(dtype)
    targets = case[1](getkey(), (5,))
    targets = targets.astype(dtype) if targets.dtype == jnp.float64 else targets
    loss = case[0](outputs, targets)
    wide = targets.astype(float) if targets.dtype == dtype else targets
    exact = case[0](outputs.astype(float), wide)
    # Computed in at least float32, handed back in the type of the outputs.
    assert loss.value.dtype == jnp.float32
    assert reference.error(loss.value, exact.value) < 1e-5
    v = jnp.ones((5, K))
    root, score = loss.fisher_root(v.astype(jnp.float32)), loss.score(targets)
    assert root.dtype == score.dtype == dtype
    epsilon = 4 * jnp.finfo(dtype).eps
    assert reference.error(root.astype(float), exact.fisher_root(v)) < epsilon
    assert reference.error(score.astype(float), exact.score(wide)) < epsilon


@NATURAL
def test_low_precision_fisher_product(case, getkey):
    outputs = jax.random.normal(getkey(), (5, K)).astype(jnp.bfloat16)
    v = jax.random.normal(getkey(), (5, K)).astype(jnp.bfloat16)
    product = case[0](outputs).fisher_product(v)
    exact = case[0](outputs.astype(float)).fisher_product(v.astype(float))
    assert product.dtype == jnp.bfloat16
    assert reference.error(product.astype(float), exact) < 0.03


#
# Sums
#


def test_sums_of_objectives(getkey):
    a, b = make(CASES["classes"], getkey(), (4,)), make(CASES["squared"], getkey(), (6,))
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


def test_difference_of_penalties(getkey):
    # Entropy bonuses are subtracted.
    a = make(CASES["classes"], getkey(), (4,))
    assert reference.error((a - 0.25).value, a.value - 0.25) < TOLERANCE
    assert reference.error((a - jnp.array(0.25)).value, a.value - 0.25) < TOLERANCE


@pytest.mark.parametrize("coefficient", [-1, -0.5])
def test_negative_coefficient(coefficient, getkey):
    loss = make(CASES["classes"], getkey(), (4,))
    with pytest.raises(ValueError, match="not negative"):
        coefficient * loss


def test_only_scalars_add(getkey):
    loss = make(CASES["classes"], getkey(), (4,))
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


@NATURAL
@pytest.mark.parametrize("shape", [(), (5,), (2,), (4, K), (4, 2, 1)])
def test_wrong_weights(case, shape):
    with pytest.raises(ValueError, match="weights must have the shape"):
        case[0](jnp.ones((4, 2, K)), weights=jnp.ones(shape))


@NATURAL
def test_a_loss_is_a_pytree(case, getkey):
    loss = make(case, getkey(), (4,), jnp.array([1.0, 2.0, 0.0, 1.0]))
    assert reference.error(eqx.filter_jit(lambda m: m.value)(loss), loss.value) < 1e-12
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), loss)
    values = eqx.filter_vmap(lambda m: m.value)(stacked)
    assert reference.error(values, jnp.stack([loss.value] * 2)) < TOLERANCE
