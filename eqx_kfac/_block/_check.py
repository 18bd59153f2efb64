"""Whether what a user passes is a block."""

from .._checks import check_instance
from ._base import AbstractBlock
from ._sharing import AbstractSharing


def check_block(name: str, block: object) -> None:
    """Raises unless `block` is one."""
    if isinstance(block, AbstractSharing):
        shown = f"kfac.{type(block).__name__}()"
        raise TypeError(
            f"`{name}` must be a block, but `{shown}` is only a part of one: did you "
            f"mean `kfac.Kronecker({shown})`?"
        )
    check_instance(name, block, AbstractBlock, "kfac.EKFAC()")
