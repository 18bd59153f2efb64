"""What many tests need: the arrays of a tree, how near two trees are, devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding

import eqx_kfac as kfac


#
# Trees
#


def only_arrays(tree):
    return eqx.filter(tree, eqx.is_array)


def params_of(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


def arrays(tree):
    """All arrays, in order, as NumPy's."""
    return [np.asarray(x) for x in jtu.tree_leaves(only_arrays(tree))]


def leaves(tree):
    """All arrays that may be differentiated, in order."""
    return jtu.tree_leaves(params_of(tree))


def velocity_of(state, model):
    """The velocity, shaped like the trained part of a model."""
    named = lambda path, _: state.velocity.get(jtu.keystr(path))
    return jtu.tree_map_with_path(named, params_of(model))


def with_velocity(state, velocity):
    """`state`, with a velocity that is shaped like a model."""
    found, _ = jtu.tree_flatten_with_path(velocity)
    return state._replace(velocity={jtu.keystr(path): v for path, v in found})


def flat(tree):
    return ravel_pytree(tree)[0]


def stack(trees):
    """(Through NumPy, which needs no compilation.)"""
    together = lambda *xs: jax.device_put(np.stack([np.asarray(x) for x in xs]))
    return jtu.tree_map(together, *map(only_arrays, trees))


def member(tree, index):
    """One of several models (or results) that are stacked along a leading axis."""
    return jtu.tree_map(lambda x: x[index] if eqx.is_array(x) else x, tree)


def noise(seed, tree):
    """A tree like that, of standard normal numbers."""
    rng = np.random.default_rng(seed)
    return jtu.tree_map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), tree)


def set_number(state, name, value):
    return eqx.tree_at(lambda s: getattr(s, name), state, jnp.asarray(value))


#
# Comparisons
#


def assert_same(got, want, tolerance=0.0):
    """The same structure and leaves; bit for bit by default."""
    assert jtu.tree_structure(got) == jtu.tree_structure(want)
    assert_same_leaves(got, want, tolerance)


def assert_same_leaves(got, want, tolerance=0.0):
    """The same shapes, types and numbers (and what is no array), whatever holds them."""
    assert arrays(want)
    for g, w in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        assert eqx.is_array(g) == eqx.is_array(w)
        if eqx.is_array(w):
            assert g.shape == w.shape and g.dtype == w.dtype
            g, w = np.asarray(g, float), np.asarray(w, float)
            np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)
        else:
            assert g is w or g == w


def assert_entries_near(got, want, tolerance=1e-12):
    """Every entry of every array, absolutely."""
    got, want = arrays(got), arrays(want)
    assert want
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance)


def pairs(got, want):
    """The arrays of both, in order: finite, of the same shapes, and not without any."""
    found = list(zip(arrays(got), arrays(want), strict=True))
    assert found
    for g, w in found:
        assert g.shape == w.shape
        assert np.all(np.isfinite(g)) and np.all(np.isfinite(w))
    return [(g.astype(float), w.astype(float)) for g, w in found]


def assert_near(got, want, tolerance=1e-10):
    """Every array, relative to its norm; whatever holds them."""
    for g, w in pairs(got, want):
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w)


def assert_near_where_finite(got, want, tolerance=1e-10):
    """Near, with NaN and infinity where they should be; the structure is the same."""
    assert jtu.tree_structure(got) == jtu.tree_structure(want)
    assert arrays(want)
    for g, w in zip(arrays(got), arrays(want), strict=True):
        assert g.shape == w.shape
        g, w = g.astype(float), w.astype(float)
        finite = np.isfinite(w)
        np.testing.assert_array_equal(g[~finite], w[~finite])
        g, w = g[finite], w[finite]
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w)


def assert_differs(got, want, least=1e-2):
    """Some array, relative to its norm (absolutely, where that is zero)."""
    norm = np.linalg.norm
    assert max(norm(g - w) / (norm(w) or 1) for g, w in pairs(got, want)) > least


def assert_alike(got, want):
    """The same structure and types."""
    assert jtu.tree_structure(got) == jtu.tree_structure(want)
    assert [a.dtype for a in arrays(got)] == [a.dtype for a in arrays(want)]


def relative(got, want):
    """The distance of all parameters, as one vector."""
    got, want = (flat(params_of(tree)) for tree in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def close(got, want, tolerance=1e-10):
    """Asserts that no entry is off by more than this part of the largest one."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    scale = max(np.abs(want).max(), 1e-300)
    assert np.abs(got - want).max() <= tolerance * scale


#
# Losses, factors and steps
#


def squared(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


def softmax(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


@eqx.filter_jit
def collect(loss_fn, fisher, model, *args, key=None):
    return kfac.curvature(loss_fn, fisher)(model, *args, key=key)


@eqx.filter_jit
def stepped(optimizer, loss_fn, model, state, *args, **kwargs):
    """(One program for all optimizers of which only arrays differ.)"""
    return optimizer.step(loss_fn, model, state, *args, **kwargs)


def unwatched(state):
    """A state that knows of no losses so far, so that none is too large."""
    level = jnp.zeros_like(state.rollback.level)
    return eqx.tree_at(lambda s: s.rollback.level, state, level)


def scanned(optimizer, loss_fn, model, state, *args, keys=None, length=None):
    """Steps on one batch, with a `scan` around them: the model's arrays and the state
    after them, and what is said of each."""
    params, static = eqx.partition(model, eqx.is_array)

    def body(carry, key):
        params, state = carry
        model = eqx.combine(params, static)
        model, state, info = optimizer.step(loss_fn, model, state, *args, key=key)
        return (only_arrays(model), state), info

    (params, state), infos = jax.lax.scan(body, (params, state), keys, length)
    return params, state, infos


def expanded(model):
    """The model, whose Kronecker blocks take every position by itself."""
    is_tag = lambda node: isinstance(node, kfac.Tag)
    block = kfac.Kronecker(kfac.Expand())

    def swapped(node):
        if is_tag(node) and node.block == kfac.Kronecker():
            return kfac.Tag(node.form, block, swapped=node.swapped)
        return node

    return jtu.tree_map(swapped, model, is_leaf=is_tag)


def loop(layer):
    """The layer on every row, one by one."""
    return lambda x: jnp.stack([layer(row) for row in x])


#
# Random numbers, which need no compilation
#


def normal(*shape, seed=0, dtype=float):
    """Standard normal ones."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def filled(make, *args, scale=0.5, seed=0, **kwargs):
    """What `make(*args, **kwargs)` makes, a model, with random numbers in its arrays."""
    rng = np.random.default_rng(seed)
    new = lambda a: jnp.asarray(scale * rng.normal(size=a.shape), a.dtype)
    made = eqx.filter_eval_shape(make, *args, **kwargs)
    return jtu.tree_map(lambda a: new(a) if hasattr(a, "dtype") else a, made)


#
# Random targets
#


def classes(key, shape, k):
    return jax.random.randint(key, shape, 0, k)


def bits(key, shape, k):
    return jax.random.bernoulli(key, 0.4, shape + (k,))


def vectors(key, shape, k):
    return jax.random.normal(key, shape + (k,))


#
# Devices
#


def make_mesh(shape=(8,), names=("batch",), kind=AxisType.Auto):
    """Of the first devices."""
    some = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=some)


def put(tree, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    move = lambda a: jax.device_put(a, sharding) if eqx.is_array(a) else a
    return jtu.tree_map(move, tree)


#
# Programs, and errors
#


def subjaxprs(value):
    if isinstance(value, (tuple, list)):
        return [j for item in value for j in subjaxprs(item)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []


def equations(jaxpr):
    """Of a jaxpr and of all inside it."""
    for jaxpr in subjaxprs(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            yield from equations(list(eqn.params.values()))


def equations_of(fn, *args):
    params, static = eqx.partition(args, eqx.is_array)
    run = lambda params: only_arrays(fn(*eqx.combine(params, static)))
    return list(equations(jax.make_jaxpr(run)(params)))


def raises(error, *phrases):
    """Matches all phrases, in any order, in the message and its notes."""

    def check(exception):
        text = "\n".join([str(exception), *getattr(exception, "__notes__", [])])
        missing = [phrase for phrase in phrases if phrase not in text]
        assert not missing, f"{missing} not in: {text}"
        return True

    return pytest.RaisesExc(error, check=check)
