import abc
from typing import Any, TypeVar

import lineax as lx
from jaxtyping import Array, Float

from .._operator import KroneckerOperator


_State = TypeVar("_State")


class AbstractDampedSolver(lx.AbstractLinearSolver[_State]):
    r"""A lineax solver for $(G \otimes A + \lambda I)^{-1} v$ on a
    [`eqx_kfac.KroneckerOperator`][]. Its state is the cached factorisation.

    The damping $\lambda \ge 0$ is `options["damping"]` (default 0), a scalar:

    ```python
    lx.linear_solve(operator, v, kfac.Eigh(), options=dict(damping=1e-3))
    ```
    """

    @abc.abstractmethod
    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> Any:
        """Factorises the operator."""

    def transpose(self, state: Any, options: dict[str, Any]) -> Any:
        return state, options  # Symmetric.

    def conj(self, state: Any, options: dict[str, Any]) -> Any:
        return state, options  # Real.

    def assume_full_rank(self) -> bool:
        return True


def factors_of(
    operator: lx.AbstractLinearOperator, solver: AbstractDampedSolver
) -> tuple[Float[Array, "d_out d_out"], Float[Array, "d_in d_in"]]:
    """The two factors of a Kronecker operator; anything else is an error."""
    if not isinstance(operator, KroneckerOperator):
        name = type(solver).__name__
        raise ValueError(
            f"`eqx_kfac.{name}` solves with an `eqx_kfac.KroneckerOperator`, but got "
            f"{type(operator).__name__}. Use a solver of lineax for other operators."
        )
    return operator.output_factor, operator.input_factor
