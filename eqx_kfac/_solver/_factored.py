import abc
from typing import NamedTuple

import equinox as eqx
import lineax as lx
from jaxtyping import Array, Float

from .._operator import Factor, KroneckerOperator
from ._base import AbstractDampedSolver, Pair
from ._damped import damped_factors


class InverseState(NamedTuple):
    """The inverses of both damped factors, diagonal where these are."""

    output_inverse: Float[Array, "..."]
    input_inverse: Float[Array, "..."]
    symmetric = ("output_inverse", "input_inverse")


class AbstractFactoredSolver(AbstractDampedSolver[InverseState]):
    """Factored Tikhonov damping: each damped factor is inverted by itself."""

    scaled_bias: eqx.AbstractVar[bool]
    state_type = InverseState

    @abc.abstractmethod
    def invert(self, factor: Factor, previous: Factor | None) -> Factor:
        """The inverse of a positive definite factor. `previous` is that of one that may
        be similar, `None`, or all zeros."""

    def damped(
        self,
        output_factor: Factor,
        input_factor: Factor,
        damping: Float[Array, ""],
        bias: bool,
    ) -> Pair:
        scaled = bias and self.scaled_bias
        return Pair(*damped_factors(output_factor, input_factor, damping, scaled))

    def damped_operator(
        self,
        operator: lx.AbstractLinearOperator,
        damping: Float[Array, ""],
        bias: bool = False,
    ) -> lx.AbstractLinearOperator:
        if not isinstance(operator, KroneckerOperator):
            return super().damped_operator(operator, damping, bias)
        factors = operator.output_factor, operator.input_factor
        return KroneckerOperator(*self.damped(*factors, damping, bias))

    def decompose(self, factor: Factor, previous: tuple | None) -> tuple:
        return (self.invert(factor, None if previous is None else previous[0]),)

    def inverse(
        self, state: InverseState, damping: Float[Array, ""]
    ) -> KroneckerOperator:
        return KroneckerOperator(*state)
