"""K-FAC for Equinox."""

from ._accumulate import Accumulator as Accumulator, Total as Total
from ._block import (
    AbstractBlock as AbstractBlock,
    AbstractFactors as AbstractFactors,
    Diagonal as Diagonal,
    DiagonalFactors as DiagonalFactors,
    Expand as Expand,
    Kronecker as Kronecker,
    KroneckerFactors as KroneckerFactors,
    Reduce as Reduce,
    Series as Series,
    SeriesFactors as SeriesFactors,
    Statistics as Statistics,
)
from ._capture import capture as capture, Captured as Captured
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
from ._form import (
    AbstractForm as AbstractForm,
    Convolution as Convolution,
    Dense as Dense,
    Einsum as Einsum,
    Gates as Gates,
    Lookup as Lookup,
    Parameters as Parameters,
    Rows as Rows,
    Sizes as Sizes,
    Vectors as Vectors,
)
from ._loss import (
    AbstractLoss as AbstractLoss,
    L2 as L2,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)
from ._operator import (
    KroneckerOperator as KroneckerOperator,
    SeriesOperator as SeriesOperator,
)
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
from .debug import (
    LayerCheck as LayerCheck,
    LayerSummary as LayerSummary,
    Summary as Summary,
    summary as summary,
    Verification as Verification,
    verify as verify,
)
from .nn import (
    BatchNorm as BatchNorm,
    cast as cast,
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
    convert as convert,
    ConvTranspose as ConvTranspose,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
    Embedding as Embedding,
    GroupNorm as GroupNorm,
    GRUCell as GRUCell,
    LayerNorm as LayerNorm,
    Linear as Linear,
    LSTMCell as LSTMCell,
    Parameter as Parameter,
    PReLU as PReLU,
    revert as revert,
    RMSNorm as RMSNorm,
    scan_cell as scan_cell,
    Shared as Shared,
    SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)


__version__ = "0.1.0"
