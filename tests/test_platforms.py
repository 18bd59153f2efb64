"""What is computed in another way on other devices than CPUs takes the same steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import normal


X, Y = normal(16, 6, seed=0), np.arange(16) % 3


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    rest: eqx.nn.MLP

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(6, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        # One matrix is large enough to be looked at by itself on a CPU.
        self.rest = eqx.nn.MLP(8, 3, 130, 2, key=keys[1])

    def __call__(self, x):
        return self.rest(self.norm(jnp.tanh(self.first(x))))


def loss_fn(model, x):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), Y)


def steps(optimizer, number=7):
    """Losses and norms of some steps; one batch is not finite."""
    model = kfac.convert(Net())
    state = optimizer.init(model)
    step = eqx.filter_jit(
        lambda model, state, x, key: optimizer.step(loss_fn, model, state, x, key=key)
    )
    told = []
    for i in range(number):
        x = X * np.nan if i == 4 else X
        model, state, info = step(model, state, x, jax.random.key(i))
        told.append([info.loss, info.update_norm, info.gradient_norm, info.rejected])
    return np.array(told, float)


OPTIMIZERS = {
    "default": lambda **own: kfac.KFAC(**own),
    "periods": lambda **own: kfac.KFAC(0.1, 0.9, 1e-2, inverse_period=3, **own),
    "full_batch": lambda **own: kfac.KFAC.full_batch(**own),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, monkeypatch):
    want = steps(OPTIMIZERS[name]())
    asked = []

    def elsewhere(*args, default, **platforms):
        asked.append(platforms)
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    got = steps(OPTIMIZERS[name]())
    assert len(asked) > 3
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert want[4, -1] == 1 and np.sum(want[:, -1]) == 1
    # Steps that differ do so by more.
    other = steps(OPTIMIZERS[name](weight_decay=1e-6), 3)
    assert not np.allclose(other, want[:3], rtol=1e-9, equal_nan=True)
