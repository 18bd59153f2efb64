"""The result of `verify`: figures, and what they mean."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._table import html_table, Measured, row_of, table


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    r"""The approximate block $\hat F$ of one layer beside its exact block, $F$. Arrays
    have one number for each stacked layer, `[*stack]`.

    **Fields:**

    - `path`: where the layer is in the model.
    - `form`: how it is linear in its parameters: the name of a class.
    - `block`: how its curvature is approximated.
    - `stack`: the shape of the stack of layers, `()` for one.
    - `shape`: that of the canonical matrix, as printed.
    - `unseen`: $\lVert \nabla - \sum g \bar x^\top \rVert / \lVert \nabla \rVert$ of a
        gradient of the losses: the share of it that did not pass through the tag.
    - `use`: `"used"`; `"unused"` if the layer is called, but what it returns does not
        reach the losses; or `"never called"`.
    - `shared`: whether it has more rows than there are examples: by positions, or by
        several uses.
    - `error`: $\lVert \hat F - F \rVert / \lVert F \rVert$ (Frobenius); this and the
        next three are NaN for a layer that is not compared, or whose blocks are zero.
    - `cosine`: $\langle \hat F, F \rangle / (\lVert \hat F \rVert \lVert F \rVert)$.
    - `ratio`: $\operatorname{tr} \hat F / \operatorname{tr} F$: 1 if the scale is
        right.
    - `diagonal_error`: like `error`, for the diagonals alone; NaN for an estimate along
        rows, which do not tell.
    - `zero`: whether both blocks are zero.
    - `estimated`: whether these are estimates, from random vectors.
    - `error_noise`, `cosine_noise`, `ratio_noise`: the standard errors of such estimates
        (by the jackknife); else 0.
    - `alone`: the ratio for the first example by itself. It is only looked at if the
        ratio is far from 1, and NaN otherwise.
    - `drawn`: whether the estimate to approximate with draws random numbers.
    - `single`: whether there is one example, which uses the layer once, and the estimate
        has no error: then the traces are the same, for every block of the library.
    - `tolerance`: up to which an error is rounding: $10 \sqrt\varepsilon$ of its type.
    - `scalar`: whether its canonical matrix has one row, or one column.
    - `too_large`: whether its curvature does not fit into the memory that is allowed.
    - `gigabytes`: how large its curvature is.
    - `consistent`: whether `from_matrix` of its form is the inverse of `to_matrix`.
    """

    path: str
    form: str
    block: str
    stack: tuple[int, ...]
    shape: str
    unseen: np.ndarray
    use: str
    shared: bool
    error: np.ndarray
    cosine: np.ndarray
    ratio: np.ndarray
    diagonal_error: np.ndarray
    zero: np.ndarray
    estimated: bool
    error_noise: np.ndarray
    cosine_noise: np.ndarray
    ratio_noise: np.ndarray
    alone: np.ndarray
    drawn: bool
    single: bool
    tolerance: float
    scalar: bool
    too_large: bool
    gigabytes: float
    consistent: bool

    @property
    def exact(self) -> bool:
        """Whether the two blocks are the same, up to rounding (and not zero; an estimate
        does not tell)."""
        if self.estimated or not self.consistent or np.all(self.zero):
            return False
        return bool(np.all(self.zero | (self.error <= self.tolerance)))

    @property
    def verdict(self) -> str:
        """The result in words."""
        if not self.consistent:
            return "WRONG: `from_matrix` does not undo `to_matrix`"
        unseen = worst(self.unseen, 0.0)
        if not np.all(np.isfinite(self.unseen)):
            return "NOT A NUMBER: the model's outputs, or their gradient, are not finite"
        if unseen > self.tolerance:
            if unseen > 1:
                return f"WRONG: its tag sees another gradient (off by {unseen:.2%})"
            return f"WRONG: its tag did not see {unseen:.2%} of its gradient"
        if self.use == "never called":
            return "no curvature: the loss function never calls it"
        if self.use == "unused":
            return "no curvature: what it returns does not reach the losses"
        if self.too_large:
            return f"sees its gradient; too large to compare: {self.gigabytes:.3g} GB"
        if np.all(self.zero):
            return "no curvature: both blocks are zero"
        if not np.all(self.zero | np.isfinite(self.error) | self._where_exact_is_zero):
            return "WRONG: not finite"
        if np.any(self._where_exact_is_zero):
            # The rows of one gradient may cancel, which no product of factors knows.
            where, count = "where the exact block is zero", self.ratio.size
            if count > 1:
                where += f": {np.sum(self._where_exact_is_zero)} of {count}"
            return f"WRONG: not zero {where}" if self.single else f"approximate {where}"
        return "exact" if self.exact else self._approximate()

    @property
    def _where_exact_is_zero(self) -> np.ndarray:
        """For which layers of a stack the exact block alone is zero, up to rounding."""
        is_beyond = self.ratio > (10 / self.tolerance) ** 3  # $\varepsilon^{-3/2}$
        return is_beyond & np.isfinite(self.cosine)

    def _approximate(self) -> str:
        """How far two blocks are apart that are not the same."""
        ratio, cosine = worst(self.ratio, 1.0), float(np.nanmin(self.cosine))
        if not self.estimated:
            proportional = np.sqrt(np.clip(1 - cosine**2, 0, 1)) <= self.tolerance
            if proportional and not (self.shared or self.scalar or self.drawn):
                return f"WRONG SCALE: exact, but for a factor of {ratio:.4g}"
            if np.all(self.zero | (self.diagonal_error <= self.tolerance)):
                return "approximate, with the exact diagonal"
        # The trace of `G ⊗ A` may be any for several examples; for one, it is a mistake.
        off = lambda ratio: np.any(np.abs(ratio - 1) > self.tolerance)
        if self.single and off(self.ratio) and not self.estimated:
            return f"SUSPICIOUS: of one example, its trace is {ratio:.4g} times exact"
        if off(self.alone):
            alone = worst(self.alone, 1.0)
            return (
                f"SUSPICIOUS: of the first example, its trace is {alone:.4g} times exact"
            )
        if self.is_off(1e3) and np.any(np.isnan(self.alone)):
            return f"SUSPICIOUS: its trace is {ratio:.1g} times that of the exact block"
        return "approximate"

    def is_off(self, factor: float) -> bool:
        """Whether the ratio of the traces, beyond any noise, is not between
        `1 / factor` and `factor`."""
        margin = 4 * self.ratio_noise
        low, high = self.ratio + margin, self.ratio - margin
        return bool(np.any((low < 1 / factor) | (high > factor)))


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of [`eqx_kfac.verify`][], which prints as a table.

    **Fields:**

    - `layers`: one check for each tagged layer, in the order of the model.
    """

    layers: tuple[LayerCheck, ...]

    def __getitem__(self, path: str) -> LayerCheck:
        """The check of the layer at `path`."""
        return row_of(self.layers, path)

    @property
    def exact(self) -> bool:
        """Whether every block is exact."""
        return all(check.exact for check in self.layers)

    def __repr__(self) -> str:
        return "\n".join([table(*self._table()), *self._below()])

    def _repr_html_(self) -> str:
        return html_table(*self._table(), *self._below())

    def _below(self) -> list[str]:
        """What is to be said of the whole table."""
        if not any(check.too_large for check in self.layers):
            return []
        return [
            "Of what is too large, only the gradient was looked at. "
            "`kfac.Kronecker(widest=...)` keeps the diagonal of the factor of a wider "
            "side; `memory=...` is what `verify` may use."
        ]

    def _table(self) -> tuple[Sequence[str], list[tuple]]:
        """The header, and the rows."""
        header = "path form block shape unseen error cosine ratio verdict".split()

        def shown(check: LayerCheck, name: str, ideal: float) -> Any:
            numbers, noise = getattr(check, name), getattr(check, f"{name}_noise")
            # One infinite ratio would hide what the others in a stack are like.
            odd = check._where_exact_is_zero
            at = worst_at(np.where(odd & ~np.all(odd), np.nan, numbers), ideal)
            value = float(np.ravel(numbers)[at])
            return (
                Measured(value, float(np.ravel(noise)[at])) if check.estimated else value
            )

        rows = [
            (
                *(c.path or "(the model)", c.form, c.block, c.shape),
                *(worst(c.unseen, 0.0), shown(c, "error", 0.0)),
                *(shown(c, "cosine", 1.0), shown(c, "ratio", 1.0)),
                c.verdict,
            )
            for c in self.layers
        ]
        return header, rows


def worst(numbers: np.ndarray, ideal: float) -> float:
    """The one that is farthest from what it should be."""
    return float(np.ravel(numbers)[worst_at(numbers, ideal)])


def worst_at(numbers: np.ndarray, ideal: float) -> int:
    """Where numbers are farthest from their `ideal`. (NaN stands for no number.)"""
    distance = np.abs(np.ravel(numbers) - ideal)
    return int(np.argmax(np.where(np.isnan(distance), -1, distance)))
