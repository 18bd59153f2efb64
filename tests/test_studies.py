"""The studies in `tests/benchmarks/studies/` run, and say what they found."""

import argparse
import re
import runpy
from pathlib import Path

import pytest

from . import scripts
from .scripts import check_picture, NUMBER, root


folder = root / "tests" / "benchmarks" / "studies"
names = sorted({path.name for path in folder.glob("*.py")} - {"harness.py"})


def run(script, *arguments, cache=None):
    return scripts.run(folder / script, *arguments, cache=cache)


@pytest.mark.parametrize("script", names)
def test_options_are_called_the_same(script, monkeypatch):
    """All studies have these options, and say what each is, and its default."""
    path = folder / script
    monkeypatch.syspath_prepend(str(folder))
    parse = runpy.run_path(str(path), run_name="example")["parse"]
    parser = parser_of(parse)
    assert parser.formatter_class is argparse.ArgumentDefaultsHelpFormatter
    actions = {name: a for a in parser._actions for name in a.option_strings}
    assert {"--steps", "--seed", "--seeds", "--out", "--toy"} <= set(actions)
    assert actions["--out"].default == Path(f"runs/{path.stem}.png")
    assert all(action.help for action in actions.values())
    options = parse(["--toy", "--steps", "3", "--seed", "7"])  # What is said, counts.
    assert options.steps == 3 and options.seed == 7
    assert parse(["--toy"]).steps < parse([]).steps
    assert "--batch" not in actions or parse(["--toy", "--batch", "5"]).batch == 5
    source = path.read_text()
    assert source.count("tqdm(") == source.count("disable=")
    with pytest.raises(SystemExit):
        parse(["--steps", "0"])


def parser_of(parse):
    """The parser that a `parse` makes."""
    made, original = [], argparse.ArgumentParser.parse_known_args

    def kept(self, *args, **kwargs):
        made.append(self)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", kept)
        parse([])
    return made[0]


def autoencoder(out, names, *arguments):
    cache = out.parent / "compiled"
    picture = out.with_suffix(".png")
    where = ["--out", str(picture), "--checkpoints", str(out)]
    printed = run("autoencoder.py", "--toy", *where, *arguments, cache=cache)
    header, *rows, verdict = printed.splitlines()[: 2 + len(names)]
    assert header.split()[:4] == ["method", "batch", "seed", "loss"]
    assert verdict.startswith("No method reached 54; ") and "(one seed)" in verdict
    check_picture(printed, picture)
    losses = {}
    for row in rows:
        found = re.fullmatch(rf"(.+?) +64 +0 +({NUMBER}) +(\d+) .*(reached|s)", row)
        losses[found[1]] = float(found[2]), int(found[3])
    assert list(losses) == names
    return losses


def test_autoencoder(tmp_path):
    """Every method trains; stopped and resumed, it is where it would have been."""
    names = ["K-FAC", "K-FAC, adaptive", "K-FAC, fixed", "Adam", "SGD with momentum"]
    whole = autoencoder(tmp_path / "a", names, "--steps", "20")
    for loss, steps in whole.values():
        assert steps == 20
        assert loss < 530  # It trains, from 556 on, whoever is best.

    methods = {"kfac": "K-FAC", "adaptive": "K-FAC, adaptive", "adam": "Adam"}

    def some(*arguments):
        named = ["--methods", *methods, *arguments]
        return autoencoder(tmp_path / "b", list(methods.values()), *named)

    stopped = some("--steps", "10")
    assert [steps for _, steps in stopped.values()] == [10, 10, 10]
    resumed = some("--steps", "20", "--resume")
    assert resumed == {name: whole[name] for name in methods.values()}
    for method in methods:
        # Bit for bit, the optimizer's state too.
        kept = [tmp_path / name / f"seed-0-{method}.eqx" for name in "ab"]
        assert kept[0].read_bytes() == kept[1].read_bytes()


def compared(script, picture, labels, *arguments):
    """The table of a toy run: its rows, by the method they begin with."""
    printed = run(script, "--toy", "--steps", "5", "--out", str(picture), *arguments)
    header, *rows, verdict = printed.splitlines()[: 2 + len(labels)]
    assert header.split()[:3] == ["method", "rate", "seed"]
    found = {}
    for label, row in zip(labels, rows):
        assert row.startswith(label + " ")
        found[label] = row.removeprefix(label).split()
    lowest = min(found, key=lambda label: float(found[label][2]))
    assert verdict.startswith(
        f"After 5 steps {lowest} ({found[lowest][2]}) has the lowest"
    )
    assert verdict.endswith(": one seed.")
    check_picture(printed, picture)
    return found


def test_convnet(tmp_path):
    labels = ["K-FAC", "AdamW", "SGD with momentum"]
    picture = tmp_path / "deeper" / "convnet.png"
    rows = compared("convnet.py", picture, labels, "--target", "2.25")
    for label, row in rows.items():
        rate, _, loss, accuracy, steps, *times, number, _, seconds, _ = row
        assert rate == "-" if label == "K-FAC" else float(rate) > 0
        assert (
            steps == "5" and float(loss) < 2.25
        )  # It trains, from 2.35 on, whoever is best.
        assert 0 < float(accuracy) < 1
        assert all(float(time) >= 0 for time in times)
        assert 1 <= int(number) <= 5 and 0 <= float(seconds) <= float(times[0])


def test_transformer(tmp_path):
    labels = ["K-FAC, expand", "K-FAC, reduce", "AdamW"]
    picture = tmp_path / "deeper" / "transformer.png"
    rows = compared("transformer.py", picture, labels)
    for label, (rate, _, loss, test, right, steps, *times) in rows.items():
        assert rate == "-" if label.startswith("K-FAC") else float(rate) > 0
        assert steps == "5"
        assert 0 < float(loss) < 1.72  # It trains, from 1.77 on.
        assert 0 < float(test) < 1.72
        assert 0 <= float(right) <= 1
        assert len(times) == 3 and all(float(time) >= 0 for time in times)


def test_laplace(tmp_path):
    picture = tmp_path / "laplace.png"
    text = run("laplace.py", "--toy", "--seeds", "2", "--out", str(picture))
    printed = text.splitlines()
    blocks = ["MAP", "Kronecker", "EKFAC", "Diagonal"]
    regression, digits = printed[:5], printed[5:12]
    assert [row.split()[0] for row in regression] == ["regression", *blocks]
    names = ["MAP", "last layer", *blocks[1:], "cold"]
    assert [row[:12].strip() for row in digits] == ["digits", *names]
    for row in digits[1:]:
        right, nll, error, unseen = map(float, re.sub(r"\+- \S+", "", row[12:]).split())
        assert 0.5 < right <= 1 and 0 < nll < 2 and 0 < error < 1 and 0 <= unseen <= 1
    assert "means of 2 seeds, the lowest with " in printed[12]
    check_picture(text, picture)


def test_influence(tmp_path):
    picture = tmp_path / "influence.png"
    text = run("influence.py", "--toy", "--out", str(picture))
    printed = text.splitlines()
    names = ["identity", "K-FAC", "EKFAC", "Gauss-Newton", "(loss)"]
    rows = [row.split() for row in printed[1:6]]
    assert [row[0] for row in rows] == names
    for name, _, score, found, _ in rows:
        assert name == "(loss)" or -1 <= float(score) <= 1
        assert 0 <= float(found) <= 1
    assert "The highest LDS is that of " in printed[6] and "(one seed)" in printed[6]
    check_picture(text, picture)


def test_poisson(tmp_path):
    picture = tmp_path / "poisson.png"
    names = ("heat", "poisson5")
    printed = run("poisson.py", "--toy", "--equations", *names, "--out", str(picture))
    begun = tuple(f"{name} " for name in names)
    rows = [line.split() for line in printed.splitlines() if line.startswith(begun)]
    for name in names:
        own = [row for row in rows if row[0] == name]
        assert [" ".join(row[1:-4]) for row in own] == [
            "K-FAC, rules",
            "K-FAC",
            "Adam, 0.01",
            "Gauss-Newton, CG",
        ]
        assert all(0 < float(row[-3]) < 10 and float(row[-1]) >= 0 for row in own)
        lowest = min(own, key=lambda row: float(row[-3]))
        verdict = f"^{name}: .* the lowest error, {lowest[-3]}, before .*: one seed\\.$"
        assert re.search(verdict, printed, re.MULTILINE)
    check_picture(printed, picture)


@pytest.mark.parametrize("task, algorithm", [("cartpole", "a2c"), ("pendulum", "ppo")])
def test_cartpole(task, algorithm, tmp_path):
    picture = tmp_path / "cartpole.png"
    what = "--task", task, "--algorithm", algorithm, "--out", str(picture)
    printed = run("cartpole.py", "--toy", *what)
    rows = re.findall(r"^(K-FAC|Adam, 0.001) +(-?\d+) ± 0 ", printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["K-FAC", "Adam, 0.001"]
    low, high = (1, 500) if task == "cartpole" else (-3300, 0)
    assert all(low <= float(number) <= high for _, number in rows)
    first = max(rows, key=lambda row: float(row[1]))[0]
    assert f"{task}, {algorithm}: over the run, {first} (" in printed
    check_picture(printed, picture)


def test_helium(tmp_path):
    picture = tmp_path / "helium.png"
    printed = run("helium.py", "--toy", "--atom", "beryllium", "--out", str(picture))
    header, *rows, verdict, rate = printed.splitlines()[:5]
    assert rate.startswith("Adam, 0.01, late in the training: -")
    best = min(rows, key=lambda row: float(row.split()[-7]))
    assert best.startswith(verdict.split(" has the lower energy")[0])
    assert "(one seed)" in verdict
    for row in rows:
        *_, energy, above, _, error, spread, steps, seconds = row.split()
        assert abs(float(energy) + 14.66736 - float(above) / 1e3) < 1e-4
        assert float(error) > 0 and float(spread) > 0 and float(seconds) >= 0
        assert int(steps) >= 1
    check_picture(printed, picture)
