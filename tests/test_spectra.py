"""Eigenvalues by products with vectors, against dense decompositions."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import close, flat
from .models import batch, mlp, penalised as loss_fn


@ft.cache
def made():
    """The operators, by name."""

    @eqx.filter_jit
    def run(batch):
        model = mlp(jr.key(3))
        return model, kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *batch)

    model, curvature = run(batch)
    return {
        "gauss-newton": kfac.analysis.GaussNewtonOperator(loss_fn, model, *batch),
        "hessian": kfac.analysis.HessianOperator(loss_fn, model, *batch),
        "blocks": kfac.analysis.BlockDiagonalOperator(curvature, model),
    }


OPERATORS = pytest.mark.parametrize("name", ["gauss-newton", "hessian", "blocks"])


@OPERATORS
def test_lanczos(name):
    @eqx.filter_jit
    def run(operator):
        whole = kfac.analysis.lanczos(operator, jr.key(0), operator.in_size())
        few = kfac.analysis.lanczos(operator, jr.key(0), 12)
        vector = few.vector(jnp.argmin(few.residuals))
        both = flat(vector), flat(operator.mv(vector))
        return operator.as_matrix(), whole, few, *both

    matrix, whole, few, vector, product = run(made()[name])
    values = np.linalg.eigvalsh(np.asarray(matrix))
    close(whole.values, values)  # Multiple ones too, and where the Krylov space ends.
    close(np.sum(np.asarray(whole.weights)), 1.0)

    found, residuals = np.asarray(few.values), np.asarray(few.residuals)
    best = int(np.argmin(residuals))
    close(np.linalg.norm(np.asarray(vector)), 1.0)
    residual = np.asarray(product) - found[best] * np.asarray(vector)
    assert np.linalg.norm(residual) <= residuals[best] + 1e-12
    nearest = np.abs(found[:, None] - values).min(axis=1)
    assert (nearest <= residuals + 1e-12).all()
    assert residuals[-1] < 0.1 * residuals.max()  # Extreme ones first.
    assert values[0] - 1e-12 < found[0] and found[-1] < values[-1] + 1e-12


def test_one_eigenvalue_only():
    """The identity: the space is exhausted at once, and again."""
    operator = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((5,), float))
    found = eqx.filter_jit(kfac.analysis.lanczos)(operator, jr.key(0), 5)
    close(found.values, np.ones(5))
    close(found.residuals, np.zeros(5))


@OPERATORS
def test_spectral_density(name):
    fns = [lambda x: x, lambda x: x**2, lambda x: x / (x + 0.1)]

    @eqx.filter_jit
    def run(operator):
        matrix = operator.as_matrix()
        density = kfac.analysis.spectral_density(operator, jr.key(1), 400, 8)
        values = jnp.linalg.eigvalsh(matrix)
        points = jnp.linspace(values[0] - 2, values[-1] + 2, 2001)
        traces = [density.trace(fn) for fn in fns]
        return matrix, traces, points, density(points, 0.2)

    found = run(made()[name].damped(0.5 if name == "hessian" else 0.0))
    matrix, traces, points, density = jax.tree.map(np.asarray, found)
    values = np.linalg.eigvalsh(matrix)
    for fn, (mean, error) in zip(fns, traces, strict=True):
        expected = np.sum(fn(values))
        assert abs(mean - expected) < 4 * error < 0.3 * abs(expected)
    close(np.trapezoid(density, points), 1.0, 1e-6)
    assert (density >= 0).all()
    close(np.trapezoid(density * points, points), values.mean(), 0.1)


def test_of_layers():
    @eqx.filter_jit
    def run(operator):
        return dict(
            of_damping=[
                (operator.effective_dimension(d), operator.condition_number(d))
                for d in (0.1, operator.per_layer(0.1))
            ],
            matrix=operator.as_matrix(),
            scaled=operator.scaled(3.0).as_matrix(),
            l2=operator.l2().layers[0],
            without=operator.without_l2().damped(0.2).as_matrix(),
        )

    got = jax.tree.map(np.asarray, run(made()["blocks"]))
    matrix = got["matrix"]
    values = np.linalg.eigvalsh(matrix)
    for dimension, condition in got["of_damping"]:
        close(dimension, np.sum(values / (values + 0.1)))
        close(condition, (values[-1] + 0.1) / (values[0] + 0.1))
    close(got["scaled"], 3 * matrix)
    assert float(got["l2"]) == pytest.approx(0.2)
    close(got["without"], matrix)


def test_all_operators_have_traces_and_determinants():
    @eqx.filter_jit
    def run(operators):
        damped = [operator.damped(0.5) for operator in operators]
        return [
            (o.as_matrix(), o.trace(), o.diagonal(), o.logdet(2.0))
            for o in operators + damped
        ]

    eye = lambda size, scale=1.0: jnp.asarray(scale * np.eye(size))
    kronecker = kfac.operators.KroneckerOperator(
        jax.device_put(np.diag([2.0, 1.0])), jax.device_put(np.eye(3) + 0.5)
    )
    spectral = eqx.filter_jit(lambda operator: operator.spectral())(kronecker)
    series = kfac.operators.SeriesOperator(
        eye(2), eye(2, 0.3), eye(3), eye(3, 0.2), jnp.array(4.0), "x"
    )
    found = run([kronecker, spectral, series, *made().values()])
    for matrix, trace, diagonal, logdet in jax.tree.map(np.asarray, found):
        close(trace, np.trace(matrix))
        close(diagonal, np.diag(matrix))
        close(logdet, np.linalg.slogdet(matrix + 2 * np.eye(len(matrix)))[1])


def test_errors():
    operator = made()["blocks"]
    with pytest.raises(ValueError, match="operator has 20 eigenvalues"):
        kfac.analysis.lanczos(operator, jr.key(0), 21)
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        kfac.analysis.lanczos(operator, jr.key(0), 0)
    with pytest.raises(ValueError, match="`num_samples` must be at least 2"):
        kfac.analysis.spectral_density(operator, jr.key(0), num_samples=1)
    with pytest.raises(ValueError, match="needs a symmetric operator"):
        kfac.analysis.lanczos(lx.MatrixLinearOperator(jnp.ones((2, 2))), jr.key(0), 2)
