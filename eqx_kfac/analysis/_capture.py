"""What passes through the layers of a model, row by row."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, Shaped

from .._curvature import (
    collected_rows,
    evaluate,
    Linearisation,
    linearise,
    TagSite,
    used_sites,
    UsedSite,
)
from .._custom_types import Key
from .._devices import varying_axes
from .._fisher import AbstractFisher, check_separate
from .._loss import Sum
from .._misc import accumulator
from .._operator import matmul
from .._program import analyse
from .._tag import check_tagged, fill_rows, RowShapes
from ..form import AbstractForm, join


class Captured(eqx.Module):
    r"""What passed through one layer: its inputs, and the gradients at its outputs. The
    first `stack` axes separate stacked layers; then come `examples` axes, the batch (the
    outermost `vmap`) first; then the axes of one input, or of one output.

    **Fields:**

    - `inputs`: the layer's inputs, `[*stack, *examples, ...]`; `None` if it has none.
    - `output_gradients`: the gradients at its outputs, of the sum of all loss terms:
        `[*stack, *examples, ...]`, or `[cotangents, *stack, *examples, ...]`.
    - `stack`: the number of axes of stacked layers; 0 for one.
    - `examples`: the number of example axes; 0 for a layer that is not mapped.
    - `form`: how the layer is linear in its parameters.
    - `has_weight`: whether there is a weight, and it is trained.
    - `has_bias`: whether there is a bias, and it is trained.
    - `several`: whether the gradients have the axis of cotangents: with a `fisher`.
    """

    inputs: Shaped[Array, "..."] | None
    output_gradients: Inexact[Array, "..."]
    stack: int = eqx.field(static=True)
    examples: int = eqx.field(static=True)
    form: AbstractForm = eqx.field(static=True)
    has_weight: bool = eqx.field(static=True)
    has_bias: bool = eqx.field(static=True)
    several: bool = eqx.field(static=True)

    def rows(self) -> tuple[Float[Array, "..."], Inexact[Array, "..."]]:
        r"""The two sides of the layer's canonical matrix, whatever its form (patches of a
        convolution, unit vectors of an embedding): $\bar x$ of shape `[*stack, *examples,
        *positions, d_in(+1)]` and $g$ of shape `[*stack, *examples, *positions, d_out]`,
        after an axis of cotangents if there is one."""
        axes = self.stack + self.examples

        def outputs(g):
            return self.form.outputs(g, self.stack, axes)

        outputs = jax.vmap(outputs) if self.several else outputs
        g = outputs(self.output_gradients)
        x = ones = None
        if self.inputs is not None and self.has_weight:
            x = self.form.inputs(self.inputs, self.stack, axes).vectors()
            x = x.astype(accumulator(x.dtype))
        if self.has_bias:
            dtype = accumulator(g.dtype) if x is None else x.dtype
            ones = jnp.ones((*g.shape[int(self.several) : -1], 1), dtype)
        return join(x, ones), g

    def gradients(self) -> Float[Array, "..."]:
        r"""The gradients of single examples with respect to the layer's canonical matrix,
        $\sum g \bar x^\top$ over the positions within the layer, zero where the weight is
        masked: `[*stack, *examples, d_out, d_in(+1)]`, after an axis of cotangents if
        there is one."""
        x, g = self.rows()
        axes = self.stack + self.form.groups + self.examples
        x = x.reshape(*x.shape[:axes], -1, x.shape[-1])

        def product(g):
            g = g.reshape(*g.shape[:axes], -1, g.shape[-1]).astype(x.dtype)
            whole, mask = matmul(g.mT, x), self.form.mask
            return whole if mask is None else mask.project(whole)

        return jax.lax.map(product, g) if self.several else product(g)


def capture(loss_fn: Callable, fisher: AbstractFisher | None = None) -> Callable:
    r"""The inputs of every tagged layer, and the gradients at its outputs, for every
    single example: for per-example gradients $g \bar x^\top$, empirical neural tangent
    kernels, influence functions, or a curvature of your own.

    **Arguments:**

    - `loss_fn`: as for [`eqx_kfac.curvature`][].
    - `fisher`: which gradients. `None`: those of the losses at the given targets, of
        their (weighted) *sum*: $N$ times the gradient of the mean, without penalties. A
        Fisher estimator such as [`eqx_kfac.Exact`][]: those whose outer products add up
        to its curvature. `output_gradients` then has one more axis in front, over its
        cotangents (one for every sample of [`eqx_kfac.MonteCarlo`][]).

    **Returns:**

    A function `(model, *args, key=None, **kwargs) -> captured`. `captured` is shaped like
    the model, with every tagged layer replaced by a [`eqx_kfac.analysis.Captured`][], or
    by a dictionary of several (`GRUCell`), or by `None` if the losses do not depend on
    it. Its `inputs` are `[*stack, *examples, ...]` and its `output_gradients` `[*stack,
    *examples, ...]`, where `...` is the shape of one input and one output of the layer as
    it was called: for a convolution the image, not its patches; for an embedding the
    integer. A layer that is tagged at its parameters (normalisation) has no `inputs`; its
    `output_gradients` `[*examples, size]` are those with respect to its parameters.

    **Raises:** `ValueError` for a layer whose rows are not well defined, because the
    layer is used more than once (by calls, or in a `scan` over time), or on a condition,
    or because several devices use it (`shard_map`): rows would be added up.

    !!! Example

        ```python
        captured = kfac.analysis.capture(loss_fn)(model, x, y)
        layer = captured.layers[0]
        per_example = jnp.einsum("no,ni->noi", layer.output_gradients, layer.inputs)
        ```
    """

    check_separate(fisher, "kfac.analysis.capture")

    def wrapped(model, *args, key=None, **kwargs):
        check_tagged(model)
        if varying_axes((args, kwargs)):
            raise ValueError(
                "`kfac.analysis.capture` was called within a `shard_map`, where every "
                "device uses the model. Call it outside, on sharded arrays."
            )

        # What is not called has no rows, and what passes by a tag is not asked for.
        program = analyse(loss_fn, model, args, kwargs, uses=False)
        found, treedef = used_sites(loss_fn, model, args, kwargs, program)
        uses = [_checked(used) for used in found]
        sites = [used.site for used in found]
        slots = [site.slots(use) for site, use in zip(sites, uses, strict=True)]
        slots = treedef.unflatten(slots)
        fill = lambda model, weights=None: fill_rows(model, slots)
        linearisation = linearise(
            loss_fn, model, args, kwargs, fill=fill, program=program
        )
        inputs, gradients = _collected(linearisation, fisher, key)
        found = [
            None if use is None else captured(site, use, x, g, fisher is not None)
            for site, use, x, g in zip(sites, uses, inputs, gradients, strict=True)
        ]
        return treedef.unflatten(found)

    return wrapped


def captured(site: TagSite, use: RowShapes, x: Any, g: Array, several: bool) -> Captured:
    """The contents of the slots, in the types that the tag saw."""
    return Captured(
        inputs=None if x is None else x.astype(use.x.dtype),
        output_gradients=g.astype(use.g.dtype),
        stack=len(site.stack),
        examples=use.axes - use.stack,
        form=site.form,
        has_weight=site.sizes.d_in > 0,
        has_bias=site.sizes.bias,
        several=several,
    )


def _checked(used: UsedSite) -> RowShapes | None:
    """The rows of the one use of a layer, or `None` if there is none."""
    path, _, (number, shapes, devices) = used
    if used.once is not None and not used.once.derivative:
        return used.once
    if any(rows.derivative for rows in shapes):
        how = "is used in a derivative of the model in its inputs, which is another row"
    elif devices:
        how = "is used by several devices, in a `shard_map`"
    elif number is None:
        how = "is used or not depending on data (a `cond`, or an index that is computed)"
    elif np.all(number == 0):
        return None
    elif np.any(number > 1):
        how = f"is used {int(np.max(number))} times (called, or in a loop)"
    elif np.any(number != 1):
        how = "consists of stacked layers, not all of which are used"
    else:
        how = "consists of stacked layers that are used on inputs of different shapes"
    raise ValueError(
        f"Cannot capture the rows of {f'`{path}`' if path else 'the model'}: it {how}, "
        "and what is captured would be added up. Capture from a loss function that uses "
        "the layer once, such as a `vmap` over time steps or positions in the place of a "
        "loop, or leave the layer out: `kfac.convert(model, blocks={path: None})`. "
        "(`kfac.curvature`, whose statistics are sums, is right as it is.)"
    )


def _collected(
    lin: Linearisation, fisher: AbstractFisher | None, key: Key | None
) -> tuple[list[Any], list[Any]]:
    """The inputs and the gradients of every tag."""
    if fisher is None:
        raw = collected_rows(lin.collect(_gradient(lin)))
        return [r.inputs for r in raw], [r.outputs for r in raw]
    pull, number = lin.pulled(fisher, key)
    first = collected_rows(pull(0))
    if number == 1:
        gradients = jtu.tree_map(lambda g: g[None], [r.outputs for r in first])
    else:
        outputs = lambda index: [r.outputs for r in collected_rows(pull(index))]
        gradients = jax.lax.map(outputs, jnp.arange(number))
    return [r.inputs for r in first], gradients


def _gradient(lin: Linearisation) -> Sum:
    """The gradient of the sum of the losses, with respect to the objective."""
    total = lin.share.count

    def losses(objective):
        losses = Sum(tuple(objective.weighted_losses))
        value = evaluate(losses, lin.model, lin.share)
        return value * total.astype(value.dtype)

    return eqx.filter_grad(losses)(lin.curved)
