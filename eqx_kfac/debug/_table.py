import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._block import Expand, Kronecker
from .._misc import names


class Measured(NamedTuple):
    """A number, and its standard error."""

    value: float
    noise: float


class Extent(NamedTuple):
    """The least of some numbers, and the greatest."""

    least: float
    greatest: float


class Share(NamedTuple):
    """A part of a whole, and whether it is the greatest of several."""

    part: float
    greatest: bool


def row_of(rows: Sequence[Any], path: str) -> Any:
    """The row at `path`, in which brackets may be written as dots: `.att.qkv` for
    `.att['qkv']`.

    **Raises:** `KeyError` that names the paths there are."""
    plain = lambda p: re.sub(r"\['?([^\]']*)'?\]", r".\1", p)
    by_path = {plain(row.path): row for row in rows}
    if plain(path) not in by_path:
        there = names([row.path for row in rows])
        raise KeyError(f"No layer has the path `{path}`. There are: {there}.")
    return by_path[plain(path)]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, aligned: words to the left, numbers to the right."""
    cells = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = _numeric(header, rows)

    def line(row):
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(map(line, [cells[0], rule, *cells[1:]]))


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], *below: str) -> str:
    """The table for a notebook, and what is to be said below it."""
    sides = ["right" if to_right else "left" for to_right in _numeric(header, rows)]

    def line(kind, row):
        cells = [
            f'<{kind} style="text-align: {side}">{html.escape(_shown(cell))}</{kind}>'
            for cell, side in zip(row, sides, strict=True)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line("th", header), *(line("td", row) for row in rows)]
    paragraphs = [f"<p>{html.escape(text)}</p>" for text in below]
    return "\n".join(["<table>", *lines, "</table>", *paragraphs])


def _numeric(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Whether each column has numbers only."""
    numeric = int, float, Measured, Extent, Share
    return [
        all(isinstance(row[i], numeric) or row[i] == "" for row in rows)
        for i in range(len(header))
    ]


def _shown(cell: Any) -> str:
    if isinstance(cell, Measured):
        return f"{cell.value:.3g} ± {cell.noise:.1g}"
    if isinstance(cell, Extent):
        ends = [f"{end:.3g}" for end in cell]
        return "…".join(ends if ends[0] != ends[1] else ends[:1])
    if isinstance(cell, Share):
        return f"{100 * cell.part:.0f}%{' <' if cell.greatest else '  '}"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def sizes_shown(stack: Sequence[int], d_out: int, d_in: int, bias: bool) -> str:
    """`4 x [10, 64+1]`: stacked layers, outputs, inputs, the bias column."""
    columns = "+".join([str(d_in)] * (d_in > 0) + ["1"] * bias)
    return "".join(f"{n} x " for n in stack) + f"[{d_out}, {columns}]"


def block_shown(block: Any, sizes: Any, joint: bool = True) -> str:
    """`Kronecker(Expand)`, and of which sides only the diagonal is kept. `joint`: whether
    positions are, or may be, taken jointly."""
    sharing = getattr(block, "sharing", None)
    if sharing is not None and sharing.joint and not joint:
        sharing = Expand()
    shown = "" if sharing is None else f"({type(sharing).__name__})"
    kronecker = getattr(block, "kronecker", block)
    if isinstance(kronecker, Kronecker):
        sides = zip(kronecker.diagonal_sides(sizes), ("inputs", "outputs"), strict=True)
        diagonal = [side for is_diagonal, side in sides if is_diagonal]
        shown += f", {' and '.join(diagonal)} diagonal" * bool(diagonal)
    return type(block).__name__ + shown
