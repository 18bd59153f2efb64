import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float

from .._inner_products import inner
from . import _decompositions as decompositions
from ._factor import (
    dense,
    diagonal,
    eigh,
    Factor,
    left,
    outer,
    power,
    right,
    trace_of_factor,
)
from ._spectral import (
    eigenvalues,
    KroneckerBasis,
    spectral,
    SpectralOperator,
    squared_norm,
    trace,
)
from ._symmetric import AbstractSymmetricOperator, sum_of_logs


class KroneckerOperator(AbstractSymmetricOperator):
    r"""The symmetric positive semidefinite operator $G \otimes A$ on matrices
    $V \in \mathbb{R}^{d_\text{out} \times d_\text{in}}$:

    $$(G \otimes A) \operatorname{vec}(V) = \operatorname{vec}(G V A)$$

    with row-major $\operatorname{vec}$. Its vectors *are* matrices; nothing is ever
    flattened.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015.
    """

    output_factor: Factor
    input_factor: Factor

    def __init__(self, output_factor: Factor, input_factor: Factor):
        """**Arguments:**

        - `output_factor`: $G$, symmetric positive semidefinite, `[d_out, d_out]`, or its
            diagonal `[d_out]` if it is diagonal.
        - `input_factor`: $A$, likewise, `[d_in, d_in]` or `[d_in]`.
        """
        self.output_factor = output_factor
        self.input_factor = input_factor

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return left(self.output_factor, right(vector, self.input_factor))

    def mv_outer(
        self, g: Float[Array, "rows d_out"], x: Float[Array, "rows d_in"]
    ) -> Float[Array, "d_out d_in"]:
        r"""The product with $\sum g x^\top$, as $\sum (G g) (A x)^\top$: less work if
        there are fewer rows than features."""
        return outer(right(g, self.output_factor), right(x, self.input_factor))

    def as_matrix(self) -> Float[Array, "size size"]:
        return jnp.kron(dense(self.output_factor), dense(self.input_factor))

    def in_structure(self) -> jax.ShapeDtypeStruct:
        shape = (self.output_factor.shape[0], self.input_factor.shape[0])
        return jax.ShapeDtypeStruct(shape, self.input_factor.dtype)

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def diagonal(self) -> Float[Array, " size"]:
        """The products of the factors' own entries."""
        return jnp.outer(
            diagonal(self.output_factor), diagonal(self.input_factor)
        ).ravel()

    def eigenvalues(self) -> Float[Array, "d_out d_in"]:
        """All eigenvalues: the products of the factors' eigenvalues, both ascending, and
        clipped at zero (rounding alone can make one negative)."""

        def values(factor):
            if factor.ndim == 1:
                return jnp.maximum(jnp.sort(factor), 0)
            return jnp.maximum(decompositions.eigvalsh(factor), 0)

        return jnp.outer(values(self.output_factor), values(self.input_factor))

    def trace(self) -> Float[Array, ""]:
        r"""$\operatorname{tr}(G)\operatorname{tr}(A)$."""
        return trace_of_factor(self.output_factor) * trace_of_factor(self.input_factor)

    def logdet(self, damping: ArrayLike = 0.0) -> Float[Array, ""]:
        r"""$\log\det(G \otimes A + \lambda I)$, with `damping` $\lambda$."""
        return sum_of_logs(self.eigenvalues(), damping)

    def frobenius_norm(self) -> Float[Array, ""]:
        r"""$\lVert G \rVert \lVert A \rVert$, the root of the sum of the squares of all
        entries."""
        return jnp.sqrt(_squared_norm(self))

    def spectral(self) -> SpectralOperator:
        """This operator by its eigenvectors and eigenvalues (clipped at zero)."""
        values_out, q_out = eigh(self.output_factor)
        values_in, q_in = eigh(self.input_factor)
        basis = KroneckerBasis(q_out, q_in)
        return SpectralOperator(basis, jnp.outer(values_out, values_in))

    def inverse(self, damping: ArrayLike) -> SpectralOperator:
        r"""$(G \otimes A + \lambda I)^{-1}$ with `damping` $\lambda > 0$, through the
        eigenvectors of both factors."""
        return self.power(-1, damping)  # pyright: ignore

    def power(
        self, exponent: float | int, damping: ArrayLike | None = None
    ) -> "KroneckerOperator | SpectralOperator":
        r"""**Arguments:**

        - `exponent`: $p$.
        - `damping`: $\lambda$, or `None`.

        **Returns:**

        $(G \otimes A)^p = G^p \otimes A^p$, again a Kronecker operator, or with damping
        $(G \otimes A + \lambda I)^p$, a [`eqx_kfac.operators.SpectralOperator`][].
        Without damping both factors must be positive definite if $p < 0$."""
        if damping is not None:
            return self.spectral().power(exponent, damping)
        return KroneckerOperator(
            power(self.output_factor, exponent), power(self.input_factor, exponent)
        )


spectral.register(KroneckerOperator, KroneckerOperator.spectral)
eigenvalues.register(KroneckerOperator, KroneckerOperator.eigenvalues)
trace.register(KroneckerOperator, KroneckerOperator.trace)


@squared_norm.register
def _squared_norm(operator: KroneckerOperator) -> Float[Array, ""]:
    G, A = operator.output_factor, operator.input_factor
    return inner(G, G) * inner(A, A)


@lx.is_diagonal.register(KroneckerOperator)
@lx.is_tridiagonal.register(KroneckerOperator)
@lx.is_lower_triangular.register(KroneckerOperator)
@lx.is_upper_triangular.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> bool:
    both = operator.output_factor.ndim == operator.input_factor.ndim == 1
    return both or operator.in_size() == 1


@lx.materialise.register(KroneckerOperator)
def _(operator: KroneckerOperator) -> KroneckerOperator:
    return operator
