"""What training and evaluation ask of a model: the part of a sequence model's interface that they use."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from cluster.values import UserSequence


class ModelConfig(Protocol):
    @property
    def items(self) -> int: ...
    @property
    def max_history(self) -> int: ...


class Batch(Protocol):
    def tensors(self) -> dict[str, Tensor]: ...


class TrainableModule(Protocol):
    """What every training run asks of a torch module."""

    training: bool

    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def to(self, device: torch.device, /) -> Self: ...
    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ItemModel(Protocol):
    """What has a vector for each item of its catalogue."""

    @property
    def config(self) -> ModelConfig: ...
    def item_vectors(self, items_N: Tensor | None = None) -> Tensor: ...


class TrainableModel(TrainableModule, ItemModel, Protocol):
    """Turns histories into states and scores them by cosine against its item vectors."""

    def __call__(self, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor: ...
    def collate(self, sequences: Sequence[UserSequence], *, pad_to: int | None = None) -> Batch: ...
