"""Checkpoints of Meta's research trainer (meta-recsys/generative-recommenders): read one into our HSTU.

Its tensors have the same shapes as ours under other names, with one difference: a row of its item embedding is the data set's own item
number (a raw movie id, with gaps), a row of ours is a catalogue index. Its relative position weights run from the oldest distance to
the newest: entry N - 1 + (j - i) is for key j seen from row i, as in ours.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from cluster.errors import ConfigError, DataError
from integrations.hstu.config import HSTUConfig
from integrations.hstu.model import HSTU

ITEMS, POSITIONS = "_embedding_module._item_emb.weight", "_input_features_preproc._pos_emb.weight"
_LAYER = "_hstu._attention_layers.{}."
_LAYER_NAMES = {
    "uvqk": "_uvqk",
    "output.weight": "_o.weight",
    "output.bias": "_o.bias",
    "time_weights": "_rel_attn_bias._ts_w",
    "position_weights": "_rel_attn_bias._pos_w",
}
_NOT_WEIGHTS = ("_attn_mask",)
_GIN_KEYS = {
    "train_fn.item_embedding_dim": "dim",
    "train_fn.dropout_rate": "dropout",
    "train_fn.max_sequence_length": "max_history",
    "hstu_encoder.num_blocks": "layers",
    "hstu_encoder.num_heads": "heads",
    "hstu_encoder.dqk": "attention_dim",
    "hstu_encoder.dv": "linear_dim",
}
_OUTPUT_LENGTH = 11
"""What the research trainer adds to the maximum sequence length: `gr_output_length` (10) and the target."""
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "train_fn.main_module": ("HSTU",),
    "train_fn.user_embedding_norm": ("l2_norm",),
    "train_fn.item_l2_norm": (True,),
    "train_fn.l2_norm_eps": (1e-6,),
    "train_fn.gr_output_length": (10,),
    "train_fn.embedding_module_type": ("local",),
    "train_fn.interaction_module_type": ("DotProduct",),
    "hstu_encoder.normalization": ("rel_bias", "hstu_rel_bias"),
    "hstu_encoder.linear_config": ("uvqk",),
    "hstu_encoder.linear_activation": ("silu",),
    "hstu_encoder.concat_ua": (False,),
    "hstu_encoder.enable_relative_attention_bias": (True,),
}
"""Settings that change the model's answers and have one meaning here."""
_REQUIRED = ("train_fn.main_module", "train_fn.item_l2_norm", "train_fn.item_embedding_dim", "hstu_encoder.dqk", "hstu_encoder.dv")
"""Settings whose default in the trainer is another than ours."""
_TRAINING_ONLY = ("hstu_encoder.linear_dropout_rate", "hstu_encoder.attn_dropout_rate")


def read_meta_config(path: Path, items: int, window_step: int | None = None) -> HSTUConfig:
    """The configuration in the trainer's own .gin file, or in YAML or JSON with the names of `HSTUConfig`.

    The served window moves by one event, as the trainer's does, unless `window_step` or the file says otherwise.
    Raises ConfigError where it can't be read, leaves out what must be known, or describes a model other than this HSTU.
    """
    try:
        text = path.read_text()
        values = _gin(path, text) if path.suffix == ".gin" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read as a configuration: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping; give a .gin file, or YAML such as: dim: 50")
    asked = {} if window_step is None else {"window_step": window_step}
    try:
        return HSTUConfig.model_validate({"window_step": 1, **values, **asked, "items": items})
    except ValidationError as error:
        raise ConfigError(f"{path} is not the configuration of an HSTU: {error}") from error


def read_meta_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by Meta's names, without the prefix of distributed training. Nothing in the file is executed."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of something else leads the unpickler to errors of any kind, such as KeyError
        raise DataError(f"{path} can't be read as a checkpoint: {error!r}") from error
    state = saved.get("model_state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise DataError(f"{path} has no 'model_state_dict': it was not saved by Meta's research trainer")
    return {name.removeprefix("module."): tensor for name, tensor in state.items() if not name.endswith(_NOT_WEIGHTS)}


def from_meta(state: Mapping[str, Tensor], config: HSTUConfig, item_rows: Sequence[int]) -> HSTU:
    """An HSTU with the checkpoint's weights; `item_rows[i - 1]` is the embedding row of the item with catalogue index i.

    Raises DataError that names every missing, unexpected or misshapen tensor.
    """
    model = HSTU(config)
    ours = model.state_dict()
    names = _names(config)
    problems = _missing(state, names) + _misshapen(state, names, ours) + _bad_rows(state, item_rows)
    if problems:
        raise DataError("the checkpoint does not fit the configuration: " + "; ".join(problems))
    weights = {our_name: state[meta_name].float() for our_name, meta_name in names.items()}
    weights["item_embedding.weight"] = torch.cat([torch.zeros(1, config.dim), state[ITEMS].float()[list(item_rows)]])
    model.load_state_dict(weights)
    return model.eval()


def raw_id_rows(item_ids: Sequence[str]) -> list[int]:
    """The embedding rows of items whose ids are the trainer's item numbers. Raises DataError where an id is not a number."""
    if strangers := [item_id for item_id in item_ids if not item_id.isdecimal()]:
        raise DataError(
            f"{len(strangers)} item ids are not numbers, such as {strangers[0]!r}, so that their rows in the checkpoint are unknown; "
            "give the data set the checkpoint was trained on, with its raw item ids"
        )
    return [int(item_id) for item_id in item_ids]


def _names(config: HSTUConfig) -> dict[str, str]:
    """Our name -> Meta's name of every tensor but the item embedding."""
    layers = {f"layers.{i}.{ours}": _LAYER.format(i) + meta for i in range(config.layers) for ours, meta in _LAYER_NAMES.items()}
    return {"position_embedding.weight": POSITIONS, **layers}


def _missing(state: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    expected = {ITEMS, *names.values()}
    problems = {"missing": sorted(expected - set(state)), "unexpected": sorted(set(state) - expected)}
    return [f"{kind} {', '.join(found)}" for kind, found in problems.items() if found]


def _misshapen(state: Mapping[str, Tensor], names: Mapping[str, str], ours: Mapping[str, Tensor]) -> list[str]:
    width = ours["item_embedding.weight"].shape[1]
    problems = [
        f"{meta} has shape {tuple(state[meta].shape)}, the configuration wants {tuple(ours[name].shape)}"
        for name, meta in names.items()
        if meta in state and state[meta].shape != ours[name].shape
    ]
    if ITEMS in state and (state[ITEMS].dim() != 2 or state[ITEMS].shape[1] != width):
        problems.append(f"{ITEMS} has shape {tuple(state[ITEMS].shape)}, the configuration wants (rows, {width})")
    return problems


def _bad_rows(state: Mapping[str, Tensor], item_rows: Sequence[int]) -> list[str]:
    rows = len(state[ITEMS]) if ITEMS in state else None
    outside = [row for row in item_rows if rows is not None and not 0 < row < rows]
    if not outside:
        return []
    return [f"{ITEMS} has rows 1..{(rows or 1) - 1}, but {len(outside)} items have numbers outside, such as {outside[0]}"]


def _gin(path: Path, text: str) -> dict[str, Any]:
    lines = (line.split("#")[0].partition("=") for line in text.splitlines())
    pairs = {key.strip(): value.strip() for key, equals, value in lines if equals}
    settings = {key: _literal(path, key, pairs[key]) for key in (*_GIN_KEYS, *_IMPLEMENTED) if key in pairs}
    if problems := _unlike_ours(settings, pairs):
        raise ConfigError(f"{path} does not describe the HSTU that is implemented here: " + "; ".join(problems))
    values = {ours: settings[gin] for gin, ours in _GIN_KEYS.items() if gin in settings}
    if isinstance(longest := values.get("max_history"), int):
        values["max_length"] = longest + _OUTPUT_LENGTH
    return values


def _literal(path: Path, key: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(f"{path}: {key} = {text} is no number, string or truth value; write the value itself") from None


def _unlike_ours(settings: Mapping[str, Any], pairs: Mapping[str, str]) -> list[str]:
    others = [key for key, values in _IMPLEMENTED.items() if key in settings and settings[key] not in values]
    known = {*_GIN_KEYS, *_IMPLEMENTED, *_TRAINING_ONLY}
    return [
        *(f"{key} is {settings[key]!r}, implemented is {_IMPLEMENTED[key][0]!r}" for key in others),
        *(f"{key} is missing" for key in _REQUIRED if key not in settings),
        *(f"{key} = {pairs[key]} is unknown" for key in pairs if key.startswith("hstu_encoder.") and key not in known),
    ]
