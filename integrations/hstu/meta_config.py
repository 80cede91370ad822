"""Read the configuration of Meta's research trainer (meta-recsys/generative-recommenders), a gin file or YAML, into our HSTU's.

The trainer's defaults are not guessed: sizes, and settings that would make another model, must be in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.errors import ConfigError
from integrations.hstu.config import HSTUConfig
from integrations.hstu.gin_file import Setting, read_settings

_SIZES = {
    "train_fn.item_embedding_dim": "dim",
    "train_fn.max_sequence_length": "max_history",
    "hstu_encoder.num_blocks": "layers",
    "hstu_encoder.num_heads": "heads",
    "hstu_encoder.dqk": "attention_dim",
    "hstu_encoder.dv": "linear_dim",
}
_STATED = {"max_length", *_SIZES.values()}
"""The keys that a file with our own names must have."""
_DROPOUT, _OUTPUT_LENGTH, _BF16 = "train_fn.dropout_rate", "train_fn.gr_output_length", "train_fn.main_module_bf16"
_DEFAULT_OUTPUT_LENGTH = 10
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "train_fn.main_module": ("HSTU",),
    _BF16: (False, True),
    "train_fn.user_embedding_norm": ("l2_norm",),
    "train_fn.item_l2_norm": (True,),
    "train_fn.l2_norm_eps": (1e-6,),
    "train_fn.embedding_module_type": ("local",),
    "train_fn.interaction_module_type": ("DotProduct",),
    "hstu_encoder.normalization": ("rel_bias", "hstu_rel_bias"),
    "hstu_encoder.linear_config": ("uvqk",),
    "hstu_encoder.linear_activation": ("silu",),
    "hstu_encoder.concat_ua": (False,),
    "hstu_encoder.enable_relative_attention_bias": (True,),
}
"""Settings that change the model's answers and have one meaning here."""
_REQUIRED = ("train_fn.main_module", "train_fn.item_l2_norm", *_SIZES)
"""Sizes, and settings with another default in the trainer than here."""
_TRAINING_ONLY = {
    "hstu_encoder": {"linear_dropout_rate", "attn_dropout_rate"},
    "train_fn": {
        "dataset_name", "positional_sampling_ratio", "local_batch_size", "eval_batch_size", "eval_user_max_batch_size", "sampling_strategy",
        "loss_module", "loss_weights", "num_negatives", "loss_activation_checkpoint", "temperature", "num_epochs", "learning_rate",
        "num_warmup_steps", "weight_decay", "top_k_method", "eval_interval", "full_eval_every_n", "save_ckpt_every_n",
        "partial_eval_num_iters", "enable_tf32", "random_seed",
    },
}  # fmt: skip
_MODULES = {
    "train_fn": "generative_recommenders.research.trainer.train",
    "hstu_encoder": "generative_recommenders.research.modeling.sequential.encoder_utils",
}
"""The trainer's functions that make the model, and their modules. Settings of other functions make no difference to the model."""


@dataclass(frozen=True, slots=True)
class MetaConfig:
    """`bf16`: whether the model's weights and arithmetic were bf16 in training, None where the file does not say."""

    sizes: HSTUConfig
    bf16: bool | None = None


def read_meta_config(path: Path, items: int, window_step: int | None = None) -> MetaConfig:
    """The configuration in the trainer's own .gin file, or in YAML or JSON with the names of `HSTUConfig`.

    The served window moves by one event, as the trainer's does, unless `window_step` or the file says otherwise.

    Raises ConfigError where the file can't be read, leaves out a key that must be known, or describes another model than this HSTU.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".gin":
            values, bf16 = _from_gin(path, read_settings(path, text))
        else:
            values, bf16 = yaml.safe_load(text), None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read as a configuration: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping; give a .gin file, or YAML such as: dim: 50")
    asked = {} if window_step is None else {"window_step": window_step}
    try:
        sizes = HSTUConfig.model_validate({"window_step": 1, **values, **asked, "items": items})
    except ValidationError as error:
        raise ConfigError(f"{path} is not the configuration of an HSTU: {error}") from error
    if unstated := sorted(_STATED - sizes.model_fields_set):
        raise ConfigError(f"{path} leaves out {', '.join(unstated)}, which the checkpoint does not say; give the sizes it was trained with")
    return MetaConfig(sizes, bf16)


def _from_gin(path: Path, settings: Sequence[Setting]) -> tuple[dict[str, Any], bool]:
    """The values of an HSTUConfig that the settings give, and whether the model was trained in bf16."""
    told = {setting.key: setting for setting in settings if _makes_the_model(setting)}
    values = {key: told[key].value for key in (*_SIZES, *_IMPLEMENTED, _DROPOUT, _OUTPUT_LENGTH) if key in told}
    if problems := _unlike_ours(values, told):
        raise ConfigError(f"{path} does not describe the HSTU that is implemented here: " + "; ".join(problems))
    config = {ours: values[gin] for gin, ours in {**_SIZES, _DROPOUT: "dropout"}.items() if gin in values}
    longest, more = values["train_fn.max_sequence_length"], values.get(_OUTPUT_LENGTH, _DEFAULT_OUTPUT_LENGTH)
    if isinstance(longest, int) and isinstance(more, int):
        config["max_length"] = longest + more + 1  # the trainer leaves room for the target as well
    return config, bool(values.get(_BF16, False))


def _makes_the_model(setting: Setting) -> bool:
    """Whether a setting changes the model. Raises ConfigError at a setting that gin would not apply, or would not know."""
    if (module := _MODULES.get(setting.name)) is None:
        return False
    if setting.scope:
        setting.refuse(
            f"{setting.scope}/{setting.key} holds in gin's scope {setting.scope!r}, and the trainer enters none; remove the line"
        )
    if setting.module and not f".{module}".endswith(f".{setting.module}"):
        setting.refuse(f"{setting.module}.{setting.key} is not the trainer's, which is {module}.{setting.name}")
    return True


def _unlike_ours(values: Mapping[str, Any], told: Mapping[str, Setting]) -> list[str]:
    others = [key for key, choices in _IMPLEMENTED.items() if key in values and values[key] not in choices]
    read = {*_SIZES, *_IMPLEMENTED, _DROPOUT, _OUTPUT_LENGTH}
    strange = [one for key, one in told.items() if key not in read and one.parameter not in _TRAINING_ONLY[one.name]]
    return [
        *(f"line {told[key].line}: {key} is {values[key]!r}, implemented is {_IMPLEMENTED[key][0]!r}" for key in others),
        *(f"{key} is missing" for key in _REQUIRED if key not in values),
        *(f"line {one.line}: {one.key} = {one.text} is unknown" for one in strange),
    ]
