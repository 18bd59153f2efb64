"""What a loss function does with the layers of a model, checked before it runs.

Statistics are right if all of a layer's parameters reach the losses through its tag, if
the examples are where the tag expects them, and if nothing but tags notices the slots. So
the loss function is traced, and its program interpreted. A second trace has more zeros in
the tags than the first: the losses have to be the same expressions."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.tree_util as jtu

from .._block import AbstractJointBlock, AbstractPerExampleBlock
from .._custom_types import Args, Kwargs, Model
from .._devices import check_tracked
from .._misc import names
from .._tag import (
    check_tagged,
    Label,
    row_weights,
    Tag,
    TaggedLayer,
    with_tags,
)
from ..form import Parameters
from ..nn._convert import has_own_tag, is_followed
from ._interpreter import all_sources, Expressions
from ._trace import (
    LabelledModel,
    numbered,
    source_of,
    STATISTIC,
    TagUse,
    Trace,
    traced,
    unseen_of,
)


class Program(NamedTuple):
    """How the tags of a model are to be filled for a loss function.

    **Fields:**

    - `examples`: how many there are, of every loss; none if no tag has to know.
    - `per_example`: the tags, by number, whose slots are for single examples' gradients,
        and how many examples these are (on this device). Their layers may be used more
        than once by an example, and their block squares the gradients of examples.
    - `axes`: of a `shard_map`, over which these examples are split.
    - `regularised`: whether the gradient has a part from an `L2` term.
    - `rows`: how many rows each use of each tag has, by the tag's number.
    - `joint`: the tags, by number, that add up gradients over an example's positions.
    """

    examples: tuple[int, ...] = ()
    per_example: tuple[tuple[int, int], ...] = ()
    axes: frozenset = frozenset()
    regularised: bool = False
    rows: tuple[tuple[int, ...], ...] = ()
    joint: frozenset[int] = frozenset()


def analyse(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    uses: bool = True,
    trains: bool = False,
) -> Program:
    """What a loss function does with the tags of a model. With `uses`, parameters must
    not pass by them; with `trains`, there must be no layers that it does not use at all.

    **Raises:** `ValueError`, naming layers by their path, for a program whose curvature
    would not be right.
    """
    check_tracked()
    check_tagged(model)
    labelled = LabelledModel.of(model)
    again = ft.partial(traced, loss_fn, labelled, args, kwargs, Expressions())
    trace = again()
    _check_unnoticed(trace, again(decoys=True))
    examples = ()
    if any(map(trace.may_serve_several, trace.uses)):
        # Tags that know the number of examples give what is the same for all of these an
        # axis for them.
        examples, before = trace.examples, trace
        trace = again(examples=examples)
        _check_shared(trace, before)
    if uses:
        _check_uses(trace, trains)
    _check_examples(trace)
    per_example = dict(_used_repeatedly(trace))
    split = [use.axes for use in trace.uses if use.number in per_example]
    axes = frozenset().union(*split)
    numbers = range(len(trace.layers))
    rows = tuple(tuple(use.rows for use in trace.uses_of(n)) for n in numbers)
    joint = frozenset(n for n in numbers if _is_joint(trace, n))
    return Program(
        examples, tuple(per_example.items()), axes, trace.regularised, rows, joint
    )


def with_labels(filled: Model, program: Program) -> Model:
    """A model whose tags are ready to collect, with the labels and the slots that a
    program asks for."""
    if not (program.examples or program.per_example or program.joint):
        return filled
    numbers = numbered(filled)
    per_example = dict(program.per_example)

    def prepare(tag, layer, number):
        if number is None or not tag.collecting:
            return tag
        if number in per_example and jtu.tree_leaves(tag.slots):
            tag = tag.per_example(layer, per_example[number], program.axes)
        elif number in program.joint and jtu.tree_leaves(tag.slots):
            tag = tag.jointly(layer)
        label = Label(0, number, program.examples)
        return tag.labelled(layer, label) if program.examples else tag

    return with_tags(prepare, filled, numbers)


def _check_unnoticed(trace: Trace, again: Trace) -> None:
    """Raises if the losses depend on what tags hold, or on how much that is."""
    changed = [
        path
        for path, value in trace.everything.items()
        if value.sources & STATISTIC
        or value.expression != again.everything[path].expression
    ]
    if changed:
        raise ValueError(
            "The loss function would return something else while curvature is "
            f"collected (in its result, {names(changed)}): it works on all arrays of the "
            "model, among which are then zeros and statistics that its tags hold. Means, "
            "counts, random numbers for every array, and gradients with respect to the "
            "whole model do not leave them alone. Give these computations "
            "`kfac.revert(model)`, the model without tags."
        )


def _check_uses(trace: Trace, trains: bool) -> None:
    """Raises if parameters pass by their tag, naming all such layers."""
    outputs = all_sources(trace.outputs)
    unseen, outside, uncalled, unused, untagged = [], [], [], [], []
    for number, own in enumerate(trace.layers):
        uses = trace.uses_of(number)
        bypassing = outputs & source_of(number)
        if outputs & unseen_of(number):
            unseen.append(own)
        elif bypassing and is_followed(own.layer) and not _at_zero(uses):
            outside.append(own)
        elif not uses and bypassing:
            uncalled.append(own)
        elif not uses and trains and not trace.opaque and number not in trace.dead:
            unused.append(own)
        elif bypassing and not _at_zero(uses):
            untagged.append(own)
    if unseen:
        raise ValueError(_through_derivatives(unseen))
    kinds = (
        (outside, _OUTSIDE),
        (uncalled, _UNCALLED),
        (untagged, _UNTAGGED),
        (unused, _UNUSED),
    )
    messages = [_about(layers, text) for layers, text in kinds if layers]
    if messages:
        raise ValueError(" ".join(messages))


def _at_zero(uses: list[TagUse]) -> bool:
    """Whether there are uses, with a tag at a zero that is added to the result: what
    bypasses it is the result itself."""
    return bool(uses) and all(use.at_zero for use in uses)


_OUTSIDE = (
    "Arrays of the {layers} reach the losses in another way than `kfac.convert` saw with "
    "its `example`, where no tag follows them: {parameters} are used outside of the "
    "methods of their module, or multiply something else there. Use them in a method; "
    "convert the model with the method that the loss function calls, "
    "`kfac.convert(model, example=x[0], method=...)`; or leave them untagged, "
    "`kfac.convert(model, example=x[0], blocks={blocks})`, with a `fallback`."
)
_UNCALLED = (
    "The {layers} {are} trained, but the loss function never calls {them}: {parameters} "
    "are used in another way, of which no curvature is collected. Call {them}; or "
    "{otherwise}"
)
_UNTAGGED = (
    "Parameters of the {layers} reach the losses by another way than through {a_tag}, "
    "and no curvature would be collected of that: {parameters} are used outside of the "
    "layer, or a derivative of the layer in its parameters is. Call the layer instead; "
    "tie weights with `eqx.nn.Shared`; or {otherwise}"
)
_UNUSED = (
    "The {layers} {are} trained, but the loss function never calls {them}. Freeze what "
    "is not used (`eqx.partition` it out of the model that is trained), or remove it."
)
_FOLLOWED = (
    "take gradients within the loss with respect to `kfac.revert(model)`; or have tags "
    "follow the arrays, whatever is done with them: `kfac.convert(kfac.revert(model), "
    "example=x[0])`, with what one call of the model gets; or leave {them} untagged, "
    "`kfac.convert(kfac.revert(model), blocks={blocks})`, with a `fallback`."
)
_OWN = (
    "write {them} without a tag of {its} own (an array in the place of a "
    "`kfac.Parameter`), so that tags can follow the arrays, whatever methods do with "
    "them: `kfac.convert(model, example=x[0])`, with what one call of the model gets. "
    "(A tag that a class was written with stays, whatever is converted.)"
)


def _about(layers: list[TaggedLayer], text: str) -> str:
    """What is to be said of some layers: first of those that can be converted in another
    way."""
    own = [layer for layer in layers if has_own_tag(layer.layer)]
    others = [layer for layer in layers if not has_own_tag(layer.layer)]
    both = (others, _FOLLOWED), (own, _OWN)
    return " ".join(_about_alike(some, text, way) for some, way in both if some)


def _about_alike(layers: list[TaggedLayer], text: str, otherwise: str) -> str:
    paths = [path for path, _, _ in layers]
    one = len(paths) == 1
    parameters = [n for _, tag, _ in layers for n in tag.form.names]
    words = dict(
        layers=("layer " if one else "layers ") + names(paths),
        are="is" if one else "are",
        them="it" if one else "them",
        its="its" if one else "their",
        a_tag="the layer's tag" if one else "the layers' tags",
        parameters=("its" if one else "their")
        + " parameters "
        + names(_once(parameters)),
        blocks=_untagged(paths),
    )
    return text.format(**words, otherwise=otherwise.format(**words))


def _untagged(paths: list[str]) -> str:
    """The argument of `kfac.convert` that leaves some layers as they are."""
    return "{" + ", ".join(f"{path!r}: None" for path in paths[:8]) + "}"


def _once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _through_derivatives(layers: list[TaggedLayer]) -> str:
    """What is to be said of layers whose derivatives are trained through."""
    paths = [path for path, _, _ in layers]
    which = "layer" if len(layers) == 1 else "layers"
    whose = "its" if len(layers) == 1 else "their"
    last = f"leave the {which} untagged, `kfac.convert(kfac.revert(model), blocks="
    last += f"{_untagged(paths)})`"
    if any(has_own_tag(layer) for _, _, layer in layers):
        last = f"write the {which} without a tag"
    return (
        f"The losses are trained through a derivative of the {which} {names(paths)} in "
        f"{whose} input, of which no curvature would be collected: "
        f"{_unseen(layers[0].tag)}. Where the losses should not be trained through it, "
        f"stop it (`jax.lax.stop_gradient`). As a last resort, {last}, with a `fallback`."
    )


def _unseen(tag: Tag) -> str:
    """Why a tag does not see a derivative, and what to do."""
    form, block = tag.form.label, type(tag.block).__name__
    if not tag.form.linear:
        return (
            f"its form, `{form}`, does not say that the layer is linear in its input "
            "(`linear = True`), up to a bias"
        )
    if not tag.block.derivatives:
        return (
            f"its block, `{block}`, does not say that it knows of rows without a bias "
            "(`derivatives = True`); `kfac.Kronecker()` does"
        )
    return (
        "it is taken in reverse mode. Take it forward, which gives the same numbers: "
        "`jax.jacfwd(u)` in the place of `jax.grad(u)` or `jax.jacrev(u)`, "
        "`jax.jacfwd(jax.jacfwd(u))` in that of `jax.hessian(u)`; or `jax.jvp`, "
        "`jax.linearize`, `jax.experimental.jet`"
    )


def _check_shared(trace: Trace, before: Trace) -> None:
    """Raises if rows belong to several examples. A layer that is called inside of the
    `vmap` over the examples, if on constants, has got their axis since `before`."""
    for old, use in zip(before.uses, trace.uses, strict=True):
        path, tag, _ = trace.layers[use.number]
        if not trace.may_serve_several(use):
            continue
        unchanged = trace.is_constant(use) and use.examples == old.examples
        if unchanged or trace.has_few_rows(use):
            raise ValueError(
                f"The layer `{path}` is called outside of the `vmap` over the "
                f"{trace.examples[0]} examples ({_seen(use)}), so that what it returns "
                "serves several of them, whose gradients would be added up before they "
                f"are squared. {_inside(tag)}"
            )


def _inside(tag: Tag) -> str:
    """How a layer is to be called."""
    if isinstance(tag.form, Parameters):  # As that of a `kfac.Parameter` is.
        return (
            "Call it inside, with what belongs to one example, as in `x + "
            "self.position(x)`: what depends on its value is to be computed there, too."
        )
    return (
        "Call it inside, where it may well be given the same for every example; or make "
        "an array that is only looked up a `kfac.Parameter`."
    )


def _check_examples(trace: Trace) -> None:
    """Raises if the examples are not where the tags expect them."""
    for use in trace.uses:
        path, tag, _ = trace.layers[use.number]
        block = tag.block
        if use.context.in_custom_jvp and trace.is_conditional(use):
            raise ValueError(
                f"The layer `{path}` is called on a condition that is another one for "
                "each example, within a `custom_jvp`: also the inputs of examples that "
                "do not use the layer would enter its curvature. Leave out the "
                "`custom_jvp`, or put it around a part of the function without layers."
            )
        weighted = trace.weights is not None and block.weighted
        if not (weighted or block.mixes_positions):
            continue
        what = "the examples have weights"
        if block.mixes_positions:
            what = f"its block, `kfac.{type(block).__name__}`, tells examples apart"
        if (
            not trace.has_example_axis(use)
            or trace.splits_examples(use)
            or _is_ambiguous(trace, use)
        ):
            raise ValueError(
                f"Cannot tell which axis of the layer `{path}` counts the examples "
                f"({_seen(use)}; the losses have {trace.examples[0]}), but {what}. The "
                "batch has to be the outermost `vmap` around the layer, not a loop, and "
                "not outside of a function with a derivative of its own (`custom_vjp`). "
                "Write it so, or give the layer the block `kfac.Kronecker(weighted="
                "False)`, which takes every row by itself."
            )
        if weighted:
            _check_weights(trace, use, path)


def _is_ambiguous(trace: Trace, use: TagUse) -> bool:
    """Whether a loop around a use goes round as often as there are examples, so that it
    may be over these, and the axis that looks like them something else."""
    lengths = {n for n in trace.examples if n > 1} & {*use.context.loops}
    return bool(lengths) and use.examples != () and trace.repeats(use)


def _check_weights(trace: Trace, use: TagUse, path: str) -> None:
    members, shape = use.x.shape[: use.stack], trace.weights.shape
    if use.axes:  # Devices take their part of them.
        shape = (*use.examples[:1], *shape[1:])
    weights = jax.ShapeDtypeStruct(members + shape, trace.weights.dtype)
    axes = use.stack + len(use.examples)
    try:
        jax.eval_shape(lambda w, x: row_weights(w, x, use.stack, axes), weights, use.x)
    except ValueError as error:
        error.add_note(f"The layer is `{path}` of the model.")
        raise


def _seen(use: TagUse) -> str:
    """How a tag is used, in words."""
    seen = f"it sees axes of lengths {use.examples}"
    if use.context.loops:
        seen += f", in loops of lengths {use.context.loops}"
    return seen + (", in a `custom_vjp`" if use.context.custom_derivative else "")


def _used_repeatedly(trace: Trace) -> Iterator[tuple[int, int]]:
    """The tags of layers that an example may use more than once, if their block squares
    examples' gradients: these are to be added up before."""
    for number, (path, tag, _) in enumerate(trace.layers):
        uses = trace.uses_of(number)
        several = len(uses) > 1 or any(map(trace.repeats, uses))
        if not several or not isinstance(tag.block, AbstractPerExampleBlock):
            continue
        if any(map(trace.is_looped_over, uses)):
            if len(uses) == 1:  # Once in the loop over the examples.
                continue
            raise ValueError(
                f"The layer `{path}` is used several times in a loop over the examples, "
                f"but its block, `kfac.{type(tag.block).__name__}`, squares the "
                "gradients of examples. Make the loop a `vmap`, or use "
                "`kfac.Kronecker()` for the layer."
            )
        axes = tag.block.batch_axes  # pyright: ignore
        numbers = {math.prod(use.examples[:axes]) for use in uses}
        if len(numbers) > 1:
            raise ValueError(
                f"The layer `{path}` is used several times, for different numbers of "
                f"examples ({sorted(numbers)}), but its block, "
                f"`kfac.{type(tag.block).__name__}`, squares the gradients of examples. "
                "Use `kfac.Kronecker()` for it."
            )
        yield number, numbers.pop()


def _is_joint(trace: Trace, number: int) -> bool:
    """Whether a tag may add up the gradients of an example's positions, and it is known
    which these are: it is used once, by examples that all are along one axis."""
    _, tag, layer = trace.layers[number]
    uses = trace.uses_of(number)
    if not isinstance(tag.block, AbstractJointBlock) or len(uses) != 1:
        return False
    if not tag.block.takes_jointly(tag.form.sizes(layer)):
        return False
    (use,) = uses
    if trace.repeats(use) or trace.splits_examples(use) or trace.is_constant(use):
        return False
    if use.derivative or use.examples == () or not trace.has_example_axis(use):
        return False
    if trace.may_serve_several(use) or _is_ambiguous(trace, use):
        return False
    return _positions(tag, use) > 1


def _positions(tag: Tag, use: TagUse) -> int:
    """How many positions an example has in a use."""
    axes = use.stack + len(use.examples)
    inputs = jax.eval_shape(
        lambda x: tag.form.inputs(x, use.stack, axes).vectors(), use.x
    )
    return math.prod(inputs.shape[use.stack + tag.form.groups + 1 : -1])
