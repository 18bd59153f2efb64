from ._accumulate import Accumulator as Accumulator, Total as Total
from ._average import (
    average as average,
    for_layers as for_layers,
    has_bases as has_bases,
    include as include,
    init_curvature as init_curvature,
    is_finite as is_finite,
    missing as missing,
    try_in_new_bases as try_in_new_bases,
    unseen as unseen,
)
from ._batch import Batch as Batch, LinearisedBatch as LinearisedBatch
from ._block_diagonal import BlockDiagonalOperator as BlockDiagonalOperator
from ._capture import capture as capture, Captured as Captured, captured as captured
from ._estimate import (
    curvature as curvature,
    value_grad_and_curvature as value_grad_and_curvature,
)
from ._forward import check_pushes_forward as check_pushes_forward
from ._gradient_rows import GradientRows as GradientRows
from ._linearise import linearise as linearise
from ._model_operator import (
    EmpiricalFisher as EmpiricalFisher,
    Fisher as Fisher,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
)
from ._sites import (
    collected_rows as collected_rows,
    used_sites as used_sites,
    UsedSite as UsedSite,
)
from ._work import Work as Work, work as work
