"""examples/score_parquet.py without Ray Data: what one of its actors does with a block of users. With it: tests/integration."""

import asyncio
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest

from cluster.bundle_store import BundleStore
from cluster.values import LATEST_TIMESTAMP, Action, Behaviour, RecommendRequest, StageAnswer, StageReport
from integrations.hstu.encoder import TorchEncoder
from pipelines.recommend import Recommender
from tests.bundles import make_bundle, make_generative_bundle
from tests.examples import example

score_parquet = example("score_parquet")
NOW = 1_701_000_000
USERS = [{"user_id": f"u{number}", "item_ids": [str(number + 1), "7", "nowhere"], "timestamps": [5, 6, 7]} for number in range(20)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "tiny"
    make_bundle(root)
    return root


def expected(model_dir, rows, **options):
    """By the pipeline over a torch encoder, one after the other."""
    bundle, encoder = BundleStore(model_dir).open(), TorchEncoder()
    encoder.load(bundle)

    async def encode(request, within_s):
        return StageAnswer(encoder.infer(request), StageReport("encode", "torch", 1.0), bundle.identity)

    recommender = Recommender(bundle, encode)
    requests = [RecommendRequest(row["user_id"], score_parquet.behaviours(row), **options) for row in rows]
    return [asyncio.run(recommender.recommend(request)) for request in requests]


def answers_of(model_dir, rows, options):
    with closing(score_parquet.Scorer(model_dir, options)) as scorer:
        return scorer(pa.Table.from_pylist(rows)).to_pylist()


def test_each_user_of_a_block_gets_what_the_pipeline_gives_them(model_dir):
    options = {"k": 4, "request_time": NOW}
    scored = answers_of(model_dir, USERS, options)
    answers = expected(model_dir, USERS, **options)
    assert [row["user_id"] for row in scored] == [answer.user_id for answer in answers]
    for row, answer in zip(scored, answers, strict=True):
        assert row["item_ids"] == [one.item.item_id for one in answer.items]
        assert row["scores"] == pytest.approx([one.score for one in answer.items], abs=1e-5)
        assert not row["degraded"]


def test_a_user_without_events_and_an_event_without_an_action_are_answered(model_dir):
    rows = [
        {"user_id": "new", "item_ids": None, "timestamps": None, "actions": None},
        {"user_id": "ada", "item_ids": ["1", "7"], "timestamps": [5, 6], "actions": [None, "click"]},
    ]
    assert [one.action for one in score_parquet.behaviours(rows[1])] == [Action.VIEW, Action.CLICK]
    scored = answers_of(model_dir, rows, {"k": 4, "request_time": NOW})
    assert [len(row["item_ids"]) for row in scored] == [4, 4]


def test_a_decoder_generates_where_it_is_asked_to(tmp_path):
    make_generative_bundle(tmp_path / "tiny")
    lists = {}
    for strategy in ("retrieval", "generative", "unified"):
        options = {"k": 4, "request_time": NOW, "strategy": strategy}
        scored = answers_of(tmp_path / "tiny", USERS[:3], options)
        assert [(len(row["item_ids"]), row["degraded"]) for row in scored] == [(4, False)] * 3
        lists[strategy] = scored[0]["item_ids"]
    assert lists["generative"] != lists["retrieval"]


def test_actions_and_values_are_read_where_there_are_any():
    row = {"item_ids": [50, 7], "timestamps": [1, 2], "actions": ["rating", "click"], "values": [4.5, None]}
    assert score_parquet.behaviours(row) == (Behaviour("50", 1, Action.RATING, 4.5), Behaviour("7", 2, Action.CLICK))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        score_parquet.behaviours({"item_ids": ["1", "2"], "timestamps": [1]})


def scored(model_dir, monkeypatch, rows, *arguments):
    """The answers, and the options that the command line's arguments make."""
    made = []
    monkeypatch.setattr(score_parquet.ray, "init", lambda **_: None)
    monkeypatch.setattr(score_parquet, "score", lambda users, out, model_dir, options, **_: made.append(options))
    monkeypatch.setattr("sys.argv", ["score_parquet.py", "users", "out", *arguments])
    score_parquet.main()
    return answers_of(model_dir, rows, made[0])


def test_an_event_ahead_of_the_clock_is_answered_unless_a_moment_is_named_and_then_its_user_is_told(model_dir, monkeypatch):
    rows = [{"user_id": "ada", "item_ids": ["1"], "timestamps": [LATEST_TIMESTAMP]}, USERS[0]]
    assert [len(row["item_ids"]) for row in scored(model_dir, monkeypatch, rows, "--k", "4")] == [4, 4]
    with pytest.raises(ValueError, match=rf"^user 'ada': behaviours\[0\]\.timestamp: {LATEST_TIMESTAMP} is after request_time \({NOW}\)"):
        scored(model_dir, monkeypatch, rows, "--request-time", str(NOW))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"timestamps": [NOW * 1000]}, f"timestamp {NOW * 1000} is after the year 2100; timestamps are whole seconds, not milliseconds"),
        ({"timestamps": [-1]}, r"Expected `int` >= 0 - at `\$\[0\]\.timestamp`"),
        ({"timestamps": [None]}, r"Expected `int`, got `null` - at `\$\[0\]\.timestamp`"),
        ({"timestamps": [1.5]}, "Expected `int`, got `float`"),
        ({"timestamps": [float("nan")]}, "Expected `int`, got `float`"),
        ({"item_ids": ["1", None], "timestamps": [1, 2]}, r"Expected `str`, got `null` - at `\$\[1\]\.item_id`"),
        ({"item_ids": [""]}, "Expected `str` of length >= 1"),
        ({"item_ids": ["1" * 257]}, "Expected `str` of length <= 256"),
        ({"item_ids": [1.5]}, "Expected `str`, got `float`"),
        ({"actions": ["saw"]}, "Invalid enum value 'saw'"),
        ({"values": [1e300]}, "Expected `float` <= 1000000000000.0"),
        ({"values": [float("nan")]}, "Expected `float` >= -1000000000000.0"),
        ({"timestamps": []}, r"zip\(\) argument 2 is shorter"),
    ],
)
def test_what_is_wrong_with_an_event_is_told_with_its_user(changed, problem):
    with pytest.raises(ValueError, match=f"^user 'ada': {problem}"):
        score_parquet.request_of({"user_id": "ada", "item_ids": ["1"], "timestamps": [1], **changed}, {"k": 4})


@pytest.mark.parametrize(
    ("user_id", "problem"), [(None, "user None: Expected `str`, got `null`"), ("", "user '': Expected `str` of length >= 1")]
)
def test_a_user_without_an_id_is_refused(user_id, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        score_parquet.request_of({"user_id": user_id, "item_ids": ["1"], "timestamps": [1]}, {"k": 4})


def test_whole_numbers_are_taken_as_ids_and_as_timestamps_in_floats_too():
    request = score_parquet.request_of({"user_id": 3, "item_ids": [50], "timestamps": [7.0]}, {"k": 4})
    assert (request.user_id, request.behaviours) == ("3", (Behaviour("50", 7),))


def test_a_users_events_become_one_row():
    events = pa.table({"user_id": [3, 3], "item_id": [50, 7], "timestamp": np.array([1, 2]), "value": [4.5, None]})
    assert score_parquet.history_of(events).to_pylist() == [
        {"user_id": 3, "item_ids": [50, 7], "timestamps": [1, 2], "values": [4.5, None]}
    ]


def test_a_block_without_users_is_an_empty_table_of_the_same_columns():
    assert score_parquet.table_of([]).schema == score_parquet.ANSWERS
