"""The event store in PostgreSQL."""

from collections.abc import Sequence
from typing import Any, Self

from cluster.errors import BackendUnavailable
from cluster.events.migrations import pending, read_migrations
from cluster.events.rules import check_events, check_limit, check_user, each_batch, repeats
from cluster.events.store import Batches, Event, Loaded, Stored, StoredHistory, StoredUser, StoreStatistics
from integrations.postgresql import rows
from integrations.postgresql.database import Database, place

MIGRATIONS = "integrations.postgresql.migrations"
MIGRATION_LOCK = 0x67656E726563  # "genrec": any number that no other program locks


class PostgreSQLEventStore:
    """An EventStore in the schema `genrec` of a database, which any number of machines may open."""

    name = "postgresql"

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, url: str) -> Self:
        """Raises BackendUnavailable where the server cannot be reached or the database cannot be used."""
        where = place(url)
        return cls(await Database.open(url, lambda connection: _migrate(connection, where)))

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        return await self._append(events, copy=False)

    async def history(self, tenant: str, user_id: str, limit: int) -> StoredHistory:
        check_user(tenant, user_id)
        check_limit(limit)
        return await self._database.read(lambda connection: rows.history(connection, tenant, user_id, limit))

    async def version(self, tenant: str, user_id: str) -> str:
        check_user(tenant, user_id)
        return await self._database.read(lambda connection: rows.version(connection, tenant, user_id))

    async def erase(self, tenant: str, user_id: str) -> int:
        check_user(tenant, user_id)
        return await self._database.write(lambda connection: rows.erase(connection, tenant, user_id), repeatable=False)

    async def load(self, batches: Batches) -> Loaded:
        loaded = Loaded()
        async for batch in each_batch(batches):
            loaded = loaded.plus(await self._append(batch, copy=True))
        return loaded

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        check_limit(limit)
        return await self._database.read(lambda connection: rows.users(connection, tenant, limit))

    async def statistics(self) -> StoreStatistics:
        return await self._database.read(rows.statistics)

    async def close(self) -> None:
        await self._database.close()

    async def _append(self, events: Sequence[Event], *, copy: bool) -> list[Stored]:
        check_events(events)
        repeated = repeats(events)
        if not events:
            return []
        repeatable = all(event.idempotency_key is not None for event in events)
        return await self._database.write(lambda connection: rows.append(connection, events, repeated, copy=copy), repeatable=repeatable)


async def _migrate(connection: Any, where: str) -> None:
    """Bring the schema up to date, all of it or nothing. Another process waits until it is done."""
    if (encoding := await connection.fetchval("SHOW server_encoding")) != "UTF8":
        raise BackendUnavailable(f"event store {where}: its encoding is {encoding}; create one with: createdb --encoding UTF8 NAME")
    async with connection.transaction(isolation="read_committed"):
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        for migration in pending(read_migrations(MIGRATIONS), await _applied(connection), f"event store {where}"):
            for statement in migration.statements:
                await connection.execute(statement)
            insert = "INSERT INTO genrec.schema_versions (version, name) VALUES ($1, $2)"
            await connection.execute(insert, migration.number, migration.name)


async def _applied(connection: Any) -> int:
    """The schema's version, 0 where it has just been made."""
    if await connection.fetchval("SELECT to_regclass('genrec.schema_versions')") is None:
        await connection.execute("CREATE SCHEMA IF NOT EXISTS genrec")
        columns = "version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TIMESTAMPTZ NOT NULL DEFAULT now()"
        await connection.execute(f"CREATE TABLE genrec.schema_versions ({columns})")
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM genrec.schema_versions")
    return version
