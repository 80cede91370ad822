"""How large a cluster do so many users need? Computed from what a request costs each part of genrec, in processor time.

    python -m benchmarks.capacity measure      # with the demo's model (run `make demo ONCE=1` before): serves, asks, files the figures
    python -m benchmarks.capacity plan         # from the figures that are filed; --write makes docs/capacity.md

Processor time, not the clock's, is measured: it hardly depends on what else the machine does, and it adds up. What a role's processes use
while no request comes is taken off. Assumptions about users stand in `Load`, prices in `Prices`: give your own as options. The plan is for
`anticipate: false`: no answer is computed ahead after an event, and no cache shard is asked for a user's usual request.
"""

import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import httpx
import numpy as np
import psutil
import typer

from cluster.bundle_store import BundleStore
from cluster.config_file import read
from deployments.cli.demo import request_of
from deployments.cli.local_serve import LocalServe
from deployments.training.dataset_options import DatasetOptions
from integrations.hstu.config import HSTUConfig
from integrations.hstu.state_options import state_planes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROLES = {
    "gateway": ("ServeReplica:genrec:gateway",),
    "encoder": ("ServeReplica:genrec:encoder",),
    "generator": ("ServeReplica:genrec:generator",),
    "ranker": ("ServeReplica:genrec:ranker",),
    "cache shard": ("CacheShard", "CacheActor"),
    "proxy": ("ProxyActor", "haproxy"),
}
CLIENTS = 8
app = typer.Typer(no_args_is_help=True, help=__doc__)


@dataclass(frozen=True)
class Load:
    """How many users come, and what is asked for them."""

    users: float = 1e8
    active_daily: float = 0.2
    requests_a_day: float = 10.0
    events_a_day: float = 20.0
    peak: float = 3.0
    l1_share: float = 0.10
    l2_share: float = 0.30
    history: int = 200
    sessions_h: float = 1.0
    """Hours for which the state of an active user is kept."""

    def peak_per_s(self, a_day: float) -> float:
        return self.users * self.active_daily * a_day / 86_400 * self.peak

    @property
    def active_at_peak(self) -> float:
        """Users whose state is kept at the busiest time."""
        return self.users * self.active_daily / 24 * self.sessions_h * self.peak


@dataclass(frozen=True)
class Prices:
    """In dollars an hour; what large clouds ask for, roughly, on demand."""

    core: float = 0.04
    gigabyte: float = 0.005


@dataclass(frozen=True)
class Part:
    """A line of the plan. `cores` and `gigabytes` of all its replicas together."""

    name: str
    per_s: float
    ms: float
    cores: float
    replicas: int
    gigabytes: float


@app.command()
def measure(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    requests: Annotated[int, typer.Option(help="of each kind")] = 1500,
    port: Annotated[int, typer.Option()] = 8017,
) -> None:
    """Serve, ask for each kind of answer, and file what each role's processes used for it."""
    with tempfile.TemporaryDirectory() as directory:
        generator = {**read(ROOT / "ray_config.yaml").generator.model_dump(mode="json"), "order": ["torch_beam"]}
        changes = {"model_dir": str(model_dir), "events": {"url": f"sqlite:///{directory}/events.db"}, "generator": generator}
        serving = LocalServe(ROOT / "ray_config.yaml", changes, port=port, log=Path(".genrec/capacity.log"))
        with serving as url:
            figures = asyncio.run(_measured(url, serving.pid, requests))
            caches = httpx.get(f"{url}/v1/cache", timeout=30).json()
    bundle = BundleStore(model_dir).open()
    l2 = next(tier for tier in caches["tiers"] if tier["tier"] == "l2")
    filed = {
        "when": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("ray", "onnxruntime", "torch")},
        "model": {"version": bundle.version, "config": bundle.manifest.model.config},
        "cpu_ms_per_request": figures,
        "bytes_per_answer": l2["used_bytes"] / max(1, l2["entries"]),
    }
    path = RESULTS / "capacity_figures_cpu.json"
    path.write_text(json.dumps(filed, indent=2) + "\n")
    print(path.read_text())


async def _measured(url: str, serving: int, count: int) -> dict[str, dict[str, float]]:
    """Kind of answer -> role -> milliseconds of processor time a request."""
    dataset, rng = DatasetOptions(name="ml-100k").read(), np.random.default_rng(0)
    users = [int(user) for user in rng.choice(dataset.interactions.users, min(count, dataset.interactions.users), replace=False)]
    bodies = [{**request_of(dataset, user, 10), "request_time": None} for user in users]
    kinds: dict[str, list[dict[str, Any]]] = {
        "retrieval, computed": [{**body, "strategy": "retrieval", "cache": "bypass"} for body in bodies],
        "unified, computed": [{**body, "strategy": "unified", "cache": "bypass"} for body in bodies],
        "retrieval, computed and kept": [{**body, "strategy": "retrieval", "cache": "refresh"} for body in bodies],
        "from l1": [{**bodies[0], "strategy": "retrieval"}],
    }
    events = [{"user_id": body["user_id"], "item_id": body["behaviours"][0]["item_id"]} for body in bodies]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=CLIENTS)) as http:
        for body in kinds.values():
            await _ask(http, "/v1/recommend", body, 200)
        idle = await _used_while(serving, asyncio.sleep(10))
        per_s = {role: used / 10 for role, used in idle.items()}
        found = {}
        for kind, body in kinds.items():
            found[kind] = await _per_request(serving, per_s, _ask(http, "/v1/recommend", body, count), count)
        found["event"] = await _per_request(serving, per_s, _ask(http, "/v1/events", events, count), count)
        await _ask(http, "/v1/recommend", [{**body, "strategy": "retrieval"} for body in bodies], len(bodies))  # so that l2 holds something
    return found


async def _per_request(serving: int, idle_per_s: Mapping[str, float], work: Any, count: int) -> dict[str, float]:
    began = time.monotonic()
    used = await _used_while(serving, work)
    seconds = time.monotonic() - began
    return {role: round(max(0.0, used[role] - idle_per_s[role] * seconds) * 1e3 / count, 4) for role in used}


async def _used_while(serving: int, work: Any) -> dict[str, float]:
    before = _used(serving)
    await work
    after = _used(serving)
    return {role: after[role] - before[role] for role in after}


def _used(serving: int) -> dict[str, float]:
    """Seconds of processor time of each role's processes."""
    used = dict.fromkeys(ROLES, 0.0)
    for process in psutil.Process(serving).children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        for role, names in ROLES.items():
            if any(name in title for name in names):
                used[role] += times.user + times.system
    return used


async def _ask(http: aiohttp.ClientSession, path: str, bodies: Sequence[dict[str, Any]], count: int) -> None:
    """That many, in turns, a few at a time."""
    numbers: Iterator[int] = iter(range(count))

    async def client() -> None:
        for number in numbers:
            async with http.post(path, json=bodies[number % len(bodies)]) as response:
                response.raise_for_status()
                await response.read()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


@app.command()
def plan(
    *,
    users: Annotated[float, typer.Option()] = Load.users,
    active_daily: Annotated[float, typer.Option(help="share of users who come on a day")] = Load.active_daily,
    requests_a_day: Annotated[float, typer.Option(help="of a user who comes")] = Load.requests_a_day,
    events_a_day: Annotated[float, typer.Option(help="of a user who comes")] = Load.events_a_day,
    peak: Annotated[float, typer.Option(help="busiest hour over the mean")] = Load.peak,
    l1_share: Annotated[float, typer.Option(help="answers from a gateway's memory")] = Load.l1_share,
    l2_share: Annotated[float, typer.Option(help="answers from the cluster's cache")] = Load.l2_share,
    history: Annotated[int, typer.Option(help="events kept of a user")] = Load.history,
    utilisation: Annotated[float, typer.Option(help="of a core at the busiest time")] = 0.6,
    core: Annotated[float, typer.Option(help="dollars an hour")] = Prices.core,
    gigabyte: Annotated[float, typer.Option(help="dollars an hour")] = Prices.gigabyte,
    write: Annotated[bool, typer.Option("--write", help="to docs/capacity.md")] = False,
) -> None:
    """Replicas, memory, cache shards and cost, as Markdown."""
    figures = json.loads((RESULTS / "capacity_figures_cpu.json").read_text())
    load = Load(users, active_daily, requests_a_day, events_a_day, peak, l1_share, l2_share, history)
    text = _page(figures, load, Prices(core, gigabyte), utilisation)
    print(text)
    if write:
        (ROOT / "docs" / "capacity.md").write_text(text)


def parts(figures: dict[str, Any], load: Load, kind: str, utilisation: float) -> list[Part]:
    """The roles' shares of the busiest second. `kind` is how the answers that are not kept are computed.

    Whatever asks l2 is taken to cost a gateway what looking there and keeping an answer cost; one that is found there costs less.
    """
    asked, ms = load.peak_per_s(load.requests_a_day), figures["cpu_ms_per_request"]
    computed, kept = asked * (1 - load.l1_share - load.l2_share), asked * (load.l1_share + load.l2_share)
    config = HSTUConfig(**figures["model"]["config"])
    generates, ranked_ms = ms[kind]["generator"] > IDLE_MS, ms[kind].get("ranker", 0.0)  # figures of before have none
    decoder = any(costs["generator"] > IDLE_MS for costs in ms.values())  # then states are kept whatever strategy is asked for
    state_gb = load.active_at_peak * load.history * row_bytes(config, decoder=decoder) / 1e9
    answers_gb = load.active_at_peak * figures["bytes_per_answer"] / 1e9
    events = load.peak_per_s(load.events_a_day)

    def part(name: str, role: str, per_s: float, each_ms: float, gigabytes: float = 0.0) -> Part:
        cores = per_s * each_ms / 1e3 / utilisation
        replicas = max(2, int(np.ceil(max(cores, per_s / MOST_PER_S.get(role, np.inf)))))
        return Part(name, per_s, each_ms, cores, replicas, gigabytes + replicas * RESIDENT_GB[role])

    l2_ms = ms["retrieval, computed and kept"]["gateway"] - ms["retrieval, computed"]["gateway"]
    of_gateway = (computed * ms[kind]["gateway"] + kept * ms["from l1"]["gateway"]) / asked + (1 - load.l1_share) * l2_ms
    return [
        part("proxies", "proxy", asked, ms[kind]["proxy"]),
        part("gateways", "gateway", asked, of_gateway),
        part("encoders, with users' states in fp16", "encoder", computed, ms[kind]["encoder"], state_gb),
        *([part("generators", "generator", computed, ms[kind]["generator"])] if generates else []),
        *([part("rankers, without what they keep of users", "ranker", computed, ranked_ms)] if ranked_ms > IDLE_MS else []),
        part("cache shards", "cache shard", asked * (1 - load.l1_share), ms["retrieval, computed and kept"]["cache shard"], answers_gb),
        *[
            part(f"{PLURAL[role]}, for events", role, events, each)
            for role, each in ms["event"].items()
            if each > IDLE_MS and role not in OF_ANTICIPATION
        ],
    ]


def row_bytes(config: HSTUConfig, *, decoder: bool) -> int:
    """Bytes that an encoder keeps of an event in fp16: keys and values and, for a decoder's prompts, the user's state after it."""
    return sum(plane.row_bytes for plane in state_planes(config, np.dtype(np.float16), with_states=decoder).values())


LARGE = {"items": 3700, "layers": 8, "dim": 512, "heads": 8, "attention_dim": 64, "linear_dim": 64, "max_history": 2048, "max_length": 2048}
APPENDED, APPEND_MS, WHOLE_MS = "append_cpu_2026-11-30.md", 5.466, 27.54
"""The largest model of benchmarks/append.py, and its milliseconds of processor time at 200 events, of ONNX Runtime's whole encoder."""
IDLE_MS = 0.05
"""A role that uses no more for a request has no part in it: its processes do something by themselves, not always the same."""
OF_ANTICIPATION = ("cache shard",)
"""What an event costs these roles is anticipation's look for the user's usual request: nothing without it."""
PLURAL = {
    "proxy": "proxies",
    "gateway": "gateways",
    "encoder": "encoders",
    "generator": "generators",
    "ranker": "rankers",
    "cache shard": "cache shards",
}
MOST_PER_S = {"cache shard": 600}
"""Beyond it one misses `l2_deadline_ms`, whatever its core has left: benchmarks/cache_actor.py, as filed."""
RESIDENT_GB = {"proxy": 0.3, "gateway": 0.4, "encoder": 0.6, "generator": 0.9, "ranker": 0.5, "cache shard": 0.3}
"""Of a replica that serves the demo's model and keeps nothing yet, as `ps` shows it; a ranker's is of benchmarks/size.py, as filed."""


def _page(figures: dict[str, Any], load: Load, prices: Prices, utilisation: float) -> str:
    asked, events = load.peak_per_s(load.requests_a_day), load.peak_per_s(load.events_a_day)
    lines = [
        f"# A cluster for {load.users:,.0f} users",
        "",
        (
            "Computed by `python -m benchmarks.capacity plan --write` from [what a request was measured to cost](../benchmarks/results/"
            "capacity_figures_cpu.json) (`python -m benchmarks.capacity measure`), in milliseconds of processor time of "
            f"{figures['machine']}, {figures['when']}. Your users differ: every assumption is an option."
        ),
        "",
        "## Who comes",
        "",
        (
            f"{load.active_daily:.0%} of the users on a day, each with {load.requests_a_day:g} requests and {load.events_a_day:g} events; "
            f"{load.peak:g} times as many in the busiest hour as on average: **{asked:,.0f} requests and {events:,.0f} events a second**. "
            f"{load.l1_share:.0%} of the answers come from a gateway's memory, {load.l2_share:.0%} from the cluster's cache. "
            f"Cores are to be busy {utilisation:.0%} of the time. {load.active_at_peak:,.0f} users are in a session at the busiest time; "
            f"what is kept of them is {load.history} events' keys and values, where the model has a decoder also their states, and one "
            "answer."
        ),
        "",
        (
            "**No answer is computed ahead**: the plan is for `gateway: {flags: {anticipate: false}}`. It was measured as shipped, with "
            "histories in the requests: an event then has a cache shard asked for what to compute ahead, and nothing is. The shard's part "
            f"of that ({figures['cpu_ms_per_request']['event']['cache shard']:.3f} ms) is left out; a gateway's is in its figure for "
            f"events. As shipped, where users are asked for by their stored histories, each of the {events:,.0f} events a second costs "
            "this look and may have one more answer computed, beside the "
            f"{asked * (1 - load.l1_share - load.l2_share):,.0f} that requests have computed."
        ),
    ]
    for kind in ("unified, computed", "retrieval, computed"):
        lines += ["", f"## Answers that are {kind.split(',')[0]}", "", *_table(parts(figures, load, kind, utilisation), prices)]
    return "\n".join([*lines, *_notes(figures, load, utilisation)])


def _table(plan: list[Part], prices: Prices) -> list[str]:
    head = ["| | a second | CPU ms each | cores | replicas of one core | memory (GB) | $ an hour |", "|---|---|---|---|---|---|---|"]
    costs = [one.cores * prices.core + one.gigabytes * prices.gigabyte for one in plan]
    body = [
        f"| {one.name} | {one.per_s:,.0f} | {one.ms:.3f} | {one.cores:,.0f} | {one.replicas:,} | {one.gigabytes:,.0f} | {cost:,.2f} |"
        for one, cost in zip(plan, costs, strict=True)
    ]
    cores, memory = sum(one.cores for one in plan), sum(one.gigabytes for one in plan)
    return [*head, *body, f"| **all** | | | **{cores:,.0f}** | | **{memory:,.0f}** | **{sum(costs):,.2f}** |"]


def _notes(figures: dict[str, Any], load: Load, utilisation: float) -> list[str]:
    computed = load.peak_per_s(load.requests_a_day) * (1 - load.l1_share - load.l2_share)

    def cores(each_ms: float) -> float:
        return computed * each_ms / 1e3 / utilisation

    def kept(model: HSTUConfig, decoder: bool) -> tuple[str, str]:
        each = row_bytes(model, decoder=decoder)
        return f"{each:,}", f"{load.active_at_peak * load.history * each / 1e12:,.2f}"

    small, large = HSTUConfig(**figures["model"]["config"]), HSTUConfig(**LARGE)
    rows = [
        f"| {name} | {one.layers} | {one.dim} | {' | '.join(cell for decoder in (False, True) for cell in kept(one, decoder))} |"
        for name, one in (("the demo's", small), ("a large one", large))
    ]
    return [
        "",
        "## What grows with the model",
        "",
        f"What encoders keep of {load.history} events of each user in a session, fp16:",
        "",
        "| model | layers | width | bytes an event | TB in all | before a decoder: bytes an event | TB in all |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        (
            f"One more event behind what is kept costs the large model {APPEND_MS:.1f} ms of a core at 200 events, all of them "
            f"{WHOLE_MS:.1f} ms ([measured](../benchmarks/results/{APPENDED})): {cores(APPEND_MS):,.0f} cores of encoders with kept "
            f"states, {cores(WHOLE_MS):,.0f} without. Scores of all items grow with the catalogue, which is the demo's here: "
            f"{small.items:,} items."
        ),
        "",
        "## What does not scale by adding replicas",
        "",
        (
            f"* **The event store.** One PostgreSQL took 1,400 acknowledged events a second one by one, and 31,000 in calls of many; "
            f"this load has {load.peak_per_s(load.events_a_day):,.0f}. Send "
            'events in batches (`{"events": [...]}`), or give each group of tenants a cluster and a database of its own.'
        ),
        (
            "* **The switchboard.** Every process reports once in two seconds to one that gathers the reports: thousands of replicas are "
            "several clusters, each behind its own address, with users shared out by the hash of their id, as the caches and the encoders "
            "do it inside a cluster."
        ),
        "* **Ray's head** has to be kept by Redis (cluster/launch/kuberay.yaml).",
        "",
        (
            f"Versions: {', '.join(f'{name} {number}' for name, number in figures['versions'].items())}; "
            f"model {figures['model']['version']}. Not measured: many machines, networks between them, GPUs."
        ),
        "",
    ]


if __name__ == "__main__":
    app()
