"""PromQL from declared metrics: a metric or a label that is not declared is refused here, rather than missing on a screen.

Rates are taken before sums, so that a replica's restart is not seen as a fall, and sums before percentiles, which cannot be added up.
"""

from cluster.errors import ConfigError
from cluster.metrics import Kind, Metric

WINDOW = "$__rate_interval"
"""A variable that Grafana fills in; alert rules give their own window."""
OF_SERVE = ("application", "deployment", "replica")
"""Labels that Ray Serve adds to every metric."""
OVERFLOWS = 'count by (instance) ({__name__=~"ray_genrec_.+", otel_metric_overflow="true"})'
"""How many of genrec's metrics have more series than Ray's agent on a node serves of a name. What is beyond goes into one series, which has
this label in place of the metric's own.
"""


def rate(metric: Metric, *by: str, window: str = WINDOW, **where: str) -> str:
    """How many a second, over all replicas. `where`: label -> a regular expression, negated where it begins with `!`."""
    end = "_count" if metric.kind is Kind.HISTOGRAM else ""
    if metric.kind is Kind.GAUGE:
        raise ConfigError(f"{metric.name} is a gauge, which has no rate")
    return f"sum{_by(metric, by)} (rate({metric.scraped}{end}{_where(metric, where)}[{window}]))"


def quantile(metric: Metric, share: float, *by: str, window: str = WINDOW, **where: str) -> str:
    """The quantile of a histogram over all replicas; `share`: 0 to 1."""
    if metric.kind is not Kind.HISTOGRAM:
        raise ConfigError(f"{metric.name} is a {metric.kind}; only histograms have quantiles")
    _by(metric, by)  # refuses what is not declared
    groups = ", ".join((*by, "le"))
    return f"histogram_quantile({share}, sum by ({groups}) (rate({metric.scraped}_bucket{_where(metric, where)}[{window}])))"


def gauge(metric: Metric, *by: str, how: str = "sum", **where: str) -> str:
    """A gauge's value over all replicas. `how`: sum, max, min or avg."""
    if metric.kind is not Kind.GAUGE:
        raise ConfigError(f"{metric.name} is a {metric.kind}, not a gauge")
    return f"{how}{_by(metric, by)} ({metric.scraped}{_where(metric, where)})"


def share(part: str, whole: str) -> str:
    """The share of one sum in another by the same labels, 0 to 1; without a value while either has never been counted."""
    return f"{part} / {whole}"


def or_zero(sum_: str, zero: str = "vector(0)") -> str:
    """The sum, or 0 where it has no series. For a sum by labels, `zero` has a series of zeros by the same labels."""
    return f"({sum_} or {zero})"


def _by(metric: Metric, labels: tuple[str, ...]) -> str:
    _check(metric, labels)
    return f" by ({', '.join(labels)})" if labels else ""


def _where(metric: Metric, where: dict[str, str]) -> str:
    _check(metric, where)
    conditions = [f'{label}{"!~" if said.startswith("!") else "=~"}"{said.removeprefix("!")}"' for label, said in where.items()]
    return f"{{{', '.join(conditions)}}}" if conditions else ""


def _check(metric: Metric, labels: tuple[str, ...] | dict[str, str]) -> None:
    if wrong := [label for label in labels if label not in (*metric.labels, *OF_SERVE)]:
        raise ConfigError(
            f"{metric.name} has no labels {wrong}; it has {', '.join(metric.labels) or 'none'}, and Serve's {', '.join(OF_SERVE)}"
        )
