"""Connections to the file, SQLite's errors explained to the operator, and the lock by which processes take turns."""

import fcntl
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import BackendUnavailable
from cluster.private_file import private

BUSY_TIMEOUT_S = 5.0
_POLL_S = 0.001
_CURES = {
    sqlite3.SQLITE_BUSY: f"another program has kept it locked for more than {BUSY_TIMEOUT_S:g} s; end that program, or wait",
    sqlite3.SQLITE_LOCKED: "another connection keeps it locked; try again",
    sqlite3.SQLITE_FULL: "the disk is full; make room and send the events again",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written; look at the system's log",
    sqlite3.SQLITE_READONLY: "it may not be written; give this user the right to write the file and its directory",
    sqlite3.SQLITE_PERM: "it may not be written; give this user the right to write the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; the directory must exist, and this user must be allowed to write it",
    sqlite3.SQLITE_NOTADB: "it is no SQLite database; name another file, or restore it from a backup",
    sqlite3.SQLITE_CORRUPT: "it is damaged; restore it from a backup, or save what is left with: sqlite3 FILE .recover",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into BackendUnavailable with the cure."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits are a finer distinction
        raise BackendUnavailable(f"event store {path}: {_CURES.get(code, 'SQLite refuses')} ({error})") from error


def connect_writer(path: Path) -> sqlite3.Connection:
    """The connection that writes. A commit is on the disk when it returns, and deleted data are overwritten. A missing file is made for
    this user alone, and so is its log.

    Transactions are begun and ended by hand. Raises sqlite3.Error, or BackendUnavailable where the file system has no write-ahead log.
    """
    with suppress(OSError):  # one that is there is not opened: to close it would free SQLite's locks; SQLite says why another cannot be
        open(path, "x", opener=private).close()
    connection = _connect(path)
    if (mode := connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]) != "wal":
        connection.close()
        raise BackendUnavailable(f"event store {path}: no write-ahead log there (mode {mode!r}); put the file on a local disk")
    for setting in ("synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON", "foreign_keys = ON", "secure_delete = ON"):
        connection.execute(f"PRAGMA {setting}")
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; it reads beside a writer without waiting. A file that was removed meanwhile is not made anew."""
    connection = _connect(f"{path.absolute().as_uri()}?mode=rw")
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect(path: Path | str) -> sqlite3.Connection:
    """A connection to the file; a `path` given as text is a URI."""
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=isinstance(path, str))


class Interruptible:
    """Work on a connection in one thread, which another thread may end; no other work on that connection is."""

    def __init__(self) -> None:
        self._lock, self._interrupted = threading.Lock(), False
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def on(self, connection: sqlite3.Connection) -> Iterator[None]:
        """The block is the work. Raises sqlite3.OperationalError where it is interrupted."""
        with self._lock:
            if self._interrupted:
                raise sqlite3.OperationalError("interrupted")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    def interrupt(self) -> None:
        """End the statement that runs, and do not begin the work where it has not begun."""
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                self._connection.interrupt()


def turn_of(store: Path) -> "TurnLock":
    """The lock of the processes that write or make this store's file."""
    return TurnLock(store.with_name(f"{store.name}.lock"))


@dataclass(frozen=True)
class TurnLock:
    """Processes that write one file take turns by a lock on another file beside it, which the system frees where a process dies.

    SQLite's own lock is not enough in its releases up to 3.51.2 (3.44.6 and 3.50.7 excepted): there a checkpoint of one process beside a
    commit of another can, rarely, lose committed pages (sqlite.org/wal.html#walresetbug).
    """

    path: Path
    timeout_s: float = BUSY_TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock within the block. Raises BackendUnavailable where the turn does not come within `timeout_s`."""
        try:
            file = open(self.path, "ab", opener=private)  # noqa: SIM115 - the block below closes it
        except OSError as error:
            cure = "the directory must exist, and this user must be allowed to write it"
            raise BackendUnavailable(f"event store: {self.path} cannot be opened; {cure} ({error.strerror})") from error
        with file:  # closing it frees the lock
            self._take(file.fileno())
            yield

    def _take(self, descriptor: int) -> None:
        deadline = self.clock() + self.timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.clock() >= deadline:
                    problem = f"event store: another process has held {self.path} for more than {self.timeout_s:g} s; end it, or wait"
                    raise BackendUnavailable(problem) from None
                self.sleep(_POLL_S)
            except OSError as error:
                problem = f"event store: {self.path} cannot be locked ({error.strerror}); put the event store on a local disk"
                raise BackendUnavailable(problem) from error
            else:
                return
