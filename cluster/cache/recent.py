"""A bounded memory of values by user, from which no tenant drives out another's."""

from collections import OrderedDict
from collections.abc import Callable, ItemsView
from time import monotonic
from typing import Generic, TypeVar

from cluster.cache.entry import Key
from cluster.cache.namespaces import Namespaces
from cluster.cache.policy import DEFAULT_POLICY
from cluster.cache.shared_notes import KEPT_S

REMEMBERED = 10_000
V = TypeVar("V")


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
