from typing import Any

import eqx_kfac as kfac


class AsMatrices(kfac.KFAC):
    """An optimizer that preconditions all gradients as matrices."""

    _by_rows = False


class Packed(kfac.KFAC):
    """An optimizer whose states are packed from the start."""

    def init(self, model):
        return kfac.packed(super().init(model))


class PackedAsMatrices(Packed, AsMatrices):
    pass


def plain_kfac(
    learning_rate: Any,
    momentum: Any = 0.9,
    damping: Any = 1e-3,
    *,
    packed: bool = False,
    by_rows: bool = False,
    max_increase: Any = None,
    **choices: Any,
):
    """K-FAC with numbers alone: curvature at every step, inverses at every fifth, no norm
    constraint, no averaging; gradients preconditioned as matrices."""
    plain = dict(norm_constraint=None, averaging=None)
    periods = dict(curvature_period=1, inverse_period=5)
    if max_increase is not None:
        choices["guard"] = kfac.MaxIncrease(max_increase)
    kinds = (kfac.KFAC, AsMatrices), (Packed, PackedAsMatrices)
    make = kinds[packed][not by_rows]
    return make(learning_rate, momentum, damping, **(plain | periods | choices))
