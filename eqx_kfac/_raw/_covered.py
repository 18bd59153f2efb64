"""What is said of parameters that no tag covers: where they are, and what helps there."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._custom_types import Model
from .._misc import names
from .._tag import check_tagged, is_tagged, partition_tagged
from ..nn._convert import has_own_tag


def check_covered(model: Model, fallback: object) -> None:
    """Raises if there are parameters that neither a tag nor a fallback looks after."""
    check_followed(model)
    check_tagged(model)
    _, rest = partition_tagged(model)
    leaves, _ = jtu.tree_flatten_with_path(rest)
    if not leaves or fallback is not None:
        return
    is_complex = [jnp.iscomplexobj(leaf) for _, leaf in leaves]
    paths = [path for path, _ in leaves]
    numbers = [p for p, c in zip(paths, is_complex, strict=True) if c]
    if numbers:
        shown = names(list(map(jtu.keystr, numbers)))
        way = _way_to_convert(model, numbers)
        raise ValueError(
            f"The parameters {shown} are complex numbers, of which curvature is "
            f"collected as of pairs of real ones. Either {way}, which holds their real "
            "and imaginary parts in two arrays; or do so yourself; or freeze them "
            "(`eqx.partition` them out of the model that is trained); or pass "
            "`fallback=` with any optax transformation for them, such as "
            "`fallback=optax.adam(1e-3)`."
        )
    raise ValueError(
        f"No tagged layer covers the parameters {names(list(map(jtu.keystr, paths)))}. "
        f"Either {_way_to_convert(model, paths)}, or write their layers with "
        "`kfac.Linear` and the like (a raw array as a `kfac.Parameter`), or freeze them "
        "(`eqx.partition` them out of the model that is trained), or pass `fallback=` "
        "with any optax transformation for them, such as `fallback=optax.adam(1e-3)`. "
        "Constants, and arrays in a `jax.lax.stop_gradient`, stay as they are with "
        "`fallback=optax.set_to_zero()`."
    )


def check_followed(model: Model) -> None:
    """Raises if there are arrays to train in a model, but none in a module."""
    leaves, _ = jtu.tree_flatten_with_path(eqx.filter(model, eqx.is_inexact_array))
    paths = [path for path, _ in leaves]
    if paths and all(map(_Place(model).is_outside, paths)):
        raise ValueError(
            f"The model, a {type(model).__name__}, has no layer, but arrays that are in "
            f"no module: {names(list(map(jtu.keystr, paths)))}. {_OUTSIDE} Or make each "
            "a `kfac.Parameter`."
        )


_OUTSIDE = (
    "`kfac.convert` follows the arrays of modules, through what their methods do with "
    "them. Make such arrays fields of an `eqx.Module` (lists, tuples and dictionaries of "
    "arrays may be in its fields), use them in its methods, and convert that: "
    "`kfac.convert(model, example=x[0])`."
)


def _way_to_convert(model: Model, paths: Sequence[tuple]) -> str:
    """What has to be done so that tags follow these arrays."""
    place = _Place(model)
    outside = [p for p in paths if place.is_outside(p)]
    beside = [p for p in paths if p not in outside and place.is_beside_a_tag(p)]
    shown = lambda paths: names(list(map(jtu.keystr, paths)))
    ways = []
    if len(outside) + len(beside) < len(paths):
        ways.append(
            "convert the model with what one call of it gets (`kfac.convert(model, "
            "example=x[0])`)"
        )
    if outside:
        ways.append(
            f"hold {shown(outside)} in fields of an `eqx.Module` (as arrays, or in "
            "lists, tuples and dictionaries), whose methods use them, and convert the "
            "model with an example, as `kfac.convert` follows the arrays of modules only"
        )
    if beside:
        ways.append(
            f"give {shown(beside)} tags, too (`tag: dict[str, kfac.Tag]`), as their "
            "module, or one around it, has a tag of its own, and `kfac.convert` leaves "
            "it, and all that is within, as it is"
        )
    return "; and ".join(ways)


class _Place:
    """Where in a model something is, by its path."""

    def __init__(self, model: Model):
        self.model = model

    def is_outside(self, path: tuple) -> bool:
        """Whether it is in no module; or deeper in one than `kfac.convert` follows it."""
        nodes = self._nodes(path)
        modules = [i for i, node in enumerate(nodes) if isinstance(node, eqx.Module)]
        if not modules:
            return True
        keys = [key_name(key) for key in path[modules[-1] :]]
        return not all(name and "." not in name for name in keys)

    def is_beside_a_tag(self, path: tuple) -> bool:
        """Whether a module that it is in has a tag which its class was written with."""
        return any(is_tagged(node) and has_own_tag(node) for node in self._nodes(path))

    def _nodes(self, path: tuple) -> list[Any]:
        """Everything that it is in, from the model on."""
        nodes = [self.model]
        for key in path[:-1]:
            node = nodes[-1]
            is_below = lambda n, node=node: n is not node
            children, _ = jtu.tree_flatten_with_path(node, is_leaf=is_below)
            nodes.append(dict(children)[(key,)])
        return nodes


def key_name(key: Any) -> str:
    """An entry of a path, as in the name of an array; empty if it cannot be one."""
    match key:
        case (
            jtu.SequenceKey(idx=name) | jtu.DictKey(key=name) | jtu.GetAttrKey(name=name)
        ):
            return str(name)
    return ""
