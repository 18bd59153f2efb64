"""Does `kfac.convert(model, example=...)` make models of other people's packages
trainable, in one line? Each of `zoo_models.py` takes the same steps with Adam, at three
learning rates, and with `KFAC()`.

    pip install -e '.[zoo]'
    pip install --no-deps rnn-jax e1jax megalodon-jax    # Whose requirements are not
                                                         # needed, or exclude this JAX.
    python tests/benchmarks/zoo.py --out runs/zoo
    python tests/benchmarks/zoo.py --only flowjax rnn_jax_lstm    # how names begin
    python tests/benchmarks/zoo.py --list
    python tests/benchmarks/zoo.py --toy                  # does everything run?

Each model has a process of its own, and a limit of time: what fails there is in the
table, and the whole error in the file. Models that are in the file are not run again.
`--plain` converts without an example, and leaves everything else to Adam.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import zoo_models
from zoo_models import Entry
from zoo_problems import lines_of, Problem

import eqx_kfac as kfac


RATES = (1e-3, 3e-3, 1e-2)


def batches(problem: Problem, steps: int) -> Iterator[tuple]:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        drawn = rng.choice(len(problem.data[0]), problem.batch, replace=False)
        yield tuple(jnp.asarray(a[drawn]) for a in problem.data)


def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


def walk(problem: Problem, carry: Any, step: Callable, steps: int) -> dict:
    """Losses, and seconds: of the first step, in which it is compiled, and of a later
    one."""
    memory, losses, seconds = problem.memory, [], []
    for i, batch in enumerate(batches(problem, steps)):
        start = time.perf_counter()
        carry, memory, loss = step(batch, carry, memory, jax.random.key(i))
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    later = seconds[len(seconds) // 5 :]
    return dict(
        start=losses[0],
        end=statistics.mean(losses[-5:]),
        losses=losses,
        first=seconds[0],
        step=statistics.median(later),
        mean=statistics.mean(later),
        carry=carry,
    )


def adam(problem: Problem, steps: int) -> dict:
    optimizer = optax.scale_by_adam()

    @eqx.filter_jit
    def jitted(batch, carry, memory, rate):
        model, state = carry

        def objective(model):
            loss, new = problem.loss_fn(model, memory, *batch)
            return loss.value, new

        with_aux = eqx.filter_value_and_grad(objective, has_aux=True)
        (loss, memory_after), grads = with_aux(model)
        updates, state = optimizer.update(grads, state)
        updates = jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates)
        model = problem.after(eqx.apply_updates(model, updates))
        return (model, state), memory_after, loss

    runs = []
    for rate in RATES:
        step = lambda batch, carry, memory, key: jitted(
            batch, carry, memory, jnp.asarray(rate)
        )
        state = optimizer.init(eqx.filter(problem.model, eqx.is_inexact_array))
        runs.append(walk(problem, (problem.model, state), step, steps) | dict(rate=rate))
        del runs[-1]["carry"]
    finite = lambda run: run["end"] if np.isfinite(run["end"]) else np.inf
    best = min(runs, key=finite)
    return best | dict(first=runs[0]["first"], all={r["rate"]: r["end"] for r in runs})


def converted(problem: Problem, plain: bool) -> Any:
    if plain:
        return kfac.convert(problem.model)
    call = dict(example=problem.example, method=problem.method)
    return kfac.convert(problem.model, problem.blocks, **call)


def same(problem: Problem, model: Any) -> dict:
    """Are the outputs those of before, bit for bit, and the leaves?"""
    (batch,) = batches(problem, 1)
    forward = eqx.filter_jit(
        lambda model: problem.loss_fn(model, problem.memory, *batch)[0].value
    )
    outputs = eqx.filter_jit(
        lambda model: jax.tree.leaves(
            [part for part in parts(problem.loss_fn(model, problem.memory, *batch)[0])]
        )
    )
    before, after = outputs(problem.model), outputs(model)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(before, after, strict=True)]
    values = float(forward(problem.model)), float(forward(model))
    arrays = [
        jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (problem.model, model)
    ]
    return dict(
        outputs=all(np.array_equal(a, b, equal_nan=True) for a, b in pairs),
        difference=max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs),
        values=values,
        leaves=len(arrays[0]) == len(arrays[1])
        and all(np.array_equal(a, b) for a, b in zip(*arrays) if not is_key(a)),
    )


def is_key(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def parts(loss: Any) -> list:
    """The outputs of a loss, or of those that it is the sum of."""
    if isinstance(loss, kfac.AbstractLoss):
        return [loss.outputs]
    is_loss = lambda node: isinstance(node, kfac.AbstractLoss)
    leaves = jax.tree.leaves(loss, is_leaf=is_loss)
    return [leaf.outputs for leaf in leaves if is_loss(leaf)]


def second_order(problem: Problem, model: Any, steps: int, fallback: bool) -> dict:
    optimizer = kfac.KFAC(fallback=optax.adam(1e-3) if fallback else None)

    def loss_fn(model, *batch, memory):
        return problem.loss_fn(model, memory, *batch)

    @eqx.filter_jit
    def step(batch, carry, memory, key):
        model, state = carry
        model, state, info = optimizer.step(
            loss_fn, model, state, *batch, key=key, memory=memory
        )
        after = problem.after(model), state
        return after, info.select(info.aux, memory), info.loss

    state = eqx.filter_jit(optimizer.init)(model)
    found = walk(problem, (model, state), step, steps)
    _, state = found.pop("carry")
    faults = {k: int(v) for k, v in state.faults.as_dict().items()}
    return found | dict(
        rejected=int(state.rejected), faults={k: v for k, v in faults.items() if v}
    )


def shares(model: Any) -> dict:
    summary = kfac.summary(model)
    of_layers = sum(layer.parameters for layer in summary.layers)
    kronecker = ("Kronecker", "EKFAC", "TNT", "KroneckerChain", "Chain")
    total = of_layers + sum(int(np.prod(s)) for s in summary.untagged.values())
    in_blocks = sum(
        layer.parameters for layer in summary.layers if layer.block.startswith(kronecker)
    )
    blocks: dict[str, int] = {}
    for layer in summary.layers:
        blocks[layer.block] = blocks.get(layer.block, 0) + layer.parameters
    return dict(
        curvature=of_layers / total,
        kronecker=in_blocks / total,
        blocks=blocks,
        layers=len(summary.layers),
        untagged={path: list(shape) for path, shape in summary.untagged.items()},
    )


def verified(problem: Problem, model: Any) -> dict:
    """The largest share of a layer's gradient that does not pass through its tag; and
    what `verify` says against a layer."""
    two = tuple(jnp.asarray(a[:2]) for a in problem.data)
    loss_fn = lambda model, *batch: problem.loss_fn(model, problem.memory, *batch)[0]
    report = kfac.verify(loss_fn, model, *two)
    worst = max(report.layers, key=lambda check: float(np.max(check.unseen)))
    verdicts = {check.path: check.verdict for check in report.layers}
    alarms = {path: v for path, v in verdicts.items() if v[:1].isupper()}
    return dict(share=float(np.max(worst.unseen)), path=worst.path, alarms=alarms)


class Record:
    """What is known of a model, written after every part; a part that fails leaves its
    error."""

    def __init__(self, path: Path, **known: Any):
        self.path, self.known = path, known

    def part(self, name: str, fn: Callable, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            found = fn(*args)
        except Exception as error:
            found = None
            short = f"{type(error).__name__}: {error}"
            whole = traceback.format_exc()
            errors = self.known.setdefault("errors", {})
            errors[name] = dict(short=short, whole=whole)
            print(f"  {name}: {short[:600]}", flush=True)
        if isinstance(found, dict):
            self.known[name] = found
        self.known.setdefault("seconds", {})[name] = time.perf_counter() - start
        self.path.write_text(json.dumps(self.known))
        return found


def run(entry: Entry, path: Path, steps: int, plain: bool) -> None:
    record = Record(path, name=entry.name, package=entry.package, field=entry.field)
    problem = record.part("build", entry.build)
    if problem is None:
        return
    record.known["parameters"] = count(problem.model)
    record.part("adam", adam, problem, steps)
    model = record.part("convert", converted, problem, plain)
    if model is None:
        return
    record.part("same", same, problem, model)
    about = record.part("shares", shares, model)
    fallback = plain or bool(about and about["untagged"])
    work = 1 + lines_of(problem.written) + fallback
    record.known.update(work=work, fallback=fallback)
    record.part("kfac", second_order, problem, model, steps, fallback)
    record.part("verified", verified, problem, model)


def in_a_process(entry: Entry, folder: Path, options: argparse.Namespace) -> dict:
    path = folder / f"{entry.name}.json"
    arguments = [sys.executable, __file__, "--one", entry.name, "--to", str(path)]
    arguments += ["--steps", str(options.steps)] + ["--plain"] * options.plain
    path.unlink(missing_ok=True)
    lost, log = None, folder / f"{entry.name}.log"
    with log.open("w") as output:
        try:
            done = subprocess.run(
                arguments,
                timeout=options.limit,
                stdout=output,
                stderr=output,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            if done.returncode:
                lost = f"The process ended with {done.returncode}."
        except subprocess.TimeoutExpired:
            lost = f"Not ready after {options.limit:g} seconds."
    known = dict(name=entry.name, package=entry.package, field=entry.field)
    if path.exists():
        known = json.loads(path.read_text())
    if lost is not None:
        whole = lost + "\n" + log.read_text()[-4000:]
        known.setdefault("errors", {})["process"] = dict(short=lost, whole=whole)
    path.write_text(json.dumps(known))
    return known


def _cell(known: dict, part: str, text: Callable[[dict], str]) -> str:
    return text(known[part]) if part in known else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share in (0, 1) else f"{100 * share:.1f}%"


def _short(errors: dict) -> str:
    told = [f"{part}: {error['short']}" for part, error in errors.items()]
    line = " ".join("; ".join(told).split()).replace("|", "\\|")
    return line if len(line) <= 160 else line[:157] + "..."


HEADER = (
    "kind",
    "package",
    "model",
    "parameters",
    "lines",
    "under curvature",
    "under Kronecker blocks",
    "largest unseen share",
    "layers that `verify` doubts",
    "same outputs",
    "`KFAC()`: loss",
    "rejected",
    "Adam: loss (rate)",
    "compiling, s (Adam)",
    "a step, ms (Adam)",
    "errors",
)


def row(known: dict) -> tuple[str, ...]:
    times = lambda field, unit: tuple(
        _cell(known, part, lambda found: f"{unit * found[field]:.3g}")
        for part in ("kfac", "adam")
    )
    rejected = lambda found: f"{found['rejected']} " + ", ".join(found["faults"])
    moved = lambda found: f"{found['start']:.4g} to {found['end']:.4g}"
    compiling, steps = times("first", 1.0), times("step", 1e3)
    return (
        known["field"],
        known["package"],
        known["name"].removeprefix(known["package"].replace("-", "_") + "_"),
        f"{known['parameters']:,}" if "parameters" in known else "-",
        str(known.get("work", "-")),
        _cell(known, "shares", lambda found: _percent(found["curvature"])),
        _cell(known, "shares", lambda found: _percent(found["kronecker"])),
        _cell(known, "verified", lambda found: f"{found['share']:.1e}"),
        _cell(known, "verified", lambda found: str(len(found["alarms"]))),
        _cell(known, "same", lambda found: "yes" if found["outputs"] else "no"),
        _cell(known, "kfac", moved),
        _cell(known, "kfac", rejected).strip(),
        _cell(known, "adam", lambda found: f"{found['end']:.4g} ({found['rate']:g})"),
        f"{compiling[0]} ({compiling[1]})",
        f"{steps[0]} ({steps[1]})",
        _short(known.get("errors", {})),
    )


def table(results: list[dict]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += ["| " + " | ".join(row(known)) + " |" for known in results]
    packages = {known["package"] for known in results}
    both = [known for known in results if "kfac" in known and "adam" in known]
    ahead = sum(known["kfac"]["end"] < known["adam"]["end"] for known in both)
    failed = [known["name"] for known in results if known.get("errors")]
    told = f"{len(results)} models of {len(packages)} packages. `KFAC()` is ahead of "
    told += f"Adam on {ahead} of {len(both)}. Errors: {', '.join(failed) or 'none'}."
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of models, or how they begin")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds, a model")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--plain", action="store_true", help="convert without example")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        (entry,) = (e for e in zoo_models.ALL if e.name == options.one)
        return run(entry, options.to, options.steps, options.plain)
    if options.toy:
        options.steps, options.only = 6, options.only or ["klax_mlp"]
    begin = tuple(options.only or [""])
    entries = [e for e in zoo_models.ALL if e.name.startswith(begin)]
    if options.list:
        for e in entries:
            print(f"{e.field:14} {e.package:20} {e.name}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for e in entries:
        path = options.out / f"{e.name}.json"
        if path.exists() and not (options.again or options.toy):
            known = json.loads(path.read_text())
        else:
            known = in_a_process(e, options.out, options)
        results.append(known)
        print("  ".join(row(known)), flush=True)
        (options.out / "zoo.md").write_text(table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
