"""Fisher estimators: what they converge to, what they need, and when they agree."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import arrays, bits, classes, collect, expanded, loop, normal, vectors
from .plain import plain_kfac


TOLERANCE = 1e-10


LOSSES = pytest.mark.parametrize(
    "loss",
    [
        (kfac.SoftmaxCrossEntropy, reference.softmax, classes),
        (kfac.SigmoidCrossEntropy, reference.sigmoid, bits),
        (kfac.SquaredError, reference.squared, vectors),
    ],
    ids=["softmax", "sigmoid", "squared"],
)


class Net(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=keys[0])
        self.second = eqx.nn.Linear(4, 3, key=keys[1])

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@eqx.filter_jit
def net():
    return Net(jax.random.key(0))


def layers(model):
    return [model.first, model.second]


def output_factors(tree):
    return [layer.output_factor for layer in layers(tree)]


def output_errors(tree, exact):
    pairs = zip(output_factors(tree), output_factors(exact), strict=True)
    return np.array([reference.error(a, b) for a, b in pairs])


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def problem(getkey, loss, shape=(8,)):
    """A loss function of a tagged model, and the model."""
    x = normal(*shape, 3)
    targets = loss[2](getkey(), shape, 3)

    def loss_fn(model, weights=None):
        run = model
        for _ in shape:
            run = jax.vmap(run)
        return loss[0](run(x), targets, weights)

    return loss_fn, expanded(kfac.convert(net()))


#
# Monte Carlo
#


@LOSSES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_monte_carlo_converges(loss, weighted, getkey):
    loss_fn, model = problem(getkey, loss)
    weights = jax.device_put(np.arange(8.0)) if weighted else None
    exact = collect(loss_fn, kfac.Exact(), model, weights)
    key = getkey()

    def mean_error(number):
        estimate = kfac.curvature(loss_fn, kfac.MonteCarlo(number))

        @eqx.filter_jit
        def run(model, key):
            keys = jax.random.split(key, 8)
            return jax.lax.map(
                lambda k: output_factors(estimate(model, weights, key=k)), keys
            )

        pairs = zip(run(model, key), output_factors(exact), strict=True)
        return np.array([np.mean([reference.error(a, b) for a in f]) for f, b in pairs])

    numbers = np.array([10, 1000])
    errors = np.stack([mean_error(int(n)) for n in numbers])
    # Errors times √n are constant, as far as eight of them tell.
    constants = errors * np.sqrt(numbers)[:, None]
    assert np.all(constants < 2.5 * constants[0])
    assert np.all(constants > 0.4 * constants[0])
    assert np.all(errors[0] < 1)
    assert np.all(errors[-1] < 0.06)


def test_one_sample_is_not_enough(getkey):
    loss_fn, model = problem(getkey, (kfac.SoftmaxCrossEntropy, None, classes))
    exact = collect(loss_fn, kfac.Exact(), model)
    sampled = collect(loss_fn, kfac.MonteCarlo(), model, key=getkey())
    assert np.all(output_errors(sampled, exact) > 0.05)


@LOSSES
@pytest.mark.parametrize("number", [1, 3])
def test_keys(loss, number, getkey):
    loss_fn, model = problem(getkey, loss)
    run = ft.partial(collect, loss_fn, kfac.MonteCarlo(number))
    key, other = getkey(), getkey()
    assert same(run(model, key=key), run(model, key=key))
    assert np.all(output_errors(run(model, key=other), run(model, key=key)) > 1e-3)
    # What depends on the inputs alone does not depend on the key.
    for a, b in zip(layers(run(model, key=other)), layers(run(model, key=key))):
        assert np.array_equal(a.input_factor, b.input_factor)


def test_samples_are_independent(getkey):
    # Neither copies of one sample, nor the same for both losses of a sum.
    loss_fn, model = problem(getkey, (kfac.SquaredError, None, vectors))
    key = getkey()
    one, two = (collect(loss_fn, kfac.MonteCarlo(n), model, key=key) for n in (1, 2))
    assert np.all(output_errors(two, one) > 1e-3)

    def both(model):
        return loss_fn(model) + loss_fn(model)

    # Two independent estimates of the same: twice one of them would be no better than it.
    exact = collect(both, kfac.Exact(), model)
    twice = collect(loss_fn, kfac.Exact(), model)
    G = [2 * np.asarray(g) for g in output_factors(twice)]
    assert np.max([*map(reference.error, output_factors(exact), G)]) < TOLERANCE
    sampled = collect(both, kfac.MonteCarlo(), model, key=key)
    copied = [2 * np.asarray(g) for g in output_factors(one)]
    assert min(map(reference.error, output_factors(sampled), copied)) > 1e-3


def test_legacy_keys(getkey):
    loss_fn, model = problem(getkey, (kfac.SoftmaxCrossEntropy, None, classes))
    run = ft.partial(collect, loss_fn, kfac.MonteCarlo())
    old = run(model, key=jax.random.PRNGKey(5))
    assert same(old, run(model, key=jax.random.key(5)))


def test_monte_carlo_needs_a_key(getkey):
    loss_fn, model = problem(getkey, (kfac.SoftmaxCrossEntropy, None, classes))
    optimizer = plain_kfac(1e-2)
    state = eqx.filter_jit(optimizer.init)(model)
    step = lambda model: optimizer.step(loss_fn, model, state)
    runs = [kfac.curvature(loss_fn), kfac.value_grad_and_curvature(loss_fn), step]
    for run in runs:
        with pytest.raises(ValueError, match=r"MonteCarlo.*`key=...`.*Exact.*Empirical"):
            eqx.filter_eval_shape(run, model)


@pytest.mark.parametrize("number", [0, -1])
def test_number_of_samples(number):
    with pytest.raises(ValueError, match="at least 1"):
        kfac.MonteCarlo(number)


#
# Exact and empirical
#


@LOSSES
@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.Empirical()], ids=["exact", "emp"])
def test_no_key_is_needed(loss, fisher, getkey):
    loss_fn, model = problem(getkey, loss)
    run = ft.partial(collect, loss_fn, fisher)
    assert same(run(model), run(model, key=getkey()))


def test_empirical_needs_targets(getkey):
    x, model = normal(4, 3), kfac.convert(net())

    def loss_fn(model):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x))

    with pytest.raises(ValueError, match="Empirical.*SoftmaxCrossEntropy has none"):
        collect(loss_fn, kfac.Empirical(), model)
    # The others do not, unless the value is wanted.
    collect(loss_fn, kfac.Exact(), model)
    collect(loss_fn, kfac.MonteCarlo(), model, key=getkey())
    with pytest.raises(ValueError, match="no targets"):
        eqx.filter_jit(kfac.value_grad_and_curvature(loss_fn, kfac.Exact()))(model)


def test_exact_does_not_look_at_targets(getkey):
    x, model = normal(4, 3), kfac.convert(net())

    def loss_fn(model, targets):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), targets)

    def run(fisher, targets):
        return collect(loss_fn, fisher, model, targets)

    a, b = jnp.array([0, 1, 2, 0]), jnp.array([2, 0, 0, 1])
    assert same(run(kfac.Exact(), a), run(kfac.Exact(), b))
    assert same(run(kfac.Exact(), a), run(kfac.Exact(), None))
    assert not same(run(kfac.Empirical(), a), run(kfac.Empirical(), b))


#
# Which examples are independent
#


@LOSSES
def test_example_axes_agree(loss, getkey):
    loss_fn, model = problem(getkey, loss, (4, 3))
    trees = [collect(loss_fn, kfac.Exact(axes), model) for axes in (0, 1, 2)]
    assert np.all(output_errors(trees[0], trees[1]) < TOLERANCE)
    assert np.all(output_errors(trees[2], trees[1]) < TOLERANCE)


class Attention(eqx.Module):
    """Every row of the input looks at every other."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x, rows=jax.vmap):
        h = rows(self.first)(x)
        return rows(self.second)(jax.nn.softmax(h @ h.T) @ h)


@eqx.filter_jit
def attention():
    first, second = jax.random.split(jax.random.key(0))
    return Attention(eqx.nn.Linear(3, 4, key=first), eqx.nn.Linear(4, 3, key=second))


def check(tree, expected):
    for factors, (G, A) in zip(layers(tree), expected, strict=True):
        assert reference.error(factors.output_factor, G) < TOLERANCE
        assert reference.error(factors.input_factor, A) < TOLERANCE


def test_mixed_tokens(getkey):
    model, x = attention(), normal(2, 3, 3)
    targets = classes(getkey(), (2, 3), 3)

    def loss_fn(model):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x))

    one = lambda model, example: model(example, loop)
    readings = reference.read(one, model, layers, x, (3, 3))
    expected = reference.factors(readings, reference.softmax, targets)
    tagged = expanded(kfac.convert(model))
    run = lambda axes: collect(loss_fn, kfac.Exact(axes), tagged)
    check(run(0), expected)
    check(run(1), expected)
    # The first layer's tokens are not independent; the last layer's are.
    wrong = run(2)
    (G, _), _ = expected
    assert reference.error(wrong.first.output_factor, G) > 0.01
    assert reference.error(wrong.second.output_factor, expected[1][0]) < TOLERANCE


def test_mixed_examples(getkey):
    model, x = attention(), normal(3, 3)
    targets = classes(getkey(), (3,), 3)

    def loss_fn(model):
        return kfac.SoftmaxCrossEntropy(model(x))

    one = lambda model, example: model(example, loop)
    # To the reference the whole batch is one example, of three terms.
    readings = reference.read(one, model, layers, x[None], (3, 3))
    expected = reference.factors(readings, reference.softmax, targets[None])
    run = lambda axes: collect(loss_fn, kfac.Exact(axes), kfac.convert(model))
    check(run(0), expected)
    assert reference.error(run(1).first.output_factor, expected[0][0]) > 0.01


def test_last_layer_block_of_a_mixing_model(getkey):
    # Squared error, so that the last layer is exact: the dense block says the same.
    model, x = attention(), normal(2, 3, 3)
    targets = vectors(getkey(), (2, 3), 3)

    def loss_fn(model):
        return kfac.SquaredError(jax.vmap(model)(x), targets)

    tree = collect(loss_fn, kfac.Exact(), expanded(kfac.convert(model)))
    run = eqx.filter_jit(lambda model: jax.vmap(model)(x))
    first, last = reference.ggn(run, model, layers, reference.squared, targets)
    assert reference.error(reference.kron(tree.second), last) < TOLERANCE
    assert reference.error(reference.kron(tree.first), first) > 0.1


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_example_axes_with_reduce(axes, getkey):
    # Terms of different tokens are independent also where their gradients are summed.
    model, x = net(), normal(2, 3, 3)
    targets = classes(getkey(), (2, 3), 3)

    def loss_fn(model):
        return kfac.SoftmaxCrossEntropy(jax.vmap(jax.vmap(model))(x))

    if axes == 2:  # One backward pass for all tokens cannot tell them apart.
        with pytest.raises(ValueError, match=r"`\.first`.*kfac.Reduce"):
            tagged = kfac.convert(model, kfac.Kronecker(kfac.Reduce()))
            collect(loss_fn, kfac.Exact(axes), tagged)
        return
    one = lambda model, example: jnp.stack([model(token) for token in example])
    readings = reference.read(one, model, layers, x, (3, 3))
    reduced = reference.factors(readings, reference.softmax, targets, sharing="reduce")
    tagged = kfac.convert(model, kfac.Kronecker(kfac.Reduce()))
    check(collect(loss_fn, kfac.Exact(axes), tagged), reduced)


@pytest.mark.parametrize("axes, leading", [(2, 1), (3, 2)])
def test_too_many_example_axes(axes, leading, getkey):
    loss = (kfac.SoftmaxCrossEntropy, None, classes)
    loss_fn, model = problem(getkey, loss, (2, 3)[:leading])
    with pytest.raises(ValueError, match=f"{leading} leading axes"):
        collect(loss_fn, kfac.Exact(axes), model)


def test_negative_example_axes():
    with pytest.raises(ValueError, match="at least 0"):
        kfac.Exact(-1)


#
# Sums of losses of different kinds and sizes
#


def test_exact_of_several_losses(getkey):
    # The columns of one loss must not leak into another with more or fewer of them.
    model, x = net(), normal(1, 3)

    def loss_fn(model):
        z = jax.vmap(model)(x)
        return (
            kfac.SoftmaxCrossEntropy(z) + kfac.SquaredError(z[:, :2])
        ) + kfac.SigmoidCrossEntropy(jnp.sin(z[:, :1]))

    tree = collect(loss_fn, kfac.Exact(), kfac.convert(model))
    parts = [
        (reference.softmax, lambda z: z, jnp.zeros((1,), int)),
        (reference.squared, lambda z: z[:, :2], jnp.zeros((1, 2))),
        (reference.sigmoid, lambda z: jnp.sin(z[:, :1]), jnp.zeros((1, 1))),
    ]
    blocks = []
    for term_loss, part, targets in parts:
        run = eqx.filter_jit(lambda model, part=part: part(jax.vmap(model)(x)))
        blocks.append(reference.ggn(run, model, layers, term_loss, targets))
    for factors, *block in zip(layers(tree), *blocks, strict=True):
        assert reference.error(reference.kron(factors), sum(block)) < TOLERANCE


def loss_of_nothing(model, x):
    return kfac.SquaredError(jax.vmap(model)(x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda fisher: kfac.curvature(loss_of_nothing, fisher),
        lambda fisher: kfac.value_grad_and_curvature(loss_of_nothing, fisher),
        lambda fisher: kfac.analysis.capture(loss_of_nothing, fisher),
        lambda fisher: kfac.analysis.Accumulator(loss_of_nothing, fisher),
        lambda fisher: kfac.verify(
            loss_of_nothing,
            kfac.Linear(2, 3, key=jax.random.key(0)),
            jnp.ones((2, 2)),
            fisher=fisher,
        ),
    ],
)
def test_what_is_no_estimate(ask):
    with pytest.raises(TypeError, match="not its class: did you mean `kfac.Exact"):
        ask(kfac.Exact)
    with pytest.raises(TypeError, match="`fisher` must be an object such as"):
        ask(loss_of_nothing)
