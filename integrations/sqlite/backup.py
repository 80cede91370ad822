"""A copy of the file while it is served, and a store made of such a copy."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import file_digest
from pathlib import Path
from secrets import token_hex
from shutil import copyfileobj

from cluster.disk import flush
from cluster.errors import ConfigError, DataError
from cluster.private_file import private
from integrations.sqlite.connection import connect_reader, connect_writer, explained, turn_of

_NOT_WRITTEN = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)


def back_up(path: Path, to: Path) -> None:
    """Copy the store at `path`, as it is at one moment, to the file `to`, with a checksum beside it as sha256sum writes it. Writers go on
    meanwhile.

    Raises ConfigError where `to` exists already or is a directory, BackendUnavailable where the store cannot be read or is damaged.
    """
    if to.is_dir():
        raise ConfigError(f"{to} is a directory; name a file in it that is not there yet")
    _refuse_existing(to, _another(to))
    _make(to)
    try:
        _copy(path, to)
        _write_checksum(to)  # last: without it the backup is none
    except OSError as error:
        _remove_backup(to)
        raise ConfigError(f"{to} cannot be written: {error.strerror}") from error
    except BaseException:
        _remove_backup(to)
        raise


def bring_back(backup: Path, path: Path) -> None:
    """Make the store at `path` from a backup. Users that were erased since are erased as the store is opened.

    All users get new versions: the numbers in the old ones were given to other events after the backup. Raises ConfigError where a store
    exists there, DataError where the backup does not match its checksum.
    """
    with turn_of(path).held():
        remove_drafts(path)
        for file in (path, path.with_name(f"{path.name}-wal")):
            _refuse_existing(file, "stop the service, and move it, with its -wal and -shm, away")
        _copy_back(backup, path)


def take_away(path: Path) -> None:
    """Remove a store that `bring_back` has made."""
    with turn_of(path).held():
        _remove(path)


def remove_drafts(path: Path) -> None:
    """Remove what restores that were killed have left beside the store, which holds users' events too. To be called in the store's turn."""
    name = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{16}}(-wal|-shm|-journal)?")
    for left in [file for file in path.parent.iterdir() if name.fullmatch(file.name)]:
        left.unlink(missing_ok=True)


def _copy_back(backup: Path, path: Path) -> None:
    with _drafted(path, f"{backup} cannot be restored to {path}") as draft:
        with backup.open("rb") as source, draft.open("wb") as copy:
            copyfileobj(source, copy)
        _check(backup, _sealed(draft))
        with explained(backup), closing(sqlite3.connect(draft)) as connection:
            connection.execute("UPDATE store SET identity = lower(hex(randomblob(4)))")
            connection.commit()
        os.link(draft, path)


@contextmanager
def _drafted(path: Path, problem: str) -> Iterator[Path]:
    """An empty file beside the store, which is gone at the end. Raises ConfigError, which names the `problem`, where a file cannot be read
    or written.
    """
    draft = path.with_name(f".{path.name}-{token_hex(8)}")
    _make(draft)
    try:
        yield draft
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error
    finally:
        _remove(draft)


def rebuild(path: Path) -> None:
    """Write the file anew: split pages keep copies of some events, which SQLite does not overwrite when the events are deleted.

    That is done beside the store: SQLite's place for temporary files may have less room. Raises BackendUnavailable or ConfigError where it
    cannot be written.
    """
    with turn_of(path).held(), _drafted(path, f"{path} cannot be written anew") as draft, explained(path):
        with closing(connect_writer(path)) as store:
            try:
                store.execute("PRAGMA journal_mode = DELETE")  # no log of the old file is to stay beside the new one
            except sqlite3.OperationalError:  # another process has opened the store meanwhile, and is to go on with the same file
                store.execute("VACUUM")
                return
            store.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(draft),))  # its name may be no text
        connect_writer(draft).close()  # in the mode that the store was in
        flush(draft)
        draft.replace(path)
        flush(path.parent)


def _copy(path: Path, to: Path) -> None:
    with explained(path), closing(connect_reader(path)) as store, closing(sqlite3.connect(to)) as copy:
        try:
            store.backup(copy)
        except sqlite3.Error as error:
            if error.sqlite_errorcode in _NOT_WRITTEN:  # the store is only read
                raise ConfigError(f"{to} cannot be written: {error}; make room, or name a file on another disk") from error
            raise
        [[found]] = copy.execute("PRAGMA quick_check(1)").fetchall()
    if found != "ok":
        raise DataError(f"event store {path} is damaged: {found}; restore it from an earlier backup")


def _check(backup: Path, checksum: str) -> None:
    told = _checksum_file(backup)
    if not told.is_file():
        raise ConfigError(f"{told} is not there; put it beside the backup that it was made with")
    if told.read_bytes().split()[:1] != [checksum.encode()]:
        raise DataError(f"{backup} is not the file that {told} was made of; take another backup")


def _checksum_file(backup: Path) -> Path:
    return backup.with_name(f"{backup.name}.sha256")


def _write_checksum(backup: Path) -> None:
    """Have the backup, its checksum and the names of both on the disk."""
    line = os.fsencode(f"{_sealed(backup)}  {backup.name}\n")
    _checksum_file(backup).write_bytes(line)
    flush(_checksum_file(backup))
    flush(backup.parent)


def _remove_backup(backup: Path) -> None:
    _remove(backup)
    _checksum_file(backup).unlink(missing_ok=True)


def _another(to: Path) -> str:
    if _checksum_file(to).exists():
        return "name a file that is not there yet"
    return f"it has no {_checksum_file(to).name}, as what a backup that was killed has left: remove it then, or name another"


def _refuse_existing(file: Path, cure: str) -> None:
    if file.exists():
        raise ConfigError(f"{file} is there already; {cure}")


def _make(file: Path) -> None:
    """Make an empty file that only this user may read and write."""
    try:
        open(file, "x", opener=private).close()
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


def _sealed(file: Path) -> str:
    """Have the file on the disk; returns its SHA-256."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        return file_digest(opened, "sha256").hexdigest()


def _remove(file: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        file.with_name(file.name + end).unlink(missing_ok=True)
