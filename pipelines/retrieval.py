"""The encoder's stage of the pipeline: the items nearest to the user's state, or the popular ones where nobody can say which those are."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from cluster.bundle import Bundle
from cluster.controller import NoBackendAnswered
from cluster.errors import BackendError
from cluster.managed_backend import passed_over
from cluster.traffic.budget import Budget, in_time
from cluster.values import EncodeAnswer, EncodeRequest, SkippedBackend, StageReport
from pipelines.candidates import Candidates, broken
from pipelines.history import Wishes
from pipelines.popularity import Popularity

Encode: TypeAlias = Callable[[EncodeRequest, float], Awaitable[EncodeAnswer]]
NOTHING_KNOWN = "the user has no behaviour with an item of the catalogue"


class Retrieval:
    """`encode` is the encoder stage, here or across the cluster, told how many seconds it may take: `deadline_s` at most."""

    def __init__(self, bundle: Bundle, encode: Encode, *, deadline_s: float) -> None:
        self._version, self._size, self._encode, self._deadline_s = bundle.version, len(bundle.catalogue), encode, deadline_s
        self._popularity = Popularity(bundle.popularity)

    async def find(self, wishes: Wishes, count: int, budget: Budget) -> Candidates:
        """The `count` best items that are not excluded, fewer where there are fewer; popularity for a user of whom nothing is known, or
        where no encoder answers in time.
        """
        top_n = min(count + len(wishes.excluded), self._size)
        return (await self._candidates(wishes, top_n, budget)).without(wishes.excluded, count)

    async def _candidates(self, wishes: Wishes, top_n: int, budget: Budget) -> Candidates:
        began = time.perf_counter()
        if not len(wishes.sequence):
            return self._popular(wishes, top_n, (SkippedBackend("encoder", NOTHING_KNOWN),), began)
        asked = EncodeRequest(wishes.sequence, top_n, wishes.among, wishes.user, wishes.tenant, model_version=self._version)
        within_s = budget.within(self._deadline_s)
        try:
            answer = await in_time(lambda: self._encode(asked, within_s), within_s)
        except NoBackendAnswered as error:
            return self._popular(wishes, top_n, error.skipped, began, degraded=True)
        except BackendError as error:
            return self._popular(wishes, top_n, (passed_over("encoder", error),), began, degraded=True)
        if answer.model_version != self._version:
            reason = f"the encoder serves {answer.model_version}, this gateway {self._version}: a new version is being rolled out"
            return self._popular(wishes, top_n, (SkippedBackend("encoder", reason, failed=True),), began, degraded=True)
        encoded = answer.encoded
        return Candidates(encoded.items, encoded.scores, answer.report, broken(answer.report), encoded.states)

    def _popular(
        self, wishes: Wishes, top_n: int, skipped: tuple[SkippedBackend, ...], began: float, *, degraded: bool = False
    ) -> Candidates:
        items, scores = self._popularity.nearest(top_n, wishes.among)
        report = StageReport("popularity", "popularity", (time.perf_counter() - began) * 1000, skipped)
        return Candidates(items, scores, report, degraded)
