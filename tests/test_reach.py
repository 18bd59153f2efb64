"""Which axes of a layer become the examples of the losses: operation by operation, and in
programs where other axes are as long as the batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_kfac as kfac
from eqx_kfac._program._backwards import _Backwards
from eqx_kfac._program._reach import (
    Call,
    either,
    JOINED,
    LACKING,
    parts_of,
    Reach,
    RULES,
    SUMMED,
)

from .helpers import leaves, normal


N, D, K = 4, 3, 2
KEYS = jax.random.split(jax.random.key(0), 8)
X = normal(N, D, seed=0)
EXACT = kfac.Exact()


#
# Operation by operation
#


Y = normal(5, 4, seed=1)
MATRIX = normal(5, 4, seed=2)
ROWS = np.array([3, 0, 0, 2, 1])


def scanned(y):
    """The first axis is sliced, and results are stacked."""
    return lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(4), y)[1]


def carried(y):
    """The first axis is sliced, and added up; another one is carried."""
    return lax.scan(lambda c, row: (c * row[None], None), jnp.ones((3, 4)), y)[0]


def delayed(y):
    """What is stacked was carried from the round before."""
    return lax.scan(lambda before, row: (row, before * 2), jnp.zeros(4), y)[1]


def emitted(y):
    """What is stacked is what the round before has carried, `y` in the first one."""
    return lax.scan(lambda before, s: (MATRIX * s, before), y, jnp.arange(1.0, 6))[1]


def written(y):
    """Every round of a loop writes an entry of the result."""
    out = jnp.zeros((5, 4))
    return lax.fori_loop(0, 5, lambda i, out: out.at[i].set(2 * y[i]), out)


def repeated(y):
    """All rounds of a loop use the same."""
    return lax.scan(lambda _, s: (None, s * y), None, jnp.arange(1.0, 6))[1]


def on_condition(y):
    return lax.cond(y[0, 0] > 0, lambda y: 2 * y, lambda y: -y, y)


@jax.custom_jvp
def with_own_derivative(y):
    return jnp.sin(y)


with_own_derivative.defjvp(lambda p, t: (jnp.sin(p[0]), t[0]))
convolve = lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME")
written_at = lax.dynamic_update_slice
pooled = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID")
windows = lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME")
# How the first axis of the result depends on `y`: the axis of `y` that becomes it; `()`,
# if it is certain that none does, and `None`, if nothing is known.
OPERATIONS = {
    "square": (lambda y: y**2, 0),
    "transpose": (lambda y: y.T, 1),
    "new axis": (lambda y: y[:, None] * jnp.ones((5, 3, 4)), 0),
    "new axis in front": (lambda y: jnp.ones((5, 1, 1)) * y[None], ()),
    "another one, as long": (lambda y: MATRIX[:, :1] * y[:1], ()),
    "squeeze": (lambda y: lax.squeeze(y[:, :1], (1,)), 0),
    "reshape behind": (lambda y: y.reshape(5, 2, 2), 0),
    "reshape across": (lambda y: y.reshape(4, 5), None),
    "reshape of the transpose": (lambda y: lax.reshape(y, (4, 5), (1, 0)), 1),
    "reshape column by column": (lambda y: jnp.reshape(y, (4, 5), order="F"), None),
    "joined": (lambda y: y.reshape(20), None),
    "sum over the other": (lambda y: jnp.sum(y, 1), 0),
    "sum over it": (lambda y: jnp.sum(y, 0), 1),
    "sum over both": (lambda y: jnp.sum(y) * jnp.ones(5), ()),
    "mean subtracted": (lambda y: y - jnp.mean(y, 0)[None], 0),
    "largest": (lambda y: jnp.max(y, 1), 0),
    "product with a matrix": (lambda y: y @ MATRIX.T, 0),
    "matrix times it": (lambda y: MATRIX[:3].T @ y[:3], None),
    "products with another": (lambda y: MATRIX[:3] @ y.T, None),
    "nodes of a graph": (lambda y: (MATRIX @ MATRIX.T) @ y, None),
    "product of each": (lambda y: jax.vmap(jnp.dot)(y, MATRIX), 0),
    "kernel": (lambda y: y @ y.T, 0),
    "looked up": (lambda y: y[ROWS], None),
    "looked up behind": (lambda y: y[:, ROWS[:2]], 0),
    "looked up in each": (lambda y: jax.vmap(lambda r, i: r[i])(y, ROWS), 0),
    "added to entries": (lambda y: jnp.zeros((5, 6)).at[:, ROWS[:4]].add(y), 0),
    "added to rows": (lambda y: jnp.zeros((5, 4)).at[ROWS].add(y), None),
    "written in each": (
        lambda y: jax.vmap(lambda r, i: jnp.zeros(4).at[i].set(r[0]))(y, ROWS),
        0,
    ),
    "convolution": (lambda y: convolve(y[:, None], MATRIX[:3, None, :3]), 0),
    "a kernel": (lambda y: convolve(MATRIX[:, None], y[:, None, :3]), None),
    "written behind": (lambda y: written_at(jnp.zeros((5, 6)), y, (0, 1)), 0),
    "written among others": (lambda y: written_at(jnp.zeros((6, 4)), y, (1, 0)), None),
    "written over": (lambda y: written_at(y, MATRIX[:, :2], (0, 1)), 0),
    "pooling": (pooled, 0),
    "windows along it": (windows, None),
    "concatenated behind": (lambda y: jnp.concatenate([y, MATRIX], 1), 0),
    "concatenated": (lambda y: jnp.concatenate([y, MATRIX]), None),
    "slice behind": (lambda y: y[:, 1:3], 0),
    "slice": (lambda y: y[1:], None),
    "reversed behind": (lambda y: y[:, ::-1], 0),
    "reversed": (lambda y: y[::-1], None),
    "sorted along it": (lambda y: jnp.sort(y, 0), None),
    "largest of each column": (lambda y: lax.top_k(y.T, 5)[0].T, None),
    "padded behind": (lambda y: jnp.pad(y, ((0, 0), (1, 2))), 0),
    "shifted": (lambda y: lax.pad(y, 0.0, [(1, -1, 0), (0, 0, 0)]), None),
    "cumulative sum": (lambda y: jnp.cumsum(y, 0), 0),
    "sorted": (lambda y: jnp.sort(y, 1), 0),
    "decomposed": (lambda y: jnp.linalg.qr(y[:, :2])[1] @ jnp.ones(2), None),
    "jit": (jax.jit(jnp.sin), 0),
    "checkpoint": (jax.checkpoint(jnp.sin), 0),
    "custom derivative": (with_own_derivative, 0),
    "condition": (on_condition, 0),
    "scan": (scanned, 0),
    "scan that delays": (delayed, None),
    "start of a scan": (emitted, None),
    "stopped": (lambda y: lax.stop_gradient(2 * y) + MATRIX, "stopped"),
    "integers": (lambda y: jax.nn.one_hot(jnp.argmax(y, 1), 3), "stopped"),
    "rounds that look up": (lambda y: lax.map(lambda i: 2 * y[i], np.arange(5)), None),
    "scan that adds up": (carried, ()),
    "scan that repeats": (repeated, ()),
    "loop that writes": (written, None),
    "vmap": (jax.vmap(lambda row: jnp.tanh(row) @ MATRIX.T), 0),
    "callback": (
        lambda y: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((5, 4), y.dtype), y),
        None,
    ),
}


def reach_of(fn):
    """What becomes the first axis of `fn(y)`."""
    jaxpr = jax.make_jaxpr(fn)(Y).jaxpr
    (out,) = jaxpr.outvars
    start = Reach((1, *[0] * (out.aval.ndim - 1)), terms=1)
    (reach,) = _Backwards().through(jaxpr, [start])
    return reach


def first_axis(fn):
    """Which axis of `y` becomes the first one of `fn(y)`. (`None` also if that is only
    unknown of one of both axes.)"""
    reach = reach_of(fn)
    if reach is None:
        return "stopped"
    found = [i for i, terms in enumerate(reach.axes) if terms & 1]
    if found:
        return found[0]
    summed = any(terms >> SUMMED & 1 for terms in reach.axes)
    return None if (reach.unknown | reach.joined) & 1 or summed else ()


grid = lambda y: y[:, None] * jnp.ones((5, 3, 4))
# Which axes of `y` become a part of the first axis of the result; `None`, if nothing is
# known.
JOINING = {
    "both": (lambda y: y.reshape(20), [0, 1]),
    "with another": (lambda y: grid(y).reshape(15, 4), [0]),
    "with two, one after the other": (
        lambda y: (grid(y).reshape(15, 4)[:, None] * jnp.ones((1, 2, 1))).reshape(30, 4),
        [0],
    ),
    "with one of length one": (lambda y: y[:, None].reshape(5, 4), []),
    "column by column": (lambda y: jnp.reshape(grid(y)[..., 0], 15, order="F"), [0]),
    "rows, repeated": (lambda y: jnp.repeat(y, 3, axis=0), [0]),
    "tiles": (lambda y: jnp.tile(y, (3, 1)), [0]),
    "tiles of one row": (lambda y: jnp.tile(y[:1], (3, 1)), []),
    "tiles behind": (lambda y: jnp.tile(y, (1, 3)), []),
    "a number": (lambda y: jnp.sum(y) * jnp.ones(6), []),
    "without one row": (lambda y: grid(y).reshape(15, 4)[1:], None),
    "and split again": (lambda y: grid(y).reshape(15, 4).reshape(3, 5, 4), None),
    "and looked up": (lambda y: grid(y).reshape(15, 4)[ROWS], [0]),
    "looked up": (lambda y: y[ROWS], [0]),
    "looked up by pairs": (lambda y: y[ROWS, ROWS % 4], [0, 1]),
    "looked up in each": (lambda y: jax.vmap(lambda r, i: r[i])(y, ROWS), []),
    "reversed": (lambda y: y[::-1], [0]),
    "sorted": (lambda y: jnp.sort(y, 0), [0]),
    "and added up": (lambda y: jnp.cumsum(grid(y).reshape(15, 4), 0), [0]),
    "after they were looked up": (lambda y: grid(y[ROWS]).reshape(15, 4), [0]),
    "after they were rotated": (
        lambda y: grid(jnp.concatenate([y[1:], y[:1]])).reshape(15, 4),
        None,
    ),
    "rounds of a loop": (lambda y: grid(scanned(y)).reshape(15, 4), [0]),
    "rounds that look up": (
        lambda y: grid(lax.map(lambda i: 2 * y[i], np.arange(5))).reshape(15, 4),
        None,
    ),
    "rounds that delay": (lambda y: grid(delayed(y)).reshape(15, 4), None),
    "both, one of them looked up": (lambda y: y[:, ROWS[:2]].reshape(10), [0, 1]),
    "both, after they were split": (lambda y: y.reshape(5, 2, 2).reshape(20), None),
    "both, one of them split": (lambda y: y.reshape(5, 4, 1).reshape(20), [0, 1]),
    "split across": (lambda y: y.reshape(5, 2, 2).reshape(10, 2).reshape(20), None),
    "a row alone": (lambda y: y[:1].reshape(1, 2, 2), None),
}


@pytest.mark.parametrize("name", JOINING)
def test_joined_axes(name):
    fn, want = JOINING[name]
    reach = reach_of(fn)
    parts = [i for i, terms in enumerate(reach.axes) if parts_of(terms) & 1]
    assert bool(reach.unknown & 1) == (want is None)
    if want is not None:
        assert parts == want and bool(reach.joined & 1) == bool(want)


def test_joined_axes_of_sums():
    """Each entry may still be used for a single one of the terms."""
    nodes = lambda y: grid((MATRIX @ MATRIX.T) @ y).reshape(15, 4)
    assert reach_of(nodes).axes[0] >> SUMMED & 1
    part = 1 << JOINED
    in_a_loop = Reach((0,), loops=(part,), terms=1)
    assert in_a_loop.joined == 1 and in_a_loop.served == 0
    assert Reach((0,), terms=1).served == 1


def test_joined_axes_in_one_way_of_two():
    """An axis may become all of it in both ways: nobody knows that it does not."""
    one, other = Reach((1,), terms=1), Reach((1 << JOINED,), terms=1)
    for both in (either(one, other), either(other, one)):
        assert both.axes == (1 | 1 << JOINED,) and both.mixed == 1
    neither = either(one, Reach((0,), terms=1))
    assert neither.axes == (1 | 1 << LACKING,)


def test_what_is_lost_along_one_axis_may_be_known_of_another():
    call = Call("reshape", dict(dimensions=None), [(5, 4)], (5, 2, 2))
    (reach,) = RULES["reshape"](call, Reach((1, 1, 0), terms=1))
    assert reach.axes == (1, 0) and reach.unknown == 0


def test_what_was_a_part_twice_and_is_once_is_unknown():
    """Who counts rows by one of two axes that became parts would count too few."""
    part = 1 << JOINED
    both = Reach((part, part), terms=1)
    assert both.keeping((part, part)).unknown == 0
    assert both.keeping((part, 0)).unknown == 1
    assert both.keeping((part, 0), parts=1).unknown == 1


@pytest.mark.parametrize("doubt", [dict(unknown=1), dict(loops=(1 << JOINED,))])
def test_what_is_not_sure_lacks_nothing(doubt):
    """In one of two ways, the axis may be that of the terms, or a part of it."""
    loops = dict(loops=(0,)) if "loops" in doubt else {}
    one, other = Reach((1,), terms=1, **loops), Reach((0,), terms=1, **doubt)
    assert either(one, other).axes == (1,) == either(other, one).axes
    sure = Reach((0,), terms=1, **loops)
    assert either(one, sure).axes == (1 | 1 << LACKING,)


def test_entries_looked_up_in_each_row():
    """Which entry of a row it is does not say which row."""
    reach = reach_of(lambda y: jax.vmap(lambda row, i: row[i])(y, ROWS))
    assert reach.axes == (1, 0) and reach.unknown == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    fn, axis = OPERATIONS[name]
    assert first_axis(fn) == axis


@pytest.mark.parametrize(
    "name", [n for n, (_, axis) in OPERATIONS.items() if axis in (0, 1)]
)
def test_what_is_claimed_is_so(name):
    """The entries of the result depend on those of `y` at the same place."""
    fn, axis = OPERATIONS[name]
    jacobian = jnp.abs(jax.jacfwd(fn)(Y))
    jacobian = jnp.sum(jacobian, tuple(range(1, jacobian.ndim - 2)))
    entries = jnp.sum(jacobian, 2 - axis)  # [result, y]
    assert jnp.all(jnp.diagonal(entries) > 0)


@pytest.mark.parametrize("name", [n for n, (_, axis) in OPERATIONS.items() if axis == ()])
def test_what_is_denied_is_so(name):
    """Entries of the result depend on all entries along both axes, or none of them on
    the axis at all."""
    fn, _ = OPERATIONS[name]
    jacobian = jnp.abs(jax.jacfwd(fn)(Y))
    jacobian = jnp.sum(jacobian, tuple(range(1, jacobian.ndim - 2)))
    for axis in range(2):
        entries = jnp.sum(jacobian, 2 - axis) > 0
        assert jnp.all(entries == entries[:1])  # The same for all of the result.


#
# Programs
#


class Operator(eqx.Module):
    """A function of a branch, whose input is another one for each example, and a trunk,
    whose inputs are points."""

    branch: kfac.Linear
    trunk: kfac.Linear

    def inside(self, x, points):
        one = lambda v: jax.vmap(self.trunk)(points) @ self.branch(v)
        return jax.vmap(one)(x)

    def outside(self, x, points):
        return jax.vmap(self.branch)(x) @ jax.vmap(self.trunk)(points).T

    def summed(self, x, points):
        one = lambda v: jnp.sum(
            jnp.tanh(jax.vmap(self.trunk)(points) * self.branch(v)[None]), 0
        )
        return jax.vmap(one)(x)


def operator(block):
    layer = lambda width, key: kfac.Linear(width, K, key=key, block=block)
    return Operator(layer(D, KEYS[0]), layer(1, KEYS[1]))


def squared(outputs):
    return kfac.SquaredError(outputs, jnp.zeros_like(outputs))


def collect(fn, model, *args, fisher=EXACT, **kwargs):
    loss_fn = lambda m, *args: squared(fn(m, *args))
    return eqx.filter_jit(kfac.curvature(loss_fn, fisher=fisher))(model, *args, **kwargs)


def dense(fn, model, where, *args):
    """The Gauss-Newton matrix of the layer `where(model)`, bias last."""
    layer = where(model)
    matrix = jnp.concatenate([layer.weight, layer.bias[:, None]], 1)

    def outputs(matrix):
        new = eqx.tree_at(
            lambda m: (where(m).weight, where(m).bias),
            model,
            (matrix[:, :-1], matrix[:, -1]),
        )
        return fn(new, *args)

    jacobian = jax.jacrev(outputs)(matrix)
    jacobian = jacobian.reshape(-1, matrix.size)
    return jacobian.T @ jacobian / len(X)


@pytest.mark.parametrize("points", [N, N + 1])
@pytest.mark.parametrize("how", [Operator.inside, Operator.summed])
def test_points_inside(how, points):
    """Right, also if there are as many points as examples."""
    model, grid = operator(kfac.Full()), normal(points, 1, seed=7)
    found = collect(how, model, X, grid)
    for where in (lambda m: m.branch, lambda m: m.trunk):
        expected = dense(how, model, where, X, grid)
        assert jnp.allclose(where(found).matrix, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("points", [N, N + 1])
def test_points_outside(points):
    """Each point serves all examples: their gradients cannot be told apart, and are
    independent of each other only if every example has a cotangent of its own."""
    grid = normal(points, 1, seed=7)
    for block in (kfac.Full(), kfac.Diagonal(), kfac.Kronecker(kfac.Reduce())):
        with pytest.raises(ValueError, match="which axis of the layer `.trunk` counts"):
            collect(Operator.outside, operator(block), X, grid)
    model = operator(kfac.Kronecker())
    for fisher in (EXACT, kfac.Empirical(), kfac.ExactGGN()):
        with pytest.raises(ValueError, match="layers `.trunk` return serves several"):
            collect(Operator.outside, model, X, grid, fisher=fisher)
    each = kfac.Exact(example_axes=0)
    found = collect(Operator.outside, model, X, grid, fisher=each)
    expected = collect(Operator.inside, model, X, grid)
    assert np.allclose(found.trunk.output_factor, expected.trunk.output_factor)
    drawn = kfac.MonteCarlo(3000, batch_size=500)
    found = collect(Operator.outside, model, X, grid, fisher=drawn, key=KEYS[2])
    assert np.allclose(found.trunk.output_factor, expected.trunk.output_factor, rtol=0.15)


def test_steps_with_points_outside():
    """What the message and the default recommend trains."""
    model, grid = operator(kfac.Kronecker()), normal(N, 1, seed=7)
    targets = normal(N, N, seed=8)
    loss_fn = lambda m, x, y, g: kfac.SquaredError(m.outside(x, g), y)
    optimizer = kfac.KFAC()
    step = eqx.filter_jit(optimizer.step)
    state, values = optimizer.init(model), []
    for key in jax.random.split(KEYS[3], 20):
        model, state, info = step(loss_fn, model, state, X, targets, grid, key=key)
        values.append(float(info.loss))
    assert values[-1] < 0.9 * values[0]


def rounds_outside(m, x, noise):
    """A second `vmap`, around that over the examples, of which the layer sees nothing."""
    one = lambda z: jax.vmap(lambda v: jnp.tanh(m(v) * z))(x)
    return jnp.mean(jax.vmap(one)(noise), 0)


def recurrent(m, xs):
    def one(sequence):
        body = lambda h, v: (jnp.tanh(m(v) + h), None)
        return lax.scan(body, jnp.zeros(K), sequence)[0]

    return jax.vmap(one)(xs)


def numbered_in_the_loss(m, x):
    """A layer of the example's number, which is no argument."""
    number = jnp.arange(len(x), dtype=x.dtype)[:, None]
    return jax.vmap(m)(jnp.concatenate([x, number], 1)[:, 1:])


@pytest.mark.parametrize("length", [N, N + 1])
def test_axes_as_long_as_the_batch(length):
    model = kfac.Linear(D, K, key=KEYS[0], block=kfac.Full())
    cases = (
        (rounds_outside, X, normal(length, K, seed=5)),
        (recurrent, normal(N, length, D, seed=6)),
        (numbered_in_the_loss, X),
    )
    for fn, *args in cases:
        found = collect(fn, model, *args)
        expected = dense(fn, model, lambda m: m, *args)
        assert jnp.allclose(found.matrix, expected, rtol=1e-10, atol=1e-13)


def test_numbers_made_in_the_loss():
    """A table of the examples' numbers, which are no argument: its axis is theirs."""

    class Coded(eqx.Module):
        codes: kfac.Embedding
        layer: kfac.Linear

        def __call__(self, i, v):
            return self.layer(v) * self.codes(i)

    block = kfac.Kronecker()
    codes = kfac.Embedding(N, K, key=KEYS[1], block=block)
    model = Coded(codes, kfac.Linear(D, K, key=KEYS[0], block=block))
    made = collect(lambda m, x: jax.vmap(m)(jnp.arange(N), x), model, X)
    given = collect(lambda m, x, i: jax.vmap(m)(i, x), model, X, jnp.arange(N))
    for a, b in zip(leaves(made), leaves(given), strict=True):
        assert np.allclose(a, b)


@pytest.mark.parametrize("length", [N - 1, N, N + 1])
def test_layers_outside_of_the_batch(length):
    model = kfac.Linear(D, K, key=KEYS[0], block=kfac.Full())

    def time_first(m, xs):
        return jnp.moveaxis(jax.vmap(jax.vmap(m))(xs), 0, 1)

    with pytest.raises(ValueError, match="which axis of .* counts the examples"):
        collect(time_first, model, normal(length, N, D, seed=5))

    def rounds_first(m, x, noise):
        """Rounds of noise, of which a mean is taken: they are not the examples."""
        one = lambda z: jax.vmap(m)(x * z[None])
        return jnp.mean(jax.vmap(one)(noise), 0)

    with pytest.raises(ValueError, match="which axis of .* counts the examples"):
        collect(rounds_first, model, X, normal(length, D, seed=5))

    class Two(eqx.Module):
        rows: kfac.Linear
        other: kfac.Linear

    two = Two(model, kfac.Linear(K, K, key=KEYS[1], block=kfac.Full()))

    def in_a_loop(m, x, e):
        """A loop with as many rounds as examples, around all of them."""
        body = lambda c, e: (c * m.other(e)[None], None)
        return lax.scan(body, jax.vmap(m.rows)(x), e)[0]

    with pytest.raises(ValueError, match="layer `.other`"):
        collect(in_a_loop, two, X, normal(length, K, seed=6))

    def constant(m, x, e):
        """A constant, in a `vmap` that is not that over the examples."""
        shared = jax.vmap(lambda v: jnp.tanh(m.other(jnp.ones(K))) * v)(e)
        return jax.vmap(m.rows)(x) * jnp.sum(shared, 0)[None]

    with pytest.raises(ValueError, match="`.other` is called outside of the `vmap`"):
        collect(constant, two, X, normal(length, K, seed=6))


def lost(m, x, noise, order):
    """Another `vmap`, of which the layer sees nothing, and an operation through which the
    examples cannot be followed."""
    one = lambda z: jnp.tanh(jax.vmap(m)(x)[order] * z[None])
    return jnp.mean(jax.vmap(one)(noise), 0)


def beside_derivatives(m, x, y, order):
    """A derivative of something else, along as many directions as there are examples."""

    def one(v, y):
        return jnp.sum(jax.jacfwd(lambda y: m(v) * jnp.sum(jnp.tanh(y)))(y), 1)

    return jax.vmap(one)(x, y)[order]


def dispatched(m, x, places):
    """Rows that are chosen by a product with a matrix of ones and zeros."""
    return places.T @ jax.vmap(m)(places @ x)


@pytest.mark.parametrize("length", [N, N + 1])
def test_examples_that_cannot_be_followed(length):
    """The outermost axis, if it is as long as the batch, counts the examples."""
    model = kfac.Linear(D, K, key=KEYS[0], block=kfac.Full())
    order = jnp.array([2, 0, 3, 1])
    cases = (
        (lost, X, normal(length, K, seed=5), order),
        (beside_derivatives, X, normal(N, length, seed=6), order),
        (dispatched, X, jnp.eye(N)[order]),
    )
    for fn, *args in cases:
        found = collect(fn, model, *args)
        expected = dense(fn, model, lambda m: m, *args)
        assert jnp.allclose(found.matrix, expected, rtol=1e-10, atol=1e-13)
    # Of more rows than examples, some of which are none.
    places = jnp.eye(N + 2)[:, :N]
    model = kfac.Linear(D, K, key=KEYS[0])
    both = [collect(dispatched, model, X, places, fisher=kfac.Exact(n)) for n in (0, 1)]
    assert np.allclose(both[0].output_factor, both[1].output_factor)


def test_keys_behind_a_stopped_gradient():
    """Only the queries are trained, and each of them is of one example."""
    keys = normal(N, D, seed=5)
    weights = jnp.array([1.0, 2, 0, 1])

    def loss_fn(m, x, keys, frozen):
        keys = lax.stop_gradient(jax.vmap(m if frozen is None else frozen)(keys))
        scores = jax.vmap(m)(x) @ keys.T
        return kfac.SoftmaxCrossEntropy(scores, jnp.arange(N), weights=weights)

    for block in (kfac.Kronecker(), kfac.Full(), kfac.TNT()):
        model = kfac.Linear(D, K, key=KEYS[0], block=block)
        take = eqx.filter_jit(kfac.curvature(loss_fn, fisher=EXACT))
        same, apart = take(model, X, keys, None), take(model, X, keys, kfac.revert(model))
        if isinstance(block, kfac.Kronecker):  # The keys are inputs, too.
            same, apart = same.output_factor, apart.output_factor
        for a, b in zip(leaves(same), leaves(apart), strict=True):
            assert np.allclose(a, b)


def test_members_of_a_stack():
    """Only if the members are the first axis of the terms, the second one counts the
    examples."""
    make = lambda key: kfac.Linear(D, K, key=key)
    stack = eqx.filter_vmap(make)(KEYS[:2])
    each = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))

    def summed_outside(m, x, grid):
        """The two members of a trunk, at points that all examples share."""
        return (x @ jnp.sum(each(m, grid), 0).T)[..., None]  # A term for each point.

    x, grid = normal(N, K, seed=3), normal(3, D, seed=4)
    with pytest.raises(ValueError, match="return serves several"):
        collect(summed_outside, stack, x, grid)
    collect(lambda m, x: each(m, x), stack, X)  # Members first.


class Separable(eqx.Module):
    """A function of two variables, as a sum of products of functions of each."""

    first: kfac.Linear
    second: kfac.Linear

    def __call__(self, x, t):
        return self.first(x) * self.second(t)

    def on_grid(self, x, t):
        first, second = jax.vmap(self.first)(x), jax.vmap(self.second)(t)
        return first[:, None] * second[None]


POINTS = normal(N, D, seed=5), normal(3, D, seed=6)
SOME = [7, 0, 4, 11, 3, 8, 2]
ON_GRIDS = {
    "joined": lambda m, x, t: m.on_grid(x, t).reshape(-1, K),
    "joined by pairs": lambda m, x, t: jax.vmap(lambda x: jax.vmap(lambda t: m(x, t))(t))(
        x
    ).reshape(-1, K),
    "contracted": lambda m, x, t: (
        jnp.einsum("ik,jk->ij", jax.vmap(m.first)(x), jax.vmap(m.second)(t)).ravel()
    )[:, None],
    "derivatives": lambda m, x, t: jax.jvp(
        lambda x: m.on_grid(x, t).reshape(-1, K), (x,), (jnp.ones_like(x),)
    )[1],
    "some of them": lambda m, x, t: m.on_grid(x, t).reshape(-1, K)[jnp.array(SOME)],
    "some of them, by pairs": lambda m, x, t: m.on_grid(x, t)[
        jnp.array(SOME) // 3, jnp.array(SOME) % 3
    ],
    "reversed": lambda m, x, t: m.on_grid(x[::-1], t)[:, ::-1].reshape(-1, K),
    "repeated": lambda m, x, t: (
        jnp.repeat(jax.vmap(m.first)(x), len(t), axis=0)
        * jnp.tile(jax.vmap(m.second)(t), (len(x), 1))
    ),
}


def rows_of_grid(x, t):
    """Both coordinates of every point."""
    return jnp.repeat(x, len(t), axis=0), jnp.tile(t, (len(x), 1))


@pytest.mark.parametrize("name", ON_GRIDS)
def test_points_of_a_grid_in_a_row(name):
    """Each row of either layer serves several points: one cotangent for all points adds
    their gradients up. With a cotangent for every point, it does not."""
    fn = ON_GRIDS[name]
    model = Separable(*[kfac.Linear(D, K, key=key) for key in KEYS[:2]])
    loss_fn = lambda m, *points: squared(fn(m, *points))
    with pytest.raises(ValueError, match=r"`\.first`, `\.second` return serves several"):
        kfac.curvature(loss_fn, fisher=EXACT)(model, *POINTS)
    kfac.curvature(loss_fn)(model, *POINTS, key=KEYS[2])  # Draws for every point.
    take = kfac.curvature(loss_fn, fisher=kfac.Exact(example_axes=0))
    found = take(model, *POINTS).first.output_factor
    together = lambda m, x, t: squared(jax.vmap(m)(x, t))
    if "joined" in name or name in {"repeated", "reversed"}:
        apart = kfac.curvature(together, fisher=EXACT)(model, *rows_of_grid(*POINTS))
        assert np.allclose(found, apart.first.output_factor)


def test_points_of_a_grid_that_are_rows():
    """Where the layers are called for every point of the grid, they may be joined; and so
    may the points of the members of a stack, each of which has rows of its own."""
    model = Separable(*[kfac.Linear(D, K, key=key) for key in KEYS[:2]])
    shape = lambda a: a.reshape(N, 3, D)
    at_points = lambda m, x, t: jax.vmap(jax.vmap(m))(shape(x), shape(t))
    order = jnp.array([1, 2, 0])
    rotation = jnp.eye(3)[order]
    joined = [
        lambda m, x, t: at_points(m, x, t).reshape(-1, K),
        # Whichever point a row serves, it is the only one.
        lambda m, x, t: at_points(m, x, t)[:, order].reshape(-1, K),
        lambda m, x, t: jnp.einsum("ji,nik->njk", rotation, at_points(m, x, t)).reshape(
            -1, K
        ),
    ]
    points = rows_of_grid(*POINTS)
    want = collect(lambda m, x, t: jax.vmap(m)(x, t), model, *points)
    for fn in joined:
        got = collect(fn, model, *points)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert np.allclose(a, b)
    stack = eqx.filter_vmap(lambda key: kfac.Linear(D, K, key=key))(KEYS[:2])
    each = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))
    collect(lambda m, x: each(m, x).reshape(-1, K), stack, X)


def test_one_example():
    model = kfac.Linear(D, K, key=KEYS[0], block=kfac.Full())
    fn = lambda m, x: lax.scan(lambda c, v: (c, jax.vmap(m)(v)), None, x)[1]
    jacobian = jax.jacrev(
        lambda w: fn(eqx.tree_at(lambda m: m.weight, model, w), X[None, :1])
    )
    expected = jacobian(model.weight).reshape(K, -1)
    found = collect(fn, model, X[None, :1])
    weights = found.matrix.reshape(K, D + 1, K, D + 1)[:, :D, :, :D].reshape(K * D, K * D)
    assert np.allclose(weights, expected.T @ expected)


def test_verify_of_points_outside():
    model, grid = operator(kfac.Kronecker()), normal(N + 1, 1, seed=7)
    loss_fn = lambda m, x, g: squared(m.outside(x, g))
    found = kfac.verify(loss_fn, model, X, grid)
    assert all(np.isfinite(check.error) for check in found.layers)


#
# Layers that are tagged at a zero
#


CELLS = {
    "LSTM": (eqx.nn.LSTMCell, lambda cell, v, h: cell(v, (h, h))[0]),
    "GRU": (eqx.nn.GRUCell, lambda cell, v, h: cell(v, h)),
}


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_other_uses_of_the_arrays_of_a_cell(name, use_bias):
    make, call = CELLS[name]
    cell = make(D, K, use_bias=use_bias, key=KEYS[0])
    model = kfac.convert(cell, kfac.Full())
    run = lambda m, x: jax.vmap(lambda v: call(m, v, jnp.ones(K)))(x)
    collect(run, model, X)

    def beside(m, x):
        return run(m, x) + x @ m.weight_ih[:K].T

    with pytest.raises(ValueError, match="reach the losses by another way"):
        collect(beside, model, X)
    if use_bias:
        with pytest.raises(ValueError, match="reach the losses by another way"):
            collect(lambda m, x: run(m, x) + m.bias[None, :K], model, X)


def test_other_uses_of_a_normalised_weight():
    inner = eqx.nn.Linear(D, K, key=KEYS[0])
    model = kfac.convert(eqx.nn.WeightNorm(inner), kfac.Full())
    run = lambda m, x: jax.vmap(m)(x)
    collect(run, model, X)
    with pytest.raises(ValueError, match="reach the losses by another way"):
        collect(lambda m, x: run(m, x) + x @ m.layer.weight.T, model, X)


def test_other_uses_of_a_spectrally_normalised_weight():
    inner = eqx.nn.Linear(D, K, key=KEYS[0])
    layer, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        inner, "weight", key=KEYS[1]
    )
    model = kfac.convert(layer, kfac.Full())
    copy = lambda: jax.tree.map(lambda a: a, state)
    run = lambda m, x: jax.vmap(lambda v: m(v, copy())[0])(x)
    collect(run, model, X)
    with pytest.raises(ValueError, match="reach the losses by another way"):
        collect(lambda m, x: run(m, x) + x @ m.layer.weight.T, model, X)
