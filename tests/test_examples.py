"""The examples are short, run, and leave behind what they say."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from . import scripts
from .scripts import check_picture, NUMBER, plain_environment, root


folder = root / "examples"
names = sorted(path.stem for path in folder.glob("*.py"))


def run(script, *arguments):
    return scripts.run(folder / script, *arguments)


# A race of three optimizers, and checkpoints of several processes.
LONGER = dict(race=150, distributed=270)


@pytest.mark.parametrize("name", names)
def test_they_are_short(name):
    """At most 120 lines, a step near the top, and they say how to run them."""
    lines = (folder / f"{name}.py").read_text().splitlines()
    assert len(lines) <= LONGER.get(name, 120)
    # (These are about what one does after training, and around it.)
    beside = name in ("laplace", "influence", "distributed")
    assert beside or any("optimizer.step" in line for line in lines[:45])
    assert sum(f"python examples/{name}.py" in line for line in lines[:20]) >= 2
    options = "--steps" if name != "race" else "--seconds", "--seed", "--out", "--toy"
    assert all(f'    add("{option}"' in "\n".join(lines) for option in options)
    assert f"runs/{name}.png" in "\n".join(lines)


@pytest.mark.parametrize("name", sorted({*names} - {"race", "distributed"}))
def test_they_run(name, tmp_path):
    picture = tmp_path / "deeper" / f"{name}.png"
    printed = run(f"{name}.py", "--toy", "--out", str(picture))
    assert len(re.findall(NUMBER, printed)) >= 2
    check_picture(printed, picture)


def test_race(tmp_path):
    """The picture of the README, and the figures in it."""
    picture = tmp_path / "deeper" / "race.png"
    arguments = ["--toy", "--rates", "0.02", "0.05"]
    printed = run("race.py", *arguments, "--out", str(picture))
    header, *rows = printed.splitlines()[:4]
    assert header.split() == ["method", "compiling", "s", "seconds", "relative", "errors"]
    found = [re.split(r" {2,}", row) for row in rows]
    assert [method for method, *_ in found] == ["K-FAC", "Adam, 0.02", "Muon, 0.05"]
    for _, compiling, seconds, *errors in found:
        assert 0 < float(compiling) <= float(seconds)
        assert len(errors) == 2 and all(0 < float(error) < 2 for error in errors)
    check_picture(printed, picture)


def distributed(out, devices, processes=1, *arguments):
    """Starts all processes of a run; doubles, for the steps are to be compared."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options = dict(out=out.with_suffix(".png"), checkpoints=out, devices=devices)
    options |= dict(processes=processes, coordinator=address)
    named = [f"--{name}={value}" for name, value in options.items()]
    script = [sys.executable, str(root / "examples" / "distributed.py")]
    common = [*script, "--toy", "--steps=200", "--every=20", *named, *arguments]
    return [
        subprocess.Popen(
            [*common, f"--process={i}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=plain_environment() | {"JAX_ENABLE_X64": "1"},
        )
        for i in range(processes)
    ]


def losses_of(runs):
    printed, *_ = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    rows = re.findall(rf"^ +(\d+) +({NUMBER}|nan)$", printed, re.MULTILINE)
    return {int(step): float(loss) for step, loss in rows}


def test_distributed_goes_on_after_a_kill(tmp_path):
    """On another number of devices and of processes: to rounding, as if on one device
    from the beginning."""
    runs = distributed(tmp_path / "killed", 2, 2)
    kept = tmp_path / "killed" / "20"
    while not kept.exists():  # It gets its name when all of it is written.
        assert all(run.poll() is None for run in runs)
        time.sleep(0.05)
    for run in reversed(runs):
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    whole = losses_of(distributed(tmp_path / "whole", 1))
    resumed = losses_of(distributed(tmp_path / "killed", 4, 1, "--resume"))
    assert list(whole) == list(resumed) == [1, *range(20, 201, 20)]
    for step, loss in whole.items():
        assert abs(resumed[step] / loss - 1) <= 1e-9
    assert whole[200] < 0.9 * whole[1]
    (anew,) = distributed(tmp_path / "whole", 1)  # Over what is there: refused.
    assert anew.communicate() == ("", None) and anew.returncode == 1
    assert (tmp_path / "whole.png").read_bytes().startswith(b"\x89PNG")
