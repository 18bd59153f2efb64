"""What may be chosen for K-FAC: numbers, schedules of numbers, rules, and parts. Choices
are mappings from the names of arguments to what was passed for them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._checks import check_count, check_flag, check_instance, check_number
from .._custom_types import Model
from .._fisher import AbstractFisher
from .._solver import AbstractDampedSolver, Cholesky
from ._damping import AbstractDamping
from ._layer_damping import AbstractLayerDamping, LayerDamping
from ._quadratic import QuadraticModel
from ._trust import AbstractTrustRegion, TrustRegion, Window


# Numbers, or schedules of numbers: their ranges. The state holds their current values.
NUMBERS = {
    "learning_rate": "positive",
    "momentum": "in [0, 1)",
    "damping": "at least 0",
    "damping_ratio": "positive",
    "norm_constraint": "positive",
    "ema": "in [0, 1]",
    "max_increase": "at least 0",
    "weight_decay": "at least 0",
    "averaging": "in [0, 1]",
}
_RULES = (AbstractDamping, AbstractLayerDamping, AbstractTrustRegion)
# Integers: the least that they may be.
_COUNTS = {
    "curvature_period": 1,
    "curvature_examples": 1,
    "inverse_period": 1,
    "burn_in": 0,
}
_FLAGS = {"in_turn", "packed", "through_rows"}
_PARTS = {
    "fisher": (AbstractFisher, "kfac.MonteCarlo()"),
    "solver": (AbstractDampedSolver, "kfac.Cholesky()"),
}
# Those of them that may be `None`.
_OPTIONAL = {
    "norm_constraint",
    "max_increase",
    "weight_decay",
    "averaging",
    "curvature_examples",
}
# What `"auto"` stands for where all lengths are given, and where a rule looks at every
# step anyway.
_AUTO = {
    "damping": (LayerDamping(), 0.03),
    "norm_constraint": (TrustRegion(), None),
    "averaging": (Window(), None),
    "curvature_period": (10, 1),
    "inverse_period": (50, 5),
    "through_rows": ("auto", False),
}


class Rules(NamedTuple):
    """What chooses numbers anew at every step; `None` where it is a number, or a
    schedule."""

    learning_rate: QuadraticModel | None
    momentum: QuadraticModel | None
    damping: AbstractDamping | None
    norm_constraint: AbstractTrustRegion | None
    layer_damping: AbstractLayerDamping | None

    def of(self, name: str) -> Any:
        """The rule that was given for a number, if it was one."""
        rule = getattr(self, name, None)
        return self.layer_damping if rule is None and name == "damping" else rule


def rules_of(choices: Mapping[str, Any]) -> Rules:
    """The rules among some choices."""

    def rule(name, cls):
        value = choices.get(name)
        return value if isinstance(value, cls) else None

    return Rules(
        learning_rate=rule("learning_rate", QuadraticModel),
        momentum=rule("momentum", QuadraticModel),
        damping=rule("damping", AbstractDamping),
        norm_constraint=rule("norm_constraint", AbstractTrustRegion),
        layer_damping=rule("damping", AbstractLayerDamping),
    )


def resolved(choices: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The choices, with something in the place of `"auto"`; and which periods are only
    for later, after first steps at which more is due."""
    rules = rules_of(choices)
    ruled = (rules.learning_rate, rules.momentum, rules.damping) != (None,) * 3
    is_auto = lambda value: isinstance(value, str) and value == "auto"
    auto = [name for name in _AUTO if is_auto(choices[name])]
    chosen = {**choices, **{name: _AUTO[name][ruled] for name in auto}}
    if is_auto(choices["solver"]):
        each = isinstance(chosen["damping"], AbstractLayerDamping)
        chosen["solver"] = Cholesky(without_bias=each)
    early = () if ruled else [name for name in auto if name in _COUNTS]
    return chosen, frozenset(early)


def check_choices(choices: Mapping[str, Any]) -> None:
    """Raises for choices of the wrong kind, out of their range, or that exclude each
    other."""
    rules = rules_of(choices)
    for name, value in choices.items():
        ruled = rules.of(name) is not None
        if not (ruled or (value is None and name in _OPTIONAL)):
            _check_choice(name, value)
    _check_fallback(choices.get("fallback"))
    _check_together(choices, rules)


def check_without_loss(choices: Mapping[str, Any], where: str) -> None:
    """Raises for choices that need the loss function, or the model, at every step."""
    rules = rules_of(choices)._asdict()
    del rules["norm_constraint"], rules["layer_damping"]  # `check_given` knows.
    others = ("max_increase", "through_rows")
    chosen = rules | {name: choices.get(name) for name in others}
    idle = lambda v: v is None or v is False or isinstance(v, str)
    needing = {k: v for k, v in chosen.items() if not idle(v)}
    if needing:
        listed = ", ".join(f"`{name}={value}`" for name, value in needing.items())
        raise ValueError(
            f"{listed} needs the loss function and the model, which "
            f"`{where}` does not have. Use `KFAC.step`, or a number instead."
        )


def check_given(choices: Mapping[str, Any], model: Model, value: Any) -> None:
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
            raise ValueError(
                f"`{name}={chosen}` needs the `{argument}`, which `update` did not get. "
                f"Pass it, or construct the optimizer with `{name}=None`."
            )


def _check_choice(name: str, value: Any) -> None:
    if name in NUMBERS:
        # A rule in the wrong place can be called, but is no schedule.
        schedule = not isinstance(value, _RULES)
        check_number(name, value, NUMBERS[name], schedule)
    elif name in _COUNTS:
        check_count(name, value, _COUNTS[name])
    elif name in _FLAGS and not (name in _AUTO and value == "auto"):
        check_flag(name, value)
    elif name in _PARTS:
        check_instance(name, value, *_PARTS[name])


def _check_fallback(fallback: Any) -> None:
    if fallback is not None and not all(
        callable(getattr(fallback, name, None)) for name in ("init", "update")
    ):
        raise TypeError(
            "`fallback` must be an optax transformation such as `optax.adam(1e-3)`, but "
            f"is {fallback!r}."
        )


def _check_together(choices: Mapping[str, Any], rules: Rules) -> None:
    mask, decay = (choices.get(n) for n in ("weight_decay_mask", "weight_decay"))
    if mask is not None and decay is None:
        raise ValueError("`weight_decay_mask` is given, but no `weight_decay`.")
    length, momentum = rules.learning_rate, rules.momentum
    if length is not None and choices.get("norm_constraint") is not None:
        raise ValueError(
            "`norm_constraint` bounds the step that a given learning rate makes; a "
            "`kfac.QuadraticModel()` finds the length itself. Leave one of them out."
        )
    if (length, momentum) != (None, None) and rules.layer_damping is not None:
        raise ValueError(
            "The quadratic model has one damping for all layers: give a number or a "
            "`kfac.LevenbergMarquardt(...)`, not a `kfac.LayerDamping`."
        )
    if length is not None and momentum is not None and length != momentum:
        raise ValueError(
            "One quadratic model chooses learning rate and momentum together, but "
            f"two different ones are given: {length} and {momentum}."
        )
