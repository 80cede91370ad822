"""Send a request, and once more where another replica may do better; the first answer counts, and the other calls are cancelled.

    the replica died, or failed as another need not      once more, after a short random pause
    the call is slower than 95 % of all (`hedge`)        a copy beside it
    the call stalls: 8 times slower than that, or half   a copy beside it: the replica may be stopped, or busy with something endless,
    of the time is over                                  which looks the same as being slow

A stalled call is not given up: one that is merely slow would begin anew with too little time. Every copy is granted by the retry budget, a
hedge by the hedges' own budget too: where all replicas are slow or gone, sending twice does not help. A copy that is due because half of
a short time is over takes from half of the budget only: a caller with short deadlines leaves the rest to requests whose replica dies.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from cluster.traffic.hedging import Durations, Hedge
from cluster.traffic.retry_budget import RetryBudget

T = TypeVar("T")
STALLED_TIMES, STALLED_LEAST_S, STALLED_SHARE = 8.0, 0.2, 0.5
HURRIED_BELOW_S, HURRIED_TIMES = 0.5, 2.0
"""Where half of a call's time is shorter than that, or than so many times the p95, a copy that it makes due takes from half of the retry
budget only.
"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
GRACE_S = 1.0
"""How long after the deadline an answer is still awaited: the replica, or the caller, says first that the time is over."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What grants copies, and what is known of how long answers take. `random`: 0..1, for pauses that do not all end at once."""

    retries: RetryBudget = field(default_factory=RetryBudget)
    hedge: Hedge | None = None
    durations: Durations = field(default_factory=Durations)
    random: Callable[[], float] = random.random

    def stalled_after_s(self, left_s: float) -> float:
        return min(STALLED_SHARE * left_s, max(STALLED_LEAST_S, STALLED_TIMES * self.durations.p95_s()))

    def pause_s(self, failures: int) -> float:
        """Full jitter: up to twice as long after each failure."""
        return self.random() * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


class Due(NamedTuple):
    """When the next call is due, on this process's monotonic clock, and why: the budget has granted it after a failure, or the latest call
    is slow, or stalls, or does so only as its time is short ("hurried").
    """

    at: float
    why: Literal["granted", "slow", "stalled", "hurried", "never"]


NEVER = Due(math.inf, "never")


class Attempts(Generic[T]):
    """The calls made for one request, `tries` at most.

    `send(number, left_s)` makes call `number`, from 0, which may take `left_s` seconds. `better(call)`: whether another replica could do
    better than this call that has ended. With `hedged`, a call that is only slow gets a copy too. `lost` is given the result of a call that
    is not the answer.
    """

    def __init__(
        self,
        send: Callable[[int, float], Awaitable[T]],
        better: Callable[["asyncio.Future[T]"], bool],
        rules: Rules,
        *,
        within_s: float,
        tries: int,
        hedged: bool = False,
        lost: Callable[[T], object] = lambda _: None,
    ) -> None:
        self._send, self._better, self._rules, self._lost = send, better, rules, lost
        self._hedge = rules.hedge if hedged else None
        self._deadline, self._tries_left = monotonic() + within_s, tries
        self._sent = self._failures = 0
        self._running: dict[asyncio.Future[T], float] = {}
        self._due = NEVER

    async def answer(self) -> T:
        """The first answer that another replica could not better, else the last one or its error. Raises TimeoutError where `GRACE_S` after
        the deadline a call is still under way, even if another one has ended with an answer that it could better.
        """
        self._rules.retries.request()
        if self._hedge:
            self._hedge.request()
        try:
            self._begin()
            while True:
                ended = await self._ended()
                if ended is None:
                    self._copy()
                elif not self._better(ended) or not (self._running or self._again()):
                    return ended.result()
                else:
                    self._give_up(ended)
        finally:
            self._leave()

    async def _ended(self) -> "asyncio.Future[T] | None":
        """A call that has ended, or None once the next one is due."""
        while True:
            wait_s = max(0.0, min(self._due.at, self._deadline + GRACE_S) - monotonic())
            if not self._running:
                await asyncio.sleep(wait_s)
            elif done := (await asyncio.wait(self._running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                return self._finished(done.pop())
            if monotonic() >= self._due.at:
                return None
            if monotonic() >= self._deadline + GRACE_S:
                raise TimeoutError

    def _finished(self, call: "asyncio.Future[T]") -> "asyncio.Future[T]":
        began = self._running.pop(call)
        if not (call.cancelled() or call.exception()):
            self._rules.durations.answered(monotonic() - began)
        return call

    def _begin(self) -> None:
        """Make the next call, and set when a copy of it is due."""
        now = monotonic()
        call = asyncio.ensure_future(self._send(self._sent, max(0.0, self._deadline - now)))
        self._running[call], self._sent, self._tries_left = now, self._sent + 1, self._tries_left - 1
        slow, stalled = Due(now + self._rules.durations.p95_s(), "slow"), self._stall(now)
        hedges = self._hedge is not None and self._hedge.on and self._sent == 1 and slow.at < stalled.at
        self._due = NEVER if self._tries_left <= 0 else slow if hedges else stalled

    def _stall(self, now: float) -> Due:
        """When a call that is awaited from `now` on counts as stalled, by the rules."""
        left_s, p95_s = max(0.0, self._deadline - now), self._rules.durations.p95_s()
        stalled_s = self._rules.stalled_after_s(left_s)
        short_s = max(HURRIED_BELOW_S, HURRIED_TIMES * p95_s if p95_s < math.inf else 0.0)
        return Due(now + stalled_s, "hurried" if short_s > stalled_s >= STALLED_SHARE * left_s else "stalled")

    def _copy(self) -> None:
        """Send the copy that is due, if the budgets grant it. A refused hedge is due again once the call stalls; other copies are not."""
        if self._due.why == "granted" or self._grants():
            self._begin()
        else:
            self._due = self._stall(monotonic()) if self._due.why == "slow" else NEVER

    def _grants(self) -> bool:
        hedge = self._hedge if self._due.why == "slow" else None
        granted = (hedge is None or hedge.take()) and self._rules.retries.take(hurried=self._due.why == "hurried")
        if hedge and granted:
            hedge.sent += 1
        return granted

    def _again(self) -> bool:
        """After a failure: whether the request is sent once more, after a pause that leaves time for it."""
        self._failures += 1
        pause_s = self._rules.pause_s(self._failures)
        if self._tries_left <= 0 or pause_s >= self._deadline - monotonic() or not self._rules.retries.take():
            return False
        self._due = Due(monotonic() + pause_s, "granted")
        return True

    def _leave(self) -> None:
        for call in self._running:
            call.cancel()
            call.add_done_callback(self._give_up)

    def _give_up(self, call: "asyncio.Future[Any]") -> None:
        with suppress(asyncio.CancelledError):
            if call.exception() is None:
                self._lost(call.result())
