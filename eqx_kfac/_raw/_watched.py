"""Modules of any class with tags for their own arrays. While curvature is collected, what
a call of them does is evaluated equation by equation, and the tags are bound where their
arrays meet data."""

import contextlib
import functools as ft
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._block import Kronecker
from .._custom_types import Layer
from .._jax import part_of
from .._module import member, replaced
from .._tag import Tag
from ..form import AbstractForm, Convolution, Leaf, Lookup, Parameters, View
from ..nn import Derived
from ._axes import Axes
from ._facts import AbstractVisitor, Fact, Order, Term
from ._parts import holds_parts, Joined, joined
from ._sites import GROUPED, Site
from ._walk import Walk


class Watched(Derived):
    """A module whose class was made by `watched_class`: it has one more field, a
    dictionary of tags for its arrays, and knows when its methods are called."""


class Marked(NamedTuple):
    """Stands for an array of parameters in a module, by its number."""

    number: int
    array: Array


@ft.cache
def watched_class(cls: type, complex_fields: tuple[str, ...] = ()) -> type:
    """A subclass of `cls` whose instances are watched, and have the parts of complex
    arrays in some fields."""

    def intercepted(name):
        def method(self, *args, **kwargs):
            with contextlib.suppress(OwnParts):
                if is_collecting(self):
                    return watched_call(self, name, args, kwargs)
                if _has_complex_fields(self):
                    return joined_call(self, name, args, kwargs)
            return getattr(super(new, self), name)(*args, **kwargs)

        return ft.update_wrapper(method, _function(cls, name), updated=())

    namespace: dict[str, Any] = {name: intercepted(name) for name in _methods(cls)}
    namespace |= {name: Joined(name) for name in complex_fields}
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {"tag": dict},
        "__reduce__": lambda self: (_rebuilt, (cls, dict(vars(self)))),
        "tag": eqx.field(default=None),
        "_complex_fields": complex_fields,
    }
    new = subclass(cls, Watched, namespace)
    return new


def subclass(cls: type, marker: type, namespace: dict[str, Any]) -> type:
    """A subclass of a module's class, of the same name. (Some packages' classes refuse to
    be inherited from, which is for those who read them, and not for what they do.)"""
    kind: Any = type(eqx.Module)
    return kind.__new__(type(cls), cls.__name__, (cls, marker), namespace)


def _methods(cls: type) -> list[str]:
    """The names of the methods that a user may call on an instance."""
    names = []
    for base in cls.__mro__[: cls.__mro__.index(eqx.Module)]:
        for name, value in vars(base).items():
            is_call = callable(value) and hasattr(value, "__get__")
            kinds = (staticmethod, classmethod, property, type)
            magic = name.startswith("__") and name != "__call__"
            if is_call and not magic and not isinstance(value, kinds):
                names.append(name)
    return [n for n in dict.fromkeys(names) if callable(_function(cls, n))]


def _function(cls: type, name: str) -> Any:
    return inspect.getattr_static(cls, name)


def _rebuilt(cls: type, fields: dict[str, Any]) -> Any:
    """A watched module, from a copy or a pickle."""
    complex_fields = tuple(name for name, f in fields.items() if holds_parts(f))
    new = object.__new__(watched_class(cls, complex_fields))
    vars(new).update(fields)
    return new


def watched(module: Any, tags: dict[str, Tag]) -> Any:
    """A module with `tags`, watched."""
    check_has_no_tag(module)
    return _rebuilt(type(module), {**vars(module), "tag": tags})


def check_has_no_tag(module: Any) -> None:
    """Raises if a module has something else where its tags would be."""
    if "tag" in vars(module):
        raise TypeError(
            f"A {type(module).__name__} has a field `tag` of its own, which is where "
            "its tags would be. Give the field another name."
        )


def plain(module: Any) -> Any:
    """A watched module as it was."""
    new = object.__new__(type(module).__mro__[1])
    vars(new).update({k: v for k, v in vars(module).items() if k != "tag"})
    return new


def map_watched(fn: Callable, tree: PyTree) -> Any:
    """`tree` with `fn(module)` in the place of every watched module, the inner ones
    first."""

    def apply(node):
        if not isinstance(node, Watched):
            return node
        fields = {k: map_watched(fn, v) if k != "tag" else v for k, v in _fields(node)}
        new = object.__new__(type(node))
        vars(new).update({**vars(node), **fields})
        return fn(new)

    return jtu.tree_map(apply, tree, is_leaf=_is_watched)


def watched_within(tree: PyTree) -> Iterator[Any]:
    """All watched modules, the outer ones first."""
    for node in jtu.tree_leaves(tree, is_leaf=_is_watched):
        if isinstance(node, Watched):
            yield node
            for name, value in _fields(node):
                if name != "tag":
                    yield from watched_within(value)


def _fields(module: Any) -> list[tuple[str, Any]]:
    """The fields of a module that may hold other ones."""
    kinds = (eqx.Module, list, tuple, dict)
    return [(k, v) for k, v in vars(module).items() if isinstance(v, kinds)]


def _is_watched(node: PyTree) -> bool:
    return isinstance(node, Watched)


def is_collecting(module: Any) -> bool:
    """Whether curvature of any array of a watched module is being collected."""
    return any(
        tag.collecting for node in watched_within(module) for tag in node.tag.values()
    )


def _has_complex_fields(module: Any) -> bool:
    return any(type(node)._complex_fields for node in watched_within(module))


def joined_call(module: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A method of a watched module as it was: with complex arrays not only where it reads
    fields, but also where it takes itself apart as a tree."""
    model = joined(map_watched(plain, module))
    out = getattr(model, name)(*args, **kwargs)
    if _has_own_parts(out, model):
        raise OwnParts
    return out


def watched_call(module: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A method of a watched module, with tags where its arrays meet data."""
    tags: dict[int, list[Bound]] = {}
    count = iter(range(10**9))
    witness = _witness((args, kwargs))

    def unwatched(node):
        for tag in node.tag.values():
            if isinstance(tag.form, Parameters):
                node = _tagged_at_value(tag, node, witness)
        forms = [tag for tag in node.tag.values() if isinstance(tag.form, View)]
        numbers = {}
        for tag in forms:
            for leaf in tag.form.names:
                array = member(node, leaf)
                if eqx.is_array(array) and leaf not in numbers:
                    numbers[leaf] = next(count)
        for tag in forms:
            weight, *bias = tag.form.names
            if weight in numbers:
                own = numbers.get(bias[0]) if bias else None
                tags.setdefault(numbers[weight], []).append(Bound(tag, own))
        new = plain(node)
        for leaf, number in numbers.items():
            new = replaced(new, leaf, Marked(number, member(node, leaf)))
        return new

    marked = map_watched(unwatched, module)
    if not tags:
        return getattr(joined(marked), name)(*args, **kwargs)
    return walked(marked, name, args, kwargs, Binder(tags))


class OwnParts(Exception):
    """A method returns modules that it has, or functions: these are called later."""


def _has_own_parts(out: PyTree, model: Any) -> bool:
    """Whether a function, or a module with any of the model's arrays, is in `out`."""
    own = {id(leaf) for leaf in jtu.tree_leaves(model) if eqx.is_array(leaf)}
    is_module = lambda node: isinstance(node, eqx.Module)
    for node in jtu.tree_leaves(out, is_leaf=is_module):
        if is_module(node) and any(id(a) in own for a in jtu.tree_leaves(node)):
            return True
        if callable(node) and not is_module(node):
            return True
    return False


def walked(
    model: Any, name: Any, args: tuple, kwargs: dict[str, Any], visitor: AbstractVisitor
) -> Any:
    """A method of a module, some of whose arrays are `Marked`, as a visitor evaluates
    it."""
    is_leaf = lambda node: isinstance(node, Marked)
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_leaf)
    inputs, inputs_treedef = jtu.tree_flatten((args, kwargs))
    facts = list(map(_fact, leaves)) + [Fact(data=True)] * len(inputs)
    values = [leaf.array if is_leaf(leaf) else leaf for leaf in leaves] + inputs
    dynamic = [i for i, value in enumerate(values) if eqx.is_array(value)]
    rest = []

    def run(arrays):
        filled = list(values)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        model = joined(treedef.unflatten(filled[: len(leaves)]))
        args, kwargs = inputs_treedef.unflatten(filled[len(leaves) :])
        out = method_of(model, name)(*args, **kwargs)
        if _has_own_parts(out, model):
            raise OwnParts
        arrays, others = eqx.partition(out, eqx.is_array)
        arrays, structure = jtu.tree_flatten(arrays)
        rest[:] = structure, others
        return arrays

    arrays = [values[i] for i in dynamic]
    closed = jax.make_jaxpr(run)(arrays)
    jaxpr, *used = part_of(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    consts = [c for c, there in zip(closed.consts, used[0], strict=True) if there]
    pairs = [(values[i], facts[i]) for i in dynamic]
    pairs = [pair for pair, there in zip(pairs, used[1], strict=True) if there]
    values, facts = ([p[i] for p in pairs] for i in (0, 1))
    results = Walk(visitor).results(jaxpr, consts, values, facts)
    structure, others = rest
    return eqx.combine(structure.unflatten(results), others)


def method_of(model: Any, name: Any) -> Callable:
    """A method by its name; or a function of the model and more."""
    return ft.partial(name, model) if callable(name) else getattr(model, name)


def _fact(leaf: Any) -> Fact:
    if not isinstance(leaf, Marked):
        return Fact()
    return Fact(terms=(Term(leaf.number, Axes.of(leaf.array.shape)),))


def _witness(inputs: PyTree) -> Array:
    """A number that belongs to the example: to be vmapped over whatever any of the inputs
    of a call is vmapped over."""
    arrays = [a for a in jtu.tree_leaves(inputs) if eqx.is_array(a) and a.size > 0]
    arrays = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.number)]
    firsts = [jnp.real(a.reshape(-1)[0]).astype(float) for a in arrays]
    return jax.lax.stop_gradient(sum(firsts, jnp.zeros(())))


def _tagged_at_value(tag: Tag, layer: Layer, witness: Array) -> Any:
    """A layer, whose parameters that a tag is at are tagged, for every layer of a
    stack."""
    parameters = tag.form.parameters(layer)
    there = [
        (p, rank)
        for p, rank in zip(parameters, tag.form.ranks, strict=True)  # pyright: ignore
        if p is not None
    ]
    if not there or not tag.collecting:
        return layer

    def one(tag, parameters):
        own = tag.form.replace(layer, parameters)
        return tag.form.parameters(tag.parameters(own, witness))

    first, rank = there[0]
    for _ in range(first.ndim - rank):
        one = jax.vmap(one)
    return tag.form.replace(layer, one(tag, parameters))


class Bound(NamedTuple):
    """A tag of an array, and the number of the bias that it covers too."""

    tag: Tag
    bias: int | None


class Binder(AbstractVisitor):
    """Binds tags where their arrays meet data."""

    def __init__(self, tags: dict[int, list[Bound]]):
        self.tags = tags

    def site(self, site: Site, z: Array, bias: Term | None, order: Order | None) -> Array:
        bound = self._of(site)
        if bound is None:
            return z
        tag = bound.tag
        own, form = tag.form.form, site.use.form  # pyright: ignore
        swapped = matrix(form, site.use.weight) != matrix(own, tag.form.weight)  # pyright: ignore
        if swapped or form != own:
            tag = Tag(form, tag.block, swapped=swapped).with_slots_of(tag)
        return tagged(tag, z, site)

    def accepts(self, site: Site, bias: Term) -> bool:
        bound = self._of(site)
        return bound is not None and bound.bias == bias.parameter

    def otherwise(self, term: Term) -> None:
        pass  # What bypasses the tags is found by whoever collects the curvature.

    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        own = {k: [b.tag for b in bs] for k, bs in self.tags.items() if k in parameters}

        def inside(slices):
            new = {
                k: [b._replace(tag=t) for b, t in zip(self.tags[k], tags, strict=True)]
                for k, tags in slices.items()
            }
            return Binder({**self.tags, **new})

        return own, inside

    def _of(self, site: Site) -> Bound | None:
        """The tag for a use of an array: of its matrix, or of the transposed one."""
        kind = matrix(site.use.form, site.use.weight)
        for bound in self.tags.get(site.parameter, ()):
            form, block = bound.tag.form, bound.tag.block
            own = matrix(form.form, form.weight)  # pyright: ignore
            tied = isinstance(block, Kronecker) and block.tied
            if kind == own or (tied and transposed(kind) == own):
                return bound
        return None


def tagged(tag: Tag, z: Array, site: Site) -> Array:
    """A result of a form, tagged; of complex numbers, real and imaginary parts are two
    positions."""
    x = site.x
    if not jnp.iscomplexobj(z):
        x = jnp.real(x) if jnp.iscomplexobj(x) else x
        return jax.vmap(tag)(z, x) if site.mapped else tag(z, x)
    both = lambda a: jnp.concatenate([jnp.real(a), jnp.imag(a)], axis=-2)
    real, imaginary = jnp.split(tag(both(z), both(x)), 2, axis=-2)
    return jax.lax.complex(real, imaginary)


def matrix(form: AbstractForm, leaf: Leaf) -> tuple:
    """Which matrix a form makes of an array: two uses with the same one are uses of the
    same parameters."""
    if isinstance(form, Convolution):
        kernel = form.kernel, form.channel_groups
        return kernel, leaf.window, leaf.shape, leaf.order, leaf.flips, leaf.seen
    parts, rest = [], list(leaf.order)
    for size in leaf.seen:
        taken, product = [], 1
        while product < size:
            taken.append(rest.pop(0))
            product *= leaf.shape[taken[-1]]
        parts.append(tuple(taken))
    if isinstance(form, Lookup):
        parts = parts[::-1]
    groups = parts[0] if form == GROUPED else ()
    return leaf.window, leaf.shape, groups, parts[-2], parts[-1]


def transposed(matrix: tuple) -> tuple:
    """The transposed matrix."""
    *rest, out, into = matrix
    return *rest, into, out
