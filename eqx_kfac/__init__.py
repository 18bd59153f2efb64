"""K-FAC for Equinox."""

from ._accumulate import Accumulator as Accumulator, Total as Total
from ._block import (
    AbstractBlock as AbstractBlock,
    AbstractFactors as AbstractFactors,
    Diagonal as Diagonal,
    DiagonalFactors as DiagonalFactors,
    EKFAC as EKFAC,
    EKFACFactors as EKFACFactors,
    Expand as Expand,
    Full as Full,
    FullFactors as FullFactors,
    Identity as Identity,
    IdentityFactors as IdentityFactors,
    Kronecker as Kronecker,
    KroneckerFactors as KroneckerFactors,
    Reduce as Reduce,
    Series as Series,
    SeriesFactors as SeriesFactors,
    Statistics as Statistics,
    TNT as TNT,
)
from ._block_diagonal import BlockDiagonalOperator as BlockDiagonalOperator
from ._capture import capture as capture, Captured as Captured
from ._damping import LevenbergMarquardt as LevenbergMarquardt
from ._estimate import (
    curvature as curvature,
    value_grad_and_curvature as value_grad_and_curvature,
)
from ._fisher import (
    AbstractFisher as AbstractFisher,
    CurvatureProp as CurvatureProp,
    Empirical as Empirical,
    Exact as Exact,
    ExactGGN as ExactGGN,
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
from ._layer_damping import LayerDamping as LayerDamping
from ._loss import (
    AbstractLoss as AbstractLoss,
    L2 as L2,
    NormalNLL as NormalNLL,
    PoissonNLL as PoissonNLL,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)
from ._model_operator import (
    EmpiricalFisher as EmpiricalFisher,
    Fisher as Fisher,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
)
from ._operator import (
    KroneckerOperator as KroneckerOperator,
    Packed as Packed,
    SeriesOperator as SeriesOperator,
    SpectralOperator as SpectralOperator,
    unpacked as unpacked,
)
from ._optax import kfac as kfac, scale_by_kfac as scale_by_kfac
from ._optimizer import KFAC as KFAC
from ._packed_state import packed as packed
from ._quadratic import QuadraticModel as QuadraticModel
from ._solver import (
    Cholesky as Cholesky,
    ConjugateGradient as ConjugateGradient,
    Eigh as Eigh,
    NewtonSchulz as NewtonSchulz,
    SubspaceIteration as SubspaceIteration,
)
from ._state import (
    averaged as averaged,
    Faults as Faults,
    Info as Info,
    Iterates as Iterates,
    KFACState as KFACState,
)
from ._tag import Tag as Tag
from ._trust import TrustRegion as TrustRegion, Window as Window
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
    MLP as MLP,
    MultiheadAttention as MultiheadAttention,
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
