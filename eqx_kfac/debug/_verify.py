"""Approximations of a layer's curvature beside the curvature itself."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool

from .._checks import check_number, POSITIVE
from .._curvature import Batch, linearise
from .._custom_types import Args, Key, Kwargs, Layer, Model
from .._devices import over_stack
from .._fisher import AbstractFisher, check_whole, Empirical, Exact
from .._program import Program
from .._tag import (
    check_order,
    check_tagged,
    is_trainable,
    map_tags,
    Tag,
    TaggedLayer,
    trained_layers,
    with_tags,
)
from ._blocks import exact_blocks, only, operators, pulled
from ._check import LayerCheck, Verification
from ._compare import along_vectors, compared, Comparison, densely, ready
from ._parts import groups, parts, Plan, Size, sizes
from ._plan import compiled, Costs, costs, MEMORY
from ._progress import progress
from ._rows import Places
from ._table import block_shown, sizes_shown


def verify(
    loss_fn: Callable,
    model: Model,
    *args: Any,
    fisher: AbstractFisher | None = None,
    key: Key | None = None,
    limit: int = 4096,
    memory: float = MEMORY,
    **kwargs: Any,
) -> Verification:
    r"""Compares the approximate curvature of every tagged layer with its exact block,
    from derivatives of the model that do not know about tags. It finds a wrong scale, a
    wrong input or a forgotten bias in a layer, a form or a block of your own.

    First, it checks whether every tag sees all of its layer's gradient: `unseen` is the
    share of it that did not pass through the tag, because the layer's parameters are used
    or changed outside of the layer, or its derivative with respect to the input is used.
    It must be zero. This takes one backward pass, whatever the size of the model.

    Take a few examples. With *one* example, in which a layer is used once,
    [`eqx_kfac.Kronecker`][] is exact, whatever the model: then any verdict but `exact` is
    a mistake (unless `fisher` is [`eqx_kfac.ExactGGN`][], and the outputs are no natural
    parameters: it is compared with the Fisher). With more examples, an approximation is
    only approximate; `ratio`, the trace of the approximation divided by the exact one,
    should be of the order of 1.

    What is small is compared as a dense matrix, which is exact. What is large is compared
    along gradients $g$, $F = \sum g g^\top$: those of all columns of a root of the Fisher
    at the outputs, if there are few, which is also exact; else those of random
    combinations of them, $F = \mathbb{E}\, g g^\top$, with

    $$\operatorname{tr} F = \mathbb{E} \lVert g \rVert^2, \quad
    \langle \hat F, F \rangle = \mathbb{E}\, g^\top \hat F g, \quad
    \lVert F \rVert^2 = \mathbb{E}\, (g^\top g')^2$$

    Estimates are printed with their standard errors. (Where a block is nearly exact, an
    estimated error is mostly noise: take fewer examples.) There, a gradient that is a sum
    of few rows $g \bar x^\top$ is never written out: that these are the whole gradient is
    what was checked first.

    **Arguments:**

    - `loss_fn`, `model`, `args`, `kwargs`: as for [`eqx_kfac.curvature`][].
    - `fisher`: the estimate to approximate with. `None`: [`eqx_kfac.Exact`][], or, if
        that takes more than some $10^{12}$ operations, several samples of
        [`eqx_kfac.CurvatureProp`][], whose noise is in the figures. The exact block is
        that of the Fisher (if outputs are natural parameters, also the
        Gauss-Newton matrix), with which [`eqx_kfac.MonteCarlo`][] agrees up to its noise;
        for [`eqx_kfac.Empirical`][], it is the mean over examples of the outer products
        of their gradients, and for [`eqx_kfac.Centred`][] a covariance.
    - `key`: for the Fisher estimate.
    - `limit`: the largest number of parameters of a layer that is compared as a dense
        matrix, which has the square of that number of entries.
    - `memory`: how many bytes the factors and the gradients that are held at the same
        time may take, besides those of `unseen`: of a large model, layers are compared
        group by group. A layer whose factors alone take more is only checked for what its
        tag does not see.

    **Returns:**

    A [`eqx_kfac.debug.Verification`][]: `report.layers`, `report[path]`, `report.exact`;
    `print(report)` is a table. Neither of the two blocks has what an `L2` term adds.

    **Raises:** as [`eqx_kfac.curvature`][], except for parameters that bypass their tag:
    these are in the report.

    !!! Example

        ```python
        print(kfac.verify(loss_fn, model, x[:1], y[:1]))
        ```
    """
    check_order("verify", loss_fn, model, "kfac.verify(loss_fn, model, x, y)")
    check_tagged(model)
    check_whole(fisher, "kfac.verify")
    check_number("memory", memory, POSITIVE)
    problem = Problem(loss_fn, args, kwargs, fisher, key, limit, memory)
    checks = _checks(problem, model)
    doubtful = [c for c in checks if not (c.shared or c.single) and c.is_off(3)]
    # The covariance of one example is zero.
    is_centred = fisher is not None and fisher.centred
    if doubtful and not is_centred:
        checks = _second_look(problem, model, checks, {c.path for c in doubtful})
    return Verification(tuple(checks))


class Problem(NamedTuple):
    """What `verify` is asked."""

    loss_fn: Callable
    args: Args
    kwargs: Kwargs
    fisher: AbstractFisher | None
    key: Key | None
    limit: int
    memory: float


def _second_look(
    problem: Problem, model: Model, checks: list[LayerCheck], doubtful: set[str]
) -> list[LayerCheck]:
    """The checks of layers whose scale looks wrong, with their ratios for the first
    example by itself, of which all blocks have the right trace. (Of several examples, it
    may be anything, if those with large inputs have small gradients.)"""
    try:
        first = Batch(problem.loss_fn, tuple(problem.args), problem.kwargs).first(1)
        found = _checks(problem._replace(args=first.args), model)
    except Exception:  # The loss function may want more of them.
        return checks
    alone = {c.path: c.ratio for c in found if c.single and not c.estimated}
    return [
        dataclasses.replace(c, alone=alone[c.path])
        if c.path in doubtful and c.path in alone
        else c
        for c in checks
    ]


def _checks(problem: Problem, model: Model) -> list[LayerCheck]:
    loss_fn, args, kwargs, *_ = problem
    every = costs(loss_fn, model, args, kwargs)
    layers = trained_layers(model)
    measured = sizes(model)

    def looked_at(model, args, kwargs):
        shares = _unseen(loss_fn, model, args, kwargs, every.program)
        inverse = [_is_inverse(tag, layer) for _, tag, layer in trained_layers(model)]
        return (*map(jtu.tree_leaves, shares), inverse)

    found: dict[int, tuple[Comparison, Comparison | None]] = {}
    fitting = [i for i, size in enumerate(measured) if size.bytes <= problem.memory]
    number = 1 + len(list(groups(fitting, measured, problem.memory)))
    with progress("verify", number) as begin:
        begin(f"compiling the gradients of {len(layers)} layers")
        each = compiled(looked_at, model, args, kwargs)()
        each = [list(map(np.asarray, column)) for column in each]
        # What has no rows has no curvature.
        used = [i for i in fitting if not np.all(each[1][i] == 0)]
        places = Places(loss_fn, model, args, kwargs, every.program, problem.fisher)
        for group in groups(used, measured, problem.memory):
            begin(f"compiling and comparing the blocks of {len(group)}")
            found.update(_compared(problem, model, every, measured, group, places))
    apart = problem.fisher is not None and problem.fisher.joins_positions
    joint = frozenset() if apart else every.program.joint
    checks = []
    for i, (own, share, rows, inverse) in enumerate(zip(layers, *each, strict=True)):
        use = "used"
        if np.all(rows == 0):
            use = "unused" if i in every.work.called else "never called"
        seen = share, rows, bool(inverse), use, i in joint
        check = _check(problem, every, own, found.get(i), *seen)
        too_large = measured[i].bytes > problem.memory
        size = measured[i].bytes / 1e9
        checks.append(dataclasses.replace(check, too_large=too_large, gigabytes=size))
    return checks


def _compared(
    problem: Problem,
    model: Model,
    every: Costs,
    layers: list[Size],
    group: list[int],
    places: Places,
) -> dict[int, tuple[Comparison, Comparison | None]]:
    """The comparisons of a group of layers, by their numbers."""
    loss_fn, args, kwargs, given, key, limit, memory = problem
    plan = parts(every, given, key, limit, memory, layers, group, places)
    long = plan.dense is not None and every.takes_long(plan.dense.vectors)
    arguments = model, args, plan.key, kwargs
    collected = _collected(problem, every, layers, group, plan)
    dense, blocks = compiled(collected, *arguments, optimise=long)()
    found = {}
    if plan.dense is not None:
        pairs = zip(plan.dense.layers, dense, strict=True)
        found = {i: compared(numbers, False) for i, numbers in pairs}

    def matrices(part):
        def pull(model, args, key, kwargs, indices):
            own = only(model, frozenset(part.layers))
            pull, losses = pulled(own, loss_fn, args, kwargs)
            along = lambda i: pull(part.vectors.cotangents(losses, i, key))
            return jax.lax.map(along, indices)

        return pull

    def rows(part):
        return lambda model, args, key, kwargs, indices: places.pulled(
            part.layers, part.vectors, key
        )(model, args, kwargs, indices)

    for part, back in ((plan.rest, matrices), (plan.rows, rows)):
        if part is not None:
            own, vectors, at_once = part
            long = every.takes_long(vectors)
            pull = compiled(back(part), *arguments, optimise=long)
            stacks = [len(layers[i].stack) for i in own]
            those = [blocks[i] for i in own]
            numbers = along_vectors(those, stacks, pull, vectors, at_once)
            pairs = zip(own, numbers, strict=True)
            found |= {i: compared(n, vectors.sampled) for i, n in pairs}
    return found


def _collected(
    problem: Problem, every: Costs, layers: list[Size], group: list[int], plan: Plan
) -> Callable:
    """A program that collects the blocks of a group of layers, and compares those of
    them that are dense: these comparisons, and the other blocks, by number."""
    loss_fn = problem.loss_fn

    def collected(model, args, key, kwargs):
        batch = Batch(loss_fn, args, kwargs)
        batch = batch.linearise(only(model, frozenset(group)), program=every.program)
        factors = batch.curvature(plan.fisher, key)
        found = operators(batch.model, factors, ready)
        blocks = dict(zip(sorted(group), found, strict=True))
        if plan.dense is None:
            return [], blocks
        own, vectors, at_once = plan.dense
        pull, losses = pulled(only(model, frozenset(own)), loss_fn, args, kwargs)
        along = lambda i: pull(vectors.cotangents(losses, i, key))
        exact = exact_blocks(along, vectors, at_once)
        axes = lambda i: len(layers[i].stack)
        pairs = zip(own, exact, strict=True)
        return [over_stack(densely, axes(i))(blocks.pop(i), e) for i, e in pairs], blocks

    return collected


def _unseen(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program,
) -> tuple[Model, Model]:
    r"""How much of the gradient of a layer its tag does not see: if all of the layer's
    parameters reach the losses through it, $\sum g \bar x^\top$ over its rows *is* the
    gradient in its canonical matrix, whatever is pulled back (here: random numbers).

    **Returns:** for every tag and member of a stack, the norm of the difference over that
    of the gradient (NaN if the outputs are not finite); and the number of rows.
    """
    fill = lambda model, _=None: with_tags(Tag.fill_gradient, model)
    lin = linearise(loss_fn, model, args, kwargs, fill=fill, program=program)
    keys = jax.random.split(jax.random.key(0), len(lin.curved.losses))

    def noise(loss, key):
        leaves, treedef = jtu.tree_flatten(loss.outputs)
        own = jax.random.split(key, len(leaves))
        drawn = [
            jax.random.normal(k, a.shape, a.dtype)
            for k, a in zip(own, leaves, strict=True)
        ]
        return treedef.unflatten(drawn)

    pulled = lin.pull([noise(*pair) for pair in zip(lin.curved.losses, keys)])
    leaves = jtu.tree_leaves([loss.outputs for loss in lin.objective.losses])
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))

    def share(tag, layer):
        if not is_trainable(tag, layer):
            return None
        seen = tag.contents.gradient_slots.outputs.gradient
        gradient = tag.to_matrix(layer).astype(seen.dtype)
        norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (gradient - seen, gradient)]
        rounding = jnp.finfo(seen.dtype).eps * tag.contents.gradient_slots.outputs.size
        part = jnp.where(norms[0] <= rounding, 0, norms[0] / norms[1])
        return jnp.where(finite, part, jnp.nan)

    rows = map_tags(lambda tag, _: tag.contents.gradient_slots.outputs.rows, pulled)
    return map_tags(share, pulled), rows


def _check(
    problem: Problem,
    every: Costs,
    own: TaggedLayer,
    found: tuple[Comparison, Comparison | None] | None,
    share: np.ndarray,
    rows: np.ndarray,
    inverse: bool,
    use: str,
    joint: bool,
) -> LayerCheck:
    path, tag, layer = own
    sizes = tag.form.sizes(layer)
    nothing = np.full(sizes.stack, np.nan)
    zero = np.full(sizes.stack, use != "used")
    comparison = Comparison(nothing, nothing, nothing, nothing, zero)
    comparison, noise = (comparison, None) if found is None else found
    zero = np.zeros(sizes.stack)
    shared = bool(np.any(rows > every.examples))
    fisher = problem.fisher
    is_same = fisher is None or isinstance(fisher, (Exact, Empirical))
    return LayerCheck(
        path=path,
        form=tag.form.label,
        block=block_shown(tag.block, sizes, joint),
        stack=sizes.stack,
        shape=sizes_shown(*sizes[:4]),
        unseen=share.astype(float),
        use=use,
        shared=shared,
        **comparison._asdict(),
        estimated=noise is not None,
        error_noise=zero if noise is None else noise.error,
        cosine_noise=zero if noise is None else noise.cosine,
        ratio_noise=zero if noise is None else noise.ratio,
        alone=nothing,
        drawn=fisher is not None and fisher.drawn,
        single=every.examples == 1 and not shared and is_same,
        tolerance=float(10 * np.sqrt(np.finfo(share.dtype).eps)),
        scalar=1 in (sizes.d_out, sizes.d_in + sizes.bias),
        too_large=False,
        gigabytes=0.0,
        consistent=inverse,
    )


def _is_inverse(tag: Tag, layer: Layer) -> Bool[Array, ""]:
    """Whether a matrix comes back from the layer that it is put into."""
    matrix = tag.to_matrix(layer)
    other = jnp.arange(matrix.size, dtype=matrix.dtype).reshape(matrix.shape)
    there = tag.to_matrix(tag.from_matrix(other, layer))
    same = there.shape == other.shape
    return jnp.all(there == other) if same else jnp.array(False)
