from collections.abc import Sequence
from typing import Any, TYPE_CHECKING

import numpy as np

from .._misc import names


if TYPE_CHECKING:  # It is imported with the first picture.
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def pyplot() -> Any:
    """`matplotlib.pyplot`."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "`kfac.plot` draws with matplotlib, which is not installed: "
            "`pip install matplotlib`."
        ) from error
    return plt


def panels(rows: int, columns: int, width: float, height: float) -> np.ndarray:
    """Empty axes `[rows, columns]`, each so many inches wide and high."""
    size = columns * width, rows * height
    _, axes = pyplot().subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    return axes


def plain(axis: "Axes", **properties: Any) -> "Axes":
    """Axes without a box, with a grid in the background."""
    axis.set(**properties)
    axis.grid(True, color="0.5", alpha=0.2, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return axis


def image(axis: "Axes", matrix: np.ndarray, title: str, **style: Any) -> "AxesImage":
    """A matrix as a picture of its own proportions, without ticks."""
    found = axis.imshow(matrix, interpolation="nearest", **style)
    axis.set_title(title, fontsize=9)
    axis.set(xticks=[], yticks=[])
    return found


def chosen(found: Sequence[tuple[str, Any]], layers: Sequence[str] | None) -> list:
    """The pairs `(path, of layer)` whose paths are asked for, in the order asked for;
    `None`: all.

    **Raises:** `ValueError` for a path that is none of a layer."""
    if layers is None:
        return list(found)
    by_path = dict(found)
    missing = [path for path in layers if path not in by_path]
    if isinstance(layers, str) or missing:
        there = names(list(by_path))
        raise ValueError(
            f"`layers` must be a list of paths of tagged layers, of {there}, but is "
            f"{layers!r}."
        )
    return [(path, by_path[path]) for path in layers]


def shown_path(path: str) -> str:
    return path or "(the model)"
