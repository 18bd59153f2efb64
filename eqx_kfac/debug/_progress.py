"""A bar for what takes seconds, most of them compiling."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(name: str, parts: int) -> Iterator[Callable[[str], None]]:
    """A function to be called with what comes next, before each of so many parts. There
    is a bar if tqdm is installed, and a terminal to draw it in; it goes when all is done.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda what: None
        return
    shape = "{desc} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]"
    begun = []
    with tqdm(total=parts, disable=None, leave=False, bar_format=shape) as bar:

        def begin(what: str) -> None:
            bar.update(len(begun) - bar.n)
            bar.set_description(f"{name}: {what}")
            begun.append(what)

        yield begin
