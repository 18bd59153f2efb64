"""What MkDocs calls while it builds the site: notebooks of the tutorials, and the version
at the foot of every page."""

import json
import re
from pathlib import Path


def notebook(page: str) -> str:
    """The notebook of a page in Markdown, whose Python blocks become its code."""
    parts = re.split(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    cells = [
        _cell("code" if i % 2 else "markdown", part.strip(), i)
        for i, part in enumerate(parts)
        if part.strip()
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}}
    return json.dumps({**whole, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def _cell(kind: str, text: str, number: int) -> dict:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}
    return cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def on_config(config):
    """Called by MkDocs before it begins."""
    package = Path(config.config_file_path).parent / "eqx_kfac" / "__init__.py"
    version = re.search(r'^__version__ = "(.*)"$', package.read_text(), re.MULTILINE)
    config.copyright = f"eqx-kfac {version.group(1)}, Apache-2.0"
    return config


def on_files(files, config):
    """Called by MkDocs: adds `tutorials/name.ipynb` for every `tutorials/name.md`."""
    from mkdocs.structure.files import File

    for page in sorted(Path(config.docs_dir, "tutorials").glob("*.md")):
        path = f"tutorials/{page.stem}.ipynb"
        files.append(File.generated(config, path, content=notebook(page.read_text())))
    return files
