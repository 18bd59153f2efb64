"""What a wrong argument, input, block or parameter is answered with: the argument or the
layer's path, and what to do. And that what looks alike but is right is not refused."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import jaxtyping
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import assert_near, raises, softmax
from .models import classifier, make_labels
from .plain import plain_kfac


@pytest.fixture(autouse=True)
def unchecked():
    """No type checking, as for a user: the tests' type checker would answer first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


key = jr.key(0)
exact = plain_kfac(0.1, fisher=kfac.Exact())
sampled = kfac.KFAC(0.1)
model, (x, y) = classifier(), make_labels()
grads = eqx.filter(model, eqx.is_inexact_array)


# Nothing is computed where tests are only collected.
init = eqx.filter_jit(exact.init)


@ft.cache
def state():
    return init(model)


@ft.cache
def loss():
    return eqx.filter_jit(softmax)(model, x, y)


@ft.cache
def factors():
    return eqx.filter_jit(kfac.curvature(softmax, kfac.Exact()))(model, x, y)


def frozen_bias(model):
    spec = jtu.tree_map(eqx.is_inexact_array, model)
    return eqx.partition(model, eqx.tree_at(lambda m: m.layers[0].bias, spec, False))


def check(cases):
    return pytest.mark.parametrize("run,error,phrases", list(cases.values()), ids=cases)


#
# Arguments of the optimizer's methods
#


step_order = "optimizer.step(loss_fn, model, state, x, y, key=key)"
update_order = "optimizer.update(grads, state, model, curvature=curvature)"


def known(argument):
    """What is only computed now."""
    later = any(
        argument is one for one in (state, loss, factors, cast_state, optax_state)
    )
    return argument() if later else argument


def cast_state():
    return eqx.filter_jit(kfac.cast)(state(), jnp.bfloat16)


def optax_state():
    return eqx.filter_eval_shape(optax.adam(1e-3).init, grads)


def step(*args, **kwargs):
    return lambda: exact.step(*map(known, args), **kwargs)


def update(*args, curvature=factors, value=None):
    return lambda: exact.update(
        *map(known, args), curvature=known(curvature), value=known(value)
    )


def other_part():
    trained, _ = frozen_bias(model)
    grads = eqx.filter(trained, eqx.is_inexact_array)
    begun = init(trained)
    return exact.update(grads, begun, trained, curvature=factors())


def partly_frozen():
    trained, frozen = frozen_bias(model)
    loss_fn = lambda trained: softmax(eqx.combine(trained, frozen), x, y)
    exact.step(loss_fn, trained, state())


def with_key(model, x, y, key):
    return softmax(model, x + jr.normal(key, x.shape), y)


arguments = {
    "a key of the loss function's own": (
        step(with_key, model, state, x, y, key=key),
        TypeError,
        ["parameter `key`", "another name", "noise, key=key)"],
    ),
    "state before model": (step(softmax, state, model, x, y), TypeError, [step_order]),
    "model before loss": (step(model, softmax, state, x, y), TypeError, [step_order]),
    "a loss": (step(loss, model, state), TypeError, ["SoftmaxCrossEntropy", step_order]),
    "no state": (step(softmax, model, x, y), TypeError, ["array", step_order]),
    "None as state": (step(softmax, model, None, x, y), TypeError, ["NoneType"]),
    "optax's state": (
        step(softmax, model, optax_state, x, y),
        TypeError,
        ["optimizer.init(model)", "tuple"],
    ),
    "the state of a preconditioner": (
        lambda: exact.step(
            softmax,
            model,
            eqx.filter_eval_shape(kfac.scale_by_kfac().init, grads),
            x,
            y,
        ),
        TypeError,
        ["optimizer.init(model)", "ScaleByKFACState"],
    ),
    "a state in bfloat16": (
        step(softmax, model, cast_state, x, y),
        ValueError,
        [
            ".curvature.layers[0].input_factor",
            "bfloat16",
            "must not be cast",
            "kfac.cast",
        ],
    ),
    "bias frozen later": (
        partly_frozen,
        ValueError,
        [".layers[0].input_factor", "(4, 4)", "(3, 3)", "optimizer.init", "same trained"],
    ),
    "curvature of more than is trained": (
        other_part,
        ValueError,
        [".layers[0].input_factor", "(4, 4)", "(3, 3)", "the same part", "trained"],
    ),
    "gradients as curvature": (
        update(grads, state, model, curvature=grads),
        ValueError,
        [".layers[0].input_factor", "missing", "value_grad_and_curvature"],
    ),
    "verify, swapped": (
        lambda: kfac.verify(model, softmax, x, y),
        TypeError,
        ["loss function first", "kfac.verify(loss_fn, model, x, y)"],
    ),
    "update, swapped": (update(grads, model, state), TypeError, [update_order]),
    "update, a loss": (update(loss, state, model), TypeError, ["Softmax", update_order]),
    "update, a loss as value": (
        update(grads, state, model, value=loss),
        TypeError,
        ["`value`", "SoftmaxCrossEntropy", "loss.value"],
    ),
    "init of a state": (lambda: exact.init(state()), TypeError, ["`init`", "KFACState"]),
    "init of a function": (lambda: exact.init(softmax), TypeError, ["softmax"]),
    "init of a class": (lambda: exact.init(eqx.nn.MLP), TypeError, ["MLP", "model"]),
    "key=0": (step(softmax, model, state, x, y, key=0), TypeError, ["jax.random.key(0)"]),
    "a key that is sampled from, 0": (
        lambda: kfac.curvature(softmax)(model, x, y, key=0),
        TypeError,
        ["`key`", "jax.random.key(0)"],
    ),
    "floating key": (
        lambda: sampled.step(softmax, model, state(), x, y, key=jnp.ones(2)),
        TypeError,
        ["`key`", "float", "jax.random.key(0)"],
    ),
    "several keys": (
        lambda: sampled.step(softmax, model, state(), x, y, key=jr.split(key, 8)),
        ValueError,
        ["`key`", "(8,)", "fold_in"],
    ),
}


@check(arguments)
def test_arguments(run, error, phrases):
    with raises(error, *phrases):
        run()


class Trained(eqx.Module):
    """A loss function that is a module and has a tagged network of its own."""

    teacher: eqx.Module

    def __call__(self, model, x, y):
        return softmax(model, x, jax.nn.softmax(jax.vmap(self.teacher)(x)))


def test_arguments_that_are_right():
    def traced(loss_fn, state, *args, **kwargs):
        return eqx.filter_eval_shape(
            lambda: exact.step(loss_fn, model, state, *args, **kwargs)
        )

    traced(Trained(model), state(), x, y)
    traced(eqx.Partial(softmax, x=x, y=y), state())
    traced(with_key, state(), x, y, jr.key(1), key=key)
    traced(lambda model, x, y, key=None: softmax(model, x, y), state(), x, y, key=key)
    for right in (key, jr.PRNGKey(0), np.asarray(jr.PRNGKey(0)), jr.key(0, impl="rbg")):
        traced(softmax, state(), x, y, key=right)
    traced(softmax, eqx.tree_at(lambda s: s.damping, state(), jnp.float32(0.1)), x, y)
    update = ft.partial(exact.update, curvature=factors(), value=1.0)
    eqx.filter_eval_shape(update, grads, state(), model)
    trained, frozen = frozen_bias(model)
    loss_fn = lambda trained: softmax(eqx.combine(trained, frozen), x, y)
    begun = eqx.filter_eval_shape(exact.init, trained)
    trained, _, _ = eqx.filter_eval_shape(exact.step, loss_fn, trained, begun)
    assert trained.layers[0].bias is None


#
# Numbers
#


def test_parameters_of_numpy():
    """A model that was read from a file: outside of `jit`, too."""
    read = jtu.tree_map(lambda a: np.asarray(a) if eqx.is_array(a) else a, model)
    begun = exact.init(read)
    assert eqx.tree_equal(begun, exact.init(model))
    got, _, info = exact.step(softmax, read, begun, x, y)
    want, *_ = eqx.filter_jit(exact.step)(softmax, model, begun, x, y)
    assert not info.rejected
    assert_near(got, want)


numbers = [np.float32(0.1), np.float64(0.1), np.float16(0.1), np.array(0.1)]


@pytest.mark.parametrize("number", numbers, ids=lambda n: f"{type(n).__name__} {n.dtype}")
def test_numbers_of_numpy(number):
    """The same as Python's, whatever their type: in the state, and in steps."""
    like = kfac.KFAC(float(number), 0.5, float(number), fisher=kfac.Exact()).init(model)
    optimizer = kfac.KFAC(number, np.array(0.5), number, fisher=kfac.Exact())
    assert eqx.tree_equal(optimizer.init(model), like)
    scheduled = kfac.KFAC(lambda _: number, 0.5, number).init(model)
    assert eqx.tree_equal(scheduled, like)
    penalised = lambda *args: softmax(*args) * number + kfac.L2(model, number)
    step = eqx.filter_jit(ft.partial(optimizer.step, penalised))
    _, state, info = step(model, optimizer.init(model), x, y)
    assert not info.rejected and state.damping == float(number)
    rule = kfac.LevenbergMarquardt(number, number, maximum=np.float32(1))
    assert rule == kfac.LevenbergMarquardt(float(number), float(number), maximum=1.0)
    faces = kfac.optax_kfac(number), kfac.scale_by_kfac(number)
    for face, other in zip(
        faces, (kfac.optax_kfac(float(number)), kfac.scale_by_kfac(0.1))
    ):
        assert eqx.tree_equal(face.init(grads), other.init(grads))


@pytest.mark.parametrize("count", [np.int64(2), np.uint8(2), np.array(2)])
def test_counts_of_numpy(count):
    optimizer = kfac.KFAC(0.1, inverse_period=count, ema=kfac.MovingAverage(0.9, count))
    assert type(optimizer.inverse_period) is type(optimizer.ema.burn_in) is int
    assert kfac.MonteCarlo(count) == kfac.MonteCarlo(2)
    assert kfac.Exact(count) == kfac.Exact(2)
    assert kfac.QuadraticModel(count) == kfac.QuadraticModel(2)
    step = eqx.filter_jit(ft.partial(exact.step, softmax, micro_batches=count))
    _, _, info = step(model, state(), x, y)
    assert not info.rejected
    with raises(ValueError, "`inverse_period` must be at least 1"):
        kfac.KFAC(0.1, inverse_period=np.int64(0))


no_numbers = [True, False, np.bool_(True), jnp.array(True), 1j, jnp.array(1j), np.ones(2)]


def test_a_rule_that_was_not_called():
    with raises(TypeError, "did you mean `LevenbergMarquardt()`?"):
        kfac.KFAC(0.1, 0.9, kfac.LevenbergMarquardt)


@pytest.mark.parametrize("value", [*no_numbers, None, "0.1", optax.adam, float])
def test_no_numbers(value):
    def init(**choices):
        kfac.KFAC(**(dict(learning_rate=0.1) | choices)).init(model)

    for name in ("learning_rate", "momentum", "damping", "ema"):
        function = value is optax.adam  # Which is one, but gives no number.
        with raises(TypeError, "schedule" if function else f"`{name}` must be a number"):
            init(**{name: value})
    for name in ("curvature_period", "inverse_period"):
        with raises(TypeError, f"`{name}` must be an integer"):
            init(**{name: value})
    with raises(TypeError, "`initial`" if value is not optax.adam else "schedule"):
        kfac.KFAC(0.1, 0.9, kfac.LevenbergMarquardt(value)).init(model)
    with raises(TypeError, "`decay` must be a number"):
        kfac.LevenbergMarquardt(1.0, value)
    with raises(TypeError, "`coefficient` must be a number"):
        kfac.L2(model, value)
    with raises(TypeError, "`micro_batches` must be an integer"):
        exact.step(softmax, model, state(), x, y, micro_batches=value)


@pytest.mark.parametrize("value", [True, None, jnp.ones(2), "a", 1j])
def test_schedules_without_numbers(value):
    def schedule(step):
        return value

    with raises(TypeError, "A schedule must return a number", "schedule"):
        kfac.KFAC(schedule).init(model)
    with raises(TypeError, "A schedule must return a number"):
        optimizer = kfac.scale_by_kfac(schedule)
        optimizer.update(grads, optimizer.init(grads), curvature=factors())


#
# A loss is no number
#


no_number = {
    "-loss": lambda loss: -loss,
    "1 - loss": lambda loss: 1 - loss,
    "float": float,
    "int": int,
    "abs": abs,
    "format": lambda loss: f"{loss:.3f}",
    ">": lambda loss: loss > 1,
    "<": lambda loss: loss < 1,
    ">=": lambda loss: loss >= 1,
    "in a comparison with an array": lambda loss: jnp.ones(()) < loss,
    "**": lambda loss: loss**2,
    "1 /": lambda loss: 1 / loss,
    "np.asarray": np.asarray,
    "np.mean": lambda loss: np.mean([loss]),
}


@pytest.mark.parametrize("run", no_number.values(), ids=no_number)
def test_no_number(run):
    for objective in (loss(), loss() + kfac.L2(model, 0.1)):
        with raises(TypeError, type(objective).__name__, "loss.value"):
            run(objective)


def test_functions_of_arrays_name_the_loss():
    for run in (
        lambda: jnp.mean(loss()),
        lambda: jnp.sqrt(loss()),
        lambda: eqx.filter_grad(softmax)(model, x, y),
    ):
        with raises(TypeError, "SoftmaxCrossEntropy"):
            run()


@pytest.mark.parametrize("value", [None, "a", True, loss, np.ones(2), jnp.ones(2), 1j])
def test_what_losses_do_not_combine_with(value):
    with raises(TypeError, "Losses scale by numbers"):
        loss() * known(value)
    if value is not loss:
        with pytest.raises((TypeError, ValueError), match="added to a loss"):
            loss() + value
    for array in (np.ones(2), jnp.ones(2)):
        with raises(TypeError, "Losses scale by numbers"):
            array * loss()


def test_what_losses_combine_with():
    half = [0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5), np.float64(0.5)]
    one, value = loss(), loss().value
    for number in half:
        for scaled in (number * one, one * number, one / (1 / number)):
            assert abs(scaled.value - value / 2) <= 1e-7
        for moved in (number + one, one + number, one - (-number)):
            assert abs(moved.value - value - 0.5) <= 1e-7
    assert sum([one, one]).value == 2 * value
    assert f"{one}" == str(one) and one
    with raises(ValueError, "not negative", "-1"):
        np.float32(-1) * one


def test_outputs_that_are_no_array():
    logits = jax.vmap(model)(x)
    ways_out = "(out, state)", "return `(loss, state)`"
    for several in ((logits, 1), (logits, None), (logits, state()), (logits, logits)):
        with raises(TypeError, "SoftmaxCrossEntropy", "logits", *ways_out):
            kfac.SoftmaxCrossEntropy(several, y)
    for nothing in (None, "a", [], [None]):
        with raises(TypeError, "SquaredError", "predictions must be an array"):
            kfac.SquaredError(nothing)
    for right in ([[1.0, 2.0]], ((1.0, 2.0),), np.ones((1, 2)), [jnp.ones(2)]):
        kfac.SquaredError(right, right)


#
# Blocks
#


blocks = {
    "a class": (kfac.EKFAC, "did you mean `kfac.EKFAC()`"),
    "a string": ("ekfac", "kfac.EKFAC()"),
    "a number": (3, "kfac.EKFAC()"),
    "a part": (kfac.Reduce(), "did you mean `kfac.Kronecker(kfac.Reduce())`"),
    "a solver": (kfac.Eigh(), "kfac.EKFAC()"),
}


@pytest.mark.parametrize("block,fix", blocks.values(), ids=blocks)
def test_no_blocks(block, fix):
    with raises(TypeError, "`blocks`", fix):
        kfac.convert(kfac.revert(model), block)
    for where in (".layers[0]", eqx.nn.Linear):
        with raises(TypeError, f"`blocks[{where!r}]`", fix):
            kfac.convert(kfac.revert(model), {where: block})
    with raises(TypeError, "`blocks('.layers[0]', ...)`", fix):
        kfac.convert(kfac.revert(model), lambda path, layer: block)
    for make in (
        lambda: kfac.Linear(3, 2, key=key, block=block),
        lambda: kfac.Conv2d(1, 2, 3, key=key, block=block),
        lambda: kfac.LayerNorm(3, block=block),
        lambda: kfac.GRUCell(3, 2, key=key, block=block),
        lambda: kfac.MLP(3, 2, 4, 1, key=key, block=block),
        lambda: kfac.MultiheadAttention(1, 4, key=key, block=block),
        lambda: kfac.Parameter(jnp.ones(2), block=block),
    ):
        with raises(TypeError, "`block`", fix):
            make()


def test_blocks():
    for right in (
        None,
        kfac.EKFAC(),
        {".layers[0]": None, eqx.nn.Linear: kfac.Kronecker(kfac.Reduce())},
        lambda path, layer: "default" if "0" in path else None,
    ):
        kfac.convert(kfac.revert(model), right)


#
# Layers
#


def loss_of(layers, x, *args):
    """Applies the first layer to the batch as it is."""
    layer, head = layers
    out = layer(x, *args)
    out = out[0] if isinstance(out, tuple) else out
    return kfac.SoftmaxCrossEntropy(jax.vmap(head)(out.reshape(8, -1)), y)


def example_loss_of(layers, x, *args):
    return loss_of((jax.vmap(layers[0]), layers[1]), x, *args)


images, vectors = np.ones((8, 3, 5, 5)), np.ones((8, 3))
hidden, tokens = np.ones((8, 2)), np.arange(8)


def batch_norm():
    norm, norm_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    return kfac.convert(norm), vectors, norm_state


layers = {
    "Linear(3, 4)": lambda: (kfac.Linear(3, 4, key=key), vectors),
    "Conv1d(3, 2, ...)": lambda: (kfac.Conv1d(3, 2, 2, key=key), images[..., 0]),
    "Conv2d(3, 2, ...)": lambda: (kfac.Conv2d(3, 2, 3, key=key), images),
    "ConvTranspose2d(3, 2, ...)": lambda: (
        kfac.ConvTranspose2d(3, 2, 3, key=key),
        images,
    ),
    "Embedding(9, 4)": lambda: (kfac.Embedding(9, 4, key=key), tokens),
    "LayerNorm((3,))": lambda: (kfac.LayerNorm(3), vectors),
    "RMSNorm((3,))": lambda: (kfac.RMSNorm(3), vectors),
    "GroupNorm(1, 3)": lambda: (kfac.GroupNorm(1, 3), vectors),
    "BatchNorm(3)": batch_norm,
    "GRUCell(3, 2)": lambda: (kfac.GRUCell(3, 2, key=key), vectors, hidden),
    "LSTMCell(3, 2)": lambda: (
        kfac.LSTMCell(3, 2, key=key),
        vectors,
        (hidden, hidden),
    ),
    "WeightNorm(Linear(3, 4))": lambda: (
        kfac.WeightNorm(eqx.nn.Linear(3, 4, key=key)),
        vectors,
    ),
}


@ft.cache
def made(name):
    """(All ones, and the first token: they need no compilation.)"""

    def new(a):
        numbers = np.ones if jnp.issubdtype(a.dtype, jnp.floating) else np.zeros
        return jnp.asarray(numbers(a.shape, a.dtype))

    shapes = eqx.filter_eval_shape(layers[name])
    return jtu.tree_map(lambda a: new(a) if hasattr(a, "dtype") else a, shapes)


@pytest.mark.parametrize("name", layers)
def test_layers_without_vmap(name):
    layer, *args = made(name)
    pair = [layer, None]
    shape = jnp.shape(args[0])
    phrases = f"kfac.{name}", str(shape), "jax.vmap(", "`[0]` of the model"
    for collect in (kfac.curvature, kfac.value_grad_and_curvature):
        with raises(ValueError, *phrases):
            eqx.filter_eval_shape(collect(loss_of, kfac.Exact()), pair, *args)
    with raises(ValueError, *phrases):
        eqx.filter_eval_shape(lambda: exact.step(loss_of, pair, exact.init(pair), *args))
    with raises(ValueError, *phrases[:-1]):
        layer(*args)
    with raises(ValueError, f"kfac.{name}", "tuple", "(out, state)"):
        layer((args[0][0], None), *args[1:])


@pytest.mark.parametrize("name", [n for n in layers if "BatchNorm" not in n])
def test_layers_with_vmap(name):
    layer, *args = made(name)
    out = jax.eval_shape(jax.vmap(layer), *args)
    width = (out[0] if isinstance(out, tuple) else out).size // 8

    @eqx.filter_eval_shape
    def step():
        pair = [layer, kfac.Linear(width, 2, key=key)]
        return exact.step(example_loss_of, pair, exact.init(pair), *args)


def test_channels_come_first():
    layer = made("Conv2d(3, 2, ...)")[0]
    with raises(
        ValueError, "kfac.Conv2d(3, 2, ...)", "(3, any, any)", "(5, 5, 3)", "[0]"
    ):
        loss_fn = lambda pair: example_loss_of(pair, np.moveaxis(images, 1, -1))
        kfac.curvature(loss_fn, kfac.Exact())([layer, None])


def test_inputs_of_other_types():
    kinds = {
        "Embedding(9, 4)": (tokens.astype(float), "float64", "astype(jnp.int32)"),
        "Linear(3, 4)": (vectors.astype(complex), "complex128", "astype(jnp.float32)"),
        "Conv2d(3, 2, ...)": (images.astype(int), "int64", "astype(jnp.float32)"),
    }
    for name, (wrong, *phrases) in kinds.items():
        with raises(ValueError, f"kfac.{name}", *phrases, "`[0]` of the model"):
            pair = [made(name)[0], None]
            kfac.curvature(example_loss_of, kfac.Exact())(pair, wrong)


def test_hidden_state_of_another_size():
    for cell, wrong in (
        (made("GRUCell(3, 2)")[0], jnp.ones(3)),
        (made("LSTMCell(3, 2)")[0], (jnp.ones(3), jnp.ones(3))),
    ):
        with raises(ValueError, "hidden state of shape (2,)", "(3,)"):
            cell(vectors[0], wrong)


def test_batch_norm_without_its_axis():
    layer, vectors, norm_state = made("BatchNorm(3)")
    pair = [layer, kfac.Linear(3, 2, key=key)]

    def loss_fn(pair, norm_state, axis_name):
        def apply(x):
            return pair[1](pair[0](x, norm_state)[0])

        logits = jax.vmap(apply, axis_name=axis_name)(vectors)
        return kfac.SoftmaxCrossEntropy(logits, y)

    for wrong in (None, "devices"):
        with raises(ValueError, "kfac.BatchNorm", "axis_name='batch'", "[0]"):
            kfac.curvature(loss_fn, kfac.Exact())(pair, norm_state, wrong)
    collect = kfac.curvature(loss_fn, kfac.Exact())
    eqx.filter_eval_shape(collect, pair, norm_state, "batch")


#
# Parameters
#


def test_values_of_parameters():
    wrong = {
        "None": None,
        "int64": jnp.arange(3),
        "bool": np.ones(2, bool),
        "complex128": jnp.ones(2, complex),
        "[1.0]": [1.0],
        "'a'": "a",
    }
    for got, value in wrong.items():
        with raises(TypeError, "kfac.Parameter(jnp.zeros(3))", got):
            kfac.Parameter(value)
    for value in (np.ones(2), 1.0, np.float32(1), jnp.ones((2, 3))):
        parameter = kfac.Parameter(value)
        array = parameter.value
        assert isinstance(array, jax.Array) and not array.weak_type
        assert array.dtype == jnp.result_type(value)
        np.testing.assert_array_equal(array, value)


class Shifted(eqx.Module):
    shift: kfac.Parameter
    linear: kfac.Linear

    def __init__(self):
        self.shift = kfac.Parameter(jnp.zeros(2))
        self.linear = kfac.Linear(3, 2, key=key)


def test_a_parameter_belongs_to_an_example():
    def loss_fn(model, what):
        logits = jax.vmap(lambda x: model.linear(x) + model.shift(what(x)))(x)
        return kfac.SoftmaxCrossEntropy(logits, y)

    for nothing in (lambda x: None, lambda x: 1.0, lambda x: np.ones(2), lambda x: ()):
        with raises(ValueError, "kfac.Parameter", "the model's input", "`.shift`"):
            kfac.curvature(loss_fn, kfac.Exact())(Shifted(), nothing)
    for right in (lambda x: x, lambda x: {"x": (x, None)}):
        collect = kfac.curvature(loss_fn, kfac.Exact())
        eqx.filter_eval_shape(lambda: collect(Shifted(), right))


class Own(eqx.Module):
    weight: jax.Array
    tag: kfac.Tag

    def __init__(self):
        self.weight = jnp.ones((2, 3))
        self.tag = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())

    def __call__(self, x):
        return self.tag(self.weight @ x, x)


class OwnWithoutBias(Own):
    bias: None = None


def vmapped(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model["layer"])(x), y)


def with_weight(shape, dtype):
    layer = kfac.Linear(3, 2, key=key)
    return eqx.tree_at(lambda m: m.weight, layer, jnp.ones(shape, dtype))


stacked = eqx.filter_vmap(lambda k: kfac.Linear(3, 2, key=k))
empty = "nothing to train"
parameters = {
    "no bias": (Own, ValueError, "no `bias`", "field of that name"),
    "complex": (lambda: with_weight((2, 3), complex), TypeError, "complex128", "Freeze"),
    "integers": (lambda: with_weight((2, 3), int), TypeError, "int64", "Freeze it"),
    "no output": (lambda: kfac.Linear(3, 0, key=key), ValueError, "(0, 3)", empty),
    "no input": (lambda: with_weight((2, 0), float), ValueError, "(2, 0)", empty),
    "no token": (lambda: kfac.Embedding(0, 2, key=key), ValueError, "(0, 2)", empty),
    "no layer": (lambda: stacked(jr.split(key, 0)), ValueError, "(0, 2, 3)", empty),
    "no number": (lambda: kfac.Parameter(jnp.ones(0)), ValueError, "(0,)", empty),
}


@pytest.mark.parametrize(
    "make,error,phrases", [(m, e, p) for m, e, *p in parameters.values()], ids=parameters
)
def test_parameters_without_curvature(make, error, phrases):
    model = {"layer": make()}
    for run in (
        lambda: exact.init(model),
        lambda: kfac.scale_by_kfac().init(model),
        lambda: kfac.curvature(vmapped, kfac.Exact())(model, x, y),
        lambda: kfac.analysis.capture(vmapped)(model, x, y),
    ):
        with raises(error, "`['layer']`", *phrases):
            run()


def test_parameters_that_are_frozen_together():
    model = {"layer": kfac.GRUCell(3, 2, key=key)}
    for names, refused in (
        (["weight_ih"], True),
        (["weight_hh", "bias"], True),
        (["weight_ih", "weight_hh"], False),
        (["bias"], False),
    ):
        frozen = eqx.tree_at(
            lambda m, names=names: [getattr(m["layer"], name) for name in names],
            model,
            [None] * len(names),
        )
        if refused:
            with raises(ValueError, "`weight_ih` and `weight_hh`", "`['layer']`"):
                exact.init(frozen)
        else:
            exact.init(frozen)


def test_such_parameters_may_be_frozen():
    layer = kfac.convert(eqx.nn.Linear(3, 2, dtype=jnp.complex64, key=key))
    both = {"layer": kfac.Linear(3, 2, key=key), "frozen": layer}
    spec = jtu.tree_map(lambda p: jnp.issubdtype(p.dtype, jnp.floating), both)
    trained, frozen = eqx.partition(both, spec)

    def loss_fn(trained):
        model = eqx.combine(trained, frozen)
        z = jax.vmap(model["frozen"])(x.astype(jnp.complex64))
        logits = jax.vmap(model["layer"])(x) + jnp.abs(z).astype(x.dtype)
        return kfac.SoftmaxCrossEntropy(logits, y)

    @eqx.filter_jit
    def first_step(loss_fn, model, *args):
        return exact.step(loss_fn, model, exact.init(model), *args)[2]

    assert not first_step(loss_fn, trained).rejected
    assert not first_step(vmapped, {"layer": OwnWithoutBias()}, x, y).rejected


class Labelled(eqx.Module):
    """A module whose `tag` is nothing of ours."""

    tag: dict
    layer: kfac.Linear

    def __call__(self, x):
        return self.layer(x)


def test_other_tags():
    model = {"layer": Labelled({"name": "first"}, kfac.Linear(3, 2, key=key))}
    step = eqx.filter_jit(lambda: exact.step(vmapped, model, exact.init(model), x, y))
    assert not step()[2].rejected


def test_a_missing_axis_is_not_a_batch():
    image, batch = jnp.ones((4, 4)), jnp.ones((2, 1, 4, 4))
    layer = kfac.Conv2d(1, 2, 3, key=jax.random.key(0))
    with pytest.raises(ValueError, match="too few axes"):
        layer(image)
    with pytest.raises(ValueError, match="`jax.vmap"):
        layer(batch)


#
# What is not to be trained, and parts of models
#


class Features(eqx.Module):
    frequencies: jax.Array
    out: kfac.Linear

    def __init__(self):
        self.frequencies = jnp.ones((4, 3))
        self.out = kfac.Linear(4, 2, key=jr.key(0))

    def __call__(self, x):
        return self.out(jnp.matmul(jax.lax.stop_gradient(self.frequencies), x))


def test_constants_are_left_as_they_are():
    model = Features()
    with pytest.raises(ValueError, match=r"frequencies.*`fallback=optax.set_to_zero"):
        kfac.KFAC().init(model)
    optimizer = plain_kfac(0.1, fisher=kfac.Exact(), fallback=optax.set_to_zero())
    loss_fn = lambda m, x, y: kfac.SquaredError(jax.vmap(m)(x), y)
    x, y = jnp.ones((5, 3)), jnp.zeros((5, 2))
    step = eqx.filter_jit(optimizer.step)
    new, _, info = step(loss_fn, model, optimizer.init(model), x, y)
    assert not bool(info.rejected)
    assert np.array_equal(new.frequencies, model.frequencies)
    assert not np.array_equal(new.out.weight, model.out.weight)


def test_layers_without_some_parameters_are_whole():
    layers = [
        eqx.nn.Linear(3, 2, use_bias=False, key=jr.key(0)),
        eqx.nn.LayerNorm(3, use_weight=False, use_bias=False),
        eqx.nn.LayerNorm(3, use_bias=False),
        eqx.nn.GroupNorm(1, 3, channelwise_affine=False),
        eqx.nn.GRUCell(3, 2, use_bias=False, key=jr.key(0)),
    ]
    converted = kfac.convert(layers)
    assert type(converted[0]) is kfac.Linear


class Outside(eqx.Module):
    shift: kfac.Parameter
    out: kfac.Linear


def test_a_parameter_outside_of_the_vmap():
    """The parameter is a `Parameter` already."""
    model = Outside(kfac.Parameter(jnp.ones(3)), kfac.Linear(3, 2, key=jr.key(0)))

    def loss_fn(model, x, y):
        shifted = x + model.shift(x)[None]
        return kfac.SquaredError(jax.vmap(model.out)(shifted), y)

    x, y = jnp.ones((5, 3)), jnp.zeros((5, 2))
    with pytest.raises(ValueError, match="outside of the `vmap`") as error:
        kfac.curvature(loss_fn, kfac.Exact())(model, x, y)
    assert "self.position(x)" in str(error.value)
    assert "`kfac.Parameter`" not in str(error.value)
