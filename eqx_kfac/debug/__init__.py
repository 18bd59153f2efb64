from ._blocks import dense_blocks as dense_blocks
from ._summary import LayerSummary as LayerSummary, Summary as Summary, summary as summary
from ._verify import (
    LayerCheck as LayerCheck,
    Verification as Verification,
    verify as verify,
)
