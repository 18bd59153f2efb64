"""Eigenvalues of the layers' curvature, where they can be had."""

from typing import Any, NamedTuple

import equinox as eqx
import lineax as lx
import numpy as np

from .._custom_types import Model
from .._devices import over_stack
from .._operator import eigenvalues, KroneckerOperator, SpectralOperator, trace, unpacked
from .._tag import flatten_tags
from ..analysis import BlockDiagonalOperator


WIDEST = (
    2048  # To decompose a matrix takes seconds, and eight times that of twice the size.
)


class Spectrum(NamedTuple):
    """The spectrum of a layer, or of a stack of them, `L2` terms included."""

    path: str
    trace: np.ndarray  # [*stack]
    # [*stack, d_out, d_in]; matrices that are too wide are not decomposed.
    values: np.ndarray | None


def spectra(model: Model, curvature: Model) -> list[Spectrum]:
    """The spectra of all layers.

    **Arguments:**

    - `model`, `curvature`: as for [`eqx_kfac.analysis.BlockDiagonalOperator`][].
    """
    BlockDiagonalOperator(curvature, model)  # Raises, if the curvature is not complete.

    def of_one(tag, factors):
        operator = tag.operator(factors)
        total = trace(operator) + factors.l2 * operator.in_size()
        if is_too_wide(operator):
            return total, None
        return total, eigenvalues(operator) + factors.l2

    def of_layer(tag, layer, factors):
        return over_stack(lambda f: of_one(tag, f), factors.l2.ndim)(factors)

    @eqx.filter_jit
    def of_all(model, curvature):
        found, _ = flatten_tags(of_layer, model, unpacked(curvature))
        return [own for _, own in found]

    paths = [path for path, _ in flatten_tags(lambda *_: None, model)[0]]
    found = zip(paths, of_all(model, curvature), strict=True)
    return [
        Spectrum(path, np.asarray(total), None if own is None else np.asarray(own, float))
        for path, (total, own) in found
    ]


def is_too_wide(operator: Any) -> bool:
    """Whether its eigenvalues take the decomposition of a matrix that is."""
    if isinstance(operator, (SpectralOperator, lx.DiagonalLinearOperator)):
        return False
    widths = [operator.in_size()]
    if isinstance(operator, KroneckerOperator):
        factors = operator.output_factor, operator.input_factor
        widths = [len(factor) for factor in factors if factor.ndim == 2]
    return max(widths, default=0) > WIDEST
