"""Every metric there is: its name, what it counts, by which labels. Code that records one takes it from here, and so do the dashboards.

    genrec_<thing>_<unit>        base units; `_total` on counters
    ray_genrec_<thing>_<unit>    as Ray's agent serves it on each node, with more labels: deployment, replica, application, WorkerId ...

No label holds what users or customers bring in: no user, no tenant, no item, no path but that of a route. Percentiles come from buckets,
added up over replicas (`histogram_quantile`); averages from `_sum` and `_count`, which are exact.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from cluster.errors import ConfigError

UNITS = ("seconds", "bytes", "ratio", "requests", "items", "users", "entries", "places", "state", "number", "info")
"""One of these ends the name of a gauge or a histogram."""
RESERVED = frozenset({"deployment", "replica", "application", "le", "quantile"})
"""Labels that Serve or Prometheus gives itself."""
_NAME, _LABEL = re.compile(r"genrec(_[a-z0-9]+)+"), re.compile(r"[a-z][a-z0-9_]*")


class Kind(StrEnum):
    """Prometheus's kinds of metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`buckets`: a histogram's upper bounds, ascending. Raises ConfigError at a declaration that Prometheus or Ray would not take."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"metric {self.name!r} is not called genrec_<thing>_<unit>, in small letters")
        if self.name.endswith("_total") is not (self.kind is Kind.COUNTER):
            raise ConfigError(f"metric {self.name} is a {self.kind}; counters end with _total, and nothing else does")
        if self.kind is not Kind.COUNTER and not self.name.endswith(UNITS):
            raise ConfigError(f"metric {self.name} ends with no unit; choose from {', '.join(UNITS)}")
        if wrong := [label for label in self.labels if not _LABEL.fullmatch(label) or label in RESERVED]:
            raise ConfigError(f"metric {self.name} has labels {wrong}, which are no names or are taken ({', '.join(sorted(RESERVED))})")
        if bool(self.buckets) is not (self.kind is Kind.HISTOGRAM) or list(self.buckets) != sorted(set(self.buckets)):
            raise ConfigError(
                f"metric {self.name} is a {self.kind} with buckets {self.buckets}; histograms have some, ascending, others none"
            )

    @property
    def scraped(self) -> str:
        """The metric's name in Prometheus."""
        return f"ray_{self.name}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the metric's series in a scrape."""
        ends = ("_bucket", "_count", "_sum") if self.kind is Kind.HISTOGRAM else ("",)
        return tuple(self.scraped + end for end in ends)


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, name, help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> Metric:
    return Metric(Kind.GAUGE, name, help_, labels)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, name, help_, labels, buckets)


SECONDS = (0.001, 0.002, 0.004, 0.007, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0)
"""Buckets for answers and stages. The deadlines of the default configuration lie on bounds."""
SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
POWERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)

# ---- the HTTP interface
HTTP_REQUESTS = _counter(
    "genrec_http_requests_total",
    "HTTP requests that gateways answered, refusals among them, and at the ZeroMQ door those that none answered; a stream that broke has "
    "the status of its problem, 504 where it was late.",
    "route",
    "status",
)
HTTP_DURATION = _histogram(
    "genrec_http_request_duration_seconds", "From a request's arrival to the last byte of its answer.", SECONDS, "route", "outcome"
)
CLIENTS_GONE = _counter("genrec_http_clients_gone_total", "Requests whose clients left before the answer began.", "route")

# ---- admission
ADMISSION_RUNNING = _gauge("genrec_admission_running_requests", "Requests that have a place.")
ADMISSION_WAITING = _gauge("genrec_admission_waiting_requests", "Requests that wait for a place.")
ADMISSION_PLACES = _gauge("genrec_admission_limit_places", "Requests that may run at a time, as the adaptive limit has it.")
ADMISSION_WAIT = _histogram("genrec_admission_wait_seconds", "How long requests that got a place had waited for it.", SHORT_SECONDS)
REFUSALS = _counter(
    "genrec_admission_refusals_total",
    "Requests turned away, by HTTP status and route; what HAProxy turned away has the route `proxy`, what the ZeroMQ door did `zeromq`.",
    "route",
    "status",
)
BY_PROXY, BY_DOOR = "proxy", "zeromq"
"""The routes of what HAProxy and the ZeroMQ door refused in the gateways' place."""

# ---- answers
ANSWERS = _counter(
    "genrec_answers_total",
    "Recommendations; tier: l1, l2, joined, computed, or none where no cache was looked at.",
    "tier",
    "degraded",
)
RANKINGS = _counter("genrec_rankings_total", "Rankings of given candidates.", "degraded")
ANSWER_DURATION = _histogram("genrec_answer_duration_seconds", "How long answers took the pipeline; not streams.", SECONDS, "tier")
STAGE_DURATION = _histogram(
    "genrec_stage_duration_seconds",
    "A stage as its report has it, with the time preferred backends took to fail.",
    SECONDS,
    "stage",
    "backend",
)
FALLBACKS = _counter(
    "genrec_fallbacks_total", "Backends passed over in computed answers; reason: broken, late or unavailable.", "stage", "backend", "reason"
)

# ---- between gateways and stages
STAGE_CALLS = _counter("genrec_stage_calls_total", "What a gateway asked of a stage's replicas: first calls and copies.", "stage", "call")
HEDGES = _counter("genrec_stage_hedges_total", "Copies sent because the first call was slow.", "stage")
RETRIES_REFUSED = _counter("genrec_stage_retries_refused_total", "Copies that the retry budget did not grant.", "stage")

# ---- backends and their queues
BACKEND_REQUESTS = _counter("genrec_backend_requests_total", "Requests a backend was asked.", "stage", "backend")
BACKEND_FAILURES = _counter("genrec_backend_failures_total", "Requests a backend broke on.", "stage", "backend")
BACKEND_FALLBACKS = _counter(
    "genrec_backend_fallbacks_total", "Requests a backend answered after a preferred one was passed over.", "stage", "backend"
)
BACKEND_LOADED = _gauge("genrec_backend_loaded_state", "1 where a backend is loaded, 0 where not.", "stage", "backend")
BREAKER = _gauge("genrec_backend_breaker_state", "0 closed, 1 half-open, 2 open.", "stage", "backend")
QUEUE_WAITING = _gauge(
    "genrec_queue_waiting_requests", "What waits for an engine; of generators in paths; backend `batches`: for a batch.", "stage", "backend"
)
QUEUE_RUNNING = _gauge("genrec_queue_running_requests", "What an engine with a queue of its own (vLLM) computes.", "stage", "backend")
KV_CACHE_USAGE = _gauge("genrec_kv_cache_usage_ratio", "How full an engine's key-value cache is.", "stage", "backend")
BATCH_SIZE = _histogram("genrec_batch_size_requests", "Requests in one batch.", POWERS, "stage")
BATCH_PADDING = _histogram(
    "genrec_batch_padding_ratio", "Share of a batch's rows that is padding; not of the ranker, which pads none.", SHARES, "stage"
)
BATCH_WAIT = _histogram("genrec_batch_wait_seconds", "How long a request waited for its batch.", SHORT_SECONDS, "stage")

# ---- what is kept of users
STATE_LOOKUPS = _counter(
    "genrec_state_lookups_total", "Histories looked up among kept states; result: hit or miss.", "stage", "backend", "result"
)
STATE_ROWS = _counter("genrec_state_rows_total", "Rows of histories or prompts that were looked up.", "stage", "backend")
STATE_ROWS_FOUND = _counter("genrec_state_rows_found_total", "Rows looked up that were kept.", "stage", "backend")
STATE_EVICTIONS = _counter("genrec_state_evictions_total", "Users or leaves that made room for others.", "stage", "backend")
STATE_REJECTIONS = _counter("genrec_state_rejections_total", "States that found no room.", "stage", "backend")
STATE_USERS = _gauge("genrec_state_kept_users", "Users that a backend keeps something of.", "stage", "backend")
STATE_BYTES = _gauge("genrec_state_used_bytes", "Memory of what a backend keeps of users.", "stage", "backend")
BUFFERS = _counter(
    "genrec_buffer_requests_total",
    "Arrays asked of the buffer pool; result: hit, or miss where memory was made.",
    "stage",
    "backend",
    "result",
)
BUFFER_BYTES = _gauge("genrec_buffer_held_bytes", "Memory that the buffer pool holds.", "stage", "backend")
LOGITS = _counter("genrec_logits_lookups_total", "Prompts looked up in the decoder's cache of logits.", "stage", "backend", "result")

# ---- kept answers. The second tier is every gateway's: what it holds is to be read with max, not added up.
CACHE_LOOKUPS = _counter("genrec_cache_lookups_total", "Lookups in a gateway's own memory; result: hit, stale or miss.", "result")
CACHE_WORK = _counter(
    "genrec_cache_answers_total", "Answers by what the cache made of them: computed, joined, refreshed or dropped.", "work"
)
CACHE_EVICTIONS = _counter("genrec_cache_evictions_total", "Answers in a gateway's memory that made room for others.")
CACHE_FAILURES = _counter(
    "genrec_cache_failures_total", "Calls of the shared cache that broke or took too long, and values that could not be encoded or read."
)
CACHE_LEFT_ALONE = _gauge(
    "genrec_cache_left_alone_number", "Cache actors, or the Redis, that a gateway does not ask now, as its last calls there have failed."
)
CACHE_ENTRIES = _gauge("genrec_cache_kept_entries", "Answers that a tier holds.", "tier")
CACHE_BYTES = _gauge("genrec_cache_used_bytes", "Memory of the answers that a tier holds.", "tier")

# ---- the model, and how good it is
MODEL_VERSION = _gauge("genrec_model_version_number", "The version that serves users outside of trials.")
MODEL_WANTED = _gauge(
    "genrec_model_wanted_version_number",
    "The version that is to serve users outside of trials: the promoted one, or the configured `version`; it serves once all replicas can."
    " 0 while a gateway cannot read which that is.",
)
RECOMMENDED = _counter("genrec_recommended_items_total", "Items in answers.", "model_version")
FOLLOWED = _counter(
    "genrec_followed_items_total",
    "Events on an item that this gateway had recommended to that user a short while ago.",
    "action",
    "model_version",
)
NOT_FOLLOWED = _counter(
    "genrec_not_followed_items_total", "Events of users with recommendations remembered here, on other items.", "action"
)
ITEMS_NAMED = _counter(
    "genrec_request_items_total", "Items named in requests as behaviours, new events, candidates or in lists, each once a request."
)
ITEMS_UNKNOWN = _counter("genrec_request_unknown_items_total", "Items named that the catalogue does not hold.")
USERS_UNKNOWN = _counter("genrec_unknown_users_total", "Answers to users without a history, or without a known item in it.")

# ---- GPUs, by NVML, of the machine that a stage's replica runs on: several replicas of a machine report the same ones
GPU_USED = _gauge("genrec_gpu_memory_used_bytes", "Memory of a GPU in use, by any process.", "gpu")
GPU_MEMORY = _gauge("genrec_gpu_memory_bytes", "Memory that a GPU has.", "gpu")
GPU_BUSY = _gauge("genrec_gpu_busy_ratio", "Share of the last moment in which a GPU ran a kernel.", "gpu")

METRICS: Mapping[str, Metric] = {value.name: value for value in list(globals().values()) if isinstance(value, Metric)}
"""All of them, by name."""


class Meter(Protocol):
    """Where metrics go. Each call gives all labels that the metric declares, and no other."""

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None: ...
    def set(self, metric: Metric, value: float, **labels: str) -> None: ...
    def observe(self, metric: Metric, value: float, **labels: str) -> None: ...


class Silent:
    """Keeps nothing: for processes that Prometheus does not scrape."""

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None: ...
    def set(self, metric: Metric, value: float, **labels: str) -> None: ...
    def observe(self, metric: Metric, value: float, **labels: str) -> None: ...


SILENT: Meter = Silent()
Labels: TypeAlias = tuple[tuple[str, str], ...]


class Totals:
    """Counters fed from totals that are counted elsewhere and read now and then. A total that has become less began anew at 0."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last: dict[tuple[str, str, Labels], float] = {}

    def count(self, metric: Metric, total: float, *, source: str = "", **labels: str) -> None:
        """Count what was added to `total` since the last call. `source` tells apart totals that are counted together."""
        key = (metric.name, source, tuple(sorted(labels.items())))
        before = self._last.get(key, 0.0)
        self._last[key] = total
        if (more := total - before if total >= before else total) > 0:
            self._meter.add(metric, more, **labels)
