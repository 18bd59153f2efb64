from typing import Any, TYPE_CHECKING

import numpy as np

from .._custom_types import Model, PerLayer
from .._tag import flatten_tags
from ..analysis import BlockDiagonalOperator
from ..debug._spectra import spectra as layer_spectra
from ._axes import panels, plain, pyplot, shown_path


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST_POINTS = 500
_MOST_NAMED = 12


def spectra(
    model: Model,
    curvature: Model,
    *,
    damping: PerLayer | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """The eigenvalues of every layer's curvature, from the largest down, on logarithmic
    scales. The damping, if drawn, shows its effect: along directions above it,
    steps are scaled by the curvature; along those below it, by the damping. For stacked
    layers, the eigenvalues of all are one line. Layers with a factor wider than 2048,
    whose decomposition would take long, are left out, and counted in the legend.

    **Arguments:**

    - `model`: the converted model.
    - `curvature`: `state.curvature`, or what [`eqx_kfac.curvature`][] returns.
    - `damping`: one for all layers, or one for each: `state.damping`,
        `state.layer_damping`. It is drawn as a dashed line.
    - `ax`: matplotlib axes to draw into.

    **Returns:** the matplotlib axes.

    **Raises:** `ValueError` for a damping that does not fit the layers.

    !!! Example

        ```python
        kfac.plot.spectra(model, state.curvature, damping=state.layer_damping)
        ```
    """
    operator = BlockDiagonalOperator(curvature, model)
    axis = panels(1, 1, 6, 4)[0, 0] if ax is None else ax
    found = layer_spectra(model, curvature)
    layers = [(s.path, np.ravel(s.values)) for s in found if s.values is not None]
    wide = [s.path for s in found if s.values is None]
    colours = pyplot().get_cmap("viridis")(np.linspace(0, 0.92, len(layers)))
    for (path, values), colour in zip(layers, colours, strict=True):
        ordered = np.sort(values)[::-1]
        ranks = _ranks(len(ordered))
        points = np.stack([ranks, ordered[ranks - 1]])[:, ordered[ranks - 1] > 0]
        marker = "." if len(ranks) == 1 else None
        axis.plot(*points, label=shown_path(path), color=colour, marker=marker)
    if damping is not None and layers:
        dampings = _of_layers(model, operator.per_layer(damping, "damping"))
        drawn = {path for path, _ in layers}
        shown = [own for path, own in dampings if path in drawn]
        _draw_damping(axis, shown, layers, colours)
    if wide:
        axis.plot([], [], linestyle="", label=f"{len(wide)} too wide, not drawn")
    plain(axis, xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue")
    handles, labels = axis.get_legend_handles_labels()
    if len(layers) > _MOST_NAMED:  # The first, the middle, the last.
        shown = [0, len(layers) // 2, len(layers) - 1, *range(len(layers), len(labels))]
        handles, labels = [handles[i] for i in shown], [labels[i] for i in shown]
    axis.legend(handles, labels, frameon=False, fontsize=8)
    return axis


def _draw_damping(axis: "Axes", dampings: list, layers: list, colours: Any) -> None:
    """One line if it is the same for all layers, else one for each."""
    style: dict[str, Any] = dict(linestyle="--", linewidth=0.9)
    if len({float(number) for own in dampings for number in own}) == 1:
        axis.axhline(dampings[0][0], color="0.5", label="damping", **style)
        return
    for (_, values), own, colour in zip(layers, dampings, colours, strict=True):
        axis.hlines(own, 1, len(values), color=colour, **style)
    axis.plot([], [], color="0.5", label="damping of each layer", **style)


def _ranks(number: int) -> np.ndarray:
    """The ranks to be drawn: of many, as many in every decade."""
    if number <= _MOST_POINTS:
        return np.arange(1, number + 1)
    return np.unique(np.geomspace(1, number, _MOST_POINTS).round().astype(int))


def _of_layers(model: Model, tree: Model) -> list[tuple[str, np.ndarray]]:
    """What a tree shaped like the model has of every layer, flat, by path."""
    found, _ = flatten_tags(lambda tag, layer, own: own, model, tree)
    return [(path, np.ravel(np.asarray(own, float))) for path, own in found]
