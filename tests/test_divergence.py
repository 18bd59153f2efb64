"""Losses that become many times what they were: not with `KFAC()`, and the way back with
any other choice."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._optimizer._rollback import init_rollback

from .helpers import arrays, assert_same_leaves, normal, squared, unwatched
from .plain import plain_kfac


X = normal(32, 6, dtype=np.float32)
Y = jnp.tanh(X @ normal(6, 3, seed=1, dtype=np.float32))
LABELS = np.argmax(np.asarray(Y), axis=-1)
KEY = jax.random.key(0)


@ft.cache
@eqx.filter_jit
def mlp():
    return kfac.convert(eqx.nn.MLP(6, 3, 16, 2, jnp.tanh, dtype=jnp.float32, key=KEY))


@eqx.filter_jit
def losses(optimizer, loss_fn, model, number, watch=True):
    """Of so many steps on one batch, and the state after them. (With no level, no loss is
    too large.)"""
    params, static = eqx.partition(model, eqx.is_array)

    def body(carry, key):
        params, state = carry
        state = state if watch else unwatched(state)
        model = eqx.combine(params, static)
        model, state, info = optimizer.step(loss_fn, model, state, X, Y, key=key)
        return (eqx.filter(model, eqx.is_array), state), info.loss

    start = params, optimizer.init(model)
    (_, state), losses = jax.lax.scan(body, start, jax.random.split(KEY, number))
    return losses, state


#
# Layers whose curvature comes later
#


class Adapted(eqx.Module):
    """A network that is sure, and two thin layers beside each of its own."""

    base: list
    down: list
    up: list

    def __init__(self, rank, key):
        keys, sizes = jax.random.split(key, 9), [(6, 32), (32, 32), (32, 3)]
        thin = ft.partial(kfac.Linear, use_bias=False, dtype=jnp.float32)
        own = ft.partial(eqx.nn.Linear, dtype=jnp.float32)
        zeros = lambda m: eqx.tree_at(lambda m: m.weight, m, replace_fn=jnp.zeros_like)
        self.base = [own(*s, key=k) for s, k in zip(sizes, keys[:3])]
        self.down = [thin(a, rank, key=k) for (a, _), k in zip(sizes, keys[3:6])]
        self.up = [zeros(thin(rank, b, key=k)) for (_, b), k in zip(sizes, keys[6:])]

    def __call__(self, x):
        for i, (base, down, up) in enumerate(zip(self.base, self.down, self.up)):
            x = jax.nn.relu(x) if i else x
            x = jax.lax.stop_gradient(base.weight) @ x + up(down(x))
        return 300 * x


class OfCurvatureAlone(kfac.LayerDamping):
    """A rule that does not look at gradients."""

    def __call__(self, damping, curvature, model, value, grads, terms):
        grads = jtu.tree_map(jnp.zeros_like, grads)
        return super().__call__(damping, curvature, model, value, grads, terms)


@eqx.filter_jit
def adapters(rank):
    net = Adapted(rank, KEY)
    mask = jtu.tree_map(eqx.is_inexact_array, net)
    mask = eqx.tree_at(lambda m: m.base, mask, jtu.tree_map(lambda _: False, net.base))
    return eqx.partition(net, mask)


def adapted_loss(frozen):
    def loss_fn(model, x, y):
        logits = jax.vmap(eqx.combine(model, frozen))(x)
        return kfac.SoftmaxCrossEntropy(logits, LABELS)

    return loss_fn


@pytest.mark.parametrize("rank", [2, 8])
def test_adapters_of_a_network_that_is_sure(rank):
    """There is no curvature behind zeros, and hardly any where all is certain, and wrong:
    what there is of a gradient decides how long steps are."""
    trained, frozen = adapters(rank)
    run = ft.partial(losses, loss_fn=adapted_loss(frozen), model=trained, number=60)
    loose = dict(norm_constraint=kfac.TrustRegion(measured_fraction=jnp.inf))
    for choices in ({}, loose):
        got, state = run(kfac.KFAC(**choices))
        assert got[0] > 10 and max(got) < 1.1 * got[0] and got[-1] < 0.2 * got[0]
        assert state.rejected == 0
    region = kfac.TrustRegion(measured_fraction=jnp.inf, promised_fraction=jnp.inf)
    only = dict(damping=OfCurvatureAlone(), norm_constraint=region)
    other, _ = run(kfac.KFAC(**only), watch=False)
    assert max(other) > 10 * other[0]


#
# The way back
#


LONG = dict(learning_rate=1.0, momentum=0.9, damping=1e-4)


@pytest.mark.parametrize(
    "choices",
    [
        LONG | dict(inverse_period=5),
        LONG | dict(averaging=0.9, learning_rate=3.0, damping=1e-3),
        LONG | dict(damping=kfac.LayerDamping(1e-3), learning_rate=3.0),
        LONG | dict(solver=kfac.Eigh()),
    ],
)
def test_a_run_that_would_be_lost(choices):
    optimizer = plain_kfac(**choices)
    got, state = losses(optimizer, squared, mlp(), 400)
    assert state.faults.divergence > 0 and state.rollback.caution >= 1
    assert np.all(np.isfinite(got)) and np.max(got) > 10 * got[0]
    assert np.median(got[100:]) < 0.1 * got[0]
    other, state = losses(optimizer, squared, mlp(), 400, watch=False)
    assert not np.median(other[-20:]) < got[0]
    assert state.faults.divergence == 0


def shifted(model, x, y, scale, shift):
    return scale * kfac.SquaredError(jax.vmap(model)(x), y) + shift


PLAIN = plain_kfac(0.1, damping=0.1, averaging=0.9)
BOUNDED = plain_kfac(0.1, damping=0.1, norm_constraint=kfac.TrustRegion())


@eqx.filter_jit
def step(model, state, scale=1.0, shift=0.0, optimizer=PLAIN):
    key = jax.random.fold_in(KEY, state.step)
    numbers = jnp.asarray(scale, jnp.float32), jnp.asarray(shift, jnp.float32)
    return optimizer.step(shifted, model, state, X, Y, *numbers, key=key)


def steps(model, state, number, *numbers, optimizer=PLAIN):
    infos = []
    for _ in range(number):
        model, state, info = step(model, state, *numbers, optimizer=optimizer)
        infos.append(info)
    return model, state, infos


@ft.cache
def begun():
    model, state, infos = steps(mlp(), PLAIN.init(mlp()), 5)
    assert not any(i.rejected for i in infos)
    return model, state


def faults_of(info):
    return {name for name, found in info.faults.as_dict().items() if found}


def test_one_batch_does_not_lead_back():
    model, state = begun()
    new, after, infos = steps(model, state, 3, 1.0, 1e3)
    assert [faults_of(i) for i in infos] == 3 * [{"divergence"}]
    assert_same_leaves(new, model)
    same = lambda s: (
        s.velocity,
        s.curvature,
        s.inverse,
        s.averaged_parameters,
        s.rollback.params,
    )
    assert_same_leaves(same(after), same(state))
    _, after, (info,) = steps(new, after, 1)
    assert not info.rejected and after.rollback.bad == 0 and after.rollback.caution == 1
    # A loss that is not quite as large is none of it.
    _, _, (info,) = steps(model, state, 1, 1.0, 5 * float(state.rollback.level))
    assert not info.rejected


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_back_to_the_last_good_parameters(size):
    """Where the loss is large, or not finite: to what they were, bit for bit."""
    model, state = begun()
    away = jtu.tree_map(lambda p: size * p if eqx.is_inexact_array(p) else p, model)
    last = "divergence" if size < 1e10 else "loss"
    new, after, infos = steps(away, state, 3)
    assert all(faults_of(i) == {last} for i in infos)
    assert_same_leaves(new, away)
    new, after, (info,) = steps(new, after, 1)
    assert faults_of(info) == {last, "divergence"}
    good = arrays(state.rollback.params)
    assert_same_leaves(sorted_arrays(new), sorted_arrays(good))
    assert not any(np.any(v) for v in arrays(after.velocity))
    assert_same_leaves(sorted_arrays(kfac.averaged(new, after)), sorted_arrays(good))
    assert after.weight == 0 and after.rollback.caution == 10
    # Which is good: from here on, it trains.
    _, end, infos = steps(new, after, 10)
    assert not any(i.rejected for i in infos) and infos[-1].loss < infos[0].loss
    np.testing.assert_allclose(end.rollback.caution, 10 * 0.98**10, rtol=1e-5)
    assert end.faults.divergence == (4 if size < 1e10 else 1)


@pytest.mark.parametrize("constraint", [1e-3, kfac.TrustRegion()])
def test_rare_batches_are_learnt_from_if_steps_are_bounded(constraint):
    """One in a hundred is more than ten times as hard: too few to raise what is usual."""

    def loss_fn(model, x, y, rare):
        # Another target for other inputs, which nobody else needs.
        x = x.at[:, 0].set(jnp.where(rare, 6.0, 0.0))
        return kfac.SquaredError(jax.vmap(model)(x), jnp.where(rare, y + 6, y))

    first = mlp()

    def run(optimizer):
        params, static = eqx.partition(first, eqx.is_array)

        def body(carry, i):
            params, state = carry
            args = eqx.combine(params, static), state, X, Y, i % 100 == 99
            key = jax.random.fold_in(KEY, i)
            model, state, info = optimizer.step(loss_fn, *args, key=key)
            return (eqx.filter(model, eqx.is_array), state), (info.loss, info.rejected)

        start = params, optimizer.init(first)
        return jax.lax.scan(body, start, jnp.arange(800))[1]

    jitted = eqx.filter_jit(run)
    found, rejected = jitted(plain_kfac(0.1, damping=0.1, norm_constraint=constraint))
    rare = np.asarray(found)[99::100]
    assert not np.any(rejected) and rare[0] > 30 and rare[-1] < 0.5 * rare[0]
    # Without a bound, nothing says how far such a batch may lead.
    found, rejected = jitted(plain_kfac(0.1, damping=0.1))
    rare = np.asarray(found)[99::100]
    assert np.all(rejected[99::100]) and rare[-1] > 0.9 * rare[0]


def test_bounded_steps_go_back_as_well():
    """After four losses in a row, from three of which a step was taken."""
    run = ft.partial(steps, optimizer=BOUNDED)
    model, state, _ = run(mlp(), BOUNDED.init(mlp()), 5)
    end, after, infos = run(model, state, 4, 1.0, 1e3)
    found = [(bool(info.rejected), faults_of(info)) for info in infos]
    assert found == 3 * [(False, set())] + [(True, {"divergence"})]
    good = sorted_arrays(arrays(state.rollback.params))
    assert_same_leaves(sorted_arrays(end), good)
    assert after.rollback.caution == 10
    assert after.extent.coupling == state.extent.coupling


@pytest.mark.parametrize("scale, shift", [(1.0, 1e3), (0.0, 0.0), (1.5, 0.1)])
def test_curvature_and_damping_follow_only_what_is_like_the_rest(scale, shift):
    """Neither a batch whose loss is many times what it has been, nor one in which nothing
    counts, though all is due; a batch that is somewhat harder does."""
    optimizer = plain_kfac(
        0.1, damping=kfac.LayerDamping(), norm_constraint=kfac.TrustRegion()
    )
    model, old, _ = steps(mlp(), optimizer.init(mlp()), 5, optimizer=optimizer)
    numbers = lambda s: (s.extent.coupling, s.extent.uphill)
    old = eqx.tree_at(numbers, old, (jnp.asarray(5.0), jnp.asarray(0.5)))
    _, new, info = step(model, old, scale, shift, optimizer)
    assert not info.rejected
    followed = [
        not jtu.tree_all(jtu.tree_map(lambda a, b: np.array_equal(a, b), *parts))
        for parts in (
            (old.curvature, new.curvature),
            (old.layer_damping, new.layer_damping),
            (old.extent.coupling, new.extent.coupling),
            (old.extent.uphill, new.extent.uphill),
            (old.extent.fallen, new.extent.fallen),
            (old.extent.fallen_square, new.extent.fallen_square),
            (old.extent.promised, new.extent.promised),
        )
    ]
    assert followed == ([True] * 7 if shift == 0.1 else [False] * 7)


def test_first_curvature_is_that_of_any_batch():
    """But an empty one has none, so that the next batch has the first."""
    model, state, info = step(mlp(), PLAIN.init(mlp()), 0.0)
    assert not info.rejected and state.weight == 0
    _, state, info = step(model, state)
    assert not info.rejected and state.weight == 1 and info.update_norm > 0


def test_estimates_from_elsewhere_are_held_against_the_loss_as_well():
    @eqx.filter_jit
    def take(model, state, shift):
        loss_fn = lambda m: kfac.SquaredError(jax.vmap(m)(X), Y) + shift
        found = kfac.value_grad_and_curvature(loss_fn)(model, key=KEY)
        value, grads, curvature = found
        updates, state = BOUNDED.update(
            grads, state, model, curvature=curvature, value=value
        )
        return eqx.apply_updates(model, updates), state

    model, state = mlp(), BOUNDED.init(mlp())
    for _ in range(3):
        model, state = take(model, state, jnp.zeros((), jnp.float32))
    _, other = take(model, state, jnp.asarray(1e3, jnp.float32))
    assert_same_leaves(arrays(other.curvature), arrays(state.curvature))
    assert other.rejected == 0 and other.weight == state.weight
    _, other = take(model, state, jnp.asarray(0.1, jnp.float32))
    assert other.weight > state.weight


def sorted_arrays(tree):
    return sorted(arrays(tree), key=lambda a: (a.shape, a.ravel()[0]))


def test_more_damping_is_a_shorter_step():
    model, state = begun()
    norms = []
    still = jtu.tree_map(jnp.zeros_like, state.velocity)
    for caution in (1.0, 100.0):
        where = lambda s: (s.rollback.caution, s.refactorise, s.velocity)
        new = jnp.asarray(caution, float), jnp.asarray(True), still
        _, _, info = step(model, eqx.tree_at(where, state, new))
        norms.append(info.update_norm)
    assert norms[1] < 0.1 * norms[0]


BOUNDED_BY_LENGTH = [
    1e-3,
    kfac.TrustRegion(promised_fraction=jnp.inf),
    kfac.TrustRegion(velocity_factor=1, promised_fraction=jnp.inf),
]


@pytest.mark.parametrize("constraint", BOUNDED_BY_LENGTH)
def test_caution_narrows_what_bounds_a_step(constraint):
    """By ten times, as a squared length: with numbers, and with a region."""
    optimizer = plain_kfac(10.0, damping=0.1, norm_constraint=constraint)
    model, norms = mlp(), []
    for caution in (1.0, 10.0):
        state = optimizer.init(model)
        state = eqx.tree_at(lambda s: s.rollback.caution, state, jnp.asarray(caution))
        take = eqx.filter_jit(optimizer.step)
        # The damping is the same: ten times as much, of a tenth.
        state = eqx.tree_at(
            lambda s: s.hyperparameters.damping,
            state,
            state.hyperparameters.damping / caution,
        )
        _, _, info = take(squared, model, state, X, Y, key=KEY)
        norms.append(float(info.update_norm))
    np.testing.assert_allclose(norms[0] / norms[1], 10**0.5, rtol=1e-4)


def told(state, size):
    """After a step at which the loss was said to be `size` times what is usual."""
    _, state, (info,) = steps(mlp(), state, 1, 0.0, size * float(state.rollback.usual))
    return state, "divergence" in faults_of(info)


def test_losses_of_a_row_are_not_usual_for_each_other():
    """Each is compared with what was usual before all of them. If they lead back, that
    is what is usual again."""
    _, state = begun()
    level = float(state.rollback.level)
    for i, size in enumerate([11.5, 11.4, 11.3, 11.2]):
        state, diverged = told(state, size)
        assert diverged and state.rollback.bad == i + 1
        np.testing.assert_allclose(state.rollback.usual, level, rtol=1e-6)
    assert state.rollback.caution == 10
    np.testing.assert_allclose(state.rollback.level, level, rtol=1e-6)


@pytest.mark.parametrize("easy, hard, most", [(19, 1, 8), (40, 1, 15), (1, 3, 2)])
def test_some_data_are_harder_than_others(easy, hard, most):
    """Batches that always are so large are learnt from after a while."""
    _, state = begun()
    level, rounds = float(state.rollback.level), 0
    rejected = hard
    while rejected:
        rejected = 0
        for size in [0.5] * easy + [50.0] * hard:
            _, state, (info,) = steps(mlp(), state, 1, 0.0, size * level)
            rejected += bool(info.rejected)
        rounds += 1
        assert rounds <= most and state.rollback.caution == 1
    assert rounds > 1


def test_blocks_of_hard_data_are_no_explosion():
    """Where the last good parameters are as bad, it is not the parameters."""
    _, state = begun()
    cautions = []
    for _ in range(12):
        for size in [1.0] * 20 + [50.0] * 5:
            _, state, _ = steps(mlp(), state, 1, 0.0, size)
        cautions.append(float(state.rollback.caution))
    assert cautions == [1.0] * 12 and state.faults.divergence < 60
    state, diverged = told(state, 1.0)
    assert not diverged


def test_steps_that_explode_again_and_again():
    """What is usual grows each time, if only a little: the data may be to blame."""
    _, state = begun()
    level = float(state.rollback.level)
    for i in range(3):
        for size in [1e6] * 4 + [1.0]:
            _, state, _ = steps(mlp(), state, 1, 0.0, size * level)
        grown = 2.0**i
        np.testing.assert_allclose(
            state.rollback.level, level * grown, rtol=0.05 * i + 0.02
        )


@pytest.mark.parametrize("number", [3, 4, 6, 9])
def test_there_is_nothing_to_go_back_to_yet(number):
    """The first losses are finite, but nothing that follows from them."""

    def steep(model, x, y):
        """Of which the gradient is none."""
        loss = kfac.SquaredError(jax.vmap(model)(x), y)
        first = jnp.sum(eqx.filter(model, eqx.is_inexact_array).layers[0].weight)
        return loss + 0 * jnp.sqrt(jnp.abs(first - jax.lax.stop_gradient(first)))

    model, state = mlp(), PLAIN.init(mlp())
    take = eqx.filter_jit(lambda *args: PLAIN.step(steep, *args, X, Y, key=KEY))
    for _ in range(number):
        model, state, info = take(model, state)
        assert info.faults.gradient
    assert_same_leaves(sorted_arrays(model), sorted_arrays(mlp()))
    _, _, infos = steps(model, state, 5)
    assert infos[-1].loss < infos[0].loss


def test_other_data_are_accepted():
    """If the loss is as large at the parameters that were good, it is not they."""
    model, state = begun()
    model, state, infos = steps(model, state, 12, 1.0, 1e3)
    assert [bool(i.rejected) for i in infos] == 8 * [True] + 4 * [False]
    assert state.rollback.level > 900 and state.rollback.caution == 1
    assert infos[-1].loss < infos[8].loss


@pytest.mark.parametrize("scale, shift", [(1.0, -50.0), (1e-4, 0.0), (0.0, 0.0)])
def test_losses_of_any_size(scale, shift):
    """Negative ones, small ones, and a first batch that is empty."""
    model, state = mlp(), PLAIN.init(mlp())
    model, state, first = steps(model, state, 2, scale, shift)
    _, state, then = steps(model, state, 3)
    assert state.faults.divergence == 0 and not any(i.faults.divergence for i in first)
    assert not any(i.rejected for i in then)


def test_update_leads_back_as_well():
    model, state = begun()
    away = jtu.tree_map(lambda p: 1e3 * p if eqx.is_inexact_array(p) else p, model)
    estimate = eqx.filter_jit(kfac.value_grad_and_curvature(squared))
    update = eqx.filter_jit(PLAIN.update)
    value, grads, curvature = estimate(away, X, Y, key=KEY)
    told, untold, now = state, state, away
    for _ in range(4):
        given = dict(curvature=curvature, value=value)
        updates, told = update(grads, told, now, **given)
        now = eqx.apply_updates(now, updates)
        _, untold = update(grads, untold, away, curvature=curvature)
    want = sorted_arrays(arrays(state.rollback.params))
    for g, w in zip(sorted_arrays(now), want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-3)  # The difference was rounded.
    assert told.faults.divergence == 4 and untold.faults.divergence == 0
    assert_same_leaves(untold.rollback, state.rollback)


def test_losses_that_are_no_numbers_leave_the_level_what_it_was():
    """While they last, and when the parameters go back."""
    usual, level = [], []
    model = {"w": jnp.ones(2)}
    record = init_rollback(model)
    yes, no = jnp.asarray(True), jnp.asarray(False)
    for _ in range(3):
        record = record.after(model, jnp.asarray(100.0), no, no)
    for _ in range(14):
        record = record.after(model, jnp.asarray(jnp.nan), yes, yes)
        usual.append(float(record.usual))
        level.append(float(record.level))
    assert usual == [100.0] * 14
    assert level[3] == level[-1] == 100.0
    assert not record.diverged(jnp.asarray(900.0))
    assert record.diverged(jnp.asarray(1100.0))
    # A finite loss as large as that is then taken for what losses now are.
    record = record.after(model, jnp.asarray(1100.0), yes, no)
    assert float(record.level) == 1100.0
