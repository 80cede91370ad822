"""What a gateway remembers of each user beside cached answers; it can forget one user, all of a tenant, or all."""

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable
from heapq import nlargest
from itertools import chain, zip_longest
from math import exp2, inf, log2
from time import monotonic
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from cluster.cache.codec import Codec
from cluster.cache.entry import Key
from cluster.cache.namespaces import Namespaces
from cluster.cache.policy import DEFAULT_POLICY
from cluster.cache.scopes import concerns
from cluster.cache.shared_notes import KEPT_S, SharedNotes
from cluster.traffic.budget import unhurried
from cluster.values import RecommendRequest

REMEMBERED = 10_000
REMEMBERED_ITEMS, REMEMBERED_LENGTH = 100, 4096
"""Requests that list more blocked and allowed items than this, or ids of more characters in all, are not remembered, which bounds the
memory of each user.
"""
RECALLED_AT_ONCE = 64
"""Users whose usual requests are looked up by one call of the shared cache."""
TELL_AGAIN_S = KEPT_S / 4
"""How long until an unchanged request is told to the other gateways again: another gateway may have told them a different one since, and
the cache may have dropped it.
"""
HALF_LIFE_S = 300.0
"""A request counts twice as much as one so many seconds before it, where users are ranked by how often they ask."""
V = TypeVar("V")
REQUEST_CODEC: Codec[RecommendRequest] = Codec(msgspec.json.Encoder().encode, msgspec.json.Decoder(RecommendRequest).decode)


class Fullest:
    """How many entries each name has, one more or less at a time. The name with the most is found without a look at the others."""

    def __init__(self) -> None:
        self._most = 0
        self._by_size: dict[int, OrderedDict[str, None]] = {}  # how many, of those alone that some name has -> these names

    def resized(self, name: str, before: int, after: int) -> None:
        """Note that the name has `after` entries now, one more or less than `before`."""
        if before:
            del self._by_size[before][name]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[name] = None
        if after > self._most or self._most not in self._by_size:
            self._most = after

    def name(self) -> str:
        """That with the most; of several, the one that has had so many for longest. Raises KeyError where there is none."""
        return next(iter(self._by_size[self._most]))


class Recent(Generic[V]):
    """Values by keys that name a user; at most `limit`: beyond it, the one that was put least recently is dropped where that is over
    `KEPT_S` ago by `clock`, in seconds, else that of the tenant with the most, so that one tenant drives out no other's.
    """

    def __init__(self, limit: int = REMEMBERED, clock: Callable[[], float] = monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._values: OrderedDict[Key, V] = OrderedDict()
        self._of: dict[str, OrderedDict[Key, float]] = {}  # tenant -> its keys -> when they were put, in this order; none is empty
        self._fullest = Fullest()
        self._names = Namespaces(DEFAULT_POLICY, limit, share=1.0)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> V | None:
        return self._values.get(key)

    def put(self, key: Key, value: V) -> None:
        own, now = self._of.setdefault(key.namespace, OrderedDict()), self._clock()
        if key not in own:
            self._names.admit(key, weight=1)
            self._fullest.resized(key.namespace, len(own), len(own) + 1)
        own[key], self._values[key] = now, value
        own.move_to_end(key)
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            oldest = next(iter(self._values))
            idle = self._of[oldest.namespace][oldest] < now - KEPT_S
            self._remove(oldest if idle else next(iter(self._of[self._fullest.name()])))

    def items(self) -> ItemsView[Key, V]:
        """The values by their keys, the least recently put first."""
        return self._values.items()

    def take(self) -> tuple[Key, V]:
        """Take out the value that was put least recently, with its key. There has to be one."""
        key = next(iter(self._values))
        return key, self._remove(key)

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Drop the values of one user, of all users of `tenant`, or of all tenants. Takes time in proportion to their number."""
        for key in self._names.keys(tenant, user_id):
            self._remove(key)

    def _remove(self, key: Key) -> V:
        own = self._of[key.namespace]
        del own[key]
        if not own:
            del self._of[key.namespace]
        self._fullest.resized(key.namespace, len(own) + 1, len(own))
        self._names.remove(key)
        return self._values.pop(key)


class Usual(NamedTuple):
    """A user's last request, and of those that this gateway was asked itself: how often lately, and when last by its clock.

    `asked`: the binary logarithm of a sum in which a request at t seconds counts 2 ** (t / HALF_LIFE_S).
    """

    request: RecommendRequest
    asked: float
    noted_at: float


class UsualRequests:
    """Each user's last request, and how often each has asked this gateway lately. The versions of a model share it, and by `shared` the
    gateways too: the gateway that stores an event need not be the one that was asked. `clock` gives seconds.
    """

    def __init__(
        self, shared: SharedNotes[RecommendRequest] | None = None, limit: int = REMEMBERED, clock: Callable[[], float] = monotonic
    ) -> None:
        self.shared, self._clock, self._forgotten, self._noted_at = shared, clock, 0, -inf
        self._own, self._recalled = Recent[Usual](limit, clock), Recent[RecommendRequest](limit, clock)
        """`_recalled`: of users that ask other gateways, and so drive out none that ask this one."""
        self._told = Recent[float](limit, clock)
        """When each user's request was told to the other gateways; apart, as an erasure needs that even where the request was dropped."""

    def note(self, request: RecommendRequest) -> None:
        """Remember a request, the answer to which may be cached, if that depends on stored events alone: a new event is then the moment to
        compute it again.
        """
        if request.behaviours is None and request.request_time is None and _is_short([*request.blocked, *(request.allowed or ())]):
            key, usual = usual_key(request.tenant, request.user_id), replace(unhurried(request), cache="use")
            self._noted_at = now = self._clock()
            if self.shared is not None and (self._last(key) != usual or now - (self._told.get(key) or -inf) >= TELL_AGAIN_S):
                self.shared.put(key, usual)
                self._told.put(key, now)
            half_lives, own = now / HALF_LIFE_S, self._own.get(key)
            asked = half_lives if own is None else half_lives + log2(1 + exp2(own.asked - half_lives))
            self._own.put(key, Usual(usual, asked, now))
            if self._recalled.get(key):
                self._recalled.forget(request.tenant, request.user_id)

    def of(self, tenant: str, user_id: str) -> RecommendRequest | None:
        """The user's last request, as far as this gateway knows it: another may have been asked since, see `recall`."""
        return self._last(usual_key(tenant, user_id))

    def hottest(self, count: int) -> list[tuple[str, str]]:
        """The `count` users (tenant, user_id) with a usual request that ask this gateway most, first the one that asks most; tenants take
        turns. One that asked once, over an hour before the latest request of all, is left out, one that asked more often a few half-lives
        later. Takes time in proportion to the number of users.
        """
        of: dict[str, list[tuple[float, Key]]] = {}
        for key, own in self._own.items():
            if own.asked >= (self._noted_at - KEPT_S) / HALF_LIFE_S:
                of.setdefault(key.namespace, []).append((own.asked, key))
        turns = zip_longest(*sorted((nlargest(count, users) for users in of.values()), reverse=True))
        return [(one[1].namespace, one[1].group) for one in chain(*turns) if one is not None][:count]

    def has_told(self, tenant: str, user_id: str) -> bool:
        """Whether this gateway has told the others a request of the user, as far as it remembers."""
        return self._told.get(usual_key(tenant, user_id)) is not None

    async def recall(self, users: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Learn the latest requests that any gateway has told of these users (tenant, user_id), in place of what this one knew of them; but
        one that is noted meanwhile is later, and one that was noted after another gateway told its own is told again. Returns the users of
        which one was found.
        """
        asked, shared = list(users), self.shared
        if shared is None:
            return []
        parts = [asked[start : start + RECALLED_AT_ONCE] for start in range(0, len(asked), RECALLED_AT_ONCE)]
        return [user for part in parts for user in await self._recall(part, shared)]

    async def _recall(self, users: list[tuple[str, str]], shared: SharedNotes[RecommendRequest]) -> list[tuple[str, str]]:
        forgotten, known = self._forgotten, {key: self._last(key) for key in (usual_key(*user) for user in users)}
        found = await shared.find(known)
        if forgotten != self._forgotten:  # users were erased meanwhile, perhaps these
            return []
        for key, (usual, age_s) in found.items():
            if self._last(key) is not known[key]:
                continue
            if (own := self._own.get(key)) is None:
                self._recalled.put(key, usual)
            elif own.request != usual and (noted_s := self._clock() - own.noted_at) < age_s:
                shared.put(key, own.request, noted_s)
                self._told.put(key, own.noted_at)
            else:
                self._own.put(key, own._replace(request=usual))
        return [(key.namespace, key.group) for key in found]

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        for known in (self._own, self._recalled, self._told):
            known.forget(tenant, user_id)
        self._forgotten += 1
        if self.shared is not None:
            self.shared.forget(lambda key: concerns(key, tenant, user_id))

    def _last(self, key: Key) -> RecommendRequest | None:
        own = self._own.get(key)
        return own.request if own else self._recalled.get(key)


def _is_short(listed: list[str]) -> bool:
    return len(listed) <= REMEMBERED_ITEMS and sum(map(len, listed)) <= REMEMBERED_LENGTH


def usual_key(tenant: str, user_id: str) -> Key:
    """The key of a user's usual request. No answer's key has this digest."""
    return Key(tenant, user_id, "usual")
