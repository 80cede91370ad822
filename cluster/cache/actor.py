"""Cache shards as named Ray actors, which outlive the process that made them.

    replica -> ShardedCache -> ActorShard -> (Ray) -> CacheActor, one process each: APPLICATION-cache-0, -1, ...

Actors are named by the Serve application: two applications on one cluster share none. A call of an actor costs each side about a
millisecond of Python, for one lookup or many, so lookups that wait go together.

How many there are may change while they serve (see cluster.cache.elastic): they hand each other what they hold.

An actor that no gateway asks any more ends itself. One that dies is restarted by Ray, empty; until then its keys are misses. One that was
removed for good is made anew. A large value stays in the object store of the node that computed it: only a reference passes through the
actor, and it is a miss once that is lost.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from cluster.cache.admission import admission_of
from cluster.cache.elastic import ElasticCache
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.memory import MemoryCache
from cluster.cache.moving import MovingShard, ShardState
from cluster.cache.shard import Leased, Lookup
from cluster.cache.shared import SharedSettings
from cluster.config import CacheSettings
from cluster.errors import BackendUnavailable
from cluster.no_request import no_requests_context
from cluster.traffic.batcher import Batcher, Member, Pacing, Raised
from cluster.traffic.utilisation import Utilisation

T = TypeVar("T")
NAMESPACE = "genrec"
LARGE_BYTES = 100_000
REFUSALS = (RayError, ValueError, RuntimeError, ConnectionError)  # what Ray raises where it, or an actor, cannot be reached
MAX_CONCURRENCY = 10_000  # callers that wait for another's computation take a place each
MOST, ON_THE_WAY, PATIENCE_S = 16, 2, 0.2
"""Lookups in one call, few enough for an answer without Ray's object store; calls under way, and for how long each delays the next."""
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
    """A call of a shard's method, one that does not wait for other callers."""

    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = {}


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
        """Take new settings; returns whether they changed anything. The latest entries stay, as far as there is room."""
        if settings.given_at <= self._settings.given_at:
            return False
        known, self._settings = self._settings, settings
        if replace(known, given_at=settings.given_at) == settings:
            return False
        held, self.memory = self.memory.entries(), _memory(settings)
        self.memory.take_over(held)
        return True

    def _end_unasked(self) -> None:
        """Begun with the actor, not by a call: one that Ray restarts after its application was removed is called by no gateway."""
        while True:
            if (left_s := self._asked_at + UNASKED_S - time.monotonic()) > 0:
                time.sleep(left_s)
                continue
            try:
                _kill(self._name)
            except REFUSALS as error:
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


class ActorShard:
    """A cache actor as a Movable. After a failed call the actor is found again by its name, or made anew, in the background, as long as it
    is `wanted`.
    """

    def __init__(
        self, name: str, settings: ShardSettings, large_within_s: float, actor: Any, wanted: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._name, self._settings, self._large_within_s, self._wanted = name, settings, large_within_s, wanted
        self._actor = actor
        self._search: asyncio.Task[None] | None = None
        self._lookups: Batcher[Asked, Any] = Batcher(
            self._together,
            lambda sizes: range(min(len(sizes), MOST)),
            lambda: MOST,
            pacing=Pacing(max_running=lambda: ON_THE_WAY, patience_s=PATIENCE_S),
            cancel_when_all_left=True,
            context=no_requests_context(),
        )

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        found: Lookup = await self._lookups.submit(Asked("mget", (list(keys),), {"counted": counted}))
        entries = await asyncio.gather(*map(self._whole, found.entries.values()))
        return Lookup({key: entry for key, entry in zip(found.entries, entries, strict=True) if entry}, found.epochs)

    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        epochs: Mapping[Key, int] = await self._call("epochs", list(keys))
        return epochs

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        light = {key: await _light(entry) for key, entry in entries.items()}
        refused: frozenset[Key] = await self._call("mput", light, dict(epochs))
        return refused

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased:
        leased: Leased = await self._lookups.submit(Asked("lease", (key, holder, seconds, newer_than)))
        if not isinstance(leased, Entry):
            return leased
        if (entry := await self._whole(leased)) is not None:
            return entry
        again: Leased = await self._call("lease", key, holder, seconds, max(newer_than, leased.fresh_until))
        if not isinstance(again, Entry):
            return again
        if (entry := await self._whole(again)) is not None:
            return entry
        raise LookupError(f"{self._name}: the value of {key.digest} was lost with the process that computed it")

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        entry: Entry | None = await self._call("wait", key, within_s, newer_than)
        return await self._whole(entry) if entry else None

    async def release(self, key: Key, holder: str) -> None:
        await self._call("release", key, holder)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        count: int = await self._call("invalidate", namespace, group)
        return count

    async def follow(self, layout: Layout) -> ShardState:
        state: ShardState = await self._call("follow", layout)
        return state

    async def erase(self, namespace: str | None, group: str | None, layout: Layout) -> tuple[int, Layout]:
        answer: tuple[int, Layout] = await self._call("erase", namespace, group, layout)
        return answer

    async def statistics(self) -> CacheStatistics:
        answer: CacheStatistics = await self._call("statistics")
        self._actor.configure.remote(self._settings)  # restarted since, it has those it was first made with; else this changes nothing
        return answer

    async def close(self) -> None:
        """The actor stays, for the other replicas and the next ones."""
        if self._search is not None:
            self._search.cancel()

    async def _together(self, members: Sequence[Member[Asked, Any]]) -> Sequence[Any | Raised]:
        answers: Sequence[Any | Raised] = await self._call("each", [member.request for member in members])
        return answers

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises BackendUnavailable where the actor's process has ended: Ray has the next calls wait until it runs again."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except BaseException as error:  # a timeout, seen from here, is a cancellation
            self._find_again()
            if isinstance(error, RayActorError):
                raise BackendUnavailable(f"cache actor {self._name} has ended") from error
            raise

    async def _whole(self, entry: Entry) -> Entry | None:
        """The entry with its bytes; None where those were lost with the process that put them, or do not come in time."""
        if not isinstance(entry.payload, ray.ObjectRef):
            return entry
        try:
            async with asyncio.timeout(self._large_within_s):
                return replace(entry, payload=await entry.payload)
        except (RayError, TimeoutError) as error:
            logger.info("a large cached value is a miss: %s: %s", type(error).__name__, error)
            return None

    def _find_again(self) -> None:
        if self._wanted(self._name) and (self._search is None or self._search.done()):
            self._search = asyncio.get_running_loop().create_task(self._found())

    async def _found(self) -> None:
        try:
            self._actor = await asyncio.to_thread(_find_or_make, self._name, self._settings)
        except REFUSALS as error:
            logger.warning("cache actor %s cannot be reached: %s: %s", self._name, type(error).__name__, error)


class ActorShards:
    """The cache actors of a name, as Shards."""

    def __init__(self, name: str, settings: ShardSettings, large_within_s: float) -> None:
        self._name, self._settings, self._large_within_s = name, settings, large_within_s
        self._wanted = frozenset[str]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-actors")

    async def make(self, names: Sequence[str]) -> Mapping[str, ActorShard]:
        self._wanted = frozenset(names)
        actors = await self._ask_ray(lambda: {one: _find_or_make(one, self._settings) for one in names})
        return {one: self._shard(one, actor) for one, actor in actors.items()}

    async def others(self, names: Sequence[str]) -> Mapping[str, ActorShard]:
        actors = await self._ask_ray(lambda: {one: _find(one) for one in _named(self._name) if one not in names})
        return {one: self._shard(one, actor) for one, actor in actors.items() if actor is not None}

    async def end(self, name: str) -> None:
        await self._ask_ray(lambda: _kill(name))

    async def _ask_ray(self, question: Callable[[], T]) -> T:
        """Ask one question after the other, in a thread for them alone: while Ray's head is away an answer takes a minute, and questions
        that were given up would hold the threads that the whole process shares.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, question)
        except REFUSALS as error:
            raise _unreachable(error) from error

    def _shard(self, name: str, actor: Any) -> ActorShard:
        return ActorShard(name, self._settings, self._large_within_s, actor, self._wanted_still)

    def _wanted_still(self, name: str) -> bool:
        return name in self._wanted


async def connect(settings: CacheSettings, name: str, patience: SharedSettings | None = None) -> ElasticCache:
    """The shared cache of this name; its actors are made where they do not exist, and told the settings where they do. Actors that are not
    wanted any more, as of earlier settings, give what they hold to the others, and are ended.

    `patience`: the deadlines, in place of those of the settings. Raises BackendUnavailable in a process that belongs to no Ray cluster.
    """
    if not ray.is_initialized():  # the first remote call would start a cluster of its own
        raise BackendUnavailable("the cache actors live in a Ray cluster, and this process belongs to none; call ray.init first")
    shard = ShardSettings(settings.policy, settings.l2_shard_bytes, settings.tenant_share, settings.minimum_hit_rate, given_at=time.time())
    patience = patience or SharedSettings(deadline_s=settings.l2_deadline_ms / 1000)
    place = ActorShards(name, shard, patience.deadline_s / 2)
    return await ElasticCache.made(name, place, least=settings.l2_shards, most=settings.most_shards, settings=patience)


def remove_all(name: str) -> None:
    """End the cache actors of this name for good, where there are any: they outlive the configuration that asked for them. Blocks for one
    call of Ray's head where there are none. Does not raise: what is wrong is logged.
    """
    if not ray.is_initialized():
        return
    try:
        for one in _named(name):
            _kill(one)
    except REFUSALS as error:
        logger.warning("cache actors may live on (%s: %s); look for them with: ray list actors", type(error).__name__, error)


def name_of(application: str) -> str:
    """What the cache actors of a Serve application are called, before their numbers."""
    return f"{application}-cache"


def _named(name: str) -> list[str]:
    """The names of the cache actors that there are. Blocks."""
    numbered = re.compile(rf"{re.escape(name)}-\d+")
    there = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in there if one["namespace"] == NAMESPACE and numbered.fullmatch(one["name"])]


def _find(name: str) -> Any | None:
    """The actor of this name; None where it has ended."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _kill(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, NAMESPACE))
        logger.info("ended cache actor %s: it is not needed any more", name)
    except ValueError:  # another replica was faster
        logger.debug("cache actor %s has ended", name)


def _find_or_make(name: str, settings: ShardSettings) -> Any:
    """The actor of this name. Blocks until Ray's head has answered, not until the actor runs."""
    if not ray.is_initialized():  # Ray would start a cluster of its own here, which ends with this thread, and a minute later the process
        raise ConnectionError("this process belongs to no Ray cluster")
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    placed = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY, "scheduling_strategy": "SPREAD"}
    actor: Any = ray.remote(CacheActor).options(**options, **placed).remote(name, settings)
    actor.configure.remote(settings)
    return actor


class _Peer:
    """Another actor, as an actor sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def take_over(self, entries: Mapping[Key, Entry], epoch: int, layout: Layout) -> int:
        now: int = await self._actor.take_over.remote(dict(entries), epoch, layout)
        return now


async def _peer(name: str) -> _Peer:
    return _Peer(await asyncio.to_thread(ray.get_actor, name, NAMESPACE))


def _unreachable(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(f"the cache actors cannot be reached: {type(error).__name__}: {error}; see: ray status")


def _memory(settings: ShardSettings) -> MemoryCache:
    admission = admission_of(settings.minimum_hit_rate)
    return MemoryCache(settings.policy, settings.capacity_bytes, admission=admission, namespace_share=settings.namespace_share)


async def _light(entry: Entry) -> Entry:
    """The entry; a large payload is put into the object store, and a reference stands in its place."""
    if len(entry.payload) < LARGE_BYTES:
        return entry
    return replace(entry, payload=await asyncio.to_thread(ray.put, entry.payload))  # copies, and may wait for room
