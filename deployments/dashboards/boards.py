"""The panels of each dashboard. `python -m deployments.dashboards.build` writes the dashboards."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster import metrics as m
from cluster.metrics import Metric
from deployments.dashboards.expressions import gauge, quantile, rate, share

ASKED = "/v1/(recommend|recommend:batch|rank)"
"""The routes that engines answer."""
STORED = "/v1/(events|users/.+/history)"
"""The routes that store events, give them back and erase users."""


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: legend -> PromQL; `unit`: by Grafana's name; `help`: the text behind the panel's i."""

    title: str
    unit: str
    queries: Mapping[str, str]
    help: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """`rows`: title -> panels, which share the width."""

    uid: str
    title: str
    rows: Mapping[str, tuple[Panel, ...]]


def _percentiles(metric: Metric, *by: str, **where: str) -> dict[str, str]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return {f"p{percent} {legend}".strip(): quantile(metric, percent / 100, *by, **where) for percent in (50, 95, 99)}


def _hit_share(metric: Metric, *by: str, result: str = "hit") -> str:
    hits, lookups = rate(metric, *by, result=result), rate(metric, *by)
    return share(hits, lookups)


_GPU_MEMORY = share(gauge(m.GPU_USED, "gpu", "replica", how="max"), gauge(m.GPU_MEMORY, "gpu", "replica", how="max"))


OVERVIEW = Board(
    "genrec-overview",
    "genrec: overview",
    {
        "Requests": (
            Panel("Requests by route", "reqps", {"{{route}}": rate(m.HTTP_REQUESTS, "route")}),
            Panel("Answers by status", "reqps", {"{{status}}": rate(m.HTTP_REQUESTS, "status", route=ASKED)}),
            Panel("Events and histories by status", "reqps", {"{{status}}": rate(m.HTTP_REQUESTS, "status", route=STORED)}),
            Panel("Latency of what was answered", "s", _percentiles(m.HTTP_DURATION, "route", route=ASKED, outcome="2xx")),
            Panel("Clients that left", "reqps", {"{{route}}": rate(m.CLIENTS_GONE, "route")}),
        ),
        "Answers": (
            Panel("Where answers came from", "reqps", {"{{tier}}": rate(m.ANSWERS, "tier")}),
            Panel("Latency by tier, p99", "s", {"{{tier}}": quantile(m.ANSWER_DURATION, 0.99, "tier")}),
            Panel(
                "Degraded answers and rankings",
                "percentunit",
                {
                    "answers": share(rate(m.ANSWERS, degraded="true"), rate(m.ANSWERS)),
                    "rankings": share(rate(m.RANKINGS, degraded="true"), rate(m.RANKINGS)),
                },
            ),
            Panel("Items recommended, by model version", "cps", {"{{model_version}}": rate(m.RECOMMENDED, "model_version")}),
        ),
        "Admission": (
            Panel(
                "Places",
                "short",
                {"running": gauge(m.ADMISSION_RUNNING), "waiting": gauge(m.ADMISSION_WAITING), "places": gauge(m.ADMISSION_PLACES)},
                "The limit adapts to how fast the stages answer; a request that waits too long is refused.",
            ),
            Panel("Wait for a place", "s", _percentiles(m.ADMISSION_WAIT)),
            Panel(
                "Turned away",
                "reqps",
                {"{{status}}": rate(m.REFUSALS, "status")},
                "503: overload, with what HAProxy and the ZeroMQ door refuse then; 429: a tenant's rate; 401, 403: keys.",
            ),
        ),
        "Quality": (
            Panel(
                "Events on recommended items",
                "percentunit",
                {"followed": share(rate(m.FOLLOWED), f"({rate(m.FOLLOWED)} + {rate(m.NOT_FOLLOWED)})")},
                "Of the events of users that had a recommendation of this gateway in the last half hour; falls as gateways are added.",
            ),
            Panel(
                "Followed, of all items shown",
                "percentunit",
                {"{{model_version}}": share(rate(m.FOLLOWED, "model_version"), rate(m.RECOMMENDED, "model_version"))},
                "Compares model versions. Events that reach another gateway than their recommendations are missing: the level says little.",
            ),
            Panel("Unknown items in requests", "percentunit", {"unknown": share(rate(m.ITEMS_UNKNOWN), rate(m.ITEMS_NAMED))}),
            Panel("Users without known behaviours", "percentunit", {"unknown": share(rate(m.USERS_UNKNOWN), rate(m.ANSWERS))}),
        ),
    },
)

STAGES = Board(
    "genrec-stages",
    "genrec: stages and engines",
    {
        "Stages": (
            Panel("Latency by stage and engine, p50", "s", {"{{stage}} {{backend}}": quantile(m.STAGE_DURATION, 0.5, "stage", "backend")}),
            Panel("p95", "s", {"{{stage}} {{backend}}": quantile(m.STAGE_DURATION, 0.95, "stage", "backend")}),
            Panel("p99", "s", {"{{stage}} {{backend}}": quantile(m.STAGE_DURATION, 0.99, "stage", "backend")}),
            Panel(
                "Engines passed over",
                "cps",
                {"{{stage}}: {{backend}} {{reason}}": rate(m.FALLBACKS, "stage", "backend", "reason")},
                "unavailable: it cannot run here (GET /v1/backends says why); broken: it failed lately; late: no time was left.",
            ),
        ),
        "Engines": (
            Panel("Requests", "reqps", {"{{stage}} {{backend}}": rate(m.BACKEND_REQUESTS, "stage", "backend")}),
            Panel("Requests they broke on", "reqps", {"{{stage}} {{backend}}": rate(m.BACKEND_FAILURES, "stage", "backend")}),
            Panel("Taken over from others", "reqps", {"{{stage}} {{backend}}": rate(m.BACKEND_FALLBACKS, "stage", "backend")}),
            Panel(
                "Breakers",
                "short",
                {"{{stage}} {{backend}}": gauge(m.BREAKER, "stage", "backend", how="max")},
                "0 closed, 1 half-open, 2 open; that of the worst replica.",
            ),
            Panel("Replicas that have it loaded", "short", {"{{stage}} {{backend}}": gauge(m.BACKEND_LOADED, "stage", "backend")}),
        ),
        "Queues and batches": (
            Panel("Waiting", "short", {"{{stage}} {{backend}}": gauge(m.QUEUE_WAITING, "stage", "backend")}),
            Panel("Running in engines with queues of their own", "short", {"{{backend}}": gauge(m.QUEUE_RUNNING, "backend")}),
            Panel("Wait for a batch", "s", _percentiles(m.BATCH_WAIT, "stage")),
            Panel("Batch size", "short", _percentiles(m.BATCH_SIZE, "stage")),
            Panel("Padding", "percentunit", _percentiles(m.BATCH_PADDING, "stage")),
        ),
        "Calls of stages": (
            Panel("First calls and copies", "reqps", {"{{stage}} {{call}}": rate(m.STAGE_CALLS, "stage", "call")}),
            Panel("Hedges", "reqps", {"{{stage}}": rate(m.HEDGES, "stage")}),
            Panel(
                "Copies that were refused", "reqps", {"{{stage}}": rate(m.RETRIES_REFUSED, "stage")}, "The budget: a fifth of the calls."
            ),
        ),
        "GPUs": (
            Panel(
                "Memory in use",
                "percentunit",
                {"gpu {{gpu}}": f"max by (gpu) ({_GPU_MEMORY})"},  # of each node's card by itself: they may be of different sizes
            ),
            Panel("Busy", "percentunit", {"gpu {{gpu}}": gauge(m.GPU_BUSY, "gpu", how="max")}),
            Panel("Key-value cache", "percentunit", {"{{stage}} {{backend}}": gauge(m.KV_CACHE_USAGE, "stage", "backend", how="max")}),
        ),
    },
)

CACHE_AND_STATE = Board(
    "genrec-cache-and-state",
    "genrec: caches and kept states",
    {
        "Kept answers": (
            Panel("Hits in the gateways' memory", "percentunit", {"hits": _hit_share(m.CACHE_LOOKUPS, result="hit|stale")}),
            Panel("Lookups", "ops", {"{{result}}": rate(m.CACHE_LOOKUPS, "result")}),
            Panel("Answers", "ops", {"{{work}}": rate(m.CACHE_WORK, "work")}),
            Panel("Room made", "ops", {"evictions": rate(m.CACHE_EVICTIONS)}),
            Panel("Failed calls of the shared cache", "ops", {"failures": rate(m.CACHE_FAILURES)}),
            Panel("Parts of it that are left alone", "short", {"at one gateway": gauge(m.CACHE_LEFT_ALONE, how="max")}),
        ),
        "What they hold": (
            Panel(
                "Answers kept",
                "short",
                {"all gateways": gauge(m.CACHE_ENTRIES, tier="l1"), "shared": gauge(m.CACHE_ENTRIES, how="max", tier="l2")},
            ),
            Panel(
                "Bytes", "bytes", {"all gateways": gauge(m.CACHE_BYTES, tier="l1"), "shared": gauge(m.CACHE_BYTES, how="max", tier="l2")}
            ),
        ),
        "Kept states": (
            Panel("Histories found", "percentunit", {"{{stage}} {{backend}}": _hit_share(m.STATE_LOOKUPS, "stage", "backend")}),
            Panel(
                "Rows found",
                "percentunit",
                {"{{stage}} {{backend}}": share(rate(m.STATE_ROWS_FOUND, "stage", "backend"), rate(m.STATE_ROWS, "stage", "backend"))},
            ),
            Panel("Users", "short", {"{{stage}} {{backend}}": gauge(m.STATE_USERS, "stage", "backend")}),
            Panel("Bytes", "bytes", {"{{stage}} {{backend}}": gauge(m.STATE_BYTES, "stage", "backend")}),
            Panel(
                "Evicted, and not taken in",
                "ops",
                {
                    "evicted {{stage}} {{backend}}": rate(m.STATE_EVICTIONS, "stage", "backend"),
                    "rejected {{stage}} {{backend}}": rate(m.STATE_REJECTIONS, "stage", "backend"),
                },
            ),
        ),
        "Memory used again": (
            Panel("Buffers found", "percentunit", {"{{stage}} {{backend}}": _hit_share(m.BUFFERS, "stage", "backend")}),
            Panel("Buffers, bytes", "bytes", {"{{stage}} {{backend}}": gauge(m.BUFFER_BYTES, "stage", "backend")}),
            Panel("Logits found", "percentunit", {"{{stage}} {{backend}}": _hit_share(m.LOGITS, "stage", "backend")}),
        ),
    },
)

BOARDS = {"overview": OVERVIEW, "stages": STAGES, "cache_and_state": CACHE_AND_STATE}
