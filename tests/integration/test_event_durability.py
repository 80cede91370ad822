"""What a store has acknowledged is there, once and in order, whoever is killed: the process that writes, or the database server."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress

import asyncpg
import pytest

from cluster.errors import BackendUnavailable
from cluster.events.store import Event, closing_store, open_event_store
from cluster.values import Behaviour
from tests.durable_writer import BATCH, batches
from tests.postgres import running_postgres

USERS, ROUNDS = 6, 5


async def held(store):
    """Item ids of each user, in the order of the store."""
    return [[what.item_id for what in (await store.history("default", f"u{user}", 100_000)).behaviours] for user in range(USERS)]


def in_order(names):
    """Whether the batches of a user stand in the order they were sent, each whole."""
    numbers = [tuple(map(int, name.split(".")[1:])) for name in names]
    return numbers == sorted(numbers) and len(numbers) % BATCH == 0


async def replay(store, user, last):
    """Send all batches of a user again, up to the one of this number; how many events were missing."""
    missing = 0
    for number in range(last + 1):
        missing += sum(not one.duplicate for one in await store.append(next(batches(user, number))))
    return missing


@pytest.fixture(scope="module")
def server():
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/events.db"
        return
    server = request.getfixturevalue("server")
    yield server.create("killed")
    server.drop("killed")


def write_and_kill(url, start, lines):
    """The keys that a process had acknowledged when it was killed in the midst of its writing, after so many lines."""
    command = [sys.executable, "-m", "tests.durable_writer", url, str(USERS), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        told += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return [key for line in told if line.endswith("\n") for key in line.split()]


async def written_and_killed(url, start, lines):
    """As `write_and_kill`; the database server has ended what it was doing for that process, too."""
    keys = await asyncio.to_thread(write_and_kill, url, start, lines)
    if url.startswith("postgresql"):
        connection = await asyncpg.connect(url)
        while await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'genrec'"):  # noqa: ASYNC110 - the server does not tell when
            await asyncio.sleep(0.02)
        await connection.close()
    return keys


async def test_every_event_acknowledged_to_a_process_that_was_killed_is_there_once_and_in_order(url):
    acknowledged, starts = [], [1000 * turn for turn in range(ROUNDS)]
    for turn, start in enumerate(starts):
        acknowledged += await written_and_killed(url, start, random.Random(turn).randrange(5, 150))
    async with closing_store(url) as store:
        before = await held(store)
        present = [f"key-{name}" for names in before for name in names]
        assert len(present) == len(set(present)) == (await store.statistics()).events
        assert set(acknowledged) <= set(present)
        assert all(in_order(names) for names in before)
        again = await store.append([Event(f"u{key.split('-')[1][0]}", Behaviour(key[4:], 1), idempotency_key=key) for key in acknowledged])
        assert all(one.duplicate for one in again)
        assert await held(store) == before


async def test_a_replay_after_a_kill_adds_what_was_missing_and_nothing_else(url):
    keys = await written_and_killed(url, 0, 40)
    last = max(int(key.split(".")[1]) for key in keys) + 3
    async with closing_store(url) as store:
        present = [len(names) for names in await held(store)]
        for user in range(USERS):
            assert await replay(store, user, last) == max(0, (last + 1) * BATCH - present[user])
        after = await held(store)
        assert all(in_order(names) for names in after)
        assert [len(names) for names in after] == [max((last + 1) * BATCH, length) for length in present]


async def write_through(store, user, stopping, acknowledged):
    """Append until told to stop, each batch again until it is acknowledged."""
    for batch in batches(user, 0):
        while not await appended(store, batch):  # noqa: ASYNC110 - the server tells nobody when it is back
            await asyncio.sleep(0.02)
        acknowledged[user].extend(event.behaviour.item_id for event in batch)
        if stopping.is_set():
            return


async def progress(acknowledged, writers, more):
    """Until each user has so many more batches. Raises what a writer raised."""
    before = [len(names) for names in acknowledged]
    while any(len(names) < length + more * BATCH for names, length in zip(acknowledged, before, strict=True)):
        await asyncio.sleep(0.01)
        for writer in writers:
            if writer.done():
                writer.result()


async def appended(store, batch):
    with suppress(BackendUnavailable):
        return await store.append(batch)
    return None


async def kill_a_connection(server, url):
    """The server ends all others and recovers where one of its processes was killed."""
    connection = await asyncpg.connect(url)
    pids = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE application_name = 'genrec'")
    os.kill(random.Random(0).choice(pids)["pid"], signal.SIGKILL)
    connection.terminate()


async def stop_at_once(server, url):
    await asyncio.to_thread(server.stop, "immediate")
    await asyncio.to_thread(server.start)


async def restart(server, url):
    await asyncio.to_thread(server.stop, "fast")
    await asyncio.to_thread(server.start)


@pytest.mark.parametrize("disaster", [kill_a_connection, stop_at_once, restart])
async def test_an_open_store_outlives_the_death_of_the_server_and_no_event_is_lost_or_twice(server, disaster):
    url = server.create(disaster.__name__)
    store = await open_event_store(url)
    acknowledged, stopping = [[] for _ in range(USERS)], asyncio.Event()
    writers = [asyncio.create_task(write_through(store, user, stopping, acknowledged)) for user in range(USERS)]
    for _ in range(2):
        await progress(acknowledged, writers, 5)
        await disaster(server, url)
    await progress(acknowledged, writers, 1)
    stopping.set()
    await asyncio.gather(*writers)
    assert await held(store) == acknowledged
    await store.close()


async def test_reads_and_writes_with_keys_do_not_notice_that_the_server_was_restarted_between_them(server):
    store = await open_event_store(server.create("between"))
    event = Event("u", Behaviour("i", 1), idempotency_key="k")
    await asyncio.gather(*(store.append([event]) for _ in range(10)))
    await restart(server, "")
    assert len((await store.history("default", "u", 10)).behaviours) == 1
    await restart(server, "")
    assert (await store.append([event]))[0].duplicate
    await restart(server, "")
    assert await store.erase("default", "u") == 1
    await store.close()


async def test_a_server_that_is_gone_is_told_with_the_cure(server):
    store = await open_event_store(server.create("gone"))
    await asyncio.to_thread(server.stop, "fast")
    try:
        for call in (store.version("default", "u"), store.append([Event("u", Behaviour("i", 1))])):
            with pytest.raises(BackendUnavailable, match=r"event store postgresql:///gone: it cannot be reached; start the server"):
                await call
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            await open_event_store(server.url("gone"))
    finally:
        await asyncio.to_thread(server.start)
    await store.append([Event("u", Behaviour("i", 1))])
    await store.close()


async def test_a_database_that_is_not_there_is_told_with_the_cure(server):
    with pytest.raises(BackendUnavailable, match=r"postgresql:///nowhere: there is no such database; create it: createdb --encoding UTF8"):
        await open_event_store(server.url("nowhere"))


async def test_a_database_of_another_encoding_is_refused(server):
    url = server.create("ascii", "-E", "SQL_ASCII", "-T", "template0")
    with pytest.raises(BackendUnavailable, match="its encoding is SQL_ASCII; create one with: createdb --encoding UTF8"):
        await open_event_store(url)
