"""A Redis server as the shared cache: one shard, which Redis itself keeps within its `maxmemory`.

Give it a single server (not Redis Cluster: a script touches several keys) and a `maxmemory-policy` that begins with `volatile`: what
remembers erasures has no time to live, and is never evicted. With `volatile-ttl` what ends first is evicted first.
"""

import asyncio
import importlib.util
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from cluster.cache.entry import CacheStatistics, Entry, Key, NamespaceStatistics
from cluster.cache.namespaces import COUNTED_NAMESPACES, OTHERS
from cluster.cache.scopes import scope_digest, scopes_of
from cluster.cache.shard import Granted, Held, Leased, Lookup
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.config import CacheSettings
from cluster.errors import BackendUnavailable
from cluster.traffic.api_keys import masked
from cluster.values import Availability
from integrations.redis.entries import from_bytes, to_bytes
from integrations.redis.scripts import DROP, ERASE, LEASE, PUT, READ, RELEASE, WAIT

CONNECTIONS = 64
PROBE_WITHIN_S = 1.0
"""How long to connect to an address of the server may take; for a probe, also how long a reply to one command may."""
FIRST_POLL_S, LONGEST_POLL_S = 0.004, 0.05
LONGEST_S = 10 * 365 * 86_400.0
"""How long an entry is kept that never ends, by a `ttl_s` of .inf: Redis knows no infinity."""
UNKNOWN = object()
AT_ONCE = 500
"""Sets counted, or entries dropped, in one exchange with Redis."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class RedisCache:
    """A Shard. Belongs to one event loop. Hits, misses and insertions are counted by this client, entries and bytes by the server."""

    def __init__(self, url: str, prefix: str) -> None:
        """Connects with the first call. Raises BackendUnavailable where the package is missing or `url` is no URL of a Redis server."""
        _installed().require()
        self._redis, self._prefix = _client(url), prefix
        self._put, self._lease, self._read, self._wait, self._release, self._erase, self._drop = map(
            self._redis.register_script, (PUT, LEASE, READ, WAIT, RELEASE, ERASE, DROP)
        )
        self._counts: Counter[str] = Counter()
        self._lookups: dict[str, Counter[str]] = {}

    @staticmethod
    def get_availability(url: str) -> Availability:
        """Whether the package is here and a server answers at `url`; each step takes PROBE_WITHIN_S at most."""
        if not (installed := _installed()).ok:
            return installed
        import redis  # noqa: PLC0415 - optional

        try:
            _probed(url, lambda client: client.ping())
        except (redis.RedisError, ValueError, OSError) as error:
            return Availability.no(f"cannot reach redis at {_address(url)}: {error}; start it or correct redis_url")
        return Availability.yes()

    @classmethod
    async def connect(cls, settings: CacheSettings, application: str) -> ShardedCache:
        """An application's cache at `redis_url`; until the server answers, every key is a miss. Raises as __init__ does."""
        url = settings.redis_url or "redis://127.0.0.1:6379/0"
        shared = ShardedCache({"redis": cls(url, prefix_of(application))}, SharedSettings(deadline_s=settings.l2_deadline_ms / 1000))
        if not (availability := await asyncio.to_thread(cls.get_availability, url)).ok:
            logger.warning("%s; until then, all of its keys are misses", availability.reason)
        elif (policy := await asyncio.to_thread(_policy_at, url)) and not policy.startswith("volatile"):
            logger.warning(
                "redis at %s has the maxmemory-policy %s: once full, it may evict what remembers erasures, or take no answers; give it one"
                " that begins with volatile, as volatile-ttl",
                _address(url),
                policy,
            )
        return shared

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        if not keys:
            return Lookup({}, {})
        epoch, *raw = await self._read([self._prefix], _asked(keys))
        found = {key: entry for key, one in zip(keys, raw, strict=True) if (entry := from_bytes(one)) is not None}
        for key in keys if counted else ():
            self._count(key, found.get(key))
        return Lookup(found, dict.fromkeys(keys, int(epoch)))

    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        epoch, *_ = await self._read([self._prefix], [])
        return dict.fromkeys(keys, int(epoch))

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        refused, now = {key for key in entries if key not in epochs}, time.time()
        sent = [key for key in entries if key in epochs]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for key in sent:
                entry = entries[key]
                living_ms = max(1, int(1000 * min(LONGEST_S, max(entry.fresh_until, entry.stale_until) - now)))
                arguments = [*_parts(key), to_bytes(entry, epochs[key]), living_ms, epochs[key], *scopes_of(key)]
                await self._put([self._prefix], arguments, client=pipeline)
            taken = await pipeline.execute()
        self._counts["insertions"] += taken.count(1)
        return frozenset(refused.union(key for key, one in zip(sent, taken, strict=True) if not one))

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased:
        arguments = [*_parts(key), holder, max(1, int(1000 * seconds)), repr(newer_than), *scopes_of(key)]
        kind, first, *rest = await self._lease([self._prefix], arguments)
        entry = from_bytes(first) if kind == b"entry" else None
        if newer_than == 0:
            self._count(key, entry)
        if kind == b"entry":
            return entry or await self.lease(key, holder, seconds, float("inf"))  # bytes of another version: to be computed anew
        return Granted(int(first)) if kind == b"granted" else Held(max(0.0, rest[0] / 1000), int(first))

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        """Polls Redis, at first every few milliseconds, then less often. Other bytes than those of the first poll were put meanwhile."""
        first: object = UNKNOWN
        async for _ in _polls(within_s):
            raw, held = await self._wait([self._prefix], _asked([key]))
            first = raw if first is UNKNOWN else first
            entry = from_bytes(raw)
            if entry is not None and (entry.fresh_until > newer_than or raw != first):
                return entry
            if not held:
                return None
        return None

    async def release(self, key: Key, holder: str) -> None:
        await self._release([self._name("l", key)], [holder])

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        await self._note_erasure(scope_digest(namespace, group))
        if namespace is None:
            indexes = [f"n:{name}" for name in await self._namespaces()]
        else:
            indexes = [f"n:{_quoted(namespace)}" if group is None else f"g:{_quoted(namespace)}:{_quoted(group)}"]
        return await self._drop_all(indexes)

    async def statistics(self) -> CacheStatistics:
        memory, stats = await self._redis.info("memory"), await self._redis.info("stats")
        namespaces, now_ms = await self._namespaces(), 1000 * time.time()
        counts = await self._of_each([f"n:{name}" for name in namespaces], lambda pipeline, index: pipeline.zcount(index, now_ms, "+inf"))
        entries: dict[str, int] = dict(zip(namespaces, counts, strict=True))
        by_namespace = {
            name: NamespaceStatistics(counts["hits"], counts["misses"], entries.get(_quoted(name), 0))
            for name, counts in self._lookups.items()
        }
        return CacheStatistics(
            **self._counts,
            evictions=stats["evicted_keys"],
            expirations=stats["expired_keys"],
            entries=sum(entries.values()),
            used_bytes=memory["used_memory"],
            capacity_bytes=memory["maxmemory"],
            by_namespace=by_namespace,
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def _note_erasure(self, scope: str) -> None:
        """Record an erasure. A Redis without room for it loses all records instead, so that all earlier entries count as erased."""
        from redis.exceptions import OutOfMemoryError  # noqa: PLC0415 - optional

        try:
            await self._erase([self._prefix], [scope])
        except OutOfMemoryError:
            logger.warning("Redis has no room left for erasures: all that it keeps for %r counts as erased", self._prefix)
            if not await self._redis.delete(f"{self._prefix}x"):
                await self._redis.delete(f"{self._prefix}e")

    async def _namespaces(self) -> list[str]:
        """The quoted names of the namespaces that have an entry or a lease."""
        return [name.decode() for name in await self._redis.zrange(f"{self._prefix}a", 0, -1)]

    async def _of_each(self, indexes: Sequence[str], ask: Callable[[Any, str], object]) -> list[Any]:
        """What Redis answers for each of these sets, in order; `ask` adds one question to a pipeline. Thousands of tenants, one by one,
        would take longer than an operator's call may.
        """
        answers = list[Any]()
        for some in _parts_of(indexes):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for index in some:
                    ask(pipeline, self._prefix + index)
                answers += await pipeline.execute()
        return answers

    async def _drop_all(self, indexes: Sequence[str]) -> int:
        """Drop as many entries and leases as are in these sets now, AT_ONCE at a time: where the call takes too long, the next one has
        fewer left. Returns how many entries there were. Of a large set, what comes into it meanwhile and ends sooner, as leases do, is
        dropped first: as many old entries, which nothing reads any more, stay until their time is over.
        """
        sizes = await self._of_each(indexes, lambda pipeline, index: pipeline.zcard(index))
        dropped = 0
        for piece in _pieces(dict(zip(indexes, sizes, strict=True))):
            dropped += (there := int(await self._drop([self._prefix], [AT_ONCE, *piece])))
            self._counts["invalidations"] += there
        return dropped

    def _name(self, kind: str, key: Key) -> str:
        return f"{self._prefix}{kind}:{':'.join(_parts(key))}"

    def _count(self, key: Key, entry: Entry | None) -> None:
        outcome = "misses" if entry is None else "hits"
        self._counts[outcome] += 1
        self._counts["stale_hits"] += entry is not None and entry.freshness(time.time()) == "stale"
        name = key.namespace if key.namespace in self._lookups or len(self._lookups) < COUNTED_NAMESPACES else OTHERS
        self._lookups.setdefault(name, Counter())[outcome] += 1


def prefix_of(application: str) -> str:
    """The beginning that all keys of a Serve application share with no other application's."""
    return f"{quote(application, safe='')}:"


def _installed() -> Availability:
    if importlib.util.find_spec("redis") is None:
        return Availability.no("redis is not installed; install genrec with its extra redis")
    return Availability.yes()


def _probed(url: str, ask: Callable[[Any], Any]) -> Any:
    """What `ask` has of a client of the server that waits; each step takes PROBE_WITHIN_S at most. Raises redis' errors."""
    import redis  # noqa: PLC0415 - optional

    with redis.Redis.from_url(url, socket_connect_timeout=PROBE_WITHIN_S, socket_timeout=PROBE_WITHIN_S) as client:
        return ask(client)


def _policy_at(url: str) -> str:
    """The server's `maxmemory-policy`; empty where it does not tell, as one that forbids CONFIG. Each step takes PROBE_WITHIN_S at most."""
    import redis  # noqa: PLC0415 - optional

    try:
        return _probed(url, lambda client: client.config_get("maxmemory-policy")).get("maxmemory-policy") or ""
    except (redis.RedisError, ValueError, OSError):
        return ""


def _client(url: str) -> Any:
    """A client that answers in bytes. Raises BackendUnavailable where `url` is no URL of a Redis server."""
    import redis.asyncio  # noqa: PLC0415 - optional
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    try:
        # one repetition, for a pooled connection that a restarted server no longer knows; the deadline of the call bounds it all.
        # `socket_timeout`: with one, redis sends within asyncio.wait_for, which until Python 3.12 may swallow a cancellation
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=PROBE_WITHIN_S,
            socket_connect_timeout=PROBE_WITHIN_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError:  # its message may quote a part of the password
        cure = "write it as redis://host:6379/0, and what is no letter and no digit in a password as %xx"
        raise BackendUnavailable(f"redis_url is no URL of a Redis server; {cure}") from None
    return redis.asyncio.Redis.from_pool(pool)


def _address(url: str) -> str:
    """Host and port, without user and password."""
    parts = urlsplit(masked(url))
    return f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path


def _quoted(part: str) -> str:
    """The part as it stands in Redis's keys: without a ":", and never empty."""
    return f"-{quote(part, safe='')}"


def _parts(key: Key) -> list[str]:
    return [_quoted(part) for part in key]


def _parts_of(names: Sequence[T]) -> list[Sequence[T]]:
    return [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]


def _pieces(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Sets that have AT_ONCE names or fewer together; one that has more comes again and again, for AT_ONCE of them each time."""
    piece, room = list[str](), AT_ONCE
    for index, size in sizes.items():
        for start in range(0, size, AT_ONCE):
            if (names := min(AT_ONCE, size - start)) > room:
                yield piece
                piece, room = [], AT_ONCE
            piece.append(index)
            room -= names
    if piece:
        yield piece


def _asked(keys: Sequence[Key]) -> list[str]:
    return [part for key in keys for part in (":".join(_parts(key)), *scopes_of(key))]


async def _polls(within_s: float) -> AsyncIterator[None]:
    """Yields immediately, then at growing intervals, for the last time when `within_s` is over."""
    clock = asyncio.get_running_loop().time
    until, pause_s = clock() + within_s, FIRST_POLL_S
    yield
    while (left := until - clock()) > 0:
        await asyncio.sleep(min(left, pause_s))
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
        yield
