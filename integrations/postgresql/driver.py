"""Opens the event store in PostgreSQL. Imports nothing of it until then."""

from importlib.util import find_spec

from cluster.errors import BackendUnavailable
from cluster.events.store import EventStore
from cluster.values import Availability


class PostgreSQLDriver:
    """``postgresql://user:password@host:5432/database``; what the URL leaves out is taken from PGPASSWORD, ~/.pgpass and their like."""

    def get_availability(self) -> Availability:
        if find_spec("asyncpg") is None:
            return Availability.no("asyncpg is not installed; run: pip install 'genrec[postgresql]'")
        return Availability.yes()

    async def open(self, url: str) -> EventStore:
        """Raises BackendUnavailable where the server cannot be reached or its database cannot be used."""
        try:
            from integrations.postgresql.store import PostgreSQLEventStore  # noqa: PLC0415 - asyncpg need not be installed
        except ImportError as error:
            raise BackendUnavailable(f"asyncpg cannot be imported ({error}); run: pip install --force-reinstall asyncpg") from error
        return await PostgreSQLEventStore.open(url)
