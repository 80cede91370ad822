"""How long a model's histories may be, and in what blocks they are attended: for engines that serve it without building it in torch."""

from dataclasses import dataclass

from cluster.bundle import ModelRecord
from cluster.window import Window
from integrations.hstu.config import HSTUConfig, SequenceConfig

WORTH_BLOCKS = 1 << 17
"""From so many pairs of rows, over all users and heads, blocks take less time than one call for all rows."""
WORTH_BLOCKS_ON_GPU = 1 << 27
"""The same on a GPU, where most calls take no longer than they take to start."""
MOST_PAIRS = 1 << 23
"""The most pairs of a new row and a row that it looks at, over all users and heads, of which a graph is given more than one user's, or more
new rows than a block has: it attends to all of them at once, and some tensors with 4 bytes a pair are in memory together.
"""
MOST_PAIRS_ON_GPU = 1 << 27
"""The same on a GPU."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_history`: how many events are encoded; `max_length`: N, the most the model could take; `window`: which events are encoded."""

    max_history: int
    max_length: int
    window: Window


def limits(model: ModelRecord) -> Limits:
    """The recorded limits or, where the record leaves one out, the default that the model was built with."""
    longest, step = _recorded(model, "max_history"), model.config.get("window_step")
    window = Window.of(longest, None if step is None else int(str(step)))
    return Limits(max_history=longest, max_length=_recorded(model, "max_length"), window=window)


def row_blocks(max_history: int) -> int:
    """Into how many blocks the rows of a history are cut. Each block attends only to events up to its own last row.

    A graph always has that many blocks, and each needs a row: its input is padded to at least as many events.
    """
    return min(8, max(4, max_history // 128)) if max_history >= 8 else 1


def blocks_worth(config: HSTUConfig, users: int, length: int, *, on_gpu: bool = False) -> int:
    """In how many blocks, each a call of its own, `length` rows of each of `users` attend fastest."""
    pairs = users * config.heads * length**2
    worth = WORTH_BLOCKS_ON_GPU if on_gpu else WORTH_BLOCKS
    return min(length, row_blocks(config.max_history)) if pairs >= worth else 1


def rows_at_once(config: HSTUConfig, most_pairs: int) -> int:
    """How many new rows of a user a graph is given at a time where histories are the longest: a block's, or more within `most_pairs`."""
    longest = config.max_history
    return max(-(-longest // row_blocks(longest)), most_pairs // (config.heads * longest))


def block_ends(length: int, count: int) -> list[int]:
    """Where the blocks begin and end: 0, and for each block the row after its last."""
    return [0, *(length * block // count for block in range(1, count)), length]


def _recorded(model: ModelRecord, name: str) -> int:
    return int(str(model.config.get(name, SequenceConfig.model_fields[name].default)))
