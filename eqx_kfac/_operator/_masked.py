import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float

from ._kronecker import KroneckerOperator
from ._spectral import squared_norm
from ._symmetric import AbstractSymmetricOperator


class MaskedOperator(AbstractSymmetricOperator):
    r"""$P C P$: the part of a symmetric operator $C$ on matrices that belongs to some of
    their entries. $P$ is the projection onto these, $P V = M \odot V$ with a mask $M$.

    **Fields:**

    - `operator`: $C$.
    - `mask`: $M$, true where an entry belongs to it.
    """

    operator: lx.AbstractLinearOperator
    mask: Bool[Array, "d_out d_in"]

    def project(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        """$P V$."""
        return jnp.where(self.mask, vector, 0)

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return self.project(self.operator.mv(self.project(vector)))

    def as_matrix(self) -> Float[Array, "size size"]:
        mask = self.mask.reshape(-1)
        return jnp.where(jnp.outer(mask, mask), self.operator.as_matrix(), 0)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return self.operator.in_structure()

    @property
    def positive_semidefinite(self) -> bool:
        return lx.is_positive_semidefinite(self.operator)

    def diagonal(self) -> Float[Array, " size"]:
        """The diagonal of $C$ where the mask is true, and zeros."""
        return jnp.where(self.mask.reshape(-1), lx.diagonal(self.operator), 0)


@squared_norm.register
def _squared_norm(operator: MaskedOperator) -> Float[Array, ""]:
    r"""Of a Kronecker product, $\sum_{ijkl} M_{ij} M_{kl} G_{ik}^2 A_{jl}^2$."""
    inner = operator.operator
    if not isinstance(inner, KroneckerOperator):
        return jnp.sum(operator.as_matrix() ** 2)
    squares = KroneckerOperator(inner.output_factor**2, inner.input_factor**2)
    mask = operator.mask.astype(inner.input_factor.dtype)
    return jnp.sum(mask * squares.mv(mask))
