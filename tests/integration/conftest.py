"""What tests that ask a served model over HTTP have in common."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from cluster.stages import STAGES
from tests.clusters import Application
from tests.waiting import eventually, json_of, until_right

PATIENT = {
    **dict.fromkeys(("deadline_s", "generation_deadline_s", "ranking_deadline_s"), 30.0),
    "request_within_s": 90.0,
    "body_within_s": 90.0,
    "admission": {"max_wait_ms": 30_000},
}
"""A gateway that has requests wait rather than refuses them, however busy this machine is: who is refused when is told by the tests of the
edge and of chaos.
"""
PATIENT_READS = {"read_deadline_ms": 30_000.0}
"""Of stored histories, under `events`."""


@dataclass(frozen=True)
class Live:
    """A served model: where it answers, the directory it was published in, what serves it, where its replicas log, and where it answers
    over ZeroMQ.
    """

    url: str
    model_dir: Path
    serving: Application
    logs: Path = Path()
    door: str = ""

    def recommend(self, **request: Any) -> httpx.Response:
        """Computed, not taken from the cache, unless `cache` says otherwise."""
        return httpx.post(f"{self.url}/v1/recommend", json={"user_id": "ada", "cache": "bypass", **request}, timeout=120)

    def switch(self, name: str, to: str, stage: str = "encoder") -> None:
        """Until every replica follows, however long the switchboard takes to answer and one of them to report."""

        def applied() -> bool:
            response = httpx.post(f"{self.url}/v1/backends/{stage}/{name}:{to}", timeout=120)
            # on a busy machine the switchboard had no turn within an operator's 2 s, or has not heard of the stage for longer than it waits
            if response.status_code in (404, 503):
                return False
            assert response.status_code == 200, response.text
            return bool(response.json()["applied"])

        def shown(backend: Mapping[str, Any]) -> bool:
            return backend["enabled"] is (to != "disable") and (to != "first" or backend["rank"] == 0)

        eventually(applied, f"{stage} {name}: {to}")
        until_right(lambda: self.backends(stage)[name], shown)  # it was applied by those that the switchboard heard of, of any stage

    @contextmanager
    def switched(self, stage: str = "encoder", **positions: str) -> Iterator[None]:
        """With these backends switched so; afterwards they are on or off as they were."""
        before = self.backends(stage)
        with ExitStack() as as_before:
            for name, to in positions.items():
                as_before.callback(self.switch, name, "enable" if before[name]["enabled"] else "disable", stage)
                self.switch(name, to, stage)
            yield

    def stages(self) -> dict[str, dict[str, Any]]:
        """All that the application has: the switchboard leaves out a stage that has said nothing for some seconds."""
        wanted = {one["name"] for one in self.serving.entry["deployments"] if one.get("num_replicas")} & STAGES.keys()

        def listed() -> dict[str, dict[str, Any]]:
            return {stage["stage"]: stage for stage in json_of(f"{self.url}/v1/backends")["stages"]}

        return until_right(listed, lambda found: wanted <= found.keys())

    def backends(self, stage: str = "encoder") -> dict[str, dict[str, Any]]:
        return {backend["name"]: backend for backend in self.stages()[stage]["backends"]}

    def eventually(self, holds: Callable[[Mapping[str, Any]], bool], *, within_s: float = 300, **request: Any) -> Mapping[str, Any]:
        """Ask until the answer is as expected; every answer on the way has status 200."""

        def ask() -> Mapping[str, Any]:
            response = self.recommend(**request)
            assert response.status_code == 200, response.text
            answer: Mapping[str, Any] = response.json()
            return answer

        return until_right(ask, holds, within_s)

    async def ask_together(self, requests: Sequence[Mapping[str, Any]]) -> list[httpx.Response]:
        """Each as it is, all at once, as far as there are connections: a hundred; the answers in their order."""
        async with httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(300, pool=None)) as client:
            return await asyncio.gather(*(client.post("/v1/recommend", json=request) for request in requests))

    @contextmanager
    def constant_traffic(self, **request: Any) -> Iterator[list[httpx.Response]]:
        """Two callers that ask all the while; afterwards, every answer they got."""
        stop, answers = Event(), list[httpx.Response]()

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=300) as client:
                while not stop.is_set():
                    answers.append(client.post("/v1/recommend", json={"user_id": "traffic", "cache": "bypass", **request}))

        with ThreadPoolExecutor(2) as callers:
            futures = [callers.submit(ask) for _ in range(2)]
            try:
                yield answers
            finally:
                stop.set()
            for future in futures:
                future.result()


def everywhere(ask: Callable[[], httpx.Response]) -> dict[str, Any]:
    """Ask for an erasure until every replica has followed, however late one of them reports; what the first answer tells.

    While the switchboard does not take it in time, the answer is 503, and the gateway has erased what it can: `ask` should do anew what
    the first answer is to tell of.
    """

    def answer() -> dict[str, Any]:
        told: dict[str, Any] = until_right(ask, lambda seen: seen.status_code != 503).raise_for_status().json()
        return told

    first = answer()
    if not first["everywhere"]:
        eventually(lambda: answer()["everywhere"], "every replica has followed")
    return first


def behaviours(*items: int, start: int = 1_700_000_000) -> list[dict[str, Any]]:
    """Views of these items of the small catalogue, an hour apart."""
    return [{"item_id": str(item), "timestamp": start + 3600 * step} for step, item in enumerate(items)]
