from ._base import (
    AbstractBasisBlock as AbstractBasisBlock,
    AbstractBlock as AbstractBlock,
    AbstractCentredBlock as AbstractCentredBlock,
    AbstractFactors as AbstractFactors,
    AbstractJointBlock as AbstractJointBlock,
    AbstractPerExampleBlock as AbstractPerExampleBlock,
    no_l2 as no_l2,
)
from ._check import check_block as check_block
from ._collector import (
    AbstractCollector as AbstractCollector,
    is_statistics as is_statistics,
    Statistics as Statistics,
)
from ._diagonal import Diagonal as Diagonal, DiagonalFactors as DiagonalFactors
from ._ekfac import EKFAC as EKFAC, EKFACFactors as EKFACFactors
from ._full import Full as Full, FullFactors as FullFactors
from ._gradients import Columns as Columns, columns_of as columns_of
from ._identity import Identity as Identity, IdentityFactors as IdentityFactors
from ._kronecker import Kronecker as Kronecker
from ._kronecker_factors import KroneckerFactors as KroneckerFactors
from ._series import Series as Series, SeriesFactors as SeriesFactors
from ._sharing import (
    AbstractSharing as AbstractSharing,
    Expand as Expand,
    Joint as Joint,
    Reduce as Reduce,
    TensorNormal as TensorNormal,
)
from ._tnt import TNT as TNT
