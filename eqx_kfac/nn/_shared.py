import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._block import Kronecker
from .._misc import is_none, names
from .._tag import is_tagged, Tag
from ..form import Dense, Lookup


Path = tuple[Any, ...]


class Tie(NamedTuple):
    """A tagged layer uses the weight of another one."""

    user: Path
    owner: Path
    swapped: bool  # What are inputs to the one are outputs of the other.


class Shared(eqx.nn.Shared):
    """`equinox.nn.Shared`, for layers with tags. A weight that several layers use has one
    block: every use adds its rows to the statistics of the layer that owns it. If the
    uses are opposite (an embedding, and the projection onto its rows), the inputs of one
    use are the outputs of the other.

    [`eqx_kfac.convert`][] creates it.

    **Fields:**

    - `ties`: which tagged layers use whose weight, by their paths.
    """

    ties: tuple[Tie, ...] = eqx.field(static=True)

    def __init__(self, pytree: PyTree, where: Any, get: Any):
        """**Arguments:**

        - `pytree`, `where`, `get`: as for `equinox.nn.Shared`, with tagged layers.

        **Raises:** `ValueError` if a shared array is not the whole weight of two tagged
        layers that are linear, or of layers that are not (so that no use goes unseen), or
        if the layer it belongs to has a bias.
        """
        super().__init__(pytree, where, get)
        self.ties = find_ties(self)
        self.pytree = with_tied_blocks(self.pytree, self.ties)

    def __call__(self) -> PyTree:
        tree = super().__call__()
        for tie in self.ties:
            owner, user = _at(self.pytree, tie.owner).tag, _at(tree, tie.user).tag
            if owner.collecting:
                also = Tag(user.form, owner.block, swapped=tie.swapped).with_slots_of(
                    owner
                )
                where = lambda m, at=tie.user: _at(m, at).tag.owner
                tree = eqx.tree_at(where, tree, also, is_leaf=is_none)
        return tree


def with_tied_blocks(pytree: PyTree, ties: tuple[Tie, ...]) -> PyTree:
    """Tells the owners that their transposed weight is used."""
    for tie in ties:
        if tie.swapped:
            tag = _at(pytree, tie.owner).tag
            if not isinstance(tag.block, Kronecker):
                raise ValueError(
                    f"The layer {names([jtu.keystr(tie.owner)])} shares its weight with "
                    "one that uses the transposed weight, which only the block "
                    "`kfac.Kronecker` can account for."
                )
            block = dataclasses.replace(tag.block, tied=True)
            where = lambda m, at=tie.owner: _at(m, at).tag
            is_tag = lambda node: isinstance(node, Tag)
            pytree = eqx.tree_at(where, pytree, Tag(tag.form, block), is_leaf=is_tag)
    return pytree


def find_ties(shared: eqx.nn.Shared) -> tuple[Tie, ...]:
    """What is shared between which layers: arrays are told apart by what is in them."""
    leaves, treedef = jtu.tree_flatten_with_path(shared.pytree)
    filled, objects, start = [], [], 0
    for _, leaf in leaves:
        if eqx.is_array(leaf):
            number = np.arange(start, start + leaf.size, dtype=np.int64)
            filled.append(number.reshape(leaf.shape))
            start += leaf.size
        else:
            filled.append(leaf)
        objects.append(object())
    paths = {id(o): path for o, (path, _) in zip(objects, leaves)}
    holes = jtu.tree_leaves(shared.where(treedef.unflatten(objects)))
    values = shared.get(treedef.unflatten(filled))
    values = list(values) if isinstance(values, (tuple, list)) else [values]
    ties = []
    for hole, value in zip(holes, values, strict=True):
        if not isinstance(value, np.ndarray) and not eqx.is_array(value):
            continue  # A whole layer: its tag is shared with it.
        ties.append(_tie(shared, paths[id(hole)], value, leaves, filled))
    return tuple(tie for tie in ties if tie is not None)


def _tie(shared: Any, path: Path, value: Any, leaves: Any, filled: Any) -> Tie | None:
    found = [
        (p, transposed)
        for (p, _), leaf in zip(leaves, filled)
        for transposed in (False, True)
        if eqx.is_array_like(leaf)
        and np.array_equal(value, np.transpose(leaf) if transposed else leaf)
    ]
    user = _owner(shared.pytree, path)
    owner = _owner(shared.pytree, found[0][0]) if found else None
    if user is None and owner is None:
        return None  # Neither has a tag.
    shown = names([jtu.keystr(path), *(jtu.keystr(p) for p, _ in found[:1])])
    if user is None or owner is None:
        raise ValueError(
            f"An array is shared ({shown}) by a layer that can be tagged and something "
            "that cannot, of whose use no curvature would be collected. Leave the layer "
            "untagged: `kfac.convert(model, blocks={path: None})`."
        )
    forms = [_at(shared.pytree, at).tag.form for at in (user, owner)]
    if not all(isinstance(form, (Dense, Lookup)) for form in forms):
        raise ValueError(
            f"The weights {shown} are shared by layers that are not both linear layers "
            "or embeddings. Share the layer as a whole, or leave both untagged: "
            "`kfac.convert(model, blocks={path: None})`."
        )
    if getattr(_at(shared.pytree, owner), "bias", None) is not None:
        raise ValueError(
            f"The weights {shown} are shared, but the layer that owns them has a bias "
            "that the other does not share. Build it with `use_bias=False`, or share the "
            "layer as a whole."
        )
    opposite = isinstance(forms[0], Lookup) != isinstance(forms[1], Lookup)
    return Tie(user, owner, swapped=opposite != found[0][1])


def _owner(tree: PyTree, path: Path) -> Path | None:
    """The path of the tagged layer to which a leaf belongs."""
    for end in range(len(path)):
        if is_tagged(_at(tree, path[:end])):
            return path[:end]
    return None


def _at(tree: PyTree, path: Path) -> Any:
    for key in path:
        match key:
            case jtu.GetAttrKey(name=name):
                tree = getattr(tree, name)
            case jtu.SequenceKey(idx=index):
                tree = tree[index]
            case jtu.DictKey(key=name):
                tree = tree[name]
    return tree
