import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from . import _decompositions as decompositions
from ._factor import eigh
from ._products import matmul
from ._symmetric import AbstractSymmetricOperator


class SeriesOperator(AbstractSymmetricOperator):
    r"""The covariance of a sum over $T$ time steps of matrices that form a chain:

    $$C = \frac1T \sum_{s, t = 1}^{T} F_{s - t}, \qquad F_{-d} = F_d^\top, \qquad
    F_d = \left(G_1 G_0^{-1}\right)^d G_0 \otimes \left(A_1 A_0^{-1}\right)^d A_0$$

    with row-major $\operatorname{vec}$. In the coordinates in which $F_0$ is the
    identity, $F_d = \Psi^d$ with $\Psi = \Psi_G \otimes \Psi_A$.

    **Fields:**

    - `output_factor`: $G_0$, symmetric positive semidefinite, `[d_out, d_out]`.
    - `output_cross`: $G_1$, any matrix, `[d_out, d_out]`.
    - `input_factor`: $A_0$, as $G_0$, `[d_in, d_in]`.
    - `input_cross`: $A_1$, as $G_1$, `[d_in, d_in]`.
    - `length`: $T$, the number of time steps: a scalar, which need not be whole.
    - `kind`: `"symmetric"` or `"stationary"`; see [`eqx_kfac.Series`][].

    ??? cite "Reference"

        J. Martens, J. Ba, M. Johnson, *Kronecker-factored Curvature Approximations for
        Recurrent Neural Networks*, ICLR 2018.
    """

    output_factor: Float[Array, "d_out d_out"]
    output_cross: Float[Array, "d_out d_out"]
    input_factor: Float[Array, "d_in d_in"]
    input_cross: Float[Array, "d_in d_in"]
    length: Float[Array, ""]
    kind: str = eqx.field(static=True)

    def as_matrix(self) -> Float[Array, "size size"]:
        psi_out, root_out = whitened(self.output_factor, self.output_cross)
        psi_in, root_in = whitened(self.input_factor, self.input_cross)
        if self.kind == "symmetric":
            psi_out, psi_in = (psi_out + psi_out.T) / 2, (psi_in + psi_in.T) / 2
            values_out, q_out = decompositions.eigh_dense(psi_out)
            values_in, q_in = decompositions.eigh_dense(psi_in)
            gains = chain_gain(jnp.outer(values_out, values_in), self.length)
            basis = jnp.kron(matmul(root_out, q_out), matmul(root_in, q_in))
            return matmul(basis * gains.reshape(-1)[None, :], basis.T)
        psi, root = jnp.kron(psi_out, psi_in), jnp.kron(root_out, root_in)
        eye = jnp.eye(psi.shape[0], dtype=psi.dtype)
        forward = decompositions.inv(eye - psi)
        # Not `forward + forward.T - eye`, which XLA of jaxlib 0.10 compiles for minutes.
        half = matmul(root, matmul(forward - eye / 2, root))
        return half + half.T

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return matmul(self.as_matrix(), vector.reshape(-1)).reshape(vector.shape)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        shape = (self.output_factor.shape[0], self.input_factor.shape[0])
        return jax.ShapeDtypeStruct(shape, self.input_factor.dtype)

    @property
    def positive_semidefinite(self) -> bool:
        return True


def whitened(
    factor: Float[Array, "d d"], cross: Float[Array, "d d"]
) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    r"""$M_0^{-1/2} M_1 M_0^{-1/2}$, in which one step follows from the one before, and
    $M_0^{1/2}$. Nothing follows in directions in which $M_0$ is zero: fewer rows than
    coordinates have such."""
    values, vectors = eigh(factor)
    size = factor.shape[0]
    there = values > size * jnp.finfo(values.dtype).eps * jnp.max(values)
    inverse = jnp.where(there, 1 / jnp.sqrt(jnp.where(there, values, 1)), 0)
    inverse_root = matmul(vectors * inverse[None, :], vectors.T)
    root = matmul(vectors * jnp.sqrt(values)[None, :], vectors.T)
    return matmul(inverse_root, matmul(cross, inverse_root)), root


def chain_gain(x: Float[Array, "..."], length: Float[Array, ""]) -> Float[Array, "..."]:
    r"""$\frac1T \sum_{|d| < T} (T - |d|) x^{|d|}$: how much larger the covariance of a
    sum is than that of as many independent summands. (Correlations $x$ that are one to
    within the fourth root of rounding are taken for that much less.)"""
    x = jnp.clip(x, -1.0, 1.0 - jnp.finfo(x.dtype).eps ** 0.25)
    sign = jnp.where(x < 0, jnp.cos(jnp.pi * length), 1)  # Of x to the power of T.
    sums = length * (1 - x**2) - 2 * x * (1 - sign * jnp.abs(x) ** length)
    return sums / (length * (1 - x) ** 2)


for _property in (
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
):
    _property.register(SeriesOperator)(lambda operator: False)
lx.materialise.register(SeriesOperator)(lambda operator: operator)
