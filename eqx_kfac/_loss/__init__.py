from ._base import (
    AbstractLoss as AbstractLoss,
    AbstractObjective as AbstractObjective,
    is_negative as is_negative,
    linear_combination as linear_combination,
    Penalty as Penalty,
    Sum as Sum,
    terms_of as terms_of,
)
from ._density import NegativeLogLikelihood as NegativeLogLikelihood
from ._energy import Energy as Energy
from ._huber import HuberLoss as HuberLoss
from ._l2 import L2 as L2
from ._normal import NormalNLL as NormalNLL
from ._ordinal import OrdinalCrossEntropy as OrdinalCrossEntropy
from ._poisson import PoissonNLL as PoissonNLL
from ._quantile import QuantileLoss as QuantileLoss
from ._sigmoid import SigmoidCrossEntropy as SigmoidCrossEntropy
from ._softmax import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from ._squared import SquaredError as SquaredError
from ._student_t import StudentTNLL as StudentTNLL
