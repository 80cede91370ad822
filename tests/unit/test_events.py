import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.errors import BackendUnavailable, ConfigError, UnknownChoice
from cluster.events.digests import ENVIRONMENT, Digests, given_key, kept_key
from cluster.events.migrations import Migration, pending, read_migrations
from cluster.events.rules import each_batch, repeats, version_of
from cluster.events.store import Event, Loaded, Stored, open_event_store
from cluster.values import Behaviour


async def test_an_unknown_kind_of_store_lists_those_there_are():
    with pytest.raises(UnknownChoice, match="unknown event store 'mysql'; choose from postgresql, sqlite"):
        await open_event_store("mysql://host/db")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("events.db", "'events.db' is not a URL; write sqlite:///events.db or postgresql://user@host/database"),
        ("sqlite://events.db", "names no file; write sqlite:///events.db"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///events.db?ledgr=/erased", "'ledgr=/erased' is no option of SQLite's; the only one is"),
    ],
)
async def test_a_url_that_names_no_store_is_told_how_to_write_one(url, problem):
    with pytest.raises(ConfigError, match=problem):
        await open_event_store(url)


async def test_without_asyncpg_postgresql_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "integrations.postgresql.driver.find_spec", lambda name: None if name == "asyncpg" else importlib.util.find_spec(name)
    )
    with pytest.raises(BackendUnavailable, match="asyncpg is not installed; install genrec with its extra postgresql"):
        await open_event_store("postgresql://host/db")


def test_a_version_names_its_store_and_tells_an_erased_user_from_one_that_never_was():
    assert version_of("a1", None, None) == ""
    assert len({version_of("a1", 5, None), version_of("b2", 5, None), version_of("a1", None, 5), version_of("a1", 6, 5)}) == 4
    assert version_of("a1", 5, 9) == version_of("a1", 5, None)


def test_a_digest_needs_the_key_and_tells_tenants_users_and_events_apart():
    one, other = Digests(b"1" * 32), Digests(b"2" * 32)
    made = [one.user("a", "bc"), one.user("ab", "c"), one.event("a", "bc"), one.event("ab", "c"), other.user("a", "bc"), one.check]
    assert len(set(made)) == len(made)
    assert b"1" * 32 not in repr(one).encode()


def test_a_key_is_made_once_for_its_owner_alone_and_is_found_again(tmp_path):
    file = tmp_path / "events.db.key"
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: kept_key(file, make=True), range(32)))
    assert made == {file.read_text().strip().encode()}
    assert (file.stat().st_mode & 0o777, [one.name for one in tmp_path.iterdir()]) == (0o600, ["events.db.key"])
    assert len(file.read_text().strip()) == 64


def test_a_key_that_cannot_be_had_or_can_be_guessed_is_told_with_the_cure(tmp_path, monkeypatch):
    with pytest.raises(BackendUnavailable, match=r"e\.db\.key, cannot be had \(No such file.*restore it from its backup"):
        kept_key(tmp_path / "e.db.key", make=False)
    with pytest.raises(BackendUnavailable, match="give the key in GENREC_ERASURE_KEY"):
        kept_key(tmp_path / "none" / "e.db.key", make=True)
    for kept, length in (("", 0), ("\n", 0), ("secret\n", 6)):
        (tmp_path / "e.db.key").write_text(kept)
        with pytest.raises(BackendUnavailable, match=rf"key, has {length} characters, where 32 are the least; restore it from its backup"):
            kept_key(tmp_path / "e.db.key", make=True)
    monkeypatch.setenv(ENVIRONMENT, "secret")
    with pytest.raises(ConfigError, match="GENREC_ERASURE_KEY has 6 characters; give 32 at least"):
        given_key()


@pytest.mark.parametrize("key", [b"\xfc" * 32, "\u00fc".encode() * 32])
def test_a_key_in_the_environment_is_the_bytes_that_stand_there(key, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, os.fsdecode(key))
    assert given_key() == key


def test_repeats_are_told_apart_by_tenant_and_point_to_the_first():
    one, other = Event("u", Behaviour("i", 1), "a", "k"), Event("u", Behaviour("j", 1), "b", "k")
    assert repeats([one, other, one, Event("u", Behaviour("i", 1), "a"), one]) == {2: 0, 4: 0}


def test_a_load_counts_batch_by_batch():
    assert Loaded(1, 1).plus([Stored(4), Stored(2, duplicate=True), Stored(5)]) == Loaded(3, 2)


async def test_batches_may_come_from_either_kind_of_iterator():
    async def slowly():
        yield [1]
        yield [2, 3]

    assert [batch async for batch in each_batch(slowly())] == [batch async for batch in each_batch([[1], [2, 3]])] == [[1], [2, 3]]


def test_a_migration_falls_into_statements_and_keeps_semicolons_within_lines():
    migration = Migration(1, "m", "-- first; really\nCREATE TABLE a (b TEXT);\n\nINSERT INTO a VALUES (';x');\nSELECT 1;")
    assert migration.statements == ["-- first; really\nCREATE TABLE a (b TEXT)", "INSERT INTO a VALUES (';x')", "SELECT 1"]


def test_both_databases_have_the_same_steps_in_order():
    sqlite, postgresql = ([step.name for step in read_migrations(f"integrations.{name}.migrations")] for name in ("sqlite", "postgresql"))
    assert postgresql == ["0001_events", "0002_keyed_digests", "0003_names_apart"]
    assert sqlite == [
        *postgresql,
        "0004_noted",  # there an erasure's number is its row's key, so that the ledger's stands beside it
        "0005_leaving",  # and one transaction holds up all others, so that an erasure of many events takes several
    ]


def test_only_the_steps_that_are_missing_are_pending_and_a_newer_schema_is_refused():
    steps = [Migration(number, str(number), "") for number in (1, 2, 3)]
    assert [step.number for step in pending(steps, 1, "here")] == [2, 3]
    assert list(pending(steps, 3, "here")) == []
    with pytest.raises(BackendUnavailable, match="here has schema version 4, and this genrec knows versions up to 3; update genrec"):
        pending(steps, 4, "here")


def test_a_gap_between_migrations_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "gapped_migrations"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("0001_a.sql", "0003_b.sql"):
        (package / name).write_text("SELECT 1;\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"numbered \[1, 3\], not 1, 2"):
        read_migrations("gapped_migrations")
