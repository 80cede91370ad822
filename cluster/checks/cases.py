"""The requests a backend is checked with, made for one bundle's catalogue and window; a file for each stage's own."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cluster.engines.stage_rules import StageRules
from cluster.values import Action, Int32Array, UserSequence

WINDOW = 50
"""How many events a full history has where the model's record does not say."""


class Cases(Protocol):
    """The requests that the checks send to a stage's backend. Mappings: a request's description in words -> the request.

    `typical`: of several users with histories of different lengths. `edges`: extreme requests, which must get a valid answer. `restricted`:
    likewise, with items to choose from or to leave out. `strangers`: name items that the catalogue lacks; an error may refuse them.
    `optional`: may be declined.
    """

    rules: StageRules[Any, Any]

    def typical(self) -> Mapping[str, Any]: ...
    def edges(self) -> Mapping[str, Any]: ...
    def restricted(self) -> Mapping[str, Any]: ...
    def strangers(self) -> Mapping[str, Any]: ...
    def optional(self) -> Mapping[str, Any]: ...
    def of(self, request: Any, user: str, tenant: str) -> Any:
        """The request as that user's."""

    def problem(self, request: Any, answer: Any) -> str:
        """What is wrong with an answer that the stage's rules let pass, "" where nothing is."""


def window(config: Mapping[str, Any]) -> int:
    """How many events a model of this configuration sees of a history."""
    given = config.get("max_history")
    return given if isinstance(given, int) else WINDOW


def history(items: int, length: int, seed: int = 0) -> UserSequence:
    """Random events, minutes to days apart, every third of them a rating."""
    rng = np.random.default_rng([seed, length])
    rated = np.arange(length) % 3 == 2
    timestamps = 1_700_000_000 + np.cumsum(np.exp(rng.uniform(4, 12, length)).astype(np.int64))
    return UserSequence(
        items=rng.integers(1, items + 1, length).astype(np.int32),
        timestamps=timestamps,
        actions=np.where(rated, Action.RATING.code, Action.VIEW.code).astype(np.int8),
        values=np.where(rated, rng.integers(1, 6, length), np.nan).astype(np.float32),
        request_time=int(timestamps[-1] if length else 1_700_000_000) + 3600,
    )


def naming(sequence: UserSequence, item: int) -> UserSequence:
    """The history with another item as its last."""
    items = np.append(sequence.items[:-1], item).astype(np.int32)
    return UserSequence(items, sequence.timestamps, sequence.actions, sequence.values, sequence.request_time)


def indices(*items: int) -> Int32Array:
    return np.array(items, np.int32)


def some(items: int, count: int) -> Int32Array:
    """`count` catalogue indices from all over the catalogue, or all of them, in no order."""
    return np.random.default_rng(0).permutation(np.unique(np.linspace(1, items, min(items, count)).astype(np.int32)))


def lengths(longest: int) -> Sequence[int]:
    """The lengths of several users' histories, short and long ones mixed."""
    return [min(max(1, length), longest) for length in (longest, 1, longest // 2, 3, longest - 1, 2, longest // 3)]
