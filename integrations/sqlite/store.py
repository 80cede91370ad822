"""The event store in a file: one thread that writes, a few that read."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from cluster.errors import BackendUnavailable
from cluster.events.digests import Digests, given_key, kept_key
from cluster.events.ledger import Ledger
from cluster.events.migrations import pending, read_migrations
from cluster.events.rules import check_events, check_limit, check_user, each_batch, repeats
from cluster.events.store import Batches, Event, Loaded, Stored, StoredHistory, StoredUser, StoreStatistics
from integrations.sqlite import rows
from integrations.sqlite.backup import remove_drafts
from integrations.sqlite.connection import Interruptible, connect_reader, connect_writer, explained, turn_of
from integrations.sqlite.shared_disk import network_file_system
from integrations.sqlite.writer import Writer

T = TypeVar("T")
logger = logging.getLogger(__name__)
READERS = 4
INTERRUPT_AGAIN_S = 0.01
MIGRATIONS = "integrations.sqlite.migrations"
WITH_DIGESTS = 3
"""The first migration that needs the store's key."""


class SQLiteEventStore:
    """An EventStore in one file, which several processes of one machine may open."""

    name, readers = "sqlite", READERS

    def __init__(self, path: Path, writer: Writer, ledger: Ledger) -> None:
        self._path, self._writer, self._ledger, self._digests = path, writer, ledger, ledger.digests
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="genrec-sqlite-reader")
        self._mine = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False

    @classmethod
    async def open(cls, path: Path, ledger: Path | None = None) -> Self:
        """Open the store. `ledger`: the ledger's file; default: beside the store's. Raises BackendUnavailable where a file cannot be opened
        or is not one of genrec's.
        """
        return cls(path, *await asyncio.to_thread(_open_writer, path, ledger or ledger_beside(path)))

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        check_events(events)
        repeated = repeats(events)
        if not events:
            return []
        return await asyncio.wrap_future(self._writer.submit(lambda connection: rows.append(connection, self._digests, events, repeated)))

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None = None) -> StoredHistory:
        check_user(tenant, user_id)
        check_limit(limit)
        return await self._read(lambda connection: rows.history(connection, self._digests, tenant, user_id, limit=limit, until=until))

    async def version(self, tenant: str, user_id: str) -> str:
        check_user(tenant, user_id)
        return await self._read(lambda connection: rows.version(connection, self._digests.user(tenant, user_id)))

    async def erase(self, tenant: str, user_id: str) -> int:
        check_user(tenant, user_id)
        digest = self._digests.user(tenant, user_id)
        erased = self._writer.submit(
            lambda connection: rows.erase(connection, self._ledger, digest),
            purge=True,
            done=lambda connection: rows.is_gone(connection, digest),
        )
        return await asyncio.wrap_future(erased)

    async def finish_erasures(self) -> None:
        """Wait until all that erasures have left is deleted, those too that were made up for as the store was opened."""
        await asyncio.wrap_future(self._writer.submit(lambda _: None, done=rows.is_gone))

    async def digest(self, tenant: str, user_id: str) -> str:
        return self._digests.user(tenant, user_id).hex()

    async def load(self, batches: Batches) -> Loaded:
        loaded = Loaded()
        async for batch in each_batch(batches):
            loaded = loaded.plus(await self.append(batch))
        return loaded

    async def pass_over(self, events: Sequence[Event]) -> None:
        check_events(events)
        keys = [self._digests.event(event.tenant, event.idempotency_key) for event in events if event.idempotency_key is not None]
        await asyncio.wrap_future(self._writer.submit(lambda connection: rows.pass_over(connection, keys)))

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        check_limit(limit)
        return await self._read(lambda connection: rows.users(connection, tenant, limit))

    async def statistics(self) -> StoreStatistics:
        return await self._read(rows.statistics)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        await asyncio.to_thread(self._writer.close)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise BackendUnavailable(f"event store {self._path} is closed; open it again")
        running = Interruptible()
        submitted = self._readers.submit(self._in_snapshot, work, running)
        reading = asyncio.wrap_future(submitted)
        try:
            await asyncio.wait([reading])
        except asyncio.CancelledError:  # so that its thread goes on to the next one
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though nothing waits for it
            submitted.cancel()
            while not reading.done():
                running.interrupt()  # again, as between two statements it does nothing
                await asyncio.wait([reading], timeout=INTERRUPT_AGAIN_S)
            raise
        return reading.result()

    def _in_snapshot(self, work: Callable[[sqlite3.Connection], T], running: Interruptible) -> T:
        """Do the work on a snapshot: all its statements read the store as of one moment."""
        with explained(self._path):
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                with running.on(connection):
                    return work(connection)
            finally:
                if connection.in_transaction:  # else SQLite has ended it, as after an error of the disk
                    connection.execute("ROLLBACK")

    def _connection(self) -> sqlite3.Connection:
        """The calling thread's own connection."""
        if not hasattr(self._mine, "connection"):
            self._mine.connection = connect_reader(self._path)
            self._connections.append(self._mine.connection)
        connection: sqlite3.Connection = self._mine.connection
        return connection


def ledger_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.erased")


def read_statistics(path: Path) -> StoreStatistics:
    with explained(path), closing(connect_reader(path)) as connection:
        return rows.statistics(connection)


def _open_writer(path: Path, ledger: Path) -> tuple[Writer, Ledger]:
    turn = turn_of(path)
    with turn.held(), explained(path):
        with suppress(PermissionError):  # of a directory that may not be listed: a store in it serves all the same
            remove_drafts(path)
        connection = connect_writer(path)
        try:
            kept = _up_to_date(connection, path, ledger)
        except BaseException:
            connection.close()
            raise
    if kind := network_file_system(path):
        logger.warning(
            "event store %s lies on a network file system (%s), where SQLite may lose events once two machines write it; name a PostgreSQL "
            "by events.url, or a file on a local disk if one machine alone serves",
            path,
            kind,
        )
    return Writer(connection, path, turn, rows.delete_some), kept


def _up_to_date(connection: sqlite3.Connection, path: Path, file: Path) -> Ledger:
    """Bring the schema up to date, find the key and erase what the ledger says, all of it or nothing. Another process waits meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER PRIMARY KEY, name TEXT, applied_at TEXT)")
    (applied,) = connection.execute("SELECT coalesce(max(version), 0) FROM schema_versions").fetchone()
    for migration in pending(read_migrations(MIGRATIONS), applied, f"event store {path}"):
        if migration.number >= WITH_DIGESTS:
            _digests(connection, path)
        for statement in migration.statements:
            connection.execute(statement)
        connection.execute("INSERT INTO schema_versions VALUES (?, ?, datetime('now'))", (migration.number, migration.name))
    ledger = Ledger(file, _digests(connection, path))
    if rows.catch_up(connection, ledger):
        connection.execute("PRAGMA user_version = 1")  # to be purged from the log
    connection.execute("COMMIT")
    return replace(ledger, before=rows.latest_erasure(connection))


def _digests(connection: sqlite3.Connection, path: Path) -> Digests:
    """The digests by the given key, or by the key beside the file, made with the store. The connection's statements may use them."""
    (check,) = connection.execute("SELECT key_check FROM store").fetchone()
    digests = Digests(given_key() or kept_key(path.with_name(f"{path.name}.key"), make=check is None))
    for name, digest in (("user_digest", digests.user), ("event_digest", digests.event)):
        connection.create_function(name, 2, digest, deterministic=True)
    if check is None:
        rows.keep_key(connection, digests)
    else:
        digests.refuse_other(check, f"event store {path}")
    return digests
