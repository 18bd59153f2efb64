"""Masks of losses whose rows mix behind a layer: which inputs count, and by how much."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import arrays, assert_differs, assert_near, collect, normal
from .plain import plain_kfac


B, T, D, K = 4, 5, 3, 4
FISHERS = pytest.mark.parametrize(
    "fisher", [kfac.Exact(), kfac.Empirical()], ids=["exact", "empirical"]
)
LABELLED = np.array([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
LENGTHS = np.array([3, 5, 1, 4])
PADDED = (np.arange(T) < LENGTHS[:, None]).astype(int)
TOKENS, TARGETS = normal(B, T, D), np.random.default_rng(2).integers(K, size=(B, T))


class Attention(eqx.Module):
    """Two layers before positions mix, and two behind."""

    layers: list
    causal: bool = eqx.field(static=True)

    def __init__(self, causal=False, block=kfac.Kronecker(kfac.Expand())):
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [(D, D), (D, D), (D, D), (D, K)]
        self.layers = [
            kfac.Linear(i, o, key=k, block=block)
            for (i, o), k in zip(sizes, keys, strict=True)
        ]
        self.causal = causal

    def __call__(self, x, shifts=(0.0, 0.0, 0.0, 0.0)):
        """Of one sequence. The shifts are added to the layers' outputs."""

        def layer(i, x):
            return jax.vmap(self.layers[i])(x) + shifts[i]

        h = self._mixed(x, layer(0, x), layer(1, x))
        h = x + jnp.tanh(layer(2, h))
        return layer(3, h)

    def inputs(self, x):
        """The inputs of every layer."""
        each = [jax.vmap(layer) for layer in self.layers]
        h = self._mixed(x, each[0](x), each[1](x))
        return x, x, h, x + jnp.tanh(each[2](h))

    def _mixed(self, x, queries, keys):
        scores = queries @ keys.T
        if self.causal:
            scores = jnp.where(np.tril(np.ones((T, T), bool)), scores, -jnp.inf)
        return x + jax.nn.softmax(scores) @ jnp.tanh(x)


def tokens(model, x, y, weights=None):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights)


class Graph(eqx.Module):
    """Two graph convolutions: nodes of a ring see their neighbour on one side."""

    layers: list

    def __init__(self, block=kfac.Kronecker(kfac.Expand())):
        keys = jax.random.split(jax.random.key(1))
        sizes = [(D, D), (D, K)]
        self.layers = [
            kfac.Linear(i, o, key=k, block=block)
            for (i, o), k in zip(sizes, keys, strict=True)
        ]

    def __call__(self, x, shifts=(0.0, 0.0)):
        first, second = (jax.vmap(layer) for layer in self.layers)
        mixed = lambda z: (z + 0.5 * jnp.roll(z, 1, axis=0)) / 1.5
        return mixed(second(jnp.tanh(mixed(first(x) + shifts[0]))) + shifts[1])

    def inputs(self, x):
        z = jax.vmap(self.layers[0])(x)
        return x, jnp.tanh((z + 0.5 * jnp.roll(z, 1, axis=0)) / 1.5)


def nodes(model, x, y, weights=None):
    return kfac.SoftmaxCrossEntropy(model(x), y, weights)


NODES, CLASSES = normal(9, D, seed=3), np.random.default_rng(4).integers(K, size=9)
FEW = np.array([0, 0, 0, 1, 0, 0, 1, 0, 0])


def found(loss_fn, fisher, model, *args, key=None):
    return collect(loss_fn, fisher, model, *args, key=key).layers


def factors(layers):
    return [(layer.input_factor, layer.output_factor) for layer in layers]


@ft.partial(jax.jit, static_argnums=0)
def gradients(make, x, y, weights):
    """Of the root-weighted losses, at the outputs of all layers; and the layers'
    inputs."""
    model = kfac.revert(make())
    widths = [layer.weight.shape[0] for layer in model.layers]
    zeros = [jnp.zeros((len(x), width)) for width in widths]

    def total(shifts):
        z = model(x, shifts)
        losses = jax.nn.logsumexp(z, axis=-1) - z[jnp.arange(len(x)), y]
        return jnp.sum(jnp.sqrt(weights) * losses)

    return jax.grad(total)(zeros), model.inputs(x)


def counted(w, g):
    """How much each of the rows of one example counts."""
    own = [t for t in range(len(w)) if w[t] > 0]
    sizes = [float(v @ v) for v in g]
    mean = sum(w[t] for t in own) / len(own)
    there = sum(sizes[t] for t in own)
    if there == 0:
        return [w[t] if t in own else mean * (sizes[t] > 0) for t in range(len(w))]
    per_size = sum(w[t] for t in own) / there
    return [w[t] if t in own else min(mean, sizes[t] * per_size) for t in range(len(w))]


def expected(make, examples, how=counted):
    """The factors by loops over rows, with the empirical Fisher; `how` much rows
    count."""
    pulled = [[list(map(np.asarray, a)) for a in gradients(make, *e)] for e in examples]
    number, results = sum(np.sum(w) for *_, w in examples), []
    for i in range(len(pulled[0][0])):
        A, G, rows = 0.0, 0.0, 0.0
        for (g, x), (_, _, w) in zip(pulled, examples, strict=True):
            for count, v, u in zip(how(w, g[i]), g[i], x[i], strict=True):
                u = np.append(u, 1.0)
                A, G, rows = A + count * np.outer(u, u), G + np.outer(v, v), rows + count
        results.append((A / rows, G / number))
    return results


@pytest.mark.parametrize("weights", [LABELLED, PADDED, LABELLED * [[1], [2], [0.5], [3]]])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_count_by_their_gradients(weights, causal):
    make, weights = ft.partial(Attention, causal), weights.astype(float)
    examples = list(zip(TOKENS, TARGETS, weights, strict=True))
    got = found(tokens, kfac.Empirical(), make(), TOKENS, TARGETS, weights)
    assert_near(factors(got), expected(make, examples))
    mixing = got[1].input_factor, got[3].input_factor
    by_weight = expected(make, examples, lambda w, g: w)
    if causal and np.array_equal(weights, PADDED):
        assert_near(factors(got), by_weight)
    elif not causal:
        assert_differs(mixing[0], by_weight[1][0])
    alike = expected(make, examples, lambda w, g: np.ones(T))
    assert_differs(mixing[1], alike[3][0])
    # Behind the last mixing, positions count by their weights alone.
    assert_near(mixing[1], by_weight[3][0])


def test_rows_of_a_graph():
    weights = FEW.astype(float)
    got = found(nodes, kfac.Empirical(), Graph(), NODES, CLASSES, weights)
    examples = [(NODES, CLASSES, weights)]
    assert_near(factors(got), expected(Graph, examples))
    for how in (lambda w, g: w, lambda w, g: np.ones(9)):
        assert_differs(got[0].input_factor, expected(Graph, examples, how)[0][0])


@FISHERS
def test_nodes_that_no_labelled_node_sees_count_for_nothing(fisher):
    fisher = kfac.Exact(0) if isinstance(fisher, kfac.Exact) else fisher
    got, other, seen = (
        factors(found(nodes, fisher, Graph(), x, CLASSES, FEW))
        for x in (NODES, changed([0, 7, 8]), changed([2]))
    )
    assert_near(got, other)
    assert_differs(got, seen)


def changed(index):
    x = np.array(NODES)
    x[index] = 2.0
    return x


BLOCKS = pytest.mark.parametrize(
    "block",
    [kfac.Kronecker(), kfac.Kronecker(kfac.Reduce()), kfac.EKFAC()],
    ids=["expand", "reduce", "ekfac"],
)


@BLOCKS
@FISHERS
def test_examples_are_repeated_and_removed(block, fisher):
    model, counts = Attention(block=block), np.array([2, 1, 0, 3])
    weights = (LABELLED * counts[:, None]).astype(float)
    got = found(tokens, fisher, model, TOKENS, TARGETS, weights)
    repeated = [np.repeat(v, counts, axis=0) for v in (TOKENS, TARGETS, LABELLED)]
    again = found(tokens, fisher, model, *repeated)
    once = found(tokens, fisher, model, TOKENS, TARGETS, LABELLED)
    for i in (0, 2, 3):  # Keys may be shifted: reduced, their gradients are zero.
        assert_near(factors(got)[i], factors(again)[i])
        assert_differs(factors(got)[i], factors(once)[i])


@FISHERS
def test_micro_batches(fisher):
    optimizer, model = plain_kfac(1e-3, 0.0, fisher=fisher), Attention()
    args = tokens, model, optimizer.init(model), TOKENS, TARGETS, LABELLED

    def curvature(parts):
        step = eqx.filter_jit(optimizer.step)
        return arrays(step(*args, micro_batches=parts)[1].curvature)

    whole = curvature(1)
    assert_near(curvature(2), whole)
    assert_near(curvature(4), whole)


def test_equal_weights_are_none():
    ones = np.ones((B, T))
    got = found(tokens, kfac.Exact(), Attention(), TOKENS, TARGETS, ones)
    want = found(tokens, kfac.Exact(), Attention(), TOKENS, TARGETS)
    assert_near(factors(got), factors(want))


@FISHERS
def test_padding_behind_causal_attention_may_be_anything(fisher):
    garbage = np.where(PADDED[..., None] > 0, TOKENS, 3.0)
    got, other = (
        factors(found(tokens, fisher, Attention(True), x, TARGETS, PADDED))
        for x in (TOKENS, garbage)
    )
    assert_near(got, other)
    mixed = found(tokens, fisher, Attention(), garbage, TARGETS, PADDED)
    assert_differs(got, factors(mixed))


def test_no_key_is_needed_to_know_which_inputs_count():
    """Of the exact Fisher, which pulls back one column after the other, no single one
    tells."""
    got = found(tokens, kfac.Exact(), Attention(), TOKENS, TARGETS, LABELLED)
    key = jax.random.key(0)
    many = kfac.CurvatureProp(16)
    sampled = found(tokens, many, Attention(), TOKENS, TARGETS, LABELLED, key=key)
    for ours, theirs in zip(got, sampled, strict=True):
        a, b = np.asarray(ours.input_factor), np.asarray(theirs.input_factor)
        assert np.vdot(a, b) > 0.95 * np.linalg.norm(a) * np.linalg.norm(b)
