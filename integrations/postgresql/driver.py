"""Opens the event store in PostgreSQL; asyncpg is imported only then."""

import logging
from importlib.util import find_spec
from pathlib import Path

from cluster.errors import BackendUnavailable, ConfigError
from cluster.events.ledger import mounted_ledger, require, split_ledger
from cluster.events.store import EventStore, StoreStatistics
from cluster.values import Availability

logger = logging.getLogger(__name__)


class PostgreSQLDriver:
    """For ``postgresql://user:password@host:5432/database``; parts that the URL leaves out are taken from PGPASSWORD, ~/.pgpass and the
    like. ``?ledger=/a/file`` names the ledger of erasures; without it, none is kept,
    and a warning of that is logged as the store is opened.
    """

    def get_availability(self) -> Availability:
        if find_spec("asyncpg") is None:
            return Availability.no("asyncpg is not installed; install genrec with its extra postgresql")
        return Availability.yes()

    async def open(self, url: str) -> EventStore:
        """Open the store. Raises BackendUnavailable where the server cannot be reached or its database cannot be used."""
        try:
            from integrations.postgresql.database import place  # noqa: PLC0415 - asyncpg need not be installed
            from integrations.postgresql.store import PostgreSQLEventStore  # noqa: PLC0415
        except ImportError as error:
            raise BackendUnavailable(f"asyncpg cannot be imported ({error}); run: pip install --force-reinstall asyncpg") from error
        plain, ledger = mounted_ledger(url)
        store = await PostgreSQLEventStore.open(plain, ledger)
        if ledger is None:
            logger.warning(
                "event store %s keeps no ledger of erasures: restored from a backup, it has the users again that were erased since; "
                "name one in its URL, as ?ledger=/models/erased",
                place(plain),
            )
        return store

    async def require_there(self, url: str) -> None:
        from integrations.postgresql import rows  # noqa: PLC0415
        from integrations.postgresql.database import Database  # noqa: PLC0415

        database, there = await Database.open(split_ledger(url)[0], rows.is_there)
        await database.close()
        if not there:
            raise ConfigError(f"event store {database.where} is not there: its database holds no events; give the URL that the service has")

    async def statistics(self, url: str) -> StoreStatistics:
        from integrations.postgresql import rows  # noqa: PLC0415
        from integrations.postgresql.database import Database  # noqa: PLC0415

        await self.require_there(url)
        database, held = await Database.open(split_ledger(url)[0], rows.statistics)
        await database.close()
        return held

    async def back_up(self, url: str, to: Path) -> None:
        del url
        raise ConfigError(f"PostgreSQL makes its backups itself: pg_dump --format custom --schema genrec --file {to} DATABASE")

    async def restore(self, url: str, backup: Path | None) -> None:
        from integrations.postgresql.store import PostgreSQLEventStore  # noqa: PLC0415

        if backup is not None:
            raise ConfigError(f"have PostgreSQL restore it: pg_restore --dbname DATABASE {backup}; then: genrec events restore --url URL")
        plain, ledger = mounted_ledger(url)
        require(ledger)
        await self.require_there(url)
        store = await PostgreSQLEventStore.open(plain, ledger)
        try:
            await store.tell_anew()
        finally:
            await store.close()
