from typing import Any

import equinox as eqx
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from .._module import replaced
from ._base import AbstractForm, Sizes
from ._inputs import AbstractInputs


class Within(AbstractForm):
    """The weight of a layer that another layer wraps; not its bias, which the wrapper may
    treat in another way.

    **Fields:**

    - `form`: that of the layer within.
    - `name`: the field of the wrapper that holds it.
    """

    form: AbstractForm
    name: str = eqx.field(static=True)

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    @property
    def linear(self) -> bool:  # pyright: ignore
        return self.form.linear

    @property
    def groups(self) -> int:
        return self.form.groups

    def sizes(self, layer: Layer) -> Sizes:
        return self.form.sizes(self._inner(layer))

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> AbstractInputs:
        return self.form.inputs(x, stack, axes)

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        return self.form.outputs(z, stack, axes)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        return self.form.to_matrix(self._inner(layer))

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        inner = self.form.from_matrix(matrix, self._inner(layer))
        return self.replace(layer, (inner.weight,))

    def _inner(self, layer: Layer) -> Any:
        return replaced(getattr(layer, self.name), "bias", None)
