"""Which factors are decomposed together, which one by one, and when."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._inverse._factorise import factorise
from eqx_kfac._operator import inverse
from eqx_kfac._operator._factor import _inverse_whole
from eqx_kfac._optimizer._turns import Turn, Turns
from eqx_kfac._tag import map_tags

from .helpers import arrays, assert_same, normal, only_arrays, squared as loss_fn
from .plain import plain_kfac


class Net(eqx.Module):
    """Layers of equal shapes, side by side and stacked."""

    first: kfac.Linear
    hidden: list[kfac.Linear]
    stacked: kfac.Linear
    last: kfac.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 6)
        self.first = kfac.Linear(5, 4, key=keys[0])
        self.hidden = [kfac.Linear(4, 4, key=k) for k in keys[1:3]]
        make = lambda key: kfac.Linear(4, 4, key=key)
        self.stacked = eqx.filter_vmap(make)(jax.random.split(keys[3], 3))
        self.last = kfac.Linear(4, 2, use_bias=False, key=keys[4])

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        arrays, static = eqx.partition(self.stacked, eqx.is_array)

        def step(x, arrays):
            return jnp.tanh(eqx.combine(arrays, static)(x)), None

        return self.last(jax.lax.scan(step, x, arrays)[0])


make_net = ft.cache(eqx.filter_jit(Net))


@pytest.fixture(scope="module")
def problem():
    args = normal(16, 5, seed=1), normal(16, 2, seed=2)
    curve = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))
    return make_net(), args, curve(make_net(), *args)


SOLVERS = [
    kfac.Cholesky(),
    kfac.Eigh(),
    kfac.NewtonSchulz(tolerance=1e-14),
    kfac.SubspaceIteration(),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_as_if_each_were_alone(problem, solver):
    """The states, warm ones included, are those of every layer by itself."""
    model, _, curvature = problem

    def alone(tag, layer, factors, cold):
        def init(factors, previous):
            options = dict(damping=jnp.array(0.1), previous=previous)
            return solver.init(tag.block.operator(factors), options)

        for _ in range(factors.l2.ndim):
            init = jax.vmap(init, (0, None if cold is None else 0))
        return init(factors, cold)

    @eqx.filter_jit
    def cold_and_warm(curvature):
        cold = factorise(curvature, model, solver, 0.1)
        warm = factorise(curvature, model, solver, 0.1, cold)
        nothing = map_tags(lambda *_: None, model)
        each = [map_tags(alone, model, curvature, p) for p in (nothing, cold)]
        return (cold, warm), each

    for a, b in zip(*map(arrays, cold_and_warm(curvature)), strict=True):
        np.testing.assert_allclose(np.abs(a), np.abs(b), rtol=1e-10, atol=1e-12)


def test_equal_shapes_are_decomposed_together(problem):
    """The model has factors of 6, 5, 4 and 2 rows: four decompositions, however many
    layers. On a CPU, each matrix has its own, all of which are the same kernels."""
    model, _, curvature = problem
    run = lambda c: factorise(c, model, kfac.Cholesky(), jnp.array(0.1))

    matrices = [a for a in jtu.tree_leaves(curvature) if np.ndim(a) >= 2]
    lowered = jax.jit(run).trace(curvature).lower(lowering_platforms=("cuda",))
    assert len(re.findall("@[a-z_]*potrf", lowered.as_text())) == 4
    compiled = jax.jit(run).lower(curvature).compile().as_text()
    calls = re.findall(r'custom_call_target="lapack_dpotrf', compiled)
    assert len(calls) == len(matrices) > 4


@pytest.mark.parametrize("size", [3, 30, 401, 850])
def test_inverse_of_every_platform(size):
    """By halves on CPU, of large ones; elsewhere by one solve and one product."""
    x = np.asarray(normal(2 * size, size))
    matrix = x.T @ x / size + 0.1 * np.eye(size)
    want = np.linalg.inv(matrix)
    for fn in (jax.jit(inverse), jax.jit(_inverse_whole)):
        np.testing.assert_allclose(fn(matrix), want, rtol=1e-9, atol=1e-11)
        assert np.max(np.abs(fn(matrix + 1e-3) - want)) > 1e-5

    def count(platform, what):
        traced = jax.jit(inverse).trace(matrix)
        return traced.lower(lowering_platforms=(platform,)).as_text().count(what)

    assert count("cuda", "stablehlo.dot_general") == 1
    assert count("cuda", "stablehlo.triangular_solve") == 1
    assert (count("cpu", "stablehlo.dot_general") > 1) == (size > 400)


def test_lapack_is_not_called_for_batches(problem):
    """On CPU, batched calls may wait for each other for ever."""

    def ranks(fn, *args):
        text = jax.jit(fn).lower(*args).compile().as_text()
        calls = re.findall(r"= (.*?) custom-call\(.*lapack_", text)
        shapes = [s for call in calls for s in re.findall(r"f64\[([\d,]+)\]", call)]
        return {shape.count(",") + 1 for shape in shapes}

    model, _, curvature = problem
    for solver in SOLVERS:
        if isinstance(solver, kfac.NewtonSchulz):  # Does not call it at all.
            continue
        run = lambda c, s=solver: factorise(c, model, s, jnp.array(0.1))
        assert max(ranks(run, curvature)) <= 2
        several = jtu.tree_map(lambda a: np.stack([a, a]), curvature)
        assert max(ranks(jax.vmap(run), several)) <= 2
    matrices = np.stack([np.eye(4)] * 3)
    assert max(ranks(jax.vmap(inverse), matrices)) == 2
    assert max(ranks(jax.vmap(jnp.linalg.cholesky), matrices)) == 3  # As JAX has it.


def test_many_large_factors_under_vmap():
    """What hangs if LAPACK is called for batches (and several of these at a time)."""
    sizes = [130, 131, 132, 133]
    factors = [np.stack([np.eye(n)] * 4) for n in sizes]
    run = jax.jit(lambda factors: [jax.vmap(inverse)(f) for f in factors])
    for _ in range(5):
        for n, out in zip(sizes, jax.block_until_ready(run(factors)), strict=True):
            np.testing.assert_allclose(np.asarray(out)[0], np.eye(n), atol=1e-12)


@pytest.mark.parametrize("size", [3, 255, 400, 401, 520, 900])
def test_inverse_of_any_size(size):
    """Across the sizes at which it is computed by halves, of a matrix with a condition
    number of a million."""
    r = np.random.default_rng(size)
    q, _ = np.linalg.qr(r.normal(size=(size, size)))
    matrix = (q * np.logspace(0, -6, size)) @ q.T
    got = jax.jit(inverse)(jnp.asarray((matrix + matrix.T) / 2))
    exact = (q * np.logspace(0, 6, size)) @ q.T
    assert np.linalg.norm(got - exact) / 1e6 < 1e-9  # The norm of the exact one.


def test_reverse_mode_through_decompositions():
    """Decompositions one by one are as differentiable as those of JAX."""
    root = np.asarray(normal(2, 4, 6, seed=3))
    factors = root @ np.swapaxes(root, 1, 2)

    def logdet(factors):
        operator = kfac.operators.KroneckerOperator(*factors)
        return operator.logdet(0.1)

    def plain(factors):
        return jnp.linalg.slogdet(jnp.kron(*factors) + 0.1 * jnp.eye(16))[1]

    got, want = jax.jit(lambda f: (jax.grad(logdet)(f), jax.grad(plain)(f)))(factors)
    sym = lambda a: a + np.swapaxes(a, 1, 2)
    np.testing.assert_allclose(sym(got), sym(want), rtol=1e-9)
    several = np.stack([factors, 2 * factors])
    together = np.asarray(jax.jit(jax.vmap(jax.grad(logdet)))(several))
    np.testing.assert_allclose(together[0], got, rtol=1e-9)


def by_member(old, new, same, model=None):
    """`same(a, b)`, of all arrays, for every layer; for every member of stacked ones."""

    def of_layer(tag, layer, a, b):
        axes = len(tag.form.sizes(layer).stack)
        pairs = zip(arrays(a), arrays(b), strict=True)
        rows = [[x.reshape(-1, *x.shape[axes:]) for x in pair] for pair in pairs]
        members = range(len(rows[0][0]))
        return [all(same(x[i], y[i]) for x, y in rows) for i in members]

    return jtu.tree_leaves(map_tags(of_layer, model or make_net(), old, new))


def changed(old, new):
    return [not same for same in by_member(old, new, np.array_equal)]


@pytest.mark.parametrize("solver", [kfac.Cholesky(), kfac.Eigh()], ids=["chol", "eigh"])
def test_in_turn(problem, solver):
    """At the first step all layers are factorised, then every layer (and every one of
    stacked layers) once in a period; each time as if all were."""
    model, args, _ = problem
    choices = dict(solver=solver, fisher=kfac.Exact(), norm_constraint=1e-3)
    optimizer = plain_kfac(0.1, inverse_period=kfac.Staggered(3), **choices)

    @eqx.filter_jit
    def step(model, state):
        new_model, state, info = optimizer.step(loss_fn, model, state, *args)
        fresh = factorise(state.curvature, model, solver, optimizer.damping)
        return new_model, state, info, fresh

    state, seen = optimizer.init(model), []
    for number in range(7):
        model, new, info, fresh = step(model, state)
        seen.append(changed(state.inverse, new.inverse))
        close = lambda x, y: np.allclose(x, y, rtol=1e-9, atol=1e-12)
        assert by_member(new.inverse, fresh, close) == seen[-1]
        assert not info.rejected
        state = new
    assert all(seen[0])
    for start in range(1, 5):
        period = np.sum(seen[start : start + 3], axis=0)
        assert np.all(period == 1)
    assert [len(s) for s in seen] == [7] * 7
    assert max(sum(s) for s in seen[1:]) <= 3


def test_in_turn_is_the_same_at_period_one(problem):
    model, args, _ = problem
    results = []
    for period in (1, kfac.Staggered(1)):
        optimizer = plain_kfac(0.1, inverse_period=period, fisher=kfac.Exact())

        @eqx.filter_jit
        def three_steps(model, optimizer=optimizer):
            params, static = eqx.partition(model, eqx.is_array)

            def step(carry, _):
                model = eqx.combine(carry[0], static)
                model, state, _ = optimizer.step(loss_fn, model, carry[1], *args)
                return (only_arrays(model), state), None

            return jax.lax.scan(step, (params, optimizer.init(model)), length=3)[0][0]

        results.append(three_steps(model))
    assert_same(*results)


def test_more_steps_than_layers(problem):
    """Turns are spread over the period; there are no more of them than layers."""
    model, args, _ = problem
    assert Turns(model, 10**9).number == 7
    choices = dict(fisher=kfac.Exact(), norm_constraint=1e-3)
    optimizer = plain_kfac(0.1, inverse_period=kfac.Staggered(21), **choices)
    step = eqx.filter_jit(lambda m, s: optimizer.step(loss_fn, m, s, *args))
    state, when = optimizer.init(model), []
    for number in range(43):
        model, new, _ = step(model, state)
        if any(changed(state.inverse, new.inverse)):
            when.append(number)
        state = new
    assert when == list(range(0, 43, 3))


def test_turns_are_of_about_equal_work():
    sizes = [(64, 64), (64, 64), (32, 64), (16, 16), (64, 2), (2, 2)]
    make = lambda: [kfac.Linear(i, o, key=jax.random.key(0)) for i, o in sizes]
    model = eqx.filter_jit(make)()
    turns = Turns(model, 3)
    totals = np.zeros(3)
    for (i, o), turn in zip(sizes, turns.turns, strict=True):
        totals[turn.start] += (i + 1) ** 3 + o**3
    assert totals.max() < 1.4 * totals.mean()
    parts = [turns.only(turn, turns.turns) for turn in turns.different]
    assert jtu.tree_leaves(turns.join(parts)) == jtu.tree_leaves(turns.turns)


@pytest.mark.parametrize("members, most, parts", [(6, 5, 3), (24, 5, 4), (7, 5, 1)])
def test_turns_of_a_stack(members, most, parts):
    """A stack has as many turns as the largest divisor; other layers have the rest."""
    make = lambda key: kfac.Linear(4, 4, key=key)
    stack = lambda: eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), members))
    model = eqx.filter_jit(lambda: [stack(), make(jax.random.key(1))])()
    turns = Turns(model, most)
    assert turns.turns[0] == Turn(0, parts)
    assert turns.turns[1] == Turn(parts, 1)


class Stacks(eqx.Module):
    conv: kfac.Conv1d
    stack: kfac.Linear

    def __init__(self, block):
        self.conv = kfac.Conv1d(4, 4, 2, groups=2, key=jax.random.key(0), block=block)
        make = lambda key: kfac.Linear(3, 3, key=key, block=block)
        keys = jax.random.split(jax.random.key(1), (2, 3))
        self.stack = eqx.filter_vmap(eqx.filter_vmap(make))(keys)

    def __call__(self, x):
        x = self.conv(x.reshape(4, 3)).reshape(8)
        x = jnp.tanh(x[:6] + x[2:]).reshape(2, 3)
        on_one = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return eqx.filter_vmap(on_one)(self.stack, x).reshape(-1)


make_stacks = ft.cache(eqx.filter_jit(Stacks))


def bases(model, state):
    keep = lambda tag, layer, f: (f.output_vectors, f.input_vectors)
    return map_tags(keep, model, state.curvature)


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.EKFAC()])
@pytest.mark.parametrize("packed", [False, True])
def test_members_in_turn(block, packed):
    """Stacks of several axes, and the groups of a convolution; all of them again, where
    the damping was too small."""
    model, x = make_stacks(block), normal(20, 12, seed=2)
    y = jax.device_put(np.ones((20, 18)))
    choices = dict(fisher=kfac.Exact(), norm_constraint=1e-3, packed=packed)
    optimizer = plain_kfac(0.1, inverse_period=kfac.Staggered(6), **choices)
    is_explicit = isinstance(block, kfac.Kronecker)

    @eqx.filter_jit
    def step(model, state):
        new_model, new, info = optimizer.step(loss_fn, model, state, x, y)
        kept = [
            state.inverse if is_explicit else bases(model, state)
            for state in map(kfac.operators.unpacked, (state, new))
        ]
        return new_model, new, info, kept

    state, seen = eqx.filter_jit(optimizer.init)(model), []
    for number in range(8):
        if number == 7:
            state = eqx.tree_at(lambda s: s.refactorise, state, jnp.asarray(True))
        new_model, state, info, kept = step(model, state)
        assert not info.rejected
        same = by_member(*kept, np.array_equal, model)
        seen.append([not s for s in same])
        model = new_model
    assert all(seen[0]) and all(seen[7])
    assert np.all(np.sum(seen[1:7], axis=0) == 1)
    assert max(map(sum, seen[1:7])) == 2  # One of six in the stack, one of two groups.


def test_in_turn_with_bases(problem):
    """Eigenbases of EKFAC blocks are refreshed in turn, too."""
    _, args, _ = problem
    model = kfac.convert(kfac.revert(make_net()), blocks=kfac.EKFAC())
    optimizer = plain_kfac(
        0.1, norm_constraint=1e-3, inverse_period=kfac.Staggered(2), fisher=kfac.Exact()
    )
    step = eqx.filter_jit(lambda m, s: optimizer.step(loss_fn, m, s, *args))
    state, seen = optimizer.init(model), []
    for _ in range(5):
        model, new, info = step(model, state)
        seen.append(changed(bases(model, state), bases(model, new)))
        assert not info.rejected
        state = new
    assert all(seen[0])
    assert np.all(np.sum(seen[1:3], axis=0) == 1)
    assert np.all(np.sum(seen[3:5], axis=0) == 1)
