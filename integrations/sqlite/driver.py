"""Opens the event store in a file. Imports nothing but the standard library until then."""

import sqlite3
from pathlib import Path

from cluster.errors import ConfigError
from cluster.events.store import EventStore
from cluster.values import Availability

OLDEST = (3, 37, 0)  # strict tables


class SQLiteDriver:
    """``sqlite:///events.db``, relative to the working directory, or ``sqlite:////var/lib/genrec/events.db``."""

    def get_availability(self) -> Availability:
        if sqlite3.sqlite_version_info < OLDEST:
            needed = ".".join(map(str, OLDEST))
            return Availability.no(f"Python's SQLite is {sqlite3.sqlite_version}, older than {needed}; use a newer Python build")
        return Availability.yes()

    async def open(self, url: str) -> EventStore:
        """Raises ConfigError where the URL names no file, BackendUnavailable where the file cannot be used."""
        from integrations.sqlite.store import SQLiteEventStore  # noqa: PLC0415 - fcntl is not everywhere

        name = url.removeprefix("sqlite:///")
        if name == url or not name or name.startswith(":"):
            raise ConfigError(
                f"event store {url!r} names no file; write sqlite:///events.db, or sqlite:////var/lib/events.db for an absolute path"
            )
        return await SQLiteEventStore.open(Path(name))
