"""Damaged models, engines for other machines, a disk that is full: an error that says so or the next backend, and the last good model."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.bundle import WEIGHTS
from cluster.bundle_store import BundleStore
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster
from tests.documents import ROOT
from tests.integration.conftest import PATIENT, PATIENT_READS, behaviours
from tests.waiting import eventually

pytestmark = pytest.mark.cluster
MUST = "clear error or next backend; the last good model keeps serving"
ARGS = {
    "encoder": {
        "order": ["tensorrt", "onnxruntime", "torch"],
        "backends": {"tensorrt": "tests.chaos.engines:OnAnotherGpu"},
        "probe_interval_s": 0.5,
    },
    "generator": {"order": ["torch_beam"]},
}
HISTORY = {"behaviours": behaviours(3, 14, 15), "request_time": 1_700_100_000, "strategy": "retrieval"}
PUBLISH = """
import sys
from pathlib import Path
from cluster.bundle_store import BundleStore
store = BundleStore(Path(sys.argv[1]))
with store.recompile(store.open()) as draft:
    pass
"""


def encoded(answer: httpx.Response) -> dict:
    return next(stage for stage in answer.json()["stages"] if stage["stage"] == "encode")


def reasons(answer: httpx.Response) -> str:
    return "; ".join(f"{one['backend']}: {one['reason']}" for one in encoded(answer)["fallback_from"])


@pytest.fixture(scope="module")
def damaged(compiled_hstu, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    """Version 1: the model; 2: with engines, one of them altered; 3: one whose weights were cut off, and current. Version 2 serves."""
    root = tmp_path_factory.mktemp("damaged") / compiled_hstu.path.parent.name
    shutil.copytree(compiled_hstu.path.parent, root)
    store = BundleStore(root)
    last_good = store.current()
    with store.recompile(store.open()):
        pass
    cut(root / str(store.current()) / WEIGHTS)
    graph = root / f"{last_good}/onnx/retrieve.fp32.onnx"  # the one that is served
    graph.write_bytes(bytes(byte ^ 1 for byte in graph.read_bytes()))
    patient = {"gateway": PATIENT, "events": {"url": f"sqlite:///{root.parent}/events/events.db", **PATIENT_READS}}
    (root.parent / "events").mkdir()
    with served(cluster, tmp_path_factory.mktemp("served"), root, {**ARGS, **patient}) as serving:
        yield serving


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def test_a_version_that_was_cut_off_is_passed_over_and_a_corrupt_engine_gives_way_to_the_next(damaged: Served, record, run: int):
    with record(Row("corrupt or truncated artifact", MUST, run)) as row:
        answer = damaged.ask(**HISTORY)
        refused = [line for line in damaged.serving.cluster.logs().splitlines() if "a model version was refused" in line]
        row.figures |= {"reasons": reasons(answer), "version": answer.json()["model_version"], "log": refused[:1]}
        row.claim("answered 200", answer.status_code, least=200, most=200)
        row.claim("by the last good version", answer.json()["model_version"].endswith("/2"), least=1)
        row.claim("by torch, as onnxruntime's file is corrupt", encoded(answer)["backend"] == "torch", least=1)
        row.claim("the reason names the checksum", "does not match the checksum" in reasons(answer), least=1)


def test_an_engine_for_another_gpu_gives_way_to_the_next_and_says_why(damaged: Served, record, run: int):
    with record(Row("engine for another GPU", MUST, run)) as row:
        answer = damaged.ask(**HISTORY)
        row.figures |= {"reasons": reasons(answer)}
        row.claim("answered 200", answer.status_code, least=200, most=200)
        row.claim("tensorrt says which GPUs its engines are for", "engines for sm_80" in reasons(answer), least=1)
        row.claim("and which is here", "none for this GPU, sm_90" in reasons(answer), least=1)


def test_a_full_disk_refuses_events_with_a_reason_and_recommends_on(damaged: Served, record, run: int):
    """No file of the gateway may grow: what a full disk does to the event store, without a disk of its own to fill."""
    body = {"user_id": f"full-{run}", "item_id": "3", "timestamp": 1_700_000_000}
    with record(Row("disk full: the event store", MUST, run)) as row:
        assert httpx.post(f"{damaged.url}/v1/events", json=body, timeout=120).status_code < 300
        gateways = damaged.replicas("gateway")
        before = [gateway.rlimit(resource.RLIMIT_FSIZE) for gateway in gateways]
        for gateway in gateways:
            gateway.rlimit(resource.RLIMIT_FSIZE, (4096, before[0][1]))
        try:
            stored = [httpx.post(f"{damaged.url}/v1/events", json={**body, "timestamp": 1_700_000_001 + n}, timeout=120) for n in range(20)]
            answers = [damaged.ask(**HISTORY) for _ in range(20)]
        finally:
            for gateway, limits in zip(gateways, before, strict=True):
                gateway.rlimit(resource.RLIMIT_FSIZE, limits)
        eventually(lambda: httpx.post(f"{damaged.url}/v1/events", json=body, timeout=120).status_code < 300, "events are stored again", 120)
        kept = httpx.get(f"{damaged.url}/v1/users/full-{run}/history", timeout=120).json()["events"]
        acknowledged = sum(one.status_code < 300 for one in stored)
        row.figures |= {"refusal": next((one.text[:300] for one in stored if one.status_code >= 300), "none")}
        row.claim("events refused", len(stored) - acknowledged, least=1)
        row.claim("refused with a 503", sum(one.status_code == 503 for one in stored) / max(1, len(stored) - acknowledged), least=1)
        row.claim("recommendations answered meanwhile", sum(one.status_code == 200 for one in answers) / len(answers), least=1)
        row.claim("acknowledged events that are lost", max(0, acknowledged + 1 - len(kept)), most=0)
        row.claim("gateways restarted", len(set(gateways) - set(damaged.replicas("gateway"))), most=0)


def test_publishing_to_a_full_disk_leaves_the_current_version_alone(model, record, run: int, tmp_path: Path):
    root = tmp_path / model.path.parent.name
    shutil.copytree(model.path.parent, root, ignore=shutil.ignore_patterns("events.db*"))
    before = BundleStore(root).versions(), BundleStore(root).current()
    with record(Row("disk full: publishing a model", MUST, run)) as row:
        full = subprocess.run(
            [sys.executable, "-c", PUBLISH, str(root)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        store = BundleStore(root)
        row.figures |= {"error": full.stderr.strip().splitlines()[-1:]}
        row.claim("publishing failed", full.returncode != 0, least=1)
        row.claim("versions and the current one are as they were", (store.versions(), store.current()) == before, least=1)
        row.claim("drafts left behind", len(list(root.glob(".draft-*"))), most=0)
        row.claim("the current version opens", bool(store.open().catalogue.items), least=1)
