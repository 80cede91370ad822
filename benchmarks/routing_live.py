"""The real thing for `benchmarks.routing`: four gateways and four encoders on this machine, with engines that note what they are asked.

Requests of two tenants arrive at random times; each user's history has one event more at each visit. In turns all is calm, one encoder is
slow, and it is slow while `flags.hedge` is on; then two encoders are added. What reached homes and found kept states is counted from the
engines' notes.
"""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import numpy as np

from benchmarks.noting_encoder import SLOW_S, file_of
from benchmarks.reporting import table
from benchmarks.simulated_routing import TENANTS
from cluster.bundle_store import BundleStore
from cluster.traffic.user_router import in_order_of
from tests.clusters import Application, SharedCluster, fixed
from tests.waiting import eventually

GATEWAYS, ENCODERS, ADDED = 4, 4, 2
USERS, EVENTS, RATE = 150, 40, 40.0
POPULARITY = 2.2
"""The exponent by which low numbers are drawn more often: user 0 of each tenant has a twentieth of all requests."""
CALM_S, FAULT_S, TURNS, WARM_S = 15.0, 30.0, 2, 20.0
START = 1_700_000_000


@dataclass
class Phase:
    """`took_ms`: of each answer; `asked`: user -> by replica, how often its engine was asked for that user."""

    name: str
    took_ms: list[float] = field(default_factory=list)
    failed: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    hits: float = 0.0
    lookups: float = 0.0

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.took_ms, 99))

    def at_home(self, replicas: Sequence[str]) -> float:
        """The share of what the engines were asked that was asked of the home among these."""
        return float(np.mean([in_order_of(user, replicas)[0] == replica for replica, user in self.asked]))

    def share_of(self, replica: str) -> float:
        return float(np.mean([one == replica for one, _ in self.asked]))


class Notes:
    """What the engines have noted since it was last read."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir, self._read = model_dir, dict[Path, int]()

    def into(self, phase: Phase) -> None:
        for path in self._model_dir.glob("noted-*"):
            text = path.read_text()
            lines, self._read[path] = text[self._read.get(path, 0) :].splitlines(), len(text)
            for batch in map(json.loads, lines):
                users = [user for user in batch["users"] if user]
                phase.asked += [(path.name.removeprefix("noted-"), user) for user in users]
                if users:
                    phase.hits, phase.lookups = phase.hits + batch["hits"], phase.lookups + batch["hits"] + batch["misses"]


class Traffic:
    """Requests of `USERS` users of each tenant, the more popular the smaller their number."""

    def __init__(self, url: str, items: Sequence[str], seed: int = 0) -> None:
        self._url, self._items, self._random, self._visits = url, items, random.Random(seed), dict[tuple[str, int], int]()

    async def run(self, phase: Phase, seconds: float) -> None:
        end, asked = monotonic() + seconds, list[asyncio.Task[None]]()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)) as http:
            while monotonic() < end:
                asked.append(asyncio.create_task(self._ask(http, phase)))
                await asyncio.sleep(self._random.expovariate(RATE))
            await asyncio.gather(*asked)

    async def _ask(self, http: aiohttp.ClientSession, phase: Phase) -> None:
        tenant, user = self._random.choice(TENANTS), int(USERS * self._random.random() ** POPULARITY)
        began = monotonic()
        async with http.post(f"{self._url}/v1/recommend", json=self._body(tenant, user)) as response:
            answer = await response.json()
        if response.status == 200 and not answer["degraded"]:
            phase.took_ms.append((monotonic() - began) * 1e3)
        else:
            phase.failed += 1

    def _body(self, tenant: str, user: int) -> dict[str, Any]:
        events = EVENTS + self._visits.setdefault((tenant, user), 0)
        self._visits[tenant, user] += 1
        seen = [
            {"item_id": self._items[(7919 * user + step) % len(self._items)], "timestamp": START + 3600 * step} for step in range(events)
        ]
        return {"user_id": f"{user}", "tenant": tenant, "k": 5, "strategy": "retrieval", "cache": "bypass", "behaviours": seen}


@contextmanager
def cluster(model_dir: Path) -> Iterator[tuple[Application, Path]]:
    """The application with a copy of the model, in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "model"
        store = BundleStore(model_dir)
        shutil.copytree(store.open().path, copied / store.open().path.name)
        shutil.copy(model_dir / "current", copied)
        args = {
            "model_dir": str(copied),
            "encoder": {"backends": {"torch": "benchmarks.noting_encoder:NotingTorch"}, "order": ["torch"]},
            "generator": {"order": ["torch_beam"]},
        }
        with closing(_Ending(SharedCluster("fast", Path(directory)))) as shared:
            document = fixed({"gateway": GATEWAYS, "encoder": ENCODERS})
            with shared.cluster.application(document, args) as application:
                yield application, copied


@dataclass(frozen=True)
class _Ending:
    cluster: SharedCluster

    def close(self) -> None:
        self.cluster.end()


def encoders(application: Application) -> list[str]:
    """The ids of the replicas that Serve gives requests to."""
    status = application.cluster.node.serve_status()["applications"][application.name]
    return sorted(one["replica_id"] for one in status["deployments"]["encoder"]["replicas"] if one["state"] == "RUNNING")


def served(model_dir: Path) -> list[str]:
    """What came out, as Markdown."""
    items = [item.item_id for item in BundleStore(model_dir).open().catalogue.items]
    with cluster(model_dir) as (application, copied):
        eventually(lambda: len(application.running("gateway")) == GATEWAYS, "all gateways serve")
        eventually(lambda: len(encoders(application)) == ENCODERS, "all encoders serve")
        before, notes, traffic = encoders(application), Notes(copied), Traffic(application.url, items)
        slow, phases = before[0], list[Phase]()

        def measured(name: str, seconds: float) -> Phase:
            phase = Phase(name)
            asyncio.run(traffic.run(phase, seconds))
            notes.into(phase)
            return phase

        measured("warm-up", WARM_S)
        for _ in range(TURNS):
            phases.append(measured("calm", CALM_S))
            file_of(copied, "slow", slow).touch()
            phases.append(measured("one encoder slow", FAULT_S))
            _deploy(application, "gateway", user_config={"flags": {"hedge": True}})
            application.wait_until_ready()
            phases.append(measured("one encoder slow, hedged", FAULT_S))
            file_of(copied, "slow", slow).unlink()
            _deploy(application, "gateway", user_config={"flags": {"hedge": False}})
            application.wait_until_ready()
        phases.append(measured("calm again", CALM_S))
        _deploy(application, "encoder", num_replicas=ENCODERS + ADDED)
        phases.append(measured(f"{ADDED} encoders come", FAULT_S))
        eventually(lambda: len(encoders(application)) == ENCODERS + ADDED, "the new encoders serve")
        after = encoders(application)
        phases.append(measured(f"{ADDED} encoders more", FAULT_S))
    return report(phases, before, after, slow)


def _deploy(application: Application, name: str, **changes: Any) -> None:
    """Have Serve run the application with these changes to one deployment's entry."""
    entry = deepcopy(application.entry)
    for deployment in entry["deployments"]:
        if deployment["name"] == name:
            deployment.update(changes)
    application.deploy(entry)


def report(phases: Sequence[Phase], before: Sequence[str], after: Sequence[str], slow: str) -> list[str]:
    users = {f"{tenant}/{number}" for tenant in TENANTS for number in range(USERS)}
    moved = np.mean([in_order_of(user, before)[0] != in_order_of(user, after)[0] for user in users])
    rows = [
        [
            phase.name,
            f"{len(phase.took_ms):,}",
            f"{phase.failed}",
            f"{phase.at_home(after if 'more' in phase.name else before) * 100:.1f} %",
            f"{phase.share_of(slow) * 100:.1f} %",
            f"{phase.hits / max(1.0, phase.lookups) * 100:.1f} %",
            f"{np.percentile(phase.took_ms, 50):.0f}, {phase.p99_ms:.0f}",
        ]
        for phase in phases
    ]
    names = ("calm", "one encoder slow", "one encoder slow, hedged")
    calm, slowed, hedged = ([phase.p99_ms for phase in phases if phase.name == name] for name in names)
    ratios, with_hedging = (", ".join(f"{one / other:.2f}" for one, other in zip(some, calm, strict=True)) for some in (slowed, hedged))
    hottest = (1 / USERS) ** (1 / POPULARITY) / len(TENANTS)
    return [
        "# Where users' requests go, on a real cluster",
        "",
        f"{GATEWAYS} gateways and {len(before)} encoders (PyTorch, one thread) of the demo's model on this machine, with HAProxy;",
        f"{RATE:g} retrievals a second of {len(TENANTS)} tenants of {USERS} users, none from the cache, each with one event more than",
        f"the user's last; the user of each tenant that asks most has {hottest * 100:.0f} % of them. A slow encoder takes",
        f"{SLOW_S * 1e3:.0f} ms more for each batch. The p99 then, over that of the calm turn before: {ratios}; with `flags.hedge`:",
        f"{with_hedging}. Two encoders more gave {moved * 100:.0f} % of the users another home.",
        "",
        *table(["live, in order", "answers", "failed", "at home", "by the slowed encoder", "kept states found", "p50, p99 (ms)"], rows),
        "",
    ]
