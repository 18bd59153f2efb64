import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._checks import check_count
from .._custom_types import Layer
from .._devices import zeros_of
from .._operator import KroneckerBasis, matmul, SpectralOperator, vanishes
from ..form import AbstractForm, Rows
from ._base import AbstractBasisBlock, AbstractFactors, AbstractPerExampleBlock
from ._collector import Statistics
from ._gradients import Columns, columns_of, Squares, squares
from ._kronecker import Kronecker
from ._sharing import AbstractSharing, Expand


class EKFACFactors(AbstractFactors):
    r"""The two Kronecker factors of a layer, orthonormal bases $Q_G$ and $Q_A$ that were
    their eigenvectors when they were last refreshed, the eigenvalues that belong to every
    pair of columns, and the multiple of the identity that an [`eqx_kfac.L2`][] term adds.
    Stacked layers have leading axes.

    **Fields:**

    - `input_factor`: $A$, or its diagonal, as in [`eqx_kfac.factors.KroneckerFactors`][].
    - `output_factor`: $G$, `[*stack, d_out, d_out]`, or its diagonal.
    - `input_vectors`: $Q_A$, `[*stack, d_in(+1), d_in(+1)]`, an eigenvector in each
        column; zeros before the first refresh; `None` if $A$ is diagonal.
    - `output_vectors`: $Q_G$, `[*stack, d_out, d_out]`, likewise.
    - `eigenvalues`: $S$, `[*stack, d_out, d_in(+1)]`: one for each pair of columns.
    """

    input_factor: Float[Array, "..."]
    output_factor: Float[Array, "..."]
    input_vectors: Float[Array, "*stack d_in d_in"] | None
    output_vectors: Float[Array, "*stack d_out d_out"] | None
    eigenvalues: Float[Array, "*stack d_out d_in"]
    l2: Float[Array, "*stack"]
    symmetric = ("input_factor", "output_factor")

    def is_zero(self) -> Bool[Array, ""]:
        return vanishes(self.output_factor)


class EKFAC(AbstractPerExampleBlock, AbstractBasisBlock):
    r"""The eigenvalue-corrected Kronecker block: the eigenbasis of $G \otimes A$ (see
    [`eqx_kfac.Kronecker`][], which also says of which sides it is trivial), with the
    eigenvalues that are best in it,

    $$S = \frac1N \sum_n \left(Q_G^\top \nabla_n Q_A\right)^{\circ 2} \in
    \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)}, \qquad
    \nabla_n = \sum_s g_{ns} \bar x_{ns}^\top$$

    It is never further from the exact block than $G \otimes A$ (in the Frobenius norm),
    and has the exact trace. Solvers only refresh the eigenbasis, every `inverse_period`
    steps; $S$ is up to date at every step, and at any damping, which is added to it.

    At an optimizer's first step, when there is no basis yet, the eigenvalues are those of
    $G \otimes A$. When the basis changes, $S$ becomes the diagonal, in the new basis, of
    what it stood for.

    **Fields:**

    - `kronecker`: the [`eqx_kfac.Kronecker`][] block whose eigenbasis it uses.

    ??? cite "Reference"

        T. George, C. Laurent, X. Bouthillier, N. Ballas, P. Vincent, *Fast Approximate
        Natural Gradient Descent in a Kronecker-factored Eigenbasis*, NeurIPS 2018.
    """

    kronecker: Kronecker
    batch_axes: int = eqx.field(static=True)
    mixes_positions = True
    two_sided = True
    derivatives = True

    @property
    def reverse_derivatives(self) -> bool:  # pyright: ignore
        return self.kronecker.reverse_derivatives

    def __init__(
        self,
        sharing: AbstractSharing = Expand(),
        weighted: bool = True,
        batch_axes: int = 1,
        *,
        widest: int = 2048,
    ):
        """**Arguments:**

        - `sharing`, `weighted`, `widest`: as for [`eqx_kfac.Kronecker`][], for the
            factors.
        - `batch_axes`: as for [`eqx_kfac.Reduce`][].

        **Raises:** `TypeError` for something of another kind, `ValueError` for a number
        that is not positive.
        """
        self.kronecker = Kronecker(sharing, weighted, widest=widest)
        self.batch_axes = check_count("batch_axes", batch_axes, 1)

    @property
    def weighted(self) -> bool:  # pyright: ignore
        return self.kronecker.weighted

    def empty(self) -> Statistics:
        empty = self.kronecker.empty()
        outputs = empty.outputs, Squares(None, None)
        return Statistics((empty.inputs, Columns()), outputs)

    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        found = columns_of(form, layer)
        if found is None:
            return self.empty()
        columns, shape, zeros = found
        slots = self.kronecker.slots(form, layer)
        outputs = slots.outputs, Squares(None, zeros(*shape))
        return Statistics((slots.inputs, columns), outputs)

    def reverse_slots(self, slots: Statistics) -> Statistics:
        (inputs, columns), (outputs, squares) = slots.inputs, slots.outputs
        new = self.kronecker.reverse_slots(Statistics(inputs, outputs))
        return Statistics((new.inputs, columns), (new.outputs, squares))

    def statistics(self, rows: Rows, slots: Statistics) -> Statistics:
        (inputs, columns), (outputs, like) = slots.inputs, slots.outputs
        moments = self.kronecker.statistics(rows, Statistics(inputs, outputs))
        eigenvalues, stack = zeros_of(like), rows.stack
        if self._has_basis(rows, Statistics(inputs, outputs)):
            x = _rotated(columns.inputs(rows), rows.basis.input_vectors, stack)
            g = _rotated(rows.g.astype(x.dtype), rows.basis.output_vectors, stack)
            if like.gradients is None:
                square = squares(g, x, stack, self.batch_axes, like.squares)
                eigenvalues = Squares(None, square)
            else:
                eigenvalues = like.filled(g, x, stack, self.batch_axes)
        return Statistics(
            (moments.inputs, zeros_of(columns)), (moments.outputs, eigenvalues)
        )

    def _has_basis(self, rows: Rows, slots: Statistics) -> bool:
        """Whether there is a basis already. The factors that are diagonal need none."""
        moments = self.kronecker._moments(slots)
        of_inputs, of_outputs = moments.second, slots.outputs.second
        basis, matrix = rows.basis, rows.stack + 2
        needs_inputs = of_inputs is None or of_inputs.ndim == matrix
        needs_outputs = of_outputs.ndim == matrix
        missing = needs_inputs and basis.input_vectors is None
        return not (missing or (needs_outputs and basis.output_vectors is None))

    def per_example_slots(
        self, form: AbstractForm, layer: Layer, examples: int
    ) -> Statistics:
        slots = self.slots(form, layer)
        outputs, eigenvalues = slots.outputs
        eigenvalues = eigenvalues.per_example(form, layer, examples)
        return slots._replace(outputs=(outputs, eigenvalues))

    def from_per_example(self, statistics: Statistics) -> Statistics:
        outputs, (gradients, _) = statistics.outputs
        if gradients is None:
            return statistics
        eigenvalues = jnp.sum(gradients**2, axis=gradients.ndim - 3)
        return statistics._replace(outputs=(outputs, Squares(None, eigenvalues)))

    def factors(self, statistics: Statistics, count: Array, l2: Array) -> EKFACFactors:
        (inputs, _), (outputs, (_, squares)) = statistics.inputs, statistics.outputs
        kronecker = self.kronecker.factors(Statistics(inputs, outputs), count, l2)

        def vectors(factor):
            return None if factor.ndim == l2.ndim + 1 else jnp.zeros_like(factor)

        return EKFACFactors(
            input_factor=kronecker.input_factor,
            output_factor=kronecker.output_factor,
            input_vectors=vectors(kronecker.input_factor),
            output_vectors=vectors(kronecker.output_factor),
            eigenvalues=squares / count.astype(squares.dtype),
            l2=kronecker.l2,
        )

    def operator(self, factors: EKFACFactors) -> SpectralOperator:
        return SpectralOperator(self.basis(factors), factors.eigenvalues)

    def empty_basis(self) -> KroneckerBasis:
        return KroneckerBasis(None, None)

    def basis(self, factors: EKFACFactors) -> KroneckerBasis:
        return KroneckerBasis(factors.output_vectors, factors.input_vectors)

    def in_basis(self, factors: EKFACFactors, basis: KroneckerBasis) -> EKFACFactors:
        return dataclasses.replace(
            factors,
            input_vectors=basis.input_vectors,
            output_vectors=basis.output_vectors,
        )

    def change_basis(self, factors: EKFACFactors, basis: KroneckerBasis) -> EKFACFactors:
        values = factors.eigenvalues
        # The diagonal of Q S Q^T in another basis is (U o U) S, with U its change.
        if factors.output_vectors is not None:
            change = _change(factors.output_vectors, basis.output_vectors)
            values = matmul(change, values)
        if factors.input_vectors is not None:
            change = _change(factors.input_vectors, basis.input_vectors)
            values = matmul(values, change.T)
        return self.in_basis(dataclasses.replace(factors, eigenvalues=values), basis)

    def rebased(self, factors: EKFACFactors, eigenbasis: Callable) -> EKFACFactors:
        bases = jtu.tree_leaves((factors.output_vectors, factors.input_vectors))
        first = jnp.asarray([jnp.all(b == 0) for b in bases[:1]]).any()  # No basis yet.
        values_out, vectors_out = eigenbasis(
            factors.output_factor, factors.output_vectors
        )
        values_in, vectors_in = eigenbasis(factors.input_factor, factors.input_vectors)
        new = self.change_basis(factors, KroneckerBasis(vectors_out, vectors_in))
        kronecker = jnp.outer(values_out, values_in)
        values = jnp.where(first, kronecker, new.eigenvalues)
        return dataclasses.replace(new, eigenvalues=values)


def _rotated(a: Array, vectors: Any, stack: int) -> Array:
    r"""$Q^\top a$ for all rows."""
    if vectors is None:
        return a
    lead = a.shape[:stack]
    flat = a.reshape(*lead, -1, a.shape[-1])
    return matmul(flat, vectors.astype(a.dtype)).reshape(a.shape)


def _change(old: Float[Array, "d d"], new: Any) -> Float[Array, "d d"]:
    return matmul(new.T, old) ** 2
