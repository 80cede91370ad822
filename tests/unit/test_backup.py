"""Backups of the event store, and the ledger by which a restored one forgets: the drill that a platform team runs, over the commands."""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import sys
import threading
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.config import parse
from cluster.errors import BackendUnavailable, ConfigError, DataError
from cluster.events.digests import Digests
from cluster.events.ledger import Ledger, missing, require, split_ledger
from cluster.events.store import Event, StoreStatistics, closing_store, open_event_store
from cluster.values import Behaviour
from deployments.cli.events import app
from integrations.sqlite.backup import back_up, rebuild
from integrations.sqlite.connection import connect_writer, turn_of
from integrations.sqlite.driver import SQLiteDriver
from tests.disks import largest_file
from tests.postgres import running_postgres
from tests.power_loss import Disk, obstacle, recorded
from tests.waiting import settled, until

DIGESTS = Digests(b"k" * 32)
ADA, BOB = b"a" * 32, b"b" * 32


def event(user, item, key=None, tenant="default"):
    return Event(user, Behaviour(item, 100), tenant, key)


async def run(*arguments):
    """A `genrec events` command, as it runs beside the service: in another thread, with an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, [str(argument) for argument in arguments], catch_exceptions=False)


async def items(store, user):
    return [behaviour.item_id for behaviour in (await store.history("default", user, 1000)).behaviours]


def bytes_of(path):
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


@asynccontextmanager
async def events_arriving(store):
    """A user's events, one after another."""

    async def arrive():
        for number in range(100_000):
            await store.append([event("busy", f"{number}")])

    arriving = asyncio.create_task(arrive())
    try:
        yield
    finally:
        arriving.cancel()
        with suppress(asyncio.CancelledError):
            await arriving


@pytest.fixture
def path(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "events.db"


def moved_away(path):
    """What an operator does before a restore; the ledger and the key stay."""
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


async def test_a_user_that_was_erased_after_the_backup_is_in_no_byte_of_the_restored_store_and_others_are_there(path, tmp_path):
    url, backup, audit = f"sqlite:///{path}", tmp_path / "backup.db", tmp_path / "audit.jsonl"
    others = [event(f"user-{number}", f"item-{number}", key=f"key-{number}") for number in range(200)]
    async with closing_store(url) as store:
        await store.append([event("marker-user", f"marker-item-{number}", key=f"marker-key-{number}") for number in range(50)])
        await store.append(others)
        async with events_arriving(store):
            assert (await run("backup", backup, "--url", url, "--audit-log", audit)).exit_code == 0
        await store.append([event("late", "late")])
        await store.erase("default", "marker-user")
        version = await store.version("default", "user-7")
    assert b"marker-" in backup.read_bytes(), "else the drill proves nothing"
    moved_away(path)

    restored = await run("restore", backup, "--url", url, "--audit-log", audit)
    assert "those that were erased since the backup are not among them" in restored.output
    assert b"marker-" not in bytes_of(path)
    async with closing_store(url) as store:
        assert b"marker-" not in bytes_of(path), "nor in the log of a store that is open"
        assert [await items(store, one.user_id) for one in others] == [[one.behaviour.item_id] for one in others]
        assert (await items(store, "marker-user"), await items(store, "late")) == ([], [])
        busy = await items(store, "busy")
        assert busy == [str(number) for number in range(len(busy))], "the backup is of one moment"
        assert await store.version("default", "user-7") != version, "no answer that was kept under it is given again"
        assert (await store.append([event("marker-user", "marker-item-0", key="marker-key-0")]))[0].duplicate
    told = [(line["action"], line["object"], line["outcome"]) for line in map(json.loads, audit.read_text().splitlines())]
    assert told == [(f"events.{act}", "backup.db", outcome) for act in ("backup", "restore") for outcome in ("begun", "done")]


async def test_a_restored_store_has_no_byte_of_an_erased_user_in_the_free_space_of_pages_that_were_split(path, tmp_path):
    url, backup, draw = f"sqlite:///{path}", tmp_path / "backup.db", random.Random(0)
    async with closing_store(url) as store:
        for _ in range(8):
            names = ["marker", *(f"user-{draw.getrandbits(32)}" for _ in range(3))] * 125
            keys = [f"{draw.getrandbits(64):016x}-{name}-key{'x' * draw.randrange(220)}" for name in names]
            await store.append([event(f"{name}-user", "i", key=key) for name, key in zip(names, keys, strict=True)])
        assert (await run("backup", backup, "--url", url)).exit_code == 0
        assert await store.erase("default", "marker-user") == 1000
    moved_away(path)
    assert (await run("restore", backup, "--url", url)).exit_code == 0
    assert b"marker-" not in bytes_of(path)


async def test_a_restore_writes_no_copy_of_the_events_elsewhere_than_beside_the_store(backed_up, path, monkeypatch):
    """SQLite's own place for temporary files may have no room."""
    (url, backup), opened = backed_up, set()

    def look():
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                opened.add(descriptor.readlink())

    def watched(file):
        connection = connect_writer(file)
        connection.execute("PRAGMA cache_size = 1")  # page, beyond which SQLite writes to its files
        connection.set_progress_handler(look, 10)
        return connection

    monkeypatch.setattr("integrations.sqlite.backup.connect_writer", watched)
    assert (await run("restore", backup, "--url", url)).exit_code == 0
    assert path in opened
    assert [file for file in opened if file.name.startswith("etilqs_") and file.parent != path.parent] == []


async def test_a_restored_store_is_a_file_for_its_user_alone_with_its_settings_and_no_draft_beside_it(backed_up, path):
    url, backup = backed_up
    assert (await run("restore", backup, "--url", url)).exit_code == 0
    assert sorted(file.name for file in path.parent.iterdir()) == [f"events.db{end}" for end in ("", ".erased", ".key", ".lock")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with closing(sqlite3.connect(path)) as restored, closing(sqlite3.connect(backup)) as other:
        for setting in ("page_size", "auto_vacuum", "user_version", "application_id"):
            assert restored.execute(f"PRAGMA {setting}").fetchone() == other.execute(f"PRAGMA {setting}").fetchone()
        assert restored.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_a_store_whose_name_is_no_text_is_written_anew(path):
    named = path.with_name(os.fsdecode(b"events-\xfc.db"))
    async with closing_store(f"sqlite:///{named}") as store:
        await store.append([event("u", "i")])
    before = named.stat().st_ino
    rebuild(named)
    assert named.stat().st_ino != before
    async with closing_store(f"sqlite:///{named}") as store:
        assert await items(store, "u") == ["i"]


async def test_a_process_that_has_opened_the_restored_store_already_goes_on_with_its_file(path):
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([event("u", "i")])
        await asyncio.to_thread(rebuild, path)
        await store.append([event("u", "j")])
        assert await items(store, "u") == ["i", "j"]
    assert drafts_of(path) == []


async def test_a_store_that_was_copied_back_by_other_means_forgets_as_it_is_opened(path, tmp_path):
    """As from a snapshot of a volume: no command of ours was run."""
    url, backup = f"sqlite:///{path}", tmp_path / "backup.db"
    async with closing_store(url) as store:
        await store.append([event("marker-user", "marker-item"), event("other", "i")])
        await run("backup", backup, "--url", url)
        await store.erase("default", "marker-user")
    moved_away(path)
    path.write_bytes(backup.read_bytes())
    async with closing_store(url) as store:
        assert (await items(store, "marker-user"), await items(store, "other")) == ([], ["i"])
        assert b"marker-" not in bytes_of(path)


async def test_a_store_by_the_name_of_a_link_has_the_lock_the_key_and_the_ledger_that_it_has_by_its_own(path, tmp_path):
    url, link, backup = f"sqlite:///{path}", tmp_path / "linked" / "events.db", tmp_path / "backup.db"
    link.parent.mkdir()
    link.symlink_to(path)
    async with closing_store(f"sqlite:///{link}") as store, closing_store(url) as other:
        await store.append([event("ada", "i"), event("bob", "i")])
        await run("backup", backup, "--url", url)
        assert [await store.erase("default", "ada"), await other.erase("default", "bob")] == [1, 1]
    assert list(link.parent.iterdir()) == [link]
    moved_away(path)
    await run("restore", backup, "--url", f"sqlite:///{link}")
    async with closing_store(url) as store:
        assert await store.statistics() == StoreStatistics(0, 0)


async def test_users_that_come_back_after_the_ledger_had_them_erased_stay_when_the_store_is_opened_again(path):
    """The disk was full as their erasures were committed: the ledger has them, all with the number that was the next."""
    url, names = f"sqlite:///{path}", [f"{number}" for number in range(8)]
    async with closing_store(url) as store:
        await store.append([event(name, "before") for name in [*names, "other"]])
    digests = Digests(path.with_name("events.db.key").read_bytes().strip())
    for name in names:
        Ledger(path.with_name("events.db.erased"), digests).note({digests.user("default", name): 1})
    async with closing_store(url) as store:
        assert [await items(store, name) for name in [*names, "other"]] == [[]] * 8 + [["before"]]
        await store.append([event(name, "after") for name in names])
    async with closing_store(url) as store:
        assert [await items(store, name) for name in names] == [["after"]] * 8


async def test_a_backup_is_one_file_for_its_user_alone_and_sha256sum_knows_it(path, tmp_path):
    url, backup = f"sqlite:///{path}", tmp_path / "backup.db"
    async with closing_store(url) as store:
        await store.append([event("u", "i")])
        await run("backup", backup, "--url", url)
    assert {file.name for file in tmp_path.iterdir()} == {"backup.db", "backup.db.sha256", "store"}
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    checked = await asyncio.create_subprocess_exec("sha256sum", "--check", "--status", "backup.db.sha256", cwd=tmp_path)
    assert await checked.wait() == 0
    with pytest.raises(ConfigError, match=r"backup\.db is there already; name a file that is not there yet"):
        await run("backup", backup, "--url", url)


async def test_of_a_backup_that_fails_nothing_is_left(path, tmp_path):
    async with closing_store(url := f"sqlite:///{path}") as store:
        await store.append([event(f"user-{number}", "i") for number in range(1000)])
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"x" * 4096 + whole[12288:])
    with pytest.raises((BackendUnavailable, DataError), match="damaged"):
        await run("backup", tmp_path / "backup.db", "--url", url)
    with pytest.raises(ConfigError, match=r"backup\.db cannot be written: No such file or directory"):
        await run("backup", tmp_path / "missing" / "backup.db", "--url", url)
    path.write_bytes(whole)
    full = r"backup\.db cannot be written: .*; make room, or name a file on another disk"
    with largest_file(40_000), pytest.raises(ConfigError, match=full):
        await run("backup", tmp_path / "backup.db", "--url", url)
    assert {file.name for file in tmp_path.iterdir()} == {"store"}


@pytest.mark.parametrize(("problem", "raised"), [(OSError(errno.ENOSPC, "full"), ConfigError), (KeyboardInterrupt(), KeyboardInterrupt)])
async def test_of_a_backup_whose_checksum_cannot_be_written_nothing_is_left(problem, raised, path, tmp_path, monkeypatch):
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([event("u", "i")])

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".sha256":
            raise problem
        fsync(descriptor)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(raised):
        back_up(path, tmp_path / "backup.db")
    assert {file.name for file in tmp_path.iterdir()} == {"store"}


async def test_a_backup_may_have_a_name_that_is_no_text(path, tmp_path):
    async with closing_store(url := f"sqlite:///{path}") as store:
        await store.append([event("u", "i")])
    back_up(path, backup := tmp_path / os.fsdecode(b"backup-\xfc.db"))
    checked = await asyncio.create_subprocess_exec("sha256sum", "--check", "--status", f"{backup.name}.sha256", cwd=tmp_path)
    assert await checked.wait() == 0
    moved_away(path)
    assert "restored 1 events of 1 users" in (await run("restore", backup, "--url", url)).output


async def test_a_backup_and_its_checksum_outlive_a_failure_of_the_power_once_it_is_made(path, tmp_path):
    if problem := obstacle():
        pytest.skip(problem)
    async with closing_store(f"sqlite:///{path}") as store:
        await store.append([event(f"user-{number}", "i") for number in range(100)])
    (backups := tmp_path / "backups").mkdir()
    program = "import sys; from pathlib import Path; from integrations.sqlite.backup import back_up; back_up(*map(Path, sys.argv[1:]))"
    operations, draw = recorded([sys.executable, "-c", program, str(path), str(backups / "backup.db")], backups), random.Random(0)
    for number in range(20):
        disk, there = Disk(), tmp_path / str(number)
        for operation in operations:
            disk.apply(operation)
        there.mkdir()
        disk.crash(there, draw)
        assert {file.name: file.read_bytes() for file in there.iterdir()} == {file.name: file.read_bytes() for file in backups.iterdir()}


@pytest.fixture
async def backed_up(path, tmp_path):
    """The URL of a store that is away, and its backup."""
    url, backup = f"sqlite:///{path}", tmp_path / "backup.db"
    async with closing_store(url) as store:
        await store.append([event("u", "i")])
        await run("backup", backup, "--url", url)
    moved_away(path)
    return url, backup


async def test_a_backup_that_statistics_were_read_of_is_as_it_was_and_is_restored(backed_up, path):
    url, backup = backed_up
    as_it_was = {file.name: file.is_file() and file.read_bytes() for file in backup.parent.iterdir()}
    Ledger(path.with_name("events.db.erased"), Digests(path.with_name("events.db.key").read_bytes().strip())).note({ADA: 7})
    for ledger in ("", f"?ledger={path}.erased"):
        assert "1 events of 1 users" in (await run("stats", "--url", f"sqlite:///{backup}{ledger}")).output
    assert {file.name: file.is_file() and file.read_bytes() for file in backup.parent.iterdir()} == as_it_was
    assert "restored 1 events of 1 users" in (await run("restore", backup, "--url", url)).output


async def test_a_backup_that_is_damaged_is_not_restored(backed_up, path):
    url, backup = backed_up
    backup.write_bytes(backup.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"is not the file that .*backup\.db\.sha256 was made of"):
        await run("restore", backup, "--url", url)
    backup.with_name("backup.db.sha256").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"is not the file that .*backup\.db\.sha256 was made of"):
        await run("restore", backup, "--url", url)
    backup.with_name("backup.db.sha256").unlink()
    with pytest.raises(ConfigError, match=r"backup\.db\.sha256 is not there"):
        await run("restore", backup, "--url", url)
    assert not list(path.parent.glob("*events.db*-*")), "no draft is left"
    assert not path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from integrations.sqlite import backup

def killed(*_): os.kill(os.getpid(), signal.SIGKILL)

setattr(backup, sys.argv[1], killed)
getattr(backup, sys.argv[2])(*map(Path, sys.argv[3:]))
"""


async def is_killed(before, what, *files):
    """A process that does this, and is killed before it comes to that."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, before, what, *files)
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("before", ["_check", "_remove"])
async def test_what_a_restore_that_was_killed_left_is_gone_after_the_next(before, backed_up, path):
    """A copy of users' events, of which those that are erased from now on would stay."""
    url, backup = backed_up
    await is_killed(before, "bring_back", backup, path)
    assert [file.stat().st_size for file in drafts_of(path)] > [0]
    others = [path.with_name(name) for name in (".events.db-notes", f".events.db-x-{'0' * 16}", f".events.db-{'0' * 16}.txt")]
    for other in others:
        other.touch()
    with suppress(ConfigError):  # it was killed when the store was there, and had only its draft to remove
        await run("restore", backup, "--url", url)
    assert sorted(drafts_of(path)) == sorted(others), "what is none of its drafts stays"
    async with closing_store(url) as store:
        assert await items(store, "u") == ["i"]


async def test_what_a_restore_that_was_killed_as_it_wrote_the_store_anew_left_is_gone_once_the_store_is_opened(backed_up, path):
    url, backup = backed_up
    assert (await run("restore", backup, "--url", url)).exit_code == 0
    await is_killed("flush", "rebuild", path)
    assert [file.stat().st_size > 0 for file in drafts_of(path)] == [True]
    async with closing_store(url) as store:
        assert drafts_of(path) == []
        assert await items(store, "u") == ["i"]


async def test_a_restore_that_is_given_up_as_it_writes_the_store_anew_takes_the_store_away(backed_up, path, monkeypatch):
    url, backup = backed_up
    given_up, under_way = threading.Event(), threading.Event()

    def slow(store):
        with turn_of(store).held():
            under_way.set()
            given_up.wait()

    monkeypatch.setattr("integrations.sqlite.backup.rebuild", slow)
    restore = asyncio.create_task(SQLiteDriver().restore(url, backup))
    await until(under_way.is_set)
    restore.cancel()
    await settled()
    given_up.set()
    with pytest.raises(asyncio.CancelledError):
        await restore
    assert not path.exists()


async def test_a_restore_disturbs_no_other_that_is_under_way(backed_up, path, monkeypatch):
    url, backup = backed_up
    monkeypatch.setattr("integrations.sqlite.backup.turn_of", lambda store: replace(turn_of(store), timeout_s=0.0))
    with turn_of(path).held(), pytest.raises(BackendUnavailable, match=r"another process has held .*events\.db\.lock"):
        await run("restore", backup, "--url", url)


def drafts_of(path):
    return list(path.parent.glob(".events.db-*"))


async def test_what_a_backup_that_was_killed_left_is_told_by_its_lack_of_a_checksum(path, tmp_path):
    url, backup = f"sqlite:///{path}", tmp_path / "backup.db"
    async with closing_store(url) as store:
        await store.append([event("u", "i")])
    await is_killed("_sealed", "back_up", path, backup)
    with pytest.raises(ConfigError, match=r"has no backup\.db\.sha256, as what a backup that was killed has left: remove it"):
        await run("backup", backup, "--url", url)
    moved_away(path)
    with pytest.raises(ConfigError, match=r"backup\.db\.sha256 is not there"):
        await run("restore", backup, "--url", url)


async def test_a_directory_in_place_of_a_backup_is_told_and_not_to_be_removed(backed_up, path):
    url, _ = backed_up
    async with closing_store(url):
        for directory in (path.parent, "/", "."):
            with pytest.raises(ConfigError, match=r"is a directory; name a file in it that is not there yet$"):
                await run("backup", directory, "--url", url)


async def test_a_store_is_not_restored_without_its_ledger(backed_up, path):
    url, backup = backed_up
    ledger = path.with_name("events.db.erased")
    ledger.unlink()
    with pytest.raises(ConfigError, match=r"events\.db\.erased is not there; give it back from its own copy, or, where no user was erased"):
        await run("restore", backup, "--url", url)
    assert not path.exists()
    ledger.touch()
    assert "restored 1 events of 1 users" in (await run("restore", backup, "--url", url)).output


async def test_a_store_is_not_restored_with_a_directory_that_holds_no_ledger(backed_up, path, tmp_path):
    """As where its disk is not mounted, or the machines' files were brought together under other names."""
    url, backup = backed_up
    (ledger := tmp_path / "ledger").mkdir()
    path.with_name("events.db.erased").rename(ledger / "one")
    with pytest.raises(ConfigError, match=r"ledger has no file named \*\.erased; give it back .*: touch .*/ledger/none\.erased"):
        await run("restore", backup, "--url", f"{url}?ledger={ledger}")
    assert not path.exists()
    (ledger / "one").rename(ledger / "one.erased")
    assert "restored 1 events of 1 users" in (await run("restore", backup, "--url", f"{url}?ledger={ledger}")).output


async def test_a_restore_that_cannot_erase_what_was_erased_since_leaves_no_store_and_may_be_tried_again(backed_up, path):
    url, backup = backed_up
    key = path.with_name("events.db.key")
    right = key.read_text()
    key.write_text("f" * len(right))
    with pytest.raises(BackendUnavailable, match="key"):
        await run("restore", backup, "--url", url)
    assert not list(path.parent.glob("events.db")) + list(path.parent.glob("events.db-*"))
    key.write_text(right)
    assert "restored 1 events of 1 users" in (await run("restore", backup, "--url", url)).output


@pytest.mark.parametrize("end", ["", "-wal"])
async def test_a_store_that_is_there_is_not_overwritten(backed_up, path, end):
    url, backup = backed_up
    path.with_name(path.name + end).write_bytes(b"precious")
    with pytest.raises(ConfigError, match="is there already; stop the service"):
        await run("restore", backup, "--url", url)
    assert path.with_name(path.name + end).read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("backup", "b", "--url", "postgresql://u@h/genrec"), "pg_dump --format custom --schema genrec --file b"),
        (("restore", "b", "--url", "postgresql://u@h/genrec?ledger=/l"), "pg_restore --dbname DATABASE b"),
        (("restore", "--url", "postgresql://u@h/genrec"), "this store has no ledger of erasures"),
        (("restore", "--url", "sqlite:///events.db"), "name the backup"),
        (("backup", "b", "--url", "sqlite:////nowhere/events.db"), "is not there; give the URL that the service has"),
    ],
)
async def test_what_another_tool_does_or_what_is_missing_is_told(arguments, cure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, BackendUnavailable), match=cure):
        await run(*arguments)


async def test_postgresqls_own_tools_make_the_backup_and_the_command_finishes_the_restore(tmp_path):
    with running_postgres() as server:
        url, dump, ledger = server.create("events"), server.directory / "dump", tmp_path / "erased"
        noting = f"{url}&ledger={ledger}"
        async with closing_store(noting) as store:
            await store.append([event("marker-user", "marker-item", key="marker-key"), event("other", "i")])
            server.run("pg_dump", "--format", "custom", "--schema", "genrec", "--file", str(dump), "--dbname", url)
            await store.append([event("late", "late")])
            await store.erase("default", "marker-user")
            version = await store.version("default", "other")
        server.drop("events")
        server.create("events")
        server.run("pg_restore", "--dbname", url, str(dump))
        assert "restored 1 events of 1 users" in (await run("restore", "--url", noting)).output
        async with closing_store(noting) as store:
            assert (await items(store, "marker-user"), await items(store, "other"), await items(store, "late")) == ([], ["i"], [])
            assert await store.version("default", "other") != version
        assert "1 events of 1 users" in (await run("stats", "--url", noting)).output
        server.run("pg_dump", "--file", str(again := server.directory / "again"), "--dbname", url)
        assert b"marker-" not in again.read_bytes()


# The ledger


@pytest.mark.parametrize(
    ("url", "plain", "file"),
    [
        ("sqlite:///events.db", "sqlite:///events.db", None),
        ("sqlite:///events.db?ledger=/a/b%20c", "sqlite:///events.db", "/a/b c"),
        ("postgresql://u@/d?host=/x&ledger=/l", "postgresql://u@/d?host=/x", "/l"),
        ("postgresql://u@h/d?ledger=/l&sslmode=require", "postgresql://u@h/d?sslmode=require", "/l"),
    ],
)
def test_the_ledger_is_named_in_the_stores_url(url, plain, file):
    assert split_ledger(url) == (plain, file and Path(file))


def test_a_store_of_the_configuration_keeps_the_ledger_of_its_url(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = parse({"events": {"url": "sqlite:///events.db?ledger=/var/lib/genrec/erased"}})
    assert settings.event_store_url == f"sqlite:///{tmp_path}/events.db?ledger=/var/lib/genrec/erased"


def test_a_ledger_at_a_relative_path_is_refused():
    with pytest.raises(ConfigError, match="no absolute path"):
        split_ledger("sqlite:///events.db?ledger=erased")


def test_a_ledger_gives_the_latest_erasure_of_each_user_in_whatever_order_lines_stand(tmp_path):
    ledgers = [Ledger(tmp_path / name, DIGESTS) for name in ("one", "two")]
    ledgers[0].note({ADA: 7})
    ledgers[1].note({ADA: 3, BOB: 5})
    (tmp_path / "both").write_bytes(b"".join((tmp_path / name).read_bytes() for name in ("one", "two", "one")))
    assert Ledger(tmp_path / "both", DIGESTS).read() == {ADA: 7, BOB: 5}
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600


def test_in_a_directory_each_machine_has_a_file_and_reads_those_of_all(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, DIGESTS)
    monkeypatch.setattr("cluster.events.ledger.gethostname", lambda: "one")
    assert ledger.read() == {}
    for machine, user in (("one", ADA), ("two", BOB)):
        monkeypatch.setattr("cluster.events.ledger.gethostname", lambda machine=machine: machine)
        ledger.note({user: 7})
    assert {file.name for file in tmp_path.iterdir()} == {"one.erased", "two.erased"}
    assert ledger.read() == {ADA: 7, BOB: 7}


@pytest.mark.parametrize("left", ["a mount point without a disk", "a directory less"])
async def test_while_a_ledgers_directory_is_away_no_user_is_erased_and_nothing_is_made_in_its_place(path, tmp_path, left):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    async with closing_store(f"sqlite:///{path}?ledger={ledger}") as store:
        await store.append([event("ada", "i")])
        ledger.rename(tmp_path / "disk")
        if left == "a mount point without a disk":
            ledger.mkdir()
        with pytest.raises(
            BackendUnavailable, match=r"cannot be used \(the directory has no file named \*\.erased any more\).*mount its disk"
        ):
            await store.erase("default", "ada")
        assert await items(store, "ada") == ["i"]
        assert not [file for file in tmp_path.rglob("ledger*") if file.is_file()]
        shutil.rmtree(ledger, ignore_errors=True)
        (tmp_path / "disk").rename(ledger)
        assert await store.erase("default", "ada") == 1
    assert len(next(ledger.glob("*.erased")).read_bytes().splitlines()) == 1


@pytest.mark.parametrize("there", ["nothing", "a file"])
async def test_where_the_url_says_that_the_ledger_is_a_directory_no_store_is_opened_without_one(path, tmp_path, there):
    ledger = tmp_path / "ledger"
    if there == "a file":
        ledger.touch()
    with pytest.raises(BackendUnavailable, match=f"the ledger of erasures {ledger} is no directory; mount its disk, or make it: mkdir"):
        await open_event_store(f"sqlite:///{path}?ledger={ledger}/")
    assert (path.exists(), ledger.exists()) == (False, there == "a file")
    ledger.unlink(missing_ok=True)
    ledger.mkdir()
    async with closing_store(f"sqlite:///{path}?ledger={ledger}/") as store:
        await store.erase("default", "ada")
    assert len(next(ledger.glob("*.erased")).read_bytes().splitlines()) == 1


def test_a_machine_that_only_reads_makes_no_file_in_a_directory_that_has_one(tmp_path, monkeypatch):
    """Each pod that starts has another name."""
    for pod in ("one", "two", "three"):
        monkeypatch.setattr("cluster.events.ledger.gethostname", lambda pod=pod: pod)
        assert Ledger(tmp_path, DIGESTS).read() == {}
    assert [file.name for file in tmp_path.iterdir()] == ["one.erased"]
    require(tmp_path)
    Ledger(tmp_path, DIGESTS).note({ADA: 7})
    assert {file.name for file in tmp_path.iterdir()} == {"one.erased", "three.erased"}
    assert Ledger(tmp_path, DIGESTS).read() == {ADA: 7}
    monkeypatch.setattr("cluster.events.ledger.gethostname", lambda: "four")
    monkeypatch.setattr(os, "access", lambda *_: False)  # what root may do says nothing of permissions
    with pytest.raises(BackendUnavailable, match="cannot be used"):
        Ledger(tmp_path, DIGESTS).read()


@pytest.mark.parametrize("left", range(100))
def test_a_line_of_which_the_system_kept_a_part_spoils_no_other(left, tmp_path):
    ledger = Ledger(tmp_path / "erased", DIGESTS)
    ledger.note({ADA: 12})
    whole = ledger.place.read_bytes()
    ledger.place.write_bytes(whole + whole[: min(left, len(whole) - 1)])
    ledger.note({BOB: 13})
    assert ledger.read() == {ADA: 12, BOB: 13}


def test_a_ledger_whose_lines_came_to_end_as_on_windows_is_read(tmp_path):
    ledger = Ledger(tmp_path / "erased", DIGESTS)
    ledger.note({ADA: 7})
    ledger.place.write_bytes(ledger.place.read_bytes().replace(b"\n", b"\r\n"))
    ledger.note({BOB: 8})
    assert ledger.read() == {ADA: 7, BOB: 8}


def test_a_ledger_that_lost_its_last_line_break_is_read_to_its_end(tmp_path):
    """As an editor, or `printf %s "$(cat erased)"`, leaves it."""
    ledger = Ledger(tmp_path / "erased", DIGESTS)
    ledger.note({ADA: 7})
    ledger.note({BOB: 8})
    ledger.place.write_bytes(ledger.place.read_bytes()[:-1])
    assert ledger.read() == {ADA: 7, BOB: 8}
    ledger.note({ADA: 9})
    assert ledger.read() == {ADA: 9, BOB: 8}


def six_erasures(place):
    """A ledger of six erasures, and its lines."""
    ledger = Ledger(place, DIGESTS)
    for number in range(6):
        ledger.note({sha256(bytes([number])).digest(): 1000 + number})
    return ledger, ledger.place.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("rewritten", [
    lambda lines: [*lines[:2], lines[2].rstrip(), *lines[3:]],
    lambda lines: [line.rstrip() for line in lines],
    lambda lines: [line.rstrip() + b" \t \r\n" for line in lines],
    lambda lines: [line.rstrip() + b"\r" for line in lines],
    lambda lines: [b"\xef\xbb\xbf", *lines],
    lambda lines: [lines[0], *(lines[1][:left] + line for left, line in zip((5, 17, 60, 90, 101), lines[1:], strict=True))],
    lambda lines: [lines[0], lines[1][:80], bytes(600), lines[1][20:], *lines[1:]],
], ids=["joined", "without breaks", "blanks", "old breaks", "mark", "cut off before", "hole"])  # fmt: skip
def test_a_ledger_that_was_joined_or_edited_is_read_whole(rewritten, tmp_path):
    ledger, lines = six_erasures(tmp_path / "erased")
    erasures = ledger.read()
    assert len(erasures) == 6
    ledger.place.write_bytes(b"".join(rewritten(lines)))
    assert ledger.read() == erasures


@pytest.mark.parametrize("rewritten", [
    lambda lines: [*lines[:3], b"".join(lines[3:]).decode().encode("utf-16")],
    lambda lines: [b"".join(lines[:1]).decode().encode("utf-16-le"), *lines[1:]],
    lambda lines: [*lines[:3], lines[3].upper(), *lines[4:]],
    lambda lines: [*lines[:3], lines[3].replace(b" ", b"  "), *lines[4:]],
    lambda lines: [*lines[:5], lines[5].rstrip() + lines[5][:10]],
    lambda lines: [part for line in lines for part in (line[:80], b"\n", line[80:])],
], ids=["UTF-16 behind", "UTF-16 before", "capitals", "wide", "ends in a part", "wrapped"])  # fmt: skip
def test_a_ledger_of_which_a_line_cannot_be_read_is_refused_and_not_read_in_part(rewritten, tmp_path):
    ledger, lines = six_erasures(tmp_path / "erased")
    ledger.place.write_bytes(b"".join(rewritten(lines)))
    with pytest.raises(BackendUnavailable, match=r"holds (a|no) line that can(not)? be read.*; give it back as it was written"):
        ledger.read()


@pytest.mark.parametrize(("encoding", "mark"), [("utf-16", b""), ("utf-16-le", b""), ("utf-16-be", b"\xfe\xff")])
@pytest.mark.parametrize("users", [[ADA], [ADA, BOB]])
def test_a_ledger_of_which_no_line_can_be_read_is_refused_with_the_cure(encoding, mark, users, tmp_path):
    """As PowerShell's `>` writes it."""
    Ledger(tmp_path / "other.erased", DIGESTS).note({BOB: 1})
    ledger = Ledger(tmp_path / "one.erased", DIGESTS)
    for user in users:
        ledger.note({user: 7})
    ledger.place.write_bytes(mark + ledger.place.read_text().encode(encoding))
    for place in (ledger.place, tmp_path):
        with pytest.raises(
            BackendUnavailable, match=r"one\.erased holds a line that cannot be read \(line 1\); give it back as it was written"
        ):
            Ledger(place, DIGESTS).read()


def test_without_a_file_there_is_nothing_to_catch_up_with():
    ledger = Ledger(None, DIGESTS)
    ledger.note({ADA: 1})
    assert ledger.read() == {}


def test_missing_are_the_erasures_that_are_not_held_or_only_an_earlier_one():
    assert missing({ADA: 7, BOB: 5}, {ADA: 7}) == {BOB: 5}
    assert missing({ADA: 7, BOB: 5}, {ADA: 6, BOB: 9}) == {ADA: 7}


async def test_statistics_of_a_restored_store_are_those_of_what_is_left(backed_up):
    url, backup = backed_up
    await run("restore", backup, "--url", url)
    async with closing_store(url) as store:
        assert await store.statistics() == StoreStatistics(1, 1)
