"""How far a step may go, given the loss; and over which steps parameters are averaged."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._checks import check_count, check_number, POSITIVE, Range
from .._custom_types import Scalar
from ._hyperparameters import AbstractRule


class AbstractTrustRegion(AbstractRule):
    """A rule for how far a step may go. See "Writing your own"."""

    @property
    @abc.abstractmethod
    def initial(self) -> Scalar:
        """The value of `norm_constraint` in the state; `eqx.tree_at` may change it."""

    @abc.abstractmethod
    def __call__(
        self, squared_radius: Float[Array, ""], value: Float[Array, ""], terms: int | None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        r"""Upper bounds on $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle$ and
        $\langle \delta, \hat F \delta \rangle$, given the value in the state, the loss,
        and the number of its terms if that is known."""

    def of_surrogate(
        self, squared_radius: Float[Array, ""], value: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        r"""Upper bounds on $\langle \delta, F \delta \rangle$ for a whole step of a
        surrogate, which are measured on its batch: with the Fisher of the losses without
        targets, and with that of the others, whose value is given. By default, $c$ and
        nothing."""
        return squared_radius, jnp.full_like(squared_radius, jnp.inf)

    def growth(
        self, before: Float[Array, ""], value: Float[Array, ""], squares: int
    ) -> Float[Array, ""]:
        """How many times larger than given `squared_radius` is, given how many times it
        was at the step before, and the loss, if that consists of so many `squares`, in
        the unit of the targets. By default, once."""
        return jnp.ones_like(before)

    def of_measured(self, value: Float[Array, ""]) -> Float[Array, ""]:
        r"""An upper bound on $\langle \delta, F \delta \rangle$ as gradients before and
        after steps measure it, given the loss. By default, nothing."""
        return jnp.full_like(value, jnp.inf)

    def widening(self, lasting: Float[Array, ""]) -> Float[Array, ""]:
        r"""How many times the loss counts where it is given to `__call__` and
        `of_measured`, given the part $\ell$ of what steps promise their own batches that
        lasts at least to the next ones (see [`eqx_kfac.Extent`][]). By default, once."""
        return jnp.ones_like(lasting)

    def of_promised(self, learnt: Float[Array, ""]) -> Float[Array, ""]:
        r"""An upper bound on $\alpha \langle \hat F^{-1} \nabla h, \nabla h \rangle$,
        what the new part of a step promises its own batch, as a part of the loss, given
        how many times smaller than the first loss the last ones are (see
        [`eqx_kfac.Extent`][]). By default, nothing."""
        return jnp.full_like(learnt, jnp.inf)

    def kept(self, uphill: Float[Array, ""]) -> Float[Array, ""]:
        r"""What the momentum is multiplied by, given the part $u$ of the loss by which
        the velocity has led uphill in the last steps (see [`eqx_kfac.Extent`][]). By
        default, all of it is kept."""
        return jnp.ones_like(uphill)


class TrustRegion(AbstractTrustRegion):
    r"""Norm constraints that become tighter as the loss falls: one on what a step adds to
    the velocity, and one on the whole velocity,

    $$\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c_h \min(1, N / m),
    \qquad \langle \delta, \hat F \delta \rangle \le k c_h, \qquad
    c_h = \min\bigl(g c, \, r w |h| \operatorname{clip}(N / m, 1, 2)\bigr)$$

    with $h$ the loss of the batch (in nats) and $N$ the number of its terms. Either
    left-hand side is about twice a Kullback-Leibler divergence between the model
    before and after the step, without momentum and with it. A network that fits its data
    has a vanishing Fisher and a small loss. Steps that were short at first are then long
    compared with what is left to be gained, so no step is longer than a part of that.
    (A loss of densities may be negative: where it crosses zero, a few steps are short.)
    The gradient of few examples is mostly noise, whose part of the first left-hand side
    is proportional to $1 / N$: hence the factor $\min(1, N / m)$, and up to twice the
    part of the loss for many examples. And if gradients agree from step to step, momentum
    adds them up to ten times what the first constraint bounds. Pass it to
    [`eqx_kfac.KFAC`][] as `norm_constraint`.

    A squared error is as large as the unit of its targets makes it. If it is in the
    thousands (of prices, or of temperatures in kelvins), the region grows,

    $$g \leftarrow \max\bigl(1, \min(h / h_0, 1.06 \, g)\bigr),$$

    as long as $h$ consists of [`eqx_kfac.SquaredError`][] (and L2) terms: other losses
    have no unit, and may be large because of their entropy. (Of $k > 100$ outputs, $h_0$
    is $k / 100$ times as large.) Where that is not known, as in `update`, $g = 1$.

    The value of a surrogate (an objective beside a loss without targets, such as that of
    a policy) says nothing of what is left to be gained. Instead, with the exact Fisher of
    the step's own batch, $F_\pi$ of the losses without targets and $F_v$ of those with
    targets, whose value is $h_v$, the whole step is scaled so that

    $$\langle \delta, F_\pi \delta \rangle \le c, \qquad
    \langle \delta, F_v \delta \rangle \le h_v / 2:$$

    the first is twice the Kullback-Leibler divergence of the predictions, which change as
    much in every step; and the returns that a critic learns may be of any scale. (A full
    Newton step has $\langle \delta, F_v \delta \rangle = 2 h_v$ if all can be learnt.)
    This costs one forward-mode derivative.

    The second constraint needs no product with $\hat F$: for
    $\delta = \mu \delta_\text{prev} - \alpha \hat F^{-1} \nabla h$, its left-hand side is
    $\mu^2 \langle \delta_\text{prev}, \hat F \delta_\text{prev} \rangle
    - 2 \mu \alpha \langle \delta_\text{prev}, \nabla h \rangle
    + \alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle$.

    A third constraint is on the length of the velocity as gradients measure it, which may
    be many times the length in the blocks, which know nothing of each other,

    $$\kappa \, \langle \delta, \hat F \delta \rangle \le q w |h|,$$

    with $\kappa$ the average over the last steps, of gradients before and after each, of
    $(\langle \delta, \nabla h' \rangle - \langle \mu \delta_\text{prev}, \nabla h
    \rangle) / \langle \delta, \hat F \delta \rangle$, at least 1 (see
    [`eqx_kfac.Extent`][], in the state: `extent.coupling`). Gradients measure
    the Hessian, which is near the Fisher if the outputs of all losses are natural
    parameters (logits, the means of a fixed variance). If they are not, as with a
    variance that is learnt, or if nobody knows, as in `update`, there is no such bound.

    A part of the loss is little where gradients are hardly noise, as those of a batch
    that is all of the data. Then what a step promises its own batch lasts: the loss of
    the next batch is lower. So both parts of the loss are $w$ times as much,

    $$w = 1 + (a - 1) \operatorname{clip}\Bigl(
    \frac{\ell - 0.2}{0.5 - 0.2}, 0, 1\Bigr),$$

    with $\ell$ the part of the promised descent that lasts at least, on an average of the
    last steps (`extent.lasting`).

    What a gradient promises its own batch may be many times what there is to be gained,
    where a batch says little of many parameters, as of the rows of an embedding. The
    noise of so long steps would be larger than the loss. A network that has learnt most
    of what there was to learn is known not to suffer from that; so the bound

    $$\alpha \langle \hat F^{-1} \nabla h, \nabla h \rangle \le p w |h| \,
    \max(1, h_1 / \bar h)^6$$

    is for the beginning, and for targets that are mostly noise, with $h_1$ the first loss
    and $\bar h$ an average of the last ones (`extent.learnt`); there is none if one of
    them is not positive.

    If a velocity leads uphill, so that its cosine with $\hat F^{-1} \nabla h$ in the
    metric of $\hat F$ is $\cos > 1/2$, the step uses only $2 - 2 \cos$ times $\mu$: the
    quadratic model from which the velocity came does not hold any more. Where the
    gradient of a batch is mostly noise, that cosine is small, however steep the way; but
    noise does not persist. So if a velocity leads uphill by a part $u$ of the loss, on an
    average of the last steps (`extent.uphill`), the step uses only $u_0 / u$ times
    $\mu$, or all of it if that is less.

    !!! Example

        ```python
        optimizer = kfac.KFAC(norm_constraint=kfac.TrustRegion(1e-3))
        ```

    ??? cite "Reference"

        With $r = h_0 = \infty$ and $m = 1$, the first constraint is that of J. Ba, R.
        Grosse, J. Martens, *Distributed Second-Order Optimization using
        Kronecker-Factored Approximations*, ICLR 2017, section 5; that policies should
        change as much in every step, of Y. Wu, E. Mansimov, S. Liao, R. Grosse, J. Ba,
        *Scalable Trust-Region Method for Deep Reinforcement Learning using
        Kronecker-Factored Approximation*, NeurIPS 2017. The dependence on the loss and on
        the number of terms, the other constraints, and what is used of a velocity that
        leads uphill were found by experiment: see "How to choose".
    """

    squared_radius: Scalar
    loss_fraction: Scalar
    full_terms: int = eqx.field(static=True)
    velocity_factor: Scalar
    measured_fraction: Scalar
    uphill_fraction: Scalar
    lasting_factor: Scalar
    promised_fraction: Scalar
    large_loss: Scalar

    def __init__(
        self,
        squared_radius: Scalar = 3e-3,
        loss_fraction: Scalar = 5e-3,
        full_terms: int = 128,
        velocity_factor: Scalar = 8.0,
        measured_fraction: Scalar = 0.05,
        uphill_fraction: Scalar = 0.1,
        lasting_factor: Scalar = 10.0,
        promised_fraction: Scalar = 0.03,
        large_loss: Scalar = 300.0,
    ):
        r"""**Arguments:**

        - `squared_radius`: $c > 0$, in nats.
        - `loss_fraction`: $r > 0$, a fraction of the loss; `jnp.inf` leaves the loss out.
        - `full_terms`: $m$: a batch of fewer loss terms has shorter steps, and one of
            twice as many or more up to twice that fraction of the loss.
        - `velocity_factor`: $k > 0$, for the whole step; `jnp.inf` leaves the velocity
            alone.
        - `measured_fraction`: $q > 0$, a fraction of the loss, for the whole step as
            gradients measure it; `jnp.inf`: it has no such bound.
        - `uphill_fraction`: $u_0 > 0$, a fraction of the loss, by which the velocity may
            lead uphill before less of it is kept; `jnp.inf`: all of it is.
        - `lasting_factor`: $a \ge 1$: how many times as much both parts of the loss
            may become where the descent lasts to the next batch; 1: they never do.
        - `promised_fraction`: $p > 0$, a fraction of the loss, which the new part of a
            step may promise its own batch while nothing has been learnt; `jnp.inf`: it
            may promise anything.
        - `large_loss`: $h_0 > 0$, in nats: with a squared error that is larger, $c$ is
            as many times larger; `jnp.inf`: it never is. (Of up to 100 outputs; of
            $k > 100$, $k / 100$ times as many nats.)

        **Raises:** `ValueError` for a number out of its range.
        """
        self.squared_radius = check_number("squared_radius", squared_radius, POSITIVE)
        self.loss_fraction = check_number("loss_fraction", loss_fraction, POSITIVE)
        self.full_terms = check_count("full_terms", full_terms, 1)
        self.velocity_factor = check_number("velocity_factor", velocity_factor, POSITIVE)
        self.measured_fraction = check_number(
            "measured_fraction", measured_fraction, POSITIVE
        )
        self.uphill_fraction = check_number("uphill_fraction", uphill_fraction, POSITIVE)
        self.lasting_factor = check_number("lasting_factor", lasting_factor, Range(1))
        self.promised_fraction = check_number(
            "promised_fraction", promised_fraction, POSITIVE
        )
        self.large_loss = check_number("large_loss", large_loss, POSITIVE)

    @property
    def initial(self) -> Scalar:
        """The initial value in the state: $c$."""
        return self.squared_radius

    def __call__(
        self, squared_radius: Float[Array, ""], value: Float[Array, ""], terms: int | None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The first two right-hand sides, given $c$, the loss, and the number of its
        terms if that is known."""
        full = 1.0 if terms is None else terms / self.full_terms
        fraction = self.loss_fraction * min(max(1.0, full), _ENOUGH)
        share = (fraction * jnp.abs(value)).astype(squared_radius.dtype)
        most = jnp.where(share < squared_radius, share, squared_radius)
        return min(1.0, full) * most, most * self.velocity_factor

    def growth(
        self, before: Float[Array, ""], value: Float[Array, ""], squares: int
    ) -> Float[Array, ""]:
        """The growth of the region, given that of the step before, the loss, and of how
        many squares it consists."""
        large = self.large_loss * max(1.0, squares / _FEW)
        wanted = (value / large).astype(before.dtype)
        return jnp.where(wanted > 1, jnp.minimum(wanted, _FASTER * before), 1)

    def of_surrogate(
        self, squared_radius: Float[Array, ""], value: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Both right-hand sides for a step of a surrogate: $c$, and half of the value of
        the losses with targets, in whatever units these are."""
        return squared_radius, 0.5 * jnp.abs(value).astype(squared_radius.dtype)

    def of_measured(self, value: Float[Array, ""]) -> Float[Array, ""]:
        """The third right-hand side, given the loss."""
        return jnp.abs(value) * self.measured_fraction

    def widening(self, lasting: Float[Array, ""]) -> Float[Array, ""]:
        r"""$w$, given $\ell$."""
        part = (lasting - _NOISE) / (_SIGNAL - _NOISE)
        return 1 + jnp.clip(part, 0, 1) * (self.lasting_factor - 1)

    def of_promised(self, learnt: Float[Array, ""]) -> Float[Array, ""]:
        r"""$p \, \max(1, h_1 / \bar h)^6$, given $\max(1, h_1 / \bar h)$."""
        return learnt**_SOON * self.promised_fraction

    def kept(self, uphill: Float[Array, ""]) -> Float[Array, ""]:
        """The part of the momentum that is used, given $u$."""
        return jnp.minimum(1, self.uphill_fraction / jnp.maximum(uphill, 1e-30))


# Up to which part of a descent that lasts to the next batch its gradient is taken for
# noise, and from which on for one without any.
_NOISE, _SIGNAL = 0.2, 0.5

# How soon a loss that falls allows steps to promise more: where a third has been learnt,
# ten times as much.
_SOON = 6

# From how many times `full_terms` on the number of terms does not matter. It is not noise
# that bounds steps then, but how far the quadratic model holds.
_ENOUGH = 2.0

# How many times larger than at the step before a region may be. While outputs grow to
# the size of the targets, the curvature grows as the square of their size, and that of a
# dozen steps before must still hold; with 1.25, networks of eight layers explode.
_FASTER = 1.06

# From how many outputs on it is the loss of each of these that is large: three nats, if
# `large_loss` is 300, which targets of a spread of one do not have.
_FEW = 100


class Window(eqx.Module):
    r"""Averaging over a window that grows with the steps:
    $\xi_t = s t / (1 + s t)$, so that about the last $1 + s t$ of $t$ iterates count.
    Whenever you stop, the averaged model is about as good as after a learning rate that
    has fallen to zero. Pass it to [`eqx_kfac.KFAC`][] as `averaging`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(averaging=kfac.Window(0.2))
        ```
    """

    fraction: Scalar

    def __init__(self, fraction: Scalar = 0.1):
        """**Arguments:**

        - `fraction`: $s > 0$: the length of the window, as a fraction of all steps so
            far.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.fraction = check_number("fraction", fraction, POSITIVE)

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        r"""$\xi_t$, given `step` $t$."""
        length = step.astype(float) * self.fraction
        return length / (1 + length)
