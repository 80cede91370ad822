"""A client that went away, or a deadline that is over: nobody computes for them any more."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import aiohttp
import numpy as np
import pytest

from benchmarks.load_bodies import bodies as requests
from tests.chaos.engines import counted, counter, told
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster
from tests.waiting import until

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
    "gateway": {"deadline_s": 20.0, "generation_deadline_s": 20.0},
    "cache": {"enabled": False},
}
LONGEST_S = 60.0
MUST = "work cancelled <= 100 ms"
ASKERS = 12


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


async def hang_up_once(holds: Callable[[], bool], cluster: Served, bodies: Sequence[str]) -> float:
    """Ask for all of these, and close the connections once it holds; when that was, on the monotonic clock."""
    asking = [asyncio.create_task(ask(cluster, body)) for body in bodies]
    await until(holds, "it is being computed")
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


async def test_generation_is_cancelled_when_the_deadline_is_over(slow: Served, record, run: int):
    with record(Row("deadline passed: generation", MUST, run)) as row:
        after, took, ended = [], [], len(times_told(slow, "ended"))
        for number in range(5):
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
        row.claim("requests whose generation was cancelled", len(after), least=5)
        row.claim("seconds until the first answer: its deadline, not a copy's answer", min(took), least=DEADLINE_S - 0.5)
        row.claim("generations that were not cancelled", len(times_told(slow, "ended")) - ended, most=0)
        row.claim("ms from the answer until the last was cancelled", max(after, default=float("inf")), most=100, timing=True)


async def test_what_waits_for_the_encoder_is_dropped_when_its_clients_hang_up(slow: Served, record, run: int):
    """One at a time is encoded: of a dozen that hang up at the second's turn, only those are computed that had their turn by then."""
    with record(Row("client gone: waiting for the encoder", MUST, run)) as row:
        await asyncio.sleep(2 * BATCH_S)
        counter(slow.model_dir, "paced").touch()
        before = counted(slow.model_dir, "paced")
        bodies = requests(slow.model_dir, ASKERS, strategy="retrieval", tenant=f"run-{run}")
        await hang_up_once(lambda: counted(slow.model_dir, "paced") > before + 1, slow, bodies)
        at_hang_up = counted(slow.model_dir, "paced") - before
        await asyncio.sleep(0.1)
        after_100_ms = counted(slow.model_dir, "paced") - before
        await asyncio.sleep(ASKERS * BATCH_S)
        computed = counted(slow.model_dir, "paced") - before
        row.figures |= {"computed_at_hang_up": at_hang_up, "after_100_ms": after_100_ms, "in_the_end": computed}
        row.claim("begun more than 100 ms after the clients were gone", computed - after_100_ms, most=0, timing=True)
        row.claim("computed of those asked", computed, least=1, most=ASKERS // 2)
