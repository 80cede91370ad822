"""A client that went away, or a deadline that is over: nobody computes for them any more."""

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import numpy as np
import pytest

from benchmarks.load_bodies import bodies as requests
from tests.chaos.engines import counted, counter, told
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster

pytestmark = pytest.mark.cluster
BATCH_S = 0.5
REACHED_S = 3.0  # from the encoder's answer on, a busy machine has asked the generator by then
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
MUST = "work cancelled <= 100 ms"
ASKERS = 12


@pytest.fixture(scope="module")
def slow(model, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    with served(cluster, tmp_path_factory.mktemp("slow"), model.path.parent, ARGS) as serving:
        yield serving


async def ask(cluster: Served, body: str, gone_after_s: float | None = None) -> float:
    """When the answer came, or the client hung up, on the monotonic clock."""
    timeout = aiohttp.ClientTimeout(total=gone_after_s or 60)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(f"{cluster.url}/v1/recommend", data=body, headers={"content-type": "application/json"}) as response,
        ):
            await response.read()
    except TimeoutError:
        pass
    return time.monotonic()


async def until_told(cluster: Served, what: str, number: int, within_s: float) -> list[float]:
    deadline = time.monotonic() + within_s
    # the engine writes in another process
    while len(times := [at for word, at in told(cluster.model_dir) if word == what]) < number and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return times


async def test_generation_is_cancelled_when_the_client_hangs_up(slow: Served, record, run: int):
    with record(Row("client gone: generation", MUST, run)) as row:
        before = len([1 for word, _ in told(slow.model_dir) if word == "cancelled"])
        hung_up = [await ask(slow, body, gone_after_s=BATCH_S + REACHED_S) for body in requests(slow.model_dir, 5, strategy="generative")]
        cancelled = (await until_told(slow, "cancelled", before + 5, 25))[before:]
        after = [(then - gone) * 1e3 for gone, then in zip(hung_up, cancelled, strict=False)]
        row.figures |= {"cancelled_after_ms": np.round(after, 1).tolist()}
        row.claim("requests whose generation was cancelled", len(cancelled), least=5)
        row.claim("ms from the hang-up until the last was cancelled", max(after, default=float("inf")), most=100, timing=True)


async def test_generation_is_cancelled_when_the_deadline_is_over(slow: Served, record, run: int):
    with record(Row("deadline passed: generation", MUST, run)) as row:
        before = len([1 for word, _ in told(slow.model_dir) if word == "cancelled"])
        bodies = requests(slow.model_dir, 5, strategy="generative", deadline_ms=(BATCH_S + REACHED_S) * 1e3)
        answered = [await ask(slow, body) for body in bodies]
        cancelled = (await until_told(slow, "cancelled", before + 5, 25))[before:]
        after = [(then - answer) * 1e3 for answer, then in zip(answered, cancelled, strict=False)]
        row.figures |= {"cancelled_after_ms": np.round(after, 1).tolist()}
        row.claim("requests whose generation was cancelled", len(cancelled), least=5)
        row.claim("ms from the answer until the last was cancelled", max(after, default=float("inf")), most=100, timing=True)


async def test_what_waits_for_the_encoder_is_dropped_when_its_clients_hang_up(slow: Served, record, run: int):
    """One at a time is encoded: of a dozen who hang up early, only those are computed whose turn had come."""
    with record(Row("client gone: waiting for the encoder", MUST, run)) as row:
        await asyncio.sleep(2 * BATCH_S)
        counter(slow.model_dir, "paced").touch()
        before = counted(slow.model_dir, "paced")
        bodies = requests(slow.model_dir, ASKERS, strategy="retrieval", tenant=f"run-{run}")
        await asyncio.gather(*(ask(slow, body, gone_after_s=BATCH_S) for body in bodies))
        at_hang_up = counted(slow.model_dir, "paced") - before
        await asyncio.sleep(0.1)
        after_100_ms = counted(slow.model_dir, "paced") - before
        await asyncio.sleep(ASKERS * BATCH_S)
        computed = counted(slow.model_dir, "paced") - before
        row.figures |= {"computed_at_hang_up": at_hang_up, "after_100_ms": after_100_ms, "in_the_end": computed}
        row.claim("begun more than 100 ms after the clients were gone", computed - after_100_ms, most=0)
        row.claim("computed of those asked", computed, least=1, most=ASKERS // 2)
