"""What a gateway remembers of users, beside their answers. It names them, so it can forget one, a tenant's or all."""

from collections import OrderedDict
from dataclasses import replace
from typing import Generic, TypeVar

from cluster.cache.entry import Key
from cluster.cache.scopes import concerns
from cluster.traffic.budget import unhurried
from cluster.values import RecommendRequest
from pipelines.answer_key import cacheable

REMEMBERED = 10_000
REMEMBERED_ITEMS = 100
"""Items that a remembered request may list: what is remembered is bounded by users, and must be small for each."""
V = TypeVar("V")


class Recent(Generic[V]):
    """Values by keys that name a user; at most `limit`: the one that was not put for longest goes first."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> V | None:
        return self._values.get(key)

    def put(self, key: Key, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """One user's of a tenant, a tenant's or everybody's. Takes time in proportion to what is remembered."""
        for key in [key for key in self._values if concerns(key, tenant, user_id)]:
            del self._values[key]


class UsualRequests(Recent[RecommendRequest]):
    """What each user asked for last, whichever version of the model answered: several `Answers` share it."""

    def note(self, request: RecommendRequest) -> None:
        """Where it follows from the user alone: then the next event says when to compute it again."""
        listed = len(request.blocked) + len(request.allowed or ())
        if request.behaviours is None and request.request_time is None and listed <= REMEMBERED_ITEMS and cacheable(request):
            self.put(_of(request.tenant, request.user_id), replace(unhurried(request), cache="use"))

    def of(self, tenant: str, user_id: str) -> RecommendRequest | None:
        return self.get(_of(tenant, user_id))


def _of(tenant: str, user_id: str) -> Key:
    return Key(tenant, user_id, "")
