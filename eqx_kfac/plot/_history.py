from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

import jax
import numpy as np

from .._optimizer import Info
from ._axes import panels, plain


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# What is drawn into which panel.
_PANELS = {
    "loss": ("loss", "new_loss"),
    "learning rate, momentum": ("learning_rate", "momentum"),
    "damping": ("damping",),
    "norms": ("gradient_norm", "update_norm"),
    "reduction ratio": ("reduction_ratio",),
}


def history(
    infos: Info | Mapping[str, Any] | Sequence[Any], every: int = 1
) -> np.ndarray:
    """How a run went: the loss, with a mark at every rejected step, and why;
    learning rate and momentum; damping; the norms of gradient and update; the reduction
    ratio, if a rule measures it. Scales are logarithmic if nothing is negative, except
    that the scale of the ratio is linear.

    **Arguments:**

    - `infos`: the `info` of every step, or its `info.as_dict()`, which is smaller: a list
        of them, or what a `jax.lax.scan` has stacked, or a list of these.
    - `every`: the number of steps per entry.

    **Returns:** the matplotlib axes, one for every panel.

    **Raises:** `ValueError` if there is no step in it, or more than one run.

    !!! Example

        ```python
        infos = []
        for x, y in batches:
            model, state, info = train_step(model, state, x, y)
            infos.append(info.as_dict())
        axes = kfac.plot.history(infos)
        axes[0].figure.savefig("history.png")
        ```
    """
    seen = _series(infos)
    steps = every * np.arange(len(seen["loss"]))
    each = {
        title: {name: seen[name] for name in names if np.any(np.isfinite(seen[name]))}
        for title, names in _PANELS.items()
    }
    drawn = {title: values for title, values in each.items() if values}
    axes = panels(1, len(drawn), 3.2, 2.8)[0]
    for axis, (title, values) in zip(axes, drawn.items(), strict=True):
        log = title != "reduction ratio" and _positive(values)
        _draw(plain(axis, title=title, xlabel="steps"), steps, values, log)
        if title == "loss":
            _mark_rejected(axis, steps, seen)
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False, fontsize=8)
    return axes


def _series(infos: Info | Mapping[str, Any] | Sequence[Any]) -> Mapping[str, np.ndarray]:
    """What was measured, by name, for all steps; of anything else, NaN."""
    several = [infos] if isinstance(infos, (Info, Mapping)) else list(infos)
    each = [info.as_dict() if isinstance(info, Info) else info for info in several]
    if not each:
        raise ValueError("There is no step to be drawn: `infos` is empty.")
    each = jax.device_get(each)
    if np.ndim(each[0]["loss"]) > 1:
        raise ValueError(
            f"There are several runs, of shape {np.shape(each[0]['loss'])}: draw one of "
            "them, `jax.tree.map(lambda a: a[i], infos)`."
        )
    found = defaultdict(lambda: np.array([np.nan]))
    for name in each[0]:
        parts = [np.atleast_1d(np.asarray(e[name], float)) for e in each]
        found[name] = np.concatenate(parts)
    return found


def _positive(values: Mapping[str, np.ndarray]) -> bool:
    return not any(np.any(of_name < 0) for of_name in values.values())


def _draw(
    axis: "Axes", steps: np.ndarray, values: Mapping[str, np.ndarray], log: bool
) -> None:
    """Lines through what was measured; the rest is NaN."""
    for name, of_name in values.items():
        there = np.isfinite(of_name) & ((of_name > 0) | (not log))
        marker = "." if np.sum(there) <= 30 else None
        style: dict[str, Any] = dict(
            label=name.replace("_", " "), linewidth=1.2, marker=marker
        )
        axis.plot(steps[there], of_name[there], **style)
    axis.set_yscale("log" if log else "linear")


def _mark_rejected(
    axis: "Axes", steps: np.ndarray, seen: Mapping[str, np.ndarray]
) -> None:
    """A tick at the bottom for every rejected step, a colour for every reason."""
    names = [name for name in seen if name.startswith("faults/")]
    reasons = {name: steps[(seen["rejected"] > 0) & (seen[name] > 0)] for name in names}
    found = {name: at for name, at in reasons.items() if len(at)}
    style: dict[str, Any] = dict(linestyle="", marker="|", markersize=12, clip_on=False)
    for i, (name, at) in enumerate(found.items()):
        axis.plot(
            at,
            np.zeros(len(at)),
            transform=axis.get_xaxis_transform(),
            color=f"C{3 + i}",
            **style,
            label=f"rejected: {name.removeprefix('faults/')} ({len(at)})",
        )
