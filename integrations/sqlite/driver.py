"""Opens the event store in a file; imports only the standard library until then."""

import asyncio
import sqlite3
from pathlib import Path

from cluster.errors import BackendUnavailable, ConfigError
from cluster.events.ledger import mounted_ledger, require
from cluster.events.store import EventStore, StoreStatistics
from cluster.values import Availability

OLDEST = (3, 37, 0)  # strict tables


class SQLiteDriver:
    """For ``sqlite:///events.db``, relative to the working directory, or ``sqlite:////var/lib/genrec/events.db``. ``?ledger=/a/file`` names
    the ledger of erasures, which is beside the file otherwise. A symbolic link stands for the file that it leads to, which has its lock,
    key and ledger beside it, so that one store is the same by all its names.
    """

    def get_availability(self) -> Availability:
        if sqlite3.sqlite_version_info < OLDEST:
            needed = ".".join(map(str, OLDEST))
            return Availability.no(f"Python's SQLite is {sqlite3.sqlite_version}, older than {needed}; use a newer Python build")
        return Availability.yes()

    async def open(self, url: str) -> EventStore:
        """Open the store. Raises ConfigError where the URL names no file, BackendUnavailable where the file cannot be used."""
        from integrations.sqlite.store import SQLiteEventStore  # noqa: PLC0415 - fcntl is not everywhere

        return await SQLiteEventStore.open(*_files(url))

    async def require_there(self, url: str) -> None:
        await asyncio.to_thread(_require_there, *_files(url))

    async def statistics(self, url: str) -> StoreStatistics:
        from integrations.sqlite.store import read_statistics  # noqa: PLC0415

        await self.require_there(url)
        return await asyncio.to_thread(read_statistics, _files(url)[0])

    async def back_up(self, url: str, to: Path) -> None:
        from integrations.sqlite.backup import back_up  # noqa: PLC0415

        await self.require_there(url)
        await asyncio.to_thread(back_up, _files(url)[0], to)

    async def restore(self, url: str, backup: Path | None) -> None:
        from integrations.sqlite.backup import bring_back, rebuild, take_away  # noqa: PLC0415
        from integrations.sqlite.store import SQLiteEventStore, ledger_beside  # noqa: PLC0415

        path, ledger = _files(url)
        if backup is None:
            raise ConfigError("name the backup: genrec events restore FILE --url sqlite:///events.db")
        require(ledger or ledger_beside(path))
        await asyncio.to_thread(bring_back, backup, path)
        try:
            store = await SQLiteEventStore.open(path, ledger)
            try:
                await store.finish_erasures()
            finally:
                await store.close()
            rebuilt = asyncio.ensure_future(asyncio.to_thread(rebuild, path))
            try:
                await asyncio.shield(rebuilt)
            finally:
                await asyncio.wait([rebuilt])  # it has the store's turn also when this is cancelled
        except BaseException:  # as where the key is another: users that were erased since the backup are still in it
            take_away(path)
            raise


def _require_there(path: Path, ledger: Path | None) -> None:
    missing = f"event store {path} is not there; give the URL that the service has"
    try:
        if path.is_file():
            return
        if not path.parent.is_dir():
            raise BackendUnavailable(f"{missing}, or mount its disk: there is no {path.parent}")
        for kept in (path.with_name(f"{path.name}.key"), ledger or path.with_name(f"{path.name}.erased")):
            if kept.exists():
                raise BackendUnavailable(f"{missing}, or bring the file back: there is {kept}, which was made with it")
    except OSError as error:
        raise BackendUnavailable(f"event store {path} cannot be looked for ({error.strerror}); let this user read its directory") from error
    raise ConfigError(missing)


def _files(url: str) -> tuple[Path, Path | None]:
    """The store's file, and the ledger's where the URL names one."""
    plain, ledger = mounted_ledger(url)
    name = plain.removeprefix("sqlite:///")
    if name == plain or not name or name.startswith(":"):
        raise ConfigError(
            f"event store {url!r} names no file; write sqlite:///events.db, or sqlite:////var/lib/events.db for an absolute path"
        )
    path = Path(name)
    return path.resolve() if path.is_symlink() else path, ledger
