"""Users are erased under load while one process after another is killed with -9; at the end no file has a byte of one of them.

Three kills in `make test`, a hundred in `make chaos`; `--drill-minutes` ends it sooner.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.bundle_store import BundleStore
from cluster.config import parse
from tests.chaos.rows import Row
from tests.chaos.served import CACHE_ACTOR, CONTROLLER, REPLICA, Served, served
from tests.clusters import SharedCluster
from tests.waiting import eventually, until_right

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3 * 3600)]
ARGS = {
    "encoder": {"order": ["onnxruntime", "torch"], "options": {"onnxruntime": {"state_bytes": 2**24}}},
    "generator": {"order": ["torch_beam"]},
}
QUICK = {"gateway": {"request_within_s": 12, "deadline_s": 2, "generation_deadline_s": 1, "ranking_deadline_s": 1}}
"""In short, since what is erased is erased once more when the longest request is over."""
REPLICAS = {"gateway": 2, "encoder": 2, "generator": 1, "ranker": 1, "switchboard": 1}
WORKERS = 4
READY_S = 1.0
ERASED, KEPT = "drill-erased-", "drill-kept-"
TRY_FOR_S = 600.0
"""More than Serve's controller may take to answer once it was killed."""
LOOK_AGAIN_S = 35.0
"""What a writer of SQLite takes at most until it looks whether one that is gone has left something to purge."""


@dataclass
class Drill:
    """Workers that store a user's events, ask, and erase the user, beside a request of the user and after it; each
    call until it succeeds."""

    url: str
    behaviours: list[dict[str, Any]]
    over: threading.Event = field(default_factory=threading.Event)
    erased: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def work(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=self.url, timeout=30) as http, ThreadPoolExecutor(1) as beside:
            while not self.over.is_set():
                turn += 1
                user = f"{KEPT if turn % 5 == 0 else ERASED}{number}-{turn}"
                events = [{**one, "user_id": user, "idempotency_key": f"{user}/{n}"} for n, one in enumerate(self.behaviours)]
                self.call(http, "POST", "/v1/events", {"events": events})
                self.call(http, "POST", "/v1/recommend", {"user_id": user, "k": 3})
                self.call(http, "POST", "/v1/recommend", self.request(user))
                if user.startswith(KEPT):
                    self.kept.append(user)
                    continue
                meanwhile = beside.submit(self.call, http, "POST", "/v1/recommend", self.request(user))
                self.call(http, "DELETE", f"/v1/users/{user}/history")
                meanwhile.result()  # it may have begun after the erasure, and is then kept
                self.call(http, "DELETE", f"/v1/users/{user}/history")
                self.erased.append(user)

    def request(self, user: str) -> dict[str, Any]:
        """Kept under the history that is sent, which an erasure does not change."""
        return {"user_id": user, "k": 3, "strategy": "retrieval", "behaviours": self.behaviours}

    def call(self, http: httpx.Client, method: str, path: str, body: Any = None) -> Any:
        def attempt() -> httpx.Response | None:
            response = None
            with suppress(httpx.TransportError):
                response = http.request(method, path, json=body)
                assert response.status_code not in (400, 401, 403, 422), response.text
            self.statuses["lost" if response is None else str(response.status_code)] += 1
            return response

        answered = until_right(attempt, lambda response: response is not None and response.is_success, TRY_FOR_S, every_s=0.3)
        assert answered is not None
        return answered.json()


@pytest.fixture
def args(long: bool) -> dict[str, Any]:
    return ARGS if long else ARGS | QUICK


@pytest.fixture
def drilled(model, cluster: SharedCluster, args: dict[str, Any], tmp_path: Path) -> Iterator[Served]:
    args = {**args, "events": {"url": f"sqlite:///{tmp_path}/events.db"}}
    with served(cluster, tmp_path, model.path.parent, args, replicas=REPLICAS) as serving:
        yield serving


def victims(serving: Served) -> dict[str, list[psutil.Process]]:
    titles = {name: f"{REPLICA}{serving.serving.name}:{name}" for name in REPLICAS} | {"cache": CACHE_ACTOR, "controller": CONTROLLER}
    return {kind: found for kind, title in titles.items() if (found := serving.processes(title))} | {"proxy": [serving.proxy()]}


def whole(serving: Served, gone: int) -> bool:
    running = serving.serving.all_running()
    return (
        all(len(running[name] - {gone}) == wanted for name, wanted in REPLICAS.items())
        and httpx.get(f"{serving.url}/readyz", timeout=120).status_code == 200
    )


def ready_for_a_second(serving: Served, gone: int = 0) -> None:
    since: float | None = None

    def holds() -> bool:
        nonlocal since
        if not whole(serving, gone):
            since = None
            return False
        since = since or time.monotonic()
        return time.monotonic() - since >= READY_S

    eventually(holds, "every process is there and ready", TRY_FOR_S, every_s=0.25)


def named_in(*directories: Path, name: str = ERASED) -> list[str]:
    """Files that hold the beginning of an erased user's id, or this name."""
    files = [file for directory in directories for file in directory.rglob("*") if file.is_file() and not file.is_symlink()]
    found = []
    for file in files:
        with suppress(OSError):
            if name.encode() in file.read_bytes():
                found.append(str(file))
    return found


def test_no_byte_of_an_erased_user_is_left_while_processes_are_killed(
    drilled: Served, args: dict[str, Any], tmp_path: Path, record, long: bool, drill_minutes: float
):
    rng, killed = random.Random(7), Counter[str]()
    most, until = (100 if long else 3), time.monotonic() + 60 * drill_minutes
    items = [item.item_id for item in BundleStore(drilled.model_dir).open().catalogue.items][:6]
    drill = Drill(drilled.url, [{"item_id": item, "timestamp": 1_700_000_000 + 60 * place} for place, item in enumerate(items)])
    logs = Path(drilled.serving.cluster.node.plan.temporary).resolve()
    with record(Row(f"erasures under load, {most} kills", "no byte of an erased user in any store, cache, log")) as row:
        with ThreadPoolExecutor(WORKERS) as pool:
            working = [pool.submit(drill.work, number) for number in range(WORKERS)]
            try:
                ready_for_a_second(drilled)
                while killed.total() < most and time.monotonic() < until:
                    kind, processes = rng.choice(sorted(victims(drilled).items()))
                    victim = rng.choice(processes)
                    with suppress(psutil.NoSuchProcess):
                        victim.kill()
                        killed[kind] += 1
                    ready_for_a_second(drilled, victim.pid)
            finally:
                drill.over.set()
            for one in working:
                one.result()
        row.figures |= {"killed": dict(killed), "erased": len(drill.erased), "kept": len(drill.kept), "statuses": dict(drill.statuses)}

        time.sleep(parse({**args, "model_dir": str(drilled.model_dir)}).longest_request_s)  # then they are erased once more
        with suppress(AssertionError):
            eventually(lambda: not named_in(tmp_path), "the log is purged", 2 * LOOK_AGAIN_S, every_s=1)
        left = named_in(tmp_path, logs)
        row.notes += left
        with httpx.Client(base_url=drilled.url, timeout=30) as http:
            tiers = Counter(drill.call(http, "POST", "/v1/recommend", drill.request(user))["cache"]["tier"] for user in drill.erased[-200:])
            histories = [len(drill.call(http, "GET", f"/v1/users/{user}/history")["events"]) for user in drill.erased]
            kept = [len(drill.call(http, "GET", f"/v1/users/{user}/history")["events"]) for user in drill.kept]
        row.figures |= {"tiers": dict(tiers)}
        row.claim("users erased", len(drill.erased), least=most)
        row.claim("files that name an erased user", len(left), most=0)
        row.claim("files that name another user", len(named_in(tmp_path, name=KEPT)), least=1)
        row.claim("erased users with events", sum(map(bool, histories)), most=0)
        row.claim("kept answers of erased users", tiers.total() - tiers["computed"], most=0)
        row.claim("other users' events lost", sum(len(items) - count for count in kept), most=0)
