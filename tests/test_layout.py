"""The folders of the library: imports point downwards, as "Contributing" draws them."""

import ast
import pathlib
import re

import pytest

from .mutants import line_of, MUTANTS


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "eqx_kfac"


def drawn() -> list[str]:
    """The folders and files of the drawing, from the top to the bottom."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    drawing = page.split("## How the code is laid out")[1].split("```")[1]
    words = [line.split()[0] for line in drawing.splitlines() if line[:1].strip()]
    return [word.rstrip("/").removesuffix(".py") for word in words]


def imported(path: pathlib.Path) -> set[str]:
    """The folders and files, right below the package, that a file imports from."""
    inside = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == len(inside) + 1:
            found.add((node.module or "").split(".")[0])
    return found - {"", "_custom_types"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_downwards(path):
    if path == PACKAGE / "__init__.py":
        return
    order = drawn()
    own, *_ = path.relative_to(PACKAGE).parts
    own = own.removesuffix(".py")
    if own == "_custom_types":
        assert not imported(path)
        return
    below = order[order.index(own) + 1 :]
    assert imported(path) <= {own, *below}


@pytest.mark.parametrize(
    "wing, other",
    [
        ("_optimizer", "analysis"),
        ("_inverse", "analysis"),
        ("_curvature", "analysis"),
        ("analysis", "_optimizer"),
        ("analysis", "_inverse"),
    ],
)
def test_wings_do_not_know_each_other(wing, other):
    """Neither does a training step import what is for after training, nor the reverse;
    but `debug` may import both."""
    files = lambda folder: (PACKAGE / folder).rglob("*.py")
    assert all(other not in imported(path) for path in files(wing))
    assert (
        any(other in imported(path) for path in files("debug")) or other == "_optimizer"
    )


UNSTABLE = "jax.core", "jax.extend", "jax.interpreters", "jax.experimental", "jax._src"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_one_file_imports_what_is_unstable(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    found = {name for name in modules if name.startswith(UNSTABLE)}
    assert bool(found) == (path == PACKAGE / "_jax.py"), found


def test_everything_is_drawn():
    here = {p.name.removesuffix(".py") for p in PACKAGE.iterdir()}
    assert set(drawn()) == here - {"__init__", "__pycache__", "_custom_types", "py.typed"}


def test_mutants_are_there():
    """What `mutants.py` changes is still there to be changed."""
    assert len({(mutant.path, line_of(mutant)) for mutant in MUTANTS}) > 60


def test_files_and_functions_are_short():
    """Docstrings do not count."""

    def length(node):
        text = ast.get_docstring(node, clean=False)
        own = 0 if text is None else text.count("\n") + 1
        return node.end_lineno - node.lineno + 1 - own

    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert length(node) <= 50, (path, node.name)


def test_no_test_file_imports_another():
    """What several of them need is in files that have no tests."""
    for path in (ROOT / "tests").glob("test_*.py"):
        found = re.search(r"^from (tests|)\.test_", path.read_text(), re.MULTILINE)
        assert found is None, path


PRONOUNS = {"as", "it", "its", "such", "that", "these", "they", "those"}


@pytest.mark.parametrize("folder", ["eqx_kfac", "examples", "tests"])
def test_a_docstring_says_what_it_is_about(folder):
    """No docstring begins with a pronoun: a reader may not have read the name before."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            first = (text or "-").split(maxsplit=1)[0]
            assert first.strip(",:").lower() not in PRONOUNS, (path, text)
