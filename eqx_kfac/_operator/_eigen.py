from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float

from ._factor import matmul


class EigenOperator(lx.AbstractLinearOperator):
    r"""The symmetric positive semidefinite operator with eigenvectors $Q_G \otimes Q_A$
    and any eigenvalues $S \in \mathbb{R}^{d_\text{out} \times d_\text{in}}$:

    $$V \mapsto Q_G \left[S \circ (Q_G^\top V Q_A)\right] Q_A^\top.$$

    Its vectors are matrices. It is its own factorisation: solving with it, at any
    damping, costs what applying it costs.
    """

    output_vectors: Float[Array, "d_out d_out"] | None
    input_vectors: Float[Array, "d_in d_in"] | None
    eigenvalues: Float[Array, "d_out d_in"]

    def __init__(self, output_vectors: Any, input_vectors: Any, eigenvalues: Any):
        """**Arguments:**

        - `output_vectors`, `input_vectors`: orthogonal matrices; `None`: identities.
        - `eigenvalues`: one for every pair of their columns; not negative.
        """
        self.output_vectors = output_vectors
        self.input_vectors = input_vectors
        self.eigenvalues = eigenvalues

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return self.scale(vector, self.eigenvalues)

    def scale(
        self, vector: Float[Array, "d_out d_in"], factors: Float[Array, "d_out d_in"]
    ) -> Float[Array, "d_out d_in"]:
        """The coordinates of `vector` in the eigenbasis times `factors`."""
        q_out, q_in = self.output_vectors, self.input_vectors
        v = vector if q_out is None else matmul(q_out.T, vector)
        v = v if q_in is None else matmul(v, q_in)
        v = v * factors
        v = v if q_in is None else matmul(v, q_in.T)
        return v if q_out is None else matmul(q_out, v)

    def as_matrix(self) -> Float[Array, "size size"]:
        size, shape = self.eigenvalues.size, self.eigenvalues.shape
        eye = jnp.eye(size, dtype=self.eigenvalues.dtype).reshape(size, *shape)
        return jax.vmap(self.mv)(eye).reshape(size, size)

    def transpose(self) -> "EigenOperator":
        return self

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.eigenvalues.shape, self.eigenvalues.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return self.in_structure()

    def trace(self) -> Float[Array, ""]:
        """The sum of all eigenvalues."""
        return jnp.sum(self.eigenvalues)

    def logdet(self, damping: ArrayLike = 0.0) -> Float[Array, ""]:
        r"""The log-determinant of the operator plus `damping` times the identity."""
        values = self.eigenvalues
        return jnp.sum(jnp.log(values + jnp.asarray(damping, values.dtype)))

    def power(self, exponent: float | int) -> "EigenOperator":
        """The operator with all eigenvalues to the power of `exponent`."""
        powers = self.eigenvalues**exponent
        return EigenOperator(self.output_vectors, self.input_vectors, powers)


@lx.is_symmetric.register(EigenOperator)
@lx.is_positive_semidefinite.register(EigenOperator)
def _(operator: EigenOperator) -> bool:
    return True


@lx.is_diagonal.register(EigenOperator)
@lx.is_tridiagonal.register(EigenOperator)
@lx.is_lower_triangular.register(EigenOperator)
@lx.is_upper_triangular.register(EigenOperator)
def _(operator: EigenOperator) -> bool:
    return operator.output_vectors is None and operator.input_vectors is None


@lx.has_unit_diagonal.register(EigenOperator)
@lx.is_negative_semidefinite.register(EigenOperator)
def _(operator: EigenOperator) -> bool:
    return False


@lx.linearise.register(EigenOperator)
@lx.conj.register(EigenOperator)
@lx.materialise.register(EigenOperator)
def _(operator: EigenOperator) -> EigenOperator:
    return operator


@lx.diagonal.register(EigenOperator)
def _(operator: EigenOperator) -> Float[Array, " size"]:
    q_out, q_in = operator.output_vectors, operator.input_vectors
    d = operator.eigenvalues
    d = d if q_out is None else matmul(q_out**2, d)
    d = d if q_in is None else matmul(d, (q_in**2).T)
    return d.ravel()
