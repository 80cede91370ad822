"""The requests that a generator is checked with, and what is wrong with an answer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.checks.cases import history, indices, lengths, naming, some
from cluster.engines.stage_rules import RULES
from cluster.values import Generated, GenerateRequest, SamplingOptions, UserState

BEAM, K, WIDEST = 20, 10, 64


class GeneratorCases:
    def __init__(self, bundle: Bundle) -> None:
        self._items, self._prompt, self._dim = len(bundle.catalogue), max(1, bundle.prompt_length), bundle.item_vectors.shape[1]
        self.rules = RULES["generator"](bundle)

    def typical(self) -> Mapping[str, GenerateRequest]:
        return {f"user {seed}'s prompt of {length} events": self._asked(length, seed) for seed, length in enumerate(lengths(self._prompt))}

    def edges(self) -> Mapping[str, GenerateRequest]:
        return {
            "a prompt of one event": self._asked(1),
            "a prompt of full length": self._asked(self._prompt),
            "a beam of one": self._asked(3, k=1, beam=1),
            "a request for more items than there are": self._asked(3, k=self._items + 50, beam=WIDEST),
        }

    def restricted(self) -> Mapping[str, GenerateRequest]:
        half, everything = np.arange(1, self._items + 1, 2, dtype=np.int32), np.arange(1, self._items + 1, dtype=np.int32)
        few, strange = some(self._items, 7), indices(0, -4, 10**9, self._items + 1)
        return {
            "half of the items blocked": self._asked(4, blocked=half),
            "all items but one blocked": self._asked(4, blocked=everything[:-1]),
            "all items blocked": self._asked(4, blocked=everything),
            "a few items to choose from": self._asked(4, among=few),
            "some of the items to choose from blocked": self._asked(4, among=few, blocked=few[:3]),
            "no item to choose from": self._asked(4, among=indices()),
            "strangers among both": self._asked(4, among=np.append(strange, few), blocked=strange),
        }

    def strangers(self) -> Mapping[str, GenerateRequest]:
        good = self._asked(min(3, self._prompt))
        beyond = naming(good.state.sequence, self._items + 1)
        return {
            "an item beyond the catalogue in the prompt": replace(good, state=replace(good.state, sequence=beyond)),
            "a prompt with NaN": replace(good, state=replace(good.state, states=np.full_like(good.state.states, np.nan))),
        }

    def optional(self) -> Mapping[str, GenerateRequest]:
        return {"a request to draw items": self._asked(4, sampling=SamplingOptions(samples=16, seed=3))}

    def of(self, request: GenerateRequest, user: str, tenant: str) -> GenerateRequest:
        return replace(request, user_id=user, tenant=tenant)

    def problem(self, request: GenerateRequest, answer: Generated) -> str:  # noqa: ARG002 - the interface of cases
        return ""

    def _asked(self, length: int, seed: int = 0, *, k: int = K, beam: int = BEAM, **rest: Any) -> GenerateRequest:
        length = min(length, self._prompt)
        states = np.random.default_rng([seed, length, 1]).normal(size=(length, self._dim)).astype(np.float32)
        states /= np.linalg.norm(states, axis=1, keepdims=True)
        user = UserState(states, history(self._items, length, seed))
        return GenerateRequest(user, k, beam, **{"blocked": indices(), **rest})
