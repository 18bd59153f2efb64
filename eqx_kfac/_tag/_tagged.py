"""Tagged layers in a model.

A *tagged layer* is a module with a tag, or with several: one for each of the linear maps
that its parameters form. A *model-shaped tree* has something else in the place of each
tagged layer: what belongs to its tag, or a dict of what belongs to its several tags. But
if there are other tagged layers inside of a tagged layer, the tree has a module in its
place, too, with what belongs to its own tags as the field `tag`.
"""

import contextlib
from collections.abc import Callable, Iterable
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
    """Whether `node` is a tagged layer: a module with a field `tag` that is a `Tag`, or a
    dict of several, by name."""
    tag = getattr(node, "tag", None) if isinstance(node, eqx.Module) else None
    several = isinstance(tag, dict) and len(tag) > 0 and all(map(_is_tag, tag.values()))
    return _is_tag(tag) or several


def map_tags(fn: Callable, tree: Model, *rest: Model, others: Callable = lambda *_: None):
    """The model-shaped tree of `fn(tag, layer, *rest)` for all tags of `tree`, which has
    layers; `rest` are model-shaped trees. `others` is mapped over all other leaves."""

    def apply(node, *nodes):
        if not is_tagged(node):
            return others(node, *nodes)
        nested = _has_layers(node)
        rest_of_tags = _of_tags(nodes, nested)
        if isinstance(node.tag, Tag):
            results = fn(node.tag, node, *rest_of_tags)
        else:
            results = {
                name: fn(tag, node, *_of_name(name, rest_of_tags))
                for name, tag in node.tag.items()
            }
        if not nested:
            return results
        within = map_tags(fn, *map(_untagged, (node, *nodes)), others=others)
        return replaced(within, "tag", results)

    return jtu.tree_map(apply, tree, *rest, is_leaf=is_tagged)


def update_layers(fn: Callable, tree: Model, *rest: Model):
    """The `tree` with its tagged layers changed. `fn(tag, layer, changed, *rest)` returns
    the layer after one more change; it is called for one tag of the layer after the
    other, first with the layer itself as `changed`. Other leaves stay."""

    def apply(node, *nodes):
        if not is_tagged(node):
            return node
        nested = _has_layers(node)
        rest_of_tags = _of_tags(nodes, nested)
        if isinstance(node.tag, Tag):
            changed = fn(node.tag, node, node, *rest_of_tags)
        else:
            changed = node
            for name, tag in node.tag.items():
                changed = fn(tag, node, changed, *_of_name(name, rest_of_tags))
        if not nested:
            return changed
        within = update_layers(fn, *map(_untagged, (changed, *nodes)))
        return replaced(within, "tag", node.tag)

    return jtu.tree_map(apply, tree, *rest, is_leaf=is_tagged)


def _has_layers(layer: Layer) -> bool:
    """Whether there are other tagged layers inside of a tagged one."""
    trees = (eqx.Module, list, tuple, dict)
    fields = {k: v for k, v in vars(layer).items() if k != "tag" and isinstance(v, trees)}
    if not fields:  # Nearly all layers have arrays and numbers only.
        return False
    return any(map(is_tagged, jtu.tree_leaves(fields, is_leaf=is_tagged)))


def _of_tags(nodes: Iterable[PyTree], nested: bool) -> list[Any]:
    """What belongs to the tags of a layer, given what model-shaped trees have in its
    place: a module, if there are other tagged layers inside (`nested`)."""
    return [node.tag if nested and node is not None else node for node in nodes]


def _of_name(name: str, rest_of_tags: list[Any]) -> list[Any]:
    """What belongs to one of the several tags of a layer."""
    return [None if of_tags is None else of_tags[name] for of_tags in rest_of_tags]


def _untagged(node: PyTree) -> Any:
    """A tagged layer with others inside, or the module that is in its place in another
    tree, without its own tags."""
    return None if node is None else replaced(node, "tag", None)


class TaggedLayer(NamedTuple):
    """A layer in a model, and one of its tags."""

    path: str
    tag: Tag
    layer: Layer


def tagged_layers(model: Model, prefix: str = "") -> list[TaggedLayer]:
    """A `TaggedLayer` for every tag of a model. Paths begin with `prefix`."""
    nodes, _ = jtu.tree_flatten_with_path(model, is_leaf=is_tagged)
    layers = []
    for path_in_model, node in nodes:
        if is_tagged(node):
            tags = [node.tag] if isinstance(node.tag, Tag) else node.tag.values()
            path = prefix + jtu.keystr(path_in_model)
            layers += [TaggedLayer(path, tag, node) for tag in tags]
            if _has_layers(node):
                layers += tagged_layers(_untagged(node), path)
    return layers


def trained_layers(model: Model) -> list[TaggedLayer]:
    """A `TaggedLayer` for every tag with something to train, in the order of
    `flatten_tags`."""
    pairs, _ = flatten_tags(lambda tag, layer: (tag, layer), model)
    return [TaggedLayer(path, *pair) for path, pair in pairs]


def flatten_tags(
    fn: Callable, model: Model, *rest: Model
) -> tuple[list[tuple[str, Any]], Any]:
    """`(path, fn(tag, layer, *rest))` for every tag with something to train, and the
    treedef of a model-shaped tree that has one leaf for each of them."""

    def leaf(tag, layer, *rest_of_tag):
        return _Leaf(fn(tag, layer, *rest_of_tag)) if is_trainable(tag, layer) else None

    leaves, treedef = jtu.tree_flatten_with_path(map_tags(leaf, model, *rest))
    return [(jtu.keystr(path), leaf.value) for path, leaf in leaves], treedef


def map_at_once(do: Callable, fn: Callable, model: Model, *rest: Model) -> Model:
    """The model-shaped tree of results that are made for all tags together.
    `fn(tag, layer, *rest)` returns what is needed of a layer, or `None` if there is to be
    no result. `do` is given the list of all that is needed, and returns a list of as many
    results."""
    pairs, treedef = flatten_tags(fn, model, *rest)
    needed = [value for _, value in pairs]
    results = iter(do([value for value in needed if value is not None]))
    return treedef.unflatten([None if v is None else next(results) for v in needed])


class _Leaf:
    """A value in a box, which JAX takes for a leaf even if the value is a tree."""

    def __init__(self, value: Any):
        self.value = value


def check_tagged(model: Model) -> None:
    """Raises if no curvature could be collected of a model, or of one of the parameters
    that its tags cover."""
    layers = tagged_layers(model)
    for path, tag, layer in layers:
        where = f"layer `{path}`" if path else "model"
        _check_field(where, tag, layer)
        _check_parameters(where, tag, layer)
        _check_once(where, layer)
    if not any(is_trainable(tag, layer) for _, tag, layer in layers):
        raise ValueError(
            "The model has no tagged layer with parameters to train, so there is no "
            "curvature to collect. Convert it with `kfac.convert(model)`, or write its "
            "layers with `kfac.Linear`. If its layers are not those of `equinox.nn`, "
            "give an example of what one call of the model gets, without the batch's "
            "axis: `kfac.convert(model, example=x[0])`."
        )


def is_code(node: PyTree) -> bool:
    """Whether something is a function or a class, but no model. (A function that is a
    tree, such as a `jax.tree_util.Partial`, is a model if there are tagged layers in
    it.)"""
    is_function = callable(node) and not isinstance(node, eqx.Module)
    return isinstance(node, type) or (is_function and not tagged_layers(node))


def check_order(name: str, loss_fn: Any, model: Model, order: str) -> None:
    """Raises if a model was given in the place of the loss function."""
    if is_code(model) and tagged_layers(loss_fn):
        raise TypeError(
            f"`{name}` takes the loss function first and then the model, but got the "
            f"model first. The order is `{order}`."
        )


def _check_field(where: str, tag: Tag, layer: Layer) -> None:
    """Raises if a layer's tag is no part of the layer as a tree."""
    if not any(node is tag for node in jtu.tree_leaves(layer, is_leaf=_is_tag)):
        raise TypeError(
            f"The tag of the {where} is not in its tree (it is static, an attribute of "
            "the class, or made anew whenever it is asked for), so that nothing could "
            "be collected in it. Make it an ordinary field: `tag: kfac.Tag`."
        )


def _check_parameters(where: str, tag: Tag, layer: Layer) -> None:
    """Raises if a parameter that a tag covers is not one that could be trained."""
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
        except ValueError as error:
            # For some forms, either all parameters of a layer are trained, or none is.
            error.add_note(f"This is about the {where}.")
            raise


def _check_once(where: str, layer: Layer) -> None:
    """Raises if a tag of a layer covers a parameter that also a tag of a layer inside of
    it covers."""
    if not _has_layers(layer):
        return
    tags = [layer.tag] if isinstance(layer.tag, Tag) else layer.tag.values()
    parameters = [p for tag in tags for p in tag.form.parameters(layer)]
    covered = {id(p) for p in parameters if p is not None}
    for path, tag, inner in tagged_layers(_untagged(layer)):
        if any(id(p) in covered for p in tag.form.parameters(inner)):
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
    """The error of a tagged layer that was misused. It carries the layer, so that the
    layer's path can be named."""

    def __init__(self, layer: Layer, message: str):
        super().__init__(message)
        self.layer = layer


@contextlib.contextmanager
def naming_layers(model: Model):
    """Adds to any `LayerError` where in `model` the layer is. (A layer does not know its
    path, so that all layers with the same structure are named.)"""
    try:
        yield
    except LayerError as error:
        structure = jtu.tree_structure(empty_tags(error.layer))
        paths = {  # In their order, and each once, even if a layer has several tags.
            path: None
            for path, _, layer in tagged_layers(model)
            if jtu.tree_structure(empty_tags(layer)) == structure
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
    """The model with its tags ready to collect. `curvature` is what is known of the
    curvature so far: some blocks take their statistics in its bases."""

    def fill(tag, layer, factors):
        return tag.fill(layer, weights, factors)

    return with_tags(fill, model, blank(model) if curvature is None else curvature)


def fill_rows(model: Model, slots: Model) -> Model:
    """The model with those of its tags ready to hand out rows for which there are
    `slots`."""

    def fill(tag, layer, slots_of_tag):
        return tag if slots_of_tag is None else tag.fill_rows(layer, slots_of_tag)

    return with_tags(fill, model, slots)


def empty_tags(model: Model) -> Model:
    """The model (or a tree of gradients of it) without its tags' slots."""
    return with_tags(lambda tag, _: tag.empty(), model)


def only_rows(model: Model) -> Model:
    """The model with nothing in its tags but the slots for rows that they have."""
    return with_tags(lambda tag, _: tag.only_rows(), model)


def with_tags(fn: Callable, model: Model, *rest: Model) -> Model:
    """The model with `fn(tag, layer, *rest)` in the place of each of its tags."""

    def apply(node, *nodes):
        if not is_tagged(node):
            return node
        nested = _has_layers(node)
        tag = jtu.tree_map(
            lambda tag, *rest_of_tag: fn(tag, node, *rest_of_tag),
            node.tag,
            *_of_tags(nodes, nested),
            is_leaf=_is_tag,
        )
        within = with_tags(fn, *map(_untagged, (node, *nodes))) if nested else node
        return replaced(within, "tag", tag)

    return jtu.tree_map(apply, model, *rest, is_leaf=is_tagged)


def _is_tag(node: PyTree) -> bool:
    return isinstance(node, Tag)
