"""The quadratic model of the objective along a few directions, and rules for the length
of a step that go by it."""

import abc
from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import check_examples, check_number, POSITIVE
from .._custom_types import Model, Scalar
from .._inner_products import symmetric, tree_dot
from ._hyperparameters import AbstractRule


# Learning rate and momentum, as far as they are numbers.
_Given: TypeAlias = tuple[Float[Array, ""] | None, Float[Array, ""] | None]


class AbstractStepRule(AbstractRule):
    r"""A rule for the learning rate, the momentum, or both, given the quadratic model of
    the objective along the two directions of a step. See "Writing your own".

    **Fields:**

    - `examples`: the model is computed from the first so many examples of the batch;
        `None`: from all of them.
    - `damping_ratio`: the preconditioner is damped with this ratio times the damping, the
        quadratic model with the damping itself.
    """

    examples: eqx.AbstractVar[int | None]
    damping_ratio: eqx.AbstractVar[Scalar]

    @property
    def initial(self) -> Float[Array, ""]:
        """Zero, with the same definite type as the chosen value, so that nothing compiles
        twice."""
        return jnp.zeros((), float)

    @abc.abstractmethod
    def __call__(
        self, model: "Quadratic", given: _Given, value: Float[Array, ""]
    ) -> Float[Array, "2"]:
        r"""$\alpha$ and $\mu$, from the model along $d = -\hat F^{-1} \nabla h$ and
        $\delta_\text{prev}$, and the loss. `given` has the numbers that are fixed, and
        `None` where the rule chooses; what it returns for a fixed one does not matter."""


class QuadraticModel(AbstractStepRule):
    r"""A learning rate, a momentum, or both, that minimise the quadratic model

    $$q(\delta) = \tfrac12 \delta^\top (C + (\lambda + \eta) I) \delta + \nabla h^\top
    \delta, \qquad \delta = \alpha d + \mu \, \delta_\text{prev}, \quad
    d = -\hat F^{-1} \nabla h$$

    with $C$ the exact Fisher matrix of this batch, which is the Gauss-Newton matrix if
    outputs are natural parameters. It costs one forward-mode derivative of the loss
    function for each of the two directions. Pass it to [`eqx_kfac.KFAC`][] as
    `learning_rate`, as `momentum`, or as both. If one of them is a number, it stays as it
    is, and the other is chosen given that number.

    !!! Example

        ```python
        quadratic = kfac.QuadraticModel()
        optimizer = kfac.KFAC(quadratic, quadratic, kfac.LevenbergMarquardt(initial=1.0))
        ```

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015, sections 6.4 and 7.
    """

    examples: int | None = eqx.field(static=True)
    damping_ratio: Scalar

    def __init__(self, examples: int | None = None, damping_ratio: Scalar = 1.0):
        """**Arguments:**

        - `examples`: the curvature of the model comes from the first so many examples of
            the batch: less work, more noise. `None`: from all of them.
        - `damping_ratio`: the preconditioner is damped with this ratio times the damping,
            the quadratic model with the damping itself.

        **Raises:** `ValueError` for a number out of its range.
        """
        self.examples = check_examples(examples)
        self.damping_ratio = check_number("damping_ratio", damping_ratio, POSITIVE)

    def __call__(
        self, model: "Quadratic", given: _Given, value: Float[Array, ""]
    ) -> Float[Array, "2"]:
        """The minimum of the model."""
        return model.minimum(given)


class Quadratic(eqx.Module):
    r"""$q(c) = \frac12 c^\top M c + b^\top c$ for the coefficients $c$ of one or two
    directions: $M$ is the damped curvature between them, $b$ their slopes.

    **Fields:**

    - `matrix`: $M$, `[n, n]` for $n$ directions, symmetric.
    - `vector`: $b$, `[n]`.
    """

    matrix: Float[Array, "n n"]
    vector: Float[Array, " n"]

    def __call__(self, coefficients: Float[Array, " n"]) -> Float[Array, ""]:
        """$q(c)$ for `coefficients` $c$."""
        product = jnp.sum(self.matrix * coefficients[None, :], axis=-1)
        return jnp.sum((product / 2 + self.vector) * coefficients)

    def minimum(self, fixed: Sequence[Float[Array, ""] | None]) -> Float[Array, " n"]:
        """The coefficients that minimise $q$; those that are not `None` in `fixed` stay.

        A direction without curvature (because it is zero) gets a coefficient of zero, as
        does a second direction that is a multiple of the first."""
        free = [i for i, value in enumerate(fixed) if value is None]
        given = jnp.stack([jnp.zeros(()) if v is None else v for v in fixed])
        given = given.astype(self.vector.dtype)
        vector = self.vector + jnp.sum(self.matrix * given[None, :], axis=-1)
        # In units in which both directions have curvature 1, whatever their lengths.
        curvature = jnp.diagonal(self.matrix)
        curved = curvature > 0
        unit = jnp.where(curved, 1 / jnp.sqrt(jnp.where(curved, curvature, 1)), 0)
        b = vector * unit
        if len(free) == 2:
            cosine = self.matrix[0, 1] * unit[0] * unit[1]
            sine_squared = 1 - cosine**2
            independent = sine_squared > 8 * jnp.finfo(b.dtype).eps
            scale = 1 / jnp.where(independent, sine_squared, 1)
            both = -scale * jnp.stack([b[0] - cosine * b[1], b[1] - cosine * b[0]])
            first = jnp.stack([-b[0], jnp.zeros_like(b[1])])
            solution = jnp.where(independent, both, first)
        else:
            solution = -b
        is_free = jnp.array([v is None for v in fixed])
        return jnp.where(is_free, solution * unit, given)


def quadratic(
    gram: Float[Array, "n n"],
    grads: Model,
    directions: Sequence[Model],
    damping: Any,
) -> Quadratic:
    r"""The quadratic model with curvature $C + \lambda I$, given $d_a^\top C d_b$."""
    dtype = gram.dtype
    identity = symmetric(lambda a, b: tree_dot(a, b).astype(dtype), directions)
    slopes = jnp.stack([tree_dot(grads, d).astype(dtype) for d in directions])
    return Quadratic(gram + jnp.asarray(damping, dtype) * identity, slopes)
