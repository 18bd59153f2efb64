"""Equal layers of a deep model, in one row."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable, TypeVar


@runtime_checkable
class Line(Protocol):
    """What is said of one layer, or of one stack of layers."""

    @property
    def path(self) -> str: ...

    @property
    def kind(self) -> tuple:
        """What layers have in common that are equal."""
        ...


# Splits a path into text and indices by turns: `.blocks[3].w`, and, of arrays that are
# tagged by themselves, `['blocks.3.w']`.
_INDEX = re.compile(r"(?<=[\[.])(\d+)(?=[\].'])")

_Line = TypeVar("_Line", bound=Line)


class Fold(NamedTuple):
    """Layers of the same kind whose paths differ in indices alone, and the path of all:
    `.blocks[0…11].query_proj`."""

    path: str
    lines: tuple


def fold(lines: Sequence[Line]) -> list[Fold]:
    """Equal layers together, each group where its first layer was."""
    groups = [(_INDEX.split(line.path), (line,)) for line in lines]
    deepest = max((len(parts) for parts, _ in groups), default=0)
    for place in range(1, deepest, 2):
        found: dict[tuple, list] = {}
        for parts, of_group in groups:
            others = tuple(parts[:place]), tuple(parts[place + 1 :])
            same = (len(parts), *others, of_group[0].kind)
            found.setdefault(same, []).append((parts, of_group))
        groups = [_merged(alike, place) for alike in found.values()]
    return [Fold("".join(parts), of_group) for parts, of_group in groups]


def _merged(alike: list, place: int) -> tuple[list[str], tuple]:
    """Groups whose paths differ at one place."""
    parts, of_group = alike[0]
    if len(alike) == 1:
        return parts, of_group
    text = indices_shown([int(parts[place]) for parts, _ in alike])
    lines = sum((of_group for _, of_group in alike), ())
    return [*parts[:place], text, *parts[place + 1 :]], lines


def indices_shown(indices: list[int]) -> str:
    """`0…11`; `0,2…10` for every other one; and whatever else, run by run."""
    steps = {b - a for a, b in zip(indices, indices[1:])}
    if len(indices) > 3 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]},{indices[1]}…{indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(
        f"{run[0]}…{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )
