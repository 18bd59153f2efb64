"""Gradients of large layers as rows, which `verify` looks at in the place of matrices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqx_kfac as kfac
from eqx_kfac._tag import trained_layers
from eqx_kfac.debug import _plan
from eqx_kfac.debug._blocks import operators, pulled
from eqx_kfac.debug._compare import _of_rows, _of_sides, ready, Sides
from eqx_kfac.debug._plan import costs, random_vectors
from eqx_kfac.debug._rows import Places

from .helpers import normal


KEY = jr.key(0)


class Every(eqx.Module):
    """Layers of every kind of form, one of which is used twice."""

    embedding: kfac.Embedding
    conv: kfac.Conv1d
    grouped: kfac.Conv1d
    norm: kfac.LayerNorm
    stacked: kfac.Linear
    eigen: kfac.Linear
    twice: kfac.Linear

    def __init__(self):
        self.embedding = kfac.Embedding(5, 4, key=KEY)
        self.conv = kfac.Conv1d(4, 4, 2, key=KEY)
        self.grouped = kfac.Conv1d(4, 6, 2, groups=2, use_bias=False, key=KEY)
        self.norm = kfac.LayerNorm(6)
        make = lambda key: kfac.Linear(6, 6, key=key)
        self.stacked = eqx.filter_vmap(make)(jr.split(KEY, 2))
        self.eigen = kfac.Linear(6, 3, key=KEY, block=kfac.EKFAC())
        self.twice = kfac.Linear(3, 3, key=KEY)

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens).T
        x = jnp.tanh(self.grouped(jnp.tanh(self.conv(x))))
        x = jax.vmap(self.norm)(x.T)
        layer = lambda x, own: (jnp.tanh(jax.vmap(own)(x)), None)
        params, static = eqx.partition(self.stacked, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, p: layer(x, eqx.combine(p, static)), x, params)
        return self.twice(jnp.tanh(self.twice(self.eigen(jnp.sum(x, axis=0)))))


def loss_fn(model, tokens, targets, weights):
    outputs = jax.vmap(model)(tokens)
    return 2.0 * kfac.SquaredError(outputs, targets, weights=weights)


TOKENS = np.random.default_rng(0).integers(0, 5, (4, 6))
ARGS = TOKENS, normal(4, 3), np.array([1.0, 0.5, 2.0, 0.0])


def model_and_places():
    model = eqx.filter_jit(Every)()
    every = costs(loss_fn, model, ARGS, {})
    places = Places(loss_fn, model, ARGS, {}, every.program)
    numbers = range(len(trained_layers(model)))
    return model, places, [i for i in numbers if places.few(i) is not None]


def test_rows_are_the_gradient():
    """With derivatives that know nothing of tags; of the layers that are used once."""
    model, places, few = model_and_places()
    assert few == [0, 1, 2, 3, 4, 5]
    vectors = random_vectors(None, 1e12)

    @eqx.filter_jit
    def both(model):
        sides = places.pulled(few, vectors, None)(model, ARGS, {}, jnp.arange(2))
        pull, losses = pulled(model, loss_fn, ARGS, {})
        return sides, [pull(vectors.cotangents(losses, i, None)) for i in range(2)]

    sides, matrices = both(model)
    for i, own in zip(few, sides, strict=True):
        assert isinstance(own, Sides)
        products = np.einsum("...ri,n...ro->n...oi", own.x, own.g)
        wanted = np.stack([matrices[0][i], matrices[1][i]])
        np.testing.assert_allclose(products, wanted, rtol=1e-10, atol=1e-12)
        assert np.linalg.norm(wanted[0] - wanted[1]) > 0.1 * np.linalg.norm(wanted)
        members = int(np.prod(own.x.shape[:-2]))
        assert places.few(i) == (own.x.shape[-2], own.x.size, own.g[0].size)
        assert members in (1, 2)


def test_products_along_rows():
    """Are those of the matrices."""
    model, places, few = model_and_places()
    vectors = random_vectors(None, 1e12)

    @eqx.filter_jit
    def found(model):
        factors = kfac.curvature(loss_fn, kfac.Exact())(model, *ARGS)
        blocks = operators(model, factors, ready)
        sides = places.pulled(few, vectors, None)(model, ARGS, {}, jnp.arange(3))
        return blocks, sides

    blocks, sides = found(model)
    stacks = [len(tag.form.sizes(layer).stack) for _, tag, layer in trained_layers(model)]
    for i, own in zip(few, sides, strict=True):
        got = _of_sides(blocks[i], own, stacks[i])
        matrices = jnp.einsum("...ri,n...ro->n...oi", own.x, own.g)
        indices = jnp.arange(3)
        want = _of_rows(blocks[i], matrices, indices, stacks[i], False)
        for (a, nothing), (b, _) in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
            assert np.all(np.isnan(nothing)) and nothing.shape == b.shape


def test_report(monkeypatch):
    """Says the same of all layers as dense matrices, up to its standard errors."""
    model = eqx.filter_jit(Every)()
    fisher = kfac.Exact()
    dense = kfac.verify(loss_fn, model, *ARGS, fisher=fisher)
    monkeypatch.setattr(_plan, "ALL", 0.0)
    report = kfac.verify(loss_fn, model, *ARGS, fisher=fisher)
    for check, other in zip(report.layers, dense.layers, strict=True):
        assert check.estimated and not other.estimated
        assert np.all(check.unseen < 1e-10) and "WRONG" not in check.verdict
        has_rows = check.path != ".twice"
        assert np.all(np.isnan(check.diagonal_error)) == has_rows
        for name in ("error", "cosine", "ratio"):
            got, want = getattr(check, name), getattr(other, name)
            noise = getattr(check, f"{name}_noise")
            assert np.all(np.abs(got - want) < 5 * noise + 0.01), (check.path, name)


def test_rows_of_derivatives():
    """Have no bias, which is for whoever knows of them: there, matrices are looked at."""
    model = [kfac.Linear(3, 2, key=KEY)]

    def of_derivative(model, x):
        slopes = jax.vmap(jax.jacfwd(model[0]))(x)
        return kfac.SquaredError(slopes[..., 0], jnp.zeros((2, 2)))

    def of_value(model, x):
        return kfac.SquaredError(jax.vmap(model[0])(x), jnp.zeros((2, 2)))

    for loss_fn, is_there in ((of_value, True), (of_derivative, False)):
        args = (normal(2, 3),)
        every = costs(loss_fn, model, args, {})
        places = Places(loss_fn, model, args, {}, every.program)
        assert (places.few(0) is not None) == is_there
