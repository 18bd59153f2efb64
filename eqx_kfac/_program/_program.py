"""What a loss function does with the layers of a model, checked before it runs.

While curvature is collected, the tags of a model hold zeros, their *slots*: the loss is
differentiated with respect to the slots, and statistics are what this gives. They are
right under three conditions.

- All parameters of a layer reach the losses through its tag: none *bypasses* it. (A layer
  that is tagged at a zero is an exception: see `_tag/_primitive.py`.)
- The tag can tell examples apart, where it has to: they are the outermost axis along
  which the layer is mapped, or the gradients of one example at all uses of the layer are
  added up in slots for each example.
- The losses do not change with the zeros that the tags hold.

So the loss function is traced, and its program interpreted. For the third condition, it
is traced once more with more zeros in the tags, the *decoys*: the losses have to be the
same expressions in both traces."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.tree_util as jtu

from .._block import AbstractPerExampleBlock, Kronecker
from .._custom_types import Args, Kwargs, Model
from .._devices import check_tracked
from .._fisher import AbstractFisher
from .._misc import names
from .._tag import check_tagged, Label, row_weights, Tag, with_tags
from ..form import Parameters
from ._bypass import check_uses
from ._interpreter import Expressions
from ._joint import joint_layers
from ._trace import STATISTIC, TagUse, Trace
from ._tracing import LabelledModel, numbered, traced


class Program(NamedTuple):
    """How the tags of a model are to be filled for a loss function.

    **Fields:**

    - `examples`: the numbers of examples of the losses.
    - `lacking`: the numbers of the tags that have to know `examples`, because their layer
        gets the same input for all examples of the `vmap` over them.
    - `per_example`: the numbers of the tags whose slots are for the gradients of single
        examples, each with the number of these examples (on this device). An example may
        use the layer of such a tag more than once, and the tag's block squares the
        gradients of examples, which are to be added up over all uses before.
    - `axes`: the axes of a `shard_map` over which these examples are split.
    - `regularised`: whether the gradient has a part from an `L2` term.
    - `rows`: for each tag, by its number, the number of rows of each use.
    - `joint`: the numbers of the tags that add up gradients over the positions of an
        example (and over its uses of the layer, if they are among `per_example`, too).
    - `reverse`: the numbers of the tags of which some use is a derivative in reverse
        mode.
    - `uncentred`: the paths of those of them with a block from which no mean may be
        subtracted then.
    - `convolves`: whether there is any convolution in the loss function.
    - `inner`: whether the loss function takes derivatives with respect to the model
        itself, slots and all.
    - `shared`: the paths of the layers whose rows serve several examples at once.
    - `unsure`: the numbers of the tags of which it is certain for one loss, but not for
        another, which axis is that of the examples.
    - `mixing`: the paths of those of them whose block adds up the gradients of an
        example.
    """

    examples: tuple[int, ...] = ()
    lacking: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    per_example: tuple[tuple[int, int], ...] = ()
    axes: frozenset = frozenset()
    regularised: bool = False
    rows: tuple[tuple[int, ...], ...] = ()
    joint: frozenset[int] = frozenset()
    reverse: frozenset[int] = frozenset()
    uncentred: tuple[str, ...] = ()
    convolves: bool = False
    inner: bool = False
    shared: tuple[str, ...] = ()
    unsure: frozenset[int] = frozenset()
    mixing: tuple[str, ...] = ()

    @property
    def wants_separation(self) -> bool:
        """Whether estimates in which every example has a cotangent of its own say more
        than others: these would square the sums of several examples' gradients, or take
        rows for independent that are not."""
        return bool(self.shared or self.mixing or self.joint & self.unsure)

    def collecting(self, fisher: AbstractFisher) -> "Program":
        """The program for an estimate of the curvature. If the estimate has one cotangent
        for several positions of an example at once, each with a column of its own, the
        gradients at these positions are squared one by one, and no layer is joint. If it
        has one for all examples, no layer is joint of which nobody knows for one of the
        losses which rows are those of an example.

        **Raises:** `ValueError`, if it adds up the gradients of several examples where
        these share a row, or may do so in some of the losses."""
        if self.shared and not fisher.separates_examples:
            raise ValueError(
                f"What the layers {names(self.shared)} return serves several examples at "
                f"once, whose gradients `kfac.{fisher.name}` would add up before they "
                "are squared. Call them inside of the `vmap` over the examples, where "
                "their input may well be the same for all; or use `kfac.MonteCarlo()`, "
                "which draws for every example by itself, so that in the mean only the "
                "squares are left."
            )
        if self.mixing and not fisher.separates_examples:
            raise ValueError(
                f"The blocks of the layers {names(self.mixing)} add up the gradients of "
                "an example, but in one of the losses, nobody can tell which rows belong "
                f"to one of its terms, and `kfac.{fisher.name}` has one cotangent for "
                "all of these. Keep the axis of the examples in the outputs of every "
                "loss (do not join it with others); or use `kfac.MonteCarlo()`, which "
                "draws for every term by itself."
            )
        if self.uncentred and fisher.centred:
            raise ValueError(
                f"`kfac.{fisher.name}` takes the mean of examples' gradients away, which "
                f"the blocks of {names(self.uncentred)} do not know where weights "
                "act transposed, as in derivatives in reverse mode. Use `kfac.TNT()`, "
                "`kfac.Full()` or `kfac.Diagonal()`; or `kfac.Exact()`."
            )
        joint = self.joint
        if fisher.joins_positions:
            joint = frozenset()
        elif not fisher.separates_examples:
            joint -= self.unsure
        left = self.joint - joint
        per_example = tuple(p for p in self.per_example if p[0] not in left)
        return self._replace(joint=joint, per_example=per_example)


def analyse(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    uses: bool = True,
    trains: bool = False,
    parts: int = 1,
) -> Program:
    """What a loss function does with the tags of a model. With `uses`, no parameters may
    bypass a tag; with `trains`, the loss function must use every layer. The arguments are
    one of so many `parts` of a batch.

    **Raises:** `ValueError`, naming layers by their path, for a program whose curvature
    would not be right.
    """
    check_tracked()
    check_tagged(model)
    labelled = LabelledModel.of(model)
    expressions = Expressions()

    def trace_with(*known, **options):
        filled = labelled.with_labels(*known, **options)
        return traced(loss_fn, labelled, filled, args, kwargs, expressions)

    before, trace, lacking = _with_examples(trace_with)
    # Where an array that is used for all examples at once meets data, there are copies of
    # it for all of them, which can be tagged in place of its value.
    copied = frozenset(
        use.number
        for use in _outside(before, trace)
        if isinstance(trace.layers[use.number].tag.form, Parameters)
    )
    if copied:
        trace_with = ft.partial(trace_with, copied=copied)
        before, trace, lacking = _with_examples(trace_with)
    _check_unnoticed(before, trace_with(decoys=True))
    _check_shared(before, trace)
    if uses:
        check_uses(trace, trains)
    _check_examples(trace)
    return _of(trace, lacking, copied, parts)


def _of(
    trace: Trace, lacking: frozenset[int], copied: frozenset[int], parts: int
) -> Program:
    """The program that a trace shows."""
    joint = dict(joint_layers(trace, parts))
    repeated = {n: examples for n, examples in joint.items() if examples is not None}
    per_example = dict(_used_repeatedly(trace)) | repeated
    split = [use.device_axes for use in trace.uses if use.number in per_example]
    axes = frozenset().union(*split)
    numbers = range(len(trace.layers))
    rows = tuple(tuple(use.rows for use in trace.uses_of(n)) for n in numbers)
    shared = [trace.layers[u.number].path for u in trace.uses if trace.is_shared(u)]
    unsure = [u.number for u in trace.uses if trace.counts_some(u)]
    blocks = {n: trace.layers[n].tag.block for n in unsure}
    reverse = frozenset(use.number for use in trace.uses if use.reverse)
    products = {n for n in reverse if isinstance(trace.layers[n].tag.block, Kronecker)}
    mixing = [
        trace.layers[n].path for n, block in blocks.items() if block.mixes_positions
    ]
    return Program(
        examples=trace.examples,
        lacking=lacking,
        copied=copied,
        per_example=tuple(per_example.items()),
        axes=axes,
        regularised=trace.regularised,
        rows=rows,
        joint=frozenset(joint),
        reverse=reverse,
        uncentred=tuple(trace.layers[n].path for n in sorted(reverse & products)),
        convolves=trace.convolves,
        inner=trace.inner,
        shared=tuple(dict.fromkeys(shared)),
        unsure=frozenset(unsure),
        mixing=tuple(mixing),
    )


def with_labels(filled: Model, program: Program) -> Model:
    """A model whose tags are ready to collect, with the labels and the slots that a
    program asks for."""
    changes = program.per_example, program.joint, program.reverse
    labels = program.lacking, program.copied, program.inner
    if not any((*changes, *labels)):
        return filled
    numbers = numbered(filled)
    per_example = dict(program.per_example)

    def prepare(tag, layer, number):
        if number is None or not tag.collecting:
            return tag
        examples = per_example.get(number)
        if number in program.joint and jtu.tree_leaves(tag.slots):
            tag = tag.jointly(layer, examples, program.axes)
        elif examples is not None and jtu.tree_leaves(tag.slots):
            tag = tag.per_example(layer, examples, program.axes)
        if number in program.reverse and jtu.tree_leaves(tag.slots):
            tag = tag.reversible()
        lacks, copied = number in program.lacking, number in program.copied
        label = Label(0, number, program.examples if lacks else (), copied)
        return tag.labelled(layer, label) if lacks or copied or program.inner else tag

    return with_tags(prepare, filled, numbers)


def _found_lacking(trace: Trace, trace_with: Callable) -> frozenset[int]:
    """The numbers of the tags that doubtful uses show to lack the axis of the examples:
    if the tags know the number of examples, the axis that they add becomes that axis."""
    doubtful = trace.doubtful
    if not doubtful:
        return frozenset()
    try:
        knowing = trace_with(trace.examples, doubtful)
    except ValueError:
        # Derivatives are taken along an axis of `vmap`, too, which is as long by chance:
        # JAX does not expect the layer to have it.
        return frozenset()
    pairs = zip(trace.uses, knowing.uses, strict=True)
    return frozenset(
        new.number
        for old, new in pairs
        if old.example_shape != new.example_shape and knowing.counts_examples(new)
    )


def _with_examples(trace_with: Callable) -> tuple[Trace, Trace, frozenset[int]]:
    """A trace, and one in which some of the tags know the number of examples, and which
    tags these are.

    A layer whose input is the same for all examples of a `vmap` has no axis of them. If
    its tag knows the number of examples, it adds this axis, and sees the gradient of
    every example by itself."""
    trace = trace_with()
    lacking = trace.lacking | _found_lacking(trace, trace_with)
    if not lacking:
        return trace, trace, lacking
    knowing = trace_with(trace.examples, lacking)
    return trace, trace.with_uses_of(knowing, lacking), lacking


def _check_unnoticed(trace: Trace, with_decoys: Trace) -> None:
    """Raises if the losses depend on the arrays that tags hold: on a statistic, or on the
    number of zeros, which is higher `with_decoys`."""
    changed = [
        path
        for path, value in trace.everything.items()
        if value.sources & STATISTIC
        or value.expression != with_decoys.everything[path].expression
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


def _outside(before: Trace, trace: Trace) -> list[TagUse]:
    """The uses whose rows belong to several examples. In `before`, the tags did not know
    the number of examples. A layer that is called on constants inside of the `vmap` over
    the examples had no axis of examples there, and now has one; if its axes are the same
    in both traces, or known to be no examples, it is called outside."""
    found = []
    for old, use in zip(before.uses, trace.uses, strict=True):
        if not trace.may_serve_several(use):
            continue
        unchanged = use.example_shape == old.example_shape
        outside = unchanged or not trace.has_example_axis(use)
        if (outside and trace.is_constant(use)) or trace.has_few_rows(use):
            found.append(use)
    return found


def _check_shared(before: Trace, trace: Trace) -> None:
    """Raises if rows belong to several examples."""
    for use in _outside(before, trace):
        path, tag, _ = trace.layers[use.number]
        raise ValueError(
            f"The layer `{path}` is called outside of the `vmap` over the "
            f"{trace.examples[0]} examples ({_as_text(use)}), so that what it returns "
            "serves several of them, whose gradients would be added up before they are "
            f"squared. {_inside(tag)} (If its input is another one for each example, but "
            "made within the loss function, by `jnp.arange` say, pass it as an argument "
            "of the loss function.)"
        )


def _inside(tag: Tag) -> str:
    """How a layer is to be called."""
    if isinstance(tag.form, Parameters):  # A `kfac.Parameter` has this form.
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
        # Where JAX makes a condition of each example a selection, it stops the gradients,
        # and with them the statistics, of examples that do not use the layer; but what it
        # does inside of a `custom_jvp` is not differentiated.
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
        # Products between the positions of an example need to know which these are.
        if block.mixes_positions:
            what = f"its block, `kfac.{type(block).__name__}`, tells examples apart"
        if (
            not trace.has_example_axis(use)
            or trace.is_shared(use)
            or trace.splits_examples(use)
            or trace.is_ambiguous(use)
            or not trace.has_whole_examples(use)
        ):
            raise ValueError(
                f"Cannot tell which axis of the layer `{path}` counts the examples "
                f"({_as_text(use)}; the losses have {trace.examples[0]}), but {what}. "
                "The batch has to be the outermost `vmap` around the layer (or the first "
                "axis of what an array multiplies), not a loop, and not outside of a "
                "function with a derivative of its own (`custom_vjp`); and a `shard_map` "
                "has to split examples, not positions. "
                "Write it so, or give the layer the block "
                "`kfac.Kronecker(weighted=False)`, which takes every row by itself."
            )
        if weighted:
            _check_weights(trace, use, path)


def _check_weights(trace: Trace, use: TagUse, path: str) -> None:
    """Raises if it cannot be told which row of a use has which weight."""
    stack_shape, shape = use.x.shape[: use.stack], trace.weights.shape
    if use.device_axes:  # Each device takes its own part of the weights.
        shape = (*use.example_shape[:1], *shape[1:])
    weights = jax.ShapeDtypeStruct(stack_shape + shape, trace.weights.dtype)
    axes = use.stack + len(use.example_shape)
    try:
        jax.eval_shape(lambda w, x: row_weights(w, x, use.stack, axes), weights, use.x)
    except ValueError as error:
        error.add_note(f"The layer is `{path}` of the model.")
        raise


def _as_text(use: TagUse) -> str:
    """A use, in the words of an error."""
    text = f"it sees axes of lengths {use.example_shape}"
    if use.context.loops:
        text += f", in loops of lengths {use.context.loops}"
    if use.devices > 1:
        text += f", on each of {use.devices} devices"
    return text + (", in a `custom_vjp`" if use.context.custom_derivative else "")


def _used_repeatedly(trace: Trace) -> Iterator[tuple[int, int]]:
    """The numbers of the tags of layers that an example may use more than once, if their
    block squares the gradients of examples, each with the number of these examples. The
    gradients of an example are to be added up over the uses before they are squared."""
    for number, (path, tag, _) in enumerate(trace.layers):
        uses = trace.uses_of(number)
        if not isinstance(tag.block, AbstractPerExampleBlock):
            continue
        if not trace.is_reused(number):
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
        if any(use.devices > 1 for use in uses):
            raise ValueError(
                f"The layer `{path}` is used several times in a `shard_map` inside of "
                f"the loss function, but its block, `kfac.{type(tag.block).__name__}`, "
                "squares the gradients of examples, for which there is no room on any "
                "device. Put the `shard_map` around the whole step, or use "
                "`kfac.Kronecker()` for the layer."
            )
        # All blocks of this kind have the field, but their abstract class does not.
        axes = tag.block.batch_axes  # pyright: ignore
        numbers = {math.prod(use.example_shape[:axes]) for use in uses}
        if len(numbers) > 1:
            raise ValueError(
                f"The layer `{path}` is used several times, for different numbers of "
                f"examples ({sorted(numbers)}), but its block, "
                f"`kfac.{type(tag.block).__name__}`, squares the gradients of examples. "
                "Use `kfac.Kronecker()` for it."
            )
        yield number, numbers.pop()
