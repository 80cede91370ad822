"""The figures of a process on their way to Prometheus.

    add, set, observe -> sums, gauges and histograms -> hand_over, every second -> Ray, every 10 s -> its agent on the node -> Prometheus

Histograms are added up here and shown as gauges, one for each number that Prometheus has of a histogram, under its names. Ray's own would
cost its agent, of which a node has one, 8 to 10 microseconds for each observation: it records them again, at the middles of buckets.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import sleep
from typing import Any, NamedTuple, TypeAlias

from ray.serve import metrics as ray_metrics

from cluster.metrics import METRICS, Labels, Metric

HAND_OVER_EVERY_S = 1.0
ALL_AT_EVERY = 5
"""Unchanged gauges are set again every so many hand-overs: Ray's agent forgets a gauge after two of its intervals, 20 s."""
Series: TypeAlias = tuple[str, Labels]

logger = logging.getLogger("ray.serve")


class Gauge(NamedTuple):
    """One number of a histogram."""

    series: Series
    value: float


@dataclass(slots=True)
class Histogram:
    """The histogram of one series. `counts`: of each bucket by itself; the last one has no bound. Not for two threads at a time."""

    metric: Metric
    labels: Labels
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, metric: Metric, labels: Labels) -> "Histogram":
        return cls(metric, labels, [0] * (len(metric.buckets) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.metric.buckets, value)] += 1  # what lies on a bound is in the bucket below it
        self.total += value

    def copy(self) -> "Histogram":
        return Histogram(self.metric, self.labels, self.counts.copy(), self.total)

    def gauges(self) -> Iterator[Gauge]:
        """Bucket `le` counts all that is not above it. The last one comes first, so that a read in between finds none above the next.

        OpenTelemetry, in Ray's agent, serves 2,000 series of a name, those of replicas that are gone among them: nineteen of each histogram
        would use them up within a dozen restarts. So each bucket has a name of its own, by its underscores, of which the exporter to
        Prometheus leaves one.
        """
        name, so_far = self.metric.name, sum(self.counts)
        yield Gauge((f"{name}_count", self.labels), so_far)
        yield Gauge((f"{name}_sum", self.labels), self.total)
        bounds = [*map(str, map(float, self.metric.buckets)), "+Inf"]
        for place, bound in reversed([*enumerate(bounds)]):
            yield Gauge((f"{name}_{'_' * place}bucket", (*self.labels, ("le", bound))), so_far)
            so_far -= self.counts[place]


class RayMeter:
    """The meter of one process, for any of its threads; a second one's gauges would replace the first one's. Serve adds the labels
    `deployment`, `replica` and `application`.

    Figures are added up here, and a thread hands them to Ray: each call into Ray gives up the interpreter's lock, and an event loop that
    shares it with an engine's thread would wait up to milliseconds to have it back.
    """

    def __init__(self, ray: Any = ray_metrics) -> None:
        self._ray = ray
        self._lock = threading.Lock()
        self._sums: dict[Series, float] = {}
        self._set: dict[Series, float] = {}  # gauges since the last hand-over: one that is set no longer is handed over no longer
        self._seen: dict[Series, Histogram] = {}
        self._handed: dict[Series, float] = {}
        self._made: dict[str, Any] = {}
        self._failures: set[type[Exception]] = set()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        series = (metric.name, tuple(labels.items()))
        with self._lock:
            self._sums[series] = self._sums.get(series, 0.0) + amount

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        series = (metric.name, tuple([(label, labels[label]) for label in metric.labels]))
        with self._lock:
            if (seen := self._seen.get(series)) is None:
                seen = self._seen[series] = Histogram.empty(metric, series[1])
            seen.observe(value)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        with self._lock:
            self._set[metric.name, tuple(labels.items())] = value

    def hand_over_forever(self) -> None:
        for time in count(1):
            sleep(HAND_OVER_EVERY_S)
            self.hand_over(everything=time % ALL_AT_EVERY == 0)

    def hand_over(self, *, everything: bool = True) -> None:
        """Hand over to Ray the gauges that were set, the other figures that have changed and, with `everything`, those that have not. What
        Ray refuses is tried again, a gauge when it is set again.
        """
        with self._lock:
            sums, histograms = self._sums.copy(), [seen.copy() for seen in self._seen.values()]
            gauges, self._set = self._set, {}
        for series, total in sums.items():
            if total > self._handed.get(series, 0.0):  # Ray raises at 0
                self._count(series, total)
        for series, value in gauges.items():
            self._show(METRICS[series[0]], series, value)
        for histogram in histograms:
            for series, value in histogram.gauges():
                if everything or self._handed.get(series) != value:
                    self._show(histogram.metric, series, value)

    def _count(self, series: Series, total: float) -> None:
        name, labels = series
        with self._going_on(name):
            self._counter(METRICS[name]).inc(total - self._handed.get(series, 0.0), tags=_ascii(dict(labels)))
            self._handed[series] = total

    def _show(self, metric: Metric, series: Series, value: float) -> None:
        name, tags = series[0], dict(series[1])
        with self._going_on(name):
            self._gauge(name, metric, tuple(tags)).set(value, tags=_ascii(tags))
            self._handed[series] = value

    @contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Goes on past an error within the block, and logs the first of each kind."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, all the others are to be handed over
            if type(error) not in self._failures:
                logger.warning("Ray did not take the metric %s, and perhaps others; each is tried again: %r", name, error)
            self._failures.add(type(error))

    def _counter(self, metric: Metric) -> Any:
        if metric.name not in self._made:
            self._made[metric.name] = self._ray.Counter(metric.name, metric.help, metric.labels)
        return self._made[metric.name]

    def _gauge(self, name: str, metric: Metric, labels: tuple[str, ...]) -> Any:
        if name not in self._made:
            self._made[name] = self._ray.Gauge(name, metric.help, labels)
        return self._made[name]


def _ascii(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels in ASCII, as Ray requires; other characters are written as Python's escapes."""
    return {name: value if value.isascii() else value.encode("ascii", "backslashreplace").decode() for name, value in labels.items()}
