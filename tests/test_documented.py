"""Whatever is public says what it is: docstrings, and a line for every field."""

import inspect
import re

import equinox as eqx
import pytest

import eqx_kfac
from eqx_kfac import form, plot


def ours(value):
    return getattr(value, "__module__", "").startswith("eqx_kfac")


PUBLIC = {
    value
    for module in (eqx_kfac, form, plot)
    for name, value in vars(module).items()
    if not name.startswith("_") and callable(value) and ours(value)
}
CLASSES = sorted(filter(inspect.isclass, PUBLIC), key=lambda cls: cls.__qualname__)


def own(cls, name):
    """What a class says itself, of itself or of its constructor."""
    return getattr(cls.__dict__.get(name), "__doc__", None) or ""


def fields(ancestry):
    names = {name for base in ancestry for name in inspect.get_annotations(base)}
    return {name for name in names if not name.startswith("_")}


def undocumented(cls, ours=ours):
    """The fields that no class in its ancestry names in backticks."""
    ancestry = list(filter(ours, cls.__mro__))
    text = "".join((base.__doc__ or "") + own(base, "__init__") for base in ancestry)
    return {name for name in fields(ancestry) if not re.search(rf"`{name}\b", text)}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_field_is_documented(cls):
    assert undocumented(cls) == set()


def test_what_is_not_documented_is_found():
    class Base(eqx.Module):
        """Has a `first`."""

        first: int

    class Derived(Base):
        """Says nothing of the other two, firsts and seconds."""

        second: int
        third: int

        def __init__(self, third):
            """**Arguments:** `third`."""

    here = lambda cls: cls in (Base, Derived)
    assert undocumented(Base, here) == set()
    assert undocumented(Derived, here) == {"second"}
    assert undocumented(Derived, lambda cls: cls is Derived) == {"second"}


def members(cls):
    """The methods and properties of a class's own."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, property):
            yield name, function.fget
        elif not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def is_documented(cls, name):
    """A method, here or in an ancestor; or it is a field of one."""
    found = any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)
    return found or name in fields(filter(ours, cls.__mro__))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_method_is_documented(cls):
    assert [name for name, _ in members(cls) if not is_documented(cls, name)] == []


@pytest.mark.parametrize("value", sorted(PUBLIC, key=repr), ids=lambda v: v.__qualname__)
def test_everything_is_documented(value):
    assert (value.__doc__ or "").strip()
