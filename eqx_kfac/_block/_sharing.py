import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .._checks import check_count
from .._module import PlainModule
from ..form import Rows


class AbstractSharing(PlainModule):
    """How a Kronecker block treats positions (tokens, pixels, agents) that share the
    layer's weight: every axis that a layer is mapped over, but the outermost.

    **Fields:**

    - `mixes_positions`: whether there are products between different positions of an
        example.
    - `balanced`: whether the rows of either side count by how large the other one is.
    - `joint`: whether the gradients of an example's positions are added up before they
        are squared, where it is known which positions these are.
    """

    mixes_positions: ClassVar[bool]
    balanced: ClassVar[bool] = False
    joint: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, rows: Rows) -> Rows:
        """The rows whose moments are the two factors."""


class Expand(AbstractSharing):
    r"""Every (example, position) pair is a row of its own:

    $$A = \frac1R \sum_{n,s} \bar x_{ns} \bar x_{ns}^\top, \qquad
    G = \frac1N \sum_{n,s} g_{ns} g_{ns}^\top$$

    Exact for deep linear networks with a loss term at every position (a language model)
    that takes positions for independent. It costs the least.

    ??? cite "Reference"

        R. Eschenhagen et al., *Kronecker-Factored Approximate Curvature for Modern
        Neural Network Architectures*, NeurIPS 2023.
    """

    mixes_positions = False

    def __call__(self, rows: Rows) -> Rows:
        return rows


class Joint(AbstractSharing):
    r"""The positions of an example are taken together, and so are its uses of a layer
    (time steps of a recurrent cell, rounds of message passing, steps of a differential
    equation): their gradients are added up, $\nabla_n = \sum_s g_{ns}
    \bar x_{ns}^\top$, as the exact block does, and

    $$A \propto \sum_n \nabla_n^\top \nabla_n, \qquad
    G \propto \sum_n \nabla_n \nabla_n^\top$$

    are the factors of [`eqx_kfac.TNT`][], with the trace of the exact block. `Expand`
    takes positions for independent. Behind attention they are not: all positions attend
    to the same few, and what is added up there may be as many times larger as there are
    positions. Nor are uses: what a change of the weight does at one time step, it does at
    all others.

    This is done wherever the loss function lets it be done, and otherwise,
    [`eqx_kfac.Expand`][]: examples are the outermost `vmap` around the layer, or an axis
    that has as many places as there are examples; and if the layer is used several times,
    or in a loop, the outputs of the loss function show for every use that its rows are
    those of all examples, in their order, and all examples' gradients, which are then
    written out, have no more than 2,097,152 numbers (8 MB). Where there are no positions,
    it is `Expand`, too; and for embeddings, tied weights, biases without their weight,
    sides that are too wide, uses on a condition, and in loops over examples. The table of
    [`eqx_kfac.verify`][] says what is done for each layer.

    ??? cite "Reference"

        Y. Ren and D. Goldfarb, *Tensor Normal Training for Deep Learning Models*,
        NeurIPS 2021, for layers that share their weight.
    """

    mixes_positions = False  # Nothing is done that could be wrong.
    joint = True

    def __call__(self, rows: Rows) -> Rows:
        return rows


class TensorNormal(AbstractSharing):
    r"""Every (example, position) pair is a row of its own, and either side of it is
    weighted by the size of the other: the covariance of a tensor normal distribution of
    single rows' gradients $g \bar x^\top$,

    $$A = \frac{\sum \lVert g \rVert^2 \, \bar x \bar x^\top}{\sum \lVert g \rVert^2
    \lVert \bar x \rVert^2}, \qquad G = \frac1N \sum \lVert \bar x \rVert^2 \, g g^\top$$

    So a row without influence on the loss is ignored, and every row may
    have units of its own. Use it if a weight is used for things of different kinds
    (values and derivatives, several losses some of which count more), where [`Expand`]
    [eqx_kfac.Expand] would take the mean of all inputs, however much they matter. If no
    example has several rows, the trace is that of the exact block.

    Like `Expand`, it is exact for deep linear networks with squared error, and also for
    any sum of such losses. With several cotangents ([`eqx_kfac.Exact`][]), $A$ is
    computed for each of them. [`eqx_kfac.TNT`][] does the same with gradients that are
    added up over the rows of every example.

    ??? cite "Reference"

        Y. Ren and D. Goldfarb, *Tensor Normal Training for Deep Learning Models*,
        NeurIPS 2021, for rows instead of examples.
    """

    mixes_positions = False
    balanced = True

    def __call__(self, rows: Rows) -> Rows:
        return rows


class Reduce(AbstractSharing):
    r"""Inputs are averaged over positions, output gradients summed:

    $$A = \frac1R \sum_n \bar x_n \bar x_n^\top, \quad \bar x_n = \operatorname{mean}_s
    \bar x_{ns}, \qquad G = \frac1N \sum_n g_n g_n^\top, \quad g_n = \sum_s g_{ns}$$

    where $R$ counts the examples that pass through the layer.

    It is exact for deep linear networks that pool over positions before the loss (a
    vision transformer). Its moments are as many times cheaper as there are positions.

    Examples are what the outermost `vmap` around the layer maps over. If several `vmap`s
    are over examples (environments and time steps, say), `batch_axes` tells how many.

    ??? cite "Reference"

        R. Eschenhagen et al., *Kronecker-Factored Approximate Curvature for Modern
        Neural Network Architectures*, NeurIPS 2023.
    """

    batch_axes: int = eqx.field(static=True)
    mixes_positions = True

    def __init__(self, batch_axes: int = 1):
        """**Arguments:**

        - `batch_axes`: how many of the axes that the layer is mapped over, from the
            outermost, count examples. The others are positions.
        """
        self.batch_axes = check_count("batch_axes", batch_axes, 1)

    def __call__(self, rows: Rows) -> Rows:
        x, g, weights, stack, *_ = rows
        axes = stack + self.batch_axes
        shared = tuple(range(axes, g.ndim - 1))
        if not shared:
            return rows
        mean = x.mean(weights, axes)
        if weights is not None:
            weights = jnp.max(weights, axis=tuple(range(axes, weights.ndim)))
        g = jnp.sum(g, axis=shared)
        return rows._replace(x=mean, g=g, weights=weights)
