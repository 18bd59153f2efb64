"""Curvature matrices as linear operators, against dense ones."""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_kfac as kfac

from . import reference
from .helpers import arrays, close, flat, noise, normal, params_of, stack


N = 5
x, values = normal(N, 3, seed=3), normal(N, 2, seed=2)
few_values = jax.device_put(np.asarray(values)[:3])
classes = jax.device_put(np.array([0, 1, 1, 0, 1]))
bits = jax.device_put(np.array([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]) == 1)
weights = jax.device_put(np.array([1.0, 2.0, 0.0, 0.5, 1.5]))


@eqx.filter_jit
def tanh_net(key, width=4):
    return eqx.nn.MLP(3, 2, width, 1, activation=jnp.tanh, key=key)


tanh_mlp = tanh_net(jr.key(3))


#
# Objectives: what the library is told, and the same by terms:
# `(coefficient, loss of a term, rows, targets, weights)`, L2, and a penalty
#


def penalty(model):
    return 0.3 * jnp.sum(flat(params_of(model)) ** 4)


def squared_fn(model, x, w):
    return kfac.SquaredError(jax.vmap(model)(x), values)


def softmax_fn(model, x, w):
    return 0.7 * kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), classes, w), "aux"


def sigmoid_fn(model, x, w):
    loss = kfac.SigmoidCrossEntropy(jax.vmap(model)(x), bits)
    return loss + kfac.L2(model, 0.4) * 0.5


def sum_fn(model, x, w):
    z = jax.vmap(model)(x)
    first = kfac.SoftmaxCrossEntropy(z, classes, w)
    second = kfac.SquaredError(z[:3], few_values)
    return first + 0.5 * second + kfac.L2(model, 0.1) + penalty(model)


whole = slice(0, N)
softmax_term = (1.0, reference.softmax, whole, classes, weights)
objectives = {
    "squared": (squared_fn, [(1.0, reference.squared, whole, values, None)], 0.0),
    "softmax": (softmax_fn, [(0.7, *softmax_term[1:])], 0.0),
    "sigmoid": (sigmoid_fn, [(1.0, reference.sigmoid, whole, bits, None)], 0.2),
    "sum": (
        sum_fn,
        [softmax_term, (0.5, reference.squared, slice(0, 3), few_values, None)],
        0.1,
    ),
}
operators = {
    "ggn": kfac.analysis.GaussNewtonOperator,
    "fisher": kfac.analysis.FisherOperator,
    "empirical": kfac.analysis.EmpiricalFisherOperator,
    "hessian": kfac.analysis.HessianOperator,
}


@ft.cache
def all_given(name):
    kinds = "ggn", "empirical", "hessian"
    matrices = eqx.filter_jit(lambda: {kind: dense(name, kind) for kind in kinds})()
    return jtu.tree_map(np.asarray, matrices)


def given(name, kind):
    """`dense` for the model and the batch above. (All losses are natural: the Fisher is
    the Gauss-Newton matrix.)"""
    return all_given(name)["ggn" if kind == "fisher" else kind]


def dense(name, kind, model=tanh_mlp, x=x):
    """The same matrix, from Jacobians and Hessians that JAX writes out."""
    _, terms, l2 = objectives[name]
    params, static = eqx.partition(model, eqx.is_inexact_array)
    theta, unravel = ravel_pytree(params)

    def outputs(theta, rows):
        return jax.vmap(eqx.combine(unravel(theta), static))(x[rows])

    if kind == "hessian":

        def value(theta):
            total = 0.5 * l2 * jnp.sum(theta**2)
            total += penalty(unravel(theta)) if name == "sum" else 0.0
            for c, loss, rows, t, w in terms:
                w = jnp.ones(len(t)) if w is None else w
                z = outputs(theta, rows)
                total += c * jnp.sum(w * jax.vmap(loss)(z, t)) / jnp.sum(w)
            return total

        return jax.hessian(value)(theta)

    matrix = l2 * jnp.eye(theta.size)
    for c, loss, rows, t, w in terms:
        w = jnp.ones(len(t)) if w is None else w
        z, J = outputs(theta, rows), jax.jacobian(outputs)(theta, rows)
        if kind == "empirical":
            s = jax.vmap(jax.grad(loss))(z, t)
            M = s[:, :, None] * s[:, None, :]
        else:
            M = jax.vmap(jax.hessian(loss))(z, t)
        matrix += c * jnp.einsum("n,nki,nkl,nlj->ij", w, J, M, J) / jnp.sum(w)
    return matrix


def operator_of(name, kind, model=tanh_mlp, x=x):
    return operators[kind](objectives[name][0], model, x, weights)


vector = noise(5, params_of(tanh_mlp))
flat_vector = np.concatenate([a.ravel() for a in arrays(vector)])


#
# Operators of a model
#


@pytest.mark.parametrize("kind", operators)
@pytest.mark.parametrize("name", objectives)
def test_matrix_and_product(name, kind):
    operator = operator_of(name, kind)
    expected = given(name, kind)

    @eqx.filter_jit
    def run(operator, vector):
        product = operator.mv(vector)
        return operator.as_matrix(), product, flat(product)

    matrix, tree, product = run(operator, vector)
    close(matrix, expected)
    close(matrix, np.asarray(matrix).T)
    close(product, expected @ flat_vector)
    assert jtu.tree_structure(tree) == jtu.tree_structure(vector)
    assert lx.is_symmetric(operator) and operator.T is operator
    assert lx.is_positive_semidefinite(operator) == (kind != "hessian")
    smallest = np.linalg.eigvalsh(expected)[0]
    if kind == "hessian":
        assert name == "sum" or smallest < -1e-3
    else:
        assert smallest > -1e-12


@pytest.mark.parametrize("kind", ["ggn", "fisher", "empirical"])
def test_factor_and_jacobian(kind, name="sum"):
    operator = operator_of(name, kind)

    @eqx.filter_jit
    def run(operator, vector):
        J, B = operator.jacobian(), operator.factor()
        outputs, product = J.mv(vector), B.T.mv(B.mv(vector))
        return J.as_matrix(), B.as_matrix(), outputs, flat(outputs), flat(product)

    J, B, tree, outputs, product = run(operator, vector)
    J, B = np.asarray(J), np.asarray(B)
    expected = given(name, kind)
    close(B.T @ B, expected)
    close(product, expected @ flat_vector)
    assert isinstance(tree, list)
    assert tree[0].shape == (N, 2)
    close(outputs, J @ flat_vector)


def test_what_must_differ():
    assert reference.error(given("squared", "ggn"), given("squared", "hessian")) > 0.1
    assert reference.error(given("softmax", "empirical"), given("softmax", "ggn")) > 0.1

    @eqx.filter_jit
    def matrices(key):
        model = eqx.nn.Linear(3, 2, key=key)
        matrix = lambda *which: operator_of(*which, model).as_matrix()
        softmax = {kind: matrix("softmax", kind) for kind in ("ggn", "hessian", "fisher")}
        more = matrix("sum", "hessian") - matrix("sum", "ggn")
        return softmax, more, flat(params_of(model))

    softmax, more, theta = matrices(jr.key(4))
    close(softmax["ggn"], softmax["hessian"])
    close(softmax["ggn"], softmax["fisher"])
    # With penalties, the Hessian is more.
    close(more, np.diag(0.3 * 12 * np.asarray(theta) ** 2), 1e-9)


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_vmap(kind):
    vectors = stack([noise(seed, vector) for seed in (6, 7, 8)])

    @eqx.filter_jit
    def run(operator, vectors):
        return jax.vmap(flat)(jax.vmap(operator.mv)(vectors)), jax.vmap(flat)(vectors)

    products, rows = run(operator_of("sum", kind), vectors)
    close(products, np.asarray(rows) @ given("sum", kind))

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
    def of_models(model, vector):
        product = flat(operator_of("sum", kind, model).mv(vector))
        return product, dense("sum", kind, model) @ flat(vector)

    models = eqx.filter_jit(lambda key: eqx.filter_vmap(tanh_net)(jr.split(key, 2)))
    products, expected = of_models(models(jr.key(7)), vector)
    for i in range(2):
        close(np.asarray(products)[i], np.asarray(expected)[i])


def test_vmap_of_made_operators():
    """Operators that were made within `vmap`, and then used outside."""
    batches = jax.device_put(np.stack([x, 2 * np.asarray(x)]))
    make = lambda x: operator_of("squared", "ggn", x=x)
    ops = eqx.filter_jit(eqx.filter_vmap(make))(batches)
    product = lambda op: flat(op.mv(vector))
    products = eqx.filter_jit(eqx.filter_vmap(product))(ops)
    expected = lambda x: dense("squared", "ggn", x=x) @ flat(vector)
    close(products, jax.jit(jax.vmap(expected))(batches))


@pytest.mark.parametrize("kind", ["ggn", "empirical", "hessian"])
def test_gradient_of_product(kind):
    params, static = eqx.partition(tanh_mlp, eqx.is_inexact_array)

    @jax.jit
    @ft.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(params, x, vector):
        operator = operator_of("softmax", kind, eqx.combine(params, static), x)
        return jnp.sum(jnp.sin(flat(operator.mv(vector))))

    @jax.jit
    @ft.partial(jax.grad, argnums=(0, 1, 2))
    def expected(params, x, vector):
        matrix = dense("softmax", kind, eqx.combine(params, static), x)
        return jnp.sum(jnp.sin(matrix @ flat(vector)))

    got, want = gradient(params, x, vector), expected(params, x, vector)
    jtu.tree_map(lambda a, b: close(a, b, 1e-9), got, want)


solvers = {
    "lx.CG": lx.CG(rtol=1e-12, atol=1e-12),
    "CG": kfac.analysis.ConjugateGradient(rtol=1e-12),
    "LU": lx.LU(),
    "Cholesky": lx.Cholesky(),
}


@pytest.mark.parametrize("solver", solvers)
def test_solve_and_its_gradient(solver):
    params, static = eqx.partition(tanh_mlp, eqx.is_inexact_array)
    iterative = "CG" in solver

    def solve(params, x):
        # The loss function closes over tracers.
        def loss_fn(model):
            return softmax_fn(model, x, weights)

        operator = kfac.analysis.GaussNewtonOperator(
            loss_fn, eqx.combine(params, static)
        ).damped(0.1)
        operator = operator if iterative else lx.materialise(operator)
        return flat(lx.linear_solve(operator, vector, solvers[solver]).value)

    got, solution = _gradient(solve, params, x)
    want, wanted = expected_solution()
    close(solution, wanted, 1e-9)
    jtu.tree_map(lambda a, b: close(a, b, 1e-8), got, want)


def _gradient(fn, params, x):
    def total(*args):
        out = fn(*args)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x)


@ft.cache
def expected_solution():
    params, static = eqx.partition(tanh_mlp, eqx.is_inexact_array)

    def solve(params, x):
        matrix = dense("softmax", "ggn", eqx.combine(params, static), x)
        damped = matrix + 0.1 * jnp.eye(len(matrix))
        return jnp.linalg.solve(damped, flat(vector))

    return _gradient(solve, params, x)


def test_composition_with_lineax():
    operator = operator_of("sum", "ggn")
    identity = lx.IdentityLinearOperator(operator.in_structure())
    matrix, size = given("sum", "ggn"), operator.in_size()

    @eqx.filter_jit
    def run(operator, damping):
        damped = operator + damping * identity
        tagged = lx.TaggedLinearOperator(damped, lx.positive_semidefinite_tag)
        solution = lx.linear_solve(tagged, vector, lx.CG(rtol=1e-12, atol=1e-12)).value
        others = [
            (operator @ operator).mv(vector),
            (2 * operator - operator).mv(vector),
            operator.damped(damping).mv(vector),
        ]
        trees = [damped.mv(vector), solution, *others]
        return *map(flat, trees), lx.diagonal(operator)

    product, solution, *others, diagonal = run(operator, jnp.array(0.3))
    expected, v = matrix + 0.3 * np.eye(size), flat_vector
    close(product, expected @ v)
    close(solution, np.linalg.solve(expected, v), 1e-9)
    wants = matrix @ matrix, matrix, expected
    for other, want in zip(others, wants, strict=True):
        close(other, want @ v)
    close(diagonal, np.diag(matrix))


def primitives(jaxpr):
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for param in jtu.tree_leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found |= primitives(inner)
    return found


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_linearise_runs_the_model_once(kind):
    operator = operator_of("softmax", kind)
    linear = eqx.filter_jit(lx.linearise)(operator)
    product = lambda op: jax.make_jaxpr(lambda v: op.mv(v))(vector).jaxpr
    assert "tanh" in primitives(product(operator))
    assert "tanh" not in primitives(product(linear))
    product = eqx.filter_jit(lambda op, v: flat(op.mv(v)))(linear, vector)
    close(product, given("softmax", kind) @ flat_vector)
    materialised = eqx.filter_jit(lx.materialise)(operator)
    matrix = eqx.filter_jit(lambda op: op.as_matrix())(materialised)
    close(matrix, given("softmax", kind))
    for op in (linear, materialised, operator.damped(0.1)):
        assert lx.is_symmetric(op)
        assert lx.is_positive_semidefinite(op) == (kind != "hessian")
        assert lx.conj(op) is op and op.T is op
        assert not lx.is_diagonal(op) and not lx.is_negative_semidefinite(op)


def test_tags_do_not_collect():
    tagged = kfac.convert(tanh_mlp)
    operator = operator_of("sum", "ggn", tagged)
    vector = noise(5, params_of(tagged))
    jaxpr = jax.make_jaxpr(lambda v: operator.mv(v))(vector).jaxpr
    assert "kfac_tag" not in primitives(jaxpr)
    assert "kfac_tag_linear" not in primitives(jaxpr)
    product = eqx.filter_jit(lambda op, v: flat(op.mv(v)))(operator, vector)
    close(product, given("sum", "ggn") @ flat_vector)


def test_several_types():
    where = lambda m: m.layers[0].weight
    cast = jnp.asarray(np.asarray(where(tanh_mlp)), jnp.float32)
    mixed = eqx.tree_at(where, tanh_mlp, cast)

    def loss_fn(model, x):
        model = eqx.tree_at(where, model, where(model).astype(jnp.float64))
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), classes, weights)

    vector = noise(8, params_of(mixed))
    types = jtu.tree_map(lambda a: a.dtype, vector)
    wide = np.concatenate([a.astype(float).ravel() for a in arrays(vector)])

    @eqx.filter_jit
    def run(operator, vector):
        matrix = lx.materialise(operator)
        return operator.mv(vector), matrix.mv(vector), matrix.as_matrix()

    for cls in (kfac.analysis.GaussNewtonOperator, kfac.analysis.HessianOperator):
        product, again, matrix = run(cls(loss_fn, mixed, x), vector)
        assert jtu.tree_map(lambda a: a.dtype, product) == types
        assert matrix.dtype == jnp.float64
        got = np.concatenate([a.astype(float).ravel() for a in arrays(product)])
        close(got, np.asarray(matrix) @ wide, 1e-6)
        jtu.tree_map(lambda a, b: close(a, b, 1e-5), again, product)

    @eqx.filter_jit
    def solve(operator, vector):
        solver = kfac.analysis.ConjugateGradient(rtol=1e-3)
        options = dict(damping=0.5)
        return lx.linear_solve(operator, vector, solver, options=options).value

    solution = solve(kfac.analysis.GaussNewtonOperator(loss_fn, mixed, x), vector)
    assert jtu.tree_map(lambda a: a.dtype, solution) == types


def test_float32_and_keywords():
    model = eqx.filter_jit(kfac.cast)(tanh_mlp, jnp.float32)

    def loss_fn(model, x, *, scale):
        return kfac.SquaredError(scale * jax.vmap(model)(x), None)

    # A NumPy array; no targets; a keyword.
    operator = kfac.analysis.GaussNewtonOperator(
        loss_fn, model, np.float32(x), scale=np.float32(2)
    )
    matrix = eqx.filter_jit(lambda op: op.as_matrix())(operator)
    assert matrix.dtype == jnp.float32
    close(matrix, 4 * given("squared", "ggn"), 1e-5)


def test_large_matrix_is_computed_in_pieces():
    big = tanh_net(jr.key(3), width=30)
    operator = operator_of("squared", "ggn", big)
    assert operator.in_size() > 128

    @eqx.filter_jit
    def run(operator, model):
        return operator.as_matrix(), dense("squared", "ggn", model)

    close(*run(operator, big))


def test_errors():
    def no_targets(model, x):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x))

    with pytest.raises(ValueError, match="targets"):
        kfac.analysis.EmpiricalFisherOperator(no_targets, tanh_mlp, x).mv(vector)
    with pytest.raises(TypeError, match="must return a loss"):
        kfac.analysis.GaussNewtonOperator(
            lambda m, x: jnp.sum(jax.vmap(m)(x)), tanh_mlp, x
        ).mv(vector)
    hessian = operator_of("squared", "hessian")
    with pytest.raises(ValueError, match="GaussNewton"):
        lx.linear_solve(hessian, vector, kfac.analysis.ConjugateGradient())
    with pytest.raises(ValueError, match="`max_steps` must be at least 1"):
        kfac.analysis.ConjugateGradient(max_steps=0)
    with pytest.raises(ValueError, match="kfac.curvature"):
        kfac.analysis.BlockDiagonalOperator(
            kfac.convert(tanh_mlp), kfac.convert(tanh_mlp)
        )


class Laplace(kfac.AbstractLoss):
    """Not natural: the log-scale of a normal distribution around zero."""

    outputs_: jax.Array
    targets: jax.Array | None
    weights: jax.Array | None = None

    @property
    def outputs(self):
        return self.outputs_

    @property
    def root_shape(self):
        return self.outputs_.shape

    def losses(self, outputs, targets):
        return jnp.sum(outputs + 0.5 * targets**2 * jnp.exp(-2 * outputs), axis=-1)

    def sample(self, key):
        return jnp.exp(self.outputs_) * jr.normal(key, self.outputs_.shape)

    def fisher_root(self, v):
        return math.sqrt(2) * v


def test_not_natural():
    def loss_fn(model, x, w):
        return Laplace(jax.vmap(model)(x), values)

    ggn = kfac.analysis.GaussNewtonOperator(loss_fn, tanh_mlp, x, weights)
    fisher = kfac.analysis.FisherOperator(loss_fn, tanh_mlp, x, weights)
    assert not lx.is_positive_semidefinite(ggn)
    assert lx.is_positive_semidefinite(fisher)

    @eqx.filter_jit
    def run(model):
        of_model = ggn.jacobian().as_matrix(), jax.vmap(model)(x)
        return *of_model, fisher.as_matrix(), ggn.as_matrix()

    J, z, of_fisher, of_ggn = map(np.asarray, run(tanh_mlp))
    close(of_fisher, J.T @ (2 * J) / N)
    H = 2 * np.asarray(values) ** 2 * np.exp(-2 * z)
    close(of_ggn, J.T @ (H.reshape(-1, 1) * J) / N)
    with pytest.raises(ValueError, match="no root"):
        ggn.factor()


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_sharded_batch(kind):
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    x, target = normal(8, 3, seed=9), normal(8, 2, seed=10)

    def loss_fn(model, x, t):
        return kfac.SquaredError(jax.vmap(model)(x), t)

    @eqx.filter_jit
    def run(x, t):
        return flat(operators[kind](loss_fn, tanh_mlp, x, t).mv(vector))

    expected = run(x, target)
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    split = jax.device_put((x, target), sharding)
    close(run(*split), expected, 1e-12)

    def local(x, t):
        return flat(operators[kind](loss_fn, tanh_mlp, x, t).mv(vector))

    specs = PartitionSpec("batch"), PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    close(jax.jit(mapped)(*split), expected, 1e-12)


@pytest.mark.parametrize("kind", ["ggn", "fisher"])
def test_factor_of_a_sharded_batch(kind):
    """What a device has of the factor is its own examples' part."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    x, weights = normal(8, 3, seed=9), jax.device_put(np.arange(8.0))

    def run(x, weights):
        def loss_fn(model):
            logits = jax.vmap(model)(x)
            return kfac.SoftmaxCrossEntropy(logits, None, weights)

        ((product,), _) = operators[kind](loss_fn, tanh_mlp).factor().mv(vector)
        return product

    spec = PartitionSpec("batch")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    close(jax.jit(mapped)(x, weights), jax.jit(run)(x, weights), 1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        kfac.analysis.EmpiricalFisherOperator,
        kfac.analysis.FisherOperator,
        kfac.analysis.GaussNewtonOperator,
        kfac.analysis.HessianOperator,
    ],
)
def test_many_parameters_and_examples_in_float32(kind):
    """So many numbers as XLA needs to go wrong in, against the same in float64."""
    make = lambda key: eqx.nn.MLP(10, 5, 16, 1, jnp.tanh, dtype=jnp.float32, key=key)
    mlp = eqx.filter_jit(make)(jr.key(0))
    x = normal(200, 10, seed=1, dtype=jnp.float32)
    y = jax.device_put(np.random.default_rng(2).integers(5, size=200))

    def loss_fn(model, x, y):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)

    operator = kind(loss_fn, mlp, x, y)
    wide = lambda a: jnp.asarray(np.asarray(a), float) if eqx.is_inexact_array(a) else a
    exact = kind(loss_fn, jtu.tree_map(wide, mlp), wide(x), y)
    assert operator.in_size() == 261
    as_matrix = eqx.filter_jit(lambda operator: operator.as_matrix())
    want = as_matrix(exact)
    for matrix in (operator.as_matrix(), as_matrix(operator)):
        assert matrix.dtype == jnp.float32
        close(np.asarray(matrix, float), want, 1e-5)
