"""Answers out of two tiers: memory of this process (L1), then the cache that all replicas share (L2), then computed, once.

    get_or_compute:  L1 -> join the computation here -> L2: the entry | the lease to compute it | wait for the lease's holder -> compute

An answer past its time is still served, at once, while one task computes the next; answers in demand are computed anew ahead of their time.
A shared cache that fails is no error here.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Generic, TypeAlias, TypeVar

from cluster.background import Background, lane_of
from cluster.cache.codec import Codec, CountingCodec
from cluster.cache.entry import ANEW, Entry, Key, merged, weight_of
from cluster.cache.epochs import Epochs
from cluster.cache.hot_keys import HotKeys
from cluster.cache.memory import MemoryCache
from cluster.cache.scopes import concerns
from cluster.cache.second_tier import Arrived, Right, SecondTier
from cluster.cache.shared import ShardedCache
from cluster.cache.single_flight import Flight, SingleFlight
from cluster.cache.tier_values import Computed, Found, Invalidated, Pauses, TierSettings, TierStatistics
from cluster.values import CacheTier

T = TypeVar("T")
Compute: TypeAlias = Callable[[], Awaitable[Computed[T]]]
HOTTEST = 10
COMPUTED_TIMES = 2
"""How many times as large as its bytes a computed value is in memory, at most: an answer has columns, and their JSON once it was sent."""
logger = logging.getLogger(__name__)


class TieredCache(Generic[T]):
    """Belongs to one event loop. A value goes to many callers: none may alter it. `clock`: seconds since 1970, as entries have them."""

    def __init__(
        self,
        l1: MemoryCache,
        l2: ShardedCache | None,
        settings: TierSettings,
        codec: Codec[T],
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        hot_keys: HotKeys[Key] | None = None,
    ) -> None:
        self._l1, self._codec, self._settings = l1, CountingCodec(codec), settings
        self._l2 = None if l2 is None else SecondTier(l2, self._codec, settings, l1.remove)
        self._clock, self._rng = clock, rng or random.Random()
        self._hot: HotKeys[Key] = hot_keys or HotKeys(clock=clock, hot_per_minute=settings.hot_per_minute)
        self._epochs, self._pauses = Epochs(0), Pauses(clock)
        self._flights: SingleFlight[Key, Found[T]] = SingleFlight()
        self._background = Background(settings.max_background)
        self._free: Callable[[], float] = lambda: inf
        self._computed = self._joined = self._refreshes = self._dropped = 0

    @property
    def shared(self) -> ShardedCache | None:
        """L2, for what is kept there beside answers."""
        return None if self._l2 is None else self._l2.shared

    async def get_or_compute(
        self,
        key: Key,
        compute: Compute[T],
        *,
        refresh: bool = False,
        renew: Compute[T] | None = None,
        pace: str = "",
        look_up_s: float = inf,
    ) -> Found[T]:
        """The answer: kept, joined or computed. An error of `compute` is raised to all callers that wait here, and nothing is kept. The
        computation is cancelled with the last of them.

        With `refresh`, no kept answer will do, but one that is being computed now will. `renew` computes in place of `compute` where no
        caller waits. Callers join each other's computation if their `pace`, a name for the time that they give it, is the same.
        `look_up_s`: how long the shared cache may take before the answer is computed here; where that is limited, no computation elsewhere
        is waited for.
        """
        self._hot.record(key)
        if not refresh and (entry := self._l1.get(key)) is not None:
            found = self._found(entry, "l1", key)
        else:
            found = await self._join_or_begin(key, pace, compute, ANEW if refresh else 0.0, look_up_s)
        if found.due:
            self.refresh(key, renew or compute)
        return found

    async def get(self, key: Key, *, within_s: float = inf) -> Found[T] | None:
        """The kept answer, fresh or stale; nothing is computed. `within_s`: how long the shared cache may take."""
        tier: CacheTier = "l1"
        if (entry := self._l1.get(key)) is None and self._l2 is not None:
            tier, began = "l2", self._epochs.now
            if (entry := await self._l2.find(key, within_s)) is not None:
                self._remember(key, entry, began)
        if entry is None:
            return None
        self._hot.record(key)
        return self._found(entry, tier, key)

    def resize(self, l1_bytes: int) -> None:
        """Give this replica's memory another size; the answers that are asked for stay."""
        self._l1.resize(l1_bytes)

    def give_way(self, free: Callable[[], float]) -> None:
        """From now on a refresh begins only while fewer are under way than `free()` gives: places that no request has. A lane has at
        most half of what the others leave.
        """
        self._free = free

    def let_go(self, needless: Callable[[T], bool]) -> None:
        """Forget the answers in this memory that are `needless`: those of a retired model, which they would keep in memory."""
        self._l1.discard([key for key, entry in self._l1.entries() if needless(entry.payload)])

    def refresh(self, key: Key, compute: Compute[T]) -> bool:
        """Compute the answer in the background, unless that is under way or was just done, here or in another replica, or there is no room
        for it, see `give_way`. Returns whether a task was begun.
        """
        if self._flights.get(key) is not None or self._pauses.paused(key):
            return False
        lane = lane_of(key.namespace)
        if not self._background.has_room_for(lane, self._free()):
            self._dropped += 1
            return False
        self._background.keep(self._ahead(key, compute, waiting=1).task, lane)
        return True

    async def expect(self, key: Key, compute: Compute[T]) -> None:
        """Have the answer computed before it is asked for; returns when it is kept or cannot be had, and at once where it is under way. How
        many go on at a time is the caller's to limit: these take no room from refreshes, nor refreshes from these.
        """
        entry = self._l1.peek(key)
        good = entry is not None and not entry.degraded and entry.freshness(self._clock()) == "fresh"
        if not good and self._flights.get(key) is None and not self._pauses.paused(key):
            with suppress(Exception):  # which is logged
                await self._flights.wait(self._ahead(key, compute))

    def divide(self, replicas: int) -> None:
        """From now on so many replicas share the lookups of each key equally."""
        self._hot.divide(replicas)

    def forget(self, namespace: str | None = None, group: str | None = None) -> int:
        """Remove from this replica's memory a group, a namespace (group None) or everything; returns how many entries.

        Answers of it that are being computed now are not kept either, and no later caller is given them.
        """
        self._epochs.end(namespace, group)
        for kept in (self._flights.detach, self._hot.forget, self._pauses.forget):
            kept(lambda key: concerns(key, namespace, group))
        return self._l1.invalidate(namespace, group)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> Invalidated:
        """`forget`, and erase from the shared cache too. Other replicas have to `forget` by themselves."""
        removed = self.forget(namespace, group)
        if self._l2 is None:
            return Invalidated(removed)
        erased = await self._l2.shared.invalidate(namespace, group)
        return Invalidated(removed, erased.entries, erased.unconfirmed)

    async def statistics(self) -> TierStatistics:
        return TierStatistics(
            l1=self._l1.statistics(),
            l2=merged((await self._l2.shared.statistics()).values()) if self._l2 else None,
            shards=self._l2.shared.health() if self._l2 else (),
            computed=self._computed,
            joined=self._joined,
            refreshes=self._refreshes,
            dropped=self._dropped + (self._l2.writes.dropped if self._l2 else 0),
            codec_failures=self._codec.failures,
            hot=tuple((key.digest, rate) for key, rate in self._hot.top(HOTTEST)),
        )

    async def flush(self) -> None:
        """Wait until all that was computed so far is in the shared cache, or was refused there."""
        if self._l2 is not None:
            await self._l2.flush()

    async def close(self) -> None:
        """End the background tasks, send what is still to be written, and close the shared cache."""
        await self._background.close()
        await self.flush()
        if self._l2 is not None:
            await self._l2.shared.close()

    async def _join_or_begin(self, key: Key, pace: str, compute: Compute[T], newer_than: float, look_up_s: float) -> Found[T]:
        one = key._replace(digest=f"{key.digest} {pace}") if pace else key
        while (flight := self._flights.get(one)) is not None:
            found = await self._flights.wait(flight)
            if newer_than < ANEW or found.tier != "l2":  # a flight that was answered by L2 computed nothing new
                self._joined += 1
                return replace(found, tier="joined")
        return await self._flights.wait(self._flights.start(one, lambda: self._obtain(key, compute, newer_than, look_up_s)))

    def _ahead(self, key: Key, compute: Compute[T], *, waiting: int = 0) -> Flight[Key, Found[T]]:
        """A computation that is begun before a caller has to wait."""
        entry = self._l1.expect(key)
        newer_than = max(self._clock(), entry.fresh_until if entry else 0.0)
        self._refreshes += 1
        return self._flights.start(key, lambda: self._refreshed(key, compute, newer_than), waiting=waiting)

    async def _refreshed(self, key: Key, compute: Compute[T], newer_than: float) -> Found[T]:
        try:
            return await self._obtain(key, compute, newer_than)
        except Exception as error:
            self._pauses.pause(key, self._settings.negative_ttl_s)
            logger.info("a cached answer could not be refreshed: %s: %s", type(error).__name__, error)
            raise

    async def _obtain(self, key: Key, compute: Compute[T], newer_than: float, look_up_s: float = inf) -> Found[T]:
        began = self._epochs.now
        answer = await self._l2.obtain(key, newer_than, look_up_s) if self._l2 else None
        if not isinstance(answer, Arrived):
            return await self._compute(key, compute, began, answer, replaces=newer_than > 0)
        self._remember(key, answer.entry, began)
        return self._found(answer.entry, "joined" if answer.awaited else "l2", key)

    async def _compute(self, key: Key, compute: Compute[T], began: int, right: Right | None, *, replaces: bool) -> Found[T]:
        started, kept = time.perf_counter(), False
        try:
            computed = await compute()
            self._computed += 1
            kept = self._keep(key, computed, 1000 * (time.perf_counter() - started), began, right, replaces=replaces)
            return Found(computed.value, "computed", kept=computed.keep)
        finally:
            if self._l2 is not None and right is not None and not kept:
                self._l2.release(key, right)

    def _keep(self, key: Key, computed: Computed[T], cost_ms: float, began: int, right: Right | None, *, replaces: bool) -> bool:
        """Keep a computed answer in both tiers; returns whether it goes to the second. `replaces`: it is a refresh: either tier may hold a
        good answer, for which a degraded one is no replacement.
        """
        payload = self._codec.encoded(computed.value) if computed.keep else None
        if replaces and (payload is None or computed.degraded):
            self._pauses.pause(key, self._settings.negative_ttl_s)  # or each caller that is given a stale one would start the next attempt
        if payload is None:
            return False
        entry = self._entry(payload, computed.degraded, cost_ms)
        if computed.degraded and (replaces or entry.gives_way_to(self._l1.peek(key))):
            return False
        self._remember(key, replace(entry, payload=computed.value, weight=weight_of(COMPUTED_TIMES * len(payload))), began)
        return self._l2 is not None and right is not None and self._l2.put(key, entry, right.epoch)

    def _remember(self, key: Key, entry: Entry, began: int) -> None:
        """Keep an entry, with its value, in this memory, unless it was erased since `began`."""
        if self._epochs.admits(key, began):
            self._l1.put(key, entry)

    def _entry(self, payload: bytes, degraded: bool, cost_ms: float) -> Entry:
        settings = self._settings
        fresh_s, stale_s = (settings.negative_ttl_s, 0.0) if degraded else (settings.ttl_s, settings.stale_s)
        fresh_s *= 1 + self._rng.uniform(-settings.jitter, settings.jitter)
        weight, now = weight_of(len(payload)), self._clock()
        return Entry.lasting(payload, weight, now=now, fresh_s=fresh_s, stale_s=stale_s, cost_ms=cost_ms, degraded=degraded)

    def _found(self, entry: Entry, tier: CacheTier, demanded: Key) -> Found[T]:
        now = self._clock()
        stale = entry.freshness(now) != "fresh"
        due = stale or self._hot.due(demanded, entry, now, self._settings.refresh_ahead)
        return Found(entry.payload, tier, max(0.0, now - entry.fresh_until + entry.fresh_s), stale, due)
