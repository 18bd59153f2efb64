"""What `print` says of an optimizer, and of its state: a few lines."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._custom_types import Choices
from .._jax import Tracer
from ._quadratic import AbstractStepRule
from ._schedule import Staggered


def shown(value: PyTree) -> str:
    """A number as such; anything else (of several steps, or while tracing), by type."""
    if eqx.is_array(value) and value.ndim == 0 and not isinstance(value, Tracer):
        number = value.item()  # Zero has no sign.
        return f"{number + 0.0:.4g}" if isinstance(number, float) else str(number)
    return eqx.tree_pformat(value, struct_as_array=True)


def on_one_line(value: PyTree) -> str:
    """How a choice would be written in a call, however long that is."""
    return eqx.tree_pformat(value, width=10**4)


def optimizer_said(choices: Choices, early: frozenset[str]) -> str:
    """All that was chosen, with what stands in the place of `"auto"`. `early`: the
    periods that begin shorter."""
    said = {name: _choice(value) for name, value in choices.items()}
    curvature = _period(choices["curvature_period"], "curvature_period" in early)
    inverse = _period(choices["inverse_period"], "inverse_period" in early)
    lines = {
        "learning rate": f"{said['learning_rate']}, momentum {said['momentum']}",
        "norm constraint": said["norm_constraint"] or "none",
        "damping": said["damping"],
        "curvature": f"{said['fisher']} {curvature}, decay {said['ema']}",
        "inverse": f"{said['solver']} {inverse}",
        "averaging": said["averaging"] or "none",
        "weight decay": said["weight_decay"],
        "guard": said["guard"],
        "fallback": choices["fallback"] and "for the parameters that no tag covers",
    }
    one_rule = isinstance(choices["learning_rate"], AbstractStepRule)
    if one_rule and choices["learning_rate"] == choices["momentum"]:
        lines["learning rate"] = f"and momentum by {said['learning_rate']}"
    return _lines("KFAC", lines)


def state_said(state: Any) -> str:
    """How a run is going: one run that is here, not several, nor one that is traced."""
    if (
        not all(map(_is_here, jtu.tree_leaves(state.hyperparameters)))
        or state.step.ndim > 0
    ):
        return repr(state)
    rejected = shown(state.rejected)
    lines = {
        "step": shown(state.step) + f", {rejected} rejected" * (rejected != "0"),
        "loss": _loss(state),
        "learning rate": _numbers(state),
        "damping": shown(state.damping) + _extent(state.layer_damping),
        "curvature": (
            f"{_megabytes(state.curvature)} MB, weight {shown(state.weight)}; inverse "
            f"{_megabytes(state.inverse)} MB"
        ),
        "faults": repr(state.faults).removeprefix("Faults(")[:-1] or "none",
    }
    return _lines("KFACState", lines)


def _lines(title: str, lines: Mapping[str, str | None]) -> str:
    kept = {name: text for name, text in lines.items() if text}
    width = max(map(len, kept))
    return "\n".join([title, *(f"  {name:<{width}}  {kept[name]}" for name in kept)])


def _choice(value: PyTree) -> str | None:
    if value is None:
        return None
    if callable(value) and not isinstance(value, eqx.Module):
        return f"by a schedule, `{getattr(value, '__name__', type(value).__name__)}`"
    return shown(value) if eqx.is_array(value) else on_one_line(value)


def _period(period: int | Staggered, early: bool) -> str:
    if isinstance(period, Staggered):
        return f"in turn, each layer every {period.period} steps"
    often = "at every step" if period == 1 else f"every {period} steps"
    return often + ", at first at 0, 1, 2, 3, 4, 6, ..." * early


def _loss(state: Any) -> str:
    """The loss of the last step that was not bad, and how many have been since."""
    rollback = state.rollback
    loss, bad, caution = map(shown, (rollback.loss, rollback.bad, rollback.caution))
    said = loss if shown(rollback.level) != "0" else "not known yet"
    said += f", not finite or far above in the last {bad}" * (bad != "0")
    return said + f", damping times {caution} since it exploded" * (caution != "1")


def _numbers(state: Any) -> str:
    said = f"{shown(state.learning_rate)}, momentum {shown(state.momentum)}"
    if state.norm_constraint is not None:
        said += f", norm constraint {shown(state.norm_constraint)}"
    return said


def _extent(dampings: PyTree) -> str:
    """The least and the greatest damping of a layer, if all of them are here."""
    leaves = jtu.tree_leaves(dampings)
    if not leaves or not all(map(_is_here, leaves)):
        return ""
    each = [np.asarray(leaf) for leaf in leaves]
    least, most = min(map(np.min, each)), max(map(np.max, each))
    extent = f"{least:.4g}" + f" to {most:.4g}" * bool(most > least)
    return f"; of the layers {extent}" * bool(most > 0)  # None has been chosen at first.


def _is_here(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) or (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and leaf.is_fully_addressable
    )


def _megabytes(tree: PyTree) -> str:
    leaves = [leaf for leaf in jtu.tree_leaves(tree) if hasattr(leaf, "dtype")]
    return f"{sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6:.3g}"
