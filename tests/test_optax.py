"""The optax faces: `kfac.optax_kfac` and `kfac.scale_by_kfac`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import arrays, assert_same, normal, params_of, squared
from .plain import plain_kfac


learning_rate = 0.1


@ft.cache
@eqx.filter_jit
def make_model(dtype=None):
    key = jax.random.key(0)
    return kfac.convert(eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, dtype=dtype, key=key))


def make_data(seed=0, number=8, dtype=float):
    x, y = normal(number, 3, seed=seed), normal(number, 2, seed=1000 + seed)
    return np.asarray(x).astype(dtype), np.asarray(y).astype(dtype)


def vector(tree):
    """All inexact leaves in one vector."""
    return np.concatenate([a.ravel() for a in arrays(params_of(tree))])


def relative(got, want):
    got, want = vector(got), vector(want)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@eqx.filter_jit
def value_grad_and_curvature(model, *batch):
    return kfac.value_grad_and_curvature(squared, kfac.Exact())(model, *batch)


@ft.cache
def traced(optimizer, max_traces=1):
    """An update, applied."""

    @eqx.filter_jit
    @ft.partial(eqx.debug.assert_max_traces, max_traces=max_traces)
    def update(grads, opt_state, model, **extra):
        params = params_of(model)
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return eqx.apply_updates(model, updates), opt_state

    return update


def train(optimizer, number=4, with_value=False, every=1, change=lambda state: state):
    """Trains as users of optax do: on the model's parameters, jitted."""
    model = make_model()
    opt_state = optimizer.init(params_of(model))

    # With new curvature or without: two signatures.
    update = traced(optimizer, 1 if every == 1 else 2)
    for index in range(number):
        value, grads, curvature = value_grad_and_curvature(model, *make_data(index))
        extra = dict(curvature=curvature if index % every == 0 else None)
        extra |= dict(value=value) if with_value else {}
        opt_state = change(opt_state) if index == number // 2 else opt_state
        model, opt_state = update(grads, opt_state, model, **extra)
    return model, opt_state


def chain(*between, **options):
    return optax.chain(
        kfac.scale_by_kfac(**options),
        *between,
        optax.trace(0.9),
        optax.scale_by_learning_rate(learning_rate),
    )


solvers = [kfac.Cholesky(), kfac.Eigh()]


def test_faces_are_optax_transformations():
    for face in (kfac.optax_kfac(0.1), kfac.scale_by_kfac()):
        assert isinstance(face, optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("solver", solvers)
def test_chain_equals_by_hand(solver, every):
    """`scale_by_kfac`, momentum and a learning rate, against dense linear algebra.
    (optax's trace is momentum on the direction: the same as on the update, as long as
    the learning rate is constant.) `every`: how often there is new curvature."""
    damping, ema = 1e-1, 0.5
    options = dict(damping=damping, ema=ema, solver=solver, inverse_period=1)
    got, _ = train(chain(**options), every=every)

    model = make_model()
    average, weight = None, 0.0
    velocity = [np.zeros((4, 4)), np.zeros((2, 5))]
    for index in range(4):
        _, grads, curvature = value_grad_and_curvature(model, *make_data(index))
        new = [(c.output_factor, c.input_factor) for c in curvature.layers]
        if index % every == 0:
            average = new if average is None else average
            weight = ema * weight + 1
            average = [
                tuple(v + (n - v) / weight for v, n in zip(*pair))
                for pair in zip(average, new, strict=True)
            ]
        bars = []
        for i, layer in enumerate(model.layers):
            gradient = grads.layers[i]
            matrix = np.column_stack((gradient.weight, gradient.bias))
            inverse = dense_inverse(*average[i], damping, solver)
            direction = (inverse @ matrix.ravel()).reshape(matrix.shape)
            velocity[i] = direction + 0.9 * velocity[i]
            bar = np.column_stack((layer.weight, layer.bias))
            bars.append(bar - learning_rate * velocity[i])
        model = eqx.tree_at(
            lambda m: [leaf for q in m.layers for leaf in (q.weight, q.bias)],
            model,
            [jnp.asarray(a) for bar in bars for a in (bar[:, :-1], bar[:, -1])],
        )
    assert relative(got, model) <= 1e-11
    assert relative(got, make_model()) > 1e-2


def dense_inverse(g, a, damping, solver):
    eye_g, eye_a = np.eye(len(g)), np.eye(len(a))
    if isinstance(solver, kfac.Eigh):
        return np.linalg.inv(np.kron(g, a) + damping * np.kron(eye_g, eye_a))
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    root = np.sqrt(damping)
    return np.linalg.inv(np.kron(g + root / pi * eye_g, a + root * pi * eye_a))


@pytest.mark.parametrize("solver", solvers)
def test_kfac_takes_the_steps_of_step(solver):
    options = dict(solver=solver, norm_constraint=1e-2, ema=0.9)
    numbers = 0.1, 0.8, 1e-2
    optimizer = plain_kfac(*numbers, fisher=kfac.Exact(), **options)
    step = eqx.filter_jit(optimizer.step)
    model = make_model()
    state = optimizer.init(model)
    for index in range(6):
        model, state, _ = step(squared, model, state, *make_data(index))
    for with_value in (False, True):
        got, got_state = train(
            kfac.optax_kfac(*numbers, **options), number=6, with_value=with_value
        )
        assert_same(got, model, tolerance=1e-11)
        assert_same(got_state.inverse, params_of(state).inverse, tolerance=1e-9)


def test_kfac_takes_the_steps_of_the_recommended_step():
    """With the rules of `KFAC()`, which need the parameters and the value. (How many
    terms the loss has, and what kind of loss it is, `update` is not told.)"""
    rules = ("damping", "norm_constraint", "averaging", "inverse_period")
    auto = dict.fromkeys(rules, "auto") | dict(weight_decay=1e-2)
    region = kfac.TrustRegion(full_terms=8, measured_fraction=jnp.inf)
    choices = dict(curvature_period=1, weight_decay=1e-2, norm_constraint=region)
    optimizer = kfac.KFAC(fisher=kfac.Exact(), **choices)
    step = eqx.filter_jit(optimizer.step)
    model = make_model()
    state = optimizer.init(model)
    for index in range(4):
        model, state, _ = step(squared, model, state, *make_data(index))
    got, got_state = train(kfac.optax_kfac(**auto), number=4, with_value=True)
    assert_same(got, model, tolerance=1e-11)
    got_mean, mean = kfac.averaged(got, got_state), kfac.averaged(model, state)
    assert_same(got_mean, mean, tolerance=1e-11)
    assert relative(got_mean, model) > 1e-4
    with pytest.raises(ValueError, match="needs the `value`"):
        train(kfac.optax_kfac(**auto), number=1)
    assert relative(train(kfac.optax_kfac(), number=4)[0], model) > 1e-4


def test_chain_and_kfac_agree():
    """Constant learning rate, no norm constraint: the two faces are one algorithm."""
    one, _ = train(chain(damping=1e-2, ema=0.9))
    two, _ = train(kfac.optax_kfac(learning_rate, 0.9, 1e-2, ema=0.9))
    assert relative(one, two) <= 1e-12
    other, _ = train(kfac.optax_kfac(learning_rate, 0.9, 1e-1, ema=0.9))
    assert relative(one, other) > 1e-3


faces = {
    "kfac": lambda **kwargs: kfac.optax_kfac(learning_rate, **kwargs),
    "scale_by_kfac": lambda **kwargs: chain(**kwargs),
}


@pytest.mark.parametrize("face", faces)
def test_without_curvature(face):
    """The average stays; before there is any, nothing moves."""
    optimizer = faces[face](damping=0.5)
    model = make_model()
    opt_state = optimizer.init(params_of(model))
    _, grads, curvature = value_grad_and_curvature(model, *make_data())
    update = eqx.filter_jit(optimizer.update)
    updates, after = update(grads, opt_state, params_of(model), curvature=None)
    assert not any(np.any(u) for u in jtu.tree_leaves(updates))
    if face == "kfac":
        assert int(after.rejected) == int(after.faults.curvature) == 1

    updates, opt_state = update(grads, opt_state, params_of(model), curvature=curvature)
    assert all(np.any(u) for u in jtu.tree_leaves(updates))
    updates, after = update(grads, opt_state, params_of(model), curvature=None)
    assert all(np.any(u) for u in jtu.tree_leaves(updates))
    find = lambda state: (
        optax.tree.get(state, "curvature"),
        optax.tree.get(state, "weight", filtering=is_scalar),
    )
    assert None not in find(after)
    assert_same(find(after), find(opt_state))


def drop_extra_arguments(inner):
    return optax.GradientTransformation(inner.init, lambda g, s, p: inner.update(g, s, p))


@pytest.mark.parametrize("face", faces)
def test_curvature_that_is_left_out(face):
    model = make_model()
    _, grads, _ = value_grad_and_curvature(model, *make_data())
    for wrap in (lambda inner: inner, drop_extra_arguments):
        optimizer = wrap(faces[face]())
        opt_state = optimizer.init(params_of(model))
        with pytest.raises(TypeError, match="curvature=curvature.*curvature=None.*drop"):
            optimizer.update(grads, opt_state, params_of(model))
    with pytest.raises(TypeError, match="curvature"):
        optimizer = plain_kfac(0.1)
        optimizer.update(grads, optimizer.init(model), model)


def test_wrappers_that_drop_extra_arguments():
    model = make_model()
    _, grads, _ = value_grad_and_curvature(model, *make_data())
    optimizer = optax.lookahead(kfac.optax_kfac(learning_rate), 2, 0.5)
    params = optax.LookaheadParams.init_synced(params_of(model))
    opt_state = optimizer.init(params)
    with pytest.raises(TypeError, match="optax.lookahead"):
        optimizer.update(params_of(grads), opt_state, params)


@pytest.mark.parametrize("name", ["damping", "ema"])
@pytest.mark.parametrize("face", faces)
def test_numbers_out_of_range(face, name):
    """Nothing moves, and nothing is averaged in."""
    bad = {name: step_function(0.5, -1.0, 1)}
    # (Alone: momentum would move.)
    optimizer = (
        kfac.optax_kfac(learning_rate, **bad)
        if face == "kfac"
        else kfac.scale_by_kfac(**bad)
    )
    model, params = make_model(), params_of(make_model())
    _, grads, curvature = value_grad_and_curvature(model, *make_data())
    opt_state = optimizer.init(params)
    update = eqx.filter_jit(optimizer.update)
    _, opt_state = update(grads, opt_state, params, curvature=curvature)
    find = lambda state: optax.tree.get(state, "curvature")
    assert find(opt_state) is not None
    twice = jtu.tree_map(lambda c: jnp.asarray(2 * np.asarray(c)), curvature)
    updates, after = update(grads, opt_state, params, curvature=twice)
    if face == "kfac":
        assert int(after.faults.hyperparameters) == 1
    assert not any(np.any(u) for u in jtu.tree_leaves(updates))
    assert_same(find(after), find(opt_state))


@pytest.mark.parametrize("face", faces)
def test_without_parameters(face):
    """Optax allows updates without parameters."""
    optimizer, model = faces[face](), make_model()
    _, grads, curvature = value_grad_and_curvature(model, *make_data())
    opt_state, update = optimizer.init(params_of(model)), eqx.filter_jit(optimizer.update)
    got = update(grads, opt_state, curvature=curvature)
    assert_same(got, update(grads, opt_state, params_of(model), curvature=curvature))


def is_scalar(_, value):
    return eqx.is_array(value) and value.ndim == 0


def step_function(before, after, boundary=2):
    return lambda step: jnp.where(step < boundary, before, after)


@pytest.mark.parametrize("face", faces)
def test_damping_may_be_a_schedule(face):
    scheduled = faces[face](damping=step_function(1e-2, 10.0), inverse_period=1)
    constant = faces[face](damping=1e-2, inverse_period=1)
    got, expected = (train(o, number=2)[0] for o in (scheduled, constant))
    assert relative(got, expected) <= 1e-12
    got, expected = (train(o, number=4)[0] for o in (scheduled, constant))
    assert relative(got, expected) > 1e-3


@pytest.mark.parametrize("face", faces)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtype_is_kept(face, dtype):
    optimizer = faces[face]()
    model = make_model(dtype=dtype)
    params = params_of(model)
    opt_state = optimizer.init(params)
    _, grads, curvature = value_grad_and_curvature(model, *make_data(dtype=dtype))

    @jax.jit
    def update(grads, opt_state, params, curvature):
        updates, new = optimizer.update(grads, opt_state, params, curvature=curvature)
        return updates, new, optax.apply_updates(params, updates)

    updates, new_state, new_params = update(grads, opt_state, params, curvature)
    same_types(updates, params)
    same_types(new_state, opt_state)
    same_types(new_params, params)


def same_types(a, b):
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        assert jax.typeof(x) == jax.typeof(y)


@pytest.mark.parametrize("face", faces)
def test_inside_cond_and_scan(face):
    optimizer = faces[face](damping=1e-2)
    model = make_model()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    batches = jtu.tree_map(lambda *b: np.stack(b), *map(make_data, range(6)))
    skipped = np.arange(6) % 3 == 2

    def body(carry, inputs):
        (x, y), skip = inputs
        model = eqx.combine(carry[0], static)
        _, grads, curvature = value_grad_and_curvature(model, x, y)

        def take(params, opt_state):
            updates, opt_state = optimizer.update(
                grads, opt_state, params, curvature=curvature
            )
            return optax.apply_updates(params, updates), opt_state

        return jax.lax.cond(skip, lambda *c: c, take, *carry), None

    @jax.jit
    def scan(params, opt_state):
        return jax.lax.scan(body, (params, opt_state), (batches, skipped))[0]

    got, got_state = scan(params, optimizer.init(params))

    opt_state, update = optimizer.init(params), traced(optimizer)
    for index in (0, 1, 3, 4):
        _, grads, curvature = value_grad_and_curvature(model, *make_data(index))
        model, opt_state = update(grads, opt_state, model, curvature=curvature)
    assert_same(got, params_of(model), tolerance=1e-11)
    assert_same(got_state, opt_state, tolerance=1e-9)


#
# optax's wrappers. Some of optax does not run under strict type promotion.
#


def test_extra_arguments_pass_through_chains():
    """Arguments for others in the chain do not disturb, and vice versa."""
    seen = []

    def update(updates, state, params=None, *, curvature, value, note):
        seen.append((curvature is not None, value is not None, note))
        return updates, state

    other = optax.GradientTransformationExtraArgs(lambda params: (), update)
    model = make_model()
    value, grads, curvature = value_grad_and_curvature(model, *make_data())
    extra = dict(curvature=curvature, value=value, note="hello")
    for face in (kfac.scale_by_kfac(), kfac.optax_kfac(learning_rate)):
        optimizer = optax.chain(optax.identity(), optax.chain(other, face))
        opt_state = optimizer.init(params_of(model))
        update, alone = map(eqx.filter_jit, (optimizer.update, face.update))
        got, _ = update(grads, opt_state, params_of(model), **extra)
        opt_state = face.init(params_of(model))
        want, _ = alone(grads, opt_state, params_of(model), curvature=curvature)
        assert_same(got, want)
    assert seen == [(True, True, "hello")] * 2


@pytest.mark.parametrize("face", faces)
def test_multi_steps(face, standard_promotion):
    """Gradients are averaged over micro-batches; the curvature of the last one counts."""
    inner = faces[face](damping=1e-2)
    optimizer = optax.MultiSteps(inner, 2, accumulator_dtype=jnp.float64)
    got, got_state = train(optimizer, number=4)

    model = make_model()
    opt_state, update = inner.init(params_of(model)), traced(inner)
    mean = lambda a, b: (np.asarray(a) + np.asarray(b)) / 2
    for index in (0, 2):
        _, one, _ = value_grad_and_curvature(model, *make_data(index))
        _, two, curvature = value_grad_and_curvature(model, *make_data(index + 1))
        grads = jtu.tree_map(mean, params_of(one), params_of(two))
        model, opt_state = update(grads, opt_state, model, curvature=curvature)
    assert_same(got, model, tolerance=1e-11)
    assert_same(got_state.inner_opt_state, opt_state, tolerance=1e-9)


def set_hyperparameter(name, value):
    def change(state):
        changed = state.hyperparams | {name: jnp.asarray(value, float)}
        return state._replace(hyperparams=changed)

    return change


@pytest.mark.parametrize("name,value", [("damping", 1.0), ("ema", 0.1)])
def test_inject_hyperparams_scale_by_kfac(name, value, standard_promotion):
    """Changed between two steps, or by a schedule: without a new trace, to the same
    end."""
    numbers = dict(damping=1e-2, ema=0.9)
    inject = optax.inject_hyperparams(kfac.scale_by_kfac, static_args="inverse_period")
    fixed = dict(inverse_period=1, solver=kfac.Eigh())

    injected = scaled_down(inject(**numbers, **fixed))
    unchanged, _ = train(injected)
    plain, _ = train(scaled_down(kfac.scale_by_kfac(**numbers, **fixed)))
    assert relative(unchanged, plain) <= 1e-12

    change = lambda s: (set_hyperparameter(name, value)(s[0]), *s[1:])
    changed, _ = train(injected, change=change)
    schedule = step_function(numbers[name], value)
    scheduled, _ = train(scaled_down(inject(**(numbers | {name: schedule}), **fixed)))
    assert relative(changed, scheduled) <= 1e-12
    assert relative(changed, unchanged) > 1e-5


def scaled_down(transformation):
    return optax.chain(transformation, optax.scale(-learning_rate))


hyperparameters = {
    "learning_rate": 0.02,
    "momentum": 0.5,
    "damping": 1.0,
    "ema": 0.1,
    "norm_constraint": 1e-5,
}


numbers = dict(
    learning_rate=0.1, momentum=0.9, damping=1e-2, ema=0.9, norm_constraint=1.0
)


@ft.cache
def injected_kfac():
    inject = optax.inject_hyperparams(kfac.optax_kfac, static_args="inverse_period")
    return inject(**numbers, inverse_period=1)


def test_inject_hyperparams_kfac(standard_promotion):
    injected, _ = train(injected_kfac())
    plain, _ = train(kfac.optax_kfac(**numbers, inverse_period=1))
    assert relative(injected, plain) <= 1e-12


@pytest.mark.parametrize("name", hyperparameters)
def test_inject_hyperparams_kfac_change(name, standard_promotion):
    value = hyperparameters[name]
    changed, _ = train(injected_kfac(), change=set_hyperparameter(name, value))
    schedule = {name: step_function(numbers[name], value)}
    scheduled, _ = train(kfac.optax_kfac(**(numbers | schedule), inverse_period=1))
    assert relative(changed, train(injected_kfac())[0]) > 1e-5
    assert relative(changed, scheduled) <= 1e-12


class Net(eqx.Module):
    norm: eqx.nn.LayerNorm
    linears: list

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(3)
        self.linears = [kfac.Linear(3, 4, key=keys[0]), kfac.Linear(4, 2, key=keys[1])]

    def __call__(self, x):
        return self.linears[1](jnp.tanh(self.linears[0](self.norm(x))))


make_net = ft.cache(eqx.filter_jit(lambda: Net(jax.random.key(0))))


def net_update(optimizer):
    """The updates of a second step."""
    model, params = make_net(), params_of(make_net())
    opt_state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for index in range(2):
        _, grads, curvature = value_grad_and_curvature(model, *make_data(index))
        updates, opt_state = update(grads, opt_state, params, curvature=curvature)
    return updates


with_fallback = kfac.scale_by_kfac(fallback=optax.scale_by_adam())


@ft.cache
def net_update_with_fallback():
    return net_update(with_fallback)


@ft.cache
def adam_update():
    """What Adam alone does."""
    adam = optax.scale_by_adam()
    state, update = adam.init(params_of(make_net())), jax.jit(adam.update)
    for index in range(2):
        _, grads, _ = value_grad_and_curvature(make_net(), *make_data(index))
        updates, state = update(params_of(grads), state)
    return updates


def labels_of(params, where, inside, outside):
    labels = jtu.tree_map(lambda _: outside, params)
    nodes = jtu.tree_map(lambda _: inside, where(params))
    labels = eqx.tree_at(where, labels, nodes)
    return lambda _: labels  # A callable: optax would call a model that is one itself.


def test_fallback_of_scale_by_kfac(standard_promotion):
    updates, alone = net_update_with_fallback(), adam_update()
    assert_same(updates.norm, alone.norm, tolerance=1e-12)
    assert relative(updates.linears, alone.linears) > 1e-2


@pytest.mark.parametrize("wrapper", ["masked", "multi_transform"])
@pytest.mark.parametrize("untagged", ["norm", "norm and a layer"])
def test_part_of_the_parameters(wrapper, untagged, standard_promotion):
    """optax's own ways to give K-FAC only some layers."""
    params = params_of(make_net())
    if untagged == "norm":
        where = lambda m: m.norm
    else:
        where = lambda m: (m.norm, m.linears[0])

    if wrapper == "masked":
        optimizer = optax.chain(
            optax.masked(kfac.scale_by_kfac(), labels_of(params, where, False, True)),
            optax.masked(optax.scale_by_adam(), labels_of(params, where, True, False)),
        )
    else:
        optimizer = optax.multi_transform(
            {"kfac": kfac.scale_by_kfac(), "adam": optax.scale_by_adam()},
            labels_of(params, where, "adam", "kfac"),
        )
    updates, expected = net_update(optimizer), net_update_with_fallback()
    assert_same(where(updates), where(adam_update()), tolerance=1e-12)
    assert_same(updates.linears[1], expected.linears[1], tolerance=1e-12)


@pytest.mark.parametrize("face", faces)
def test_missing_coverage(face):
    model = make_net()
    with pytest.raises(ValueError, match=r"\.norm\.weight.*kfac\.convert.*fallback="):
        faces[face]().init(params_of(model))


@pytest.mark.parametrize("name", ["fisher", "curvature_period", "burn_in"])
def test_choices_of_the_estimate_are_the_callers(name):
    with pytest.raises(TypeError, match=name):
        kfac.optax_kfac(0.1, **{name: 1})


def test_apply_if_finite(standard_promotion):
    """optax's guard keeps `scale_by_kfac` from bad gradients."""
    model = make_model()
    params = params_of(model)
    optimizer = optax.apply_if_finite(kfac.scale_by_kfac(), 3)
    opt_state = optimizer.init(params)
    _, grads, curvature = value_grad_and_curvature(model, *make_data())
    bad = jtu.tree_map(lambda a: np.full_like(a, np.nan), (grads, curvature))
    update = eqx.filter_jit(optimizer.update)
    updates, opt_state = update(bad[0], opt_state, params, curvature=bad[1])
    assert not any(np.any(u) for u in jtu.tree_leaves(updates))
    updates, opt_state = update(grads, opt_state, params, curvature=curvature)
    plain = kfac.scale_by_kfac()
    plain_update, opt_state = eqx.filter_jit(plain.update), plain.init(params)
    expected, _ = plain_update(grads, opt_state, params, curvature=curvature)
    assert_same(updates, expected, tolerance=1e-11)


@pytest.mark.parametrize("rule", [kfac.LayerDamping(), kfac.LevenbergMarquardt(0.1)])
def test_a_preconditioner_alone_has_no_rules(rule):
    with pytest.raises(ValueError, match="needs the loss function and the model"):
        kfac.scale_by_kfac(damping=rule)
    kfac.scale_by_kfac(damping=0.1)
