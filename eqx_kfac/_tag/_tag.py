"""The tag of a layer: what the layer is linear in, what is kept of its curvature, and
slots for that.

The *rows* of a layer are its inputs, and the gradients at its outputs. A tag makes
statistics of them, and *slots* are the places where statistics arrive: arrays of zeros,
whose cotangents the statistics are. A tag that has slots *collects*.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, Shaped
from wadler_lindig import AbstractDoc, TextDoc

from .._block import (
    AbstractBasisBlock,
    AbstractBlock,
    AbstractCollector,
    AbstractJointBlock,
    AbstractPerExampleBlock,
    check_block,
    Series,
    Statistics,
)
from .._checks import check_instance
from .._custom_types import Layer, Weights
from .._devices import (
    cast_varying,
    gathered,
    is_split,
    placed_like,
    varying_axes,
    zeros_beside,
)
from .._misc import accumulator, is_none
from .._module import PlainModule, replaced
from .._operator import MaskedOperator
from ..form import AbstractForm, Parameters
from ._collector import GradientCollector, RowCollector
from ._primitive import covered_p, Label, Layout, tag_p


class Contents(NamedTuple):
    """What is in a tag while it collects. Otherwise all is `None`.

    **Fields:**

    - `slots`: where the statistics of the block arrive.
    - `weights`: the weights of examples.
    - `basis`: the basis in which the block takes its statistics.
    - `trained_mask`: in a tag with the form `Parameters`, a mark for each parameter that
        is trained. Inside of the loss function, frozen parameters are in the layer again,
        and cannot be told from the others.
    - `row_slots`: where the rows themselves arrive, if they are asked for.
    - `gradient_slots`: where the gradient arrives, as far as the tag sees it.
    - `label`: the tag's number, as the shape of an array: see `Label`.
    - `decoys`: zeros of three shapes, which no tag uses. A loss function that changes
        with them works on all arrays of the model, and would change with slots, too.
    """

    slots: Statistics
    weights: Weights
    basis: Any
    trained_mask: tuple[Array | None, ...] | None
    row_slots: Statistics
    gradient_slots: Statistics
    label: Array | None = None
    decoys: tuple[Array | None, Array | None, Array | None] = (None, None, None)


class Tag(PlainModule):
    """Ends a layer's forward pass: `return self.tag(y, x)`.

    It says how the layer is linear in its parameters (its *form*) and how its curvature
    is approximated (its *block*). It has no arrays, and calling it returns `y` itself,
    except while curvature is being collected: then its slots are filled.

    **Fields:**

    - `leaves`: the arrays in its slots and beside them while curvature is being
        collected; as many times `None` otherwise. (Their number is fixed, so a filled tag
        may be combined with an empty one.)
    - `owner`: the tag of another layer whose weight is used here, if there is one.
    """

    form: AbstractForm = eqx.field(static=True)
    block: AbstractBlock = eqx.field(static=True)
    swapped: bool = eqx.field(static=True)
    # One flat tuple, because Python goes through every node of every tag at every step.
    leaves: tuple[Array | None, ...]
    owner: "Tag | None"

    def __init__(
        self, form: AbstractForm, block: AbstractBlock, *, swapped: bool = False
    ):
        """**Arguments:**

        - `form`: how the output depends on the parameters, e.g. `kfac.form.Dense()`.
        - `block`: what is kept of its curvature, e.g. `kfac.Kronecker()`.
        - `swapped`: whether the statistics are for a layer with the transposed weight;
            see [`eqx_kfac.Shared`][].

        **Raises:** `TypeError` for something of another kind.
        """
        check_instance("form", form, AbstractForm, "kfac.form.Dense()")
        check_block("block", block)
        self.form = form
        self.block = block
        self.swapped = swapped
        self.leaves = (None,) * _structure(form, block).num_leaves
        self.owner = None

    def __pdoc__(self, **kwargs: Any) -> AbstractDoc:
        """One line, wherever a model is printed. (Also by JAX, which wants a name for
        whatever is vmapped.)"""
        form, block = self.form.label, type(self.block).__name__
        form = form if form.endswith(")") else f"{form}()"
        sharing = getattr(self.block, "sharing", None)
        sharing = "" if sharing is None else repr(sharing)
        collecting = ", collecting" * self.collecting
        return TextDoc(f"Tag(form={form}, block={block}({sharing}){collecting})")

    @property
    def contents(self) -> Contents:
        """The `leaves`, by name."""
        return _structure(self.form, self.block).unflatten(self.leaves)

    @property
    def slots(self) -> Statistics:
        """The slots for the statistics of the block."""
        return self.contents.slots

    @property
    def statistics(self) -> Statistics:
        """The statistics, if this tag holds the cotangents of its slots."""
        slots = self.contents.slots
        if isinstance(self.block, (AbstractPerExampleBlock, AbstractJointBlock)):
            return self.block.from_per_example(slots)
        return slots

    def __call__(
        self, y: Inexact[Array, "*y"], x: Shaped[Array, "*x"]
    ) -> Inexact[Array, "*y"]:
        """**Arguments:**

        - `y`: the layer's output.
        - `x`: the layer's input.

        **Returns:**

        `y`. Differentiating it with respect to filled slots gives the statistics.
        """
        if isinstance(self.block, Series) and jtu.tree_leaves(self.slots):
            raise ValueError(
                "The block `kfac.Series` has to know which time step follows which: run "
                "the cell with `kfac.scan_cell(cell, hidden, inputs)`, or call "
                "`tag.remember` in a loop of your own."
            )
        if self.owner is not None:
            # The tag of the weight's owner takes the statistics of the weight. This one
            # takes those of the parameters that only this layer has, such as a bias.
            y = self.owner(y, x)
        return self._bind(y, x)

    def _bind(self, y: Array, x: Array) -> Array:
        if not self.collecting:
            return y
        y = self._bind_collector(y, x, self.block, self.contents.slots)
        return self._bind_others(y, x)

    def _bind_others(self, y: Array, x: Array) -> Array:
        """Binds the collectors of rows and of the gradient, beside the block."""
        contents = self.contents
        y = self._bind_collector(y, x, RowCollector(), contents.row_slots)
        return self._bind_collector(y, x, GradientCollector(), contents.gradient_slots)

    def _bind_collector(
        self, y: Array, x: Array, collector: AbstractCollector, slots: Statistics
    ) -> Array:
        leaves, treedef = jtu.tree_flatten(slots)
        if not leaves:
            return y
        for slot in leaves:
            if slot.dtype != accumulator(slot.dtype):
                raise TypeError(
                    f"The statistics of a layer would be added up in {slot.dtype}: the "
                    "whole model was cast, the slots of its tags included. Cast the "
                    "parameters only, with `kfac.cast(model, dtype)`."
                )
        contents = self.contents
        shared = contents.weights, contents.basis, contents.label
        shared, shared_treedef = jtu.tree_flatten(shared)
        # Inside of a `shard_map`, statistics differ between devices as the data do. The
        # slots do not, and the transpose of this cast adds up what arrives in them.
        y, x, leaves = cast_varying((y, x, leaves), varying_axes((y, x, leaves)))
        layout = Layout(self.form, collector, self.swapped, treedef, shared_treedef)
        return tag_p.bind(y, x, *shared, *leaves, layout=layout, stack=0, examples=0)

    def cover(self, array: Array | None, whole: bool = True) -> Array | None:
        """For a layer that is tagged at a zero beside its result: to be called with each
        of its parameters, where the result is computed from it.

        **Arguments:**

        - `array`: the parameter.
        - `whole`: whether it is the parameter itself, and not what is computed of it.

        **Returns:** `array`. While a program is analysed, it is marked as used rightly;
        any other use of the parameter is an error then.
        """
        return None if array is None else self._marked(array, True, whole)

    def uncover(self, array: Array) -> Array:
        """What was computed from a parameter that was marked as used rightly, marked as
        used wrongly after all."""
        return self._marked(array, rightly=False)

    def _marked(self, array: Array, rightly: bool, whole: bool = False) -> Array:
        if self.owner is not None:
            # The owner's weight may be transposed here.
            array = self.owner._marked(array, rightly, whole and not self.owner.swapped)
        label = self.contents.label
        if label is None:
            return array
        number = Label.read(label.shape).number
        return covered_p.bind(array, number=number, rightly=rightly, whole=whole)

    def memory(self, layer: Layer) -> Any:
        """What [`remember`][eqx_kfac.Tag.remember] passes on from one time step to the
        next, before the first time step: zeros. `None` if the block needs no memory, or
        collects nothing.
        """
        if not isinstance(self.block, Series) or not jtu.tree_leaves(self.slots):
            return None
        sizes = self.form.sizes(layer)
        dtype = self.form.some_parameter(layer).dtype
        # An input is remembered with a one behind it, which a bias would multiply.
        return jnp.zeros(sizes.d_in + 1, dtype), jnp.zeros(sizes.d_out, dtype)

    def remember(
        self, y: Inexact[Array, "*y"], x: Shaped[Array, "*x"], memory: Any
    ) -> tuple[Inexact[Array, "*y"], Any]:
        """Like calling the tag, but in a loop over time, with a block that needs to know
        which step follows which ([`eqx_kfac.Series`][]).

        **Arguments:**

        - `y`, `x`: the layer's output and input at this time step.
        - `memory`: `tag.memory(layer)`, or what the previous step returned.

        **Returns:** `y`, and the next step's `memory`.
        """
        if memory is None:
            return self(y, x), None
        # The block is given pairs: the inputs of this step and of the one before, and the
        # gradients of this step and of the next one. The input is carried forward. For
        # the gradient, this step tags a zero beside its output, and the next step adds
        # this zero to its own output: so both get the same gradient.
        before, zero = memory
        y = y + zero.astype(y.dtype)
        now = jnp.concatenate([x, jnp.ones(1, x.dtype)])
        both = jnp.concatenate([y, jnp.zeros_like(y)])
        pair = jnp.concatenate([x, before.astype(x.dtype)])
        both = self._bind_collector(both, pair, self.block, self.slots)
        y, zero_next = jnp.split(both, 2)
        following = now.astype(before.dtype), zero_next.astype(zero.dtype)
        return self._bind_others(y, x), following

    def parameters(self, layer: Layer, x: Any) -> Any:
        """For the form [`eqx_kfac.form.Parameters`][]: to be called at the start of a
        layer's forward pass, instead of at its end.

        **Arguments:**

        - `layer`: the layer itself.
        - `x`: its input, or anything else with arrays that belong to one example.

        **Returns:**

        `layer`; while curvature is being collected, with its parameters tagged, once for
        every example that `x` is vmapped over.
        """
        if not self.collecting or not is_trainable(self, layer):
            return layer
        # Any array that belongs to one example will do. If there is none, the layer has
        # the same input for all examples, and a number stands for it.
        arrays = [a for a in jtu.tree_leaves(x) if isinstance(a, jax.Array)]
        example = arrays[0] if arrays else jnp.zeros(())
        mask = self.contents.trained_mask or ()
        leaves = zip(self.form.parameters(layer), mask, strict=True)
        trained = tuple(None if mark is None else leaf for leaf, mark in leaves)
        part = self.form.only(layer, trained)
        # The parameters are tagged with a number of the example in the place of an input.
        # Its value does not matter, but its axes under `vmap` say what the examples are.
        number = jax.lax.stop_gradient(example.reshape(-1)[0])
        # The canonical matrix of this form is a single column.
        column = self(self.form.to_matrix(part)[..., 0], number)
        part = self.form.from_matrix(column[..., None], part)
        return self.form.replace(layer, self.form.parameters(part))

    @property
    def collecting(self) -> bool:
        """Whether there are any slots."""
        return any(leaf is not None for leaf in self.leaves)

    @property
    def copied(self) -> bool:
        """Whether a tag with the form `Parameters` is to be at copies of arrays."""
        label = self.contents.label
        return label is not None and Label.read(label.shape).copied

    @property
    def collects_gradient(self) -> bool:
        """Whether there are slots for the gradient that the tag sees."""
        return self.contents.gradient_slots.outputs.gradient is not None

    def fill(
        self,
        layer: Layer,
        weights: Weights,
        factors: Any = None,
    ) -> "Tag":
        """This tag, ready to collect. `weights` are the weights of examples, or `None`.
        `factors` is the curvature of the layer so far, or `None`; it may have a basis in
        which the statistics are to be taken."""
        slots = self.block.slots(self.form, layer)
        if not jtu.tree_leaves(slots):
            return self
        if not self.block.weighted:
            weights = None
        if weights is not None:
            weights = jnp.broadcast_to(weights, self.stack(layer) + weights.shape)
        contents = self.contents._replace(slots=slots, weights=weights)
        if factors is not None and isinstance(self.block, AbstractBasisBlock):
            contents = contents._replace(basis=self.block.basis(factors))
        return self._with_contents(
            contents._replace(trained_mask=self._trained_mask(layer))
        )

    def fill_rows(self, layer: Layer, slots: Statistics) -> "Tag":
        """This tag, ready to collect rows, if there are `slots` for them."""
        if not jtu.tree_leaves(slots):
            return self
        mask = self._trained_mask(layer)
        contents = self.contents._replace(row_slots=slots, trained_mask=mask)
        return self._with_contents(contents)

    def per_example(self, layer: Layer, examples: int, axes: frozenset) -> "Tag":
        """This tag, ready to collect, with slots in which the gradients of examples add
        up over all uses of the layer. Devices, along `axes`, have their own examples."""
        assert isinstance(self.block, AbstractPerExampleBlock)
        slots = self.block.per_example_slots(self.form, layer, examples)
        slots = slots._replace(outputs=cast_varying(slots.outputs, axes))
        return self._with_contents(self.contents._replace(slots=slots))

    def jointly(self, layer: Layer, examples: int | None, axes: frozenset) -> "Tag":
        """This tag, ready to collect what its block makes of gradients that are added up
        over an example's positions; and over all uses of the layer, if it is used several
        times, by so many `examples`. Devices, along `axes`, have their own."""
        assert isinstance(self.block, AbstractJointBlock)
        slots = self.block.joint_slots(self.form, layer, examples)
        if examples is not None:
            slots = slots._replace(outputs=cast_varying(slots.outputs, axes))
        # Every statistic is then a product with gradients, which have the weights of the
        # examples already.
        return self._with_contents(self.contents._replace(slots=slots, weights=None))

    def reversible(self) -> "Tag":
        """This tag, ready to collect rows of derivatives in reverse mode, too."""
        slots = self.block.reverse_slots(self.slots)
        return self._with_contents(self.contents._replace(slots=slots))

    def covered(self, layer: Layer) -> Any:
        """For a layer that is tagged at its result: what is to be called in its place.
        While a program is analysed, its parameters are marked as used rightly, because
        derivatives of the layer use them, too."""
        if self.contents.label is None:
            return layer
        parameters = tuple(map(self.cover, self.form.parameters(layer)))
        return self.form.replace(layer, parameters)

    def labelled(self, layer: Layer, label: Label, decoys: bool = False) -> "Tag":
        """This tag with a label, and with decoys, if it is ready to collect."""
        if not self.collecting:
            return self
        stack = self.stack(layer)
        leaf = self.form.some_parameter(layer)

        def zeros(*shape):
            return zeros_beside(leaf, (*stack, *shape), float, len(stack))

        contents = self.contents._replace(label=zeros(*label.shape))
        if decoys:  # A number, a vector and a matrix.
            contents = contents._replace(decoys=(zeros(), zeros(2), zeros(2, 2)))
        return self._with_contents(contents)

    def stack(self, layer: Layer) -> tuple[int, ...]:
        """The lengths of the axes along which whole layers are stacked."""
        stack = self.form.sizes(layer).stack
        # The last axes, `groups` in number, are for the maps that one layer consists of.
        return stack[: len(stack) - self.form.groups]

    def operator(self, factors: Any) -> lx.AbstractLinearOperator:
        """The curvature of one layer with these factors: what its block says of the
        canonical matrix, or of those entries of it that are not masked."""
        operator = self.block.operator(factors)
        if self.form.mask is None:
            return operator
        shape = operator.in_structure().shape
        d_out, _ = self.form.mask.entries.shape
        mask = self.form.mask.of_columns(math.prod(shape) // d_out)
        return MaskedOperator(operator, mask.reshape(shape))

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        """The canonical matrix of a layer (or of its gradient). If the layer's features
        are split over the devices of an explicit mesh, each device gets the whole matrix.
        """
        if is_split(layer):
            axes = len(self.stack(layer))
            whole = [
                None if p is None else gathered(p, axes)
                for p in self.form.parameters(layer)
            ]
            layer = self.form.only(layer, tuple(whole))
        return self.form.to_matrix(layer)

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        """The inverse of `to_matrix`: `layer` with its leaves taken from `matrix`, split
        as they were."""
        new = self.form.from_matrix(matrix, layer)
        if not is_split(layer):
            return new
        both = zip(self.form.parameters(new), self.form.parameters(layer), strict=True)
        placed = [None if p is None else placed_like(p, like) for p, like in both]
        return self.form.replace(new, tuple(placed))

    def fill_gradient(self, layer: Layer) -> "Tag":
        """This tag, ready to collect the gradient that it sees."""
        slots = GradientCollector().slots(self.form, layer)
        if not jtu.tree_leaves(slots):
            return self
        mask = self._trained_mask(layer)
        contents = self.contents._replace(gradient_slots=slots, trained_mask=mask)
        return self._with_contents(contents)

    def with_slots_of(self, other: "Tag") -> "Tag":
        """This tag, with the slots of another one, to whose statistics it then adds."""
        return self._with_contents(
            other.contents._replace(trained_mask=self.contents.trained_mask)
        )

    def _with_contents(self, contents: Contents) -> "Tag":
        leaves = tuple(_structure(self.form, self.block).flatten_up_to(contents))
        return replaced(self, "leaves", leaves)

    def _trained_mask(self, layer: Layer) -> tuple[Array | None, ...] | None:
        """The `trained_mask` of the contents. Its marks have the stack axes of the
        layer."""
        if not isinstance(self.form, Parameters):
            return None
        parameters = zip(self.form.parameters(layer), self.form.ranks, strict=True)
        return tuple(
            None if p is None else jnp.ones(p.shape[: p.ndim - rank], bool)
            for p, rank in parameters
        )

    def only_rows(self) -> "Tag":
        """This tag without anything but its slots for rows, if it has any."""
        empty = self.empty()
        contents = empty.contents._replace(row_slots=self.contents.row_slots)
        return empty._with_contents(contents)

    def empty(self) -> "Tag":
        """This tag without its slots. (It has no owner either: a tag only has one inside
        of the loss function, where `eqx_kfac.Shared` gives it the owner's filled tag.)"""
        return Tag(self.form, self.block, swapped=self.swapped)


@ft.cache  # It is needed whenever something in a tag is looked at.
def _structure(form: AbstractForm, block: AbstractBlock) -> Any:
    """The treedef of the contents of a tag, in which `None` is a leaf."""
    mask = (None,) * len(form.names) if isinstance(form, Parameters) else None
    rows, gradient = RowCollector().empty(), GradientCollector().empty()
    basis = block.empty_basis() if isinstance(block, AbstractBasisBlock) else None
    contents = Contents(block.empty(), None, basis, mask, rows, gradient)
    return jtu.tree_structure(contents, is_leaf=is_none)


def is_trainable(tag: Tag, layer: Layer) -> bool:
    """Whether any parameter that a tag covers is there to be trained."""
    return tag.form.some_parameter(layer) is not None
