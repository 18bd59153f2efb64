import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Shaped


_highest = jax.lax.Precision.HIGHEST


class KroneckerOperator(lx.AbstractLinearOperator):
    r"""The symmetric positive semidefinite operator $G \otimes A$ on matrices
    $V \in \mathbb{R}^{d_\text{out} \times d_\text{in}}$:

    $$(G \otimes A) \operatorname{vec}(V) = \operatorname{vec}(G V A)$$

    with row-major $\operatorname{vec}$. Its vectors *are* matrices; nothing is ever
    flattened.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015.
    """

    output_factor: Float[Array, "d_out d_out"]
    input_factor: Float[Array, "d_in d_in"]

    def __init__(
        self,
        output_factor: Float[Array, "d_out d_out"],
        input_factor: Float[Array, "d_in d_in"],
    ):
        """**Arguments:**

        - `output_factor`: $G$, symmetric positive semidefinite, `[d_out, d_out]`.
        - `input_factor`: $A$, symmetric positive semidefinite, `[d_in, d_in]`.
        """
        self.output_factor = output_factor
        self.input_factor = input_factor

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        right = jnp.matmul(vector, self.input_factor, precision=_highest)
        return jnp.matmul(self.output_factor, right, precision=_highest)

    def as_matrix(self) -> Float[Array, "size size"]:
        return jnp.kron(self.output_factor, self.input_factor)

    def transpose(self) -> "KroneckerOperator":
        return self

    def in_structure(self) -> jax.ShapeDtypeStruct:
        shape = (self.output_factor.shape[0], self.input_factor.shape[0])
        return jax.ShapeDtypeStruct(shape, self.input_factor.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return self.in_structure()

    def eigenvalues(self) -> Float[Array, "d_out d_in"]:
        """All eigenvalues: the products of the factors' own, both ascending."""
        return jnp.outer(
            jnp.linalg.eigvalsh(self.output_factor),
            jnp.linalg.eigvalsh(self.input_factor),
        )

    def trace(self) -> Float[Array, ""]:
        r"""$\operatorname{tr}(G)\operatorname{tr}(A)$."""
        return jnp.trace(self.output_factor) * jnp.trace(self.input_factor)

    def logdet(self, damping: ArrayLike = 0.0) -> Float[Array, ""]:
        r"""$\log\det(G \otimes A + \lambda I)$, with `damping` $\lambda$."""
        eigenvalues = self.eigenvalues()
        return jnp.sum(jnp.log(eigenvalues + jnp.asarray(damping, eigenvalues.dtype)))

    def power(self, exponent: float | int) -> "KroneckerOperator":
        r"""$(G \otimes A)^p = G^p \otimes A^p$, again a Kronecker operator. For negative
        exponents both factors must be positive definite."""
        return KroneckerOperator(
            _matrix_power(self.output_factor, exponent),
            _matrix_power(self.input_factor, exponent),
        )


def _matrix_power(
    matrix: Float[Array, "d d"], exponent: float | int
) -> Float[Array, "d d"]:
    values, vectors = jnp.linalg.eigh(matrix)
    # Semidefinite; rounding alone can make an eigenvalue negative.
    powers = jnp.maximum(values, 0) ** exponent
    return jnp.matmul(vectors * powers[None, :], vectors.T, precision=_highest)


@lx.is_symmetric.register(KroneckerOperator)
@lx.is_positive_semidefinite.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> bool:
    return True


@lx.is_diagonal.register(KroneckerOperator)
@lx.is_tridiagonal.register(KroneckerOperator)
@lx.is_lower_triangular.register(KroneckerOperator)
@lx.is_upper_triangular.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> bool:
    return operator.in_size() == 1


@lx.has_unit_diagonal.register(KroneckerOperator)
@lx.is_negative_semidefinite.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> bool:
    return False


@lx.linearise.register(KroneckerOperator)
@lx.conj.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> KroneckerOperator:
    return operator


@lx.materialise.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> lx.AbstractLinearOperator:
    return operator


@lx.diagonal.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> Shaped[Array, " size"]:
    return jnp.outer(
        jnp.diag(operator.output_factor), jnp.diag(operator.input_factor)
    ).ravel()
