from ._factor import (
    diagonal as diagonal,
    eigh as eigh,
    Factor as Factor,
    identity as identity,
    inverse as inverse,
    left as left,
    matmul as matmul,
    right as right,
)
from ._kronecker import KroneckerOperator as KroneckerOperator
