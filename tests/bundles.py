"""Small published bundles with random weights, and histories to ask them about."""

import numpy as np
import torch

from cluster.bundle import Bundle
from cluster.values import UserSequence
from integrations.hstu.latest_states import latest_states
from integrations.hstu.random_bundles import (
    CONFIGS,
    DECODER_SIZES,
    RANKER_SIZES,
    make_bundle,
    make_complete_bundle,
    make_generative_bundle,
    make_ranking_bundle,
    random_semantic_ids,
)
from integrations.hstu.sequence_model import SequenceModel

__all__ = [
    "CONFIGS",
    "DECODER_SIZES",
    "ONE_BUCKET",
    "RANKER_SIZES",
    "last_states",
    "make_bundle",
    "make_complete_bundle",
    "make_generative_bundle",
    "make_ranking_bundle",
    "random_semantic_ids",
    "random_sequence",
    "with_window_step",
]

ONE_BUCKET = (8,)
"""The batch sizes that `torch_compiled` compiles for in tests: each takes Inductor 17 s of processor time."""


def with_window_step(bundle: Bundle, step: int) -> Bundle:
    """The same files, served through a window that moves by `step` events."""
    model = bundle.manifest.model
    model = model.model_copy(update={"config": {**model.config, "window_step": step}})
    return Bundle(bundle.path, bundle.manifest.model_copy(update={"model": model}))


def random_sequence(length: int, *, items: int = 200, seed: int = 0) -> UserSequence:
    """A history of `length` events, minutes to weeks apart, asked about an hour after the last."""
    rng = np.random.default_rng([seed, length])
    timestamps = 1_700_000_000 + np.cumsum(np.exp(rng.uniform(4, 14, length)).astype(np.int64))
    return UserSequence(
        items=rng.integers(1, items + 1, length).astype(np.int32),
        timestamps=timestamps,
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=int(timestamps[-1]) + 3600,
    )


def last_states(model: SequenceModel, *inputs: torch.Tensor) -> torch.Tensor:
    """L2-normalised states (B, D) after each user's last event, by the pruned computation that is served."""
    return latest_states(model, *inputs, 1).squeeze(1)
