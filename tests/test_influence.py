"""Influence functions, against gradients of single examples and a dense inverse."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import close, flat, params_of
from .test_block_diagonal import Grouped, mlp, Stacked, Words


x, t = jr.normal(jr.key(1), (10, 3)), jr.normal(jr.key(2), (10, 2))
train, test = (x[:7], t[:7]), (x[6:], t[6:])  # One example is in both.
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
    model = models[name](jr.key(3))
    collect = eqx.filter_jit(kfac.curvature(loss_fn, fisher=kfac.Exact()))
    return model, collect(model, *train)


@ft.cache
def gradients_of(name):
    """Of single examples, without the penalty."""
    model, _ = fitted(name)

    def gradient(x, t):
        value = lambda m: 0.5 * jnp.sum((m(x) - t) ** 2)
        return flat(params_of(eqx.filter_grad(value)(model)))

    return np.asarray(jax.jit(jax.vmap(gradient))(x, t))


# Two solvers for each kind of block, and layers of every form.
cases = [(name, solver) for name in ("kronecker", "wide", "full") for solver in solvers]
cases += [(name, "eigh") for name in ("diagonal", "tnt", "groups")]
cases += [(name, "cholesky") for name in ("embedding", "stacked", "positions")]


@pytest.mark.parametrize(("name", "solver"), cases)
def test_gradients_with_the_inverse_between(name, solver):
    model, curvature = fitted(name)
    operator = kfac.BlockDiagonalOperator(curvature, model)
    inverse = operator.inverse(DAMPING, solvers[solver]).as_matrix()
    if solver == "eigh":
        dense = np.asarray(operator.as_matrix())
        close(inverse, np.linalg.inv(dense + DAMPING * np.eye(len(dense))))
    gradients = gradients_of(name)
    expected = gradients[6:] @ np.asarray(inverse) @ gradients[:7].T
    influence = kfac.influence(loss_fn, curvature, DAMPING, solvers[solver])

    @eqx.filter_jit
    def run(influence, model, test, train):
        return influence(model, test, train), influence.of_itself(model, train)

    scores, own = run(influence, model, test, train)
    close(scores, expected)
    close(scores[0, 6], own[6])  # The example that is in both.
    close(
        own, np.einsum("ni,ij,nj->n", gradients[:7], np.asarray(inverse), gradients[:7])
    )
    assert np.linalg.norm(expected - gradients[6:] @ gradients[:7].T) > 0.1


def test_symmetric():
    model, curvature = fitted("kronecker")
    for solver in (kfac.Eigh(), kfac.Cholesky()):
        influence = kfac.influence(loss_fn, curvature, DAMPING, solver)
        scores = np.asarray(influence(model, train, train))
        close(scores, scores.T, 1e-12)
        assert (np.linalg.eigvalsh(scores) > -1e-12).all()


def test_full_of_one_layer_is_a_dense_solve():
    """Of a linear model: the exact influence function."""
    model = kfac.convert(eqx.nn.Linear(3, 2, key=jr.key(0)), blocks=kfac.Full())
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, *train)
    hessian = kfac.Hessian(loss_fn, model, *train).damped(DAMPING).as_matrix()

    def gradient(x, t):
        value = lambda m: 0.5 * jnp.sum((m(x) - t) ** 2)
        return flat(params_of(eqx.filter_grad(value)(model)))

    of_test, of_train = (jax.vmap(gradient)(*data) for data in (test, train))
    scores = kfac.influence(loss_fn, curvature, DAMPING)(model, test, train)
    close(scores, of_test @ np.linalg.solve(hessian, of_train.T))


def test_of_leaving_an_example_out():
    """What it is to mean: of a linear regression that is trained without an example,
    the change of a loss."""
    from jax.flatten_util import ravel_pytree

    model = kfac.convert(eqx.nn.Linear(3, 2, key=jr.key(0)), blocks=kfac.Full())
    many = jr.normal(jr.key(4), (200, 3)), jr.normal(jr.key(5), (200, 2))

    def trained(x, t):
        params, back = ravel_pytree(params_of(model))
        value = lambda p: loss_fn(eqx.combine(back(p), model), x, t).value
        return eqx.combine(
            back(
                params
                - jnp.linalg.solve(jax.hessian(value)(params), jax.grad(value)(params))
            ),
            model,
        )

    best = trained(*many)
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(best, *many)
    scores = kfac.influence(loss_fn, curvature, 0.0)(best, test, many)
    losses = lambda m: 0.5 * jnp.sum((jax.vmap(m)(test[0]) - test[1]) ** 2, axis=1)
    without = trained(many[0][1:], many[1][1:])
    close(losses(without) - losses(best), scores[:, 0] / 200, 0.1)


def test_in_batches():
    model, curvature = fitted("kronecker")
    influence = kfac.influence(loss_fn, curvature, DAMPING)
    batches = [(x[:4], t[:4]), (x[4:7], t[4:7])]
    found = list(influence.in_batches(model, test, iter(batches)))
    assert [scores.shape for scores in found] == [(4, 4), (4, 3)]
    close(np.concatenate(found, axis=1), influence(model, test, train), 1e-12)


def test_part_of_a_model():
    """Frozen layers, and damping for each of the others."""
    model, _ = fitted("kronecker")
    where = lambda m: m.layers[0]
    trained = eqx.tree_at(where, model, jax.tree.map(lambda _: None, model.layers[0]))
    loss = lambda part, x, t: loss_fn(eqx.combine(part, model), x, t)
    curvature = kfac.curvature(loss, fisher=kfac.Exact())(trained, *train)
    operator = kfac.BlockDiagonalOperator(curvature, trained)
    damping = operator.per_layer(0.3)
    scores = kfac.influence(loss, curvature, damping)(trained, test, train)
    inverse = np.linalg.inv(np.asarray(operator.as_matrix()) + 0.3 * np.eye(8))
    gradients = gradients_of("kronecker")[:, -8:]
    close(scores, gradients[6:] @ inverse @ gradients[:7].T)


def test_errors():
    model, curvature = fitted("kronecker")
    with pytest.raises(ValueError, match="`damping` must be at least 0"):
        kfac.influence(loss_fn, curvature, -1.0)(model, test, train)
    with pytest.raises(TypeError, match="`solver` must be an object"):
        kfac.influence(loss_fn, curvature, 0.1, solver=kfac.Eigh)
    one = lambda model, x, t: kfac.SquaredError(model(x)[None], t[None])
    with pytest.raises(ValueError, match="not called within a `vmap`"):
        kfac.influence(one, curvature, 0.1)(model, (x[0], t[0]), (x[1], t[1]))
