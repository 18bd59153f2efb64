from collections.abc import Callable
from typing import Any

import numpy as np

from .._custom_types import Key, Model
from .._fisher import AbstractFisher
from ..debug._blocks import dense_blocks
from ._axes import image, panels, pyplot, shown_path


def blocks(
    loss_fn: Callable,
    model: Model,
    *args: Any,
    layer: str,
    fisher: AbstractFisher | None = None,
    key: Key | None = None,
    **kwargs: Any,
) -> np.ndarray:
    """The exact block of one layer's curvature, its approximation, and the difference, as
    matrices: rows and columns are the parameters of the layer, output by output. This is
    what [`eqx_kfac.verify`][] says in numbers; where the exact block is too much work, it
    is estimated as there. For stacked layers, the first is drawn.

    **Arguments:**

    - `loss_fn`, `model`, `args`, `kwargs`, `fisher`, `key`: as for [`eqx_kfac.verify`][].
    - `layer`: the path of the layer, as [`eqx_kfac.summary`][] names it.

    **Returns:** the three matplotlib axes.

    **Raises:** `ValueError` for a path at which there is no tagged layer, or one whose
        block is too large for a picture.

    !!! Example

        ```python
        kfac.plot.blocks(loss_fn, model, x[:8], y[:8], layer=".layers[0]")
        ```
    """
    *found, samples = dense_blocks(loss_fn, model, args, kwargs, fisher, key, layer)
    guess, exact = (stack[0] for stack in found)
    pyplot()
    from matplotlib.colors import SymLogNorm

    most = max(np.max(np.abs(exact)), np.max(np.abs(guess))) or 1.0
    norm = SymLogNorm(0.03 * most, vmin=-most, vmax=most)
    axes = panels(1, 3, 3.2, 3.2)[0]
    error = np.linalg.norm(guess - exact) / (np.linalg.norm(exact) or 1.0)
    exactly = "exact" if samples is None else f"estimated from {samples} vectors"
    titles = f"{shown_path(layer)}: {exactly}", "approximate", f"difference ({error:.0%})"
    drawn = [
        image(axis, matrix, title, cmap="RdBu_r", norm=norm)
        for axis, title, matrix in zip(axes, titles, (exact, guess, guess - exact))
    ]
    ticks = most * np.array([-1, -0.1, 0, 0.1, 1])
    axes[0].figure.colorbar(drawn[0], ax=axes, shrink=0.7, ticks=ticks, format="%.0e")
    return axes
