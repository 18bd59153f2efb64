r"""What the comparison of two blocks $\hat F$ and $F$ consists of: norms, traces, inner
products; of dense matrices, or along the vectors $g$ whose outer products $F$ consists
of."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float

from .._devices import over_stack
from .._operator import (
    KroneckerOperator,
    matmul,
    right,
    SpectralOperator,
    squared_norm,
    trace,
)


PROBES = 16
WIDE = 1e8  # Operations of a product with a block, above which it is estimated.


class Numbers(NamedTuple):
    r"""What is compared of one layer: arrays `[*stack]`; and, for every vector if there
    are any, `[*stack, blocks, n]` and `[*stack, blocks, n, n]`. The second of a pair is
    of the diagonals alone."""

    trace: Any  # Of the approximation.
    norms: tuple[Any, ...]  # Squared, of the approximation.
    exact_trace: Any = None
    exact_norms: tuple[Any, ...] | None = None
    inner: tuple[Any, ...] | None = None
    difference: tuple[Any, ...] | None = None  # Squared.
    products: tuple[Any, ...] | None = None  # $g^\\top \\hat F g$
    gram: tuple[Any, ...] | None = None  # $g_i^\\top g_j$


def is_structured(operator: Any) -> bool:
    """Whether its products, trace and norm take no dense matrix."""
    kinds = KroneckerOperator, SpectralOperator, lx.DiagonalLinearOperator
    return isinstance(operator, kinds)


def ready(operator: Any) -> Any:
    """The operator, as a dense matrix if it makes use of one anyway."""
    if is_structured(operator):
        return operator
    return lx.MatrixLinearOperator(operator.as_matrix())


def densely(operator: Any, exact: Float[Array, "size size"]) -> Numbers:
    """The comparison with a dense matrix."""
    guess = operator.as_matrix()
    diagonals = jnp.diagonal(guess), jnp.diagonal(exact)
    pairs = [(guess, exact), diagonals]
    return Numbers(
        trace=jnp.sum(diagonals[0]),
        norms=tuple(jnp.sum(a**2) for a, _ in pairs),
        exact_trace=jnp.sum(diagonals[1]),
        exact_norms=tuple(jnp.sum(b**2) for _, b in pairs),
        inner=tuple(jnp.sum(a * b) for a, b in pairs),
        difference=tuple(jnp.sum((a - b) ** 2) for a, b in pairs),
    )


def along_vectors(
    operators: list[Any], stacks: list[int], pull: Callable, vectors: Any, at_once: int
) -> list[Numbers]:
    """The comparison along all `vectors`, `pull(indices)` (of every layer, those of
    `at_once` of them, as matrices or as the `Sides` of these). Inner products are those
    of vectors that are pulled back together. A loop in Python, so that no more is held,
    and that layers of the same shapes are the same program."""
    found: list[list] = [[] for _ in operators]
    for first in range(0, vectors.number, at_once):
        indices = first + jnp.arange(at_once)
        rows = list(pull(indices))
        for i, (operator, axes) in enumerate(zip(operators, stacks, strict=True)):
            own, rows[i] = rows[i], None  # Not to be held any longer.
            if isinstance(own, Sides):
                own = _of_sides(operator, own, axes)
            else:
                own = _of_rows(operator, own, indices, axes, vectors.sampled)
            found[i].append(own)
    numbers = []
    for operator, axes, blocks in zip(operators, stacks, found, strict=True):
        trace, norms = _of_operator(operator, axes)
        stacked = [[np.stack(a, axes) for a in zip(*pair)] for pair in zip(*blocks)]
        products, grams = (tuple(pair) for pair in stacked)
        numbers.append(Numbers(trace, norms, products=products, gram=grams))
    return numbers


@eqx.filter_jit
def _of_operator(operator: Any, axes: int) -> tuple[Array, tuple[Array, Array]]:
    """The trace and the squared norms of an operator."""

    def of_one(operator):
        norms = squared_norm(operator), jnp.sum(lx.diagonal(operator) ** 2)
        return trace(operator), norms

    return over_stack(of_one, axes)(operator)


@eqx.filter_jit
def _of_rows(
    operator: Any,
    rows: Float[Array, "n *stack d_out d_in"],
    indices: Array,
    axes: int,
    estimate: bool,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Products with the operator and its diagonal; inner products, also of squares."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(indices)

    def of_one(operator, rows):
        shape = operator.in_structure().shape
        flat = rows.reshape(len(rows), -1)

        def product(pair):
            row, key = pair
            if estimate and is_wide(operator):
                return _estimated(operator, row, key)
            return jnp.sum(row * operator.mv(row.reshape(shape)).reshape(row.shape))

        squares, diagonal = flat**2, lx.diagonal(operator).reshape(-1)
        products = jax.lax.map(product, (rows, keys)), matmul(squares, diagonal)
        return products, (matmul(flat, flat.T), matmul(squares, squares.T))

    return over_stack(of_one, axes)(operator, jnp.moveaxis(rows, 0, axes))


class Sides(NamedTuple):
    r"""Matrices $\sum g x^\top$, as the rows that they are sums of products of."""

    x: Float[Array, "*stack rows d_in"]
    g: Float[Array, "n *stack rows d_out"]


@eqx.filter_jit
def _of_sides(
    operator: Any, sides: Sides, axes: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    r"""Products of an operator with the blocks of some rows, whose matrices are never
    formed: with $V = \sum g x^\top$,
    $\langle V, G V' A \rangle = \sum \langle g_m, G g'_n \rangle x_m^\top A x_n$. (Of
    diagonals, nothing is known: NaN.)"""

    def of_one(operator, x, g):
        kernel, product = matmul(x, x.T), _product_of_sides(operator, x)
        flat = lambda rows: rows.reshape(len(g), -1)
        seen = jax.lax.map(lambda own: matmul(kernel, own), g)
        products, grams = jax.lax.map(product, g), matmul(flat(g), flat(seen).T)
        nothing = jax.tree_util.tree_map(
            lambda a: jnp.full_like(a, jnp.nan), (products, grams)
        )
        return (products, nothing[0]), (grams, nothing[1])

    return over_stack(of_one, axes)(operator, sides.x, jnp.moveaxis(sides.g, 0, axes))


def _product_of_sides(operator: Any, x: Float[Array, "rows d_in"]) -> Callable:
    """A function of `g`, for these `x`."""
    if isinstance(operator, KroneckerOperator):
        kernel = matmul(right(x, operator.input_factor), x.T)
        return lambda g: jnp.sum(g * matmul(kernel, right(g, operator.output_factor)))

    def product(g):
        row = matmul(g.T, x)
        shape = operator.in_structure().shape
        return jnp.sum(row * operator.mv(row.reshape(shape)).reshape(row.shape))

    return product


def operations_of_sides(operator: Any, rows: int) -> float:
    """How many operations one product takes in `_of_sides`, with so many rows."""
    if not isinstance(operator, KroneckerOperator):
        return operations(operator) + 2 * rows * math.prod(operator.in_structure().shape)
    d_out = operator.output_factor.shape[0]
    return 2.0 * rows * (operator.output_factor.size + 2 * rows * d_out)


def operations(operator: Any) -> float:
    """How many operations one product with the operator takes."""
    shape = operator.in_structure().shape
    if isinstance(operator, lx.DiagonalLinearOperator):
        return math.prod(shape)
    if isinstance(operator, lx.MatrixLinearOperator):
        return 2 * math.prod(shape) ** 2
    return 2 * math.prod(shape) * sum(shape)


def is_wide(operator: Any) -> bool:
    return isinstance(operator, KroneckerOperator) and operations(operator) > WIDE


def _estimated(
    operator: KroneckerOperator, row: Float[Array, "d_out d_in"], key: Array
) -> Float[Array, ""]:
    r"""$\operatorname{tr}(g^\top G g A)$ as the mean of $(g b)^\top G (g A b)$ over
    vectors $b$ of random signs."""
    b = jax.random.rademacher(key, (PROBES, row.shape[1]), row.dtype)
    left, middle = matmul(b, row.T), matmul(right(b, operator.input_factor), row.T)
    return jnp.sum(right(left, operator.output_factor) * middle) / PROBES


#
# What follows from the numbers
#


class Comparison(NamedTuple):
    """How close a block is, for every layer of a stack: figures, or their standard
    errors, which are 0 if nothing is random."""

    error: np.ndarray
    cosine: np.ndarray
    ratio: np.ndarray
    diagonal_error: np.ndarray
    zero: np.ndarray  # Neither is there: then the others are NaN.


def compared(numbers: Numbers, sampled: bool) -> tuple[Comparison, Comparison | None]:
    """The figures, and their standard errors if they are estimates."""
    guess = tuple(np.asarray(a, float) for a in (numbers.trace, *numbers.norms))
    if numbers.gram is None or numbers.products is None:
        pairs = numbers.exact_norms, numbers.inner, numbers.difference
        exact = [np.asarray(numbers.exact_trace, float)]
        exact += [np.asarray(a, float) for pair in pairs for a in (pair or ())]
        return _rooted(_figures(guess, *exact)), None
    products = [np.asarray(a, float) for a in numbers.products]
    grams = [np.asarray(a, float) for a in numbers.gram]
    stack = guess[0].shape
    sizes = np.diagonal(grams[0], axis1=-2, axis2=-1)  # [*stack, blocks, n]
    squares = [grams[0] ** 2, grams[1]]  # [*stack, blocks, n, n]
    if not sampled:
        total = [a.reshape(*stack, -1).sum(-1) for a in (sizes, *squares, *products)]
        return _rooted(_figures(guess, *total)), None
    blocks, n = sizes.shape[-2:]
    k, pairs = blocks * n, blocks * n * (n - 1)
    off = [a * (1 - np.eye(n)) for a in squares]  # Unbiased, without a vector's own.
    sums = [a.reshape(*stack, -1).sum(-1) for a in (sizes, *off, *products)]
    of_each = [
        a.reshape(*stack, k) for a in (sizes, *(2 * a.sum(-1) for a in off), *products)
    ]
    counts = [k, pairs, pairs, k, k]
    left = [k - 1, *[pairs - 2 * (n - 1)] * 2, k - 1, k - 1]
    found = _figures(guess, *(s / c for s, c in zip(sums, counts)))
    # The jackknife: the figures without one of the vectors.
    zipped = zip(sums, of_each, left, strict=True)
    without = [(s[..., None] - e) / c for s, e, c in zipped]
    others = _figures(tuple(a[..., None] for a in guess), *without)
    noise = [np.sqrt((k - 1) * np.var(a, -1)) for a in others[:4]] + [found.zero]
    noise = Comparison(*noise)
    figures = _rooted(found)

    def of_root(root, variance):
        # Only a bound is known for what is much smaller than its noise.
        return variance / np.maximum(2 * root, np.sqrt(variance))

    return figures, noise._replace(
        error=of_root(figures.error, noise.error),
        diagonal_error=of_root(figures.diagonal_error, noise.diagonal_error),
    )


def _rooted(figures: Comparison) -> Comparison:
    """Errors, given their squares (which, as estimates, may be negative), and a cosine
    that is one."""
    root = lambda a: np.sqrt(np.maximum(a, 0))
    return figures._replace(
        error=root(figures.error),
        cosine=np.clip(figures.cosine, -1, 1),
        diagonal_error=root(figures.diagonal_error),
    )


def _figures(
    guess: tuple[np.ndarray, ...],
    exact_trace: np.ndarray,
    exact_norm: np.ndarray,
    exact_diagonal: np.ndarray,
    inner: np.ndarray,
    inner_diagonal: np.ndarray,
    difference: np.ndarray | None = None,
    diagonal_difference: np.ndarray | None = None,
) -> Comparison:
    """The figures; in the place of errors, their squares."""
    guess_trace, norm, diagonal = guess
    if difference is None:
        difference = norm - 2 * inner + exact_norm
        diagonal_difference = diagonal - 2 * inner_diagonal + exact_diagonal
    zero = (norm == 0) & (exact_norm == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.nan_to_num(inner / np.sqrt(norm * np.maximum(exact_norm, 0)))
        found = (
            difference / exact_norm,
            cosine,
            guess_trace / exact_trace,
            diagonal_difference / exact_diagonal,  # pyright: ignore
        )
    error, cosine, ratio, diagonal_error = (np.where(zero, np.nan, a) for a in found)
    return Comparison(error, cosine, ratio, diagonal_error, zero)
