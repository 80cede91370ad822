"""One thread writes. Calls that arrive while it waits for the disk share the next transaction, and so the next wait.

Erased data stay in the write-ahead log until it is emptied, while no reader uses it. That this is still to be done is noted in the file's
header, as SQLite's `user_version`, by the transaction that erases: where this process dies, another one does it.

What one transaction should not do, as others would wait for it, it leaves noted in the file too: a part of that is done after each group,
with time for other processes between two parts, and what waits for the whole is told when it is done.
"""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.errors import BackendUnavailable
from integrations.sqlite.connection import BUSY_TIMEOUT_S, TurnLock, explained

T = TypeVar("T")
LARGEST_GROUP = 256  # calls that share a transaction
PURGE_AGAIN_S = 0.5
LOOK_AGAIN_S = 30.0  # how often to look whether a process that has ended left something to do or to purge
PARTS_S = 0.1  # how long one transaction does parts of what is left
BETWEEN_PARTS_S = 0.02  # another process looks every millisecond whether it has its turn
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job(Generic[T]):
    """A call that waits to be carried out. `purge`: where it returns anything but 0, the log is to be emptied of what it deleted. `done`:
    whether what it has left is done.
    """

    work: Callable[[sqlite3.Connection], T]
    future: "Future[T]"
    purge: bool = False
    done: Callable[[sqlite3.Connection], bool] | None = None


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a job, which its caller is given once the transaction is on the disk and all that it has left is done."""

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

    A call that fails is rolled back alone. A call that is cancelled before its group begins is not carried out. `do_part` does a part of
    what calls, or a process that has died, have left, and returns whether there was any.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, turn: TurnLock, do_part: Callable[[sqlite3.Connection], bool] = lambda _: False
    ) -> None:
        self._connection, self._path, self._turn, self._do_part = connection, path, turn, do_part
        self._untold: list[_Outcome] = []
        self._inode = path.stat().st_ino
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed, self._purge_due = False, True  # the process before may have been killed with a log of what it erased
        self._go_on()
        self._purge()
        self._thread = threading.Thread(target=self._run, name="genrec-sqlite-writer", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[sqlite3.Connection], T], *, purge: bool = False, done: Callable[[sqlite3.Connection], bool] | None = None
    ) -> "Future[T]":
        """A future of the result of `work`, set once that is on the disk and `done`, where it is given. Raises BackendUnavailable after
        `close`.
        """
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise BackendUnavailable(f"event store {self._path} is closed; open it again")
            self._jobs.put(_Job(work, future, purge, done))
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
        while going_on or self._untold:
            jobs = self._next_group()
            going_on &= None not in jobs
            self._untold += self._carry_out([job for job in jobs if job is not None and job.future.set_running_or_notify_cancel()])
            leave_some = any(job is not None and job.done is not None for job in jobs)
            if self._left or leave_some or time.monotonic() >= self._look_at:
                self._go_on()
            told = self._finished()
            if not self._left or any(outcome.job.purge for outcome in told):
                self._purge()
            for outcome in told:
                outcome.tell()

    def _go_on(self) -> None:
        """Do parts of what is left, in one transaction. Where that breaks, those that wait for it are told, and it is tried again later."""
        [parts] = self._carry_out([_Job(self._do_parts, Future(), purge=True)])
        self._left, self._look_at = bool(parts.result), time.monotonic() + LOOK_AGAIN_S
        if parts.error is not None:
            problem = BackendUnavailable(f"what is left of an erased user's events is deleted later: {parts.error}")
            logger.warning("%s", problem)
            self._untold = [replace(one, error=one.error or problem) if self._leaves_some(one.job) else one for one in self._untold]

    def _do_parts(self, connection: sqlite3.Connection) -> bool:
        """Do one part, and further ones for a moment while no call waits; returns whether there was any."""
        until = time.monotonic() + PARTS_S
        any_left = going_on = self._do_part(connection)
        while going_on and self._jobs.empty() and time.monotonic() < until:
            going_on = self._do_part(connection)
        return any_left

    def _finished(self) -> list[_Outcome]:
        """The outcomes to tell now, which are then no more among the untold ones."""
        waiting = [outcome.error is None and self._left and self._leaves_some(outcome.job) for outcome in self._untold]
        told = [outcome for outcome, waits in zip(self._untold, waiting, strict=True) if not waits]
        self._untold = [outcome for outcome, waits in zip(self._untold, waiting, strict=True) if waits]
        return told

    def _leaves_some(self, job: _Job[Any]) -> bool:
        """Whether some of what the job has left is not done yet."""
        if job.done is None:
            return False
        try:
            return not job.done(self._connection)
        except sqlite3.Error:
            return True

    def _next_group(self) -> list[_Job[Any] | None]:
        """The jobs that wait; none where it is time to look for something to purge."""
        try:
            jobs = [self._jobs.get(timeout=BETWEEN_PARTS_S if self._left else PURGE_AGAIN_S if self._purge_due else LOOK_AGAIN_S)]
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
