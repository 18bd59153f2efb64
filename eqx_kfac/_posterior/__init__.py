from ._influence import Influence as Influence, influence as influence
from ._laplace import Laplace as Laplace
from ._spectra import (
    Lanczos as Lanczos,
    lanczos as lanczos,
    spectral_density as spectral_density,
    SpectralDensity as SpectralDensity,
)
