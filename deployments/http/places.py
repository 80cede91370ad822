"""The places of one gateway replica: which requests are worked on at a time, and what each holds until its answer is read.

    arrive ──► wait ──► the work ──► computed ──► read
     503        503

An answer that is computed and only waits for its reader gives its place to another request. So do events that only wait for the event
store: where that is slow or away, recommendations find their places free all the same.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from http import HTTPStatus
from time import monotonic

from starlette.exceptions import HTTPException

from cluster.config import AdmissionSettings
from cluster.traffic.admission import Admission, Standing, Ticket
from deployments.http import problems
from deployments.http.callers import Caller, Place
from deployments.http.connection import BodyBudget, Connection

MOST_STORING, MOST_IN_TIME = 256, 1024
"""Calls whose events wait for the store, of all callers: a quarter of the connections that HAProxy has to a gateway, and all of them while
the store is quick. A caller may have as many as there is room left for: half of them while it is alone, so that there is always room for
another. All callers without keys are one.
"""
MOST_ERASING = 64
"""Erasures of a caller that have begun and that some process has not followed yet, whether their clients wait or have left: far fewer than
the log of erasures holds, so that no caller alone has processes fall behind that log, and forget everything.
"""
SLOW_S, STORE_AGAIN_S = 1.0, 2.0
"""A store is slow where a caller's oldest call has waited for it for so long; and when to send again what is refused then."""


class Places:
    """The admission, and the requests that wait for it on the event loop. `bodies`: the bytes that the process holds, of answers too.
    `target_s`: the mean time to an answer beyond which fewer requests are worked on at a time.
    """

    def __init__(self, settings: AdmissionSettings, target_s: float, bodies: BodyBudget) -> None:
        self.settings, self.bodies = settings, bodies
        self.admission = Admission(settings, target_s)
        self.reading: set[Connection] = set()
        """Answers that wait for their readers without a place."""
        self.storing: dict[str | None, dict[TakenPlace, float]] = {}  # lane -> calls whose events are being stored -> since when, in order
        self.erasing = Counter[str | None]()  # lane -> erasures that have begun and are not followed everywhere
        self._undecided: dict[Ticket, asyncio.Future[None]] = {}  # the tickets that wait, and what wakes each

    def reconfigure(self, settings: AdmissionSettings, target_s: float) -> None:
        """Take new settings. Running requests go on; waiting ones wait no longer than the new settings allow."""
        self.settings, now = settings, monotonic()
        self.tell(self.admission.reconfigure(settings, target_s, now))
        if self._undecided:
            self._expire_at(now + settings.max_wait_ms / 1e3)

    def most(self) -> int:
        """How many requests may be here before one of the least urgency is refused."""
        return self.admission.most(monotonic()) + len(self.reading) + self.being_stored()

    def being_stored(self) -> int:
        """Calls whose events are being stored, without a place."""
        return sum(map(len, self.storing.values()))

    def erased(self, lane: str | None) -> None:
        """An erasure of the lane's is followed everywhere, or was not begun."""
        self.erasing[lane] -= 1
        if not self.erasing[lane]:
            del self.erasing[lane]

    def check(self, urgency: int, caller: Caller) -> None:
        """Raises HTTPException (503) where the admission turns away a request that arrives now."""
        if self.admission.turns_away(monotonic(), urgency, caller.tenant, caller.lane):
            raise self.overloaded(caller.tenant)

    def arrive(self, urgency: int, caller: Caller, connection: Connection, *, adapts: bool) -> "TakenPlace":
        """The place of a new request, which may have to wait for it. `adapts`: the time to its answer tells how many places there may be.
        Raises HTTPException (503) where the request is refused.
        """
        ticket, displaced = self.admission.arrive(monotonic(), urgency, caller.tenant, caller.lane)
        if displaced is not None:
            self.tell([displaced])
        if ticket.standing is Standing.REFUSED:
            raise self.overloaded(caller.tenant)
        return TakenPlace(self, ticket, connection, adapts=adapts)

    async def decided(self, ticket: Ticket) -> None:
        """Returns when the ticket waits no longer."""
        decided = self._undecided[ticket] = asyncio.get_running_loop().create_future()
        timer = self._expire_at(ticket.until)
        try:
            await decided
        finally:
            timer.cancel()
            del self._undecided[ticket]

    def tell(self, tickets: Iterable[Ticket]) -> None:
        """Wake the requests that were decided on."""
        for ticket in tickets:
            decided = self._undecided.get(ticket)
            if decided is not None and not decided.done():
                decided.set_result(None)

    def overloaded(self, tenant: str | None) -> HTTPException:
        """The refusal of a request that finds no place."""
        admission, shares = self.admission, self.settings.max_concurrent_share < 1
        its_share = shares and tenant is not None and admission.running < admission.places
        taken = f"tenant {tenant!r} has its share of the places" if its_share else f"all {admission.places} places are taken"
        return problems.overloaded(f"{taken} and {admission.waiting} requests wait; ask again later", admission.wait_s(monotonic()))

    def _expire_at(self, when: float) -> asyncio.TimerHandle:
        """At `when`, refuse the tickets that have waited long enough by `when`, not by the clock: a timer may fire a moment early."""
        delay_s = max(0.0, when - monotonic())
        return asyncio.get_running_loop().call_later(delay_s, lambda: self.tell(self.admission.expire(when)))


class TakenPlace(Place):
    """The place of one request in `places`. `connection`: to its client."""

    def __init__(self, places: Places, ticket: Ticket, connection: Connection, *, adapts: bool) -> None:
        self._places, self._ticket, self._connection, self._adapts = places, ticket, connection, adapts

    async def wait(self) -> float:
        """The seconds that the request has waited, once it may be worked on. Raises HTTPException (503) where it gets no place in time."""
        if self._ticket.standing is Standing.WAITING:
            await self._places.decided(self._ticket)
        if self._ticket.standing is Standing.REFUSED:
            raise self._places.overloaded(self._ticket.tenant)
        return self._ticket.started - self._ticket.arrived

    def belong(self, tenant: str) -> bool:
        return self._places.admission.belong(self._ticket, tenant)

    def leave(self) -> None:
        places = self._places
        places.tell(places.admission.leave(self._ticket, monotonic(), self._answered_s()))

    def end(self) -> None:
        """The request has ended."""
        self.leave()
        storing, lane = self._places.storing, self._ticket.lane
        if own := storing.get(lane):
            own.pop(self, None)
            if not own:
                del storing[lane]

    def computed(self, size: int, *, streamed: bool = False) -> None:
        if streamed:
            self._connection.answered_at = monotonic()
        if self._places.bodies.keep(size, self._connection):
            self._places.reading.add(self._connection)
            self.leave()

    def keep(self, size: int) -> None:
        bodies = self._places.bodies
        if not bodies.keep(size, self._connection):
            held = f"{bodies.most} bytes there are for them and for bodies"
            raise problems.overloaded(f"answers of batches and others that wait take up the {held}; ask again later, or for less", wait_s=1)

    def store(self) -> None:
        own, now = self._places.storing.get(self._ticket.lane, {}), monotonic()
        slow = now - next(iter(own.values()), now) > SLOW_S
        if len(own) >= (MOST_STORING if slow else MOST_IN_TIME) - self._places.being_stored():
            waiting = f"{len(own)} calls of this caller wait for the event store"
            raise problems.overloaded(f"{waiting}; nothing of this one is stored; send it again later", STORE_AGAIN_S)
        self._places.storing.setdefault(self._ticket.lane, own)[self] = now
        self.leave()

    def erase(self) -> ExitStack:
        erasing, lane = self._places.erasing, self._ticket.lane
        if erasing[lane] >= MOST_ERASING:
            waiting = f"{MOST_ERASING} erasures of this caller are not followed everywhere yet"
            raise problems.overloaded(f"{waiting}; nothing of this one is begun; send it again later", wait_s=1)
        erasing[lane] += 1
        turn = ExitStack()
        turn.callback(self._places.erased, lane)
        return turn

    def broke(self, status: int = 0) -> None:
        self._connection.answered_at = None
        if status or self._connection.late:
            self._connection.status = status or 504

    def _answered_s(self) -> float | None:
        """Seconds until the answer was there; None for a refusal and a stream that broke off, which say nothing of how long answers take,
        and where the request takes much more or less time than others.
        """
        at = self._connection.answered_at
        return at - self._ticket.started if self._adapts and at is not None and self._connection.status == HTTPStatus.OK else None
