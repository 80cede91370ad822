"""What to train: the sequence model, on its states a decoder of semantic IDs, from its weights a ranker."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.bundle import ModelRecord
from cluster.errors import ConfigError, UnknownChoice
from cluster.registry import MODELS
from integrations.decoder.config import PRESETS
from pipelines.generative_run import IdOptions
from pipelines.train import TrainOptions
from pipelines.train_decoder import DecoderOptions
from pipelines.train_ranker import RankerOptions

NO_DECODER = "none"
_WINDOW_MARGIN = 11
"""How much longer than the history the constant N is, as in the published configurations (200 -> 211)."""


class ModelPlan(BaseModel):
    """Family and sizes of a sequence model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str = Field(default="hstu", description=f"one of {', '.join(MODELS)}")
    dim: int = Field(default=50, description="width of the embeddings")
    layers: int = 2
    heads: int = 1
    head_dim: int | None = Field(default=None, ge=1, description="HSTU: width of a head (default: dim / heads)")
    max_history: int = Field(default=200, le=16_384, description="how many of a user's latest events the model sees")
    window_step: int | None = Field(
        default=None,
        description="by how many events the served window moves once it is full; 1: always the latest events (default: an eighth)",
    )
    dropout: float = 0.2

    def record(self, items: int) -> ModelRecord:
        """The model of a catalogue with so many items."""
        sizes = {"dim": self.dim, "layers": self.layers, "heads": self.heads, "max_history": self.max_history}
        lengths = {"max_length": self.max_history + _WINDOW_MARGIN, **self._widths(), "dropout": self.dropout, "items": items}
        window = {} if self.window_step is None else {"window_step": self.window_step}
        return ModelRecord(family=self.family, config={**sizes, **lengths, **window})

    def _widths(self) -> dict[str, int]:
        if self.family != "hstu":
            return {"feedforward_dim": self.dim}
        width = max(1, self.dim // max(1, self.heads)) if self.head_dim is None else self.head_dim  # no heads: the family says so
        return {"attention_dim": width, "linear_dim": width}


@dataclass(frozen=True)
class DecoderPlan:
    """A decoder of one of the PRESETS' sizes. Raises UnknownChoice, and ConfigError where the package that trains it is missing."""

    size: str = "tiny"
    prompt_length: int = 64
    ids: IdOptions = field(default_factory=IdOptions)
    options: DecoderOptions = field(default_factory=DecoderOptions)

    def __post_init__(self) -> None:
        if self.size not in PRESETS:
            raise UnknownChoice("decoder", self.size, [*PRESETS, NO_DECODER])
        if self.prompt_length < 1:
            raise ConfigError(f"--prompt-length {self.prompt_length}: a decoder is prompted with at least one state; give 1 or more")
        if find_spec("transformers") is None:
            cure = "install genrec with its extra cpu, or train with --decoder none"
            raise ConfigError(f"--decoder {self.size}: transformers is not installed; {cure}")

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Keys of the decoder's configuration."""
        return {**PRESETS[self.size], "prompt_length": self.prompt_length}


@dataclass(frozen=True)
class TrainingPlan:
    """The parts of a version; None: it has no such part."""

    model: ModelPlan = field(default_factory=ModelPlan)
    encoder: TrainOptions = field(default_factory=TrainOptions)
    decoder: DecoderPlan | None = None
    ranker: RankerOptions | None = None

    def aligned(self) -> "TrainingPlan":
        """The same, with the encoder's seed, windows and whether there is validation for the other parts too, and with no more users in a
        batch of the ranker's than in one of the encoder's.
        """
        validate_every = 1 if self.encoder.validate_every else 0
        shared = {"seed": self.encoder.seed, "window": self.encoder.window, "validate_every": validate_every}
        decoder = self.decoder and replace(self.decoder, options=self.decoder.options.model_copy(update=shared))
        ranker = self.ranker and self.ranker.model_copy(
            update={**shared, "batch_users": min(self.ranker.batch_users, self.encoder.batch_users)}
        )
        return replace(self, decoder=decoder, ranker=ranker)
