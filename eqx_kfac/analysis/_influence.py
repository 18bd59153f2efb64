"""How the losses of some examples depend on other examples being trained on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Bool, Float

from .._checks import check_instance
from .._custom_types import Model, PerLayer
from .._operator import Factor, KroneckerOperator, matmul, right
from .._solver import AbstractDampedSolver, Eigh
from ._block_diagonal import BlockDiagonalOperator
from ._capture import capture, Captured


_AT_ONCE = 128  # So many gradients of examples are written out at a time.


class Influence(eqx.Module):
    r"""What [`eqx_kfac.analysis.influence`][] returns.

    **Fields:**

    - `loss_fn`: called as `loss_fn(model, *examples)`, for test and training examples.
    - `curvature`: $C$, as [`eqx_kfac.curvature`][] returns it.
    - `damping`: $\lambda$, a number or one for every layer.
    - `solver`: how $(C + \lambda I)^{-1}$ is approximated.
    """

    loss_fn: Callable
    curvature: Model
    damping: PerLayer
    solver: AbstractDampedSolver

    def __call__(
        self, model: Model, test: tuple, train: tuple
    ) -> Float[Array, "tests train"]:
        r"""$\nabla_i^\top (C + \lambda I)^{-1} \nabla_j$ of every test example $i$ and
        every training example $j$.

        **Arguments:**

        - `model`: the trained model, to which the curvature belongs.
        - `test`, `train`: what follows the model in a call of `loss_fn`: `(x, y)`. Their
            first axis is that of the examples.

        **Raises:** `ValueError` for layers for which single examples have no rows.
        """
        rows = self._rows(model, test), self._rows(model, train)
        return _scores(self._inverse(model), *rows)

    def in_batches(
        self, model: Model, test: tuple, batches: Iterable[tuple]
    ) -> Iterator[Float[Array, "tests batch"]]:
        """Influences of one batch of training examples after the other: an iterator,
        which can be wrapped in a progress bar. What belongs to the curvature and to the
        test examples is computed once. It compiles itself, one program for every shape of
        a batch."""
        inverse, of_test = _compiled_start(self, model, test)
        for batch in batches:
            yield _compiled_scores(self, model, inverse, of_test, batch)

    def of_itself(self, model: Model, data: tuple) -> Float[Array, " examples"]:
        r"""$\nabla_i^\top (C + \lambda I)^{-1} \nabla_i$ of every example. It is large
        if an example can only be memorised, for instance because its label is wrong."""

        def score(operator, shift, rows):
            def one(row):
                gradient = _gradients(_Rows(row.x[None], row.g[None], rows.mask))
                return jnp.vdot(gradient, _times(operator, gradient))

            rows = _cast(rows, operator)
            each = rows._replace(mask=None)
            return jax.lax.map(one, each, batch_size=_AT_ONCE)

        return self._inverse(model).sum_over_layers(score, self._rows(model, data))

    def _inverse(self, model: Model) -> BlockDiagonalOperator:
        operator = BlockDiagonalOperator(self.curvature, model)
        return operator.inverse(self.damping, self.solver)

    def _rows(self, model: Model, data: tuple) -> Model:
        captured = capture(self.loss_fn)(model, *data)
        return jtu.tree_map(_of_examples, captured, is_leaf=_is_captured)


def influence(
    loss_fn: Callable,
    curvature: Model,
    damping: PerLayer,
    solver: AbstractDampedSolver = Eigh(),
) -> Influence:
    r"""How the losses of test examples depend on training examples: influence functions,

    $$s_{ij} = \nabla_i^\top (C + \lambda I)^{-1} \nabla_j$$

    with $\nabla$ the gradients of single examples' losses. Without training example $j$,
    the loss of test example $i$ would be higher by about $s_{ij} / N$,
    with $N$ the number of training examples: helpful examples have positive scores.

    The gradients of examples are never written out if the inverse is a Kronecker product
    ([`eqx_kfac.Cholesky`][]) and there are few rows per example: then each layer adds
    $(G^{-1} g_i)^\top g_j \cdot (A^{-1} x_i)^\top x_j$.

    **Arguments:**

    - `loss_fn`: as for [`eqx_kfac.analysis.capture`][]; the losses are those of its
        single examples. Penalties are not part of the gradients.
    - `curvature`: what [`eqx_kfac.curvature`][] returns, for any blocks, or
        `state.curvature` of an optimizer. [`eqx_kfac.L2`][] terms are part of $C$.
    - `damping`: $\lambda$, a number or one for every layer
        (`BlockDiagonalOperator.per_layer`).
    - `solver`: how $(C + \lambda I)^{-1}$ is approximated. [`eqx_kfac.Eigh`][] is exact;
        [`eqx_kfac.Cholesky`][] takes $d_\text{in} + d_\text{out}$ operations for a layer
        and every pair of examples, other solvers $d_\text{in} d_\text{out}$.

    **Returns:**

    A function `(model, test, train) -> scores` `[tests, train]`, with methods for data of
    any size (`in_batches`) and for the influence of examples on themselves
    (`of_itself`).

    !!! Example

        ```python
        influence = kfac.analysis.influence(loss_fn, curvature, damping=1e-3)
        scores = eqx.filter_jit(influence)(model, (x_test, y_test), (x, y))
        most_helpful = scores.argsort(axis=1)[:, ::-1]
        ```

    ??? cite "Reference"

        P. W. Koh, P. Liang, *Understanding Black-box Predictions via Influence
        Functions*, ICML 2017. With K-FAC and EKFAC: R. Grosse et al., *Studying Large
        Language Model Generalization with Influence Functions*, 2023.
    """
    check_instance("solver", solver, AbstractDampedSolver, "kfac.Eigh()")
    return Influence(loss_fn, curvature, damping, solver)


class _Rows(NamedTuple):
    """What one layer has seen of every example."""

    x: Float[Array, "*stack examples rows d_in"]
    g: Float[Array, "*stack examples rows d_out"]
    mask: Bool[Array, "*stack d_out d_in"] | None = None


def _is_captured(node: object) -> bool:
    return isinstance(node, Captured)


def _of_examples(captured: Captured) -> _Rows:
    x, g = captured.rows()
    axes = captured.stack + captured.form.groups
    if captured.examples == 0:
        raise ValueError(
            f"A layer of the form `{captured.form}` is not called within a `vmap` over "
            "examples, of which the scores are to be: the loss function must map the "
            "model over a batch, be it one of a single example."
        )

    def by_example(a):
        return a.reshape(*a.shape[: axes + 1], -1, a.shape[-1])

    mask = captured.form.mask
    if mask is not None:
        mask = mask.of_columns(x.shape[-1])
        mask = jnp.broadcast_to(mask, x.shape[:axes] + mask.shape)
    return _Rows(by_example(x), by_example(g), mask)


def _scores(inverse: BlockDiagonalOperator, test: Model, train: Model) -> Array:
    return inverse.sum_over_layers(_pairs, test, train)


@eqx.filter_jit
def _compiled_start(
    influence: Influence, model: Model, test: tuple
) -> tuple[BlockDiagonalOperator, Model]:
    return influence._inverse(model), influence._rows(model, test)


@eqx.filter_jit
def _compiled_scores(
    influence: Influence,
    model: Model,
    inverse: BlockDiagonalOperator,
    of_test: Model,
    batch: tuple,
) -> Array:
    return _scores(inverse, of_test, influence._rows(model, batch))


def _pairs(operator: Any, shift: Array, test: _Rows, train: _Rows) -> Array:
    """The product with the operator between all pairs of examples, for one layer."""
    test, train = _cast(test, operator), _cast(train, operator)
    (*_, n, d_in), (*_, m, d_out) = test.x.shape, train.g.shape
    by_rows = isinstance(operator, KroneckerOperator)
    by_rows = by_rows and operator.in_structure().shape == (d_out, d_in)
    if by_rows and n * m * (d_out + d_in) <= d_out * d_in:
        x = _between(test.x, operator.input_factor, train.x)
        g = _between(test.g, operator.output_factor, train.g)
        return jnp.sum(x * g, axis=(1, 3))
    directions = _times(operator, _gradients(test))
    if m > 1:
        whole = _gradients(train)
        return matmul(_flat(directions), _flat(whole).T)

    def of_test(direction):
        return jnp.sum(matmul(train.x, direction.T) * train.g, axis=(1, 2))

    return jax.lax.map(of_test, directions)


def _cast(rows: _Rows, operator: lx.AbstractLinearOperator) -> _Rows:
    dtype = operator.in_structure().dtype
    return rows._replace(x=rows.x.astype(dtype), g=rows.g.astype(dtype))


def _gradients(rows: _Rows) -> Float[Array, "examples d_out d_in"]:
    gradients = matmul(rows.g.mT, rows.x)
    return gradients if rows.mask is None else jnp.where(rows.mask, gradients, 0)


def _times(operator: Any, gradients: Array) -> Array:
    shape = operator.in_structure().shape
    product = lambda v: operator.mv(v.reshape(shape)).reshape(v.shape)
    return jax.vmap(product)(gradients)


def _between(a: Array, factor: Factor, b: Array) -> Float[Array, "tests rows train rows"]:
    """All inner products with the factor between."""
    left, other = (rows.reshape(-1, rows.shape[-1]) for rows in (a, b))
    products = matmul(right(left, factor), other.T)
    return products.reshape(*a.shape[:2], *b.shape[:2])


def _flat(a: Array) -> Array:
    return a.reshape(len(a), -1)
