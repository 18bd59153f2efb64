"""What a trace of a loss function shows: which tags it uses, how it uses them, and on
which parameters its results depend.

Dependences are sets of sources, as the bits of an integer. One bit is for data. One is
for statistics: a loss function that takes a gradient with respect to the whole model
makes statistics, which are the gradient in what its tags hold. Two bits are for each tag:
the first for the parameters that the tag covers, the second for derivatives of the layer
that the tag does not see. A tag takes the first bit away from the output of its layer.
If a result depends on this bit all the same, the parameters reach it by another way than
through the tag: they *bypass* the tag. A third bit is set while a value is computed of
the parameters, and is not these themselves any more; and a fourth, for good, where the
layer is called with such a value in their place."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._tag import TaggedLayer
from ._interpreter import Context, Value
from ._reach import LACKING, parts_of, POOLED, Reach, SUMMED, terms_of


DATA, STATISTIC = 1, 2
FIRST_BIT_OF_TAGS = 2  # The place of the first bit that belongs to a tag.
_BITS = 4  # How many belong to each.


def parameter_bit(number: int) -> int:
    """The bit of the parameters that a tag covers."""
    return 1 << (FIRST_BIT_OF_TAGS + _BITS * number)


def unseen_bit(number: int) -> int:
    """The bit of the derivatives of a layer that its tag does not see."""
    return parameter_bit(number) << 1


def changed(parameters: int) -> int:
    """The bits of values that are computed of parameters, given the bits of these."""
    return parameters << 2


def unchanged(sources: int) -> int:
    """The sources without the bits of those parameters of which the value is computed."""
    return sources & ~(sources >> 2)


def misused_bit(number: int) -> int:
    """The bit of results for which a layer is called with changed parameters."""
    return parameter_bit(number) << 3


def axes_of_terms(shapes: Sequence[tuple[int, ...]]) -> list[range]:
    """The places of the axes of each loss's terms among those of all losses. If there are
    too many of these, losses are not told apart."""
    ends = [0, *itertools.accumulate(map(len, shapes))]
    if ends[-1] > SUMMED:
        return [range(len(shape)) for shape in shapes]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


class TagUse(NamedTuple):
    """A use of a tag.

    **Fields:**

    - `number`: the number of the tag.
    - `x`: the shape and type of the layer's input. Its first axes separate layers of a
        stack, the next ones are example axes, and the others belong to the layer itself.
    - `stack`: the number of axes of `x` that separate layers.
    - `example_shape`: the lengths of the example axes of `x`, from the outermost.
    - `context`: what surrounds the use.
    - `label_stack`: the number of stack axes of the tag's label: axes of the layer's
        stack that no loop slices, and one axis for each `vmap` that has made copies of
        the layer.
    - `at_zero`: whether the layer is tagged at a zero that is added to its result,
        instead of at the result itself (see `_tag/_primitive.py`).
    - `sources`: the sources that the layer's input depends on, and in a derivative, what
        it is taken along.
    - `device_axes`: the axes of a `shard_map` over which the rows are split.
    - `devices`: over how many devices that is.
    - `derivative`: whether this is a use of a derivative of the layer.
    - `reverse`: whether it is one in reverse mode.
    - `skipped`: the lengths of the axes of `vmap` along which neither the layer's input
        nor its output differs, so that the use does not have these axes.
    - `reach`: what the example axes and the loops become in the losses, if anything.
    """

    number: int
    x: jax.ShapeDtypeStruct
    stack: int
    example_shape: tuple[int, ...]
    context: Context
    label_stack: int
    at_zero: bool
    sources: int
    device_axes: frozenset
    devices: int
    derivative: bool
    reverse: bool
    skipped: tuple[int, ...]
    reach: Reach | None = None

    @property
    def rows(self) -> int:
        """The number of rows, for each layer of a stack."""
        return math.prod(self.example_shape)


class Trace(NamedTuple):
    """What one trace of a loss function shows.

    **Fields:**

    - `layers`: the layers with something to train. A tag's number is a position in this
        list.
    - `uses`: the uses of their tags that the outputs of the losses need, in the order of
        the program.
    - `term_shapes`: the shape of the terms of each loss, examples first.
    - `weights`: the shape and type of the examples' weights; `None` if there are none.
    - `outputs`: the values of the losses' outputs.
    - `everything`: the values of all that the objective consists of, by path.
    - `opaque`: whether there was any operation whose inside could not be interpreted.
    - `regularised`: whether there is an `L2` term.
    - `convolves`: whether there is any convolution.
    - `inner`: whether the loss takes derivatives with respect to the model itself, slots
        and all.
    - `dead`: the numbers of the tags that are called, but only for results that nothing
        uses.
    - `covered`: the bits of the parameters of which some uses are marked as covered by a
        tag at a zero.
    - `penalised`: the numbers of the tags that are called, but only for penalties, on
        which no output of a loss depends.
    """

    layers: list[TaggedLayer]
    uses: list[TagUse]
    term_shapes: tuple[tuple[int, ...], ...]
    weights: Any
    outputs: list[Value]
    everything: dict[str, Value]
    opaque: bool
    regularised: bool
    convolves: bool
    inner: bool
    dead: frozenset[int]
    covered: int
    penalised: frozenset[int]

    @property
    def examples(self) -> tuple[int, ...]:
        """The numbers of examples that the losses have, each once."""
        return tuple(dict.fromkeys(shape[0] for shape in self.term_shapes))

    def with_uses_of(self, other: "Trace", numbers: frozenset[int]) -> "Trace":
        """This trace, with the uses of some tags as they are in another one."""
        pairs = zip(self.uses, other.uses, strict=True)
        uses = [new if new.number in numbers else old for old, new in pairs]
        return self._replace(uses=uses)

    def uses_of(self, number: int) -> list[TagUse]:
        """The uses of a tag."""
        return [use for use in self.uses if use.number == number]

    def may_bypass(self, number: int) -> bool:
        """Whether parameters may reach the losses without passing through their tag."""
        return may_bypass(self.uses, number, self.covered)

    def splits_examples(self, use: TagUse) -> bool:
        """Whether a tag does not see all examples together, because the layer is called
        in a function with a derivative of its own, or on a condition."""
        return use.context.custom_derivative or self.is_conditional(use)

    def is_conditional(self, use: TagUse) -> bool:
        """Whether a layer is called on a condition that differs between examples. If so,
        `vmap` has given every example a copy of the layer, with a copy of the label: the
        label has more stack axes than the layer."""
        _, tag, layer = self.layers[use.number]
        return use.label_stack > len(tag.stack(layer))

    def repeats(self, use: TagUse) -> bool:
        """Whether any loop around a use calls the same layer in every round, and not one
        layer of a stack after the other, of whose parameters each round gets a slice."""
        parameters = parameter_bit(use.number)
        return not all(sliced & parameters for sliced in use.context.sliced)

    def is_reused(self, number: int) -> bool:
        """Whether an example may use the layer of a tag more than once."""
        uses = self.uses_of(number)
        if len(uses) > 1 or any(map(self.repeats, uses)):
            return True
        return not all(map(self.has_own_layers, uses))

    def has_own_layers(self, use: TagUse) -> bool:
        """Whether each layer of a stack is in its place, for a `vmap` or a loop, as far
        as the number of layers says: not so if the stack was repeated, or if each example
        has been given the layer that it asks for."""
        _, tag, layer = self.layers[use.number]
        # Each example has a copy of the layer, or each device a part of the stack.
        if self.is_conditional(use) or use.device_axes:
            return True
        parameters = parameter_bit(use.number)
        loops = zip(use.context.loops, use.context.sliced, strict=True)
        along = [rounds for rounds, sliced in loops if sliced & parameters]
        places = math.prod(n for n in along if n is not None)
        return places * math.prod(use.x.shape[: use.stack]) == math.prod(tag.stack(layer))

    def is_ambiguous(self, use: TagUse) -> bool:
        """Whether a use has example axes, but also a loop around it that goes round as
        often as there are examples: then either may be what counts the examples."""
        if use.example_shape == () or self.counts_examples(use):
            return False
        lengths = {n for n in self.examples if n > 1} & {*use.context.loops}
        return bool(lengths) and self.repeats(use)

    def counts_examples(self, use: TagUse) -> bool | None:
        """Whether the outermost example axis of a use becomes the axis of the examples in
        the losses; `None` if that is not known (of one of them)."""
        found = self._counts(use)
        return found.pop() if len(found) == 1 else False if False in found else None

    def counts_some(self, use: TagUse) -> bool:
        """Whether that axis becomes the axis of the examples in one loss, and nobody
        knows whether it does in another one."""
        return self._counts(use) == {True, None}

    def _counts(self, use: TagUse) -> set[bool | None]:
        """What is known of that, of the losses."""
        if self.examples == (1,) or use.example_shape == ():
            return {None}
        return {self._counts_first(use, first) for first in self._first_axes(use)}

    def _counts_first(self, use: TagUse, first: int) -> bool | None:
        """Whether the outermost example axis of a use becomes `first`, the axis of the
        examples in a loss; `None` if that is not known."""
        own, *others = (_becomes(use, bits, first) for bits in self._row_axes(use))
        return False if own is None and any(others) else own

    def _row_axes(self, use: TagUse) -> list[int]:
        """What is known of the axes of a use along which there may be examples, the
        outermost example axis first (if it has any), and of its loops."""
        assert use.reach is not None
        stack, axes = use.reach.axes[: use.stack], use.reach.axes[use.stack :]
        # Layers that were looked up for every example are no members of a stack.
        looked_up = () if self.has_own_layers(use) else stack
        return [*axes, *looked_up, *use.reach.loops]

    def is_certain(self, use: TagUse) -> bool:
        """Whether the entries of the outermost example axis of a use are the examples, in
        their order, in all losses and in all ways to these."""
        reach, firsts = use.reach, self._first_axes(use, several=False)
        if reach is None or not firsts:
            return False
        return all(self._counts_first(use, f) and not reach.mixed & f for f in firsts)

    def _first_axes(self, use: TagUse, several: bool = True) -> list[int]:
        """For each loss that depends on a use, the bit of the axis of its examples; with
        `several`, of those losses that have several examples, if any has."""
        if use.reach is None:
            return []
        pairs = zip(axes_of_terms(self.term_shapes), self.term_shapes, strict=True)
        found = [
            (shape[0] > 1, 1 << self._place_of_examples(use, axes))
            for axes, shape in pairs
            if use.reach.terms >> axes[0] & 1
        ]
        many = [first for has_several, first in found if has_several]
        return many if several and many else [first for _, first in found]

    def _place_of_examples(self, use: TagUse, axes: range) -> int:
        """Which of the axes of a loss's terms counts the examples. (In an ensemble, the
        terms may have axes of its members before it.)"""
        assert use.reach is not None
        if use.stack == 0 or len(axes) <= use.stack or not self.has_own_layers(use):
            return axes[0]
        members = zip(use.reach.axes[: use.stack], axes)
        in_front = all(bits >> i & 1 for bits, i in members)
        return axes[use.stack if in_front else 0]

    def may_be_examples(self, use: TagUse, loop: int) -> bool:
        """Whether the rounds of a loop around a use may be the examples. (Of the loops of
        an operation that nobody knows, nothing is known.)"""
        if use.context.loops[loop] not in {None, *self.examples}:
            return False
        if use.reach is None or len(use.reach.loops) != len(use.context.loops):
            return True
        bits = use.reach.loops[loop]
        found = [_becomes(use, bits, first) for first in self._first_axes(use)]
        return any(becomes is not False for becomes in found)

    def is_shared(self, use: TagUse) -> bool:
        """Whether rows of a use serve several examples of a loss, for certain: none of
        its axes, and no loop around it, becomes an axis of these; or none does in one way
        to the loss. (What the rows of all examples are summed for, as in batch
        normalisation, does not count.)"""
        if use.reach is None or self.splits_examples(use) or self.examples == (1,):
            return False
        axes, firsts = self._row_axes(use), self._first_axes(use)
        return any(_serves(use, axes, f) or self._has_few_parts(use, f) for f in firsts)

    def _has_few_parts(self, use: TagUse, first: int) -> bool:
        """Whether every example of a loss, along `first`, has a row of a use, whichever,
        and there are fewer rows than examples. Then some row serves several."""
        assert use.reach is not None
        reach, loops = use.reach, use.context.loops
        bits = [*reach.axes, *reach.loops]
        lengths = [*use.x.shape[: use.stack], *use.example_shape, *loops]
        if len(bits) != len(lengths) or reach.unknown & first:
            return False
        if any(terms_of(b) & first for b in bits):
            return False
        parts = [n for b, n in zip(bits, lengths) if parts_of(b) & first]
        place = first.bit_length() - 1
        pairs = zip(axes_of_terms(self.term_shapes), self.term_shapes, strict=True)
        number = min(shape[axes.index(place)] for axes, shape in pairs if place in axes)
        return bool(parts) and None not in parts and math.prod(parts) < number

    def has_example_axis(self, use: TagUse) -> bool:
        """Whether the outermost example axis of a use counts the examples: it is as long,
        and not known to become anything else."""
        if use.example_shape == ():
            # A single example needs no axis.
            return self.examples == (1,) or self.is_looped_over(use)
        number, *_ = use.example_shape
        if self.counts_examples(use) is False:
            return False
        if use.device_axes:
            # Each device may have an equal part of the examples.
            return any(total % number == 0 for total in self.examples)
        # In an ensemble, the terms may have axes of its members before the examples.
        stack_shape, axes = use.x.shape[: use.stack], use.stack
        members = [s[axes:] for s in self.term_shapes if s[:axes] == stack_shape]
        return number in {*self.examples, *(shape[0] for shape in members if shape)}

    def has_whole_examples(self, use: TagUse) -> bool:
        """Whether each device has whole examples: those of the outermost axis on all
        devices are all examples. Otherwise, positions are split."""
        parts = {number * use.devices for number in use.example_shape[:1]}
        return use.devices == 1 or bool(parts & {*self.examples})

    def is_looped_over(self, use: TagUse) -> bool:
        """Whether a loop, and not an axis, runs over all examples: the only loop around
        the use, with a round for every example of the losses, which all have as many.
        (Around a single example, a loop of one round would be no such loop.)"""
        if use.example_shape != () or len(self.examples) > 1 or self.examples == (1,):
            return False
        return use.context.loops == self.examples and self.may_be_examples(use, 0)

    @property
    def lacking(self) -> frozenset[int]:
        """The numbers of the tags of which a use, for certain, has skipped the axis of
        the examples, an axis of `vmap` that is as long as there are examples."""
        return frozenset(
            use.number
            for use in self._skipping
            if use.example_shape == ()
            or self.is_constant(use)
            or not self.has_example_axis(use)
        )

    @property
    def doubtful(self) -> frozenset[int]:
        """The numbers of the tags of which a use may have skipped that axis: it has
        another one, which is as long, of which nothing is known."""
        doubtful = [u.number for u in self._skipping if self.counts_examples(u) is None]
        return frozenset(doubtful) - self.lacking

    @property
    def _skipping(self) -> list[TagUse]:
        if self.examples == (1,):
            return []
        skipping = [u for u in self.uses if {*self.examples} & {*u.skipped}]
        return [use for use in skipping if not self.splits_examples(use)]

    def may_serve_several(self, use: TagUse) -> bool:
        """Whether one row of a use may belong to several examples."""
        if self.splits_examples(use) or self.examples == (1,):
            return False
        loops = range(len(use.context.loops))
        if any(self.may_be_examples(use, i) for i in loops):  # Each round may be one.
            return False
        return use.example_shape == () or self.is_constant(use)

    def has_few_rows(self, use: TagUse) -> bool:
        """Whether a use has no example axis, and all uses of its tag that have none have,
        together, fewer rows than there are examples. Then some row serves several."""
        without_axis = [u for u in self.uses_of(use.number) if u.example_shape == ()]
        loops = [u.context.loops for u in without_axis if self.may_serve_several(u)]
        # A loop of which nobody knows the number of rounds is none of these.
        rows = sum(math.prod(n for n in rounds if n is not None) for rounds in loops)
        return use.example_shape == () and rows < min(self.examples)

    def is_constant(self, use: TagUse) -> bool:
        """Whether the inputs of a layer never depend on data, although those of other
        layers do: then its example axes may count something else than examples, if they
        are not known to count these."""
        if self.counts_examples(use):
            return False
        data = [u.sources & DATA for u in self.uses_of(use.number)]
        return not any(data) and any(u.sources & DATA for u in self.uses)


def _becomes(use: TagUse, bits: int, first: int) -> bool | None:
    """Whether an axis, or a loop, of a use becomes `first`, the axis of the examples in a
    loss."""
    assert use.reach is not None
    if bits & first:
        return True
    doubtful = use.reach.unknown | use.reach.joined | bits >> SUMMED
    return None if doubtful & first else False


def _serves(use: TagUse, axes: list[int], first: int) -> bool:
    """Whether rows of a use, with these axes and loops, serve several of the examples of
    a loss, along `first`."""
    becomes = [_becomes(use, bits, first) for bits in axes or [0]]
    own = axes[0] if use.example_shape else 0
    if own >> LACKING & ~own >> POOLED & first:
        becomes = becomes[1:]
    return all(found is False for found in becomes)


def may_bypass(uses: list[TagUse], number: int, covered: int) -> bool:
    """Whether parameters may reach a result without passing through their tag: this is
    used, always at a zero that is added to the layer's result, and none of the uses of
    the parameters is marked as `covered`, which would say that others are not."""
    own = [use for use in uses if use.number == number]
    at_zero = bool(own) and all(use.at_zero for use in own)
    return at_zero and not covered & parameter_bit(number)
