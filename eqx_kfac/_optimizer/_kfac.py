import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float

from .._checks import check_count, plain
from .._curvature import Batch, GradientRows, LinearisedBatch, ValueAndGrads
from .._custom_types import Key, Model, Numeric
from .._devices import beside, cast_varying, putting, varying_axes, zeros_split_as
from .._fisher import AbstractFisher, Centred, MonteCarlo
from .._misc import by_path
from .._module import replaced
from .._raw import check_covered
from .._solver import AbstractDampedSolver
from .._tag import partition_tagged
from ._arguments import check_init, check_step, check_update
from ._choices import (
    check_choices,
    check_given,
    check_without_loss,
    resolved,
    Rules,
    rules_of,
)
from ._collect import Average, collect
from ._damping import AbstractDamping, LevenbergMarquardt
from ._extent import init_extent
from ._factors import check_belongs, init_factors
from ._fallback import init_fallback
from ._guard import AbstractGuard
from ._hyperparameters import chosen_by, current, initial, MovingAverage, WeightDecay
from ._layer_damping import AbstractLayerDamping, init_layer_damping
from ._quadratic import AbstractStepRule, QuadraticModel
from ._rollback import init_rollback
from ._said import optimizer_said
from ._schedule import Due, early, Staggered
from ._start import Start, start
from ._state import Info, init_average, init_faults, KFACState
from ._step import take_step
from ._trial import Trial
from ._trust import AbstractTrustRegion


_Model = TypeVar("_Model")
Auto: TypeAlias = Literal["auto"]


class KFAC(eqx.Module):
    r"""K-FAC: natural gradient descent with Kronecker-factored curvature.

    One step is

    $$\delta = -\alpha \hat F^{-1} \nabla h + \mu \, \delta_\text{prev}, \qquad
    \theta \leftarrow \theta + \delta$$

    with $\hat F = \hat G \otimes \hat A + (\lambda + \eta) I$ for every tagged layer.
    The factors $\hat G$ and $\hat A$ are averages over the steps so far, $\lambda$ is
    the damping, and $\eta$ the coefficient of an [`eqx_kfac.L2`][] term. The object only
    holds choices; everything that changes is in its state. Jit, scan, shard and donate as
    you like.

    Without arguments, it is what "How to choose" recommends: steps within a trust region
    that shrinks with the loss, and averaged parameters, which are the ones to evaluate.
    Any number may be an optax schedule instead: a function of the step. `init` copies
    numbers into the state; change them there, at any time and without
    recompiling: `eqx.tree_at(lambda s: s.damping, state, jnp.array(1e-2))`. Learning rate
    and momentum may also be chosen by an [`eqx_kfac.QuadraticModel`][], and the damping
    by [`eqx_kfac.LevenbergMarquardt`][].

    !!! Example

        ```python
        optimizer = kfac.KFAC()
        state = optimizer.init(model)

        @eqx.filter_jit
        def train_step(model, state, x, y, key):
            return optimizer.step(loss_fn, model, state, x, y, key=key)

        model, state, info = train_step(model, state, x, y, key)
        trained = kfac.averaged(model, state)  # To be evaluated.
        ```

    ??? cite "Reference"

        J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature*, ICML 2015. The norm constraint is that of J. Ba,
        R. Grosse, J. Martens, *Distributed Second-Order Optimization using
        Kronecker-Factored Approximations*, ICLR 2017, section 5.
    """

    learning_rate: Numeric | AbstractStepRule = eqx.field(converter=plain)
    momentum: Numeric | AbstractStepRule = eqx.field(converter=plain)
    damping: Numeric | AbstractDamping | AbstractLayerDamping = eqx.field(converter=plain)
    fisher: AbstractFisher
    solver: AbstractDampedSolver
    norm_constraint: Numeric | AbstractTrustRegion | None = eqx.field(converter=plain)
    guard: AbstractGuard | None
    weight_decay: Numeric | WeightDecay | None = eqx.field(converter=plain)
    averaging: Numeric | None = eqx.field(converter=plain)
    curvature_period: int = eqx.field(static=True, converter=plain)
    inverse_period: int | Staggered = eqx.field(static=True, converter=plain)
    ema: Numeric | MovingAverage = eqx.field(converter=plain)
    fallback: optax.GradientTransformation | None
    # The names of the periods that were left to the library: work that they govern is
    # also due at some of the first steps.
    _early: frozenset[str] = eqx.field(static=True, repr=False)
    # Whether gradients are preconditioned through their rows, where that is less work.
    _by_rows: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Numeric | AbstractStepRule = 0.1,
        momentum: Numeric | AbstractStepRule = 0.9,
        damping: Numeric | AbstractDamping | AbstractLayerDamping | Auto = "auto",
        *,
        fisher: AbstractFisher = MonteCarlo(),
        solver: AbstractDampedSolver | Auto = "auto",
        norm_constraint: Numeric | AbstractTrustRegion | Auto | None = "auto",
        guard: AbstractGuard | None = None,
        weight_decay: Numeric | WeightDecay | None = None,
        averaging: Numeric | Auto | None = "auto",
        curvature_period: int | Auto = "auto",
        inverse_period: int | Staggered | Auto = "auto",
        ema: Numeric | MovingAverage = 0.95,
        fallback: optax.GradientTransformation | None = None,
    ):
        r"""**Arguments:**

        - `learning_rate`: $\alpha > 0$, or [`eqx_kfac.QuadraticModel`][].
        - `momentum`: $\mu \in [0, 1)$, how much of the previous update is used again; or
            [`eqx_kfac.QuadraticModel`][].
        - `damping`: $\lambda \ge 0$, added to the curvature, in units of the loss per
            squared parameter; or [`eqx_kfac.LevenbergMarquardt`][]; or
            [`eqx_kfac.LayerDamping`][]`()`, which is what `"auto"` stands for.
        - `fisher`: which curvature is estimated; see [`eqx_kfac.MonteCarlo`][].
        - `solver`: how the damped curvature is inverted: [`eqx_kfac.Cholesky`][] (fast,
            factored damping) or [`eqx_kfac.Eigh`][] (exact damping). `"auto"` stands for
            `Cholesky()`, or `Cholesky(scaled_bias=True)` with a `LayerDamping`.
        - `norm_constraint`: $c > 0$ or `None`. The preconditioned gradient is scaled so
            that $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c$. Or an
            [`eqx_kfac.TrustRegion`][]`()`, which is what `"auto"` stands for.
        - `guard`: which steps are not taken: [`eqx_kfac.MaxIncrease`][] rejects a step
            after which the loss, on the same batch, has risen by too much. `None`: no
            check, which saves a forward pass.
        - `weight_decay`: $\beta \ge 0$ or `None`, decoupled from the objective: $\theta
            \leftarrow \theta + \delta - \alpha \beta \theta$; for some of the parameters
            only: [`eqx_kfac.WeightDecay`][].
        - `averaging`: $\xi \in [0, 1]$ or `None`: keep an average of the parameters; see
            [`eqx_kfac.averaged`][]. `"auto"` stands for [`eqx_kfac.Window`][]`()`. Or
            [`eqx_kfac.ScheduleFree`][]`()`: gradients are those near the average.
        - `curvature_period`: curvature is estimated every so many steps. `"auto"`: every
            10 steps, but at first at steps 0, 1, 2, 3, 4, 6, 8, 12 and 16.
        - `inverse_period`: curvature is factorised every so many steps. `"auto"`: every
            50 steps, but at first at steps 0, 1, 2, 3, 4, 6, 8, 12, and so on up to 96.
            [`eqx_kfac.Staggered`][]`(50)`: some layers at every step, in turn.
        - `ema`: $\rho \in [0, 1]$, the decay of the moving average of the curvature; or
            [`eqx_kfac.MovingAverage`][].
        - `fallback`: an optax optimizer for the parameters that no tag covers, e.g.
            `optax.adam(1e-3)`. It gets gradients that point in the direction of steepest
            ascent (of complex parameters, the conjugates of what JAX returns), and its
            updates are applied unchanged.

        If a rule chooses learning rate, momentum or damping anew at every step, `"auto"`
        stands for a damping of 0.03, no norm constraint, no averaging, and periods of 1
        and 5.

        If a layer sees fewer rows (examples, positions) than it has features, its
        gradient is preconditioned row by row: less work, the same step. This is checked
        at every step. If a gradient does not consist of these rows alone (a penalty on
        the weights), it is preconditioned as a matrix, as it always is with an `L2` term,
        with micro-batches, and in a `shard_map` around the step.

        **Raises:** `ValueError` for a number out of its range or choices that exclude
        each other, `TypeError` for something of another kind.
        """
        numbers = dict(learning_rate=learning_rate, momentum=momentum, damping=damping)
        numbers |= dict(norm_constraint=norm_constraint, ema=ema)
        numbers |= dict(weight_decay=weight_decay, averaging=averaging)
        periods = dict(curvature_period=curvature_period, inverse_period=inverse_period)
        parts = dict(fisher=fisher, solver=solver, guard=guard, fallback=fallback)
        chosen, self._early = resolved({**numbers, **periods, **parts})
        for name, value in chosen.items():
            setattr(self, name, value)
        check_choices(chosen)

    @classmethod
    def full_batch(cls, **choices: Any) -> "KFAC":
        r"""K-FAC for an objective that is the same at every step, or nearly so: all data
        at once, the points of a differential equation. Such an objective has next to no
        noise, and may fall by many orders of magnitude.

        Learning rate and momentum minimise the quadratic model of the objective. Every
        other step, the damping is doubled or halved (times 0.7 squared) if that model
        predicts the loss badly or well; it does not fall if it is less than 3 % of the
        curvature along the step. So no number has a unit, and none has to be tuned.
        Curvature is estimated every five steps. As it has little noise, older estimates
        soon lose their weight. "How to choose" has results.

        !!! Example

            ```python
            optimizer = kfac.KFAC.full_batch()
            ```

        **Arguments:**

        - `choices`: arguments of [`eqx_kfac.KFAC`][] that take the place of these.

        **Returns:** the optimizer.

        **Raises:** as [`eqx_kfac.KFAC`][].

        ??? cite "Reference"

            J. Martens and R. Grosse, *Optimizing Neural Networks with Kronecker-factored
            Approximate Curvature*, ICML 2015, sections 6.4 to 7, where the damping
            changes more slowly: for minibatches.
        """
        rule = QuadraticModel()
        damping = LevenbergMarquardt(
            1.0, decay=0.7, interval=2, minimum=1e-12, negligible=0.03
        )
        chosen = dict(learning_rate=rule, momentum=rule, damping=damping, ema=0.5)
        return cls(**{**chosen, "curvature_period": 5, **choices})

    @classmethod
    def vmc(cls, **choices: Any) -> "KFAC":
        r"""K-FAC for variational Monte Carlo: an [`eqx_kfac.Energy`][] whose walkers are
        drawn anew from $\lvert \psi \rvert^2$ at every step. An energy that is estimated
        from walkers drawn before a step does not tell whether the step was good. So no
        number is chosen by a rule that compares losses, and no trust region shrinks.

        Steps are those of stochastic reconfiguration: the covariance
        ([`eqx_kfac.Centred`][]), a learning rate of $0.1 / (1 + t / 1000)$ per Hartree at
        step $t$, a constant damping and norm constraint, no momentum. Curvature is
        estimated, and inverted, at every tenth step, and more often among the first
        twenty, as by [`eqx_kfac.KFAC`][]. The parameters to evaluate are
        [`eqx_kfac.averaged`][]. The blocks of the model have to be able to subtract a
        mean: [`eqx_kfac.TNT`][], [`eqx_kfac.Kronecker`][], [`eqx_kfac.Diagonal`][],
        [`eqx_kfac.Full`][].

        !!! Example

            ```python
            wave = kfac.convert(wave, kfac.TNT())
            optimizer = kfac.KFAC.vmc()
            ```

        **Arguments:**

        - `choices`: arguments of [`eqx_kfac.KFAC`][] that take the place of these.

        **Returns:** the optimizer.

        **Raises:** as [`eqx_kfac.KFAC`][].

        ??? cite "Reference"

            D. Pfau, J. Spencer, A. Matthews, W. Foulkes, *Ab initio solution of the
            many-electron Schrödinger equation with deep neural networks*, Physical Review
            Research 2, 2020, whose schedule, damping and norm constraint have this form.
        """
        chosen = dict(
            learning_rate=_vmc_rate,
            momentum=0.0,
            damping=3e-3,
            fisher=Centred(),
            norm_constraint=0.03,
        )
        periods = dict(curvature_period=10, inverse_period=10)
        optimizer = cls(**{**chosen, **periods, **choices})
        return replaced(optimizer, "_early", optimizer._early | {*periods} - {*choices})

    @putting
    def init(self, model: Model) -> KFACState:
        """**Arguments:**

        - `model`: the model, or the part of it that is trained. Needs no batch, no key.

        **Returns:** the initial state.

        **Raises:** `ValueError` naming the parameters that no tagged layer covers, unless
        there is a `fallback`.
        """
        check_init(model)
        check_covered(model, self.fallback)
        tagged, _ = partition_tagged(model)
        curvature, inverse, known = init_factors(model, self.solver)
        state = self._init_with(
            curvature=curvature,
            inverse=inverse,
            known=known,
            velocity=jtu.tree_map(zeros_split_as, by_path(tagged)),
            layer_damping=init_layer_damping(self._rules.layer_damping, curvature, model),
            fallback=init_fallback(model, self.fallback),
            averaged_parameters=init_average(self.averaging, model),
            rollback=init_rollback(model),
        )
        state = beside(state, model)
        # Within `shard_map`, every device may have a model of its own.
        return cast_varying(state, varying_axes(model))

    def _init_with(self, **trees: Any) -> KFACState:
        """The initial state, given the `trees` in it that depend on the model."""
        step = jnp.zeros((), jnp.int32)
        rules = self._rules
        bounded = rules.norm_constraint is not None
        return KFACState(
            step=step,
            extent=init_extent(rules.schedule_free is not None) if bounded else None,
            weight=jnp.zeros((), float),
            refactorise=jnp.zeros((), bool),
            rejected=jnp.zeros((), jnp.int32),
            faults=init_faults(),
            hyperparameters=initial(self._hyperparameters, step),
            **trees,
        )

    def step(
        self,
        loss_fn: Callable,
        model: _Model,
        state: KFACState,
        /,
        *args: Any,
        key: Key | None = None,
        micro_batches: int = 1,
        **kwargs: Any,
    ) -> tuple[_Model, KFACState, Info]:
        """One step: estimate the curvature (if due), factorise it (if due), update.

        **Arguments:**

        - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss (such as
            `kfac.SoftmaxCrossEntropy`), a sum of losses and scalars, or `(loss, aux)`.
        - `model`, `state`: as returned from the previous step.
        - `args`, `kwargs`: for `loss_fn`: the batch, dropout keys, an `eqx.nn.State`, ...
        - `key`: randomness for the Fisher estimate; not passed to `loss_fn`.
        - `micro_batches`: split the batch into so many parts of equal size, and go
            through them one after the other: the same step in less memory. The arrays
            among `args` (those with at least one axis) are split along their first axis;
            `kwargs` are passed on whole. So one dropout key means the same mask for every
            part, while keys of single examples, among `args`, do not. The parts' `aux`
            are stacked.

        **Returns:** `(model, state, info)`. If something is not finite, or the loss rises
        by more than the `guard` allows, or `info.faults` reports anything else but
        `waiting` and `factorisation`, `info.rejected` is true, and parameters and state
        stay as they are (except for counters, a damping that adapts, curvature that was
        itself finite, the record of losses, and the momentum of a step that led uphill,
        which starts again from zero). If the loss has diverged, the parameters go back to
        the last good ones. What else the loss function returned is from a bad batch: see
        `info.select`.

        **Raises:** `TypeError` for arguments in another order, and for a loss function
        that returns no loss; `ValueError` without a `key` where the estimate draws
        numbers, for a state of another model, for a batch that cannot be split, and for
        parameters that reach the losses by another way than through their tag.
        """
        check_step(loss_fn, model, state, key)
        micro_batches = check_count("micro_batches", micro_batches, 1)
        state = self._prepare(state, model)
        batch = Batch(loss_fn, args, kwargs, micro_batches)
        program = batch.analyse(model, trains=True)
        slots = batch.row_slots(model, program) if self._by_rows else None
        due = self._due(state, "curvature_period")
        # If statistics are collected at every step, gradients share their forward pass.
        # Otherwise most steps are cheaper without tags in it, for some tags copy
        # parameters for each example.
        collects = due.period == 1
        linearised = batch.linearise(model, state.curvature, slots, program, collects)
        found = linearised.value_and_grads()
        begun = start(found, state, self._rules)

        def estimate(before):
            arguments = linearised, self.fisher, state.ema, self._burn_in, key, due
            return collect(before, *arguments, begun.teaches)

        updates, state, info = self._updates(
            model, state, estimate, due, begun, found.rows, linearised
        )
        info = dataclasses.replace(info, aux=found.aux)
        return state.rollback.restored(eqx.apply_updates(model, updates)), state, info

    def update(
        self,
        grads: Model,
        state: KFACState,
        model: Model,
        *,
        curvature: Model | None,
        value: Float[Array, ""] | None = None,
    ) -> tuple[Model, KFACState]:
        """A step with gradients and curvature from anywhere, as in optax. Nothing
        measures how long steps are here: a [`eqx_kfac.LayerDamping`][] is larger than in
        `step`.

        **Arguments:**

        - `grads`: shaped like the model, as `jax.grad` returns them: of a complex
            parameter, the conjugate of the direction of steepest ascent.
        - `state`, `model`: as in `step`. `model` may be filtered to its arrays.
        - `curvature`: from [`eqx_kfac.value_grad_and_curvature`][] or
            [`eqx_kfac.curvature`][]; `None` keeps the average as it is (steps are
            rejected until there is one).
        - `value`: the loss; a step is rejected if it is not finite. It may be left out if
            no choice of the optimizer needs it.

        **Returns:** `(updates, state)`; apply with `eqx.apply_updates`.

        **Raises:** `ValueError` if a choice of the optimizer needs the loss function:
        `kfac.QuadraticModel`, `kfac.LevenbergMarquardt`, a `guard`; or if it needs what
        is `None`: the `model` (`averaging`), the `value` (`kfac.TrustRegion`).
        """
        check_without_loss(vars(self), "update")
        check_update(grads, state, model, value)
        check_given(vars(self), model=model, value=value)
        grads = eqx.filter(grads, eqx.is_inexact_array)
        state = self._prepare(state, grads if model is None else model)
        # Losses are compared with earlier ones, if the parameters could go back then.
        watched = value is not None and model is not None
        value = jnp.zeros(()) if value is None else jnp.asarray(value)
        begun = start(ValueAndGrads(value, grads), state, self._rules, watched)
        estimated = grads, curvature, state.ema, begun.teaches
        estimate = lambda before: before.including(*estimated)
        due = Due.of(state, period=1)
        updates, state, _ = self._updates(model, state, estimate, due, begun)
        return (state.rollback.restoring(updates, model) if watched else updates), state

    def __str__(self) -> str:
        return optimizer_said(vars(self), self._early)

    @property
    def _rules(self) -> Rules:
        return rules_of(vars(self))

    _hyperparameters = property(chosen_by)

    @property
    def _burn_in(self) -> int:
        return self.ema.burn_in if isinstance(self.ema, MovingAverage) else 0

    def _prepare(self, state: KFACState, model: Model) -> KFACState:
        """The state with scheduled numbers at their value of this step. Raises
        if it is the state of something else, or if parameters are not covered."""
        numbers = current(self._hyperparameters, state.hyperparameters, state.step)
        state = state._replace(hyperparameters=numbers)
        check_belongs(state, self.init, model)
        return state

    def _due(
        self, state: KFACState, name: str, again: Bool[Array, ""] | bool = False
    ) -> Due:
        """When curvature is estimated, or factorised (the period of this `name`), and
        whenever it is due `again`. A period that was left to the library also has turns
        at the first steps."""
        due = Due.of(state, getattr(self, name), again)
        if name not in self._early:
            return due
        return due._replace(again=early(state.step, due.period) | again)

    def _updates(
        self,
        model: Model,
        state: KFACState,
        estimate: Callable[[Average], Average],
        due: Due,
        begun: Start,
        rows: GradientRows | None = None,
        linearised: LinearisedBatch | None = None,
    ) -> tuple[Model, KFACState, Info]:
        """The updates of a step, the next state, and what is to be said of the step."""
        trial = Trial(
            rules=self._rules,
            guard=self.guard,
            solver=self.solver,
            state=state,
            model=model,
            start=begun,
            rows=rows,
            linearised=linearised,
            averaged=Average(state.curvature, state.weight, begun.fine, state.known),
        )

        def due_inverse(newly_known):  # Whether a layer has got its first curvature.
            again = state.refactorise | newly_known
            return self._due(state, "inverse_period", again)

        others = self.fallback, self.weight_decay
        return take_step(trial, estimate, due, due_inverse, *others)


def _vmc_rate(step: Array) -> Array:
    return 0.1 / (1 + step / 1000)
