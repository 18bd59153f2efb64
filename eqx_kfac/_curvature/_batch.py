"""A batch of examples, and what a step asks of it: all at once, in micro-batches, or of
the first examples alone."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float

from .._custom_types import Key, Kwargs, Model, Weights
from .._devices import zeros_of
from .._fisher import AbstractFisher
from .._module import PlainModule
from .._program import analyse, Program, run
from .._tag import empty_tags, fill_rows, fill_tags
from ._average import factors, has_bases, in_new_bases
from ._gradient_rows import GradientRows, row_slots, RowSlots
from ._linearise import BatchPart, evaluate, Kind, Linearisation, linearise, whole


class Batch(PlainModule):
    """A loss function and its arguments. More than one micro-batch: the arrays among
    `args` are split along their first axis, and whatever is asked is added up over them,
    one after the other; `kwargs` are handed on whole."""

    loss_fn: Callable
    args: tuple
    kwargs: Kwargs
    micro_batches: int = eqx.field(static=True, default=1)

    def first(self, examples: int | None) -> "Batch":
        """The first `examples`, in micro-batches that are no larger than those of the
        whole batch, and of equal size."""
        if examples is None:
            return self
        number = self._number_of_examples(f"the first {examples} examples")
        if examples == number:
            return self
        if examples > number:
            raise ValueError(
                f"Asked for the first {examples} examples of a batch of {number}."
            )
        most = number // self.micro_batches
        sizes = [size for size in range(1, most + 1) if examples % size == 0]
        args = self._map_args(lambda x: x[:examples])
        return Batch(self.loss_fn, args, self.kwargs, examples // sizes[-1])

    def linearise(
        self,
        model: Model,
        curvature: Model | None = None,
        row_slots: RowSlots | None = None,
        program: Program | None = None,
        collects: bool = True,
    ) -> "LinearisedBatch":
        """The batch at `model`, ready for everything that a step asks for.

        **Arguments:**

        - `curvature`: the curvature so far, in the bases of which blocks like
            [`eqx_kfac.EKFAC`][] take their statistics.
        - `row_slots`: where the rows of the gradient arrive; not of micro-batches.
        - `program`: what is known of the loss function already.
        - `collects`: whether tags are ready to collect statistics. This makes some of
            them copy parameters for every example. If they are not, whoever asks for
            curvature pays for another forward pass.
        """
        program = self.analyse(model) if program is None else program
        if self.micro_batches > 1:
            share, row_slots, linearised = self._share(model), None, None
        else:
            linearised = linearise(
                self.loss_fn,
                model,
                self.args,
                self.kwargs,
                fill=ft.partial(_filled, curvature, row_slots, collects),
                program=program,
                collects=collects,
            )
            share = linearised.share
        return LinearisedBatch(
            batch=self,
            model=model,
            bases=curvature,
            share=share,
            linearisation=linearised,
            row_slots=row_slots,
            program=program,
            collects=collects,
        )

    def analyse(self, model: Model, uses: bool = True, trains: bool = False) -> Program:
        """What the loss function does with the tags of the model; `uses` and `trains` are
        as for `analyse` of `_program`."""
        args = self.args if self.micro_batches == 1 else self._first_piece()
        parts = self.micro_batches
        return analyse(self.loss_fn, model, args, self.kwargs, uses, trains, parts)

    def row_slots(self, model: Model, program: Program) -> RowSlots | None:
        """Slots for the rows of the gradient, for those layers where preconditioning
        row by row is less work; `None` for micro-batches, whose rows are never all there
        at the same time."""
        if self.micro_batches > 1:
            return None
        return row_slots(self.loss_fn, model, self.args, self.kwargs, program)

    def value(self, model: Model, share: BatchPart) -> Float[Array, ""]:
        """The objective at another model: one more forward pass. As weights may depend on
        the model, the terms are counted anew (of a whole batch, by `evaluate`)."""
        if not share.is_whole:
            share = self._share(model)

        def piece(index, args):
            objective, _ = run(self.loss_fn, model, args, self.kwargs)
            return evaluate(objective, model, share), None

        return self.total(piece)[0]

    def total(self, fn: Callable) -> tuple[Any, Any]:
        """`fn(index, args) -> (summand, aux)`, the summands added up over micro-batches,
        the aux stacked."""
        if self.micro_batches == 1:
            return fn(0, self.args)
        pieces, static = eqx.partition(self._pieces(), _has_examples)
        rest = []  # What is no array among the aux, which a scan does not return.

        # JAX remembers what it has traced: the shapes of a sum are those of a summand.
        @ft.partial(jax.jit, inline=True)
        def summand(index, piece):
            summand, aux = fn(index, eqx.combine(piece, static))
            aux, others = eqx.partition(aux, eqx.is_array)
            rest[:] = [others]
            return summand, aux

        def body(total, indexed):
            added, aux = summand(*indexed)
            return jtu.tree_map(jnp.add, total, added), aux

        indexed = jnp.arange(self.micro_batches), pieces
        like, _ = jax.eval_shape(summand, *jtu.tree_map(lambda x: x[0], indexed))
        total, aux = jax.lax.scan(body, zeros_of(like), indexed)
        return total, eqx.combine(aux, rest[0])

    def _first_piece(self) -> tuple:
        """The arguments of the first micro-batch."""
        pieces, static = eqx.partition(self._pieces(), _has_examples)
        return eqx.combine(jtu.tree_map(lambda x: x[0], pieces), static)

    def _share(self, model: Model) -> BatchPart:
        """One micro-batch as a part of the whole, whose terms have to be counted first.
        Only the losses know how many terms they have; XLA leaves out of these forward
        passes what no count depends on, which is mostly everything."""

        def piece(index, args):
            objective, _ = run(self.loss_fn, model, args, self.kwargs)
            return whole(objective, model).counts, None

        counts, _ = self.total(piece)
        return BatchPart(counts, fraction=1 / self.micro_batches)

    def _pieces(self) -> tuple:
        """The arrays with the micro-batches as first axis. Example $i$ is in micro-batch
        $i$ mod $k$: if devices hold consecutive examples, each keeps its own."""
        k = self.micro_batches
        number = self._number_of_examples(f"{k} micro-batches")
        if number % k != 0:
            raise ValueError(f"{number} examples cannot be split into {k} micro-batches.")
        return self._map_args(
            lambda x: jnp.moveaxis(x.reshape(number // k, k, *x.shape[1:]), 1, 0)
        )

    def _number_of_examples(self, what: str) -> int:
        arrays = [x for x in jtu.tree_leaves(self.args) if _has_examples(x)]
        lengths = sorted({x.shape[0] for x in arrays})
        if len(lengths) != 1:
            raise ValueError(
                f"To take {what} of a batch, all arrays among the positional arguments "
                "of the loss function must have the examples as their first axis, but "
                f"the lengths of their first axes are {lengths}. Pass what does not "
                "belong to single examples (a PRNG key, an `eqx.nn.State`) by keyword: "
                "keyword arguments are handed on whole."
            )
        return lengths[0]

    def _map_args(self, fn: Callable) -> tuple:
        return jtu.tree_map(lambda x: fn(x) if _has_examples(x) else x, self.args)


class ValueAndGrads(NamedTuple):
    """An objective at a model, and its gradient there."""

    value: Float[Array, ""]
    grads: Model
    # What else the loss function returned; of several micro-batches, stacked.
    aux: Any = None
    rows: GradientRows | None = None  # The rows of the gradient, where asked for.
    # Whether a term of a loss has a weight below zero.
    has_negative_weights: Bool[Array, ""] | bool = False
    kind: Kind = Kind()


class LinearisedBatch(PlainModule):
    """A batch at a model."""

    batch: Batch
    model: Model
    bases: Model | None  # The curvature so far, for blocks that need its bases.
    share: BatchPart
    linearisation: Linearisation | None  # `None` if there are several micro-batches.
    row_slots: RowSlots | None
    program: Program = eqx.field(static=True)
    collects: bool = eqx.field(static=True)

    def first(self, examples: int | None) -> "LinearisedBatch":
        """The first `examples` of the batch, at the same model."""
        batch = self.batch.first(examples)
        return self if batch is self.batch else batch.linearise(self.model, self.bases)

    def value_and_grads(self) -> ValueAndGrads:
        """The objective and its gradient, and all else that the same pass tells. Asked
        for by itself, each would be another trace of the loss function, if there are
        several micro-batches."""

        def piece(_, lin):
            pulled = lin.gradient()
            rows = None if self.row_slots is None else self.row_slots.rows(pulled)
            summands = lin.value(), empty_tags(pulled), lin.negative_weights
            return summands, (lin.aux, rows, lin.kind)

        (value, grads, negative), (aux, rows, kind) = self._total(piece)
        kind = kind._replace(terms=kind.terms * self.batch.micro_batches)
        return ValueAndGrads(value, grads, aux, rows, negative > 0, kind)

    def curvature(self, fisher: AbstractFisher, key: Key | None) -> Model:
        """The factors of every tagged layer, in a tree shaped like the model, from as
        many examples as the Fisher wants. If a block needs bases and there are none yet,
        it gets those of a first estimate, and the statistics are taken once more."""
        part = self.first(fisher.examples)
        program = part.program.collecting(fisher)
        if not part.collects or program != part.program:
            part = part.batch.linearise(part.model, part.bases, program=program)
        if part.bases is None and has_bases(part.model):
            bases = in_new_bases(part._curvature(fisher, key), part.model)
            part = part.batch.linearise(part.model, bases, program=part.program)
        return part._curvature(fisher, key)

    def _curvature(self, fisher: AbstractFisher, key: Key | None) -> Model:
        def piece(index, linearisation):
            piece_key = key
            if key is not None and self.linearisation is None:
                piece_key = jax.random.fold_in(key, index)
            statistics = linearisation.statistics(fisher, piece_key)
            return (statistics, linearisation.l2()), None

        (statistics, l2), _ = self._total(piece)
        return factors(self.model, statistics, self.share.count, l2, self.bases)

    def gram(self, *directions: Model) -> Float[Array, "n n"]:
        r"""$d_a^\top C d_b$ with $C$ the Gauss-Newton matrix."""
        return self._total(lambda _, lin: (lin.gram(directions), None))[0]

    def surrogate_lengths(self, direction: Model) -> Float[Array, "3"]:
        r"""$d^\top F d$ with the Fisher of the losses without targets; the same with the
        Fisher of the losses that have targets; and the value of the latter."""
        return self._total(lambda _, lin: (lin.surrogate_lengths(direction), None))[0]

    def value_at(self, model: Model) -> Float[Array, ""]:
        """The objective at another model."""
        return self.batch.value(model, self.share)

    def _total(self, fn: Callable) -> tuple[Any, Any]:
        """`fn(index, linearisation) -> (summand, aux)`, over all micro-batches."""
        if self.linearisation is not None:
            return fn(0, self.linearisation)

        def piece(index, args):
            batch = self.batch
            linearised = linearise(
                batch.loss_fn,
                self.model,
                args,
                batch.kwargs,
                share=self.share,
                fill=ft.partial(_filled, self.bases, None, self.collects),
                program=self.program,
                collects=self.collects,
            )
            return fn(index, linearised)

        return self.batch.total(piece)


def _filled(
    curvature: Model | None,
    row_slots: RowSlots | None,
    collects: bool,
    model: Model,
    weights: Weights = None,
) -> Model:
    """The model, with tags that are ready for what is wanted of them."""
    filled = fill_tags(model, weights, curvature) if collects else model
    return filled if row_slots is None else fill_rows(filled, row_slots.slots)


def _has_examples(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and x.ndim > 0
