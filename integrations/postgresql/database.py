"""A pool of connections: transactions that survive a restart of the server, and PostgreSQL's errors explained to the operator."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import asyncpg

from cluster.errors import BackendUnavailable
from cluster.traffic.api_keys import masked

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]  # is given a connection

POOL_SIZE = 10
MOST_WRITING = 6  # of them, so that reads find one where every write waits, as for a lock
CONNECT_TIMEOUT_S = 5.0
PREPARE_TIMEOUT_S = 600.0  # for each statement as the store is opened; another process that brings the schema up to date is waited for
MIGRATE_WITHIN_S = 7 * 86_400.0  # for each that does so: it may write a large table anew
ACQUIRE_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 10.0  # the server gives up; asyncpg does, where the server says nothing, a second later
LOCK_TIMEOUT_S = 2.0  # a write that waits for what an erasure holds keeps the others' places
SETTINGS = {
    "application_name": "genrec",
    "statement_timeout": f"{STATEMENT_TIMEOUT_S:g}s",
    "lock_timeout": f"{LOCK_TIMEOUT_S:g}s",
    "idle_in_transaction_session_timeout": "30s",
    "jit": "off",  # compiling a statement of a millisecond takes longer than running it
}
UNDONE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
UNKNOWN = (
    "the connection was lost during the commit, so that it may be done or not; send events with idempotency keys, or an erasure, again"
)
LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # where the server's farewell comes between two statements
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    OSError,
)
_CURES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (TimeoutError, "it did not answer in time; look whether the server is overloaded or the network is down"),
    (asyncpg.CannotConnectNowError, "the server is starting or stopping; try again in a moment"),
    (asyncpg.TooManyConnectionsError, "the server has no connection left; raise its max_connections"),
    (LOST, "it cannot be reached; start the server, or correct the URL's host and port"),
    (
        asyncpg.InvalidAuthorizationSpecificationError,
        "the server refuses the user; correct user and password (URL, PGPASSWORD or ~/.pgpass)",
    ),
    (asyncpg.InvalidCatalogNameError, "there is no such database; create it: createdb --encoding UTF8 NAME"),
    (asyncpg.InsufficientPrivilegeError, "the user lacks a right; run as its owner: GRANT CREATE ON DATABASE name TO user"),
    (asyncpg.ReadOnlySQLTransactionError, "the server is a standby; add ?target_session_attrs=read-write to the URL"),
    (
        asyncpg.LockNotAvailableError,
        f"its user is locked for more than {LOCK_TIMEOUT_S:g} s, as by the erasure of many events or VACUUM FULL; try again once that ends",
    ),
    (asyncpg.QueryCanceledError, f"a statement took longer than {STATEMENT_TIMEOUT_S:g} s; look whether the server is overloaded"),
    (asyncpg.DiskFullError, "the server's disk is full; make room and send the events again"),
    (UNDONE, "others changed the same rows at the same time; try again"),
)


class Unsure(Exception):
    """Raised where data that a transaction has read have changed: it is undone and begun again."""


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turns asyncpg's errors into BackendUnavailable with the cure."""
    try:
        yield
    except (asyncpg.PostgresError, *LOST, Unsure) as error:
        cure = next((cure for kinds, cure in _CURES if isinstance(error, kinds)), "PostgreSQL refuses")
        raise BackendUnavailable(f"event store {where}: {cure} ({error or type(error).__name__})") from error


def place(url: str) -> str:
    """The URL without user, password and options, for messages."""
    try:
        parts = urlsplit(masked(url))  # in which a "/" or "#" of the password's is no part of the URL
    except ValueError:  # a bracket that is not closed
        return "postgresql://..."
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Database:
    """Connections to one database, for one event loop; some of them are left to reads, however many writes wait."""

    def __init__(self, pool: Any, where: str) -> None:
        self.where = where
        self._pool = pool
        self._writing = asyncio.Semaphore(MOST_WRITING)
        self._closed = False

    @classmethod
    async def open(cls, url: str, prepare: Work[T]) -> tuple[Self, T]:
        """Connect, let `prepare` bring the schema up to date, and make a pool, empty as yet. Returns the database and what `prepare`
        returned. Raises BackendUnavailable.
        """
        where = place(url)
        with explained(where):
            try:
                connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S, command_timeout=PREPARE_TIMEOUT_S)
            except ValueError:  # its message quotes the URL, which holds the password
                cure = "write what is no letter and no digit in its user and password as %xx, and the port as a number"
                raise BackendUnavailable(f"event store {where}: the URL cannot be read; {cure}") from None
            try:
                prepared = await prepare(connection)
                settings = {**SETTINGS, **await _durable(connection)}
            finally:
                await connection.close(timeout=CONNECT_TIMEOUT_S)
            pool = await asyncpg.create_pool(
                url,
                min_size=0,
                max_size=POOL_SIZE,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=STATEMENT_TIMEOUT_S + 1,
                server_settings=settings,
                reset=_nothing_to_reset,
            )
        return cls(pool, where), prepared

    async def read(self, work: Work[T]) -> T:
        """The result of one statement, which is sent again where the connection turns out to be lost."""
        return await self._twice(lambda _: self._connected(work), repeatable=True)

    async def write(self, work: Work[T], *, repeatable: bool) -> T:
        """The result of `work` in one transaction, which is on the disk when this returns.

        Where the transaction was certainly undone, it is begun again, once; where that is unknown, as after a connection that broke during
        the commit, only if it is `repeatable`. Raises BackendUnavailable otherwise.
        """
        return await self._twice(lambda commit: self._written(work, commit), repeatable)

    async def close(self) -> None:
        self._closed = True
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._pool.close()
        except LOST:  # a TimeoutError among them
            self._pool.terminate()

    async def _connected(self, work: Work[T]) -> T:
        async with self._pool.acquire(timeout=ACQUIRE_TIMEOUT_S) as connection:
            try:
                return await work(connection)
            except (*LOST, asyncio.CancelledError):
                connection.terminate()  # its state is unknown, and where the server is silent, so is when it would be known
                raise

    async def _written(self, work: Work[T], commit: "_Commit") -> T:
        async with asyncio.timeout(ACQUIRE_TIMEOUT_S):
            await self._writing.acquire()
        try:
            return await self._connected(lambda connection: _transaction(connection, work, commit))
        finally:
            self._writing.release()

    async def _twice(self, attempt: "Callable[[_Commit], Awaitable[T]]", repeatable: bool) -> T:
        if self._closed:
            raise BackendUnavailable(f"event store {self.where} is closed; open it again")
        with explained(self.where):
            commit = _Commit()
            try:
                return await attempt(commit)
            except TimeoutError:
                raise
            except (*UNDONE, Unsure):
                pass
            except LOST as error:
                if commit.begun and not repeatable:
                    raise BackendUnavailable(f"event store {self.where}: {UNKNOWN} ({error or type(error).__name__})") from error
                await self._pool.expire_connections()  # the others are most likely lost as well
            return await attempt(_Commit())


class _Commit:
    """Records whether a transaction came as far as its commit."""

    begun = False


async def _transaction(connection: Any, work: Work[T], commit: _Commit) -> T:
    async with connection.transaction(isolation="read_committed"):
        result = await work(connection)
        commit.begun = True
    return result


async def _durable(connection: Any) -> dict[str, str]:
    """Settings that make a commit wait for the disk, where the database's own would not; a stricter one is left as it is."""
    waits = await connection.fetchval("SHOW synchronous_commit") != "off"
    return {} if waits else {"synchronous_commit": "on"}


async def _nothing_to_reset(connection: Any) -> None:
    """Resets nothing: no transaction of ours changes its session, so asyncpg need not have the server reset it after each."""
