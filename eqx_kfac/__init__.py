"""K-FAC for Equinox."""

from . import form as form, plot as plot
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
    TensorNormal as TensorNormal,
    TNT as TNT,
)
from ._complex import (
    as_complex as as_complex,
    as_real as as_real,
    ComplexParts as ComplexParts,
)
from ._curvature import (
    Accumulator as Accumulator,
    BlockDiagonalOperator as BlockDiagonalOperator,
    capture as capture,
    Captured as Captured,
    curvature as curvature,
    EmpiricalFisher as EmpiricalFisher,
    Fisher as Fisher,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
    Total as Total,
    value_grad_and_curvature as value_grad_and_curvature,
)
from ._fisher import (
    AbstractFisher as AbstractFisher,
    Centred as Centred,
    CurvatureProp as CurvatureProp,
    Empirical as Empirical,
    Exact as Exact,
    ExactGGN as ExactGGN,
    MonteCarlo as MonteCarlo,
)
from ._loss import (
    AbstractLoss as AbstractLoss,
    Energy as Energy,
    L2 as L2,
    NormalNLL as NormalNLL,
    PoissonNLL as PoissonNLL,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)
from ._operator import (
    KroneckerOperator as KroneckerOperator,
    Packed as Packed,
    SeriesOperator as SeriesOperator,
    SpectralOperator as SpectralOperator,
    Split as Split,
    unpacked as unpacked,
)
from ._optimizer import (
    AbstractDamping as AbstractDamping,
    AbstractGuard as AbstractGuard,
    AbstractLayerDamping as AbstractLayerDamping,
    AbstractStepRule as AbstractStepRule,
    AbstractTrustRegion as AbstractTrustRegion,
    averaged as averaged,
    Faults as Faults,
    Info as Info,
    InTurn as InTurn,
    Iterates as Iterates,
    KFAC as KFAC,
    kfac as kfac,
    KFACState as KFACState,
    LayerDamping as LayerDamping,
    LevenbergMarquardt as LevenbergMarquardt,
    MaxIncrease as MaxIncrease,
    MovingAverage as MovingAverage,
    Numbers as Numbers,
    packed as packed,
    Quadratic as Quadratic,
    QuadraticModel as QuadraticModel,
    Rollback as Rollback,
    scale_by_kfac as scale_by_kfac,
    TrustRegion as TrustRegion,
    WeightDecay as WeightDecay,
    Window as Window,
)
from ._posterior import (
    Influence as Influence,
    influence as influence,
    Lanczos as Lanczos,
    lanczos as lanczos,
    Laplace as Laplace,
    spectral_density as spectral_density,
    SpectralDensity as SpectralDensity,
)
from ._raw import convert as convert, revert as revert
from ._solver import (
    AbstractDampedSolver as AbstractDampedSolver,
    Cholesky as Cholesky,
    ConjugateGradient as ConjugateGradient,
    Eigh as Eigh,
    NewtonSchulz as NewtonSchulz,
    SubspaceIteration as SubspaceIteration,
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
    RMSNorm as RMSNorm,
    scan_cell as scan_cell,
    Shared as Shared,
    SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)


__version__ = "0.1.0"
