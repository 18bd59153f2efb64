from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
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
from ._sums import bordered, inverse_or_zero, squared_norms, total_weight


class InputMoments(NamedTuple):
    r"""Weighted sums over a layer's rows. With a bias, inputs are $\bar x = [x; 1]$; the
    column of ones is never written down, because its moments are `first` and `ones`.
    Moments that a layer does not need are `None`."""

    rows: Any = None  # $\sum w$
    # $\sum w$ over the rows with a one in them: derivatives of the layer have a zero.
    ones: Any = None
    first: Any = None  # $\sum w x$
    second: Any = None  # $\sum w x x^\top$
    # The same over the rows in which the weight acts transposed, those of a layer that is
    # tied to this one, or of derivatives in reverse mode. Their inputs are of the size of
    # this layer's outputs.
    transposed_rows: Any = None
    transposed: Any = None


class OutputMoments(NamedTuple):
    """What depends on gradients. If positions are taken jointly, all there is of a layer
    is in `joint`, and nothing else is filled."""

    second: Any = None  # $\sum g g^\top$
    transposed: Any = None  # The same over the rows that use the transposed weight.
    inputs: InputMoments = InputMoments()  # If gradients are the weights of inputs.
    joint: Statistics = JointRows().empty()

    @property
    def has_joint(self) -> bool:
        """Whether positions are taken jointly, so that `joint` has slots."""
        # One of these slots may stand for all: they are all there, or none is.
        return self.joint.outputs.squares["left"] is not None


class Kronecker(AbstractCentredBlock, AbstractJointBlock):
    r"""The Kronecker-factored block $G \otimes A$ of a layer $z = \bar W \bar x$:

    $$A = \frac1R \sum_\text{rows} \bar x \bar x^\top \in
    \mathbb{R}^{d_\text{in}(+1) \times d_\text{in}(+1)}, \qquad
    G = \frac1N \sum_\text{rows} g g^\top \in \mathbb{R}^{d_\text{out} \times
    d_\text{out}}$$

    with $R$ the rows that pass through the layer, $N$ the loss terms, and $g$ the
    gradient at $z$ of the *sum* of the losses. This is so if each example has one row.
    [`eqx_kfac.Joint`][] (the default), [`eqx_kfac.Expand`][] and [`eqx_kfac.Reduce`][]
    say what becomes of rows when a weight is shared over positions,
    [`eqx_kfac.TensorNormal`][] how much each of them counts.

    Of the factor of a side that is wider than `widest` (the scores of a vocabulary, the
    pixels of a large image), only the diagonal is kept: a matrix would need more memory
    and time than all else. `kfac.summary` names such sides.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015.
    """

    two_sided = True  # The operator is a Kronecker product.
    derivatives = True  # Rows may be derivatives of the layer, which have no bias.

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
            inputs. A position whose own term has weight zero, but which influences other
            terms (through attention, say), counts if it has a gradient. False for a layer
            whose inputs are not those of examples (a table of positions that is made
            outside of the `vmap`).
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
        # Where gradients weight the inputs, they have the weights of the loss already.
        self.weighted = weighted and not sharing.balanced
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
        # If the layer is tied, if rows are weighted by gradients, or if they are averaged
        # over positions, the moments may be smaller than those of the mean gradient, and
        # their difference would not be positive semidefinite.
        return not (self.tied or self.sharing.balanced or self.sharing.mixes_positions)

    @property
    def reverse_derivatives(self) -> bool:  # pyright: ignore
        return not self.sharing.mixes_positions

    def takes_jointly(self, sizes: Sizes) -> bool:
        is_bias_alone = sizes.d_in == 0
        has_matrices = not (is_bias_alone or any(self.diagonal_sides(sizes)))
        return self.sharing.joint and has_matrices and not self.tied

    def joint_slots(
        self, form: AbstractForm, layer: Layer, examples: int | None = None
    ) -> Statistics:
        if examples is None:
            return _of_joint(JointRows().slots(form, layer))
        return _of_joint(JointRows().per_example_slots(form, layer, examples))

    def from_per_example(self, statistics: Statistics) -> Statistics:
        if not statistics.outputs.has_joint:
            return statistics
        return _of_joint(JointRows().from_per_example(statistics.outputs.joint))

    def empty(self) -> Statistics:
        return Statistics(inputs=InputMoments(), outputs=OutputMoments())

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = sizes_and_zeros(form, layer)
        if found is None:  # Nothing of the layer is trained.
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
        )
        slots = self._placed(moments, OutputMoments(second=zeros(*square_out)))
        return self.reverse_slots(slots) if self.tied else slots

    def reverse_slots(self, slots: Statistics) -> Statistics:
        inputs, outputs = self._moments(slots), slots.outputs
        if inputs.second is None:  # A bias does not act transposed.
            return slots
        own = inputs.rows, inputs.second, outputs.second
        rows, of_inputs, of_outputs = zeros_of(jtu.tree_map(jax.typeof, own))
        inputs = inputs._replace(transposed_rows=rows, transposed=of_outputs)
        return self._placed(inputs, outputs._replace(transposed=of_inputs))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        if slots.outputs.has_joint:
            return _of_joint(JointRows().statistics(rows, slots.outputs.joint))
        wanted = self._moments(slots)
        if rows.derivative and wanted.second is None:
            return zeros_of(slots)  # The derivative of a bias in the inputs is zero.
        sums = self._sums(self.sharing(rows), wanted, slots.outputs)
        return filled_with_zeros(sums, slots)

    def _sums(
        self, rows: Rows, wanted: InputMoments, wanted_outputs: OutputMoments
    ) -> Statistics:
        """The statistics that have slots, `None` for those that are zero."""
        x, g, stack = rows.x, Vectors(rows.g), rows.stack
        if rows.reverse:  # What is an input here is a gradient in the forward pass.
            x, g = g, x
        number, of_inputs, of_outputs = self._weights(rows, wanted)
        number = total_weight(number, rows.g, stack, wanted.rows)
        if rows.swapped != rows.reverse:  # The weight acts transposed.
            second_in = x.second(of_inputs, stack, wanted.transposed)
            second_out = g.second(of_outputs, stack, wanted_outputs.transposed)
            inputs = InputMoments(transposed_rows=number, transposed=second_in)
            return self._placed(inputs, OutputMoments(transposed=second_out))
        inputs = InputMoments(rows=number)
        if wanted.second is not None:
            inputs = inputs._replace(second=x.second(of_inputs, stack, wanted.second))
        if wanted.first is not None and not rows.derivative:
            inputs = inputs._replace(first=x.first(of_inputs, stack, wanted.first))
        if wanted.ones is not None and not rows.derivative:
            ones = total_weight(of_inputs, rows.g, stack, wanted.ones)
            inputs = inputs._replace(ones=ones)
        second = g.second(of_outputs, stack, wanted_outputs.second)
        return self._placed(inputs, OutputMoments(second=second))

    def _placed(self, inputs: InputMoments, outputs: OutputMoments) -> Statistics:
        """Both moments where they belong: if gradients are the weights of inputs, all of
        them depend on gradients."""
        if self.sharing.balanced:
            return Statistics(InputMoments(), outputs._replace(inputs=inputs))
        return Statistics(inputs, outputs)

    def _moments(self, statistics: Statistics) -> InputMoments:
        """The moments of the inputs, from where `_placed` has put them."""
        balanced = self.sharing.balanced
        return statistics.outputs.inputs if balanced else statistics.inputs

    def _weights(self, rows: Rows, wanted: InputMoments) -> tuple[Weights, ...]:
        """The weight of every row in the number of rows, in the moments of its inputs,
        and in those of its gradients (`None`: 1). A gradient has the weight of its loss
        term in it already."""
        if self.sharing.balanced:
            # Each side is weighted by the square of the other one: see `TensorNormal`.
            g = rows.g.astype(wanted.rows.dtype)
            squared_g = jnp.sum(g**2, axis=-1)
            parts = wanted.second is not None, wanted.ones is not None
            squared_x = squared_norms(rows, *parts, g.dtype)
            by_size = (squared_x, squared_g) if rows.reverse else (squared_g, squared_x)
            return squared_x * squared_g, *by_size
        weights = rows.weights
        if not rows.derivative:
            return weights, weights, None
        # The inputs of these rows are tangents. A tangent of zero is no row: some ways to
        # write a derivative let JAX leave it out, others do not, and both must count
        # alike. It adds nothing to the moments of inputs, but its gradient need not be
        # zero.
        inputs = rows.g if rows.reverse else rows.x.vectors()
        moves = jnp.any(inputs != 0, axis=-1).astype(wanted.rows.dtype)
        number = moves if weights is None else moves * trailing(weights, moves)
        return number, weights, moves

    def factors(
        self, statistics: Statistics, count: Array, l2: Array
    ) -> KroneckerFactors:
        if statistics.outputs.has_joint:
            return JointRows().factors(statistics.outputs.joint, count, l2)
        inputs, outputs = self._moments(statistics), statistics.outputs
        second, count = _homogeneous(inputs), count.astype(outputs.second.dtype)
        if inputs.transposed is None:
            input_factor = second * trailing(inverse_or_zero(inputs.rows), second)
            output_factor = outputs.second / count
            return KroneckerFactors(input_factor, output_factor, l2.astype(count.dtype))
        stack = inputs.rows.ndim
        transposed_out = _without_bias(outputs.transposed, second, stack)
        if self.sharing.balanced:
            # Both uses may be added up: the weights have given their moments one unit.
            input_factor = second + transposed_out
            rows = inputs.rows + inputs.transposed_rows
            input_factor = input_factor * trailing(inverse_or_zero(rows), input_factor)
            output_factor = (outputs.second + inputs.transposed) / count
        else:
            own = second * trailing(inverse_or_zero(inputs.rows), second)
            transposed, number = inputs.transposed, inputs.transposed_rows
            per_transposed = trailing(inverse_or_zero(number), transposed)
            output_factor, input_factor = _as_one_product(
                (outputs.second / count, own),
                (transposed * per_transposed, transposed_out / count),
                unit=self._trace_of_inputs(own, stack),
                stack=stack,
            )
        return KroneckerFactors(input_factor, output_factor, l2.astype(count.dtype))

    def _trace_of_inputs(self, own: Array, stack: int) -> Float[Array, "*stack"]:
        """The trace of the input factor where the weight acts transposed in some uses,
        given the input factor of the others. It is arbitrary; but in reverse mode, it is
        as in other steps, in which it may not be there, or have no influence."""
        trace = over_stack(trace_of_factor, stack)(own)
        return jnp.where((trace > 0) & (not self.tied), trace, jnp.ones_like(trace))

    def minus_mean(
        self,
        statistics: Statistics,
        mean: Float[Array, "*stack d_out d_in"],
        count: Float[Array, ""],
    ) -> Statistics:
        r"""$G' = G - \frac{N}{R} M M^\top / \operatorname{tr} A$ in the place of $G$,
        with $M$ the mean of the examples' gradients. Then the trace of $G' \otimes A$,
        and its partial trace over the inputs, are those of $G \otimes A$ less those of
        $\frac{N}{R} \operatorname{vec}(M) \operatorname{vec}(M)^\top$. The factor: the
        block takes the $R / N$ rows of an example for independent, so that each has the
        mean $\frac{N}{R} M$. ($G'$ is positive semidefinite, because $\lVert \sum \bar x
        (g \cdot v) \rVert^2 \le \sum \lVert \bar x \rVert^2 \sum (g \cdot v)^2$.)"""
        if statistics.outputs.has_joint:
            joint = statistics.outputs.joint
            return _of_joint(JointRows().minus_mean(joint, mean, count))
        moments, second = statistics.inputs, statistics.outputs.second
        trace = over_stack(trace_of_factor, moments.rows.ndim)
        # The statistics are sums: the trace is R tr A, and N G has N^2 / (R tr A) of M M'
        # subtracted.
        share = count**2 * inverse_or_zero(trace(_homogeneous(moments)))
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


def _as_one_product(
    *pairs: tuple[Array, Array], unit: Array, stack: int
) -> tuple[Array, Array]:
    r"""The product $G \otimes A$ that has the trace and the partial traces of a sum
    $\sum_u G_u \otimes A_u$: $G \propto \sum_u \operatorname{tr}(A_u) G_u$, $A \propto
    \sum_u \operatorname{tr}(G_u) A_u$, where the trace of $A$ is `unit`. (The product
    of the sums of both sides would not do: it has terms $G_u \otimes A_v$ of different
    uses, and a side that consists of inputs in one use consists of gradients in the
    other, which are of another size.)"""

    trace = over_stack(trace_of_factor, stack)
    (g, a), *rest = pairs
    G, A = trailing(trace(a), g) * g, trailing(trace(g), a) * a
    for g, a in rest:
        G, A = G + trailing(trace(a), g) * g, A + trailing(trace(g), a) * a
    scale = unit * inverse_or_zero(trace(G))
    return G / trailing(unit, G), A * trailing(scale, A)


def _without_bias(moments: Array, like: Array, stack: int) -> Array:
    """Moments of what has no ones, of the shape of those of what may have."""
    missing = like.shape[-1] - moments.shape[-1]
    return jnp.pad(moments, [(0, 0)] * stack + [(0, missing)] * (moments.ndim - stack))


def _homogeneous(moments: InputMoments) -> Float[Array, "..."]:
    r"""$\sum w \bar x \bar x^\top$, in which $\bar x$ is $[x; 1]$; $x$ without a bias; or
    $[1]$ for a bias alone."""
    if moments.second is None:
        return moments.rows[..., None, None]
    if moments.ones is None:
        return moments.second
    if moments.first is None:  # Only the diagonal is kept.
        return jnp.concatenate([moments.second, moments.ones[..., None]], axis=-1)
    return bordered(moments.second, moments.first, moments.ones)
