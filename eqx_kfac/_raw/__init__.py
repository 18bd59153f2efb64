from ._convert import convert as convert, revert as revert
from ._covered import check_covered as check_covered
