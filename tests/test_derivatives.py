"""Derivatives of a model in its inputs: further rows of its weights, which act transposed
in reverse mode."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.experimental import jet
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from .helpers import assert_differs, assert_entries_near, normal
from .plain import plain_kfac


N, D, H, K = 6, 3, 5, 2
KEYS = [jr.key(seed) for seed in range(6)]
X = normal(N, D)
V = np.array([0.5, -1.0, 2.0])
EXACT = kfac.Exact()


def mlp(block=kfac.Kronecker(), activation=jnp.tanh, **kwargs):
    model = eqx.nn.MLP(D, K, H, 2, activation, key=KEYS[2], **kwargs)
    return kfac.convert(model, block)


@ft.cache
def over(outputs, examples=jax.vmap):
    """The loss function whose outputs are those of single examples."""

    def loss_fn(model, x, weights=None):
        z = examples(ft.partial(outputs, model))(x)
        return kfac.SquaredError(z, jnp.ones_like(z), weights)

    return loss_fn


@eqx.filter_jit
def curvature(loss_fn, model, *args):
    return kfac.curvature(loss_fn, fisher=EXACT)(model, *args)


#
# The oracle: a network of `tanh` and all of its derivatives, written out, with a probe at
# everything that a weight is multiplied with.
#


def written_out(model, x, tangents, probes):
    """The outputs of the last layer and the inputs of every one, by name: "", the value;
    `tangents` (names and vectors), first derivatives; and "ab", that of "a" along "b"."""
    h = {"": x, **tangents}
    seen = []
    for i, layer in enumerate(model.layers):
        z = {name: layer.weight @ h[name] for name in h}
        z = {name: a + probes[i].get(name, 0) for name, a in z.items()}
        z[""] = z[""] + layer.bias
        seen.append(h)
        t = jnp.tanh(z[""])
        d1, d2 = 1 - t**2, -2 * t * (1 - t**2)
        h = {name: d1 * a for name, a in z.items()} | {"": t}
        for (a, b), name in PAIRS.items():
            if {a, b} <= {*tangents}:
                h[name] = h.get(name, 0) + d2 * z[a] * z[b]
    return z, seen


# Of a `jvp` of a `jvp`, there are two first derivatives, though they are the same; in
# the Laplacian, pure second derivatives may be added up on the way.
PAIRS = {("v", "w"): "vw", ("v", "v"): "vv"}
PAIRS |= {(f"v{i}", f"w{i}"): f"v{i}w{i}" for i in range(D)}
PAIRS |= {(f"v{i}", f"v{i}"): "sum" for i in range(D)}


@eqx.filter_jit
def oracle(model, tangents, outputs):
    """The factors of all layers, where `outputs` of the last layer have the loss."""

    def sums(x):
        _, seen = written_out(model, x, tangents, [{}] * len(model.layers))
        zeros = [
            {name: jnp.zeros_like(layer.bias) for name in h}
            for layer, h in zip(model.layers, seen, strict=True)
        ]
        run = lambda probes: outputs(written_out(model, x, tangents, probes)[0])
        found = []
        for h, jacobians in zip(seen, jax.jacobian(run)(zeros), strict=True):
            row = lambda name: jnp.append(h[name], float(name == ""))
            rows = jnp.stack([row(name) for name in jacobians])
            g = jnp.stack([j.reshape(-1, j.shape[-1]) for j in jacobians.values()])
            used = jnp.any(g != 0, axis=(1, 2)).astype(float)
            rows = used[:, None] * rows
            found += [(rows.T @ rows, jnp.einsum("nka,nkb->ab", g, g), jnp.sum(used))]
        return found

    totals = jax.tree.map(lambda a: jnp.sum(a, axis=0), jax.vmap(sums)(X))
    return [(a / number, g / N) for a, g, number in totals]


def check(loss_fn, want, *args, model=None):
    model = mlp() if model is None else model
    got = curvature(loss_fn, model, *(args or (X,)))
    got = [(layer.input_factor, layer.output_factor) for layer in got.layers]
    assert_entries_near(got, want)


#
# First derivatives, in all ways to write them
#


def slope(m, x, v=V):
    return jax.jvp(m, (x,), (v,))[1]


def both(m, x):
    return jnp.concatenate(jax.jvp(m, (x,), (V,)))


def linearised(m, x):
    y, push = jax.linearize(m, x)
    return jnp.concatenate([y, push(V)])


def in_a_loop(m, x):
    """One layer after the other, tangents by hand."""
    v = V
    for i, layer in enumerate(m.layers):
        fn = (lambda x, layer=layer: jnp.tanh(layer(x))) if i < 2 else layer
        x, v = jax.jvp(fn, (x,), (v,))
    return jnp.concatenate([x, v])


@jax.custom_jvp
def own_tanh(x):
    return jnp.tanh(x)


own_tanh.defjvp(
    lambda x, v: (own_tanh(*x), (1 - own_tanh(*x) ** 2) * v[0]), symbolic_zeros=False
)


def of_the_batch(m, x, weights=None):
    y, dot = jax.jvp(jax.vmap(m), (x,), (jnp.broadcast_to(V, x.shape),))
    z = jnp.concatenate([y, dot], axis=-1)
    return kfac.SquaredError(z, jnp.ones_like(z), weights)


def mapped_over_directions(m, x, weights=None):
    """The directions outside of the examples."""
    one = lambda v: jax.jvp(jax.vmap(m), (x,), (jnp.broadcast_to(v, x.shape),))
    y, dot = jax.vmap(one)(V[None])
    z = jnp.concatenate([y[0], dot[0]], axis=-1)
    return kfac.SquaredError(z, jnp.ones_like(z), weights)


FIRST = {
    "jvp": over(both),
    "linearize": over(linearised),
    "layer by layer": over(in_a_loop),
    "jit": over(lambda m, x: jax.jit(lambda x: both(m, x))(x)),
    "checkpoint": over(lambda m, x: both(lambda x: eqx.filter_checkpoint(m)(x), x)),
    "checkpointed": over(lambda m, x: jax.checkpoint(lambda x: both(m, x))(x)),
    "of the batch": of_the_batch,
    "map": over(both, lambda fn: ft.partial(jax.lax.map, fn)),
    "loop": over(both, lambda fn: lambda x: jnp.stack([fn(one) for one in x])),
    "over directions": mapped_over_directions,
}


@ft.cache
def first_order():
    joined = lambda z: jnp.concatenate([z[""], z["v"]])
    return oracle(mlp(), {"v": V}, joined)


@pytest.mark.parametrize("way", FIRST)
def test_first_derivatives(way):
    check(FIRST[way], first_order())


def test_activations_with_a_derivative_of_their_own():
    check(over(both), first_order(), model=mlp(activation=own_tanh))


def with_its_own_rule(m, x):
    """The model, as an argument of a function with a derivative of its own. Derivatives
    in its input are along zeros of all its arrays."""
    params, static = eqx.partition(m, eqx.is_inexact_array)
    plain = lambda params, x: eqx.combine(params, static)(x)
    fn = jax.custom_jvp(plain)
    fn.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return fn(params, x)


def test_models_with_a_derivative_of_their_own():
    outputs = lambda m, x: both(ft.partial(with_its_own_rule, m), x)
    check(over(outputs), first_order())


def test_models_with_a_derivative_of_their_own_in_reverse_mode():
    outputs = lambda m, x: jacobian(ft.partial(with_its_own_rule, m), x)
    check(over(outputs), reverse_oracle(mlp(), balanced=False))


def test_a_derivative_alone():
    """The value of the last layer, nothing looks at: it is no row."""
    check(over(slope), oracle(mlp(), {"v": V}, lambda z: z["v"]))


def test_a_jacobian():
    tangents = {f"v{i}": v for i, v in enumerate(np.eye(D))}
    want = oracle(mlp(), tangents, lambda z: jnp.stack([z[v] for v in tangents]))
    check(over(lambda m, x: jax.jacfwd(m)(x).T.reshape(-1)), want)


#
# Second ones
#


def curved(m, x, v=V):
    return jax.jvp(lambda x: slope(m, x, v), (x,), (v,))[1]


def laplacian(m, x):
    return jnp.sum(jax.vmap(lambda v: curved(m, x, v))(jnp.eye(D)), axis=0)


def by_taylor(m, x):
    """Taylor mode knows no symbolic zeros: the first layer has a row of them."""
    _, (_, second) = jet.jet(m, (x,), ((V, jnp.zeros_like(V)),))
    return second


def through(part, at):
    """Of a part of the network: values, first derivatives, and the Laplacian."""
    x, slopes, total = at
    y, push = jax.linearize(part, x)
    bent = jnp.sum(jax.vmap(lambda v: curved(part, x, v))(slopes), axis=0)
    return y, jax.vmap(push)(slopes), push(total) + bent


def layer_by_layer(m, x):
    """The Laplacian, of which every layer sees one row, not one for each direction."""
    at = x, jnp.eye(D), jnp.zeros_like(x)
    for i, layer in enumerate(m.layers):
        at = through(layer, at if i == 0 else through(jnp.tanh, at))
    return at[-1]


def test_second_derivatives():
    tangents = {"v": V, "w": V}
    check(over(curved), oracle(mlp(), tangents, lambda z: z["vw"]))


def test_a_laplacian_layer_by_layer():
    """The last layer, which is linear in a single row, is exact."""
    tangents = {f"v{i}": v for i, v in enumerate(np.eye(D))}
    check(over(layer_by_layer), oracle(mlp(), tangents, lambda z: z["sum"]))
    collapsed, nested = (
        kfac.verify(over(fn), mlp(), X, fisher=EXACT).layers
        for fn in (layer_by_layer, laplacian)
    )
    assert max(float(np.max(layer.unseen)) for layer in collapsed) < 1e-12
    assert collapsed[-1].error < 1e-12 < nested[-1].error
    value = lambda fn: eqx.filter_jit(over(fn))(mlp(), X).value
    np.testing.assert_allclose(value(layer_by_layer), value(laplacian), rtol=1e-12)


def test_taylor_mode():
    want = oracle(mlp(), {"v": V}, lambda z: z["vv"])
    check(over(by_taylor), want)
    twice = oracle(mlp(), {"v": V, "w": V}, lambda z: z["vw"])
    assert_differs(want, twice, 0.1)  # Two rows in the place of their sum.
    taylor, nested = (eqx.filter_jit(fn)(mlp(), np.ones(D)) for fn in (by_taylor, curved))
    np.testing.assert_allclose(taylor, nested)


def test_a_laplacian():
    names = [(f"v{i}", f"w{i}") for i in range(D)]
    tangents = {n: v for both, v in zip(names, np.eye(D), strict=True) for n in both}
    check(
        over(laplacian),
        oracle(mlp(), tangents, lambda z: sum(z[a + b] for a, b in names)),
    )


#
# Where it is exact
#


#
# Reverse mode: the weight acts transposed on gradients
#


def jacobian(m, x):
    return jax.jacrev(m)(x).reshape(-1)


def by_hand(model, x, zeros):
    """What `jacobian` computes, with something added to the results of each layer, and to
    those of its transpose; and what either is given, one vector for each component of the
    model's output in the second case."""
    layers, h, inputs, gradients = model.layers, x, [], []
    for layer, (zero, _) in zip(layers, zeros, strict=True):
        h = jnp.tanh(h) if inputs else h
        inputs.append(h)
        h = layer.weight @ h + layer.bias + zero
    g = jnp.eye(K)
    for i in reversed(range(len(layers))):
        gradients.insert(0, g)
        g = g @ layers[i].weight + zeros[i][1]
        g = g * (1 - inputs[i] ** 2)[None] if i > 0 else g
    return g.reshape(-1), (inputs, gradients)


@eqx.filter_jit
def reverse_rows(model):
    """Of all examples and layers: inputs and the gradients at outputs; gradients at
    outputs, to which the transposed weight is applied, and the gradients behind it."""
    sizes = [layer.weight.shape for layer in model.layers]
    zeros = [(jnp.zeros(d_out), jnp.zeros((K, d_in))) for d_out, d_in in sizes]

    def of_example(x):
        run = lambda zeros: by_hand(model, x, zeros)
        jacobians, (inputs, gradients) = jax.jacobian(run, has_aux=True)(zeros)
        return inputs, gradients, jacobians

    return jax.vmap(of_example)(X)


def moments(a, weights=1.0):
    a = a.reshape(-1, a.shape[-1])
    return np.einsum("ra,rb,r->ab", a, a, np.broadcast_to(weights, len(a)))


def reverse_oracle(model, balanced):
    found = []
    for h, z, (g, c) in zip(*reverse_rows(model), strict=True):
        h, z, g, c = map(np.asarray, (h, z, g, c))  # `c`: [N, outputs, K, d_in].
        used = np.any(g != 0, axis=(1, 2))
        h = np.append(h, np.ones((N, 1)), axis=1) * used[:, None]
        c = np.append(c, np.zeros((*c.shape[:-1], 1)), axis=-1)
        if not balanced:
            of_values = moments(g) / N, moments(h) / max(used.sum(), 1)
            of_gradients = moments(z) / (N * K), moments(c) / N
            both = of_values, of_gradients
            G = sum(np.trace(A) * G for G, A in both)
            A = sum(np.trace(G) * A for G, A in both) / np.trace(G)
            unit = np.trace(of_values[1]) or 1.0
            G, A = G / unit, A * unit
        else:
            h = np.broadcast_to(h[:, None], (*g.shape[:2], h.shape[-1]))
            z = np.broadcast_to(z[:, None], (*c.shape[:3], z.shape[-1]))
            size = lambda a: (a**2).sum(-1).ravel()
            A = moments(h, size(g)) + moments(c, size(z))
            A = A / (size(h) @ size(g) + size(c) @ size(z))
            G = (moments(g, size(h)) + moments(z, size(c))) / N
        found.append((A, G))
    return found


@pytest.mark.parametrize("sharing", [kfac.Joint(), kfac.Expand(), kfac.TensorNormal()])
def test_reverse_mode(sharing):
    model = mlp(kfac.Kronecker(sharing))
    want = reverse_oracle(model, sharing.balanced)
    check(over(jacobian), want, model=model)
    other = reverse_oracle(model, not sharing.balanced)
    assert_differs(want[:-1], other[:-1], 0.05)


def of_the_sum(m, x):
    """The gradient of a sum over the batch, which no `vmap` is around."""
    z = jax.grad(lambda x: jnp.sum(jax.vmap(m)(x)[:, 0]))(x)
    return kfac.SquaredError(z, jnp.ones_like(z))


# The gradient of the first component, in all ways to write it.
gradient = lambda m, x: jax.grad(lambda x: m(x)[0])(x)
BACKWARD = {
    "grad": over(gradient),
    "of the batch": of_the_sum,
    "vjp": over(lambda m, x: jax.vjp(m, x)[1](np.eye(K)[0])[0]),
    "transposed": over(
        lambda m, x: jax.linear_transpose(jax.linearize(m, x)[1], x)(np.eye(K)[0])[0]
    ),
    "jit": over(lambda m, x: jax.jit(lambda x: gradient(m, x))(x)),
    "checkpoint": over(lambda m, x: gradient(lambda x: eqx.filter_checkpoint(m)(x), x)),
    "checkpointed": over(lambda m, x: jax.checkpoint(lambda x: gradient(m, x))(x)),
    "map": over(gradient, lambda fn: ft.partial(jax.lax.map, fn)),
    "loop": over(gradient, lambda fn: lambda x: jnp.stack([fn(one) for one in x])),
}


@pytest.mark.parametrize("way", BACKWARD)
def test_ways_to_write_a_gradient(way):
    model = mlp(kfac.Kronecker(kfac.Expand()))
    want = curvature(BACKWARD["grad"], model, X)
    assert_entries_near(curvature(BACKWARD[way], model, X), want)


def twice_reversed(m, x):
    return jax.jacrev(lambda x: gradient(m, x))(x).reshape(-1)


def hessian(m, x):
    return jax.hessian(lambda x: m(x)[0])(x).reshape(-1)


def reversed_slope(m, x):
    return jax.grad(lambda x: slope(m, x)[0])(x)


def energy_and_gradient(m, x):
    u = lambda x: jnp.sum(m(x) ** 2)
    return jnp.append(*jax.value_and_grad(u)(x)[::-1])


@eqx.filter_jit
def gauss_newton(loss_fn, model):
    """Of every layer, the dense block: its canonical matrix, row by row."""
    plain = kfac.revert(model)
    params, static = eqx.partition(plain, eqx.is_inexact_array)

    def outputs(params):
        return loss_fn(eqx.combine(params, static), X).outputs.reshape(-1)

    jacobians = jax.jacobian(outputs)(params)
    found = []
    for layer in jacobians.layers:
        bias = [] if layer.bias is None else [layer.bias[..., None]]
        matrix = jnp.concatenate([layer.weight, *bias], axis=-1)
        flat = matrix.reshape(matrix.shape[0], -1)
        found.append(flat.T @ flat / N)
    return found


@eqx.filter_jit
def blocks(loss_fn, model):
    found = kfac.curvature(loss_fn, fisher=EXACT)(model, X)
    layers = zip(model.layers, found.layers, strict=True)
    return [layer.tag.block.operator(f).as_matrix() for layer, f in layers]


REVERSE = [jacobian, twice_reversed, hessian, reversed_slope, energy_and_gradient]


@pytest.mark.parametrize("outputs", [both, slope, laplacian, by_taylor, *REVERSE])
def test_full_blocks_are_exact(outputs):
    model = mlp(kfac.Full())
    assert_entries_near(blocks(over(outputs), model), gauss_newton(over(outputs), model))


@pytest.mark.parametrize("number", [N, N - 1])
@pytest.mark.parametrize("inside", [True, False])
def test_directions_are_no_examples(inside, number):
    """Also if they are mapped over outside of the examples, and as many as these."""
    directions = normal(number, D, seed=1)
    along = lambda m, v: jax.vmap(lambda x: slope(m, x, v))

    def loss_fn(m, x):
        if inside:
            each = lambda x: jax.vmap(lambda v: slope(m, x, v))(directions)
            z = jax.vmap(each)(x)
        else:
            z = jax.vmap(lambda v: along(m, v)(x), out_axes=1)(directions)
        return kfac.SquaredError(z.reshape(len(x), -1), jnp.zeros((len(x), K * number)))

    for block in (kfac.Full(), kfac.Diagonal()):
        got, want = blocks(loss_fn, mlp(block)), gauss_newton(loss_fn, mlp())
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.diag(a), np.diag(b), atol=1e-12)


@pytest.mark.parametrize("outputs", [both, slope, jacobian])
def test_deep_linear_networks(outputs):
    model = mlp(activation=lambda x: x)
    got, want = blocks(over(outputs), model), gauss_newton(over(outputs), model)
    assert_entries_near(got, want)
    curved = mlp()
    got, want = blocks(over(outputs), curved), gauss_newton(over(outputs), curved)
    assert_entries_near(got[-1], want[-1])  # The last layer is.
    assert_differs(got[:-1], want[:-1], 0.05)


#
# Of other layers
#


class Net(eqx.Module):
    """A sequence of three tokens, through one layer after the other."""

    layers: list

    def __call__(self, x):
        h = jnp.tile(jnp.concatenate([x, x**2])[:4], (3, 1)) * jnp.arange(1.0, 4)[:, None]
        for layer in self.layers:
            h = layer(h) if isinstance(layer, (Recurrent, Heads)) else jax.vmap(layer)(h)
            h = jnp.tanh(h)
        return jnp.mean(h, axis=0)[:K]


class Recurrent(eqx.Module):
    cell: eqx.Module

    def __call__(self, h):
        body = lambda carry, x: (self.cell(x, carry),) * 2
        return jax.lax.scan(body, jnp.zeros(4), h)[1]


class Heads(eqx.Module):
    attention: eqx.Module

    def __call__(self, h):
        return self.attention(h, h, h)


class Convolved(eqx.Module):
    conv: eqx.Module

    def __call__(self, h):
        return self.conv(h[None])[0] if self.conv.weight.ndim == 3 else h


LAYERS = {
    "linear": lambda k: eqx.nn.Linear(4, 4, key=k),
    "no bias": lambda k: eqx.nn.Linear(4, 4, use_bias=False, key=k),
    "norm": lambda k: eqx.nn.LayerNorm(4),
    "prelu": lambda k: eqx.nn.PReLU(0.3),
    "conv": lambda k: Convolved(eqx.nn.Conv1d(1, 1, 3, padding=1, key=k)),
    "reflect": lambda k: Convolved(
        eqx.nn.Conv1d(1, 1, 3, padding=1, padding_mode="REFLECT", key=k)
    ),
    "gru": lambda k: Recurrent(eqx.nn.GRUCell(4, 4, key=k)),
    "attention": lambda k: Heads(eqx.nn.MultiheadAttention(2, 4, key=k)),
    "weight norm": lambda k: eqx.nn.WeightNorm(eqx.nn.Linear(4, 4, key=k)),
}


def net(name, block):
    make = lambda: Net([LAYERS["linear"](KEYS[3]), LAYERS[name](KEYS[4])])
    return kfac.convert(eqx.filter_jit(make)(), block)


def accepted(loss_fn, model):
    """What `verify` says of a model; it does not refuse what the other tools refuse."""
    eqx.filter_eval_shape(kfac.curvature(loss_fn, fisher=EXACT), model, X)
    return kfac.verify(loss_fn, model, X)


@pytest.mark.parametrize("outputs", [both, energy_and_gradient])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_seen(name, outputs):
    """In full, its block is the dense one; and all uses pass through tags."""
    report = accepted(over(outputs), net(name, kfac.Full()))
    for found in report.layers:
        assert np.all(found.unseen <= 1e-12)
        exact = name not in ("norm", "weight norm") or "[1]" not in found.path
        assert np.all(found.error <= 1e-10) == exact


class Pair(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("transposed", [False, True])
def test_shared_weights_are_seen_in_reverse_mode(transposed):
    """Also where a layer that does not own its weight has a bias."""
    layers = zip(KEYS[3:5], (False, True), strict=True)
    pair = Pair(*(eqx.nn.Linear(D, D, use_bias=bias, key=key) for key, bias in layers))
    weight = lambda m: m.first.weight.T if transposed else m.first.weight
    shared = eqx.nn.Shared(pair, where=lambda m: m.second.weight, get=weight)
    outputs = lambda m, x: energy_and_gradient(m(), x)
    report = accepted(over(outputs), kfac.convert(shared))
    assert all(np.all(found.unseen <= 1e-12) for found in report.layers)
    if not transposed:
        full = kfac.verify(over(outputs), kfac.convert(shared, kfac.Full()), X)
        assert all(np.all(found.error <= 1e-10) for found in full.layers)


def test_expanded_rows_are_no_dense_block():
    expanded = kfac.verify(over(both), net("linear", kfac.Kronecker()), X)
    assert all(np.all(found.unseen <= 1e-12) for found in expanded.layers)
    assert max(np.max(found.error) for found in expanded.layers) > 1e-3


BLOCKS = [kfac.EKFAC(), kfac.TNT(), kfac.Diagonal(), kfac.Identity()]


@ft.cache
def of_kronecker_blocks():
    return kfac.verify(over(both), mlp(), X)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_traces_are_exact(block):
    """Of blocks that square the gradients of examples: values and derivatives add up
    before."""
    loss_fn, model = over(both), mlp(block)
    if isinstance(block, kfac.EKFAC):
        report = kfac.verify(loss_fn, model, X)
        pairs = zip(report.layers, of_kronecker_blocks().layers, strict=True)
        assert all(a.error < b.error for a, b in list(pairs)[:2])
        return
    for got, want in zip(blocks(loss_fn, model), gauss_newton(loss_fn, model)):
        np.testing.assert_allclose(np.trace(got), np.trace(want), rtol=1e-12)


def test_a_bias_alone_has_no_derivative():
    """And weights alone have no ones."""
    model = mlp()
    for frozen in ("weight", "bias"):
        where = lambda m, frozen=frozen: getattr(m.layers[1], frozen)
        trained = eqx.tree_at(where, model, None)
        rest = where(model)

        def loss_fn(m, x, where=where, rest=rest):
            return over(both)(eqx.tree_at(where, m, rest, is_leaf=_is_none), x)

        whole = curvature(over(both), model, X).layers[1]
        got = curvature(loss_fn, trained, X).layers[1]
        if frozen == "bias":
            whole_input = np.asarray(whole.input_factor)
            assert_entries_near(got.input_factor, whole_input[:-1, :-1])
            assert_entries_near(got.output_factor, whole.output_factor)
        else:
            exact = np.asarray(gauss_newton(over(both), model)[1])
            exact = exact.reshape(H, H + 1, H, H + 1)
            assert_entries_near(got.output_factor, exact[:, -1, :, -1])
            assert_entries_near(got.input_factor, np.ones((1, 1)))


def _is_none(node):
    return node is None


#
# Together with all else
#


@pytest.mark.parametrize("outputs", [both, energy_and_gradient])
def test_weights_of_examples(outputs):
    weights = np.array([1, 0, 2, 0, 1, 0])
    repeated = np.asarray(X)[[0, 2, 2, 4]]
    want = curvature(over(outputs), mlp(), repeated)
    assert_entries_near(curvature(over(outputs), mlp(), X, weights), want)
    assert_differs(curvature(over(outputs), mlp(), X), want, 0.1)


@pytest.mark.parametrize("outputs", [both, energy_and_gradient])
def test_micro_batches(outputs):
    optimizer = plain_kfac(0.1, fisher=EXACT, by_rows=True)
    step = eqx.filter_jit(ft.partial(optimizer.step, over(outputs)))
    state, key = optimizer.init(mlp()), KEYS[0]
    steps = [step(mlp(), state, X, key=key, micro_batches=n)[0] for n in (1, 3)]
    assert_entries_near(*steps)


@pytest.mark.parametrize("outputs", [both, energy_and_gradient])
@pytest.mark.parametrize("inside", [False, True])
def test_devices(inside, outputs):
    mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2])
    take = lambda m, x: kfac.curvature(over(outputs), fisher=EXACT)(m, x)
    x = jax.device_put(X, NamedSharding(mesh, P("batch")))
    with jax.set_mesh(mesh):
        if inside:
            params, static = eqx.partition(mlp(), eqx.is_array)
            whole = take
            local = lambda p, x: whole(eqx.combine(p, static), x)
            specs = P(), P("batch")
            take = lambda m, x: jax.shard_map(local, in_specs=specs, out_specs=P())(
                params, x
            )
        got = eqx.filter_jit(take)(mlp(), x)
    assert_entries_near(got, curvature(over(outputs), mlp(), X))


@pytest.mark.parametrize("outputs", [both, jacobian])
def test_an_optimizer_trains_through_them(outputs):
    losses = losses_of_steps(over(outputs), 40)
    assert losses[-1] < 0.1 * losses[0]


def losses_of_steps(loss_fn, number):
    optimizer, model = kfac.KFAC(), mlp()
    state = optimizer.init(model)
    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    losses = []
    for i in range(number):
        model, state, info = step(model, state, X, key=jr.key(i))
        losses.append(info.loss)
    return losses


#
# Gradients with respect to the model, within the loss
#


def adapted(m, x, y, first_order):
    """After a step of gradient descent on one example."""
    slopes = eqx.filter_grad(lambda m: jnp.sum((m(x) - y) ** 2))(m)
    if first_order:
        slopes = jax.lax.stop_gradient(slopes)
    return eqx.apply_updates(m, jax.tree.map(lambda g: -0.1 * g, slopes))


def meta_learning(first_order, prepare=lambda m: m):
    """Every task has an example to adapt to, and two others."""

    def loss_fn(m, x):
        targets = jnp.sin(x[:, :K])
        others = jnp.stack([x + 1, x - 1], axis=1)

        def of_task(x, y, others):
            return jax.vmap(adapted(prepare(m), x, y, first_order))(others).reshape(-1)

        z = jax.vmap(of_task)(x, targets, others)
        return kfac.SquaredError(z, jnp.zeros_like(z))

    return loss_fn


@pytest.mark.parametrize("first_order", [True, False])
def test_meta_learning(first_order):
    collect = kfac.value_grad_and_curvature(meta_learning(first_order), EXACT)
    value, slopes, found = eqx.filter_jit(collect)(mlp(), X)
    plain = meta_learning(first_order, kfac.revert)
    want = eqx.filter_value_and_grad(lambda m, x: plain(m, x).value)
    assert_entries_near((value, slopes), eqx.filter_jit(want)(mlp(), X))
    report = kfac.verify(meta_learning(first_order), mlp(), X)
    assert all(np.all(layer.unseen <= 1e-12) for layer in report.layers)
    other = curvature(meta_learning(not first_order), mlp(), X)
    assert_differs(found, other, 0.01)
    refuses(meta_learning(first_order), mlp(kfac.Full()), ".layers[0]", "Full")


def test_the_last_layer_of_first_order_meta_learning_is_exact():
    """A linear layer, of two rows whose losses are independent."""
    *_, last = kfac.verify(
        meta_learning(True), mlp(kfac.Kronecker(kfac.Expand())), X
    ).layers
    assert last.unseen <= 1e-12
    *_, other = kfac.verify(meta_learning(False), mlp(), X).layers
    assert other.error > 0.01


def test_rows_of_meta_learning_are_not_captured():
    with pytest.raises(TypeError, match="rows cannot be captured"):
        kfac.analysis.capture(meta_learning(True))(mlp(), X)


def test_meta_learning_trains():
    losses = losses_of_steps(meta_learning(False), 30)
    assert losses[-1] < 0.2 * losses[0]


#
# What is refused
#


class Squared(kfac.form.Dense):
    """A layer of features that are not linear in its input, whose author has not said
    that they are."""

    linear = False


def refuses(loss_fn, model, *words):
    with pytest.raises(ValueError) as error:
        kfac.curvature(loss_fn, fisher=EXACT)(model, X)
    assert all(word in str(error.value) for word in words), error.value


def test_a_direction_that_is_the_weight_itself_is_refused():
    """Which reaches the losses by way of the layer's input, too."""
    outputs = lambda m, x: slope(m, x, m.layers[0].weight[0])
    refuses(over(outputs), mlp(), ".layers[0]", "another way")


class Curved(eqx.Module):
    inner: eqx.Module

    def __call__(self, x):
        carry = [jnp.zeros(K)] if isinstance(self.inner, eqx.nn.GRUCell) else []
        return jnp.tanh(self.inner(x, *carry))


# Layers that are tagged at a zero, through which no gradient of their results passes.
AT_ZERO = {
    ".inner['weight']": lambda: eqx.nn.WeightNorm(eqx.nn.Linear(D, K, key=KEYS[3])),
    ".inner": lambda: eqx.nn.GRUCell(D, K, key=KEYS[3]),
}


def at_zero(path, *block):
    return kfac.convert(eqx.filter_jit(lambda: Curved(AT_ZERO[path]()))(), *block)


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev, jax.hessian])
@pytest.mark.parametrize("path", AT_ZERO)
def test_layers_tagged_at_a_zero(path, jacobian):
    outputs = lambda m, x: jacobian(lambda x: m(x)[0])(x).reshape(-1)
    report = accepted(over(outputs), at_zero(path))
    assert all(np.all(layer.unseen <= 1e-12) for layer in report.layers)


class Forgetful(kfac.Kronecker):
    """A block whose author has not said that it knows of derivatives."""

    derivatives = False


class Forward(kfac.Kronecker):
    """A block whose author has not said that it knows of reverse mode."""

    reverse_derivatives = False


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("path", AT_ZERO)
def test_blocks_that_do_not_know_of_derivatives_of_layers_tagged_at_a_zero(
    path, jacobian
):
    outputs = lambda m, x: jacobian(lambda x: m(x)[0])(x)
    refuses(over(outputs), at_zero(path, Forgetful()), path, "Forgetful")
    # A derivative of which only the sign matters is not trained through.
    signs = lambda m, x: m(x + jnp.sign(outputs(m, x)[:D]))
    curvature(over(signs), at_zero(path, Forgetful()), X)


REDUCED = kfac.Kronecker(kfac.Reduce())
BACKWARDS_UNKNOWN = [Forward(), REDUCED, kfac.EKFAC(kfac.Reduce())]


@pytest.mark.parametrize("jacobian", [jax.jacrev, jax.hessian])
@pytest.mark.parametrize("block", BACKWARDS_UNKNOWN, ids=lambda b: type(b).__name__)
def test_blocks_that_do_not_know_of_reverse_mode_are_refused(block, jacobian):
    outputs = lambda m, x: jacobian(lambda x: m(x)[0])(x).reshape(-1)
    refuses(over(outputs), mlp(block), ".layers[0]", type(block).__name__, "jax.jacfwd")
    curvature(over(lambda m, x: jax.jacfwd(m)(x).reshape(-1)), mlp(block), X)


@pytest.mark.parametrize("path", AT_ZERO)
def test_layers_tagged_at_a_zero_and_blocks_that_do_not_know_of_reverse_mode(path):
    outputs = lambda m, x: jax.grad(lambda x: m(x)[0])(x)
    refuses(over(outputs), at_zero(path, Forward()), path, "Forward")


def test_the_transpose_of_a_layer_itself_is_refused():
    model = mlp(use_bias=False)

    def outputs(m, x):
        layer = m.layers[0]
        return jax.linear_transpose(layer, x)(jnp.tanh(layer(x)))[0]

    refuses(over(outputs), model, ".layers[0]", "jax.vjp")
    vjp = lambda m, x: jax.vjp(m.layers[0], x)[1](jnp.tanh(m.layers[0](x)))[0]
    model = eqx.tree_at(lambda m: m.layers, model, model.layers[:1])
    report = kfac.verify(over(vjp), model, X)
    assert all(np.all(found.unseen <= 1e-12) for found in report.layers)


def test_a_direction_in_the_weight_that_is_the_weight_itself_is_refused():
    def outputs(m, x):
        layer, *_ = m.layers
        of_weight = lambda w: eqx.tree_at(lambda layer: layer.weight, layer, w)(x)
        return m(x) + jax.jvp(of_weight, (layer.weight,), (layer.weight,))[1][:K]

    refuses(over(outputs), mlp(), ".layers[0]", "another way")


def test_weights_that_are_used_beside_their_layer_are_refused_in_reverse_mode():
    def outputs(m, x):
        return jax.grad(lambda x: m(x)[0] + jnp.sum(m.layers[0].weight @ x))(x)

    refuses(over(outputs), mlp(), ".layers[0]", "another way")
    transposed = lambda m, x: gradient(m, x) @ m.layers[0].weight.T
    refuses(over(transposed), mlp(), ".layers[0]", "another way")


def test_centred_products_know_nothing_of_reverse_mode():
    with pytest.raises(ValueError, match="reverse mode"):
        kfac.curvature(over(jacobian), fisher=kfac.Centred())(mlp(), X)
    centred = lambda block: kfac.curvature(over(jacobian), fisher=kfac.Centred())(
        mlp(block), X
    )
    full, exact = centred(kfac.Full()), curvature(over(jacobian), mlp(kfac.Full()), X)
    assert_differs(full, exact, 0.01)


def test_forms_and_blocks_that_do_not_know_of_derivatives_are_refused():
    layer = mlp().layers[1]
    other = eqx.tree_at(
        lambda m: m.layers[1].tag, mlp(), kfac.Tag(Squared(), layer.tag.block)
    )
    refuses(over(both), other, ".layers[1]", "linear")
    assert_entries_near(curvature(over(lambda m, x: m(x)), other, X),
                curvature(over(lambda m, x: m(x)), mlp(), X))  # fmt: skip


def test_rows_of_derivatives_are_not_captured():
    """Also of a layer that only they pass through."""
    for outputs in (both, slope):
        with pytest.raises(ValueError, match="derivative"):
            kfac.analysis.capture(over(outputs))(mlp(), X)
