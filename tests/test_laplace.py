"""Laplace posteriors, against dense normal distributions in float64."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import eqx_kfac as kfac

from .helpers import close, flat, params_of
from .test_block_diagonal import batch, Grouped, mlp, Recurrent, Stacked, Words


N, DELTA, SIGMA, TEMPERATURE = 40.0, 0.7, 0.5, 0.8


def loss_fn(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t)


def forward(model, x):
    return model(x)


models = {
    "kronecker": mlp,
    "ekfac": ft.partial(mlp, blocks=kfac.EKFAC()),
    "diagonal": ft.partial(mlp, blocks=kfac.Diagonal()),
    "full": ft.partial(mlp, blocks=kfac.Full()),
    "tnt": ft.partial(mlp, blocks=kfac.TNT()),
    "identity": ft.partial(mlp, blocks=kfac.Identity()),
    "tensor-normal": ft.partial(mlp, blocks=kfac.Kronecker(kfac.TensorNormal())),
    "embedding": Words,
    "stacked": Stacked,
    "groups": Grouped,
    "gates": Recurrent,
}


@ft.cache
def fitted(name):
    model = models[name](jr.key(3))
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    curvature = collect(model, *batch)
    if name == "ekfac":  # In a basis: what an optimizer's state has.
        optimizer = kfac.KFAC(0.1, momentum=0.0)
        state = optimizer.init(model)
        step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
        for _ in range(2):
            state = step(model, state, *batch, key=jr.key(0))[1]
        curvature = state.curvature
    return model, curvature


def posterior_of(name, **more):
    numbers = dict(prior_precision=DELTA, sigma_noise=SIGMA, temperature=TEMPERATURE)
    return kfac.Laplace(*reversed(fitted(name)), N, **(numbers | more))


def with_vector(model, vector):
    """The model with the parameters of a vector."""
    return eqx.combine(ravel_pytree(params_of(model))[1](vector), model)


@pytest.mark.parametrize("name", models)
def test_is_a_normal_distribution(name):
    model, curvature = fitted(name)
    C = np.asarray(kfac.BlockDiagonalOperator(curvature, model).as_matrix())
    precision = N / (SIGMA**2 * TEMPERATURE) * C + DELTA * np.eye(len(C))
    covariance = np.linalg.inv(precision)
    theta = flat(params_of(model))
    x = batch[0][0]

    @eqx.filter_jit
    def run(posterior, x):
        both = posterior.precision(), posterior.covariance()
        noise = jax.random.normal(jr.key(1), (len(C),))
        return dict(
            matrices=[operator.as_matrix() for operator in both],
            products=[flat(operator.mv(params_of(model))) for operator in both],
            diagonals=[operator.diagonal() for operator in both],
            traces=[operator.trace() for operator in both],
            logdets=[operator.logdet() for operator in both],
            variance=posterior.functional_variance(forward, x),
            predicted=posterior.predict(forward, x),
            evidence=posterior.log_marginal_likelihood(-3.0),
            noise=noise,
        )

    got = run(posterior_of(name), x)
    assert np.linalg.norm(C) > 0.01 or name == "identity"
    for i, matrix in enumerate((precision, covariance)):
        close(got["matrices"][i], matrix)
        close(got["products"][i], matrix @ theta)
        close(got["diagonals"][i], np.diag(matrix))
        close(got["traces"][i], np.trace(matrix))
        close(got["logdets"][i], np.linalg.slogdet(matrix)[1])
    close(got["matrices"][0] @ got["matrices"][1], np.eye(len(C)))

    J = jax.jacobian(lambda t: with_vector(model, t)(x))(theta)
    close(got["variance"], J @ covariance @ J.T)
    close(got["predicted"][0], model(x))
    close(got["predicted"][1], J @ covariance @ J.T + SIGMA**2 * np.eye(2))
    prior = -0.5 * DELTA * theta @ theta + 0.5 * len(theta) * np.log(DELTA)
    close(got["evidence"], -3.0 + prior - 0.5 * np.linalg.slogdet(precision)[1])


@pytest.mark.parametrize("name", ["kronecker", "full", "stacked"])
def test_samples(name):
    """The covariance of samples; and that of half of the root's is another one."""
    model, _ = fitted(name)
    posterior = posterior_of(name)
    keys = jr.split(jr.key(0), 20_000)
    samples = eqx.filter_jit(eqx.filter_vmap(posterior.sample))(keys)
    rows = jax.vmap(lambda tree: ravel_pytree(tree)[0])(params_of(samples))
    covariance = np.asarray(posterior.covariance().as_matrix())
    errors = (rows.mean(axis=0) - flat(params_of(model))) / np.sqrt(np.diag(covariance))
    assert np.abs(errors).max() < 5 / len(keys) ** 0.5
    close(np.cov(rows.T), covariance, 0.04)
    assert np.abs(2 * np.cov(rows.T) - covariance).max() > 0.2 * covariance.max()


def test_numbers_are_leaves():
    """Changed, differentiated, mapped over."""
    posterior = posterior_of("kronecker")
    assert all(
        isinstance(leaf, jax.Array) for leaf in jtu.tree_leaves(posterior.curvature)
    )

    def evidence(log_delta):
        changed = eqx.tree_at(lambda p: p.prior_precision, posterior, jnp.exp(log_delta))
        return changed.log_marginal_likelihood(0.0)

    def logdet(log_delta):
        changed = eqx.tree_at(lambda p: p.prior_precision, posterior, jnp.exp(log_delta))
        return changed.precision().logdet()

    at = jnp.log(0.3)
    close(
        jax.grad(logdet)(at),
        0.3 * posterior_of("kronecker", prior_precision=0.3).covariance().trace(),
    )
    many = jax.vmap(evidence)(jnp.log(jnp.array([0.1, 0.3, 0.9])))
    one = posterior_of("kronecker", prior_precision=0.9).log_marginal_likelihood(0.0)
    close(many[2], one)
    assert len(np.unique(many)) == 3

    def of_noise(sigma):
        changed = eqx.tree_at(lambda p: p.sigma_noise, posterior, sigma)
        return changed.precision().logdet()

    step = 1e-5
    numeric = (of_noise(SIGMA + step) - of_noise(SIGMA - step)) / (2 * step)
    close(jax.grad(of_noise)(SIGMA), numeric, 1e-6)


@pytest.mark.parametrize("name", ["kronecker", "stacked", "diagonal"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_tuned_prior_has_most_evidence(name, per_layer):
    posterior = posterior_of(name)
    tuned = eqx.filter_jit(lambda p: p.with_tuned_prior(per_layer))(posterior)

    def evidence(prior):
        changed = eqx.tree_at(lambda p: p.prior_precision, posterior, prior)
        return changed.log_marginal_likelihood(0.0)

    best = tuned.prior_precision
    slopes = jtu.tree_leaves(jax.grad(evidence)(best))
    for slope, number in zip(slopes, jtu.tree_leaves(best)):
        assert number.shape == slope.shape
        assert np.abs(slope * number).max() < 1e-9
    assert evidence(best) > evidence(posterior.prior_precision)
    assert len(slopes) == (1 if not per_layer else 2)


def test_kept_in_a_file(tmp_path):
    posterior, path = posterior_of("kronecker"), tmp_path / "posterior.eqx"
    assert posterior.prior_precision.shape == ()
    tuned = posterior.with_tuned_prior()
    eqx.tree_serialise_leaves(path, tuned)
    found = eqx.tree_deserialise_leaves(path, posterior)
    assert eqx.tree_equal(found, tuned) and not eqx.tree_equal(found, posterior)


def test_half_precision():
    """Of the model; the posterior is in float32."""
    model, _ = fitted("kronecker")
    half = lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a
    model, x = jtu.tree_map(half, model), half(batch[0])
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    posterior = kfac.Laplace(collect(model, x, batch[1]), model, 60_000)
    assert float(posterior.num_examples) == 60_000
    mean, covariance = posterior.predict(forward, x[0])
    assert mean.dtype == covariance.dtype == jnp.float32
    exact = kfac.Laplace(fitted("kronecker")[1], fitted("kronecker")[0], 60_000)
    close(covariance, exact.predict(forward, batch[0][0])[1], 0.02)
    assert posterior.sample(jr.key(0)).layers[0].weight.dtype == jnp.bfloat16
    close(jnp.sum(posterior.predict_classes(forward, x[0], jr.key(0))), 1.0, 1e-5)


def test_one_prior_for_each_layer():
    model, curvature = fitted("stacked")
    operator = kfac.BlockDiagonalOperator(curvature, model)
    priors = operator.per_layer(1.0)
    assert priors.layers.shape == (2,) and priors.last.shape == ()
    numbers = jnp.array([0.3, 2.0]), jnp.array(5.0)
    priors = eqx.tree_at(lambda m: (m.layers, m.last), priors, numbers)
    posterior = kfac.Laplace(curvature, model, N, prior_precision=priors)
    each = [0.3] * 9 + [2.0] * 9 + [0.3] * 3 + [2.0] * 3 + [5.0] * 6  # Weights, biases.
    expected = N * np.asarray(operator.as_matrix()) + np.diag(each)
    close(posterior.precision().as_matrix(), expected)


def test_l2_is_a_prior():
    """It is not counted twice, and `None` takes it for the prior."""
    model, curvature = fitted("kronecker")

    def with_l2(model, x, t):
        return loss_fn(model, x, t) + kfac.L2(model, 0.2)

    collect = eqx.filter_jit(kfac.curvature(with_l2, fisher=kfac.Exact()))
    regularised = collect(model, *batch)
    assert float(regularised.layers[0].l2) == pytest.approx(0.2)
    matrix = posterior_of("kronecker").precision().as_matrix()
    close(
        kfac.Laplace(regularised, model, N, DELTA, SIGMA, TEMPERATURE)
        .precision()
        .as_matrix(),
        matrix,
    )
    taken = kfac.Laplace(regularised, model, N, None, SIGMA)
    whole = kfac.BlockDiagonalOperator(regularised, model).as_matrix()
    close(taken.precision().as_matrix(), N / SIGMA**2 * whole)
    with pytest.raises(ValueError, match="`prior_precision` must be positive"):
        kfac.Laplace(curvature, model, N, None)


def test_last_layer_of_a_regression_is_exact():
    """With one output, and inputs that are given: Bayesian linear regression."""
    key = jr.key(5)
    whole = kfac.convert(eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key))
    x, t = jr.normal(key, (20, 3)), jr.normal(jr.key(6), (20, 1))
    last = jtu.tree_map(lambda _: False, whole)
    last = eqx.tree_at(lambda m: m.layers[1].weight, last, True)
    trained, frozen = eqx.partition(whole, last)

    def fn(model, x):
        return eqx.combine(model, frozen)(x)

    def loss(model, x, t):
        return kfac.SquaredError(jax.vmap(ft.partial(fn, model))(x), t)

    curvature = kfac.curvature(loss, fisher=kfac.Exact())(trained, x, t)
    posterior = kfac.Laplace(curvature, trained, len(x), 0.3, sigma_noise=0.2)
    hidden = jnp.tanh(jax.vmap(whole.layers[0])(x))
    precision = hidden.T @ hidden / 0.2**2 + 0.3 * np.eye(4)
    close(posterior.precision().as_matrix(), precision)
    h = jnp.tanh(whole.layers[0](x[0]))
    variance = posterior.functional_variance(fn, x[0])
    close(variance, [[h @ np.linalg.inv(precision) @ h]])
    assert posterior.sample(key).layers[0].weight is None


def test_classes():
    model, curvature = fitted("kronecker")
    posterior = kfac.Laplace(curvature, model, 4, 0.02)
    x = batch[0][0]
    logits, variance = model(x), posterior.functional_variance(forward, x)
    probit = jax.nn.softmax(logits / np.sqrt(1 + np.pi / 8 * np.diag(variance)))
    close(posterior.predict_classes(forward, x), probit)
    samples = np.random.default_rng(0).multivariate_normal(logits, variance, 200_000)
    mean = np.asarray(jax.nn.softmax(samples)).mean(axis=0)
    drawn = posterior.predict_classes(forward, x, jr.key(0), 200_000)
    close(drawn, mean, 0.01)
    assert np.abs(np.asarray(jax.nn.softmax(logits)) - mean).max() > 0.02
    many = jax.vmap(lambda x: posterior.predict_classes(forward, x))(batch[0])
    close(many[0], probit)


@pytest.mark.parametrize(
    "number", ["num_examples", "prior_precision", "sigma_noise", "temperature"]
)
def test_numbers_are_checked(number):
    good = dict(num_examples=N, prior_precision=1.0, sigma_noise=1.0, temperature=1.0)
    for wrong in (0, -1.0, jnp.array(-1.0), np.float32(-1)):
        with pytest.raises(ValueError, match=f"`{number}` must be"):
            kfac.Laplace(*reversed(fitted("kronecker")), **(good | {number: wrong}))
    with pytest.raises((TypeError, ValueError), match=f"`{number}` must be a number"):
        kfac.Laplace(*reversed(fitted("kronecker")), **(good | {number: "1"}))


def test_damping_is_checked():
    model, curvature = fitted("stacked")
    operator = kfac.BlockDiagonalOperator(curvature, model)
    for wrong in (-1.0, jnp.array(-1.0)):
        for method in (operator.damped, operator.logdet, operator.inverse):
            with pytest.raises(ValueError, match="`damping` must be at least 0"):
                method(wrong)
    for wrong in (jnp.ones(3), operator.per_layer(1.0).layers, model):
        with pytest.raises(ValueError, match="`damping` must be a number, or a tree"):
            operator.damped(wrong)
    three = eqx.tree_at(lambda m: m.layers, operator.per_layer(1.0), jnp.ones(3))
    with pytest.raises(ValueError, match=r"array of shape \(3,\)"):
        operator.damped(three)
    exact = kfac.GaussNewton(loss_fn, model, *batch)
    with pytest.raises(ValueError, match="`damping` must be at least 0"):
        exact.damped(-0.1)
    with pytest.raises(ValueError, match="but has shape"):
        exact.damped(jnp.ones(2))


def test_float32_loses_what_is_below_its_resolution():
    """The floor that the documentation states: below it, the log-determinant is wrong;
    well above, it is right."""
    model, curvature = fitted("kronecker")
    x = jr.normal(jr.key(8), (64, 3)) * jnp.array([[30.0, 1e-3, 1.0]])
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    curvature = collect(model, x, None)
    single = lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a
    low = jtu.tree_map(single, (curvature, model))
    largest = max(
        float(jnp.max(v))
        for v in jtu.tree_leaves(
            kfac.BlockDiagonalOperator(curvature, model).eigenvalues()
        )
    )
    floor = N * largest * np.finfo(np.float32).eps
    for delta, wrong in ((10 * floor, False), (1e-6 * floor, True)):
        exact = kfac.Laplace(curvature, model, N, delta).precision().logdet()
        found = kfac.Laplace(*low, N, delta).precision().logdet()
        assert (abs(float(exact) - float(found)) > 1e-2 * abs(exact)) == wrong, (
            exact,
            found,
        )
