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
from .helpers import stack


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


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def factor(rng, d, rank=None):
    x = rng.normal(size=(d + 3 if rank is None else rank, d))
    return jax.device_put(x.T @ x / len(x))


def kronecker(rng, d_out=3, d_in=4, rank=None):
    return kfac.operators.KroneckerOperator(
        factor(rng, d_out, rank), factor(rng, d_in, rank)
    )


def vector(rng, operator):
    return jax.device_put(rng.normal(size=operator.in_structure().shape))


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
def test_damped_solve(solver, dense, damping, rank, rng):
    operator = kronecker(rng, rank=rank)
    v = vector(rng, operator)
    solution = solve(operator, v, solver, damping)
    assert reference.error(solution, dense(*both(operator), damping, v)) < TOLERANCE


@DAMPING
def test_the_two_dampings_differ(damping, rng):
    operator = kronecker(rng)
    v = vector(rng, operator)
    eigh = solve(operator, v, kfac.Eigh(), damping)
    assert reference.error(solve(operator, v, kfac.Cholesky(), damping), eigh) > 1e-3


@SOLVERS
def test_without_damping(solver, dense, rng):
    operator = kronecker(rng)
    v = vector(rng, operator)
    expected = reference.exact_solve(*both(operator), 0.0, v)
    assert reference.error(solve(operator, v, solver), expected) < TOLERANCE
    assert reference.error(lx.linear_solve(operator, v, solver).value, expected) < 1e-10
    assert reference.error(operator.mv(solve(operator, v, solver)), v) < TOLERANCE


@SOLVERS
@pytest.mark.parametrize("c", [1e-6, 1e6])
def test_only_the_product_matters(solver, dense, c, rng):
    operator = kronecker(rng)
    G, A = map(np.asarray, both(operator))
    put = lambda G, A: kfac.operators.KroneckerOperator(*map(jax.device_put, (G, A)))
    moved = put(G / c, A * c)
    v = vector(rng, operator)
    before, after = (solve(o, v, solver, 0.1) for o in (operator, moved))
    assert reference.error(after, before) < TOLERANCE
    # One factor alone does matter.
    scaled = put(G, A * c)
    assert reference.error(solve(scaled, v, solver, 0.1), before) > 0.1


@SOLVERS
@pytest.mark.parametrize("dead", ["output", "input", "both"])
@pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_dead_layer(solver, dense, dead, d_out, d_in, rng):
    G, A = both(kronecker(rng, d_out, d_in))
    dead_one = lambda a: jax.device_put(np.zeros(a.shape))
    G = G if dead == "input" else dead_one(G)
    A = A if dead == "output" else dead_one(A)
    operator = kfac.operators.KroneckerOperator(G, A)
    v = vector(rng, operator)
    expected = 100 * np.asarray(v)
    assert reference.error(solve(operator, v, solver, 0.01), expected) < TOLERANCE


@pytest.mark.parametrize("d_out, d_in", [(1, 65), (65, 1), (65, 257)])
@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.Cholesky(True)])
def test_a_factor_that_is_known_up_to_rounding(solver, d_out, d_in, rng):
    """Units that all depend on a few large inputs (of years, say) leave a factor whose
    least eigenvalues are rounding, above and below zero, and larger than the damping."""

    def rounded(d):
        rows = (2000 + rng.normal(size=(128, 3))) @ np.abs(rng.normal(size=(3, d)))
        rows = rows.astype(np.float32)
        return jax.device_put(rows.T @ rows / np.float32(len(rows)))

    def raised(matrix):
        if matrix.size == 1:
            return np.asarray(matrix, float)
        least = 2 * np.finfo(np.float32).eps * np.trace(matrix, dtype=float)
        return np.asarray(matrix, float) + least * np.eye(len(matrix))

    operator = kfac.operators.KroneckerOperator(rounded(d_out), rounded(d_in))
    assert np.linalg.eigvalsh(max(both(operator), key=jnp.size))[0] < 0
    v = vector(rng, operator).astype(jnp.float32)
    got = np.asarray(solve(operator, v, solver, damping=jnp.float32(1e-9)), float)
    first, second = map(raised, both(operator))
    want = np.linalg.solve(first, np.linalg.solve(second, np.asarray(v).T).T)
    assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)
    assert np.vdot(got, v) > 0


@SOLVERS
@DAMPING
@pytest.mark.parametrize("d_out, d_in", [(1, 4), (3, 1), (1, 1)])
def test_one_by_one_factor_is_exact(solver, dense, damping, d_out, d_in, rng):
    operator = kronecker(rng, d_out, d_in)
    v = vector(rng, operator)
    solution = solve(operator, v, solver, damping)
    G, A, v = map(np.asarray, (*both(operator), v))
    if d_out == 1:
        by_hand = np.linalg.solve(A + damping / G[0, 0] * np.eye(d_in), v.T).T / G[0, 0]
    else:
        by_hand = np.linalg.solve(G + damping / A[0, 0] * np.eye(d_out), v) / A[0, 0]
    assert reference.error(solution, by_hand) < TOLERANCE
    exact = reference.exact_solve(G, A, damping, v)
    assert reference.error(solution, exact) < TOLERANCE


def with_data_of_size(unit, rng):
    """An operator whose inputs are in units of this size, and a one for a bias."""
    G, A = map(np.asarray, both(kronecker(rng)))
    A = A / np.mean(np.diag(A)[:-1])
    units = np.array([unit, unit, unit, 1.0])
    return kfac.operators.KroneckerOperator(
        *map(jnp.asarray, (G, A * np.outer(units, units)))
    )


FACTORED = pytest.mark.parametrize(
    "solver", [kfac.Cholesky, lambda **w: kfac.NewtonSchulz(1e-14, **w)]
)


@FACTORED
@DAMPING
@pytest.mark.parametrize("unit, apart", [(1e-2, 0.1), (0.3, 0.01)])
def test_a_bias_in_the_units_of_the_data(solver, damping, unit, apart, rng):
    """If the solver is to, and told that there is a bias: one that is nearly all of the
    factor, so that its balance is that of the weights, and one that is less."""
    operator = with_data_of_size(unit, rng)
    v = vector(rng, operator)
    plain, other = (
        reference.factored_solve(*both(operator), damping, v, scaled_bias=scaled)
        for scaled in (False, True)
    )
    assert reference.error(plain, other) > apart
    for scaled_bias in (False, True):
        for bias in (False, True):
            options = {"damping": damping, "bias": bias}
            chosen = solver(scaled_bias=scaled_bias)
            got = lx.linear_solve(operator, v, chosen, options=options).value
            want = other if scaled_bias and bias else plain
            assert reference.error(got, want) < TOLERANCE


@FACTORED
@DAMPING
@pytest.mark.parametrize("unit", [0.0, 3.0])
def test_a_bias_that_is_no_larger_than_the_data(solver, damping, unit, rng):
    """... or with no data at all, is a coordinate like the others."""
    operator = with_data_of_size(unit, rng)
    v = vector(rng, operator)
    options = {"damping": damping, "bias": True}
    got = lx.linear_solve(operator, v, solver(scaled_bias=True), options=options).value
    want = reference.factored_solve(*both(operator), damping, v)
    assert reference.error(got, want) < TOLERANCE


def test_a_scaled_bias_follows_the_units_of_the_data(rng):
    """In other units of the data, with a damping to match, the steps of the weights are
    the same in these units, and that of the bias is the same; but not if it is damped
    like any coordinate."""
    c, v, damping = 0.1, rng.normal(size=(3, 4)), 1e-4
    units = np.array([c, c, c, 1.0])
    G, A = map(np.asarray, both(with_data_of_size(1e-2, rng)))

    def solved(A, damping, v, scaled):
        operator = kfac.operators.KroneckerOperator(jnp.asarray(G), jnp.asarray(A))
        options = {"damping": damping, "bias": True}
        solver = kfac.Cholesky(scaled_bias=scaled)
        solution = lx.linear_solve(operator, jnp.asarray(v), solver, options=options)
        return np.asarray(solution.value)

    for scaled in (False, True):
        before = solved(A, damping, v, scaled)
        after = solved(A * np.outer(units, units), c**2 * damping, v * units, scaled)
        difference = reference.error(after * units, before)
        assert difference < TOLERANCE if scaled else difference > 0.01


def test_diagonal_by_eigenvectors(rng):
    @eqx.filter_jit
    def run(operators, matrix):
        found = [o for k in operators for o in (k.spectral(), k.inverse(0.3))]
        values = jnp.arange(6.0).reshape(2, 3)
        found += [SpectralOperator(DenseBasis(jnp.linalg.eigh(matrix)[1]), values)]
        alone = SpectralOperator(KroneckerBasis(None, None), values).diagonal()
        return [(o.diagonal(), o.as_matrix()) for o in found], alone

    found, alone = run([kronecker(rng), kronecker(rng, 1, 4)], factor(rng, 6))
    assert len(found) == 5
    for diagonal, matrix in found:
        assert reference.error(diagonal, np.diag(matrix)) < TOLERANCE
    assert np.all(np.asarray(alone) == np.arange(6.0))


def test_eigh_state_serves_any_damping(rng):
    operator, solver = kronecker(rng), kfac.Eigh()
    v = vector(rng, operator)
    state = eqx.filter_jit(solver.init)(operator, {})
    for damping in (1e-2, 1.0):
        options = {"damping": damping}
        out = lx.linear_solve(operator, v, solver, options=options, state=state)
        expected = reference.exact_solve(*both(operator), damping, v)
        assert reference.error(out.value, expected) < TOLERANCE


def test_eigh_of_slightly_indefinite_factors(rng):
    # Rounding must not turn a zero eigenvalue into a large step.
    G, A = both(kronecker(rng, rank=1))
    operator = kfac.operators.KroneckerOperator(jax.device_put(G - 1e-9 * np.eye(3)), A)
    v = vector(rng, operator)
    step = solve(operator, v, kfac.Eigh(), 1e-10)
    assert np.linalg.norm(step) <= 1.001e10 * np.linalg.norm(v)


#
# Transformations
#


@SOLVERS
def test_solve_under_jit(solver, dense, rng):
    operator = kronecker(rng)
    v = vector(rng, operator)
    jitted = eqx.filter_jit(solve)(operator, v, solver, jnp.array(0.1))
    assert reference.error(jitted, dense(*both(operator), 0.1, v)) < TOLERANCE


@SOLVERS
@pytest.mark.parametrize("mapped", [(True, True), (True, False), (False, True)])
def test_solve_under_vmap(solver, dense, mapped, rng):
    each = [kronecker(rng) for _ in range(3)]
    operators = stack(each) if mapped[0] else each[0]
    vs = rng.normal(size=(3, 3, 4) if mapped[1] else (3, 4))
    axes = tuple(eqx.if_array(0) if m else None for m in mapped)
    run = lambda operator, v: solve(operator, v, solver, 0.1)
    run = eqx.filter_jit(eqx.filter_vmap(run, in_axes=axes))
    solutions = np.asarray(run(operators, jax.device_put(vs)))
    for i, solution in enumerate(solutions):
        operator = each[i] if mapped[0] else operators
        v = vs[i] if mapped[1] else vs
        assert reference.error(solution, dense(*both(operator), 0.1, v)) < TOLERANCE


@SOLVERS
def test_derivatives_with_respect_to_the_vector(solver, dense, rng):
    operator = kronecker(rng)
    v, other = vector(rng, operator), vector(rng, operator)
    run = lambda v: solve(operator, v, solver, 0.1)
    # The inverse is linear and symmetric.
    expected = dense(*both(operator), 0.1, other)

    @jax.jit
    def derivatives(v, other):
        gradient = jax.grad(lambda v: jnp.sum(run(v) * other))(v)
        return gradient, jax.jvp(run, (v,), (other,))[1]

    for found in derivatives(v, other):
        assert reference.error(found, expected) < TOLERANCE


@pytest.mark.parametrize("size", [1023, 1026])
def test_large_factor(size, rng):
    """A large factor is inverted by halves of halves, of odd sizes too."""
    root = rng.normal(size=(size, size)) / size**0.5
    factor = root @ root.T + 0.1 * np.eye(size)
    operator = kfac.operators.KroneckerOperator(jnp.ones((1, 1)), jax.device_put(factor))
    solver = kfac.Cholesky()
    state = eqx.filter_jit(solver.init)(operator, dict(damping=0.01))
    expected = np.linalg.inv(factor + 0.01 * np.eye(size))
    found = np.asarray(state.input_inverse) * np.asarray(state.output_inverse)
    assert np.max(np.abs(found - expected)) < 1e-10 * np.max(np.abs(expected))


@SOLVERS
def test_wrong_operator(solver, dense):
    with pytest.raises(ValueError, match="KroneckerOperator.*MatrixLinearOperator"):
        lx.linear_solve(lx.MatrixLinearOperator(jnp.eye(3)), jnp.ones(3), solver)


@SOLVERS
@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_diagonal_operator(solver, dense, shape, rng):
    diagonal, v = rng.uniform(size=shape), rng.normal(size=shape)
    operator = lx.DiagonalLinearOperator(jax.device_put(diagonal))
    options = dict(damping=0.1)
    given = jax.device_put(v)
    solution = lx.linear_solve(operator, given, solver, options=options).value
    assert reference.error(solution, v / (diagonal + 0.1)) < TOLERANCE


DIAGONALS = [(False, True), (True, False), (True, True)]


@eqx.filter_jit
def readings(operator, v):
    return (
        operator.mv(v),
        operator.as_matrix(),
        operator.trace(),
        operator.logdet(0.1),
        jnp.sort(operator.eigenvalues().ravel()),
        operator.power(0.5).as_matrix(),
        lx.diagonal(operator),
    )


@SOLVERS
@pytest.mark.parametrize("diagonal_out, diagonal_in", DIAGONALS)
@pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_diagonal_factors(solver, dense, diagonal_out, diagonal_in, d_out, d_in, rng):
    """A diagonal factor is the matrix with that diagonal, in everything."""
    which = diagonal_out, diagonal_in
    factors = list(map(np.asarray, both(kronecker(rng, d_out, d_in))))
    short = [np.diag(f) if alone else f for f, alone in zip(factors, which)]
    factors = [np.diag(f) if alone else f for f, alone in zip(short, which)]
    full, thin = (
        kfac.operators.KroneckerOperator(*map(jax.device_put, given))
        for given in (factors, short)
    )
    v = vector(rng, full)
    a, b = (solve(operator, v, solver, 0.1) for operator in (full, thin))
    assert reference.error(b, a) < TOLERANCE
    for got, want in zip(readings(thin, v), readings(full, v), strict=True):
        assert reference.error(got, want) < TOLERANCE


@SOLVERS
def test_wrong_vector(solver, dense, rng):
    with pytest.raises(ValueError):
        lx.linear_solve(kronecker(rng), jnp.ones((4, 3)), solver)


#
# The operator
#


SIZES = pytest.mark.parametrize("d_out, d_in", [(3, 4), (1, 4), (3, 1), (1, 1)])


def dense_matrix(operator):
    return np.kron(*map(np.asarray, both(operator)))


@SIZES
def test_products(d_out, d_in, rng):
    operator = kronecker(rng, d_out, d_in)
    matrix = dense_matrix(operator)
    v = vector(rng, operator)
    product = (matrix @ np.ravel(v)).reshape(v.shape)
    assert reference.error(operator.as_matrix(), matrix) < TOLERANCE
    assert reference.error(operator.mv(v), product) < TOLERANCE
    assert reference.error(operator.transpose().mv(v), product) < TOLERANCE
    assert reference.error(operator.T.as_matrix(), matrix.T) < TOLERANCE
    assert operator.in_structure() == operator.out_structure()
    assert operator.in_size() == operator.out_size() == d_out * d_in


def test_order_of_the_factors(rng):
    operator = kronecker(rng, 3, 3)
    swapped = kfac.operators.KroneckerOperator(
        operator.input_factor, operator.output_factor
    )
    assert reference.error(swapped.as_matrix(), dense_matrix(operator)) > 0.1


@SIZES
def test_spectrum(d_out, d_in, rng):
    operator = kronecker(rng, d_out, d_in)
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
def test_logdet_of_singular(rank, rng):
    operator = kronecker(rng, rank=rank)
    matrix = dense_matrix(operator)
    _, logdet = np.linalg.slogdet(matrix + 1e-3 * np.eye(len(matrix)))
    assert abs(operator.logdet(1e-3) - logdet) < 1e-9


@pytest.mark.parametrize("exponent", [-0.5, -0.25, 0.5, 2, -1])
def test_power(exponent, rng):
    operator = kronecker(rng)
    values, vectors = np.linalg.eigh(dense_matrix(operator))
    expected = (vectors * values ** float(exponent)) @ vectors.T
    power = operator.power(exponent)
    assert isinstance(power, kfac.operators.KroneckerOperator)
    assert reference.error(power.as_matrix(), expected) < TOLERANCE
    assert reference.error(power.as_matrix(), dense_matrix(operator)) > 0.1


@pytest.mark.parametrize("exponent", [0.5, 2])
def test_positive_power_of_singular(exponent, rng):
    # The smallest eigenvalues come out as ±1e-17; their roots must not be NaN.
    operator = kronecker(rng, rank=1)
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
def test_solvers_of_lineax(solver, rng):
    operator = kronecker(rng)
    v = vector(rng, operator)
    expected = reference.exact_solve(*both(operator), 0.0, v)
    assert reference.error(lx.linear_solve(operator, v, solver).value, expected) < 1e-9


def test_combines_with_operators_of_lineax(rng):
    operator = kronecker(rng)
    v = vector(rng, operator)
    damped = operator + 0.3 * lx.IdentityLinearOperator(operator.in_structure())
    damped = lx.TaggedLinearOperator(damped, lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-13, atol=1e-13, max_steps=500)
    expected = reference.exact_solve(*both(operator), 0.3, v)
    assert reference.error(lx.linear_solve(damped, v, solver).value, expected) < 1e-9
    assert reference.error((operator @ operator).mv(v), operator.power(2).mv(v)) < 1e-10


def test_queries_of_lineax(rng):
    operator, number = kronecker(rng), kronecker(rng, 1, 1)
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
