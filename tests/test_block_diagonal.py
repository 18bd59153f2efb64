"""The curvature of all layers as one operator, against a dense matrix; and conjugate
gradients with its inverse as preconditioner."""

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
from .helpers import close, flat, normal, params_of
from .test_operators import noise


#
# One layer
#


def semidefinite(key, d, rank):
    a = jr.normal(key, (d, rank))
    return a @ a.T


G, A = semidefinite(jr.key(0), 3, 2), semidefinite(jr.key(1), 4, 4)
kroneckers = {
    "dense": (G, A),
    "diagonal input": (G, jnp.array([2.0, 0.0, 1.0, 0.5])),
    "diagonal": (jnp.array([2.0, 0.0, 1.0]), jnp.array([2.0, 1.0, 0.0, 0.5])),
    "zero": (jnp.zeros((3, 3)), A),
}


@pytest.mark.parametrize("name", kroneckers)
def test_kronecker(name):
    output_factor, input_factor = kroneckers[name]
    operator = kfac.KroneckerOperator(output_factor, input_factor)
    full = np.asarray(operator.as_matrix())
    values, vectors = np.linalg.eigh(full)
    v = jr.normal(jr.key(2), (3, 4))
    assert (operator.eigenvalues() >= 0).all()
    close(operator.frobenius_norm(), np.linalg.norm(full))
    close(jnp.sort(operator.eigenvalues().ravel()), np.maximum(values, 0), 1e-10)
    close(operator.spectral().as_matrix(), full)
    for damping in (0.1, jnp.array(0.1)):
        damped = full + 0.1 * np.eye(12)
        close(operator.inverse(damping).as_matrix(), np.linalg.inv(damped))
        close(operator.inverse(damping).mv(v).ravel(), np.linalg.solve(damped, v.ravel()))
        close(operator.logdet(damping), np.linalg.slogdet(damped)[1])
        for p in (-0.5, 0.5, 2):
            expected = (vectors * (values + 0.1) ** p) @ vectors.T
            close(operator.power(p, damping).as_matrix(), expected)
    root = operator.power(0.5)
    assert isinstance(root, kfac.KroneckerOperator)
    close(root.as_matrix() @ root.as_matrix(), full, 1e-7)


def test_rounding_below_zero():
    """A factor of low rank has eigenvalues that rounding makes negative."""
    key = jr.key(3)
    low = semidefinite(key, 6, 1).astype(jnp.float32)
    assert jnp.linalg.eigvalsh(low)[0] < 0
    operator = kfac.KroneckerOperator(low, low)
    assert (operator.eigenvalues() >= 0).all()
    for tiny in (1e-12, 0.0):
        assert jnp.isfinite(operator.power(0.5, tiny).as_matrix()).all()
    assert jnp.isfinite(operator.logdet(1e-12))
    assert jnp.isfinite(operator.power(-0.5, 1e-12).as_matrix()).all()


#
# All layers of a model
#


def loss_fn(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t) + kfac.L2(model, 0.2)


@eqx.filter_jit
def as_matrix(operator):
    return operator.as_matrix()


def mlp(key, blocks=None):
    model = eqx.nn.MLP(3, 2, 3, 1, activation=jnp.tanh, key=key)
    return kfac.convert(model, blocks=blocks)


class Words(eqx.Module):
    embedding: kfac.Embedding
    norm: kfac.LayerNorm
    linear: kfac.Linear

    def __init__(self, key):
        self.embedding = kfac.Embedding(4, 3, key=key)
        self.norm = kfac.LayerNorm(3)
        self.linear = kfac.Linear(3, 2, key=key)

    def __call__(self, x):
        word = jnp.argmax(x)
        return self.linear(jnp.tanh(self.norm(self.embedding(word))))


class Stacked(eqx.Module):
    layers: kfac.Linear
    last: kfac.Linear

    def __init__(self, key):
        make = lambda key: kfac.Linear(3, 3, key=key)
        self.layers = eqx.filter_vmap(make)(jr.split(key, 2))
        self.last = kfac.Linear(3, 2, use_bias=False, key=key)

    def __call__(self, x):
        params, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, layer):
            return jnp.tanh(eqx.combine(layer, static)(x)), None

        return self.last(jax.lax.scan(body, x, params)[0])


class Grouped(eqx.Module):
    conv: kfac.Conv1d
    last: kfac.Linear

    def __init__(self, key):
        self.conv = kfac.Conv1d(2, 4, 2, groups=2, key=key)
        self.last = kfac.Linear(4, 2, key=key)

    def __call__(self, x):
        return self.last(jnp.sum(jnp.tanh(self.conv(jnp.stack([x, x**2]))), axis=1))


class Recurrent(eqx.Module):
    cell: kfac.GRUCell
    last: kfac.Linear

    def __init__(self, key):
        self.cell = kfac.GRUCell(1, 2, key=key)
        self.last = kfac.Linear(2, 2, key=key)

    def __call__(self, x):
        hidden, _ = jax.lax.scan(
            lambda h, x: (self.cell(x, h), None), jnp.zeros(2), x[:, None]
        )
        return self.last(hidden)


def frozen(key):
    """One layer is not trained, and a bias of another one."""
    model = mlp(key)
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
batch = normal(6, 3, seed=1), normal(6, 2, seed=2)


def curvature_of(model, fisher=kfac.Exact()):
    return eqx.filter_jit(kfac.curvature(loss_fn, fisher=fisher))(model, *batch)


def dense_blocks(curvature, model):
    """The matrix, with its rows and columns where the leaves of a vector are."""
    tagged = partition_tagged(model)[0]
    size = flat(tagged).size
    leaves, treedef = jtu.tree_flatten(tagged)
    starts = np.cumsum([0] + [leaf.size for leaf in leaves])
    index = [
        jnp.asarray(np.arange(leaf.size).reshape(leaf.shape) + start, float)
        for leaf, start in zip(leaves, starts)
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
            rows = np.asarray(tag.form.to_matrix(layer)).astype(int)
            for i in np.ndindex(f.l2.shape):
                if isinstance(f, kfac.KroneckerFactors):
                    a = np.asarray(f.input_factor[i])
                    a = np.diag(a) if a.ndim == 1 else a
                    block = np.kron(np.asarray(f.output_factor[i]), a)
                else:
                    block = np.diag(np.asarray(f.diagonal[i]).ravel())
                block = block + float(f.l2[i]) * np.eye(len(block))
                where = rows[i].ravel()
                matrix[np.ix_(where, where)] = block

    jtu.tree_map(fill, index, curvature, is_leaf=is_tagged)
    return matrix


@pytest.mark.parametrize("name", models)
def test_block_diagonal(name):
    model = models[name](jr.key(3))
    curvature = curvature_of(model)
    full = dense_blocks(curvature, model)
    values, vectors = np.linalg.eigh(full)
    size = len(full)
    v = noise(jr.key(4), partition_tagged(model)[0])

    @eqx.filter_jit
    def run(curvature, v, damping):
        operator = kfac.BlockDiagonalOperator(curvature, model)
        powers = {p: operator.power(p, damping) for p in (-0.5, 0.5)}
        return dict(
            matrix=operator.as_matrix(),
            product=operator.mv(v),
            diagonal=lx.diagonal(operator),
            trace=operator.trace(),
            norm=operator.frobenius_norm(),
            logdet=operator.logdet(damping),
            eigenvalues=operator.eigenvalues(),
            spectral=operator.spectral().as_matrix(),
            inverse=operator.inverse(damping).as_matrix(),
            cached=operator.spectral().inverse(damping).mv(v),
            powers={p: power.as_matrix() for p, power in powers.items()},
            sample=powers[-0.5].mv(v),
        )

    got = run(curvature, v, jnp.array(0.05))
    assert size == flat(v).size
    close(got["matrix"], full)
    close(flat(got["product"]), full @ flat(v))
    close(got["diagonal"], np.diag(full))
    close(got["trace"], np.trace(full))
    close(got["norm"], np.linalg.norm(full))
    close(got["logdet"], np.sum(np.log(values + 0.05)))
    found = np.concatenate([e.ravel() for e in jtu.tree_leaves(got["eigenvalues"])])
    close(np.sort(found), values)
    close(got["spectral"], full)
    inverse = np.linalg.inv(full + 0.05 * np.eye(size))
    close(got["inverse"], inverse)
    close(flat(got["cached"]), inverse @ flat(v))
    for p, matrix in got["powers"].items():
        close(matrix, (vectors * (values + 0.05) ** p) @ vectors.T)
    close(flat(got["sample"]), got["powers"][-0.5] @ flat(v))


def test_covers_the_model():
    model = mlp(jr.key(3))
    operator = kfac.BlockDiagonalOperator(curvature_of(model), model)
    exact = kfac.GaussNewton(loss_fn, model, *batch)
    assert operator.in_structure() == exact.in_structure()
    assert lx.is_symmetric(operator) and lx.is_positive_semidefinite(operator)
    assert operator.T is operator and lx.linearise(operator) is operator
    # The last layer's block is exact up to the independence of its factors.
    assert reference.error(*map(as_matrix, (operator, exact))) > 1e-3


def test_l2_is_part_of_it():
    """As of `GaussNewton`: with no curvature but that of the penalty, both are the
    same."""
    model = mlp(jr.key(3))

    def only_l2(model, x):
        return 0.0 * kfac.SquaredError(jax.vmap(model)(x)) + kfac.L2(model, 0.2)

    collect = eqx.filter_jit(kfac.curvature(only_l2, fisher=kfac.Exact()))
    operator = kfac.BlockDiagonalOperator(collect(model, batch[0]), model)
    exact = kfac.GaussNewton(only_l2, model, batch[0])
    close(as_matrix(operator), as_matrix(exact))
    close(as_matrix(operator), 0.2 * np.eye(exact.in_size()))


def test_frozen():
    model = frozen(jr.key(3))
    whole = mlp(jr.key(3))
    loss = lambda part, x, t: loss_fn(eqx.combine(part, whole), x, t)
    curvature = eqx.filter_jit(kfac.curvature(loss, fisher=kfac.Exact()))(model, *batch)
    operator = kfac.BlockDiagonalOperator(curvature, model)
    close(as_matrix(operator), dense_blocks(curvature, model))
    assert operator.in_size() == 6
    solution = operator.inverse(0.1).mv(partition_tagged(model)[0])
    assert solution.layers[0].weight is None


@pytest.mark.parametrize(
    "solver",
    [kfac.Eigh(), kfac.Cholesky(), kfac.Cholesky(without_bias=True)],
    ids=["eigh", "chol", "without-bias"],
)
@pytest.mark.parametrize("name", ["kronecker", "stacked", "embedding"])
def test_inverse_is_what_the_optimizer_does(name, solver):
    model = models[name](jr.key(3))
    curvature = curvature_of(model)
    v = noise(jr.key(4), partition_tagged(model)[0])
    operator = kfac.BlockDiagonalOperator(curvature, model).inverse(0.05, solver)
    inverse = factorise(curvature, model, solver, 0.05)
    expected = precondition(v, curvature, inverse, solver, 0.05)
    close(flat(operator.mv(v)), flat(expected), 1e-12)


def test_series():
    """The generic way, by a dense matrix."""
    cell = kfac.GRUCell(1, 2, key=jr.key(0))
    operator = kfac.SeriesOperator(
        jnp.eye(2), 0.3 * jnp.eye(2), jnp.eye(3), 0.2 * jnp.eye(3), jnp.array(4.0), "x"
    )
    del cell
    factors = kfac.SeriesFactors(
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
    whole = kfac.BlockDiagonalOperator(factors, layer)
    one = tag.block.operator(factors).as_matrix() + 0.1 * np.eye(6)
    values, vectors = np.linalg.eigh(one)
    for p in (1, -0.5):
        power = (vectors * (values + 0.2) ** p) @ vectors.T
        expected = whole.power(p, 0.2).trace()
        close(expected, np.trace(power))
    close(whole.logdet(0.2), np.sum(np.log(values + 0.2)))
    close(whole.frobenius_norm(), np.linalg.norm(one))
    close(whole.trace(), np.trace(one))


#
# Conjugate gradients
#


def badly_scaled():
    """A deep net and few examples, whose inputs are correlated and have scales from 1 to
    300. (The first layer knows: nothing is saturated.)"""
    net = eqx.nn.MLP(6, 3, 6, 3, activation=jnp.tanh, key=jr.key(5))
    scales = jnp.logspace(0, 2.5, 6)[None, :]
    rotation, _ = jnp.linalg.qr(jr.normal(jr.key(8), (6, 6)))
    weight = (net.layers[0].weight / scales) @ rotation.T
    net = eqx.tree_at(lambda m: m.layers[0].weight, net, weight)
    x = (jr.normal(jr.key(6), (60, 6)) * scales) @ rotation.T
    return net, x, jr.normal(jr.key(7), (60, 3))


def regress(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t)


def test_preconditioned():
    net, x, t = badly_scaled()
    model, scales = kfac.convert(net), kfac.convert(net, blocks=kfac.Diagonal())
    damping = 0.1

    @eqx.filter_jit
    def run():
        exact = kfac.GaussNewton(regress, model, x, t)
        grads = eqx.filter_grad(lambda m: regress(m, x, t).value)(model)
        estimate = kfac.curvature(regress, fisher=kfac.Exact())
        blocks = kfac.BlockDiagonalOperator(estimate(model, x, t), model)
        # In the vectors of the other model: the tags of this one have other blocks.
        diagonal = kfac.BlockDiagonalOperator(estimate(scales, x, t), scales)
        entries = lx.diagonal(diagonal.inverse(damping))
        _, unravel = ravel_pytree(params_of(model))
        jacobi = lx.TaggedLinearOperator(
            lx.DiagonalLinearOperator(unravel(entries)), lx.positive_semidefinite_tag
        )

        theirs = lx.CG(rtol=0.0, atol=1e-4 * jnp.max(jnp.abs(flat(grads))))
        ours = kfac.ConjugateGradient(rtol=1e-4)

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
        return exact.as_matrix(), flat(grads), solutions, warm

    matrix, grads, solutions, warm = run()
    damped = matrix + damping * np.eye(len(matrix))
    assert np.linalg.cond(damped) > 1e4
    expected = np.linalg.solve(damped, grads)
    counts = {}
    for name, pair in solutions.items():
        counts[name] = [int(s.stats["num_steps"]) for s in pair]
        for solution in pair:
            error = flat(solution.value) - expected
            assert error @ damped @ error < 1e-4 * (expected @ damped @ expected)
    print("products of lx.CG and of ours:", counts)
    for i in range(2):
        assert 2 * counts["K-FAC"][i] < counts["none"][i] < counts["diagonal"][i]
    # A start at the solution costs nothing.
    assert int(warm[1].stats["num_steps"]) == 0
    assert int(warm[0].stats["num_steps"]) < counts["K-FAC"][0]


@pytest.mark.parametrize("steps", [1, 3])
def test_few_steps(steps):
    """A given number of steps: the minimum of the quadratic model in a Krylov space."""
    matrix = semidefinite(jr.key(8), 8, 8)
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    b = jr.normal(jr.key(9), (8,))
    solver = kfac.ConjugateGradient(rtol=0.0, max_steps=steps)
    solution = eqx.filter_jit(lx.linear_solve)(
        operator, b, solver, options=dict(damping=0.1)
    )
    damped = matrix + 0.1 * jnp.eye(8)
    krylov = [b]
    for _ in range(steps - 1):
        krylov.append(damped @ krylov[-1])
    K, _ = jnp.linalg.qr(jnp.stack(krylov, axis=1))
    expected = K @ jnp.linalg.solve(K.T @ damped @ K, K.T @ b)
    close(solution.value, expected, 1e-9)
    assert int(solution.stats["num_steps"]) == steps


def test_stops_and_says_why():
    matrix = jnp.diag(jnp.array([1.0, 2.0, 3.0, -1.0]))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    solve = eqx.filter_jit(lx.linear_solve)

    def run(b, solver):
        return solve(operator, jnp.array(b), solver, throw=False)

    indefinite = run([0.0, 0.0, 0.0, 1.0], kfac.ConjugateGradient())
    assert indefinite.result == lx.RESULTS.breakdown
    close(indefinite.value, jnp.zeros(4))
    short = run([1.0, 1.0, 1.0, 0.0], kfac.ConjugateGradient(max_steps=2))
    assert short.result == lx.RESULTS.max_steps_reached
    zero = run([0.0] * 4, kfac.ConjugateGradient())
    assert zero.result == lx.RESULTS.successful
    assert int(zero.stats["num_steps"]) == 0
    done = run([1.0, 1.0, 1.0, 0.0], kfac.ConjugateGradient(rtol=1e-10))
    close(done.value, jnp.array([1.0, 1 / 2, 1 / 3, 0.0]), 1e-9)
    many = jax.vmap(lambda b: lx.linear_solve(operator, b, kfac.ConjugateGradient(1e-9)))
    b = jnp.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    solution = many(b)
    assert list(map(int, solution.stats["num_steps"])) == [3, 1]
    close(solution.value[1], b[1])


def test_layers_without_curvature_are_named():
    model = mlp(jr.key(0))
    curvature = curvature_of(model)
    first = lambda tree: tree.layers[0]
    missing = eqx.tree_at(first, curvature, None)
    with pytest.raises(ValueError, match=r"\.layers\[0\].*frozen"):
        kfac.BlockDiagonalOperator(missing, model)
    nothing = jtu.tree_map(lambda _: None, model.layers[0])
    part = eqx.tree_at(first, model, nothing)
    operator = kfac.BlockDiagonalOperator(missing, part)
    assert operator.in_size() < kfac.BlockDiagonalOperator(curvature, model).in_size()
