import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .._checks import check_count
from .._misc import accumulator, trailing
from .._module import PlainModule
from ..form import Rows


class AbstractSharing(PlainModule):
    """How a Kronecker block treats positions (tokens, pixels, agents) that share the
    layer's weight: every axis that a layer is mapped over, but the outermost.

    **Fields:**

    - `mixes_positions`: whether there are products between different positions of an
        example.
    - `balanced`: whether the rows of either side count by how large the other one is.
    """

    mixes_positions: ClassVar[bool]
    balanced: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, rows: Rows) -> Rows:
        """The rows whose moments are the two factors."""


class Expand(AbstractSharing):
    r"""Every (example, position) pair is a row of its own:

    $$A = \frac1R \sum_{n,s} \bar x_{ns} \bar x_{ns}^\top, \qquad
    G = \frac1N \sum_{n,s} g_{ns} g_{ns}^\top$$

    Exact for deep linear networks with a loss term at every position (a language model);
    the usual choice for convolutions.

    A position without any gradient is no row, if others of its example have one. (Behind
    the last attention of a network that reads a class token, only that token matters.)
    Of a convolution, all positions are rows.

    ??? cite "Reference"

        R. Eschenhagen et al., *Kronecker-Factored Approximate Curvature for Modern
        Neural Network Architectures*, NeurIPS 2023.
    """

    mixes_positions = False

    def __call__(self, rows: Rows) -> Rows:
        return _with_gradients(rows, rows.stack + 1)


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

    where $R$ counts the examples that pass through the layer, and positions without any
    gradient are left out, as by [`eqx_kfac.Expand`][].

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
        axes = rows.stack + self.batch_axes
        x, g, weights, *_ = _with_gradients(rows, axes)
        shared = tuple(range(axes, g.ndim - 1))
        if not shared:
            return rows
        mean = x.mean(weights, axes)
        if weights is not None:
            weights = jnp.max(weights, axis=tuple(range(axes, weights.ndim)))
        g = jnp.sum(g, axis=shared)
        return rows._replace(x=mean, g=g, weights=weights)


def _with_gradients(rows: Rows, axes: int) -> Rows:
    r"""Rows of which positions without a gradient count for nothing: their product $g
    x^\top$ is zero, whatever $x$ is. The first `axes` of their axes are no positions. If
    a whole example has no gradient, all its positions count: the inputs of a layer are
    known even where nothing is left to be learnt."""
    if rows.x.overlapping or rows.g.ndim - 1 <= axes:
        return rows
    size = jnp.max(jnp.abs(rows.g), axis=-1)
    largest = jnp.max(size, axis=tuple(range(axes, size.ndim)), keepdims=True)
    # What cancels may leave rounding behind.
    counts = (size > 4 * jnp.finfo(size.dtype).eps * largest) | (largest == 0)
    weights = counts.astype(accumulator(size.dtype))
    if rows.weights is not None:
        weights = weights * trailing(rows.weights, weights)
    return rows._replace(weights=weights)
