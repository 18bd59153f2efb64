import abc
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._custom_types import Layer, Weights
from .._jax import SharedNode
from .._module import member, PlainModule, replaced
from ._inputs import AbstractInputs
from ._mask import Mask


class Sizes(NamedTuple):
    """The sizes of a layer's canonical matrix, without what is missing or frozen.

    **Fields:**

    - `stack`: the shape of the stack of maps, each with a matrix of its own: stacked
        layers, then groups.
    - `d_out`: the number of rows of each matrix.
    - `d_in`: the number of its columns, without that of the bias.
    - `bias`: whether there is a column for the bias.
    - `diagonal`: whether second moments of the inputs are diagonal.
    """

    stack: tuple[int, ...]
    d_out: int
    d_in: int
    bias: bool
    diagonal: bool = False


def has_bias(form: "AbstractForm", layer: Layer) -> bool:
    """Whether the last column of the canonical matrix of `layer`, which has this `form`,
    is a bias beside weights."""
    sizes = form.sizes(layer)
    return sizes.bias and sizes.d_in > 0


class Rows(NamedTuple):
    r"""All rows that have passed through a layer. The first `stack` axes of each index
    separate layers; the next ones are example axes, outermost (the batch) first; then
    come positions.

    **Fields:**

    - `x`: the inputs, one for every row, without the 1 of the bias.
    - `g`: the gradients at the outputs, `[*rows, d_out]`.
    - `weights`: of examples, with the first axes of the rows; `None`: all are 1.
    - `stack`: how many axes separate layers, or groups of one.
    - `swapped`: whether the rows are from a use of the transposed weight.
    - `derivative`: whether the rows are derivatives of the layer with respect to its
        inputs: without the bias.
    - `reverse`: whether they are derivatives in reverse mode, $\bar x = W^\top \bar z$:
        then `x` has what is pulled back to $\bar x$, and `g` has $\bar z$.
    - `basis`: what `basis` of the block returns; `None` if it has none.
    - `mask`: the mask of the layer's weight, if it has one.
    """

    x: AbstractInputs
    g: Float[Array, "*rows d_out"]
    weights: Float[Array, "..."] | None
    stack: int
    swapped: bool = False
    derivative: bool = False
    reverse: bool = False
    basis: Any = None
    mask: Mask | None = None


class AbstractForm(PlainModule):
    r"""How a layer's output depends on its parameters.

    Every form writes its layer as $z = \bar W \bar x$ with the *canonical matrix*
    $\bar W \in \mathbb{R}^{d_\text{out} \times d_\text{in}(+1)}$, whose last column is
    the bias if there is one; or as several such maps side by side. A form has no arrays:
    it is static data on the layer's [`eqx_kfac.Tag`][], compared and hashed by value.

    **Fields:**

    - `linear`: whether `inputs` is linear in `x`, so that a derivative with respect to
        `x` is a row as well.
    """

    linear: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The name in tables and errors: that of the class."""
        return type(self).__name__

    @property
    def groups(self) -> int:
        """How many of the last stack axes are within one layer: 1 if it consists of
        several maps side by side, else 0."""
        return 0

    @property
    def mask(self) -> Mask | None:
        """Which entries of the weight (in the canonical matrix) are used; `None`: all.
        See [`eqx_kfac.form.Masked`][]."""
        return None

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the layer's leaves that form the canonical matrix, with
        dots if they are deeper (`"layer.weight"`, `"weights.0"`)."""

    def parameters(self, layer: Layer) -> tuple[Any, ...]:
        """The leaves called `names`. A leaf is `None` when the layer does not have it,
        when it is frozen (partitioned away), or belongs to another layer
        (`eqx.nn.Shared`)."""
        leaves = [member(layer, name) for name in self.names]
        return tuple(None if isinstance(p, SharedNode) else p for p in leaves)

    def some_parameter(self, layer: Layer) -> Any:
        """The first parameter that is there; `None` if none is."""
        return next((p for p in self.parameters(layer) if p is not None), None)

    def replace(self, layer: Layer, parameters: tuple[Any, ...]) -> Any:
        """The layer with its `parameters` replaced; those that are `None` stay."""
        for name, p in zip(self.names, parameters):  # Those that are missing are `None`.
            layer = layer if p is None else replaced(layer, name, p)
        return layer

    def only(self, layer: Layer, parameters: tuple[Any, ...]) -> Any:
        """The layer with exactly these parameters, some of which are `None`."""
        for name, p in zip(self.names, parameters, strict=True):
            layer = replaced(layer, name, p)
        return layer

    @abc.abstractmethod
    def sizes(self, layer: Layer) -> Sizes:
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

    def rows(self, x: Array, g: Array, weights: Weights, stack: int, axes: int) -> Rows:
        """Everything that has passed through the layer, given its input `x` and the
        gradient `g` at its output."""
        groups = tuple(range(stack, stack + self.groups))
        if weights is not None:
            weights = jnp.expand_dims(weights, groups)
        inputs, outputs = self.inputs(x, stack, axes), self.outputs(g, stack, axes)
        return Rows(inputs, outputs, weights, stack + self.groups)

    @abc.abstractmethod
    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        """The canonical matrix of a layer (or of its gradient), of what is present."""

    @abc.abstractmethod
    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        """Inverse of `to_matrix`: `layer` with its leaves taken from `matrix`."""
