"""What is tagged in a model, how, and what it costs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._curvature import init_curvature
from .._custom_types import Layer, Model, PerLayer
from .._inverse import factorise
from .._solver import AbstractDampedSolver, Cholesky
from .._tag import flatten_tags, partition_tagged, Tag
from ..analysis import BlockDiagonalOperator
from ._fold import Fold, fold
from ._spectra import spectra, Spectrum
from ._table import block_shown, Extent, html_table, row_of, Share, sizes_shown, table


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One tagged layer, or a stack of them. Numbers are those of the whole stack, except
    for `d_out` and `d_in`. `trace` and `condition` are `None` without a curvature.

    **Fields:**

    - `path`: where the layer is in the model.
    - `layer`: the name of its class.
    - `form`: how it is linear in its parameters: also the name of a class.
    - `block`: how its curvature is approximated.
    - `stack`: the shape of the stack of layers, `()` for one; the groups of a
        convolution are layers, too.
    - `d_out`: rows of the canonical matrix.
    - `d_in`: its columns, without that of the bias.
    - `bias`: whether there is a bias that is trained.
    - `parameters`: how many are trained.
    - `factors`: how many numbers the factors hold.
    - `inverse`: how many numbers their factorisation holds.
    - `megabytes`: what both take, in 10⁶ bytes.
    - `trace`: of the block, L2 term included, in units of the loss per squared parameter.
    - `condition`: the largest eigenvalue divided by the smallest, both with the damping;
        for stacked layers, the worst. `None` also for layers with a factor that is wider
        than 2048, whose decomposition would take long.
    """

    path: str
    layer: str
    form: str
    block: str
    stack: tuple[int, ...]
    d_out: int
    d_in: int
    bias: bool
    parameters: int
    factors: int
    inverse: int
    megabytes: float
    trace: float | None = None
    condition: float | None = None

    @property
    def kind(self) -> tuple:
        """All but its path and its curvature."""
        what = self.layer, self.form, self.block
        sizes = self.stack, self.d_out, self.d_in, self.bias
        return (*what, *sizes, self.factors, self.inverse, self.megabytes)


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The result of [`eqx_kfac.summary`][], which prints as a table. Equal layers whose
    paths differ in indices alone are one row of it: `.blocks[0…11].query_proj`, with
    `12 x` before the shape, what all of them take, and from the least to the greatest
    trace and condition. `share` is the part of all megabytes, with `<` at the largest.

    **Fields:**

    - `layers`: one line for each tagged layer, in the order of the model.
    - `untagged`: the shapes of the parameters that no tag covers, by path.
    """

    layers: tuple[LayerSummary, ...]
    untagged: dict[str, tuple[int, ...]]

    def __getitem__(self, path: str) -> LayerSummary:
        """The line of the layer at `path`."""
        return row_of(self.layers, path)

    def __repr__(self) -> str:
        shown = [f"  {path}  {list(s)}" for path, s in self.untagged.items()]
        rest = ["", "Parameters that no tag covers:", *shown] if shown else []
        return "\n".join([table(*self._table()), *rest])

    def _repr_html_(self) -> str:
        shown = [f"{path} {list(s)}" for path, s in self.untagged.items()]
        rest = ["Parameters that no tag covers: " + ", ".join(shown)] if shown else []
        return html_table(*self._table(), *rest)

    def _table(self) -> tuple[Sequence[str], list[tuple]]:
        """The header, and the rows."""
        header = "path layer form block shape parameters factors inverse MB share".split()
        health = any(s.trace is not None for s in self.layers)
        folds = fold(self.layers)
        numbers = [[s.parameters, s.factors, s.inverse, s.megabytes] for s in self.layers]
        total = tuple(sum(column) for column in zip(*numbers)) or (0, 0, 0, 0.0)
        most = max((_megabytes(f) for f in folds), default=0.0)
        rows = [_row(f, total[-1], most, health) for f in folds]
        rows.append(("total", *[""] * 4, *total, "", *[""] * (2 * health)))
        if health:
            header += ["trace", "condition"]
        return header, rows


def _row(equal: Fold, all_megabytes: float, most: float, health: bool) -> tuple:
    """What is said of equal layers."""
    first, number = equal.lines[0], len(equal.lines)
    stack = (number,) * (number > 1) + first.stack
    own = _megabytes(equal)
    share = Share(own / max(all_megabytes, 1e-12), own == most < all_megabytes)
    row = (
        *(equal.path or "(the model)", first.layer, first.form, first.block),
        sizes_shown(stack, first.d_out, first.d_in, first.bias),
        *(number * n for n in (first.parameters, first.factors, first.inverse)),
        *(own, share),
    )
    return (*row, *_extents(equal)) if health else row


def _megabytes(equal: Fold) -> float:
    return len(equal.lines) * equal.lines[0].megabytes


def _extents(equal: Fold) -> tuple:
    """Trace and condition of equal layers, as far as they are known."""
    each = [(line.trace, line.condition) for line in equal.lines]
    known = [[n for n in column if n is not None] for column in zip(*each, strict=True)]
    return tuple(Extent(min(n), max(n)) if n else "" for n in known)


def summary(
    model: Model,
    curvature: Model | None = None,
    *,
    solver: AbstractDampedSolver = Cholesky(),
    damping: PerLayer = 0.0,
) -> Summary:
    """Which layers of a model are tagged, how their curvature is approximated, and how
    many numbers are kept for it; and which parameters no tag covers.

    **Arguments:**

    - `model`: any model.
    - `curvature`: `state.curvature` of an optimizer, or what [`eqx_kfac.curvature`][]
        returns. With it, the summary also has the trace and the condition number of every
        layer's block, including the curvature of an [`eqx_kfac.L2`][] term.
    - `solver`: the solver whose factorisation is counted.
    - `damping`: the damping for condition numbers: `state.damping`, or
        `state.layer_damping`, which has one for every layer. Without it, the condition
        number of a singular block is infinite.

    **Returns:**

    A [`eqx_kfac.debug.Summary`][]: `summary.layers`, `summary[path]`, `summary.untagged`;
    `print(summary)` is a table.

    !!! Example

        ```python
        print(kfac.summary(model))
        print(kfac.summary(model, state.curvature, damping=state.layer_damping))
        ```
    """
    lines, _ = flatten_tags(_line, model)
    shapes = eqx.filter_eval_shape(init_curvature, model)
    inverse = eqx.filter_eval_shape(factorise, shapes, model, solver, jnp.ones(()))
    health = (
        _health(model, curvature, damping) if curvature is not None else [{}] * len(lines)
    )
    layers = [
        dataclasses.replace(line, path=path, **held, **healthy)
        for (path, line), held, healthy in zip(
            lines, _held(model, shapes, inverse), health, strict=True
        )
    ]
    _, rest = partition_tagged(model)
    leaves, _ = jtu.tree_flatten_with_path(rest)
    return Summary(tuple(layers), {jtu.keystr(p): leaf.shape for p, leaf in leaves})


def _line(tag: Tag, layer: Layer) -> LayerSummary:
    sizes = tag.form.sizes(layer)
    stack, d_out, d_in, bias, _ = sizes
    parameters = int(np.prod(stack)) * d_out * (d_in + bias)
    kinds = type(layer).__name__, tag.form.label, block_shown(tag.block, sizes)
    return LayerSummary("", *kinds, stack, d_out, d_in, bias, parameters, 0, 0, 0.0)


def _held(model: Model, factors: Model, inverse: Model) -> list[dict[str, Any]]:
    """How much a state holds of every layer."""

    def count(tag, layer, *parts):
        leaves = [jtu.tree_leaves(part) for part in parts]
        numbers = [sum(leaf.size for leaf in of_part) for of_part in leaves]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in sum(leaves, []))
        return dict(factors=numbers[0], inverse=numbers[1], megabytes=size / 1e6)

    return [held for _, held in flatten_tags(count, model, factors, inverse)[0]]


def _health(
    model: Model, curvature: Model, damping: PerLayer
) -> list[dict[str, float | None]]:
    """Trace and condition number of every layer."""
    dampings = BlockDiagonalOperator(curvature, model).per_layer(damping, "damping")
    own, _ = flatten_tags(lambda tag, layer, number: number, model, dampings)

    def of_layer(spectrum: Spectrum, number: Any) -> dict[str, float | None]:
        total = float(np.sum(spectrum.trace))
        if spectrum.values is None:
            return {"trace": total, "condition": None}
        number = np.asarray(number, float)[..., None, None]
        values = spectrum.values + number
        values = values.reshape(-1, *values.shape[-2:])
        largest, smallest = np.max(values, axis=(1, 2)), np.min(values, axis=(1, 2))
        with np.errstate(divide="ignore", invalid="ignore"):
            condition = np.max(np.where(smallest > 0, largest / smallest, np.inf))
        return dict(trace=total, condition=float(condition))

    pairs = zip(spectra(model, curvature), own, strict=True)
    return [of_layer(spectrum, number) for spectrum, (_, number) in pairs]
