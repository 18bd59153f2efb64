"""Where K-FAC is exact, it has to be exact; where it is not, it must not seem so."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import loop, normal
from .plain import plain_kfac


TOLERANCE = 1e-10
BOTH = ("weight", "bias")


def identity(x):
    return x


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def classes(shape, k):
    return jax.device_put(np.random.default_rng(0).integers(k, size=shape))


def bits(shape, k):
    return jax.device_put(numbers(*shape, k, seed=1) > 0.3)


def vectors(shape, k):
    return jax.device_put(numbers(*shape, k, seed=1))


def probabilities(shape, k):
    p = np.exp(numbers(*shape, k, seed=1))
    return jax.device_put(p / p.sum(axis=-1, keepdims=True))


# The loss, its reference for one term, and its targets.
SOFTMAX = (kfac.SoftmaxCrossEntropy, reference.softmax, classes)
SOFT_TARGETS = (
    kfac.SoftmaxCrossEntropy,
    reference.softmax_probabilities,
    probabilities,
)
SIGMOID = (kfac.SigmoidCrossEntropy, reference.sigmoid, bits)
SQUARED = (kfac.SquaredError, reference.squared, vectors)
LOSSES = pytest.mark.parametrize(
    "loss",
    [SOFTMAX, SOFT_TARGETS, SIGMOID, SQUARED],
    ids=["softmax", "soft-targets", "sigmoid", "squared"],
)
BIAS = pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no-bias"])
SHARING = pytest.mark.parametrize(
    "sharing", [kfac.Expand(), kfac.Reduce()], ids=["expand", "reduce"]
)


@eqx.filter_jit
def mlp(sizes, activation=identity, use_bias=True):
    """Plain layers of the given sizes ("scalar" allowed), with Gaussian biases."""
    keys = jax.random.split(jax.random.key(0), len(sizes))
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    layers = [eqx.nn.Linear(i, o, use_bias, key=k) for (i, o), k in zip(pairs, keys[1:])]
    between = [eqx.nn.Lambda(activation)] * len(layers)
    return eqx.nn.Sequential(
        [m for both in zip(layers, between) for m in both][: 2 * len(layers) - 1]
    )


def linears(model):
    return [m for m in jax.tree.leaves(model, is_leaf=_is_linear) if _is_linear(m)]


def _is_linear(node):
    return isinstance(node, eqx.nn.Linear)


def as_vector(z):
    """A "scalar" layer gives outputs without a feature axis."""
    return z[..., None] if z.ndim == 1 else z


def batched(model, x):
    return as_vector(jax.vmap(model)(x))


def collect(model, run, loss, targets, fisher=kfac.Exact(), sharing=kfac.Expand()):
    """The factors of every layer, in order."""

    def loss_fn(model, targets):
        return loss[0](run(model), targets)

    model = kfac.convert(model, kfac.Kronecker(sharing))
    tree = eqx.filter_jit(kfac.curvature(loss_fn, fisher))(model, targets)
    return jax.tree.leaves(
        tree, is_leaf=lambda n: isinstance(n, kfac.factors.KroneckerFactors)
    )


def ggn(run, *args, **kwargs):
    return reference.ggn(eqx.filter_jit(run), *args, **kwargs)


def empirical(run, *args, **kwargs):
    return reference.empirical(eqx.filter_jit(run), *args, **kwargs)


def errors(blocks, factors):
    pairs = zip(blocks, factors, strict=True)
    return [reference.error(reference.kron(f), block) for block, f in pairs]


#
# Exact
#


# Not the whole product: each takes a compilation.
NETS = pytest.mark.parametrize(
    "activation, use_bias",
    [(jnp.tanh, True), (jax.nn.relu, False)],
    ids=["tanh-bias", "relu-no-bias"],
)


@LOSSES
@NETS
def test_one_example(loss, use_bias, activation):
    model = mlp((3, 4, 4, 3), activation, use_bias)
    run = ft.partial(batched, x=normal(1, 3))
    targets = loss[2]((1,), 3)
    blocks = ggn(run, model, linears, loss[1], targets)
    assert np.max(errors(blocks, collect(model, run, loss, targets))) < TOLERANCE


@BIAS
@pytest.mark.parametrize(
    "sizes, loss",
    [
        (("scalar", 3, 2), SOFTMAX),
        ((2, 3, "scalar"), SIGMOID),
        (("scalar", 3, "scalar"), SQUARED),
    ],
    ids=["in", "out", "both"],
)
def test_one_example_scalar_features(sizes, loss, use_bias):
    model = mlp(sizes, jnp.tanh, use_bias)
    d_in = () if sizes[0] == "scalar" else (sizes[0],)
    run = ft.partial(batched, x=normal(1, *d_in))
    targets = loss[2]((1,), 1 if sizes[-1] == "scalar" else sizes[-1])
    blocks = ggn(run, model, linears, loss[1], targets)
    assert np.max(errors(blocks, collect(model, run, loss, targets))) < TOLERANCE


@BIAS
@SHARING
def test_deep_linear_squared_error(use_bias, sharing):
    model = mlp((5, 4, 3), use_bias=use_bias)
    run = ft.partial(batched, x=normal(6, 5))
    targets = vectors((6,), 3)
    blocks = ggn(run, model, linears, reference.squared, targets)
    factors = collect(model, run, SQUARED, targets, sharing=sharing)
    assert np.max(errors(blocks, factors)) < TOLERANCE


@NETS
def test_last_layer_squared_error(use_bias, activation):
    model = mlp((5, 4, 3), activation, use_bias)
    run = ft.partial(batched, x=normal(6, 5))
    targets = vectors((6,), 3)
    blocks = ggn(run, model, linears, reference.squared, targets)
    first, last = errors(blocks, collect(model, run, SQUARED, targets))
    assert last < TOLERANCE
    assert first > 0.05


@LOSSES
def test_one_example_empirical(loss):
    model = mlp((3, 4, 4, 3), jnp.tanh)
    run = ft.partial(batched, x=normal(1, 3))
    targets = loss[2]((1,), 3)
    blocks = empirical(run, model, linears, loss[1], targets)
    factors = collect(model, run, loss, targets, kfac.Empirical())
    assert np.max(errors(blocks, factors)) < TOLERANCE


@BIAS
def test_expand(use_bias):
    model = mlp((5, 4, 3), use_bias=use_bias)
    x = normal(6, 5, 5, seed=2)
    targets = vectors((6, 5), 3)

    def run(model):
        return jax.vmap(jax.vmap(model))(x)

    blocks = ggn(run, model, linears, reference.squared, targets)
    assert np.max(errors(blocks, collect(model, run, SQUARED, targets))) < TOLERANCE
    wrong = collect(model, run, SQUARED, targets, sharing=kfac.Reduce())
    assert min(errors(blocks, wrong)) > 0.4


def pooled(model, x, pool):
    return pool(jax.vmap(jax.vmap(model))(x), axis=1)


@BIAS
@pytest.mark.parametrize("pool", [jnp.mean, jnp.sum], ids=["mean", "sum"])
def test_reduce(use_bias, pool):
    model = mlp((5, 4, 3), use_bias=use_bias)
    # Not centred, so that the mean over positions is not lost in the noise.
    run = ft.partial(pooled, x=jax.device_put(numbers(6, 5, 5) + 1), pool=pool)
    targets = vectors((6,), 3)
    blocks = ggn(run, model, linears, reference.squared, targets)
    right = collect(model, run, SQUARED, targets, sharing=kfac.Reduce())
    assert np.max(errors(blocks, right)) < TOLERANCE
    assert min(errors(blocks, collect(model, run, SQUARED, targets))) > 0.5


def test_reduce_pooled_halfway():
    model = mlp((5, 4, 3))
    x = normal(6, 5, 5)
    targets = vectors((6,), 3)

    def run(model):
        hidden = pooled(model[0], x, jnp.mean)
        return jax.vmap(model[2])(hidden)

    blocks = ggn(run, model, linears, reference.squared, targets)
    right = collect(model, run, SQUARED, targets, sharing=kfac.Reduce())
    assert np.max(errors(blocks, right)) < TOLERANCE
    before, after = errors(blocks, collect(model, run, SQUARED, targets))
    assert before > 0.5  # Positions are shared here,
    assert after < TOLERANCE  # and not here.


#
# One weight, several uses
#


def twice(model, x):
    return sum(jnp.tanh(jax.vmap(model[0])(x[:, use])) for use in range(2))


def twice_by_vmap(model, x):
    return jnp.sum(jnp.tanh(jax.vmap(jax.vmap(model[0]))(x)), axis=1)


@BIAS
@pytest.mark.parametrize("number", [1, 6])
def test_two_calls_are_two_rows(use_bias, number):
    model = mlp((5, 3), use_bias=use_bias)
    x = normal(number, 2, 5)
    targets = classes((number,), 3)
    (calls,) = collect(model, ft.partial(twice, x=x), SOFTMAX, targets)
    (rows,) = collect(model, ft.partial(twice_by_vmap, x=x), SOFTMAX, targets)
    assert reference.error(calls.input_factor, rows.input_factor) < TOLERANCE
    assert reference.error(calls.output_factor, rows.output_factor) < TOLERANCE
    once = ft.partial(batched, x=jax.device_put(np.asarray(x)[:, 0]))
    (once,) = collect(model, once, SOFTMAX, targets)
    assert reference.error(once.input_factor, rows.input_factor) > 0.1
    assert reference.error(once.output_factor, rows.output_factor) > 0.1


def test_two_calls_deep_linear():
    # Squared error of a separate output at each call: both calls are rows of their own.
    model = mlp((5, 4, 3))
    x = normal(6, 2, 5)
    targets = vectors((6, 2), 3)

    def run(model):
        return jnp.stack([jax.vmap(model)(x[:, use]) for use in range(2)], axis=1)

    blocks = ggn(run, model, linears, reference.squared, targets)
    assert np.max(errors(blocks, collect(model, run, SQUARED, targets))) < TOLERANCE


#
# One step of least squares
#


def least_squares(x, t, use_bias):
    if use_bias:
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return np.linalg.lstsq(np.asarray(x), np.asarray(t), rcond=None)[0].T


@BIAS
@pytest.mark.parametrize("solver", [kfac.Eigh(), kfac.Cholesky()], ids=["eigh", "chol"])
@pytest.mark.parametrize("d_out", [1, 3])
def test_least_squares_in_one_step(use_bias, solver, d_out):
    x, t = normal(20, 4, seed=1), normal(20, d_out, seed=2)
    model = kfac.Linear(4, d_out, use_bias, key=jax.random.key(0))
    optimizer = plain_kfac(
        learning_rate=1.0, momentum=0.0, damping=0.0, fisher=kfac.Exact(), solver=solver
    )

    @eqx.filter_jit
    def step(learning_rate, damping):
        def loss_fn(model):
            return kfac.SquaredError(jax.vmap(model)(x), t)

        state = eqx.tree_at(
            lambda s: (s.learning_rate, s.damping),
            optimizer.init(model),
            (learning_rate, damping),
        )
        new, _, info = optimizer.step(loss_fn, model, state)
        leaves = {"weight": new.weight, "bias": new.bias}
        return reference.to_matrix(leaves), info.rejected

    def distance(learning_rate, damping):
        matrix, rejected = step(jnp.array(learning_rate), jnp.array(damping))
        assert not rejected
        return reference.error(matrix, least_squares(x, t, use_bias))

    assert distance(1.0, 0.0) < TOLERANCE
    assert distance(1.0, 0.1) > 0.01
    assert distance(0.5, 0.0) > 0.1


#
# Not exact
#


def test_differs_nonlinear():
    model = mlp((5, 4, 4, 3), jnp.tanh)
    run = ft.partial(batched, x=jax.device_put(2 * numbers(6, 5)))
    targets = vectors((6,), 3)
    blocks = ggn(run, model, linears, reference.squared, targets)
    *earlier, _ = errors(blocks, collect(model, run, SQUARED, targets))
    assert min(earlier) > 0.1


def test_differs_softmax():
    model = mlp((5, 4, 3))
    run = ft.partial(batched, x=jax.device_put(3 * numbers(6, 5)))
    targets = classes((6,), 3)
    blocks = ggn(run, model, linears, reference.softmax, targets)
    assert min(errors(blocks, collect(model, run, SOFTMAX, targets))) > 0.2


def test_differs_empirical():
    model = mlp((5, 4, 3))
    run = ft.partial(batched, x=normal(6, 5))
    targets = vectors((6,), 3)
    blocks = empirical(run, model, linears, reference.squared, targets)
    factors = collect(model, run, SQUARED, targets, kfac.Empirical())
    assert min(errors(blocks, factors)) > 0.3
    # Nor is the empirical Fisher the Gauss-Newton matrix.
    blocks = ggn(run, model, linears, reference.squared, targets)
    assert min(errors(blocks, factors)) > 0.3


#
# Generic networks: the factors are what the loops say
#


class Tokens(eqx.Module):
    """Mixes tokens between two layers. `rows` maps a layer over tokens."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x, rows=jax.vmap, pool=False):
        mixing = 1 / (1.0 + jnp.arange(9.0).reshape(3, 3))
        z = rows(self.second)(mixing @ jnp.tanh(rows(self.first)(x)))
        return jnp.mean(jnp.sin(z), axis=0) if pool else z


def both_layers(model):
    return [model.first, model.second]


def partition(model, frozen):
    """The trainable part and the rest; `frozen(model)` lists leaves of the latter."""
    trained = jax.tree.map(eqx.is_inexact_array, model)
    if frozen(model):
        trained = eqx.tree_at(frozen, trained, replace_fn=lambda _: False)
    return eqx.partition(model, trained)


@ft.cache
def tokens(use_bias, pool):
    """A model, its inputs and targets, and what the reference reads in it."""
    keys = jax.random.split(jax.random.key(3))
    model = Tokens(
        eqx.nn.Linear(4, 3, use_bias, key=keys[0]),
        eqx.nn.Linear(3, 2, use_bias, key=keys[1]),
    )
    x = normal(4, 3, 4)
    targets = classes((4,) if pool else (4, 3), 2)
    one = lambda model, example: model(example, loop, pool)
    return model, x, targets, reference.read(one, model, both_layers, x, (3, 3))


@SHARING
@pytest.mark.parametrize("pool", [False, True], ids=["tokens", "pool"])
@pytest.mark.parametrize(
    "fisher, use_bias, train",
    [
        (kfac.Exact(), True, BOTH),
        (kfac.Exact(), True, ("weight",)),
        (kfac.Exact(), True, ("bias",)),
        (kfac.Exact(), False, ("weight",)),
        (kfac.Empirical(), True, BOTH),
        (kfac.Empirical(), False, ("weight",)),
    ],
    ids=["all", "weight-only", "bias-only", "no-bias", "empirical", "empirical-no-bias"],
)
def test_factors_are_the_loops(sharing, pool, fisher, use_bias, train):
    model, x, targets, readings = tokens(use_bias, pool)
    present = reference.parameters(model.first)
    frozen = lambda m: [
        getattr(layer, n) for layer in both_layers(m) for n in present if n not in train
    ]

    def loss_fn(trainable, static):
        model = eqx.combine(trainable, static)
        z = jax.vmap(lambda example: model(example, pool=pool))(x)
        return kfac.SoftmaxCrossEntropy(z, targets)

    trainable, static = partition(kfac.convert(model, kfac.Kronecker(sharing)), frozen)
    tree = eqx.filter_jit(kfac.curvature(loss_fn, fisher))(trainable, static)
    expected = reference.factors(
        readings,
        reference.softmax,
        targets,
        fisher=type(fisher).__name__.lower(),
        sharing=type(sharing).__name__.lower(),
        train=train,
    )
    for factors, (G, A) in zip(both_layers(tree), expected, strict=True):
        assert reference.error(factors.output_factor, G) < TOLERANCE
        assert reference.error(factors.input_factor, A) < TOLERANCE


def test_partly_frozen_is_exact():
    model = mlp((3, 4, 3), jnp.tanh)
    x = normal(1, 3)
    targets = classes((1,), 3)
    trainable, static = partition(kfac.convert(model), lambda m: [m[2].bias])

    def loss_fn(trainable, static):
        # The frozen part can be either argument of `combine`.
        model = eqx.combine(static, trainable)
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), targets)

    tree = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))(trainable, static)
    args = (ft.partial(batched, x=x), model, linears, reference.softmax, targets)
    first, _ = ggn(*args)
    _, last = ggn(*args, train=("weight",))
    assert reference.error(reference.kron(tree[0]), first) < TOLERANCE
    assert reference.error(reference.kron(tree[2]), last) < TOLERANCE
