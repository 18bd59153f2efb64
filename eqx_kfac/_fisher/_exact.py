import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from .._checks import check_count, check_examples
from .._custom_types import Model
from .._loss import AbstractLoss
from .._misc import draw, names
from .._tag import tagged_layers
from ._base import AbstractFisher


class _Columns(AbstractFisher):
    """Every column of a square root of a matrix at the outputs."""

    example_axes: int = eqx.field(static=True, default=1)
    batch_size: int = eqx.field(static=True, default=1)
    examples: int | None = eqx.field(static=True, default=None)

    def __init__(
        self, example_axes: int = 1, *, batch_size: int = 1, examples: int | None = None
    ):
        """**Arguments:**

        - `example_axes`: over how many leading axes of the outputs the model acts
            independently, so that one backward pass serves all their entries. The default
            is the batch. A model that treats every token by itself allows 2; one that
            mixes its examples (attention over the first axis, say) needs 0.
        - `batch_size`: how many columns are pulled back at once: faster where a backward
            pass does not fill the machine, for as many times the memory. The result is
            the same, to rounding.
        - `examples`: only from the first so many examples of a batch. `None`: from all.
        """
        self.example_axes = check_count("example_axes", example_axes, 0)
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.examples = check_examples(examples)

    @abc.abstractmethod
    def root(
        self, loss: AbstractLoss, v: Float[Array, "*leading r"]
    ) -> PyTree[Inexact[Array, "*leading k"]]:
        """The square root times `v`."""

    def check(self, model: Model) -> None:
        mixing = [p for p, t, _ in tagged_layers(model) if t.block.mixes_positions]
        if self.example_axes > 1 and mixing:
            raise ValueError(
                f"`{self.name}(example_axes={self.example_axes})` serves all tokens of "
                f"an example with one backward pass, but the layers {names(mixing)} add "
                "up the gradients of tokens (`kfac.Reduce`). Use "
                f"`kfac.{self.name}()`."
            )

    @property
    def joins_positions(self) -> bool:
        return self.example_axes > 1

    @property
    def separates_examples(self) -> bool:
        return self.example_axes == 0

    def _columns(self, loss: AbstractLoss) -> int:
        return math.prod(loss.root_shape[self.example_axes :])

    def number(self, losses):
        for loss in losses:
            if self.example_axes > len(loss.leading):
                raise ValueError(
                    f"`{self.name}(example_axes={self.example_axes})`, but the outputs "
                    f"of {type(loss).__name__} have {len(loss.leading)} leading axes."
                )
        return sum(map(self._columns, losses))

    def cotangents(self, losses, index, key):
        cotangents, offset = [], 0
        for loss in losses:
            columns, shape = self._columns(loss), loss.root_shape
            # Out of this loss's range, the unit vector is zero.
            unit: Float[Array, " columns"] = jax.nn.one_hot(index - offset, columns)
            v = jnp.broadcast_to(unit.reshape(shape[self.example_axes :]), shape)
            cotangents.append(self.root(loss, v))
            offset += columns
        return cotangents

    def probe(self, losses):
        # The same signs for every example, whatever batch it is in.
        def signs(loss):
            shape, dtype = loss.root_shape, loss.term_weights.dtype
            own = shape[self.example_axes :]
            v = draw(jax.random.rademacher, jax.random.key(0), own, dtype)
            return jnp.broadcast_to(v, shape)

        return [self.root(loss, signs(loss)) for loss in losses]


class Exact(_Columns):
    r"""The Fisher itself, from every column of a square root of the output Fisher: no
    noise, no key, and as many backward passes as one example has outputs. (If these
    are natural parameters of the predictive distribution, as logits are, the Fisher is
    also the Gauss-Newton matrix.)
    """

    def root(self, loss, v):
        return loss.fisher_root(v)


class ExactGGN(_Columns):
    r"""The Gauss-Newton matrix $\frac1N \sum_n J_n^\top \nabla^2 \ell_n J_n$, from every
    column of a square root of the Hessian $\nabla^2 \ell_n$ at the outputs.

    The same as [`eqx_kfac.Exact`][] for losses of natural parameters (softmax, sigmoid,
    squared error, Poisson); different for a loss that is convex in other
    outputs and has a `hessian_root`, as [`eqx_kfac.HuberLoss`][] and
    [`eqx_kfac.OrdinalCrossEntropy`][] are. An indefinite Hessian has no root: for
    [`eqx_kfac.NormalNLL`][] and [`eqx_kfac.StudentTNLL`][] this raises.

    ??? cite "Reference"

        J. Martens, *New Insights and Perspectives on the Natural Gradient Method*,
        JMLR 2020, sections 8 and 9.
    """

    def root(self, loss, v):
        return loss.hessian_root(v)
