import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float

from ._batch import Batch, LinearisedBatch
from ._custom_types import Key, Model
from ._damping import LevenbergMarquardt
from ._factorise import init_inverse, refactorise, Turns, when_in_turn
from ._fisher import AbstractFisher, MonteCarlo
from ._misc import (
    all_finite,
    cast_varying,
    check_count,
    check_same_shapes,
    masked,
    tree_dot,
    tree_norm,
    tree_where,
    varying_axes,
)
from ._pack import check_packed, init_packed
from ._precondition import (
    average,
    check_covered,
    has_bases,
    in_bases_of,
    init_curvature,
    init_fallback,
    is_finite,
    partition_tagged,
    precondition,
    refreshed,
    update_fallback,
)
from ._quadratic import quadratic, QuadraticModel
from ._schedule import (
    at,
    check_instance,
    check_number,
    check_preconditioner,
    when_due,
)
from ._solver import AbstractDampedSolver, Cholesky
from ._state import count, Faults, Info, init_faults, init_iterates, KFACState, NUMBERS


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
    recompiling: `eqx.tree_at(lambda s: s.damping, state, jnp.array(1e-2))`. Learning rate
    and momentum may also be chosen by an [`eqx_kfac.QuadraticModel`][], the damping by
    [`eqx_kfac.LevenbergMarquardt`][].

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
    damping_ratio: Any
    norm_constraint: Any
    max_increase: Any
    weight_decay: Any
    weight_decay_mask: Any
    averaging: Any
    curvature_period: int = eqx.field(static=True)
    curvature_examples: int | None = eqx.field(static=True)
    inverse_period: int = eqx.field(static=True)
    in_turn: bool = eqx.field(static=True)
    packed: bool = eqx.field(static=True)
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
        damping_ratio: Any = 1.0,
        norm_constraint: Any = None,
        max_increase: Any = None,
        weight_decay: Any = None,
        weight_decay_mask: Any = None,
        averaging: Any = None,
        curvature_period: int = 1,
        curvature_examples: int | None = None,
        inverse_period: int = 5,
        in_turn: bool = False,
        packed: bool = False,
        ema: Any = 0.95,
        burn_in: int = 0,
        fallback: optax.GradientTransformation | None = None,
    ):
        r"""**Arguments:**

        - `learning_rate`: $\alpha > 0$, or [`eqx_kfac.QuadraticModel`][].
        - `momentum`: $\mu \in [0, 1)$, how much of the previous update is taken again; or
            [`eqx_kfac.QuadraticModel`][].
        - `damping`: $\lambda \ge 0$, added to the curvature, in units of the loss per
            squared parameter; or [`eqx_kfac.LevenbergMarquardt`][].
        - `fisher`: which curvature is estimated; see [`eqx_kfac.MonteCarlo`][].
        - `solver`: how the damped curvature is inverted: [`eqx_kfac.Cholesky`][] (fast,
            factored damping) or [`eqx_kfac.Eigh`][] (exact damping).
        - `damping_ratio`: the preconditioner is damped with this times `damping`, the
            quadratic model with `damping` itself.
        - `norm_constraint`: $c > 0$ or `None`. The preconditioned gradient is scaled so
            that $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c$.
        - `max_increase`: reject a step after which the loss, on the same batch, is not
            finite or has risen by more than this. `None`: do not look, which saves a
            forward pass. `jnp.inf`: only steps to where the loss is not finite.
        - `weight_decay`: $\beta \ge 0$ or `None`, decoupled from the objective: $\theta
            \leftarrow \theta + \delta - \alpha \beta \theta$ for the parameters that
            tags cover. (To regularise the objective, add [`eqx_kfac.L2`][] to the loss.)
        - `weight_decay_mask`: which parameters decay, a filter as in `eqx.filter`: a
            function of a leaf (`lambda p: p.ndim > 1`) or a tree of booleans.
        - `averaging`: $\xi \in [0, 1]$ or `None`: keep an average of the parameters; see
            [`eqx_kfac.averaged`][].
        - `curvature_period`: curvature is estimated every so many steps.
        - `curvature_examples`: from the first so many examples of the batch, or from all.
        - `inverse_period`: it is factorised every so many steps.
        - `in_turn`: not all layers at the same step, but some at every step, so that
            every layer has its turn once in `inverse_period` steps: as much work, evenly
            spread.
        - `packed`: of every symmetric matrix in the state (factors, explicit inverses),
            keep one triangle: about half of the bytes, the same steps. To look at them:
            [`eqx_kfac.unpacked`][].
        - `ema`: $\rho \in [0, 1]$, the decay of the moving average of the curvature. 1 is
            the mean over all steps; 0 keeps only the latest estimate.
        - `burn_in`: how many more estimates of the curvature are averaged on the first
            batch (that is finite), before the first step.
        - `fallback`: an optax optimizer for the parameters that no tag covers, e.g.
            `optax.adam(1e-3)`. Its updates are applied as they come.

        **Raises:** `ValueError` for a number out of its range or choices that exclude
        each other, `TypeError` for something of another kind.
        """
        if not isinstance(learning_rate, QuadraticModel):
            check_number("learning_rate", learning_rate, lambda v: v > 0, "positive")
        if not isinstance(momentum, QuadraticModel):
            check_number("momentum", momentum, lambda v: 0 <= v < 1, "in [0, 1)")
        adaptive = isinstance(damping, LevenbergMarquardt)
        initial = damping.initial if adaptive else damping
        check_preconditioner(initial, solver, inverse_period, ema, fallback)
        check_instance("fisher", fisher, AbstractFisher, "kfac.MonteCarlo()")
        check_number("damping_ratio", damping_ratio, lambda v: v > 0, "positive")
        optional = [
            ("norm_constraint", norm_constraint, lambda v: v > 0, "positive"),
            ("max_increase", max_increase, lambda v: v >= 0, "at least 0"),
            ("weight_decay", weight_decay, lambda v: v >= 0, "at least 0"),
            ("averaging", averaging, lambda v: 0 <= v <= 1, "in [0, 1]"),
        ]
        for name, value, valid, range_ in optional:
            if value is not None:
                check_number(name, value, valid, range_)
        check_count("curvature_period", curvature_period, 1)
        check_count("burn_in", burn_in, 0)
        if curvature_examples is not None:
            check_count("curvature_examples", curvature_examples, 1)
        if weight_decay is None and weight_decay_mask is not None:
            raise ValueError("`weight_decay_mask` is given, but no `weight_decay`.")
        rules = [r for r in (learning_rate, momentum) if isinstance(r, QuadraticModel)]
        if rules and norm_constraint is not None and rules[0] is learning_rate:
            raise ValueError(
                "`norm_constraint` bounds the step that a given learning rate makes; a "
                "`kfac.QuadraticModel()` finds the length itself. Leave one of them out."
            )
        if len(rules) == 2 and rules[0] != rules[1]:
            raise ValueError(
                "One quadratic model chooses learning rate and momentum together, but "
                f"two different ones are given: {rules[0]} and {rules[1]}."
            )
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.damping = damping
        self.fisher = fisher
        self.solver = solver
        self.damping_ratio = damping_ratio
        self.norm_constraint = norm_constraint
        self.max_increase = max_increase
        self.weight_decay = weight_decay
        self.weight_decay_mask = weight_decay_mask
        self.averaging = averaging
        self.curvature_period = curvature_period
        self.curvature_examples = curvature_examples
        self.inverse_period = inverse_period
        self.in_turn = in_turn
        self.packed = packed
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
            iterates=None if self.averaging is None else init_iterates(model),
            refactorise=jnp.zeros((), bool),
            rejected=jnp.zeros((), jnp.int32),
            faults=init_faults(),
            **{name: at(self._initial(name), step) for name in NUMBERS},
        )
        state = init_packed(state) if self.packed else state
        # Within `shard_map`, every device may have a model of its own.
        return cast_varying(state, varying_axes(model))

    def step(
        self,
        loss_fn: Callable,
        model: Model,
        state: KFACState,
        /,
        *args: Any,
        key: Key | None = None,
        micro_batches: int = 1,
        **kwargs: Any,
    ) -> tuple[Model, KFACState, Info]:
        """One step: estimate the curvature (if due), factorise it (if due), update.

        **Arguments:**

        - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss (such as
            `kfac.SoftmaxCrossEntropy`), a sum of losses and scalars, or `(loss, aux)`.
        - `model`, `state`: as returned from the previous step.
        - `args`, `kwargs`: for `loss_fn`: the batch, dropout keys, an `eqx.nn.State`, ...
        - `key`: randomness for the Fisher estimate; not handed to `loss_fn`.
        - `micro_batches`: split the batch into so many parts of equal size, and go
            through them one after the other: the same step in less memory. The arrays
            among `args` (those with at least one axis) are split along their first axis;
            `kwargs` are handed on whole: one dropout key means the same mask for every
            part, keys of single examples, among `args`, do not. The parts' `aux` are
            stacked.

        **Returns:** `(model, state, info)`. If something is not finite, or the loss rises
        by more than `max_increase`, `info.rejected` is true, `info.faults` says why, and
        model and state stay as they are (but for counters, a damping that adapts, and
        curvature that was itself finite).
        """
        check_count("micro_batches", micro_batches, 1)
        state = self._prepare(state, model)
        batch = Batch(loss_fn, args, kwargs, micro_batches)
        linearised = batch.linearise(model, state.curvature)
        value, aux, grads = linearised.value_and_grads()
        averaged = self._collect(linearised, state, _fine(value, grads), key)
        return self._advance(model, state, averaged, value, grads, aux, linearised)

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

        **Raises:** `ValueError` if a choice of the optimizer needs the loss function:
        `kfac.QuadraticModel`, `kfac.LevenbergMarquardt`, `max_increase`; or the
        model: `averaging`.
        """
        self.check_without_loss("update")
        grads = eqx.filter(grads, eqx.is_inexact_array)
        state = self._prepare(state, grads if model is None else model)
        value = jnp.zeros(()) if value is None else value
        averaged = state.curvature, state.weight, _fine(value, grads)
        if curvature is not None:
            old, weight, finite = averaged
            curvature = in_bases_of(old, grads, curvature, weight == 0)
            finite = finite & all_finite(curvature)
            averaged = *average(old, weight, curvature, state.ema, finite), finite
        return self._updates(model, state, averaged, value, grads, None)[:2]

    def check_without_loss(self, where: str) -> None:
        """Raises if some choice needs the loss function at every step."""
        chosen = {
            "learning_rate": isinstance(self.learning_rate, QuadraticModel),
            "momentum": isinstance(self.momentum, QuadraticModel),
            "damping": isinstance(self.damping, LevenbergMarquardt),
            "max_increase": self.max_increase is not None,
            "averaging": self.averaging is not None,
        }
        needs = [f"`{name}={getattr(self, name)}`" for name, yes in chosen.items() if yes]
        if needs:
            raise ValueError(
                f"{', '.join(needs)} needs the loss function and the model, which "
                f"`{where}` does not have. Use `KFAC.step`, or a number instead."
            )

    def _initial(self, name: str) -> Any:
        """What a hyper-parameter is to begin with."""
        chosen = getattr(self, name)
        if isinstance(chosen, QuadraticModel):
            return jnp.zeros((), float)
        return chosen.initial if isinstance(chosen, LevenbergMarquardt) else chosen

    def _prepare(self, state: KFACState, model: Model) -> KFACState:
        """The state with scheduled numbers at their value of this step. Raises
        if it is the state of something else, or if parameters are not covered."""

        def now(name):
            chosen, value = getattr(self, name), getattr(state, name)
            if callable(chosen) and not isinstance(chosen, LevenbergMarquardt):
                return at(chosen, state.step)
            return value if eqx.is_array(value) else at(value, state.step)

        state = dataclasses.replace(state, **{name: now(name) for name in NUMBERS})
        expected = eqx.filter_eval_shape(self.init, model)
        check_packed(state, expected)
        check_same_shapes(state, expected)
        return state

    def _collect(
        self,
        linearised: LinearisedBatch,
        state: KFACState,
        fine: Bool[Array, ""],
        key: Key | None,
    ) -> tuple[Model, Float[Array, ""], Bool[Array, ""]]:
        """The averaged curvature and its weight, with this step's if one is due; and
        whether all is finite so far."""
        first = state.weight == 0

        def estimate(averaged, key, ema):
            curvature, weight, all_fine = averaged
            new = linearised.first(self.curvature_examples).curvature(self.fisher, key)
            take = fine & is_finite(new)
            return *average(curvature, weight, new, ema, take), all_fine & take

        def burn_in(index, averaged):
            index_key = None if key is None else jax.random.fold_in(key, index)
            return estimate(averaged, index_key, jnp.where(first, 1, state.ema))

        averaged = (state.curvature, state.weight, fine)

        def collect():
            if self.burn_in == 0:
                return estimate(averaged, key, state.ema)
            number = jnp.where(first, 1 + self.burn_in, 1)
            return jax.lax.fori_loop(0, number, burn_in, averaged)

        due = state.step, state.weight, self.curvature_period
        return when_due(*due, collect, averaged)

    def _advance(self, model, state, averaged, value, grads, aux, linearised):
        """Updates the model; see `_updates`."""
        updates, state, info = self._updates(
            model, state, averaged, value, grads, linearised
        )
        info = eqx.tree_at(lambda i: i.aux, info, aux, is_leaf=lambda x: x is None)
        return eqx.apply_updates(model, updates), state, info

    def _updates(
        self,
        model: Model,
        state: KFACState,
        averaged: tuple[Model, Float[Array, ""], Bool[Array, ""]],
        value: Float[Array, ""],
        grads: Model,
        linearised: LinearisedBatch | None,
    ) -> tuple[Model, KFACState, Info]:
        """Factorise (if due), precondition, choose the length, look (if due), decide."""
        curvature, weight, finite = averaged
        fine, first = _fine(value, grads), state.weight == 0
        number = self.inverse_period if self.in_turn else 1
        turns = Turns(grads, number)
        due = turns, state, self.inverse_period, finite
        if has_bases(grads):
            refresh = lambda curvature: refreshed(curvature, grads, self.solver)
            curvature, _ = when_in_turn(*due, refresh, curvature)
        trial = _Trial(self, model, state, curvature, value, grads, linearised)
        damping = trial.calibrated(first, finite)
        invert = lambda *trees: trial.factorise(damping, *trees)
        inverse, factorised = when_in_turn(*due, invert, state.inverse, curvature)
        proposal = trial.propose(damping, inverse)
        others, fallback = update_fallback(grads, state.fallback, model, self.fallback)
        updates = eqx.combine(proposal.velocity, others)

        # Cheaper than looking at every number; a norm that overflows has diverged too.
        update_norm = tree_norm(updates)
        finite_update = finite & all_finite(update_norm)
        new_loss, ratio = trial.look(damping, proposal, others)
        faults = Faults(
            loss=~all_finite(value),
            gradient=all_finite(value) & ~fine,
            curvature=fine & ~finite,
            factorisation=finite & ~factorised,
            update=finite & ~finite_update,
            increase=finite_update & trial.risen(new_loss),
        )
        rejected = faults.rejecting

        updates = self._decayed(updates, model, proposal.learning_rate, state)
        updates = jtu.tree_map(lambda u: jnp.where(rejected, 0, u), updates)
        old = state.velocity, state.fallback, state.learning_rate, state.momentum
        new = proposal.velocity, fallback, proposal.learning_rate, proposal.momentum
        velocity, fallback, learning_rate, momentum = tree_where(rejected, old, new)
        iterates = state.iterates
        if iterates is not None and state.averaging is not None:
            added = iterates.add(eqx.apply_updates(model, updates), state.averaging)
            iterates = tree_where(rejected, iterates, added)
        info = Info(
            loss=value,
            new_loss=new_loss,
            aux=None,
            learning_rate=proposal.learning_rate,
            momentum=proposal.momentum,
            damping=damping,
            reduction_ratio=ratio,
            gradient_norm=tree_norm(grads),
            update_norm=jnp.where(rejected, 0, update_norm),
            rejected=rejected,
            faults=faults,
        )
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            curvature=curvature,
            inverse=inverse,
            weight=weight,
            velocity=velocity,
            fallback=fallback,
            iterates=iterates,
            learning_rate=learning_rate,
            momentum=momentum,
            damping=trial.next_damping(damping, ratio, rejected),
            refactorise=rejected & isinstance(self.damping, LevenbergMarquardt),
            rejected=state.rejected + rejected.astype(jnp.int32),
            faults=count(state.faults, faults),
        )
        return updates, state, info

    def _decayed(self, updates, model, learning_rate, state):
        """The updates, with decoupled weight decay of the tagged parameters."""
        if state.weight_decay is None:
            return updates
        params, _ = partition_tagged(model)
        params = masked(params, self.weight_decay_mask)
        scale = learning_rate * state.weight_decay

        def decay(update, p):
            return update if p is None else update - scale.astype(p.dtype) * p

        is_none = lambda x: x is None
        return jtu.tree_map(decay, updates, params, is_leaf=is_none)


class _Proposal(NamedTuple):
    velocity: Model  # The update.
    learning_rate: Float[Array, ""]
    momentum: Float[Array, ""]
    predicted: Float[Array, ""] | None  # By the quadratic model; `None` without one.


class _Trial(eqx.Module):
    """What one step would do with a given damping."""

    optimizer: KFAC
    model: Model
    state: KFACState
    curvature: Model
    value: Float[Array, ""]
    grads: Model
    linearised: Any  # A `LinearisedBatch`; `None` if nothing here needs the loss.

    @property
    def rule(self) -> LevenbergMarquardt | None:
        damping = self.optimizer.damping
        return damping if isinstance(damping, LevenbergMarquardt) else None

    def factorise(
        self, damping: Float[Array, ""], inverse: Model, curvature: Model
    ) -> tuple[Model, Bool[Array, ""]]:
        """The inverse; the previous one, and false, if that is not finite."""
        return refactorise(
            inverse,
            curvature,
            self.model,
            self.optimizer.solver,
            damping * self.state.damping_ratio,
        )

    def propose(self, damping: Float[Array, ""], inverse: Model) -> _Proposal:
        r"""$\delta = \alpha d + \mu \delta_\text{prev}$."""
        optimizer, state = self.optimizer, self.state
        gradient, _ = partition_tagged(self.grads)
        natural = precondition(
            gradient,
            self.curvature,
            inverse,
            optimizer.solver,
            damping * state.damping_ratio,
        )
        direction = jtu.tree_map(jnp.negative, natural)
        learning_rate, momentum = state.learning_rate, state.momentum
        scale, predicted = learning_rate, None
        if state.norm_constraint is not None:
            norm = scale**2 * tree_dot(natural, gradient).astype(scale.dtype)
            factor = jnp.sqrt(state.norm_constraint / jnp.maximum(norm, 1e-30))
            scale = scale * jnp.minimum(1, factor)
        rules = [optimizer.learning_rate, optimizer.momentum]
        given = [None if isinstance(r, QuadraticModel) else r for r in rules]
        if None in given:
            fixed = [None if r is None else v for r, v in zip(given, [scale, momentum])]
            model = self._quadratic(damping, direction, state.velocity)
            coefficients = model.minimum(fixed)
            predicted = model(coefficients)
            if fixed[0] is None:
                scale = learning_rate = coefficients[0].astype(learning_rate.dtype)
            if fixed[1] is None:
                momentum = coefficients[1].astype(momentum.dtype)
        velocity = jtu.tree_map(
            lambda d, v: momentum.astype(v.dtype) * v + scale.astype(d.dtype) * d,
            direction,
            state.velocity,
        )
        return _Proposal(velocity, learning_rate, momentum, predicted)

    def look(self, damping: Float[Array, ""], proposal: _Proposal, others: Model):
        """The loss after the step, and the reduction ratio: NaN if they are not due,
        `None` if they never are."""
        nothing = jnp.full_like(self.value, jnp.nan)

        def when_rule_is_due(compute):
            if self.rule is None:
                return None
            return jax.lax.cond(self.rule.due(self.state.step), compute, lambda: nothing)

        if self.state.max_increase is not None:
            new_loss = self._new_loss(proposal, others)
        else:
            new_loss = when_rule_is_due(lambda: self._new_loss(proposal, others))
        if proposal.predicted is None:  # By now, only a rule asks for it.
            predicted = when_rule_is_due(
                lambda: self._predicted(damping, proposal, others)
            )
        else:
            predicted = self._predicted(damping, proposal, others)
        if new_loss is None or predicted is None:
            return new_loss, None
        return new_loss, self._ratio(new_loss, predicted)

    def risen(self, new_loss: Float[Array, ""] | None) -> Bool[Array, ""]:
        """Whether the loss, as far as it was looked at, forbids the step."""
        if new_loss is None:
            return jnp.zeros_like(self.value, bool)
        bad = ~jnp.isfinite(new_loss)
        most = self.state.max_increase
        if most is not None:
            return bad | ((new_loss - self.value).astype(most.dtype) > most)
        return bad if self.rule is None else bad & self.rule.due(self.state.step)

    def next_damping(
        self,
        damping: Float[Array, ""],
        ratio: Float[Array, ""] | None,
        rejected: Bool[Array, ""],
    ) -> Float[Array, ""]:
        """The damping of the next step."""
        if self.rule is None or ratio is None:
            return damping
        due = self.rule.due(self.state.step) | rejected
        ratio = jnp.where(rejected, jnp.nan, ratio)
        return jnp.where(due, self.rule(damping, ratio), damping)

    def calibrated(
        self, first: Bool[Array, ""], finite: Bool[Array, ""]
    ) -> Float[Array, ""]:
        """The damping of this step: before the first one, the rule is repeated until it
        leaves the damping alone, or turns round: then the larger one is taken."""
        damping, rule = self.state.damping, self.rule
        if rule is None or rule.calibration == 0:
            return damping

        def repeat(carry):
            damping, last, number, _ = carry
            inverse, _ = self.factorise(damping, self.state.inverse, self.curvature)
            proposal = self.propose(damping, inverse)
            _, others = partition_tagged(jtu.tree_map(jnp.zeros_like, self.grads))
            predicted = self._predicted(damping, proposal, others)
            ratio = self._ratio(self._new_loss(proposal, others), predicted)
            new = rule(damping, ratio)
            change = jnp.sign(new - damping)
            turned = change * last < 0
            new = jnp.where(turned, jnp.maximum(new, damping), new)
            return new, change, number + 1, turned | (change == 0)

        def again(carry):
            _, _, number, done = carry
            return ~done & (number < rule.calibration)

        def calibrate():
            start = damping, jnp.zeros_like(damping), jnp.zeros_like(self.state.step)
            return jax.lax.while_loop(again, repeat, (*start, ~finite))[0]

        return jax.lax.cond(first & finite, calibrate, lambda: damping)

    def _quadratic(self, damping: Float[Array, ""], *directions: Model) -> Any:
        """The quadratic model of the tagged parameters along `directions`."""
        gradient, _ = partition_tagged(self.grads)
        rules = [self.optimizer.learning_rate, self.optimizer.momentum]
        examples = [r.examples for r in rules if isinstance(r, QuadraticModel)]
        linearised = self.linearised.first(examples[0] if examples else None)
        return quadratic(linearised.gram(*directions), gradient, directions, damping)

    def _predicted(self, damping, proposal: _Proposal, others: Model):
        """The change of the loss that the quadratic model predicts, for parameters
        without a tag that their gradient does."""
        predicted = proposal.predicted
        if predicted is None:
            model = self._quadratic(damping, proposal.velocity)
            predicted = model(jnp.ones_like(model.vector))
        _, gradient = partition_tagged(self.grads)
        return predicted + tree_dot(gradient, others).astype(predicted.dtype)

    def _new_loss(self, proposal: _Proposal, others: Model) -> Float[Array, ""]:
        updates = eqx.combine(proposal.velocity, others)
        return self.linearised.value_at(eqx.apply_updates(self.model, updates))

    def _ratio(self, new_loss, predicted) -> Float[Array, ""]:
        change = new_loss - self.value
        ratio = change / predicted.astype(change.dtype)
        no_descent = (predicted >= 0) & ~jnp.isnan(new_loss)
        return jnp.where(no_descent, -jnp.inf, ratio)


def _fine(value: Float[Array, ""], grads: Model) -> Bool[Array, ""]:
    """Whether the loss and its gradient are finite."""
    return all_finite((value, tree_norm(grads)))
