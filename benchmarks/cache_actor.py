"""How many lookups does one cache actor take, and how long do they last the busier it is?

    python -m benchmarks.cache_actor [--rate 200 --rate 400 ...] [--seconds 10] [--callers 2]

One actor behind the cache that gateways use. Callers, each a process of its own, ask for kept answers at a fixed rate, arrivals Poisson,
and put one for each four that they ask for, in turns over the rates. A lookup lasts from the moment it is due. The share of a core is the
actor's processor time, all of its threads. Writes benchmarks/results/cache_actor_cpu_DATE.md.
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import ray
import typer

from benchmarks.reporting import Machine, dated, table
from cluster.cache.actor_shards import connect
from cluster.cache.entry import Entry, Key
from cluster.cache.shared import SharedSettings
from cluster.config import CacheSettings

NAME, USERS, PAYLOAD, ASKED_FOR_EACH_PUT = "measured-cache", 2_000, os.urandom(4_000), 4
PATIENT = SharedSettings(deadline_s=30.0)
RATES = (100, 200, 400, 600, 800, 1_200, 1_600)


def main(
    *,
    rate: Annotated[list[int] | None, typer.Option(help="lookups a second, all callers together")] = None,
    seconds: Annotated[float, typer.Option(help="of each rate in each round")] = 10.0,
    rounds: Annotated[int, typer.Option(help="over all rates")] = 2,
    callers: Annotated[int, typer.Option(help="processes that ask")] = 2,
    out: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    load, rates = os.getloadavg()[0], rate or list(RATES)
    ray.init(num_cpus=callers, include_dashboard=False, log_to_driver=False)
    asking = [Caller.remote(seed) for seed in range(callers)]  # type: ignore[attr-defined]
    ray.get([one.fill.remote() for one in asking])
    actor = next(one for one in psutil.Process().children(recursive=True) if any("CacheActor" in part for part in one.cmdline()[:1]))
    seen: dict[int, list[tuple[float, float, np.ndarray]]] = {one: [] for one in rates}
    for _ in range(rounds):
        for one in rates:
            seen[one].append(measured(asking, actor, one, seconds))
    columns = ["lookups/s wanted", "answered/s", "of a core", "processor time a call (ms)", "p50 (ms)", "p99 (ms)"]
    rows = [row(one, seen[one]) for one in rates]
    heading = ["# One cache actor, asked more and more often", "", f"{callers} callers; answers of {len(PAYLOAD)} bytes.", ""]
    machine = Machine.now("benchmarks.cache_actor", ("ray",), load)
    report = "\n".join([*heading, *table(columns, rows), "", *machine.lines()])
    (out or dated("cache_actor_cpu", "md")).write_text(report)
    typer.echo(report)


def measured(asking: Sequence[object], actor: psutil.Process, rate: int, seconds: float) -> tuple[float, float, np.ndarray]:
    """Seconds, cores and how long each lookup took."""
    before, began = sum(actor.cpu_times()[:2]), time.monotonic()
    answers = ray.get([one.ask.remote(rate / len(asking), seconds) for one in asking])  # type: ignore[attr-defined]
    lasted = time.monotonic() - began
    return lasted, (sum(actor.cpu_times()[:2]) - before) / lasted, np.concatenate(answers)


def row(rate: int, seen: Sequence[tuple[float, float, np.ndarray]]) -> list[str]:
    """One rate's figures over all rounds."""
    lasted, taken = sum(one[0] for one in seen), np.concatenate([one[2] for one in seen])
    busy = sum(one[0] * one[1] for one in seen) / lasted
    calls = taken.size * (1 + 1 / ASKED_FOR_EACH_PUT)
    p50, p99 = np.percentile(taken, [50, 99]) * 1e3
    return [f"{rate:,}", f"{taken.size / lasted:,.0f}", f"{busy:.2f}", f"{1e3 * busy * lasted / calls:.2f}", f"{p50:.1f}", f"{p99:.1f}"]


@ray.remote(num_cpus=1)
class Caller:
    """A gateway's use of the shared cache, without the gateway."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def fill(self) -> None:
        self._cache = await connect(CacheSettings(l2_shards=1), NAME, PATIENT)
        self._epochs = (await self._cache.mget([_key(user) for user in range(USERS)])).epochs
        for user in range(USERS):
            await self._put(user)

    async def ask(self, rate: float, seconds: float) -> np.ndarray:
        """How long each lookup took, in seconds."""
        due, began, asked, taken = 0.0, time.monotonic(), list[asyncio.Task[None]](), list[float]()
        while (due := due + self._random.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            asked.append(asyncio.create_task(self._timed(began + due, taken)))
            if self._random.random() < 1 / ASKED_FOR_EACH_PUT:
                asked.append(asyncio.create_task(self._put(self._random.randrange(USERS))))
        await asyncio.gather(*asked)
        return np.array(taken)

    async def _timed(self, due: float, taken: list[float]) -> None:
        key = _key(self._random.randrange(USERS))
        found = await self._cache.mget([key])
        assert key in found.entries, "a lookup that finds nothing"
        taken.append(time.monotonic() - due)

    async def _put(self, user: int) -> None:
        entry = Entry.lasting(PAYLOAD, len(PAYLOAD), now=time.time(), fresh_s=3600)
        await self._cache.mput({_key(user): entry}, self._epochs)


def _key(user: int) -> Key:
    return Key("default", f"user {user}", "answer")


if __name__ == "__main__":
    typer.run(main)
