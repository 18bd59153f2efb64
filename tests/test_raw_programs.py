"""Arrays in loops, conditions and functions, in layers of other classes, and in methods
that return modules: where tags are, and that what they collect is right."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

import eqx_kfac as kfac

from .helpers import assert_near, collect, filled, normal
from .raw import case, check, module, shown, squared


VECTORS = normal(3, 3)
SEQUENCES = normal(2, 3, 4)


def looped(m, x):
    step = lambda h, x: (jnp.tanh(m.wi @ x + m.wh @ h + m.b), h)
    return jax.lax.scan(step, m.h, x)[0] @ m.out


def blocks(m, x):
    step = lambda h, own: (h + jnp.tanh(own[0] @ h + own[1]) * own[2], None)
    return jax.lax.scan(step, x, (m.w, m.b, m.g))[0]


def twice_looped(m, x):
    def outer(h, own):
        inner = lambda h, v: (jnp.tanh(own @ v + m.u @ h), None)
        return jax.lax.scan(inner, h, x)[0], None

    return jax.lax.scan(outer, jnp.zeros(3), m.w)[0]


def conditions(m, x):
    x = jax.lax.cond(True, lambda x: m.w @ x + m.b, lambda x: 2 * x, x)
    branches = [lambda x, w=w: jnp.tanh(w @ x) for w in (m.v, m.u)]
    return x + jax.lax.switch(jnp.array(1), branches, x)


@jax.custom_jvp
def activation(x):
    return jnp.tanh(x)


activation.defjvp(lambda x, t: (activation(*x), t[0] * (1 - jnp.tanh(x[0]) ** 2)))


@jax.custom_vjp
def product(w, x):
    return w @ x


product.defvjp(
    lambda w, x: (w @ x, (w, x)), lambda both, g: (jnp.outer(g, both[1]), both[0].T @ g)
)


def carried(m, x):
    step = lambda c, _: ((c[0] * 0.9, jnp.tanh(c[0] @ c[1])), None)
    return jax.lax.scan(step, (m.w, x), None, length=2)[0][1]


def linear(m, n):
    return lambda: eqx.nn.Linear(n, m, key=jax.random.key(0))


class Doubled(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x)


def masked_blocks(m, x, masks=1.0):
    def block(x, layer):
        w, b = layer
        return jnp.tanh(w @ x + b), None

    return jax.lax.scan(block, x, (jnp.tril(m.w) * masks, m.b))[0]


def masked_in_loop(m, x, masks):
    def block(x, layer):
        w, b, mask = layer
        return jnp.tanh(jnp.where(mask != 0, w, 0) @ x + b), None

    return jax.lax.scan(block, x, (m.w, m.b, masks))[0]


CASES = {
    "recurrent": case(
        looped,
        SEQUENCES,
        {
            "others": "Parameters 6",
            "out": "Dense 2x3",
            "wh": "Dense 3x3",
            "wi": "Dense 3x4",
        },
        "wi",
        "wh",
        wi=(3, 4),
        wh=(3, 3),
        b=(3,),
        h=(3,),
        out=(3, 2),
    ),
    "loop along a stack": case(
        blocks,
        VECTORS,
        {"others, stacked 1": "Parameters[2] 3", "w": "Dense[2] 3x3+1"},
        w=(2, 3, 3),
        b=(2, 3),
        g=(2, 3),
    ),
    "a loop along masked layers": case(
        masked_blocks,
        VECTORS,
        {"w": "Masked(Dense)[2] 3x3+1"},
        w=(2, 3, 3),
        b=(2, 3),
    ),
    "a mask for each of the layers": case(
        lambda m, x: masked_blocks(m, x, np.stack([np.tri(3), np.tri(3).T])),
        VECTORS,
        {"others": "Parameters 24"},
        w=(2, 3, 3),
        b=(2, 3),
    ),
    "masks in a loop": case(
        lambda m, x: masked_in_loop(m, x, np.stack([np.tri(3)] * 2)),
        VECTORS,
        {"w": "Masked(Dense)[2] 3x3+1"},
        w=(2, 3, 3),
        b=(2, 3),
    ),
    "a mask for each round": case(
        lambda m, x: masked_in_loop(m, x, np.stack([np.tri(3), np.tri(3).T])),
        VECTORS,
        {"others, stacked 1": "Parameters[2] 12"},
        w=(2, 3, 3),
        b=(2, 3),
    ),
    "loops in loops": case(
        twice_looped,
        normal(3, 2, 3),
        {"u": "Dense 3x3", "w": "Dense[2] 3x3"},
        "w",
        "u",
        w=(2, 3, 3),
        u=(3, 3),
    ),
    "stack in a vmap": case(
        lambda m, x: jnp.sum(
            jnp.tanh(jax.vmap(lambda w, b: w @ x + b)(m.w, m.b)), axis=0
        ),
        VECTORS,
        {"w": "Dense 8x3+1"},
        w=(2, 4, 3),
        b=(2, 4),
    ),
    "positions in a vmap": case(
        lambda m, x: jnp.mean(jax.vmap(lambda x: jnp.tanh(m.w @ x + m.b))(x), axis=0),
        SEQUENCES,
        {"w": "Dense 2x4+1"},
        "w",
        w=(2, 4),
        b=(2,),
    ),
    "counted loop": case(
        lambda m, x: jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(m.w[i] @ x + m.b), x),
        VECTORS,
        {"others": "Parameters 3", "w": "Lookup 9x2"},
        "w",
        w=(2, 3, 3),
        b=(3,),
    ),
    "conditions": case(
        conditions,
        VECTORS,
        {"u": "Dense 3x3", "v": "Dense 3x3", "w": "Dense 3x3+1"},
        w=(3, 3),
        b=(3,),
        v=(3, 3),
        u=(3, 3),
    ),
    "recomputed": case(
        lambda m, x: (
            jax.checkpoint(lambda w, x: jnp.tanh(w @ x + m.b))(
                m.w, jax.jit(lambda x: m.v @ x)(x)
            )
            @ m.v
        ),
        VECTORS,
        {"v": "Dense 3x3, tied", "w": "Dense 3x3+1"},
        "v",
        w=(3, 3),
        b=(3,),
        v=(3, 3),
    ),
    "own derivative": case(
        lambda m, x: activation(m.w @ x + m.b) @ jax.nn.gelu(m.v),
        VECTORS,
        {"others": "Parameters 6", "w": "Dense 3x3+1"},
        w=(3, 3),
        b=(3,),
        v=(3, 2),
    ),
    "own derivative of a weight": case(
        lambda m, x: product(m.w, x) + m.v @ x,
        VECTORS,
        {"others": "Parameters 9", "v": "Dense 3x3"},
        w=(3, 3),
        v=(3, 3),
    ),
    "changed by a loop": case(carried, VECTORS, {"others": "Parameters 9"}, w=(3, 3)),
    "with a name": case(
        lambda m, x: checkpoint_name(m.w, "w") @ x + checkpoint_name(m.b, "b"),
        VECTORS,
        {"w": "Dense 2x3+1"},
        w=(2, 3),
        b=(2,),
    ),
    "the same again in one sum": case(
        lambda m, x: (m.w + 2 * m.w) @ x, VECTORS, {"w": "Dense 2x3"}, w=(2, 3)
    ),
    "a weight and a bias": case(
        lambda m, x: m.w @ x + m.w[0], VECTORS, {"others": "Parameters 9"}, w=(3, 3)
    ),
    "stopped in part": case(
        lambda m, x: jax.lax.stop_gradient(m.w) @ jnp.tanh(m.w @ x),
        VECTORS,
        {"w": "Dense 3x3"},
        w=(3, 3),
    ),
    "changed in place": case(
        lambda m, x: m.w.at[0, 0].set(0) @ x + m.b.at[1].add(2),
        VECTORS,
        {"others": "Parameters 12"},
        w=(3, 3),
        b=(3,),
    ),
    "also data": case(
        lambda m, x: (m.w @ m.w) @ x, VECTORS, {"others": "Parameters 9"}, w=(3, 3)
    ),
    "rows that nothing uses": case(
        lambda m, x: m.w[:2] @ x, VECTORS, {"others": "Parameters 9"}, w=(3, 3)
    ),
    "carried, and used before": case(
        lambda m, x: carried(m, jnp.tanh(m.w @ x)),
        VECTORS,
        {"others": "Parameters 9"},
        w=(3, 3),
    ),
    "a part of a result": case(
        lambda m, x: jnp.tanh(m.w @ x)[:2] + (m.v @ x)[1:],
        VECTORS,
        {"v": "Dense 3x3", "w": "Dense 3x3"},
        w=(3, 3),
        v=(3, 3),
    ),
    "a reversed result": case(
        lambda m, x: (m.w @ x)[::-1],
        VECTORS,
        {"w": "Dense 3x3"},
        w=(3, 3),
    ),
    "a reversed result and a bias": case(
        lambda m, x: (m.w @ x)[::-1] + m.b,
        VECTORS,
        {"others": "Parameters 3", "w": "Dense 3x3"},
        w=(3, 3),
        b=(3,),
    ),
    "reversed rows": case(
        lambda m, x: m.w[::-1][jnp.array([0, 2])][1] * x + m.v[::-1] @ x,
        VECTORS,
        {"others": "Parameters 18"},
        w=(3, 3),
        v=(3, 3),
    ),
    "scalars and vectors": case(
        lambda m, x: m.a * jnp.dot(m.w, x) + m.b,
        VECTORS,
        {"others": "Parameters 2", "w": "Dense 1x3"},
        a=(),
        w=(3,),
        b=(),
    ),
    "a layer that is not called": case(
        lambda m, x: m.l.weight @ jnp.tanh(x) + m.l.bias,
        VECTORS,
        {"l['weight": "Dense 2x3+1"},
        l=linear(2, 3),
    ),
    "a layer that is called, and more": case(
        lambda m, x: m.l.weight.T @ jnp.tanh(m.l(x)),
        VECTORS,
        {"l['others": "Parameters 2", "l['weight": "Dense 2x3, tied"},
        "l['weight",
        l=linear(2, 3),
    ),
    "a subclass": case(
        lambda m, x: m.l(x),
        VECTORS,
        {"l['weight": "Dense 2x3+1"},
        l=lambda: Doubled(3, 2, key=jax.random.key(0)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_program(name):
    call, x, want, shared, shapes = CASES[name]
    check(module(call, **shapes), x, want, shared)


def test_condition_on_data():
    """Is a use for every example by itself: which only some blocks can tell apart."""
    call = lambda m, x: jax.lax.cond(x[0] > 0, lambda x: m.w @ x, lambda x: 2 * x, x)
    model = module(call, w=(3, 3))
    assert shown(kfac.convert(model, example=VECTORS[0])) == {"['w']": "Dense 3x3"}
    found = collect(
        squared, kfac.Exact(), kfac.convert(model, example=VECTORS[0]), VECTORS
    )["w"]
    rows = np.asarray(VECTORS)[np.asarray(VECTORS)[:, 0] > 0]
    np.testing.assert_allclose(found.output_factor, len(rows) / 3 * np.eye(3), rtol=1e-12)
    np.testing.assert_allclose(found.input_factor, rows.T @ rows / len(rows), rtol=1e-12)
    full = kfac.convert(model, kfac.Full(), example=VECTORS[0])
    with pytest.raises(ValueError, match=r"which axis of the layer `\['w'\]`"):
        collect(squared, kfac.Exact(), full, VECTORS)


#
# Methods
#


class Inner(eqx.Module):
    w: Array
    b: Array

    def __init__(self):
        self.w, self.b = jnp.zeros((3, 3)), jnp.zeros(3)

    def __call__(self, x):
        return jnp.tanh(self.w @ x + self.b)


class Outer(eqx.Module):
    w: Array
    inner: Inner

    def __init__(self):
        self.w, self.inner = jnp.zeros((2, 3)), Inner()

    def __call__(self, x):
        return self.head(self.inner(x))

    def head(self, x):
        return self.w @ x

    def part(self):
        return self.inner

    def bound(self):
        return self.head

    def function(self):
        return lambda x: self.w @ x

    def result(self, x):
        return eqx.tree_at(lambda m: m.b, self.inner, self(x))


OUTER = kfac.convert(filled(Outer), example=VECTORS[0])
WAYS = {
    "call": lambda m, x: m(x),
    "methods": lambda m, x: m.head(m.inner(x)),
    "class": lambda m, x: Outer.__call__(m, x),
    "part": lambda m, x: m.head(m.part()(x)),
    "bound": lambda m, x: m.bound()(m.inner(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_methods(way):
    def loss_fn(model, x):
        return squared(lambda x: WAYS[way](model, x), x)

    wanted = collect(squared, kfac.Exact(), OUTER, VECTORS)
    assert_near(collect(loss_fn, kfac.Exact(), OUTER, VECTORS), wanted)


def test_functions_that_methods_return():
    """Are called when nobody looks."""

    def loss_fn(model, x):
        return squared(lambda x: model.function()(model.inner(x)), x)

    with pytest.raises(
        ValueError, match=r"`.tag\['w'\]` reach the losses in a way that no tag"
    ):
        collect(loss_fn, kfac.Exact(), OUTER, VECTORS)


@jax.tree_util.register_pytree_node_class
class Gaussian:
    """Has a standard deviation of its own if its mean is an array; so a tree of other
    leaves has fewer of them."""

    def __init__(self, mean, deviation=None):
        self.mean, self.deviation = mean, deviation

    def tree_flatten(self):
        both = self.mean, self.deviation
        return both if eqx.is_array(self.mean) else both[:1], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Policy(eqx.Module):
    mean: eqx.nn.Linear
    log_deviation: Array

    def __init__(self):
        self.mean = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        self.log_deviation = jnp.zeros(2)

    def __call__(self, x):
        return Gaussian(self.mean(x), jnp.exp(self.log_deviation))


def test_results_that_are_unlike_other_trees():
    """Distributions of some packages are such results."""
    plain = filled(Policy)
    with pytest.raises(ValueError, match="arity mismatch|numbers of pytree children"):
        eqx.filter(plain(VECTORS[0]), eqx.is_array)
    policy = kfac.convert(plain, example=VECTORS[0])
    assert [layer.block for layer in kfac.summary(policy).layers] == [
        "Kronecker(Joint)",
        "Diagonal",
    ]

    def loss_fn(model, x):
        found = jax.vmap(model)(x)
        return kfac.NormalNLL(found.mean, 2 * jnp.log(found.deviation), 0 * found.mean)

    report = kfac.verify(loss_fn, policy, VECTORS)
    assert all(layer.unseen < 1e-12 for layer in report.layers)
