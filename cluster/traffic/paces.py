"""Which replicas answer far more slowly than the others, so that a router leaves them out until a trial is quick again.

    an answer -> late, where it took half as long again as nineteen in twenty of the other replicas' answers
    most answers of a second late, or a few of them far too late -> the replica is left out; after a pause one call is a trial

A replica that answers slowly, on a core that another process takes or a card that throttles, is neither silent nor full: all its users
would wait for it. Lateness is read from the calls themselves. Computing a user's states anew takes many times as long as going on from
kept ones, so an answer is compared with the other replicas' long answers, not with their usual ones: else a few new users in a row would
send all others away from their states. New users also make a queue, in which all answers are late, dozens of them where one gateway asks
for many: so most have to be late for a while. Where more than a third of the replicas are slow, and more than one, the load is the
reason, and none is left out: the others would only become slow too.

A replica with broken engines refuses at once. What it says of that is read by its callers alone, which tell it here (`refused`): the
replica is no yardstick for others until it has answered often again.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median

from cluster.traffic.breaker import Breaker, BreakerSettings, BreakerState

TIMES = 1.5
"""An answer is late if it took more than so many times as long as nineteen in twenty of the other replicas' answers."""
LEAST_S = 0.01
"""An answer that took less than this longer is not late, whatever the ratio."""
LATEST_S, LATEST = 1.0, 11
"""A replica is left out once most of its answers of the last LATEST_S are late, or of its last LATEST answers where those are more; of
twice as many where there is but one other: its answers alone tell what is usual.
"""
FAR, COUNTS = 2, 3
"""A late answer that took more than FAR times the longest of the others' counts as COUNTS of them: no new user's states take that long."""
KNOWN = 50
"""The longest counts once the others have answered so often: before, a new user may not have been among them."""
FADES = 0.999
"""The remembered longest answer shrinks by this factor at each answer, slowly: new users may be one in a hundred."""
NEW_S, MOVED_S = 60.0, 10.0
"""How long a new replica is not judged, which computes the states of its users anew; and how long all are not once one is left out, which
do the same for that one's users.
"""
SEEN, ENOUGH, SHARE = 61, 10, 0.95
"""How long a replica takes is the SHARE quantile of its last SEEN answers, once there are ENOUGH. Where fewer than 1 - SHARE of
the answers are for new users, a new user's is late: so few of them are next to never most of the latest answers, as one in ten may be.
"""
_refusals: dict[str, int] = {}
"""How often each replica that any Paces of this process knows has refused: callers, and routers in threads of their own, share it."""
AVOIDING = BreakerSettings(failures_to_open=1, pause_s=10.0, growth=2.0, longest_pause_s=60.0)


@dataclass(slots=True)
class _Pace:
    since: float
    breaker: Breaker = field(default_factory=lambda: Breaker(AVOIDING))
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    most_s: float | None = None
    longest_s: float = 0.0
    answers: int = 0
    refusals: int = 0
    latest: deque[tuple[float, int]] = field(default_factory=deque)
    late: int = 0
    on_trial: bool = False

    def mostly_late(self, late: int, now: float, least: int) -> bool:
        """Count an answer. Whether most of the last LATEST_S are late, or of the last `least` where those are more."""
        self.latest.append((now, late))
        self.late += late
        while len(self.latest) > least and self.latest[0][0] <= now - LATEST_S:
            self.late -= self.latest.popleft()[1]
        return self.late > max(least, len(self.latest)) // 2

    def forget(self) -> None:
        """Drop the recorded lateness: earlier calls no longer count towards leaving this replica out."""
        self.latest.clear()
        self.late = 0


def refused(replica: str) -> None:
    """A call to this replica was answered by a refusal, which another replica need not give. From any thread."""
    if (refusals := _refusals.get(replica)) is not None:
        _refusals[replica] = refusals + 1


class Paces:
    """The paces of a deployment's replicas, as one process meets them. Times are passed in: seconds of a clock that is never set back."""

    def __init__(self, times: float = TIMES) -> None:
        self._times = times
        self._paces: dict[str, _Pace] = {}

    def keep(self, replicas: Iterable[str], now: float) -> None:
        """Take which replicas there are; those of the first call do not count as new."""
        first, known = not self._paces, self._paces.keys()
        self._paces = {name: self._paces.get(name) or _Pace(now - NEW_S if first else now) for name in replicas}
        for name in known - self._paces.keys():
            _refusals.pop(name, None)
        for name in self._paces:
            _refusals.setdefault(name, 0)

    def sent(self, replica: str, now: float) -> None:
        """A call was sent. To a replica that is due for a trial it is the trial, which counts as failed until it is answered in time."""
        pace = self._paces.get(replica)
        if pace and pace.breaker.state(now) is BreakerState.HALF_OPEN:
            pace.breaker, pace.on_trial = pace.breaker.failed(now), True

    def answered(self, replica: str, took_s: float, now: float, *, failed: bool = False) -> None:
        """A call has ended. One that `failed`, or was cancelled, counts only if it was late: a quick failure says nothing of the pace."""
        if (pace := self._paces.get(replica)) is None:
            return
        late = self._lateness(replica, took_s)
        if failed and not late:
            return
        if (refusals := _refusals.get(replica, 0)) != pace.refusals:
            pace.refusals = refusals
            pace.took_s.clear()
        pace.took_s.append(took_s)
        pace.answers += 1
        pace.longest_s = max(took_s, FADES * pace.longest_s)
        pace.most_s = sorted(pace.took_s)[int(SHARE * len(pace.took_s))] if len(pace.took_s) >= ENOUGH else None
        if pace.on_trial:
            pace.on_trial, pace.breaker = False, pace.breaker if late else pace.breaker.succeeded()
            return
        if pace.breaker.trial_at is not None or now - pace.since < NEW_S:  # calls under way when it was left out do not count afterwards
            return
        if pace.mostly_late(late, now, LATEST if len(self._paces) > 2 else 2 * LATEST):
            pace.breaker = pace.breaker.failed(now)
            for one in self._paces.values():
                one.since = max(one.since, now - NEW_S + MOVED_S)
                one.forget()

    def slow(self, now: float) -> frozenset[str]:
        """The replicas to leave out, without those that are due for a trial."""
        tried = [name for name, pace in self._paces.items() if pace.breaker.trial_at is not None]
        if not tried or len(tried) > max(1, len(self._paces) // 3):
            return frozenset()
        return frozenset(name for name in tried if self._paces[name].breaker.state(now) is BreakerState.OPEN)

    def _lateness(self, replica: str, took_s: float) -> int:
        """The number of late answers that this one counts for; 0 where it is not late."""
        others = [pace for name, pace in self._paces.items() if name != replica and pace.most_s is not None]
        if not others:
            return 0
        most_s = median(pace.most_s for pace in others if pace.most_s is not None)
        longest_s = median(pace.longest_s for pace in others) if sum(pace.answers for pace in others) >= KNOWN else inf
        late = took_s > self._times * most_s and took_s > most_s + LEAST_S
        return COUNTS if late and took_s > FAR * longest_s else int(late)
