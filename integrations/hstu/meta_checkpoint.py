"""Checkpoints of Meta's research trainer (meta-recsys/generative-recommenders): read one into our HSTU.

Its tensors have the same shapes as ours under other names, with one difference: a row of its item embedding is the data set's own item
number (a raw movie id, with gaps), a row of ours is a catalogue index. Its relative position weights run from the oldest distance to
the newest: entry N - 1 + (j - i) is for key j seen from row i, as in ours.
"""

import pickle
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


def read_meta_config(path: Path, items: int) -> HSTUConfig:
    """The configuration in the trainer's own .gin file, or in YAML or JSON with the names of `HSTUConfig`."""
    values = _gin(path) if path.suffix == ".gin" else yaml.safe_load(path.read_text())
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping; give a .gin file, or YAML such as: dim: 50")
    try:
        return HSTUConfig.model_validate({**values, "items": items})
    except ValidationError as error:
        raise ConfigError(f"{path} is not the configuration of an HSTU: {error}") from error


def read_meta_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by Meta's names, without the prefix of distributed training. Nothing in the file is executed."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} can't be read as a checkpoint: {error}") from error
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


def _gin(path: Path) -> dict[str, Any]:
    lines = (line.split("#")[0].partition("=") for line in path.read_text().splitlines())
    pairs = {key.strip(): value.strip() for key, equals, value in lines if equals}
    values = {ours: yaml.safe_load(pairs[gin]) for gin, ours in _GIN_KEYS.items() if gin in pairs}
    if "max_history" in values:
        values["max_length"] = values["max_history"] + _OUTPUT_LENGTH
    return values
