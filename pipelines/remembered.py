"""What a gateway remembers of each user beside cached answers. It can forget one user, all of a tenant, or all."""

from collections import OrderedDict
from typing import Generic, TypeVar

from msgspec.structs import replace

from cluster.cache.entry import Key
from cluster.cache.scopes import concerns
from cluster.traffic.budget import unhurried
from cluster.values import RecommendRequest
from pipelines.answer_key import cacheable

REMEMBERED = 10_000
REMEMBERED_ITEMS = 100
"""Requests that list more blocked and allowed items than this are not remembered, which bounds the memory of each user."""
V = TypeVar("V")


class Recent(Generic[V]):
    """Values by keys that name a user; at most `limit`, the least recently put is dropped first."""

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
        """Drop the values of one user, of all users of `tenant`, or of all tenants. Takes time in proportion to `len(self)`."""
        for key in [key for key in self._values if concerns(key, tenant, user_id)]:
            del self._values[key]


class UsualRequests(Recent[RecommendRequest]):
    """Each user's last request. The versions of a model share it."""

    def note(self, request: RecommendRequest) -> None:
        """Remember the request if its answer depends on stored events alone: a new event is then the moment to compute it again."""
        listed = len(request.blocked) + len(request.allowed or ())
        if request.behaviours is None and request.request_time is None and listed <= REMEMBERED_ITEMS and cacheable(request):
            self.put(_of(request.tenant, request.user_id), replace(unhurried(request), cache="use"))

    def of(self, tenant: str, user_id: str) -> RecommendRequest | None:
        return self.get(_of(tenant, user_id))


def _of(tenant: str, user_id: str) -> Key:
    return Key(tenant, user_id, "")
