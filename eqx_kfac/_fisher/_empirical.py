import equinox as eqx

from .._checks import check_examples
from ._base import AbstractFisher


class Empirical(AbstractFisher):
    r"""Scores at the given targets: the *empirical* Fisher $\frac1N \sum_n \nabla \ell_n
    \nabla \ell_n^\top$. Deterministic, but not a curvature of the loss: it vanishes where
    the data are fitted.

    ??? cite "Reference"

        F. Kunstner, L. Balles, P. Hennig, *Limitations of the Empirical Fisher
        Approximation for Natural Gradient Descent*, NeurIPS 2019.
    """

    batch_size = 1
    examples: int | None = eqx.field(static=True, default=None)

    def __init__(self, *, examples: int | None = None):
        """**Arguments:**

        - `examples`: use only the first so many examples of a batch. `None`: all.
        """
        self.examples = check_examples(examples)

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
