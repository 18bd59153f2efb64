from ._average import (
    average as average,
    each_known as each_known,
    factors as factors,
    for_layers as for_layers,
    has_bases as has_bases,
    in_new_bases as in_new_bases,
    include as include,
    init_curvature as init_curvature,
    is_finite as is_finite,
    known_layers as known_layers,
    try_in_new_bases as try_in_new_bases,
    unseen as unseen,
)
from ._batch import (
    Batch as Batch,
    LinearisedBatch as LinearisedBatch,
    ValueAndGrads as ValueAndGrads,
)
from ._estimate import (
    curvature as curvature,
    value_grad_and_curvature as value_grad_and_curvature,
)
from ._forward import check_pushes_forward as check_pushes_forward
from ._gradient_rows import GradientRows as GradientRows
from ._linearise import (
    BatchPart as BatchPart,
    evaluate as evaluate,
    filter_linearize as filter_linearize,
    Kind as Kind,
    Linearisation as Linearisation,
    linearise as linearise,
    whole as whole,
)
from ._sites import (
    collected_rows as collected_rows,
    TagSite as TagSite,
    used_sites as used_sites,
    UsedSite as UsedSite,
)
