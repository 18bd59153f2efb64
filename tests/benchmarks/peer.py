"""kfac-jax on the deep autoencoder, as a competitor in the race of `autoencoder.py`.

Needs a kfac-jax that runs on this JAX. The settings are those of its own example for this
problem: learning rate, momentum and damping all adaptive, statistics with one random sign
vector per example, averaged with 0.95, inverses every 5 steps, the damping multiplied or
divided by 0.95 ** 5 every 5 steps and kept between 1e-5 and 1000, 5 estimates of burn-in.
Two things differ, in its favour. Its example uses the full batch; here the batch is a
parameter. And its example starts from a damping of 150; from 1, where its introduction
starts, a cross-entropy of 85 takes 40 steps of batch 1000 rather than 100.
"""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import kfac_jax
from jaxtyping import Array, Float


L2 = 1e-5
INTERVAL = 5


class Peer(eqx.Module):
    """The autoencoder with its weights as kfac-jax wants them, `[in, out]`, so that
    nothing is converted between steps. Called as the original is: on one image."""

    layers: list[tuple[Array, Array]]
    tanh: tuple[bool, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "784"]) -> Float[Array, "784"]:
        return forward(self.layers, self.tanh, x)


def peer_of(model: Any) -> Peer:
    """The same network with the same weights. Arrays are copied, for kfac-jax donates
    them."""
    if isinstance(model, Peer):
        return model
    layers, tanh = [], []
    for layer in model.layers:
        if isinstance(layer, eqx.nn.Linear):
            layers.append((layer.weight.T.copy(), layer.bias.copy()))
            tanh.append(False)
        else:
            tanh[-1] = True
    return Peer(layers, tuple(tanh))


def forward(layers: Any, tanh: tuple[bool, ...], x: Array, tag: Any = None) -> Array:
    for (w, b), squash in zip(layers, tanh):
        z = x @ w + b
        z = z if tag is None else tag(z, x, w, b)
        x = jnp.tanh(z) if squash else z
    return x


def objective(tanh: tuple[bool, ...]) -> Any:
    """The example's `loss_fn`, for parameters as kfac-jax wants them."""

    def fn(layers, x):
        logits = forward(layers, tanh, x, kfac_jax.register_dense)
        kfac_jax.register_sigmoid_cross_entropy_loss(logits, x)
        losses = jnp.sum(jax.nn.softplus(logits) - x * logits, axis=-1)
        squares = sum(jnp.sum(p**2) for p in jax.tree.leaves(layers))
        return jnp.mean(losses) + 0.5 * L2 * squares

    return fn


def optimizer_for(tanh: tuple[bool, ...], initial_damping: float) -> Any:
    return kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(objective(tanh)),
        l2_reg=L2,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=initial_damping,
        min_damping=1e-5,
        max_damping=1000.0,
        damping_adaptation_interval=INTERVAL,
        damping_adaptation_decay=0.95,
        inverse_update_period=5,
        curvature_ema=0.95,
        num_burnin_steps=5,
    )


def adaptive(ae: Any, batch: int, initial_damping: float = 1.0) -> Any:
    """A trainer for `studies/autoencoder.py` (`ae`). Its step takes the study's model
    at first, and returns a `Peer`, which it takes from then on."""
    optimizers: dict[tuple[bool, ...], Any] = {}

    def optimizer_of(peer):
        if peer.tanh not in optimizers:
            optimizers[peer.tanh] = optimizer_for(peer.tanh, initial_damping)
        return optimizers[peer.tanh]

    def init(model):
        peer = peer_of(model)
        images = jnp.zeros((batch, len(peer.layers[0][0])), jnp.float32)
        state = optimizer_of(peer).init(peer.layers, jax.random.PRNGKey(0), images)
        return state, 0

    compiled = set()

    def step(model, state, x, key):
        peer = peer_of(model)
        optimizer = optimizer_of(peer)
        state, number = state
        key = jax.random.key_data(key)
        layers = peer.layers
        if peer.tanh not in compiled:
            # There are two programs, with and without the rule for the damping. Both
            # are compiled in the first step, so that it alone is slow.
            compiled.add(peer.tanh)
            spare = ae.copy((layers, state))
            optimizer.step(*spare, key, batch=x, global_step_int=INTERVAL - 1)
        # Burn-in draws from an iterator: the first batch, again and again.
        layers, state, stats = optimizer.step(
            layers, state, key, itertools.repeat(x), global_step_int=number
        )
        peer = Peer(layers, peer.tanh)
        return peer, (state, number + 1), stats["learning_rate"], stats["damping"]

    return ae.Trainer("kfac-jax", batch, init, step)
