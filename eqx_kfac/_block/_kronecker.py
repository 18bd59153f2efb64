from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import check_count, check_flag, check_instance
from .._custom_types import Layer, Weights
from .._devices import over_stack, zeros_of
from .._misc import trailing
from .._operator import KroneckerOperator, matmul, trace_of_factor
from ..form import AbstractForm, Rows, Sizes, Vectors
from ._base import AbstractCentredBlock, AbstractJointBlock, sizes_and_zeros
from ._collector import filled_with_zeros, Statistics
from ._joint import JointRows
from ._kronecker_factors import KroneckerFactors
from ._sharing import AbstractSharing, Joint
from ._sums import inverse_or_zero, total_weight


class InputMoments(NamedTuple):
    r"""$\sum w$, $\sum w x$ and $\sum w x x^\top$ over a layer's rows. The bias column
    $\bar x = [x; 1]$ costs no copy: its moments are `first` and `ones`. The last two are
    $\sum w$ and $\sum w x x^\top$ over the rows of uses of the transposed weight."""

    rows: Any = None
    ones: Any = None  # $\sum w$ again, without rows that have no bias in them.
    first: Any = None
    second: Any = None
    transposed_rows: Any = None
    transposed: Any = None


class OutputMoments(NamedTuple):
    r"""$\sum g g^\top$ over a layer's rows, and over those of a layer that uses the
    transposed weight; and moments of the inputs, if these depend on gradients. Or all
    that there is of positions that are taken jointly."""

    second: Any = None
    transposed: Any = None
    inputs: InputMoments = InputMoments()
    joint: Statistics = JointRows().empty()

    @property
    def has_joint(self) -> bool:
        """Whether positions are taken jointly."""
        return self.joint.outputs.squares["left"] is not None


class Kronecker(AbstractCentredBlock, AbstractJointBlock):
    r"""The Kronecker-factored block $G \otimes A$ of a layer $z = \bar W \bar x$:

    $$A = \frac1R \sum_\text{rows} \bar x \bar x^\top \in
    \mathbb{R}^{d_\text{in}(+1) \times d_\text{in}(+1)}, \qquad
    G = \frac1N \sum_\text{rows} g g^\top \in \mathbb{R}^{d_\text{out} \times
    d_\text{out}}$$

    with $R$ the rows that pass through the layer, $N$ the loss terms, and $g$ the
    gradient at $z$ of the *sum* of the losses. [`eqx_kfac.Joint`][],
    [`eqx_kfac.Expand`][] and [`eqx_kfac.Reduce`][] say what becomes of rows when a weight
    is shared over positions, [`eqx_kfac.TensorNormal`][] how much each of them counts.

    Of the factor of a side that is wider than `widest` (the scores of a vocabulary, the
    pixels of a large image), only the diagonal is kept: a matrix would need more memory
    and time than all else. `kfac.summary` names such sides.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015.
    """

    two_sided = True
    derivatives = True

    sharing: AbstractSharing
    weighted: bool = eqx.field(static=True)
    tied: bool = eqx.field(static=True)
    diagonal_input: bool = eqx.field(static=True)
    diagonal_output: bool = eqx.field(static=True)
    widest: int = eqx.field(static=True)

    def __init__(
        self,
        sharing: AbstractSharing = Joint(),
        weighted: bool = True,
        *,
        tied: bool = False,
        diagonal_input: bool = False,
        diagonal_output: bool = False,
        widest: int = 2048,
    ):
        """**Arguments:**

        - `sharing`: [`eqx_kfac.Joint`][], [`eqx_kfac.Expand`][],
            [`eqx_kfac.Reduce`][] or [`eqx_kfac.TensorNormal`][].
        - `weighted`: whether the weights of the loss terms also weight the layer's
            inputs. A row whose term has weight zero, but which influences others, counts
            by its gradient. False for a layer whose inputs are not examples.
        - `tied`: whether another layer uses the transposed weight, and adds to the
            statistics; [`eqx_kfac.Shared`][] sets it.
        - `diagonal_input`, `diagonal_output`: whether only the diagonal of a factor is
            kept, however wide its side is. (The input factor of an embedding is always
            diagonal.)
        - `widest`: how wide a side may be (without the bias) whose factor is a matrix.

        **Raises:** `TypeError` for something of another kind, `ValueError` for a width
        that is not positive.
        """
        check_instance("sharing", sharing, AbstractSharing, "kfac.Reduce()")
        check_flag("weighted", weighted)
        check_flag("tied", tied)
        check_flag("diagonal_input", diagonal_input)
        check_flag("diagonal_output", diagonal_output)
        self.sharing = sharing
        self.weighted = weighted and not sharing.balanced  # Gradients have them.
        self.tied = tied
        self.diagonal_input = diagonal_input
        self.diagonal_output = diagonal_output
        self.widest = check_count("widest", widest, 1)

    def diagonal_sides(self, sizes: Sizes) -> tuple[bool, bool]:
        """Whether only the diagonals are kept of the factors of the inputs, and of the
        outputs, of a layer of these sizes."""
        inputs = sizes.diagonal or self.diagonal_input or sizes.d_in > self.widest
        return inputs, self.diagonal_output or sizes.d_out > self.widest

    @property
    def mixes_positions(self) -> bool:  # pyright: ignore
        return self.sharing.mixes_positions

    @property
    def subtracts_means(self) -> bool:  # pyright: ignore
        # What is summed over positions may be less than the gradient that it is of.
        return not (self.tied or self.sharing.balanced or self.sharing.mixes_positions)

    def takes_jointly(self, sizes: Sizes) -> bool:
        whole = sizes.d_in > 0 and not any(self.diagonal_sides(sizes))
        return self.sharing.joint and whole and not self.tied

    def joint_slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        return _of_joint(JointRows().slots(form, layer))

    def empty(self) -> Statistics:
        return Statistics(inputs=InputMoments(), outputs=OutputMoments())

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = sizes_and_zeros(form, layer)
        if found is None:
            return self.empty()
        sizes, zeros = found
        _, d_out, d_in, bias, _ = sizes
        diagonal, diagonal_out = self.diagonal_sides(sizes)
        square_in = (d_in,) if diagonal else (d_in, d_in)
        square_out = (d_out,) if diagonal_out else (d_out, d_out)
        moments = InputMoments(
            rows=zeros(),
            ones=zeros() if d_in > 0 and bias else None,
            first=zeros(d_in) if d_in > 0 and bias and not diagonal else None,
            second=zeros(*square_in) if d_in > 0 else None,
            transposed_rows=zeros() if self.tied else None,
            transposed=zeros(*square_out) if self.tied else None,
        )
        outputs = OutputMoments(
            second=zeros(*square_out),
            transposed=zeros(*square_in) if self.tied else None,
        )
        return self._placed(moments, outputs)

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        if slots.outputs.has_joint:
            return _of_joint(JointRows().statistics(rows, slots.outputs.joint))
        like = self._moments(slots)
        if rows.derivative and like.second is None:  # Of a bias alone: zero.
            return zeros_of(slots)
        return filled_with_zeros(
            self._sums(self.sharing(rows), like, slots.outputs), slots
        )

    def _sums(
        self, rows: Rows, like: InputMoments, like_outputs: OutputMoments
    ) -> Statistics:
        """The statistics; `None` for those that are zero."""
        x, g, stack = rows.x, rows.g, rows.stack
        number, of_inputs, of_outputs = self._weights(rows, like)
        number = total_weight(number, g, stack, like.rows)
        if rows.swapped:
            transposed = x.second(of_inputs, stack, like.transposed)
            inputs = InputMoments(transposed_rows=number, transposed=transposed)
            transposed = Vectors(g).second(of_outputs, stack, like_outputs.transposed)
            return self._placed(inputs, OutputMoments(transposed=transposed))
        inputs = InputMoments(rows=number)
        if like.second is not None:
            inputs = inputs._replace(second=x.second(of_inputs, stack, like.second))
        if like.first is not None and not rows.derivative:
            inputs = inputs._replace(first=x.first(of_inputs, stack, like.first))
        if like.ones is not None and not rows.derivative:
            inputs = inputs._replace(ones=total_weight(of_inputs, g, stack, like.ones))
        second = Vectors(g).second(of_outputs, stack, like_outputs.second)
        return self._placed(inputs, OutputMoments(second=second))

    def _placed(self, inputs: InputMoments, outputs: OutputMoments) -> Statistics:
        if self.sharing.balanced:
            return Statistics(InputMoments(), outputs._replace(inputs=inputs))
        return Statistics(inputs, outputs)

    def _moments(self, statistics: Statistics) -> InputMoments:
        """The moments of the inputs, wherever they are."""
        balanced = self.sharing.balanced
        return statistics.outputs.inputs if balanced else statistics.inputs

    def _weights(self, rows: Rows, like: InputMoments) -> tuple[Weights, ...]:
        """How rows count; and by how much in the moments of their inputs, and of their
        gradients."""
        if self.sharing.balanced:
            g = rows.g.astype(like.rows.dtype)
            sizes_in, sizes_out = _sizes(rows, like), jnp.sum(g**2, axis=-1)
            return sizes_in * sizes_out, sizes_out, sizes_in
        weights = rows.weights
        if not rows.derivative:
            return weights, weights, None
        # Where nothing moves, there is no row. (How a derivative is written decides
        # whether JAX knows that by itself.)
        moves = jnp.any(rows.x.vectors() != 0, axis=-1).astype(like.rows.dtype)
        there = moves if weights is None else moves * trailing(weights, moves)
        return there, weights, moves

    def factors(
        self, statistics: Statistics, count: Array, l2: Array
    ) -> KroneckerFactors:
        if statistics.outputs.has_joint:
            return JointRows().factors(statistics.outputs.joint, count, l2)
        inputs, outputs = self._moments(statistics), statistics.outputs
        second, count = _homogeneous(inputs), count.astype(outputs.second.dtype)
        if not self.tied:
            input_factor = second * trailing(inverse_or_zero(inputs.rows), second)
            output_factor = outputs.second / count
        elif (
            self.sharing.balanced
        ):  # What moments are weighted by makes them commensurate.
            input_factor = second + outputs.transposed
            rows = inputs.rows + inputs.transposed_rows
            input_factor = input_factor * trailing(inverse_or_zero(rows), input_factor)
            output_factor = (outputs.second + inputs.transposed) / count
        else:
            of_rows = trailing(inverse_or_zero(inputs.rows), second)
            transposed = inputs.transposed
            of_transposed = trailing(inverse_or_zero(inputs.transposed_rows), transposed)
            output_factor, input_factor = _nearest(
                (outputs.second / count, second * of_rows),
                (transposed * of_transposed, outputs.transposed / count),
                stack=inputs.rows.ndim,
            )
        return KroneckerFactors(input_factor, output_factor, l2.astype(count.dtype))

    def minus_mean(
        self,
        statistics: Statistics,
        mean: Float[Array, "*stack d_out d_in"],
        count: Float[Array, ""],
    ) -> Statistics:
        r"""$G - M M^\top / \operatorname{tr} A$, so that $G \otimes A$ has the trace, and
        the trace over its inputs, that $G \otimes A$ had less those of the mean $M$. An
        example's rows are independent for both factors, so its mean is a sum of as many
        independent parts. (Positive semidefinite: $\lVert \sum \bar x (g \cdot v)
        \rVert^2 \le \sum \lVert \bar x \rVert^2 \sum (g \cdot v)^2$.)"""
        if statistics.outputs.has_joint:
            joint = statistics.outputs.joint
            return _of_joint(JointRows().minus_mean(joint, mean, count))
        moments, second = statistics.inputs, statistics.outputs.second
        trace = over_stack(trace_of_factor, moments.rows.ndim)
        sizes = trace(_homogeneous(moments))
        # `sizes` is of all rows: as many times tr A as an example has rows, and `count`.
        share = count**2 * inverse_or_zero(sizes)
        mean = mean.astype(second.dtype)
        if second.ndim == moments.rows.ndim + 1:
            of_mean = jnp.sum(mean**2, axis=-1)
        else:
            of_mean = matmul(mean, jnp.swapaxes(mean, -1, -2))
        second = second - trailing(share, of_mean).astype(second.dtype) * of_mean
        return statistics._replace(outputs=statistics.outputs._replace(second=second))

    def operator(self, factors: KroneckerFactors) -> KroneckerOperator:
        return KroneckerOperator(factors.output_factor, factors.input_factor)


def _of_joint(joint: Statistics) -> Statistics:
    return Statistics(InputMoments(), OutputMoments(joint=joint))


def _nearest(*pairs: tuple[Array, Array], stack: int) -> tuple[Array, Array]:
    r"""A product $G \otimes A$ for a sum $\sum_u G_u \otimes A_u$ that has its trace, and
    its partial traces: $G = \sum_u \operatorname{tr}(A_u) G_u$, $A = \sum_u
    \operatorname{tr}(G_u) A_u / \operatorname{tr} G$. (In a product of sums, every $G_u$
    would meet every $A_v$: if one is the inputs of a use, and the other one its gradients
    in another use, these have no size in common.)"""

    trace = over_stack(trace_of_factor, stack)
    (g, a), *rest = pairs
    G, A = trailing(trace(a), g) * g, trailing(trace(g), a) * a
    for g, a in rest:
        G, A = G + trailing(trace(a), g) * g, A + trailing(trace(g), a) * a
    return G, A * trailing(inverse_or_zero(trace(G)), A)


def _sizes(rows: Rows, like: InputMoments) -> Float[Array, "*rows"]:
    r"""$\lVert \bar x \rVert^2$, of the coordinates that are trained."""
    ones = jnp.ones_like(rows.g[..., 0], like.rows.dtype)
    if like.second is None:
        return ones
    sizes = rows.x.sizes().astype(ones.dtype)
    return sizes if like.ones is None or rows.derivative else sizes + ones


def _homogeneous(moments: InputMoments) -> Float[Array, "..."]:
    r"""$\sum \bar x \bar x^\top$ of the coordinates that are there: $x$, 1, or both."""
    if moments.second is None:
        return moments.rows[..., None, None]
    if moments.ones is None:
        return moments.second
    if moments.first is None:  # Diagonal.
        return jnp.concatenate([moments.second, moments.ones[..., None]], axis=-1)
    # Padding may be fused with what comes next, unlike blocks written side by side.
    last = jnp.concatenate([moments.first, moments.ones[..., None]], axis=-1)
    stack, size = last.ndim - 1, last.shape[-1]
    second = jnp.pad(moments.second, [(0, 0)] * stack + [(0, 1), (0, 1)])
    is_last = (jnp.arange(size) == size - 1).reshape(*[1] * stack, size)
    rows = jnp.where(is_last[..., None, :], last[..., :, None], second)
    return jnp.where(is_last[..., :, None], last[..., None, :], rows)
