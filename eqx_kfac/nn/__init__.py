from ._convert import cast as cast, convert as convert, revert as revert
from ._linear import Linear as Linear
