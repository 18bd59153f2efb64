"""Modules while a step is traced: thousands of times, so that Python's time counts."""

import operator
from typing import Any, TYPE_CHECKING

import equinox as eqx


class PlainModule(eqx.Module):
    """A module whose methods are Python's own. Equinox makes a tree of every bound method
    that it is asked for, so that it can be passed on as a module can; this takes as long
    as tracing an operation, and these are only called."""

    if not TYPE_CHECKING:
        __getattribute__ = object.__getattribute__


def replaced(module: Any, name: str, value: Any) -> Any:
    """`module` with what is called `name` (with dots, if it is deeper) replaced by
    `value`: as by `eqx.tree_at`, which takes a module apart several times."""
    first, _, rest = name.partition(".")
    fields = vars(module) if isinstance(module, eqx.Module) else {}
    if first not in fields:  # Of a named tuple, or a property.
        old = operator.attrgetter(name)(module)
        is_leaf = lambda node: node is None or node is old
        return eqx.tree_at(operator.attrgetter(name), module, value, is_leaf=is_leaf)
    new = object.__new__(type(module))
    value = replaced(fields[first], rest, value) if rest else value
    vars(new).update({**fields, first: value})
    return new
