"""The models of Equinox's and diffrax's notebooks, written afresh and at toy size, as
anybody would: converted, initialised and trained, without anything done for K-FAC's sake.
(`fallback` looks after arrays that belong to no layer.)"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import normal
from .plain import plain_kfac
from .reference import error


N = 8


@pytest.fixture(autouse=True)
def promotion():
    """Notebooks leave types and ranks to NumPy's rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Notebook(NamedTuple):
    """A model, and what its notebook trains it on."""

    model: Any
    loss_fn: Callable  # (model, *args, **kwargs)
    args: tuple
    kwargs: dict = {}
    fallback: bool = False  # Whether there are arrays that belong to no layer.
    stateful: bool = False  # Whether the loss function's aux is its next `state`.


@eqx.filter_jit
def made(model, *args, **kwargs):
    """(One program, not one for every random array.)"""
    return model(*args, **kwargs)


def equal(*trees):
    return bool(eqx.filter_jit(eqx.tree_equal)(*trees))


class Block(eqx.Module):
    """Attention, dropout and a network for every token, as in BERT and the ViT."""

    norms: list
    attention: eqx.nn.MultiheadAttention
    linears: list
    dropout: eqx.nn.Dropout

    def __init__(self, size, key):
        keys = jr.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(2, size, key=keys[0])
        self.linears = [
            eqx.nn.Linear(size, 2 * size, key=keys[1]),
            eqx.nn.Linear(2 * size, size, key=keys[2]),
        ]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, mask, key):
        keys = jr.split(key)
        if mask is not None:
            mask = mask[:, None] * mask[None, :]
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y, mask=mask), key=keys[0])
        y = jax.vmap(self.linears[0])(jax.vmap(self.norms[1])(x))
        y = jax.vmap(self.linears[1])(jax.nn.gelu(y))
        return x + self.dropout(y, key=keys[1])


def classes(model, x, y, **kwargs):
    return kfac.SoftmaxCrossEntropy(jax.vmap(ft.partial(model, **kwargs))(x), y)


#
# Images
#


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 2, 4, key=keys[0]),
            eqx.nn.MaxPool2d(5, 5),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(50, 8, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(8, 10, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def getting_started(key):
    return Notebook(made(CNN, key), classes, (normal(N, 1, 28, 28), np.arange(N)))


class ViT(eqx.Module):
    embedding: eqx.nn.Linear
    positions: jax.Array
    token: jax.Array
    blocks: list
    head: eqx.nn.Sequential

    def __init__(self, key):
        keys = jr.split(key, 5)
        self.embedding = eqx.nn.Linear(4, 6, key=keys[0])
        self.positions = jr.normal(keys[1], (5, 6))
        self.token = jr.normal(keys[2], (1, 6))
        self.blocks = [Block(6, keys[3])]
        linear = eqx.nn.Linear(6, 3, key=keys[4])
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(6), linear])

    def __call__(self, image, key):
        patches = image.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
        x = jnp.concatenate([self.token, jax.vmap(self.embedding)(patches)])
        x = x + self.positions
        for block, k in zip(self.blocks, jr.split(key, len(self.blocks))):
            x = block(x, None, k)
        return self.head(x[0])


def vision_transformer(key):
    def loss_fn(model, images, labels, keys):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(images, keys), labels)

    data = normal(N, 4, 4), np.arange(N) % 3, jr.split(key, N)
    return Notebook(made(ViT, key), loss_fn, data, fallback=True)


class UNet(eqx.Module):
    inc: eqx.nn.Sequential
    slope: eqx.nn.PReLU
    down: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    out: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, key):
        keys = jr.split(key, 5)
        conv = ft.partial(eqx.nn.Conv2d, padding=1)
        self.inc = eqx.nn.Sequential(
            [
                conv(1, 3, 3, key=keys[0]),
                eqx.nn.Lambda(jnp.tanh),
                conv(3, 3, 3, key=keys[1]),
                eqx.nn.Lambda(jax.nn.relu),
            ]
        )
        self.down = eqx.nn.Conv2d(3, 4, 2, stride=2, key=keys[2])
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.slope = eqx.nn.PReLU(jnp.full((4, 1, 1), 0.25, float))
        self.up = eqx.nn.ConvTranspose2d(4, 3, 2, stride=2, key=keys[3])
        self.out = eqx.nn.Conv2d(6, 2, 1, key=keys[4])

    def __call__(self, image):
        skip = self.inc(image)
        x = self.slope(self.norm(self.down(skip)))
        x = jnp.concatenate([skip, self.up(x)])
        return jnp.moveaxis(self.out(x), 0, -1)


def u_net(key):
    images = normal(N, 1, 4, 4)
    labels = (np.asarray(images)[:, 0] > 0).astype(int)
    return Notebook(made(UNet, key), classes, (images, labels))


class Discriminator(eqx.Module):
    layers: list

    def __init__(self, key, slope=0.2):
        keys = jr.split(key)
        self.layers = [
            eqx.nn.Conv2d(1, 3, 4, 2, 1, use_bias=False, key=keys[0]),
            eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"),
            eqx.nn.PReLU(slope),
            eqx.nn.Conv2d(3, 1, 4, 1, 0, use_bias=False, key=keys[1]),
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return jnp.ravel(x), state


class Generator(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jr.split(key)
        self.layers = [
            eqx.nn.ConvTranspose2d(2, 4, 4, use_bias=False, key=keys[0]),
            eqx.nn.BatchNorm(4, axis_name="batch", mode="batch"),
            jax.nn.relu,
            eqx.nn.ConvTranspose2d(
                4, 1, 4, stride=2, padding=1, use_bias=False, key=keys[1]
            ),
            jnp.tanh,
        ]

    __call__ = Discriminator.__call__


def over_batch(model, x, state):
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return apply(x, state)


def gan_discriminator(key, slope=np.array(0.2)):
    """States as in that notebook: made from the models themselves."""
    keys = jr.split(key)
    generator = made(Generator, keys[0])
    discriminator = made(Discriminator, keys[1], slope)
    generator_state = eqx.nn.State(generator)

    def loss_fn(discriminator, real, noise, state):
        fake, _ = over_batch(generator, noise, generator_state)
        fake = fake.reshape(real.shape)
        logits, state = over_batch(discriminator, fake, state)
        first = kfac.SigmoidCrossEntropy(logits, jnp.zeros_like(logits))
        logits, state = over_batch(discriminator, real, state)
        second = kfac.SigmoidCrossEntropy(logits, jnp.ones_like(logits))
        return (first + second) / 2, state

    args = normal(N, 1, 8, 8), normal(N, 2, 1, 1)
    state = dict(state=eqx.nn.State(discriminator))
    return Notebook(discriminator, loss_fn, args, state, stateful=True)


def gan_generator(key):
    keys = jr.split(key)
    generator, discriminator = made(Generator, keys[0]), made(Discriminator, keys[1])
    discriminator_state = eqx.nn.State(discriminator)

    def loss_fn(generator, noise, state):
        fake, state = over_batch(generator, noise, state)
        fake = fake.reshape(N, 1, 8, 8)
        logits, _ = over_batch(discriminator, fake, discriminator_state)
        return kfac.SigmoidCrossEntropy(logits, jnp.ones_like(logits)), state

    args = (normal(N, 2, 1, 1),)
    state = dict(state=eqx.nn.State(generator))
    return Notebook(generator, loss_fn, args, state, stateful=True)


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, patches, hidden, key):
        keys = jr.split(key)
        self.patch_mixer = eqx.nn.MLP(patches, patches, 4, 1, key=keys[0])
        self.hidden_mixer = eqx.nn.MLP(hidden, hidden, 4, 1, key=keys[1])
        self.norm1 = eqx.nn.LayerNorm((hidden, patches))
        self.norm2 = eqx.nn.LayerNorm((patches, hidden))

    def __call__(self, y):
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        y = y.T
        y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
        return y.T


class Mixer(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.conv_in = eqx.nn.Conv2d(2, 3, 2, stride=2, key=keys[0])
        self.conv_out = eqx.nn.ConvTranspose2d(3, 1, 2, stride=2, key=keys[1])
        self.blocks = [MixerBlock(4, 3, keys[2])]
        self.norm = eqx.nn.LayerNorm((3, 4))

    def __call__(self, t, y):
        t = jnp.broadcast_to(t, (1, 4, 4))
        y = self.conv_in(jnp.concatenate([y, t]))
        y = y.reshape(3, 4)
        for block in self.blocks:
            y = block(y)
        return self.conv_out(self.norm(y).reshape(3, 2, 2))


def score_based_diffusion(key):
    def loss_fn(model, data, noise_key):
        time_key, noise_key = jr.split(noise_key)
        t = (jr.uniform(time_key) + jnp.arange(N)) / N * 2 + 0.1
        noise = jr.normal(noise_key, data.shape)
        scale, std = jnp.exp(-0.5 * t), jnp.sqrt(1 - jnp.exp(-t))
        column = (slice(None), None, None, None)
        y = data * scale[column] + std[column] * noise
        predicted = jax.vmap(model)(t, y)
        residuals = (predicted + noise / std[column]).reshape(N, -1)
        weights = 1 - jnp.exp(-t)
        return kfac.SquaredError(residuals, jnp.zeros_like(residuals), weights)

    return Notebook(made(Mixer, key), loss_fn, (normal(N, 1, 4, 4), key))


#
# Sequences
#


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key):
        keys = jr.split(key)
        self.cell = eqx.nn.GRUCell(2, 4, key=keys[0])
        self.linear = eqx.nn.Linear(4, 1, use_bias=False, key=keys[1])
        self.bias = jnp.zeros(1)

    def __call__(self, x):
        hidden = jnp.zeros((self.cell.hidden_size,))
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), hidden, x)
        return self.linear(hidden) + self.bias


def spirals(key):
    def loss_fn(model, x, y):
        return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), y[:, None])

    t = np.linspace(0, 6, 5)
    sign = np.where(np.arange(N) % 2 == 0, 1.0, -1.0)
    x = np.stack([np.broadcast_to(np.cos(t), (N, 5)), sign[:, None] * np.sin(t)], -1)
    y = (sign > 0).astype(float)
    return Notebook(made(RNN, key), loss_fn, (x, y), fallback=True)


class Embedder(eqx.Module):
    tokens: eqx.nn.Embedding
    segments: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.tokens = eqx.nn.Embedding(11, 6, key=keys[0])
        self.segments = eqx.nn.Embedding(2, 6, key=keys[1])
        self.positions = eqx.nn.Embedding(4, 6, key=keys[2])
        self.norm = eqx.nn.LayerNorm(6)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, tokens, segments, positions, key):
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.segments)(segments)
        x = x + jax.vmap(self.positions)(positions)
        return self.dropout(jax.vmap(self.norm)(x), key=key)


class Encoder(eqx.Module):
    embedder: Embedder
    blocks: list
    pooler: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.embedder = Embedder(keys[0])
        self.blocks = [Block(6, keys[1])]
        self.pooler = eqx.nn.Linear(6, 6, key=keys[2])

    def __call__(self, tokens, segments, key):
        mask, keys = tokens != 0, jr.split(key)
        x = self.embedder(tokens, segments, jnp.arange(len(tokens)), keys[0])
        for block, k in zip(self.blocks, keys[1:]):
            x = block(x, mask, k)
        return jnp.tanh(self.pooler(x[0]))


class Classifier(eqx.Module):
    encoder: Encoder
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jr.split(key)
        self.encoder = Encoder(keys[0])
        self.head = eqx.nn.Linear(6, 2, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, inputs, key):
        keys = jr.split(key)
        pooled = self.encoder(inputs["tokens"], inputs["segments"], keys[0])
        return self.head(self.dropout(pooled, key=keys[1]))


def bert(key):
    def loss_fn(model, inputs, labels, keys):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(inputs, keys), labels)

    tokens = np.random.default_rng(0).integers(0, 11, (N, 4))
    tokens[:, 0] = 1
    inputs = dict(tokens=tokens, segments=(tokens > 5).astype(int))
    data = inputs, np.arange(N) % 2, jr.split(key, N)
    return Notebook(made(Classifier, key), loss_fn, data)


#
# Differential equations
#


class Func(eqx.Module):
    out_scale: jax.Array
    mlp: eqx.nn.MLP

    def __init__(self, size, key):
        self.out_scale = jnp.ones(())
        self.mlp = eqx.nn.MLP(size, size, 4, 1, jax.nn.softplus, jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.out_scale * self.mlp(y)


def neural_ode(key):
    diffrax = pytest.importorskip("diffrax")

    def solve(func, ts, y0):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(func),
            diffrax.Bosh3(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=32,
        ).ys

    def loss_fn(func, ts, ys):
        predicted = jax.vmap(ft.partial(solve, func, ts))(ys[:, 0])
        return kfac.SquaredError(predicted, ys)

    ts = np.linspace(0, 1, 4)
    angle = np.random.default_rng(0).random((N, 1)) * 6 + 3 * ts
    ys = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return Notebook(made(Func, 2, key), loss_fn, (ts, ys), fallback=True)


class Driven(eqx.Module):
    initial: eqx.nn.MLP
    mlp: eqx.nn.MLP
    linear: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.initial = eqx.nn.MLP(2, 3, 4, 1, key=keys[0])
        self.mlp = eqx.nn.MLP(3, 6, 4, 1, jax.nn.softplus, jnp.tanh, key=keys[1])
        self.linear = eqx.nn.Linear(3, 1, key=keys[2])

    def field(self, t, y, args):
        return self.mlp(y).reshape(3, 2)


def neural_cde(key):
    diffrax = pytest.importorskip("diffrax")

    def solve(model, ts, coefficients):
        control = diffrax.CubicInterpolation(ts, coefficients)
        term = diffrax.ControlTerm(model.field, control).to_ode()
        y0 = model.initial(control.evaluate(ts[0]))
        solver = diffrax.Heun()
        ys = diffrax.diffeqsolve(term, solver, ts[0], ts[-1], 0.5, y0, max_steps=8).ys
        return model.linear(ys[-1])

    def loss_fn(model, ts, coefficients, labels):
        logits = jax.vmap(ft.partial(solve, model))(ts, coefficients)
        return kfac.SigmoidCrossEntropy(logits, labels[:, None])

    ts = np.broadcast_to(np.linspace(0, 1, 4), (N, 4))
    xs = np.stack([ts, normal(N, 4)], axis=-1)
    coefficients = jax.jit(jax.vmap(diffrax.backward_hermite_coefficients))(ts, xs)
    labels = (np.arange(N) % 2).astype(float)
    return Notebook(made(Driven, key), loss_fn, (ts, coefficients, labels))


class LatentODE(eqx.Module):
    func: Func
    cell: eqx.nn.GRUCell
    hidden_to_latent: eqx.nn.Linear
    latent_to_hidden: eqx.nn.MLP
    hidden_to_data: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 5)
        self.func = Func(3, keys[0])
        self.cell = eqx.nn.GRUCell(3, 3, key=keys[1])
        self.hidden_to_latent = eqx.nn.Linear(3, 4, key=keys[2])
        self.latent_to_hidden = eqx.nn.MLP(2, 3, 4, 1, key=keys[3])
        self.hidden_to_data = eqx.nn.Linear(3, 2, key=keys[4])

    def latent(self, ts, ys):
        hidden = jnp.zeros(3)
        for row in reversed(jnp.concatenate([ts[:, None], ys], axis=1)):
            hidden = self.cell(row, hidden)
        mean, logstd = jnp.split(self.hidden_to_latent(hidden), 2)
        return mean, jnp.exp(logstd)

    def sample(self, ts, latent):
        import diffrax

        y0, term = self.latent_to_hidden(latent), diffrax.ODETerm(self.func)
        saveat = diffrax.SaveAt(ts=ts)
        solver, step, adjoint = diffrax.Euler(), 0.4, diffrax.DirectAdjoint()
        options = dict(saveat=saveat, max_steps=8, adjoint=adjoint)
        ys = diffrax.diffeqsolve(term, solver, ts[0], ts[-1], step, y0, **options).ys
        return jax.vmap(self.hidden_to_data)(ys)


def latent_ode(key):
    pytest.importorskip("diffrax")

    def loss_fn(model, ts, ys, keys):
        def one(ts, ys, key):
            mean, std = model.latent(ts, ys)
            latent = mean + std * jr.normal(key, mean.shape)
            divergence = 0.5 * jnp.sum(mean**2 + std**2 - 2 * jnp.log(std) - 1)
            return model.sample(ts, latent), divergence

        predicted, divergences = jax.vmap(one)(ts, ys, keys)
        return kfac.SquaredError(predicted, ys) + jnp.mean(divergences)

    ts = np.broadcast_to(np.linspace(0, 1, 3), (N, 3))
    data = ts, normal(N, 3, 2), jr.split(key, N)
    return Notebook(made(LatentODE, key), loss_fn, data, fallback=True)


class SDE(eqx.Module):
    initial: eqx.nn.MLP
    drift: eqx.nn.MLP
    diffusion: eqx.nn.MLP
    readout: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.initial = eqx.nn.MLP(2, 3, 4, 1, key=keys[0])
        self.drift = eqx.nn.MLP(4, 3, 4, 1, jax.nn.silu, jnp.tanh, key=keys[1])
        self.diffusion = eqx.nn.MLP(4, 6, 4, 1, jax.nn.silu, jnp.tanh, key=keys[2])
        self.readout = eqx.nn.Linear(3, 1, key=keys[3])

    def solve(self, key):
        import diffrax

        keys = jr.split(key)

        def field(mlp, shape):
            return lambda t, y, args: mlp(jnp.concatenate([t[None], y])).reshape(shape)

        path = diffrax.VirtualBrownianTree(0.0, 1.0, 0.1, (2,), keys[0])
        noise = diffrax.ControlTerm(field(self.diffusion, (3, 2)), path)
        terms = diffrax.MultiTerm(diffrax.ODETerm(field(self.drift, (3,))), noise)
        y0 = self.initial(jr.normal(keys[1], (2,)))
        euler = diffrax.EulerHeun()
        ys = diffrax.diffeqsolve(terms, euler, 0.0, 1.0, 0.25, y0, max_steps=8).ys
        return self.readout(ys[-1])


def neural_sde(key):
    pytest.importorskip("diffrax")

    def loss_fn(model, keys):
        ends = jax.vmap(model.solve)(keys)
        return kfac.SquaredError(ends, jnp.ones_like(ends))

    return Notebook(made(SDE, key), loss_fn, (jr.split(key, N),))


class ConcatSquash(eqx.Module):
    lin1: eqx.nn.Linear
    lin2: eqx.nn.Linear
    lin3: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.lin1 = eqx.nn.Linear(2, 2, key=keys[0])
        self.lin2 = eqx.nn.Linear(1, 2, key=keys[1])
        self.lin3 = eqx.nn.Linear(1, 2, use_bias=False, key=keys[2])

    def __call__(self, t, y):
        return self.lin1(y) * jax.nn.sigmoid(self.lin2(t)) + self.lin3(t)


class Flow(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [ConcatSquash(k) for k in jr.split(key)]

    def __call__(self, t, y, args):
        t = jnp.asarray(t)[None]
        return self.layers[1](t, jnp.tanh(self.layers[0](t, y)))


def normalising_flow(key):
    """Exact traces by forward mode. (Of what is only seen through the derivative of a
    layer, no curvature is known: its gradient is that of a penalty.)"""

    def to_normal(model, y):
        determinant = jnp.zeros(())
        for t in np.linspace(0, 1, 3):
            field = lambda y: model(t, y, None)
            determinant = determinant + 0.5 * jnp.trace(jax.jacfwd(field)(y))
            y = y + 0.5 * field(y)
        return y, determinant

    def loss_fn(model, data):
        z, determinants = jax.vmap(ft.partial(to_normal, model))(data)
        return kfac.SquaredError(z, jnp.zeros_like(z)) - jnp.mean(determinants)

    return Notebook(made(Flow, key), loss_fn, (3 + np.asarray(normal(N, 2)),))


#
# Adjoints
#


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def through(adjoint):
    """Loss, gradient and curvature of a neural ODE."""
    import diffrax

    def solve(field, y0):
        term, solver = diffrax.ODETerm(field), diffrax.Euler()
        return diffrax.diffeqsolve(
            term, solver, 0.0, 1.0, 0.25, y0, max_steps=8, adjoint=adjoint
        ).ys[-1]

    def loss_fn(field, x):
        ends = jax.vmap(ft.partial(solve, field))(x)
        return kfac.SquaredError(ends, jnp.ones_like(ends))

    mlp = made(eqx.nn.MLP, 2, 2, 3, 1, jnp.tanh, key=jr.key(0))
    collect = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    model = kfac.convert(Field(mlp), kfac.Kronecker(kfac.Expand()))
    return eqx.filter_jit(collect)(model, normal(N, 2))


def test_adjoints():
    diffrax = pytest.importorskip("diffrax")
    want = through(diffrax.RecursiveCheckpointAdjoint())
    got = through(diffrax.DirectAdjoint())
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_adjoints_that_are_refused():
    """What integrates derivatives backward, and what has none in reverse mode."""
    diffrax = pytest.importorskip("diffrax")
    with pytest.raises(TypeError, match="differentiate curvature statistics"):
        through(diffrax.BacksolveAdjoint(solver=diffrax.Euler()))
    with pytest.raises(ValueError, match="Reverse-mode differentiation"):
        through(diffrax.ForwardMode())


def test_implicit_differentiation():
    """The curvature of a fixed point is that of the function that it is found by, where
    the gradients come from a linear system: `Full` is exact."""
    notebook = deep_equilibrium(jr.key(0))
    plain, (x, y) = notebook.model, notebook.args
    collect = eqx.filter_jit(kfac.curvature(classes, kfac.Exact()))
    found = collect(kfac.convert(plain, kfac.Full()), x, y)

    def per_example(x):
        def logits(weight, bias):
            where = lambda m: (m.layer.weight, m.layer.bias)
            return eqx.tree_at(where, plain, (weight, bias))(x)

        jacobians = jax.jacrev(logits, (0, 1))(plain.layer.weight, plain.layer.bias)
        matrix = jnp.concatenate([jacobians[0], jacobians[1][..., None]], axis=-1)
        jacobian, p = matrix.reshape(2, -1), jax.nn.softmax(plain(x))
        return jacobian.T @ (jnp.diag(p) - jnp.outer(p, p)) @ jacobian

    want = np.mean(jax.jit(jax.vmap(per_example))(x), axis=0)
    assert error(found.layer.matrix, want) <= 1e-6  # The tolerance of the solvers.
    assert error(found.layer.matrix, 2 * want) > 0.1


#
# Other programs
#


class FixedPoint(eqx.Module):
    layer: eqx.nn.Linear
    inject: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        layer = eqx.nn.Linear(4, 4, key=keys[0])
        self.layer = eqx.tree_at(lambda m: m.weight, layer, 0.5 * layer.weight)
        self.inject = eqx.nn.Linear(2, 4, use_bias=False, key=keys[1])
        self.head = eqx.nn.Linear(4, 2, key=keys[2])

    def __call__(self, x):
        optimistix = pytest.importorskip("optimistix")
        injected = self.inject(x)

        def step(z, args):
            layer, injected = args
            return jnp.tanh(layer(z) + injected)

        solver = optimistix.FixedPointIteration(rtol=1e-10, atol=1e-10)
        args = self.layer, injected
        solution = optimistix.fixed_point(step, solver, jnp.zeros(4), args)
        return self.head(solution.value)


def deep_equilibrium(key):
    x = np.asarray(normal(N, 2))
    return Notebook(made(FixedPoint, key), classes, (x, (x[:, 0] > 0).astype(int)))


class Hyper(eqx.Module):
    network: eqx.nn.MLP

    def __init__(self, key):
        self.network = eqx.nn.MLP(2, 9, 4, 1, key=key)

    def __call__(self, x):
        weights = self.network(x[:2])
        w, b = weights[:6].reshape(3, 2), weights[6:]
        return w @ x[2:] + b


def hypernetwork(key):
    return Notebook(made(Hyper, key), classes, (normal(N, 4), np.arange(N) % 3))


class Stateful(eqx.Module):
    norm1: eqx.nn.BatchNorm
    norm2: eqx.nn.BatchNorm
    linear: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.norm1 = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        self.norm2 = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        layer = eqx.nn.Linear(3, 4, key=keys[0])
        self.linear = eqx.nn.SpectralNorm(layer, "weight", key=keys[1])
        self.last = eqx.nn.Linear(4, 3, key=keys[2])

    def __call__(self, x, state):
        x, state = self.norm1(x, state)
        x, state = self.linear(x, state)
        x, state = self.norm2(jax.nn.relu(x), state)
        return self.last(x), state


def stateful(key):
    model, state = made(eqx.nn.make_with_state(Stateful), key)

    def loss_fn(model, x, y, state):
        logits, state = over_batch(model, x, state)
        return kfac.SoftmaxCrossEntropy(logits, y), state

    data = normal(N, 3), np.arange(N) % 3
    return Notebook(model, loss_fn, data, dict(state=state), stateful=True)


def drawn_anew(key):
    """Weights of another distribution, and biases that are zero."""
    model = eqx.nn.MLP(3, 3, 5, 2, key=key)
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    linears = lambda m: [n for n in jtu.tree_leaves(m, is_leaf=is_linear) if is_linear(n)]
    weights = [
        0.5 * jr.truncated_normal(key, -2, 2, n.weight.shape) for n in linears(model)
    ]
    model = eqx.tree_at(lambda m: [n.weight for n in linears(m)], model, weights)
    biases = [jnp.zeros_like(n.bias) for n in linears(model)]
    return eqx.tree_at(lambda m: [n.bias for n in linears(m)], model, biases)


def initialised(key):
    return Notebook(made(drawn_anew, key), classes, (normal(N, 3), np.arange(N) % 3))


def regression(key):
    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y)

    x = np.random.default_rng(0).random((N, 1)) * 6
    model = made(eqx.nn.MLP, 1, 1, 6, 2, key=key)
    return Notebook(model, loss_fn, (x, np.sin(x)))


notebooks = [
    getting_started,
    vision_transformer,
    u_net,
    gan_discriminator,
    gan_generator,
    score_based_diffusion,
    spirals,
    bert,
    neural_ode,
    neural_cde,
    latent_ode,
    neural_sde,
    normalising_flow,
    deep_equilibrium,
    hypernetwork,
    stateful,
    initialised,
    regression,
]


@pytest.mark.parametrize("make", notebooks, ids=lambda f: f.__name__)
def test_notebook(make):
    notebook = make(jr.key(0))
    plain = notebook.model
    model = kfac.convert(plain)
    assert equal(kfac.revert(model), plain)
    fallback = optax.adam(1e-2) if notebook.fallback else None
    optimizer = plain_kfac(0.05, 0.0, 0.1, fallback=fallback, inverse_period=1)
    state = optimizer.init(model)
    step = eqx.filter_jit(ft.partial(optimizer.step, notebook.loss_fn))
    args, kwargs, losses = notebook.args, notebook.kwargs, []
    for i in range(4):
        key = jr.fold_in(jr.key(1), i)
        model, state, info = step(model, state, *args, **kwargs, key=key)
        assert not info.rejected
        losses.append(float(info.loss))
        if notebook.stateful:
            kwargs = dict(state=info.select(info.aux, kwargs["state"]))
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0], losses


def test_what_a_state_begins_with_is_no_parameter():
    """Nothing of the optimizer touches it; but an array beside it is a parameter."""
    notebook = gan_discriminator(jr.key(0), slope=0.2)  # Of a weak type.
    model, args, kwargs = kfac.convert(notebook.model), notebook.args, notebook.kwargs

    def loss_fn(*args, **kwargs):
        loss, state = notebook.loss_fn(*args, **kwargs)
        return loss + kfac.L2(args[0], 0.1), state

    options = dict(weight_decay=0.1, averaging=0.5, fallback=optax.adam(0.1))
    optimizer = plain_kfac(0.05, fisher=kfac.Exact(), **options)
    memory = optimizer.init(model)
    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    new, memory, info = step(model, memory, *args, **kwargs)
    assert not info.rejected
    old_norm, norm, mean = (m.layers[1] for m in (model, new, kfac.averaged(new, memory)))
    for name in ("batch_counter", "batch_state_index"):
        assert jtu.tree_leaves(getattr(old_norm, name))
        for other in (norm, mean):
            assert equal(getattr(other, name), getattr(old_norm, name))
    assert not np.array_equal(norm.weight, old_norm.weight)
    indices = kfac.L2([old_norm.batch_state_index, old_norm.batch_counter], 1.0)
    assert indices.value == 0 and not jtu.tree_leaves(indices.parameters)
    plain_kfac(0.1).init(model)
    with pytest.raises(ValueError, match="No tagged layer covers.*other"):
        plain_kfac(0.1).init({"model": model, "other": jnp.ones(2)})


def test_files(tmp_path):
    """Training goes on from files as if nothing had happened, also on other devices'
    types of models: the files of a converted model are those of the plain one."""
    notebook = regression(jr.key(0))
    optimizer = plain_kfac(0.05, fisher=kfac.Exact())
    step = eqx.filter_jit(ft.partial(optimizer.step, notebook.loss_fn))
    model = kfac.convert(notebook.model)
    model, state, _ = step(model, optimizer.init(model), *notebook.args)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    want, _, _ = step(model, state, *notebook.args)
    plain = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", notebook.model)
    again = kfac.convert(plain)
    like = eqx.filter_eval_shape(optimizer.init, again)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", like)
    got, _, _ = step(again, loaded, *notebook.args)
    assert equal(got, want)
    anew, _, _ = step(again, optimizer.init(again), *notebook.args)
    assert not equal(anew, want)


def test_frozen_layers():
    """Only the last layer is trained, as in the notebook on freezing."""
    notebook = initialised(jr.key(0))
    model = kfac.convert(notebook.model)
    spec = jtu.tree_map(lambda _: False, model)
    spec = eqx.tree_at(
        lambda m: (m.layers[-1].weight, m.layers[-1].bias), spec, (True,) * 2
    )
    trained, frozen = eqx.partition(model, spec)

    def loss_fn(trained, x, y):
        return notebook.loss_fn(eqx.combine(trained, frozen), x, y)

    optimizer = plain_kfac(0.05, fisher=kfac.Exact())
    state = optimizer.init(trained)
    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    losses = []
    for _ in range(3):
        trained, state, info = step(trained, state, *notebook.args)
        losses.append(float(info.loss))
    assert losses[2] < losses[1] < losses[0]
    new = eqx.combine(trained, frozen)
    assert equal(new.layers[:-1], model.layers[:-1])
    assert not equal(new.layers[-1], model.layers[-1])
