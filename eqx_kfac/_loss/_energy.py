import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from .._checks import check_number, POSITIVE
from .._custom_types import Key, Scalar
from .._devices import sum_over, varying_axes
from .._misc import draw
from ._base import AbstractLoss, at_least_float32, check_weights


class Energy(AbstractLoss):
    r"""The energy of a wavefunction, from walkers drawn from $\lvert \psi \rvert^2$
    (variational Monte Carlo): the mean of the local energies $E_L = H \psi / \psi$. Its
    gradient is

    $$2 \operatorname{Re} \frac1N \sum_n (E_n - \bar E)^* \, \partial \log \psi_n,$$

    with $E_n$ clipped, and $\bar E$ the mean of the clipped ones. The local energies are
    constants: no derivative of them is taken. The curvature is the Fisher of
    $\lvert \psi \rvert^2$ (for a complex $\psi$, the real part of the quantum geometric
    tensor), $4 \operatorname{Cov}(\partial \log \psi)$: steps are those of stochastic
    reconfiguration.

    Exact operators ([`eqx_kfac.analysis.FisherOperator`][],
    [`eqx_kfac.analysis.GaussNewtonOperator`][]) and the quadratic model use the
    covariance. Blocks use the second moment around zero, which is not less, as is usual;
    with [`eqx_kfac.Centred`][], they use the covariance.

    All walkers enter into $\bar E$; those of a micro-batch would have another mean, so
    micro-batches are not supported.

    **Fields:**

    - `log_psi`: $\log \psi$, `[walkers, k]`: the real part, and the imaginary part ($k =
        2$) if it is complex.
    - `targets`: the real parts of the local energies, `[walkers]`; and the difference of
        each part of them from its mean, both after clipping, `[walkers, k]`.

    ??? cite "Reference"

        D. Pfau, J. Spencer, A. Matthews, W. Foulkes, *Ab initio solution of the
        many-electron Schrödinger equation with deep neural networks*, Physical Review
        Research 2, 2020.
    """

    natural = True
    joint = True
    log_psi: Float[Array, "walkers k"]
    targets: tuple[Array, Array]
    weights: Shaped[Array, "..."] | None

    def __init__(self, log_psi, local_energies, clip: Scalar | None = 5.0, weights=None):
        r"""**Arguments:**

        - `log_psi`: $\log \psi$, or $\log \lvert \psi \rvert$, of every walker,
            `[walkers]`, real or complex.
        - `local_energies`: `[walkers]`, real or complex.
        - `clip`: in the gradient, local energies (real and imaginary parts
            separately) whose distance from their mean is more than this many times the
            mean distance are moved to that many times the mean distance; the mean of the
            moved ones is then subtracted. `None`: no clipping.
        - `weights`: a weight for every walker, `[walkers]`.

        **Raises:** `ValueError` for other shapes, or a `clip` that is not positive.
        """
        shape = jnp.shape(log_psi)
        if len(shape) != 1 or jnp.shape(local_energies) != shape:
            raise ValueError(
                "Energy: `log_psi` and `local_energies` must both have the shape "
                f"[walkers], but have shapes {shape} and {jnp.shape(local_energies)}."
            )
        if clip is not None:
            check_number("clip", clip, POSITIVE)
        self.log_psi = _parts(log_psi, jnp.iscomplexobj(log_psi))
        self.weights = check_weights("Energy", weights, shape)
        energies = jax.lax.stop_gradient(local_energies)
        energies = at_least_float32(_parts(energies, jnp.iscomplexobj(log_psi)))
        centre = self._mean(energies)
        away = energies - centre
        if clip is not None:
            most = clip * self._mean(jnp.abs(away))
            away = jnp.clip(away, -most, most)
            away = away - self._mean(away)
        self.targets = energies[:, 0], away

    @property
    def outputs(self):
        return self.log_psi

    @property
    def root_shape(self) -> tuple[int, ...]:
        return self.log_psi.shape

    def losses(self, outputs, targets) -> Float[Array, " walkers"]:
        energies, away = targets
        y = at_least_float32(outputs)
        # Zero, but its derivative is not.
        change = y - jax.lax.stop_gradient(y)
        return energies + 2 * jnp.sum(away * change, axis=-1)

    def sample(self, key: Key):
        energies, away = self.targets
        return energies, draw(jax.random.normal, key, away.shape, away.dtype)

    def fisher_root(self, v):
        return (2 * v).astype(self.log_psi.dtype)

    def fisher_product(self, v):
        return self.fisher_root(2 * (v - self._mean(v)))

    def hessian_product(self, v):
        return self.fisher_product(v)

    def _mean(self, a: Array) -> Array:
        """Over all walkers, on all devices."""
        weights = self.term_weights.astype(a.dtype)[:, None]
        total = jnp.sum(weights * a, axis=0, keepdims=True)
        count = jnp.sum(weights, keepdims=True)
        axes = varying_axes((total, count))
        return sum_over(total, axes) / sum_over(count, axes)


def _parts(a: Inexact[Array, " walkers"], both: bool) -> Float[Array, "walkers k"]:
    """The real part, and the imaginary one."""
    parts = [jnp.real(a), jnp.imag(a)] if both else [jnp.real(a)]
    return jnp.stack(parts, axis=-1)
