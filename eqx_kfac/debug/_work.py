"""How much work a loss function is, before it runs."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx

from .._custom_types import Args, Kwargs, Model
from .._jax import Equation
from .._loss import AbstractLoss
from .._program import run
from .._tag import flatten_tags, Label, label_of, tag_p, with_tags


class Work(NamedTuple):
    """What one evaluation of a loss function takes."""

    operations: float  # Multiplications and additions.
    numbers: float  # That all operations together return.
    called: frozenset[int]  # The tags that are called, whether or not anybody cares.
    losses: list[AbstractLoss]  # Shapes in the place of arrays.


def work(loss_fn: Callable, model: Model, args: Args, kwargs: Kwargs) -> Work:
    """Goes through the jaxpr of a loss function. A loop of unknown length counts once."""
    found, treedef = flatten_tags(lambda *_: None, model)
    numbers = treedef.unflatten(range(len(found)))

    def label(tag, layer, number):
        if number is None:
            return tag
        return tag.fill(layer, None).labelled(layer, Label(0, number, ()))

    noted = with_tags(label, model, numbers)

    def losses(model):
        return run(loss_fn, model, args, kwargs)[0].losses

    closed, *returned = eqx.filter_make_jaxpr(losses)(noted)
    operations, numbers, called = 0.0, 0.0, set()
    for eqn, times in _equations(closed.jaxpr, 1):
        if eqn.primitive is tag_p:
            own = label_of(eqn)
            called |= {own.number} if own is not None else set()
        size = sum(math.prod(v.aval.shape) for v in eqn.outvars)  # pyright: ignore
        operations += times * size * _per_number(eqn)
        numbers += times * size
    return Work(operations, numbers, frozenset(called), eqx.combine(*returned))


def _equations(value: Any, times: int) -> Iterator[tuple[Equation, int]]:
    """The equations of a jaxpr that have none inside, and how often each is evaluated."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _equations(item, times)
    for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = list(_equations(list(eqn.params.values()), times * length))
        yield from inner or [(eqn, times)]


def _per_number(eqn: Equation) -> float:
    """How many operations there are for each number that an equation returns."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape  # pyright: ignore
        return 2.0 * math.prod(shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape  # pyright: ignore
        out, *_ = eqn.params["dimension_numbers"].rhs_spec
        return 2 * math.prod(kernel) / kernel[out]
    return 1.0
