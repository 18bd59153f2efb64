"""Small networks that several test files use, and data for them."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_kfac as kfac

from .helpers import normal


#
# A perceptron, for regression and for classification
#


@eqx.filter_jit
def fresh_regressor(key):
    return kfac.convert(eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=key))


@ft.cache
def regressor(seed=0):
    return fresh_regressor(jr.key(seed))


def make_targets(seed=0, number=8, d_in=3, d_out=2):
    return normal(number, d_in, seed=seed), normal(number, d_out, seed=1000 + seed)


def classifier():
    return kfac.convert(eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jr.key(0)))


def make_labels():
    return jr.normal(jr.key(1), (8, 3)), jnp.arange(8) % 2


#
# One of every kind of layer, from three numbers to two
#


batch = normal(6, 3, seed=1), normal(6, 2, seed=2)


def penalised(model, x, t):
    return kfac.SquaredError(jax.vmap(model)(x), t) + kfac.L2(model, 0.2)


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
