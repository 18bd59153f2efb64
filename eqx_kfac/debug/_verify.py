"""Approximations of a layer's curvature beside the curvature itself."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool

from .._curvature import Batch, linearise
from .._custom_types import Args, Key, Kwargs, Layer, Model
from .._fisher import AbstractFisher, check_whole, Empirical, Exact
from .._program import Program
from .._tag import (
    check_order,
    check_tagged,
    is_trainable,
    map_tags,
    Tag,
    TaggedLayer,
    trained_layers,
    with_tags,
)
from ._blocks import approximate_blocks, dense_pair, exact_rows, size_of
from ._table import block_shown, html_table, sizes_shown, table


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
    - `shared`: whether it has more rows than there are loss terms: by positions, or by
        several uses.
    - `error`: $\lVert \hat F - F \rVert / \lVert F \rVert$ (Frobenius); this and the
        next three are NaN for a layer that is too large.
    - `cosine`: $\langle \hat F, F \rangle / (\lVert \hat F \rVert \lVert F \rVert)$.
    - `ratio`: $\operatorname{tr} \hat F / \operatorname{tr} F$: 1 if the scale is
        right.
    - `diagonal_error`: like `error`, for the diagonals alone.
    - `tolerance`: up to which an error is rounding: $10 \sqrt\varepsilon$ of its type.
    - `scalar`: whether its canonical matrix has one row, or one column.
    - `too_large`: whether one layer of the stack has more than `limit` parameters.
    - `consistent`: whether `from_matrix` of its form is the inverse of `to_matrix`.
    """

    path: str
    form: str
    block: str
    stack: tuple[int, ...]
    shape: str
    unseen: np.ndarray
    shared: bool
    error: np.ndarray
    cosine: np.ndarray
    ratio: np.ndarray
    diagonal_error: np.ndarray
    tolerance: float
    scalar: bool
    too_large: bool
    consistent: bool

    @property
    def exact(self) -> bool:
        """Whether the two blocks are the same, up to rounding."""
        return self.consistent and bool(np.all(self.error <= self.tolerance))

    @property
    def verdict(self) -> str:
        """The result in words."""
        error, ratio = _worst(self.error, 0.0), _worst(self.ratio, 1.0)
        cosine, unseen = float(np.min(self.cosine)), _worst(self.unseen, 0.0)
        if not self.consistent:
            return "WRONG: `from_matrix` does not undo `to_matrix`"
        if not unseen <= self.tolerance:
            if unseen > 1:
                return f"WRONG: its tag sees another gradient (off by {unseen:.2%})"
            return f"WRONG: its tag did not see {unseen:.2%} of its gradient"
        if self.too_large:
            return "sees its gradient; too large to compare its block"
        if not np.isfinite(error):
            return "WRONG: not finite"
        if self.exact:
            return "exact"
        proportional = np.sqrt(np.clip(1 - cosine**2, 0, 1)) <= self.tolerance
        if proportional and not self.shared and not self.scalar:
            return f"WRONG SCALE: exact, but for a factor of {ratio:.4g}"
        if np.all(self.diagonal_error <= self.tolerance):
            return "approximate, with the exact diagonal"
        if not self.shared and (cosine < 0.5 or not 1 / 3 < ratio < 3):
            return "SUSPICIOUS: see `kfac.verify` with a batch of one example"
        if not 1e-3 < ratio < 1e3:
            return f"SUSPICIOUS: its trace is {ratio:.1g} times that of the exact block"
        return "approximate"


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of [`eqx_kfac.verify`][], which prints as a table.

    **Fields:**

    - `layers`: one check for each tagged layer, in the order of the model.
    """

    layers: tuple[LayerCheck, ...]

    def __getitem__(self, path: str) -> LayerCheck:
        """The check of the layer at `path`."""
        return next(c for c in self.layers if c.path == path)

    @property
    def exact(self) -> bool:
        """Whether every block is exact."""
        return all(check.exact for check in self.layers)

    def __repr__(self) -> str:
        return table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[Sequence[str], list[tuple]]:
        """The header, and the rows."""
        header = "path form block shape unseen error cosine ratio verdict".split()
        rows = [
            (
                *(c.path or "(the model)", c.form, c.block, c.shape),
                *(_worst(c.unseen, 0.0), _worst(c.error, 0.0)),
                *(float(np.min(c.cosine)), _worst(c.ratio, 1.0)),
                c.verdict,
            )
            for c in self.layers
        ]
        return header, rows


def verify(
    loss_fn: Callable,
    model: Model,
    *args: Any,
    fisher: AbstractFisher = Exact(),
    key: Key | None = None,
    limit: int = 4096,
    **kwargs: Any,
) -> Verification:
    r"""Compares the approximate curvature of every tagged layer with its exact block, a
    dense matrix from derivatives of the model that do not know about tags. It finds a
    wrong scale, a wrong input or a forgotten bias in a layer, a form or a block of your
    own.

    First, it checks whether every tag sees all of its layer's gradient: `unseen` is the
    share of it that did not pass through the tag, because the layer's parameters are used
    or changed outside of the layer, or its derivative with respect to the input is used.
    It must be zero.

    Take a few examples and a small model. With *one* example, in which a layer is used
    once, [`eqx_kfac.Kronecker`][] is exact, whatever the model: then any verdict but
    `exact` is a mistake. With more examples, an approximation is only approximate;
    `ratio`, the trace of the approximation divided by the exact one, should be of the
    order of 1.

    **Arguments:**

    - `loss_fn`, `model`, `args`, `kwargs`: as for [`eqx_kfac.curvature`][].
    - `fisher`: the estimate to approximate with. The exact block is that of the
        Fisher (for all losses but [`eqx_kfac.NormalNLL`][] also the Gauss-Newton
        matrix), with which [`eqx_kfac.MonteCarlo`][] agrees up to its noise; for
        [`eqx_kfac.Empirical`][], it is the mean over examples of the outer products of
        their gradients.
    - `key`: for the Fisher estimate.
    - `limit`: the largest number of parameters of a layer whose block is compared; a
        dense block has the square of that number of entries. Larger layers are only
        checked for what their tag does not see.

    **Returns:**

    A [`eqx_kfac.Verification`][]: `report.layers`, `report[path]`, `report.exact`;
    `print(report)` is a table. Neither of the two blocks has what an `L2` term adds.

    **Raises:** as [`eqx_kfac.curvature`][], except for parameters that bypass their tag:
    these are in the report.

    !!! Example

        ```python
        print(kfac.verify(loss_fn, model, x[:1], y[:1]))
        ```
    """
    check_order("verify", loss_fn, model, "kfac.verify(loss_fn, model, x, y)")
    check_tagged(model)
    check_whole(fisher, "kfac.verify")
    empirical = isinstance(fisher, Empirical)

    def looked_at(model, args, key, kwargs):
        batch = Batch(loss_fn, args, kwargs)
        program = batch.look(model, uses=False)
        batch = batch.linearise(model, program=program)
        factors = batch.curvature(fisher, key)
        shares = _unseen(loss_fn, model, args, kwargs, program)
        guesses = jtu.tree_leaves(approximate_blocks(model, factors, limit))
        rows = exact_rows(model, loss_fn, args, kwargs, empirical, limit)
        inverse = [_is_inverse(tag, layer) for _, tag, layer in trained_layers(model)]
        shares = [jtu.tree_leaves(s) for s in shares]
        return (*shares, inverse), batch.terms, guesses, rows

    found = eqx.filter_jit(looked_at)(model, args, key, kwargs)
    each, terms, guesses, rows = found
    compared = iter(zip(guesses, rows, strict=True))
    checks = []
    for own, share, number, inverse in zip(trained_layers(model), *each, strict=True):
        matrices = None if size_of(own.tag, own.layer) > limit else next(compared)
        shared = bool(np.any(np.asarray(number) > terms))
        checks.append(_check(own, np.asarray(share), shared, bool(inverse), matrices))
    return Verification(tuple(checks))


def _unseen(
    loss_fn: Callable,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    program: Program,
) -> tuple[Model, Model]:
    r"""How much of the gradient of a layer its tag does not see: if all of the layer's
    parameters reach the losses through it, $\sum g \bar x^\top$ over its rows *is* the
    gradient in its canonical matrix, whatever is pulled back (here: random numbers).

    **Returns:** for every tag and member of a stack, the norm of the difference over that
    of the gradient; and the number of rows.
    """
    fill = lambda model, _=None: with_tags(Tag.fill_seen, model)
    lin = linearise(loss_fn, model, args, kwargs, fill=fill, program=program)
    keys = jax.random.split(jax.random.key(0), len(lin.curved.losses))

    def noise(loss, key):
        leaves, treedef = jtu.tree_flatten(loss.outputs)
        own = jax.random.split(key, len(leaves))
        drawn = [
            jax.random.normal(k, a.shape, a.dtype)
            for k, a in zip(own, leaves, strict=True)
        ]
        return treedef.unflatten(drawn)

    pulled = lin.pull([noise(*pair) for pair in zip(lin.curved.losses, keys)])

    def share(tag, layer):
        if not is_trainable(tag, layer):
            return None
        seen = tag.held.seen.outputs.gradient
        gradient = tag.to_matrix(layer).astype(seen.dtype)
        norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (gradient - seen, gradient)]
        return jnp.where(norms[0] == 0, 0, norms[0] / norms[1])

    rows = map_tags(lambda tag, _: tag.held.seen.outputs.rows, pulled)
    return map_tags(share, pulled), rows


def _check(
    own: TaggedLayer, share: np.ndarray, shared: bool, inverse: bool, matrices: Any
) -> LayerCheck:
    path, tag, layer = own
    sizes = tag.form.sizes(layer)
    numbers = np.full((4, *sizes.stack), np.nan)
    if matrices is not None:
        pairs = zip(*dense_pair(tag, layer, *matrices), strict=True)
        numbers = np.array([_compare(a, b) for a, b in pairs])
        numbers = np.moveaxis(numbers.reshape(*sizes.stack, 4), -1, 0)
    error, cosine, ratio, diagonal_error = map(np.asarray, numbers)
    return LayerCheck(
        path=path,
        form=type(tag.form).__name__,
        block=block_shown(tag.block),
        stack=sizes.stack,
        shape=sizes_shown(*sizes[:4]),
        unseen=share.astype(float),
        shared=shared,
        error=error,
        cosine=cosine,
        ratio=ratio,
        diagonal_error=diagonal_error,
        tolerance=float(10 * np.sqrt(np.finfo(share.dtype).eps)),
        scalar=1 in (sizes.d_out, sizes.d_in + sizes.bias),
        too_large=matrices is None,
        consistent=inverse,
    )


def _compare(guess: np.ndarray, exact: np.ndarray) -> tuple[float, ...]:
    """Error, cosine, ratio, error of the diagonal; of two zeros they are 0, 1, 1, 0."""
    of_guess, of_exact = np.linalg.norm(guess), np.linalg.norm(exact)
    if of_guess == of_exact == 0:
        return 0.0, 1.0, 1.0, 0.0
    diagonal, exact_diagonal = np.diag(guess), np.diag(exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = (
            np.linalg.norm(guess - exact) / of_exact,
            np.nan_to_num(np.sum(guess * exact) / (of_guess * of_exact)),
            np.sum(diagonal) / np.sum(exact_diagonal),
            np.linalg.norm(diagonal - exact_diagonal) / np.linalg.norm(exact_diagonal),
        )
    return tuple(map(float, numbers))


def _is_inverse(tag: Tag, layer: Layer) -> Bool[Array, ""]:
    """Whether a matrix comes back from the layer that it is put into."""
    matrix = tag.to_matrix(layer)
    other = jnp.arange(matrix.size, dtype=matrix.dtype).reshape(matrix.shape)
    there = tag.to_matrix(tag.from_matrix(other, layer))
    same = there.shape == other.shape
    return jnp.all(there == other) if same else jnp.array(False)


def _worst(numbers: np.ndarray, ideal: float) -> float:
    """The one that is farthest from what it should be."""
    flat = np.ravel(numbers)
    return float(flat[np.argmax(np.abs(flat - ideal))])
