"""What is left of erased users in the files of a real PostgreSQL: nothing but what its own maintenance is told to write over."""

import random
from hashlib import sha256

import asyncpg
import pytest

from cluster.events.digests import ENVIRONMENT, Digests
from cluster.events.migrations import read_migrations
from cluster.events.rules import version_of
from cluster.events.store import Event, Stored, closing_store
from cluster.values import Action, Behaviour
from integrations.postgresql.store import MIGRATIONS
from tests.postgres import running_postgres

KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def server():
    """Which removes the log that it needs no more, in place of writing over it later."""
    with running_postgres() as server:
        with (server.data / "postgresql.conf").open("a") as settings:
            settings.write("wal_recycle = off\nautovacuum = off\n")
        server.stop()
        server.start()
        yield server


@pytest.fixture
async def connection(server):
    url = server.create("names")
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()
    server.drop("names")


async def with_bytes(server, connection, marker):
    """The tables and indexes with the bytes in a file of theirs, and what other files of the server's have them; "pg_wal": its log."""
    await connection.execute("CHECKPOINT")
    found = await connection.fetch("SELECT pg_relation_filepath(oid), relname FROM pg_class WHERE pg_relation_filepath(oid) <> ''")
    names = dict(found)
    files = [str(file.relative_to(server.data)) for file in server.data.rglob("*") if file.is_file() and marker in file.read_bytes()]
    return {"pg_wal" if file.startswith("pg_wal/") else names.get(file, file) for file in files}


async def test_a_table_that_is_written_anew_and_a_log_that_is_removed_have_no_byte_of_an_erased_user(server, connection):
    """Users of all lengths come and go in a random order, so that pages of the tables and indexes are filled, split and emptied."""
    rng, here = random.Random(0), []
    async with closing_store(server.url("names")) as store:
        for number in range(300):
            user = f"{'gone' if rng.random() < 0.8 else 'kept'}-{number}-{'x' * rng.randrange(200)}"
            keyed = [Event(user, Behaviour("i", n), "shop", f"{user}/{n}") for n in range(rng.randrange(1, 6))]
            await store.append(keyed)
            here += [keyed] * user.startswith("gone")
            for _ in range(rng.choice([0, 0, len(here) // 2])):
                await store.erase("shop", here.pop(rng.randrange(len(here)))[0].user_id)
        await connection.execute("ANALYZE")
        for events in here:
            await store.erase("shop", events[0].user_id)
        await connection.execute("VACUUM ANALYZE")
        assert await with_bytes(server, connection, b"gone-") == {"names", "pg_wal"}

        before = await asyncpg.connect(server.url("names"))
        async with before.transaction(isolation="repeatable_read"):
            await before.fetch("SELECT 1 FROM genrec.store")
            await store.append([Event("gone-last", Behaviour("i", 1), "shop", "key")])
            await store.erase("shop", "gone-last")
            await connection.execute("VACUUM FULL genrec.names")
            assert "names" in await with_bytes(server, connection, b"gone-"), "an older transaction may still read the row"
        await before.close()
        await connection.execute("VACUUM FULL genrec.names")
        assert await with_bytes(server, connection, b"gone-") == {"pg_wal"}
        await connection.execute("SELECT pg_switch_wal()")
        assert await with_bytes(server, connection, b"gone-") == set()

        assert (await store.append(here[0]))[0].duplicate
        assert (await store.load([here[1]])).stored == 0
        assert await with_bytes(server, connection, b"gone-") == set(), "an event that is sent again is not written"
        assert "names" in await with_bytes(server, connection, b"kept-")
        assert all(user.user_id.startswith("kept-") for user in await store.users("shop", 1000))


DIGESTS = Digests(KEY.encode())
ERASED = {1: sha256(b"default\0eve").digest(), 2: DIGESTS.user("default", "eve")}


@pytest.mark.parametrize("schema", ERASED)
async def test_a_store_of_an_earlier_schema_keeps_what_it_holds_and_names_users_in_one_table(server, connection, schema, monkeypatch):
    """In the first one, digests were made without a key: SHA-256 of the names alone."""
    monkeypatch.setenv(ENVIRONMENT, KEY)
    await connection.execute("CREATE SCHEMA genrec")
    await connection.execute("CREATE TABLE genrec.schema_versions (version INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    for step in read_migrations(MIGRATIONS)[:schema]:
        for statement in step.statements:
            await connection.execute(statement)
        await connection.execute("INSERT INTO genrec.schema_versions (version, name) VALUES ($1, $2)", step.number, step.name)
    await connection.execute("UPDATE genrec.store SET identity = 'me'")
    users = [(3, "t", "ключ-ada", 5), (9, "t", "bob-name", 8), (10, "t", "gone-name", 9)]
    insert = "INSERT INTO genrec.users (number, tenant, user_id, latest, events) OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3, $4, 1)"
    await connection.executemany(insert, users)
    held = [(5, 3, "i", "view", None, "ada-key"), (8, 9, "j", "like", 2.5, None), (9, 10, "i", "view", None, "gone-key")]
    await connection.executemany("INSERT INTO genrec.events VALUES ($1, $2, 100, $3, $4, $5, 't', $6)", held)
    await connection.execute("DELETE FROM genrec.users WHERE number = 10")
    await connection.execute("SELECT setval('genrec.arrivals', 70), setval('genrec.users_number_seq', 70)")
    await connection.execute("INSERT INTO genrec.erasures (digest, number) VALUES ($1, 4)", ERASED[schema])
    if schema > 1:
        await connection.execute("UPDATE genrec.store SET key_check = $1", DIGESTS.check)
    assert "users" in await with_bytes(server, connection, b"gone-name")

    async with closing_store(server.url("names")) as store:
        assert [await store.version(*name) for name in (("t", "ключ-ada"), ("t", "bob-name"), ("default", "eve"))] == [
            version_of("me", 5, None),
            version_of("me", 8, None),
            version_of("me", None, 4),
        ]
        assert (await store.history("t", "bob-name", 10)).behaviours == (Behaviour("j", 100, Action.LIKE, 2.5),)
        sent = [Event("ключ-ada", Behaviour("i", 100), "t", "ada-key"), Event("cat-name", Behaviour("i", 100), "t")]
        again, new = await store.append(sent)
        assert again == Stored(5, duplicate=True)
        assert new.sequence > 70
        assert {user.user_id for user in await store.users("t", 10)} == {"ключ-ada", "bob-name", "cat-name"}
        left = [await with_bytes(server, connection, text) for text in (b"gone-name", b"gone-key", b"ada-key", b"bob-name")]
        assert [files - {"pg_wal"} for files in left] == [set(), set(), set(), {"names"}]
        await store.erase("t", "ключ-ada")
        assert (await store.append(sent))[0].duplicate
