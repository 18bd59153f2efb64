"""Recurrent cells whose time steps are a chain: `kfac.Series`, `kfac.scan_cell`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import eqx_kfac as kfac

from . import reference
from .helpers import normal, stepped
from .plain import plain_kfac


TOLERANCE = 1e-10
TIME, NUMBER, D_IN, HIDDEN = 5, 4, 3, 2

kinds = pytest.mark.parametrize("kind", ["symmetric", "stationary"])


#
# The statistics
#


class Model(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __call__(self, xs):
        zero = jnp.zeros(HIDDEN)
        return kfac.scan_cell(self.cell, (zero, zero), xs)[1][0]


@ft.cache
def make_model(block):
    cell = eqx.nn.LSTMCell(D_IN, HIDDEN, key=jax.random.key(1))
    return kfac.convert(Model(cell), block)


SEQUENCES = np.asarray(normal(NUMBER, TIME, D_IN))


def loss_fn(model, xs, weights=None):
    outputs = jax.vmap(model)(xs)
    return kfac.SquaredError(outputs, jnp.zeros_like(outputs), weights)


@eqx.filter_jit
def outputs_of(model, xs):
    return jax.vmap(model)(xs)


@eqx.filter_jit
def estimate(model, xs, weights=None):
    return kfac.curvature(loss_fn, kfac.Empirical())(model, xs, weights).cell


@ft.cache
def unrolled():
    """Inputs (with a one) and gradients at the gates, of every sequence and step."""
    cell = kfac.revert(make_model(kfac.Kronecker())).cell

    def run(xs, shifts):
        hidden, outputs, inputs = (jnp.zeros(HIDDEN), jnp.zeros(HIDDEN)), [], []
        for x, shift in zip(xs, shifts, strict=True):
            inputs.append(jnp.concatenate([x, hidden[0], jnp.ones(1)]))
            shifted = eqx.tree_at(lambda c: c.bias, cell, cell.bias + shift)
            hidden = shifted(x, hidden)
            outputs.append(hidden[0])
        return jnp.sum(jnp.stack(outputs) ** 2) / 2, jnp.stack(inputs)

    gradient = jax.jit(jax.vmap(jax.grad(run, argnums=1, has_aux=True)))
    g, x = gradient(SEQUENCES, jnp.zeros((NUMBER, TIME, 4 * HIDDEN)))
    return np.asarray(x), np.asarray(g)


def moments(a, b):
    return np.einsum("nti,ntj->ij", a, b)


@kinds
def test_moments_of_successive_steps(kind):
    factors = jax.device_get(estimate(make_model(kfac.Series(kind)), SEQUENCES))
    x, g = unrolled()
    rows, pairs = NUMBER * TIME, NUMBER * (TIME - 1)
    terms = NUMBER * TIME  # There is a loss at every step.
    expected = dict(
        input_factor=moments(x, x) / rows,
        input_cross=moments(x[:, 1:], x[:, :-1]) / pairs,
        output_factor=moments(g, g) / terms,
        output_cross=moments(g[:, 1:], g[:, :-1]) / terms * rows / pairs,
    )
    for name, value in expected.items():
        assert reference.error(getattr(factors, name), value) < TOLERANCE
    assert float(factors.length) == TIME
    # The order matters: backward in time is another chain.
    assert reference.error(factors.input_cross.T, expected["input_cross"]) > 1e-2
    assert reference.error(factors.output_cross.T, expected["output_cross"]) > 1e-2


def test_one_step_moments_are_those_of_independent_steps():
    series = estimate(make_model(kfac.Series()), SEQUENCES)
    independent = estimate(make_model(kfac.Kronecker(kfac.Expand())), SEQUENCES)
    for name in ("input_factor", "output_factor"):
        ours, theirs = getattr(series, name), getattr(independent, name)
        assert reference.error(ours, theirs) < TOLERANCE


def test_masked_sequences_count_for_nothing():
    model, xs = make_model(kfac.Series()), SEQUENCES
    weights = np.array([1.0, 0.0, 1.0, 1.0])
    masked = estimate(model, xs, np.broadcast_to(weights[:, None], (NUMBER, TIME)))
    removed = estimate(model, xs[[0, 2, 3]])
    assert all(
        reference.error(a, b) < TOLERANCE
        for a, b in zip(jax.tree.leaves(masked), jax.tree.leaves(removed))
        if a.ndim == 2
    )


@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.Eigh()])
@kinds
def test_training(kind, solver):
    model, xs = make_model(kfac.Series(kind)), SEQUENCES
    optimizer = plain_kfac(0.3, 0.5, damping=0.1, solver=solver, inverse_period=1)
    state, losses = optimizer.init(model), []
    for i in range(4):
        key = jax.random.key(i)
        model, state, info = stepped(optimizer, loss_fn, model, state, xs, key=key)
        assert not info.rejected
        losses.append(float(info.loss))
    assert losses[3] < losses[0]


def test_gru_has_three_chains():
    class Gru(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, xs):
            return kfac.scan_cell(self.cell, jnp.zeros(HIDDEN), xs)[1]

    plain = Gru(eqx.nn.GRUCell(D_IN, HIDDEN, use_bias=False, key=jax.random.key(1)))
    model = kfac.convert(plain, kfac.Series())
    xs = SEQUENCES
    assert np.array_equal(outputs_of(model, xs), outputs_of(plain, xs))
    cell = estimate(model, xs)
    sizes = dict(gates=D_IN + HIDDEN, input=D_IN, hidden=HIDDEN)
    for name, d_in in sizes.items():
        assert cell[name].input_cross.shape == (d_in, d_in)
    x = np.asarray(xs)
    expected = moments(x[:, 1:], x[:, :-1]) / (NUMBER * (TIME - 1))
    assert reference.error(cell["input"].input_cross, expected) < TOLERANCE


def test_a_plain_loop_does_not_know_what_follows_what():
    class Loop(eqx.Module):
        cell: eqx.nn.LSTMCell

        def __call__(self, xs):
            hidden = (jnp.zeros(HIDDEN), jnp.zeros(HIDDEN))
            step = lambda hidden, x: (self.cell(x, hidden), None)
            return jax.lax.scan(step, hidden, xs)[0][0]

    cell = eqx.nn.LSTMCell(D_IN, HIDDEN, key=jax.random.key(1))
    model = kfac.convert(Loop(cell), kfac.Series())
    assert np.all(np.isfinite(outputs_of(model, SEQUENCES)))
    with pytest.raises(ValueError, match="scan_cell"):
        kfac.curvature(loss_fn, kfac.Empirical())(model, SEQUENCES)


@kinds
def test_what_is_not_of_the_block_sees_single_steps(kind):
    """The memory is of the block alone: `verify` compares the gradient of each step, and
    what is captured are rows without the step before."""
    model, xs = make_model(kfac.Series(kind)), SEQUENCES
    (check,) = kfac.verify(loss_fn, model, xs).layers
    assert np.all(check.unseen == 0) and 0 < check.cosine < 1 - 1e-2
    one = xs[:, :1]  # Rows of several steps would be added up, which is refused.
    capture = eqx.filter_jit(kfac.analysis.capture(loss_fn))
    ours, plain = (capture(m, one).cell for m in (model, make_model(kfac.Kronecker())))
    assert reference.error(ours.inputs, plain.inputs) < TOLERANCE
    assert reference.error(ours.output_gradients, plain.output_gradients) < TOLERANCE


def test_what_takes_many_dense_matrices_is_too_large_earlier():
    for block, too_large in ((kfac.Series(), True), (kfac.Full(), False)):
        (check,) = kfac.verify(loss_fn, make_model(block), SEQUENCES, memory=1e5).layers
        assert check.too_large == too_large and np.all(check.unseen == 0)


def test_scan_cell_is_scan():
    """Nothing is added unless something is collected."""
    model = make_model(kfac.Series())
    plain = kfac.revert(model)
    xs = SEQUENCES[0]
    assert str(jax.make_jaxpr(model)(xs)) == str(jax.make_jaxpr(plain)(xs))


def test_unknown_kind():
    with pytest.raises(ValueError, match="'symmetric' or 'stationary'"):
        kfac.Series("other")


#
# The operator and its inverse
#


def positive(rng, size):
    a = rng.normal(size=(size, 2 * size))
    return a @ a.T / size


def root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values)) @ vectors.T


def chain(seed, size, symmetric, strength):
    """A covariance, that of successive steps, and the transition between them in
    coordinates in which the first one is the identity."""
    rng = np.random.default_rng(seed)
    covariance, psi = positive(rng, size), rng.normal(size=(size, size))
    psi = (psi + psi.T) / 2 if symmetric else psi
    psi = strength * psi / np.linalg.norm(psi, 2)
    half = root(covariance)
    return covariance, half @ psi @ half, psi


@eqx.filter_jit
def dense(operator):
    return operator.as_matrix()


@eqx.filter_jit
def product(operator, v):
    return operator.mv(v)


@eqx.filter_jit
def solved(operator, v, solver=kfac.Cholesky(), **options):
    return lx.linear_solve(operator, v, solver, options=options).value


def sum_of_chain(operator, psi, length):
    """(1/T) sum over all pairs of steps, one by one."""
    size = psi.shape[0]
    total, power = length * np.eye(size), np.eye(size)
    for distance in range(1, length):
        power = power @ psi
        total = total + (length - distance) * (power + power.T)
    half = np.kron(root(operator.output_factor), root(operator.input_factor))
    return half @ total @ half / length


def make_operator(kind, length, strength=0.7):
    symmetric = kind == "symmetric"
    a0, a1, psi_in = chain(1, 3, symmetric, strength)
    g0, g1, psi_out = chain(2, 2, symmetric, strength)
    arrays = jax.device_put([g0, g1, a0, a1])
    operator = kfac.operators.SeriesOperator(*arrays, jnp.asarray(length, float), kind)
    return operator, np.kron(psi_out, psi_in)


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_symmetric_chain(length):
    operator, psi = make_operator("symmetric", length)
    matrix, want = dense(operator), sum_of_chain(operator, psi, length)
    assert reference.error(matrix, want) < TOLERANCE
    independent = np.kron(operator.output_factor, operator.input_factor)
    difference = reference.error(matrix, independent)
    assert difference < TOLERANCE if length == 1 else difference > 1e-2


def test_stationary_chain_is_the_limit():
    """The error of leaving the ends out falls as one over the length."""
    errors = []
    for length in (100, 1000):
        operator, psi = make_operator("stationary", length)
        want = sum_of_chain(operator, psi, length)
        errors.append(reference.error(dense(operator), want))
    assert errors[1] < 1e-3
    np.testing.assert_allclose(errors[0] / errors[1], 10, rtol=0.1)


@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.Eigh()])
@pytest.mark.parametrize("length", [1, 6])
@kinds
def test_inverse(kind, length, solver):
    operator, _ = make_operator(kind, length)
    v = normal(2, 3, seed=3)
    solution = solved(operator, v, solver)
    want = np.linalg.solve(np.asarray(dense(operator)), np.asarray(v).ravel())
    assert reference.error(np.ravel(solution), want) < TOLERANCE
    assert reference.error(product(operator, solution), v) < TOLERANCE


@kinds
def test_without_correlation_steps_are_independent(kind):
    operator, _ = make_operator(kind, 6)
    where = lambda o: (o.output_cross, o.input_cross)
    zeros = np.zeros((2, 2)), np.zeros((3, 3))
    operator = eqx.tree_at(where, operator, zeros)
    kronecker = kfac.operators.KroneckerOperator(
        operator.output_factor, operator.input_factor
    )
    assert reference.error(dense(operator), dense(kronecker)) < TOLERANCE
    v = normal(2, 3, seed=3)
    ours, theirs = (solved(o, v, damping=0.1) for o in (operator, kronecker))
    assert reference.error(ours, theirs) < TOLERANCE


@kinds
def test_where_nothing_passed_there_is_no_curvature(kind):
    """Of fewer rows than inputs, the factors are singular."""
    operator, _ = make_operator(kind, 4)
    frame, _ = np.linalg.qr(np.asarray(normal(5, 3, seed=4)))
    where = lambda o: (o.input_factor, o.input_cross)
    factors = [frame @ np.asarray(m) @ frame.T for m in where(operator)]
    wide = dense(eqx.tree_at(where, operator, factors))
    lift = np.kron(np.eye(2), frame)
    assert reference.error(wide, lift @ np.asarray(dense(operator)) @ lift.T) < TOLERANCE


@kinds
def test_damping_enters_the_factors(kind):
    """The factors are damped, and the transition of one step to the next with them."""
    operator, _ = make_operator(kind, 6)
    v, damping = normal(2, 3, seed=3), 0.1
    solution = solved(operator, v, damping=damping)
    a, g = np.asarray(operator.input_factor), np.asarray(operator.output_factor)
    pi = np.sqrt((np.trace(a) / 3) / (np.trace(g) / 2))
    damped = eqx.tree_at(
        lambda o: (o.output_factor, o.input_factor),
        operator,
        (
            g + np.sqrt(damping) / pi * np.eye(2),
            a + np.sqrt(damping) * pi * np.eye(3),
        ),
    )
    expected = solved(damped, v)
    assert reference.error(solution, expected) < TOLERANCE
    assert reference.error(solved(operator, v), expected) > 1e-2
