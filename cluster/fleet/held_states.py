"""Users' states between the replica that stopped and the one that is their home now.

    replica that stops -> give(states, hottest first) -> held for a while, less what was erased since they were read
    any other replica  -> take(process, kinds, after) -> those of the users that it is the home of, each once; `after`: what has arrived

States stay when they are taken, until their time is over or others need the room: of replicas that are restarted one after the other each
finds its users'. They are held in memory only, so that an erasure here leaves nothing on a disk. Times are passed in, in seconds.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cluster.engines.kept_users import CHUNK_BYTES, KeptUser
from cluster.fleet.erasures import News
from cluster.traffic.user_router import in_order_of

LOOK_AT = 1000
"""The most states that one call looks at: the switchboard has other calls to answer."""


@dataclass(frozen=True, slots=True)
class Taken:
    """States for a replica. `after`: to be passed to the next call, as the receipt of these; where it is the same as in the last call,
    there are no more states.
    """

    states: tuple[KeptUser, ...]
    after: int


@dataclass(frozen=True, slots=True)
class Given:
    """How many states are held of those given, and for how many more bytes there is room; 0: nothing more is taken from this giver."""

    held: int
    room: int


@dataclass(slots=True)
class _Held:
    number: int
    state: KeptUser
    until: float
    sent_to: set[str] = field(default_factory=set)
    takers: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        return len(self.state.data)


class HeldStates:
    """The states that are held, at most `max_bytes` of them, each for `keep_s`. Plain Python, for one thread at a time."""

    def __init__(self, max_bytes: int, keep_s: float) -> None:
        self._max_bytes, self._keep_s = max_bytes, keep_s
        self._held = OrderedDict[tuple[str, str, str], _Held]()  # in the order of their numbers
        self._taken = OrderedDict[tuple[str, str, str], _Held]()  # in the order in which they were
        self._number = self.used_bytes = self._taken_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def number(self) -> int:
        """The number of the state that was given last. It changes where there may be more states to take."""
        return self._number

    @property
    def _room(self) -> int:
        return self._max_bytes - self.used_bytes + self._taken_bytes

    def give(self, states: Iterable[KeptUser], missed: News, *, now: float) -> Given:
        """Hold these states, except those of users that an erasure concerns which the giver has `missed`."""
        self.expire(now)
        if missed.lost_track:
            return Given(0, 0)
        erased = {(one.tenant, one.user) for one in missed.erasures if not one.answers_only}
        held = sum(self._keep(one, now) for one in states if erased.isdisjoint(one.erased_by))
        return Given(held, self._room)

    def take(self, process: str, kinds: Collection[str], homes: Sequence[str], after: int = 0) -> Taken:
        """The next states after number `after` that are of these `kinds` and of users that `process` is the home of. What was sent to it up
        to `after` has arrived, and counts as taken; what was sent beyond that was lost on its way, and is sent again.
        """
        mine, size, looked, arrived = list[KeptUser](), 0, 0, after
        for held in self._held.values():
            if held.number <= arrived:
                if process in held.sent_to:
                    self._taken_by(process, held)
                continue
            if size >= CHUNK_BYTES or looked >= LOOK_AT:
                break
            after, looked = held.number, looked + 1
            held.sent_to.discard(process)
            if held.state.kind in kinds and process not in held.takers and _home(held.state, homes) == process:
                held.sent_to.add(process)
                mine.append(held.state)
                size += held.size
        return Taken(tuple(mine), after)

    def forget(self, tenant: str | None, user: str | None) -> None:
        """Drop a user's states; those of all the tenant's users where `user` is None, and all states where `tenant` is None too."""
        for held in [held for held in self._held.values() if (tenant, user) in held.state.erased_by]:
            self._drop(held)

    def expire(self, now: float) -> None:
        while self._held and (oldest := next(iter(self._held.values()))).until <= now:
            self._drop(oldest)

    def _keep(self, state: KeptUser, now: float) -> bool:
        held, older = _Held(self._number + 1, state, now + self._keep_s), self._held.get(_key(state))
        freed = older.size if older is not None and not older.takers else 0  # that of taken states counts as room
        if held.size > self._room + freed:
            return False
        if older is not None:
            self._drop(older)
        self._make_room(held.size)
        self._number += 1
        self._held[_key(state)] = held
        self.used_bytes += held.size
        return True

    def _make_room(self, size: int) -> None:
        """States that were taken make room for `size` bytes, the first taken first. `_room` is to be as large."""
        while self.used_bytes + size > self._max_bytes:
            self._drop(next(iter(self._taken.values())))

    def _drop(self, held: _Held) -> None:
        del self._held[_key(held.state)]
        self.used_bytes -= held.size
        if self._taken.pop(_key(held.state), None):
            self._taken_bytes -= held.size

    def _taken_by(self, process: str, held: _Held) -> None:
        held.sent_to.discard(process)
        held.takers.add(process)
        if _key(held.state) not in self._taken:
            self._taken[_key(held.state)] = held
            self._taken_bytes += held.size


def _key(state: KeptUser) -> tuple[str, str, str]:
    return state.kind, state.tenant, state.user


def _home(state: KeptUser, homes: Sequence[str]) -> str:
    """Where the user's requests go, see cluster.traffic.user_router."""
    return in_order_of(f"{state.tenant}/{state.user}", homes)[0]
