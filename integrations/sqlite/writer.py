"""One thread writes. Calls that arrive while it waits for the disk share the next transaction, and so the next wait.

Erased data stay in the write-ahead log until it is emptied, while no reader uses it. That this is still to be done is noted in the file's
header, as SQLite's `user_version`, by the transaction that erases: where this process dies, another one does it.
"""

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.errors import BackendUnavailable
from integrations.sqlite.connection import BUSY_TIMEOUT_S, TurnLock, explained

T = TypeVar("T")
LARGEST_GROUP = 256  # calls that share a transaction
PURGE_AGAIN_S = 0.5
LOOK_AGAIN_S = 30.0  # how often to look whether a process that has ended left something to purge
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job(Generic[T]):
    """A call that waits to be carried out. `purge`: where it returns anything but 0, the log is to be emptied of what it deleted."""

    work: Callable[[sqlite3.Connection], T]
    future: "Future[T]"
    purge: bool = False


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a job, which its caller is given once the transaction is on the disk."""

    job: _Job[Any]
    result: Any = None
    error: BaseException | None = None

    def tell(self) -> None:
        if self.error is None:
            self.job.future.set_result(self.result)
        else:
            self.job.future.set_exception(self.error)


class Writer:
    """Carries out calls on a connection, one group after another, each group in one transaction.

    A call that fails is rolled back alone. A call that is cancelled before its group begins is not carried out.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, turn: TurnLock) -> None:
        self._connection, self._path, self._turn = connection, path, turn
        self._inode = path.stat().st_ino
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed, self._purge_due = False, True  # the process before may have been killed with a log of what it erased
        self._purge()
        self._thread = threading.Thread(target=self._run, name="genrec-sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[sqlite3.Connection], T], *, purge: bool = False) -> "Future[T]":
        """A future of the result of `work`, set once that is on the disk. Raises BackendUnavailable after `close`."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise BackendUnavailable(f"event store {self._path} is closed; open it again")
            self._jobs.put(_Job(work, future, purge))
        return future

    def close(self) -> None:
        """Carry out what was submitted, then close the connection. Blocks until that is done."""
        with self._closing:
            first, self._closed = not self._closed, True
            if first:
                self._jobs.put(None)
        self._thread.join()
        if first:
            with self._turn.held(), explained(self._path):  # the last connection to close writes the log back
                self._connection.close()

    def _run(self) -> None:
        going_on = True
        while going_on:
            jobs = self._next_group()
            going_on = None not in jobs
            outcomes = self._carry_out([job for job in jobs if job is not None and job.future.set_running_or_notify_cancel()])
            self._purge()
            for outcome in outcomes:
                outcome.tell()

    def _next_group(self) -> list[_Job[Any] | None]:
        """The jobs that wait; none where it is time to look for something to purge."""
        try:
            jobs = [self._jobs.get(timeout=PURGE_AGAIN_S if self._purge_due else LOOK_AGAIN_S)]
        except queue.Empty:
            return []
        while len(jobs) < LARGEST_GROUP and jobs[-1] is not None:
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs

    def _carry_out(self, jobs: Sequence[_Job[Any]]) -> list[_Outcome]:
        if not jobs:
            return []
        try:
            with self._turn.held(), explained(self._path):
                self._check_file()
                return self._commit(jobs)
        except Exception as error:  # noqa: BLE001 - each caller is told of any error, and the thread lives on
            return [_Outcome(job, error=error) for job in jobs]

    def _purge(self) -> None:
        """Where a purge is due, write the log back and empty it; while a reader still uses it, try again a little later."""
        try:
            with explained(self._path):
                (marked,) = self._connection.execute("PRAGMA user_version").fetchone()
                self._purge_due |= bool(marked)
                if self._purge_due:
                    with self._turn.held():
                        self._purge_due = not self._emptied()
                        if marked and not self._purge_due:
                            self._connection.execute("PRAGMA user_version = 0")
        except Exception as error:  # noqa: BLE001 - the thread outlives any error
            logger.warning("what was erased still stands in the write-ahead log, and is purged later: %s", error)

    def _emptied(self) -> bool:
        """Whether the log is empty now. Does not wait for readers."""
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            (busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")
        return not busy

    def _check_file(self) -> None:
        """Raises BackendUnavailable where the file was removed: SQLite would go on writing to it, and all would end with the process."""
        if not self._path.exists() or self._path.stat().st_ino != self._inode:
            raise BackendUnavailable(f"event store {self._path}: the file was removed or replaced while it was open; restart the gateway")

    def _commit(self, jobs: Sequence[_Job[Any]]) -> list[_Outcome]:
        """Carry out a group in one transaction; returns the outcomes. Raises sqlite3.Error where nothing of the group was stored."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._attempt(job) for job in jobs]
            if any(outcome.job.purge and outcome.result for outcome in outcomes):
                self._connection.execute("PRAGMA user_version = 1")
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        return outcomes

    def _attempt(self, job: _Job[Any]) -> _Outcome:
        self._connection.execute("SAVEPOINT call")
        try:
            with explained(self._path):
                outcome = _Outcome(job, job.work(self._connection))
        except Exception as error:
            if not self._connection.in_transaction:  # SQLite has rolled back everything, as where the disk is full
                raise
            self._connection.execute("ROLLBACK TO call")
            outcome = _Outcome(job, error=error)
        self._connection.execute("RELEASE call")
        return outcome
