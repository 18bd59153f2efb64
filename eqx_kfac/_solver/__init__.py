from ._base import (
    AbstractDampedSolver as AbstractDampedSolver,
    AbstractSymmetricSolver as AbstractSymmetricSolver,
    is_factorised as is_factorised,
    Pair as Pair,
)
from ._cholesky import Cholesky as Cholesky
from ._damped import damped_factors as damped_factors
from ._eigh import Eigh as Eigh
from ._newton_schulz import NewtonSchulz as NewtonSchulz
from ._subspace import SubspaceIteration as SubspaceIteration
