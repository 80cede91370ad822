"""Which users a model encodes together: those with histories of similar length, and few where these are long."""

from collections.abc import Iterator, Sequence

import numpy as np

from pipelines.splits import Example

MOST_PAIRS = 1 << 24
"""The most pairs of events, users x length^2, in a batch of more than one user: some tensors with 4 or 8 bytes a pair are in memory
together, those of 4 bytes once for each head.
"""


def by_length(examples: Sequence[Example], most_users: int, longest: int) -> Iterator[list[int]]:
    """The examples' numbers, those with short histories first, in batches of at most `most_users` users and `MOST_PAIRS` pairs.

    `longest`: how many of a history's latest events the model sees.
    """
    lengths = [len(example.history) for example in examples]
    batch: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        pairs = (len(batch) + 1) * min(lengths[index], longest) ** 2  # of the longest history so far
        if batch and (len(batch) == most_users or pairs > MOST_PAIRS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
