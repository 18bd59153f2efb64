"""In micro-batches, or from the first examples only: which step is taken, and in how much
memory."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_kfac as kfac

from .helpers import (
    arrays,
    assert_alike,
    assert_differs,
    assert_near,
    collect,
    make_mesh,
    normal,
    only_arrays,
    squared as loss_without_keys,
    velocity_of,
)
from .plain import plain_kfac


BATCH = 16
# Dealt out in turn, parts differ in their total weight and in how many examples count.
WEIGHTS = np.array([1.0, 0, 2, 1.5, 0, 0.25, 3, 1, 1, 0, 0.5, 1, 0, 0, 2, 5])
ETA = 0.05


@ft.cache
@eqx.filter_jit
def make_model():
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jr.key(0))
    return kfac.convert(mlp)


def make_data(seed=0, number=BATCH):
    keys = jr.split(jr.key(100 + seed), number)
    return normal(number, 3, seed=seed), normal(number, 2, seed=100 + seed), keys


#
# Loss functions
#


def weighted(model, x, y, keys, weights=None):
    del keys
    return kfac.SquaredError(jax.vmap(model)(x), y, weights)


def everything(model, x, y, keys, weights=None):
    """Two losses, of which one is weighted, dropout with a key for every example, a
    curved penalty, one on the parameters and one on the examples."""
    x = jax.vmap(lambda x, key: eqx.nn.Dropout(0.2)(x, key=key))(x, keys)
    out = jax.vmap(model)(x)
    labels = (y[:, 0] > 0).astype(int)
    loss = kfac.SquaredError(out, y, weights)
    loss = loss + 0.5 * kfac.SoftmaxCrossEntropy(out, labels)
    norm = 0.01 * jnp.sum(model.layers[0].weight ** 2)
    return loss + kfac.L2(model, ETA) + norm + 0.01 * jnp.mean(out**2)


def make_optimizer(kind, fisher, **kwargs):
    if kind == "fixed":
        return plain_kfac(0.1, 0.9, 1e-2, fisher=fisher, inverse_period=1, **kwargs)
    rule = kfac.LevenbergMarquardt(0.1, interval=1)
    quadratic = kfac.QuadraticModel()
    return plain_kfac(
        quadratic,
        quadratic,
        rule,
        fisher=fisher,
        inverse_period=1,
        max_increase=0.5,
        **kwargs,
    )


@eqx.filter_jit
def train_step(optimizer, loss_fn, model, state, args, micro_batches, key=None):
    return optimizer.step(
        loss_fn, model, state, *args, key=key, micro_batches=micro_batches
    )


def assert_same_numbers(got, want, tolerance):
    assert_alike(got, want)
    assert_near(got, want, tolerance)


def assert_other_numbers(got, want, least):
    assert_alike(got, want)
    assert_differs(got, want, least)


#
# The same step
#


SAME = [
    (weighted, "fixed", kfac.Empirical(), 2),
    (everything, "adaptive", kfac.Exact(), 4),
]


@ft.cache
def run(loss_fn, kind, fisher, micro_batches):
    """Three steps; everything that came out of each."""
    optimizer = make_optimizer(kind, fisher)
    model = make_model()
    state = optimizer.init(model)
    results = []
    for index in range(3):
        # In the last step, some parts have no examples that count at all.
        masked = np.where(np.arange(BATCH) % 4 == 1, 0, WEIGHTS)
        args = *make_data(index), masked if index == 2 else WEIGHTS
        model, state, info = train_step(
            optimizer, loss_fn, model, state, args, micro_batches
        )
        results.append((eqx.filter(model, eqx.is_array), state, info))
    return results


@pytest.mark.parametrize("case", SAME)
def test_same_step(case):
    loss_fn, kind, fisher, micro_batches = case
    whole = run(loss_fn, kind, fisher, 1)
    assert_same_numbers(run(*case), whole, 1e-12)
    assert not any(bool(info.rejected) for _, _, info in whole)
    # They were steps, and the numbers that adapt did.
    losses = [float(info.loss) for _, _, info in whole]
    assert len(set(losses)) == 3
    if kind == "adaptive":
        assert all(np.isfinite(float(info.reduction_ratio)) for _, _, info in whole)
        assert len({float(info.damping) for _, _, info in whole}) == 3


def test_cases_differ():
    """So that nothing above is the same by being trivial."""
    cases = {case[:3]: run(*case[:3], 1)[-1][0] for case in SAME}
    models = list(cases.values())
    for i, a in enumerate(models):
        for b in models[:i]:
            assert_other_numbers(a, b, 1e-3)


def test_mean_over_parts_differs():
    """A part counts as much as its examples weigh; their plain mean is another step."""
    model = make_model()
    x, y, _ = make_data()
    data, k = (np.asarray(x), np.asarray(y), WEIGHTS), 4
    parts = [[a[i::k] for a in data] for i in range(k)]
    weights = np.array([np.sum(w) for *_, w in parts])
    assert len(set(weights)) == k
    assert len({np.sum(w > 0) for *_, w in parts}) > 1

    @eqx.filter_jit
    def run(x, y, weights):
        estimate = kfac.value_grad_and_curvature(weighted, fisher=kfac.Exact())
        value, grads, curvature = estimate(model, x, y, None, weights)
        factors = [c.output_factor for c in curvature.layers]
        return value, only_arrays(grads), factors

    pieces = [jtu.tree_map(np.asarray, run(*part)) for part in parts]
    whole = run(*data)

    def mean(shares):
        add = lambda *p: jnp.asarray(sum(s * a for s, a in zip(shares, p)))
        return jtu.tree_map(add, *pieces)

    assert_same_numbers(mean(weights / weights.sum()), whole, 1e-12)
    for a, b in zip(mean(np.full(k, 1 / k)), whole):
        assert_other_numbers(a, b, 1e-2)


def test_one_micro_batch_is_none():
    """... and more than one is another program."""
    optimizer = make_optimizer("fixed", kfac.Exact())
    model = make_model()
    params, static = eqx.partition(model, eqx.is_array)

    def jaxpr(**kwargs):
        def step(params, state, args):
            model = eqx.combine(params, static)
            out = optimizer.step(weighted, model, state, *args, **kwargs)
            return eqx.filter(out, eqx.is_array)

        return str(jax.make_jaxpr(step)(params, optimizer.init(model), make_data()))

    assert jaxpr() == jaxpr(micro_batches=1)
    assert jaxpr() != jaxpr(micro_batches=2)


def test_monte_carlo_draws_for_every_part():
    """Four copies of one example, one in each part: with one sample for all of them, the
    last layer's output factor would have rank one."""
    optimizer = plain_kfac(0.1, fisher=kfac.MonteCarlo())
    model = make_model()
    x, y, _ = make_data(number=1)

    def factor(copies, micro_batches, seed):
        args = [np.repeat(a, copies, axis=0) for a in (x, y)]
        state = optimizer.init(model)
        key = jr.key(seed)
        _, state, info = train_step(
            optimizer, loss_without_keys, model, state, args, micro_batches, key
        )
        assert not bool(info.rejected)
        assert all(np.all(np.isfinite(a)) for a in arrays(state))
        return np.asarray(state.curvature.layers[-1].output_factor)

    def condition(matrix):
        values = np.linalg.eigvalsh(matrix)
        return values[0] / values[1]

    first = factor(4, 4, 0)
    assert condition(first) > 1e-3
    np.testing.assert_array_equal(factor(4, 4, 0), first)
    assert np.linalg.norm(factor(4, 4, 1) - first) > 1e-3 * np.linalg.norm(first)


#
# What else a loss function takes and returns
#


class Stateful(eqx.Module):
    """Batch normalisation (with state) and dropout (with a key)."""

    first: kfac.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: kfac.Linear

    def __init__(self):
        self.first = kfac.Linear(3, 4, key=jr.key(0))
        self.norm = eqx.nn.BatchNorm(4, "batch", channelwise_affine=False, mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = kfac.Linear(4, 2, key=jr.key(1))

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jnp.tanh(x), key=key)), state


def stateful_loss(model, x, y, *, norm_state, key_of_dropout):
    keys = jr.split(key_of_dropout, len(x))
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    out, norm_state = batched(x, norm_state, keys)
    return kfac.SquaredError(out, y), (norm_state, {"outputs": out, "name": "stateful"})


def combined(states, micro_batches):
    """One state from those of the parts: the mean of their moving averages."""
    if micro_batches == 1:
        return states

    def combine(s):
        s, floating = np.asarray(s), jnp.issubdtype(s.dtype, jnp.floating)
        return jax.device_put(np.mean(s, axis=0) if floating else s[0])

    return jtu.tree_map(combine, states)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_state_dropout_and_aux(micro_batches):
    model, norm_state = eqx.filter_jit(eqx.nn.make_with_state(Stateful))()
    optimizer = plain_kfac(0.05, 0.5, 0.1, fisher=kfac.Exact())
    state = optimizer.init(model)
    x, y = arrays(make_data()[:2])
    plain = eqx.filter_jit(lambda *args, **kwargs: stateful_loss(*args, **kwargs)[1])
    losses = []
    for index in range(6):
        before, before_norm = model, norm_state
        key = jr.key(30 + index)
        model, state, info = step_with_keywords(
            optimizer, model, state, x, y, micro_batches, norm_state, key
        )
        states, metrics = info.aux
        norm_state = combined(states, micro_batches)
        losses.append(float(info.loss))
        assert not bool(info.rejected) and metrics["name"] == "stateful"
        if index > 1:
            continue
        # What every part returned is what the loss function returns for it alone.
        k = micro_batches
        for part in range(k):
            want_states, want = plain(
                before, x[part::k], y[part::k], norm_state=before_norm, key_of_dropout=key
            )
            pick = lambda a: a if k == 1 else jax.device_put(np.asarray(a)[part])
            got_states = jtu.tree_map(pick, states)
            assert_same_numbers(got_states, want_states, 1e-12)
            outputs = pick(metrics["outputs"])
            assert_same_numbers(outputs, want["outputs"], 1e-12)
        assert_other_numbers(norm_state, before_norm, 1e-3)
    assert losses[-1] < 0.9 * losses[0]


@eqx.filter_jit
def step_with_keywords(optimizer, model, state, x, y, micro_batches, norm_state, key):
    return optimizer.step(
        stateful_loss,
        model,
        state,
        x,
        y,
        micro_batches=micro_batches,
        norm_state=norm_state,
        key_of_dropout=key,
    )


def test_keyword_named_state():
    """Only `key` and `micro_batches` are taken."""
    x, y, _ = make_data()
    model = make_model()
    optimizer = plain_kfac(0.1, fisher=kfac.Exact())
    optimizer_state = optimizer.init(model)

    def loss_fn(model, x, y, *, state):
        return loss_without_keys(model, x, y), state

    def step(state):
        return optimizer.step(loss_fn, model, optimizer_state, x, y, state=state)

    *_, info = eqx.filter_eval_shape(step, jnp.zeros(7))
    assert info.aux.shape == (7,)


#
# The first examples
#


def penalised(model, x, y, keys, weights):
    return weighted(model, x, y, keys, weights) + kfac.L2(model, ETA)


def layers_of(model):
    return [np.column_stack((layer.weight, layer.bias)) for layer in model.layers]


def best_learning_rate(model, direction, examples, damping):
    """Of the quadratic model along one direction, by hand."""
    x, y, w = (np.asarray(a) for a in (*make_data()[:2], WEIGHTS))
    (first, last), (first_change, last_change) = layers_of(model), direction
    bar = lambda a: np.column_stack((a, np.ones(len(a))))
    hidden = np.tanh(bar(x) @ first.T)
    derivative = 1 - hidden**2
    error = (w / w.sum())[:, None] * (bar(hidden) @ last.T - y)
    grads = (error @ last[:, :-1] * derivative).T @ bar(x), error.T @ bar(hidden)
    slope = sum(
        np.sum((g + ETA * p) * d) for g, p, d in zip(grads, (first, last), direction)
    )
    change = (bar(x) @ first_change.T * derivative) @ last[:, :-1].T
    change = (change + bar(hidden) @ last_change.T)[:examples]
    w = w[:examples]
    curvature = np.sum(w * np.sum(change**2, axis=1)) / w.sum()
    squares = sum(np.sum(d**2) for d in direction)
    return -slope / (curvature + (damping + ETA) * squares)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_first_examples(micro_batches):
    """Different numbers of them: for the factors (3: no multiple of 4), for
    the quadratic model (6), and all of them for the gradient."""
    damping = 0.1
    quadratic = kfac.QuadraticModel(examples=6)
    optimizer = plain_kfac(quadratic, quadratic, damping, fisher=kfac.Exact(examples=3))
    model = make_model()
    args = *make_data(), WEIGHTS
    _, state, info = train_step(
        optimizer, penalised, model, optimizer.init(model), args, micro_batches
    )
    curvature = ft.partial(collect, penalised, kfac.Exact(), model)
    x, y, _, weights = args
    first = curvature(*[np.asarray(a)[:3] for a in (x, y)], None, weights[:3])
    assert_same_numbers(state.curvature, first, 1e-12)
    assert_other_numbers(state.curvature, curvature(x, y, None, weights), 1e-2)

    rate = float(info.learning_rate)
    direction = [v / rate for v in layers_of(velocity_of(state, model))]
    want = best_learning_rate(model, direction, 6, damping)
    assert rate == pytest.approx(want, rel=1e-12)
    for other in (3, BATCH):
        assert abs(best_learning_rate(model, direction, other, damping) / rate - 1) > 1e-2


def test_first_examples_may_be_all():
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(examples=BATCH))
    all_of_them = plain_kfac(0.1, fisher=kfac.Exact())
    model = make_model()
    static = eqx.partition(model, eqx.is_array)[1]

    def jaxpr(optimizer):
        def step(params, args):
            model = eqx.combine(params, static)
            out = optimizer.step(weighted, model, optimizer.init(model), *args)
            return eqx.filter(out, eqx.is_array)

        return str(jax.make_jaxpr(step)(eqx.filter(model, eqx.is_array), make_data()))

    assert jaxpr(optimizer) == jaxpr(all_of_them)


#
# Memory
#


def temporary_bytes(micro_batches):
    make = eqx.filter_jit(eqx.nn.MLP)
    model = kfac.convert(make(8, 8, 32, 2, activation=jnp.tanh, key=jr.key(0)))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = plain_kfac(0.1, fisher=kfac.Empirical(), inverse_period=1)
    x = np.zeros((8192, 8))

    def step(params, state, x):
        model, batch = eqx.combine(params, static), dict(micro_batches=micro_batches)
        step = ft.partial(optimizer.step, loss_without_keys)
        model, state, _ = step(model, state, x, x, **batch)
        return only_arrays(model), state

    args = params, optimizer.init(model), x
    analysis = jax.jit(step).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_micro_batches_save_memory():
    """Activations dominate: eight parts take little more than an eighth."""
    ratio = temporary_bytes(8) / temporary_bytes(1)
    assert ratio < 0.3, ratio


#
# Devices
#


def test_sharded_batch():
    mesh = make_mesh()
    args = jax.device_put((*make_data(), WEIGHTS), NamedSharding(mesh, P("batch")))
    optimizer = make_optimizer("fixed", kfac.Empirical())
    model = make_model()
    model, state, info = train_step(
        optimizer, weighted, model, optimizer.init(model), args, 2
    )
    got = eqx.filter(model, eqx.is_array), state, info
    assert len(args[0].sharding.device_set) == 8
    assert len(state.step.sharding.device_set) in (1, 8)
    assert_same_numbers(got, run(weighted, "fixed", kfac.Empirical(), 1)[0], 1e-12)


#
# Errors
#


def attempt(*args, micro_batches=1, loss_fn=loss_without_keys, **choices):
    optimizer = plain_kfac(**({"learning_rate": 0.1, "fisher": kfac.Exact()} | choices))
    model = make_model()
    step = lambda *args: optimizer.step(
        loss_fn, model, optimizer.init(model), *args, micro_batches=micro_batches
    )
    eqx.filter_eval_shape(step, *args)


def test_does_not_divide():
    x, y, _ = make_data()
    attempt(x, y, micro_batches=4)
    with pytest.raises(ValueError, match="16 examples cannot be split into 3 micro"):
        attempt(x, y, micro_batches=3)
    with pytest.raises(ValueError, match="16 examples cannot be split into 32 micro"):
        attempt(x, y, micro_batches=32)


def with_extra(model, x, y, extra):
    return loss_without_keys(model, x, y)


@pytest.mark.parametrize(
    "choices",
    [
        dict(micro_batches=2),
        dict(fisher=kfac.Exact(examples=4)),
        dict(learning_rate=kfac.QuadraticModel(examples=4)),
    ],
)
def test_not_of_single_examples(choices):
    """... is fine as long as nothing is split; else the message says what to do."""
    x, y, _ = make_data()
    extra = jr.PRNGKey(0)  # An array with an axis, unlike `jr.key(0)`.
    attempt(x, y, (jnp.zeros(()), jr.key(0), None), loss_fn=with_extra, **choices)
    with pytest.raises(ValueError, match=r"first axes are \[2, 16\].*by keyword"):
        attempt(x, y, extra, loss_fn=with_extra, **choices)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: dict(fisher=kfac.Exact(examples=m)),
        lambda m: dict(learning_rate=kfac.QuadraticModel(examples=m)),
    ],
)
def test_more_examples_than_there_are(make, micro_batches):
    x, y, _ = make_data()
    attempt(x, y, micro_batches=micro_batches, **make(16))
    with pytest.raises(ValueError, match="first 17 examples of a batch of 16"):
        attempt(x, y, micro_batches=micro_batches, **make(17))


@pytest.mark.parametrize(
    "number, error, message",
    [
        (0, ValueError, "`{}` must be at least 1, but is 0"),
        (-1, ValueError, "`{}` must be at least 1, but is -1"),
        (2.0, TypeError, "{}"),
    ],
)
def test_impossible_numbers(number, error, message):
    x, y, _ = make_data()
    with pytest.raises(error, match=message.format("micro_batches")):
        attempt(x, y, micro_batches=number)
    with pytest.raises(error, match=message.format("examples")):
        kfac.MonteCarlo(examples=number)
    with pytest.raises(error, match=message.format("examples")):
        kfac.QuadraticModel(examples=number)
