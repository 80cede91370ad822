"""How transactions are repeated, on a scripted pool; the contract suite and the durability test run the same on a real server."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest

from cluster.errors import BackendUnavailable
from cluster.events.digests import Digests
from integrations.postgresql import database as connections
from integrations.postgresql.database import Database, Unsure, _durable, place
from integrations.postgresql.rows import _lock_users
from integrations.postgresql.store import PostgreSQLEventStore
from tests.waiting import settled

LOST = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


class ScriptedConnection:
    """Raises at the commit what the script says, None: nothing."""

    def __init__(self, script):
        self.script, self.terminated = script, 0

    def terminate(self):
        self.terminated += 1

    @asynccontextmanager
    async def transaction(self, isolation):
        assert isolation == "read_committed"
        yield
        if error := self.script.pop(0):
            raise error


class ScriptedPool:
    def __init__(self, *commits):
        self.connection = ScriptedConnection(list(commits))
        self.expired = 0

    @asynccontextmanager
    async def acquire(self, timeout):  # noqa: ASYNC109 - as asyncpg names it
        yield self.connection

    async def expire_connections(self):
        self.expired += 1


class LimitedPool(ScriptedPool):
    """Gives so many connections at a time as a real one; `given`: that are in use."""

    def __init__(self, *commits):
        super().__init__(*commits)
        self.given, self.free = 0, asyncio.Semaphore(connections.POOL_SIZE)

    @asynccontextmanager
    async def acquire(self, timeout):  # noqa: ASYNC109 - as asyncpg names it
        async with asyncio.timeout(timeout):
            await self.free.acquire()
        self.given += 1
        try:
            yield self.connection
        finally:
            self.given -= 1
            self.free.release()


class Work:
    """Raises what it is told, one error a call, then answers with the number of the call."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    async def __call__(self, connection):
        self.calls += 1
        if self.errors and (error := self.errors.pop(0)):
            raise error
        return self.calls


def database(*commits):
    return Database(ScriptedPool(*commits), "postgresql://host/db")


async def test_a_commit_that_is_lost_is_repeated_only_where_that_cannot_store_twice():
    keyed, unkeyed = Work(), Work()
    assert await database(LOST, None).write(keyed, repeatable=True) == 2
    with pytest.raises(BackendUnavailable, match="it may be done or not; send events with idempotency keys, or an erasure, again"):
        await database(LOST, None).write(unkeyed, repeatable=False)
    assert unkeyed.calls == 1


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize(
    "error",
    [LOST, ConnectionResetError("gone"), asyncpg.InternalClientError("state"), asyncpg.DeadlockDetectedError("d"), Unsure("erased")],
)
async def test_what_fails_before_its_commit_is_begun_again_once(error, repeatable):
    assert await database(None).write(Work(error), repeatable=repeatable) == 2
    with pytest.raises(BackendUnavailable, match="event store postgresql://host/db: "):
        await database(None).write(Work(error, error), repeatable=repeatable)


async def test_a_lost_connection_is_discarded_with_the_others_and_one_with_a_deadlock_is_not():
    pools = ScriptedPool(None), ScriptedPool(None)
    for pool, error in zip(pools, (LOST, asyncpg.DeadlockDetectedError("d")), strict=True):
        await Database(pool, "postgresql://host/db").write(Work(error), repeatable=True)
    assert [pool.expired for pool in pools] == [1, 0]
    assert [pool.connection.terminated for pool in pools] == [1, 0]


async def test_a_read_is_asked_again_where_the_connection_is_lost():
    assert await database().read(Work(LOST)) == 2


@pytest.mark.parametrize("error", [TimeoutError(), asyncpg.QueryCanceledError("statement timeout")])
async def test_a_server_that_is_too_slow_is_not_asked_again(error):
    work = Work(error)
    with pytest.raises(BackendUnavailable, match="overloaded"):
        await database().write(work, repeatable=True)
    assert work.calls == 1


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (ConnectionRefusedError("refused"), "cannot be reached; start the server"),
        (asyncpg.CannotConnectNowError("starting up"), "try again in a moment"),
        (asyncpg.TooManyConnectionsError("many"), "raise its max_connections"),
        (asyncpg.InvalidPasswordError("no"), "correct user and password"),
        (asyncpg.InvalidCatalogNameError("no"), "createdb --encoding UTF8"),
        (asyncpg.InsufficientPrivilegeError("no"), "GRANT CREATE ON DATABASE"),
        (asyncpg.ReadOnlySQLTransactionError("ro"), "target_session_attrs=read-write"),
        (asyncpg.DiskFullError("full"), "make room"),
        (asyncpg.UndefinedTableError("no table"), r"PostgreSQL refuses \(no table\)"),
    ],
)
async def test_an_error_of_the_server_comes_with_its_cure(error, cure):
    with pytest.raises(BackendUnavailable, match=cure):
        await database().write(Work(error, error), repeatable=True)


WELCOME = b"R\0\0\0\x08\0\0\0\0S\0\0\0\x18server_version\x0015.0\0Z\0\0\0\x05I"  # authenticated, and ready for a query


@pytest.mark.parametrize("said", [b"", WELCOME], ids=["nothing at all", "nothing after its welcome"])
async def test_a_server_that_falls_silent_while_the_store_is_opened_is_given_up(said, monkeypatch):
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT_S", 0.2 if not said else 5.0)
    monkeypatch.setattr(connections, "PREPARE_TIMEOUT_S", 0.2)

    class Silent(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(said)

    async with await asyncio.get_running_loop().create_server(Silent, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(BackendUnavailable, match=f"event store postgresql://{host}:{port}/db: it did not answer in time"):
            await PostgreSQLEventStore.open(f"postgresql://me@{host}:{port}/db?sslmode=disable")


@pytest.mark.virtual_time
async def test_writes_that_wait_leave_connections_to_reads():
    pool = LimitedPool(*[None] * connections.POOL_SIZE)
    store, may_end = Database(pool, "postgresql://host/db"), asyncio.Event()

    async def waits(connection):
        await may_end.wait()
        return "written"

    writes = [asyncio.create_task(store.write(waits, repeatable=True)) for _ in range(connections.POOL_SIZE)]
    await settled()
    assert await store.read(Work()) == 1
    assert pool.given == connections.MOST_WRITING
    reads = [asyncio.create_task(store.read(waits)) for _ in range(PostgreSQLEventStore.readers)]
    await settled()
    assert pool.given == connections.MOST_WRITING + len(reads) <= connections.POOL_SIZE, "each read that has its turn has a connection"
    may_end.set()
    assert await asyncio.gather(*writes, *reads) == ["written"] * (connections.POOL_SIZE + len(reads))
    assert pool.given == 0


@pytest.mark.virtual_time
async def test_a_write_that_finds_all_others_waiting_is_given_up_in_time_and_the_next_one_finds_room():
    store, may_end = Database(LimitedPool(*[None] * connections.POOL_SIZE), "postgresql://host/db"), asyncio.Event()

    async def waits(connection):
        await may_end.wait()

    writes = [asyncio.create_task(store.write(waits, repeatable=True)) for _ in range(connections.MOST_WRITING)]
    await settled()
    with pytest.raises(BackendUnavailable, match="it did not answer in time"):
        await store.write(Work(), repeatable=True)
    may_end.set()
    await asyncio.gather(*writes)
    assert await store.write(Work(), repeatable=True) == 1


async def test_a_bug_of_ours_stays_loud():
    with pytest.raises(KeyError):
        await database().write(Work(KeyError("bug")), repeatable=True)


def test_messages_name_the_server_and_never_the_password():
    assert place("postgresql://me:secret@db.example:5433/shop?password=secret2") == "postgresql://db.example:5433/shop"
    for odd in ("se/cret", "se#cret", "se?cret", "12/cret"):
        assert place(f"postgresql://me:{odd}@db.example:5433/shop") == "postgresql://db.example:5433/shop"


async def test_a_url_that_cannot_be_read_is_told_without_its_password():
    with pytest.raises(BackendUnavailable, match="the URL cannot be read") as told:
        await Database.open("postgresql://me:se/cret@db.example:5433/shop", prepare=None)
    assert not any(part in str(told.value) for part in ("se/", "cret", "me:"))
    with pytest.raises(BackendUnavailable, match="the URL cannot be read"):
        await PostgreSQLEventStore.open("postgresql://me:secret@[::1/shop")


@pytest.mark.parametrize(("set_to", "expected"), [("off", {"synchronous_commit": "on"}), ("on", {}), ("remote_apply", {})])
async def test_a_database_that_does_not_wait_for_the_disk_is_made_to(set_to, expected):
    class Connection:
        async def fetchval(self, sql):
            assert sql == "SHOW synchronous_commit"
            return set_to

    assert await _durable(Connection()) == expected


async def test_users_are_locked_in_one_order_whatever_the_order_of_the_events():
    class Connection:
        async def fetch(self, sql, digests, arrived):
            assert "SELECT number, digest FROM asked ORDER BY digest" in sql
            locked.append(digests)
            return []

    locked = []
    users = [Digests(b"k").user(tenant, user) for tenant in ("b", "a") for user in ("9", "10", "z", "é", "9")]
    for order in (users, users[::-1], users[3:] + users[:3]):
        await _lock_users(Connection(), order)
    assert locked == [sorted(set(users))] * 3
