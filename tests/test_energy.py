"""The energy of a wavefunction: its gradient, and the covariance that is its Fisher."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from .helpers import make_mesh


N, D = 12, 3
KEYS = jr.split(jr.key(5), 4)
X = jr.normal(KEYS[0], (N, D))
REAL = 2 * jr.normal(KEYS[1], (N,)) + 1.0
COMPLEX = jax.lax.complex(REAL, jr.normal(KEYS[2], (N,)))
KINDS = pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])


def network(block=kfac.Full(), is_complex=False):
    out = 2 if is_complex else "scalar"
    mlp = eqx.nn.MLP(D, out, 4, 1, activation=jnp.tanh, key=KEYS[3])
    return kfac.convert(mlp, block)


def log_psi(model, x):
    y = jax.vmap(model)(x)
    return y if y.ndim == 1 else jax.lax.complex(y[:, 0], y[:, 1])


def energies(is_complex):
    return COMPLEX if is_complex else REAL


def loss_fn(model, x, e, clip=None):
    return kfac.Energy(log_psi(model, x), e, clip=clip)


def jacobian(model):
    """`[walkers, parameters]`: the derivatives of log psi."""
    params, static = eqx.partition(kfac.revert(model), eqx.is_inexact_array)
    flat, back = ravel_pytree(params)
    return np.asarray(
        jax.jacfwd(lambda p: log_psi(eqx.combine(back(p), static), X))(flat)
    )


def flat(tree):
    return np.asarray(ravel_pytree(eqx.filter(kfac.revert(tree), eqx.is_array))[0])


def gradient(model, *args, clip=None):
    return eqx.filter_grad(lambda m: loss_fn(m, *args, clip=clip).value)(model)


def covariance(jac):
    away = jac - jac.mean(axis=0)
    return 4 * np.real(away.conj().T @ away) / N


#
# Value and gradient
#


@KINDS
def test_value_and_gradient(is_complex):
    e, model = energies(is_complex), network(is_complex=is_complex)
    np.testing.assert_allclose(loss_fn(model, X, e).value, REAL.mean(), rtol=1e-14)
    o = jacobian(model)
    away = np.asarray(e - e.mean())
    want = 2 * np.real(away.conj() @ o) / N
    np.testing.assert_allclose(flat(gradient(model, X, e)), want, atol=1e-14)
    # The energies are constants, and of another mean the gradient is the same.
    np.testing.assert_allclose(flat(gradient(model, X, e + 7.0)), want, atol=1e-13)
    assert np.linalg.norm(2 * np.real(np.asarray(e).conj() @ o) / N - want) > 0.1


def test_energies_are_constants():
    def with_model(model, x, e):
        return kfac.Energy(log_psi(model, x), e * jnp.sum(model.layers[0].weight))

    model = network()
    factor = jnp.sum(model.layers[0].weight)
    got = eqx.filter_grad(lambda m: with_model(m, X, REAL).value)(model)
    want = factor * flat(gradient(model, X, REAL, clip=5.0))
    np.testing.assert_allclose(flat(got), want, atol=1e-13)


def test_clipped():
    e = REAL.at[3].set(500.0)
    model, o = network(), jacobian(network())
    away = np.asarray(e - e.mean())
    most = 2.0 * np.abs(away).mean()
    away = np.clip(away, -most, most)
    away = away - away.mean()
    want = 2 * away @ o / N
    np.testing.assert_allclose(flat(gradient(model, X, e, clip=2.0)), want, atol=1e-12)
    assert np.linalg.norm(flat(gradient(model, X, e)) - want) > 1
    np.testing.assert_allclose(loss_fn(model, X, e, clip=2.0).value, e.mean())


def test_weights_are_repetitions():
    weights, few = jnp.array([1, 0, 2] * 4), [0, 2, 2, 3, 5, 5, 6, 8, 8, 9, 11, 11]
    few = jnp.array(few)

    def weighted(model, x, e):
        return kfac.Energy(log_psi(model, x), e, weights=weights)

    value = lambda loss: lambda m, *args: loss(m, *args).value
    plain = lambda m, x, e: kfac.Energy(log_psi(m, x), e)
    got = eqx.filter_value_and_grad(value(weighted))(network(), X, REAL)
    want = eqx.filter_value_and_grad(value(plain))(network(), X[few], REAL[few])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
    np.testing.assert_allclose(flat(got[1]), flat(want[1]), atol=1e-13)
    operators = [
        kfac.Fisher(weighted, network(), X, REAL),
        kfac.Fisher(plain, network(), X[few], REAL[few]),
    ]
    matrices = [np.asarray(lx.materialise(o).as_matrix()) for o in operators]
    np.testing.assert_allclose(*matrices, atol=1e-12)


#
# Curvature
#


@KINDS
@pytest.mark.parametrize("operator", [kfac.Fisher, kfac.GaussNewton])
def test_exact_operators_are_the_covariance(operator, is_complex):
    model = network(is_complex=is_complex)
    got = operator(loss_fn, model, X, energies(is_complex)).as_matrix()
    o = jacobian(model)
    np.testing.assert_allclose(got, covariance(o), atol=1e-12)
    around_zero = 4 * np.real(o.conj().T @ o) / N
    assert np.linalg.norm(got - around_zero) > 0.1


def layers_of(matrix, model):
    """The diagonal blocks of a matrix of all parameters, as canonical matrices."""
    found, start = [], 0
    for layer in model.layers:
        rows, columns = layer.weight.shape[0], layer.weight.shape[1]
        size = rows * columns
        own = np.arange(start, start + size).reshape(rows, columns)
        bias = np.arange(start + size, start + size + rows)[:, None]
        index = np.concatenate([own, bias], axis=1).reshape(-1)
        found.append(matrix[np.ix_(index, index)])
        start += size + rows
    return found


def collect(fisher, model, e, x=X):
    return kfac.curvature(loss_fn, fisher)(model, x, e)


@KINDS
def test_centred_blocks_are_the_covariance(is_complex):
    model, e = network(is_complex=is_complex), energies(is_complex)
    got = collect(kfac.Centred(), model, e)
    want = layers_of(covariance(jacobian(model)), model)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(factors.matrix, block, atol=1e-12)
    diagonal = collect(kfac.Centred(), network(kfac.Diagonal(), is_complex), e)
    for factors, block in zip(diagonal.layers, want, strict=True):
        np.testing.assert_allclose(
            factors.diagonal.reshape(-1), np.diag(block), atol=1e-12
        )
    for block in (kfac.TNT(), kfac.Identity()):
        other = collect(kfac.Centred(), network(block, is_complex), e)
        for factors, dense in zip(other.layers, want, strict=True):
            matrix = block.operator(factors).as_matrix()
            np.testing.assert_allclose(np.trace(matrix), np.trace(dense), rtol=1e-12)
            assert np.linalg.eigvalsh(matrix).min() > -1e-12
    plain = collect(kfac.Exact(), model, e)
    assert np.linalg.norm(plain.layers[0].matrix - want[0]) > 1e-2


@KINDS
def test_samples_are_around_zero(is_complex):
    """The estimate by random targets is of the second moment."""
    model, e = network(is_complex=is_complex), energies(is_complex)
    o = jacobian(model)
    want = layers_of(4 * np.real(o.conj().T @ o) / N, model)
    exact = collect(kfac.Exact(), model, e)
    sampled = kfac.curvature(loss_fn, kfac.MonteCarlo(4000, batch_size=500))(
        model, X, e, key=KEYS[0]
    )
    for a, b, block in zip(exact.layers, sampled.layers, want, strict=True):
        np.testing.assert_allclose(a.matrix, block, atol=1e-12)
        assert np.linalg.norm(b.matrix - block) < 0.1 * np.linalg.norm(block)


@KINDS
def test_the_quadratic_model_is_of_the_covariance(is_complex):
    """A step of the length that it chooses is the best along the direction."""
    model, e = network(kfac.TNT(), is_complex), energies(is_complex)
    optimizer = kfac.KFAC(
        kfac.QuadraticModel(), 0.0, 0.1, norm_constraint=None, fisher=kfac.Centred()
    )
    new, _, info = optimizer.step(loss_fn, model, optimizer.init(model), X, e)
    step = flat(new) - flat(model)
    slope = flat(gradient(model, X, e))
    curved = covariance(jacobian(model)) + 0.1 * np.eye(len(step))
    best = -(slope @ step) / (step @ curved @ step)
    np.testing.assert_allclose(best, 1.0, rtol=1e-9)
    assert float(info.learning_rate) > 0


@pytest.mark.parametrize("inside", [False, True])
def test_devices(inside):
    """The means are over the walkers of all devices."""
    mesh = make_mesh((4,))
    params, static = eqx.partition(network(), eqx.is_array)
    take = kfac.value_grad_and_curvature(loss_fn, kfac.Centred())

    def collected(params, x, e):
        found = take(eqx.combine(params, static), x, e, clip=2.0)
        return eqx.filter(found, eqx.is_array)

    run, specs = collected, (P(), P("batch"), P("batch"))
    if inside:
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())
    args = jax.device_put((X, REAL), NamedSharding(mesh, P("batch")))
    got, want = jax.jit(run)(params, *args), collected(params, X, REAL)
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


#
# What is refused
#


@pytest.mark.parametrize("shape", [(N, 1), (N - 1,)])
def test_other_shapes(shape):
    with pytest.raises(ValueError, match=r"must both have the shape \[walkers\]"):
        kfac.Energy(jnp.zeros(shape), REAL)
    with pytest.raises(ValueError, match="`clip` must be"):
        kfac.Energy(jnp.zeros(N), REAL, clip=0.0)


def test_where_centring_makes_no_sense():
    with pytest.raises(ValueError, match=r"\.layers\[0\].*`kfac.TNT\(\)`"):
        collect(kfac.Centred(), network(kfac.Kronecker()), REAL)
    weighted = lambda m, x, e: kfac.Energy(log_psi(m, x), e, weights=jnp.ones(N))
    with pytest.raises(ValueError, match="one loss without weights"):
        kfac.curvature(weighted, kfac.Centred())(network(), X, REAL)
    squared = lambda m, x: kfac.SquaredError(jax.vmap(m)(x)[:, None], x[:, :1])
    model = network()
    for loss, args, fisher, what in (
        (loss_fn, (X, REAL), kfac.Exact(), "The terms of `kfac.Energy`"),
        (squared, (X,), kfac.Centred(), "takes the mean over the whole batch"),
    ):
        optimizer = kfac.KFAC(0.1, fisher=fisher)
        with pytest.raises(ValueError, match=f"{what}.*`micro_batches=1`"):
            optimizer.step(loss, model, optimizer.init(model), *args, micro_batches=2)
    for take in (kfac.capture, kfac.Accumulator):
        with pytest.raises(ValueError, match="not one of single examples"):
            take(loss_fn, kfac.Centred())
