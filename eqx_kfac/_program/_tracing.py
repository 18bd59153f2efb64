"""Traces a loss function, and interprets its program.

The model is traced while its tags collect, so that the calls of tags are in the program.
Every tag has a *label*, which says in the program what the number of the tag is."""

import functools as ft
import operator
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._custom_types import Args, Kwargs, Model
from .._jax import Equation, Jaxpr, Literal, number_of_parts, part_of, varying
from .._loss import L2
from .._tag import (
    covered_p,
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
from ._jaxpr import contains, equations
from ._run import example_weights, run
from ._trace import (
    axes_of_terms,
    changed,
    DATA,
    may_bypass,
    misused_bit,
    parameter_bit,
    STATISTIC,
    TagUse,
    Trace,
    unchanged,
    unseen_bit,
)


def numbered(model: Model) -> Model:
    """A model-shaped tree of the numbers of all tags with something to train."""
    found, treedef = flatten_tags(lambda *_: None, model)
    return treedef.unflatten(range(len(found)))


class LabelledModel(NamedTuple):
    """A model whose tags collect, for several traces of it.

    **Fields:**

    - `filled`: the model, with slots in its tags.
    - `numbers`: the numbers of its tags, as a model-shaped tree.
    - `sources`: for every inexact array of the model, the bits of the tags that cover it.
    - `covering`: for every tag, by number, the bits of all tags that cover any of the
        same arrays.
    - `layers`: the layers with something to train, by number.
    """

    filled: Model
    numbers: Model
    sources: list[int]
    covering: dict[int, int]
    layers: list[TaggedLayer]

    @classmethod
    def of(cls, model: Model) -> "LabelledModel":
        numbers = numbered(model)
        fill = lambda tag, layer, n: tag if n is None else tag.fill(layer, None)
        filled = with_tags(fill, model, numbers)
        sources = _sources(model, numbers)
        return cls(filled, numbers, sources, _covering(sources), trained_layers(model))

    def with_labels(
        self,
        examples: tuple[int, ...] = (),
        lacking: frozenset[int] = frozenset(),
        decoys: bool = False,
        copied: frozenset[int] = frozenset(),
    ) -> Model:
        """The filled model, with a label in every tag. The labels of some of them, of the
        numbers `lacking`, say how many `examples` the losses have; with `decoys`, the
        tags hold more zeros than without; and those `copied` are at copies of arrays."""

        def with_label(tag, layer, number):
            if number is None:
                return tag
            known = examples if number in lacking else ()
            label = Label(0, number, known, number in copied)
            return tag.labelled(layer, label, decoys)

        return with_tags(with_label, self.filled, self.numbers)


def traced(
    loss_fn: Callable,
    labelled: LabelledModel,
    filled: Model,
    args: Args,
    kwargs: Kwargs,
    expressions: Expressions,
) -> Trace:
    """Traces a loss function of a model that is `filled`, `with_labels` of `labelled`,
    and interprets the program."""
    params, static = eqx.partition(filled, eqx.is_inexact_array)
    # A traced function returns arrays only: what else there is, it writes into these.
    term_shapes, weights, others, regularised = [], [], [], []

    def objective(params):
        objective, _ = run(loss_fn, eqx.combine(params, static), args, kwargs)
        term_shapes[:] = [loss.leading for loss in objective.losses]
        regularised[:] = [isinstance(term, L2) for _, term in objective.terms]
        weights_of = ft.partial(example_weights, layers=labelled.layers)
        weights[:] = [jax.eval_shape(weights_of, objective.losses)]
        outputs = [loss.outputs for loss in objective.losses]
        arrays, no_arrays = eqx.partition(objective, eqx.is_array)
        others[:] = jtu.tree_flatten_with_path(no_arrays)[0]
        return outputs, arrays

    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    num_outputs = len(jtu.tree_leaves(shapes[0]))
    interpreter, values, program = _interpreted(
        expressions, closed, num_outputs, params, labelled
    )
    uses = _followed(interpreter.records, program, term_shapes, shapes[0])
    arrays, _ = jtu.tree_flatten_with_path(shapes[1])
    numbers = [interpreter.value_of("number", repr(leaf)) for _, leaf in others]
    paths = [jtu.keystr(path) for path, _ in [*arrays, *others]]
    found = [*values[num_outputs:], *numbers]
    called = _called_for(closed.jaxpr, len(values))
    return Trace(
        layers=labelled.layers,
        uses=uses,
        term_shapes=tuple(term_shapes),
        weights=weights[0],
        outputs=values[:num_outputs],
        everything=dict(zip(paths, found, strict=True)),
        opaque=interpreter.opaque,
        regularised=any(regularised),
        convolves=contains(closed.jaxpr, "conv_general_dilated"),
        inner=_has_inner_derivatives(closed.jaxpr),
        dead=frozenset(_called(closed.jaxpr) - called),
        covered=_covered(closed.jaxpr, labelled),
        penalised=frozenset(called - _called_for(closed.jaxpr, num_outputs)),
    )


def _followed(
    uses: list[TagUse], program: Jaxpr, term_shapes: list[tuple], outputs: list
) -> list[TagUse]:
    """The uses of tags in a program, with what their axes become in the `outputs` of the
    losses, each of which begins with the axes of its terms."""
    each = zip(axes_of_terms(term_shapes), outputs, strict=True)
    axes = [places for places, tree in each for _ in jtu.tree_leaves(tree)]
    reaches = reach_of_uses(program, axes)
    # Both ways through the program meet its tags in the same order.
    assert [use.number for use in uses] == [reach.number for reach in reaches]
    pairs = zip(uses, reaches, strict=True)
    return [use._replace(reach=found.reach) for use, found in pairs]


def bypassed(call: Callable, model: Model) -> list[TaggedLayer]:
    """The tagged layers whose parameters reach what `call(model)` returns by another way
    than through their tag, or that are called with changed parameters."""
    labelled = LabelledModel.of(model)
    params, static = eqx.partition(labelled.with_labels(), eqx.is_inexact_array)

    def outputs(params):
        # Some packages' results are no trees any more with `None` in a leaf's place.
        leaves = jtu.tree_leaves(call(eqx.combine(params, static)))
        return list(filter(eqx.is_array, leaves))

    closed = jax.make_jaxpr(outputs)(params)
    num_outputs = len(closed.jaxpr.outvars)
    interpreter, values, _ = _interpreted(
        Expressions(), closed, num_outputs, params, labelled
    )
    sources = all_sources(values)
    uses = interpreter.records
    covered = _covered(closed.jaxpr, labelled)
    return [
        layer
        for number, layer in enumerate(labelled.layers)
        if sources & misused_bit(number)
        or (sources & parameter_bit(number) and not may_bypass(uses, number, covered))
    ]


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
    covering = labelled.covering
    visit = ft.partial(_visit, covering)
    cleared = lambda uses: ft.reduce(operator.or_, [covering[u.number] for u in uses], 0)
    numbers = range(len(labelled.layers))
    of_all = lambda bit: ft.reduce(operator.or_, map(bit, numbers), 0)
    # A derivative that no tag sees must not be lost where a layer is tagged at a zero.
    marks = of_all(unseen_bit) | of_all(misused_bit)
    combined = ft.partial(_combined, of_all(parameter_bit), expressions)
    rules = dict(visit=visit, cleared=cleared, combined=combined)
    rules |= dict(tracked=DATA | STATISTIC, sticky=marks)
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


def _covered(jaxpr: Any, labelled: LabelledModel) -> int:
    """The bits of the parameters of which a program has uses that are marked."""
    is_mark = lambda eqn: eqn.primitive is covered_p and eqn.params["rightly"]
    marks = filter(is_mark, equations(jaxpr))
    return ft.reduce(
        operator.or_, [labelled.covering[m.params["number"]] for m in marks], 0
    )


def _has_inner_derivatives(jaxpr: Any) -> bool:
    """Whether a program takes derivatives with respect to slots."""

    def is_inner(eqn):
        is_tag = eqn.primitive is tag_p
        return eqn.primitive is statistic_p or (is_tag and eqn.params["layout"].inner)

    return any(map(is_inner, equations(jaxpr)))


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
        value, *_ = values
        return [value._replace(sources=value.sources | STATISTIC)], []
    if eqn.primitive is unseen_p:
        (value,) = values
        unseen = unseen_bit(eqn.params["number"])
        return [value._replace(sources=value.sources | unseen)], []
    if eqn.primitive is covered_p:
        (value,) = values
        return [
            value._replace(sources=_marked(covering, value.sources, **eqn.params))
        ], []
    if eqn.primitive is not tag_p:
        return None
    label = label_of(eqn)
    if label is None:
        # The loss function itself has filled this tag, to collect curvature in it.
        return values[:1], []
    layout = eqn.params["layout"]
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
        # A direction, or a gradient, may be the same for all examples; the input is not.
        sources=x.sources | values[layout.num_rows - 1].sources,
        device_axes=varying(y_aval),
        devices=number_of_parts(y_aval),
        derivative=layout.derivative,
        reverse=layout.reverse,
        skipped=layout.skipped,
    )
    # The tag sees how the output depends on the layer's parameters, so that this
    # dependence ends here. But a dependence of the layer's input on the same parameters
    # goes on. (An array of which several tags cover parts has the bits of all of them.)
    covered = covering[label.number]
    return [y._replace(sources=y.sources & ~covered | x.sources & covered)], [use]


def _marked(
    covering: dict[int, int], sources: int, number: int, rightly: bool, whole: bool
) -> int:
    """The sources of a value that is marked as used rightly, or wrongly, by a layer; and
    that is to be the `whole` parameter."""
    if not rightly:
        return sources | parameter_bit(number)
    misused = whole and sources & changed(parameter_bit(number))
    return sources & ~covering[number] | (misused_bit(number) if misused else 0)


def _combined(
    parameters: int, expressions: Expressions, eqn: Equation, values: list[Value]
) -> int:
    """The sources of the results of an operation, given the bits of all `parameters`.
    Those of them that the results are computed of are changed, unless they are only
    taken apart, chosen from, or added to. (Of a step on the parameters, as in
    meta-learning, a layer sees the derivative in what the step leads to: the identity,
    and more.)"""
    sources, name = all_sources(values), eqn.primitive.name
    used = sources & parameters
    sources &= ~changed(parameters)
    if not used:
        return sources
    as_they_are = [unchanged(value.sources) & used for value in values]
    if name in ("add", "add_any", "sub"):
        terms = as_they_are[:1] if name == "sub" else as_they_are
        kept = ft.reduce(operator.or_, terms)
    elif (
        name in _MOVING
        or (name == "select_n" and _chooses(expressions, eqn, values))
        or (name in ("mul", "div") and _is_one(eqn.invars[1]))
    ):
        pairs = zip(values, as_they_are, strict=True)
        kept = used & ~ft.reduce(operator.or_, [v.sources & ~own for v, own in pairs])
    else:
        kept = 0
    return sources | changed(used & ~kept)


def _chooses(expressions: Expressions, eqn: Equation, values: list[Value]) -> bool:
    """Whether a selection has parameters for all of its entries: all or none of an array
    is chosen, or another array of them, or the same without a derivative (which JAX makes
    of a `cond` for each example)."""
    which: Any = eqn.invars[0].aval
    if which.ndim == 0:
        return True
    _, *cases = values
    used = ft.reduce(operator.or_, [case.sources for case in cases])
    with_one = [case for case in cases if case.sources]
    stopped = {expressions.stopped(case.expression) for case in with_one}
    return all(c.sources == used or c.expression in stopped for c in cases)


def _is_one(atom: Any) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 1))


# What leaves parameters what they are, or takes them out of other arrays and puts them
# together again. (That they are in their places then, nobody looks at: a `vmap` moves
# axes of stacks, too.)
_MOVING = frozenset(
    "all_gather broadcast_in_dim concatenate convert_element_type copy copy_p "
    "dynamic_slice dynamic_update_slice expand_dims gather name optimization_barrier pad "
    "pcast psum pvary reduce_precision reshape reshard sharding_constraint slice "
    "split squeeze stop_gradient transpose".split()
)


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
