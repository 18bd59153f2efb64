"""What a tag can collect of a layer: anything that is made of its inputs and of the
gradients at its outputs, and adds up."""

import abc
from typing import Any, ClassVar, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._custom_types import Layer, Weights
from .._devices import zeros_of
from .._misc import is_none
from .._module import PlainModule
from ..form import AbstractForm


class Statistics(NamedTuple):
    """What a tag collects, for a block as sums over rows. It is also the type of a tag's
    *slots*; their leaves are `None`, or zeros while curvature is being collected. (It is
    made of tuples only, because a tag is in every tree that Python flattens at every
    step.)

    **Fields:**

    - `inputs`: what depends on the layer's inputs only: the same for every pullback.
    - `outputs`: what depends on the gradients at the outputs: it adds up over
        pullbacks.
    """

    inputs: PyTree
    outputs: PyTree


def is_statistics(node: PyTree) -> bool:
    return isinstance(node, Statistics)


def filled_with_zeros(statistics: Statistics, slots: Statistics) -> Statistics:
    """`statistics`, with zeros in those `slots` for which there is `None`."""
    zeros = lambda new, slot: zeros_of(slot) if new is None else new
    return jtu.tree_map(zeros, statistics, slots, is_leaf=is_none)


class AbstractCollector(PlainModule):
    """What a tag collects, and the slots in which it arrives.

    **Fields:**

    - `derivatives`: whether it supports rows of derivatives, which have no bias
        (`rows.derivative`).
    - `reverse_derivatives`: whether it supports them in reverse mode, too, where $x$
        depends on what is pulled back, and $g$ does not (`rows.reverse`).
    """

    derivatives: ClassVar[bool] = False
    reverse_derivatives: ClassVar[bool] = False

    @abc.abstractmethod
    def empty(self) -> Statistics:
        """Statistics whose leaves are all `None`."""

    @abc.abstractmethod
    def slots(self, form: AbstractForm, layer: Layer) -> Statistics:
        """Zeros of the statistics' shapes for `layer`; `None` where a parameter is
        missing or frozen."""

    def rows(
        self,
        form: AbstractForm,
        x: Any,
        g: Any,
        weights: Weights,
        stack: int,
        axes: int,
    ) -> Any:
        """The argument of `statistics`: the rows as the form sees them."""
        return form.rows(x, g, weights, stack, axes)

    @abc.abstractmethod
    def statistics(self, rows: Any, slots: Statistics) -> Statistics:
        """What is collected of `rows`. `slots` holds the abstract values of the slots
        that are wanted."""
