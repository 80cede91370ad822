"""Weights in and out: a model from a bundle's record, and safetensors files."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cluster.bundle import RANKER, WEIGHTS, Bundle, ModelRecord
from cluster.errors import BundleError
from cluster.registry import MODELS, RANKERS, choose
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.sequence_model import SequenceModel


def build_model(record: ModelRecord) -> SequenceModel:
    """An untrained model of the recorded family and configuration. Raises BundleError where the configuration does not fit the family."""
    family = choose("model family", MODELS, record.family)
    try:
        config = family.config_type.model_validate(record.config)
    except ValidationError as error:
        raise BundleError(f"the configuration of this {record.family} model is not one this release understands: {error}") from error
    model: SequenceModel = family(config)
    return model


def load_model(bundle: Bundle) -> SequenceModel:
    """The bundle's model with its weights, ready to answer (eval mode, on the CPU)."""
    model = build_model(bundle.manifest.model)
    load_weights(model, bundle.verified(WEIGHTS))
    return model.eval()


def load_ranker(bundle: Bundle) -> HSTURanker:
    """The bundle's ranker with its weights, ready to answer (eval mode, on the CPU). Raises BundleError where it has none."""
    record = bundle.ranker()
    family = choose("ranker family", RANKERS, record.family)
    ranker: HSTURanker = family(family.config_type.of(record))
    load_weights(ranker, bundle.verified(RANKER))
    return ranker.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill `model` from a safetensors file. Raises BundleError naming what does not match."""
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise BundleError(f"{path} does not hold weights of this model: {error}") from error


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a module's `state_dict()` as safetensors. Raises BundleError where the disk does not take it."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
    except SafetensorError as error:
        raise BundleError(f"weights cannot be written in {path.parent}: {error}") from error
