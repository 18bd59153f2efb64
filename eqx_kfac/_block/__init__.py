from ._base import (
    AbstractBlock as AbstractBlock,
    AbstractFactors as AbstractFactors,
    Statistics as Statistics,
)
from ._diagonal import Diagonal as Diagonal, DiagonalFactors as DiagonalFactors
from ._kronecker import Kronecker as Kronecker, KroneckerFactors as KroneckerFactors
from ._series import Series as Series, SeriesFactors as SeriesFactors
from ._sharing import (
    AbstractSharing as AbstractSharing,
    Expand as Expand,
    Reduce as Reduce,
)
