"""The factors in an optimizer's state and their factorisation: before the first step,
whenever it is due, and with symmetric matrices in half of the memory."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh
from jaxtyping import Array, Bool, PyTree

from .._block import AbstractFactors
from .._curvature import has_bases, init_curvature, known_layers, try_in_new_bases
from .._custom_types import Model, PerLayer
from .._devices import meshes_of, zeros_as_from
from .._inverse import factorise, refactorise
from .._misc import difference
from .._operator import is_packed, pack, Packed, ShardedPacked, unpacked
from .._solver import AbstractDampedSolver
from ._schedule import Due
from ._state import KFACState, ScaleByKFACState
from ._turns import Turns, when_in_turn


def init_factors(
    model: Model, solver: AbstractDampedSolver
) -> tuple[Model, Model, Bool[Array, " layers"]]:
    """Zeros in the place of every layer's factors, and of their factorisation, as a state
    has them; and of the row that says which layers have any curvature."""
    return zeros_as_from(_factors, model, solver)


def _factors(
    model: Model, solver: AbstractDampedSolver
) -> tuple[Model, Model, Bool[Array, " layers"]]:
    curvature = init_curvature(model)
    inverse = factorise(curvature, model, solver, jnp.zeros(()))
    return curvature, inverse, known_layers(curvature)


class Factorising:
    """How the curvature of a model is factorised, and when."""

    def __init__(
        self,
        model: Model,
        solver: AbstractDampedSolver,
        due: Due,
        finite: Bool[Array, ""] | bool,
    ):
        self.model, self.solver = model, solver
        self.due, self.finite = due, finite
        self.turns = Turns(model, due.turns)

    def in_own_bases(self, curvature: Model) -> Model:
        """The curvature of blocks that are kept in a basis, in that of today."""
        if not has_bases(self.model):
            return curvature
        rebase = lambda tree: try_in_new_bases(tree, self.model, self.solver)
        return self._when_due(rebase, curvature)[0]

    def anew(
        self, inverse: Model, curvature: Model, strength: PerLayer
    ) -> tuple[Model, Bool[Array, ""]]:
        """The factorisation, due or not, and whether it is finite; if it is not, the
        `inverse` that was there."""
        return refactorise(inverse, curvature, self.model, self.solver, strength)

    def __call__(
        self, inverse: Model, curvature: Model, strength: PerLayer
    ) -> tuple[Model, Bool[Array, ""]]:
        """The factorisation as `anew` has it, of the layers that are due."""
        return self._when_due(self.anew, inverse, curvature, strength)

    def _when_due(self, compute: Callable, *trees: Model) -> tuple:
        return when_in_turn(self.turns, self.due, self.finite, compute, *trees)


def packed(state: PyTree, over: str | Sequence[str] = ()) -> PyTree:
    """The state of an optimizer in about half of the memory: one triangle of every
    symmetric matrix (factors, explicit inverses). The optimizer continues with it as it
    is, takes the same steps, and keeps it packed.

    **Arguments:**

    - `state`: that of [`eqx_kfac.KFAC`][], or of an optax optimizer.
    - `over`: an axis of the mesh on which the state is, or several. Each device along
        them keeps only a part of every matrix. At every step the parts are gathered, and
        the products with the matrices are distributed.

    **Returns:** the state, with [`eqx_kfac.operators.Packed`][] or
    [`eqx_kfac.operators.ShardedPacked`][] in place of matrices. See
    [`eqx_kfac.operators.unpacked`][] for the inverse, for instance to inspect the
    matrices.

    **Raises:** `ValueError` for part of a state, because only the whole tells which
    matrices are symmetric; and if the state is not on a mesh with such axes.

    !!! Example

        ```python
        optimizer = kfac.KFAC()
        state = kfac.packed(optimizer.init(model))
        model, state, info = optimizer.step(loss_fn, model, state, x, y, key=key)
        ```
    """
    if not any(map(_is_state, jtu.tree_leaves(state, is_leaf=_is_state))):
        raise ValueError(
            "`kfac.packed` takes the whole state of an optimizer, as `optimizer.init` or "
            f"`optimizer.step` returns it, but got {type(state).__name__}."
        )
    state = jtu.tree_map(_packed, unpacked(state), is_leaf=_is_state)
    over = (over,) if isinstance(over, str) else tuple(over)
    if not over:
        return state
    mesh = _mesh_with(over, state)

    def split(node):
        return ShardedPacked.of(node, over, mesh) if isinstance(node, Packed) else node

    return jtu.tree_map(split, state, is_leaf=is_packed)


def _mesh_with(axes: tuple[str, ...], state: PyTree) -> AbstractMesh:
    """The mesh on which a state is."""
    mesh = next(iter(meshes_of(state)), None)
    names = () if mesh is None else mesh.axis_names
    missing = [axis for axis in axes if axis not in names]
    if mesh is None or missing:
        raise ValueError(
            f"`kfac.packed(state, over={axes})`: the state is on a mesh with the axes "
            f"{names}. Put the model on a mesh with the axis {missing[0]!r}, before "
            "`optimizer.init(model)`."
        )
    return mesh.abstract_mesh


def check_belongs(state: PyTree, init: Callable, model: Model) -> None:
    """Raises unless it is a state as `init(model)` makes them, packed or not."""
    is_any = any(map(is_packed, jtu.tree_leaves(state, is_leaf=is_packed)))
    whole = eqx.filter_eval_shape(unpacked, state) if is_any else state
    expected = eqx.filter_eval_shape(lambda model: unpacked(init(model)), model)
    _check_state(whole, expected)


def _check_state(state: PyTree, expected: PyTree) -> None:
    """Raises unless a state has the structure and the shapes of the `expected` one, and
    what it keeps of the layers its types."""
    _check_same_shapes(state, expected)
    for name in (
        "curvature",
        "inverse",
        "velocity",
        "layer_damping",
        "averaged_parameters",
        "rollback",
    ):
        _check_same_types(name, getattr(state, name, None), getattr(expected, name, None))


def _check_same_shapes(state: PyTree, expected: PyTree) -> None:
    """Raises unless an optimizer's state has the structure and the shapes that belong to
    its model."""
    wrong = difference(state, expected)
    if wrong is not None:
        path, have, want = wrong
        raise ValueError(
            f"The state does not belong to this optimizer and model: its `{path}` is "
            f"{have}, but should be {want}. Make it with `optimizer.init(model)`, with "
            "the same optimizer and the same trained parameters that `step` (or "
            "`update`) gets."
        )


def _check_same_types(name: str, part: PyTree, expected: PyTree) -> None:
    leaves, _ = jtu.tree_flatten_with_path(part)
    for (path, have), want in zip(leaves, jtu.tree_leaves(expected), strict=True):
        if jnp.result_type(have) != want.dtype:
            raise ValueError(
                f"The state's `.{name}{jtu.keystr(path)}` is of type "
                f"{jnp.result_type(have)}, but should be of type {want.dtype}: a state "
                "must not be cast. For less precision, cast the parameters within the "
                "loss function: `kfac.cast(model, jnp.bfloat16)`."
            )


def _packed(node: PyTree) -> PyTree:
    if not _is_state(node):
        return node
    curvature, inverse = _packed_trees(node.curvature, node.inverse)
    return node._replace(curvature=curvature, inverse=inverse)


def _packed_trees(curvature: Model, inverse: Model) -> tuple[Model, Model]:
    """All layers' factors, and their factorisations."""

    def of_layer(factors, node):
        return _packed_fields(node, factors.l2.ndim)

    is_factors = lambda node: isinstance(node, AbstractFactors)
    return tuple(
        jtu.tree_map(of_layer, curvature, tree, is_leaf=is_factors)
        for tree in (curvature, inverse)
    )


def _packed_fields(node: PyTree, stack: int) -> PyTree:
    """A layer's factors, or their factorisation, with those fields packed that are
    symmetric matrices (not diagonals of such): their types say which."""

    def is_matrix(name):
        return getattr(getattr(node, name), "ndim", 0) == stack + 2

    names = list(filter(is_matrix, getattr(node, "symmetric", ())))
    fields = lambda node: [getattr(node, name) for name in names]
    return eqx.tree_at(fields, node, list(map(pack, fields(node)))) if names else node


def _is_state(node: PyTree) -> bool:
    return isinstance(node, (KFACState, ScaleByKFACState))
