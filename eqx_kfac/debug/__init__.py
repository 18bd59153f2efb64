"""What a model and its curvature look like, and whether the curvature is right."""

from ._check import LayerCheck as LayerCheck, Verification as Verification
from ._summary import LayerSummary as LayerSummary, Summary as Summary, summary as summary
from ._verify import verify as verify
