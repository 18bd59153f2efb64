"""The curvature of all tagged layers as one operator."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._block import AbstractFactors
from .._checks import AT_LEAST_0, check_array, is_number, is_scalar, plain
from .._custom_types import Model, PerLayer
from .._devices import over_stack
from .._misc import names
from .._operator import (
    AbstractSymmetricOperator,
    eigenvalues,
    flatten,
    MaskedOperator,
    spectral,
    squared_norm,
    Structure,
    trace,
    unpacked,
    widest,
)
from .._solver import AbstractDampedSolver, Eigh, is_factorised
from .._tag import flatten_tags, map_tags, partition_tagged, update_layers
from ..form import has_bias


# A number, or a tree with one for every layer.


class BlockDiagonalOperator(AbstractSymmetricOperator):
    r"""The curvature of all tagged layers as one operator on trees shaped like the
    model:

    $$C = \operatorname{diag}(C_1, C_2, \ldots), \qquad C_l = G_l \otimes A_l + c_l I$$

    for [`eqx_kfac.Kronecker`][] blocks, or whatever else the block of layer $l$ denotes.
    The curvature $c_l$ of an [`eqx_kfac.L2`][] term is part of it, as in the optimizer
    and in [`eqx_kfac.analysis.GaussNewtonOperator`][] (but as its mean over each layer).
    Damping is not: pass it to the methods that take it.

    Its vectors have the parameters that tags cover, and `None` elsewhere. If tags cover
    all parameters, they are shaped like `eqx.filter(model, eqx.is_inexact_array)`, like
    those of [`eqx_kfac.analysis.GaussNewtonOperator`][], for which its inverse is a
    preconditioner.

    **Fields:**

    - `blocks`: shaped like the model, with an operator, and the multiple of the identity
        that is added to it, in place of every tagged layer.
    - `structure`: the shapes and types of its vectors.

    !!! Example

        ```python
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
        operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
        evidence = -0.5 * operator.logdet(damping=1e-3)
        ```
    """

    blocks: Model
    structure: Structure

    def __init__(self, curvature: Model, model: Model):
        """**Arguments:**

        - `curvature`: what [`eqx_kfac.curvature`][] returns, or `state.curvature` of an
            optimizer.
        - `model`: the model that it belongs to.

        **Raises:** `ValueError` naming the layers of the model that it does not cover.
        """

        def block(tag, layer, factors):
            if factors is None:
                return None
            if not isinstance(factors, AbstractFactors):
                raise ValueError(
                    "The first argument must be the curvature of the model, as "
                    "`kfac.curvature(loss_fn)(model, ...)` returns it, but at a tagged "
                    f"layer it has a {type(factors).__name__}."
                )
            operator = over_stack(tag.operator, factors.l2.ndim)(factors)
            return _Block(operator, factors.l2, has_bias(tag.form, layer))

        found, _ = flatten_tags(lambda tag, layer, own: own, model, curvature)
        missing = [path for path, factors in found if factors is None]
        if missing:
            raise ValueError(
                f"There is no curvature of the layers {names(missing)}. Pass the part of "
                "the model that it was taken of, without the layers that are frozen."
            )
        self.blocks = map_tags(block, model, unpacked(curvature))
        self.structure = Structure(partition_tagged(model)[0])

    def mv(self, vector: PyTree) -> PyTree:
        def apply(tag, layer, new, block):
            if block is None:
                return new
            matrix = tag.to_matrix(layer).astype(block.shift.dtype)
            return tag.from_matrix(block(_product, matrix), new)

        return update_layers(apply, vector, self.blocks)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.structure.tree

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def diagonal(self) -> Float[Array, " size"]:
        def fill(tag, layer, new, block):
            if block is None:
                return new
            shape = tag.to_matrix(new).shape
            return tag.from_matrix(block(_diagonal).reshape(shape), new)

        structure = self.in_structure()
        zeros = jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), structure)
        filled = update_layers(fill, zeros, self.blocks)
        return flatten(filled, widest(structure))

    def trace(self) -> Float[Array, ""]:
        """The sum of all eigenvalues."""
        return self.sum_over_layers(lambda op, shift: trace(op) + shift * op.in_size())

    def frobenius_norm(self) -> Float[Array, ""]:
        """The root of the sum of the squares of all entries."""

        def squared(op, shift):
            return squared_norm(op) + 2 * shift * trace(op) + shift**2 * op.in_size()

        return jnp.sqrt(self.sum_over_layers(squared))

    def logdet(self, damping: PerLayer = 0.0) -> Float[Array, ""]:
        r"""$\log\det(C + \lambda I)$, with `damping` $\lambda \ge 0$."""

        def logdet(op, shift):
            return jnp.sum(jnp.log(_values(op, shift)))

        return self.damped(damping).sum_over_layers(logdet)

    def effective_dimension(self, damping: PerLayer) -> Float[Array, ""]:
        r"""$\operatorname{tr} C (C + \lambda I)^{-1}$: how many directions of the
        parameters have a curvature above `damping` $\lambda > 0$."""
        return _added(jtu.tree_map(jnp.sum, self.effective_dimensions(damping)))

    def effective_dimensions(self, damping: PerLayer) -> Model:
        """The effective dimension of every layer separately: a tree like that of
        `per_layer`."""

        def of_layer(op, shift, number):
            values = _values(op, shift)
            return jnp.sum(values / (values + number))

        numbers = self.per_layer(damping, "damping")
        return self._map(lambda block, number: block(of_layer, number), numbers)

    def condition_number(self, damping: PerLayer = 0.0) -> Float[Array, ""]:
        r"""The largest eigenvalue of $C + \lambda I$ divided by its smallest."""
        values = jtu.tree_leaves(self.damped(damping).eigenvalues())
        largest = ft.reduce(jnp.maximum, [jnp.max(v) for v in values])
        return largest / ft.reduce(jnp.minimum, [jnp.min(v) for v in values])

    def eigenvalues(self) -> Model:
        """All eigenvalues: a tree shaped like the model, with `[*stack, d_out, d_in]` in
        place of every tagged layer."""
        return self._map(lambda block: block(_values))

    def per_layer(self, numbers: PerLayer, name: str = "numbers") -> Model:
        """A tree shaped like the model, with a number in place of every tagged layer
        (for stacked layers: one for each, `[*stack]`). It can serve as a `damping` in
        which `eqx.tree_at` changes that of single layers.

        **Arguments:**

        - `numbers`: one for all, or such a tree.
        - `name`: what an error calls it.

        **Raises:** `ValueError` for negative numbers, or if they do not fit the layers.
        """
        treedef = jtu.tree_structure(self._map(lambda _: 0))
        if is_number(plain(numbers)) or is_scalar(numbers):
            numbers = treedef.unflatten([numbers] * treedef.num_leaves)
        try:
            found = treedef.unflatten(treedef.flatten_up_to(numbers))
            self._map(lambda _, number: jnp.result_type(number), found)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{name}` must be a number, or a tree with one for every tagged layer, "
                "as `BlockDiagonalOperator.per_layer(1.0)` makes it, but is "
                f"{eqx.tree_pformat(numbers)}. (That of a state is `state.damping` if "
                "it is a number, and `state.layer_damping` with a `kfac.LayerDamping`.)"
            ) from error

        def checked(block, number):
            check_array(name, number, AT_LEAST_0)
            if jnp.shape(number) not in ((), block.shift.shape):
                raise ValueError(
                    f"`{name}` has an array of shape {jnp.shape(number)} in the place of "
                    f"a layer (or of layers stacked as {block.shift.shape}): it must be "
                    "one number, or one for each of a stack."
                )
            dtype, shape = block.shift.dtype, block.shift.shape
            return jnp.broadcast_to(jnp.asarray(number, dtype), shape)

        return self._map(checked, found)

    def l2(self) -> Model:
        """The curvature of [`eqx_kfac.L2`][] terms (and the damping) that is added to
        every layer: a tree like that of `per_layer`."""
        return self._map(lambda block: block.shift)

    def without_l2(self) -> "BlockDiagonalOperator":
        """This operator, without the curvature of `L2` terms and the damping."""
        return self._blockwise(lambda block: _without_shift(block, block.operator))

    def spectral(self) -> "BlockDiagonalOperator":
        """This operator, with the eigendecomposition of every layer cached: all
        further functions of it are cheap."""
        return self._function(lambda op, shift: spectral(op).map(lambda x: x + shift))

    def scaled(self, scale: ArrayLike) -> "BlockDiagonalOperator":
        r"""$s C$, with `scale` $s \ge 0$, through the eigendecomposition of every layer
        (or the cached one of `spectral`)."""

        def scaled(op, shift):
            return spectral(op).map(lambda x: (x + shift) * jnp.asarray(scale, x.dtype))

        return self._function(scaled)

    def damped(self, damping: PerLayer) -> "BlockDiagonalOperator":
        r"""$C + \lambda I$, with `damping` $\lambda \ge 0$: a number, or one for every
        layer, in a tree like that of `per_layer`."""

        def add(block, number):
            return eqx.tree_at(lambda b: b.shift, block, block.shift + number)

        return self._blockwise(add, self.per_layer(damping, "damping"))

    def power(
        self, exponent: float | int, damping: PerLayer = 0.0
    ) -> "BlockDiagonalOperator":
        r"""$(C + \lambda I)^p$, exactly, through the eigendecomposition of every layer.

        **Arguments:**

        - `exponent`: $p$; `0.5` is the square root; `-0.5` turns white noise into
            samples with covariance $(C + \lambda I)^{-1}$.
        - `damping`: $\lambda$, which must be positive if $C$ may be singular and
            $p < 0$; as for `damped`.
        """
        power = lambda op, shift: spectral(op).power(exponent, shift)
        return self.damped(damping)._function(power)

    def inverse(
        self, damping: PerLayer, solver: AbstractDampedSolver = Eigh()
    ) -> "BlockDiagonalOperator":
        r"""$(C + \lambda I)^{-1}$, as the solver approximates it: what an optimizer with
        this solver multiplies gradients by. The factorisation is part of the operator.

        **Arguments:**

        - `damping`: $\lambda$, as for `damped`.
        - `solver`: [`eqx_kfac.Eigh`][] for the exact inverse, [`eqx_kfac.Cholesky`][]
            for factored damping.
        """

        def inverse(bias, op, shift):
            if is_factorised(op) or isinstance(op, MaskedOperator):
                return spectral(op).power(-1, shift)
            state = solver.init(op, {"damping": shift, "bias": bias})
            if isinstance(state, solver.state_type):
                return solver.inverse(state, shift)
            return _InverseOperator(solver, state, shift, Structure(op.in_structure()))

        damped = self.damped(damping)
        return damped._blockwise(
            lambda b: _without_shift(b, b(ft.partial(inverse, b.bias)))
        )

    def _map(self, fn: Callable, *rest: Any) -> Model:
        return jtu.tree_map(fn, self.blocks, *rest, is_leaf=_is_block)

    def sum_over_layers(self, fn: Callable, *rest: Any) -> Float[Array, "..."]:
        """The sum over all layers of `fn(operator, shift, *rest)`: the layer's operator,
        the multiple of the identity that is to be added, and what other trees that are
        shaped like the model have for the layer. (A layer for which these have nothing is
        left out of the sum.)"""

        def add(block, *own):
            if any(o is None for o in own):
                return None
            return jnp.sum(block(fn, *own), axis=tuple(range(block.shift.ndim)))

        return _added(self._map(add, *rest))

    def _function(self, fn: Callable) -> "BlockDiagonalOperator":
        """The operator with blocks `fn(operator, shift)`, which include their shift."""
        return self._blockwise(lambda block: _without_shift(block, block(fn)))

    def _blockwise(self, fn: Callable, *rest: Any) -> "BlockDiagonalOperator":
        """This operator, with blocks `fn(block, *rest)`."""
        return eqx.tree_at(lambda op: op.blocks, self, self._map(fn, *rest))


class _Block(eqx.Module):
    """An operator plus a multiple of the identity, both stacked if layers are."""

    operator: lx.AbstractLinearOperator
    shift: Float[Array, "*stack"]
    bias: bool = eqx.field(static=True)  # Whether the last column is one beside weights.

    def __call__(self, fn: Callable, *args: Any) -> Any:
        """`fn(operator, shift, *args)` for every layer of a stack."""
        return over_stack(fn, self.shift.ndim)(self.operator, self.shift, *args)


class _InverseOperator(AbstractSymmetricOperator):
    """The inverse of a layer's damped curvature, as a solver computes it."""

    solver: AbstractDampedSolver
    state: Any
    damping: Float[Array, ""]
    structure: Structure

    def mv(self, vector: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        return self.solver.compute(self.state, vector, {"damping": self.damping})[0]

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.structure.tree

    @property
    def positive_semidefinite(self) -> bool:
        return True


def _added(tree: Model) -> Float[Array, "..."]:
    """The sum of what all layers have."""
    dtype = widest(tree)
    return ft.reduce(jnp.add, [x.astype(dtype) for x in jtu.tree_leaves(tree)])


def _without_shift(block: _Block, operator: Any) -> _Block:
    """A block of an operator that has the shift in it."""
    return _Block(operator, jnp.zeros_like(block.shift), block.bias)


def _values(operator: Any, shift: Array) -> Array:
    return eigenvalues(operator) + shift


def _product(operator: Any, shift: Array, matrix: Array) -> Array:
    vector = matrix.reshape(operator.in_structure().shape)
    return operator.mv(vector).reshape(matrix.shape) + shift * matrix


def _diagonal(operator: Any, shift: Array) -> Array:
    return lx.diagonal(operator).reshape(operator.in_structure().shape) + shift


def _is_block(node: PyTree) -> bool:
    return isinstance(node, _Block)
