"""One command for a GPU that is at hand for half an hour: what steps of `KFAC()` cost
beside Adam, Muon and, if it can be imported, kfac-jax (milliseconds, seconds to compile,
memory), one by one and in a scan; and whether the tests of factors, inverses and steps
pass there.

    python tests/benchmarks/gpu.py --out gpu.md      # 25 minutes
    python tests/benchmarks/gpu.py --minutes 10      # fewer rounds; what is left is named
    python tests/benchmarks/gpu.py --toy             # seconds, on a CPU too

Every contender has a process of its own, because the device only tells how much memory a
process has had at most, and because one that needs too much must not end the others. All
of them have the same products of matrices: those of JAX's default precision.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import equinox as eqx
import jax
import optax
import problems
from contenders import Contender
from problems import Problem
from scale import GPT
from steps import CYCLE, IDLE, Runner

import eqx_kfac as kfac


ROOT = Path(__file__).parents[2]
SCANNED = IDLE  # So that a call can be one at which nothing is due.
TESTS = "products factorise inverses estimators layers optimizer adaptive".split()


def gpt(width: int, depth: int, heads: int, vocabulary: int, *shape: int) -> Problem:
    """A language model, as `convert` makes it: its head's output factor is diagonal."""
    net = GPT(depth, width, heads, vocabulary, key=jax.random.key(0))
    batch, length = shape
    text = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)

    def loss_fn(model: Any, text: Any) -> Any:
        logits = jax.vmap(model)(text[:, :-1])
        return kfac.SoftmaxCrossEntropy(logits, text[:, 1:])

    return Problem("gpt", batch, kfac.convert(net), loss_fn, (text,), [], [], None)


TOY = {
    "dense 8x1": lambda: problems.mlp(8, 8, 1, inputs=8),
    "language model 8x1": lambda: gpt(8, 1, 2, 20, 2, 4),
}
CASES: dict[str, Callable[[], Problem]] = {
    "dense 256x4, batch 512": lambda: problems.mlp(512, 256, 4, inputs=256),
    "dense 1024x12, batch 1024": lambda: problems.mlp(1024, 1024, 12, inputs=1024),
    "convolutions, 32x32, batch 256": lambda: problems.convnet(
        256, widths=(64, 128, 128), size=32
    ),
    "transformer 512x6, 16 x 256": lambda: problems.transformer(16, False, 512, 6, 256),
    "GPT-2 small, 8 x 512": lambda: gpt(768, 12, 12, 50257, 8, 512),
}
CONTENDERS: dict[str, Callable[[Problem], Contender | None]] = {
    "Adam": lambda p: contenders.from_optax("Adam", lambda: optax.adam(1e-3), p),
    "Muon": lambda p: contenders.from_optax("Muon", lambda: optax.contrib.muon(1e-3), p),
    "KFAC()": lambda p: contenders.ours("KFAC()", p, kfac.KFAC()),
    f"Adam, {SCANNED} steps in a scan": lambda p: contenders.from_optax(
        "Adam", lambda: optax.adam(1e-3), p, SCANNED
    ),
    f"KFAC(), {SCANNED} steps in a scan": lambda p: contenders.ours(
        "KFAC()", p, kfac.KFAC(), steps=SCANNED
    ),
    "kfac-jax": lambda p: contenders.peer(p, adaptive=False),
}


#
# In the process of one contender
#


def measure(case: str, contender: str, seconds: float, toy: bool) -> dict[str, Any]:
    """Milliseconds of a mean step and of one at which nothing is due, the median of
    rounds that take so many seconds; and what it took to get there."""
    problem = (TOY if toy else CASES)[case]()
    racer = CONTENDERS[contender](problem)
    if racer is None:
        return dict(error="not there, or not for this network")
    runner, rounds, idle = Runner(racer), [], []
    began = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - began < seconds:
        rounds.append(runner.take(CYCLE, CYCLE * 20))
        idle.append(runner.take(IDLE, CYCLE * 20 + 1))
    memory = jax.devices()[0].memory_stats() or {}
    return dict(
        mean=1e3 * statistics.median(rounds),
        idle=1e3 * statistics.median(idle),
        compiling=runner.compiling,
        state=runner.state_bytes / 1e6,
        peak=memory.get("peak_bytes_in_use", float("nan")) / 1e6,
        parameters=problems.parameters(problem),
    )


#
# In the process that starts them
#


def started(arguments: list[str], seconds: float) -> tuple[int, str]:
    """The exit code, and what was printed; all memory is taken as it is needed."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired:
        return 1, "out of time"
    return done.returncode, done.stdout or done.stderr


def found(case: str, contender: str, seconds: float, left: float, toy: bool) -> dict:
    options = ["--case", case, "--contender", contender, "--seconds", str(seconds)]
    code, text = started([__file__, *options, *["--toy"] * toy], left)
    last = text.strip().splitlines()[-1] if text.strip() else "nothing was printed"
    return json.loads(last) if code == 0 else dict(error=last[:100])


def row(case: str, contender: str, result: dict[str, Any], adam: dict) -> str:
    if "error" in result:
        return f"| {case} | {contender} | {result['error']} |" + " |" * 5
    ratio = result["mean"] / adam["mean"] if "mean" in adam else float("nan")
    cells = [
        f"{result['mean']:.3g} ({ratio:.2f})",
        f"{result['idle']:.3g}",
        f"{result['compiling']:.1f}",
        f"{result['state']:,.0f}",
        f"{result['peak']:,.0f}",
        f"{result['parameters']:.2g}",
    ]
    return f"| {case} | {contender} | " + " | ".join(cells) + " |"


def tested(names: list[str], seconds: float) -> str:
    """The last line of pytest, in one process: the device has one memory."""
    files = [f"tests/test_{name}.py" for name in names]
    options = ["-m", "pytest", "-q", "-n", "0", "--no-header", "--tb=no", *files]
    _, text = started(options, seconds)
    failed = [line for line in text.splitlines() if line.startswith("FAILED")]
    return "\n\n".join([text.strip().splitlines()[-1], *failed])


def benchmark(options: argparse.Namespace) -> str:
    """A page in Markdown, which grows as results come in."""
    end = time.perf_counter() + 60 * options.minutes
    left = lambda: end - time.perf_counter()
    cases = TOY if options.toy else CASES
    # This process leaves the device alone: all of its memory is for the contenders.
    _, device = started(["-c", "import jax; print(jax.devices()[0].device_kind)"], left())
    versions = f"JAX {jax.__version__}, Equinox {eqx.__version__}"
    lines = [
        f"{device.strip()}, {versions}, Python {platform.python_version()}\n",
        "| | | ms a step (Adam's) | nothing due | compiling s | state MB | "
        "memory at most, MB | parameters |",
        "|---" * 8 + "|",
    ]
    print("\n".join(lines))
    seconds = (
        0.0 if options.toy else 60 * options.minutes / 3 / len(cases) / len(CONTENDERS)
    )
    for case in cases:
        adam: dict[str, Any] = {}
        for contender in CONTENDERS:
            result = found(case, contender, seconds, left(), options.toy)
            adam = result if contender == "Adam" else adam
            lines.append(row(case, contender, result, adam))
            print(lines[-1], flush=True)
            if options.out is not None:
                options.out.write_text("\n".join(lines) + "\n")
    names = ["inverses"] if options.toy else TESTS
    return "\n".join([*lines, "", f"Tests: {tested(names, left())}"])


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=25, help="in all, at most")
    add("--out", type=Path, help="a file for the page")
    add("--toy", action="store_true", help="small networks, one file of tests")
    add("--case", help="only this one, as a line of JSON")
    add("--contender", help="in this case")
    add("--seconds", type=float, default=0.0, help="of this contender")
    options = parser.parse_args()
    if options.case is not None:
        chosen = options.case, options.contender, options.seconds, options.toy
        print(json.dumps(measure(*chosen)))
        return
    page = benchmark(options)
    print(page.splitlines()[-1])
    if options.out is not None:
        options.out.write_text(page + "\n")


if __name__ == "__main__":
    main()
