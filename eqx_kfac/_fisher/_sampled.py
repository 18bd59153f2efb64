import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._checks import check_count, check_examples, check_key
from .._custom_types import Key
from .._loss import AbstractLoss
from .._misc import draw
from ._base import AbstractFisher


class _Samples(AbstractFisher):
    """Random cotangents."""

    num_samples: int = eqx.field(static=True, default=1)
    batch_size: int = eqx.field(static=True, default=1)
    examples: int | None = eqx.field(static=True, default=None)
    drawn = True
    _drawing: ClassVar[str]  # What it does, for a message.

    def __init__(
        self, num_samples: int = 1, *, batch_size: int = 1, examples: int | None = None
    ):
        """**Arguments:**

        - `num_samples`: how many targets, or vectors of signs, to draw for every loss
            term.
        - `batch_size`: how many samples are pulled back at once: faster where a backward
            pass does not fill the machine, for as many times the memory. The result is
            the same, to rounding.
        - `examples`: only from the first so many examples of a batch. `None`: from all.
        """
        self.num_samples = check_count("num_samples", num_samples, 1)
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.examples = check_examples(examples)

    @abc.abstractmethod
    def sample(self, loss: AbstractLoss, key: Key) -> PyTree[Array]:
        """A random cotangent of one loss."""

    @property
    def separates_examples(self) -> bool:
        return True

    def number(self, losses):
        return self.num_samples

    def cotangents(self, losses, index, key):
        if key is None:
            raise ValueError(
                f"`kfac.{self.name}` {self._drawing}, so it needs randomness: pass "
                "`key=...`, a fresh one every step. (Or use `fisher=kfac.Exact()` or "
                "`fisher=kfac.Empirical()`, which need none.)"
            )
        check_key(key)
        number = len(losses)
        own = jax.vmap(lambda i: jax.random.fold_in(key, i))
        keys = own(index * number + jnp.arange(number))
        samples = [self.sample(loss, k) for loss, k in zip(losses, keys, strict=True)]
        # The mean over samples.
        return jtu.tree_map(lambda s: s * self.num_samples**-0.5, samples)


class MonteCarlo(_Samples):
    r"""Scores at targets sampled from the model: an unbiased estimate of the Fisher, with
    one extra backward pass per sample. The default.

    The error falls as $n^{-1/2}$ in the number of samples; averaging over steps does the
    same, so one sample is usually the best use of time. It needs a `key`.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 5.
    """

    _drawing = "samples targets from the model"

    def sample(self, loss, key):
        return loss.score(jax.lax.stop_gradient(loss.sample(key)))


class CurvatureProp(_Samples):
    r"""A square root of the output Fisher times random signs: an unbiased estimate of the
    Fisher, with one extra backward pass per sample.

    It costs what [`eqx_kfac.MonteCarlo`][] costs, and its error falls in the same way.
    If every example has one output, it has no noise at all: one sample is
    [`eqx_kfac.Exact`][]. It needs a `key`.

    ??? cite "Reference"

        J. Martens, I. Sutskever and K. Swersky, *Estimating the Hessian by
        Back-propagating Curvature*, ICML 2012.
    """

    _drawing = "draws random signs"

    def sample(self, loss, key):
        shape, dtype = loss.root_shape, loss.term_weights.dtype
        return loss.fisher_root(draw(jax.random.rademacher, key, shape, dtype))
