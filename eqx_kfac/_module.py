"""Modules while a step is traced: thousands of times, so that Python's time counts."""

import copy
import operator
from typing import Any, TYPE_CHECKING

import equinox as eqx


class PlainModule(eqx.Module):
    """A module whose methods are Python's own. Equinox makes a tree of every bound method
    that it is asked for, so that it can be passed on as a module can; this takes as long
    as tracing an operation, and these are only called."""

    if not TYPE_CHECKING:
        __getattribute__ = object.__getattribute__


def member(node: Any, name: str) -> Any:
    """What is called `name` in a module, with dots if it is deeper: an attribute, or an
    entry of a list, a tuple or a dictionary (`"layers.0.weight"`).

    **Raises:** `AttributeError` if there is nothing of that name.
    """
    for part in name.split("."):
        if isinstance(node, dict):
            found = [value for key, value in node.items() if str(key) == part]
        elif isinstance(node, (list, tuple)) and part.isdecimal():
            found = node[int(part) :][:1]
        else:
            # A field, even where a property of the same name says something of it.
            fields = vars(node) if isinstance(node, eqx.Module) else {}
            found = [fields[part] if part in fields else getattr(node, part)]
        if not found:
            raise AttributeError(f"There is no `{name}`.")
        node = found[0]
    return node


def replaced(module: Any, name: str, value: Any) -> Any:
    """`module` with what is called `name` (as for `member`) replaced by `value`: as by
    `eqx.tree_at`, which takes a module apart several times."""
    first, _, rest = name.partition(".")
    old = member(module, first)
    value = replaced(old, rest, value) if rest else value
    if isinstance(module, dict):
        new = copy.copy(module)  # Of whatever kind of dictionary.
        new.update({k: value for k in module if str(k) == first})
        return new
    if isinstance(module, (list, tuple)) and first.isdecimal():
        items = list(module)
        items[int(first)] = value
        return type(module)(*items) if hasattr(module, "_fields") else type(module)(items)
    fields = vars(module) if isinstance(module, eqx.Module) else {}
    if first not in fields:  # Of a named tuple, or a property.
        is_leaf = lambda node: node is None or node is old
        return eqx.tree_at(operator.attrgetter(first), module, value, is_leaf=is_leaf)
    new = object.__new__(type(module))
    vars(new).update({**fields, first: value})
    return new
