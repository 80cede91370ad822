import asyncio
import json
import os
import time
from functools import partial

import pytest
from typer.testing import CliRunner

from cluster.bundle import MANIFEST
from cluster.errors import ConfigError, DataError, InvalidRequest, UnknownChoice
from cluster.events.store import Event, closing_store
from cluster.values import Action, Behaviour
from deployments.cli import events
from deployments.cli.events import app, batches
from deployments.training.dataset_options import DatasetOptions
from integrations.sqlite.store import SQLiteEventStore
from tests.bundles import make_bundle
from tests.unit.test_datasets_table import CSV, written


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/events.db"


async def history(url, user, tenant="default"):
    async with closing_store(url) as store:
        behaviours = (await store.history(tenant, user, 100)).behaviours
    return [(behaviour.item_id, behaviour.timestamp, behaviour.action.value, behaviour.value) for behaviour in behaviours]


def keys(path):
    dataset = DatasetOptions(name="table", path=path).read()
    return [event.idempotency_key for batch in batches(dataset, "default") for event in batch]


def stored(answer):
    assert answer.exit_code == 0
    summary = json.loads(answer.stdout)
    return summary["stored"], summary["duplicates"]


def test_a_file_is_imported_once_however_often_it_is_given(tmp_path, url):
    path = written(tmp_path, CSV)
    answer = run("import", path, "--url", url, "--json")
    assert stored(answer) == (4, 0)
    assert json.loads(answer.stdout)["source"] == str(path)
    assert stored(run("import", path, "--url", url, "--json")) == (0, 4)
    assert json.loads(run("stats", "--url", url, "--json").stdout) == {"events": 4, "users": 2}


def test_events_of_the_future_are_told(tmp_path, url):
    hour, day = 3600, 86_400
    now = int(time.time())
    path = written(tmp_path, f"user_id,item_id,timestamp\nu,i,{now + hour}\nu,j,{now + 2 * day}\nv,i,{now + 9 * day}\n")
    told = run("import", path, "--url", url).stderr
    assert f"2 events of {path} lie more than a day ahead of this machine's clock; is another --timestamp-unit meant?" in told
    assert not run("import", written(tmp_path, f"user_id,item_id,timestamp\nu,i,{now}\n"), "--url", url).stderr


async def test_imported_events_are_those_of_the_file(tmp_path, url):
    text = "user_id,item_id,timestamp,action,value\nb,z,20,like,\na,x,30,view,2.5\nb,y,10,purchase,9.5\n"
    path = written(tmp_path, text)
    async with closing_store(url) as store:
        await store.load(batches(DatasetOptions(name="table", path=path).read(), "default"))
    assert await history(url, "b") == [("y", 10, "purchase", 9.5), ("z", 20, "like", None)]
    assert await history(url, "a") == [("x", 30, "view", 2.5)]


@pytest.mark.parametrize("time", ["10", "1970-01-01T00:00:10+00:00"], ids=["a fast pass", "a careful one"])
def test_a_value_is_stored_as_the_file_has_it(tmp_path, url, time):
    text = f"user_id,item_id,timestamp,action,value\nu,a,{time},view,19.99\nu,b,{time},view,16777217\nu,b,{time},view,16777216\n"
    run("import", written(tmp_path, text), "--url", url)
    assert asyncio.run(history(url, "u")) == [("a", 10, "view", 19.99), ("b", 10, "view", 16777217), ("b", 10, "view", 16777216)]


def test_of_a_file_that_has_grown_only_the_new_rows_are_added(tmp_path, url):
    run("import", written(tmp_path, CSV), "--url", url)
    grown = written(tmp_path, CSV + "a,x,50,view,\nnew,x,60,view,\n", "grown.csv")
    assert stored(run("import", grown, "--url", url, "--json")) == (2, 4)


async def sent(url, *what, key=None):
    """Stores events as `POST /v1/events` does with this `Idempotency-Key`."""
    async with closing_store(url) as store:
        await store.append([Event(user, behaviour, idempotency_key=key) for user, behaviour in what])


def test_what_a_client_has_sent_is_not_stored_again_by_an_import_of_the_same_event(tmp_path, url):
    rated = Behaviour("i", 5, Action.RATING, 19.99)
    asyncio.run(sent(url, ("u", rated), ("u", Behaviour("i", 6)), ("v", Behaviour("i", 5))))
    header = "user_id,item_id,timestamp,action,value\n"
    same = written(tmp_path, f"{header}u,i,5,rating,19.99\nu,i,6,view,\n", "same.csv")
    assert stored(run("import", same, "--url", url, "--json")) == (0, 2)
    others = written(
        tmp_path, f"{header}u,i,5,rating,19.98\nu,i,5,view,19.99\nu,j,5,rating,19.99\nu,i,7,view,\nw,i,6,view,\n", "others.csv"
    )
    assert stored(run("import", others, "--url", url, "--json")) == (5, 0)


@pytest.mark.parametrize("size", [1, 2, 100], ids="a batch has {} events".format)
@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_equal_events_are_stored_as_often_as_the_file_has_them_or_a_client_has_sent_them(tmp_path, url, monkeypatch, size, before):
    monkeypatch.setattr(events, "batches", partial(batches, size=size))
    asyncio.run(sent(url, *[("u", Behaviour("i", 5))] * before))
    path = written(tmp_path, "user_id,item_id,timestamp\n" + "u,i,5\n" * 3)
    assert stored(run("import", path, "--url", url, "--json")) == (max(0, 3 - before), min(3, before))
    assert stored(run("import", path, "--url", url, "--json")) == (0, 3)


def test_an_import_asks_the_store_for_several_users_at_once(tmp_path, url, monkeypatch):
    together, history = asyncio.Barrier(events.READ_AT_ONCE), SQLiteEventStore.history

    async def history_of_several(*asked):
        async with asyncio.timeout(300):
            await together.wait()
        return await history(*asked)

    monkeypatch.setattr(SQLiteEventStore, "history", history_of_several)
    users = 2 * events.READ_AT_ONCE
    path = written(tmp_path, "user_id,item_id,timestamp\n" + "".join(f"u{number},i,5\n" for number in range(users)))
    assert stored(run("import", path, "--url", url, "--json")) == (users, 0)


def test_equal_rows_are_kept_apart_and_imported_as_often_as_they_stand_there(tmp_path, url):
    text = "user_id,item_id,timestamp\n" + "u,i,5\n" * 3 + "v,i,5\n"
    path = written(tmp_path, text)
    assert stored(run("import", path, "--url", url, "--json")) == (4, 0)
    assert stored(run("import", path, "--url", url, "--json")) == (0, 4)


def test_an_import_does_not_tell_repeats_which_no_model_learns_from_there_but_times_that_are_all_one(tmp_path, url):
    twice = [f"u{user},i{item},{1_700_000_000 + item}\n" for user in range(20) for item in (1, 2)] * 2
    assert not run("import", written(tmp_path, "user_id,item_id,timestamp\n" + "".join(twice)), "--url", url).stderr
    constant = [f"u{user},i{item},1700000000\n" for user in range(20) for item in range(3)]
    told = run("import", written(tmp_path, "user_id,item_id,timestamp\n" + "".join(constant)), "--url", url).stderr
    assert "lie in the same second as their user's event before" in told


def test_a_key_depends_on_the_whole_event_and_on_nothing_else(tmp_path):
    header = "user_id,item_id,timestamp,action,value\n"
    lines = ["u,i,5,view,1", "v,i,5,view,1", "u,j,5,view,1", "u,i,6,view,1", "u,i,5,like,1", "u,i,5,view,2", "u,i,5,view,"]
    assert len(set(keys(written(tmp_path, header + "\n".join(lines) + "\n")))) == 7
    assert set(keys(written(tmp_path, header + "\n".join(reversed(lines)) + "\n", "b.csv"))) == set(keys(tmp_path / "events.csv"))


def test_batches_hold_all_events_and_none_is_larger_than_asked(tmp_path):
    path = written(tmp_path, "user_id,item_id,timestamp\n" + "".join(f"u{number % 3},i,{number}\n" for number in range(20)))
    made = list(batches(DatasetOptions(name="table", path=path).read(), "t", size=6))
    assert [len(batch) for batch in made] == [6, 6, 6, 2]
    assert {event.tenant for batch in made for event in batch} == {"t"}
    assert len({event.idempotency_key for batch in made for event in batch}) == 20


def test_tenants_are_imported_apart(tmp_path, url):
    path = written(tmp_path, CSV)
    for tenant in ("one", "two"):
        assert stored(run("import", path, "--url", url, "--tenant", tenant, "--json")) == (4, 0)
    assert "8 events of 4 users" in run("stats", "--url", url).stdout


def test_erasing_says_how_many_events_of_whom(tmp_path, url):
    run("import", written(tmp_path, CSV), "--url", url)
    assert "erased 2 events of 'a' (tenant default)" in run("erase", "a", "--url", url).stdout
    assert json.loads(run("erase", "a", "--url", url, "--json").stdout) == {"erased": 0}
    assert "2 events of 1 users" in run("stats", "--url", url).stdout


def test_a_user_with_blanks_in_a_column_of_fixed_width_is_erased_by_the_same_name(tmp_path, url):
    run("import", written(tmp_path, "user_id,item_id,timestamp\nada ,P-1   ,5\n"), "--url", url)
    assert asyncio.run(history(url, "ada ")) == [("P-1   ", 5, "view", None)]
    assert json.loads(run("erase", "ada ", "--url", url, "--json").stdout) == {"erased": 1}


@pytest.mark.parametrize("asked", [("erase", "ann"), ("stats",)])
def test_a_store_that_is_not_there_is_refused_and_not_made(tmp_path, url, asked):
    with pytest.raises(ConfigError, match=r"events\.db is not there; give the URL that the service has"):
        run(*asked, "--url", url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tenant", ["my shop", "", "café", "x" * 65])
def test_events_are_not_imported_for_a_tenant_that_no_request_could_name(tmp_path, url, tenant):
    with pytest.raises(ConfigError, match=r"no request could name the tenant .*; give 1 to 64 letters"):
        run("import", written(tmp_path, CSV), "--url", url, "--tenant", tenant)
    assert not (tmp_path / "events.db").exists()


def test_no_erasure_is_confirmed_of_a_tenant_that_no_request_could_name(tmp_path, url):
    run("import", written(tmp_path, CSV), "--url", url)
    with pytest.raises(ConfigError, match=r"no request could name the tenant 'défault'; give 1 to 64 letters"):
        run("erase", "a", "--url", url, "--tenant", "défault")


def test_a_user_that_no_store_can_hold_is_told_so(tmp_path, url):
    run("import", written(tmp_path, CSV), "--url", url)
    with pytest.raises(InvalidRequest, match=r"user_id: holds half of a surrogate pair"):
        run("erase", os.fsdecode(b"a\xff"), "--url", url)


def test_what_was_imported_of_a_user_stays_erased_when_the_file_is_imported_again(tmp_path, url):
    run("import", path := written(tmp_path, CSV), "--url", url)
    run("erase", "a", "--url", url)
    assert stored(run("import", path, "--url", url, "--json")) == (0, 4)
    assert "stay erased" in run("import", "--help").stdout


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("key", [None, "mine"])
def test_what_an_import_found_stored_of_a_user_stays_erased_when_the_file_is_imported_again(tmp_path, url, key, rows):
    asyncio.run(sent(url, ("u", Behaviour("i", 5)), key=key))
    path = written(tmp_path, "user_id,item_id,timestamp\n" + "u,i,5\n" * rows)
    assert [stored(run("import", path, "--url", url, "--json")) for _ in range(2)] == [(rows - 1, 1), (0, rows)]
    assert json.loads(run("erase", "u", "--url", url, "--json").stdout) == {"erased": rows}
    assert [stored(run("import", path, "--url", url, "--json")) for _ in range(2)] == [(0, rows)] * 2
    assert asyncio.run(history(url, "u")) == []


def test_dataset_options_reach_the_reader_and_bad_rows_stop_or_are_skipped(tmp_path, url):
    path = written(tmp_path, "who;what;when\na;x;1700000005000\nb;y;soon\n")
    columns = ("--user-column", "who", "--item-column", "what", "--timestamp-column", "when", "--timestamp-unit", "ms")
    with pytest.raises(DataError, match=r"events\.csv:3: timestamp 'soon'"):
        run("import", path, "--url", url, *columns)
    answer = run("import", "table", "--path", path, "--url", url, *columns, "--skip-bad-rows", "--json")
    assert stored(answer) == (1, 0)
    assert json.loads(answer.stdout)["skipped_rows"] == 1


def test_a_file_is_read_as_for_a_model_s_training_where_one_is_named(tmp_path, url):
    read_as = DatasetOptions(name="table", path=tmp_path / "events.csv", user_column="who", action_name=["saw=view"]).described()
    bundle = make_bundle(tmp_path / "shop")
    manifest = bundle.manifest.model_copy(update={"training": {"read_as": read_as}})
    (bundle.path / MANIFEST).write_text(manifest.model_dump_json())
    written(tmp_path, "who,item,time,action\na,x,1,saw\n")
    assert stored(run("import", "--as-trained", tmp_path / "shop", "--url", url, "--json")) == (1, 0)
    later = written(tmp_path, "who,item,time,action\na,x,1,saw\na,y,2,saw\n", "later.csv")
    assert stored(run("import", later, "--as-trained", tmp_path / "shop", "--url", url, "--json")) == (1, 1)


def test_a_model_that_does_not_say_how_its_data_set_was_read_is_refused_with_the_option_to_leave_out(tmp_path, url):
    make_bundle(tmp_path / "shop")
    with pytest.raises(ConfigError, match=r"shop/1 does not say .*; leave --as-trained out, and name the DATASET, one of ml-100k, "):
        run("import", "ml-100k", "--as-trained", tmp_path / "shop", "--url", url)


def test_an_event_that_no_store_takes_is_named_with_the_file_and_its_line(tmp_path, url):
    path = written(tmp_path, f"user_id,item_id,timestamp\n{'u' * 300},i,5\n")
    with pytest.raises(DataError, match=r"events\.csv:2: the user id 'u{20}'\.\.\. has 300 characters, and a request can name 256"):
        run("import", path, "--url", url)


def test_a_name_that_is_neither_dataset_nor_file_lists_the_datasets(url):
    with pytest.raises(UnknownChoice, match="unknown dataset 'ml-3m'; choose from ml-100k"):
        run("import", "ml-3m", "--url", url)


def test_a_file_that_is_not_there_is_told_so(tmp_path, url):
    with pytest.raises(DataError, match=r"evnts\.csv does not exist"):
        run("import", tmp_path / "evnts.csv", "--url", url)


def test_a_bar_is_drawn_when_asked_and_the_summary_is_for_people(tmp_path, url):
    answer = run("import", written(tmp_path, CSV), "--url", url, "--progress")
    assert "4/4" in answer.stderr
    assert "stored 4 events of" in answer.stdout
    assert "0 were there" in answer.stdout
