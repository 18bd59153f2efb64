from ._base import (
    AbstractFisher as AbstractFisher,
    check_fisher as check_fisher,
    check_separate as check_separate,
    check_whole as check_whole,
)
from ._centred import Centred as Centred
from ._empirical import Empirical as Empirical
from ._exact import Exact as Exact, ExactGGN as ExactGGN
from ._sampled import CurvatureProp as CurvatureProp, MonteCarlo as MonteCarlo
