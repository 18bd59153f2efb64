from ._damping import (
    AbstractDamping as AbstractDamping,
    LevenbergMarquardt as LevenbergMarquardt,
)
from ._extent import Extent as Extent
from ._factors import packed as packed
from ._guard import AbstractGuard as AbstractGuard, MaxIncrease as MaxIncrease
from ._hyperparameters import (
    Hyperparameters as Hyperparameters,
    MovingAverage as MovingAverage,
    WeightDecay as WeightDecay,
)
from ._kfac import KFAC as KFAC
from ._layer_damping import (
    AbstractLayerDamping as AbstractLayerDamping,
    LayerDamping as LayerDamping,
)
from ._optax import optax_kfac as optax_kfac, scale_by_kfac as scale_by_kfac
from ._quadratic import (
    AbstractStepRule as AbstractStepRule,
    Quadratic as Quadratic,
    QuadraticModel as QuadraticModel,
)
from ._rollback import Rollback as Rollback
from ._schedule import Staggered as Staggered
from ._schedule_free import Ahead as Ahead, ScheduleFree as ScheduleFree
from ._state import (
    averaged as averaged,
    AveragedParameters as AveragedParameters,
    Faults as Faults,
    Info as Info,
    KFACState as KFACState,
)
from ._trust import (
    AbstractTrustRegion as AbstractTrustRegion,
    TrustRegion as TrustRegion,
    Window as Window,
)
