"""Gradients as the rows that they are sums of products of: where these are less to hold,
as in large layers that few rows pass."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._curvature import collected_rows, linearise, used_sites, UsedSite
from .._custom_types import Args, Key, Kwargs, Model
from .._fisher import AbstractFisher
from .._misc import accumulator
from .._program import Program
from .._tag import fill_rows
from ..analysis._capture import captured
from ._compare import Sides
from ._plan import scale, Vectors


SMALL = 10**6  # So many numbers are few in any layer.


class Rows(NamedTuple):
    """How many rows a gradient of one layer has, or of a stack, and of what size."""

    number: int  # In one of the stack.
    inputs: int  # How many numbers their inputs are,
    outputs: int  # and the gradients at their outputs.


class Places:
    """The layers of a model as sites where rows pass. They are looked at when somebody
    asks, which takes a trace of the program."""

    def __init__(
        self,
        loss_fn: Callable,
        model: Model,
        args: Args,
        kwargs: Kwargs,
        program: Program,
        fisher: AbstractFisher | None = None,
    ):
        # Without the mean of the examples, a gradient is no sum of rows.
        self._are_sums = fisher is None or not fisher.centred
        self._what = loss_fn, model, args, kwargs, program
        self._looked: Any = None

    def _found(self) -> tuple[list[UsedSite], Any]:
        if self._looked is None:
            self._looked = used_sites(*self._what)
        return self._looked

    def few(self, number: int) -> Rows | None:
        """The rows of the layer of this number, if they are no more to hold than its
        gradient; and if they can be told apart, because it is used once."""
        if not self._are_sums:
            return None
        used = self._found()[0][number]
        use, sizes = used.once, used.site.sizes
        is_masked = used.site.form.mask is not None  # Then it is no sum of rows.
        if use is None or use.derivative or is_masked:
            return None
        members, d_out, d_in = (
            math.prod(sizes.stack),
            sizes.d_out,
            sizes.d_in + sizes.bias,
        )
        stacked = math.prod(used.site.stack[use.stack :])  # That a loop goes along.
        outputs = stacked * math.prod(use.g.shape)
        rows = outputs // (members * d_out)
        inputs = members * rows * d_in
        if inputs + outputs > max(members * d_out * d_in, SMALL):
            return None
        return Rows(rows, inputs, outputs)

    def pulled(self, numbers: list[int], vectors: Vectors, key: Key | None) -> Callable:
        """A function of the program's arguments and of indices of `vectors`: the rows of
        the gradients of these layers."""
        loss_fn, *_, program = self._what
        found, treedef = self._found()
        sites = [found[i].site for i in numbers]
        uses: Any = [found[i].once for i in numbers]
        slots: list[Any] = [None] * len(found)
        for i, site, use in zip(numbers, sites, uses, strict=True):
            slots[i] = site.slots(use)
        slots = treedef.unflatten(slots)

        def sides(site, use, x, g):
            x, g = captured(site, use, x, g, several=True).rows()
            stack = len(site.sizes.stack)
            x = x.reshape(*x.shape[:stack], -1, x.shape[-1])
            g = g.reshape(*g.shape[: 1 + stack], -1, g.shape[-1])
            dtype = accumulator(g.dtype)
            return Sides(x.astype(dtype), g.astype(dtype))

        def pull(model, args, kwargs, indices):
            fill = lambda model, weights=None: fill_rows(model, slots)
            lin = linearise(loss_fn, model, args, kwargs, fill=fill, program=program)

            @jax.jit  # Traced once, though it is called twice.
            def raw(index):
                terms = lin.objective.weighted_losses
                cotangents = vectors.cotangents([loss for _, loss in terms], index, key)
                scaled = [
                    jtu.tree_map(lambda a, s=scale(*term): a * s.astype(a.dtype), own)
                    for term, own in zip(terms, cotangents, strict=True)
                ]
                own = collected_rows(lin.pull(scaled))
                return [own[i] for i in numbers]

            inputs = [own.inputs for own in raw(indices[0])]
            outputs = jax.lax.map(lambda i: [own.outputs for own in raw(i)], indices)
            zipped = zip(sites, uses, inputs, outputs, strict=True)
            return [sides(*each) for each in zipped]

        return pull
