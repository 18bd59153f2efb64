"""Pictures. They are drawn with matplotlib, which is imported with the first of them."""

from ._blocks import blocks as blocks
from ._factors import factors as factors
from ._history import history as history
from ._spectra import spectra as spectra


__all__ = ["blocks", "factors", "history", "spectra"]
