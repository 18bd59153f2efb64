"""K-FAC as optax optimizers: the preconditioner alone, and all of it."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .._complex import steepest
from .._curvature import each_known, known_layers
from .._custom_types import Model, Numeric
from .._devices import beside, putting
from .._inverse import precondition
from .._jax import is_placeholder
from .._operator import still_sharded
from .._raw import check_covered
from .._solver import AbstractDampedSolver, Cholesky
from .._tag import is_trainable, map_tags, partition_tagged
from ._choices import check_choices, check_without_loss
from ._collect import Average
from ._factors import check_belongs, Factorising, init_factors
from ._fallback import init_fallback, update_fallback
from ._hyperparameters import (
    AbstractRule,
    Hyperparameters,
    in_range,
    initial,
    WeightDecay,
)
from ._kfac import Auto, KFAC
from ._layer_damping import AbstractLayerDamping
from ._schedule import Due, Staggered
from ._state import ScaleByKFACState
from ._trust import AbstractTrustRegion


_missing = object()


def scale_by_kfac(
    damping: Numeric = 0.03,
    *,
    solver: AbstractDampedSolver = Cholesky(),
    inverse_period: int | Staggered = 5,
    ema: Numeric = 0.95,
    fallback: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""K-FAC preconditioning, $\nabla h \mapsto \hat F^{-1} \nabla h$, as an optax
    transformation to be chained with others. Its `update` takes the curvature as an extra
    argument; `curvature=None` keeps the average as it is. Before a layer has any
    curvature, and while a number is out of its range, its updates are zero.
    Gradients are as `jax.grad` returns them, also of complex parameters (which no tag
    covers): the `fallback` gets their conjugates.

    **Arguments:**

    - `damping`, `solver`, `inverse_period`, `ema`: as for [`eqx_kfac.KFAC`][], but no
        rule chooses the damping.
    - `fallback`: transforms the gradients of the parameters that no tag covers
        (`optax.scale_by_adam()`, say); whatever follows in the chain also applies to its
        result.

    **Raises:** `ValueError` from `init`, as [`eqx_kfac.KFAC`][] does; `TypeError` from
    `update` if `curvature` is left out, or lost by a wrapper (`optax.lookahead`, say).

    !!! Example

        ```python
        optimizer = optax.chain(
            kfac.scale_by_kfac(damping=1e-3),
            optax.trace(0.9),
            optax.scale_by_learning_rate(1e-2),
        )
        value_and_all = kfac.value_grad_and_curvature(loss_fn)
        loss, grads, curvature = value_and_all(model, x, y, key=key)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, curvature=curvature
        )
        model = eqx.apply_updates(model, updates)
        ```
    """
    choices: dict[str, Any] = dict(
        damping=damping,
        solver=solver,
        inverse_period=inverse_period,
        ema=ema,
        fallback=fallback,
    )
    check_choices(choices)
    check_without_loss(choices, "kfac.scale_by_kfac", AbstractRule)
    made = _ScaleByKFAC(**choices)
    return optax.GradientTransformationExtraArgs(made.init, made.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _ScaleByKFAC:
    """The choices of `scale_by_kfac`."""

    damping: Numeric
    solver: AbstractDampedSolver
    inverse_period: int | Staggered
    ema: Numeric
    fallback: optax.GradientTransformation | None

    @property
    def _hyperparameters(self) -> Hyperparameters:
        nothing = Hyperparameters(*[None] * len(Hyperparameters._fields))
        return nothing._replace(damping=self.damping, ema=self.ema)

    @putting
    def init(self, params: Model) -> Any:
        params = _unmask(params)
        if is_placeholder(params):
            trees = _in_place_of(params, self.fallback)
        else:
            check_covered(params, self.fallback)
            curvature, inverse, _ = init_factors(params, self.solver)
            others = init_fallback(params, self.fallback)
            trees = dict(curvature=curvature, inverse=inverse, fallback=others)
        step, weight = jnp.zeros((), jnp.int32), jnp.zeros((), float)
        return beside(ScaleByKFACState(step=step, weight=weight, **trees), params)

    def update(self, updates, state, params=None, *, curvature=_missing, **extra) -> Any:
        del extra
        _check_given(curvature, "kfac.scale_by_kfac")
        updates, params = _unmask(updates), _unmask(params)
        check_belongs(state, self.init, updates)
        numbers = initial(self._hyperparameters, state.step)
        # Numbers that cannot change were checked when they were chosen.
        checked = not any(map(_may_change, self._hyperparameters))
        fine = True if checked else in_range(numbers)
        known = known_layers(state.curvature)
        average = Average(state.curvature, state.weight, jnp.asarray(fine), known)
        if curvature is not None:
            new = _trained(curvature, updates)
            average = average.including(updates, new, numbers.ema)
        averaged, weight = average.curvature, average.weight
        due = Due.of(state, self.inverse_period, again=average.first)
        factorising = Factorising(updates, self.solver, due, fine)
        averaged = factorising.in_own_bases(averaged)
        inverse, _ = factorising(state.inverse, averaged, numbers.damping)
        gradient, _ = partition_tagged(updates)
        factorised = averaged, inverse, self.solver, numbers.damping
        still = jtu.tree_map(jnp.logical_not, each_known(averaged))
        natural = precondition(gradient, *factorised, still)
        ready = fine & (weight > 0)
        natural = jtu.tree_map(lambda n: jnp.where(ready, n, 0), natural)
        others, fallback = update_fallback(
            steepest(updates), state.fallback, params, self.fallback
        )
        averaged, inverse = still_sharded((averaged, inverse))
        state = ScaleByKFACState(state.step + 1, averaged, inverse, weight, fallback)
        return eqx.combine(natural, others), state


def optax_kfac(
    learning_rate: Numeric = 0.1,
    momentum: Numeric = 0.9,
    damping: Numeric | AbstractLayerDamping | Auto = 0.03,
    *,
    solver: AbstractDampedSolver | Auto = "auto",
    norm_constraint: Numeric | AbstractTrustRegion | Auto | None = None,
    weight_decay: Numeric | WeightDecay | None = None,
    averaging: Numeric | Auto | None = None,
    inverse_period: int | Staggered | Auto = 5,
    ema: Numeric = 0.95,
    fallback: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """[`eqx_kfac.KFAC`][] as an optax optimizer: the same arguments, the same steps.

    Its `update` takes `curvature` (`None` keeps the average as it is; until there is one,
    steps are rejected) and `value` as extra arguments. How the curvature is estimated
    (`fisher`, `curvature_period`, burn-in) is up to you, who estimate it.

    The defaults are numbers. What `KFAC()` has instead (a trust region, damping for every
    layer, averaged parameters) needs the loss and the parameters, and optax's `update`
    may be called without them. If you
    pass both to `update`, you get the steps of `KFAC()` with `"auto"` for `damping`,
    `norm_constraint`, `averaging` and `inverse_period`; except that the trust region does
    not know how many terms the loss has, and is not smaller for small batches.

    **Arguments:**

    - `learning_rate`, `momentum`, `damping`, `solver`, `norm_constraint`,
        `weight_decay`, `averaging`, `inverse_period`, `ema`, `fallback`: as for
        [`eqx_kfac.KFAC`][], but no rules that need the loss function.

    **Raises:** as [`eqx_kfac.scale_by_kfac`][]; `ValueError` from `update` if a choice
    needs the parameters or the value, and they are missing.

    !!! Example

        ```python
        optimizer = kfac.optax_kfac(1e-2, momentum=0.9, damping=1e-3)
        value_and_all = kfac.value_grad_and_curvature(loss_fn)
        loss, grads, curvature = value_and_all(model, x, y, key=key)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, curvature=curvature
        )
        ```
    """
    optimizer = KFAC(
        learning_rate,
        momentum,
        damping,
        solver=solver,
        norm_constraint=norm_constraint,
        weight_decay=weight_decay,
        averaging=averaging,
        inverse_period=inverse_period,
        ema=ema,
        fallback=fallback,
    )
    check_without_loss(vars(optimizer), "kfac.optax_kfac")
    made = _KFAC(optimizer)
    return optax.GradientTransformationExtraArgs(made.init, made.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _KFAC:
    """An optimizer as the two functions that optax asks for."""

    optimizer: KFAC

    @putting
    def init(self, params: Model) -> Any:
        params, optimizer = _unmask(params), self.optimizer
        if is_placeholder(params):
            trees = _in_place_of(params, optimizer.fallback)
            leaf = trees["curvature"]
            state = optimizer._init_with(
                velocity=leaf,
                layer_damping=None if optimizer._rules.layer_damping is None else leaf,
                averaged_parameters=None if optimizer.averaging is None else leaf,
                rollback=leaf,
                known=leaf,
                **trees,
            )
        else:
            state = optimizer.init(params)
        # Numbers have one definite type from the beginning, because optax may choose
        # between the states of two branches, which must have the same types.
        fixed = [
            None if v is None else jnp.array(v, float) for v in state.hyperparameters
        ]
        return state._replace(hyperparameters=Hyperparameters(*fixed))

    def update(
        self, updates, state, params=None, *, curvature=_missing, value=None, **extra
    ) -> Any:
        del extra
        _check_given(curvature, "kfac.optax_kfac")
        updates, params = _unmask(updates), _unmask(params)
        if curvature is not None:
            curvature = _trained(curvature, updates)
        # Arrays here come from `optax.inject_hyperparams`: they are the current values.
        both = zip(self.optimizer._hyperparameters, state.hyperparameters, strict=True)
        numbers = [chosen if eqx.is_array(chosen) else old for chosen, old in both]
        state = state._replace(hyperparameters=Hyperparameters(*numbers))
        return self.optimizer.update(
            updates, state, params, curvature=curvature, value=value
        )


def _check_given(curvature: object, name: str) -> None:
    if curvature is _missing:
        raise TypeError(
            f"The `update` of `{name}` needs the curvature as an extra argument: "
            "`optimizer.update(grads, opt_state, params, curvature=curvature)`, from "
            "`kfac.value_grad_and_curvature(loss_fn)`; or `curvature=None`, to keep the "
            "average as it is. Some wrappers (`optax.lookahead`, "
            "`optimistix.OptaxMinimiser`) drop extra arguments: wrap something else."
        )


def _may_change(choice: object) -> bool:
    """Whether a number may be another one in a later step, so that checking it when it
    was chosen does not suffice."""
    return callable(choice) or eqx.is_array(choice)


def _in_place_of(
    params: Any, fallback: optax.GradientTransformation | None
) -> dict[str, Any]:
    """What a state has in the place of its trees if optax asks for a state of
    placeholders, to learn which of its parts are shaped like the parameters: curvature
    and inverse are not, so that one leaf stands for each."""
    others = None if fallback is None else fallback.init(params)
    leaf = jnp.zeros(())
    return dict(curvature=leaf, inverse=leaf, fallback=others)


def _is_masked(node: PyTree) -> bool:
    return isinstance(node, optax.MaskedNode)


def _unmask(tree: PyTree) -> PyTree:
    """`optax.masked` hides what is not to be trained; here, that is `None`."""
    return jtu.tree_map(lambda n: None if _is_masked(n) else n, tree, is_leaf=_is_masked)


def _trained(curvature: Model, updates: Model) -> Model:
    """The curvature of the layers that are trained."""
    return map_tags(
        lambda tag, layer, factors: factors if is_trainable(tag, layer) else None,
        updates,
        curvature,
    )
