"""Checkpoints of Meta's research trainer (meta-recsys/generative-recommenders): read one into our HSTU.

Its tensors have the same shapes as ours under other names, with one difference: a row of its item embedding is the data set's own item
number (a raw movie id, with gaps), a row of ours is a catalogue index. Its relative position weights run from the oldest distance to
the newest: entry N - 1 + (j - i) is for key j seen from row i, as in ours.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cluster.checksums import require_intact
from cluster.errors import DataError
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


def read_meta_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by Meta's names, without the prefix of distributed training. Nothing in the file is executed."""
    try:
        require_intact(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of something else leads the unpickler to errors of any kind, such as KeyError
        raise DataError(f"{path} can't be read as a checkpoint: {_why(error)}") from error
    state = saved.get("model_state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise DataError(f"{path} has no 'model_state_dict': it was not saved by Meta's research trainer")
    if strange := [name for name, value in state.items() if not (isinstance(name, str) and isinstance(value, Tensor))]:
        raise DataError(f"{path}: {strange[0]!r} of its 'model_state_dict' is no tensor with a name; it was not saved by Meta's trainer")
    return {name.removeprefix("module."): tensor for name, tensor in state.items() if not name.endswith(_NOT_WEIGHTS)}


def _why(error: Exception) -> str:
    """The message of torch; in our own words where torch advises to load the file unguarded, which would run code that the file names."""
    if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in str(error):
        return repr(error)
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f", such as {named[1]}" if named else ""
    return (
        f"it is no checkpoint, or holds objects other than tensors{what}, which could run code as they are loaded; "
        "save the weights of a checkpoint alone: torch.save({'model_state_dict': model.state_dict()}, FILE)"
    )


def from_meta(state: Mapping[str, Tensor], config: HSTUConfig, item_rows: Sequence[int], *, bf16: bool | None = None) -> HSTU:
    """An HSTU with the checkpoint's weights; `item_rows[i - 1]` is the embedding row of the item with catalogue index i.

    Weights in bf16 become the same numbers in fp32, in which this HSTU computes. `bf16`: whether they must be in bf16; None: either.

    Raises DataError that names every missing, unexpected or misshapen tensor, and tensors of a wrong kind.
    """
    model = HSTU(config)
    ours = model.state_dict()
    names = _names(config)
    problems = [*_missing(state, names), *_misshapen(state, names, ours)]
    problems = problems or [*_wrong_kinds(state, bf16), *_not_finite(state), *_bad_rows(state, item_rows)]
    if problems:
        raise DataError("the checkpoint does not fit the configuration: " + "; ".join(problems))
    weights = {our_name: state[meta_name].float() for our_name, meta_name in names.items()}
    weights["item_embedding.weight"] = torch.cat([torch.zeros(1, config.dim), state[ITEMS].float()[list(item_rows)]])
    model.load_state_dict(weights)
    return model.eval()


def raw_id_rows(item_ids: Sequence[str]) -> list[int]:
    """The embedding rows of items whose ids are the trainer's item numbers.

    Raises DataError where an id is not a number, or two are the same one.
    """
    if strangers := [item_id for item_id in item_ids if not item_id.isdecimal()]:
        raise DataError(
            f"{len(strangers)} item ids are not numbers, such as {strangers[0]!r}, so that their rows in the checkpoint are unknown; "
            "give the data set the checkpoint was trained on, with its raw item ids"
        )
    named: dict[int, str] = {}
    for item_id in item_ids:
        if (other := named.setdefault(int(item_id), item_id)) != item_id:
            raise DataError(
                f"item ids {other!r} and {item_id!r} are both the number {int(item_id)}, and the checkpoint has one row of it; "
                "write each number in one way in the data set"
            )
    return list(named)


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
    if ITEMS in state and (state[ITEMS].dim() != 2 or len(state[ITEMS]) < 2 or state[ITEMS].shape[1] != width):
        problems.append(f"{ITEMS} has shape {tuple(state[ITEMS].shape)}, the configuration wants (rows, {width})")
    return problems


def _wrong_kinds(state: Mapping[str, Tensor], bf16: bool | None) -> list[str]:
    kinds = {str(tensor.dtype).removeprefix("torch."): name for name, tensor in state.items()}
    known = {None: ("float32", "bfloat16"), False: ("float32",), True: ("bfloat16",)}[bf16]
    told = "" if bf16 is None else f" (train_fn.main_module_bf16 is {bf16})"
    problems = [f"{name} is {kind}, not {' or '.join(known)}{told}" for kind, name in kinds.items() if kind not in known]
    return problems or ([f"tensors are of several kinds: {', '.join(sorted(kinds))}"] if len(kinds) > 1 else [])


def is_bf16(state: Mapping[str, Tensor]) -> bool:
    return state[ITEMS].dtype == torch.bfloat16


def last_row(state: Mapping[str, Tensor]) -> int:
    """The largest item number that the checkpoint has an embedding for."""
    return len(state[ITEMS]) - 1


def _not_finite(state: Mapping[str, Tensor]) -> list[str]:
    problems = []
    for name, tensor in state.items():
        broken = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(dim=1).nonzero().flatten()
        if len(broken):
            problems.append(f"{name} holds NaN or infinity in {len(broken)} of {len(tensor)} rows, such as row {int(broken[0])}")
    return problems


def _bad_rows(state: Mapping[str, Tensor], item_rows: Sequence[int]) -> list[str]:
    last = last_row(state)
    outside = [row for row in item_rows if not 0 < row <= last]
    if not outside:
        return []
    found = f"{len(outside)} items have numbers outside, such as {outside[0]}, and {max(item_rows)} is the largest"
    return [f"{ITEMS} has rows 1..{last}, but {found}; give the data set that the checkpoint was trained on"]
