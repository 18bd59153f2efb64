"""Influence functions, against gradients of single examples and a dense inverse."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import eqx_kfac as kfac

from .helpers import close, flat, normal, params_of
from .models import Grouped, mlp, Stacked, Words


x, t = (np.asarray(normal(10, size, seed=size)) for size in (3, 2))
train, test = (  # One example is in both.
    tuple(jnp.asarray(a[part]) for a in (x, t)) for part in (slice(7), slice(6, None))
)
DAMPING = 0.05


class Tokens(eqx.Module):
    """A convolution whose rows are many, and a term of the loss for every position."""

    conv: kfac.Conv1d
    last: kfac.Linear

    def __init__(self, key):
        self.conv = kfac.Conv1d(1, 4, 2, padding="SAME", key=key)
        self.last = kfac.Linear(4, 1, key=key)

    def __call__(self, x):
        return jax.vmap(self.last)(jnp.tanh(self.conv(x[None])).T)[:2, 0]


def loss_fn(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t) + kfac.L2(model, 0.1)


def wide(key):
    """One whose rows are cheaper than its gradients."""
    return kfac.convert(eqx.nn.MLP(3, 2, 8, 2, activation=jnp.tanh, key=key))


models = {
    "kronecker": mlp,
    "wide": wide,
    "full": ft.partial(mlp, blocks=kfac.Full()),
    "diagonal": ft.partial(mlp, blocks=kfac.Diagonal()),
    "tnt": ft.partial(mlp, blocks=kfac.TNT()),
    "embedding": Words,
    "stacked": Stacked,
    "groups": Grouped,
    "positions": Tokens,
}
solvers = {
    "eigh": kfac.Eigh(),
    "cholesky": kfac.Cholesky(),
    "newton-schulz": kfac.NewtonSchulz(),
}


@ft.cache
def fitted(name):
    """A model, its curvature, and the gradients of single examples, without the
    penalty."""

    @eqx.filter_jit
    def run(x, t):
        model = models[name](jr.key(3))
        collect = kfac.curvature(loss_fn, fisher=kfac.Exact())
        return model, collect(model, x[:7], t[:7]), gradients_of(model, x, t)

    model, curvature, gradients = run(x, t)
    return model, curvature, np.asarray(gradients)


def gradients_of(model, x, t):
    def gradient(x, t):
        value = lambda m: 0.5 * jnp.sum((m(x) - t) ** 2)
        return flat(params_of(eqx.filter_grad(value)(model)))

    return jax.vmap(gradient)(x, t)


# Two solvers for each kind of block, and layers of every form.
cases = [(name, solver) for name in ("kronecker", "wide", "full") for solver in solvers]
cases += [(name, "eigh") for name in ("diagonal", "tnt", "groups")]
cases += [(name, "cholesky") for name in ("embedding", "stacked", "positions")]


@eqx.filter_jit
def scores_of(curvature, model, test, train, solver):
    """The library's, of pairs and of examples with themselves; and the matrices."""
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    influence = kfac.analysis.influence(loss_fn, curvature, DAMPING, solver)
    inverse = operator.inverse(DAMPING, solver)
    return dict(
        scores=influence(model, test, train),
        own=influence.of_itself(model, train),
        inverse=inverse.as_matrix(),
        dense=operator.as_matrix(),
    )


@pytest.mark.parametrize(("name", "solver"), cases)
def test_gradients_with_the_inverse_between(name, solver):
    model, curvature, gradients = fitted(name)
    found = scores_of(curvature, model, test, train, solvers[solver])
    scores, own, inverse, dense = (
        np.asarray(found[key]) for key in ("scores", "own", "inverse", "dense")
    )
    if solver == "eigh":
        close(inverse, np.linalg.inv(dense + DAMPING * np.eye(len(dense))))
    expected = gradients[6:] @ inverse @ gradients[:7].T
    close(scores, expected)
    close(scores[0, 6], own[6])  # The example that is in both.
    close(own, np.einsum("ni,ij,nj->n", gradients[:7], inverse, gradients[:7]))
    assert np.linalg.norm(expected - gradients[6:] @ gradients[:7].T) > 0.1


def test_symmetric():
    @eqx.filter_jit
    def run(model, curvature, train):
        both = kfac.Eigh(), kfac.Cholesky()
        of = [
            kfac.analysis.influence(loss_fn, curvature, DAMPING, solver)
            for solver in both
        ]
        return [influence(model, train, train) for influence in of]

    model, curvature, _ = fitted("kronecker")
    for scores in map(np.asarray, run(model, curvature, train)):
        close(scores, scores.T, 1e-12)
        assert (np.linalg.eigvalsh(scores) > -1e-12).all()


def test_full_of_one_layer_is_a_dense_solve():
    """Of a linear model: the exact influence function."""

    @eqx.filter_jit
    def run(test, train):
        model = kfac.convert(eqx.nn.Linear(3, 2, key=jr.key(0)), blocks=kfac.Full())
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *train)
        hessian = (
            kfac.analysis.HessianOperator(loss_fn, model, *train)
            .damped(DAMPING)
            .as_matrix()
        )
        scores = kfac.analysis.influence(loss_fn, curvature, DAMPING)(model, test, train)
        return scores, hessian, *(gradients_of(model, *data) for data in (test, train))

    scores, hessian, of_test, of_train = map(np.asarray, run(test, train))
    close(scores, of_test @ np.linalg.solve(hessian, of_train.T))


def test_of_leaving_an_example_out():
    """Influence is the change of a loss when a linear regression is trained without an
    example."""
    many = normal(200, 3, seed=4), normal(200, 2, seed=5)

    def trained(model, x, t):
        params, back = ravel_pytree(params_of(model))
        value = lambda p: loss_fn(eqx.combine(back(p), model), x, t).value
        step = jnp.linalg.solve(jax.hessian(value)(params), jax.grad(value)(params))
        return eqx.combine(back(params - step), model)

    @eqx.filter_jit
    def run(test, many):
        model = kfac.convert(eqx.nn.Linear(3, 2, key=jr.key(0)), blocks=kfac.Full())
        best = trained(model, *many)
        without = trained(model, *(a[1:] for a in many))
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(best, *many)
        scores = kfac.analysis.influence(loss_fn, curvature, 0.0)(best, test, many)
        losses = lambda m: 0.5 * jnp.sum((jax.vmap(m)(test[0]) - test[1]) ** 2, axis=1)
        return losses(without) - losses(best), scores[:, 0] / 200

    close(*run(test, many), 0.1)


def test_in_batches():
    model, curvature, _ = fitted("kronecker")
    influence = kfac.analysis.influence(loss_fn, curvature, DAMPING)
    batches = [tuple(map(jnp.asarray, (x[p], t[p]))) for p in (slice(4), slice(4, 7))]
    found = list(influence.in_batches(model, test, iter(batches)))
    assert [scores.shape for scores in found] == [(4, 4), (4, 3)]
    whole = scores_of(curvature, model, test, train, kfac.Eigh())["scores"]
    close(np.concatenate(found, axis=1), whole, 1e-12)


def test_part_of_a_model():
    """Frozen layers, and damping for each of the others."""
    model, _, gradients = fitted("kronecker")
    where = lambda m: m.layers[0]
    trained = eqx.tree_at(where, model, jax.tree.map(lambda _: None, model.layers[0]))
    loss = lambda part, x, t: loss_fn(eqx.combine(part, model), x, t)

    @eqx.filter_jit
    def run(test, train):
        curvature = kfac.curvature(loss, fisher=kfac.Exact())(trained, *train)
        operator = kfac.analysis.BlockDiagonalOperator(curvature, trained)
        damping = operator.per_layer(0.3)
        scores = kfac.analysis.influence(loss, curvature, damping)(trained, test, train)
        return scores, operator.as_matrix()

    scores, matrix = map(np.asarray, run(test, train))
    inverse = np.linalg.inv(matrix + 0.3 * np.eye(8))
    close(scores, gradients[6:, -8:] @ inverse @ gradients[:7, -8:].T)


def test_errors():
    model, curvature, _ = fitted("kronecker")
    with pytest.raises(ValueError, match="`damping` must be at least 0"):
        eqx.filter_jit(kfac.analysis.influence(loss_fn, curvature, -1.0))(
            model, test, train
        )
    with pytest.raises(TypeError, match="`solver` must be an object"):
        kfac.analysis.influence(loss_fn, curvature, 0.1, solver=kfac.Eigh)
    one = lambda model, x, t: kfac.SquaredError(model(x)[None], t[None])
    influence = eqx.filter_jit(kfac.analysis.influence(one, curvature, 0.1))
    with pytest.raises(ValueError, match="not called within a `vmap`"):
        influence(model, (x[0], t[0]), (x[1], t[1]))
