"""The requests that an encoder is checked with, and what is wrong with an answer."""

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.checks.cases import history, indices, lengths, naming, some, window
from cluster.engines.stage_rules import RULES, STATE_TOLERANCE
from cluster.values import Encoded, EncodeRequest


class EncoderCases:
    def __init__(self, bundle: Bundle) -> None:
        self._items, self._window = len(bundle.catalogue), window(bundle.manifest.model.config)
        self.rules = RULES["encoder"](bundle)

    def typical(self) -> Mapping[str, EncodeRequest]:
        return {f"user {seed}'s history of {length} events": self._asked(length, seed) for seed, length in enumerate(lengths(self._window))}

    def edges(self) -> Mapping[str, EncodeRequest]:
        return {
            "a history of one event": self._asked(1),
            "a history that fills the window": self._asked(self._window),
            "a history longer than the window": self._asked(3 * self._window),
            "a request for one item": self._asked(3, top_n=1),
            "a request for more items than there are": self._asked(5, top_n=self._items + 50),
        }

    def restricted(self) -> Mapping[str, EncodeRequest]:
        strange = indices(0, -4, 1, self._items, self._items + 1, 10**9)
        return {
            "a few items to choose from": replace(self._asked(5), among=some(self._items, 7)),
            "one item to choose from": replace(self._asked(5), among=indices(self._items)),
            "no item to choose from": replace(self._asked(5), among=indices()),
            "strangers among the items to choose from": replace(self._asked(5), among=strange),
        }

    def strangers(self) -> Mapping[str, EncodeRequest]:
        named = {"beyond the catalogue": self._items + 1, "that is padding": 0, "below 0": -3}
        return {
            f"an item {what} in the history": replace(self._asked(4), sequence=naming(history(self._items, 4), item))
            for what, item in named.items()
        }

    def optional(self) -> Mapping[str, EncodeRequest]:
        return {}

    def of(self, request: EncodeRequest, user: str, tenant: str) -> EncodeRequest:
        return replace(request, user_id=user, tenant=tenant)

    def problem(self, request: EncodeRequest, answer: Encoded) -> str:  # noqa: ARG002 - the rules look at what was asked
        if abs(length := float(np.linalg.norm(answer.state)) - 1) > STATE_TOLERANCE:
            return f"answered with a state of length {1 + length:.3g}; states are of length 1 (L2-normalised)"
        return self._wrong_states(answer)

    def _wrong_states(self, answer: Encoded) -> str:
        if answer.states is None:
            return ""
        apart = float(np.abs(answer.states[-1] - answer.state).max())
        return f"the last of its states is {apart:.3g} off its state; they are the same" if apart > STATE_TOLERANCE else ""

    def _asked(self, length: int, seed: int = 0, top_n: int = 10) -> EncodeRequest:
        return EncodeRequest(history(self._items, length, seed), top_n)
