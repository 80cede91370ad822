"""A client that went away, or a deadline that is over: nobody computes for them any more."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from benchmarks.load_bodies import bodies as requests
from deployments.http.connection import WATCH_AFTER_S
from tests.chaos.engines import counted, holding, told
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster
from tests.waiting import passed, until

pytestmark = pytest.mark.cluster
BATCH_S = 0.5
DEADLINE_S = 3.5  # from the arrival on; by then the generator is mostly asked
ARGS = {
    "encoder": {
        "order": ["paced"],
        "backends": {"paced": "tests.chaos.engines:Paced"},
        "options": {"paced": {"batch_s": BATCH_S, "request_s": 0.0}},
        "batching": {"max_requests": 1},
    },
    "generator": {"order": ["telling"], "backends": {"telling": "tests.chaos.engines:Telling"}},
    "gateway": {"deadline_s": 60.0, "generation_deadline_s": 20.0, "request_within_s": 90.0, "admission": {"max_wait_ms": 30_000}},
    "cache": {"enabled": False},
}
LONGEST_S = 60.0
MUST = "work cancelled <= 100 ms"
ASKERS = 32  # their requests take 16 s together: within that the encoder hears of one hang-up at least, however busy the machine is


@pytest.fixture(scope="module")
def slow(model, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    with served(cluster, tmp_path_factory.mktemp("slow"), model.path.parent, ARGS) as serving:
        yield serving


async def ask(cluster: Served, body: str) -> float:
    """When the answer came, on the monotonic clock."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
        http.post(f"{cluster.url}/v1/recommend", data=body, headers={"content-type": "application/json"}) as response,
    ):
        assert response.status == 200, await response.text()
        await response.read()
    return time.monotonic()


async def under_way(cluster: Served) -> int:
    """How many requests the gateway works on, or has wait."""
    async with aiohttp.ClientSession() as http, http.get(f"{cluster.url}/v1/gateway") as response:
        assert response.status == 200, await response.text()
        figures = await response.json()
    return int(figures["running"] + figures["waiting"])


async def hang_up_once(holds: Callable[[], Any], cluster: Served, bodies: Sequence[str]) -> float:
    """Ask for all of these, and close the connections once it holds and the gateway watches its clients; when that was, on the monotonic
    clock.
    """
    asking = [asyncio.create_task(ask(cluster, body)) for body in bodies]
    await until(holds, "it is being computed")
    await passed(2 * WATCH_AFTER_S)  # for the last body to be read, and its client to be watched
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return time.monotonic()


def times_told(cluster: Served, what: str) -> list[float]:
    return [at for word, at in told(cluster.model_dir) if word == what]


async def until_told(cluster: Served, what: str, number: int, within_s: float) -> list[float]:
    deadline = time.monotonic() + within_s
    # the engine writes in another process
    while len(times := times_told(cluster, what)) < number and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return times


async def test_generation_is_cancelled_when_the_client_hangs_up(slow: Served, record, run: int):
    with record(Row("client gone: generation", MUST, run)) as row:
        before, hung_up = len(times_told(slow, "cancelled")), []
        for body in requests(slow.model_dir, 5, strategy="generative"):
            begun = len(times_told(slow, "began"))
            hung_up.append(await hang_up_once(lambda begun=begun: len(times_told(slow, "began")) > begun, slow, [body]))
        cancelled = (await until_told(slow, "cancelled", before + 5, 25))[before:]
        after = [(then - gone) * 1e3 for gone, then in zip(hung_up, cancelled, strict=False)]
        row.figures |= {"cancelled_after_ms": np.round(after, 1).tolist()}
        row.claim("requests whose generation was cancelled", len(cancelled), least=5)
        row.claim("ms from the hang-up until the last was cancelled", max(after, default=float("inf")), most=100, timing=True)


async def test_generation_is_cancelled_when_the_deadline_is_over(slow: Served, record, long: bool, run: int):
    times = 5 if long else 2
    with record(Row("deadline passed: generation", MUST, run)) as row:
        after, took, ended = [], [], len(times_told(slow, "ended"))
        for number in range(times):
            begun, within_s, began, answered = len(times_told(slow, "began")), DEADLINE_S, 0.0, 0.0
            while len(times_told(slow, "began")) == begun:  # on a busy machine the time may be over before the generator is asked
                assert within_s < LONGEST_S, "the generator is not asked"
                bodies = requests(slow.model_dir, 5, strategy="generative", deadline_ms=within_s * 1e3)
                began, within_s = time.monotonic(), 2 * within_s
                answered = await ask(slow, bodies[number])
            took.append(answered - began)
            # of a request that stalls there is a copy, which is cancelled too
            cancelled = await until_told(slow, "cancelled", len(times_told(slow, "began")), 25)
            if len(cancelled) == len(times_told(slow, "began")):
                after.append((cancelled[-1] - answered) * 1e3)
        row.figures |= {"cancelled_after_ms": np.round(after, 1).tolist(), "answered_after_s": np.round(took, 2).tolist()}
        row.claim("requests whose generation was cancelled", len(after), least=times)
        row.claim("seconds until the first answer: its deadline, not a copy's answer", min(took), least=DEADLINE_S - 0.5)
        row.claim("generations that were not cancelled", len(times_told(slow, "ended")) - ended, most=0)
        row.claim("ms from the answer until the last was cancelled", max(after, default=float("inf")), most=100, timing=True)


async def test_what_waits_for_the_encoder_is_dropped_when_its_clients_hang_up(slow: Served, record, run: int):
    """One at a time is encoded. Many hang up while the first is held. Once the gateway has none of them any more, the engine goes on, and
    is to come to the request that is asked then, and to none of theirs. The encoder hears of each hang-up by a call of its own, which on a
    busy machine may come after the engine has gone on: what holds on any machine is that some of theirs are dropped.
    """
    *bodies, last = requests(slow.model_dir, ASKERS + 1, strategy="retrieval", tenant=f"run-{run}")

    async def all_there() -> bool:
        return counted(slow.model_dir, "paced") > before and await under_way(slow) == ASKERS

    async def none_there() -> bool:
        return await under_way(slow) == 0

    with record(Row("client gone: waiting for the encoder", MUST, run)) as row:
        await ask(slow, last)  # what was asked before is over
        before = counted(slow.model_dir, "paced")
        holding(slow.model_dir).touch()
        try:
            hung_up = await hang_up_once(all_there, slow, bodies)
            at_hang_up = counted(slow.model_dir, "paced") - before
            await until(none_there, "the gateway has dropped them")
            after_ms = (time.monotonic() - hung_up) * 1e3
        finally:
            holding(slow.model_dir).unlink()
        await ask(slow, last)  # behind all that still wait
        computed = counted(slow.model_dir, "paced") - before - 1
        row.figures |= {"computed_at_hang_up": at_hang_up, "dropped_after_ms": round(after_ms, 1), "in_the_end": computed}
        row.claim("ms from the hang-up until the gateway had none of them", after_ms, most=100, timing=True)
        row.claim("begun after the clients were gone", computed - at_hang_up, most=0, timing=True)
        row.claim("computed of those asked", computed, least=1, most=ASKERS - 1)
