from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import lineax as lx
from jaxtyping import Array, Float

from ._base import AbstractDampedSolver, factors_of


class CholeskyState(NamedTuple):
    """The inverses of both damped factors."""

    output_inverse: Float[Array, "*stack d_out d_out"]
    input_inverse: Float[Array, "*stack d_in d_in"]


class Cholesky(AbstractDampedSolver[CholeskyState]):
    r"""Factored Tikhonov damping: the inverse of

    $$\left(G + \frac{\sqrt\lambda}{\pi} I\right) \otimes
    \left(A + \pi \sqrt\lambda I\right), \qquad
    \pi = \sqrt{\frac{\operatorname{tr} A / d_A}{\operatorname{tr} G / d_G}}$$

    through two Cholesky decompositions. The state holds the inverses themselves, so that
    applying them takes two matrix products. The damping enters them: a new one takes
    effect when the operator is factorised again.

    Where $\pi$ has no meaning the exact inverse is cheap, and is used instead: a
    $1 \times 1$ factor $b$ leaves $A + (\lambda/b) I$; a zero factor leaves
    $\lambda I$.

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, section 6.3.
    """

    def init(
        self, operator: lx.AbstractLinearOperator, options: dict[str, Any]
    ) -> CholeskyState:
        output_factor, input_factor = factors_of(operator, self)
        damping = jnp.asarray(options.get("damping", 0.0), input_factor.dtype)
        damped = damped_factors(output_factor, input_factor, damping)
        return CholeskyState(*map(_inverse, damped))

    def compute(
        self,
        state: CholeskyState,
        vector: Float[Array, "d_out d_in"],
        options: dict[str, Any],
    ) -> tuple[Float[Array, "d_out d_in"], lx.RESULTS, dict[str, Any]]:
        del options
        with jax.default_matmul_precision("highest"):
            solution = state.output_inverse @ vector @ state.input_inverse
        return solution, lx.RESULTS.successful, {}


def _inverse(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    eye = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    root = jnp.linalg.cholesky(matrix)
    inverse_root = jsl.solve_triangular(root, eye, lower=True)
    return jnp.matmul(inverse_root.T, inverse_root, precision="highest")


def damped_factors(
    output_factor: Float[Array, "d_out d_out"],
    input_factor: Float[Array, "d_in d_in"],
    damping: Float[Array, ""],
) -> tuple[Float[Array, "d_out d_out"], Float[Array, "d_in d_in"]]:
    r"""$G + (\sqrt\lambda / \pi) I$ and $A + \pi \sqrt\lambda I$, whose Kronecker
    product is what [`eqx_kfac.Cholesky`][] inverts."""
    d_out, d_in = output_factor.shape[0], input_factor.shape[0]
    eye_out = jnp.eye(d_out, dtype=output_factor.dtype)
    eye_in = jnp.eye(d_in, dtype=input_factor.dtype)
    mean_out = jnp.trace(output_factor) / d_out
    mean_in = jnp.trace(input_factor) / d_in
    alive = (mean_out > 0) & (mean_in > 0)
    # A dead layer: 1 ⊗ λ. (`where` on the way in too, so that nothing divides by zero.)
    safe_out = jnp.where(alive, mean_out, 1)
    safe_in = jnp.where(alive, mean_in, 1)
    if d_out == 1:  # b ⊗ A + λ = b ⊗ (A + (λ/b) I)
        damped_out = safe_out * eye_out
        damped_in = input_factor + (damping / safe_out) * eye_in
    elif d_in == 1:
        damped_out = output_factor + (damping / safe_in) * eye_out
        damped_in = safe_in * eye_in
    else:
        pi = jnp.sqrt(safe_in / safe_out)
        damped_out = output_factor + (jnp.sqrt(damping) / pi) * eye_out
        damped_in = input_factor + (jnp.sqrt(damping) * pi) * eye_in
    return (
        jnp.where(alive, damped_out, eye_out),
        jnp.where(alive, damped_in, damping * eye_in),
    )
