"""Eigenvalues of operators that are known by their products with vectors alone."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._checks import check_count, check_key
from .._custom_types import Key
from .._misc import accumulator
from .._operator import flatten, matmul, Structure, unflatten, widest


class Lanczos(eqx.Module):
    r"""What some products with a symmetric operator tell about its eigenvalues: the Ritz
    values of a Krylov space, which find the extreme eigenvalues first.

    **Fields:**

    - `values`: Ritz values, `[steps]`, ascending.
    - `residuals`: $\lVert C v - \lambda v \rVert$ of each, `[steps]`: an eigenvalue of
        the operator is no further away.
    - `weights`: `[steps]`: the squared component of each in the initial vector; their
        sum is 1.
    """

    values: Float[Array, " steps"]
    residuals: Float[Array, " steps"]
    weights: Float[Array, " steps"]
    _vectors: Float[Array, "steps size"]
    _structure: Structure

    def vector(self, index: int) -> PyTree:
        """The Ritz vector of `values[index]`, of length 1: a tree shaped like the
        model. `-1` is that of the largest eigenvalue."""
        return unflatten(self._vectors[index], self._structure.tree)


def lanczos(operator: lx.AbstractLinearOperator, key: Key, num_steps: int) -> Lanczos:
    r"""The Lanczos process, from a random vector. Every new vector is made orthogonal
    to all before (twice), so that no eigenvalue appears more often than it exists. If
    the Krylov space is exhausted, it continues with another random vector.

    **Arguments:**

    - `operator`: any symmetric lineax operator:
        [`eqx_kfac.analysis.GaussNewtonOperator`][],
        [`eqx_kfac.analysis.HessianOperator`][],
        [`eqx_kfac.analysis.BlockDiagonalOperator`][].
    - `key`: for the initial vector.
    - `num_steps`: the number of products. The largest few eigenvalues are found in some
        tens (check `residuals`), all of them in as many as there are parameters. As many
        vectors are kept.

    **Raises:** `ValueError` for more steps than there are parameters, and for an operator
    that is not symmetric.

    !!! Example

        ```python
        hessian = kfac.analysis.HessianOperator(loss_fn, model, x, y)
        found = eqx.filter_jit(kfac.analysis.lanczos)(hessian, jax.random.key(0), 40)
        found.values[-5:]
        ```

    ??? cite "Reference"

        C. Lanczos, *An Iteration Method for the Solution of the Eigenvalue Problem of
        Linear Differential and Integral Operators*, 1950.
    """
    check_key(key)
    _check_operator(operator, num_steps)
    structure = operator.in_structure()
    dtype = accumulator(widest(structure))
    linear = lx.linearise(operator)

    def product(v):
        return flatten(linear.mv(unflatten(v, structure)), dtype)

    draw = lambda index: jr.normal(jr.fold_in(key, index), (operator.in_size(),), dtype)
    basis, diagonal, beside = _tridiagonalised(product, draw, num_steps)
    off = beside[:-1]
    tridiagonal = jnp.diag(diagonal) + jnp.diag(off, 1) + jnp.diag(off, -1)
    values, vectors = jnp.linalg.eigh(tridiagonal)
    return Lanczos(
        values=values,
        residuals=beside[-1] * jnp.abs(vectors[-1]),
        weights=vectors[0] ** 2,
        _vectors=matmul(vectors.T, basis),
        _structure=Structure(structure),
    )


def _check_operator(operator: lx.AbstractLinearOperator, num_steps: int) -> None:
    check_count("num_steps", num_steps, 1)
    size = operator.in_size()
    if num_steps > size:
        raise ValueError(
            f"`num_steps` is {num_steps}, but the operator has {size} eigenvalues. Take "
            "as many steps at most."
        )
    if not lx.is_symmetric(operator):
        raise ValueError(
            "`kfac.analysis.lanczos` needs a symmetric operator, and nothing says that "
            f"this {type(operator).__name__} is one. If it is, wrap it: "
            "`lx.TaggedLinearOperator(operator, lx.symmetric_tag)`."
        )


def _tridiagonalised(
    product: Callable, draw: Callable, num_steps: int
) -> tuple[Float[Array, "steps size"], Float[Array, " steps"], Float[Array, " steps"]]:
    """An orthonormal basis of the Krylov space of a random vector, and the operator in
    it: the diagonal, and the entries beside it. `draw(index)` is a random vector."""

    def unit(v):
        return v / jnp.linalg.norm(v)

    def orthogonal(v, basis):
        for _ in range(2):
            v = v - matmul(matmul(basis, v), basis)
        return v

    def step(carry, index):
        basis, v = carry
        basis = basis.at[index].set(v)
        new = product(v)
        diagonal = jnp.vdot(v, new)
        scale = jnp.linalg.norm(new)
        new = orthogonal(new, basis)
        beside = jnp.linalg.norm(new)
        ended = beside <= 100 * jnp.finfo(new.dtype).eps * scale

        def another():
            other = draw(index)
            return unit(orthogonal(other, basis))

        v = jax.lax.cond(ended, another, lambda: new / beside)
        return (basis, v), (diagonal, jnp.where(ended, 0, beside))

    first = unit(draw(num_steps))
    start = jnp.zeros((num_steps, first.size), first.dtype), first
    (basis, _), entries = jax.lax.scan(step, start, jnp.arange(num_steps))
    return basis, *entries


class SpectralDensity(eqx.Module):
    r"""How the eigenvalues of an operator are distributed, from random vectors. Each
    vector has its own nodes and weights, which are those of a Gaussian quadrature.

    **Fields:**

    - `nodes`: Ritz values of every random vector, `[samples, steps]`.
    - `weights`: of each node, `[samples, steps]`; those of one vector add up to 1.
    - `size`: the number of eigenvalues of the operator.
    """

    nodes: Float[Array, "samples steps"]
    weights: Float[Array, "samples steps"]
    size: int = eqx.field(static=True)

    def __call__(
        self, at: Float[Array, " points"], width: ArrayLike
    ) -> Float[Array, " points"]:
        r"""The density of eigenvalues at `at` (its integral is 1), with every eigenvalue
        spread as a normal distribution with standard deviation `width`."""
        width = jnp.asarray(width, self.nodes.dtype)
        distance = (at[:, None, None] - self.nodes[None]) / width
        normal = jnp.exp(-0.5 * distance**2) / (width * jnp.sqrt(2 * jnp.pi))
        spread = jnp.sum(self.weights[None] * normal.astype(self.nodes.dtype), axis=2)
        return jnp.mean(spread, axis=1)

    def trace(self, fn: Callable) -> tuple[Float[Array, ""], Float[Array, ""]]:
        r"""$\operatorname{tr} f(C) = \sum_i f(\lambda_i)$, and the standard error of this
        estimate, over the random vectors.

        **Arguments:**

        - `fn`: $f$, applied to an array of eigenvalues. `lambda x: x / (x + damping)`
            gives the effective dimension, `lambda x: jnp.log(x + damping)` the
            log-determinant.
        """
        each = self.size * jnp.sum(self.weights * fn(self.nodes), axis=1)
        return jnp.mean(each), jnp.std(each, ddof=1) / len(each) ** 0.5


def spectral_density(
    operator: lx.AbstractLinearOperator,
    key: Key,
    num_samples: int = 8,
    num_steps: int = 64,
) -> SpectralDensity:
    r"""The distribution of all eigenvalues of an operator, by stochastic Lanczos
    quadrature: `num_samples` times `num_steps` products.

    **Arguments:**

    - `operator`, `num_steps`: as for [`eqx_kfac.analysis.lanczos`][].
    - `key`: for the random vectors.
    - `num_samples`: how many of these, at least 2.

    **Raises:** as [`eqx_kfac.analysis.lanczos`][].

    !!! Example

        ```python
        estimate = eqx.filter_jit(kfac.analysis.spectral_density)
        density = estimate(operator, jax.random.key(0))
        dimension, error = density.trace(lambda x: x / (x + damping))
        ```

    ??? cite "Reference"

        S. Ubaru, J. Chen, Y. Saad, *Fast Estimation of tr(f(A)) via Stochastic Lanczos
        Quadrature*, SIAM Journal on Matrix Analysis and Applications 2017. Of neural
        networks: B. Ghorbani, S. Krishnan, Y. Xiao, *An Investigation into Neural Net
        Optimization via Hessian Eigenvalue Density*, ICML 2019.
    """
    check_key(key)
    check_count("num_samples", num_samples, 2)
    linear = lx.linearise(operator)
    found = jax.lax.map(
        lambda key: lanczos(linear, key, num_steps), jr.split(key, num_samples)
    )
    return SpectralDensity(found.values, found.weights, operator.in_size())
