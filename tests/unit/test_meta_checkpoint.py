"""Checkpoints of Meta's research trainer."""

import numpy as np
import pytest
import torch

from cluster.errors import ConfigError, DataError
from cluster.values import UserSequence
from integrations.hstu.config import HSTUConfig
from integrations.hstu.meta_checkpoint import from_meta, raw_id_rows, read_meta_checkpoint, read_meta_config
from integrations.hstu.user_behavior_schema import collate
from tests.hstu_oracle import hstu_states, meta_state

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


def test_refuses_items_the_checkpoint_has_no_row_for():
    with pytest.raises(DataError, match=r"rows 1\.\.12, but 1 items have numbers outside, such as 13"):
        from_meta(tensors(), CONFIG, raw_id_rows([*RAW_IDS[:4], "13"]))


def test_refuses_item_ids_that_are_no_numbers():
    with pytest.raises(DataError, match="such as 'B0001'"):
        raw_id_rows(["1", "B0001"])


def test_refuses_a_checkpoint_that_would_run_code(tmp_path):
    class Malicious:
        def __reduce__(self):
            return print, ("owned",)

    torch.save({"model_state_dict": Malicious()}, tmp_path / "bad")
    with pytest.raises(DataError, match="can't be read as a checkpoint"):
        read_meta_checkpoint(tmp_path / "bad")


def test_refuses_a_file_of_something_else(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other")
    with pytest.raises(DataError, match="no 'model_state_dict'"):
        read_meta_checkpoint(tmp_path / "other")


def test_refuses_a_file_that_is_no_checkpoint_at_all(tmp_path):
    for content in (b"hello world", b"", b"PK\x03\x04", bytes(range(256))):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(DataError, match="text can't be read as a checkpoint"):
            read_meta_checkpoint(tmp_path / "text")
    with pytest.raises(DataError, match="nowhere can't be read as a checkpoint"):
        read_meta_checkpoint(tmp_path / "nowhere")


LARGE = """
train_fn.dataset_name = "ml-1m"
train_fn.max_sequence_length = 200   # events
train_fn.main_module = "HSTU"
train_fn.dropout_rate = 0.2
train_fn.user_embedding_norm = "l2_norm"
train_fn.item_embedding_dim = 50
hstu_encoder.num_blocks = 8
hstu_encoder.num_heads = 2
hstu_encoder.dqk = 25
hstu_encoder.dv = 25
hstu_encoder.linear_dropout_rate = 0.2
train_fn.learning_rate = 1e-3
train_fn.interaction_module_type = "DotProduct"
train_fn.item_l2_norm = True
train_fn.l2_norm_eps = 1e-6
create_data_loader.num_workers = 8
"""


def test_reads_the_trainers_own_configuration_file(tmp_path):
    (tmp_path / "large.gin").write_text(LARGE)
    config = read_meta_config(tmp_path / "large.gin", items=3883)
    assert config == HSTUConfig(
        items=3883, dim=50, layers=8, heads=2, attention_dim=25, linear_dim=25, max_length=211, max_history=200, window_step=1
    )


def test_refuses_a_configuration_with_unknown_keys(tmp_path):
    (tmp_path / "c.yaml").write_text("dim: 50\nwidth: 3\n")
    with pytest.raises(ConfigError, match="width"):
        read_meta_config(tmp_path / "c.yaml", items=10)


@pytest.mark.parametrize(
    ("key", "value", "implemented"),
    [
        ("train_fn.main_module", "'SASRec'", "'HSTU'"),
        ("train_fn.user_embedding_norm", "'layer_norm'", "'l2_norm'"),
        ("train_fn.item_l2_norm", "False", "True"),
        ("train_fn.gr_output_length", "20", "10"),
        ("train_fn.interaction_module_type", "'MoL'", "'DotProduct'"),
        ("hstu_encoder.normalization", "'softmax_rel_bias'", "'rel_bias'"),
        ("hstu_encoder.linear_activation", "'none'", "'silu'"),
        ("hstu_encoder.concat_ua", "True", "False"),
        ("hstu_encoder.enable_relative_attention_bias", "False", "True"),
    ],
)
def test_refuses_settings_of_the_trainer_that_make_another_model(tmp_path, key, value, implemented):
    (tmp_path / "c.gin").write_text(f"{LARGE}\n{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"{key} is {value}, implemented is {implemented}"):
        read_meta_config(tmp_path / "c.gin", items=10)


@pytest.mark.parametrize("key", ["hstu_encoder.dqk", "hstu_encoder.dv", "train_fn.item_l2_norm", "train_fn.main_module"])
def test_refuses_a_trainers_file_without_a_setting_whose_default_is_not_ours(tmp_path, key):
    (tmp_path / "c.gin").write_text("\n".join(line for line in LARGE.splitlines() if not line.startswith(f"{key} ")))
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_meta_config(tmp_path / "c.gin", items=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hstu_encoder.layer_scale = 2", r"hstu_encoder\.layer_scale = 2 is unknown"),
        ("hstu_encoder.dqk = %WIDTH", r"hstu_encoder\.dqk = %WIDTH is no number"),
        ("train_fn.max_sequence_length = 'long'", "max_history"),
    ],
)
def test_refuses_lines_of_the_trainers_file_that_it_does_not_understand(tmp_path, line, message):
    (tmp_path / "c.gin").write_text(f"{LARGE}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_meta_config(tmp_path / "c.gin", items=10)


@pytest.mark.parametrize(("name", "content"), [("c.yaml", b"dim: [50"), ("c.json", b"\xff\xfe"), ("c.gin", b"\xff"), ("none.yaml", None)])
def test_refuses_a_configuration_file_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} can't be read as a configuration"):
        read_meta_config(tmp_path / name, items=10)
