"""Damped inverses and Kronecker operators, against dense linear algebra."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._operator._spectral import DenseBasis, KroneckerBasis, SpectralOperator

from . import reference


TOLERANCE = 1e-10
SOLVERS = pytest.mark.parametrize(
    "solver, dense",
    [
        (kfac.Eigh(), reference.exact_solve),
        (kfac.Cholesky(), reference.factored_solve),
        (kfac.SubspaceIteration(), reference.exact_solve),
        (kfac.NewtonSchulz(1e-14), reference.factored_solve),
    ],
    ids=["eigh", "cholesky", "subspace", "newton-schulz"],
)
DAMPING = pytest.mark.parametrize("damping", [1e-3, 0.3])


def factor(key, d, rank=None):
    x = jax.random.normal(key, (d + 3 if rank is None else rank, d))
    return x.T @ x / len(x)


def kronecker(key, d_out=3, d_in=4, rank=None):
    keys = jax.random.split(key)
    return kfac.KroneckerOperator(
        factor(keys[0], d_out, rank), factor(keys[1], d_in, rank)
    )


def vector(key, operator):
    structure = operator.in_structure()
    return jax.random.normal(key, structure.shape, structure.dtype)


def solve(operator, v, solver, damping=0.0):
    return lx.linear_solve(operator, v, solver, options={"damping": damping}).value


def both(operator):
    return operator.output_factor, operator.input_factor


#
# Damped inverses
#


@SOLVERS
@DAMPING
@pytest.mark.parametrize("rank", [None, 1], ids=["full-rank", "rank-1"])
def test_damped_solve(solver, dense, damping, rank, getkey):
    operator = kronecker(getkey(), rank=rank)
    v = vector(getkey(), operator)
    solution = solve(operator, v, solver, damping)
    assert reference.error(solution, dense(*both(operator), damping, v)) < TOLERANCE


@DAMPING
def test_the_two_dampings_differ(damping, getkey):
    operator = kronecker(getkey())
    v = vector(getkey(), operator)
    eigh = solve(operator, v, kfac.Eigh(), damping)
    assert reference.error(solve(operator, v, kfac.Cholesky(), damping), eigh) > 1e-3


@SOLVERS
def test_without_damping(solver, dense, getkey):
    operator = kronecker(getkey())
    v = vector(getkey(), operator)
    expected = reference.exact_solve(*both(operator), 0.0, v)
    assert reference.error(solve(operator, v, solver), expected) < TOLERANCE
    assert reference.error(lx.linear_solve(operator, v, solver).value, expected) < 1e-10
    assert reference.error(operator.mv(solve(operator, v, solver)), v) < TOLERANCE


@SOLVERS
@pytest.mark.parametrize("c", [1e-6, 1e6])
def test_only_the_product_matters(solver, dense, c, getkey):
    operator = kronecker(getkey())
    moved = kfac.KroneckerOperator(operator.output_factor / c, operator.input_factor * c)
    v = vector(getkey(), operator)
    before, after = (solve(o, v, solver, 0.1) for o in (operator, moved))
    assert reference.error(after, before) < TOLERANCE
    # One factor alone does matter.
    scaled = kfac.KroneckerOperator(operator.output_factor, operator.input_factor * c)
    assert reference.error(solve(scaled, v, solver, 0.1), before) > 0.1


@SOLVERS
@pytest.mark.parametrize("dead", ["output", "input", "both"])
@pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_dead_layer(solver, dense, dead, d_out, d_in, getkey):
    G, A = both(kronecker(getkey(), d_out, d_in))
    G = G if dead == "input" else jnp.zeros_like(G)
    A = A if dead == "output" else jnp.zeros_like(A)
    operator = kfac.KroneckerOperator(G, A)
    v = vector(getkey(), operator)
    assert reference.error(solve(operator, v, solver, 0.01), 100 * v) < TOLERANCE


@SOLVERS
@DAMPING
@pytest.mark.parametrize("d_out, d_in", [(1, 4), (3, 1), (1, 1)])
def test_one_by_one_factor_is_exact(solver, dense, damping, d_out, d_in, getkey):
    operator = kronecker(getkey(), d_out, d_in)
    G, A = both(operator)
    v = vector(getkey(), operator)
    solution = solve(operator, v, solver, damping)
    if d_out == 1:
        by_hand = np.linalg.solve(A + damping / G[0, 0] * np.eye(d_in), v.T).T / G[0, 0]
    else:
        by_hand = np.linalg.solve(G + damping / A[0, 0] * np.eye(d_out), v) / A[0, 0]
    assert reference.error(solution, by_hand) < TOLERANCE
    exact = reference.exact_solve(G, A, damping, v)
    assert reference.error(solution, exact) < TOLERANCE


@pytest.mark.parametrize(
    "solver", [kfac.Cholesky, lambda **w: kfac.NewtonSchulz(1e-14, **w)]
)
@DAMPING
def test_without_the_bias(solver, damping, getkey):
    r"""$\pi$ of the weights alone: if the solver is to, and told that there is a bias."""
    G, A = both(kronecker(getkey()))
    units = jnp.array([1e-2, 1e-2, 1e-2, 1.0])
    operator = kfac.KroneckerOperator(G, A * jnp.outer(units, units))
    v = vector(getkey(), operator)
    plain, other = (
        reference.factored_solve(*both(operator), damping, v, without_bias=without)
        for without in (False, True)
    )
    assert reference.error(plain, other) > 0.1
    for without_bias in (False, True):
        for bias in (False, True):
            options = {"damping": damping, "bias": bias}
            chosen = solver(without_bias=without_bias)
            got = lx.linear_solve(operator, v, chosen, options=options).value
            want = other if without_bias and bias else plain
            assert reference.error(got, want) < TOLERANCE
    # Where there is nothing but the bias, or it is but one of many, all of it counts.
    for inputs in (jnp.diag(jnp.array([0.0, 0.0, 0.0, 2.0])), A):
        other = kfac.KroneckerOperator(G, inputs)
        options = {"damping": damping, "bias": True}
        got = lx.linear_solve(other, v, solver(without_bias=True), options=options).value
        want = reference.factored_solve(*both(other), damping, v)
        assert reference.error(got, want) < TOLERANCE


def test_diagonal_by_eigenvectors(getkey):
    for operator in (kronecker(getkey()), kronecker(getkey(), 1, 4)):
        for spectral in (operator.spectral(), operator.inverse(0.3)):
            dense = np.diag(spectral.as_matrix())
            assert reference.error(spectral.diagonal(), dense) < TOLERANCE
    vectors = jnp.linalg.eigh(factor(getkey(), 6))[1]
    values = jnp.arange(6.0).reshape(2, 3)
    spectral = SpectralOperator(DenseBasis(vectors), values)
    dense = np.diag(spectral.as_matrix())
    assert reference.error(spectral.diagonal(), dense) < TOLERANCE
    alone = SpectralOperator(KroneckerBasis(None, None), values)
    assert np.all(alone.diagonal() == np.arange(6.0))


def test_eigh_state_serves_any_damping(getkey):
    operator, solver = kronecker(getkey()), kfac.Eigh()
    v = vector(getkey(), operator)
    state = solver.init(operator, {})
    for damping in (1e-2, 1.0):
        options = {"damping": damping}
        out = lx.linear_solve(operator, v, solver, options=options, state=state)
        expected = reference.exact_solve(*both(operator), damping, v)
        assert reference.error(out.value, expected) < TOLERANCE


def test_eigh_of_slightly_indefinite_factors(getkey):
    # Rounding must not turn a zero eigenvalue into a large step.
    G, A = both(kronecker(getkey(), rank=1))
    operator = kfac.KroneckerOperator(G - 1e-9 * jnp.eye(3), A)
    v = vector(getkey(), operator)
    step = solve(operator, v, kfac.Eigh(), 1e-10)
    assert jnp.linalg.norm(step) <= 1.001e10 * jnp.linalg.norm(v)


#
# Transformations
#


@SOLVERS
def test_solve_under_jit(solver, dense, getkey):
    operator = kronecker(getkey())
    v = vector(getkey(), operator)
    jitted = eqx.filter_jit(solve)(operator, v, solver, jnp.array(0.1))
    assert reference.error(jitted, dense(*both(operator), 0.1, v)) < TOLERANCE


@SOLVERS
@pytest.mark.parametrize("mapped", [(True, True), (True, False), (False, True)])
def test_solve_under_vmap(solver, dense, mapped, getkey):
    keys = jax.random.split(getkey(), 3)
    operators = eqx.filter_vmap(kronecker)(keys) if mapped[0] else kronecker(keys[0])
    vs = jax.random.normal(getkey(), (3, 3, 4) if mapped[1] else (3, 4))
    axes = tuple(eqx.if_array(0) if m else None for m in mapped)
    run = lambda operator, v: solve(operator, v, solver, 0.1)
    solutions = eqx.filter_vmap(run, in_axes=axes)(operators, vs)
    for i, solution in enumerate(solutions):
        operator = jax.tree.map(lambda x: x[i], operators) if mapped[0] else operators
        v = vs[i] if mapped[1] else vs
        assert reference.error(solution, dense(*both(operator), 0.1, v)) < TOLERANCE


@SOLVERS
def test_derivatives_with_respect_to_the_vector(solver, dense, getkey):
    operator = kronecker(getkey())
    v, other = vector(getkey(), operator), vector(getkey(), operator)
    run = lambda v: solve(operator, v, solver, 0.1)
    # The inverse is linear and symmetric.
    expected = dense(*both(operator), 0.1, other)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(run(v) * other)))(v)
    assert reference.error(gradient, expected) < TOLERANCE
    _, tangent = jax.jit(lambda v, t: jax.jvp(run, (v,), (t,)))(v, other)
    assert reference.error(tangent, expected) < TOLERANCE


@pytest.mark.parametrize("size", [1023, 1026])
def test_large_factor(size, getkey):
    """It is inverted by halves of halves, of odd sizes too."""
    root = jax.random.normal(getkey(), (size, size)) / size**0.5
    factor = root @ root.T + 0.1 * jnp.eye(size)
    operator = kfac.KroneckerOperator(jnp.ones((1, 1)), factor)
    solver = kfac.Cholesky()
    state = eqx.filter_jit(solver.init)(operator, dict(damping=0.01))
    expected = np.linalg.inv(np.asarray(factor) + 0.01 * np.eye(size))
    found = state.input_inverse * state.output_inverse
    assert np.max(np.abs(found - expected)) < 1e-10 * np.max(np.abs(expected))


@SOLVERS
def test_wrong_operator(solver, dense):
    with pytest.raises(ValueError, match="KroneckerOperator.*MatrixLinearOperator"):
        lx.linear_solve(lx.MatrixLinearOperator(jnp.eye(3)), jnp.ones(3), solver)


@SOLVERS
@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_diagonal_operator(solver, dense, shape, getkey):
    diagonal = jax.random.uniform(getkey(), shape)
    v = jax.random.normal(getkey(), shape)
    operator = lx.DiagonalLinearOperator(diagonal)
    options = dict(damping=0.1)
    solution = lx.linear_solve(operator, v, solver, options=options).value
    assert reference.error(solution, v / (diagonal + 0.1)) < TOLERANCE


DIAGONALS = [(False, True), (True, False), (True, True)]


@SOLVERS
@pytest.mark.parametrize("diagonal_out, diagonal_in", DIAGONALS)
@pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_diagonal_factors(solver, dense, diagonal_out, diagonal_in, d_out, d_in, getkey):
    """A diagonal factor is the matrix with that diagonal, in everything."""
    factors = [
        jnp.diag(jnp.diag(f)) if alone else f
        for f, alone in zip(
            both(kronecker(getkey(), d_out, d_in)), (diagonal_out, diagonal_in)
        )
    ]
    short = [
        jnp.diag(f) if alone else f
        for f, alone in zip(factors, (diagonal_out, diagonal_in))
    ]
    full, thin = kfac.KroneckerOperator(*factors), kfac.KroneckerOperator(*short)
    v = jax.random.normal(getkey(), (d_out, d_in))
    options = dict(damping=0.1)
    a, b = (lx.linear_solve(o, v, solver, options=options).value for o in (full, thin))
    assert reference.error(b, a) < TOLERANCE
    for read in (
        lambda o: o.mv(v),
        lambda o: o.as_matrix(),
        lambda o: o.trace(),
        lambda o: o.logdet(0.1),
        lambda o: jnp.sort(o.eigenvalues().ravel()),
        lambda o: o.power(0.5).as_matrix(),
        lambda o: lx.diagonal(o),
    ):
        assert reference.error(read(thin), read(full)) < TOLERANCE


@SOLVERS
def test_wrong_vector(solver, dense, getkey):
    with pytest.raises(ValueError):
        lx.linear_solve(kronecker(getkey()), jnp.ones((4, 3)), solver)


#
# The operator
#


SIZES = pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])


def dense_matrix(operator):
    return np.kron(*map(np.asarray, both(operator)))


@SIZES
def test_products(d_out, d_in, getkey):
    operator = kronecker(getkey(), d_out, d_in)
    matrix = dense_matrix(operator)
    v = vector(getkey(), operator)
    product = (matrix @ v.ravel()).reshape(v.shape)
    assert reference.error(operator.as_matrix(), matrix) < TOLERANCE
    assert reference.error(operator.mv(v), product) < TOLERANCE
    assert reference.error(operator.transpose().mv(v), product) < TOLERANCE
    assert reference.error(operator.T.as_matrix(), matrix.T) < TOLERANCE
    assert operator.in_structure() == operator.out_structure()
    assert operator.in_size() == operator.out_size() == d_out * d_in


def test_order_of_the_factors(getkey):
    operator = kronecker(getkey(), 3, 3)
    swapped = kfac.KroneckerOperator(operator.input_factor, operator.output_factor)
    assert reference.error(swapped.as_matrix(), dense_matrix(operator)) > 0.1


@SIZES
def test_spectrum(d_out, d_in, getkey):
    operator = kronecker(getkey(), d_out, d_in)
    matrix = dense_matrix(operator)
    eigenvalues = np.sort(np.ravel(operator.eigenvalues()))
    assert operator.eigenvalues().shape == (d_out, d_in)
    assert reference.error(eigenvalues, np.linalg.eigvalsh(matrix)) < TOLERANCE
    assert reference.error(operator.trace(), np.trace(matrix)) < TOLERANCE
    for damping in (0.0, 0.3):
        _, logdet = np.linalg.slogdet(matrix + damping * np.eye(len(matrix)))
        assert abs(operator.logdet(damping) - logdet) < TOLERANCE * len(matrix)
    assert abs(operator.logdet(1.0) - operator.logdet()) > 0.1


@pytest.mark.parametrize("rank", [1, 2])
def test_logdet_of_singular(rank, getkey):
    operator = kronecker(getkey(), rank=rank)
    matrix = dense_matrix(operator)
    _, logdet = np.linalg.slogdet(matrix + 1e-3 * np.eye(len(matrix)))
    assert abs(operator.logdet(1e-3) - logdet) < 1e-9


@pytest.mark.parametrize("exponent", [-0.5, -0.25, 0.5, 2, -1])
def test_power(exponent, getkey):
    operator = kronecker(getkey())
    values, vectors = np.linalg.eigh(dense_matrix(operator))
    expected = (vectors * values ** float(exponent)) @ vectors.T
    power = operator.power(exponent)
    assert isinstance(power, kfac.KroneckerOperator)
    assert reference.error(power.as_matrix(), expected) < TOLERANCE
    assert reference.error(power.as_matrix(), dense_matrix(operator)) > 0.1


@pytest.mark.parametrize("exponent", [0.5, 2])
def test_positive_power_of_singular(exponent, getkey):
    # The smallest eigenvalues come out as ±1e-17; their roots must not be NaN.
    operator = kronecker(getkey(), rank=1)
    values, vectors = np.linalg.eigh(dense_matrix(operator))
    expected = (vectors * np.maximum(values, 0) ** exponent) @ vectors.T
    # The root of a rounding error of 1e-16 is 1e-8.
    assert reference.error(operator.power(exponent).as_matrix(), expected) < 1e-6


@pytest.mark.parametrize(
    "solver",
    [
        lx.AutoLinearSolver(well_posed=None),
        lx.Cholesky(),
        lx.LU(),
        lx.CG(rtol=1e-13, atol=1e-13, max_steps=500),
        lx.GMRES(rtol=1e-13, atol=1e-13, restart=12),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_solvers_of_lineax(solver, getkey):
    operator = kronecker(getkey())
    v = vector(getkey(), operator)
    expected = reference.exact_solve(*both(operator), 0.0, v)
    assert reference.error(lx.linear_solve(operator, v, solver).value, expected) < 1e-9


def test_combines_with_operators_of_lineax(getkey):
    operator = kronecker(getkey())
    v = vector(getkey(), operator)
    damped = operator + 0.3 * lx.IdentityLinearOperator(operator.in_structure())
    damped = lx.TaggedLinearOperator(damped, lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-13, atol=1e-13, max_steps=500)
    expected = reference.exact_solve(*both(operator), 0.3, v)
    assert reference.error(lx.linear_solve(damped, v, solver).value, expected) < 1e-9
    assert reference.error((operator @ operator).mv(v), operator.power(2).mv(v)) < 1e-10


def test_queries_of_lineax(getkey):
    operator, number = kronecker(getkey()), kronecker(getkey(), 1, 1)
    for query in (lx.is_symmetric, lx.is_positive_semidefinite):
        assert query(operator) and query(number)
    for query in (lx.is_diagonal, lx.is_tridiagonal, lx.is_lower_triangular):
        assert not query(operator) and query(number)
    assert not lx.is_upper_triangular(operator)
    assert not lx.has_unit_diagonal(operator)
    assert not lx.is_negative_semidefinite(operator)
    diagonal = np.diag(dense_matrix(operator))
    assert reference.error(lx.diagonal(operator), diagonal) < TOLERANCE
    for same in (lx.linearise, lx.materialise, lx.conj):
        assert reference.error(same(operator).as_matrix(), operator.as_matrix()) == 0
