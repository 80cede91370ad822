"""Train on histories as rows of codes: what follows each code is what is learnt."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from cluster.bundle import Bundle
from cluster.dataset import Dataset
from cluster.errors import DataError
from cluster.values import Int64Array
from genrec_rwkv.model import Rwkv
from genrec_rwkv.recurrent import BEGIN

HELD_OUT = 1
"""Each user's last event is not learnt from, so that what is measured on it is not known by heart."""


@dataclass(frozen=True, slots=True)
class Options:
    """`events`: how many of a history stand in one row."""

    channels: int = 64
    layers: int = 2
    epochs: int = 5
    learning_rate: float = 3e-3
    dropout: float = 0.1
    batch: int = 32
    events: int = 24
    seed: int = 0


def train(bundle: Bundle, data: Dataset, options: Options, report: Callable[[int, float, float], None]) -> Rwkv:
    """`report` is told the epoch, the mean loss of a code, and that of the held-out events' codes.

    Raises DataError where no user has events enough of items that the model knows.
    """
    torch.manual_seed(options.seed)
    rng, histories = np.random.default_rng(options.seed), list(_histories(bundle, data))
    if not histories:
        raise DataError(f"{data.source} has no user with {HELD_OUT + 2} events of {bundle.version}'s items")
    model = Rwkv(bundle.semantic_ids.vocabulary, options.channels, options.layers, options.dropout)
    steps = options.epochs * -(-len(list(_rows(histories, options, rng))) // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=max(2, steps + options.epochs))
    for epoch in range(1, options.epochs + 1):
        losses = [_step(model, batch, optimizer, schedule) for batch in _batches(list(_rows(histories, options, rng)), options, rng)]
        report(epoch, float(np.mean(losses)), held_out_loss(model, histories, options))
    return model.eval()


def save(model: Rwkv, bundle: Bundle, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path, {"semantic_ids": bundle.semantic_ids.version})


@torch.no_grad()
def held_out_loss(model: Rwkv, histories: list[Int64Array], options: Options) -> float:
    """The mean loss of the codes of each user's last event, after as many events as stand in a row."""
    model.eval()
    losses = []
    for start in range(0, len(histories), options.batch):
        rows = [codes[-options.events - 1 :].ravel() for codes in histories[start : start + options.batch]]
        levels, tokens = histories[0].shape[1], _padded(rows)
        logits = model(tokens[:, :-1])
        for row, codes, scores in zip(rows, tokens, logits, strict=True):
            last = slice(len(row) - levels, len(row))
            losses.append(F.cross_entropy(scores[last], codes[1:][last]).item())
    model.train()
    return float(np.mean(losses))


def _histories(bundle: Bundle, data: Dataset) -> Iterator[Int64Array]:
    """Each user's events as codes (events, levels)."""
    index = np.array([0, *(bundle.catalogue.index_of(item.item_id) or 0 for item in data.catalogue.items)])
    for start, stop in zip(data.interactions.offsets, data.interactions.offsets[1:], strict=False):
        items = index[data.interactions.items[start:stop]]
        if len(items := items[items > 0]) >= HELD_OUT + 2:
            yield bundle.semantic_ids.tokens[items].astype(np.int64)


def _rows(histories: list[Int64Array], options: Options, rng: np.random.Generator) -> Iterator[Int64Array]:
    """Histories in pieces, cut elsewhere in every epoch."""
    for codes in histories:
        learnt = codes[:-HELD_OUT]
        for start in range(-int(rng.integers(0, options.events)), len(learnt), options.events):
            if len(piece := learnt[max(0, start) : start + options.events]) > 1:
                yield piece.ravel()


def _batches(rows: list[Int64Array], options: Options, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    order = rng.permutation(len(rows))
    for start in range(0, len(order), options.batch):
        yield _padded([rows[place] for place in order[start : start + options.batch]])


def _padded(rows: list[Int64Array]) -> torch.Tensor:
    """BEGIN, the codes, and BEGIN again where a row is shorter: as what follows, it is not learnt."""
    tokens = np.full((len(rows), 1 + max(map(len, rows))), BEGIN)
    for place, row in enumerate(rows):
        tokens[place, 1 : 1 + len(row)] = row
    return torch.from_numpy(tokens)


def _step(model: Rwkv, tokens_BT: torch.Tensor, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.OneCycleLR) -> float:
    loss = F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten(), ignore_index=BEGIN)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if schedule.last_epoch < schedule.total_steps:  # every epoch cuts the histories anew, and may have a batch more
        schedule.step()
    return loss.item()
