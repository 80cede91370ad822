import asyncio
import errno
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from functools import partial
from hashlib import sha256

import pytest

from cluster.errors import BackendUnavailable
from cluster.events.digests import Digests
from cluster.events.migrations import read_migrations
from cluster.events.rules import version_of
from cluster.events.store import Event, Stored, StoreStatistics, closing_store, open_event_store
from cluster.values import Action, Behaviour
from integrations.sqlite import rows as store_rows
from integrations.sqlite import shared_disk
from integrations.sqlite.connection import TurnLock, connect_reader, connect_writer
from integrations.sqlite.driver import SQLiteDriver
from integrations.sqlite.store import MIGRATIONS
from integrations.sqlite.writer import Writer
from tests.repetitions import times
from tests.waiting import eventually, until


def event(item="i", user="u"):
    return Event(user, Behaviour(item, 1))


@pytest.fixture
def writer(tmp_path):
    path = tmp_path / "w.db"
    connection = connect_writer(path)
    connection.execute("CREATE TABLE t (x)")
    writer = Writer(connection, path, TurnLock(tmp_path / "w.lock"))
    yield writer
    writer.close()


def insert(value):
    return lambda connection: connection.execute("INSERT INTO t VALUES (?)", (value,)).rowcount


def rows(connection):
    return [value for (value,) in connection.execute("SELECT x FROM t ORDER BY rowid")]


def hold(writer):
    """Keep the writer at work until the event is set, so that what is submitted meanwhile makes one group."""
    going_on, holding = threading.Event(), threading.Event()
    writer.submit(lambda _: (holding.set(), going_on.wait()))
    holding.wait()
    return going_on


def commits(writer):
    """Statements that the writer ran, as they come."""
    seen = []
    writer._connection.set_trace_callback(seen.append)  # noqa: SLF001 - SQLite's own connection tells what it runs
    return seen


def test_calls_that_wait_together_share_one_commit(writer):
    going_on = hold(writer)
    seen = commits(writer)
    futures = [writer.submit(insert(number)) for number in range(50)]
    going_on.set()
    assert [future.result(120) for future in futures] == [1] * 50
    assert seen.count("COMMIT") <= 2  # the one of the call that held the writer may be among them
    assert writer.submit(rows).result(120) == list(range(50))


def test_a_call_that_fails_is_undone_alone(writer):
    def fail(connection):
        insert("half")(connection)
        raise ZeroDivisionError("by the caller")

    going_on = hold(writer)
    before, failing, after = writer.submit(insert(1)), writer.submit(fail), writer.submit(insert(2))
    going_on.set()
    assert (before.result(120), after.result(120)) == (1, 1)
    with pytest.raises(ZeroDivisionError, match="by the caller"):
        failing.result(120)
    assert writer.submit(rows).result(120) == [1, 2]


def test_a_call_that_is_cancelled_while_it_waits_is_not_carried_out(writer):
    going_on = hold(writer)
    kept, cancelled = writer.submit(insert(1)), writer.submit(insert(2))
    assert cancelled.cancel()
    going_on.set()
    kept.result(120)
    assert writer.submit(rows).result(120) == [1]


def test_a_full_disk_fails_every_call_of_the_group_and_the_writer_goes_on_when_there_is_room(writer):
    writer.submit(insert(0)).result(120)
    writer._connection.execute("PRAGMA max_page_count = 5")  # noqa: SLF001 - SQLite's own connection sets the limit
    going_on = hold(writer)
    futures = [writer.submit(insert("x" * 4000)) for _ in range(9)]
    going_on.set()
    stored = [value for future in futures if not (value := future.exception(120))]
    for future in futures:
        if error := future.exception():
            assert isinstance(error, BackendUnavailable)
            assert "the disk is full; make room" in str(error)
    assert len(stored) < 9
    assert len(writer.submit(rows).result(120)) == 1 + len(stored)
    writer._connection.execute("PRAGMA max_page_count = 1000")  # noqa: SLF001 - SQLite's own connection sets the limit
    assert writer.submit(insert("y" * 4000)).result(120) == 1


def test_what_was_submitted_before_closing_is_carried_out(tmp_path):
    connection = connect_writer(tmp_path / "w.db")
    connection.execute("CREATE TABLE t (x)")
    writer = Writer(connection, tmp_path / "w.db", TurnLock(tmp_path / "w.lock"))
    futures = [writer.submit(insert(number)) for number in range(300)]
    writer.close()
    assert all(future.result(0) == 1 for future in futures)
    with pytest.raises(BackendUnavailable, match=r"w\.db is closed; open it again"):
        writer.submit(insert(1))


def test_a_turn_that_does_not_come_ends_in_an_error_that_names_the_lock(tmp_path):
    now = iter(range(100))
    slept = []
    lock = TurnLock(tmp_path / "x.lock", timeout_s=3.0, clock=lambda: float(next(now)), sleep=slept.append)
    with TurnLock(tmp_path / "x.lock").held():
        with pytest.raises(BackendUnavailable, match=r"another process has held .*x\.lock for more than 3 s"), lock.held():
            pytest.fail("two hold the lock")
        assert len(slept) == 2
    with lock.held():
        pass


def test_a_process_that_dies_gives_its_turn_back(tmp_path):
    code = f"""
import os, pathlib
from integrations.sqlite.connection import TurnLock
with TurnLock(pathlib.Path({str(tmp_path / "x.lock")!r})).held():
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with TurnLock(tmp_path / "x.lock", timeout_s=0).held():
        pass


async def test_a_file_system_without_locks_is_told_with_the_cure(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)  # as a network's file system does, whose server keeps no locks
    with pytest.raises(
        BackendUnavailable, match=r"events\.db\.lock cannot be locked \(No locks available\); put the event store on a local disk"
    ):
        await open_event_store(f"sqlite:///{tmp_path}/events.db")


def test_a_writer_waits_for_the_disk_at_each_commit_and_checks_references(tmp_path):
    connection = connect_writer(tmp_path / "w.db")
    settings = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")}
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    assert connection.execute("PRAGMA busy_timeout").fetchone()[0] == 5000
    connection.close()


def bytes_of(directory):
    """The store's files, read by another process: to open and close them in this one would free SQLite's locks on them."""
    return subprocess.run("cat e.db*", shell=True, cwd=directory, capture_output=True, check=True).stdout


async def test_what_is_erased_is_gone_from_the_file_and_its_log(tmp_path):
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        await store.append([event("item", "marker-user")] * 300 + [event("kept-item", "v")] * 300)
        await store.history("default", "marker-user", 10)
        assert b"marker-" in bytes_of(tmp_path)
        await store.erase("default", "marker-user")
        left = bytes_of(tmp_path)
    assert b"marker-" not in left
    assert b"kept-item" in left


@pytest.mark.parametrize("seed", range(times(6, 2)))
async def test_no_name_or_key_of_an_erased_user_is_left_however_often_sqlite_moves_rows(tmp_path, seed):
    """Users of all lengths come and go in a random order, so that pages are split and joined, each with rows of many of them."""
    rng, here = random.Random(seed), []
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        for number in range(600):
            user = f"{'gone' if rng.random() < 0.9 else 'kept'}-{number}-{'x' * rng.randrange(200)}"
            keyed = [Event(user, Behaviour("i", n), rng.choice(["shop", "ä" * 20]), f"{user}/{n}") for n in range(rng.randrange(1, 9))]
            await store.append(keyed)
            here += {(one.tenant, user) for one in keyed if user.startswith("gone")}
            for _ in range(rng.choice([0, 0, len(here) // 2])):
                await store.erase(*here.pop(rng.randrange(len(here))))
        for name in here:
            await store.erase(*name)
        left, users = bytes_of(tmp_path), await store.users("shop", 1000)
    assert b"gone" not in left
    assert b"kept" in left
    assert users
    assert all(user.user_id.startswith("kept-") for user in users)


SCHEMAS = {
    1: ("INSERT INTO erasures (number, digest) VALUES (4, ?)", sha256(b"default\0eve").digest()),
    2: ("INSERT INTO erasures (number, digest) VALUES (4, ?)", Digests(b"k" * 64).user("default", "eve")),
}


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_store_of_an_earlier_schema_keeps_what_it_holds_and_the_names_that_it_had_stand_in_one_place(tmp_path, schema):
    path = tmp_path / "e.db"
    (tmp_path / "e.db.key").write_text("k" * 64)
    store = connect_writer(path)
    store.execute("CREATE TABLE schema_versions (version INTEGER PRIMARY KEY, name TEXT, applied_at TEXT)")
    for step in read_migrations(MIGRATIONS)[:schema]:
        for statement in step.statements:
            store.execute(statement)
        store.execute("INSERT INTO schema_versions (version) VALUES (?)", (step.number,))
    store.execute("UPDATE store SET identity = 'me'")
    store.executemany(
        "INSERT INTO users (number, tenant, user_id, latest, events) VALUES (?, ?, ?, ?, 1)", [(3, "t", "ada", 5), (9, "t", "bob", 8)]
    )
    held = [(5, 3, 100, "i", "view", None, "t", "ada/1"), (8, 9, 100, "j", "like", 2.5, "t", None)]
    store.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", held)
    store.execute("UPDATE sqlite_sequence SET seq = 70 WHERE name = 'events'")
    statement, digest = SCHEMAS[schema]
    store.execute(statement, (digest,))
    if schema > 1:
        store.execute("UPDATE store SET key_check = ?", (Digests(b"k" * 64).check,))
    store.close()
    async with closing_store(f"sqlite:///{path}") as store:
        assert [await store.version(*name) for name in (("t", "ada"), ("t", "bob"), ("default", "eve"))] == [
            version_of("me", 5, None),
            version_of("me", 8, None),
            version_of("me", None, 4),
        ]
        assert (await store.history("t", "bob", 10)).behaviours == (Behaviour("j", 100, Action.LIKE, 2.5),)
        again, new = await store.append([Event("ada", Behaviour("i", 100), "t", "ada/1"), Event("cat", Behaviour("i", 100), "t")])
        assert again == Stored(5, duplicate=True)
        assert new.sequence > 70
        await store.erase("t", "ada")
        assert b"ada" not in bytes_of(tmp_path)


async def test_a_store_of_the_schema_without_the_ledgers_numbers_keeps_its_erasures(tmp_path):
    path = tmp_path / "e.db"
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([Event("ada", Behaviour("i", 100))])
        await store.erase("default", "ada")
        version, ledger = await store.version("default", "ada"), (tmp_path / "e.db.erased").read_bytes()
        await store.append([Event("ada", Behaviour("j", 100))])
    with closing(connect_writer(path)) as connection:
        connection.execute("DROP TABLE leaving")
        connection.execute("ALTER TABLE erasures DROP COLUMN noted")
        connection.execute("DELETE FROM schema_versions WHERE version >= 4")
    async with closing_store(f"sqlite:///{path}") as store:
        assert [one.item_id for one in (await store.history("default", "ada", 10)).behaviours] == ["j"]
        assert await store.erase("default", "ada") == 1
        assert await store.version("default", "ada") == version.replace("erased-1", "erased-2")
    assert (tmp_path / "e.db.erased").read_bytes().startswith(ledger)


class WithoutCheckpoints:
    """A connection that cannot write its log back, as where the disk does not answer."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *values):
        if "wal_checkpoint" in statement:
            raise OSError("no locks available")
        return self._connection.execute(statement, *values)


def test_a_purge_that_breaks_costs_neither_the_writer_nor_its_patience(writer, caplog):
    patience = writer.submit(lambda connection: connection.execute("PRAGMA busy_timeout").fetchone()).result(120)
    connection, writer._connection = writer._connection, WithoutCheckpoints(writer._connection)  # noqa: SLF001 - the fault is SQLite's
    assert writer.submit(insert(1), purge=True).result(120) == 1
    assert writer.submit(insert(2)).result(120) == 1
    assert writer.submit(lambda _: connection.execute("PRAGMA busy_timeout").fetchone()).result(120) == patience
    assert "is purged later: no locks available" in caplog.text
    writer._connection = connection  # noqa: SLF001 - the fault is SQLite's


async def test_an_erasure_does_not_wait_for_readers_and_is_purged_once_they_have_gone(tmp_path, monkeypatch):
    for module in ("connection", "writer"):
        monkeypatch.setattr(f"integrations.sqlite.{module}.BUSY_TIMEOUT_S", 3600.0)  # for as long SQLite would wait for the reader
    path = tmp_path / "e.db"
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([event("marker-item", "marker-user")])
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        async with asyncio.timeout(120):
            await store.erase("default", "marker-user")
            await store.append([event("other", "other")])
        assert b"marker" in (tmp_path / "e.db-wal").read_bytes()
        reader.close()
        async with asyncio.timeout(120):
            while b"marker" in (tmp_path / "e.db-wal").read_bytes():  # noqa: ASYNC110 - it is purged in the background
                await asyncio.sleep(0.05)
        assert b"marker" not in path.read_bytes()


ERASER = """
import asyncio, signal, sqlite3, sys
from cluster.events.store import Event, closing_store
from cluster.values import Behaviour
async def main(path, read_beside):
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([Event("marker-user", Behaviour("marker-item", 1))])
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        if read_beside:
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        print("stored", flush=True)
        sys.stdin.readline()
        await store.erase("default", "marker-user")
        print("erased", flush=True)
        signal.pause()  # holds the event loop until the end
asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


@contextmanager
def killed_after_erasing(path, *read_beside):
    """A process has stored a user's event; within the block it waits, then it erases the user, and is killed before it can purge."""
    child = subprocess.Popen([sys.executable, "-c", ERASER, path, *read_beside], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"stored\n"
        yield
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"erased\n"
        assert b"marker-" in bytes_of(path.parent), "a reader kept the log from being emptied"
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL
        child.stdin.close()
        child.stdout.close()


async def test_what_a_killed_process_erased_beside_a_reader_is_gone_from_file_and_log_once_the_store_is_open(tmp_path):
    path = tmp_path / "e.db"
    with killed_after_erasing(path, "read beside"):
        pass
    async with closing_store(f"sqlite:///{path}") as store:
        assert b"marker-" not in bytes_of(tmp_path)
        assert (await store.history("default", "marker-user", 10)).behaviours == ()


async def test_what_a_killed_process_erased_is_purged_after_a_restart_as_soon_as_its_reader_has_gone(tmp_path):
    path, reader = tmp_path / "e.db", None
    with killed_after_erasing(path):
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
    async with closing_store(f"sqlite:///{path}"):
        assert b"marker-" in bytes_of(tmp_path)
        reader.close()
        await until(lambda: b"marker-" not in bytes_of(tmp_path), "the log is emptied")


async def test_what_a_killed_process_erased_is_purged_by_another_that_has_the_store_open(tmp_path, monkeypatch):
    monkeypatch.setattr("integrations.sqlite.writer.LOOK_AGAIN_S", 0.05)
    path = tmp_path / "e.db"
    async with closing_store(f"sqlite:///{path}"):
        with killed_after_erasing(path, "read beside"):
            pass
        await until(lambda: b"marker-" not in bytes_of(tmp_path), "the log is emptied")


# ---- users with many events

MANY = [Event("marker-user", Behaviour(f"marker-{n}", n), idempotency_key=f"marker-key-{n}") for n in range(50)]
LEFT = "SELECT (SELECT count(*) FROM events WHERE item_id LIKE 'marker-%'), (SELECT count(*) FROM leaving)"


def left_in(path):
    """How many events of the erased user stand in the file, and how many users are leaving."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(LEFT).fetchone()


@pytest.fixture
def going_on(monkeypatch):
    """Until it is set, of a user's events 7 alone are deleted; `broken`: what deleting the others raises."""
    going_on, delete_some = threading.Event(), store_rows.delete_some
    going_on.broken = None

    def once_it_may(connection):
        if going_on.broken:
            raise going_on.broken
        return delete_some(connection) if going_on.is_set() else not store_rows.is_gone(connection)

    monkeypatch.setattr("integrations.sqlite.connection.TurnLock", partial(TurnLock, timeout_s=300))  # on a busy machine
    monkeypatch.setattr(store_rows, "SLICE", 7)
    monkeypatch.setattr(store_rows, "delete_some", once_it_may)
    return going_on


@pytest.mark.parametrize("by", ["the same gateway", "another process"])
async def test_while_many_events_of_an_erased_user_are_deleted_others_store_theirs_and_the_user_is_found_no_more(tmp_path, going_on, by):
    url, path = f"sqlite:///{tmp_path}/e.db", tmp_path / "e.db"
    async with closing_store(url) as store, closing_store(url) as another:
        stored = await store.append(MANY)
        beside, version = store if by == "the same gateway" else another, await store.version("default", "marker-user")
        erasing = asyncio.create_task(store.erase("default", "marker-user"))
        await until(lambda: left_in(path) == (43, 1), "a part of it is deleted")
        assert not (await beside.append([event("i", "other")]))[0].duplicate
        assert not erasing.done()
        gone = await beside.history("default", "marker-user", 100)
        assert (gone.behaviours, gone.total, gone.version != version) == ((), 0, True)
        assert await beside.append(MANY[:1] + MANY[-1:]) == [Stored(one.sequence, duplicate=True) for one in (stored[0], stored[-1])]
        assert await beside.statistics() == StoreStatistics(1, 1)
        assert [user.user_id for user in await beside.users("default", 10)] == ["other"]
        await beside.append([event("back", "marker-user")])
        again = asyncio.create_task(beside.erase("default", "marker-user"))
        going_on.set()
        assert (await erasing, await again, left_in(path)) == (50, 1, (0, 0))
        assert await beside.append(MANY) == [Stored(one.sequence, duplicate=True) for one in stored]
        assert b"marker-" not in bytes_of(tmp_path)
    assert len((tmp_path / "e.db.erased").read_bytes().splitlines()) == 2


async def test_an_erasure_of_many_events_is_finished_before_the_store_is_closed(tmp_path, going_on):
    store = await open_event_store(f"sqlite:///{tmp_path}/e.db")
    await store.append(MANY)
    erasing = asyncio.create_task(store.erase("default", "marker-user"))
    await until(lambda: left_in(tmp_path / "e.db") == (43, 1))
    closing_it = asyncio.create_task(store.close())
    going_on.set()
    await closing_it
    assert (await erasing, left_in(tmp_path / "e.db")) == (50, (0, 0))


async def test_where_the_rest_of_an_erased_users_events_cannot_be_deleted_now_that_is_told_and_done_later(tmp_path, going_on, caplog):
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        await store.append(MANY)
        going_on.broken = sqlite3.OperationalError("database or disk is full")
        with pytest.raises(BackendUnavailable, match=r"what is left of an erased user's events is deleted later: .*disk is full"):
            await store.erase("default", "marker-user")
        assert (await store.history("default", "marker-user", 100)).behaviours == ()
        assert not (await store.append([event("i", "other")]))[0].duplicate
        going_on.broken = None
        going_on.set()
        assert await store.erase("default", "marker-user") == 0
        assert left_in(tmp_path / "e.db") == (0, 0)
        assert b"marker-" not in bytes_of(tmp_path)


KILLED = """
import asyncio, sys
from cluster.events.store import closing_store
from integrations.sqlite import rows
from tests.unit.test_events_sqlite import MANY
async def main(path):
    rows.SLICE, rows.delete_some = 7, lambda connection: not rows.is_gone(connection)
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append(MANY)
        print("stored", flush=True)
        await store.erase("default", "marker-user")
asyncio.run(main(sys.argv[1]))
"""


def killed_while_it_erases(path):
    """A process stores a user's events and erases the user, and is killed when a part of that is done."""
    child = subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"stored\n"
        eventually(lambda: left_in(path) == (43, 1))
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()


async def test_what_a_killed_process_has_left_of_an_erased_user_is_found_no_more_and_deleted_once_the_store_is_open(tmp_path):
    killed_while_it_erases(tmp_path / "e.db")
    assert len((tmp_path / "e.db.erased").read_bytes().splitlines()) == 1
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        assert (await store.history("default", "marker-user", 100)).behaviours == ()
        assert all(one.duplicate for one in await store.append(MANY))
        assert await store.erase("default", "marker-user") == 0
        assert left_in(tmp_path / "e.db") == (0, 0)
        assert b"marker-" not in bytes_of(tmp_path)


async def test_what_a_killed_process_has_left_of_an_erased_user_is_deleted_by_another_that_has_the_store_open(
    tmp_path, going_on, monkeypatch
):
    monkeypatch.setattr("integrations.sqlite.writer.LOOK_AGAIN_S", 0.05)
    async with closing_store(f"sqlite:///{tmp_path}/e.db"):
        killed_while_it_erases(tmp_path / "e.db")
        going_on.set()
        await until(lambda: left_in(tmp_path / "e.db") == (0, 0))
        await until(lambda: b"marker-" not in bytes_of(tmp_path), "the log is emptied")


async def test_what_users_did_may_be_read_by_the_user_who_runs_genrec_alone(tmp_path):
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        await store.append([event()])
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("e.db", "e.db-wal", "e.db-shm", "e.db.lock", "e.db.key", "e.db.erased"), "0o600")


async def test_a_directory_that_is_not_there_is_named_with_the_cure(tmp_path):
    with pytest.raises(BackendUnavailable, match=r"missing/e\.db\.lock cannot be opened; the directory must exist"):
        await open_event_store(f"sqlite:///{tmp_path}/missing/e.db")


async def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no database at all, but long enough to be looked at " * 20)
    with pytest.raises(BackendUnavailable, match=r"notes\.txt: it is no SQLite database; name another file, or restore it"):
        await open_event_store(f"sqlite:///{path}")
    assert path.read_text().startswith("no database")


async def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE users (name)")
    with pytest.raises(BackendUnavailable, match="table users already exists"):
        await open_event_store(f"sqlite:///{path}")
    assert other.execute("SELECT name FROM sqlite_schema").fetchall() == [("users",)]
    other.close()


async def test_a_damaged_file_is_told_with_the_cure(tmp_path):
    path = tmp_path / "e.db"
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([event(str(number), f"u{number}") for number in range(2000)])
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(BackendUnavailable, match="it is damaged; restore it from a backup"):
        async with closing_store(f"sqlite:///{path}") as store:
            await store.append([event("x", "u7")])


async def test_an_action_that_no_version_knows_is_told_and_not_passed_over(tmp_path):
    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        await store.append([event()])
        with closing(sqlite3.connect(tmp_path / "e.db", isolation_level=None)) as other:
            other.execute("UPDATE events SET action = 'stroll'")
        with pytest.raises(ValueError, match="'stroll' is not a valid Action"):
            await store.history("default", "u", 10)


async def test_a_read_of_a_file_that_was_removed_makes_no_empty_one_in_its_place(tmp_path):
    path = tmp_path / "a %41?#.db"
    async with closing_store(f"sqlite:///{tmp_path}/moved.db") as store:
        await store.append([event()])
    (tmp_path / "moved.db").rename(path)
    with closing(connect_reader(path)) as reader:
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
    store = await open_event_store(f"sqlite:///{tmp_path}/e.db")
    await store.append([event()])
    for end in ("", "-wal", "-shm"):
        (tmp_path / f"e.db{end}").unlink()
    with pytest.raises(BackendUnavailable, match="it cannot be opened"):
        await store.history("default", "u", 10)
    assert not (tmp_path / "e.db").exists()
    await store.close()


async def test_a_file_that_is_removed_while_it_is_open_is_noticed_before_events_are_lost(tmp_path):
    path = tmp_path / "e.db"
    store = await open_event_store(f"sqlite:///{path}")
    await store.append([event()])
    path.unlink()
    with pytest.raises(BackendUnavailable, match="the file was removed or replaced while it was open; restart the gateway"):
        await store.append([event()])
    await store.close()


async def test_events_go_where_the_url_says_relative_or_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///relative.db", f"sqlite:///{tmp_path}/absolute.db"):
        async with closing_store(url) as store:
            await store.append([event()])
    assert (tmp_path / "relative.db").exists()
    assert (tmp_path / "absolute.db").exists()


async def test_processes_that_write_one_file_at_once_lose_nothing(tmp_path):
    code = """
import asyncio, sys
from functools import partial
from cluster.events.store import Event, closing_store
from cluster.values import Behaviour
from integrations.sqlite import connection
connection.TurnLock = partial(connection.TurnLock, timeout_s=300)  # a busy machine may keep a process from its turn for long
async def main(url, name):
    async with closing_store(url) as store:
        for n in range(100):
            await store.append([Event("u", Behaviour(f"{name}.{n}", 1)), Event("shared", Behaviour(f"{n}", 1), idempotency_key=f"{n}")])
asyncio.run(main(*sys.argv[1:]))
"""
    url = f"sqlite:///{tmp_path}/e.db"
    runs = [await asyncio.create_subprocess_exec(sys.executable, "-c", code, url, str(number)) for number in range(3)]
    assert [await run.wait() for run in runs] == [0, 0, 0]
    async with closing_store(url) as store:
        held = [behaviour.item_id.split(".") for behaviour in (await store.history("default", "u", 1000)).behaviours]
        assert [[int(n) for name, n in held if name == str(run)] for run in range(3)] == [list(range(100))] * 3
        assert len((await store.history("default", "shared", 1000)).behaviours) == 100


def test_an_older_sqlite_is_refused_with_both_versions(monkeypatch):
    assert SQLiteDriver().get_availability().ok
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.31.1")
    assert SQLiteDriver().get_availability().reason == "Python's SQLite is 3.31.1, older than 3.37.0; use a newer Python build"


@pytest.mark.parametrize(
    ("kind", "at", "warned"),
    [
        ("nfs4", ".", True),
        ("fuse.s3fs", "shared models", True),
        ("ceph", "..", True),
        ("nfs4", "elsewhere", False),
        ("ext4", ".", False),
        ("fuseblk", ".", False),
    ],
)
async def test_a_store_on_a_network_file_system_is_warned_of(tmp_path, monkeypatch, caplog, kind, at, warned):
    """Gateways of several machines would write it."""
    mounts, mounted = tmp_path / "mountinfo", str((tmp_path / at).resolve()).replace(" ", r"\040")
    mounts.write_text(f"22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n36 22 0:32 / {mounted} rw,noatime shared:3 - {kind} host:/x rw\n")
    monkeypatch.setattr(shared_disk, "MOUNTS", mounts)
    (tmp_path / "shared models").mkdir()
    async with closing_store(f"sqlite:///{tmp_path}/shared models/events.db"):
        pass
    assert (f"lies on a network file system ({kind})" in caplog.text, "name a PostgreSQL" in caplog.text) == (warned, warned)


async def test_a_store_is_opened_where_the_system_tells_no_mounts(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared_disk, "MOUNTS", tmp_path / "none")
    async with closing_store(f"sqlite:///{tmp_path}/events.db"):
        assert caplog.text == ""


async def test_a_read_that_is_given_up_ends_in_its_thread_and_the_next_one_is_read(tmp_path, monkeypatch):
    go_on, begun = True, set()

    def goes_on():
        begun.add(threading.get_ident())
        return go_on

    def long(connection):
        connection.create_function("goes_on", 0, goes_on)
        return connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE goes_on()) SELECT max(i) FROM n"
        ).fetchone()

    async with closing_store(f"sqlite:///{tmp_path}/e.db") as store:
        try:
            monkeypatch.setattr(store_rows, "version", lambda connection, _: long(connection))
            reads = [
                asyncio.create_task(store.version("default", "u")) for _ in range(store.readers + 1)
            ]  # the last one waits for a thread
            await until(lambda: len(begun) == store.readers)
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)
            assert all(read.cancelled() for read in reads)
            monkeypatch.undo()
            assert await asyncio.wait_for(store.version("default", "u"), 60) == ""
        finally:
            go_on = False
