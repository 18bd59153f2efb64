from ._base import (
    AbstractLoss as AbstractLoss,
    AbstractObjective as AbstractObjective,
    linear_combination as linear_combination,
    Penalty as Penalty,
    Sum as Sum,
    terms_of as terms_of,
)
from ._energy import Energy as Energy
from ._l2 import L2 as L2
from ._normal import NormalNLL as NormalNLL
from ._poisson import PoissonNLL as PoissonNLL
from ._sigmoid import SigmoidCrossEntropy as SigmoidCrossEntropy
from ._softmax import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from ._squared import SquaredError as SquaredError
