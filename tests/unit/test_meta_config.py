"""What Meta's research trainer was told, in its own gin file or in YAML."""

import pytest

from cluster.errors import ConfigError
from integrations.hstu.config import HSTUConfig
from integrations.hstu.meta_config import MetaConfig, read_meta_config

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


SIZES = HSTUConfig(items=3883, dim=50, layers=8, heads=2, attention_dim=25, linear_dim=25, max_length=211, max_history=200, window_step=1)


def test_reads_the_trainers_own_configuration_file(tmp_path):
    (tmp_path / "large.gin").write_text(LARGE)
    told = read_meta_config(tmp_path / "large.gin", items=3883)
    assert told == MetaConfig(SIZES, bf16=False)


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
        ("train_fn.main_module_bf16", "'fp8'", "False"),
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


@pytest.mark.parametrize(
    "key",
    [
        "hstu_encoder.dqk", "hstu_encoder.dv", "hstu_encoder.num_blocks", "hstu_encoder.num_heads", "train_fn.item_l2_norm",
        "train_fn.main_module", "train_fn.item_embedding_dim", "train_fn.max_sequence_length",
    ],
)  # fmt: skip
def test_refuses_a_trainers_file_that_leaves_a_size_or_the_kind_of_model_to_a_default(tmp_path, key):
    (tmp_path / "c.gin").write_text("\n".join(line for line in LARGE.splitlines() if not line.startswith(f"{key} ")))
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_meta_config(tmp_path / "c.gin", items=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hstu_encoder.layer_scale = 2", r"line 19: hstu_encoder\.layer_scale = 2 is unknown"),
        ("train_fn.item_embeding_dim = 64", r"line 19: train_fn\.item_embeding_dim = 64 is unknown"),
        ("hstu_encoder.dqk = %WIDTH", r"c\.gin, line 19: hstu_encoder\.dqk = %WIDTH is no number"),
        ("hstu_encoder.dqk = @width()", r"c\.gin, line 19: hstu_encoder\.dqk = @width\(\) is no number"),
        ("eval/hstu_encoder.dqk = 25", r"line 19: eval/hstu_encoder\.dqk holds in gin's scope 'eval', and the trainer enters none"),
        (
            "my.train_fn.main_module = 'HSTU'",
            r"line 19: my\.train_fn\.main_module is not the trainer's, which is .*\.train_fn",
        ),
        ("include 'base.gin'", r"line 19: include 'base\.gin' is not followed; write the lines of that file in its place"),
        ("hstu_encoder:\n  dqk = 25", r"line 19: a block of settings \('hstu_encoder:'\) is not read"),
        ("from mine import hstu_encoder as encoder", "line 19: .* gives another name"),
        ("hstu_encoder.dqk 25", r"line 19: 'hstu_encoder\.dqk 25' is no setting; write NAME\.PARAMETER = VALUE"),
        ("hstu_encoder..dqk = 25", "line 19: .* is no setting"),
        ("hstu_encoder.dqk =", "line 19: .* is no setting"),
        ("hstu_encoder.dqk = (25", "line 19: what begins here does not end"),
        ("train_fn.random_seed = 1; train_fn.item_embedding_dim = 99", "line 19: .* is no setting"),
        ("train_fn.dataset_name = 'x':", "line 19: .* is no setting"),
        ("SEED = 1; train_fn.item_embedding_dim = 99", "line 19: .* is no setting"),
        pytest.param(f"hstu_encoder.dqk = {5000 * '-'}1", r"line 19: 'hstu_encoder\.dqk = --.*\.\.\.' is no setting", id="nested deeply"),
        ("train_fn.gr_output_length = 'ten'", "max_length"),
        ("train_fn.max_sequence_length = 'long'", "max_history"),
    ],
)
def test_refuses_lines_of_the_trainers_file_that_it_does_not_understand(tmp_path, line, message):
    (tmp_path / "c.gin").write_text(f"{LARGE}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_meta_config(tmp_path / "c.gin", items=10)


@pytest.mark.parametrize(
    ("name", "content"),
    [("c.yaml", b"dim: [50"), ("d.yaml", b"dim: 2027-02-30"), ("c.json", b"\xff\xfe"), ("c.gin", b"\xff"), ("none.yaml", None)],
)
def test_refuses_a_configuration_file_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} can't be read as a configuration"):
        read_meta_config(tmp_path / name, items=10)


def written(tmp_path, text, name="c.gin"):
    (tmp_path / name).write_bytes(text.encode())
    return tmp_path / name


@pytest.mark.parametrize(
    "changed",
    {
        "lines of another system": LARGE.replace("\n", "\r\n"),
        "a byte order mark": f"\ufeff{LARGE}",
        "names with their modules": LARGE.replace("train_fn.", "generative_recommenders.research.trainer.train.train_fn.", 3).replace(
            "hstu_encoder.", "encoder_utils.hstu_encoder."
        ),
        "a value on the next line": LARGE.replace("dqk = 25", "dqk = \\\n    25"),
        "a value in brackets over lines": LARGE.replace("dqk = 25", "dqk = (  # wide\n    25\n)"),
        "imports": f"import generative_recommenders.research.trainer.train\nfrom gin import tf\n{LARGE}",
        "macros that nothing names": f"WIDTH = 25\n{LARGE}",
        "settings of other functions, in scopes too": f"{LARGE}\neval/create_data_loader.num_workers = @workers()\n",
        "references and macros in lists": f"{LARGE}\ncreate_data_loader.by = [@a/b.workers(), %WIDTH, {{'x': @c}}]\n",
        "a sign of comments in a string": LARGE.replace('"ml-1m"', '"ml-1m#2"'),
        "a setting that a later one replaces": f"hstu_encoder.dqk = 7\n{LARGE}",
    }.items(),
    ids=lambda item: item[0],
)
def test_reads_whatever_gin_reads_alike(tmp_path, changed):
    assert read_meta_config(written(tmp_path, changed[1]), items=3883).sizes == SIZES


def test_knows_whether_the_model_was_trained_in_bf16(tmp_path):
    assert read_meta_config(written(tmp_path, f"{LARGE}\ntrain_fn.main_module_bf16 = True\n"), items=3).bf16 is True
    sizes = SIZES.model_dump_json(exclude={"items", "window_step"})
    assert read_meta_config(written(tmp_path, sizes, "c.json"), items=3883) == MetaConfig(SIZES, bf16=None)


def test_the_padded_length_has_room_for_the_trainers_output(tmp_path):
    assert read_meta_config(written(tmp_path, f"{LARGE}\ntrain_fn.gr_output_length = 20\n"), items=3).sizes.max_length == 221


def test_the_window_moves_by_what_is_asked_for_rather_than_by_what_the_file_says(tmp_path):
    path = written(tmp_path, SIZES.model_copy(update={"window_step": 5}).model_dump_json(exclude={"items"}), "c.json")
    assert [read_meta_config(path, items=3, window_step=step).sizes.window_step for step in (None, 25)] == [5, 25]
    with pytest.raises(ConfigError, match="window_step"):
        read_meta_config(path, items=3, window_step=201)


@pytest.mark.parametrize("left_out", ["dim", "layers", "heads", "attention_dim", "linear_dim", "max_length", "max_history"])
def test_refuses_a_file_of_our_names_that_leaves_out_a_size(tmp_path, left_out):
    path = written(tmp_path, SIZES.model_dump_json(exclude={"items", left_out}), "c.yaml")
    with pytest.raises(ConfigError, match=f"leaves out {left_out}, which the checkpoint does not say"):
        read_meta_config(path, items=3)
