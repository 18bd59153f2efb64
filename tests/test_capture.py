"""Captured rows are those of single examples, or an error."""

import functools as ft

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import eqx_kfac as kfac
from eqx_kfac._tag import tagged_layers

from .helpers import filled, normal


N, D, K = 6, 3, 2
X, Y = normal(N, D, seed=100), normal(N, K, seed=101)
CLASSES = jnp.array([1, 0, 0, 1, 1, 0])
TOLERANCE = dict(rtol=1e-12, atol=1e-12)


def made(make, seed=0):
    return filled(make, jr.key(0), seed=seed)


@eqx.filter_jit
def capture(loss_fn, *args, fisher=None, key=None):
    choices = () if fisher is None else (fisher,)
    return kfac.analysis.capture(loss_fn, *choices)(*args, key=key)


def both(loss_fn, reference, model, x, y):
    """What is captured; and for every layer, what that says about every example's
    gradient, and what the loss of this example alone does."""

    def one(model, x, y):
        return reference(model, x[None], y[None]).value

    captured = kfac.analysis.capture(loss_fn)(model, x, y)
    grads = jax.vmap(eqx.filter_grad(one), in_axes=(None, 0, 0))(model, x, y)
    layers = [layer for _, _, layer in tagged_layers(grads)]
    tags = [tag for _, tag, _ in tagged_layers(model)]
    is_captured = lambda node: isinstance(node, kfac.analysis.Captured)
    found = jtu.tree_leaves(captured, is_leaf=is_captured)
    assert len(found) == len(tags) > 0
    pairs = []
    for tag, layer, rows in zip(tags, layers, found, strict=True):
        stack = rows.stack + tag.form.groups
        got = jnp.moveaxis(rows.gradients(), stack, 0)
        inner = range(1 + stack, stack + rows.examples)
        want = jax.vmap(tag.form.to_matrix)(layer)
        pairs.append((jnp.sum(got, axis=tuple(inner)), want))
    return captured, pairs


def assert_pairs(pairs):
    for got, want in pairs:
        assert np.linalg.norm(want) > 0
        np.testing.assert_allclose(got, want, **TOLERANCE)


def check_gradients(loss_fn, model, x, y, reference=None):
    """Every example's gradient is that of the loss of this example alone."""
    reference = loss_fn if reference is None else reference
    captured, pairs = eqx.filter_jit(both)(loss_fn, reference, model, x, y)
    assert_pairs(pairs)
    return captured


@ft.cache
def linear(d_in, d_out, seed=0, **kwargs):
    return made(lambda key: kfac.Linear(d_in, d_out, key=key, **kwargs), seed)


@ft.cache
def mlp():
    return kfac.convert(made(lambda key: eqx.nn.MLP(D, K, 4, 2, jnp.tanh, key=key)))


#
# Every form
#


class Blocked(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    tag: kfac.Tag

    def __init__(self):
        self.weight, self.bias = normal(2, 2, D, seed=1), normal(2, 2, seed=2)
        self.tag = kfac.Tag(kfac.form.Einsum("hdi,ti->htd"), kfac.Kronecker())

    def __call__(self, x):
        y = jnp.einsum("hdi,ti->htd", self.weight, x) + self.bias[:, None, :]
        return self.tag(y, x)


image, words = normal(N, 2, 5, 4, seed=3), normal(N, 4, D, seed=5)
tokens = jax.device_put(np.random.default_rng(4).integers(0, 7, (N, 4)))
conv = dict(stride=2, padding=((1, 0), (2, 1)), dilation=(1, 2))


def layer_norm():
    return made(lambda key: kfac.LayerNorm(D))


FORMS = {
    "dense": lambda: (linear(D, K), X),
    "no-bias": lambda: (linear(D, K, use_bias=False), X),
    "scalar": lambda: (linear("scalar", "scalar"), np.asarray(X)[:, 0]),
    "mlp": lambda: (mlp(), X),
    "conv": lambda: (made(lambda k: kfac.Conv2d(2, 4, (2, 3), key=k, **conv)), image),
    "groups": lambda: (made(lambda k: kfac.Conv2d(2, 4, 2, groups=2, key=k)), image),
    "transposed": lambda: (
        made(lambda k: kfac.ConvTranspose2d(2, 3, 2, 2, key=k)),
        image,
    ),
    "embedding": lambda: (
        made(lambda k: kfac.Embedding(7, 3, key=k)),
        np.asarray(tokens)[:, 0],
    ),
    "einsum": lambda: (Blocked(), words),
    "layer-norm": lambda: (eqx.nn.Sequential([linear(D, D), layer_norm()]), X),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    model, x = FORMS[name]()
    y = jax.eval_shape(jax.vmap(model), x)
    target = normal(N, y.size // N, seed=7)

    def loss_fn(model, x, y):
        return kfac.SquaredError(jax.vmap(model)(x).reshape(len(x), -1), y)

    check_gradients(loss_fn, model, x, target)


CELLS = {"lstm": kfac.LSTMCell, "gru": kfac.GRUCell}


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_one_step(name):
    cell = made(lambda key: CELLS[name](D, 4, key=key))

    def loss_fn(cell, x, y):
        h = x[:, :1] * jnp.ones((1, 4))
        c = x[:, :1] * jnp.arange(4.0)[None]
        out = jax.vmap(cell)(x, h if name == "gru" else (h, c))
        return kfac.SquaredError(out if name == "gru" else out[0], y)

    @eqx.filter_jit
    def compared(cell, x, y):
        captured = kfac.analysis.capture(loss_fn)(cell, x, y)
        found = captured if name == "gru" else {"": captured}
        assert all(isinstance(c, kfac.analysis.Captured) for c in found.values())
        grads = eqx.filter_grad(lambda c: loss_fn(c, x, y).value)(cell)
        tags = cell.tag if name == "gru" else {"": cell.tag}
        return [
            (jnp.mean(found[key].gradients(), axis=0), tag.form.to_matrix(grads))
            for key, tag in tags.items()
        ]

    assert_pairs(compared(cell, X, np.ones((N, 4))))


def test_raw_inputs():
    def loss_fn(model, x):
        y = jax.vmap(model)(x)
        return kfac.SquaredError(y, jnp.zeros(y.shape))

    layer, x = FORMS["conv"]()
    rows = capture(loss_fn, layer, x)
    np.testing.assert_array_equal(rows.inputs, x)
    assert rows.output_gradients.shape == jax.eval_shape(jax.vmap(layer), x).shape
    layer, x = FORMS["embedding"]()
    rows = capture(loss_fn, layer, x)
    np.testing.assert_array_equal(rows.inputs, x)
    assert rows.inputs.dtype == x.dtype
    rows = capture(loss_fn, layer_norm(), X)
    assert rows.inputs is None and rows.output_gradients.shape == (N, 2 * D)


#
# Every transformation
#


def plain(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


def checkpointed(model, x, y):
    return plain(eqx.filter_checkpoint(model), x, y)


def jitted(model, x, y):
    run = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    return kfac.SoftmaxCrossEntropy(run(model, x), y)


def other_axis(model, x, y):
    z = jax.vmap(model, in_axes=1, out_axes=1)(x.T)
    return kfac.SoftmaxCrossEntropy(z.T, y)


def with_penalty(model, x, y):
    return plain(model, x, y) + 3.0 * jnp.sum(model.layers[0].weight ** 2)


def printing(model, x, y):
    def one(x):
        z = model(x)
        jax.debug.callback(lambda z: None, z)
        return z

    return plain(one, x, y)


def in_ones_scan(model, x, y):
    z, _ = lax.scan(
        lambda _, m: (jax.vmap(model)(x), None), jnp.zeros((len(x), K)), y[:1]
    )
    return kfac.SoftmaxCrossEntropy(z, y)


TRANSFORMATIONS = [
    plain,
    checkpointed,
    jitted,
    other_axis,
    printing,
    in_ones_scan,
]


@pytest.mark.parametrize("loss_fn", TRANSFORMATIONS, ids=lambda f: f.__name__)
def test_transformations(loss_fn):
    check_gradients(loss_fn, mlp(), X, CLASSES, plain)


def test_penalties_are_left_out():
    check_gradients(with_penalty, mlp(), X, CLASSES, plain)


def test_positions_are_examples_too():
    def loss_fn(model, x, y):
        pooled = jnp.mean(jax.vmap(jax.vmap(model))(x), axis=1)
        return kfac.SoftmaxCrossEntropy(pooled, y)

    captured = check_gradients(loss_fn, mlp(), words, CLASSES)
    assert captured.layers[0].inputs.shape == (N, 4, D)
    assert captured.layers[0].examples == 2


@ft.cache
def stacked(number):
    one = lambda key: kfac.Linear(D, D, key=key)
    return made(lambda key: eqx.filter_vmap(one)(jr.split(key, number)))


def scanned_layers(layers, x, y):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def run(x):
        step = lambda h, layer: (jnp.tanh(eqx.combine(layer, static)(h)), None)
        return lax.scan(step, x, arrays)[0]

    return kfac.SoftmaxCrossEntropy(jax.vmap(run)(x), y)


def indexed_layers(layers, x, y):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def run(h):
        for i in range(4):
            layer = eqx.combine(jax.tree.map(lambda a: a[i], arrays), static)
            h = jnp.tanh(layer(h))
        return h

    return kfac.SoftmaxCrossEntropy(jax.vmap(run)(x), y)


def looked_up_layers(layers, x, y):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def run(x):
        def step(i, h):
            layer = eqx.combine(jax.tree.map(lambda a: a[i], arrays), static)
            return jnp.tanh(layer(h))

        return lax.fori_loop(0, 4, step, x)

    return kfac.SoftmaxCrossEntropy(jax.vmap(run)(x), y)


def ensemble(layers, x, y):
    each = lambda layer: jax.vmap(layer)(x)
    return kfac.SoftmaxCrossEntropy(jnp.mean(eqx.filter_vmap(each)(layers), axis=0), y)


STACKS = [scanned_layers, indexed_layers, looked_up_layers, ensemble]


@pytest.mark.parametrize("loss_fn", STACKS, ids=lambda f: f.__name__)
def test_stacked_layers(loss_fn):
    layers = stacked(4)
    captured = check_gradients(loss_fn, layers, X, CLASSES)
    assert captured.inputs.shape == captured.output_gradients.shape == (4, N, D)
    assert (captured.stack, captured.examples) == (1, 1)


def test_partitioned_model():
    model = mlp()
    last = lambda m: (m.layers[-1].weight, m.layers[-1].bias)
    mask = eqx.tree_at(last, jax.tree.map(eqx.is_inexact_array, model), (False, False))
    trained, frozen = eqx.partition(model, mask)

    def loss_fn(trained, x, y):
        return plain(eqx.combine(trained, frozen), x, y)

    captured = capture(loss_fn, trained, X, CLASSES)
    whole = capture(plain, model, X, CLASSES)
    assert captured.layers[-1] is None
    for i in range(2):
        for name in ("inputs", "output_gradients"):
            got, want = (getattr(c.layers[i], name) for c in (captured, whole))
            np.testing.assert_allclose(got, want, **TOLERANCE)


def test_frozen_weight():
    layer = linear(D, K)
    bias_only = eqx.tree_at(lambda m: m.weight, layer, None)

    def loss_fn(layer, x, y):
        whole = eqx.tree_at(
            lambda m: m.weight, layer, linear(D, K).weight, is_leaf=lambda a: a is None
        )
        return plain(whole, x, y)

    @eqx.filter_jit
    def run(layer, x, y):
        captured = kfac.analysis.capture(loss_fn)(layer, x, y)
        return captured, captured.gradients()

    captured, gradients = run(bias_only, X, CLASSES)
    assert gradients.shape == (N, K, 1)
    gradients = np.asarray(gradients)[..., 0]
    np.testing.assert_array_equal(gradients, captured.output_gradients)


def test_vmap_of_capture():
    x, y = np.asarray(X), np.asarray(CLASSES)
    x, y = np.stack([x, 2 * x]), np.stack([y, 1 - y])
    model = mlp()
    several = jax.vmap(lambda x, y: both(plain, plain, model, x, y)[1])
    for got, want in jax.jit(several)(x, y):
        assert_pairs(zip(got, want, strict=True))


def test_unused_layers_are_none():
    model = (linear(D, K), linear(D, K, 1))
    loss_fn = lambda model, x, y: plain(model[0], x, y)
    captured = capture(loss_fn, model, X, CLASSES)
    assert captured[1] is None and captured[0] is not None


def test_bfloat16():
    def loss_fn(model, x, y):
        low = kfac.cast(model, jnp.bfloat16)
        return kfac.SoftmaxCrossEntropy(jax.vmap(low)(x.astype(jnp.bfloat16)), y)

    x = np.asarray(X, np.float32)
    layer = jax.tree.map(lambda a: jax.device_put(np.float32(a)), linear(D, K))
    captured = capture(loss_fn, layer, x, CLASSES)
    assert captured.inputs.dtype == captured.output_gradients.dtype == jnp.bfloat16
    np.testing.assert_array_equal(captured.inputs, x.astype(jnp.bfloat16))


def test_rows_have_a_derivative():
    """Unlike sums of products of them."""
    layer = linear(D, K)
    targets = jnp.zeros((N, K))
    loss_fn = lambda m, x: kfac.SquaredError(jax.vmap(m)(x), targets)

    def size(layer):
        return jnp.sum(kfac.analysis.capture(loss_fn)(layer, X).output_gradients ** 2)

    def same(layer):
        return jnp.sum(jax.vmap(layer)(X) ** 2)

    both = eqx.filter_jit(lambda m: [eqx.filter_grad(f)(m) for f in (size, same)])
    got, want = both(layer)
    np.testing.assert_allclose(got.weight, want.weight, **TOLERANCE)


#
# Fisher estimates
#


FISHERS = [kfac.Exact(), kfac.Empirical(), kfac.MonteCarlo(3)]
WEIGHTS = jnp.array([1.0, 0.0, 2.0, 0.5, 1.0, 3.0])


def weighted_loss(model, x, y, w):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, w)


def two_losses(model, x, y, w):
    z = jax.vmap(model)(x)
    first = kfac.SoftmaxCrossEntropy(z, y, w)
    return first + 0.5 * kfac.SquaredError(z, jnp.ones((N, K)), w[::-1])


@pytest.mark.parametrize("loss_fn", [weighted_loss, two_losses])
@pytest.mark.parametrize("fisher", FISHERS, ids=lambda f: f"{type(f).__name__}")
def test_moments_are_the_factors(fisher, loss_fn):
    @eqx.filter_jit
    def run(*args):
        key = jr.key(9)
        captured = kfac.analysis.capture(loss_fn, fisher)(*args, key=key)
        curvature = kfac.curvature(loss_fn, fisher)(*args, key=key)
        each = [(layer, layer.rows()) for layer in captured.layers]
        return each, curvature.layers

    w = np.asarray(WEIGHTS)
    each, curvature = run(mlp(), X, CLASSES, WEIGHTS)
    for (rows, (x, g)), factors in zip(each, curvature, strict=True):
        assert g.shape[0] == rows.output_gradients.shape[0]
        G = np.einsum("cno,cnp->op", g, g) / w.sum()
        np.testing.assert_allclose(G, factors.output_factor, **TOLERANCE)
        if loss_fn is weighted_loss:
            A = np.einsum("n,ni,nj->ij", w, x, x) / w.sum()
            np.testing.assert_allclose(A, factors.input_factor, **TOLERANCE)


def test_gradient_of_weighted_losses():
    """The mean of what is captured is the gradient; with a Fisher it is not."""
    args = X, CLASSES, WEIGHTS

    @eqx.filter_jit
    def run(model, *args):
        want = eqx.filter_grad(lambda m: two_losses(m, *args).value)(model)
        got = kfac.analysis.capture(two_losses)(model, *args)
        roots = kfac.analysis.capture(two_losses, kfac.Empirical())(model, *args)
        to_matrix = kfac.form.Dense().to_matrix
        layers = zip(want.layers, got.layers, roots.layers, strict=True)
        return [(to_matrix(a), b.gradients(), c.gradients()) for a, b, c in layers]

    total = np.asarray(WEIGHTS).sum()
    for layer in run(mlp(), *args):
        wanted, got, root = map(np.asarray, layer)
        mean = np.sum(got, axis=0) / total
        np.testing.assert_allclose(mean, wanted, **TOLERANCE)
        other = np.sum(root[0], axis=0) / total
        assert np.linalg.norm(other - wanted) > 0.1 * np.linalg.norm(wanted)


def test_targets_may_be_missing():
    no_targets = lambda m, x: kfac.SoftmaxCrossEntropy(jax.vmap(m)(x))
    found = eqx.filter_eval_shape(
        kfac.analysis.capture(no_targets, kfac.Exact()), mlp(), X
    )
    assert found.layers[0].output_gradients.shape == (K, N, 4)
    gradients = eqx.filter_eval_shape(lambda rows: rows.gradients(), found.layers[0])
    assert gradients.shape == (K, N, 4, D + 1)
    with pytest.raises(ValueError, match="no targets"):
        capture(no_targets, mlp(), X)
    with pytest.raises(ValueError, match="needs randomness"):
        capture(no_targets, mlp(), X, fisher=kfac.MonteCarlo())


#
# What would be added up
#


def called_twice(model, x):
    return model(jnp.tanh(model(x)))


def in_scan(model, x):
    return lax.scan(lambda h, _: (jnp.tanh(model(h)), None), x, None, length=3)[0]


def in_fori_loop(model, x):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(model(h)), x)


def in_nested_scan(model, x):
    step = lambda h, _: (in_scan(model, h), None)
    return lax.scan(step, x, None, length=1)[0]


def in_jitted_calls(model, x):
    call = eqx.filter_jit(lambda model, x: jnp.tanh(model(x)))
    return call(model, call(model, x))


def in_checkpointed_scan(model, x):
    step = eqx.filter_checkpoint(lambda h, _: (jnp.tanh(model(h)), None))
    return lax.scan(step, x, None, length=3)[0]


def under_condition(model, x):
    return lax.cond(x[0] > 0, lambda x: model(x), lambda x: x, x)


USES = [
    called_twice,
    in_scan,
    in_fori_loop,
    in_nested_scan,
    in_jitted_calls,
    in_checkpointed_scan,
]


@pytest.mark.parametrize("outer", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_added_up(use, outer):
    layer = {"my": linear(D, D)}
    loss_fn = lambda m, x: kfac.SquaredError(jax.vmap(lambda x: use(m["my"], x))(x), x)
    number = 2 if use in (called_twice, in_jitted_calls) else 3
    with pytest.raises(ValueError, match=rf"\['my'\].*used {number} times"):
        outer(kfac.analysis.capture(loss_fn))(layer, X)


def test_loop_over_examples():
    loss_fn = lambda m, x: kfac.SquaredError(lax.map(m, x), x)
    with pytest.raises(ValueError, match=f"the model: it is used {N} times"):
        kfac.analysis.capture(loss_fn)(linear(D, D), X)


def test_condition():
    one = lambda m, x: kfac.SquaredError(under_condition(m, x[0])[None], x[:1] + 1)
    every = lambda m, x: kfac.SquaredError(
        jax.vmap(lambda x: under_condition(m, x))(x), x
    )
    for loss_fn in (one, every):
        with pytest.raises(ValueError, match="depending on data"):
            kfac.analysis.capture(loss_fn)(linear(D, D), X)


def test_rule_of_ones_own():
    """The backward pass of a `custom_vjp` runs for single examples, which `vmap` adds."""

    @eqx.filter_custom_vjp
    def apply(model_and_x):
        model, x = model_and_x
        return model(x)

    @apply.def_fwd
    def forward(perturbed, model_and_x):
        return apply(model_and_x), None

    @apply.def_bwd
    def backward(residuals, g, perturbed, model_and_x):
        _, pullback = eqx.filter_vjp(lambda mx: mx[0](mx[1]), model_and_x)
        (gradient,) = pullback(g)
        return gradient

    layer = linear(D, D)
    loss_fn = lambda m, x: kfac.SquaredError(jax.vmap(lambda x: apply((m, x)))(x), x)
    with pytest.raises(ValueError, match=f"used {N} times"):
        kfac.analysis.capture(loss_fn)(layer, X)


def test_some_of_a_stack():
    loss_fn = lambda m, x: kfac.SquaredError(
        jax.vmap(jax.tree.map(lambda a: a[0] if eqx.is_array(a) else a, m))(x), x
    )
    with pytest.raises(ValueError, match="not all of which"):
        kfac.analysis.capture(loss_fn)(stacked(3), X)


def test_stack_on_different_shapes():
    def loss_fn(layers, x):
        first, second = (
            jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, layers) for i in (0, 1)
        )
        out = [jax.vmap(first)(x), jax.vmap(second)(x[:2])]
        return kfac.SquaredError(jnp.concatenate(out), jnp.zeros((N + 2, D)))

    with pytest.raises(ValueError, match="different shapes"):
        kfac.analysis.capture(loss_fn)(stacked(2), X)


def test_tied_weights():
    embedding = made(lambda key: eqx.nn.Embedding(5, D, key=key))
    head = made(lambda key: eqx.nn.Linear(D, 5, use_bias=False, key=key))
    where, get = lambda p: p[1].weight, lambda p: p[0].weight
    model = kfac.convert(eqx.nn.Shared((embedding, head), where, get))

    def loss_fn(model, index):
        embedding, head = model()
        return kfac.SoftmaxCrossEntropy(jax.vmap(lambda i: head(embedding(i)))(index))

    with pytest.raises(ValueError, match="used 2 times"):
        kfac.analysis.capture(loss_fn, kfac.Exact())(model, np.asarray(tokens)[:, 0] % 5)


def test_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    layer = linear(D, D)

    def loss_fn(layer, x):
        run = jax.shard_map(
            lambda x: jax.vmap(layer)(x),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        return kfac.SquaredError(run(x), x)

    with pytest.raises(ValueError, match="by several devices"):
        kfac.analysis.capture(loss_fn)(layer, X)

    plain = lambda m, x: kfac.SquaredError(jax.vmap(m)(x), x)
    inside = jax.shard_map(
        lambda x: kfac.analysis.capture(plain)(layer, x).inputs,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(ValueError, match="within a `shard_map`"):
        inside(X)

    sharded = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
    got, want = capture(plain, layer, sharded), capture(plain, layer, X)
    np.testing.assert_allclose(got.output_gradients, want.output_gradients, **TOLERANCE)


def test_explicit_mesh():
    """Rows are split over devices as the batch is; so are those of stacked layers."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Explicit,))

    def loss_fn(models, x):
        layer, stack = models
        x = jnp.tanh(jax.vmap(layer)(x))
        y = eqx.filter_vmap(lambda m: jax.vmap(m)(x))(stack)
        return kfac.SquaredError(y, jnp.zeros_like(y))

    models = (linear(D, D), stacked(2))
    want = capture(loss_fn, models, X)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        got = capture(loss_fn, models, sharded)
    assert jax.typeof(got[0].inputs).sharding.spec == P("data", None)
    assert jax.typeof(got[1].output_gradients).sharding.spec == P(None, "data", None)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.inputs, b.inputs, **TOLERANCE)
        np.testing.assert_allclose(a.output_gradients, b.output_gradients, **TOLERANCE)


def test_untagged_model():
    with pytest.raises(ValueError, match="no tagged layer"):
        kfac.analysis.capture(plain)(kfac.revert(linear(D, K)), X, CLASSES)
