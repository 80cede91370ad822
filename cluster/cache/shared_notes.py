"""What one gateway learns of a user and all may know: small values in the shared cache, beside the answers and erased with them."""

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from cluster.cache.codec import Codec, CountingCodec
from cluster.cache.entry import Entry, Key, weight_of
from cluster.cache.shared import ShardedCache
from cluster.cache.write_behind import WriteBehind

KEPT_S = 3600.0
MAX_WRITES = 1024
T = TypeVar("T")


class SharedNotes(Generic[T]):
    """Values by key, for `KEPT_S` after they were put last. Writes wait for nothing; what the shared cache loses is not known any more."""

    def __init__(self, shared: ShardedCache, codec: Codec[T], clock: Callable[[], float] = time.time) -> None:
        self._shared, self._codec, self._clock = shared, CountingCodec(codec), clock
        self._writes = WriteBehind(shared, MAX_WRITES)

    def put(self, key: Key, value: T, age_s: float = 0.0) -> None:
        """Write the value, which was learnt `age_s` seconds ago, in the background."""
        if (payload := self._codec.encoded(value)) is not None:
            self._writes.put(key, Entry.lasting(payload, weight_of(len(payload)), now=self._clock() - age_s, fresh_s=KEPT_S))

    async def find(self, keys: Iterable[Key]) -> dict[Key, tuple[T, float]]:
        """The values of those keys that have one, but of none that is on its way from here: what is in the shared cache is older. With each
        the seconds since it was learnt, as far as the clocks of the gateways agree.
        """
        found = (await self._shared.mget([key for key in keys if key not in self._writes], counted=False)).entries
        decoded, now = {key: self._codec.decoded(entry) for key, entry in found.items()}, self._clock()
        return {key: (entry.payload, now - entry.fresh_until + entry.fresh_s) for key, entry in decoded.items() if entry is not None}

    def forget(self, concerned: Callable[[Key], bool]) -> None:
        """Drop the concerned values that wait to be written. Those in the shared cache are erased by the shared cache itself."""
        self._writes.forget(concerned)

    async def flush(self) -> None:
        """Wait until all that was put so far is in the shared cache."""
        await self._writes.flush()
