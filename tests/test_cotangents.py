"""Cotangents: random signs, several pulled back at once, programs that do not grow, and
curvature beside gradients from anywhere."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from . import reference
from .helpers import assert_near, assert_same, collect, make_mesh, member, normal
from .plain import plain_kfac


TOLERANCE = 1e-10


def normal_of(z, weights=None):
    means, log_variances = jnp.split(z, 2, axis=-1)
    return kfac.NormalNLL(means, log_variances, weights=weights)


LOSSES = {
    "softmax": lambda z, w=None: kfac.SoftmaxCrossEntropy(z, weights=w),
    "sigmoid": lambda z, w=None: kfac.SigmoidCrossEntropy(z, weights=w),
    "squared": lambda z, w=None: kfac.SquaredError(z, weights=w),
    "poisson": lambda z, w=None: kfac.PoissonNLL(z, weights=w),
    "normal": normal_of,
    "huber": lambda z, w=None: kfac.HuberLoss(z, weights=w),
    "quantile": lambda z, w=None: kfac.QuantileLoss(z, weights=w, quantiles=0.8),
    "student": lambda z, w=None: kfac.StudentTNLL(z, weights=w),
}


def net(key, outputs=4):
    return eqx.nn.MLP(3, outputs, 4, 1, jnp.tanh, key=key)


def layers(model):
    return list(model.layers)


def largest_output_error(tree, other):
    pairs = zip(layers(tree), layers(other), strict=True)
    return max(reference.error(a.output_factor, b.output_factor) for a, b in pairs)


@ft.cache
def problem(loss, outputs=4):
    x = normal(6, 3)

    def loss_fn(model, weights=None):
        return loss(jax.vmap(model)(x), weights)

    return loss_fn, kfac.convert(net(jax.random.key(0), outputs))


#
# Random signs
#


@pytest.mark.parametrize("loss", [LOSSES["softmax"], LOSSES["normal"]])
def test_error_falls_as_the_square_root(loss, getkey):
    loss_fn, model = problem(loss)
    weights = np.arange(6.0)
    exact = collect(loss_fn, kfac.Exact(), model, weights)
    numbers, keys = [4, 1024], jax.random.split(getkey(), 8)

    def errors(fisher):
        run = eqx.filter_vmap(
            lambda key: kfac.curvature(loss_fn, fisher)(model, weights, key=key)
        )
        trees = eqx.filter_jit(run)(keys)
        trees = jax.device_get(trees)
        members = [member(trees, i) for i in range(len(keys))]
        return np.mean([largest_output_error(tree, exact) for tree in members])

    found = np.array([errors(kfac.CurvatureProp(n, batch_size=4)) for n in numbers])
    constants = found * np.sqrt(numbers)
    assert np.all(constants < 2 * constants[0]) and np.all(constants > constants[0] / 2)
    assert found[0] > 0.05 and found[-1] < 0.15


def test_keys(getkey):
    loss_fn, model = problem(LOSSES["softmax"])
    run = ft.partial(collect, loss_fn, kfac.CurvatureProp(2), model)
    a, again, b = (run(key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert_same(a, again)
    assert largest_output_error(a, b) > 1e-3
    with pytest.raises(ValueError, match=r"CurvatureProp.*`key=...`.*Exact"):
        run()


@pytest.mark.parametrize(
    "name", ["sigmoid", "squared", "poisson", "huber", "quantile", "student"]
)
def test_one_output_has_no_noise(name, getkey):
    loss_fn, model = problem(LOSSES[name], outputs=1)
    exact = collect(loss_fn, kfac.Exact(), model)
    signs = collect(loss_fn, kfac.CurvatureProp(), model, key=getkey())
    assert_near(signs, exact, TOLERANCE)
    sampled = collect(loss_fn, kfac.MonteCarlo(), model, key=getkey())
    assert largest_output_error(sampled, exact) > 1e-3


def test_diagonal_at_independent_outputs_has_no_noise(getkey):
    # Of the last layer, every sample has the diagonal right.
    loss_fn, model = problem(LOSSES["poisson"])
    exact = collect(loss_fn, kfac.Exact(), model).layers[1].output_factor
    signs = collect(loss_fn, kfac.CurvatureProp(), model, key=getkey())
    G = signs.layers[1].output_factor
    assert reference.error(np.diag(G), np.diag(exact)) < TOLERANCE
    assert reference.error(G, exact) > 1e-3


def test_signs_and_samples_of_a_sum_of_losses(getkey):
    # Independent for each of them: copies would be twice one.
    x, model = normal(6, 3), kfac.convert(net(getkey()))
    one = lambda model: kfac.SquaredError(jax.vmap(model)(x))
    two = lambda model: one(model) + one(model)
    key = getkey()
    a, b = (collect(f, kfac.CurvatureProp(), model, key=key) for f in (one, two))
    twice = 2 * np.asarray(a.layers[1].output_factor)
    assert reference.error(b.layers[1].output_factor, twice) > 1e-3


#
# Several at once
#


FISHERS = {
    "exact": kfac.Exact,
    "ggn": kfac.ExactGGN,
    "sampled": ft.partial(kfac.MonteCarlo, 5),
    "signs": ft.partial(kfac.CurvatureProp, 5),
}


class Deep(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    third: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(3, 3, key=keys[0])
        self.second = eqx.nn.Linear(3, 4, key=keys[1])
        self.third = eqx.nn.Linear(4, 2, key=keys[2])

    def __call__(self, x):
        return self.third(jnp.tanh(self.second(jnp.tanh(self.first(x)))))


@pytest.mark.parametrize("name", ["exact", "sampled", "signs"])
def test_batches_of_cotangents(name, getkey):
    # Tokens, weights and two losses; five columns divide neither by 2 nor by 100.
    x = normal(4, 2, 3)
    weights, key = np.array([1.0, 0.0, 2.0, 0.5]), getkey()
    reduce, diagonal = kfac.Kronecker(kfac.Reduce()), kfac.Diagonal()
    model = kfac.convert(Deep(getkey()), {".first": reduce, ".second": diagonal})

    def loss_fn(model):
        z = jax.vmap(jax.vmap(model))(x)
        pooled = jnp.mean(z, axis=1)[:, :1]
        return kfac.SigmoidCrossEntropy(z, weights=weights) + kfac.SquaredError(pooled)

    one = collect(loss_fn, FISHERS[name](), model, key=key)
    for size in (2, 100):
        several = collect(loss_fn, FISHERS[name](batch_size=size), model, key=key)
        assert_near(several, one, 1e-12)


def test_batches_of_cotangents_through_time(getkey):
    # A `scan` in the pullback, and the statistics of neighbouring steps.
    cell = eqx.nn.GRUCell(3, 2, key=getkey())
    cell = kfac.convert(cell, kfac.Series())
    x = normal(4, 3, 3)

    def loss_fn(cell):
        run = lambda xs: kfac.scan_cell(cell, jnp.zeros(2), xs)[1]
        return kfac.SigmoidCrossEntropy(jax.vmap(run)(x))

    one, several = (collect(loss_fn, kfac.Exact(batch_size=b), cell) for b in (1, 4))
    assert len(jax.tree.leaves(one)) > 4
    assert_near(several, one, 1e-12)


def test_batches_of_cotangents_in_a_stack(getkey):
    # An ensemble: the axis of cotangents is none of its own.
    keys, x = jax.random.split(getkey(), 2), normal(4, 3)
    ensemble = kfac.convert(eqx.filter_vmap(net)(keys))

    def loss_fn(models):
        z = eqx.filter_vmap(lambda m: jax.vmap(m)(x))(models)
        return kfac.SoftmaxCrossEntropy(jnp.moveaxis(z, 0, 1))

    one, several = (collect(loss_fn, kfac.Exact(batch_size=b), ensemble) for b in (1, 3))
    assert_near(several, one, 1e-12)


def of_three_losses(model, x):
    z, t = jax.vmap(model)(x), jnp.abs(jnp.round(x[:, :2]))
    normal = kfac.NormalNLL(z[:, :2], z[:, 2:], t)
    return normal + kfac.PoissonNLL(z[:, :2], t) + kfac.SquaredError(z[:, :2], t)


def step_and_estimates(fishers, model, x):
    """Estimates, and the quadratic model's products with the output Fisher."""
    quadratic, key = kfac.QuadraticModel(), jax.random.key(1)
    optimizer = plain_kfac(quadratic, quadratic, 0.1, fisher=kfac.Exact(batch_size=3))
    new, *_ = optimizer.step(of_three_losses, model, optimizer.init(model), x, key=key)
    trees = [kfac.curvature(of_three_losses, f)(model, x, key=key) for f in fishers]
    return eqx.filter([new, *trees], eqx.is_inexact_array)


@ft.cache
def on_one_device():
    model, x = kfac.convert(net(jax.random.key(0))), normal(4, 3)
    fishers = kfac.MonteCarlo(), kfac.CurvatureProp()
    expected = eqx.filter_jit(step_and_estimates)(fishers, model, x)
    return model, x, fishers, jax.device_get(expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind):
    model, x, fishers, expected = on_one_device()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    if kind == AxisType.Auto:  # Here devices would draw samples of their own.
        fishers, expected = (), expected[:1]
    run = lambda params, x: step_and_estimates(fishers, eqx.combine(params, static), x)
    mesh = make_mesh((4,), ("d",), kind)
    if kind == AxisType.Auto:
        shard = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
        out = jax.jit(shard)(params, x)
    else:
        with jax.set_mesh(mesh):
            place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
            out = jax.jit(run)(jax.tree.map(place, params), place(x, "d"))
    assert_near(jax.device_get(out), expected, TOLERANCE)


@pytest.mark.parametrize("make", [*FISHERS.values(), lambda **kw: kfac.MonteCarlo(**kw)])
def test_wrong_batch_sizes(make):
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        make(batch_size=0)


#
# The size of the program
#


def size_of_program(fisher, classes, getkey):
    """The equations, with those inside of loops, and the lines of StableHLO."""
    loss_fn, model = problem(LOSSES["softmax"], classes)
    params, static = eqx.partition(model, eqx.is_array)

    def run(params, key):
        return kfac.curvature(loss_fn, fisher)(eqx.combine(params, static), key=key)

    traced = jax.jit(run).trace(params, getkey())
    equations = sum(" = " in line for line in str(traced.jaxpr).splitlines())
    return equations, len(traced.lower().as_text().splitlines())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_program_does_not_grow_with_classes(batch_size, getkey):
    fisher = kfac.Exact(batch_size=batch_size)
    assert size_of_program(fisher, 4, getkey) == size_of_program(fisher, 100, getkey)


@pytest.mark.parametrize("fisher", [kfac.MonteCarlo, kfac.CurvatureProp])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_program_does_not_grow_with_samples(fisher, batch_size, getkey):
    few, many = (fisher(n, batch_size=batch_size) for n in (4, 400))
    assert size_of_program(few, 3, getkey) == size_of_program(many, 3, getkey)


#
# Curvature of one function, gradient of another
#


def test_gradients_from_anywhere(getkey):
    model, x = net(getkey(), 1), normal(7, 3)
    energies, damping = normal(7, seed=1), 0.1
    tagged = kfac.convert(model)

    def geometry(model):
        return kfac.SquaredError(jax.vmap(model)(x))

    def covariance(model):
        _, pullback = eqx.filter_vjp(lambda m: jax.vmap(m)(x), model)
        return pullback(2 * (energies - jnp.mean(energies))[:, None] / 7)[0]

    optimizer = plain_kfac(0.5, damping=damping, solver=kfac.Eigh())

    @eqx.filter_jit
    def update(model):
        curvature = kfac.curvature(geometry, kfac.Exact())(model)
        state = optimizer.init(model)
        out = optimizer.update(covariance(model), state, model, curvature=curvature)
        return out[0], curvature

    updates, curvature = update(tagged)
    Js = reference.jacobians(lambda m: jax.vmap(m)(x), model, layers)
    for J, layer, factors in zip(Js, layers(updates), layers(curvature), strict=True):
        J = J[:, 0]  # How log |psi| of every walker changes.
        e = np.asarray(energies)
        gradient = 2 * (np.mean(e[:, None] * J, axis=0) - e.mean() * J.mean(axis=0))
        F = reference.kron(factors)
        if layer is updates.layers[1]:
            assert reference.error(F, J.T @ J / 7) < TOLERANCE
            F = J.T @ J / 7
        expected = -0.5 * np.linalg.solve(F + damping * np.eye(len(F)), gradient)
        columns = [np.asarray(layer.weight), np.asarray(layer.bias)[:, None]]
        assert reference.error(np.hstack(columns).ravel(), expected) < TOLERANCE
