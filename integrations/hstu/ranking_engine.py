"""Rank candidates by what is kept of a user: only new events are computed, then the candidates in batches that stay in a cache.

    history -> window -> rows' identities -> store.match -> kept K^T, V -> append (events kept..n-1) -> store.commit
                                                            K^T, V of all n events + candidates, `micro_batch` at a time -> predictions

The engine is two functions, `RunRankAppend` and `RunRank`: the ONNX graphs or the torch model. Users are computed one after the other, as
one request has enough candidates to fill the engine. An error in what is kept costs time, and no answer.
Shapes as in ranker.py, without B.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cluster.bundle import RANKER, Bundle
from cluster.engines.buffers import BufferPool
from cluster.errors import BackendFailed
from cluster.ranking import Ranked, RankRequest
from cluster.values import FloatArray, Int64Array
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.config import RankerConfig
from integrations.hstu.ranker_inputs import event_columns
from integrations.hstu.state.keeper import StateKeeper
from integrations.hstu.state.rows import event_identities
from integrations.hstu.state.store import Held
from integrations.hstu.state_options import StateOptions, make_store

RunRankAppend: TypeAlias = Callable[[Arrays], tuple[FloatArray, FloatArray]]
"""items, actions, ratings, times (L,), past_times (P,), past_kt (layers, H, K, P), past_v (layers, H, P, W) -> `kt` and `v` of L events."""
RunRank: TypeAlias = Callable[[Arrays], FloatArray]
"""candidates (M,), past_times (P,), past_kt, past_v -> predictions (M, T)."""
RunGraph: TypeAlias = Callable[[Arrays], Mapping[str, FloatArray]]
"""A graph's inputs by name -> its outputs by name."""

GRAPHS = ("rank_append", "rank")
"""The compiled graphs of a ranker."""
MICRO_BATCH = 1024
COMPLAINT = "a ranker's kept rows could not be used; such requests are computed whole"


class RankingEngine:
    """One model's ranking, for one thread at a time. `kept`: None where nothing of users is to be kept; `pool`: the memory in which a
    user's rows are put together; `most_new`: the most events that the append takes at a time.
    """

    def __init__(
        self,
        functions: tuple[RunRankAppend, RunRank],
        config: RankerConfig,
        kept: "KeptEvents | None",
        pool: BufferPool,
        micro_batch: int,
        *,
        most_new: int = sys.maxsize,
    ) -> None:
        self._run_append, self._run_rank = functions
        self._config, self._kept, self._pool = config, kept, pool
        self._micro_batch, self._most_new, self._window = micro_batch, most_new, config.window

    def answer(self, requests: Sequence[RankRequest]) -> list[Ranked]:
        """The answers in the order asked. Raises BackendFailed at an item outside 1..V, and where the engine answers with NaN."""
        return [self._ranked(request) for request in requests]

    def rows(self, request: RankRequest) -> int:
        """How many rows are computed for the request now, about: those of its candidates and of new events."""
        events = len(request.sequence)
        length = events - self._window.start(events)
        if self._kept and request.user_id and length >= self._kept.keep_from:
            length = self._kept.new_rows(request.tenant, request.user_id, length)
        return len(request.candidates) + length

    def _ranked(self, request: RankRequest) -> Ranked:
        events = _Events(request, self._config)
        kt, v = self._keys(events, request)
        size, candidates = self._micro_batch, request.candidates.astype(np.int64)
        known = {"past_times": events.columns["times"], "past_kt": kt, "past_v": v}
        parts = [self._run_rank({"candidates": candidates[start : start + size], **known}) for start in range(0, len(candidates), size)]
        predictions = np.concatenate(parts) if parts else np.empty((0, len(self._config.tasks)), np.float32)
        if not np.isfinite(predictions).all():
            self._drop(request)
            raise BackendFailed("it predicted NaN or infinity")
        return Ranked(predictions)

    def _keys(self, events: "_Events", request: RankRequest) -> tuple[FloatArray, FloatArray]:
        """K^T and V of all events, valid until the next call."""
        if self._kept and request.user_id and len(events) >= self._kept.keep_from:
            try:
                return self._kept_keys(self._kept, events, request)
            except Exception as error:  # noqa: BLE001 - rows that cannot be used must not cost the answer that needs none
                self._kept.give_up(request, error)
        elif self._kept:
            self._kept.not_looked_up += 1
        return self._computed(events, 0)

    def _kept_keys(self, kept: "KeptEvents", events: "_Events", request: RankRequest) -> tuple[FloatArray, FloatArray]:
        with kept.matched(request, events.identities) as held:
            kt, v = self._computed(events, held.rows, held)
            kept.commit(held, events.identities, {"kt": kt[..., held.rows :], "v": v[:, :, held.rows :]})
        return kt, v

    def _computed(self, events: "_Events", kept: int, held: Held | None = None) -> tuple[FloatArray, FloatArray]:
        config, count = self._config, len(events)
        kt = self._pool.array("kt", (config.layers, config.heads, config.attention_dim, count))
        v = self._pool.array("v", (config.layers, config.heads, count, config.linear_dim))
        if held and kept:
            held.read({"kt": kt, "v": v})
        for first in range(kept, count, self._most_new):
            end = min(count, first + self._most_new)
            new = {name: column[first:end] for name, column in events.columns.items()}
            past = {"past_times": events.columns["times"][:first], "past_kt": kt[..., :first], "past_v": v[:, :, :first]}
            for name in ("past_kt", "past_v"):  # engines take them in one piece
                past[name] = self._pool.copied(name, past[name])
            kt[..., first:end], v[:, :, first:end] = self._run_append({**new, **past})
        return kt, v

    def _drop(self, request: RankRequest) -> None:
        """Forget the user: what is kept of the user may have caused the error."""
        if self._kept:
            self._kept.forget(request.tenant, request.user_id)


def run_by_graphs(append: RunGraph, rank: RunGraph) -> tuple[RunRankAppend, RunRank]:
    """The two functions of an engine that runs the graphs `rank_append` and `rank`."""

    def run_append(inputs: Arrays) -> tuple[FloatArray, FloatArray]:
        outputs = append(inputs)
        return outputs["kt"], outputs["v"]

    return run_append, lambda inputs: rank(inputs)["predictions"]


class KeptEvents(StateKeeper):
    """The rows that one ranker keeps of its users."""

    def __init__(self, bundle: Bundle, config: RankerConfig, options: StateOptions) -> None:
        """Raises ConfigError where the budget of the options holds no row."""
        super().__init__(make_store(config, options, with_states=False), bundle.manifest.files[RANKER].sha256, COMPLAINT)
        self.keep_from = options.keep_from

    def matched(self, request: RankRequest, identities: Int64Array) -> Any:
        return self.store.matched(self._owner(request.tenant, request.user_id), identities)

    def commit(self, held: Held, identities: Int64Array, new: dict[str, FloatArray]) -> None:
        """Keep the rows after those that were held."""
        if held.rows < len(identities):
            self.store.commit(held, identities, held.rows, new)

    def give_up(self, request: RankRequest, error: Exception) -> None:
        self._give_up([self._owner(request.tenant, request.user_id)], error)


class _Events:
    """A request's history as the engine takes it."""

    def __init__(self, request: RankRequest, config: RankerConfig) -> None:
        """Raises BackendFailed at an item that the model does not have: on a GPU, one lookup outside a table breaks all later calls."""
        self.columns: Arrays = event_columns(request.sequence, config)
        items, actions, ratings, times = self.columns.values()
        for given in (items, request.candidates):
            if len(outside := given[(given < 1) | (given > config.items)]):
                raise BackendFailed(f"item index {outside[0]} is outside of 1..{config.items}, the items of this model")
        moments = times.astype(np.int64) + request.sequence.request_time  # as the model sees them: clipped
        self.identities = event_identities(items, moments, actions, ratings)

    def __len__(self) -> int:
        return len(self.identities)
