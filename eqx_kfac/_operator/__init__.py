from ._kronecker import KroneckerOperator as KroneckerOperator
