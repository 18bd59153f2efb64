"""What one step would do with a given damping."""

import functools as ft
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float

from .._complex import steepest
from .._curvature import check_pushes_forward, for_layers, GradientRows, LinearisedBatch
from .._custom_types import Model
from .._inverse import precondition, precondition_through_rows
from .._loss import Penalty
from .._misc import (
    accumulator,
    all_finite,
    as_parts,
    squared_norm_of_sum,
    tree_dot,
    tree_norm,
)
from .._module import PlainModule
from .._solver import AbstractDampedSolver
from .._tag import partition_tagged
from ._choices import Rules
from ._collect import Average
from ._damping import calibrated, share_of
from ._extent import Extent
from ._guard import AbstractGuard
from ._hyperparameters import in_range
from ._proposal import Proposal, velocity
from ._quadratic import Quadratic, quadratic
from ._schedule import Due
from ._state import Faults, Info, KFACState
from ._trust import AbstractTrustRegion


class Start(NamedTuple):
    """Where a step begins, and whether it can."""

    value: Float[Array, ""]
    size: Float[Array, ""]  # What is left to be gained: the loss, or any amount.
    grads: Model
    gradient_norm: Float[Array, ""]
    in_range: Bool[Array, ""]  # The numbers in the state.
    refused: Bool[Array, ""]  # The loss has diverged: see `Rollback.refuses`.
    # Whether curvature, damping and coupling follow this batch: not if its loss is unlike
    # all others, or nothing is in it.
    teaches: Bool[Array, ""]
    negative: Bool[Array, ""]  # A weight of a loss.
    watched: bool  # Whether that can be told, and the parameters can go back.
    is_surrogate: bool  # A loss without targets gives the curvature of the rest.
    is_natural: bool  # The Fisher of the losses is their Gauss-Newton matrix.
    squares: (
        int  # Which the loss consists of, in the unit of the targets; 0: it does not.
    )

    @property
    def fine(self) -> Bool[Array, ""]:
        """Whether curvature of this batch is to be trusted."""
        finite = all_finite(self.value) & ~jnp.isnan(self.gradient_norm)
        return self.in_range & finite & ~self.refused & ~self.negative


class Evaluation(NamedTuple):
    """What a step does to the loss. `None` where that is never due; where it is not due,
    infinite (NaN would look like a mistake to `jax_debug_nans`), and a share of one."""

    new_loss: Float[Array, ""] | None
    ratio: Float[Array, ""] | None  # The reduction ratio.
    share: Float[Array, ""] | None  # Of the damping in what the quadratic model predicts.


class Trial(PlainModule):
    """Steps from one point, with one batch and one curvature, that differ in their
    damping: proposes them, predicts what they do to the loss, looks, and judges."""

    rules: Rules
    guard: AbstractGuard | None
    solver: AbstractDampedSolver
    state: KFACState
    model: Model
    start: Start
    rows: GradientRows | None  # Of the gradient, if it may be preconditioned by them.
    averaged: Average  # It is fine, if loss, gradient and curvature are.
    linearised: Any  # A `LinearisedBatch`; `None` if the loss function is not there.

    def calibrated(self, factorise: Callable) -> Float[Array, ""]:
        """The damping of this step: before the first one, it may be looked for.
        `factorise(inverse, curvature, strength)` is as `Factorising.anew`."""
        state, rule = self.state, self.rules.damping
        if rule is None or rule.calibration == 0:
            return state.damping

        def measure(damping):
            strength = self.strength(damping)
            inverse, _ = factorise(state.inverse, self.curvature, strength)
            return self._measure_tagged(damping, inverse, strength)

        due = (state.weight == 0) & self.finite
        return calibrated(rule, state.damping, measure, due)

    def layer_damping(self, due: Due) -> Model | None:
        """Every layer's damping, if there is a rule for these: chosen anew whenever they
        are factorised."""
        rule, state = self.rules.layer_damping, self.state
        if rule is None:
            return None
        if due.turns > 1:  # Some are factorised at every step.
            due = due._replace(period=1)
        size, grads = self.start.size, self.grads
        arguments = state.damping, self.curvature, self.model, size, grads, self._terms
        compute = ft.partial(rule, *arguments)
        learns = self.finite & self.start.teaches
        return due.when(compute, state.layer_damping, learns)

    def strength(self, damping: Any, each: Model | None = None) -> Any:
        """What the preconditioner is damped with: a number, or one for `each` layer."""
        rule = self.rules.step
        damping = damping if each is None else each
        if self.rules.damping is None:
            damping = self.state.rollback.damped(damping)
        if rule is None:
            return damping
        ratio = jnp.asarray(rule.damping_ratio, float)
        return jtu.tree_map(lambda d: d * ratio.astype(d.dtype), damping)

    def propose(
        self, damping: Float[Array, ""], inverse: Model, strength: Any, others: Model
    ) -> Proposal:
        r"""$\delta = \alpha d + \mu \delta_\text{prev}$ with $d = -\hat F^{-1} \nabla h$,
        given the factorisation of $\hat F$, damped with `strength`."""
        state, gradient = self.state, self._gradient
        factorised = self.curvature, inverse, self.solver, strength, self.still
        if self.rows is None:
            natural = precondition(gradient, *factorised)
        else:
            natural = precondition_through_rows(gradient, self.rows, *factorised)
        natural = as_parts(natural)
        given, extent = self._constrained(natural)
        (scale, momentum), predicted = self._lengths(damping, natural, given)
        before = state.velocity
        # As one array, for a GPU would launch something for each.
        lengths = jax.lax.optimization_barrier(jnp.stack([scale, momentum]))
        if all(v.dtype == accumulator(v.dtype) for v in jtu.tree_leaves(before)):
            squares = squared_norm_of_sum(lengths[1], before, -lengths[0], natural)
        else:  # In a lower precision, the sum may have overflowed.
            taken = velocity(lengths, natural, before)
            squares = tree_dot(taken, taken)
        if self._is_bounded_exactly:
            part = self._part(velocity(lengths, natural, before))
            squares *= part.astype(squares.dtype) ** 2
            lengths = part.astype(lengths.dtype) * lengths
            extent = None if extent is None else extent.scaled(part)
        # What was chosen, not what the norm constraint has made of it.
        learning_rate = state.learning_rate if self.rules.learning_rate is None else scale
        momentum = state.momentum if self.rules.momentum is None else momentum
        chosen = damping, learning_rate, momentum
        return Proposal(
            *chosen, lengths, natural, before, others, squares, extent, predicted
        )

    def _measure_tagged(
        self, damping: Float[Array, ""], inverse: Model, strength: Any
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The reduction ratio of a step of the tagged parameters alone, and the share of
        the damping in it."""
        _, others = partition_tagged(jtu.tree_map(jnp.zeros_like, self.grads))
        proposal = self.propose(damping, inverse, strength, others)
        predicted = self._predicted(proposal)
        ratio = self._ratio(self._new_loss(proposal), predicted)
        return ratio, share_of(damping, proposal.norm, predicted)

    def evaluate(self, proposal: Proposal) -> Evaluation:
        """What a step does to the loss, as far as that is to be known."""
        new_loss = self._when(self._looks, lambda: self._new_loss(proposal))
        rule, known = self.rules.damping, proposal.predicted is not None
        due = known or (False if rule is None else rule.due(self.state.step))
        predicted = self._when(due, lambda: self._predicted(proposal))
        if new_loss is None or predicted is None:
            return Evaluation(new_loss, None, None)
        ratio = self._ratio(new_loss, predicted, due & self._looks)
        share = share_of(proposal.damping, proposal.norm, predicted)
        return Evaluation(new_loss, ratio, share)

    def judge(
        self,
        proposal: Proposal,
        found: Evaluation,
        factorised: Bool[Array, ""],
        without: Bool[Array, ""],
    ) -> Info:
        """What is to be said of a step, and whether it is to be taken; `factorised`: by
        the inverse of this curvature, or `without` any for some gradient."""
        # Cheaper than looking at every number; an update whose norm overflows has
        # diverged too. A gradient may be that large, if what follows is finite.
        # Only the first of faults that follow from each other is reported.
        finite_value = all_finite(self.value)
        update_norm, norm = proposal.norm, self.start.gradient_norm
        without &= self.finite
        overflows = jnp.isinf(norm) & all_finite(update_norm) & ~without
        finite_grads = all_finite(norm) | overflows
        finite = self.finite & finite_grads
        lost = ~(finite_value & finite_grads)
        leads_back = self.state.rollback.due & self.start.watched
        without &= finite
        # An estimate from all of this step's examples should have found some.
        missed = without & self.averaged.fresh
        known = finite & ~missed
        finite_update = known & all_finite(update_norm)
        faults = Faults.of(
            hyperparameters=~self.start.in_range,
            loss=~finite_value,
            gradient=finite_value & ~finite_grads,
            weights=finite_value & self.start.negative,
            curvature=self.start.fine & ~self.finite,
            unseen=missed,
            waiting=without & ~missed,
            factorisation=self.finite & ~factorised,
            update=known & ~finite_update,
            increase=finite_update & self._risen(found.new_loss),
            divergence=jnp.where(lost, leads_back, self.start.refused),
        )
        return Info(
            loss=self.value,
            new_loss=found.new_loss,
            aux=None,
            learning_rate=proposal.learning_rate,
            momentum=proposal.momentum,
            damping=proposal.damping,
            reduction_ratio=found.ratio,
            gradient_norm=self.start.gradient_norm,
            through_rows=None if self.rows is None else self.rows.whole,
            update_norm=jnp.where(faults.rejecting, 0, update_norm),
            rejected=faults.rejecting,
            faults=faults,
        )

    @property
    def curvature(self) -> Model:
        return self.averaged.curvature

    @property
    def is_penalised(self) -> bool:
        return self.linearised is not None and _is_penalised(self.linearised)

    @property
    def still(self) -> Model | None:
        """Which layers are left where they are. `None`: there is a penalty, of which
        there is no curvature anyway."""
        if self.is_penalised:
            return None
        return for_layers(self.averaged.still, self.curvature)

    @property
    def finite(self) -> Bool[Array, ""]:
        """Loss, gradient and curvature."""
        return self.averaged.fine

    @property
    def value(self) -> Float[Array, ""]:
        return self.start.value

    @property
    def grads(self) -> Model:
        return self.start.grads

    @property
    def _terms(self) -> int | None:
        """The number of terms of the loss, if that is known."""
        return None if self.linearised is None else self.linearised.terms

    @property
    def _gradient(self) -> Model:
        """The gradient of the tagged parameters."""
        return partition_tagged(self.grads)[0]

    def _constrained(self, natural: Model) -> tuple[tuple, Extent | None]:
        r"""Learning rate and momentum, or less, such that $\alpha^2 \langle \hat F^{-1}
        \nabla h, \nabla h \rangle \le c$; and how long the velocity is, if it is
        bounded."""
        state, region = self.state, self.rules.norm_constraint
        rate, momentum = state.learning_rate, state.momentum
        if state.norm_constraint is None:
            return (rate, momentum), None
        norm = tree_dot(natural, self._gradient).astype(rate.dtype)
        if region is None:
            most = state.rollback.narrowed(state.norm_constraint)
            scale = _at_most(most, rate**2 * norm)
            return (scale * rate, momentum), None
        if self._is_bounded_exactly:
            return (rate, momentum), state.extent
        assert state.extent is not None  # There is a region.
        growth = self._growth(state.extent, region)
        constraint = growth.astype(state.norm_constraint.dtype) * state.norm_constraint
        bounds = region(constraint, self.start.size, self._terms)
        most, most_of_velocity = map(state.rollback.narrowed, bounds)
        rate = _at_most(most, rate**2 * norm) * rate
        joint = tree_dot(state.velocity, self._gradient).astype(rate.dtype)
        before, coupling = state.extent.squared_length, state.extent.coupling_given(joint)
        # The gradient of a batch that is unlike all others says nothing of the velocity.
        coupling = jnp.where(self.start.teaches, coupling, state.extent.coupling)
        # The curvature may have changed since; but the inequality of Cauchy and Schwarz
        # holds in every metric.
        before = jnp.maximum(before, joint**2 / _positive(norm))
        momentum = momentum * _kept(joint, before, norm)
        # Only what joins both parts of the velocity is new, for F (F^-1 g) = g.
        length = momentum**2 * before - 2 * momentum * rate * joint + rate**2 * norm
        extent = Extent(length, momentum * joint, coupling, growth)
        scale = _at_most(most_of_velocity, length)
        if self.start.is_natural:
            most = region.of_measured(self.start.size).astype(length.dtype)
            scale = jnp.minimum(scale, _at_most(most, coupling * length))
        return (scale * rate, scale * momentum), extent.scaled(scale)

    def _growth(self, extent: Extent, region: AbstractTrustRegion) -> Float[Array, ""]:
        """How many times larger the radius is than it was given: for squares, whose unit
        the targets have; and not for a batch that is unlike all others."""
        if self.start.squares == 0:
            return extent.growth
        growth = region.growth(extent.growth, self.start.size, self.start.squares)
        return jnp.where(self.start.teaches, growth, extent.growth)

    @property
    def _is_bounded_exactly(self) -> bool:
        """Whether what bounds a step is measured and not estimated: the averaged
        curvature of a policy is late, and has no unit in common with other losses."""
        return self.start.is_surrogate and self.rules.norm_constraint is not None

    def _part(self, velocity: Model) -> Float[Array, ""]:
        r"""How much of a step may be taken: $\langle \delta, F \delta \rangle$, with the
        exact Fisher of this batch, stays within its bounds."""
        state, region = self.state, self.rules.norm_constraint
        lengths = self.linearised.surrogate_lengths
        check_pushes_forward(
            "Give a number for `norm_constraint`: a trust region of a loss without "
            "targets needs",
            lengths,
            velocity,
        )
        surrogate, others, value = lengths(velocity)
        bounds = region.of_surrogate(state.norm_constraint, value)  # pyright: ignore
        pairs = zip(bounds, (surrogate, others), strict=True)
        parts = [
            jnp.where(length > 0, _at_most(most, length.astype(most.dtype)), 1)
            for most, length in pairs
        ]
        return jnp.minimum(*parts)

    def _lengths(
        self, damping: Float[Array, ""], natural: Model, given: tuple
    ) -> tuple[list, Float[Array, ""] | None]:
        r"""$\alpha$ and $\mu$: as given, unless a rule is to choose them, and what the
        quadratic model that did predicts."""
        rule = self.rules.step
        if rule is None:
            return [*given], None
        ruled = [self.rules.learning_rate is not None, self.rules.momentum is not None]
        direction = jtu.tree_map(jnp.negative, natural)
        model = self._quadratic(damping, direction, self.state.velocity)
        rate, momentum = (None if r else g for r, g in zip(ruled, given))
        best = rule(model, (rate, momentum), self.start.size)
        lengths = [
            best[i].astype(g.dtype) if ruled[i] else g for i, g in enumerate(given)
        ]
        return lengths, model(best)

    def _quadratic(self, damping: Float[Array, ""], *directions: Model) -> Quadratic:
        """The quadratic model of the tagged parameters along `directions`."""
        rule = self.rules.step
        linearised = self.linearised.first(None if rule is None else rule.examples)
        what = (
            "Give numbers for learning rate, momentum and damping: rules for these need"
        )
        check_pushes_forward(what, linearised.gram, *directions)
        gram = linearised.gram(*directions)
        return quadratic(gram, self._gradient, directions, damping)

    @property
    def _looks(self) -> Bool[Array, ""] | bool:
        """Whether the loss after the step is looked at."""
        rules = self.rules.damping, self.guard
        due = [rule.due(self.state.step) for rule in rules if rule is not None]
        return any(d is True for d in due) or ft.reduce(operator.or_, due, False)

    def _when(
        self, due: Bool[Array, ""] | bool, compute: Callable
    ) -> Float[Array, ""] | None:
        """A number if it is `due`, else infinity; `None` if it never is."""
        if isinstance(due, bool):
            return compute() if due else None
        return jax.lax.cond(due, compute, lambda: jnp.full_like(self.value, jnp.inf))

    def _risen(self, new_loss: Float[Array, ""] | None) -> Bool[Array, ""]:
        """Whether the loss, as far as it was looked at, forbids the step."""
        if new_loss is None:
            return jnp.zeros_like(self.value, bool)
        bad = ~jnp.isfinite(new_loss)
        if self.guard is not None:
            own = self.guard.due(self.state.step)
            bad |= own & self.guard(self.value, new_loss)
        return bad & self._looks

    def _predicted(self, proposal: Proposal) -> Float[Array, ""]:
        """The change of the loss that the quadratic model predicts, for parameters
        without a tag that their gradient does."""
        predicted = proposal.predicted
        if predicted is None:
            model = self._quadratic(proposal.damping, proposal.velocity)
            predicted = model(jnp.ones_like(model.vector))
        _, gradient = partition_tagged(self.grads)
        predicted += tree_dot(gradient, proposal.others).astype(predicted.dtype)
        return predicted.astype(self.value.dtype)

    def _new_loss(self, proposal: Proposal) -> Float[Array, ""]:
        return self.linearised.value_at(eqx.apply_updates(self.model, proposal.updates))

    def _ratio(self, new_loss: Array, predicted: Array, due: Any = True) -> Array:
        no_descent = (predicted >= 0) & ~jnp.isnan(new_loss)
        change = jnp.where(due, new_loss - self.value, 1)
        ratio = change / jnp.where(no_descent, -1, jnp.where(due, predicted, 1))
        return jnp.where(due, jnp.where(no_descent, -jnp.inf, ratio), jnp.inf)


def _at_most(most: Float[Array, ""], norm: Float[Array, ""]) -> Float[Array, ""]:
    """By what a vector is to be scaled such that its squared norm is not above `most`."""
    return jnp.minimum(1, jnp.sqrt(most / _positive(norm)))


def _kept(
    joint: Float[Array, ""], before: Float[Array, ""], norm: Float[Array, ""]
) -> Float[Array, ""]:
    r"""What is kept of a velocity, given $\langle \delta, \nabla h \rangle$ and the
    squared lengths of $\delta$ and of $\hat F^{-1} \nabla h$: all of it up to a cosine of
    one half between them, nothing of a velocity that leads straight uphill."""
    cosine = joint / jnp.sqrt(_positive(before * norm))
    return jnp.clip(2 - 2 * cosine, 0, 1)


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.maximum(x, 1e-30)


def _is_penalised(linearised: LinearisedBatch) -> bool:
    """Whether the objective has terms with a gradient but no curvature."""

    def penalised(linearisation):
        return any(isinstance(o, Penalty) for _, o in linearisation.objective.terms)

    return linearised.seen(penalised)


def start(
    value: Float[Array, ""],
    grads: Model,
    state: KFACState,
    rules: Rules,
    watched: bool = True,
    linearised: LinearisedBatch | None = None,
) -> Start:
    """Where a step begins, given the gradient as JAX has it. Numbers that a rule chooses
    may be any. The value of a surrogate says neither how much is left to be gained, nor
    whether it has diverged."""
    grads = steepest(grads)
    numbers = state.hyperparameters
    for name in ("learning_rate", "momentum"):
        if getattr(rules, name) is not None:
            numbers = numbers._replace(**{name: None})
    is_surrogate, is_natural, squares, negative = False, False, 0, jnp.zeros((), bool)
    if linearised is not None:
        # At once, for of micro-batches, each look is one more trace of the loss.
        kinds = "objective.is_surrogate", "objective.is_natural", "objective.squares"
        is_surrogate, is_natural, squares = linearised.seen(operator.attrgetter(*kinds))
        negative = linearised.has_negative_weights()
    watched = watched and not is_surrogate
    is_bounded = state.norm_constraint is not None
    norm = tree_norm(grads)
    diverged = state.rollback.diverged(value) & watched
    empty = (value == 0) & (norm == 0) & watched  # As where all weights are zero.
    return Start(
        value=value,
        size=jnp.full_like(value, jnp.inf) if is_surrogate else value,
        grads=grads,
        gradient_norm=norm,
        in_range=in_range(numbers),
        refused=diverged & state.rollback.refuses(is_bounded),
        teaches=(state.weight == 0) | ~(diverged | empty),
        negative=negative,
        watched=watched,
        is_surrogate=is_surrogate,
        is_natural=is_natural,
        squares=squares,
    )
