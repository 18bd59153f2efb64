"""Curvature over more data than one batch."""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._block import is_statistics, Statistics
from .._curvature import BatchPart, factors, in_new_bases, linearise
from .._custom_types import Key, Model
from .._devices import zeros_of
from .._fisher import AbstractFisher, check_separate, Exact
from .._misc import accumulator
from .._program import analyse
from .._tag import fill_tags


class AccumulatedStatistics(eqx.Module):
    """The sums after some batches. (Their contents are of no interest; the
    type is a PyTree of arrays, to be carried through `jit`, `scan`, and checkpoints.)

    **Fields:**

    - `inputs`: statistics of the layers' inputs, shaped like the model.
    - `outputs`: statistics of the gradients at their outputs, each shaped like the model:
        for each loss, then for the sum of each pair of them.
    - `counts`: the number of terms of each loss, added up with their weights: scalars.
    - `l2`: the coefficients of L2 terms, added up over batches, shaped like the model.
    - `batches`: the number of batches, a scalar.
    """

    inputs: Model
    outputs: list[Model]
    counts: list[Float[Array, ""]]
    l2: Model
    batches: Float[Array, ""]


class Accumulator(eqx.Module):
    r"""The curvature of a loss over a whole data set, from batches of any sizes. It
    equals the curvature of all of them in one batch. (The mean of factors over batches
    does not: $A$ is a mean over rows, $G$ a mean over loss terms.)

    !!! Example

        ```python
        accumulator = kfac.analysis.Accumulator(loss_fn)
        add = eqx.filter_jit(accumulator.add)
        total = accumulator.init(model, x, y)
        for x, y in batches:
            total = add(total, model, x, y)
        curvature = accumulator.finish(total, model)
        ```

    Blocks in a basis ([`eqx_kfac.EKFAC`][]) take two passes. The first finds the basis;
    its eigenvalues are still those of the Kronecker product. The second gets the result
    as `bases`.
    """

    loss_fn: Callable
    fisher: AbstractFisher
    bases: Model | None

    def __init__(
        self,
        loss_fn: Callable,
        fisher: AbstractFisher = Exact(),
        bases: Model | None = None,
    ):
        """**Arguments:**

        - `loss_fn`, `fisher`: as for [`eqx_kfac.curvature`][].
        - `bases`: curvature in whose bases some blocks take their statistics.
        """
        check_separate(fisher, "kfac.analysis.Accumulator")
        self.loss_fn = loss_fn
        self.fisher = fisher
        self.bases = bases

    def init(self, model: Model, *args: Any, key: Key | None = None, **kwargs: Any):
        """The total of no batches. **Arguments:** those of `add`, with any batch: only
        shapes are used."""
        shapes = eqx.filter_eval_shape(self._sums, model, args, key, kwargs)
        return zeros_of(shapes)

    def add(
        self,
        total: AccumulatedStatistics,
        model: Model,
        *args: Any,
        key: Key | None = None,
        **kwargs: Any,
    ) -> AccumulatedStatistics:
        """**Arguments:**

        - `total`: what `init` or `add` returned.
        - `model`, `args`, `kwargs`: as for `loss_fn`; always the same model.
        - `key`: for the Fisher estimate, a new one for every batch.

        **Returns:** the total with one more batch.
        """
        return jtu.tree_map(jnp.add, total, self._sums(model, args, key, kwargs))

    def finish(self, total: AccumulatedStatistics, model: Model) -> Model:
        """**Returns:** [`eqx_kfac.curvature`][] of all batches in one."""
        dtype = accumulator(*[n.dtype for n in total.counts])
        counts = [n.astype(dtype) for n in total.counts]
        count = jnp.max(jnp.stack(counts))
        # The gradients of loss i count by a_i = √(N / N_i), known only now. Their moments
        # are quadratic in them: (Σ a_i g_i)² from g_i² and (g_i + g_j)².
        roots = [jnp.sqrt(count / n) if len(counts) > 1 else 1.0 for n in counts]
        alone = [a * (2 * a - sum(roots)) for a in roots]
        pairs = [a * b for a, b in itertools.combinations(roots, 2)]
        outputs = jtu.tree_map(
            lambda *moments: sum(
                jnp.asarray(c, m.dtype) * m
                for c, m in zip([*alone, *pairs], moments, strict=True)
            ),
            *total.outputs,
        )
        statistics = jtu.tree_map(
            lambda x, g: Statistics(x.inputs, g.outputs),
            total.inputs,
            outputs,
            is_leaf=is_statistics,
        )
        l2 = jtu.tree_map(lambda x: x / total.batches.astype(x.dtype), total.l2)
        curvature = factors(model, statistics, count, l2, self.bases)
        return in_new_bases(curvature, model) if self.bases is None else curvature

    def _sums(
        self, model: Model, args: tuple, key: Key | None, kwargs: dict
    ) -> AccumulatedStatistics:
        fill = ft.partial(fill_tags, curvature=self.bases)
        program = analyse(self.loss_fn, model, args, kwargs)
        program = program.collecting(self.fisher)
        lin = linearise(self.loss_fn, model, args, kwargs, fill=fill, program=program)
        counts = lin.share.counts
        # Which inputs count, and by how much, may depend on all losses together.
        inputs = lin.statistics(self.fisher, key)
        ones = BatchPart([jnp.ones_like(n) for n in counts], 1.0)
        lin = eqx.tree_at(lambda lin: lin.share, lin, ones)
        each = [(i,) for i in range(len(counts))]
        statistics = [
            lin.statistics(_Of(self.fisher, losses), key)
            for losses in [*each, *itertools.combinations(range(len(counts)), 2)]
        ]
        return AccumulatedStatistics(
            inputs=_only(inputs, lambda s: Statistics(s.inputs, None)),
            outputs=[
                _only(tree, lambda s: Statistics(None, s.outputs)) for tree in statistics
            ],
            counts=counts,
            l2=lin.l2(),
            batches=jnp.ones(()),
        )


class _Of(AbstractFisher):
    """The cotangents of some losses of several, and zero for the others."""

    examples = None
    fisher: AbstractFisher
    losses: tuple[int, ...] = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)

    def __init__(self, fisher: AbstractFisher, losses: tuple[int, ...]):
        self.fisher = fisher
        self.losses = losses
        self.batch_size = fisher.batch_size

    def number(self, losses):
        return self.fisher.number(losses)

    def cotangents(self, losses, index, key):
        cotangents = self.fisher.cotangents(losses, index, key)
        return [
            c if i in self.losses else jtu.tree_map(jnp.zeros_like, c)
            for i, c in enumerate(cotangents)
        ]

    def check(self, model: Model) -> None:
        self.fisher.check(model)


def _only(tree: Model, part: Callable) -> Model:
    return jtu.tree_map(part, tree, is_leaf=is_statistics)
