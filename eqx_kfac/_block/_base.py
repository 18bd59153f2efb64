"""What is kept of a layer's curvature, and which operator it is."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, PyTree

from .._custom_types import Layer
from .._devices import zeros_beside
from .._misc import accumulator
from ..form import AbstractForm, Sizes
from ._collector import AbstractCollector, Statistics


# The factors that a block makes, of a type of its own.
OwnFactors: TypeAlias = Any
# Those arrays of a block's factors in whose basis its statistics are taken.
Basis: TypeAlias = PyTree


def sizes_and_zeros(form: AbstractForm, layer: Layer) -> tuple[Sizes, Callable] | None:
    """The sizes of a layer, and how to make slots for it (one for every layer of a
    stack): `zeros(*shape)`. `None` if there is nothing to train."""
    leaf = form.some_parameter(layer)
    if leaf is None:
        return None
    sizes = form.sizes(layer)
    dtype, sharded = accumulator(leaf.dtype), len(sizes.stack) - form.groups

    def zeros(*shape):
        return zeros_beside(leaf, sizes.stack + shape, dtype, sharded)

    return sizes, zeros


def no_l2(form: AbstractForm, layer: Layer) -> Float[Array, "*stack"] | None:
    """The curvature of no L2 term. `None` if there is nothing to train."""
    leaf = form.some_parameter(layer)
    if leaf is None:
        return None
    stack = form.sizes(layer).stack
    return zeros_beside(leaf, stack, float, len(stack) - form.groups)


class AbstractFactors(eqx.Module):
    """The curvature of one layer, as its block keeps it. `symmetric` names the fields
    that hold symmetric matrices, or their diagonals. Of such matrices, an optimizer with
    `kfac.packed` keeps one triangle.

    **Fields:**

    - `l2`: `[*stack]`: what an [`eqx_kfac.L2`][] term adds to the diagonal, one number
        for each stacked layer.
    """

    l2: eqx.AbstractVar[Float[Array, "*stack"]]
    symmetric: ClassVar[tuple[str, ...]] = ()

    def bounds(self) -> PyTree[Array]:
        """Numbers (for one layer: no stack axes) that are finite only if all are."""
        return self

    def is_zero(self) -> Bool[Array, ""]:
        """Whether the curvature (of one layer: no stack axes), except for `l2`, is known
        to be zero. Symmetric matrices may be [`eqx_kfac.operators.Packed`][]."""
        return jnp.zeros((), bool)


class AbstractBlock(AbstractCollector):
    """How a layer's curvature is approximated: what is kept, and which operator it is.

    A block has no arrays: it is static data on the layer's [`eqx_kfac.Tag`][], compared
    and hashed by value.

    **Fields:**

    - `weighted`: whether the weights of the loss terms are weights of the layer's
        inputs. (Rows without a weight of their own then count by their gradients.)
    - `mixes_positions`: whether there are products between different positions (tokens)
        of an example.
    - `two_sided`: whether the operator is a Kronecker product on canonical matrices, or
        is diagonal in a basis that is one.
    - `subtracts_means`: whether the mean of the examples' gradients may be subtracted
        from it, with the options that it has: then, it is an `AbstractCentredBlock`.
    - `derivatives`: whether it supports rows of derivatives, which have no bias
        (`rows.derivative`).
    - `reverse_derivatives`: whether it supports them in reverse mode, too
        (`rows.reverse`).
    """

    weighted: eqx.AbstractVar[bool]
    mixes_positions: eqx.AbstractVar[bool]
    two_sided: ClassVar[bool] = False
    subtracts_means: ClassVar[bool] = False

    def reverse_slots(self, slots: Statistics) -> Statistics:
        """The slots, with places for what is collected of derivatives in reverse mode
        besides. By default, there is nothing besides."""
        return slots

    @abc.abstractmethod
    def factors(self, statistics: Statistics, count: Array, l2: Array) -> AbstractFactors:
        r"""The curvature of the mean loss over `count` $= N$ terms, plus `l2`
        $\cdot I$."""

    @abc.abstractmethod
    def operator(self, factors: OwnFactors) -> lx.AbstractLinearOperator:
        """The lineax operator that the factors of one layer (no stack axes) denote,
        without its `l2`."""


#
# What some blocks can do besides
#


class AbstractPerExampleBlock(AbstractBlock):
    """A block that consists of squares of single examples' gradients. If an example uses
    the layer more than once, or along several `batch_axes`, its slots hold the gradients
    themselves, which add up before they are squared."""

    @abc.abstractmethod
    def per_example_slots(
        self, form: AbstractForm, layer: Layer, examples: int
    ) -> Statistics:
        """Slots for the gradients of so many examples, which add up over the uses of the
        layer before `from_per_example` squares them."""

    @abc.abstractmethod
    def from_per_example(self, statistics: Statistics) -> Statistics:
        """The statistics, given what arrived in either kind of slots."""


class AbstractCentredBlock(AbstractBlock):
    """A block from which the mean of the examples' gradients may be subtracted, for
    [`eqx_kfac.Centred`][]."""

    subtracts_means: ClassVar[bool] = True

    @abc.abstractmethod
    def minus_mean(
        self,
        statistics: Statistics,
        mean: Float[Array, "*stack d_out d_in"],
        count: Float[Array, ""],
    ) -> Statistics:
        r"""The statistics of `count` examples less those of so many that all have the
        gradient `mean`."""


class AbstractJointBlock(AbstractBlock):
    """A block that adds up the gradients of an example's positions, and of its uses of
    the layer, before it squares them, where it is known which rows these are."""

    @abc.abstractmethod
    def takes_jointly(self, sizes: Sizes) -> bool:
        """Whether it does so for a layer of these sizes."""

    @abc.abstractmethod
    def joint_slots(
        self, form: AbstractForm, layer: Layer, examples: int | None = None
    ) -> Statistics:
        """Slots in the place of `slots` for what it then collects: for the gradients of
        so many `examples`, if these add up over several uses of the layer."""

    @abc.abstractmethod
    def from_per_example(self, statistics: Statistics) -> Statistics:
        """The statistics, given what arrived in any kind of slots."""


class AbstractBasisBlock(AbstractBlock):
    """A block whose statistics are taken in a basis that its factors have."""

    @abc.abstractmethod
    def empty_basis(self) -> Basis:
        """A basis whose leaves are all `None`."""

    @abc.abstractmethod
    def basis(self, factors: OwnFactors) -> Basis:
        """The arrays of the factors that `statistics` wants as `rows.basis`."""

    @abc.abstractmethod
    def in_basis(self, factors: OwnFactors, basis: Basis) -> OwnFactors:
        """The factors of statistics that were taken in `basis`."""

    @abc.abstractmethod
    def change_basis(self, factors: OwnFactors, basis: Basis) -> OwnFactors:
        """The factors of one layer, as well as they can be expressed in another basis."""

    @abc.abstractmethod
    def rebased(self, factors: OwnFactors, eigenbasis: Callable) -> OwnFactors:
        """The factors of one layer in a new basis. `eigenbasis(factor, vectors)` gives
        eigenvalues and eigenvectors, close to `vectors` if it can make use of them."""
