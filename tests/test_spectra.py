"""Eigenvalues by products with vectors, against dense decompositions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import close, flat
from .test_block_diagonal import batch, loss_fn, mlp


model = mlp(jr.key(3))
curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *batch)
operators = {
    "gauss-newton": kfac.GaussNewton(loss_fn, model, *batch),
    "hessian": kfac.Hessian(loss_fn, model, *batch),
    "blocks": kfac.BlockDiagonalOperator(curvature, model),
}


@pytest.mark.parametrize("name", operators)
def test_lanczos(name):
    operator = operators[name]
    matrix = np.asarray(operator.as_matrix())
    values, size = np.linalg.eigvalsh(matrix), len(matrix)
    run = eqx.filter_jit(kfac.lanczos)
    whole = run(operator, jr.key(0), size)
    close(whole.values, values)  # Multiple ones too, and where the Krylov space ends.
    close(np.sum(whole.weights), 1.0)

    few = run(operator, jr.key(0), 12)
    best = int(np.argmin(few.residuals))
    vector = few.vector(best)
    close(np.linalg.norm(flat(vector)), 1.0)
    residual = flat(operator.mv(vector)) - few.values[best] * flat(vector)
    assert np.linalg.norm(residual) <= few.residuals[best] + 1e-12
    nearest = np.abs(np.asarray(few.values)[:, None] - values).min(axis=1)
    assert (nearest <= few.residuals + 1e-12).all()
    assert few.residuals[-1] < 0.1 * few.residuals.max()  # Extreme ones first.
    assert values[0] - 1e-12 < few.values[0] and few.values[-1] < values[-1] + 1e-12


def test_one_eigenvalue_only():
    """The identity: the space is exhausted at once, and again."""
    structure = jax.ShapeDtypeStruct((5,), float)
    found = kfac.lanczos(lx.IdentityLinearOperator(structure), jr.key(0), 5)
    close(found.values, np.ones(5))
    close(found.residuals, np.zeros(5))


@pytest.mark.parametrize("name", operators)
def test_spectral_density(name):
    operator = operators[name].damped(0.5 if name == "hessian" else 0.0)
    values = np.linalg.eigvalsh(np.asarray(operator.as_matrix()))
    density = eqx.filter_jit(kfac.spectral_density)(operator, jr.key(1), 400, 8)
    for fn in (lambda x: x, jnp.square, lambda x: x / (x + 0.1)):
        mean, error = density.trace(fn)
        expected = float(jnp.sum(fn(jnp.asarray(values))))
        assert abs(mean - expected) < 4 * error < 0.3 * abs(expected)
    points = jnp.linspace(values[0] - 2, values[-1] + 2, 2001)
    found = density(points, 0.2)
    close(jnp.trapezoid(found, points), 1.0, 1e-6)
    assert (found >= 0).all()
    close(jnp.trapezoid(found * points, points), values.mean(), 0.1)


def test_of_layers():
    operator = operators["blocks"]
    values = np.linalg.eigvalsh(np.asarray(operator.as_matrix()))
    for damping in (0.1, operator.per_layer(0.1)):
        dimension = operator.effective_dimension(damping)
        close(dimension, np.sum(values / (values + 0.1)))
        condition = (values[-1] + 0.1) / (values[0] + 0.1)
        close(operator.condition_number(damping), condition)
    close(operator.scaled(3.0).as_matrix(), 3 * operator.as_matrix())
    assert float(operator.l2().layers[0]) == pytest.approx(0.2)
    without = operator.without_l2().damped(0.2)
    close(without.as_matrix(), operator.as_matrix())


def test_all_operators_have_traces_and_determinants():
    kronecker = kfac.KroneckerOperator(jnp.diag(jnp.array([2.0, 1.0])), jnp.eye(3) + 0.5)
    series = kfac.SeriesOperator(
        jnp.eye(2), 0.3 * jnp.eye(2), jnp.eye(3), 0.2 * jnp.eye(3), jnp.array(4.0), "x"
    )
    for operator in (kronecker, kronecker.spectral(), series, *operators.values()):
        for operator in (operator, operator.damped(0.5)):
            matrix = np.asarray(operator.as_matrix())
            close(operator.trace(), np.trace(matrix))
            close(operator.diagonal(), np.diag(matrix))
            close(
                operator.logdet(2.0),
                np.linalg.slogdet(matrix + 2 * np.eye(len(matrix)))[1],
            )


def test_errors():
    operator = operators["blocks"]
    with pytest.raises(ValueError, match="operator has 20 eigenvalues"):
        kfac.lanczos(operator, jr.key(0), 21)
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        kfac.lanczos(operator, jr.key(0), 0)
    with pytest.raises(ValueError, match="`num_samples` must be at least 2"):
        kfac.spectral_density(operator, jr.key(0), num_samples=1)
    with pytest.raises(ValueError, match="needs a symmetric operator"):
        kfac.lanczos(lx.MatrixLinearOperator(jnp.ones((2, 2))), jr.key(0), 2)
