from typing import Any

import equinox as eqx

import eqx_kfac as kfac


class _Packed(kfac.KFAC):
    """Its states are packed from the start."""

    def init(self, model):
        return kfac.packed(super().init(model))


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
    make = _Packed if packed else kfac.KFAC
    made = make(learning_rate, momentum, damping, **(plain | periods | choices))
    return with_rows(made, by_rows)


def with_rows(optimizer: kfac.KFAC, by_rows: bool) -> kfac.KFAC:
    """The optimizer, made to precondition gradients through their rows or not."""
    leaves, treedef = eqx.tree_flatten_one_level(optimizer)
    copy = treedef.unflatten(leaves)
    object.__setattr__(copy, "_by_rows", by_rows)
    return copy
