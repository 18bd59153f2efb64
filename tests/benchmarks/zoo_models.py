"""Models of other people's packages for `zoo.py`: made as their documentation makes them,
small, each with an example of one call.

An entry is a function that imports its package; so a package that is missing is missed by
its own models alone."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from zoo_problems import (
    balancing,
    burgers,
    characters,
    classes,
    density,
    digits,
    fields,
    KEY,
    KEYS,
    moons,
    points,
    Problem,
    proteins,
    rows_of_pixels,
)

import eqx_kfac as kfac


class Entry(NamedTuple):
    package: str
    field: str
    build: Callable[[], Problem]

    @property
    def name(self) -> str:
        return self.build.__name__


ALL: list[Entry] = []


def entry(package: str, field: str) -> Callable:
    def add(build):
        ALL.append(Entry(package, field, build))
        return build

    return add


# Partial differential equations.


@entry("pdequinox", "PDE")
def pdequinox_fno() -> Problem:
    import pdequinox

    model = pdequinox.arch.ClassicFNO(
        1, 1, 1, hidden_channels=12, num_modes=6, num_blocks=3, key=KEY
    )
    x, y = burgers()
    return Problem(model, x[0], (x, y), fields)


@entry("pdequinox", "PDE")
def pdequinox_unet() -> Problem:
    import pdequinox

    model = pdequinox.arch.ClassicUNet(1, 1, 1, hidden_channels=8, num_levels=2, key=KEY)
    x, y = burgers()
    return Problem(model, x[0], (x, y), fields)


@entry("pdequinox", "PDE")
def pdequinox_dilated() -> Problem:
    import pdequinox

    model = pdequinox.arch.DilatedResNet(
        1, 1, 1, hidden_channels=8, num_blocks=1, dilation_rates=(1, 2, 1), key=KEY
    )
    x, y = burgers()
    return Problem(model, x[0], (x, y), fields)


@entry("foundax", "PDE")
def foundax_fno() -> Problem:
    import foundax

    model = foundax.fno1d(
        in_features=1, hidden_channels=12, n_modes=6, n_layers=3, key=KEY
    )
    x, y = (np.moveaxis(a, 1, 2) for a in burgers())  # Channels last.
    return Problem(model, x[0], (x, y), fields)


@entry("foundax", "PDE")
def foundax_deeponet() -> Problem:
    import foundax

    model = foundax.deeponet(
        n_sensors=32, basis_functions=16, hidden_dim=32, n_layers=2, key=KEY
    )
    x, y = (a[:, 0] for a in burgers())
    where = jnp.linspace(0, 1, 32)[:, None]

    def loss_fn(model, memory, x, y):
        predictions = jax.vmap(lambda u: model(u, where))(x)
        return kfac.SquaredError(predictions.reshape(y.shape), y), memory

    return Problem(model, (x[0], where), (x, y), loss_fn)


@entry("foundax", "PDE")
def foundax_pointnet() -> Problem:
    import foundax

    model = foundax.pointnet(2, 1, hidden_dims=[32, 16, 8, 4, 2, 2, 4, 8, 8], key=KEY)
    (x,) = points(1024, 2 * 16)
    x = x.reshape(-1, 16, 2)
    y = np.linalg.norm(x - x.mean(axis=1, keepdims=True), axis=2, keepdims=True)
    return Problem(model, x[0], (x, y), fields)


# Constrained networks.


@entry("klax", "constrained")
def klax_mlp() -> Problem:
    import klax

    model = klax.nn.MLP(4, 2, [32, 32], key=KEY)
    (x,) = points(1024, 4)
    y = np.stack([np.sin(x[:, 0] * x[:, 1]), np.cos(x[:, 2]) + x[:, 3]], axis=1)
    return Problem(model, x[0], (x, y), fields)


class Unwrapped(eqx.Module):
    """A model of klax, called as its constraints want it."""

    model: eqx.Module

    def __call__(self, *args):
        return klax_unwrap(self.model)(*args)


def klax_unwrap(model):
    import klax

    return klax.unwrap(model)


@entry("klax", "constrained")
def klax_convex() -> Problem:
    import klax

    model = Unwrapped(klax.nn.FICNN(4, 1, [32, 32], key=KEY))
    (x,) = points(1024, 4)
    y = np.log(np.sum(np.exp(x), axis=1, keepdims=True)) + np.abs(x[:, :1])
    # Weights that are projected after every step need a metric without products of
    # different ones: else, what is left of the step may lead uphill.
    rest = dict(after=klax.apply, written=(Unwrapped,), blocks=kfac.Diagonal())
    return Problem(model, x[0], (x, y), fields, **rest)


@entry("klax", "constrained")
def klax_partially_convex() -> Problem:
    import klax

    model = Unwrapped(klax.nn.PICNN(3, 2, 1, [(24, 8), (24, 8)], key=KEY))
    x, p = points(1024, 3, 2)
    y = np.exp(p[:, :1] / 2) * np.sum(x**2, axis=1, keepdims=True) / 3

    def loss_fn(model, memory, x, p, y):
        return kfac.SquaredError(jax.vmap(model)(x, p), y), memory

    rest = dict(after=klax.apply, written=(Unwrapped,))
    return Problem(model, (x[0], p[0]), (x, p, y), loss_fn, **rest)


@entry("klax", "constrained")
def klax_skew_symmetric() -> Problem:
    import klax

    model = klax.nn.SkewSymmetricMatrix(3, 4, [32, 32], key=KEY)
    (x,) = points(1024, 3)
    y = np.sin(x[:, :1, None] * np.arange(16).reshape(4, 4)) * x[:, 1:2, None]
    return Problem(model, x[0], (x, y - np.swapaxes(y, 1, 2)), fields)


# Sequences: recurrent, state spaces.


def recurrent(cell: eqx.Module) -> Problem:
    from rnn_jax.layers import RNN

    model = RNN(cell=cell, odim=10, key=KEYS[1])
    x, y = rows_of_pixels()

    def loss_fn(model, memory, x, y):
        logits, _ = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, x[0], (x, y), loss_fn)


@entry("rnn-jax", "RNN")
def rnn_jax_elman() -> Problem:
    from rnn_jax.cells import ElmanRNNCell

    return recurrent(ElmanRNNCell(idim=8, hdim=32, key=KEY))


@entry("rnn-jax", "RNN")
def rnn_jax_independent() -> Problem:
    from rnn_jax.cells import IndRNNCell

    return recurrent(IndRNNCell(idim=8, hdim=32, key=KEY))


@entry("rnn-jax", "RNN")
def rnn_jax_lstm() -> Problem:
    from rnn_jax.cells import LongShortTermMemoryCell

    return recurrent(LongShortTermMemoryCell(idim=8, hdim=32, key=KEY))


@entry("rnn-jax", "RNN")
def rnn_jax_antisymmetric() -> Problem:
    from rnn_jax.cells import AntiSymmetricRNNCell

    return recurrent(AntiSymmetricRNNCell(8, 32, 0.1, 0.01, key=KEY))


@entry("rnn-jax", "RNN")
def rnn_jax_coupled_oscillators() -> Problem:
    from rnn_jax.cells import CoupledOscillatoryRNNCell

    return recurrent(CoupledOscillatoryRNNCell(8, 32, 1.0, 1.0, 0.3, key=KEY))


def state_spaces(layer: Callable) -> Problem:
    from rnn_jax.ssm import DeepStateSpaceModelEncoder, GLUMixer

    model = DeepStateSpaceModelEncoder(
        8,
        [layer(16, 16, 16, key=key) for key in KEYS[:2]],
        [GLUMixer(16, 16, key=key) for key in KEYS[2:4]],
        out_dim=10,
        pool_method="mean",
        key=KEYS[4],
    )
    x, y = rows_of_pixels()
    return Problem(model, x[0], (x, y), classes)


@entry("rnn-jax", "state space")
def rnn_jax_linear_recurrent_unit() -> Problem:
    from rnn_jax.ssm import LinearRecurrentUnit

    return state_spaces(LinearRecurrentUnit)


@entry("rnn-jax", "state space")
def rnn_jax_s5() -> Problem:
    from rnn_jax.ssm import SimplifiedStateSpaceLayer

    return state_spaces(SimplifiedStateSpaceLayer)


class Reader(eqx.Module):
    """Any layers of a package between an embedding and a head."""

    embedding: eqx.nn.Embedding
    body: eqx.Module
    head: eqx.nn.Linear
    arguments: dict

    def __init__(self, body: eqx.Module, width: int, **arguments):
        self.embedding = eqx.nn.Embedding(64, width, key=KEYS[6])
        self.head = eqx.nn.Linear(width, 64, key=KEYS[7])
        self.body, self.arguments = body, arguments

    def __call__(self, x):
        x = self.body(jax.vmap(self.embedding)(x), **self.arguments)
        return jax.vmap(self.head)(x)


@entry("jaxonlayers", "state space")
def jaxonlayers_selective() -> Problem:
    from jaxonlayers.layers import SelectiveStateSpace

    x, y = characters()
    model = Reader(SelectiveStateSpace(32, 32, 4, 4, key=KEY), 32)
    return Problem(model, x[0], (x, y), classes, batch=32)


@entry("noxton", "state space")
def noxton_mlstm() -> Problem:
    from noxton.nn import mLSTMLayer, xLSTMBlock

    layer = mLSTMLayer(32, 64, 4, True, 4, 24, 2, 0.0, key=KEY)
    x, y = characters()
    model = Reader(xLSTMBlock(32, layer), 32, key=KEY)
    return Problem(model, x[0], (x, y), classes, batch=32)


@entry("noxton", "RNN")
def noxton_slstm() -> Problem:
    from noxton.nn import sLSTMLayer, xLSTMBlock

    layer = sLSTMLayer(32, 2, 4, 0.0, key=KEY)
    x, y = characters()
    model = Reader(xLSTMBlock(32, layer), 32)
    return Problem(model, x[0], (x, y), classes, batch=32)


# Language and proteins.


@entry("jaxonlayers", "language")
def jaxonlayers_transformer() -> Problem:
    from jaxonlayers.layers import TransformerEncoder

    body = TransformerEncoder(32, 2, 2, dim_feedforward=64, dropout_p=0.0, key=KEY)
    x, y = characters()
    model = Reader(body, 32, is_causal=True)
    return Problem(model, x[0], (x, y), classes, batch=32)


@entry("eqx-zoo", "language")
def eqx_zoo_qwen3() -> Problem:
    from eqx_zoo import CausalLM
    from eqx_zoo.models.causal_lm.config import Config

    config = Config(
        architecture="Qwen3ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        rope_scaling=None,
    )
    model = CausalLM(config, key=KEY)
    x, y = characters()

    def loss_fn(model, memory, x, y):
        logits, _ = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, x[0], (x, y), loss_fn, batch=32)


@entry("eqx-zoo", "language")
def eqx_zoo_bert() -> Problem:
    from eqx_zoo import Encoder
    from eqx_zoo.models.encoder.config import EncoderConfig

    config = EncoderConfig(
        architecture="BertModel",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        type_vocab_size=2,
        layer_norm_eps=1e-12,
    )
    encoder = Encoder(config, key=KEY)
    model = First(encoder, eqx.nn.Linear(32, 2, key=KEYS[1]))
    x, y = characters()
    y = (np.median(x, axis=1) > np.median(x)).astype(np.int32)
    return Problem(model, x[0], (x, y), classes)


class First(eqx.Module):
    """A classifier of texts, from the first token."""

    encoder: eqx.Module
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.encoder(x)[0])


@entry("megalodon-jax", "language")
def megalodon_jax_language_model() -> Problem:
    from megalodon_jax import MegalodonConfig, MegalodonForCausalLM

    config = MegalodonConfig(
        vocab_size=64,
        model_dim=32,
        num_layers=2,
        num_heads=2,
        z_dim=16,
        value_dim=32,
        ffn_hidden_dim=64,
        cema_ndim=4,
        chunk_size=24,
        norm_num_groups=4,
    )
    model = MegalodonForCausalLM(config, key=KEY)
    x, y = characters()

    def loss_fn(model, memory, x, y):
        logits = jax.vmap(lambda x: model(x[None])[0][0])(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, x[:1], (x, y), loss_fn, batch=32)


@entry("esm2quinox", "proteins")
def esm2quinox_esm2() -> Problem:
    import esm2quinox

    model = esm2quinox.ESM2(
        num_layers=2, embed_size=32, num_heads=4, token_dropout=True, key=KEY
    )
    letters = esm2quinox.tokenise(["LAGVSERTIDPKQNFYMHWC"], key=None)[0][1:-1]
    (mask,) = esm2quinox.tokenise(["#"], key=None)[0][1:-1]
    data = proteins(np.asarray(letters), int(mask))

    def loss_fn(model, memory, x, y, which):
        logits = jax.vmap(model)(x).logits
        return kfac.SoftmaxCrossEntropy(logits, y, weights=which), memory

    return Problem(model, data[0][0], data, loss_fn, batch=32)


@entry("e1jax", "proteins")
def e1jax_e1() -> Problem:
    import e1jax

    model = e1jax.E1(dim=32, num_heads=4, ff_dim=64, num_layers=3, key=KEY)
    data = proteins(np.arange(8, 28), 5)
    places = jnp.arange(24)
    rest = (places, places, jnp.zeros(24, int), jnp.ones(24, bool))

    def loss_fn(model, memory, x, y, which):
        of_all = [jnp.broadcast_to(a, x.shape) for a in rest]  # One sequence each.
        logits, _ = jax.vmap(model)(x, *of_all)
        return kfac.SoftmaxCrossEntropy(logits, y, weights=which), memory

    return Problem(model, (data[0][0], *rest), data, loss_fn, batch=32)


# Vision.


@entry("equimo", "vision")
def equimo_vit() -> Problem:
    import equimo.vision.models as em

    model = em.VisionTransformer(
        img_size=8,
        in_channels=1,
        dim=32,
        patch_size=2,
        num_heads=[2],
        depths=[2],
        num_classes=10,
        key=KEY,
    )
    x, y = digits((1, 8, 8))

    def loss_fn(model, memory, x, y):
        logits = jax.vmap(lambda x: model(x, key=KEY))(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, (x[0], KEY), (x, y), loss_fn)


@entry("equimo", "vision")
def equimo_convnext() -> Problem:
    import equimo.vision.models as em

    model = em.ConvNeXt(
        in_channels=1,
        dims=[16, 32],
        depths=[1, 1],
        num_classes=10,
        key=KEY,
    )
    x, y = digits((1, 16, 16), 2)

    def loss_fn(model, memory, x, y):
        logits = jax.vmap(lambda x: model(x, key=KEY))(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, (x[0], KEY), (x, y), loss_fn)


@entry("jaxonmodels", "vision")
def jaxonmodels_vit() -> Problem:
    from jaxonmodels.models.vit import VisionTransformer

    model = VisionTransformer(
        input_resolution=8,
        patch_size=2,
        width=32,
        layers=2,
        heads=2,
        output_dim=10,
        key=KEY,
    )
    x, y = digits((3, 8, 8))

    def loss_fn(model, memory, x, y):
        logits, _ = jax.vmap(model)(x)
        return kfac.SoftmaxCrossEntropy(logits, y), memory

    return Problem(model, x[0], (x, y), loss_fn)


def with_state(model: eqx.Module, state: eqx.nn.State, x, y, *rest) -> Problem:
    """A model with batch normalisation."""

    def loss_fn(model, state, x, y):
        forward = jax.vmap(
            lambda x, state: model(x, state, *rest),
            in_axes=(0, None),
            out_axes=(0, None),
            axis_name="batch",
        )
        logits, state = forward(x, state)
        return kfac.SoftmaxCrossEntropy(logits, y), state

    example = (x[0], state, *rest)
    return Problem(model, example, (x, y), loss_fn, memory=state)


class Convolutional(eqx.Module):
    """Convolutions with batch normalisation, and a mean over what is left."""

    blocks: list
    head: eqx.nn.Linear

    def __init__(self):
        from jaxonlayers.layers import BatchNorm, ConvNormActivation

        self.blocks = [
            ConvNormActivation(
                2,
                d_in,
                d_out,
                stride=2,
                norm_layer=eqx.Partial(BatchNorm, d_out, "batch"),
                key=key,
                dtype=jnp.float32,
            )
            for d_in, d_out, key in zip((1, 16, 32), (16, 32, 32), KEYS)
        ]
        self.head = eqx.nn.Linear(32, 10, key=KEYS[4])

    def __call__(self, x, state):
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(jnp.mean(x, axis=(1, 2))), state


@entry("jaxonlayers", "vision")
def jaxonlayers_convolutions() -> Problem:
    model, state = eqx.nn.make_with_state(Convolutional)()
    return with_state(model, state, *digits((1, 8, 8)))


@entry("jaxonmodels", "vision")
def jaxonmodels_swin() -> Problem:
    from jaxonmodels.models import swin_transformer as swin

    model, state = eqx.nn.make_with_state(swin.SwinTransformer)(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[4, 4],
        mlp_ratio=2.0,
        dropout=0.0,
        attention_dropout=0.0,
        stochastic_depth_prob=0.0,
        num_classes=10,
        norm_layer=None,
        block=None,
        downsample_layer=swin.PatchMerging,
        attn_layer=swin.ShiftedWindowAttention,
        inference=True,  # Its dropout would want a key, though it has a rate of zero.
        key=KEY,
        dtype=jnp.float32,
    )
    return with_state(model, state, *digits((3, 16, 16), 2), KEY)._replace(batch=32)


# Densities.


def flow(distribution: eqx.Module) -> Problem:
    (x,) = moons()
    rest = dict(method="log_prob")
    return Problem(distribution, x[0], (x,), density, **rest)


@entry("flowjax", "flow")
def flowjax_masked_autoregressive() -> Problem:
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    base = Normal(jnp.zeros(2))
    return flow(masked_autoregressive_flow(KEY, base_dist=base, flow_layers=4))


@entry("flowjax", "flow")
def flowjax_coupling_splines() -> Problem:
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    made = coupling_flow(
        KEY,
        base_dist=Normal(jnp.zeros(2)),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        flow_layers=3,
    )
    return flow(made)


@entry("flowjax", "flow")
def flowjax_block_autoregressive() -> Problem:
    from flowjax.distributions import Normal
    from flowjax.flows import block_neural_autoregressive_flow

    base = Normal(jnp.zeros(2))
    return flow(block_neural_autoregressive_flow(KEY, base_dist=base))


@entry("fleqx", "flow")
def fleqx_coupling() -> Problem:
    import fleqx

    return flow(fleqx.coupling_flow(KEY, dim=2, flow_layers=4))


@entry("transformer-flows", "flow")
def transformer_flows_images() -> Problem:
    from transformer_flows.transformer_flow import TransformerFlow

    model = TransformerFlow(
        n_channels=1,
        img_size=8,
        patch_size=4,
        channels=32,
        n_blocks=2,
        layers_per_block=2,
        head_dim=16,
        key=KEY,
    )
    x, _ = digits((1, 8, 8))
    x = x + 0.1 * np.random.default_rng(0).normal(size=x.shape).astype(np.float32)

    def loss_fn(model, memory, x):
        log_probs = jax.vmap(lambda x: model.log_prob(x, None))(x)
        return kfac.NegativeLogLikelihood(log_probs), memory

    rest = dict(method="log_prob", batch=32)
    return Problem(model, (x[0], None), (x,), loss_fn, **rest)


# Policies.


@entry("lerax", "policy")
def lerax_actor_critic() -> Problem:
    from lerax.env.classic_control import CartPole
    from lerax.policy import MLPActorCriticPolicy

    model = MLPActorCriticPolicy(env=CartPole(), key=KEY)
    x, action, value = balancing()

    def loss_fn(model, memory, x, action, value):
        evaluate = lambda x, action: model.evaluate_action(None, x, action)
        _, predicted, log_prob, _ = jax.vmap(evaluate)(x, action)
        return (
            kfac.NegativeLogLikelihood(log_prob)
            + kfac.SquaredError(predicted[:, None], value)
        ), memory

    example = None, x[0], action[0]
    rest = dict(method="evaluate_action")
    return Problem(model, example, (x, action, value), loss_fn, **rest)


@entry("lerax", "policy")
def lerax_q_network() -> Problem:
    from lerax.env.classic_control import CartPole
    from lerax.policy import MLPQPolicy

    model = MLPQPolicy(env=CartPole(), key=KEY)
    x, action, value = balancing()
    y = value * np.array([1.0, -1.0], np.float32)

    def loss_fn(model, memory, x, y):
        values = jax.vmap(lambda x: model.q_values(None, x)[1])(x)
        return kfac.SquaredError(values, y), memory

    return Problem(model, (None, x[0]), (x, y), loss_fn, method="q_values")


# Implicit networks and graphs.


class Equilibrium(eqx.Module):
    """The fixed point of a layer, as the documentation of banax writes it."""

    w: jax.Array
    u: jax.Array
    b: jax.Array
    head: eqx.nn.Linear
    adjoint: eqx.Module

    def __call__(self, x):
        def f(z, w, ux):
            return jnp.tanh(w @ z + ux)

        pulled = self.u @ x + self.b
        found = self.adjoint((f, (self.w, pulled)), jnp.zeros(self.b.shape))
        return self.head(found.value)


def equilibrium(adjoint: eqx.Module) -> Problem:
    w = 0.3 * jax.random.orthogonal(KEYS[0], 32)
    u = jax.random.normal(KEYS[1], (32, 64)) / 8
    head = eqx.nn.Linear(32, 10, key=KEYS[2])
    x, y = digits()
    model = Equilibrium(w, u, jnp.zeros(32), head, adjoint)
    return Problem(model, x[0], (x, y), classes)


@entry("banax", "implicit")
def banax_implicit() -> Problem:
    from banax.adjoint import Implicit
    from banax.solver import Picard

    solver = Picard(atol=1e-5, max_steps=30, loop_kind="lax")
    return equilibrium(Implicit(solver=solver, b_solver=solver))


@entry("banax", "implicit")
def banax_through_the_loop() -> Problem:
    from banax.adjoint import BPTT
    from banax.solver import Picard

    solver = Picard(atol=1e-5, max_steps=8, loop_kind="bounded")
    return equilibrium(BPTT(solver=solver))


@entry("expaloma", "graph")
def expaloma_charges() -> Problem:
    from expaloma.nn.layers import EspalomaGNN, SAGEConvMean
    from expaloma.nn.model import EspalomaModel

    keys = iter(jax.random.split(KEY, 8))
    make = lambda d_out, d_in: jax.random.normal(next(keys), (d_out, d_in)) / d_in**0.5
    sages = [SAGEConvMean(make(32, 32), jnp.zeros(32), make(32, 32)) for _ in range(2)]
    gnn = EspalomaGNN(make(32, 6), jnp.zeros(32), tuple(sages))
    model = EspalomaModel(gnn, make(2, 32) / 10, jnp.array([0.0, 1.0]))  # Hard enough.
    atoms, rng = 10, np.random.default_rng(0)
    x = rng.normal(size=(512, atoms, 6)).astype(np.float32)
    ring = np.arange(atoms)
    senders = jnp.array([*ring, *((ring + 1) % atoms)])
    receivers = jnp.array([*((ring + 1) % atoms), *ring])
    y = np.tanh(x[..., 0] - np.roll(x[..., 1], 1, axis=1)).astype(np.float32)
    rest = (senders, receivers, jnp.zeros(atoms, int), 1, jnp.zeros(1))

    def loss_fn(model, memory, x, y):
        charges = jax.vmap(lambda x: model(x, *rest))(x)
        return kfac.SquaredError(charges.reshape(y.shape), y), memory

    data = x, y - y.mean(axis=1, keepdims=True)
    return Problem(model, (x[0], *rest), data, loss_fn, batch=32)


@entry("nequix", "graph")
def nequix_potential() -> Problem:
    from gradients import forces
    from nequix.model import Nequix

    sizes = dict(n_layers=2, radial_mlp_size=32, radial_mlp_layers=2, lmax=1)
    model = Nequix(KEY, 2, hidden_irreps="16x0e + 16x1o", avg_n_neighbors=5.0, **sizes)
    _, _, data = forces(KEY)
    atoms = 6
    ring = np.arange(atoms)
    pairs = np.array([(i, j) for i in ring for j in ring if i != j])

    def energies_and_forces(model, x, species):
        """Of all clusters of a batch, which are one graph."""
        first = atoms * np.arange(len(x))
        i, j = (pairs + first[:, None, None]).reshape(-1, 2).T

        def total(x):
            x = x.reshape(-1, 3)
            of_atoms = model.node_energies(x[i] - x[j], species.reshape(-1), i, j)
            of_clusters = jnp.sum(of_atoms.reshape(-1, atoms), axis=1)
            return jnp.sum(of_clusters), of_clusters

        slopes, energies = jax.grad(total, has_aux=True)(x)
        return energies, -slopes

    def loss_fn(model, memory, x, species, energies, forces):
        found, pulls = energies_and_forces(model, x, species)
        of_energies = kfac.SquaredError(found[:, None], energies[:, None])
        of_forces = kfac.SquaredError(pulls.reshape(forces.shape), forces)
        return of_energies + of_forces, memory

    x, *targets = (np.asarray(a, np.float32) for a in data)
    species = np.tile(ring % 2, (len(x), 1))
    example, method = (x[:32], species[:32]), energies_and_forces
    data = x, species, *targets
    return Problem(model, example, data, loss_fn, batch=32, method=method)


@entry("connex", "graph")
def connex_dag() -> Problem:
    import connex

    graph = {i: list(range(max(3, i + 1), min(i + 7, 24))) for i in range(22)}
    spec = connex.GraphSpec(graph, inputs=[0, 1, 2], outputs=[22, 23])
    ops = connex.ops.default_ops(activation=jax.nn.tanh)
    model = connex.NeuralDAG(spec, ops=ops, key=KEY)
    (x,) = points(1024, 3)
    y = np.stack([np.sin(x[:, 0]) * x[:, 1], np.abs(x[:, 2])], axis=1)
    return Problem(model, x[0], (x, y), fields)


@entry("connex", "graph")
def connex_mlp() -> Problem:
    import connex

    model = connex.nn.MLP(3, 2, width=16, depth=2, key=KEY)
    (x,) = points(1024, 3)
    y = np.stack([np.sin(x[:, 0]) * x[:, 1], np.abs(x[:, 2])], axis=1)
    return Problem(model, x[0], (x, y), fields)
