"""What one step would do with a given damping: proposed, predicted, evaluated, judged."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, PyTree

from .._curvature import (
    check_pushes_forward,
    each_known,
    for_layers,
    GradientRows,
    LinearisedBatch,
)
from .._custom_types import Model
from .._inner_products import all_finite, as_parts, squared_norm_of_sum, tree_dot
from .._inverse import precondition, precondition_through_rows
from .._misc import accumulator, at_paths
from .._module import PlainModule
from .._solver import AbstractDampedSolver
from .._tag import partition_tagged
from ._bounds import Bounds
from ._choices import Rules
from ._collect import Average
from ._damping import calibrated, share_of
from ._guard import AbstractGuard
from ._proposal import Proposal, velocity
from ._quadratic import Quadratic, quadratic
from ._schedule import Due
from ._schedule_free import Dealing
from ._start import Start
from ._state import Faults, Info, KFACState


class Evaluation(NamedTuple):
    """What a step does to the loss. A number is `None` if it is never asked for; at steps
    that do not ask for it, the first two are infinite (not NaN, which `jax_debug_nans`
    would take for a mistake)."""

    new_loss: Float[Array, ""] | None
    ratio: Float[Array, ""] | None  # The reduction ratio.
    # The part that the damping has in what the quadratic model predicts; 1 if it predicts
    # no descent.
    share: Float[Array, ""] | None


class Trial(PlainModule):
    """Steps from one point, with one batch and one curvature, that differ in their
    damping."""

    rules: Rules
    guard: AbstractGuard | None
    solver: AbstractDampedSolver
    state: KFACState
    model: Model
    start: Start
    rows: GradientRows | None  # Of the gradient, if it may be preconditioned by them.
    averaged: Average  # Its `fine` says whether loss, gradient and curvature are finite.
    linearised: LinearisedBatch | None  # `None` if there is no loss function.
    # Layers that are left where they are; `None` if none can be.
    still: Model | None = None

    def calibrated(self, factorise: Callable) -> Float[Array, ""]:
        """The damping of this step. Before the first step, a damping rule may try several
        of them. `factorise(inverse, curvature, strength)` is as `Factorising.anew`."""
        state, rule = self.state, self.rules.damping
        if rule is None or rule.calibration == 0:
            return state.damping

        def measure(damping):
            strength = self.strength(damping)
            inverse, _ = factorise(state.inverse, self.curvature, strength)
            return self._measure_tagged(damping, inverse, strength)

        # Before the first step at which there is any curvature.
        due = (state.weight == 0) & self.finite & jnp.any(self.averaged.known)
        return calibrated(rule, state.damping, measure, due)

    def layer_damping(self, due: Due) -> Model | None:
        """Every layer's damping, if there is a rule for these: chosen anew whenever the
        layers are factorised."""
        rule, state = self.rules.layer_damping, self.state
        if rule is None:
            return None
        if due.turns > 1:  # With layers in turn, some are factorised at every step.
            due = due._replace(period=1)

        def compute():
            measured = self._bounds.by_gradients
            damping = jnp.where(measured, state.damping, rule.unmeasured(state.damping))
            loss = self.start.remaining, self.grads, self.start.kind.terms
            return rule(damping, self.curvature, self.model, *loss)

        learns = self.finite & self.start.teaches
        return due.when(compute, state.layer_damping, learns)

    def strength(self, damping: Any, each: Model | None = None) -> Any:
        """What the preconditioner is damped with, a number or one for `each` layer, given
        the damping of the quadratic model."""
        rule = self.rules.step
        damping = damping if each is None else each
        if self.rules.damping is None:
            # After the parameters went back, there is more of it for a while. A rule
            # that adapts the damping hears of that by itself.
            damping = self.state.rollback.damped(damping)
        if rule is None:
            return damping
        # The user may want another damping of the preconditioner than of the model.
        ratio = jnp.asarray(rule.damping_ratio, float)
        return jtu.tree_map(lambda d: d * ratio.astype(d.dtype), damping)

    def propose(
        self, damping: Float[Array, ""], inverse: Model, strength: Any, others: Model
    ) -> Proposal:
        r"""$\delta = \alpha d + \mu \delta_\text{prev}$ with $d = -\hat F^{-1} \nabla h$,
        given the factorisation of $\hat F$, damped with `strength`; and with it `others`,
        the updates of the parameters that no tag covers."""
        state, natural = self.state, self._natural_gradient(inverse, strength)
        # Learning rate and momentum, as the bounds and then as a rule will have them.
        bounds = self._bounds
        given, later, extent = bounds.lengths(natural, self._gradient)
        before = at_paths(state.velocity, natural)
        (scale, momentum), predicted = self._chosen_lengths(
            damping, natural, before, given
        )
        # Both numbers in one array: what a GPU does to two of them are two kernels.
        lengths = jax.lax.optimization_barrier(jnp.stack([scale, momentum]))
        remembered = None if later is None else jnp.stack(later)
        squares = _squared_norm(lengths, natural, before)
        if bounds.are_measured:
            # On the whole step, momentum included, which is only known here.
            part = bounds.measured_part(velocity(lengths, natural, before))
            squares *= part.astype(squares.dtype) ** 2
            lengths = part.astype(lengths.dtype) * lengths
            extent = None if extent is None else extent.scaled(part)
            # What was left of the velocity does not depend on how long the step is.
            if remembered is not None:
                remembered = remembered.at[0].multiply(part.astype(remembered.dtype))
        # The state keeps what was chosen, not what the bounds have made of it.
        learning_rate = state.learning_rate if self.rules.learning_rate is None else scale
        momentum = state.momentum if self.rules.momentum is None else momentum
        chosen = damping, learning_rate, momentum
        velocities = lengths, remembered, natural, before
        return Proposal(*chosen, *velocities, others, squares, extent, predicted)

    def evaluate(self, proposal: Proposal) -> Evaluation:
        """What a step does to the loss, as far as that is to be known."""
        new_loss = self._when(self._looks, lambda: self._new_loss(proposal))
        rule, known = self.rules.damping, proposal.predicted is not None
        due = known or (False if rule is None else rule.due(self.state.step))
        tagged = self._when(due, lambda: self._predicted(proposal))
        if new_loss is None or tagged is None:
            return Evaluation(new_loss, None, None)
        ratio = self._ratio(proposal, new_loss, tagged, due & self._looks)
        return Evaluation(new_loss, ratio, self._share(proposal, tagged))

    def judge(
        self,
        proposal: Proposal,
        found: Evaluation,
        factorised: Bool[Array, ""],
        without: Bool[Array, ""],
    ) -> Info:
        """What is to be said of a step, and whether it is to be taken. `factorised`:
        whether this curvature could be factorised (else the inverse is an older one);
        `without`: whether any layer has a gradient, but no curvature."""
        faults = self._faults(proposal, found, factorised, without)
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
            update_norm=jnp.where(faults.rejecting, 0, proposal.norm),
            rejected=faults.rejecting,
            faults=faults,
        )

    @property
    def curvature(self) -> Model:
        return self.averaged.curvature

    @property
    def waiting(self) -> Bool[Array, " layers"] | None:
        """Which layers have to wait for curvature, all in one row: those that have none,
        while others have some. `None`: no layer has to, because the objective has a
        penalty, and penalties have gradients, but no curvature at any step."""
        return self._waiting(self.averaged.known)

    @property
    def each_waiting(self) -> Model | None:
        """The same as `waiting`, looked up anew in the curvature, in a tree shaped like
        the model."""
        return self._waiting(each_known(self.curvature))

    def with_still(self, each: Model | None) -> "Trial":
        """The trial that leaves layers where they are if they wait. A CPU is told by the
        tree, `each`, because what XLA compiles to read one place of a row is a kernel for
        one layer alone; other devices by the row, because each array costs a copy."""
        if each is None:
            return self
        told = dict(
            cpu=lambda each, _: each,
            default=lambda _, row: for_layers(row, self.curvature),
        )
        still = jax.lax.platform_dependent(each, self.waiting, **told)
        return dataclasses.replace(self, still=still)

    def _waiting(
        self, known: PyTree[Bool[Array, "..."]]
    ) -> PyTree[Bool[Array, "..."]] | None:
        if self.start.kind.is_penalised:
            return None
        # The analysis refuses a loss function in which parameters bypass a tag. So if all
        # examples of this step give no layer any curvature, the losses have none (outputs
        # that are certain have a Fisher of zero, and so have losses that are linear), and
        # damping alone says how far the step may go.
        zero = self.linearised is not None and self.averaged.zero
        return jtu.tree_map(lambda known: ~known & jnp.logical_not(zero), known)

    @property
    def finite(self) -> Bool[Array, ""]:
        """Whether loss, gradient and curvature are."""
        return self.averaged.fine

    @property
    def value(self) -> Float[Array, ""]:
        return self.start.value

    @property
    def grads(self) -> Model:
        return self.start.grads

    @property
    def _gradient(self) -> Model:
        """The gradient of the tagged parameters."""
        return partition_tagged(self.grads)[0]

    @property
    def _bounds(self) -> Bounds:
        region, state = self.rules.norm_constraint, self.state
        dealing = None
        if self.rules.schedule_free is not None:
            dealing = Dealing.of(state.momentum, state.averaging)
        return Bounds(region, state, self.start, self.linearised, dealing)

    def _natural_gradient(self, inverse: Model, strength: Any) -> Model:
        r"""$\hat F^{-1} \nabla h$, as parts of one row for devices that look at that."""
        factorised = self.curvature, inverse, self.solver, strength, self.still
        if self.rows is None:
            natural = precondition(self._gradient, *factorised)
        else:
            natural = precondition_through_rows(self._gradient, self.rows, *factorised)
        return as_parts(natural)

    def _faults(
        self,
        proposal: Proposal,
        found: Evaluation,
        factorised: Bool[Array, ""],
        without: Bool[Array, ""],
    ) -> Faults:
        """What is wrong with a step. Of faults that follow from each other, only the
        first one is reported."""
        start, update_norm = self.start, proposal.norm
        finite_value, norm = all_finite(self.value), start.gradient_norm
        without &= self.finite
        # Norms are cheaper to look at than all numbers. A gradient whose norm overflows
        # may still be finite: it is taken for finite if the update that follows is, which
        # says nothing of layers that are left where they are.
        overflows = jnp.isinf(norm) & all_finite(update_norm) & ~without
        finite_grads = all_finite(norm) | overflows
        finite = self.finite & finite_grads
        without &= finite
        # If all examples of this step were in an estimate just now, a layer that has a
        # gradient should have some curvature of them.
        unseen = without & self.averaged.fresh
        known = finite & ~unseen
        # An update whose norm overflows has diverged, too.
        finite_update = known & all_finite(update_norm)
        # A loss or gradient that is not finite counts as diverged if it is the last one
        # of several, so that the parameters go back.
        not_finite = ~(finite_value & finite_grads)
        goes_back = self.state.rollback.due & start.watched
        return Faults.of(
            hyperparameters=~start.in_range,
            loss=~finite_value,
            gradient=finite_value & ~finite_grads,
            weights=finite_value & start.has_negative_weights,
            curvature=start.fine & ~self.finite,
            unseen=unseen,
            waiting=without & ~unseen,
            factorisation=self.finite & ~factorised,
            update=known & ~finite_update,
            increase=finite_update & self._risen(found.new_loss),
            divergence=jnp.where(not_finite, goes_back, start.refused),
        )

    def _measure_tagged(
        self, damping: Float[Array, ""], inverse: Model, strength: Any
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The reduction ratio of a step of the tagged parameters alone, and the share of
        the damping in what is predicted."""
        _, others = partition_tagged(jtu.tree_map(jnp.zeros_like, self.grads))
        proposal = self.propose(damping, inverse, strength, others)
        tagged = self._predicted(proposal)
        ratio = self._ratio(proposal, self._new_loss(proposal), tagged)
        return ratio, self._share(proposal, tagged)

    def _chosen_lengths(
        self, damping: Float[Array, ""], natural: Model, before: Model, given: tuple
    ) -> tuple[list, Float[Array, ""] | None]:
        r"""$\alpha$ and $\mu$, and the change of the loss that the quadratic model
        predicts for them. Without a rule for either length, both are as `given`, and
        nothing is predicted."""
        rule = self.rules.step
        if rule is None:
            return [*given], None
        ruled = [self.rules.learning_rate is not None, self.rules.momentum is not None]
        direction = jtu.tree_map(jnp.negative, natural)
        model = self._quadratic(damping, direction, before)
        rate, momentum = (None if r else g for r, g in zip(ruled, given))
        best = rule(model, (rate, momentum), self.start.remaining)
        lengths = [
            best[i].astype(g.dtype) if ruled[i] else g for i, g in enumerate(given)
        ]
        # What the rule returned for a length that is given does not matter.
        return lengths, model(jnp.stack([n.astype(best.dtype) for n in lengths]))

    def _quadratic(self, damping: Float[Array, ""], *directions: Model) -> Quadratic:
        """The quadratic model of the tagged parameters along `directions`."""
        assert self.linearised is not None  # `update` refuses what would need it.
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
        """Whether the loss after the step is evaluated."""
        rules = self.rules.damping, self.guard
        due = [rule.due(self.state.step) for rule in rules if rule is not None]
        if any(d is True for d in due):  # Known without tracing: no conditional needed.
            return True
        return ft.reduce(operator.or_, due, False)

    def _when(
        self, due: Bool[Array, ""] | bool, compute: Callable
    ) -> Float[Array, ""] | None:
        """A number if it is `due`, else infinity; `None` if it never is."""
        if isinstance(due, bool):
            return compute() if due else None
        return jax.lax.cond(due, compute, lambda: jnp.full_like(self.value, jnp.inf))

    def _risen(self, new_loss: Float[Array, ""] | None) -> Bool[Array, ""]:
        """Whether the loss, as far as it was evaluated, forbids the step."""
        if new_loss is None:
            return jnp.zeros_like(self.value, bool)
        bad = ~jnp.isfinite(new_loss)
        if self.guard is not None:
            asked = self.guard.due(self.state.step)
            bad |= asked & self.guard(self.value, new_loss)
        return bad & self._looks

    def _predicted(self, proposal: Proposal) -> Float[Array, ""]:
        """The change of the loss that the quadratic model predicts for the step of the
        tagged parameters."""
        predicted = proposal.predicted
        if predicted is None:
            model = self._quadratic(proposal.damping, proposal.velocity)
            predicted = model(jnp.ones_like(model.vector))
        return predicted.astype(self.value.dtype)

    def _share(self, proposal: Proposal, tagged: Float[Array, ""]) -> Float[Array, ""]:
        """The part that the damping, which acts on the tagged parameters alone, has in
        what is predicted for these."""
        return share_of(proposal.damping, jnp.sqrt(proposal.squares), tagged)

    def _new_loss(self, proposal: Proposal) -> Float[Array, ""]:
        assert self.linearised is not None  # `update` refuses what would need it.
        return self.linearised.value_at(eqx.apply_updates(self.model, proposal.updates))

    def _ratio(
        self, proposal: Proposal, new_loss: Array, tagged: Array, due: Any = True
    ) -> Array:
        """The reduction ratio: the change of the loss over the predicted change; minus
        infinity if no descent was predicted, infinity if it is not `due`. The prediction
        is that for the `tagged` parameters, and what the gradient says of all others."""
        _, gradient = partition_tagged(self.grads)
        predicted = tagged + tree_dot(gradient, proposal.others).astype(tagged.dtype)
        # A new loss that is not a number makes the ratio one, too.
        no_descent = (predicted >= 0) & ~jnp.isnan(new_loss)
        # Where the quotient is not wanted, it is one of harmless numbers.
        change = jnp.where(due, new_loss - self.value, 1)
        ratio = change / jnp.where(no_descent, -1, jnp.where(due, predicted, 1))
        return jnp.where(due, jnp.where(no_descent, -jnp.inf, ratio), jnp.inf)


def _squared_norm(
    lengths: Float[Array, "2"], natural: Model, before: Model
) -> Float[Array, ""]:
    """The squared Euclidean norm of the velocity of a step, given its two lengths."""
    if all(v.dtype == accumulator(v.dtype) for v in jtu.tree_leaves(before)):
        return squared_norm_of_sum(lengths[1], before, -lengths[0], natural)
    # In a lower precision, the sum itself may overflow, and has to tell.
    taken = velocity(lengths, natural, before)
    return tree_dot(taken, taken)
