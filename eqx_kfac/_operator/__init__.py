from ._decompositions import eigh_dense as eigh_dense, qr as qr
from ._factor import (
    diagonal as diagonal,
    eigh as eigh,
    Factor as Factor,
    identity as identity,
    inverse as inverse,
    power as power,
    right as right,
    trace_of_factor as trace_of_factor,
)
from ._kronecker import KroneckerOperator as KroneckerOperator
from ._masked import MaskedOperator as MaskedOperator
from ._packed import (
    has_sharded as has_sharded,
    is_packed as is_packed,
    pack as pack,
    Packed as Packed,
    packed_like as packed_like,
    ShardedPacked as ShardedPacked,
    still_sharded as still_sharded,
    unpacked as unpacked,
    vanishes as vanishes,
)
from ._products import applied as applied, matmul as matmul
from ._series import chain_gain as chain_gain, SeriesOperator as SeriesOperator
from ._spectral import (
    eigenvalues as eigenvalues,
    KroneckerBasis as KroneckerBasis,
    spectral as spectral,
    SpectralOperator as SpectralOperator,
    squared_norm as squared_norm,
    trace as trace,
)
from ._symmetric import (
    AbstractSymmetricOperator as AbstractSymmetricOperator,
    DampedOperator as DampedOperator,
    flatten as flatten,
    LinearisedOperator as LinearisedOperator,
    Structure as Structure,
    unflatten as unflatten,
    widest as widest,
)
