"""What a gateway remembers of each user beside cached answers; it can forget one user, all of a tenant, or all."""

from collections.abc import Callable, Iterable
from heapq import nlargest
from itertools import chain, zip_longest
from math import exp2, inf, log2
from time import monotonic
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from cluster.cache.codec import Codec
from cluster.cache.entry import Key
from cluster.cache.recent import REMEMBERED, Recent
from cluster.cache.scopes import concerns
from cluster.cache.shared_notes import KEPT_S, SharedNotes
from cluster.traffic.budget import unhurried
from cluster.values import RecommendRequest

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
REQUEST_CODEC: Codec[RecommendRequest] = Codec(msgspec.json.Encoder().encode, msgspec.json.Decoder(RecommendRequest).decode)


class Usual(NamedTuple):
    """A user that asks this gateway: the last request, of any gateway; how often the user asks this one, and when it was asked last.

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
