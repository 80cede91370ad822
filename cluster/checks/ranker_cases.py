"""The requests that a ranker is checked with, and what is wrong with an answer."""

from collections.abc import Mapping

from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.checks.cases import history, indices, lengths, naming, some, window
from cluster.engines.stage_rules import RULES
from cluster.ranking import Ranked, RankRequest
from cluster.values import Int32Array


class RankerCases:
    def __init__(self, bundle: Bundle) -> None:
        record = bundle.manifest.ranker
        self._items, self._window = len(bundle.catalogue), window(record.config if record else {})
        self.rules = RULES["ranker"](bundle)

    def typical(self) -> Mapping[str, RankRequest]:
        return {
            f"user {seed}'s history of {length} events": self._asked(length, seed=seed) for seed, length in enumerate(lengths(self._window))
        }

    def edges(self) -> Mapping[str, RankRequest]:
        return {
            "no history": self._asked(0),
            "a history of one event": self._asked(1),
            "a history that fills the window": self._asked(self._window),
            "a history longer than the window": self._asked(3 * self._window),
            "one candidate": self._asked(5, indices(self._items)),
            "no candidate": self._asked(5, indices()),
            "many candidates": self._asked(5, some(self._items, 500)),
        }

    def restricted(self) -> Mapping[str, RankRequest]:
        return {}

    def strangers(self) -> Mapping[str, RankRequest]:
        return {
            "a candidate beyond the catalogue": self._asked(3, indices(1, self._items + 1)),
            "a candidate that is padding": self._asked(3, indices(1, 0)),
            "an item beyond the catalogue in the history": replace(
                self._asked(3), sequence=naming(history(self._items, 3), self._items + 1)
            ),
        }

    def optional(self) -> Mapping[str, RankRequest]:
        return {}

    def of(self, request: RankRequest, user: str, tenant: str) -> RankRequest:
        return replace(request, user_id=user, tenant=tenant)

    def problem(self, request: RankRequest, answer: Ranked) -> str:  # noqa: ARG002 - the interface of cases
        return ""

    def _asked(self, length: int, candidates: Int32Array | None = None, seed: int = 0) -> RankRequest:
        return RankRequest(history(self._items, length, seed), some(self._items, 30) if candidates is None else candidates)
