"""Train the semantic-ID decoder on a trained encoder's states: windows of states and events -> the next items' paths.

    trainer = DecoderTrainer(decoder, encoder, interactions, options)
    best = trainer.fit()                # EpochReport of the epoch whose weights the decoder now has

The encoder stays as it is. Each of a user's windows is encoded and cut into pieces of the prompt's length; a piece teaches one path for
each of its events (see integrations/decoder/model.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.semantic_ids import SemanticIds
from cluster.values import UserSequence
from pipelines.batches import by_length
from pipelines.epochs import EpochOptions, EpochTrainer, chosen_device
from pipelines.sequence_models import TrainableModel, TrainableModule
from pipelines.splits import VALIDATION, Example, Window, Windows, held_out, training_examples, without_excess

ENCODED_AT_ONCE = 64
MOST_STATE_BYTES = 8 << 30
"""The most memory that the encoder's states take which an epoch learns from."""
BETAS = (0.9, 0.98)


class DecoderOptions(EpochOptions):
    """How to train the decoder."""

    epochs: int = Field(default=20, ge=1, description="at most, and the end of its learning-rate schedule")
    learning_rate: float = Field(default=1.5e-3, gt=0)
    batch_windows: int = Field(default=32, ge=1, description="windows of the prompt's length in a batch")
    users_an_epoch: int = Field(default=20_000, ge=1, description="windows, or users, an epoch learns from at most, drawn anew for each")
    weight_decay: float = Field(default=0.05, ge=0)
    window: Window = Field(default="random", description="which part of a history longer than the encoder's window is trained on")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="fp32, or bf16 where the processor multiplies it faster")


class TrainableDecoder(TrainableModule, Protocol):
    """What training asks of a decoder: `loss` is the mean over a batch's targets, which `batch` makes from columns of equal length."""

    @property
    def prompt_length(self) -> int: ...
    @property
    def ids(self) -> SemanticIds: ...
    def batch(self, windows: Sequence[Mapping[str, Tensor]]) -> Any: ...
    def columns(self, history: UserSequence, states_LD: Tensor, targets: Tensor) -> dict[str, Tensor]: ...
    def loss(self, batch: Any) -> Tensor: ...


WindowColumns = dict[str, Tensor]


class DecoderTrainer(EpochTrainer[Sequence[WindowColumns], DecoderOptions]):
    """A run over the users' windows, each a dict of columns of one length; validation is the loss on the validation events."""

    warm_up_epochs = 1.0
    largest_gradient = 1.0

    def __init__(
        self,
        decoder: TrainableDecoder,
        encoder: TrainableModel,
        interactions: Interactions,
        options: DecoderOptions,
        *,
        device: str = "auto",
    ) -> None:
        place = torch.device(chosen_device(device))
        self.decoder, self.encoder = decoder.to(place), encoder.to(place).eval()
        self.interactions = interactions
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=options.learning_rate, betas=BETAS, weight_decay=options.weight_decay)
        super().__init__(decoder, optimizer, options, place)
        self._row_bytes = 4 * encoder.item_vectors().shape[1]  # of a state
        if not (interactions.lengths >= options.held_out_events + 2).any():
            raise DataError(f"none of the {interactions.users} users has events enough to learn from")

    def state(self) -> dict[str, Any]:
        """As of any run, with the semantic IDs, which `saved_ids` gives back."""
        ids = self.decoder.ids
        books = [torch.from_numpy(book) for book in ids.codebooks]
        return {**super().state(), "semantic_ids": {"codes": torch.from_numpy(ids.codes), "sizes": list(ids.sizes), "codebooks": books}}

    def _batches(self, rng: np.random.Generator) -> list[list[WindowColumns]]:
        asked, history = self.options, self.encoder.config.max_history
        windows = training_examples(
            self.interactions, held_out_events=asked.held_out_events, max_history=history, window=asked.window, rng=rng
        )
        examples = list(self._drawn(windows, rng))
        prompts = [piece for columns in self._encoded(examples) for piece in pieces(columns, self.decoder.prompt_length, rng)]
        order, size = rng.permutation(len(prompts)).tolist(), asked.batch_windows
        return [[prompts[index] for index in order[start : start + size]] for start in range(0, len(order), size)]

    def _drawn(self, windows: Windows, rng: np.random.Generator) -> Windows:
        """The windows `without_excess`, or as many drawn from them as an epoch may learn from and as `MOST_STATE_BYTES` has room for, at
        least one. Pieces of all users share batches, so that a user with most of the events would have most of the loss.
        """
        windows = without_excess(windows)
        state_bytes = self._row_bytes * windows.lengths
        if len(windows) <= self.options.users_an_epoch and state_bytes.sum() <= MOST_STATE_BYTES:
            return windows
        order = rng.permutation(len(windows))
        fit = int(np.searchsorted(np.cumsum(state_bytes[order]), MOST_STATE_BYTES, side="right"))
        return windows[order[: max(1, min(fit, self.options.users_an_epoch))]]

    def _loss(self, batch: Sequence[WindowColumns]) -> tuple[Tensor, int]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
            loss = self.decoder.loss(self.decoder.batch(batch))
        return loss, sum(len(columns["targets"]) for columns in batch)

    def _validate(self) -> dict[str, float]:
        """The loss on users' validation events, prompted with all that went before: of as many users as an epoch learns from at most."""
        examples = list(held_out(self.interactions, VALIDATION, most_users=self.options.users_an_epoch))
        losses, rows, length = 0.0, 0, self.decoder.prompt_length
        self.decoder.eval()
        with torch.inference_mode():
            last = (_only_last(_tail(columns, length)) for columns in self._encoded(examples))  # all states together are many gigabytes
            while batch := list(islice(last, self.options.batch_windows)):
                losses += self.decoder.loss(self.decoder.batch(batch)).item() * len(batch)
                rows += len(batch)
        self.decoder.train()
        return {"loss": losses / rows}

    def _encoded(self, examples: Sequence[Example]) -> Iterator[WindowColumns]:
        """The columns of each example's window, as far back as the encoder sees: states, events, and the item after each event."""
        for rows in by_length(examples, ENCODED_AT_ONCE, self.encoder.config.max_history):
            part = [examples[row] for row in rows]
            batch = self.encoder.collate([example.history for example in part]).tensors()
            with torch.no_grad():
                states_BLD = self.encoder(*(batch[name].to(self.device) for name in ("items", "times", "next_times"))).cpu()
            for example, states_LD, length in zip(part, states_BLD, batch["lengths"].tolist(), strict=True):
                targets = torch.from_numpy(example.targets[-length:])
                yield self.decoder.columns(example.history, states_LD[:length], targets)


def saved_ids(state: Mapping[str, Any]) -> SemanticIds | None:
    """The semantic IDs in a `state`; None where there are none."""
    if (saved := state.get("semantic_ids")) is None:
        return None
    books = tuple(book.numpy().copy() for book in saved["codebooks"])  # the tensors are of a file
    return SemanticIds(saved["codes"].numpy().copy(), tuple(saved["sizes"]), books)


def pieces(columns: WindowColumns, length: int, rng: np.random.Generator) -> list[WindowColumns]:
    """The window cut into pieces of `length` rows from its end or, in half of all cases, from a random row up to half a piece before it."""
    rows = len(columns["targets"])
    if rows <= length:
        return [columns]
    last = rows - (int(rng.integers(0, min(length // 2, rows - length) + 1)) if rng.random() < 0.5 else 0)
    stops = range(last, 0, -length)
    return [{name: column[max(0, stop - length) : max(stop, length)] for name, column in columns.items()} for stop in stops]


def _tail(columns: WindowColumns, length: int) -> WindowColumns:
    return {name: column[-length:] for name, column in columns.items()}


def _only_last(columns: WindowColumns) -> WindowColumns:
    """The columns with all targets but the last set to 0."""
    targets = torch.zeros_like(columns["targets"])
    targets[-1] = columns["targets"][-1]
    return {**columns, "targets": targets}
