"""What a loss function does with the layers of a model, looked at before it runs.

Statistics are right if all of a layer's parameters reach the losses through its tag, if
the examples are where the tag looks for them, and if nothing but tags notices the slots.
So the loss function is traced, and the flow of values followed. A second trace has more
slots than the first: the losses have to be the same expressions."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn

from .._custom_types import Layer, Model, Weights
from .._misc import names
from .._tag import (
    check_tagged,
    flatten_tags,
    Note,
    row_weights,
    statistic_p,
    Tag,
    tag_p,
    update_layers,
    with_tags,
)
from ._flow import all_sources, Around, Expressions, Flow, Value, ZERO
from ._run import example_weights, run
from ._uses import part_of


_DATA, _STATISTIC = 1, 2  # Sources. The others are layers,
_LAYERS = 2  # whose bits come behind so many.


class Program(NamedTuple):
    """How the tags of a model are to be filled for a loss function."""

    examples: tuple[int, ...] = ()  # Of every loss; none if no tag has to know.
    # How many examples there are (on this device) at the tags, by number, of layers that
    # an example may use more than once, if their block squares examples' gradients.
    together: tuple[tuple[int, int], ...] = ()
    axes: frozenset = frozenset()  # Of `shard_map`, over which these are split.


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


class Place(NamedTuple):
    """A tag in a model."""

    path: str
    tag: Tag
    layer: Layer


def look(
    loss_fn: Callable,
    model: Model,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    uses: bool = True,
    trains: bool = False,
) -> Program:
    """Looks at what a loss function does with the tags of a model; `uses`: also at what
    it does beside them. `trains`: layers that it does not use at all are a mistake.

    **Raises:** `ValueError`, naming layers by their path, for a program whose curvature
    would not be right.
    """
    check_tagged(model)
    expressions = Expressions()

    def trace(examples=(), spare=False):
        return _trace(loss_fn, model, args, kwargs, expressions, examples, spare)

    found = trace()
    _check_unnoticed(found, trace(spare=True))
    examples = ()
    if any(map(found.may_be_shared, found.calls)):
        # With the number of examples, what is the same for all of them gets their axis.
        examples, before = found.examples, found
        found = trace(examples)
        _check_shared(found, before)
    if uses:
        _check_uses(found, trains)
    _check_examples(found)
    together = dict(_together(found))
    split = [call.axes for call in found.calls if call.number in together]
    axes = frozenset().union(*split)
    return Program(examples, tuple(together.items()), axes)


def prepared(filled: Model, program: Program) -> Model:
    """The model, whose tags are ready to collect, with what they have to know."""
    if program == Program():
        return filled
    _, numbers = _places(filled)
    together = dict(program.together)

    def prepare(tag, layer, number):
        if number is None or not tag.collecting:
            return tag
        if number in together and jtu.tree_leaves(tag.slots):
            tag = tag.adding_up(layer, together[number], program.axes)
        note = Note(0, number, program.examples)
        return tag.noting(layer, note) if program.examples else tag

    return with_tags(prepare, filled, numbers)


def _places(model: Model) -> tuple[list[Place], Model]:
    """All tags with something to train, and a model-shaped tree of their numbers."""
    found, treedef = flatten_tags(lambda tag, layer: (tag, layer), model)
    places = [Place(path, *pair) for path, pair in found]
    return places, treedef.unflatten(range(len(places)))


class _Found(NamedTuple):
    """What was found in one trace."""

    places: list[Place]
    calls: list[Call]
    terms: tuple[tuple[int, ...], ...]  # The shapes of the losses' terms.
    weights: Weights  # Of the examples, as an abstract value.
    outputs: list[Value]  # Of the losses.
    everything: dict[str, Value]  # What the objective consists of, by path.
    opaque: bool

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
        _, tag, layer = self.places[call.number]
        return call.left > len(tag.stack(layer))

    def repeats(self, call: Call) -> bool:
        """Whether the same layer is used again and again, in a loop that is not one along
        a stack of layers."""
        own = _source(call.number)
        return not all(along & own for along in call.around.along)

    def is_whole(self, call: Call) -> bool:
        """Whether the outermost example axis of a use counts the examples."""
        if call.examples == ():
            return self.examples == (1,) or self.is_by_itself(call)
        if call.axes:  # Within the loss function, devices may have parts of them.
            return any(number % call.examples[0] == 0 for number in self.examples)
        # Of the members of an ensemble, the outputs may have an axis, too.
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
        own = [other.sources & _DATA for other in self.of(call.number)]
        return not any(own) and any(other.sources & _DATA for other in self.calls)


def _trace(
    loss_fn: Callable,
    model: Model,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    expressions: Expressions,
    examples: tuple[int, ...],
    spare: bool,
) -> _Found:
    """Traces a loss function, and follows what flows through it."""
    places, numbers = _places(model)

    def noting(tag, layer, number):
        if number is None:
            return tag
        note = Note(0, number, examples)
        return tag.fill(layer, None).noting(layer, note, spare)

    filled = with_tags(noting, model, numbers)
    params, static = eqx.partition(filled, eqx.is_inexact_array)
    losses, weights, rest = [], [], []

    def objective(params):
        objective, _ = run(loss_fn, eqx.combine(params, static), args, kwargs)
        losses[:] = [loss.leading for loss in objective.losses]
        weights[:] = [jax.eval_shape(example_weights, objective.losses)]
        outputs = [loss.outputs for loss in objective.losses]
        arrays, others = eqx.partition(objective, eqx.is_array)
        rest[:] = jtu.tree_flatten_with_path(others)[0]
        return outputs, arrays

    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    flow = Flow(expressions, _visit, _DATA | _STATISTIC)
    inputs = list(_inputs(flow, params, _sources(model, numbers)))
    consts = [flow.constant(c, _DATA * bool(c.ndim)) for c in closed.consts]
    values = flow.follow(closed.jaxpr, consts, inputs)
    number = len(jtu.tree_leaves(shapes[0]))
    if number < len(values):  # What only penalties see is not collected.
        wanted = [i < number for i in range(len(values))]
        part, *used = part_of(closed.jaxpr, wanted)
        flow = Flow(expressions, _visit, _DATA | _STATISTIC)
        consts, inputs = map(list, map(compress, (consts, inputs), used))
        values = flow.follow(part, consts, inputs) + values[number:]
    paths, _ = jtu.tree_flatten_with_path(shapes[1])
    known = [value for _, value in zip(paths, values[number:], strict=True)]
    known += [flow.source("number", repr(leaf)) for _, leaf in rest]
    paths = [jtu.keystr(path) for path, _ in [*paths, *rest]]
    everything = dict(zip(paths, known, strict=True))
    return _Found(
        places,
        flow.seen,
        tuple(losses),
        weights[0],
        values[:number],
        everything,
        flow.opaque,
    )


def _visit(eqn: JaxprEqn, values: list[Value], around: Around) -> Any:
    """What is known of tags, and of their statistics."""
    if eqn.primitive is statistic_p:
        (value,) = values
        return [value._replace(sources=value.sources | _STATISTIC)], []
    if eqn.primitive is not tag_p:
        return None
    params = eqn.params
    layout, stack = params["layout"], params["stack"]
    avals = [atom.aval for atom in eqn.invars]
    note = layout.note(avals)
    if note is None:  # Of curvature that the loss function itself collects.
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
    untagged = y.sources & ~_source(note.number)
    return [y._replace(sources=untagged)], [call]


def _source(number: int) -> int:
    """The bit of the parameters that a tag covers."""
    return 1 << (_LAYERS + number)


def _sources(model: Model, numbers: Model) -> list[int]:
    """For every inexact array of a model, the bits of the tags that cover it."""

    def mark(tag, layer, new, number):
        if number is None:
            return new
        pairs = zip(tag.form.parameters(layer), tag.form.parameters(new), strict=True)
        marks = [None if p is None else bits | _source(number) for p, bits in pairs]
        return tag.form.replace(new, tuple(marks))

    none = jtu.tree_map(lambda _: 0, eqx.filter(model, eqx.is_inexact_array))
    return jtu.tree_leaves(update_layers(mark, none, numbers))


def _inputs(flow: Flow, params: Model, sources: list[int]) -> Iterator[Value]:
    """The values of a filled model's arrays: what tags hold is zero."""
    is_tag = lambda node: isinstance(node, Tag)
    remaining = iter(sources)
    for i, node in enumerate(jtu.tree_leaves(params, is_leaf=is_tag)):
        if is_tag(node):
            yield from [ZERO] * len(jtu.tree_leaves(node))
        else:
            yield flow.source("parameter", i, sources=next(remaining))


def _check_unnoticed(found: _Found, again: _Found) -> None:
    """Raises if the losses depend on what tags hold, or on how much that is."""
    changed = [
        path
        for path, value in found.everything.items()
        if value.sources & _STATISTIC or value.key != again.everything[path].key
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


def _check_uses(found: _Found, trains: bool) -> None:
    """Raises if parameters pass by their tag."""
    outputs = all_sources(found.outputs)
    for number, (path, tag, _) in enumerate(found.places):
        calls = found.of(number)
        untagged = outputs & _source(number)
        if not calls and untagged:
            raise ValueError(
                f"The layer `{path}` is trained, but the loss function never calls it: "
                f"its parameters {names(tag.form.names)} are used in another way, of "
                "which no curvature is collected. Call the layer, or leave it untagged, "
                f"`kfac.convert(model, blocks={{{path!r}: None}})`, with a `fallback`."
            )
        if not calls and trains and not found.opaque:
            raise ValueError(
                f"The layer `{path}` is trained, but the loss function never calls it. "
                "Freeze it (`eqx.partition` it out of the model that is trained), or "
                "remove it."
            )
        by = [call for call in calls if not call.at_zero]
        if by and untagged:
            raise ValueError(
                f"Parameters of the layer `{path}` reach the losses by another way than "
                "through the layer's tag, and no curvature would be collected of that: "
                f"{names(tag.form.names)} are used outside of the layer, or a "
                "derivative of the layer with respect to its input is. Call the layer "
                "instead; tie weights with `eqx.nn.Shared`; take derivatives that are "
                "not trained through (`jax.lax.stop_gradient`) of `kfac.revert(model)`; "
                "or leave the layer untagged, "
                f"`kfac.convert(model, blocks={{{path!r}: None}})`, with a `fallback`."
            )


def _check_shared(found: _Found, before: _Found) -> None:
    """Raises if rows belong to several examples. A layer that is called inside of the
    `vmap` over the examples, if on constants, has got their axis since `before`."""
    for old, call in zip(before.calls, found.calls, strict=True):
        path = found.places[call.number].path
        if not found.may_be_shared(call):
            continue
        unchanged = found.is_constant(call) and call.examples == old.examples
        if unchanged or found.has_few_rows(call):
            raise ValueError(
                f"The layer `{path}` is called outside of the `vmap` over the "
                f"{found.examples[0]} examples ({_seen(call)}), so that what it returns "
                "serves several of them, whose gradients would be added up before they "
                "are squared. Call it inside, where it may well be given the same for "
                "every example; or make an array that is only looked up a "
                "`kfac.Parameter`."
            )


def _check_examples(found: _Found) -> None:
    """Raises if the examples are not where the tags look for them."""
    for call in found.calls:
        path, tag, _ = found.places[call.number]
        block = tag.block
        if call.around.pushed and found.is_conditional(call):
            raise ValueError(
                f"The layer `{path}` is called on a condition that is another one for "
                "each example, within a `custom_jvp`: also the inputs of examples that "
                "do not use the layer would enter its curvature. Leave out the "
                "`custom_jvp`, or put it around a part of the function without layers."
            )
        weighted = found.weights is not None and block.weighted
        if not (weighted or block.mixes_positions):
            continue
        what = "the examples have weights"
        if block.mixes_positions:
            what = f"its block, `kfac.{type(block).__name__}`, tells examples apart"
        if not found.is_whole(call) or found.is_apart(call) or _is_ambiguous(found, call):
            raise ValueError(
                f"Cannot tell which axis of the layer `{path}` counts the examples "
                f"({_seen(call)}; the losses have {found.examples[0]}), but {what}. The "
                "batch has to be the outermost `vmap` around the layer, not a loop, and "
                "not outside of a function with a derivative of its own (`custom_vjp`). "
                "Write it so, or give the layer the block `kfac.Kronecker(weighted="
                "False)`, which takes every row by itself."
            )
        if weighted:
            _check_weights(found, call, path)


def _is_ambiguous(found: _Found, call: Call) -> bool:
    """Whether a loop around a use goes round as often as there are examples, so that it
    may be over these, and the axis that looks like them something else."""
    lengths = {n for n in found.examples if n > 1} & {*call.around.loops}
    return bool(lengths) and call.examples != () and found.repeats(call)


def _check_weights(found: _Found, call: Call, path: str) -> None:
    members, shape = call.x.shape[: call.stack], found.weights.shape
    if call.axes:  # Devices take their part of them.
        shape = (*call.examples[:1], *shape[1:])
    weights = jax.ShapeDtypeStruct(members + shape, found.weights.dtype)
    axes = call.stack + len(call.examples)
    try:
        jax.eval_shape(lambda w, x: row_weights(w, x, call.stack, axes), weights, call.x)
    except ValueError as error:
        error.add_note(f"The layer is `{path}` of the model.")
        raise


def _seen(call: Call) -> str:
    """How a tag is used, in words."""
    seen = f"it sees axes of lengths {call.examples}"
    if call.around.loops:
        seen += f", in loops of lengths {call.around.loops}"
    return seen + (", in a `custom_vjp`" if call.around.apart else "")


def _together(found: _Found) -> Iterator[tuple[int, int]]:
    """The tags of layers that an example may use more than once, if their block squares
    examples' gradients: these are to be added up before."""
    for number, (path, tag, _) in enumerate(found.places):
        calls = found.of(number)
        several = len(calls) > 1 or any(map(found.repeats, calls))
        if not several or not tag.block.squares_examples:
            continue
        if any(map(found.is_by_itself, calls)):
            if len(calls) == 1:  # Once in the loop over the examples.
                continue
            raise ValueError(
                f"The layer `{path}` is used several times in a loop over the examples, "
                f"but its block, `kfac.{type(tag.block).__name__}`, squares the "
                "gradients of examples. Make the loop a `vmap`, or use "
                "`kfac.Kronecker()` for the layer."
            )
        axes = tag.block.batch_axes  # pyright: ignore
        numbers = {math.prod(call.examples[:axes]) for call in calls}
        if len(numbers) > 1:
            raise ValueError(
                f"The layer `{path}` is used several times, for different numbers of "
                f"examples ({sorted(numbers)}), but its block, "
                f"`kfac.{type(tag.block).__name__}`, squares the gradients of examples. "
                "Use `kfac.Kronecker()` for it."
            )
        yield number, numbers.pop()
