import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import tree_where
from .._operator import diagonal, Factor, identity, trace_of_factor


# What is left of a mean without a coordinate that is nearly all of it. (With the mean of
# the others everywhere, a deep and narrow autoencoder stays at the mean of its data.)
_LITTLE = 0.03

# How many times as large as the mean of the others a coordinate may be before it is
# damped more. (By experiment: with 1, biases are slow where they are what is to be
# learnt; with 10, deep networks lose their units.)
_LARGER = 3.0

# A matrix of which all but rounding is known is positive definite with at least this part
# of its trace on its diagonal, times the distance of 1 to the next number: twice to eight
# times what decompositions of 11 to 1,025 rows need.
_ROUNDING = 2.0


def damped_factors(
    output_factor: Factor,
    input_factor: Factor,
    damping: Float[Array, ""],
    scaled_last: bool = False,
) -> tuple[Factor, Factor]:
    r"""$G + (\sqrt\lambda / \pi) I$ and $A + \pi \sqrt\lambda D$, whose Kronecker
    product is what [`eqx_kfac.Cholesky`][] inverts. $D$ is $I$, unless the last
    coordinate of $A$ is to be damped in the units of the others; then $\pi$ is without
    it, too, where it is nearly all of $A$. A damping above zero adds at least what
    rounding may have taken from the least eigenvalue."""
    mean_out, eye_out = _mean_of_diagonal(output_factor), identity(output_factor)
    if scaled_last:
        mean_in, units_in = _scaled_last(input_factor)
    else:
        mean_in, units_in = _mean_of_diagonal(input_factor), identity(input_factor)
    alive = (mean_out > 0) & (mean_in > 0)
    # A dead layer: 1 ⊗ λD. (`where` on the way in too, so that nothing divides by zero.)
    one = (~alive).astype(mean_in.dtype)  # Where it is chosen; split over a mesh alike.
    safe_out, safe_in = tree_where(alive, (mean_out, mean_in), (one, one))
    if output_factor.size == 1:  # b ⊗ A + λ = b ⊗ (A + (λ/b) D)
        damped_out = safe_out * eye_out
        damped_in = _raised(input_factor, damping / safe_out, units_in)
    elif input_factor.size == 1:
        damped_out = _raised(output_factor, damping / safe_in, eye_out)
        damped_in = safe_in * units_in
    else:
        pi = jnp.sqrt(safe_in / safe_out)
        damped_out = _raised(output_factor, jnp.sqrt(damping) / pi, eye_out)
        damped_in = _raised(input_factor, jnp.sqrt(damping) * pi, units_in)
    return tree_where(alive, (damped_out, damped_in), (eye_out, damping * units_in))


def _raised(factor: Factor, by: Float[Array, ""], units: Factor) -> Factor:
    """The factor with `by` more in these units, or with what rounding asks for. (Nothing
    is added without damping: then, a singular matrix has no inverse.)"""
    if factor.ndim == 2:
        rounding = _ROUNDING * jnp.finfo(factor.dtype).eps * trace_of_factor(factor)
        by = jnp.where(by > 0, jnp.maximum(by, rounding), by)
    return factor + by * units


def _scaled_last(factor: Factor) -> tuple[Float[Array, ""], Factor]:
    """The mean of the diagonal, without the last entry where that is nearly all of it;
    and $D$, that damps the last coordinate in the units of the others."""
    mean, others = _mean_of_diagonal(factor), _mean_of_diagonal(diagonal(factor)[:-1])
    known, eye = others > 0, identity(factor)
    unit = tree_where(known, jnp.minimum(1, _LARGER * others), jnp.ones_like(others))
    is_last = jnp.arange(factor.shape[0]) == factor.shape[0] - 1
    mean = tree_where(known & (others < _LITTLE * mean), others, mean)
    return mean, jnp.where(is_last, eye / unit, eye)


def _mean_of_diagonal(factor: Factor) -> Float[Array, ""]:
    return trace_of_factor(factor) / factor.shape[0]
