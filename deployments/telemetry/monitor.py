"""What `genrec top` shows of a service: the figures of two looks at it, and those beyond the thresholds. Pure: time is passed in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.fleet.board import LOADING
from deployments.http.event_messages import CacheOut
from deployments.http.messages import BackendOut, BackendsOut, GatewayOut, StageOperationOut
from deployments.http.models import ModelsOut

BUSY_CALLS = 20
"""With fewer calls between two looks, no share of failures is judged: one failure of three says little."""
OVERLOAD = (429, 503)


@dataclass(frozen=True, slots=True)
class Look:
    """The service's figures at one time (seconds); the gateway's are those of the replica that answered."""

    at: float
    backends: BackendsOut
    gateway: GatewayOut
    cache: CacheOut
    models: ModelsOut


@dataclass(frozen=True)
class Thresholds:
    """The limits beyond which something is amiss. `least_hit_rate` None: any hit rate is well."""

    p99_ms: float = 1000.0
    failed_share: float = 0.01
    refused_per_s: float = 1.0
    least_hit_rate: float | None = None
    events_failed_share: float = 0.05


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is amiss, since when."""

    subject: str
    problem: str
    since: float


def problems_of(before: Look, now: Look, limits: Thresholds) -> Iterator[tuple[str, str]]:
    """(subject, problem) for everything that is amiss."""
    yield from _of_encoder(_stage_of(now, "encoder"))  # the other stages may be scaled to zero
    for stage in now.backends.stages:
        earlier = {one.name: one for one in _stage_of(before, stage.stage).backends}
        for backend in filter(_is_asked, stage.backends):
            yield from _of_backend(stage.stage, earlier.get(backend.name), backend, limits)
    refused = refused_per_s(before, now)
    if refused > limits.refused_per_s:
        yield "gateway", f"turns {refused:.1f} requests a second away; it has {now.gateway.places} places"
    yield from _of_events(before.gateway, now.gateway, limits)
    for tier in now.cache.tiers:
        rate = tier.recent_hit_rate
        if limits.least_hit_rate is not None and rate is not None and rate < limits.least_hit_rate:
            yield f"cache {tier.tier}", f"hits {rate:.0%}, less than {limits.least_hit_rate:.0%}"
    for version in now.models.versions:
        obstacles = [why for why in version.obstacles if why != LOADING]
        if version.role and obstacles:
            yield f"version {version.version}", "cannot be served everywhere: " + "; ".join(obstacles)


def refused_per_s(before: Look, now: Look) -> float:
    """Requests a second that were turned away for want of room, by HAProxy too, or beyond a rate; 0 where another gateway has answered
    than before, as each counts its own.
    """
    first, last = (sum(one.gateway.refused.get(status, 0) for status in OVERLOAD) for one in (before, now))
    seconds = now.at - before.at
    return (last - first) / seconds if before.gateway.gateway == now.gateway.gateway and seconds > 0 else 0.0


class Alerts:
    """Remembers since when something has been amiss; tells it once it has been so for `hold_s`."""

    def __init__(self, hold_s: float = 0.0) -> None:
        self._hold_s = hold_s
        self._since: dict[str, float] = {}

    def update(self, now: float, amiss: Mapping[str, str]) -> list[Alert]:
        """The alerts at `now`. `amiss`: subject -> problem; subjects that are not in it are well again."""
        self._since = {subject: self._since.get(subject, now) for subject in amiss}
        return [Alert(subject, amiss[subject], since) for subject, since in self._since.items() if now - since >= self._hold_s]


def _of_encoder(stage: StageOperationOut) -> Iterator[tuple[str, str]]:
    if not stage.replicas:
        yield stage.stage, "no replica has reported lately"
    elif not any(one.enabled and one.available_on for one in stage.backends):
        yield stage.stage, "no engine can serve it: " + "; ".join(stage.explanations)


def _is_asked(backend: BackendOut) -> bool:
    """Whether requests go to the backend at all. One that is switched off or left out gets no trial and no call, so that its breaker and
    its p99 stay as they were.
    """
    return backend.enabled and backend.rank is not None


def _of_backend(stage: str, before: BackendOut | None, now: BackendOut, limits: Thresholds) -> Iterator[tuple[str, str]]:
    subject = f"{stage} {now.name}"
    out = sum(count for state, count in now.breakers.items() if state != "closed")
    if out:
        why = f": {now.last_errors[0]}" if now.last_errors else ""
        yield f"{subject} breaker", f"out on {out} of {now.replicas} replicas{why}"
    if now.p99_ms is not None and now.p99_ms > limits.p99_ms and now.throughput_per_s > 0:  # it stays as it was while no calls come
        yield f"{subject} p99", f"{now.p99_ms:.0f} ms, more than {limits.p99_ms:g}"
    calls, failures = (now.calls - before.calls, now.failures - before.failures) if before else (0, 0)
    if calls >= BUSY_CALLS and failures > limits.failed_share * calls:
        yield f"{subject} failures", f"{failures} of {calls} calls, more than {limits.failed_share:.0%}"


def _of_events(before: GatewayOut, now: GatewayOut, limits: Thresholds) -> Iterator[tuple[str, str]]:
    """Of few calls, all have to fail: between two looks there are seldom many. Nothing where another gateway has answered than before."""
    for route, total in now.stored.items() if before.gateway == now.gateway else ():
        calls, failures = total - before.stored.get(route, 0), now.failed.get(route, 0) - before.failed.get(route, 0)
        if failures > limits.events_failed_share * calls and (calls >= BUSY_CALLS or failures >= calls):
            yield route, f"{failures} of {calls} calls failed; the gateway's log says why"


def _stage_of(look: Look, name: str) -> StageOperationOut:
    none = StageOperationOut(stage=name, replicas=0, explanations=[], backends=[])
    return next((one for one in look.backends.stages if one.stage == name), none)
