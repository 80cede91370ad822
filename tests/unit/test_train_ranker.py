"""What events teach a ranker, how it is trained and measured, and whether it is to be the last stage."""

import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster.bundle import MANIFEST, Artifact, FailedStep, ModelRecord, RankerRecord
from cluster.bundle_store import BundleStore
from cluster.compilation import why_missing
from cluster.dataset import Catalogue, Dataset, Interactions
from cluster.errors import DataError
from cluster.ranking import RatingScale, Task
from cluster.values import Action, Encoded, Generated, Item
from deployments.training import ranking
from deployments.training.publishing import publish
from deployments.training.ranking import RankingPart, publish_ranking, train_ranking, train_ranking_of
from integrations.hstu.config import HSTUConfig
from integrations.hstu.model import HSTU
from integrations.hstu.ranker import HSTURanker
from pipelines.blend import BlendWeights
from pipelines.drawing import Drawing
from pipelines.epochs import EpochReport
from pipelines.evaluate_ranker import auc, ranker_quality
from pipelines.generative_run import Lists
from pipelines.ranker_run import TrainedRanker, improves, last_stage_quality, new_ranker, ranker_record, train_ranker
from pipelines.ranking_labels import labels, tasks_of
from pipelines.splits import TEST, VALIDATION, held_out
from pipelines.train_ranker import RankerOptions, RankerTrainer
from pipelines.training_run import RunOptions, TrainingRun, new_model
from tests.unit.test_training_run import Watcher
from tests.windows import CountedWindows

ITEMS = 30
CPU = torch.device("cpu")


def shoppers(users=120, seed=0, actions=(Action.VIEW, Action.RATING, Action.PURCHASE)) -> Interactions:
    """Users who walk from item to item; item 3n is always bought, item 3n + 1 rated, 5 where n is even and 1 where it is odd, the rest
    viewed.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 16, users)
    items = [(rng.integers(ITEMS) + np.arange(length)) % ITEMS + 1 for length in lengths]
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    all_items = np.concatenate(items)
    kinds = np.select([all_items % 3 == 0, all_items % 3 == 1], [Action.PURCHASE.code, Action.RATING.code], Action.VIEW.code)
    kinds = np.where(np.isin(kinds, [action.code for action in actions]), kinds, Action.VIEW.code)
    values = np.where(kinds == Action.RATING.code, np.where(all_items // 3 % 2, 1.0, 5.0), np.nan)
    times = 1_500_000_000 + np.arange(len(all_items)) * 60
    columns = all_items.astype(np.int32), times.astype(np.int64), kinds.astype(np.int8), values.astype(np.float32)
    return Interactions([f"u{user}" for user in range(users)], offsets, *columns)


MODEL = ModelRecord(family="hstu", config={"items": ITEMS, "dim": 16, "layers": 2, "max_history": 16, "max_length": 20, "dropout": 0.0})


def trained(interactions, epochs=15, **options):
    record = ranker_record(MODEL, interactions)
    torch.manual_seed(0)
    ranker = new_ranker(record, HSTU(HSTUConfig.model_validate({**MODEL.config, "attention_dim": 16, "linear_dim": 16})), seed=0)
    trainer = RankerTrainer(ranker, interactions, RankerOptions(epochs=epochs, learning_rate=0.01, **options), device="cpu")
    trainer.fit()
    return record, trainer


def test_labels_say_what_an_event_says_of_each_task():
    actions = np.array([Action.VIEW.code, Action.DISLIKE.code, Action.PURCHASE.code, Action.RATING.code, Action.RATING.code], np.int8)
    values = np.array([np.nan, np.nan, 99.0, 4.0, 3.5], np.float32)
    table = dict(zip(Task, labels(actions, values, RatingScale(low=1, high=5)).T, strict=True))
    np.testing.assert_array_equal(table[Task.CLICK], [1, 0, 1, 1, 1])
    np.testing.assert_array_equal(table[Task.LIKE], [np.nan, 0, 1, 1, 0])
    np.testing.assert_array_equal(table[Task.RATING], [np.nan, np.nan, np.nan, 4, 3.5])
    np.testing.assert_array_equal(table[Task.PURCHASE], [0, 0, 1, 0, 0])


@pytest.mark.parametrize(
    ("lowest", "highest", "liked_from"), [(1, 5, 4), (2, 5, 4), (0.5, 5, 4), (0, 10, 8), (-5, 5, 3), (-5, -1, -1.8), (-1, 1, 0.6)]
)
def test_a_rating_is_a_like_from_four_fifths_of_the_scale_on(lowest, highest, liked_from):
    values = np.array([lowest, liked_from - 0.01, liked_from + 0.01, highest], np.float32)
    actions = np.full(4, Action.RATING.code, np.int8)
    liked = labels(actions, values, RatingScale(low=lowest, high=highest), (Task.LIKE,))
    np.testing.assert_array_equal(liked[:, 0], [0, 0, 1, 1])


def test_what_ratings_below_zero_say_of_likes_is_learnt():
    interactions = shoppers()
    interactions.values[:] -= 6
    assert Task.LIKE in tasks_of(interactions)


def test_only_tasks_with_labels_enough_of_both_kinds_are_learnt():
    assert tasks_of(shoppers()) == (Task.CLICK, Task.LIKE, Task.RATING, Task.PURCHASE)
    assert tasks_of(shoppers(actions=(Action.VIEW,))) == (Task.CLICK,)
    assert tasks_of(shoppers(users=4)) == (Task.CLICK,)


def test_finding_the_tasks_takes_less_memory_than_the_labels_of_all_of_them():
    rng, events = np.random.default_rng(0), 200_000
    actions = rng.integers(0, len(Action), events).astype(np.int8)
    values = rng.integers(1, 6, events).astype(np.float64)
    interactions = Interactions(["u"], np.array([0, events]), np.ones(events, np.int32), np.arange(events), actions, values)
    tracemalloc.start()
    try:
        assert tasks_of(interactions) == tuple(Task)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(Task) * events
    finally:
        tracemalloc.stop()


def test_the_record_knows_the_scale_of_the_ratings_and_takes_the_encoders_sizes():
    record = ranker_record(MODEL, shoppers())
    assert (record.rating.low, record.rating.high) == (1, 5)
    assert 2 < record.rating.mean < 4
    assert record.config == {**MODEL.config, "attention_dim": 16, "linear_dim": 16}


@pytest.mark.parametrize("stars", [(1.0, 5.0), (5.0, 5.0)])
def test_ratings_too_few_or_too_alike_to_be_predicted_have_their_own_scale_too(stars):
    interactions = shoppers(users=20)
    interactions.actions[:], interactions.values[:] = Action.VIEW.code, np.nan
    interactions.actions[:2], interactions.values[:2] = Action.RATING.code, stars
    record = ranker_record(MODEL, interactions)
    assert Task.RATING not in record.tasks
    assert (record.rating.low, record.rating.high) == stars
    assert labels(np.array([Action.RATING.code], np.int8), np.array([1.0], np.float32), record.rating, (Task.LIKE,)) == [[0.0]]


def test_a_ranker_begins_with_the_encoders_weights():
    encoder = HSTU(HSTUConfig.model_validate({**MODEL.config, "attention_dim": 16, "linear_dim": 16}))
    ranker = new_ranker(ranker_record(MODEL, shoppers()), encoder, seed=0)
    for name, weights in encoder.state_dict().items():
        assert torch.equal(ranker.state_dict()[name], weights), name


@pytest.fixture(scope="module")
def learnt():
    """What is recorded of a ranker that has learnt all that `shoppers` do, and its trainer."""
    return trained(shoppers(), patience=15)


def test_it_learns_what_users_turn_to_buy_and_rate(learnt):
    record, trainer = learnt
    quality = ranker_quality(trainer.ranker, shoppers(), from_end=TEST, device=CPU)
    assert record.tasks == (Task.CLICK, Task.LIKE, Task.RATING, Task.PURCHASE)
    assert quality["auc.click"] > 0.9
    assert quality["auc.purchase"] > 0.95  # the item alone tells
    assert quality["rmse.rating"] < 0.5 * quality["rmse.mean"]


def test_what_is_asked_behind_a_full_window_is_learnt():
    record = MODEL.model_copy(update={"config": {**MODEL.config, "max_history": 5}})
    interactions = shoppers()
    encoder = HSTU(HSTUConfig.model_validate({**record.config, "attention_dim": 16, "linear_dim": 16}))
    ranker = new_ranker(ranker_record(record, interactions), encoder, seed=0)
    trainer = RankerTrainer(ranker, interactions, RankerOptions(), device="cpu")
    loss, _ = trainer._loss(trainer._batches(np.random.default_rng(0))[0])  # noqa: SLF001 - the gradients of one step
    loss.backward()
    learnt = ranker.position_embedding.weight.grad.abs().sum(dim=1) > 0
    assert learnt.nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4, 5]


def test_of_a_large_catalogue_the_wrong_items_are_drawn(monkeypatch):
    monkeypatch.setattr("pipelines.losses.SMALL_CATALOGUE", ITEMS - 1)
    monkeypatch.setattr("pipelines.losses.full_softmax", None)
    _, trainer = trained(shoppers(), epochs=1)
    assert trainer.epoch == 1


def test_a_catalogue_of_as_many_items_as_a_small_one_has_at_most_is_small(monkeypatch):
    monkeypatch.setattr("pipelines.losses.SMALL_CATALOGUE", ITEMS)
    monkeypatch.setattr("pipelines.losses.sampled_softmax", None)
    _, trainer = trained(shoppers(), epochs=1)
    assert trainer.epoch == 1


def test_an_epoch_has_the_windows_of_one_batch_in_memory(monkeypatch):
    counted = CountedWindows(monkeypatch)
    trained(shoppers(), epochs=1, validate_every=0, batch_users=8)
    assert counted.made == 120
    assert counted.most <= 8


def test_a_ranker_that_predicts_nan_is_refused():
    _, trainer = trained(shoppers(users=20), epochs=1)
    with torch.no_grad():
        trainer.ranker.asker.fill_(torch.nan)
    with pytest.raises(DataError, match="the ranker predicts NaN or infinity; train it again with a lower learning rate"):
        ranker_quality(trainer.ranker, shoppers(users=20), from_end=TEST, device=CPU)


def test_training_never_sees_the_held_out_events():
    interactions = shoppers()
    _, trainer = trained(interactions, epochs=1)
    last = {int(interactions.timestamps[end - back]) for end in interactions.offsets[1:] for back in (TEST, VALIDATION)}
    seen = {int(time) for example in trainer.examples(np.random.default_rng(0)) for time in example.history.timestamps}
    assert not last & seen
    assert len(seen | last) == len(interactions)
    again = RankerTrainer(HSTURanker(trainer.ranker.config), interactions, RankerOptions(validate_every=0), device="cpu")
    assert len({int(t) for example in again.examples(np.random.default_rng(0)) for t in example.history.timestamps} & last) == 120


def test_nothing_that_is_learnt_knows_of_the_held_out_events():
    """Neither which tasks there are and how far ratings reach, nor which wrong items are drawn how often."""
    rankers = []
    for item, action, stars in ((1, Action.VIEW, 5.0), (ITEMS, Action.PURCHASE, 9.0)):
        interactions = shoppers(actions=(Action.VIEW, Action.RATING))
        last = np.concatenate([interactions.offsets[1:] - back for back in (TEST, VALIDATION)])
        interactions.items[last], interactions.actions[last] = item, action.code
        interactions.actions[last[:5]], interactions.values[last[:5]] = Action.RATING.code, stars
        dataset = Dataset("shop", interactions, Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
        run = TrainingRun(MODEL, dataset, RunOptions(device="cpu"), Watcher())
        rankers.append(train_ranker(run, new_model(MODEL, 0), RankerOptions(epochs=1)))
    first, second = (one.record.model_copy(update={"quality": {}}) for one in rankers)
    assert first == second
    weights = [one.ranker.state_dict() for one in rankers]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_users_without_the_event_take_no_place_among_those_who_are_measured(monkeypatch):
    regulars, many = shoppers(users=3), 200
    crowd = Interactions(
        user_ids=[*(f"once{user}" for user in range(many)), *regulars.user_ids],
        offsets=np.r_[np.arange(many), many + regulars.offsets],
        items=np.r_[np.full(many, 1, np.int32), regulars.items],
        timestamps=np.r_[np.full(many, 1_400_000_000), regulars.timestamps],
        actions=np.r_[np.full(many, Action.VIEW.code, np.int8), regulars.actions],
        values=np.r_[np.full(many, np.nan, np.float32), regulars.values],
    )
    monkeypatch.setattr("pipelines.evaluate_ranker.MOST_USERS", 3)
    _, trainer = trained(regulars, epochs=1)
    measured = ranker_quality(trainer.ranker, crowd, from_end=VALIDATION, device=CPU)
    assert 0 < measured["auc.click"] < 1


def test_a_dislike_is_no_right_answer(learnt):
    """Every other user's last event becomes one, of an item that the ranker does not expect: nothing changes for those who are left."""
    interactions, (_, trainer) = shoppers(), learnt
    kept = np.arange(0, 120, 2)
    rest = [ranker_quality(trainer.ranker, shoppers_of(interactions, users), from_end=TEST, device=CPU) for users in (kept, kept + 1)]
    last = interactions.offsets[2::2] - TEST
    interactions.items[last], interactions.actions[last] = 1, Action.DISLIKE.code
    mixed = ranker_quality(trainer.ranker, interactions, from_end=TEST, device=CPU)
    assert mixed["auc.click"] == pytest.approx(rest[0]["auc.click"], abs=0.03)
    alone = ranker_quality(trainer.ranker, shoppers_of(interactions, kept + 1), from_end=TEST, device=CPU)
    assert np.isnan(alone["auc.click"])
    assert rest[1]["auc.click"] > 0.9


def shoppers_of(interactions, users):
    """These users with their events."""
    rows = np.concatenate([np.arange(*interactions.offsets[user : user + 2]) for user in users])
    columns = (getattr(interactions, name)[rows] for name in ("items", "timestamps", "actions", "values"))
    offsets = np.r_[0, np.cumsum(interactions.lengths[users])].astype(np.int64)
    return Interactions([interactions.user_ids[user] for user in users], offsets, *columns)


def test_an_item_that_is_drawn_twice_counts_once():
    interactions = shoppers(users=4)
    interactions.items[:] = interactions.items % 5 + 1
    _, trainer = trained(interactions, epochs=1)
    trainer.ranker.config = trainer.ranker.config.model_copy(update={"items": 5})
    assert ranker_quality(trainer.ranker, interactions, from_end=TEST, device=CPU)["hr@10"] == 1  # among five


def test_a_run_is_the_same_each_time():
    first, second = (trained(shoppers(users=20), epochs=2)[1].ranker.state_dict() for _ in "12")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("scores", "wanted", "expected"),
    [([3, 2, 1], [1, 0, 0], 1.0), ([1, 2, 3], [1, 0, 0], 0.0), ([2, 2, 1], [1, 0, 0], 0.75), ([1, 2], [1, 1], float("nan"))],
)
def test_auc_counts_pairs_in_the_right_order_and_ties_half(scores, wanted, expected):
    assert auc(np.array(scores, np.float32), np.array(wanted, np.float32)) == pytest.approx(expected, nan_ok=True)


def test_every_other_item_is_drawn_by_its_popularity():
    drawn = Drawing(np.array([0, 1000, *[0] * 98, 1000])).draw((20_000, 2), np.random.default_rng(0))
    assert ((drawn >= 1) & (drawn <= 100)).all()
    by_popularity, alike = (np.isin(drawn[:, column], [1, 100]).mean() for column in (0, 1))
    assert by_popularity == pytest.approx(2 * 1001**0.75 / (2 * 1001**0.75 + 98), abs=0.02)
    assert alike == pytest.approx(0.02, abs=0.005)


class Liking:
    """A ranker that prefers one item above all, then the higher index."""

    def __init__(self, item):
        self.item = item

    def after(self, sequence, candidates):
        return torch.where(candidates == self.item, 1.0, candidates / 1000)[:, None]


def test_the_last_stage_is_measured_on_the_lists_as_they_are_served():
    examples = list(held_out(shoppers(users=2), TEST))
    targets = [one.target for one in examples]
    retrieved = [
        Encoded(np.ones(2), np.array([7, 8, target, 9], np.int32), np.array([0.9, 0.8, 0.7, 0.6], np.float32)) for target in targets
    ]
    nothing = [Generated(np.empty(0, np.int32), np.empty(0, np.float32))] * 2
    record, lists = RankerRecord(family="fake", config={}, tasks=(Task.CLICK,)), Lists(examples, retrieved, nothing)
    found_first = last_stage_quality(Liking(targets[0]), record, lists, BlendWeights(), rank_pool=3)
    assert found_first["found"]["mrr"] == pytest.approx(1 / 3)
    assert improves(found_first)
    cut_off = last_stage_quality(Liking(targets[0]), record, lists, BlendWeights(), rank_pool=2)
    assert cut_off["ranked"]["hr@10"] == 0.0  # who is not in the pool is not ranked
    assert not improves(cut_off)


def test_a_task_of_which_validation_says_nothing_leaves_the_manifest_json(tmp_path):
    interactions = shoppers()
    validation = interactions.offsets[1:] - VALIDATION
    interactions.items[validation], interactions.actions[validation] = 2, Action.VIEW.code
    dataset = Dataset("shop", interactions, Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
    model = ModelRecord(family="hstu", config={**MODEL.config, "attention_dim": 16, "linear_dim": 16})
    told = {"options": {"validate_every": 1}, "refit": False}
    bundle = publish(tmp_path / "shop", model, new_model(model, 0), dataset, training=told, quality={})
    run = TrainingRun(model, dataset, RunOptions(device="cpu"), Watcher())
    published = publish_ranking(bundle, train_ranking_of(bundle, run, RankerOptions(epochs=1)))
    strange = []
    json.loads((published.path / MANIFEST).read_text(), parse_constant=strange.append)
    assert (Task.PURCHASE in published.ranker().tasks, strange) == (True, [])


@pytest.mark.parametrize(
    ("training", "unlearnt"),
    [({"options": {"validate_every": 1}}, [0, 1, 2]), ({"options": {"validate_every": 1}, "refit": True}, [0, 1]), ({}, [0, 1])],
)
def test_a_version_records_which_items_it_has_learnt_which_are_none_of_those_with_held_out_events_alone(tmp_path, training, unlearnt):
    interactions = shoppers(users=8)
    interactions.items[interactions.items <= 2] = 3
    interactions.items[interactions.offsets[1:] - TEST], interactions.items[interactions.offsets[1:] - VALIDATION] = 1, 2
    dataset = Dataset("shop", interactions, Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
    bundle = publish(tmp_path / "shop", MODEL, new_model(MODEL, 0), dataset, training=training, quality={})
    had_events = set(np.flatnonzero(bundle.popularity).tolist())
    assert set(np.flatnonzero(bundle.learnt).tolist()) == had_events - set(unlearnt)
    with BundleStore(tmp_path / "shop").recompile(bundle) as draft:
        pass
    assert (BundleStore(tmp_path / "shop").open(draft.version).learnt == bundle.learnt).all()


@pytest.mark.parametrize("window", ["latest", "random"])
def test_a_version_has_not_learnt_items_of_which_all_events_lie_before_its_windows(tmp_path, window):
    interactions = shoppers(users=8)
    interactions.items[interactions.items == 4] = 5
    interactions.items[interactions.offsets[:-1]] = 4
    dataset = Dataset("shop", interactions, Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
    model = ModelRecord(family="hstu", config={**MODEL.config, "max_history": 4})
    bundle = publish(tmp_path / "shop", model, new_model(model, 0), dataset, training={"options": {"window": window}}, quality={})
    assert bundle.learnt[4] == (window == "random")


def test_a_version_with_a_new_ranker_keeps_the_encoders_compiled_graphs_and_none_of_the_rankers(tmp_path):
    interactions = shoppers(users=8)
    dataset = Dataset("shop", interactions, Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
    model = ModelRecord(family="hstu", config={**MODEL.config, "attention_dim": 16, "linear_dim": 16})
    bundle = publish(tmp_path / "shop", model, new_model(model, 0), dataset, training={}, quality={})
    store = BundleStore(tmp_path / "shop")
    with store.recompile(bundle) as draft:
        (draft.path / "onnx").mkdir()
        for graph in ("encode", "retrieve", "append", "rank", "rank_append"):
            (draft.path / f"onnx/{graph}.onnx").write_text(graph)
            draft.artifacts.append(Artifact(kind="onnx", graph=graph, file=f"onnx/{graph}.onnx", builder="test"))
        draft.failed_steps += [FailedStep(step=step, reason="too large") for step in ("onnx encode int8", "onnx rank int8")]
    (store.root / "2/onnx/append.onnx").write_text("APPEND")
    record = ranker_record(MODEL, interactions)
    ranker = new_ranker(record, new_model(model, 0), seed=0)
    made = TrainedRanker(best=EpochReport(1, 0.5, 1.0, {}), epochs=1, seconds=1.0, ranker=ranker, record=record)
    published = publish_ranking(store.open(), RankingPart(RankerOptions(), made, {}))
    assert (published.manifest.ranker, published.manifest.compiled_from, store.current()) == (record, None, 3)
    kept = {artifact.graph: published.verified(artifact.file).read_text() for artifact in published.manifest.artifacts}
    assert kept == {"encode": "encode", "retrieve": "retrieve"}
    assert published.artifact("onnx", "retrieve")
    assert why_missing(published, "onnx", "rank").endswith(f"run: genrec compile --model-dir {store.root}")
    assert "checksum" in why_missing(published, "onnx", "append")
    assert {failed.step for failed in published.manifest.failed_steps} >= {"onnx encode int8"}
    assert "onnx rank int8" not in {failed.step for failed in published.manifest.failed_steps}
    assert not (published.path / "onnx/append.onnx").exists()


@pytest.mark.parametrize(
    ("training", "decided"),
    [
        ({"options": {"validate_every": 2}, "refit": False}, True),
        ({"options": {"validate_every": 2}, "refit": True}, False),
        ({"options": {"validate_every": 0}, "refit": False}, False),
        ({"imported_from": "meta-recsys/generative-recommenders"}, False),
    ],
)
def test_events_that_a_version_has_learnt_do_not_decide_whether_the_ranker_is_its_last_stage(tmp_path, monkeypatch, training, decided):
    monkeypatch.setattr("deployments.training.ranking.improves", lambda quality: True)
    dataset = Dataset("shop", shoppers(users=8), Catalogue([Item(str(item), f"Item {item}") for item in range(1, ITEMS + 1)]), "made up")
    model = ModelRecord(family="hstu", config={**MODEL.config, "attention_dim": 16, "linear_dim": 16})
    bundle = publish(tmp_path / "shop", model, new_model(model, 0), dataset, training=training, quality={})
    run = TrainingRun(model, dataset, RunOptions(device="cpu"), Watcher())
    part = train_ranking_of(bundle, run, RankerOptions(epochs=1))
    assert (part.trained.record.last_stage, bool(part.trained.best.validation)) == (decided, decided)
    assert bool(part.described()["options"]["validate_every"]) == decided


def test_the_record_of_a_ranker_that_was_refitted_has_the_validation_that_chose_its_epoch(monkeypatch):
    record = ranker_record(MODEL, shoppers())
    chosen = TrainedRanker(best=EpochReport(2, 0.5, 1.0, {"ndcg@10": 0.4}), epochs=5, seconds=10.0, ranker=None, record=record)
    refitted = TrainedRanker(best=EpochReport(2, 0.4, 1.0, {}), epochs=2, seconds=3.0, ranker=None, record=record)
    trained = iter([chosen, refitted])
    monkeypatch.setattr(ranking, "train_ranker", lambda *_: next(trained))
    monkeypatch.setattr(ranking, "_measured", lambda *_: {})
    encoder = SimpleNamespace(validated="on fewer events", model="on all events")
    told = train_ranking(None, encoder, (None, None), None, RankerOptions(validate_every=1)).trained
    assert (told.best, told.epochs, told.seconds) == (chosen.best, 5, 13.0)


def test_the_figures_that_decide_are_told_beside_those_of_the_test_events():
    before, after = ({"found": {"ndcg@10": found}, "ranked": {"ndcg@10": ranked}} for found, ranked in ((0.1, 0.2), (0.3, 0.25)))
    record = ranker_record(MODEL, shoppers()).model_copy(update={"last_stage": True, "quality": {"auc.click": 0.75}})
    trained = TrainedRanker(best=EpochReport(1, 0.5, 1.0, {}), epochs=1, seconds=1.0, ranker=None, record=record)
    told = "ranker: auc.click 0.750; ndcg@10 of recommendations 0.3000 without it, 0.2500 with it"
    decided = "; on the validation events, which decide, 0.1000 without it, 0.2000 with it"
    assert RankingPart(RankerOptions(), trained, after, before).told() == f"{told}{decided}: it is their last stage"
    assert RankingPart(RankerOptions(), trained, after).told() == f"{told}: it is their last stage"


def test_of_a_catalogue_of_one_item_nothing_stands_beside_an_event_and_no_auc_of_clicks_is_told():
    alone = Interactions(
        ["u"], np.array([0, 3]), np.ones(3, np.int32), np.arange(3), np.zeros(3, np.int8), np.full(3, np.nan, np.float32)
    )  # fmt: skip
    config = {**MODEL.config, "items": 1, "attention_dim": 16, "linear_dim": 16}
    record = ranker_record(ModelRecord(family="hstu", config=config), alone)
    ranker = new_ranker(record, HSTU(HSTUConfig.model_validate(config)), seed=0)
    quality = ranker_quality(ranker, alone, from_end=TEST, device=CPU)
    assert (quality["hr@10"], np.isnan(quality["auc.click"])) == (1, True)
