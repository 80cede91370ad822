"""The messages of the HTTP interface: what is taken, what is refused, what is sent."""

import json
import sys
import threading
from collections import UserDict

import pytest
from pydantic import ValidationError

from cluster.dataset import Catalogue
from cluster.events.store import StoredHistory
from cluster.ranking import RankedItem, Ranking, Task
from cluster.titled_items import TitledItems
from cluster.values import (
    Action,
    Behaviour,
    CacheReport,
    Explanation,
    Item,
    Recommendation,
    RecommendRequest,
    SamplingOptions,
    ScoredItem,
    SimilarItem,
    SkippedBackend,
    StageReport,
)  # fmt: skip
from deployments.http.answer_json import FEW, FEW_EVENTS, answer_json, history_json, ranking_json, written, written_history
from deployments.http.event_messages import HistoryOut
from deployments.http.messages import RecommendIn, RecommendOut
from deployments.http.ranking import RankOut


def parsed(**fields):
    return RecommendIn.model_validate_json(json.dumps({"user_id": "u", **fields})).to_value()


def test_what_is_not_said_has_the_values_own_defaults():
    assert parsed() == RecommendRequest("u")
    assert parsed(sampling={}).sampling == SamplingOptions()


def test_every_wish_reaches_the_pipeline():
    sampling = {"samples": 64, "temperature": 0.8, "top_k": 10, "top_p": 0.9, "seed": 3}
    resolved = {"strategy": "generative", "diversity": 0.5, "freshness": 0.25, "explain": True, "deadline_ms": 80}
    request = parsed(**resolved, sampling=sampling)
    assert {name: getattr(request, name) for name in resolved} == resolved
    assert request.sampling == SamplingOptions(**sampling)


def test_the_time_for_the_answer_runs_from_the_arrival_of_the_request():
    message = RecommendIn(user_id="u", deadline_ms=80)
    assert message.to_value(arrived=1000.0).deadline == pytest.approx(1000.08)
    assert message.to_value().deadline is None
    assert RecommendIn(user_id="u").to_value(arrived=1000.0).deadline is None


@pytest.mark.parametrize("example", RecommendIn.model_config["json_schema_extra"]["examples"])
def test_the_documented_examples_are_requests(example):
    assert RecommendIn.model_validate(example).to_value().user_id == "196"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"strategy": "both"}, ("strategy",)),
        ({"diversity": 1.1}, ("diversity",)),
        ({"diversity": -0.1}, ("diversity",)),
        ({"freshness": 2}, ("freshness",)),
        ({"explain": "perhaps"}, ("explain",)),
        ({"deadline_ms": 0}, ("deadline_ms",)),
        ({"deadline_ms": 10**400}, ("deadline_ms",)),
        ({"deadline_ms": 600_001}, ("deadline_ms",)),
        ({"sampling": {"samples": 0}}, ("sampling", "samples")),
        ({"sampling": {"samples": 1025}}, ("sampling", "samples")),
        ({"sampling": {"temperature": 10.1}}, ("sampling", "temperature")),
        ({"sampling": {"top_p": 0}}, ("sampling", "top_p")),
        ({"sampling": {"top_k": -1}}, ("sampling", "top_k")),
        ({"sampling": {"seed": -1}}, ("sampling", "seed")),
        ({"sampling": {"seed": 2**63}}, ("sampling", "seed")),
        ({"sampling": {"beam": 3}}, ("sampling", "beam")),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_its_field(fields, where):
    with pytest.raises(ValidationError) as refused:
        parsed(**fields)
    assert refused.value.errors()[0]["loc"] == where


@pytest.mark.parametrize("field", ["diversity", "freshness", "deadline_ms"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(field, number):
    with pytest.raises(ValidationError):
        RecommendIn.model_validate_json(f'{{"user_id": "u", "{field}": {number}}}')


def test_an_answer_is_sent_with_its_explanations_and_who_served():
    film, seen = Item("7", "Seven", {"year": "1995"}), SimilarItem(Item("8", "Eight"), 0.5)
    why = Explanation(retrieval=0.25, blended=-1.5, similar=(seen,))
    report = StageReport("generate", "none", 1.23456, (SkippedBackend("generator", "it broke", failed=True),))
    answer = Recommendation("u", (ScoredItem(film, -1.5, "blend", why), ScoredItem(film, -2.0, "blend")), (report,), "m/1", True, ("x",))
    sent = RecommendOut.model_validate_json(answer_json(answer)).model_dump()
    assert sent["items"][0] == {
        "item_id": "7", "title": "Seven", "attributes": {"year": "1995"}, "score": -1.5, "stage": "blend",
        "explanation": {
            "retrieval": 0.25, "generation": None, "blended": -1.5, "ranking": None, "popularity": None, "freshness": None,
            "similar": [{"item_id": "8", "title": "Eight", "similarity": 0.5}],
        },
    }  # fmt: skip
    assert sent["items"][1]["explanation"] is None
    skipped = {"backend": "generator", "reason": "it broke", "failed": True}
    assert sent["stages"] == [{"stage": "generate", "backend": "none", "duration_ms": 1.235, "fallback_from": [skipped]}]
    assert (sent["degraded"], sent["model_version"], sent["unknown_items"]) == (True, "m/1", ["x"])


def test_an_answer_is_written_as_its_model_would_be():
    why = Explanation(retrieval=0.25, popularity=1e-9, similar=(SimilarItem(Item("8", "Ei\u00e9ght \u2028"), 0.5),))
    report = StageReport("encode", "torch", 1.23456, (SkippedBackend("tensorrt", 'no "GPU"', failed=True),))
    items = tuple(ScoredItem(Item("7", "Seven", {"year": "1995"}), score, "blend", why) for score in (-1.5, 3.0, 1e15))
    for cache in (None, CacheReport("l2", 1.23456, stale=True)):
        answer = Recommendation("u", items, (report,), "m/1", True, ("x",), cache)
        told = answer_json(answer)
        assert told == RecommendOut.model_validate_json(told).model_dump_json().encode()


class NotedReads(UserDict):
    """Attributes of an item; `threads`: where they are read."""

    def __init__(self, threads):
        super().__init__(year="1995")
        self.threads = threads

    def keys(self):
        self.threads.add(threading.get_ident())
        return super().keys()


async def test_an_answer_of_many_explained_items_is_written_in_a_thread_and_one_of_few_is_not():
    for count, here in ((FEW, True), (FEW + 1, False)):
        threads = set()
        items = tuple([ScoredItem(Item("7", "Seven", NotedReads(threads)), 0.5, "blend", Explanation(retrieval=0.25))] * count)
        sent = json.loads(await written(Recommendation("u", items, (), "m/1", False)))
        assert [one["attributes"] for one in sent["items"]] == [{"year": "1995"}] * count
        assert (threads == {threading.get_ident()}) is here


def test_a_history_is_written_as_its_model_would_be():
    values = (None, 5.0, -0.25, 1e-9, 1e12)
    done = tuple(Behaviour(item, 1000, action, value) for item in ("7", "x\u2028") for action in Action for value in values)
    told = history_json("shop", 'a"d\u00e9', StoredHistory(done, "1-2", 40), Catalogue([Item("7", "Ei\u00e9ght")]))
    assert told == HistoryOut.model_validate_json(told).model_dump_json().encode()
    assert [(one["item_id"], one["title"], one["value"]) for one in json.loads(told)["events"]] == [
        (one.item_id, "Ei\u00e9ght" if one.item_id == "7" else None, one.value) for one in done
    ]


class NotedLooks(Catalogue):
    """A catalogue; `threads`: where it is asked for items."""

    def index_of(self, item_id):
        self.__dict__.setdefault("threads", set()).add(threading.get_ident())
        return super().index_of(item_id)


async def test_a_long_history_is_written_in_a_thread_and_a_short_one_is_not():
    for count, here in ((FEW_EVENTS, True), (FEW_EVENTS + 1, False)):
        catalogue = NotedLooks([Item("7", "Seven")])
        told = json.loads(await written_history("shop", "ada", StoredHistory((Behaviour("7", 1000),) * count, "1-2"), catalogue))
        assert (len(told["events"]), catalogue.threads == {threading.get_ident()}) == (count, here)


def test_of_a_large_catalogue_the_beginnings_of_the_latest_items_are_kept(monkeypatch):
    monkeypatch.setattr("cluster.dataset.JSON_KEPT", 2)
    beginnings = Catalogue([Item(str(number), "A film") for number in range(1, 6)]).beginnings
    for index in (1, 2, 3, 1, 3, 5):
        assert beginnings[index].startswith(f'{{"item_id":"{index}","title":"A film"')
    assert [*beginnings] == [1, 5], "3 was asked for again, but not made again"


def test_items_in_columns_are_written_as_items_in_objects_are():
    catalogue = Catalogue([Item("7", 'Se"ven\\', {"year": "1995"}), Item("8", "Ei\u00e9ght \u2028")])
    columns = TitledItems(catalogue, [2, 1, 2], [1e-7, -1.5, 3e20], "blend")
    seven = {"item_id": "7", "title": 'Se"ven\\', "attributes": {"year": "1995"}, "stage": "blend", "explanation": None}
    eight = {"item_id": "8", "title": "Ei\u00e9ght \u2028", "attributes": {}, "stage": "blend", "explanation": None}
    for items in (columns, tuple(columns)):
        sent = json.loads(answer_json(Recommendation("u", items, (), "m/1", False)))
        assert sent["items"] == [{**eight, "score": 1e-7}, {**seven, "score": -1.5}, {**eight, "score": 3e20}]


def test_a_score_that_is_no_number_is_sent_as_null():
    catalogue = Catalogue([Item("7", "Seven"), Item("8", "Eight")])
    columns = TitledItems(catalogue, [1, 2], [float("nan"), 0.5], "rank")
    for items in (columns, tuple(columns)):
        assert [one["score"] for one in json.loads(answer_json(Recommendation("u", items, (), "m/1", False)))["items"]] == [None, 0.5]


SEVEN, EIGHT = Item("7", 'Se"ven\\', {"year": "1995", "genres": "Dr\u00e4ma"}), Item("8", "Ei\u00e9ght \u2028")


def test_a_ranking_is_written_as_its_model_would_be():
    report = StageReport("rank", "torch", 1.23456, (SkippedBackend("tensorrt", 'no "GPU"', failed=True),))
    items = (RankedItem(SEVEN, 0.1234567, {"click": 1e-9, Task.RATING: 4.5}), RankedItem(EIGHT, -3.5e-7), RankedItem(SEVEN, 3.0))
    told = ranking_json(Ranking('a"d\u00e9', items, (report,), "m/1", True, ("x\u2028",)))
    assert told == RankOut.model_validate_json(told).model_dump_json().encode()
    sent = json.loads(told)
    assert sent["items"] == [
        {
            "item_id": one.item.item_id, "title": one.item.title, "attributes": one.item.attributes,
            "score": one.score, "predictions": one.predictions,
        }
        for one in items
    ]  # fmt: skip
    assert (sent["user_id"], sent["degraded"], sent["model_version"], sent["unknown_items"]) == ('a"d\u00e9', True, "m/1", ["x\u2028"])
    skipped = {"backend": "tensorrt", "reason": 'no "GPU"', "failed": True}
    assert sent["stages"] == [{"stage": "rank", "backend": "torch", "duration_ms": 1.235, "fallback_from": [skipped]}]


def test_a_ranking_without_items_has_an_empty_list():
    told = ranking_json(Ranking("ada", (), (), "m/1", False))
    assert RankOut.model_validate_json(told).items == []


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_numbers_of_a_ranking_that_are_none_are_sent_as_null(number):
    items = (RankedItem(SEVEN, number, {"click": number, "rating": 0.5}), RankedItem(EIGHT, 0.5, {"click": 0.25}))
    one, two = json.loads(ranking_json(Ranking("ada", items, (), "m/1", False)))["items"]
    assert (one["score"], one["predictions"]) == (None, {"click": None, "rating": 0.5})
    assert (two["score"], two["predictions"]) == (0.5, {"click": 0.25})


def calls_of_python(function):
    """How many functions written in Python are called while this one runs."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_ranking_is_written_without_a_call_of_python_for_each_candidate():
    answer = Ranking("ada", (RankedItem(SEVEN, 0.5, {Task.CLICK: 0.5}),) * 1000, (), "m/1", False)
    assert calls_of_python(lambda: ranking_json(answer)) < 100
