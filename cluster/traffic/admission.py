"""Which requests start, wait or are turned away: one gateway replica's places, with time passed in.

    arrive ──► RUNNING ──► LEFT           a place is free
       ├─────► WAITING ──► RUNNING        most urgent first, then tenants in turn, then in the order of arrival
       │          ├──────► REFUSED        waited too long, or displaced by one more urgent, or of a tenant with fewer
       │          └──────► LEFT           its client has gone
       └─────► REFUSED                    the queue is full, or so long that its turn would come too late

A request that would wait longer than half of the allowed wait is refused on arrival, while its caller can still go elsewhere: an
overloaded queue then holds only requests that will be served. The wait is foretold in two ways, and the longer one counts, as a mean lags
behind a growing load: by Little's law, requests ahead x mean duration / places, and by how soon one request finished after the other since
all places were taken.

A queue is there for bursts. A standing queue, where all places have been taken for a second, only makes every answer later (Nichols and
Jacobson, 2012): from then on a request may wait for a twentieth of the allowed wait, until no request was refused for `_LULL_S`.

One tenant may take all places and all of the queue, while it is alone. The request of another is held by no queue of the first one's: the
tenant that waits and has the fewest running is next, so that one with long requests gets no more places than one with short ones, and
equals take turns. A tenant that has less under way than its part of the places (all of them, by the number of tenants) may wait for its
turn, also where the queue stands. In a full queue it displaces the last request of the tenant with the most.
A key that has no tenant has a lane of its own, whichever tenants it acts for.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import ceil, inf

from cluster.config import AdmissionSettings
from cluster.traffic.adaptive_limit import AdaptiveLimit

URGENCIES = range(8)
"""RFC 9218: 0 is the most urgent."""
_WEIGHT = 0.1
_PACE_S = 4.0
_STANDS_S = 1.0
_LULL_S = 5.0
_LONG, _SHORT = 1 / 2, 1 / 20
"""The shares of the allowed wait that may be foretold to a request: usually, and where the queue stands."""


class Standing(StrEnum):
    """Where a request stands; REFUSED and LEFT are final."""

    WAITING = "waiting"
    RUNNING = "running"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. Times are in seconds on one clock that only moves forward. `until`: when it is refused if it still waits; `tenant` None:
    not known yet, or none; `lane`: named by its tenant or its key, None where callers are not told apart; lanes take turns.
    """

    urgency: int
    arrived: float
    until: float
    tenant: str | None = None
    lane: str | None = None
    standing: Standing = Standing.WAITING
    started: float = inf


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon one request finishes after the other while all places are taken, over the last seconds."""

    since: float | None = None
    count: float = 0.0

    def at(self, now: float, *, full: bool) -> "Pace":
        if not full:
            return NOT_FULL
        return Pace(now) if self.since is None else self

    def finished(self, now: float) -> "Pace":
        if self.since is None:
            return self
        if (elapsed := now - self.since) > _PACE_S:  # what is long ago counts less and less
            return Pace(now - elapsed / 2, (self.count + 1) / 2)
        return Pace(self.since, self.count + 1)

    def lasts_s(self, now: float) -> float:
        """For how many of the last seconds all places have been taken."""
        return 0.0 if self.since is None else now - self.since

    def each_s(self, now: float, places: int) -> float:
        """Seconds between two ends: 0 while a place is free; before the first end, as if all requests ended now."""
        return 0.0 if self.since is None else max(0.0, now - self.since) / (self.count or places)


NOT_FULL = Pace()


class Admission:
    """The `places` of one process, as many as the adaptive limit allows now. Methods return the waiting tickets that they decided on, for
    their callers to be told.
    """

    def __init__(self, settings: AdmissionSettings, target_s: float) -> None:
        self._queues: list[dict[str | None, dict[Ticket, None]]] = [{} for _ in URGENCIES]  # lanes, the next first -> theirs as they came
        self._waiting_at = [0 for _ in URGENCIES]
        self.running, self.waiting = 0, 0
        self._running_of: Counter[str | None] = Counter()  # by tenant
        self._running_in: Counter[str | None] = Counter()  # by lane
        self._under_way: Counter[str | None] = Counter()  # by lane, that run or wait
        self._mean_s = 0.0
        self._full, self._stands_until = NOT_FULL, -inf
        self._settings = settings
        self._adapt(AdaptiveLimit(settings.max_concurrent, target_s))

    def arrive(self, now: float, urgency: int, tenant: str | None = None, lane: str | None = None) -> tuple[Ticket, Ticket | None]:
        """The ticket of a new request, and that of the waiting request that it displaced in the queue, if any. `lane`: that of one
        without `tenant`, named as no tenant is.
        """
        lane = lane if tenant is None else tenant
        ticket = Ticket(urgency, now, now + self._settings.max_wait_ms / 1e3, tenant, lane)
        if self.running < self.places and not self._has_its_share(tenant):
            self._start(ticket, now)
            self._look(now)
        elif self.turns_away(now, urgency, tenant, lane):
            ticket.standing = Standing.REFUSED
        else:
            displaced = self._gives_way(urgency, lane) if self.waiting >= self._settings.max_queued else None
            if displaced is not None:
                self._dequeue(displaced, Standing.REFUSED)
            self._enqueue(ticket)
            return ticket, displaced
        return ticket, None

    def turns_away(self, now: float, urgency: int, tenant: str | None = None, lane: str | None = None) -> bool:
        """Whether a request that arrives now is refused at once. One that would wait too long in a standing queue counts as refused from
        here on: the queue stands for `_LULL_S` more.
        """
        lane = lane if tenant is None else tenant
        if self.running < self.places and not self._has_its_share(tenant):
            return False
        if self.wait_s(now, urgency) > self._may_wait_s(now) and not self._may_wait_its_turn(now, urgency, lane):
            if self._stands(now):
                self._stands_until = now + _LULL_S
            return True
        if self._queues_its_share(tenant):
            return True
        return self.waiting >= self._settings.max_queued and self._gives_way(urgency, lane) is None

    def most(self, now: float) -> int:
        """How many requests may run and wait before one of the least urgency is refused."""
        each_s, queued = self._each_s(now), self._settings.max_queued
        return self.places + (min(queued, int(self._may_wait_s(now) / each_s)) if each_s else queued)

    def places_yet(self) -> int:
        """How many places there may be once all are taken: `max_concurrent` until answers that took too long lower them, `places` since."""
        return self.places if self._limit.lowered else self._limit.most

    def part(self) -> int:
        """How many requests of one lane may be here where the places are divided among all lanes that have some, two at least."""
        return ceil(self.places / max(2, len(self._under_way)))

    def leave(self, ticket: Ticket, now: float, answered_s: float | None = None) -> list[Ticket]:
        """A request has its answer, or its client has gone; returns the tickets that may start now. Does nothing for a refused request.

        `answered_s`: from start to answer, by which the limit adapts; None for requests that take long by nature, as batches do.
        """
        match ticket.standing:
            case Standing.WAITING:
                self._dequeue(ticket, Standing.LEFT)
            case Standing.RUNNING:
                self._finish(ticket, now, answered_s)
        return self._fill(now)

    def expire(self, now: float) -> list[Ticket]:
        """Refuse the tickets that have waited for their time, and return them."""
        late = [ticket for queue in self._queues for own in queue.values() for ticket in _expired(own, now)]
        for ticket in late:
            self._dequeue(ticket, Standing.REFUSED)
        return late

    def belong(self, ticket: Ticket, tenant: str) -> bool:
        """Note the tenant of a running request, once it is known; False where the tenant has its share of the places already."""
        if ticket.tenant is None and ticket.standing is Standing.RUNNING:
            if self._has_its_share(tenant):
                return False
            _take_off(self._running_of, None)
            self._running_of[tenant] += 1
            ticket.tenant = tenant
        return True

    def reconfigure(self, settings: AdmissionSettings, target_s: float, now: float) -> list[Ticket]:
        """Go on under other settings; returns the tickets that start or are refused under them. Running requests go on."""
        if (settings.max_concurrent, target_s) != (self._limit.most, self._limit.target_s):
            self._adapt(AdaptiveLimit(settings.max_concurrent, target_s))
        self._settings = settings
        for ticket in self._in_order():
            ticket.until = min(ticket.until, now + settings.max_wait_ms / 1e3)
        started = self._fill(now)
        surplus = list(self._in_order())[settings.max_queued :]
        for ticket in surplus:
            self._dequeue(ticket, Standing.REFUSED)
        return started + surplus

    def wait_s(self, now: float, urgency: int = URGENCIES[-1]) -> float:
        """How long a request that arrives at `now` would wait, if no more urgent one came after it."""
        return (sum(self._waiting_at[: urgency + 1]) + 1) * self._each_s(now)

    def _each_s(self, now: float) -> float:
        """The foretold seconds between the starts of two waiting requests."""
        return max(self._mean_s / self.places, self._full.each_s(now, self.places))

    def _stands(self, now: float) -> bool:
        return self._full.lasts_s(now) > _STANDS_S or now < self._stands_until

    def _may_wait_s(self, now: float) -> float:
        """The longest foretold wait with which a request is not refused."""
        return (_SHORT if self._stands(now) else _LONG) * self._settings.max_wait_ms / 1e3

    def _may_wait_its_turn(self, now: float, urgency: int, lane: str | None) -> bool:
        """Whether the lane has less than its part of the places under way, and its request would start soon enough in its turn."""
        under_way = self._under_way[lane]
        if lane is None or 2 * under_way >= self.places:
            return False
        others, queue = len(self._under_way.keys() - {lane}), self._queues[urgency]
        turns = len(queue.get(lane, ())) + 1
        ahead = sum(self._waiting_at[:urgency]) + sum(min(len(own), turns) for other, own in queue.items() if other != lane)
        return under_way * (others + 1) < self.places and (ahead + turns) * self._each_s(now) <= _LONG * self._settings.max_wait_ms / 1e3

    def _gives_way(self, urgency: int, lane: str | None) -> Ticket | None:
        """The request that makes room for this one where the queue is full: of the least urgent ones, the last of the lane with the most.
        None where it is more urgent, or as urgent and its lane would not have more than this one's.
        """
        least = next((least for least in reversed(URGENCIES) if self._queues[least]), -1)
        if least < urgency:
            return None
        queue = self._queues[least]
        most = max(queue.values(), key=len)
        if least == urgency and len(most) <= len(queue.get(lane, ())) + 1:
            return None
        return next(reversed(most))

    def _fill(self, now: float) -> list[Ticket]:
        started: list[Ticket] = []
        while self.waiting and self.running < self.places and (ticket := self._next()):
            self._dequeue(ticket, Standing.RUNNING)
            self._start(ticket, now)
            started.append(ticket)
        self._look(now)
        return started

    def _next(self) -> Ticket | None:
        """Of the most urgent that wait, the first one of the lane that has the fewest running; of such lanes, the one next in turn."""
        for queue in self._queues:
            firsts = map(next, map(iter, queue.values()))
            if fitting := [ticket for ticket in firsts if not self._has_its_share(ticket.tenant)]:
                return min(fitting, key=lambda ticket: self._running_in[ticket.lane])
        return None

    def _start(self, ticket: Ticket, now: float) -> None:
        ticket.standing, ticket.started = Standing.RUNNING, now
        self.running += 1
        self._running_of[ticket.tenant] += 1
        self._running_in[ticket.lane] += 1
        self._under_way[ticket.lane] += 1

    def _look(self, now: float) -> None:
        """Note whether all places are taken, once those that may start have: between two starts places are free that are not left so."""
        self._full = self._full.at(now, full=self.running >= self.places)

    def _finish(self, ticket: Ticket, now: float, answered_s: float | None) -> None:
        full = self.running >= self.places
        self._full = self._full.finished(now)
        ticket.standing = Standing.LEFT
        self.running -= 1
        _take_off(self._running_of, ticket.tenant)
        _take_off(self._running_in, ticket.lane)
        _take_off(self._under_way, ticket.lane)
        took_s = now - ticket.started
        self._mean_s += (took_s - self._mean_s) * (_WEIGHT if self._mean_s else 1.0)
        if answered_s is not None:
            self._adapt(self._limit.after(answered_s, now, full=full))

    def _adapt(self, limit: AdaptiveLimit) -> None:
        self._limit, self.places = limit, limit.places

    def _enqueue(self, ticket: Ticket) -> None:
        self._queues[ticket.urgency].setdefault(ticket.lane, {})[ticket] = None
        self._waiting_at[ticket.urgency] += 1
        self.waiting += 1
        self._under_way[ticket.lane] += 1

    def _dequeue(self, ticket: Ticket, standing: Standing) -> None:
        queue = self._queues[ticket.urgency]
        own = queue[ticket.lane]
        del own[ticket]
        if not own or standing is Standing.RUNNING:  # it has had its turn
            del queue[ticket.lane]
        if own:
            queue[ticket.lane] = own
        self._waiting_at[ticket.urgency] -= 1
        self.waiting -= 1
        _take_off(self._under_way, ticket.lane)
        ticket.standing = standing

    def _has_its_share(self, tenant: str | None) -> bool:
        share = self._settings.max_concurrent_share
        return share < 1 and tenant is not None and self._running_of[tenant] >= max(1, int(share * self.places))

    def _queues_its_share(self, tenant: str | None) -> bool:
        share = self._settings.max_concurrent_share
        if share >= 1 or tenant is None:
            return False
        return sum(len(queue.get(tenant, ())) for queue in self._queues) >= ceil(share * self._settings.max_queued)

    def _in_order(self) -> Iterator[Ticket]:
        """Those that wait, most urgent first, then as they came."""
        return (ticket for queue in self._queues for ticket in sorted(chain(*queue.values()), key=lambda ticket: ticket.arrived))


def _expired(queue: dict[Ticket, None], now: float) -> Iterator[Ticket]:
    """The expired tickets, which are at the queue's head: later arrivals may wait until later."""
    for ticket in queue:
        if ticket.until > now:
            return
        yield ticket


def _take_off(count: Counter[str | None], name: str | None) -> None:
    """Count one less. A name at 0 is removed, or the counter would hold every one that ever came."""
    count[name] -= 1
    if not count[name]:
        del count[name]
