"""The configurations of sequence models. Defaults are the base ML-1M configuration of the HSTU paper's research code."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.bundle import RankerRecord
from cluster.errors import BundleError
from cluster.ranking import RatingScale, Task
from cluster.window import Window


class SequenceConfig(BaseModel):
    """Sizes that every sequence model has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    items: int = Field(ge=1, description="V, how many items the catalogue holds; index 0 is padding")
    dim: int = Field(default=50, ge=1, description="D, width of the item embeddings and of the user state")
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=1, ge=1)
    max_length: int = Field(default=211, ge=1, description="N, the padded length that divides the attention; a constant of the weights")
    max_history: int = Field(default=200, ge=1, description="how many of a user's latest events are encoded")
    window_step: int | None = Field(
        default=None, ge=1, description="by how many events the served window moves once it is full; an eighth of max_history by default"
    )
    dropout: float = Field(default=0.2, ge=0, lt=1)

    @property
    def window(self) -> Window:
        return Window.of(self.max_history, self.window_step)

    @model_validator(mode="after")
    def _history_fits(self) -> Self:
        if self.max_history > self.max_length:
            raise ValueError(f"max_history ({self.max_history}) must be less than or equal to max_length ({self.max_length})")
        if self.window_step is not None and self.window_step > self.max_history:
            raise ValueError(f"window_step ({self.window_step}) must be less than or equal to max_history ({self.max_history})")
        return self


class HSTUConfig(SequenceConfig):
    """Sizes of an HSTU; widths are per head."""

    attention_dim: int = Field(default=50, ge=1, description="dqk, width of a head's queries and keys")
    linear_dim: int = Field(default=50, ge=1, description="dv, width of a head's values and gates")
    time_buckets: int = Field(default=128, ge=1, description="the last bucket of the relative time bias, which has one weight more")


class RankerConfig(HSTUConfig):
    """Sizes of an HSTU that ranks candidates."""

    tasks: tuple[Task, ...] = Field(min_length=1, description="the heads, in the order of the columns")
    rating: RatingScale = RatingScale()

    @classmethod
    def of(cls, record: RankerRecord) -> Self:
        """The ranker's configuration. Raises BundleError where the record is not one of this family."""
        try:
            return cls.model_validate({**record.config, "tasks": record.tasks, "rating": record.rating})
        except ValidationError as error:
            raise BundleError(f"the configuration of this {record.family} ranker is not one this release understands: {error}") from error

    @model_validator(mode="after")
    def _positions_suffice(self) -> Self:
        if self.max_history >= self.max_length:
            raise ValueError(
                f"max_length ({self.max_length}) must be greater than max_history ({self.max_history}): a candidate comes after"
            )
        return self


class SASRecConfig(SequenceConfig):
    """Sizes of a SASRec; the heads divide `dim`."""

    feedforward_dim: int = Field(default=50, ge=1, description="hidden width of the feed-forward block")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide dim ({self.dim})")
        return self
