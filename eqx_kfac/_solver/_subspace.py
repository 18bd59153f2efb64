import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import check_count
from .._operator import eigh, Factor, matmul, qr
from ._eigh import AbstractEigenSolver


class SubspaceIteration(AbstractEigenSolver):
    r"""Like [`eqx_kfac.Eigh`][], with eigenbases that are kept warm instead of computed
    anew: a few steps of simultaneous iteration from the previous ones,

    $$Q \leftarrow \operatorname{qr}(A Q), \qquad
    \lambda = \operatorname{diag}(Q^\top A Q).$$

    with the vectors of the largest eigenvalues first in the QR decomposition.
    $Q$ is always orthogonal, and $Q \operatorname{diag}(\lambda) Q^\top$ has the
    trace of $A$; how accurate its eigenvectors are depends on how slowly $A$ changes. The
    first time, and without a previous state, it is `Eigh`. It is cheaper if a
    QR decomposition is much faster than an eigendecomposition. (Stacked
    layers are all decomposed both ways.)

    ??? cite "Reference"

        N. Vyas et al., *SOAP: Improving and Stabilizing Shampoo using Adam*, ICLR 2025,
        where bases are kept in this way; H. Rutishauser, *Simultaneous Iteration Method
        for Symmetric Matrices*, Numer. Math. 16, 1970.
    """

    iterations: int = eqx.field(static=True)
    together = False  # Decomposed in one of two ways each.

    def __init__(self, iterations: int = 1):
        """**Arguments:**

        - `iterations`: the number of the steps above, each time.
        """
        self.iterations = check_count("iterations", iterations, 1)

    def eigenbasis(
        self, factor: Factor, vectors: Float[Array, "d d"] | None
    ) -> tuple[Float[Array, " d"], Float[Array, "d d"] | None]:
        if vectors is None or factor.ndim == 1:
            return eigh(factor)

        def iterate(vectors):
            for _ in range(self.iterations):
                # The largest first: the others are made orthogonal to them. The other
                # way round, noise in the null space would come before everything.
                vectors = qr(matmul(factor, vectors)[:, ::-1])[0][:, ::-1]
            values = jnp.sum(vectors * matmul(factor, vectors), axis=0)
            return jnp.maximum(values, 0), vectors

        cold = jnp.all(vectors == 0)
        return jax.lax.cond(cold, lambda _: eigh(factor), iterate, vectors)
