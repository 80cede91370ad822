"""Figures of a run against an endpoint: what became of each request -> samples and figures -> which targets are met."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from cluster.errors import ConfigError, UnknownChoice
from cluster.regression import LEAST_SAMPLES
from deployments.cli.bench_processes import Usage

AT_LEAST = ("requests_per_s", "items_per_s")
AT_MOST = (
    *("p50_ms", "p95_ms", "p99_ms", "first_item_p50_ms", "first_item_p95_ms", "first_item_p99_ms", "per_item_ms"),
    *("errors", "degraded", "resident_mib", "peak_resident_mib", "processor_ms", "processor_cores"),
)
"""The figures that a target may name: those of AT_LEAST must be as large as the limit or larger, those of AT_MOST as small or smaller."""
FRESH = ("computed", "none")
"""Tiers of answers that were computed for the request: the stages in other answers are of an earlier computation."""


@dataclass(frozen=True, slots=True)
class Served:
    """A stage of an answer: its backend, and how long it took."""

    stage: str
    backend: str
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer that are measured. `tier`: where it came from, "none" where no kept answer was looked for."""

    items: int
    degraded: bool
    tier: str
    stages: tuple[Served, ...]
    model_version: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome of one request, `duration_ms` after it was sent: an answer, or the problem in its place.

    `first_item_ms`: of a streamed answer, how long after the request was sent its first item came.
    """

    duration_ms: float
    answer: Answer | None = None
    problem: str = ""
    first_item_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A look at the server while plain requests are sent, `at_s` by a clock that goes on: `answered` of them so far, and what its processes
    use, None where that is not known.
    """

    at_s: float
    answered: int
    usage: Usage | None = None


@dataclass(frozen=True)
class Run:
    """The plain requests, which took `seconds` all together, and after them those with streamed answers. `readings`: the first as the plain
    ones began, the last as they ended.
    """

    plain: Sequence[Seen]
    seconds: float
    streamed: Sequence[Seen] = ()
    readings: Sequence[Reading] = ()


@dataclass(frozen=True)
class Figures:
    """Milliseconds are of answered requests, None where there were none. `per_item_ms`: the median of a request's time over its items.

    `errors` and `degraded` are of the `requests`, plain and streamed ones; `problems` says which errors. `hits`: each tier's share of the
    plain answers.
    `stage_ms`: the mean of each stage, in answers that were computed; `served_by`: how often which backend served which.
    Of the server's processes, None where that is not known: `resident_mib` at the end, pages that several share counted in each, and
    `peak_resident_mib`, the most that was seen; `processor_ms`: processor time an answer; `processor_cores`: processor time a second.
    """

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    first_item_p50_ms: float | None
    first_item_p95_ms: float | None
    first_item_p99_ms: float | None
    per_item_ms: float | None
    requests_per_s: float
    items_per_s: float
    requests: int
    errors: int
    degraded: int
    problems: dict[str, int]
    hits: dict[str, float]
    stage_ms: dict[str, float]
    served_by: dict[str, int]
    resident_mib: float | None = None
    peak_resident_mib: float | None = None
    processor_ms: float | None = None
    processor_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that should be within a `limit`; one that could not be measured (None) is not."""

    limit: float
    measured: float | None
    met: bool


def samples_of(run: Run) -> dict[str, list[float]]:
    """Samples by metric, to a thousandth, in the order in which requests ended; a metric without samples is left out.

    Those of readings are there where there are enough to compare: `between_answers_ms`, the mean time from one answer to the next between
    two readings, which is less where more requests are answered a second; `processor_ms` of an answer; and `resident_mib`.
    """
    answered = [(seen, seen.answer) for seen in run.plain if seen.answer]
    metrics: dict[str, list[float]] = {
        "end_to_end_ms": [seen.duration_ms for seen, _ in answered],
        "first_item_ms": [seen.first_item_ms for seen in run.streamed if seen.answer and seen.first_item_ms is not None],
        "per_item_ms": [seen.duration_ms / answer.items for seen, answer in answered if answer.items],
    }
    read = _samples_of_readings(run.readings)
    metrics |= {name: values for name, values in read.items() if len(values) >= LEAST_SAMPLES and np.median(values) > 0}
    return {name: [round(value, 3) for value in values] for name, values in metrics.items() if values}


def _samples_of_readings(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Of the times between readings: one by which nothing was answered is passed over, and what was used until then counts to the answers
    of the next one. `resident_mib`: of each reading.
    """
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for before, after in pairwise(_with_news(readings)):
        answers = after.answered - before.answered
        samples["between_answers_ms"].append((after.at_s - before.at_s) * 1e3 / answers)
        if before.usage and after.usage:
            samples["processor_ms"].append((after.usage.processor_s - before.usage.processor_s) * 1e3 / answers)
    samples["resident_mib"] = [reading.usage.resident_mib for reading in readings if reading.usage]
    return samples


def _with_news(readings: Sequence[Reading]) -> Iterator[Reading]:
    """The first reading, and each by which more was answered than by the one before."""
    answered = -1
    for reading in readings:
        if reading.answered > answered:
            answered = reading.answered
            yield reading


def figures_of(run: Run) -> Figures:
    samples = samples_of(run)
    answers = [seen.answer for seen in run.plain if seen.answer]
    everything = [*run.plain, *run.streamed]
    whole, first = samples.get("end_to_end_ms", []), samples.get("first_item_ms", [])
    looks = [reading.usage for reading in run.readings if reading.usage]
    processor_s = looks[-1].processor_s - looks[0].processor_s if looks[1:] else None
    return Figures(
        p50_ms=_percentile(whole, 50),
        p95_ms=_percentile(whole, 95),
        p99_ms=_percentile(whole, 99),
        first_item_p50_ms=_percentile(first, 50),
        first_item_p95_ms=_percentile(first, 95),
        first_item_p99_ms=_percentile(first, 99),
        per_item_ms=_percentile(samples.get("per_item_ms", []), 50),
        requests_per_s=_rate(len(answers), run.seconds),
        items_per_s=_rate(sum(answer.items for answer in answers), run.seconds),
        requests=len(everything),
        errors=sum(1 for seen in everything if seen.answer is None),
        degraded=sum(1 for seen in everything if seen.answer and seen.answer.degraded),
        problems=dict(Counter(seen.problem for seen in everything if seen.answer is None)),
        hits={tier: round(count / len(answers), 4) for tier, count in Counter(answer.tier for answer in answers).most_common()},
        stage_ms=_stage_means(answers),
        served_by=dict(Counter(f"{one.stage}={one.backend}" for answer in answers for one in answer.stages if answer.tier in FRESH)),
        resident_mib=looks[-1].resident_mib if looks else None,
        peak_resident_mib=max((look.resident_mib for look in looks), default=None),
        processor_ms=None if processor_s is None or not answers else round(processor_s * 1e3 / len(answers), 3),
        processor_cores=None if processor_s is None else _rate(processor_s, run.seconds),
    )


def parse_targets(texts: Iterable[str]) -> dict[str, float]:
    """``["p99_ms=50,errors=0"]`` -> {"p99_ms": 50.0, "errors": 0.0}. Raises ConfigError, UnknownChoice."""
    targets = {}
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        name, _, limit = (side.strip() for side in part.partition("="))
        if name not in AT_LEAST + AT_MOST:
            raise UnknownChoice("target", name, AT_LEAST + AT_MOST)
        targets[name] = _number(part, limit)
    return targets


def check_targets(figures: Figures, targets: Mapping[str, float]) -> dict[str, Target]:
    """The targets of `parse_targets` by name, each with its measured figure."""
    measured: dict[str, float | None] = {name: asdict(figures)[name] for name in targets}
    return {name: Target(limit, measured[name], _met(name, measured[name], limit)) for name, limit in targets.items()}


def _met(name: str, measured: float | None, limit: float) -> bool:
    if measured is None:
        return False
    return measured >= limit if name in AT_LEAST else measured <= limit


def _number(part: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"target {part!r} has no limit that is 0 or more; write it as in p99_ms=50,errors=0")
    return number


def _percentile(values: Sequence[float], q: float) -> float | None:
    return round(float(np.percentile(values, q)), 3) if values else None


def _rate(count: float, seconds: float) -> float:
    return round(count / max(1e-9, seconds), 2)


def _stage_means(answers: Iterable[Answer]) -> dict[str, float]:
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for one in answer.stages if answer.tier in FRESH else ():
            durations[one.stage].append(one.duration_ms)
    return {stage: round(sum(values) / len(values), 3) for stage, values in durations.items()}
