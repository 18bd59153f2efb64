from ._damping import (
    AbstractDamping as AbstractDamping,
    LevenbergMarquardt as LevenbergMarquardt,
)
from ._factors import packed as packed
from ._guard import AbstractGuard as AbstractGuard, MaxIncrease as MaxIncrease
from ._kfac import KFAC as KFAC
from ._layer_damping import (
    AbstractLayerDamping as AbstractLayerDamping,
    LayerDamping as LayerDamping,
)
from ._numbers import (
    MovingAverage as MovingAverage,
    Numbers as Numbers,
    WeightDecay as WeightDecay,
)
from ._optax import kfac as kfac, scale_by_kfac as scale_by_kfac
from ._quadratic import (
    AbstractStepRule as AbstractStepRule,
    Quadratic as Quadratic,
    QuadraticModel as QuadraticModel,
)
from ._rollback import Rollback as Rollback
from ._schedule import InTurn as InTurn
from ._state import (
    averaged as averaged,
    Faults as Faults,
    Info as Info,
    Iterates as Iterates,
    KFACState as KFACState,
)
from ._trust import (
    AbstractTrustRegion as AbstractTrustRegion,
    TrustRegion as TrustRegion,
    Window as Window,
)
