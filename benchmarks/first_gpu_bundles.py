"""The bundles and histories of first_gpu.py's cases: examples/ml-100k's weights, or random ones of any size."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from cluster.bundle import (
    CATALOGUE,
    DECODER,
    FIRST_SEEN,
    GENERATIVE,
    ITEM_VECTORS,
    POPULARITY,
    SOFT_PROMPT,
    WEIGHTS,
    Bundle,
    DecoderRecord,
    ModelRecord,
)
from cluster.bundle_store import BundleStore
from cluster.values import UserSequence
from integrations.decoder.model import SemanticIdDecoder
from integrations.decoder.published import decoder_config
from integrations.hstu.latest_states import latest_states
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import build_model, load_model, load_weights, save_weights
from tests.kernel_examples import times_of

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ml-100k"


@contextmanager
def example() -> Iterator[Bundle]:
    """examples/ml-100k without its data set: titles and popularity are not asked for."""
    described = json.loads((EXAMPLE / "model.json").read_text())
    with tempfile.TemporaryDirectory() as folder, published(Path(folder), ModelRecord(**described["model"]), EXAMPLE) as bundle:
        yield bundle


@contextmanager
def published(folder: Path, record: ModelRecord, source: Path | None = None) -> Iterator[Bundle]:
    """A bundle of the weights in `source` with their decoder, or of random weights."""
    store = BundleStore(folder / "model")
    torch.manual_seed(0)
    with store.publish(record) as draft:
        model = build_model(record)
        if source:
            load_weights(model, source / WEIGHTS)
            (draft.path / DECODER).mkdir()
            for file in GENERATIVE:
                shutil.copyfile(source / file, draft.path / file)
            draft.decoder = DecoderRecord(**json.loads((source / "model.json").read_text())["decoder"])
        save_weights(model.state_dict(), draft.path / WEIGHTS)
        (draft.path / CATALOGUE).write_bytes(b"")
        for file in (POPULARITY, FIRST_SEEN):
            np.save(draft.path / file, np.zeros(model.config.items + 1, np.int64))
        np.save(draft.path / ITEM_VECTORS, model.item_vectors().detach().numpy())
    yield store.open()


def history(length: int, items: int, seed: int) -> UserSequence:
    """Random events, seconds to years before the request."""
    rng = np.random.default_rng([seed, length])
    times, _ = times_of(rng, length)
    return UserSequence(
        items=rng.integers(1, items + 1, length).astype(np.int32),
        timestamps=1_700_000_000 + times.astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000,
    )


def beginning(sequence: UserSequence, length: int) -> UserSequence:
    """The first events of a history, asked about when the next one happened."""
    columns = {name: getattr(sequence, name)[:length] for name in ("items", "timestamps", "actions", "values")}
    asked = sequence.request_time if length == len(sequence) else int(sequence.timestamps[length])
    return replace(sequence, **columns, request_time=asked)


def exact_decoder(bundle: Bundle) -> SemanticIdDecoder:
    """The bundle's decoder in float64 on the CPU."""
    decoder = SemanticIdDecoder(decoder_config(bundle), bundle.semantic_ids, bundle.item_vectors)
    decoder.lm.load_state_dict(load_file(bundle.path / DECODER / "model.safetensors"))
    decoder.prompt.load_state_dict(load_file(bundle.path / SOFT_PROMPT))
    return decoder.double().eval()


def exact_states(bundle: Bundle, histories: Sequence[UserSequence], count: int = 1) -> torch.Tensor:
    """The latest states (B, C, D) in float64 on the CPU."""
    model = load_model(bundle).double()
    columns = collate(histories, model.config.max_history).tensors()
    with torch.inference_mode():
        return latest_states(model, columns["items"], columns["times"], columns["next_times"], columns["lengths"], count)
