"""A user's script: pyright has nothing to say of it; and what a user sees who prints."""

import re
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_kfac as kfac


def test_constructors(getkey):
    """Layers take the arguments of Equinox, and a block."""
    layers = [
        kfac.Linear(2, 3, key=getkey()),
        kfac.Linear("scalar", 3, use_bias=False, key=getkey(), block=kfac.Full()),
        kfac.Conv(2, 1, 3, kernel_size=3, key=getkey()),
        kfac.Conv1d(1, 3, kernel_size=3, key=getkey()),
        kfac.Conv2d(1, 3, kernel_size=3, padding="SAME", key=getkey()),
        kfac.Conv3d(1, 3, kernel_size=3, key=getkey(), block=kfac.EKFAC()),
        kfac.ConvTranspose(2, 1, 3, kernel_size=3, key=getkey()),
        kfac.ConvTranspose1d(1, 3, kernel_size=3, key=getkey()),
        kfac.ConvTranspose2d(1, 3, kernel_size=3, key=getkey()),
        kfac.ConvTranspose3d(1, 3, kernel_size=3, key=getkey()),
        kfac.Embedding(5, 3, key=getkey()),
        kfac.GRUCell(2, 3, key=getkey()),
        kfac.LSTMCell(2, 3, key=getkey()),
        kfac.LayerNorm(3),
        kfac.RMSNorm(3),
        kfac.GroupNorm(1, 3),
        kfac.PReLU(0.1),
        kfac.BatchNorm(3, axis_name="batch", mode="batch"),
        kfac.MultiheadAttention(2, 4, key=getkey()),
        kfac.WeightNorm(eqx.nn.Linear(2, 3, key=getkey())),
        kfac.SpectralNorm(eqx.nn.Linear(2, 3, key=getkey()), "weight", key=getkey()),
        kfac.Parameter(jnp.zeros(3)),
    ]
    assert all(hasattr(layer, "tag") for layer in layers if layer is not layers[-4])
    with pytest.raises(TypeError):
        kfac.Linear(2, 3, 4, 5, key=getkey())


def test_a_step_and_what_is_printed(getkey):
    def loss_fn(model: kfac.MLP, x: jax.Array, y: jax.Array) -> kfac.SquaredError:
        return kfac.SquaredError(jax.vmap(model)(x), y)

    model = kfac.MLP(2, 1, 8, 1, key=getkey())
    optimizer = kfac.KFAC()
    state = optimizer.init(model)
    x, y = jnp.ones((4, 2)), jnp.ones((4, 1))

    @eqx.filter_jit
    def step(model: kfac.MLP, state: kfac.KFACState, x: jax.Array):
        return optimizer.step(loss_fn, model, state, x, y, key=jax.random.key(0))

    out = step(model, state, x)
    assert_type(out, tuple[kfac.MLP, kfac.KFACState, kfac.Info])
    model, state, info = out
    assert_type(kfac.averaged(model, state), kfac.MLP)
    assert_type(kfac.convert(eqx.nn.MLP(2, 1, 8, 1, key=getkey())), eqx.nn.MLP)
    said = repr(info)
    assert f"loss={float(info.loss):.4g}" in said and "damping=0.005" in said
    assert "rejected=False" in said and "faults=Faults()" in said
    _, state, info = step(model, state, jnp.nan * x)
    assert "rejected=True" in repr(info) and "faults=Faults(loss)" in repr(info)
    assert repr(state.faults) == "Faults(loss=1)"
    several = jax.tree.map(lambda a: jnp.stack([a, a]), info)
    assert "loss=f64[2]" in repr(several)  # As after a `scan`.
    shapes = eqx.filter_eval_shape(step, model, state, x)[2]
    assert "loss=f64[]" in repr(shapes)


def said(value) -> dict[str, str]:
    """What `print` says, by what it is of."""
    _, *lines = str(value).splitlines()
    return {name: text for name, text in (re.split(r" {2,}", s.strip()) for s in lines)}


def test_print_of_an_optimizer():
    """All that was chosen, with what stands in the place of `"auto"`; `repr` is as that
    of any module."""
    lines = said(kfac.KFAC())
    assert len(lines) == 6 and str(kfac.KFAC()) != repr(kfac.KFAC())
    assert lines["learning rate"] == "0.1, momentum 0.9"
    assert lines["damping"] == eqx.tree_pformat(kfac.LayerDamping(), width=999)
    assert "every 10 steps, at first at 0, 1, 2, 3, 4, 6" in lines["curvature"]
    assert lines["inverse"].startswith("Cholesky(scaled_bias=True) every 50 steps, at")
    rules = said(kfac.KFAC.full_batch())
    assert rules["learning rate"].startswith("and momentum by QuadraticModel(")
    assert rules["averaging"] == rules["norm constraint"] == "none"
    assert "every 5 steps, decay" in rules["curvature"]  # And no more often at first.
    adam, guard = optax.adam(0.1), kfac.MaxIncrease(0.5)
    given: Any = dict(fallback=adam, guard=guard, weight_decay=0.1, curvature_period=1)
    schedule = optax.linear_schedule(0.1, 0.0, 9)
    turns = kfac.Staggered(7)
    lines = said(kfac.KFAC(schedule, damping=0.25, inverse_period=turns, **given))
    assert lines["learning rate"] == "by a schedule, `schedule`, momentum 0.9"
    assert lines["damping"] == "0.25" and lines["guard"] == "MaxIncrease(tolerance=0.5)"
    assert "at every step, decay 0.95" in lines["curvature"]
    assert lines["inverse"].endswith("in turn, each layer every 7 steps")
    assert lines["weight decay"] == "0.1" and "no tag covers" in lines["fallback"]


def test_print_of_a_state(getkey):
    def loss_fn(model: kfac.MLP, x: jax.Array) -> kfac.SquaredError:
        return kfac.SquaredError(jax.vmap(model)(x), jnp.ones((4, 1)))

    model = kfac.MLP(2, 1, 8, 1, key=getkey())
    optimizer = kfac.KFAC()
    state = optimizer.init(model)
    lines = said(state)
    assert lines["step"] == "0" and lines["loss"] == "not known yet"
    assert lines["damping"] == "0.005" and lines["faults"] == "none"
    step = eqx.filter_jit(optimizer.step)
    good = jnp.ones((4, 2))
    losses = []
    for scale in (1.0, 1.0, jnp.nan, 1e4, 1e4):
        model, state, info = step(loss_fn, model, state, scale * good, key=getkey())
        losses.append(info.loss)
    lines = said(state)
    assert lines["step"] == "5, 1 rejected"
    assert lines["faults"] == "loss=1"
    assert lines["loss"] == f"{losses[1]:.4g}, not finite or far above in the last 3"
    each = jax.tree.leaves(state.layer_damping)
    extent = f"{min(each):.4g} to {max(each):.4g}"
    extent = extent if min(each) < max(each) else f"{each[0]:.4g}"
    assert lines["damping"] == f"0.005; of the layers {extent}"
    held = sum(a.nbytes for a in jax.tree.leaves(state.curvature)) / 1e6
    assert lines["curvature"].startswith(f"{held:.3g} MB, weight ")
    model, state, _ = step(loss_fn, model, state, 1e4 * good, key=getkey())
    assert "damping times 10 since it exploded" in said(state)["loss"]
    # Of several runs, and while tracing, it is what any state is.
    several = jax.tree.map(lambda a: jnp.stack([a, a]), state)
    assert str(several) == repr(several)
    traced = []
    eqx.filter_eval_shape(lambda s: traced.append((str(s), repr(s))), state)
    assert traced[0][0] == traced[0][1]


def test_curvature_without_an_optimizer(getkey):
    def loss_fn(model: kfac.MLP, x: jax.Array, y: jax.Array) -> kfac.SquaredError:
        return kfac.SquaredError(jax.vmap(model)(x), y)

    def forward(model: kfac.MLP, x: jax.Array) -> jax.Array:
        return model(x)

    model = kfac.MLP(2, 1, 3, 1, key=getkey())
    x, y = jnp.ones((4, 2)), jnp.ones((4, 1))
    for operator in (
        kfac.analysis.GaussNewtonOperator,
        kfac.analysis.FisherOperator,
        kfac.analysis.EmpiricalFisherOperator,
        kfac.analysis.HessianOperator,
    ):
        assert operator(loss_fn, model, x, y).in_size() == 13
    assert kfac.analysis.GaussNewtonOperator(loss_fn, model, x, y=y).in_size() == 13
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
    posterior = kfac.analysis.Laplace(curvature, model, 4)
    assert posterior.predict(forward, x[0])[1].shape == (1, 1)
    scores = kfac.analysis.influence(loss_fn, curvature, 0.1)(
        model, (x, y), (x[:2], y[:2])
    )
    assert scores.shape == (4, 2)
