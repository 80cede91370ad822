"""What every event store must do, run over all that are registered, for real: SQLite on a file, PostgreSQL on a server of its own."""

import asyncio
import os
import random
import sqlite3
from collections import defaultdict
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import asyncpg
import pytest

from cluster.config import parse
from cluster.errors import BackendUnavailable, ConfigError, InvalidRequest
from cluster.events.digests import ENVIRONMENT, Digests
from cluster.events.guarded import GuardedHistories
from cluster.events.ledger import Ledger
from cluster.events.migrations import Migration, read_migrations
from cluster.events.opened_later import SwitchedOffStore
from cluster.events.rules import LARGEST_BATCH, LARGEST_LIMIT
from cluster.events.store import (
    Event,
    Loaded,
    Stored,
    StoredHistory,
    StoredUser,
    StoreStatistics,
    closing_store,
    driver_of,
    open_event_store,
)
from cluster.registry import EVENT_STORES, choose
from cluster.values import Action, Behaviour
from deployments.stores import open_events
from integrations.postgresql import database
from tests.postgres import running_postgres
from tests.waiting import settled, until

ODD = [
    "ключ-鍵-🔑",
    "it's \"quoted\" `so` \\ and % _ ?",
    "'; DROP TABLE users; --",
    " spaces\tand\nlines ",
    "{}()[]$1:name",
    "\x01\x7f\u200b\ufeff",
    "é", "e\u0301",
    "\U0001f511" * 256,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running_postgres() as server:
        yield server


@pytest.fixture(params=EVENT_STORES)
def url(request, tmp_path, monkeypatch):
    availability = choose("event store", EVENT_STORES, request.param)().get_availability()
    if not availability.ok:
        pytest.skip(availability.reason)
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/events.db"
        return
    for setting in ("lock_timeout", "statement_timeout"):  # a busy machine may keep a call from its turn for long
        monkeypatch.setitem(database.SETTINGS, setting, "600s")
    for limit in ("ACQUIRE_TIMEOUT_S", "STATEMENT_TIMEOUT_S"):
        monkeypatch.setattr(database, limit, 600.0)
    server = request.getfixturevalue("server")
    yield server.create("events")
    server.drop("events")


@pytest.fixture
async def store(url):
    store = await open_event_store(url)
    yield store
    await store.close()


async def rows_of(url, sql):
    """What a statement gives, by another way than the store's."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            return connection.execute(sql.replace("genrec.", "")).fetchall()
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(sql)]
    finally:
        await connection.close()


def event(user="u", item="i", timestamp=100, key=None, tenant="default", action=Action.VIEW, value=None):
    return Event(user, Behaviour(item, timestamp, action, value), tenant, key)


async def items(store, user="u", tenant="default", limit=1000):
    return [behaviour.item_id for behaviour in (await store.history(tenant, user, limit)).behaviours]


async def test_a_history_is_in_the_order_of_time_and_of_arrival_where_times_are_equal(store):
    await store.append([event(item="c", timestamp=3), event(item="a", timestamp=1), event(item="b1", timestamp=2)])
    await store.append([event(item="b2", timestamp=2), event(item="a0", timestamp=0)])
    assert await items(store) == ["a0", "a", "b1", "b2", "c"]


async def test_arrivals_of_one_time_keep_the_order_of_their_batches_and_within_each(store):
    for batch in range(5):
        await store.append([event(item=f"{batch}-{number}") for number in range(20)])
    assert await items(store) == [f"{batch}-{number}" for batch in range(5) for number in range(20)]


async def test_sequences_grow_with_arrival_even_where_times_go_back(store):
    stored = await store.append([event(timestamp=9), event(timestamp=1), event(user="v"), event(timestamp=5)])
    later = await store.append([event(timestamp=0)])
    sequences = [one.sequence for one in (*stored, *later)]
    assert sequences == sorted(set(sequences))
    assert not any(one.duplicate for one in stored)


async def test_a_limit_keeps_the_latest_and_among_equal_times_the_last_to_arrive(store):
    await store.append([event(item="old", timestamp=1), event(item="x", timestamp=5), event(item="y", timestamp=5)])
    assert await items(store, limit=2) == ["x", "y"]
    assert await items(store, limit=1) == ["y"]
    assert await items(store, limit=LARGEST_LIMIT) == ["old", "x", "y"]


@pytest.mark.parametrize(("until", "expected"), [(4, ["b", "c"]), (3, ["a", "b"]), (0, []), (2**70, ["c", "d"]), (None, ["c", "d"])])
async def test_a_time_leaves_out_what_came_after_it_before_the_limit(store, until, expected):
    await store.append([event(item=item, timestamp=at) for item, at in (("a", 2), ("b", 3), ("c", 4), ("d", 5))])
    assert [one.item_id for one in (await store.history("default", "u", 2, until)).behaviours] == expected


async def test_a_history_tells_how_many_events_are_stored_of_the_user_also_where_fewer_are_asked_for(store):
    await store.append([event(timestamp=at, key="k" if at == 3 else None) for at in range(5)])
    await store.append([event(timestamp=3, key="k"), event(user="other")])
    assert [(await store.history("default", "u", limit, until)).total for limit, until in ((2, None), (10, 1), (10, None))] == [5] * 3
    await store.erase("default", "u")
    assert (await store.history("default", "u", 10)).total == 0


@pytest.mark.parametrize("limit", [0, -1, LARGEST_LIMIT + 1])
async def test_a_limit_out_of_range_is_refused(store, limit):
    with pytest.raises(InvalidRequest, match=f"limit: must be from 1 to {LARGEST_LIMIT}, not {limit}"):
        await store.history("default", "u", limit)


async def test_an_unknown_user_has_no_history_and_no_version(store):
    await store.append([event(user="somebody")])
    assert await store.history("default", "u", 10) == StoredHistory((), "")
    assert await store.version("default", "u") == ""


async def test_every_action_and_value_comes_back_as_it_was(store):
    values = [None, 0.0, 4.5, -1e300, 0.1, 5, 2**70]
    behaviours = tuple(Behaviour(f"i{at}", at, action, value) for at, (action, value) in enumerate((a, v) for a in Action for v in values))
    await store.append([Event("u", behaviour) for behaviour in behaviours])
    assert (await store.history("default", "u", 1000)).behaviours == behaviours


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
async def test_odd_texts_come_back_as_they_were(store, text):
    await store.append([event(user=text, item=text, key=text), event(user="u", item="other")])
    assert await items(store, user=text) == [text]
    assert (await store.append([event(user=text, item=text, key=text)]))[0].duplicate
    assert await store.erase("default", text) == 1


async def test_equal_looking_names_are_different_users(store):
    names = ["é", "e\u0301", "E\u0301", "u", "U", "u "]
    await store.append([event(user=name, item=str(number)) for number, name in enumerate(names)])
    assert [await items(store, user=name) for name in names] == [[str(number)] for number in range(len(names))]


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        (event(user=""), "user_id", "1 to 256 characters, not ''"),
        (event(user="u" * 257), "user_id", "1 to 256 characters"),
        (event(user=7), "user_id", "must be a text"),
        (event(user="a\0b"), "user_id", r"the character NUL, which no store keeps: 'a\\x00b'"),
        (event(item="\0"), "behaviour.item_id", "NUL"),
        (event(item=""), "behaviour.item_id", "1 to 256"),
        (event(item="\ud800"), "behaviour.item_id", "half of a surrogate pair"),
        (event(tenant="t" * 65), "tenant", "1 to 64 characters"),
        (event(key=""), "idempotency_key", "1 to 256"),
        (event(key="k\0"), "idempotency_key", "NUL"),
        (event(timestamp=-1), "behaviour.timestamp", "not -1"),
        (event(timestamp=1.5), "behaviour.timestamp", "whole seconds"),
        (event(timestamp=1_700_000_000_000), "behaviour.timestamp", "at most 253402300799"),
        (event(action="gaze"), "behaviour.action", "must be one of view, click, .* not 'gaze'"),
        (event(value=float("nan")), "behaviour.value", "finite number or none, not nan"),
        (event(value=float("inf")), "behaviour.value", "not inf"),
        (event(value="5"), "behaviour.value", "not '5'"),
        (event(value=10**400), "behaviour.value", "finite number or none, not 1000"),
    ],
)
async def test_a_bad_event_is_refused_by_name_and_its_batch_with_it(store, bad, field, problem):
    with pytest.raises(InvalidRequest, match=problem) as refused:
        await store.append([event(), bad])
    assert refused.value.field == f"events[1].{field}"
    assert await store.statistics() == StoreStatistics(0, 0)


async def test_names_that_no_user_can_have_are_refused_when_reading(store):
    for call in (store.version, store.erase, lambda *name: store.history(*name, 1)):
        with pytest.raises(InvalidRequest, match="user_id: holds the character NUL"):
            await call("default", "a\0")
        with pytest.raises(InvalidRequest, match="tenant: must be a text"):
            await call("", "u")


async def test_a_batch_has_a_largest_size(store):
    assert len(await store.append([event()] * LARGEST_BATCH)) == LARGEST_BATCH
    with pytest.raises(InvalidRequest, match=f"events: are {LARGEST_BATCH + 1}, but at most {LARGEST_BATCH}"):
        await store.append([event()] * (LARGEST_BATCH + 1))
    assert (await store.statistics()).events == LARGEST_BATCH


async def test_users_are_named_with_their_counts_those_met_last_first_and_only_the_tenants(store):
    for user in ("ada", "ben", "ada", "eve"):
        await store.append([event(user=user)])
    await store.append([event(user="zoe", tenant="other")])
    await store.erase("default", "eve")
    assert await store.users("default", 5) == [StoredUser("ben", 1), StoredUser("ada", 2)]
    assert await store.users("default", 1) == [StoredUser("ben", 1)]
    assert await store.users("nobody", 5) == []


@pytest.mark.parametrize("loaded", [False, True])
async def test_users_of_one_batch_were_met_in_its_order(store, loaded):
    names = [f"u{number}" for number in range(20)]
    batch = [event(user=name) for name in (*names, "u3")]
    await (store.load([batch]) if loaded else store.append(batch))
    assert [user.user_id for user in await store.users("default", 20)] == names[::-1]


async def test_an_empty_batch_is_stored_as_nothing(store):
    assert await store.append([]) == []
    assert await store.statistics() == StoreStatistics(0, 0)


async def test_a_known_key_with_the_same_content_is_acknowledged_and_not_stored_again(store):
    (first,) = await store.append([event(key="k", value=4.1)])
    version = await store.version("default", "u")
    again = await store.append([event(key="k", value=4.1), event(item="new", key="k2"), event(key="k", value=4.1)])
    assert [one.duplicate for one in again] == [True, False, True]
    assert again[0].sequence == again[2].sequence == first.sequence
    assert await items(store) == ["i", "new"]
    assert await store.version("default", "u") != version


async def test_a_key_that_stands_twice_in_a_batch_is_stored_once(store):
    stored = await store.append([event(key="k"), event(item="between"), event(key="k")])
    assert [one.duplicate for one in stored] == [False, False, True]
    assert stored[2].sequence == stored[0].sequence
    assert await items(store) == ["i", "between"]


OTHERS = {
    "user": event(user="v", key="k"),
    "item": event(item="j", key="k"),
    "time": event(timestamp=101, key="k"),
    "action": event(action=Action.CLICK, key="k"),
    "value": event(value=1.0, key="k"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_a_known_key_with_other_content_is_refused_and_nothing_of_its_batch_is_stored(store, other):
    await store.append([event(key="k")])
    version = await store.version("default", "u")
    with pytest.raises(InvalidRequest, match="'k' is known for another event") as refused:
        await store.append([event(item="before"), event(user="stranger"), other, event(item="after")])
    assert refused.value.field == "events[2].idempotency_key"
    assert await items(store) == ["i"]
    assert await store.version("default", "u") == version
    assert await store.version("default", "stranger") == ""
    assert await store.statistics() == StoreStatistics(1, 1)


async def test_a_key_with_two_contents_in_one_batch_is_refused(store):
    with pytest.raises(InvalidRequest) as refused:
        await store.append([event(key="k"), event(item="j", key="k")])
    assert refused.value.field == "events[1].idempotency_key"
    assert await items(store) == []


async def test_an_event_that_is_dated_on_arrival_is_the_same_when_it_is_sent_again_later(store):
    def arrived(at, item="i"):
        return replace(event(item=item, timestamp=at, key="k"), dated_on_arrival=True)

    (first,) = await store.append([arrived(100)])
    assert await store.append([arrived(200), arrived(300)]) == [Stored(first.sequence, duplicate=True)] * 2
    assert (await store.history("default", "u", 10)).behaviours == (Behaviour("i", 100),)
    with pytest.raises(InvalidRequest, match="known for another event"):
        await store.append([arrived(100, item="j")])


async def test_events_without_keys_are_stored_as_often_as_they_are_sent(store):
    await store.append([event(), event()])
    await store.append([event()])
    assert await items(store) == ["i"] * 3


async def test_tenants_with_equal_user_ids_and_keys_know_nothing_of_each_other(store):
    await store.append([event(item="one", tenant="a", key="k"), event(item="two", tenant="b", key="k")])
    assert await items(store, tenant="a") == ["one"]
    assert await items(store, tenant="b") == ["two"]
    before = await store.version("b", "u")
    assert await store.erase("a", "u") == 1
    assert await items(store, tenant="b") == ["two"]
    assert await store.version("b", "u") == before
    assert await store.statistics() == StoreStatistics(1, 1)


async def test_the_version_changes_with_every_append_of_this_user_and_with_nothing_else(store):
    seen = [await store.version("default", "u")]
    for timestamp in (5, 1, 5):
        await store.append([event(timestamp=timestamp, key=f"k{len(seen)}")])
        seen.append(await store.version("default", "u"))
    assert len(set(seen)) == 4
    await store.append([event(user="v"), event(user="u", tenant="other"), event(timestamp=5, key="k1")])
    assert await store.version("default", "u") == seen[-1]
    assert (await store.history("default", "u", 10)).version == seen[-1]


async def test_erasing_forgets_events_and_says_how_many(store):
    await store.append([event(key="k"), event(item="j"), event(user="v", key="kv")])
    assert await store.erase("default", "u") == 2
    assert await store.erase("default", "u") == 0
    assert (await store.history("default", "u", 10)).behaviours == ()
    assert await items(store, user="v") == ["i"]
    assert not (await store.append([event(item="another", key="k2")]))[0].duplicate
    assert await items(store) == ["another"]
    assert await store.statistics() == StoreStatistics(2, 2)


@pytest.mark.parametrize("again", [event(key="k"), event(item="j", key="k"), event(user="w", key="k")], ids=["same", "other", "renamed"])
@pytest.mark.parametrize("loaded", [False, True])
async def test_an_event_that_is_sent_again_after_its_user_was_erased_does_not_bring_the_user_back(store, url, again, loaded):
    (first, _) = await store.append([event(key="k"), event(key="k2")])
    await store.erase("default", "u")
    version = await store.version("default", "u")
    if loaded:
        assert await store.load([[again, again], [event(user="v", key="kv")]]) == Loaded(stored=1, duplicates=2)
    else:
        stored = await store.append([again, event(user="v", key="kv"), again])
        assert [stored[0], stored[2]] == [Stored(first.sequence, duplicate=True)] * 2
    assert await items(store) == await items(store, user="w") == []
    assert await store.version("default", "u") == version
    assert await items(store, user="v") == ["i"]
    assert [user.user_id for user in await store.users("default", 10)] == ["v"]
    assert (await store.statistics()).users == 1
    await store.append([event(tenant="other", key="k"), event(item="new", key="k3")])
    assert (await items(store, tenant="other"), await items(store)) == (["i"], ["new"]), "the keys of other tenants, and new ones"


async def test_nothing_is_stored_under_a_key_that_was_passed_over(store):
    stored, passed_over = event(key="k"), event(key="k2")
    await store.append([stored, event(user="v", key="kv")])
    for _ in range(2):
        await store.pass_over([passed_over, stored, event(user="v")])
    assert await store.load([[passed_over, stored]]) == Loaded(duplicates=2)
    assert await items(store) == ["i"]
    assert await store.erase("default", "u") == 1
    assert await store.load([[passed_over, stored]]) == Loaded(duplicates=2)
    assert await items(store) == []
    assert await store.erase("default", "v") == 1


async def test_what_is_left_of_an_erased_user_cannot_be_found_by_trying_names(store, url):
    await store.append([event(user="ada", key="order-17")])
    await store.erase("default", "ada")
    left = [
        bytes(digest) for table in ("erasures", "erased_events") for (digest,) in await rows_of(url, f"SELECT digest FROM genrec.{table}")
    ]
    assert [len(digest) for digest in left] == [32, 32]
    tried = [sha256(text.encode()).digest() for text in ("ada", "default\0ada", "order-17", "default\0order-17", "\0default\0order-17")]
    assert not set(left) & set(tried)
    await store.close()
    other = await open_event_store(url)
    assert "erased" in await other.version("default", "ada")
    await other.close()


KEY = "0123456789abcdef" * 2


async def test_a_key_that_is_given_is_the_one_that_counts_and_another_is_refused_with_the_cure(url, monkeypatch, tmp_path):
    monkeypatch.setenv(ENVIRONMENT, KEY)
    store = await open_event_store(url)
    await store.append([event(key="k")])
    await store.erase("default", "u")
    await store.close()
    assert not list(tmp_path.glob("*.key"))
    for other in (KEY[::-1], ""):
        monkeypatch.setenv(ENVIRONMENT, other)
        with pytest.raises(BackendUnavailable, match=r"made with another key|the key of erased users, .*, cannot be had"):
            await open_event_store(url)
    monkeypatch.setenv(ENVIRONMENT, KEY)
    store = await open_event_store(url)
    assert (await store.append([event(key="k")]))[0].duplicate
    assert "erased" in await store.version("default", "u")
    await store.close()


async def test_users_are_found_by_a_new_key_where_the_one_before_was_lost(url, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, KEY)
    async with closing_store(url) as store:
        await store.append([event(user="ключ"), event(user="v")])
        version = await store.version("default", "ключ")
    lose_the_ledger_beside(url)
    await rows_of(url, "UPDATE genrec.store SET key_check = NULL")
    monkeypatch.setenv(ENVIRONMENT, "a longer key than a block of SHA-256 has, so that HMAC takes its digest in its place")
    async with closing_store(url) as store:
        assert await store.version("default", "ключ") == version
        assert await items(store, user="v") == ["i"]
        assert [await store.erase("default", user) for user in ("ключ", "v")] == [1, 1]


async def test_the_version_never_comes_back_however_often_a_user_is_erased(store):
    seen = [await store.version("default", "u")]
    for number in range(5):
        await store.append([event(key=f"k{number}")])
        seen.append(await store.version("default", "u"))
        await store.erase("default", "u")
        seen.append(await store.version("default", "u"))
        assert (await store.history("default", "u", 10)).version == seen[-1]
    assert len(set(seen)) == len(seen) == 11


async def test_an_erasure_of_an_unknown_user_is_noted_where_a_ledger_is_kept_and_once_however_often_it_is_sent(store, url):
    """SQLite always keeps one."""
    for _ in range(3):
        assert await store.erase("default", "u") == 0
    noted = int(url.startswith("sqlite"))
    assert ("erased" in await store.version("default", "u")) == noted
    assert len(await rows_of(url, "SELECT * FROM genrec.erasures")) == noted


@pytest.fixture
def noting(url, tmp_path):
    """The same store, with its ledger in a file of a directory of its own."""
    (tmp_path / "ledger").mkdir()
    return f"{url}{'&' if '?' in url else '?'}ledger={tmp_path}/ledger/erased"


async def test_a_user_is_named_by_the_digest_that_is_left_once_it_is_erased(store, url):
    await store.append([event(user="ada")])
    await store.erase("default", "ada")
    [(digest,)] = await rows_of(url, "SELECT digest FROM genrec.erasures")
    assert await store.digest("default", "ada") == bytes(digest).hex() != await store.digest("other", "ada")


def lose_the_ledger_beside(url):
    Path(f"{url.removeprefix('sqlite:///')}.erased").unlink(missing_ok=True)


async def brought_back(url, *events):
    """Have the store forget its erasures and hold the events again, as an older copy of it does. Its own ledger is lost."""
    lose_the_ledger_beside(url)
    for table in ("erasures", "erased_events"):
        await rows_of(url, f"DELETE FROM genrec.{table}")
    async with closing_store(url) as store:
        await store.append(events)


async def test_an_older_copy_of_a_store_forgets_as_it_is_opened_what_its_ledger_says_was_erased(url, noting):
    events = [event(user="ada", key="k"), event(user="bob"), event(user="ada", tenant="other")]
    async with closing_store(noting) as store:
        await store.append(events)
        await store.erase("default", "ada")
        await store.append([event(user="eve")])
        await store.erase("default", "eve")
        version = await store.version("default", "bob")
    await brought_back(url, events[0])
    for _ in range(2):  # once is enough
        async with closing_store(noting) as store:
            assert (await items(store, "ada"), await items(store, "bob"), await items(store, "ada", "other")) == ([], ["i"], ["i"])
            assert await store.statistics() == StoreStatistics(2, 2)
            told = [await store.version("default", user) for user in ("ada", "bob", "eve")]
            assert ["erased" in one for one in told] == [True, False, True]
            assert told[1] != version, "versions are told anew"
            assert (await store.append([events[0]]))[0].duplicate, "its key is known"
    assert [len(await rows_of(url, f"SELECT * FROM genrec.{table}")) for table in ("erasures", "erased_events")] == [2, 1]


async def test_an_older_copy_that_catches_up_erases_all_together_and_adds_nothing_to_the_ledger(url, noting, tmp_path, monkeypatch):
    """While it does, no other process may open the store."""
    names, ledger = [f"u{number}" for number in range(20)], tmp_path / "ledger" / "erased"
    async with closing_store(noting) as store:
        await store.append([event(user=name) for name in [*names, "other"]])
        for name in names:
            await store.erase("default", name)
    await brought_back(url, *(event(user=name) for name in names[:10]))
    lines, synced, fsync = len(ledger.read_bytes().splitlines()), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    async with closing_store(noting) as store:
        assert await store.statistics() == StoreStatistics(1, 1)
    assert (len(ledger.read_bytes().splitlines()) - lines, len(synced)) == (0, 0)


@pytest.mark.parametrize("returned", [False, True])
async def test_a_user_that_was_erased_while_an_older_copy_served_is_not_in_a_later_one(noting, copied, tmp_path, returned):
    """The older copy holds nothing of the user. `returned`: it knows of an earlier erasure, after which the user came back."""
    async with closing_store(noting) as store:
        await store.append([event(user="v")])
        if returned:
            await store.append([event(item="first")])
            await store.erase("default", "u")
    older = copied()
    async with closing_store(noting) as store:
        await store.append([event()])
    ledger = tmp_path / "ledger" / "erased"
    lines = len(ledger.read_bytes().splitlines())
    async with closing_store(older) as store:
        assert [await store.erase("default", "u") for _ in range(3)] == [0, 0, 0]
    assert len(ledger.read_bytes().splitlines()) == lines + 1
    async with closing_store(noting) as store:
        assert (await items(store), await items(store, "v")) == ([], ["i"])


@pytest.fixture
def copied(url, request, noting):
    """Copies the store, which is closed, as a backup and a restore beside it do; returns the copy's URL, with the ledger of the store."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))

        def copy():
            for end in ("", ".key"):
                path.with_name(f"copy.db{end}").write_bytes(path.with_name(f"{path.name}{end}").read_bytes())
            return noting.replace("events.db", "copy.db")

        yield copy
        return
    server = request.getfixturevalue("server")
    yield lambda: f"{server.create('copy', '--template', 'events')}&{noting.partition('&')[2]}"
    server.drop("copy")


async def test_a_user_that_came_back_stays_beside_an_older_copy_that_has_caught_up_with_the_same_ledger(noting, copied, tmp_path):
    """As where the wrong backup was restored before the right one, and where a drill, or a staging clone, has the ledger of production."""
    async with closing_store(noting) as store:
        await store.append([event(item="old"), event(user="v")])
    older = copied()
    async with closing_store(noting) as store:
        for user in ("u", "v"):
            await store.erase("default", user)
        await store.append([event(item="new")])
        version = await store.version("default", "u")
    noted = (tmp_path / "ledger" / "erased").read_bytes()
    for _ in range(2):
        async with closing_store(older) as store:
            assert (await items(store), await items(store, "v")) == ([], [])
    assert (tmp_path / "ledger" / "erased").read_bytes() == noted
    async with closing_store(noting) as store:
        assert (await items(store), await store.version("default", "u")) == (["new"], version)
        await store.erase("default", "u")
    async with closing_store(older) as store:
        await store.append([event(user="w")])
        await store.erase("default", "w")
        assert len({await store.version("default", user) for user in "uvw"}) == 3
    assert len((tmp_path / "ledger" / "erased").read_bytes().splitlines()) == len(noted.splitlines()) + 2


async def test_a_user_that_came_back_after_an_erasure_stays_when_the_store_is_opened_again(url, noting):
    for _ in range(2):
        async with closing_store(noting) as store:
            await store.append([event()])
            await store.erase("default", "u")
            await store.append([event(item="new")])
            assert await items(store) == ["new"]
    await brought_back(url, event(item="old"))
    async with closing_store(noting) as store:
        assert await items(store) == []
        await store.append([event(item="newest")])
    async with closing_store(noting) as store:
        assert await items(store) == ["newest"], "the erasure is done, under a number of its own"


async def test_what_a_ledger_lacks_stays_erased_while_the_store_catches_up_with_what_it_has(url, noting, tmp_path):
    """As where a store had another ledger for a while."""
    async with closing_store(noting) as store:
        await store.append([event(user=f"u{number}") for number in range(5)])
        await store.erase("default", "u0")
    await rows_of(url, "DELETE FROM genrec.erasures")
    lose_the_ledger_beside(url)
    async with closing_store(url) as store:
        for number in range(1, 5):
            await store.erase("default", f"u{number}")
    async with closing_store(noting) as store:
        assert all(["erased" in await store.version("default", f"u{number}") for number in range(5)])


async def test_a_ledger_that_is_new_is_told_what_was_erased_before(url, noting, tmp_path):
    async with closing_store(url) as store:
        await store.append([event()])
        await store.erase("default", "u")
    async with closing_store(noting):
        pass
    await brought_back(url, event())
    async with closing_store(noting) as store:
        assert await items(store) == []
    assert b"default" not in (tmp_path / "ledger" / "erased").read_bytes()


async def test_a_user_is_not_erased_where_the_ledger_cannot_be_written(noting, tmp_path):
    async with closing_store(noting) as store:
        await store.append([event(), event(user="v")])
        (tmp_path / "ledger" / "erased").unlink()
        (tmp_path / "ledger").rmdir()
        with pytest.raises(BackendUnavailable, match=r"the ledger of erasures .* cannot be used \(No such file or directory\); make room"):
            await store.erase("default", "u")
        assert await items(store) == ["i"]
        (tmp_path / "ledger").mkdir()
        assert await store.erase("default", "u") == 1
    (tmp_path / "ledger" / "erased").unlink()
    (tmp_path / "ledger").rmdir()
    with pytest.raises(BackendUnavailable, match="the ledger of erasures"):
        await open_event_store(noting)


async def test_a_ledger_of_another_store_is_refused(noting, tmp_path):
    ledger = tmp_path / "ledger" / "erased"
    Ledger(ledger, Digests(b"another key")).note({b"d" * 32: 7})
    with pytest.raises(BackendUnavailable, match="is of a store with another key; name one for each store"):
        await open_event_store(noting)


async def test_a_postgresql_that_is_opened_without_a_ledger_is_told_of_once_and_one_with_a_ledger_is_not(server, tmp_path, caplog):
    url = server.create("unnoted")
    for named, warnings in ((url, 1), (f"{url}&ledger={tmp_path}/erased", 0)):
        caplog.clear()
        async with closing_store(named) as store:
            await store.append([event()])
            await store.erase("default", "u")
        assert [record.levelname for record in caplog.records if "keeps no ledger of erasures" in record.message] == ["WARNING"] * warnings
    server.drop("unnoted")


async def test_a_promoted_standby_that_lacked_an_erasure_makes_up_for_it_beside_the_stores_that_are_open(server, tmp_path, caplog):
    url = server.create("standby")
    noting = f"{url}&ledger={tmp_path}/erased"
    async with closing_store(noting) as store:
        await store.append([event(), event(user="v")])
        await store.erase("default", "u")
        await brought_back(url, event())
        version = await store.version("default", "v")
        assert await items(store) == ["i"], "else nothing is shown"
        for _ in range(2):
            await driver_of(noting).restore(noting, None)
        [told] = [record.message for record in caplog.records if "were in the event store again" in record.message]
        assert f"as its ledger {tmp_path}/erased says: 1; " in told
        assert told.endswith("send POST /v1/cache:invalidate {}, as caches and engines keep what was computed of them")
        assert (await items(store), await items(store, "v")) == ([], ["i"])
        assert await store.version("default", "v") != version, "the numbers in versions that were lost are given anew"
    server.drop("standby")


async def test_a_postgresql_without_a_store_is_told_of_and_none_is_made_where_it_was_to_be_there(server, tmp_path):
    url = server.create("another")
    driver, noting, off = driver_of(url), f"{url}&ledger={tmp_path}/erased", SwitchedOffStore(url)
    (tmp_path / "erased").touch()
    for refused in (driver.require_there(url), driver.statistics(url), driver.restore(noting, None)):
        with pytest.raises(ConfigError, match="/another is not there: its database holds no events; give the URL that the service has"):
            await refused
    assert await off.erase("default", "ada") == 0
    assert await rows_of(url, "SELECT 1 FROM pg_namespace WHERE nspname = 'genrec'") == []
    async with closing_store(url) as store:
        await store.append([event(user="ada")])
    assert await off.erase("default", "ada") == 1
    await off.close()
    server.drop("another")


async def test_a_user_whose_events_take_longer_than_other_statements_may_is_erased_from_postgresql_all_the_same(server, monkeypatch):
    url = server.create("huge")
    held = "BEGIN PERFORM pg_advisory_xact_lock(1); RETURN old; END"
    async with closing_store(url) as store:
        await store.append([event(key="k")])
    monkeypatch.setitem(database.SETTINGS, "statement_timeout", "5s")
    monkeypatch.setattr(database, "STATEMENT_TIMEOUT_S", 4.0)  # asyncpg has a second more
    async with closing_store(url) as store:
        await rows_of(url, f"CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS '{held}'")
        await rows_of(url, "CREATE TRIGGER held BEFORE DELETE ON genrec.events FOR EACH ROW EXECUTE FUNCTION held()")
        holder = await asyncpg.connect(url)
        await holder.execute("SELECT pg_advisory_lock(1)")
        erasure = asyncio.create_task(store.erase("default", "u"))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND clock_timestamp() > query_start + interval '6s'"
        await until(lambda: erasure.done() or holder.fetchval(waits))
        await holder.close()
        assert await erasure == 1
        assert await items(store) == []
    server.drop("huge")


async def test_a_migration_that_takes_longer_than_other_statements_may_brings_a_postgresql_up_to_date_and_is_told_of(
    server, monkeypatch, caplog
):
    """As one that writes a table of a billion events anew."""
    url = server.create("growing")
    await (await open_event_store(url)).close()
    await rows_of(url, "ALTER DATABASE growing SET statement_timeout = '5s'")
    known = read_migrations("integrations.postgresql.migrations")
    step = Migration(len(known) + 1, f"{len(known) + 1:04}_long", "CREATE TABLE genrec.longer (a INT);\nSELECT pg_advisory_xact_lock(1);\n")
    monkeypatch.setattr("integrations.postgresql.store.read_migrations", lambda _: [*known, step])
    monkeypatch.setattr(database, "PREPARE_TIMEOUT_S", 5.0)
    caplog.set_level("INFO", "integrations.postgresql.store")
    holder = await asyncpg.connect(url)
    await holder.execute("SELECT pg_advisory_lock(1)")
    opening = asyncio.create_task(open_event_store(url))
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND clock_timestamp() > query_start + interval '6s'"
    await until(lambda: opening.done() or holder.fetchval(waits))
    await holder.close()
    store = await opening
    assert await rows_of(url, "SELECT max(version) FROM genrec.schema_versions") == [(step.number,)]
    told = [record.message.partition(": ")[2] for record in caplog.records if record.name == "integrations.postgresql.store"]
    assert told == [f"migration {step.name}, statement {number} of 2" for number in (1, 2)]
    await store.close()
    server.drop("growing")


TABLES = ("users", "events", "erasures", "erased_events", "store", "names")


async def test_no_table_names_an_erased_user(store, url):
    await store.append([event(user="marker-user", item="marker-item", key="marker-key")])
    await store.erase("default", "marker-user")
    left = [await rows_of(url, f"SELECT * FROM genrec.{table}") for table in TABLES]
    assert "marker" not in str(left)
    assert [len(rows) for rows in left[:5]] == [0, 0, 1, 1, 1]


async def test_fifty_tasks_that_append_to_one_user_lose_nothing_and_keep_each_ones_order(store):
    async def task(number):
        for step in range(6):
            await store.append([event(item=f"{number}:{2 * step}"), event(item=f"{number}:{2 * step + 1}")])

    await asyncio.gather(*(task(number) for number in range(50)))
    by_task = defaultdict(list)
    for item in await items(store, limit=1000):
        by_task[item.split(":")[0]].append(int(item.split(":")[1]))
    assert len(by_task) == 50
    assert all(steps == list(range(12)) for steps in by_task.values())
    assert await store.statistics() == StoreStatistics(600, 1)


async def test_no_reader_sees_half_a_batch(store):
    done = asyncio.Event()

    async def read():
        lengths = set()
        while not done.is_set():
            lengths.add(len((await store.history("default", "u", 1000)).behaviours))
        return lengths

    readers = [asyncio.create_task(read()) for _ in range(3)]
    for _ in range(20):
        await store.append([event(item=str(number)) for number in range(7)])
    done.set()
    lengths = set().union(*await asyncio.gather(*readers))
    assert lengths
    assert all(length % 7 == 0 for length in lengths)


async def test_a_key_sent_twenty_times_at_once_is_stored_once(store):
    answers = await asyncio.gather(*(store.append([event(item="own", user=f"v{n}"), event(key="k")]) for n in range(20)))
    assert sum(not answer[1].duplicate for answer in answers) == 1
    assert len({answer[1].sequence for answer in answers}) == 1
    assert await items(store) == ["i"]
    assert (await store.statistics()).events == 21


async def test_of_twenty_contents_sent_at_once_under_one_key_one_is_stored_and_the_others_are_refused(store):
    sent = (store.append([event(user=f"u{number}", key="k")]) for number in range(20))
    answers = await asyncio.gather(*sent, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, InvalidRequest)]
    assert len(refused) == 19
    assert await store.statistics() == StoreStatistics(1, 1)


async def test_batches_that_name_the_same_users_and_keys_in_opposite_order_do_not_block_each_other(store):
    events = [event(user=f"u{number}", key=f"k{number}") for number in range(30)]
    answers = await asyncio.gather(*(store.append(events[:: (-1) ** turn]) for turn in range(10)))
    assert sum(not one.duplicate for answer in answers for one in answer) == 30
    assert await store.statistics() == StoreStatistics(30, 30)


async def test_appends_and_erasures_at_once_leave_counts_that_agree_with_the_events(store, url):
    appends = [store.append([event(user=f"u{number % 3}"), event(user=f"u{number % 2}", key=f"k{number}")]) for number in range(60)]
    erasures = [store.erase("default", f"u{number % 3}") for number in range(12)]
    calls = [*appends, *erasures]
    random.Random(0).shuffle(calls)
    erased = sum(answer for answer in await asyncio.gather(*calls) if isinstance(answer, int))
    held = await store.statistics()
    assert held.events == 120 - erased
    assert len(await rows_of(url, "SELECT * FROM genrec.events")) == held.events


@pytest.mark.parametrize("seed", range(3))
async def test_a_store_agrees_with_a_plain_model_of_it(store, seed):
    draw = random.Random(seed)
    histories, keys = defaultdict(list), {}
    for step in range(120):
        user = draw.choice("ab")
        if draw.random() < 0.1:
            assert await store.erase("default", user) == len(histories.pop(user, []))
            continue
        batch = [event(user, f"i{step}.{n}", draw.randrange(5), draw.choice([None, f"k{draw.randrange(40)}"])) for n in range(3)]
        batch = [keys.get(one.idempotency_key, one) for one in batch]
        if len({one.idempotency_key for one in batch if one.idempotency_key}) < sum(bool(one.idempotency_key) for one in batch):
            continue
        answers = await store.append(batch)
        assert [answer.duplicate for answer in answers] == [one.idempotency_key in keys for one in batch]
        for one in batch:
            if one.idempotency_key not in keys:
                histories[one.user_id].append(one.behaviour)
                keys |= {one.idempotency_key: one} if one.idempotency_key else {}
        expected = sorted(histories[user], key=lambda behaviour: behaviour.timestamp)[-20:]
        assert (await store.history("default", user, 20)).behaviours == tuple(expected)


async def test_a_load_stores_batches_of_either_kind_and_counts_them(store):
    batches = [[event(item=str(number), timestamp=number, key=f"k{number}") for number in range(start, start + 50)] for start in (0, 50)]

    async def one_by_one():
        for batch in batches:
            yield batch

    assert await store.load(batches) == Loaded(stored=100, duplicates=0)
    assert await store.load(one_by_one()) == Loaded(stored=0, duplicates=100)
    assert await store.load([]) == Loaded()
    assert await items(store) == [str(number) for number in range(100)]


async def test_a_load_keeps_the_batches_before_the_one_that_fails_and_can_be_begun_again(store):
    good = [[event(item=str(number), key=f"k{number}")] for number in range(3)]
    with pytest.raises(InvalidRequest, match="'k0' is known for another event"):
        await store.load([*good, [event(item="new", key="k9"), event(item="other", key="k0")]])
    assert await items(store) == ["0", "1", "2"]
    assert await store.load([*good, [event(item="3", key="k3")]]) == Loaded(stored=1, duplicates=3)


async def test_a_load_beside_appends_stores_what_both_send_once(store):
    events = [event(user=f"u{number % 7}", item=str(number), key=f"k{number}") for number in range(300)]
    batches = [events[start : start + 50] for start in range(0, 300, 50)]
    appended, loaded = await asyncio.gather(asyncio.gather(*(store.append(batch) for batch in batches)), store.load(batches))
    assert sum(not one.duplicate for answer in appended for one in answer) + loaded.stored == 300
    assert await store.statistics() == StoreStatistics(300, 7)


async def test_everything_is_there_when_the_store_is_opened_again(store, url):
    await store.append([event(key="k"), event(user="gone")])
    await store.erase("default", "gone")
    versions = [await store.version("default", user) for user in ("u", "gone")]
    await store.close()
    again = await open_event_store(url)
    try:
        assert await items(again) == ["i"]
        assert [await again.version("default", user) for user in ("u", "gone")] == versions
        assert (await again.append([event(key="k")]))[0].duplicate
    finally:
        await again.close()


async def test_several_stores_may_open_the_same_place_at_once_and_see_each_others_events(url):
    stores = await asyncio.gather(*(open_event_store(url) for _ in range(4)))
    await asyncio.gather(*(store.append([event(item=f"{at}.{n}")]) for n in range(10) for at, store in enumerate(stores)))
    histories = [await items(store) for store in stores]
    assert all(history == histories[0] for history in histories)
    assert len(histories[0]) == 40
    await asyncio.gather(*(store.close() for store in stores))


async def test_two_stores_never_give_the_same_version(store, url, request, tmp_path):
    other = await open_event_store(f"sqlite:///{tmp_path}/other.db")
    await asyncio.gather(store.append([event()]), other.append([event(item="different")]))
    assert await store.version("default", "u") != await other.version("default", "u")
    await other.close()


async def test_a_schema_that_is_newer_than_the_code_is_refused(store, url):
    await store.close()
    await rows_of(url, "INSERT INTO genrec.schema_versions (version, name, applied_at) VALUES (7, 'later', CURRENT_TIMESTAMP)")
    with pytest.raises(BackendUnavailable, match=r"has schema version 7, and this genrec knows versions up to \d; update genrec"):
        await open_event_store(url)


async def test_a_closed_store_says_so_and_may_be_closed_again(store):
    await store.append([event()])
    await store.close()
    await store.close()
    for call in (store.append([event()]), store.version("default", "u"), store.history("default", "u", 1), store.statistics()):
        with pytest.raises(BackendUnavailable, match="is closed; open it again"):
            await call


async def test_a_postgresql_that_falls_silent_holds_no_read_beyond_its_time(server, monkeypatch):
    """asyncpg gives a connection back once the server has said that the cancelled statement has ended, or a time limit is over."""
    monkeypatch.setattr(database, "ACQUIRE_TIMEOUT_S", 3600.0)
    store = await open_event_store(server.create("silent"))
    try:
        await store.append([event()])
        version = await store.version("default", "u")
        with server.stopped():
            async with asyncio.timeout(600):
                with pytest.raises(BackendUnavailable, match="did not answer within"):
                    await GuardedHistories(store, 0.1).version("default", "u")
        assert await store.version("default", "u") == version
    finally:
        await store.close()
        server.drop("silent")


@asynccontextmanager
async def holding(url: str, lock: str):
    """Holds a lock; gives a function that says whether so many wait for one in this database."""
    holder, watcher = await asyncpg.connect(url), await asyncpg.connect(url)  # in a transaction, activity stays as it was at the first look
    asked = "SELECT count(*) >= $1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with holder.transaction():
        await holder.execute(lock)
        yield lambda least: watcher.fetchval(asked, least)
    await holder.close()
    await watcher.close()


async def test_appends_that_wait_for_a_lock_in_postgresql_leave_connections_to_the_histories_of_others(server, monkeypatch):
    monkeypatch.setitem(database.SETTINGS, "statement_timeout", "600s")
    monkeypatch.setitem(database.SETTINGS, "lock_timeout", "600s")
    monkeypatch.setattr(database, "STATEMENT_TIMEOUT_S", 600.0)
    monkeypatch.setattr(database, "ACQUIRE_TIMEOUT_S", 600.0)
    url = server.create("locked")
    async with closing_store(url) as store:
        await store.append([event(), event(user="other")])
        async with holding(url, "SELECT FROM genrec.users FOR UPDATE") as waiting:
            appends = [asyncio.create_task(store.append([event(item=f"{n}")])) for n in range(database.POOL_SIZE)]
            await until(lambda: waiting(database.MOST_WRITING))
            assert len((await GuardedHistories(store, 60).history("default", "other", 10)).behaviours) == 1
        await asyncio.gather(*appends)
        assert len(await items(store)) == 1 + database.POOL_SIZE
    server.drop("locked")


async def test_while_an_erasure_in_postgresql_holds_a_user_its_events_are_refused_with_the_cause_and_those_of_others_stored(
    server, monkeypatch
):
    for longer in ("STATEMENT_TIMEOUT_S", "ACQUIRE_TIMEOUT_S"):
        monkeypatch.setattr(database, longer, 600.0)
    monkeypatch.setitem(database.SETTINGS, "statement_timeout", "600s")
    url = server.create("being_erased")
    async with closing_store(url) as store:
        await store.append([event(), event(user="other")])
        async with holding(url, "SELECT FROM genrec.users WHERE events = 1 ORDER BY number LIMIT 1 FOR UPDATE"):
            refused = [asyncio.create_task(store.append([event()])) for _ in range(database.MOST_WRITING)]
            await settled()
            assert len(await store.append([event(user="other")])) == 1
            for refusal in refused:
                with pytest.raises(BackendUnavailable, match="its user is locked for more than 2 s, as by the erasure of many events"):
                    await refusal
        assert (len(await items(store)), len(await items(store, "other"))) == (1, 2)
    server.drop("being_erased")


async def test_a_gateway_starts_while_a_lock_in_postgresql_holds_up_its_store_which_catches_up_before_it_is_read(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr("deployments.stores.OPEN_WITHIN_S", 0.5)
    url = server.create("held_up")
    noting = f"{url}&ledger={tmp_path}/erased"
    async with closing_store(noting) as store:
        await store.append([event(), event(user="v")])
        await store.erase("default", "u")
    await brought_back(url, event())
    async with holding(url, "LOCK TABLE genrec.erasures IN ROW EXCLUSIVE MODE") as waiting:
        store = await open_events(parse({"events": {"url": noting}}))
        reading = asyncio.create_task(items(store))
        await until(lambda: waiting(1))
        assert not reading.done()
    assert (await reading, await items(store, "v")) == ([], ["i"])
    await store.close()
    server.drop("held_up")


async def test_calls_that_are_cancelled_leave_a_store_that_works_and_events_that_are_whole(store):
    tasks = [asyncio.create_task(store.append([event(item=f"{n}a", key=f"{n}a"), event(item=f"{n}b", key=f"{n}b")])) for n in range(40)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    replay = await store.append([event(item=f"{n}{part}", key=f"{n}{part}") for n in range(40) for part in "ab"])
    assert await store.statistics() == StoreStatistics(80, 1)
    assert all(first.duplicate == second.duplicate for first, second in zip(replay[::2], replay[1::2], strict=True))
