"""Which layers may add up the gradients at the positions of an example, and those of its
uses of the layer, before they are squared."""

import math
from collections.abc import Iterator

import jax

from .._block import AbstractJointBlock
from .._tag import Tag
from ._trace import TagUse, Trace


# How many numbers the gradients of all examples may be, or the inputs of one use: if
# there are several uses, these are written out, and added to at every use.
_MOST = 2**21


def joint_layers(trace: Trace, parts: int) -> Iterator[tuple[int, int | None]]:
    """The numbers of the tags whose block can do so, and of which it is known which rows
    are those of one example; each with the number of the examples, if the layer is used
    several times, or in a loop, or else `None`. The trace is that of one of so many
    `parts` of a batch, on whose number nothing of this is to depend."""
    for number, (_, tag, layer) in enumerate(trace.layers):
        uses = trace.uses_of(number)
        if not uses or not isinstance(tag.block, AbstractJointBlock):
            continue
        if not tag.block.takes_jointly(tag.form.sizes(layer)):
            continue
        if trace.is_reused(number):
            examples = _joined_examples(trace, number, parts)
            if examples is not None:
                yield number, examples
        elif _is_known(trace, uses[0]) and _positions(tag, uses[0]) > 1:
            yield number, None


def _is_known(trace: Trace, use: TagUse) -> bool:
    """Whether the rows of a use are those of the examples, along the first of its axes,
    as far as anybody can tell."""
    # First it is asked whether the layer is called for some of the examples, or for none;
    # then whether its rows are plain rows along an axis of examples; and then whether
    # this axis may also be something else.
    if trace.splits_examples(use) or trace.is_constant(use):
        return False
    if use.derivative or use.example_shape == () or not trace.has_example_axis(use):
        return False
    if trace.may_serve_several(use) or trace.is_ambiguous(use):
        return False
    as_long = use.example_shape[0] in use.example_shape[1:]
    if as_long and not trace.counts_examples(use):
        return False
    return trace.has_whole_examples(use)


def _joined_examples(trace: Trace, number: int, parts: int) -> int | None:
    """How many examples there are, if it is certain for every use of a layer that its
    rows are theirs, in their order, and there is not too much to be written out."""
    _, tag, layer = trace.layers[number]
    uses, sizes = trace.uses_of(number), tag.form.sizes(layer)
    if not all(_is_known(trace, use) and _is_certain(trace, use) for use in uses):
        return None
    if any(use.devices > 1 for use in uses):  # Nobody has room for all examples there.
        return None
    numbers = {use.example_shape[0] for use in uses}
    if len(numbers) > 1:
        return None
    examples = numbers.pop()
    longest = max(sizes.d_out, *(_positions(tag, use) for use in uses))
    written = math.prod(sizes.stack) * parts * examples * longest * (sizes.d_in + 1)
    return examples if written <= _MOST else None


def _is_certain(trace: Trace, use: TagUse) -> bool:
    """Whether nothing else is possible. (All rows are those of a single example.)"""
    if trace.examples == (1,):
        return use.example_shape[0] == 1
    return trace.is_certain(use)


def _positions(tag: Tag, use: TagUse) -> int:
    """How many positions an example has in a use."""
    axes = use.stack + len(use.example_shape)
    inputs = jax.eval_shape(
        lambda x: tag.form.inputs(x, use.stack, axes).vectors(), use.x
    )
    # First come stacked layers, then the axis of a grouped layer's groups, if it has any,
    # then the batch. The last axis is that of the features.
    batch_axis = use.stack + tag.form.groups
    return math.prod(inputs.shape[batch_axis + 1 : -1])
