"""What does not go well: bad batches, bad numbers, and runs that are killed."""

import dataclasses
import functools as ft
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac
from eqx_kfac._curvature._average import is_finite
from eqx_kfac._inner_products import all_finite

from .helpers import arrays, normal
from .plain import plain_kfac


STEPS, BATCH = 40, 16


class Net(eqx.Module):
    """Two layers; the gate between them may be shut."""

    layers: tuple

    def __init__(self, seed=0):
        keys = jr.split(jr.key(seed))
        self.layers = (kfac.Linear(3, 4, key=keys[0]), kfac.Linear(4, 2, key=keys[1]))

    def __call__(self, x, gate):
        return self.layers[1](gate * jnp.tanh(self.layers[0](x)))


def gated_loss(model, batch):
    """With a penalty whose gradient is infinite at zero: times zero, it is NaN."""
    out = jax.vmap(model, in_axes=(0, None))(batch["x"], batch["gate"])
    squares = jnp.sum(model.layers[0].bias.astype(float) ** 2)
    penalty = 1e-6 * jnp.sqrt(batch["switch"] * (1 + squares))
    return kfac.SquaredError(out, batch["y"]) + penalty


def same(a, b):
    """Bit for bit, NaN included."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    return all(x.tobytes() == y.tobytes() for x, y in zip(arrays(a), arrays(b)))


#
# Faults
#


BASE = dict(learning_rate=0.2, damping=1e-2, ema=0.9)


def good_data(dtype, seed=0):
    """Batches from a noisy teacher, and the numbers for every step."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(STEPS, BATCH, 3))
    teacher = rng.normal(size=(2, 3))
    y = np.tanh(x @ teacher.T / 2) + 0.05 * rng.normal(size=(STEPS, BATCH, 2))
    batches = dict(x=x, y=y, gate=np.ones(STEPS), switch=np.ones(STEPS))
    batches = {
        name: a if name == "switch" else a.astype(dtype) for name, a in batches.items()
    }
    return batches | {name: np.full(STEPS, value) for name, value in BASE.items()}


def put(name, value, where=()):
    """A fault that overwrites (a part of) one array at one step."""

    def inject(data, step):
        data[name][(step, *where)] = value

    return inject


def all_of(*faults):
    def inject(data, step):
        for fault in faults:
            fault(data, step)

    return inject


def duplicate(data, step):
    for name in ("x", "y"):
        data[name][step] = data[name][step][:1]


def magnify(name, factor):
    def inject(data, step):
        data[name][step] *= factor

    return inject


ZERO = put("x", 0.0)
SHUT = put("gate", 0.0)
ALONE = put("ema", 0.0)  # No other batch is averaged in.
FIRST = (0, 0)


def bad_batches(huge):
    """Faults, and the field of `Faults` that tells; `huge` has no finite square."""
    return {
        "NaN input": (put("x", np.nan, FIRST), "loss"),
        "NaN inputs": (put("x", np.nan), "loss"),
        "NaN target": (put("y", np.nan, FIRST), "loss"),
        "infinite target": (put("y", -np.inf, FIRST), "loss"),
        "huge target": (put("y", huge, FIRST), "loss"),
        "infinite input": (put("x", np.inf, FIRST), "gradient"),
        "square root at zero": (put("switch", 0.0), "gradient"),
        "huge input": (put("x", huge, FIRST), "curvature"),
    }


HARMLESS = {
    "zero inputs": (ZERO, None),
    "zero inputs alone": (all_of(ZERO, ALONE), None),
    "dead layer": (SHUT, None),
    "dead layer alone": (all_of(SHUT, ALONE), None),
    "nothing alive, alone": (all_of(ZERO, SHUT, ALONE), None),
    "duplicates": (duplicate, None),
    "duplicates alone": (all_of(duplicate, ALONE), None),
}
SINGULAR = all_of(ZERO, ALONE, put("damping", 0.0))
OUT_OF_RANGE = {
    "negative damping": (put("damping", -1.0), "hyperparameters"),
    "another sign of the average": (put("ema", 2.0), "hyperparameters"),
    "uphill": (put("learning_rate", -0.1), "hyperparameters"),
}
STRICT = {n: f for n, f in OUT_OF_RANGE.items() if "average" in n}


def bad_numbers(singular, large, infinite):
    """`singular` is what tells of a singular factor without damping."""
    return {
        "large damping": (put("damping", 1e8), None),
        "singular": (SINGULAR, singular),
        "exploding": (put("learning_rate", large), "increase"),
        "overflowing": (put("learning_rate", infinite), "update"),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, and the faults it meets."""

    optimizer: kfac.KFAC
    faults: dict
    dtype: str = "float64"
    # Some harmless faults have effects on later steps, which may then be rejected.
    lasting: bool = False

    @property
    def adaptive(self):
        return isinstance(self.optimizer.damping, kfac.LevenbergMarquardt)


fixed = ft.partial(
    plain_kfac, 0.2, 0.5, 1e-2, fisher=kfac.Exact(), inverse_period=1, averaging=0.9
)
quadratic = kfac.QuadraticModel()
adaptive = plain_kfac(
    quadratic,
    quadratic,
    kfac.LevenbergMarquardt(0.1, interval=1),
    fisher=kfac.Exact(),
    inverse_period=1,
    averaging=0.9,
    max_increase=0.5,
)
# Without a guard, no look is taken at where an exploding step leads.
unseen = bad_numbers("update", 1e6, 1e200)
unseen.pop("exploding")
BOUNDS = {
    "lowest damping": (put("damping", 1e-8), None),
    "highest damping": (put("damping", 1e8), None),
    "singular": (SINGULAR, "factorisation"),
}
HALF = {
    "NaN input": (put("x", np.nan, FIRST), "loss"),
    "NaN target": (put("y", np.nan, FIRST), "loss"),
    "activations overflow": (put("gate", np.inf), "loss"),
    "square root at zero": (put("switch", 0.0), "gradient"),
    "squares would overflow": (magnify("x", 300), None),
}
CASES = {
    "Cholesky": Case(
        fixed(max_increase=0.5),
        bad_batches(1e200)
        | HARMLESS
        | OUT_OF_RANGE
        | bad_numbers("factorisation", 1e6, 1e200),
    ),
    "Eigh": Case(
        fixed(solver=kfac.Eigh()), bad_batches(1e20) | HARMLESS | unseen, "float32"
    ),
    "adaptive": Case(
        adaptive, bad_batches(1e200) | HARMLESS | STRICT | BOUNDS, lasting=True
    ),
    "float16": Case(
        fixed(max_increase=0.5),
        HALF | HARMLESS | STRICT | bad_numbers("factorisation", 1e3, 1e5),
        "float16",
    ),
    # Most steps use the curvature and its inverse of an earlier one.
    "periods": Case(
        fixed(
            fisher=kfac.MonteCarlo(),
            max_increase=0.5,
            curvature_period=2,
            inverse_period=3,
        ),
        {n: f for n, f in bad_batches(1e200).items() if f[1] != "curvature"}
        | {n: f for n, f in HARMLESS.items() if "alone" not in n}
        | STRICT,
        lasting=True,
    ),
}
BATCH_FAULTS = ("hyperparameters", "loss", "gradient", "curvature")
REJECTING = (*BATCH_FAULTS, "update", "increase", "divergence")
POSITIONS = (0, 1, 3, 5, 6, 7, 10, 12, 13, 16, 18, 19, 21, 24, 25, 28, 30, 31)


def injected(case, faults, rotation):
    """Data with `faults` in turn at all positions, and what is expected at each step."""
    data, expected = good_data(case.dtype), [None] * STEPS
    if case.adaptive:
        data["damping"][:] = np.nan  # Left to the rule.
    names = list(faults)
    for index, step in enumerate(POSITIONS if names else ()):
        fault, expected[step] = faults[names[(index + rotation) % len(names)]]
        fault(data, step)
    return data, expected


#
# Runs
#


def one_step(optimizer, model, state, data):
    """With the numbers of that step (NaN: as they are) set by hand, as a user may."""
    batch = {name: a for name, a in data.items() if name not in BASE}
    for name in BASE:
        old, new = getattr(state, name), data[name]
        if old is not None:
            where = lambda s: getattr(s, name)
            state = eqx.tree_at(where, state, jnp.where(jnp.isnan(new), old, new))
    key = jr.fold_in(jr.key(0), state.step)
    return optimizer.step(gated_loss, model, state, batch, key=key)


@eqx.filter_jit
def scan(optimizer, model, data):
    """All steps; the parameters, state and info after each."""
    params, static = eqx.partition(model, eqx.is_array)

    def body(carry, data):
        params, state = carry
        model = eqx.combine(params, static)
        model, state, info = one_step(optimizer, model, state, data)
        params = eqx.filter(model, eqx.is_array)
        return (params, state), (params, state, info)

    return jax.lax.scan(body, (params, optimizer.init(model)), data)[1]


@ft.cache
@eqx.filter_jit
def net_of(dtype):
    return kfac.cast(Net(), dtype) if dtype != "float64" else Net()


def make_model(case):
    return net_of(case.dtype)


def run(case, data):
    """A list over steps, from the start on (where there is no info)."""
    model = make_model(case)
    start = eqx.filter(model, eqx.is_array), case.optimizer.init(model), None
    stacked = jtu.tree_map(np.asarray, scan(case.optimizer, model, data))
    return [start] + [jtu.tree_map(lambda a: a[t], stacked) for t in range(STEPS)]


def clean_loss(params):
    """On all good data at once, by hand."""
    data = good_data("float64")
    x, y = data["x"].reshape(-1, 3), data["y"].reshape(-1, 2)
    for layer, activation in zip(params.layers, (np.tanh, lambda z: z)):
        weight, bias = (np.asarray(p, float) for p in (layer.weight, layer.bias))
        x = activation(x @ weight.T + bias)
    return 0.5 * np.mean(np.sum((x - y) ** 2, axis=1))


def kept(result, expected):
    """What a rejected step leaves alone."""
    params, state, _ = result
    parts = [params, state.averaged_parameters]
    if expected in BATCH_FAULTS:
        velocity = jtu.tree_map(lambda v: v + 0, state.velocity)  # Zero has no sign.
        parts += [velocity, state.curvature, state.inverse, state.weight]
    return parts


def check(before, after, expected, step, also=()):
    """One step did what it should."""
    _, old_state, _ = before
    params, state, info = after
    faults = {expected, *also} - {None}
    assert faults_of(info) == faults, step
    rejected = not faults.isdisjoint(REJECTING)
    assert bool(info.rejected) == rejected
    assert int(state.step) == step + 1
    assert int(state.rejected) == int(old_state.rejected) + rejected
    for name, count in state.faults.as_dict().items():
        assert int(count) == int(getattr(old_state.faults, name)) + (name in faults)
    assert all(np.all(np.isfinite(a)) for a in arrays((params, state)))
    assert np.isfinite(info.update_norm)
    if rejected:
        if not state.rollback.back:
            assert same(kept(before, expected), kept(after, expected))
        assert info.update_norm == 0
        if faults & {"update", "increase"}:
            assert not any(map(np.any, arrays(state.velocity)))
    else:
        assert np.isfinite(info.loss) and np.isfinite(info.gradient_norm)
        assert not same(before[1].averaged_parameters, after[1].averaged_parameters)


def faults_of(info):
    return {name for name, yes in info.faults.as_dict().items() if yes}


#
# Tests
#


@pytest.mark.parametrize("name", CASES)
def test_faults(name):
    """Every fault at every position of a run is seen for what it is, does no harm, and
    is counted."""
    case = CASES[name]
    start = clean_loss(make_model(case))
    number, unexpected, seen = 0, 0, set()
    for rotation in range(len(case.faults)):
        data, expected = injected(case, case.faults, rotation)
        results, rejected = run(case, data), 0
        for step, (_, _, info) in enumerate(results[1:]):
            also = set()
            if case.lasting:
                also = faults_of(info) & {"increase", "divergence"} - {expected[step]}
                unexpected += bool(also)
            check(results[step], results[step + 1], expected[step], step, also)
            rejected += bool(info.rejected)
        if case.adaptive:
            dampings = [float(state.damping) for _, state, _ in results]
            assert 1e-8 <= min(dampings) and max(dampings) <= 1e8
        params, state, _ = results[-1]
        assert int(state.rejected) == rejected
        assert clean_loss(params) < (0.9 if case.lasting else 0.1) * start
        number += len(POSITIONS)
        seen |= set(expected)
    assert number == len(POSITIONS) * len(case.faults)
    assert unexpected <= 0.04 * STEPS * len(case.faults)
    assert {"loss", "gradient", None} < seen


@pytest.mark.parametrize("name", CASES)
def test_without_faults(name):
    """Nothing is reported, and training gets further."""
    case = CASES[name]
    data, expected = injected(case, {}, 0)
    results = run(case, data)
    for step in range(STEPS):
        check(results[step], results[step + 1], None, step)
        assert not same(results[step][0], results[step + 1][0])
    assert clean_loss(results[-1][0]) < 0.25 * clean_loss(results[0][0])


def leave_out(data, steps):
    """The data without some steps, filled up with the last one."""
    order = [t for t in range(STEPS) if t not in steps]
    order += [STEPS - 1] * (STEPS - len(order))
    return {name: a[order] for name, a in data.items()}


def trained(result):
    params, state, _ = result
    parts = params, state.velocity, state.curvature, state.inverse, state.weight
    return *parts, state.averaged_parameters


@pytest.mark.parametrize("name", ["Cholesky", "Eigh", "float16"])
def test_bad_batches_are_as_if_they_had_not_been(name):
    """Bit for bit: the good steps are those of a run without the bad batches."""
    case = CASES[name]
    faults = {
        fault: (inject, expected)
        for fault, (inject, expected) in case.faults.items()
        if expected in (*BATCH_FAULTS, None)
    }
    for rotation in range(3):
        data, expected = injected(case, faults, rotation)
        results = run(case, data)[1:]
        bad = [t for t in range(STEPS) if expected[t] is not None]
        good = [r for t, r in enumerate(results) if t not in bad]
        assert 5 < len(bad) < STEPS - 5
        without = run(case, leave_out(data, bad))[1:]
        for a, b in zip(good, without):
            assert same(trained(a), trained(b))
        # Leaving out a good step as well is not the same.
        other = run(case, leave_out(data, [*bad, 35]))[1:]
        assert not same(trained(good[-1]), trained(other[len(good) - 2]))


def test_a_velocity_that_is_not_finite_is_forgotten():
    """Whoever has put it into the state, the run goes on."""
    case = CASES["Cholesky"]
    data, _ = injected(case, {}, 0)
    params, state, _ = run(case, data)[5]
    model = eqx.combine(params, make_model(case))
    velocity = jtu.tree_map(lambda v: jnp.asarray(v).at[0].set(jnp.nan), state.velocity)
    state = state._replace(velocity=velocity)
    step = eqx.filter_jit(one_step)
    fifth, sixth = ({name: a[t] for name, a in data.items()} for t in (5, 6))
    model, state, info = step(case.optimizer, model, state, fifth)
    assert bool(info.rejected) and faults_of(info) == {"update"}
    assert not any(map(np.any, arrays(state.velocity)))
    _, state, info = step(case.optimizer, model, state, sixth)
    assert not bool(info.rejected) and any(map(np.any, arrays(state.velocity)))


def test_a_factorisation_that_is_asked_for_waits_for_a_good_step():
    """A factorisation comes with the next step that is not rejected, and once."""
    case = CASES["periods"]
    data, _ = injected(case, {}, 0)
    data["x"][8] = np.nan
    params, state, _ = run(case, data)[6]  # Neither 7, nor 8, nor 10 is a third step.
    model = eqx.combine(params, make_model(case))
    step = eqx.filter_jit(one_step)

    def after(asked):
        now = model, eqx.tree_at(lambda s: s.refactorise, state, jnp.asarray(asked))
        told = []
        for t in (8, 7, 10):
            before = now[1].inverse
            *now, info = step(case.optimizer, *now, {n: a[t] for n, a in data.items()})
            kept = same(before, now[1].inverse)
            told.append((bool(info.rejected), kept, bool(now[1].refactorise)))
        return told

    assert after(True)[:2] == [(True, True, True), (False, False, False)]
    assert after(False)[:2] == [(True, True, False), (False, True, False)]
    assert after(True)[2][1:] == after(False)[2][1:]


@pytest.mark.parametrize("field", ["increase", "update"])
def test_finite_curvature_of_a_rejected_step_counts(field):
    """Where only the step was bad, the batch was not: its curvature is averaged in, and
    nothing else is."""
    case = CASES["Cholesky"]
    faults = {n: f for n, f in case.faults.items() if f[1] == field}
    data, expected = injected(case, faults, 0)
    results = run(case, data)
    for step in POSITIONS:
        before, after = results[step], results[step + 1]
        check(before, after, field, step)
        assert not same(before[1].curvature, after[1].curvature)
        assert after[1].weight == 0.9 * before[1].weight + 1


def test_rejected_steps_end():
    """Curvature of nothing but zeros makes the next steps too long. They are rejected; as
    their batches are averaged in nevertheless, steps are good again before long."""
    case = CASES["Cholesky"]
    data, _ = injected(case, {}, 0)
    data["damping"][:] = 1e-8
    HARMLESS["nothing alive, alone"][0](data, 0)
    results = run(case, data)[1:]
    rejected = [bool(info.rejected) for _, _, info in results]
    number = sum(rejected)
    assert 0 < number < 20 and not any(rejected[number + 1 :])
    for step in np.flatnonzero(rejected):
        assert faults_of(results[step][2]) == {"increase"}
    assert clean_loss(results[-1][0]) < 0.7 * clean_loss(make_model(case))


def test_rejection_with_donated_buffers():
    """The only copy of the state survives every fault."""
    case = CASES["Cholesky"]
    data, expected = injected(case, case.faults, 0)
    on_device = jtu.tree_map(jnp.asarray, data)

    @eqx.filter_jit(donate="all")
    def step(model, state):
        now = jtu.tree_map(lambda a: a[state.step], on_device)
        return one_step(case.optimizer, model, state, now)

    model = eqx.filter_jit(Net)()
    state = case.optimizer.init(model)
    results = run(case, data)[1:]
    for t, want in enumerate(results):
        old = state
        model, state, info = step(model, state)
        assert old.velocity[".layers[0].weight"].is_deleted()
        for got, other in zip(arrays((model, state)), arrays(want[:2]), strict=True):
            np.testing.assert_allclose(got, other, rtol=1e-9, atol=1e-12)
        assert bool(info.rejected) == (expected[t] in REJECTING)


#
# Checkpoints
#


class Tokens(eqx.Module):
    """A network whose embedding has no tag: the fallback trains it."""

    embedding: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, seed, dtype):
        keys = jr.split(jr.key(seed))
        self.embedding = eqx.nn.Embedding(5, 3, dtype=dtype, key=keys[0])
        self.mlp = kfac.convert(
            eqx.nn.MLP(3, 2, 4, 1, jnp.tanh, dtype=dtype, key=keys[1])
        )

    def __call__(self, token):
        return self.mlp(self.embedding(token))


def token_loss(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


# Functions, which are equal only to themselves.
ADAM, SCHEDULE = optax.adam(1e-2), optax.linear_schedule(0.1, 0.01, 6)


def checkpointed_optimizer(kind):
    common = dict(
        fallback=ADAM,
        averaging=0.9,
        inverse_period=3,
        curvature_period=2,
        max_increase=0.2,
    )
    if kind == "fixed":
        return plain_kfac(SCHEDULE, 0.9, **common)
    rule = kfac.LevenbergMarquardt(1.0, interval=2)
    return plain_kfac(quadratic, quadratic, rule, solver=kfac.Eigh(), **common)


@eqx.filter_jit
def init_of(optimizer, model):
    return optimizer.init(model)


@eqx.filter_jit
def token_step(optimizer, model, state):
    """All that is random follows from the step."""
    batch_key, key = jr.split(jr.fold_in(jr.key(7), state.step))
    x = jr.randint(batch_key, (8,), 0, 5)
    return optimizer.step(token_loss, model, state, x, x % 2, key=key)


@pytest.mark.parametrize(
    "kind, dtype", [("fixed", jnp.float32), ("adaptive", jnp.float64)]
)
def test_killed_and_resumed(kind, dtype):
    """After any number of steps, from a file alone, bit for bit."""
    with jax.numpy_dtype_promotion("standard"):  # As optax's Adam needs.
        optimizer = checkpointed_optimizer(kind)
        make_model = eqx.filter_jit(lambda seed: Tokens(seed, dtype))
        model = make_model(np.asarray(0))
        state = init_of(optimizer, model)
        files, results = [], []
        for _ in range(7):
            file = io.BytesIO()
            eqx.tree_serialise_leaves(file, (model, state))
            files.append(file.getvalue())
            model, state, info = token_step(optimizer, model, state)
            results.append((model, state, info))
        assert not any(bool(info.rejected) for _, _, info in results)
        for killed, file in enumerate(files):
            optimizer = checkpointed_optimizer(kind)
            model = make_model(np.asarray(1))
            like = model, init_of(optimizer, model)
            assert not same(like[0], results[-1][0])
            model, state = eqx.tree_deserialise_leaves(io.BytesIO(file), like)
            for want in results[killed:]:
                got = token_step(optimizer, model, state)
                model, state, _ = got
                assert same(got, want)
        # The randomness matters: at another step, it is another run.
        step = lambda s: s.step
        model, state = eqx.tree_deserialise_leaves(io.BytesIO(files[2]), like)
        other = token_step(
            optimizer,
            model,
            eqx.tree_at(step, state, jax.device_put(np.asarray(state.step) + 6)),
        )
        assert not same(other[0], results[2][0])


#
# Whether curvature is finite, without looking at all of it
#


class Mixed(eqx.Module):
    dense: kfac.Linear
    no_bias: kfac.Linear
    stacked: kfac.Linear
    conv: kfac.Conv1d

    def __init__(self, block):
        keys = jax.random.split(jax.random.key(0), 4)
        make = lambda key: kfac.Linear(4, 4, key=key, block=block)
        self.dense = make(keys[0])
        self.no_bias = kfac.Linear(4, 4, use_bias=False, key=keys[1], block=block)
        self.stacked = eqx.filter_vmap(make)(jax.random.split(keys[2], 2))
        self.conv = kfac.Conv1d(2, 2, 2, groups=2, key=keys[3], block=block)

    def __call__(self, x):
        x = self.no_bias(self.dense(x))
        x = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.stacked, x)
        return self.conv(x).reshape(-1)


def finite_curvature(block):
    """Of a model on some inputs: whether all factors are finite, and what is said."""
    model = eqx.filter_jit(Mixed)(block)

    def loss_fn(model, x):
        y = jax.vmap(model)(x)
        return kfac.SquaredError(y, jnp.zeros_like(y))

    @eqx.filter_jit
    def run(x, scale):
        scaled = jax.tree.map(lambda p: p * scale, eqx.filter(model, eqx.is_array))
        factors = kfac.curvature(loss_fn, kfac.Exact())(eqx.combine(scaled, model), x)
        return all_finite(factors), is_finite(factors)

    return lambda x, scale: [bool(flag) for flag in run(x, jnp.asarray(scale))]


@pytest.mark.parametrize(
    "block",
    [
        kfac.Kronecker(),
        kfac.Kronecker(kfac.Reduce()),
        kfac.Kronecker(diagonal_input=True, diagonal_output=True),
        kfac.EKFAC(),
        kfac.TNT(),
        kfac.Diagonal(),
    ],
    ids=["kronecker", "reduce", "diagonals", "ekfac", "tnt", "diagonal"],
)
def test_whether_curvature_is_finite(block):
    run = finite_curvature(block)
    x = np.asarray(normal(5, 4, seed=1))
    assert run(x, 1.0) == [True, True]
    bad_inputs = [
        ((2, 3), np.nan),  # One column of a factor.
        ((2, 3), 1e200),  # Its square overflows, with others it does not.
        (0, np.inf),
    ]
    for where, value in bad_inputs:
        bad = x.copy()
        bad[where] = value
        assert run(bad, 1.0) == [False, False]
    assert run(x, 1e120) == [False, False]  # Gradients overflow.


@pytest.mark.parametrize("scale, faults", [(1.0, []), (1e12, ["gradient"])])
def test_a_gradient_whose_norm_overflows_is_one_fault(scale, faults):
    """And not an unseen one, too: of faults that follow from each other, the first."""
    key = jr.key(0)
    mlp = eqx.nn.MLP(4, 3, 8, 1, dtype=jnp.float32, key=key)
    model, x = kfac.convert(mlp), normal(5, 4, dtype=np.float32) * np.float32(scale)
    y, optimizer = normal(5, 3, seed=1, dtype=np.float32), kfac.KFAC()

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y)

    step = eqx.filter_jit(ft.partial(optimizer.step, loss_fn))
    _, _, info = step(model, optimizer.init(model), x, y, key=key)
    assert [name for name, n in info.faults.as_dict().items() if n] == faults


def test_inputs_that_nobody_centred():
    """All units of two layers depend on a few large inputs, such as years, so that the
    curvature's least eigenvalues are rounding, and larger than any damping."""
    rng = np.random.default_rng(0)
    x = (2000 + 10 * rng.normal(size=(64, 5))).astype(np.float32)
    y = np.sin(x[:, :1] / 5)

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x), y)

    model = eqx.nn.MLP(5, 1, 32, 2, dtype=jnp.float32, key=jr.key(1))
    model, optimizer = kfac.convert(model), kfac.KFAC()
    state, step = optimizer.init(model), eqx.filter_jit(optimizer.step)
    losses = []
    for t in range(60):
        model, state, info = step(loss_fn, model, state, x, y, key=jr.key(t))
        losses.append(float(info.loss))
    assert losses[0] > 1e3 and losses[-1] < 1
    assert state.rejected == 0 and not any(state.faults.as_dict().values())
