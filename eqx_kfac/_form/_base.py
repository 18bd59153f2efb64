import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Inexact, Shaped


class AbstractForm(eqx.Module):
    r"""How a layer's output depends on its parameters.

    Every form writes its layer as $z = \bar W \bar x$ with the *canonical matrix*
    $\bar W \in \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)}$, whose last column is
    the bias if there is one. A form has no arrays: it is static data on the layer's
    [`eqx_kfac.Tag`][], compared and hashed by value.
    """

    @abc.abstractmethod
    def parameters(self, layer: Any) -> tuple[Any, Any]:
        """The layer's `(weight, bias)` leaves. Either is `None` when the layer does not
        have it, or when it is frozen (partitioned away)."""

    @abc.abstractmethod
    def replace(self, layer: Any, weight: Any, bias: Any) -> Any:
        """The layer with its `(weight, bias)` leaves replaced. `None` keeps a leaf
        that is `None`."""

    @abc.abstractmethod
    def sizes(self, layer: Any) -> tuple[tuple[int, ...], int, int]:
        """`(stack, d_in, d_out)`: the axes over which layers are stacked, and the sizes
        of the canonical matrix without its bias column."""

    @abc.abstractmethod
    def inputs(self, x: Shaped[Array, "..."], axes: int) -> Shaped[Array, "*axes d_in"]:
        """The layer's inputs as rows: after the leading `axes` (and any axes of shared
        positions that the form adds) comes one feature axis."""

    @abc.abstractmethod
    def outputs(
        self, z: Inexact[Array, "..."], axes: int
    ) -> Inexact[Array, "*axes d_out"]:
        """The layer's outputs (or their gradients) as rows, likewise."""

    @abc.abstractmethod
    def to_matrix(self, layer: Any) -> Inexact[Array, "*stack d_out d_in"]:
        """The canonical matrix of a layer (or of its gradient), of what is present."""

    @abc.abstractmethod
    def from_matrix(self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Any) -> Any:
        """Inverse of `to_matrix`: `layer` with its leaves taken from `matrix`."""
