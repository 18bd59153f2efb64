"""What is tagged in a model, how, and what it costs."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._curvature import init_curvature
from .._custom_types import Layer, Model
from .._devices import over_stack
from .._inverse import factorise
from .._operator import eigenvalues, trace, unpacked
from .._solver import AbstractDampedSolver, Cholesky
from .._tag import flatten_tags, partition_tagged, Tag
from ._table import block_shown, sizes_shown, table


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One tagged layer. `trace` and `condition` are `None` without a curvature."""

    path: str
    layer: str
    form: str
    block: str
    stack: tuple[int, ...]
    d_out: int
    d_in: int
    bias: bool
    parameters: int
    factors: int  # How many numbers they hold,
    inverse: int  # and their factorisation.
    trace: float | None = None  # Of the block; the sum over stacked layers.
    condition: float | None = None  # The largest eigenvalue over the smallest; the worst.


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The result of [`eqx_kfac.summary`][], which prints as a table. `untagged` are the
    shapes of the parameters that no tag covers, by path."""

    layers: tuple[LayerSummary, ...]
    untagged: dict[str, tuple[int, ...]]

    def __getitem__(self, path: str) -> LayerSummary:
        """The line of the layer at `path`."""
        return next(s for s in self.layers if s.path == path)

    def __repr__(self) -> str:
        header = "path layer form block shape parameters factors inverse".split()
        health = any(s.trace is not None for s in self.layers)
        rows: list[tuple] = [
            (
                *(s.path or "(the model)", s.layer, s.form, s.block),
                sizes_shown(s.stack, s.d_out, s.d_in, s.bias),
                *(s.parameters, s.factors, s.inverse),
                *((s.trace, s.condition) if health else ()),
            )
            for s in self.layers
        ]
        numbers = [[s.parameters, s.factors, s.inverse] for s in self.layers]
        total = tuple(sum(column) for column in zip(*numbers)) or (0, 0, 0)
        rows.append(("total", "", "", "", "", *total, *(("", "") if health else ())))
        if health:
            header += ["trace", "condition"]
        lines = [table(header, rows)]
        if self.untagged:
            lines += ["", "Parameters that no tag covers:"]
            lines += [f"  {path}  {list(s)}" for path, s in self.untagged.items()]
        return "\n".join(lines)


def summary(
    model: Model,
    curvature: Model | None = None,
    *,
    solver: AbstractDampedSolver = Cholesky(),
) -> Summary:
    """Which layers of a model are tagged, how their curvature is approximated, and how
    many numbers it takes to hold that; and which parameters no tag covers.

    **Arguments:**

    - `model`: any model.
    - `curvature`: `state.curvature` of an optimizer, or what [`eqx_kfac.curvature`][]
        returns: then also the trace and the condition number of every layer's block.
    - `solver`: whose factorisation is counted.

    **Returns:**

    A [`eqx_kfac.Summary`][]: `summary.layers`, `summary[path]`, `summary.untagged`;
    `print(summary)` is a table.

    !!! Example

        ```python
        print(kfac.summary(model))
        print(kfac.summary(model, state.curvature))
        ```
    """
    lines, _ = flatten_tags(_line, model)
    shapes = eqx.filter_eval_shape(init_curvature, model)
    inverse = eqx.filter_eval_shape(factorise, shapes, model, solver, jnp.ones(()))
    held = [_numbers(model, tree) for tree in (shapes, inverse)]
    health = [(None, None)] * len(lines)
    if curvature is not None:
        health = [
            found for _, found in flatten_tags(_health, model, unpacked(curvature))[0]
        ]
    layers = [
        dataclasses.replace(
            line,
            path=path,
            factors=factors,
            inverse=inverse,
            trace=trace,
            condition=condition,
        )
        for (path, line), factors, inverse, (trace, condition) in zip(
            lines, *held, health, strict=True
        )
    ]
    _, rest = partition_tagged(model)
    leaves, _ = jtu.tree_flatten_with_path(rest)
    return Summary(tuple(layers), {jtu.keystr(p): leaf.shape for p, leaf in leaves})


def _line(tag: Tag, layer: Layer) -> LayerSummary:
    stack, d_out, d_in, bias, _ = tag.form.sizes(layer)
    parameters = int(np.prod(stack)) * d_out * (d_in + bias)
    kinds = type(layer).__name__, type(tag.form).__name__, block_shown(tag.block)
    return LayerSummary("", *kinds, stack, d_out, d_in, bias, parameters, 0, 0)


def _numbers(model: Model, tree: Model) -> list[int]:
    """How many numbers every tag's part of `tree` holds."""

    def count(tag, layer, part):
        return sum(int(np.prod(leaf.shape)) for leaf in jtu.tree_leaves(part))

    return [number for _, number in flatten_tags(count, model, tree)[0]]


def _health(tag: Tag, layer: Layer, factors: Any) -> tuple[float, float]:
    """Trace and condition number."""

    def extremes(factors):
        operator = tag.block.operator(factors)
        values = eigenvalues(operator)
        return trace(operator), jnp.max(values), jnp.min(values)

    of_stack = over_stack(extremes, factors.l2.ndim)(factors)
    traces, largest, smallest = map(np.asarray, of_stack)
    with np.errstate(divide="ignore", invalid="ignore"):
        condition = np.max(np.where(smallest > 0, largest / smallest, np.inf))
    return float(np.sum(traces)), float(condition)
