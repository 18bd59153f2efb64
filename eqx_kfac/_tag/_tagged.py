"""Tagged layers in a model."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._custom_types import Layer, Model, Weights
from .._misc import names
from .._module import member, replaced
from ._tag import is_trainable, Tag


def is_tagged(node: PyTree) -> bool:
    """Whether `node` is a tagged layer: a Module with a `tag` that is a `Tag`, or several
    by name, if its parameters are those of several linear maps."""
    tag = getattr(node, "tag", None) if isinstance(node, eqx.Module) else None
    several = isinstance(tag, dict) and len(tag) > 0 and all(map(_is_tag, tag.values()))
    return _is_tag(tag) or several


def map_tags(fn: Callable, tree: Model, *rest: Model, others: Callable = lambda *_: None):
    """Maps `fn(tag, layer, *rest)` over the tags of a model-shaped tree, and `others`
    over its other leaves. Several tags of one layer give several results, by name. A
    tagged layer that has other ones within stays a module, with its own results as its
    `tag`."""

    def apply(node, *nodes):
        if not is_tagged(node):
            return others(node, *nodes)
        nested = _has_layers(node)
        of_tags = [n.tag if nested and n is not None else n for n in nodes]
        if isinstance(node.tag, Tag):
            own = fn(node.tag, node, *of_tags)
        else:
            own = {
                name: fn(tag, node, *(None if n is None else n[name] for n in of_tags))
                for name, tag in node.tag.items()
            }
        if not nested:
            return own
        within = map_tags(fn, *map(_untagged, (node, *nodes)), others=others)
        return replaced(within, "tag", own)

    return jtu.tree_map(apply, tree, *rest, is_leaf=is_tagged)


def update_layers(fn: Callable, tree: Model, *rest: Model):
    """Maps the tagged layers of a model-shaped tree, `new = fn(tag, layer, new, *rest)`
    for one tag after the other; other leaves stay."""

    def apply(node, *nodes):
        if not is_tagged(node):
            return node
        nested = _has_layers(node)
        of_tags = [n.tag if nested and n is not None else n for n in nodes]
        if isinstance(node.tag, Tag):
            new = fn(node.tag, node, node, *of_tags)
        else:
            new = node
            for name, tag in node.tag.items():
                own = (None if n is None else n[name] for n in of_tags)
                new = fn(tag, node, new, *own)
        if not nested:
            return new
        within = update_layers(fn, *map(_untagged, (new, *nodes)))
        return replaced(within, "tag", node.tag)

    return jtu.tree_map(apply, tree, *rest, is_leaf=is_tagged)


def _has_layers(layer: Layer) -> bool:
    """Whether there are other tagged layers in a tagged one."""
    kinds = (eqx.Module, list, tuple, dict)
    fields = {k: v for k, v in vars(layer).items() if k != "tag" and isinstance(v, kinds)}
    if not fields:  # As in nearly all layers.
        return False
    return any(map(is_tagged, jtu.tree_leaves(fields, is_leaf=is_tagged)))


def _untagged(node: PyTree) -> Any:
    """A tagged layer, or what is in its place in another tree, without its own tags."""
    return None if node is None else replaced(node, "tag", None)


class TaggedLayer(NamedTuple):
    """A layer in a model, and one of its tags."""

    path: str
    tag: Tag
    layer: Layer


def tagged_layers(model: Model, prefix: str = "") -> list[TaggedLayer]:
    """One for every tag of a model, whose own path is `prefix`."""
    nodes, _ = jtu.tree_flatten_with_path(model, is_leaf=is_tagged)
    found = []
    for path, node in nodes:
        if is_tagged(node):
            tags = [node.tag] if isinstance(node.tag, Tag) else node.tag.values()
            own = prefix + jtu.keystr(path)
            found += [TaggedLayer(own, tag, node) for tag in tags]
            if _has_layers(node):
                found += tagged_layers(_untagged(node), own)
    return found


def trained_layers(model: Model) -> list[TaggedLayer]:
    """One for every tag with something to train, in the order of `flatten_tags`."""
    found, _ = flatten_tags(lambda tag, layer: (tag, layer), model)
    return [TaggedLayer(path, *pair) for path, pair in found]


def flatten_tags(
    fn: Callable, model: Model, *rest: Model
) -> tuple[list[tuple[str, Any]], Any]:
    """`(path, fn(tag, layer, *rest))` for every tag with something to train, and the
    structure of a model-shaped tree that has one leaf for each."""

    def leaf(tag, layer, *own):
        return _Leaf(fn(tag, layer, *own)) if is_trainable(tag, layer) else None

    found, treedef = jtu.tree_flatten_with_path(map_tags(leaf, model, *rest))
    return [(jtu.keystr(path), leaf.value) for path, leaf in found], treedef


def map_at_once(do: Callable, fn: Callable, model: Model, *rest: Model) -> Model:
    """Maps over all tagged layers at once: `fn` returns what is needed of a layer, or
    `None`, and `do` makes of the list of these a list of results, which becomes a tree
    shaped like the model."""
    found, treedef = flatten_tags(fn, model, *rest)
    results = iter(do([own for _, own in found if own is not None]))
    return treedef.unflatten([None if own is None else next(results) for _, own in found])


class _Leaf:
    """Something that is not a tree."""

    def __init__(self, value: Any):
        self.value = value


def check_tagged(model: Model) -> None:
    """Raises if there is nothing in a model that curvature could be collected from, or
    parameters that there is none of."""
    found = tagged_layers(model)
    for path, tag, layer in found:
        where = f"layer `{path}`" if path else "model"
        _check_field(where, tag, layer)
        _check_parameters(where, tag, layer)
        _check_once(where, layer)
    if not any(is_trainable(tag, layer) for _, tag, layer in found):
        raise ValueError(
            "The model has no tagged layer with parameters to train, so there is no "
            "curvature to collect. Convert it with `kfac.convert(model)`, or write its "
            "layers with `kfac.Linear`. If its layers are not those of `equinox.nn`, "
            "give an example of what one call of the model gets, without the batch's "
            "axis: `kfac.convert(model, example=x[0])`."
        )


def is_code(node: PyTree) -> bool:
    """Whether it is a function or a class, but no model."""
    is_function = callable(node) and not isinstance(node, eqx.Module)
    return isinstance(node, type) or (is_function and not tagged_layers(node))


def check_order(name: str, loss_fn: Any, model: Model, order: str) -> None:
    """Raises for a model in the place of the loss function."""
    if is_code(model) and tagged_layers(loss_fn):
        raise TypeError(
            f"`{name}` takes the loss function first and then the model, but got the "
            f"model first. The order is `{order}`."
        )


def _check_field(where: str, tag: Tag, layer: Layer) -> None:
    if not any(node is tag for node in jtu.tree_leaves(layer, is_leaf=_is_tag)):
        raise TypeError(
            f"The tag of the {where} is not in its tree (it is static, an attribute of "
            "the class, or made anew whenever it is asked for), so that nothing could "
            "be collected in it. Make it an ordinary field: `tag: kfac.Tag`."
        )


def _check_parameters(where: str, tag: Tag, layer: Layer) -> None:
    missing = [name for name in tag.form.names if not _has(layer, name)]
    if missing:
        raise ValueError(
            f"The {where} has a tag with the form `{tag.form}`, which is that of a layer "
            f"with {names(tag.form.names)}, but it has no {names(missing)}. Give it a "
            "field of that name (`None` if there is no such parameter), or its tag "
            "another form."
        )
    leaves = {id(leaf) for leaf in jtu.tree_leaves(layer)}
    for name, p in zip(tag.form.names, tag.form.parameters(layer), strict=True):
        what = f"The parameter `{name}` of the {where}"
        if p is not None and id(p) not in leaves:
            raise TypeError(
                f"{what} is no array of the layer, but computed from others (by a "
                "property, say), which are what is trained. Tag the layer as "
                "`kfac.form.Parameters` of these."
            )
        if p is not None and not jnp.issubdtype(p.dtype, jnp.floating):
            raise TypeError(
                f"{what} is of type {p.dtype}, but curvature is that of real "
                "floating-point numbers. (A complex parameter is two: its real and its "
                "imaginary part.) Freeze it (`eqx.partition` it out of the model), or "
                "leave its layer without a tag: `kfac.convert(kfac.revert(model), "
                "blocks={path: None})`."
            )
        if p is not None and p.size == 0:
            raise ValueError(
                f"{what} has shape {p.shape}: there is nothing to train. Freeze it "
                "(`eqx.partition` it out of the model), or leave out the layer."
            )
    if is_trainable(tag, layer):
        try:
            tag.form.sizes(layer)
        except ValueError as error:  # Of some, all are trained or none.
            error.add_note(f"This is about the {where}.")
            raise


def _check_once(where: str, layer: Layer) -> None:
    """Raises if a parameter of a layer is also that of a tagged layer within it."""
    if not _has_layers(layer):
        return
    tags = [layer.tag] if isinstance(layer.tag, Tag) else layer.tag.values()
    own = {id(p) for tag in tags for p in tag.form.parameters(layer) if p is not None}
    for path, tag, inner in tagged_layers(_untagged(layer)):
        if any(id(p) in own for p in tag.form.parameters(inner)):
            raise ValueError(
                f"The {where} has a tag for a parameter of its layer {names([path])}, "
                "which has a tag for it, too: one of them would see nothing of it. "
                "`kfac.revert` takes off that of the inner layer."
            )


def _has(layer: Layer, name: str) -> bool:
    try:
        member(layer, name)
    except AttributeError:
        return False
    return True


class LayerError(ValueError):
    """A tagged layer was misused. Carries the layer, so that its path can be named."""

    def __init__(self, layer: Layer, message: str):
        super().__init__(message)
        self.layer = layer


@contextlib.contextmanager
def naming_layers(model: Model):
    """Adds to any `LayerError` where in `model` the layer is. (A layer does not know its
    path; layers that look alike are all named.)"""
    try:
        yield
    except LayerError as error:
        looks = jtu.tree_structure(empty_tags(error.layer))
        paths = {  # In their order, each once.
            path: None
            for path, _, layer in tagged_layers(model)
            if jtu.tree_structure(empty_tags(layer)) == looks
        }
        if paths:
            error.add_note(f"The layer is {names(list(paths))} of the model.")
        raise


def blank(model: Model) -> Model:
    """A model-shaped tree with `None` for every tag."""
    return map_tags(lambda *_: None, model)


def fill_tags(
    model: Model, weights: Weights = None, curvature: Model | None = None
) -> Model:
    """The model with its tags ready to collect. `curvature` is that so far, in whose
    bases some blocks take their statistics."""

    def fill(tag, layer, factors):
        return tag.fill(layer, weights, factors)

    return with_tags(fill, model, blank(model) if curvature is None else curvature)


def fill_rows(model: Model, slots: Model) -> Model:
    """The model with its tags ready to hand out rows, where `slots` has any for them."""

    def fill(tag, layer, slots):
        return tag if slots is None else tag.fill_rows(layer, slots)

    return with_tags(fill, model, slots)


def empty_tags(model: Model) -> Model:
    """The model (or a tree of gradients of it) without its tags' slots."""
    return with_tags(lambda tag, _: tag.empty(), model)


def only_rows(model: Model) -> Model:
    """The model, whose tags are ready to hand out rows alone, where they are now."""
    return with_tags(lambda tag, _: tag.only_rows(), model)


def with_tags(fn: Callable, model: Model, *rest: Model) -> Model:
    """The model with `fn(tag, layer, *rest)` in the place of each of its tags."""

    def apply(layer, *own):
        if not is_tagged(layer):
            return layer
        nested = _has_layers(layer)
        of_tags = [n.tag if nested and n is not None else n for n in own]
        tag = jtu.tree_map(
            lambda tag, *own: fn(tag, layer, *own), layer.tag, *of_tags, is_leaf=_is_tag
        )
        if nested:
            layer = with_tags(fn, *map(_untagged, (layer, *own)))
        return replaced(layer, "tag", tag)

    return jtu.tree_map(apply, model, *rest, is_leaf=is_tagged)


def _is_tag(node: PyTree) -> bool:
    return isinstance(node, Tag)
