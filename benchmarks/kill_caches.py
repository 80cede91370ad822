"""Kill what keeps state, with `kill -9`, while requests go on: does any fail, does a user ever see what is another's?

    python benchmarks/kill_caches.py --requests 100000                # with the demo's model (run `make demo ONCE=1` before)

Starts Serve on this machine with two gateways. Two tenants have users of the same ids, and every user of each tenant owns four items of the
catalogue: their events are of these only, so an answer whose explanation names any other item as seen is another user's. Requests: what
to recommend to a user by what is stored of them, events (each with an idempotency key), histories, and recommendations by a history that is
sent. Meanwhile every few seconds a cache actor or a gateway is killed. At the end every acknowledged event must be stored, once.
Writes benchmarks/results/kill_caches_cpu_DATE.md.
"""

import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Annotated, Any, Protocol

import aiohttp
import numpy as np
import psutil
import typer
import yaml

from benchmarks.reporting import Machine, dated
from cluster.bundle_store import BundleStore
from cluster.config_file import read_document
from deployments.cli.local_serve import LocalServe

ROOT = Path(__file__).resolve().parents[1]
TENANTS = ("red", "blue")
OWNED = 4
START = 1_700_000_000
TRIES = 5
BOTH_WITHIN_S = 300.0
POLL_S = 0.02


class Killable(Protocol):
    """What serves: the process of which all its others descend, and those of a deployment that Serve gives requests to."""

    @property
    def pid(self) -> int: ...
    def running(self, deployment: str) -> set[int]: ...


@dataclass
class Tally:
    """What happened to the requests."""

    sent: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    retried: int = 0
    degraded: int = 0
    acknowledged: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)


class Traffic:
    """Requests of `users` users of each tenant to `url`, `concurrency` at a time."""

    def __init__(self, url: str, items: list[str], users: int, concurrency: int, seed: int = 0) -> None:
        self.url, self.items, self.users, self.concurrency = url, items, users, concurrency
        self.tally, self.random, self.clock = Tally(), random.Random(seed), START

    def owned(self, tenant: str, user: int) -> list[str]:
        """The items that are this user's alone."""
        first = (user * len(TENANTS) + TENANTS.index(tenant)) * OWNED
        return self.items[first : first + OWNED]

    async def run(self, requests: int) -> None:
        left = iter(range(requests))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            await asyncio.gather(*(self._worker(http, left) for _ in range(self.concurrency)))

    async def _worker(self, http: aiohttp.ClientSession, left: Any) -> None:
        for _ in left:
            tenant, user = self.random.choice(TENANTS), int(self.users * self.random.random() ** 3)
            kind = self.random.choices(("stored", "event", "sent", "history"), (70, 12, 12, 6))[0]
            self.tally.sent[kind] += 1
            await getattr(self, f"_{kind}")(http, tenant, user)

    async def _stored(self, http: aiohttp.ClientSession, tenant: str, user: int) -> None:
        body = {"user_id": str(user), "tenant": tenant, "k": 5, "explain": True, "strategy": "retrieval"}
        self._check(tenant, user, await self._ask(http, "POST", "/v1/recommend", body))

    async def _sent(self, http: aiohttp.ClientSession, tenant: str, user: int) -> None:
        seen = [{"item_id": item, "timestamp": START} for item in self.owned(tenant, user)]
        body = {"user_id": str(user), "tenant": tenant, "k": 5, "explain": True, "strategy": "retrieval", "behaviours": seen}
        self._check(tenant, user, await self._ask(http, "POST", "/v1/recommend", body))

    async def _event(self, http: aiohttp.ClientSession, tenant: str, user: int) -> None:
        self.clock += 1
        stamp, item = self.clock, self.random.choice(self.owned(tenant, user))
        body = {"user_id": str(user), "tenant": tenant, "item_id": item, "timestamp": stamp, "idempotency_key": f"event-{stamp}"}
        if await self._ask(http, "POST", "/v1/events", body) is not None:
            self.tally.acknowledged.setdefault((tenant, str(user)), set()).add(stamp)

    async def _history(self, http: aiohttp.ClientSession, tenant: str, user: int) -> None:
        history = await self._ask(http, "GET", f"/v1/users/{user}/history?tenant={tenant}", None)
        self._compare(tenant, user, [event["item_id"] for event in history["events"]] if history else [])

    async def _ask(self, http: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The answer, asked for again where the connection or the gateway was lost: what any client of a replicated service does."""
        began, problem = perf_counter(), ""
        for attempt in range(TRIES):
            try:
                async with http.request(method, f"{self.url}{path}", json=body) as response:
                    if response.status < 500:
                        self.tally.times.append((perf_counter() - began) * 1e3)
                        self.tally.retried += attempt > 0
                        return await self._body(response)
                    problem = f"{response.status} {(await response.text())[:200]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = repr(error)
            await asyncio.sleep(0.2 * 2**attempt)
        self.tally.failed.append(f"{method} {path}: {problem}")
        return None

    async def _body(self, response: aiohttp.ClientResponse) -> dict[str, Any] | None:
        if response.status >= 400:
            self.tally.failed.append(f"{response.status} {(await response.text())[:200]}")
            return None
        body: dict[str, Any] = await response.json()
        return body

    def _check(self, tenant: str, user: int, answer: dict[str, Any] | None) -> None:
        if answer is None:
            return
        self.tally.tiers[(answer["cache"] or {"tier": "no cache"})["tier"]] += 1
        self.tally.degraded += answer["degraded"]
        if answer["user_id"] != str(user):
            self.tally.strangers.append(f"{tenant}/{user} was answered as {answer['user_id']}")
        self._compare(tenant, user, [one["item_id"] for item in answer["items"] for one in item["explanation"]["similar"]])

    def _compare(self, tenant: str, user: int, seen: list[str]) -> None:
        if others := set(seen) - set(self.owned(tenant, user)):
            self.tally.strangers.append(f"{tenant}/{user} was answered by {sorted(others)}")

    async def lost_events(self) -> list[str]:
        """Acknowledged events that are not stored exactly once."""
        wrong = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            for (tenant, user), stamps in self.tally.acknowledged.items():
                history = await self._ask(http, "GET", f"/v1/users/{user}/history?tenant={tenant}&limit=10000", None)
                there = Counter(event["timestamp"] for event in (history or {"events": []})["events"])
                wrong += [f"{tenant}/{user} at {stamp}: {there[stamp]} times" for stamp in sorted(stamps) if there[stamp] != 1]
        return wrong


async def kill_until(done: asyncio.Task[None], serving: Killable, tally: Tally, every: float) -> None:
    """Each time that `every` requests were answered, kill in turns all cache actors, and one gateway where another one serves. Serve lists
    a gateway for a while after it was killed.
    """
    killed = set[int]()
    for turn in count():
        while len(tally.times) < every * (turn + 1):
            if (await asyncio.wait([done], timeout=POLL_S))[0]:
                return
        if turn % 2 == 0:
            tally.killed["cache actor"] += kill(named(serving.pid, "CacheActor"))
        elif len(gateways := await asyncio.to_thread(serving.running, "gateway") - killed) > 1:
            killed.add(victim := gateways.pop())
            tally.killed["gateway"] += kill([victim])


def kill(victims: list[int]) -> int:
    """How many of these processes there were to kill."""
    killed = 0
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            killed += 1
    return killed


def named(serving: int, title: str) -> list[int]:
    """The descendants of a process whose title has this in it."""
    found = []
    for process in psutil.Process(serving).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(title in part for part in process.cmdline()):
                found.append(process.pid)
    return found


def wait_for_two(serving: Killable, deployment: str) -> None:
    """Raises TimeoutError: where the machine has too few cores for both, the second would be waited for in vain."""
    deadline = monotonic() + BOTH_WITHIN_S
    while len(serving.running(deployment)) < 2:
        if monotonic() > deadline:
            raise TimeoutError(f"no second {deployment} ran within {BOTH_WITHIN_S:g} s; see the log, and whether its num_cpus are free")
        sleep(1)


async def drive(
    url: str, serving: Killable, items: list[str], *, requests: int, users: int, concurrency: int, every: float
) -> tuple[Traffic, list[str]]:
    """The traffic to two gateways, once it is over, and the events that were lost."""
    await asyncio.to_thread(wait_for_two, serving, "gateway")
    traffic = Traffic(url, items, min(users, len(items) // (OWNED * len(TENANTS))), concurrency)
    running = asyncio.create_task(traffic.run(requests))
    await asyncio.gather(running, kill_until(running, serving, traffic.tally, every))
    return traffic, await traffic.lost_events()


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    requests: Annotated[int, typer.Option()] = 100_000,
    users: Annotated[int, typer.Option(help="of each tenant; fewer where the catalogue is small")] = 200,
    concurrency: Annotated[int, typer.Option()] = 16,
    every: Annotated[int, typer.Option(help="requests between two kills")] = 600,
    port: Annotated[int, typer.Option()] = 8014,
) -> None:
    """Drive, print and file."""
    catalogue = BundleStore(model_dir).open().catalogue
    items = [item.item_id for item in catalogue.items]
    load, began = os.getloadavg()[0], monotonic()
    with tempfile.TemporaryDirectory() as directory:
        changes = {"model_dir": str(model_dir), "events": {"url": f"sqlite:///{directory}/events.db"}}
        serving = LocalServe(with_replicas(Path(directory), gateway=2), changes, port=port, log=Path(".genrec/kill_caches.log"))
        with serving as url:
            traffic, lost = asyncio.run(drive(url, serving, items, requests=requests, users=users, concurrency=concurrency, every=every))
    text = report(traffic, lost, monotonic() - began, Machine.now("benchmarks.kill_caches", ("ray", "onnxruntime"), load))
    print(text)
    dated("kill_caches_cpu", "md").write_text(text)


def with_replicas(directory: Path, **counts: int) -> Path:
    """ray_config.yaml with so many replicas of these deployments."""
    document = read_document(ROOT / "ray_config.yaml")
    for deployment in document["applications"][0]["deployments"]:
        if count := counts.get(deployment["name"]):
            deployment["autoscaling_config"] |= {"min_replicas": count, "max_replicas": count}
            deployment["ray_actor_options"] |= {"num_cpus": 0.1}  # two cores are enough for them and the other stages
    path = directory / "replicas.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def report(traffic: Traffic, lost: list[str], seconds: float, machine: Machine) -> str:
    """What happened, as Markdown."""
    tally, total = traffic.tally, sum(traffic.tally.sent.values())
    p50, p99 = np.percentile(tally.times, [50, 99])
    acknowledged = sum(map(len, tally.acknowledged.values()))
    return "\n".join(
        [
            "# kill -9 of cache actors and gateways under load",
            "",
            f"{total:,} requests ({_counted(tally.sent)}), {traffic.concurrency} at a time.",
            f"{len(TENANTS)} tenants with the same {traffic.users} user ids.",
            f"Killed: {_counted(tally.killed)}. Answers from: {_counted(tally.tiers)}.",
            "",
            "| | |",
            "|---|---|",
            f"| requests that failed | {len(tally.failed)} |",
            f"| requests the client had to send again (a killed gateway takes its connections with it) | {tally.retried} |",
            f"| answers made from what is another user's, or another tenant's | {len(tally.strangers)} |",
            f"| degraded answers | {tally.degraded} |",
            f"| events acknowledged, and not stored exactly once | {acknowledged:,}, {len(lost)} |",
            f"| p50, p99 of a request (ms) | {p50:.1f}, {p99:.1f} |",
            "",
            *(f"- {one}" for one in [*tally.failed[:5], *tally.strangers[:5], *lost[:5]]),
            f"{seconds:.0f} s.",
            *machine.lines(),
        ]
    )


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "nothing"


if __name__ == "__main__":
    typer.run(main)
