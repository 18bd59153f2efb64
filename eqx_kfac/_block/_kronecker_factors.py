from jaxtyping import Array, Bool, Float, PyTree

from .._operator import diagonal, vanishes
from ._base import AbstractFactors


class KroneckerFactors(AbstractFactors):
    r"""The two factors of a layer's curvature $G \otimes A$, and the multiple of the
    identity that an [`eqx_kfac.L2`][] term adds to it. Stacked layers (and the groups of
    a convolution) have leading axes. If a factor is diagonal (the inputs of an
    embedding, a side that is too wide), only the diagonal is kept.

    **Fields:**

    - `input_factor`: $A$, of shape `[*stack, d_in(+1), d_in(+1)]`, the bias in the last
        row and column; or its diagonal.
    - `output_factor`: $G$, of shape `[*stack, d_out, d_out]`, or its diagonal.
    """

    input_factor: Float[Array, "..."]
    output_factor: Float[Array, "..."]
    l2: Float[Array, "*stack"]
    symmetric = ("input_factor", "output_factor")

    def is_zero(self) -> Bool[Array, ""]:
        return vanishes(self.output_factor)

    def bounds(self) -> PyTree[Array]:
        # |sum a b|^2 <= sum a^2 sum b^2
        return diagonal(self.input_factor), diagonal(self.output_factor), self.l2
