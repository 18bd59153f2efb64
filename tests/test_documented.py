"""Whatever is public says what it is: docstrings, every field, every argument."""

import inspect

import equinox as eqx
import pytest

import eqx_kfac
from eqx_kfac import analysis, debug, factors, form, nn, operators, plot


def ours(value):
    return getattr(value, "__module__", "").startswith("eqx_kfac")


found = {
    value
    for module in (eqx_kfac, analysis, factors, operators, nn, form, debug, plot)
    for name, value in vars(module).items()
    if not name.startswith("_") and callable(value) and ours(value)
}
PUBLIC = sorted(found, key=lambda value: (value.__module__, value.__qualname__))
CLASSES = list(filter(inspect.isclass, PUBLIC))


def said(*classes):
    """What classes say themselves, of themselves and of their constructors."""
    own = [doc for cls in classes for doc in (cls, vars(cls).get("__init__"))]
    return "".join(getattr(value, "__doc__", None) or "" for value in own)


def unnamed(names, text):
    """What is not named in backticks."""
    return {n for n in names if not n.startswith("_") and f"`{n}`" not in text}


def fields(ancestry):
    return {name for base in ancestry for name in inspect.get_annotations(base)}


def undocumented(cls, ours=ours):
    """The fields that neither a class that declares them names, nor the constructor."""
    ancestry = list(filter(ours, cls.__mro__))

    def text(name):
        declaring = [base for base in ancestry if name in fields([base])]
        return said(*declaring) + (cls.__init__.__doc__ or "")

    return {name for name in fields(ancestry) if unnamed([name], text(name))}


def unexplained(value, ours=ours):
    """The parameters of a function or of a constructor that its docstring, or that of
    a class in its ancestry, does not name."""
    ancestry = filter(ours, inspect.getmro(value)) if inspect.isclass(value) else ()
    text = said(value, *ancestry)
    return unnamed(inspect.signature(value).parameters, text)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_field_is_documented(cls):
    assert undocumented(cls) == set()


@pytest.mark.parametrize("value", PUBLIC, ids=lambda value: value.__qualname__)
def test_every_argument_is_documented(value):
    assert unexplained(value) == set()


def test_what_is_not_documented_is_found():
    class Base(eqx.Module):
        """Has a `first`."""

        first: int

    class Derived(Base):
        """Says nothing of the other two, firsts and `seconds`."""

        second: int
        third: int

        def __init__(self, third, fourth):
            """**Arguments:** `third`."""

        def __call__(self):
            pass

    class Again(Derived):
        """Has the `second` of another class."""

    here = lambda cls: cls in (Base, Derived, Again)
    assert undocumented(Base, here) == unexplained(Base, here) == set()
    assert undocumented(Derived, here) == undocumented(Again, here) == {"second"}
    assert unexplained(Derived, here) == unexplained(Again, here) == {"fourth"}
    assert unexplained(Derived.__init__) == {"self", "fourth"}
    assert list(members(Derived)) == ["__call__"]
    assert not is_documented(Derived, "__call__")


def members(cls):
    """The methods and properties of a class's own."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        is_public = not name.startswith("_") or name == "__call__"
        if is_public and (isinstance(value, property) or inspect.isfunction(function)):
            yield name


def is_documented(cls, name):
    """A method, here or in an ancestor; or it is a field of one."""
    found = any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)
    return found or name in fields(filter(ours, cls.__mro__))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_method_is_documented(cls):
    assert [name for name in members(cls) if not is_documented(cls, name)] == []


@pytest.mark.parametrize("value", PUBLIC, ids=lambda value: value.__qualname__)
def test_everything_is_documented(value):
    written = (value.__doc__ or "").strip()
    assert written and not written.startswith(f"{value.__name__}(")  # As if by itself.
