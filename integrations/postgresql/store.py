"""The event store in PostgreSQL."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any, Self

from cluster.errors import BackendUnavailable
from cluster.events.digests import Digests, given_key
from cluster.events.ledger import Ledger
from cluster.events.migrations import Migration, pending, read_migrations
from cluster.events.rules import check_events, check_limit, check_user, each_batch, repeats
from cluster.events.store import Batches, Event, Loaded, Stored, StoredHistory, StoredUser, StoreStatistics
from integrations.postgresql import rows
from integrations.postgresql.database import MIGRATE_WITHIN_S, MOST_WRITING, POOL_SIZE, Database, place
from integrations.postgresql.keyed import make_functions

MIGRATIONS = "integrations.postgresql.migrations"
WITH_DIGESTS = 3
"""The first migration that needs the store's key."""
MIGRATION_LOCK = 0x67656E726563  # "genrec": any number that no other program locks
logger = logging.getLogger(__name__)


class PostgreSQLEventStore:
    """An EventStore in the schema `genrec` of a database, which any number of machines may open."""

    name, readers = "postgresql", POOL_SIZE - MOST_WRITING  # those that writes leave

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database, self._ledger, self._digests = database, ledger, ledger.digests

    @classmethod
    async def open(cls, url: str, ledger: Path | None = None) -> Self:
        """Open the store. `ledger`: the ledger's file; default: none is kept. Raises BackendUnavailable where the server cannot be reached,
        or the database or the file cannot be used.
        """
        return cls(*await Database.open(url, lambda connection: _up_to_date(connection, place(url), ledger)))

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        return await self._append(events, copy=False)

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None = None) -> StoredHistory:
        check_user(tenant, user_id)
        check_limit(limit)
        return await self._database.read(
            lambda connection: rows.history(connection, self._digests.user(tenant, user_id), limit=limit, until=until)
        )

    async def version(self, tenant: str, user_id: str) -> str:
        check_user(tenant, user_id)
        return await self._database.read(lambda connection: rows.version(connection, self._digests.user(tenant, user_id)))

    async def erase(self, tenant: str, user_id: str) -> int:
        check_user(tenant, user_id)
        digest = self._digests.user(tenant, user_id)
        return await self._database.write(lambda connection: rows.erase(connection, self._ledger, digest), repeatable=False)

    async def digest(self, tenant: str, user_id: str) -> str:
        return self._digests.user(tenant, user_id).hex()

    async def load(self, batches: Batches) -> Loaded:
        loaded = Loaded()
        async for batch in each_batch(batches):
            loaded = loaded.plus(await self._append(batch, copy=True))
        return loaded

    async def pass_over(self, events: Sequence[Event]) -> None:
        check_events(events)
        keys = [self._digests.event(event.tenant, event.idempotency_key) for event in events if event.idempotency_key is not None]
        await self._database.write(lambda connection: rows.pass_over(connection, keys), repeatable=True)

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        check_limit(limit)
        return await self._database.read(lambda connection: rows.users(connection, tenant, limit))

    async def statistics(self) -> StoreStatistics:
        return await self._database.read(rows.statistics)

    async def tell_anew(self) -> None:
        """Give all users new versions, as after `pg_restore`."""
        await self._database.write(rows.tell_anew, repeatable=True)

    async def close(self) -> None:
        await self._database.close()

    async def _append(self, events: Sequence[Event], *, copy: bool) -> list[Stored]:
        check_events(events)
        repeated = repeats(events)
        if not events:
            return []
        repeatable = all(event.idempotency_key is not None for event in events)

        def append(connection: Any) -> Awaitable[list[Stored]]:
            return rows.append(connection, self._digests, events, repeated, copy=copy)

        return await self._database.write(append, repeatable=repeatable)


async def _up_to_date(connection: Any, where: str, file: Path | None) -> Ledger:
    """Bring the schema up to date, find the key and erase what the ledger says, all of it or nothing. Another process waits meanwhile."""
    if (encoding := await connection.fetchval("SHOW server_encoding")) != "UTF8":
        raise BackendUnavailable(f"event store {where}: its encoding is {encoding}; create one with: createdb --encoding UTF8 NAME")
    async with connection.transaction(isolation="read_committed"):
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        for migration in pending(read_migrations(MIGRATIONS), await _applied(connection), f"event store {where}"):
            if migration.number >= WITH_DIGESTS:
                await make_functions(connection, await _digests(connection, where))
            await _migrate(connection, migration, where)
            insert = "INSERT INTO genrec.schema_versions (version, name) VALUES ($1, $2)"
            await connection.execute(insert, migration.number, migration.name)
        ledger = Ledger(file, await _digests(connection, where))
        await rows.catch_up(connection, ledger)
        return replace(ledger, before=await rows.latest_erasure(connection))


async def _migrate(connection: Any, migration: Migration, where: str) -> None:
    await connection.execute("SET LOCAL statement_timeout = 0")  # in its place comes MIGRATE_WITHIN_S
    for number, statement in enumerate(migration.statements, start=1):
        logger.info("event store %s: migration %s, statement %d of %d", where, migration.name, number, len(migration.statements))
        await connection.execute(statement, timeout=MIGRATE_WITHIN_S)


async def _digests(connection: Any, where: str) -> Digests:
    """The digests by the given key, or by the store's own, which is made where there is none."""
    if (key := given_key()) is None:
        await connection.execute("UPDATE genrec.store SET own_key = $1 WHERE own_key IS NULL AND key_check IS NULL", token_bytes(32))
        key = await connection.fetchval("SELECT own_key FROM genrec.store")
    digests, check = Digests(key or b""), await connection.fetchval("SELECT key_check FROM genrec.store")
    if check is None:
        await rows.keep_key(connection, digests)
    else:
        digests.refuse_other(check, f"event store {where}")
    return digests


async def _applied(connection: Any) -> int:
    """The schema's version, 0 where it has just been made."""
    if not await rows.is_there(connection):
        await connection.execute("CREATE SCHEMA IF NOT EXISTS genrec")
        columns = "version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TIMESTAMPTZ NOT NULL DEFAULT now()"
        await connection.execute(f"CREATE TABLE genrec.schema_versions ({columns})")
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM genrec.schema_versions")
    return version
