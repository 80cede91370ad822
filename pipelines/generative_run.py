"""From a trained encoder to a whole generative model: semantic IDs, decoder, and the blend of the two fitted on the validation events.

item vectors -> semantic IDs -> decoder trained on states -> answers of the serving backends -> weights of the blend
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.bundle import Bundle
from cluster.dataset import Catalogue, Interactions
from cluster.errors import ConfigError
from cluster.protocols import Backend
from cluster.registry import BACKENDS, DECODERS, MODELS, choose
from cluster.semantic_ids import SemanticIds
from cluster.values import Encoded, EncodeRequest, FloatArray, Generated, GenerateRequest
from pipelines.assign_ids import Report, build_semantic_ids, report
from pipelines.batches import by_length
from pipelines.evaluate import MOST_USERS
from pipelines.fit_blend import Retrieved
from pipelines.generation import prompt
from pipelines.sequence_models import TrainableModel
from pipelines.splits import Example, held_out
from pipelines.titles import with_titles, words_digest
from pipelines.train_decoder import DecoderOptions, DecoderTrainer, TrainableDecoder, saved_ids
from pipelines.training_run import Trained, TrainingRun, said

USERS_AT_ONCE = 32
_NOTHING = Generated(np.empty(0, np.int32), np.empty(0, np.float32))


class IdOptions(BaseModel):
    """How items get their semantic IDs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: int = Field(default=3, ge=2, le=8, description="codes in a semantic ID")
    codes: int | None = Field(default=None, ge=2, le=65_536, description="different codes a level (default: enough for two cells an item)")
    title_weight: float = Field(default=0.0, ge=0, lt=1, description="share of titles in what semantic IDs are clustered by, 0 to 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedDecoder(Trained):
    """A finished decoder, and the report on its items' IDs."""

    decoder: TrainableDecoder
    ids: Report


def train_decoder(
    run: TrainingRun, encoder: TrainableModel, sizes: Mapping[str, Any], ids: IdOptions, options: DecoderOptions, *, phase: str = "decoder"
) -> TrainedDecoder:
    """Train on all but each user's last two events, or with `validate_every=0` the last; the encoder stays as it is.

    A run that is resumed has the semantic IDs that were saved: clustered on another processor or device, some items would get others.
    `sizes` are keys of the decoder's configuration. Raises ConfigError where they do not fit it.
    """
    dataset, vectors = run.dataset, encoder.item_vectors().detach().cpu().numpy()
    codes = saved_ids(run.saved(phase)) or _clustered(vectors, dataset.catalogue, ids, options.seed)
    decoder = new_decoder(sizes, codes, vectors, options.seed)
    trainer = DecoderTrainer(decoder, encoder, dataset.interactions, options, device=run.options.device)
    words = words_digest(dataset.catalogue) if ids.title_weight else ""
    trainer.identity = {"semantic IDs": {**ids.model_dump(mode="json"), "words": words}, "decoder": dict(sizes)}
    run.fit(trainer, phase)
    return TrainedDecoder(best=trainer.best, epochs=trainer.epoch, seconds=trainer.seconds, decoder=trainer.decoder, ids=report(codes))


def _clustered(vectors: FloatArray, catalogue: Catalogue, ids: IdOptions, seed: int) -> SemanticIds:
    clustered = with_titles(vectors, catalogue, ids.title_weight) if ids.title_weight else vectors
    return build_semantic_ids(clustered, levels=ids.levels, codes=ids.codes, seed=seed)


def new_decoder(sizes: Mapping[str, Any], ids: SemanticIds, vectors: "np.ndarray[Any, Any]", seed: int) -> TrainableDecoder:
    """A decoder with first weights drawn from the seed. Raises ConfigError."""
    family = choose("decoder", DECODERS, "llama")
    given = {**sizes, "vocabulary": ids.vocabulary, "levels": ids.levels, "state_dim": vectors.shape[1]}
    try:
        config = family.config_type.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"not a configuration of a decoder: {said(error)}") from error
    torch.manual_seed(seed)
    decoder: TrainableDecoder = family(config, ids, vectors)
    return decoder


@dataclass(frozen=True, eq=False)
class Lists:
    """What serving would answer before each event, and the item of that event; `generated` are empty without a decoder.

    `reach`: the most items that a request may ask for without having more generated for it; None: any number.
    """

    examples: Sequence[Example]
    retrieved: Sequence[Retrieved]
    generated: Sequence[Generated]
    reach: int | None = None

    @property
    def targets(self) -> list[int]:
        return [one.target for one in self.examples]


def serving_lists(
    bundle: Bundle, interactions: Interactions, from_end: int, *, beam: int, pool: int, most_users: int = MOST_USERS
) -> Lists:
    """Every user's retrieved and generated items before the event that stands `from_end` from the end, by the backends of torch.

    Where there are more than `most_users`, that many are drawn, always the same. Items of the history are not recommended again.
    """
    encoder: Backend[EncodeRequest, Encoded] = choose("encoder", BACKENDS["encoder"], "torch")()
    generator: Backend[GenerateRequest, Generated] = choose("generator", BACKENDS["generator"], "torch_beam")()
    generates = bundle.manifest.decoder is not None
    encoder.load(bundle)
    if generates:
        generator.load(bundle)
    retrieved: dict[int, Encoded] = {}
    generated: dict[int, Generated] = {}
    examples = list(held_out(interactions, from_end, most_users=most_users))
    for rows in by_length(examples, USERS_AT_ONCE, _longest(bundle)):
        part = [examples[row] for row in rows]
        encoded = encoder.batch_infer([EncodeRequest(one.history, pool + len(one.history)) for one in part])
        retrieved.update(zip(rows, (_unseen(answer, one, pool) for answer, one in zip(encoded, part, strict=True)), strict=True))
        if generates:
            asked = [_asked(answer, one, beam, bundle.prompt_length) for answer, one in zip(encoded, part, strict=True)]
            generated.update(zip(rows, generator.batch_infer(asked), strict=True))
    encoder.close()
    generator.close()
    order, reach = range(len(examples)), beam if generates and beam < bundle.items else None
    return Lists(examples, [retrieved[row] for row in order], [generated.get(row, _NOTHING) for row in order], reach)


def _longest(bundle: Bundle) -> int:
    """How many of a history's latest events the encoder sees."""
    record = bundle.manifest.model
    longest: int = choose("model family", MODELS, record.family).config_type.model_validate(record.config).max_history
    return longest


def _asked(encoded: Encoded, example: Example, beam: int, longest: int) -> GenerateRequest:
    assert encoded.states is not None
    user = prompt(encoded.states, example.history, longest)
    return GenerateRequest(user, beam, beam, blocked=_seen(example))


def _unseen(encoded: Encoded, example: Example, pool: int) -> Encoded:
    kept = np.flatnonzero(~np.isin(encoded.items, _seen(example)))[:pool]
    return Encoded(encoded.state.copy(), encoded.items[kept], encoded.scores[kept])  # a view would hold a whole batch of states


def _seen(example: Example) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """The items that must not be recommended: those of the history, except the answer itself; see pipelines/evaluate.py."""
    return np.setdiff1d(example.history.items, [example.target]).astype(np.int32)
