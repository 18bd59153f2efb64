from typing import Any

import eqx_kfac as kfac


def plain_kfac(learning_rate: Any, momentum: Any = 0.9, damping: Any = 1e-3, **choices):
    """K-FAC with numbers alone: curvature at every step, inverses at every fifth, no norm
    constraint, no averaging."""
    plain = dict(norm_constraint=None, averaging=None, through_rows=False)
    periods = dict(curvature_period=1, inverse_period=5)
    return kfac.KFAC(learning_rate, momentum, damping, **(plain | periods | choices))
