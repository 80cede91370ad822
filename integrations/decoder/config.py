"""Sizes of the semantic-ID decoder."""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SERVABLE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 256)
"""The head sizes that vLLM's attention kernels compute on CPUs and GPUs; with another one vLLM loads, and breaks at the first request."""


class DecoderConfig(BaseModel):
    """A Llama-type causal model over `vocabulary` tokens, prompted with `prompt_length` states of width `state_dim`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocabulary: int = Field(gt=1)
    levels: int = Field(ge=1)
    state_dim: int = Field(gt=0)
    prompt_length: int = Field(default=64, gt=0, description="states; a multiple of 32 fills the blocks of vLLM's prefix cache")
    hidden: int = Field(default=128, gt=0)
    layers: int = Field(default=4, gt=0)
    heads: int = Field(default=4, gt=0)
    feedforward: int = Field(default=512, gt=0)
    dropout: float = Field(default=0.2, ge=0, lt=1)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """How many parameters the Llama has, without its soft prompt."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.feedforward + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @model_validator(mode="after")
    def _heads_can_be_served(self) -> Self:
        if self.hidden % self.heads or self.head_dim not in SERVABLE_HEAD_DIMS:
            choices = ", ".join(map(str, SERVABLE_HEAD_DIMS))
            raise ValueError(f"hidden ({self.hidden}) over heads ({self.heads}) must be one of {choices}, which vLLM serves")
        return self


PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "feedforward": 512},
    "base": {"hidden": 512, "layers": 8, "heads": 8, "feedforward": 1536},
}
"""About 1 and 30 million parameters, with a thousand tokens."""
