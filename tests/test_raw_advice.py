"""What is said of arrays that `kfac.convert` does not follow: done as it is said, a step
runs. And that nothing is advised that does not help there."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jaxtyping import Array

import eqx_kfac as kfac

from .helpers import normal


ROWS = normal(4, 3)
FOLLOW = "kfac.convert(model, example=x[0])"


def linear(out, into):
    return eqx.nn.Linear(into, out, key=jr.key(0))


def of(form=None):
    return kfac.Tag(kfac.form.Dense() if form is None else form, kfac.Kronecker())


def traced(model, call=lambda model, x: model(x), fallback=None):
    """A step, which is only traced."""
    optimizer = kfac.KFAC(fallback=fallback)

    def loss_fn(model, x):
        return kfac.SquaredError(jax.vmap(lambda x: call(model, x))(x), jnp.zeros((4, 2)))

    def run(model, x):
        state = optimizer.init(model)
        return optimizer.step(loss_fn, model, state, x, key=jr.key(0))

    eqx.filter_eval_shape(run, model, ROWS)


def complaint(model, call=lambda model, x: model(x)):
    with pytest.raises(ValueError) as info:
        traced(model, call)
    return str(info.value)


#
# Arrays that are in no module
#


def of_dict(model, x):
    return model["w"] @ x + model["b"]


def of_partial(w, x):
    return w @ x


OUTSIDE = {
    "dict": ({"w": jnp.ones((2, 3)), "b": jnp.ones(2)}, of_dict),
    "Partial": (jtu.Partial(of_partial, jnp.ones((2, 3))), lambda model, x: model(x)),
    "list": ([jnp.ones((2, 3))], lambda model, x: model[0] @ x),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_without_a_module(name):
    """Nothing is converted, and `convert` says so: with a method, too."""
    model, call = OUTSIDE[name]
    for options in ({}, {"method": call}):
        with pytest.raises(ValueError, match="in no module.*`eqx.Module`.*Parameter"):
            kfac.convert(model, example=ROWS[0], **options)
    with pytest.raises(ValueError, match="in no module"):
        kfac.convert(model, rest=kfac.Diagonal())
    if name != "Partial":  # Which is a function to `init`.
        assert "in no module" in complaint(model, call)


class Held(eqx.Module):
    """Arrays held in a module, as is advised."""

    own: dict

    def __call__(self, x):
        return of_dict(self.own, x)


def test_advice_for_them():
    model, _ = OUTSIDE["dict"]
    converted = kfac.convert(Held(model), example=ROWS[0])
    assert not kfac.summary(converted).untagged
    traced(converted)
    own = {name: kfac.Parameter(value) for name, value in model.items()}
    traced(own, lambda m, x: of_dict({k: v(x) for k, v in m.items()}, x))


class WithPartial(eqx.Module):
    first: eqx.nn.Linear
    then: jtu.Partial

    def __call__(self, x):
        return self.then(self.first(x))


class WithModule(eqx.Module):
    first: eqx.nn.Linear
    then: Held

    def __call__(self, x):
        return self.then(self.first(x))


def of_parameter(w, x):
    return w(x) @ x


PARTLY = {
    "dict": (
        lambda: {"l": linear(3, 3), "w": jnp.ones((2, 3)), "b": jnp.ones(2)},
        lambda model, x: of_dict(model, model["l"](x)),
    ),
    "Partial": (
        lambda: WithPartial(linear(3, 3), jtu.Partial(of_partial, jnp.ones((2, 3)))),
        lambda model, x: model(x),
    ),
    "dots": (
        lambda: {"l": linear(3, 3), "w": Held({"w.0": jnp.ones((2, 3))})},
        lambda model, x: model["w"].own["w.0"] @ model["l"](x),
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_arrays_outside_of_modules(name):
    """The rest of the model is converted."""
    make, call = PARTLY[name]
    model = kfac.convert(make(), example=ROWS[0], method=call)
    said = complaint(model, call)
    assert "fields of an `eqx.Module`" in said and FOLLOW not in said
    traced(model, call, fallback=optax.sgd(0.1))


def test_advice_for_parts():
    held = Held({"w": jnp.ones((2, 3)), "b": jnp.ones(2)})
    traced(kfac.convert(WithModule(linear(3, 3), held), example=ROWS[0]))
    then = jtu.Partial(of_parameter, kfac.Parameter(jnp.ones((2, 3))))
    traced(kfac.convert(WithPartial(linear(3, 3), then), example=ROWS[0]))


def test_modules_are_followed_in_any_tree():
    """What is in no module is told from what is in one that was left out."""
    model = kfac.convert(
        [Held({"w": jnp.ones((2, 3)), "b": jnp.ones(2)}), linear(3, 3), jnp.ones(2)],
        {"[0]": None},
        example=ROWS[0],
        method=lambda model, x: model[0](model[1](x)) * model[2],
    )
    said = complaint(model, lambda model, x: model[0](model[1](x)) * model[2])
    assert FOLLOW in said and "hold `[2]` in fields" in said


#
# Modules with a tag that their class was written with
#


class Own(eqx.Module):
    """A tag for one of two arrays."""

    weight: Array
    scale: Array
    tag: kfac.Tag
    bias: None = None

    def __call__(self, x):
        return self.tag(self.weight @ x, x) * self.scale


class OwnBoth(eqx.Module):
    """What is advised: a tag for the other one, too."""

    weight: Array
    scale: Array
    tag: dict[str, kfac.Tag]
    bias: None = None

    def __call__(self, x):
        scale = self.tag["scale"].parameters(self, x).scale
        return self.tag["weight"](self.weight @ x, x) * scale


class Around(eqx.Module):
    weight: Array
    inner: eqx.Module
    tag: kfac.Tag
    bias: None = None

    def __call__(self, x):
        h = self.inner(x)  # pyright: ignore
        return self.tag(self.weight @ h, h)


class Raw(eqx.Module):
    weight: Array

    def __call__(self, x):
        return self.weight @ x


def test_arrays_beside_a_tag():
    scale = jnp.ones(2)
    said = complaint(kfac.convert(Own(jnp.ones((2, 3)), scale, of()), example=ROWS[0]))
    assert "give `.scale` tags" in said and FOLLOW not in said
    tags = {"weight": of(), "scale": of(kfac.form.Parameters(scale=1))}
    tags["scale"] = kfac.Tag(kfac.form.Parameters(scale=1), kfac.Diagonal())
    traced(kfac.convert(OwnBoth(jnp.ones((2, 3)), scale, tags), example=ROWS[0]))


@pytest.mark.parametrize(
    "inner, advised",
    [
        (linear(3, 3), lambda: kfac.convert(linear(3, 3))),
        (Raw(jnp.ones((3, 3))), lambda: kfac.Linear(3, 3, key=jr.key(0))),
    ],
)
def test_layers_within_such_a_module(inner, advised):
    around = lambda inner: Around(jnp.ones((2, 3)), inner, of())
    said = complaint(kfac.convert(around(inner), example=ROWS[0]))
    assert "one around it, has a tag of its own" in said and FOLLOW not in said
    traced(kfac.convert(around(advised()), example=ROWS[0]))


class Several(eqx.Module):
    """Layers that cannot be converted, and one that can."""

    own: eqx.Module
    value: eqx.Module | Array
    theirs: kfac.Linear

    def passed_by(self, x):
        value = self.value if eqx.is_array(self.value) else self.value.value
        return (self.own.weight @ (x * value))[:2] + self.theirs.weight @ x

    def both(self, x):
        value = self.value(x)
        return (self.own(x) * value)[:2] + self.theirs(x) + self.passed_by(x)


def several():
    own = Around(jnp.ones((3, 3)), kfac.Linear(3, 3, key=jr.key(0)), of())
    theirs = kfac.Linear(3, 2, use_bias=False, key=jr.key(0))
    return Several(own, kfac.Parameter(jnp.ones(3)), theirs)


@pytest.mark.parametrize("method", ["passed_by", "both"])
def test_uses_beside_such_a_tag(method):
    """`revert` and `blocks` do not take it off: which is only said of other layers."""
    call = lambda model, x: getattr(model, method)(x)
    said = complaint(several(), call)
    theirs, own = said.split("layers `.own.tag`", 1)
    assert "kfac.revert" in theirs and "blocks={'.theirs': None}" in theirs
    assert "kfac.revert" not in own and "blocks=" not in own
    assert "`.value`" in own and FOLLOW in own and "without a tag" in own
    with pytest.raises(ValueError, match="a class was written with stays"):
        kfac.convert(several(), {".own": None})


def test_advice_for_such_uses():
    x = ROWS[0]
    own = Several(
        Raw(jnp.ones((3, 3))),
        jnp.ones(3),
        kfac.Linear(3, 2, use_bias=False, key=jr.key(0)),
    )
    call = lambda model, x: model.passed_by(x)
    followed = kfac.convert(kfac.revert(own), example=x, method="passed_by")
    assert not kfac.summary(followed).untagged
    traced(followed, call)
    blocks = {".theirs": None}
    untagged = kfac.convert(kfac.revert(own), blocks, example=x, method="passed_by")
    assert set(kfac.summary(untagged).untagged) == {".theirs.weight"}
    traced(untagged, call, fallback=optax.sgd(0.1))


def test_layers_that_are_tagged_already():
    """`blocks` are for what is converted now."""
    model = kfac.convert([linear(2, 3)])
    with pytest.raises(ValueError, match=r"convert `kfac\.revert\(model\)`"):
        kfac.convert(model, {"[0]": None})
    assert set(kfac.summary(kfac.convert(kfac.revert(model), {"[0]": None})).untagged)
    np.testing.assert_array_equal(kfac.revert(model)[0].weight, model[0].weight)


class Two(eqx.Module):
    """A module of arrays, in which there may be another one."""

    weight: Array
    scale: Array
    inner: eqx.Module | None = None

    def __call__(self, x):
        x = x if self.inner is None else self.inner(x)  # pyright: ignore
        return self.weight @ x * self.scale

    def doubled(self, x):
        return self.weight.T @ (self.weight @ x)


@pytest.mark.parametrize("nested", [False, True])
def test_advice_for_arrays(nested):
    """The paths that are shown are those that `blocks` takes: of what a loss function
    uses in another way than with the example."""
    inner = Two(jnp.ones((3, 3)), jnp.ones(3)) if nested else None
    model = Two(jnp.ones((2, 3)), jnp.ones(2), inner)
    converted = kfac.convert(model, example=ROWS[0])
    call = lambda model, x: model(x) + (model.weight * 2)[:, 0] + model.scale
    said = complaint(converted, call)
    assert FOLLOW not in said and "kfac.revert" not in said  # As it was done.
    blocks = eval(said.split("blocks=")[1].split(")`")[0])
    untagged = kfac.convert(model, blocks, example=ROWS[0])
    assert set(kfac.summary(untagged).untagged) == {".weight", ".scale"}
    if nested:  # Else, nothing has a tag any more.
        traced(untagged, call, fallback=optax.sgd(0.1))
    paths = {line.path: kfac.Full() for line in kfac.summary(converted).layers}
    assert len(paths) == (4 if nested else 2)
    full = kfac.summary(kfac.convert(model, paths, example=ROWS[0])).layers
    assert {line.path: line.block for line in full} == dict.fromkeys(paths, "Full")


CELLS = {
    "gru": lambda: eqx.nn.GRUCell(3, 2, key=jax.random.key(0)),
    "weight norm": lambda: eqx.nn.WeightNorm(eqx.nn.Linear(3, 2, key=jax.random.key(0))),
}


@pytest.mark.parametrize("name", CELLS)
def test_layers_tagged_at_a_zero_keep_their_tags(name):
    """An example shows that the results of these bypass the tags, which is no mistake."""
    layer = eqx.filter_jit(CELLS[name])()
    args = (np.ones(3), np.zeros(2))[: 2 if name == "gru" else 1]
    plain = kfac.convert(layer)
    by_example = kfac.convert(layer, example=args)
    assert by_example.tag == plain.tag and len(plain.tag) > 1
