import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float, Int

from ._custom_types import Key, Model
from ._estimate import Linearisation, linearise
from ._fisher import AbstractFisher, MonteCarlo
from ._misc import (
    all_finite,
    cast_varying,
    check_same_shapes,
    tree_dot,
    tree_norm,
    tree_where,
    varying_axes,
)
from ._precondition import (
    average,
    check_covered,
    init_curvature,
    init_fallback,
    init_inverse,
    partition_tagged,
    precondition,
    refactorise,
    update_fallback,
)
from ._schedule import (
    at,
    check_count,
    check_instance,
    check_number,
    check_preconditioner,
    when_due,
)
from ._solver import AbstractDampedSolver, Cholesky


# The hyper-parameters that are numbers, or schedules of numbers.
NUMBERS = ("learning_rate", "momentum", "damping", "ema", "norm_constraint")


class KFACState(eqx.Module):
    """The state of [`eqx_kfac.KFAC`][]. All arrays; `eqx.tree_at` may change any of them
    between steps, hyper-parameters included (those that follow a schedule are overwritten
    by it)."""

    step: Int[Array, ""]
    # Shaped like the model, with every tagged layer replaced by its averaged factors, or
    # by their factorisation.
    curvature: Model
    inverse: Model
    weight: Float[Array, ""]  # Total weight of the moving average; 0 before the first.
    velocity: Model  # The previous update.
    fallback: Any
    learning_rate: Float[Array, ""]
    momentum: Float[Array, ""]
    damping: Float[Array, ""]
    norm_constraint: Float[Array, ""] | None
    ema: Float[Array, ""]
    rejected: Int[Array, ""]  # How many steps were not taken.


class Info(eqx.Module):
    """What happened in one step of [`eqx_kfac.KFAC`][]."""

    loss: Float[Array, ""]  # Before the step.
    aux: Any
    learning_rate: Float[Array, ""]
    momentum: Float[Array, ""]
    damping: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    update_norm: Float[Array, ""]
    rejected: Bool[Array, ""]  # The loss or the step was not finite: nothing changed.


class KFAC(eqx.Module):
    r"""K-FAC: natural gradient descent with Kronecker-factored curvature.

    One step is

    $$\delta = -\alpha \hat F^{-1} \nabla h + \mu \, \delta_\text{prev}, \qquad
    \theta \leftarrow \theta + \delta$$

    with $\hat F = \hat G \otimes \hat A + (\lambda + \eta) I$ for every tagged layer,
    averaged over the steps so far ($\eta$ is the coefficient of an [`eqx_kfac.L2`][]
    term). The object only holds choices; all that changes is in its state. Jit, scan,
    shard and donate as you like.

    Any number may be an optax schedule instead: a function of the step. Numbers are
    copied into the state by `init`; change them there, at any time and without
    recompiling: `eqx.tree_at(lambda s: s.damping, state, jnp.array(1e-2))`.

    !!! Example

        ```python
        optimizer = kfac.KFAC(learning_rate=1e-2, momentum=0.9, damping=1e-3)
        state = optimizer.init(model)

        @eqx.filter_jit
        def train_step(model, state, x, y, key):
            return optimizer.step(loss_fn, model, state, x, y, key=key)

        model, state, info = train_step(model, state, x, y, key)
        ```

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015. The norm constraint is that of J. Ba,
        R. Grosse, J. Martens, *Distributed Second-Order Optimization using
        Kronecker-Factored Approximations*, ICLR 2017, section 5.
    """

    learning_rate: Any
    momentum: Any
    damping: Any
    fisher: AbstractFisher
    solver: AbstractDampedSolver
    norm_constraint: Any
    curvature_period: int = eqx.field(static=True)
    inverse_period: int = eqx.field(static=True)
    ema: Any
    burn_in: int = eqx.field(static=True)
    fallback: optax.GradientTransformation | None

    def __init__(
        self,
        learning_rate: Any,
        momentum: Any = 0.9,
        damping: Any = 1e-3,
        *,
        fisher: AbstractFisher = MonteCarlo(),
        solver: AbstractDampedSolver = Cholesky(),
        norm_constraint: Any = None,
        curvature_period: int = 1,
        inverse_period: int = 5,
        ema: Any = 0.95,
        burn_in: int = 0,
        fallback: optax.GradientTransformation | None = None,
    ):
        r"""**Arguments:**

        - `learning_rate`: $\alpha > 0$.
        - `momentum`: $\mu \in [0, 1)$, how much of the previous update is taken again.
        - `damping`: $\lambda \ge 0$, added to the curvature, in units of the loss per
            squared parameter.
        - `fisher`: which curvature is estimated; see [`eqx_kfac.MonteCarlo`][].
        - `solver`: how the damped curvature is inverted: [`eqx_kfac.Cholesky`][] (fast,
            factored damping) or [`eqx_kfac.Eigh`][] (exact damping).
        - `norm_constraint`: $c > 0$ or `None`. The preconditioned gradient is scaled so
            that $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c$.
        - `curvature_period`: curvature is estimated every so many steps.
        - `inverse_period`: it is factorised every so many steps.
        - `ema`: $\rho \in [0, 1]$, the decay of the moving average of the curvature. 1 is
            the mean over all steps; 0 keeps only the latest estimate.
        - `burn_in`: how many more estimates of the curvature are averaged on the first
            batch (that is finite), before the first step.
        - `fallback`: an optax optimizer for the parameters that no tag covers, e.g.
            `optax.adam(1e-3)`. Its updates are applied as they come.

        **Raises:** `ValueError` for a number out of its range, `TypeError` for something
        of another kind.
        """
        check_number("learning_rate", learning_rate, lambda v: v > 0, "positive")
        check_number("momentum", momentum, lambda v: 0 <= v < 1, "in [0, 1)")
        check_preconditioner(damping, solver, inverse_period, ema, fallback)
        check_instance("fisher", fisher, AbstractFisher, "kfac.MonteCarlo()")
        if norm_constraint is not None:
            check_number("norm_constraint", norm_constraint, lambda v: v > 0, "positive")
        check_count("curvature_period", curvature_period, 1)
        check_count("burn_in", burn_in, 0)
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.damping = damping
        self.fisher = fisher
        self.solver = solver
        self.norm_constraint = norm_constraint
        self.curvature_period = curvature_period
        self.inverse_period = inverse_period
        self.ema = ema
        self.burn_in = burn_in
        self.fallback = fallback

    def init(self, model: Model) -> KFACState:
        """**Arguments:**

        - `model`: the model, or the part of it that is trained. Needs no batch, no key.

        **Returns:** the initial state.

        **Raises:** `ValueError` naming the parameters that no tagged layer covers, unless
        there is a `fallback`.
        """
        check_covered(model, self.fallback)
        tagged, _ = partition_tagged(model)
        curvature = init_curvature(model)
        step = jnp.zeros((), jnp.int32)
        state = KFACState(
            step=step,
            curvature=curvature,
            inverse=init_inverse(curvature, model, self.solver),
            weight=jnp.zeros((), float),
            velocity=jtu.tree_map(jnp.zeros_like, tagged),
            fallback=init_fallback(model, self.fallback),
            learning_rate=at(self.learning_rate, step),
            momentum=at(self.momentum, step),
            damping=at(self.damping, step),
            norm_constraint=at(self.norm_constraint, step),
            ema=at(self.ema, step),
            rejected=jnp.zeros((), jnp.int32),
        )
        # Within `shard_map`, every device may have a model of its own.
        return cast_varying(state, varying_axes(model))

    def step(
        self,
        loss_fn: Callable,
        model: Model,
        state: KFACState,
        *args: Any,
        key: Key | None = None,
        **kwargs: Any,
    ) -> tuple[Model, KFACState, Info]:
        """One step: estimate the curvature (if due), factorise it (if due), update.

        **Arguments:**

        - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss (such as
            `kfac.SoftmaxCrossEntropy`), a sum of losses and scalars, or `(loss, aux)`.
        - `model`, `state`: as returned from the previous step.
        - `args`, `kwargs`: for `loss_fn`: the batch, dropout keys, an `eqx.nn.State`, ...
        - `key`: randomness for the Fisher estimate; not handed to `loss_fn`.

        **Returns:** `(model, state, info)`. If the loss, its gradient, its curvature or
        the step is not finite, `info.rejected` is true and the model stays as it is; so
        does the state, but for its counters.
        """
        state = self._prepare(state, model)
        linearisation = linearise(loss_fn, model, args, kwargs)
        value, grads = linearisation.value(), linearisation.grads()
        finite = all_finite((value, tree_norm(grads)))
        averaged = self._collect(linearisation, state, finite, key)
        updates, state, info = self._advance(
            grads, model, state, averaged, value, linearisation.aux
        )
        return eqx.apply_updates(model, updates), state, info

    def update(
        self,
        grads: Model,
        state: KFACState,
        model: Model,
        *,
        curvature: Model | None = None,
        value: Float[Array, ""] | None = None,
    ) -> tuple[Model, KFACState]:
        """The same step with gradients and curvature from anywhere, as optax has it.

        **Arguments:**

        - `grads`: shaped like the model.
        - `state`, `model`: as in `step`. `model` may be filtered to its arrays.
        - `curvature`: from [`eqx_kfac.value_grad_and_curvature`][] or
            [`eqx_kfac.curvature`][]; `None` keeps the average as it is.
        - `value`: the loss, if it is at hand; a step is rejected if it is not finite.

        **Returns:** `(updates, state)`; apply with `eqx.apply_updates`.
        """
        grads = eqx.filter(grads, eqx.is_inexact_array)
        state = self._prepare(state, grads if model is None else model)
        value = jnp.zeros(()) if value is None else value
        averaged = state.curvature, state.weight, all_finite((value, tree_norm(grads)))
        if curvature is not None:
            old, weight, finite = averaged
            *new, finite_too = average(old, weight, curvature, state.ema)
            averaged = *tree_where(finite, new, [old, weight]), finite & finite_too
        updates, state, _ = self._advance(grads, model, state, averaged, value, None)
        return updates, state

    def _prepare(self, state: KFACState, model: Model) -> KFACState:
        """The state with scheduled numbers at their value of this step. Raises
        if it is the state of something else, or if parameters are not covered."""

        def now(name):
            chosen, value = getattr(self, name), getattr(state, name)
            if callable(chosen):
                return at(chosen, state.step)
            return value if eqx.is_array(value) else at(value, state.step)

        state = dataclasses.replace(state, **{name: now(name) for name in NUMBERS})
        check_same_shapes(state, eqx.filter_eval_shape(self.init, model))
        return state

    def _collect(
        self,
        linearisation: Linearisation,
        state: KFACState,
        finite: Bool[Array, ""],
        key: Key | None,
    ) -> tuple[Model, Float[Array, ""], Bool[Array, ""]]:
        """The averaged curvature and its weight, with this step's if one is due; and
        whether all is finite so far."""
        first = state.weight == 0

        def estimate(averaged, key, ema):
            curvature, weight, finite = averaged
            new = linearisation.curvature(self.fisher, key)
            curvature, weight, finite_too = average(curvature, weight, new, ema)
            return curvature, weight, finite & finite_too

        def burn_in(index, averaged):
            index_key = None if key is None else jax.random.fold_in(key, index)
            return estimate(averaged, index_key, jnp.where(first, 1, state.ema))

        averaged = (state.curvature, state.weight, finite)

        def collect():
            if self.burn_in == 0:
                return estimate(averaged, key, state.ema)
            number = jnp.where(first, 1 + self.burn_in, 1)
            return jax.lax.fori_loop(0, number, burn_in, averaged)

        return when_due(
            state.step, state.weight, self.curvature_period, collect, averaged, finite
        )

    def _advance(self, grads, model, state, averaged, value, aux):
        """Factorise (if due), precondition, constrain, add momentum."""
        curvature, weight, finite = averaged
        inverse = when_due(
            state.step,
            state.weight,
            self.inverse_period,
            lambda: refactorise(
                state.inverse, curvature, model, self.solver, state.damping
            ),
            state.inverse,
            finite,
        )
        gradient, _ = partition_tagged(grads)
        natural = precondition(gradient, curvature, inverse, self.solver, state.damping)
        scale = state.learning_rate
        if state.norm_constraint is not None:
            norm = scale**2 * tree_dot(natural, gradient).astype(scale.dtype)
            factor = jnp.sqrt(state.norm_constraint / jnp.maximum(norm, 1e-30))
            scale = scale * jnp.minimum(1, factor)
        velocity = jtu.tree_map(
            lambda d, v: state.momentum.astype(v.dtype) * v - scale.astype(d.dtype) * d,
            natural,
            state.velocity,
        )
        others, fallback = update_fallback(grads, state.fallback, model, self.fallback)
        updates = eqx.combine(velocity, others)

        # Cheaper than looking at every number; a norm that overflows has diverged too.
        update_norm = tree_norm(updates)
        finite = finite & all_finite(update_norm)
        updates = jtu.tree_map(lambda u: jnp.where(finite, u, 0), updates)
        velocity, fallback = tree_where(
            finite, (velocity, fallback), (state.velocity, state.fallback)
        )
        info = Info(
            loss=value,
            aux=aux,
            learning_rate=state.learning_rate,
            momentum=state.momentum,
            damping=state.damping,
            gradient_norm=tree_norm(grads),
            update_norm=jnp.where(finite, update_norm, 0),
            rejected=~finite,
        )
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            curvature=curvature,
            inverse=inverse,
            weight=weight,
            velocity=velocity,
            fallback=fallback,
            rejected=state.rejected + (~finite).astype(jnp.int32),
        )
        return updates, state, info
