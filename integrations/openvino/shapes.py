"""The shapes of the inputs to the encoder's graphs: few, as OpenVINO makes programs for each shape it meets, and keeps them."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

from integrations.hstu.append_inputs import Shapes
from integrations.hstu.config import HSTUConfig, SequenceConfig
from integrations.hstu.limits import MOST_PAIRS, row_blocks, rows_at_once

USERS = 8
LENGTHS = 8


def bucket(size: int, step: int) -> int:
    """`size` rounded up to a power of two below `step`, or to a multiple of `step`."""
    return -(-size // step) * step if size > step else min(step, 1 << (size - 1).bit_length())


def length_step(longest: int) -> int:
    """The `step` for numbers of rows, in `bucket`."""
    return max(1, longest // LENGTHS)


def padded_length(events: int, longest: int) -> int:
    """The events that histories are padded to, at most the window: the graph's biases have no row beyond it, and a row without a bias
    would count as an event.
    """
    return min(longest, bucket(events, length_step(longest)))


def append_shapes(config: HSTUConfig) -> Shapes:
    """The shapes of the graph `append`. The rows of a step are a multiple of `length_step`, and the last of several steps is as long."""
    longest, step = config.max_history, length_step(config.max_history)
    most_new = rows_at_once(config, MOST_PAIRS) // step * step

    def new(rows: int) -> int:
        return padded_length(rows, longest) if rows <= most_new else -(-rows // most_new) * most_new

    users, past = partial(bucket, step=USERS), partial(bucket, step=step)
    return Shapes(users, new, past, most_new=most_new, most_pairs=MOST_PAIRS // config.heads)


def shapes_met(users: int, lengths: Iterable[int], config: SequenceConfig) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """All shapes (B, L) that `encode`, and (B, S, P) that `append`, can meet: batches of up to so many users, with histories of these
    `lengths`, of users that return with one new event each.
    """
    longest, step = config.max_history, length_step(config.max_history)
    batches = {bucket(count, USERS) for count in range(1, users + 1)}
    rows = {bucket(length, step) for length in lengths}
    whole = {padded_length(max(length, row_blocks(longest)), longest) for length in rows}
    return sorted(product(batches, whole)), sorted(_appended(batches, rows, config) if isinstance(config, HSTUConfig) else ())


def _appended(batches: Iterable[int], rows: Iterable[int], config: HSTUConfig) -> Iterator[tuple[int, int, int]]:
    longest, shapes = config.max_history, append_shapes(config)
    fresh = {1, *(min(shapes.new(min(longest, length)), shapes.most_new) for length in rows)}
    past = {shapes.past(length) for length in (0, *rows, *range(shapes.most_new, max(rows), shapes.most_new))}
    for batch, new, kept in product(batches, fresh, past):
        fits = new == shapes.most_new or new + kept <= longest + length_step(longest)
        if fits and (batch == 1 or batch * new * (new + kept) <= shapes.most_pairs):
            yield batch, new, kept
