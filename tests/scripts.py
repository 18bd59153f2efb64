"""What tests of scripts, pages and packages need: where they are, a shell like a user's,
what a script prints and draws."""

import os
import re
import subprocess
import sys
from pathlib import Path


root = Path(__file__).parent.parent
NUMBER = r"\d+\.?\d*(?:e[+-]\d+)?"


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """`(line of the fence, source)` of every fenced block of a language."""
    text = page.read_text()
    fenced = rf"^```{language}\n(.*?)^```$"
    found = re.finditer(fenced, text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start()].count("\n") + 1, m.group(1)) for m in found]


def plain_environment() -> dict[str, str]:
    """A user's shell, with float32 and one device; but compiled as the tests are."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    flags = [f for f in env["XLA_FLAGS"].split() if "device_count" not in f]
    return {**env, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def run(script: Path, *arguments: str, cache: Path | None = None) -> str:
    """What a script prints, without a warning; `cache`: a folder for what is compiled."""
    kept = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept |= {} if cache is None else {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        capture_output=True,
        text=True,
        env=plain_environment() | kept,
    )
    assert done.returncode == 0, done.stderr
    bar = re.search(r"\d\d:\d\d[<,]", done.stderr)
    assert bar is None  # There is no terminal.
    return done.stdout


def check_picture(printed: str, path: Path) -> None:
    """The last line says where it is."""
    assert printed.splitlines()[-1] == f"Picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
