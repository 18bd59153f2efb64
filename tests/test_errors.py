"""Misuse: each mistake gives an error that names the place and the way out, and leaves
everything as it was."""

import subprocess
import sys
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_kfac as kfac

from .helpers import normal, raises, softmax
from .models import classifier, make_labels
from .plain import plain_kfac


optimizer = plain_kfac(0.1, fisher=kfac.Exact())


def step(loss_fn, model, *args, **kwargs):
    return optimizer.step(loss_fn, model, optimizer.init(model), *args, **kwargs)


def curvature(loss_fn, *args, **kwargs):
    return kfac.curvature(loss_fn, kfac.Exact())(*args, **kwargs)


def value_grad_and_curvature(loss_fn, *args, **kwargs):
    run = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    return run(*args, **kwargs)


traced = eqx.filter_eval_shape
collect = eqx.filter_jit(curvature)
entries = [curvature, value_grad_and_curvature, step]


@pytest.fixture
def unharmed():
    """A model and data which work after the error as they did before it."""
    model, batch = classifier(), make_labels()
    copies = jtu.tree_map(lambda x: x.copy() if eqx.is_array(x) else x, (model, batch))
    yield model, *batch
    assert jtu.tree_structure((model, batch)) == jtu.tree_structure(copies)
    pairs = zip(jtu.tree_leaves((model, batch)), jtu.tree_leaves(copies), strict=True)
    for a, b in pairs:
        if eqx.is_array(a):
            assert not isinstance(a, jax.core.Tracer)
            np.testing.assert_array_equal(a, b)
    factors = collect(softmax, model, *batch)
    assert np.all(np.isfinite(factors.layers[0].output_factor))


#
# What the loss function returns
#


@pytest.mark.parametrize("entry", entries)
@pytest.mark.parametrize(
    "returned,name",
    [
        (lambda loss: loss.value, "array"),
        (lambda loss: 1.5, "float"),
        (lambda loss: None, "NoneType"),
        (lambda loss: (loss, 1, 2), "tuple"),
        (lambda loss: (loss,), "tuple"),
        (lambda loss: (loss.value, 1), "array"),
        (lambda loss: [loss], "list"),
        (lambda loss: kfac.SoftmaxCrossEntropy, "returned"),
    ],
)
def test_not_a_loss(entry, returned, name, unharmed):
    loss_fn = lambda *args: returned(softmax(*args))
    phrases = "`loss_fn` must return", "kfac.SoftmaxCrossEntropy(logits, targets)", name
    with raises(TypeError, *phrases):
        entry(loss_fn, *unharmed)


@pytest.mark.parametrize("entry", entries)
def test_not_a_loss_under_jit(entry, unharmed):
    with jax.checking_leaks():
        with raises(TypeError, "`loss_fn` must return", "loss + penalty"):
            eqx.filter_jit(entry)(lambda *args: softmax(*args).value, *unharmed)


def test_a_mean_of_log_densities(unharmed):
    """... may be what an array is; a number of Python's or a tuple is not."""
    density = lambda model, x, y: -jnp.mean(jax.vmap(model)(x))
    with raises(TypeError, "`kfac.NegativeLogLikelihood(log_probs)`"):
        curvature(density, *unharmed)
    with pytest.raises(TypeError) as error:
        curvature(lambda *args: 1.5, *unharmed)
    assert "NegativeLogLikelihood" not in str(error.value)


@pytest.mark.parametrize("entry", entries)
def test_only_penalties(entry, unharmed):
    for penalty in (lambda m: kfac.L2(m, 0.1), lambda m: 2 * kfac.L2(m, 0.1) + 1.0):
        with raises(ValueError, "only penalties", "kfac.SoftmaxCrossEntropy"):
            entry(lambda model, x, y: penalty(model), *unharmed)


def test_negative_coefficient(unharmed):
    for loss_fn in (
        lambda *args: -1 * softmax(*args),
        lambda *args: softmax(*args) * -0.5,
        lambda *args: softmax(*args) / -2,
    ):
        with raises(ValueError, "not negative", "positive semidefinite"):
            curvature(loss_fn, *unharmed)


def test_minus_is_an_error(unharmed):
    """... and not the minus of something else."""
    for loss_fn in (
        lambda model, *args: softmax(model, *args) - softmax(model, *args),
        lambda *args: -softmax(*args),
    ):
        with pytest.raises((TypeError, ValueError)):
            curvature(loss_fn, *unharmed)


def test_penalty_is_a_scalar(unharmed):
    loss_fn = lambda model, x, y: softmax(model, x, y) + model.layers[0].weight
    with raises(ValueError, "Only scalars", "(4, 3)", "jnp.mean"):
        curvature(loss_fn, *unharmed)


def test_negative_l2(unharmed):
    model, *_ = unharmed
    with raises(ValueError, "`coefficient`", "-0.1"):
        kfac.L2(model, -0.1)


#
# What the loss is given
#


losses = [
    kfac.SoftmaxCrossEntropy,
    kfac.SigmoidCrossEntropy,
    kfac.SquaredError,
    kfac.HuberLoss,
    kfac.OrdinalCrossEntropy,
    kfac.QuantileLoss,
    kfac.StudentTNLL,
]
with_targets = [
    (kfac.SoftmaxCrossEntropy, jnp.zeros((5, 3))),
    (kfac.SoftmaxCrossEntropy, jnp.zeros(5, int)),
    (kfac.SoftmaxCrossEntropy, jnp.zeros((4, 3), int)),
    (kfac.SigmoidCrossEntropy, jnp.zeros((5, 3))),
    (kfac.SigmoidCrossEntropy, jnp.zeros(4, bool)),
    (kfac.SquaredError, jnp.zeros((5, 3))),
    (kfac.SquaredError, jnp.zeros((4, 1))),
    (kfac.SquaredError, jnp.zeros(4)),
    (kfac.HuberLoss, jnp.zeros(4)),
    (kfac.OrdinalCrossEntropy, jnp.zeros((4, 3), int)),
    (kfac.QuantileLoss, jnp.zeros((4, 1))),
    (kfac.StudentTNLL, jnp.zeros((5, 3))),
]


@pytest.mark.parametrize("loss,targets", with_targets)
def test_mismatched_targets(loss, targets):
    with raises(ValueError, loss.__name__, "targets must have shape", str(targets.shape)):
        loss(jnp.zeros((4, 3)), targets)


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (1,)])
def test_mismatched_weights(loss, shape):
    with raises(ValueError, loss.__name__, "weights", "(4,)", str(shape)):
        loss(jnp.zeros((4, 3)), weights=jnp.ones(shape))


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_one_dimensional_outputs(loss, shape):
    with raises(ValueError, loss.__name__, "[batch, ..., k]", str(shape), "[:, None]"):
        loss(jnp.zeros(shape))


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (4, 0, 3)])
def test_empty_outputs(loss, shape):
    with raises(ValueError, loss.__name__, "empty batch", str(shape)):
        loss(jnp.zeros(shape))


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("dtype", [int, bool, complex])
def test_outputs_are_floating(loss, dtype):
    with raises(TypeError, loss.__name__, "must be floating"):
        loss(jnp.zeros((4, 3), dtype))


def test_targets_of_the_wrong_type():
    logits = jnp.zeros((4, 3))
    phrases = "SoftmaxCrossEntropy", "integer classes", "probabilities", "bool"
    with raises(TypeError, *phrases):
        kfac.SoftmaxCrossEntropy(logits, jnp.zeros((4, 3), bool))
    # Class numbers that are floating have the wrong shape for probabilities.
    with raises(TypeError, "targets", "(4, 3)", "(4,)", "astype(jnp.int32)"):
        kfac.SoftmaxCrossEntropy(logits, jnp.zeros(4))


def test_empty_batch(unharmed):
    model, x, y = unharmed
    with raises(ValueError, "SoftmaxCrossEntropy", "empty batch"):
        curvature(softmax, model, x[:0], y[:0])


#
# Fisher estimates
#


def test_missing_key(unharmed):
    model, x, y = unharmed
    monte_carlo = plain_kfac(0.1)
    phrases = "kfac.MonteCarlo", "key=...", "kfac.Exact()"
    with raises(ValueError, *phrases):
        kfac.curvature(softmax)(model, x, y)
    with raises(ValueError, *phrases):
        kfac.value_grad_and_curvature(softmax)(model, x, y)
    for burn_in in (0, 2):
        monte_carlo = plain_kfac(0.1, ema=kfac.MovingAverage(burn_in=burn_in))
        state = monte_carlo.init(model)
        with jax.checking_leaks(), raises(ValueError, *phrases):
            traced(monte_carlo.step, softmax, model, state, x, y)


def test_missing_targets(unharmed):
    model, x, _ = unharmed
    no_targets = lambda model, x: kfac.SoftmaxCrossEntropy(jax.vmap(model)(x))
    with raises(ValueError, "kfac.Empirical", "SoftmaxCrossEntropy", "Pass targets"):
        kfac.curvature(no_targets, kfac.Empirical())(model, x)
    with raises(ValueError, "SoftmaxCrossEntropy has no targets", "Pass targets"):
        value_grad_and_curvature(no_targets, model, x)
    with raises(ValueError, "SoftmaxCrossEntropy has no targets", "Pass targets"):
        no_targets(model, x).value
    with raises(ValueError, "SoftmaxCrossEntropy has no targets", "Pass targets"):
        step(no_targets, model, x)
    curvature(no_targets, model, x)  # This is what they may be left out for.


def test_fisher_arguments(unharmed):
    with raises(ValueError, "num_samples", "at least 1", "0"):
        kfac.MonteCarlo(0)
    with raises(ValueError, "example_axes", "at least 0", "-1"):
        kfac.Exact(-1)
    phrases = "Exact(example_axes=2)", "SoftmaxCrossEntropy", "1 leading axes"
    with raises(ValueError, *phrases):
        kfac.curvature(softmax, kfac.Exact(2))(*unharmed)


#
# Layers
#


class Nested(eqx.Module):
    encoder: dict
    head: kfac.Linear

    def __init__(self):
        self.encoder = {"first": [kfac.Linear(3, 4, key=jr.key(2))]}
        self.head = kfac.Linear(4, 2, key=jr.key(3))

    def __call__(self, x):
        return self.head(self.encoder["first"][0](x))


def test_batch_without_vmap():
    model = Nested()
    x, y = make_labels()
    fix = "jax.vmap(layer)(x)"
    with raises(ValueError, "kfac.Linear(3, 4)", "(3,)", "(8, 3)", fix):
        model(x)
    no_vmap = lambda model, x, y: kfac.SoftmaxCrossEntropy(model(x), y)
    path = ".encoder['first'][0]"
    for entry in entries:
        with raises(ValueError, "(8, 3)", fix, path) as info:
            entry(no_vmap, model, x, y)
        assert ".head" not in "".join(info.value.__notes__)
        with jax.checking_leaks(), raises(ValueError, "(8, 3)", fix, path):
            eqx.filter_jit(entry)(no_vmap, model, x, y)


def test_wrong_size():
    with raises(ValueError, "kfac.Linear(4, 2)", "(4,)", "(3,)", ".head"):
        wrong = lambda model, x, y: kfac.SoftmaxCrossEntropy(jax.vmap(model.head)(x), y)
        curvature(wrong, Nested(), *make_labels())


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_integer_inputs(dtype):
    model = Nested()
    x, y = jnp.ones((8, 3), dtype), make_labels()[1]
    phrases = "kfac.Linear(3, 4)", jnp.dtype(dtype).name, "astype", ".encoder['first'][0]"
    with jax.numpy_dtype_promotion("standard"):
        jax.vmap(model)(x)  # As in Equinox.
        with raises(ValueError, *phrases):
            curvature(softmax, model, x, y)


#
# Coverage
#


class Partly(eqx.Module):
    linear: kfac.Linear
    others: dict

    def __init__(self):
        self.linear = kfac.Linear(3, 2, key=jr.key(0))
        norm = eqx.nn.LayerNorm(3)
        self.others = {"norm": [norm], "plain": eqx.nn.Linear(3, 3, key=jr.key(0))}

    def __call__(self, x):
        return self.linear(self.others["plain"](self.others["norm"][0](x)))


@pytest.mark.parametrize(
    "init",
    [
        lambda model: optimizer.init(model),
        lambda model: kfac.scale_by_kfac().init(eqx.filter(model, eqx.is_inexact_array)),
        lambda model: kfac.optax_kfac(0.1).init(eqx.filter(model, eqx.is_inexact_array)),
    ],
)
def test_untagged_parameters(init):
    names = [
        f".others['{name}'].{leaf}"
        for name in ("norm'][0", "plain")
        for leaf in ("weight", "bias")
    ]
    names = [name.replace("norm'][0']", "norm'][0]") for name in names]
    ways_out = "kfac.convert(model, example=x[0])", "eqx.partition", "fallback="
    with raises(ValueError, *names, *ways_out) as info:
        init(Partly())
    assert ".linear" not in str(info.value)


def test_many_untagged_parameters():
    """A long list is cut short."""
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    with raises(ValueError, "[0].weight", "92 more") as info:
        optimizer.init([*[linear] * 50, kfac.Linear(2, 2, key=jr.key(0))])
    assert len(str(info.value)) < 1000


@pytest.mark.parametrize("model", [{}, None, [jnp.arange(3)], {"f": jnp.tanh}])
def test_no_parameters(model):
    for init in (optimizer.init, kfac.scale_by_kfac().init):
        with raises(ValueError, "no tagged layer", "kfac.convert"):
            init(model)


class Outer(eqx.Module):
    """A tagged layer with another one within, whose weight it may have a tag for, too."""

    inner: eqx.nn.Linear
    weight: jax.Array
    tag: kfac.Tag
    bias: None = None

    def __init__(self, linear, weight="weight"):
        self.inner, self.weight = linear(4, 4, key=jr.key(0)), jnp.ones((3, 4))
        self.tag = kfac.Tag(kfac.form.Einsum("oi,i->o", weight, None), kfac.Kronecker())

    def __call__(self, x):
        h = self.inner(x)
        return self.tag(self.weight @ h, h)


@pytest.mark.parametrize(
    "entry",
    [
        lambda model: curvature(softmax, model, normal(5, 4), np.zeros(5, int)),
        lambda model: kfac.KFAC(fallback=optax.sgd(0.1)).init(model),
        lambda model: kfac.verify(softmax, model, normal(5, 4), np.zeros(5, int)),
    ],
)
def test_a_tagged_layer_within_a_tagged_layer(entry):
    """Both have their own curvature; but no parameter has two tags."""
    entry(Outer(eqx.nn.Linear))
    entry(Outer(kfac.Linear))
    with raises(ValueError, "The model has a tag for a parameter of its", "`.inner`"):
        entry(Outer(kfac.Linear, "inner.weight"))


class Computed(eqx.Module):
    """A layer whose weight is half of what is trained, or that itself."""

    half: jax.Array
    tag: kfac.Tag
    whole: bool = eqx.field(static=True)
    bias: None = None

    def __init__(self, whole):
        self.half, self.whole = jnp.ones((2, 3)), whole
        self.tag = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())

    @property
    def weight(self):
        return self.half if self.whole else 2 * self.half

    def __call__(self, x):
        return self.tag(self.weight @ x, x)


@pytest.mark.parametrize("entry", entries)
def test_a_parameter_that_is_computed(entry):
    entry(softmax, Computed(True), *make_labels())
    with raises(TypeError, "`weight` of the model", "computed", "kfac.form.Parameters"):
        entry(softmax, Computed(False), *make_labels())


class Elsewhere(eqx.Module):
    """A tag in a field of another name; static; of the class; made anew."""

    weight: jax.Array
    own: kfac.Tag
    fixed: kfac.Tag = eqx.field(static=True)
    where: str = eqx.field(static=True)
    bias: None = None
    shared: ClassVar = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())

    def __init__(self, where):
        self.weight, self.where = jnp.ones((2, 3)), where
        self.own = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())
        self.fixed = kfac.Tag(kfac.form.Dense(), kfac.Kronecker())

    @property
    def anew(self):
        return kfac.Tag(kfac.form.Dense(), kfac.Kronecker())

    @property
    def tag(self):
        return getattr(self, self.where)

    def __call__(self, x):
        return self.tag(self.weight @ x, x)


@pytest.mark.parametrize("entry", entries)
def test_a_tag_that_is_not_in_the_tree(entry):
    entry(softmax, Elsewhere("own"), *make_labels())
    for where in ("fixed", "shared", "anew"):
        with raises(TypeError, "tag of the model", "ordinary field"):
            entry(softmax, Elsewhere(where), *make_labels())


@pytest.mark.parametrize("entry", [curvature, value_grad_and_curvature])
@pytest.mark.parametrize("what", ["unconverted", "frozen"])
def test_nothing_to_collect(entry, what):
    """No tagged layer at all: not an empty result."""
    if what == "unconverted":
        model, loss_fn = kfac.revert(classifier()), softmax
    else:
        model, whole = None, classifier()
        loss_fn = lambda _, *args: softmax(whole, *args)
    with raises(ValueError, "tagged", "kfac.convert"):
        entry(loss_fn, model, *make_labels())


def test_step_of_an_unconverted_model():
    model = kfac.revert(classifier())
    with raises(ValueError, "tagged", "kfac.convert"):
        step(softmax, model, *make_labels())
    # An optimizer made for the converted one.
    state = optimizer.init(classifier())
    with raises(ValueError, "kfac.convert"):
        optimizer.step(softmax, model, state, *make_labels())


#
# States that do not belong
#


def other_model_state():
    return optimizer.init(kfac.Linear(3, 2, key=jr.key(0)))


def wider_model_state():
    return optimizer.init(kfac.convert(eqx.nn.MLP(3, 2, 5, 1, key=jr.key(0))))


def deeper_model_state():
    return optimizer.init(kfac.convert(eqx.nn.MLP(3, 2, 4, 2, key=jr.key(0))))


def other_solver_state():
    return plain_kfac(0.1, solver=kfac.Eigh()).init(classifier())


def frozen_model_state():
    model = classifier()
    frozen = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias), model, (None, None)
    )
    return optimizer.init(eqx.filter(frozen, eqx.is_inexact_array))


states = [
    other_model_state,
    wider_model_state,
    deeper_model_state,
    other_solver_state,
    frozen_model_state,
]


@pytest.mark.parametrize("make_state", states)
@pytest.mark.parametrize("inverse_period", [1, 5])
def test_state_of_something_else(make_state, inverse_period, unharmed):
    ours = plain_kfac(0.1, fisher=kfac.Exact(), inverse_period=inverse_period)
    with raises((TypeError, ValueError), "state", "optimizer.init"):
        ours.step(softmax, unharmed[0], make_state(), *unharmed[1:])


def test_state_without_the_uncovered_parameters():
    """A state made for the covered part must not let the others be updated by raw
    gradients."""
    model = Partly()
    spec = jtu.tree_map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: (m.linear.weight, m.linear.bias), spec, (True, True))
    trained, _ = eqx.partition(model, spec)
    state = optimizer.init(trained)
    with raises((TypeError, ValueError), "others"):
        optimizer.step(softmax, model, state, *make_labels())


def test_frozen_after_init(unharmed):
    model, x, y = unharmed
    spec = eqx.tree_at(
        lambda m: m.layers[0],
        jtu.tree_map(eqx.is_inexact_array, model),
        replace_fn=lambda layer: jtu.tree_map(lambda _: False, layer),
    )
    trained, static = eqx.partition(model, spec)
    loss_fn = lambda trained, x, y: softmax(eqx.combine(trained, static), x, y)
    with raises((TypeError, ValueError), "state", "optimizer.init"):
        optimizer.step(loss_fn, trained, optimizer.init(model), x, y)


#
# Choices
#


numbers = [
    ("learning_rate", [0, -1.0, float("nan")], "positive"),
    ("momentum", [-0.1, 1, 1.5, float("nan")], "in [0, 1)"),
    ("damping", [-1e-3, float("nan")], "at least 0"),
    ("norm_constraint", [0, -1.0], "positive"),
    ("ema", [-0.1, 1.1], "in [0, 1]"),
    ("curvature_period", [0, -1], "at least 1"),
    ("inverse_period", [0], "at least 1"),
]
cases = [(name, v, range_) for name, values, range_ in numbers for v in values]


@pytest.mark.parametrize("name,value,range_", cases)
def test_numbers_out_of_range(name, value, range_):
    with raises(ValueError, f"`{name}` must be {range_}", str(value)):
        plain_kfac(**(dict(learning_rate=0.1) | {name: value}))
    if name != "curvature_period":
        with raises(ValueError, f"`{name}` must be {range_}"):
            kfac.optax_kfac(**(dict(learning_rate=0.1) | {name: value}))
    if name in ("damping", "ema", "inverse_period"):
        with raises(ValueError, f"`{name}` must be {range_}"):
            kfac.scale_by_kfac(**{name: value})


@pytest.mark.parametrize(
    "name", ["learning_rate", "momentum", "damping", "norm_constraint", "ema"]
)
@pytest.mark.parametrize("value", ["0.1", [0.1], {}, jnp.ones(2), np.ones((1, 1))])
def test_numbers_of_the_wrong_type(name, value):
    with raises(TypeError, f"`{name}` must be a number or a schedule"):
        plain_kfac(**(dict(learning_rate=0.1) | {name: value}))


@pytest.mark.parametrize("name", ["learning_rate", "momentum", "damping"])
def test_rules_in_the_place_of_others(name):
    """The damping's rule can be called, but is no schedule."""
    rule = kfac.QuadraticModel() if name == "damping" else kfac.LevenbergMarquardt(1.0)
    with raises(TypeError, f"`{name}` must be a number", type(rule).__name__):
        plain_kfac(**(dict(learning_rate=0.1) | {name: rule}))


def test_a_preconditioner_has_no_rules():
    with raises(ValueError, "`damping=Leven", "`kfac.scale_by_kfac` does not have"):
        kfac.scale_by_kfac(kfac.LevenbergMarquardt(1.0))


# Where the tests' type checker would answer first.
wrong_types = {
    "curvature_period=2.5": ("TypeError", "curvature_period"),
    "guard=0.1": ("TypeError", "guard", "kfac.MaxIncrease()"),
    "guard=kfac.MaxIncrease": ("TypeError", "guard", "kfac.MaxIncrease()"),
    "ema=kfac.WeightDecay(0.1)": ("TypeError", "ema"),
    "weight_decay=kfac.MovingAverage()": ("TypeError", "weight_decay"),
    "solver=kfac.analysis.ConjugateGradient(max_steps=2.5)": (
        "TypeError",
        "max_steps",
        "integer",
    ),
    "inverse_period=lambda step: 2": ("TypeError", "inverse_period"),
    "inverse_period=kfac.Staggered": ("TypeError", "inverse_period"),
    "ema=kfac.MovingAverage(burn_in='3')": ("TypeError", "burn_in"),
    "fisher=kfac.Exact": ("TypeError", "fisher", "kfac.Exact()"),
    "fisher='exact'": ("TypeError", "fisher", "kfac.MonteCarlo()"),
    "solver=kfac.Eigh": ("TypeError", "solver", "kfac.Eigh()"),
    "solver='eigh'": ("TypeError", "solver"),
    "fallback=1e-3": ("TypeError", "fallback", "optax"),
    "fallback=optax.adam": ("TypeError", "fallback", "optax"),
}

program = """
import jax.numpy as jnp, optax
import eqx_kfac as kfac

for case in {cases}:
    try:
        eval("kfac.KFAC(0.1, " + case + ")")
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
    else:
        print("nothing")
"""


def test_choices_of_the_wrong_type():
    """The messages that a user sees, without type checking."""
    source = program.format(cases=list(wrong_types))
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    answers = run.stdout.splitlines()
    wrong = [
        f"{case}: {answer}"
        for (case, phrases), answer in zip(wrong_types.items(), answers, strict=True)
        if not all(phrase in answer for phrase in phrases)
    ]
    assert not wrong, "\n".join(wrong)


def test_wrong_operator_for_a_solver():
    import lineax as lx

    operator = lx.MatrixLinearOperator(jnp.eye(2), lx.positive_semidefinite_tag)
    for solver in (kfac.Cholesky(), kfac.Eigh()):
        phrases = type(solver).__name__, "KroneckerOperator", "MatrixLinearOperator"
        with raises(ValueError, *phrases):
            lx.linear_solve(operator, jnp.ones(2), solver)


def test_statistics_are_not_differentiable(unharmed):
    def trace(model, x, y):
        return jnp.trace(curvature(softmax, model, x, y).layers[0].output_factor)

    with jax.checking_leaks():
        with raises(TypeError, "differentiate curvature statistics", "stop_gradient"):
            traced(eqx.filter_grad(trace), *unharmed)
