"""A race on the deep autoencoder: who reaches a cross-entropy of 54 first, in steps and
in seconds?

    python tests/benchmarks/autoencoder.py --data path/to/mnist --out runs/race

Adam and SGD choose learning rate and batch from a grid: their best run counts, best in
seconds for the one figure, best in steps for the other. kfac-jax takes part if it can be
imported. Every run starts from the same initialisation, on the same machine; the clock
counts steps only, compiling is reported apart. Results are written after every run, and
runs whose result is there already are not repeated, so that a race can be interrupted.
"""

import argparse
import importlib.util
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from problems import study

import eqx_kfac as kfac


ae = study("autoencoder")
TARGET = 54.0
# Fixed before the first race: our figures over theirs, at most.
TARGETS = {
    ("Adam", "seconds"): 1 / 3,
    ("Adam", "steps"): 1 / 10,
    ("kfac-jax", "seconds"): 1 / 4,
    ("SGD with momentum", "steps"): 1 / 14,
}


COLOURS = ae.COLOURS | {
    "KFAC()": ae.COLOURS["K-FAC"],
    "KFAC.full_batch()": "#6a4c93",
    "kfac-jax": "#00798c",
}


class Entry(NamedTuple):
    competitor: str
    setting: str
    make: Callable[[], Any]
    look_every: int = 5


def entries() -> list[Entry]:
    untuned = [
        Entry("KFAC()", f"batch {batch}", lambda b=batch: ae.untuned(b), 10)
        for batch in (250, 500, 1000)
    ]
    ours = [
        *untuned,
        Entry("KFAC.full_batch()", "batch 1000", ae.full_batch),
        Entry("K-FAC, adaptive", "batch 1000", ae.adaptive),
        Entry("K-FAC, adaptive", "batch 500", lambda: ae.adaptive(500)),
        Entry("K-FAC, fixed", "batch 1000", ae.fixed),
    ]
    adams = [
        Entry(
            "Adam",
            f"rate {rate:g}, batch {batch}",
            lambda r=rate, b=batch: ae.adam(r, b),
            25,
        )
        for batch in (125, 250, 500, 1000)
        for rate in (5e-4, 1e-3, 2e-3)
    ]
    sgds = [
        Entry(
            "SGD with momentum",
            f"rate {rate:g}, batch {batch}",
            lambda r=rate, b=batch: ae.sgd(r, b),
            25,
        )
        for batch in (250, 500)
        for rate in (3e-3, 1e-2)
    ]
    peers = []
    if importlib.util.find_spec("kfac_jax") is not None:
        import peer

        peers = [
            Entry(
                "kfac-jax",
                f"batch {batch}, first damping {damping:g}",
                lambda b=batch, d=damping: peer.adaptive(ae, b, initial_damping=d),
            )
            for batch, damping in [(500, 0.3), (500, 1), (1000, 1), (500, 150)]
        ]
    return [*ours, *peers, *adams, *sgds]


def run(entry: Entry, x: Any, stop: Any, seed: int) -> dict[str, Any]:
    model = kfac.convert(ae.network((1000, 500, 250, 30), jax.random.key(seed)))
    curve = ae.train(entry.make(), model, x, stop, seed, look_every=entry.look_every)
    reached = curve.reached(TARGET)
    return dict(
        competitor=entry.competitor,
        setting=entry.setting,
        seed=seed,
        steps_to_target=reached and reached[0],
        seconds_to_target=reached and reached[1],
        steps=curve.steps[-1],
        seconds=curve.seconds[-1],
        loss=curve.losses[-1],
        seconds_per_step=curve.seconds[-1] / curve.steps[-1],
        compile_seconds=curve.compile_seconds,
        curve=curve._asdict(),
    )


def best(results: list[dict], competitor: str, figure: str) -> float | None:
    found = [r[f"{figure}_to_target"] for r in results if r["competitor"] == competitor]
    found = [f for f in found if f is not None]
    return min(found) if found else None


def markdown(results: list[dict]) -> str:
    lines = [
        f"{platform.processor() or platform.machine()}, {jax.default_backend()}, "
        f"Python {platform.python_version()}, JAX {jax.__version__}, "
        f"eqx-kfac {kfac.__version__}",
        "",
        f"| method | setting | steps to {TARGET:g} | seconds to {TARGET:g} | s/step "
        "| compile s | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        steps, seconds = r["steps_to_target"], r["seconds_to_target"]
        lines.append(
            f"| {r['competitor']} | {r['setting']} | {steps or '-'} "
            f"| {'-' if seconds is None else f'{seconds:.1f}'} "
            f"| {r['seconds_per_step']:.3f} | {r['compile_seconds']:.1f} "
            f"| {r['loss']:.2f} |"
        )
    lines += ["", "| ours / theirs | measured | target | reached |", "|---|---|---|---|"]
    for (competitor, figure), most in TARGETS.items():
        theirs = best(results, competitor, figure)
        lost = [r for r in results if r["competitor"] == competitor]
        bound = ""
        if theirs is None and lost:  # It never got there: a bound from below.
            theirs, bound = max(r[figure] for r in lost), "< "
        for name in ("KFAC()", "K-FAC, adaptive"):
            ours = best(results, name, figure)
            if ours is None or theirs is None:
                continue
            lines.append(
                f"| {name} / {competitor}, {figure} | {bound}{ours / theirs:.3f} "
                f"| {most:.3f} | {'yes' if ours / theirs <= most else 'no'} |"
            )
    return "\n".join(lines) + "\n"


def draw(results: list[dict], path: Path) -> None:
    """The quickest run of every competitor; if none got there, the lowest."""
    chosen = {}
    for r in sorted(
        results, key=lambda r: (r["seconds_to_target"] or float("inf"), r["loss"])
    ):
        chosen.setdefault(r["competitor"], r)
    curves = {
        f"{name}, {r['setting']}": [ae.Curve(**r["curve"])] for name, r in chosen.items()
    }
    ae.plot(curves, [COLOURS[name] for name in chosen], TARGET, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with MNIST")
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--seconds", type=float, default=150, help="of steps, per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="what has this in its name and setting"
    )
    arguments = parser.parse_args()
    x = ae.load(arguments.data)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "autoencoder.json"
    results = json.loads(path.read_text()) if path.exists() else []
    done = {(r["competitor"], r["setting"], r["seed"]) for r in results}
    stop = ae.Stop(TARGET, arguments.seconds, 1_000_000)
    for entry in entries():
        if arguments.only not in f"{entry.competitor}, {entry.setting}":
            continue
        if (entry.competitor, entry.setting, arguments.seed) in done:
            continue
        results.append(run(entry, x, stop, arguments.seed))
        path.write_text(json.dumps(results))
        path.with_suffix(".md").write_text(markdown(results))
        draw(results, path.with_suffix(".png"))
    print(markdown(results))


if __name__ == "__main__":
    main()
