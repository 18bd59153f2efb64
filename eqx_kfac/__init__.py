"""K-FAC for Equinox."""

from . import (
    analysis as analysis,
    debug as debug,
    factors as factors,
    form as form,
    operators as operators,
    plot as plot,
)
from ._block import (
    AbstractBlock as AbstractBlock,
    Diagonal as Diagonal,
    EKFAC as EKFAC,
    Expand as Expand,
    Full as Full,
    Identity as Identity,
    Joint as Joint,
    Kronecker as Kronecker,
    Reduce as Reduce,
    Series as Series,
    TensorNormal as TensorNormal,
    TNT as TNT,
)
from ._complex import (
    as_complex as as_complex,
    as_real as as_real,
    ComplexParts as ComplexParts,
)
from ._curvature import (
    curvature as curvature,
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
    HuberLoss as HuberLoss,
    L2 as L2,
    NegativeLogLikelihood as NegativeLogLikelihood,
    NormalNLL as NormalNLL,
    OrdinalCrossEntropy as OrdinalCrossEntropy,
    PoissonNLL as PoissonNLL,
    QuantileLoss as QuantileLoss,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
    StudentTNLL as StudentTNLL,
)
from ._optimizer import (
    AbstractDamping as AbstractDamping,
    AbstractGuard as AbstractGuard,
    AbstractLayerDamping as AbstractLayerDamping,
    AbstractStepRule as AbstractStepRule,
    AbstractTrustRegion as AbstractTrustRegion,
    Ahead as Ahead,
    averaged as averaged,
    AveragedParameters as AveragedParameters,
    Extent as Extent,
    Faults as Faults,
    Hyperparameters as Hyperparameters,
    Info as Info,
    KFAC as KFAC,
    KFACState as KFACState,
    LayerDamping as LayerDamping,
    LevenbergMarquardt as LevenbergMarquardt,
    MaxIncrease as MaxIncrease,
    MovingAverage as MovingAverage,
    optax_kfac as optax_kfac,
    packed as packed,
    Quadratic as Quadratic,
    QuadraticModel as QuadraticModel,
    Rollback as Rollback,
    scale_by_kfac as scale_by_kfac,
    ScheduleFree as ScheduleFree,
    Staggered as Staggered,
    TrustRegion as TrustRegion,
    WeightDecay as WeightDecay,
    Window as Window,
)
from ._raw import convert as convert, revert as revert
from ._solver import (
    AbstractDampedSolver as AbstractDampedSolver,
    Cholesky as Cholesky,
    Eigh as Eigh,
    NewtonSchulz as NewtonSchulz,
    SubspaceIteration as SubspaceIteration,
)
from ._tag import Tag as Tag
from .debug import (
    summary as summary,
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
