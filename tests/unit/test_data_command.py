import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.dataset import Interactions
from cluster.errors import ConfigError, DataError, UnknownChoice
from cluster.values import Action
from deployments.cli import data
from deployments.cli.data import app
from deployments.cli.dataset_options import DATASET, OPTIONAL_DATASET
from deployments.cli.fields import with_fields
from deployments.training.dataset_options import DatasetOptions, as_trained
from deployments.training.provenance import READ_AS
from integrations.datasets.options import TimestampUnit
from integrations.datasets.repeats import in_one_second, last_item_met_before, repeated
from tests.unit.test_datasets_table import CSV, written


def run(application, *arguments):
    return CliRunner().invoke(application, list(arguments), catch_exceptions=False)


def test_inspect_prints_one_json_object_with_users_items_events_span_lengths_and_actions(tmp_path):
    path = written(tmp_path, CSV)
    answer = run(app, "inspect", "table", "--path", str(path), "--json")
    assert answer.exit_code == 0
    summary = json.loads(answer.stdout)
    assert (summary["users"], summary["items"], summary["events"], summary["skipped_rows"]) == (2, 3, 4, 0)
    assert (summary["from"], summary["to"]) == ("1970-01-01T00:01:40Z", "1970-01-01T00:05:00Z")
    assert summary["lengths"]["p50"] == 2
    assert summary["actions"] == {"view": 1, "click": 1, "like": 1, "purchase": 1}


def test_inspect_prints_a_table_for_people(tmp_path):
    answer = run(app, "inspect", "table", "--path", str(written(tmp_path, CSV)))
    assert "purchase 1" in answer.stdout
    assert "events" in answer.stdout


def test_inspect_prints_every_digit_of_a_large_count(monkeypatch):
    monkeypatch.setattr(data, "open_dataset", lambda _: None)
    summary = {"lengths": {"p50": 12.5, "p100": 1_000_210.0}, "actions": {"view": 1_000_210}, "events": 1_000_210}
    monkeypatch.setattr(data, "summarise", lambda _: summary)
    shown = run(app, "inspect", "ml-100k").stdout
    assert [line.split() for line in shown.splitlines()] == [
        ["lengths", "p50", "12.5", "p100", "1,000,210"], ["actions", "view", "1,000,210"], ["events", "1,000,210"],
    ]  # fmt: skip


def test_inspect_prints_a_name_with_brackets_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, CSV, "clicks [all].csv")
    name, source, *_ = run(app, "inspect", "table", "--path", "clicks [all].csv").stdout.splitlines()
    assert (name.split(maxsplit=1)[1].strip(), source.split(maxsplit=1)[1].strip()) == ("clicks [all]", "clicks [all].csv")


@pytest.mark.parametrize("option", ["--path", "--items"])
def test_a_path_that_no_manifest_could_name_is_refused_before_anything_is_read(option):
    with pytest.raises(ConfigError, match=rf"{option}: '.*caf\\udce9\.csv' is no Unicode text, .*; rename it"):
        run(app, "inspect", "table", option, "caf\udce9.csv")


def test_skipped_rows_are_told_on_stderr_and_counted(tmp_path):
    path = written(tmp_path, CSV + "a,x,abc,view,\n")
    answer = run(app, "inspect", "table", "--path", str(path), "--skip-bad-rows", "--json")
    assert json.loads(answer.stdout)["skipped_rows"] == 1
    assert "skipped 1 bad rows" in answer.stderr
    assert f"{path}:6: timestamp 'abc'" in answer.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--items", "items.csv"), ("--timestamp-unit", "ms"), ("--delimiter", ";"), ("--user-column", "who"),
                          ("--action-name", "saw=view"), ("--default-action", "like"), ("--item-title-column", "name")],
)  # fmt: skip
def test_options_of_a_table_are_refused_with_movielens_which_would_ignore_them(tmp_path, option, value):
    with pytest.raises(ConfigError, match=rf"{option}: of a table only, and ml-100k is none; leave them out"):
        run(app, "inspect", "ml-100k", "--path", str(tmp_path), option, value)


def test_a_file_in_the_place_of_a_dataset_s_name_is_told_how_it_is_read():
    with pytest.raises(ConfigError, match=r"'ok\.csv' is no dataset but a file of yours; say: table --path ok\.csv"):
        run(app, "inspect", "ok.csv")


def test_mapping_flags_reach_the_reader(tmp_path):
    path = written(tmp_path, "who;what;when;how;rest\na;x;1700000005000;buy;1\n")
    items = written(tmp_path, "sku;label\nx;An X\n", "items.csv")
    options = DatasetOptions(
        name="table",
        path=path,
        items=items,
        user_column="who",
        item_column="what",
        timestamp_column="when",
        action_column="how",
        value_column="rest",
        item_id_column="sku",
        item_title_column="label",
        timestamp_unit=TimestampUnit.MILLISECONDS,
        action_name=["Buy=purchase"],
    )
    dataset = options.read()
    assert dataset.catalogue[1].title == "An X"
    assert dataset.interactions.timestamps.tolist() == [1_700_000_005]


def test_a_progress_bar_is_drawn_on_stderr_when_asked(tmp_path):
    path = written(tmp_path, "user,item,timestamp\na,x,1700000000\na,y,1700000001\n")
    asked = run(app, "inspect", "table", "--path", str(path), "--progress", "--json")
    assert json.loads(asked.stdout)["events"] == 2
    assert "events.csv" in asked.stderr
    assert run(app, "inspect", "table", "--path", str(path), "--json").stderr == ""


def test_times_that_can_hardly_be_are_told(tmp_path):
    days = run(app, "inspect", "table", "--path", str(path := written(tmp_path, "user,item,timestamp\na,x,19000\na,y,19675\n")))
    assert f"all events of {path} lie in 1970, the latest at 1970-01-01T05:27:55Z" in days.stderr
    ahead = run(app, "inspect", "table", "--path", str(path := written(tmp_path, "user,item,timestamp\na,x,1700000000\na,y,99999999999\n")))
    assert f"1 events of {path} lie more than a day ahead of this machine's clock; is another --timestamp-unit meant?" in ahead.stderr


def of_users(tmp_path, rows, users=40):
    """A table in which each user has these rows, of item and time."""
    lines = [f"u{user},{item},{time}" for user in range(users) for item, time in rows]
    return str(written(tmp_path, "\n".join(["user,item,timestamp", *lines]) + "\n"))


def test_rows_that_are_written_twice_are_told_and_clean_ones_are_not(tmp_path):
    clean = [(item, 1_700_000_000 + item) for item in range(8)]
    answer = run(app, "inspect", "table", "--path", of_users(tmp_path, clean), "--json")
    summary = json.loads(answer.stdout)
    assert [summary[name] for name in ("repeated_events", "events_in_one_second", "last_item_met_before")] == [0, 0, 0]
    assert answer.stderr == ""
    answer = run(app, "inspect", "table", "--path", (path := of_users(tmp_path, clean * 2)), "--json")
    summary = json.loads(answer.stdout)
    assert [summary[name] for name in ("repeated_events", "events_in_one_second", "last_item_met_before")] == [320, 320, 1]
    told = f"320 of the 640 events of {path} equal another one in user, item, second, action and value, as that of user 'u0' and item "
    assert answer.stderr.startswith(f"{told}'0' at 2023-11-14T22:13:20Z: a model learns to repeat the last event")
    assert answer.stderr.endswith("; write rows that are distinct in the columns that are read, with times in whole seconds\n")
    assert answer.stderr.count("\n") == 1


def test_events_at_one_time_are_told_and_some_of_one_second_are_not(tmp_path):
    some = [(item, 1_700_000_000 + item // 3) for item in range(9)]
    assert run(app, "inspect", "table", "--path", of_users(tmp_path, some), "--json").stderr == ""
    told = run(app, "inspect", "table", "--path", (path := of_users(tmp_path, [(item, 1_700_000_000) for item in range(9)]))).stderr
    assert told.startswith(
        f"320 of the 360 events of {path} lie in the same second as their user's event before, as that of user 'u0' and "
    )
    assert told.count("\n") == 1


ROW = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2), st.integers(0, 1), st.sampled_from([1.0, 2.0, np.nan]))


@given(rows=st.lists(ROW))
def test_repeats_are_those_that_are_found_row_by_row(rows):
    rows.sort(key=lambda row: (row[0], row[2]))
    users, items, times, actions, values = np.array(rows, np.float64).reshape(-1, 5).T
    offsets = np.searchsorted(users, np.arange(4))
    events = Interactions(["a", "b", "c"], offsets, items.astype(np.int32), times.astype(np.int64), actions.astype(np.int8), values)
    found = repeated(events)
    assert len(found) == len(rows) - len({tuple(map(str, row)) for row in rows})
    assert len({tuple(map(str, row)) for number, row in enumerate(rows) if number not in set(found.tolist())}) == len(rows) - len(found)
    own = [[row[1] for row in rows if row[0] == user] for user in range(3)]
    again = [user[-1] in user[:-1] for user in own if len(user) > 1]
    assert last_item_met_before(events) == (sum(again) / len(again) if again else 0)
    assert np.count_nonzero(in_one_second(events)) == len(rows) - len({(row[0], row[2]) for row in rows})


def test_unknown_names_and_mappings_list_the_choices():
    with pytest.raises(UnknownChoice, match="unknown dataset 'ml-3m'; choose from ml-100k"):
        DatasetOptions(name="ml-3m").read()
    with pytest.raises(UnknownChoice, match="ml-100k"):
        run(app, "fetch", "table")
    with pytest.raises(ConfigError, match="--action-name 'buy=bought' is not NAME=ACTION with an action out of view"):
        DatasetOptions(name="table", action_name=["buy=bought"]).read()


def test_a_model_s_data_set_is_read_again_by_the_options_of_its_training_unless_others_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = DatasetOptions(
        name="table", path=Path("events.csv"), user_column="who", timestamp_unit=TimestampUnit.MILLISECONDS,
        action_name=["Buy=purchase"], default_action=Action.CLICK, progress=False, cache=tmp_path / "cache",
    )  # fmt: skip
    trained = trained_on(json.loads(json.dumps(asked.described())))
    again = asked.model_copy(update={"path": tmp_path / "events.csv", "progress": None, "cache": None})  # of one run
    assert as_trained(DatasetOptions(), trained) == again
    grown = DatasetOptions(path=Path("grown.csv"), user_column="user")
    assert as_trained(grown, trained) == again.model_copy(update={"path": Path("grown.csv"), "user_column": "user"})
    usual = DatasetOptions(timestamp_unit=TimestampUnit.SECONDS, default_action=Action.VIEW)
    assert as_trained(usual, trained) == again.model_copy(update=usual.model_dump(include={"timestamp_unit", "default_action"}))


def test_options_of_a_table_that_a_model_of_movielens_records_are_dropped_and_given_ones_refused(tmp_path):
    recorded = {"name": "ml-100k", "path": str(tmp_path), "default_action": "like", "delimiter": ";", "skip_bad_rows": True}
    again = as_trained(DatasetOptions(), trained_on(recorded))
    assert again == DatasetOptions(name="ml-100k", path=tmp_path, skip_bad_rows=True)
    with pytest.raises(DataError):  # of what is to be read, not of options
        again.read()
    with pytest.raises(ConfigError, match="--delimiter: of a table only, and ml-100k is none; leave them out"):
        as_trained(DatasetOptions(delimiter=","), trained_on(recorded)).read()


@pytest.mark.parametrize("recorded", [None, "table", {"timestamp_unit": "weeks"}])
def test_a_model_that_does_not_say_how_its_data_set_was_read_is_refused_with_the_cure(recorded):
    with pytest.raises(ConfigError, match=r"shop/1 does not say which data set it was trained on .* name the DATASET, one of ml-100k"):
        as_trained(DatasetOptions(), trained_on(recorded))


def trained_on(recorded):
    return SimpleNamespace(version="shop/1", manifest=SimpleNamespace(training={READ_AS: recorded}))


def test_the_data_set_may_be_left_out_only_where_a_model_says_it():
    left_out = typer.Typer()

    @left_out.command()
    @with_fields
    def tell(dataset: Annotated[DatasetOptions, OPTIONAL_DATASET]):
        typer.echo(f"name {dataset.name!r}")

    assert run(left_out).stdout == "name ''\n"
    assert "Missing argument 'DATASET'" in run(app, "inspect").stderr
    with pytest.raises(ConfigError, match="say which DATASET to read, one of ml-100k"):
        DatasetOptions().read()


def test_another_command_takes_the_same_options_beside_its_own(tmp_path):
    got = {}
    application = typer.Typer()

    @application.command()
    @with_fields
    def train(dataset: Annotated[DatasetOptions, DATASET], epochs: Annotated[int, typer.Option()] = 3):
        got.update(dataset=dataset, epochs=epochs)

    assert run(application, "table", "--path", str(tmp_path), "--epochs", "7", "--action-name", "a=view").exit_code == 0
    assert got == {"dataset": DatasetOptions(name="table", path=tmp_path, action_name=["a=view"]), "epochs": 7}
