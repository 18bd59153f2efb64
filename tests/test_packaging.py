"""What is published agrees with what is here."""

import re
import tomllib

import pytest

import eqx_kfac

from .scripts import root


def read(path):
    return (root / path).read_text()


def test_one_version():
    version = re.escape(eqx_kfac.__version__)
    assert re.search(rf"^version: {version}$", read("CITATION.cff"), re.MULTILINE)
    first = re.search(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert re.match(rf"{version}\b", first[1])
    assert not re.search(rf'"{version}"', read("pyproject.toml"))


def published(readme):
    """README as an index shows it."""
    project = tomllib.loads(read("pyproject.toml"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for rule in hook["substitutions"]:
        readme = re.sub(rule["pattern"], rule["replacement"], readme)
    return readme


def test_published_readme_has_no_link_to_a_file():
    link = r"\]\((?!https?://)"
    assert re.search(link, read("README.md"))
    page = published(read("README.md"))
    assert not re.search(link, page)
    assert "\nThe documentation is in `docs/`" in page
    assert page.count("```python") == read("README.md").count("```python")


@pytest.mark.parametrize("name", ["tests", "release"])
def test_workflows_call_the_same_script(name):
    workflow = read(f".github/workflows/{name}.yml")
    parts = re.findall(r"run: \.ci/run(.*)", workflow)
    assert parts
    for part in " ".join(parts).split():
        assert f"\n{part}() {{" in read(".ci/run")
