"""What curvature says of a network after training: exact operators, curvature over a data
set, what passes through the layers, posteriors, influence functions, spectra."""

from ._accumulate import (
    AccumulatedStatistics as AccumulatedStatistics,
    Accumulator as Accumulator,
)
from ._block_diagonal import BlockDiagonalOperator as BlockDiagonalOperator
from ._capture import capture as capture, Captured as Captured
from ._conjugate_gradient import ConjugateGradient as ConjugateGradient
from ._influence import Influence as Influence, influence as influence
from ._laplace import Laplace as Laplace
from ._model_operator import (
    EmpiricalFisherOperator as EmpiricalFisherOperator,
    FisherOperator as FisherOperator,
    GaussNewtonOperator as GaussNewtonOperator,
    HessianOperator as HessianOperator,
)
from ._spectra import (
    Lanczos as Lanczos,
    lanczos as lanczos,
    spectral_density as spectral_density,
    SpectralDensity as SpectralDensity,
)
