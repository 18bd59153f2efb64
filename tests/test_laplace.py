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

from .helpers import assert_same, close, flat, normal, params_of, squared
from .models import batch, Grouped, mlp, Recurrent, Stacked, Words


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
    if name == "ekfac":  # In a basis: what an optimizer's state has.
        optimizer = kfac.KFAC(0.1, momentum=0.0)
        model = eqx.filter_jit(models[name])(jr.key(3))
        state = eqx.filter_jit(optimizer.init)(model)
        step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
        for _ in range(2):
            state = step(model, state, *batch, key=jr.key(0))[1]
        return model, state.curvature

    @eqx.filter_jit
    def run(batch):
        model = models[name](jr.key(3))
        return model, kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *batch)

    return run(batch)


@eqx.filter_jit
def posterior_of(name, **more):
    numbers = dict(prior_precision=DELTA, sigma_noise=SIGMA, temperature=TEMPERATURE)
    return kfac.analysis.Laplace(*reversed(fitted(name)), N, **(numbers | more))


@pytest.mark.parametrize("name", models)
def test_is_a_normal_distribution(name):
    @eqx.filter_jit
    def run(model, curvature, x):
        posterior = posterior_of(name)
        both = posterior.precision(), posterior.covariance()
        theta, unravel = ravel_pytree(params_of(model))
        outputs = lambda theta: eqx.combine(unravel(theta), model)(x)
        return dict(
            blocks=kfac.analysis.BlockDiagonalOperator(curvature, model).as_matrix(),
            theta=theta,
            outputs=outputs(theta),
            jacobian=jax.jacobian(outputs)(theta),
            matrices=[operator.as_matrix() for operator in both],
            products=[flat(operator.mv(params_of(model))) for operator in both],
            diagonals=[operator.diagonal() for operator in both],
            traces=[operator.trace() for operator in both],
            logdets=[operator.logdet() for operator in both],
            variance=posterior.functional_variance(forward, x),
            predicted=posterior.predict(forward, x),
            evidence=posterior.log_marginal_likelihood(-3.0),
        )

    got = jtu.tree_map(np.asarray, run(*fitted(name), batch[0][0]))
    C, theta, J = got["blocks"], got["theta"], got["jacobian"]
    precision = N / (SIGMA**2 * TEMPERATURE) * C + DELTA * np.eye(len(C))
    covariance = np.linalg.inv(precision)
    assert np.linalg.norm(C) > 0.01 or name == "identity"
    for i, matrix in enumerate((precision, covariance)):
        close(got["matrices"][i], matrix)
        close(got["products"][i], matrix @ theta)
        close(got["diagonals"][i], np.diag(matrix))
        close(got["traces"][i], np.trace(matrix))
        close(got["logdets"][i], np.linalg.slogdet(matrix)[1])
    close(got["matrices"][0] @ got["matrices"][1], np.eye(len(C)))

    close(got["variance"], J @ covariance @ J.T)
    close(got["predicted"][0], got["outputs"])
    close(got["predicted"][1], J @ covariance @ J.T + SIGMA**2 * np.eye(2))
    prior = -0.5 * DELTA * theta @ theta + 0.5 * len(theta) * np.log(DELTA)
    close(got["evidence"], -3.0 + prior - 0.5 * np.linalg.slogdet(precision)[1])


@pytest.mark.parametrize("name", ["kronecker", "full", "stacked"])
def test_samples(name):
    """The covariance of samples; and that of half of the root's is another one."""
    number = 20_000

    @eqx.filter_jit
    def run(model):
        posterior = posterior_of(name)
        sample = lambda key: flat(params_of(posterior.sample(key)))
        rows = jax.vmap(sample)(jr.split(jr.key(0), number))
        return rows, posterior.covariance().as_matrix(), flat(params_of(model))

    found = run(fitted(name)[0])
    rows, covariance, mean = map(np.asarray, found)
    errors = (rows.mean(axis=0) - mean) / np.sqrt(np.diag(covariance))
    assert np.abs(errors).max() < 5 / number**0.5
    close(np.cov(rows.T), covariance, 0.04)
    assert np.abs(2 * np.cov(rows.T) - covariance).max() > 0.2 * covariance.max()


def test_numbers_are_leaves():
    """Changed, differentiated, mapped over."""
    posterior = posterior_of("kronecker")
    assert all(
        isinstance(leaf, jax.Array) for leaf in jtu.tree_leaves(posterior.curvature)
    )

    other = posterior_of("kronecker", prior_precision=0.3)
    step = 1e-5

    def evidence(posterior, delta):
        changed = eqx.tree_at(lambda p: p.prior_precision, posterior, delta)
        return changed.log_marginal_likelihood(0.0)

    @eqx.filter_jit
    def run(posterior, other):
        def logdet(log_delta):
            delta = jnp.exp(log_delta)
            changed = eqx.tree_at(lambda p: p.prior_precision, posterior, delta)
            return changed.precision().logdet()

        def of_noise(sigma):
            changed = eqx.tree_at(lambda p: p.sigma_noise, posterior, sigma)
            return changed.precision().logdet()

        return dict(
            slope=jax.grad(logdet)(jnp.log(0.3)),
            trace=other.covariance().trace(),
            many=jax.vmap(ft.partial(evidence, posterior))(jnp.array([0.1, 0.3, 0.9])),
            one=other.log_marginal_likelihood(0.0),
            of_noise=jax.grad(of_noise)(SIGMA),
            around=jax.vmap(of_noise)(jnp.array([SIGMA - step, SIGMA + step])),
        )

    got = run(posterior, other)
    close(got["slope"], 0.3 * np.asarray(got["trace"]))
    close(got["many"][1], got["one"])
    assert len(np.unique(got["many"])) == 3
    numeric = np.diff(got["around"])[0] / (2 * step)
    close(got["of_noise"], numeric, 1e-6)


@pytest.mark.parametrize("name", ["kronecker", "stacked", "diagonal"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_tuned_prior_has_most_evidence(name, per_layer):
    @eqx.filter_jit
    def run(posterior):
        def evidence(prior):
            changed = eqx.tree_at(lambda p: p.prior_precision, posterior, prior)
            return changed.log_marginal_likelihood(0.0)

        best = posterior.with_tuned_prior(per_layer).prior_precision
        before = evidence(posterior.prior_precision)
        return best, jax.value_and_grad(evidence)(best), before

    best, (after, slopes), before = run(posterior_of(name))
    slopes = jtu.tree_leaves(slopes)
    for slope, number in zip(slopes, jtu.tree_leaves(best)):
        assert number.shape == slope.shape
        assert np.abs(np.asarray(slope) * np.asarray(number)).max() < 1e-9
    assert float(after) > float(before)
    assert len(slopes) == (1 if not per_layer else 2)


def test_kept_in_a_file(tmp_path):
    posterior, path = posterior_of("kronecker"), tmp_path / "posterior.eqx"
    assert posterior.prior_precision.shape == ()
    tuned = eqx.filter_jit(lambda p: p.with_tuned_prior())(posterior)
    eqx.tree_serialise_leaves(path, tuned)
    found = eqx.tree_deserialise_leaves(path, posterior)
    assert_same(found, tuned)
    assert float(found.prior_precision) != float(posterior.prior_precision)


def test_half_precision():
    """Of the model; the posterior is in float32."""

    @eqx.filter_jit
    def collected(model, x, t):
        half = lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a
        model, x = jtu.tree_map(half, (model, x))
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, t)
        return kfac.analysis.Laplace(curvature, model, 60_000), x[0]

    @eqx.filter_jit
    def run(posterior, x, wide):
        exact = kfac.analysis.Laplace(*reversed(fitted("kronecker")), 60_000)
        return dict(
            predicted=posterior.predict(forward, x),
            exact=exact.predict(forward, wide),
            sample=posterior.sample(jr.key(0)),
            probabilities=posterior.predict_classes(forward, x, jr.key(0)),
        )

    posterior, x = collected(fitted("kronecker")[0], *batch)
    assert float(posterior.num_examples) == 60_000
    got = run(posterior, x, batch[0][0])
    mean, covariance = got["predicted"]
    assert mean.dtype == covariance.dtype == jnp.float32
    close(covariance, got["exact"][1], 0.02)
    assert got["sample"].layers[0].weight.dtype == jnp.bfloat16
    close(np.sum(got["probabilities"]), 1.0, 1e-5)


def test_one_prior_for_each_layer():
    model, curvature = fitted("stacked")
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    priors = operator.per_layer(1.0)
    assert priors.layers.shape == (2,) and priors.last.shape == ()
    numbers = jnp.array([0.3, 2.0]), jnp.array(5.0)
    priors = eqx.tree_at(lambda m: (m.layers, m.last), priors, numbers)
    each = [0.3] * 9 + [2.0] * 9 + [0.3] * 3 + [2.0] * 3 + [5.0] * 6  # Weights, biases.

    @eqx.filter_jit
    def run(curvature, priors):
        posterior = kfac.analysis.Laplace(curvature, model, N, prior_precision=priors)
        return posterior.precision().as_matrix(), operator.as_matrix()

    precision, matrix = map(np.asarray, run(curvature, priors))
    close(precision, N * matrix + np.diag(each))


def test_l2_is_a_prior():
    """An `L2` term is not counted twice, and `None` takes it for the prior."""
    model, curvature = fitted("kronecker")

    def with_l2(model, x, t):
        return loss_fn(model, x, t) + kfac.L2(model, 0.2)

    @eqx.filter_jit
    def run(batch):
        regularised = kfac.curvature(with_l2, fisher=kfac.Exact())(model, *batch)
        own = kfac.analysis.Laplace(regularised, model, N, DELTA, SIGMA, TEMPERATURE)
        operators = [
            own.precision(),
            posterior_of("kronecker").precision(),
            kfac.analysis.Laplace(regularised, model, N, None, SIGMA).precision(),
            kfac.analysis.BlockDiagonalOperator(regularised, model),
        ]
        return regularised, [operator.as_matrix() for operator in operators]

    regularised, (own, plain, taken, whole) = run(batch)
    assert float(regularised.layers[0].l2) == pytest.approx(0.2)
    close(own, plain)
    close(taken, N / SIGMA**2 * np.asarray(whole))
    with pytest.raises(ValueError, match="`prior_precision` must be positive"):
        kfac.analysis.Laplace(curvature, model, N, None)


def test_last_layer_of_a_regression_is_exact():
    """With one output, and inputs that are given: Bayesian linear regression."""
    x, t = normal(20, 3, seed=5), normal(20, 1, seed=6)

    @eqx.filter_jit
    def run(x, t):
        key = jr.key(5)
        whole = kfac.convert(eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key))
        last = jtu.tree_map(lambda _: False, whole)
        last = eqx.tree_at(lambda m: m.layers[1].weight, last, True)
        trained, frozen = eqx.partition(whole, last)

        def fn(model, x):
            return eqx.combine(model, frozen)(x)

        def loss(model, x, t):
            return kfac.SquaredError(jax.vmap(ft.partial(fn, model))(x), t)

        curvature = kfac.curvature(loss, fisher=kfac.Exact())(trained, x, t)
        posterior = kfac.analysis.Laplace(
            curvature, trained, len(x), 0.3, sigma_noise=0.2
        )
        hidden = jnp.tanh(jax.vmap(whole.layers[0])(x))
        matrix = posterior.precision().as_matrix()
        variance = posterior.functional_variance(fn, x[0])
        return hidden, matrix, variance, posterior.sample(key)

    hidden, matrix, variance, sample = run(x, t)
    h = np.asarray(hidden)
    precision = h.T @ h / 0.2**2 + 0.3 * np.eye(4)
    close(matrix, precision)
    close(variance, [[h[0] @ np.linalg.inv(precision) @ h[0]]])
    assert sample.layers[0].weight is None


def test_classes():
    @eqx.filter_jit
    def run(model, curvature, xs):
        posterior = kfac.analysis.Laplace(curvature, model, 4, 0.02)
        predict = ft.partial(posterior.predict_classes, forward)
        x = xs[0]
        drawn = predict(x, jr.key(0), 200_000)
        variance = posterior.functional_variance(forward, x)
        return model(x), variance, predict(x), drawn, jax.vmap(predict)(xs)

    found = run(*fitted("kronecker"), batch[0])
    logits, variance, one, drawn, many = map(np.asarray, found)
    probit = softmax(logits / np.sqrt(1 + np.pi / 8 * np.diag(variance)))
    close(one, probit)
    samples = np.random.default_rng(0).multivariate_normal(logits, variance, 200_000)
    mean = softmax(samples).mean(axis=0)
    close(drawn, mean, 0.01)
    assert np.abs(softmax(logits) - mean).max() > 0.02
    close(many[0], probit)


def softmax(z):
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["variance", "probit", "samples"])
def test_memory_does_not_grow_with_the_jacobian(kind):
    """Of a last layer of many classes: that has as many numbers as classes squared times
    features."""
    classes, features = 300, 40
    layer = kfac.Linear(features, classes, dtype=jnp.float32, key=jr.key(0))
    calls = {
        "variance": lambda p, x: p.functional_variance(lambda m, x: m(x), x),
        "probit": lambda p, x: p.predict_classes(lambda m, x: m(x), x),
        "samples": lambda p, x: p.predict_classes(lambda m, x: m(x), x, jr.key(0), 10),
    }

    def run(layer, x):
        rows = normal(2, features, dtype=jnp.float32)
        loss_fn = lambda m, x: kfac.SoftmaxCrossEntropy(jax.vmap(m)(x), jnp.arange(2))
        curvature = kfac.curvature(loss_fn, kfac.MonteCarlo())(layer, rows, key=jr.key(0))
        return kfac.analysis.Laplace(curvature, layer, 2)

    x = jax.ShapeDtypeStruct((features,), jnp.float32)
    posterior = eqx.filter_eval_shape(run, layer, x)
    arrays, static = eqx.partition(posterior, lambda a: hasattr(a, "dtype"))
    call = jax.jit(lambda arrays, x: calls[kind](eqx.combine(arrays, static), x))
    compiled = call.lower(arrays, x).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    parameters, result = 4 * classes * (features + 1), 4 * classes**2
    assert used < 12 * result + 12 * parameters
    assert 12 * (result + parameters) < 0.5 * classes * parameters


def test_functions_with_a_derivative_of_their_own():
    """Their derivatives in forward mode are not known."""

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
    layer = kfac.Linear(3, 4, dtype=float, key=jr.key(0))
    x, y = normal(6, 3), normal(6, 4)

    @eqx.filter_jit
    def variances(layer, x, y):
        curvature = kfac.curvature(squared, kfac.Exact())(layer, x, y)
        posterior = kfac.analysis.Laplace(curvature, layer, 6)
        plain = posterior.functional_variance(lambda m, x: m(x), x[0])
        return plain, posterior.functional_variance(lambda m, x: doubled(m(x)), x[0])

    once, twice = variances(layer, x, y)
    close(twice, 4 * once)


@pytest.mark.parametrize(
    "number", ["num_examples", "prior_precision", "sigma_noise", "temperature"]
)
def test_numbers_are_checked(number):
    good = dict(num_examples=N, prior_precision=1.0, sigma_noise=1.0, temperature=1.0)
    for wrong in (0, -1.0, jnp.array(-1.0), np.float32(-1)):
        with pytest.raises(ValueError, match=f"`{number}` must be"):
            kfac.analysis.Laplace(
                *reversed(fitted("kronecker")), **(good | {number: wrong})
            )
    with pytest.raises((TypeError, ValueError), match=f"`{number}` must be a number"):
        kfac.analysis.Laplace(*reversed(fitted("kronecker")), **(good | {number: "1"}))


def test_damping_is_checked():
    model, curvature = fitted("stacked")
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
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
    exact = kfac.analysis.GaussNewtonOperator(loss_fn, model, *batch)
    with pytest.raises(ValueError, match="`damping` must be at least 0"):
        exact.damped(-0.1)
    with pytest.raises(ValueError, match="but has shape"):
        exact.damped(jnp.ones(2))


def test_float32_loses_what_is_below_its_resolution():
    """The floor that the documentation states: below it, the log-determinant is wrong;
    well above, it is right."""

    @eqx.filter_jit
    def collected(model, x):
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, None)
        values = kfac.analysis.BlockDiagonalOperator(curvature, model).eigenvalues()
        single = lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a
        return curvature, jtu.tree_map(single, (curvature, model)), values

    @eqx.filter_jit
    def logdet(curvature, model, delta):
        return kfac.analysis.Laplace(curvature, model, N, delta).precision().logdet()

    model, _ = fitted("kronecker")
    x = normal(64, 3, seed=8) * np.array([[30.0, 1e-3, 1.0]])
    curvature, low, values = collected(model, x)
    largest = max(float(np.asarray(v).max()) for v in jtu.tree_leaves(values))
    floor = N * largest * np.finfo(np.float32).eps
    for delta, wrong in ((10 * floor, False), (1e-6 * floor, True)):
        exact = float(logdet(curvature, model, jnp.asarray(delta)))
        found = float(logdet(*low, jnp.asarray(delta, jnp.float32)))
        assert (abs(exact - found) > 1e-2 * abs(exact)) == wrong, (exact, found)
