"""A user's stored events as the history of a request that names only the user."""

import time
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from cluster.engines.skipped import passed_over
from cluster.errors import BackendError
from cluster.events.store import Histories
from cluster.tracing import span
from cluster.traffic.budget import Budget, in_time
from cluster.values import RecommendRequest, SkippedBackend, StageReport
from pipelines.candidates import NO_BACKEND

STAGE = "history"
SWITCHED_OFF = "events are switched off (events: {enabled: false}); send the user's behaviours with the request"


@dataclass(frozen=True, slots=True)
class Completed:
    """A request with its behaviours. `report`: names the store that they come from; None if they came with the request. `version`: of the
    stored history as it was read.
    """

    request: RecommendRequest
    report: StageReport | None = None
    degraded: bool = False
    version: str | None = None


class StoredHistories:
    """`store` is None where events are switched off; it has a limit of its own, the only one for requests without a deadline. At most the
    latest `limit` events are read.
    """

    def __init__(self, store: Histories | None, limit: int) -> None:
        self._store, self._limit = store, limit

    async def version(self, request: RecommendRequest) -> str:
        """The version of the user's stored history, "" if nothing is stored. Raises BackendError if the store does not answer in time."""
        if self._store is None:
            return ""
        store = self._store
        return await in_time(lambda: store.version(request.tenant, request.user_id), Budget(request.deadline).within(inf))

    async def complete(self, request: RecommendRequest) -> Completed:
        """The request with the user's stored behaviours; without any if the store fails or is late, which degrades the answer."""
        if request.behaviours is not None:
            return Completed(request)
        began = time.perf_counter()
        if self._store is None:
            return _without(request, SkippedBackend("events", SWITCHED_OFF), began)
        store, until = self._store, request.request_time  # what was known at that time
        try:
            read = in_time(lambda: store.history(request.tenant, request.user_id, self._limit, until), Budget(request.deadline).within(inf))
            with span("history", store=store.name) as current:
                stored = await read
                current.set_attribute("genrec.events", len(stored.behaviours))
        except BackendError as error:
            return _without(request, passed_over(store.name, error), began, degraded=True)
        report = StageReport(STAGE, store.name, _ms_since(began))
        return Completed(replace(request, behaviours=stored.behaviours), report, version=stored.version)


def _without(request: RecommendRequest, skipped: SkippedBackend, began: float, *, degraded: bool = False) -> Completed:
    report = StageReport(STAGE, NO_BACKEND, _ms_since(began), (skipped,))
    return Completed(replace(request, behaviours=()), report, degraded)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
