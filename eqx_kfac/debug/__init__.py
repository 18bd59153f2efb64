from ._summary import LayerSummary as LayerSummary, Summary as Summary, summary as summary
from ._verify import (
    LayerCheck as LayerCheck,
    Verification as Verification,
    verify as verify,
)
