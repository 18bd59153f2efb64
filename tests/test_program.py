"""What is seen in a loss function before it runs: parameters that pass by their tag,
examples whose gradients would be added up, slots that are noticed."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import leaves, make_mesh, normal
from .plain import plain_kfac


N, D, K = 6, 4, 2
KEYS = [jax.random.key(seed) for seed in range(9)]
X = normal(N, D, seed=0)
Y = normal(N, K, seed=1)
TOKENS = normal(N, 3, D, seed=2)
WEIGHTS = jnp.array([1.0, 2, 0, 1, 3, 1])
EXACT = kfac.Exact()


def mlp(**kwargs):
    net = eqx.nn.MLP(D, K, 5, 1, activation=jnp.tanh, key=KEYS[3])
    return kfac.convert(net, **kwargs)


def linear(block=kfac.Kronecker(kfac.Expand())):
    return kfac.Linear(D, K, key=KEYS[3], block=block)


def base(model, x, y):
    return kfac.SquaredError(jax.vmap(model)(x), y)


def curvature(loss_fn, model, *args):
    return collector(loss_fn)(model, *args)


@ft.cache
def collector(loss_fn):
    return eqx.filter_jit(kfac.curvature(loss_fn, fisher=EXACT))


def same(a, b, tolerance=1e-12):
    a, b = (map(np.asarray, jtu.tree_leaves(tree)) for tree in (a, b))
    pairs = zip(a, b, strict=True)
    return all(
        np.linalg.norm(p - q) <= tolerance * max(np.linalg.norm(q), 1e-3)
        for p, q in pairs
    )


#
# Parameters that pass by their tag.
#


def weight_alone(m, x, y):
    hidden = lambda v: jnp.tanh(m.layers[0].weight @ v)
    return kfac.SquaredError(jax.vmap(lambda v: m.layers[1](hidden(v)))(x), y)


def weight_too(m, x, y):
    out = lambda v: m(v) + m.layers[1].weight @ jnp.ones(5)
    return kfac.SquaredError(jax.vmap(out)(x), y)


def forward_over_reverse(m, x, y):
    slope = jax.grad(lambda v: m(v)[0])
    curved = lambda v: jax.jvp(slope, (v,), (jnp.ones(D),))[1][:K]
    return kfac.SquaredError(jax.vmap(curved)(x), y)


def reverse_derivative(m, x, y):
    slope = lambda v: jax.grad(lambda v: m(v)[0])(v)[:K]
    return kfac.SquaredError(jax.vmap(slope)(x), y)


def decoder_by_vjp(m, x, y):
    def out(v):
        h, back = jax.vjp(m.layers[0], v)
        return back(jnp.tanh(h))[0][:K] + m.layers[1](h)

    return kfac.SquaredError(jax.vmap(out)(x), y)


def scaled(m, x, y):
    return base(
        eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=lambda w: 10 * w), x, y
    )


def masked(m, x, y):
    mask = jnp.arange(5.0 * D).reshape(5, D) % 2
    change = lambda w: w * mask
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def standardised(m, x, y):
    change = lambda w: (w - jnp.mean(w)) / jnp.std(w)
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def transposed(m, x, y):
    square = lambda w: w.at[:D, :D].set(w[:D, :D].T * jnp.ones((D, D)))
    change = lambda w: jnp.where(jnp.arange(5)[:, None] < 2, w, square(w))
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def chosen(m, x, y):
    change = lambda w: jnp.where(jnp.arange(5)[:, None] < 2, w, 0)
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def negative(m, x, y):
    change = lambda w: jnp.ones_like(w) - w
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def straight_through(m, x, y):
    """Rounded forwards, the identity backwards."""
    change = lambda w: w + jax.lax.stop_gradient(jnp.round(w) - w)
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def moved(m, x, y):
    """In a vector with others, and taken out of it again."""

    def change(w):
        flat = jnp.concatenate(
            [jnp.zeros(3), w.astype(jnp.float32).ravel().astype(float)]
        )
        return flat[3:].reshape(w.shape)

    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def reversed_rows(m, x, y):
    change = lambda w: w[::-1]
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


def one_of_both(m, x, y):
    change = lambda w: jnp.where(jnp.sum(x) > 0, w, w + 1)
    return base(eqx.tree_at(lambda m: m.layers[0].weight, m, replace_fn=change), x, y)


class Tied(eqx.Module):
    """An embedding that is used raw, as the projection onto its rows."""

    embedding: kfac.Embedding

    def __call__(self, i):
        return self.embedding.weight @ jnp.tanh(self.embedding(i))


def tied(m, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(m)(jnp.arange(N) % 3), jnp.arange(N) % 3)


def tied_model():
    return Tied(kfac.Embedding(3, 4, key=KEYS[3]))


traced = eqx.filter_eval_shape
BESIDE = [
    (weight_alone, mlp, ".layers[0]"),
    (weight_too, mlp, ".layers[1]"),
    (tied, tied_model, ".embedding"),
]
REVERSE = [forward_over_reverse, reverse_derivative, decoder_by_vjp]
CHANGED = [
    (scaled, mlp, ".layers[0]"),
    (masked, mlp, ".layers[0]"),
    (standardised, mlp, ".layers[0]"),
    (transposed, mlp, ".layers[0]"),
    (chosen, mlp, ".layers[0]"),
    (negative, mlp, ".layers[0]"),
    (reversed_rows, mlp, ".layers[0]"),
]


@pytest.mark.parametrize("loss_fn, make, path", BESIDE + CHANGED)
def test_parameters_beside_their_tag(loss_fn, make, path):
    model, optimizer = make(), plain_kfac(0.1)
    state = optimizer.init(model)
    for take in (
        lambda: curvature(loss_fn, model, X, Y),
        lambda: traced(optimizer.step, loss_fn, model, state, X, Y, key=KEYS[8]),
    ):
        with pytest.raises(ValueError) as error:
            take()
        assert path in str(error.value) and "blocks=" in str(error.value)


@pytest.mark.parametrize("loss_fn, make, path", CHANGED)
def test_layers_with_other_parameters(loss_fn, make, path):
    with pytest.raises(ValueError, match="with something else in the place of its") as e:
        curvature(loss_fn, make(), X, Y)
    assert f"`{path}`" in str(e.value) and ".layers[1]" not in str(e.value)


@pytest.mark.parametrize("loss_fn", [straight_through, moved, one_of_both])
def test_parameters_that_are_what_they_were(loss_fn):
    """What is added to them changes no gradient, nor does another place to hold them."""
    report = kfac.verify(loss_fn, mlp(), X, Y)
    assert all(check.unseen < 1e-6 for check in report.layers)
    assert curvature(loss_fn, mlp(), X, Y) is not None


@pytest.mark.parametrize("how", ["masked", "scaled"])
def test_changed_layers_within_a_model(how):
    """With an example, what is done with them is followed."""

    class Changed(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            keep = jnp.arange(2.0 * D).reshape(K, D) % 3 > 0
            change = dict(
                masked=lambda w: jnp.where(keep, w, 0), scaled=lambda w: jnp.exp(w)
            )[how]
            return eqx.tree_at(lambda m: m.weight, self.linear, replace_fn=change)(x)

    model = Changed(eqx.nn.Linear(D, K, key=KEYS[3]))
    with pytest.raises(ValueError, match="example="):
        curvature(base, kfac.convert(model), X, Y)
    converted = kfac.convert(model, example=X[0])
    report = kfac.verify(base, converted, X[:1], Y[:1])
    tags = [tag for _, tag, _ in kfac._tag.trained_layers(converted)]
    assert all(check.unseen == 0 for check in report.layers)
    assert (tags[0].form.mask is not None) == (how == "masked")
    assert how == "scaled" or report.exact


@pytest.mark.parametrize("loss_fn, make, path", BESIDE + CHANGED)
def test_verify_names_what_a_tag_does_not_see(loss_fn, make, path):
    report = kfac.verify(loss_fn, make(), X, Y)
    assert np.all(report[path].unseen > 1e-2)
    verdict = report[path].verdict
    assert verdict.startswith("WRONG: its tag") and verdict in repr(report)
    large = kfac.verify(loss_fn, make(), X, Y, limit=1)  # Without dense blocks.
    np.testing.assert_allclose(large[path].unseen, report[path].unseen)
    np.testing.assert_allclose(large[path].error, report[path].error, rtol=1e-6)


def test_verify_says_how_much():
    report = kfac.verify(scaled, mlp(), X, Y)
    assert report[".layers[1]"].unseen < 1e-12
    # Of the weight's gradient, a tenth; of the bias's, all.
    assert 0.5 < report[".layers[0]"].unseen <= 0.9


def test_a_tag_sees_all_there_is():
    for block in (kfac.Kronecker(), kfac.EKFAC(), kfac.Full()):
        for loss_fn in [base, *REVERSE]:
            report = kfac.verify(loss_fn, mlp(blocks=block), X, Y)
            assert all(check.unseen < 1e-12 for check in report.layers)


def test_layers_that_are_not_called():
    two = (mlp(), mlp())
    first = lambda m, x, y: base(m[0], x, y)
    optimizer = plain_kfac(0.1, fisher=EXACT)
    both = r"`\[1\].layers\[0\]`, `\[1\].layers\[1\]` are .* never calls them"
    with pytest.raises(ValueError, match=both):
        traced(optimizer.step, first, two, optimizer.init(two), X, Y)
    frozen = (mlp(), None)
    traced(optimizer.step, first, frozen, optimizer.init(frozen), X, Y)
    unused = curvature(first, two, X, Y)[1]  # It has none: that is right.
    assert not any(np.any(np.asarray(a)) for a in jtu.tree_leaves(unused))


class Beside(eqx.Module):
    main: kfac.Linear
    other: kfac.Linear


def test_layers_that_only_a_penalty_calls():
    model, optimizer = Beside(linear(), linear()), kfac.KFAC()
    penalty = lambda m, x: jnp.sum(jax.vmap(m.other)(x) ** 2)
    loss_fn = lambda m, x, y: base(m.main, x, y) + 0.1 * penalty(m, x)
    with pytest.raises(
        ValueError, match=r"`\.other` is trained, but no loss depends on it"
    ):
        optimizer.step(loss_fn, model, optimizer.init(model), X, Y, key=KEYS[0])
    in_the_loss = lambda m, x, y: base(lambda v: m.main(v) + m.other(v), x, y)
    step = optimizer.step(in_the_loss, model, optimizer.init(model), X, Y, key=KEYS[0])
    assert not step[-1].rejected


def test_derivatives_that_are_not_trained_through_are_fine():
    def adversarial(m, x, y):
        slope = jax.grad(lambda x: base(m, x, y).value)(x)
        return base(m, x + 0.1 * jnp.sign(slope), y)

    slope = jax.jit(jax.grad(lambda x: base(mlp(), x, Y).value))(X)
    x = np.asarray(X) + 0.1 * np.sign(slope)
    for block in (kfac.Kronecker(kfac.Expand()), kfac.TNT()):
        model = kfac.convert(kfac.revert(mlp()), block)
        assert same(curvature(adversarial, model, X, Y), curvature(base, model, x, Y))


#
# The loss stays what it is.
#


def penalised(penalty):
    return lambda m, x, y: base(m, x, y) + 0.1 * penalty(m)


def balanced(m, x, y):
    grads = eqx.filter_grad(lambda m: base(m, x, y).value)(m)
    return base(m, x, y) * jax.lax.stop_gradient(1 / optax.tree.norm(grads))


def balanced_plainly(m, x, y):
    grads = eqx.filter_grad(lambda m: base(m, x, y).value)(kfac.revert(m))
    return base(m, x, y) * jax.lax.stop_gradient(1 / optax.tree.norm(grads))


def sharpness_aware(m, x, y):
    grads = eqx.filter_grad(lambda m: base(m, x, y).value)(m)
    grads = jax.lax.stop_gradient(grads)
    norm = optax.tree.norm(grads)
    return base(eqx.apply_updates(m, jax.tree.map(lambda g: 0.1 * g / norm, grads)), x, y)


def meta(m, x, y):
    grads = eqx.filter_grad(lambda m: base(m, x, y).value)(m)
    return base(eqx.apply_updates(m, jax.tree.map(lambda g: -0.1 * g, grads)), x, y)


def noisy(m, x, y):
    params, static = eqx.partition(m, eqx.is_inexact_array)
    arrays, treedef = jtu.tree_flatten(params)
    keys = jax.random.split(KEYS[4], len(arrays))
    new = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(arrays, keys)]
    return base(eqx.combine(treedef.unflatten(new), static), x, y)


def in_a_row(m):
    """All arrays, zeros of tags among them."""
    return jnp.concatenate([p.reshape(-1) for p in leaves(m)])


def own(m):
    """The same without those."""
    return in_a_row(kfac.revert(m))


def in_a_scan(m, x, y):
    step = lambda total, _: (
        total + sum(jnp.mean(p) for p in leaves(m)) / len(leaves(m)),
        None,
    )
    return base(m, x, y) + jax.lax.scan(step, 0.0, None, 3)[0]


NOTICING = [
    balanced,
    sharpness_aware,
    noisy,
    in_a_scan,
    penalised(lambda m: sum(jnp.mean(p) for p in leaves(m)) / len(leaves(m))),
    penalised(lambda m: jnp.std(jnp.concatenate([p.reshape(-1) for p in leaves(m)]))),
    penalised(lambda m: float(len(leaves(m)))),
    # Of zeros, these are ones, infinities, and no numbers.
    penalised(lambda m: sum(jnp.sum(jax.lax.integer_pow(p, 0)) for p in leaves(m))),
    penalised(lambda m: sum(jnp.sum(p**-2) for p in leaves(m))),
    penalised(lambda m: sum(jnp.sum(p / jnp.linalg.norm(p)) for p in leaves(m))),
    penalised(lambda m: jnp.sum(in_a_row(m) ** -2)),
]
UNNOTICING = [
    meta,
    balanced_plainly,
    penalised(lambda m: sum(jnp.sum(p**2) for p in leaves(m))),
    penalised(lambda m: jnp.sqrt(sum(jnp.vdot(p, p) for p in leaves(m)))),
    penalised(lambda m: sum(jnp.sum(jnp.abs(p)) for p in leaves(m))),
    penalised(lambda m: sum(jnp.sum(0.5 * p) for p in leaves(m))),
    penalised(lambda m: sum(jnp.sum(p / (1 + jnp.linalg.norm(p))) for p in leaves(m))),
    # What is padded, and what is not, in both orders.
    penalised(lambda m: jnp.sum(jnp.exp(own(m))) + jnp.sum(in_a_row(m) ** 2)),
    penalised(lambda m: jnp.sum(in_a_row(m) ** 2) + jnp.sum(jnp.exp(own(m)))),
    penalised(lambda m: jnp.max(jnp.abs(in_a_row(m)))),
    penalised(
        lambda m: jnp.std(jax.flatten_util.ravel_pytree(leaves(kfac.revert(m)))[0])
    ),
]


@pytest.mark.parametrize("loss_fn", NOTICING)
def test_losses_that_notice_slots_are_refused(loss_fn):
    with pytest.raises((ValueError, TypeError), match="kfac.revert"):
        traced(kfac.value_grad_and_curvature(loss_fn, EXACT), mlp(), X, Y)


@pytest.mark.parametrize("loss_fn", UNNOTICING)
def test_losses_that_do_not_are_the_same(loss_fn):
    collect = eqx.filter_jit(kfac.value_grad_and_curvature(loss_fn, EXACT))
    value, grads, _ = collect(mlp(), X, Y)
    run = eqx.filter_value_and_grad(lambda m, x, y: loss_fn(m, x, y).value)
    expected, slopes = eqx.filter_jit(run)(kfac.revert(mlp()), X, Y)
    assert float(value) == float(expected)
    # To the last bit. (Without optimization, the XLA of newer JAX fuses otherwise.)
    rtol = 0 if jax.__version_info__ < (0, 11) else 1e-14
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol)
    jtu.tree_map(close, leaves(grads), leaves(slopes))


#
# Where the examples are.
#


class Recurrent(eqx.Module):
    W: kfac.Linear
    U: kfac.Linear
    out: kfac.Linear
    unrolled: bool = eqx.field(static=True)

    def __call__(self, xs):
        step = lambda h, x: (jnp.tanh(self.W(h) + self.U(x)), None)
        h = jnp.zeros(3)
        if not self.unrolled:
            return self.out(jax.lax.scan(step, h, xs)[0])
        for x in xs:
            h, _ = step(h, x)
        return self.out(h)


def recurrent(block, unrolled):
    make = lambda i, o, key: kfac.Linear(i, o, key=key, block=block)
    return Recurrent(
        make(3, 3, KEYS[5]), make(D, 3, KEYS[6]), make(3, K, KEYS[7]), unrolled
    )


BLOCKS = [
    kfac.Kronecker(kfac.Expand()),
    *(kfac.Full(), kfac.Diagonal(), kfac.Identity(), kfac.TNT(), kfac.EKFAC()),
]


@ft.cache
def each_by_itself(loss_fn):
    """The losses of several models, of which none sees the others: one program."""
    return lambda models, *args: sum((loss_fn(m, *args) for m in models), 0)


def added(models, x, y):
    """Of squared error no model sees the others."""
    return base(lambda v: sum(m(v) for m in models), x, y)


def of_all_blocks(unrolled):
    return [recurrent(block, unrolled) for block in BLOCKS]


@ft.cache
def curvature_of_all_blocks(unrolled):
    return curvature(added, of_all_blocks(unrolled), TOKENS, Y)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_unrolled_from_a_constant_state(index):
    """The same as in a scan, in which every step acts on every example."""
    unrolled, scan = curvature_of_all_blocks(True), curvature_of_all_blocks(False)
    assert same(unrolled[index], scan[index])


@pytest.mark.parametrize("unrolled", [False, True])
def test_full_and_diagonal_are_exact_over_several_uses(unrolled):
    models = of_all_blocks(unrolled)
    checks = kfac.verify(added, models, TOKENS, Y).layers
    kronecker, full, diagonal, *others = [checks[i : i + 3] for i in range(0, 18, 3)]
    assert all(check.verdict.startswith("exact") for check in full)
    for check in diagonal:
        assert check.diagonal_error < 1e-12 and check.error > 0.1
    for check in sum(others, ()):  # Identity, TNT, EKFAC.
        assert abs(check.ratio - 1) < 1e-12
    assert abs(kronecker[0].ratio - 1) > 0.01  # `Expand` takes uses for independent.


class Normalised(eqx.Module):
    norm: kfac.LayerNorm
    layer: kfac.Linear

    def __call__(self, x):
        return self.layer(self.norm(jnp.tanh(self.norm(x))))


def normalised():
    norm = kfac.LayerNorm(D)
    norm = eqx.tree_at(lambda n: n.weight, norm, jnp.arange(1.0, D + 1))
    return Normalised(norm, linear())


def test_a_norm_that_is_called_twice():
    (check, _) = kfac.verify(base, normalised(), X, Y).layers
    assert check.diagonal_error < 1e-12


def test_steps_of_a_layer_that_is_used_several_times():
    optimizer = plain_kfac(0.1, fisher=EXACT)
    model = recurrent(kfac.Full(), True)
    step = eqx.filter_jit(ft.partial(optimizer.step, base))
    whole = step(model, optimizer.init(model), TOKENS, Y)
    parts = step(model, optimizer.init(model), TOKENS, Y, micro_batches=3)
    assert same(whole[1].curvature, parts[1].curvature)
    assert same(leaves(whole[0]), leaves(parts[0]), 1e-10)


def test_several_uses_over_devices():
    mesh = make_mesh((2,))
    model = recurrent(kfac.Full(), True)
    params, static = eqx.partition(model, eqx.is_array)

    def local(params, x, y):
        return kfac.curvature(base, fisher=EXACT)(eqx.combine(params, static), x, y)

    specs = dict(in_specs=(jax.P(), jax.P("batch"), jax.P("batch")), out_specs=jax.P())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    assert same(sharded(params, TOKENS, Y), curvature(base, model, TOKENS, Y))


class Positions(eqx.Module):
    table: kfac.Embedding
    layer: kfac.Linear

    def __call__(self, xs, positions):
        return self.layer(jnp.mean(jnp.tanh(xs + positions), 0))


def positions_model():
    return Positions(kfac.Embedding(6, D, key=KEYS[4]), linear())


def inside(m, xs, y):
    look_up = lambda: jax.vmap(m.table)(jnp.arange(xs.shape[1]))
    return kfac.SquaredError(jax.vmap(lambda v: m(v, look_up()))(xs), y)


def outside(m, xs, y):
    positions = jax.vmap(m.table)(jnp.arange(xs.shape[1]))
    return kfac.SquaredError(jax.vmap(lambda v: m(v, positions))(xs), y)


def with_data(m, xs, y, zeros):
    def one(v, zero):
        return m(v, jax.vmap(lambda i: m.table(i + zero))(jnp.arange(xs.shape[1])))

    return kfac.SquaredError(jax.vmap(one)(xs, zeros), y)


@pytest.mark.parametrize("tokens", [5, 6])  # As many as examples, and not.
def test_positions(tokens):
    xs = normal(N, tokens, D, seed=5)
    model = positions_model()
    each = curvature(with_data, model, xs, Y, jnp.zeros(N, int))
    assert same(curvature(inside, model, xs, Y), each)
    with pytest.raises(ValueError, match="`.table` is called outside of the `vmap`"):
        curvature(outside, model, xs, Y)


def sequence(m, xs):
    return jnp.mean(jax.vmap(m)(xs), 0)


@jax.custom_vjp
def with_own_derivative(m, xs):
    return sequence(m, xs)


def _forward(m, xs):
    return jax.vjp(sequence, m, xs)


with_own_derivative.defvjp(_forward, lambda back, g: back(g))


def over(fn):
    def loss_fn(m, xs, y, w=None):
        return kfac.SquaredError(jax.vmap(lambda v: fn(m, v))(xs), y, w)

    return loss_fn


def conditional(predicate):
    def fn(m, v):
        zero = lambda v: 0 * sequence(m, v)
        return jax.lax.cond(predicate(v), lambda v: sequence(m, v), zero, v)

    return over(fn)


plainly = over(sequence)


def mapped(m, xs, y, w=None):
    return kfac.SquaredError(jax.lax.map(lambda v: sequence(m, v), xs), y, w)


def flattened(m, xs, y, w=None):
    rows = jax.vmap(m)(xs.reshape(-1, D)).reshape(*xs.shape[:2], K)
    return kfac.SquaredError(jnp.mean(rows, 1), y, w)


PROGRAMS = {
    "custom_vjp": over(with_own_derivative),
    "cond": conditional(lambda v: True),
    "cond of each example": conditional(lambda v: v[0, 0] > -1e9),
    "lax.map": mapped,
    "flattened": flattened,
}


@pytest.mark.parametrize("tokens", [5, 6])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_which_axis_is_the_batch(name, weighted, tokens):
    xs = normal(N, tokens, D, seed=5)
    args = xs, Y, (WEIGHTS if weighted else None)
    fine = [kfac.Kronecker(kfac.Expand())]
    told_apart = [kfac.Kronecker(kfac.Reduce())]
    told_apart += [kfac.Full(), kfac.Diagonal()]
    if name == "cond":
        fine, told_apart = fine + told_apart, []
    elif weighted:
        fine, told_apart = [], fine + told_apart
    take = lambda fn, blocks: curvature(
        each_by_itself(fn), [linear(block) for block in blocks], *args
    )
    if fine:
        assert same(take(PROGRAMS[name], fine), take(plainly, fine))
    for block in told_apart:
        with pytest.raises(ValueError, match="which axis of .* counts the examples"):
            take(PROGRAMS[name], [block])
    unweighted = linear(kfac.Kronecker(weighted=False))
    traced(collector(PROGRAMS[name]), unweighted, *args)  # As the message says.


def indexed(layers, v):
    """A stack of layers, one by one, without a loop along it."""
    for i in range(2):
        own = jtu.tree_map(lambda a, i=i: a[i], eqx.filter(layers, eqx.is_array))
        v = jnp.tanh(jax.vmap(eqx.combine(own, layers))(v))
    return jnp.mean(v, 0)


def scanned(layers, v):
    params, static = eqx.partition(layers, eqx.is_array)
    step = lambda v, p: (jnp.tanh(jax.vmap(eqx.combine(p, static))(v)), None)
    return jnp.mean(jax.lax.scan(step, v, params)[0], 0)


def test_a_loop_is_only_along_a_stack_that_it_slices():
    """Not if it goes round as often as there are examples, beside an index."""
    make = lambda key: kfac.Linear(D, D, key=key, block=kfac.Full())
    layers = eqx.filter_vmap(make)(jax.random.split(KEYS[0], 2))
    xs = normal(3, 3, D, seed=5)  # As many tokens as examples.

    def loss_fn(m, xs, network, over):
        out = over(lambda v: network(m, v), xs)
        return kfac.SquaredError(out, jnp.zeros((3, D)))

    vmapped = lambda fn, xs: jax.vmap(fn)(xs)
    ours = [curvature(loss_fn, layers, xs, fn, vmapped) for fn in (indexed, scanned)]
    assert same(*ours)
    for network in (indexed, scanned):
        with pytest.raises(ValueError, match="which axis of .* counts the examples"):
            curvature(loss_fn, layers, xs, network, jax.lax.map)


class Pair(eqx.Module):
    rows: kfac.Linear
    other: kfac.Linear


def pair_loss(run):
    def loss_fn(m, xs, y, x):
        first = kfac.SquaredError(run(m.rows, xs), y)
        return first + base(m.other, x, jnp.zeros((len(x), K)))

    return loss_fn


def looped(layer, xs):
    """A loop over examples, and in it one over the tokens of each."""
    token = lambda total, x: (total + layer(x), None)
    example = lambda _, x: (None, jax.lax.scan(token, jnp.zeros(K), x)[0])
    return jax.lax.scan(example, None, xs)[1]


@pytest.mark.parametrize("block", [kfac.Diagonal(), kfac.Full()])
def test_loops_as_long_as_two_losses(block):
    """Six examples of three tokens; and another loss of three examples."""
    unweighted = kfac.Kronecker(kfac.Expand(), weighted=False)
    model, args = Pair(linear(block), linear(unweighted)), (TOKENS, Y, X[:3])
    with pytest.raises(ValueError, match=r"`\.rows` counts the examples"):
        curvature(pair_loss(looped), model, *args)
    vectorised = lambda layer, xs: jax.vmap(lambda x: sum(map(layer, x)))(xs)
    assert curvature(pair_loss(vectorised), model, *args) is not None


def test_one_example_vectorised():
    loss_fn = lambda m, x, y: kfac.SquaredError(
        jnp.mean(jnp.vectorize(m, signature="(i)->(o)")(x), 1), y
    )
    with pytest.raises(ValueError, match="counts the examples"):
        curvature(loss_fn, linear(kfac.Full()), TOKENS[:1], Y[:1])
    assert same(
        curvature(loss_fn, linear(), TOKENS[:1], Y[:1]),
        curvature(plainly, linear(), TOKENS[:1], Y[:1]),
    )


def test_a_condition_of_each_example_within_a_custom_jvp():
    """Without, the inputs of examples that do not use the layer do not count."""

    def on_condition(m, v):
        return jax.lax.cond(jnp.sum(v) > 0, lambda v: m(v), lambda v: jnp.zeros(K), v)

    def pushed(m, v):
        fn = jax.custom_jvp(lambda v: on_condition(m, v))
        fn.defjvp(lambda v, dot: jax.jvp(lambda v: on_condition(m, v), v, dot))
        return fn(v)

    m, chosen = linear(), np.asarray(X)[np.sum(X, 1) > 0]
    assert 0 < len(chosen) < N
    found = curvature(over(on_condition), m, X, Y)
    rows = np.concatenate([chosen, np.ones((len(chosen), 1))], 1)
    assert same(found.input_factor, rows.T @ rows / len(rows))
    rows = np.concatenate([X, np.ones((N, 1))], 1)
    assert not same(found.input_factor, rows.T @ rows / N, 0.1)
    with pytest.raises(ValueError, match="The layer `` is called on a condition"):
        curvature(over(pushed), m, X, Y)


#
# Dependences that are easily lost
#


@jax.custom_jvp
def rounded(w):
    """With the derivative of the identity."""
    return jnp.round(4 * w) / 4


@rounded.defjvp
def _(primals, tangents):
    return rounded(*primals), *tangents


@jax.custom_vjp
def signs(w):
    return jnp.sign(w)


signs.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))
FLIPPED = jnp.array([1, 0])


def beside(change):
    """A layer, and what becomes of its weight."""
    return lambda m, x, y: base(lambda v: m(v) + change(m.weight, v), x, y)


LOST = {
    "scattered": beside(lambda w, v: jnp.zeros_like(w).at[FLIPPED].add(w) @ v),
    "largest": beside(lambda w, v: jnp.zeros_like(w).at[FLIPPED].max(w) @ v),
    "summed": beside(lambda w, v: jax.ops.segment_sum(w, FLIPPED, K) @ v),
    "solved": beside(lambda w, v: jnp.linalg.solve(w @ w.T, w @ v)),
    "inverted": beside(lambda w, v: jnp.linalg.inv(w @ w.T) @ jnp.ones(K)),
    "rounded": beside(lambda w, v: rounded(w) @ v),
    "signs": beside(lambda w, v: signs(w) @ v),
}


@pytest.mark.parametrize("name", LOST)
def test_parameters_beside_their_tag_in_operations_that_are_not_simple(name):
    with pytest.raises(ValueError, match="another way"):
        curvature(LOST[name], linear(), X, Y)
    # Of constants, they are accepted.
    plain = lambda m, x, y: LOST[name](jax.lax.stop_gradient(kfac.revert(m)), x, y)
    sum_of_both = lambda m, x, y: plain(m, x, y) + base(m, x, y)
    assert curvature(sum_of_both, linear(), X, Y) is not None


def test_weights_that_are_only_rounded():
    """Without a call of the layer, it is not one that may be frozen."""
    quantised = lambda m, x, y: base(lambda v: rounded(m.weight) @ v, x, y)
    with pytest.raises(ValueError, match="are used in another way"):
        traced(plain_kfac(0.1).step, quantised, linear(), plain_kfac(0.1).init(linear()),
               X, Y, key=KEYS[8])  # fmt: skip


def test_forces_through_a_gather():
    """The transpose of a gather is a scatter."""
    pairs = jnp.array([0, 0, 1]), jnp.array([1, 2, 2])

    def energy(m, positions):
        differences = positions[pairs[0]] - positions[pairs[1]]
        squares = jnp.tile(jnp.sum(differences**2, axis=-1, keepdims=True), (1, D))
        return jnp.sum(jnp.tanh(jax.vmap(m)(squares)))

    def forces(m, x, y):
        slope = lambda v: jax.grad(lambda v: energy(m, v))(v).reshape(-1)
        return kfac.SquaredError(jax.vmap(slope)(x), 0.0 * x.reshape(len(x), -1))

    model = kfac.convert(kfac.revert(linear()), kfac.Full())
    (found,) = kfac.verify(forces, model, TOKENS, Y).layers
    assert found.unseen <= 1e-12 and found.error <= 1e-10


def test_a_layer_that_is_not_called_beside_a_scatter():
    model, optimizer = Beside(linear(), linear()), plain_kfac(0.1)
    shifted = lambda m, x, y: base(lambda v: m.main(v).at[0].add(1.0), x, y)
    with pytest.raises(ValueError, match="never calls it"):
        optimizer.step(shifted, model, optimizer.init(model), X, Y, key=KEYS[0])


def test_numbers_made_of_a_typed_key_are_data():
    class Timed(eqx.Module):
        layer: kfac.Linear
        time: kfac.Linear

        def __call__(self, x, t):
            return self.layer(x) * self.time(t[None])

    model = Timed(linear(), kfac.Linear(1, K, key=KEYS[4]))

    def loss_fn(m, x, y, key):
        times = jax.random.uniform(key, (len(x),))
        return kfac.SquaredError(jax.vmap(m)(x, times), y)

    found = [
        curvature(loss_fn, model, X, Y, key)
        for key in (jax.random.key(1), jax.random.PRNGKey(1))
    ]
    assert same(*found)


#
# Axes of examples that data do not have
#


class Operator(eqx.Module):
    """Of a function that is known at some points, the values at others."""

    branch: kfac.Linear
    trunk: kfac.Linear

    def __call__(self, values, points):
        return jax.vmap(self.trunk)(points) @ self.branch(values)


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.Kronecker(kfac.Expand())])
def test_points_that_all_examples_share(block):
    """Inside of the `vmap`, where the layer has no axis of examples."""
    model = Operator(linear(block), kfac.Linear(1, K, key=KEYS[5], block=block))
    points, targets = normal(5, 1, seed=7), normal(N, 5, seed=8)

    def shared(m, x, y, points):
        return kfac.SquaredError(jax.vmap(lambda v: m(v, points))(x), y)

    def of_each(m, x, y, points):
        return kfac.SquaredError(jax.vmap(m)(x, points), y)

    expected = curvature(of_each, model, X, targets, jnp.tile(points, (N, 1, 1)))
    found = curvature(shared, model, X, targets, points)
    assert same(found.trunk.output_factor, expected.trunk.output_factor)
    assert same(found.branch, expected.branch)


@pytest.mark.parametrize("steps", [N, N - 1])
def test_a_loop_of_as_many_steps_as_examples(steps):
    """Inside of the `vmap`, a layer of the step's number."""

    class Timed(eqx.Module):
        layer: kfac.Linear
        table: kfac.Embedding

        def __call__(self, xs, zero):
            def body(h, tx):
                t, x = tx
                return jnp.tanh(self.layer(x) + self.table(t + zero) * h), None

            return jax.lax.scan(body, jnp.ones(K), (jnp.arange(steps), xs))[0]

    model = Timed(linear(), kfac.Embedding(N, K, key=KEYS[5]))
    xs = normal(N, steps, D, seed=3)

    def constant(m, xs, y):
        return kfac.SquaredError(jax.vmap(lambda v: m(v, 0))(xs), y)

    def with_zeros(m, xs, y):
        return kfac.SquaredError(jax.vmap(m)(xs, jnp.argmin(xs[:, 0] ** 2 < 0, 1)), y)

    found, expected = (curvature(f, model, xs, Y) for f in (constant, with_zeros))
    assert same(found.table.output_factor, expected.table.output_factor)
