from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact, Shaped

from .._custom_types import Layer, Weights
from ._base import AbstractForm, Rows, Sizes
from ._inputs import AbstractInputs
from ._mask import Mask


class Masked(AbstractForm):
    r"""Another form, of a layer whose weight is multiplied by a mask of zeros and ones
    before it is used: $z = (M \odot W) x + b$. Its rows are those of the other form, its
    gradient is $M \odot \sum g x^\top$, and its curvature is the part of $G \otimes A$
    that belongs to the entries where the mask is one.

    The mask is a part of the program: the same for all layers of a stack, and for all
    groups of a convolution.

    !!! Example

        ```python
        tag = kfac.Tag(kfac.form.Masked(kfac.form.Dense(), mask), kfac.Kronecker())
        ```
    """

    form: AbstractForm
    where: Mask = eqx.field(static=True)

    def __init__(self, form: AbstractForm, mask: ArrayLike):
        """**Arguments:**

        - `form`: that of the layer without the mask.
        - `mask`: `[d_out, d_in]`, of booleans, or of zeros and ones: for the entries of
            the form's canonical matrix, without the column of the bias.

        The field `where` holds it as static data.

        **Raises:** `ValueError` for a mask of another kind.
        """
        entries = np.asarray(mask)
        if entries.ndim != 2 or not np.all((entries == 0) | (entries == 1)):
            raise ValueError(
                "`mask` must be a matrix [d_out, d_in] of zeros and ones, but has the "
                f"shape {entries.shape}"
                + (", and other numbers." if entries.ndim == 2 else ".")
            )
        self.form = form
        self.where = Mask(entries.astype(bool))

    @property
    def label(self) -> str:
        """The name, with that of the other form: `Masked(Dense)`."""
        return f"{type(self).__name__}({self.form.label})"

    @property
    def names(self) -> tuple[str, ...]:
        return self.form.names

    @property
    def linear(self) -> bool:  # pyright: ignore
        return self.form.linear

    @property
    def groups(self) -> int:
        return self.form.groups

    @property
    def mask(self) -> Mask:
        return self.where

    def sizes(self, layer: Layer) -> Sizes:
        sizes = self.form.sizes(layer)
        shape = self.where.entries.shape
        if sizes.d_in > 0 and shape != (sizes.d_out, sizes.d_in):
            raise ValueError(
                f"The mask of a layer has the shape {shape}, but its canonical "
                f"matrix (without the bias) is {sizes.d_out} x {sizes.d_in}."
            )
        return sizes

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> AbstractInputs:
        return self.form.inputs(x, stack, axes)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return self.form.outputs(z, stack, axes)

    def rows(self, x: Array, g: Array, weights: Weights, stack: int, axes: int) -> Rows:
        rows = self.form.rows(x, g, weights, stack, axes)
        return rows._replace(mask=self.where)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        return self.form.to_matrix(layer)

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        return self.form.from_matrix(matrix, layer)
