"""Curvature through every transformation of JAX. However a model is applied to its data,
the loss, the gradient and the factors are those of one plain `vmap` over the batch."""

import functools as ft
import operator

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._curvature._batch import Batch
from eqx_kfac._tag import fill_tags

from .helpers import (
    arrays,
    assert_differs,
    assert_near,
    equations_of,
    expanded,
    member,
    normal,
    only_arrays,
)
from .plain import plain_kfac


BATCH, D_IN, HIDDEN, D_OUT = 6, 4, 5, 3
WEIGHTS = np.array([1.0, 2.0, 0.0, 0.5, 0.0, 3.0])


#
# Helpers
#


def results(loss_fn, model, *args, **kwargs):
    """The loss, its gradient, and the factors of two Fisher estimates; NumPy's arrays."""
    return jax.device_get(runner(loss_fn)(model, args, kwargs))


@ft.cache
def runner(loss_fn):
    """(One function for every loss function: most of the references are of one.)"""

    @eqx.filter_jit
    def run(model, args, kwargs):
        batch = Batch(loss_fn, args, kwargs).linearise(model)
        value, grads, *_ = batch.value_and_grads()
        fishers = kfac.Exact(), kfac.Empirical()
        return value, grads, *(batch.curvature(fisher, None) for fisher in fishers)

    return run


def stack(trees):
    """The arrays of several trees, along a new leading axis."""
    return jtu.tree_map(lambda *xs: np.stack(xs), *map(only_arrays, trees))


def scale_factors(curvature, inputs, outputs):
    """Curvature with its input and output factors multiplied."""

    def scale(f):
        return kfac.factors.KroneckerFactors(
            f.input_factor * inputs, f.output_factor * outputs, f.l2
        )

    is_factors = lambda x: isinstance(x, kfac.factors.KroneckerFactors)
    return jtu.tree_map(scale, curvature, is_leaf=is_factors)


@ft.cache
def make_mlp(seed=0, activation=jnp.tanh, depth=1):
    mlp = eqx.nn.MLP(D_IN, D_OUT, HIDDEN, depth, activation, key=jr.key(seed))
    return kfac.convert(mlp, kfac.Kronecker(kfac.Expand()))


def make_linear(d_in, d_out, seed):
    return kfac.Linear(d_in, d_out, key=jr.key(seed))


def data(*leading, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(*leading, D_IN)), rng.integers(0, D_OUT, leading)


@ft.cache
def cross_entropy(forward):
    def loss_fn(model, x, y, weights=None):
        return kfac.SoftmaxCrossEntropy(forward(model, x), y, weights)

    return loss_fn


def vmapped(model, x):
    return jax.vmap(model)(x)


plain_loss = cross_entropy(vmapped)


@ft.cache
def plain(weighted=False):
    """What everything is compared with."""
    return results(plain_loss, make_mlp(), *data(BATCH), WEIGHTS if weighted else None)


def test_weights_change_everything():
    assert_differs(plain(True)[0], plain()[0])
    assert_differs(plain(True)[1], plain()[1])
    for layer, unweighted in zip(plain(True)[2].layers, plain()[2].layers):
        assert_differs(layer.input_factor, unweighted.input_factor)
        assert_differs(layer.output_factor, unweighted.output_factor)


def test_weights_are_repetition_and_zero_is_absence():
    x, y = data(BATCH)
    weights = np.array([1, 2, 0, 1, 0, 3])
    index = np.array([0, 1, 1, 3, 5, 5, 5])
    got = results(plain_loss, make_mlp(), x, y, weights)
    want = results(plain_loss, make_mlp(), x[index], y[index])
    assert_near(got[:3], want[:3])


#
# One model, one batch, many ways to apply the one to the other
#


def cond_scalar(model, x):
    zeros = lambda x: jnp.zeros((len(x), D_OUT))
    return lax.cond(jnp.sum(x) < 1e9, ft.partial(vmapped, model), zeros, x)


def cond_under_vmap(model, x):
    pred = jnp.sum(x) < 1e9
    zeros = lambda x: jnp.zeros(D_OUT)
    return jax.vmap(lambda x: lax.cond(pred, lambda x: model(x), zeros, x))(x)


def switch(model, x):
    branches = [lambda x: jnp.zeros((len(x), D_OUT)), ft.partial(vmapped, model)]
    return lax.switch(jnp.sum(x < 1e9).clip(0, 1), branches, x)


def scan_over_examples(model, x):
    return lax.scan(lambda carry, x: (carry, model(x)), None, x)[1]


def scan_over_chunks(model, x):
    chunks = x.reshape(2, len(x) // 2, D_IN)
    _, out = lax.scan(lambda c, x: (c, vmapped(model, x)), None, chunks)
    return out.reshape(len(x), D_OUT)


def filter_vmapped_model(model, x):
    return eqx.filter_vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x)


def repartitioned(model, x, filter_spec=eqx.is_array, swap=False):
    halves = eqx.partition(model, filter_spec)
    return vmapped(eqx.combine(*(halves[::-1] if swap else halves)), x)


def flattened(model, x):
    leaves, treedef = jtu.tree_flatten(model)
    return vmapped(jtu.tree_unflatten(treedef, leaves), x)


def user_tree_at(model, x):
    """Surgery inside the loss keeps the tags."""
    bias = lambda m: m.layers[0].bias
    return vmapped(eqx.tree_at(bias, model, bias(model) * 1.0), x)


def raw_layers(model, x):
    def one(x):
        for layer in model.layers[:-1]:
            x = model.activation(layer(x))
        return model.layers[-1](x)

    return jax.vmap(one)(x)


def checkpoint_of_vmap(model, x):
    return jax.checkpoint(ft.partial(vmapped, model))(x)


def checkpoint_of_model_argument(model, x):
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, x: vmapped(eqx.combine(arrays, static), x)
    return jax.checkpoint(run)(arrays, x)


def jit_closure(model, x):
    return jax.jit(ft.partial(vmapped, model))(x)


def jit_of_model_argument(model, x):
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, x: vmapped(eqx.combine(arrays, static), x)
    return jax.jit(run)(arrays, x)


FORWARDS = {
    "vmap": vmapped,
    "in_axes=1": lambda m, x: jax.vmap(m, in_axes=1)(x.T),
    "in_axes=-1": lambda m, x: jax.vmap(m, in_axes=-1)(x.T),
    "out_axes=1": lambda m, x: jax.vmap(m, out_axes=1)(x).T,
    "jax.jit": jit_closure,
    "jax.jit argument": jit_of_model_argument,
    "vmap of filter_jit": lambda m, x: jax.vmap(eqx.filter_jit(m))(x),
    "filter_jit of vmap": lambda m, x: eqx.filter_jit(vmapped)(m, x),
    "jit of jit": lambda m, x: jax.jit(ft.partial(jit_closure, m))(x),
    "filter_checkpoint": lambda m, x: jax.vmap(eqx.filter_checkpoint(m))(x),
    "checkpoint": checkpoint_of_vmap,
    "checkpoint argument": checkpoint_of_model_argument,
    "cond": cond_scalar,
    "cond under vmap": cond_under_vmap,
    "switch": switch,
    "filter_vmap": filter_vmapped_model,
    "partition is_array": repartitioned,
    "partition is_inexact_array": ft.partial(
        repartitioned, filter_spec=eqx.is_inexact_array
    ),
    "combine swapped": ft.partial(repartitioned, swap=True),
    "flatten": flattened,
    "tree_at": user_tree_at,
    "layer by layer": raw_layers,
}
# The batch is not an axis of any layer's input. (Weights cannot be told from shapes.)
ONE_BY_ONE = {
    "map": lambda m, x: lax.map(m, x),
    "map in chunks": lambda m, x: lax.map(m, x, batch_size=2),
    "scan": scan_over_examples,
    "scan over chunks": scan_over_chunks,
    "Python loop": lambda m, x: jnp.stack([m(row) for row in x]),
    "checkpoint in scan": lambda m, x: lax.map(eqx.filter_checkpoint(m), x),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name, weighted):
    loss_fn = cross_entropy(FORWARDS[name])
    weights = WEIGHTS if weighted else None
    assert_near(results(loss_fn, make_mlp(), *data(BATCH), weights), plain(weighted))


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one(name):
    got = results(cross_entropy(ONE_BY_ONE[name]), make_mlp(), *data(BATCH))
    assert_near(got, plain())


@pytest.mark.parametrize("name", ["map", "scan over chunks", "Python loop"])
def test_one_by_one_weighted(name):
    """Either the right factors, or an error that says why not: never wrong factors."""
    loss_fn = cross_entropy(ONE_BY_ONE[name])
    try:
        got = results(loss_fn, make_mlp(), *data(BATCH), WEIGHTS)
    except ValueError as error:
        assert "weights" in str(error)
    else:
        assert_near(got, plain(True))


def test_cond_with_a_predicate_per_example():
    """Each model sees the examples that take its branch, and no others."""
    models = make_mlp(0), make_mlp(7)
    x, y = data(BATCH)

    def branching(models, x):
        branches = [lambda x, m=m: m(x) for m in models]
        return jax.vmap(lambda x: lax.cond(x[0] > 0, *branches, x))(x)

    value, grads, *curvatures = results(cross_entropy(branching), models, x, y)
    total = 0
    for i, taken in enumerate([x[:, 0] > 0, x[:, 0] <= 0]):
        share = np.mean(taken)
        assert 0 < share < 1
        args = x, y, taken.astype(float)
        own_value, own_grads, *own = results(plain_loss, models[i], *args)
        total += share * own_value
        assert_near(grads[i], jtu.tree_map(lambda g: share * g, only_arrays(own_grads)))
        assert_near([c[i] for c in curvatures], scale_factors(own, 1, share))
    assert_near(value, total)


@jax.custom_jvp
def custom_tanh(x):
    return jnp.tanh(x)


@custom_tanh.defjvp
def _(primals, tangents):
    y = jnp.tanh(primals[0])
    return y, (1 - y**2) * tangents[0]


@jax.custom_vjp
def custom_tanh_vjp(x):
    return jnp.tanh(x)


custom_tanh_vjp.defvjp(
    lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, ct: ((1 - y**2) * ct,)
)


@pytest.mark.parametrize("activation", [custom_tanh, custom_tanh_vjp])
def test_custom_derivatives(activation):
    model = make_mlp(activation=activation)
    assert_near(results(plain_loss, model, *data(BATCH), WEIGHTS), plain(True))


def test_relu_is_a_custom_jvp():
    """`jax.nn.relu` is one."""
    x, y = data(BATCH)
    got = results(plain_loss, make_mlp(activation=jax.nn.relu), x, y)
    own = make_mlp(activation=lambda x: jnp.where(x > 0, x, 0))
    assert_near(got, results(plain_loss, own, x, y))
    assert_differs(got, plain())


#
# Tokens inside a batch
#


def batch_outside(model, x):
    return jax.vmap(jax.vmap(model))(x)


def tokens_outside(model, x):
    return jax.vmap(jax.vmap(model), in_axes=1, out_axes=1)(x)


def tokens_last(model, x):
    return jax.vmap(jax.vmap(model, in_axes=1, out_axes=1))(x.mT).mT


def token_scan(model, x):
    return jax.vmap(lambda x: lax.map(model, x))(x)


NESTED = [batch_outside, tokens_outside, tokens_last, token_scan]


@pytest.mark.parametrize("forward", NESTED)
def test_nested_vmap(forward):
    x, y = data(BATCH, 2)
    got = results(cross_entropy(forward), make_mlp(), x, y)
    want = results(plain_loss, make_mlp(), x.reshape(-1, D_IN), y.reshape(-1))
    assert_near(got, want)


def token_weights(kind, tokens):
    if kind == "per example":
        return WEIGHTS
    mask = np.random.default_rng(9).random((BATCH, tokens)) < 0.6
    return np.where(mask, WEIGHTS[:, None], 0.0)


def nested_weighted(forward, kind, tokens):
    """What comes out, and what should."""
    x, y = data(BATCH, tokens)
    weights = token_weights(kind, tokens)
    flat = np.broadcast_to(weights.reshape(BATCH, -1), (BATCH, tokens)).reshape(-1)
    got = results(cross_entropy(forward), make_mlp(), x, y, weights)
    rows = x.reshape(-1, D_IN), y.reshape(-1), flat
    return got, results(plain_loss, make_mlp(), *rows)


KINDS = ["per example", "per token"]


@pytest.mark.parametrize("tokens", [2, BATCH])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward", [batch_outside, tokens_last])
def test_nested_vmap_weighted(forward, kind, tokens):
    assert_near(*nested_weighted(forward, kind, tokens))


# (A scan over tokens with a weight each is left out: a step of it is a layer that acts on
# whole examples, which counts the mean weight of an example's terms.)
@pytest.mark.parametrize(
    "forward,kind",
    [(tokens_outside, kind) for kind in KINDS] + [(token_scan, KINDS[0])],
)
def test_nested_otherwise_weighted(forward, kind):
    """Either the right factors, or an error that says why not: never wrong factors."""
    try:
        got, want = nested_weighted(forward, kind, 2)
    except ValueError as error:
        assert "weights" in str(error)
    else:
        assert_near(got, want)


#
# Time
#


class RNN(eqx.Module):
    cell: kfac.Linear
    readout: kfac.Linear

    def __init__(self):
        self.cell = make_linear(D_IN + HIDDEN, HIDDEN, 3)
        self.readout = make_linear(HIDDEN, D_OUT, 4)

    def step(self, h, x):
        return jnp.tanh(self.cell(jnp.concatenate([x, h])))


make_rnn = ft.cache(eqx.filter_jit(RNN))


def vmap_of_scan(rnn, x):
    def one(x):
        h, _ = lax.scan(lambda h, x: (rnn.step(h, x), None), jnp.zeros(HIDDEN), x)
        return rnn.readout(h)

    return jax.vmap(one)(x)


def scan_of_vmap(rnn, x):
    def step(h, x):
        return jax.vmap(rnn.step)(h, x), None

    h, _ = lax.scan(step, jnp.zeros((len(x), HIDDEN)), jnp.moveaxis(x, 1, 0))
    return jax.vmap(rnn.readout)(h)


def fori_loop(rnn, x):
    def one(x):
        body = lambda t, h: rnn.step(h, x[t])
        return rnn.readout(lax.fori_loop(0, len(x), body, jnp.zeros(HIDDEN)))

    return jax.vmap(one)(x)


def scan_with_model_in_carry(rnn, x):
    arrays, static = eqx.partition(rnn, eqx.is_array)

    def one(x):
        def step(carry, x):
            arrays, h = carry
            return (arrays, eqx.combine(arrays, static).step(h, x)), None

        (_, h), _ = lax.scan(step, (arrays, jnp.zeros(HIDDEN)), x)
        return rnn.readout(h)

    return jax.vmap(one)(x)


def checkpointed_scan(rnn, x):
    def one(x):
        step = jax.checkpoint(lambda h, x: (rnn.step(h, x), None))
        return rnn.readout(lax.scan(step, jnp.zeros(HIDDEN), x, unroll=2)[0])

    return jax.vmap(one)(x)


def unrolled(rnn, x):
    def one(x):
        h = jnp.zeros(HIDDEN)
        for row in x:
            h = rnn.step(h, row)
        return rnn.readout(h)

    return jax.vmap(one)(x)


RECURRENT = [
    vmap_of_scan,
    scan_of_vmap,
    fori_loop,
    scan_with_model_in_carry,
    checkpointed_scan,
]


@pytest.mark.parametrize("forward", RECURRENT)
def test_scan_over_time(forward):
    got = results(cross_entropy(forward), make_rnn(), *recurrent_data(), WEIGHTS)
    assert_near(got, recurrent(True))


def test_scan_over_time_unweighted():
    got = results(cross_entropy(vmap_of_scan), make_rnn(), *recurrent_data())
    assert_near(got, recurrent(False))


def recurrent_data():
    x, _ = data(BATCH, 3)
    return x, data(BATCH)[1]


@ft.cache
def recurrent(weighted):
    args = *recurrent_data(), WEIGHTS if weighted else None
    return results(cross_entropy(unrolled), make_rnn(), *args)


@pytest.mark.parametrize("weighted", [False, True])
def test_unrolled_time_equals_untied_layers(weighted):
    """By `Expand`, uses of one weight add up: the mean of their input factors, the sum of
    the others."""

    class Untied(eqx.Module):
        cells: list
        readout: kfac.Linear

    def forward(model, x):
        def one(x):
            h = jnp.zeros(HIDDEN)
            for cell, row in zip(model.cells, x):
                h = jnp.tanh(cell(jnp.concatenate([row, h])))
            return model.readout(h)

        return jax.vmap(one)(x)

    rnn = expanded(make_rnn())
    args = *recurrent_data(), WEIGHTS if weighted else None
    _, grads, curvature, _ = results(
        cross_entropy(forward), Untied([rnn.cell] * 3, rnn.readout), *args
    )
    _, tied_grads, tied, _ = results(cross_entropy(unrolled), rnn, *args)
    uses = curvature.cells
    mean = sum(f.input_factor for f in uses) / 3
    assert_near(tied.cell.input_factor, mean)
    assert_near(tied.cell.output_factor, sum(f.output_factor for f in uses))
    assert_near(tied_grads.cell.weight, sum(g.weight for g in grads.cells))
    assert_near(tied.readout, curvature.readout)
    assert_differs(tied.cell.input_factor, uses[0].input_factor)


class Twice(eqx.Module):
    """One layer, called twice."""

    inner: kfac.Linear
    outer: kfac.Linear
    untied: kfac.Linear | None = None

    def __call__(self, x):
        second = self.inner if self.untied is None else self.untied
        x = second(jnp.tanh(self.inner(x)))
        return self.outer(jnp.tanh(x))


@pytest.mark.parametrize("weighted", [False, True])
def test_one_layer_called_twice(weighted):
    inner, outer = make_linear(D_IN, D_IN, 0), make_linear(D_IN, D_OUT, 1)
    args = *data(BATCH), WEIGHTS if weighted else None
    make = lambda *layers: expanded(Twice(*layers))
    value, grads, tied, _ = results(plain_loss, make(inner, outer), *args)
    want = results(plain_loss, make(inner, outer, inner), *args)
    first, second = want[2].inner, want[2].untied
    assert_near(value, want[0])
    assert_near(grads.inner.weight, want[1].inner.weight + want[1].untied.weight)
    mean = (first.input_factor + second.input_factor) / 2
    assert_near(tied.inner.input_factor, mean)
    assert_near(tied.inner.output_factor, first.output_factor + second.output_factor)
    assert_near(tied.outer, want[2].outer)
    assert_differs(tied.inner, first)


#
# Stacked layers and ensembles
#


DEPTH = 3


class Stack(eqx.Module):
    """Hidden layers with a leading axis, applied by `scan`."""

    hidden: kfac.Linear
    readout: kfac.Linear

    def __init__(self, seed=5):
        keys = jr.split(jr.key(seed), DEPTH + 1)
        make = lambda key: kfac.Linear(D_IN, D_IN, key=key)
        self.hidden = eqx.filter_vmap(make)(keys[1:])
        self.readout = kfac.Linear(D_IN, D_OUT, key=keys[0])

    def __call__(self, x):
        arrays, static = eqx.partition(self.hidden, eqx.is_array)

        def step(x, arrays):
            return jnp.tanh(eqx.combine(arrays, static)(x)), None

        return self.readout(lax.scan(step, x, arrays)[0])

    def unstack(self):
        hidden = jax.device_get(self.hidden)
        return Unstacked([member(hidden, i) for i in range(DEPTH)], self.readout)


make_stack = ft.cache(eqx.filter_jit(Stack))


class Unstacked(eqx.Module):
    hidden: list
    readout: kfac.Linear

    def __call__(self, x):
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        return self.readout(x)

    def restack(self):
        return eqx.tree_at(lambda m: m.hidden, self, stack(self.hidden))


def scan_of_vmapped_layers(model, x):
    arrays, static = eqx.partition(model.hidden, eqx.is_array)

    def step(x, arrays):
        return jnp.tanh(jax.vmap(eqx.combine(arrays, static))(x)), None

    return jax.vmap(model.readout)(lax.scan(step, x, arrays)[0])


def indexed_layers(model, x):
    """Not a scan but a loop over slices of the stacked weights."""

    def one(x):
        for i in range(DEPTH):
            x = jnp.tanh(member(model.hidden, i)(x))
        return model.readout(x)

    return jax.vmap(one)(x)


def checkpointed_layers(model, x):
    return jax.vmap(eqx.filter_checkpoint(model))(x)


def stacked_in_place(unstacked):
    """Results of the unstacked model, in the shape of those of the stacked one."""
    value, *trees = unstacked
    return value, *[t.restack() for t in trees]


@pytest.mark.parametrize(
    "forward", [scan_of_vmapped_layers, indexed_layers, checkpointed_layers]
)
def test_stacked_layers(forward):
    # If slices are not taken by a loop, nobody knows that each layer is used once.
    model = expanded(make_stack()) if forward is indexed_layers else make_stack()
    got = results(cross_entropy(forward), model, *data(BATCH), WEIGHTS)
    assert_near(got, stacked_in_place(unstacked_layers(True)))


@pytest.mark.parametrize("weighted", [False, True])
def test_scan_over_stacked_layers(weighted):
    args = *data(BATCH), WEIGHTS if weighted else None
    got = results(plain_loss, make_stack(), *args)
    want = stacked_in_place(unstacked_layers(weighted))
    assert_near(got, want)
    factors = got[2].hidden
    assert factors.input_factor.shape == (DEPTH, D_IN + 1, D_IN + 1)
    assert_differs(jtu.tree_map(lambda x: x[::-1], factors), want[2].hidden)


def test_scan_over_stacked_layers_keeps_no_weight_twice():
    """Derivatives need the weights; those that are scanned over are there already."""
    collect = kfac.value_grad_and_curvature(plain_loss, kfac.Empirical())
    scans = [
        e for e in equations_of(collect, make_stack(), *data(BATCH)) if is_forward(e)
    ]
    kept = [v.aval.shape for eqn in scans for v in eqn.outvars]
    assert (DEPTH, BATCH, D_IN) in kept
    assert (DEPTH, D_IN, D_IN) not in kept


def is_forward(eqn):
    return eqn.primitive.name == "scan" and not eqn.params["reverse"]


@ft.cache
def unstacked_layers(weighted):
    args = *data(BATCH), WEIGHTS if weighted else None
    return results(plain_loss, make_stack().unstack(), *args)


def make_ensemble(members, make=make_mlp):
    arrays = stack([make(seed) for seed in range(members)])
    return eqx.combine(arrays, make(0))


def shared_inputs(model, x):
    return eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))(
        model, x
    )


def own_inputs(model, x):
    return eqx.filter_vmap(lambda m, x: jax.vmap(m)(x))(model, x)


def examples_outside(model, x):
    """Of shape `[batch, members, k]`, moved to `[members, batch, k]`."""
    ensemble = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    return jax.vmap(lambda x: ensemble(model, x), out_axes=1)(x)


def examples_outside_own(model, x):
    ensemble = eqx.filter_vmap(lambda m, x: m(x))
    return jax.vmap(lambda x: ensemble(model, x), in_axes=1, out_axes=1)(x)


def scanned_members(model, x):
    arrays, static = eqx.partition(model, eqx.is_array)
    return lax.map(lambda a: jax.vmap(eqx.combine(a, static))(x), arrays)


ENSEMBLES = {
    "shared": shared_inputs,
    "own": own_inputs,
    "examples outside, shared": examples_outside,
    "examples outside, own": examples_outside_own,
    "scanned members": scanned_members,
}


@ft.cache
def separate_members(members, own, weighted):
    """Every member by itself. The joint loss is the mean over members: so are its
    gradient and its curvature, which is all in the output factors."""
    x, y = data(members, BATCH)
    weights = WEIGHTS if weighted else None
    values, grads, curvatures = [], [], []
    for i in range(members):
        inputs = x[i] if own else x[0]
        value, grad, curvature, _ = results(
            plain_loss, make_mlp(i), inputs, y[i], weights
        )
        values.append(value)
        grads.append(jtu.tree_map(lambda g: g / members, only_arrays(grad)))
        curvatures.append(scale_factors(curvature, 1, 1 / members))
    return sum(values) / members, stack(grads), stack(curvatures)


def joint_results(name, members, weights=None):
    x, y = data(members, BATCH)
    x = x if "own" in name else x[0]
    loss_fn = cross_entropy(ENSEMBLES[name])
    return results(loss_fn, make_ensemble(members), x, y, weights)


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensemble_in_the_loss(name):
    got = joint_results(name, 2)
    assert_near(got[:3], separate_members(2, "own" in name, False))


# As many members as examples too: nothing may be told by sizes alone.
# (But for a scan over as many members as examples: a step of it is a layer that acts on
# examples with several terms.)
@pytest.mark.parametrize(
    "name,members",
    [(name, 2) for name in ENSEMBLES]
    + [(name, BATCH) for name in ENSEMBLES if name != "scanned members"],
)
def test_ensemble_in_the_loss_weighted(name, members):
    """Either the right factors, or an error that says why not: never wrong factors."""
    weights = np.broadcast_to(WEIGHTS, (members, BATCH))
    try:
        got = joint_results(name, members, weights)
    except ValueError as error:
        assert "weights" in str(error)
    else:
        assert_near(got[:3], separate_members(members, "own" in name, True))


@pytest.mark.parametrize("members", [2, BATCH])
def test_ensemble_with_examples_leading(members):
    """Outputs of shape `[batch, members, k]`, weighted per example."""
    x, y = data(members, BATCH)

    def forward(model, x):
        return jnp.moveaxis(examples_outside(model, x), 0, 1)

    model = make_ensemble(members)
    got = results(cross_entropy(forward), model, x[0], y.T, WEIGHTS)
    assert_near(got[:3], separate_members(members, False, True))


def test_ensemble_mean_prediction():
    """The members' mean has a loss: factors of a member are those of it alone with the
    others held fixed."""
    x, y = data(BATCH)
    model = make_ensemble(2)
    mean = lambda m, x: jnp.mean(shared_inputs(m, x), axis=0)
    value, grads, curvature, _ = results(cross_entropy(mean), model, x, y, WEIGHTS)
    alone = cross_entropy(lambda m, given: (jax.vmap(m)(given[0]) + given[1]) / 2)
    for i in range(2):
        other = eqx.filter_jit(vmapped)(make_mlp(1 - i), x)
        want = results(alone, make_mlp(i), (x, other), y, WEIGHTS)
        assert_near((value, member(grads, i), member(curvature, i)), want[:3])


@pytest.mark.parametrize("weighted", [False, True])
def test_filter_vmap_of_everything(weighted):
    x, y = data(3, BATCH)
    weights = np.stack([WEIGHTS, WEIGHTS[::-1], WEIGHTS**2]) if weighted else None
    collect = kfac.value_grad_and_curvature(plain_loss, fisher=kfac.Exact())
    got = eqx.filter_jit(eqx.filter_vmap(collect))(make_ensemble(3), x, y, weights)
    want = [
        results(plain_loss, make_mlp(i), x[i], y[i], weights[i] if weighted else None)
        for i in range(3)
    ]
    assert_near(got, stack([w[:3] for w in want]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("forward", [own_inputs, examples_outside_own])
def test_ensemble_of_stacks(forward, weighted):
    """Doubly stacked layers."""
    x, y = data(2, BATCH)
    weights = WEIGHTS if weighted else None
    joint = np.broadcast_to(WEIGHTS, (2, BATCH)) if weighted else None
    try:
        _, _, curvature, _ = results(
            cross_entropy(forward), make_ensemble(2, make_stack), x, y, joint
        )
    except ValueError as error:  # Better than wrong factors.
        assert weighted and "weights" in str(error)
        return
    assert curvature.hidden.l2.shape == (2, DEPTH)
    for i in range(2):
        separate = results(plain_loss, make_stack(i).unstack(), x[i], y[i], weights)
        _, _, want, _ = stacked_in_place(separate)
        assert_near(member(curvature, i), scale_factors(want, 1, 1 / 2))


@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.Eigh()])
def test_step_under_filter_vmap(solver):
    x, y = data(3, BATCH)
    optimizer = plain_kfac(
        0.1, 0.9, 1e-2, solver=solver, inverse_period=2, norm_constraint=1e-3
    )

    def train(model, x, y, key):
        arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)

        def body(arrays, key):
            model, state = eqx.combine(arrays, static)
            *new, info = optimizer.step(plain_loss, model, state, x, y, key=key)
            return only_arrays(tuple(new)), only_arrays(info)

        (model, state), infos = lax.scan(body, arrays, jr.split(key, 3))
        return model, state, infos

    @eqx.filter_jit
    def train_all(models, x, y, keys):
        arrays, static = eqx.partition(models, eqx.is_array)
        one = lambda args: only_arrays(train(eqx.combine(args[0], static), *args[1:]))
        each = lax.map(one, (arrays, x, y, keys))
        return eqx.filter_vmap(train)(models, x, y, keys), each

    got, want = train_all(make_ensemble(3), x, y, jr.split(jr.key(0), 3))
    assert_near(got, want)
    model = jax.device_get(only_arrays(got[0]))
    assert_differs(member(model, 0), member(model, 1))


#
# Derivatives inside the loss
#


def total(model, x):
    return jnp.sum(jnp.sin(model(x)))


def elsewhere(x):
    return 2 * x[:3] + 1


def gradient_norm(model, x):
    return jnp.sum(jax.vmap(jax.grad(ft.partial(total, model)))(x) ** 2)


def forward_gradient_norm(model, x):
    return jnp.sum(jax.vmap(jax.jacfwd(model))(x) ** 2)


def directional(model, x):
    derivative = lambda x: jax.jvp(model, (x,), (jnp.ones_like(x),))[1]
    return jnp.sum(jax.vmap(derivative)(x) ** 2)


def laplacian(model, x):
    hessian = jax.jacfwd(jax.grad(ft.partial(total, model)))
    return jnp.sum(jax.vmap(lambda x: jnp.trace(hessian(x)))(x) ** 2)


DERIVATIVES = [gradient_norm, forward_gradient_norm, directional, laplacian]


@ft.cache
def value_and_grad(penalty):
    run = eqx.filter_jit(eqx.filter_value_and_grad(penalty))
    return lambda *args: jax.device_get(run(*args))


def sum_of_gradients(grads, of_penalty):
    add = lambda g, h: g + 0.1 * h
    return jtu.tree_map(add, *map(only_arrays, (grads, of_penalty)))


def penalised(penalty):
    def loss_fn(model, x, y, weights=None):
        return plain_loss(model, x, y, weights) + 0.1 * penalty(model, x)

    return loss_fn


@pytest.mark.parametrize("where", ["at the data", "elsewhere"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivative_as_penalty(derivative, where):
    """A penalty's gradient counts, its curvature does not; nor do the inputs at which it
    is evaluated."""
    weighted = derivative is gradient_norm
    move = elsewhere if where == "elsewhere" else lambda x: x
    args = *data(BATCH), WEIGHTS if weighted else None
    penalty = lambda m, x: derivative(m, move(x))
    value, grads, *curvatures = results(penalised(penalty), make_mlp(), *args)
    want_value, want_grads, *want = plain(weighted)
    assert_near(curvatures, want)
    own, own_grads = value_and_grad(derivative)(make_mlp(), move(args[0]))
    assert_near(value, want_value + 0.1 * own)
    assert_near(grads, sum_of_gradients(want_grads, own_grads))


def value_beside_gradient(model, x):
    def one(x):
        (_, out), grad = jax.value_and_grad(_with_aux(model), has_aux=True)(x)
        return out, grad

    return jax.vmap(one)(x)


def value_beside_jvp(model, x):
    return jax.vmap(lambda x: jax.jvp(model, (x,), (jnp.ones_like(x),)))(x)


def value_beside_jacfwd(model, x):
    twice = lambda x: (model(x),) * 2
    jacobian, out = jax.vmap(jax.jacfwd(twice, has_aux=True))(x)
    return out, jacobian


def value_beside_vjp(model, x):
    def one(x):
        out, pullback = jax.vjp(model, x)
        return out, pullback(jnp.ones_like(out))[0]

    return jax.vmap(one)(x)


def value_beside_linearize(model, x):
    def one(x):
        out, pushforward = jax.linearize(model, x)
        return out, pushforward(jnp.ones_like(x))

    return jax.vmap(one)(x)


def _with_aux(model):
    def fn(x):
        out = model(x)
        return jnp.sum(jnp.sin(out)), out

    return fn


BESIDE = [
    value_beside_gradient,
    value_beside_jvp,
    value_beside_jacfwd,
    value_beside_vjp,
    value_beside_linearize,
]


@pytest.mark.parametrize("forward", BESIDE)
def test_value_beside_derivative(forward):
    """The output comes out of the same call as the derivative, which is penalised."""

    def loss_fn(model, x, y, weights=None):
        out, derivative = forward(model, x)
        loss = kfac.SoftmaxCrossEntropy(out, y, weights)
        return loss + 0.1 * jnp.sum(derivative**2)

    value, _, *curvatures = results(loss_fn, make_mlp(), *data(BATCH), WEIGHTS)
    assert_near(curvatures, plain(True)[2:])
    assert_differs(value, plain(True)[0])


def test_loss_on_a_derivative():
    """The prediction is the gradient of a potential, at its input."""

    def loss_fn(model, x, y):
        field = jax.vmap(jax.grad(lambda x: jnp.sum(model(x))))(x)
        return kfac.SquaredError(field, y)

    x, _ = data(BATCH)
    collect = kfac.value_grad_and_curvature(loss_fn, fisher=kfac.Exact())
    value, grads, _ = eqx.filter_jit(collect)(make_mlp(), x, x)
    plain = eqx.filter_value_and_grad(lambda m: loss_fn(m, x, x).value)
    assert_near((value, grads), eqx.filter_jit(plain)(kfac.revert(make_mlp())))
    report = kfac.verify(loss_fn, make_mlp(), x, x)
    assert all(np.all(layer.unseen <= 1e-12) for layer in report.layers)


#
# Parts of a model
#


FILTERS = [eqx.is_array, eqx.is_inexact_array]


@pytest.mark.parametrize("static_first", [False, True])
@pytest.mark.parametrize("filter_spec", FILTERS)
def test_partition_outside_combine_inside(filter_spec, static_first):
    params, static = eqx.partition(make_mlp(), filter_spec)

    def loss_fn(params, static, x, y, weights):
        halves = (static, params) if static_first else (params, static)
        return plain_loss(eqx.combine(*halves), x, y, weights)

    for weights in (None, WEIGHTS):
        got = results(loss_fn, params, static, *data(BATCH), weights)
        assert_near(got, plain(weights is not None))


@pytest.mark.parametrize("static_first", [False, True])
@pytest.mark.parametrize("forward", [vmapped, scan_of_vmapped_layers])
def test_partition_of_stacked_layers(forward, static_first):
    params, static = eqx.partition(make_stack(), eqx.is_inexact_array)

    def loss_fn(params, static, x, y, weights):
        halves = (static, params) if static_first else (params, static)
        return cross_entropy(forward)(eqx.combine(*halves), x, y, weights)

    got = results(loss_fn, params, static, *data(BATCH), WEIGHTS)
    assert_near(got, stacked_in_place(unstacked_layers(True)))


def freeze(model, *where):
    """`(trained, frozen)`: the leaves that `where` picks are frozen."""
    spec = jtu.tree_map(eqx.is_inexact_array, model)
    for pick in where:
        spec = eqx.tree_at(pick, spec, replace_fn=lambda _: False)
    return eqx.partition(model, spec)


first_weight = lambda m: m.layers[0].weight
first_bias = lambda m: m.layers[0].bias
FROZEN = {
    "bias": [first_bias],
    "weight": [first_weight],
    "layer": [first_weight, first_bias],
}


@pytest.mark.parametrize("static_first", [False, True])
@pytest.mark.parametrize("part", FROZEN)
def test_frozen(part, static_first):
    trained, frozen = freeze(make_mlp(), *FROZEN[part])

    def loss_fn(trained, frozen, x, y, weights):
        halves = (frozen, trained) if static_first else (trained, frozen)
        return plain_loss(eqx.combine(*halves), x, y, weights)

    value, grads, curvature, _ = results(loss_fn, trained, frozen, *data(BATCH), WEIGHTS)
    want_value, want_grads, want, _ = plain(True)
    assert_near(value, want_value)
    assert_near(grads.layers[1], want_grads.layers[1])
    assert_near(curvature.layers[1], want.layers[1])
    first, want = curvature.layers[0], want.layers[0]
    kept = {"bias": np.s_[:-1], "weight": np.s_[-1:], "layer": None}[part]
    if kept is None:
        assert not arrays(first) and not arrays(grads.layers[0])
    else:
        assert_near(first.input_factor, want.input_factor[kept, kept])
        assert_near(first.output_factor, want.output_factor)


@pytest.mark.parametrize("fn", [lax.stop_gradient, lambda x: lax.stop_gradient(x) * 1.0])
def test_stop_gradient_on_a_layers_parameters(fn):
    """The gradient is zero there. The other layers are as they were."""

    def stopped(model, x):
        leaves = lambda m: (m.layers[0].weight, m.layers[0].bias)
        return vmapped(eqx.tree_at(leaves, model, replace_fn=fn), x)

    value, grads, curvature, _ = results(cross_entropy(stopped), make_mlp(), *data(BATCH))
    want = plain()
    assert_near(value, want[0])
    assert not np.any(grads.layers[0].weight) and not np.any(grads.layers[0].bias)
    assert_near(grads.layers[1], want[1].layers[1])
    assert_near(curvature.layers[1], want[2].layers[1])


def test_stop_gradient_on_a_whole_layer():
    """Nothing is collected from a layer that is cut off, and nothing is 0/0."""

    def stopped(model, x):
        layer = lambda m: m.layers[0]
        cut = jtu.tree_map(lax.stop_gradient, eqx.filter(layer(model), eqx.is_array))
        cut = eqx.combine(cut, layer(model))
        return vmapped(eqx.tree_at(layer, model, cut), x)

    value, grads, curvature, _ = results(cross_entropy(stopped), make_mlp(), *data(BATCH))
    assert_near(value, plain()[0])
    assert not any(np.any(x) for x in arrays((grads.layers[0], curvature.layers[0])))
    assert_near(curvature.layers[1], plain()[2].layers[1])


def test_stop_gradient_between_layers():
    """No gradient reaches the first layer. Its inputs may be counted or not."""

    def stopped(model, x):
        def one(x):
            h = lax.stop_gradient(model.activation(model.layers[0](x)))
            return model.layers[1](h)

        return jax.vmap(one)(x)

    value, grads, curvature, _ = results(cross_entropy(stopped), make_mlp(), *data(BATCH))
    assert_near(value, plain()[0])
    assert not np.any(curvature.layers[0].output_factor)
    assert not np.any(grads.layers[0].weight)
    assert_near(curvature.layers[1], plain()[2].layers[1])


#
# Precision
#


def cast(model, dtype):
    return kfac.cast(jax.device_get(model), dtype)


def cast_everything(model, x, dtype):
    return vmapped(kfac.cast(model, dtype), x.astype(dtype))


def cast_output(model, x, dtype):
    return vmapped(kfac.cast(model, dtype), x.astype(dtype)).astype(jnp.float32)


def in_half_precision(where, dtype, x, y, weights=None):
    model = make_mlp()
    if where == "parameters":
        return results(plain_loss, cast(model, dtype), x.astype(dtype), y, weights)
    forward = cast_everything if where == "in the loss" else cast_output
    loss_fn = cross_entropy(ft.partial(forward, dtype=dtype))
    return results(loss_fn, cast(model, jnp.float32), x, y, weights)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("where", ["parameters", "in the loss", "logits in float32"])
def test_half_precision(where, dtype):
    weighted = where != "parameters"
    weights = WEIGHTS.astype(jnp.float32) if weighted else None
    got = in_half_precision(where, dtype, *data(BATCH), weights)
    value, grads, *curvatures = got
    assert value.dtype == jnp.float32
    wanted = dtype if where == "parameters" else jnp.float32
    assert all(g.dtype == wanted for g in arrays(grads))
    assert all(c.dtype == jnp.float32 for c in arrays(curvatures))
    assert_near(got, plain(weighted), tolerance=2e-2)
    assert_differs(got, plain(weighted), 1e-6)


@pytest.mark.parametrize("where", ["parameters", "in the loss"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_many_rows_in_half_precision(where, dtype):
    """More than half precision can count: 256 by ones, or 65504 at all."""
    repeats = 11_000
    x, y = (np.tile(a, (repeats,) + (1,) * (a.ndim - 1)) for a in data(BATCH))
    got = in_half_precision(where, dtype, x, y)
    assert_near(got, plain(), tolerance=2e-2)


def test_casting_the_slots():
    """Sums in half precision would be wrong: an error, and the way around it."""

    def loss_fn(model, x, y):
        dtype = jnp.bfloat16
        is_floating = eqx.is_inexact_array
        model = jtu.tree_map(lambda a: a.astype(dtype) if is_floating(a) else a, model)
        return plain_loss(model, x.astype(dtype), y)

    x, y = data(BATCH)
    with pytest.raises(TypeError, match=r"bfloat16.*kfac\.cast\(model, dtype\)"):
        results(loss_fn, cast(make_mlp(), jnp.float32), x, y)


def test_many_steps_in_half_precision():
    """A count that grows by ones does not stop at 256. (The gradient, which JAX adds up
    in bfloat16 here, is another matter.)"""

    def loss_fn(model, x, y):
        model = kfac.cast(model, jnp.bfloat16)
        return kfac.SoftmaxCrossEntropy(lax.map(model, x), y)

    x, y = (np.tile(a, (150,) + (1,) * (a.ndim - 1)) for a in data(BATCH))
    got = results(loss_fn, cast(make_mlp(), jnp.float32), x.astype(jnp.bfloat16), y)
    assert_near(got[2:], plain()[2:], tolerance=2e-2)


def test_float32():
    model = cast(make_mlp(), jnp.float32)
    x, y = data(BATCH)
    got = results(plain_loss, model, x.astype(jnp.float32), y)
    assert all(a.dtype == jnp.float32 for a in arrays(got))
    assert_near(got, plain(), tolerance=1e-5)


#
# The pullback, jit, and scan from outside
#


def test_vmap_of_the_pullback():
    """One cotangent or many at once."""
    x, _ = data(BATCH)
    filled, static = eqx.partition(fill_tags(make_mlp()), eqx.is_inexact_array)

    @jax.jit
    def run(filled, cotangents):
        forward = lambda filled: vmapped(eqx.combine(filled, static), x)
        _, pullback = jax.vjp(forward, filled)
        return jax.vmap(pullback)(cotangents), lax.map(pullback, cotangents)

    together, one_by_one = jax.device_get(run(filled, normal(4, BATCH, D_OUT)))
    assert_near(together, one_by_one)
    (model,) = together
    assert_differs(*[model.layers[0].tag.slots.outputs.second[i] for i in range(2)])


@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.MonteCarlo(2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_eager_equals_jit(fisher, weighted):
    collect = kfac.value_grad_and_curvature(plain_loss, fisher=fisher)
    args = make_mlp(), *data(BATCH), WEIGHTS if weighted else None
    jitted = eqx.filter_jit(collect)(*args, key=jr.key(3))
    assert_near(collect(*args, key=jr.key(3)), jitted)


def test_inside_scan():
    """Micro-batches, one after the other."""
    x, y = data(3, BATCH)
    model = make_mlp()
    collect = kfac.value_grad_and_curvature(plain_loss, fisher=kfac.Exact())

    @jax.jit
    def run(x, y):
        def body(carry, batch):
            return carry, only_arrays(collect(model, *batch))

        return lax.scan(body, None, (x, y))[1]

    want = [results(plain_loss, model, x[i], y[i])[:3] for i in range(3)]
    assert_near(run(x, y), stack(want))


def test_inside_cond_and_checkpoint():
    """`value_grad_and_curvature` is itself a function like any other."""
    params, static = eqx.partition(make_mlp(), eqx.is_array)
    x, y = data(BATCH)

    def collect(params):
        fn = kfac.value_grad_and_curvature(plain_loss, fisher=kfac.Exact())
        return only_arrays(fn(eqx.combine(params, static), x, y))

    @jax.jit
    def run(flag, params):
        zeros = lambda params: jtu.tree_map(jnp.zeros_like, collect(params))
        return lax.cond(flag, jax.checkpoint(collect), zeros, params)

    assert_near(run(True, params), plain()[:3])
    assert not any(np.any(a) for a in arrays(run(False, params)))


#
# What else a loss function may take and return
#


class Stateful(eqx.Module):
    """Batch normalisation (with state) and dropout (with a key)."""

    first: kfac.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: kfac.Linear

    def __init__(self):
        self.first = make_linear(D_IN, HIDDEN, 0)
        self.norm = eqx.nn.BatchNorm(HIDDEN, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = make_linear(HIDDEN, D_OUT, 1)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jnp.tanh(x), key=key)), state


def test_state_dropout_aux_and_keyword_arguments():
    model, state = eqx.nn.make_with_state(Stateful)()
    x, y = data(BATCH)

    def loss_fn(model, state, x, *, y, dropout_key):
        keys = jr.split(dropout_key, len(x))
        batched = jax.vmap(
            model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
        )
        logits, state = batched(x, state, keys)
        return kfac.SoftmaxCrossEntropy(logits, y), (state, {"logits": logits})

    collect = kfac.value_grad_and_curvature(loss_fn, fisher=kfac.Exact(), has_aux=True)
    (value, (new_state, metrics)), grads, curvature = eqx.filter_jit(collect)(
        model, state, x, y=y, dropout_key=jr.key(1)
    )

    def plain_value(model):
        loss, aux = loss_fn(model, state, x, y=y, dropout_key=jr.key(1))
        return loss.value, aux

    run = eqx.filter_jit(eqx.filter_value_and_grad(plain_value, has_aux=True))
    (want, (want_state, want_metrics)), want_grads = run(kfac.revert(model))
    assert_near(value, want)
    assert_near(grads, want_grads)
    assert_near((new_state, metrics), (want_state, want_metrics))
    assert any(
        np.any(np.asarray(a) != np.asarray(b))
        for a, b in zip(arrays(new_state), arrays(state))
    )
    # The input factors, from activations by hand.
    rows = np.concatenate([x, np.ones((BATCH, 1))], axis=1)
    assert_near(curvature.first.input_factor, rows.T @ rows / BATCH)
    assert curvature.norm.weight is None


def test_dropout_keys_matter():
    def loss_fn(model, x, y, key):
        dropped = eqx.nn.Dropout(0.5)(x, key=key)
        return plain_loss(model, dropped, y)

    x, y = data(BATCH)
    first, again, other = [
        results(loss_fn, make_mlp(), x, y, jr.key(seed)) for seed in (0, 0, 1)
    ]
    assert_near(first, again, tolerance=0)
    assert_differs(first, other)


def test_keywords_are_not_taken_for_the_fisher_key():
    """`key=` is for the Fisher estimate, and not handed on."""

    def loss_fn(model, x, y, **kwargs):
        assert "key" not in kwargs
        return plain_loss(model, x, y)

    collect = kfac.curvature(loss_fn, fisher=kfac.MonteCarlo())
    collect(make_mlp(), *data(BATCH), key=jr.key(0), scale=2.0)


#
# Penalties over all leaves of the model
#


def sum_of_squares(model):
    leaves = jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.sum(leaf**2) for leaf in leaves)


def sum_of_norms(model):
    """Has no derivative at a leaf that is zero."""
    leaves = jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.linalg.norm(leaf.reshape(-1)) for leaf in leaves)


def largest(model):
    leaves = jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array))
    return ft.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf)) for leaf in leaves])


PENALTIES = [sum_of_squares, sum_of_norms, largest]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalty_over_all_leaves(penalty, weighted):
    args = *data(BATCH), WEIGHTS if weighted else None
    loss_fn = penalised(lambda m, x: penalty(m))
    value, grads, *curvatures = results(loss_fn, make_mlp(), *args)
    want = plain(weighted)
    own, own_grads = value_and_grad(penalty)(make_mlp())
    assert_near(value, want[0] + 0.1 * own)
    assert_near(grads, sum_of_gradients(want[1], own_grads))
    assert_near(curvatures, want[2:])


@pytest.mark.parametrize("penalty", [sum_of_squares, largest])
def test_penalty_over_stacked_layers(penalty):
    loss_fn = penalised(lambda m, x: penalty(m))
    got = results(loss_fn, make_stack(), *data(BATCH), WEIGHTS)
    want = unstacked_layers(True)
    assert_near(got[0], want[0] + 0.1 * value_and_grad(penalty)(make_stack())[0])
    assert_near(got[2:], stacked_in_place(want)[2:])


def test_several_penalties_and_scales():
    """The coefficients of the loss reach its curvature; those of penalties do not."""

    def loss_fn(model, x, y):
        loss = plain_loss(model, x, y)
        penalties = [0.1 * sum_of_squares(model), 0.2 * gradient_norm(model, x)]
        return ft.reduce(operator.add, [2.0 * loss, *penalties])

    _, _, curvature, _ = results(loss_fn, make_mlp(), *data(BATCH))
    assert_near(curvature, scale_factors(plain()[2], 1, 2))
