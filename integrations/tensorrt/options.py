"""The options that backends on TensorRT engines take."""

from collections.abc import Sequence
from typing import get_args

from cluster.compilation import Precision
from cluster.errors import ConfigError, UnknownChoice

MOST_CANDIDATES = 2048
"""The most candidates that a ranker's engine computes at a time."""


def known_precisions(precisions: Sequence[Precision]) -> tuple[Precision, ...]:
    """The precisions in their order. Raises ConfigError where they are no list or an empty one, UnknownChoice at another name."""
    if not isinstance(precisions, list | tuple) or not precisions:
        raise ConfigError(f"precisions ({precisions!r}) must be a list of one or more, such as [fp32, fp16], the preferred one first")
    for precision in precisions:
        if precision not in get_args(Precision):
            raise UnknownChoice("precision", precision, get_args(Precision))
    return tuple(precisions)
