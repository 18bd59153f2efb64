from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._custom_types import Key
from .._loss import AbstractLoss
from .._misc import check_count
from ._base import AbstractFisher


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
    batch_size: int = eqx.field(static=True)

    def __init__(self, num_samples: int = 1, *, batch_size: int = 1):
        """**Arguments:**

        - `num_samples`: how many targets to sample for every loss term.
        - `batch_size`: how many samples are pulled back at once: faster where a backward
            pass does not fill the machine, for as many times the memory. The result is
            the same, to rounding.
        """
        check_count("num_samples", num_samples, 1)
        self.num_samples = num_samples
        check_count("batch_size", batch_size, 1)
        self.batch_size = batch_size

    def number(self, losses):
        return self.num_samples

    def cotangents(self, losses, index, key):
        keys = _keys(self, "samples targets from the model", key, index, losses)
        scores = [
            loss.score(jax.lax.stop_gradient(loss.sample(k)))
            for loss, k in zip(losses, keys, strict=True)
        ]
        # The mean over samples.
        return jtu.tree_map(lambda s: s * self.num_samples**-0.5, scores)


class CurvatureProp(AbstractFisher):
    r"""A square root of the output Fisher times random signs: an unbiased estimate of the
    Fisher, one extra backward pass a sample.

    It costs what [`eqx_kfac.MonteCarlo`][] costs, and its error falls in the same way.
    Where every example has one output it has no noise at all: one sample is
    [`eqx_kfac.Exact`][]. Needs a `key`.

    ??? cite "Reference"

        J. Martens, I. Sutskever and K. Swersky, *Estimating the Hessian by
        Back-propagating Curvature*, ICML 2012.
    """

    num_samples: int = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)

    def __init__(self, num_samples: int = 1, *, batch_size: int = 1):
        """**Arguments:**

        - `num_samples`: how many vectors of signs to draw for every loss term.
        - `batch_size`: how many are pulled back at once; see [`eqx_kfac.MonteCarlo`][].
        """
        check_count("num_samples", num_samples, 1)
        self.num_samples = num_samples
        check_count("batch_size", batch_size, 1)
        self.batch_size = batch_size

    def number(self, losses):
        return self.num_samples

    def cotangents(self, losses, index, key):
        keys = _keys(self, "draws random signs", key, index, losses)
        signs = [
            jax.random.rademacher(k, loss.root_shape, loss.term_weights.dtype)
            for loss, k in zip(losses, keys, strict=True)
        ]
        return [
            loss.fisher_root(v * self.num_samples**-0.5)
            for loss, v in zip(losses, signs, strict=True)
        ]


def _keys(
    fisher: AbstractFisher,
    why: str,
    key: Key | None,
    index: Any,
    losses: Sequence[AbstractLoss],
) -> Any:
    """A key for every loss, for cotangent `index`."""
    if key is None:
        raise ValueError(
            f"`kfac.{fisher.name}` {why}, so it needs randomness: pass `key=...`, a "
            "fresh one every step. (Or use `fisher=kfac.Exact()` or "
            "`fisher=kfac.Empirical()`, which need none.)"
        )
    return jax.random.split(jax.random.fold_in(key, index), len(losses))
