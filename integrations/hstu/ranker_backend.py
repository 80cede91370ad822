"""The common part of all engines' rankers: the way from requests to predictions, and the rows kept of users."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cluster.bundle import Bundle
from cluster.engines.skipped import kind_of
from cluster.errors import BackendUnavailable, BundleError, ConfigError
from cluster.options import whole
from cluster.ranking import Ranked, RankRequest
from cluster.values import Availability
from integrations.hstu.config import RankerConfig
from integrations.hstu.limits import rows_at_once
from integrations.hstu.ranking_engine import MICRO_BATCH, KeptEvents, RankingEngine, RunRank, RunRankAppend
from integrations.hstu.stateful_backend import StatefulBackend


class RankerBackend(StatefulBackend[KeptEvents], ABC):
    """A subclass says whether it can serve a bundle (`_check`) and makes the two functions of RankingEngine (`_open`). One whose append has
    all new events in one block says of how many pairs that block is (`most_pairs`).

    `micro_batch`: how many candidates are computed at a time. `state`: the options of what is kept of users, see StateOptions.
    """

    most_pairs = sys.maxsize

    def __init__(self, *, micro_batch: int = MICRO_BATCH, **state: Any) -> None:
        """Raises UnknownChoice or ConfigError at an option that means nothing."""
        super().__init__(**state)
        if whole("micro_batch", micro_batch) < 1:
            raise ConfigError(f"micro_batch ({micro_batch}) must be at least 1: candidates are computed so many at a time")
        self._micro_batch = micro_batch

    @abstractmethod
    def _check(self, bundle: Bundle) -> None:
        """Raises BackendUnavailable or BundleError where it cannot serve the bundle's ranker here."""

    @abstractmethod
    def _open(self, bundle: Bundle) -> tuple[RunRankAppend, RunRank]:
        """Load the engine. Raises BackendUnavailable or BundleError."""

    def get_availability(self, bundle: Bundle) -> Availability:
        try:
            bundle.ranker()
            self._check(bundle)
        except (BackendUnavailable, BundleError) as error:
            return Availability.because(error)
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        config = RankerConfig.of(bundle.ranker())
        try:
            functions = self._open(bundle)
        except (BundleError, ImportError) as error:
            raise BackendUnavailable(str(error), told=kind_of(error)) from error
        keeps = self._state_options.keeps_of(config.max_history)
        self._kept = KeptEvents(bundle, config, self._state_options) if keeps else None
        most_new = rows_at_once(config, self.most_pairs)
        self._engine = RankingEngine(functions, config, self._kept, self._pool, self._micro_batch, most_new=most_new)

    def infer(self, request: RankRequest) -> Ranked:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[RankRequest]) -> list[Ranked]:
        return self._engine.answer(requests)

    def rows(self, requests: Sequence[RankRequest]) -> int:
        """How many rows are computed for the requests now, about: those of their candidates and of new events."""
        return sum(map(self._engine.rows, requests))

    def close(self) -> None:
        super().close()
        self.__dict__.pop("_engine", None)
