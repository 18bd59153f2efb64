"""A trace of a loss function: which tags it uses, how it uses them, and on which
parameters its results depend.

The model is traced while its tags collect, so that the calls of tags are in the program.
Every tag has a *label*, which says in the program what the number of the tag is.

Dependences are sets of sources, as the bits of an integer. One bit is for data. One is
for statistics: a loss function that takes a gradient with respect to the whole model
makes statistics, which are the gradient in what its tags hold. Two bits are for each tag:
the first for the parameters that the tag covers, the second for derivatives of the layer
that the tag does not see. A tag takes the first bit away from the output of its layer.
If a result depends on this bit all the same, the parameters reach it by another way than
through the tag: they *bypass* the tag."""

import functools as ft
import math
import operator
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._custom_types import Args, Kwargs, Model
from .._jax import Equation, Jaxpr, part_of, varying
from .._loss import L2
from .._tag import (
    flatten_tags,
    Label,
    label_of,
    statistic_p,
    Tag,
    tag_p,
    TaggedLayer,
    trained_layers,
    unseen_p,
    update_layers,
    with_tags,
)
from ._backwards import reach_of_uses
from ._interpreter import all_sources, Context, Expressions, Interpreter, Value, ZERO
from ._jaxpr import equations
from ._reach import Reach
from ._run import example_weights, run


DATA, STATISTIC = 1, 2
FIRST_BIT_OF_TAGS = 2  # The place of the first bit that belongs to a tag.


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
    - `sources`: the sources that the layer's input depends on.
    - `device_axes`: the axes of a `shard_map` over which the rows are split.
    - `derivative`: whether this is a use of a derivative of the layer.
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
    derivative: bool
    skipped: tuple[int, ...]
    reach: Reach | None = None

    @property
    def rows(self) -> int:
        """The number of rows, for each layer of a stack."""
        return math.prod(self.example_shape)


def numbered(model: Model) -> Model:
    """A model-shaped tree of the numbers of all tags with something to train."""
    found, treedef = flatten_tags(lambda *_: None, model)
    return treedef.unflatten(range(len(found)))


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
    - `dead`: the numbers of the tags that are called, but only for results that nothing
        uses.
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
    dead: frozenset[int]
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

    def counts_examples(self, use: TagUse) -> bool | None:
        """Whether the outermost example axis of a use becomes the axis of the examples in
        the losses; `None` if that is not known."""
        if use.reach is None or use.example_shape == ():
            return None
        return self._becomes_examples(use, use.reach.axes[0])

    def _becomes_examples(self, use: TagUse, bits: int) -> bool | None:
        """Whether an axis of examples is among some axes of terms. In an ensemble, the
        terms may have axes of its members before the examples."""
        first = 1 | 1 << use.stack
        unknown = use.reach is None or use.reach.unknown & first
        return bool(bits & first) or (None if unknown else False)

    def may_be_examples(self, use: TagUse, loop: int) -> bool:
        """Whether the rounds of a loop around a use may be the examples. (Of the loops of
        an operation that nobody knows, nothing is known.)"""
        if use.context.loops[loop] not in {None, *self.examples}:
            return False
        if use.reach is None or len(use.reach.loops) != len(use.context.loops):
            return True
        return self._becomes_examples(use, use.reach.loops[loop]) is not False

    def is_shared(self, use: TagUse) -> bool:
        """Whether rows of a use serve several examples, for certain: none of its axes,
        and no loop around it, becomes an axis of examples."""
        if use.reach is None or self.splits_examples(use) or self.examples == (1,):
            return False
        axes = (*use.reach.axes, *use.reach.loops)
        return all(self._becomes_examples(use, bits) is False for bits in axes or (0,))

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

    def is_looped_over(self, use: TagUse) -> bool:
        """Whether a loop, and not an axis, runs over all examples: the only loop around
        the use, with a round for every example of the losses, which all have as many.
        (Around a single example, a loop of one round would be no such loop.)"""
        if use.example_shape != () or len(self.examples) > 1 or self.examples == (1,):
            return False
        return use.context.loops == self.examples and self.may_be_examples(use, 0)

    def lacks_axis(self, use: TagUse) -> bool:
        """Whether a use is for several examples without an axis of these: it has skipped
        an axis of `vmap` that is as long, and none of its own is known to be theirs."""
        if self.splits_examples(use) or self.examples == (1,):
            return False
        if not {*self.examples} & {*use.skipped}:
            return False
        if use.example_shape == () or self.is_constant(use):
            return True
        # Derivatives are taken along an axis of `vmap`, too, which the layer itself
        # skips: one that is as long by chance must not be taken for that of the examples.
        known = self.counts_examples(use)
        directions = any(other.derivative for other in self.uses_of(use.number))
        return (
            known is False or not self.has_example_axis(use) or not (known or directions)
        )

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


class LabelledModel(NamedTuple):
    """A model whose tags collect, for several traces of it.

    **Fields:**

    - `filled`: the model, with slots in its tags.
    - `numbers`: the numbers of its tags, as a model-shaped tree.
    - `sources`: for every inexact array of the model, the bits of the tags that cover it.
    - `layers`: the layers with something to train, by number.
    """

    filled: Model
    numbers: Model
    sources: list[int]
    layers: list[TaggedLayer]

    @classmethod
    def of(cls, model: Model) -> "LabelledModel":
        numbers = numbered(model)
        fill = lambda tag, layer, n: tag if n is None else tag.fill(layer, None)
        filled = with_tags(fill, model, numbers)
        return cls(filled, numbers, _sources(model, numbers), trained_layers(model))

    def with_labels(self, examples: tuple[int, ...], decoys: bool) -> Model:
        """The filled model, with a label in every tag and, if asked for, decoys."""

        def with_label(tag, layer, number):
            if number is None:
                return tag
            label = Label(stack=0, number=number, examples=examples)
            return tag.labelled(layer, label, decoys)

        return with_tags(with_label, self.filled, self.numbers)


def traced(
    loss_fn: Callable,
    labelled: LabelledModel,
    args: Args,
    kwargs: Kwargs,
    expressions: Expressions,
    examples: tuple[int, ...] = (),
    decoys: bool = False,
) -> Trace:
    """Traces a loss function and interprets the program. With `examples`, the labels say
    how many examples the losses have; with `decoys`, the tags hold more zeros than
    without."""
    filled = labelled.with_labels(examples, decoys)
    params, static = eqx.partition(filled, eqx.is_inexact_array)
    # A traced function returns arrays only: what else there is, it writes into these.
    term_shapes, weights, others, regularised, term_axes = [], [], [], [], []

    def objective(params):
        objective, _ = run(loss_fn, eqx.combine(params, static), args, kwargs)
        term_shapes[:] = [loss.leading for loss in objective.losses]
        regularised[:] = [isinstance(term, L2) for _, term in objective.terms]
        weights_of = ft.partial(example_weights, layers=labelled.layers)
        weights[:] = [jax.eval_shape(weights_of, objective.losses)]
        outputs = [loss.outputs for loss in objective.losses]
        term_axes[:] = [
            len(loss.leading)
            for loss in objective.losses
            for _ in jtu.tree_leaves(loss.outputs)
        ]
        arrays, no_arrays = eqx.partition(objective, eqx.is_array)
        others[:] = jtu.tree_flatten_with_path(no_arrays)[0]
        return outputs, arrays

    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    num_outputs = len(jtu.tree_leaves(shapes[0]))
    interpreter, values, program = _interpreted(
        expressions, closed, num_outputs, params, labelled
    )
    reaches = reach_of_uses(program, term_axes)
    uses = [
        use._replace(reach=reach)
        for use, (_, reach) in zip(interpreter.records, reaches, strict=True)
    ]
    assert [use.number for use in uses] == [number for number, _ in reaches]
    arrays, _ = jtu.tree_flatten_with_path(shapes[1])
    found = [value for _, value in zip(arrays, values[num_outputs:], strict=True)]
    found += [interpreter.value_of("number", repr(leaf)) for _, leaf in others]
    paths = [jtu.keystr(path) for path, _ in [*arrays, *others]]
    everything = dict(zip(paths, found, strict=True))
    called = _called_for(closed.jaxpr, len(values))
    return Trace(
        layers=labelled.layers,
        uses=uses,
        term_shapes=tuple(term_shapes),
        weights=weights[0],
        outputs=values[:num_outputs],
        everything=everything,
        opaque=interpreter.opaque,
        regularised=any(regularised),
        dead=frozenset(_called(closed.jaxpr) - called),
        penalised=frozenset(called - _called_for(closed.jaxpr, num_outputs)),
    )


def bypassed(call: Callable, model: Model) -> list[TaggedLayer]:
    """The tagged layers whose parameters reach what `call(model)` returns by another way
    than through their tag."""
    labelled = LabelledModel.of(model)
    params, static = eqx.partition(labelled.with_labels((), False), eqx.is_inexact_array)

    def outputs(params):
        return eqx.filter(call(eqx.combine(params, static)), eqx.is_array)

    closed = jax.make_jaxpr(outputs)(params)
    num_outputs = len(closed.jaxpr.outvars)
    interpreter, values, _ = _interpreted(
        Expressions(), closed, num_outputs, params, labelled
    )
    sources = all_sources(values)
    uses = interpreter.records
    return [
        layer
        for number, layer in enumerate(labelled.layers)
        if sources & parameter_bit(number)
        and not all_at_zero([use for use in uses if use.number == number])
    ]


def all_at_zero(uses: list[TagUse]) -> bool:
    """Whether a layer is used, and always tagged at a zero that is added to its result.
    Then the result itself bypasses the tag, which is no mistake."""
    return bool(uses) and all(use.at_zero for use in uses)


def _interpreted(
    expressions: Expressions,
    closed: Any,
    num_outputs: int,
    params: Model,
    labelled: LabelledModel,
) -> tuple[Interpreter, list[Value], Jaxpr]:
    """An interpreter whose records are those of the operations that the first
    `num_outputs` results of a program need; the values of all results; and the program
    that has these operations."""
    covering = _covering(labelled.sources)
    visit = ft.partial(_visit, covering)
    cleared = lambda uses: ft.reduce(operator.or_, [covering[u.number] for u in uses], 0)
    # A derivative that no tag sees must not be lost where a layer is tagged at a zero.
    unseen = ft.reduce(operator.or_, map(unseen_bit, range(len(labelled.layers))), 0)
    rules = dict(visit=visit, cleared=cleared, tracked=DATA | STATISTIC, sticky=unseen)
    new = ft.partial(Interpreter, **rules)
    interpreter = new(expressions)
    inputs = list(_inputs(interpreter, params, labelled.sources))
    # The arguments of the loss function are constants of the program, and so are arrays
    # that it knows otherwise: all are data, except for scalars, which no example has for
    # itself. (But a key is no scalar: numbers for all examples are made of it.)
    is_data = lambda c: c.ndim > 0 or jnp.issubdtype(c.dtype, jax.dtypes.prng_key)
    consts = [interpreter.constant(c, DATA if is_data(c) else 0) for c in closed.consts]
    values = interpreter.interpret(closed.jaxpr, consts, inputs)
    if num_outputs == len(values):
        return interpreter, values, closed.jaxpr
    # The other results are penalties, of which no curvature is collected: the program is
    # interpreted once more without what only they need.
    wanted = [i < num_outputs for i in range(len(values))]
    part, *used = part_of(closed.jaxpr, wanted)
    interpreter = new(expressions)
    consts, inputs = map(list, map(compress, (consts, inputs), used))
    outputs = interpreter.interpret(part, consts, inputs)
    return interpreter, outputs + values[num_outputs:], part


def _called_for(jaxpr: Any, number: int) -> set[int]:
    """The numbers of the tags that are called for the first results of a program."""
    part, *_ = part_of(jaxpr, [i < number for i in range(len(jaxpr.outvars))])
    return _called(part)


def _called(jaxpr: Any) -> set[int]:
    """The numbers of the tags that a program calls."""
    labels = [label_of(eqn) for eqn in equations(jaxpr) if eqn.primitive is tag_p]
    return {label.number for label in labels if label is not None}


def _visit(
    covering: dict[int, int], eqn: Equation, values: list[Value], context: Context
) -> Any:
    """The interpreter's rule for tags, statistics, and derivatives that no tag sees.
    `covering` has, for each tag, the bits of all tags that cover any of its
    parameters."""
    if eqn.primitive is statistic_p:
        (value,) = values
        return [value._replace(sources=value.sources | STATISTIC)], []
    if eqn.primitive is unseen_p:
        (value,) = values
        unseen = unseen_bit(eqn.params["number"])
        return [value._replace(sources=value.sources | unseen)], []
    if eqn.primitive is not tag_p:
        return None
    label = label_of(eqn)
    if label is None:
        # The loss function itself has filled this tag, to collect curvature in it.
        return values[:1], []
    y, x = values[:2]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    y_aval, x_aval, *_ = avals
    stack, num_example_axes = eqn.params["stack"], eqn.params["examples"]
    use = TagUse(
        number=label.number,
        x=jax.ShapeDtypeStruct(x_aval.shape, x_aval.dtype),
        stack=stack,
        example_shape=x_aval.shape[stack : stack + num_example_axes],
        context=context,
        label_stack=label.stack,
        at_zero=y == ZERO,
        sources=x.sources,
        device_axes=varying(y_aval),
        derivative=eqn.params["layout"].derivative,
        skipped=eqn.params["layout"].skipped,
    )
    # The tag sees how the output depends on the layer's parameters, so that this
    # dependence ends here. But a dependence of the layer's input on the same parameters
    # goes on. (An array of which several tags cover parts has the bits of all of them.)
    covered = covering[label.number]
    return [y._replace(sources=y.sources & ~covered | x.sources & covered)], [use]


def parameter_bit(number: int) -> int:
    """The bit of the parameters that a tag covers."""
    return 1 << (FIRST_BIT_OF_TAGS + 2 * number)


def unseen_bit(number: int) -> int:
    """The bit of the derivatives of a layer that its tag does not see."""
    return parameter_bit(number) << 1


def _sources(model: Model, numbers: Model) -> list[int]:
    """For every inexact array of a model, the bits of the tags that cover it."""

    def mark(tag, layer, bits_so_far, number):
        if number is None:
            return bits_so_far
        parameters = tag.form.parameters(layer), tag.form.parameters(bits_so_far)
        bits = [
            None if p is None else b | parameter_bit(number)
            for p, b in zip(*parameters, strict=True)
        ]
        return tag.form.replace(bits_so_far, tuple(bits))

    zeros = jtu.tree_map(lambda _: 0, eqx.filter(model, eqx.is_inexact_array))
    return jtu.tree_leaves(update_layers(mark, zeros, numbers))


def _covering(sources: list[int]) -> dict[int, int]:
    """For every tag, the bits of all tags that cover any of the same arrays."""
    covering: dict[int, int] = {}
    for bits in sources:
        number = 0
        while parameter_bit(number) <= bits:  # A higher tag would have a higher bit.
            if bits & parameter_bit(number):
                covering[number] = covering.get(number, 0) | bits
            number += 1
    return covering


def _inputs(
    interpreter: Interpreter, params: Model, sources: list[int]
) -> Iterator[Value]:
    """The values of a filled model's arrays. The arrays in its tags are zero."""
    is_tag = lambda node: isinstance(node, Tag)
    remaining = iter(sources)
    for i, node in enumerate(jtu.tree_leaves(params, is_leaf=is_tag)):
        if is_tag(node):
            yield from [ZERO] * len(jtu.tree_leaves(node))
        else:
            yield interpreter.value_of("parameter", i, sources=next(remaining))
