"""`genrec bench compare`: whether candidates are slower than a baseline or break more often, and whether that is a failure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cluster.errors import DataError, UnknownChoice
from cluster.regression import Rule, Verdict, in_a_row
from cluster.regression import compare as compare_samples
from deployments.cli.bench_files import Compared, Measurement, Scenario, append_history, read_history, read_measurement

COLOURS: dict[Verdict, str] = {"regression": "red", "improvement": "green", "unchanged": "default"}
ERRORS, MISSING = "errors", "missing"
SHARES = {ERRORS: "have no answer", "degraded": "are answered degraded"}
"""Figures that count requests -> what these requests are."""
CHANCE = 3.0
"""Up to so many standard deviations, the shares of two measurements differ by chance."""


def compare(
    baseline: Annotated[Path, typer.Argument(help="a measurement, as `genrec bench serve` and `interleave` write")],
    candidates: Annotated[list[Path], typer.Argument(help="one or more, the latest last")],
    *,
    tolerance: Annotated[float, typer.Option(help="share by which a median may be worse")] = Rule.tolerance,
    metric: Annotated[list[str], typer.Option(help="may be repeated (default: all that the files have in common)")] = [],  # noqa: B006 - typer copies it
    history: Annotated[Path | None, typer.Option(help="JSON lines, where comparisons are kept and added to")] = None,
    failures: Annotated[int, typer.Option(help="regressions of a metric, one after the other, that are a failure")] = Rule.failures,
) -> None:
    """Compare samples by medians and a one-sided Mann-Whitney U test; status 1 where a metric's latest comparisons all are regressions, or
    more requests have no answer than by chance.
    """
    rule = Rule(tolerance=tolerance, failures=failures)
    before, base = read_history(history) if history else [], Source.read(baseline)
    sources = [Source.read(path) for path in candidates]
    lacking = [lacks(base, source, metric) for source in sources]
    pairs = zip(sources, lacking, strict=True)
    made = [one for source, found in pairs for one in compared(base, source, metric, rule, improves=not found)]
    if history:
        append_history(history, made)
    Console().print(table(made, escape(f"against {base.path.name}")))
    rows = in_a_row_by_metric([*before, *made], of=made)
    tell(rows, rule)
    tell_lacks(lacking)
    if any(map(rule.fails, rows.values())) or any(ERRORS in found for found in lacking):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Source:
    """A measurement, and the file that holds it."""

    path: Path
    measurement: Measurement

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(path, read_measurement(path))

    @property
    def scenario(self) -> Scenario:
        return self.measurement.scenario

    @property
    def samples(self) -> dict[str, list[float]]:
        return self.measurement.samples

    def counted(self, figure: str) -> tuple[int, int] | None:
        """How many of the requests a figure counts, and how many there are; None where the file does not say."""
        count, requests = (self.measurement.figures.get(name) for name in (figure, "requests"))
        return (count, requests) if isinstance(count, int) and isinstance(requests, int) and requests > 0 else None


def compared(base: Source, candidate: Source, metrics: Sequence[str], rule: Rule, *, improves: bool) -> list[Compared]:
    """One candidate, metric by metric; none is an improvement unless it `improves`, as where it `lacks` something. Raises DataError where
    the two did not measure the same, UnknownChoice at a metric they lack.
    """
    _check_comparable(base, candidate)
    of: dict[str, Any] = {
        "scenario": base.scenario.name,
        "workload": base.scenario.workload,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    found = []
    for metric in metrics or _common(base, candidate):
        for one in (base, candidate):
            if metric not in one.samples:
                raise UnknownChoice(f"metric of {one.path}", metric, one.samples)
        result = compare_samples(metric, base.samples[metric], candidate.samples[metric], rule)
        if not improves and result.verdict == "improvement":
            result = replace(result, verdict="unchanged")
        found.append(Compared(**of, baseline=base.path.name, candidate=candidate.path.name, **asdict(result)))
    return found


def lacks(base: Source, candidate: Source, metrics: Sequence[str]) -> dict[str, str]:
    """Why a candidate is no improvement, however short its times are: a figure of SHARES of which it has a larger share than by chance, or
    MISSING where no metrics are asked for and it has no samples of one of the baseline's -> that in words.
    """
    found = {}
    for figure, are in SHARES.items():
        if (before := base.counted(figure)) and (after := candidate.counted(figure)) and _more(before, after):
            shares = [f"{count / requests:.2%}" for count, requests in (after, before)]
            found[figure] = f"{candidate.path.name}: {shares[0]} of the requests {are}, and of {base.path.name}'s {shares[1]}"
    if not metrics and (missing := sorted(base.samples.keys() - candidate.samples.keys())):
        found[MISSING] = f"{candidate.path.name} has no samples of {', '.join(missing)}, as {base.path.name} has; measure both for as long"
    return found


def _more(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether of these (counted, requests) the second share is larger than the first by more than chance."""
    pooled = (before[0] + after[0]) / (before[1] + after[1])
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / before[1] + 1 / after[1]))
    return after[0] / after[1] - before[0] / before[1] > CHANCE * deviation


def tell_lacks(lacking: Sequence[Mapping[str, str]]) -> None:
    """Tell what each candidate lacks; an answer is a failure."""
    for reason, said in (pair for found in lacking for pair in found.items()):
        if reason == ERRORS:
            typer.secho(f"{said}, which is a failure", fg="red", err=True)
        else:
            typer.secho(f"warning: {said}; nothing counts as an improvement", fg="yellow", err=True)


def in_a_row_by_metric(comparisons: Sequence[Compared], of: Sequence[Compared]) -> dict[str, int]:
    """How many of the latest comparisons are regressions, for each metric that stands in `of`, by its name."""
    metrics = {f"{one.scenario} {one.metric}".strip(): one for one in of}
    return {name: in_a_row([one.verdict for one in comparisons if one.is_of(latest)]) for name, latest in metrics.items()}


def tell(rows: Mapping[str, int], rule: Rule) -> None:
    """Tell of each metric how many regressions in a row it has had, if any, and whether that is a failure."""
    for name, count in rows.items():
        if rule.fails(count):
            typer.secho(f"{name}: {count} regressions in a row, which is a failure", fg="red", err=True)
        elif count:
            typer.secho(f"warning: {name}: {count} of {rule.failures} regressions in a row that are a failure", fg="yellow", err=True)


def table(made: Sequence[Compared], title: str) -> Table:
    """A row for each metric of each candidate."""
    figures = (Column(side, justify="right", no_wrap=True) for side in ("before", "after", "ratio", "p"))
    metric, verdict = Column("median of", no_wrap=True), Column("verdict", no_wrap=True)
    shown = Table(Column("candidate", overflow="fold"), metric, *figures, verdict, title=title)
    for one in made:
        values = (f"{one.baseline_median:.4g}", f"{one.candidate_median:.4g}", f"{one.ratio:.3f}", f"{one.p_value:.2g}")
        shown.add_row(escape(one.candidate), escape(one.metric), *values, f"[{COLOURS[one.verdict]}]{one.verdict}[/]")
    return shown


def _check_comparable(base: Source, candidate: Source) -> None:
    """Raises DataError where scenario or workload differ. Another machine may be intended, and is only warned of."""
    one, other = base.scenario, candidate.scenario
    if one.name != other.name:
        _refuse(base, candidate, f"{one.name or 'nothing named'!r} is not {other.name or 'nothing named'!r}")
    if differing := sorted(key for key in one.workload.keys() | other.workload if one.workload.get(key) != other.workload.get(key)):
        _refuse(base, candidate, ", ".join(f"{key} {one.workload.get(key)!r} is not {other.workload.get(key)!r}" for key in differing))
    if base.measurement.machine != candidate.measurement.machine:
        said = f"warning: {base.path.name} and {candidate.path.name} are of different machines, which may be all that differs"
        typer.secho(said, fg="yellow", err=True)


def _refuse(base: Source, candidate: Source, difference: str) -> NoReturn:
    raise DataError(f"{base.path} and {candidate.path} did not measure the same: {difference}; measure both alike")


def _common(base: Source, candidate: Source) -> list[str]:
    names = [name for name in base.samples if name in candidate.samples]
    if not names:
        has = [f"{one.path} has {', '.join(one.samples) or 'none'}" for one in (base, candidate)]
        raise DataError(f"no metric in common: {'; '.join(has)}")
    return names
