"""What blocks denote, as lineax operators, and their symmetric matrices in half of the
memory."""

from ._operator import (
    KroneckerOperator as KroneckerOperator,
    MaskedOperator as MaskedOperator,
    Packed as Packed,
    SeriesOperator as SeriesOperator,
    ShardedPacked as ShardedPacked,
    SpectralOperator as SpectralOperator,
    unpacked as unpacked,
)
