from ._summary import LayerSummary as LayerSummary, summary as summary, Summary as Summary
from ._verify import (
    LayerCheck as LayerCheck,
    Verification as Verification,
    verify as verify,
)
