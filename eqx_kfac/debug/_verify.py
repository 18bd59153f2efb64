"""Approximations of a layer's curvature beside the curvature itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .._custom_types import Key, Model
from .._devices import over_stack
from .._estimate import curvature
from .._fisher import AbstractFisher, Empirical, Exact
from .._linearise import run
from .._misc import trailing
from .._tag import is_trainable, Tag
from .._tagged import check_tagged, flatten_tags, map_tags, update_layers
from ._table import block_shown, sizes_shown, table


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    r"""The approximate block $\hat F$ of one layer beside its exact one, $F$. Of stacked
    layers, one number for each."""

    path: str
    form: str
    block: str
    stack: tuple[int, ...]
    shape: str  # Of the canonical matrix.
    error: np.ndarray  # ‖F̂ - F‖ / ‖F‖, Frobenius.
    cosine: np.ndarray  # ⟨F̂, F⟩ / (‖F̂‖ ‖F‖).
    ratio: np.ndarray  # tr F̂ / tr F: 1 if the scale is right.
    diagonal_error: np.ndarray  # ‖diag F̂ - diag F‖ / ‖diag F‖.
    tolerance: float
    consistent: bool  # Whether `from_matrix` is the inverse of `to_matrix`.

    @property
    def exact(self) -> bool:
        """Whether the two are the same, up to rounding."""
        return self.consistent and bool(np.all(self.error <= self.tolerance))

    @property
    def verdict(self) -> str:
        """In words."""
        error, ratio = _worst(self.error, 0.0), _worst(self.ratio, 1.0)
        cosine = float(np.min(self.cosine))
        if not self.consistent:
            return "WRONG: `from_matrix` does not undo `to_matrix`"
        if not np.isfinite(error):
            return "WRONG: not finite"
        if self.exact:
            return "exact"
        if 1 - cosine <= self.tolerance:
            return f"WRONG SCALE: exact, but for a factor of {ratio:.4g}"
        if np.all(self.diagonal_error <= self.tolerance):
            return "approximate, with the exact diagonal"
        if cosine < 0.5 or not 1 / 3 < ratio < 3:
            return "SUSPICIOUS: see `kfac.verify` with a batch of one example"
        return "approximate"


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of [`eqx_kfac.verify`][], which prints as a table."""

    layers: tuple[LayerCheck, ...]

    def __getitem__(self, path: str) -> LayerCheck:
        """The check of the layer at `path`."""
        return next(c for c in self.layers if c.path == path)

    @property
    def exact(self) -> bool:
        """Whether every block is."""
        return all(check.exact for check in self.layers)

    def __repr__(self) -> str:
        header = "path form block shape error cosine ratio verdict".split()
        rows = [
            (
                *(c.path or "(the model)", c.form, c.block, c.shape),
                *(_worst(c.error, 0.0), float(np.min(c.cosine)), _worst(c.ratio, 1.0)),
                c.verdict,
            )
            for c in self.layers
        ]
        return table(header, rows)


def verify(
    model: Model,
    loss_fn: Callable,
    *args: Any,
    fisher: AbstractFisher = Exact(),
    key: Key | None = None,
    limit: int = 4096,
    **kwargs: Any,
) -> Verification:
    r"""Compares the approximate curvature of every tagged layer with its exact block, a
    dense matrix from derivatives of the model that do not know about tags. To find a
    wrong scale, a wrong input or a forgotten bias in a layer, a form or a block of your
    own.

    Take a few examples and a small model. With *one* example, in which a layer is used
    once, [`eqx_kfac.Kronecker`][] is exact, whatever the model: then everything else than
    `exact` is a mistake. With more examples an approximation is one; `ratio`, the trace
    of the approximation over the exact one, should be of the order of 1.

    **Arguments:**

    - `model`, `loss_fn`, `args`, `kwargs`: as for [`eqx_kfac.curvature`][].
    - `fisher`: the estimate to approximate with. The exact block is that of the
        Fisher (for softmax, sigmoid and squared error also the Gauss-Newton matrix), with
        which [`eqx_kfac.MonteCarlo`][] agrees up to its noise; for
        [`eqx_kfac.Empirical`][], the mean over examples of the outer products of their
        gradients.
    - `key`: for the Fisher estimate.
    - `limit`: the most parameters of one layer: a dense block has their square.

    **Returns:**

    A [`eqx_kfac.Verification`][]: `report.layers`, `report[path]`, `report.exact`;
    `print(report)` is a table. What an `L2` term adds is in neither of the two blocks.

    **Raises:** `ValueError` if a layer has more than `limit` parameters.

    !!! Example

        ```python
        print(kfac.verify(model, loss_fn, x[:1], y[:1]))
        ```
    """
    check_tagged(model)
    found, _ = flatten_tags(lambda tag, layer: (tag, layer), model)
    places = [(path, *pair) for path, pair in found]
    for path, tag, layer in places:
        size = _size(tag, layer)
        if size > limit:
            raise ValueError(
                f"The layer `{path}` has {size} parameters, and its exact block their "
                f"square in entries. Verify a smaller model of the same kind, or pass "
                f"`limit={size}` or more."
            )
    empirical = isinstance(fisher, Empirical)

    def both(model, args, key, kwargs):
        factors = curvature(loss_fn, fisher)(model, *args, key=key, **kwargs)
        guesses = jtu.tree_leaves(_operators(model, factors))
        return guesses, _exact_rows(model, loss_fn, args, kwargs, empirical)

    guesses, rows = eqx.filter_jit(both)(model, args, key, kwargs)
    checks = [
        _check(path, tag, layer, matrix, row)
        for (path, tag, layer), matrix, row in zip(places, guesses, rows, strict=True)
    ]
    return Verification(tuple(checks))


def _size(tag: Tag, layer: Any) -> int:
    sizes = tag.form.sizes(layer)
    return sizes.d_out * (sizes.d_in + sizes.bias)


def _operators(model: Model, factors: Model) -> Model:
    """`[*stack, size, size]` for every tag."""

    def dense(tag, layer, factors):
        if factors is None:
            return None
        as_matrix = lambda factors: tag.block.operator(factors).as_matrix()
        return over_stack(as_matrix, factors.l2.ndim)(factors)

    return map_tags(dense, model, factors)


def _exact_rows(
    model: Model, loss_fn: Callable, args: Any, kwargs: Any, empirical: bool
) -> list[Float[Array, "rows ..."]]:
    r"""For every tag, matrices `[rows, *stack, d_out, d_in]` whose outer products add up
    to the exact block."""

    def canonical(tag, layer):
        return tag.form.to_matrix(layer) if is_trainable(tag, layer) else None

    def replace(tag, layer, new, matrix):
        return new if matrix is None else tag.form.from_matrix(matrix, new)

    def outputs(matrices):
        changed = update_layers(replace, model, matrices)
        objective, _ = run(loss_fn, changed, args, kwargs)
        return [loss.outputs for loss in objective.losses], objective

    matrices = map_tags(canonical, model)
    _, pullback, objective = eqx.filter_vjp(outputs, matrices, has_aux=True)
    terms = objective.weighted_losses
    scales = [
        jnp.sqrt(coefficient * loss.term_weights / loss.count)[..., None]
        for coefficient, loss in terms
    ]
    zeros = [jtu.tree_map(jnp.zeros_like, loss.outputs) for _, loss in terms]

    def pull(cotangents):
        pairs = zip(cotangents, scales, strict=True)
        scaled = [jtu.tree_map(lambda a: a * s.astype(a.dtype), c) for c, s in pairs]
        return jtu.tree_leaves(pullback(scaled)[0])

    if empirical:
        scores = [loss.score(loss.targets) for _, loss in terms]

        def one(i):
            return pull([jtu.tree_map(lambda a: _only(a, i), s) for s in scores])

        examples = max(loss.leading[0] for _, loss in terms)
        return jax.vmap(one)(jnp.arange(examples))

    rows = []
    for i, (_, loss) in enumerate(terms):

        def along(v, i=i, loss=loss):
            return pull([*zeros[:i], loss.fisher_root(v), *zeros[i + 1 :]])

        size = int(np.prod(loss.root_shape))
        basis = jnp.eye(size, dtype=loss.term_weights.dtype)
        rows.append(jax.vmap(along)(basis.reshape(size, *loss.root_shape)))
    return [jnp.concatenate(of_tag) for of_tag in zip(*rows, strict=True)]


def _only(a: Array, i: Any) -> Array:
    """`a`, zero but for example `i`."""
    is_i = (jnp.arange(len(a)) == i).astype(a.dtype)
    return a * trailing(is_i, a)


def _check(path: str, tag: Tag, layer: Any, approximate: Any, rows: Any) -> LayerCheck:
    sizes = tag.form.sizes(layer)
    size = _size(tag, layer)
    rows = np.asarray(rows, float).reshape(len(rows), -1, size)
    exact = np.einsum("rsi,rsj->sij", rows, rows)
    guess = np.asarray(approximate, float).reshape(-1, size, size)
    numbers = np.array([_compare(a, b) for a, b in zip(guess, exact, strict=True)])
    numbers = np.moveaxis(numbers.reshape(*sizes.stack, 4), -1, 0)
    error, cosine, ratio, diagonal_error = map(np.asarray, numbers)
    eps = jnp.finfo(approximate.dtype).eps
    return LayerCheck(
        path=path,
        form=type(tag.form).__name__,
        block=block_shown(tag.block),
        stack=sizes.stack,
        shape=sizes_shown(*sizes[:4]),
        error=error,
        cosine=cosine,
        ratio=ratio,
        diagonal_error=diagonal_error,
        tolerance=float(10 * np.sqrt(eps)),
        consistent=_consistent(tag, layer),
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


def _consistent(tag: Tag, layer: Any) -> bool:
    """Whether a matrix comes back from the layer that it is put into."""
    matrix = tag.form.to_matrix(layer)
    other = jnp.arange(matrix.size, dtype=matrix.dtype).reshape(matrix.shape)
    there = tag.form.to_matrix(tag.form.from_matrix(other, layer))
    return there.shape == other.shape and bool(jnp.all(there == other))


def _worst(numbers: np.ndarray, ideal: float) -> float:
    """The one that is farthest from what it should be."""
    flat = np.ravel(numbers)
    return float(flat[np.argmax(np.abs(flat - ideal))])
