"""`genrec evaluate`, of a model that has learnt nothing."""

import json
import re

import pytest
import torch
import typer
from typer.testing import CliRunner

from cluster.bundle import RankerRecord
from cluster.bundle_store import BundleStore
from cluster.errors import DataError
from cluster.ranking import Task
from deployments.cli.evaluate import evaluate, print_strategies
from deployments.training import ranking
from deployments.training.dataset_options import DatasetOptions
from deployments.training.plan import ModelPlan
from deployments.training.provenance import READ_AS
from deployments.training.publishing import publish
from pipelines.training_run import new_model

app = typer.Typer()
app.command()(evaluate)


@pytest.mark.parametrize(("split", "measured"), [((), "2 users' last events"), (("--validation",), "1 users' second-last events")])
def test_the_users_that_are_counted_are_those_with_an_event_before_the_one_that_is_measured(tmp_path, monkeypatch, split, measured):
    monkeypatch.setenv("COLUMNS", "200")
    rows = ["ada,1,1", "ada,2,2", "ada,3,3", "bob,1,1", "bob,2,2", "cyd,1,1"]
    (tmp_path / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    asked = DatasetOptions(name="table", path=tmp_path / "events.csv")
    data, record = asked.read(), ModelPlan(dim=8, layers=1, max_history=8).record(items=3)
    publish(tmp_path / "shop", record, new_model(record, seed=0), data, training={READ_AS: asked.described()}, quality={})
    arguments = ["--model-dir", str(tmp_path / "shop"), *split]
    assert f"shop/1, {measured}" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert told["users"] == int(measured[0])


def test_how_many_users_are_ranked_is_told_where_they_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.cli.evaluate.TOLD_USERS", 2)
    monkeypatch.setattr("pipelines.evaluate._USERS_A_BATCH", 1)
    rows = [f"{user},{item},{item}" for user in ("ada", "bob", "cyd") for item in (1, 2, 3)]
    (tmp_path / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    asked = DatasetOptions(name="table", path=tmp_path / "events.csv")
    data, record = asked.read(), ModelPlan(dim=8, layers=1, max_history=8).record(items=3)
    publish(tmp_path / "shop", record, new_model(record, seed=0), data, training={READ_AS: asked.described()}, quality={})
    told = CliRunner().invoke(app, ["--model-dir", str(tmp_path / "shop"), "--json"], catch_exceptions=False)
    assert "2 of 3 users ranked\n" in told.stderr
    assert json.loads(told.stdout)["users"] == 3


def test_a_table_whose_users_have_too_few_events_to_be_measured_is_refused(tmp_path):
    (tmp_path / "events.csv").write_text("user_id,item_id,timestamp\nada,1,1\nada,2,2\nbob,3,3\n")
    (tmp_path / "short.csv").write_text("user_id,item_id,timestamp\nada,1,1\nbob,2,2\ncyd,3,3\n")
    asked = DatasetOptions(name="table", path=tmp_path / "events.csv")
    data, record = asked.read(), ModelPlan(dim=8, layers=1, max_history=8).record(items=3)
    publish(tmp_path / "shop", record, new_model(record, seed=0), data, training={READ_AS: asked.described()}, quality={})
    for arguments, least in (("--path", str(tmp_path / "short.csv")), 2), (("--validation",), 3):
        with pytest.raises(DataError, match=rf"no user of .*\.csv has {least} events, so there is nothing to measure"):
            CliRunner().invoke(app, ["--model-dir", str(tmp_path / "shop"), *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("training", "known"),
    [({"options": {"validate_every": 1}}, False), ({"options": {"validate_every": 1}, "refit": True}, True), ({}, True)],
)
def test_figures_of_events_that_the_version_has_learnt_say_so(tmp_path, monkeypatch, training, known):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", "ada,1,1", "ada,2,2", "ada,3,3"]))
    asked = DatasetOptions(name="table", path=tmp_path / "events.csv")
    data, record = asked.read(), ModelPlan(dim=8, layers=1, max_history=8).record(items=3)
    told = {READ_AS: asked.described(), **training}
    publish(tmp_path / "shop", record, new_model(record, seed=0), data, training=told, quality={})
    arguments = ["--model-dir", str(tmp_path / "shop")]
    shown = [CliRunner().invoke(app, [*arguments, *split], catch_exceptions=False).output for split in ((), ("--validation",))]
    assert ["which it has learnt" in one for one in shown] == [False, known]


class Liking:
    """A ranker that predicts `liking` for one item, and 0 for all others."""

    def __init__(self, item, liking):
        self.item, self.liking = item, liking

    def after(self, sequence, candidates):
        return torch.where(candidates == self.item, self.liking, 0.0)[:, None]


@pytest.mark.parametrize(("liking", "mrr"), [(1.0, 1.0), (-1.0, (1 / 5 + 1 / 5 + 1 / 3) / 3)], ids=["first", "last"])
def test_where_the_ranker_is_the_last_stage_the_lists_in_its_order_are_measured_too(tmp_path, monkeypatch, liking, mrr):
    monkeypatch.setenv("COLUMNS", "200")
    users = {"ada": "123", "bob": "213", "cyd": "45673"}
    rows = [f"{user},{item},{time}" for user, items in users.items() for time, item in enumerate(items, start=1)]
    (tmp_path / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    asked = DatasetOptions(name="table", path=tmp_path / "events.csv")
    data, record = asked.read(), ModelPlan(dim=8, layers=1, max_history=8).record(items=7)
    monkeypatch.setattr(ranking, "load_ranker", lambda bundle: Liking(data.catalogue.index_of("3"), liking))
    store, arguments = BundleStore(tmp_path / "shop"), ["--model-dir", str(tmp_path / "shop")]
    bundle = publish(store.root, record, new_model(record, seed=0), data, training={READ_AS: asked.described()}, quality={})
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)["strategies"] is None
    with store.recompile(bundle) as draft:
        draft.ranker = RankerRecord(family="fake", config={}, tasks=(Task.CLICK,), last_stage=True)
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)["strategies"]
    assert (list(told), told["ranked"]["mrr"]) == (["retrieval", "ranked"], pytest.approx(mrr))
    monkeypatch.setattr("pipelines.evaluate.evaluate", None)  # the encoder's ranking, which takes minutes and is not shown here
    assert "ranked" in CliRunner().invoke(app, arguments, catch_exceptions=False).output


def test_a_figure_that_a_strategy_does_not_have_is_shown_as_a_dash(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    print_strategies({"retrieval": {"hr@10": 0.1, "hr@50": 0.2, "mrr": 0.3}, "unified": {"hr@10": 0.4, "mrr": 0.5}}, "shop/1")
    (unified,) = [line for line in capsys.readouterr().out.splitlines() if "unified" in line]
    assert re.findall(r"[\w.-]+", unified) == ["unified", "0.4000", "-", "0.5000"]
