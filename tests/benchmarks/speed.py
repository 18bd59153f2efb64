"""How long is a step, and of what? Ratios between this library, the gradient alone, the
least that K-FAC's matrix products take, kfac-jax (if it can be imported), and optax.

    python tests/benchmarks/speed.py                     # an hour on two CPU cores
    python tests/benchmarks/speed.py --cases mlp growth  # some of it
    python tests/benchmarks/speed.py --toy               # seconds: does everything run?

All contenders of a case run in turn in one process, with the same batch, hyper-parameters
and periods (curvature at every step, inverses every 5th). The *floor* is the sum of the
matrix products a step must do, each timed alone, in the same rounds: those of the
gradient; one more backward pass and two moments per layer for the statistics; two
products per layer with the inverses; for the adaptive step, two tangents of the network;
and d^3 operations per factor and period to invert it. (Symmetric products count in full,
for there is nothing in XLA that does half of them; the table has both.)
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import clock
import contenders
import floor
import jax
import optax
import problems
import report
from contenders import kind, PERIOD
from problems import Problem

import eqx_kfac as kfac


def tell(text: str) -> None:
    print(f"  {text}", flush=True)


def floors(problem: Problem, rates: floor.Rates) -> dict[str, float]:
    """Seconds by component, inverses spread over the period."""
    seconds = {k: rates.seconds(v) for k, v in floor.products(problem).items()}
    seconds["factorisation"] /= PERIOD
    found = {f"floor: {name}": value for name, value in seconds.items()}
    base = sum(seconds[n] for n in ("gradient", "statistics", "preconditioning"))
    found["floor, no inversion"] = base
    found["floor, fixed"] = base + seconds["factorisation"]
    found["floor, adaptive"] = found["floor, fixed"] + seconds["quadratic model"]
    # What a library with symmetric products could save: half of each moment.
    moments = [p for p in floor.products(problem)["statistics"] if p.m == p.n]
    found["floor, no inversion, symmetric"] = base - rates.seconds(moments) / 2
    return found


def measure(
    problem: Problem,
    seconds: float,
    tiny: bool = False,
    rows: bool = False,
    parts: bool = True,
) -> dict[str, Any]:
    print(f"{problem.name}, batch {problem.examples}", flush=True)
    ours = [
        contenders.ours(f"K-FAC, {kind(a)}", problem, contenders.optimizer(a))
        for a in (False, True)
    ]
    ours += [
        contenders.ours(
            f"K-FAC, {kind(a)}, in turn", problem, contenders.optimizer(a, in_turn=True)
        )
        for a in (False, True)
    ]
    fixed = contenders.optimizer(False)
    ours.append(contenders.ours("K-FAC, fixed, packed", problem, fixed, packed=True))
    if rows:
        ours += [
            contenders.ours(
                f"K-FAC, {kind(a)}, through rows{', in turn' if in_turn else ''}",
                problem,
                contenders.optimizer(a, by_rows=True, in_turn=in_turn),
            )
            for a in (False, True)
            for in_turn in (False, True)
        ]
    if problem.examples >= 500:
        part = problem.examples // 4
        ours += [
            contenders.ours(
                f"K-FAC, {kind(a)}, curvature of a quarter",
                problem,
                contenders.optimizer(a, part),
            )
            for a in (False, True)
        ]
    peers = [contenders.peer(problem, adaptive) for adaptive in (False, True)]
    adam = contenders.from_optax("Adam", lambda: optax.adam(contenders.RATE), problem)
    others = [adam, *contenders.from_contrib(problem)]
    gradient = contenders.gradient(problem)
    all_ = [*ours, *[p for p in peers if p is not None], gradient, *others]
    all_ += (
        contenders.parts(problem) if parts else [contenders.without_inversion(problem)]
    )
    if tiny:
        steps = 20 * PERIOD
        all_ += [contenders.ours_flattened(problem, a) for a in (False, True)]
        for a in (False, True):
            name, chosen = f"K-FAC, {kind(a)}, in scan", contenders.optimizer(a)
            all_.append(contenders.ours(name, problem, chosen, steps=steps))
    some = [p for products in floor.products(problem).values() for p in products]
    rates = floor.Rates(some)
    rates.look()
    results = clock.race(all_, seconds, look=rates.look, tell=tell)
    programs = {c.name: clock.compiled(c) for c in (gradient, *ours[:2])}
    return dict(
        case=problem.name,
        batch=problem.examples,
        parameters=problems.parameters(problem),
        period=PERIOD,
        results={
            name: result._asdict()
            | dict(mean=result.mean, median=result.median, slowest=result.slowest)
            for name, result in results.items()
        },
        programs={name: p._asdict() for name, p in programs.items() if p is not None},
        floors=floors(problem, rates),
        gflops=rates.gflops(some),
    )


def growth(seconds: float, toy: bool) -> list[dict[str, Any]]:
    """How time, compiling and memory grow with one size at a time."""
    axes = dict(
        width=(16, 32) if toy else (64, 128, 256, 512),
        depth=(1, 2) if toy else (2, 4, 8, 16),
        batch=(8, 16) if toy else (125, 500, 2000),
        classes=(4, 8) if toy else (10, 100, 1000),
    )
    usual = (
        dict(width=8, depth=1, batch=8) if toy else dict(width=128, depth=4, batch=500)
    )
    rows = []
    for axis, values in axes.items():
        for value in values:
            problem = problems.mlp(**(usual | {axis: value}))
            print(f"growth: {axis} {value}", flush=True)
            gradient = contenders.gradient(problem)
            step = contenders.ours("K-FAC", problem, contenders.optimizer(False))
            peer = contenders.peer(problem, False)
            racers = [gradient, step] + ([] if peer is None else [peer])
            results = clock.race(racers, seconds, tell=tell)
            program = clock.compiled(step)
            assert program is not None
            other = next((r for n, r in results.items() if "kfac-jax" in n), None)
            rows.append(
                dict(
                    axis=axis,
                    value=value,
                    gradient=results["gradient"].mean,
                    step=results["K-FAC"].mean,
                    peer=None if other is None else other.mean,
                    compile=program.seconds,
                    peer_start=None if other is None else other.start,
                    temp_bytes=program.temp_bytes,
                    state_bytes=results["K-FAC"].state_bytes,
                )
            )
    return rows


CASES = {
    "autoencoder": lambda toy: [
        dict(problem=problems.autoencoder(b, toy)) for b in ((16,) if toy else SIZES)
    ],
    "rows": lambda toy: [
        dict(problem=problems.autoencoder(4 if toy else 128, toy, l2=0), rows=True)
    ],
    "mlp": lambda toy: [
        dict(problem=problems.mlp(8, 8, 1) if toy else problems.mlp(), tiny=True)
    ],
    "stacked": lambda toy: [
        dict(problem=problems.stacked(d, 8, 8) if toy else problems.stacked(d))
        for d in ((2, 3) if toy else (6, 24))
    ],
    "convnet": lambda toy: [dict(problem=problems.convnet(8 if toy else 128, toy))],
    "transformer": lambda toy: [
        dict(problem=problems.transformer(4 if toy else 32, toy))
    ],
}
SIZES = (128, 500, 2000)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*CASES, "growth"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", type=int, nargs="+", help="of the autoencoder")
    parser.add_argument("--seconds", type=float, default=90, help="of steps, per case")
    parser.add_argument("--toy", action="store_true", help="tiny networks, few steps")
    parser.add_argument("--no-parts", action="store_true", help="no breakdown")
    parser.add_argument("--out", type=Path, default=Path("runs/speed"))
    arguments = parser.parse_args()
    toy, seconds = arguments.toy, 0.0 if arguments.toy else arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = dict(
        machine=platform.processor() or platform.machine(),
        backend=jax.default_backend(),
        python=platform.python_version(),
        jax=jax.__version__,
        version=kfac.__version__,
        toy=toy,
        cases=[],
        growth=[],
    )

    def save():
        (arguments.out / "speed.json").write_text(json.dumps(done))
        (arguments.out / "speed.md").write_text(report.markdown(done))

    if not toy:  # What is imported and traced once only shall not count for anybody.
        print("warming up", flush=True)
        measure(problems.mlp(8, 8, 1), 0.0, parts=False)
    for name in arguments.cases:
        if name == "growth":
            done["growth"] = growth(seconds / 10, toy)
            save()
            continue
        for case in CASES[name](toy):
            batches = arguments.batches
            if (
                name == "autoencoder"
                and batches
                and case["problem"].examples not in batches
            ):
                continue
            found = measure(seconds=seconds, parts=not arguments.no_parts, **case)
            done["cases"].append(found)
            save()
    report.draw(done, arguments.out / "speed.png")
    print(report.markdown(done))


if __name__ == "__main__":
    main()
