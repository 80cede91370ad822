"""The shapes of the inputs to the encoder's graphs: few, as OpenVINO makes programs for each shape it meets, and keeps them."""

from collections.abc import Iterable
from itertools import product

USERS = 8
LENGTHS = 8


def bucket(size: int, step: int) -> int:
    """`size` rounded up to a power of two below `step`, or to a multiple of `step`."""
    return -(-size // step) * step if size > step else min(step, 1 << (size - 1).bit_length())


def length_step(longest: int) -> int:
    """The `step` for numbers of rows, in `bucket`."""
    return max(1, longest // LENGTHS)


def shapes_met(users: int, lengths: Iterable[int], longest: int, shortest: int) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """All shapes (B, L) that `encode`, and (B, S, P) that `append`, can meet: batches of up to so many users, with histories of these
    `lengths`, of users that return with one new event each. Histories that are encoded whole are padded to `shortest` events.
    """
    step = length_step(longest)
    batches = {bucket(count, USERS) for count in range(1, users + 1)}
    rows = {bucket(length, step) for length in lengths}
    whole = {min(longest, bucket(max(length, shortest), step)) for length in rows}
    fresh = {1, *(min(longest, length) for length in rows)}
    appended = [(new, kept) for new, kept in product(fresh, {bucket(0, step), *rows}) if new + kept <= longest + step]
    return sorted(product(batches, whole)), sorted((batch, *pair) for batch, pair in product(batches, appended))
