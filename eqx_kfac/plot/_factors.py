from collections.abc import Sequence

import lineax as lx
import numpy as np

from .._block import AbstractFactors
from .._custom_types import Layer, Model
from .._devices import over_stack
from .._operator import unpacked
from .._tag import flatten_tags, Tag
from ._axes import chosen, image, panels, plain, shown_path


_MOST_PIXELS = 1024


def factors(
    model: Model, curvature: Model, layers: Sequence[str] | None = None
) -> np.ndarray:
    r"""Which inputs of a layer are large together, and which gradients at its outputs:
    its factors as correlations $A_{ij} / \sqrt{A_{ii} A_{jj}}$, from -1 (blue) to 1
    (red). ([`eqx_kfac.plot.spectra`][] shows how large they are.) Diagonal factors, such
    as that of an embedding's inputs, are drawn as a line. For blocks without
    factors, the diagonal is drawn, in the shape of the weight. For stacked layers, the
    first is drawn. Of wide matrices, rows and columns are drawn at regular distances.

    **Arguments:**

    - `model`: the converted model.
    - `curvature`: `state.curvature`, or what [`eqx_kfac.curvature`][] returns.
    - `layers`: the paths of the layers to draw, as [`eqx_kfac.summary`][] names them.
        `None`: all.

    **Returns:** the matplotlib axes, a row for every layer.

    **Raises:** `ValueError` for a path at which there is no tagged layer.

    !!! Example

        ```python
        kfac.plot.factors(model, state.curvature, [".layers[0]"])
        ```
    """
    together = lambda tag, layer, own: (tag, layer, own)
    found, _ = flatten_tags(together, model, unpacked(curvature))
    rows = [(path, _matrices(*own)) for path, own in chosen(found, layers)]
    axes = panels(len(rows), max(len(row) for _, row in rows), 2.8, 2.8)
    last = None
    for of_layer, (path, matrices) in zip(axes, rows, strict=True):
        for axis, (name, matrix) in zip(of_layer, matrices.items()):
            title = f"{shown_path(path)}\n{name.replace('_', ' ')} {list(matrix.shape)}"
            if 1 in (matrix.ndim, *matrix.shape):
                plain(axis).plot(matrix.ravel(), linewidth=0.8)
                axis.set_title(title, fontsize=9)
            elif name == "diagonal":
                image(axis, _thinned(matrix), title, aspect="auto")
            else:
                style = dict(cmap="RdBu_r", vmin=-1, vmax=1)
                last = image(axis, _correlation(_thinned(matrix)), title, **style)
        for axis in of_layer[len(matrices) :]:
            axis.axis("off")
    if last is not None:
        axes[0, 0].figure.colorbar(last, ax=axes, shrink=0.6, label="correlation")
    return axes


def _matrices(tag: Tag, layer: Layer, own: AbstractFactors) -> dict[str, np.ndarray]:
    """What there is to draw of a layer, by name."""
    first = lambda a: np.asarray(a.reshape(-1, *a.shape[own.l2.ndim :])[0])
    if own.symmetric:
        return {name: first(getattr(own, name)) for name in own.symmetric}
    diagonal = lambda own: lx.diagonal(tag.operator(own))
    shape = tag.to_matrix(layer).shape[own.l2.ndim :]
    return {"diagonal": first(over_stack(diagonal, own.l2.ndim)(own)).reshape(shape)}


def _correlation(matrix: np.ndarray) -> np.ndarray:
    scale = np.sqrt(np.diag(matrix))
    scale = np.where(scale > 0, scale, 1)
    return matrix / scale[:, None] / scale


def _thinned(matrix: np.ndarray) -> np.ndarray:
    """What a picture of a matrix can show of it."""
    rows, columns = (-(-size // _MOST_PIXELS) for size in matrix.shape)
    return matrix[::rows, ::columns].astype(float)
