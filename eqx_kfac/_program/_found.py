"""What is found when a loss function is traced: which tags it uses, and how; and where
what it returns comes from."""

import functools as ft
import math
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn

from .._custom_types import Args, Kwargs, Model
from .._loss import L2
from .._tag import (
    flatten_tags,
    Note,
    statistic_p,
    Tag,
    tag_p,
    TaggedLayer,
    trained_layers,
    unseen_p,
    update_layers,
    with_tags,
)
from ._flow import all_sources, Around, Expressions, Flow, Value, ZERO
from ._run import example_weights, run
from ._uses import equations, part_of


DATA, STATISTIC = 1, 2  # Sources. The others are layers,


LAYERS = 2  # which have two bits each, behind so many.


class Call(NamedTuple):
    """A use of a tag."""

    number: int  # Of the tag.
    x: jax.ShapeDtypeStruct
    stack: int
    examples: tuple[int, ...]  # The lengths of the example axes, from the outermost.
    around: Around
    left: int  # How many axes of stacked layers no loop goes along.
    at_zero: bool  # The tag is at a zero that is added to a result.
    sources: int  # Of the layer's input.
    axes: frozenset  # Of `shard_map`, over which its rows are split.

    @property
    def rows(self) -> int:
        """How many there are, of one of several stacked layers."""
        return math.prod(self.x.shape[self.stack : self.stack + len(self.examples)])


def numbered(model: Model) -> Model:
    """A model-shaped tree of the numbers of all tags with something to train."""
    found, treedef = flatten_tags(lambda *_: None, model)
    return treedef.unflatten(range(len(found)))


class Found(NamedTuple):
    """What was found in one trace."""

    layers: list[TaggedLayer]
    calls: list[Call]
    terms: tuple[tuple[int, ...], ...]  # The shapes of the losses' terms.
    weights: Any  # Of the examples, as an abstract value.
    outputs: list[Value]  # Of the losses.
    everything: dict[str, Value]  # What the objective consists of, by path.
    opaque: bool
    regularised: bool  # There is an `L2` term.
    dead: frozenset[int]  # Tags that are called for results which nothing uses.

    @property
    def examples(self) -> tuple[int, ...]:
        """How many there are, of every loss."""
        return tuple(dict.fromkeys(shape[0] for shape in self.terms))

    def of(self, number: int) -> list[Call]:
        return [call for call in self.calls if call.number == number]

    def is_apart(self, call: Call) -> bool:
        """Whether a tag does not see all examples together: in a function with a
        derivative of its own, or on a condition, for which `vmap` gives every example a
        copy of the layer."""
        return call.around.apart or self.is_conditional(call)

    def is_conditional(self, call: Call) -> bool:
        """Whether a use is on a condition that is another one for each example."""
        _, tag, layer = self.layers[call.number]
        return call.left > len(tag.stack(layer))

    def repeats(self, call: Call) -> bool:
        """Whether the same layer is used again and again, in a loop that is not one along
        a stack of layers."""
        own = source_of(call.number)
        return not all(along & own for along in call.around.along)

    def is_whole(self, call: Call) -> bool:
        """Whether the outermost example axis of a use counts the examples."""
        if call.examples == ():
            return self.examples == (1,) or self.is_by_itself(call)
        if call.axes:  # Within the loss function, devices may have parts of them.
            return any(number % call.examples[0] == 0 for number in self.examples)
        # The outputs may have an axis of the members of an ensemble, too.
        members = call.x.shape[: call.stack]
        behind = [s[len(members) :] for s in self.terms if s[: len(members)] == members]
        return call.examples[0] in {*self.examples, *(s[0] for s in behind if s)}

    def is_by_itself(self, call: Call) -> bool:
        """Whether a loop, and not an axis, is over all examples."""
        return call.examples == () and call.around.loops == self.examples != (1,)

    def may_be_shared(self, call: Call) -> bool:
        """Whether a row of it may belong to several examples."""
        loops = {*call.around.loops}
        if self.is_apart(call) or self.examples == (1,) or {None, *self.examples} & loops:
            return False
        return call.examples == () or self.is_constant(call)

    def has_few_rows(self, call: Call) -> bool:
        """Whether a use, and all others that are like it, without any axis of examples,
        are too few to be one for every example."""
        alike = [c for c in self.of(call.number) if c.examples == ()]
        loops = [c.around.loops for c in alike if self.may_be_shared(c)]
        rows = sum(math.prod(n for n in own if n is not None) for own in loops)
        return call.examples == () and rows < min(self.examples)

    def is_constant(self, call: Call) -> bool:
        """Whether the input of a layer never depends on any data, unlike that of others:
        what its axes count may have nothing to do with the examples."""
        own = [other.sources & DATA for other in self.of(call.number)]
        return not any(own) and any(other.sources & DATA for other in self.calls)


class Subject(NamedTuple):
    """A model, prepared to be looked at several times."""

    filled: Model  # Its tags collect.
    numbers: Model
    sources: list[int]  # For every inexact array, the bits of the tags that cover it.
    layers: list[TaggedLayer]

    @classmethod
    def of(cls, model: Model) -> "Subject":
        numbers = numbered(model)
        fill = lambda tag, layer, n: tag if n is None else tag.fill(layer, None)
        filled = with_tags(fill, model, numbers)
        return cls(filled, numbers, _sources(model, numbers), trained_layers(model))

    def noted(self, examples: tuple[int, ...], spare: bool) -> Model:
        """The model, whose tags know their numbers."""

        def noting(tag, layer, number):
            note = None if number is None else Note(0, number, examples)
            return tag if note is None else tag.noting(layer, note, spare)

        return with_tags(noting, self.filled, self.numbers)


def traced(
    loss_fn: Callable,
    subject: Subject,
    args: Args,
    kwargs: Kwargs,
    expressions: Expressions,
    examples: tuple[int, ...] = (),
    spare: bool = False,
) -> Found:
    """Traces a loss function, and follows what flows through it."""
    filled = subject.noted(examples, spare)
    params, static = eqx.partition(filled, eqx.is_inexact_array)
    losses, weights, rest, regularised = [], [], [], []

    def objective(params):
        objective, _ = run(loss_fn, eqx.combine(params, static), args, kwargs)
        losses[:] = [loss.leading for loss in objective.losses]
        regularised[:] = [isinstance(term, L2) for _, term in objective.terms]
        own = ft.partial(example_weights, layers=subject.layers)
        weights[:] = [jax.eval_shape(own, objective.losses)]
        outputs = [loss.outputs for loss in objective.losses]
        arrays, others = eqx.partition(objective, eqx.is_array)
        rest[:] = jtu.tree_flatten_with_path(others)[0]
        return outputs, arrays

    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    number = len(jtu.tree_leaves(shapes[0]))
    flow, values = _followed(expressions, closed, number, params, subject.sources)
    paths, _ = jtu.tree_flatten_with_path(shapes[1])
    known = [value for _, value in zip(paths, values[number:], strict=True)]
    known += [flow.source("number", repr(leaf)) for _, leaf in rest]
    paths = [jtu.keystr(path) for path, _ in [*paths, *rest]]
    everything = dict(zip(paths, known, strict=True))
    return Found(
        subject.layers,
        flow.seen,
        tuple(losses),
        weights[0],
        values[:number],
        everything,
        flow.opaque,
        any(regularised),
        _dead(closed.jaxpr),
    )


def bypassed(call: Callable, model: Model) -> list[TaggedLayer]:
    """The tagged layers whose parameters reach what `call(model)` returns other than
    through their tag."""
    subject = Subject.of(model)
    params, static = eqx.partition(subject.noted((), False), eqx.is_inexact_array)

    def outputs(params):
        return eqx.filter(call(eqx.combine(params, static)), eqx.is_array)

    closed = jax.make_jaxpr(outputs)(params)
    number = len(closed.jaxpr.outvars)
    _, values = _followed(Expressions(), closed, number, params, subject.sources)
    sources = all_sources(values)
    return [own for n, own in enumerate(subject.layers) if sources & source_of(n)]


def _followed(
    expressions: Expressions, closed: Any, number: int, params: Model, sources: list[int]
) -> tuple[Flow, list[Value]]:
    """What flows to every result of a program, and what was seen on the way to the first
    `number` of them, the outputs of the losses."""
    visit = ft.partial(_visit, _covering(sources))
    flow = Flow(expressions, visit, DATA | STATISTIC)
    inputs = list(_inputs(flow, params, sources))
    consts = [flow.constant(c, DATA * bool(c.ndim)) for c in closed.consts]
    values = flow.follow(closed.jaxpr, consts, inputs)
    if number == len(values):
        return flow, values
    # What only penalties see is not collected.
    wanted = [i < number for i in range(len(values))]
    part, *used = part_of(closed.jaxpr, wanted)
    flow = Flow(expressions, visit, DATA | STATISTIC)
    consts, inputs = map(list, map(compress, (consts, inputs), used))
    return flow, flow.follow(part, consts, inputs) + values[number:]


def _dead(jaxpr: Any) -> frozenset[int]:
    """The numbers of tags that are called, but not for anything that is returned."""
    part, *_ = part_of(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(_called(jaxpr) - _called(part))


def _called(jaxpr: Any) -> set[int]:
    """The numbers of the tags that a program calls."""
    avals = lambda eqn: [atom.aval for atom in eqn.invars]
    calls = [eqn for eqn in equations(jaxpr) if eqn.primitive is tag_p]
    notes = [eqn.params["layout"].note(avals(eqn)) for eqn in calls]
    return {note.number for note in notes if note is not None}


def _visit(
    covering: dict[int, int], eqn: JaxprEqn, values: list[Value], around: Around
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
    params = eqn.params
    layout, stack = params["layout"], params["stack"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    note = layout.note(avals)
    if note is None:  # The loss function itself collects curvature by it.
        return values[:1], []
    y, x = values[:2]
    shape = avals[1].shape
    call = Call(
        number=note.number,
        x=jax.ShapeDtypeStruct(shape, avals[1].dtype),
        stack=stack,
        examples=shape[stack : stack + params["examples"]],
        around=around,
        left=note.stack,
        at_zero=y == ZERO,
        sources=x.sources,
        axes=avals[0].manual_axis_type.varying,
    )
    # Not of the layer's own parameters: unless its input depends on these, too. (If they
    # are parts of arrays, the others' bits are those of the same arrays.)
    own = covering[note.number]
    return [y._replace(sources=y.sources & ~own | x.sources & own)], [call]


def source_of(number: int) -> int:
    """The bit of the parameters that a tag covers."""
    return 1 << (LAYERS + 2 * number)


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


def _inputs(flow: Flow, params: Model, sources: list[int]) -> Iterator[Value]:
    """The values of a filled model's arrays: what tags hold is zero."""
    is_tag = lambda node: isinstance(node, Tag)
    remaining = iter(sources)
    for i, node in enumerate(jtu.tree_leaves(params, is_leaf=is_tag)):
        if is_tag(node):
            yield from [ZERO] * len(jtu.tree_leaves(node))
        else:
            yield flow.source("parameter", i, sources=next(remaining))
