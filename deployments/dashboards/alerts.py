"""What wakes an operator. `python -m deployments.dashboards.build` writes them as Prometheus' rules."""

from dataclasses import dataclass
from typing import Literal

from cluster import metrics as m
from cluster.metrics import Metric
from deployments.dashboards.boards import ASKED
from deployments.dashboards.expressions import OVERFLOWS, gauge, or_zero, quantile, rate, share

WINDOW, HOUR, DAY = "5m", "1h", "1d"
ONE_ANSWER = "/v1/(recommend|rank)"
"""The routes of ASKED that answer one user: a batch takes the longer the more entries it has, and no user waits for it."""

EVENTS, HISTORIES = "/v1/events", "/v1/users/.+/history"
"""Between two erasures there may be minutes, in which a short window has no request: an alert of it would never last."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert fires once `expr` has held for `lasts`. `page`: users notice it now; `ticket`: it can wait until the morning."""

    name: str
    expr: str
    lasts: str
    severity: Literal["page", "ticket"]
    summary: str
    cure: str


def _yesterday(expr: str) -> str:
    return expr.replace(f"[{HOUR}]", f"[{HOUR}] offset {DAY}")


def _rate(metric: Metric, *by: str, window: str = WINDOW, **where: str) -> str:
    """By application: a small one beside a large one is judged by itself."""
    return rate(metric, "application", *by, window=window, **where)


def _both(one: str, other: str) -> str:
    """The sum of two rates, also of an application that has one of them alone."""
    return f"({one} + {other} or {one} or {other})"


def _not_stored(route: str, window: str) -> str:
    """The share of a route's requests that fail and are not refused."""
    failed = _rate(m.HTTP_REQUESTS, "route", window=window, route=route, status="5..")
    refused = _rate(m.REFUSALS, "route", window=window, route=route, status="503")
    return share(f"({failed} - {or_zero(refused, f'0 * {failed}')})", _rate(m.HTTP_REQUESTS, "route", window=window, route=route))


_DEGRADED = share(
    _both(_rate(m.ANSWERS, degraded="true"), _rate(m.RANKINGS, degraded="true")),
    _both(_rate(m.ANSWERS), _rate(m.RANKINGS)),
)
_ASKED_RATE = _rate(m.HTTP_REQUESTS, route=ASKED)
_FAILED_RATE = _rate(m.HTTP_REQUESTS, route=ASKED, status="5..")
_REFUSED_RATE = _rate(m.REFUSALS, route=ASKED, status="503")
_AT_DOORS_RATE = _rate(m.REFUSALS, route=f"{m.BY_PROXY}|{m.BY_DOOR}", status="503")
_ALL_RATE = or_zero(_rate(m.HTTP_REQUESTS), f"0 * {_AT_DOORS_RATE}")
_AT_DOORS = share(_AT_DOORS_RATE, f"({_AT_DOORS_RATE} + {_ALL_RATE})")
"""HAProxy and the ZeroMQ door refuse before it is known what is asked for, so that their share is one of all requests."""

_NEWEST, _OLDEST = (gauge(m.MODEL_VERSION, "application", how=how) for how in ("max", "min"))
_WANTED_NEWEST, _WANTED_OLDEST = (gauge(m.MODEL_WANTED, "application", how=how) for how in ("max", "min"))
_NOT_AS_WANTED = f"{_WANTED_NEWEST} != {_OLDEST} or {_WANTED_OLDEST} != {_NEWEST}"
"""Both sides are equal only where all gateways want one version and all serve it. One that cannot read which is wanted tells 0."""
_ENGINES = or_zero(gauge(m.BACKEND_LOADED, "application", stage="encoder"), f"0 * {_NEWEST}")
"""0 also where an application has gateways and no encoder: what a replica showed is gone 20 s after it."""

_FOLLOWED_RATE, _NOT_FOLLOWED_RATE = _rate(m.FOLLOWED, window=HOUR), _rate(m.NOT_FOLLOWED, window=HOUR)
_FOLLOWED_OR_0 = or_zero(_FOLLOWED_RATE, f"0 * {_NOT_FOLLOWED_RATE}")
_FOLLOWED = share(_FOLLOWED_OR_0, f"({_FOLLOWED_OR_0} + {or_zero(_NOT_FOLLOWED_RATE, f'0 * {_FOLLOWED_RATE}')})")
"""Nothing, and no 0, of an application without events."""

_LEFT_ALONE = gauge(m.CACHE_LEFT_ALONE, "application", how="max")
"""Of a cache that is left alone hardly a call is made that could break."""

_GONE = f"max by (application) (max_over_time({m.MODEL_VERSION.scraped}[{DAY}])) unless {_NEWEST}"
"""An application that had gateways within a day and has none."""

ALERTS = (
    Alert(
        "GenrecAnswersFail",
        f"({_FAILED_RATE} - {or_zero(_REFUSED_RATE, f'0 * {_FAILED_RATE}')}) / {_ASKED_RATE} > 0.01",
        "5m",
        "page",
        "More than 1 % of the requests to {{ $labels.application }} end in a 5xx that is no refusal for overload.",
        "An answer is no error because an engine is: look for `failed in a way` in the gateways' logs, and at GET /readyz.",
    ),
    Alert(
        "GenrecNoGateway",
        _GONE,
        "2m",
        "page",
        "No gateway of {{ $labels.application }} is seen any more.",
        "Requests are refused, or Prometheus cannot read the nodes: serve status. Silence it where the application was taken away.",
    ),
    Alert(
        "GenrecSlow",
        f"{quantile(m.HTTP_DURATION, 0.99, 'application', 'route', window=WINDOW, route=ONE_ANSWER, outcome='2xx')} > 1",
        "10m",
        "page",
        "The p99 of {{ $labels.application }}'s {{ $labels.route }} is {{ $value | humanizeDuration }}.",
        "The dashboard of the stages says which stage: raise max_replicas where its queue is long, switch an engine off that is slow.",
    ),
    Alert(
        "GenrecTurnsAway",
        f"{or_zero(share(_REFUSED_RATE, f'({_ASKED_RATE} > 0)'), f'0 * {_ALL_RATE}')} + {or_zero(_AT_DOORS, f'0 * {_ALL_RATE}')} > 0.05",
        "5m",
        "page",
        "More than 5 % of the requests to {{ $labels.application }} for recommendations and rankings find no place.",
        "The cluster is at its limit: raise max_replicas; if stages are idle, gateway.admission.max_concurrent or zeromq.max_concurrent.",
    ),
    Alert(
        "GenrecEventsFail",
        f"{_not_stored(EVENTS, WINDOW)} > 0.05 or {_not_stored(HISTORIES, HOUR)} > 0.05",
        "10m",
        "ticket",
        "More than 5 % of {{ $labels.application }}'s {{ $labels.route }} end in a 5xx that is no refusal for overload.",
        "Events are not stored, or users not erased: look for `the event store does not answer` in the gateways' logs.",
    ),
    Alert(
        "GenrecDegraded",
        f"{_DEGRADED} > 0.05",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of the answers and rankings of {{ $labels.application }} are degraded.",
        "An engine broke and another serves; GET /v1/backends says which and why.",
    ),
    Alert(
        "GenrecBreakerOpen",
        f"{gauge(m.BREAKER, 'application', 'stage', 'backend', how='max')} > 0",
        "5m",
        "ticket",
        "{{ $labels.backend }} of {{ $labels.application }}'s {{ $labels.stage }} has been out for five minutes on a replica at least.",
        "GET /v1/backends has its last error; POST /v1/backends/{stage}/{name}:disable ends the trials.",
    ),
    Alert(
        "GenrecNoEngine",
        f"{_ENGINES} == 0",
        "2m",
        "page",
        "No replica of the encoder of {{ $labels.application }} has an engine loaded, or there is none.",
        "Users get popular items. GET /v1/backends says why none loads.",
    ),
    Alert(
        "GenrecQueueLong",
        f"{quantile(m.BATCH_WAIT, 0.95, 'application', 'stage', window=WINDOW)} > 0.25",
        "10m",
        "ticket",
        "Requests wait long for a batch of {{ $labels.application }}'s {{ $labels.stage }}.",
        "More replicas of it, or smaller batches (batching.max_requests).",
    ),
    Alert(
        "GenrecRetriesRefused",
        f"{_rate(m.RETRIES_REFUSED, 'stage')} > 1",
        "5m",
        "ticket",
        "Replicas of {{ $labels.application }}'s {{ $labels.stage }} fail or stall so often that calls are not sent again.",
        "See which replicas: Ray's dashboard, and the log of the {{ $labels.stage }}.",
    ),
    Alert(
        "GenrecSharedCacheFails",
        f"{_rate(m.CACHE_FAILURES)} > 1 or {_LEFT_ALONE} > 0",
        "5m",
        "ticket",
        "Calls of {{ $labels.application }}'s shared cache break.",
        "Answers are computed instead, so that engines have more to do; see the cache actors, or Redis.",
    ),
    Alert(
        "GenrecGpuMemoryFull",
        f"{share(gauge(m.GPU_USED, 'gpu', 'replica', how='max'), gauge(m.GPU_MEMORY, 'gpu', 'replica', how='max'))} > 0.97",
        "10m",
        "ticket",
        "GPU {{ $labels.gpu }} has hardly any memory left.",
        "Lower what the engines may take: kv_cache_bytes of vllm, or state_bytes of the encoder's and ranker's engines.",
    ),
    Alert(
        "GenrecTwoVersions",
        _NOT_AS_WANTED,
        "30m",
        "ticket",
        "For half an hour gateways of {{ $labels.application }} have served another version than the promoted one, or cannot read which.",
        "See genrec models status for what cannot be loaded, and `the rollout stays as it is` in the logs for what cannot be read.",
    ),
    Alert(
        "GenrecUnknownItems",
        f"{share(_rate(m.ITEMS_UNKNOWN, window=HOUR), _rate(m.ITEMS_NAMED, window=HOUR))} > 0.2",
        "1h",
        "ticket",
        "{{ $value | humanizePercentage }} of the items in requests to {{ $labels.application }} are not in its catalogue.",
        "The shop has items that the model has not (genrec add-items, or train), or ids have changed their form on the way here.",
    ),
    Alert(
        "GenrecFollowedLess",
        f"{_FOLLOWED} < 0.7 * ({_yesterday(_FOLLOWED)}) and {_yesterday(_FOLLOWED_RATE)} > 0.05",
        "2h",
        "ticket",
        "Users follow recommendations of {{ $labels.application }} much less than at this time yesterday.",
        "Compare the model versions on the overview; genrec models rollback ends a trial or, without one, goes back to the version before.",
    ),
    Alert(
        "GenrecMetricsOverflow",
        OVERFLOWS,
        "5m",
        "ticket",
        "At {{ $labels.instance }} Ray serves no new series of {{ $value }} of genrec's metrics.",
        "What starts on that node counts in no alert by application: restart Ray there, once other nodes hold its replicas.",
    ),
)
