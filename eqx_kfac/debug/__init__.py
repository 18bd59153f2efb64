from ._blocks import dense_blocks as dense_blocks
from ._check import LayerCheck as LayerCheck, Verification as Verification
from ._spectra import spectra as spectra
from ._summary import LayerSummary as LayerSummary, Summary as Summary, summary as summary
from ._verify import verify as verify
