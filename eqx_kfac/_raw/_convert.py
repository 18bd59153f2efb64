"""A model, converted."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._block import AbstractBlock, check_block, Diagonal, Kronecker
from .._checks import check_instance
from .._complex import is_complex
from .._custom_types import Layer, Model
from .._misc import names
from .._module import member, replaced
from .._program import bypassed
from .._tag import is_tagged, LayerError
from ..form import AbstractForm, Parameters
from ..nn import Blocks, Choice, convert_layers, revert_layers
from ._covered import check_followed, key_name
from ._formed import Formed, formed, unformed
from ._notes import Notes, Part, RawArray, tags_for
from ._parts import HeldParts, joined, parts_of
from ._watched import (
    CalledLater,
    map_watched,
    Marked,
    method_of,
    plain,
    walked,
    Watched,
    watched,
)


_T = TypeVar("_T")


def convert(
    model: _T,
    blocks: Blocks = None,
    *,
    example: Any = None,
    method: str | Callable = "__call__",
    layers: Mapping[type, AbstractForm] | None = None,
    rest: AbstractBlock | None = None,
) -> _T:
    """Tags a model, so that curvature can be collected: all of `equinox.nn`'s linear,
    convolutional, embedding, normalisation and recurrent layers; and, given an
    `example`, whatever else is trained.

    Layers are found anywhere in the PyTree: in `eqx.nn.MLP`, `Sequential`,
    `MultiheadAttention`, in your own modules, in tuples, lists and dicts, and stacked by
    `eqx.filter_vmap`. What is tagged already is left alone. (For stacked `PReLU`s, the
    slopes cannot be distinguished from those of channels: convert inside the
    `eqx.filter_vmap` that creates them.)

    With an `example`, the model is traced once, and it is noted what becomes of every
    other array of floating-point numbers: of those in modules of your own, in subclasses
    of `equinox.nn`'s layers, or in layers whose weight is used without calling them. An
    array that data are multiplied by (in a matrix product, an `einsum`, a convolution,
    or by looking up its rows; transposed, reshaped, sliced, cast on the way) is a layer
    of its own, with a [`eqx_kfac.form.View`][] of it as its form, and the bias that is
    added to the result. Any other array (a scale, a class token, a weight that
    is computed from it) is tagged at its value. While curvature is being collected, a
    call of the model is traced and evaluated equation by equation, with tags where these
    arrays meet data; otherwise, nothing happens.

    **Arguments:**

    - `model`: any PyTree with Equinox layers.
    - `blocks`: how the layers' curvature is approximated. `None`: every layer's default,
        which is [`eqx_kfac.Kronecker`][] if the layer is linear in its parameters, and
        [`eqx_kfac.Diagonal`][] if it scales and shifts. A block: for all layers of the
        former kind. A dictionary: blocks by layer type (`eqx.nn.Conv2d`) or by path
        (`".layers[0]"`, for all layers there and below; the longest path counts, and any
        path before a type). A function: `blocks(path, layer)` returns a block, or
        `"default"`. A block of `None` leaves the layers untagged. An array has the path
        `".attention.query"`, and the module that holds it as its layer.
    - `example`: what one call gets: an array, or a tuple of the positional arguments
        (keys and states among them), as inside the `vmap` over the batch: without its
        axis; a model that takes whole batches gets one. Only shapes and types matter;
        `jax.ShapeDtypeStruct`s will do.
    - `method`: what is called: the name of a method, or a function of the model and
        the arguments in `example`.
    - `layers`: the forms of layers of other classes, by class. Such a layer maps its
        first argument to its output, `layers={TheirLinear: kfac.form.Dense()}`.
    - `rest`: the block of all arrays that no layer multiplies data by. `None`: with an
        `example`, [`eqx_kfac.Diagonal`][]`()`; without one, they stay untagged.

    **Returns:**

    The model with the same leaves, the same outputs and the same files
    (`eqx.tree_serialise_leaves`). Its modules are still instances of their classes. Only
    a complex array of theirs is held as two real ones, which are what is trained; whoever
    reads the field gets the complex array. (And no array of floating-point numbers has a
    weak type: `jnp.full(3, 0.5)` has one.)

    **Raises:** `ValueError` for a type or a path in `blocks` that matches no layer, or if
    no array is in a module; `TypeError` if there is nothing to call.

    !!! Example

        ```python
        model = kfac.convert(eqx.nn.MLP(784, 10, 256, 2, key=key))
        model = kfac.convert(vit, blocks={".patches": kfac.Kronecker(kfac.Reduce())})
        model = kfac.convert(their_model, example=x[0])
        ```
    """
    choice = Choice(blocks)
    if rest is not None:
        check_block("rest", rest)
    by_uses, notes = example is not None, Notes()
    if by_uses or rest is not None:
        _check_anything(model)
    model = _formed_layers(_unwatched(model), dict(layers or {}), choice)
    model = convert_layers(model, choice, lenient=by_uses)
    if by_uses:
        call = _Call(model, example, method)
        model = _held(_called_only(model, call))
        call.look(lambda args: _noted(model, args, method, notes))
    elif rest is not None:
        model = _held(model)
    if by_uses or rest is not None:
        of_rest = Diagonal() if rest is None else rest
        model = _with_tags(model, notes, choice, of_rest)
    choice.check()
    return jtu.tree_map(_of_definite_type, model)


def revert(model: _T) -> _T:
    """The inverse of [`eqx_kfac.convert`][]: every tagged layer becomes what it was; so
    do `kfac.MLP` and the like.

    **Arguments:**

    - `model`: any PyTree; layers that are not tagged stay as they are.
    """
    return revert_layers(_unformed_layers(_unwatched(model)))


def _of_definite_type(leaf: Any) -> Any:
    """An array that was made of Python's numbers (`jnp.full(3, 0.5)`) has a weak type,
    which is another one after the first update: a jitted step would be compiled anew."""
    is_weak = eqx.is_inexact_array(leaf) and leaf.weak_type
    return jnp.asarray(leaf, leaf.dtype) if is_weak else leaf


def _unwatched(model: Model) -> Any:
    return joined(map_watched(plain, model))


def _held(model: Model) -> Any:
    """The model with complex arrays as their parts."""

    def split(module, _):
        for name, array in _own_arrays(module):
            if is_complex(array) and array.size > 0:
                module = replaced(module, name, parts_of(array))
        return module

    return _rebuilt(split, model)


def _formed_layers(
    model: Model, forms: dict[type, AbstractForm], choice: Choice
) -> Model:
    """The model with tags in all layers of these classes."""
    for cls, form in forms.items():
        check_instance(f"layers[{cls!r}]", form, AbstractForm, "kfac.form.Dense()")

    def swap(path, node):
        form = forms.get(type(node))
        if form is None:
            return node
        default = Diagonal() if isinstance(form, Parameters) else Kronecker()
        block = choice(jtu.keystr(path), node, default)
        return node if block is None else formed(node, form, block)

    is_leaf = lambda node: type(node) in forms or is_tagged(node)
    new = jtu.tree_map_with_path(swap, model, is_leaf=is_leaf)
    there = {type(n) for n in jtu.tree_leaves(model, is_leaf=is_leaf)}
    missing = [cls.__name__ for cls in forms if cls not in there]
    if missing:
        raise ValueError(f"There is no layer of the class {names(missing)} in the model.")
    return new


def _unformed_layers(model: Model) -> Model:
    is_formed = lambda node: isinstance(node, Formed)
    swap = lambda node: unformed(node) if is_formed(node) else node
    return jtu.tree_map(swap, model, is_leaf=is_formed)


#
# One call of the model
#


class _Call:
    """A call of a model, to be traced: within the axes that it has names for."""

    def __init__(self, model: Model, example: Any, method: str | Callable):
        if isinstance(method, str) and not callable(getattr(model, method, None)):
            raise TypeError(
                f"The model, a {type(model).__name__}, has no method `{method}`. Say "
                "what is called with the example: `kfac.convert(model, example=x, method="
                '"log_prob")`, or a function of the model and the example, `method='
                "lambda model, x: ...`."
            )
        self.method = method
        self.args = example if isinstance(example, tuple) else (example,)
        self.axes: list[str] = []

    def look(self, fn: Callable) -> Any:
        """What `fn(args)` returns, which is no array; traced, not evaluated."""
        while True:
            try:
                return self._within_axes(fn)
            except (NameError, LayerError) as error:  # Layers say it in their own words.
                axis = _unbound_axis(error)
                if axis is None or axis in self.axes:
                    raise
                self.axes.append(axis)

    def _within_axes(self, fn: Callable) -> Any:
        found = []

        def run(_):
            found.append(fn(jtu.tree_map(_as_array, self.args)))
            return 0

        for axis in self.axes:
            run = jax.vmap(run, axis_name=axis, axis_size=2, in_axes=None)
        try:
            jax.eval_shape(run, 0)
        except Exception as error:
            error.add_note(
                "This happened while `kfac.convert` traced the model once, with the "
                "`example`: what one call gets inside the `vmap` over the batch, without "
                "the batch's axis (or a whole batch, if there is no `vmap`); a tuple is "
                "taken for several arguments."
            )
            raise
        return found[-1]


def _as_array(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def _unbound_axis(error: BaseException) -> str | None:
    """The name of an axis that a program takes means over, as JAX misses it."""
    cause = error if isinstance(error, NameError) else error.__cause__
    found = re.search(r"unbound axis name:?\s*['\"]?(\w+)", str(cause))
    return None if found is None else found.group(1)


def _called_only(model: Model, call: _Call) -> Model:
    """The model without the tags of layers that are not (only) called: their arrays are
    used in another way."""

    def bypassing(args):
        fn = lambda model: method_of(model, call.method)(*args)
        return [own.layer for own in bypassed(fn, model)]

    while True:
        try:
            layers = call.look(bypassing)
        except LayerError as error:
            layers = [error.layer]
        wrong = {id(layer) for layer in layers}
        new = _without_tags(model, wrong, layers)
        if not wrong or jtu.tree_structure(new) == jtu.tree_structure(model):
            return model
        model = new


def _without_tags(model: Model, wrong: set[int], layers: list[Layer]) -> Model:
    looks = [jtu.tree_structure(layer) for layer in layers]

    def swap(node):
        if not is_tagged(node):
            return node
        same = id(node) in wrong or jtu.tree_structure(node) in looks
        return revert(node) if same else node

    return jtu.tree_map(swap, model, is_leaf=is_tagged)


def _noted(model: Model, args: tuple, method: Any, notes: Notes) -> None:
    """Notes what a call does with the arrays."""
    arrays = enumerate(_raw_arrays(model))
    numbers = {(array.module, array.name): i for i, array in arrays}

    def mark(module, path):
        for name, array in _own_arrays(module):
            if (path, name) in numbers:
                marked = Marked(numbers[path, name], array)
                module = replaced(module, name, marked)
        return module

    with contextlib.suppress(CalledLater):  # Then, all are tagged at their values.
        walked(_rebuilt(mark, model), method, args, {}, notes)


#
# Its modules
#


def _with_tags(model: Model, notes: Notes, choice: Choice, rest: AbstractBlock) -> Model:
    """The model, whose arrays have tags."""
    modules = dict(_modules(model))

    def choose(array: RawArray, part: Part | None, name: str):
        default = rest if part is None else Kronecker()
        # As in `kfac.summary`: of modules with other tagged ones within, the second.
        shown = f"{array.module}['{name}']", f"{array.module}.tag['{name}']"
        return choice(array.path, modules[array.module], default, shown)

    plan = tags_for(_raw_arrays(model), notes, choose)

    def with_own(module, path):
        own = plan.get(path, {})
        module = _joined_but(module, {n for tag in own.values() for n in tag.form.names})
        inner = jtu.tree_leaves(vars(module), is_leaf=lambda n: isinstance(n, Watched))
        if own or any(isinstance(node, Watched) for node in inner):
            return watched(module, own)
        return module

    return _rebuilt(with_own, model)


def _joined_but(module: Any, trained: set[str]) -> Any:
    """A module with complex arrays in the place of parts without a tag."""
    for name in {name.rpartition(".")[0] for name, _ in _own_arrays(module)}:
        parts = member(module, name) if name else None
        if isinstance(parts, HeldParts) and f"{name}.real" not in trained:
            module = replaced(module, name, joined(parts))
    return module


def _rebuilt(fn: Callable, node: PyTree, path: str = "") -> Any:
    """A tree with `fn(module, path)` in the place of every module that is no tagged
    layer, the inner ones first."""
    if is_tagged(node) or isinstance(node, eqx.nn.StateIndex):
        return node
    if not isinstance(node, eqx.Module):
        if not any(map(_is_module, jtu.tree_leaves(node, is_leaf=_is_module))):
            return node
        within = lambda p, n: _rebuilt(fn, n, path + jtu.keystr(p))
        swap = lambda p, n: within(p, n) if _is_module(n) else n
        return jtu.tree_map_with_path(swap, node, is_leaf=_is_module)
    new = object.__new__(type(node))
    fields = dict(vars(node))
    for name in _dynamic_fields(node):
        fields[name] = _rebuilt(fn, fields[name], f"{path}.{name}")
    vars(new).update(fields)
    return fn(new, path)


def _modules(model: Model) -> Iterator[tuple[str, Any]]:
    """All modules that are no tagged layers, by path."""
    found = []
    _rebuilt(lambda module, path: found.append((path, module)) or module, model)
    yield from found


def _raw_arrays(model: Model) -> list[RawArray]:
    """All arrays of real numbers that no tagged layer has."""
    return [
        RawArray(path, name, array.shape)
        for path, module in _modules(model)
        for name, array in _own_arrays(module)
        if jnp.issubdtype(array.dtype, jnp.floating) and array.size > 0
    ]


def _own_arrays(module: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a module that none of the modules within it has, by name."""
    for field in _dynamic_fields(module):
        leaves, _ = jtu.tree_flatten_with_path(vars(module)[field], is_leaf=_is_module)
        for path, leaf in leaves:
            names = [field, *map(key_name, path)]
            if eqx.is_inexact_array(leaf) and all(n and "." not in n for n in names):
                yield ".".join(names), leaf


def _dynamic_fields(module: Any) -> list[str]:
    fields = dataclasses.fields(module)
    there = vars(module)
    return [
        f.name for f in fields if f.name in there and not f.metadata.get("static", False)
    ]


def _is_module(node: PyTree) -> bool:
    return isinstance(node, eqx.Module)


def _check_anything(model: Model) -> None:
    """Raises if there is nothing to train in a model, or nowhere to follow it."""
    check_followed(model)
    if not any(map(eqx.is_inexact_array, jtu.tree_leaves(model))):
        raise ValueError(
            "`kfac.convert` found no array of floating-point numbers in the model: "
            "neither a layer of `equinox.nn` nor anything else that could be trained."
        )
