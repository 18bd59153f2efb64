"""Models that compute one log-density per example: the second moment of their scores,
when that is the Fisher, and flows that are trained by it."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from . import reference
from .helpers import (
    arrays,
    assert_differs,
    assert_near,
    collect,
    make_mesh,
    normal,
    scanned,
)


TOLERANCE = 1e-10
N, D = 12, 2
X = normal(N, D, seed=1)
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5] * 3)
KEY = jax.random.key(0)


def log_normal(z):
    return -0.5 * jnp.sum(z**2) - 0.5 * z.size * np.log(2 * np.pi)


class Coupling(eqx.Module):
    """Half of the coordinates are scaled and shifted, given the others, in turn."""

    conditioners: list[eqx.nn.MLP]

    def __init__(self, size, width, layers, *, key):
        half = size // 2
        self.conditioners = [
            eqx.nn.MLP(half, 2 * half, width, 1, jnp.tanh, key=k)
            for k in jax.random.split(key, layers)
        ]

    def log_prob(self, x):
        first, second = jnp.split(x, 2)
        total = 0.0
        for conditioner in self.conditioners:
            shift, log_scale = jnp.split(conditioner(first), 2)
            second = (second - shift) * jnp.exp(-jnp.tanh(log_scale))
            total = total - jnp.sum(jnp.tanh(log_scale))
            first, second = second, first
        return log_normal(jnp.concatenate([first, second])) + total


class Autoregressive(eqx.Module):
    """Every coordinate is scaled and shifted, given those before it: the others are
    masked."""

    conditioners: list[list[eqx.nn.MLP]]

    def __init__(self, size, width, layers, *, key):
        make = lambda key: eqx.nn.MLP(size, 2, width, 1, jnp.tanh, key=key)
        keys = jax.random.split(key, (layers, size))
        self.conditioners = [[make(k) for k in row] for row in keys]

    def log_prob(self, x):
        total = 0.0
        for row in self.conditioners:
            numbers = []
            for i, conditioner in enumerate(row):
                before = jnp.where(np.arange(len(row)) < i, x, 0)
                numbers.append(conditioner(before))
            shift, log_scale = jnp.stack(numbers, axis=1)
            x = (x - shift) * jnp.exp(-jnp.tanh(log_scale))
            x = x[::-1]
            total = total - jnp.sum(jnp.tanh(log_scale))
        return log_normal(x) + total


FLOWS = {"coupling": Coupling, "autoregressive": Autoregressive}


@ft.cache
def flow(block=kfac.Full(), name="coupling"):
    model = eqx.filter_jit(FLOWS[name])(D, 3, 2, key=KEY)
    return kfac.convert(model, block)


def density(model, x, weights=None):
    return kfac.NegativeLogLikelihood(jax.vmap(model.log_prob)(x), weights)


@eqx.filter_jit
def log_probs_and_scores(model, x):
    """`[n]` and `[n, parameters]`."""
    params, static = eqx.partition(kfac.revert(model), eqx.is_inexact_array)
    flat, back = ravel_pytree(params)
    run = lambda p: jax.vmap(eqx.combine(back(p), static).log_prob)(x)
    return run(flat), jax.jacobian(run)(flat)


@ft.cache
def expected(name="coupling"):
    found = log_probs_and_scores(flow(name=name), X)
    return tuple(map(np.asarray, found))


def layers_of(model):
    """The tagged layers, in order."""
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jtu.tree_leaves(model, is_leaf=is_linear)
    return [node for node in found if is_linear(node)]


def factors_of(model, tree):
    """What stands in a tree in the place of every layer."""
    matrices = jtu.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "matrix"))
    assert len(matrices) == len(layers_of(model))
    return [np.asarray(node.matrix) for node in matrices]


def blocks_of(matrix, model):
    """The layers' blocks, on canonical matrices: rows of weights, with the bias."""
    found, start = [], 0
    for layer in layers_of(model):
        rows, columns = layer.weight.shape
        size = rows * columns
        own = np.arange(start, start + size).reshape(rows, columns)
        bias = np.arange(start + size, start + size + rows)[:, None]
        index = np.concatenate([own, bias], axis=1).ravel()
        found.append(matrix[np.ix_(index, index)])
        start += size + rows
    return found


def second_moment(scores, weights=None):
    weights = np.ones(len(scores)) if weights is None else weights
    return np.einsum("n,ni,nj->ij", weights, scores, scores) / weights.sum()


#
# Value and gradient
#


@pytest.mark.parametrize("name", FLOWS)
def test_flows_are_densities(name):
    """The flows' densities integrate to one."""
    points = np.linspace(-12, 12, 241)
    x = np.stack(np.meshgrid(points, points), axis=-1).reshape(-1, D)
    model, evaluate = (
        flow(name=name),
        eqx.filter_jit(lambda m, x: jax.vmap(m.log_prob)(x)),
    )
    log_p = evaluate(model, jnp.asarray(x))
    np.testing.assert_allclose(np.sum(np.exp(log_p)) * 0.01, 1, rtol=1e-6)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_value_and_gradient(weights):
    log_p, scores = expected()
    value = lambda model, weights: density(model, X, weights).value
    got, grads = eqx.filter_jit(eqx.filter_value_and_grad(value))(flow(), weights)
    w = np.ones(N) if weights is None else weights
    assert reference.error(got, -(w @ log_p) / w.sum()) < TOLERANCE
    slope = np.concatenate([a.ravel() for a in arrays(kfac.revert(grads))])
    assert reference.error(slope, -(w @ scores) / w.sum()) < TOLERANCE


@pytest.mark.parametrize("bad", [-jnp.inf, jnp.nan])
def test_examples_of_weight_zero_may_have_no_density(bad):
    log_p, weights = jnp.array([-1.0, bad, -3.0]), jnp.array([1.0, 0.0, 3.0])
    value, slope = jax.value_and_grad(
        lambda y: kfac.NegativeLogLikelihood(y, weights).value
    )(log_p)
    np.testing.assert_allclose(value, 2.5)
    np.testing.assert_allclose(slope, [-0.25, 0.0, -0.75])
    assert not np.isfinite(kfac.NegativeLogLikelihood(log_p).value)


def test_tokens():
    """One term each, with weights of the examples, or of all."""
    log_p = normal(3, 4)
    each = -np.asarray(log_p)
    for weights in (np.array([1.0, 0.0, 2.0]), np.arange(12.0).reshape(3, 4)):
        loss = kfac.NegativeLogLikelihood(log_p, jnp.asarray(weights))
        full = np.broadcast_to(weights.reshape(3, -1), (3, 4))
        np.testing.assert_allclose(loss.value, (full * each).sum() / full.sum())
        assert loss.leading == (3, 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_low_precision(dtype):
    log_p = normal(5).astype(dtype)
    loss = kfac.NegativeLogLikelihood(log_p)
    assert loss.value.dtype == jnp.float32
    np.testing.assert_allclose(loss.value, -np.mean(log_p.astype(float)), rtol=1e-6)
    assert loss.fisher_root(jnp.ones((5, 1))).dtype == dtype
    assert loss.score(loss.targets).dtype == dtype


#
# Curvature
#


ESTIMATES = {
    "exact": kfac.Exact(),
    "ggn": kfac.ExactGGN(),
    "sampled": kfac.MonteCarlo(3),
    "signs": kfac.CurvatureProp(2, batch_size=2),
    "empirical": kfac.Empirical(),
}


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_all_estimates_are_the_second_moment(name, weights):
    model, (_, scores) = flow(), expected()
    tree = collect(density, ESTIMATES[name], model, X, weights, key=KEY)
    want = blocks_of(second_moment(scores, weights), model)
    for found, block in zip(factors_of(model, tree), want, strict=True):
        assert reference.error(found, block) < TOLERANCE
    part = collect(density, kfac.Empirical(examples=4), model, X, key=KEY)
    some = blocks_of(second_moment(scores[:4]), model)
    for found, block, all_of_it in zip(factors_of(model, part), some, want, strict=True):
        assert reference.error(found, block) < TOLERANCE
        assert reference.error(found, all_of_it) > 1e-2


def test_random_signs():
    """Scores are one in size, of either sign, and independent."""
    loss = kfac.NegativeLogLikelihood(jnp.zeros((200, 2)))
    score = np.asarray(loss.score(loss.sample(KEY)))
    assert set(score.ravel()) == {-1.0, 1.0}
    assert abs(score.mean()) < 0.15 and abs(np.mean(score[:, 0] * score[:, 1])) < 0.25
    assert np.all(np.asarray(loss.score(loss.targets)) == -1)


def test_centred_is_the_covariance():
    model, (_, scores) = flow(), expected()
    tree = collect(density, kfac.Centred(), model, X)
    want = blocks_of(np.cov(scores.T, bias=True), model)
    plain = blocks_of(second_moment(scores), model)
    for found, block, other in zip(factors_of(model, tree), want, plain, strict=True):
        assert reference.error(found, block) < TOLERANCE
        assert reference.error(other, block) > 1e-2


@eqx.filter_jit
def matrix_of(operator, loss_fn, model, *args):
    return operator(loss_fn, kfac.revert(model), *args).as_matrix()


@pytest.mark.parametrize(
    "operator",
    [
        kfac.analysis.FisherOperator,
        kfac.analysis.GaussNewtonOperator,
        kfac.analysis.EmpiricalFisherOperator,
    ],
)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_operators(operator, weights):
    _, scores = expected()
    got = matrix_of(operator, density, flow(), X, weights)
    assert reference.error(got, second_moment(scores, weights)) < TOLERANCE
    factor = eqx.filter_jit(
        lambda v: operator(density, flow(), X, weights).factor().mv(v)
    )
    v = jax.tree.map(jnp.ones_like, eqx.filter(flow(), eqx.is_inexact_array))
    (root,), _ = factor(v)
    want = np.sum(second_moment(scores, weights))
    np.testing.assert_allclose(np.sum(np.square(np.asarray(root))), want, rtol=1e-9)


def test_the_hessian_is_another_matrix():
    def value(flat, back, static):
        return density(eqx.combine(back(flat), static), X).value

    params, static = eqx.partition(kfac.revert(flow()), eqx.is_inexact_array)
    flat, back = ravel_pytree(params)
    want = jax.jit(jax.hessian(lambda p: value(p, back, static)))(flat)
    got = matrix_of(kfac.analysis.HessianOperator, density, flow(), X)
    assert reference.error(got, want) < TOLERANCE
    assert reference.error(second_moment(expected()[1]), want) > 0.1
    operator = kfac.analysis.GaussNewtonOperator(density, flow(), X)
    assert operator.positive_semidefinite


class Bits(eqx.Module):
    """Three bits that depend on an input: a density of what can be enumerated."""

    mlp: eqx.nn.MLP

    def __call__(self, x):
        return self.mlp(x)

    def log_prob(self, x, bits):
        z = self.mlp(x)
        return jnp.sum(bits * jax.nn.log_sigmoid(z) + (1 - bits) * jax.nn.log_sigmoid(-z))


def test_of_its_own_examples_it_is_the_fisher():
    """All that the model may draw, weighted by its probability."""
    mlp = eqx.nn.MLP(2, 3, 4, 1, jnp.tanh, key=KEY)
    model, x = kfac.convert(Bits(mlp), kfac.Full()), normal(4, 2)
    bits = np.stack(np.meshgrid(*[[0.0, 1.0]] * 3), axis=-1).reshape(-1, 3)
    pairs = np.repeat(np.asarray(x), 8, axis=0), np.tile(bits, (4, 1))
    pairs = tuple(map(jnp.asarray, pairs))
    evaluate = eqx.filter_jit(lambda model: jax.vmap(model.log_prob)(*pairs))
    chances = np.exp(np.asarray(evaluate(model)))
    np.testing.assert_allclose(chances.sum(), 4)

    def enumerated(model, weights):
        log_probs = jax.vmap(model.log_prob)(*pairs)
        return kfac.NegativeLogLikelihood(log_probs, weights)

    def predicted(model):
        return kfac.SigmoidCrossEntropy(jax.vmap(model)(x))

    want = collect(predicted, kfac.Exact(), model)
    assert_near(collect(enumerated, kfac.Exact(), model, chances), want)
    # Of the data of another distribution, it is not.
    others = collect(enumerated, kfac.Exact(), model, np.ones(32))
    assert_differs(others, want, 0.05)
    # Nor is there a mean, so that both are the covariance.
    fisher = np.asarray(matrix_of(kfac.analysis.FisherOperator, predicted, model))
    value = lambda model: enumerated(model, chances).value
    grads = eqx.filter_jit(eqx.filter_grad(value))(model)
    assert max(np.abs(a).max() for a in arrays(grads)) < 1e-12
    assert np.linalg.norm(fisher) > 0.1


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.Full()], ids=["kron", "full"])
def test_verify(block):
    report = kfac.verify(density, flow(block), X[:6])
    assert "WRONG" not in str(report)
    report = kfac.verify(density, flow(block), X[:6], fisher=kfac.Empirical())
    assert "WRONG" not in str(report)


#
# With other terms, in parts, on devices
#


def mixed(model, x):
    regression = kfac.SquaredError(jax.vmap(model.conditioners[0])(x[:, :1]), x)
    return density(model, x) + 0.5 * regression + kfac.L2(model, 0.1)


def test_sums():
    """Beside a loss of another distribution, and a penalty with a curvature."""
    model, (_, scores) = flow(), expected()
    one = matrix_of(kfac.analysis.FisherOperator, mixed, model, X)
    regression = lambda model, x: mixed(model, x).losses[1]
    other = np.asarray(matrix_of(kfac.analysis.FisherOperator, regression, model, X))
    want = second_moment(scores) + 0.5 * other + 0.1 * np.eye(len(other))
    assert reference.error(one, want) < TOLERANCE
    assert np.linalg.norm(other) > 0.1
    first = collect(mixed, kfac.Exact(), model, X)
    blocks = blocks_of(second_moment(scores) + 0.5 * other, model)
    for found, block in zip(factors_of(model, first), blocks, strict=True):
        assert reference.error(found, block) < TOLERANCE


def optimizers():
    quadratic = kfac.QuadraticModel()
    damping = kfac.LevenbergMarquardt(initial=1.0)
    return {
        "default": kfac.KFAC(),
        "rules": kfac.KFAC(quadratic, quadratic, damping, fisher=kfac.Exact()),
        "layers": kfac.KFAC(0.1, damping=kfac.LayerDamping(), norm_constraint=1e-2),
        "guarded": kfac.KFAC(guard=kfac.MaxIncrease(0.1), fisher=kfac.Empirical()),
    }


@eqx.filter_jit
def one_step(optimizer, model, x, **kwargs):
    state = optimizer.init(model)
    return optimizer.step(mixed, model, state, x, key=KEY, **kwargs)


@pytest.mark.parametrize("name", ["rules", "guarded"])
def test_micro_batches(name):
    model, optimizer = flow(kfac.Kronecker()), optimizers()[name]
    whole, parts = (one_step(optimizer, model, X, micro_batches=m) for m in (1, 3))
    assert_near(parts[0], whole[0], 1e-8)
    assert_differs(whole[0], model, 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind):
    params, static = eqx.partition(flow(kfac.Kronecker()), eqx.is_inexact_array)
    quadratic = kfac.QuadraticModel()
    optimizer = kfac.KFAC(quadratic, quadratic, 0.1, fisher=kfac.Exact())

    def run(params, x, weights):
        loss = lambda model, x: density(model, x, weights) + kfac.L2(model, 0.1)
        model = eqx.combine(params, static)
        new, _, info = optimizer.step(loss, model, optimizer.init(model), x, key=KEY)
        signs = kfac.curvature(loss, kfac.MonteCarlo())(model, x, key=KEY)
        return eqx.filter([new, signs, info.loss], eqx.is_inexact_array)

    weights = jnp.asarray(WEIGHTS)
    want = jax.device_get(jax.jit(run)(params, X, weights))
    mesh = make_mesh((4,), ("d",), kind)
    if kind == AxisType.Auto:
        specs = P(), P("d"), P("d")
        shard = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())
        got = jax.jit(shard)(params, X, weights)
    else:
        with jax.set_mesh(mesh):
            place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
            args = jax.tree.map(place, params), place(X, "d"), place(weights, "d")
            got = jax.jit(run)(*args)
    assert_near(jax.device_get(got), want, 1e-8)


#
# A norm that the model does not compute
#


class Product(eqx.Module):
    """An energy of two bits, whose norm is a sum over four states."""

    mlp: eqx.nn.MLP

    def __call__(self, x):
        return self.mlp(x)


def test_energies_with_examples_of_the_model():
    """The curvature is the covariance over what is drawn from the model; and the gradient
    is that of the mean over the data, with the gradient of the norm."""
    model = kfac.convert(
        Product(eqx.nn.MLP(2, "scalar", 3, 1, jnp.tanh, key=KEY)), kfac.Full()
    )
    states = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    data = states[np.array([0, 1, 1, 3, 3, 3])]
    evaluate = eqx.filter_jit(lambda model: jax.vmap(model)(states))
    # As many copies as the probability says, nearly: the model's own examples.
    chances = np.exp(np.asarray(evaluate(model)))
    numbers = np.round(2000 * chances / chances.sum()).astype(int)
    drawn = jnp.repeat(states, numbers, axis=0, total_repeat_length=numbers.sum())

    def loss_fn(model, x, drawn):
        ours, theirs = jax.vmap(model)(x), jax.vmap(model)(drawn)
        loss = kfac.NegativeLogLikelihood(theirs)
        return loss + 2 * jnp.mean(theirs) - jnp.mean(ours)

    def likelihood(model):
        norm = jax.nn.logsumexp(jax.vmap(model)(states))
        return norm - jnp.mean(jax.vmap(model)(data))

    @eqx.filter_jit
    def run(model):
        estimate = kfac.value_grad_and_curvature(loss_fn, kfac.Centred())
        want = eqx.filter_grad(likelihood)(kfac.revert(model))
        return *estimate(model, data, drawn)[1:], want

    grads, tree, want = run(model)
    assert_near(kfac.revert(grads), want, 0.01)
    params, static = eqx.partition(kfac.revert(model), eqx.is_inexact_array)
    flat, back = ravel_pytree(params)
    energies = lambda p: jax.vmap(eqx.combine(back(p), static))(states)
    J, p = np.asarray(jax.jit(jax.jacobian(energies))(flat)), numbers / numbers.sum()
    away = J - p @ J
    fisher = np.einsum("s,si,sj->ij", p, away, away)
    for found, block in zip(
        factors_of(model, tree), blocks_of(fisher, model), strict=True
    ):
        assert reference.error(found, block) < TOLERANCE


#
# Flows are trained
#


def moons(number):
    rng = np.random.default_rng(0)
    angle, side = rng.random(number) * np.pi, rng.integers(0, 2, number)
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (1 - 2 * side)[:, None]
    x = x + np.stack([side, 0.5 * side], axis=1) + 0.1 * rng.normal(size=(number, 2))
    return jnp.asarray((x - x.mean(axis=0)) / x.std(axis=0))


@ft.cache
def start(name):
    return eqx.filter_jit(FLOWS[name])(D, 16, 4, key=KEY)


@eqx.filter_jit
def by_adam(model, x):
    """The losses in 100 steps of Adam."""
    adam, (params, static) = optax.adam(1e-2), eqx.partition(model, eqx.is_inexact_array)
    value = lambda params: density(eqx.combine(params, static), x).value

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(value)(params)
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return jax.lax.scan(step, (params, adam.init(params)), length=100)[1]


@eqx.filter_jit
def by_kfac(optimizer, model, x, log_unit):
    """The losses in 100 steps, and the state after them."""

    def loss_fn(model, x):
        log_probs = jax.vmap(model.log_prob)(x) + log_unit
        return kfac.NegativeLogLikelihood(log_probs)

    keys, state = jax.random.split(KEY, 100), optimizer.init(model)
    _, state, infos = scanned(optimizer, loss_fn, model, state, x, keys=keys)
    return infos.loss, state


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", FLOWS)
def test_flows_are_trained(name):
    """By `KFAC()`, in as many steps, further than by Adam."""
    model, x = start(name), moons(512)
    ours, state = by_kfac(kfac.KFAC(), kfac.convert(model), x, 0.0)
    adam, ours = np.asarray(by_adam(model, x)), np.asarray(ours)
    assert ours[0] == pytest.approx(adam[0])
    assert adam[-1] < adam[0] - 0.3
    assert ours[-1] < adam[-1]
    assert not any(state.faults.as_dict().values())


@pytest.mark.parametrize("name", ["default", "rules", "layers", "guarded"])
def test_a_loss_that_becomes_negative(name):
    """In other units, a density is larger by a factor. The loss crosses zero, and goes on
    to fall."""
    model, x = kfac.convert(start("coupling")), moons(512)
    losses, state = by_kfac(optimizers()[name], model, x, 2.4)
    assert losses[0] > 0.3 and losses[-1] < -0.3
    # Nothing goes wrong; but the guard may guard.
    faults = state.faults.as_dict()
    assert int(faults.pop("increase")) <= (5 if name == "guarded" else 0)
    assert not any(faults.values())


#
# What is refused
#


@pytest.mark.parametrize(
    "log_probs, error, match",
    [
        (jnp.ones(()), ValueError, r"one number.*jax\.vmap\(model\.log_prob\)\(x\)"),
        (1.5, ValueError, "one number"),
        (jnp.ones(0), ValueError, "empty batch"),
        (jnp.ones(4, int), TypeError, "must be floating"),
        (jnp.ones(4, complex), TypeError, "must be floating"),
        ((jnp.ones(4), None), TypeError, "are a tuple"),
        (None, TypeError, "must be an array"),
    ],
)
def test_refused(log_probs, error, match):
    with pytest.raises(error, match=match):
        kfac.NegativeLogLikelihood(log_probs)


@pytest.mark.parametrize("shape", [(), (5,), (4, 1)])
def test_wrong_weights(shape):
    with pytest.raises(ValueError, match="weights must have the shape"):
        kfac.NegativeLogLikelihood(jnp.ones(4), jnp.ones(shape))
