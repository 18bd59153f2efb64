from ._convert import convert as convert, revert as revert
