"""K-FAC for Equinox."""

from ._block import (
    AbstractBlock as AbstractBlock,
    Expand as Expand,
    Kronecker as Kronecker,
    KroneckerFactors as KroneckerFactors,
    Reduce as Reduce,
)
from ._damping import LevenbergMarquardt as LevenbergMarquardt
from ._estimate import (
    curvature as curvature,
    value_grad_and_curvature as value_grad_and_curvature,
)
from ._fisher import (
    AbstractFisher as AbstractFisher,
    Empirical as Empirical,
    Exact as Exact,
    MonteCarlo as MonteCarlo,
)
from ._form import AbstractForm as AbstractForm, Dense as Dense
from ._loss import (
    AbstractLoss as AbstractLoss,
    L2 as L2,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)
from ._operator import KroneckerOperator as KroneckerOperator
from ._optax import kfac as kfac, scale_by_kfac as scale_by_kfac
from ._optimizer import KFAC as KFAC
from ._quadratic import QuadraticModel as QuadraticModel
from ._solver import Cholesky as Cholesky, Eigh as Eigh
from ._state import (
    averaged as averaged,
    Faults as Faults,
    Info as Info,
    Iterates as Iterates,
    KFACState as KFACState,
)
from ._tag import Tag as Tag
from .nn import cast as cast, convert as convert, Linear as Linear, revert as revert


__version__ = "0.1.0"
