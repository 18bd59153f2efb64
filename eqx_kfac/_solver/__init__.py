from ._base import AbstractDampedSolver as AbstractDampedSolver
from ._cholesky import Cholesky as Cholesky
from ._conjugate_gradient import ConjugateGradient as ConjugateGradient
from ._damped import damped_factors as damped_factors
from ._eigh import Eigh as Eigh
