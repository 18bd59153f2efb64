"""What all studies have in common: their options, how seeds are spoken of, pictures."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def make_parser(description: str, name: str, seeds: int = 1) -> argparse.ArgumentParser:
    """A parser with the options that all of them have."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of everything that is random, the first")
    add("--seeds", type=int, default=seeds, help="how many")
    add("--out", type=Path, default=Path(f"runs/{name}.png"), help="picture")
    add("--toy", action="store_true", help="small and quick, unless options say else")
    return parser


def parsed(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    counts: Sequence[str],
    toy: dict[str, Any],
) -> argparse.Namespace:
    """The options, of which `counts` have to be at least 1. `toy`: the defaults of a toy
    run; what is said counts all the same."""
    if parser.parse_known_args(argv)[0].toy:
        parser.set_defaults(**toy)
    options = parser.parse_args(argv)
    for name in counts:
        if (getattr(options, name) or 1) < 1 or getattr(options, name) == 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def over_seeds(number: int, wins: int, how: str = "medians", best: str = "lowest") -> str:
    """How many seeds there were, and with how many of them the best one was the best."""
    return (
        "one seed"
        if number == 1
        else f"{how} of {number} seeds, the {best} with {wins} of them"
    )


def without_frame(axis: Any) -> None:
    axis.grid(True, color="0.92")
    axis.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
