import abc
from typing import Any, TypeVar

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from .._operator import eigh, Factor, KroneckerOperator, SeriesOperator, SpectralOperator
from ._series import apply_series, factorise_series, SeriesState


_State = TypeVar("_State")


class AbstractSymmetricSolver(lx.AbstractLinearSolver[_State]):
    """A solver for real, symmetric operators of full rank."""

    def transpose(self, state: Any, options: dict[str, Any]) -> Any:
        return state, options  # Symmetric.

    def conj(self, state: Any, options: dict[str, Any]) -> Any:
        return state, options  # Real.

    def assume_full_rank(self) -> bool:
        return True


class AbstractDampedSolver(AbstractSymmetricSolver[_State]):
    r"""A lineax solver for $(C + \lambda I)^{-1} v$, on a
    [`eqx_kfac.KroneckerOperator`][] $C = G \otimes A$. Its state is the cached
    factorisation. (A diagonal operator, an [`eqx_kfac.SpectralOperator`][] and an
    [`eqx_kfac.SeriesOperator`][] are solved with too, each in its only way.)

    The damping $\lambda \ge 0$ is `options["damping"]` (default 0), a scalar:

    ```python
    lx.linear_solve(operator, v, kfac.Eigh(), options=dict(damping=1e-3))
    ```
    """

    @abc.abstractmethod
    def factorise(
        self,
        output_factor: Factor,
        input_factor: Factor,
        damping: Float[Array, ""],
        previous: Any,
    ) -> Any:
        r"""The state for $G \otimes A$. `previous` is that of similar factors, perhaps,
        `None`, or all zeros."""

    @abc.abstractmethod
    def apply(
        self, state: Any, vector: Float[Array, "d_out d_in"], damping: Float[Array, ""]
    ) -> Float[Array, "d_out d_in"]:
        """The solution, given the state."""

    def eigenbasis(
        self, factor: Factor, vectors: Float[Array, "d d"] | None
    ) -> tuple[Float[Array, " d"], Float[Array, "d d"] | None]:
        """Eigenvalues and eigenvectors of a factor, given those (or zeros) of one that
        may be similar. For blocks that want an eigenbasis of every solver."""
        return eigh(factor)

    def bounds(self, state: Any) -> Any:
        """Numbers that are finite only if the whole state is."""
        return state

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> Any:
        """Factorises the operator."""
        if is_factorised(operator):
            return operator
        if isinstance(operator, SeriesOperator):
            return factorise_series(operator, _damping(options, operator.input_factor))
        if not isinstance(operator, KroneckerOperator):
            name = type(self).__name__
            raise ValueError(
                f"`eqx_kfac.{name}` solves with an `eqx_kfac.KroneckerOperator` or a "
                f"diagonal operator, but got {type(operator).__name__}. Use a solver of "
                "lineax for other operators."
            )
        damping = _damping(options, operator.input_factor)
        factors = operator.output_factor, operator.input_factor
        return self.factorise(*factors, damping, options.get("previous"))

    def compute(
        self, state: Any, vector: Float[Array, "..."], options: dict[str, Any]
    ) -> tuple[Float[Array, "..."], lx.RESULTS, dict[str, Any]]:
        damping = _damping(options, vector)
        if isinstance(state, lx.DiagonalLinearOperator):
            solution = vector / (state.diagonal + damping)
        elif isinstance(state, SpectralOperator):
            solution = state.power(-1, damping).mv(vector)
        elif isinstance(state, SeriesState):
            solution = apply_series(state, vector)
        else:
            solution = self.apply(state, vector, damping)
        return solution, lx.RESULTS.successful, {}


def _damping(options: dict[str, Any], like: Array) -> Float[Array, ""]:
    return jnp.asarray(options.get("damping", 0.0), like.dtype)


def is_factorised(operator: lx.AbstractLinearOperator) -> bool:
    """Whether there is nothing to factorise."""
    return isinstance(operator, lx.DiagonalLinearOperator | SpectralOperator)
