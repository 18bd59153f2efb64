from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, PyTree

from .._checks import AT_LEAST_0, check_count, check_number
from .._custom_types import Options
from .._inner_products import tree_dot
from .._misc import tree_where
from .._solver import AbstractSymmetricSolver


class ConjugateGradient(AbstractSymmetricSolver[lx.AbstractLinearOperator]):
    r"""Preconditioned conjugate gradients for $(C + \lambda I) x = b$, with a positive
    semidefinite operator $C$ on PyTrees, such as
    [`eqx_kfac.analysis.GaussNewtonOperator`][]. It is a lineax solver like `lx.CG`, but
    its stopping criterion makes sense for parameters of different units. It stops when

    $$\lVert r \rVert_P \le \text{rtol} \, \lVert b \rVert_P, \qquad
    \lVert r \rVert_P^2 = r^\top P r$$

    with $r$ the residual and $P \approx (C + \lambda I)^{-1}$ the preconditioner; or
    after `max_steps`; or when rounding has used up all curvature.

    Its `options`, all of which may be left out:

    - `preconditioner`: $P$, a positive definite operator on the same PyTrees, such as
        `kfac.analysis.BlockDiagonalOperator(...).inverse(damping)`.
    - `y0`: where to start, instead of at zero.
    - `damping`: $\lambda \ge 0$.

    The number of products is in `solution.stats["num_steps"]`.

    !!! Example

        ```python
        operator = kfac.analysis.GaussNewtonOperator(loss_fn, model, x, y)
        blocks = kfac.analysis.BlockDiagonalOperator(curvature, model)
        options = dict(preconditioner=blocks.inverse(1e-2), damping=1e-2)
        solver = kfac.analysis.ConjugateGradient(rtol=1e-3, max_steps=50)
        solution = lx.linear_solve(operator, grads, solver, options=options, throw=False)
        solution.value, solution.stats["num_steps"]
        ```

    ??? cite "Reference"

        J. Martens, *Deep Learning via Hessian-free Optimization*, ICML 2010.
    """

    rtol: Any
    max_steps: int | None = eqx.field(static=True)

    def __init__(self, rtol: Any = 1e-5, max_steps: int | None = None):
        """**Arguments:**

        - `rtol`: how small the residual must be, relative to the right-hand side.
        - `max_steps`: the most products; by default ten times the number of
            parameters. The solution is then the best so far, but counts as a failure:
            pass `throw=False` to `lx.linear_solve`, unless `rtol` is 0.
        """
        if max_steps is not None:
            max_steps = check_count("max_steps", max_steps, 1)
        self.rtol = check_number("rtol", rtol, AT_LEAST_0)
        self.max_steps = max_steps

    def init(
        self, operator: lx.AbstractLinearOperator, options: Options
    ) -> lx.AbstractLinearOperator:
        if not lx.is_positive_semidefinite(operator):
            name = type(operator).__name__
            raise ValueError(
                "`kfac.analysis.ConjugateGradient` is for operators that are positive "
                f"semidefinite, which {name} is not known to be. Use "
                "`kfac.analysis.GaussNewtonOperator` or `kfac.analysis.FisherOperator` "
                "instead of `kfac.analysis.HessianOperator`, or "
                "`lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)`."
            )
        return lx.linearise(operator)

    def compute(
        self, state: lx.AbstractLinearOperator, vector: PyTree, options: Options
    ) -> tuple[PyTree, lx.RESULTS, Options]:
        identity = lx.IdentityLinearOperator(state.in_structure())
        preconditioner = lx.linearise(options.get("preconditioner", identity))
        damping = options.get("damping", 0.0)
        max_steps = 10 * state.in_size() if self.max_steps is None else self.max_steps

        def product(v):
            return _add(state.mv(v), damping, v)

        if "y0" in options:
            x = options["y0"]
            r = _add(vector, -1, product(x))
            enough = tree_dot(vector, preconditioner.mv(vector))
        else:
            x, r, enough = jtu.tree_map(jnp.zeros_like, vector), vector, None
        z = preconditioner.mv(r)
        gamma = tree_dot(r, z)
        enough = gamma if enough is None else enough
        enough = enough * jnp.asarray(self.rtol, gamma.dtype) ** 2

        def unfinished(carry):
            *_, gamma, broken, step = carry
            return (gamma > enough) & ~broken & (step < max_steps)

        def body(carry):
            x, r, p, gamma, _, step = carry
            image = product(p)
            curvature = tree_dot(p, image)
            broken = ~(curvature > 0)  # Not a number, too.
            alpha = gamma / jnp.where(broken, 1, curvature)
            new_r = _add(r, -alpha, image)
            z = preconditioner.mv(new_r)
            new_gamma = tree_dot(new_r, z)
            new = _add(x, alpha, p), new_r, _add(z, new_gamma / gamma, p), new_gamma
            kept = tree_where(broken, (x, r, p, gamma), new)
            return *kept, broken, step + 1

        start = x, r, z, gamma, jnp.array(False), jnp.array(0)
        x, _, _, gamma, broken, steps = jax.lax.while_loop(unfinished, body, start)
        result = lx.RESULTS.where(broken, lx.RESULTS.breakdown, lx.RESULTS.successful)
        short = (gamma > enough) & ~broken & (jnp.asarray(self.rtol) > 0)
        result = lx.RESULTS.where(short, lx.RESULTS.max_steps_reached, result)
        return x, result, {"num_steps": steps, "max_steps": max_steps}


def _add(a: PyTree, scale: Any, b: PyTree) -> PyTree:
    """`a + scale * b`, in the types of `a`."""

    def add(x: Array, y: Array) -> Array:
        return x + jnp.asarray(scale).astype(x.dtype) * y.astype(x.dtype)

    return jtu.tree_map(add, a, b)
