"""Modules of any class, with tags for the arrays that they hold themselves.

A *watched* module is of a class that is made here, a subclass of the class that it had.
It has one more field, `tag`, which is a dictionary of tags by name. While curvature is
being collected, a call of any of its methods is traced, and the program is evaluated
equation by equation (`_walk.py`). The visitor is a `Binder`, which binds the tags of an
array where the array multiplies data. At other times, the methods do what they do in the
original class.

The form of such a tag is a `View`. A tag with the form `Parameters` is *at the value* of
its arrays instead, which are tagged before the call, once for every example. There, a
*witness* tells examples apart: a number that is computed from all inputs of the call, so
that `vmap` maps it over all axes over which it maps any of them. In a call that gets a
whole batch, copies of the arrays are tagged instead (`_copies.py`).

A complex array is trained as two real ones, its real and its imaginary part. A watched
module holds these *parts* in the field of the array (`_parts.py`), and its methods get
them joined to the complex array.
"""

import contextlib
import functools as ft
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._block import Kronecker
from .._custom_types import Layer
from .._jax import Equation, part_of
from .._module import member, replaced
from .._tag import Tag
from ..form import AbstractForm, Masked, Parameters, View
from ..nn import Derived
from ._axes import Axes
from ._copies import Computed, Copied, Other, tagged_copies
from ._facts import AbstractVisitor, Fact, Order, Term
from ._moves import has_derivative
from ._parts import holds_parts, Joined, joined
from ._sites import matrix_key, Site, transposed_key
from ._walk import Walk


class Watched(Derived):
    """A module of a class made by `watched_class`. Its field `tag` is a dictionary."""


class Marked(NamedTuple):
    """An array of parameters in a module, with the number by which a visitor knows it."""

    number: int
    array: Array


class CalledLater(Exception):
    """A method returns something that will be called after it: a function, or a module
    with arrays of the model. Evaluating the method alone would miss that call."""


@ft.cache
def watched_class(cls: type, complex_fields: tuple[str, ...] = ()) -> type:
    """A subclass of `cls` whose instances are watched; in `complex_fields`, they hold the
    parts of complex arrays."""

    def intercepted(name):
        def method(self, *args, **kwargs):
            # If the result is something to be called later, this method runs as in `cls`,
            # and methods that are called later are intercepted in their turn.
            with contextlib.suppress(CalledLater):
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
    """A subclass of a module's class, of the same name, which inherits from `marker` too.

    Some packages have metaclasses that raise if anybody inherits from their classes. That
    is a rule for how programs are written, which does not concern a subclass that nobody
    sees. So this calls `__new__` of Equinox's own metaclass, and not that of `type(cls)`.
    """
    metaclass: Any = type(eqx.Module)
    return metaclass.__new__(type(cls), cls.__name__, (cls, marker), namespace)


def _methods(cls: type) -> list[str]:
    """The names of all methods of instances that `cls` and its bases define, except for
    special ones other than `__call__`."""
    names = []
    for base in cls.__mro__[: cls.__mro__.index(eqx.Module)]:
        for name, value in vars(base).items():
            is_call = callable(value) and hasattr(value, "__get__")
            others = (staticmethod, classmethod, property, type)
            is_special = name.startswith("__") and name != "__call__"
            if is_call and not is_special and not isinstance(value, others):
                names.append(name)
    # What a base defines as a method may be something else in `cls`.
    return [n for n in dict.fromkeys(names) if callable(_function(cls, n))]


def _function(cls: type, name: str) -> Any:
    """What a class defines or inherits by a name, not bound to anything."""
    return inspect.getattr_static(cls, name)


def _rebuilt(cls: type, fields: dict[str, Any]) -> Any:
    """A watched module with these fields, one of which is `tag`; `cls` is the class that
    it has when it is not watched. (Copies and pickles call this function, too.)"""
    complex_fields = tuple(name for name, f in fields.items() if holds_parts(f))
    new = object.__new__(watched_class(cls, complex_fields))
    vars(new).update(fields)
    return new


def watched(module: Any, tags: dict[str, Tag]) -> Any:
    """The watched module of `module`, with `tags`."""
    check_has_no_tag(module)
    return _rebuilt(type(module), {**vars(module), "tag": tags})


def check_has_no_tag(module: Any) -> None:
    """Raises if a module has a field `tag` already, so that its tags have no place."""
    if "tag" in vars(module):
        raise TypeError(
            f"A {type(module).__name__} has a field `tag` of its own, which is where "
            "its tags would be. Give the field another name."
        )


def plain(module: Any) -> Any:
    """A watched module as a module of the class that it had, without its tags."""
    new = object.__new__(type(module).__mro__[1])  # The first base of `watched_class`.
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
    """The fields of a module that may have modules in them, with their names."""
    containers = (eqx.Module, list, tuple, dict)
    return [(k, v) for k, v in vars(module).items() if isinstance(v, containers)]


def _is_watched(node: PyTree) -> bool:
    return isinstance(node, Watched)


def is_collecting(module: Any) -> bool:
    """Whether curvature of any array of a watched module is being collected."""
    return any(
        tag.collecting for node in watched_within(module) for tag in node.tag.values()
    )


def _has_complex_fields(module: Any) -> bool:
    """Whether a watched module, or one within it, holds parts of complex arrays."""
    return any(type(node)._complex_fields for node in watched_within(module))


def joined_call(module: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a method of a watched module returns, called on the plain module. There,
    complex arrays are joined even if the method takes the module apart as a tree; in a
    watched one, they are joined only when a field is read."""
    model = joined(map_watched(plain, module))
    out = getattr(model, name)(*args, **kwargs)
    if _is_called_later(out, model):
        raise CalledLater
    return out


def watched_call(module: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a method of a watched module returns, with all tags bound."""
    bound: dict[int, list[Bound]] = {}
    others: dict[int, Copied] = {}
    new_number = itertools.count()
    witness = _witness((args, kwargs))

    def marked(node):
        # The plain module, with some arrays tagged at their values, and with a mark on
        # each array that has tags for where it multiplies data. These tags are put into
        # `bound`, by the number on the mark; and into `others`, if copies are tagged.
        at_values = [t for t in node.tag.values() if isinstance(t.form, Parameters)]
        for tag in at_values:
            if not tag.copied:
                node = _tagged_at_values(tag, node, witness)
        tags = [tag for tag in node.tag.values() if isinstance(tag.form, View)]
        numbers = {}
        for tag in tags:
            for leaf in tag.form.names:
                array = member(node, leaf)
                if eqx.is_array(array) and leaf not in numbers:
                    numbers[leaf] = next(new_number)
        for tag in tags:
            weight, *bias = tag.form.names
            if weight in numbers:
                bias_number = numbers.get(bias[0]) if bias else None
                bound.setdefault(numbers[weight], []).append(Bound(tag, bias_number))
        new = plain(node)
        for tag in at_values:
            for leaf in tag.form.names if tag.copied else ():
                if eqx.is_array(member(node, leaf)):
                    numbers[leaf] = next(new_number)
                    others[numbers[leaf]] = Other(tag, new, leaf)
        for leaf, number in numbers.items():
            new = replaced(new, leaf, Marked(number, member(node, leaf)))
        return new

    model = map_watched(marked, module)
    if not bound and not others:
        return getattr(joined(model), name)(*args, **kwargs)
    return walked(model, name, args, kwargs, Binder(bound, others))


def _is_called_later(out: PyTree, model: Any) -> bool:
    """Whether a function, or a module with any of the model's arrays, is in `out`."""
    of_model = {id(leaf) for leaf in jtu.tree_leaves(model) if eqx.is_array(leaf)}
    is_module = lambda node: isinstance(node, eqx.Module)
    for node in jtu.tree_leaves(out, is_leaf=is_module):
        if is_module(node) and any(id(a) in of_model for a in jtu.tree_leaves(node)):
            return True
        if callable(node) and not is_module(node):
            return True
    return False


def walked(
    model: Any, name: Any, args: tuple, kwargs: dict[str, Any], visitor: AbstractVisitor
) -> Any:
    """What a method of a module returns, evaluated for a visitor. Some arrays of the
    module are `Marked`: these are the ones that the visitor is told of."""
    is_leaf = lambda node: isinstance(node, Marked)
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_leaf)
    inputs, inputs_treedef = jtu.tree_flatten((args, kwargs))
    facts = list(map(_fact, leaves)) + [Fact(data=True)] * len(inputs)
    values = [leaf.array if is_leaf(leaf) else leaf for leaf in leaves] + inputs
    dynamic = [i for i, value in enumerate(values) if eqx.is_array(value)]
    not_arrays = []  # What the method returns beside arrays, filled in by `run`.

    def run(arrays):
        filled = list(values)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        model = joined(treedef.unflatten(filled[: len(leaves)]))
        args, kwargs = inputs_treedef.unflatten(filled[len(leaves) :])
        out = method_of(model, name)(*args, **kwargs)
        if _is_called_later(out, model):
            raise CalledLater
        found, structure = jtu.tree_flatten(out)
        others = [None if eqx.is_array(leaf) else leaf for leaf in found]
        not_arrays[:] = structure, others
        return [leaf for leaf in found if eqx.is_array(leaf)]

    arrays = [values[i] for i in dynamic]
    closed = jax.make_jaxpr(run)(arrays)
    # What no result depends on is left out: it would count as a use of arrays.
    jaxpr, used_consts, used_inputs = part_of(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars)
    )
    consts = [c for c, used in zip(closed.consts, used_consts, strict=True) if used]
    pairs = [(values[i], facts[i]) for i in dynamic]
    pairs = [pair for pair, used in zip(pairs, used_inputs, strict=True) if used]
    values, facts = ([p[i] for p in pairs] for i in (0, 1))
    results = Walk(visitor).results(jaxpr, consts, values, facts)
    structure, others = not_arrays
    rest = iter(results)
    return structure.unflatten(next(rest) if o is None else o for o in others)


def method_of(model: Any, name: Any) -> Callable:
    """The method of that name; or, if `name` is a function of the model and the inputs,
    that function as if it were a method."""
    return ft.partial(name, model) if callable(name) else getattr(model, name)


def _fact(leaf: Any) -> Fact:
    """What is known of a leaf of a module before the program begins."""
    if not isinstance(leaf, Marked):
        return Fact()
    return Fact(terms=(Term(leaf.number, Axes.of(leaf.array.shape)),))


def _witness(inputs: PyTree) -> Array:
    """The witness of the inputs of a call: the sum of their first entries, so that it
    depends on each of them. Only the axes over which it is mapped matter."""
    arrays = [a for a in jtu.tree_leaves(inputs) if eqx.is_array(a) and a.size > 0]
    arrays = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.number)]
    firsts = [jnp.real(a.reshape(-1)[0]).astype(float) for a in arrays]
    return jax.lax.stop_gradient(sum(firsts, jnp.zeros(())))


def _tagged_at_values(tag: Tag, layer: Layer, witness: Array) -> Any:
    """A layer with the arrays of a tag tagged at their values; if they are stacked, each
    layer of the stack by itself."""
    parameters = tag.form.parameters(layer)
    present = [
        (p, rank)
        for p, rank in zip(parameters, tag.form.ranks, strict=True)  # pyright: ignore
        if p is not None
    ]
    if not present or not tag.collecting:
        return layer

    def one_layer(tag, parameters):
        # The tag reads nothing but these parameters of the layer: the rest may be whole.
        new = tag.form.replace(layer, parameters)
        return tag.form.parameters(tag.parameters(new, witness))

    # All arrays of a tag have the same stack, so that any of them tells its axes.
    first, rank = present[0]
    for _ in range(first.ndim - rank):
        one_layer = jax.vmap(one_layer)
    return tag.form.replace(layer, one_layer(tag, parameters))


class Bound(NamedTuple):
    """A tag of an array, and the number of the bias that the tag covers, too."""

    tag: Tag
    bias: int | None


class Binder(AbstractVisitor):
    """A visitor that binds the tags of arrays, by the numbers of these, where the arrays
    multiply data."""

    def __init__(self, bound: dict[int, list[Bound]], others: dict[int, Copied]):
        self.bound, self.others = bound, others

    def site(self, site: Site, z: Array, bias: Term | None, order: Order | None) -> Array:
        bound = self._bound_at(site)
        if bound is None:
            return z
        # A product to which the bias is not added is a row without a one, which the tag
        # cannot have: without a tag, whoever analyses the program refuses it.
        if bound.bias is not None and bias is None:
            return bound.tag.uncover(z)
        tag = bound.tag
        expected, form = _unmasked(tag), site.use.form
        key = matrix_key(form, site.use.weight)
        swapped = key != matrix_key(expected, tag.form.weight)  # pyright: ignore
        # The form of this use may differ from the form of the tag, by the strides of a
        # convolution for instance, or it may be a use of the transpose. Its statistics
        # are added to the same slots all the same.
        if swapped or form != expected:
            mask = tag.form.mask
            form = form if mask is None else Masked(form, mask.entries)
            tag = Tag(form, tag.block, swapped=swapped).with_slots_of(tag)
        return tagged(tag, z, site)

    def covered(self, site: Site, array: Array) -> Array:
        bound = self._bound_at(site)
        covered = None if bound is None else bound.tag.cover(array, whole=False)
        return array if covered is None else covered

    def accepts(self, site: Site, bias: Term) -> bool:
        bound = self._bound_at(site)
        return bound is not None and bound.bias == bias.parameter

    def otherwise(self, terms: Sequence[Term], value: Any, matters: bool) -> Any:
        return self.returned(terms, value) if matters else value

    def returned(self, terms: Sequence[Term], value: Any) -> Any:
        # What bypasses the tags is found by whoever collects the curvature.
        other = self.others.get(terms[0].parameter) if len(terms) == 1 else None
        return value if other is None else tagged_copies(other, terms[0], value)

    def masked(
        self, term: Term, mask: Any, kept: int, elsewhere: Sequence[Any]
    ) -> Term | None:
        # What the mask is has been looked at when the tag was made.
        bound = itertools.chain(*self.bound.values())
        known = {*self.bound, *(own.bias for own in bound)}
        return term if term.parameter in known else None

    def computed(self, eqn: Equation, inputs: Sequence[tuple[Any, Fact]]) -> Fact | None:
        result = Computed.of(eqn, inputs, self.others)
        if result is None:
            return None
        if not has_derivative(eqn):
            return Fact()
        number = -1 - len(self.others)  # Arrays have other numbers.
        self.others[number] = result
        return Fact(terms=(Term(number, Axes.of(result.shape)),))

    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        # The tags of stacked arrays have slots for each layer of the stack. A loop along
        # the arrays takes slices of these, too.
        tags = {
            number: [bound.tag for bound in several]
            for number, several in self.bound.items()
            if number in parameters
        }
        own = {n: o for n, o in self.others.items() if n in parameters}
        other_tags = {n: o.tag for n, o in own.items() if isinstance(o, Other)}

        def visitor_within(slices):
            sliced_tags, sliced_others = slices
            new = {
                number: [
                    bound._replace(tag=tag)
                    for bound, tag in zip(self.bound[number], sliced, strict=True)
                ]
                for number, sliced in sliced_tags.items()
            }
            others = {n: own[n]._replace(tag=t) for n, t in sliced_others.items()}
            return Binder({**self.bound, **new}, {**self.others, **others})

        return (tags, other_tags), visitor_within

    def _bound_at(self, site: Site) -> Bound | None:
        """The tag that belongs to the matrix of a site, or, if the tag is for the
        transpose as well, to its transpose."""
        key = matrix_key(site.use.form, site.use.weight)
        for bound in self.bound.get(site.parameter, ()):
            form, block = bound.tag.form, bound.tag.block
            tag_key = matrix_key(_unmasked(bound.tag), form.weight)  # pyright: ignore
            tied = isinstance(block, Kronecker) and block.tied
            if key == tag_key or (tied and transposed_key(key) == tag_key):
                return bound
        return None


def _unmasked(tag: Tag) -> AbstractForm:
    """What an array with this tag, whose form is a `View`, is used as."""
    form = tag.form.form  # pyright: ignore
    return form.form if isinstance(form, Masked) else form


def tagged(tag: Tag, z: Array, site: Site) -> Array:
    """The result `z` of the form at a site, tagged. The real and the imaginary part of
    complex numbers are two positions: the array, which is real, multiplies each of them
    by itself."""
    bind: Callable = _bind_complex if jnp.iscomplexobj(z) else type(tag).__call__
    bind = ft.partial(bind, tag)
    for _ in range(site.mapped):
        bind = jax.vmap(bind)
    return bind(z, site.x)


def _bind_complex(tag: Tag, z: Array, x: Array) -> Array:
    """Complex outputs of one position, tagged."""
    has_groups = z.ndim > 1  # And an axis of positions.
    join = ft.partial(jnp.concatenate, axis=-2) if has_groups else jnp.stack
    both = lambda a: join([jnp.real(a), jnp.imag(a)])
    parts = tag(both(z), both(x))
    real, imaginary = jnp.split(parts, 2, axis=-2) if has_groups else parts
    return jax.lax.complex(real, imaginary)
