"""A meter whose figures a test reads."""

from collections import defaultdict
from collections.abc import Mapping

from cluster.errors import ConfigError
from cluster.metrics import METRICS, Kind, Labels, Metric


class Noted:
    """Keeps everything in this process. Raises ConfigError at a call that does not fit the declaration."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, Labels], float] = defaultdict(float)
        self.values: dict[tuple[str, Labels], float] = {}
        self.seen: dict[tuple[str, Labels], list[float]] = {}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.sums[_series(metric, Kind.COUNTER, labels)] += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self.values[_series(metric, Kind.GAUGE, labels)] = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        self.seen.setdefault(_series(metric, Kind.HISTOGRAM, labels), []).append(value)

    def total(self, metric: Metric, **labels: str) -> float:
        """A counter's sum over all series that have these labels, among others."""
        return sum(amount for (name, given), amount in self.sums.items() if name == metric.name and labels.items() <= dict(given).items())


def _series(metric: Metric, kind: Kind, labels: Mapping[str, str]) -> tuple[str, Labels]:
    if METRICS.get(metric.name) is not metric or metric.kind is not kind:
        raise ConfigError(f"{metric.name} is recorded as a {kind}; declare it as one in cluster/metrics.py")
    if labels.keys() != set(metric.labels):
        raise ConfigError(f"{metric.name} is recorded with labels {sorted(labels)}; it has {sorted(metric.labels)}")
    return metric.name, tuple(sorted(labels.items()))
