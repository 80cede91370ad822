"""The schema: typed behaviours -> sequences -> padded batches -> tensors."""

import subprocess
import sys

import numpy as np
import torch

from cluster.dataset import Catalogue
from cluster.values import Action, Behaviour, Item
from integrations.hstu.user_behavior_schema import collate

CATALOGUE = Catalogue([Item("a", "A"), Item("b", "B"), Item("c", "C")])


def sequence(*timestamps, request_time=1000, item="a"):
    behaviours = [Behaviour(item, timestamp) for timestamp in timestamps]
    return CATALOGUE.sequence(behaviours, request_time)[0]


def test_sorts_behaviours_by_time_and_keeps_the_order_of_ties():
    behaviours = [Behaviour("c", 30), Behaviour("a", 10), Behaviour("b", 10), Behaviour("a", 20)]
    found, _ = CATALOGUE.sequence(behaviours, 100)
    assert found.items.tolist() == [1, 2, 1, 3]
    assert found.timestamps.tolist() == [10, 10, 20, 30]


def test_keeps_actions_and_values_and_says_which_items_are_unknown():
    behaviours = [Behaviour("a", 1, Action.RATING, 4.5), Behaviour("z", 2), Behaviour("b", 3, Action.LIKE), Behaviour("z", 4)]
    found, unknown = CATALOGUE.sequence(behaviours, 100)
    assert unknown == ("z",)
    assert found.actions.tolist() == [Action.RATING.code, Action.LIKE.code]
    assert found.values[0] == 4.5
    assert np.isnan(found.values[1])


def test_every_action_has_a_code_that_survives_the_batch():
    behaviours = [Behaviour("a", i, action) for i, action in enumerate(Action)]
    batch = collate([CATALOGUE.sequence(behaviours, 100)[0]], 200)
    assert [list(Action)[code] for code in batch.actions[0].tolist()] == list(Action)


def test_pads_on_the_right_to_the_longest_history():
    batch = collate([sequence(1, 2), sequence(1, 2, 3, item="b")], 200)
    assert batch.items.tolist() == [[1, 1, 0], [2, 2, 2]]
    assert batch.lengths.tolist() == [2, 3]
    assert batch.times.dtype == batch.next_times.dtype == np.int32
    assert np.isnan(batch.values).all()


def test_keeps_the_latest_events_of_a_long_history():
    batch = collate([sequence(*range(10))], 4)
    assert batch.times.tolist() == [[-994, -993, -992, -991]]


def test_a_row_is_told_when_the_next_event_happens_and_the_last_one_when_the_request_does():
    batch = collate([sequence(100, 400, 900), sequence(700)], 200)
    assert batch.times.tolist() == [[-900, -600, -100], [-300, 0, 0]]
    assert batch.next_times.tolist() == [[-600, -100, 0], [0, 0, 0]]


def test_clips_times_to_what_32_bits_hold():
    batch = collate([sequence(-(2**40), 999, 5000, request_time=1000)], 200)
    assert batch.times[0].tolist() == [-(2**31) + 1, -1, 0]


def test_an_empty_history_gives_a_row_of_padding():
    batch = collate([sequence(), sequence(5)], 200)
    assert batch.items.tolist() == [[0], [1]]
    assert batch.lengths.tolist() == [0, 1]


def test_tensors_have_the_arrays_types_and_share_their_memory():
    batch = collate([sequence(1, 2)], 200)
    tensors = batch.tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "items": torch.int64, "times": torch.int32, "next_times": torch.int32, "lengths": torch.int64,
        "actions": torch.int8, "values": torch.float32,
    }  # fmt: skip
    batch.items[0, 0] = 3
    assert tensors["items"][0, 0] == 3


def test_needs_no_torch_to_be_imported():
    code = "import sys, integrations.hstu.user_behavior_schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
