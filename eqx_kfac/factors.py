"""What blocks keep of a layer's curvature, and what tags collect for them."""

from ._block import (
    AbstractFactors as AbstractFactors,
    DiagonalFactors as DiagonalFactors,
    EKFACFactors as EKFACFactors,
    FullFactors as FullFactors,
    IdentityFactors as IdentityFactors,
    KroneckerFactors as KroneckerFactors,
    SeriesFactors as SeriesFactors,
    Statistics as Statistics,
)
