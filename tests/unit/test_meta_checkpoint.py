"""Checkpoints of Meta's research trainer."""

import numpy as np
import pytest
import torch

from cluster.errors import DataError
from cluster.values import UserSequence
from integrations.hstu.config import HSTUConfig
from integrations.hstu.meta_checkpoint import from_meta, raw_id_rows, read_meta_checkpoint
from integrations.hstu.user_behavior_schema import collate
from tests.hstu_oracle import hstu_states, meta_state
from tests.mutations import flip_a_bit

RAW_IDS = ["1", "3", "4", "9", "12"]
SHAPE = {"layers": 2, "heads": 2, "dqk": 5, "dv": 3, "n": 21}
CONFIG = HSTUConfig(items=5, dim=8, layers=2, heads=2, attention_dim=5, linear_dim=3, max_length=21, max_history=10)


def tensors(seed=0):
    state = meta_state(np.random.default_rng(seed), rows=13, dim=8, **SHAPE)
    return {name: torch.from_numpy(value) for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_answers_as_the_formula_does_with_the_items_raw_numbers(tmp_path, prefix):
    state = tensors()
    saved = {f"{prefix}{name}": tensor for name, tensor in state.items()} | {f"{prefix}_hstu._attn_mask": torch.ones(21, 21)}
    torch.save({"epoch": 3, "model_state_dict": saved, "optimizer_state_dict": {}}, tmp_path / "checkpoint")
    model = from_meta(read_meta_checkpoint(tmp_path / "checkpoint"), CONFIG, raw_id_rows(RAW_IDS))

    times = np.array([1000, 5000, 5000, 90000], dtype=np.int64)
    history = UserSequence(np.array([2, 5, 1, 4], np.int32), times, np.zeros(4, np.int8), np.full(4, np.nan, np.float32), 200_000)
    batch = collate([history], 10).tensors()
    with torch.inference_mode():
        states = model(batch["items"], batch["times"], batch["next_times"])[0]
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    expected = hstu_states(arrays, [3, 12, 1, 9], times.tolist(), 200_000, **SHAPE)
    assert np.abs(states.numpy() - expected).max() < 1e-5


def test_names_every_missing_unexpected_and_misshapen_tensor():
    state = tensors()
    del state["_hstu._attention_layers.1._o.bias"]
    state["_hstu._attention_layers.2._uvqk"] = torch.zeros(1)
    state["_input_features_preproc._pos_emb.weight"] = torch.zeros(50, 8)
    with pytest.raises(DataError) as error:
        from_meta(state, CONFIG, raw_id_rows(RAW_IDS))
    for part in (
        "missing _hstu._attention_layers.1._o.bias",
        "unexpected _hstu._attention_layers.2._uvqk",
        "_input_features_preproc._pos_emb.weight has shape (50, 8), the configuration wants (21, 8)",
    ):
        assert part in str(error.value)


def test_refuses_ids_that_are_one_number_written_in_two_ways():
    with pytest.raises(DataError, match="item ids '7' and '007' are both the number 7, and the checkpoint has one row of it; write each"):
        raw_id_rows(["1", "7", "12", "007"])


def test_refuses_items_the_checkpoint_has_no_row_for():
    with pytest.raises(DataError, match=r"rows 1\.\.12, but 1 items have numbers outside, such as 13, and 13 is the largest; give"):
        from_meta(tensors(), CONFIG, raw_id_rows([*RAW_IDS[:4], "13"]))


def test_refuses_item_ids_that_are_no_numbers():
    with pytest.raises(DataError, match="such as 'B0001'"):
        raw_id_rows(["1", "B0001"])


def test_refuses_a_checkpoint_that_would_run_code(tmp_path):
    class Malicious:
        def __reduce__(self):
            return eval, ("1",)  # not print, which Ray replaces

    torch.save({"model_state_dict": Malicious()}, tmp_path / "bad")
    with pytest.raises(DataError, match=r"can't be read as a checkpoint: .* such as \S*eval, which could run code") as error:
        read_meta_checkpoint(tmp_path / "bad")
    assert "weights_only" not in str(error.value)


def test_refuses_a_checkpoint_of_which_one_bit_was_flipped(tmp_path):
    tensor = torch.arange(1000, dtype=torch.float32)
    torch.save({"model_state_dict": {"rows": tensor}}, tmp_path / "flipped")
    flip_a_bit(tmp_path / "flipped", tensor.numpy().tobytes())
    with pytest.raises(DataError, match=r"flipped can't be read as a checkpoint: .*flipped/data/0 in it does not match its checksum"):
        read_meta_checkpoint(tmp_path / "flipped")


def test_refuses_a_file_of_something_else(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other")
    with pytest.raises(DataError, match="no 'model_state_dict'"):
        read_meta_checkpoint(tmp_path / "other")


def test_refuses_a_file_that_is_no_checkpoint_at_all(tmp_path):
    for content in (b"hello world", b"", b"PK\x03\x04", bytes(range(256))):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(DataError, match="text can't be read as a checkpoint") as error:
            read_meta_checkpoint(tmp_path / "text")
        assert "weights_only" not in str(error.value)
    with pytest.raises(DataError, match="nowhere can't be read as a checkpoint"):
        read_meta_checkpoint(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_refuses_a_torchscript_archive_without_advice_to_load_it_unguarded(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script")
    with pytest.raises(DataError, match="script can't be read as a checkpoint") as error:
        read_meta_checkpoint(tmp_path / "script")
    assert "weights_only" not in str(error.value)


@pytest.mark.parametrize("state", [{"a": 1}, {1: torch.zeros(1)}])
def test_refuses_a_state_that_is_not_of_named_tensors(tmp_path, state):
    torch.save({"model_state_dict": state}, tmp_path / "odd")
    with pytest.raises(DataError, match="of its 'model_state_dict' is no tensor with a name"):
        read_meta_checkpoint(tmp_path / "odd")


@pytest.mark.parametrize(("name", "row"), [("_embedding_module._item_emb.weight", 9), ("_hstu._attention_layers.1._o.bias", 4)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_refuses_weights_that_are_no_numbers_and_names_their_row(name, row, value):
    state = tensors()
    state[name][row] = value
    with pytest.raises(DataError, match=rf"{name} holds NaN or infinity in 1 of \d+ rows, such as row {row}"):
        from_meta(state, CONFIG, raw_id_rows(RAW_IDS))


def test_weights_of_bf16_are_the_same_numbers_here():
    state = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    model = from_meta(state, CONFIG, raw_id_rows(RAW_IDS), bf16=True)
    assert model.item_embedding.weight.dtype == torch.float32
    assert torch.equal(model.item_embedding.weight[1:], state["_embedding_module._item_emb.weight"].float()[[int(row) for row in RAW_IDS]])
    assert torch.equal(model.layers[1].uvqk, state["_hstu._attention_layers.1._uvqk"].float())


@pytest.mark.parametrize(
    ("dtype", "bf16", "message"),
    [
        (torch.bfloat16, False, r"is bfloat16, not float32 \(train_fn.main_module_bf16 is False\)"),
        (torch.float32, True, r"is float32, not bfloat16 \(train_fn.main_module_bf16 is True\)"),
        (torch.float16, None, "is float16, not float32 or bfloat16"),
        (torch.int64, None, "is int64, not float32 or bfloat16"),
    ],
)
def test_refuses_weights_of_another_kind_than_the_trainer_was_told(dtype, bf16, message):
    with pytest.raises(DataError, match=message):
        from_meta({name: tensor.to(dtype) for name, tensor in tensors().items()}, CONFIG, raw_id_rows(RAW_IDS), bf16=bf16)


def test_refuses_weights_of_several_kinds():
    state = tensors()
    state["_hstu._attention_layers.1._o.bias"] = state["_hstu._attention_layers.1._o.bias"].bfloat16()
    with pytest.raises(DataError, match="tensors are of several kinds: bfloat16, float32"):
        from_meta(state, CONFIG, raw_id_rows(RAW_IDS))
