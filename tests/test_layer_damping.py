"""Damping for every layer by itself: the formula, and the steps it makes, against dense
matrices."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._tag import flatten_tags

from .helpers import filled, normal, stepped
from .plain import plain_kfac


X, Y = normal(16, 5), normal(16, 2, seed=1)
EXACT = kfac.Exact()
MOST = 0.3
ONE = jnp.array(1.0)  # A loss that does not matter.


class Net(eqx.Module):
    """Layers of equal shapes, one by itself and two stacked."""

    first: eqx.nn.Linear
    stacked: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        make = lambda key: eqx.nn.Linear(5, 5, key=key)
        self.first = make(keys[0])
        self.stacked = eqx.filter_vmap(make)(jax.random.split(keys[1], 2))
        self.last = eqx.nn.Linear(5, 2, use_bias=False, key=keys[2])

    def __call__(self, x):
        arrays, static = eqx.partition(self.stacked, eqx.is_array)
        step = lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None)
        return self.last(jax.lax.scan(step, jnp.tanh(self.first(x)), arrays)[0])


def made(make):
    return filled(make, scale=0.3, key=jax.random.key(0))


def mlp(*sizes):
    return kfac.convert(made(ft.partial(eqx.nn.MLP, 5, 2, *sizes, jnp.tanh)))


def loss_fn(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


@ft.cache
def make_model(block=kfac.Kronecker()):
    return kfac.convert(made(Net), blocks=block)


_curvature = eqx.filter_jit(kfac.curvature(loss_fn, EXACT))


@ft.cache
def of_block(block):
    """A model, and its curvature."""
    return make_model(block), _curvature(make_model(block), X, Y)


def curvature_of(model):
    return _curvature(model, X, Y)


@eqx.filter_jit
def applied(rule, damping, curvature, model, value=ONE, grads=None, terms=None):
    """One program for all rules of which only arrays differ."""
    if grads is None:
        grads = jtu.tree_map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    return rule(jnp.asarray(damping), curvature, model, value, grads, terms)


def as_arrays(rule):
    return jtu.tree_map(jnp.asarray, rule)


@eqx.filter_jit
def begun(optimizer, model):
    return optimizer.init(model)


@ft.partial(jax.jit, static_argnums=0)
def _as_matrix(block, factors):
    one = lambda f: block.operator(f).as_matrix()
    return jax.vmap(one)(factors) if factors.l2.ndim else one(factors)


def canonical(layer):
    if layer.bias is None:
        return np.asarray(layer.weight)
    return np.concatenate([layer.weight, np.asarray(layer.bias)[..., None]], axis=-1)


def dense(model, curvature):
    """`(matrices, parameters)` of every layer, `[*stack, n, n]` and `[*stack, n]`; and
    which of the latter are weights."""

    def of_layer(tag, layer, factors):
        matrix, stack = canonical(layer), factors.l2.shape
        weights = np.ones(matrix.shape[len(stack) :], bool)
        weights[:, -1] = layer.bias is None
        matrices = np.asarray(_as_matrix(tag.block, factors))
        return matrices, matrix.reshape(*stack, -1), weights.ravel()

    return [pair for _, pair in flatten_tags(of_layer, model, curvature)[0]]


def expected(rule, model, curvature, most=MOST):
    layers = dense(model, curvature)
    diagonals = [np.diagonal(m, axis1=-2, axis2=-1) for m, _, _ in layers]
    squares = sum((m**2).sum() for m, _, _ in layers)
    share = rule.curvature_fraction * squares / sum(d.sum() for d in diagonals)
    changes = []
    for (_, p, weights), d in zip(layers, diagonals, strict=True):
        trace = d[..., weights].sum(axis=-1)
        norm = np.linalg.norm(p[..., weights], axis=-1)
        changes.append(rule.stiffness * np.sqrt(trace) / norm)
    return [np.minimum(most, np.minimum(share, c)) for c in changes]


BLOCKS = [kfac.Kronecker(), kfac.EKFAC(), kfac.Full(), kfac.Diagonal(), kfac.TNT()]
RULES = [  # What is the least: the part of all curvature, the change, or the most.
    kfac.LayerDamping(MOST, curvature_fraction=1e-3, stiffness=1e3, loss_power=0.0),
    kfac.LayerDamping(MOST, curvature_fraction=1e3, stiffness=1e-2, loss_power=0.0),
    kfac.LayerDamping(MOST, 1e3, 1e3, loss_power=0.0, unmeasured_factor=1.0),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize("rule", RULES, ids=["fraction", "stiffness", "most"])
def test_the_formula(block, rule):
    model, curvature = of_block(block)
    got = jtu.tree_leaves(applied(as_arrays(rule), MOST, curvature, model))
    want = expected(rule, model, curvature)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10)
    flat = np.concatenate([np.ravel(g) for g in got])
    # Of the first and last rule, the same everywhere, of the other, nowhere.
    assert len(np.unique(flat.round(12))) == (1 if rule is not RULES[1] else flat.size)
    assert np.all(flat == MOST) == (rule is RULES[2])


@pytest.mark.parametrize("rule", RULES, ids=["fraction", "stiffness", "most"])
@pytest.mark.parametrize("terms, part", [(1, 1), (128, 1), (1280, 0.1), (None, 1)])
def test_the_fraction_falls_with_the_number_of_terms(rule, terms, part):
    model, curvature = of_block(kfac.Kronecker())
    arguments = as_arrays(rule), MOST, curvature, model
    got = jtu.tree_leaves(applied(*arguments, terms=terms))
    part = part if rule is RULES[0] else 1
    for g, w in zip(got, jtu.tree_leaves(applied(*arguments)), strict=True):
        np.testing.assert_allclose(g, part * w, rtol=1e-12)


def loss_with_deviations(model, x, y):
    outputs = jax.vmap(model)(x)  # They are no natural parameters of this loss.
    return kfac.NormalNLL(outputs, -outputs, y)


def loss_of_a_policy(model, x, y):
    outputs = jax.vmap(model)(x)
    return jnp.mean(outputs * y) + kfac.SquaredError(outputs)


@pytest.mark.parametrize("factor", [6.0, 0.5])
@pytest.mark.parametrize(
    "region, loss, times",
    [
        (kfac.TrustRegion(), loss_fn, False),
        (kfac.TrustRegion(measured_fraction=jnp.inf), loss_fn, True),
        (1e-3, loss_fn, True),
        (None, loss_fn, True),
        (kfac.TrustRegion(), loss_with_deviations, True),
        (kfac.TrustRegion(), loss_of_a_policy, True),
    ],
)
def test_where_gradients_do_not_bound_a_step(region, loss, times, factor):
    free = dict(curvature_fraction=1e3, stiffness=1e3, loss_power=0.0)
    damping = kfac.LayerDamping(MOST, unmeasured_factor=factor, **free)
    optimizer = kfac.KFAC(0.1, damping=damping, norm_constraint=region)
    model = make_model()
    step = eqx.filter_jit(optimizer.step)
    _, state, _ = step(loss, model, begun(optimizer, model), X, Y, key=jax.random.key(0))
    for of_layer in jtu.tree_leaves(state.layer_damping):
        np.testing.assert_allclose(of_layer, MOST * (factor if times else 1), rtol=1e-6)


def test_a_step_counts_its_terms():
    """Twice the batch, with every example twice: the same but for their number."""
    model = make_model(kfac.Kronecker())
    double = [jnp.concatenate([a, a]) for a in (X, Y)]
    found = []
    for x, y, few_terms in [(X, Y, len(X)), (*double, len(X)), (*double, 2 * len(X))]:
        damping = kfac.LayerDamping(MOST, 1e-3, few_terms=few_terms, stiffness=1e3)
        optimizer = kfac.KFAC(0.1, damping=damping, fisher=EXACT)
        state = begun(optimizer, model)
        _, state, _ = eqx.filter_jit(optimizer.step)(loss_fn, model, state, x, y)
        dampings = jtu.tree_leaves(state.layer_damping)
        found.append(np.concatenate([np.ravel(a) for a in dampings]))
    np.testing.assert_allclose(found[1], found[0] / 2, rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES[:2], ids=["fraction", "stiffness"])
def test_curvature_is_no_less_than_the_square_of_the_gradient(rule):
    """Where a gradient is larger than curvature explains, it counts, layer by layer."""
    model, curvature = of_block(kfac.Kronecker())
    layers = dense(model, curvature)
    gradients = [30 * np.cos(np.arange(p.size)).reshape(p.shape) for _, p, _ in layers]
    gradients[0] = 1e-3 * gradients[0]
    seen = []
    for (matrix, p, weights), g in zip(layers, gradients, strict=True):
        diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
        trace = np.maximum(diagonal.sum(-1), (g**2).sum(-1))
        square = np.maximum((matrix**2).sum((-2, -1)), (g**2).sum(-1) ** 2)
        own = (diagonal[..., weights].sum(-1), (g[..., weights] ** 2).sum(-1))
        norm = np.linalg.norm(p[..., weights], axis=-1)
        seen.append((trace, square, np.sqrt(np.maximum(*own)) / norm))
    traces, squares = (sum(s[i].sum() for s in seen) for i in (0, 1))
    share = rule.curvature_fraction * squares / traces
    want = [np.minimum(20.0, np.minimum(share, rule.stiffness * s[2])) for s in seen]
    params = eqx.filter(model, eqx.is_array)
    as_layers = lambda m: [m.first, m.stacked, m.last]
    new = [with_matrix(*pair) for pair in zip(as_layers(params), gradients, strict=True)]
    grads = eqx.tree_at(as_layers, params, new)
    got = applied(as_arrays(rule), 20.0, curvature, model, ONE, grads)
    for g, w in zip(jtu.tree_leaves(got), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10)
    without = applied(as_arrays(rule), 20.0, curvature, model)
    assert not np.allclose(got.last, without.last, rtol=0.1)
    assert np.allclose(got.first, without.first) == (rule is RULES[1])


def with_matrix(layer, vector):
    """A layer with other parameters."""
    matrix = vector.reshape(*canonical(layer).shape)
    if layer.bias is None:
        return eqx.tree_at(lambda m: m.weight, layer, jnp.asarray(matrix))
    both = jnp.asarray(matrix[..., :-1]), jnp.asarray(matrix[..., -1])
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, both)


def penalised(model, x, y, l2):
    return loss_fn(model, x, y) + kfac.L2(model, l2)


@eqx.filter_jit
def gradient(model, l2):
    return eqx.filter_grad(lambda m: penalised(m, X, Y, l2).value)(model)


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.EKFAC(), kfac.Full()])
@pytest.mark.parametrize("rule", RULES[:2], ids=["fraction", "stiffness"])
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_a_step(block, rule, l2):
    """Of a damped inverse that is exact: a dense one, layer by layer."""
    model, rate = make_model(block), 0.1
    optimizer = plain_kfac(
        rate, damping=as_arrays(rule), solver=kfac.Eigh(), fisher=EXACT
    )
    state = begun(optimizer, model)
    new, state, _ = stepped(optimizer, penalised, model, state, X, Y, jnp.array(l2))
    grads = gradient(model, jnp.array(l2))
    layers = dense(model, state.curvature)
    gradients = dense(grads, state.curvature)
    after = dense(new, state.curvature)
    each = expected(rule, model, state.curvature)
    for (matrix, before, _), (_, g, _), (_, a, _), damping in zip(
        layers, gradients, after, each, strict=True
    ):
        damped = matrix + (damping + l2)[..., None, None] * np.eye(matrix.shape[-1])
        natural = np.linalg.solve(damped, g[..., None])[..., 0]
        np.testing.assert_allclose(a - before, -rate * natural, rtol=1e-7, atol=1e-9)
        other = np.linalg.solve(damped + 0.01 * np.eye(len(g.T)), g[..., None])[..., 0]
        assert not np.allclose(a - before, -rate * other, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    "solver, period, packed",
    [
        (kfac.Cholesky(), 5, False),
        (kfac.Cholesky(), kfac.Staggered(5), True),
        (kfac.Eigh(), kfac.Staggered(5), False),
        (kfac.NewtonSchulz(), 5, True),
    ],
)
def test_one_number_for_all_is_a_number(solver, period, packed):
    """Where only the most counts, the steps are those of a number."""
    choices = dict(fisher=EXACT, inverse_period=period, packed=packed, solver=solver)
    results = []
    for damping in (as_arrays(RULES[2]), MOST, as_arrays(kfac.LayerDamping(MOST))):
        optimizer = plain_kfac(0.1, damping=damping, **choices)
        model = make_model()
        state = begun(optimizer, model)
        for _ in range(7):
            model, state, info = stepped(optimizer, loss_fn, model, state, X, Y)
        assert not info.rejected
        results.append(jtu.tree_leaves(eqx.filter(model, eqx.is_array)))
    close = lambda a, b: all(map(lambda p, q: np.allclose(p, q, rtol=1e-9), a, b))
    assert close(results[0], results[1]) and not close(results[0], results[2])


def scaled(model, x, y):
    return 1e-3 * loss_fn(model, x, y)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_small_loss(power):
    """Of a regression that is nearly done, the Fisher is what it was, but not the
    damping."""
    model, curvature = of_block(kfac.Kronecker())
    rule = as_arrays(
        kfac.LayerDamping(MOST, 1e3, 1e3, loss_power=power, unmeasured_factor=1.0)
    )
    for value, part in ((1e-2, 1e-2**power), (-1e-2, 1e-2**power), (3.0, 1.0), (0, None)):
        value = jnp.array(value, float)
        given = jtu.tree_leaves(applied(rule, MOST, curvature, model, value))
        least = 1e-4 if power > 0 else 1.0
        part = least if part is None else part
        for damping in given:
            np.testing.assert_allclose(damping, MOST * part, rtol=1e-10)
    optimizer = plain_kfac(0.1, damping=rule, fisher=EXACT)
    state = begun(optimizer, model)
    _, state, info = stepped(optimizer, scaled, model, state, X, Y)
    assert info.loss < 0.1
    for damping in jtu.tree_leaves(state.layer_damping):
        np.testing.assert_allclose(damping, MOST * info.loss**power, rtol=1e-10)


def test_it_is_chosen_when_layers_are_factorised():
    optimizer = plain_kfac(0.1, damping=RULES[1], fisher=EXACT, inverse_period=3)
    model = make_model()
    state = begun(optimizer, model)
    step = eqx.filter_jit(optimizer.step)
    changed = []
    for t in range(7):
        model, new, _ = step(loss_fn, model, state, X, Y)
        if not np.array_equal(new.layer_damping.first, state.layer_damping.first):
            changed.append(t)
        state = new
    assert changed == [0, 3, 6]


@pytest.mark.parametrize("units", [0.1, 0.5])
def test_the_units_of_the_data(units):
    """Dampings are of a loss per squared weight: in the units of the data, squared. A
    bias has none."""
    model, x = mlp(4, 1), np.asarray(X)
    shrink = lambda w: jax.device_put(np.asarray(w) / units)
    small = eqx.tree_at(lambda m: m.layers[0].weight, model, replace_fn=shrink)
    rule = kfac.LayerDamping(1.0, curvature_fraction=1e3)
    usual, other = (
        applied(rule, 1.0, _curvature(m, x, Y), m).layers
        for m, x in ((model, x), (small, units * x))
    )
    np.testing.assert_allclose(other[0], units**2 * np.asarray(usual[0]), rtol=1e-9)
    np.testing.assert_allclose(other[1], usual[1], rtol=1e-9)


def test_small_data_beside_a_bias():
    """With nothing tuned, data of a small scale are learnt; not so if what the bias wants
    was the damping of all."""
    model, x = mlp(16, 2), np.asarray(X)
    x, y = 1e-3 * x, np.sign(x[:, :2])

    @eqx.filter_jit
    def end(solver):
        optimizer = kfac.KFAC(solver=solver)
        params, static = eqx.partition(model, eqx.is_array)

        def step(carry, i):
            now, state = eqx.combine(carry[0], static), carry[1]
            key = jax.random.key(i)
            now, state, info = optimizer.step(loss_fn, now, state, x, y, key=key)
            return (eqx.filter(now, eqx.is_array), state), info.loss

        losses = jax.lax.scan(step, (params, optimizer.init(model)), jnp.arange(150))[1]
        return losses[0], losses[-1]

    (start, *ends), (_, other) = map(end, ("auto", kfac.Cholesky()))
    ends = [*ends, other]
    assert ends[0] < 0.1 * start and ends[1] > 3 * ends[0]


def test_a_chain_of_time_steps():
    """The curvature of one, and nothing as large as that of all."""
    layer = made(ft.partial(kfac.Linear, 30, 20))
    tag = kfac.Tag(kfac.form.Dense(), kfac.Series("symmetric"))
    series = eqx.tree_at(lambda m: m.tag, layer, tag)
    a, g = (np.diag(np.arange(1.0, n)) for n in (32, 21))
    arrays = map(jnp.asarray, (a, 0.3 * a, g, 0.2 * g, np.array(5.0), np.zeros(())))
    chain = kfac.factors.SeriesFactors(*arrays)
    rule, most = kfac.LayerDamping(1e9), jnp.array(1e9)
    plain = kfac.factors.KroneckerFactors(jnp.asarray(a), jnp.asarray(g), chain.l2)
    alone = applied(rule, most, plain, layer)
    assert applied(rule, most, chain, series) == alone != most
    jaxpr = jax.make_jaxpr(rule)(most, chain, series, ONE, series, None)
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) <= 31**2


def test_layers_of_which_nothing_is_known():
    """No curvature so far (here, behind a layer of zeros), or no parameters but zeros."""
    model = kfac.convert(made(ft.partial(eqx.nn.MLP, 5, 2, 4, 1)))
    zeros = jtu.tree_map(lambda a: jax.device_put(np.zeros(a.shape)), model.layers[1])
    model = eqx.tree_at(lambda m: m.layers[1], model, zeros)
    curvature = curvature_of(model)
    dampings = applied(kfac.LayerDamping(MOST), MOST, curvature, model)
    assert dampings.layers[0] == MOST and dampings.layers[1] == MOST
    optimizer = kfac.KFAC(fisher=EXACT)
    state = begun(optimizer, model)
    step = eqx.filter_jit(optimizer.step)
    losses = []
    for _ in range(60):
        model, state, info = step(loss_fn, model, state, X, Y)
        losses.append(float(info.loss))
    assert max(losses) == losses[0] and max(losses[-20:]) < 0.7 * losses[0]


def test_squares_that_overflow():
    """Curvature may be large where its square is not finite."""
    model, curvature = of_block(kfac.Kronecker())
    big = lambda a: jnp.asarray((1e12 * np.asarray(a)).astype(np.float32))
    curvature = jtu.tree_map(big, curvature)
    dampings = applied(kfac.LayerDamping(MOST), MOST, curvature, model)
    dampings = jtu.tree_leaves(dampings)
    assert all(np.all(d == np.float32(MOST)) for d in dampings)


def test_the_most_may_be_changed():
    optimizer = plain_kfac(0.1, damping=RULES[2], fisher=EXACT)
    model = make_model()
    state = begun(optimizer, model)
    state = eqx.tree_at(lambda s: s.damping, state, jnp.array(0.07))
    _, state, info = stepped(optimizer, loss_fn, model, state, X, Y)
    assert float(info.damping) == 0.07
    assert all(np.all(d == 0.07) for d in jtu.tree_leaves(state.layer_damping))


def test_what_is_refused():
    quadratic = kfac.QuadraticModel()
    with pytest.raises(ValueError, match="one damping for all layers"):
        kfac.KFAC(quadratic, quadratic, kfac.LayerDamping())
    with pytest.raises(ValueError, match="curvature_fraction"):
        kfac.LayerDamping(curvature_fraction=0.0)
    with pytest.raises(ValueError, match="few_terms"):
        kfac.LayerDamping(few_terms=0)
    with pytest.raises(TypeError, match="learning_rate"):
        kfac.KFAC(kfac.LayerDamping())
    with pytest.raises(ValueError, match="damping=LayerDamping.*needs the `model`"):
        optimizer = plain_kfac(0.1, damping=kfac.LayerDamping())
        model = make_model()
        grads = eqx.filter(model, eqx.is_array)
        state = begun(optimizer, model)
        optimizer.update(grads, state, None, curvature=curvature_of(model))
    with pytest.raises(ValueError, match="damping=LayerDamping.*needs the `value`"):
        optimizer.update(grads, state, model, curvature=curvature_of(model))
