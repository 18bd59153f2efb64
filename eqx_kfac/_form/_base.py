import abc
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Inexact, Shaped

from ._inputs import AbstractInputs


class Sizes(NamedTuple):
    """Of a layer's canonical matrix, without what is missing or frozen."""

    stack: tuple[int, ...]  # Maps side by side, each with a matrix of its own.
    d_out: int
    d_in: int  # Without the bias column.
    bias: bool
    diagonal: bool = False  # Whether second moments of the inputs are diagonal.


class AbstractForm(eqx.Module):
    r"""How a layer's output depends on its parameters.

    Every form writes its layer as $z = \bar W \bar x$ with the *canonical matrix*
    $\bar W \in \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)}$, whose last column is
    the bias if there is one; or as several such maps side by side. A form has no arrays:
    it is static data on the layer's [`eqx_kfac.Tag`][], compared and hashed by value.
    """

    @property
    def groups(self) -> int:
        """How many of the last stack axes are within one layer: 1 if it consists of
        several maps side by side, else 0."""
        return 0

    @abc.abstractmethod
    def parameters(self, layer: Any) -> tuple[Any, ...]:
        """The layer's leaves that the canonical matrix is made of. A leaf is `None` when
        the layer does not have it, or when it is frozen (partitioned away)."""

    @abc.abstractmethod
    def replace(self, layer: Any, parameters: tuple[Any, ...]) -> Any:
        """The layer with its `parameters` replaced. `None` keeps a leaf that is
        `None`."""

    @abc.abstractmethod
    def sizes(self, layer: Any) -> Sizes:
        """The sizes of the canonical matrix. At least one parameter is there."""

    @abc.abstractmethod
    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> AbstractInputs:
        """The layer's inputs as rows. The first `axes` axes of `x` are not the layer's
        own: `stack` of them separate layers, the others are examples."""

    @abc.abstractmethod
    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        """The layer's outputs (or their gradients) as rows: stacked layers first
        (the form's own groups behind those of `z`), then examples, then positions at
        which the layer applies its matrix, then one axis of features."""

    @abc.abstractmethod
    def to_matrix(self, layer: Any) -> Inexact[Array, "*stack d_out d_in"]:
        """The canonical matrix of a layer (or of its gradient), of what is present."""

    @abc.abstractmethod
    def from_matrix(self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Any) -> Any:
        """Inverse of `to_matrix`: `layer` with its leaves taken from `matrix`."""
