import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import AT_LEAST_0, check_count, check_flag, check_number
from .._misc import tree_where
from .._operator import Factor, identity, matmul
from ._factored import AbstractFactoredSolver


class NewtonSchulz(AbstractFactoredSolver):
    r"""Like [`eqx_kfac.Cholesky`][], with both damped factors $M$ inverted by the
    Newton-Schulz iteration

    $$X \leftarrow X (2 I - M X),$$

    which consists of matrix products only: for hardware on which these are fast and
    decompositions are not. It starts at the previous inverse if that is near enough (then
    a few iterations are enough), otherwise at $I / \lVert M \rVert_1$, from where it
    takes about $\log_2$ of the condition number of $M$. It stops when the residual
    $I - M X$ is small or falls no further, and returns the iterate with the smallest one.
    If even that is above a half, $M$ is too ill-conditioned for the precision or the
    number of iterations (for float32, from about $10^5$ on): the result is not a number,
    the previous inverse stays in use, and the step has the fault `factorisation`.

    ??? cite "Reference"

        G. Schulz, *Iterative Berechnung der reziproken Matrix*, ZAMM 13, 1933.
    """

    tolerance: float = eqx.field(static=True)
    max_iterations: int = eqx.field(static=True)
    scaled_bias: bool = eqx.field(static=True)
    together = False  # Each for as long as it takes.

    def __init__(
        self,
        tolerance: float = 1e-6,
        max_iterations: int = 60,
        scaled_bias: bool = False,
    ):
        r"""**Arguments:**

        - `tolerance`: of the residual, in units of $\lVert I \rVert_F$.
        - `max_iterations`: two matrix products each.
        - `scaled_bias`: as for [`eqx_kfac.Cholesky`][].
        """
        self.tolerance = check_number("tolerance", tolerance, AT_LEAST_0)
        check_flag("scaled_bias", scaled_bias)
        self.scaled_bias = scaled_bias
        self.max_iterations = check_count("max_iterations", max_iterations, 1)

    def invert(self, factor: Factor, previous: Factor | None) -> Factor:
        if factor.ndim == 1:
            return 1 / factor
        eye = identity(factor)
        size = jnp.sqrt(jnp.asarray(eye.shape[0], factor.dtype))

        def residual(x) -> tuple[Float[Array, "d d"], Float[Array, ""]]:
            rest = eye - matmul(factor, x)
            return rest, jnp.linalg.norm(rest) / size

        start = eye / jnp.max(jnp.sum(jnp.abs(factor), axis=0))
        if previous is not None:
            _, distance = residual(previous)
            start = jnp.where(distance * size < 0.9, previous, start)

        def again(carry):
            (_, _, norm), before, _, number = carry
            # In the beginning, the residual falls so slowly that rounding may hide it.
            falls = (norm < before) | (norm > 0.1)
            return (norm > self.tolerance) & falls & (number < self.max_iterations)

        def iterate(carry):
            (x, rest, norm), _, best, number = carry
            x = x + matmul(x, rest)
            x = (x + x.T) / 2
            new = x, *residual(x)
            best = tree_where(new[-1] < best[-1], (x, new[-1]), best)
            return new, norm, best, number + 1

        first = start, *residual(start)
        none = jnp.full_like(first[-1], jnp.inf)
        carry = first, none, (start, first[-1]), jnp.zeros((), jnp.int32)
        _, _, (x, norm), _ = jax.lax.while_loop(again, iterate, carry)
        return jnp.where(norm < _LARGE, x, jnp.nan)


# With a smaller residual (in units of the norm of the identity), an iterate is near
# enough to the inverse to precondition with.
_LARGE = 0.5
