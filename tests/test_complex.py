"""Models with complex parameters, against ones whose real and imaginary parts are two
real arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import assert_near, close, flat, normal, params_of, squared, stepped


x, y = normal(7, 3, seed=1), normal(7, 2, seed=2)
OPERATORS = [
    kfac.analysis.GaussNewtonOperator,
    kfac.analysis.FisherOperator,
    kfac.analysis.EmpiricalFisherOperator,
    kfac.analysis.HessianOperator,
]


class Recurrent(eqx.Module):
    """A diagonal linear recurrence, as in linear recurrent units. Its outputs are no
    function that is analytic in the parameter."""

    a: jax.Array
    b: jax.Array
    out: kfac.Linear

    def __init__(self, seed=0):
        key = jax.random.key(seed)
        self.a = 0.5 * jax.lax.complex(normal(4, seed=seed + 3), normal(4, seed=seed + 4))
        self.b = jax.lax.complex(normal(4, 3, seed=seed + 5), normal(4, 3, seed=seed + 6))
        self.out = kfac.Linear(4, 2, dtype=float, key=key)

    def __call__(self, x):
        h = jnp.matmul(self.b, x.astype(self.b.dtype))
        h = self.a * (self.a * h + h) + h
        return self.out(jnp.abs(h) + jnp.imag(h * self.a))


class Parts(eqx.Module):
    """The same, with real arrays alone."""

    a: tuple[jax.Array, jax.Array]
    b: tuple[jax.Array, jax.Array]
    out: kfac.Linear

    def __init__(self, model):
        self.a, self.b = ((jnp.real(p), jnp.imag(p)) for p in (model.a, model.b))
        self.out = model.out

    def joined(self):
        model = Recurrent()
        parts = lambda m: (m.a, m.b, m.out)
        joined = (jax.lax.complex(*self.a), jax.lax.complex(*self.b), self.out)
        return eqx.tree_at(parts, model, joined)

    def __call__(self, x):
        return self.joined()(x)


def penalised(model, x, y):
    """With an `L2` term on everything, which has curvature, too."""
    return squared(model, x, y) + kfac.L2(model, 0.3)


model = Recurrent()
parts = Parts(model)


def value(parts):
    return penalised(parts, x, y).value


def dense(kind):
    """The matrix in the real parameters, by derivatives that know no complex numbers."""
    vector, unravel = jax.flatten_util.ravel_pytree(params_of(parts))
    whole = lambda v: eqx.combine(unravel(v), parts)
    outputs = lambda v: jax.vmap(whole(v))(x)
    if kind is kfac.analysis.HessianOperator:
        return jax.hessian(lambda v: value(whole(v)))(vector)
    jacobian = jax.jacobian(outputs)(vector)
    if kind is kfac.analysis.EmpiricalFisherOperator:
        jacobian = jnp.sum(jacobian * (outputs(vector) - y)[..., None], axis=1)
        matrix = jnp.matmul(jacobian.T, jacobian)
    else:
        matrix = jnp.tensordot(jacobian, jacobian, ((0, 1), (0, 1)))
    return matrix / len(x) + 0.3 * jnp.eye(len(vector))


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_are_those_of_pairs_of_real_parameters(kind):
    @eqx.filter_jit
    def run(model, vector):
        operator = kind(penalised, model, x, y)
        lanczos = kfac.analysis.lanczos(operator, jax.random.key(0), operator.in_size())
        kept = lx.linearise(operator), lx.materialise(operator), operator.damped(0.7)
        products = [op.mv(vector) for op in (operator, *kept)]
        pairs = operator.mv(kfac.as_real(vector))
        return operator.as_matrix(), lanczos.values, products, pairs

    expected = np.asarray(jax.jit(lambda: dense(kind))())
    direction = Recurrent(20)
    vector = params_of(direction)
    matrix, values, products, pairs = run(model, vector)
    close(matrix, expected)
    close(values, np.linalg.eigvalsh(expected), 1e-8)
    direction = np.asarray(flat(params_of(Parts(direction))))
    for product, shift in zip(products, (0, 0, 0, 0.7), strict=True):
        want = expected @ direction + shift * direction
        close(flat(params_of(Parts(eqx.combine(product, model)))), want)
    close(flat(pairs), expected @ direction)
    # An operator that conjugates is not symmetric.
    signs = np.ones(len(expected))
    signs[4:8] = signs[20:32] = -1
    assert np.abs(signs[:, None] * expected - expected).max() > 0.1


def test_conjugate_gradients():
    """In the metric of real numbers, and with gradients of them."""

    @eqx.filter_jit
    def solve(model):
        parts = kfac.as_real(model)
        of_parts = lambda parts: penalised(kfac.as_complex(parts), x, y).value
        grads = eqx.filter_grad(of_parts)(parts)
        operator = kfac.analysis.GaussNewtonOperator(penalised, model, x, y).damped(0.1)
        ours = dict(solver=kfac.analysis.ConjugateGradient(rtol=1e-12, max_steps=100))
        theirs = dict(solver=lx.CG(rtol=1e-12, atol=1e-12))
        solved = [lx.linear_solve(operator, grads, **s) for s in (ours, theirs)]
        return [flat(s.value) for s in solved]

    @jax.jit
    def expected():
        matrix = dense(kfac.analysis.GaussNewtonOperator)
        grads = flat(eqx.filter_grad(value)(parts))
        return jnp.linalg.solve(matrix + 0.1 * jnp.eye(len(matrix)), grads)

    for solution in solve(model):
        close(solution, expected(), 1e-6)


def test_factor_is_a_root():
    @eqx.filter_jit
    def run(model):
        operator = kfac.analysis.GaussNewtonOperator(penalised, model, x, y)
        root = operator.factor()
        return (root.T @ root).as_matrix(), operator.as_matrix()

    close(*run(model))


def test_there_and_back():
    tree = {"model": model, "text": "text", "none": None}
    there = kfac.as_real(tree)
    assert not any(map(jnp.iscomplexobj, jax.tree.leaves(params_of(there))))
    assert isinstance(there["model"].a, kfac.ComplexParts)
    assert eqx.tree_equal(kfac.as_complex(there), tree)
    assert kfac.as_complex(params_of(parts)).a[0] is parts.a[0]
    filtered = eqx.filter(there, lambda _: False)
    assert eqx.tree_equal(kfac.as_complex(filtered), filtered)


def joined(model):
    return model.joined() if isinstance(model, Parts) else model


@pytest.mark.parametrize("damping", ["auto", kfac.LevenbergMarquardt(1.0, interval=1)])
def test_steps_are_those_of_pairs_of_real_parameters(damping, standard_promotion):
    """Also its average, the predicted reduction, norms, and what a rollback keeps."""
    optimizer = kfac.KFAC(
        damping=damping, averaging=0.9, weight_decay=0.1, fallback=optax.sgd(0.02)
    )
    runs = []
    for start in (model, parts):
        new, state = start, optimizer.init(start)
        infos = []
        for i in range(4):
            key = jax.random.key(i)
            new, state, info = stepped(optimizer, penalised, new, state, x, y, key=key)
            infos.append([info.loss, info.gradient_norm, info.update_norm])
            infos[-1] += [] if info.reduction_ratio is None else [info.reduction_ratio]
        averaged = kfac.averaged(new, state)
        good = list(state.rollback.params.values())
        norm = jnp.asarray(sum(np.sum(np.abs(p) ** 2) for p in good))
        runs.append((params_of(joined(new)), params_of(joined(averaged)), infos, norm))
    for got, want in zip(*runs, strict=True):
        want, got = map(kfac.as_real, (want, got))
        assert_near(got, want)
    losses = [info[0] for info in runs[0][2]]
    assert losses[-1] < 0.9 * losses[0]
    # Not only the real part is trained, and averaged.
    for tree in runs[0][:2]:
        assert np.abs(np.imag(tree.a - model.a)).max() > 1e-3
        assert np.abs(np.imag(tree.a)).max() > 0.1


def test_optax_faces(standard_promotion):
    """The faces for optax take gradients as JAX has them."""

    @eqx.filter_jit
    def updates_of(model):
        params = params_of(model)
        all_of = kfac.value_grad_and_curvature(squared, fisher=kfac.Exact())
        value, grads, curvature = all_of(model, x, y)
        assert grads.a.dtype == model.a.dtype
        found = []
        for make in (kfac.optax_kfac, kfac.scale_by_kfac):
            optimizer = make(fallback=optax.sgd(1.0))
            state = optimizer.init(params)
            extra = dict(curvature=curvature, value=value)
            found.append(optimizer.update(grads, state, params, **extra)[0].a)
        return found

    slope = lambda a: squared(eqx.tree_at(lambda m: m.a, parts, a), x, y).value
    real, imaginary = jax.jit(jax.grad(slope))(parts.a)
    for got in updates_of(model):
        close(got, -np.asarray(real) - 1j * np.asarray(imaginary))
        assert np.abs(imaginary).max() > 1e-2


def test_cast_keeps_them():
    cast = kfac.cast(model, jnp.float32)
    assert cast.a is model.a and cast.out.weight.dtype == jnp.float32


def test_complex_numbers_that_are_no_loss():
    with pytest.raises(TypeError, match="real scalars"):
        squared(model, x, y) + jnp.sum(model.a * jnp.conj(model.a))
    with pytest.raises(TypeError, match="targets must be real"):
        kfac.SquaredError(x, x.astype(complex))


def test_without_a_fallback():
    with pytest.raises(ValueError, match=r"`\.a`, `\.b` are complex.*`fallback=`"):
        kfac.KFAC().init(model)
