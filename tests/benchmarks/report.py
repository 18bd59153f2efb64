"""What `speed.py` found, as tables and as a picture."""

from pathlib import Path
from typing import Any


INVERT = "part: inversion at every step"
COLOURS = {
    "gradient": "#8d99ae",
    "statistics": "#30638e",
    "averaging": "#5f9ed1",
    "preconditioning": "#edae49",
    "quadratic model": "#7a9e7e",
    "factorisation": "#d1495b",
    "whole": "#c9c9c9",
}


def _result(case: dict, name: str, field: str = "mean") -> float | None:
    found = case["results"].get(name)
    return None if found is None else found[field]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b <= 0 else a / b


def components(case: dict, adaptive: bool) -> dict[str, float] | None:
    """Seconds of a mean step by component, from the steps that leave something out. What
    a difference of two measured times leaves below zero is zero."""
    if INVERT not in case["results"]:
        return None

    def of(name):
        return case["results"][name]["mean"]

    gradient, with_statistics = of("gradient"), of("part: statistics")
    none, curvature = of("part: no curvature"), of("part: no inversion")
    statistics = with_statistics - gradient
    found = dict(
        gradient=gradient,
        statistics=statistics,
        averaging=curvature - none - statistics,
        preconditioning=none - gradient,
        factorisation=(of(INVERT) - curvature) / case["period"],
    )
    if adaptive:
        found["quadratic model"] = of("part: adaptive, no inversion") - curvature
    return {name: max(0.0, found[name]) for name in COLOURS if name in found}


def targets(cases: list[dict]) -> list[tuple[str, float, float | None]]:
    """`(what, at most, measured)`: fixed before anything was measured."""
    found = []
    for case in cases:
        where = f"{case['case']}, batch {case['batch']}"

        def add(what, most, measured, where=where):
            found.append((f"{where}: {what}", most, measured))

        def ours(kind, field, case=case):
            return _result(case, f"K-FAC, {kind}", field)

        def theirs(kind, field, case=case):
            return _result(case, f"kfac-jax, {kind}", field)

        for kind in ("fixed", "adaptive"):
            for field, what, most in (
                ("mean", "mean step", 0.7 if case["batch"] >= 2000 else 0.6),
                ("start", "init, first step and all compiling", 0.5),
                ("state_bytes", "bytes of state", 0.6),
            ):
                ratio = _ratio(ours(kind, field), theirs(kind, field))
                if case["case"].startswith("MLP") and field == "mean":
                    what, most = "a step alone", 1.0
                add(f"{kind}, {what}, over kfac-jax", most, ratio)
            rows = _result(case, f"K-FAC, {kind}, through rows, in turn")
            if rows is not None:
                ratio = _ratio(rows, theirs(kind, "mean"))
                add(f"{kind}, through rows, in turn, over kfac-jax", 0.6, ratio)
            part = _result(case, f"K-FAC, {kind}, curvature of a quarter")
            if part is not None:
                ratio = _ratio(part, theirs(kind, "mean"))
                most = 0.7 if case["batch"] >= 2000 else 0.6
                add(f"{kind}, curvature of a quarter, over kfac-jax", most, ratio)
            flat = _result(case, f"K-FAC, {kind}, flattened")
            if flat is not None:
                ratio = _ratio(flat, theirs(kind, "mean"))
                add(f"{kind}, a step alone, flattened, over kfac-jax", 1.0, ratio)
            packed = _result(case, f"K-FAC, {kind}, packed", "state_bytes")
            if packed is not None and case["case"] == "autoencoder":
                ratio = _ratio(packed, ours(kind, "state_bytes"))
                add(f"{kind}, bytes of state, packed over not", 0.6, ratio)
            scan = _result(case, f"K-FAC, {kind}, in scan")
            if scan is not None:
                ratio = _ratio(scan, theirs(kind, "mean"))
                add(f"{kind}, a step in lax.scan, over kfac-jax", 0.5, ratio)
            if not case["case"].startswith("MLP"):
                turn = f"{kind}, in turn"
                ratio = _ratio(ours(turn, "slowest"), ours(turn, "median"))
                add(f"{turn}, slowest step over median", 1.5, ratio)
        least = case["floors"]["floor, no inversion"]
        if case["case"] == "autoencoder" and case["batch"] >= 500:
            add(
                "fixed, step without inversion over the floor",
                1.25,
                _ratio(_result(case, "part: no inversion", "median"), least),
            )
    stacks = [c for c in cases if c["case"].startswith("stacked")]
    if len(stacks) == 2:
        small, large = sorted(stacks, key=lambda c: c["parameters"])
        for kind in ("fixed", "adaptive"):
            seconds = [c["programs"][f"K-FAC, {kind}"]["seconds"] for c in (large, small)]
            what = f"{large['case']} over {small['case']}: {kind}, compile seconds"
            found.append((what, 1.2, _ratio(*seconds)))
    return found


def _number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def _milliseconds(x: float | None) -> str:
    return "-" if x is None else f"{1e3 * x:.3g}"


def _megabytes(x: float | None) -> str:
    return "-" if x is None else f"{x / 2**20:.3g}"


def _rows(header: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---"] * len(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)] + [""]


def _case_table(case: dict) -> list[str]:
    floors = case["floors"]
    fixed, adaptive = floors["floor, fixed"], floors["floor, adaptive"]
    gradient = _result(case, "gradient")
    lines = [
        f"### {case['case']}, batch {case['batch']}",
        "",
        f"{case['parameters']:,} parameters. Floor, in ms: gradient "
        f"{_milliseconds(floors['floor: gradient'])}, without inversion "
        f"{_milliseconds(floors['floor, no inversion'])} (with symmetric products "
        f"{_milliseconds(floors['floor, no inversion, symmetric'])}), fixed "
        f"{_milliseconds(fixed)}, adaptive {_milliseconds(adaptive)}; products run at "
        f"{case['gflops']:.3g} GFLOP/s.",
        "",
    ]
    header = ["", "mean ms", "median", "slowest", "/ gradient", "/ floor", "first s"]
    header += ["all compiling s", "compile s", "temp MB", "state MB"]
    rows = []
    for name, result in case["results"].items():
        least = None
        if name.startswith(("K-FAC", "kfac-jax")):
            least = adaptive if "adaptive" in name else fixed
        program = case["programs"].get(name, {})
        rows.append(
            [
                name,
                *(_milliseconds(result[f]) for f in ("mean", "median", "slowest")),
                _number(_ratio(result["mean"], gradient)),
                _number(_ratio(result["mean"], least)),
                _number(result["first"]),
                _number(result["start"]),
                _number(program.get("seconds")),
                _megabytes(program.get("temp_bytes")),
                _megabytes(result["state_bytes"]),
            ]
        )
    lines += _rows(header, rows)
    parts = components(case, True)
    if parts is not None:
        rows = []
        for name, seconds in parts.items():
            least = floors.get(f"floor: {name}")
            cells = _milliseconds(least), _number(_ratio(seconds, least))
            rows.append([name, _milliseconds(seconds), *cells])
        lines += _rows(["component", "ms a step", "floor ms", "/ floor"], rows)
    return lines


def _growth_table(rows: list[dict]) -> list[str]:
    header = ["", "gradient ms", "K-FAC ms", "/ gradient", "/ kfac-jax", "compile s"]
    header += ["kfac-jax, all compiling s", "temp MB", "state MB"]
    body = [
        [
            f"{row['axis']} {row['value']}",
            _milliseconds(row["gradient"]),
            _milliseconds(row["step"]),
            _number(_ratio(row["step"], row["gradient"])),
            _number(_ratio(row["step"], row["peer"])),
            _number(row["compile"]),
            _number(row["peer_start"]),
            _megabytes(row["temp_bytes"]),
            _megabytes(row["state_bytes"]),
        ]
        for row in rows
    ]
    return ["### Growth (MLP, fixed)", "", *_rows(header, body)]


def markdown(done: dict[str, Any]) -> str:
    lines = [
        f"{done['machine']}, {done['backend']}, Python {done['python']}, JAX "
        f"{done['jax']}, eqx-kfac {done['version']}",
        "",
    ]
    if done["toy"]:
        lines += ["Toy sizes: the numbers mean nothing.", ""]
    for case in done["cases"]:
        lines += _case_table(case)
    if done["growth"]:
        lines += _growth_table(done["growth"])
    rows = [
        [what, _number(got), _number(most), "-" if got is None else _verdict(got, most)]
        for what, most, got in targets(done["cases"])
    ]
    if rows:
        lines += ["### Targets", ""]
        lines += _rows(["ratio", "measured", "target", "reached"], rows)
    return "\n".join(lines)


def _verdict(measured: float, most: float) -> str:
    return "yes" if measured <= most else "no"


def _bars(case: dict) -> list[tuple[str, dict[str, float]]]:
    """From the top: everybody's mean step in units of the floor of the fixed one, ours
    by component."""
    unit, bars = case["floors"]["floor, fixed"], []
    for name, result in case["results"].items():
        if name.startswith("part:"):
            continue
        split = None
        if name in ("K-FAC, fixed", "K-FAC, adaptive"):
            split = components(case, "adaptive" in name)
            if split is not None:  # The bar is as long as what was measured.
                split["whole"] = max(0.0, result["mean"] - sum(split.values()))
        if name == "gradient":
            split = dict(gradient=result["mean"])
        split = split or dict(whole=result["mean"])
        bars.append((name, {part: value / unit for part, value in split.items()}))
    for kind in ("fixed", "adaptive"):
        names = [n for n in COLOURS if f"floor: {n}" in case["floors"]]
        if kind == "fixed":
            names.remove("quadratic model")
        split = {n: case["floors"][f"floor: {n}"] / unit for n in names}
        bars.append((f"floor, {kind}", split))
    return bars


def draw(done: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = done["cases"]
    if not cases:
        return
    bars = [_bars(case) for case in cases]
    heights = [len(b) for b in bars]
    figure, axes = plt.subplots(
        len(cases),
        1,
        figsize=(8, 0.6 * len(cases) + 0.26 * sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
    )
    for axis, case, some in zip(axes[:, 0], cases, bars):
        for row, (_, split) in enumerate(some):
            left = 0.0
            for part, value in split.items():
                axis.barh(row, value, left=left, color=COLOURS[part], height=0.75)
                left += value
        axis.set_yticks(range(len(some)), [name for name, _ in some], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color="0.3", linewidth=0.8, linestyle=":")
        axis.set_title(
            f"{case['case']}, batch {case['batch']}: mean step over the floor of fixed "
            "K-FAC",
            fontsize=9,
            loc="left",
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    labels = [name if name != "whole" else "not split up" for name in COLOURS]
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, labels, ncols=4, frameon=False, fontsize=8, loc="lower center")
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
