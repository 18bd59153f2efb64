import abc
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from ._custom_types import Key, Model
from ._loss import AbstractLoss
from ._misc import names
from ._tag import tagged_layers


class AbstractFisher(eqx.Module):
    """Which cotangents are pulled back from the model's outputs to collect curvature.

    A Fisher estimator is a number of cotangents, each a tree like the losses' outputs,
    whose outer products add up to (an estimate of) the curvature of the *sum* of the
    losses: they are never divided by the number of loss terms.
    """

    @abc.abstractmethod
    def number(self, losses: Sequence[AbstractLoss]) -> int:
        """How many cotangents there are."""

    @abc.abstractmethod
    def cotangents(
        self, losses: Sequence[AbstractLoss], index: Any, key: Key | None
    ) -> list[PyTree[Array]]:
        """Cotangent `index`, for the outputs of every loss, without weights."""

    def check(self, model: Model) -> None:
        """Raises if this estimate is not one for the layers of `model`."""


class MonteCarlo(AbstractFisher):
    r"""Scores at targets sampled from the model: an unbiased estimate of the Fisher, one
    extra backward pass a sample. The default.

    The error falls as $n^{-1/2}$ in the number of samples; averaging over steps does the
    same, so one sample is usually the best use of time. Needs a `key`.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 5.
    """

    num_samples: int = eqx.field(static=True)

    def __init__(self, num_samples: int = 1):
        """**Arguments:**

        - `num_samples`: how many targets to sample for every loss term.
        """
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, but is {num_samples}.")
        self.num_samples = num_samples

    def number(self, losses):
        return self.num_samples

    def cotangents(self, losses, index, key):
        if key is None:
            raise ValueError(
                "`kfac.MonteCarlo` samples targets from the model, so it needs "
                "randomness: pass `key=...`, a fresh one every step. (Or use "
                "`fisher=kfac.Exact()` or `fisher=kfac.Empirical()`, which need none.)"
            )
        key = jax.random.fold_in(key, index)
        keys = jax.random.split(key, len(losses))
        scores = [
            loss.score(jax.lax.stop_gradient(loss.sample(k)))
            for loss, k in zip(losses, keys, strict=True)
        ]
        # The mean over samples.
        return jtu.tree_map(lambda s: s * self.num_samples**-0.5, scores)


class Empirical(AbstractFisher):
    r"""Scores at the given targets: the *empirical* Fisher $\frac1N \sum_n \nabla \ell_n
    \nabla \ell_n^\top$. Deterministic, but not a curvature of the loss: it vanishes where
    the data are fitted.

    ??? cite "Reference"

        F. Kunstner, L. Balles, P. Hennig, *Limitations of the Empirical Fisher
        Approximation for Natural Gradient Descent*, NeurIPS 2019.
    """

    def number(self, losses):
        return 1

    def cotangents(self, losses, index, key):
        for loss in losses:
            if loss.targets is None:
                raise ValueError(
                    "`kfac.Empirical` takes gradients at the given targets, but "
                    f"{type(loss).__name__} has none. Pass targets to the loss."
                )
        return [loss.score(loss.targets) for loss in losses]


class Exact(AbstractFisher):
    r"""Every column of a square root of the output Fisher (for softmax, sigmoid and
    squared error also of the Gauss-Newton curvature): no noise, no key, and as many
    backward passes as one example has outputs.
    """

    example_axes: int = eqx.field(static=True)

    def __init__(self, example_axes: int = 1):
        """**Arguments:**

        - `example_axes`: over how many leading axes of the outputs the model acts
            independently, so that one backward pass serves all their entries. The default
            is the batch. A model that treats every token by itself allows 2; one that
            mixes its examples (attention over the first axis, say) needs 0.
        """
        if example_axes < 0:
            raise ValueError(f"`example_axes` must not be negative: {example_axes}.")
        self.example_axes = example_axes

    def check(self, model: Model) -> None:
        mixing = [p for p, t, _ in tagged_layers(model) if t.block.mixes_positions]
        if self.example_axes > 1 and mixing:
            raise ValueError(
                f"`Exact(example_axes={self.example_axes})` serves all tokens of an "
                f"example with one backward pass, but the layers {names(mixing)} add up "
                "the gradients of tokens (`kfac.Reduce`). Use `kfac.Exact()`."
            )

    def _columns(self, loss: AbstractLoss) -> int:
        return math.prod(loss.root_shape[self.example_axes :])

    def number(self, losses):
        for loss in losses:
            if self.example_axes > len(loss.leading):
                raise ValueError(
                    f"`Exact(example_axes={self.example_axes})`, but the outputs of "
                    f"{type(loss).__name__} have {len(loss.leading)} leading axes."
                )
        return sum(map(self._columns, losses))

    def cotangents(self, losses, index, key):
        cotangents, offset = [], 0
        for loss in losses:
            columns, shape = self._columns(loss), loss.root_shape
            # Out of this loss's range, the unit vector is zero.
            unit: Float[Array, " columns"] = jax.nn.one_hot(index - offset, columns)
            v = jnp.broadcast_to(unit.reshape(shape[self.example_axes :]), shape)
            cotangents.append(loss.fisher_root(v))
            offset += columns
        return cotangents
