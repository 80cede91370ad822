"""A cache shard as a named Ray actor, which outlives the process that made it, and how such actors are found, made and ended.

Actors hand each other what they hold as their number changes (see cluster.cache.moving). One that no gateway asks any more ends itself. One
that dies is restarted by Ray, empty; until then its keys are misses. Gateways reach them by cluster.cache.actor_shards.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from cluster.cache.admission import admission_of
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.memory import MemoryCache
from cluster.cache.moving import MovingShard, ShardState
from cluster.traffic.batcher import Raised
from cluster.traffic.utilisation import Utilisation

NAMESPACE = "genrec"
RAY_ERRORS = (RayError, ValueError, RuntimeError, ConnectionError)  # what Ray raises where it, or an actor, cannot be reached
MAX_CONCURRENCY = 10_000  # callers that wait for another's computation take a place each
UNASKED_S = 600.0
"""An actor that no gateway asked for its statistics for so long ends itself: gateways ask every few seconds, so its application was removed
or has another name, and no erasure would reach what it keeps.
"""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """The settings of one cache actor. Of two that differ, the later `given_at` (seconds since 1970) holds."""

    policy: str
    capacity_bytes: int
    namespace_share: float
    minimum_hit_rate: float
    given_at: float


class Asked(NamedTuple):
    """A call of a shard's method, one that does not wait for other callers. `size`: of its arguments, in bytes, where they may be large."""

    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = {}
    size: int = 0


class CacheActor(MovingShard):
    """The shard behind a name; each of its methods is a remote call."""

    def __init__(self, name: str, settings: ShardSettings) -> None:
        used = Utilisation(time.monotonic(), time.process_time())
        super().__init__(name, _memory(settings), _peer, busy=lambda: used.share(time.monotonic(), time.process_time()))
        self._settings = settings
        self._asked_at = time.monotonic()
        threading.Thread(target=self._end_unasked, name="unasked", daemon=True).start()  # there is no event loop yet

    async def statistics(self) -> CacheStatistics:
        self._asked_at = time.monotonic()
        return await super().statistics()

    async def follow(self, layout: Layout) -> ShardState:
        self._asked_at = time.monotonic()
        return await super().follow(layout)

    async def configure(self, settings: ShardSettings) -> bool:
        """Take new settings; returns whether they changed anything. Entries stay as far as there is room, those that the policy would evict
        last before others, and so do counts.
        """
        if settings.given_at <= self._settings.given_at:
            return False
        known, self._settings = self._settings, settings
        if replace(known, given_at=settings.given_at) == settings:
            return False
        self.memory.resize(settings.capacity_bytes)
        if (settings.policy, settings.namespace_share) != (known.policy, known.namespace_share):
            self.memory.evict_by(settings.policy, settings.namespace_share)
        if settings.minimum_hit_rate != known.minimum_hit_rate:
            self.memory.admission = admission_of(settings.minimum_hit_rate)
        return True

    def _end_unasked(self) -> None:
        """Begun with the actor, not by a call: one that Ray restarts after its application was removed is called by no gateway."""
        while True:
            if (left_s := self._asked_at + UNASKED_S - time.monotonic()) > 0:
                time.sleep(left_s)
                continue
            try:
                kill(self._name)
            except RAY_ERRORS as error:
                logger.warning("cache actor %s cannot end itself: %s: %s", self._name, type(error).__name__, error)
            self._asked_at = time.monotonic()

    async def each(self, calls: Sequence[Asked]) -> list[Any | Raised]:
        """What these come to, in their order; the error of one is its own."""
        return [await self._answer(one) for one in calls]

    async def _answer(self, asked: Asked) -> Any | Raised:
        try:
            return await getattr(self, asked.method)(*asked.arguments, **asked.named)
        except Exception as error:  # noqa: BLE001 - it goes to the caller
            return Raised(error)


def named(name: str) -> list[str]:
    """The names of the cache actors that there are. Blocks."""
    numbered = re.compile(rf"{re.escape(name)}-\d+")
    there = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in there if one["namespace"] == NAMESPACE and numbered.fullmatch(one["name"])]


def find(name: str) -> Any | None:
    """The actor of this name; None where it has ended. Blocks."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def kill(name: str) -> None:
    """End the actor of this name for good, where there is one. Blocks. Raises ConnectionError where this process is in no Ray cluster."""
    _require_ray()
    try:
        ray.kill(ray.get_actor(name, NAMESPACE))
        logger.info("ended cache actor %s: it is not needed any more", name)
    except ValueError:  # another replica was faster
        logger.debug("cache actor %s has ended", name)


def find_or_make(name: str, settings: ShardSettings) -> Any:
    """The actor of this name. Blocks until Ray's head has answered, not until the actor runs. Raises ConnectionError as `kill` does."""
    _require_ray()
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    placed = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY, "scheduling_strategy": "SPREAD"}
    unlisted = {"enable_task_events": False}  # as Serve has it for its replicas: no call is told to Ray's head
    actor: Any = ray.remote(CacheActor).options(**options, **placed, **unlisted).remote(name, settings)
    actor.configure.remote(settings)
    return actor


def _require_ray() -> None:
    if not ray.is_initialized():  # Ray would start a cluster of its own here, which ends with this thread, and a minute later the process
        raise ConnectionError("this process belongs to no Ray cluster")


class _Peer:
    """Another actor, as an actor sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def take_over(self, entries: Mapping[Key, Entry], epoch: int, layout: Layout) -> int:
        now: int = await self._actor.take_over.remote(dict(entries), epoch, layout)
        return now


async def _peer(name: str) -> _Peer:
    return _Peer(await asyncio.to_thread(ray.get_actor, name, NAMESPACE))


def _memory(settings: ShardSettings) -> MemoryCache:
    admission = admission_of(settings.minimum_hit_rate)
    return MemoryCache(settings.policy, settings.capacity_bytes, admission=admission, namespace_share=settings.namespace_share)
