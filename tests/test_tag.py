"""The tag primitive: nothing at all while its slots are empty; statistics as cotangents
when they are filled."""

import dataclasses
import functools as ft
import itertools as it
import operator
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac._block import Statistics
from eqx_kfac._module import replaced
from eqx_kfac._tag import empty_tags, fill_tags
from eqx_kfac._tag._primitive import statistic_p, tag_linear_p, tag_p

from .helpers import assert_entries_near, equations_of, only_arrays


D_IN, D_OUT, SIZE = 3, 4, 5


#
# Jaxprs
#


def primitives(eqns):
    return [eqn.primitive for eqn in eqns]


def largest_intermediate(eqns):
    sizes = [v.aval.size for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    return max(sizes)


#
# Empty slots
#


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, D_IN * 2, key=key)
        self.norm = eqx.nn.LayerNorm(D_IN * 2)

    def __call__(self, x):
        x = jnp.stack([jnp.concatenate([x, x]), jnp.concatenate([x, -x])])
        return jax.vmap(self.norm)(self.attention(x, x, x)).reshape(-1)


class Nested(eqx.Module):
    parts: dict
    scalar: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        make = lambda key: eqx.nn.Linear(D_IN, D_IN, key=key)
        self.parts = {
            "one": (eqx.nn.Linear(D_IN, D_IN, use_bias=False, key=keys[0]),),
            "many": eqx.filter_vmap(make)(jr.split(keys[1], 2)),
        }
        self.scalar = eqx.nn.Linear("scalar", "scalar", key=keys[2])

    def __call__(self, x):
        x = self.parts["one"][0](x)
        params, static = eqx.partition(self.parts["many"], eqx.is_array)
        step = lambda x, p: (jnp.tanh(eqx.combine(p, static)(x)), None)
        return jax.vmap(self.scalar)(lax.scan(step, x, params)[0])


def sequential(key):
    keys = jr.split(key)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(D_IN, SIZE, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(SIZE, D_OUT, use_bias=False, key=keys[1]),
        ]
    )


MODELS = {
    "Linear": lambda key: eqx.nn.Linear(D_IN, D_OUT, key=key),
    "MLP": lambda key: eqx.nn.MLP(D_IN, D_OUT, SIZE, 2, key=key),
    "Sequential": sequential,
    "attention": Attention,
    "nested": Nested,
}


def call(model, x):
    return model(x[0])


def vmap(model, x):
    return jax.vmap(model)(x)


def grad(model, x):
    return eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x) ** 2))(model)


def jitted_grad(model, x):
    return eqx.filter_jit(grad)(model, x)


def jvp(model, x):
    return jax.jvp(jax.vmap(model), (x,), (x,))


def checkpointed(model, x):
    return grad(eqx.filter_checkpoint(model), x)


USES = [call, vmap, grad, jitted_grad, jvp, checkpointed]


@ft.cache
def make_model(name):
    return eqx.filter_jit(MODELS[name])(jr.key(0))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODELS)
def test_empty_tags_leave_no_trace(name, use):
    """Same jaxpr, constants and all."""
    model, x = make_model(name), np.ones((2, D_IN))

    def jaxpr(model):
        params, static = eqx.partition(model, eqx.is_array)
        run = lambda params, x: only_arrays(use(eqx.combine(params, static), x))
        return str(jax.make_jaxpr(run)(params, x))

    want = jaxpr(model)
    assert jaxpr(kfac.convert(model)) == want
    if use is call:
        assert jaxpr(fill_tags(kfac.convert(model))) != want


def test_empty_tag_returns_its_argument():
    y, x = jnp.ones(D_OUT), jnp.ones(D_IN)
    assert make_tag(filled=False)(y, x) is y


def test_fill_and_empty_are_inverse():
    model = kfac.convert(make_model("nested"))
    structure = jtu.tree_structure(model)
    filled = fill_tags(model, jnp.ones(2))
    assert jtu.tree_structure(filled) != structure
    assert jtu.tree_structure(empty_tags(filled)) == structure


#
# The rules of the primitive
#


def make_layer():
    return kfac.Linear(D_IN, D_OUT, key=jr.key(0))


def make_tag(filled=True, weights=None):
    layer = make_layer()
    return layer.tag.fill(layer, weights) if filled else layer.tag


def apply(tag, y, x):
    return tag(y, x)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def moments(x, g, weights=None):
    """Of rows, by hand: the statistics of a Kronecker block."""
    x, g = (np.asarray(a).reshape(-1, a.shape[-1]) for a in (x, g))
    w = np.ones(len(x)) if weights is None else np.asarray(weights).reshape(-1)
    wx = w[:, None] * x
    return [w.sum(), w.sum(), wx.sum(0), wx.T @ x, g.T @ g]


def pull(fn, tag, cotangent):
    """The statistics that pulling back gives, as a list."""

    @eqx.filter_jit
    def run(tag):
        _, pullback = eqx.filter_vjp(fn, tag)
        return pullback(cotangent)

    (tag,) = run(tag)
    return jtu.tree_leaves(tag.slots)


def test_value_is_the_first_operand():
    y, x = normal(1, D_OUT), normal(2, D_IN)
    tag = make_tag()
    assert np.array_equal(tag(y, x), y)
    assert np.array_equal(eqx.filter_jit(apply)(tag, y, x), y)
    assert tag_p in primitives(equations_of(apply, tag, y, x))


def test_slots_do_not_touch_the_value():
    y, x = normal(1, D_OUT), normal(2, D_IN)
    tag = jtu.tree_map(lambda s: np.asarray(s) + 7, make_tag())
    assert np.array_equal(tag(y, x), y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_abstract_evaluation(dtype):
    """The first operand's type goes through, whatever the others are."""
    y = jax.ShapeDtypeStruct((D_OUT,), dtype)
    out = eqx.filter_eval_shape(apply, make_tag(), y, jnp.ones(D_IN))
    assert (out.shape, out.dtype) == ((D_OUT,), dtype)


def test_jvp_is_the_first_tangent():
    tag, y, x = make_tag(), normal(1, D_OUT), normal(2, D_IN)
    ones = jtu.tree_map(np.ones_like, tag)
    y_dot = normal(3, D_OUT)
    out, out_dot = eqx.filter_jvp(apply, (tag, y, x), (ones, y_dot, x))
    assert np.array_equal(out, y)
    assert np.array_equal(out_dot, y_dot)


def test_jvp_without_slots_is_not_bound():
    """An inner derivative with respect to inputs sees no linear tag."""
    tag = make_tag()
    derivative = lambda y, x: jax.jvp(lambda y: tag(y, x), (y,), (y,))
    found = primitives(equations_of(derivative, normal(1, D_OUT), normal(2, D_IN)))
    assert found.count(tag_p) == 1
    assert tag_linear_p not in found


def test_linear_twin():
    """The JVP of a tag is itself; its batch is itself."""
    tag, y, x = make_tag(), normal(1, D_OUT), normal(2, D_IN)

    def derivative(y_dot, tag_dot):
        tangents = (tag_dot, y_dot, jnp.zeros(D_IN))
        return eqx.filter_jvp(apply, (tag, y, x), tangents)[1]

    y_dot, again = normal(3, D_OUT), normal(4, D_OUT)
    assert tag_linear_p in primitives(equations_of(derivative, y_dot, tag))
    out, out_dot = eqx.filter_jvp(derivative, (y_dot, tag), (again, tag))
    assert np.array_equal(out, y_dot)
    assert np.array_equal(out_dot, again)
    many = normal(5, SIZE, D_OUT)
    assert np.array_equal(jax.vmap(derivative, (0, None))(many, tag), many)


def test_derivatives_of_the_value():
    """Of any order, as if there were no tag."""
    tag, y, x = make_tag(), normal(1, D_OUT), normal(2, D_IN)
    with_tag = lambda y: jnp.sum(jnp.sin(tag(jnp.tanh(y), x)) ** 2)
    without = lambda y: jnp.sum(jnp.sin(jnp.tanh(y)) ** 2)
    for transform in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.hessian(f))):
        got, want = (jax.jit(transform(fn))(y) for fn in (with_tag, without))
        assert_entries_near(got, want)


@pytest.mark.parametrize("weights", [None, 1 + np.arange(float(SIZE))])
def test_transpose(weights):
    y, x, g = normal(1, SIZE, D_OUT), normal(2, SIZE, D_IN), normal(3, SIZE, D_OUT)
    tag = make_tag(weights=weights)
    run = lambda tag, y, x: jax.vmap(lambda y, x: tag(y, x))(y, x)
    got = pull(lambda tag: run(tag, y, x), tag, g)
    assert_entries_near(got, moments(x, g, weights))
    if weights is not None:
        assert not np.allclose(got[3], moments(x, g)[3])
    # The cotangent itself goes to the first operand alone.
    pullback = lambda g: jax.vjp(lambda y, x: run(tag, y, x), y, x)[1](g)
    of_y, of_x = jax.jit(pullback)(g)
    assert_entries_near(of_y, g)
    assert not np.any(of_x)


def test_transpose_is_quadratic_in_the_cotangent():
    y, x, g = normal(1, D_OUT), normal(2, D_IN), normal(3, D_OUT)
    once, twice = (pull(lambda t: t(y, x), make_tag(), k * g) for k in (1, 2))
    assert_entries_near(twice[:4], once[:4])
    assert_entries_near(twice[4], 4 * np.asarray(once[4]))


def test_what_is_not_used_is_not_counted():
    y, x, g = normal(1, D_OUT), normal(2, D_IN), normal(3, D_OUT)

    def unused(tag):
        tag(y, x)
        return tag(2 * y, 3 * x)

    assert_entries_near(pull(unused, make_tag(), g), moments(3 * x[None], g[None]))


def test_several_uses_add_up():
    tag = make_tag()
    y, x, g = normal(1, 2, D_OUT), normal(2, 2, D_IN), normal(3, 2, D_OUT)
    got = pull(lambda tag: jnp.stack([tag(y[0], x[0]), tag(y[1], x[1])]), tag, g)
    assert_entries_near(got, moments(x, g))


#
# Batching
#


AXES = [None, 0, 1]


def along(array, axis):
    """One row, or many rows along `axis`."""
    return array[0] if axis is None else np.moveaxis(array, 0, axis)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("x_axis", AXES)
@pytest.mark.parametrize("y_axis", AXES)
def test_batching(y_axis, x_axis, stacked):
    """Whatever is mapped, along whatever axis: a loop over the rows."""
    if y_axis is None and x_axis is None and not stacked:
        return
    rows = normal(1, SIZE, D_OUT), normal(2, SIZE, D_IN)
    y, x = along(rows[0], y_axis), along(rows[1], x_axis)
    g = normal(3, SIZE, D_OUT)
    tag = make_tag()
    if stacked:
        tag = jtu.tree_map(lambda s: np.stack([s] * SIZE), tag)
    axes = (eqx.if_array(0) if stacked else None, y_axis, x_axis)
    batched = eqx.filter_vmap(apply, in_axes=axes, axis_size=SIZE)

    each_x = rows[1] if x_axis is not None else np.stack([x] * SIZE)
    want = [moments(each_x[i : i + 1], g[i : i + 1]) for i in range(SIZE)]
    want = [np.stack(m) if stacked else sum(m) for m in zip(*want)]
    got = pull(lambda tag: batched(tag, y, x), tag, g)
    assert_entries_near(got, want)

    each_y = rows[0] if y_axis is not None else np.stack([y] * SIZE)
    values, (of_y,) = eqx.filter_jit(value_and_pullback)(batched, tag, y, x, g)
    assert np.array_equal(values, each_y)
    expected = np.sum(g, axis=0) if y_axis is None else along(g, y_axis)
    assert_entries_near(of_y, expected)


def value_and_pullback(fn, tag, y, x, g):
    value, pullback = jax.vjp(lambda y: fn(tag, y, x), y)
    return value, pullback(g)


@pytest.mark.parametrize("kinds", list(it.product(["stack", "example"], repeat=3)))
def test_nested_batching(kinds):
    """Stacks and examples, in any order of nesting."""
    shape = (2, 3, 4)
    y, x, g = normal(1, *shape, D_OUT), normal(2, *shape, D_IN), normal(3, *shape, D_OUT)
    tag, fn = make_tag(), apply
    stacks = [n for n, kind in zip(shape, kinds) if kind == "stack"]
    tag = jtu.tree_map(lambda s: np.broadcast_to(s, (*stacks, *s.shape)), tag)
    for kind in reversed(kinds):
        axis = eqx.if_array(0) if kind == "stack" else None
        fn = eqx.filter_vmap(fn, in_axes=(axis, 0, 0))
    got = pull(lambda tag: fn(tag, y, x), tag, g)

    front = [i for i, kind in enumerate(kinds) if kind == "stack"]
    move = lambda a: np.moveaxis(np.asarray(a), front, range(len(front)))
    rows, cts = (move(a).reshape(*stacks, -1, a.shape[-1]) for a in (x, g))
    want = [moments(rows[index], cts[index]) for index in np.ndindex(*stacks)]
    want = [np.reshape(m, (*stacks, *np.shape(m[0]))) for m in zip(*want)]
    assert_entries_near(got, want)

    (eqn,) = [e for e in equations_of(fn, tag, y, x) if e.primitive is tag_p]
    assert eqn.params["stack"] == len(stacks)
    assert eqn.params["examples"] == 3 - len(stacks)


def test_batching_with_weights():
    """Weights belong to the examples; a stack has its own copy."""
    weights = 1 + np.arange(float(SIZE))  # None is zero: such rows count by gradients.
    y, x, g = normal(1, 2, SIZE, D_OUT), normal(2, SIZE, D_IN), normal(3, 2, SIZE, D_OUT)
    tag = jtu.tree_map(lambda s: np.stack([s, s]), make_tag(weights=weights))
    member = lambda tag, y: jax.vmap(lambda y, x: tag(y, x))(y, x)
    got = pull(lambda tag: eqx.filter_vmap(member)(tag, y), tag, g)
    want = [moments(x, g[i], weights) for i in range(2)]
    assert_entries_near(got, [np.stack(m) for m in zip(*want)])


#
# Statistics have no derivative
#


def make_mlp(width=SIZE, depth=1):
    mlp = eqx.nn.MLP(D_IN, D_OUT, width, depth, jnp.tanh, key=jr.key(0))
    return kfac.convert(mlp)


def loss_fn(model, x, y, weights=None):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, weights)


def trace_of_factors(model, x, y):
    factors = kfac.curvature(loss_fn, fisher=kfac.Empirical())(model, x, y)
    return sum(
        jnp.trace(f.input_factor) + jnp.trace(f.output_factor) for f in factors.layers
    )


def examples(batch=SIZE):
    return normal(1, batch, D_IN), np.arange(batch) % D_OUT


def by_grad(fn, model):
    return eqx.filter_grad(fn)(model)


def by_jvp(fn, model):
    tangent = jtu.tree_map(lambda x: x if eqx.is_array(x) else None, model)
    return eqx.filter_jvp(fn, (model,), (tangent,))


def by_jitted_grad(fn, model):
    return eqx.filter_jit(eqx.filter_grad(fn))(model)


def by_grad_of_jit(fn, model):
    return eqx.filter_grad(eqx.filter_jit(fn))(model)


def by_grad_of_checkpoint(fn, model):
    return eqx.filter_grad(eqx.filter_checkpoint(fn))(model)


@pytest.mark.parametrize(
    "differentiate",
    [by_grad, by_jvp, by_jitted_grad, by_grad_of_jit, by_grad_of_checkpoint],
)
def test_differentiating_curvature_is_an_error(differentiate):
    x, y = examples()
    with pytest.raises(TypeError, match="differentiate curvature statistics"):
        differentiate(lambda model: trace_of_factors(model, x, y), make_mlp())


def test_differentiating_curvature_with_respect_to_the_data_is_an_error():
    x, y = examples()
    with pytest.raises(TypeError, match="differentiate curvature statistics"):
        jax.grad(lambda x: trace_of_factors(make_mlp(), x, y))(x)


def test_stopped_curvature_may_stand_inside_a_differentiated_function():
    x, y = examples()

    def fn(model):
        frozen = jtu.tree_map(lax.stop_gradient, only_arrays(model))
        curvature = trace_of_factors(eqx.combine(frozen, model), x, y)
        return loss_fn(model, x, y).value * curvature

    @eqx.filter_jit
    def compare(model):
        grad = eqx.filter_grad(lambda m: loss_fn(m, x, y).value)(model)
        return eqx.filter_grad(fn)(model), grad, trace_of_factors(model, x, y)

    got, grad, factor = compare(make_mlp())
    grad = jax.device_get(only_arrays(grad))
    assert_entries_near(got, jtu.tree_map(lambda g: np.asarray(factor) * g, grad))


def adapted_loss(model, x, y, prepare=lambda m: m):
    """The loss after one step of gradient descent."""
    inner = eqx.filter_grad(lambda m: loss_fn(m, x, y).value)
    model = prepare(model)
    update = jtu.tree_map(lambda g: -0.1 * g, only_arrays(inner(model)))
    return loss_fn(eqx.apply_updates(model, update), x, y)


@pytest.mark.parametrize("jit", [False, True])
def test_inner_gradient_of_the_model(jit):
    """Statistics that arrive in it are no part of the step along it."""
    args = make_mlp(), *examples()
    collect = kfac.value_grad_and_curvature(adapted_loss, fisher=kfac.Empirical())
    value, grads, _ = (eqx.filter_jit(collect) if jit else collect)(*args)
    plain = lambda model, *args: adapted_loss(model, *args, prepare=kfac.revert).value
    want = eqx.filter_jit(eqx.filter_value_and_grad(plain))(*args)
    assert_entries_near((value, grads), want)
    report = kfac.verify(adapted_loss, *args)
    assert all(np.all(layer.unseen <= 1e-12) for layer in report.layers)


def test_inner_gradient_of_the_reverted_model():
    """A penalty on the gradient of the model without tags."""

    def penalised(model, x, y):
        grads = eqx.filter_grad(lambda m: loss_fn(m, x, y).value)(kfac.revert(model))
        squares = [jnp.sum(g**2) for g in jtu.tree_leaves(grads)]
        return loss_fn(model, x, y) + sum(squares)

    args = make_mlp(), *examples()
    collect = lambda fn: eqx.filter_jit(
        kfac.value_grad_and_curvature(fn, fisher=kfac.Exact())
    )(*args)
    value, grads, curvature = collect(penalised)
    plain_value, _, plain_curvature = collect(loss_fn)
    assert_entries_near(curvature, plain_curvature)
    assert value > plain_value
    slopes = eqx.filter_grad(lambda m, *args: penalised(m, *args).value)
    want = eqx.filter_jit(slopes)(*args)
    assert_entries_near(grads, want)


#
# What collecting costs
#


FISHERS = [kfac.Empirical(), kfac.Exact(), kfac.MonteCarlo(2)]


def collecting(fisher, loss=loss_fn):
    fn = kfac.value_grad_and_curvature(loss, fisher=fisher)
    return lambda model, *args: fn(model, *args, key=jr.key(0))


def test_collection_binds_the_tag_and_transposes_its_twin():
    found = primitives(
        equations_of(collecting(kfac.Empirical()), make_mlp(), *examples())
    )
    assert found.count(tag_p) == 2
    assert tag_linear_p not in found


def per_example_gradients(model, x, y):
    one = lambda x, y: loss_fn(model, x[None], y[None]).value
    grads = jax.vmap(lambda x, y: eqx.filter_grad(lambda m: one(x, y))(model))(x, y)
    return jax.vmap(lambda x: jnp.outer(x, x))(x), grads


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fisher", FISHERS)
def test_no_matrix_per_example(fisher, weighted):
    batch, d = 64, 16
    model = eqx.nn.MLP(d, d, d, 1, jnp.tanh, key=jr.key(0))
    x, y = normal(1, batch, d), np.arange(batch) % d
    args = kfac.convert(model), x, y, *([np.ones(batch)] if weighted else [])
    assert largest_intermediate(equations_of(collecting(fisher), *args)) < batch * d * 2
    outer = lambda model, x, y: jax.vmap(jnp.outer)(x, x)
    assert largest_intermediate(equations_of(outer, *args[:3])) == batch * d * d


@pytest.mark.parametrize("weighted", [False, True])
def test_no_matrix_per_token(weighted):
    batch, tokens, d = 16, 4, 16
    model = kfac.convert(eqx.nn.MLP(d, d, d, 1, jnp.tanh, key=jr.key(0)))
    x, y = normal(1, batch, tokens, d), np.zeros((batch, tokens), int)

    def loss(model, x, y, weights=None):
        return kfac.SoftmaxCrossEntropy(jax.vmap(jax.vmap(model))(x), y, weights)

    args = model, x, y, *([np.ones((batch, tokens))] if weighted else [])
    found = equations_of(collecting(kfac.Empirical(), loss), *args)
    assert largest_intermediate(found) < 2 * batch * tokens * d


def operations(fn, *args):
    """How many matrix products and activations are left after compilation."""
    params, static = eqx.partition(args, eqx.is_array)
    run = lambda params: only_arrays(fn(*eqx.combine(params, static)))
    text = jax.jit(run).lower(params).compile().as_text()
    return text.count(" dot("), text.count(" tanh(")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fisher", [kfac.Empirical(), kfac.MonteCarlo()])
def test_one_forward_pass(fisher, weighted):
    """Beyond a gradient, three layers take one more backward pass (two products) and
    two moments each. The activations are computed once."""
    model = make_mlp(width=32, depth=2)
    args = *examples(64), *([np.ones(64)] if weighted else [])
    value = lambda model, *args: loss_fn(model, *args).value
    products, activations = operations(eqx.filter_value_and_grad(value), model, *args)
    assert (products, activations) == (3 + 3 + 2, 2)
    assert operations(collecting(fisher), model, *args) == (products + 2 + 2 * 3, 2)


def test_the_gradient_comes_without_statistics():
    """Statistics are of the Fisher's one pullback: five for each of two layers."""
    found = equations_of(collecting(kfac.Empirical()), make_mlp(), *examples())
    assert primitives(found).count(statistic_p) == 2 * 5
    two = equations_of(collecting(kfac.MonteCarlo(2)), make_mlp(), *examples())
    assert primitives(two).count(statistic_p) == 2 * 2 * 5


def test_one_forward_pass_in_the_jaxpr():
    """Without weights not even eagerly more than one."""
    model = make_mlp(depth=2)
    found = primitives(equations_of(collecting(kfac.Exact()), model, *examples()))
    assert found.count(lax.tanh_p) == 2


#
# Precision
#


def test_statistics_of_half_precision_have_float32_types():
    model = kfac.cast(make_mlp(), jnp.bfloat16)
    x, y = examples(7)
    args = model, x.astype(jnp.bfloat16), y
    found = equations_of(collecting(kfac.Empirical()), *args)
    moments = [
        eqn.params["preferred_element_type"]
        for eqn in found
        if eqn.primitive is lax.dot_general_p and _is_moment(eqn)
    ]
    assert len(moments) >= 4  # Two factors of two layers.
    assert set(moments) == {jnp.dtype(jnp.float32)}


def _is_moment(eqn):
    (rows, others), _ = eqn.params["dimension_numbers"]
    square = len(set(eqn.outvars[0].aval.shape)) == 1
    return rows == others == (0,) and square


def test_sums_do_not_stagnate():
    """A sum of ones stops at 256 in bfloat16, and at 2048 in float16."""
    rows = 5000
    for dtype in (jnp.bfloat16, jnp.float16):
        layer = kfac.Linear(1, 1, dtype=dtype, key=jr.key(0))
        tag = layer.tag.fill(layer, None)
        ones = np.ones((rows, 1), dtype)
        run = lambda tag: jax.vmap(lambda y, x: tag(y, x))(ones, ones)
        got = pull(run, tag, ones)
        assert all(g.dtype == jnp.float32 for g in got)
        assert_entries_near(got, moments(np.ones((rows, 1)), np.ones((rows, 1))))


def test_slots_are_statistics():
    """Their shapes and types, as documented."""
    slots = make_tag().slots
    assert isinstance(slots, Statistics)
    shapes = [s.shape for s in jtu.tree_leaves(slots)]
    assert shapes == [(), (), (D_IN,), (D_IN, D_IN), (D_OUT, D_OUT)]
    assert not any(np.any(s) for s in jtu.tree_leaves(slots))


#
# Modules that are asked for their methods, and changed, at every trace
#


class Pair(NamedTuple):
    weight: Any
    bias: Any


class Nested(eqx.Module):
    """Leaves of every kind that a form may name."""

    inner: eqx.nn.Linear
    pair: Pair
    own: jax.Array = eqx.field(converter=jnp.asarray)

    def __check_init__(self):
        assert isinstance(self.own, jax.Array)

    @property
    def first(self):
        return self.pair.weight

    def called(self, x):
        return self.inner(x)


def make_nested():
    inner = eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0))
    return Nested(inner, Pair(np.ones(2), None), 1.0)


@pytest.mark.parametrize(
    "name",
    ["own", "inner.weight", "inner.bias", "pair", "pair.weight", "pair.bias", "first"],
)
def test_replaced_is_tree_at(name):
    module, where = make_nested(), operator.attrgetter(name)
    before, new = module, np.zeros(2)
    got = replaced(module, name, new)
    is_leaf = lambda node: node is None or isinstance(node, Pair) and name == "pair"
    assert eqx.tree_equal(got, eqx.tree_at(where, module, new, is_leaf=is_leaf))
    assert where(got) is new and type(got) is Nested
    assert module is before and eqx.tree_equal(module, make_nested())
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.own = 2


class Transposed(kfac.Kronecker):
    def statistics(self, rows, like):
        both = super().statistics(rows, like)
        return Statistics(inputs=both.outputs, outputs=both.inputs)


class OfInputs(kfac.Kronecker):
    def statistics(self, rows, like):
        return super().statistics(rows, like).inputs


@pytest.mark.parametrize("block", [Transposed(), OfInputs()])
def test_statistics_that_do_not_fit_their_slots(block):
    model = kfac.convert(eqx.nn.Linear(D_IN, D_OUT, key=jr.key(0)), block)
    x = jnp.ones((SIZE, D_IN))
    loss_fn = lambda model: kfac.SquaredError(jax.vmap(model)(x), jnp.ones((SIZE, D_OUT)))
    with pytest.raises(ValueError, match=f"`{type(block).__name__}.statistics` must"):
        kfac.curvature(loss_fn, kfac.Exact())(model)


def test_methods_of_static_data_are_not_trees():
    """Equinox would make a tree of each, whenever it is asked for."""
    form = kfac.form.Dense()
    assert isinstance(form.sizes, types.MethodType)
    assert not isinstance(make_nested().called, types.MethodType)
    assert form == kfac.form.Dense() and hash(form) == hash(kfac.form.Dense())
    run = jax.jit(form.outputs, static_argnums=(1, 2))
    assert run(np.ones(3), 0, 0).shape == (3,)
