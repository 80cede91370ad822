"""One report of what the chaos suite measured: a table of rows, every claim of every run, and the load second by second as plots.

    make chaos            # runs the suite, then this
    python -m benchmarks.chaos_report .genrec/chaos/rows.jsonl

Writes benchmarks/results/chaos_cpu_DATE.md and the plots beside it, in a directory of that name.
"""

import json
import re
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[1]
Run = dict[str, Any]


def main(
    rows: Annotated[Path, typer.Argument(help="what the suite wrote")] = Path(".genrec/chaos/rows.jsonl"),
    output: Annotated[Path | None, typer.Option(help="default: under benchmarks/results")] = None,
    note: Annotated[str, typer.Option(help="what a reader should know of the runs, such as what else the machine did")] = "",
) -> None:
    """Read, plot and file."""
    mpl.use("Agg")
    runs: dict[str, list[Run]] = defaultdict(list)
    for line in rows.read_text().splitlines():
        run = json.loads(line)
        runs[run["fault"]].append(run)
    where = output or ROOT / "benchmarks" / "results" / f"chaos_cpu_{datetime.now(UTC):%Y-%m-%d}.md"
    plots = where.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    where.write_text(re.sub(rf"{tempfile.gettempdir()}/\S*/(?=\w)", "", report(runs, plots, note)))  # a machine's paths tell nothing
    print(f"{where}: {len(runs)} rows, {sum(map(len, runs.values()))} runs")


def report(runs: dict[str, list[Run]], plots: Path, note: str = "") -> str:
    lines = [
        "# What holds under faults",
        "",
        "Each row is a fault on a real cluster under open-loop load, whose driver runs on the same machine and counts a request's time",
        "from the moment it was due. A claim holds when it does so in every run.",
        "",
        *([note, ""] if note else []),
        "| fault | must hold | runs | claims that hold | what does not (worst of all runs) |",
        "|---|---|---|---|---|",
        *(_overview(fault, found) for fault, found in runs.items()),
    ]
    for fault, found in runs.items():
        lines += ["", f"## {fault}", "", f"Must hold: {found[0]['must']}", "", *_claims(found), *_figures(found)]
        if picture := plot(found, plots / f"{_name(fault)}.png"):
            lines += ["", f"![{fault}]({plots.name}/{picture.name})"]
    first, last = next(iter(runs.values()))[0], list(runs.values())[-1][-1]
    versions = ", ".join(f"{package} {version(package)}" for package in ("ray", "torch", "onnxruntime"))
    lines += ["", f"{first['machine']}. Python {first['python']}, {versions}. {first['at']} to {last['at']}.", "", "`make chaos`", ""]
    return "\n".join(lines)


def _overview(fault: str, found: list[Run]) -> str:
    grouped = _by_claim(found)
    held = [what for what, claims in grouped.items() if all(claim["held"] for claim in claims)]
    broken = [f"{what}: {_worst(claims)} ({_bounds(claims[0])})" for what, claims in grouped.items() if what not in held]
    broken += sorted({note for run in found for note in run["notes"] if note.startswith("the run broke off")})
    return f"| {fault} | {found[0]['must']} | {len(found)} | {len(held)} of {len(grouped)} | {'; '.join(broken).replace('|', '/') or '-'} |"


def _by_claim(found: list[Run]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in found:
        for claim in run["claims"]:
            grouped[claim["what"]].append(claim)
    return grouped


def _claims(found: list[Run]) -> list[str]:
    rows = [
        f"| {what} | {_bounds(claims[0])} | {', '.join(_number(claim['value']) for claim in claims)} "
        f"| {'yes' if all(claim['held'] for claim in claims) else 'NO'} |"
        for what, claims in _by_claim(found).items()
    ]
    return ["| claim | wanted | each run | holds |", "|---|---|---|---|", *rows]


def _figures(found: list[Run]) -> list[str]:
    """What was measured beside the claims: short figures, and notes."""
    shown = {
        name: [run["figures"][name] for run in found if name in run["figures"]]
        for name in sorted({name for run in found for name in run["figures"]})
    }
    lines = [f"- {name}: {', '.join(map(str, values))}" for name, values in shown.items() if len(str(values)) < 600]
    notes = [f"- {note}" for run in found for note in run["notes"]]
    return ["", *lines, *notes[:10]] if lines or notes else []


def plot(found: list[Run], path: Path) -> Path | None:
    """Latency, rate and failures over time, a line for each run, the faults of the first one marked; None where there was no load."""
    with_load = [run for run in found if run["windows"]]
    if not with_load:
        return None
    figure, (latency, rate, failures) = plt.subplots(3, 1, figsize=(9, 7), sharex=True, height_ratios=[3, 2, 1])
    for run in with_load:
        at = _column(run, "at_s")
        (line,) = latency.plot(at, _column(run, "p99_ms"), label=f"p99, run {run['run'] + 1}", linewidth=1)
        latency.plot(at, _column(run, "p50_ms"), color=line.get_color(), linestyle=":", linewidth=1)
        rate.plot(at, _column(run, "good"), color=line.get_color(), linewidth=1)
        rate.plot(at, _column(run, "rate"), color="grey", linestyle=":", linewidth=0.7)
        failures.plot(at, _column(run, "failed") + _column(run, "rejected"), color=line.get_color(), linewidth=1)
    for moment, what in with_load[0]["marks"]:
        for axes in (latency, rate, failures):
            axes.axvline(moment, color="red", linewidth=0.8, linestyle="--")
        latency.annotate(what, (moment, 1.0), xycoords=("data", "axes fraction"), fontsize=7, rotation=15, color="red")
    latency.set(yscale="log", ylabel="ms (p50 dotted)")
    rate.set(ylabel="answered/s (sent grey)")
    failures.set(ylabel="not answered", xlabel="seconds")
    latency.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def _column(run: Run, name: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.array([float(window[name]) for window in run["windows"]])  # "nan" is written as text


def _bounds(claim: dict[str, Any]) -> str:
    least, most = float(claim["least"]), float(claim["most"])
    if least == most:
        return f"{least:g}"
    shown = ((">=", least), ("<=", most))
    return " and ".join(f"{sign} {bound:g}" for sign, bound in shown if np.isfinite(bound))


def _worst(claims: list[dict[str, Any]]) -> str:
    values = [float(claim["value"]) for claim in claims if not claim["held"]]
    return _number(max(values) if np.isfinite(float(claims[0]["most"])) else min(values))


def _number(value: float | str) -> str:
    return f"{float(value):.4g}"


def _name(fault: str) -> str:
    return re.sub(r"\W+", "_", fault.lower()).strip("_")


if __name__ == "__main__":
    typer.run(main)
