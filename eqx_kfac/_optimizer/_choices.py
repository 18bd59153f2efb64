"""What may be chosen for K-FAC: numbers, schedules of numbers, rules, and parts. Choices
are mappings from the names of arguments to what was passed for them."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .._checks import check_count, check_instance, check_number
from .._custom_types import Choices, Model
from .._fisher import AbstractFisher
from .._solver import AbstractDampedSolver, Cholesky
from ._damping import AbstractDamping
from ._guard import AbstractGuard
from ._hyperparameters import (
    AbstractHyperparameter,
    AbstractRule,
    MovingAverage,
    RANGES,
    WeightDecay,
)
from ._layer_damping import AbstractLayerDamping, LayerDamping
from ._quadratic import AbstractStepRule
from ._said import on_one_line
from ._schedule import Staggered
from ._schedule_free import ScheduleFree
from ._trust import AbstractTrustRegion, TrustRegion, Window


_Rule = TypeVar("_Rule", bound=AbstractRule | AbstractHyperparameter)


class Option(NamedTuple):
    """What an argument of [`eqx_kfac.KFAC`][] may be.

    **Fields:**

    - `check`: `check(name, value)` raises for what it may not be.
    - `kinds`: the classes of objects that it may be besides.
    - `optional`: whether it may be `None`.
    - `auto`: what `"auto"` stands for: where all lengths are given, and where a rule
        looks at every step anyway.
    """

    check: Callable[[str, object], None]
    kinds: tuple[type, ...] = ()
    optional: bool = False
    auto: tuple[object, object] | None = None


def _number(name: str, value: object) -> None:
    # A rule in the wrong place can be called, but is no schedule.
    schedule = not isinstance(value, (AbstractRule, AbstractHyperparameter))
    check_number(name, value, getattr(RANGES, name), schedule)


def _period(name: str, value: object) -> None:
    check_count(name, value, 1)


def _part(kind: type, example: str) -> Callable[[str, object], None]:
    return lambda name, value: check_instance(name, value, kind, example)


def _fallback(name: str, value: object) -> None:
    methods = [getattr(value, method, None) for method in ("init", "update")]
    if not all(map(callable, methods)):
        raise TypeError(
            f"`{name}` must be an optax transformation such as `optax.adam(1e-3)`, but "
            f"is {value!r}."
        )


OPTIONS: dict[str, Option] = dict(
    learning_rate=Option(_number, (AbstractStepRule,)),
    momentum=Option(_number, (AbstractStepRule,)),
    damping=Option(
        _number, (AbstractDamping, AbstractLayerDamping), auto=(LayerDamping(), 0.03)
    ),
    fisher=Option(_part(AbstractFisher, "kfac.MonteCarlo()")),
    solver=Option(_part(AbstractDampedSolver, "kfac.Cholesky()")),
    norm_constraint=Option(
        _number, (AbstractTrustRegion,), optional=True, auto=(TrustRegion(), None)
    ),
    guard=Option(_part(AbstractGuard, "kfac.MaxIncrease()"), optional=True),
    weight_decay=Option(_number, (WeightDecay,), optional=True),
    averaging=Option(_number, (ScheduleFree,), optional=True, auto=(Window(), None)),
    curvature_period=Option(_period, auto=(10, 1)),
    inverse_period=Option(_period, (Staggered,), auto=(50, 5)),
    ema=Option(_number, (MovingAverage,)),
    fallback=Option(_fallback, optional=True),
)


class Rules(NamedTuple):
    """What chooses numbers anew; `None` where it is a number, or a schedule. And how a
    step is dealt out, if that is not by its momentum."""

    learning_rate: AbstractStepRule | None
    momentum: AbstractStepRule | None
    damping: AbstractDamping | None
    layer_damping: AbstractLayerDamping | None
    norm_constraint: AbstractTrustRegion | None
    schedule_free: ScheduleFree | None

    @property
    def step(self) -> AbstractStepRule | None:
        """What chooses the learning rate, the momentum, or both."""
        return self.learning_rate or self.momentum

    @property
    def look(self) -> bool:
        """Whether any of them looks at what a step does."""
        return self.step is not None or self.damping is not None


def rules_of(choices: Choices) -> Rules:
    """The rules among some choices."""

    def rule(name: str, cls: type[_Rule]) -> _Rule | None:
        value = choices.get(name)
        return value if isinstance(value, cls) else None

    return Rules(
        learning_rate=rule("learning_rate", AbstractStepRule),
        momentum=rule("momentum", AbstractStepRule),
        damping=rule("damping", AbstractDamping),
        layer_damping=rule("damping", AbstractLayerDamping),
        norm_constraint=rule("norm_constraint", AbstractTrustRegion),
        schedule_free=rule("averaging", ScheduleFree),
    )


def resolved(choices: Choices) -> tuple[dict[str, Any], frozenset[str]]:
    """The choices, with something in the place of `"auto"`; and which periods are only
    for later, after first steps at which more is due."""
    ruled = rules_of(choices).look
    chosen, early = dict(choices), set()
    for name, option in OPTIONS.items():
        if _is_auto(choices[name]) and option.auto is not None:
            chosen[name] = option.auto[ruled]
            if option.check is _period and not ruled:
                early.add(name)
    if _is_auto(choices["solver"]):
        each = isinstance(chosen["damping"], AbstractLayerDamping)
        chosen["solver"] = Cholesky(scaled_bias=each)
    return chosen, frozenset(early)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def check_choices(choices: Choices) -> None:
    """Raises for choices of the wrong kind, out of their range, or that exclude each
    other."""
    for name, value in choices.items():
        option = OPTIONS[name]
        is_none = value is None and option.optional
        if not (is_none or isinstance(value, option.kinds)):
            option.check(name, value)
    _check_together(choices, rules_of(choices))


def check_without_loss(choices: Choices, where: str, *also: type[AbstractRule]) -> None:
    """Raises for choices that need the loss function, or the model, at every step; and
    for rules of the kinds `also`."""
    names = ("learning_rate", "momentum", "damping", "guard")
    looking = (AbstractStepRule, AbstractDamping, AbstractGuard, *also)
    needing = {n: choices.get(n) for n in names if isinstance(choices.get(n), looking)}
    ema = choices.get("ema")
    if isinstance(ema, MovingAverage) and ema.burn_in > 0:
        needing["ema"] = ema
    if needing:
        listed = ", ".join(
            f"`{name}={on_one_line(value)}`" for name, value in needing.items()
        )
        raise ValueError(
            f"{listed} needs the loss function and the model, which "
            f"`{where}` does not have. Use `KFAC.step`, or a number instead."
        )


def check_given(choices: Choices, model: Model, value: object) -> None:
    """Raises if an argument of `update` is `None` that a choice needs."""
    rules = rules_of(choices)
    needs = [
        ("averaging", choices["averaging"], "model", model),
        ("damping", rules.layer_damping, "model", model),
        ("damping", rules.layer_damping, "value", value),
        ("norm_constraint", rules.norm_constraint, "value", value),
    ]
    for name, chosen, argument, given in needs:
        if chosen is not None and given is None:
            instead = "0.03" if name == "damping" else "None"
            raise ValueError(
                f"`{name}={on_one_line(chosen)}` needs the `{argument}`, which "
                f"`update` did not get. Pass it, or "
                f"construct the optimizer with `{name}={instead}`."
            )


def _check_together(choices: Choices, rules: Rules) -> None:
    length, momentum = rules.learning_rate, rules.momentum
    if length is not None and choices.get("norm_constraint") is not None:
        raise ValueError(
            "`norm_constraint` bounds the step that a given learning rate makes; a "
            "`kfac.QuadraticModel()` finds the length itself. Leave one of them out."
        )
    if momentum is not None and rules.norm_constraint is not None:
        raise ValueError(
            "A `kfac.TrustRegion` bounds the whole step, with the momentum that is "
            "given; a `kfac.QuadraticModel()` chooses another one. Give a number for "
            "`momentum`, or for `norm_constraint` a number or `None`."
        )
    if rules.step is not None and rules.schedule_free is not None:
        raise ValueError(
            "`kfac.ScheduleFree` deals out steps whose learning rate and momentum are "
            "given; a `kfac.QuadraticModel()` chooses others. Give numbers for both, or "
            "for `averaging` a number, `kfac.Window()` or `None`."
        )
    if rules.step is not None and rules.layer_damping is not None:
        raise ValueError(
            "The quadratic model has one damping for all layers: give a number or a "
            "`kfac.LevenbergMarquardt(...)`, not a `kfac.LayerDamping`."
        )
    if length is not None and momentum is not None and length != momentum:
        raise ValueError(
            "One quadratic model chooses learning rate and momentum together, but "
            f"two different ones are given: {length} and {momentum}."
        )
