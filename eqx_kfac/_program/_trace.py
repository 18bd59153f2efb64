"""A trace of a loss function: which tags it uses, and how; and which layers' parameters
what it returns depends on.

Dependences are sets of sources, as the bits of a number: one for data, one for
statistics that the loss function collects itself, and two for each tag. The first of
these is for the parameters that the tag covers, the second for derivatives that it does
not see."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._custom_types import Args, Kwargs, Model
from .._jax import Equation, part_of, varying
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
from ._interpreter import all_sources, Context, Expressions, Interpreter, Value, ZERO
from ._jaxpr import equations
from ._run import example_weights, run


DATA, STATISTIC = 1, 2
FIRST_OF_TAGS = 2  # How many bits there are before those of tags.


class TagUse(NamedTuple):
    """A use of a tag.

    **Fields:**

    - `number`: that of the tag.
    - `x`: the layer's input, abstractly.
    - `stack`: how many of its first axes are separate layers.
    - `examples`: the lengths of the example axes behind these, from the outermost.
    - `context`: what surrounds the use.
    - `members_left`: how many axes of stacked layers no loop goes along.
    - `at_zero`: whether the tag is at a zero, which is added to a result.
    - `sources`: what the layer's input depends on.
    - `axes`: of a `shard_map`, over which the rows are split.
    - `derivative`: whether it is one of a derivative of the layer.
    """

    number: int
    x: jax.ShapeDtypeStruct
    stack: int
    examples: tuple[int, ...]
    context: Context
    members_left: int
    at_zero: bool
    sources: int
    axes: frozenset
    derivative: bool

    @property
    def rows(self) -> int:
        """How many there are, of one of several stacked layers."""
        return math.prod(self.x.shape[self.stack : self.stack + len(self.examples)])


def numbered(model: Model) -> Model:
    """A model-shaped tree of the numbers of all tags with something to train."""
    found, treedef = flatten_tags(lambda *_: None, model)
    return treedef.unflatten(range(len(found)))


class Trace(NamedTuple):
    """What one trace of a loss function shows.

    **Fields:**

    - `layers`: those with something to train, by number.
    - `uses`: of their tags, in the order of the program.
    - `terms`: the shapes of the losses' terms.
    - `weights`: those of the examples, abstractly.
    - `outputs`: those of the losses.
    - `everything`: all that the objective consists of, by path.
    - `opaque`: whether any operation could not be looked into.
    - `regularised`: whether there is an `L2` term.
    - `dead`: tags that are called for results which nothing uses.
    """

    layers: list[TaggedLayer]
    uses: list[TagUse]
    terms: tuple[tuple[int, ...], ...]
    weights: Any
    outputs: list[Value]
    everything: dict[str, Value]
    opaque: bool
    regularised: bool
    dead: frozenset[int]

    @property
    def examples(self) -> tuple[int, ...]:
        """How many there are, of every loss."""
        return tuple(dict.fromkeys(shape[0] for shape in self.terms))

    def uses_of(self, number: int) -> list[TagUse]:
        return [use for use in self.uses if use.number == number]

    def splits_examples(self, use: TagUse) -> bool:
        """Whether a tag does not see all examples together: in a function with a
        derivative of its own, or on a condition, for which `vmap` gives every example a
        copy of the layer."""
        return use.context.custom_derivative or self.is_conditional(use)

    def is_conditional(self, use: TagUse) -> bool:
        """Whether a use is on a condition that is another one for each example: then
        `vmap` has given every example a copy of the layer, which looks like a stack."""
        _, tag, layer = self.layers[use.number]
        return use.members_left > len(tag.stack(layer))

    def repeats(self, use: TagUse) -> bool:
        """Whether the same layer is used again and again, in a loop that is not one along
        a stack of layers."""
        own = source_of(use.number)
        return not all(sliced & own for sliced in use.context.sliced)

    def has_example_axis(self, use: TagUse) -> bool:
        """Whether the outermost example axis of a use counts the examples."""
        if use.examples == ():
            return self.examples == (1,) or self.is_looped_over(use)
        if use.axes:  # Within the loss function, devices may have parts of them.
            return any(number % use.examples[0] == 0 for number in self.examples)
        # The outputs may have an axis of the members of an ensemble, too.
        members = use.x.shape[: use.stack]
        behind = [s[len(members) :] for s in self.terms if s[: len(members)] == members]
        return use.examples[0] in {*self.examples, *(s[0] for s in behind if s)}

    def is_looped_over(self, use: TagUse) -> bool:
        """Whether a loop, and not an axis, is over all examples."""
        return use.examples == () and use.context.loops == self.examples != (1,)

    def may_serve_several(self, use: TagUse) -> bool:
        """Whether a row of it may belong to several examples."""
        if self.splits_examples(use) or self.examples == (1,):
            return False
        if {None, *self.examples} & {*use.context.loops}:  # Each round may be an example.
            return False
        return use.examples == () or self.is_constant(use)

    def has_few_rows(self, use: TagUse) -> bool:
        """Whether a use, and all others that are like it, without any axis of examples,
        are too few to be one for every example."""
        alike = [c for c in self.uses_of(use.number) if c.examples == ()]
        loops = [c.context.loops for c in alike if self.may_serve_several(c)]
        rows = sum(math.prod(n for n in own if n is not None) for own in loops)
        return use.examples == () and rows < min(self.examples)

    def is_constant(self, use: TagUse) -> bool:
        """Whether the input of a layer never depends on any data, unlike that of others:
        what its axes count may have nothing to do with the examples."""
        own = [other.sources & DATA for other in self.uses_of(use.number)]
        return not any(own) and any(other.sources & DATA for other in self.uses)


class LabelledModel(NamedTuple):
    """A model whose tags collect, for several traces of it."""

    filled: Model
    numbers: Model  # Of its tags.
    sources: list[int]  # For every inexact array, the bits of the tags that cover it.
    layers: list[TaggedLayer]

    @classmethod
    def of(cls, model: Model) -> "LabelledModel":
        numbers = numbered(model)
        fill = lambda tag, layer, n: tag if n is None else tag.fill(layer, None)
        filled = with_tags(fill, model, numbers)
        return cls(filled, numbers, _sources(model, numbers), trained_layers(model))

    def with_labels(self, examples: tuple[int, ...], decoys: bool) -> Model:
        """The model, whose tags know their numbers."""

        def with_label(tag, layer, number):
            if number is None:
                return tag
            return tag.labelled(layer, Label(0, number, examples), decoys)

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
    """Traces a loss function and interprets the program. With `examples`, the tags know
    how many there are; with `decoys`, they hold more zeros than otherwise."""
    filled = labelled.with_labels(examples, decoys)
    params, static = eqx.partition(filled, eqx.is_inexact_array)
    losses, weights, rest, regularised = [], [], [], []

    def objective(params):
        objective, _ = run(loss_fn, eqx.combine(params, static), args, kwargs)
        losses[:] = [loss.leading for loss in objective.losses]
        regularised[:] = [isinstance(term, L2) for _, term in objective.terms]
        own = ft.partial(example_weights, layers=labelled.layers)
        weights[:] = [jax.eval_shape(own, objective.losses)]
        outputs = [loss.outputs for loss in objective.losses]
        arrays, others = eqx.partition(objective, eqx.is_array)
        rest[:] = jtu.tree_flatten_with_path(others)[0]
        return outputs, arrays

    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    number = len(jtu.tree_leaves(shapes[0]))
    interpreter, values = _interpreted(
        expressions, closed, number, params, labelled.sources
    )
    paths, _ = jtu.tree_flatten_with_path(shapes[1])
    known = [value for _, value in zip(paths, values[number:], strict=True)]
    known += [interpreter.value_of("number", repr(leaf)) for _, leaf in rest]
    paths = [jtu.keystr(path) for path, _ in [*paths, *rest]]
    everything = dict(zip(paths, known, strict=True))
    return Trace(
        labelled.layers,
        interpreter.records,
        tuple(losses),
        weights[0],
        values[:number],
        everything,
        interpreter.opaque,
        any(regularised),
        _dead(closed.jaxpr),
    )


def bypassed(call: Callable, model: Model) -> list[TaggedLayer]:
    """The tagged layers whose parameters reach what `call(model)` returns other than
    through their tag."""
    labelled = LabelledModel.of(model)
    params, static = eqx.partition(labelled.with_labels((), False), eqx.is_inexact_array)

    def outputs(params):
        return eqx.filter(call(eqx.combine(params, static)), eqx.is_array)

    closed = jax.make_jaxpr(outputs)(params)
    number = len(closed.jaxpr.outvars)
    _, values = _interpreted(Expressions(), closed, number, params, labelled.sources)
    sources = all_sources(values)
    return [own for n, own in enumerate(labelled.layers) if sources & source_of(n)]


def _interpreted(
    expressions: Expressions, closed: Any, number: int, params: Model, sources: list[int]
) -> tuple[Interpreter, list[Value]]:
    """The values of all results of a program; and an interpreter with the records of what
    the first `number` of them need, the outputs of the losses."""
    visit = ft.partial(_visit, _covering(sources))
    interpreter = Interpreter(expressions, visit, DATA | STATISTIC)
    inputs = list(_inputs(interpreter, params, sources))
    consts = [interpreter.constant(c, DATA * bool(c.ndim)) for c in closed.consts]
    values = interpreter.interpret(closed.jaxpr, consts, inputs)
    if number == len(values):
        return interpreter, values
    # A second time, without what only penalties use: of that, no curvature is collected.
    wanted = [i < number for i in range(len(values))]
    part, *used = part_of(closed.jaxpr, wanted)
    interpreter = Interpreter(expressions, visit, DATA | STATISTIC)
    consts, inputs = map(list, map(compress, (consts, inputs), used))
    return interpreter, interpreter.interpret(part, consts, inputs) + values[number:]


def _dead(jaxpr: Any) -> frozenset[int]:
    """The numbers of tags that are called, but not for anything that is returned."""
    part, *_ = part_of(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(_called(jaxpr) - _called(part))


def _called(jaxpr: Any) -> set[int]:
    """The numbers of the tags that a program uses."""
    labels = [label_of(eqn) for eqn in equations(jaxpr) if eqn.primitive is tag_p]
    return {label.number for label in labels if label is not None}


def _visit(
    covering: dict[int, int], eqn: Equation, values: list[Value], context: Context
) -> Any:
    """What is known of tags, and of their statistics. `covering` has, for each tag, the
    bits of all that cover any of its parameters."""
    if eqn.primitive is statistic_p:
        (value,) = values
        return [value._replace(sources=value.sources | STATISTIC)], []
    if eqn.primitive is unseen_p:
        (value,) = values
        unseen = unseen_of(eqn.params["number"])
        return [value._replace(sources=value.sources | unseen)], []
    if eqn.primitive is not tag_p:
        return None
    params, stack = eqn.params, eqn.params["stack"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    label = label_of(eqn)
    if label is None:  # The loss function itself collects curvature by it.
        return values[:1], []
    y, x = values[:2]
    shape = avals[1].shape
    use = TagUse(
        number=label.number,
        x=jax.ShapeDtypeStruct(shape, avals[1].dtype),
        stack=stack,
        examples=shape[stack : stack + params["examples"]],
        context=context,
        members_left=label.stack,
        at_zero=y == ZERO,
        sources=x.sources,
        axes=varying(avals[0]),
        derivative=params["layout"].derivative,
    )
    # The tag has seen how the output depends on the layer's own parameters, so that this
    # dependence ends here; unless the layer's input depends on them, too. (Tags of parts
    # of one array share its bits.)
    own = covering[label.number]
    return [y._replace(sources=y.sources & ~own | x.sources & own)], [use]


def source_of(number: int) -> int:
    """The bit of the parameters that a tag covers."""
    return 1 << (FIRST_OF_TAGS + 2 * number)


def unseen_of(number: int) -> int:
    """The bit of derivatives that the tag does not see."""
    return source_of(number) << 1


def _sources(model: Model, numbers: Model) -> list[int]:
    """For every inexact array of a model, the bits of the tags that cover it."""

    def mark(tag, layer, new, number):
        if number is None:
            return new
        pairs = zip(tag.form.parameters(layer), tag.form.parameters(new), strict=True)
        marks = [None if p is None else bits | source_of(number) for p, bits in pairs]
        return tag.form.replace(new, tuple(marks))

    none = jtu.tree_map(lambda _: 0, eqx.filter(model, eqx.is_inexact_array))
    return jtu.tree_leaves(update_layers(mark, none, numbers))


def _covering(sources: list[int]) -> dict[int, int]:
    """For every tag, the bits of all tags that cover any of the same arrays."""
    found: dict[int, int] = {}
    for bits in sources:
        for number in range(bits.bit_length() // 2):
            if bits & source_of(number):
                found[number] = found.get(number, 0) | bits
    return found


def _inputs(
    interpreter: Interpreter, params: Model, sources: list[int]
) -> Iterator[Value]:
    """The values of a filled model's arrays: what tags hold is zero."""
    is_tag = lambda node: isinstance(node, Tag)
    remaining = iter(sources)
    for i, node in enumerate(jtu.tree_leaves(params, is_leaf=is_tag)):
        if is_tag(node):
            yield from [ZERO] * len(jtu.tree_leaves(node))
        else:
            yield interpreter.value_of("parameter", i, sources=next(remaining))
