"""Models with complex arrays that an example converts, beside ones that hold the real and
imaginary parts in two arrays of their own."""

import copy
import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import (
    arrays,
    assert_differs,
    assert_near,
    assert_same,
    collect,
    leaves,
    make_mesh,
    normal,
    put,
    stepped,
)
from .plain import plain_kfac
from .raw import check, shown, squared


X = normal(5, 4, 3, seed=1)  # Sequences.


def draw(*shape, seed):
    return jax.lax.complex(*(0.5 * normal(*shape, seed=seed + i) for i in (0, 50)))


class Recurrent(eqx.Module):
    """A diagonal linear recurrence of complex numbers: a matrix of the inputs, one of the
    states, and what is used one by one, in fields and within them."""

    decay: Any
    into: Any
    out: Any
    more: dict[str, list]

    def __init__(self, seed=0):
        self.decay = draw(4, seed=seed)
        self.into = draw(4, 3, seed=seed + 1)
        self.out = draw(2, 4, seed=seed + 2)
        self.more = {"shift": [draw(2, seed=seed + 3), 0.3 * normal(2, seed=seed + 4)]}

    def states(self, x):
        def step(h, u):
            h = self.decay * h + self.into @ u
            return h, h

        return jax.lax.scan(step, jnp.zeros(4, complex), x.astype(complex))[1]

    @property
    def shift(self):
        return self.more["shift"][0]

    def __call__(self, x):
        y = jax.vmap(lambda h: self.out @ h + self.shift)(self.states(x))
        return jnp.tanh(jnp.real(y[-1])) + jnp.imag(y[-2]) * self.more["shift"][1]


class Parts(eqx.Module):
    """The same, of real arrays alone, in the same order."""

    decay: tuple
    into: tuple
    out: tuple
    shift: tuple
    slope: Any

    def __init__(self, model):
        parts = lambda z: (jnp.real(z), jnp.imag(z))
        self.decay, self.into, self.out = map(parts, (model.decay, model.into, model.out))
        shift, self.slope = model.more["shift"]
        self.shift = parts(shift)

    def __call__(self, x):
        model = Recurrent.__new__(Recurrent)
        join = lambda pair: jax.lax.complex(*pair)
        fields = dict(zip(("decay", "into", "out"), (self.decay, self.into, self.out)))
        vars(model).update({k: join(v) for k, v in fields.items()})
        vars(model).update(more={"shift": [join(self.shift), self.slope]})
        return model(x)


MODEL = Recurrent()
TWIN = Parts(MODEL)


def converted(block=None, model=MODEL):
    return kfac.convert(model, block, example=X[0])


CONVERTED = converted()
BLOCKS = [None, kfac.Full(), kfac.Diagonal(), kfac.EKFAC(), kfac.TNT()]


def by_value(tree):
    """All arrays, whatever they are called."""
    return sorted((np.asarray(a) for a in arrays(tree)), key=lambda a: (a.shape, a.sum()))


def test_the_parts_have_blocks():
    assert shown(CONVERTED) == {
        "['into.real']": "Dense 4x3",
        "['into.imag']": "Dense 4x3",
        "['out.real']": "Dense 2x4",
        "['out.imag']": "Dense 2x4",
        "['others']": "Parameters 14",
    }
    assert kfac.summary(CONVERTED).untagged == {}
    assert not any(map(jnp.iscomplexobj, leaves(CONVERTED)))


def test_the_twin_is_right():
    """By dense blocks, in numbers that are real throughout."""
    want = {
        "['into.0']": "Dense 4x3",
        "['into.1']": "Dense 4x3",
        "['out.0']": "Dense 2x4",
        "['out.1']": "Dense 2x4",
        "['others']": "Parameters 14",
    }
    shared = [k for k in want if k != "['others']"]
    check(TWIN, X, want, shared)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: type(b).__name__)
def test_curvature_is_that_of_the_twin(block):
    kinds = (kfac.Exact(), kfac.Empirical())
    for fisher in kinds:
        found = collect(squared, fisher, converted(block), X)
        want = collect(squared, fisher, converted(block, TWIN), X)
        assert_near(by_value(found), by_value(want))
    first, second = (collect(squared, f, converted(block), X) for f in kinds)
    assert_differs(first, second)


@pytest.mark.parametrize(
    "optimizer",
    [kfac.KFAC(fisher=kfac.Exact()), plain_kfac(0.1, fisher=kfac.Exact())],
    ids=["rules", "numbers"],
)
def test_steps_are_those_of_the_twin(optimizer):
    ours, theirs = CONVERTED, converted(None, TWIN)
    states = [eqx.filter_jit(optimizer.init)(m) for m in (ours, theirs)]
    start = ours
    for _ in range(6):
        ours, states[0], info = stepped(optimizer, squared, ours, states[0], X)
        theirs, states[1], other = stepped(optimizer, squared, theirs, states[1], X)
        assert not info.rejected
        np.testing.assert_allclose(info.loss, other.loss, rtol=1e-8)
    assert_near(leaves(ours), leaves(theirs), 1e-7)
    assert_differs(leaves(ours), leaves(start))


def test_it_computes_the_same():
    every = eqx.filter_jit(lambda m: jax.vmap(m)(X))
    np.testing.assert_array_equal(every(CONVERTED), every(MODEL))
    states = eqx.filter_jit(lambda m: m.states(X[0]))
    np.testing.assert_array_equal(states(CONVERTED), states(MODEL))
    for name in ("decay", "into", "out", "shift"):
        np.testing.assert_array_equal(getattr(CONVERTED, name), getattr(MODEL, name))
    assert isinstance(CONVERTED, Recurrent) and "c128[4]" in repr(CONVERTED)
    assert bool(eqx.tree_equal(kfac.revert(CONVERTED), MODEL))
    again = kfac.convert(CONVERTED, example=X[0])
    assert jtu.tree_structure(again) == jtu.tree_structure(CONVERTED)


def test_all_of_the_gradient_is_seen():
    for x in (X[:1], X):
        report = kfac.verify(squared, CONVERTED, x)
        assert all(np.max(check.unseen) < 1e-12 for check in report.layers)
    assert report["['others']"].ratio == pytest.approx(1)


def test_its_tree():
    params, static = eqx.partition(CONVERTED, eqx.is_inexact_array)
    assert static.decay is None and static.shift is None
    assert_same(eqx.combine(params, static), CONVERTED)
    for other in (copy.deepcopy(CONVERTED), pickle.loads(pickle.dumps(CONVERTED))):
        assert type(other) is type(CONVERTED)
        assert_same(other, CONVERTED)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, CONVERTED)
    file.seek(0)
    like = jtu.tree_map(jnp.zeros_like, CONVERTED)
    assert_same(eqx.tree_deserialise_leaves(file, like), CONVERTED)
    new = eqx.tree_at(lambda m: vars(m)["decay"].real, CONVERTED, jnp.ones(4))
    np.testing.assert_array_equal(np.real(new.decay), 1)
    np.testing.assert_array_equal(np.imag(new.decay), np.imag(MODEL.decay))
    small = kfac.cast(CONVERTED, jnp.bfloat16)
    assert small.decay.dtype == jnp.complex64


def test_what_is_computed_cannot_be_replaced():
    with pytest.raises(ValueError, match="structure"):
        eqx.tree_at(lambda m: m.decay, CONVERTED, jnp.ones(4, complex))


def test_stacked_models_and_layers():
    models = [Recurrent(seed) for seed in (0, 10)]
    together = jtu.tree_map(lambda *a: jnp.stack(a), *map(converted, [None] * 2, models))
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    states = eqx.filter_jit(eqx.filter_vmap(optimizer.init))(together)
    step = eqx.filter_vmap(lambda model, state: optimizer.step(squared, model, state, X))
    found, *_ = eqx.filter_jit(step)(together, states)
    for i, model in enumerate(models):
        own = converted(None, model)
        state = eqx.filter_jit(optimizer.init)(own)
        want, *_ = stepped(optimizer, squared, own, state, X)
        assert_near([np.asarray(a)[i] for a in leaves(found)], leaves(want))


class Layers(eqx.Module):
    """Recurrences of which a loop goes through all."""

    each: Recurrent

    def __call__(self, x):
        params, static = eqx.partition(self.each, eqx.is_array)
        body = lambda x, own: (x + jnp.sum(eqx.combine(own, static)(x)), None)
        return jax.lax.scan(body, x, params)[0][-1, :2]


def test_scan_over_layers():
    each = jtu.tree_map(lambda *a: jnp.stack(a), Recurrent(0), Recurrent(10))
    model = kfac.convert(Layers(each), kfac.Full(), example=X[0])
    apart = lambda i: jtu.tree_map(lambda a: a[i], each)
    unrolled = Unrolled([apart(0), apart(1)])
    flat = kfac.convert(unrolled, kfac.Full(), example=X[0])
    run = eqx.filter_jit(lambda m: jax.vmap(m)(X))
    np.testing.assert_allclose(run(model), run(flat), rtol=1e-12)
    found = collect(squared, kfac.Exact(), model, X).each
    want = collect(squared, kfac.Exact(), flat, X).each
    for name in ("into.real", "into.imag", "out.real", "out.imag"):
        both = [own[name].matrix for own in want]
        np.testing.assert_allclose(found[name].matrix, np.stack(both), atol=1e-10)


class Unrolled(eqx.Module):
    each: list[Recurrent]

    def __call__(self, x):
        for layer in self.each:
            x = x + jnp.sum(layer(x))
        return x[-1, :2]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_split_over_devices():
    mesh = make_mesh((2,))
    spec = jax.sharding.PartitionSpec("batch")
    x = normal(6, 4, 3, seed=3)
    want = collect(squared, kfac.Exact(), CONVERTED, x)
    assert_near(collect(squared, kfac.Exact(), CONVERTED, put(x, mesh, spec)), want)


def test_what_stays_complex():
    """What is left untagged, or what nobody follows, is a leaf as it was."""
    model = kfac.convert(MODEL, {".into": None}, example=X[0])
    assert set(kfac.summary(model).untagged) == {".into"}
    assert jnp.iscomplexobj(model.into) and any(map(jnp.iscomplexobj, leaves(model)))
    optimizer = kfac.KFAC(fisher=kfac.Exact(), fallback=optax.sgd(0.01))
    state = optimizer.init(model)
    new, _, info = stepped(optimizer, squared, model, state, X)
    assert not info.rejected and jnp.iscomplexobj(new.into)
    assert np.linalg.norm(np.asarray(new.into - model.into)) > 0
    with pytest.raises(ValueError, match=r"`\.into` are complex.*example=x\[0\]"):
        kfac.KFAC().init(model)


def test_rest():
    model = kfac.convert(MODEL, rest=kfac.Diagonal())
    assert shown(model) == {"['others']": "Parameters 54"}
    found = collect(squared, kfac.Exact(), model, X)
    want = collect(squared, kfac.Exact(), converted(kfac.Diagonal()), X)
    total = lambda tree: sum(np.sum(a) for a in arrays(tree))
    np.testing.assert_allclose(total(found), total(want), rtol=1e-12)


def test_functions_of_the_model():
    """What is called is no method; it reads fields, and calls a method."""
    call = lambda model, x: jnp.real(model.out @ model.states(x)[-1])
    model = kfac.convert(MODEL, example=X[0], method=call)
    assert shown(model)["['out.real']"] == "Dense 2x4"

    def loss_fn(model, x):
        states = jax.vmap(model.states)(x)[:, -1]
        return kfac.SquaredError(jnp.real(states), jnp.ones((len(x), 4)))

    seen = {c.path: c for c in kfac.verify(loss_fn, model, X).layers}
    assert np.max(seen["['into.real']"].unseen) < 1e-12
    assert seen["['into.real']"].ratio > 0.1
    assert seen["['out.real']"].use == "never called"


class OfItsTree(eqx.Module):
    """A module whose call takes itself apart, and changes itself."""

    weight: Any

    def scaled(self, x):
        return jnp.real(self.weight @ x.astype(complex))

    def without_phase(self):
        return eqx.tree_at(lambda m: m.weight, self, jnp.abs(self.weight).astype(complex))

    def __call__(self, x):
        size = sum(jnp.sum(jnp.abs(leaf)) for leaf in jtu.tree_leaves(self))
        half = eqx.tree_at(lambda m: m.weight, self, self.weight / 2)
        return half.scaled(x) / size + self.without_phase().scaled(x)


class Around(eqx.Module):
    """A module without a complex array of its own, which counts those within."""

    inner: OfItsTree
    scale: Any

    def __call__(self, x):
        return self.scale * self.inner(x) * len(jtu.tree_leaves(self))


@pytest.mark.parametrize("around", [False, True])
def test_modules_that_are_taken_apart(around):
    model, x = OfItsTree(draw(2, 3, seed=6)), normal(5, 3, seed=7)
    model = Around(model, normal(2, seed=8)) if around else model
    ours = kfac.convert(model, example=x[0])
    every = eqx.filter_jit(lambda m: jax.vmap(m)(x))
    np.testing.assert_array_equal(every(ours), every(model))
    report = kfac.verify(squared, ours, x)
    assert all(np.max(check.unseen) < 1e-12 for check in report.layers)
    inner = ours.inner if around else ours
    changed = inner.without_phase()
    assert isinstance(changed, OfItsTree) and np.all(np.imag(changed.weight) == 0)


def test_layers_of_equinox_with_complex_numbers():
    net = eqx.nn.MLP(3, 2, 4, 1, jnp.tanh, dtype=complex, key=jax.random.key(0))
    model, x = kfac.convert(net, example=X[0, 0].astype(complex)), X[:, 0]
    call = lambda m, x: jnp.real(jax.vmap(m)(x.astype(complex)))
    every = eqx.filter_jit(call)
    np.testing.assert_array_equal(every(model, x), every(net, x))
    loss_fn = lambda m, x: kfac.SquaredError(call(m, x), jnp.ones((len(x), 2)))
    assert kfac.summary(model).untagged == {}
    report = kfac.verify(loss_fn, model, x)
    assert all(np.max(check.unseen) < 1e-12 for check in report.layers)
    assert bool(eqx.tree_equal(kfac.revert(model), net))
    alone = kfac.convert(
        {"complex": net, "real": kfac.Linear(3, 2, key=jax.random.key(1))}
    )
    with pytest.raises(ValueError, match="complex numbers.*example="):
        kfac.KFAC().init(alone)


class Spectral(eqx.Module):
    """A Fourier operator, whose weight is an array or a pair of its parts."""

    weight: Any

    def __call__(self, x):
        weight = self.weight
        weight = jax.lax.complex(*weight) if isinstance(weight, tuple) else weight
        f = jnp.fft.rfft(x)[:, :3]
        f = jnp.einsum("if,iof->of", f, weight)
        return jnp.fft.irfft(jnp.pad(f, ((0, 0), (0, 2))), 8)


def test_a_matrix_for_each_frequency():
    weight, x = draw(2, 3, 3, seed=4), normal(5, 2, 8)
    model = kfac.convert(Spectral(weight), example=x[0])
    twin = kfac.convert(Spectral((jnp.real(weight), jnp.imag(weight))), example=x[0])
    assert set(shown(model).values()) == {"Einsum[3] 3x2"}
    found, want = (collect(signals, kfac.Exact(), m, x) for m in (model, twin))
    assert_near(by_value(found), by_value(want))


def signals(model, x):
    outputs = jax.vmap(model)(x)
    return kfac.SquaredError(outputs, jnp.ones_like(outputs))
