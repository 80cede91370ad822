"""The common part of all engines' encoders: the way from requests to answers, and the rows kept of users."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cluster.nearest import NearestItems
from cluster.values import Encoded, EncodeRequest
from cluster.window import Window
from integrations.hstu.engine_batch import engine_batch
from integrations.hstu.stateful import KeptStates
from integrations.hstu.stateful_backend import StatefulBackend
from integrations.hstu.user_behavior_schema import BehaviourBatch


class EncoderBackend(StatefulBackend[KeptStates], ABC):
    """A subclass's `load` sets these attributes, and `_kept` where rows are kept; `_whole` computes with them.

    `state`: the options of what is kept of users, see StateOptions.
    """

    _engine: Any
    """What computes: a function, a session or a compiled graph."""
    _index: NearestItems
    _window: Window
    _prompt_length: int
    """The most states that the decoder's prompt takes; 0 where there is no decoder."""

    @abstractmethod
    def _whole(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> list[Encoded]:
        """The answers from all events of each history."""

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        batch = engine_batch(requests, self._window, len(self._index), self._pool)
        return self._kept.answer(requests, batch, self._index, self._whole) if self._kept else self._whole(requests, batch)

    def rows(self, requests: Sequence[EncodeRequest]) -> int:
        """How many rows are computed for the requests now, about."""
        lengths, kept = [len(request.sequence.items) for request in requests], self._kept
        if kept is None or max(lengths) < kept.keep_from:
            return sum(min(length, self._window.longest) for length in lengths)
        windows = [length - self._window.start(length) for length in lengths]
        return sum(map(kept.rows, requests, windows))

    def _clear(self) -> None:
        super()._clear()
        if self._kept:
            self._kept.inputs.clear()  # what was read last may be theirs

    def close(self) -> None:
        super().close()
        for name in ("_engine", "_index"):
            self.__dict__.pop(name, None)
