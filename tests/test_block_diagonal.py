"""The curvature of all layers as one operator, against a dense matrix; and conjugate
gradients with its inverse as preconditioner."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import eqx_kfac as kfac
from eqx_kfac._inverse._factorise import factorise
from eqx_kfac._inverse._precondition import precondition
from eqx_kfac._tag import is_tagged
from eqx_kfac._tag._partition import partition_tagged

from . import reference
from .helpers import close, flat, noise, normal, params_of
from .models import (
    batch,
    Grouped,
    mlp,
    penalised as loss_fn,
    Recurrent,
    Stacked,
    Words,
)


#
# One layer
#


def semidefinite(seed, d, rank):
    a = np.asarray(normal(d, rank, seed=seed))
    return jnp.asarray(a @ a.T)


G, A = semidefinite(0, 3, 2), semidefinite(1, 4, 4)
kroneckers = {
    "dense": (G, A),
    "diagonal input": (G, jax.device_put(np.array([2.0, 0.0, 1.0, 0.5]))),
    "diagonal": tuple(
        jax.device_put(np.array(d)) for d in ([2.0, 0.0, 1.0], [2.0, 1.0, 0.0, 0.5])
    ),
    "zero": (jax.device_put(np.zeros((3, 3))), A),
}


@pytest.mark.parametrize("name", kroneckers)
def test_kronecker(name):
    exponents = -0.5, 0.5, 2

    @eqx.filter_jit
    def run(operator, v, damping):
        root = operator.power(0.5)
        assert isinstance(root, kfac.operators.KroneckerOperator)
        damped = [
            dict(
                inverse=operator.inverse(number).as_matrix(),
                solution=operator.inverse(number).mv(v),
                logdet=operator.logdet(number),
                powers=[operator.power(p, number).as_matrix() for p in exponents],
            )
            for number in (0.1, damping)
        ]
        return dict(
            matrix=operator.as_matrix(),
            eigenvalues=operator.eigenvalues(),
            norm=operator.frobenius_norm(),
            spectral=operator.spectral().as_matrix(),
            root=root.as_matrix(),
            damped=damped,
        )

    v = normal(3, 4, seed=2)
    found = run(kfac.operators.KroneckerOperator(*kroneckers[name]), v, jnp.array(0.1))
    got = jtu.tree_map(np.asarray, found)
    v, full = np.asarray(v).ravel(), got["matrix"]
    values, vectors = np.linalg.eigh(full)
    assert (got["eigenvalues"] >= 0).all()
    close(got["norm"], np.linalg.norm(full))
    close(np.sort(got["eigenvalues"].ravel()), np.maximum(values, 0), 1e-10)
    close(got["spectral"], full)
    damped = full + 0.1 * np.eye(12)
    for one in got["damped"]:
        close(one["inverse"], np.linalg.inv(damped))
        close(one["solution"].ravel(), np.linalg.solve(damped, v))
        close(one["logdet"], np.linalg.slogdet(damped)[1])
        for p, power in zip(exponents, one["powers"], strict=True):
            close(power, (vectors * (values + 0.1) ** p) @ vectors.T)
    close(got["root"] @ got["root"], full, 1e-7)


def test_rounding_below_zero():
    """A factor of low rank has eigenvalues that rounding makes negative."""

    @eqx.filter_jit
    def run(low):
        operator = kfac.operators.KroneckerOperator(low, low)
        finite = [operator.power(0.5, tiny).as_matrix() for tiny in (1e-12, 0.0)]
        finite += [operator.logdet(1e-12), operator.power(-0.5, 1e-12).as_matrix()]
        return jnp.linalg.eigvalsh(low), operator.eigenvalues(), finite

    low = jnp.asarray(np.asarray(semidefinite(3, 6, 1)), jnp.float32)
    own, values, finite = jtu.tree_map(np.asarray, run(low))
    assert own[0] < 0
    assert (values >= 0).all()
    assert all(np.isfinite(a).all() for a in finite)


#
# All layers of a model
#


@eqx.filter_jit
def as_matrix(operator):
    return operator.as_matrix()


def frozen(model):
    """One layer is not trained, and a bias of another one."""
    where = lambda m: (m.layers[0].weight, m.layers[0].bias, m.layers[1].bias)
    return eqx.tree_at(where, model, (None, None, None), is_leaf=lambda x: x is None)


models = {
    "kronecker": mlp,
    "diagonal": lambda key: mlp(key, kfac.Diagonal()),
    "embedding": Words,
    "stacked": Stacked,
    "groups": Grouped,
    "gates": Recurrent,
}


@eqx.filter_jit
def curvature_of(model, fisher=kfac.Exact()):
    return kfac.curvature(loss_fn, fisher=fisher)(model, *batch)


@ft.cache
def fitted(name):
    """A model and its curvature."""

    @eqx.filter_jit
    def run(key):
        model = models[name](key)
        return model, curvature_of(model)

    return run(jr.key(3))


@eqx.filter_jit
def to_matrix(form, layer):
    return form.to_matrix(layer)


def dense_blocks(curvature, model):
    """The matrix, with its rows and columns where the leaves of a vector are."""
    tagged = partition_tagged(model)[0]
    leaves, treedef = jtu.tree_flatten(tagged)
    *starts, size = np.cumsum([0] + [leaf.size for leaf in leaves])
    index = [
        jnp.asarray(np.arange(leaf.size).reshape(leaf.shape) + start, float)
        for leaf, start in zip(leaves, starts, strict=True)
    ]
    index = jtu.tree_unflatten(treedef, index)
    matrix = np.zeros((size, size))

    def fill(layer, factors):
        if not is_tagged(layer):
            return
        pairs = [(layer.tag, factors)]
        if isinstance(layer.tag, dict):
            pairs = [(tag, factors[name]) for name, tag in layer.tag.items()]
        for tag, f in pairs:
            if f is None:
                continue
            f = jtu.tree_map(np.asarray, f)
            rows = np.asarray(to_matrix(tag.form, layer)).astype(int)
            for i in np.ndindex(f.l2.shape):
                if isinstance(f, kfac.factors.KroneckerFactors):
                    a = f.input_factor[i]
                    a = np.diag(a) if a.ndim == 1 else a
                    block = np.kron(f.output_factor[i], a)
                else:
                    block = np.diag(f.diagonal[i].ravel())
                block = block + float(f.l2[i]) * np.eye(len(block))
                where = rows[i].ravel()
                matrix[np.ix_(where, where)] = block

    jtu.tree_map(fill, index, curvature, is_leaf=is_tagged)
    return matrix


@pytest.mark.parametrize("name", models)
def test_block_diagonal(name):
    model, curvature = fitted(name)
    full = dense_blocks(curvature, model)
    values, vectors = np.linalg.eigh(full)
    size = len(full)
    v = noise(4, partition_tagged(model)[0])

    @eqx.filter_jit
    def run(curvature, v, damping):
        operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
        powers = {p: operator.power(p, damping) for p in (-0.5, 0.5)}
        return dict(
            matrix=operator.as_matrix(),
            v=flat(v),
            product=flat(operator.mv(v)),
            diagonal=lx.diagonal(operator),
            trace=operator.trace(),
            norm=operator.frobenius_norm(),
            logdet=operator.logdet(damping),
            eigenvalues=flat(operator.eigenvalues()),
            spectral=operator.spectral().as_matrix(),
            inverse=operator.inverse(damping).as_matrix(),
            cached=flat(operator.spectral().inverse(damping).mv(v)),
            powers={p: power.as_matrix() for p, power in powers.items()},
            sample=flat(powers[-0.5].mv(v)),
        )

    got = jtu.tree_map(np.asarray, run(curvature, v, jnp.array(0.05)))
    v = got["v"]
    assert size == v.size
    close(got["matrix"], full)
    close(got["product"], full @ v)
    close(got["diagonal"], np.diag(full))
    close(got["trace"], np.trace(full))
    close(got["norm"], np.linalg.norm(full))
    close(got["logdet"], np.sum(np.log(values + 0.05)))
    close(np.sort(got["eigenvalues"]), values)
    close(got["spectral"], full)
    inverse = np.linalg.inv(full + 0.05 * np.eye(size))
    close(got["inverse"], inverse)
    close(got["cached"], inverse @ v)
    for p, matrix in got["powers"].items():
        close(matrix, (vectors * (values + 0.05) ** p) @ vectors.T)
    close(got["sample"], got["powers"][-0.5] @ v)


def test_covers_the_model():
    model, curvature = fitted("kronecker")
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    exact = kfac.analysis.GaussNewtonOperator(loss_fn, model, *batch)
    assert operator.in_structure() == exact.in_structure()
    assert lx.is_symmetric(operator) and lx.is_positive_semidefinite(operator)
    assert operator.T is operator and lx.linearise(operator) is operator
    # The last layer's block is exact up to the independence of its factors.
    assert reference.error(*map(as_matrix, (operator, exact))) > 1e-3


def test_l2_is_part_of_it():
    """With no curvature but that of the penalty, both are the
    same."""
    model, _ = fitted("kronecker")

    def only_l2(model, x):
        return 0.0 * kfac.SquaredError(jax.vmap(model)(x)) + kfac.L2(model, 0.2)

    collect = eqx.filter_jit(kfac.curvature(only_l2, fisher=kfac.Exact()))
    operator = kfac.analysis.BlockDiagonalOperator(collect(model, batch[0]), model)
    exact = kfac.analysis.GaussNewtonOperator(only_l2, model, batch[0])
    close(as_matrix(operator), as_matrix(exact))
    close(as_matrix(operator), 0.2 * np.eye(exact.in_size()))


def test_frozen():
    whole, _ = fitted("kronecker")
    model = frozen(whole)
    loss = lambda part, x, t: loss_fn(eqx.combine(part, whole), x, t)
    curvature = eqx.filter_jit(kfac.curvature(loss, fisher=kfac.Exact()))(model, *batch)
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    close(as_matrix(operator), dense_blocks(curvature, model))
    assert operator.in_size() == 6
    solve = eqx.filter_jit(lambda operator, v: operator.inverse(0.1).mv(v))
    solution = solve(operator, partition_tagged(model)[0])
    assert solution.layers[0].weight is None


@pytest.mark.parametrize(
    "solver",
    [kfac.Eigh(), kfac.Cholesky(), kfac.Cholesky(scaled_bias=True)],
    ids=["eigh", "chol", "without-bias"],
)
@pytest.mark.parametrize("name", ["kronecker", "stacked", "embedding"])
def test_inverse_is_what_the_optimizer_does(name, solver):
    model, curvature = fitted(name)
    v = noise(4, partition_tagged(model)[0])

    @eqx.filter_jit
    def run(curvature, v):
        operator = kfac.analysis.BlockDiagonalOperator(curvature, model).inverse(
            0.05, solver
        )
        inverse = factorise(curvature, model, solver, 0.05)
        expected = precondition(v, curvature, inverse, solver, 0.05)
        return flat(operator.mv(v)), flat(expected)

    close(*run(curvature, v), 1e-12)


def test_series():
    """The generic way, by a dense matrix."""
    eye = lambda size, scale=1.0: jnp.asarray(scale * np.eye(size))
    operator = kfac.operators.SeriesOperator(
        eye(2), eye(2, 0.3), eye(3), eye(3, 0.2), jnp.array(4.0), "x"
    )
    factors = kfac.factors.SeriesFactors(
        operator.input_factor,
        operator.input_cross,
        operator.output_factor,
        operator.output_cross,
        operator.length,
        jnp.array(0.1),
    )
    layer = kfac.Linear(2, 2, key=jr.key(1))
    tag = kfac.Tag(kfac.form.Dense(), kfac.Series("symmetric"))
    layer = eqx.tree_at(lambda m: m.tag, layer, tag)

    @eqx.filter_jit
    def run(factors):
        whole = kfac.analysis.BlockDiagonalOperator(factors, layer)
        return dict(
            one=tag.block.operator(factors).as_matrix(),
            powers={p: whole.power(p, 0.2).trace() for p in (1, -0.5)},
            logdet=whole.logdet(0.2),
            norm=whole.frobenius_norm(),
            trace=whole.trace(),
        )

    got = jtu.tree_map(np.asarray, run(factors))
    one = got["one"] + 0.1 * np.eye(6)
    values, vectors = np.linalg.eigh(one)
    for p, trace in got["powers"].items():
        close(trace, np.trace((vectors * (values + 0.2) ** p) @ vectors.T))
    close(got["logdet"], np.sum(np.log(values + 0.2)))
    close(got["norm"], np.linalg.norm(one))
    close(got["trace"], np.trace(one))


#
# Conjugate gradients
#


def badly_scaled():
    """A deep net and few examples, whose inputs are correlated and have scales from 1 to
    300. (The first layer knows: nothing is saturated.)"""
    make = lambda key: eqx.nn.MLP(6, 3, 6, 3, activation=jnp.tanh, key=key)
    net = eqx.filter_jit(make)(jr.key(5))
    scales = np.logspace(0, 2.5, 6)[None, :]
    rotation, _ = np.linalg.qr(normal(6, 6, seed=8))
    weight = (np.asarray(net.layers[0].weight) / scales) @ rotation.T
    net = eqx.tree_at(lambda m: m.layers[0].weight, net, jnp.asarray(weight))
    x = (np.asarray(normal(60, 6, seed=6)) * scales) @ rotation.T
    return net, jnp.asarray(x), normal(60, 3, seed=7)


def regress(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t)


def test_preconditioned():
    net, x, t = badly_scaled()
    model, scales = kfac.convert(net), kfac.convert(net, blocks=kfac.Diagonal())
    damping = 0.1

    @eqx.filter_jit
    def run():
        exact = kfac.analysis.GaussNewtonOperator(regress, model, x, t)
        grads = eqx.filter_grad(lambda m: regress(m, x, t).value)(model)
        estimate = kfac.curvature(regress, fisher=kfac.Exact())
        blocks = kfac.analysis.BlockDiagonalOperator(estimate(model, x, t), model)
        # In the vectors of the other model: the tags of this one have other blocks.
        diagonal = kfac.analysis.BlockDiagonalOperator(estimate(scales, x, t), scales)
        entries = lx.diagonal(diagonal.inverse(damping))
        _, unravel = ravel_pytree(params_of(model))
        jacobi = lx.TaggedLinearOperator(
            lx.DiagonalLinearOperator(unravel(entries)), lx.positive_semidefinite_tag
        )

        theirs = lx.CG(rtol=0.0, atol=1e-4 * jnp.max(jnp.abs(flat(grads))))
        ours = kfac.analysis.ConjugateGradient(rtol=1e-4)

        def solve(**options):
            first = lx.linear_solve(exact.damped(damping), grads, theirs, options=options)
            options["damping"] = damping
            second = lx.linear_solve(exact, grads, ours, options=options)
            return first, second

        inverse = blocks.inverse(damping)
        solutions = {
            "none": solve(),
            "diagonal": solve(preconditioner=jacobi),
            "K-FAC": solve(preconditioner=inverse),
        }
        warm = solve(preconditioner=inverse, y0=solutions["K-FAC"][1].value)
        found = {
            name: [(s.stats["num_steps"], flat(s.value)) for s in pair]
            for name, pair in (solutions | {"warm": warm}).items()
        }
        return exact.as_matrix(), flat(grads), found

    matrix, grads, solutions = jtu.tree_map(np.asarray, run())
    warm = solutions.pop("warm")
    damped = matrix + damping * np.eye(len(matrix))
    assert np.linalg.cond(damped) > 1e4
    expected = np.linalg.solve(damped, grads)
    counts = {}
    for name, pair in solutions.items():
        counts[name] = [int(steps) for steps, _ in pair]
        for _, solution in pair:
            error = solution - expected
            assert error @ damped @ error < 1e-4 * (expected @ damped @ expected)
    print("products of lx.CG and of ours:", counts)
    for i in range(2):
        assert 2 * counts["K-FAC"][i] < counts["none"][i] < counts["diagonal"][i]
    # A start at the solution costs nothing.
    assert warm[1][0] == 0
    assert warm[0][0] < counts["K-FAC"][0]


@pytest.mark.parametrize("steps", [1, 3])
def test_few_steps(steps):
    """A given number of steps: the minimum of the quadratic model in a Krylov space."""
    matrix = semidefinite(8, 8, 8)
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    b = normal(8, seed=9)
    solver = kfac.analysis.ConjugateGradient(rtol=0.0, max_steps=steps)
    solution = eqx.filter_jit(lx.linear_solve)(
        operator, b, solver, options=dict(damping=0.1)
    )
    damped, b = np.asarray(matrix) + 0.1 * np.eye(8), np.asarray(b)
    krylov = [b]
    for _ in range(steps - 1):
        krylov.append(damped @ krylov[-1])
    K, _ = np.linalg.qr(np.stack(krylov, axis=1))
    expected = K @ np.linalg.solve(K.T @ damped @ K, K.T @ b)
    close(solution.value, expected, 1e-9)
    assert int(solution.stats["num_steps"]) == steps


def test_stops_and_says_why():
    matrix = jax.device_put(np.diag([1.0, 2.0, 3.0, -1.0]))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    solve = eqx.filter_jit(lx.linear_solve)

    def run(b, solver):
        return solve(operator, jax.device_put(np.array(b)), solver, throw=False)

    indefinite = run([0.0, 0.0, 0.0, 1.0], kfac.analysis.ConjugateGradient())
    assert indefinite.result == lx.RESULTS.breakdown
    close(indefinite.value, np.zeros(4))
    short = run([1.0, 1.0, 1.0, 0.0], kfac.analysis.ConjugateGradient(max_steps=2))
    assert short.result == lx.RESULTS.max_steps_reached
    zero = run([0.0] * 4, kfac.analysis.ConjugateGradient())
    assert zero.result == lx.RESULTS.successful
    assert int(zero.stats["num_steps"]) == 0
    done = run([1.0, 1.0, 1.0, 0.0], kfac.analysis.ConjugateGradient(rtol=1e-10))
    close(done.value, np.array([1.0, 1 / 2, 1 / 3, 0.0]), 1e-9)
    many = jax.vmap(
        lambda b: lx.linear_solve(operator, b, kfac.analysis.ConjugateGradient(1e-9))
    )
    b = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    solution = eqx.filter_jit(many)(jnp.asarray(b))
    assert np.asarray(solution.stats["num_steps"]).tolist() == [3, 1]
    close(np.asarray(solution.value)[1], b[1])


def test_layers_without_curvature_are_named():
    model, curvature = fitted("kronecker")
    first = lambda tree: tree.layers[0]
    missing = eqx.tree_at(first, curvature, None)
    with pytest.raises(ValueError, match=r"\.layers\[0\].*frozen"):
        kfac.analysis.BlockDiagonalOperator(missing, model)
    nothing = jtu.tree_map(lambda _: None, model.layers[0])
    part = eqx.tree_at(first, model, nothing)
    operator = kfac.analysis.BlockDiagonalOperator(missing, part)
    assert (
        operator.in_size()
        < kfac.analysis.BlockDiagonalOperator(curvature, model).in_size()
    )
