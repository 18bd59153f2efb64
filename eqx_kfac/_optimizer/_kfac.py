import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float

from .._checks import check_count, plain
from .._curvature import (
    average,
    Batch,
    GradientRows,
    has_bases,
    include,
    is_finite,
    LinearisedBatch,
    refreshed,
)
from .._custom_types import Key, Model, Numeric
from .._devices import cast_varying, varying_axes, zeros_as_from
from .._fisher import AbstractFisher, MonteCarlo
from .._inverse import for_each, refactorise
from .._misc import masked, tree_where
from .._solver import AbstractDampedSolver
from .._tag import check_covered, partition_tagged
from ._arguments import check_init, check_step, check_update
from ._choices import (
    check_choices,
    check_given,
    check_without_loss,
    NUMBERS,
    resolved,
    Rules,
    rules_of,
)
from ._damping import AbstractDamping, calibrated
from ._fallback import init_fallback, update_fallback
from ._layer_damping import AbstractLayerDamping
from ._packing import init_factors
from ._quadratic import QuadraticModel
from ._schedule import at, early, when_due
from ._state import check_state, count, Info, init_faults, init_iterates, KFACState
from ._trial import Proposal, Start, start, Trial
from ._trust import AbstractTrustRegion
from ._turns import Turns, when_in_turn


_Model = TypeVar("_Model")
Auto: TypeAlias = Literal["auto"]


class KFAC(eqx.Module):
    r"""K-FAC: natural gradient descent with Kronecker-factored curvature.

    One step is

    $$\delta = -\alpha \hat F^{-1} \nabla h + \mu \, \delta_\text{prev}, \qquad
    \theta \leftarrow \theta + \delta$$

    with $\hat F = \hat G \otimes \hat A + (\lambda + \eta) I$ for every tagged layer,
    averaged over the steps so far ($\eta$ is the coefficient of an [`eqx_kfac.L2`][]
    term). The object only holds choices; all that changes is in its state. Jit, scan,
    shard and donate as you like.

    Without arguments, it is what "How to choose" recommends: steps within a trust region
    that shrinks with the loss, and averaged parameters, which are the ones to evaluate.
    Any number may be an optax schedule instead: a function of the step. Numbers are
    copied into the state by `init`; change them there, at any time and without
    recompiling: `eqx.tree_at(lambda s: s.damping, state, jnp.array(1e-2))`. Learning rate
    and momentum may also be chosen by an [`eqx_kfac.QuadraticModel`][], the damping by
    [`eqx_kfac.LevenbergMarquardt`][].

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

    learning_rate: Any = eqx.field(converter=plain)
    momentum: Any = eqx.field(converter=plain)
    damping: Any = eqx.field(converter=plain)
    fisher: AbstractFisher
    solver: AbstractDampedSolver
    damping_ratio: Any = eqx.field(converter=plain)
    norm_constraint: Any = eqx.field(converter=plain)
    max_increase: Any = eqx.field(converter=plain)
    weight_decay: Any = eqx.field(converter=plain)
    weight_decay_mask: Any
    averaging: Any = eqx.field(converter=plain)
    curvature_period: int = eqx.field(static=True, converter=plain)
    curvature_examples: int | None = eqx.field(static=True, converter=plain)
    inverse_period: int = eqx.field(static=True, converter=plain)
    in_turn: bool = eqx.field(static=True)
    through_rows: bool | Auto = eqx.field(static=True)
    packed: bool = eqx.field(static=True)
    ema: Any = eqx.field(converter=plain)
    burn_in: int = eqx.field(static=True, converter=plain)
    fallback: optax.GradientTransformation | None
    early: frozenset[str] = eqx.field(static=True)  # Periods that begin shorter.

    def __init__(
        self,
        learning_rate: Numeric | QuadraticModel = 0.1,
        momentum: Numeric | QuadraticModel = 0.9,
        damping: Numeric | AbstractDamping | AbstractLayerDamping | Auto = "auto",
        *,
        fisher: AbstractFisher = MonteCarlo(),
        solver: AbstractDampedSolver | Auto = "auto",
        damping_ratio: Numeric = 1.0,
        norm_constraint: Numeric | AbstractTrustRegion | Auto | None = "auto",
        max_increase: Numeric | None = None,
        weight_decay: Numeric | None = None,
        weight_decay_mask: Any = None,
        averaging: Numeric | Auto | None = "auto",
        curvature_period: int | Auto = "auto",
        curvature_examples: int | None = None,
        inverse_period: int | Auto = "auto",
        in_turn: bool = False,
        through_rows: bool | Auto = "auto",
        packed: bool = False,
        ema: Numeric = 0.95,
        burn_in: int = 0,
        fallback: optax.GradientTransformation | None = None,
    ):
        r"""**Arguments:**

        - `learning_rate`: $\alpha > 0$, or [`eqx_kfac.QuadraticModel`][].
        - `momentum`: $\mu \in [0, 1)$, how much of the previous update is taken again; or
            [`eqx_kfac.QuadraticModel`][].
        - `damping`: $\lambda \ge 0$, added to the curvature, in units of the loss per
            squared parameter; or [`eqx_kfac.LevenbergMarquardt`][]; or
            [`eqx_kfac.LayerDamping`][]`()`, which is what `"auto"` stands for.
        - `fisher`: which curvature is estimated; see [`eqx_kfac.MonteCarlo`][].
        - `solver`: how the damped curvature is inverted: [`eqx_kfac.Cholesky`][] (fast,
            factored damping) or [`eqx_kfac.Eigh`][] (exact damping). `"auto"` stands for
            `Cholesky()`; with a [`eqx_kfac.LayerDamping`][], `without_bias`.
        - `damping_ratio`: the preconditioner is damped with this times `damping`, the
            quadratic model with `damping` itself.
        - `norm_constraint`: $c > 0$ or `None`. The preconditioned gradient is scaled so
            that $\alpha^2 \langle \hat F^{-1} \nabla h, \nabla h \rangle \le c$. Or an
            [`eqx_kfac.TrustRegion`][]`()`, which is what `"auto"` stands for.
        - `max_increase`: reject a step after which the loss, on the same batch, is not
            finite or has risen by more than this. `None`: do not look, which saves a
            forward pass. `jnp.inf`: only steps to where the loss is not finite.
        - `weight_decay`: $\beta \ge 0$ or `None`, decoupled from the objective: $\theta
            \leftarrow \theta + \delta - \alpha \beta \theta$ for the parameters that
            tags cover. (To regularise the objective, add [`eqx_kfac.L2`][] to the loss.)
        - `weight_decay_mask`: which parameters decay, a filter as in `eqx.filter`: a
            function of a leaf (`lambda p: p.ndim > 1`) or a tree of booleans.
        - `averaging`: $\xi \in [0, 1]$ or `None`: keep an average of the parameters; see
            [`eqx_kfac.averaged`][]. `"auto"` stands for [`eqx_kfac.Window`][]`()`.
        - `curvature_period`: curvature is estimated every so many steps. `"auto"`: every
            10 steps, but at first at the steps 0, 1, 2, 4 and 8.
        - `curvature_examples`: from the first so many examples of the batch, or from all.
        - `inverse_period`: it is factorised every so many steps. `"auto"`: every 50
            steps, but at first at the steps 0, 1, 2, 4, 8, 16 and 32.
        - `in_turn`: not all layers (or all of a stack) at the same step, but some at
            every step, so that every one has its turn once in `inverse_period` steps: as
            much work, evenly spread.
        - `through_rows`: where a layer sees fewer rows (examples, positions) than it has
            features, precondition its gradient row by row: less work, the same steps.
            Looked at in every step: where a gradient is not made of these rows alone (an
            `L2` term, another penalty on the weights), it is preconditioned as a matrix.
            `"auto"`: unless there are micro-batches, or a `shard_map` around the step.
        - `packed`: of every symmetric matrix in the state (factors, explicit inverses),
            keep one triangle: about half of the bytes, the same steps. To look at them:
            [`eqx_kfac.unpacked`][].
        - `ema`: $\rho \in [0, 1]$, the decay of the moving average of the curvature. 1 is
            the mean over all steps; 0 keeps only the latest estimate.
        - `burn_in`: how many more estimates of the curvature are averaged on the first
            batch (that is finite), before the first step.
        - `fallback`: an optax optimizer for the parameters that no tag covers, e.g.
            `optax.adam(1e-3)`. Its updates are applied as they come.

        Where learning rate, momentum or damping is chosen by a rule, which looks at every
        step, `"auto"` stands for a damping of 0.03, no norm constraint, no averaging,
        periods of 1 and 5, and not going through the rows.

        **Raises:** `ValueError` for a number out of its range or choices that exclude
        each other, `TypeError` for something of another kind.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        chosen, self.early = resolved(given)
        for name, value in chosen.items():
            setattr(self, name, value)
        check_choices(chosen)

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
        curvature, inverse = init_factors(model, self.solver, self.packed)
        state = self._init_with(
            curvature=curvature,
            inverse=inverse,
            velocity=jtu.tree_map(jnp.zeros_like, tagged),
            layer_damping=self._init_layer_damping(curvature, model),
            fallback=init_fallback(model, self.fallback),
            iterates=None if self.averaging is None else init_iterates(model),
        )
        # Within `shard_map`, every device may have a model of its own.
        return cast_varying(state, varying_axes(model))

    def _init_with(self, **trees: Any) -> KFACState:
        """The initial state with what depends on the model."""
        step = jnp.zeros((), jnp.int32)
        bounded = self._rules.norm_constraint is not None
        return KFACState(
            step=step,
            extent=jnp.zeros((), float) if bounded else None,
            weight=jnp.zeros((), float),
            refactorise=jnp.zeros((), bool),
            rejected=jnp.zeros((), jnp.int32),
            faults=init_faults(),
            **{name: at(self._initial(name), step) for name in NUMBERS},
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
        - `key`: randomness for the Fisher estimate; not handed to `loss_fn`.
        - `micro_batches`: split the batch into so many parts of equal size, and go
            through them one after the other: the same step in less memory. The arrays
            among `args` (those with at least one axis) are split along their first axis;
            `kwargs` are handed on whole: one dropout key means the same mask for every
            part, keys of single examples, among `args`, do not. The parts' `aux` are
            stacked.

        **Returns:** `(model, state, info)`. If something is not finite, or the loss rises
        by more than `max_increase`, or anything else that `info.faults` tells of,
        `info.rejected` is true, and model and state stay as they are (but for counters, a
        damping that adapts, curvature that was itself finite, and the momentum of a step
        that led uphill, which starts again from zero). What else the loss function gave
        out is that of a bad batch: see `info.choose`.

        **Raises:** `ValueError` for `through_rows=True` together with `micro_batches`, or
        within a `shard_map`.
        """
        check_step(loss_fn, model, state, key)
        micro_batches = check_count("micro_batches", micro_batches, 1)
        state = self._prepare(state, model)
        batch = Batch(loss_fn, args, kwargs, micro_batches)
        program = batch.look(model, trains=True)
        wanted = self.through_rows
        if wanted == "auto":
            wanted = micro_batches == 1 and not varying_axes((args, kwargs))
        slots = batch.row_slots(model, program) if wanted else None
        linearised = batch.linearise(model, state.curvature, slots, program)
        value, aux, grads, rows = linearised.value_and_grads()
        begun = start(value, grads, state, self._rules)
        averaged = self._collect(linearised, state, begun.fine, key)
        updates, state, info = self._updates(
            model, state, averaged, begun, rows, linearised
        )
        info = dataclasses.replace(info, aux=aux)
        return eqx.apply_updates(model, updates), state, info

    def update(
        self,
        grads: Model,
        state: KFACState,
        model: Model,
        *,
        curvature: Model | None,
        value: Float[Array, ""] | None = None,
    ) -> tuple[Model, KFACState]:
        """The same step with gradients and curvature from anywhere, as optax has it.

        **Arguments:**

        - `grads`: shaped like the model.
        - `state`, `model`: as in `step`. `model` may be filtered to its arrays.
        - `curvature`: from [`eqx_kfac.value_grad_and_curvature`][] or
            [`eqx_kfac.curvature`][]; `None` keeps the average as it is (steps are
            rejected until there is one).
        - `value`: the loss; a step is rejected if it is not finite. It may be left out if
            no choice of the optimizer needs it.

        **Returns:** `(updates, state)`; apply with `eqx.apply_updates`.

        **Raises:** `ValueError` if a choice of the optimizer needs the loss function:
        `kfac.QuadraticModel`, `kfac.LevenbergMarquardt`, `max_increase`; or if it
        needs what is `None`: the `model` (`averaging`), the `value`
        (`kfac.TrustRegion`).
        """
        check_without_loss(vars(self), "update")
        check_update(grads, state, model, value)
        check_given(vars(self), model=model, value=value)
        grads = eqx.filter(grads, eqx.is_inexact_array)
        state = self._prepare(state, grads if model is None else model)
        value = jnp.zeros(()) if value is None else jnp.asarray(value)
        begun = start(value, grads, state, self._rules)
        old = state.curvature, state.weight
        averaged = (*old, begun.fine & (state.weight > 0))
        if curvature is not None:
            averaged = include(*old, grads, curvature, state.ema, begun.fine)
        return self._updates(model, state, averaged, begun, None, None)[:2]

    @property
    def _rules(self) -> Rules:
        return rules_of(vars(self))

    def _initial(self, name: str) -> Any:
        """What a hyper-parameter is to begin with."""
        rule, chosen = self._rules.of(name), getattr(self, name)
        if isinstance(rule, QuadraticModel):
            return jnp.zeros((), float)
        return chosen if rule is None else rule.initial

    def _prepare(self, state: KFACState, model: Model) -> KFACState:
        """The state with scheduled numbers at their value of this step. Raises
        if it is the state of something else, or if parameters are not covered."""

        def now(name):
            chosen, value = getattr(self, name), getattr(state, name)
            if callable(chosen) and self._rules.of(name) is None:
                return at(chosen, state.step)
            return value if eqx.is_array(value) else at(value, state.step)

        state = state._replace(**{name: now(name) for name in NUMBERS})
        check_state(state, eqx.filter_eval_shape(self.init, model))
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
        return when_due(
            *due, collect, averaged, again=self._early(state, "curvature_period")
        )

    def _early(self, state: KFACState, name: str) -> Bool[Array, ""] | bool:
        """Whether it is one of the first steps, at which more is due than a period says
        that begins shorter."""
        return name in self.early and early(state.step, getattr(self, name))

    def _updates(
        self,
        model: Model,
        state: KFACState,
        averaged: tuple[Model, Float[Array, ""], Bool[Array, ""]],
        begun: Start,
        rows: GradientRows | None,
        linearised: LinearisedBatch | None,
    ) -> tuple[Model, KFACState, Info]:
        """Factorise (if due), precondition, choose the length, look (if due), decide."""
        (curvature, weight, finite), grads = averaged, begun.grads
        turns = Turns(grads, self.inverse_period if self.in_turn else 1)
        again = state.refactorise | self._early(state, "inverse_period")
        state = state._replace(refactorise=again)
        due = turns, state, self.inverse_period, finite
        if has_bases(grads):
            refresh = lambda curvature: refreshed(curvature, grads, self.solver)
            curvature, _ = when_in_turn(*due, refresh, curvature)
        trial = Trial(
            rules=self._rules,
            solver=self.solver,
            state=state,
            model=model,
            start=begun,
            rows=rows,
            curvature=curvature,
            finite=finite,
            linearised=linearised,
        )

        def factorise(inverse, curvature, strength):
            return refactorise(inverse, curvature, grads, self.solver, strength)

        damping = self._calibrated(trial, factorise)
        each = self._layer_damping(model, state, curvature, begun.value, finite)
        strength = trial.strength(damping if each is None else each)
        strength = for_each(strength, grads, curvature)
        trees = state.inverse, curvature, strength
        inverse, factorised = when_in_turn(*due, factorise, *trees)
        others, fallback = update_fallback(grads, state.fallback, model, self.fallback)
        proposal = trial.propose(damping, inverse, strength, others)
        info = trial.judge(proposal, factorised)
        updates = self._decayed(proposal, model, state)
        updates = jtu.tree_map(lambda u: jnp.where(info.rejected, 0, u), updates)
        after = self._after(model, state, proposal, updates, fallback, info)
        state = after._replace(
            step=state.step + 1,
            curvature=curvature,
            inverse=inverse,
            layer_damping=each,
            weight=weight,
        )
        return updates, state, info

    def _init_layer_damping(self, curvature: Model, model: Model) -> Model | None:
        """Zeros in the place of every layer's damping, if there is a rule for these."""
        rule = self._rules.layer_damping
        if rule is None:
            return None
        number = jnp.zeros((), float)
        return zeros_as_from(rule, number, curvature, model, number)

    def _layer_damping(
        self,
        model: Model,
        state: KFACState,
        curvature: Model,
        value: Float[Array, ""],
        finite: Bool[Array, ""],
    ) -> Model | None:
        """Every layer's damping, chosen anew whenever layers are factorised."""
        rule = self._rules.layer_damping
        if rule is None:
            return None
        choose = ft.partial(rule, state.damping, curvature, model, value)
        period = 1 if self.in_turn else self.inverse_period
        due = state.step, state.weight, period
        kept = state.layer_damping
        return when_due(*due, choose, kept, finite, state.refactorise)

    def _calibrated(self, trial: Trial, factorise: Callable) -> Float[Array, ""]:
        """The damping of this step: before the first one, it may be looked for."""
        state, rule = trial.state, self._rules.damping
        if rule is None or rule.calibration == 0:
            return state.damping

        def ratio(damping):
            strength = trial.strength(damping)
            inverse, _ = factorise(state.inverse, trial.curvature, strength)
            return trial.ratio(damping, inverse, strength)

        return calibrated(rule, state.damping, ratio, (state.weight == 0) & trial.finite)

    def _decayed(self, proposal: Proposal, model: Model, state: KFACState) -> Model:
        """The updates, with decoupled weight decay of the tagged parameters."""
        if state.weight_decay is None:
            return proposal.updates
        params, _ = partition_tagged(model)
        params = masked(params, self.weight_decay_mask)
        scale = proposal.learning_rate * state.weight_decay

        def decay(update, p):
            return update if p is None else update - scale.astype(p.dtype) * p

        is_none = lambda x: x is None
        return jtu.tree_map(decay, proposal.updates, params, is_leaf=is_none)

    def _after(
        self,
        model: Model,
        state: KFACState,
        proposal: Proposal,
        updates: Model,
        fallback: Any,
        info: Info,
    ) -> KFACState:
        """The state after a step; if that is rejected, it remembers why."""
        iterates = state.iterates
        if iterates is not None and state.averaging is not None:
            iterates = iterates.add(eqx.apply_updates(model, updates), state.averaging)
        taken = dict(
            velocity=proposal.velocity,
            extent=proposal.extent,
            fallback=fallback,
            iterates=iterates,
            learning_rate=proposal.learning_rate,
            momentum=proposal.momentum,
        )
        kept = {name: getattr(state, name) for name in taken}
        # Of what led uphill, not the same again: it would for ever.
        uphill = info.faults.update | info.faults.increase
        moving = state.velocity, state.extent
        stopped = jtu.tree_map(jnp.zeros_like, moving)
        kept["velocity"], kept["extent"] = tree_where(uphill, stopped, moving)
        rule, rejected, damping = self._rules.damping, info.rejected, info.damping
        ratio = info.reduction_ratio
        if rule is not None and ratio is not None:
            ratio = jnp.where(rejected, jnp.nan, ratio)
            due = rule.due(state.step) | rejected
            damping = jnp.where(due, rule(damping, ratio), damping)
        return state._replace(
            damping=damping,
            refactorise=rejected & (rule is not None),
            rejected=state.rejected + rejected.astype(jnp.int32),
            faults=count(state.faults, info.faults),
            **tree_where(rejected, kept, taken),
        )
