"""How a layer is linear in its parameters: what a tag is told about it."""

from ._base import (
    AbstractForm as AbstractForm,
    has_bias as has_bias,
    Rows as Rows,
    Sizes as Sizes,
)
from ._convolution import Convolution as Convolution
from ._dense import Dense as Dense, join as join
from ._einsum import Einsum as Einsum
from ._gates import Gates as Gates, Part as Part
from ._inputs import (
    AbstractInputs as AbstractInputs,
    Nothing as Nothing,
    OneHot as OneHot,
    Patches as Patches,
    Vectors as Vectors,
    Window as Window,
)
from ._lookup import Lookup as Lookup
from ._mask import Mask as Mask
from ._masked import Masked as Masked
from ._parameters import Parameters as Parameters
from ._view import Leaf as Leaf, size_of as size_of, View as View
from ._within import Within as Within


__all__ = [  # For layers of one's own. (The other names are for this library's.)
    "AbstractForm",
    "Convolution",
    "Dense",
    "Einsum",
    "Gates",
    "Lookup",
    "Masked",
    "Parameters",
    "Rows",
    "Sizes",
    "Vectors",
    "View",
]
