"""README and documentation do what they say: their commands name what exists, their
Python runs, and the API pages have everything that is public."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eqx_kfac as kfac
from docs.hooks import notebook

from .scripts import blocks, plain_environment, root


readme = root / "README.md"
pages = sorted((root / "docs").rglob("*.md"))
# Those of a row share an interpreter, but nothing else.
with_python = [
    ["index.md", "choosing.md", "idea.md", "api/curvature.md", "api/losses.md"],
    ["losses.md", "devices.md", "api/extending.md", "api/operators.md", "api/tools.md"],
    ["factors.md", "policies.md", "api/analysis.md"],
    ["tutorials/start.md", "tutorials/pinn.md"],
    ["tutorials/own.md", "tutorials/models.md"],
    ["tutorials/transformer.md", "tutorials/posterior.md"],
    ["coming.md"],
]

# One namespace for a page, in order; line numbers are those of the page.
run_blocks = """
import gc, json, sys

gc.set_threshold(50_000, 20, 100)  # As in `conftest.py`.
for page, blocks in json.load(sys.stdin):
    namespace = {"__name__": "__main__"}
    for line, source in blocks:
        exec(compile("\\n" * line + source, page, "exec"), namespace)
"""


def run_python(*pages: Path) -> str:
    """Runs all Python of the pages; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run_blocks],
        input=json.dumps([(str(page), blocks(page, "python")) for page in pages]),
        capture_output=True,
        text=True,
        cwd=root,
        env=plain_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_runs():
    """What README shows of a state is what its code prints."""
    assert len(blocks(readme, "python")) == 3
    printed = run_python(readme)
    ((_, shown),) = blocks(readme, "text")
    names = [line.split()[0] for line in shown.splitlines()]
    assert [line.split()[0] for line in printed.splitlines()[: len(names)]] == names
    assert "  step           50\n" in printed and "  step           50\n" in shown
    loss = float(re.findall(r"^  loss +(\S+)$", printed, re.MULTILINE)[0])
    assert 0 < loss < 0.02
    assert "['layers.0,1']" in printed  # Of a model of raw arrays.


def test_the_first_screen():
    """What a visitor decides on: two sentences, the picture, how to install, how to
    train; as many lines as say what is trained."""
    text = readme.read_text()
    parts = ["K-FAC for [Equinox]", "![", "```bash", "```python", "example=x[0]"]
    places = [
        text.index(part) for part in [*parts, "| laplace-torch |", "## Where to go"]
    ]
    assert places == sorted(places)
    assert len(text.splitlines()) < 200
    (_, first), *_ = blocks(readme, "python")
    assert len([line for line in first.splitlines() if line]) <= 24


@pytest.mark.parametrize("names", with_python, ids=lambda names: names[0])
def test_documentation_runs(names):
    run_python(*[root / "docs" / name for name in names])


@pytest.mark.parametrize("page", sorted((root / "docs/tutorials").glob("*.md")))
def test_notebooks_are_the_pages(page):
    """All code of a tutorial, in its order, and all text; the site links to it."""
    found = json.loads(notebook(page.read_text()))
    code = [c["source"] for c in found["cells"] if c["cell_type"] == "code"]
    assert code == [source.strip() for _, source in blocks(page, "python")]
    text = [c["source"] for c in found["cells"] if c["cell_type"] == "markdown"]
    assert text[0].startswith("# ") and "```python" not in "".join(text)
    assert len({c["id"] for c in found["cells"]}) == len(found["cells"])
    assert f"({page.stem}.ipynb)" in page.read_text()


def test_no_other_page_has_python():
    found = {page for page in pages if blocks(page, "python")}
    assert found == {root / "docs" / name for names in with_python for name in names}


def test_commands_come_first():
    commands = [source for _, source in blocks(readme, "bash")]
    text = readme.read_text()
    assert len(commands) == 2
    assert text.index("```bash") < text.index("\n## ")
    for command, extra in zip(commands, ("examples", "tests")):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")
        assert f".[{extra}]" in command
        assert command.count("\n") == 1
    assert commands[0].endswith(".venv/bin/python examples/race.py\n")
    assert commands[1].endswith(".venv/bin/python -m pytest\n")


@pytest.mark.parametrize("page", [readme, *pages], ids=lambda page: page.name)
def test_links_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        found = (page.parent / path).exists()
        assert found or page.stem == path.removesuffix(".ipynb"), path  # Made of it.


@pytest.mark.parametrize("page", pages, ids=lambda page: page.name)
def test_no_line_of_a_formula_begins_a_list(page):
    """Markdown would end the formula there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    formulas = re.findall(r"\$[^$]+\$", text)
    assert not [f for f in formulas if re.search(r"\n\s*[-+*] ", f)]


def test_api_pages_have_everything_public():
    public = {
        f"eqx_kfac.{name}"
        for name, value in vars(kfac).items()
        if not name.startswith("_") and not isinstance(value, type(kfac))
    }
    for module in (kfac.form, kfac.plot):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    text = "\n".join(page.read_text() for page in pages)
    documented = re.findall(
        r"^::: (eqx_kfac\.(?:(?:form|plot)\.)?\w+)$", text, re.MULTILINE
    )
    assert sorted(documented) == sorted(public)


def test_listed_members_are_shown():
    """Members that a class inherits are left out unless the page asks for them."""
    entry = r"^::: eqx_kfac\.(\w+)\n    options:\n((?:        .*\n)+)"
    for page in pages:
        for name, options in re.findall(entry, page.read_text(), re.MULTILINE):
            own = vars(getattr(kfac, name))
            own = {*own, *own.get("__annotations__", ())}
            lists = re.findall(r" members: \[(.*)\]", options)
            inherited = {name for names in lists for name in names.split(", ")} - own
            assert not inherited or "inherited_members: true" in options, (
                name,
                inherited,
            )


def test_citations_of_the_api_are_public():
    for page in pages:
        for name in re.findall(r"\[`eqx_kfac\.(\w+)`\]\[\]", page.read_text()):
            assert hasattr(kfac, name), (page.name, name)
