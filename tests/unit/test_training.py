"""Splits, losses, metrics and the trainer, small and exact."""

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cluster.dataset import Interactions
from cluster.errors import DataError
from integrations.hstu.config import HSTUConfig, SASRecConfig
from integrations.hstu.model import HSTU
from integrations.hstu.sasrec import SASRec
from pipelines import batches
from pipelines import evaluate as evaluation
from pipelines.epochs import load_checkpoint, save_checkpoint
from pipelines.evaluate import evaluate, ranks
from pipelines.losses import Seen, full_softmax, sampled_softmax
from pipelines.ranking_metrics import ranking_metrics
from pipelines.splits import TEST, VALIDATION, held_out, learnt_items, told_windows, training_examples, without_excess
from pipelines.train import Trainer, TrainOptions
from tests.disks import largest_file
from tests.mutations import flip_a_bit
from tests.windows import CountedWindows

ITEMS = 40


def walks(users=60, seed=0, longest=30, shortest=3):
    """Users who mostly go from item i to item i + 1: easy to learn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, users)
    items = [(rng.integers(ITEMS) + np.arange(length)) % ITEMS + 1 for length in lengths]
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    total = int(offsets[-1])
    times = 1_500_000_000 + np.cumsum(rng.integers(1, 5000, total)).astype(np.int64)
    columns = np.concatenate(items).astype(np.int32), times, np.zeros(total, np.int8), np.full(total, np.nan, np.float32)
    return Interactions([f"u{i}" for i in range(users)], offsets, *columns)


def histories(lengths):
    """Users with so many events, all of one item."""
    rows = sum(lengths)
    columns = np.ones(rows, np.int32), np.arange(rows), np.zeros(rows, np.int8), np.full(rows, np.nan, np.float32)
    return Interactions([f"u{user}" for user in range(len(lengths))], np.r_[0, np.cumsum(lengths)], *columns)


def small_model(family=HSTU, seed=0, dropout=0.2):
    torch.manual_seed(seed)
    if family is SASRec:
        return SASRec(SASRecConfig(items=ITEMS, dim=16, heads=1, feedforward_dim=16, max_length=31, max_history=20, dropout=dropout))
    config = HSTUConfig(items=ITEMS, dim=16, attention_dim=8, linear_dim=8, max_length=31, max_history=20, dropout=dropout)
    return HSTU(config)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_splits_never_show_an_event_before_it_is_asked_for():
    data = walks()
    for from_end in (TEST, VALIDATION):
        for user, example in enumerate(held_out(data, from_end)):
            events = data.items[data.offsets[user] : data.offsets[user + 1]].tolist()
            assert [*example.history.items.tolist(), example.target] == events[: len(events) - from_end + 1]
            assert example.history.request_time == data.timestamps[data.offsets[user + 1] - from_end]


def test_of_many_users_the_same_few_are_ranked_after_each_epoch(monkeypatch):
    data, model = walks(), small_model()
    everybody, few = ([example.target for example in held_out(data, VALIDATION, most_users=most)] for most in (60, 7))
    assert everybody == [example.target for example in held_out(data, VALIDATION)]
    assert len(few) == 7
    assert few == [example.target for example in held_out(data, VALIDATION, most_users=7)]
    monkeypatch.setattr("pipelines.train.MOST_USERS", 7)
    best = Trainer(model, data, TrainOptions(epochs=1), device="cpu").fit()
    assert best.validation == evaluate(model, data, from_end=VALIDATION, most_users=7) != evaluate(model, data, from_end=VALIDATION)


def test_users_without_the_event_take_no_place_among_the_few_who_are_ranked():
    regulars, many = walks(3), 500
    columns = {name: getattr(regulars, name) for name in ("items", "timestamps", "actions", "values")}
    crowd = Interactions(
        user_ids=[*(f"once{user}" for user in range(many)), *regulars.user_ids],
        offsets=np.r_[np.arange(many), many + regulars.offsets],
        **{name: np.r_[np.repeat(column[:1], many), column] for name, column in columns.items()},
    )
    few = [example.target for example in held_out(crowd, VALIDATION, most_users=2)]
    assert len(few) == 2
    assert set(few) <= {example.target for example in held_out(regulars, VALIDATION)}


@pytest.mark.parametrize(("held", "window"), [(2, "latest"), (1, "latest"), (2, "random")])
def test_training_leaves_the_held_out_events_alone(held, window):
    data = walks()
    rng = np.random.default_rng(0)
    seen = [training_examples(data, held_out_events=held, max_history=5, window=window, rng=rng) for _ in range(20)]
    latest = {int(example.history.request_time) for examples in seen for example in examples}
    forbidden = {int(data.timestamps[end - back]) for end in data.offsets[1:] for back in range(1, held + 1)}
    assert not latest & forbidden
    assert all(len(example.history) <= 5 for examples in seen for example in examples)


def test_items_are_learnt_from_users_with_two_events_before_those_held_out():
    history = [(1, 2, 3, 4), (5, 6, 7), (8,)]
    offsets, items = np.cumsum([0, *map(len, history)]), np.array([item for one in history for item in one])
    nothing = np.zeros(len(items), np.int64)
    data = Interactions(["a", "b", "c"], offsets, items, nothing, nothing.astype(np.int8), nothing.astype(np.float32))
    for held, learnt in ((2, [1, 2]), (1, [1, 2, 3, 5, 6])):
        assert np.flatnonzero(learnt_items(data, 9, held_out_events=held, max_history=9, window="random")).tolist() == learnt


@pytest.mark.parametrize("window", ["latest", "random"])
@pytest.mark.parametrize("held", [0, 1, 2, 5])
def test_learnt_are_the_items_of_all_windows_that_a_training_can_draw(held, window):
    data, rng, asked = walks(users=6, longest=20), np.random.default_rng(0), {"held_out_events": held, "max_history": 3, "window": window}
    drawn = [example for _ in range(300) for example in training_examples(data, **asked, rng=rng)]
    items = {int(item) for example in drawn for item in (*example.history.items, example.target)}
    assert np.flatnonzero(learnt_items(data, ITEMS, **asked)).tolist() == sorted(items)


def test_random_windows_reach_the_oldest_events_and_latest_windows_do_not():
    data = walks(users=10, longest=60)
    user = int(np.argmax(data.lengths))
    oldest = int(data.timestamps[data.offsets[user]])
    reached = {}
    for window in ("latest", "random"):
        rng = np.random.default_rng(0)
        drawn = [training_examples(data, held_out_events=2, max_history=5, window=window, rng=rng) for _ in range(300)]
        reached[window] = any(int(list(examples)[user].history.timestamps[0]) == oldest for examples in drawn)
    assert reached == {"latest": False, "random": True}


@pytest.mark.parametrize("window", ["latest", "random"])
@pytest.mark.parametrize("held", [0, 1, 2, 5])
def test_the_windows_and_random_draws_are_those_of_one_user_after_another(held, window):
    data, rng, plain = walks(longest=40), np.random.default_rng(1), np.random.default_rng(1)
    wanted = []
    for first, length in zip(data.offsets.tolist(), data.lengths.tolist(), strict=False):
        if (inputs := length - held - 1) < 1:
            continue
        start = max(0, inputs - 5)
        if window == "random" and start and plain.random() < 0.5:
            start = int(plain.integers(0, start + 1))
        wanted.append((first + start, first + min(inputs, start + 5)))
    found = training_examples(data, held_out_events=held, max_history=5, window=window, rng=rng)
    assert rng.bit_generator.state == plain.bit_generator.state
    assert found.lengths.tolist() == [stop - start for start, stop in wanted]
    for (start, stop), example in zip(wanted, found, strict=True):
        for name in ("items", "timestamps", "actions", "values"):
            np.testing.assert_array_equal(getattr(example.history, name), getattr(data, name)[start:stop])
        assert (example.history.request_time, example.target) == (data.timestamps[stop], data.items[stop])


@pytest.mark.parametrize(("length", "window", "windows"), [(38, "random", 1), (39, "random", 5), (39, "latest", 1)])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_user_gives_more_windows_only_where_one_would_reach_less_than_a_quarter_of_the_events(held, length, window, windows):
    """A window of eight events and its target are nine: a quarter of the 36 before the validation event of 38, less than that of 39's. A
    refit, which learns that event too, goes by the same.
    """
    data = walks(users=8, shortest=length, longest=length + 1)
    asked = {"held_out_events": held, "max_history": 8, "window": window}
    examples = training_examples(data, **asked, rng=np.random.default_rng(0))
    users = np.searchsorted(data.offsets, examples.starts, side="right") - 1
    assert np.bincount(users).tolist() == [windows] * 8
    assert set(examples.lengths.tolist()) == {8}
    assert told_windows(data, **asked) == (
        ""
        if windows == 1
        else "8 users give an epoch 40 windows, up to 5 each (12.5% of their events): "
        "one of 8 events a user would reach 24.3% of the events to learn from"
    )


@pytest.mark.parametrize(
    ("lengths", "history", "told"),
    [
        ([3703, *[10] * 30], 5, "31 users give an epoch 800 windows, up to 740 each (92.5% of their events)"),  # a crawler among customers
        ([8003, *[10] * 300], 20, "301 users give an epoch 700 windows, up to 400 each (79.2% of their events)"),
        ([70_003, *[4] * 10_000], 1_000, "10,001 users give an epoch 10,070 windows, up to 70 each (87.5% of their events)"),
        ([300] * 50, 5, "50 users give an epoch 3,000 windows, up to 60 each (2.0% of their events)"),
        ([300] * 51, 5, "51 users give an epoch 3,060 windows, up to 60 each"),
    ],
)
def test_the_share_of_the_events_in_the_windows_that_one_user_gives_is_told_where_it_is_large(lengths, history, told):
    line = told_windows(histories(lengths), held_out_events=2, max_history=history, window="random")
    assert line.partition(":")[0] == told


def windows_of(lengths, history):
    """An epoch's windows of users with so many events."""
    rng = np.random.default_rng(0)
    return training_examples(histories(lengths), held_out_events=2, max_history=history, window="random", rng=rng)


def events_of_each(windows):
    return np.bincount(np.searchsorted(windows.interactions.offsets, windows.starts, side="right") - 1, windows.lengths)


@pytest.mark.parametrize(
    ("lengths", "history", "share"),
    [
        ([50_003, *[10] * 1_000], 20, 0.02),
        ([50_003, 30_003, 20_003, *[10] * 1_000], 20, 0.02),
        ([50_003, *[10] * 99], 20, 0.1),  # ten times the average user's
    ],
)
def test_of_a_user_with_most_of_the_events_as_many_windows_are_left_as_have_a_small_share_of_them(lengths, history, share):
    left = without_excess(windows_of(lengths, history))
    events = events_of_each(left)
    heavy, light = np.array(lengths) > 10, np.array(lengths) == 10
    assert set(events[light]) == {7}, "all of the others'"
    assert events[heavy].max() / events.sum() <= share < (events[heavy].min() + 2 * history) / events.sum(), "as much as fits"


def test_every_user_keeps_a_window_though_one_has_more_than_its_share():
    left = without_excess(windows_of([70_003, *[4] * 10_000], 1_000))
    assert events_of_each(left).tolist() == [1_000, *[1] * 10_000]


@pytest.mark.parametrize(
    ("lengths", "history"),
    [
        (np.random.default_rng(0).lognormal(4.6, 1, 6040).clip(20, 2314).astype(int).tolist(), 200),  # as of MovieLens-1M
        (np.random.default_rng(0).lognormal(4.6, 1, 6040).clip(20, 2314).astype(int).tolist(), 20),
        ([5_000, *[10] * 9], 20),
        ([300] * 51, 5),
    ],
)
def test_windows_of_which_no_user_has_too_large_a_share_are_all_left_in_their_order(lengths, history):
    windows = windows_of(lengths, history)
    assert without_excess(windows) is windows


@pytest.mark.parametrize("held", [1, 2])
def test_an_epoch_of_few_users_with_long_histories_reaches_most_of_their_events_and_none_that_are_held_out(held):
    data = walks(users=5, shortest=2, longest=3000)
    examples = training_examples(data, held_out_events=held, max_history=20, window="random", rng=np.random.default_rng(3))
    seen = np.zeros(len(data), bool)
    for start, stop in zip(examples.starts.tolist(), examples.stops.tolist(), strict=True):
        seen[start : stop + 1] = True
        assert np.searchsorted(data.offsets, start, side="right") == np.searchsorted(data.offsets, stop + held, side="right"), "one user's"
    assert seen.mean() > 0.5
    again = training_examples(data, held_out_events=held, max_history=20, window="random", rng=np.random.default_rng(3))
    assert again.starts.tolist() == examples.starts.tolist(), "a resumed run draws the same"


def test_few_users_with_long_histories_train_a_model_of_others():
    model, options = small_model(), TrainOptions(epochs=5, learning_rate=1e-2)
    Trainer(model, walks(users=4, shortest=2000, longest=2001), options, device="cpu").fit()
    assert evaluate(model, walks(200, seed=9))["hr@10"] > 0.8


def test_an_epoch_has_the_windows_of_one_batch_in_memory(monkeypatch):
    counted = CountedWindows(monkeypatch)
    trainer = Trainer(small_model(), walks(), TrainOptions(epochs=1, validate_every=0, batch_users=8), device="cpu")
    assert counted.made == 0
    trainer.run_epoch()
    assert counted.made == 60
    assert counted.most <= 8


def test_full_softmax_and_its_gradients_are_those_of_cross_entropy():
    torch.manual_seed(0)
    states = F.normalize(torch.randn(1300, 12, dtype=torch.float64), dim=1).requires_grad_()
    vectors = F.normalize(torch.randn(31, 12, dtype=torch.float64), dim=1).requires_grad_()
    targets = torch.randint(1, 31, (1300,))
    expected = F.cross_entropy(states @ vectors[1:].T / 0.05, targets - 1)
    wanted = torch.autograd.grad(expected * 3, (states, vectors))
    loss = full_softmax(states, vectors, targets, 0.05)
    got = torch.autograd.grad(loss * 3, (states, vectors))
    torch.testing.assert_close(loss, expected)
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_what_a_user_has_seen_is_no_wrong_answer_but_the_target_is_always_an_answer():
    items_BL = torch.tensor([[3, 5, 3, 7], [2, 4, 0, 0]])
    targets = torch.tensor([5, 3, 7, 9, 4, 6])  # the second comes back to an item
    seen = Seen.of(items_BL, items=9)
    hidden = [{3}, {5}, {3, 5}, {3, 5, 7}, {2}, {2, 4}]
    mask = torch.zeros(6, 9, dtype=torch.bool)
    for row, items in enumerate(hidden):
        mask[row, [item - 1 for item in items]] = True
    assert torch.equal(seen.among_all(slice(0, 6), targets), mask)
    assert torch.equal(seen.among(torch.tensor([[3, 5, 7]] * 6))[1], torch.tensor([True, True, False]))

    torch.manual_seed(0)
    states = F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1).requires_grad_()
    vectors = F.normalize(torch.randn(10, 4, dtype=torch.float64), dim=1).requires_grad_()
    expected = F.cross_entropy((states @ vectors[1:].T / 0.05).masked_fill(mask, -torch.inf), targets - 1)
    loss = full_softmax(states, vectors, targets, 0.05, seen)
    torch.testing.assert_close(loss, expected)
    for left, right in zip(torch.autograd.grad(loss, (states, vectors)), torch.autograd.grad(expected, (states, vectors)), strict=True):
        torch.testing.assert_close(left, right)


class Given:
    """A model of these vectors (V + 1, D)."""

    def __init__(self, vectors):
        self.config, self.vectors = SimpleNamespace(items=len(vectors) - 1), vectors

    def item_vectors(self, items=None):
        return self.vectors if items is None else self.vectors[items]


def test_a_sampled_step_makes_the_vectors_of_its_items_alone_and_learns_as_from_those_of_all(monkeypatch):
    trainer = Trainer(small_model(dropout=0), walks(), TrainOptions(loss="sampled", negatives=3), device="cpu")
    model, batch = trainer.model, trainer._batches(np.random.default_rng(0))[0]  # noqa: SLF001 - the gradients of one step
    batch = batch[np.argmin(batch.lengths, keepdims=True)]
    make = model.item_vectors
    made = Mock(wraps=make)

    def gradients(item_vectors):
        monkeypatch.setattr(model, "item_vectors", item_vectors)
        torch.manual_seed(1)
        model.zero_grad()
        trainer._loss(batch)[0].backward()  # noqa: SLF001
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(lambda items: make()[items])
    torch.testing.assert_close(gradients(made), expected)
    ((items,),) = (call.args for call in made.call_args_list)
    assert len(items) == len(set(items.tolist())) < ITEMS


def test_a_sampled_step_of_as_many_items_as_there_are_takes_the_vectors_of_all():
    given, states, targets = Mock(config=SimpleNamespace(items=ITEMS)), torch.eye(ITEMS + 1)[:10], torch.arange(10) + 1
    given.item_vectors.return_value = torch.eye(ITEMS + 1)
    sampled_softmax(states, given, targets, 0.5, negatives=3)
    given.item_vectors.assert_called_once_with(None)


def test_sampled_softmax_masks_negatives_that_were_seen():
    items_BL = torch.arange(1, 9).unsqueeze(0)
    states, vectors = F.normalize(torch.randn(8, 4), dim=1), F.normalize(torch.randn(9, 4), dim=1)
    last = Seen.of(items_BL, items=8)
    loss = sampled_softmax(
        states[-1:], Given(vectors), torch.tensor([8]), 0.05, Seen(last.first_BV, last.user_R[-1:], last.place_R[-1:]), negatives=50
    )
    assert loss.item() == pytest.approx(0, abs=1e-6), "everything but the target was seen"


def test_full_softmax_stays_finite_at_low_temperatures():
    states = F.normalize(torch.randn(10, 4), dim=1)
    vectors = torch.cat([torch.zeros(1, 4), states])
    assert torch.isfinite(full_softmax(states, vectors, torch.arange(1, 11), 0.01))


@pytest.mark.parametrize("temperature", [0.05, 0.01, 0.001])
@pytest.mark.parametrize("masked", [False, True])
def test_full_softmax_is_that_of_cross_entropy_where_every_cosine_that_counts_is_negative(temperature, masked):
    """In float32, against float64: exp((cosine - 1) / 0.01) is zero below a cosine of about 0."""
    torch.manual_seed(0)
    direction = F.normalize(torch.randn(8), dim=0)
    vectors = torch.cat([torch.zeros(1, 8), F.normalize(0.3 * torch.randn(9, 8) - direction, dim=1), direction[None]])
    states, targets = F.normalize(0.1 * torch.randn(4, 8) + direction, dim=1), torch.tensor([1, 2, 9, 4])
    seen = Seen.of(torch.full((1, 4), 10), items=10) if masked else None  # item 10 is the one whose cosine is near 1
    catalogue = vectors if masked else vectors[:10]
    left = [tensor.clone().requires_grad_() for tensor in (states, catalogue)]
    right = [tensor.double().requires_grad_() for tensor in (states, catalogue)]
    loss = full_softmax(*left, targets, temperature, seen)
    logits = right[0] @ right[1][1:].T / temperature
    expected = F.cross_entropy(logits[:, :9], targets - 1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(torch.autograd.grad(loss, left), torch.autograd.grad(expected, right), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3 / temperature)


def test_sampled_softmax_masks_negatives_that_are_the_target():
    states = F.normalize(torch.randn(50, 4), dim=1)
    vectors = torch.cat([torch.zeros(1, 4), F.normalize(torch.randn(1, 4), dim=1)])  # one item: every negative collides
    loss = sampled_softmax(states, Given(vectors), torch.ones(50, dtype=torch.int64), 0.05, negatives=8)
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_sampled_softmax_is_near_the_full_one_when_it_draws_as_many_items():
    torch.manual_seed(0)
    states, vectors = F.normalize(torch.randn(400, 8), dim=1), torch.cat([torch.zeros(1, 8), F.normalize(torch.randn(30, 8), dim=1)])
    targets = torch.randint(1, 31, (400,))
    sampled = sampled_softmax(states, Given(vectors), targets, 0.5, negatives=29)
    assert sampled.item() == pytest.approx(full_softmax(states, vectors, targets, 0.5).item(), rel=0.03)


def test_metrics_of_known_ranks():
    metrics = ranking_metrics(np.array([1, 2, 11, 300]))
    assert metrics["hr@10"] == 0.5
    assert metrics["hr@50"] == metrics["hr@200"] == 0.75
    assert metrics["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert metrics["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 300) / 4)


def test_ranks_filter_the_window_but_never_the_answer():
    """Against a loop: everything in the user's window is out of the ranking, except the target itself."""
    data, model = walks(), small_model().eval()
    examples = list(held_out(data, TEST))
    found = ranks(model, examples)
    vectors = model.item_vectors()
    for example, rank in zip(examples, found, strict=True):
        columns = model.collate([example.history]).tensors()
        with torch.inference_mode():
            scores = (vectors @ model(columns["items"], columns["times"], columns["next_times"])[0, -1]).tolist()
        others = set(range(1, ITEMS + 1)) - set(example.history.items[-20:].tolist()) - {example.target}
        assert rank == 1 + sum(scores[item] >= scores[example.target] for item in others)


@pytest.mark.parametrize("family", [HSTU, SASRec])
def test_of_long_histories_few_are_ranked_at_a_time_and_the_ranks_stay_the_same(monkeypatch, family):
    model, examples, shapes = small_model(family), list(held_out(walks(longest=60), TEST)), []
    at_once = ranks(model, examples)
    model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    monkeypatch.setattr(batches, "MOST_PAIRS", 2 * 20**2)
    assert ranks(model, examples).tolist() == at_once.tolist()
    assert all(users <= max(1, 2 * 20**2 // length**2) for users, length in shapes), shapes
    assert (2, 20) in shapes, "the model sees no more of a history than its window"
    assert max(shapes)[0] > 2, "more of the short ones"


def test_of_many_users_few_are_in_memory_at_a_time_and_the_figures_stay_the_same(monkeypatch):
    data, model, alive, most = walks(), small_model(), WeakSet(), 0
    at_once = evaluate(model, data)

    def counted(*given, **named):
        nonlocal most
        for example in held_out(*given, **named):
            alive.add(example)
            most = max(most, len(alive))
            yield example

    monkeypatch.setattr(evaluation, "held_out", counted)
    monkeypatch.setattr(evaluation, "USERS_AT_ONCE", 7)
    assert evaluate(model, data) == at_once
    assert most <= 2 * 7 + 1 < data.users
    assert evaluate(model, data, from_end=1000) == dict.fromkeys(at_once, pytest.approx(0))


def test_a_model_without_finite_scores_is_refused():
    model = small_model()
    with torch.no_grad():
        model.position_embedding.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="not finite"):
        evaluate(model, walks())


@pytest.mark.parametrize("family", [HSTU, SASRec])
@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_learns_a_walk_and_keeps_the_best_epochs_weights(family, loss):
    data, model = walks(200), small_model(family)
    options = TrainOptions(epochs=12, batch_users=32, learning_rate=1e-2, loss=loss, negatives=20)
    before = evaluate(model, data)["hr@10"]
    trainer = Trainer(model, data, options, device="cpu")
    best = trainer.fit()
    assert evaluate(model, data)["hr@10"] > max(0.8, before)
    assert evaluate(model, data, from_end=VALIDATION) == best.validation
    assert best.score == max(report.score for report in trainer.history)


def test_a_training_that_diverges_ends_at_once_with_the_cure():
    """By weights as a learning rate that is too high leaves them."""
    model = small_model()
    trainer = Trainer(model, walks(), TrainOptions(epochs=2, learning_rate=0.5), device="cpu")
    with torch.no_grad():
        model.position_embedding.weight.fill_(torch.nan)
    with pytest.raises(DataError, match=r"the loss became nan in epoch 1, .*; give a lower learning_rate than 0\.5"):
        trainer.fit()


def test_stops_when_validation_gets_no_better():
    trainer = Trainer(small_model(), walks(), TrainOptions(epochs=50, learning_rate=1e-9, schedule="constant", patience=2), device="cpu")
    trainer.fit()
    assert trainer.epoch < 10


def test_two_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_is_not():
    runs = []
    for seed in (1, 1, 2):
        model = small_model(seed=0)
        Trainer(model, walks(), TrainOptions(epochs=2, seed=seed), device="cpu").fit()
        runs.append(weights(model))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, loss):
    options = TrainOptions(epochs=5, batch_users=16, loss=loss, validate_every=2)
    whole = Trainer(small_model(), walks(), options, device="cpu")
    whole.fit()

    interrupted = Trainer(small_model(), walks(), options, device="cpu")
    for _ in range(3):
        interrupted.run_epoch()
    save_checkpoint(interrupted, tmp_path / "run.ckpt")
    resumed = Trainer(small_model(seed=99), walks(), options, device="cpu")
    load_checkpoint(resumed, tmp_path / "run.ckpt")
    torch.rand(17)  # whatever else the process draws meanwhile
    resumed.fit()

    assert same(weights(whole.model), weights(resumed.model))
    assert [(report.loss, report.validation) for report in whole.history] == [(r.loss, r.validation) for r in resumed.history]


def test_refuses_to_resume_with_other_options(tmp_path):
    save_checkpoint(Trainer(small_model(), walks(), TrainOptions(), device="cpu"), tmp_path / "run.ckpt")
    with pytest.raises(DataError, match=r"batch_users \(64, now 8\)"):
        load_checkpoint(Trainer(small_model(), walks(), TrainOptions(batch_users=8), device="cpu"), tmp_path / "run.ckpt")


def test_refuses_a_damaged_checkpoint_and_one_of_other_sizes(tmp_path):
    path = tmp_path / "run.ckpt"
    save_checkpoint(Trainer(small_model(SASRec), walks(), TrainOptions(), device="cpu"), path)
    hstu = Trainer(small_model(), walks(), TrainOptions(), device="cpu")
    with pytest.raises(DataError, match="of another model"):
        load_checkpoint(hstu, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="damaged"):
        load_checkpoint(hstu, path)
    torch.save({"model": print}, path)
    with pytest.raises(DataError, match="no file of tensors and plain values") as error:
        load_checkpoint(hstu, path)
    assert "weights_only" not in str(error.value)


def test_refuses_a_checkpoint_of_which_one_bit_was_flipped(tmp_path):
    path, trainer = tmp_path / "run.ckpt", Trainer(small_model(), walks(), TrainOptions(), device="cpu")
    save_checkpoint(trainer, path)
    flip_a_bit(path, trainer.state()["model"]["item_embedding.weight"].numpy().tobytes())
    with pytest.raises(DataError, match=r"run\.ckpt is damaged .*data/\d+ in it does not match its checksum"):
        load_checkpoint(trainer, path)


def test_a_checkpoint_that_the_disk_does_not_take_is_told_and_leaves_the_last_one_whole(tmp_path):
    path, trainer = tmp_path / "run.ckpt", Trainer(small_model(), walks(), TrainOptions(), device="cpu")
    save_checkpoint(trainer, path)
    whole = path.read_bytes()
    with largest_file(len(whole) // 2), pytest.raises(DataError, match=r"run\.ckpt of epoch 0 cannot be written .*disk full.*--resume"):
        save_checkpoint(trainer, path)
    assert [(file, file.read_bytes() == whole) for file in tmp_path.iterdir()] == [(path, True)]


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_last_one_and_so_is_its_name_before_training_goes_on(
    tmp_path, monkeypatch
):
    done, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(Path(f"/proc/self/fd/{file}").readlink().name), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), rename(old, new)))
    save_checkpoint(Trainer(small_model(), walks(), TrainOptions(), device="cpu"), tmp_path / "run.ckpt")
    assert done == ["run.partial", "replace", tmp_path.name]


def test_a_checkpoint_that_the_disk_loses_is_told_and_leaves_the_last_one(tmp_path, monkeypatch):
    path, trainer = tmp_path / "run.ckpt", Trainer(small_model(), walks(), TrainOptions(), device="cpu")
    save_checkpoint(trainer, path)
    whole = path.read_bytes()
    trainer.run_epoch()

    def fails(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DataError, match=r"run\.ckpt of epoch 1 cannot be written .*Input/output error"):
        save_checkpoint(trainer, path)
    assert [(file, file.read_bytes() == whole) for file in tmp_path.iterdir()] == [(path, True)]


def test_refuses_data_with_nothing_to_learn():
    data = walks(5)
    two_each = Interactions(["a"], np.array([0, 2]), data.items[:2], data.timestamps[:2], data.actions[:2], data.values[:2])
    with pytest.raises(DataError, match="at least 4 are needed"):
        Trainer(small_model(), two_each, TrainOptions(), device="cpu")
