import abc
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, PyTree

from .._custom_types import Options
from .._operator import (
    DampedOperator,
    eigh,
    Factor,
    KroneckerOperator,
    MaskedOperator,
    SeriesOperator,
    SpectralOperator,
)
from ._masked import conjugate_gradients, MaskedState
from ._series import apply_series, factorise_series, SeriesState


_State = TypeVar("_State")


class Pair(NamedTuple):
    """The two factors of a Kronecker product."""

    output_factor: Factor
    input_factor: Factor


class AbstractSymmetricSolver(lx.AbstractLinearSolver[_State]):
    """A solver for real, symmetric operators of full rank."""

    def transpose(self, state: _State, options: Options) -> tuple[_State, Options]:
        return state, options  # Symmetric.

    def conj(self, state: _State, options: Options) -> tuple[_State, Options]:
        return state, options  # Real.

    def assume_full_rank(self) -> bool:
        return True


class AbstractDampedSolver(AbstractSymmetricSolver[_State]):
    r"""A lineax solver for $(C + \lambda I)^{-1} v$, on a
    [`eqx_kfac.operators.KroneckerOperator`][] $C = G \otimes A$. Its state is the cached
    factorisation. (It also solves with a diagonal operator, an
    [`eqx_kfac.operators.SpectralOperator`][] and an
    [`eqx_kfac.operators.SeriesOperator`][], each in the only possible way.)

    The damping $\lambda \ge 0$ is `options["damping"]` (default 0), a scalar. The option
    `options["bias"]` (default `False`) says whether the last coordinate of $A$ is that of
    a bias:

    ```python
    lx.linear_solve(operator, v, kfac.Eigh(), options=dict(damping=1e-3))
    ```

    **Fields:**

    - `state_type`: the type of the state: a tuple of what is kept of the output factor,
        and of the input factor.
    - `together`: whether several factors are better decomposed at the same time (by
        `vmap`).
    """

    state_type: ClassVar[type]
    together: ClassVar[bool] = True

    def damped(
        self,
        output_factor: Factor,
        input_factor: Factor,
        damping: Float[Array, ""],
        bias: bool,
    ) -> Pair:
        """The factors that are decomposed. With `bias`, the last coordinate of the inputs
        is that of a bias."""
        return Pair(output_factor, input_factor)

    @abc.abstractmethod
    def decompose(self, factor: Factor, previous: tuple | None) -> tuple:
        """What is kept of a factor. `previous` is what was kept of one that may be
        similar, `None`, or all zeros."""

    @abc.abstractmethod
    def inverse(
        self, state: _State, damping: Float[Array, ""]
    ) -> KroneckerOperator | SpectralOperator:
        """The operator that the state stands for: a
        [`eqx_kfac.operators.KroneckerOperator`][] or an
        [`eqx_kfac.operators.SpectralOperator`][]."""

    def eigenbasis(
        self, factor: Factor, vectors: Float[Array, "d d"] | None
    ) -> tuple[Float[Array, " d"], Float[Array, "d d"] | None]:
        """Eigenvalues and eigenvectors of a factor, given those (or zeros) of one that
        may be similar. For blocks that want an eigenbasis of every solver."""
        return eigh(factor)

    def bounds(self, state: _State) -> PyTree:
        """Numbers that are finite only if the whole state is."""
        return state

    def prepare(
        self,
        operator: lx.AbstractLinearOperator,
        damping: Float[Array, ""],
        bias: bool = False,
    ) -> Any:
        """The `Pair` of factors to decompose, or the state, if nothing is decomposed."""
        if is_factorised(operator):
            return operator
        if isinstance(operator, SeriesOperator):
            return factorise_series(operator, damping)
        if not isinstance(operator, KroneckerOperator):
            name = type(self).__name__
            raise ValueError(
                f"`eqx_kfac.{name}` solves with an "
                "`eqx_kfac.operators.KroneckerOperator` or a diagonal operator, but got "
                f"{type(operator).__name__}. Use a solver of lineax for other operators."
            )
        factors = operator.output_factor, operator.input_factor
        return self.damped(*factors, damping, bias)

    def damped_operator(
        self,
        operator: lx.AbstractLinearOperator,
        damping: Float[Array, ""],
        bias: bool = False,
    ) -> lx.AbstractLinearOperator:
        """The operator whose inverse the solver applies, given all but the damping."""
        if isinstance(operator, lx.DiagonalLinearOperator):
            return lx.DiagonalLinearOperator(operator.diagonal + damping)
        return DampedOperator(operator, damping)

    def masked(
        self,
        operator: MaskedOperator,
        state: Any,
        damping: Float[Array, ""],
        bias: bool = False,
    ) -> MaskedState:
        """The state for a masked operator, given that for the operator within."""
        damped = self.damped_operator(operator.operator, damping, bias)
        return MaskedState(MaskedOperator(damped, operator.mask), state)

    def split(self, state: tuple) -> tuple[tuple, tuple]:
        """What a state has of either factor."""
        half = len(state) // 2
        return state[:half], state[half:]

    def join(self, output: tuple, input: tuple) -> _State:
        """The inverse of `split`."""
        return self.state_type(*output, *input)

    def init(self, operator: lx.AbstractLinearOperator, options: Options) -> Any:
        """Factorises the operator."""
        leaf = jtu.tree_leaves(operator)[0]
        bias, damping = options.get("bias", False), _damping(options, leaf)
        if isinstance(operator, MaskedOperator):
            state = self.init(operator.operator, options)
            return self.masked(operator, state, damping, bias)
        prepared = self.prepare(operator, damping, bias)
        if not isinstance(prepared, Pair):
            return prepared
        previous = options.get("previous")
        before = (None, None) if previous is None else self.split(previous)
        return self.join(*map(self.decompose, prepared, before))

    def compute(
        self, state: Any, vector: Float[Array, "..."], options: Options
    ) -> tuple[Float[Array, "..."], lx.RESULTS, Options]:
        if isinstance(state, MaskedState):
            inverse = lambda v: self.compute(state.state, v, options)[0]
            solution = conjugate_gradients(state.damped, inverse, vector)
        elif isinstance(state, lx.DiagonalLinearOperator):
            solution = vector / (state.diagonal + _damping(options, vector))
        elif isinstance(state, SeriesState):
            solution = apply_series(state, vector)
        else:
            solution = self._inverse(state, options, vector).mv(vector)
        return solution, lx.RESULTS.successful, {}

    def compute_outer(
        self,
        state: Any,
        g: Float[Array, "rows d_out"],
        x: Float[Array, "rows d_in"],
        options: Options,
    ) -> Float[Array, "d_out d_in"]:
        r"""The solution for $\sum g x^\top$, given its rows. The operator is a Kronecker
        product, or one in a basis that is."""
        return self._inverse(state, options, x).mv_outer(g, x)

    def _inverse(
        self, state: Any, options: Options, like: Array
    ) -> KroneckerOperator | SpectralOperator:
        damping = _damping(options, like)
        if isinstance(state, SpectralOperator):
            return state.power(-1, damping)
        return self.inverse(state, damping)


def _damping(options: Options, like: Array) -> Float[Array, ""]:
    return jnp.asarray(options.get("damping", 0.0), like.dtype)


def is_factorised(operator: lx.AbstractLinearOperator) -> bool:
    """Whether there is nothing to factorise."""
    return isinstance(operator, lx.DiagonalLinearOperator | SpectralOperator)
