import abc
from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, PyTree

from .._checks import check_instance
from .._custom_types import IntScalar, Key, Model
from .._loss import AbstractLoss


class AbstractFisher(eqx.Module):
    """Which cotangents are pulled back from the model's outputs to collect curvature.

    A Fisher estimator is a number of cotangents, each a tree like the losses' outputs,
    whose outer products add up to (an estimate of) the curvature of the *sum* of the
    losses: they are never divided by the number of loss terms.

    **Fields:**

    - `batch_size`: how many cotangents are pulled back at once.
    - `examples`: the estimate uses the first so many examples of a batch; `None`: all
        of them.
    - `centred`: whether the mean over the examples is subtracted from what every
        cotangent gives.
    - `drawn`: whether its cotangents are random numbers, so that the estimate has noise.
    """

    batch_size: eqx.AbstractVar[int]
    examples: eqx.AbstractVar[int | None]
    centred: ClassVar[bool] = False
    drawn: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    @property
    def joins_positions(self) -> bool:
        """Whether one cotangent, which is not random, stands for several positions of an
        example, whose gradients are to be squared one by one."""
        return False

    @property
    def separates_examples(self) -> bool:
        """Whether every example has a cotangent of its own, or one that is drawn
        independently of those of others, so that products between gradients of two
        examples are zero in the mean."""
        return False

    @abc.abstractmethod
    def number(self, losses: Sequence[AbstractLoss]) -> int:
        """How many cotangents there are."""

    @abc.abstractmethod
    def cotangents(
        self, losses: Sequence[AbstractLoss], index: IntScalar | int, key: Key | None
    ) -> list[PyTree[Array]]:
        """Cotangent `index`, for the outputs of every loss, without weights."""

    def probe(self, losses: Sequence[AbstractLoss]) -> list[PyTree[Array]] | None:
        """One cotangent in which all outputs take part. Rows of a layer's inputs whose
        own loss terms have no weight count by their gradients, given this cotangent.
        `None`: the first one serves."""
        return None

    def check(self, model: Model) -> None:
        """Raises if this estimate is not one for the layers of `model`."""


def check_fisher(fisher: AbstractFisher | None) -> None:
    """Raises for what is no estimate of the Fisher, such as the class of one."""
    if fisher is not None:
        check_instance("fisher", fisher, AbstractFisher, "kfac.MonteCarlo()")


def check_separate(fisher: AbstractFisher | None, where: str) -> None:
    """Raises if an estimate is none of single examples, or of a part of the batch."""
    check_fisher(fisher)
    if fisher is not None and fisher.centred:
        raise ValueError(
            f"`kfac.{fisher.name}` is not one of single examples, which `{where}` is "
            "about. Use `kfac.Exact()`."
        )
    check_whole(fisher, where)


def check_whole(fisher: AbstractFisher | None, where: str) -> None:
    """Raises if an estimate is one of a part of the batch."""
    check_fisher(fisher)
    if fisher is not None and fisher.examples is not None:
        raise ValueError(
            f"`kfac.{fisher.name}(examples={fisher.examples})` takes a part of a batch, "
            f"but `{where}` is of all of it. Leave `examples` out, and pass the part "
            "that you want."
        )
