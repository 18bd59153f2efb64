from ._convert import convert as convert, revert as revert
from ._linear import Linear as Linear
