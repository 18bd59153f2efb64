"""What is compared, and how: dense where that fits, else along vectors that are pulled
back, all of them or random ones."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from .._curvature import Batch
from .._custom_types import Args, Key, Kwargs, Model
from .._fisher import AbstractFisher, CurvatureProp, Empirical, Exact
from .._misc import draw, trailing
from .._program import Program
from ._work import Work, work


MEMORY = 1e9  # Bytes.
ALL = 1e11  # Operations that may be spent on an exact answer,
SOME = 1e12  # and on estimates, which have larger products: some ten seconds each.


def compiled(fn: Callable, *args: Any, optimise: bool = False) -> Callable:
    """`fn(*args, *more)`, which returns arrays, as a function of more arrays. On a CPU, a
    program that runs a few times is not worth the time that LLVM would spend on it,
    unless it runs for long: products of matrices are calls of a library."""
    params, static = eqx.partition(args, eqx.is_array)
    quick = jax.default_backend() == "cpu" and not optimise
    options = {"xla_backend_optimization_level": 0} if quick else None
    call = lambda params, *more: fn(*eqx.combine(params, static), *more)
    call = jax.jit(call, compiler_options=options)
    return lambda *more: call(params, *more)


class Costs(NamedTuple):
    """What is known of a loss function before it runs."""

    program: Program
    work: Work
    columns: int  # Of a root of the Fisher at the outputs of all terms.
    outputs: int  # Of one example: what `kfac.Exact` pulls back.
    examples: int
    terms: int
    itemsize: int

    def takes_long(self, vectors: "Vectors") -> bool:
        """Whether a program that pulls all these back is worth optimising."""
        return not vectors.sampled and vectors.number * self.work.operations > 1e10


class Vectors(NamedTuple):
    """Cotangents `cotangents(losses, index, key)` of the outputs: the outer products of
    what comes back from them add up to the exact block; or, of random ones, their mean
    is one in expectation."""

    cotangents: Callable
    number: int
    sampled: bool


def costs(loss_fn: Callable, model: Model, args: Args, kwargs: Kwargs) -> Costs:
    """Traces the loss function."""
    found = []

    def look(model, args, kwargs):
        program = Batch(loss_fn, args, kwargs).analyse(model, uses=False)
        needed = work(loss_fn, model, args, kwargs)
        losses = needed.losses
        shapes = [loss.root_shape for loss in losses]
        leaves = jtu.tree_leaves([loss.outputs for loss in losses])
        found[:] = [
            Costs(
                program,
                needed,
                columns=sum(int(np.prod(shape)) for shape in shapes),
                outputs=Exact().number(losses),
                examples=max(shape[0] for shape in shapes),
                terms=max(int(np.prod(shape[:-1])) for shape in shapes),
                itemsize=max(leaf.dtype.itemsize for leaf in leaves),
            )
        ]

    eqx.filter_eval_shape(look, model, args, kwargs)
    return found[0]


def vectors(
    costs: Costs,
    fisher: AbstractFisher | None,
    key: Key | None,
    numbers: int,
    memory: float = MEMORY,
) -> tuple[Vectors, AbstractFisher, Key | None]:
    """What the exact blocks are made of, if so many `numbers` come back from each vector;
    and the estimate to approximate with, and its key: [`eqx_kfac.Exact`][], unless
    something else was asked for or that is too much."""
    pullback = 2 * costs.work.operations + 4 * numbers
    affordable = lambda number: number * pullback <= ALL
    if fisher is None:
        fisher, needed = Exact(), costs.outputs
        if costs.program.wants_separation:
            fisher, needed = Exact(example_axes=0), costs.columns
        if not affordable(needed):
            most = 32
            if costs.terms == 1:
                most = np.clip(0.2 * memory // (costs.itemsize * numbers), 2, most)
            number = int(np.clip(0.3 * SOME // pullback, min(4, most), most))
            fisher, key = CurvatureProp(number), jax.random.key(1)
            if costs.terms == 1:
                # What comes back from any cotangent of a single term is a multiple of
                # a gradient of that term: compared with the same ones, the tags'
                # statistics have no noise.
                return Vectors(fisher.cotangents, number, False), fisher, key
    if isinstance(fisher, Empirical):
        exact = Vectors(_score_of_one, costs.examples, False)
    elif fisher.centred:
        exact = Vectors(_centred_column, costs.columns, False)
    else:
        exact = Vectors(Exact(0).cotangents, costs.columns, False)
    if affordable(exact.number):
        return exact, fisher, key
    return random_vectors(fisher, pullback), fisher, key


def scale(coefficient: Any, loss: Any) -> Array:
    """What cotangents of a loss' outputs are multiplied by, of every term: so that the
    outer products of what comes back are the Fisher of the mean."""
    return jnp.sqrt(coefficient * loss.term_weights / loss.count)[..., None]


def random_vectors(fisher: AbstractFisher | None, operations: float) -> Vectors:
    """Random vectors, as many as can be had if each takes so many operations."""
    if isinstance(fisher, Empirical):
        draws = _signed_scores
    elif fisher is not None and fisher.centred:
        draws = _centred_signs
    else:
        draws = _signs
    return Vectors(draws, int(np.clip(SOME // operations, 8, 128)), True)


def _score_of_one(losses: Any, index: Any, key: Key | None) -> Any:
    """The scores of all examples, with zeros in the place of all but one."""

    def only(a):
        return a * trailing((jnp.arange(len(a)) == index).astype(a.dtype), a)

    return [jtu.tree_map(only, loss.score(loss.targets)) for loss in losses]


def _signs(losses: Any, index: Any, key: Key | None) -> Any:
    """A root of the Fisher times random signs."""
    return CurvatureProp().cotangents(losses, index, jax.random.key(2))


def _centred_column(losses: Any, index: Any, key: Key | None) -> Any:
    """A column of a root of the Fisher at the outputs of one example, less the mean of
    such columns over the examples."""
    (loss,) = losses
    shape = loss.root_shape
    unit = jax.nn.one_hot(index, math.prod(shape), dtype=loss.term_weights.dtype)
    return _centred(loss, unit.reshape(shape))


def _centred_signs(losses: Any, index: Any, key: Key | None) -> Any:
    """The columns that `_centred_column` makes, times random signs."""
    (loss,) = losses
    key = jax.random.fold_in(jax.random.key(2), index)
    dtype = loss.term_weights.dtype
    return _centred(loss, draw(jax.random.rademacher, key, loss.root_shape, dtype))


def _centred(loss: Any, v: Array) -> Any:
    return [Exact().root(loss, v - jnp.mean(v, axis=0, keepdims=True))]


def _signed_scores(losses: Any, index: Any, key: Key | None) -> Any:
    """The scores of all examples, with a random sign for each."""
    most = max(loss.leading[0] for loss in losses)
    key = jax.random.fold_in(jax.random.key(2), index)
    signs = draw(jax.random.rademacher, key, (most,), losses[0].term_weights.dtype)

    def times(a):
        return a * trailing(signs[: len(a)].astype(a.dtype), a)

    return [jtu.tree_map(times, loss.score(loss.targets)) for loss in losses]
