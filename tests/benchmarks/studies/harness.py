"""What all studies have in common: their options, how seeds are spoken of, pictures."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
        number = getattr(options, name)
        if number is not None and number < 1:
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


#
# Grids of learning rates
#


class Run(NamedTuple):
    """One run, looked at from time to time."""

    seed: int
    model: Any
    steps: list[int]
    losses: list[float]
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1] if np.isfinite(self.losses[-1]) else np.inf

    def reached(self, target: float) -> tuple[int, float] | None:
        """Steps and seconds at the first look at or below `target`."""
        for step, seconds, loss in zip(self.steps, self.seconds, self.losses):
            if loss <= target:
                return step, seconds
        return None


class Result(NamedTuple):
    """One optimizer with one learning rate, a run from every seed."""

    name: str
    rate: float | None
    runs: list[Run]
    compile_seconds: float

    @property
    def median(self) -> Run:
        return sorted(self.runs, key=lambda run: run.final_loss)[len(self.runs) // 2]


def named(result: Result) -> str:
    rate = "" if result.rate is None else f", learning rate {result.rate:g}"
    return f"{result.name}{rate}"


def verdict(results: list[Result], loss: str, digits: str) -> str:
    """Who has the lowest `loss` at the end, and all losses with such `digits`."""
    ranked = sorted(results, key=lambda result: result.median.final_loss)
    first, *others = [f"{r.name} ({r.median.losses[-1]:{digits}})" for r in ranked]
    number = len(ranked[0].runs)
    wins = sum(
        min(runs, key=lambda run: run.final_loss) is runs[0]
        for runs in zip(*(result.runs for result in ranked))
    )
    seeds = over_seeds(number, wins)
    return (
        f"After {ranked[0].median.steps[-1]} steps {first} has the lowest {loss}, "
        f"before {' and '.join(others)}: {seeds}."
    )


def plot_grids(
    grids: list[list[Result]], colours: dict[str, str], title: str, loss: str
) -> Figure:
    """The median run of the best learning rate is thick; its other seeds are thin, other
    learning rates dotted. Losses against steps and against seconds."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    runs = [run for best, *_ in grids for run in best.runs]
    for axis, against in zip(axes, ("steps", "seconds")):
        for best, *others in grids:
            styles = [(best.median, dict(linewidth=2.2, zorder=3, label=named(best)))]
            styles += [(run, dict(linewidth=0.8, alpha=0.6)) for run in best.runs]
            dotted = dict(linewidth=1, alpha=0.5, linestyle=":")
            styles += [(result.median, dotted) for result in others]
            for run, style in styles:
                colour = colours[best.name]
                axis.plot(getattr(run, against), run.losses, color=colour, **style)
        axis.set_yscale("log")
        axis.set_ylim(top=2 * runs[0].losses[0])
        axis.set_xlim(0, 1.03 * max(getattr(run, against)[-1] for run in runs))
        axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
        without_frame(axis)
    axes[0].set_ylabel(loss)
    axes[0].set_title(title, loc="left", fontweight="bold")
    axes[0].plot([], [], "0.5", linestyle=":", label="other learning rates")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
