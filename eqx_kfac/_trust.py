"""How far a step may go, given the loss; and over which steps parameters are averaged."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._checks import check_count, check_number


class TrustRegion(eqx.Module):
    r"""A norm constraint that becomes tighter as the loss falls, and where there are few
    examples:

    $$\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c \,
    \min(1, |h|)^p \, \min(1, N / m)$$

    with $h$ the loss of the batch (in nats) and $N$ the number of its terms. The
    left-hand side is about twice the Kullback-Leibler divergence between the model before
    the step and after. A network that fits its data has a vanishing Fisher and a small
    loss: steps that were short at first are long compared with what is left to be gained.
    And the gradient of few examples is mostly noise, of which the left-hand side grows as
    $1 / N$. Pass it to [`eqx_kfac.KFAC`][] as `norm_constraint`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(norm_constraint=kfac.TrustRegion(1e-3))
        ```

    ??? cite "Reference"

        With $p = 0$ and $m = 1$ this is the constraint of J. Ba, R. Grosse, J. Martens,
        *Distributed Second-Order Optimization using Kronecker-Factored Approximations*,
        ICLR 2017, section 5. How it depends on the loss and on the number of terms was
        found by experiment: see "How to choose".
    """

    size: Any
    power: Any
    terms: int = eqx.field(static=True)

    def __init__(self, size: Any = 3e-3, power: Any = 0.75, terms: int = 128):
        """**Arguments:**

        - `size`: $c > 0$, in nats.
        - `power`: $p \\ge 0$. 0 leaves the loss out.
        - `terms`: $m$: from how many terms of the loss on their number does not matter.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.size = check_number("size", size, "positive", schedule=False)
        self.power = check_number("power", power, "at least 0", schedule=False)
        self.terms = check_count("terms", terms, 1)

    @property
    def initial(self) -> Any:
        """What the state holds at first: $c$."""
        return self.size

    def __call__(
        self, size: Float[Array, ""], value: Float[Array, ""], terms: int | None
    ) -> Float[Array, ""]:
        """The norm constraint of a step, given $c$, the loss, and the number of its terms
        if that is known."""
        small = jnp.minimum(1, jnp.abs(value)).astype(size.dtype) ** self.power
        few = 1.0 if terms is None else min(1.0, terms / self.terms)
        return few * size * small


class Window(eqx.Module):
    r"""Averaging over a window that grows with the steps:
    $\xi_t = s t / (1 + s t)$, with which about the last $1 + s t$ of $t$ iterates count.
    Whenever one stops, the averaged model is about as good as after a learning rate that
    has fallen to zero. Pass it to [`eqx_kfac.KFAC`][] as `averaging`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(averaging=kfac.Window(0.2))
        ```
    """

    share: Any

    def __init__(self, share: Any = 0.1):
        """**Arguments:**

        - `share`: $s > 0$: how long the window is, as a part of all steps so far.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.share = check_number("share", share, "positive", schedule=False)

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        length = self.share * step.astype(float)
        return length / (1 + length)
