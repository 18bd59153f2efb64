"""Models with arrays of their own that are written for whole batches: without `vmap`."""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_kfac as kfac

from .helpers import (
    assert_differs,
    assert_near,
    collect,
    make_mesh,
    normal,
    put,
    raises,
    stepped,
)
from .plain import plain_kfac
from .raw import module


B, T, D, H, K = 6, 4, 3, 5, 2
TOKENS, ROWS = normal(B, T, D), normal(B, D, seed=1)
WORDS = np.random.default_rng(0).integers(H, size=(B, T))
DENSE = dict(into=(D, H), bias=(H,), out=(K, H))


def dense(m, x):
    return jnp.tanh(x @ m.into + m.bias) @ m.out.T


def mixing(m, x):
    """Tokens look at each other."""
    h = jnp.tanh(x @ m.into + m.bias)
    weights = jax.nn.softmax(h @ jnp.swapaxes(h, -1, -2))
    return jnp.mean(weights @ h @ m.out.T, axis=-2)


def time_first(m, x):
    """The axis of examples is in the middle, if there is one."""
    return jnp.moveaxis(dense(m, jnp.moveaxis(x, -2, 0)), 0, -2)


def tied(m, words):
    """Words are looked up in a table, which its transpose tells again."""
    x = m.table[words]
    return jnp.tanh(x + jnp.tanh(x @ m.inner)) @ m.table.T


def heads(m, x):
    """Maps side by side."""
    h = jnp.tanh(jnp.einsum("...i,goi->...go", x, m.maps))
    return h.reshape(*x.shape[:-1], -1) @ m.out


def in_complex_numbers(m, x):
    return jnp.abs(x.astype(complex) @ m.kernel) @ m.out


def images(m, x):
    """A convolution, which knows the axis of examples itself."""
    x = x.reshape(-1, 1, T, D)
    h = jax.lax.conv_general_dilated(x, m.kernel, (1, 1), "SAME")
    return jnp.tanh(h).reshape(len(x), -1) @ m.out


def forces(m, x):
    """The gradient of an energy, which is a sum over all rows."""
    energy = lambda x: (jnp.tanh(x @ m.into) @ m.out).sum()
    return jax.grad(energy)(x) + x @ m.into @ m.out


def normalised(m, x):
    """Scales and shifts, of rows and of all that is known of a position."""
    h = (x @ m.into + m.bias) * m.scale + m.shift
    h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1) * (1 + m.gain)
    h = jnp.tanh(h) / m.temperature + m.places
    return h @ m.out.T - m.last * jnp.sum(x, axis=-1, keepdims=True)


def computed(m, x):
    """What is made of arrays before they meet data."""
    scale = jax.nn.softplus(1 + m.scale) * jax.nn.softmax(m.mix)
    h = jnp.tanh(x @ m.into) * (scale / 2) + jnp.where(m.mix > 0, 1.0, m.mix + m.scale)
    h = jnp.where(h > m.mix, h, jnp.sum(m.shift**2) * h)
    return h @ m.out.T


def with_token(m, x):
    """A token joins those of an example."""
    token = jnp.broadcast_to(m.token, (*x.shape[:-2], 1, D))
    x = jnp.concatenate([token, x], axis=-2)
    h = jnp.tanh(jnp.mean(x, axis=-2) @ m.into)
    return jnp.maximum(h, m.floor) @ m.out.T


def recurrent(m, x):
    """A loop over time, which begins with a state that is trained."""

    def step(h, now):
        h = jnp.tanh(now @ m.into + h @ m.inner + m.bias) * m.scale
        return h, None

    h = jnp.broadcast_to(m.first, (*x.shape[:-2], H))
    h, _ = jax.lax.scan(step, h, jnp.moveaxis(x, -2, 0))
    return h @ m.out.T


MODELS = {
    "rows": (dense, ROWS, DENSE),
    "tokens": (dense, TOKENS, DENSE),
    "mixing": (mixing, TOKENS, DENSE),
    "time first": (time_first, TOKENS, DENSE),
    "tied": (tied, WORDS, dict(table=(H, D), inner=(D, D))),
    "heads": (heads, TOKENS, dict(maps=(2, H, D), out=(2 * H, K))),
    "complex": (
        in_complex_numbers,
        TOKENS,
        dict(kernel=lambda: jnp.zeros((D, H), complex), out=(H, K)),
    ),
    "forces": (forces, ROWS, dict(into=(D, H), out=(H, 1))),
    "normalised": (
        normalised,
        TOKENS,
        dict(
            **dict(scale=(H,), shift=(H,), gain=(H,), places=(T, H)),
            **dict(temperature=lambda: jnp.ones(()), last=(K,)),
            **DENSE,
        ),
    ),
    "recurrent": (recurrent, TOKENS, dict(inner=(H, H), first=(H,), scale=(H,), **DENSE)),
    "computed": (
        computed,
        TOKENS,
        dict(scale=(H,), mix=(H,), shift=(2, 3), into=(D, H), out=(K, H)),
    ),
    "with token": (
        with_token,
        TOKENS,
        dict(token=(D,), into=(D, H), floor=(H,), out=(K, H)),
    ),
}


def loss(out):
    out = out.reshape(len(out), -1)
    return kfac.SquaredError(out, jnp.zeros_like(out))


def whole(model, x):
    """Of a model that takes all examples at once."""
    return loss(model(x))


def mapped(model, x):
    return loss(jax.vmap(model)(x))


def both(name, blocks=None):
    """The data, and a model: to be called with all of them, and with one example."""
    call, x, shapes = MODELS[name]
    model = module(call, **shapes)
    convert = lambda example: kfac.convert(model, blocks, example=example)
    return x, convert(x), convert(x[0])


FISHERS = [kfac.Exact(), kfac.MonteCarlo()]


@pytest.mark.parametrize("fisher", FISHERS, ids=lambda fisher: fisher.name)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "time first"])
def test_as_with_vmap(name, fisher):
    x, model, of_one = both(name)
    key = jax.random.key(0)
    found = collect(whole, fisher, model, x, key=key)
    assert_near(found, collect(mapped, fisher, of_one, x, key=key))
    others = (x + 1) % H if x.dtype == int else 2 * x
    assert_differs(found, collect(whole, fisher, model, others, key=key))


BLOCKS = {
    "expand": kfac.Kronecker(kfac.Expand()),
    "reduce": kfac.Kronecker(kfac.Reduce()),
    "ekfac": kfac.EKFAC(),
    "full": kfac.Full(),
    "diagonal": kfac.Diagonal(),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["mixing", "computed"])
def test_blocks(name, block):
    x, model, of_one = both(name, BLOCKS[block])
    found = collect(whole, kfac.Exact(), model, x)
    assert_near(found, collect(mapped, kfac.Exact(), of_one, x))


def test_examples_along_another_axis():
    """Rows are taken one by one, and what adds up the rows of an example is refused."""
    x, model, of_one = both("time first")
    rows = both("time first", BLOCKS["expand"])
    found = collect(whole, kfac.Exact(), model, x)
    assert_near(found, collect(mapped, kfac.Exact(), rows[2], x))
    assert_differs(found, collect(mapped, kfac.Exact(), of_one, x))
    _, model, _ = both("time first", BLOCKS["reduce"])
    with raises(ValueError, "Cannot tell which axis", "first axis", "['into']"):
        collect(whole, kfac.Exact(), model, x)


def test_convolution():
    shapes = dict(kernel=(2, 1, 3, 3), out=(2 * T * D, K))
    model = module(images, **shapes)
    found = collect(whole, kfac.Exact(), kfac.convert(model, example=TOKENS), TOKENS)
    one = lambda m, x: images(m, x)[0]
    of_one = kfac.convert(module(one, **shapes), example=TOKENS[0])
    assert_near(found, collect(mapped, kfac.Exact(), of_one, TOKENS))


GROUPS = np.repeat(np.arange(B), T)


def graphs(m, nodes):
    """Graphs that are joined to one: rings of `T` nodes."""
    last = np.arange(B * T).reshape(B, T)[:, np.roll(np.arange(T), 1)].ravel()
    h = jnp.tanh(nodes @ m.into + m.bias)
    h = h + jnp.tanh(h[last] @ m.inner)
    return jax.ops.segment_sum(h @ m.out.T, GROUPS, B)


def one_graph(m, nodes):
    h = jnp.tanh(nodes @ m.into + m.bias)
    h = h + jnp.tanh(jnp.roll(h, 1, axis=0) @ m.inner)
    return jnp.sum(h @ m.out.T, axis=0)


def test_graphs_in_one():
    """Nobody can tell which nodes are of one example, so each is taken by itself."""
    shapes, rows = dict(inner=(H, H), **DENSE), BLOCKS["expand"]
    nodes = TOKENS.reshape(B * T, D)
    model = kfac.convert(module(graphs, **shapes), example=nodes)
    found = collect(whole, kfac.Exact(), model, nodes)
    of_one = kfac.convert(module(one_graph, **shapes), rows, example=TOKENS[0])
    assert_near(found, collect(mapped, kfac.Exact(), of_one, TOKENS))


def test_steps():
    x, model, of_one = both("mixing")
    optimizer = plain_kfac(1e-2, 0.1, fisher=kfac.Exact())
    new, _, _ = stepped(optimizer, whole, model, optimizer.init(model), x)
    want, _, _ = stepped(optimizer, mapped, of_one, optimizer.init(of_one), x)
    assert_near(jtu.tree_leaves(new), jtu.tree_leaves(want))
    assert_differs(jtu.tree_leaves(new)[0], jtu.tree_leaves(model)[0])


class Energy(eqx.Module):
    """An energy of layers, and its gradient."""

    into: eqx.nn.Linear
    out: eqx.nn.Linear

    def __call__(self, x):
        energy = lambda x: self.out(jnp.tanh(self.into(x)))[0]
        return jnp.append(*jax.value_and_grad(energy)(x)[::-1])


def energy(m, x):
    total = lambda x: (jnp.tanh(x @ m.into) @ m.out).sum()
    return jnp.append(*jax.value_and_grad(total)(x)[::-1])


def test_last_layer_of_an_energy():
    """In the gradient, it multiplies ones, and is a layer all the same."""
    model = module(energy, into=(D, H), out=(H, 1))
    linear = ft.partial(eqx.nn.Linear, use_bias=False, key=jax.random.key(0))
    layers = Energy(linear(D, H), linear(H, 1))
    where = lambda m: (m.into.weight, m.out.weight)
    layers = eqx.tree_at(where, layers, (model.into.T, model.out.T))
    want = collect(mapped, kfac.Exact(), kfac.convert(layers), ROWS)
    model = kfac.convert(model, example=ROWS[0])
    found = collect(mapped, kfac.Exact(), model, ROWS)
    block = lambda f: np.kron(f.output_factor, f.input_factor)
    assert_near(block(found["into"]), block(want.into))
    assert_near(block(found["out"]), block(want.out))


def test_products_with_constants_alone():
    """What is made of an array and a constant alone is no layer."""
    basis = normal(T, D, seed=2)
    call = lambda m, x: jnp.tanh(x @ (basis @ m.into)) @ m.out.T
    x, shapes = normal(B, T), dict(into=(D, H), out=(K, H))
    model = kfac.convert(module(call, **shapes), example=x[0])
    assert set(model.tag) == {"others", "out"}
    both_ways = lambda m, x: jnp.tanh(x @ m.into + jnp.sum(basis @ m.into, axis=0))
    twice = kfac.convert(module(both_ways, into=(D, H)), example=ROWS[0])
    assert set(twice.tag) == {"others"}
    found = collect(mapped, kfac.Exact(), model, x)
    dense = lambda m, x: jnp.tanh(x @ basis @ m.into) @ m.out.T
    full = kfac.convert(module(dense, **shapes), kfac.Diagonal(), example=x[0])
    want = collect(mapped, kfac.Exact(), full, x)
    got = found["others"].diagonal.reshape(D, H)
    assert_near(got, want["into"].diagonal.reshape(H, D).T)


def test_frozen():
    """Of several arrays with one tag, those that are trained have copies."""
    x, model, of_one = both("normalised")
    freeze = lambda model: eqx.partition(
        model,
        eqx.tree_at(
            lambda m: (m.shift, m.places),
            jtu.tree_map(eqx.is_inexact_array, model),
            (False, False),
        ),
    )

    def factors(loss_fn, model):
        trained, frozen = freeze(model)
        part = lambda model, x: loss_fn(eqx.combine(model, frozen), x)
        return collect(part, kfac.Exact(), trained, x)

    found = factors(whole, model)
    assert_near(found, factors(mapped, of_one))
    assert found["others"].diagonal.size == sum(map(math.prod, [(H,), (H,), (), (K,)]))


def test_matrices_that_are_computed():
    """Each example would have a matrix of its own."""
    call = lambda m, x: x @ jax.nn.softplus(m.into) @ m.out.T
    model = module(call, into=(D, H), out=(K, H))
    with raises(ValueError, "no tag follows", "['others']"):
        collect(whole, kfac.Exact(), kfac.convert(model, example=ROWS), ROWS)
    collect(mapped, kfac.Exact(), kfac.convert(model, example=ROWS[0]), ROWS)


def test_computed_of_copies():
    """Copies that are made before the array meets data are no copies for examples."""
    tables = lambda m: jnp.exp(jnp.broadcast_to(m.scale, (T, D)))
    call = lambda m, x: jnp.tanh(x * tables(m)) @ m.out.T
    model = module(call, scale=(D,), out=(K, D))
    with raises(ValueError, "called outside", "['others']"):
        collect(whole, kfac.Exact(), kfac.convert(model, example=TOKENS), TOKENS)
    collect(mapped, kfac.Exact(), kfac.convert(model, example=TOKENS[0]), TOKENS)


def test_returned():
    """An array that a model returns as it is."""
    call = lambda m, x: (x @ m.into, m.scale)
    model = module(call, into=(D, H), scale=(H,))

    def outside(model, x):
        h, scale = model(x)
        return loss(jnp.tanh(h * jnp.broadcast_to(scale, h.shape)))

    converted = kfac.convert(model, example=ROWS)
    with raises(ValueError, "called outside", "['others']"):
        collect(outside, kfac.Exact(), converted, ROWS)


WEIGHTS = np.array([1.0, 0.5, 2.0, 0.0, 1.0, 3.0])


@pytest.mark.parametrize("name", ["mixing", "computed"])
def test_weights(name):
    x, model, of_one = both(name)
    weighted = lambda loss_fn: (
        lambda model, x, w: eqx.tree_at(
            lambda loss: loss.weights, loss_fn(model, x), w, is_leaf=lambda n: n is None
        )
    )
    found = collect(weighted(whole), kfac.Exact(), model, x, WEIGHTS)
    want = collect(weighted(mapped), kfac.Exact(), of_one, x, WEIGHTS)
    assert_near(found, want)
    assert_differs(found, collect(whole, kfac.Exact(), model, x))


@pytest.mark.parametrize("name", ["mixing", "normalised"])
def test_micro_batches(name):
    x, model, _ = both(name)
    optimizer = plain_kfac(1e-2, 0.0, fisher=kfac.Exact())
    args = whole, model, optimizer.init(model), x
    want = stepped(optimizer, *args)[1].curvature
    assert_near(stepped(optimizer, *args, micro_batches=3)[1].curvature, want)


def test_ensemble():
    """Models side by side, each of which gets the same batch."""
    x, model, _ = both("normalised")
    other = jtu.tree_map(lambda a: jnp.sin(a) if eqx.is_array(a) else a, model)
    each = [model, other]
    several = jtu.tree_map(lambda *a: jnp.stack(a) if eqx.is_array(a[0]) else a[0], *each)
    found = eqx.filter_vmap(lambda model: collect(whole, kfac.Exact(), model, x))(several)
    for i, model in enumerate(each):
        own = jtu.tree_map(lambda a: a[i], found)
        assert_near(own, collect(whole, kfac.Exact(), model, x))


def test_sharded_batch():
    x, model, _ = both("computed")
    want = collect(whole, kfac.Exact(), model, x)
    mesh = make_mesh((2,))
    split = put(x, mesh, P("batch"))
    assert_near(collect(whole, kfac.Exact(), put(model, mesh, P()), split), want)
